/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streamed weights and the ladder on the simulated small GPU: copies take their time on a thread of their own, memory that has not arrived is
 * not a number, and whatever is unordered, leaked or freed too early ends the program.
 */

#include "tests/lib/engine-talk.h"
#include "tests/lib/model-rig.h"
#include "tests/lib/patience.h"
#include "tests/lib/sim-rig.h"
#include "tests/sim/clsim.h"

/* CLSIM_PART=1: pages of a cache at home on the device are written beside those that a kernel reads. */
#define CHECKS "CLSIM_MAX_ALLOCATION=8M CLSIM_PART=1 CLSIM_CHECK=all CLSIM_MISUSE=71 "
#define DEVICE "CLSIM_DEVICE_TYPE=gpu CLSIM_UNIFIED=0 CLSIM_READ_RATE=8G CLSIM_LINK_RATE=4G CLSIM_POISON=1 " CHECKS

enum { N_VOCAB = 320, N_PROMPT = 40, N_STEPS = 10 };

static clsim_set_faults_fn set_faults(void)
{
    cl_platform_id platforms[8];
    cl_uint n = 0;

    CHECK(clGetPlatformIDs(8, platforms, &n) == CL_SUCCESS && n > 0);
    for (cl_uint i = 0; i < n && i < 8; i++) {
        void *address = clGetExtensionFunctionAddressForPlatform(platforms[i], "clsimSetFaults");

        if (address)
            return (clsim_set_faults_fn)address;
    }
    CHECK(!"the layer is there");
}

/* ---- streaming -------------------------------------------------------------------------------------------------------------- */

static void run(Gpu *gpu, const char *path, ModelWeights weights, KvStrategy strategy, float *ret_logits)
{
    Model *model = rig_open_model(gpu, path, NULL, (ModelOptions){.max_rows = 48, .weights = weights});
    KvPolicy policy = kv_policy_preset(strategy, false);
    int32_t ids[N_PROMPT + N_STEPS];
    KvStore *store;

    policy.tile_blocks = 1;
    policy.transfer = weights.transfer;
    store = rig_new_store(model, &policy);
    rig_random_ids(21, N_VOCAB, ids, N_PROMPT + N_STEPS);
    rig_run(model, store, ids, N_PROMPT, 48, 1, ret_logits);
    rig_run(model, store, ids, N_PROMPT + N_STEPS, 1, N_STEPS, ret_logits + N_VOCAB);
    kv_store_free(store);
    model_free(model);
}

static void stream_from(bool unified)
{
    static const char *const names[] = {"tiny-llama-tied.gguf", "tiny-llama-mixed.gguf"};
    static const uint32_t slots[] = {1, 2, 3, 8};
    static float expected[(1 + N_STEPS) * N_VOCAB], logits[(1 + N_STEPS) * N_VOCAB];
    Gpu *gpu = rig_open_gpu();

    CHECK(gpu_info(gpu)->unified_memory == unified);
    for (size_t f = 0; f < 2; f++) {
        char path[4096];

        rig_path(names[f], path, sizeof(path));
        run(gpu, path, (ModelWeights){0}, KV_STRATEGY_OFFLOADED_QUANTIZED, expected);
        for (size_t s = 0; s < N_ELEMENTS(slots); s++) {
            ModelWeights weights = {.budget_bytes = 50000, .n_slots = slots[s], .transfer = KV_TRANSFER_COPY};

            run(gpu, path, weights, KV_STRATEGY_OFFLOADED_QUANTIZED, logits);
            CHECK(memcmp(expected, logits, sizeof(expected)) == 0);
        }
    }
    gpu_free(gpu);
}

static void stream(void)
{
    stream_from(false);
}

static void streamed_weights_race_with_nothing(void **state)
{
    (void)state;
    sim_rig_run_well("stream", DEVICE "CLSIM_MEMORY=32M");
}

/* Copied although the device reads the same memory: by two queues. */
static void share(void)
{
    stream_from(true);
}

static void weights_that_travel_by_two_queues_race_with_nothing(void **state)
{
    (void)state;
    sim_rig_run_well("share", "CLSIM_UNIFIED=1 " CHECKS "CLSIM_MEMORY=32M");
}

/* ---- refusals --------------------------------------------------------------------------------------------------------------- */

static const int32_t prompt[] = {5, 6, 7, 8, 9, 10, 11, 12};

static bool device_is_open(const Talk *talk)
{
    EngineDeviceStatus device;

    engine_device_status(talk->engine, &device);
    return device.open;
}

