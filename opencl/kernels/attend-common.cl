/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention, common part: lanes and vectors, halves, 2^x, the layout of operands, and how partial results fold.
 *
 * Two shapes of the same code:
 *   CPU devices  LANES 1, W 16: a work-group is one work-item whose vectors hold 16 tokens or 16 dims; no local memory, no barriers.
 *   others       LANES 32, W 1: a work-group is 32 work-items; a lane is a token of a page, or a dim.
 * LANE counts vectors: FOR_LANES(i, n) visits the n vectors of a page or head that belong to this work-item.
 *
 * Every product that feeds a sum is an explicit fma and contraction is off: the bits do not depend on what a compiler inlines where.
 *
 * -D options: K_DIM and V_DIM (head sizes), N_HEADS, N_KV, ROT_HALF (rotary pairs), FORM (0 f32, 1 f16, 2 leat, 3 quanto, 4 hqq, 5 fp8),
 * K_BITS, V_BITS, GROUP_DIMS (huge without groups), K_GROUPS, V_GROUPS, CENTRE (0 none, 1 before RoPE, 2 after), PAIR_SCALE, ROTATE,
 * PLAIN_LEVELS (0 or 1), SINK_TOKENS, TAIL_TOKENS (of the ring), TAIL_BITS, record layout of quant/kv-codec.h (RECORD_BYTES, PAGE_BYTES,
 * K_HIGH, V_OFFSET, V_HIGH, K_SCALE, V_SCALE), SCORE_SCALE (of scores, times log2 e), LANES, W, COLS (query heads that share a read of the
 * keys), N_FAST (pairs that turn too fast for interpolation), INTEGER, VNNI, NARROW (AVX2) (0 or 1), CAPPED (0 or 1) and SOFTCAP (times log2 e),
 * SINK_LOGITS (0 or 1).
 */

#pragma OPENCL FP_CONTRACT OFF

#ifndef K_DIM
#define K_DIM        64
#define V_DIM        64
#define N_HEADS      9
#define N_KV         3
#define ROT_HALF     32
#define FORM         2
#define K_BITS       5
#define V_BITS       4
#define GROUP_DIMS   64
#define K_GROUPS     1
#define V_GROUPS     1
#define CENTRE       1
#define PAIR_SCALE   0
#define ROTATE       1
#define PLAIN_LEVELS 0
#define SINK_TOKENS  4
#define TAIL_TOKENS  64
#define TAIL_BITS    16
#define RECORD_BYTES 2432
#define PAGE_BYTES   7296
#define K_HIGH       1024
#define V_OFFSET     1280
#define V_HIGH       2304
#define K_SCALE      2304
#define V_SCALE      2368
#define SCORE_SCALE  0.18033688f
#define LANES        1
#define W            16
#define COLS         3
#define N_FAST       12
#define INTEGER      0
#define VNNI         0
#define NARROW       0
#define CAPPED       0
#define SOFTCAP      1.0f
#define SINK_LOGITS  0
#endif

#define PAGE_TOKENS  32
#define BLOCK_PAGES  8
#define BLOCK_TOKENS (PAGE_TOKENS * BLOCK_PAGES)
#define REF_FRESH    0x80000000u
#define CODED        (FORM >= 2)
#define FP8          (FORM == 5)
#define GROUPED      (CODED && !FP8)
#define MEAN_HALF    (CENTRE == 1 ? ROT_HALF : 0) /* rotary pairs of the mean that is turned */
#define N_REP        (N_HEADS / N_KV)
#define N_SIDES      (V_GROUPS > 1 ? V_GROUPS : 1) /* copies of the weights, one per group of V scales */
#define NEVER        (-1e30f)                     /* the score of a token that must not be seen */
#define LOWEST       (-1e29f)                     /* reference of the weights where none is seen: all are zero */
#define LOG2E        1.44269504f

/* A code's bits: base fields of 8, 4 or 2, PER of them in a byte, and what is left in the high planes. */
#define BASE_BITS(bits) ((bits) == 8 ? 8 : (bits) >= 4 ? 4 : 2)
#define K_BASE          BASE_BITS(K_BITS)
#define V_BASE          BASE_BITS(V_BITS)
#define K_REST          (CODED ? K_BITS - K_BASE : 0)
#define V_REST          (CODED ? V_BITS - V_BASE : 0)
#define K_PER           (8 / K_BASE)
#define V_PER           (8 / V_BASE)
#define K_REST_PER      (K_REST == 2 ? 4 : 8)
#define V_REST_PER      (V_REST == 2 ? 4 : 8)
#define K_VECTORS       (K_DIM / 4 / K_PER) /* of the base planes, each of K_PER times four dims */
#define FIELD_MASK(width) (0x01010101u * ((1u << (width)) - 1u))
#define K_TOP           ((1 << K_BITS) - 1)
#define V_TOP           ((1 << V_BITS) - 1)

