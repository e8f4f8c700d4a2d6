/* SPDX-License-Identifier: Apache-2.0 */
/* The table of pre-tokenizers and the walk over PCRE2 matches. */

#define PCRE2_CODE_UNIT_WIDTH 8

#include "daemon/text/pre-tokenizer.h"

#include <pcre2.h>
#include <string.h>

#define PRE_TOKENIZER_PATTERNS_MAX 4

/*
 * Blanks are spelled out as Unicode's White_Space: PCRE2's own \s has U+180E as well, which the references have not.
 * SPACES is the inside of a character class.
 */
#define SPACES   "\\t-\\r\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define TRAILING "[" SPACES "]+(?![^" SPACES "])"
#define OTHERS   "[^" SPACES "\\p{L}\\p{N}]+"

/* GPT-2's split, which most byte-level tokenizers share. */
#define GPT2       "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?" OTHERS "|" TRAILING "|[" SPACES "]+"
/* Single digits.  Numbers that came with Unicode 15 and 16 are listed: the reference has them, PCRE2 10.42 has not. */
#define DIGITS                                                                                                              \
    "[\\p{N}\\x{10d40}-\\x{10d49}\\x{116d0}-\\x{116e3}\\x{11bf0}-\\x{11bf9}\\x{11de0}-\\x{11de9}\\x{11f50}-\\x{11f59}"        \
    "\\x{16130}-\\x{16139}\\x{16d70}-\\x{16d79}\\x{16ff4}-\\x{16ff6}\\x{1ccf0}-\\x{1ccf9}\\x{1d2c0}-\\x{1d2d3}"               \
    "\\x{1e4f0}-\\x{1e4f9}\\x{1e5f1}-\\x{1e5fa}]"
/* Llama 3's; @numbers: how many digits stay together. */
#define LLAMA3(numbers)                                                                                                     \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" numbers "| ?" OTHERS "[\\r\\n]*|[" SPACES "]*[\\r\\n]+|"   \
    TRAILING "|[" SPACES "]+"

typedef struct PreTokenizerRule {
    const char *names; /* separated by blanks */
    const char *patterns[PRE_TOKENIZER_PATTERNS_MAX];
    bool prefers_whole_words, adds_bos;
} PreTokenizerRule;

static const PreTokenizerRule pre_tokenizer_rules[] = {
    {"default",
     {"[\\p{P}\\$\\+<=>\\^~\\|]+", "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?" OTHERS "|" TRAILING, "\\p{N}+", "[0-9][0-9][0-9]"},
     false, false},
    {"gpt-2 olmo mpt phi-2 jais", {GPT2}, false, false},
    {"smollm refact starcoder command-r codeshell", {DIGITS, GPT2}, false, false},
    {"llama-bpe llama3 llama-v3 falcon3", {LLAMA3("\\p{N}{1,3}")}, true, true},
    {"qwen2 deepseek-r1-qwen stablelm2", {LLAMA3("\\p{N}")}, false, false},
};

struct PreTokenizer {
    const PreTokenizerRule *rule;
    pcre2_code *codes[PRE_TOKENIZER_PATTERNS_MAX];
    size_t n_codes;
    pcre2_match_context *context;
};

static bool names_contain(const char *names, const char *name, size_t length)
{
    while (*names) {
        size_t n = strcspn(names, " ");

        if (n == length && memcmp(names, name, n) == 0)
            return true;
        names += n;
        names += strspn(names, " ");
    }
    return false;
}

static int pre_tokenizer_refuse(const char *name, size_t length, ErrorDetail *reterr)
{
    char known[320] = "";

    for (size_t i = 0; i < N_ELEMENTS(pre_tokenizer_rules); i++) {
        size_t n = strlen(known);

        (void)snprintf(known + n, sizeof(known) - n, "%s%s", n ? " " : "", pre_tokenizer_rules[i].names);
    }
    return error_detail_set(reterr, PRE_TOKENIZER_E_UNKNOWN, "tokenizer.ggml.pre: \"%.*s\" is not known; known are: %s",
                            (int)MIN(length, (size_t)64), name, known);
}

static int pre_tokenizer_compile(PreTokenizer *pre, const char *pattern, ErrorDetail *reterr)
{
    PCRE2_SIZE offset;
    int status;
    pcre2_code *code;

    code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &status, &offset, NULL);
    if (!code) {
        char message[120];

        (void)pcre2_get_error_message(status, (PCRE2_UCHAR *)message, sizeof(message));
        return error_detail_set(reterr, -EINVAL, "pre-tokenizer pattern of %.40s: %s at %zu", pre->rule->names, message, (size_t)offset);
    }
    pre->codes[pre->n_codes++] = code;
    /* Without JIT (not built in, or no executable memory allowed) pcre2_match() interprets: slower, same matches. */
    (void)pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    return 0;
}

