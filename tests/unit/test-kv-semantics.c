/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the cache promises in bytes and copies: sentences of the cache semantics and of what streaming, sharing and memory must be, one case
 * each, over the loose device of tests/unit/loose-gpu.c, which checks beside it that each row saw its keys.
 */

#include "tests/unit/loose-gpu.c"

#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define SEED       1u
#define MAX_LAYERS 9
#define MAX_ROWS   256
#define N_CACHES   8
#define MAX_TOKENS 8192

static const float frequencies[32] = {1.0f};
static const KvShape small = {.n_heads = 1, .n_kv_heads = 1, .k_head_dim = 16, .v_head_dim = 16, .rotary_dim = 16};
static const KvShape smollm2 = {.n_heads = 9, .n_kv_heads = 3, .k_head_dim = 64, .v_head_dim = 64, .rotary_dim = 64};

typedef struct Sequence {
    KvCache *cache;
    uint32_t ids[MAX_TOKENS];
} Sequence;

typedef struct Fixture {
    Gpu gpu;
    KvModel model;
    KvLayer layers[MAX_LAYERS];
    KvPolicy policy;
    KvPlan plan;
    KvStore *store;
    GpuBuffer *qkv, *out[MAX_LAYERS];
    Sequence sequences[N_CACHES];
    uint32_t next_id;
} Fixture;

/* ---- a store of full layers, or others, on the loose device ---------------------------------------------------------------------------- */

static Fixture *fixture_new(KvShape shape, uint32_t n_layers, KvPolicy policy)
{
    Fixture *fixture = calloc(1, sizeof(*fixture));

    assert_non_null(fixture);
    fixture->gpu = (Gpu){.info = {.name = "loose", .unified_memory = true, .max_allocation_bytes = 1u << 30}, .random = SEED,
                         .favourite = GPU_QUEUE_X_MAX, .fail_at = -1};
    fixture->next_id = 1;
    fixture->policy = policy;
    fixture->model = (KvModel){.n_layers = n_layers, .shape = shape, .layers = fixture->layers, .scale = 1.0f, .inv_freq = frequencies,
                               .max_rows = MAX_ROWS, .max_sequences = N_CACHES};
    return fixture;
}

static void open_store(Fixture *fixture)
{
    const KvShape *shape = &fixture->model.shape;
    ErrorDetail detail = ERROR_DETAIL_NULL;

    assert_int_equal(gpu_buffer_new(&fixture->gpu, GPU_PURPOSE_OTHER, MAX_ROWS * kv_row_values(shape) * sizeof(float), &fixture->qkv, NULL), 0);
    for (uint32_t l = 0; l < fixture->model.n_layers; l++)
        assert_int_equal(gpu_buffer_new(&fixture->gpu, GPU_PURPOSE_OTHER, MAX_ROWS * shape->n_heads * shape->v_head_dim * sizeof(float),
                                        &fixture->out[l], NULL),
                         0);
    assert_int_equal(kv_store_plan(&fixture->gpu.info, &fixture->model, &fixture->policy, &fixture->plan, NULL), 0);
    if (kv_store_new(&fixture->gpu, &fixture->model, &fixture->policy, &fixture->store, &detail))
        fail_msg("%s", detail.text);
}

static Fixture *fixture_free(Fixture *fixture)
{
    uint64_t used = 0;

    for (uint32_t i = 0; i < N_CACHES; i++)
        (void)kv_cache_free(fixture->sequences[i].cache);
    (void)kv_store_free(fixture->store);
    (void)gpu_buffer_free(fixture->qkv);
    for (uint32_t l = 0; l < fixture->model.n_layers; l++)
        (void)gpu_buffer_free(fixture->out[l]);
    (void)gpu_drain(&fixture->gpu, 0, NULL);
    for (uint32_t p = 0; p < GPU_PURPOSE_X_MAX; p++)
        used += fixture->gpu.used[p];
    assert_int_equal(used, 0);
    free(fixture);
    return NULL;
}

