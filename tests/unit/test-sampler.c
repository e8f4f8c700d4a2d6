/* SPDX-License-Identifier: Apache-2.0 */
/* The sampler against a plain sort of everything, and against the distribution it promises. */

#include "daemon/engine/sampler.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

static EngineSampling sampling(float temperature)
{
    return (EngineSampling){.temperature = temperature, .top_p = 1, .repeat_penalty = 1};
}

static Sampler *new_sampler(const EngineSampling *s, uint64_t seed, uint32_t n)
{
    Sampler *sampler = NULL;

    assert_int_equal(sampler_new(s, seed, n, &sampler, NULL), 0);
    return sampler;
}

static int32_t pick(Sampler *sampler, const float *logits, size_t n)
{
    _cleanup_(freep) float *copy = malloc(n * sizeof(*copy));
    int32_t id = -1;

    assert_non_null(copy);
    memcpy(copy, logits, n * sizeof(*copy));
    assert_int_equal(sampler_pick(sampler, copy, NULL, 0, &id, NULL), 0);
    return id;
}

static void greedy_takes_the_largest_and_the_lower_of_two_equal(void **state)
{
    EngineSampling s = sampling(0);
    _cleanup_(sampler_freep) Sampler *sampler = new_sampler(&s, 1, 5);

    (void)state;
    assert_int_equal(pick(sampler, (float[]){1, 3, 2, 3, -1}, 5), 1);
    assert_int_equal(pick(sampler, (float[]){-5, -4, -3, -2, -1}, 5), 4);
}

static void repeat_penalty_lowers_what_was_said_once_however_often(void **state)
{
    EngineSampling s = sampling(0);
    _cleanup_(sampler_freep) Sampler *sampler = NULL;
    float logits[] = {4, 3, -1, -1.5f};
    int32_t id, history[] = {0, 0, 0, 2, 77, -3}; /* ids outside the vocabulary are not looked up */

    (void)state;
    s.repeat_penalty = 2;
    sampler = new_sampler(&s, 1, 4);
    assert_int_equal(sampler_pick(sampler, logits, history, N_ELEMENTS(history), &id, NULL), 0);
    assert_int_equal(id, 1);
    assert_true(logits[0] == 2 && logits[1] == 3 && logits[2] == -2 && logits[3] == -1.5f);
}

static void repeat_penalty_forgets_what_is_long_ago(void **state)
{
    EngineSampling s = sampling(0);
    _cleanup_(sampler_freep) Sampler *sampler = NULL;
    float logits[] = {4, 3};
    int32_t id, history[SAMPLER_PENALTY_TOKENS + 1];

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(history); i++)
        history[i] = i == 0 ? 0 : 1;
    s.repeat_penalty = 10;
    sampler = new_sampler(&s, 1, 2);
    assert_int_equal(sampler_pick(sampler, logits, history, N_ELEMENTS(history), &id, NULL), 0);
    assert_int_equal(id, 0);
}

/* Chi-square of counts against expected probabilities; 8 tokens, so 24.3 is the 0.1 % point of 7 degrees of freedom. */
static void check_distribution(const EngineSampling *s, const float *logits, const double *expected, size_t n)
{
    _cleanup_(sampler_freep) Sampler *sampler = new_sampler(s, 20, (uint32_t)n);
    unsigned counts[8] = {0}, draws = 40000;
    double chi = 0;

    for (unsigned i = 0; i < draws; i++)
        counts[pick(sampler, logits, n)]++;
    for (size_t i = 0; i < n; i++) {
        double e = expected[i] * draws;

        if (expected[i] == 0) {
            assert_int_equal(counts[i], 0);
            continue;
        }
        chi += (counts[i] - e) * (counts[i] - e) / e;
    }
    assert_true(chi < 24.3);
}

static void softmax(const float *logits, const int *kept, double temperature, double *ret, size_t n)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += ret[i] = kept[i] ? exp((double)logits[i] / temperature) : 0;
    for (size_t i = 0; i < n; i++)
        ret[i] /= sum;
}

static const float eight[] = {0.5f, 2, -1, 1, 0, 1.5f, -3, 0.25f};

