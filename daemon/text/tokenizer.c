/* SPDX-License-Identifier: Apache-2.0 */
/* Byte-level BPE over a vocabulary: special tokens, then words, then merges. */

#include "daemon/text/tokenizer.h"
#include "daemon/model/gguf.h"
#include "daemon/text/bpe.h"
#include "daemon/text/pre-tokenizer.h"
#include "daemon/text/utf8.h"
#include "daemon/text/vocabulary.h"

#include <string.h>

#define KEY(name) "tokenizer.ggml." name

struct Tokenizer {
    Vocabulary vocabulary;
    BpeMerges merges;
    PreTokenizer *pre;
    int32_t *specials; /* control and user-defined tokens, ordered by their bytes */
    size_t n_specials;
    bool begins_special[256]; /* by first byte */
    uint8_t *ends_turn;       /* a bit for each id */
    int32_t bos, eos;
    bool add_bos;
    char *bos_text, *eos_text;
};

/* ---- loading --------------------------------------------------------------------------------------------------------------- */

/* Names that end a turn, whatever the file says EOS is (a chat model's EOS is often the base model's). */
static const char *const end_of_turn_names[] = {
    "<|im_end|>",     "<|eot_id|>",  "<|eom_id|>", "<|end|>",      "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<|eot|>",     "<|eom|>",    "<|return|>",   "<turn|>",       "<|END_OF_TURN_TOKEN|>",
    "</s>",           "<eos>",       "<EOT>",      "<|endofturn|>", "<|end_of_sentence|>", "<｜end▁of▁sentence｜>",
};

static int tokenizer_load_vocabulary(Tokenizer *tokenizer, const Gguf *gguf, ErrorDetail *reterr)
{
    uint64_t n = 0, n_kinds = 0;
    const GgufString *texts = gguf_array_strings(gguf, KEY("tokens"), &n);
    GgufType type;
    int r;

    if (!texts || n == 0)
        return error_detail_set(reterr, TOKENIZER_E_CORRUPT, KEY("tokens") " is missing, empty or not an array of strings");
    if (n > INT32_MAX / 4)
        return error_detail_set(reterr, TOKENIZER_E_CORRUPT, KEY("tokens") " has %llu tokens", (unsigned long long)n);
    if (gguf_has(gguf, KEY("token_type")) && (!gguf_get_array(gguf, KEY("token_type"), &type, &n_kinds) || n_kinds != n))
        return error_detail_set(reterr, TOKENIZER_E_CORRUPT, KEY("token_type") " has %llu entries for %llu tokens",
                                (unsigned long long)n_kinds, (unsigned long long)n);
    r = vocabulary_init(&tokenizer->vocabulary, (uint32_t)n);
    for (uint64_t id = 0; r == 0 && id < n; id++) {
        double kind = TOKEN_KIND_NORMAL;

        if (n_kinds && (!gguf_array_number(gguf, KEY("token_type"), id, &kind) || kind < TOKEN_KIND_NORMAL || kind > TOKEN_KIND_BYTE))
            return error_detail_set(reterr, TOKENIZER_E_CORRUPT, KEY("token_type") "[%llu] is not 1 to 6", (unsigned long long)id);
        r = vocabulary_add(&tokenizer->vocabulary, texts[id].data, texts[id].length, (TokenKind)kind);
    }
    if (r)
        return error_trace(r);
    vocabulary_index(&tokenizer->vocabulary);
    return 0;
}

/* The id of one side of a merge, or of both together; *buffer holds their bytes. */
static int32_t tokenizer_merge_part(const Tokenizer *tokenizer, const char *text, size_t length, char *buffer, size_t *ret_length)
{
    if (!vocabulary_decode_text(text, length, buffer, ret_length))
        return -1;
    return vocabulary_find(&tokenizer->vocabulary, buffer, *ret_length);
}

