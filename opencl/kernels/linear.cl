/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of prepared activations (norm.cl) with packed weights (weight.cl), and what is done with the result.
 *
 * A *unit* is the LANES rows of a tile that one work-item carries.  A row of the pass is summed over columns in order, in the
 * same way whether 1 or 8 rows are taken at a time; in the reference's words (test-ops-linear.c), per 32 columns:
 *     fast    t = scale_a * (float)(integer dot product, zero points taken out);  y = fma(scale_w, t, y);  with two terms the
 *             dot product is 256 * that of the high bytes + that of the low ones, in integers
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
                           const int rows, const uint terms, VF *ret)
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

/* dots[r] = words codes[0 .. n - 1] of the weights times those at @a of each of @rows rows; with two terms the low bytes lie
 * 8 words further on.  On VNNI word after word and not row after row: a sum then waits for its predecessor while others go on.
 * Eight rows leave registers for one sum each, fewer rows for one of each term. */
ALWAYS_INLINE void dot_rows(const VU *codes, const __global int *a, const int n, const int rows, const uint terms, VI *dots)
{
    const uint stride = ACT_WORDS(terms);

#if SIMD == 3
    if (rows == 8) {
#pragma unroll
        for (int r = 0; r < rows; r++)
            dots[r] = (VI)(0);
#pragma unroll
        for (int v = 0; v < n; v++) {
#pragma unroll
            for (int r = 0; r < rows; r++)
                dots[r] = dot4(dots[r], codes[v], a + r * stride + v);
        }
        if (terms == 2) {
#pragma unroll
            for (int r = 0; r < rows; r++)
                dots[r] = dots[r] << 8;
#pragma unroll
            for (int v = 0; v < n; v++) {
#pragma unroll
                for (int r = 0; r < rows; r++)
                    dots[r] = dot4(dots[r], codes[v], a + r * stride + 8 + v);
            }
        }
    } else {
        VI low[GROUP_ROWS];

#pragma unroll
        for (int v = 0; v < n; v++) {
#pragma unroll
            for (int r = 0; r < rows; r++) {
                dots[r] = dot4(v == 0 ? (VI)(0) : dots[r], codes[v], a + r * stride + v);
                if (terms == 2)
                    low[r] = dot4(v == 0 ? (VI)(0) : low[r], codes[v], a + r * stride + 8 + v);
            }
        }
        if (terms == 2) {
#pragma unroll
            for (int r = 0; r < rows; r++)
                dots[r] = (dots[r] << 8) + low[r];
        }
    }
#else
#pragma unroll
    for (int r = 0; r < rows; r++) {
        dots[r] = dot_block((VI)(0), codes, a + r * stride, n, MAX_CODE);
        if (terms == 2)
            dots[r] = dot_block(dots[r] << 8, codes, a + r * stride + 8, n, MAX_CODE);
    }
#endif
}

/* Adds scale times the dot products of one block, or of its half @h, to the sums of the rows at @act. */
ALWAYS_INLINE void add_dots(const VF weight_scale, VI *dots, const __global int *act, const int rows, const uint terms, const int h,
                            VF *sums)
{
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const __global int *a = act + r * ACT_WORDS(terms);
        VF scale = (VF)(((const __global float *)a)[ACT_SCALE]);

        if (ZERO_POINT)
            dots[r] += (VI)((h < 0 ? a[ACT_MINUS] + a[ACT_MINUS + 1] : a[ACT_MINUS + h]) * ZERO_POINT);
        sums[r] = fma(weight_scale, scale * TO_VF(dots[r]), sums[r]);
    }
}

