#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The `fp8` codec: e4m3fn codes under one scale for a whole tensor, fixed by the first tokens.
 *
 * e4m3fn: sign, 4 exponent bits of bias 7, 3 mantissa bits; largest value 448 (7E), smallest normal 2^-6 (08), smallest subnormal
 * 2^-9 (01), no infinities, NaN 7F and FF.  value = decode(code) * scale, rounded to the tensor's type.
 */

#include "quant/kv-quantized.h"

#define KV_FP8_MAX 448.0f

/* Nearest code, ties to even; what is beyond 448, infinities too, becomes 448, a NaN 7F or FF. */
uint8_t kv_fp8_encode(float value);
float kv_fp8_decode(uint8_t code);
/* Whether kv_fp8_encode() cuts the value off, rather than rounds it. */
static inline bool kv_fp8_saturates(float value)
{
    return value > 464.0f || value < -464.0f;
}

typedef enum KvFp8Rule {
    KV_FP8_RULE_CAREFUL, /* finite values only; 1 when none of them differs from zero */
    KV_FP8_RULE_LIBRARY, /* all values, at least FLT_MIN: zeros destroy whatever comes later, a NaN or infinity everything */
} KvFp8Rule;

/* max|x| / 448 */
float kv_fp8_scale(KvFp8Rule rule, const float *x, uint64_t n);

/* x: (shape).  @ret_n_saturated, which may be NULL, grows by the values that were cut off. */
int kv_fp8_encode_tensor(KvDtype dtype, const KvTensorShape *shape, float scale, const float *x, KvQuantized **ret,
                         uint64_t *ret_n_saturated, ErrorDetail *reterr);
/* @tensor with tokens behind those it has, under its scale; x: (n_rows, n_heads, n_tokens, width). */
int kv_fp8_append(const KvQuantized *tensor, uint32_t n_tokens, const float *x, KvQuantized **ret, uint64_t *ret_n_saturated,
                  ErrorDetail *reterr);
/* kv_quantized_decode() for this codec. */
void kv_fp8_decode_tensor(const KvQuantized *tensor, float *ret);
