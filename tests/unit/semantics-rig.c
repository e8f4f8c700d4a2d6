/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores of any layers and policies on the loose device (tests/unit/loose-gpu.c), passes whose every row is checked, counts of copies: for
 * the cases of test-kv-promises.c and test-kv-rollback.c, included by each.
 */

#include "tests/unit/loose-gpu.c"

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
#define N_CROSS    75u

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
    const uint32_t *cross_ids; /* of the encoder output that all see, where layers ask for it */
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
    (void)gpu_drain(&fixture->gpu, NULL);
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
        if (layer->kind == KV_LAYER_SHARED)
            layer = &fixture->layers[layer->source];
        if (layer->kind == KV_LAYER_CHUNKED)
            low = position / layer->window * layer->window;
        memcpy(&state, fixture->out[l]->data + row * width, sizeof(state));
        if (state != (layer->kind == KV_LAYER_CROSS ? loose_expected_cross(form, fixture->cross_ids, N_CROSS)
                                                    : loose_expected_from(form, sequence->ids, low, position)))
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
    assert_int_equal(gpu_step_finish(&fixture->gpu, NULL), 0);
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
_unused_ static uint64_t pages_read(const Fixture *fixture, uint32_t length, uint32_t n_tokens)
{
    return MIN(length / KV_PAGE_TOKENS, kv_packed_pages(fixture->policy.form, length + n_tokens - 1));
}
