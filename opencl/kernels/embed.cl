/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of a packed table as floats, times a scale.  Built with SIMD 0 on every device: one work-item decodes one row's lane.
 * An id beyond the table gives NaN, so that it cannot pass for a token.
 * Launch: any number of work-items in dimension 0 share the blocks of a row, dimension 1 is the output row.
 */

__kernel void embed_rows(const __global uchar *table, const ulong table_offset, const uint n_rows, const uint n_cols,
                         const float scale, const __global uchar *ids, const ulong ids_offset,
                         __global float *out)
{
    uint row = ((const __global uint *)(ids + ids_offset))[get_global_id(1)], lane = row % TILE_ROWS;
    uint n_records = (n_cols + RECORD_COLUMNS - 1) / RECORD_COLUMNS, n_blocks = (n_cols + 31) / 32;

    if (row >= n_rows) {
        for (uint c = get_global_id(0); c < n_cols; c += get_global_size(0))
            out[(size_t)get_global_id(1) * n_cols + c] = NAN;
        return;
    }
    table += table_offset + (ulong)(row / TILE_ROWS) * n_records * RECORD_BYTES;
    out += (size_t)get_global_id(1) * n_cols;
    for (uint b = get_global_id(0); b < n_blocks; b += get_global_size(0)) {
        const __global uchar *record = table + (ulong)(b / BLOCKS) * RECORD_BYTES;
#if IS_FLOAT
        for (uint c = 0; c < 32 && 32 * b + c < n_cols; c++)
            out[32 * b + c] = float_column(record, lane, c) * scale;
#else
        WeightBlock block = block_load(record, lane, b % BLOCKS);

        for (uint c = 0; c < 32; c++)
            out[32 * b + c] = block_column(&block, c) * scale;
#endif
    }
}
