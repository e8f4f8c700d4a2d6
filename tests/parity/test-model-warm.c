/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A warm decode step builds no program, creates no buffer and allocates no host memory of ours.  Host allocations are counted by the
 * address that asked for them: the driver's own (it allocates for every command) come from its library, ours from this program.
 */

#include "tests/lib/model-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>

#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS 0 /* the sanitizer has taken the allocator's place */
#else
#define COUNTS 1

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *old, size_t size);
/* The first and last byte of this program's code, from the linker. */
extern const char __executable_start[], etext[];

static atomic_ulong n_ours;

static void count(const void *caller)
{
    if ((const char *)caller >= __executable_start && (const char *)caller < etext)
        atomic_fetch_add(&n_ours, 1);
}

void *malloc(size_t size);
void *calloc(size_t n, size_t size);
void *realloc(void *old, size_t size);

void *malloc(size_t size)
{
    count(__builtin_return_address(0));
    return __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_calloc(n, size);
}

void *realloc(void *old, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_realloc(old, size);
}
#endif

enum { N_VOCAB = 320, N_PROMPT = 100, N_WARM = 40, N_STEPS = 150 };

static void decode(Model *model, KvStore *store, KvCache *cache, uint32_t n, float *logits)
{
    for (uint32_t i = 0; i < n; i++) {
        int32_t token = (int32_t)(i * 37 % N_VOCAB);
        ModelItem item = {.cache = cache, .tokens = &token, .n_tokens = 1};

        assert_int_equal(model_forward(model, store, &item, 1, logits, NULL), 0);
    }
}

/* @budget: of the device for weights, the rest streams; 0: all stay. */
static void check_policy(Gpu *gpu, KvStrategy strategy, KvTransfer transfer, uint64_t budget)
{
    const RigPolicy rig = {.name = "", .strategy = strategy, .transfer = transfer};
    KvPolicy policy = rig_policy(&rig, false);
    int32_t prompt[N_PROMPT];
    float logits[N_VOCAB];
    char path[4096];
    GpuCounters before, after;
    KvCache *cache = NULL;
    KvStore *store;
    Model *model;

    rig_path("tiny-llama-tied.gguf", path, sizeof(path));
    model = rig_open_model(gpu, path, NULL, (ModelOptions){.max_rows = N_PROMPT, .weights = {budget, 2, KV_TRANSFER_COPY}});
    store = rig_new_store(model, &policy);
    assert_int_equal(kv_cache_new(store, &cache, NULL), 0);
    rig_random_ids(7, N_VOCAB, prompt, N_PROMPT);
    assert_int_equal(
        model_forward(model, store, &(ModelItem){.cache = cache, .tokens = prompt, .n_tokens = N_PROMPT}, 1, logits, NULL), 0);
    decode(model, store, cache, N_WARM, logits);
    gpu_counters(gpu, &before);
#if COUNTS
    unsigned long ours = atomic_load(&n_ours);
    /* Loading the model was counted, so the count works. */
    assert_true(ours > 0);
#endif
    /* Five pages are packed on the way. */
    decode(model, store, cache, N_STEPS, logits);
#if COUNTS
    ours = atomic_load(&n_ours) - ours;
    print_message("%s: %lu host allocations of ours in %d steps\n", kv_strategy_to_string(strategy), ours, N_STEPS);
    assert_int_equal(ours, 0);
#endif
    gpu_counters(gpu, &after);
    assert_int_equal(after.n_programs_built, before.n_programs_built);
    assert_int_equal(after.n_programs_from_cache, before.n_programs_from_cache);
    assert_int_equal(after.n_buffers_created, before.n_buffers_created);
    kv_cache_free(cache);
    kv_store_free(store);
    model_free(model);
}

static void a_warm_step_builds_creates_and_allocates_nothing(void **state)
{
    check_policy(*state, KV_STRATEGY_OFFLOADED_QUANTIZED, KV_TRANSFER_AUTO, 0);
    check_policy(*state, KV_STRATEGY_OFFLOADED_QUANTIZED, KV_TRANSFER_COPY, 0);
    check_policy(*state, KV_STRATEGY_QUANTIZED, KV_TRANSFER_AUTO, 0);
    check_policy(*state, KV_STRATEGY_STATIC, KV_TRANSFER_AUTO, 0);
    check_policy(*state, KV_STRATEGY_OFFLOADED_QUANTIZED, KV_TRANSFER_COPY, 100000);
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_warm_step_builds_creates_and_allocates_nothing)};

    return cmocka_run_group_tests(tests, setup, teardown);
}
