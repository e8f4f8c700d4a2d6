/* SPDX-License-Identifier: Apache-2.0 */
/* Groups of the forms quanto and hqq, and numbers of fp8.  Rules of kv-codec-internal.h. */

#include "quant/kv-codec-internal.h"

#include "quant/base/half.h"

#include <float.h>
#include <math.h>

#define INPUT_MOST   32752.0f /* so that a range fits f16 */
#define HALF_MOST    65504.0f
#define HQQ_ROUNDS   20
#define HQQ_POWER    0.3f /* 1 - p, p = 0.7 */
#define HQQ_BETA     10.0f
#define SQRT_TWO     1.41421356237309504880f
#define TO_INTEGER   12582912.0f /* 1.5 * 2^23: adding it rounds to the nearest integer */

static float half_round(float x)
{
    return float_from_half(half_from_float(x));
}

static float integer_round(float x)
{
    return (x + TO_INTEGER) - TO_INTEGER;
}

/* What the reference would be given: a finite f16. */
static float input_round(float x)
{
    x = x > -INPUT_MOST ? x : x <= -INPUT_MOST ? -INPUT_MOST : 0.0f; /* NaN: 0 */
    return half_round(x < INPUT_MOST ? x : INPUT_MOST);
}

static void round_inputs(const float *x, uint32_t n, float *ret, float *ret_low, float *ret_high)
{
    *ret_low = FLT_MAX;
    *ret_high = -FLT_MAX;
    for (uint32_t i = 0; i < n; i++) {
        ret[i] = input_round(x[i]);
        *ret_low = ret[i] < *ret_low ? ret[i] : *ret_low;
        *ret_high = ret[i] > *ret_high ? ret[i] : *ret_high;
    }
}

static float clamp_code(float t, float top)
{
    t = t > 0.0f ? t : 0.0f;
    return t < top ? t : top;
}

KvGroupScale kv_group_quanto(const float *x, uint32_t n, int bits, uint8_t *ret_codes)
{
    float y[KV_MAX_GROUP_DIMS], low, high, top = (float)((1 << bits) - 1), scale;

    round_inputs(x, n, y, &low, &high);
    scale = half_round(kv_quotient(half_round(high - low), top));
    for (uint32_t i = 0; i < n; i++) {
        float t = scale > 0.0f ? half_round(kv_quotient(half_round(y[i] - low), scale)) : 0.0f;

        ret_codes[i] = (uint8_t)(int)integer_round(clamp_code(t, top));
    }
    return (KvGroupScale){half_from_float(scale), half_from_float(0.0f - low)};
}

/* ---- hqq --------------------------------------------------------------------------------------------------------------- */

/* log2 of a normal x > 0 to 1e-7: exponent, and the area hyperbolic tangent of what is left, within 0.18. */
static float log_two(float x)
{
    uint32_t bits = float_to_bits(x);
    int exponent = (int)(bits >> 23) - 127;
    float m = float_from_bits((bits & 0x7fffffu) | 0x3f800000u), s, t, p;

    if (m > SQRT_TWO) {
        m *= 0.5f;
        exponent++;
    }
    s = kv_quotient(m - 1.0f, m + 1.0f);
    t = s * s;
    p = fmaf(t, 0.32059889f, 0.41219858f); /* 2 / ln 2 over 9, 7, 5, 3, 1 */
    p = fmaf(p, t, 0.57707802f);
    p = fmaf(p, t, 0.96179669f);
    p = fmaf(p, t, 2.8853901f);
    return fmaf(s, p, (float)exponent);
}

/* 2^x to 2e-7 for |x| < 100. */
static float exp_two(float x)
{
    float shifted = x + TO_INTEGER, rest = x - (shifted - TO_INTEGER), p;

    p = fmaf(1.5403530e-4f, rest, 1.3333558e-3f);
    p = fmaf(p, rest, 9.6181291e-3f);
    p = fmaf(p, rest, 5.5504109e-2f);
    p = fmaf(p, rest, 2.4022651e-1f);
    p = fmaf(p, rest, 6.9314718e-1f);
    p = fmaf(p, rest, 1.0f);
    return float_from_bits(float_to_bits(p) + (float_to_bits(shifted) << 23));
}

