/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two tiny models of the Llama 3 kind against Transformers in float32, and against themselves: whatever way an exact cache is kept, the
 * logits are the same to the last bit.
 */

#include "tests/lib/model-rig.h"
#include "tests/lib/place.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#define N_VOCAB  320
#define N_IDS    700 /* 22 pages, three blocks */
#define N_WANTED 40

static const char *const fixtures[] = {"tiny-llama-tied", "tiny-llama-mixed"};

static Model *open_fixture(Gpu *gpu, const char *name, const char *state_dir, ModelOptions options)
{
    char file[64], path[4096];

    (void)snprintf(file, sizeof(file), "%s.gguf", name);
    rig_path(file, path, sizeof(path));
    return rig_open_model(gpu, path, state_dir, options);
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

static void exact_compute_and_f32_cache_equal_the_oracle(void **state)
{
    for (size_t f = 0; f < N_ELEMENTS(fixtures); f++) {
        _cleanup_(model_freep) Model *model = open_fixture(*state, fixtures[f], NULL, (ModelOptions){.exact = true, .max_rows = 64});
        KvPolicy policy = kv_policy_preset(KV_STRATEGY_DYNAMIC, true);
        _cleanup_(kv_store_freep) KvStore *store = rig_new_store(model, &policy);
        _cleanup_(oracle_freep) Oracle *oracle = NULL;
        char name[64];

        (void)snprintf(name, sizeof(name), "%s.json", fixtures[f]);
        oracle = oracle_load(name);
        for (size_t p = 0; p < oracle->n_prompts; p++) {
            OracleResult result;

            assert_int_equal(oracle_compare(oracle, &oracle->prompts[p], UINT32_MAX, model, store, &result), 0);
            print_message("%s, %s: %u numbers, worst %.1e of the largest, %u ties\n", fixtures[f], oracle->prompts[p].name,
                          result.n_compared, result.worst, result.n_ties_taken);
            assert_int_equal(result.n_ids_wrong, 0);
            assert_int_equal(result.n_logits_wrong, 0);
        }
    }
}

/* ---- the same bits whatever way ---------------------------------------------------------------------------------------------------- */

static const RigPolicy exact_policies[] = {
    {"static", KV_STRATEGY_STATIC, KV_TRANSFER_AUTO, 0, 0},
    {"dynamic, tiles of one block", KV_STRATEGY_DYNAMIC, KV_TRANSFER_AUTO, 0, 1},
    {"offloaded, in place", KV_STRATEGY_OFFLOADED, KV_TRANSFER_ZERO_COPY, 0, 0},
    {"offloaded, copied", KV_STRATEGY_OFFLOADED, KV_TRANSFER_COPY, 0, 0},
    {"offloaded, two tiles", KV_STRATEGY_OFFLOADED, KV_TRANSFER_COPY, 2, 1},
    {"offloaded, one tile", KV_STRATEGY_OFFLOADED, KV_TRANSFER_COPY, 1, 1},
    {"offloaded, three of two blocks", KV_STRATEGY_OFFLOADED, KV_TRANSFER_COPY, 3, 2},
    {"offloaded_static, copied", KV_STRATEGY_OFFLOADED_STATIC, KV_TRANSFER_COPY, 2, 1},
    {"offloaded_static, in place", KV_STRATEGY_OFFLOADED_STATIC, KV_TRANSFER_ZERO_COPY, 0, 0},
};

static void run_policy(Model *model, const KvPolicy *policy, const int32_t *ids, uint32_t n_ids, uint32_t chunk, float *ret_logits)
{
    _cleanup_(kv_store_freep) KvStore *store = rig_new_store(model, policy);

    rig_run(model, store, ids, n_ids, chunk, N_WANTED, ret_logits);
}

static void expect_equal_bits(const float *a, const float *b, const char *what)
{
    if (memcmp(a, b, (size_t)N_WANTED * N_VOCAB * sizeof(*a)) == 0)
        return;
    for (size_t i = 0; i < (size_t)N_WANTED * N_VOCAB; i++)
        if (a[i] != b[i]) {
            print_error("%s: row %zu, logit %zu: %.9g is not %.9g\n", what, i / N_VOCAB, i % N_VOCAB, (double)b[i], (double)a[i]);
            break;
        }
    fail();
}

static void check_policies(Gpu *gpu, bool exact)
{
    static float expected[N_WANTED * N_VOCAB], logits[N_WANTED * N_VOCAB];
    _cleanup_(model_freep) Model *model = open_fixture(gpu, fixtures[1], NULL, (ModelOptions){.exact = exact, .max_rows = 64});
    KvPolicy dynamic = kv_policy_preset(KV_STRATEGY_DYNAMIC, exact);
    int32_t ids[N_IDS];

    rig_random_ids(1, 256, ids, N_IDS);
    run_policy(model, &dynamic, ids, N_IDS, 64, expected);
    for (size_t i = 0; i < N_ELEMENTS(exact_policies); i++) {
        KvPolicy policy = rig_policy(&exact_policies[i], exact);

        if (policy.transfer == KV_TRANSFER_ZERO_COPY && !gpu_info(gpu)->unified_memory)
            continue;
        run_policy(model, &policy, ids, N_IDS, 64, logits);
        expect_equal_bits(expected, logits, exact_policies[i].name);
    }
}

static void every_exact_strategy_gives_the_bits_of_dynamic_in_exact_compute(void **state)
{
    check_policies(*state, true);
}

static void every_exact_strategy_gives_the_bits_of_dynamic_in_fast_compute(void **state)
{
    check_policies(*state, false);
}

static void the_size_of_a_pass_does_not_change_a_bit(void **state)
{
    static const uint32_t chunks[] = {1, 7, 33};
    static float expected[N_WANTED * N_VOCAB], logits[N_WANTED * N_VOCAB];
    int32_t ids[N_IDS];

    rig_random_ids(2, 256, ids, N_IDS);
    for (int exact = 0; exact < 2; exact++) {
        _cleanup_(model_freep) Model *model = open_fixture(*state, fixtures[0], NULL, (ModelOptions){.exact = exact, .max_rows = 64});
        const KvPolicy policies[] = {kv_policy_preset(KV_STRATEGY_DYNAMIC, exact), kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, exact)};

        for (size_t p = 0; p < N_ELEMENTS(policies); p++) {
            run_policy(model, &policies[p], ids, 300, 64, expected);
            for (size_t c = 0; c < N_ELEMENTS(chunks); c++) {
                run_policy(model, &policies[p], ids, 300, chunks[c], logits);
                expect_equal_bits(expected, logits, p ? "quantised" : "dynamic");
            }
        }
    }
}

