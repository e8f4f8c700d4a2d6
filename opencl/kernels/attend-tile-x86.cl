/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks of forms with groups in integers, for x86 with AVX2 (NARROW) or AVX-512BW, better with VNNI (inline assembly: PoCL 3.1's
 * compiler knows the instruction's bytes, not its name); attend-x86.cl has the instructions.
 *
 * Queries are 14-bit codes (attend-prepare.cl), weights times V scale too: 128 high + low, two products each.
 * Sums of codes are exact in 32 bits for a whole block: neither the order nor the unpacking below can change a bit.  The weights'
 * reference is the largest (score + exponent of the token's V scale), so that an outlier among the scales costs no precision.
 *
 * A block that many columns read (prefill) is unpacked to bytes once, in this work-group's part of @scratch:
 *   keys (8 pages, K_DIM / 4, 2, 64), values (8 pages, V_DIM / 16, 8, 64): the layouts of 8-bit codes
 */

#if INTEGER

/* Before the columns of a ref: whether attend_block() shall read bytes from @scratch. */
static inline bool block_begin(const __global Ref *ref, const __global uchar *pages, const __global uchar *fresh, int kv_head,
                               int n_columns, __global uchar *scratch)
{
    if (n_columns <= 2 * COLS)
        return false;
    for (int p = ref->first_page; p < ref->n_pages; p++) {
        const __global uchar *record = block_record(pages, fresh, ref->pages[p], kv_head);

        if (K_BITS != 8)
            unpack_keys(record, scratch + p * K_PAGE_BYTES);
        if (V_BITS != 8)
            unpack_values(record, scratch + K_BLOCK_BYTES + p * V_PAGE_BYTES);
    }
    return true;
}

/* ---- scores --------------------------------------------------------------------------------------------------------------------- */

/* `upper`: 0 for tokens 0 to 15 of a page, 1 for 16 to 31. */
typedef struct { int16 part[COLS][2][2]; } Sums; /* [column][upper][high, low] */

/* Query codes of column @c: four dims 4 g .. 4 g + 3, high or low part. */
#define QUERY(columns, c, g, part) (((const __global int *)((columns)->operand[c] + K_DIM))[(g) * 2 + (part)])

/* Vectors of the base planes of a group; of the last there may be fewer. */
#define GROUP_VECTORS ((GROUP_DIMS < K_DIM ? GROUP_DIMS : K_DIM) / 4 / K_PER)

#if NARROW
typedef struct { int8 part[COLS][2]; } EightSums;

/* Codes of one group of 8 tokens, as bytes at @bytes or from the planes at @record, by registers: pairs of products sum in 16 bits. */
static inline EightSums dot_eight(const __global uchar *bytes, const __global uchar *record, int place, int group, const Columns *columns)
{
    short16 pairs[COLS][2];
    EightSums sums;

    UNROLL for (int c = 0; c < COLS; c++)
        UNROLL for (int part = 0; part < 2; part++) {
            pairs[c][part] = 0;
            sums.part[c][part] = 0;
        }
    UNROLL for (int i = 0; i < GROUP_VECTORS * K_PER; i++) {
        const int four = group * GROUP_VECTORS * K_PER + i;
        int8 codes;

        if (K_DIM / 4 % (GROUP_VECTORS * K_PER) && four >= K_DIM / 4)
            break;
        if (bytes) {
            codes = *(const __global int8 *)(bytes + four * 128 + place);
        } else {
            codes = code_field_8(*(const __global int8 *)(record + four / K_PER * 128 + place), four % K_PER, K_BASE);
#if K_REST
            codes |= rest_field_8(*(const __global int8 *)(record + K_HIGH + four / K_REST_PER * 128 + place), four % K_REST_PER, K_REST,
                                  K_BASE);
#endif
        }
        UNROLL for (int c = 0; c < COLS; c++)
            UNROLL for (int part = 0; part < 2; part++) {
                int8 query;

                SPREAD(query, QUERY(columns, c, four, part));
                pairs[c][part] += pair_products(codes, query);
                if (i % K_STEPS == K_STEPS - 1) {
                    sums.part[c][part] = add_pairs(sums.part[c][part], pairs[c][part]);
                    pairs[c][part] = 0;
                }
            }
    }
    UNROLL for (int c = 0; c < COLS; c++)
        UNROLL for (int part = 0; part < 2; part++)
            sums.part[c][part] = add_pairs(sums.part[c][part], pairs[c][part]);
    return sums;
}

static inline Sums dot_narrow(const __global uchar *bytes, const __global uchar *record, int group, const Columns *columns)
{
    Sums sums;

    for (int upper = 0; upper < 2; upper++) {
        EightSums low = dot_eight(bytes, record, upper * 64, group, columns);
        EightSums high = dot_eight(bytes, record, upper * 64 + 32, group, columns);

        UNROLL for (int c = 0; c < COLS; c++)
            UNROLL for (int part = 0; part < 2; part++)
                sums.part[c][upper][part] = (int16)(low.part[c][part], high.part[c][part]);
    }
    return sums;
}

static inline Sums dot_bytes(const __global uchar *codes, int group, const Columns *columns)
{
    return dot_narrow(codes, 0, group, columns);
}

static inline Sums dot_planes(const __global uchar *record, const __global uchar *ahead, int group, const Columns *columns)
{
    if (group == 0)
        for (int line = 0; line < RECORD_LINES; line++)
            PREFETCH(ahead + line * 64);
    return dot_narrow(0, record, group, columns);
}
#else
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

/* Codes of one group of scales as bytes, (K_DIM / 4, 2, 64). */
static inline Sums dot_bytes(const __global uchar *codes, int group, const Columns *columns)
{
    const int first = group * (GROUP_DIMS / 4), last = min(first + GROUP_DIMS / 4, K_DIM / 4);
    Sums sums = no_sums();

    for (int g = first; g < last; g++) {
        int16 tokens0 = load_codes(codes + g * 128), tokens1 = load_codes(codes + g * 128 + 64);

        DOT_COLUMNS(sums, tokens0, tokens1, g)
    }
    return sums;
}

/* Lines of the record ahead that each of the steps through the base planes fetches: a burst would stall. */
#define STEP_LINES ((RECORD_LINES + K_VECTORS - 1) / K_VECTORS)
#define FETCH_AHEAD(step)                                                                                                 \
    UNROLL for (int i_line = 0; i_line < STEP_LINES; i_line++)                                                            \
        if ((step) * STEP_LINES + i_line < RECORD_LINES)                                                                  \
            PREFETCH(ahead + ((step) * STEP_LINES + i_line) * 64);

/* The same from the planes. */
static inline Sums dot_planes(const __global uchar *record, const __global uchar *ahead, int group, const Columns *columns)
{
    Sums sums = no_sums();

    UNROLL for (int v = 0; v < GROUP_VECTORS; v++) {
        const int g = group * GROUP_VECTORS + v;

        if (K_VECTORS % GROUP_VECTORS && g >= K_VECTORS)
            break;
        FETCH_AHEAD(g)
        UNROLL for (int i = 0; i < K_PER; i++) {
            const int four = g * K_PER + i;
            int16 codes[2];

            UNROLL for (int upper = 0; upper < 2; upper++) {
                codes[upper] = code_field(load_codes(record + (g * 2 + upper) * 64), i, K_BASE);
#if K_REST
                codes[upper] |= rest_field(load_codes(record + K_HIGH + ((uint)four / K_REST_PER * 2 + upper) * 64),
                                           (uint)four % K_REST_PER, K_REST, K_BASE);
#endif
            }
            DOT_COLUMNS(sums, codes[0], codes[1], four)
        }
    }
    return sums;
}
#endif

/* Adds one group's exact sums to the scores: 2 (code - K_TOP / 2) q = 2 code q - K_TOP q, and what the middle code stands for times the
 * sum of q. */
static inline void add_scores(const Sums *sums, const __global uchar *record, int group, const Columns *columns, float16 score[COLS][2])
{
    UNROLL for (int upper = 0; upper < 2; upper++) {
        const Scale scale = scale_load(record + K_SCALE, K_GROUPS, group, upper * 16, 0.5f * (float)K_TOP);
        const float16 half_step = scale.step * 0.5f, offset = fma(half_step, (float16)(K_TOP), scale.zero);

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
    float16 scale = scale_load(record + V_SCALE, V_GROUPS, 0, upper * 16, 0.0f).step;

    for (int side = 1; side < V_GROUPS; side++)
        scale = largest_of(scale, scale_load(record + V_SCALE, V_GROUPS, side, upper * 16, 0.0f).step);
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
    for (int f = N_FAST; f < MEAN_HALF; f++) {
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
#if N_FAST < MEAN_HALF
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
#if N_FAST < MEAN_HALF
    mean_turn(columns, page_angles + (size_t)ref->block * BLOCK_PAGES * 2 * ROT_PAD, MEAN_HALF, turned);
    mean_nodes(turned, places, nodes);
#endif
    for (int p = ref->first_page; p < ref->n_pages; p++) {
        const int page = ref->block * BLOCK_PAGES + p;
        const __global uchar *record = block_record(pages, fresh, ref->pages[p], kv_head);
        const __global uchar *ahead = p + 1 < ref->n_pages ? block_record(pages, fresh, ref->pages[p + 1], kv_head) : next;
        float16 score[COLS][2];

        mean_turn(columns, page_angles + (size_t)page * 2 * ROT_PAD, N_FAST, turned);
        mean_of_page(columns, turned, nodes, places, p, score);
        for (int group = 0; group < K_GROUPS; group++) {
            Sums sums;

            if (K_BITS != 8 && bytes)
                sums = dot_bytes(bytes + p * K_PAGE_BYTES, group, columns);
            else
                sums = dot_planes(record, ahead, group, columns);
            add_scores(&sums, record, group, columns, score);
        }
        UNROLL for (int upper = 0; upper < 2; upper++) {
            float16 exponent = value_exponent(record, upper);

            UNROLL for (int c = 0; c < COLS; c++) {
                score[c][upper] = cap_vector(score[c][upper]);
                if (page * PAGE_TOKENS < columns->highest_low)
                    score[c][upper] = hide_below(score[c][upper], page * PAGE_TOKENS + upper * 16, columns->low[c]);
                largest[c] = largest_of(largest[c], score[c][upper] + exponent);
                *(float16 *)(scores + c * BLOCK_TOKENS + p * PAGE_TOKENS + upper * 16) = score[c][upper];
            }
        }
    }
    UNROLL for (int c = 0; c < COLS; c++) {
        ret_m[c] = vector_max(largest[c]);
        ret_m[c] = ret_m[c] > LOWEST ? ret_m[c] : LOWEST;
    }
}

/* ---- weights and values ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    char part[V_GROUPS][COLS][2][BLOCK_TOKENS]; /* high, low */
    int sum[V_GROUPS][COLS];
    float offset[V_GROUPS][COLS]; /* sums of weight times what the middle code stands for */
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
    float16 l[COLS], offset[V_GROUPS][COLS];
    int16 sum[V_GROUPS][COLS];

    UNROLL for (int c = 0; c < COLS; c++) {
        l[c] = 0.0f;
        UNROLL for (int side = 0; side < V_GROUPS; side++) {
            sum[side][c] = 0;
            offset[side][c] = 0.0f;
        }
    }
    for (int at = ref->first_page * PAGE_TOKENS; at < ref->n_pages * PAGE_TOKENS; at += 16) {
        const __global uchar *record = block_record(pages, fresh, ref->pages[at / PAGE_TOKENS], kv_head);
        float16 weight[COLS];

        UNROLL for (int c = 0; c < COLS; c++) {
            weight[c] = exp2_coarse(*(const float16 *)(scores + c * BLOCK_TOKENS + at) - m[c]);
            l[c] += weight[c];
        }
        UNROLL for (int side = 0; side < V_GROUPS; side++) {
            const Scale scale = scale_load(record + V_SCALE, V_GROUPS, side, at % PAGE_TOKENS, 0.5f * (float)V_TOP);
            const float16 top = scale.step * (float)WEIGHT_TOP, middle = fma(scale.step, (float16)(0.5f * (float)V_TOP), scale.zero);

            UNROLL for (int c = 0; c < COLS; c++) {
                int16 code = round_to_int(weight[c] * top);

                sum[side][c] += code;
                offset[side][c] = fma(weight[c], middle, offset[side][c]);
                store_bytes(code >> WEIGHT_SHIFT, &weights->part[side][c][0][at]);
                store_bytes(code & ((1 << WEIGHT_SHIFT) - 1), &weights->part[side][c][1][at]);
            }
        }
    }
    UNROLL for (int c = 0; c < COLS; c++) {
        ret_l[c] = vector_sum(l[c]);
        UNROLL for (int side = 0; side < V_GROUPS; side++) {
            weights->sum[side][c] = sum_of_lanes(sum[side][c]);
            weights->offset[side][c] = vector_sum(offset[side][c]);
        }
    }
}

/* Vectors of 16 dims that are summed together: as many as leave registers for the codes. */
#if NARROW
#define V_STRIPE 1
#elif V_DIM % 64 == 0 && GROUP_DIMS % 64 == 0 && COLS <= 3
#define V_STRIPE 4
#elif V_DIM % 32 == 0 && GROUP_DIMS % 32 == 0
#define V_STRIPE 2
#else
#define V_STRIPE 1
#endif

#if NARROW
/* Tokens 4 t .. 4 t + 3 of 16 dims. */
#define VALUE_COLUMNS(codes, t)                                                                                           \
    UNROLL for (int c = 0; c < COLS; c++)                                                                                 \
        UNROLL for (int part = 0; part < 2; part++)                                                                       \
        {                                                                                                                 \
            int8 weight;                                                                                                  \
                                                                                                                          \
            SPREAD(weight, ((const int *)weights->part[side][c][part])[p * 8 + (t)]);                                     \
            pairs[c][part][0] += VALUE_PAIRS((codes)[0].lo, weight);                                                      \
            pairs[c][part][1] += VALUE_PAIRS((codes)[0].hi, weight);                                                      \
            if ((t) % V_STEPS == V_STEPS - 1) {                                                                           \
                sums[0][c][part].lo = add_pairs(sums[0][c][part].lo, pairs[c][part][0]);                                  \
                sums[0][c][part].hi = add_pairs(sums[0][c][part].hi, pairs[c][part][1]);                                  \
                pairs[c][part][0] = pairs[c][part][1] = 0;                                                                \
            }                                                                                                             \
        }
#else
/* Tokens 4 t .. 4 t + 3 of all V_STRIPE vectors. */
#define VALUE_COLUMNS(codes, t)                                                                                           \
    UNROLL for (int c = 0; c < COLS; c++)                                                                                 \
        UNROLL for (int part = 0; part < 2; part++)                                                                       \
        {                                                                                                                 \
            int16 weight;                                                                                                 \
                                                                                                                          \
            SPREAD(weight, ((const int *)weights->part[side][c][part])[p * 8 + (t)]);                                     \
            UNROLL for (int i = 0; i < V_STRIPE; i++)                                                                       \
                DOT_VALUES(sums[i][c][part], (codes)[i], weight);                                                         \
        }
#endif

/* Weighted values of dims 16 first .. 16 (first + V_STRIPE) - 1. */
static inline void block_values(const __global Ref *ref, const __global uchar *pages, const __global uchar *fresh, int kv_head, int first,
                                const __global uchar *bytes, const Weights *weights, float16 ret[COLS][V_DIM / 16])
{
    const int side = first * 16 / GROUP_DIMS;
    int16 sums[V_STRIPE][COLS][2];
#if NARROW
    short16 pairs[COLS][2][2];

    UNROLL for (int c = 0; c < COLS; c++)
        pairs[c][0][0] = pairs[c][0][1] = pairs[c][1][0] = pairs[c][1][1] = 0;
#endif

    UNROLL for (int i = 0; i < V_STRIPE; i++)
        UNROLL for (int c = 0; c < COLS; c++)
            sums[i][c][0] = sums[i][c][1] = 0;
    for (int p = ref->first_page; p < ref->n_pages; p++) {
        const __global uchar *record = block_record(pages, fresh, ref->pages[p], kv_head);

        if (V_BITS != 8 && bytes) {
            const __global uchar *codes = bytes + K_BLOCK_BYTES + p * V_PAGE_BYTES + first * 512;

            UNROLL for (int t = 0; t < 8; t++) {
                int16 fours[V_STRIPE];

                UNROLL for (int i = 0; i < V_STRIPE; i++)
                    fours[i] = load_codes(codes + (i * 8 + t) * 64);
                VALUE_COLUMNS(fours, t)
            }
            continue;
        }
        UNROLL for (int t = 0; t < 8; t++) {
            int16 fours[V_STRIPE];

            UNROLL for (int i = 0; i < V_STRIPE; i++)
                fours[i] = value_codes(record, first + i, t);
            VALUE_COLUMNS(fours, t)
        }
    }
    UNROLL for (int i = 0; i < V_STRIPE; i++)
        UNROLL for (int c = 0; c < COLS; c++) {
            int16 twice = ((sums[i][c][0] << WEIGHT_SHIFT) + sums[i][c][1]) * 2 - V_ZERO * weights->sum[side][c];

            ret[c][first + i] = fma(convert_float16(twice), (float16)(0.5f / WEIGHT_TOP), (float16)(weights->offset[side][c]));
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
    float16 acc[COLS][V_DIM / 16];
    Weights weights __attribute__((aligned(64)));

    block_scores(ref, pages, fresh, next, kv_head, columns, page_angles, places, bytes, scores, turned, m);
    block_weights(ref, pages, fresh, kv_head, m, scores, &weights, l);
    for (int first = 0; first < V_DIM / 16; first += V_STRIPE)
        block_values(ref, pages, fresh, kv_head, first, bytes, &weights, acc);
    for (int c = 0; c < COLS; c++)
        block_emit(columns, c, m[c], l[c], acc[c]);
}
#endif
