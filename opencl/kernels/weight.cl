/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weight records on the device, as written down in quant/weight-layout.c; equals weight_device_decode_row().
 *
 *   -DWEIGHT_TYPE   ggml's number of the type
 *
 * A work-item that carries rows lane0 .. lane0 + LANES - 1 of a tile gets `record` pointers to the record's first byte and
 * lane0; byte planes of four codes a row are then read at 4 * lane0, halves at 2 * lane0, small integers at lane0.
 */

#ifndef WEIGHT_TYPE
#define WEIGHT_TYPE 3
#endif

#define TYPE_F32  0
#define TYPE_F16  1
#define TYPE_Q4_0 2
#define TYPE_Q4_1 3
#define TYPE_Q5_0 6
#define TYPE_Q5_1 7
#define TYPE_Q8_0 8
#define TYPE_Q4_K 12
#define TYPE_Q5_K 13
#define TYPE_Q6_K 14
#define TYPE_BF16 30

#define TILE_ROWS 16

#define IS(type)       (WEIGHT_TYPE == TYPE_##type)
#define IS_FLOAT       (IS(F32) || IS(F16) || IS(BF16))
#define IS_K           (IS(Q4_K) || IS(Q5_K) || IS(Q6_K))
#define HAS_MINIMUM    (IS(Q4_1) || IS(Q5_1) || IS(Q4_K) || IS(Q5_K))
#define HIGH_BITS      (IS(Q5_0) || IS(Q5_1) || IS(Q5_K) ? 1 : IS(Q6_K) ? 2 : 0)
#define ZERO_POINT     (IS(Q4_0) ? 8 : IS(Q5_0) ? 16 : IS(Q8_0) ? 128 : IS(Q6_K) ? 32 : 0)
#define MAX_CODE       (IS(Q8_0) ? 255 : (16 << HIGH_BITS) - 1)
#define BLOCKS         (IS_K ? 8 : 1) /* of 32 columns, in a record */
#define RECORD_COLUMNS (BLOCKS * 32)

/* Byte offsets of the planes in a record. */
#define PLANE_HIGH   (BLOCKS * (IS(Q8_0) ? 512 : 256))
#define PLANE_SCALES (PLANE_HIGH + BLOCKS * 64 * HIGH_BITS)
#define PLANE_MINS   (PLANE_SCALES + (IS(Q6_K) ? 256 : IS_K ? 128 : 0))
#define PLANE_D      (PLANE_MINS + (IS(Q4_K) || IS(Q5_K) ? 128 : 0))
#define PLANE_M      (PLANE_D + 32)
#if WEIGHT_TYPE == 0
#define RECORD_BYTES 2048
#elif WEIGHT_TYPE == 1 || WEIGHT_TYPE == 30
#define RECORD_BYTES 1024
#else
#define RECORD_BYTES (PLANE_M + (HAS_MINIMUM ? 32 : 0))
#endif

/* Thirty-two columns of LANES rows: codes[v] holds columns 4 v + e in byte e; value = scale * (code - ZERO_POINT) or
 * scale * code + minimum.  Q6_K has one scale for each 16 columns, all others only scale[0]. */
typedef struct WeightBlock {
    VU codes[8];
    VF scale[2];
    VF minimum;
} WeightBlock;

#if !IS_FLOAT

ALWAYS_INLINE VF small_lanes(const __global uchar *p)
{
    return TO_VF(V_LOAD(p));
}

ALWAYS_INLINE VF small_signed_lanes(const __global uchar *p)
{
    return TO_VF(V_LOAD((const __global char *)p));
}

/* Bits above the fourth of code vector v (h = 0) and 4 + v (h = 1), in place. */
ALWAYS_INLINE VU high_bits(const VU *high, const int h, const int v)
{
#if IS(Q6_K)
    return (v < 2 ? high[h] << (4 - 2 * v) : high[h] >> (2 * v - 4)) & 0x30303030u;
#else
    return (h == 0 ? high[0] << (4 - v) : high[0] >> v) & 0x10101010u;
#endif
}

ALWAYS_INLINE void block_codes(const __global uchar *record, const uint lane0, const uint b, VU *ret)
{
    const __global uint *words = (const __global uint *)(record + 4 * lane0);

#if IS(Q8_0)
#pragma unroll
    for (int v = 0; v < 8; v++)
        ret[v] = V_LOAD(words + 16 * v);
#else
    VU high[2] = {(VU)(0), (VU)(0)};

    if (HIGH_BITS >= 1)
        high[0] = V_LOAD(words + (PLANE_HIGH + 64 * HIGH_BITS * b) / 4);
    if (HIGH_BITS == 2)
        high[1] = V_LOAD(words + (PLANE_HIGH + 64 * HIGH_BITS * b) / 4 + 16);
#pragma unroll
    for (int v = 0; v < 4; v++) {
        VU nibbles = V_LOAD(words + 64 * b + 16 * v);

        ret[v] = nibbles & 0x0f0f0f0fu;
        ret[4 + v] = nibbles >> 4 & 0x0f0f0f0fu;
        if (HIGH_BITS > 0) {
            ret[v] |= high_bits(high, 0, v);
            ret[4 + v] |= high_bits(high, 1, v);
        }
    }
#endif
}

/* Block b of the record.  Products of a half and a small integer are exact. */
ALWAYS_INLINE WeightBlock block_load(const __global uchar *record, const uint lane0, const uint b)
{
    WeightBlock block;
    VF d = half_lanes((const __global ushort *)(record + PLANE_D) + lane0);

    block_codes(record, lane0, b, block.codes);
    block.scale[0] = block.scale[1] = d;
    block.minimum = (VF)(0.0f);
#if HAS_MINIMUM
    block.minimum = half_lanes((const __global ushort *)(record + PLANE_M) + lane0);
#endif
#if IS(Q6_K)
    block.scale[0] = d * small_signed_lanes(record + PLANE_SCALES + 32 * b + lane0);
    block.scale[1] = d * small_signed_lanes(record + PLANE_SCALES + 32 * b + 16 + lane0);
#elif IS_K
    block.scale[0] = d * small_lanes(record + PLANE_SCALES + 16 * b + lane0);
    block.minimum = -(block.minimum * small_lanes(record + PLANE_MINS + 16 * b + lane0));
#endif
    return block;
}

/* Column c of the block.  The product inside the fma is exact (at most 17 + 5 bits), so it rounds once, as the reference. */
ALWAYS_INLINE VF block_column(const WeightBlock *block, const int c)
{
    VU code = block->codes[c / 4] >> (c % 4 * 8) & 0xffu;

#if HAS_MINIMUM
    return fma(block->scale[0], TO_VF(AS_VI(code)), block->minimum);
#else
    return block->scale[IS(Q6_K) ? c / 16 : 0] * TO_VF(AS_VI(code) - ZERO_POINT);
#endif
}

#else /* IS_FLOAT */

/* Column c of the record. */
ALWAYS_INLINE VF float_column(const __global uchar *record, const uint lane0, const uint c)
{
#if IS(F32)
    return V_LOAD((const __global float *)record + TILE_ROWS * c + lane0);
#elif IS(F16)
    return half_lanes((const __global ushort *)record + TILE_ROWS * c + lane0);
#else
    return AS_VF(TO_VU(V_LOAD((const __global ushort *)record + TILE_ROWS * c + lane0)) << 16);
#endif
}

#endif
