/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Beam search and score processors against Transformers: the check vectors of the cache semantics, random tables (tests/data/beam-golden.json,
 * made by make-beam-golden.py), and what the search promises beyond them.
 */

#include "daemon/engine/beam.h"
#include "daemon/engine/log-softmax.h"
#include "daemon/engine/processors.h"
#include "daemon/engine/sampler.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#define MAX_STEPS  64
#define MAX_TOKENS 64
#define MAX_VOCAB  64

/* A model of which the next token's logits depend on the last token only. */
typedef struct Table {
    uint32_t n_vocab;
    float logits[MAX_VOCAB][MAX_VOCAB];
} Table;

/* What happened: source beams of each step. */
typedef struct Trace {
    uint32_t n_steps, sources[MAX_STEPS][40];
    float scores[MAX_STEPS][40];
} Trace;

typedef struct Setup {
    const Table *table;
    const int32_t *prompt;
    size_t n_prompt;
    EngineSampling sampling; /* processors */
    const int32_t *bad_words;
    size_t n_bad_words;
} Setup;

/* Ids of each running beam, as an engine would keep them. */
typedef struct Beams {
    int32_t ids[40][MAX_TOKENS];
    size_t n;
} Beams;

static void feed(BeamSearch *search, const BeamOptions *o, const Setup *setup, const Beams *beams)
{
    ProcessorsState state = {.sampling = &setup->sampling, .eos = o->eos, .n_eos = o->n_eos, .bad_words = setup->bad_words,
                             .n_bad_words = setup->n_bad_words, .n_prompt = setup->n_prompt, .draws = o->sample};

    for (uint32_t b = 0; b < o->n_beams; b++) {
        float row[MAX_VOCAB], scratch[MAX_VOCAB];

        memcpy(row, setup->table->logits[beams->ids[b][beams->n - 1]], o->n_vocab * sizeof(float));
        assert_true(log_softmax(row, o->n_vocab));
        processors_run(row, o->n_vocab, beams->ids[b], beams->n, &state, scratch);
        beam_search_row(search, b, row);
    }
}

static void advance(const BeamSearch *search, uint32_t n_beams, Beams *beams, Trace *trace)
{
    Beams old = *beams;

    for (uint32_t b = 0; b < n_beams; b++) {
        uint32_t source = beam_search_source(search, b);

        trace->sources[trace->n_steps][b] = source;
        trace->scores[trace->n_steps][b] = beam_search_score(search, b);
        memcpy(beams->ids[b], old.ids[source], old.n * sizeof(int32_t));
        beams->ids[b][old.n] = beam_search_token(search, b);
    }
    beams->n++;
    trace->n_steps++;
}

static BeamSearch *run(const BeamOptions *o, const Setup *setup, Trace *ret_trace)
{
    BeamSearch *search = NULL;
    Beams beams = {.n = setup->n_prompt};
    int r;

    memset(ret_trace, 0, sizeof(*ret_trace));
    for (uint32_t b = 0; b < o->n_beams; b++)
        memcpy(beams.ids[b], setup->prompt, setup->n_prompt * sizeof(int32_t));
    assert_int_equal(beam_search_new(o, &search, NULL), 0);
    do {
        assert_true(ret_trace->n_steps < MAX_STEPS);
        feed(search, o, setup, &beams);
        r = beam_search_step(search);
        assert_true(r >= 0);
        advance(search, o->n_beams, &beams, ret_trace);
        assert_int_equal(beam_search_length(search), ret_trace->n_steps);
    } while (r == 0);
    return search;
}

/* ---- check vectors ------------------------------------------------------------------------------------------------------------- */

static void fill_table(Table *table, const double rows[4][4])
{
    table->n_vocab = 4;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            table->logits[i][j] = logf((float)rows[i][j]);
}

static void expect_result(const BeamSearch *search, uint32_t index, const int32_t *tokens, double score)
{
    int32_t got[MAX_TOKENS];
    BeamResult result;

    beam_search_result(search, index, &result);
    beam_search_tokens(search, index, got, NULL);
    for (uint32_t i = 0; i < result.n_tokens; i++)
        assert_int_equal(got[i], tokens[i]);
    assert_true(tokens[result.n_tokens] == -1);
    if (fabs((double)result.score - score) > 2e-6)
        fail_msg("score %.7f, expected %.7f", (double)result.score, score);
}

