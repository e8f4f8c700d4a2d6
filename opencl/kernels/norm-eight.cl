/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prepare_row() of norm.cl for the rows of a whole group at once, AVX-512 only: what goes across the lanes of a vector (largest, sums,
 * bytes of a row side by side) is done for eight rows with the shuffles that one row takes.  The results are those of prepare_row().
 */

#if LANES == 16 && !FLOAT_ACTS

typedef short PackShorts __attribute__((vector_size(64)));
typedef char PackBytes __attribute__((vector_size(64)));

#define PACK_SHORTS(a, b) __builtin_ia32_packssdw512(__builtin_astype(a, CodeInts), __builtin_astype(b, CodeInts))
/* Of two rows' shorts as PACK_SHORTS() leaves them: the bytes of one row, then those of the other. */
#define ROWS_BYTES(v) __builtin_shufflevector(__builtin_astype(v, VI), (VI)(0), 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)

/* Quarters of 4 lanes: the first two of a and b, the last two; the even lanes of both, the odd ones. */
#define QUARTER_LOW(a, b)  __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define QUARTER_HIGH(a, b) __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define QUARTER_EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30)
#define QUARTER_ODD(a, b)  __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31)
/* Quarters 0 and 1 of both, 2 and 3; 0 and 2, 1 and 3. */
#define HALVES_LOW(a, b)   __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HALVES_HIGH(a, b)  __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define QUARTERS_EVEN(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define QUARTERS_ODD(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)

/* The largest lane of each of eight vectors. */
ALWAYS_INLINE int8 largest_of_rows(const VI *rows)
{
    VI two[4], four[2], all;

#pragma unroll
    for (int i = 0; i < 4; i++)
        two[i] = max(QUARTER_LOW(rows[2 * i], rows[2 * i + 1]), QUARTER_HIGH(rows[2 * i], rows[2 * i + 1]));
#pragma unroll
    for (int i = 0; i < 2; i++)
        four[i] = max(QUARTER_EVEN(two[2 * i], two[2 * i + 1]), QUARTER_ODD(two[2 * i], two[2 * i + 1]));
    all = max(HALVES_LOW(four[0], four[1]), HALVES_HIGH(four[0], four[1]));
    return max(__builtin_shufflevector(all, all, 0, 1, 2, 3, 8, 9, 10, 11), __builtin_shufflevector(all, all, 4, 5, 6, 7, 12, 13, 14, 15));
}

