/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Before and after a layer's attention: RoPE, query operands, new keys and values; commit to the tail ring; refill from pages.
 * Layouts: attend.h, attend-common.cl.
 */

/* ---- rotation: kv_hadamard() of quant/kv-codec.c -------------------------------------------------------------------------- */

/* Steps of 1, 2, 4 and 8 inside a vector: x' = (a + b, a - b). */
static inline float16 hadamard_inside(float16 x)
{
    const float16 s1 = (float16)(1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1);
    const float16 s2 = (float16)(1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1);
    const float16 s4 = (float16)(1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1);
    const float16 s8 = (float16)(1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1);

    x = fma(x, s1, x.s1032547698badcfe);
    x = fma(x, s2, x.s23016745ab89efcd);
    x = fma(x, s4, x.s45670123cdef89ab);
    return fma(x, s8, x.s89abcdef01234567);
}

#define HADAMARD_MOST 512 /* the largest block of a head */

static inline float hadamard_scale(int n)
{
    return n == 16 ? 0.25f : n == 32 ? 0.70710678118654752440f * 0.25f : n == 64 ? 0.125f
           : n == 128 ? 0.70710678118654752440f * 0.125f : n == 256 ? 0.0625f : 0.70710678118654752440f * 0.0625f;
}

/* @dim: K_DIM or V_DIM. */
static inline void hadamard(float16 *x, const int dim)
{
    int first = 0;

    for (int block = HADAMARD_MOST; block >= 16; block /= 2) {
        if (!(dim & block))
            continue;
        int n = block / 16;

        for (int i = first; i < first + n; i++)
            x[i] = hadamard_inside(x[i]);
        for (int step = 1; step < n; step *= 2)
            for (int base = first; base < first + n; base += 2 * step)
                for (int i = base; i < base + step; i++) {
                    float16 a = x[i], b = x[i + step];

                    x[i] = a + b;
                    x[i + step] = a - b;
                }
        for (int i = first; i < first + n; i++)
            x[i] *= hadamard_scale(block);
        first += n;
    }
}

/* ---- prepare ---------------------------------------------------------------------------------------------------------------- */

static inline void rope_turn(const __global float *x, const __global float *rope, float scale, float ret[K_DIM])
{
    for (int f = 0; f < ROT_HALF; f++) {
        float a = x[f] * scale, b = x[f + ROT_HALF] * scale, c = rope[2 * f], s = rope[2 * f + 1];

        ret[f] = fma(a, c, -(b * s));
        ret[f + ROT_HALF] = fma(b, c, a * s);
    }
    for (int d = 2 * ROT_HALF; d < K_DIM; d++)
        ret[d] = x[d] * scale;
}

#if CODED
/* C_f and S_f of the term that centring the keys took away.  In private arrays first: the compiler cannot know that @mean is not part of
 * @operand. */
static inline void mean_term(const float q[K_DIM], const __global float *mean, __global float *operand)
{
    float cosines[ROT_PAD + 1], sines[ROT_PAD + 1], steady = 0.0f;

    for (int f = 0; f < MEAN_HALF; f++) {
        float qf = q[f], qg = q[f + ROT_HALF], mf = mean[f], mg = mean[f + ROT_HALF];

        cosines[f] = fma(qf, mf, qg * mg);
        sines[f] = fma(qg, mf, -(qf * mg));
    }
    for (int f = MEAN_HALF; f < ROT_PAD; f++)
        cosines[f] = sines[f] = 0.0f;
    for (int f = 0; f < ROT_PAD; f++)
        operand[OP_COS + f] = cosines[f];
    for (int f = 0; f < ROT_PAD; f++)
        operand[OP_SIN + f] = sines[f];
    for (int d = 2 * MEAN_HALF; d < K_DIM; d++)
        steady = fma(q[d], mean[d], steady);
    operand[OP_CONST] = steady;
}

