/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the cache promises in bytes and copies: one case for each sentence on memory, sharing and streaming, counted on the loose device, which
 * checks beside it that each row saw its keys.
 */

#include "tests/unit/semantics-rig.c"

#include <malloc.h>

/* ---- memory ---------------------------------------------------------------------------------------------------------------------------- */

static void memory_pages_waste_less_than_one_page_a_layer_and_sequence(void **state)
{
    static const KvFormKind kinds[] = {KV_FORM_F16, KV_FORM_LEAT, KV_FORM_HQQ, KV_FORM_QUANTO, KV_FORM_FP8};

    (void)state;
    for (size_t k = 0; k < N_ELEMENTS(kinds); k++)
        for (int home = 0; home < 2; home++) {
            KvPolicy policy = streaming(kinds[k], KV_GROWTH_DYNAMIC);
            Fixture *fixture;
            KvBytes bytes;

            policy.home = home ? KV_HOME_HOST : KV_HOME_DEVICE;
            fixture = fixture_new(small, 3, policy);
            open_store(fixture);
            run_pass(fixture, 3, 1);
            for (uint32_t length = 1; length < 1000; length += 37) {
                uint64_t pages, exact = length * 3ull * page_bytes(fixture) / KV_PAGE_TOKENS;

                run_to(fixture, 3, length);
                kv_cache_bytes(fixture->sequences[2].cache, &bytes);
                pages = home ? bytes.host : bytes.device - fixture->plan.tail_bytes / N_CACHES;
                assert_true(pages < exact + 3 * page_bytes(fixture));
                assert_true(pages <= exact); /* and none at all: a page that is not complete is in the tail alone */
            }
            (void)fixture_free(fixture);
        }
}

static void memory_at_8192_tokens_4_bit_forms_keep_at_most_0_30_of_f16_and_the_device_ring_and_tail_only(void **state)
{
    static const struct {
        KvFormKind kind;
        uint16_t tail_tokens;
        double host, all; /* of f16: what is at home; with the recent tokens and the sinks, which are on the device */
    } rows[] = {{KV_FORM_LEAT, 64, 0.30, 0.30}, {KV_FORM_HQQ, 64, 0.30, 0.30},  {KV_FORM_QUANTO, 64, 0.30, 0.30}, {KV_FORM_FP8, 64, 0.52, 0.53},
                {KV_FORM_HQQ, 128, 0.30, 0.302}, {KV_FORM_QUANTO, 128, 0.30, 0.302}}; /* 128: as many as the library keeps */
    const double f16 = 8192.0 * 2 * 2 * 3 * 64 * 2; /* two layers of SmolLM2 */

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        KvPolicy policy = streaming(rows[i].kind, KV_GROWTH_DYNAMIC);
        Fixture *fixture;
        KvBytes bytes;

        if (rows[i].kind == KV_FORM_LEAT)
            policy.form = kv_form_leat(4, 4);
        policy.form.tail_tokens = rows[i].tail_tokens;
        policy.max_cache_tokens = 8192;
        policy.tile_blocks = 0;
        fixture = opened(smollm2, 2, policy);
        run_to(fixture, 1, 8192);
        kv_cache_bytes(fixture->sequences[0].cache, &bytes);
        assert_true((double)(bytes.host + bytes.checkpoints) <= rows[i].host * f16);
        assert_true((double)(bytes.host + bytes.device) <= rows[i].all * f16);
        assert_int_equal(bytes.device, fixture->plan.tail_bytes / N_CACHES);
        assert_int_equal(fixture->gpu.used[GPU_PURPOSE_PAGES], 0);
        assert_int_equal(fixture->gpu.used[GPU_PURPOSE_STAGING], fixture->plan.staging_bytes);
        assert_int_equal(fixture->gpu.used[GPU_PURPOSE_TAIL], fixture->plan.tail_bytes);
        (void)fixture_free(fixture);
    }
}

static uint64_t used_on_device(const Fixture *fixture)
{
    uint64_t used = 0;

    for (uint32_t p = 0; p < GPU_PURPOSE_X_MAX; p++)
        used += fixture->gpu.used[p];
    return used;
}

