/* SPDX-License-Identifier: Apache-2.0 */
/* The `hqq` codec: groups by themselves. */

#include "quant/kv-hqq.h"

#include <math.h>

#define SHRINK_FACTOR 0.1f /* 1 / beta */
#define SHRINKS_ABOVE 0.16f /* below 0.1^(1/1.3) = 0.170 shrink() is 0 */

/* u^-0.3 = y with y^10 u^3 = 1: a first guess within 4 % from the exponent, then Newton steps that square the error 5.5
 * times over.  (u y^3)^3 y is that product without large intermediate numbers. */
float kv_hqq_power(float u)
{
    float y = float_from_bits(0x5285a1cau - float_to_bits(u) / 10 * 3);

    for (int i = 0; i < 4; i++) {
        float w = u * y * y * y;

        y = fmaf(y * 0.1f, 1.0f - w * w * w * y, y);
    }
    return y;
}

float kv_hqq_shrink(float u)
{
    float size = fabsf(u), rest;

    if (size < SHRINKS_ABOVE)
        return 0.0f;
    if (!isfinite(u))
        return u;
    rest = size - SHRINK_FACTOR * kv_hqq_power(size);
    return rest > 0.0f ? copysignf(rest, u) : 0.0f;
}

static void start_group(float levels, const float *x, uint32_t n, float *ret_scale, float *ret_zero)
{
    float low = x[0], high = x[0];

    for (uint32_t i = 1; i < n; i++) {
        low = kv_hqq_lower(low, x[i]);
        high = kv_hqq_higher(high, x[i]);
    }
    kv_hqq_start(levels, low, high, ret_scale, ret_zero);
}

/* A sum whose rounding errors are summed too: errors of two steps may differ in their last bit only, and this decides when to stop. */
typedef struct Sum {
    float high, low;
} Sum;

static void sum_add(Sum *sum, float x)
{
    float high = sum->high + x, added = high - sum->high;

    sum->low += (sum->high - (high - added)) + (x - added);
    sum->high = high;
}

static void sum_join(Sum *sum, Sum other)
{
    sum_add(sum, other.high);
    sum->low += other.low;
}

/* Moves the zero point once; returns the sum of the errors that the old one had. */
static Sum step_group(float levels, const float *x, uint32_t n, float scale, float *zero)
{
    float zeros[KV_HQQ_LANES] = {0};
    Sum errors[KV_HQQ_LANES] = {{0}};

    for (uint32_t i = 0; i < n; i++) {
        float level = kv_hqq_level(levels, x[i], scale, *zero), error = x[i] - (level - *zero) / scale;

        zeros[i % KV_HQQ_LANES] += level - (x[i] - kv_hqq_shrink(error)) * scale;
        sum_add(&errors[i % KV_HQQ_LANES], fabsf(error));
    }
    for (uint32_t width = KV_HQQ_LANES / 2; width; width /= 2)
        for (uint32_t i = 0; i < width; i++) {
            zeros[i] += zeros[i + width];
            sum_join(&errors[i], errors[i + width]);
        }
    *zero = zeros[0] / (float)n;
    return errors[0];
}

/* Scales are inverse ones (S) until the end. */
static void encode_span(float levels, const float *x, uint64_t n_groups, uint32_t n, uint8_t *codes, float *scales, float *zeros)
{
    float best = INFINITY;

    for (uint64_t group = 0; group < n_groups; group++)
        start_group(levels, x + group * n, n, &scales[group], &zeros[group]);
    for (int i = 0; i < KV_HQQ_ITERATIONS; i++) {
        Sum sum = {0};
        float mean;

        for (uint64_t group = 0; group < n_groups; group++)
            sum_join(&sum, step_group(levels, x + group * n, n, scales[group], &zeros[group]));
        mean = (sum.high + sum.low) / ((float)n_groups * (float)n);
        if (!(mean < best))
            break;
        best = mean;
    }
    for (uint64_t group = 0; group < n_groups; group++) {
        for (uint64_t i = group * n; i < (group + 1) * n; i++)
            codes[i] = kv_hqq_code(levels, x[i], scales[group], zeros[group]);
        scales[group] = 1.0f / scales[group];
    }
}

void kv_hqq_groups(uint8_t nbits, const float *x, uint64_t n_groups, uint32_t group_size, uint64_t span_groups, uint8_t *ret_codes,
                   float *ret_scales, float *ret_zeros)
{
    float levels = (float)((1u << nbits) - 1);

    for (uint64_t at = 0; at < n_groups; at += span_groups) {
        uint64_t n = MIN(span_groups, n_groups - at);

        encode_span(levels, x + at * group_size, n, group_size, ret_codes + at * group_size, ret_scales + at, ret_zeros + at);
    }
}
