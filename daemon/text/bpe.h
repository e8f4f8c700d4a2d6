#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Merges of byte-pair encoding: the adjacent pair of lowest rank is merged first, the leftmost of equal ones, until none is left.
 * A word of n symbols costs O(n log n) for long words; short ones use a plain scan, which is faster up to BPE_SCAN_MAX.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BPE_SCAN_MAX 48

typedef struct BpeSlot {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX: free */
    uint32_t rank;
    int32_t result;
} BpeSlot;

typedef struct BpeMerges {
    BpeSlot *slots;
    uint64_t mask; /* number of slots - 1 */
    size_t n;
} BpeMerges;
#define BPE_MERGES_NULL ((BpeMerges){NULL, 0, 0})

/* Room for @n merges. */
int bpe_merges_init(BpeMerges *merges, size_t n);
void bpe_merges_deinit(BpeMerges *merges);
/* At most the n of init; of two merges of one pair the first stays.  Ids are >= 0. */
void bpe_merges_add(BpeMerges *merges, int32_t left, int32_t right, uint32_t rank, int32_t result);
const BpeSlot *bpe_merges_find(const BpeMerges *merges, int32_t left, int32_t right);
/* Merges @n symbols in place; the result has *ret_n <= n. */
int bpe_merges_apply(const BpeMerges *merges, int32_t *symbols, size_t n, size_t *ret_n);
