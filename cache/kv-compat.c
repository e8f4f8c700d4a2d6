/* SPDX-License-Identifier: Apache-2.0 */
/* Compatibility caches: making them, and what one layer takes in. */

#include "cache/kv-compat-internal.h"

/* More layers than any model has; what a mistake would ask for. */
#define MAX_LAYERS 65536
#define MAX_STATES 64

void kv_compat_layer_deinit(KvCompatLayer *layer)
{
    if (layer->class && layer->self)
        (void)layer->class->free(layer->self);
    (void)kv_linear_free(layer->linear);
    *layer = (KvCompatLayer){0};
}

static int check_spec(const KvCompatLayerSpec *spec, uint32_t i, ErrorDetail *reterr)
{
    bool sliding = spec->kind == KV_COMPAT_SLIDING || spec->kind == KV_COMPAT_STATIC_SLIDING;
    bool fixed = spec->kind == KV_COMPAT_STATIC || spec->kind == KV_COMPAT_STATIC_SLIDING;

    if ((uint32_t)spec->kind >= KV_COMPAT_KIND_X_MAX)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "layer %u: unknown kind %d", i, (int)spec->kind);
    if (sliding && spec->window == 0)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "layer %u: a window of 0 tokens", i);
    if (fixed && (spec->max_tokens == 0 || spec->max_tokens > UINT32_MAX / 4))
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "layer %u: a capacity of %u tokens", i, spec->max_tokens);
    if (spec->kind == KV_COMPAT_OTHER && (!spec->class || !spec->state))
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "layer %u: no class or no state", i);
    if (spec->n_states > MAX_STATES)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "layer %u: %u pairs of states", i, spec->n_states);
    return 0;
}

static int new_attention(const KvCompatLayerSpec *spec, const KvCompatClass **ret_class, void **ret)
{
    switch (spec->kind) {
    case KV_COMPAT_DYNAMIC:
        *ret_class = &kv_compat_dynamic_class;
        return kv_compat_dynamic_new(ret);
    case KV_COMPAT_STATIC:
        *ret_class = &kv_compat_static_class;
        return kv_compat_static_new(spec->max_tokens, ret);
    case KV_COMPAT_SLIDING:
        *ret_class = &kv_compat_sliding_class;
        return kv_compat_sliding_new(spec->window, ret);
    case KV_COMPAT_STATIC_SLIDING:
        *ret_class = &kv_compat_static_sliding_class;
        return kv_compat_static_sliding_new(spec->window, spec->max_tokens, ret);
    case KV_COMPAT_OTHER: /* given when everything else has succeeded */
    case KV_COMPAT_DUMMY:
    case KV_COMPAT_KIND_X_MAX:
        break;
    }
    return 0;
}

static int init_layer(KvCompatLayer *layer, const KvCompatLayerSpec *spec, ErrorDetail *reterr)
{
    int r;

    *layer = (KvCompatLayer){0};
    r = new_attention(spec, &layer->class, &layer->self);
    if (r == 0 && spec->linear)
        r = kv_linear_new(MAX(spec->n_states, 1u), &layer->linear);
    if (r < 0) {
        kv_compat_layer_deinit(layer);
        return error_detail_set(reterr, error_trace(r), "no memory for a layer");
    }
    return 0;
}

int kv_compat_new(const KvCompatLayerSpec *layers, uint32_t n_layers, KvCompat **ret, ErrorDetail *reterr)
{
    _cleanup_(kv_compat_freep) KvCompat *cache = NULL;
    int r;

    if (n_layers > MAX_LAYERS)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "%u layers", n_layers);
    for (uint32_t i = 0; i < n_layers; i++) {
        r = check_spec(&layers[i], i, reterr);
        if (r != 0)
            return r;
    }
    cache = calloc(1, sizeof(*cache));
    if (cache)
        cache->layers = calloc(MAX(n_layers, 1u), sizeof(cache->layers[0]));
    if (!cache || !cache->layers)
        return error_detail_set(reterr, error_origin(-ENOMEM), "no memory for %u layers", n_layers);
    for (; cache->n_layers < n_layers; cache->n_layers++) {
        r = init_layer(&cache->layers[cache->n_layers], &layers[cache->n_layers], reterr);
        if (r < 0)
            return r;
    }
    for (uint32_t i = 0; i < n_layers; i++)
        if (layers[i].kind == KV_COMPAT_OTHER) {
            cache->layers[i].class = layers[i].class;
            cache->layers[i].self = layers[i].state;
        }
    *ret = TAKE_PTR(cache);
    return 0;
}

