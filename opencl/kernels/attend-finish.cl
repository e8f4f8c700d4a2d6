/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a layer's attention: merges what is pending of a split tile, turns the packed part back (kv-codec.h: H^T acc + u l), adds
 * the part in full precision (sinks, ring, new rows), normalises, and commits new rows of sequences that have one group.
 */

#define TAIL_MOST   (TAIL_TOKENS + SINK_TOKENS)
#define TAIL_PADDED ((TAIL_MOST + 15) / 16 * 16)
#define FINISH_SHARED_FLOATS (COLS * TAIL_PADDED + V_DIM)

typedef struct {
    int first_sink, n_sinks, first, n; /* sinks, then positions from `first` on */
    int new_start, new_row0, n_rows, kv_head;
    const __global uchar *kept, *tail;
} Tail;

typedef struct { const __global uchar *base; size_t k, v; } TailToken;

static inline TailToken tail_token(const Tail *t, int i)
{
    const bool is_sink = i < t->n_sinks;
    const int position = is_sink ? t->first_sink + i : t->first + i - t->n_sinks;

    if (position >= t->new_start) {
        const int row = t->new_row0 + position - t->new_start;

        return (TailToken){t->kept, new_key(row, t->kv_head), new_value(t->n_rows, row, t->kv_head)};
    }
    const int place = is_sink ? TAIL_TOKENS + position : position % TAIL_TOKENS;

    return (TailToken){t->tail, tail_key(place, t->kv_head), tail_value(place, t->kv_head)};
}

#if LANES == 1
/* Where the tail's tokens lie.  A tail was last read a step ago and is not in the caches any more: all of it is asked for at once, in
 * lines of 64 bytes, so that the loops over tokens do not wait for one after the other. */
typedef struct { TailToken tokens[TAIL_MOST]; } TailPlaces;

static inline void tail_ask(const __global uchar *base, size_t element, int n)
{
    const __global uchar *from = base + element * TAIL_BYTES;

#if defined(__x86_64__)
    for (int i = 0; i < n * TAIL_BYTES; i += 64)
        __asm__ volatile("prefetcht0 %0" : : "m"(from[i]));
#endif
}

static inline void tail_find(const Tail *t, TailPlaces *places)
{
    for (int i = 0; i < t->n; i++) {
        places->tokens[i] = tail_token(t, i);
        tail_ask(places->tokens[i].base, places->tokens[i].k, K_DIM);
    }
    for (int i = 0; i < t->n; i++)
        tail_ask(places->tokens[i].base, places->tokens[i].v, V_DIM);
}
#define TAIL_TOKEN(t, places, i) (places)->tokens[i]
#else
typedef struct { int none; } TailPlaces;
#define tail_find(t, places)     (void)(places)
#define TAIL_TOKEN(t, places, i) tail_token(t, i)
#endif

/* Products of the queries with the key of token @i, lane by lane. */
static inline void tail_products(const Tail *t, const TailPlaces *places, const Columns *columns, int i, vfloat ret[COLS])
{
    const TailToken token = TAIL_TOKEN(t, places, i);

    UNROLL for (int c = 0; c < COLS; c++)
        ret[c] = 0.0f;
    for (int d = 0; d < K_DIM; d += W) {
        vfloat k = tail_load(token.base, token.k + d);

        UNROLL for (int c = 0; c < COLS; c++)
            ret[c] = fma(k, VLOAD(columns->operand[c] + d), ret[c]);
    }
}

#if W == 16
/* vector_sum() of sixteen vectors, by the same additions. */
static inline vfloat vector_sums(const vfloat x[16])
{
    float16 a[8], b[4], c[2];

    UNROLL for (int i = 0; i < 8; i++)
        a[i] = (float16)(x[2 * i].lo, x[2 * i + 1].lo) + (float16)(x[2 * i].hi, x[2 * i + 1].hi);
    UNROLL for (int i = 0; i < 4; i++)
        b[i] = (float16)(a[2 * i].s0123, a[2 * i].s89ab, a[2 * i + 1].s0123, a[2 * i + 1].s89ab) +
               (float16)(a[2 * i].s4567, a[2 * i].scdef, a[2 * i + 1].s4567, a[2 * i + 1].scdef);
    UNROLL for (int i = 0; i < 2; i++)
        c[i] = (float16)(b[2 * i].s014589cd, b[2 * i + 1].s014589cd) + (float16)(b[2 * i].s2367abef, b[2 * i + 1].s2367abef);
    return (float16)(c[0].s02468ace, c[1].s02468ace) + (float16)(c[0].s13579bdf, c[1].s13579bdf);
}
#endif