static int tokenizer_add_merge(Tokenizer *tokenizer, const GgufString *merge, uint32_t rank, ErrorDetail *reterr)
{
    char buffer[2048];
    const char *blank = merge->length > 2 ? memchr(merge->data + 1, ' ', merge->length - 2) : NULL;
    size_t n_left, n_right, left_length;
    int32_t left, right, result;

    if (!blank || merge->length > sizeof(buffer))
        return error_detail_set(reterr, TOKENIZER_E_CORRUPT, KEY("merges") "[%u] is not two parts with a blank between", rank);
    left_length = (size_t)(blank - merge->data);
    left = tokenizer_merge_part(tokenizer, merge->data, left_length, buffer, &n_left);
    right = left < 0 ? -1 : tokenizer_merge_part(tokenizer, blank + 1, merge->length - left_length - 1, buffer + n_left, &n_right);
    result = right < 0 ? -1 : vocabulary_find(&tokenizer->vocabulary, buffer, n_left + n_right);
    if (result < 0)
        return error_detail_set(reterr, TOKENIZER_E_CORRUPT, KEY("merges") "[%u] \"%.*s\" has a part or a result that is no token", rank,
                                (int)MIN(merge->length, (size_t)80), merge->data);
    bpe_merges_add(&tokenizer->merges, left, right, rank, result);
    return 0;
}

static int tokenizer_load_merges(Tokenizer *tokenizer, const Gguf *gguf, ErrorDetail *reterr)
{
    uint64_t n = 0;
    const GgufString *texts = gguf_array_strings(gguf, KEY("merges"), &n);
    int r;

    if (!texts || n > INT32_MAX / 4)
        return error_detail_set(reterr, TOKENIZER_E_CORRUPT, KEY("merges") " is missing, too long or not an array of strings");
    r = bpe_merges_init(&tokenizer->merges, n);
    for (uint64_t rank = 0; r == 0 && rank < n; rank++)
        r = tokenizer_add_merge(tokenizer, &texts[rank], (uint32_t)rank, reterr);
    return r;
}

static int tokenizer_load_pre(Tokenizer *tokenizer, const Gguf *gguf, ErrorDetail *reterr)
{
    GgufString name = {"", 0};
    int r;

    if (!gguf_get_string(gguf, KEY("model"), &name))
        return error_detail_set(reterr, TOKENIZER_E_UNSUPPORTED, KEY("model") " is missing: the file has no tokenizer");
    if (name.length != 4 || memcmp(name.data, "gpt2", 4) != 0)
        return error_detail_set(reterr, TOKENIZER_E_UNSUPPORTED, KEY("model") ": \"%.*s\" is not known; known is: gpt2",
                                (int)MIN(name.length, (size_t)64), name.data);
    name = (GgufString){"", 0};
    (void)gguf_get_string(gguf, KEY("pre"), &name); /* missing: refused with the list, as an unknown one */
    r = pre_tokenizer_new(name.data, name.length, &tokenizer->pre, reterr);
    if (r == PRE_TOKENIZER_E_UNKNOWN)
        return error_origin(TOKENIZER_E_UNSUPPORTED);
    return error_trace(r);
}

static int32_t tokenizer_special_id(const Tokenizer *tokenizer, const Gguf *gguf, const char *key)
{
    uint64_t id;

    return gguf_get_u64(gguf, key, &id) && id < tokenizer->vocabulary.n ? (int32_t)id : -1;
}

static char *tokenizer_text_of(const Tokenizer *tokenizer, int32_t id)
{
    size_t length = 0;
    const char *bytes = tokenizer_token_bytes(tokenizer, id, true, &length);

    /* A token with a NUL inside is cut there: templates take strings. */
    return strndup(bytes, length);
}

static void tokenizer_mark_end_of_turn(Tokenizer *tokenizer, int32_t id)
{
    if (id >= 0)
        tokenizer->ends_turn[id / 8] |= (uint8_t)(1U << id % 8);
}

static bool is_end_of_turn_name(const char *bytes, size_t length)
{
    for (size_t i = 0; i < N_ELEMENTS(end_of_turn_names); i++)
        if (strlen(end_of_turn_names[i]) == length && memcmp(end_of_turn_names[i], bytes, length) == 0)
            return true;
    return false;
}

