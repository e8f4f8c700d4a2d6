#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A weight block taken apart: what the file's decode, the device packer and the device decode have in common.
 *
 * The value of element i, with s = i / 32 (Q6_K: i / 16) and exactly one rounding in float:
 *     Q4_0 Q5_0 Q8_0   d * (code - zero)             zero = 8, 16, 128
 *     Q4_1 Q5_1        d * code + m
 *     Q4_K Q5_K        d * scale[s] * code - m * min[s]
 *     Q6_K             d * scale[s] * (code - 32)    scale is signed
 */

#include "quant/weight.h"

#define WEIGHT_PARTS_ELEMENTS 256

typedef struct WeightParts {
    uint16_t d, m;                         /* binary16 */
    int8_t scales[WEIGHT_PARTS_ELEMENTS / 16];
    int8_t mins[WEIGHT_PARTS_ELEMENTS / 32];
    uint8_t codes[WEIGHT_PARTS_ELEMENTS];  /* unsigned, in element order */
} WeightParts;

/* One file block of an integer type. */
void weight_parts_from_block(WeightType type, const uint8_t *block, WeightParts *ret);
/* The block's elements. */
void weight_parts_decode(WeightType type, const WeightParts *parts, float *ret);
