#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring of staging buffers: tiles on their way through the device.
 *
 * A pass reads its staged tiles in a known order: those of layer 0, of layer 1 and so on.  Number g of that order passes through
 * slot (head + g) % n_slots.  As soon as the kernel that reads number g is queued, the copy of number g + n_slots is queued
 * behind it: it waits for that kernel's event (write after read) and for the pages' way home, and for nothing else; the kernels
 * that read it wait for its own event.  So copies run ahead across layers as far as the ring is long, and after the last layer
 * into the next pass.  A slot that already holds a tile is not filled again, which is all that makes a prefetch count.
 */

#include "cache/kv-schedule.h"

typedef struct KvRingSlot {
    GpuBuffer *buffer;
    GpuEvent *filled; /* the copy of what is in it, or on its way */
    GpuEvent *read;   /* the last kernel that read it */
    uint32_t layer, n_loads;
    KvLoad *loads;    /* what is in it (tile_blocks entries); n_loads 0: nothing */
} KvRingSlot;

typedef struct KvRing {
    Gpu *gpu;
    const KvArenas *arenas;
    KvRingSlot slots[KV_MAX_SLOTS];
    uint32_t n_slots, n_layers;
    uint64_t block_bytes; /* one layer's share */
    uint64_t head;        /* number of the pass's first tile, counted over all passes */
    uint64_t n_queued;    /* tiles of this pass whose copies are queued */
    uint64_t n_read;      /* tiles of this pass whose kernels are queued */
} KvRing;

/* What copies of one layer wait for: pages of passes after @settled may still be on their way home. */
typedef struct KvHomeEvents {
    GpuEvent *const *events; /* per layer, NULL entries: nothing on its way */
    uint64_t settled;
} KvHomeEvents;

#define KV_RING_NULL ((KvRing){0})

/* KvError or negative errno.  @arenas borrowed. */
int kv_ring_init(KvRing *ring, Gpu *gpu, const KvSizes *sizes, const KvArenas *arenas, ErrorDetail *reterr);
void kv_ring_deinit(KvRing *ring);

/* Starts a pass, or with @schedule of the pass to come continues into it: queues the copies of its first tiles. */
int kv_ring_begin(KvRing *ring, const KvSchedule *schedule, KvHomeEvents home);
/* The slot that holds the next staged tile in order, which is tile @index of @schedule in @layer. */
int kv_ring_acquire(KvRing *ring, const KvSchedule *schedule, KvHomeEvents home, KvRingSlot **ret);
/* The kernels that read it are queued, the last with @event (taken): queues what comes next. */
int kv_ring_release(KvRing *ring, const KvSchedule *schedule, KvHomeEvents home, GpuEvent *event);
/* The pass is over, or given up. */
void kv_ring_end(KvRing *ring);
/* Forgets what is in the slots; no copy may be in flight. */
void kv_ring_clear(KvRing *ring);