ALWAYS_INLINE void product(const __global uchar *tile, const uint lane0, const uint n_cols, const __global int *act,
                           const int rows, const uint terms, VF *ret)
{
    uint n_records = n_cols / RECORD_COLUMNS;
    VF sums[GROUP_ROWS];
    VI dots[GROUP_ROWS];

#pragma unroll
    for (int r = 0; r < rows; r++)
        sums[r] = (VF)(0.0f);
    for (uint i = 0; i < n_records; i++, tile += RECORD_BYTES) {
        prefetch_record(tile, RECORD_BYTES);
        for (uint b = 0; b < BLOCKS; b++, act += ACT_BLOCK_WORDS(terms)) {
            WeightBlock block = block_load(tile, lane0, b);

#if IS(Q6_K)
            dot_rows(block.codes, act + ACT_CODES, 4, rows, terms, dots);
            add_dots(block.scale[0], dots, act, rows, terms, 0, sums);
            dot_rows(block.codes + 4, act + ACT_CODES + 4, 4, rows, terms, dots);
            add_dots(block.scale[1], dots, act, rows, terms, 1, sums);
#else
            dot_rows(block.codes, act + ACT_CODES, 8, rows, terms, dots);
            add_dots(block.scale[0], dots, act, rows, terms, -1, sums);
#endif
#if HAS_MINIMUM
#pragma unroll
            for (int r = 0; r < rows; r++)
                sums[r] = fma(block.minimum, (VF)(((const __global float *)act)[r * ACT_WORDS(terms) + ACT_SUM]), sums[r]);
#endif
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
    uint terms; /* bytes of an activation: 1 or 2 (norm.cl) */
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
/* One tile for the rows of one group, as many at a time as there are registers, so that it is unpacked once for them.  Three of
 * four and seven of eight rows are cheaper with one row in vain than by themselves: a group always has its memory, and what
 * comes of rows beyond the pass is not stored.  The results pass through memory, which keeps the epilogues out of the unrolled
 * code. */
ALWAYS_INLINE void products(const __global uchar *tile, const uint lane0, const uint n_cols, const __global int *act,
                            const uint n_rows, const uint terms, VF *ret)
{
    const uint act_row = FLOAT_ACTS ? 1 : ACT_WORDS(terms);
    uint row = 0;

#if ROWS_AT_ONCE >= 8
    for (; row + 7 <= n_rows; row += 8)
        product(tile, lane0, n_cols, act + row * act_row, 8, terms, ret + row);
#endif
#pragma unroll 1
    for (; row + 3 <= n_rows; row += 4)
        product(tile, lane0, n_cols, act + row * act_row, 4, terms, ret + row);
#pragma unroll 1
    for (; row < n_rows; row++)
        product(tile, lane0, n_cols, act + row * act_row, 1, terms, ret + row);
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
        if (!FLOAT_ACTS && shape->terms == 2)
            products(tile, unit->lane0, shape->n_cols, act, n_rows, 2, values + i * GROUP_ROWS);
        else
            products(tile, unit->lane0, shape->n_cols, act, n_rows, 1, values + i * GROUP_ROWS);
    }
#pragma unroll 1
    for (uint r = 0; r < n_rows; r++)
        unit_store(shape, unit, y + (size_t)r * shape->y_cols, values[r], values[GROUP_ROWS + r]);
}
#else
/* Private arrays stay in registers only when no variable indexes them; rows beyond the pass compute what nobody stores. */
ALWAYS_INLINE void unit_group(const Shape *shape, const Unit *unit, const __global int *act, __global float *y,
                              const uint n_rows)
{
    VF values[GROUP_ROWS], up[GROUP_ROWS];

    if (n_rows == 1) {
        product(unit->tile[0], unit->lane0, shape->n_cols, act, 1, shape->terms, values);
        if (shape->epilogue == EPILOGUE_SWIGLU)
            product(unit->tile[1], unit->lane0, shape->n_cols, act, 1, shape->terms, up);
        unit_store(shape, unit, y, values[0], up[0]);
        return;
    }
    product(unit->tile[0], unit->lane0, shape->n_cols, act, GROUP_ROWS, shape->terms, values);
    if (shape->epilogue == EPILOGUE_SWIGLU)
        product(unit->tile[1], unit->lane0, shape->n_cols, act, GROUP_ROWS, shape->terms, up);
#pragma unroll
    for (uint r = 0; r < GROUP_ROWS; r++)
        if (r < n_rows)
            unit_store(shape, unit, y + (size_t)r * shape->y_cols, values[r], up[r]);
}
#endif

ALWAYS_INLINE uint act_group_words(const uint n_cols, const uint terms)
{
    return (n_cols + 31) / 32 * ACT_BLOCK_WORDS(terms);
}

#if LANES == 1

/* Work-item (i, j) makes row i of the (padded) weights for the rows of group j. */
__kernel void linear_rows(const Shape shape, const __global uchar *w0, const __global uchar *w1, const __global uchar *w2,
                          const __global int *act, const uint n_rows, __global float *y)
{
    const Weights weights = {{w0, w1, w2}};
    uint tile = get_global_id(0) / TILE_ROWS, row = get_global_id(1) * GROUP_ROWS;
    Unit unit;

    if (tile >= shape.n_tiles)
        return;
    unit = find_unit(&shape, &weights, tile, get_global_id(0) % TILE_ROWS);
    unit_group(&shape, &unit, act + (size_t)get_global_id(1) * act_group_words(shape.n_cols, shape.terms),
               y + (size_t)row * shape.y_cols, min(n_rows - row, (uint)GROUP_ROWS));
}

#endif
