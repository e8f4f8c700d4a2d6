/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device layout of weights: lane = row.
 *
 * Sixteen rows make a tile.  A record holds 32 or 256 columns of a tile as planes, in which everything that belongs to
 * row `lane` of the tile lies at place `lane`, so that one vector register works on sixteen rows and no kernel ever sums
 * across a register.  Rows beyond the matrix, and columns beyond a ragged float row, are zeros.
 *
 * Planes of a record, in this order, when the type has them (b = 32-column block of the record, v = 0..3, e = 0..3):
 *     nibbles  byte 256 b + 64 v + 4 lane + e: low nibble column 32 b + 4 v + e, high nibble column 32 b + 16 + 4 v + e
 *     bytes    byte 64 v + 4 lane + e, v = 0..7: column 4 v + e (Q8_0: code + 128)
 *     high     Q5_x: byte 64 b + 4 lane + e: bit v is bit 4 of column 32 b + 4 v + e, bit 4 + v that of 32 b + 16 + 4 v + e
 *              Q6_K: byte 128 b + 64 h + 4 lane + e: bits 2 v, 2 v + 1 are bits 4, 5 of column 32 b + 16 h + 4 v + e
 *     scales   K-quants: byte 16 s + lane: small integer scale of sub-block s (32 columns; Q6_K: 16, signed)
 *     mins     Q4_K, Q5_K: byte 16 s + lane
 *     d        16 binary16
 *     m        16 binary16: Q4_1, Q5_1: minimum; Q4_K, Q5_K: scale of the minima
 * F32, F16, BF16: element 16 c + lane is column c.
 */

#include "quant/weight.h"

#include "quant/base/checked.h"
#include "quant/base/half.h"
#include "quant/weight-parts.h"

#include <assert.h>

/* Offsets of a record's planes; what a type lacks has no bytes. */
typedef struct Planes {
    uint32_t n_scales, n_mins;           /* per row */
    uint32_t high_bits;                  /* 0, 1 or 2 */
    uint32_t high, scales, mins, d, m;   /* bytes from the record's start */
} Planes;

static Planes planes_of(const WeightTypeInfo *info)
{
    WeightType type = info->type;
    bool five = type == WEIGHT_TYPE_Q5_0 || type == WEIGHT_TYPE_Q5_1 || type == WEIGHT_TYPE_Q5_K;
    bool k45 = type == WEIGHT_TYPE_Q4_K || type == WEIGHT_TYPE_Q5_K;
    uint32_t elements = WEIGHT_TILE_ROWS * info->record_columns;
    Planes planes = {
        .n_scales = type == WEIGHT_TYPE_Q6_K ? 16 : k45 ? 8 : 0,
        .n_mins = k45 ? 8 : 0,
        .high_bits = type == WEIGHT_TYPE_Q6_K ? 2 : five ? 1 : 0,
    };

    planes.high = type == WEIGHT_TYPE_Q8_0 ? elements : elements / 2;
    planes.scales = planes.high + elements * planes.high_bits / 8;
    planes.mins = planes.scales + WEIGHT_TILE_ROWS * planes.n_scales;
    planes.d = planes.mins + WEIGHT_TILE_ROWS * planes.n_mins;
    planes.m = planes.d + WEIGHT_TILE_ROWS * 2;
    return planes;
}

static bool is_float(WeightType type)
{
    return type == WEIGHT_TYPE_F32 || type == WEIGHT_TYPE_F16 || type == WEIGHT_TYPE_BF16;
}

/* Types with a minimum have both halves; the record's size tells. */
static bool has_m(const WeightTypeInfo *info, const Planes *planes)
{
    return info->record_bytes > planes->m;
}

int weight_device_bytes(const WeightTypeInfo *info, uint64_t n_rows, uint64_t n_cols, uint64_t *ret)
{
    uint64_t n_tiles, n_records, n;

    if (n_cols % info->block_elements != 0)
        return error_origin(-EINVAL);
    if (!checked_add(n_rows, WEIGHT_TILE_ROWS - 1, &n_tiles) || !checked_add(n_cols, info->record_columns - 1, &n_records))
        return error_origin(-EOVERFLOW);
    n_tiles /= WEIGHT_TILE_ROWS;
    n_records /= info->record_columns;
    if (!checked_mul(n_tiles, n_records, &n) || !checked_mul(n, info->record_bytes, ret))
        return error_origin(-EOVERFLOW);
    return 0;
}

/* ---- one row of one record --------------------------------------------------------------------------------------- */