static void check_row(const Fixture *fixture, const Sequence *sequence, uint32_t position, uint32_t row)
{
    size_t width = (size_t)fixture->model.shape.n_heads * fixture->model.shape.v_head_dim * sizeof(float);

    for (uint32_t l = 0; l < fixture->model.n_layers; l++) {
        const KvLayer *layer = &fixture->layers[l];
        uint32_t low = layer->kind == KV_LAYER_SLIDING && position + 1 > layer->window ? position + 1 - layer->window : 0;
        bool windowed = layer->kind == KV_LAYER_SLIDING || layer->kind == KV_LAYER_CHUNKED;
        bool stays = windowed && fixture->policy.home == KV_HOME_HOST && fixture->policy.offload_only_non_sliding;
        KvForm form = stays ? kv_form_default(KV_FORM_F16) : fixture->policy.form;
        uint64_t state;

        if (layer->kind == KV_LAYER_NONE)
            continue;
        if (layer->kind == KV_LAYER_CHUNKED)
            low = position / layer->window * layer->window;
        memcpy(&state, fixture->out[l]->data + row * width, sizeof(state));
        if (state != loose_expected_from(form, sequence->ids, low, position))
            fail_msg("layer %u, position %u, row %u", l, position, row);
    }
}

/* One pass of the first @n_items sequences, @n_tokens each. */
static void run_pass(Fixture *fixture, uint32_t n_items, uint32_t n_tokens)
{
    uint64_t width = kv_row_values(&fixture->model.shape);
    uint32_t row = 0, every = fixture->policy.max_cache_tokens > 2048 ? 67 : 1; /* the check takes time in proportion to the length */
    KvPassItem items[N_CACHES];
    KvPass *pass;

    for (uint32_t i = 0; i < n_items; i++) {
        Sequence *sequence = &fixture->sequences[i];
        uint32_t length;

        if (!sequence->cache)
            assert_int_equal(kv_cache_new(fixture->store, &sequence->cache, NULL), 0);
        length = kv_cache_length(sequence->cache);
        items[i] = (KvPassItem){sequence->cache, n_tokens};
        for (uint32_t t = 0; t < n_tokens; t++, row++) {
            sequence->ids[length + t] = fixture->next_id++;
            ((float *)fixture->qkv->data)[row * width] = (float)sequence->ids[length + t];
        }
    }
    assert_int_equal(kv_pass_begin(fixture->store, items, n_items, &pass, NULL), 0);
    for (uint32_t l = 0; l < fixture->model.n_layers; l++)
        if (fixture->layers[l].kind != KV_LAYER_NONE)
            assert_int_equal(kv_pass_layer(pass, l, fixture->qkv, fixture->out[l], NULL), 0);
    assert_int_equal(kv_pass_prefetch(pass), 0);
    assert_int_equal(gpu_step_finish(&fixture->gpu, 0, NULL), 0);
    for (uint32_t i = 0, r = 0; i < n_items; i++)
        for (uint32_t t = 0; t < n_tokens; t++, r++)
            if (r % every == 0)
                check_row(fixture, &fixture->sequences[i], kv_cache_length(items[i].cache) + t, r);
    assert_int_equal(kv_pass_commit(pass), 0);
}

static void run_to(Fixture *fixture, uint32_t n_items, uint32_t end)
{
    while (kv_cache_length(fixture->sequences[0].cache) < end)
        run_pass(fixture, n_items, MIN(end - kv_cache_length(fixture->sequences[0].cache), MAX_ROWS / n_items));
}

static void fork_to(Fixture *fixture, uint32_t i)
{
    assert_int_equal(kv_cache_fork(fixture->sequences[0].cache, &fixture->sequences[i].cache, NULL), 0);
    memcpy(fixture->sequences[i].ids, fixture->sequences[0].ids, sizeof(fixture->sequences[0].ids));
}

/* Begins with a pass of one token, so that the first sequence is there. */
static Fixture *opened(KvShape shape, uint32_t n_layers, KvPolicy policy)
{
    Fixture *fixture = fixture_new(shape, n_layers, policy);

    open_store(fixture);
    run_pass(fixture, 1, 1);
    return fixture;
}