#if INTEGER
/* Codes of up to 63 * 128 + 63 in magnitude, so that high and low parts both fit -64..63: 8 bits alone cost 1.5 % of error. */
#define QUERY_TOP 8127.0f
static inline void query_codes(const float q[K_DIM], __global float *operand)
{
    __global int *words = (__global int *)(operand + K_DIM);

    for (int group = 0; group < K_GROUPS; group++) {
        const int first = group * GROUP_DIMS / 16, end = min((group + 1) * GROUP_DIMS, K_DIM) / 16;
        float16 magnitudes = 0.0f;
        float largest, inverse;
        int16 sums = 0;

        for (int i = first; i < end; i++) {
            float16 x = as_float16(as_int16(vload16(i, q)) & 0x7fffffff);

            magnitudes = x > magnitudes ? x : magnitudes;
        }
        largest = vector_max(magnitudes);
        largest = largest < 1e-30f ? 1e-30f : largest;
        inverse = QUERY_TOP / largest;
        for (int i = first; i < end; i++) {
            int16 codes = as_int16(vload16(i, q) * inverse + 12582912.0f) - 0x4b400000, high = (codes + 64) >> 7;
            int4 h = as_int4(low_bytes(high)), l = as_int4(low_bytes(codes - high * 128));

            vstore8((int8)(h.x, l.x, h.y, l.y, h.z, l.z, h.w, l.w), i, words);
            sums += codes;
        }
        operand[OP_SCALE + group] = largest * (1.0f / QUERY_TOP);
        operand[OP_SUM + group] = as_float(vector_sum_int(sums));
    }
}
#endif
#endif

#if CODED
/* The query as the coded keys want it: times w, times fp8's scale, rotated. */
static inline void prepare_coded(float q[K_DIM], const __global float *constants, int kv_head, __global float *operand)
{
    mean_term(q, constants + CONST_K_MEAN + kv_head * K_DIM, operand);
#if PAIR_SCALE
    for (int d = 0; d < K_DIM; d++)
        q[d] *= constants[CONST_K_SCALE + kv_head * K_DIM + d];
#endif
#if FP8
    for (int d = 0; d < K_DIM; d++)
        q[d] *= constants[CONST_FP8] * FP8_UNIT;
#endif
#if ROTATE
    float16 rotated[K_DIM / 16];

    for (int i = 0; i < K_DIM / 16; i++)
        rotated[i] = vload16(i, q);
    hadamard(rotated, K_DIM);
    for (int i = 0; i < K_DIM / 16; i++)
        vstore16(rotated[i], i, q);
#endif
#if INTEGER
    query_codes(q, operand);
#else
    for (int i = 0; i < K_DIM / 16; i++)
        vstore16(vload16(i, q), i, operand + K_DIM);
#endif
}
#endif

static inline void prepare_query(const __global float *x, const __global float *rope, const __global float *constants, int kv_head,
                                 __global float *operand, __global float *state)
{
    float q[K_DIM];

    rope_turn(x, rope, SCORE_SCALE, q);
    for (int d = 0; d < K_DIM; d++)
        operand[d] = q[d];
#if CODED
    prepare_coded(q, constants, kv_head, operand);
#endif
    for (int d = 0; d < V_DIM; d++)
        state[d] = 0.0f;
    state[V_DIM] = NEVER;
    state[V_DIM + 1] = 0.0f;
}

static inline void prepare_key(const __global float *x, const __global float *rope, __global uchar *kept, size_t index)
{
    float y[K_DIM];

    rope_turn(x, rope, 1.0f, y);
    for (int d = 0; d < K_DIM; d += W)
        tail_store(VLOAD(y + d), kept, index + d);
}

static inline void prepare_value(const __global float *x, __global uchar *kept, size_t index)
{
    for (int d = 0; d < V_DIM; d += W)
        tail_store(VLOAD(x + d), kept, index + d);
}

/* One work-item a range of (row, head): query heads, key heads, value heads, of which the rows of @qkv have @n_heads from @first_head on.
 * Any global size. */
__kernel void attend_prepare(int n_rows, int first_head, int n_heads, int row_floats, const __global float *qkv,
                             const __global uchar *rope_buffer, ulong rope_offset,
                             const __global uchar *calibration, ulong calibration_offset, __global float *operands,
                             __global float *state, __global uchar *kept)
{
    const long n = (long)n_rows * n_heads;
    const int first = (int)(n * get_global_id(0) / get_global_size(0)), last = (int)(n * (get_global_id(0) + 1) / get_global_size(0));

    for (int unit = first; unit < last; unit++) {
        const int row = unit / n_heads, head = first_head + unit % n_heads;
        const __global float *x = qkv + (size_t)row * row_floats + (min(head, N_HEADS + N_KV) - first_head) * K_DIM;
        const __global float *rope = AT(float, rope_buffer, rope_offset) + (size_t)row * 2 * ROT_HALF;

        if (head < N_HEADS) {
            const size_t query = (size_t)row * N_HEADS + head;

            prepare_query(x, rope, AT(float, calibration, calibration_offset), head / N_REP, operands + query * OP_FLOATS,
                          state + query * STATE_FLOATS);
        } else if (head < N_HEADS + N_KV) {
            prepare_key(x, rope, kept, new_key(row, head - N_HEADS));
        } else {
            const int kv_head = head - N_HEADS - N_KV;

            prepare_value(x + kv_head * V_DIM, kept, new_value(n_rows, row, kv_head));
        }
    }
}

