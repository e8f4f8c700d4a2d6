/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cache on a real device: whatever the chunks, home, growth, tiles, ring, transfer, neighbours and history, what attention gives at
 * a position has the same bits.  Every comparison is exact.
 */

#include "cache/kv-migrate.h"
#include "tests/lib/kv-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#define SEED          41u
#define MAX_SEQUENCES 3
#define N_TOKENS      700u /* two whole blocks, five complete pages of the third, and a rest */

static const KvFormKind all_kinds[] = {KV_FORM_F32, KV_FORM_F16, KV_FORM_LEAT};

static KvCache *cache_fork(KvCache *from)
{
    KvCache *cache = NULL;

    assert_int_equal(kv_cache_fork(from, &cache, NULL), 0);
    return cache;
}

static KvPolicy device_policy(KvFormKind kind)
{
    return kv_bench_policy(kind == KV_FORM_LEAT ? KV_STRATEGY_QUANTIZED : KV_STRATEGY_DYNAMIC, kind);
}

static KvPolicy host_policy(KvFormKind kind, KvTransfer transfer, uint32_t tile_blocks, uint32_t n_slots)
{
    KvPolicy policy = kv_bench_policy(kind == KV_FORM_LEAT ? KV_STRATEGY_OFFLOADED_QUANTIZED : KV_STRATEGY_OFFLOADED, kind);

    policy.transfer = transfer;
    policy.tile_blocks = tile_blocks;
    policy.n_slots = n_slots;
    return policy;
}

/* Runs a fresh cache of a fresh store; the chunks are taken from the list in turn. */
static void run_chunks(KvRig *rig, const KvPolicy *policy, KvStream *stream, const uint32_t *chunks, size_t n_chunks)
{
    KvStore *store = kv_rig_store(rig, policy);
    KvCache *cache = kv_rig_cache(store);

    for (size_t i = 0; kv_cache_length(cache) < stream->n_tokens; i++)
        kv_bench_run(&rig->bench, store, cache, stream,
                     MIN(stream->n_tokens, kv_cache_length(cache) + chunks[i % n_chunks]), chunks[i % n_chunks]);
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);
}

static void assert_same(const KvRig *rig, const KvStream *a, const KvStream *b, uint32_t from, uint32_t to,
                        const char *what)
{
    size_t width = KV_BENCH_LAYERS * rig->bench.out_width;

    for (uint32_t position = from; position < to; position++)
        if (memcmp(a->out + position * width, b->out + position * width, width * sizeof(float)) != 0)
            fail_msg("%s: position %u of %u..%u differs", what, position, from, to);
}

/* What a fresh cache gives for the stream's ids. */
static void assert_cold(KvRig *rig, KvFormKind kind, const KvStream *stream, uint32_t from, uint32_t to, const char *what)
{
    _cleanup_(kv_stream_freep) KvStream *cold = kv_stream_branch(&rig->bench, stream, 0, 0);
    KvPolicy policy = device_policy(kind);
    const uint32_t chunk = KV_BENCH_MAX_ROWS;

    memcpy(cold->ids, stream->ids, sizeof(cold->ids));
    cold->n_tokens = to;
    run_chunks(rig, &policy, cold, &chunk, 1);
    assert_same(rig, cold, stream, from, to, what);
}

static int setup(void **state)
{
    KvRig *rig = kv_rig_new(MAX_SEQUENCES);

    printf("device %s, unified memory %d\n", gpu_info(rig->gpu)->name, gpu_info(rig->gpu)->unified_memory);
    for (size_t k = 0; k < N_ELEMENTS(all_kinds); k++) {
        KvPolicy policy = device_policy(all_kinds[k]);

        kv_rig_run_cold(rig, all_kinds[k], &policy, SEED, N_TOKENS, KV_BENCH_MAX_ROWS);
    }
    *state = rig;
    return 0;
}

static int teardown(void **state)
{
    *state = kv_rig_free(*state);
    return 0;
}

static void cache_gives_different_rows_different_outputs(void **state)
{
    const KvRig *rig = *state;
    size_t width = KV_BENCH_LAYERS * rig->bench.out_width;

    for (size_t k = 0; k < N_ELEMENTS(all_kinds); k++)
        for (uint32_t p = 1; p < N_TOKENS; p++)
            assert_memory_not_equal(rig->cold[all_kinds[k]]->out + p * width,
                                    rig->cold[all_kinds[k]]->out + (p - 1) * width, width * sizeof(float));
}

static void cache_gives_the_same_bits_for_chunks_of_any_size(void **state)
{
    static const uint32_t chunks[][3] = {{1, 1, 1}, {7, 7, 7}, {32, 32, 32}, {100, 100, 100}, {200, 1, 31}};
    KvRig *rig = *state;

    for (size_t k = 0; k < N_ELEMENTS(all_kinds); k++)
        for (size_t c = 0; c < N_ELEMENTS(chunks); c++) {
            _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
            KvPolicy policy = host_policy(all_kinds[k], KV_TRANSFER_COPY, 1, 2);

            run_chunks(rig, &policy, stream, chunks[c], 3);
            assert_same(rig, rig->cold[all_kinds[k]], stream, 0, N_TOKENS, "chunks");
        }
}