static KvPolicy streaming(KvFormKind kind, KvGrowth growth)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED, false);

    policy.form = kv_form_default(kind);
    policy.growth = growth;
    policy.transfer = KV_TRANSFER_COPY;
    policy.max_cache_tokens = 2048;
    policy.tile_blocks = 1;
    return policy;
}

static uint64_t page_bytes(const Fixture *fixture)
{
    KvLayout layout;

    assert_int_equal(kv_layout(fixture->policy.form, &fixture->model.shape, &layout, NULL), 0);
    return layout.page_bytes;
}

/* Pages of one layer at home that a pass of @n_tokens behind @length reads. */
static uint64_t pages_read(const Fixture *fixture, uint32_t length, uint32_t n_tokens)
{
    return MIN(length / KV_PAGE_TOKENS, kv_packed_pages(fixture->policy.form, length + n_tokens - 1));
}

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

/* ---- rollback -------------------------------------------------------------------------------------------------------------------------- */

#define FULL    {.kind = KV_LAYER_FULL}
#define SLIDING {.kind = KV_LAYER_SLIDING, .window = 100}
#define CHUNKED {.kind = KV_LAYER_CHUNKED, .window = 100}
#define LINEAR  {.kind = KV_LAYER_NONE, .conv_bytes = 64, .recurrent_bytes = 128}

static const KvLayer kinds_of_layers[][2] = {{FULL, FULL}, {FULL, SLIDING}, {CHUNKED, SLIDING}, {LINEAR, FULL}, {LINEAR, SLIDING}};

/* With @layers, under the i-th of all growths and homes. */
static Fixture *rolling(const KvLayer layers[2], KvFormKind kind, uint32_t i)
{
    KvPolicy policy = streaming(kind, i & 1 ? KV_GROWTH_STATIC : KV_GROWTH_DYNAMIC);
    Fixture *fixture;

    policy.home = i & 2 ? KV_HOME_DEVICE : KV_HOME_HOST;
    policy.offload_only_non_sliding = i & 4;
    fixture = fixture_new(small, 2, policy);
    memcpy(fixture->layers, layers, 2 * sizeof(KvLayer));
    fixture->model.max_state_steps = 20;
    open_store(fixture);
    run_pass(fixture, 1, 1);
    return fixture;
}

static void refused(Fixture *fixture, uint32_t n_rows, uint32_t n_back, const char *culprit)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvCache *caches[N_CACHES];
    uint32_t lengths[N_CACHES];

    for (uint32_t i = 0; i < n_rows; i++) {
        caches[i] = fixture->sequences[i].cache;
        lengths[i] = kv_cache_length(caches[i]);
    }
    assert_int_equal(kv_caches_crop(caches, n_rows, -(int64_t)n_back, &detail), KV_E_ROLLBACK);
    if (!strstr(detail.text, culprit))
        fail_msg("%s does not name %s", detail.text, culprit);
    for (uint32_t i = 0; i < n_rows; i++)
        assert_int_equal(kv_cache_length(caches[i]), lengths[i]);
}

static void row_6_3_taking_back_more_than_was_recorded_is_refused_by_name_and_changes_nothing(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_ELEMENTS(kinds_of_layers); k++)
        for (uint32_t i = 0; i < 8; i++) {
            Fixture *fixture = rolling(kinds_of_layers[k], KV_FORM_LEAT, i);
            KvCache **cache = &fixture->sequences[0].cache;

            run_to(fixture, 1, 400);
            assert_int_equal(kv_cache_record(*cache, true), 0);
            run_pass(fixture, 1, 10);
            run_pass(fixture, 1, 10);
            refused(fixture, 1, 200, "row 0 cannot take back 200 of 420 tokens");
            run_pass(fixture, 1, 1); /* it goes on as if nothing had been asked */
            assert_int_equal(kv_caches_crop(cache, 1, -21, NULL), 0);
            assert_int_equal(kv_cache_length(*cache), 400);
            refused(fixture, 1, 200, "not recorded"); /* recording began anew */
            run_pass(fixture, 1, 40);
            (void)fixture_free(fixture);
        }
}

