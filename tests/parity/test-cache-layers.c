/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layers of every kind on a real device: each growth, home, transfer and form gives what a plain computation in double precision gives,
 * and where the form is the same, the same bits as the dynamic cache on the device; also when the sequence moves in between.
 */

#include "cache/kv-migrate.h"
#include "tests/lib/patience.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define SEED     17u
#define N_TOKENS 420u
#define N_CROSS  75u
#define MAX_ROWS 160u
#define N_LAYERS 6
#define HEADS    4u
#define KV_HEADS 2u
#define K_DIM    64u
#define V_DIM    32u
#define WIDTH    (HEADS * V_DIM)

static const KvShape cross_shape = {.n_heads = HEADS, .n_kv_heads = KV_HEADS, .k_head_dim = K_DIM, .v_head_dim = V_DIM};

static const KvLayer layers[N_LAYERS] = {
    {.kind = KV_LAYER_FULL},
    {.kind = KV_LAYER_SLIDING, .window = 70},
    {.kind = KV_LAYER_NONE},
    {.kind = KV_LAYER_CHUNKED, .window = 96},
    {.kind = KV_LAYER_CROSS, .shape = cross_shape},
    {.kind = KV_LAYER_SHARED, .source = 1},
};

typedef float Stream[N_LAYERS][N_TOKENS][WIDTH];

typedef struct Fixture {
    Gpu *gpu;
    KvModel model;
    float inv_freq[K_DIM / 2], means[N_LAYERS][KV_HEADS * (K_DIM + V_DIM)];
    KvCalibration calibration[N_LAYERS];
    GpuBuffer *qkv, *out;
    float *qkv_memory;
    Stream *base[KV_FORM_LEAT + 1]; /* dynamic, on the device */
    double (*reference)[N_TOKENS][WIDTH];
} Fixture;

/* ---- the made-up model ------------------------------------------------------------------------------------------------- */

/* A number in [-1, 1) from a hash. */
static float noise(uint32_t layer, uint32_t position, uint32_t column)
{
    uint64_t key = ((uint64_t)SEED << 48) ^ ((uint64_t)layer << 40) ^ ((uint64_t)position << 16) ^ column;

    key = (key ^ (key >> 31)) * 0x9e3779b97f4a7c15u;
    key = (key ^ (key >> 29)) * 0xbf58476d1ce4e5b9u;
    return (float)(int32_t)(key >> 32) * 0x1p-31f;
}

/* Keys and values of a shared layer are its source's. */
static uint32_t owner_of(uint32_t layer)
{
    return layers[layer].kind == KV_LAYER_SHARED ? layers[layer].source : layer;
}

static float query_value(uint32_t layer, uint32_t position, uint32_t column)
{
    return 2.0f * noise(layer, position, column);
}

static float key_value(uint32_t layer, uint32_t position, uint32_t column)
{
    return 2.0f * noise(owner_of(layer), position, 1000 + column);
}

static float value_value(uint32_t layer, uint32_t position, uint32_t column)
{
    return noise(owner_of(layer), position, 2000 + column);
}

/* Element @d of a head of @dim elements turned to @position. */
static double turned(const Fixture *fixture, float (*value)(uint32_t, uint32_t, uint32_t), uint32_t layer, uint32_t position, uint32_t head,
                     uint32_t d)
{
    uint32_t half = K_DIM / 2, f = d % half;
    double angle = (double)((float)position * fixture->inv_freq[f]);
    double low = value(layer, position, head * K_DIM + f), high = value(layer, position, head * K_DIM + f + half);

    if (layers[layer].kind == KV_LAYER_CROSS)
        return value(layer, position, head * K_DIM + d);
    return d < half ? low * cos(angle) - high * sin(angle) : high * cos(angle) + low * sin(angle);
}

