#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The number type of a tensor whose values are at hand as floats: what its own arithmetic would round to, and how it is kept.
 * One operation of 16-bit arithmetic is the float operation, then kv_dtype_round().
 */

#include "quant/base/half.h"

#include <errno.h>
#include <stddef.h>

typedef enum KvDtype {
    KV_DTYPE_F32,
    KV_DTYPE_F16,
    KV_DTYPE_BF16,
    KV_DTYPE_X_MAX,
    KV_DTYPE_X_INVALID = -EINVAL,
} KvDtype;

static inline size_t kv_dtype_bytes(KvDtype dtype)
{
    return dtype == KV_DTYPE_F32 ? 4 : 2;
}

/* The nearest value of the type, ties to even. */
static inline float kv_dtype_round(KvDtype dtype, float value)
{
    if (dtype == KV_DTYPE_F16)
        return float_from_half(half_from_float(value));
    if (dtype == KV_DTYPE_BF16)
        return float_from_bf16(bf16_from_float(value));
    return value;
}

/* Element @i of an array in the type's own bytes. */
static inline float kv_dtype_load(KvDtype dtype, const void *array, size_t i)
{
    uint16_t half;
    float value;

    if (dtype == KV_DTYPE_F32) {
        memcpy(&value, (const char *)array + 4 * i, 4);
        return value;
    }
    memcpy(&half, (const char *)array + 2 * i, 2);
    return dtype == KV_DTYPE_F16 ? float_from_half(half) : float_from_bf16(half);
}

static inline void kv_dtype_store(KvDtype dtype, void *array, size_t i, float value)
{
    uint16_t half = dtype == KV_DTYPE_F16 ? half_from_float(value) : bf16_from_float(value);

    if (dtype == KV_DTYPE_F32)
        memcpy((char *)array + 4 * i, &value, 4);
    else
        memcpy((char *)array + 2 * i, &half, 2);
}
