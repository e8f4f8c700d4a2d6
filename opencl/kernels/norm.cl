/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prologue of products: RMSNorm and, for compute `fast`, rounding to 8 or 16 bits (weight_quantize_activations()).
 *
 *   -DFLOAT_ACTS   1: activations stay float: compute `exact`, and float weights (default 0)
 *
 * Prepared activations ("act") lie in groups of 8 rows, so that a product over 8 rows walks one stream:
 *   codes   per group and block of 32 columns, 8 x ACT_WORDS(terms) words, one row after the other: f32 scale, f32 scale * sum of
 *           codes, int32 minus the sum of the codes of each half, then 32 codes of a byte.  With two terms (WEIGHT_ACTIVATION_FINE of
 *           quant/weight.h) a code is 256 * high + low: the 32 high bytes, then the 32 low ones.
 *   floats  per group and column: 8 floats
 * Columns are padded to whole blocks of 32 with zeros.  Rows of the last group beyond the pass are not written, or repeat the
 * last one; whatever is computed from them is not stored.
 */

#ifndef FLOAT_ACTS
#define FLOAT_ACTS 0
#endif

#define GROUP_ROWS 8
#define ACT_SCALE  0
#define ACT_SUM    1
#define ACT_MINUS  2
#define ACT_CODES  4
#define ACT_WORDS(terms) (4 + 8 * (terms)) /* of one row and block */
#define ACT_BLOCK_WORDS(terms) (FLOAT_ACTS ? 32 * GROUP_ROWS : ACT_WORDS(terms) * GROUP_ROWS) /* of one group and block */
#define MAX_ACT_CODE(terms) ((terms) == 2 ? 32512.0f : 127.0f)

/* WEIGHT_ACTIVATION_MIN of quant/weight.h, as bits */
#define ACTIVATION_MIN_BITS 0x0d800000

#if LANES > 1

#define BLOCK_VECTORS (32 / LANES)

typedef int CodeInts __attribute__((vector_size(4 * LANES)));
typedef char CodeBytes __attribute__((vector_size(LANES)));
typedef V(char) CodeChars;

/* The low bytes, to an aligned place: PoCL's convert_char16() and vstore16() of characters go lane by lane. */
ALWAYS_INLINE void store_bytes(VI codes, __global char *to)
{
    *(__global CodeChars *)to = __builtin_astype(__builtin_convertvector(__builtin_astype(codes, CodeInts), CodeBytes), CodeChars);
}

/* Columns c .. c + LANES - 1; those from n on are zeros. */
ALWAYS_INLINE VF load_columns(const __global float *x, const uint c, const uint n)
{
    VF values = (VF)(0.0f);

    if (c + LANES <= n)
        return V_LOAD(x + c);
    for (uint i = c; i < n; i++)
        ((float *)&values)[i - c] = x[i];
    return values;
}

/* 1 / sqrt(mean of squares + eps); four accumulators, for the latency of fma. */
ALWAYS_INLINE float norm_factor(const __global float *x, const uint n, const float eps)
{
    VF sums[4] = {(VF)(0.0f), (VF)(0.0f), (VF)(0.0f), (VF)(0.0f)};

    for (uint c = 0; c < n; c += 4 * LANES) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            VF values = load_columns(x, min(c + k * LANES, n), n);

            sums[k] = fma(values, values, sums[k]);
        }
    }
    return 1.0f / sqrt(lanes_sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / (float)n + eps);
}

ALWAYS_INLINE int lanes_max(VI v)
{
#if LANES == 16
    int8 a = max(v.lo, v.hi);
    int4 b = max(a.lo, a.hi);
#else
    int4 b = max(v.lo, v.hi);
#endif
    int2 c = max(b.lo, b.hi);

    return max(c.x, c.y);
}

ALWAYS_INLINE int lanes_sum_int(VI v)
{
#if LANES == 16
    int8 a = v.lo + v.hi;
    int4 b = a.lo + a.hi;
#else
    int4 b = v.lo + v.hi;
#endif
    int2 c = b.lo + b.hi;

    return c.x + c.y;
}

/* Thirty-two values of one row become its part of a block of codes. */
ALWAYS_INLINE void store_codes(__global int *to, const VF *values, const uint terms)
{
    VI largest = AS_VI(values[0]) & 0x7fffffff;
    int bits, sums[2] = {0, 0};
    float scale, inverse;

#pragma unroll
    for (int k = 1; k < BLOCK_VECTORS; k++)
        largest = max(largest, AS_VI(values[k]) & 0x7fffffff);
    bits = lanes_max(largest);
    bits = bits < ACTIVATION_MIN_BITS ? 0 : bits;
    scale = as_float(bits) / MAX_ACT_CODE(terms);
    inverse = bits > 0 && bits < 0x7f800000 ? MAX_ACT_CODE(terms) / as_float(bits) : 0.0f;
#pragma unroll
    for (int k = 0; k < BLOCK_VECTORS; k++) {
        /* adding 1.5 * 2^23 rounds half to even into the low bits */
        VI codes = AS_VI(values[k] * (VF)(inverse) + (VF)(0x1.8p23f)) - 0x4b400000;
        __global char *bytes = (__global char *)(to + ACT_CODES) + k * LANES;

        codes = inverse > 0.0f ? codes : (VI)(0);
        sums[k * LANES / 16] += lanes_sum_int(codes);
        if (terms == 2) {
            VI high = (codes + 128) >> 8;

            store_bytes(codes - (high << 8), bytes + 32);
            codes = high;
        }
        store_bytes(codes, bytes);
    }
    ((__global float *)to)[ACT_SCALE] = scale;
    ((__global float *)to)[ACT_SUM] = scale * (float)(sums[0] + sums[1]);
    to[ACT_MINUS] = -sums[0];
    to[ACT_MINUS + 1] = -sums[1];
}

