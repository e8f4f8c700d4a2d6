/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vector instructions of x86 for attend-tile-x86.cl, 512 bits wide (AVX-512BW, VNNI) or, with NARROW, 256 (AVX2): products of bytes,
 * rounding, 2^x, fields of codes.  Assumes LANES 1, W 16; vectors of 16 lanes are two registers where it is narrow.
 */

#if INTEGER

#if NARROW
typedef char Bytes32 __attribute__((vector_size(32)));
typedef short Shorts16 __attribute__((vector_size(32)));
typedef float Floats8 __attribute__((vector_size(32)));
#else
typedef char Bytes64 __attribute__((vector_size(64)));
typedef short Shorts32 __attribute__((vector_size(64)));
typedef float Floats16 __attribute__((vector_size(64)));
#endif

#define ALL_16 ((ushort)-1)
#define NEAREST 4 /* rounding mode: as set */

/* An int of memory in all lanes.  Volatile, or the compiler would hoist the spread queries of all dims out of the loop over pages and
 * spill them. */
#if NARROW
#define SPREAD(to, four) __asm__ volatile("vpbroadcastd %1, %0" : "=x"(to) : "m"(four))
#else
#define SPREAD(to, four) __asm__ volatile("vpbroadcastd %1, %0" : "=v"(to) : "m"(four))
#endif

#if NARROW
/* Products of unsigned with signed bytes, summed in pairs to 16 bits: K_STEPS or V_STEPS of them fit before they go on to 32. */
#define K_STEPS (K_BITS <= 4 ? 16 : K_BITS == 5 ? 8 : K_BITS == 6 ? 4 : 1) /* queries: -64 to 63 */
#define V_STEPS (V_BITS <= 4 ? 8 : V_BITS == 5 ? 4 : V_BITS == 6 ? 2 : 1)  /* weights: 0 to 127 */

static inline short16 pair_products(int8 unsigned_bytes, int8 signed_bytes)
{
    return __builtin_astype(__builtin_ia32_pmaddubsw256(__builtin_astype(unsigned_bytes, Bytes32), __builtin_astype(signed_bytes, Bytes32)),
                            short16);
}

static inline int8 add_pairs(int8 sum, short16 pairs)
{
    Shorts16 ones = __builtin_astype((int8)(0x10001), Shorts16);

    return sum + __builtin_astype(__builtin_ia32_pmaddwd256(__builtin_astype(pairs, Shorts16), ones), int8);
}
#endif

/* acc[lane] += four unsigned bytes of the lane times four signed bytes. */
#if NARROW
#elif VNNI
#define DOT_FOUR(acc, unsigned_bytes, signed_bytes) \
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(unsigned_bytes), "v"(signed_bytes))
#else
static inline int16 dot_bw(int16 acc, int16 unsigned_bytes, int16 signed_bytes)
{
    Shorts32 ones = __builtin_astype((int16)(0x10001), Shorts32);
    Shorts32 pairs = (Shorts32)__builtin_ia32_pmaddubsw512(__builtin_astype(unsigned_bytes, Bytes64), __builtin_astype(signed_bytes, Bytes64));

    return acc + __builtin_astype(__builtin_ia32_pmaddwd512(pairs, ones), int16);
}
#define DOT_FOUR(acc, unsigned_bytes, signed_bytes) ((acc) = dot_bw(acc, unsigned_bytes, signed_bytes))
#endif

/* The same for values and parts of weights, 0 to 127; V_ZERO: what the codes are too large by, times 2.  Sums of two products saturate in
 * pmaddubsw: 8-bit codes get a sign there, so that 127 * 128 * 2 fits. */
#if VNNI || V_BITS != 8
#define DOT_VALUES(acc, bytes, weights) DOT_FOUR(acc, bytes, weights)
#define VALUE_PAIRS(bytes, weights)     pair_products(bytes, weights)
#define V_ZERO                          V_TOP
#else
#define DOT_VALUES(acc, bytes, weights) DOT_FOUR(acc, weights, (bytes) ^ (int)0x80808080)
#define VALUE_PAIRS(bytes, weights)     pair_products(weights, (bytes) ^ (int)0x80808080)
#define V_ZERO                          (-1)
#endif

#define WEIGHT_SHIFT 7 /* bits of each part of a weight */
#define WEIGHT_TOP   ((1 << (2 * WEIGHT_SHIFT)) - 1)

#define K_BLOCK_BYTES (BLOCK_TOKENS * K_DIM)
#define K_PAGE_BYTES  (PAGE_TOKENS * K_DIM)
#define V_PAGE_BYTES  (PAGE_TOKENS * V_DIM)

#define RECORD_LINES (RECORD_BYTES / 64)
#define PREFETCH(at) __asm__ volatile("prefetcht0 %0" : : "m"(*(at)))

static inline int16 load_codes(const __global uchar *at)
{
    return *(const __global int16 *)at;
}

#if NARROW
static inline int8 round_eight(float8 x)
{
    return __builtin_astype(__builtin_ia32_cvtps2dq256(__builtin_astype(x, Floats8)), int8);
}

