/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compatibility layers of fixed shape: full attention, and sliding windows.
 *
 * The whole buffer is what attention sees; slots that are not in use are zero or stale, and masks hide them.  A sliding buffer of
 * c = min(window, max_tokens) slots holds position p in slot p until it is full; from then on the newest is in the last slot.  One
 * slot more than the next token needs, so that a single token can be removed without recording.
 */

#include "cache/kv-compat-layer.h"

#include <string.h>

typedef struct Fixed {
    KvHeld k, v;           /* all capacity slots count as held */
    KvHeld full_k, full_v; /* what the last update returned, when that was not the buffer */
    uint32_t window, max_tokens, capacity; /* window 0: full attention */
    uint64_t length, first; /* the oldest position whose token is in the buffer */
} Fixed;

static void *fixed_free(void *self)
{
    Fixed *layer = self;

    if (!layer)
        return NULL;
    kv_held_deinit(&layer->k);
    kv_held_deinit(&layer->v);
    kv_held_deinit(&layer->full_k);
    kv_held_deinit(&layer->full_v);
    free(layer);
    return NULL;
}

int kv_compat_static_sliding_new(uint32_t window, uint32_t max_tokens, void **ret)
{
    Fixed *layer = calloc(1, sizeof(*layer));

    if (!layer)
        return error_origin(-ENOMEM);
    layer->window = window;
    layer->max_tokens = max_tokens;
    layer->capacity = window > 0 ? MIN(window, max_tokens) : max_tokens;
    *ret = layer;
    return 0;
}

int kv_compat_static_new(uint32_t max_tokens, void **ret)
{
    return kv_compat_static_sliding_new(0, max_tokens, ret);
}

static int init_pair(KvHeld *k, KvHeld *v, const KvTensor *like_k, const KvTensor *like_v, uint32_t capacity)
{
    int r = kv_held_init(k, like_k, capacity);

    if (r < 0)
        return error_trace(r);
    r = kv_held_init(v, like_v, capacity);
    if (r < 0) {
        kv_held_deinit(k);
        return error_trace(r);
    }
    return 0;
}

/* Buffers of the shape of @k and @v, when they are not so already. */
static int reshape(Fixed *layer, const KvTensor *k, const KvTensor *v)
{
    KvHeld new_k, new_v;
    int r;

    if (kv_held_is_like(&layer->k, k) && kv_held_is_like(&layer->v, v))
        return 0;
    r = init_pair(&new_k, &new_v, k, v, layer->capacity);
    if (r < 0)
        return error_trace(r);
    kv_held_deinit(&layer->k);
    kv_held_deinit(&layer->v);
    layer->k = new_k;
    layer->v = new_v;
    layer->k.n_tokens = layer->v.n_tokens = layer->capacity;
    return 0;
}

static int fixed_early(void *self, uint32_t n_rows, uint32_t n_heads, uint32_t k_width, uint32_t v_width, ErrorDetail *reterr)
{
    KvTensor k = {.n_rows = n_rows, .n_heads = n_heads, .width = k_width};
    KvTensor v = {.n_rows = n_rows, .n_heads = n_heads, .width = v_width};
    int r = reshape(self, &k, &v);

    return r < 0 ? error_detail_set(reterr, error_trace(r), "no memory for %u rows", n_rows) : 0;
}

static void whole(const KvHeld *held, KvTensor *ret)
{
    *ret = kv_held_view(held, 0, held->capacity);
}

static int static_update(void *self, const KvTensor *k, const KvTensor *v, KvTensor *ret_k, KvTensor *ret_v, ErrorDetail *reterr)
{
    Fixed *layer = self;
    int r;

    if (k->n_tokens > layer->capacity - layer->length)
        return error_detail_set(reterr, KV_COMPAT_E_FULL, "%u more tokens do not fit: %llu of %u are in use", k->n_tokens,
                                (unsigned long long)layer->length, layer->capacity);
    r = reshape(layer, k, v);
    if (r < 0)
        return error_detail_set(reterr, error_trace(r), "no memory for %u tokens", layer->capacity);
    kv_held_write(&layer->k, (uint32_t)layer->length, k);
    kv_held_write(&layer->v, (uint32_t)layer->length, v);
    layer->length += k->n_tokens;
    whole(&layer->k, ret_k);
    whole(&layer->v, ret_v);
    return 0;
}

/* Everything @by slots to the left (to the right, zeros behind it, when negative). */
static void shift(KvHeld *held, int64_t by)
{
    size_t slot = held->width, n = (size_t)(held->capacity - (uint64_t)llabs(by)) * slot;

    for (size_t head = 0; head < (size_t)held->n_rows * held->n_heads; head++) {
        float *values = held->values + head * held->capacity * slot;

        if (by >= 0) {
            memmove(values, values + (size_t)by * slot, n * sizeof(float));
        } else {
            memmove(values + (size_t)-by * slot, values, n * sizeof(float));
            memset(values, 0, (size_t)-by * slot * sizeof(float));
        }
    }
}