static void expect_sources(const Trace *trace, const char *text, bool last_is_arbitrary)
{
    uint32_t step = 0;

    for (const char *p = text; *p; p += p[2] ? 3 : 2, step++) {
        if (p[0] == '?') /* an exact tie: which one upstream takes is arbitrary */
            continue;
        assert_int_equal(trace->sources[step][0], (uint32_t)(p[0] - '0'));
        assert_int_equal(trace->sources[step][1], (uint32_t)(p[1] - '0'));
    }
    assert_int_equal(trace->n_steps, step + last_is_arbitrary);
}

#define EOS_ZERO ((const int32_t[]){0})
#define ONE      ((const int32_t[]){1})

static void vectors_of_11_6_first_table_by_early_stopping(void **state)
{
    static const double rows[4][4] = {{.25, .25, .25, .25}, {.28, .04, .32, .36}, {.35, .19, .15, .31}, {.06, .22, .44, .28}};
    static const struct {
        BeamEarly early;
        int32_t second[8];
        double score;
        const char *sources;
        bool last_is_arbitrary;
    } expected[] = {
        {BEAM_EARLY_FALSE, {3, 2, 3, 2, 0, -1}, -0.976923, "00 00 01 ?? 01", false},
        {BEAM_EARLY_TRUE, {2, 0, -1}, -1.094628, "00 00 01", false},
        {BEAM_EARLY_NEVER, {3, 2, 3, 2, 3, 2, -1}, -0.971160, "00 00 01 ?? 01", true},
    };
    Table table;

    (void)state;
    fill_table(&table, rows);
    for (size_t i = 0; i < N_ELEMENTS(expected); i++) {
        BeamOptions o = {.n_beams = 2, .n_vocab = 4, .max_new_tokens = 6, .eos = EOS_ZERO, .n_eos = 1, .length_penalty = 1,
                         .early_stopping = expected[i].early};
        Setup setup = {.table = &table, .prompt = ONE, .n_prompt = 1, .sampling.repeat_penalty = 1};
        _cleanup_(beam_search_freep) BeamSearch *search = NULL;
        Trace trace;

        search = run(&o, &setup, &trace);
        assert_int_equal(beam_search_n_results(search), 2);
        expect_result(search, 0, (const int32_t[]){3, 2, 0, -1}, -0.964151);
        expect_result(search, 1, expected[i].second, expected[i].score);
        expect_sources(&trace, expected[i].sources, expected[i].last_is_arbitrary);
    }
}

static void vectors_of_11_6_second_table_by_length_penalty(void **state)
{
    static const double rows[4][4] = {{.25, .25, .25, .25}, {.10, .20, .40, .30}, {.35, .15, .10, .40}, {.05, .45, .30, .20}};
    static const int32_t whole[] = {2, 3, 1, 2, 3, -1}, ended[] = {2, 3, 1, 2, 0, -1}, brief[] = {2, 0, -1};
    static const struct {
        double penalty;
        const int32_t *first, *second;
        double scores[2];
    } expected[] = {
        {1, whole, ended, {-0.892734, -0.919440}},
        {0, brief, whole, {-1.966113, -4.463671}},
        {2, whole, ended, {-0.178547, -0.183888}},
        {-1, brief, whole, {-3.932226, -22.318353}},
    };
    Table table;

    (void)state;
    fill_table(&table, rows);
    for (size_t i = 0; i < N_ELEMENTS(expected); i++)
        for (int early = 0; early < BEAM_EARLY_X_MAX; early++) {
            BeamOptions o = {.n_beams = 2, .n_vocab = 4, .max_new_tokens = 5, .eos = EOS_ZERO, .n_eos = 1,
                             .length_penalty = expected[i].penalty, .early_stopping = (BeamEarly)early};
            Setup setup = {.table = &table, .prompt = ONE, .n_prompt = 1, .sampling.repeat_penalty = 1};
            _cleanup_(beam_search_freep) BeamSearch *search = NULL;
            Trace trace;

            search = run(&o, &setup, &trace);
            expect_result(search, 0, expected[i].first, expected[i].scores[0]);
            expect_result(search, 1, expected[i].second, expected[i].scores[1]);
            for (uint32_t s = 0; s < 4; s++)
                assert_int_equal(trace.sources[s][0] * 10 + trace.sources[s][1], ((const uint32_t[]){0, 1, 1, 0})[s]);
        }
}

