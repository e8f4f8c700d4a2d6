/* SPDX-License-Identifier: Apache-2.0 */
/* Byte-pair merges: an open-addressed table of pairs, a scan for short words, a heap over a linked list for long ones. */

#include "daemon/text/bpe.h"

#include <string.h>

int bpe_merges_init(BpeMerges *merges, size_t n)
{
    uint64_t n_slots = 16;

    if (n > UINT32_MAX / 4)
        return error_origin(-EOVERFLOW);
    while (n_slots < 2 * (uint64_t)n)
        n_slots *= 2;
    merges->slots = malloc(n_slots * sizeof(*merges->slots));
    if (!merges->slots)
        return error_origin(-ENOMEM);
    memset(merges->slots, 0xff, n_slots * sizeof(*merges->slots));
    merges->mask = n_slots - 1;
    merges->n = 0;
    return 0;
}

void bpe_merges_deinit(BpeMerges *merges)
{
    free(merges->slots);
    *merges = BPE_MERGES_NULL;
}

/* The slot of the pair, or the free one where it would go; the table is never full. */
static BpeSlot *bpe_merges_slot(const BpeMerges *merges, uint64_t pair)
{
    /* Fibonacci hashing: the high half of the product depends on all bits of the pair. */
    uint64_t i = (pair * UINT64_C(0x9e3779b97f4a7c15)) >> 32;

    for (;; i++) {
        BpeSlot *slot = &merges->slots[i & merges->mask];

        if (slot->pair == pair || slot->pair == UINT64_MAX)
            return slot;
    }
}