static void a_sequence_alone_equals_itself_beside_another(void **state)
{
    _cleanup_(model_freep) Model *model = open_fixture(*state, fixtures[1], NULL, (ModelOptions){.max_rows = 64, .max_sequences = 2});
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    _cleanup_(kv_store_freep) KvStore *store = rig_new_store(model, &policy);
    _cleanup_(kv_cache_freep) KvCache *a = NULL, *b = NULL, *alone = NULL;
    static float together[2 * N_VOCAB], single[N_VOCAB];
    int32_t ids_a[150], ids_b[150];

    rig_random_ids(3, 256, ids_a, 150);
    rig_random_ids(4, 256, ids_b, 150);
    assert_int_equal(kv_cache_new(store, &a, NULL), 0);
    assert_int_equal(kv_cache_new(store, &b, NULL), 0);
    for (uint32_t done = 0; done < 150; done += 30) {
        /* Of different lengths at every moment: b lags by one. */
        ModelItem items[] = {{.cache = a, .tokens = ids_a + done, .n_tokens = 30},
                             {.cache = b, .tokens = ids_b + (done ? done - 1 : 0), .n_tokens = done ? 30 : 29}};

        assert_int_equal(model_forward(model, store, items, 2, together, NULL), 0);
    }
    kv_cache_freep(&a);
    a = NULL;
    assert_int_equal(kv_cache_length(b), 149);
    assert_int_equal(kv_cache_new(store, &alone, NULL), 0);
    for (uint32_t done = 0; done < 149; done++) {
        ModelItem item = {.cache = alone, .tokens = ids_b + done, .n_tokens = 1};

        assert_int_equal(model_forward(model, store, &item, 1, single, NULL), 0);
    }
    assert_memory_equal(together + N_VOCAB, single, sizeof(single));
}

/* ---- planning and memory ------------------------------------------------------------------------------------------------------------ */