static void everything_off_gives_the_whole_distribution(void **state)
{
    EngineSampling s = sampling(1);
    double expected[8];

    (void)state;
    softmax(eight, (int[]){1, 1, 1, 1, 1, 1, 1, 1}, 1, expected, 8);
    check_distribution(&s, eight, expected, 8);
}

static void top_k_keeps_exactly_k(void **state)
{
    EngineSampling s = sampling(0.7f);
    double expected[8];

    (void)state;
    s.top_k = 3;
    softmax(eight, (int[]){0, 1, 0, 1, 0, 1, 0, 0}, (double)0.7f, expected, 8);
    check_distribution(&s, eight, expected, 8);
    s.top_k = 100; /* more than there are: all */
    softmax(eight, (int[]){1, 1, 1, 1, 1, 1, 1, 1}, (double)0.7f, expected, 8);
    check_distribution(&s, eight, expected, 8);
}

static void top_p_keeps_the_fewest_that_reach_p(void **state)
{
    EngineSampling s = sampling(1);
    double expected[8];

    (void)state;
    /* Probabilities, sorted: 0.399 0.242 0.147 0.089 0.069 0.054 0.020 0.003: 0.788 after three, 0.877 after four. */
    s.top_p = 0.8f;
    softmax(eight, (int[]){1, 1, 0, 1, 0, 1, 0, 0}, 1, expected, 8);
    check_distribution(&s, eight, expected, 8);
    s.top_p = 0; /* one always stays */
    softmax(eight, (int[]){0, 1, 0, 0, 0, 0, 0, 0}, 1, expected, 8);
    check_distribution(&s, eight, expected, 8);
}

static void min_p_filters_before_the_temperature(void **state)
{
    EngineSampling s = sampling(5); /* scaled first, everything would pass 0.3 */
    double expected[8];

    (void)state;
    s.min_p = 0.3f; /* logit >= 2 - 1.204 */
    softmax(eight, (int[]){0, 1, 0, 1, 0, 1, 0, 0}, 5, expected, 8);
    check_distribution(&s, eight, expected, 8);
}

static void the_same_seed_gives_the_same_tokens(void **state)
{
    EngineSampling s = sampling(1);
    _cleanup_(sampler_freep) Sampler *a = new_sampler(&s, 42, 8), *b = new_sampler(&s, 42, 8), *c = new_sampler(&s, 43, 8);
    unsigned differing = 0;

    (void)state;
    for (unsigned i = 0; i < 200; i++) {
        int32_t id = pick(a, eight, 8);

        assert_int_equal(pick(b, eight, 8), id);
        differing += pick(c, eight, 8) != id;
    }
    assert_true(differing > 50);
}

static void uniform_numbers_fill_the_interval(void **state)
{
    unsigned counts[16] = {0};
    double chi = 0;

    (void)state;
    for (uint64_t i = 0; i < 64000; i++) {
        double u = sampler_uniform(i % 2, i); /* two neighbouring seeds */

        assert_true(u >= 0 && u < 1);
        counts[(unsigned)(u * 16)]++;
    }
    for (unsigned i = 0; i < 16; i++)
        chi += (counts[i] - 4000.0) * (counts[i] - 4000.0) / 4000.0;
    assert_true(chi < 37.7); /* 0.1 % point of 15 degrees of freedom */
}

static void numbers_that_are_none_are_an_error(void **state)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};

    (void)state;
    for (size_t b = 0; b < N_ELEMENTS(bad); b++)
        for (unsigned place = 0; place < 8; place++)
            for (int hot = 0; hot < 2; hot++) {
                EngineSampling s = sampling((float)hot);
                _cleanup_(sampler_freep) Sampler *sampler = new_sampler(&s, 1, 8);
                ErrorDetail detail = ERROR_DETAIL_NULL;
                float logits[8];
                int32_t id;

                memcpy(logits, eight, sizeof(logits));
                logits[place] = bad[b];
                assert_int_equal(sampler_pick(sampler, logits, NULL, 0, &id, &detail), SAMPLER_E_NUMERIC);
                assert_non_null(strstr(detail.text, isnan(bad[b]) ? "not a number" : "infinite"));
            }
}

