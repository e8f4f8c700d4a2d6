/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the library's own tests check of every cache implementation (CACHE-SEMANTICS section 13.1), with the real model, whose file
 * LEAT_TEST_MODEL names: the same greedy text alone, in a ragged batch (where it pads on the left, rows here have their own lengths) and
 * with beams; and the text of full precision from quantised caches.
 */

#include "tests/lib/engine-talk.h"
#include "tests/lib/model-rig.h"
#include "tests/lib/patience.h"
#include "tests/lib/place.h"

#include <jansson.h>

#define N_NEW 12u

static const char *model_path;

/* Of lengths that a batch would have to pad, the last over a page border. */
static const char *const prompts[] = {
    "The capital of France is",
    "Hello",
    "Water flows from the reservoir to the mill because",
    "A leat is an artificial watercourse or aqueduct dug into the ground, especially one supplying water to a watermill or its mill pond. "
    "Other common uses for leats include delivery of water for hydraulic mining and mineral concentration, for irrigation, and",
};
#define N_PROMPTS N_ELEMENTS(prompts)

static const KvStrategy strategies[] = {KV_STRATEGY_DYNAMIC, KV_STRATEGY_STATIC, KV_STRATEGY_OFFLOADED, KV_STRATEGY_OFFLOADED_STATIC,
                                        KV_STRATEGY_NONE, KV_STRATEGY_QUANTIZED, KV_STRATEGY_OFFLOADED_QUANTIZED};
#define N_EXACT 5 /* in full precision: the first is what the others are compared with */

static KvPolicy policy_of(KvStrategy strategy)
{
    KvPolicy policy = kv_policy_preset(strategy, false);

    policy.max_cache_tokens = 512;
    if (policy.home == KV_HOME_HOST)
        policy.transfer = KV_TRANSFER_COPY;
    return policy;
}

static Talk *start(void)
{
    EngineModel model = {.name = "real", .path = model_path, .context = 512, .policy = policy_of(KV_STRATEGY_DYNAMIC),
                         .parallel = 2 * N_PROMPTS, .keep_alive_usec = UINT64_MAX};
    EngineOptions options = {.gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC}, .models = &model, .n_models = 1};

    return talk_new(&options);
}

static Seen *run(Talk *talk, EngineRequest request, const KvPolicy *policy)
{
    Seen *seen;

    request.policy = policy;
    request.sampling.ignore_eos = true;
    request.sampling.length_penalty = 1;
    seen = talk_wait(talk, talk_generate(talk, &request));
    if (seen->result != ENGINE_RESULT_DONE)
        fail_msg("%s: result %d: %s", kv_strategy_to_string(policy->strategy), (int)seen->result, seen->detail.text);
    return seen;
}

static Seen *run_all(Talk *talk, const KvPolicy *policy, uint32_t beams)
{
    EngineRequest request = raw_request("real", NULL, N_NEW);

    request.prompts = prompts;
    request.n_prompts = N_PROMPTS;
    request.prompts_raw = true;
    request.want_ids = true;
    request.sampling.num_beams = request.sampling.num_return_sequences = beams;
    return run(talk, request, policy);
}

static void row_13_1_every_implementation_says_alone_what_it_says_in_a_ragged_batch(void **state)
{
    Talk *talk = start();
    Seen *first[N_PROMPTS];

    (void)state;
    for (size_t s = 0; s < N_ELEMENTS(strategies); s++) {
        KvPolicy policy = policy_of(strategies[s]);
        Seen *batch = run_all(talk, &policy, 1);

        assert_int_equal(batch->n_sequences, N_PROMPTS);
        for (size_t p = 0; p < N_PROMPTS; p++) {
            Seen *alone = run(talk, raw_request("real", prompts[p], N_NEW), &policy);

            assert_string_equal(alone->usage.strategy, kv_strategy_to_string(strategies[s]));
            assert_true(alone->n_text > 0);
            assert_string_equal(batch->sequences[p].text, alone->text);
            if (s == 0)
                first[p] = alone;
            else if (s < N_EXACT)
                assert_string_equal(alone->text, first[p]->text);
        }
    }
    talk_free(talk);
}

/* That a result has gone over from one beam to another, so that the reorder was needed, is seen from two results of a prompt that begin with the
 * same token: the second beam began with another one. */
static void row_13_1_every_implementation_says_the_same_with_2_beams_and_2_returned(void **state)
{
    Talk *talk = start();
    Seen *first = NULL;
    uint32_t n_moved = 0;

    (void)state;
    for (size_t s = 0; s < N_EXACT; s++) {
        KvPolicy policy = policy_of(strategies[s]);
        Seen *seen = run_all(talk, &policy, 2);

        assert_int_equal(seen->n_sequences, 2 * N_PROMPTS);
        first = first ? first : seen;
        for (size_t i = 0; i < 2 * N_PROMPTS; i++) {
            assert_int_equal(seen->sequences[i].n_tokens, first->sequences[i].n_tokens);
            assert_memory_equal(seen->sequences[i].ids, first->sequences[i].ids, first->sequences[i].n_tokens * sizeof(int32_t));
        }
        for (size_t p = 0; p < N_PROMPTS; p++)
            n_moved += seen->sequences[2 * p].ids[0] == seen->sequences[2 * p + 1].ids[0];
    }
    print_message("%u of %u prompts with a reorder in their results\n", n_moved, (unsigned)(N_EXACT * N_PROMPTS));
    assert_true(n_moved > 0);
    talk_free(talk);
}

