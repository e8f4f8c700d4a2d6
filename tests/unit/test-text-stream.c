/* SPDX-License-Identifier: Apache-2.0 */
/* Streaming text: whole characters, stop strings held back, every character exactly once. */

#include "daemon/text/text-stream.h"
#include "daemon/text/utf8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#define REPLACEMENT "\xef\xbf\xbd"

typedef struct Out {
    char text[4096];
    size_t n;
    bool stopped;
} Out;

static void take(Out *out, int r, const char *text, size_t n)
{
    assert_true(r == 0 || r == 1);
    assert_int_equal(utf8_valid_prefix(text, n), n);
    assert_true(out->n + n < sizeof(out->text));
    memcpy(out->text + out->n, text, n);
    out->n += n;
    out->text[out->n] = 0;
    out->stopped |= r == 1;
}

/* Feeds @bytes in pieces of @step and finishes. */
static void feed(const char *const *stops, size_t n_stops, const char *bytes, size_t n, size_t step, Out *out)
{
    _cleanup_(text_stream_freep) TextStream *stream = NULL;
    const char *text;
    size_t length;
    int r;

    *out = (Out){.n = 0};
    assert_int_equal(text_stream_new(stops, n_stops, &stream), 0);
    for (size_t i = 0; i < n; i += step) {
        r = text_stream_push(stream, bytes + i, MIN(step, n - i), &text, &length);
        take(out, r, text, length);
    }
    r = text_stream_finish(stream, &text, &length);
    take(out, r, text, length);
}

static void assert_stream(const char *const *stops, size_t n_stops, const char *bytes, const char *expected, bool stopped)
{
    for (size_t step = 1; step <= strlen(bytes) + 1; step++) {
        Out out;

        feed(stops, n_stops, bytes, strlen(bytes), step, &out);
        assert_string_equal(out.text, expected);
        assert_int_equal(out.stopped, stopped);
    }
}

static void text_stream_stop_spans_tokens(void **state)
{
    const char *const stops[] = {"O P Q"};
    _cleanup_(text_stream_freep) TextStream *stream = NULL;
    const char *text;
    size_t length;

    (void)state;
    assert_int_equal(text_stream_new(stops, 1, &stream), 0);
    assert_int_equal(text_stream_push(stream, "N O", 3, &text, &length), 0);
    assert_int_equal(length, 2);
    assert_memory_equal(text, "N ", 2);
    assert_int_equal(text_stream_push(stream, " P", 2, &text, &length), 0);
    assert_int_equal(length, 0);
    assert_int_equal(text_stream_push(stream, " Q R", 4, &text, &length), 1);
    assert_int_equal(length, 0);
    /* closed: nothing more */
    assert_int_equal(text_stream_push(stream, "S", 1, &text, &length), 1);
    assert_int_equal(length, 0);
    assert_int_equal(text_stream_finish(stream, &text, &length), 0);
    assert_int_equal(length, 0);
    assert_stream(&(const char *){"DEFGHIJ"}, 1, "ABCDEFGHIJKLM", "ABC", true);
}

static void text_stream_stop_inside_a_token_is_trimmed(void **state)
{
    (void)state;
    assert_stream(&(const char *){"ot"}, 1, " not here", " n", true);
}

static void text_stream_failed_partial_match_comes_out_once(void **state)
{
    (void)state;
    assert_stream(&(const char *){"O P Q"}, 1, "N O P X O P O P R", "N O P X O P O P R", false);
    assert_stream(&(const char *){"aab"}, 1, "aaaab", "aa", true);
    assert_stream(&(const char *){"aab"}, 1, "aaa", "aaa", false);
    assert_stream(&(const char *){"\n\nUser:"}, 1, "a\n\n\nUser:b", "a\n", true);
}

static void text_stream_first_complete_stop_wins_then_the_longest(void **state)
{
    (void)state;
    assert_stream((const char *const[]){"abcd", "bc"}, 2, "xabcdy", "xa", true);
    assert_stream((const char *const[]){"bc", "abc"}, 2, "xabcdy", "x", true);
    assert_stream((const char *const[]){"zz", "水"}, 2, "火水", "火", true);
}

static void text_stream_characters_cut_over_tokens_come_whole(void **state)
{
    static const char text[] = "😀é水\U0010ffff";

    (void)state;
    assert_stream(NULL, 0, text, text, false);
    assert_stream(&(const char *){"水"}, 1, text, "😀é", true);
}

static void text_stream_first_chunk_holds_the_emoji(void **state)
{
    _cleanup_(text_stream_freep) TextStream *stream = NULL;
    static const char emoji[] = "😀";
    const char *text;
    size_t length;

    (void)state;
    assert_int_equal(text_stream_new(NULL, 0, &stream), 0);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(text_stream_push(stream, emoji + i, 1, &text, &length), 0);
        assert_int_equal(length, 0);
    }
    assert_int_equal(text_stream_push(stream, emoji + 3, 1, &text, &length), 0);
    assert_int_equal(length, 4);
    assert_memory_equal(text, emoji, 4);
}

