#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The bodies of store, cache and pass, for cache/ only. */

#include "cache/kv-arena.h"
#include "cache/kv-error.h"
#include "cache/kv-ring.h"
#include "cache/kv-schedule.h"
#include "cache/kv-sizes.h"
#include "cache/kv-tail.h"

#define KV_CHECKPOINTS_NEW 8 /* the newest are all kept; */
#define KV_CHECKPOINTS_MAX 16 /* older ones evenly spaced */

/* A place to crop back to. */
typedef struct KvCheckpoint {
    uint32_t length, tail_from;
    uint64_t made; /* the store's clock: the oldest gives way when the host budget is short */
    KvSaved *saved;
} KvCheckpoint;

struct KvCache {
    KvStore *store;
    KvCache *previous, *next; /* all caches of the store */
    uint32_t length;
    uint32_t n_blocks;        /* blocks that hold pages, ceil(length / KV_PAGE_TOKENS / KV_BLOCK_PAGES) between passes */
    KvBlock **blocks;         /* (max_blocks) */
    KvTail *tail;             /* NULL: empty past */
    uint32_t tail_from;       /* the tail ring holds positions [tail_from, length) */
    uint32_t n_checkpoints;
    KvCheckpoint checkpoints[KV_CHECKPOINTS_MAX]; /* by length */
    bool in_pass;
};

typedef struct KvPassEntry {
    KvCache *cache;
    uint32_t n_tokens;
    uint32_t n_blocks_before;
    KvBlock *claimed; /* incomplete block that the pass appends to */
} KvPassEntry;

struct KvPass {
    KvStore *store;
    bool active;
    uint32_t n_entries, n_layers_done;
    bool layer_started;
    KvPassEntry *entries; /* (max items) */
    AttendPass attend;
    uint64_t packs_offset, refs_offset, spans_offset;
};

struct KvStore {
    Gpu *gpu;
    KvSizes sizes;
    Attend *attend;
    KvBudget host_budget;
    KvArenas arenas;
    KvTails tails;
    KvRing ring;
    KvSchedule schedule, next_schedule;
    KvScheduleItem *items; /* (max items): scratch of kv_pass_begin() and kv_pass_prefetch() */
    KvPass pass;
    KvCache *caches;
    uint32_t n_caches;
    uint64_t serial;  /* of passes begun */
    uint64_t home_serial; /* the last pass that sent pages home */
    uint64_t settled; /* every page that passes up to this one packed has arrived at home */
    uint64_t made;    /* clock of checkpoints */

    float *inv_freq;       /* (rotary_dim / 2) */
    GpuBuffer *calibration, *inputs;
    uint8_t *inputs_memory; /* what is uploaded to inputs */
    GpuBuffer *fresh[2];    /* pages of this pass, by the layer's parity */
    GpuEvent *fresh_events[2]; /* the last copy that reads them */
    GpuEvent **home_events; /* (n_layers): the last copy home */
};

#define KV_TIMEOUT_USEC (10 * 1000 * 1000)

/* Longest pass in items. */
static inline uint32_t kv_store_max_items(const KvStore *store)
{
    return store->sizes.max_loads / store->sizes.max_blocks;
}

static inline KvHomeEvents kv_store_home(const KvStore *store)
{
    return (KvHomeEvents){store->home_events, store->settled};
}

/* Where kernels find a layer's means and tails. */
AttendLayer kv_store_layer(const KvStore *store, uint32_t layer);
/* Notices without waiting that pages have arrived at home. */
void kv_store_poll_home(KvStore *store);
/* The same when it is known. */
void kv_store_forget_home(KvStore *store);
/* Waits until all of them have.  KvError. */
int kv_store_settle(KvStore *store, ErrorDetail *reterr);
/* Gives back arenas that nobody uses, when the device can be stopped for it. */
void kv_store_trim(KvStore *store);

/* Makes room for @n_tokens more: claims or copies the incomplete block, takes new ones.  KvError or negative errno; then
 * kv_cache_shrink() undoes what was done. */
int kv_cache_grow(KvCache *cache, KvPassEntry *entry, ErrorDetail *reterr);
void kv_cache_shrink(KvPassEntry *entry);
/* The tail ring was overwritten up to position @end: goes back to where it is exact (kv_pass_abort). */
int kv_cache_recover(KvCache *cache, uint32_t end, ErrorDetail *reterr);
/* KvBudget.reclaim: drops the oldest checkpoint of the store. */
bool kv_store_drop_checkpoint(void *userdata);
