/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A layer's attention at once, on CPU devices, for passes of one row a sequence whose packed pages lie in one tile: what attend_prepare,
 * attend_tile (sequential) and attend_finish do for a (row, KV head) depends on nothing that they do for others.  A launch costs as much as
 * the attention of a row over a short past, and the tail is asked for before it is needed.
 */

#if LANES == 1

/* A unit is a (row, KV head); row r is group r.  @with_tile: there are packed pages. */
__kernel void attend_whole(int n_rows, int with_tile, int mask, int window, const __global float *qkv,
                           const __global uchar *rope_buffer, ulong rope_offset, const __global uchar *calibration, ulong calibration_offset,
                           const __global uchar *group_buffer, ulong groups_offset, const __global uchar *ref_buffer, ulong refs_offset,
                           const __global uchar *span_buffer, ulong spans_offset, const __global uchar *page_buffer, ulong pages_offset,
                           __global float *operands, __global float *states, __global uchar *kept, const __global float *page_angles,
                           const __global float *places, __global uchar *scratch, __global uchar *tails, ulong tail_offset, ulong tail_stride,
                           const __global uchar *logit_buffer, ulong logits_offset, __global float *out)
{
    float shared[BLOCK_SHARED_FLOATS > FINISH_SHARED_FLOATS ? BLOCK_SHARED_FLOATS : FINISH_SHARED_FLOATS] __attribute__((aligned(64)));
    const __global float *constants = AT(float, calibration, calibration_offset);
    const __global uchar *pages = page_buffer + pages_offset;
    const int n = n_rows * N_KV;

    for (int unit = unit_begin(n); unit < unit_end(n); unit++) {
        const int row = unit / N_KV, kv_head = unit % N_KV;
        const __global Group *group = AT(Group, group_buffer, groups_offset) + row;
        const __global float *x = qkv + (size_t)row * ((N_HEADS + N_KV) * K_DIM + N_KV * V_DIM);
        const __global float *rope = AT(float, rope_buffer, rope_offset) + (size_t)row * 2 * ROT_HALF;
        __global float *state = states + (size_t)row * N_HEADS * STATE_FLOATS;
        __global uchar *tail = tails + tail_offset + group->tail_slot * tail_stride;
        const Tail t = tail_of(group, row, n_rows, kv_head, mask, window, kept, tail);
        const Pending nothing = {{0, 0}, 0, 0, 0};
        Span span = {0, 0};
        TailPlaces found;

        tail_find(&t, &found);
        if (with_tile)
            span = AT(Span, span_buffer, spans_offset)[row];
        for (int head = kv_head * N_REP; head < (kv_head + 1) * N_REP; head++)
            prepare_query(x + head * K_DIM, rope, constants, kv_head, operands + ((size_t)row * N_HEADS + head) * OP_FLOATS,
                          state + head * STATE_FLOATS);
        prepare_key(x + (N_HEADS + kv_head) * K_DIM, rope, kept, new_key(row, kv_head));
        prepare_value(x + (N_HEADS + N_KV) * K_DIM + kv_head * V_DIM, kept, new_value(n_rows, row, kv_head));
        for (int r = span.first_ref; r < span.first_ref + span.n_refs; r++)
            walk_ref(AT(Ref, ref_buffer, refs_offset) + r, false, group, mask, window, kv_head, 0, 1, true, state, operands, pages, 0,
                     page_angles, places, shared, INTEGER ? scratch + get_group_id(0) * (BLOCK_TOKENS * (K_DIM + V_DIM)) : 0);
        finish_row(&t, &found, row, nothing, operands, states, constants, AT(float, logit_buffer, logits_offset), shared, out);
        commit_row(kept, n_rows, row, row_position(group, 0, mask), kv_head, true, tail);
    }
}

#endif