/* A layer's constants, in floats (kv_constants_fill() of quant/kv-codec.h). */
#define CONST_K_MEAN   0
#define CONST_K_FACTOR (N_KV * K_DIM)
#define CONST_K_SCALE  (2 * N_KV * K_DIM)
#define CONST_V_MEAN   (3 * N_KV * K_DIM)
#define CONST_FP8      (3 * N_KV * K_DIM + N_KV * V_DIM)
#define FP8_UNIT       256.0f /* decoded numbers come divided by this: a half's exponent less e4m3's */

/* AttendMask of attend.h; with its window an argument, so that layers of every kind share a program. */
#define SLIDING      1
#define CHUNKED      2
#define CROSS        3

typedef struct { int row0, n_rows, pos0, n_packed, tail_slot, new_start, new_row0, chunk_shift; } Group;
typedef struct { int group, block, n_pages, first_page; uint pages[BLOCK_PAGES]; } Ref;
typedef struct { int first_ref, n_refs; } Span;
typedef struct { int tail_slot, page, new_start, new_row0; uint to; int sinks_only, reserved[2]; } Pack;

#define AT(type, buffer, offset) ((const __global type *)((buffer) + (offset)))

/* ---- vectors ------------------------------------------------------------------------------------------------------------ */

#if W == 16
typedef float16 vfloat;
typedef int16 vint;
typedef uint16 vuint;
#define AS_VFLOAT     as_float16
#define AS_VINT       as_int16
#define AS_VUINT      as_uint16
#define TO_VFLOAT     convert_float16
#define TO_VINT       convert_int16
#define VLOAD(p)      vload16(0, p)
#define VSTORE(x, p)  vstore16(x, 0, p)
#else
typedef float vfloat;
typedef int vint;
typedef uint vuint;
#define AS_VFLOAT     as_float
#define AS_VINT       as_int
#define AS_VUINT      as_uint
#define TO_VFLOAT     convert_float
#define TO_VINT       convert_int
#define VLOAD(p)      (*(p))
#define VSTORE(x, p)  (*(p) = (x))
#endif

#if LANES == 1
#define LANE          0
#define SHARED        __private
#define SHARED_SYNC() do { } while (0)
#else
#define LANE          ((int)get_local_id(0))
#define SHARED        __local
#define SHARED_SYNC() barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#endif
#define FOR_LANES(i, n) for (int i = LANE; i < (n); i += LANES)
#define UNROLL          _Pragma("unroll") /* where arrays must become registers */
#define PER_LANE(n)     (((n) + LANES - 1) / LANES)

/* Sum and largest of one vector, in a fixed tree. */
static inline float vector_sum(vfloat x)
{
#if W == 16
    float8 a = x.lo + x.hi;
    float4 b = a.lo + a.hi;
    float2 c = b.lo + b.hi;
    return c.x + c.y;
#else
    return x;
#endif
}

static inline float vector_max(vfloat x)
{
#if W == 16
    float8 a = x.lo > x.hi ? x.lo : x.hi;
    float4 b = a.lo > a.hi ? a.lo : a.hi;
    float2 c = b.lo > b.hi ? b.lo : b.hi;
    return c.x > c.y ? c.x : c.y;
#else
    return x;
#endif
}

#if W == 16
static inline int vector_sum_int(vint x)
{
    int8 a = x.lo + x.hi;
    int4 b = a.lo + a.hi;
    int2 c = b.lo + b.hi;
    return c.x + c.y;
}
#endif

#if INTEGER
typedef int Ints16 __attribute__((vector_size(64)));
typedef char Bytes16 __attribute__((vector_size(16)));

/* The low bytes: PoCL's convert_char16() goes lane by lane. */
static inline char16 low_bytes(int16 x)
{
    return __builtin_astype(__builtin_convertvector(__builtin_astype(x, Ints16), Bytes16), char16);
}
#endif