static void the_plan_equals_what_the_allocator_shows(void **state)
{
    char path[4096];

    rig_path("tiny-llama-mixed.gguf", path, sizeof(path));
    for (KvStrategy strategy = 0; strategy < KV_STRATEGY_X_MAX; strategy++)
        for (KvTransfer transfer = KV_TRANSFER_AUTO; transfer <= KV_TRANSFER_COPY; transfer++) {
            _cleanup_(model_file_freep) ModelFile *file = NULL;
            _cleanup_(model_freep) Model *model = NULL;
            _cleanup_(kv_store_freep) KvStore *store = NULL;
            ModelOptions options = {.max_rows = 48, .max_sequences = 3};
            KvPolicy policy = kv_policy_preset(strategy, false);
            uint64_t used[GPU_PURPOSE_X_MAX], total, before;
            ModelPlan plan;

            policy.transfer = transfer;
            gpu_memory_used(*state, used, &before);
            assert_int_equal(model_file_open(path, NULL, &file, NULL), 0);
            assert_int_equal(model_plan(gpu_info(*state), file, &options, &policy, &plan, NULL), 0);
            model = open_fixture(*state, fixtures[1], NULL, options);
            store = rig_new_store(model, &policy);
            gpu_memory_used(*state, used, &total);
            assert_int_equal(used[GPU_PURPOSE_WEIGHTS], plan.weight_bytes);
            assert_int_equal(model_device_bytes(model), plan.weight_bytes + plan.activation_bytes);
            assert_int_equal(used[GPU_PURPOSE_STAGING], plan.kv.staging_bytes);
            assert_int_equal(used[GPU_PURPOSE_TAIL], plan.kv.tail_bytes);
            if (policy.growth == KV_GROWTH_DYNAMIC || policy.home == KV_HOME_HOST)
                assert_int_equal(total - before - used[GPU_PURPOSE_PAGES], plan.device_total_bytes - plan.kv.device_page_bytes);
            assert_true(plan.fits);
        }
}

static void a_budget_too_small_for_the_model_is_said_with_numbers(void **state)
{
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    uint64_t used[GPU_PURPOSE_X_MAX], before, after, budget = gpu_info(*state)->budget_bytes;
    ModelOptions options = {.max_rows = 16};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    char path[4096];
    Model *model = NULL;

    rig_path("tiny-llama-tied.gguf", path, sizeof(path));
    assert_int_equal(model_file_open(path, NULL, &file, NULL), 0);
    gpu_memory_used(*state, used, &before);
    gpu_set_budget(*state, before + 100000);
    assert_int_equal(model_new(*state, file, &options, &model, &detail), MODEL_E_DEVICE_MEMORY);
    gpu_memory_used(*state, used, &after);
    gpu_set_budget(*state, budget);
    assert_null(model);
    assert_int_equal(before, after);
    assert_non_null(strstr(detail.text, "100000 of the budget of"));
    assert_non_null(strstr(detail.text, "max-memory"));
    /* The same file fits afterwards. */
    assert_int_equal(model_new(*state, file, &options, &model, NULL), 0);
    file = NULL;
    model_free(model);
}

/* A cache at home on the device grows with the sequence: when the budget ends in the middle, the pass is refused, and goes on later as if
 * nothing had been. */
static void a_pass_that_the_budget_refuses_can_be_run_again_later(void **state)
{
    static float expected[N_WANTED * N_VOCAB], logits[64 * N_VOCAB];
    _cleanup_(model_freep) Model *model = open_fixture(*state, fixtures[0], NULL, (ModelOptions){.exact = true, .max_rows = 50, .max_sequences = 2});
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_DYNAMIC, true);
    _cleanup_(kv_store_freep) KvStore *store = rig_new_store(model, &policy), *refused = NULL;
    uint64_t used[GPU_PURPOSE_X_MAX], total, budget = gpu_info(*state)->budget_bytes;
    _cleanup_(kv_cache_freep) KvCache *other = NULL, *cache = NULL;
    uint32_t n_refusals = 0;
    int32_t ids[N_IDS];

    rig_random_ids(7, 256, ids, N_IDS);
    rig_run(model, store, ids, N_IDS, 50, N_WANTED, expected);
    gpu_memory_used(*state, used, &total);
    gpu_set_budget(*state, total);
    assert_int_equal(model_store_new(model, &policy, &refused, NULL), MODEL_E_DEVICE_MEMORY);
    gpu_set_budget(*state, budget);
    /* Another sequence takes the pages that the first growth brought. */
    assert_int_equal(kv_cache_new(store, &other, NULL), 0);
    for (uint32_t done = 0; done < N_IDS; done += 50)
        assert_int_equal(model_forward(model, store, &(ModelItem){.cache = other, .tokens = ids + done, .n_tokens = 50}, 1, NULL, NULL), 0);
    assert_int_equal(kv_cache_new(store, &cache, NULL), 0);
    for (uint32_t done = 0; done < N_IDS;) {
        ModelItem item = {.cache = cache, .tokens = ids + done, .n_tokens = 50, .all_logits = true};
        int r;

        gpu_memory_used(*state, used, &total);
        gpu_set_budget(*state, total);
        r = model_forward(model, store, &item, 1, logits, NULL);
        gpu_set_budget(*state, budget);
        if (r) {
            n_refusals++;
            assert_int_equal(r, MODEL_E_DEVICE_MEMORY);
            assert_int_equal(kv_cache_length(cache), done);
            assert_int_equal(model_forward(model, store, &item, 1, logits, NULL), 0);
        }
        done += 50;
        assert_int_equal(kv_cache_length(cache), done);
    }
    assert_true(n_refusals > 0);
    expect_equal_bits(expected, logits + 10 * N_VOCAB, "after refusals");
}