static void visible(uint32_t layer, uint32_t position, uint32_t *first, uint32_t *end)
{
    const KvLayer *l = &layers[owner_of(layer)];

    *first = 0;
    *end = position + 1;
    if (l->kind == KV_LAYER_SLIDING && position + 1 > l->window)
        *first = position + 1 - l->window;
    if (l->kind == KV_LAYER_CHUNKED)
        *first = position / l->window * l->window;
    if (l->kind == KV_LAYER_CROSS)
        *end = N_CROSS;
}

static void reference_row(const Fixture *fixture, const double *keys, uint32_t layer, uint32_t position, uint32_t head, double *out)
{
    uint32_t first, end, kv_head = head / (HEADS / KV_HEADS);
    double query[K_DIM], weights[N_TOKENS], largest = -INFINITY, sum = 0;

    visible(layer, position, &first, &end);
    for (uint32_t d = 0; d < K_DIM; d++)
        query[d] = turned(fixture, query_value, layer, position, head, d);
    for (uint32_t j = first; j < end; j++) {
        const double *key = keys + ((size_t)j * KV_HEADS + kv_head) * K_DIM;

        weights[j] = 0;
        for (uint32_t d = 0; d < K_DIM; d++)
            weights[j] += query[d] * key[d] * (double)fixture->model.scale;
        largest = fmax(largest, weights[j]);
    }
    for (uint32_t j = first; j < end; j++) {
        weights[j] = exp(weights[j] - largest);
        sum += weights[j];
    }
    for (uint32_t d = 0; d < V_DIM; d++) {
        out[d] = 0;
        for (uint32_t j = first; j < end; j++)
            out[d] += weights[j] / sum * (double)value_value(layer, j, kv_head * V_DIM + d);
    }
}

static void make_reference(Fixture *fixture)
{
    double *keys = calloc((size_t)N_TOKENS * KV_HEADS * K_DIM, sizeof(double));

    fixture->reference = calloc(N_LAYERS, sizeof(fixture->reference[0]));
    assert_true(keys && fixture->reference);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        if (layers[l].kind == KV_LAYER_NONE)
            continue;
        for (uint32_t j = 0; j < N_TOKENS; j++)
            for (uint32_t h = 0; h < KV_HEADS; h++)
                for (uint32_t d = 0; d < K_DIM; d++)
                    keys[((size_t)j * KV_HEADS + h) * K_DIM + d] = turned(fixture, key_value, l, j, h, d);
        for (uint32_t position = 0; position < N_TOKENS; position++)
            for (uint32_t h = 0; h < HEADS; h++)
                reference_row(fixture, keys, l, position, h, &fixture->reference[l][position][h * V_DIM]);
    }
    free(keys);
}

/* ---- running it ------------------------------------------------------------------------------------------------------------------ */

static void must(int r, const ErrorDetail *detail)
{
    if (r)
        fail_msg("%d: %s", r, detail->text);
}

static void upload_rows(Fixture *fixture, uint32_t layer, uint32_t first, uint32_t n, bool queries, bool keys)
{
    float *row = fixture->qkv_memory;

    for (uint32_t i = first; i < first + n; i++) {
        for (uint32_t c = 0; queries && c < HEADS * K_DIM; c++)
            *row++ = query_value(layer, i, c);
        for (uint32_t c = 0; keys && c < KV_HEADS * K_DIM; c++)
            *row++ = key_value(layer, i, c);
        for (uint32_t c = 0; keys && c < KV_HEADS * V_DIM; c++)
            *row++ = value_value(layer, i, c);
    }
    assert_int_equal(gpu_upload(fixture->gpu, GPU_QUEUE_COMPUTE, fixture->qkv, 0, fixture->qkv_memory,
                                (uint64_t)(row - fixture->qkv_memory) * sizeof(float), GPU_WAIT_NONE, "qkv", NULL),
                     0);
    assert_int_equal(gpu_drain(fixture->gpu, NULL), 0);
}