/* ---- random tables ----------------------------------------------------------------------------------------------------------------- */

static json_t *golden(void)
{
    const char *folder = getenv("LEAT_TEST_DATA");
    json_error_t error;
    char path[4096];
    json_t *json;

    (void)snprintf(path, sizeof(path), "%s/beam-golden.json", folder ? folder : "tests/data");
    json = json_load_file(path, 0, &error);
    if (!json)
        fail_msg("%s: %s", path, error.text);
    return json;
}

static size_t read_ids(const json_t *array, int32_t *ret)
{
    size_t i;
    json_t *id;

    json_array_foreach(array, i, id)
        ret[i] = (int32_t)json_integer_value(id);
    return json_array_size(array);
}

static size_t read_words(const json_t *words, int32_t *ret)
{
    size_t i, n = 0;
    json_t *word;

    json_array_foreach(words, i, word) {
        n += read_ids(word, ret + n);
        ret[n++] = -1;
    }
    return n;
}

static void read_table(const json_t *json, Table *ret)
{
    ret->n_vocab = (uint32_t)json_array_size(json);
    for (uint32_t i = 0; i < ret->n_vocab; i++)
        for (uint32_t j = 0; j < ret->n_vocab; j++)
            ret->logits[i][j] = (float)json_number_value(json_array_get(json_array_get(json, i), j));
}

static void compare_case(const json_t *json, const BeamSearch *search, const Trace *trace, size_t index)
{
    const json_t *sequences = json_object_get(json, "sequences"), *sources = json_object_get(json, "sources");

    assert_int_equal(beam_search_n_results(search), json_array_size(sequences));
    for (uint32_t i = 0; i < json_array_size(sequences); i++) {
        int32_t expected[MAX_TOKENS], beams[MAX_TOKENS], got[MAX_TOKENS];
        uint32_t got_beams[MAX_TOKENS];
        double score = json_number_value(json_array_get(json_object_get(json, "scores"), i));
        size_t n = read_ids(json_array_get(sequences, i), expected);
        BeamResult result;

        (void)read_ids(json_array_get(json_object_get(json, "trails"), i), beams);
        beam_search_result(search, i, &result);
        beam_search_tokens(search, i, got, got_beams);
        if (result.n_tokens != n || memcmp(got, expected, n * sizeof(*got)) != 0 || memcmp(got_beams, beams, n * sizeof(*got_beams)) != 0)
fail_msg("case %zu, sequence %u is another", index, i);
        if (fabs((double)result.score - score) > 2e-6 * fmax(1, fabs(score)))
            fail_msg("case %zu, sequence %u: score %.7f, expected %.7f", index, i, (double)result.score, score);
    }
    assert_int_equal(trace->n_steps, json_array_size(sources));
    for (uint32_t step = 0; step + 1 < trace->n_steps; step++) {
        int32_t expected[40];
        size_t n = read_ids(json_array_get(sources, step), expected);

        for (size_t b = 0; b < n; b++)
            /* A beam at -1e9 or so is there because there was nothing better: which one is arbitrary. */
            if (trace->sources[step][b] != (uint32_t)expected[b] && trace->scores[step][b] > -1e8f)
                fail_msg("case %zu, step %u: beam %zu continues %u, expected %d", index, step, b, trace->sources[step][b], expected[b]);
    }
}

static BeamEarly early_of(const json_t *json)
{
    const char *text = json_string_value(json_object_get(json, "early"));

    return strcmp(text, "true") == 0 ? BEAM_EARLY_TRUE : strcmp(text, "never") == 0 ? BEAM_EARLY_NEVER : BEAM_EARLY_FALSE;
}

static double number_of(const json_t *json, const char *key)
{
    return json_number_value(json_object_get(json, key));
}

