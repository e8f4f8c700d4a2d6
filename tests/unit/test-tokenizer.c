/* SPDX-License-Identifier: Apache-2.0 */
/* Byte-level BPE on a tiny vocabulary: merges, special tokens, bytes that are not text, tables that are wrong. */

#include "daemon/text/bpe.h"
#include "daemon/text/pre-tokenizer.h"
#include "tests/unit/tiny-tokenizer.h"

#include <time.h>

static uint64_t random_state = 0x70cc5eed;

static uint64_t random_u64(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static int setup(void **state)
{
    *state = tiny_tokenizer_new(&(TinyTokenizer){.pre = "gpt-2"});
    return 0;
}

static int teardown(void **state)
{
    (void)tokenizer_free(*state);
    return 0;
}

static void assert_ids(const Tokenizer *tokenizer, const char *text, size_t length, bool special, const int32_t *ids, size_t n)
{
    _cleanup_(token_list_clearp) TokenList list = TOKEN_LIST_NULL;

    assert_int_equal(tokenizer_encode(tokenizer, text, length, special, &list), 0);
    assert_int_equal(list.n, n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(list.ids[i], ids[i]);
}

#define ASSERT_IDS(tokenizer, text, special, ...)                                                            \
    do {                                                                                                     \
        const int32_t _ids[] = {__VA_ARGS__};                                                                \
        assert_ids(tokenizer, text, sizeof(text) - 1, special, _ids, N_ELEMENTS(_ids));                      \
    } while (0)

static void tokenizer_merges_the_lowest_rank_first(void **state)
{
    const Tokenizer *tokenizer = *state;

    ASSERT_IDS(tokenizer, "hello", false, TINY_HELLO);
    ASSERT_IDS(tokenizer, "hell", false, TINY_HELL);
    ASSERT_IDS(tokenizer, "helo", false, TINY_HE, 'l', 'o');
    ASSERT_IDS(tokenizer, "aaaaa", false, TINY_AAAA, 'a');
    ASSERT_IDS(tokenizer, " a aa", false, TINY_SPACE_A, ' ', TINY_AA);
    assert_ids(tokenizer, "", 0, true, NULL, 0);
}

static void tokenizer_words_do_not_merge_over_their_borders(void **state)
{
    ASSERT_IDS(*state, "he\nll", false, TINY_HE, '\n', TINY_LL);
    ASSERT_IDS(*state, "aa1aa", false, TINY_AA, '1', TINY_AA);
}

static void tokenizer_special_tokens_only_when_asked(void **state)
{
    const Tokenizer *tokenizer = *state;
    _cleanup_(token_list_clearp) TokenList list = TOKEN_LIST_NULL;

    ASSERT_IDS(tokenizer, "<|im_end|>a", true, TINY_IM_END, 'a');
    ASSERT_IDS(tokenizer, "<tool> a", true, TINY_USER, TINY_SPACE_A);
    assert_int_equal(tokenizer_encode(tokenizer, "<|im_end|><tool><s>", 19, false, &list), 0);
    assert_int_equal(list.n, 19);
    for (size_t i = 0; i < list.n; i++)
        assert_true(list.ids[i] < 256);
}

static void tokenizer_takes_the_longest_special_token_at_the_leftmost_place(void **state)
{
    const Tokenizer *tokenizer = *state;

    ASSERT_IDS(tokenizer, "<|im_start|><|im_x<|im_end|", true, TINY_IM_START, TINY_IM, 'x', TINY_IM, 'e', 'n', 'd', '|');
    ASSERT_IDS(tokenizer, "<<|im_end|>>", true, '<', TINY_IM_END, '>');
    ASSERT_IDS(tokenizer, "<s", true, '<', 's');
}

static void tokenizer_marker_with_wide_bars_is_one_id(void **state)
{
    ASSERT_IDS(*state, "a<｜end▁of▁sentence｜>a", true, 'a', TINY_BARS, 'a');
}

static void tokenizer_text_after_a_special_token_starts_anew(void **state)
{
    ASSERT_IDS(*state, "<s> a", true, TINY_BOS, TINY_SPACE_A);
    ASSERT_IDS(*state, "he<s>ll", true, TINY_HE, TINY_BOS, TINY_LL);
}

static void tokenizer_adds_no_bos_of_its_own(void **state)
{
    _cleanup_(tokenizer_freep) Tokenizer *tokenizer = tiny_tokenizer_new(&(TinyTokenizer){.pre = "gpt-2", .add_bos = true});

    assert_true(tokenizer_add_bos(tokenizer));
    assert_false(tokenizer_add_bos(*state));
    ASSERT_IDS(tokenizer, "aa", false, TINY_AA);
    assert_int_equal(tokenizer_bos(tokenizer), TINY_BOS);
    assert_string_equal(tokenizer_bos_text(tokenizer), "<s>");
    assert_string_equal(tokenizer_eos_text(tokenizer), "<|im_end|>");
}

static void tokenizer_eos_and_named_ends_of_turn_both_end_generation(void **state)
{
    const Tokenizer *tokenizer = *state;
    _cleanup_(tokenizer_freep) Tokenizer *other = tiny_tokenizer_new(&(TinyTokenizer){.pre = "gpt-2", .eos = TINY_USER});
    static const int32_t ends[] = {TINY_IM_END, TINY_EOT, TINY_BARS};

    for (size_t i = 0; i < N_ELEMENTS(ends); i++)
        assert_true(tokenizer_is_eog(tokenizer, ends[i]) && tokenizer_is_eog(other, ends[i]));
    assert_true(tokenizer_is_eog(other, TINY_USER));
    assert_false(tokenizer_is_eog(tokenizer, TINY_USER));
    assert_false(tokenizer_is_eog(tokenizer, TINY_BOS));
    assert_false(tokenizer_is_eog(tokenizer, TINY_IM_START));
    assert_false(tokenizer_is_eog(tokenizer, -1));
    assert_false(tokenizer_is_eog(tokenizer, TINY_N));
}

static void tokenizer_bytes_of_an_id(void **state)
{
    size_t n;

    for (int32_t byte = 0; byte < 256; byte++) {
        const char *bytes = tokenizer_token_bytes(*state, byte, false, &n);

        assert_int_equal(n, 1);
        assert_int_equal((uint8_t)bytes[0], byte);
    }
    assert_memory_equal(tokenizer_token_bytes(*state, TINY_SPACE_A, false, &n), " a", 2);
    (void)tokenizer_token_bytes(*state, TINY_IM_END, false, &n);
    assert_int_equal(n, 0);
    assert_memory_equal(tokenizer_token_bytes(*state, TINY_IM_END, true, &n), "<|im_end|>", 10);
    assert_memory_equal(tokenizer_token_bytes(*state, TINY_USER, false, &n), "<tool>", 6);
    (void)tokenizer_token_bytes(*state, -1, true, &n);
    assert_int_equal(n, 0);
    (void)tokenizer_token_bytes(*state, TINY_N, true, &n);
    assert_int_equal(n, 0);
}

static void tokenizer_invalid_bytes_are_their_own_tokens(void **state)
{
    ASSERT_IDS(*state, "he\xffll", false, TINY_HE, 0xff, TINY_LL);
    ASSERT_IDS(*state, "\xe2\x82 a", false, 0xe2, 0x82, TINY_SPACE_A);
    ASSERT_IDS(*state, "a\0a", false, 'a', 0, 'a');
    ASSERT_IDS(*state, "\xff<s>\xff", true, 0xff, TINY_BOS, 0xff);
}

static void tokenizer_invalid_byte_without_token_becomes_a_replacement(void **state)
{
    _cleanup_(tokenizer_freep) Tokenizer *tokenizer = tiny_tokenizer_new(&(TinyTokenizer){.pre = "gpt-2", .missing_byte = 0xff});

    (void)state;
    ASSERT_IDS(tokenizer, "a\xff\xfe", false, 'a', 0xef, 0xbf, 0xbd, 0xfe);
}

static void tokenizer_random_bytes_come_back(void **state)
{
    for (int round = 0; round < 2000; round++) {
        _cleanup_(token_list_clearp) TokenList list = TOKEN_LIST_NULL;
        char text[300], back[sizeof(text)];
        size_t n = random_u64() % sizeof(text), n_back = 0;

        for (size_t i = 0; i < n; i++)
            text[i] = random_u64() % 3 ? "ahelo <|>s\n"[random_u64() % 11] : (char)random_u64();
        assert_int_equal(tokenizer_encode(*state, text, n, round % 2, &list), 0);
        for (size_t i = 0; i < list.n; i++) {
            size_t length;
            const char *bytes = tokenizer_token_bytes(*state, list.ids[i], true, &length);

            assert_true(n_back + length <= n);
            memcpy(back + n_back, bytes, length);
            n_back += length;
        }
        assert_int_equal(n_back, n);
        assert_memory_equal(back, text, n);
    }
}

/* Both ways of merging, on the same symbols: the scan for short words and the heap for long ones. */
static void bpe_heap_equals_scan(void **state)
{
    enum { SYMBOLS = 6, N = 300 };
    BpeMerges merges = BPE_MERGES_NULL;

    (void)state;
    assert_int_equal(bpe_merges_init(&merges, 64), 0);
    for (uint32_t rank = 0; rank < 60; rank++)
        bpe_merges_add(&merges, (int32_t)(random_u64() % (SYMBOLS + rank)), (int32_t)(random_u64() % (SYMBOLS + rank)), rank,
                       SYMBOLS + (int32_t)rank);
    for (int round = 0; round < 500; round++) {
        int32_t naive[N], ids[N];
        size_t n = 1 + random_u64() % N, n_naive = n, n_ids;

        for (size_t i = 0; i < n; i++)
            naive[i] = ids[i] = (int32_t)(random_u64() % SYMBOLS);
        for (;;) {
            const BpeSlot *best = NULL;
            size_t at = 0;

            for (size_t i = 0; i + 1 < n_naive; i++) {
                const BpeSlot *slot = bpe_merges_find(&merges, naive[i], naive[i + 1]);

                if (slot && (!best || slot->rank < best->rank)) {
                    best = slot;
                    at = i;
                }
            }
            if (!best)
                break;
            naive[at] = best->result;
            memmove(&naive[at + 1], &naive[at + 2], (n_naive - at - 2) * sizeof(*naive));
            n_naive--;
        }
        assert_int_equal(bpe_merges_apply(&merges, ids, n, &n_ids), 0);
        assert_int_equal(n_ids, n_naive);
        assert_memory_equal(ids, naive, n_ids * sizeof(*ids));
    }
    bpe_merges_deinit(&merges);
}

/* Far below what quadratic work would take (hours); the bound is loose, for slow and busy machines. */
static void tokenizer_long_runs_take_linear_time(void **state)
{
    enum { N = 1 << 20 };
    static const char patterns[] = "a <\n.";
    _cleanup_(freep) char *text = malloc(N);
    clock_t begin = clock();

    assert_non_null(text);
    for (size_t i = 0; i < sizeof(patterns) - 1; i++) {
        _cleanup_(token_list_clearp) TokenList list = TOKEN_LIST_NULL;

        memset(text, patterns[i], N);
        assert_int_equal(tokenizer_encode(*state, text, N, true, &list), 0);
        assert_int_equal(list.n, patterns[i] == 'a' ? N / 4 : N);
    }
    assert_true((double)(clock() - begin) / CLOCKS_PER_SEC < 60);
}

static void assert_refused(const TinyTokenizer *tiny, int code, const char *words)
{
    Tokenizer *tokenizer = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r = tiny_tokenizer_try(tiny, &tokenizer, &detail);

    if (r != code || !strstr(detail.text, words))
        fail_msg("%d \"%s\", not %d \"%s\"", r, detail.text, code, words);
    assert_null(tokenizer);
}

static void tokenizer_unknown_names_are_refused_with_the_known_ones(void **state)
{
    (void)state;
    assert_refused(&(TinyTokenizer){.model = "gpt2", .pre = "gtp-2"}, TOKENIZER_E_UNSUPPORTED, "\"gtp-2\" is not known; known are: default gpt-2");
    assert_refused(&(TinyTokenizer){.model = "gpt2", .pre = "olmo mpt"}, TOKENIZER_E_UNSUPPORTED, "qwen2");
    assert_refused(&(TinyTokenizer){.model = "gpt2"}, TOKENIZER_E_UNSUPPORTED, "smollm");
    assert_refused(&(TinyTokenizer){.model = "llama", .pre = "gpt-2"}, TOKENIZER_E_UNSUPPORTED, "known is: gpt2");
    assert_refused(&(TinyTokenizer){.pre = "gpt-2"}, TOKENIZER_E_UNSUPPORTED, "missing");
}

static void tokenizer_inconsistent_tables_are_refused(void **state)
{
    static const char *const merges[] = {"a", "ab", "a ", " a", "", "a zz", "zz a", "b a", "a b c", "\xff a"};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(merges); i++)
        assert_refused(&(TinyTokenizer){.model = "gpt2", .pre = "gpt-2", .extra_merge = merges[i]}, TOKENIZER_E_CORRUPT, "merges");
    assert_refused(&(TinyTokenizer){.model = "gpt2", .pre = "gpt-2", .n_types = 7}, TOKENIZER_E_CORRUPT, "7 entries for 270 tokens");
    assert_refused(&(TinyTokenizer){.model = "gpt2", .pre = "gpt-2", .eos = 100000}, TOKENIZER_E_CORRUPT, "eos_token_id");
}

/* ---- pre-tokenizers ----------------------------------------------------------------------------------------------------------------- */

static int join_word(void *userdata, const char *word, size_t length)
{
    char *joined = userdata;
    size_t n = strlen(joined);

    (void)snprintf(joined + n, 256 - n, "[%.*s]", (int)length, word);
    return 0;
}

static void pre_tokenizers_cut_words_as_their_references_do(void **state)
{
    static const struct {
        const char *name, *text, *words;
    } cases[] = {
        {"gpt-2", "Hi there,  it's 1234!", "[Hi][ there][,][ ][ it]['s][ 1234][!]"},
        {"smollm", "a 123  4\n", "[a][ ][1][2][3][  ][4][\n]"},
        {"llama-bpe", "Hi 12345 IT'S\n\n x", "[Hi][ ][123][45][ IT]['S][\n\n][ x]"},
        {"qwen2", "a 123!\n b", "[a][ ][1][2][3][!\n][ b]"},
        {"refact", "x1y22", "[x][1][y][2][2]"},
        {"starcoder", "x 22", "[x][ ][2][2]"},
        {"default", "a+b 1234", "[a][+][b][ ][123][4]"},
        {"gpt-2", "a\t\t b \u180e c", "[a][\t\t][ b][ \u180e][ c]"},
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        _cleanup_(pre_tokenizer_freep) PreTokenizer *pre = NULL;
        ErrorDetail detail = ERROR_DETAIL_NULL;
        char joined[256] = "";

        if (pre_tokenizer_new(cases[i].name, strlen(cases[i].name), &pre, &detail))
            fail_msg("%s: %s", cases[i].name, detail.text);
        assert_int_equal(pre_tokenizer_split(pre, cases[i].text, strlen(cases[i].text), join_word, joined), 0);
        assert_string_equal(joined, cases[i].words);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(tokenizer_merges_the_lowest_rank_first, setup, teardown),
        cmocka_unit_test_setup_teardown(tokenizer_words_do_not_merge_over_their_borders, setup, teardown),
        cmocka_unit_test_setup_teardown(tokenizer_special_tokens_only_when_asked, setup, teardown),
        cmocka_unit_test_setup_teardown(tokenizer_takes_the_longest_special_token_at_the_leftmost_place, setup, teardown),
        cmocka_unit_test_setup_teardown(tokenizer_marker_with_wide_bars_is_one_id, setup, teardown),
        cmocka_unit_test_setup_teardown(tokenizer_text_after_a_special_token_starts_anew, setup, teardown),
        cmocka_unit_test_setup_teardown(tokenizer_adds_no_bos_of_its_own, setup, teardown),
        cmocka_unit_test_setup_teardown(tokenizer_eos_and_named_ends_of_turn_both_end_generation, setup, teardown),
        cmocka_unit_test_setup_teardown(tokenizer_bytes_of_an_id, setup, teardown),
        cmocka_unit_test_setup_teardown(tokenizer_invalid_bytes_are_their_own_tokens, setup, teardown),
        cmocka_unit_test(tokenizer_invalid_byte_without_token_becomes_a_replacement),
        cmocka_unit_test_setup_teardown(tokenizer_random_bytes_come_back, setup, teardown),
        cmocka_unit_test(bpe_heap_equals_scan),
        cmocka_unit_test_setup_teardown(tokenizer_long_runs_take_linear_time, setup, teardown),
        cmocka_unit_test(tokenizer_unknown_names_are_refused_with_the_known_ones),
        cmocka_unit_test(tokenizer_inconsistent_tables_are_refused),
        cmocka_unit_test(pre_tokenizers_cut_words_as_their_references_do),
    };

    print_message("seed %#llx\n", (unsigned long long)random_state);
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
