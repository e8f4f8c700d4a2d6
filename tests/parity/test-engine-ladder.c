/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The whole engine on a device that is too small: whatever it has to give up, at load or in the middle of a generation, the ids are those
 * of a large device, and the usage says what was given up.
 */

#include "tests/lib/engine-talk.h"
#include "tests/lib/model-rig.h"
#include "tests/lib/patience.h"
#include "tests/lib/place.h"

#include <jansson.h>

#define N_VOCAB 320

static char tied[4096], state_dir[TEST_FOLDER_SIZE];

static EngineModel tiny(KvStrategy strategy)
{
    EngineModel model = {.name = "m",
                         .path = tied,
                         .policy = kv_policy_preset(strategy, false),
                         .weights = {.transfer = KV_TRANSFER_COPY},
                         .parallel = 3,
                         .keep_alive_usec = UINT64_MAX};

    if (model.policy.home == KV_HOME_HOST)
        model.policy.transfer = KV_TRANSFER_COPY;
    return model;
}

/* An engine whose device has @bytes; 0: as much as there is. */
static Talk *start(const EngineModel *model, uint64_t bytes)
{
    GpuMatch match = {.type = GPU_DEVICE_TYPE_X_INVALID, .max_memory_bytes = bytes};
    EngineOptions options = {.gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC, .matches = &match,
                                     .n_matches = bytes > 0},
                             .models = model,
                             .n_models = 1,
                             .state_dir = state_dir /* measured once */};

    return talk_new(&options);
}

/* Some generations at once, each of its own prompt. */
static void generate(Talk *talk, uint32_t n_jobs, uint32_t n_prompt, uint32_t n_tokens, uint64_t ret_jobs[static 3])
{
    static int32_t ids[3][1024];
    EngineRequest requests[3];

    for (uint32_t i = 0; i < n_jobs; i++) {
        rig_random_ids(40 + i, N_VOCAB, ids[i], n_prompt);
        requests[i] = ids_request("m", 0, ids[i], n_prompt, n_tokens);
    }
    for (uint32_t i = 0; i < n_jobs; i++)
        ret_jobs[i] = talk_generate(talk, &requests[i]);
    for (uint32_t i = 0; i < n_jobs; i++)
        talk_wait(talk, ret_jobs[i]);
}

static void assert_same(const Seen *small, const Seen *large)
{
    if (small->result != ENGINE_RESULT_DONE)
        fail_msg("result %d: %s", (int)small->result, small->detail.text);
    assert_int_equal(small->n_ids, large->n_ids);
    assert_memory_equal(small->ids, large->ids, large->n_ids * sizeof(int32_t));
}

static uint64_t used_bytes(const Talk *talk)
{
    EngineDeviceStatus device;

    engine_device_status(talk->engine, &device);
    return device.total_used_bytes;
}

/* What Estimate says before loading is what the allocator shows after it. */
static void check_estimate(Talk *talk)
{
    EngineEvent *reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_ESTIMATE, .model = "m", .n = -1});
    json_t *json;
    uint64_t job;

    assert_int_equal(reply->result, ENGINE_RESULT_DONE);
    json = json_loads(reply->json, 0, NULL);
    assert_non_null(json);
    assert_int_equal(engine_load(talk->engine, 1, "m", &job), 0);
    if (talk_wait(talk, job)->result == ENGINE_RESULT_DONE) {
        assert_true(json_is_true(json_object_get(json, "fits")));
        assert_int_equal(json_integer_value(json_object_get(json, "device-bytes")), used_bytes(talk));
    } else {
        assert_true(json_is_false(json_object_get(json, "fits")));
    }
    json_decref(json);
}

/* ---- at load ---------------------------------------------------------------------------------------------------------------- */

