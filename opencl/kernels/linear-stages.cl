/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Up to four products in a row in one launch: x86 CPUs only.
 *
 * A launch and the late waking of a second thread cost as much as a small product, so the products of a layer that follow each
 * other run as *stages* of one launch.  Each work-group (one work-item, one thread) draws *tickets*, a few tiles for some rows,
 * first from its own share of the stage, in order, so that it reads memory as one stream; then from the shares of others, which
 * may have started late or lost their core.  It goes on to the next stage when all tickets of the stage are done.  Nobody waits
 * for a work-group that has not started: a ticket is held only by a running one, so a single thread that runs the groups one
 * after the other finishes too.  The wait is bounded: a group that has waited SPIN_LIMIT pauses (its peer has lost its core)
 * leaves, and those that hold tickets do the rest.  Tickets do not change what is computed, only by whom.
 *
 * Up to 8 rows: each group prepares the stage's activations for itself (0.3 us for 576 values) after it has drawn a ticket,
 * never before: a drawn ticket keeps the stage open, so that no later stage overwrites x meanwhile.
 * More rows: one launch prepares the activations (EPILOGUE_NONE, tickets of rows), the next multiplies (act_words = 0).
 *
 * sync, words 64 bytes apart: LEFT, then for each stage DONE and NEXT of each group's share.  Zero before the launch; the last
 * group to leave zeroes it.
 */

#if LANES > 1

#define STAGES       4
#define SYNC_STRIDE  16 /* words */
#define SYNC_DONE(s) ((1 + (s) * (get_num_groups(0) + 1)) * SYNC_STRIDE)
#define SYNC_NEXT(s) (SYNC_DONE(s) + SYNC_STRIDE)

/* 40 (AMD) to 140 (Intel) cycles each: 30 to 100 us. */
#define SPIN_LIMIT 2000

typedef struct Stage {
    const __global float *x;
    const __global int *x_rows;
    const __global float *norm;
    Weights weights;
    __global float *y;
} Stage;

#define STAGE_ARGUMENTS(i)                                                                                                   \
    const Shape shape##i, const __global float *x##i, const __global int *x_rows##i, const __global float *norm##i,         \
        const __global uchar *w0##i, const __global uchar *w1##i, const __global uchar *w2##i, __global float *y##i
#define STAGE(i) {x##i, x_rows##i, norm##i, {{w0##i, w1##i, w2##i}}, y##i}

/* So many rows of a group are prepared sooner as eight than one by one. */
#define EIGHT_FROM 3

/* Activations of rows [begin, end) of the pass; @begin is the first of a group. */
ALWAYS_INLINE void prepare_stage(const Shape *shape, const Stage *stage, uint begin, const uint end, __global int *act)
{
    const __global int *x_rows = (const __global int *)((const __global uchar *)stage->x_rows + shape->x_rows_offset);
    const __global float *norm = (const __global float *)((const __global uchar *)stage->norm + shape->norm_offset);
    const uint group_words = act_group_words(shape->n_cols, shape->terms);

#if LANES == 16 && !FLOAT_ACTS
    /* Rows of the group beyond the pass repeat the last one. */
    for (; end - begin >= EIGHT_FROM && shape->n_cols % 32 == 0; begin = min(begin + GROUP_ROWS, end)) {
        const __global float *x[GROUP_ROWS];
        __global int *to = act + (size_t)(begin / GROUP_ROWS) * group_words;

        for (uint r = 0; r < GROUP_ROWS; r++) {
            uint row = min(begin + r, end - 1);

            x[r] = stage->x + (size_t)(stage->x_rows ? x_rows[row] : row) * shape->n_cols;
        }
        if (shape->terms == 2)
            prepare_eight(x, stage->norm ? norm : 0, shape->eps, shape->n_cols, to, 2);
        else
            prepare_eight(x, stage->norm ? norm : 0, shape->eps, shape->n_cols, to, 1);
    }
#endif
    for (uint row = begin; row < end; row++)
        prepare_row(stage->x + (size_t)(stage->x_rows ? x_rows[row] : row) * shape->n_cols, stage->norm ? norm : 0, shape->eps,
                    shape->n_cols, act + (size_t)(row / GROUP_ROWS) * group_words, row % GROUP_ROWS, shape->terms);
}

