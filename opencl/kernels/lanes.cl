/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lanes: how many weight rows one work-item carries, and the arithmetic on them.  First source of the ops programs.
 *
 *   -DSIMD   gpu.h's GpuSimd: 0 portable, 1 AVX2, 2 AVX-512BW, 3 AVX-512 with VNNI (default 0)
 *
 * Portable work-items carry one row: neighbouring work-items read neighbouring lanes.  On x86 CPUs one work-item is a
 * whole work-group and carries 8 or 16 rows in a vector register.  V* types are scalars or vectors accordingly.
 * No contraction anywhere: a fused multiply-add is written as fma(), so that every kernel sums alike.
 */

#pragma OPENCL FP_CONTRACT OFF

#ifndef SIMD
#define SIMD 0
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#if SIMD >= 2
#define LANES 16
#define V(type) type##16
#elif SIMD == 1
#define LANES 8
#define V(type) type##8
#else
#define LANES 1
#define V(type) type
#endif
#define V_JOIN2(a, b) a##b
#define V_JOIN(a, b)  V_JOIN2(a, b)
#define VF            V(float)
#define VI            V(int)
#define VU            V(uint)
#define AS_VF(x)      V_JOIN(as_, V(float))(x)
#define AS_VI(x)      V_JOIN(as_, V(int))(x)
#define TO_VF(x)      V_JOIN(convert_, V(float))(x)
#define TO_VU(x)      V_JOIN(convert_, V(uint))(x)
#define TO_VI(x)      V_JOIN(convert_, V(int))(x)

/* On x86 a work-item is a work-group; PoCL builds one variant of a kernel that says so. */
#if LANES > 1
#define WORK_GROUP __attribute__((reqd_work_group_size(1, 1, 1)))
#else
#define WORK_GROUP
#endif

#if LANES == 16
#define V_LOAD(p)     vload16(0, p)
#define V_STORE(v, p) vstore16(v, 0, p)
#elif LANES == 8
#define V_LOAD(p)     vload8(0, p)
#define V_STORE(v, p) vstore8(v, 0, p)
#else
#define V_LOAD(p)     (*(p))
#define V_STORE(v, p) (*(p) = (v))
#endif

/* Hides a value from the x86 optimiser, which would otherwise make a copy of the big loops for each case that leads to them:
 * that has tripled the time to compile. */
#if LANES > 1
#define OPAQUE(x) __asm__("" : "+r"(x))
#else
#define OPAQUE(x) (void)(x)
#endif

/*
 * Asks for a record's cache lines well ahead of their use.  The hardware does not look beyond a page of 4 KiB: reading from
 * memory gains a fifth (measured 11 to 14 GB/s a thread on small pages, 18 to 22 on huge ones).
 */
#define PREFETCH_AHEAD 6144

ALWAYS_INLINE void prefetch_record(const __global uchar *record, const uint bytes)
{
#if LANES > 1
#pragma unroll
    for (uint i = 0; i < bytes; i += 64)
        __asm__ volatile("prefetcht1 %0" : : "m"(record[PREFETCH_AHEAD + i]));
#endif
}

/* ---- binary16 ---------------------------------------------------------------------------------------------------- */

/* vload_half is a slow library call on PoCL; these are exact too, subnormals included. */
#if LANES == 16
typedef short GccHalves __attribute__((vector_size(32)));
typedef float GccFloats __attribute__((vector_size(64)));

ALWAYS_INLINE VF half_lanes(const __global ushort *p)
{
    GccHalves halves = __builtin_astype(vload16(0, p), GccHalves);

    return __builtin_astype(__builtin_ia32_vcvtph2ps512_mask(halves, __builtin_astype((VF)(0.0f), GccFloats), (ushort)0xffff, 4), VF);
}
#elif LANES == 8
typedef short GccHalves __attribute__((vector_size(16)));

ALWAYS_INLINE VF half_lanes(const __global ushort *p)
{
    return __builtin_astype(__builtin_ia32_vcvtph2ps256(__builtin_astype(vload8(0, p), GccHalves)), VF);
}
#else
ALWAYS_INLINE VF half_lanes(const __global ushort *p)
{
    uint half_bits = *p, sign = (half_bits & 0x8000) << 16, magnitude = half_bits & 0x7fff;
    float value;

    if (magnitude < 0x400)
        value = (float)magnitude * 0x1p-24f;
    else
        value = as_float((magnitude << 13) + (magnitude < 0x7c00 ? 112u << 23 : 224u << 23));
    return as_float(as_uint(value) | sign);
}
#endif

/* ---- integer products -------------------------------------------------------------------------------------------- */

/*
 * acc + sum over v = 0..7 of codes[v] . a[v]: each 32-bit lane holds four unsigned codes <= MAX_CODE, each word of @a four
 * signed activations.  Exact.
 */