static void what_is_forbidden_is_never_picked(void **state)
{
    static const int32_t eos[] = {6}, words[] = {5, -1, 1, 4, -1, 6, -1}, history[] = {0, 3, 2, 0, 3, 1, 0, 3};
    const float logits[] = {0, 5, 6, 4, 7, 9, 8, 3};
    EngineSampling s = sampling(0);
    ProcessorsState state_of = {.eos = eos, .n_eos = 1, .n_prompt = 6};
    int32_t expected = 5;

    (void)state;
    /* 5 is the best, then the end token, then 4, 2, 1, 3. */
    for (int step = 0; step < 5; step++) {
        _cleanup_(sampler_freep) Sampler *sampler = NULL;
        float copy[8];
        int32_t id = -1;

        if (step == 1) { /* 5 never; 4 not after 1, and the last is 3; the end token is no bad word */
            state_of.bad_words = words;
            state_of.n_bad_words = N_ELEMENTS(words);
            expected = 6;
        }
        if (step == 2) { /* two tokens of the answer are there */
            s.min_tokens = 2;
            expected = 6;
        }
        if (step == 3) {
            s.min_tokens = 3;
            expected = 4;
        }
        sampler = new_sampler(&s, 1, 8);
        sampler_constrain(sampler, &state_of);
        memcpy(copy, logits, sizeof(copy));
        if (step == 4) { /* after 1, then: 4 is the end of a bad word; 0 has followed 1 before, as 2 and 1 have followed 3 */
            assert_int_equal(sampler_pick(sampler, copy, history, 6, &id, NULL), 0);
            assert_int_equal(id, 2);
            continue;
        }
        assert_int_equal(sampler_pick(sampler, copy, history, 8, &id, NULL), 0);
        assert_int_equal(id, expected);
    }
    s.no_repeat_ngram = 3; /* 0 3 has been followed by 2 and by 1 */
    for (float temperature = 0; temperature < 9; temperature += 4) {
        _cleanup_(sampler_freep) Sampler *sampler = NULL;
        bool seen[8] = {false};

        s.temperature = temperature;
        sampler = new_sampler(&s, 9, 8);
        sampler_constrain(sampler, &state_of);
        for (int i = 0; i < 400; i++) {
            float copy[8];
            int32_t id = -1;

            memcpy(copy, logits, sizeof(copy));
            assert_int_equal(sampler_pick(sampler, copy, history, 8, &id, NULL), 0);
            seen[id] = true;
        }
        assert_false(seen[1] || seen[2] || seen[5] || seen[6]);
        assert_true(seen[4] && (temperature < 1 || (seen[0] && seen[3] && seen[7])));
    }
}

static void wrong_options_are_refused_by_name(void **state)
{
    static const char *empty_stop[] = {"x", ""};
    EngineSampling s[] = {sampling(-1),  sampling(NAN), sampling(1), sampling(1), sampling(1),
                          sampling(1),   sampling(1),   sampling(1), sampling(1), sampling(1)};
    static const char *const names[] = {"temperature", "temperature", "top-p", "top-p", "min-p", "min-p", "repeat-penalty",
                                        "repeat-penalty", "stop string 2", "min-tokens is 3, with max-tokens 2"};

    (void)state;
    s[2].top_p = -0.1f;
    s[3].top_p = NAN;
    s[4].min_p = 1.5f;
    s[5].min_p = -0.1f;
    s[6].repeat_penalty = 0;
    s[7].repeat_penalty = INFINITY;
    s[8].stop = empty_stop;
    s[8].n_stop = 2;
    s[9].min_tokens = 3;
    s[9].max_tokens = 2;
    for (size_t i = 0; i < N_ELEMENTS(s); i++) {
        ErrorDetail detail = ERROR_DETAIL_NULL;

        assert_int_equal(sampler_check(&s[i], &detail), -EINVAL);
        assert_non_null(strstr(detail.text, names[i]));
    }
}

/* ---- against a sort ---------------------------------------------------------------------------------------------------------- */

static const float *sorting;

static int by_rank(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;

    return sorting[x] != sorting[y] ? (sorting[x] > sorting[y] ? -1 : 1) : (x < y ? -1 : 1);
}

