/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights that do not fit: whatever stays on the device, however the rest is cut and through how many slots it streams, the logits are
 * those of resident weights to the last bit, and the device shows what the plan says.
 */

#include "daemon/model/speed.h"
#include "tests/lib/model-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#define N_VOCAB  320
#define N_IDS    120
#define N_WANTED 40
#define MAX_ROWS 64

static const char *const fixtures[] = {"tiny-llama-tied.gguf", "tiny-llama-mixed.gguf"};
static const uint32_t percents[] = {100, 60, 40, 25, 10};
static const uint32_t slots[] = {1, 2, 3, 8};

static Model *open_streaming(Gpu *gpu, const char *name, bool exact, ModelWeights weights)
{
    char path[4096];

    rig_path(name, path, sizeof(path));
    return rig_open_model(gpu, path, NULL, (ModelOptions){.exact = exact, .max_rows = MAX_ROWS, .weights = weights});
}

static uint64_t total_bytes(Gpu *gpu, const char *name)
{
    _cleanup_(model_freep) Model *model = open_streaming(gpu, name, false, (ModelWeights){0});
    ModelPlan plan;

    model_weights_plan(model, &plan);
    assert_int_equal(plan.weight_streamed_bytes, 0);
    assert_int_equal(plan.n_layers_resident, plan.n_layers);
    return plan.weight_total_bytes;
}

static void run(Model *model, const KvPolicy *policy, uint32_t chunk, float *ret_logits)
{
    _cleanup_(kv_store_freep) KvStore *store = rig_new_store(model, policy);
    int32_t ids[N_IDS];

    rig_random_ids(11, N_VOCAB, ids, N_IDS);
    rig_run(model, store, ids, N_IDS, chunk, N_WANTED, ret_logits);
}

static void expect_equal_bits(const float *a, const float *b, size_t n, const char *what, uint32_t percent, uint32_t n_slots)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof(*a)) != 0)
            fail_msg("%s, %u %% of the weights, %u slots: number %zu is %.9g, not %.9g", what, percent, n_slots, i, (double)b[i], (double)a[i]);
}

/* ---- the same bits ---------------------------------------------------------------------------------------------------------- */

static void check_model(Gpu *gpu, const char *name, bool exact, const KvPolicy *policy)
{
    static float expected[N_WANTED * N_VOCAB], logits[N_WANTED * N_VOCAB];
    uint64_t total = total_bytes(gpu, name);
    uint32_t n_streaming = 0;

    {
        _cleanup_(model_freep) Model *model = open_streaming(gpu, name, exact, (ModelWeights){0});

        run(model, policy, 33, expected);
    }
    for (size_t p = 0; p < N_ELEMENTS(percents); p++)
        for (size_t s = 0; s < N_ELEMENTS(slots); s++) {
            ModelWeights weights = {.budget_bytes = total * percents[p] / 100, .n_slots = slots[s], .transfer = KV_TRANSFER_COPY};
            _cleanup_(model_freep) Model *model = open_streaming(gpu, name, exact, weights);
            ModelPlan plan;

            model_weights_plan(model, &plan);
            assert_true(plan.weight_bytes + plan.weight_staging_bytes <= weights.budget_bytes);
            assert_int_equal(plan.weight_streamed_bytes > 0, percents[p] < 100);
            n_streaming += plan.weight_streamed_bytes > 0;
            run(model, policy, s % 2 ? 33 : 5, logits);
            expect_equal_bits(expected, logits, N_WANTED * N_VOCAB, name, percents[p], slots[s]);
        }
    assert_int_equal(n_streaming, (N_ELEMENTS(percents) - 1) * N_ELEMENTS(slots));
}

static void any_budget_and_ring_gives_the_bits_of_resident_weights_in_fast_compute(void **state)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_DYNAMIC, false);

    for (size_t f = 0; f < N_ELEMENTS(fixtures); f++)
        check_model(*state, fixtures[f], false, &policy);
}