/* 2^x to 2e-7 for x <= 127; exactly 0 below 2^-125.  The body is the same for one float and for a vector. */
#define EXP2_BODY(F, AS_F, AS_I)                                                                                          \
    F clamped = x > -125.0f ? x : (F)(-125.0f);                                                                           \
    F shifted = clamped + 12582912.0f; /* 1.5 * 2^23: rounds to an integer, which its low bits hold */                    \
    F rest = clamped - (shifted - 12582912.0f);                                                                           \
    F p = fma((F)(1.5403530e-4f), rest, (F)(1.3333558e-3f));                                                              \
    p = fma(p, rest, (F)(9.6181291e-3f));                                                                                 \
    p = fma(p, rest, (F)(5.5504109e-2f));                                                                                 \
    p = fma(p, rest, (F)(2.4022651e-1f));                                                                                 \
    p = fma(p, rest, (F)(6.9314718e-1f));                                                                                 \
    p = fma(p, rest, (F)(1.0f));                                                                                          \
    p = AS_F(AS_I(p) + (AS_I(shifted) << 23));                                                                            \
    return x > -125.0f ? p : (F)(0.0f);

static inline float exp2_one(float x)
{
    EXP2_BODY(float, as_float, as_int)
}

static inline vfloat exp2_vector(vfloat x)
{
    EXP2_BODY(vfloat, AS_VFLOAT, AS_VINT)
}

#if CAPPED
/* SOFTCAP tanh(x / SOFTCAP), by tanh y = 1 - 2 / (1 + e^2y); to 1e-7 of SOFTCAP. */
#define CAP_BODY(F, EXP2)                                                                                                 \
    F twice = x * (2.0f * LOG2E / SOFTCAP);                                                                               \
    twice = twice < 126.0f ? twice : (F)(126.0f);                                                                         \
    return (F)(SOFTCAP) - (F)(2.0f * SOFTCAP) / (1.0f + EXP2(twice));

static inline float cap_one(float x)
{
    CAP_BODY(float, exp2_one)
}

static inline vfloat cap_vector(vfloat x)
{
    CAP_BODY(vfloat, exp2_vector)
}
#else
#define cap_one(x)    (x)
#define cap_vector(x) (x)
#endif

/* ---- halves ------------------------------------------------------------------------------------------------------------- */

#if W == 16 && defined(__AVX512F__)
typedef short Short16 __attribute__((vector_size(32)));
typedef float Float16 __attribute__((vector_size(64)));
#elif W == 16 && defined(__F16C__)
typedef short Short8 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
#endif

#if W == 16 && defined(__AVX512F__)
#define HALF_WIDEN 1
static inline float16 half_widen(short16 bits)
{
    Float16 zero = __builtin_astype((float16)(0.0f), Float16);

    return __builtin_astype(__builtin_ia32_vcvtph2ps512_mask(__builtin_astype(bits, Short16), zero, (ushort)-1, 4), float16);
}
#elif W == 16 && defined(__F16C__)
#define HALF_WIDEN 1
static inline float16 half_widen(short16 bits)
{
    float8 low = __builtin_astype(__builtin_ia32_vcvtph2ps256(__builtin_astype(bits.lo, Short8)), float8);
    float8 high = __builtin_astype(__builtin_ia32_vcvtph2ps256(__builtin_astype(bits.hi, Short8)), float8);

    return (float16)(low, high);
}
#else
#define HALF_WIDEN 0
#endif

/* W halves from element @index on.  PoCL's vload_half is soft code, hence the builtins. */
static inline vfloat half_load(const __global uchar *base, size_t index)
{
#if HALF_WIDEN
    return half_widen(vload16(0, (const __global short *)base + index));
#elif W == 16
    return vload_half16(0, (const __global half *)base + index);
#else
    return vload_half(index, (const __global half *)base);
#endif
}

/* Rounds to nearest even, as half_from_float() of quant/base/half.h. */
static inline void half_store(vfloat x, __global uchar *base, size_t index)
{
#if W == 16 && defined(__AVX512F__)
    Short16 none = __builtin_astype((short16)(0), Short16);
    Short16 bits = (Short16)__builtin_ia32_vcvtps2ph512_mask(__builtin_astype(x, Float16), 0, none, (ushort)-1);
    vstore16(__builtin_astype(bits, short16), 0, (__global short *)base + index);
#elif W == 16 && defined(__F16C__)
    vstore8(__builtin_astype(__builtin_ia32_vcvtps2ph256(__builtin_astype(x.lo, Float8), 0), short8), 0,
            (__global short *)base + index);
    vstore8(__builtin_astype(__builtin_ia32_vcvtps2ph256(__builtin_astype(x.hi, Float8), 0), short8), 0,
            (__global short *)base + index + 8);
#elif W == 16
    vstore_half16_rte(x, 0, (__global half *)base + index);
#else
    vstore_half_rte(x, index, (__global half *)base);
#endif
}

