/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of prepared activations (norm.cl) with packed weights (weight.cl), and what is done with the result.
 *
 * A *unit* is the LANES rows of a tile that one work-item carries.  A row of the pass is summed over columns in order, in the
 * same way whether 1 or 8 rows are taken at a time; in the reference's words (test-ops-linear.c), per 32 columns:
 *     fast    t = scale_a * (float)(integer dot product, zero points taken out);  y = fma(scale_w, t, y)
 *             then, with a minimum, y = fma(minimum, scale_a * sum_a, y);  Q6_K: two halves of 16 columns
 *     exact   even columns: y0 = fma(w, x, y0), odd: y1 likewise;  y = y0 + y1
 *
 *   -DROWS_AT_ONCE   rows that are multiplied at once: as many as the registers hold (8 with AVX-512, else 4)
 */

#define EPILOGUE_STORE  0
#define EPILOGUE_ADD    1
#define EPILOGUE_SWIGLU 2
#define EPILOGUE_GATE   3 /* y = silu(y) * W x: second half of a SWIGLU whose weights have two types */
#define EPILOGUE_NONE   4 /* no product: the stage prepares the activations of the next launch */

#ifndef ROWS_AT_ONCE
#define ROWS_AT_ONCE (LANES == 16 ? 8 : 4)
#endif

/* ---- one unit times some rows of one group ----------------------------------------------------------------------- */

#if FLOAT_ACTS