/* Scores of the tail's tokens, (COLS, TAIL_PADDED); padding is never seen. */
static inline void tail_scores(const Tail *t, const TailPlaces *places, const Columns *columns, SHARED float *scores)
{
#if W == 16
    const vint lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

    for (int first = 0; first < TAIL_PADDED; first += 16) {
        const int n = min(t->n - first, 16);
        vfloat products[COLS][16], some[COLS];

        for (int i = 0; i < n; i++) {
            tail_products(t, places, columns, first + i, some);
            UNROLL for (int c = 0; c < COLS; c++)
                products[c][i] = some[c];
        }
        for (int i = max(n, 0); i < 16; i++)
            UNROLL for (int c = 0; c < COLS; c++)
                products[c][i] = 0.0f;
        UNROLL for (int c = 0; c < COLS; c++)
            VSTORE(lane < n ? cap_vector(vector_sums(products[c])) : (vfloat)(NEVER), scores + c * TAIL_PADDED + first);
    }
#else
    FOR_LANES(i, t->n) {
        vfloat sum[COLS];

        tail_products(t, places, columns, i, sum);
        UNROLL for (int c = 0; c < COLS; c++)
            scores[c * TAIL_PADDED + i] = cap_one(vector_sum(sum[c]));
    }
    for (int i = t->n + LANE; i < TAIL_PADDED; i += LANES)
        UNROLL for (int c = 0; c < COLS; c++)
            scores[c * TAIL_PADDED + i] = NEVER;
#endif
    SHARED_SYNC();
}

/* Every lane walks all of them: 80 values. */
static inline float tail_weights(SHARED float *scores, float *ret_m)
{
    vfloat largest = NEVER, l = 0.0f;
    float m;

    for (int i = 0; i < TAIL_PADDED; i += W) {
        vfloat x = VLOAD(scores + i);

        largest = x > largest ? x : largest;
    }
    m = vector_max(largest);
    SHARED_SYNC();
    FOR_LANES(i, TAIL_PADDED / W)
        VSTORE(exp2_vector(VLOAD(scores + i * W) - m), scores + i * W);
    SHARED_SYNC();
    for (int i = 0; i < TAIL_PADDED; i += W)
        l += VLOAD(scores + i);
    *ret_m = m;
    return vector_sum(l);
}

/* Vectors of a value that are summed side by side: as many as the registers hold. */
#if LANES > 1 || V_DIM / W % 2
#define TAIL_BESIDE 1
#elif V_DIM / W % 4 || !defined(__AVX512F__)
#define TAIL_BESIDE 2
#else
#define TAIL_BESIDE 4
#endif

static inline void tail_values(const Tail *t, const TailPlaces *places, const SHARED float *weights,
                               vfloat acc[COLS][PER_LANE(V_DIM / W)])
{
    int n = 0;

    for (int i = LANE; i < V_DIM / W; i += LANES * TAIL_BESIDE) {
        vfloat sum[COLS][TAIL_BESIDE];

        UNROLL for (int c = 0; c < COLS; c++)
            UNROLL for (int k = 0; k < TAIL_BESIDE; k++)
                sum[c][k] = 0.0f;
        for (int token = 0; token < t->n; token++) {
            const TailToken from = TAIL_TOKEN(t, places, token);

            UNROLL for (int k = 0; k < TAIL_BESIDE; k++) {
                vfloat value = tail_load(from.base, from.v + (i + k) * W);

                UNROLL for (int c = 0; c < COLS; c++)
                    sum[c][k] = fma(value, (vfloat)(weights[c * TAIL_PADDED + token]), sum[c][k]);
            }
        }
        UNROLL for (int k = 0; k < TAIL_BESIDE; k++)
            UNROLL for (int c = 0; c < COLS; c++)
                acc[c][n + k] = sum[c][k];
        n += TAIL_BESIDE;
    }
}

#if CODED
#if ROTATE && W != 16
/* The block of the rotation that a dim belongs to. */
typedef struct { int first, n; } HeadBlock;

static inline HeadBlock head_block(int d)
{
    HeadBlock block = {0, HADAMARD_MOST};

    while (!(V_DIM & block.n) || d >= block.first + block.n) {
        block.first += V_DIM & block.n;
        block.n /= 2;
    }
    return block;
}
#endif

/* acc = H^T acc + u l; fp8: times its scale first. */
static inline void turn_back(vfloat acc[PER_LANE(V_DIM / W)], float l, const __global float *constants, int kv_head,
                             SHARED float *slots)
{
#if FP8
    for (int i = 0; i < PER_LANE(V_DIM / W); i++)
        acc[i] *= constants[CONST_FP8 + 1] * FP8_UNIT;
#endif
#if !ROTATE
    (void)slots;
#elif W == 16
    hadamard(acc, V_DIM);
#else
    int n = 0;

    FOR_LANES(d, V_DIM)
        slots[d] = acc[n++];
    SHARED_SYNC();
    for (int step = 1; step < V_DIM; step *= 2) {
        FOR_LANES(d, V_DIM) {
            const HeadBlock block = head_block(d);

            if (step < block.n && !((d - block.first) & step)) {
                const float a = slots[d], b = slots[d + step];

                slots[d] = a + b;
                slots[d + step] = a - b;
            }
        }
        SHARED_SYNC();
    }
    n = 0;
    FOR_LANES(d, V_DIM)
        acc[n++] = slots[d] * hadamard_scale(head_block(d).n);
    SHARED_SYNC();
#endif
#if CENTRE
    const __global float *mean = constants + CONST_V_MEAN + kv_head * V_DIM;
    int k = 0;

    FOR_LANES(i, V_DIM / W) {
        acc[k] = fma(VLOAD(mean + i * W), (vfloat)(l), acc[k]);
        k++;
    }
#endif
}
#endif