static int tokenizer_load_roles(Tokenizer *tokenizer, const Gguf *gguf, ErrorDetail *reterr)
{
    static const char *const keys[] = {KEY("bos_token_id"), KEY("eos_token_id"), KEY("eot_token_id"), KEY("eom_token_id")};
    uint64_t id;

    for (size_t i = 0; i < N_ELEMENTS(keys); i++)
        if (gguf_has(gguf, keys[i]) && (!gguf_get_u64(gguf, keys[i], &id) || id >= tokenizer->vocabulary.n))
            return error_detail_set(reterr, TOKENIZER_E_CORRUPT, "%s is no id of the %u tokens", keys[i], tokenizer->vocabulary.n);
    tokenizer->bos = tokenizer_special_id(tokenizer, gguf, keys[0]);
    tokenizer->eos = tokenizer_special_id(tokenizer, gguf, keys[1]);
    tokenizer->add_bos = pre_tokenizer_adds_bos(tokenizer->pre);
    (void)gguf_get_bool(gguf, KEY("add_bos_token"), &tokenizer->add_bos);
    tokenizer->add_bos &= tokenizer->bos >= 0;
    tokenizer->bos_text = tokenizer_text_of(tokenizer, tokenizer->bos);
    tokenizer->eos_text = tokenizer_text_of(tokenizer, tokenizer->eos);
    tokenizer->ends_turn = calloc(tokenizer->vocabulary.n / 8 + 1, 1);
    if (!tokenizer->bos_text || !tokenizer->eos_text || !tokenizer->ends_turn)
        return error_origin(-ENOMEM);
    for (size_t i = 1; i < N_ELEMENTS(keys); i++)
        tokenizer_mark_end_of_turn(tokenizer, tokenizer_special_id(tokenizer, gguf, keys[i]));
    for (uint32_t i = 0; i < tokenizer->vocabulary.n; i++) {
        size_t length;
        const char *bytes = vocabulary_bytes(&tokenizer->vocabulary, (int32_t)i, &length);

        if (tokenizer->vocabulary.kinds[i] == TOKEN_KIND_CONTROL && is_end_of_turn_name(bytes, length))
            tokenizer_mark_end_of_turn(tokenizer, (int32_t)i);
    }
    return 0;
}

static int compare_bytes(const char *a, size_t n_a, const char *b, size_t n_b)
{
    int order = memcmp(a, b, MIN(n_a, n_b));

    return order ? order : (n_a > n_b) - (n_a < n_b);
}

static int compare_specials(const void *a, const void *b, void *userdata)
{
    const Vocabulary *vocabulary = userdata;
    size_t n_a, n_b;
    const char *bytes_a = vocabulary_bytes(vocabulary, *(const int32_t *)a, &n_a);
    const char *bytes_b = vocabulary_bytes(vocabulary, *(const int32_t *)b, &n_b);

    int order = compare_bytes(bytes_a, n_a, bytes_b, n_b);

    return order ? order : *(const int32_t *)a - *(const int32_t *)b;
}

static int tokenizer_load_specials(Tokenizer *tokenizer)
{
    Vocabulary *vocabulary = &tokenizer->vocabulary;

    tokenizer->specials = calloc((size_t)vocabulary->n, sizeof(*tokenizer->specials));
    if (!tokenizer->specials)
        return error_origin(-ENOMEM);
    for (uint32_t id = 0; id < vocabulary->n; id++) {
        TokenKind kind = vocabulary->kinds[id];
        size_t length;
        const char *bytes = vocabulary_bytes(vocabulary, (int32_t)id, &length);

        if ((kind != TOKEN_KIND_CONTROL && kind != TOKEN_KIND_USER_DEFINED) || length == 0)
            continue;
        tokenizer->specials[tokenizer->n_specials++] = (int32_t)id;
        tokenizer->begins_special[(uint8_t)bytes[0]] = true;
    }
    qsort_r(tokenizer->specials, tokenizer->n_specials, sizeof(*tokenizer->specials), compare_specials, vocabulary);
    return 0;
}

