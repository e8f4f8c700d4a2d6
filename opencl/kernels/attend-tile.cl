/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks in float32, for every form and device: the C definition is quant/kv-codec.h (decode by kv_unpack_page()).
 * Decoding is exact, so only sums round.
 */

#if !INTEGER

/* Vectors of tokens that a work-item has of a page; independent sums keep the multipliers busy. */
#define MY_VECTORS (PAGE_TOKENS / W / LANES)
#define MY_VECTOR(k) (LANE + (k) * LANES)

/* K of the page's tokens times COLS queries, added to @score. */
#if !CODED
static inline void block_dot(const __global uchar *record, const Columns *columns, vfloat score[MY_VECTORS][COLS])
{
    for (int d = 0; d < K_DIM; d++)
        UNROLL for (int k = 0; k < MY_VECTORS; k++) {
#if FORM == 0
            vfloat key = VLOAD((const __global float *)record + d * PAGE_TOKENS + MY_VECTOR(k) * W);
#else
            vfloat key = half_load(record, d * PAGE_TOKENS + MY_VECTOR(k) * W);
#endif
            UNROLL for (int c = 0; c < COLS; c++)
                score[k][c] = fma(key, (vfloat)(columns->operand[c][d]), score[k][c]);
        }
}
#elif FP8
static inline void block_dot(const __global uchar *record, const Columns *columns, vfloat score[MY_VECTORS][COLS])
{
    for (int g = 0; g < K_DIM / 4; g++)
        UNROLL for (int k = 0; k < MY_VECTORS; k++) {
            const int token = MY_VECTOR(k) * W;
            vfloat keys[4];

            fp8_load(record, g * 2 + token / 16, token % 16, keys);
            UNROLL for (int e = 0; e < 4; e++)
                UNROLL for (int c = 0; c < COLS; c++)
                    score[k][c] = fma(keys[e], (vfloat)(columns->operand[c][K_DIM + 4 * g + e]), score[k][c]);
        }
}
#else
/* Field @i of @width bits of each byte. */
static inline vuint word_field(vuint word, int i, int width)
{
    return (word >> (uint)(i * width)) & FIELD_MASK(width);
}

/* Codes of dims d .. d + 3 in the bytes of @word. */
static inline void dot_four(vuint word, int d, const Scale *scale, const Columns *columns, vfloat score[COLS])
{
    UNROLL for (int e = 0; e < 4; e++) {
        vfloat key = fma(TO_VFLOAT((word >> (8 * e)) & 255u), scale->step, scale->zero); /* leat: exact, 17 bits */

        UNROLL for (int c = 0; c < COLS; c++)
            score[c] = fma(key, (vfloat)(columns->operand[c][K_DIM + d + e]), score[c]);
    }
}

static inline void block_dot(const __global uchar *record, const Columns *columns, vfloat score[MY_VECTORS][COLS])
{
    const __global uint *words = (const __global uint *)record;

    for (int group = 0; group < K_GROUPS; group++) {
        const int first = group * (GROUP_DIMS / 4) / K_PER, last = min(first + GROUP_DIMS / 4 / K_PER, K_VECTORS);
        Scale scale[MY_VECTORS];

        UNROLL for (int k = 0; k < MY_VECTORS; k++)
            scale[k] = scale_load(record + K_SCALE, K_GROUPS, group, MY_VECTOR(k) * W, 0.5f * (float)K_TOP);
        for (int g = first; g < last; g++)
            UNROLL for (int k = 0; k < MY_VECTORS; k++) {
                const __global uint *mine = words + MY_VECTOR(k) * W;
                const vuint base = VLOAD(mine + g * 32);

                UNROLL for (int i = 0; i < K_PER; i++) {
                    const int four = g * K_PER + i;
                    vuint word = word_field(base, i, K_BASE);
#if K_REST
                    word |= word_field(VLOAD(mine + K_HIGH / 4 + four / K_REST_PER * 32), four % K_REST_PER, K_REST) << (uint)K_BASE;
#endif
                    dot_four(word, 4 * four, &scale[k], columns, score[k]);
                }
            }
    }
}
#endif