#if GROUPED
/* Scales of W tokens: what a step of the code is worth, and what code 0 stands for (quant/kv-codec.h); @middle: half the largest code. */
typedef struct { vfloat step, zero; } Scale;

static inline Scale scale_load(const __global uchar *base, int n_groups, int group, int token, float middle)
{
    const size_t index = group * PAGE_TOKENS + token;
    Scale scale;

#if FORM == 2
#if HALF_WIDEN
    short16 bits = vload16(0, (const __global short *)base + index);

    scale.step = half_widen(bits & (short)~15);
    vfloat offset = convert_float16(convert_int16(bits & (short)15) - 8) * 0.25f;
#else
#if W == 16
    vuint bits = convert_uint16(vload16(0, (const __global ushort *)base + index)), step = bits & 0xfff0u;
#else
    vuint bits = ((const __global ushort *)base)[index], step = bits & 0xfff0u;
#endif
    scale.step = step < 0x400u ? TO_VFLOAT(AS_VINT(step)) * 0x1p-24f : AS_VFLOAT((step << 13) + 0x38000000u);
    vfloat offset = TO_VFLOAT(AS_VINT(bits & 15u) - 8) * 0.25f;
#endif
    scale.zero = scale.step * (offset - middle); /* exact: 17 bits */
#else
    vfloat zero = half_load(base, index + n_groups * PAGE_TOKENS);

    scale.step = half_load(base, index);
    scale.zero = FORM == 3 ? -zero : -zero * scale.step;
#endif
    return scale;
}
#endif

#if FP8
/* Four dims of W tokens, or four tokens of W dims, from vector @vector of 16-bit words (quant/kv-codec.c: fp8_byte()), over FP8_UNIT. */
static inline void fp8_load(const __global uchar *base, int vector, int lane, vfloat ret[4])
{
    const __global ushort *words = (const __global ushort *)base + vector * 32 + lane;

    UNROLL for (int pair = 0; pair < 2; pair++) {
#if HALF_WIDEN
        ushort16 two = vload16(pair, words);

        ret[2 * pair] = half_widen(as_short16(((two << (ushort)8) & (ushort)0x8000) | ((two << (ushort)7) & (ushort)0x3f80)));
        ret[2 * pair + 1] = half_widen(as_short16((two & (ushort)0x8000) | ((two >> (ushort)1) & (ushort)0x3f80)));
#else
        UNROLL for (int i = 0; i < 2; i++) {
#if W == 16
            vuint code = convert_uint16(vload16(pair, words)) >> (8 * i), magnitude = code & 0x7fu;
#else
            vuint code = (uint)words[pair * 16] >> (8 * i), magnitude = code & 0x7fu;
#endif
            vfloat number = magnitude < 8u ? TO_VFLOAT(AS_VINT(magnitude)) * 0x1p-17f : AS_VFLOAT((magnitude << 20) + 0x38000000u);

            ret[2 * pair + i] = AS_VFLOAT(AS_VUINT(number) | (code & 0x80u) << 24);
        }
#endif
    }
}
#endif

/* Elements of `new` and of the tail. */
#define TAIL_BYTES (TAIL_BITS / 8)
static inline vfloat tail_load(const __global uchar *base, size_t index)
{
#if TAIL_BITS == 32
    return VLOAD((const __global float *)base + index);
#else
    return half_load(base, index);
#endif
}

static inline void tail_store(vfloat x, __global uchar *base, size_t index)
{
#if TAIL_BITS == 32
    VSTORE(x, (__global float *)base + index);
#else
    half_store(x, base, index);
#endif
}

/* ---- where things are ----------------------------------------------------------------------------------------------------- */

/* `new`: K (n_rows, N_KV, K_DIM), then V (n_rows, N_KV, V_DIM).  Element index of a row's head. */
static inline size_t new_key(int row, int kv_head)
{
    return ((size_t)row * N_KV + kv_head) * K_DIM;
}

