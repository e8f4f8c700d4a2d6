#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Codes of a matrix into bytes, as the `quanto` and `hqq` libraries do: blocks of rows share units.
 *
 * With v codes a unit (8 / nbits a byte; 3 bits: ten in 32 bits, little-endian) and R = ceil(n_rows / v), row i of the packed matrix
 * holds rows i, i + R, i + 2 R, ... of the codes; rows that are missing are zero.  The two libraries differ in where block j lies.
 */

#include <stdbool.h>
#include <stdint.h>

typedef enum KvPackOrder {
    KV_PACK_LOW_FIRST,  /* quanto: block j at bit j * nbits; 4 and 2 bits */
    KV_PACK_HIGH_FIRST, /* hqq: block 0 in the highest bits (3 bits: at bit 27); 8, 4, 3, 2 and 1 bits */
} KvPackOrder;

/* Codes that share a unit: 1, 2, 4, 8, or 10 for 3 bits. */
uint32_t kv_pack_blocks(uint8_t nbits);
/* Bytes of the packed matrix; false when they do not fit 64 bits. */
bool kv_packed_bytes(uint8_t nbits, uint64_t n_rows, uint64_t n_columns, uint64_t *ret);
/* codes: (n_rows, n_columns), one a byte. */
void kv_pack_codes(KvPackOrder order, uint8_t nbits, const uint8_t *codes, uint64_t n_rows, uint64_t n_columns, uint8_t *ret_packed);
void kv_unpack_codes(KvPackOrder order, uint8_t nbits, const uint8_t *packed, uint64_t n_rows, uint64_t n_columns, uint8_t *ret_codes);