static void any_budget_and_ring_gives_the_bits_of_resident_weights_in_exact_compute(void **state)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_DYNAMIC, true);

    check_model(*state, fixtures[1], true, &policy);
}

static void weights_and_cache_stream_side_by_side(void **state)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);

    policy.transfer = KV_TRANSFER_COPY;
    policy.tile_blocks = 1;
    check_model(*state, fixtures[0], false, &policy);
}

static void weights_read_in_place_give_the_same_bits(void **state)
{
    static float expected[N_WANTED * N_VOCAB], logits[N_WANTED * N_VOCAB];
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_DYNAMIC, false);

    if (!gpu_info(*state)->unified_memory)
        skip();
    for (size_t f = 0; f < N_ELEMENTS(fixtures); f++) {
        uint64_t total = total_bytes(*state, fixtures[f]);

        for (int i = 0; i < 2; i++) {
            ModelWeights weights = {.budget_bytes = i ? total / 3 : 0, .transfer = KV_TRANSFER_ZERO_COPY};
            _cleanup_(model_freep) Model *model = open_streaming(*state, fixtures[f], false, weights);
            ModelPlan plan;

            model_weights_plan(model, &plan);
            assert_int_equal(plan.weight_in_place_bytes > 0, i);
            assert_int_equal(plan.weight_staging_bytes, 0);
            run(model, &policy, 33, i ? logits : expected);
        }
        expect_equal_bits(expected, logits, N_WANTED * N_VOCAB, fixtures[f], 33, 0);
    }
}

/* ---- in the middle of a generation ------------------------------------------------------------------------------------------ */

static void generate(Model *model, bool move, float *ret_logits)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    _cleanup_(kv_store_freep) KvStore *store = rig_new_store(model, &policy);
    _cleanup_(kv_cache_freep) KvCache *cache = NULL;
    uint32_t n_moves = 0;
    int32_t ids[N_IDS];

    rig_random_ids(5, N_VOCAB, ids, N_IDS);
    assert_int_equal(kv_cache_new(store, &cache, NULL), 0);
    for (uint32_t i = 0; i < N_IDS; i++) {
        ModelItem item = {.cache = cache, .tokens = ids + i, .n_tokens = 1};

        if (move && i % 10 == 9) {
            uint64_t before = model_device_bytes(model);
            ModelPlan plan;
            int r;

            if (i == 69) { /* all back, then away again */
                assert_int_equal(model_place_weights(model, 0, NULL), 0);
                model_weights_plan(model, &plan);
                assert_int_equal(plan.weight_bytes, plan.weight_total_bytes);
                before = model_device_bytes(model);
            }
            model_weights_plan(model, &plan);
            r = model_stream_more(model, (plan.weight_bytes + plan.weight_staging_bytes) / 8, NULL);
            if (r == 0) {
                assert_true(model_device_bytes(model) < before);
                n_moves++;
            } else {
                assert_int_equal(r, MODEL_E_DEVICE_MEMORY);
                assert_int_equal(model_device_bytes(model), before);
            }
        }
        assert_int_equal(model_forward(model, store, &item, 1, ret_logits + (size_t)i * N_VOCAB, NULL), 0);
    }
    assert_true(n_moves > 3 || !move);
}

static void weights_that_leave_the_device_between_two_tokens_change_no_bit(void **state)
{
    static float expected[N_IDS * N_VOCAB], logits[N_IDS * N_VOCAB];

    for (size_t f = 0; f < N_ELEMENTS(fixtures); f++)
        for (int t = 0; t < 2; t++) {
            ModelWeights weights = {.transfer = t ? KV_TRANSFER_AUTO : KV_TRANSFER_COPY};
            _cleanup_(model_freep) Model *still = open_streaming(*state, fixtures[f], false, weights);
            _cleanup_(model_freep) Model *moving = open_streaming(*state, fixtures[f], false, weights);

            generate(still, false, expected);
            generate(moving, true, logits);
            expect_equal_bits(expected, logits, N_IDS * N_VOCAB, fixtures[f], 0, 2);
        }
}