static void on_any_device_that_serves_it_the_ids_are_the_same(void **state)
{
    static const KvStrategy strategies[] = {KV_STRATEGY_STATIC, KV_STRATEGY_OFFLOADED_QUANTIZED};
    static const char *const words[] = {"smaller-batch", "smaller-staging", "host-home", "streamed-weights"};
    bool seen[4] = {false};

    (void)state;
    for (size_t s = 0; s < N_ELEMENTS(strategies); s++) {
        EngineModel model = tiny(strategies[s]);
        Talk *large = start(&model, 0);
        uint64_t jobs[3], bytes;
        uint32_t n_served = 0;

        generate(large, 2, 300, 40, jobs);
        assert_string_equal(large->seen[jobs[0]].usage.ladder, "");
        for (bytes = used_bytes(large);; bytes = bytes * 3 / 4) {
            Talk *small = start(&model, bytes);
            uint64_t again[3];

            check_estimate(small);
            generate(small, 2, 300, 40, again);
            if (small->seen[again[0]].result == ENGINE_RESULT_OUT_OF_DEVICE_MEMORY) {
                print_message("%llu bytes: %s\n", (unsigned long long)bytes, small->seen[again[0]].detail.text);
                assert_non_null(strstr(small->seen[again[0]].detail.text, "MiB"));
                talk_free(small);
                break;
            }
            for (uint32_t i = 0; i < 2; i++)
                assert_same(&small->seen[again[i]], &large->seen[jobs[i]]);
            assert_true(used_bytes(small) <= bytes);
            print_message("%s, %llu bytes: %s\n", kv_strategy_to_string(strategies[s]), (unsigned long long)bytes,
                          small->seen[again[0]].usage.ladder);
            for (size_t w = 0; w < 4; w++)
                seen[w] |= strstr(small->seen[again[0]].usage.ladder, words[w]) != NULL;
            n_served++;
            talk_free(small);
        }
        assert_true(n_served > 3);
        talk_free(large);
    }
    for (size_t w = 0; w < 4; w++)
        assert_true(seen[w]);
}

static void all_layers_or_none(void **state)
{
    EngineModel model = tiny(KV_STRATEGY_OFFLOADED_QUANTIZED);
    uint64_t jobs[3];
    Talk *talk;

    (void)state;
    model.weights.all_layers = true;
    talk = start(&model, 600000);
    generate(talk, 1, 20, 5, jobs);
    assert_int_equal(talk->seen[jobs[0]].result, ENGINE_RESULT_OUT_OF_DEVICE_MEMORY);
    talk_free(talk);
}

/* ---- in the middle ---------------------------------------------------------------------------------------------------------- */

/* Pages on the device for four blocks are there from the start; those of three long sequences do not fit any more. */
static void caches_that_outgrow_the_device_go_on_in_host_memory(void **state)
{
    EngineModel model = tiny(KV_STRATEGY_DYNAMIC);
    Talk *large = start(&model, 0);
    uint32_t n_moved = 0, n_shrunk = 0;
    uint64_t jobs[3], loaded, job;

    (void)state;
    assert_int_equal(engine_load(large->engine, 1, "m", &job), 0);
    assert_int_equal(talk_wait(large, job)->result, ENGINE_RESULT_DONE);
    loaded = used_bytes(large);
    generate(large, 3, 300, 200, jobs);
    for (uint64_t bytes = loaded + 1000; bytes > loaded / 3; bytes = bytes * 9 / 10) {
        Talk *small = start(&model, bytes);
        uint64_t first[3], again[3];
        bool at_home_on_device;

        generate(small, 1, 20, 2, first); /* as it was loaded */
        at_home_on_device = strcmp(small->seen[first[0]].usage.home, "device") == 0;
        generate(small, 3, 300, 200, again);
        for (uint32_t i = 0; i < 3; i++)
            assert_same(&small->seen[again[i]], &large->seen[jobs[i]]);
        print_message("%llu bytes: loaded with '%s', ended with '%s'\n", (unsigned long long)bytes, small->seen[first[0]].usage.ladder,
                      small->seen[again[2]].usage.ladder);
        assert_true(used_bytes(small) <= bytes);
        n_shrunk += strcmp(small->seen[first[0]].usage.ladder, "") == 0 && strstr(small->seen[again[2]].usage.ladder, "smaller-batch");
        n_moved += at_home_on_device && strstr(small->seen[again[2]].usage.ladder, "host-home") != NULL;
        talk_free(small);
    }
    assert_true(n_shrunk > 0);
    assert_true(n_moved > 0);
    talk_free(large);
}

static int setup(void **state)
{
    (void)state;
    rig_path("tiny-llama-tied.gguf", tied, sizeof(tied));
    return test_folder_new(state_dir);
}

static int teardown(void **state)
{
    (void)state;
    return test_folder_remove(state_dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_any_device_that_serves_it_the_ids_are_the_same),
        cmocka_unit_test(all_layers_or_none),
        cmocka_unit_test(caches_that_outgrow_the_device_go_on_in_host_memory),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