static void memory_64_forks_of_an_8k_prefix_cost_less_than_1_mib_before_they_diverge(void **state)
{
    static const KvStrategy strategies[] = {KV_STRATEGY_DYNAMIC, KV_STRATEGY_OFFLOADED, KV_STRATEGY_QUANTIZED, KV_STRATEGY_OFFLOADED_QUANTIZED};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(strategies); i++) {
        KvPolicy policy = kv_policy_preset(strategies[i], false);
        uint64_t device, commands;
        KvCache *forks[64];
        Fixture *fixture;
        size_t heap;

        policy.max_cache_tokens = 32768;
        fixture = opened(small, 1, policy);
        run_to(fixture, 1, 8192 - 7);
        device = used_on_device(fixture);
        commands = fixture->gpu.n_commands;
        heap = mallinfo2().uordblks + mallinfo2().hblkhd;
        for (uint32_t f = 0; f < N_ELEMENTS(forks); f++)
            assert_int_equal(kv_cache_fork(fixture->sequences[0].cache, &forks[f], NULL), 0);
        assert_true(mallinfo2().uordblks + mallinfo2().hblkhd - heap < 1u << 20);
        assert_int_equal(used_on_device(fixture), device);
        assert_int_equal(fixture->gpu.n_commands, commands);
        for (uint32_t f = 0; f < N_ELEMENTS(forks); f++)
            (void)kv_cache_free(forks[f]);
        (void)fixture_free(fixture);
    }
}

/* ---- sharing ---------------------------------------------------------------------------------------------------------------------------- */

static void sharing_a_fork_costs_pointers_in_proportion_to_its_pages_and_no_copy(void **state)
{
    size_t bytes[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        KvPolicy policy = streaming(KV_FORM_LEAT, KV_GROWTH_DYNAMIC);
        Fixture *fixture;
        uint64_t commands;
        KvCache *fork;
        KvBytes shared;
        size_t heap;

        policy.max_cache_tokens = i == 0 ? 4096 : 8192;
        fixture = opened(small, 1, policy);
        run_to(fixture, 1, policy.max_cache_tokens - 5);
        commands = fixture->gpu.n_commands;
        heap = mallinfo2().uordblks;
        assert_int_equal(kv_cache_fork(fixture->sequences[0].cache, &fork, NULL), 0);
        bytes[i] = mallinfo2().uordblks - heap;
        assert_int_equal(fixture->gpu.n_commands, commands);
        kv_cache_bytes(fork, &shared);
        assert_int_equal(shared.n_pages_shared, shared.n_pages);
        (void)kv_cache_free(fork);
        (void)fixture_free(fixture);
    }
    assert_true(bytes[1] - bytes[0] <= 4096 / KV_PAGE_TOKENS * sizeof(void *));
}

/* A fork that goes on copies the block that it shares in part, once, and only its complete pages. */
static void sharing_a_fork_that_goes_on_copies_one_block_at_most(void **state)
{
    KvPolicy policy = streaming(KV_FORM_LEAT, KV_GROWTH_DYNAMIC);
    Fixture *fixture;

    (void)state;
    policy.home = KV_HOME_DEVICE; /* there a copy is a command, which is counted */
    fixture = opened(small, 3, policy);
    run_to(fixture, 1, 1001);
    fork_to(fixture, 1);
    run_to(fixture, 2, 1300);
    assert_int_equal(fixture->gpu.unshare_bytes, 3ull * (1001 / KV_PAGE_TOKENS % KV_BLOCK_PAGES) * page_bytes(fixture));
    (void)fixture_free(fixture);
}

/* ---- streaming ------------------------------------------------------------------------------------------------------------------------- */

/* Bytes that @n_steps passes of @n_tokens of the first @n_items sequences copy to the ring.  The prefetch is ahead of them by as many tiles
 * at the end as it was at the beginning. */
static uint64_t copied(Fixture *fixture, uint32_t n_items, uint32_t n_tokens, uint32_t n_steps)
{
    uint64_t before = fixture->gpu.tile_bytes;

    for (uint32_t i = 0; i < n_steps; i++)
        run_pass(fixture, n_items, n_tokens);
    return fixture->gpu.tile_bytes - before;
}

static void streaming_a_step_copies_every_page_once_for_any_ring_and_tile(void **state)
{
    static const KvFormKind kinds[] = {KV_FORM_F16, KV_FORM_LEAT, KV_FORM_HQQ, KV_FORM_QUANTO, KV_FORM_FP8};

    (void)state;
    for (uint32_t slots = 1; slots <= 8; slots++)
        for (uint32_t tile = 1; tile <= 2; tile++) {
            KvPolicy policy = streaming(kinds[slots % N_ELEMENTS(kinds)], slots % 2 ? KV_GROWTH_STATIC : KV_GROWTH_DYNAMIC);
            Fixture *fixture;

            policy.n_slots = slots;
            policy.tile_blocks = tile;
            fixture = opened(small, 9, policy);
            run_to(fixture, 1, 1000); /* the next 20 complete no page */
            run_pass(fixture, 1, 1);
            assert_int_equal(copied(fixture, 1, 1, 20), 20 * 9 * pages_read(fixture, 1001, 1) * page_bytes(fixture));
            (void)fixture_free(fixture);
        }
}

