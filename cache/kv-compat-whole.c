/* SPDX-License-Identifier: Apache-2.0 */
/* Compatibility caches: accessors. */

#include "cache/kv-compat-internal.h"

uint32_t kv_compat_n_layers(const KvCompat *cache)
{
    return cache->n_layers;
}

/* The layer whose tokens count; NULL beyond the list. */
static int sequence_of(const KvCompat *cache, uint32_t layer, const KvCompatLayer **ret, ErrorDetail *reterr)
{
    uint32_t i = layer;

    *ret = NULL;
    if (layer >= cache->n_layers)
        return 0;
    if (layer == 0)
        while (i < cache->n_layers && !cache->layers[i].class)
            i++;
    if (i >= cache->n_layers || !cache->layers[i].class)
        return error_detail_set(reterr, KV_COMPAT_E_NO_SEQUENCE, "layer %u has no keys", layer);
    *ret = &cache->layers[i];
    return 0;
}

int kv_compat_length(const KvCompat *cache, uint32_t layer, uint64_t *ret, ErrorDetail *reterr)
{
    const KvCompatLayer *l;
    int r = sequence_of(cache, layer, &l, reterr);

    if (r != 0)
        return r;
    *ret = l ? l->class->length(l->self) : 0;
    return 0;
}

int kv_compat_mask_sizes(const KvCompat *cache, uint32_t layer, uint32_t n_tokens, uint64_t *ret_length, uint64_t *ret_offset,
                         ErrorDetail *reterr)
{
    const KvCompatLayer *l;
    int r = sequence_of(cache, layer, &l, reterr);

    if (r != 0)
        return r;
    *ret_length = n_tokens;
    *ret_offset = 0;
    if (l)
        l->class->mask_sizes(l->self, n_tokens, ret_length, ret_offset);
    return 0;
}

int64_t kv_compat_max_length(const KvCompat *cache, uint32_t layer)
{
    if (layer >= cache->n_layers || !cache->layers[layer].class)
        return -1;
    return cache->layers[layer].class->max_length(cache->layers[layer].self);
}

int kv_compat_max_length_all(const KvCompat *cache, int64_t *ret, ErrorDetail *reterr)
{
    int64_t longest = -1;

    if (cache->n_layers == 0)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "a cache without layers has no maximum");
    for (uint32_t i = 0; i < cache->n_layers; i++)
        longest = MAX(longest, kv_compat_max_length(cache, i));
    *ret = longest;
    return 0;
}

uint32_t kv_compat_layer_rows(const KvCompatLayer *layer)
{
    if (layer->initialised)
        return layer->n_rows;
    return layer->linear ? kv_linear_n_rows(layer->linear) : 0;
}

int kv_compat_n_rows(const KvCompat *cache, int64_t *ret, ErrorDetail *reterr)
{
    uint32_t n_rows = 0;

    for (uint32_t i = 0; i < cache->n_layers; i++) {
        uint32_t n = kv_compat_layer_rows(&cache->layers[i]);

        if (n > 0 && n_rows > 0 && n != n_rows)
            return error_detail_set(reterr, KV_COMPAT_E_VALUE, "layer %u has %u rows, layers before it %u", i, n, n_rows);
        n_rows = MAX(n_rows, n);
    }
    *ret = n_rows > 0 ? (int64_t)n_rows : -1;
    return 0;
}

bool kv_compat_is_croppable(const KvCompat *cache)
{
    for (uint32_t i = 0; i < cache->n_layers; i++) {
        const KvCompatLayer *layer = &cache->layers[i];

        if ((layer->class && !layer->class->is_croppable(layer->self)) ||
            (layer->linear && !kv_linear_is_croppable(layer->linear)))
            return false;
    }
    return true;
}

bool kv_compat_is_fixed(const KvCompat *cache)
{
    for (uint32_t i = 0; i < cache->n_layers; i++) {
        const KvCompatLayer *layer = &cache->layers[i];

        if ((layer->class && !layer->class->is_fixed) || (layer->linear && kv_linear_is_recording(layer->linear)))
            return false;
    }
    return cache->n_layers > 0;
}

bool kv_compat_is_sliding(const KvCompat *cache, uint32_t layer)
{
    return layer < cache->n_layers && cache->layers[layer].class && cache->layers[layer].class->is_sliding;
}