static void write_cross(Fixture *fixture, KvStore *store, KvCache *cache)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const uint32_t chunks[] = {40, 33, 2};

    for (size_t i = 0; i < N_ELEMENTS(chunks); i++) {
        const KvPassItem item = {cache, chunks[i]};
        KvPass *pass;

        assert_int_equal(gpu_step_begin(fixture->gpu), 0);
        must(kv_cross_begin(store, &item, 1, &pass, &detail), &detail);
        upload_rows(fixture, 4, kv_cache_cross_length(cache), chunks[i], false, true);
        must(kv_cross_layer(pass, 4, fixture->qkv, &detail), &detail);
        must(gpu_step_finish(fixture->gpu, &detail), &detail);
        assert_int_equal(kv_pass_commit(pass), 0);
    }
    assert_int_equal(kv_cache_cross_length(cache), N_CROSS);
}

static void run_pass(Fixture *fixture, KvStore *store, KvCache *cache, uint32_t n, Stream *stream)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    uint32_t length = kv_cache_length(cache);
    const KvPassItem item = {cache, n};
    KvPass *pass;

    assert_int_equal(gpu_step_begin(fixture->gpu), 0);
    must(kv_pass_begin(store, &item, 1, &pass, &detail), &detail);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        if (layers[l].kind == KV_LAYER_NONE)
            continue;
        upload_rows(fixture, l, length, n, true, layers[l].kind != KV_LAYER_CROSS);
        must(kv_pass_layer(pass, l, fixture->qkv, fixture->out, &detail), &detail);
        assert_int_equal(gpu_download(fixture->gpu, GPU_QUEUE_COMPUTE, fixture->out, 0, &(*stream)[l][length],
                                      (uint64_t)n * WIDTH * sizeof(float), GPU_WAIT_NONE, "out", NULL),
                         0);
    }
    assert_int_equal(kv_pass_prefetch(pass), 0);
    must(gpu_step_finish(fixture->gpu, &detail), &detail);
    assert_int_equal(kv_pass_commit(pass), 0);
}

static void run_to(Fixture *fixture, KvStore *store, KvCache *cache, uint32_t end, Stream *stream)
{
    static const uint32_t chunks[] = {150, 1, 1, 33, 1, 70, 5, 100};

    for (size_t i = 0; kv_cache_length(cache) < end; i++)
        run_pass(fixture, store, cache, MIN(end - kv_cache_length(cache), chunks[i % N_ELEMENTS(chunks)]), stream);
}

static KvStore *store_new(Fixture *fixture, const KvPolicy *policy)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvStore *store = NULL;

    must(kv_store_new(fixture->gpu, &fixture->model, policy, &store, &detail), &detail);
    return store;
}

static KvCache *cache_new(KvStore *store)
{
    KvCache *cache = NULL;

    assert_int_equal(kv_cache_new(store, &cache, NULL), 0);
    return cache;
}

static KvPolicy policy_of(KvFormKind kind, KvGrowth growth, KvHome home, KvTransfer transfer, bool only_non_sliding)
{
    KvPolicy policy = kv_policy_preset(kind == KV_FORM_LEAT ? KV_STRATEGY_QUANTIZED : KV_STRATEGY_DYNAMIC, kind == KV_FORM_F32);

    if (kind > KV_FORM_LEAT)
        policy.form = kv_form_default(kind);
    policy.growth = growth;
    policy.home = home;
    policy.transfer = transfer;
    policy.offload_only_non_sliding = only_non_sliding;
    policy.max_cache_tokens = 500;
    policy.tile_blocks = 1;
    return policy;
}

static bool is_windowed(uint32_t layer)
{
    return layers[owner_of(layer)].kind == KV_LAYER_SLIDING || layers[owner_of(layer)].kind == KV_LAYER_CHUNKED;
}

static void assert_close(const Fixture *fixture, const Stream *stream, uint32_t layer, double tolerance, const char *what)
{
    double largest = 0, worst = 0;

    for (uint32_t i = 0; i < N_TOKENS * WIDTH; i++) {
        double expected = (&fixture->reference[layer][0][0])[i];

        largest = fmax(largest, fabs(expected));
        worst = fmax(worst, fabs((double)(&(*stream)[layer][0][0])[i] - expected));
    }
    if (!(worst <= tolerance * largest))
        fail_msg("%s: layer %u is off by %g of %g", what, layer, worst, largest);
}