static KvPolicy compatible(const char *backend, int64_t axis)
{
    const KvQuantRequest request = {.backend = backend, .has_nbits = true, .has_axis_key = true, .has_axis_value = true,
                                    .has_q_group_size = true, .has_residual_length = true, .nbits = 4, .axis_key = axis, .axis_value = axis,
                                    .q_group_size = 16, .residual_length = 4};
    KvPolicy policy = policy_of(KV_STRATEGY_QUANTIZED);
    ErrorDetail detail = ERROR_DETAIL_NULL;

    policy.is_compatible = true;
    if (kv_quant_options(&request, &policy.compatible, &detail))
        fail_msg("%s", detail.text);
    return policy;
}

/* Bytes of a session's cache. */
static json_int_t cache_bytes(Talk *talk, uint64_t session)
{
    EngineEvent *reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_SESSION_CACHE, .owner = 1, .session = session});
    json_t *json;
    json_int_t bytes;

    assert_int_equal(reply->result, ENGINE_RESULT_DONE);
    json = json_loads(reply->json, 0, NULL);
    assert_non_null(json);
    bytes = json_integer_value(json_object_get(json, "host-bytes"));
    json_decref(json);
    return bytes;
}

/* As the library counts and codes, and with the prompt of its test: quanto on axis 0 and hqq on axis 1, 4 bits, groups of 16, 4 recent tokens,
 * 10 new ones.  (How near such codes are to full precision in general is measured, not tested: README.) */
static void row_13_1_quanto_and_hqq_say_what_full_precision_says_and_something_is_quantised(void **state)
{
    const KvPolicy full = policy_of(KV_STRATEGY_DYNAMIC), coded[] = {compatible("quanto", 0), compatible("hqq", 1)};
    const uint64_t token_bytes = 30 * 2 * 3 * 64 * 2; /* of SmolLM2 in f16 */
    Talk *talk = start();
    Seen *expected = run(talk, raw_request("real", "The cat", 10), &full);

    (void)state;
    for (size_t c = 0; c < N_ELEMENTS(coded); c++) {
        EngineEvent *opened = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_OPEN_SESSION, .owner = 1, .model = "real", .policy = &coded[c]});
        EngineRequest request = raw_request(NULL, "The cat", 10);
        Seen *seen;

        assert_int_equal(opened->result, ENGINE_RESULT_DONE);
        request.session = opened->session;
        seen = talk_wait(talk, talk_generate(talk, &request));
        if (seen->result != ENGINE_RESULT_DONE)
            fail_msg("result %d: %s", (int)seen->result, seen->detail.text);
        assert_string_equal(seen->text, expected->text);
        /* All of the prompt and what followed but 3 recent tokens: far less than in full. */
        assert_in_range(cache_bytes(talk, opened->session), 1, (seen->usage.prompt_tokens + 9) * token_bytes / 4 * 3);
    }
    talk_free(talk);
}

/* Nothing compares ids there, and a cache that is as long as the history or longer runs the prompt again behind itself.  Here the longest common
 * beginning is kept, and one token at least is run. */
static void row_11_5_a_history_that_is_all_cached_or_goes_another_way_is_answered_as_if_cold(void **state)
{
    static const KvStrategy some[] = {KV_STRATEGY_DYNAMIC, KV_STRATEGY_OFFLOADED_STATIC, KV_STRATEGY_OFFLOADED_QUANTIZED};
    Talk *talk = start();

    (void)state;
    for (size_t s = 0; s < N_ELEMENTS(some); s++) {
        KvPolicy policy = policy_of(some[s]);
        EngineEvent *opened = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_OPEN_SESSION, .owner = 1, .model = "real", .policy = &policy});
        const char *const turns[] = {prompts[3], prompts[3], prompts[2], "A leat is an artificial watercourse or", prompts[3]};

        assert_int_equal(opened->result, ENGINE_RESULT_DONE);
        for (size_t t = 0; t < N_ELEMENTS(turns); t++) {
            EngineRequest request = raw_request(NULL, turns[t], N_NEW);
            Seen *cold = run(talk, raw_request("real", turns[t], N_NEW), &policy), *warm;

            request.session = opened->session;
            request.sampling.ignore_eos = true;
            warm = talk_wait(talk, talk_generate(talk, &request));
            assert_int_equal(warm->result, ENGINE_RESULT_DONE);
            assert_string_equal(warm->text, cold->text);
            assert_true(warm->usage.reused_tokens < warm->usage.prompt_tokens);
            if (t == 1 && s < 2)
                assert_int_equal(warm->usage.reused_tokens, warm->usage.prompt_tokens - 1);
        }
    }
    talk_free(talk);
}

static int setup(void **state)
{
    (void)state;
    model_path = test_model_path();
    return model_path ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(row_13_1_every_implementation_says_alone_what_it_says_in_a_ragged_batch),
        cmocka_unit_test(row_13_1_every_implementation_says_the_same_with_2_beams_and_2_returned),
        cmocka_unit_test(row_11_5_a_history_that_is_all_cached_or_goes_another_way_is_answered_as_if_cold),
        cmocka_unit_test(row_13_1_quanto_and_hqq_say_what_full_precision_says_and_something_is_quantised),
    };

    return cmocka_run_group_tests(tests, setup, NULL);
}