int tokenizer_new(const Gguf *gguf, Tokenizer **ret, ErrorDetail *reterr)
{
    _cleanup_(tokenizer_freep) Tokenizer *tokenizer = calloc(1, sizeof(*tokenizer));
    int r;

    if (!tokenizer)
        return error_origin(-ENOMEM);
    r = tokenizer_load_pre(tokenizer, gguf, reterr);
    if (r == 0)
        r = tokenizer_load_vocabulary(tokenizer, gguf, reterr);
    if (r == 0)
        r = tokenizer_load_merges(tokenizer, gguf, reterr);
    if (r == 0)
        r = tokenizer_load_roles(tokenizer, gguf, reterr);
    if (r == 0)
        r = tokenizer_load_specials(tokenizer);
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(tokenizer);
    return 0;
}

Tokenizer *tokenizer_free(Tokenizer *tokenizer)
{
    if (!tokenizer)
        return NULL;
    vocabulary_deinit(&tokenizer->vocabulary);
    bpe_merges_deinit(&tokenizer->merges);
    (void)pre_tokenizer_free(tokenizer->pre);
    free(tokenizer->specials);
    free(tokenizer->ends_turn);
    free(tokenizer->bos_text);
    free(tokenizer->eos_text);
    free(tokenizer);
    return NULL;
}

/* ---- encoding --------------------------------------------------------------------------------------------------------------- */

/* Room for @n more. */
static int token_list_reserve(TokenList *list, size_t n)
{
    size_t capacity;
    int32_t *ids;

    if (n <= list->capacity - list->n)
        return 0;
    if (n > SIZE_MAX / 16 || list->n > SIZE_MAX / 16)
        return error_origin(-EOVERFLOW);
    capacity = MAX(list->n + n, 2 * list->capacity);
    ids = realloc(list->ids, capacity * sizeof(*ids));
    if (!ids)
        return error_origin(-ENOMEM);
    list->ids = ids;
    list->capacity = capacity;
    return 0;
}

int token_list_append(TokenList *list, const int32_t *ids, size_t n)
{
    int r;

    r = token_list_reserve(list, n);
    if (r)
        return error_trace(r);
    if (n)
        memcpy(list->ids + list->n, ids, n * sizeof(*ids));
    list->n += n;
    return 0;
}

void token_list_clear(TokenList *list)
{
    free(list->ids);
    *list = TOKEN_LIST_NULL;
}

typedef struct Encoding {
    const Tokenizer *tokenizer;
    TokenList *list;
} Encoding;

static int encode_word(void *userdata, const char *word, size_t length)
{
    Encoding *encoding = userdata;
    const Tokenizer *tokenizer = encoding->tokenizer;
    TokenList *list = encoding->list;
    size_t n = 0;
    int r;

    r = token_list_reserve(list, length);
    if (r)
        return error_trace(r);
    if (pre_tokenizer_prefers_whole_words(tokenizer->pre)) {
        int32_t id = vocabulary_find(&tokenizer->vocabulary, word, length);

        if (id >= 0 && tokenizer->vocabulary.kinds[id] == TOKEN_KIND_NORMAL) {
            list->ids[list->n++] = id;
            return 0;
        }
    }
    for (size_t i = 0; i < length; i++) {
        int32_t id = tokenizer->vocabulary.byte_ids[(uint8_t)word[i]];

        if (id >= 0)
            list->ids[list->n + n++] = id;
    }
    /* The symbols lie at the end of the list and are merged where they are. */
    r = bpe_merges_apply(&tokenizer->merges, list->ids + list->n, n, &n);
    if (r)
        return error_trace(r);
    list->n += n;
    return 0;
}

static int encode_invalid_byte(Encoding *encoding, char byte)
{
    int32_t id = encoding->tokenizer->vocabulary.byte_ids[(uint8_t)byte];

    if (id < 0)
        return encode_word(encoding, "\xef\xbf\xbd", 3);
    return token_list_append(encoding->list, &id, 1);
}

static int encode_ordinary(Encoding *encoding, const char *text, size_t length)
{
    size_t i = 0;
    int r = 0;

    while (r == 0 && i < length) {
        size_t valid = utf8_valid_prefix(text + i, length - i);

        if (valid > 0)
            r = pre_tokenizer_split(encoding->tokenizer->pre, text + i, valid, encode_word, encoding);
        i += valid;
        if (r == 0 && i < length)
            r = encode_invalid_byte(encoding, text[i++]);
    }
    return r;
}