static void a_warm_decode_step_creates_nothing(void **state)
{
    _cleanup_(model_freep) Model *model = open_fixture(*state, fixtures[0], NULL, (ModelOptions){.max_rows = 64});
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    _cleanup_(kv_store_freep) KvStore *store = rig_new_store(model, &policy);
    _cleanup_(kv_cache_freep) KvCache *cache = NULL;
    GpuCounters before, after;
    float logits[N_VOCAB];
    int32_t ids[200];

    rig_random_ids(5, 256, ids, 200);
    assert_int_equal(kv_cache_new(store, &cache, NULL), 0);
    for (uint32_t i = 0; i < 200; i++) {
        ModelItem item = {.cache = cache, .tokens = ids + i, .n_tokens = 1};

        if (i == 100)
            gpu_counters(*state, &before);
        assert_int_equal(model_forward(model, store, &item, 1, logits, NULL), 0);
    }
    gpu_counters(*state, &after);
    assert_int_equal(before.n_programs_built, after.n_programs_built);
    assert_int_equal(before.n_programs_from_cache, after.n_programs_from_cache);
    assert_int_equal(before.n_buffers_created, after.n_buffers_created);
}

/* ---- refusals ------------------------------------------------------------------------------------------------------------------------ */

static void wrong_passes_are_refused_and_change_nothing(void **state)
{
    _cleanup_(model_freep) Model *model = open_fixture(*state, fixtures[0], NULL, (ModelOptions){.max_rows = 8, .context = 20});
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED, false);
    _cleanup_(kv_store_freep) KvStore *store = rig_new_store(model, &policy);
    _cleanup_(kv_cache_freep) KvCache *cache = NULL;
    int32_t good[8] = {1, 2, 3, 4, 5, 6, 7, 8}, high[1] = {N_VOCAB}, negative[1] = {-1};
    ModelItem item = {.tokens = good, .n_tokens = 8};
    ErrorDetail detail = ERROR_DETAIL_NULL;

    assert_int_equal(model_options(model)->context, 20);
    assert_int_equal(kv_cache_new(store, &cache, NULL), 0);
    item.cache = cache;
    assert_int_equal(model_forward(model, store, NULL, 0, NULL, NULL), -EINVAL);
    assert_int_equal(model_forward(model, store, &(ModelItem){.cache = cache, .tokens = good}, 1, NULL, NULL), -EINVAL);
    assert_int_equal(model_forward(model, store, &(ModelItem){.cache = cache, .tokens = good, .n_tokens = 9}, 1, NULL, NULL), -EINVAL);
    assert_int_equal(model_forward(model, store, &(ModelItem){.cache = cache, .tokens = high, .n_tokens = 1}, 1, NULL, &detail), -EINVAL);
    assert_non_null(strstr(detail.text, "320"));
    assert_int_equal(model_forward(model, store, &(ModelItem){.cache = cache, .tokens = negative, .n_tokens = 1}, 1, NULL, NULL), -EINVAL);
    assert_int_equal(kv_cache_length(cache), 0);
    assert_int_equal(model_forward(model, store, &item, 1, NULL, NULL), 0);
    assert_int_equal(model_forward(model, store, &item, 1, NULL, NULL), 0);
    assert_int_equal(model_forward(model, store, &item, 1, NULL, &detail), MODEL_E_CONTEXT);
    assert_int_equal(kv_cache_length(cache), 16);
}