/* ---- memory ----------------------------------------------------------------------------------------------------------------- */

static void a_warm_step_with_streamed_weights_creates_nothing(void **state)
{
    uint64_t total = total_bytes(*state, fixtures[1]);
    ModelWeights weights = {.budget_bytes = total * 3 / 10, .transfer = KV_TRANSFER_COPY};
    _cleanup_(model_freep) Model *model = open_streaming(*state, fixtures[1], false, weights);
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    _cleanup_(kv_store_freep) KvStore *store = rig_new_store(model, &policy);
    _cleanup_(kv_cache_freep) KvCache *cache = NULL;
    GpuCounters before, after;
    float logits[N_VOCAB];
    ModelPlan plan;

    model_weights_plan(model, &plan);
    assert_int_equal(kv_cache_new(store, &cache, NULL), 0);
    for (int32_t i = 0; i < 140; i++) {
        ModelItem item = {.cache = cache, .tokens = &i, .n_tokens = 1};

        if (i == 100)
            gpu_counters(*state, &before);
        assert_int_equal(model_forward(model, store, &item, 1, logits, NULL), 0);
    }
    gpu_counters(*state, &after);
    assert_int_equal(before.n_programs_built + before.n_programs_from_cache, after.n_programs_built + after.n_programs_from_cache);
    assert_int_equal(before.n_buffers_created, after.n_buffers_created);
    /* Each step brings each streamed part once, and the prefetch is not in vain. */
    print_message("%llu bytes a step, %llu streamed by the plan\n", (unsigned long long)(after.upload_bytes - before.upload_bytes) / 40,
                  (unsigned long long)plan.weight_streamed_bytes);
    assert_true(after.upload_bytes - before.upload_bytes >= 40 * plan.weight_streamed_bytes / 100 * 95);
    assert_true(after.upload_bytes - before.upload_bytes <= 40 * (plan.weight_streamed_bytes + 40000));
}

/* Plans for what is left of a device, then asks the allocator. */
static void check_fit(Gpu *gpu, const ModelFile *file, const char *name, KvStrategy strategy, uint64_t available, unsigned *ret_steps)
{
    ModelOptions options = {.max_rows = 512, .max_sequences = 2, .weights = {.transfer = KV_TRANSFER_COPY}};
    KvPolicy policy = kv_policy_preset(strategy, false);
    uint64_t used[GPU_PURPOSE_X_MAX], total, before, budget = gpu_info(gpu)->budget_bytes;
    _cleanup_(model_freep) Model *model = NULL;
    _cleanup_(kv_store_freep) KvStore *store = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    ModelFit fit;
    int r;

    policy.transfer = policy.home == KV_HOME_HOST ? KV_TRANSFER_COPY : KV_TRANSFER_AUTO;
    policy.max_cache_tokens = 2048;
    *ret_steps = 0;
    r = model_fit(gpu_info(gpu), file, &options, &policy, available, &fit, &detail);
    if (r) {
        assert_int_equal(r, MODEL_E_DEVICE_MEMORY);
        assert_non_null(strstr(detail.text, "MiB"));
        return;
    }
    *ret_steps = fit.steps | 1u << 8;
    gpu_memory_used(gpu, used, &before);
    gpu_set_budget(gpu, before + available);
    model = rig_open_model(gpu, name, NULL, fit.options);
    store = rig_new_store(model, &fit.policy);
    gpu_memory_used(gpu, used, &total);
    gpu_set_budget(gpu, budget);
    assert_int_equal(used[GPU_PURPOSE_WEIGHTS], fit.plan.weight_bytes);
    assert_int_equal(used[GPU_PURPOSE_STAGING], fit.plan.kv.staging_bytes + fit.plan.weight_staging_bytes);
    assert_int_equal(used[GPU_PURPOSE_TAIL], fit.plan.kv.tail_bytes);
    assert_int_equal(total - before, fit.plan.device_total_bytes);
    assert_true(total - before <= available);
    assert_int_equal(model_device_bytes(model), fit.plan.weight_bytes + fit.plan.weight_staging_bytes + fit.plan.activation_bytes);
}