static void text_stream_invalid_bytes_become_one_replacement_each(void **state)
{
    static const struct {
        const char *bytes, *expected;
    } cases[] = {
        {"a\xff" "b", "a" REPLACEMENT "b"},
        {"\xc0\x80", REPLACEMENT REPLACEMENT},
        {"\xed\xa0\x80", REPLACEMENT REPLACEMENT REPLACEMENT},
        {"x\xf0\x9f", "x" REPLACEMENT},
        {"\xf0\x9f\x98z", REPLACEMENT "z"},
        {"\xe2\x82\xe2\x82\xac", REPLACEMENT "€"},
        {"\xf4\x90\x80\x80", REPLACEMENT REPLACEMENT REPLACEMENT REPLACEMENT},
        {"\xc3\xc3\xa9", REPLACEMENT "é"},
        {"\x80\xbf", REPLACEMENT REPLACEMENT},
        {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf" "A", REPLACEMENT REPLACEMENT REPLACEMENT REPLACEMENT "A"}, /* Unicode, table 3-11 */
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(cases); i++)
        assert_stream(NULL, 0, cases[i].bytes, cases[i].expected, false);
}

static void text_stream_held_text_comes_at_the_end(void **state)
{
    (void)state;
    assert_stream(&(const char *){"STOP"}, 1, "go ST", "go ST", false);
    assert_stream(&(const char *){"STOP"}, 1, "go ST\xf0\x9f", "go ST" REPLACEMENT, false);
    /* the last partial character completes a stop */
    assert_stream(&(const char *){"!" REPLACEMENT}, 1, "go!\xf0\x9f", "go", false);
}

static void text_stream_refuses_stops_that_cannot_be(void **state)
{
    TextStream *stream = NULL;

    (void)state;
    assert_int_equal(text_stream_new(&(const char *){""}, 1, &stream), -EINVAL);
    assert_int_equal(text_stream_new((const char *const[]){"ok", "\xff"}, 2, &stream), -EINVAL);
    assert_null(stream);
}

/* Random bytes, stops and cuts: the result is that of the naive search over the whole text. */
static uint64_t random_state = 0xfeedc0de5eed;

static uint64_t random_u64(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void search_naively(const char *const *stops, size_t n_stops, Out *whole)
{
    for (size_t end = 1; end <= whole->n; end++) {
        size_t longest = 0;

        for (size_t i = 0; i < n_stops; i++) {
            size_t n = strlen(stops[i]);

            if (n <= end && n > longest && memcmp(whole->text + end - n, stops[i], n) == 0)
                longest = n;
        }
        if (longest) {
            whole->n = end - longest;
            whole->text[whole->n] = 0;
            whole->stopped = true;
            return;
        }
    }
}

static void text_stream_equals_naive_search_on_random_bytes(void **state)
{
    static const char *const alphabet[] = {"a", "b", "ab", "é", "水", "\xe6", "\xb0", "\xff", "\xf0\x9f", "😀", "\n"};
    static const char *const possible[] = {"ab", "aab", "abab", "é水", "水", "\n\na", "b\nb", "😀a", REPLACEMENT "a", "bbb"};

    (void)state;
    for (int round = 0; round < 3000; round++) {
        char bytes[256] = "";
        const char *stops[3];
        size_t n_stops = random_u64() % 4, n = 0;
        Out whole, cut;

        for (uint64_t left = random_u64() % 40; left > 0; left--)
            n += (size_t)snprintf(bytes + n, sizeof(bytes) - n, "%s", alphabet[random_u64() % N_ELEMENTS(alphabet)]);
        for (size_t i = 0; i < n_stops; i++)
            stops[i] = possible[random_u64() % N_ELEMENTS(possible)];
        feed(NULL, 0, bytes, n, n + 1, &whole);
        search_naively(stops, n_stops, &whole);
        feed(stops, n_stops, bytes, n, 1 + random_u64() % 5, &cut);
        assert_string_equal(cut.text, whole.text);
        assert_true(whole.stopped || !cut.stopped); /* a stop that only the end completes is not reported */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_stream_stop_spans_tokens),
        cmocka_unit_test(text_stream_stop_inside_a_token_is_trimmed),
        cmocka_unit_test(text_stream_failed_partial_match_comes_out_once),
        cmocka_unit_test(text_stream_first_complete_stop_wins_then_the_longest),
        cmocka_unit_test(text_stream_characters_cut_over_tokens_come_whole),
        cmocka_unit_test(text_stream_first_chunk_holds_the_emoji),
        cmocka_unit_test(text_stream_invalid_bytes_become_one_replacement_each),
        cmocka_unit_test(text_stream_held_text_comes_at_the_end),
        cmocka_unit_test(text_stream_refuses_stops_that_cannot_be),
        cmocka_unit_test(text_stream_equals_naive_search_on_random_bytes),
    };

    print_message("seed %#llx\n", (unsigned long long)random_state);
    return cmocka_run_group_tests_name("text-stream", tests, NULL, NULL);
}
