/* SPDX-License-Identifier: Apache-2.0 */
/* A model on a compatibility cache, beside one that keeps every token. */

#include "tests/lib/compat-sim.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#define HEADS   2u
#define K_WIDTH 4u
#define V_WIDTH 3u
#define KERNEL  3u
#define WIDTH   5u /* of the recurrent state, and channels of the convolution */

typedef enum Part { PART_Q, PART_K, PART_V, PART_COLUMN } Part;

static float noise(uint32_t id, uint32_t position, uint32_t layer, Part part, uint32_t i)
{
    uint64_t x = ((uint64_t)id << 32 | position << 16 | layer << 10 | (uint32_t)part << 8 | i) * 0x9e3779b97f4a7c15u;

    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
    return (float)(int32_t)((x ^ (x >> 32)) & 0xffffffff) * 0x1p-31f;
}

void sim_init(Sim *sim, const SimLayer *layers, uint32_t n_layers, uint32_t n_rows)
{
    KvCompatLayerSpec specs[SIM_MAX_LAYERS];
    ErrorDetail detail = ERROR_DETAIL_NULL;

    assert_true(n_layers <= SIM_MAX_LAYERS && n_rows <= SIM_MAX_ROWS);
    memset(sim, 0, sizeof(*sim));
    sim->n_layers = n_layers;
    sim->n_rows = n_rows;
    for (uint32_t l = 0; l < n_layers; l++) {
        sim->layers[l] = layers[l];
        specs[l] = layers[l].spec;
    }
    if (kv_compat_new(specs, n_layers, &sim->cache, &detail) != 0)
        fail_msg("%s", detail.text);
}

void sim_deinit(Sim *sim)
{
    sim->cache = kv_compat_free(sim->cache);
}

void sim_copy(const Sim *sim, Sim *ret)
{
    *ret = *sim;
    assert_int_equal(kv_compat_copy(sim->cache, &ret->cache, NULL), 0);
}

/* ---- attention ---------------------------------------------------------------------------------------------------------- */

static KvMask mask_of(const Sim *sim, uint32_t layer, const uint8_t *padding)
{
    const SimLayer *l = &sim->layers[layer];

    return (KvMask){.kind = l->spec.window == 0 ? KV_MASK_CAUSAL : l->chunked ? KV_MASK_CHUNKED : KV_MASK_SLIDING,
                    .window = l->spec.window,
                    .padding = padding,
                    .n_padding = sim->length};
}

/* One head: softmax over the keys that come, in double; the weights are not scaled down by a maximum, as scores are small. */
typedef struct Sum {
    double weight, values[V_WIDTH];
} Sum;

static void add(Sum *sum, const float *q, const float *k, const float *v)
{
    double score = 0, weight;

    for (uint32_t d = 0; d < K_WIDTH; d++)
        score += (double)q[d] * k[d];
    weight = exp(score);
    sum->weight += weight;
    for (uint32_t d = 0; d < V_WIDTH; d++)
        sum->values[d] += weight * v[d];
}

static void make(const Sim *sim, uint32_t row, uint32_t position, uint32_t layer, uint32_t head, Part part, uint32_t n, float *ret)
{
    for (uint32_t d = 0; d < n; d++)
        ret[d] = noise(sim->ids[row][position], position, layer, part, head * n + d);
}

static Sum wanted(const Sim *sim, const KvMask *mask, uint32_t layer, uint32_t row, uint32_t position, uint32_t head)
{
    float q[K_WIDTH], k[K_WIDTH], v[V_WIDTH];
    Sum sum = {0};

    make(sim, row, position, layer, head, PART_Q, K_WIDTH, q);
    for (uint32_t p = 0; p < sim->length; p++) {
        if (!kv_mask_sees(mask, row, position, p))
            continue;
        make(sim, row, p, layer, head, PART_K, K_WIDTH, k);
        make(sim, row, p, layer, head, PART_V, V_WIDTH, v);
        add(&sum, q, k, v);
    }
    return sum;
}

static Sum found(const Sim *sim, const KvMask *mask, uint32_t layer, uint32_t row, uint32_t position, uint32_t head,
                 const KvTensor *k, const KvTensor *v, uint64_t offset)
{
    float q[K_WIDTH];
    Sum sum = {0};

    make(sim, row, position, layer, head, PART_Q, K_WIDTH, q);
    for (uint32_t j = 0; j < k->n_tokens; j++)
        if (kv_mask_sees(mask, row, position, offset + j))
            add(&sum, q, kv_tensor_at(k, row, head, j), kv_tensor_at(v, row, head, j));
    return sum;
}

