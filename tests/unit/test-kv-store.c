/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Store, caches and passes over the loose device of tests/unit/loose-gpu.c: random histories under every policy, where commands run in
 * any order that queues and events allow, and failures at every call.
 */

#include "tests/unit/loose-gpu.c"

#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define SEED       1u
#define N_LAYERS   3
#define MAX_ROWS   160
#define N_TAILS    3
#define N_CACHES   6
#define MAX_TOKENS 1100

static const float frequencies[8] = {1.0f};

typedef struct Sequence {
    KvCache *cache;
    uint32_t ids[MAX_TOKENS];
} Sequence;

typedef struct Fixture {
    Gpu gpu;
    KvModel model;
    KvPolicy policy;
    KvStore *store;
    GpuBuffer *qkv[N_LAYERS], *out[N_LAYERS];
    Sequence sequences[N_CACHES];
    uint32_t random, next_id;
} Fixture;

static uint32_t random_below(Fixture *fixture, uint32_t n)
{
    fixture->random = fixture->random * 1103515245u + 12345u;
    return (fixture->random >> 8) % n;
}

static void gpu_init(Fixture *fixture, uint32_t seed)
{
    *fixture = (Fixture){.random = seed, .next_id = 1};
    fixture->gpu = (Gpu){.info = {.name = "loose", .unified_memory = true, .max_allocation_bytes = 1u << 28},
                         .random = seed,
                         .favourite = seed % (GPU_QUEUE_X_MAX + 1),
                         .fail_at = -1};
    fixture->model = (KvModel){.n_layers = N_LAYERS,
                               .shape = {.n_heads = 1, .n_kv_heads = 1, .k_head_dim = 16, .v_head_dim = 16, .rotary_dim = 16},
                               .scale = 1.0f,
                               .inv_freq = frequencies,
                               .max_rows = MAX_ROWS,
                               .max_sequences = N_TAILS};
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        assert_int_equal(gpu_buffer_new(&fixture->gpu, GPU_PURPOSE_OTHER, MAX_ROWS * 48 * sizeof(float), &fixture->qkv[l], NULL), 0);
        assert_int_equal(gpu_buffer_new(&fixture->gpu, GPU_PURPOSE_OTHER, MAX_ROWS * 16 * sizeof(float), &fixture->out[l], NULL), 0);
    }
}

/* A policy for every seed: all combinations of the axes, several rings. */
static KvPolicy policy_of(uint32_t seed)
{
    static const uint32_t tile_blocks[] = {1, 1, 2, 5}, slots[] = {1, 2, 2, 3, 8};
    KvPolicy policy = kv_policy_preset((KvStrategy)(seed % KV_STRATEGY_X_MAX), seed / 6 % 2);

    policy.growth = seed / 12 % 2 ? KV_GROWTH_STATIC : policy.growth;
    policy.transfer = seed / 5 % 3 ? KV_TRANSFER_COPY : KV_TRANSFER_ZERO_COPY;
    policy.tile_blocks = tile_blocks[seed / 7 % 4];
    policy.n_slots = slots[seed / 3 % 5];
    policy.max_cache_tokens = MAX_TOKENS;
    return policy;
}

static void fixture_init(Fixture *fixture, uint32_t seed)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    gpu_init(fixture, seed);
    fixture->policy = policy_of(seed);
    /* Some seeds with another tail and other sinks. */
    if (seed % 3 == 0) {
        fixture->policy.form.tail_tokens = (uint16_t)(KV_PAGE_TOKENS * (seed / 3 % 6));
        fixture->policy.form.sink_tokens = (uint16_t)(seed / 3 % 4 * 8);
    }
    if (kv_store_new(&fixture->gpu, &fixture->model, &fixture->policy, &fixture->store, &detail))
        fail_msg("%s", detail.text);
}

static void fixture_deinit(Fixture *fixture)
{
    uint64_t used = 0;

    for (uint32_t i = 0; i < N_CACHES; i++)
        (void)kv_cache_free(fixture->sequences[i].cache);
    (void)kv_store_free(fixture->store);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        (void)gpu_buffer_free(fixture->qkv[l]);
        (void)gpu_buffer_free(fixture->out[l]);
    }
    (void)gpu_drain(&fixture->gpu, NULL);
    for (uint32_t p = 0; p < GPU_PURPOSE_X_MAX; p++)
        used += fixture->gpu.used[p];
    assert_int_equal(used, 0);
}