/* Scores of the block, (COLS, BLOCK_TOKENS), and the largest that this lane saw of each column. */
static inline void block_scores(const __global Ref *ref, const __global uchar *pages, const __global uchar *fresh, int kv_head,
                                const Columns *columns, const __global float *page_angles, const __global float *places,
                                SHARED float *scores, SHARED float *turned, vfloat largest[COLS])
{
    UNROLL for (int c = 0; c < COLS; c++)
        largest[c] = NEVER;
    for (int p = ref->first_page; p < ref->n_pages; p++) {
        const int page = ref->block * BLOCK_PAGES + p;
        const __global uchar *record = block_record(pages, fresh, ref->pages[p], kv_head);

#if CODED
        mean_turn(columns, page_angles + (size_t)page * 2 * ROT_PAD, MEAN_HALF, turned);
        SHARED_SYNC();
#if W == 16
        float16 mean[COLS][2];

        UNROLL for (int c = 0; c < COLS; c++)
            mean[c][0] = mean[c][1] = columns->operand[c][OP_CONST];
        mean_scores(turned, places, MEAN_HALF, mean);
#endif
#endif
        vfloat score[MY_VECTORS][COLS];

        UNROLL for (int k = 0; k < MY_VECTORS; k++)
            UNROLL for (int c = 0; c < COLS; c++)
#if CODED && W == 16
                score[k][c] = mean[c][k];
#elif CODED
                score[k][c] = mean_score(columns->operand[c], turned + c * 2 * ROT_PAD, places, MY_VECTOR(k));
#else
                score[k][c] = 0.0f;
#endif
        block_dot(record, columns, score);
        UNROLL for (int k = 0; k < MY_VECTORS; k++)
            UNROLL for (int c = 0; c < COLS; c++) {
                score[k][c] = cap_vector(score[k][c]);
                if (page * PAGE_TOKENS < columns->highest_low)
                    score[k][c] = hide_below(score[k][c], page * PAGE_TOKENS + MY_VECTOR(k) * W, columns->low[c]);
                largest[c] = score[k][c] > largest[c] ? score[k][c] : largest[c];
                VSTORE(score[k][c], scores + c * BLOCK_TOKENS + p * PAGE_TOKENS + MY_VECTOR(k) * W);
            }
        SHARED_SYNC();
    }
}

/* A column's value over all lanes, by a fixed order: everyone gets it. */
#if LANES == 1
#define ALL_LANES(name, pick)                                                                                             \
    static inline float name(vfloat x, float *slots)                                                                      \
    {                                                                                                                     \
        return vector_##pick(x);                                                                                          \
    }
#else
#define COMBINE_max(a, b) ((a) > (b) ? (a) : (b))
#define COMBINE_sum(a, b) ((a) + (b))
#define ALL_LANES(name, pick)                                                                                             \
    static inline float name(vfloat x, __local float *slots)                                                              \
    {                                                                                                                     \
        float all;                                                                                                        \
                                                                                                                          \
        slots[LANE] = x;                                                                                                  \
        SHARED_SYNC();                                                                                                    \
        all = slots[0];                                                                                                   \
        for (int i = 1; i < LANES; i++)                                                                                   \
            all = COMBINE_##pick(all, slots[i]);                                                                          \
        SHARED_SYNC();                                                                                                    \
        return all;                                                                                                       \
    }
#endif
ALL_LANES(all_lanes_max, max)
ALL_LANES(all_lanes_sum, sum)

/* Scores become weights, times the V step of each group: (N_SIDES, COLS, BLOCK_TOKENS).  Returns their sum; @ret_offset: the sums of
 * weight times what the middle code stands for, which every dim of a group gets. */