/* ---- calibration ---------------------------------------------------------------------------------------------------------------------- */

static int setup_folder(void **state)
{
    static char folder[TEST_FOLDER_SIZE];

    (void)state;
    return test_folder_new(folder) || setenv("LEAT_TEST_FOLDER", folder, 1) ? -1 : 0;
}

static int teardown_folder(void **state)
{
    (void)state;
    return test_folder_remove(getenv("LEAT_TEST_FOLDER"));
}

static void quantised_run(Gpu *gpu, const char *state_dir, float *ret_logits)
{
    _cleanup_(model_freep) Model *model = open_fixture(gpu, fixtures[0], state_dir, (ModelOptions){.exact = true, .max_rows = 64});
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_QUANTIZED, true);
    int32_t ids[N_IDS];

    rig_random_ids(6, 256, ids, N_IDS);
    run_policy(model, &policy, ids, 300, 64, ret_logits);
}

static void calibration_is_stored_by_digest_and_a_damaged_one_is_made_again(void **state)
{
    static float first[N_WANTED * N_VOCAB], again[N_WANTED * N_VOCAB];
    const char *folder = getenv("LEAT_TEST_FOLDER");
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    char path[4096], stored[4096];
    struct stat before, after;
    GpuCounters fresh, warm, start;

    rig_path("tiny-llama-tied.gguf", path, sizeof(path));
    assert_int_equal(model_file_open(path, folder, &file, NULL), 0);
    (void)snprintf(stored, sizeof(stored), "%s/calibration/%s.kvcal", folder, model_file_digest(file));
    gpu_counters(*state, &start);
    quantised_run(*state, folder, first);
    gpu_counters(*state, &fresh);
    assert_int_equal(stat(stored, &before), 0);
    quantised_run(*state, folder, again);
    gpu_counters(*state, &warm);
    expect_equal_bits(first, again, "with the stored calibration");
    /* The second start ran no calibration pass. */
    assert_true(warm.n_launches - fresh.n_launches < fresh.n_launches - start.n_launches);
    assert_int_equal(truncate(stored, before.st_size - 1), 0);
    quantised_run(*state, folder, again);
    expect_equal_bits(first, again, "after a cut calibration");
    assert_int_equal(stat(stored, &after), 0);
    assert_int_equal(before.st_size, after.st_size);
}

static void a_flipped_bit_in_the_calibration_is_seen(void **state)
{
    static float first[N_WANTED * N_VOCAB], again[N_WANTED * N_VOCAB];
    const char *folder = getenv("LEAT_TEST_FOLDER");
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    _cleanup_(close_fdp) int fd = -1;
    char path[4096], stored[4096];
    uint8_t byte;

    rig_path("tiny-llama-tied.gguf", path, sizeof(path));
    assert_int_equal(model_file_open(path, folder, &file, NULL), 0);
    (void)snprintf(stored, sizeof(stored), "%s/calibration/%s.kvcal", folder, model_file_digest(file));
    quantised_run(*state, folder, first);
    fd = open(stored, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, 100), 1);
    byte ^= 0x40;
    assert_int_equal(pwrite(fd, &byte, 1, 100), 1);
    quantised_run(*state, folder, again);
    expect_equal_bits(first, again, "after a flipped bit");
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_compute_and_f32_cache_equal_the_oracle),
        cmocka_unit_test(every_exact_strategy_gives_the_bits_of_dynamic_in_exact_compute),
        cmocka_unit_test(every_exact_strategy_gives_the_bits_of_dynamic_in_fast_compute),
        cmocka_unit_test(the_size_of_a_pass_does_not_change_a_bit),
        cmocka_unit_test(a_sequence_alone_equals_itself_beside_another),
        cmocka_unit_test(the_plan_equals_what_the_allocator_shows),
        cmocka_unit_test(a_budget_too_small_for_the_model_is_said_with_numbers),
        cmocka_unit_test(a_pass_that_the_budget_refuses_can_be_run_again_later),
        cmocka_unit_test(a_warm_decode_step_creates_nothing),
        cmocka_unit_test(wrong_passes_are_refused_and_change_nothing),
        cmocka_unit_test_setup_teardown(calibration_is_stored_by_digest_and_a_damaged_one_is_made_again, setup_folder, teardown_folder),
        cmocka_unit_test_setup_teardown(a_flipped_bit_in_the_calibration_is_seen, setup_folder, teardown_folder),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