static void random_tables_give_what_transformers_gives(void **state)
{
    json_t *json = golden(), *one;
    size_t i;

    (void)state;
    json_array_foreach(json_object_get(json, "cases"), i, one) {
        int32_t prompt[MAX_TOKENS], eos[8], words[64];
        Setup setup = {.prompt = prompt, .n_prompt = read_ids(json_object_get(one, "prompt"), prompt), .bad_words = words,
                       .n_bad_words = read_words(json_object_get(one, "bad_words"), words)};
        BeamOptions o = {.n_beams = (uint32_t)number_of(one, "beams"), .max_new_tokens = (uint32_t)number_of(one, "max_new"), .eos = eos,
                         .n_eos = (uint32_t)read_ids(json_object_get(one, "eos"), eos), .early_stopping = early_of(one),
                         .length_penalty = number_of(one, "penalty")};
        _cleanup_(beam_search_freep) BeamSearch *search = NULL;
        Trace trace;
        Table table;

        read_table(json_array_get(json_object_get(json, "tables"), (size_t)number_of(one, "table")), &table);
        setup.table = &table;
        o.n_vocab = table.n_vocab;
        setup.sampling = (EngineSampling){.repeat_penalty = (float)number_of(one, "repetition"), .min_tokens = (uint32_t)number_of(one, "min_new"),
                                          .no_repeat_ngram = (uint32_t)number_of(one, "ngram")};
        search = run(&o, &setup, &trace);
        compare_case(one, search, &trace, i);
    }
    print_message("%zu cases\n", i);
    assert_true(i >= 60);
    json_decref(json);
}

static void processors_give_what_transformers_gives(void **state)
{
    json_t *json = golden(), *one;
    size_t i;

    (void)state;
    json_array_foreach(json_object_get(json, "processors"), i, one) {
        EngineSampling s = {.temperature = (float)number_of(one, "temperature"), .top_k = (uint32_t)number_of(one, "top_k"),
                            .top_p = (float)number_of(one, "top_p"), .min_p = (float)number_of(one, "min_p")};
        float scores[MAX_VOCAB], scratch[MAX_VOCAB];
        int32_t history[MAX_TOKENS];
        size_t n = read_ids(json_object_get(one, "history"), history), n_vocab = json_array_size(json_object_get(one, "before"));

        for (size_t v = 0; v < n_vocab; v++)
            scores[v] = (float)json_number_value(json_array_get(json_object_get(one, "before"), v));
        processors_penalise(scores, (uint32_t)n_vocab, history, n, (float)number_of(one, "repetition"), scratch);
        processors_no_repeat_ngram(scores, (uint32_t)n_vocab, history, n, (uint32_t)number_of(one, "ngram"));
        processors_warp(scores, (uint32_t)n_vocab, &s, (uint32_t)number_of(one, "keep"), scratch);
        for (size_t v = 0; v < n_vocab; v++) {
            const json_t *after = json_array_get(json_object_get(one, "after"), v);

            if (json_is_null(after) != (scores[v] == -INFINITY) ||
                (!json_is_null(after) && fabs(json_number_value(after) - (double)scores[v]) > 1e-5))
                fail_msg("chain %zu, token %zu: %g", i, v, (double)scores[v]);
        }
    }
    assert_true(i >= 8);
    json_decref(json);
}

static void log_probabilities_are_those_of_double_precision(void **state)
{
    static const float scales[] = {0.01f, 1, 10, 60, 3000};
    _cleanup_(freep) float *row = malloc(5003 * sizeof(float));
    double worst = 0;

    (void)state;
    assert_non_null(row);
    for (size_t s = 0; s < N_ELEMENTS(scales); s++)
        for (uint32_t n = 1; n <= 5003; n = n < 9 ? n + 1 : n * 3 + 1) {
            _cleanup_(freep) float *copy = malloc(n * sizeof(float));
            double sum = 0, max = -INFINITY;

            assert_non_null(copy);
            for (uint32_t i = 0; i < n; i++) {
                row[i] = scales[s] * (float)(2 * sampler_uniform(s, i) - 1);
                max = fmax(max, (double)row[i]);
            }
            for (uint32_t i = 0; i < n; i++)
                sum += exp((double)row[i] - max);
            memcpy(copy, row, n * sizeof(float));
            assert_true(log_softmax(copy, n));
            for (uint32_t i = 0; i < n; i++) {
                double exact = (double)row[i] - max - log(sum);

                worst = fmax(worst, fabs((double)copy[i] - exact) / fmax(1, fabs(exact)));
            }
        }
    for (uint32_t n = 1; n < 20; n++)
        for (uint32_t at = 0; at < n; at++) {
            const float bad[] = {NAN, INFINITY, -INFINITY, -NAN};
            float few[20] = {0}, same[20];

            few[at] = bad[(n + at) % 4];
            memcpy(same, few, sizeof(few));
            assert_false(log_softmax(few, n));
            assert_memory_equal(few, same, sizeof(few));
        }
    print_message("worst %.1e\n", worst);
    assert_true(worst < 6e-7);
}