static void cache_gives_the_same_bits_under_every_exact_strategy(void **state)
{
    static const struct {
        KvStrategy strategy;
        KvFormKind kind;
    } cases[] = {
        {KV_STRATEGY_DYNAMIC, KV_FORM_F16},          {KV_STRATEGY_STATIC, KV_FORM_F16},
        {KV_STRATEGY_OFFLOADED, KV_FORM_F16},        {KV_STRATEGY_OFFLOADED_STATIC, KV_FORM_F16},
        {KV_STRATEGY_STATIC, KV_FORM_F32},           {KV_STRATEGY_OFFLOADED, KV_FORM_F32},
        {KV_STRATEGY_OFFLOADED_STATIC, KV_FORM_F32}, {KV_STRATEGY_QUANTIZED, KV_FORM_LEAT},
        {KV_STRATEGY_OFFLOADED_QUANTIZED, KV_FORM_LEAT},
    };
    static const uint32_t chunks[] = {300, 1, 1, 33, 1};
    KvRig *rig = *state;

    for (size_t i = 0; i < N_ELEMENTS(cases); i++)
        for (KvTransfer transfer = KV_TRANSFER_AUTO; transfer <= KV_TRANSFER_ZERO_COPY; transfer++) {
            _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
            KvPolicy policy = kv_bench_policy(cases[i].strategy, cases[i].kind);

            if (transfer == KV_TRANSFER_ZERO_COPY && !gpu_info(rig->gpu)->unified_memory)
                continue;
            policy.transfer = transfer;
            run_chunks(rig, &policy, stream, chunks, N_ELEMENTS(chunks));
            assert_same(rig, rig->cold[cases[i].kind], stream, 0, N_TOKENS, kv_strategy_to_string(cases[i].strategy));
        }
}

static void cache_gives_the_same_bits_for_any_tile_and_ring(void **state)
{
    static const uint32_t tile_blocks[] = {1, 2, 3, 9}, slots[] = {1, 2, 3, 8}, chunks[] = {450, 1, 1, 60, 1};
    KvRig *rig = *state;

    for (size_t t = 0; t < N_ELEMENTS(tile_blocks); t++)
        for (size_t s = 0; s < N_ELEMENTS(slots); s++) {
            _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
            KvPolicy policy = host_policy(KV_FORM_LEAT, KV_TRANSFER_COPY, tile_blocks[t], slots[s]);

            run_chunks(rig, &policy, stream, chunks, N_ELEMENTS(chunks));
            assert_same(rig, rig->cold[KV_FORM_LEAT], stream, 0, N_TOKENS, "tiles");
        }
}

static void cache_works_within_two_tiles_and_within_one(void **state)
{
    static const uint32_t chunks[] = {400, 1, 1, 90, 1};
    KvRig *rig = *state;
    KvPolicy roomy = host_policy(KV_FORM_LEAT, KV_TRANSFER_COPY, 1, 8);
    uint64_t before[GPU_PURPOSE_X_MAX], used[GPU_PURPOSE_X_MAX], total, fixed, tile;
    KvPlan plan, more;

    assert_int_equal(kv_store_plan(gpu_info(rig->gpu), &rig->bench.model, &roomy, &more, NULL), 0);
    roomy.n_slots = 7;
    assert_int_equal(kv_store_plan(gpu_info(rig->gpu), &rig->bench.model, &roomy, &plan, NULL), 0);
    tile = more.staging_bytes - plan.staging_bytes;
    fixed = plan.staging_bytes - 7 * tile + plan.tail_bytes;
    gpu_memory_used(rig->gpu, before, &total);
    for (uint32_t n_tiles = 1; n_tiles <= 2; n_tiles++) {
        _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
        KvPolicy policy = kv_bench_policy(KV_STRATEGY_OFFLOADED_QUANTIZED, KV_FORM_LEAT);
        KvStore *store;
        KvCache *cache;

        policy.transfer = KV_TRANSFER_COPY;
        policy.device_budget_bytes = fixed + n_tiles * tile;
        store = kv_rig_store(rig, &policy);
        assert_int_equal(kv_store_policy(store)->n_slots, n_tiles);
        assert_int_equal(kv_store_policy(store)->tile_blocks, 1);
        cache = kv_rig_cache(store);
        for (size_t i = 0; kv_cache_length(cache) < N_TOKENS; i++) {
            kv_bench_run(&rig->bench, store, cache, stream, MIN(N_TOKENS, kv_cache_length(cache) + chunks[i % 5]), 512);
            gpu_memory_used(rig->gpu, used, &total);
            assert_true(used[GPU_PURPOSE_STAGING] - before[GPU_PURPOSE_STAGING] + used[GPU_PURPOSE_TAIL] -
                            before[GPU_PURPOSE_TAIL] + used[GPU_PURPOSE_PAGES] - before[GPU_PURPOSE_PAGES] <=
                        policy.device_budget_bytes);
        }
        assert_same(rig, rig->cold[KV_FORM_LEAT], stream, 0, N_TOKENS, "capped");
        (void)kv_cache_free(cache);
        (void)kv_store_free(store);
    }
}