/* The tokens from @from on have been appended to the ids. */
static void attend(Sim *sim, uint32_t layer, uint32_t from)
{
    uint32_t n = sim->length - from;
    float *keys = calloc((size_t)sim->n_rows * HEADS * n * K_WIDTH, sizeof(float));
    float *values = calloc((size_t)sim->n_rows * HEADS * n * V_WIDTH, sizeof(float));
    uint8_t *padding = calloc((size_t)sim->n_rows, sim->length);
    KvTensor k = {keys, sim->n_rows, HEADS, n, K_WIDTH, n}, v = {values, sim->n_rows, HEADS, n, V_WIDTH, n}, got_k, got_v;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    uint64_t length, offset;
    KvMask mask = mask_of(sim, layer, padding);

    assert_true(keys && values && padding);
    for (uint32_t b = 0; b < sim->n_rows; b++) {
        for (uint32_t p = 0; p < sim->length; p++)
            padding[b * sim->length + p] = p >= sim->padding[b];
        for (uint32_t h = 0; h < HEADS; h++)
            for (uint32_t t = 0; t < n; t++) {
                size_t at = (size_t)(b * HEADS + h) * n + t;

                make(sim, b, from + t, layer, h, PART_K, K_WIDTH, keys + at * K_WIDTH);
                make(sim, b, from + t, layer, h, PART_V, V_WIDTH, values + at * V_WIDTH);
            }
    }
    assert_int_equal(kv_compat_mask_sizes(sim->cache, layer, n, &length, &offset, NULL), 0);
    if (kv_compat_update(sim->cache, layer, &k, &v, &got_k, &got_v, &detail) != 0)
        fail_msg("%s", detail.text);
    assert_int_equal(got_k.n_tokens, length);
    assert_int_equal(got_v.n_tokens, length);
    for (uint32_t b = 0; b < sim->n_rows; b++)
        for (uint32_t h = 0; h < HEADS; h++)
            for (uint32_t p = from; p < sim->length; p++) {
                Sum a = wanted(sim, &mask, layer, b, p, h), c = found(sim, &mask, layer, b, p, h, &got_k, &got_v, offset);

                if (memcmp(&a, &c, sizeof(a)) != 0)
                    fail_msg("layer %u, row %u, position %u: weight %g, not %g", layer, b, p, c.weight, a.weight);
            }
    free(keys);
    free(values);
    free(padding);
}

/* ---- linear ---------------------------------------------------------------------------------------------------------------- */

/* One step: the last columns of a channel (NULL: before the beginning) into its state. */
static float step(float state, const float *columns)
{
    static const float weights[KERNEL] = {0.25f, -0.5f, 1.0f};

    state *= 0.75f;
    for (uint32_t i = 0; i < KERNEL; i++)
        state += weights[i] * columns[i];
    return state;
}

static void wanted_states(const Sim *sim, uint32_t layer, uint32_t row, float *ret)
{
    for (uint32_t c = 0; c < WIDTH; c++) {
        ret[c] = 0;
        for (uint32_t p = 0; p < sim->length; p++) {
            float columns[KERNEL];

            for (uint32_t i = 0; i < KERNEL; i++)
                columns[i] = p + i + 1 >= KERNEL ? noise(sim->ids[row][p + i + 1 - KERNEL], p + i + 1 - KERNEL, layer, PART_COLUMN, c)
                                                 : 0;
            ret[c] = step(ret[c], columns);
        }
    }
}

/* States after each new token, (rows, n, WIDTH), from what the cache gave back. */
static void run_states(const Sim *sim, const KvTensor *columns, const KvTensor *before, uint32_t n, float *ret)
{
    for (uint32_t b = 0; b < sim->n_rows; b++)
        for (uint32_t c = 0; c < WIDTH; c++) {
            float state = before ? kv_tensor_at(before, b, 0, 0)[c] : 0;

            for (uint32_t t = 0; t < n; t++) {
                float last[KERNEL];

                for (uint32_t i = 0; i < KERNEL; i++) {
                    int64_t at = (int64_t)columns->n_tokens - n + t + i + 1 - KERNEL;

                    last[i] = at >= 0 ? *kv_tensor_at(columns, b, c, (uint32_t)at) : 0;
                }
                state = step(state, last);
                ret[((size_t)b * n + t) * WIDTH + c] = state;
            }
        }
}