int pre_tokenizer_new(const char *name, size_t length, PreTokenizer **ret, ErrorDetail *reterr)
{
    _cleanup_(pre_tokenizer_freep) PreTokenizer *pre = NULL;
    const PreTokenizerRule *rule = NULL;
    int r;

    for (size_t i = 0; i < N_ELEMENTS(pre_tokenizer_rules); i++)
        if (names_contain(pre_tokenizer_rules[i].names, name, length))
            rule = &pre_tokenizer_rules[i];
    if (!rule)
        return pre_tokenizer_refuse(name, length, reterr);
    pre = calloc(1, sizeof(*pre));
    if (!pre)
        return error_origin(-ENOMEM);
    pre->rule = rule;
    pre->context = pcre2_match_context_create(NULL);
    if (!pre->context)
        return error_origin(-ENOMEM);
    /* The patterns cost at most a few steps a character; the default limit of ten million is within reach of one long blank run. */
    (void)pcre2_set_match_limit(pre->context, UINT32_MAX);
    for (size_t i = 0; i < PRE_TOKENIZER_PATTERNS_MAX && rule->patterns[i]; i++) {
        r = pre_tokenizer_compile(pre, rule->patterns[i], reterr);
        if (r)
            return error_trace(r);
    }
    *ret = TAKE_PTR(pre);
    return 0;
}

PreTokenizer *pre_tokenizer_free(PreTokenizer *pre)
{
    if (!pre)
        return NULL;
    for (size_t i = 0; i < pre->n_codes; i++)
        pcre2_code_free(pre->codes[i]);
    pcre2_match_context_free(pre->context);
    free(pre);
    return NULL;
}

typedef struct PreTokenizerWalk {
    const PreTokenizer *pre;
    pcre2_match_data *matches[PRE_TOKENIZER_PATTERNS_MAX];
    PreTokenizerWord word;
    void *userdata;
} PreTokenizerWalk;

static int pre_tokenizer_match(const PreTokenizerWalk *walk, size_t stage, const char *text, size_t length, size_t start)
{
    pcre2_code *code = walk->pre->codes[stage];
    int n;

    n = pcre2_match(code, (PCRE2_SPTR)text, length, start, PCRE2_NO_UTF_CHECK, walk->matches[stage], walk->pre->context);
    if (n == PCRE2_ERROR_JIT_STACKLIMIT)
        n = pcre2_match(code, (PCRE2_SPTR)text, length, start, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, walk->matches[stage],
                        walk->pre->context);
    if (n == PCRE2_ERROR_NOMEMORY)
        return error_origin(-ENOMEM);
    if (n < 0 && n != PCRE2_ERROR_NOMATCH)
        return error_origin(-EINVAL);
    return n > 0;
}

/* Cuts @text by the pattern of @stage; matches and the gaps between them go on to the next stage. */
static int pre_tokenizer_walk(const PreTokenizerWalk *walk, size_t stage, const char *text, size_t length)
{
    size_t done = 0;
    int r;

    if (length == 0)
        return 0;
    if (stage == walk->pre->n_codes)
        return walk->word(walk->userdata, text, length);
    while (done < length) {
        PCRE2_SIZE begin = length, end = length;

        r = pre_tokenizer_match(walk, stage, text, length, done);
        if (r < 0)
            return error_trace(r);
        if (r > 0) {
            const PCRE2_SIZE *span = pcre2_get_ovector_pointer(walk->matches[stage]);

            begin = span[0];
            end = span[1];
        }
        r = pre_tokenizer_walk(walk, stage + 1, text + done, begin - done);
        if (r == 0)
            r = pre_tokenizer_walk(walk, stage + 1, text + begin, end - begin);
        if (r)
            return r;
        done = end;
    }
    return 0;
}

int pre_tokenizer_split(const PreTokenizer *pre, const char *text, size_t length, PreTokenizerWord word, void *userdata)
{
    PreTokenizerWalk walk = {pre, {NULL}, word, userdata};
    int r = 0;

    for (size_t i = 0; i < pre->n_codes && r == 0; i++) {
        walk.matches[i] = pcre2_match_data_create(1, NULL);
        if (!walk.matches[i])
            r = error_origin(-ENOMEM);
    }
    if (r == 0)
        r = pre_tokenizer_walk(&walk, 0, text, length);
    for (size_t i = 0; i < pre->n_codes; i++)
        pcre2_match_data_free(walk.matches[i]);
    return r;
}

bool pre_tokenizer_prefers_whole_words(const PreTokenizer *pre)
{
    return pre->rule->prefers_whole_words;
}

bool pre_tokenizer_adds_bos(const PreTokenizer *pre)
{
    return pre->rule->adds_bos;
}