/* What the device budget leaves beside the ring holds pages; the plan counts them, and the bits stay. */
static void a_resident_share_changes_no_bit(void **state)
{
    static const uint32_t chunks[] = {300, 1, 1, 90, 1};
    KvRig *rig = *state;

    for (size_t k = 0; k < N_ELEMENTS(all_kinds); k++)
        for (uint32_t n_blocks = 1; n_blocks <= 4; n_blocks++) {
            _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
            KvPolicy policy = host_policy(all_kinds[k], KV_TRANSFER_COPY, 1, 2);
            uint64_t before[GPU_PURPOSE_X_MAX], used[GPU_PURPOSE_X_MAX], total, block;
            KvStore *store;
            KvCache *cache;
            KvBytes bytes;
            KvPlan plan;

            assert_int_equal(kv_store_plan(gpu_info(rig->gpu), &rig->bench.model, &policy, &plan, NULL), 0);
            assert_int_equal(plan.device_page_bytes, 0);
            block = 256 * plan.host_bytes_per_token;
            policy.device_budget_bytes = plan.staging_bytes + plan.tail_bytes + n_blocks * block + 99;
            assert_int_equal(kv_store_plan(gpu_info(rig->gpu), &rig->bench.model, &policy, &plan, NULL), 0);
            assert_int_equal(plan.device_page_bytes, n_blocks * block);
            gpu_memory_used(rig->gpu, before, &total);
            store = kv_rig_store(rig, &policy);
            cache = kv_rig_cache(store);
            for (size_t i = 0; kv_cache_length(cache) < N_TOKENS; i++)
                kv_bench_run(&rig->bench, store, cache, stream, MIN(N_TOKENS, kv_cache_length(cache) + chunks[i % 5]), 512);
            gpu_memory_used(rig->gpu, used, &total);
            assert_int_equal(used[GPU_PURPOSE_PAGES] - before[GPU_PURPOSE_PAGES], plan.device_page_bytes);
            kv_cache_bytes(cache, &bytes);
            assert_int_equal(bytes.n_pages, N_TOKENS / KV_PAGE_TOKENS);
            assert_int_equal(bytes.host, (bytes.n_pages - MIN(n_blocks * 8, bytes.n_pages)) * (block / 8));
            assert_same(rig, rig->cold[all_kinds[k]], stream, 0, N_TOKENS, "partly resident");
            (void)kv_cache_free(cache);
            (void)kv_store_free(store);
        }
}

static void plan_equals_what_the_allocator_shows(void **state)
{
    KvRig *rig = *state;

    for (int s = 0; s < KV_STRATEGY_X_MAX; s++)
        for (KvTransfer transfer = KV_TRANSFER_AUTO; transfer <= KV_TRANSFER_COPY; transfer++) {
            uint64_t before[GPU_PURPOSE_X_MAX], after[GPU_PURPOSE_X_MAX], total_before, total_after;
            KvPolicy policy = kv_bench_policy((KvStrategy)s, KV_FORM_F16);
            KvStore *store;
            KvCache *cache;
            KvPlan plan;

            policy.transfer = transfer;
            assert_int_equal(kv_store_plan(gpu_info(rig->gpu), &rig->bench.model, &policy, &plan, NULL), 0);
            gpu_memory_used(rig->gpu, before, &total_before);
            store = kv_rig_store(rig, &policy);
            cache = kv_rig_cache(store);
            gpu_memory_used(rig->gpu, after, &total_after);
            assert_int_equal(after[GPU_PURPOSE_STAGING] - before[GPU_PURPOSE_STAGING], plan.staging_bytes);
            assert_int_equal(after[GPU_PURPOSE_TAIL] - before[GPU_PURPOSE_TAIL], plan.tail_bytes);
            assert_int_equal(after[GPU_PURPOSE_PAGES] - before[GPU_PURPOSE_PAGES], plan.device_page_bytes);
            assert_int_equal(total_after - total_before,
                             plan.staging_bytes + plan.tail_bytes + plan.operand_bytes + plan.device_page_bytes);
            (void)kv_cache_free(cache);
            (void)kv_store_free(store);
            gpu_memory_used(rig->gpu, after, &total_after);
            assert_int_equal(total_after, total_before);
        }
}

static KvPolicy any_policy(KvRig *rig, size_t i, KvFormKind kind)
{
    switch (i) {
    case 0:
        return device_policy(kind);
    case 1:
        return host_policy(kind, KV_TRANSFER_COPY, 1, 2);
    case 2: {
        KvPolicy policy = host_policy(kind, KV_TRANSFER_COPY, 2, 3);
        policy.growth = KV_GROWTH_STATIC;
        return policy;
    }
    default:
        return host_policy(kind, gpu_info(rig->gpu)->unified_memory ? KV_TRANSFER_ZERO_COPY : KV_TRANSFER_COPY, 0, 2);
    }
}
#define N_ANY_POLICIES 4