static void put_half(uint8_t *plane, size_t lane, uint16_t half)
{
    plane[2 * lane] = (uint8_t)half;
    plane[2 * lane + 1] = (uint8_t)(half >> 8);
}

static uint16_t get_half(const uint8_t *plane, size_t lane)
{
    return (uint16_t)(plane[2 * lane] | plane[2 * lane + 1] << 8);
}

/* The 32 codes of a block; @nibbles and @high point to the block's part of the planes. */
static void put_codes(uint8_t *nibbles, uint8_t *high, uint32_t high_bits, size_t lane, const uint8_t *codes)
{
    for (size_t v = 0; v < 4; v++) {
        uint8_t *to = nibbles + 64 * v + 4 * lane;

        for (size_t e = 0; e < 4; e++)
            to[e] = (uint8_t)((codes[4 * v + e] & 15) | codes[16 + 4 * v + e] << 4);
    }
    for (size_t e = 0; e < 4 && high_bits == 1; e++) {
        uint8_t bits = 0;

        for (size_t v = 0; v < 4; v++)
            bits |= (uint8_t)(codes[4 * v + e] >> 4 << v | codes[16 + 4 * v + e] >> 4 << (4 + v));
        high[4 * lane + e] = bits;
    }
    for (size_t i = 0; i < 8 && high_bits == 2; i++) {
        size_t h = i / 4, e = i % 4;
        uint8_t bits = 0;

        for (size_t v = 0; v < 4; v++)
            bits |= (uint8_t)(codes[16 * h + 4 * v + e] >> 4 << 2 * v);
        high[64 * h + 4 * lane + e] = bits;
    }
}

static void get_codes(const uint8_t *nibbles, const uint8_t *high, uint32_t high_bits, size_t lane, uint8_t *ret)
{
    for (size_t i = 0; i < 32; i++) {
        size_t h = i / 16, v = i / 4 % 4, e = i % 4;

        ret[i] = nibbles[64 * v + 4 * lane + e] >> 4 * h & 15;
        if (high_bits == 1)
            ret[i] |= (uint8_t)((high[4 * lane + e] >> (4 * h + v) & 1) << 4);
        else if (high_bits == 2)
            ret[i] |= (uint8_t)((high[64 * h + 4 * lane + e] >> 2 * v & 3) << 4);
    }
}

static void put_parts(const WeightTypeInfo *info, const Planes *planes, uint8_t *record, size_t lane, const WeightParts *parts)
{
    for (size_t b = 0; b < info->record_columns / 32; b++) {
        if (info->type == WEIGHT_TYPE_Q8_0)
            for (size_t i = 0; i < 32; i++)
                record[64 * (i / 4) + 4 * lane + i % 4] = parts->codes[i];
        else
            put_codes(record + 256 * b, record + planes->high + 64 * planes->high_bits * b, planes->high_bits, lane,
                      parts->codes + 32 * b);
    }
    for (size_t s = 0; s < planes->n_scales; s++)
        record[planes->scales + 16 * s + lane] = (uint8_t)parts->scales[s];
    for (size_t s = 0; s < planes->n_mins; s++)
        record[planes->mins + 16 * s + lane] = (uint8_t)parts->mins[s];
    put_half(record + planes->d, lane, parts->d);
    if (has_m(info, planes))
        put_half(record + planes->m, lane, parts->m);
}

static void get_parts(const WeightTypeInfo *info, const Planes *planes, const uint8_t *record, size_t lane, WeightParts *ret)
{
    for (size_t b = 0; b < info->record_columns / 32; b++) {
        if (info->type == WEIGHT_TYPE_Q8_0)
            for (size_t i = 0; i < 32; i++)
                ret->codes[i] = record[64 * (i / 4) + 4 * lane + i % 4];
        else
            get_codes(record + 256 * b, record + planes->high + 64 * planes->high_bits * b, planes->high_bits, lane,
                      ret->codes + 32 * b);
    }
    for (size_t s = 0; s < planes->n_scales; s++)
        ret->scales[s] = (int8_t)record[planes->scales + 16 * s + lane];
    for (size_t s = 0; s < planes->n_mins; s++)
        ret->mins[s] = (int8_t)record[planes->mins + 16 * s + lane];
    ret->d = get_half(record + planes->d, lane);
    ret->m = has_m(info, planes) ? get_half(record + planes->m, lane) : 0;
}

/* ---- whole matrices ---------------------------------------------------------------------------------------------- */

