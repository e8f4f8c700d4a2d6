/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors that compatibility layers hold. */

#include "cache/kv-compat-layer.h"

#include "quant/base/checked.h"

#include <string.h>

/* Room below which nothing is given back. */
#define KEEP_TOKENS 64

void kv_tensor_copy(const KvTensor *tensor, float *ret)
{
    size_t n = (size_t)tensor->n_tokens * tensor->width;

    for (uint32_t b = 0; b < tensor->n_rows; b++)
        for (uint32_t h = 0; h < tensor->n_heads; h++, ret += n)
            if (n > 0)
                memcpy(ret, kv_tensor_at(tensor, b, h, 0), n * sizeof(float));
}

void kv_held_deinit(KvHeld *held)
{
    free(held->values);
    *held = KV_HELD_NULL;
}

static int allocate(uint32_t n_rows, uint32_t n_heads, uint32_t width, uint32_t capacity, float **ret)
{
    uint64_t n = n_rows;

    if (!checked_mul(n, n_heads, &n) || !checked_mul(n, width, &n) || !checked_mul(n, capacity, &n) ||
        !checked_mul(n, sizeof(float), &n))
        return error_origin(-ENOMEM);
    *ret = calloc(1, MAX(n, sizeof(float)));
    return *ret ? 0 : error_origin(-ENOMEM);
}

int kv_held_init(KvHeld *held, const KvTensor *like, uint32_t capacity)
{
    float *values;
    int r = allocate(like->n_rows, like->n_heads, like->width, capacity, &values);

    if (r < 0)
        return error_trace(r);
    *held = (KvHeld){values, like->n_rows, like->n_heads, like->width, 0, 0, capacity};
    return 0;
}

bool kv_held_is_like(const KvHeld *held, const KvTensor *like)
{
    return held->values && held->n_rows == like->n_rows && held->n_heads == like->n_heads && held->width == like->width;
}

static float *slot_at(const KvHeld *held, size_t head, uint32_t slot)
{
    return held->values + (head * held->capacity + slot) * held->width;
}

/* What is held, into a new buffer of @capacity, at its beginning. */
static int move(KvHeld *held, uint32_t capacity)
{
    size_t n = (size_t)held->n_tokens * held->width * sizeof(float);
    float *values;
    int r = allocate(held->n_rows, held->n_heads, held->width, capacity, &values);

    if (r < 0)
        return error_trace(r);
    for (size_t head = 0; head < (size_t)held->n_rows * held->n_heads && n > 0; head++)
        memcpy(values + head * capacity * held->width, slot_at(held, head, held->n_first), n);
    free(held->values);
    held->values = values;
    held->capacity = capacity;
    held->n_first = 0;
    return 0;
}

int kv_held_reserve(KvHeld *held, uint32_t n_more)
{
    uint64_t needed = (uint64_t)held->n_tokens + n_more;

    if (needed > UINT32_MAX / 2)
        return error_origin(-ENOMEM);
    if (held->n_first + needed <= held->capacity)
        return 0;
    if (needed <= held->capacity) { /* only what was dropped in front is in the way */
        for (size_t head = 0; head < (size_t)held->n_rows * held->n_heads; head++)
            memmove(slot_at(held, head, 0), slot_at(held, head, held->n_first),
                    (size_t)held->n_tokens * held->width * sizeof(float));
        held->n_first = 0;
        return 0;
    }
    return move(held, (uint32_t)(needed + needed / 2));
}

void kv_held_append(KvHeld *held, const KvTensor *more)
{
    kv_held_write(held, held->n_first + held->n_tokens, more);
    held->n_tokens += more->n_tokens;
}

void kv_held_write(KvHeld *held, uint32_t slot, const KvTensor *tokens)
{
    for (uint32_t b = 0; b < held->n_rows; b++)
        for (uint32_t h = 0; h < held->n_heads && tokens->n_tokens > 0; h++)
            memcpy(slot_at(held, (size_t)b * held->n_heads + h, slot), kv_tensor_at(tokens, b, h, 0),
                   (size_t)tokens->n_tokens * held->width * sizeof(float));
}

void kv_held_drop_front(KvHeld *held, uint32_t n_tokens)
{
    held->n_first += n_tokens;
    held->n_tokens -= n_tokens;
}

void kv_held_drop_back(KvHeld *held, uint32_t n_tokens)
{
    held->n_tokens -= n_tokens;
}

void kv_held_trim(KvHeld *held)
{
    if (held->capacity > KEEP_TOKENS && held->capacity / 2 > held->n_tokens)
        (void)move(held, held->n_tokens);
}

KvTensor kv_held_view(const KvHeld *held, uint32_t from, uint32_t n_tokens)
{
    return (KvTensor){held->values ? slot_at(held, 0, held->n_first + from) : NULL,
                      held->n_rows, held->n_heads, n_tokens, held->width, held->capacity};
}

int kv_held_copy_rows(const KvHeld *held, const uint32_t *rows, uint32_t n_rows, KvHeld *ret)
{
    size_t row_floats = (size_t)held->n_heads * held->capacity * held->width;
    float *values;
    int r;

    if (!held->values) {
        *ret = *held;
        return 0;
    }
    r = allocate(n_rows, held->n_heads, held->width, held->capacity, &values);
    if (r < 0)
        return error_trace(r);
    for (uint32_t i = 0; i < n_rows; i++)
        memcpy(values + i * row_floats, held->values + rows[i] * row_floats, row_floats * sizeof(float));
    *ret = *held;
    ret->values = values;
    ret->n_rows = n_rows;
    return 0;
}

void kv_held_adopt(KvHeld *held, KvHeld *other)
{
    uint64_t bytes = kv_held_bytes(other);

    if (held->values && other->values && kv_held_bytes(held) == bytes) {
        float *values = held->values;

        memcpy(values, other->values, bytes);
        free(other->values);
        *held = *other;
        held->values = values;
    } else {
        free(held->values);
        *held = *other;
    }
    *other = KV_HELD_NULL;
}

uint64_t kv_held_bytes(const KvHeld *held)
{
    return (uint64_t)held->n_rows * held->n_heads * held->capacity * held->width * sizeof(float);
}