/* Loads and generates while the @n-th buffer from now on is refused; 0: none.  Whether so many were asked for. */
static bool generate(clsim_set_faults_fn arm, clsim_count_calls_fn count, uint32_t n, Seen *ret)
{
    char path[4096], fault[96];
    EngineModel model = {.name = "m",
                         .path = path,
                         .policy = kv_policy_preset(KV_STRATEGY_DYNAMIC, false),
                         .parallel = 1,
                         .keep_alive_usec = UINT64_MAX};
    EngineOptions options = {
        .gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC}, .models = &model, .n_models = 1};
    EngineRequest request = raw_request("m", NULL, 20);
    bool reached;
    Talk *talk;

    rig_path("tiny-llama-tied.gguf", path, sizeof(path));
    request.ids = prompt;
    request.n_ids = N_ELEMENTS(prompt);
    request.want_ids = request.sampling.ignore_eos = true;
    talk = talk_new(&options);
    talk_until(talk, device_is_open(talk));
    (void)snprintf(fault, sizeof(fault), "clCreateBuffer:%u:CL_MEM_OBJECT_ALLOCATION_FAILURE", n);
    CHECK(arm(n ? fault : "") == CL_SUCCESS);
    *ret = *talk_wait(talk, talk_generate(talk, &request));
    reached = count("clCreateBuffer") >= n;
    CHECK(arm("") == CL_SUCCESS);
    talk_free(talk);
    return reached;
}

/* Each buffer in turn is refused once: the engine takes a step down, or tries again, and says the same. */
static void refuse(void)
{
    static Seen expected, seen;
    clsim_set_faults_fn arm = set_faults();
    cl_platform_id platform;
    clsim_count_calls_fn count;
    uint32_t n, n_steps = 0;

    CHECK(clGetPlatformIDs(1, &platform, NULL) == CL_SUCCESS);
    count = (clsim_count_calls_fn)clGetExtensionFunctionAddressForPlatform(platform, "clsimCountCalls");
    CHECK(count);
    (void)generate(arm, count, 0, &expected);
    CHECK(expected.result == ENGINE_RESULT_DONE && expected.n_ids == 20);
    for (n = 1; generate(arm, count, n, &seen); n++) {
        if (seen.result != ENGINE_RESULT_DONE || memcmp(seen.ids, expected.ids, 20 * sizeof(int32_t)) != 0)
            (void)fprintf(stderr, "buffer %u: result %d: %s\n", n, (int)seen.result, seen.detail.text);
        CHECK(seen.result == ENGINE_RESULT_DONE);
        CHECK(memcmp(seen.ids, expected.ids, 20 * sizeof(int32_t)) == 0);
        n_steps += seen.usage.ladder[0] != 0;
        (void)fprintf(stderr, "buffer %u: %s\n", n, seen.usage.ladder);
    }
    (void)fprintf(stderr, "%u buffers\n", n - 1);
    CHECK(n > 15 && n_steps + 3 > n);
}

static void a_refused_buffer_costs_a_step_of_the_ladder_not_the_answer(void **state)
{
    (void)state;
    sim_rig_run_well("refuse", DEVICE "CLSIM_MEMORY=32M");
}

/* The same when buffers are refused while weights and batch give way between two tokens. */
static void give_way(void)
{
    static float expected[N_STEPS * N_VOCAB], logits[N_STEPS * N_VOCAB];
    clsim_set_faults_fn arm = set_faults();
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    Gpu *gpu = rig_open_gpu();
    char path[4096];

    rig_path("tiny-llama-mixed.gguf", path, sizeof(path));
    for (int faulty = 0; faulty < 2; faulty++) {
        Model *model = rig_open_model(gpu, path, NULL, (ModelOptions){.max_rows = 256});
        KvStore *store = rig_new_store(model, &policy);
        KvCache *cache = NULL;
        uint64_t bytes;

        CHECK(kv_cache_new(store, &cache, NULL) == 0);
        for (int32_t i = 0; i < N_STEPS; i++) {
            ModelItem item = {.cache = cache, .tokens = &i, .n_tokens = 1};

            bytes = model_device_bytes(model);
            if (faulty && i % 3 == 1) {
                CHECK(arm("clCreateBuffer:2:CL_MEM_OBJECT_ALLOCATION_FAILURE;clCreateBuffer:4:CL_MEM_OBJECT_ALLOCATION_FAILURE") == 0);
                CHECK((i % 2 ? model_stream_more(model, 9000, NULL) : model_shrink_rows(model, model_options(model)->max_rows / 2, NULL)) == 0);
                CHECK(arm("") == 0);
                CHECK(model_device_bytes(model) < bytes);
            }
            CHECK(model_forward(model, store, &item, 1, (faulty ? logits : expected) + i * N_VOCAB, NULL) == 0);
        }
        kv_cache_free(cache);
        kv_store_free(store);
        model_free(model);
    }
    CHECK(memcmp(expected, logits, sizeof(expected)) == 0);
    gpu_free(gpu);
}

static void what_gives_way_gives_more_when_the_device_refuses_the_rest(void **state)
{
    (void)state;
    sim_rig_run_well("give-way", DEVICE "CLSIM_MEMORY=32M");
}

int main(int argc, char **argv)
{
    static const SimScenario scenarios[] = {{"stream", stream}, {"share", share}, {"refuse", refuse}, {"give-way", give_way}};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streamed_weights_race_with_nothing),
        cmocka_unit_test(weights_that_travel_by_two_queues_race_with_nothing),
        cmocka_unit_test(a_refused_buffer_costs_a_step_of_the_ladder_not_the_answer),
        cmocka_unit_test(what_gives_way_gives_more_when_the_device_refuses_the_rest),
    };

    if (sim_rig_is_scenario(argc, argv, scenarios, N_ELEMENTS(scenarios)))
        return EXIT_SUCCESS;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