/* sign(u) max(|u| - |u|^(p - 1) / beta, 0): zero below 0.17. */
static float shrink(float u)
{
    float magnitude = fabsf(u), raised = magnitude > 0.1f ? magnitude : 0.1f, left;

    left = fmaf(exp_two(-HQQ_POWER * log_two(raised)), -1.0f / HQQ_BETA, raised);
    left = left > 0.0f ? left : 0.0f;
    return u < 0.0f ? -left : left;
}

static float code_of(float x, float scale, float zero, float top)
{
    return integer_round(clamp_code(fmaf(x, scale, zero), top));
}

/* One iteration from @zero: the next zero, and the mean error of this one. */
static float next_zero(const float *x, uint32_t n, float scale, float zero, float top, float *ret_error)
{
    float sum = 0.0f, error = 0.0f, count = (float)n;

    for (uint32_t i = 0; i < n; i++) {
        float code = code_of(x[i], scale, zero, top), difference = x[i] - kv_quotient(code - zero, scale);

        sum += fmaf(shrink(difference) - x[i], scale, code);
        error += fabsf(difference);
    }
    *ret_error = kv_quotient(error, count);
    return kv_quotient(sum, count);
}

/* The inverse scale; also no larger than what keeps the zero an f16. */
static float inverse_scale(float low, float high, float top)
{
    float range = high - low, magnitude = fabsf(low) > fabsf(high) ? fabsf(low) : fabsf(high), most, scale;

    scale = range > 1e-4f ? kv_quotient(top, range) : 1.0f;
    most = kv_quotient(HALF_MOST - 512.0f, magnitude > 1.0f ? magnitude : 1.0f);
    most = most < 20000.0f ? most : 20000.0f;
    return scale < most ? scale : most;
}

KvGroupScale kv_group_hqq(const float *x, uint32_t n, int bits, uint8_t *ret_codes)
{
    float y[KV_MAX_GROUP_DIMS], low, high, top = (float)((1 << bits) - 1), scale, zero, best = INFINITY;

    round_inputs(x, n, y, &low, &high);
    scale = inverse_scale(low, high, top);
    zero = (0.0f - low) * scale;
    for (int i = 0; i < HQQ_ROUNDS; i++) {
        float error;

        zero = next_zero(y, n, scale, zero, top, &error);
        if (!(error < best))
            break;
        best = error;
    }
    for (uint32_t i = 0; i < n; i++)
        ret_codes[i] = (uint8_t)(int)code_of(y[i], scale, zero, top);
    return (KvGroupScale){half_from_float(kv_reciprocal(scale)), half_from_float(zero + 0.0f)}; /* no -0 */
}

/* ---- fp8 --------------------------------------------------------------------------------------------------------------- */

uint8_t kv_e4m3_encode(float x, float scale)
{
    float magnitude = fabsf(x);
    uint8_t sign = (uint8_t)(float_to_bits(x) >> 24 & 0x80);
    uint32_t bits;

    if (isnan(x))
        return 0;
    magnitude = magnitude < 448.0f * scale ? kv_quotient(magnitude, scale) : 448.0f;
    if (magnitude < 0x1p-6f)
        return sign | (uint8_t)(int)integer_round(magnitude * 512.0f); /* 8 of these steps are the smallest normal number */
    bits = float_to_bits(magnitude);
    bits += 0x7ffffu + ((bits >> 20) & 1u);
    return sign | (uint8_t)((bits - 0x3c000000u) >> 20);
}

float kv_e4m3_decode(uint8_t code)
{
    uint32_t magnitude = code & 0x7fu;
    float value = magnitude < 8 ? (float)magnitude * 0x1p-9f : float_from_bits((magnitude << 20) + 0x3c000000u);

    return code & 0x80 ? -value : value;
}
