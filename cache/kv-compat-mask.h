#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which keys a query sees, in absolute positions that count padding.  Query i of a forward is at length + i; key column j of what
 * update returned is at offset + j (kv_compat_mask_sizes()).
 */

#include <stdbool.h>
#include <stdint.h>

typedef enum KvMaskKind {
    KV_MASK_CAUSAL,
    KV_MASK_SLIDING, /* the key itself and window - 1 before it */
    KV_MASK_CHUNKED, /* the same chunk of `window`; borders move with the row's left padding */
    KV_MASK_ALL,     /* cross attention */
} KvMaskKind;

typedef struct KvMask {
    KvMaskKind kind;
    uint32_t window;
    const uint8_t *padding; /* (n_rows, n_padding), 0: padding; NULL: none.  Everything beyond its end counts as 0. */
    uint32_t n_padding;
} KvMask;

/* Zeros before the first one of a row. */
uint32_t kv_mask_left_padding(const KvMask *mask, uint32_t row);
bool kv_mask_sees(const KvMask *mask, uint32_t row, uint64_t query, uint64_t key);