static inline float block_weights(const __global Ref *ref, const __global uchar *pages, const __global uchar *fresh, int kv_head, int c,
                                  float m, SHARED float *weights, SHARED float *slots, float ret_offset[N_SIDES])
{
    vfloat l = 0.0f, offset[N_SIDES];

    for (int side = 0; side < N_SIDES; side++)
        offset[side] = 0.0f;
    for (int p = ref->first_page; p < ref->n_pages; p++)
        FOR_LANES(v, PAGE_TOKENS / W) {
            const int at = c * BLOCK_TOKENS + p * PAGE_TOKENS + v * W;
            vfloat weight = exp2_vector(VLOAD(weights + at) - m);

            l += weight;
#if GROUPED
            const __global uchar *record = block_record(pages, fresh, ref->pages[p], kv_head);

            for (int side = 0; side < V_GROUPS; side++) {
                Scale scale = scale_load(record + V_SCALE, V_GROUPS, side, v * W, 0.5f * (float)V_TOP);

                offset[side] = fma(weight, fma(scale.step, (vfloat)(0.5f * (float)V_TOP), scale.zero), offset[side]);
                VSTORE(weight * scale.step, weights + side * COLS * BLOCK_TOKENS + at);
            }
#else
            VSTORE(weight, weights + at);
#endif
        }
    for (int side = 0; side < N_SIDES; side++)
        ret_offset[side] = all_lanes_sum(offset[side], slots);
    return all_lanes_sum(l, slots);
}

/* Vectors of dims that a work-item sums together; all of one group of scales. */
#if LANES == 1 && V_DIM % 64 == 0 && GROUP_DIMS % 64 == 0
#define V_STRIPE 4
#elif LANES == 1 && V_DIM % 32 == 0 && GROUP_DIMS % 32 == 0
#define V_STRIPE 2
#else
#define V_STRIPE 1
#endif

/* Values of vectors i .. i + V_STRIPE - 1 of dims over a page, weighted, added to @acc. */
#if !CODED
static inline void block_values(const __global uchar *record, int i, const SHARED float *weights, vfloat acc[V_STRIPE][COLS])
{
    for (int token = 0; token < PAGE_TOKENS; token++)
        UNROLL for (int k = 0; k < V_STRIPE; k++) {
#if FORM == 0
            vfloat value = VLOAD((const __global float *)(record + V_OFFSET) + token * V_DIM + (i + k) * W);
#else
            vfloat value = half_load(record + V_OFFSET, token * V_DIM + (i + k) * W);
#endif
            UNROLL for (int c = 0; c < COLS; c++)
                acc[k][c] = fma(value, (vfloat)(weights[c * BLOCK_TOKENS + token]), acc[k][c]);
        }
}
#elif FP8
static inline void block_values(const __global uchar *record, int i, const SHARED float *weights, vfloat acc[V_STRIPE][COLS])
{
    for (int t = 0; t < 8; t++)
        UNROLL for (int k = 0; k < V_STRIPE; k++) {
            const int dim = (i + k) * W;
            vfloat values[4];

            fp8_load(record + V_OFFSET, dim / 16 * 8 + t, dim % 16, values);
            UNROLL for (int e = 0; e < 4; e++)
                UNROLL for (int c = 0; c < COLS; c++)
                    acc[k][c] = fma(values[e], (vfloat)(weights[c * BLOCK_TOKENS + 4 * t + e]), acc[k][c]);
        }
}
#else
static inline void values_four(vuint word, int token, const SHARED float *weights, vfloat acc[COLS])
{
    UNROLL for (int e = 0; e < 4; e++) {
        vfloat value = TO_VFLOAT((word >> (8 * e)) & 255u) - 0.5f * (float)V_TOP;

        UNROLL for (int c = 0; c < COLS; c++)
            acc[c] = fma(value, (vfloat)(weights[c * BLOCK_TOKENS + token + e]), acc[c]);
    }
}

