#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Homes of packed pages: places in a few arenas, and blocks of up to KV_BLOCK_PAGES of them.
 *
 * An arena is one address range with a plane per layer of a section; a place is the same in every plane, so one index stands for a page
 * of all of them:
 *     byte of (layer, page of a block) = layer * plane_bytes + block->pages[page] * page_bytes
 * The unit of sharing and of reading is the block, all of whose pages lie in one arena: a tile is a few long copies, or is read in place
 * through one buffer.  The unit of allocation is the page: a block has exactly those that are filled (and still in sight, where a window
 * passes over them).  A block grows in a *frame*, eight places in a row that others use only when nothing else is left; frames of a
 * growing sequence follow each other.
 *
 * Pages in a block are written once, in order; n_filled counts them.  A cache may append to a block that others refer to as long as it
 * saw all that is filled (theirs is a prefix); else it copies the few pages it shares.
 *
 * Host arenas are anonymous mappings without reserve: an unused place costs address space only.  With `wrap` kernels read them in
 * place.  Device arenas are buffers.  Freeing memory that a copy may still touch is the caller's business (kv_arenas_trim).
 */

#include "cache/kv-budget.h"
#include "cache/kv-store.h"

typedef struct KvArena KvArena;
typedef struct KvArenas KvArenas;
typedef struct KvBlock KvBlock;

struct KvBlock {
    KvArena *arena;
    uint32_t pages[KV_BLOCK_PAGES]; /* places, of [first_page, n_filled) */
    uint32_t frame;        /* where it grows, or KV_NO_FRAME */
    uint32_t n_refs;
    uint32_t first_page;   /* those before are out of sight and gone */
    uint32_t n_filled;     /* pages written, or promised to the pass in progress */
    uint64_t serial;       /* of the pass that wrote it last: what was copied before is another content */
    uint64_t write_serial; /* of the pass that is writing now, else 0 */
    KvBlock *next_free;
};
#define KV_NO_FRAME UINT32_MAX

struct KvArena {
    KvArenas *owner;
    uint8_t *memory;   /* home host */
    GpuBuffer *buffer; /* home device, or the wrapped memory, or NULL */
    uint64_t mapped_bytes, plane_bytes;
    uint32_t n_pages, n_used, n_frames;
    uint32_t n_blocks; /* in use: one that has let go of all its pages is still referred to */
    KvBlock *free_blocks;
    KvBlock **owners;  /* (n_frames): the block that grows there */
    uint8_t *used;     /* (n_frames): a bit per place */
    KvBlock blocks[];  /* (n_pages) */
};

typedef struct KvArenaOptions {
    Gpu *gpu; /* may be NULL for host arenas that are not wrapped */
    KvHome home;
    bool wrap;  /* kernels read host arenas in place */
    bool fixed; /* static growth: pages are reserved first, then taken */
    uint32_t n_layers, page_bytes;
    uint32_t first_pages, max_pages; /* of one arena; dynamic growth doubles from first to max */
    uint32_t keep_pages;             /* what kv_arenas_trim() leaves in any case */
    uint32_t limit_pages;            /* of all arenas together; 0: none */
    KvBudget *device_budget;         /* home device: borrowed; charged for whole arenas.  May be NULL: no limit of ours */
    KvBudget *host_budget;           /* home host: borrowed; charged for pages in use or, when fixed, reserved */
} KvArenaOptions;

struct KvArenas {
    KvArenaOptions options;
    KvArena **arenas;
    uint32_t n_arenas, n_pages, n_used;
    uint32_t n_reserved; /* static growth: pages that are promised */
};

#define KV_ARENAS_NULL ((KvArenas){0})

void kv_arenas_init(KvArenas *arenas, const KvArenaOptions *options);
void kv_arenas_deinit(KvArenas *arenas);

/* Arenas of @n_pages together, before the first is asked for. */
int kv_arenas_prepare(KvArenas *arenas, uint32_t n_pages, ErrorDetail *reterr);
/* Static growth: memory and budget for @n_pages more.  KvError or negative errno. */
int kv_arenas_reserve(KvArenas *arenas, uint32_t n_pages, ErrorDetail *reterr);
void kv_arenas_unreserve(KvArenas *arenas, uint32_t n_pages);

/* A block with one reference and pages [@first_page, @n_filled), the successor of @after (may be NULL) when that is free.  KvError or
 * negative errno. */
int kv_arenas_take(KvArenas *arenas, const KvBlock *after, uint32_t first_page, uint32_t n_filled, KvBlock **ret, ErrorDetail *reterr);
/* Whether the arena of a block has places for it to grow to @n_filled pages; if not, it must be copied to grow. */
bool kv_block_can_grow(const KvBlock *block, uint32_t n_filled);
/* Grows it.  KV_E_HOST_MEMORY. */
int kv_block_grow(KvBlock *block, uint32_t n_filled, ErrorDetail *reterr);
/* Lets go of pages before @first_page and from @n_filled on; no one else refers to them. */
void kv_block_shrink(KvBlock *block, uint32_t first_page, uint32_t n_filled);
static inline KvBlock *kv_block_ref(KvBlock *block)
{
    block->n_refs++;
    return block;
}
/* Takes NULL, returns NULL. */
KvBlock *kv_block_unref(KvBlock *block);

/* Whether kv_arenas_trim() would give memory back: arenas without a page in use that nothing is promised from. */
bool kv_arenas_can_trim(const KvArenas *arenas);
/* Gives it back; no copy from or to them may be in flight. */
void kv_arenas_trim(KvArenas *arenas);

/* Bytes from the arena's start to a page of a layer. */
static inline uint64_t kv_block_offset(const KvBlock *block, uint32_t layer, uint32_t page)
{
    return layer * block->arena->plane_bytes + (uint64_t)block->pages[page] * block->arena->owner->options.page_bytes;
}

/* Bytes from one arena to another: at once between those in host memory, else queued (@ret_event may be NULL). */
int kv_arena_copy(Gpu *gpu, GpuQueue queue, const KvArena *from, uint64_t source, const KvArena *to, uint64_t target, uint64_t bytes,
                  const char *label, GpuEvent **ret_event);

/* How many of pages [first, end) follow each other from the first on. */
static inline uint32_t kv_block_run(const KvBlock *block, uint32_t first, uint32_t end)
{
    uint32_t n = 1;

    while (first + n < end && block->pages[first + n] == block->pages[first] + n)
        n++;
    return n;
}
