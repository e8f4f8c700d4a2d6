/* SPDX-License-Identifier: Apache-2.0 */
/* Codes of a matrix into bytes, and back. */

#include "quant/kv-pack.h"

#include "quant/base/checked.h"

#include <string.h>

#define WORD_BITS   3u /* these codes lie in words of 32 bits */
#define WORD_BLOCKS 10u
#define WORD_BYTES  4u

uint32_t kv_pack_blocks(uint8_t nbits)
{
    return nbits == WORD_BITS ? WORD_BLOCKS : 8u / nbits;
}

static uint64_t packed_rows(uint8_t nbits, uint64_t n_rows)
{
    uint32_t blocks = kv_pack_blocks(nbits);

    return n_rows / blocks + (n_rows % blocks != 0);
}

static uint32_t unit_bytes(uint8_t nbits)
{
    return nbits == WORD_BITS ? WORD_BYTES : 1;
}

bool kv_packed_bytes(uint8_t nbits, uint64_t n_rows, uint64_t n_columns, uint64_t *ret)
{
    uint64_t units;

    return checked_mul(packed_rows(nbits, n_rows), n_columns, &units) && checked_mul(units, unit_bytes(nbits), ret);
}

/* Lowest bit of block @block in its unit. */
static uint32_t block_shift(KvPackOrder order, uint8_t nbits, uint32_t block)
{
    return (order == KV_PACK_LOW_FIRST ? block : kv_pack_blocks(nbits) - 1 - block) * nbits;
}

void kv_pack_codes(KvPackOrder order, uint8_t nbits, const uint8_t *codes, uint64_t n_rows, uint64_t n_columns, uint8_t *ret_packed)
{
    uint64_t n_packed = packed_rows(nbits, n_rows);
    uint32_t n_bytes = unit_bytes(nbits);

    memset(ret_packed, 0, n_packed * n_columns * n_bytes);
    for (uint64_t row = 0; row < n_rows; row++) {
        uint32_t shift = block_shift(order, nbits, (uint32_t)(row / n_packed));
        uint8_t *unit = ret_packed + row % n_packed * n_columns * n_bytes;

        for (uint64_t column = 0; column < n_columns; column++, unit += n_bytes) {
            uint32_t bits = (uint32_t)codes[row * n_columns + column] << shift;

            for (uint32_t i = 0; i < n_bytes; i++)
                unit[i] |= (uint8_t)(bits >> 8 * i);
        }
    }
}

void kv_unpack_codes(KvPackOrder order, uint8_t nbits, const uint8_t *packed, uint64_t n_rows, uint64_t n_columns, uint8_t *ret_codes)
{
    uint64_t n_packed = packed_rows(nbits, n_rows);
    uint32_t n_bytes = unit_bytes(nbits), mask = (1u << nbits) - 1;

    for (uint64_t row = 0; row < n_rows; row++) {
        uint32_t shift = block_shift(order, nbits, (uint32_t)(row / n_packed));
        const uint8_t *unit = packed + row % n_packed * n_columns * n_bytes;

        for (uint64_t column = 0; column < n_columns; column++, unit += n_bytes) {
            uint32_t bits = 0;

            for (uint32_t i = 0; i < n_bytes; i++)
                bits |= (uint32_t)unit[i] << 8 * i;
            ret_codes[row * n_columns + column] = (uint8_t)(bits >> shift & mask);
        }
    }
}
