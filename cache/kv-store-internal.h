#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The bodies of store, section, cache and pass, for cache/ only. */

#include "cache/kv-arena.h"
#include "cache/kv-error.h"
#include "cache/kv-host.h"
#include "cache/kv-ring.h"
#include "cache/kv-schedule.h"
#include "cache/kv-sizes.h"
#include "cache/kv-states.h"

#define KV_CHECKPOINTS_NEW 8 /* the newest are all kept; */
#define KV_CHECKPOINTS_MAX 16 /* older ones evenly spaced */

/* A sequence's past in one section: blocks [first_block, n_blocks) hold its pages, up to ceil(tokens / KV_BLOCK_TOKENS) between
 * passes; those before are out of sight and gone. */
typedef struct KvSectionPast {
    uint32_t tail_from; /* the tail ring holds positions [tail_from, length) */
    uint32_t first_block, n_blocks;
    KvBlock **blocks; /* (max_blocks) */
} KvSectionPast;

/* What a checkpoint keeps of a section.  Windows only: the blocks in sight then; the others' are there as long as the sequence is. */
typedef struct KvMark {
    uint32_t tail_from, first_block, n_blocks;
    KvBlock **blocks; /* (n_blocks - first_block), or NULL */
} KvMark;

/* A place to crop back to. */
typedef struct KvCheckpoint {
    uint32_t length;
    uint64_t made;    /* the store's clock: the oldest gives way when the host budget is short */
    bool recorded;    /* made for a recording, and ends with it */
    KvSaved *saved;   /* the tail */
    KvSaved *state;   /* NULL: no layer has one */
    KvMark marks[];   /* (n_sections) */
} KvCheckpoint;

/* A sequence's past.  Caches own one each; a fork begins with a copy, which costs pointers. */
typedef struct KvPast {
    KvStore *store;
    uint32_t length, cross_length;
    bool recording;
    uint32_t record_from; /* recording: what the query at this position saw is kept */
    KvTail *tail; /* NULL: empty past */
    KvStates states;
    KvHostPast *host; /* compatibility mode, else NULL */
    uint32_t n_checkpoints;
    KvCheckpoint *checkpoints[KV_CHECKPOINTS_MAX]; /* by length */
    KvSectionPast sections[];                      /* (n_sections); their arrays of blocks lie behind */
} KvPast;

struct KvCache {
    KvStore *store;
    KvCache *previous, *next; /* all caches of the store */
    KvPast *past;
    bool in_pass, more;
};

/* What a pass did to one section of a cache. */
typedef struct KvEntrySection {
    uint32_t n_blocks_before;
    KvBlock *claimed; /* incomplete block that the pass appends to */
} KvEntrySection;

typedef struct KvPassEntry {
    KvCache *cache;
    uint32_t n_tokens;
    KvEntrySection *sections; /* (n_sections) */
} KvPassEntry;

struct KvPass {
    KvStore *store;
    bool active;
    bool cross; /* it writes encoder output */
    uint32_t n_entries, n_layers_done; /* layers that the pass has nothing to do with count as done */
    bool layer_started;
    KvPassEntry *entries; /* (max items) */
};

typedef struct KvSection {
    const KvSectionSizes *sizes;
    Attend *attend;
    KvArenas arenas;
    KvArenas resident; /* limit_pages 0: none.  Home host: a share of the blocks that the device has room for, and reads in place */
    KvSchedule schedule, next_schedule;
    float *inv_freq; /* (rotary_dim / 2) */
    uint8_t *constants; /* what was uploaded to calibration */
    GpuBuffer *calibration, *inputs;
    uint8_t *inputs_memory; /* what is uploaded to inputs */
    /* of the pass in progress */
    AttendPass pass;
    uint64_t packs_offset, refs_offset, spans_offset;
} KvSection;

struct KvStore {
    Gpu *gpu;
    KvSizes sizes;
    KvBudget host_budget, device_budget;
    KvSection *sections; /* (n_sections) */
    KvTails tails;
    KvTails states; /* n_slots 0: no layer has a state */
    KvRing ring;
    KvHost *host; /* compatibility mode, else NULL */
    uint64_t host_charged_bytes; /* what its caches have of the budget */
    KvScheduleItem *items; /* (max items): scratch of kv_pass_begin() and kv_pass_prefetch() */
    KvPass pass;
    KvCache *caches;
    uint32_t n_caches;
    uint64_t serial;  /* of passes begun */
    uint64_t home_serial; /* the last pass that sent pages home */
    uint64_t settled; /* every page that passes up to this one packed has arrived at home */
    uint64_t made;    /* clock of checkpoints */
    uint64_t calibration_hash; /* of what was taken from packed keys and values, for saved files */

    GpuBuffer *sink_logits; /* f32 (n_layers, logits_stride), or NULL */
    GpuBuffer *fresh[2];    /* pages of this pass, by the layer's parity */
    GpuEvent *fresh_events[2]; /* the last copy that reads them */
    GpuEvent **home_events; /* (n_layers): the last copy home */
    GpuEvent *last_home;    /* the last of all; the queue is in order */
};

static inline KvHomeEvents kv_store_home(const KvStore *store)
{
    return (KvHomeEvents){store->home_events, store->settled};
}

