/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The whole engine on a device, with tiny models: its greedy ids are the oracle's, and warm, batched, interrupted, cropped, cloned and
 * unloaded sessions say what cold ones say, to the last id.
 */

#include "tests/lib/engine-talk.h"
#include "tests/lib/model-rig.h"
#include "tests/lib/patience.h"

#include <fcntl.h>
#include <jansson.h>
#include <sys/mman.h>

#define N_VOCAB 320

static char tied[4096], mixed[4096];

static EngineModel tiny(const char *name, const char *path, KvStrategy strategy, bool exact)
{
    EngineModel model = {.name = name,
                         .path = path,
                         .exact = exact,
                         .policy = kv_policy_preset(strategy, exact),
                         .parallel = 2,
                         .keep_alive_usec = UINT64_MAX};

    return model;
}

static Talk *start(const EngineModel *models, size_t n)
{
    EngineOptions options = {
        .gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC}, .models = models, .n_models = n};

    return talk_new(&options);
}

/* The ids of a prompt's oracle, up to the first step where two logits tie. */
static void greedy_ids_are_the_oracles_under_every_exact_policy(void **state)
{
    const KvStrategy strategies[] = {KV_STRATEGY_DYNAMIC, KV_STRATEGY_STATIC, KV_STRATEGY_OFFLOADED, KV_STRATEGY_OFFLOADED_STATIC,
                                     KV_STRATEGY_NONE};
    EngineModel models[] = {tiny("tied", tied, KV_STRATEGY_DYNAMIC, true), tiny("mixed", mixed, KV_STRATEGY_DYNAMIC, true)};
    const char *fixtures[] = {"tiny-llama-tied.json", "tiny-llama-mixed.json"};
    Talk *talk = start(models, 2);
    uint32_t n_compared = 0;

    (void)state;
    for (size_t m = 0; m < 2; m++) {
        _cleanup_(oracle_freep) Oracle *oracle = oracle_load(fixtures[m]);

        for (size_t p = 0; p < oracle->n_prompts; p++)
            for (size_t s = 0; s < N_ELEMENTS(strategies); s++) {
                const OraclePrompt *prompt = &oracle->prompts[p];
                KvPolicy policy = kv_policy_preset(strategies[s], true);
                EngineRequest request = ids_request(models[m].name, 0, prompt->ids, prompt->n_prompt, prompt->n_greedy);
                Seen *seen;

                policy.transfer = KV_TRANSFER_COPY;
                request.policy = &policy;
                seen = talk_wait(talk, talk_generate(talk, &request));
                assert_int_equal(seen->result, ENGINE_RESULT_DONE);
                assert_string_equal(seen->usage.strategy, kv_strategy_to_string(strategies[s]));
                for (uint32_t i = 0; i < seen->n_ids; i++, n_compared++) {
                    if (prompt->tie[i] == seen->ids[i])
                        break;
                    assert_int_equal(seen->ids[i], prompt->ids[prompt->n_prompt + i]);
                }
            }
    }
    print_message("%u ids\n", n_compared);
    talk_free(talk);
}

/* A long document with another question behind it: the second answer begins where the first prompt's kept past agrees. */
static void a_kept_beginning_says_what_a_cold_start_says(void **state)
{
    const KvStrategy strategies[] = {KV_STRATEGY_OFFLOADED_QUANTIZED, KV_STRATEGY_OFFLOADED, KV_STRATEGY_QUANTIZED, KV_STRATEGY_STATIC};
    int32_t ids[950];

    (void)state;
    for (size_t s = 0; s < N_ELEMENTS(strategies); s++) {
        EngineModel models[] = {tiny("kept", tied, strategies[s], false), tiny("cold", tied, strategies[s], false)};
        Talk *talk;

        models[0].n_prefixes = 4;
        talk = start(models, 2);
        for (size_t i = 0; i < N_ELEMENTS(ids); i++)
            ids[i] = (int32_t)(i * 7919 % 251);
        talk_ids(talk, "kept", 0, ids, 900, 20);
        for (int32_t question = 1; question <= 3; question++) {
            Seen *cold, *kept;

            ids[777] = 251 + question;
            cold = talk_ids(talk, "cold", 0, ids, 950, 20);
            kept = talk_ids(talk, "kept", 0, ids, 950, 20);
            /* A packed past has no place to come back to there until the first that left there has made one. */
            assert_int_equal(kept->usage.reused_tokens, question == 1 && models[0].policy.form.kind == KV_FORM_LEAT ? 0 : 777);
            assert_int_equal(cold->usage.reused_tokens, 0);
            assert_same_ids(kept, cold);
        }
        talk_free(talk);
    }
}

