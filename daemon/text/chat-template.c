/* SPDX-License-Identifier: Apache-2.0 */
/* Templates from source to pieces, and pieces to ids. */

#include "daemon/text/chat-template.h"
#include "daemon/text/jinja.h"
#include "daemon/text/utf8.h"

#include <string.h>

/* The longest template in use has some 25 KB. */
#define SOURCE_BYTES_MAX (1U << 20)
#define TREE_BYTES_MAX   (128U << 20)
/* A render may use so much whatever comes in, and so much more for each byte of the messages. */
#define RENDER_BYTES          (32U << 20)
#define RENDER_BYTES_PER_BYTE 32
#define RENDER_STEPS          1000000
#define RENDER_STEPS_PER_BYTE 16

struct ChatTemplate {
    JinjaArena arena;
    JinjaNode *root;
};

/* Jinja reads \r\n and \r as \n. */
static size_t copy_with_plain_newlines(const char *source, size_t n, char *ret)
{
    size_t length = 0;

    for (size_t i = 0; i < n; i++) {
        ret[length++] = source[i] == '\r' ? '\n' : source[i];
        i += source[i] == '\r' && i + 1 < n && source[i + 1] == '\n';
    }
    return length;
}

int chat_template_new(const char *source, ChatTemplate **ret, ErrorDetail *reterr)
{
    _cleanup_(chat_template_freep) ChatTemplate *template_ = calloc(1, sizeof(*template_));
    Jinja jinja = {.reterr = reterr, .line = 1, .max_steps = UINT64_MAX};
    size_t n = strlen(source);
    char *copy;

    if (!template_)
        return error_origin(-ENOMEM);
    template_->arena = JINJA_ARENA_NULL(TREE_BYTES_MAX);
    jinja.arena = &template_->arena;
    if (n > SOURCE_BYTES_MAX)
        return jinja_syntax_error(&jinja, 1, "the template has more than %u bytes", SOURCE_BYTES_MAX);
    if (utf8_valid_prefix(source, n) != n)
        return jinja_syntax_error(&jinja, 1, "the template is not valid UTF-8");
    copy = jinja_alloc(&jinja, n + 1);
    if (!copy)
        return jinja_alloc_failed(&jinja);
    n = copy_with_plain_newlines(source, n, copy);
    JINJA_TRY(jinja_parse(&jinja, copy, n, &template_->root));
    *ret = TAKE_PTR(template_);
    return 0;
}

ChatTemplate *chat_template_free(ChatTemplate *template_)
{
    if (!template_)
        return NULL;
    jinja_arena_deinit(&template_->arena);
    free(template_);
    return NULL;
}

/* ---- rendering -------------------------------------------------------------------------------------------------------------------- */

static int set_value(Jinja *jinja, JinjaDict *dict, const char *name, JinjaValue value)
{
    JinjaValue key;

    JINJA_TRY(jinja_string_new(jinja, name, strlen(name), true, &key));
    return jinja_dict_set(jinja, dict, key, value);
}

static int set_text(Jinja *jinja, JinjaDict *dict, const char *name, const char *text, bool trusted)
{
    JinjaValue value = {.type = JINJA_NONE};

    if (text) {
        size_t n = strlen(text);

        if (utf8_valid_prefix(text, n) != n)
            return jinja_fail(jinja, "the %s is not valid UTF-8", name);
        JINJA_TRY(jinja_value_of_string(jinja, (JinjaString){text, n, NULL, trusted}, &value));
    }
    return set_value(jinja, dict, name, value);
}

static int set_messages(Jinja *jinja, const ChatMessage *messages, size_t n)
{
    JinjaValue list, message;

    JINJA_TRY(jinja_new_list(jinja, &list));
    for (size_t i = 0; i < n; i++) {
        JINJA_TRY(jinja_new_dict(jinja, &message));
        JINJA_TRY(set_text(jinja, message.dict, "role", messages[i].role, false));
        JINJA_TRY(set_text(jinja, message.dict, "content", messages[i].content, false));
        JINJA_TRY(jinja_list_push(jinja, list.list, message));
    }
    return set_value(jinja, &jinja->globals->variables, "messages", list);
}

static int add_piece(ChatPieces *pieces, const char *text, size_t n, bool trusted)
{
    char *copy;

    if (pieces->n == pieces->capacity) {
        size_t capacity = MAX(2 * pieces->capacity, (size_t)8);
        ChatPiece *grown = realloc(pieces->pieces, capacity * sizeof(*grown));

        if (!grown)
            return error_origin(-ENOMEM);
        pieces->pieces = grown;
        pieces->capacity = capacity;
    }
    copy = malloc(n + 1);
    if (!copy)
        return error_origin(-ENOMEM);
    memcpy(copy, text, n);
    copy[n] = 0;
    pieces->pieces[pieces->n++] = (ChatPiece){copy, n, trusted};
    return 0;
}

/* Runs of equal tags. */
static int cut_into_pieces(const JinjaBuffer *output, ChatPieces *ret)
{
    for (size_t begin = 0; begin < output->n;) {
        size_t end = begin + 1;

        while (end < output->n && output->tags[end] == output->tags[begin])
            end++;
        JINJA_TRY(add_piece(ret, output->data + begin, end - begin, output->tags[begin]));
        begin = end;
    }
    return 0;
}

