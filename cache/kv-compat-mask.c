/* SPDX-License-Identifier: Apache-2.0 */
/* Which keys a query sees. */

#include "cache/kv-compat-mask.h"

uint32_t kv_mask_left_padding(const KvMask *mask, uint32_t row)
{
    uint32_t n = 0;

    if (!mask->padding)
        return 0;
    while (n < mask->n_padding && mask->padding[(uint64_t)row * mask->n_padding + n] == 0)
        n++;
    return n;
}

/* The chunk of a position; the padding before the first chunk is in chunks of its own. */
static int64_t chunk_of(uint64_t position, uint32_t padding, uint32_t size)
{
    int64_t at = (int64_t)position - padding;

    return at >= 0 ? at / size : -1 - (-at - 1) / size;
}

bool kv_mask_sees(const KvMask *mask, uint32_t row, uint64_t query, uint64_t key)
{
    uint32_t padding;

    if (mask->padding && (key >= mask->n_padding || mask->padding[(uint64_t)row * mask->n_padding + key] == 0))
        return false;
    switch (mask->kind) {
    case KV_MASK_ALL:
        return true;
    case KV_MASK_CAUSAL:
        return key <= query;
    case KV_MASK_SLIDING:
        return key <= query && query - key < mask->window;
    case KV_MASK_CHUNKED:
        padding = kv_mask_left_padding(mask, row);
        return key <= query && chunk_of(key, padding, mask->window) == chunk_of(query, padding, mask->window);
    }
    return false;
}