static void forks_diverge_as_if_each_had_been_alone(void **state)
{
    static const uint32_t places[] = {3, 64, 255, 290, 512};
    KvRig *rig = *state;

    for (size_t i = 0; i < N_ANY_POLICIES; i++)
        for (size_t k = 0; k < N_ELEMENTS(all_kinds); k++) {
            KvPolicy policy = any_policy(rig, i, all_kinds[k]);
            KvStore *store = kv_rig_store(rig, &policy);
            uint32_t at = places[(i + k) % N_ELEMENTS(places)];
            _cleanup_(kv_stream_freep) KvStream *a = kv_stream_new(&rig->bench, SEED, N_TOKENS);
            _cleanup_(kv_stream_freep) KvStream *b = NULL;
            _cleanup_(kv_stream_freep) KvStream *c = NULL;
            KvCache *first = kv_rig_cache(store), *second, *third;
            KvBytes bytes;

            kv_bench_run(&rig->bench, store, first, a, at, 512);
            second = cache_fork(first);
            third = cache_fork(second);
            kv_cache_bytes(second, &bytes);
            assert_int_equal(bytes.n_pages, at / KV_PAGE_TOKENS);
            assert_int_equal(bytes.n_pages_shared, at / KV_PAGE_TOKENS);
            b = kv_stream_branch(&rig->bench, a, at, SEED + 1);
            c = kv_stream_branch(&rig->bench, a, at, SEED + 2);
            for (uint32_t step = 0; step < 45; step++) /* in turn, over page borders */
                for (uint32_t j = 0; j < 3; j++) {
                    KvCache *cache = j == 0 ? second : j == 1 ? first : third;

                    kv_bench_run(&rig->bench, store, cache, j == 0 ? b : j == 1 ? a : c, at + 3 * (step + 1), 2);
                }
            assert_same(rig, rig->cold[all_kinds[k]], a, 0, at + 135, "the first");
            assert_cold(rig, all_kinds[k], b, at, at + 135, "the fork");
            assert_cold(rig, all_kinds[k], c, at, at + 135, "the fork's fork");
            (void)kv_cache_free(first);
            (void)kv_cache_free(third);
            (void)kv_cache_free(second);
            (void)kv_store_free(store);
        }
}

static void crop_and_rerun_equals_cold(void **state)
{
    static const uint32_t keeps[] = {690, 650, 600, 513, 512, 333, 97, 64, 63, 33, 5, 0};
    KvRig *rig = *state;

    for (size_t i = 0; i < N_ANY_POLICIES; i++)
        for (size_t k = 0; k < N_ELEMENTS(all_kinds); k++) {
            KvPolicy policy = any_policy(rig, i, all_kinds[k]);
            KvStore *store = kv_rig_store(rig, &policy);
            KvCache *cache = kv_rig_cache(store);
            _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);

            kv_bench_run(&rig->bench, store, cache, stream, N_TOKENS, 512);
            for (size_t j = (i + k) % 2; j < N_ELEMENTS(keeps); j += 2) {
                uint32_t length = 9999, before = kv_cache_length(cache);
                uint32_t needed = keeps[j] < 64 ? 0 : keeps[j] / 32 * 32 - 32;
                bool exact = all_kinds[k] != KV_FORM_LEAT || before <= needed + 64;

                assert_int_equal(kv_cache_crop(cache, keeps[j], &length, NULL), 0);
                assert_int_equal(length, kv_cache_length(cache));
                assert_true(length <= keeps[j]);
                if (exact)
                    assert_int_equal(length, MIN(keeps[j], before));
                memset(stream->out + (size_t)length * KV_BENCH_LAYERS * rig->bench.out_width, 0, 64);
                kv_bench_run(&rig->bench, store, cache, stream, MIN(N_TOKENS, keeps[j] + 70), j % 3 ? 512 : 1);
                assert_same(rig, rig->cold[all_kinds[k]], stream, length, kv_cache_length(cache), "after a crop");
            }
            (void)kv_cache_free(cache);
            (void)kv_store_free(store);
        }
}

static void crop_beyond_the_end_changes_nothing(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = device_policy(KV_FORM_LEAT);
    KvStore *store = kv_rig_store(rig, &policy);
    KvCache *cache = kv_rig_cache(store);
    _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
    uint32_t length;

    assert_int_equal(kv_cache_crop(cache, 7, &length, NULL), 0);
    assert_int_equal(length, 0);
    kv_bench_run(&rig->bench, store, cache, stream, 100, 64);
    assert_int_equal(kv_cache_crop(cache, 100, &length, NULL), 0);
    assert_int_equal(length, 100);
    assert_int_equal(kv_cache_crop(cache, UINT32_MAX, &length, NULL), 0);
    assert_int_equal(length, 100);
    kv_bench_run(&rig->bench, store, cache, stream, 200, 64);
    assert_same(rig, rig->cold[KV_FORM_LEAT], stream, 0, 200, "after no crop");
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);
}

