/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compatibility layers that grow: full attention, and sliding windows (chunks are the same).
 *
 * Sliding keeps the last window - 1 tokens, which is what the next token needs beside itself; while it records it keeps all that
 * came since the last crop.  What is held ends at the length, so its first position is length - n_tokens.
 */

#include "cache/kv-compat-layer.h"

typedef struct Dynamic {
    KvHeld k, v;
    uint32_t window; /* 0: full attention */
    uint64_t length;
    bool recording;
} Dynamic;

static void *dynamic_free(void *self)
{
    Dynamic *layer = self;

    if (!layer)
        return NULL;
    kv_held_deinit(&layer->k);
    kv_held_deinit(&layer->v);
    free(layer);
    return NULL;
}

int kv_compat_sliding_new(uint32_t window, void **ret)
{
    Dynamic *layer = calloc(1, sizeof(*layer));

    if (!layer)
        return error_origin(-ENOMEM);
    layer->window = window;
    *ret = layer;
    return 0;
}

int kv_compat_dynamic_new(void **ret)
{
    return kv_compat_sliding_new(0, ret);
}

/* Empty buffers of another shape. */
static int reshape(Dynamic *layer, const KvTensor *k, const KvTensor *v)
{
    KvHeld new_k, new_v;
    int r = kv_held_init(&new_k, k, k->n_tokens);

    if (r < 0)
        return error_trace(r);
    r = kv_held_init(&new_v, v, v->n_tokens);
    if (r < 0) {
        kv_held_deinit(&new_k);
        return error_trace(r);
    }
    kv_held_deinit(&layer->k);
    kv_held_deinit(&layer->v);
    layer->k = new_k;
    layer->v = new_v;
    return 0;
}

static int dynamic_early(void *self, uint32_t n_rows, uint32_t n_heads, uint32_t k_width, uint32_t v_width, ErrorDetail *reterr)
{
    KvTensor k = {.n_rows = n_rows, .n_heads = n_heads, .width = k_width};
    KvTensor v = {.n_rows = n_rows, .n_heads = n_heads, .width = v_width};
    int r = reshape(self, &k, &v);

    return r < 0 ? error_detail_set(reterr, error_trace(r), "no memory for %u rows", n_rows) : 0;
}

/* Past tokens that a query at the end sees. */
static uint64_t n_kept(const Dynamic *layer, uint64_t n_tokens)
{
    return layer->window > 0 ? MIN(n_tokens, (uint64_t)layer->window - 1) : n_tokens;
}

static int dynamic_update(void *self, const KvTensor *k, const KvTensor *v, KvTensor *ret_k, KvTensor *ret_v, ErrorDetail *reterr)
{
    Dynamic *layer = self;
    uint32_t n = k->n_tokens, past, from;
    int r = 0;

    if (!kv_held_is_like(&layer->k, k) || !kv_held_is_like(&layer->v, v))
        r = reshape(layer, k, v);
    if (r == 0)
        r = kv_held_reserve(&layer->k, n);
    if (r == 0)
        r = kv_held_reserve(&layer->v, n);
    if (r < 0)
        return error_detail_set(reterr, error_trace(r), "no memory for %u more tokens", n);

    past = (uint32_t)n_kept(layer, layer->k.n_tokens);
    from = layer->k.n_tokens - past;
    kv_held_append(&layer->k, k);
    kv_held_append(&layer->v, v);
    layer->length += n;
    *ret_k = kv_held_view(&layer->k, from, past + n);
    *ret_v = kv_held_view(&layer->v, from, past + n);
    if (!layer->recording) {
        uint32_t gone = layer->k.n_tokens - (uint32_t)n_kept(layer, layer->k.n_tokens);

        kv_held_drop_front(&layer->k, gone);
        kv_held_drop_front(&layer->v, gone);
    }
    return 0;
}

static void dynamic_stored(const void *self, KvTensor *ret_k, KvTensor *ret_v)
{
    const Dynamic *layer = self;

    *ret_k = kv_held_view(&layer->k, 0, layer->k.n_tokens);
    *ret_v = kv_held_view(&layer->v, 0, layer->v.n_tokens);
}

static void dynamic_mask_sizes(const void *self, uint32_t n_tokens, uint64_t *ret_length, uint64_t *ret_offset)
{
    const Dynamic *layer = self;
    uint64_t past = n_kept(layer, layer->length);

    *ret_length = past + n_tokens;
    *ret_offset = layer->length - past;
}

static uint64_t dynamic_length(const void *self)
{
    const Dynamic *layer = self;

    return layer->length;
}