/* The part in full precision of a row's keys. */
static inline Tail tail_of(const __global Group *group, int row, int n_rows, int kv_head, int mask, int window, const __global uchar *kept,
                           const __global uchar *tail)
{
    const int position = row_position(group, row - group->row0, mask), low = first_visible(group, position, mask, window);
    Tail t = {min(low, SINK_TOKENS), 0, max(group->n_packed * PAGE_TOKENS, low), 0, group->new_start, group->new_row0, n_rows,
              kv_head, kept, tail};

    t.n_sinks = group->n_packed > 0 ? SINK_TOKENS - t.first_sink : 0;
    t.n = t.n_sinks + position - t.first + 1;
    return t;
}

/* What a split tile has left for one row; none when there is no pending tile. */
typedef struct { Span span; int ref_rows, row_of_group; const __global float *partials; } Pending;

/* The query heads of one (row, KV head). */
static inline void finish_row(const Tail *t, const TailPlaces *places, int row, Pending pending, const __global float *operands,
                              const __global float *states, const __global float *constants, const __global float *logits,
                              SHARED float *shared, __global float *out)
{
    for (int first = 0; first < N_REP; first += COLS) {
        Columns columns;
        vfloat tail_acc[COLS][PER_LANE(V_DIM / W)];
        float tail_m[COLS], tail_l[COLS];

        UNROLL for (int c = 0; c < COLS; c++)
            columns.operand[c] = operands + ((size_t)row * N_HEADS + t->kv_head * N_REP + min(first + c, N_REP - 1)) * OP_FLOATS;
        tail_scores(t, places, &columns, shared);
        UNROLL for (int c = 0; c < COLS; c++)
            tail_l[c] = tail_weights(shared + c * TAIL_PADDED, &tail_m[c]);
        tail_values(t, places, shared, tail_acc);
        for (int c = 0; c < COLS && first + c < N_REP; c++) {
            const int head = t->kv_head * N_REP + first + c;
            __global float *to = out + ((size_t)row * N_HEADS + head) * V_DIM;
            vfloat acc[PER_LANE(V_DIM / W)];
            float m, l;
            int k = 0;

            state_load(states + ((size_t)row * N_HEADS + head) * STATE_FLOATS, &m, &l, acc);
            fold_partials(pending.span, pending.ref_rows, pending.row_of_group, head, pending.partials, &m, &l, acc);
#if CODED
            turn_back(acc, l, constants, t->kv_head, shared + COLS * TAIL_PADDED);
#endif
            const Fold fold = fold_begin(m, tail_m[c]);
            const float sum = fold_one(fold, l, tail_l[c]);
#if SINK_LOGITS
            const Fold sink = fold_begin(fold.m, logits[head] * LOG2E);
            const float inverse = sink.old_factor / fold_one(sink, sum, 1.0f);
#else
            const float inverse = 1.0f / sum;
#endif

            FOR_LANES(i, V_DIM / W) {
                VSTORE(fold_vector(fold, acc[k], tail_acc[c][k]) * inverse, to + i * W);
                k++;
            }
        }
        SHARED_SYNC();
    }
}

/* A unit is a (row, KV head). */
__kernel void attend_finish(int n_rows, int n_groups, int mask, int window, const __global uchar *group_buffer, ulong groups_offset,
                            int pending, int ref_rows, const __global uchar *span_buffer, ulong spans_offset, const __global float *partials,
                            __global float *states, const __global float *operands, const __global uchar *calibration,
                            ulong calibration_offset, const __global uchar *kept, __global uchar *tails, ulong tail_offset,
                            ulong tail_stride, const __global uchar *logit_buffer, ulong logits_offset, __global float *out)
{
    SHARED float shared[FINISH_SHARED_FLOATS] __attribute__((aligned(64)));
    const __global Group *groups = AT(Group, group_buffer, groups_offset);
    const int n = n_rows * N_KV;

    for (int unit = unit_begin(n); unit < unit_end(n); unit++) {
        const int row = unit / N_KV, kv_head = unit % N_KV, g = group_of_row(groups, n_groups, row);
        const __global Group *group = groups + g;
        __global uchar *tail = tails + tail_offset + group->tail_slot * tail_stride;
        const Tail t = tail_of(group, row, n_rows, kv_head, mask, window, kept, tail);
        Pending left = {{0, 0}, ref_rows, row - group->row0, partials};
        TailPlaces places;

        tail_find(&t, &places);
        if (pending)
            left.span = AT(Span, span_buffer, spans_offset)[g];
        finish_row(&t, &places, row, left, operands, states, AT(float, calibration, calibration_offset),
                   AT(float, logit_buffer, logits_offset), shared, out);
        if (mask != CROSS && group_is_alone(groups, n_groups, g))
            commit_row(kept, n_rows, row, row_position(group, row - group->row0, mask), kv_head, true, tail);
    }
}
