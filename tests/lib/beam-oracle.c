/* SPDX-License-Identifier: Apache-2.0 */
/* Beam searches against the oracle's. */

#include "tests/lib/beam-oracle.h"
#include "tests/lib/model-rig.h"

#include <jansson.h>
#include <math.h>

#define MAX_STOPS  16
#define MAX_PROMPT 256
#define MAX_NEW    64

EngineRequest beam_ids_request(const char *model, const int32_t *ids, size_t n, uint32_t max_tokens, uint32_t beams, uint32_t n_return)
{
    EngineRequest request = raw_request(model, NULL, max_tokens);

    request.ids = ids;
    request.n_ids = n;
    request.want_ids = true;
    request.sampling.num_beams = beams;
    request.sampling.num_return_sequences = n_return;
    request.sampling.length_penalty = 1;
    return request;
}

Seen *beam_run(Talk *talk, const EngineRequest *request)
{
    Seen *seen = talk_wait(talk, talk_generate(talk, request));

    if (seen->result != ENGINE_RESULT_DONE)
        fail_msg("result %d: %s", (int)seen->result, seen->detail.text);
    assert_int_equal(seen->n_text, 0);
    assert_int_equal(seen->n_ids, 0);
    return seen;
}

static size_t read_ids(const json_t *array, int32_t *ret, size_t max)
{
    size_t i;
    json_t *id;

    assert_true(json_array_size(array) <= max);
    json_array_foreach(array, i, id)
        ret[i] = (int32_t)json_integer_value(id);
    return json_array_size(array);
}

static bool is_end(const json_t *eos, int32_t id)
{
    size_t i;
    json_t *one;

    json_array_foreach(eos, i, one)
        if (json_integer_value(one) == id)
            return true;
    return false;
}

/* A number of the case, or what stands for one that is not there. */
static double number_of(const json_t *one, const char *key, double otherwise)
{
    const json_t *value = json_object_get(one, key);

    return value ? json_number_value(value) : otherwise;
}

static void fill_sampling(const json_t *one, const char **stops, EngineSampling *sampling)
{
    const char *early = json_string_value(json_object_get(one, "early"));
    const json_t *texts = json_object_get(one, "stop");

    sampling->early_stopping = strcmp(early, "true") == 0    ? BEAM_EARLY_TRUE
                               : strcmp(early, "never") == 0 ? BEAM_EARLY_NEVER
                                                             : BEAM_EARLY_FALSE;
    sampling->length_penalty = number_of(one, "penalty", 1);
    sampling->ignore_eos = json_is_true(json_object_get(one, "ignore_eos"));
    sampling->repeat_penalty = (float)number_of(one, "repetition", 1);
    sampling->no_repeat_ngram = (uint32_t)number_of(one, "ngram", 0);
    sampling->stop = stops;
    sampling->n_stop = json_array_size(texts);
    assert_true(sampling->n_stop <= MAX_STOPS);
    for (size_t s = 0; s < sampling->n_stop; s++)
        stops[s] = json_string_value(json_array_get(texts, s));
}

/* Returns the largest difference of a score. */
static double compare_case(const json_t *eos, const json_t *one, const Seen *answer, size_t index)
{
    const json_t *sequences = json_object_get(one, "sequences");
    size_t max_new = (size_t)number_of(one, "max_new", 0);
    double worst = 0;

    assert_int_equal(answer->n_sequences, json_array_size(sequences));
    for (size_t i = 0; i < answer->n_sequences; i++) {
        const EngineSequence *got = &answer->sequences[i];
        double score = json_number_value(json_array_get(json_object_get(one, "scores"), i));
        int32_t ids[MAX_NEW];
        size_t n = read_ids(json_array_get(sequences, i), ids, N_ELEMENTS(ids));
        bool ended = !json_is_true(json_object_get(one, "ignore_eos")) && is_end(eos, ids[n - 1]), stopped = !ended && n < max_new;

        n -= ended;
        if (got->n_tokens != n || memcmp(got->ids, ids, n * sizeof(*ids)) != 0)
            fail_msg("case %zu: sequence %zu is another", index, i);
        if (json_array_size(json_object_get(one, "stop")) == 0 || stopped || ended) /* the last token may do both */
            assert_string_equal(got->stop_reason, ended ? "stop" : stopped ? "stop_string" : "length");
        worst = fmax(worst, fabs((double)got->score - score));
    }
    return worst;
}

double beam_oracle_compare(Talk *talk, const char *fixture, const char *model, size_t *ret_n)
{
    json_t *json, *one;
    char path[4096];
    double worst = 0;
    size_t i;

    rig_path(fixture, path, sizeof(path));
    json = json_load_file(path, 0, NULL);
    assert_non_null(json);
    json_array_foreach(json_object_get(json, "cases"), i, one) {
        const json_t *own = json_object_get(one, "model");
        const char *stops[MAX_STOPS];
        int32_t prompt[MAX_PROMPT];
        size_t n = read_ids(json_object_get(one, "prompt"), prompt, N_ELEMENTS(prompt));
        EngineRequest request = beam_ids_request(own ? json_string_value(own) : model, prompt, n, (uint32_t)number_of(one, "max_new", 0),
                                                 (uint32_t)number_of(one, "beams", 0),
                                                 (uint32_t)json_array_size(json_object_get(one, "sequences")));

        fill_sampling(one, stops, &request.sampling);
        worst = fmax(worst, compare_case(json_object_get(json, "eos"), one, beam_run(talk, &request), i));
    }
    *ret_n = i;
    json_decref(json);
    return worst;
}