static void checkpoint_is_a_place_to_go_back_to(void **state)
{
    KvRig *rig = *state;

    for (size_t i = 0; i < N_ANY_POLICIES; i++) {
        KvPolicy policy = any_policy(rig, i, KV_FORM_LEAT);
        KvStore *store = kv_rig_store(rig, &policy);
        KvCache *cache = kv_rig_cache(store);
        _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
        _cleanup_(kv_stream_freep) KvStream *other = NULL;
        uint32_t length;
        KvBytes bytes;

        kv_bench_run(&rig->bench, store, cache, stream, 150, 512);
        assert_int_equal(kv_cache_checkpoint(cache), 0);
        assert_int_equal(kv_cache_checkpoint(cache), 0); /* once is enough */
        kv_bench_run(&rig->bench, store, cache, stream, 333, 512);
        assert_int_equal(kv_cache_checkpoint(cache), 0);
        kv_bench_run(&rig->bench, store, cache, stream, 700, 512);
        kv_cache_bytes(cache, &bytes);
        assert_true(bytes.checkpoints > 0 && bytes.checkpoints % 2 == 0);

        assert_int_equal(kv_cache_crop(cache, 500, &length, NULL), 0); /* the newest before */
        assert_int_equal(length, 333);
        kv_bench_run(&rig->bench, store, cache, stream, 600, 512);
        assert_same(rig, rig->cold[KV_FORM_LEAT], stream, 333, 600, "from 333");

        assert_int_equal(kv_cache_crop(cache, 325, &length, NULL), 0); /* within what the checkpoint at 333 holds */
        assert_int_equal(length, 325);
        other = kv_stream_branch(&rig->bench, stream, 325, SEED + 9);
        kv_bench_run(&rig->bench, store, cache, other, 420, 40);
        assert_cold(rig, KV_FORM_LEAT, other, 325, 420, "from 325");

        assert_int_equal(kv_cache_crop(cache, 200, &length, NULL), 0);
        assert_int_equal(length, 150);
        kv_bench_run(&rig->bench, store, cache, stream, 333, 1);
        assert_same(rig, rig->cold[KV_FORM_LEAT], stream, 150, 333, "from 150");
        (void)kv_cache_free(cache);
        (void)kv_store_free(store);
    }
}

static void rows_do_not_depend_on_who_shares_the_pass(void **state)
{
    static const uint32_t starts[] = {530, 0, 257};
    KvRig *rig = *state;

    for (size_t i = 0; i < N_ANY_POLICIES; i++)
        for (size_t k = 0; k < N_ELEMENTS(all_kinds); k++) {
            KvPolicy policy = any_policy(rig, i, all_kinds[k]);
            KvStore *store = kv_rig_store(rig, &policy);
            KvBenchItem items[3];

            for (uint32_t j = 0; j < 3; j++) {
                items[j] = (KvBenchItem){.cache = kv_rig_cache(store), .stream = kv_stream_new(&rig->bench, SEED, N_TOKENS)};
                kv_bench_run(&rig->bench, store, items[j].cache, items[j].stream, starts[j], 512);
            }
            for (uint32_t step = 0; step < 12; step++) {
                items[0].n_tokens = 1;
                items[1].n_tokens = 1 + step * 7;
                items[2].n_tokens = 1 + (step * 5) % 37;
                assert_int_equal(kv_bench_pass(&rig->bench, store, items, 1 + step % 3, NULL), 0);
            }
            for (uint32_t j = 0; j < 3; j++) {
                assert_same(rig, rig->cold[all_kinds[k]], items[j].stream, 0, kv_cache_length(items[j].cache), "batched");
                (void)kv_cache_free(items[j].cache);
                (void)kv_stream_free(items[j].stream);
            }
            (void)kv_store_free(store);
        }
}

static void more_sequences_than_tail_slots_take_turns(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = host_policy(KV_FORM_LEAT, KV_TRANSFER_COPY, 1, 2);
    KvStore *store = kv_rig_store(rig, &policy);
    KvBenchItem items[7];
    uint32_t x = SEED;

    for (uint32_t j = 0; j < 7; j++)
        items[j] = (KvBenchItem){.cache = kv_rig_cache(store), .stream = kv_stream_new(&rig->bench, SEED, N_TOKENS)};
    for (uint32_t step = 0; step < 60; step++) {
        KvBenchItem chosen[3];
        uint32_t n = 1 + step % 3;

        x = x * 1664525u + 1013904223u;
        for (uint32_t j = 0; j < n; j++) {
            chosen[j] = items[((x >> 10) + j * (1 + step % 2)) % 7];
            chosen[j].n_tokens = 1 + (x >> (12 + j)) % 50;
            chosen[j].n_tokens = MIN(chosen[j].n_tokens, N_TOKENS - kv_cache_length(chosen[j].cache));
        }
        assert_int_equal(kv_bench_pass(&rig->bench, store, chosen, n, NULL), 0);
    }
    for (uint32_t j = 0; j < 7; j++) {
        assert_same(rig, rig->cold[KV_FORM_LEAT], items[j].stream, 0, kv_cache_length(items[j].cache), "in turns");
        (void)kv_cache_free(items[j].cache);
        (void)kv_stream_free(items[j].stream);
    }
    (void)kv_store_free(store);
}