static void streaming_a_tile_may_be_larger_than_a_layer_and_a_ring_longer_than_a_step(void **state)
{
    KvPolicy policy = streaming(KV_FORM_LEAT, KV_GROWTH_DYNAMIC);
    Fixture *fixture;

    (void)state;
    policy.tile_blocks = 8;
    fixture = opened(small, 3, policy);
    run_to(fixture, 1, 1001);
    assert_int_equal(copied(fixture, 1, 1, 20), 20 * 3 * pages_read(fixture, 1001, 1) * page_bytes(fixture));
    (void)fixture_free(fixture);
    policy.n_slots = 3;
    fixture = opened(small, 3, policy);
    run_to(fixture, 1, 1001);
    run_pass(fixture, 1, 1);
    assert_int_equal(copied(fixture, 1, 1, 20), 0); /* all of it is there */
    (void)fixture_free(fixture);
}

static void streaming_a_prefill_pass_copies_what_came_before_it_once_whatever_its_rows(void **state)
{
    (void)state;
    for (int growth = 0; growth < 2; growth++) {
        KvPolicy policy = streaming(KV_FORM_LEAT, growth ? KV_GROWTH_STATIC : KV_GROWTH_DYNAMIC);
        Fixture *fixture = opened(small, 5, policy);
        uint64_t before;

        run_to(fixture, 1, 768);
        before = fixture->gpu.tile_bytes;
        run_pass(fixture, 1, 256);
        /* It was ahead by its ring, and is again for the next: tiles of a block of pages each. */
        assert_in_range((fixture->gpu.tile_bytes - before) / page_bytes(fixture), 5 * pages_read(fixture, 768, 256) - 16,
                        5 * pages_read(fixture, 768, 256) + 16);
        (void)fixture_free(fixture);
    }
}

static void streaming_many_sequences_copy_the_pages_of_each_once(void **state)
{
    Fixture *fixture = fixture_new(small, 3, streaming(KV_FORM_LEAT, KV_GROWTH_DYNAMIC));

    (void)state;
    open_store(fixture);
    run_pass(fixture, N_CACHES, 1);
    run_to(fixture, N_CACHES, 1001);
    assert_int_equal(copied(fixture, N_CACHES, 1, 20), 20 * 3 * N_CACHES * pages_read(fixture, 1001, 1) * page_bytes(fixture));
    (void)fixture_free(fixture);
}

static void streaming_a_page_that_forks_share_is_copied_once_a_step(void **state)
{
    (void)state;
    for (int growth = 0; growth < 2; growth++) {
        KvPolicy policy = streaming(KV_FORM_LEAT, growth ? KV_GROWTH_STATIC : KV_GROWTH_DYNAMIC);
        Fixture *fixture = opened(small, 3, policy);
        uint64_t shared, own;

        run_to(fixture, 1, 1001);
        for (uint32_t i = 1; i < N_CACHES; i++)
            fork_to(fixture, i);
        run_pass(fixture, N_CACHES, 1);
        assert_int_equal(copied(fixture, N_CACHES, 1, 20), 20 * 3 * pages_read(fixture, 1001, 1) * page_bytes(fixture));
        run_to(fixture, N_CACHES, 1250); /* they go different ways: complete blocks stay shared, the one they forked in is copied once */
        run_pass(fixture, N_CACHES, 1);
        shared = 1001 / (KV_PAGE_TOKENS * KV_BLOCK_PAGES) * KV_BLOCK_PAGES;
        own = pages_read(fixture, 1251, 1) - shared;
        assert_int_equal(copied(fixture, N_CACHES, 1, 20), 20 * 3 * (shared + N_CACHES * own) * page_bytes(fixture));
        (void)fixture_free(fixture);
    }
}

static Fixture *windowed(bool stay, KvGrowth growth)
{
    KvPolicy policy = streaming(KV_FORM_LEAT, growth);
    Fixture *fixture;

    policy.offload_only_non_sliding = stay;
    fixture = fixture_new(small, 4, policy);
    for (uint32_t l = 0; l < 4; l++)
        fixture->layers[l] = (KvLayer){.kind = l % 2 ? KV_LAYER_CHUNKED : KV_LAYER_SLIDING, .window = 300};
    open_store(fixture);
    run_pass(fixture, 1, 1);
    run_to(fixture, 1, 1001);
    return fixture;
}

