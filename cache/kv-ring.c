/* SPDX-License-Identifier: Apache-2.0 */
/* The ring of staging buffers. */

#include "cache/kv-ring.h"
#include "cache/kv-error.h"

#include <string.h>

int kv_ring_init(KvRing *ring, Gpu *gpu, const KvSizes *sizes, const KvArenas *arenas, ErrorDetail *reterr)
{
    int r;

    *ring = (KvRing){
        .gpu = gpu,
        .arenas = arenas,
        .n_slots = sizes->plan.n_slots,
        .n_layers = sizes->n_layers,
        .block_bytes = sizes->block_layer_bytes,
    };
    for (uint32_t i = 0; i < ring->n_slots; i++) {
        ring->slots[i].loads = calloc(sizes->policy.tile_blocks, sizeof(KvLoad));
        if (!ring->slots[i].loads)
            return error_origin(KV_E_HOST_MEMORY);
        r = gpu_buffer_new(gpu, GPU_PURPOSE_STAGING, sizes->tile_bytes, &ring->slots[i].buffer, reterr);
        if (r)
            return error_trace(kv_error(r));
    }
    return 0;
}

void kv_ring_clear(KvRing *ring)
{
    for (uint32_t i = 0; i < ring->n_slots; i++) {
        ring->slots[i].filled = gpu_event_unref(ring->slots[i].filled);
        ring->slots[i].read = gpu_event_unref(ring->slots[i].read);
        ring->slots[i].n_loads = 0;
    }
}

void kv_ring_deinit(KvRing *ring)
{
    kv_ring_clear(ring);
    for (uint32_t i = 0; i < ring->n_slots; i++) {
        ring->slots[i].buffer = gpu_buffer_free(ring->slots[i].buffer);
        free(ring->slots[i].loads);
    }
    *ring = KV_RING_NULL;
}

static bool slot_holds(const KvRingSlot *slot, const KvTile *tile, const KvLoad *loads, uint32_t layer)
{
    if (slot->layer != layer || slot->n_loads != tile->n_loads)
        return false;
    for (uint32_t i = 0; i < tile->n_loads; i++) {
        const KvLoad *has = &slot->loads[i], *wants = &loads[tile->first_load + i];

        if (wants->n_pages > 0 && (has->block != wants->block || has->serial != wants->serial || has->n_pages < wants->n_pages))
            return false;
    }
    return true;
}

/* How many loads from @loads[0] on are one stretch of memory on both sides: full blocks, one after the other in an arena. */
static uint32_t run_length(const KvLoad *loads, uint32_t n)
{
    uint32_t length = 1;

    while (length < n && loads[length - 1].n_pages == KV_BLOCK_PAGES && loads[length].n_pages > 0 &&
           loads[length].block->arena == loads[length - 1].block->arena &&
           loads[length].block->index == loads[length - 1].block->index + 1)
        length++;
    return length;
}

/* Queues the copies of one tile into its slot. */
static int slot_fill(KvRing *ring, KvRingSlot *slot, const KvTile *tile, const KvLoad *loads, uint32_t layer, GpuWait wait)
{
    uint32_t page_bytes = ring->arenas->options.page_bytes, run;
    int r;

    slot->n_loads = 0; /* until all is queued */
    for (uint32_t i = 0; i < tile->n_loads; i += run) {
        const KvLoad *first = &loads[tile->first_load + i];

        run = 1;
        if (first->n_pages == 0)
            continue;
        run = run_length(first, tile->n_loads - i);
        slot->filled = gpu_event_unref(slot->filled);
        r = gpu_upload(ring->gpu, GPU_QUEUE_UPLOAD, slot->buffer, i * ring->block_bytes,
                       first->block->arena->memory + kv_block_offset(ring->arenas, first->block, layer, 0),
                       (run - 1) * ring->block_bytes + (uint64_t)first[run - 1].n_pages * page_bytes, wait, "kv tile",
                       &slot->filled);
        if (r)
            return error_trace(r);
    }
    memcpy(slot->loads, &loads[tile->first_load], tile->n_loads * sizeof(KvLoad));
    slot->n_loads = tile->n_loads;
    slot->layer = layer;
    return 0;
}

static KvRingSlot *ring_slot(KvRing *ring, uint64_t number)
{
    return &ring->slots[(ring->head + number) % ring->n_slots];
}

/* Queues copies until the ring is as far ahead as it is long. */
static int ring_advance(KvRing *ring, const KvSchedule *schedule, KvHomeEvents home)
{
    uint64_t end = (uint64_t)ring->n_layers * schedule->n_staged;
    int r;

    for (end = MIN(end, ring->n_read + ring->n_slots); ring->n_queued < end; ring->n_queued++) {
        uint32_t layer = (uint32_t)(ring->n_queued / schedule->n_staged);
        const KvTile *tile = &schedule->tiles[schedule->staged[ring->n_queued % schedule->n_staged]];
        KvRingSlot *slot = ring_slot(ring, ring->n_queued);
        GpuEvent *waits[2] = {slot->read, tile->serial > home.settled ? home.events[layer] : NULL};

        if (slot_holds(slot, tile, schedule->loads, layer))
            continue;
        r = slot_fill(ring, slot, tile, schedule->loads, layer, (GpuWait){waits, N_ELEMENTS(waits)});
        if (r)
            return error_trace(r);
    }
    return gpu_flush(ring->gpu, GPU_QUEUE_UPLOAD);
}

int kv_ring_begin(KvRing *ring, const KvSchedule *schedule, KvHomeEvents home)
{
    kv_ring_end(ring);
    return schedule->n_staged > 0 ? ring_advance(ring, schedule, home) : 0;
}

int kv_ring_acquire(KvRing *ring, const KvSchedule *schedule, KvHomeEvents home, KvRingSlot **ret)
{
    int r = ring_advance(ring, schedule, home);

    if (r)
        return error_trace(r);
    *ret = ring_slot(ring, ring->n_read);
    return 0;
}

int kv_ring_release(KvRing *ring, const KvSchedule *schedule, KvHomeEvents home, GpuEvent *event)
{
    KvRingSlot *slot = ring_slot(ring, ring->n_read);

    (void)gpu_event_unref(slot->read);
    slot->read = event;
    ring->n_read++;
    return ring_advance(ring, schedule, home);
}

void kv_ring_end(KvRing *ring)
{
    ring->head += ring->n_read;
    ring->n_read = ring->n_queued = 0;
}