/* A tile for some rows. */
ALWAYS_INLINE void tile_rows(const Shape *shape, const Stage *stage, const uint tile, const __global int *act,
                             const uint row_begin, const uint row_end)
{
    const uint group_words = act_group_words(shape->n_cols, shape->terms);

#pragma unroll 1
    for (uint lane0 = 0; lane0 < TILE_ROWS; lane0 += LANES) {
        Unit unit = find_unit(shape, &stage->weights, tile, lane0);

#pragma unroll 1
        for (uint row = row_begin; row < row_end; row += GROUP_ROWS)
            unit_group(shape, &unit, act + (size_t)(row / GROUP_ROWS) * group_words,
                       stage->y + (size_t)row * shape->y_cols, min(row_end - row, (uint)GROUP_ROWS));
    }
}

/* One ticket: some tiles for some rows.  @prepare: own activations come first. */
ALWAYS_INLINE void run_ticket(const Shape *shape, const Stage *stage, const uint ticket, const uint n_columns, const uint n_rows,
                              __global int *act, const bool prepare)
{
    const bool prepare_only = shape->epilogue == EPILOGUE_NONE;
    uint tile = ticket % n_columns * shape->tiles_per_ticket;
    uint tile_end = prepare_only ? 0 : min(tile + shape->tiles_per_ticket, shape->n_tiles);
    uint row_begin = ticket / n_columns * shape->rows_per_ticket, row_end = min(row_begin + shape->rows_per_ticket, n_rows);

    if (prepare_only || prepare)
        prepare_stage(shape, stage, prepare_only ? row_begin : 0, prepare_only ? row_end : n_rows, act);
#pragma unroll 1
    for (; tile < tile_end; tile++)
        tile_rows(shape, stage, tile, act, row_begin, row_end);
}

/* Whether all of the stage is done; false: this group has given up waiting.  @own: the group has its own activations. */
ALWAYS_INLINE bool run_stage(const Shape *shape, const Stage *stage, const uint n_rows, __global int *act, const bool own,
                             volatile __global uint *next, volatile __global uint *done, const bool wait)
{
    const uint n_columns = (shape->n_tiles + shape->tiles_per_ticket - 1) / shape->tiles_per_ticket;
    const uint n_tickets = n_columns * ((n_rows + shape->rows_per_ticket - 1) / shape->rows_per_ticket);
    const uint n_groups = get_num_groups(0);
    uint n_mine = 0, spins = 0, share = get_group_id(0), n_empty = 0;

    while (n_empty < n_groups) {
        uint begin = (uint)((ulong)n_tickets * share / n_groups), end = (uint)((ulong)n_tickets * (share + 1) / n_groups);
        uint ticket = begin + atomic_inc(next + share * SYNC_STRIDE);

        if (ticket < end) {
            run_ticket(shape, stage, ticket, n_columns, n_rows, act, own && n_mine == 0);
            n_mine++;
        } else {
            share = share + 1 < n_groups ? share + 1 : 0;
            n_empty++;
        }
    }
    /* A locked addition is a full barrier on x86; the asm keeps the compiler from moving stores and loads across. */
    __asm__ volatile("" ::: "memory");
    if (n_mine > 0)
        (void)atomic_add(done, n_mine);
    while (wait && *done < n_tickets) {
        __asm__ volatile("pause" ::: "memory");
        if (++spins > SPIN_LIMIT)
            return false;
    }
    __asm__ volatile("" ::: "memory");
    return true;
}

__kernel WORK_GROUP void linear_stages(const uint n_stages, const uint n_rows, __global int *acts, const uint act_words,
                                       volatile __global uint *sync, STAGE_ARGUMENTS(0), STAGE_ARGUMENTS(1),
                                       STAGE_ARGUMENTS(2), STAGE_ARGUMENTS(3))
{
    const Shape *shapes[STAGES] = {&shape0, &shape1, &shape2, &shape3};
    const Stage stages[STAGES] = {STAGE(0), STAGE(1), STAGE(2), STAGE(3)};
    __global int *act = acts + (size_t)get_group_id(0) * act_words;

#pragma unroll 1
    for (uint s = 0; s < n_stages; s++)
        if (!run_stage(shapes[s], &stages[s], n_rows, act, act_words > 0, sync + SYNC_NEXT(s), sync + SYNC_DONE(s),
                       s + 1 < n_stages))
            break;
    if (atomic_inc(sync) == get_num_groups(0) - 1)
        for (uint i = 0; i < SYNC_DONE(n_stages); i += SYNC_STRIDE)
            sync[i] = 0;
}

#endif
