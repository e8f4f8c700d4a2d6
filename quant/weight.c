/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weight blocks: the types, the C reference decode, and the rounding of activations.
 *
 * Blocks are read byte by byte (little endian, no alignment assumed) because rows lie in a mapped file.
 */

#include "quant/weight.h"

#include "quant/base/checked.h"
#include "quant/base/half.h"
#include "quant/weight-parts.h"

#include <assert.h>
#include <math.h>

/* The blocks as they lie in files; only their sizes and member offsets are used. */
typedef struct BlockQ4_0 { uint16_t d; uint8_t codes[16]; } BlockQ4_0;
typedef struct BlockQ4_1 { uint16_t d, m; uint8_t codes[16]; } BlockQ4_1;
typedef struct BlockQ5_0 { uint16_t d; uint8_t high[4], codes[16]; } BlockQ5_0;
typedef struct BlockQ5_1 { uint16_t d, m; uint8_t high[4], codes[16]; } BlockQ5_1;
typedef struct BlockQ8_0 { uint16_t d; int8_t codes[32]; } BlockQ8_0;
typedef struct BlockQ4K { uint16_t d, m; uint8_t scales[12], codes[128]; } BlockQ4K;
typedef struct BlockQ5K { uint16_t d, m; uint8_t scales[12], high[32], codes[128]; } BlockQ5K;
typedef struct BlockQ6K { uint8_t codes[128], high[64]; int8_t scales[16]; uint16_t d; } BlockQ6K;

static_assert(sizeof(BlockQ4_0) == 18, "Q4_0 is 18 bytes in files");
static_assert(sizeof(BlockQ4_1) == 20, "Q4_1 is 20 bytes in files");
static_assert(sizeof(BlockQ5_0) == 22, "Q5_0 is 22 bytes in files");
static_assert(sizeof(BlockQ5_1) == 24, "Q5_1 is 24 bytes in files");
static_assert(sizeof(BlockQ8_0) == 34, "Q8_0 is 34 bytes in files");
static_assert(sizeof(BlockQ4K) == 144, "Q4_K is 144 bytes in files");
static_assert(sizeof(BlockQ5K) == 176, "Q5_K is 176 bytes in files");
static_assert(sizeof(BlockQ6K) == 210, "Q6_K is 210 bytes in files");

/* Bytes of a record's planes (quant/weight-layout.c writes down their order). */
#define NIBBLES(columns) (WEIGHT_TILE_ROWS * (columns) / 2)
#define BITS(n, columns) (WEIGHT_TILE_ROWS * (columns) * (n) / 8)
#define HALVES(n)        (WEIGHT_TILE_ROWS * 2 * (n))
#define BYTES(n)         (WEIGHT_TILE_ROWS * (n))

static const WeightTypeInfo weight_types[] = {
    {WEIGHT_TYPE_F32, "F32", 1, 4, 32, WEIGHT_TILE_ROWS * 32 * 4},
    {WEIGHT_TYPE_F16, "F16", 1, 2, 32, WEIGHT_TILE_ROWS * 32 * 2},
    {WEIGHT_TYPE_BF16, "BF16", 1, 2, 32, WEIGHT_TILE_ROWS * 32 * 2},
    {WEIGHT_TYPE_Q4_0, "Q4_0", 32, sizeof(BlockQ4_0), 32, NIBBLES(32) + HALVES(1)},
    {WEIGHT_TYPE_Q4_1, "Q4_1", 32, sizeof(BlockQ4_1), 32, NIBBLES(32) + HALVES(2)},
    {WEIGHT_TYPE_Q5_0, "Q5_0", 32, sizeof(BlockQ5_0), 32, NIBBLES(32) + BITS(1, 32) + HALVES(1)},
    {WEIGHT_TYPE_Q5_1, "Q5_1", 32, sizeof(BlockQ5_1), 32, NIBBLES(32) + BITS(1, 32) + HALVES(2)},
    {WEIGHT_TYPE_Q8_0, "Q8_0", 32, sizeof(BlockQ8_0), 32, BYTES(32) + HALVES(1)},
    {WEIGHT_TYPE_Q4_K, "Q4_K", 256, sizeof(BlockQ4K), 256, NIBBLES(256) + BYTES(8 + 8) + HALVES(2)},
    {WEIGHT_TYPE_Q5_K, "Q5_K", 256, sizeof(BlockQ5K), 256, NIBBLES(256) + BITS(1, 256) + BYTES(8 + 8) + HALVES(2)},
    {WEIGHT_TYPE_Q6_K, "Q6_K", 256, sizeof(BlockQ6K), 256, NIBBLES(256) + BITS(2, 256) + BYTES(16) + HALVES(1)},
};

