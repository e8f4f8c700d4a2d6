/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The two launch shapes of a tile (attend.h), around attend_block() of attend-tile.cl or attend-tile-x86.cl.
 *   split       a unit is a (ref, KV head): partial results go to (n_refs, @ref_rows, N_HEADS) of `partials`, attend_fold or
 *               attend_finish merges them in order; for few groups
 *   sequential  a unit is a (group, KV head), which walks its refs and merges into the rows' state; for many
 * GPUs deal the columns of a unit to @n_shares units of their own.  Work-groups of LANES take contiguous ranges of units.
 * A sequential launch walks refs [skip, skip + most) of each group: Mesa's llvmpipe ends the loops of a work-item silently after 65,535
 * iterations in all, so there the host cuts long walks.
 */

/* @more: another ref follows in the array.  Columns of one ref: rows of the group times query heads of the KV head, COLS at a time. */
static inline void walk_ref(const __global Ref *ref, bool more, const __global Group *group, int mask, int window, int kv_head, int share,
                            int n_shares, bool fold, __global float *out,
                            const __global float *operands, const __global uchar *pages, const __global uchar *fresh,
                            const __global float *page_angles, const __global float *places, SHARED float *shared,
                            __global uchar *scratch)
{
    const int n = group->n_rows * N_REP;
    const int next_head = kv_head + 1 < N_KV ? kv_head + 1 : 0;
    const __global Ref *next_ref = next_head == 0 && more ? ref + 1 : ref;
    const __global uchar *next = block_record(pages, fresh, next_ref->pages[next_ref->first_page], next_head); /* in the order of a split */
    const bool unpacked = block_begin(ref, pages, fresh, kv_head, n, scratch);

    for (int first = share * COLS; first < n; first += n_shares * COLS) {
        Columns columns;

        columns.highest_low = 0;
        for (int c = 0; c < COLS; c++) {
            const int column = min(first + c, n - 1), row = column / N_REP, head = kv_head * N_REP + column % N_REP;
            const int low = max(first_visible(group, row_position(group, row, mask), mask, window), SINK_TOKENS);

            columns.operand[c] = operands + ((size_t)(group->row0 + row) * N_HEADS + head) * OP_FLOATS;
            columns.low[c] = low;
            columns.highest_low = max(columns.highest_low, low);
            columns.out[c] = out + ((size_t)row * N_HEADS + head) * STATE_FLOATS;
        }
        columns.n_valid = min(COLS, n - first);
        columns.fold = fold;
        attend_block(ref, pages, fresh, next, kv_head, &columns, page_angles, places, shared, unpacked ? scratch : 0);
    }
}

__kernel void attend_tile(int sequential, int n_units, int n_shares, int ref_rows, int skip, int most, int mask, int window,
                          const __global uchar *group_buffer, ulong groups_offset,
                          const __global uchar *ref_buffer, ulong refs_offset, const __global uchar *span_buffer, ulong spans_offset,
                          const __global uchar *page_buffer, ulong pages_offset, const __global uchar *fresh,
                          const __global float *operands, __global float *state, __global float *partials,
                          const __global float *page_angles, const __global float *places, __global uchar *scratch)
{
    SHARED float shared[BLOCK_SHARED_FLOATS] __attribute__((aligned(64)));
    const __global Group *groups = AT(Group, group_buffer, groups_offset);
    const __global Ref *refs = AT(Ref, ref_buffer, refs_offset);

    for (int unit = unit_begin(n_units); unit < unit_end(n_units); unit++) {
        const int share = unit % n_shares, kv_head = unit / n_shares % N_KV, index = unit / n_shares / N_KV;
        int first = index, end = index + 1;

        if (sequential) {
            const Span span = AT(Span, span_buffer, spans_offset)[index];

            first = span.first_ref + min(skip, span.n_refs);
            end = first + min(most, span.n_refs - min(skip, span.n_refs));
        }
        for (int r = first; r < end; r++) {
            const __global Group *group = groups + refs[r].group;
            __global float *out = sequential ? state + (size_t)group->row0 * N_HEADS * STATE_FLOATS
                                             : partials + (size_t)r * ref_rows * N_HEADS * STATE_FLOATS;

            walk_ref(refs + r, !sequential && unit + n_shares < unit_end(n_units), group, mask, window, kv_head, share, n_shares,
                     sequential, out, operands, page_buffer + pages_offset, fresh, page_angles, places, shared,
                     INTEGER ? scratch + get_group_id(0) * (BLOCK_TOKENS * (K_DIM + V_DIM)) : 0);
        }
    }
}

/* Merges the partial results of a split tile into (m, l, acc) of one (row, head), in order. */
static inline void fold_partials(Span span, int ref_rows, int row_of_group, int head, const __global float *partials, float *m, float *l,
                                 vfloat acc[PER_LANE(V_DIM / W)])
{
    for (int r = span.first_ref; r < span.first_ref + span.n_refs; r++) {
        const __global float *partial = partials + (((size_t)r * ref_rows + row_of_group) * N_HEADS + head) * STATE_FLOATS;
        const Fold fold = fold_begin(*m, partial[V_DIM]);
        int n = 0;

        *l = fold_one(fold, *l, partial[V_DIM + 1]);
        *m = fold.m;
        FOR_LANES(i, V_DIM / W) {
            acc[n] = fold_vector(fold, acc[n], VLOAD(partial + i * W));
            n++;
        }
    }
}

static inline void state_load(const __global float *state, float *m, float *l, vfloat acc[PER_LANE(V_DIM / W)])
{
    int n = 0;

    FOR_LANES(i, V_DIM / W)
        acc[n++] = VLOAD(state + i * W);
    *m = state[V_DIM];
    *l = state[V_DIM + 1];
}

/* A unit is a (row, head).  Launched when another tile of the layer follows a split one. */
__kernel void attend_fold(int n_rows, int n_groups, int ref_rows, const __global uchar *group_buffer, ulong groups_offset,
                          const __global uchar *span_buffer, ulong spans_offset, const __global float *partials,
                          __global float *states)
{
    const __global Group *groups = AT(Group, group_buffer, groups_offset);
    const int n = n_rows * N_HEADS;

    for (int unit = unit_begin(n); unit < unit_end(n); unit++) {
        const int row = unit / N_HEADS, g = group_of_row(groups, n_groups, row);
        __global float *state = states + (size_t)unit * STATE_FLOATS;
        vfloat acc[PER_LANE(V_DIM / W)];
        float m, l;
        int k = 0;

        state_load(state, &m, &l, acc);
        fold_partials(AT(Span, span_buffer, spans_offset)[g], ref_rows, row - groups[g].row0, unit % N_HEADS, partials, &m, &l, acc);
        SHARED_SYNC();
        FOR_LANES(i, V_DIM / W)
            VSTORE(acc[k++], state + i * W);
        if (LANE == 0) {
            state[V_DIM] = m;
            state[V_DIM + 1] = l;
        }
    }
}