/* The number of a token's key in a layer; below 2^24, so that a float holds it. */
static uint32_t key_of(uint32_t id, uint32_t layer)
{
    return id * N_LAYERS + layer;
}

static void check_row(const Fixture *fixture, const Sequence *sequence, uint32_t position, uint32_t row)
{
    uint32_t keys[MAX_TOKENS];

    for (uint32_t l = 0; l < N_LAYERS; l++) {
        uint64_t state;

        for (uint32_t j = 0; j <= position; j++)
            keys[j] = key_of(sequence->ids[j], l);
        memcpy(&state, fixture->out[l]->data + row * 16 * sizeof(float), sizeof(state));
        if (state != loose_expected(fixture->policy.form, keys, position))
            fail_msg("layer %u, position %u of a row %u", l, position, row);
    }
}

/* One pass of @n_items sequences; commits, or aborts after @n_layers layers (n_layers < N_LAYERS + 1).  0, or what refused. */
static int run_pass(Fixture *fixture, Sequence **sequences, const uint32_t *n_tokens, uint32_t n_items, uint32_t n_layers)
{
    KvPassItem items[N_TAILS];
    uint32_t row = 0;
    KvPass *pass;
    int r;

    for (uint32_t i = 0; i < n_items; i++) {
        uint32_t length = kv_cache_length(sequences[i]->cache);

        items[i] = (KvPassItem){sequences[i]->cache, n_tokens[i]};
        for (uint32_t t = 0; t < n_tokens[i]; t++, row++) {
            sequences[i]->ids[length + t] = fixture->next_id++;
            for (uint32_t l = 0; l < N_LAYERS; l++)
                ((float *)fixture->qkv[l]->data)[row * 48] = (float)key_of(sequences[i]->ids[length + t], l);
        }
    }
    r = kv_pass_begin(fixture->store, items, n_items, &pass, NULL);
    if (r)
        return r;
    for (uint32_t l = 0; l < MIN(n_layers, (uint32_t)N_LAYERS) && !r; l++)
        r = kv_pass_layer(pass, l, fixture->qkv[l], fixture->out[l], NULL);
    if (r || n_layers < N_LAYERS) {
        (void)kv_pass_abort(pass);
        return r;
    }
    r = kv_pass_prefetch(pass);
    if (!r)
        r = gpu_step_finish(&fixture->gpu, NULL);
    if (r || n_layers == N_LAYERS) {
        (void)kv_pass_abort(pass);
        return r;
    }
    row = 0;
    for (uint32_t i = 0; i < n_items; i++)
        for (uint32_t t = 0; t < n_tokens[i]; t++, row++)
            check_row(fixture, sequences[i], kv_cache_length(sequences[i]->cache) + t, row);
    return kv_pass_commit(pass);
}

static int random_pass(Fixture *fixture, uint32_t n_layers)
{
    Sequence *sequences[N_TAILS];
    uint32_t n_tokens[N_TAILS], n = 0, wanted = 1 + random_below(fixture, N_TAILS), start = random_below(fixture, N_CACHES);
    uint32_t most = random_below(fixture, 2) ? 1 : MAX_ROWS / N_TAILS;

    for (uint32_t i = 0; i < N_CACHES && n < wanted; i++) {
        Sequence *sequence = &fixture->sequences[(start + i) % N_CACHES];

        if (!sequence->cache || kv_cache_length(sequence->cache) + most > MAX_TOKENS)
            continue;
        sequences[n] = sequence;
        n_tokens[n++] = 1 + random_below(fixture, wanted == 1 && most > 1 ? MIN((uint32_t)MAX_ROWS, MAX_TOKENS - kv_cache_length(sequence->cache)) : most);
    }
    return n > 0 ? run_pass(fixture, sequences, n_tokens, n, n_layers) : 0;
}