const WeightTypeInfo *weight_type_info(uint32_t ggml_type)
{
    for (size_t i = 0; i < N_ELEMENTS(weight_types); i++)
        if ((uint32_t)weight_types[i].type == ggml_type)
            return &weight_types[i];
    return NULL;
}

const char *weight_type_name(uint32_t ggml_type)
{
    /* Numbers without a name were given up by ggml. */
    static const char *const names[] = {
        [0] = "F32", [1] = "F16", [2] = "Q4_0", [3] = "Q4_1", [4] = "Q4_2", [5] = "Q4_3", [6] = "Q5_0", [7] = "Q5_1",
        [8] = "Q8_0", [9] = "Q8_1", [10] = "Q2_K", [11] = "Q3_K", [12] = "Q4_K", [13] = "Q5_K", [14] = "Q6_K",
        [15] = "Q8_K", [16] = "IQ2_XXS", [17] = "IQ2_XS", [18] = "IQ3_XXS", [19] = "IQ1_S", [20] = "IQ4_NL",
        [21] = "IQ3_S", [22] = "IQ2_S", [23] = "IQ4_XS", [24] = "I8", [25] = "I16", [26] = "I32", [27] = "I64",
        [28] = "F64", [29] = "IQ1_M", [30] = "BF16", [31] = "Q4_0_4_4", [32] = "Q4_0_4_8", [33] = "Q4_0_8_8",
        [34] = "TQ1_0", [35] = "TQ2_0", [36] = "IQ4_NL_4_4", [37] = "IQ4_NL_4_8", [38] = "IQ4_NL_8_8", [39] = "MXFP4",
        [40] = "NVFP4", [41] = "Q1_0",
    };

    return ggml_type < N_ELEMENTS(names) ? names[ggml_type] : NULL;
}

int weight_row_bytes(const WeightTypeInfo *info, uint64_t n_cols, uint64_t *ret)
{
    if (n_cols % info->block_elements != 0)
        return error_origin(-EINVAL);
    if (!checked_mul(n_cols / info->block_elements, info->block_bytes, ret))
        return error_origin(-EOVERFLOW);
    return 0;
}

/* ---- blocks taken apart ------------------------------------------------------------------------------------------ */

static uint16_t read_u16(const uint8_t *bytes)
{
    return (uint16_t)(bytes[0] | bytes[1] << 8);
}

/* Nibbles of a 32-element block: byte j holds element j below and element 16 + j above. */
static void read_nibbles32(const uint8_t *bytes, uint8_t *ret)
{
    for (size_t j = 0; j < 16; j++) {
        ret[j] = bytes[j] & 15;
        ret[16 + j] = bytes[j] >> 4;
    }
}

/* Bit j of the 32-bit word is bit 4 of element j. */
static void add_high_bits32(const uint8_t *bytes, uint8_t *codes)
{
    for (size_t j = 0; j < 32; j++)
        codes[j] |= (uint8_t)((bytes[j / 8] >> j % 8 & 1) << 4);
}