int kv_compat_new_replicating(const KvCompatLayerSpec *replicate, KvCompat **ret, ErrorDetail *reterr)
{
    int r;

    if (replicate->kind == KV_COMPAT_OTHER)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "a state of a foreign class cannot be replicated");
    r = check_spec(replicate, 0, reterr);
    if (r == 0)
        r = kv_compat_new(NULL, 0, ret, reterr);
    if (r != 0)
        return r;
    (*ret)->grows = true;
    (*ret)->replicate = *replicate;
    return 0;
}

KvCompat *kv_compat_free(KvCompat *cache)
{
    if (!cache)
        return NULL;
    for (uint32_t i = 0; i < cache->n_layers; i++)
        kv_compat_layer_deinit(&cache->layers[i]);
    free(cache->layers);
    free(cache);
    return NULL;
}

static void record(KvCompatLayer *layer)
{
    if (layer->class && layer->class->record)
        layer->class->record(layer->self);
    if (layer->linear)
        kv_linear_record(layer->linear);
}

void kv_compat_record(KvCompat *cache)
{
    cache->recording = true;
    for (uint32_t i = 0; i < cache->n_layers; i++)
        record(&cache->layers[i]);
}

/* Layers up to @layer, when the cache makes them. */
static int grow(KvCompat *cache, uint32_t layer, ErrorDetail *reterr)
{
    KvCompatLayer *layers;
    uint32_t n = layer + 1;

    if (layer < cache->n_layers)
        return 0;
    if (!cache->grows || layer >= MAX_LAYERS)
        return error_detail_set(reterr, KV_COMPAT_E_INDEX, "layer %u of a cache with %u", layer, cache->n_layers);
    layers = realloc(cache->layers, n * sizeof(layers[0]));
    if (!layers)
        return error_detail_set(reterr, error_origin(-ENOMEM), "no memory for %u layers", n);
    cache->layers = layers;
    for (uint32_t i = cache->n_layers; i < n; i++) {
        int r = init_layer(&layers[i], &cache->replicate, reterr);

        if (r < 0) {
            while (i-- > cache->n_layers)
                kv_compat_layer_deinit(&layers[i]);
            return r;
        }
        if (cache->recording)
            record(&layers[i]);
    }
    cache->n_layers = n;
    return 0;
}

static int check_tokens(const KvCompatLayer *layer, uint32_t index, const KvTensor *k, const KvTensor *v, ErrorDetail *reterr)
{
    if (k->n_tokens == 0 || k->n_rows == 0 || k->n_heads == 0 || k->width == 0 || v->width == 0)
        return error_detail_set(reterr, KV_COMPAT_E_SHAPE, "layer %u: nothing to take in", index);
    if (k->n_rows != v->n_rows || k->n_heads != v->n_heads || k->n_tokens != v->n_tokens)
        return error_detail_set(reterr, KV_COMPAT_E_SHAPE, "layer %u: keys (%u, %u, %u) and values (%u, %u, %u) disagree", index,
                                k->n_rows, k->n_heads, k->n_tokens, v->n_rows, v->n_heads, v->n_tokens);
    if (!layer->initialised)
        return 0;
    if (k->n_heads != layer->n_heads || k->width != layer->k_width || v->width != layer->v_width)
        return error_detail_set(reterr, KV_COMPAT_E_SHAPE, "layer %u: %u heads of %u and %u, not of %u: %u and %u", index,
                                layer->n_heads, layer->k_width, layer->v_width, k->n_heads, k->width, v->width);
    if (k->n_rows != layer->n_rows && layer->class->length(layer->self) > 0)
        return error_detail_set(reterr, KV_COMPAT_E_SHAPE, "layer %u: %u rows cannot follow %u", index, k->n_rows, layer->n_rows);
    return 0;
}