static void the_next_score_above_a_threshold_is_found_wherever_it_is(void **state)
{
    float row[300];

    (void)state;
    for (uint32_t n = 0; n < N_ELEMENTS(row); n += 1 + n / 20)
        for (uint32_t first = 0; first <= n; first += 1 + n / 9)
            for (uint32_t at = 0; at < n; at += 1 + n / 30) {
                for (uint32_t i = 0; i < n; i++)
                    row[i] = i % 7 == 3 ? -INFINITY : -10 - (float)(i % 5);
                row[at] = -2.5f;
                assert_int_equal(log_softmax_next(row, first, n, -1, -3.5f), at >= first ? at : n);
                assert_int_equal(log_softmax_next(row, first, n, -1, -3.4f), n);
                assert_int_equal(log_softmax_next(row, first, n, -1, -INFINITY), first);
            }
}

/* ---- what it promises --------------------------------------------------------------------------------------------------------------- */

static double uniform(uint64_t *seed)
{
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (double)(*seed >> 11) * 0x1p-53;
}

static void random_table(Table *table, uint32_t n_vocab, uint64_t seed)
{
    table->n_vocab = n_vocab;
    for (uint32_t i = 0; i < n_vocab; i++)
        for (uint32_t j = 0; j < n_vocab; j++)
            table->logits[i][j] = (float)(4 * uniform(&seed));
}

/* The partial selection against a sort of everything, at the size of a real vocabulary. */
static void the_best_of_a_large_vocabulary_are_selected(void **state)
{
    enum { VOCAB = 50000, BEAMS = 8 };
    BeamOptions o = {.n_beams = BEAMS, .n_vocab = VOCAB, .max_new_tokens = 10, .length_penalty = 1};
    _cleanup_(beam_search_freep) BeamSearch *search = NULL;
    _cleanup_(freep) float *row = malloc(VOCAB * sizeof(float));
    uint64_t seed = 1;
    float best[BEAMS];

    (void)state;
    assert_non_null(row);
    for (uint32_t i = 0; i < VOCAB; i++)
        row[i] = (float)(10 * uniform(&seed));
    assert_true(log_softmax(row, VOCAB));
    assert_int_equal(beam_search_new(&o, &search, NULL), 0);
    for (uint32_t b = BEAMS; b-- > 0;) /* in any order */
        beam_search_row(search, b, row);
    assert_int_equal(beam_search_step(search), 0);
    for (uint32_t b = 0; b < BEAMS; b++) {
        uint32_t n_better = 0;

        assert_int_equal(beam_search_source(search, b), 0); /* the others begin at -1e9 */
        best[b] = row[beam_search_token(search, b)];
        for (uint32_t i = 0; i < VOCAB; i++)
            n_better += row[i] > best[b];
        assert_int_equal(n_better, b);
    }
}

static void equal_scores_go_to_the_lower_beam_and_token(void **state)
{
    static const float flat[6] = {-1, -1, -1, -1, -1, -1};
    BeamOptions o = {.n_beams = 3, .n_vocab = 6, .max_new_tokens = 10, .length_penalty = 1};
    _cleanup_(beam_search_freep) BeamSearch *search = NULL;

    (void)state;
    assert_int_equal(beam_search_new(&o, &search, NULL), 0);
    for (int step = 0; step < 3; step++) {
        for (uint32_t b = 3; b-- > 0;)
            beam_search_row(search, b, flat);
        assert_int_equal(beam_search_step(search), 0);
        for (uint32_t b = 0; b < 3; b++) {
            assert_int_equal(beam_search_source(search, b), 0);
            assert_int_equal(beam_search_token(search, b), b);
        }
    }
}

static void a_step_without_every_row_is_refused(void **state)
{
    static const float flat[4] = {-1, -1, -1, -1};
    BeamOptions o = {.n_beams = 2, .n_vocab = 4, .max_new_tokens = 3, .length_penalty = 1};
    _cleanup_(beam_search_freep) BeamSearch *search = NULL;

    (void)state;
    assert_int_equal(beam_search_new(&o, &search, NULL), 0);
    assert_int_equal(beam_search_step(search), -EINVAL);
    beam_search_row(search, 1, flat);
    assert_int_equal(beam_search_step(search), -EINVAL);
    beam_search_row(search, 0, flat);
    assert_int_equal(beam_search_step(search), 0);
}