static void pack_float_row(const WeightTypeInfo *info, const uint8_t *row, uint64_t n_cols, uint8_t *tile, size_t lane)
{
    if (info->block_bytes == 4)
        for (uint64_t c = 0; c < n_cols; c++)
            memcpy(tile + (WEIGHT_TILE_ROWS * c + lane) * 4, row + c * 4, 4);
    else
        for (uint64_t c = 0; c < n_cols; c++)
            memcpy(tile + (WEIGHT_TILE_ROWS * c + lane) * 2, row + c * 2, 2);
}

/* In the most usual types the file's bytes only need to be dealt out four by four (Q8_0: plus 128): four times as fast as by
 * way of the parts.  False for other types. */
static bool pack_block_by_words(const WeightTypeInfo *info, const Planes *planes, const uint8_t *block, uint8_t *record,
                                size_t lane)
{
    bool q8 = info->type == WEIGHT_TYPE_Q8_0;
    size_t header = has_m(info, planes) ? 4 : 2, n_words = q8 ? 8 : 4;

    if (!q8 && info->type != WEIGHT_TYPE_Q4_0 && info->type != WEIGHT_TYPE_Q4_1)
        return false;
    for (size_t v = 0; v < n_words; v++) {
        uint32_t word;

        memcpy(&word, block + header + 4 * v, 4);
        word ^= q8 ? 0x80808080 : 0;
        memcpy(record + 64 * v + 4 * lane, &word, 4);
    }
    memcpy(record + planes->d + 2 * lane, block, 2);
    if (header == 4)
        memcpy(record + planes->m + 2 * lane, block + 2, 2);
    return true;
}

static void pack_row(const WeightTypeInfo *info, const Planes *planes, const uint8_t *row, uint64_t n_cols, uint8_t *tile,
                     size_t lane)
{
    WeightParts parts;

    for (uint64_t i = 0; i < n_cols / info->record_columns; i++, row += info->block_bytes, tile += info->record_bytes) {
        if (pack_block_by_words(info, planes, row, tile, lane))
            continue;
        weight_parts_from_block(info->type, row, &parts);
        put_parts(info, planes, tile, lane, &parts);
    }
}

void weight_pack(const WeightTypeInfo *info, const void *file_rows, uint64_t n_rows, uint64_t n_cols,
                 const uint32_t *row_map, void *ret_device)
{
    uint64_t row_bytes = n_cols / info->block_elements * info->block_bytes;
    uint64_t tile_bytes = (n_cols + info->record_columns - 1) / info->record_columns * info->record_bytes;
    Planes planes = planes_of(info);

    assert(n_cols % info->block_elements == 0);
    for (uint64_t row = 0; row < n_rows; row++) {
        uint8_t *tile = (uint8_t *)ret_device + row / WEIGHT_TILE_ROWS * tile_bytes;
        const uint8_t *from = (const uint8_t *)file_rows + (row_map ? row_map[row] : row) * row_bytes;
        size_t lane = row % WEIGHT_TILE_ROWS;

        if (lane == 0 && (n_rows - row < WEIGHT_TILE_ROWS || n_cols % info->record_columns != 0))
            memset(tile, 0, tile_bytes);
        if (is_float(info->type))
            pack_float_row(info, from, n_cols, tile, lane);
        else
            pack_row(info, &planes, from, n_cols, tile, lane);
    }
}

void weight_device_decode_row(const WeightTypeInfo *info, const void *device, uint64_t n_rows, uint64_t n_cols, uint64_t row,
                              float *ret)
{
    uint64_t tile_bytes = (n_cols + info->record_columns - 1) / info->record_columns * info->record_bytes;
    const uint8_t *tile = (const uint8_t *)device + row / WEIGHT_TILE_ROWS * tile_bytes;
    size_t lane = row % WEIGHT_TILE_ROWS, bytes = info->block_bytes;
    Planes planes = planes_of(info);
    WeightParts parts;

    assert(row < n_rows && n_cols % info->block_elements == 0);
    if (is_float(info->type)) {
        for (uint64_t c = 0; c < n_cols; c++)
            weight_decode(info, tile + (WEIGHT_TILE_ROWS * c + lane) * bytes, ret + c, 1);
        return;
    }
    for (uint64_t i = 0; i < n_cols / info->record_columns; i++) {
        get_parts(info, &planes, tile + i * info->record_bytes, lane, &parts);
        weight_parts_decode(info->type, &parts, ret + i * info->record_columns);
    }
}