static void run_linear(Sim *sim, uint32_t layer, uint32_t from)
{
    uint32_t n = sim->length - from;
    float *x = calloc((size_t)sim->n_rows * WIDTH * n, sizeof(float)), *states = calloc((size_t)sim->n_rows * WIDTH * n, sizeof(float));
    KvTensor columns = {x, sim->n_rows, WIDTH, n, 1, n}, got, before, after;
    KvTensor given = {states, sim->n_rows, 1, n, WIDTH, n};
    bool has_before = kv_compat_recurrent(sim->cache, layer, 0, &before, NULL) == 0;

    assert_true(x && states);
    for (uint32_t b = 0; b < sim->n_rows; b++)
        for (uint32_t c = 0; c < WIDTH; c++)
            for (uint32_t t = 0; t < n; t++)
                x[((size_t)b * WIDTH + c) * n + t] = noise(sim->ids[b][from + t], from + t, layer, PART_COLUMN, c);
    assert_int_equal(kv_compat_update_conv(sim->cache, layer, 0, KERNEL, &columns, &got, NULL), 0);
    run_states(sim, &got, has_before ? &before : NULL, n, states);
    if (!sim->recording) { /* only the last */
        given.values += (size_t)(n - 1) * WIDTH;
        given.n_tokens = 1;
    }
    assert_int_equal(kv_compat_update_recurrent(sim->cache, layer, 0, n, &given, NULL), 0);
    assert_int_equal(kv_compat_recurrent(sim->cache, layer, 0, &after, NULL), 0);
    for (uint32_t b = 0; b < sim->n_rows; b++) {
        float expected[WIDTH];

        wanted_states(sim, layer, b, expected);
        if (memcmp(expected, kv_tensor_at(&after, b, 0, 0), sizeof(expected)) != 0)
            fail_msg("layer %u, row %u: the state after %u tokens is wrong", layer, b, sim->length);
    }
    free(x);
    free(states);
}

/* ---- operations -------------------------------------------------------------------------------------------------------------- */

static void forward(Sim *sim, uint32_t from)
{
    for (uint32_t l = 0; l < sim->n_layers; l++) {
        if (sim->layers[l].spec.linear)
            run_linear(sim, l, from);
        if (sim->layers[l].spec.kind != KV_COMPAT_DUMMY)
            attend(sim, l, from);
    }
}

void sim_feed(Sim *sim, uint32_t n_tokens, uint32_t seed)
{
    uint32_t from = sim->length;

    assert_true(from + n_tokens <= SIM_MAX_TOKENS);
    for (uint32_t b = 0; b < sim->n_rows; b++)
        for (uint32_t t = 0; t < n_tokens; t++)
            sim->ids[b][from + t] = seed * 64 + b;
    sim->length += n_tokens;
    forward(sim, from);
}

void sim_feed_again(Sim *sim, const Sim *before, uint32_t n_tokens)
{
    uint32_t from = sim->length;

    assert_true(from + n_tokens <= before->length);
    for (uint32_t b = 0; b < sim->n_rows; b++)
        memcpy(sim->ids[b] + from, before->ids[b] + from, n_tokens * sizeof(uint32_t));
    sim->length += n_tokens;
    forward(sim, from);
}

void sim_record(Sim *sim)
{
    kv_compat_record(sim->cache);
    sim->recording = true;
}

int sim_crop(Sim *sim, int64_t n)
{
    int r = kv_compat_crop(sim->cache, n, NULL);

    if (r == 0)
        sim->length -= (uint32_t)-n;
    return r;
}

int sim_select(Sim *sim, const uint32_t *rows, uint32_t n_rows)
{
    Sim old = *sim;
    int r = kv_compat_select(sim->cache, rows, n_rows, NULL);

    if (r != 0)
        return r;
    sim->n_rows = n_rows;
    for (uint32_t b = 0; b < n_rows; b++) {
        memcpy(sim->ids[b], old.ids[rows[b]], sizeof(sim->ids[b]));
        sim->padding[b] = old.padding[rows[b]];
    }
    return 0;
}

void sim_reset(Sim *sim)
{
    kv_compat_reset(sim->cache);
    sim->length = 0;
}