static void options_without_sense_are_refused(void **state)
{
    const BeamOptions good = {.n_beams = 2, .n_vocab = 4, .max_new_tokens = 3, .length_penalty = 1};
    BeamSearch *search = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;

    (void)state;
    for (int i = 0; i < 6; i++) {
        BeamOptions o = good;

        o.n_beams = i == 0 ? 0 : o.n_beams;
        o.n_vocab = i == 1 ? 0 : o.n_vocab;
        o.max_new_tokens = i == 2 ? 0 : o.max_new_tokens;
        o.length_penalty = i == 3 ? (double)NAN : i == 4 ? 1000 : o.length_penalty;
        o.early_stopping = i == 5 ? BEAM_EARLY_X_MAX : o.early_stopping;
        assert_int_equal(beam_search_new(&o, &search, &detail), -EINVAL);
        assert_null(search);
    }
}

static bool stop_at_three(void *userdata, uint32_t beam, int32_t token)
{
    (void)beam;
    ++*(uint32_t *)userdata;
    return token == 3;
}

static void a_stop_criterion_ends_sequences_like_an_end_token(void **state)
{
    Table table;

    (void)state;
    for (uint64_t seed = 1; seed < 20; seed++) {
        uint32_t n_asked = 0;
        BeamOptions o = {.n_beams = 3, .n_vocab = 9, .max_new_tokens = 12, .length_penalty = 1, .stops = stop_at_three, .userdata = &n_asked};
        BeamOptions with_eos = {.n_beams = 3, .n_vocab = 9, .max_new_tokens = 12, .length_penalty = 1, .eos = (const int32_t[]){3}, .n_eos = 1};
        Setup setup = {.table = &table, .prompt = ONE, .n_prompt = 1, .sampling.repeat_penalty = 1};
        _cleanup_(beam_search_freep) BeamSearch *a = NULL, *b = NULL;
        Trace trace;

        random_table(&table, 9, seed);
        a = run(&o, &setup, &trace);
        b = run(&with_eos, &setup, &trace); /* K is 2 * n_beams for both */
        assert_true(n_asked > 0);
        for (uint32_t i = 0; i < 3; i++) {
            int32_t x[MAX_TOKENS], y[MAX_TOKENS];
            BeamResult one, other;

            beam_search_result(a, i, &one);
            beam_search_result(b, i, &other);
            assert_int_equal(one.n_tokens, other.n_tokens);
            assert_true(one.score == other.score);
            beam_search_tokens(a, i, x, NULL);
            beam_search_tokens(b, i, y, NULL);
            assert_memory_equal(x, y, one.n_tokens * sizeof(*x));
            if (other.stop == BEAM_STOP_EOS)
                assert_int_equal(one.stop, BEAM_STOP_CRITERION);
        }
    }
}

/* The first step draws K tokens of beam 0 without replacement: their chance to be among them against the product of a plain simulation. */
static void draws_are_without_replacement_from_the_softmax(void **state)
{
    enum { N = 20000, VOCAB = 5 };
    const double p[VOCAB] = {.4, .3, .15, .1, .05};
    uint32_t seen[VOCAB] = {0};
    float row[VOCAB];

    (void)state;
    for (int i = 0; i < VOCAB; i++)
        row[i] = (float)log(p[i]);
    for (uint64_t seed = 1; seed <= N; seed++) {
        BeamOptions o = {.n_beams = 1, .n_vocab = VOCAB, .max_new_tokens = 1, .length_penalty = 1, .sample = true, .seed = seed};
        _cleanup_(beam_search_freep) BeamSearch *search = NULL;
        int32_t token;

        assert_int_equal(beam_search_new(&o, &search, NULL), 0);
        beam_search_row(search, 0, row);
        assert_int_equal(beam_search_step(search), 1); /* K is 2; the better of the two is the result */
        beam_search_tokens(search, 0, &token, NULL);
        seen[token]++;
    }
    /* The better of two draws is i when i is in and the other is a less likely one. */
    for (int i = 0; i < VOCAB; i++) {
        double chance = 0, deviation;

        for (int j = i + 1; j < VOCAB; j++)
            chance += p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j]);
        deviation = sqrt(N * chance * (1 - chance));
        if (fabs(seen[i] - N * chance) > 4.5 * deviation + 1e-9)
            fail_msg("token %d was the better one %u times of %d, expected %.1f +- %.1f", i, seen[i], N, N * chance, deviation);
    }
}

