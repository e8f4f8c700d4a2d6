/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in for daemon/text/: each byte is a token, and a template writes "[role:content]". */

#include "daemon/text/chat-template.h"
#include "tests/fakes/fake-internal.h"

int token_list_append(TokenList *list, const int32_t *ids, size_t n)
{
    if (list->n + n > list->capacity) {
        int32_t *grown = realloc(list->ids, (list->n + n) * 2 * sizeof(*grown));

        assert_non_null(grown);
        list->ids = grown;
        list->capacity = (list->n + n) * 2;
    }
    if (n > 0)
        memcpy(list->ids + list->n, ids, n * sizeof(*ids));
    list->n += n;
    return 0;
}

void token_list_clear(TokenList *list)
{
    free(list->ids);
    *list = TOKEN_LIST_NULL;
}

int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, bool parse_special,
                     TokenList *list)
{
    (void)tokenizer;
    (void)parse_special;
    for (size_t i = 0; i < length; i++)
        (void)token_list_append(list, &(int32_t){(unsigned char)text[i]}, 1);
    return 0;
}

const char *tokenizer_token_bytes(const Tokenizer *tokenizer, int32_t id, bool special, size_t *ret_length)
{
    static const char bytes[] = "abcdefghijklmnopqrstuvwxyz";

    (void)tokenizer;
    (void)special;
    *ret_length = id >= 'a' && id <= 'z';
    return id >= 'a' && id <= 'z' ? &bytes[id - 'a'] : "";
}

uint32_t tokenizer_n_vocab(const Tokenizer *tokenizer)
{
    (void)tokenizer;
    return FAKE_VOCAB;
}

int32_t tokenizer_bos(const Tokenizer *tokenizer)
{
    (void)tokenizer;
    return -1;
}

bool tokenizer_add_bos(const Tokenizer *tokenizer)
{
    (void)tokenizer;
    return false;
}

bool tokenizer_is_eog(const Tokenizer *tokenizer, int32_t id)
{
    (void)tokenizer;
    return id == FAKE_EOG;
}

const char *tokenizer_bos_text(const Tokenizer *tokenizer)
{
    (void)tokenizer;
    return "";
}

const char *tokenizer_eos_text(const Tokenizer *tokenizer)
{
    (void)tokenizer;
    return "";
}

int chat_template_new(const char *source, ChatTemplate **ret, ErrorDetail *reterr)
{
    if (strcmp(source, "broken") == 0)
        return error_detail_set(reterr, CHAT_TEMPLATE_E_SYNTAX, "line 1: broken");
    *ret = malloc(1);
    return *ret ? 0 : -ENOMEM;
}

ChatTemplate *chat_template_free(ChatTemplate *template_)
{
    free(template_);
    return NULL;
}

/* "[role:content]" for each message. */
int chat_template_render(const ChatTemplate *template_, const ChatMessage *messages, size_t n_messages,
                         bool add_generation_prompt, const char *bos_token, const char *eos_token,
                         ChatPieces *ret, ErrorDetail *reterr)
{
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);

    (void)template_, (void)add_generation_prompt, (void)bos_token, (void)eos_token, (void)reterr;
    assert_non_null(f);
    for (size_t i = 0; i < n_messages; i++)
        (void)fprintf(f, "[%s:%s]", messages[i].role, messages[i].content);
    (void)fclose(f);
    ret->pieces = calloc(1, sizeof(*ret->pieces));
    assert_non_null(ret->pieces);
    ret->pieces[0] = (ChatPiece){text, n, true};
    ret->n = ret->capacity = 1;
    return 0;
}

void chat_pieces_clear(ChatPieces *pieces)
{
    for (size_t i = 0; i < pieces->n; i++)
        free(pieces->pieces[i].text);
    free(pieces->pieces);
    *pieces = CHAT_PIECES_NULL;
}

int chat_pieces_encode(const ChatPieces *pieces, const Tokenizer *tokenizer, TokenList *list)
{
    for (size_t i = 0; i < pieces->n; i++)
        (void)tokenizer_encode(tokenizer, pieces->pieces[i].text, pieces->pieces[i].length, true, list);
    return 0;
}