/* Turns of a conversation in one session against each as the first of a new one, in the default (packed) cache. */
static void warm_says_what_cold_says(void **state)
{
    const EngineModel models[] = {tiny("packed", tied, KV_STRATEGY_OFFLOADED_QUANTIZED, false),
                                  tiny("dynamic", tied, KV_STRATEGY_DYNAMIC, false)};
    Talk *talk = start(models, 2);
    int32_t ids[900];

    (void)state;
    for (size_t m = 0; m < 2; m++) {
        uint64_t session = talk_open(talk, models[m].name, 1);
        uint32_t n = 150, before = 0;

        rig_random_ids(7, N_VOCAB, ids, N_ELEMENTS(ids));
        for (int turn = 0; turn < 5; turn++) {
            Seen *warm = talk_ids(talk, NULL, session, ids, n, 40),
                 *cold = talk_ids(talk, models[m].name, 0, ids, n, 40);

            assert_same_ids(warm, cold);
            assert_int_equal(cold->usage.reused_tokens, 0);
            if (turn != 3)
                assert_true(warm->usage.reused_tokens >= before); /* the last turn and what was said to it */
            before = n + 39;
            memcpy(ids + n, warm->ids, 40 * sizeof(int32_t));
            n += 40 + 17 + (uint32_t)turn * 30;
            if (turn == 2) {
                ids[n / 2] ^= 1; /* an edit in the middle */
                n -= 5;
            }
        }
    }
    talk_free(talk);
}

static void together_they_say_what_each_says_alone(void **state)
{
    EngineModel model = tiny("m", mixed, KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    Talk *talk = start(&model, 1);
    EngineRequest requests[4];
    uint64_t jobs[4];
    int32_t ids[4][400];

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        rig_random_ids(20 + i, N_VOCAB, ids[i], 400);
        requests[i] = ids_request("m", 0, ids[i], 50 + 100 * i, 60);
        requests[i].priority = i == 3 ? ENGINE_PRIORITY_BACKGROUND : i == 2 ? ENGINE_PRIORITY_INTERACTIVE : ENGINE_PRIORITY_NORMAL;
    }
    for (uint32_t i = 0; i < 4; i++)
        jobs[i] = talk_generate(talk, &requests[3 - i]);
    for (uint32_t i = 0; i < 4; i++)
        talk_wait(talk, jobs[i]);
    for (uint32_t i = 0; i < 4; i++) {
        Seen *alone = talk_ids(talk, "m", 0, ids[i], 50 + 100 * i, 60);

        assert_same_ids(alone, &talk->seen[jobs[3 - i]]);
    }
    talk_free(talk);
}

static void a_cancelled_cropped_and_cloned_session_says_what_a_new_one_says(void **state)
{
    EngineModel model = tiny("m", tied, KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    Talk *talk = start(&model, 1);
    uint64_t session = talk_open(talk, "m", 1), clone, job;
    int32_t ids[600];
    EngineRequest request;
    EngineEvent *reply;

    (void)state;
    rig_random_ids(3, N_VOCAB, ids, 600);
    request = ids_request("m", session, ids, 500, 300);
    job = talk_generate(talk, &request);
    talk_until(talk, talk->seen[job].n_ids > 20);
    engine_cancel(talk->engine, job);
    assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_CANCELLED);
    assert_same_ids(talk_ids(talk, NULL, session, ids, 510, 30), talk_ids(talk, "m", 0, ids, 510, 30));

    reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_CROP_SESSION, .owner = 1, .session = session, .n = -200});
    assert_int_equal(reply->result, ENGINE_RESULT_DONE);
    reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_CLONE_SESSION, .owner = 1, .session = session});
    assert_int_equal(reply->result, ENGINE_RESULT_DONE);
    clone = reply->session;
    ids[330] ^= 3;
    assert_same_ids(talk_ids(talk, NULL, clone, ids, 400, 30), talk_ids(talk, "m", 0, ids, 400, 30));
    ids[330] ^= 3;
    assert_same_ids(talk_ids(talk, NULL, session, ids, 400, 30), talk_ids(talk, "m", 0, ids, 400, 30));
    talk_free(talk);
}

static void a_session_outlives_its_model(void **state)
{
    EngineModel model = tiny("m", tied, KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    Talk *talk = start(&model, 1);
    uint64_t session = talk_open(talk, "m", 1);
    EngineModelStatus status;
    EngineDeviceStatus device;
    int32_t ids[100];
    Seen *first;

    (void)state;
    rig_random_ids(9, N_VOCAB, ids, 100);
    first = talk_ids(talk, NULL, session, ids, 100, 30);
    assert_int_equal(talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_UNLOAD, .model = "m"})->result, ENGINE_RESULT_DONE);
    talk_until(talk, engine_model_status_by_name(talk->engine, "m", &status) && strcmp(status.state, "unloaded") == 0);
    engine_device_status(talk->engine, &device);
    assert_int_equal(device.total_used_bytes, 0); /* everything went with it */
    assert_same_ids(talk_ids(talk, NULL, session, ids, 100, 30), first);
    talk_free(talk);
}