static void whatever_is_left_of_the_device_the_plan_equals_what_the_allocator_shows(void **state)
{
    static const KvStrategy strategies[] = {KV_STRATEGY_STATIC, KV_STRATEGY_OFFLOADED, KV_STRATEGY_OFFLOADED_QUANTIZED};
    unsigned seen = 0;

    for (size_t f = 0; f < N_ELEMENTS(fixtures); f++) {
        _cleanup_(model_file_freep) ModelFile *file = NULL;
        char path[4096];

        rig_path(fixtures[f], path, sizeof(path));
        assert_int_equal(model_file_open(path, NULL, &file, NULL), 0);
        for (size_t s = 0; s < N_ELEMENTS(strategies); s++)
            for (uint64_t available = UINT64_C(32) << 20; available > 60000; available = available * 3 / 5) {
                unsigned steps;

                check_fit(*state, file, path, strategies[s], available, &steps);
                seen |= steps;
            }
    }
    /* Every step of the ladder was taken by one of them. */
    assert_int_equal(seen & 15, MODEL_STEP_ROWS | MODEL_STEP_STAGING | MODEL_STEP_HOME | MODEL_STEP_WEIGHTS);
}

/* ---- speed ------------------------------------------------------------------------------------------------------------------ */

static void the_device_is_measured_once_and_left_as_it_was(void **state)
{
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    char path[4096], folder[] = "/tmp/leat-speed-XXXXXX", command[64];
    uint64_t used[GPU_PURPOSE_X_MAX], before, after;
    ModelSpeed speed, again;
    ModelFit fit = {.options = {.max_rows = 64}, .policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false)};

    assert_non_null(mkdtemp(folder));
    rig_path(fixtures[1], path, sizeof(path));
    assert_int_equal(model_file_open(path, folder, &file, NULL), 0);
    assert_int_equal(model_plan(gpu_info(*state), file, &fit.options, &fit.policy, &fit.plan, NULL), 0);
    gpu_memory_used(*state, used, &before);
    fit.policy.form.k_bits = fit.policy.form.v_bits = KV_BITS_AUTO; /* not chosen yet, and not by the probe's model, which has no text */
    assert_int_equal(model_speed(*state, file, &fit, false, &speed, NULL), -ENOENT);
    assert_int_equal(model_speed(*state, file, &fit, true, &speed, NULL), 0);
    gpu_memory_used(*state, used, &after);
    assert_int_equal(before, after);
    assert_true(speed.head_sec + speed.layer_sec > 0 && speed.chunk_rows == 64 && speed.upload_rate > 0 && speed.n_pasts >= 1);
    assert_true(fit.plan.kv.n_slots > 0 || (speed.n_links == 0 && speed.n_chunk_links == 0)); /* read in place: nothing streams */
    for (uint64_t i = 0; i < speed.n_links; i++)
        assert_true(speed.links[i].share > 0 && speed.links[i].share <= 1 && speed.links[i].beside >= 0 && speed.links[i].beside <= 1);
    assert_int_equal(model_speed(*state, file, &fit, false, &again, NULL), 0);
    assert_memory_equal(&speed, &again, sizeof(speed));
    fit.policy.form = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false).form; /* the usual bits: those that were assumed */
    assert_int_equal(model_speed(*state, file, &fit, false, &again, NULL), 0);
    assert_memory_equal(&speed, &again, sizeof(speed));
    fit.policy.form.v_bits = 8; /* other kernels: unknown */
    assert_int_equal(model_speed(*state, file, &fit, false, &again, NULL), -ENOENT);
    (void)snprintf(command, sizeof(command), "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

static void a_prediction_adds_up_what_was_measured(void **state)
{
    ModelSpeed speed = {.head_sec = 0.001, .layer_sec = 0.0001, 
                        .n_pasts = 2, .pasts = {{0, 0}, {1000, 1e-5}}, .chunk_rows = 100, .chunk_sec = 0.01,
                        .chunk_layer_sec = 0.002, .chunk_layer_past_sec = 1e-7, .upload_rate = 1e9, .tile_rate = 1e9,
                        .n_links = 1, .links = {{0, 1, 1}}, .n_chunk_links = 1, .chunk_links = {{0, 1, 1}}};
    ModelFit fit = {.policy = {.home = KV_HOME_HOST}};
    ModelPrediction prediction;

    (void)state;
    fit.plan.n_layers = 20;
    fit.plan.kv.host_bytes_per_token = 1000;
    model_predict(&speed, &fit, 10000, &prediction);
    assert_true(prediction.token_sec > 0.00499 && prediction.token_sec < 0.00501); /* read in place: nothing is copied */
    assert_true(prediction.prefill_rate > 1428 && prediction.prefill_rate < 1429);
    assert_false(prediction.bus_limited);
    fit.plan.kv.n_slots = 2;
    model_predict(&speed, &fit, 10000, &prediction);
    /* Ten megabytes at a gigabyte a second, and 0.3 ms of the head behind which the ring has no room for more. */
    assert_true(prediction.token_sec > 0.01029 && prediction.token_sec < 0.01031);
    assert_true(prediction.bus_limited);
    assert_true(prediction.hidden_share > 0.93 && prediction.hidden_share < 0.95);
    speed.links[0].beside = 0.5;
    fit.plan.weight_streamed_bytes = 2000000;
    fit.plan.weight_slots = 2;
    fit.plan.weight_slot_bytes = 1000000;
    model_predict(&speed, &fit, 0, &prediction);
    assert_true(prediction.token_sec > 0.00399 && prediction.token_sec < 0.00401); /* 3 ms, half as fast for 2 ms of copies */
    fit.plan.weight_streamed_head_bytes = 1000000;
    speed.chunk_links[0].beside = 0.25;
    model_predict(&speed, &fit, 0, &prediction); /* 50 ms, and three quarters of 1 ms: a chunk does not read the head */
    assert_true(prediction.prefill_rate > 100 / 0.05076 && prediction.prefill_rate < 100 / 0.05074);
    fit.plan.weight_streamed_bytes = fit.plan.weight_streamed_head_bytes = fit.plan.kv.n_slots = 0;
    fit.options.max_rows = 400; /* in passes of four times as many rows: 200 ms, 1.2 for a past longer by 150, 1 of copies */
    fit.plan.weight_streamed_bytes = 1000000;
    model_predict(&speed, &fit, 0, &prediction);
    assert_true(prediction.prefill_rate > 400 / 0.20196 && prediction.prefill_rate < 400 / 0.20194);
    fit.plan.weight_streamed_bytes = 0;
    speed.n_pasts = 3;
    speed.pasts[0].tokens = 20;
    speed.pasts[1] = (ModelPast){1020, 3e-5};
    speed.pasts[2] = (ModelPast){2020, 4e-5};
    model_predict(&speed, &fit, 20, &prediction);
    assert_true(prediction.token_sec > 0.00299 && prediction.token_sec < 0.00301); /* as the first */
    model_predict(&speed, &fit, 520, &prediction);
    assert_true(prediction.token_sec > 0.00329 && prediction.token_sec < 0.00331);
    model_predict(&speed, &fit, 10020, &prediction);
    assert_true(prediction.token_sec > 0.00539 && prediction.token_sec < 0.00541); /* 3 ms, 0.6 ms, 1.8 ms */
}

/* ---- the real model --------------------------------------------------------------------------------------------------------- */

enum { REAL_PROMPT = 24, REAL_STEPS = 3, REAL_VOCAB = 49152 };

static void run_real(Gpu *gpu, const char *path, ModelWeights weights, float *ret_logits, ModelPlan *ret_plan)
{
    _cleanup_(model_freep) Model *model =
        rig_open_model(gpu, path, NULL, (ModelOptions){.max_rows = 32, .context = 256, .weights = weights});
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED, false);
    _cleanup_(kv_store_freep) KvStore *store = rig_new_store(model, &policy);
    _cleanup_(kv_cache_freep) KvCache *cache = NULL;
    int32_t ids[REAL_PROMPT + REAL_STEPS];

    model_weights_plan(model, ret_plan);
    rig_random_ids(3, REAL_VOCAB, ids, N_ELEMENTS(ids));
    assert_int_equal(kv_cache_new(store, &cache, NULL), 0);
    for (uint32_t step = 0; step <= REAL_STEPS; step++) {
        ModelItem item = {.cache = cache, .tokens = step ? ids + REAL_PROMPT + step - 1 : ids, .n_tokens = step ? 1 : REAL_PROMPT};

        assert_int_equal(model_forward(model, store, &item, 1, ret_logits + (size_t)step * REAL_VOCAB, NULL), 0);
    }
}