/* The longest special token that @text begins with.  Entries are ordered, so those with a common beginning lie together: each byte
 * narrows the range, whose first entry is complete when it ends there. */
static int32_t tokenizer_special_at(const Tokenizer *tokenizer, const char *text, size_t length, size_t *ret_length)
{
    const Vocabulary *vocabulary = &tokenizer->vocabulary;
    size_t low = 0, high = tokenizer->n_specials;
    int32_t found = -1;

    for (size_t depth = 0; depth < length && low < high; depth++) {
        for (int side = 0; side < 2; side++) {
            /* side 0: the first entry with this byte or a later one; side 1: the first with a later one */
            size_t begin = low, end = high;

            while (begin < end) {
                size_t middle = begin + (end - begin) / 2, n;
                const char *bytes = vocabulary_bytes(vocabulary, tokenizer->specials[middle], &n);

                if (n <= depth || (uint8_t)bytes[depth] < (uint8_t)text[depth] + side)
                    begin = middle + 1;
                else
                    end = middle;
            }
            *(side ? &high : &low) = begin;
        }
        if (low < high) {
            size_t n;

            (void)vocabulary_bytes(vocabulary, tokenizer->specials[low], &n);
            if (n == depth + 1) {
                found = tokenizer->specials[low];
                *ret_length = n;
            }
        }
    }
    return found;
}

int32_t tokenizer_find_special(const Tokenizer *tokenizer, const char *text, size_t length, size_t *ret_begin, size_t *ret_length)
{
    for (size_t i = 0; i < length; i++) {
        int32_t id;

        if (!tokenizer->begins_special[(uint8_t)text[i]])
            continue;
        id = tokenizer_special_at(tokenizer, text + i, length - i, ret_length);
        if (id >= 0) {
            *ret_begin = i;
            return id;
        }
    }
    return -1;
}

int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, bool parse_special, TokenList *list)
{
    Encoding encoding = {tokenizer, list};
    size_t n_before = list->n, done = 0;
    int r = 0;

    while (r == 0 && done < length) {
        size_t begin = length - done, size = 0;
        int32_t id = -1;

        if (parse_special)
            id = tokenizer_find_special(tokenizer, text + done, length - done, &begin, &size);
        r = encode_ordinary(&encoding, text + done, begin);
        if (r == 0 && id >= 0)
            r = token_list_append(list, &id, 1);
        done += begin + size;
    }
    if (r)
        list->n = n_before;
    return error_trace(r);
}

/* ---- facts ------------------------------------------------------------------------------------------------------------------ */

const char *tokenizer_token_bytes(const Tokenizer *tokenizer, int32_t id, bool special, size_t *ret_length)
{
    *ret_length = 0;
    if (id < 0 || (uint32_t)id >= tokenizer->vocabulary.n)
        return "";
    if (tokenizer->vocabulary.kinds[id] == TOKEN_KIND_CONTROL && !special)
        return "";
    return vocabulary_bytes(&tokenizer->vocabulary, id, ret_length);
}

uint32_t tokenizer_n_vocab(const Tokenizer *tokenizer)
{
    return tokenizer->vocabulary.n;
}

int32_t tokenizer_bos(const Tokenizer *tokenizer)
{
    return tokenizer->bos;
}

bool tokenizer_add_bos(const Tokenizer *tokenizer)
{
    return tokenizer->add_bos;
}

bool tokenizer_is_eog(const Tokenizer *tokenizer, int32_t id)
{
    return id >= 0 && (uint32_t)id < tokenizer->vocabulary.n && (tokenizer->ends_turn[id / 8] >> id % 8 & 1);
}

const char *tokenizer_bos_text(const Tokenizer *tokenizer)
{
    return tokenizer->bos_text;
}

const char *tokenizer_eos_text(const Tokenizer *tokenizer)
{
    return tokenizer->eos_text;
}