static int random_crop(Fixture *fixture, Sequence *sequence)
{
    uint32_t length = kv_cache_length(sequence->cache), keep, left = 0;
    int r;

    keep = length - MIN(length, random_below(fixture, random_below(fixture, 2) ? 90 : MAX_TOKENS));
    r = kv_cache_crop(sequence->cache, keep, &left, NULL);
    if (r)
        return r;
    assert_true(left <= keep && left == kv_cache_length(sequence->cache));
    if (!kv_form_is_coded(fixture->policy.form))
        assert_int_equal(left, keep);
    return 0;
}

static int random_fork(Fixture *fixture, Sequence *to)
{
    const Sequence *from = &fixture->sequences[random_below(fixture, N_CACHES)];

    if (!from->cache || random_below(fixture, 3) == 0)
        return kv_cache_new(fixture->store, &to->cache, NULL);
    memcpy(to->ids, from->ids, sizeof(to->ids));
    return kv_cache_fork(from->cache, &to->cache, NULL);
}

static int random_step(Fixture *fixture)
{
    Sequence *sequence = &fixture->sequences[random_below(fixture, N_CACHES)];

    if (!sequence->cache)
        return random_fork(fixture, sequence);
    switch (random_below(fixture, 16)) {
    case 0:
    case 1:
        return random_crop(fixture, sequence);
    case 2:
        return kv_cache_checkpoint(sequence->cache);
    case 3:
        sequence->cache = kv_cache_free(sequence->cache);
        return 0;
    case 4:
        return random_pass(fixture, random_below(fixture, N_LAYERS + 1)); /* aborted */
    case 5:
        (void)gpu_drain(&fixture->gpu, NULL);
        return random_below(fixture, 8) == 0 ? kv_cache_clear(sequence->cache) : 0;
    default:
        return random_pass(fixture, N_LAYERS + 1);
    }
}

static void every_row_sees_its_keys_in_any_order_of_commands(void **state)
{
    (void)state;
    for (uint32_t seed = SEED; seed < SEED + 240; seed++) {
        Fixture fixture;

        fixture_init(&fixture, seed);
        for (uint32_t step = 0; step < 150; step++) {
            int r = random_step(&fixture);

            if (r)
                fail_msg("seed %u step %u: %d", seed, step, r);
        }
        fixture_deinit(&fixture);
    }
}

static void budgets_are_kept_and_refusals_change_nothing(void **state)
{
    uint32_t n_refused = 0;

    (void)state;
    for (uint32_t seed = SEED; seed < SEED + 120; seed++) {
        Fixture fixture;
        KvPlan plan;
        uint64_t block;

        gpu_init(&fixture, seed);
        fixture.policy = policy_of(seed);
        fixture.policy.growth = KV_GROWTH_DYNAMIC;
        assert_int_equal(kv_store_plan(&fixture.gpu.info, &fixture.model, &fixture.policy, &plan, NULL), 0);
        block = plan.device_page_bytes / 4;
        fixture.policy.host_budget_bytes = fixture.policy.home == KV_HOME_HOST ? 5 * 256 * plan.host_bytes_per_token : 0;
        if (fixture.policy.home == KV_HOME_DEVICE)
            fixture.policy.device_budget_bytes = plan.staging_bytes + plan.tail_bytes + 5 * block;
        assert_int_equal(kv_store_new(&fixture.gpu, &fixture.model, &fixture.policy, &fixture.store, NULL), 0);
        for (uint32_t step = 0; step < 150; step++) {
            uint64_t host = 0;
            int r = random_step(&fixture);

            if (r != 0 && r != KV_E_HOST_MEMORY && r != KV_E_DEVICE_MEMORY)
                fail_msg("seed %u step %u: %d", seed, step, r);
            n_refused += r != 0;
            if (fixture.policy.device_budget_bytes > 0)
                assert_true(fixture.gpu.used[GPU_PURPOSE_STAGING] + fixture.gpu.used[GPU_PURPOSE_TAIL] +
                                fixture.gpu.used[GPU_PURPOSE_PAGES] <=
                            fixture.policy.device_budget_bytes);
            for (uint32_t i = 0; i < N_CACHES; i++)
                if (fixture.sequences[i].cache) {
                    KvBytes bytes;

                    kv_cache_bytes(fixture.sequences[i].cache, &bytes);
                    host = MAX(host, bytes.host);
                }
            assert_true(fixture.policy.host_budget_bytes == 0 || host <= fixture.policy.host_budget_bytes);
        }
        fixture_deinit(&fixture);
    }
    assert_true(n_refused > 100);
}