bool kv_compat_is_initialised(const KvCompat *cache)
{
    for (uint32_t i = 0; i < cache->n_layers; i++) {
        const KvCompatLayer *layer = &cache->layers[i];

        if ((layer->class && !layer->initialised) || (layer->linear && !kv_linear_has_previous(layer->linear)))
            return false;
    }
    return cache->n_layers > 0;
}

bool kv_compat_has_previous_state(const KvCompat *cache)
{
    for (uint32_t i = cache->n_layers; i > 0; i--)
        if (cache->layers[i - 1].linear)
            return kv_linear_has_previous(cache->layers[i - 1].linear);
    return false;
}

uint64_t kv_compat_bytes(const KvCompat *cache)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < cache->n_layers; i++) {
        const KvCompatLayer *layer = &cache->layers[i];

        bytes += layer->class ? layer->class->bytes(layer->self) : 0;
        bytes += layer->linear ? kv_linear_bytes(layer->linear) : 0;
    }
    return bytes;
}

/* Linear and dummy layers stay where they are; hybrid layers move with both their parts. */
static bool is_offloadable(const KvCompatLayer *layer, bool only_non_sliding)
{
    return layer->class && !(only_non_sliding && layer->class->is_sliding);
}

int32_t kv_compat_next_offloadable(const KvCompat *cache, uint32_t layer, bool only_non_sliding)
{
    for (uint32_t n = 1; n <= cache->n_layers; n++) {
        uint32_t i = (layer + n) % cache->n_layers;

        if (is_offloadable(&cache->layers[i], only_non_sliding))
            return (int32_t)i;
    }
    return -1;
}

/* Entry @i of a list that may hold for all layers. */
static uint32_t entry(const uint32_t *list, uint32_t n, uint32_t i)
{
    return list[n == 1 ? 0 : i];
}

static int check_shapes(const KvCompat *cache, const KvCompatShapes *shapes, ErrorDetail *reterr)
{
    const uint32_t *lists[] = {shapes->n_heads, shapes->k_widths, shapes->v_widths};
    uint32_t lengths[] = {shapes->n_n_heads, shapes->n_k_widths, shapes->n_v_widths};
    static const char *const names[] = {"heads", "key widths", "value widths"};

    if (shapes->n_rows == 0)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "no rows");
    for (size_t i = 0; i < N_ELEMENTS(lists); i++) {
        if (lengths[i] != 1 && lengths[i] != cache->n_layers)
            return error_detail_set(reterr, KV_COMPAT_E_VALUE, "%u %s for %u layers", lengths[i], names[i], cache->n_layers);
        for (uint32_t j = 0; j < lengths[i]; j++)
            if (lists[i][j] == 0)
                return error_detail_set(reterr, KV_COMPAT_E_VALUE, "%s of layer %u: 0", names[i], j);
    }
    return 0;
}

/* Layers that this call initialised, up to @n, as before. */
static void undo_early(KvCompat *cache, const bool *done, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (done[i]) {
            cache->layers[i].class->reset(cache->layers[i].self);
            cache->layers[i].initialised = false;
        }
}

int kv_compat_early(KvCompat *cache, const KvCompatShapes *shapes, ErrorDetail *reterr)
{
    _cleanup_(freep) bool *done = NULL;
    int r = check_shapes(cache, shapes, reterr);

    if (r != 0)
        return r;
    done = calloc(MAX(cache->n_layers, 1u), sizeof(done[0]));
    if (!done)
        return error_detail_set(reterr, error_origin(-ENOMEM), "no memory for %u layers", cache->n_layers);
    for (uint32_t i = 0; i < cache->n_layers; i++) {
        KvCompatLayer *layer = &cache->layers[i];
        KvCompatLayer shaped = *layer;

        if (!layer->class || layer->linear || layer->initialised)
            continue;
        shaped.initialised = true;
        shaped.n_rows = shapes->n_rows;
        shaped.n_heads = entry(shapes->n_heads, shapes->n_n_heads, i);
        shaped.k_width = entry(shapes->k_widths, shapes->n_k_widths, i);
        shaped.v_width = entry(shapes->v_widths, shapes->n_v_widths, i);
        r = layer->class->early(layer->self, shaped.n_rows, shaped.n_heads, shaped.k_width, shaped.v_width, reterr);
        if (r != 0) {
            undo_early(cache, done, i);
            return r;
        }
        *layer = shaped;
        done[i] = true;
    }
    return 0;
}
