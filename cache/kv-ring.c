/* SPDX-License-Identifier: Apache-2.0 */
/* The ring of staging buffers. */

#include "cache/kv-ring.h"
#include "cache/kv-error.h"

#include <string.h>

#define PIECES      4
#define PIECE_LEAST (256u << 10) /* below that a copy's own cost counts */

/* Loads of the longest tile. */
static uint32_t most_loads(const KvSizes *sizes)
{
    uint32_t most = 1;

    for (uint32_t s = 0; s < sizes->n_sections; s++)
        if (!sizes->sections[s].direct)
            most = MAX(most, sizes->sections[s].tile_blocks);
    return most;
}

int kv_ring_init(KvRing *ring, Gpu *gpu, const KvSizes *sizes, ErrorDetail *reterr)
{
    int r;

    *ring = (KvRing){.gpu = gpu, .n_slots = sizes->plan.n_slots, .n_layers = sizes->n_layers, .tile_bytes = sizes->tile_bytes};
    ring->layers = calloc(sizes->n_layers, sizeof(KvRingLayer));
    if (!ring->layers)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t i = 0; i < ring->n_slots; i++) {
        ring->slots[i].loads = calloc(most_loads(sizes), sizeof(KvLoad));
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
    ring->dropped = gpu_event_unref(ring->dropped);
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
    free(ring->layers);
    *ring = KV_RING_NULL;
}

/* Blocks of different sections are different, so the plane and they tell everything. */
static bool slot_holds(const KvRingSlot *slot, const KvTile *tile, const KvLoad *loads, uint32_t plane)
{
    if (slot->plane != plane || slot->n_loads != tile->n_loads)
        return false;
    for (uint32_t i = 0; i < tile->n_loads; i++) {
        const KvLoad *has = &slot->loads[i], *wants = &loads[tile->first_load + i];

        if (wants->n_pages > 0 && (has->block != wants->block || has->serial != wants->serial || has->n_pages < wants->n_pages))
            return false;
    }
    return true;
}

/* A stretch of memory that is one on both sides: pages of an arena that go to places in the slot. */
typedef struct Stretch {
    const KvArena *arena;
    uint32_t from, to, n;
} Stretch;

static int copy_stretch(KvRing *ring, KvRingSlot *slot, const KvRingLayer *layer, const Stretch *stretch, GpuWait wait)
{
    uint64_t page_bytes = layer->arenas->options.page_bytes;

    if (stretch->n == 0)
        return 0;
    slot->filled = gpu_event_unref(slot->filled);
    return gpu_upload(ring->gpu, GPU_QUEUE_UPLOAD, slot->buffer, stretch->to * page_bytes,
                      stretch->arena->memory + layer->plane * stretch->arena->plane_bytes + stretch->from * page_bytes,
                      stretch->n * page_bytes, wait, "kv tile", &slot->filled);
}

/* Pages that go in one copy.  What is fetched for the next pass comes piece by piece: that pass's own inputs share the link, and would wait for
 * the whole tile that is under way when they are queued. */
static uint32_t most_pages(const KvRing *ring, const KvRingLayer *layer)
{
    uint64_t bytes = MAX(ring->tile_bytes / PIECES, (uint64_t)PIECE_LEAST);

    return ring->next ? (uint32_t)MAX(bytes / layer->arenas->options.page_bytes, (uint64_t)1) : UINT32_MAX;
}

