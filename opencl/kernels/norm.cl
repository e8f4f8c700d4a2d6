/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prologue of products: RMSNorm and, for compute `fast`, rounding to 8 bits (weight_quantize_activations()).
 *
 *   -DFLOAT_ACTS   1: activations stay float: compute `exact`, and float weights (default 0)
 *
 * Prepared activations ("act") lie in groups of 8 rows, so that a product over 8 rows walks one stream:
 *   bytes   per group and block of 32 columns, 8 x 48 bytes: row r of the group at 48 r: 32 codes, f32 scale,
 *           f32 scale * sum of codes, int32 minus the sum of the codes of each half
 *   floats  per group and column: 8 floats
 * A row in two terms takes two rows of a group: the second holds what rounding the first has left over, rounded likewise, so
 * that their products with the same weights add up to a product with about 15 bits.  A group then holds 4 rows of the pass.
 * Columns are padded to whole blocks of 32 with zeros.  Rows of the last group beyond the pass are not written; whatever
 * is computed from them is not stored.
 */

#ifndef FLOAT_ACTS
#define FLOAT_ACTS 0
#endif

#define GROUP_ROWS 8
#define ACT_WORDS  12                        /* of one row and block, as bytes */
#define ACT_SCALE  8
#define ACT_SUM    9
#define ACT_MINUS  10
#define ACT_BLOCK_WORDS (FLOAT_ACTS ? 32 * GROUP_ROWS : ACT_WORDS * GROUP_ROWS) /* of one group and block */

/* WEIGHT_ACTIVATION_MIN of quant/weight.h, as bits */
#define ACTIVATION_MIN_BITS 0x0d800000

#if LANES > 1

#define BLOCK_VECTORS (32 / LANES)

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

/* Thirty-two values of one row become its part of a fast block; @values are left with what rounding has taken away. */
ALWAYS_INLINE void store_fast_block(__global int *to, VF *values)
{
    VI largest = AS_VI(values[0]) & 0x7fffffff;
    int bits, sums[2] = {0, 0};
    float scale, inverse;

#pragma unroll
    for (int k = 1; k < BLOCK_VECTORS; k++)
        largest = max(largest, AS_VI(values[k]) & 0x7fffffff);
    bits = lanes_max(largest);
    bits = bits < ACTIVATION_MIN_BITS ? 0 : bits;
    scale = as_float(bits) / 127.0f;
    inverse = bits > 0 && bits < 0x7f800000 ? 127.0f / as_float(bits) : 0.0f;
#pragma unroll
    for (int k = 0; k < BLOCK_VECTORS; k++) {
        /* adding 1.5 * 2^23 rounds half to even into the low bits */
        VI codes = AS_VI(values[k] * (VF)(inverse) + (VF)(0x1.8p23f)) - 0x4b400000;

        codes = inverse > 0.0f ? codes : (VI)(0);
        V_STORE(V_JOIN(convert_, V(char))(codes), (__global char *)to + k * LANES);
        sums[k * LANES / 16] += lanes_sum_int(codes);
        values[k] = fma((VF)(-scale), TO_VF(codes), values[k]);
    }
    ((__global float *)to)[ACT_SCALE] = scale;
    ((__global float *)to)[ACT_SUM] = scale * (float)(sums[0] + sums[1]);
    to[ACT_MINUS] = -sums[0];
    to[ACT_MINUS + 1] = -sums[1];
}

/* Row @x becomes rows r ... r + terms - 1 of the group at @act. */
ALWAYS_INLINE void prepare_row(const __global float *x, const __global float *norm, const float eps, const uint n_cols,
                               __global int *act, const uint r, const uint terms)
{
    VF factor = (VF)(norm ? norm_factor(x, n_cols, eps) : 1.0f);

    for (uint c = 0; c < n_cols; c += 32, act += ACT_BLOCK_WORDS) {
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
#pragma unroll 1
        for (uint t = 0; t < terms; t++)
            store_fast_block(act + ACT_WORDS * (r + t), values);
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

/* @values are left with what rounding has taken away. */
ALWAYS_INLINE void store_block(__global int *act, const uint r, float *values)
{
#if FLOAT_ACTS
    for (int i = 0; i < 32; i++)
        ((__global float *)act)[GROUP_ROWS * i + r] = values[i];
#else
    __global int *to = act + ACT_WORDS * r;
    int bits = 0, sums[2] = {0, 0};
    float scale, inverse;

    for (int i = 0; i < 32; i++)
        bits = max(bits, as_int(values[i]) & 0x7fffffff);
    bits = bits < ACTIVATION_MIN_BITS ? 0 : bits;
    scale = as_float(bits) / 127.0f;
    inverse = bits > 0 && bits < 0x7f800000 ? 127.0f / as_float(bits) : 0.0f;
    for (int i = 0; i < 32; i++) {
        int code = inverse > 0.0f ? as_int(values[i] * inverse + 0x1.8p23f) - 0x4b400000 : 0;

        ((__global char *)to)[i] = (char)code;
        sums[i / 16] += code;
        values[i] = fma(-scale, (float)code, values[i]);
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
    act += (size_t)(row * terms / GROUP_ROWS) * n_blocks * ACT_BLOCK_WORDS;
    factor = norm ? norm_factor(x, n_cols, eps, sums) : 1.0f;
    for (uint b = get_local_id(0); b < n_blocks; b += PREPARE_ITEMS) {
        float values[32];

        for (uint i = 0; i < 32; i++) {
            uint c = 32 * b + i;

            values[i] = c < n_cols ? norm ? x[c] * factor * factors[c] : x[c] : 0.0f;
        }
        for (uint t = 0; t < terms; t++)
            store_block(act + b * ACT_BLOCK_WORDS, row * terms % GROUP_ROWS + t, values);
    }
}

#endif