/* The n-th call of the device fails, for every n of a short history: no leak, no touch of freed memory, an error comes out. */
static void a_failure_at_any_call_is_reported_and_leaves_no_ruin(void **state)
{
    (void)state;
    for (uint32_t seed = SEED; seed < SEED + 24; seed++)
        for (int64_t n = 0; n < 4000; n = n < 60 ? n + 1 : n + 13) {
            Fixture fixture;
            int r;

            gpu_init(&fixture, seed);
            fixture.policy = policy_of(seed);
            fixture.gpu.fail_at = n;
            r = kv_store_new(&fixture.gpu, &fixture.model, &fixture.policy, &fixture.store, NULL);
            for (uint32_t step = 0; step < 40 && r == 0; step++)
                r = random_step(&fixture);
            if (fixture.gpu.fail_at < 0) {
                /* 0: a refused arena was had in a smaller size, or the failure came in the last step's abort */
                if (r != 0 && r != KV_E_DEVICE && r != KV_E_DEVICE_MEMORY && r != GPU_E_LOST)
                    fail_msg("seed %u call %d: %d", seed, (int)n, r);
            } else {
                assert_int_equal(r, 0);
                n = INT16_MAX;
            }
            fixture.gpu.fail_at = -1;
            fixture_deinit(&fixture);
        }
}

/* A slot of the ring is not mistaken for holding a block that has other contents by now. */
static void a_cropped_block_is_copied_again(void **state)
{
    (void)state;
    for (uint32_t seed = 0; seed < 20; seed++) {
        Fixture fixture;
        Sequence *sequence = &fixture.sequences[0];
        uint32_t n[] = {150, 1}, left;

        gpu_init(&fixture, seed);
        fixture.policy = kv_policy_preset(KV_STRATEGY_OFFLOADED, false);
        fixture.policy.transfer = KV_TRANSFER_COPY;
        fixture.policy.max_cache_tokens = MAX_TOKENS;
        fixture.policy.tile_blocks = 1;
        fixture.policy.n_slots = N_LAYERS;
        assert_int_equal(kv_store_new(&fixture.gpu, &fixture.model, &fixture.policy, &fixture.store, NULL), 0);
        assert_int_equal(kv_cache_new(fixture.store, &sequence->cache, NULL), 0);
        for (uint32_t round = 0; round < 6; round++) {
            assert_int_equal(run_pass(&fixture, &sequence, &n[0], 1, N_LAYERS + 1), 0);
            for (uint32_t i = 0; i < 3; i++)
                assert_int_equal(run_pass(&fixture, &sequence, &n[1], 1, N_LAYERS + 1), 0);
            assert_int_equal(kv_cache_crop(sequence->cache, 20 + round, &left, NULL), 0);
            assert_int_equal(left, 20 + round);
            n[0] = 153 - left;
        }
        fixture_deinit(&fixture);
    }
}

/* In a ring that is longer than a pass nothing is copied twice. */
static void prefetched_tiles_are_used(void **state)
{
    Fixture fixture;
    Sequence *sequence = &fixture.sequences[0];
    uint32_t n = 150;
    uint64_t before;

    (void)state;
    gpu_init(&fixture, SEED);
    fixture.policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    fixture.policy.transfer = KV_TRANSFER_COPY;
    fixture.policy.max_cache_tokens = MAX_TOKENS;
    assert_int_equal(kv_store_new(&fixture.gpu, &fixture.model, &fixture.policy, &fixture.store, NULL), 0);
    assert_int_equal(kv_cache_new(fixture.store, &sequence->cache, NULL), 0);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(run_pass(&fixture, &sequence, &n, 1, N_LAYERS + 1), 0);
    n = 1;
    assert_int_equal(run_pass(&fixture, &sequence, &n, 1, N_LAYERS + 1), 0);
    before = fixture.gpu.n_uploads;
    for (uint32_t i = 0; i < 10; i++)
        assert_int_equal(run_pass(&fixture, &sequence, &n, 1, N_LAYERS + 1), 0);
    assert_int_equal(fixture.gpu.n_uploads - before, 10 * (1 + N_LAYERS)); /* the step's input, one tile a layer */
    fixture_deinit(&fixture);
}