static int64_t dynamic_max_length(const void *self)
{
    const Dynamic *layer = self;

    return layer->window > 0 ? (int64_t)layer->window : -1;
}

static bool dynamic_is_croppable(const void *self)
{
    (void)self;
    return true;
}

static void sliding_record(void *self)
{
    Dynamic *layer = self;

    layer->recording = true;
}

static int dynamic_check_crop(const void *self, uint64_t n_remove, ErrorDetail *reterr)
{
    const Dynamic *layer = self;
    uint64_t left, first = layer->length - layer->k.n_tokens, needed;

    if (layer->window > 0 && layer->length >= layer->window && !layer->recording)
        return error_detail_set(reterr, KV_COMPAT_E_NOT_RECORDING,
                                "a window of %u tokens has moved on at %llu, and recording was not activated before",
                                layer->window, (unsigned long long)layer->length);
    if (n_remove > layer->length)
        return error_detail_set(reterr, KV_COMPAT_E_GONE, "%llu tokens cannot be removed from %llu",
                                (unsigned long long)n_remove, (unsigned long long)layer->length);
    left = layer->length - n_remove;
    needed = n_kept(layer, left);
    if (needed > 0 && left - needed < first)
        return error_detail_set(reterr, KV_COMPAT_E_GONE,
                                "a window of %u tokens before position %llu needs tokens that are gone: the first held is %llu",
                                layer->window, (unsigned long long)left, (unsigned long long)first);
    return 0;
}

static void dynamic_crop(void *self, uint64_t n_remove)
{
    Dynamic *layer = self;
    uint32_t back = (uint32_t)MIN(n_remove, (uint64_t)layer->k.n_tokens), front;

    layer->length -= n_remove;
    kv_held_drop_back(&layer->k, back);
    kv_held_drop_back(&layer->v, back);
    front = layer->k.n_tokens - (uint32_t)MIN((uint64_t)layer->k.n_tokens, n_kept(layer, layer->length));
    kv_held_drop_front(&layer->k, front);
    kv_held_drop_front(&layer->v, front);
    kv_held_trim(&layer->k);
    kv_held_trim(&layer->v);
}

static int dynamic_copy_rows(const void *self, const uint32_t *rows, uint32_t n_rows, void **ret, ErrorDetail *reterr)
{
    const Dynamic *layer = self;
    Dynamic *copy = calloc(1, sizeof(*copy));
    int r = copy ? 0 : error_origin(-ENOMEM);

    if (r == 0) {
        *copy = *layer;
        copy->k = copy->v = KV_HELD_NULL;
        r = kv_held_copy_rows(&layer->k, rows, n_rows, &copy->k);
    }
    if (r == 0)
        r = kv_held_copy_rows(&layer->v, rows, n_rows, &copy->v);
    if (r < 0) {
        (void)dynamic_free(copy);
        return error_detail_set(reterr, error_trace(r), "no memory for a copy of %u rows", n_rows);
    }
    *ret = copy;
    return 0;
}

static void dynamic_reset(void *self)
{
    Dynamic *layer = self;

    kv_held_deinit(&layer->k);
    kv_held_deinit(&layer->v);
    layer->length = 0;
}

static uint64_t dynamic_bytes(const void *self)
{
    const Dynamic *layer = self;

    return kv_held_bytes(&layer->k) + kv_held_bytes(&layer->v);
}

const KvCompatClass kv_compat_dynamic_class = {
    .name = "dynamic",
    .free = dynamic_free,
    .early = dynamic_early,
    .update = dynamic_update,
    .stored = dynamic_stored,
    .mask_sizes = dynamic_mask_sizes,
    .length = dynamic_length,
    .max_length = dynamic_max_length,
    .is_croppable = dynamic_is_croppable,
    .check_crop = dynamic_check_crop,
    .crop = dynamic_crop,
    .copy_rows = dynamic_copy_rows,
    .reset = dynamic_reset,
    .bytes = dynamic_bytes,
};

const KvCompatClass kv_compat_sliding_class = {
    .name = "sliding",
    .is_sliding = true,
    .free = dynamic_free,
    .early = dynamic_early,
    .update = dynamic_update,
    .stored = dynamic_stored,
    .mask_sizes = dynamic_mask_sizes,
    .length = dynamic_length,
    .max_length = dynamic_max_length,
    .is_croppable = dynamic_is_croppable,
    .record = sliding_record,
    .check_crop = dynamic_check_crop,
    .crop = dynamic_crop,
    .copy_rows = dynamic_copy_rows,
    .reset = dynamic_reset,
    .bytes = dynamic_bytes,
};