/* The new tokens do not fit: past ++ new is returned, its end kept. */
static void roll(Fixed *layer, KvHeld *held, KvHeld *full, const KvTensor *more, KvTensor *ret)
{
    /* What is needed of a full buffer: all but the first slot. */
    uint32_t slot = layer->length >= layer->capacity ? 1 : 0;
    uint32_t past = layer->length >= layer->capacity ? layer->capacity - 1 : (uint32_t)layer->length;
    KvTensor before = kv_held_view(held, slot, past), end;

    kv_held_append(full, &before);
    kv_held_append(full, more);
    end = kv_held_view(full, full->n_tokens - layer->capacity, layer->capacity);
    kv_held_write(held, 0, &end);
    *ret = kv_held_view(full, 0, full->n_tokens);
}

static int roll_both(Fixed *layer, const KvTensor *k, const KvTensor *v, KvTensor *ret_k, KvTensor *ret_v)
{
    KvHeld full_k, full_v;
    int r = init_pair(&full_k, &full_v, k, v, layer->capacity + k->n_tokens);

    if (r == 0) {
        r = reshape(layer, k, v);
        if (r < 0) {
            kv_held_deinit(&full_k);
            kv_held_deinit(&full_v);
        }
    }
    if (r < 0)
        return error_trace(r);
    kv_held_deinit(&layer->full_k);
    kv_held_deinit(&layer->full_v);
    layer->full_k = full_k;
    layer->full_v = full_v;
    roll(layer, &layer->k, &layer->full_k, k, ret_k);
    roll(layer, &layer->v, &layer->full_v, v, ret_v);
    return 0;
}

static int static_sliding_update(void *self, const KvTensor *k, const KvTensor *v, KvTensor *ret_k, KvTensor *ret_v,
                                 ErrorDetail *reterr)
{
    Fixed *layer = self;
    uint64_t after = layer->length + k->n_tokens;
    int r;

    if (k->n_tokens > UINT32_MAX / 4)
        return error_detail_set(reterr, KV_COMPAT_E_FULL, "%u tokens at once are too many", k->n_tokens);
    if (layer->capacity < layer->window && after > layer->capacity)
        return error_detail_set(reterr, KV_COMPAT_E_FULL,
                                "%llu tokens need more of a window of %u than the %u that max_cache_len leaves",
                                (unsigned long long)after, layer->window, layer->capacity);
    if (after > layer->capacity && (layer->length < layer->capacity || k->n_tokens > 1)) {
        r = roll_both(layer, k, v, ret_k, ret_v);
        if (r < 0)
            return error_detail_set(reterr, error_trace(r), "no memory for %u more tokens", k->n_tokens);
    } else {
        uint32_t slot = (uint32_t)MIN(layer->length, (uint64_t)layer->capacity - 1);

        r = reshape(layer, k, v);
        if (r < 0)
            return error_detail_set(reterr, error_trace(r), "no memory for %u tokens", layer->capacity);
        kv_held_deinit(&layer->full_k);
        kv_held_deinit(&layer->full_v);
        if (after > layer->capacity) {
            shift(&layer->k, 1);
            shift(&layer->v, 1);
        }
        kv_held_write(&layer->k, slot, k);
        kv_held_write(&layer->v, slot, v);
        whole(&layer->k, ret_k);
        whole(&layer->v, ret_v);
    }
    layer->length = after;
    if (after > layer->capacity)
        layer->first = MAX(layer->first, after - layer->capacity);
    return 0;
}

static void fixed_stored(const void *self, KvTensor *ret_k, KvTensor *ret_v)
{
    const Fixed *layer = self;

    whole(&layer->k, ret_k);
    whole(&layer->v, ret_v);
}

static void fixed_mask_sizes(const void *self, uint32_t n_tokens, uint64_t *ret_length, uint64_t *ret_offset)
{
    const Fixed *layer = self;
    uint64_t c = layer->capacity, length = layer->length;

    *ret_offset = 0;
    if (layer->window == 0 || length + n_tokens <= c) {
        *ret_length = c;
    } else if (length < c) {
        *ret_length = length + n_tokens;
    } else {
        *ret_length = c - 1 + n_tokens;
        *ret_offset = length - c + 1;
    }
}

static uint64_t fixed_length(const void *self)
{
    const Fixed *layer = self;

    return layer->length;
}

static int64_t fixed_max_length(const void *self)
{
    const Fixed *layer = self;

    return layer->capacity;
}