static void a_warm_step_builds_nothing_and_creates_nothing(void **state)
{
    EngineModel model = tiny("m", tied, KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    EngineDeviceStatus before, after;
    EngineRequest request;
    int32_t ids[100];
    Talk *talk;
    uint64_t job;

    (void)state;
    model.policy.transfer = KV_TRANSFER_COPY;
    talk = start(&model, 1);
    rig_random_ids(9, N_VOCAB, ids, 100);
    request = ids_request("m", 0, ids, 100, 400);
    job = talk_generate(talk, &request);
    talk_until(talk, talk->seen[job].n_ids > 10);
    engine_device_status(talk->engine, &before);
    talk_wait(talk, job);
    engine_device_status(talk->engine, &after);
    assert_int_equal(after.counters.n_programs_built + after.counters.n_programs_from_cache,
                     before.counters.n_programs_built + before.counters.n_programs_from_cache);
    print_message("%llu buffers created in %zu steps\n",
                  (unsigned long long)(after.counters.n_buffers_created - before.counters.n_buffers_created), talk->seen[job].n_ids);
    assert_int_equal(after.counters.n_buffers_created, before.counters.n_buffers_created);
    assert_true(talk->seen[job].usage.upload_bytes > 0);
    assert_true(talk->seen[job].usage.copy_usec > 0);
    assert_true(talk->seen[job].usage.hidden_share >= 0 && talk->seen[job].usage.hidden_share <= 1);
    talk_free(talk);
}

static void evaluated_logits_lead_to_the_generated_ids(void **state)
{
    EngineModel model = tiny("m", tied, KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    Talk *talk = start(&model, 1);
    _cleanup_(freep) float *rows = malloc(230 * N_VOCAB * sizeof(float));
    int fd = memfd_create("npy", MFD_CLOEXEC), keep = dup(fd);
    int32_t ids[230];
    uint64_t job = 0;
    Seen *seen;

    (void)state;
    assert_non_null(rows);
    rig_random_ids(11, N_VOCAB, ids, 200);
    seen = talk_ids(talk, "m", 0, ids, 200, 30);
    memcpy(ids + 200, seen->ids, 30 * sizeof(int32_t));
    assert_int_equal(engine_evaluate(talk->engine, 1, "m", NULL, ids, 230, fd, &job), 0);
    assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_DONE);
    assert_int_equal(pread(keep, rows, 230 * N_VOCAB * sizeof(float), 128), 230 * N_VOCAB * sizeof(float));
    for (uint32_t i = 199; i < 229; i++) {
        const float *row = rows + i * N_VOCAB;
        int32_t best = 0;

        for (int32_t v = 1; v < N_VOCAB; v++)
            if (row[v] > row[best])
                best = v;
        assert_int_equal(best, ids[i + 1]);
    }
    (void)close(keep);
    talk_free(talk);
}

static void the_estimate_is_what_the_allocator_then_shows(void **state)
{
    EngineModel models[] = {tiny("host", tied, KV_STRATEGY_OFFLOADED_QUANTIZED, false), tiny("device", mixed, KV_STRATEGY_STATIC, false)};

    (void)state;
    for (size_t m = 0; m < 2; m++) {
        Talk *talk;
        EngineDeviceStatus device;
        EngineEvent *reply;
        json_t *json;
        uint64_t job;

        models[m].policy.transfer = KV_TRANSFER_COPY;
        talk = start(&models[m], 1);
        reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_ESTIMATE, .model = models[m].name});
        assert_int_equal(reply->result, ENGINE_RESULT_DONE);
        print_message("%s\n", reply->json);
        assert_int_equal(engine_load(talk->engine, 1, models[m].name, &job), 0);
        assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_DONE);
        engine_device_status(talk->engine, &device);
        json = json_loads(reply->json, 0, NULL);
        assert_int_equal(json_integer_value(json_object_get(json, "device-bytes")), device.total_used_bytes);
        assert_true(json_real_value(json_object_get(json, "seconds-per-token")) > 0);
        /* Measured, and so small that the past may cost nothing that can be seen. */
        assert_true(json_real_value(json_object_get(json, "seconds-per-token-full")) >=
                    0.999 * json_real_value(json_object_get(json, "seconds-per-token")));
        json_decref(json);
        talk_free(talk);
    }
}

static int setup(void **state)
{
    (void)state;
    rig_path("tiny-llama-tied.gguf", tied, sizeof(tied));
    rig_path("tiny-llama-mixed.gguf", mixed, sizeof(mixed));
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_ids_are_the_oracles_under_every_exact_policy),
        cmocka_unit_test(warm_says_what_cold_says),
        cmocka_unit_test(a_kept_beginning_says_what_a_cold_start_says),
        cmocka_unit_test(together_they_say_what_each_says_alone),
        cmocka_unit_test(a_cancelled_cropped_and_cloned_session_says_what_a_new_one_says),
        cmocka_unit_test(a_session_outlives_its_model),
        cmocka_unit_test(a_warm_step_builds_nothing_and_creates_nothing),
        cmocka_unit_test(evaluated_logits_lead_to_the_generated_ids),
        cmocka_unit_test(the_estimate_is_what_the_allocator_then_shows),
    };

    return cmocka_run_group_tests(tests, setup, NULL);
}
