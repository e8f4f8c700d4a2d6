/* SPDX-License-Identifier: Apache-2.0 */
/* Layers of every kind without weights, for fault scripts. */

#include "tests/lib/fault-layers.h"
#include "tests/lib/fault-script.h"

#include <string.h>

typedef struct State {
    uint8_t conv[RANDOM_CONV_BYTES], recurrent[RANDOM_RECURRENT_BYTES];
} State;

/* Of one layer and item: what the pass reads and writes. */
typedef struct States {
    State before, after, steps[RANDOM_MAX_STEPS];
} States;

struct FaultLayers {
    Gpu *gpu;
    const RandomConfig *config;
    Reference *reference;
    GpuBuffer *qkv[RANDOM_MAX_LAYERS], *out[RANDOM_MAX_LAYERS];
    float *qkv_memory[RANDOM_MAX_LAYERS], *out_memory[RANDOM_MAX_LAYERS];
    States *states; /* (layers, SCRIPT_CACHES) */
};

/* ---- life ---------------------------------------------------------------------------------------------------------- */

static int open_layer(FaultLayers *layers, uint32_t l, ErrorDetail *reterr)
{
    size_t in = MAX(reference_row_values(layers->reference, l), reference_cross_values(layers->reference, l)) * sizeof(float);
    size_t out = reference_out_values(layers->reference, l) * sizeof(float);
    int r;

    layers->qkv_memory[l] = calloc(RANDOM_MAX_ROWS, in);
    layers->out_memory[l] = calloc(RANDOM_MAX_ROWS, out);
    if (!layers->qkv_memory[l] || !layers->out_memory[l])
        return -ENOMEM;
    r = gpu_buffer_new(layers->gpu, GPU_PURPOSE_OTHER, RANDOM_MAX_ROWS * in, &layers->qkv[l], reterr);
    return r ? r : gpu_buffer_new(layers->gpu, GPU_PURPOSE_OTHER, RANDOM_MAX_ROWS * out, &layers->out[l], reterr);
}

int fault_layers_new(Gpu *gpu, const RandomConfig *config, FaultLayers **ret, ErrorDetail *reterr)
{
    FaultLayers *layers = calloc(1, sizeof(*layers));
    int r = layers ? 0 : -ENOMEM;

    if (r)
        return r;
    *layers = (FaultLayers){.gpu = gpu, .config = config, .reference = reference_new(config)};
    layers->states = calloc((size_t)RANDOM_MAX_LAYERS * SCRIPT_CACHES, sizeof(States));
    r = layers->states ? 0 : -ENOMEM;
    for (uint32_t l = 0; l < config->n_layers && !r; l++)
        r = open_layer(layers, l, reterr);
    if (r)
        layers = fault_layers_free(layers);
    *ret = layers;
    return r;
}

FaultLayers *fault_layers_free(FaultLayers *layers)
{
    if (!layers)
        return NULL;
    for (uint32_t l = 0; l < layers->config->n_layers; l++) {
        (void)gpu_buffer_free(layers->qkv[l]);
        (void)gpu_buffer_free(layers->out[l]);
        gpu_free_host(layers->gpu, layers->qkv_memory[l]);
        gpu_free_host(layers->gpu, layers->out_memory[l]);
    }
    gpu_free_host(layers->gpu, layers->states);
    (void)reference_free(layers->reference);
    free(layers);
    return NULL;
}

int fault_layers_store(const FaultLayers *layers, const RandomConfig *config, KvStore **ret, ErrorDetail *reterr)
{
    return random_store_new(layers->gpu, config, layers->reference, ret, reterr);
}

/* ---- passes -------------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 31;
}

/* The state after the first @n tokens; of none zeros. */
static void state_after(uint32_t l, const FaultItem *item, uint32_t n, State *ret)
{
    uint64_t hash = 0;

    for (uint32_t i = 0; i < n; i++)
        hash = mix(hash + 1, (uint32_t)item->ids[i]) | 1;
    reference_state(l, 0, hash, ret->conv, sizeof(ret->conv));
    reference_state(l, 1, hash, ret->recurrent, sizeof(ret->recurrent));
}