/* The bits of the dynamic cache in the form that each layer has under @policy. */
static void assert_same(const Fixture *fixture, const Stream *stream, const KvPolicy *policy, const char *what)
{
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        bool stays = is_windowed(l) && policy->home == KV_HOME_HOST && policy->offload_only_non_sliding;
        const Stream *base = fixture->base[stays ? KV_FORM_F32 : policy->form.kind];

        for (uint32_t position = 0; position < N_TOKENS; position++)
            if (memcmp((*stream)[l][position], (*base)[l][position], sizeof((*base)[l][position])) != 0)
                fail_msg("%s: layer %u differs at position %u", what, l, position);
    }
}

/* ---- cases ----------------------------------------------------------------------------------------------------------------------------- */

static void every_kind_of_layer_gives_the_reference(void **state)
{
    static const double tolerances[] = {[KV_FORM_F32] = 1e-5, [KV_FORM_F16] = 2e-3, [KV_FORM_LEAT] = 0.25};
    Fixture *fixture = *state;

    for (uint32_t l = 0; l < N_LAYERS; l++) {
        if (layers[l].kind == KV_LAYER_NONE)
            continue;
        for (int kind = KV_FORM_F32; kind <= KV_FORM_LEAT; kind++)
            assert_close(fixture, fixture->base[kind], l, tolerances[kind], "dynamic");
    }
}

static void every_policy_gives_the_bits_of_the_dynamic_cache(void **state)
{
    Fixture *fixture = *state;
    bool unified = gpu_info(fixture->gpu)->unified_memory;
    Stream *stream = calloc(1, sizeof(*stream));

    assert_non_null(stream);
    for (int kind = KV_FORM_F32; kind <= KV_FORM_LEAT; kind++)
        for (uint32_t i = 1; i < 12; i++) {
            KvTransfer transfer = i / 4 == 2 && unified ? KV_TRANSFER_ZERO_COPY : KV_TRANSFER_COPY;
            KvPolicy policy = policy_of((KvFormKind)kind, i % 2 ? KV_GROWTH_STATIC : KV_GROWTH_DYNAMIC,
                                        i < 4 && i != 2 ? KV_HOME_DEVICE : KV_HOME_HOST, transfer, i / 2 % 2);
            KvStore *store = store_new(fixture, &policy);
            KvCache *cache = cache_new(store);

            write_cross(fixture, store, cache);
            run_to(fixture, store, cache, N_TOKENS, stream);
            assert_same(fixture, stream, &policy, "policy");
            (void)kv_cache_free(cache);
            (void)kv_store_free(store);
        }
    free(stream);
}

static void a_sequence_goes_on_with_the_same_bits_in_another_store(void **state)
{
    Fixture *fixture = *state;
    Stream *stream = calloc(1, sizeof(*stream));

    assert_non_null(stream);
    for (int kind = KV_FORM_F32; kind <= KV_FORM_LEAT; kind++) {
        KvPolicy policies[] = {policy_of((KvFormKind)kind, KV_GROWTH_DYNAMIC, KV_HOME_DEVICE, KV_TRANSFER_AUTO, false),
                               policy_of((KvFormKind)kind, KV_GROWTH_DYNAMIC, KV_HOME_HOST, KV_TRANSFER_COPY, false),
                               policy_of((KvFormKind)kind, KV_GROWTH_STATIC, KV_HOME_HOST, KV_TRANSFER_AUTO, false),
                               policy_of((KvFormKind)kind, KV_GROWTH_STATIC, KV_HOME_DEVICE, KV_TRANSFER_AUTO, false)};
        KvStore *store = store_new(fixture, &policies[0]), *next;
        KvCache *cache = cache_new(store);

        write_cross(fixture, store, cache);
        for (size_t i = 0; i < N_ELEMENTS(policies); i++) {
            run_to(fixture, store, cache, 90 + 70 * (uint32_t)i, stream);
            next = store_new(fixture, &policies[(i + 1) % N_ELEMENTS(policies)]);
            assert_int_equal(kv_store_migrate(store, next, false, NULL), 0);
            (void)kv_store_free(store);
            store = next;
        }
        run_to(fixture, store, cache, N_TOKENS, stream);
        assert_same(fixture, stream, &policies[0], "moved");
        (void)kv_cache_free(cache);
        (void)kv_store_free(store);
    }
    free(stream);
}