static uint64_t bpe_pair(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

void bpe_merges_add(BpeMerges *merges, int32_t left, int32_t right, uint32_t rank, int32_t result)
{
    BpeSlot *slot = bpe_merges_slot(merges, bpe_pair(left, right));

    if (slot->pair != UINT64_MAX)
        return;
    *slot = (BpeSlot){bpe_pair(left, right), rank, result};
    merges->n++;
}

const BpeSlot *bpe_merges_find(const BpeMerges *merges, int32_t left, int32_t right)
{
    const BpeSlot *slot = bpe_merges_slot(merges, bpe_pair(left, right));

    return slot->pair == UINT64_MAX ? NULL : slot;
}

static size_t bpe_apply_by_scan(const BpeMerges *merges, int32_t *symbols, size_t n)
{
    const BpeSlot *pairs[BPE_SCAN_MAX]; /* pairs[i]: the merge of symbols i and i + 1 */

    for (size_t i = 0; i + 1 < n; i++)
        pairs[i] = bpe_merges_find(merges, symbols[i], symbols[i + 1]);
    while (n > 1) {
        size_t best = n;

        for (size_t i = 0; i + 1 < n; i++)
            if (pairs[i] && (best == n || pairs[i]->rank < pairs[best]->rank))
                best = i;
        if (best == n)
            break;
        symbols[best] = pairs[best]->result;
        memmove(&symbols[best + 1], &symbols[best + 2], (n - best - 2) * sizeof(*symbols));
        if (best + 2 < n)
            memmove(&pairs[best + 1], &pairs[best + 2], (n - best - 3) * sizeof(pairs[0]));
        n--;
        pairs[best] = best + 1 < n ? bpe_merges_find(merges, symbols[best], symbols[best + 1]) : NULL;
        if (best > 0)
            pairs[best - 1] = bpe_merges_find(merges, symbols[best - 1], symbols[best]);
    }
    return n;
}

/* A min-heap of rank << 32 | position: lowest rank first, then leftmost.  Entries may be stale; they are checked when taken. */
typedef struct BpeHeap {
    uint64_t *entries;
    size_t n;
} BpeHeap;

static void bpe_heap_push(BpeHeap *heap, uint64_t entry)
{
    size_t i = heap->n++;

    while (i > 0 && heap->entries[(i - 1) / 2] > entry) {
        heap->entries[i] = heap->entries[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap->entries[i] = entry;
}

static uint64_t bpe_heap_pop(BpeHeap *heap)
{
    uint64_t top = heap->entries[0], last = heap->entries[--heap->n];
    size_t i = 0;

    for (;;) {
        size_t child = 2 * i + 1;

        if (child >= heap->n)
            break;
        if (child + 1 < heap->n && heap->entries[child + 1] < heap->entries[child])
            child++;
        if (heap->entries[child] >= last)
            break;
        heap->entries[i] = heap->entries[child];
        i = child;
    }
    heap->entries[i] = last;
    return top;
}

/* Symbols as a doubly linked list over positions; a position that was merged into its left neighbour is -1. */
typedef struct BpeList {
    int32_t *symbols;
    uint32_t *next, *previous;
    uint32_t n; /* also the end mark */
} BpeList;

static const BpeSlot *bpe_list_pair(const BpeMerges *merges, const BpeList *list, uint32_t position)
{
    uint32_t next = list->next[position];

    return next < list->n ? bpe_merges_find(merges, list->symbols[position], list->symbols[next]) : NULL;
}

static void bpe_list_offer(const BpeMerges *merges, const BpeList *list, BpeHeap *heap, uint32_t position)
{
    const BpeSlot *slot = bpe_list_pair(merges, list, position);

    if (slot)
        bpe_heap_push(heap, (uint64_t)slot->rank << 32 | position);
}

static void bpe_list_merge(BpeList *list, uint32_t position, int32_t result)
{
    uint32_t gone = list->next[position], next = list->next[gone];

    list->symbols[position] = result;
    list->symbols[gone] = -1;
    list->next[position] = next;
    if (next < list->n)
        list->previous[next] = position;
}

static int bpe_apply_by_heap(const BpeMerges *merges, int32_t *symbols, size_t n, size_t *ret_n)
{
    _cleanup_(freep) uint32_t *next = malloc(n * sizeof(*next));
    _cleanup_(freep) uint32_t *previous = malloc(n * sizeof(*previous));
    _cleanup_(freep) uint64_t *entries = malloc(3 * n * sizeof(*entries)); /* n pairs, and two new ones for each merge */
    BpeList list = {symbols, next, previous, (uint32_t)n};
    BpeHeap heap = {entries, 0};
    size_t kept = 0;

    if (!next || !previous || !entries)
        return error_origin(-ENOMEM);
    for (uint32_t i = 0; i < n; i++) {
        next[i] = i + 1;
        previous[i] = i > 0 ? i - 1 : (uint32_t)n;
    }
    for (uint32_t i = 0; i < n; i++)
        bpe_list_offer(merges, &list, &heap, i);
    while (heap.n > 0) {
        uint64_t entry = bpe_heap_pop(&heap);
        uint32_t position = (uint32_t)entry;
        const BpeSlot *slot;

        if (symbols[position] < 0)
            continue;
        slot = bpe_list_pair(merges, &list, position);
        if (!slot || slot->rank != entry >> 32)
            continue;
        bpe_list_merge(&list, position, slot->result);
        bpe_list_offer(merges, &list, &heap, position);
        if (previous[position] < n)
            bpe_list_offer(merges, &list, &heap, previous[position]);
    }
    for (size_t i = 0; i < n; i++)
        if (symbols[i] >= 0)
            symbols[kept++] = symbols[i];
    *ret_n = kept;
    return 0;
}

int bpe_merges_apply(const BpeMerges *merges, int32_t *symbols, size_t n, size_t *ret_n)
{
    if (n > BPE_SCAN_MAX) {
        if (n >= INT32_MAX)
            return error_origin(-EOVERFLOW);
        return bpe_apply_by_heap(merges, symbols, n, ret_n);
    }
    *ret_n = bpe_apply_by_scan(merges, symbols, n);
    return 0;
}
