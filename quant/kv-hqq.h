#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The `hqq` codec: the scale from minimum and maximum, then a search for the zero point, in float whatever the tensor's type.
 *
 *   S = 1 / (max - min) * (2^nbits - 1), 1 where max - min <= 1e-4, at most 20000;   Z = -min * S
 *   at most 20 times, for all groups of a span together:
 *     code = clamp(round_half_even(x * S + Z), 0, 2^nbits - 1)
 *     r    = (code - Z) / S
 *     Z    = mean over the group of (code - (x - shrink(x - r)) * S)      shrink(u) = sign(u) max(|u| - 0.1 |u|^-0.3, 0)
 *     stop unless the mean of |x - r| over the span is smaller than ever before; the Z of the last time is kept all the same
 *   then the codes again;  scale = 1 / S;  value = (code - Z) * scale in the tensor's type, S and Z rounded to it
 *
 * Which sum comes first decides when to stop: where as many values lie above as below, the mean error does not change with Z but for
 * rounding.  So there are two ways to sum:
 *   kv_hqq_encode()  a tensor, whose span is all of it as in the library, sums in the order of PyTorch on a CPU with 8 lanes (AVX2
 *                    and AVX-512 builds alike, up to 32,767 values or one thread), and takes u^-0.3 from libm;
 *   kv_hqq_groups()  for forms that pack tokens as they come, in spans of a token or a group: sums in 64 lanes (element i in lane
 *                    i % 64, in order) that are folded by halves, those of errors with their rounding errors beside them, over the
 *                    groups of a span in order.  Addition, multiplication, fma and correctly rounded division of floats only, so that a
 *                    kernel can give the same bits.
 *
 * Groups of a tensor: axis 1: runs of group_size values in row-major order; axis 0: group j has the values j, j + n, j + 2 n, ... with
 * n = number of groups: it mixes tokens, heads and rows.
 */

#include "quant/kv-quantized.h"

#include <math.h>

#define KV_HQQ_ITERATIONS 20
#define KV_HQQ_LANES      64

/* The pieces.  Clamping and comparing let NaN through, as in the library. */
static inline float kv_hqq_lower(float a, float b)
{
    return b < a || isnan(b) ? b : a;
}
static inline float kv_hqq_higher(float a, float b)
{
    return b > a || isnan(b) ? b : a;
}
/* S and Z before the search; @levels: 2^nbits - 1. */
static inline void kv_hqq_start(float levels, float low, float high, float *ret_scale, float *ret_zero)
{
    float scale = fabsf(high - low) <= 1e-4f ? 1.0f : 1.0f / (high - low) * levels;

    *ret_scale = scale > 2e4f ? 2e4f : scale;
    *ret_zero = -low * *ret_scale;
}
static inline float kv_hqq_level(float levels, float x, float scale, float zero)
{
    float level = rintf(x * scale + zero);

    return level < 0.0f ? 0.0f : level > levels ? levels : level;
}
static inline uint8_t kv_hqq_code(float levels, float x, float scale, float zero)
{
    float level = kv_hqq_level(levels, x, scale, zero);

    return isnan(level) ? 0 : (uint8_t)level;
}

/* x, ret_codes: (n_groups, group_size); ret_scales, ret_zeros: (n_groups).  Spans of @span_groups groups, the last may be shorter. */
void kv_hqq_groups(uint8_t nbits, const float *x, uint64_t n_groups, uint32_t group_size, uint64_t span_groups, uint8_t *ret_codes,
                   float *ret_scales, float *ret_zeros);
/* One group, stopping by itself. */
static inline void kv_hqq_group(uint8_t nbits, const float *x, uint32_t n, uint8_t *ret_codes, float *ret_scale, float *ret_zero)
{
    kv_hqq_groups(nbits, x, 1, n, 1, ret_codes, ret_scale, ret_zero);
}
/* What a code stands for; @scale and @zero already rounded to the type. */
static inline float kv_hqq_value(KvDtype dtype, uint8_t code, float scale, float zero)
{
    return kv_dtype_round(dtype, kv_dtype_round(dtype, (float)code - zero) * scale);
}
/* u^-0.3 for finite u >= 0.1, by integer and multiplication only, within 2e-7 of it. */
float kv_hqq_power(float u);
/* sign(u) max(|u| - 0.1 |u|^-0.3, 0) */
float kv_hqq_shrink(float u);

/* x: (shape), values of the dtype.  -EINVAL, naming q_group_size or nbits, when groups or packing do not come out even. */
int kv_hqq_encode(const KvQuantizeOptions *options, const KvTensorShape *shape, const float *x, KvQuantized **ret,
                  ErrorDetail *reterr);