/* The sums of both halves of each row's codes, packed as by PACK_SHORTS(): row 0's first. */
ALWAYS_INLINE VI sums_of_rows(const PackShorts *rows)
{
    const PackShorts ones = __builtin_astype((VI)(0x00010001), PackShorts);
    VI two[4], four[2];

#pragma unroll
    for (int i = 0; i < 4; i++) {
        VI a = __builtin_astype(__builtin_ia32_pmaddwd512(rows[2 * i], ones), VI);
        VI b = __builtin_astype(__builtin_ia32_pmaddwd512(rows[2 * i + 1], ones), VI);

        two[i] = QUARTER_EVEN(a, b) + QUARTER_ODD(a, b);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        four[i] = HALVES_LOW(two[2 * i], two[2 * i + 1]) + HALVES_HIGH(two[2 * i], two[2 * i + 1]);
    return QUARTERS_EVEN(four[0], four[1]) + QUARTERS_ODD(four[0], four[1]);
}

/* Bytes of two rows. */
ALWAYS_INLINE void store_two_rows(const VI bytes, __global int *to, const uint terms)
{
    vstore8(bytes.lo, 0, to);
    vstore8(bytes.hi, 0, to + ACT_WORDS(terms));
}

ALWAYS_INLINE void store_rows_codes(__global int *act, const PackShorts *rows, const uint terms)
{
#pragma unroll
    for (int r = 0; r < GROUP_ROWS; r += 2) {
        __global int *to = act + ACT_WORDS(terms) * r + ACT_CODES;
        PackShorts a = rows[r], b = rows[r + 1];

        if (terms == 2) {
            const PackShorts up = __builtin_astype((VI)(0x00800080), PackShorts), low = __builtin_astype((VI)(0x00ff00ff), PackShorts);

            store_two_rows(ROWS_BYTES(__builtin_ia32_packuswb512(a & low, b & low)), to + 8, 2);
            a = (a + up) >> 8;
            b = (b + up) >> 8;
        }
        store_two_rows(ROWS_BYTES(__builtin_ia32_packsswb512(a, b)), to, terms);
    }
}

/* What stands before the codes of each row. */
ALWAYS_INLINE void store_rows_heads(__global int *act, const float8 scale, const VI sums, const uint terms)
{
    const int8 sum = sums.even + sums.odd;
    float scales[GROUP_ROWS], scaled[GROUP_ROWS];
    int minus[2 * GROUP_ROWS];

    vstore8(scale, 0, scales);
    vstore8(scale * __builtin_convertvector(sum, float8), 0, scaled);
    vstore16(-sums, 0, minus);
#pragma unroll
    for (int r = 0; r < GROUP_ROWS; r++) {
        __global int *to = act + ACT_WORDS(terms) * r;

        *(__global float2 *)to = (float2)(scales[r], scaled[r]);
        *(__global int2 *)(to + ACT_MINUS) = (int2)(minus[2 * r], minus[2 * r + 1]);
    }
}

/* Thirty-two values of each row. */
ALWAYS_INLINE void store_rows_block(__global int *act, const VF (*values)[2], const uint terms)
{
    PackShorts packed[GROUP_ROWS];
    VI largest[GROUP_ROWS];
    float inverses[GROUP_ROWS];
    float8 inverse;
    int8 bits;

#pragma unroll
    for (int r = 0; r < GROUP_ROWS; r++)
        largest[r] = max(AS_VI(values[r][0]) & 0x7fffffff, AS_VI(values[r][1]) & 0x7fffffff);
    bits = largest_of_rows(largest);
    if (any(bits < ACTIVATION_MIN_BITS || bits >= 0x7f800000)) {
#pragma unroll 1
        for (int r = 0; r < GROUP_ROWS; r++)
            store_codes(act + ACT_WORDS(terms) * r, values[r], terms);
        return;
    }
    inverse = (float8)(MAX_ACT_CODE(terms)) / as_float8(bits);
    vstore8(inverse, 0, inverses);
#pragma unroll
    for (int r = 0; r < GROUP_ROWS; r++) {
        VI codes[2];

#pragma unroll
        for (int k = 0; k < 2; k++)
            codes[k] = AS_VI(values[r][k] * (VF)(inverses[r]) + (VF)(0x1.8p23f)) - 0x4b400000;
        packed[r] = PACK_SHORTS(codes[0], codes[1]);
    }
    store_rows_codes(act, packed, terms);
    store_rows_heads(act, as_float8(bits) / (float8)(MAX_ACT_CODE(terms)), sums_of_rows(packed), terms);
}

/* Half of the lines that another thread has written come from its cache, one by one if nobody asks for them early. */
#define ROWS_AHEAD   2
#define BLOCKS_AHEAD 4

ALWAYS_INLINE void ask_for(const __global float *x, const uint n)
{
#pragma unroll 1
    for (uint i = 0; i < n; i += 16)
        __asm__ volatile("prefetcht0 %0" : : "m"(x[i]));
}

/* Rows of whole blocks become the group at @act. */
ALWAYS_INLINE void prepare_eight(const __global float *const *x, const __global float *norm, const float eps, const uint n_cols,
                                 __global int *act, const uint terms)
{
    float factors[GROUP_ROWS];

#pragma unroll 1
    for (int r = 0; r < GROUP_ROWS + ROWS_AHEAD; r++) {
        if (r < GROUP_ROWS)
            ask_for(x[r], norm ? n_cols : min(n_cols, (uint)BLOCKS_AHEAD * 32));
        if (norm && r >= ROWS_AHEAD)
            factors[r - ROWS_AHEAD] = norm_factor(x[r - ROWS_AHEAD], n_cols, eps);
    }
#pragma unroll 1
    for (uint c = 0; c < n_cols; c += 32, act += ACT_BLOCK_WORDS(terms)) {
        VF values[GROUP_ROWS][2];

#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                if (!norm)
                    __asm__ volatile("prefetcht0 %0" : : "m"(x[r][c + BLOCKS_AHEAD * 32 + k * LANES]));
                values[r][k] = V_LOAD(x[r] + c + k * LANES);
                if (norm)
                    values[r][k] = values[r][k] * (VF)(factors[r]) * V_LOAD(norm + c + k * LANES);
            }
        store_rows_block(act, values, terms);
    }
}

#endif