static int write_state(FaultLayers *layers, const KvState *at, uint64_t conv, uint64_t recurrent, const State *state)
{
    int r = gpu_upload(layers->gpu, GPU_QUEUE_COMPUTE, at->buffer, conv, state->conv, sizeof(state->conv), GPU_WAIT_NONE, "conv", NULL);

    return r ? r
             : gpu_upload(layers->gpu, GPU_QUEUE_COMPUTE, at->buffer, recurrent, state->recurrent, sizeof(state->recurrent), GPU_WAIT_NONE,
                          "recurrent", NULL);
}

static int read_state(FaultLayers *layers, const KvState *at, State *ret)
{
    int r = gpu_download(layers->gpu, GPU_QUEUE_COMPUTE, at->buffer, at->conv_from, ret->conv, sizeof(ret->conv), GPU_WAIT_NONE, "conv", NULL);

    return r ? r
             : gpu_download(layers->gpu, GPU_QUEUE_COMPUTE, at->buffer, at->recurrent_from, ret->recurrent, sizeof(ret->recurrent),
                            GPU_WAIT_NONE, "recurrent", NULL);
}

static int queue_states(FaultLayers *layers, KvPass *pass, uint32_t l, const FaultItem *items, uint32_t n_items, ErrorDetail *reterr)
{
    int r = 0;

    for (uint32_t i = 0; i < n_items && !r; i++) {
        States *s = &layers->states[l * SCRIPT_CACHES + i];
        uint32_t before = kv_cache_length(items[i].cache);
        KvState at;

        r = kv_pass_state(pass, l, i, &at, reterr);
        state_after(l, &items[i], before + items[i].n_tokens, &s->after);
        if (!r)
            r = read_state(layers, &at, &s->before);
        if (!r)
            r = write_state(layers, &at, at.conv_to, at.recurrent_to, &s->after);
        MUST(r || at.n_steps <= RANDOM_MAX_STEPS);
        for (uint32_t t = 0; !r && t < at.n_steps; t++) {
            uint64_t conv, recurrent;

            state_after(l, &items[i], before + t + 1, &s->steps[t]);
            r = kv_pass_state_step(pass, l, i, t + 1, &conv, &recurrent, reterr);
            if (!r)
                r = write_state(layers, &at, conv, recurrent, &s->steps[t]);
        }
    }
    return r;
}

static int queue_attention(FaultLayers *layers, KvPass *pass, uint32_t l, const FaultItem *items, uint32_t n_items, ErrorDetail *reterr)
{
    uint32_t in = reference_row_values(layers->reference, l), out = reference_out_values(layers->reference, l), n_rows = 0;
    int r;

    for (uint32_t i = 0; i < n_items; i++)
        for (uint32_t t = 0, before = kv_cache_length(items[i].cache); t < items[i].n_tokens; t++, n_rows++)
            reference_row(layers->reference, l, (uint32_t)items[i].ids[before + t], before + t, layers->qkv_memory[l] + (size_t)n_rows * in);
    r = gpu_upload(layers->gpu, GPU_QUEUE_COMPUTE, layers->qkv[l], 0, layers->qkv_memory[l], (uint64_t)n_rows * in * sizeof(float),
                   GPU_WAIT_NONE, "qkv", NULL);
    if (!r)
        r = kv_pass_layer(pass, l, layers->qkv[l], layers->out[l], reterr);
    return r ? r
             : gpu_download(layers->gpu, GPU_QUEUE_COMPUTE, layers->out[l], 0, layers->out_memory[l], (uint64_t)n_rows * out * sizeof(float),
                            GPU_WAIT_NONE, "out", NULL);
}

static int queue_layers(FaultLayers *layers, KvPass *pass, const FaultItem *items, uint32_t n_items, ErrorDetail *reterr)
{
    int r = 0;

    for (uint32_t l = 0; l < layers->config->n_layers && !r; l++) {
        if (layers->config->layers[l].state)
            r = queue_states(layers, pass, l, items, n_items, reterr);
        if (!r && layers->config->layers[l].kind != RANDOM_NONE)
            r = queue_attention(layers, pass, l, items, n_items, reterr);
    }
    return r ? r : kv_pass_prefetch(pass);
}

