/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks of the leat form in integers, for x86 with AVX-512BW, better with VNNI (inline assembly: PoCL 3.1's compiler knows the
 * instruction's bytes, not its name).  Head sizes up to 64, and multiples of 128, so that a nibble plane holds whole groups of scales.
 *
 * Assumes LANES 1, W 16.  Queries are 14-bit codes (attend-prepare.cl), weights times V scale too: 128 high + low, two products each.
 * Sums of codes are exact in 32 bits for a whole block: neither the order nor the unpacking below can change a bit.  The weights'
 * reference is the largest (score + exponent of the token's V scale), so that an outlier among the scales costs no precision.
 *
 * A block that many columns read (prefill) is unpacked to bytes once, in this work-group's part of @scratch:
 *   keys (8 pages, HEAD_DIM / 4, 2, 64), values (8 pages, HEAD_DIM / 16, 8, 64): the layouts of 8-bit codes
 */

#if INTEGER

typedef char Bytes64 __attribute__((vector_size(64)));
typedef short Shorts32 __attribute__((vector_size(64)));
typedef int Ints16 __attribute__((vector_size(64)));
typedef float Floats16 __attribute__((vector_size(64)));
typedef char Bytes16 __attribute__((vector_size(16)));

#define ALL_16 ((ushort)-1)
#define NEAREST 4 /* rounding mode: as set */

/* An int of memory in all lanes.  Volatile, or the compiler would hoist the spread queries of all dims out of the loop over pages and
 * spill them. */
#define SPREAD(to, four) __asm__ volatile("vpbroadcastd %1, %0" : "=v"(to) : "m"(four))

/* acc[lane] += four unsigned bytes of the lane times four signed bytes. */
#if VNNI
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
#define V_ZERO                          ((1 << V_BITS) - 1)
#else
#define DOT_VALUES(acc, bytes, weights) DOT_FOUR(acc, weights, (bytes) ^ (int)0x80808080)
#define V_ZERO                          (-1)
#endif

#define WEIGHT_SHIFT 7 /* bits of each part of a weight */
#define WEIGHT_TOP   ((1 << (2 * WEIGHT_SHIFT)) - 1)
#define K_TOP        ((1 << K_BITS) - 1)

#define K_BLOCK_BYTES (BLOCK_TOKENS * HEAD_DIM)
#define K_PAGE_BYTES  (PAGE_TOKENS * HEAD_DIM)

#define RECORD_LINES (RECORD_BYTES / 64)
#define PREFETCH(at) __asm__ volatile("prefetcht0 %0" : : "m"(*(at)))

static inline int16 load_codes(const __global uchar *at)
{
    return *(const __global int16 *)at;
}

static inline int16 round_to_int(float16 x)
{
    Ints16 none = __builtin_astype((int16)(0), Ints16);

    return __builtin_astype(__builtin_ia32_cvtps2dq512_mask(__builtin_astype(x, Floats16), none, ALL_16, NEAREST), int16);
}

/* The low bytes, to an aligned place: PoCL's convert_char16() and vstore16() of characters go lane by lane. */
static inline void store_bytes(int16 x, char *to)
{
    *(char16 *)to = __builtin_astype(__builtin_convertvector(__builtin_astype(x, Ints16), Bytes16), char16);
}

static inline float16 largest_of(float16 a, float16 b)
{
    return __builtin_astype(__builtin_ia32_maxps512(__builtin_astype(a, Floats16), __builtin_astype(b, Floats16), NEAREST), float16);
}

/* 2^x to 2.4e-6: a tenth of what a weight's rounding loses. */
static inline float16 exp2_coarse(float16 x)
{
    Floats16 in = __builtin_astype(x, Floats16), whole = __builtin_ia32_rndscaleps_mask(in, 8, in, ALL_16, NEAREST);
    float16 rest = x - __builtin_astype(whole, float16), p = fma((float16)(1.3333558e-3f), rest, (float16)(9.6181291e-3f));

    p = fma(p, rest, (float16)(5.5504109e-2f));
    p = fma(p, rest, (float16)(2.4022651e-1f));
    p = fma(p, rest, (float16)(6.9314718e-1f));
    p = fma(p, rest, (float16)(1.0f));
    in = __builtin_astype(p, Floats16);
    return __builtin_astype(__builtin_ia32_scalefps512_mask(in, whole, in, ALL_16, NEAREST), float16);
}

/* Bit @plane % 8 of each byte of a plane vector, moved to bit 4. */
static inline int16 fifth_bits(int16 bits, int plane)
{
    plane %= 8;
    return (plane <= 4 ? bits << (4 - plane) : bits >> (plane - 4)) & 0x10101010;
}

/* ---- unpacking to bytes --------------------------------------------------------------------------------------------------------- */

static inline void unpack_keys(const __global uchar *record, __global uchar *to)
{
    for (int g = 0; g < HEAD_DIM / 8; g++)
        for (int upper = 0; upper < 2; upper++) {
            int16 word = load_codes(record + (g * 2 + upper) * 64), low = word & 0x0f0f0f0f, high = (word >> 4) & 0x0f0f0f0f;
#if K_BITS == 5
            const int high_plane = HEAD_DIM / 8 + g;

            low |= fifth_bits(load_codes(record + K_HIGH + (g / 8 * 2 + upper) * 64), g);
            high |= fifth_bits(load_codes(record + K_HIGH + (high_plane / 8 * 2 + upper) * 64), high_plane);
#endif
            *(__global int16 *)(to + (g * 2 + upper) * 64) = low;
            *(__global int16 *)(to + ((HEAD_DIM / 8 + g) * 2 + upper) * 64) = high;
        }
}

static inline void unpack_values(const __global uchar *record, __global uchar *to)
{
    for (int dims = 0; dims < HEAD_DIM / 16; dims++)
        for (int t = 0; t < 4; t++) {
            int16 word = load_codes(record + V_OFFSET + (dims * 4 + t) * 64), low = word & 0x0f0f0f0f, high = (word >> 4) & 0x0f0f0f0f;
#if V_BITS == 5
            int16 plane = load_codes(record + V_HIGH + dims * 64);

            low |= fifth_bits(plane, t);
            high |= fifth_bits(plane, t + 4);
#endif
            *(__global int16 *)(to + (dims * 8 + t) * 64) = low;
            *(__global int16 *)(to + (dims * 8 + 4 + t) * 64) = high;
        }
}

/* Before the columns of a ref: whether attend_block() shall read bytes from @scratch. */
static inline bool block_begin(const __global Ref *ref, const __global uchar *pages, const __global uchar *fresh, int kv_head,
                               int n_columns, __global uchar *scratch)
{
    if (n_columns <= 2 * COLS)
        return false;
    for (int p = 0; p < ref->n_pages; p++) {
        const __global uchar *record = block_record(pages, fresh, ref->pages[p], kv_head);

        if (K_BITS != 8)
            unpack_keys(record, scratch + p * K_PAGE_BYTES);
        if (V_BITS != 8)
            unpack_values(record, scratch + K_BLOCK_BYTES + p * K_PAGE_BYTES);
    }
    return true;
}

/* ---- scores --------------------------------------------------------------------------------------------------------------------- */

/* `upper`: 0 for tokens 0 to 15 of a page, 1 for 16 to 31. */
typedef struct { int16 part[COLS][2][2]; } Sums; /* [column][upper][high, low] */

/* Query codes of column @c: four dims 4 g .. 4 g + 3, high or low part. */
#define QUERY(columns, c, g, part) (((const __global int *)((columns)->operand[c] + HEAD_DIM))[(g) * 2 + (part)])

/* Four dims of all 32 tokens. */
#define DOT_COLUMNS(sums, codes0, codes1, g)                                                                              \
    UNROLL for (int c = 0; c < COLS; c++)                                                                                 \
        UNROLL for (int part = 0; part < 2; part++)                                                                       \
        {                                                                                                                 \
            int16 query;                                                                                                  \
                                                                                                                          \
            SPREAD(query, QUERY(columns, c, g, part));                                                                    \
            DOT_FOUR((sums).part[c][0][part], codes0, query);                                                             \
            DOT_FOUR((sums).part[c][1][part], codes1, query);                                                             \
        }

static inline Sums no_sums(void)
{
    Sums sums;

    UNROLL for (int c = 0; c < COLS; c++)
        sums.part[c][0][0] = sums.part[c][0][1] = sums.part[c][1][0] = sums.part[c][1][1] = 0;
    return sums;
}

/* Codes of one group of scales as bytes, (HEAD_DIM / 4, 2, 64). */
static inline Sums dot_bytes(const __global uchar *codes, int group, const Columns *columns)
{
    const int first = group * (GROUP_DIMS / 4), last = min(first + GROUP_DIMS / 4, HEAD_DIM / 4);
    Sums sums = no_sums();

    for (int g = first; g < last; g++) {
        int16 tokens0 = load_codes(codes + g * 128), tokens1 = load_codes(codes + g * 128 + 64);

        DOT_COLUMNS(sums, tokens0, tokens1, g)
    }
    return sums;
}

/* Lines of the record ahead that each of the HEAD_DIM / 8 steps through the nibbles fetches: a burst would stall. */
#define STEP_LINES ((RECORD_LINES + HEAD_DIM / 8 - 1) / (HEAD_DIM / 8))
#define FETCH_AHEAD(step)                                                                                                 \
    UNROLL for (int i_line = 0; i_line < STEP_LINES; i_line++)                                                            \
        if ((step) * STEP_LINES + i_line < RECORD_LINES)                                                                  \
            PREFETCH(ahead + ((step) * STEP_LINES + i_line) * 64);

/* The same from nibbles: one group is all there is, or it lies in one nibble of each byte. */
static inline Sums dot_nibbles(const __global uchar *record, const __global uchar *ahead, int group, const Columns *columns)
{
    Sums sums = no_sums();

#if N_GROUPS == 1
    UNROLL for (int g = 0; g < HEAD_DIM / 8; g++) {
        int16 low[2], high[2];

        FETCH_AHEAD(g)
        UNROLL for (int upper = 0; upper < 2; upper++) {
            int16 word = load_codes(record + (g * 2 + upper) * 64);

            low[upper] = word & 0x0f0f0f0f;
            high[upper] = (word >> 4) & 0x0f0f0f0f;
#if K_BITS == 5
            const int high_plane = HEAD_DIM / 8 + g;

            low[upper] |= fifth_bits(load_codes(record + K_HIGH + (g / 8 * 2 + upper) * 64), g);
            high[upper] |= fifth_bits(load_codes(record + K_HIGH + (high_plane / 8 * 2 + upper) * 64), high_plane);
#endif
        }
        DOT_COLUMNS(sums, low[0], low[1], g)
        DOT_COLUMNS(sums, high[0], high[1], HEAD_DIM / 8 + g)
    }
#else
    const int is_high = group >= N_GROUPS / 2, first = group % (N_GROUPS / 2) * 16, plane0 = is_high * (HEAD_DIM / 8) + first;

    for (int g8 = 0; g8 < 16; g8 += 8)
        UNROLL for (int i = 0; i < 8; i++) {
            int16 codes[2];

            if (!is_high)
                FETCH_AHEAD(first + g8 + i)
            UNROLL for (int upper = 0; upper < 2; upper++) {
                int16 word = load_codes(record + ((first + g8 + i) * 2 + upper) * 64);

                codes[upper] = (is_high ? word >> 4 : word) & 0x0f0f0f0f;
#if K_BITS == 5
                codes[upper] |= fifth_bits(load_codes(record + K_HIGH + ((plane0 + g8) / 8 * 2 + upper) * 64), i);
#endif
            }
            DOT_COLUMNS(sums, codes[0], codes[1], plane0 + g8 + i)
        }
#endif
    return sums;
}

/* Adds one group's exact sums to the scores: 2 (code - K_TOP / 2) q = 2 code q - K_TOP q, and the offset times the sum of q. */
static inline void add_scores(const Sums *sums, const __global uchar *record, int group, const Columns *columns, float16 score[COLS][2])
{
    UNROLL for (int upper = 0; upper < 2; upper++) {
        const Scale scale = scale_load(record + K_SCALE, group * PAGE_TOKENS + upper * 16);
        const float16 half_step = scale.step * 0.5f, offset = scale.step * scale.offset;

        UNROLL for (int c = 0; c < COLS; c++) {
            const int sum = as_int(columns->operand[c][OP_SUM + group]);
            const float unit = columns->operand[c][OP_SCALE + group];
            int16 twice = ((sums->part[c][upper][0] << 7) + sums->part[c][upper][1]) * 2 - K_TOP * sum;

            score[c][upper] = fma(convert_float16(twice), half_step * unit, score[c][upper]);
            score[c][upper] = fma(offset, (float16)((float)sum * unit), score[c][upper]);
        }
    }
}

/* 1 + the exponent of each token's largest V step, at least that of f16's smallest number. */
static inline float16 value_exponent(const __global uchar *record, int upper)
{
    float16 scale = scale_load(record + V_SCALE, upper * 16).step;

    for (int side = 1; side < N_GROUPS; side++)
        scale = largest_of(scale, scale_load(record + V_SCALE, side * PAGE_TOKENS + upper * 16).step);
    return largest_of(convert_float16((as_int16(scale) >> 23) - 126), (float16)(-23.0f));
}

/* The mean's term of slow pairs, f >= N_FAST, which turn by a quarter radian or less in 16 tokens: their sum is taken at nodes 16 tokens
 * apart, 2 before the first page's centre to 29 after, and interpolated by cubics, to 1e-4 of it. */
#define N_NODES      32
#define NODE_ANGLES  (2 * PAGE_TOKENS * ROT_PAD)                /* in `places`: (ROT_PAD, 2, N_NODES), cos and sin */
#define NODE_WEIGHTS (NODE_ANGLES + 2 * N_NODES * ROT_PAD)      /* (4, 16): of four nodes for the tokens between the middle two */

/* @turned: to the first page's centre. */
static inline void mean_nodes(const float *turned, const __global float *places, float *nodes)
{
    float16 sum[COLS][2];

    UNROLL for (int c = 0; c < COLS; c++)
        sum[c][0] = sum[c][1] = 0.0f;
    for (int f = N_FAST; f < ROT_HALF; f++) {
        const __global float *angle = places + NODE_ANGLES + f * 2 * N_NODES;

        UNROLL for (int i = 0; i < 2; i++) {
            float16 cos_n = vload16(i, angle), sin_n = vload16(2 + i, angle);

            UNROLL for (int c = 0; c < COLS; c++) {
                sum[c][i] = fma(cos_n, (float16)(turned[c * 2 * ROT_PAD + f]), sum[c][i]);
                sum[c][i] = fma(sin_n, (float16)(turned[(c * 2 + 1) * ROT_PAD + f]), sum[c][i]);
            }
        }
    }
    UNROLL for (int c = 0; c < COLS; c++)
        UNROLL for (int i = 0; i < 2; i++)
            *(float16 *)(nodes + c * N_NODES + i * 16) = sum[c][i];
}

/* Starts the scores of page @p of the block: what does not need the keys. */
static inline void mean_of_page(const Columns *columns, const float *turned, const float *nodes, const __global float *places, int p,
                                float16 score[COLS][2])
{
    UNROLL for (int c = 0; c < COLS; c++)
        score[c][0] = score[c][1] = columns->operand[c][OP_CONST];
#if N_FAST < ROT_HALF
    UNROLL for (int k = 0; k < 4; k++) {
        float16 weight = vload16(k, places + NODE_WEIGHTS);

        UNROLL for (int c = 0; c < COLS; c++)
            UNROLL for (int upper = 0; upper < 2; upper++)
                score[c][upper] = fma(weight, (float16)(nodes[c * N_NODES + 2 * p + upper + k]), score[c][upper]);
    }
#endif
    mean_scores(turned, places, N_FAST, score);
}

/* Scores of the block, (COLS, BLOCK_TOKENS); ret: each column's reference.  @next: the record that will be read after this block's. */
static inline void block_scores(const __global Ref *ref, const __global uchar *pages, const __global uchar *fresh,
                                const __global uchar *next, int kv_head, const Columns *columns, const __global float *page_angles, const __global float *places,
                                const __global uchar *bytes, float *scores, float *turned, float ret_m[COLS])
{
    float nodes[COLS * N_NODES] __attribute__((aligned(64)));
    float16 largest[COLS];

    UNROLL for (int c = 0; c < COLS; c++)
        largest[c] = NEVER;
#if N_FAST < ROT_HALF
    mean_turn(columns, page_angles + (size_t)ref->block * BLOCK_PAGES * 2 * ROT_PAD, ROT_HALF, turned);
    mean_nodes(turned, places, nodes);
#endif
    for (int p = 0; p < ref->n_pages; p++) {
        const int page = ref->block * BLOCK_PAGES + p;
        const __global uchar *record = block_record(pages, fresh, ref->pages[p], kv_head);
        const __global uchar *ahead = p + 1 < ref->n_pages ? block_record(pages, fresh, ref->pages[p + 1], kv_head) : next;
        float16 score[COLS][2];

        mean_turn(columns, page_angles + (size_t)page * 2 * ROT_PAD, N_FAST, turned);
        mean_of_page(columns, turned, nodes, places, p, score);
        for (int group = 0; group < N_GROUPS; group++) {
            Sums sums;

            if (K_BITS == 8 || bytes)
                sums = dot_bytes(K_BITS == 8 ? record : bytes + p * K_PAGE_BYTES, group, columns);
            else
                sums = dot_nibbles(record, ahead, group, columns);
            add_scores(&sums, record, group, columns, score);
        }
        UNROLL for (int upper = 0; upper < 2; upper++) {
            float16 exponent = value_exponent(record, upper);

            UNROLL for (int c = 0; c < COLS; c++) {
                if (page == 0 && upper == 0)
                    score[c][0].s0123 = (float4)(NEVER);
                largest[c] = largest_of(largest[c], score[c][upper] + exponent);
                *(float16 *)(scores + c * BLOCK_TOKENS + p * PAGE_TOKENS + upper * 16) = score[c][upper];
            }
        }
    }
    UNROLL for (int c = 0; c < COLS; c++)
        ret_m[c] = vector_max(largest[c]);
}

/* ---- weights and values ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    char part[N_GROUPS][COLS][2][BLOCK_TOKENS]; /* high, low */
    int sum[N_GROUPS][COLS];
    float offset[N_GROUPS][COLS]; /* sums of weight times 2 offsets */
} Weights;

static inline int sum_of_lanes(int16 x)
{
    int8 a = x.lo + x.hi;
    int4 b = a.lo + a.hi;
    int2 c = b.lo + b.hi;

    return c.x + c.y;
}

/* Codes of weight times V step; @ret_l: the sums of the weights alone. */
static inline void block_weights(const __global Ref *ref, const __global uchar *pages, const __global uchar *fresh, int kv_head,
                                 const float m[COLS], const float *scores, Weights *weights, float ret_l[COLS])
{
    float16 l[COLS], offset[N_GROUPS][COLS];
    int16 sum[N_GROUPS][COLS];

    UNROLL for (int c = 0; c < COLS; c++) {
        l[c] = 0.0f;
        UNROLL for (int side = 0; side < N_GROUPS; side++) {
            sum[side][c] = 0;
            offset[side][c] = 0.0f;
        }
    }
    for (int at = 0; at < ref->n_pages * PAGE_TOKENS; at += 16) {
        const __global uchar *record = block_record(pages, fresh, ref->pages[at / PAGE_TOKENS], kv_head);
        float16 weight[COLS];

        UNROLL for (int c = 0; c < COLS; c++) {
            weight[c] = exp2_coarse(*(const float16 *)(scores + c * BLOCK_TOKENS + at) - m[c]);
            l[c] += weight[c];
        }
        UNROLL for (int side = 0; side < N_GROUPS; side++) {
            const Scale scale = scale_load(record + V_SCALE, side * PAGE_TOKENS + at % PAGE_TOKENS);
            const float16 top = scale.step * (float)WEIGHT_TOP, twice_offset = scale.offset * 2.0f;

            UNROLL for (int c = 0; c < COLS; c++) {
                int16 code = round_to_int(weight[c] * top);

                sum[side][c] += code;
                offset[side][c] = fma(convert_float16(code), twice_offset, offset[side][c]);
                store_bytes(code >> WEIGHT_SHIFT, &weights->part[side][c][0][at]);
                store_bytes(code & ((1 << WEIGHT_SHIFT) - 1), &weights->part[side][c][1][at]);
            }
        }
    }
    UNROLL for (int c = 0; c < COLS; c++) {
        ret_l[c] = vector_sum(l[c]);
        UNROLL for (int side = 0; side < N_GROUPS; side++) {
            weights->sum[side][c] = sum_of_lanes(sum[side][c]);
            weights->offset[side][c] = vector_sum(offset[side][c]);
        }
    }
}

/* Vectors of 16 dims that are summed together: as many as leave registers for the codes. */
#if HEAD_DIM % 64 == 0 && COLS <= 3
#define V_DIMS 4
#elif HEAD_DIM % 32 == 0
#define V_DIMS 2
#else
#define V_DIMS 1
#endif

/* Tokens 4 t .. 4 t + 3 of all V_DIMS vectors. */
#define VALUE_COLUMNS(codes, t)                                                                                           \
    UNROLL for (int c = 0; c < COLS; c++)                                                                                 \
        UNROLL for (int part = 0; part < 2; part++)                                                                       \
        {                                                                                                                 \
            int16 weight;                                                                                                 \
                                                                                                                          \
            SPREAD(weight, ((const int *)weights->part[side][c][part])[p * 8 + (t)]);                                     \
            UNROLL for (int i = 0; i < V_DIMS; i++)                                                                       \
                DOT_VALUES(sums[i][c][part], (codes)[i], weight);                                                         \
        }

/* Weighted values of dims 16 first .. 16 (first + V_DIMS) - 1. */
static inline void block_values(const __global Ref *ref, const __global uchar *pages, const __global uchar *fresh, int kv_head, int first,
                                const __global uchar *bytes, const Weights *weights, float16 ret[COLS][HEAD_DIM / 16])
{
    const int side = first * 16 / GROUP_DIMS;
    int16 sums[V_DIMS][COLS][2];

    UNROLL for (int i = 0; i < V_DIMS; i++)
        UNROLL for (int c = 0; c < COLS; c++)
            sums[i][c][0] = sums[i][c][1] = 0;
    for (int p = 0; p < ref->n_pages; p++) {
        const __global uchar *record = block_record(pages, fresh, ref->pages[p], kv_head);

        if (V_BITS == 8 || bytes) {
            const __global uchar *codes = (V_BITS == 8 ? record + V_OFFSET : bytes + K_BLOCK_BYTES + p * K_PAGE_BYTES) + first * 512;

            UNROLL for (int t = 0; t < 8; t++) {
                int16 fours[V_DIMS];

                UNROLL for (int i = 0; i < V_DIMS; i++)
                    fours[i] = load_codes(codes + (i * 8 + t) * 64);
                VALUE_COLUMNS(fours, t)
            }
            continue;
        }
        UNROLL for (int t = 0; t < 8; t++) { /* low nibbles: tokens 0 to 15 */
            int16 fours[V_DIMS];

            UNROLL for (int i = 0; i < V_DIMS; i++) {
                int16 word = load_codes(record + V_OFFSET + ((first + i) * 4 + t % 4) * 64);

                fours[i] = (t < 4 ? word : word >> 4) & 0x0f0f0f0f;
#if V_BITS == 5
                fours[i] |= fifth_bits(load_codes(record + V_HIGH + (first + i) * 64), t);
#endif
            }
            VALUE_COLUMNS(fours, t)
        }
    }
    UNROLL for (int i = 0; i < V_DIMS; i++)
        UNROLL for (int c = 0; c < COLS; c++) {
            int16 twice = ((sums[i][c][0] << WEIGHT_SHIFT) + sums[i][c][1]) * 2 - V_ZERO * weights->sum[side][c];

            ret[c][first + i] = (convert_float16(twice) + weights->offset[side][c]) * (0.5f / WEIGHT_TOP);
        }
}

#define BLOCK_SHARED_FLOATS (COLS * BLOCK_TOKENS + COLS * 2 * ROT_PAD)

/* One block of one KV head for COLS columns.  @shared: BLOCK_SHARED_FLOATS. */
static inline void attend_block(const __global Ref *ref, const __global uchar *pages, const __global uchar *fresh,
                                const __global uchar *next, int kv_head, const Columns *columns,
                                const __global float *page_angles, const __global float *places, float *shared,
                                const __global uchar *bytes)
{
    float *scores = shared, *turned = scores + COLS * BLOCK_TOKENS, m[COLS], l[COLS];
    float16 acc[COLS][HEAD_DIM / 16];
    Weights weights __attribute__((aligned(64)));

    block_scores(ref, pages, fresh, next, kv_head, columns, page_angles, places, bytes, scores, turned, m);
    block_weights(ref, pages, fresh, kv_head, m, scores, &weights, l);
    for (int first = 0; first < HEAD_DIM / 16; first += V_DIMS)
        block_values(ref, pages, fresh, kv_head, first, bytes, &weights, acc);
    for (int c = 0; c < COLS; c++)
        block_emit(columns, c, m[c], l[c], acc[c]);
}
#endif