static void assert_range_close(const Fixture *fixture, const Stream *stream, uint32_t layer, uint32_t first, double tolerance,
                               const char *what)
{
    double largest = 0, worst = 0;

    for (uint32_t i = first * WIDTH; i < N_TOKENS * WIDTH; i++) {
        double expected = (&fixture->reference[layer][0][0])[i];

        largest = fmax(largest, fabs(expected));
        worst = fmax(worst, fabs((double)(&(*stream)[layer][0][0])[i] - expected));
    }
    if (!(worst <= tolerance * largest))
        fail_msg("%s: layer %u is off by %g of %g", what, layer, worst, largest);
}

/* Recent tokens and sinks stay in full precision, pages are coded from what they stand for: the answers stay as close as the form is. */
static void a_sequence_takes_another_form_when_asked(void **state)
{
    static const struct {
        KvFormKind from, to;
        double tolerance;
    } rows[] = {{KV_FORM_F32, KV_FORM_F16, 2e-3}, {KV_FORM_F16, KV_FORM_F32, 2e-3}, {KV_FORM_F16, KV_FORM_LEAT, 0.25},
                {KV_FORM_LEAT, KV_FORM_F32, 0.25}, {KV_FORM_F32, KV_FORM_QUANTO, 0.3}, {KV_FORM_QUANTO, KV_FORM_LEAT, 0.35},
                {KV_FORM_LEAT, KV_FORM_FP8, 0.4}};
    Fixture *fixture = *state;
    Stream *stream = calloc(1, sizeof(*stream));

    assert_non_null(stream);
    for (size_t i = 0; i < N_ELEMENTS(rows); i++)
        for (uint32_t home = 0; home < 2; home++) {
            KvPolicy from = policy_of(rows[i].from, KV_GROWTH_DYNAMIC, home ? KV_HOME_HOST : KV_HOME_DEVICE, KV_TRANSFER_AUTO, false);
            KvPolicy to = policy_of(rows[i].to, KV_GROWTH_DYNAMIC, home ? KV_HOME_DEVICE : KV_HOME_HOST, KV_TRANSFER_COPY, false);
            KvStore *store = store_new(fixture, &from), *next = store_new(fixture, &to);
            KvCache *cache = cache_new(store);

            write_cross(fixture, store, cache);
            run_to(fixture, store, cache, 300, stream);
            assert_int_equal(kv_store_migrate(store, next, false, NULL), -EINVAL);
            assert_int_equal(kv_store_migrate(store, next, true, NULL), 0);
            (void)kv_store_free(store);
            run_to(fixture, next, cache, N_TOKENS, stream);
            for (uint32_t l = 0; l < N_LAYERS; l++)
                if (layers[l].kind != KV_LAYER_NONE)
                    assert_range_close(fixture, stream, l, 300, rows[i].tolerance, "another form");
            (void)kv_cache_free(cache);
            (void)kv_store_free(next);
        }
    free(stream);
}

