#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring of staging buffers: tiles on their way through the device.
 *
 * A pass reads its staged tiles in a known order: those of layer 0, of layer 1 and so on, whichever sections the layers belong to.
 * Number g of that order passes through slot (head + g) % n_slots.  As soon as the kernel that reads number g is queued, the copy of
 * number g + n_slots is queued behind it: it waits for that kernel's event (write after read) and for the pages' way home, and for
 * nothing else; the kernels that read it wait for its own event.  So copies run ahead across layers as far as the ring is long, and
 * after the last layer into the next pass.  A slot that already holds a tile is not filled again, which is all that makes a
 * prefetch count.
 */

#include "cache/kv-schedule.h"

typedef struct KvRingSlot {
    GpuBuffer *buffer;
    GpuEvent *filled; /* the copy of what is in it, or on its way */
    GpuEvent *read;   /* the last kernel that read it */
    bool unread;      /* no kernel reads it yet */
    uint32_t plane, n_loads;
    KvLoad *loads;    /* what is in it (max_loads entries); n_loads 0: nothing */
} KvRingSlot;

/* Where a layer's tiles come from. */
typedef struct KvRingLayer {
    const KvArenas *arenas;
    const KvSchedule *schedules[2]; /* of the pass in progress, of the one to come; NULL: nothing is staged */
    uint32_t plane;                 /* of the layer in the arenas */
    uint32_t owner;                 /* the layer that sends these pages home */
} KvRingLayer;

/* A tile in the order of reading. */
typedef struct KvRingPlace {
    uint64_t number;
    uint32_t layer, tile; /* of schedule->staged */
} KvRingPlace;

typedef struct KvRing {
    Gpu *gpu;
    KvRingSlot slots[KV_MAX_SLOTS];
    KvRingLayer *layers; /* (n_layers) */
    uint32_t n_slots, n_layers;
    uint64_t tile_bytes; /* of a slot */
    bool next;           /* it reads for the pass to come */
    uint64_t head;       /* number of the pass's first tile, counted over all passes */
    KvRingPlace queued;  /* the first tile of this pass whose copy is not queued */
    uint64_t n_read;     /* tiles of this pass whose kernels are queued */
    GpuEvent *dropped;   /* the last copy that was queued and then not wanted */
} KvRing;

/* What copies of one layer wait for: pages of passes after @settled may still be on their way home. */
typedef struct KvHomeEvents {
    GpuEvent *const *events; /* per layer, NULL entries: nothing on its way */
    uint64_t settled;
} KvHomeEvents;

#define KV_RING_NULL ((KvRing){0})

/* KvError or negative errno.  The layers are all zero: the caller fills them in. */
int kv_ring_init(KvRing *ring, Gpu *gpu, const KvSizes *sizes, ErrorDetail *reterr);
void kv_ring_deinit(KvRing *ring);

/* Starts a pass, or with @next continues into the pass to come: queues the copies of its first tiles. */
int kv_ring_begin(KvRing *ring, bool next, KvHomeEvents home);
/* The slot that holds the next staged tile in order. */
int kv_ring_acquire(KvRing *ring, KvHomeEvents home, KvRingSlot **ret);
/* The kernels that read it are queued, the last with @event (taken): queues what comes next. */
int kv_ring_release(KvRing *ring, KvHomeEvents home, GpuEvent *event);
/* Copies that may still read page @page of @block in the plane: one that was queued ahead and is not wanted any more, since the past was cut
 * or its block has another owner, may read while new content arrives.  @slots: bits of those of the slots, added to. */
void kv_ring_readers(const KvRing *ring, const KvBlock *block, uint32_t page, uint32_t plane, uint32_t *slots);
/* The pass is over, or given up. */
void kv_ring_end(KvRing *ring);
/* Forgets what is in the slots; no copy may be in flight. */
void kv_ring_clear(KvRing *ring);
