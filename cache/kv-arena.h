#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Homes of packed pages: blocks of KV_BLOCK_PAGES page slots in a few arenas.
 *
 * An arena is one address range with a plane per layer of a section; a slot is the same place in every plane, so one index stands
 * for a page of all of them:
 *     byte of (layer, block, page) = layer * plane_bytes + (block * KV_BLOCK_PAGES + page) * page_bytes
 * The unit of allocation and of sharing is the block: it never straddles arenas, so a tile is a few long copies, or is read in
 * place through one buffer.  Pages in a block are written once, in order; n_filled counts them.  A cache may append to a block
 * that others refer to as long as it saw all that is filled (theirs is a prefix); else it copies the few pages it shares.
 *
 * Host arenas are anonymous mappings without reserve: an unused block costs address space only.  With `wrap` kernels read them in
 * place.  Device arenas are buffers.  Freeing memory that a copy may still touch is the caller's business (kv_arenas_trim).
 */

#include "cache/kv-budget.h"
#include "cache/kv-store.h"

typedef struct KvArena KvArena;

typedef struct KvBlock {
    KvArena *arena;
    uint32_t index;
    uint32_t n_refs;
    uint32_t n_filled;     /* pages written, or promised to the pass in progress */
    uint64_t serial;       /* of the pass that wrote it last: what was copied before is another content */
    uint64_t write_serial; /* of the pass that is writing now, else 0 */
} KvBlock;

struct KvArena {
    uint8_t *memory;   /* home host */
    GpuBuffer *buffer; /* home device, or the wrapped memory, or NULL */
    uint64_t mapped_bytes, plane_bytes;
    uint32_t n_blocks, n_used;
    KvBlock blocks[];
};

typedef struct KvArenaOptions {
    Gpu *gpu; /* may be NULL for host arenas that are not wrapped */
    KvHome home;
    bool wrap;  /* kernels read host arenas in place */
    bool fixed; /* static growth: blocks are reserved first, then taken */
    uint32_t n_layers, page_bytes;
    uint32_t first_blocks, max_blocks; /* of one arena; dynamic growth doubles from first to max */
    uint32_t keep_blocks;              /* what kv_arenas_trim() leaves in any case */
    KvBudget *device_budget;           /* home device: borrowed; charged for whole arenas.  May be NULL: no limit of ours */
    KvBudget *host_budget;             /* borrowed; charged for blocks in use or, when fixed, reserved */
} KvArenaOptions;

typedef struct KvArenas {
    KvArenaOptions options;
    KvArena **arenas;
    uint32_t n_arenas, n_blocks, n_used;
    uint32_t n_reserved; /* static growth: blocks that are promised */
} KvArenas;

#define KV_ARENAS_NULL ((KvArenas){0})

void kv_arenas_init(KvArenas *arenas, const KvArenaOptions *options);
void kv_arenas_deinit(KvArenas *arenas);

/* Arenas of @n_blocks together, before the first is asked for. */
int kv_arenas_prepare(KvArenas *arenas, uint32_t n_blocks, ErrorDetail *reterr);
/* Static growth: from now on @n_blocks more can be taken without fail.  KvError or negative errno. */
int kv_arenas_reserve(KvArenas *arenas, uint32_t n_blocks, ErrorDetail *reterr);
void kv_arenas_unreserve(KvArenas *arenas, uint32_t n_blocks);
/* A block with one reference, the successor of @after (may be NULL) when that is free.  KvError or negative errno. */
int kv_arenas_take(KvArenas *arenas, const KvBlock *after, KvBlock **ret, ErrorDetail *reterr);
static inline KvBlock *kv_block_ref(KvBlock *block)
{
    block->n_refs++;
    return block;
}
/* Returns NULL. */
KvBlock *kv_arenas_unref(KvArenas *arenas, KvBlock *block);

/* Whether kv_arenas_trim() would give memory back: arenas without a block in use that nothing is promised from. */
bool kv_arenas_can_trim(const KvArenas *arenas);
/* Gives it back; no copy from or to them may be in flight. */
void kv_arenas_trim(KvArenas *arenas);

/* Bytes from the arena's start to a page of a layer. */
static inline uint64_t kv_block_offset(const KvArenas *arenas, const KvBlock *block, uint32_t layer, uint32_t page)
{
    return layer * block->arena->plane_bytes +
           ((uint64_t)block->index * KV_BLOCK_PAGES + page) * arenas->options.page_bytes;
}
