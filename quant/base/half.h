#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* IEEE binary16 and bfloat16, by integer arithmetic: the same bits on every compiler and CPU. */

#include <stdint.h>
#include <string.h>

static inline float float_from_bits(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t float_to_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float float_from_bf16(uint16_t bf16)
{
    return float_from_bits((uint32_t)bf16 << 16);
}

/* Exact; NaN keeps its payload's top bits. */
static inline float float_from_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 0x1f, mantissa = half & 0x3ff;

    if (exponent == 0x1f)
        return float_from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) {
        /* mantissa * 2^-24, exact in float */
        float value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* Round to nearest even; overflow gives infinity, NaN stays a quiet NaN. */
static inline uint16_t half_from_float(float value)
{
    uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);

    if (magnitude > 0x7f800000)
        return sign | 0x7e00;
    if (magnitude >= 0x477ff000) /* >= 65520 rounds to infinity */
        return sign | 0x7c00;
    if (magnitude < 0x38800000) { /* below 2^-14: subnormal; the float addition rounds for us */
        float shifted = float_from_bits(magnitude) + 0x1p-1f;
        return sign | (uint16_t)(float_to_bits(shifted) - 0x3f000000);
    }
    magnitude += 0xfff + ((magnitude >> 13) & 1);
    return sign | (uint16_t)((magnitude - 0x38000000) >> 13);
}

/* Round to nearest even; overflow gives infinity, NaN stays a quiet NaN. */
static inline uint16_t bf16_from_float(float value)
{
    uint32_t bits = float_to_bits(value);

    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