static inline void block_values(const __global uchar *record, int i, const SHARED float *weights, vfloat acc[V_STRIPE][COLS])
{
    const SHARED float *side = weights + i * W / GROUP_DIMS * COLS * BLOCK_TOKENS;

    for (int vector = 0; vector < V_BASE; vector++)
        UNROLL for (int k = 0; k < V_STRIPE; k++) {
            const int dim = (i + k) * W;
            const vuint base = VLOAD((const __global uint *)(record + V_OFFSET) + (dim / 16 * V_BASE + vector) * 16 + dim % 16);

            UNROLL for (int j = 0; j < V_PER; j++) {
                const int t = vector * V_PER + j;
                vuint word = word_field(base, j, V_BASE);
#if V_REST
                const __global uint *rest = (const __global uint *)(record + V_HIGH) + (dim / 16 * V_REST + t / V_REST_PER) * 16;

                word |= word_field(VLOAD(rest + dim % 16), t % V_REST_PER, V_REST) << (uint)V_BASE;
#endif
                values_four(word, 4 * t, side, acc[k]);
            }
        }
}
#endif

/* Nothing to do before the columns of a ref; only the integer kernels unpack ahead. */
static inline bool block_begin(const __global Ref *ref, const __global uchar *pages, const __global uchar *fresh, int kv_head,
                               int n_columns, __global uchar *scratch)
{
    return false;
}

#define BLOCK_SHARED_FLOATS ((N_SIDES * COLS * BLOCK_TOKENS) + COLS * 2 * ROT_PAD + LANES)

/* One block of one KV head for COLS columns.  @shared: BLOCK_SHARED_FLOATS. */
static inline void attend_block(const __global Ref *ref, const __global uchar *pages, const __global uchar *fresh,
                                const __global uchar *next, int kv_head, const Columns *columns,
                                const __global float *page_angles, const __global float *places, SHARED float *shared,
                                const __global uchar *bytes)
{
    SHARED float *weights = shared, *turned = weights + N_SIDES * COLS * BLOCK_TOKENS, *slots = turned + COLS * 2 * ROT_PAD;
    vfloat largest[COLS], acc[PER_LANE(V_DIM / W)][COLS];
    float m[COLS], l[COLS], offset[COLS][N_SIDES];
    int n = 0;

    block_scores(ref, pages, fresh, kv_head, columns, page_angles, places, weights, turned, largest);
    UNROLL for (int c = 0; c < COLS; c++) {
        m[c] = all_lanes_max(largest[c], slots);
        m[c] = m[c] > LOWEST ? m[c] : LOWEST;
        l[c] = block_weights(ref, pages, fresh, kv_head, c, m[c], weights, slots, offset[c]);
    }
    for (int i = LANE * V_STRIPE; i < V_DIM / W; i += LANES * V_STRIPE) {
        vfloat sum[V_STRIPE][COLS];

        UNROLL for (int k = 0; k < V_STRIPE; k++)
            UNROLL for (int c = 0; c < COLS; c++)
                sum[k][c] = offset[c][N_SIDES > 1 ? i * W / GROUP_DIMS : 0];
        for (int p = ref->first_page; p < ref->n_pages; p++)
            block_values(block_record(pages, fresh, ref->pages[p], kv_head), i, weights + p * PAGE_TOKENS, sum);
        UNROLL for (int k = 0; k < V_STRIPE; k++)
            UNROLL for (int c = 0; c < COLS; c++)
                acc[n + k][c] = sum[k][c];
        n += V_STRIPE;
    }
    UNROLL for (int c = 0; c < COLS; c++) {
        vfloat mine[PER_LANE(V_DIM / W)];

        for (int i = 0; i < n; i++)
            mine[i] = acc[i][c];
        block_emit(columns, c, m[c], l[c], mine);
    }
    SHARED_SYNC();
}
#endif
