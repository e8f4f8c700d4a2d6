/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What both kinds of block kernels share: where a page's record is, the mean's term of a page's scores, and what becomes of a
 * block's partial result.
 *
 * A block is KV_BLOCK_PAGES pages of one sequence and one KV head; COLS columns, query heads of rows of one group, are computed
 * together.  Scores of the whole block come first (its largest is the reference of the weights), then the values.
 */

/* COLS columns; those from n_valid on repeat the last and are not emitted. */
typedef struct {
    const __global float *operand[COLS];
    __global float *out[COLS]; /* STATE_FLOATS each */
    int low[COLS], highest_low; /* keys at lower positions are not seen packed: sinks, or out of sight */
    int n_valid;
    bool fold;                 /* merge into what is at `out`, else store */
} Columns;

/* Scores of the W tokens from position @from on, without those below @low. */
static inline vfloat hide_below(vfloat score, int from, int low)
{
#if W == 16
    const int16 position = from + (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);

    return position < low ? (float16)(NEVER) : score;
#else
    return from < low ? NEVER : score;
#endif
}

static inline const __global uchar *block_record(const __global uchar *pages, const __global uchar *fresh, uint page, int kv_head)
{
    return (page & REF_FRESH ? fresh + (size_t)(page & ~REF_FRESH) * PAGE_BYTES : pages + (size_t)page * PAGE_BYTES) +
           kv_head * RECORD_BYTES;
}

#if CODED
/* Turns (C, S) of every column to the page's centre, pairs below @n_pairs: turned[c] = C cos + S sin, then S cos - C sin. */
static inline void mean_turn(const Columns *columns, const __global float *angle, int n_pairs, SHARED float *turned)
{
    UNROLL for (int c = 0; c < COLS; c++)
        FOR_LANES(i, (n_pairs + W - 1) / W) {
            const __global float *operand = columns->operand[c];
            vfloat cos_f = VLOAD(operand + OP_COS + i * W), sin_f = VLOAD(operand + OP_SIN + i * W);
            vfloat page_c = VLOAD(angle + i * W), page_s = VLOAD(angle + ROT_PAD + i * W);

            *(SHARED vfloat *)(turned + c * 2 * ROT_PAD + i * W) = fma(cos_f, page_c, sin_f * page_s); /* aligned: vstore16() is not */
            *(SHARED vfloat *)(turned + (c * 2 + 1) * ROT_PAD + i * W) = fma(sin_f, page_c, -(cos_f * page_s));
        }
}

#if W == 16
/* The mean's term of the page's two token vectors, pairs below @n_pairs, added to @ret.  Places are symmetric about the centre: the even
 * part (cosines) and the odd part (sines) of 16 of them give all 32. */
static inline void mean_scores(const float *turned, const __global float *places, int n_pairs, float16 ret[COLS][2])
{
    float16 even[COLS], odd[COLS];

    UNROLL for (int c = 0; c < COLS; c++)
        even[c] = odd[c] = 0.0f;
    for (int f = 0; f < n_pairs; f++) {
        float16 place_c = vload16(0, places + f * 2 * PAGE_TOKENS + 16), place_s = vload16(0, places + (f * 2 + 1) * PAGE_TOKENS + 16);

        UNROLL for (int c = 0; c < COLS; c++) {
            even[c] = fma(place_c, (float16)(turned[c * 2 * ROT_PAD + f]), even[c]);
            odd[c] = fma(place_s, (float16)(turned[(c * 2 + 1) * ROT_PAD + f]), odd[c]);
        }
    }
    UNROLL for (int c = 0; c < COLS; c++) {
        float16 mirrored = even[c] - odd[c];

        ret[c][0] += mirrored.sfedcba9876543210;
        ret[c][1] += even[c] + odd[c];
    }
}
#else
static inline float mean_score(const __global float *operand, const __local float *turned, const __global float *places, int token)
{
    float score = operand[OP_CONST];

    for (int f = 0; f < MEAN_HALF; f++) {
        score = fma(places[f * 2 * PAGE_TOKENS + token], turned[f], score);
        score = fma(places[(f * 2 + 1) * PAGE_TOKENS + token], turned[ROT_PAD + f], score);
    }
    return score;
}
#endif
#endif

/* Stores or folds column @c's result; acc: this lane's vectors of dims, i = LANE, LANE + LANES, ... */
static inline void block_emit(const Columns *columns, int c, float m, float l, const vfloat acc[PER_LANE(V_DIM / W)])
{
    __global float *out = columns->out[c];
    int n = 0;

    if (c >= columns->n_valid)
        return;
    if (!columns->fold) {
        FOR_LANES(i, V_DIM / W)
            VSTORE(acc[n++], out + i * W);
        if (LANE == 0) {
            out[V_DIM] = m;
            out[V_DIM + 1] = l;
        }
        return;
    }
    Fold fold = fold_begin(out[V_DIM], m);

    l = fold_one(fold, out[V_DIM + 1], l);
    FOR_LANES(i, V_DIM / W)
        VSTORE(fold_vector(fold, VLOAD(out + i * W), acc[n++]), out + i * W);
    SHARED_SYNC(); /* every lane has read m and l */
    if (LANE == 0) {
        out[V_DIM] = fold.m;
        out[V_DIM + 1] = l;
    }
    SHARED_SYNC();
}