/* Everything is queued, or was not with @r: as a model ends its passes. */
static int end_pass(FaultLayers *layers, KvPass *pass, int r, ErrorDetail *reterr)
{
    if (!r)
        r = gpu_step_finish(layers->gpu, reterr);
    if (!r)
        return kv_pass_commit(pass);
    gpu_explain(layers->gpu, reterr);
    if (!gpu_is_lost(layers->gpu))
        (void)gpu_drain(layers->gpu, NULL);
    (void)kv_pass_abort(pass);
    return r;
}

static void check_states(const FaultLayers *layers, const FaultItem *items, uint32_t n_items)
{
    for (uint32_t l = 0; l < layers->config->n_layers; l++)
        for (uint32_t i = 0; i < n_items && layers->config->layers[l].state; i++) {
            uint32_t before = kv_cache_length(items[i].cache) - items[i].n_tokens;
            State expected;

            state_after(l, &items[i], before, &expected);
            if (memcmp(&layers->states[l * SCRIPT_CACHES + i].before, &expected, sizeof(expected)) != 0)
                script_fail(__FILE__, __LINE__, "layer %u, item %u: another state than that after %u tokens", l, i, before);
        }
}

/* Of the last token of each item. */
static void fold_outputs(const FaultLayers *layers, const FaultItem *items, uint32_t n_items, float *ret, size_t stride)
{
    for (uint32_t i = 0, row = 0; i < n_items; i++) {
        row += items[i].n_tokens;
        memset(ret + i * stride, 0, stride * sizeof(float));
        for (uint32_t l = 0; l < layers->config->n_layers; l++) {
            uint32_t width = reference_out_values(layers->reference, l), bits;
            uint64_t hash = 0;

            for (uint32_t k = 0; k < width && layers->config->layers[l].kind != RANDOM_NONE; k++) {
                memcpy(&bits, &layers->out_memory[l][(size_t)(row - 1) * width + k], sizeof(bits));
                hash = mix(hash, bits);
            }
            memcpy(ret + i * stride + 2 * l, &hash, sizeof(hash));
        }
    }
}

int fault_layers_forward(FaultLayers *layers, KvStore *store, const FaultItem *items, uint32_t n_items, float *ret, size_t stride,
                         ErrorDetail *reterr)
{
    KvPassItem kv_items[SCRIPT_CACHES];
    KvPass *pass;
    int r;

    for (uint32_t i = 0; i < n_items; i++)
        kv_items[i] = (KvPassItem){items[i].cache, items[i].n_tokens};
    r = gpu_step_begin(layers->gpu);
    if (!r)
        r = kv_pass_begin(store, kv_items, n_items, &pass, reterr);
    if (r)
        return r;
    r = end_pass(layers, pass, queue_layers(layers, pass, items, n_items, reterr), reterr);
    if (r)
        return r;
    check_states(layers, items, n_items);
    if (ret)
        fold_outputs(layers, items, n_items, ret, stride);
    return 0;
}

static int queue_encoder(FaultLayers *layers, KvPass *pass, const FaultItem *item, ErrorDetail *reterr)
{
    uint32_t first = kv_cache_cross_length(item->cache);
    int r = 0;

    for (uint32_t l = 0; l < layers->config->n_layers && !r; l++) {
        uint32_t width = reference_cross_values(layers->reference, l);

        if (width == 0)
            continue;
        for (uint32_t t = 0; t < item->n_tokens; t++)
            reference_cross_row(layers->reference, l, (uint32_t)(mix(item->encoder, first + t) & 0xffffff), first + t,
                                layers->qkv_memory[l] + (size_t)t * width);
        r = gpu_upload(layers->gpu, GPU_QUEUE_COMPUTE, layers->qkv[l], 0, layers->qkv_memory[l],
                       (uint64_t)item->n_tokens * width * sizeof(float), GPU_WAIT_NONE, "encoder output", NULL);
        if (!r)
            r = kv_cross_layer(pass, l, layers->qkv[l], reterr);
    }
    return r;
}

int fault_layers_encode(FaultLayers *layers, KvStore *store, const FaultItem *item, ErrorDetail *reterr)
{
    KvPassItem kv_item = {item->cache, item->n_tokens};
    KvPass *pass;
    int r = gpu_step_begin(layers->gpu);

    if (!r)
        r = kv_cross_begin(store, &kv_item, 1, &pass, reterr);
    return r ? r : end_pass(layers, pass, queue_encoder(layers, pass, item, reterr), reterr);
}
