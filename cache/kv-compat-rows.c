/* SPDX-License-Identifier: Apache-2.0 */
/* Compatibility caches: what changes all layers at once, checked first and applied after. */

#include "cache/kv-compat-internal.h"

static int check_crop(const KvCompat *cache, int64_t n, ErrorDetail *reterr)
{
    uint64_t n_remove = n < 0 ? -(uint64_t)n : 0;

    if (n > 0)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "crop(%lld): only the number to remove, as 0 or below",
                                (long long)n);
    for (uint32_t i = 0; i < cache->n_layers; i++) {
        const KvCompatLayer *layer = &cache->layers[i];
        int r = 0;

        if (layer->linear)
            r = kv_linear_check_crop(layer->linear, n_remove, reterr);
        if (r == 0 && layer->initialised)
            r = layer->class->check_crop(layer->self, n_remove, reterr);
        if (r != 0) {
            error_detail_prefix(reterr, "layer %u", i);
            return r;
        }
    }
    return 0;
}

static void apply_crop(KvCompat *cache, int64_t n)
{
    uint64_t n_remove = n < 0 ? -(uint64_t)n : 0;

    for (uint32_t i = 0; i < cache->n_layers; i++) {
        KvCompatLayer *layer = &cache->layers[i];

        if (layer->linear)
            kv_linear_crop(layer->linear, n_remove);
        if (layer->initialised)
            layer->class->crop(layer->self, n_remove);
    }
}

int kv_compat_crop(KvCompat *cache, int64_t n, ErrorDetail *reterr)
{
    int r = check_crop(cache, n, reterr);

    if (r == 0)
        apply_crop(cache, n);
    return r;
}

int kv_compat_layer_copy(const KvCompatLayer *layer, const uint32_t *rows, uint32_t n_rows, KvCompatLayer *ret, ErrorDetail *reterr)
{
    KvCompatLayer copy = *layer;
    int r = 0;

    copy.self = NULL;
    copy.linear = NULL;
    if (layer->initialised)
        copy.n_rows = n_rows;
    if (layer->class)
        r = layer->class->copy_rows(layer->self, rows, layer->initialised ? n_rows : 0, &copy.self, reterr);
    if (r == 0 && layer->linear)
        r = kv_linear_copy_rows(layer->linear, rows, n_rows, &copy.linear, reterr);
    if (r != 0) {
        kv_compat_layer_deinit(&copy);
        return r;
    }
    *ret = copy;
    return 0;
}

KvCompatLayer *kv_compat_free_rows(const KvCompat *cache, KvCompatLayer *layers)
{
    for (uint32_t i = 0; layers && i < cache->n_layers; i++)
        kv_compat_layer_deinit(&layers[i]);
    free(layers);
    return NULL;
}

int kv_compat_make_rows(const KvCompat *cache, const uint32_t *rows, uint32_t n_rows, KvCompatLayer **ret, ErrorDetail *reterr)
{
    KvCompatLayer *layers = calloc(MAX(cache->n_layers, 1u), sizeof(layers[0]));
    int r = 0;

    if (!layers)
        return error_detail_set(reterr, error_origin(-ENOMEM), "no memory for %u layers", cache->n_layers);
    for (uint32_t i = 0; i < cache->n_layers && r == 0; i++)
        r = kv_compat_layer_copy(&cache->layers[i], rows, n_rows, &layers[i], reterr);
    if (r != 0) {
        (void)kv_compat_free_rows(cache, layers);
        return r;
    }
    *ret = layers;
    return 0;
}

void kv_compat_take_rows(KvCompat *cache, KvCompatLayer *layers)
{
    for (uint32_t i = 0; i < cache->n_layers; i++) {
        KvCompatLayer *layer = &cache->layers[i], *made = &layers[i];

        if (layer->class && layer->class->adopt) {
            layer->class->adopt(layer->self, made->self);
            made->self = layer->self;
            layer->self = NULL;
        }
        kv_compat_layer_deinit(layer);
        *layer = *made;
    }
    free(layers);
}