#if SIMD == 3
ALWAYS_INLINE VI dot4(VI acc, VU codes, const __global int *a)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(codes), "m"(*a));
    return acc;
}
#elif SIMD == 0
ALWAYS_INLINE VI dot4(VI acc, VU codes, const __global int *a)
{
    char4 x = as_char4(*a);
    uchar4 c = as_uchar4(codes);

    return acc + (int)c.s0 * x.s0 + (int)c.s1 * x.s1 + (int)c.s2 * x.s2 + (int)c.s3 * x.s3;
}
#else
#if LANES == 16
typedef char GccBytes __attribute__((vector_size(64)));
typedef short GccShorts __attribute__((vector_size(64)));
#define MADD_BYTES(u, s) __builtin_ia32_pmaddubsw512(u, s)
#define MADD_SHORTS(a, b) __builtin_ia32_pmaddwd512(a, b)
#else
typedef char GccBytes __attribute__((vector_size(32)));
typedef short GccShorts __attribute__((vector_size(32)));
#define MADD_BYTES(u, s) __builtin_ia32_pmaddubsw256(u, s)
#define MADD_SHORTS(a, b) __builtin_ia32_pmaddwd256(a, b)
#endif

/* Sum of @n pair products in 16 bits; n * 2 * 128 * largest code must stay below 32768. */
ALWAYS_INLINE VI dot_shorts(VI acc, const VU *codes, const __global int *a, const int n)
{
    const GccShorts ones = __builtin_astype((VI)(0x00010001), GccShorts);
    GccShorts sum = __builtin_astype((VI)(0), GccShorts);

#pragma unroll
    for (int v = 0; v < n; v++)
        sum += MADD_BYTES(__builtin_astype(codes[v], GccBytes), __builtin_astype((VI)(a[v]), GccBytes));
    return acc + __builtin_astype(MADD_SHORTS(sum, ones), VI);
}
#endif

ALWAYS_INLINE VI dot_block(VI acc, const VU *codes, const __global int *a, const int n, const int max_code)
{
#if SIMD == 3 || SIMD == 0
#pragma unroll
    for (int v = 0; v < n; v++)
        acc = dot4(acc, codes[v], a + v);
    return acc;
#else
    const int step = max_code <= 15 ? 8 : max_code <= 31 ? 4 : 2;

    if (max_code > 63) {
        /* eight bits would saturate the 16-bit sums: high and low nibbles apart */
        VU low[8], high[8];

#pragma unroll
        for (int v = 0; v < n; v++) {
            low[v] = codes[v] & 0x0f0f0f0fu;
            high[v] = codes[v] >> 4 & 0x0f0f0f0fu;
        }
        return dot_shorts(acc, low, a, n) + (dot_shorts((VI)(0), high, a, n) << 4);
    }
#pragma unroll
    for (int v = 0; v < n; v += step)
        acc = dot_shorts(acc, codes + v, a + v, n < step ? n : step);
    return acc;
#endif
}

/* ---- float functions --------------------------------------------------------------------------------------------- */

/* Sum and largest over the lanes of 16 or 8, in one fixed order. */
#if LANES == 16
ALWAYS_INLINE float lanes_sum(VF v)
{
    float8 a = v.lo + v.hi;
    float4 b = a.lo + a.hi;
    float2 c = b.lo + b.hi;

    return c.x + c.y;
}
#elif LANES == 8
ALWAYS_INLINE float lanes_sum(VF v)
{
    float4 b = v.lo + v.hi;
    float2 c = b.lo + b.hi;

    return c.x + c.y;
}
#endif

/* 2^t for t in [-126, 126] within 1e-7: the Taylor polynomial of degree 7 on [-1/2, 1/2]. */
ALWAYS_INLINE VF lanes_exp2(VF t)
{
    const VF magic = (VF)(0x1.8p23f);
    VF shifted = t + magic, f = t - (shifted - magic), p = (VF)(1.5252733804e-5f);

    p = fma(p, f, (VF)(1.5403530394e-4f));
    p = fma(p, f, (VF)(1.3333558146e-3f));
    p = fma(p, f, (VF)(9.6181291076e-3f));
    p = fma(p, f, (VF)(5.5504108665e-2f));
    p = fma(p, f, (VF)(2.4022650696e-1f));
    p = fma(p, f, (VF)(6.9314718056e-1f));
    p = fma(p, f, (VF)(1.0f));
    return AS_VF(AS_VI(p) + ((AS_VI(shifted) - 0x4b400000) << 23));
}

/* x / (1 + e^-x) */
ALWAYS_INLINE VF lanes_silu(VF x)
{
    VF t = x * (VF)(-1.4426950408889634f);

    t = t > (VF)(126.0f) ? (VF)(126.0f) : t;
    t = t < (VF)(-126.0f) ? (VF)(-126.0f) : t;
    return x / ((VF)(1.0f) + lanes_exp2(t));
}