int kv_compat_update(KvCompat *cache, uint32_t layer, const KvTensor *k, const KvTensor *v, KvTensor *ret_k, KvTensor *ret_v,
                     ErrorDetail *reterr)
{
    uint32_t n_before = cache->n_layers;
    KvCompatLayer *l;
    int r = grow(cache, layer, reterr);

    if (r != 0)
        return r;
    l = &cache->layers[layer];
    if (!l->class)
        r = error_detail_set(reterr, KV_COMPAT_E_NO_STATE, "layer %u stores no keys and values", layer);
    if (r == 0)
        r = check_tokens(l, layer, k, v, reterr);
    if (r == 0)
        r = l->class->update(l->self, k, v, ret_k, ret_v, reterr);
    if (r != 0) {
        while (cache->n_layers > n_before)
            kv_compat_layer_deinit(&cache->layers[--cache->n_layers]);
        return r;
    }
    l->initialised = true;
    l->n_rows = k->n_rows;
    l->n_heads = k->n_heads;
    l->k_width = k->width;
    l->v_width = v->width;
    return 0;
}

int kv_compat_stored(const KvCompat *cache, uint32_t layer, KvTensor *ret_k, KvTensor *ret_v, ErrorDetail *reterr)
{
    const KvCompatLayer *l;

    if (layer >= cache->n_layers)
        return error_detail_set(reterr, KV_COMPAT_E_INDEX, "layer %u of a cache with %u", layer, cache->n_layers);
    l = &cache->layers[layer];
    if (!l->class || !l->class->stored || !l->initialised)
        return error_detail_set(reterr, KV_COMPAT_E_NO_STATE, "layer %u keeps no values", layer);
    l->class->stored(l->self, ret_k, ret_v);
    return 0;
}

static int linear_of(const KvCompat *cache, uint32_t layer, KvLinear **ret, ErrorDetail *reterr)
{
    if (layer >= cache->n_layers)
        return error_detail_set(reterr, KV_COMPAT_E_INDEX, "layer %u of a cache with %u", layer, cache->n_layers);
    if (!cache->layers[layer].linear)
        return error_detail_set(reterr, KV_COMPAT_E_NO_STATE, "layer %u has no convolution or recurrent state", layer);
    *ret = cache->layers[layer].linear;
    return 0;
}

static int check_state_shape(uint32_t layer, const KvTensor *x, bool fits, ErrorDetail *reterr)
{
    if (!fits || x->n_rows == 0 || x->n_heads == 0 || x->n_tokens == 0 || x->width == 0)
        return error_detail_set(reterr, KV_COMPAT_E_SHAPE, "layer %u: no state has the shape (%u, %u, %u, %u)", layer, x->n_rows,
                                x->n_heads, x->n_tokens, x->width);
    return 0;
}

int kv_compat_update_conv(KvCompat *cache, uint32_t layer, uint32_t state, uint32_t kernel_size, const KvTensor *x, KvTensor *ret,
                          ErrorDetail *reterr)
{
    KvLinear *linear = NULL;
    int r = linear_of(cache, layer, &linear, reterr);

    if (r == 0)
        r = check_state_shape(layer, x, x->width == 1, reterr);
    return r != 0 ? r : kv_linear_update_conv(linear, state, kernel_size, x, ret, reterr);
}

int kv_compat_update_recurrent(KvCompat *cache, uint32_t layer, uint32_t state, uint32_t n_tokens, const KvTensor *states,
                               ErrorDetail *reterr)
{
    KvLinear *linear = NULL;
    int r = linear_of(cache, layer, &linear, reterr);

    if (r == 0)
        r = check_state_shape(layer, states, states->n_heads == 1, reterr);
    return r != 0 ? r : kv_linear_update_recurrent(linear, state, n_tokens, states, reterr);
}

int kv_compat_conv(const KvCompat *cache, uint32_t layer, uint32_t state, KvTensor *ret, ErrorDetail *reterr)
{
    KvLinear *linear = NULL;
    int r = linear_of(cache, layer, &linear, reterr);

    return r != 0 ? r : kv_linear_conv(linear, state, ret, reterr);
}

int kv_compat_recurrent(const KvCompat *cache, uint32_t layer, uint32_t state, KvTensor *ret, ErrorDetail *reterr)
{
    KvLinear *linear = NULL;
    int r = linear_of(cache, layer, &linear, reterr);

    return r != 0 ? r : kv_linear_recurrent(linear, state, ret, reterr);
}