/* Random histories on the tightest store: what comes out at the end is what a fresh cache gives. */
static void random_histories_end_as_cold_ones(void **state)
{
    KvRig *rig = *state;

    for (uint32_t round = 0; round < 6; round++) {
        KvFormKind kind = all_kinds[round % 3];
        KvPolicy policy = any_policy(rig, 3 - round % N_ANY_POLICIES, kind);
        KvStore *store = kv_rig_store(rig, &policy);
        KvCache *caches[5] = {NULL};
        KvStream *streams[5] = {NULL};
        uint32_t x = SEED + round, seed = 1000 * round;

        for (uint32_t step = 0; step < 120; step++) {
            uint32_t j, length;

            x = x * 1664525u + 1013904223u;
            j = (x >> 24) % 5;
            if (!caches[j]) {
                uint32_t from = (x >> 20) % 5;

                caches[j] = caches[from] ? cache_fork(caches[from]) : kv_rig_cache(store);
                streams[j] = caches[from] && from != j ? kv_stream_branch(&rig->bench, streams[from],
                                                                          kv_cache_length(caches[j]), ++seed)
                                                       : kv_stream_new(&rig->bench, ++seed, N_TOKENS);
            }
            switch ((x >> 16) % 8) {
            case 0: {
                KvStream *branch;

                assert_int_equal(kv_cache_crop(caches[j], kv_cache_length(caches[j]) - MIN(kv_cache_length(caches[j]), (x >> 8) % 90),
                                               &length, NULL),
                                 0);
                branch = kv_stream_branch(&rig->bench, streams[j], length, ++seed);
                (void)kv_stream_free(streams[j]);
                streams[j] = branch;
                break;
            }
            case 1:
                assert_int_equal(kv_cache_checkpoint(caches[j]), 0);
                break;
            case 2:
                if ((x >> 12) % 3 == 0) {
                    caches[j] = kv_cache_free(caches[j]);
                    streams[j] = kv_stream_free(streams[j]);
                }
                break;
            default: {
                uint32_t n = (x >> 13) % 2 ? 1 : 1 + (x >> 5) % 120;

                length = MIN(N_TOKENS, kv_cache_length(caches[j]) + n);
                kv_bench_run(&rig->bench, store, caches[j], streams[j], length, 512);
            }
            }
        }
        for (uint32_t j = 0; j < 5; j++) {
            if (!caches[j])
                continue;
            assert_cold(rig, kind, streams[j], 0, kv_cache_length(caches[j]), "a random history");
            (void)kv_cache_free(caches[j]);
            (void)kv_stream_free(streams[j]);
        }
        (void)kv_store_free(store);
    }
}

static void decoding_creates_nothing_and_copies_every_tile_once(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = host_policy(KV_FORM_LEAT, KV_TRANSFER_COPY, 1, 2);
    KvStore *store = kv_rig_store(rig, &policy);
    KvCache *cache = kv_rig_cache(store);
    _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
    GpuCounters before, after;
    uint32_t n_steps = 20;

    kv_bench_run(&rig->bench, store, cache, stream, 644, 512);
    kv_bench_run(&rig->bench, store, cache, stream, 646, 1); /* warm, and prefetched */
    gpu_counters(rig->gpu, &before);
    kv_bench_run(&rig->bench, store, cache, stream, 646 + n_steps, 1);
    gpu_counters(rig->gpu, &after);
    assert_int_equal(after.n_buffers_created, before.n_buffers_created);
    assert_int_equal(after.n_programs_built, before.n_programs_built);
    assert_int_equal(after.n_programs_from_cache, before.n_programs_from_cache);
    /* 19 packed pages are 3 tiles a layer; with them the step's input and the two of the bench. */
    assert_int_equal(after.n_uploads - before.n_uploads, n_steps * (3 * KV_BENCH_LAYERS + 1 + KV_BENCH_LAYERS));
    assert_int_equal(after.n_downloads - before.n_downloads, n_steps * KV_BENCH_LAYERS);
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);
}

static void cache_refuses_tokens_beyond_its_context(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = host_policy(KV_FORM_LEAT, KV_TRANSFER_COPY, 1, 2);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
    KvStore *store;
    KvCache *cache;
    KvPass *pass = NULL;
    KvPassItem item;

    policy.max_cache_tokens = 320;
    store = kv_rig_store(rig, &policy);
    cache = kv_rig_cache(store);
    kv_bench_run(&rig->bench, store, cache, stream, 319, 319);
    item = (KvPassItem){cache, 2};
    assert_int_equal(kv_pass_begin(store, &item, 1, &pass, &detail), KV_E_CONTEXT);
    assert_non_null(strstr(detail.text, "320"));
    assert_null(pass);
    kv_bench_run(&rig->bench, store, cache, stream, 320, 1);
    assert_same(rig, rig->cold[KV_FORM_LEAT], stream, 0, 320, "to the last token");
    item.n_tokens = 1;
    assert_int_equal(kv_pass_begin(store, &item, 1, &pass, NULL), KV_E_CONTEXT);
    item.n_tokens = 0;
    assert_int_equal(kv_pass_begin(store, &item, 1, &pass, NULL), -EINVAL);
    assert_int_equal(kv_pass_begin(store, &item, 0, &pass, NULL), -EINVAL);
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);
}