/* ---- tail ring ------------------------------------------------------------------------------------------------------------- */

/* Copies one row's key and value of one head to a place of the tail. */
static inline void tail_put(const __global uchar *kept, size_t k_from, size_t v_from, __global uchar *tail, int place, int kv_head)
{
    const size_t k_to = tail_key(place, kv_head), v_to = tail_value(place, kv_head);

    FOR_LANES(i, K_DIM / W)
        tail_store(tail_load(kept, k_from + i * W), tail, k_to + i * W);
    FOR_LANES(i, V_DIM / W)
        tail_store(tail_load(kept, v_from + i * W), tail, v_to + i * W);
}

static inline void commit_row(const __global uchar *kept, int n_rows, int row, int position, int kv_head, bool ring, __global uchar *tail)
{
    const size_t k_from = new_key(row, kv_head), v_from = new_value(n_rows, row, kv_head);

    if (ring)
        tail_put(kept, k_from, v_from, tail, position % TAIL_TOKENS, kv_head);
    if (position < SINK_TOKENS)
        tail_put(kept, k_from, v_from, tail, TAIL_TOKENS + position, kv_head);
}

/* Sequences with several groups in the pass; those of one group were committed by attend_finish, but for cross attention, which writes and
 * reads in passes of their own.  A unit is a (row, KV head). */
__kernel void attend_commit(int n_rows, int n_groups, int mask, const __global uchar *group_buffer, ulong groups_offset,
                            const __global uchar *kept, __global uchar *tails, ulong tail_offset, ulong tail_stride)
{
    const __global Group *groups = AT(Group, group_buffer, groups_offset);
    const int n = n_rows * N_KV;

    for (int unit = unit_begin(n); unit < unit_end(n); unit++) {
        const int row = unit / N_KV, g = group_of_row(groups, n_groups, row), position = groups[g].pos0 + row - groups[g].row0;
        int end = g;

        if (mask != CROSS && group_is_alone(groups, n_groups, g))
            continue;
        while (end + 1 < n_groups && same_sequence(groups + g, groups + end + 1))
            end++;
        commit_row(kept, n_rows, row, position, unit % N_KV, position + TAIL_TOKENS >= groups[end].pos0 + groups[end].n_rows,
                   tails + tail_offset + groups[g].tail_slot * tail_stride);
    }
}

#if !CODED
#if TAIL_BITS == 32
typedef uint Bits;
#else
typedef ushort Bits;
#endif

/* One (pack, KV head) a unit: 32 positions of an unpacked page go to their ring places; those of page 0 also to the sinks. */
__kernel void attend_refill(int n_packs, const __global uchar *pack_buffer, ulong packs_offset, const __global uchar *pages,
                            ulong pages_offset, __global uchar *tails, ulong tail_offset, ulong tail_stride)
{
    const int n = n_packs * N_KV;

    for (int unit = unit_begin(n); unit < unit_end(n); unit++) {
        const __global Pack *pack = AT(Pack, pack_buffer, packs_offset) + unit / N_KV;
        const int kv_head = unit % N_KV;
        const __global uchar *record = pages + pages_offset + (size_t)pack->to * PAGE_BYTES + kv_head * RECORD_BYTES;
        const __global Bits *keys = (const __global Bits *)record, *values = (const __global Bits *)(record + V_OFFSET);
        __global Bits *tail = (__global Bits *)(tails + tail_offset + pack->tail_slot * tail_stride);

        FOR_LANES(token, PAGE_TOKENS) {
            const int position = pack->page * PAGE_TOKENS + token;

            for (int sink = pack->sinks_only ? 1 : 0; sink < (position < SINK_TOKENS ? 2 : 1); sink++) {
                const int place = sink ? TAIL_TOKENS + position : position % TAIL_TOKENS;

                for (int d = 0; d < K_DIM; d++)
                    tail[tail_key(place, kv_head) + d] = keys[d * PAGE_TOKENS + token];
                for (int d = 0; d < V_DIM; d++)
                    tail[tail_value(place, kv_head) + d] = values[token * V_DIM + d];
            }
        }
    }
}
#endif