static void smollm2_gives_the_same_bits_at_any_share_of_its_weights(void **state)
{
    static const struct {
        uint32_t percent, n_slots;
        KvTransfer transfer;
    } runs[] = {{60, 2, KV_TRANSFER_COPY}, {40, 2, KV_TRANSFER_COPY}, {40, 8, KV_TRANSFER_COPY}, {10, 1, KV_TRANSFER_COPY},
                {10, 3, KV_TRANSFER_COPY}, {40, 0, KV_TRANSFER_AUTO}};
    const char *path = getenv("LEAT_TEST_MODEL");
    const size_t n = (size_t)(REAL_STEPS + 1) * REAL_VOCAB;
    _cleanup_(freep) float *expected = calloc(n, sizeof(float)), *logits = calloc(n, sizeof(float));
    ModelPlan plan;

    if (!path || !*path) {
        print_message("LEAT_TEST_MODEL does not name a file\n");
        skip();
    }
    assert_true(expected && logits);
    run_real(*state, path, (ModelWeights){0}, expected, &plan);
    for (size_t i = 0; i < N_ELEMENTS(runs); i++) {
        uint64_t budget = plan.weight_total_bytes * runs[i].percent / 100;
        ModelPlan now;

        run_real(*state, path, (ModelWeights){.budget_bytes = budget, .n_slots = runs[i].n_slots, .transfer = runs[i].transfer}, logits, &now);
        print_message("%u %%: %u of %u layers resident, %.1f MB streamed, %.1f MB in place, %u slots of %.2f MB\n", runs[i].percent,
                      now.n_layers_resident, now.n_layers, (double)now.weight_streamed_bytes / 1e6, (double)now.weight_in_place_bytes / 1e6,
                      now.weight_slots, (double)now.weight_slot_bytes / 1e6);
        assert_true(now.weight_bytes + now.weight_staging_bytes <= budget);
        expect_equal_bits(expected, logits, n, "SmolLM2", runs[i].percent, runs[i].n_slots);
    }
}

static int setup(void **state)
{
    *state = rig_open_gpu();
    return 0;
}

static int teardown(void **state)
{
    gpu_free(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_budget_and_ring_gives_the_bits_of_resident_weights_in_fast_compute),
        cmocka_unit_test(any_budget_and_ring_gives_the_bits_of_resident_weights_in_exact_compute),
        cmocka_unit_test(weights_and_cache_stream_side_by_side),
        cmocka_unit_test(weights_read_in_place_give_the_same_bits),
        cmocka_unit_test(weights_that_leave_the_device_between_two_tokens_change_no_bit),
        cmocka_unit_test(a_warm_step_with_streamed_weights_creates_nothing),
        cmocka_unit_test(whatever_is_left_of_the_device_the_plan_equals_what_the_allocator_shows),
        cmocka_unit_test(the_device_is_measured_once_and_left_as_it_was),
        cmocka_unit_test(a_prediction_adds_up_what_was_measured),
        cmocka_unit_test(smollm2_gives_the_same_bits_at_any_share_of_its_weights),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