static void checkpoints_are_thinned_evenly(void **state)
{
    Fixture fixture;
    Sequence *sequence = &fixture.sequences[0];
    uint32_t n = 20, left;
    KvBytes bytes;

    (void)state;
    fixture_init(&fixture, 5); /* offloaded_quantized */
    assert_int_equal(fixture.policy.form.kind, KV_FORM_LEAT);
    assert_int_equal(kv_cache_new(fixture.store, &sequence->cache, NULL), 0);
    for (uint32_t i = 0; i < 50; i++) {
        assert_int_equal(run_pass(&fixture, &sequence, &n, 1, N_LAYERS + 1), 0);
        assert_int_equal(kv_cache_checkpoint(sequence->cache), 0);
    }
    kv_cache_bytes(sequence->cache, &bytes);
    assert_int_equal(bytes.length, 1000);
    assert_int_equal(kv_cache_crop(sequence->cache, 880, &left, NULL), 0); /* one of the newest eight */
    assert_int_equal(left, 880);
    for (uint32_t keep = 800; keep > 0; keep = left > 0 ? left - 1 : 0) {
        uint32_t before = keep;

        assert_int_equal(kv_cache_crop(sequence->cache, keep, &left, NULL), 0);
        assert_true(before - left <= 200);
        if (left == 0)
            break;
    }
    fixture_deinit(&fixture);
}

/* Pages are charged one by one, and forks share them. */
static void pages_and_forks_cost_no_more_than_they_hold(void **state)
{
    Fixture fixture;
    Sequence *sequence = &fixture.sequences[0];
    KvCache *forks[64];
    uint32_t n = 150;
    KvBytes bytes;
    KvPlan plan;
    size_t before;

    (void)state;
    gpu_init(&fixture, SEED);
    fixture.policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    fixture.policy.max_cache_tokens = 32768;
    assert_int_equal(kv_store_plan(&fixture.gpu.info, &fixture.model, &fixture.policy, &plan, NULL), 0);
    assert_int_equal(kv_store_new(&fixture.gpu, &fixture.model, &fixture.policy, &fixture.store, NULL), 0);
    assert_int_equal(kv_cache_new(fixture.store, &sequence->cache, NULL), 0);
    while (kv_cache_length(sequence->cache) < 1000) {
        n = MIN(150u, 1000 - kv_cache_length(sequence->cache));
        assert_int_equal(run_pass(&fixture, &sequence, &n, 1, N_LAYERS + 1), 0);
        kv_cache_bytes(sequence->cache, &bytes);
        assert_int_equal(bytes.host, bytes.length / KV_PAGE_TOKENS * KV_PAGE_TOKENS * plan.host_bytes_per_token);
    }
    assert_int_equal(kv_cache_checkpoint(sequence->cache), 0);
    before = mallinfo2().uordblks;
    for (uint32_t i = 0; i < N_ELEMENTS(forks); i++)
        assert_int_equal(kv_cache_fork(sequence->cache, &forks[i], NULL), 0);
    assert_true(mallinfo2().uordblks - before < 1u << 20);
    kv_cache_bytes(forks[63], &bytes);
    assert_int_equal(bytes.n_pages_shared, bytes.n_pages);
    for (uint32_t i = 0; i < N_ELEMENTS(forks); i++)
        (void)kv_cache_free(forks[i]);
    fixture_deinit(&fixture);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_row_sees_its_keys_in_any_order_of_commands),
        cmocka_unit_test(budgets_are_kept_and_refusals_change_nothing),
        cmocka_unit_test(a_failure_at_any_call_is_reported_and_leaves_no_ruin),
        cmocka_unit_test(a_cropped_block_is_copied_again),
        cmocka_unit_test(prefetched_tiles_are_used),
        cmocka_unit_test(checkpoints_are_thinned_evenly),
        cmocka_unit_test(pages_and_forks_cost_no_more_than_they_hold),
    };

    printf("seed %u\n", SEED);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
