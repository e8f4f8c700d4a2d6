#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The `quanto` codec: plain minimum and maximum of a group, in the tensor's own number type.
 *
 *   scale = (max - min) / (2^nbits - 1)      shift = -min
 *   code  = clamp(round_half_even((x + shift) / scale), 0, 2^nbits - 1), 0 for a NaN
 *   value = scale * code - shift
 *
 * each operation rounded to the type.  A constant group divides 0 by 0: code 0, value min, exact.  A NaN makes its group NaN.
 *
 * Groups of a tensor: axis 0: runs of group_size values in row-major order; axis -1: one channel (the last index) of group_size
 * consecutive tokens, counted through rows and heads.  A tensor that is a single group on axis 0 has a scale and shift for every
 * value: scale 0, shift -x, exact.
 */

#include "quant/kv-quantized.h"

/* x: (n); ret_codes: (n).  @nbits up to 8: the library has 4 and 2. */
void kv_quanto_group(KvDtype dtype, uint8_t nbits, const float *x, uint32_t n, uint8_t *ret_codes, float *ret_scale, float *ret_shift);
/* What a code stands for. */
static inline float kv_quanto_value(KvDtype dtype, uint8_t code, float scale, float shift)
{
    return kv_dtype_round(dtype, kv_dtype_round(dtype, scale * (float)code) - shift);
}

/* x: (shape), values of the dtype.  -EINVAL, naming q_group_size and what it must divide, when the groups do not come out even. */
int kv_quanto_encode(const KvQuantizeOptions *options, const KvTensorShape *shape, const float *x, KvQuantized **ret,
                     ErrorDetail *reterr);