/* Rows change places, are doubled and dropped while all go on. */
static void rearranged_rows_go_on_as_if_alone(void **state)
{
    Fixture *fixture = *state;
    KvPolicy policy = policy_of(KV_FORM_LEAT, KV_GROWTH_DYNAMIC, KV_HOME_HOST, KV_TRANSFER_COPY, true);
    KvStore *store = store_new(fixture, &policy);
    const uint32_t reorder[] = {1, 1}, select[] = {3, 0};
    KvCache *caches[4] = {cache_new(store), NULL};
    Stream *stream = calloc(1, sizeof(*stream));

    assert_non_null(stream);
    write_cross(fixture, store, caches[0]);
    run_to(fixture, store, caches[0], 100, stream);
    assert_int_equal(kv_caches_repeat(caches, 1, 2, NULL), 0);
    run_to(fixture, store, caches[1], 190, stream);
    assert_int_equal(kv_caches_reorder(caches, 2, reorder, NULL), 0);
    run_to(fixture, store, caches[0], 260, stream);
    run_to(fixture, store, caches[1], 230, stream);
    assert_int_equal(kv_caches_repeat(caches, 2, 2, NULL), 0);
    assert_int_equal(kv_caches_select(caches, 4, select, 2, NULL), 0);
    assert_int_equal(kv_cache_length(caches[0]), 230);
    assert_int_equal(kv_cache_length(caches[1]), 260);
    run_to(fixture, store, caches[0], N_TOKENS, stream);
    run_to(fixture, store, caches[1], N_TOKENS, stream);
    assert_same(fixture, stream, &policy, "rows");
    assert_int_equal(kv_caches_reorder(caches, 2, (uint32_t[]){0, 2}, NULL), -EINVAL);
    (void)kv_cache_free(caches[0]);
    (void)kv_cache_free(caches[1]);
    (void)kv_store_free(store);
    free(stream);
}

static void a_windowed_layer_keeps_only_what_can_be_seen(void **state)
{
    static const KvLayer windows[] = {{.kind = KV_LAYER_SLIDING, .window = 70}, {.kind = KV_LAYER_CHUNKED, .window = 96}};
    Fixture *fixture = *state;
    uint64_t block = 256ull * KV_HEADS * (K_DIM + V_DIM) * sizeof(float);
    KvPolicy policy = policy_of(KV_FORM_F32, KV_GROWTH_DYNAMIC, KV_HOME_HOST, KV_TRANSFER_COPY, false);
    KvModel model = fixture->model;
    KvStore *store = NULL;
    KvCache *cache;
    KvBytes bytes;

    policy.max_cache_tokens = 4000;
    model.layers = windows;
    model.n_layers = 2;
    assert_int_equal(kv_store_new(fixture->gpu, &model, &policy, &store, NULL), 0);
    cache = cache_new(store);
    for (uint32_t done = 0; done < 1600; done += MAX_ROWS) {
        const KvPassItem item = {cache, MAX_ROWS};
        KvPass *pass;

        assert_int_equal(gpu_step_begin(fixture->gpu), 0);
        assert_int_equal(kv_pass_begin(store, &item, 1, &pass, NULL), 0);
        for (uint32_t l = 0; l < 2; l++) {
            upload_rows(fixture, l, 0, MAX_ROWS, true, true);
            assert_int_equal(kv_pass_layer(pass, l, fixture->qkv, fixture->out, NULL), 0);
        }
        assert_int_equal(gpu_step_finish(fixture->gpu, NULL), 0);
        assert_int_equal(kv_pass_commit(pass), 0);
        if (done == 2 * MAX_ROWS)
            assert_int_equal(kv_cache_record(cache, true), 0);
        kv_cache_bytes(cache, &bytes);
        if (done == 8 * MAX_ROWS) {
            assert_true(bytes.host > 2 * 2 * block); /* recorded */
            assert_int_equal(kv_caches_crop(&cache, 1, 0, NULL), 0);
            assert_int_equal(kv_cache_record(cache, false), 0);
            kv_cache_bytes(cache, &bytes);
        }
        assert_true((done >= 2 * MAX_ROWS && done < 8 * MAX_ROWS) || bytes.host <= 2 * 2 * block);
    }
    assert_int_equal(kv_cache_length(cache), 1600);
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);
}

