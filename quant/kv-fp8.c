/* SPDX-License-Identifier: Apache-2.0 */
/* The `fp8` codec. */

#include "quant/kv-fp8.h"

#include <float.h>
#include <math.h>

#define CODE_NAN   0x7fu
#define CODE_MAX   0x7eu
#define MIN_NORMAL 0x1p-6f
#define SUBNORMALS 0x1p9f /* subnormal codes count 2^-9 */

uint8_t kv_fp8_encode(float value)
{
    uint32_t bits = float_to_bits(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    float size = float_from_bits(magnitude);

    if (isnan(value))
        return (uint8_t)(sign | CODE_NAN);
    if (size >= KV_FP8_MAX)
        return (uint8_t)(sign | CODE_MAX);
    if (size < MIN_NORMAL) /* 8 subnormal steps end at the smallest normal's code */
        return (uint8_t)(sign | (uint32_t)rintf(size * SUBNORMALS));
    magnitude += 0x7ffff + (magnitude >> 20 & 1);
    return (uint8_t)(sign | ((magnitude >> 20) - (120u << 3)));
}

float kv_fp8_decode(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80) << 24, rest = code & 0x7fu;
    float size;

    if (rest == CODE_NAN)
        return float_from_bits(sign | 0x7fc00000);
    size = rest < 8 ? (float)rest / SUBNORMALS : float_from_bits((rest + (120u << 3)) << 20);
    return sign ? -size : size;
}

float kv_fp8_scale(KvFp8Rule rule, const float *x, uint64_t n)
{
    float largest = 0.0f, scale;

    for (uint64_t i = 0; i < n; i++) {
        float size = fabsf(x[i]);

        if (rule == KV_FP8_RULE_CAREFUL && !isfinite(size))
            continue;
        if (size > largest || isnan(size))
            largest = size;
    }
    scale = largest / KV_FP8_MAX;
    if (rule == KV_FP8_RULE_CAREFUL && largest == 0.0f)
        return 1.0f;
    return scale < FLT_MIN ? FLT_MIN : scale;
}

/* Codes of @n values under a scale. */
static void encode_values(float scale, const float *x, uint64_t n, uint8_t *ret_codes, uint64_t *n_saturated)
{
    for (uint64_t i = 0; i < n; i++) {
        float value = x[i] / scale;

        ret_codes[i] = kv_fp8_encode(value);
        if (n_saturated)
            *n_saturated += kv_fp8_saturates(value);
    }
}

static int new_tensor(KvDtype dtype, const KvTensorShape *shape, float scale, KvQuantized **ret, ErrorDetail *reterr)
{
    const KvQuantizeOptions options = {.nbits = 8, .dtype = dtype};
    KvQuantized plan;
    uint64_t n_values;
    int r;

    r = kv_tensor_size(shape, &n_values, reterr);
    if (r)
        return error_trace(r);
    plan = kv_quantized_arrange(KV_BACKEND_FP8, &options, shape, n_values, true);
    plan.scale = scale;
    return kv_quantized_new(&plan, ret, reterr);
}

int kv_fp8_encode_tensor(KvDtype dtype, const KvTensorShape *shape, float scale, const float *x, KvQuantized **ret,
                         uint64_t *ret_n_saturated, ErrorDetail *reterr)
{
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;
    int r;

    r = new_tensor(dtype, shape, scale, &tensor, reterr);
    if (r)
        return error_trace(r);
    encode_values(scale, x, tensor->n_values, tensor->packed, ret_n_saturated);
    *ret = TAKE_PTR(tensor);
    return 0;
}

int kv_fp8_append(const KvQuantized *tensor, uint32_t n_tokens, const float *x, KvQuantized **ret, uint64_t *ret_n_saturated,
                  ErrorDetail *reterr)
{
    _cleanup_(kv_quantized_unrefp) KvQuantized *longer = NULL;
    KvTensorShape shape = tensor->shape;
    uint64_t old_run = (uint64_t)shape.n_tokens * shape.width, new_run = (uint64_t)n_tokens * shape.width;
    uint64_t n_runs = (uint64_t)shape.n_rows * shape.n_heads;
    uint8_t *to;
    int r;

    if (n_tokens == 0 || n_tokens > UINT32_MAX - shape.n_tokens)
        return error_detail_set(reterr, -EINVAL, "%u tokens cannot be put behind %u", n_tokens, shape.n_tokens);
    shape.n_tokens += n_tokens;
    r = new_tensor(tensor->options.dtype, &shape, tensor->scale, &longer, reterr);
    if (r)
        return error_trace(r);
    to = longer->packed;
    for (uint64_t run = 0; run < n_runs; run++) {
        memcpy(to, tensor->packed + run * old_run, old_run);
        to += old_run;
        encode_values(tensor->scale, x + run * new_run, new_run, to, ret_n_saturated);
        to += new_run;
    }
    *ret = TAKE_PTR(longer);
    return 0;
}

void kv_fp8_decode_tensor(const KvQuantized *tensor, float *ret)
{
    for (uint64_t i = 0; i < tensor->n_values; i++)
        ret[i] = kv_dtype_round(tensor->options.dtype, kv_fp8_decode(tensor->packed[i]) * tensor->scale);
}
