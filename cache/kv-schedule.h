#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one layer of a pass reads and packs, the same for every layer of a section: groups of rows, pages to pack, blocks of the past to
 * bring (loads), tiles of loads in reading order, and which block of which tile each group sees (refs, spans).  Pure
 * arithmetic on positions and blocks: no device.  What a group sees is said by the layers' visibility (opencl/attend.h): blocks that no
 * row of the pass sees are not touched, they may be gone.
 *
 *   home    the pages that were complete before the pass: [0, length / 32)
 *   fresh   pages that the pass completes; groups that see them packed read them from the scratch buffer
 *   load    one block with at least one visible page; forks in one pass that share a block share its load
 *   tile    consecutive loads: at most tile_blocks, either copied into the ring or read in place, then from one arena
 *
 * Loads are ordered by item, those that see the oldest block first, then by block, so that copies are long.  A group's blocks come in
 * block order: a block that two items share is preceded by blocks that they share too; where the later item would have to go back
 * (chunks leave gaps), it gets a load of its own.
 */

#include "cache/kv-arena.h"
#include "cache/kv-sizes.h"

typedef struct KvScheduleItem {
    KvBlock *const *blocks; /* of the sequence, with those reserved for the pass; only those that it sees or packs are looked at */
    uint32_t length, n_tokens; /* cross: keys that are there, rows that ask them */
    uint32_t tail_slot;
    uint32_t chunk_shift;      /* as in AttendGroup */
} KvScheduleItem;

typedef struct KvLoad {
    KvBlock *block;
    uint32_t n_pages; /* at home; 0: all visible pages of the block are fresh */
    uint64_t serial;  /* of the block's content */
} KvLoad;

typedef struct KvTile {
    uint32_t first_load, n_loads, first_ref, n_refs;
    uint64_t serial;      /* newest of its loads */
    const KvArena *arena; /* read in place; NULL: from the ring, or nothing is at home */
    bool staged;          /* copied into the ring */
} KvTile;

/* Where a fresh page goes. */
typedef struct KvHomeward {
    KvBlock *block;
    uint32_t page; /* within the block */
} KvHomeward;

typedef struct KvSchedule {
    /* limits */
    uint32_t max_items, max_blocks, tile_blocks;
    KvForm form; /* whose tail says what is seen packed */
    AttendVisibility visibility;
    bool direct;
    bool next; /* of the pass after the one in progress: what that writes is at home by then */
    /* contents */
    uint32_t n_rows, n_groups, n_packs, n_loads, n_tiles, n_refs, n_staged;
    AttendGroup *groups;
    uint32_t *group_items, *group_cursors; /* per group: its item, its next block while refs are made */
    AttendPack *packs;
    KvHomeward *homewards; /* per pack */
    KvLoad *loads;
    uint32_t *item_loads;  /* (max_items, max_blocks): load of a block, KV_NO_LOAD where none is needed; [first, end) is filled */
    uint32_t *item_firsts, *item_ends; /* per item: blocks that its groups see */
    uint32_t *item_fresh;  /* per item: its first page in the scratch buffer */
    uint32_t *order;       /* of the items' loads */
    KvTile *tiles;
    uint32_t *staged;      /* indices of the tiles that pass through the ring */
    AttendRef *refs;
    AttendSpan *spans;     /* (n_tiles, n_groups) */
    void *memory;
} KvSchedule;

#define KV_SCHEDULE_NULL ((KvSchedule){0})
#define KV_NO_LOAD       UINT32_MAX

/* Allocates for the largest pass that @sizes allows; with @next only for loads and tiles (what a prefetch needs).  -ENOMEM. */
int kv_schedule_init(KvSchedule *schedule, const KvSectionSizes *sizes, bool next);
void kv_schedule_deinit(KvSchedule *schedule);
/* Loads and tiles; then groups, packs, refs and spans as well. */
void kv_schedule_tiles(KvSchedule *schedule, const KvScheduleItem *items, uint32_t n_items);
void kv_schedule_build(KvSchedule *schedule, const KvScheduleItem *items, uint32_t n_items);
/* Cross: a pass that writes keys, n_tokens behind the length that is there: groups and packs, no tiles. */
void kv_schedule_keep(KvSchedule *schedule, const KvScheduleItem *items, uint32_t n_items);

/* The first block that queries from @length on see: those before are not needed to go on. */
static inline uint32_t kv_first_block(AttendVisibility visibility, uint32_t chunk_shift, uint32_t length)
{
    return attend_first_visible(visibility, chunk_shift, length) / (KV_PAGE_TOKENS * KV_BLOCK_PAGES);
}