ALWAYS_INLINE void product(const __global uchar *tile, const uint lane0, const uint n_cols, const __global int *act,
                           const int rows, VF *ret)
{
    const __global float *x = (const __global float *)act;
    uint n_records = (n_cols + RECORD_COLUMNS - 1) / RECORD_COLUMNS;
    VF even[GROUP_ROWS], odd[GROUP_ROWS];

#pragma unroll
    for (int r = 0; r < rows; r++)
        even[r] = odd[r] = (VF)(0.0f);
    for (uint i = 0; i < n_records; i++, tile += RECORD_BYTES) {
        prefetch_record(tile, RECORD_BYTES);
        for (uint b = 0; b < BLOCKS; b++, x += 32 * GROUP_ROWS) {
#if !IS_FLOAT
            WeightBlock block = block_load(tile, lane0, b);
#endif
#pragma unroll
            for (int c = 0; c < 32; c++) {
#if IS_FLOAT
                VF w = float_column(tile, lane0, c);
#else
                VF w = block_column(&block, c);
#endif
#pragma unroll
                for (int r = 0; r < rows; r++) {
                    if (c % 2 == 0)
                        even[r] = fma(w, (VF)(x[GROUP_ROWS * c + r]), even[r]);
                    else
                        odd[r] = fma(w, (VF)(x[GROUP_ROWS * c + r]), odd[r]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < rows; r++)
        ret[r] = even[r] + odd[r];
}

#else

ALWAYS_INLINE void product(const __global uchar *tile, const uint lane0, const uint n_cols, const __global int *act,
                           const int rows, VF *ret)
{
    uint n_records = n_cols / RECORD_COLUMNS;
    VF sums[GROUP_ROWS];

#pragma unroll
    for (int r = 0; r < rows; r++)
        sums[r] = (VF)(0.0f);
    for (uint i = 0; i < n_records; i++, tile += RECORD_BYTES) {
        prefetch_record(tile, RECORD_BYTES);
        for (uint b = 0; b < BLOCKS; b++, act += ACT_BLOCK_WORDS) {
            WeightBlock block = block_load(tile, lane0, b);

#pragma unroll
            for (int r = 0; r < rows; r++) {
                const __global int *a = act + ACT_WORDS * r;
                VF scale = (VF)(((const __global float *)a)[ACT_SCALE]);
#if IS(Q6_K)
                VI low = dot_block((VI)(a[ACT_MINUS] * ZERO_POINT), block.codes, a, 4, MAX_CODE);
                VI high = dot_block((VI)(a[ACT_MINUS + 1] * ZERO_POINT), block.codes + 4, a + 4, 4, MAX_CODE);

                sums[r] = fma(block.scale[0], scale * TO_VF(low), sums[r]);
                sums[r] = fma(block.scale[1], scale * TO_VF(high), sums[r]);
#else
                VI dot = dot_block((VI)(ZERO_POINT ? (a[ACT_MINUS] + a[ACT_MINUS + 1]) * ZERO_POINT : 0), block.codes, a, 8,
                                   MAX_CODE);

                sums[r] = fma(block.scale[0], scale * TO_VF(dot), sums[r]);
#if HAS_MINIMUM
                sums[r] = fma(block.minimum, (VF)(((const __global float *)a)[ACT_SUM]), sums[r]);
#endif
#endif
            }
        }
    }
#pragma unroll
    for (int r = 0; r < rows; r++)
        ret[r] = sums[r];
}

#endif

/* ---- epilogues --------------------------------------------------------------------------------------------------- */

/* One product of the pass: the rows of the weights, one after the other, make columns y_first, ... of y; with SWIGLU both
 * weights make the same columns.  Mirrors Shape in opencl/ops-linear.c. */
typedef struct Shape {
    ulong weight_offset[3], x_rows_offset, norm_offset; /* bytes */
    uint weight_rows[3];
    uint n_cols, y_cols, y_first, epilogue;
    float eps;
    uint n_tiles; /* of all weights; with SWIGLU of one */
    uint tiles_per_ticket, rows_per_ticket;
    uint terms; /* of a row's activations: 1 or 2 rows of a group (norm.cl) */
} Shape;

ALWAYS_INLINE VF epilogue_value(const uint epilogue, VF value, VF old)
{
    return epilogue == EPILOGUE_ADD ? old + value : epilogue == EPILOGUE_GATE ? lanes_silu(old) * value : value;
}

ALWAYS_INLINE void store_lanes(__global float *y, VF value, const uint n_valid, const uint epilogue)
{
    VF old = (VF)(0.0f);
    bool reads = epilogue == EPILOGUE_ADD || epilogue == EPILOGUE_GATE;

#if LANES > 1
    if (n_valid < LANES) {
        for (uint i = 0; i < n_valid && reads; i++)
            ((float *)&old)[i] = y[i];
        value = epilogue_value(epilogue, value, old);
        for (uint i = 0; i < n_valid; i++)
            y[i] = ((float *)&value)[i];
        return;
    }
#else
    if (n_valid == 0)
        return;
#endif
    if (reads)
        old = V_LOAD(y);
    V_STORE(epilogue_value(epilogue, value, old), y);
}

/* A unit: where its weights are and which columns of y it makes. */
typedef struct Unit {
    const __global uchar *tile[2]; /* second one: SWIGLU only */
    uint lane0, y_column, n_valid;
} Unit;

typedef struct Weights {
    const __global uchar *w[3];
} Weights;

/* Arguments and fields are never indexed by a variable: Mesa's compilers do that badly. */
ALWAYS_INLINE Unit find_unit(const Shape *shape, const Weights *weights, uint tile, const uint lane0)
{
    const ulong tile_bytes = (ulong)((shape->n_cols + RECORD_COLUMNS - 1) / RECORD_COLUMNS) * RECORD_BYTES;
    const bool gated = shape->epilogue == EPILOGUE_SWIGLU;
    const uint tiles0 = (shape->weight_rows[0] + TILE_ROWS - 1) / TILE_ROWS;
    const uint tiles1 = (shape->weight_rows[1] + TILE_ROWS - 1) / TILE_ROWS;
    const bool second = !gated && tile >= tiles0, third = second && tile >= tiles0 + tiles1;
    const __global uchar *w0 = weights->w[0] + shape->weight_offset[0], *w1 = weights->w[1] + shape->weight_offset[1];
    uint n_rows, row;
    Unit unit;

    tile -= third ? tiles0 + tiles1 : second ? tiles0 : 0;
    n_rows = third ? shape->weight_rows[2] : second ? shape->weight_rows[1] : shape->weight_rows[0];
    row = tile * TILE_ROWS + lane0;
    unit.tile[0] = (third ? weights->w[2] + shape->weight_offset[2] : second ? w1 : w0) + tile * tile_bytes;
    unit.tile[1] = w1 + tile * tile_bytes;
    unit.lane0 = lane0;
    unit.y_column = shape->y_first + row + (second ? shape->weight_rows[0] : 0) + (third ? shape->weight_rows[1] : 0);
    unit.n_valid = row < n_rows ? min(n_rows - row, (uint)LANES) : 0;
    return unit;
}

#if LANES > 1
/* One tile for the rows of one group, as many at a time as there are registers, so that it is unpacked once for them, and
 * nothing is computed in vain.  The results pass through memory, which keeps the epilogues out of the unrolled code. */
ALWAYS_INLINE void products(const __global uchar *tile, const uint lane0, const uint n_cols, const __global int *act,
                            const uint n_rows, VF *ret)
{
    const uint act_row = FLOAT_ACTS ? 1 : ACT_WORDS;
    uint row = 0;

#if ROWS_AT_ONCE >= 8
    for (; row + 8 <= n_rows; row += 8)
        product(tile, lane0, n_cols, act + row * act_row, 8, ret + row);
#endif
#pragma unroll 1
    for (; row + 4 <= n_rows; row += 4)
        product(tile, lane0, n_cols, act + row * act_row, 4, ret + row);
#if !FLOAT_ACTS
    /* A row in two terms. */
    for (; row + 2 <= n_rows; row += 2)
        product(tile, lane0, n_cols, act + row * act_row, 2, ret + row);
#endif
#pragma unroll 1
    for (; row < n_rows; row++)
        product(tile, lane0, n_cols, act + row * act_row, 1, ret + row);
}

#endif

ALWAYS_INLINE void unit_store(const Shape *shape, const Unit *unit, __global float *y, VF value, VF up)
{
    if (shape->epilogue == EPILOGUE_SWIGLU)
        value = lanes_silu(value) * up;
    store_lanes(y + unit->y_column, value, unit->n_valid, shape->epilogue);
}

/* A unit for the rows of one group; @act points at the group, @y at its first row. */
#if LANES > 1
ALWAYS_INLINE void unit_group(const Shape *shape, const Unit *unit, const __global int *act, __global float *y,
                              const uint n_rows)
{
    const uint n_products = shape->epilogue == EPILOGUE_SWIGLU ? 2 : 1;
    VF values[2 * GROUP_ROWS];

#pragma unroll 1
    for (uint i = 0; i < n_products; i++) {
        const __global uchar *tile = unit->tile[i];

        OPAQUE(tile);
        products(tile, unit->lane0, shape->n_cols, act, n_rows * shape->terms, values + i * GROUP_ROWS);
    }
#pragma unroll 1
    for (uint r = 0; r < n_rows; r++) {
        VF value = values[r * shape->terms], up = values[GROUP_ROWS + r * shape->terms];

        if (shape->terms == 2) {
            value += values[2 * r + 1];
            up += values[GROUP_ROWS + 2 * r + 1];
        }
        unit_store(shape, unit, y + (size_t)r * shape->y_cols, value, up);
    }
}
#else
/* Private arrays stay in registers only when no variable indexes them; rows beyond the pass compute what nobody stores. */
ALWAYS_INLINE void unit_group(const Shape *shape, const Unit *unit, const __global int *act, __global float *y,
                              const uint n_rows)
{
    VF values[GROUP_ROWS], up[GROUP_ROWS];

    if (n_rows * shape->terms == 1) {
        product(unit->tile[0], unit->lane0, shape->n_cols, act, 1, values);
        if (shape->epilogue == EPILOGUE_SWIGLU)
            product(unit->tile[1], unit->lane0, shape->n_cols, act, 1, up);
        unit_store(shape, unit, y, values[0], up[0]);
        return;
    }
    product(unit->tile[0], unit->lane0, shape->n_cols, act, GROUP_ROWS, values);
    if (shape->epilogue == EPILOGUE_SWIGLU)
        product(unit->tile[1], unit->lane0, shape->n_cols, act, GROUP_ROWS, up);
#pragma unroll
    for (uint r = 0; r < GROUP_ROWS; r++) {
        if (shape->terms == 1 && r < n_rows)
            unit_store(shape, unit, y + (size_t)r * shape->y_cols, values[r], up[r]);
        if (shape->terms == 2 && r % 2 == 0 && r / 2 < n_rows)
            unit_store(shape, unit, y + (size_t)(r / 2) * shape->y_cols, values[r] + values[r + 1], up[r] + up[r + 1]);
    }
}
#endif

ALWAYS_INLINE uint act_group_words(const uint n_cols)
{
    return (n_cols + 31) / 32 * ACT_BLOCK_WORDS;
}

#if LANES == 1

/* Work-item (i, j) makes row i of the (padded) weights for the rows of group j. */
__kernel void linear_rows(const Shape shape, const __global uchar *w0, const __global uchar *w1, const __global uchar *w2,
                          const __global int *act, const uint n_rows, __global float *y)
{
    const Weights weights = {{w0, w1, w2}};
    uint group_rows = GROUP_ROWS / shape.terms, tile = get_global_id(0) / TILE_ROWS, row = get_global_id(1) * group_rows;
    Unit unit;

    if (tile >= shape.n_tiles)
        return;
    unit = find_unit(&shape, &weights, tile, get_global_id(0) % TILE_ROWS);
    unit_group(&shape, &unit, act + (size_t)get_global_id(1) * act_group_words(shape.n_cols),
               y + (size_t)row * shape.y_cols, min(n_rows - row, group_rows));
}

#endif