/* 5.24 refuses draft and verification on hybrids and on quantised caches (6.4); here any part of a draft can be taken back. */
static void row_12_any_part_of_a_recorded_draft_is_taken_back_exactly_in_every_kind_of_layer(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_ELEMENTS(kinds_of_layers); k++)
        for (uint32_t i = 0; i < 8; i++) {
            Fixture *fixture = rolling(kinds_of_layers[k], i % 2 ? KV_FORM_HQQ : KV_FORM_LEAT, i);
            KvCache **cache = &fixture->sequences[0].cache;

            assert_int_equal(kv_cache_record(*cache, true), 0);
            run_to(fixture, 1, 300 + i);
            for (uint32_t draft = 0; draft < 60; draft++) { /* across the borders of pages, too */
                uint32_t length = kv_cache_length(*cache), back = draft % 13;

                run_pass(fixture, 1, 12);
                assert_int_equal(kv_caches_crop(cache, 1, -(int64_t)back, NULL), 0);
                assert_int_equal(kv_cache_length(*cache), length + 12 - back);
            }
            (void)fixture_free(fixture);
        }
}

static void row_6_3_the_middle_of_a_pass_that_is_too_long_to_keep_is_refused_by_name(void **state)
{
    Fixture *fixture = rolling(kinds_of_layers[0], KV_FORM_LEAT, 0);
    KvCache **cache = &fixture->sequences[0].cache;

    (void)state;
    assert_int_equal(kv_cache_record(*cache, true), 0);
    run_pass(fixture, 1, 256);
    run_pass(fixture, 1, 256);
    refused(fixture, 1, 128, "from 385 was not recorded"); /* 64 recent tokens, and they are of the last pages */
    assert_int_equal(kv_caches_crop(cache, 1, -256, NULL), 0);
    (void)fixture_free(fixture);
    fixture = rolling(kinds_of_layers[3], KV_FORM_F16, 0); /* states: slots for 20 steps */
    cache = &fixture->sequences[0].cache;
    assert_int_equal(kv_cache_record(*cache, true), 0);
    run_pass(fixture, 1, 30);
    refused(fixture, 1, 3, "cannot take back 3 of 31");
    assert_int_equal(kv_caches_crop(cache, 1, -30, NULL), 0);
    (void)fixture_free(fixture);
}

static void row_12_a_crop_that_one_row_refuses_crops_none(void **state)
{
    Fixture *fixture = rolling(kinds_of_layers[4], KV_FORM_LEAT, 0);
    KvCache *caches[2];

    (void)state;
    run_to(fixture, 1, 150);
    fork_to(fixture, 1);
    assert_int_equal(kv_cache_record(fixture->sequences[0].cache, true), 0);
    run_pass(fixture, 2, 4);
    refused(fixture, 2, 2, "row 1");
    caches[0] = fixture->sequences[1].cache;
    caches[1] = fixture->sequences[0].cache;
    assert_int_equal(kv_caches_crop(caches, 2, 1, NULL), -EINVAL);
    assert_int_equal(kv_caches_crop(caches, 2, -155, NULL), -EINVAL);
    assert_int_equal(kv_caches_crop(&caches[1], 1, -2, NULL), 0);
    fixture->sequences[0].cache = kv_cache_free(fixture->sequences[0].cache);
    (void)fixture_free(fixture);
}