/* Which ids may come out, by sorting everything. */
static void reference(const EngineSampling *s, const float *logits, size_t n, bool *ret_allowed)
{
    _cleanup_(freep) int32_t *order = malloc(n * sizeof(*order));
    double total = 0, sum = 0;
    size_t kept = n;

    assert_non_null(order);
    for (size_t i = 0; i < n; i++)
        order[i] = (int32_t)i;
    sorting = logits;
    qsort(order, n, sizeof(*order), by_rank);
    if (s->top_k > 0)
        kept = MIN(kept, (size_t)s->top_k);
    for (size_t i = 0; i < kept; i++)
        total += exp((double)logits[order[i]] - (double)logits[order[0]]);
    for (size_t i = 0; i < kept && s->top_p < 1; i++) {
        sum += exp((double)logits[order[i]] - (double)logits[order[0]]);
        if (sum >= (double)s->top_p * total)
            kept = i + 1;
    }
    memset(ret_allowed, 0, n * sizeof(*ret_allowed));
    for (size_t i = 0; i < kept; i++)
        ret_allowed[order[i]] = exp((double)logits[order[i]] - (double)logits[order[0]]) >= (double)s->min_p * (1 - 1e-12);
}

static void any_combination_yields_an_allowed_token(void **state)
{
    uint64_t seed = 7, at = 0;
    float logits[3000];
    bool allowed[3000];

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (unsigned round = 0; round < 400; round++) {
        size_t n = 1 + (size_t)(sampler_uniform(seed, at++) * N_ELEMENTS(logits));
        double spread = pow(10, sampler_uniform(seed, at++) * 4 - 2);
        EngineSampling s = sampling((float)pow(10, sampler_uniform(seed, at++) * 5 - 3.01));
        Sampler *sampler;

        for (size_t i = 0; i < n; i++)
            logits[i] = (float)((sampler_uniform(seed, at++) - 0.5) * spread);
        for (size_t i = 0; round % 4 == 0 && i < n; i++)
            logits[i] = roundf(logits[i]); /* many equal ones */
        if (sampler_uniform(seed, at++) < 0.5)
            s.top_k = (uint32_t)(sampler_uniform(seed, at++) * 1.2 * (double)n);
        if (sampler_uniform(seed, at++) < 0.5)
            s.top_p = (float)(1 - sampler_uniform(seed, at++));
        if (sampler_uniform(seed, at++) < 0.5)
            s.min_p = (float)sampler_uniform(seed, at++);
        reference(&s, logits, n, allowed);
        sampler = new_sampler(&s, round, (uint32_t)n);
        for (unsigned i = 0; i < 20; i++)
            assert_true(allowed[pick(sampler, logits, n)]);
        sampler_free(sampler);
    }
}

static void extreme_logits_still_yield_a_token(void **state)
{
    static const float huge[] = {3.0e38f, -3.0e38f, 3.0e38f, 0, 1e-45f, -0.0f};
    int32_t history[] = {0, 1, 2};

    (void)state;
    for (unsigned t = 0; t < 4; t++) {
        EngineSampling s = sampling((float[]){0, 1e-30f, 1, 100}[t]);
        _cleanup_(sampler_freep) Sampler *sampler = NULL;
        float logits[6];
        int32_t id = -1;

        s.repeat_penalty = 0.01f; /* would overflow */
        s.min_p = 0.5f;
        s.top_p = 0.5f;
        sampler = new_sampler(&s, t + 1, 6);
        memcpy(logits, huge, sizeof(logits));
        assert_int_equal(sampler_pick(sampler, logits, history, 3, &id, NULL), 0);
        assert_true(id == 0 || id == 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_largest_and_the_lower_of_two_equal),
        cmocka_unit_test(repeat_penalty_lowers_what_was_said_once_however_often),
        cmocka_unit_test(repeat_penalty_forgets_what_is_long_ago),
        cmocka_unit_test(everything_off_gives_the_whole_distribution),
        cmocka_unit_test(top_k_keeps_exactly_k),
        cmocka_unit_test(top_p_keeps_the_fewest_that_reach_p),
        cmocka_unit_test(min_p_filters_before_the_temperature),
        cmocka_unit_test(the_same_seed_gives_the_same_tokens),
        cmocka_unit_test(uniform_numbers_fill_the_interval),
        cmocka_unit_test(numbers_that_are_none_are_an_error),
        cmocka_unit_test(what_is_forbidden_is_never_picked),
        cmocka_unit_test(wrong_options_are_refused_by_name),
        cmocka_unit_test(any_combination_yields_an_allowed_token),
        cmocka_unit_test(extreme_logits_still_yield_a_token),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