static void abort_gives_reserved_pages_back(void **state)
{
    KvRig *rig = *state;

    for (size_t i = 0; i < N_ANY_POLICIES; i++)
        for (size_t k = 0; k < N_ELEMENTS(all_kinds); k++) {
            KvPolicy policy = any_policy(rig, i, all_kinds[k]);
            KvStore *store = kv_rig_store(rig, &policy);
            KvCache *cache = kv_rig_cache(store);
            _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
            KvPassItem item = {cache, 200};
            KvBytes before, after;
            KvPass *pass;

            kv_bench_run(&rig->bench, store, cache, stream, 231, 512);
            kv_cache_bytes(cache, &before);
            assert_int_equal(gpu_step_begin(rig->gpu), 0);
            assert_int_equal(kv_pass_begin(store, &item, 1, &pass, NULL), 0);
            assert_int_equal(kv_cache_crop(cache, 3, &item.n_tokens, NULL), -EBUSY);
            assert_null(kv_pass_abort(pass)); /* before any layer: as if nothing had been */
            kv_cache_bytes(cache, &after);
            assert_memory_equal(&before, &after, sizeof(before));
            item.n_tokens = 1; /* a token never destroys what is needed */
            assert_int_equal(kv_pass_begin(store, &item, 1, &pass, NULL), 0);
            assert_int_equal(kv_pass_layer(pass, 0, rig->bench.qkv[0], rig->bench.out[0], NULL), 0);
            assert_null(kv_pass_abort(pass));
            assert_int_equal(kv_cache_length(cache), 231);
            kv_bench_run(&rig->bench, store, cache, stream, 300, 9);
            assert_int_equal(kv_cache_checkpoint(cache), 0);
            item.n_tokens = 200;
            assert_int_equal(kv_pass_begin(store, &item, 1, &pass, NULL), 0);
            for (uint32_t l = 0; l < KV_BENCH_LAYERS; l++)
                assert_int_equal(kv_pass_layer(pass, l, rig->bench.qkv[l], rig->bench.out[l], NULL), 0);
            assert_null(kv_pass_abort(pass));
            assert_int_equal(kv_cache_length(cache), 300);
            kv_bench_run(&rig->bench, store, cache, stream, 420, 512);
            assert_same(rig, rig->cold[all_kinds[k]], stream, 0, 420, "after aborts");
            (void)kv_cache_free(cache);
            (void)kv_store_free(store);
        }
}

static void host_budget_gives_up_checkpoints_before_pages(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = host_policy(KV_FORM_LEAT, KV_TRANSFER_COPY, 1, 2);
    _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvStore *store = kv_rig_store(rig, &policy);
    KvCache *cache = kv_rig_cache(store);
    KvPassItem item;
    KvBytes bytes;
    KvPass *pass = NULL;

    kv_bench_run(&rig->bench, store, cache, stream, 250, 512);
    assert_int_equal(kv_cache_checkpoint(cache), 0);
    kv_cache_bytes(cache, &bytes);
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);

    policy.host_budget_bytes = 2 * bytes.host + bytes.checkpoints; /* fourteen pages and a checkpoint */
    store = kv_rig_store(rig, &policy);
    cache = kv_rig_cache(store);
    kv_bench_run(&rig->bench, store, cache, stream, 250, 512);
    assert_int_equal(kv_cache_checkpoint(cache), 0);
    kv_bench_run(&rig->bench, store, cache, stream, 280, 512);
    assert_int_equal(kv_cache_checkpoint(cache), 0);
    kv_bench_run(&rig->bench, store, cache, stream, 500, 512);
    kv_cache_bytes(cache, &bytes);
    assert_true(bytes.host + bytes.checkpoints <= policy.host_budget_bytes);
    item = (KvPassItem){cache, 250};
    assert_int_equal(kv_pass_begin(store, &item, 1, &pass, &detail), KV_E_HOST_MEMORY);
    assert_true(detail.text[0]);
    kv_bench_run(&rig->bench, store, cache, stream, 540, 20);
    assert_same(rig, rig->cold[KV_FORM_LEAT], stream, 0, 540, "after a refusal");
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);
}

static void device_pages_beyond_their_budget_are_refused(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = device_policy(KV_FORM_F16);
    _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
    uint64_t block = (uint64_t)256 * KV_BENCH_LAYERS * 2 * 128 * 2, before[GPU_PURPOSE_X_MAX], used[GPU_PURPOSE_X_MAX], total;
    KvStore *store;
    KvCache *cache, *other;
    KvPassItem item;
    KvPass *pass = NULL;
    KvPlan plan;

    assert_int_equal(kv_store_plan(gpu_info(rig->gpu), &rig->bench.model, &policy, &plan, NULL), 0);
    assert_int_equal(plan.device_page_bytes, 4 * block);
    policy.device_budget_bytes = plan.staging_bytes + plan.tail_bytes + 5 * block + 99;
    gpu_memory_used(rig->gpu, before, &total);
    store = kv_rig_store(rig, &policy);
    cache = kv_rig_cache(store);
    other = kv_rig_cache(store);
    kv_bench_run(&rig->bench, store, cache, stream, 700, 512);
    kv_bench_run(&rig->bench, store, other, stream, 510, 512);
    gpu_memory_used(rig->gpu, used, &total);
    assert_int_equal(used[GPU_PURPOSE_PAGES] - before[GPU_PURPOSE_PAGES], 5 * block);
    item = (KvPassItem){other, 200};
    assert_int_equal(kv_pass_begin(store, &item, 1, &pass, NULL), KV_E_DEVICE_MEMORY);
    (void)kv_cache_free(cache);
    kv_bench_run(&rig->bench, store, other, stream, 700, 512);
    assert_same(rig, rig->cold[KV_FORM_F16], stream, 0, 700, "after a refusal");
    (void)kv_cache_free(other);
    (void)kv_store_free(store);
}