int kv_compat_check_rows(const KvCompat *cache, const uint32_t *rows, uint32_t n_rows, int64_t *ret_n, ErrorDetail *reterr)
{
    int r = kv_compat_n_rows(cache, ret_n, reterr);

    if (r != 0 || *ret_n < 0)
        return r;
    if (n_rows == 0)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "no rows would be left");
    for (uint32_t i = 0; i < n_rows; i++)
        if (rows[i] >= *ret_n)
            return error_detail_set(reterr, KV_COMPAT_E_INDEX, "row %u of a cache with %lld", rows[i], (long long)*ret_n);
    return 0;
}

int kv_compat_select(KvCompat *cache, const uint32_t *rows, uint32_t n_rows, ErrorDetail *reterr)
{
    KvCompatLayer *layers;
    int64_t n;
    int r = kv_compat_check_rows(cache, rows, n_rows, &n, reterr);

    if (r != 0 || n < 0)
        return r;
    r = kv_compat_make_rows(cache, rows, n_rows, &layers, reterr);
    if (r == 0)
        kv_compat_take_rows(cache, layers);
    return r;
}

int kv_compat_reorder(KvCompat *cache, const uint32_t *rows, uint32_t n_rows, ErrorDetail *reterr)
{
    int64_t n;
    int r = kv_compat_n_rows(cache, &n, reterr);

    if (r != 0 || n < 0)
        return r;
    if (n_rows != n)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "%u sources for %lld rows", n_rows, (long long)n);
    return kv_compat_select(cache, rows, n_rows, reterr);
}

int kv_compat_repeated_rows(const KvCompat *cache, uint32_t n_times, uint32_t **ret, uint32_t *ret_n, ErrorDetail *reterr)
{
    int64_t n;
    uint32_t *rows;
    int r = kv_compat_n_rows(cache, &n, reterr);

    if (r != 0)
        return r;
    n = MAX(n, (int64_t)0);
    if (n_times == 0 || (uint64_t)n * n_times > UINT32_MAX / 4)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "%lld rows cannot be repeated %u times", (long long)n, n_times);
    rows = malloc(MAX((size_t)n * n_times, (size_t)1) * sizeof(rows[0]));
    if (!rows)
        return error_detail_set(reterr, error_origin(-ENOMEM), "no memory for %u rows", n_times);
    for (size_t i = 0; i < (size_t)n * n_times; i++)
        rows[i] = (uint32_t)(i / n_times);
    *ret = rows;
    *ret_n = (uint32_t)n * n_times;
    return 0;
}

int kv_compat_repeat(KvCompat *cache, uint32_t n_times, ErrorDetail *reterr)
{
    _cleanup_(freep) uint32_t *rows = NULL;
    uint32_t n_rows = 0;
    int r = kv_compat_repeated_rows(cache, n_times, &rows, &n_rows, reterr);

    return r != 0 ? r : kv_compat_select(cache, rows, n_rows, reterr);
}

int kv_compat_copy(const KvCompat *cache, KvCompat **ret, ErrorDetail *reterr)
{
    _cleanup_(freep) uint32_t *rows = NULL;
    KvCompatLayer *layers = NULL;
    KvCompat *copy;
    uint32_t n_rows = 0;
    int r = kv_compat_repeated_rows(cache, 1, &rows, &n_rows, reterr);

    if (r == 0)
        r = kv_compat_make_rows(cache, rows, n_rows, &layers, reterr);
    if (r != 0)
        return r;
    copy = malloc(sizeof(*copy));
    if (!copy) {
        (void)kv_compat_free_rows(cache, layers);
        return error_detail_set(reterr, error_origin(-ENOMEM), "no memory for a copy");
    }
    *copy = *cache;
    copy->layers = layers;
    *ret = copy;
    return 0;
}

void kv_compat_reset(KvCompat *cache)
{
    for (uint32_t i = 0; i < cache->n_layers; i++) {
        KvCompatLayer *layer = &cache->layers[i];

        if (layer->class) {
            layer->class->reset(layer->self);
            layer->initialised = layer->initialised && layer->class->is_fixed;
        }
        if (layer->linear)
            kv_linear_reset(layer->linear);
    }
}