/* Memory that is refused for the second row: the first is as it was. */
static void row_12_a_crop_that_memory_refuses_crops_none(void **state)
{
    uint32_t n_refused = 0;

    (void)state;
    for (uint64_t fail_at = 0; fail_at < 60; fail_at++) {
        Fixture *fixture = rolling(kinds_of_layers[1], KV_FORM_F16, 2);
        KvCache *caches[2];
        int r;

        run_to(fixture, 1, 150);
        fork_to(fixture, 1);
        caches[0] = fixture->sequences[0].cache;
        caches[1] = fixture->sequences[1].cache;
        run_pass(fixture, 2, 100);
        fixture->gpu.fail_at = (int64_t)fail_at;
        r = kv_caches_crop(caches, 2, -90, NULL);
        fixture->gpu.fail_at = -1;
        assert_int_equal(kv_cache_length(caches[0]), r ? 250 : 160);
        assert_int_equal(kv_cache_length(caches[1]), r ? 250 : 160);
        n_refused += r != 0;
        (void)fixture_free(fixture);
    }
    assert_true(n_refused > 3);
}

/* crop(0) after a long recorded prefill gives the memory back at once (6.1). */
static void row_6_1_crop_0_gives_what_was_recorded_back_at_once(void **state)
{
    (void)state;
    for (size_t k = 1; k < N_ELEMENTS(kinds_of_layers); k++) {
        Fixture *fixture = rolling(kinds_of_layers[k], KV_FORM_LEAT, 0), *plain = rolling(kinds_of_layers[k], KV_FORM_LEAT, 0);
        KvBytes recorded, after, without;

        assert_int_equal(kv_cache_record(fixture->sequences[0].cache, true), 0);
        run_to(fixture, 1, 1000);
        run_to(plain, 1, 1000);
        kv_cache_bytes(fixture->sequences[0].cache, &recorded);
        assert_int_equal(kv_caches_crop(&fixture->sequences[0].cache, 1, 0, NULL), 0);
        kv_cache_bytes(fixture->sequences[0].cache, &after);
        kv_cache_bytes(plain->sequences[0].cache, &without);
        assert_true(recorded.host + recorded.checkpoints > without.host);
        assert_int_equal(after.host, without.host);
        assert_int_equal(after.checkpoints, 0);
        (void)fixture_free(fixture);
        (void)fixture_free(plain);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_pages_waste_less_than_one_page_a_layer_and_sequence),
        cmocka_unit_test(memory_at_8192_tokens_4_bit_forms_keep_at_most_0_30_of_f16_and_the_device_ring_and_tail_only),
        cmocka_unit_test(memory_64_forks_of_an_8k_prefix_cost_less_than_1_mib_before_they_diverge),
        cmocka_unit_test(sharing_a_fork_costs_pointers_in_proportion_to_its_pages_and_no_copy),
        cmocka_unit_test(streaming_a_step_copies_every_page_once_for_any_ring_and_tile),
        cmocka_unit_test(streaming_a_tile_may_be_larger_than_a_layer_and_a_ring_longer_than_a_step),
        cmocka_unit_test(streaming_a_prefill_pass_copies_what_came_before_it_once_whatever_its_rows),
        cmocka_unit_test(streaming_many_sequences_copy_the_pages_of_each_once),
        cmocka_unit_test(streaming_a_page_that_forks_share_is_copied_once_a_step),
        cmocka_unit_test(streaming_offloaded_sliding_layers_copy_the_pages_in_sight_only),
        cmocka_unit_test(streaming_sliding_layers_that_stay_on_the_device_copy_nothing),
        cmocka_unit_test(streaming_memory_that_the_device_reads_in_place_is_not_copied),
        cmocka_unit_test(streaming_wraps_around_into_the_next_step),
        cmocka_unit_test(row_6_1_crop_0_gives_what_was_recorded_back_at_once),
        cmocka_unit_test(row_6_3_taking_back_more_than_was_recorded_is_refused_by_name_and_changes_nothing),
        cmocka_unit_test(row_6_3_the_middle_of_a_pass_that_is_too_long_to_keep_is_refused_by_name),
        cmocka_unit_test(row_12_any_part_of_a_recorded_draft_is_taken_back_exactly_in_every_kind_of_layer),
        cmocka_unit_test(row_12_a_crop_that_one_row_refuses_crops_none),
        cmocka_unit_test(row_12_a_crop_that_memory_refuses_crops_none),
    };

    printf("seed %u\n", SEED);
    cmocka_set_test_filter(getenv("CMOCKA_TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