/* Queues the copies of one tile into its slot: full blocks, one after the other in an arena, are one. */
static int slot_fill(KvRing *ring, KvRingSlot *slot, const KvTile *tile, const KvLoad *loads, const KvRingLayer *layer, GpuWait wait)
{
    uint32_t most = most_pages(ring, layer);
    Stretch stretch = {0};
    int r;

    if (slot->unread && slot->filled) {
        (void)gpu_event_unref(ring->dropped);
        ring->dropped = gpu_event_ref(slot->filled);
    }
    slot->unread = true;
    slot->n_loads = 0; /* until all is queued */
    for (uint32_t i = 0; i < tile->n_loads; i++) {
        const KvLoad *load = &loads[tile->first_load + i];

        for (uint32_t k = load->block->first_page; k < load->n_pages; k++) {
            uint32_t from = load->block->pages[k], to = i * KV_BLOCK_PAGES + k;

            if (stretch.arena == load->block->arena && stretch.n < most && stretch.from + stretch.n == from && stretch.to + stretch.n == to) {
                stretch.n++;
                continue;
            }
            r = copy_stretch(ring, slot, layer, &stretch, wait);
            if (r)
                return error_trace(r);
            stretch = (Stretch){load->block->arena, from, to, 1};
        }
    }
    r = copy_stretch(ring, slot, layer, &stretch, wait);
    if (r)
        return error_trace(r);
    memcpy(slot->loads, &loads[tile->first_load], tile->n_loads * sizeof(KvLoad));
    slot->n_loads = tile->n_loads;
    slot->plane = layer->plane;
    return 0;
}

static KvRingSlot *ring_slot(KvRing *ring, uint64_t number)
{
    return &ring->slots[(ring->head + number) % ring->n_slots];
}

/* Passes over layers that have no staged tile left; false at the end of the pass. */
static bool find_tile(const KvRing *ring, KvRingPlace *place)
{
    for (; place->layer < ring->n_layers; place->layer++, place->tile = 0) {
        const KvSchedule *schedule = ring->layers[place->layer].schedules[ring->next];

        if (schedule && place->tile < schedule->n_staged)
            return true;
    }
    return false;
}

/* Queues copies until the ring is as far ahead as it is long. */
static int ring_advance(KvRing *ring, KvHomeEvents home)
{
    KvRingPlace *place = &ring->queued;
    int r;

    for (; place->number < ring->n_read + ring->n_slots && find_tile(ring, place); place->number++, place->tile++) {
        const KvRingLayer *layer = &ring->layers[place->layer];
        const KvSchedule *schedule = layer->schedules[ring->next];
        const KvTile *tile = &schedule->tiles[schedule->staged[place->tile]];
        KvRingSlot *slot = ring_slot(ring, place->number);
        GpuEvent *waits[2] = {slot->read, tile->serial > home.settled ? home.events[layer->owner] : NULL};

        if (slot_holds(slot, tile, schedule->loads, layer->plane))
            continue;
        r = slot_fill(ring, slot, tile, schedule->loads, layer, (GpuWait){waits, N_ELEMENTS(waits)});
        if (r)
            return error_trace(r);
    }
    return gpu_flush(ring->gpu, GPU_QUEUE_UPLOAD);
}

int kv_ring_begin(KvRing *ring, bool next, KvHomeEvents home)
{
    kv_ring_end(ring);
    ring->next = next;
    return ring->n_slots > 0 ? ring_advance(ring, home) : 0;
}

int kv_ring_acquire(KvRing *ring, KvHomeEvents home, KvRingSlot **ret)
{
    int r = ring_advance(ring, home);

    if (r)
        return error_trace(r);
    *ret = ring_slot(ring, ring->n_read);
    return 0;
}

int kv_ring_release(KvRing *ring, KvHomeEvents home, GpuEvent *event)
{
    KvRingSlot *slot = ring_slot(ring, ring->n_read);

    (void)gpu_event_unref(slot->read);
    slot->read = event;
    slot->unread = false;
    ring->n_read++;
    return ring_advance(ring, home);
}

void kv_ring_readers(const KvRing *ring, const KvBlock *block, uint32_t page, uint32_t plane, uint32_t *slots)
{
    for (uint32_t i = 0; i < ring->n_slots; i++) {
        const KvRingSlot *slot = &ring->slots[i];

        for (uint32_t l = 0; slot->unread && slot->plane == plane && l < slot->n_loads; l++)
            if (slot->loads[l].block == block && slot->loads[l].n_pages > page)
                *slots |= UINT32_C(1) << i;
    }
}

void kv_ring_end(KvRing *ring)
{
    ring->head += ring->n_read;
    ring->n_read = 0;
    ring->queued = (KvRingPlace){0};
}