static void streaming_offloaded_sliding_layers_copy_the_pages_in_sight_only(void **state)
{
    (void)state;
    for (int growth = 0; growth < 2; growth++) {
        Fixture *fixture = windowed(false, growth ? KV_GROWTH_STATIC : KV_GROWTH_DYNAMIC);
        uint64_t pages = copied(fixture, 1, 1, 20) / page_bytes(fixture);

        /* Of 1,001 tokens a sliding layer sees 300; of the chunk that began at 900 so far 101, of which 64 and more are recent. */
        assert_in_range(pages, 20 * 2 * (300 / KV_PAGE_TOKENS - 3), 20 * 2 * (300 / KV_PAGE_TOKENS + 3));
        (void)fixture_free(fixture);
    }
}

static void streaming_sliding_layers_that_stay_on_the_device_copy_nothing(void **state)
{
    Fixture *fixture = windowed(true, KV_GROWTH_DYNAMIC);

    (void)state;
    assert_int_equal(copied(fixture, 1, 1, 20), 0);
    assert_true(fixture->gpu.used[GPU_PURPOSE_PAGES] > 0);
    (void)fixture_free(fixture);
}

static void streaming_memory_that_the_device_reads_in_place_is_not_copied(void **state)
{
    KvPolicy policy = streaming(KV_FORM_LEAT, KV_GROWTH_DYNAMIC);
    Fixture *fixture;

    (void)state;
    policy.transfer = KV_TRANSFER_AUTO; /* the device says that its memory is the host's */
    fixture = opened(small, 3, policy);
    run_to(fixture, 1, 1001);
    assert_int_equal(copied(fixture, 1, 1, 20), 0);
    assert_int_equal(fixture->plan.n_slots, 0);
    (void)fixture_free(fixture);
}

/* While the host samples, layer 0 of the next step is on its way: in its first copies there is nothing left to bring. */
static void streaming_wraps_around_into_the_next_step(void **state)
{
    KvPolicy policy = streaming(KV_FORM_LEAT, KV_GROWTH_DYNAMIC);
    Fixture *fixture = opened(small, 3, policy);
    KvPassItem item;
    uint64_t before;
    KvPass *pass;

    (void)state;
    run_to(fixture, 1, 1001);
    run_pass(fixture, 1, 1);
    before = fixture->gpu.tile_bytes;
    item = (KvPassItem){fixture->sequences[0].cache, 1};
    assert_int_equal(kv_pass_begin(fixture->store, &item, 1, &pass, NULL), 0);
    assert_int_equal(fixture->gpu.tile_bytes, before);
    (void)kv_pass_abort(pass);
    (void)fixture_free(fixture);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_pages_waste_less_than_one_page_a_layer_and_sequence),
        cmocka_unit_test(memory_at_8192_tokens_4_bit_forms_keep_at_most_0_30_of_f16_and_the_device_ring_and_tail_only),
        cmocka_unit_test(memory_64_forks_of_an_8k_prefix_cost_less_than_1_mib_before_they_diverge),
        cmocka_unit_test(sharing_a_fork_costs_pointers_in_proportion_to_its_pages_and_no_copy),
        cmocka_unit_test(sharing_a_fork_that_goes_on_copies_one_block_at_most),
        cmocka_unit_test(streaming_a_step_copies_every_page_once_for_any_ring_and_tile),
        cmocka_unit_test(streaming_a_tile_may_be_larger_than_a_layer_and_a_ring_longer_than_a_step),
        cmocka_unit_test(streaming_a_prefill_pass_copies_what_came_before_it_once_whatever_its_rows),
        cmocka_unit_test(streaming_many_sequences_copy_the_pages_of_each_once),
        cmocka_unit_test(streaming_a_page_that_forks_share_is_copied_once_a_step),
        cmocka_unit_test(streaming_offloaded_sliding_layers_copy_the_pages_in_sight_only),
        cmocka_unit_test(streaming_sliding_layers_that_stay_on_the_device_copy_nothing),
        cmocka_unit_test(streaming_memory_that_the_device_reads_in_place_is_not_copied),
        cmocka_unit_test(streaming_wraps_around_into_the_next_step),
    };

    printf("seed %u\n", SEED);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