static inline int16 round_to_int(float16 x)
{
    return (int16)(round_eight(x.lo), round_eight(x.hi));
}

static inline float8 larger_eight(float8 a, float8 b)
{
    return __builtin_astype(__builtin_ia32_maxps256(__builtin_astype(a, Floats8), __builtin_astype(b, Floats8)), float8);
}

static inline float16 largest_of(float16 a, float16 b)
{
    return (float16)(larger_eight(a.lo, b.lo), larger_eight(a.hi, b.hi));
}
#else
static inline int16 round_to_int(float16 x)
{
    Ints16 none = __builtin_astype((int16)(0), Ints16);

    return __builtin_astype(__builtin_ia32_cvtps2dq512_mask(__builtin_astype(x, Floats16), none, ALL_16, NEAREST), int16);
}

static inline float16 largest_of(float16 a, float16 b)
{
    return __builtin_astype(__builtin_ia32_maxps512(__builtin_astype(a, Floats16), __builtin_astype(b, Floats16), NEAREST), float16);
}
#endif

/* The low bytes, to an aligned place: PoCL's vstore16() of characters goes lane by lane. */
static inline void store_bytes(int16 x, char *to)
{
    *(char16 *)to = low_bytes(x);
}

/* 2^x to 2.4e-6: a tenth of what a weight's rounding loses. */
static inline float16 exp2_coarse(float16 x)
{
#if NARROW
    int16 whole = round_to_int(largest_of(x, (float16)(-126.0f)));
    float16 rest = x - convert_float16(whole);
#else
    Floats16 in = __builtin_astype(x, Floats16), whole = __builtin_ia32_rndscaleps_mask(in, 8, in, ALL_16, NEAREST);
    float16 rest = x - __builtin_astype(whole, float16);
#endif
    float16 p = fma((float16)(1.3333558e-3f), rest, (float16)(9.6181291e-3f));

    p = fma(p, rest, (float16)(5.5504109e-2f));
    p = fma(p, rest, (float16)(2.4022651e-1f));
    p = fma(p, rest, (float16)(6.9314718e-1f));
    p = fma(p, rest, (float16)(1.0f));
#if NARROW
    return x > -125.0f ? as_float16(as_int16(p) + (whole << 23)) : (float16)(0.0f);
#else
    in = __builtin_astype(p, Floats16);
    return __builtin_astype(__builtin_ia32_scalefps512_mask(in, whole, in, ALL_16, NEAREST), float16);
#endif
}

/* Field @i of @width bits of each byte; the same from a high plane, moved above @base bits. */
#define CODE_FIELDS(Codes, code_field, rest_field)                                                                        \
    static inline Codes code_field(Codes word, int i, int width)                                                          \
    {                                                                                                                     \
        return width == 8 ? word : (word >> (i * width)) & (int)FIELD_MASK(width);                                        \
    }                                                                                                                     \
                                                                                                                          \
    static inline Codes rest_field(Codes word, int i, int width, int base)                                                \
    {                                                                                                                     \
        const int down = i * width - base;                                                                                \
                                                                                                                          \
        return (down <= 0 ? word << -down : word >> down) & (int)(FIELD_MASK(width) << base);                             \
    }
CODE_FIELDS(int16, code_field, rest_field)
#if NARROW
CODE_FIELDS(int8, code_field_8, rest_field_8)
#endif

/* ---- unpacking to bytes --------------------------------------------------------------------------------------------------------- */

static inline void unpack_keys(const __global uchar *record, __global uchar *to)
{
    for (int g = 0; g < K_VECTORS; g++)
        for (int upper = 0; upper < 2; upper++) {
            int16 word = load_codes(record + (g * 2 + upper) * 64);

            UNROLL for (int i = 0; i < K_PER; i++) {
                const int four = g * K_PER + i;
                int16 codes = code_field(word, i, K_BASE);
#if K_REST
                codes |= rest_field(load_codes(record + K_HIGH + (four / K_REST_PER * 2 + upper) * 64), four % K_REST_PER, K_REST, K_BASE);
#endif
                *(__global int16 *)(to + (four * 2 + upper) * 64) = codes;
            }
        }
}

/* Codes of tokens 4 t .. 4 t + 3 of dims 16 dims .. */
static inline int16 value_codes(const __global uchar *record, int dims, int t)
{
    int16 codes = code_field(load_codes(record + V_OFFSET + (dims * V_BASE + t / V_PER) * 64), t % V_PER, V_BASE);

#if V_REST
    codes |= rest_field(load_codes(record + V_HIGH + (dims * V_REST + t / V_REST_PER) * 64), t % V_REST_PER, V_REST, V_BASE);
#endif
    return codes;
}

static inline void unpack_values(const __global uchar *record, __global uchar *to)
{
    for (int dims = 0; dims < V_DIM / 16; dims++)
        UNROLL for (int t = 0; t < 8; t++)
            *(__global int16 *)(to + (dims * 8 + t) * 64) = value_codes(record, dims, t);
}
#endif