/* Where kernels find a layer's means and tails. */
AttendLayer kv_store_layer(const KvStore *store, uint32_t layer);
/* @event (taken) is the last copy home of @layer. */
void kv_store_set_home(KvStore *store, uint32_t layer, GpuEvent *event);
/* Notices without waiting that pages have arrived at home. */
void kv_store_poll_home(KvStore *store);
/* The same when it is known. */
void kv_store_forget_home(KvStore *store);
/* Waits until all of them have.  KvError. */
int kv_store_settle(KvStore *store, ErrorDetail *reterr);
/* Gives back arenas that nobody uses, when the device can be stopped for it. */
void kv_store_trim(KvStore *store);
/* Compatibility mode, else nothing: the budget is charged for what its caches hold now and @more_bytes.  False when that is not to be had. */
bool kv_store_charge_host(KvStore *store, uint64_t more_bytes);
/* KvBudget.reclaim: drops the oldest checkpoint of the store. */
bool kv_store_drop_checkpoint(void *userdata);

/* A block as kv_arenas_take(): resident as long as there is room for it. */
int kv_section_take(KvSection *section, const KvBlock *after, uint32_t first_page, uint32_t n_filled, KvBlock **ret,
                    ErrorDetail *reterr);
/* Static growth: each cache has the right to all of its blocks.  KvError or negative errno. */
int kv_store_reserve(KvStore *store, ErrorDetail *reterr);
void kv_store_unreserve(KvStore *store);

/* An empty past; a copy that shares everything; NULL when memory is short. */
KvPast *kv_past_new(KvStore *store);
KvPast *kv_past_copy(const KvPast *past);
KvPast *kv_past_free(KvPast *past); /* takes NULL, returns NULL */
/* Keeps blocks for @length tokens, checkpoints up to it; of encoder output all. */
void kv_past_drop_beyond(KvPast *past, uint32_t length);
/* Lets go of blocks that are out of sight. */
void kv_past_drop_unseen(KvPast *past);
/* Keeps at most @n_keep tokens, as kv_cache_crop(). */
int kv_past_crop(KvPast *past, uint32_t n_keep, ErrorDetail *reterr);
/* As new. */
void kv_past_clear(KvPast *past);
void kv_past_drop_checkpoint(KvPast *past, uint32_t index);
/* What was kept for a recording: checkpoints, snapshots, what is out of sight. */
void kv_past_drop_recorded(KvPast *past);
KvCheckpoint *kv_checkpoint_new(const KvStore *store);
KvCheckpoint *kv_checkpoint_free(const KvStore *store, KvCheckpoint *checkpoint); /* takes NULL, returns NULL */
DEFINE_CLEANUP(KvPast, kv_past_free)

static inline bool kv_section_is_cross(const KvSection *section)
{
    return section->sizes->kind == KV_LAYER_CROSS;
}

static inline bool kv_section_is_windowed(const KvSection *section)
{
    return section->sizes->attend.visibility.window > 0;
}

/* Tokens that a section has of the sequence. */
static inline uint32_t kv_past_tokens(const KvPast *past, uint32_t s)
{
    return past->store->sizes.sections[s].kind == KV_LAYER_CROSS ? past->cross_length : past->length;
}

/* The lowest position that a sequence of this length needs in full precision, to go on. */
static inline uint32_t kv_needed_from(const KvSection *section, uint32_t length)
{
    return kv_packed_pages(section->sizes->attend.form, length) * KV_PAGE_TOKENS;
}

/* The first page that a sequence of this length needs, to go on or to read its tail back. */
static inline uint32_t kv_kept_page(const KvSection *section, uint32_t length)
{
    uint32_t seen = attend_first_visible(section->sizes->attend.visibility, 0, length), needed = kv_needed_from(section, length);

    return MIN(seen, needed) / KV_PAGE_TOKENS;
}

static inline uint32_t kv_section_first_page(const KvSectionPast *section)
{
    bool any = section->first_block < section->n_blocks;

    return section->first_block * KV_BLOCK_PAGES + (any ? section->blocks[section->first_block]->first_page : 0);
}

static inline uint32_t kv_blocks_of(uint32_t length)
{
    return (length / KV_PAGE_TOKENS + KV_BLOCK_PAGES - 1) / KV_BLOCK_PAGES;
}

/* Layers that the pass has nothing to do with are done when those before them are. */
void kv_pass_skip_layers(KvPass *pass);

/* Recording: a checkpoint, when a pass of @n_tokens is going to overwrite recent tokens that a packed form needs to go back. */
int kv_cache_save_recorded(KvCache *cache, uint32_t n_tokens, ErrorDetail *reterr);
static inline bool kv_section_is_packed(const KvSection *section)
{
    return kv_form_is_coded(section->sizes->attend.form);
}

void kv_cache_link(KvCache *cache, KvStore *store);
void kv_cache_unlink(KvCache *cache);

/* Makes room for the entry's tokens in the sections that the pass writes: claims or copies the incomplete block, takes new ones.  KvError
 * or negative errno; then kv_cache_shrink() undoes what was done. */
int kv_cache_grow(KvCache *cache, KvPassEntry *entry, ErrorDetail *reterr);
void kv_cache_shrink(KvPassEntry *entry);
/* The tail rings were overwritten up to position @end: goes back to where they are exact (kv_pass_abort). */
int kv_cache_recover(KvCache *cache, uint32_t end, ErrorDetail *reterr);