static bool fixed_is_croppable(const void *self)
{
    const Fixed *layer = self;

    return layer->window == 0 || layer->max_tokens <= layer->window;
}

static int fixed_check_crop(const void *self, uint64_t n_remove, ErrorDetail *reterr)
{
    const Fixed *layer = self;
    uint64_t left, needed;

    if (n_remove > layer->length)
        return error_detail_set(reterr, KV_COMPAT_E_GONE, "%llu tokens cannot be removed from %llu",
                                (unsigned long long)n_remove, (unsigned long long)layer->length);
    left = layer->length - n_remove;
    needed = MIN(left, (uint64_t)layer->capacity - 1);
    if (needed > 0 && left - needed < layer->first)
        return error_detail_set(reterr, KV_COMPAT_E_GONE,
                                "a window of %u tokens before position %llu needs tokens that are gone: the first held is %llu",
                                layer->capacity, (unsigned long long)left, (unsigned long long)layer->first);
    return 0;
}

static void fixed_crop(void *self, uint64_t n_remove)
{
    Fixed *layer = self;
    uint64_t c = layer->capacity, left = layer->length - n_remove;

    /* The newest of a full buffer stays in the last slot. */
    if (left >= c && layer->length > c && n_remove > 0) {
        int64_t by = (int64_t)MIN(n_remove, c);

        shift(&layer->k, -by);
        shift(&layer->v, -by);
    }
    layer->length = left;
    if (left == 0)
        layer->first = 0;
}

static int fixed_copy_rows(const void *self, const uint32_t *rows, uint32_t n_rows, void **ret, ErrorDetail *reterr)
{
    const Fixed *layer = self;
    Fixed *copy = calloc(1, sizeof(*copy));
    int r = copy ? 0 : error_origin(-ENOMEM);

    if (r == 0) {
        *copy = *layer;
        copy->k = copy->v = copy->full_k = copy->full_v = KV_HELD_NULL;
        r = kv_held_copy_rows(&layer->k, rows, n_rows, &copy->k);
    }
    if (r == 0)
        r = kv_held_copy_rows(&layer->v, rows, n_rows, &copy->v);
    if (r < 0) {
        (void)fixed_free(copy);
        return error_detail_set(reterr, error_trace(r), "no memory for a copy of %u rows", n_rows);
    }
    *ret = copy;
    return 0;
}

/* Buffers keep their address while the number of rows stays. */
static void fixed_adopt(void *self, void *other)
{
    Fixed *layer = self, *from = other;

    kv_held_adopt(&layer->k, &from->k);
    kv_held_adopt(&layer->v, &from->v);
    layer->length = from->length;
    layer->first = from->first;
    (void)fixed_free(from);
}

static void fixed_reset(void *self)
{
    Fixed *layer = self;

    if (layer->k.values) {
        memset(layer->k.values, 0, kv_held_bytes(&layer->k));
        memset(layer->v.values, 0, kv_held_bytes(&layer->v));
    }
    kv_held_deinit(&layer->full_k);
    kv_held_deinit(&layer->full_v);
    layer->length = layer->first = 0;
}

static uint64_t fixed_bytes(const void *self)
{
    const Fixed *layer = self;

    return kv_held_bytes(&layer->k) + kv_held_bytes(&layer->v) + kv_held_bytes(&layer->full_k) +
           kv_held_bytes(&layer->full_v);
}

const KvCompatClass kv_compat_static_class = {
    .name = "static",
    .is_fixed = true,
    .free = fixed_free,
    .early = fixed_early,
    .update = static_update,
    .stored = fixed_stored,
    .mask_sizes = fixed_mask_sizes,
    .length = fixed_length,
    .max_length = fixed_max_length,
    .is_croppable = fixed_is_croppable,
    .check_crop = fixed_check_crop,
    .crop = fixed_crop,
    .copy_rows = fixed_copy_rows,
    .adopt = fixed_adopt,
    .reset = fixed_reset,
    .bytes = fixed_bytes,
};

const KvCompatClass kv_compat_static_sliding_class = {
    .name = "static sliding",
    .is_sliding = true,
    .is_fixed = true,
    .free = fixed_free,
    .early = fixed_early,
    .update = static_sliding_update,
    .stored = fixed_stored,
    .mask_sizes = fixed_mask_sizes,
    .length = fixed_length,
    .max_length = fixed_max_length,
    .is_croppable = fixed_is_croppable,
    .check_crop = fixed_check_crop,
    .crop = fixed_crop,
    .copy_rows = fixed_copy_rows,
    .adopt = fixed_adopt,
    .reset = fixed_reset,
    .bytes = fixed_bytes,
};