/* A past without pages is not taken for an empty one. */
static void compatibility_mode_is_not_moved(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = device_policy(KV_FORM_F16), compatible = kv_policy_preset(KV_STRATEGY_QUANTIZED, true);
    _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, 20);
    KvStore *store, *target = kv_rig_store(rig, &policy);
    KvCache *cache;

    compatible.is_compatible = true;
    compatible.max_cache_tokens = KV_BENCH_MAX_TOKENS;
    assert_int_equal(kv_quant_options(&(KvQuantRequest){0}, &compatible.compatible, NULL), 0);
    store = kv_rig_store(rig, &compatible);
    cache = kv_rig_cache(store);
    kv_bench_run(&rig->bench, store, cache, stream, 20, 20);
    assert_int_equal(kv_store_migrate(store, target, true, NULL), -ENOTSUP);
    assert_false(kv_store_is_same(store, target));
    assert_int_equal(kv_cache_length(cache), 20);
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);
    (void)kv_store_free(target);
}

/* Every policy that reads pages: after zeros each goes on, and all alike. */
static void a_blank_past_is_as_long_and_the_same_everywhere(void **state)
{
    KvRig *rig = *state;
    KvPolicy policies[] = {device_policy(KV_FORM_F16),
                           host_policy(KV_FORM_F16, gpu_info(rig->gpu)->unified_memory ? KV_TRANSFER_ZERO_COPY : KV_TRANSFER_AUTO, 1, 2),
                           host_policy(KV_FORM_F16, KV_TRANSFER_COPY, 1, 2)};
    KvStream *streams[N_ELEMENTS(policies)];

    for (size_t i = 0; i < N_ELEMENTS(policies); i++) {
        KvStore *store = kv_rig_store(rig, &policies[i]);
        KvCache *cache = kv_rig_cache(store);

        streams[i] = kv_stream_new(&rig->bench, SEED, N_TOKENS);
        kv_bench_run(&rig->bench, store, cache, streams[i], 40, 40);
        assert_int_equal(kv_cache_add_blank(cache, 577, NULL), 0);
        assert_int_equal(kv_cache_length(cache), 617);
        kv_bench_run(&rig->bench, store, cache, streams[i], 640, 1);
        assert_same(rig, streams[0], streams[i], 617, 640, "after zeros");
        (void)kv_cache_free(cache);
        (void)kv_store_free(store);
    }
    for (size_t i = 0; i < N_ELEMENTS(policies); i++)
        (void)kv_stream_free(streams[i]);
}

static void a_blank_past_is_refused_beyond_the_context_and_in_compatibility_mode(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = device_policy(KV_FORM_F16), compatible = kv_policy_preset(KV_STRATEGY_QUANTIZED, true);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvStore *store;
    KvCache *cache;

    policy.max_cache_tokens = 320;
    store = kv_rig_store(rig, &policy);
    cache = kv_rig_cache(store);
    assert_int_equal(kv_cache_add_blank(cache, 321, NULL), KV_E_CONTEXT);
    assert_int_equal(kv_cache_length(cache), 0);
    assert_int_equal(kv_cache_add_blank(cache, 320, NULL), 0);
    assert_int_equal(kv_cache_length(cache), 320);
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);
    compatible.is_compatible = true;
    compatible.max_cache_tokens = KV_BENCH_MAX_TOKENS;
    assert_int_equal(kv_quant_options(&(KvQuantRequest){0}, &compatible.compatible, NULL), 0);
    store = kv_rig_store(rig, &compatible);
    cache = kv_rig_cache(store);
    assert_int_equal(kv_cache_add_blank(cache, 1, &detail), -ENOTSUP);
    assert_non_null(strstr(detail.text, "compatibility mode"));
    assert_int_equal(kv_cache_length(cache), 0);
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(cache_gives_different_rows_different_outputs),
        cmocka_unit_test(cache_gives_the_same_bits_for_chunks_of_any_size),
        cmocka_unit_test(cache_gives_the_same_bits_under_every_exact_strategy),
        cmocka_unit_test(cache_gives_the_same_bits_for_any_tile_and_ring),
        cmocka_unit_test(cache_works_within_two_tiles_and_within_one),
        cmocka_unit_test(a_resident_share_changes_no_bit),
        cmocka_unit_test(plan_equals_what_the_allocator_shows),
        cmocka_unit_test(forks_diverge_as_if_each_had_been_alone),
        cmocka_unit_test(crop_and_rerun_equals_cold),
        cmocka_unit_test(crop_beyond_the_end_changes_nothing),
        cmocka_unit_test(checkpoint_is_a_place_to_go_back_to),
        cmocka_unit_test(rows_do_not_depend_on_who_shares_the_pass),
        cmocka_unit_test(more_sequences_than_tail_slots_take_turns),
        cmocka_unit_test(random_histories_end_as_cold_ones),
        cmocka_unit_test(decoding_creates_nothing_and_copies_every_tile_once),
        cmocka_unit_test(cache_refuses_tokens_beyond_its_context),
        cmocka_unit_test(abort_gives_reserved_pages_back),
        cmocka_unit_test(host_budget_gives_up_checkpoints_before_pages),
        cmocka_unit_test(device_pages_beyond_their_budget_are_refused),
        cmocka_unit_test(compatibility_mode_is_not_moved),
        cmocka_unit_test(a_blank_past_is_as_long_and_the_same_everywhere),
        cmocka_unit_test(a_blank_past_is_refused_beyond_the_context_and_in_compatibility_mode),
    };

    printf("seed %u\n", SEED);
    return cmocka_run_group_tests(tests, setup, teardown);
}