static int render(Jinja *jinja, const ChatTemplate *template_, const ChatMessage *messages, size_t n_messages, bool add_generation_prompt,
                  const char *bos_token, const char *eos_token)
{
    JinjaDict *globals;

    JINJA_TRY(jinja_scope_push(jinja, NULL));
    jinja->globals = jinja->scope;
    globals = &jinja->globals->variables;
    JINJA_TRY(set_messages(jinja, messages, n_messages));
    JINJA_TRY(set_value(jinja, globals, "add_generation_prompt", (JinjaValue){.type = JINJA_BOOL, .boolean = add_generation_prompt}));
    JINJA_TRY(set_value(jinja, globals, "tools", (JinjaValue){.type = JINJA_NONE}));
    JINJA_TRY(set_value(jinja, globals, "documents", (JinjaValue){.type = JINJA_NONE}));
    if (bos_token)
        JINJA_TRY(set_text(jinja, globals, "bos_token", bos_token, true));
    if (eos_token)
        JINJA_TRY(set_text(jinja, globals, "eos_token", eos_token, true));
    return jinja_run(jinja, template_->root);
}

static uint64_t bytes_of(const ChatMessage *messages, size_t n)
{
    uint64_t bytes = 128 * (uint64_t)n; /* each message is a mapping of two */

    for (size_t i = 0; i < n; i++)
        bytes += (messages[i].role ? strlen(messages[i].role) : 0) + (messages[i].content ? strlen(messages[i].content) : 0);
    return bytes;
}

int chat_template_render(const ChatTemplate *template_, const ChatMessage *messages, size_t n_messages, bool add_generation_prompt,
                         const char *bos_token, const char *eos_token, ChatPieces *ret, ErrorDetail *reterr)
{
    _cleanup_(chat_pieces_clearp) ChatPieces pieces = CHAT_PIECES_NULL;
    uint64_t bytes = bytes_of(messages, n_messages);
    JinjaArena arena = JINJA_ARENA_NULL(RENDER_BYTES + RENDER_BYTES_PER_BYTE * bytes);
    JinjaBuffer output = {0};
    Jinja jinja = {.arena = &arena, .reterr = reterr, .line = 1, .max_steps = RENDER_STEPS + RENDER_STEPS_PER_BYTE * bytes, .output = &output};
    int r;

    r = render(&jinja, template_, messages, n_messages, add_generation_prompt, bos_token, eos_token);
    if (r == 0)
        r = cut_into_pieces(&output, &pieces);
    jinja_arena_deinit(&arena);
    if (r)
        return error_trace(r);
    *ret = pieces;
    pieces = CHAT_PIECES_NULL;
    return 0;
}

void chat_pieces_clear(ChatPieces *pieces)
{
    for (size_t i = 0; i < pieces->n; i++)
        free(pieces->pieces[i].text);
    free(pieces->pieces);
    *pieces = CHAT_PIECES_NULL;
}

/* ---- encoding --------------------------------------------------------------------------------------------------------------------- */

/* Ordinary text since the last special token; it may come from several pieces. */
typedef struct OrdinaryRun {
    char *text; /* room for all pieces */
    size_t n;
} OrdinaryRun;

static void run_add(OrdinaryRun *run, const char *text, size_t n)
{
    if (n)
        memcpy(run->text + run->n, text, n);
    run->n += n;
}

static int run_flush(OrdinaryRun *run, const Tokenizer *tokenizer, TokenList *list)
{
    size_t n = run->n;

    run->n = 0;
    return n ? tokenizer_encode(tokenizer, run->text, n, false, list) : 0;
}

static int encode_trusted(const ChatPiece *piece, const Tokenizer *tokenizer, OrdinaryRun *run, TokenList *list)
{
    for (size_t done = 0; done < piece->length;) {
        size_t begin = 0, length = 0;
        int32_t id = tokenizer_find_special(tokenizer, piece->text + done, piece->length - done, &begin, &length);

        if (id < 0) {
            run_add(run, piece->text + done, piece->length - done);
            break;
        }
        run_add(run, piece->text + done, begin);
        JINJA_TRY(run_flush(run, tokenizer, list));
        JINJA_TRY(token_list_append(list, &id, 1));
        done += begin + length;
    }
    return 0;
}

static int encode_pieces(const ChatPieces *pieces, const Tokenizer *tokenizer, OrdinaryRun *run, TokenList *list)
{
    for (size_t i = 0; i < pieces->n; i++) {
        if (pieces->pieces[i].trusted)
            JINJA_TRY(encode_trusted(&pieces->pieces[i], tokenizer, run, list));
        else
            run_add(run, pieces->pieces[i].text, pieces->pieces[i].length);
    }
    return run_flush(run, tokenizer, list);
}

int chat_pieces_encode(const ChatPieces *pieces, const Tokenizer *tokenizer, TokenList *list)
{
    _cleanup_(token_list_clearp) TokenList ids = TOKEN_LIST_NULL;
    _cleanup_(freep) char *text = NULL;
    int32_t bos = tokenizer_bos(tokenizer);
    OrdinaryRun run = {NULL, 0};
    size_t n_before = list->n, n = 1;
    int r;

    for (size_t i = 0; i < pieces->n; i++)
        n += pieces->pieces[i].length;
    text = malloc(n);
    if (!text)
        return error_origin(-ENOMEM);
    run.text = text;
    r = encode_pieces(pieces, tokenizer, &run, &ids);
    if (r == 0 && tokenizer_add_bos(tokenizer) && (ids.n == 0 || ids.ids[0] != bos))
        r = token_list_append(list, &bos, 1);
    if (r == 0)
        r = token_list_append(list, ids.ids, ids.n);
    if (r)
        list->n = n_before;
    return error_trace(r);
}