static void the_same_seed_draws_the_same_in_any_order_of_rows(void **state)
{
    Table table;

    (void)state;
    random_table(&table, 12, 7);
    for (uint64_t seed = 1; seed < 30; seed++) {
        BeamOptions o = {.n_beams = 4, .n_vocab = 12, .max_new_tokens = 8, .eos = EOS_ZERO, .n_eos = 1, .length_penalty = 1, .sample = true,
                         .seed = seed};
        BeamSearch *searches[2];
        bool over[2] = {false, false};

        for (int i = 0; i < 2; i++)
            assert_int_equal(beam_search_new(&o, &searches[i], NULL), 0);
        for (int step = 0; !over[0]; step++) {
            for (uint32_t k = 0; k < 4; k++)
                for (int i = 0; i < 2; i++) {
                    uint32_t b = i ? 3 - k : k;
                    float row[MAX_VOCAB];

                    memcpy(row, table.logits[step == 0 ? 1 : beam_search_token(searches[i], b)], sizeof(row));
                    assert_true(log_softmax(row, 12));
                    beam_search_row(searches[i], b, row);
                }
            for (int i = 0; i < 2; i++)
                over[i] = beam_search_step(searches[i]) == 1;
            assert_int_equal(over[0], over[1]);
            for (uint32_t b = 0; b < 4; b++) {
                assert_int_equal(beam_search_source(searches[0], b), beam_search_source(searches[1], b));
                assert_int_equal(beam_search_token(searches[0], b), beam_search_token(searches[1], b));
                assert_true(beam_search_score(searches[0], b) == beam_search_score(searches[1], b));
            }
        }
        for (int i = 0; i < 2; i++)
            beam_search_free(searches[i]);
    }
}

static void min_new_tokens_and_bad_words_hold_for_drawn_beams(void **state)
{
    static const int32_t words[] = {5, -1, 2, 4, -1};
    Table table;

    (void)state;
    random_table(&table, 10, 3);
    for (uint64_t seed = 1; seed < 60; seed++) {
        BeamOptions o = {.n_beams = 3, .n_vocab = 10, .max_new_tokens = 9, .eos = EOS_ZERO, .n_eos = 1, .length_penalty = 1, .sample = true,
                         .seed = seed};
        Setup setup = {.table = &table, .prompt = ONE, .n_prompt = 1, .bad_words = words, .n_bad_words = N_ELEMENTS(words),
                       .sampling = {.repeat_penalty = 1, .temperature = 1.5f, .top_p = 1, .min_tokens = 5}};
        _cleanup_(beam_search_freep) BeamSearch *search = NULL;
        Trace trace;

        search = run(&o, &setup, &trace);
        for (uint32_t i = 0; i < beam_search_n_results(search); i++) {
            int32_t tokens[MAX_TOKENS];
            BeamResult result;

            beam_search_result(search, i, &result);
            beam_search_tokens(search, i, tokens, NULL);
            assert_true(result.n_tokens > 5);
            for (uint32_t t = 0; t < result.n_tokens; t++) {
                assert_int_not_equal(tokens[t], 5);
                assert_false(t > 0 && tokens[t - 1] == 2 && tokens[t] == 4);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vectors_of_11_6_first_table_by_early_stopping),
        cmocka_unit_test(vectors_of_11_6_second_table_by_length_penalty),
        cmocka_unit_test(random_tables_give_what_transformers_gives),
        cmocka_unit_test(processors_give_what_transformers_gives),
        cmocka_unit_test(log_probabilities_are_those_of_double_precision),
        cmocka_unit_test(the_next_score_above_a_threshold_is_found_wherever_it_is),
        cmocka_unit_test(the_best_of_a_large_vocabulary_are_selected),
        cmocka_unit_test(equal_scores_go_to_the_lower_beam_and_token),
        cmocka_unit_test(a_step_without_every_row_is_refused),
        cmocka_unit_test(options_without_sense_are_refused),
        cmocka_unit_test(a_stop_criterion_ends_sequences_like_an_end_token),
        cmocka_unit_test(draws_are_without_replacement_from_the_softmax),
        cmocka_unit_test(the_same_seed_draws_the_same_in_any_order_of_rows),
        cmocka_unit_test(min_new_tokens_and_bad_words_hold_for_drawn_beams),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
