/* SPDX-License-Identifier: Apache-2.0 */
/* Encoder-decoder pairs of compatibility caches. */

#include "cache/kv-compat-internal.h"

#include <string.h>

struct KvCompatPair {
    KvCompat *self, *cross;
    bool *is_updated; /* (n_flags): of cross layers; those beyond are not */
    uint32_t n_flags;
};

int kv_compat_pair_new(KvCompat *self, KvCompat *cross, KvCompatPair **ret)
{
    KvCompatPair *pair = calloc(1, sizeof(*pair));
    bool *flags = calloc(MAX(cross->n_layers, 1u), sizeof(flags[0]));

    if (!pair || !flags) {
        free(pair);
        free(flags);
        return error_origin(-ENOMEM);
    }
    for (uint32_t i = 0; i < cross->n_layers; i++) {
        const KvCompatLayer *layer = &cross->layers[i];

        flags[i] = layer->initialised && layer->class->length(layer->self) > 0;
    }
    *pair = (KvCompatPair){self, cross, flags, cross->n_layers};
    *ret = pair;
    return 0;
}

KvCompatPair *kv_compat_pair_free(KvCompatPair *pair)
{
    if (!pair)
        return NULL;
    (void)kv_compat_free(pair->self);
    (void)kv_compat_free(pair->cross);
    free(pair->is_updated);
    free(pair);
    return NULL;
}

int kv_compat_pair_copy(const KvCompatPair *pair, KvCompatPair **ret, ErrorDetail *reterr)
{
    _cleanup_(kv_compat_freep) KvCompat *self = NULL, *cross = NULL;
    int r = kv_compat_copy(pair->self, &self, reterr);

    if (r == 0)
        r = kv_compat_copy(pair->cross, &cross, reterr);
    if (r != 0)
        return r;
    r = kv_compat_pair_new(self, cross, ret);
    if (r != 0)
        return error_detail_set(reterr, error_trace(r), "no memory for a copy");
    self = cross = NULL;
    return 0;
}

KvCompat *kv_compat_pair_self(KvCompatPair *pair)
{
    return pair->self;
}

KvCompat *kv_compat_pair_cross(KvCompatPair *pair)
{
    return pair->cross;
}

bool kv_compat_pair_is_updated(const KvCompatPair *pair, uint32_t layer)
{
    return layer < pair->n_flags && pair->is_updated[layer];
}

int kv_compat_pair_update_cross(KvCompatPair *pair, uint32_t layer, const KvTensor *k, const KvTensor *v, KvTensor *ret_k,
                                KvTensor *ret_v, ErrorDetail *reterr)
{
    int r;

    if (kv_compat_pair_is_updated(pair, layer))
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "layer %u: its cross keys are there already", layer);
    if (layer >= pair->n_flags && layer < UINT16_MAX) {
        bool *flags = realloc(pair->is_updated, (layer + 1) * sizeof(flags[0]));

        if (!flags)
            return error_detail_set(reterr, error_origin(-ENOMEM), "no memory for %u layers", layer + 1);
        memset(flags + pair->n_flags, 0, (layer + 1 - pair->n_flags) * sizeof(flags[0]));
        pair->is_updated = flags;
        pair->n_flags = layer + 1;
    }
    r = kv_compat_update(pair->cross, layer, k, v, ret_k, ret_v, reterr);
    if (r == 0)
        pair->is_updated[layer] = true;
    return r;
}

int kv_compat_pair_crop(KvCompatPair *pair, int64_t n, ErrorDetail *reterr)
{
    return kv_compat_crop(pair->self, n, reterr);
}

int kv_compat_pair_select(KvCompatPair *pair, const uint32_t *rows, uint32_t n_rows, ErrorDetail *reterr)
{
    KvCompat *caches[] = {pair->self, pair->cross};
    KvCompatLayer *layers[2] = {NULL, NULL};
    int64_t n[2];
    int r = 0;

    for (size_t i = 0; i < N_ELEMENTS(caches) && r == 0; i++)
        r = kv_compat_check_rows(caches[i], rows, n_rows, &n[i], reterr);
    for (size_t i = 0; i < N_ELEMENTS(caches) && r == 0; i++)
        if (n[i] >= 0)
            r = kv_compat_make_rows(caches[i], rows, n_rows, &layers[i], reterr);
    for (size_t i = 0; i < N_ELEMENTS(caches); i++) {
        if (r != 0)
            (void)kv_compat_free_rows(caches[i], layers[i]);
        else if (layers[i])
            kv_compat_take_rows(caches[i], layers[i]);
    }
    return r;
}

/* Rows of the pair; -1: none yet. */
static int n_rows_of(const KvCompatPair *pair, int64_t *ret, ErrorDetail *reterr)
{
    int64_t cross;
    int r = kv_compat_n_rows(pair->self, ret, reterr);

    if (r == 0)
        r = kv_compat_n_rows(pair->cross, &cross, reterr);
    if (r != 0)
        return r;
    if (*ret >= 0 && cross >= 0 && *ret != cross)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "%lld rows of self and %lld of cross", (long long)*ret, (long long)cross);
    *ret = MAX(*ret, cross);
    return 0;
}

int kv_compat_pair_reorder(KvCompatPair *pair, const uint32_t *rows, uint32_t n_rows, ErrorDetail *reterr)
{
    int64_t n;
    int r = n_rows_of(pair, &n, reterr);

    if (r != 0 || n < 0)
        return r;
    if (n_rows != n)
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "%u sources for %lld rows", n_rows, (long long)n);
    return kv_compat_pair_select(pair, rows, n_rows, reterr);
}

int kv_compat_pair_repeat(KvCompatPair *pair, uint32_t n_times, ErrorDetail *reterr)
{
    _cleanup_(freep) uint32_t *rows = NULL;
    uint32_t n_rows = 0;
    int64_t self, all;
    int r = n_rows_of(pair, &all, reterr);

    if (r == 0)
        r = kv_compat_n_rows(pair->self, &self, reterr);
    if (r == 0)
        r = kv_compat_repeated_rows(self >= 0 ? pair->self : pair->cross, n_times, &rows, &n_rows, reterr);
    return r != 0 ? r : kv_compat_pair_select(pair, rows, n_rows, reterr);
}

void kv_compat_pair_reset(KvCompatPair *pair)
{
    kv_compat_reset(pair->self);
    kv_compat_reset(pair->cross);
    memset(pair->is_updated, 0, pair->n_flags * sizeof(pair->is_updated[0]));
}
