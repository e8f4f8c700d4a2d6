/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of a packed table as floats, times a scale.  An id beyond the table gives NaN, so that it cannot pass for a token.
 * Launch: any number of work-items in dimension 0 share the blocks of a row, dimension 1 is the output row.  On CPUs the
 * whole vector of rows is decoded for the one that is wanted: that costs 2 us, and a program of its own a second to build.
 */

__kernel WORK_GROUP void embed_rows(const __global uchar *table, const ulong table_offset, const uint n_rows, const uint n_cols,
                                    const float scale, const __global uchar *ids, const ulong ids_offset, __global float *out)
{
    uint row = ((const __global uint *)(ids + ids_offset))[get_global_id(1)];
    uint lane = row % LANES, lane0 = row % TILE_ROWS - lane;
    uint n_records = (n_cols + RECORD_COLUMNS - 1) / RECORD_COLUMNS, n_blocks = (n_cols + 31) / 32;

    out += (size_t)get_global_id(1) * n_cols;
    if (row >= n_rows) {
        for (uint c = get_global_id(0); c < n_cols; c += get_global_size(0))
            out[c] = NAN;
        return;
    }
    table += table_offset + (ulong)(row / TILE_ROWS) * n_records * RECORD_BYTES;
    for (uint b = get_global_id(0); b < n_blocks; b += get_global_size(0)) {
        const __global uchar *record = table + (ulong)(b / BLOCKS) * RECORD_BYTES;
#if !IS_FLOAT
        WeightBlock block = block_load(record, lane0, b % BLOCKS);
#endif

        for (uint c = 0; c < 32 && 32 * b + c < n_cols; c++) {
#if IS_FLOAT
            VF value = float_column(record, lane0, c);
#else
            VF value = block_column(&block, c);
#endif

            out[32 * b + c] = ((const float *)&value)[lane] * scale;
        }
    }
}