static inline size_t new_value(int n_rows, int row, int kv_head)
{
    return (size_t)n_rows * N_KV * K_DIM + ((size_t)row * N_KV + kv_head) * V_DIM;
}

/* The tail of one slot: K of the ring, then of the sinks; V the same. */
static inline size_t tail_key(int place, int kv_head)
{
    return ((size_t)place * N_KV + kv_head) * K_DIM;
}

static inline size_t tail_value(int place, int kv_head)
{
    return (size_t)(TAIL_TOKENS + SINK_TOKENS) * N_KV * K_DIM + ((size_t)place * N_KV + kv_head) * V_DIM;
}

/* What prepare leaves for each (row, head), in floats, D = K_DIM:
 *   [0, D)              the query after RoPE, times SCORE_SCALE, for keys in full precision
 *   coded: [D, 2D)      as the form transforms it; with INTEGER [D, 3D/2): int (K_DIM / 4, 2), four signed bytes of the high, then of
 *                       the low part of code = 128 high + low
 *   [OP_COS, +ROT_PAD)  C_f and [OP_SIN, +ROT_PAD) S_f of the mean's term (quant/kv-codec.h), zero in the padding
 *   OP_CONST            the mean's term of channels that do not turn
 *   OP_SCALE + group    what one step of the integer codes is worth; OP_SUM + group: int sum of the codes */
#define ROT_PAD   ((MEAN_HALF + 15) / 16 * 16)
#define OP_COS    (2 * K_DIM)
#define OP_SIN    (OP_COS + ROT_PAD)
#define OP_CONST  (OP_SIN + ROT_PAD)
#define OP_SCALE  (OP_CONST + 1)
#define OP_SUM    (OP_SCALE + K_GROUPS)
#define OP_FLOATS (CODED ? (OP_SUM + K_GROUPS + 15) / 16 * 16 : K_DIM)

/* A partial result or state of one (row, head): acc (V_DIM), then m (reference), then l (sum of weights relative to 2^m). */
#define STATE_FLOATS (V_DIM + 2)

/* Merging partial (m, l, acc) into (M, L, A): both get a factor.  One formula everywhere, so that every launch shape gives the
 * same bits. */
typedef struct { float m, old_factor, new_factor; } Fold;

static inline Fold fold_begin(float old_m, float new_m)
{
    Fold fold;

    fold.m = old_m > new_m ? old_m : new_m;
    fold.old_factor = exp2_one(old_m - fold.m);
    fold.new_factor = exp2_one(new_m - fold.m);
    return fold;
}

static inline vfloat fold_vector(Fold fold, vfloat old, vfloat x)
{
    return fma(x, (vfloat)(fold.new_factor), old * fold.old_factor);
}

static inline float fold_one(Fold fold, float old, float x)
{
    return fma(x, fold.new_factor, old * fold.old_factor);
}

/* The position of a row, and the lowest that it sees (attend_first_visible() of attend.h). */
static inline int row_position(const __global Group *group, int row_of_group, int mask)
{
    return mask == CROSS ? group->pos0 : group->pos0 + row_of_group;
}

static inline int first_visible(const __global Group *group, int position, int mask, int window)
{
    if (mask == SLIDING)
        return max(position - (window - 1), 0);
    if (mask == CHUNKED)
        return max(position - (position + (window - group->chunk_shift)) % window, 0);
    return 0;
}

/* Work-item range [first, last) of @n units. */
static inline int unit_begin(int n)
{
    return (int)((long)n * get_group_id(0) / get_num_groups(0));
}

static inline int unit_end(int n)
{
    return (int)((long)n * (get_group_id(0) + 1) / get_num_groups(0));
}

/* The group of a row; groups are in row order. */
static inline int group_of_row(const __global Group *groups, int n_groups, int row)
{
    int g = 0;

    while (g + 1 < n_groups && groups[g + 1].row0 <= row)
        g++;
    return g;
}

static inline bool same_sequence(const __global Group *a, const __global Group *b)
{
    return a->new_row0 == b->new_row0 && a->tail_slot == b->tail_slot;
}

/* Whether group @g holds all rows of its sequence: then nobody in the pass needs the ring places that its rows will take. */
static inline bool group_is_alone(const __global Group *groups, int n_groups, int g)
{
    return !(g > 0 && same_sequence(groups + g - 1, groups + g)) && !(g + 1 < n_groups && same_sequence(groups + g, groups + g + 1));
}