/* Nibbles of a 256-element block: of each 64 elements, byte j of 32 holds element j below and element 32 + j above. */
static void read_nibbles256(const uint8_t *bytes, uint8_t *ret)
{
    for (size_t i = 0; i < WEIGHT_PARTS_ELEMENTS; i++)
        ret[i] = bytes[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
}

/*
 * Eight 6-bit scales and eight 6-bit minima in 12 bytes: the first four of each lie in the low six bits of bytes 0-3 and
 * 4-7; of the last four, bytes 8-11 hold the low nibbles (scale below, minimum above) and the two spare bits of
 * bytes 0-7 the rest.
 */
static void read_scales_k(const uint8_t *bytes, WeightParts *ret)
{
    for (size_t s = 0; s < 4; s++) {
        ret->scales[s] = bytes[s] & 63;
        ret->mins[s] = bytes[4 + s] & 63;
        ret->scales[4 + s] = (int8_t)((bytes[8 + s] & 15) | (bytes[s] >> 6) << 4);
        ret->mins[4 + s] = (int8_t)(bytes[8 + s] >> 4 | (bytes[4 + s] >> 6) << 4);
    }
}

/* Of each 128 elements 64 bytes of nibbles: byte j holds element j below and element 64 + j above; 32 bytes of high pairs:
 * byte j holds those of elements j, 32 + j, 64 + j, 96 + j from the lowest bits up. */
static void read_q6_k(const uint8_t *block, WeightParts *ret)
{
    const uint8_t *nibbles = block + offsetof(BlockQ6K, codes), *high = block + offsetof(BlockQ6K, high);

    for (size_t i = 0; i < WEIGHT_PARTS_ELEMENTS; i++) {
        size_t half = i / 128, j = i % 128;
        uint8_t low = nibbles[half * 64 + j % 64] >> (j / 64 * 4) & 15;
        uint8_t pair = high[half * 32 + j % 32] >> (j / 32 * 2) & 3;

        ret->codes[i] = (uint8_t)(low | pair << 4);
    }
    memcpy(ret->scales, block + offsetof(BlockQ6K, scales), sizeof(ret->scales));
    ret->d = read_u16(block + offsetof(BlockQ6K, d));
}

void weight_parts_from_block(WeightType type, const uint8_t *block, WeightParts *ret)
{
    ret->d = read_u16(block); /* first in every block but Q6_K's */
    ret->m = 0;
    switch (type) {
    case WEIGHT_TYPE_Q4_0:
        read_nibbles32(block + offsetof(BlockQ4_0, codes), ret->codes);
        break;
    case WEIGHT_TYPE_Q4_1:
        ret->m = read_u16(block + offsetof(BlockQ4_1, m));
        read_nibbles32(block + offsetof(BlockQ4_1, codes), ret->codes);
        break;
    case WEIGHT_TYPE_Q5_0:
        read_nibbles32(block + offsetof(BlockQ5_0, codes), ret->codes);
        add_high_bits32(block + offsetof(BlockQ5_0, high), ret->codes);
        break;
    case WEIGHT_TYPE_Q5_1:
        ret->m = read_u16(block + offsetof(BlockQ5_1, m));
        read_nibbles32(block + offsetof(BlockQ5_1, codes), ret->codes);
        add_high_bits32(block + offsetof(BlockQ5_1, high), ret->codes);
        break;
    case WEIGHT_TYPE_Q8_0:
        for (size_t j = 0; j < 32; j++)
            ret->codes[j] = block[offsetof(BlockQ8_0, codes) + j] ^ 0x80; /* + 128 */
        break;
    case WEIGHT_TYPE_Q4_K:
        ret->m = read_u16(block + offsetof(BlockQ4K, m));
        read_scales_k(block + offsetof(BlockQ4K, scales), ret);
        read_nibbles256(block + offsetof(BlockQ4K, codes), ret->codes);
        break;
    case WEIGHT_TYPE_Q5_K:
        ret->m = read_u16(block + offsetof(BlockQ5K, m));
        read_scales_k(block + offsetof(BlockQ5K, scales), ret);
        read_nibbles256(block + offsetof(BlockQ5K, codes), ret->codes);
        /* bit s of byte j: bit 4 of element j of the 32 elements that share scale s */
        for (size_t i = 0; i < WEIGHT_PARTS_ELEMENTS; i++)
            ret->codes[i] |= (uint8_t)((block[offsetof(BlockQ5K, high) + i % 32] >> i / 32 & 1) << 4);
        break;
    case WEIGHT_TYPE_Q6_K:
        read_q6_k(block, ret);
        break;
    case WEIGHT_TYPE_F32:
    case WEIGHT_TYPE_F16:
    case WEIGHT_TYPE_BF16:
    case WEIGHT_TYPE_X_INVALID:
        assert(!"blocks of integer types only");
        break;
    }
}

static int zero_point(WeightType type)
{
    return type == WEIGHT_TYPE_Q4_0 ? 8 : type == WEIGHT_TYPE_Q5_0 ? 16 : type == WEIGHT_TYPE_Q8_0 ? 128 : 32;
}

void weight_parts_decode(WeightType type, const WeightParts *parts, float *ret)
{
    float d = float_from_half(parts->d), m = float_from_half(parts->m);

    switch (type) {
    case WEIGHT_TYPE_Q4_0:
    case WEIGHT_TYPE_Q5_0:
    case WEIGHT_TYPE_Q8_0:
        for (size_t i = 0; i < 32; i++)
            ret[i] = d * (float)(parts->codes[i] - zero_point(type));
        break;
    case WEIGHT_TYPE_Q4_1:
    case WEIGHT_TYPE_Q5_1:
        for (size_t i = 0; i < 32; i++)
            ret[i] = d * (float)parts->codes[i] + m;
        break;
    case WEIGHT_TYPE_Q4_K:
    case WEIGHT_TYPE_Q5_K:
        for (size_t i = 0; i < WEIGHT_PARTS_ELEMENTS; i++)
            ret[i] = d * (float)parts->scales[i / 32] * (float)parts->codes[i] - m * (float)parts->mins[i / 32];
        break;
    case WEIGHT_TYPE_Q6_K:
        for (size_t i = 0; i < WEIGHT_PARTS_ELEMENTS; i++)
            ret[i] = d * (float)parts->scales[i / 16] * (float)(parts->codes[i] - zero_point(type));
        break;
    case WEIGHT_TYPE_F32:
    case WEIGHT_TYPE_F16:
    case WEIGHT_TYPE_BF16:
    case WEIGHT_TYPE_X_INVALID:
        assert(!"parts of integer types only");
        break;
    }
}

void weight_decode(const WeightTypeInfo *info, const void *blocks, float *ret, size_t n)
{
    const uint8_t *bytes = blocks;
    WeightParts parts;

    assert(n % info->block_elements == 0);
    if (info->type == WEIGHT_TYPE_F32) {
        memcpy(ret, blocks, n * sizeof(float));
        return;
    }
    for (size_t i = 0; i < n; i += info->block_elements, bytes += info->block_bytes) {
        if (info->type == WEIGHT_TYPE_F16) {
            ret[i] = float_from_half(read_u16(bytes));
        } else if (info->type == WEIGHT_TYPE_BF16) {
            ret[i] = float_from_bf16(read_u16(bytes));
        } else {
            weight_parts_from_block(info->type, bytes, &parts);
            weight_parts_decode(info->type, &parts, ret + i);
        }
    }
}

/* ---- activations ------------------------------------------------------------------------------------------------- */

void weight_quantize_activations(const float *x, size_t n, int max_code, int16_t *ret_codes, float *ret_scales, int32_t *ret_sum16)
{
    for (size_t block = 0; block * 32 < n; block++) {
        const float *values = x + block * 32;
        size_t n_values = MIN(n - block * 32, (size_t)32);
        uint32_t largest = 0; /* as bits, so that a NaN is the largest of all */
        float scale, inverse;

        for (size_t i = 0; i < n_values; i++)
            largest = MAX(largest, float_to_bits(values[i]) & 0x7fffffff);
        if (largest < float_to_bits(WEIGHT_ACTIVATION_MIN))
            largest = 0;
        scale = float_from_bits(largest) / (float)max_code;
        inverse = largest > 0 && largest < 0x7f800000 ? (float)max_code / float_from_bits(largest) : 0.0f;
        ret_scales[block] = scale;
        for (size_t i = 0; i < 32; i++) {
            float value = i < n_values && inverse > 0.0f ? values[i] : 0.0f;

            ret_codes[block * 32 + i] = (int16_t)rintf(value * inverse);
        }
        for (size_t half = 0; half < 2; half++) {
            int32_t sum = 0;

            for (size_t i = 0; i < 16; i++)
                sum += ret_codes[block * 32 + half * 16 + i];
            ret_sum16[block * 2 + half] = sum;
        }
    }
}