/* Row @x becomes row r of the group at @act. */
ALWAYS_INLINE void prepare_row(const __global float *x, const __global float *norm, const float eps, const uint n_cols,
                               __global int *act, const uint r, const uint terms)
{
    VF factor = (VF)(norm ? norm_factor(x, n_cols, eps) : 1.0f);

    for (uint c = 0; c < n_cols; c += 32, act += ACT_BLOCK_WORDS(terms)) {
        VF values[BLOCK_VECTORS];

#pragma unroll
        for (int k = 0; k < BLOCK_VECTORS; k++) {
            uint column = min(c + k * LANES, n_cols);

            values[k] = load_columns(x, column, n_cols);
            if (norm)
                values[k] = values[k] * factor * load_columns(norm, column, n_cols);
        }
#if FLOAT_ACTS
        for (int i = 0; i < 32; i++)
            ((__global float *)act)[GROUP_ROWS * i + r] = ((const float *)values)[i];
#else
        if (terms == 2)
            store_codes(act + ACT_WORDS(2) * r, values, 2);
        else
            store_codes(act + ACT_WORDS(1) * r, values, 1);
#endif
    }
}

#else /* LANES == 1 */

/* PREPARE_ITEMS work-items share a row; each takes every PREPARE_ITEMS-th block. */
#ifndef PREPARE_ITEMS
#define PREPARE_ITEMS 32
#endif

ALWAYS_INLINE float norm_factor(const __global float *x, const uint n, const float eps, __local float *sums)
{
    uint item = get_local_id(0);
    float sum = 0.0f;

    for (uint b = item; b * 32 < n; b += PREPARE_ITEMS)
        for (uint c = b * 32; c < min(b * 32 + 32, n); c++)
            sum = fma(x[c], x[c], sum);
    sums[item] = sum;
    for (uint step = PREPARE_ITEMS / 2; step > 0; step /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (item < step)
            sums[item] += sums[item + step];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return 1.0f / sqrt(sums[0] / (float)n + eps);
}

ALWAYS_INLINE void store_block(__global int *act, const uint r, const float *values, const uint terms)
{
#if FLOAT_ACTS
    for (int i = 0; i < 32; i++)
        ((__global float *)act)[GROUP_ROWS * i + r] = values[i];
#else
    __global int *to = act + ACT_WORDS(terms) * r;
    int bits = 0, sums[2] = {0, 0};
    float scale, inverse;

    for (int i = 0; i < 32; i++)
        bits = max(bits, as_int(values[i]) & 0x7fffffff);
    bits = bits < ACTIVATION_MIN_BITS ? 0 : bits;
    scale = as_float(bits) / MAX_ACT_CODE(terms);
    inverse = bits > 0 && bits < 0x7f800000 ? MAX_ACT_CODE(terms) / as_float(bits) : 0.0f;
    for (int i = 0; i < 32; i++) {
        int code = inverse > 0.0f ? as_int(values[i] * inverse + 0x1.8p23f) - 0x4b400000 : 0;
        int high = terms == 2 ? (code + 128) >> 8 : code;

        sums[i / 16] += code;
        ((__global char *)(to + ACT_CODES))[i] = (char)high;
        if (terms == 2)
            ((__global char *)(to + ACT_CODES))[32 + i] = (char)(code - (high << 8));
    }
    ((__global float *)to)[ACT_SCALE] = scale;
    ((__global float *)to)[ACT_SUM] = scale * (float)(sums[0] + sums[1]);
    to[ACT_MINUS] = -sums[0];
    to[ACT_MINUS + 1] = -sums[1];
#endif
}

/* PREPARE_ITEMS work-items in dimension 0 share the row of dimension 1. */
__kernel void prepare_rows(const __global float *x, const __global int *x_rows, const ulong x_rows_offset,
                           const __global float *norm, const ulong norm_offset, const float eps, const uint n_cols,
                           const uint terms, __global int *act)
{
    __local float sums[PREPARE_ITEMS];
    const __global float *factors = (const __global float *)((const __global uchar *)norm + norm_offset);
    uint row = get_global_id(1), n_blocks = (n_cols + 31) / 32;
    uint from = x_rows ? ((const __global int *)((const __global uchar *)x_rows + x_rows_offset))[row] : row;
    float factor;

    x += (size_t)from * n_cols;
    act += (size_t)(row / GROUP_ROWS) * n_blocks * ACT_BLOCK_WORDS(terms);
    factor = norm ? norm_factor(x, n_cols, eps, sums) : 1.0f;
    for (uint b = get_local_id(0); b < n_blocks; b += PREPARE_ITEMS) {
        float values[32];

        for (uint i = 0; i < 32; i++) {
            uint c = 32 * b + i;

            values[i] = c < n_cols ? norm ? x[c] * factor * factors[c] : x[c] : 0.0f;
        }
        store_block(act + b * ACT_BLOCK_WORDS(terms), row % GROUP_ROWS, values, terms);
    }
}

#endif