/* ---- set-up ------------------------------------------------------------------------------------------------------------------------------- */

static int setup(void **state)
{
    Fixture *fixture = calloc(1, sizeof(*fixture));
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuOptions options = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC};
    int r;

    assert_non_null(fixture);
    r = gpu_open(&options, &fixture->gpu, &detail);
    if (r) {
        print_message("no device: %s\n", detail.text);
        return -1;
    }
    for (uint32_t f = 0; f < K_DIM / 2; f++)
        fixture->inv_freq[f] = (float)pow(10000.0, -2.0 * f / K_DIM);
    for (uint32_t l = 0; l < N_LAYERS; l++) { /* any means will do: what they take is given back */
        for (uint32_t i = 0; i < KV_HEADS * (K_DIM + V_DIM); i++)
            fixture->means[l][i] = 0.5f * noise(l, 9999, i);
        fixture->calibration[l] = (KvCalibration){.k_mean = fixture->means[l], .v_mean = fixture->means[l] + KV_HEADS * K_DIM,
                                                  .k_largest = 2, .v_largest = 1};
    }
    fixture->model = (KvModel){
        .calibration = fixture->calibration,
        .n_layers = N_LAYERS,
        .layers = layers,
        .shape = {.n_heads = HEADS, .n_kv_heads = KV_HEADS, .k_head_dim = K_DIM, .v_head_dim = V_DIM, .rotary_dim = K_DIM},
        .scale = 0.125f,
        .inv_freq = fixture->inv_freq,
        .exact = true,
        .max_rows = MAX_ROWS,
        .max_sequences = 2,
        .max_cross_tokens = 100,
    };
    fixture->qkv_memory = calloc(MAX_ROWS * 1024, sizeof(float));
    assert_int_equal(gpu_buffer_new(fixture->gpu, GPU_PURPOSE_OTHER, MAX_ROWS * 1024 * sizeof(float), &fixture->qkv, NULL), 0);
    assert_int_equal(gpu_buffer_new(fixture->gpu, GPU_PURPOSE_OTHER, MAX_ROWS * WIDTH * sizeof(float), &fixture->out, NULL), 0);
    make_reference(fixture);
    for (int kind = KV_FORM_F32; kind <= KV_FORM_LEAT; kind++) {
        KvPolicy policy = policy_of((KvFormKind)kind, KV_GROWTH_DYNAMIC, KV_HOME_DEVICE, KV_TRANSFER_AUTO, false);
        KvStore *store = store_new(fixture, &policy);
        KvCache *cache = cache_new(store);

        fixture->base[kind] = calloc(1, sizeof(Stream));
        assert_non_null(fixture->base[kind]);
        write_cross(fixture, store, cache);
        run_to(fixture, store, cache, N_TOKENS, fixture->base[kind]);
        (void)kv_cache_free(cache);
        (void)kv_store_free(store);
    }
    *state = fixture;
    return 0;
}

static int teardown(void **state)
{
    Fixture *fixture = *state;

    for (int kind = KV_FORM_F32; kind <= KV_FORM_LEAT; kind++)
        free(fixture->base[kind]);
    free(fixture->reference);
    free(fixture->qkv_memory);
    (void)gpu_buffer_free(fixture->qkv);
    (void)gpu_buffer_free(fixture->out);
    (void)gpu_free(fixture->gpu);
    free(fixture);
    return 0;
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_of_layer_gives_the_reference),
        cmocka_unit_test(every_policy_gives_the_bits_of_the_dynamic_cache),
        cmocka_unit_test(a_sequence_goes_on_with_the_same_bits_in_another_store),
        cmocka_unit_test(a_sequence_takes_another_form_when_asked),
        cmocka_unit_test(rearranged_rows_go_on_as_if_alone),
        cmocka_unit_test(a_windowed_layer_keeps_only_what_can_be_seen),
    };

    printf("seed %u\n", SEED);
    return cmocka_run_group_tests(tests, setup, teardown);
}
