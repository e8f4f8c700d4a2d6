/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers of weights, and the ring. */

#include "daemon/model/weights-device.h"

#include <string.h>

/* What is fetched for the next pass comes in pieces: that pass's own inputs share the link, and would wait for all of what is under way.
 * Smaller ones cost more than they save: every copy has its latency and its hand-over (256 KiB: 2 % of a step at 3 GB/s). */
#define AHEAD_BYTES (UINT64_C(1) << 20)

/* ---- buffers ---------------------------------------------------------------------------------------------------------------- */

/* Bytes of a block's buffer; 0: it has none. */
static uint64_t buffer_bytes(const Weights *weights, const Placement *placement, uint32_t block)
{
    if (placement->kinds[block] == PLACEMENT_DEVICE || placement->kinds[block] == PLACEMENT_IN_PLACE)
        return weights->blocks[block].bytes;
    if (block == weights->output.block)
        return placement->head_rows / WEIGHT_TILE_ROWS * weights->output.tile_bytes;
    return 0;
}

static int upload(WeightsDevice *device, uint32_t block, uint64_t bytes, ErrorDetail *reterr)
{
    const uint8_t *from = weights_block(device->weights, block);
    int r;

    if (!from)
        return error_detail_set(reterr, -EINVAL, "this model file was uploaded before: open it again");
    r = gpu_buffer_new(device->gpu, GPU_PURPOSE_WEIGHTS, bytes, &device->buffers[block], reterr);
    if (!r)
        r = gpu_upload(device->gpu, GPU_QUEUE_UPLOAD, device->buffers[block], 0, from, bytes, GPU_WAIT_NONE, "weights", NULL);
    return r ? r : gpu_drain(device->gpu, reterr);
}

/* A block where the placement wants it. */
static int bring_block(WeightsDevice *device, uint32_t block, ErrorDetail *reterr)
{
    Weights *weights = device->weights;
    PlacementKind kind = device->placement.kinds[block];
    uint64_t bytes = buffer_bytes(weights, &device->placement, block);
    int r;

    if (bytes == 0)
        return 0;
    if (kind == PLACEMENT_IN_PLACE) {
        /* gpu_buffer_wrap() does not change what is only read; the image is ours to write, but nobody does. */
        void *memory = weights->image + weights->blocks[block].offset;

        if (!weights_block(weights, block))
            return error_detail_set(reterr, -EINVAL, "this model file was uploaded before: open it again");
        return gpu_buffer_wrap(device->gpu, memory, weights->blocks[block].bytes, &device->buffers[block], reterr);
    }
    r = upload(device, block, bytes, reterr);
    /* The host's copy goes as soon as the device has its own: but other rows of the head stream from there. */
    if (!r && kind == PLACEMENT_DEVICE)
        weights_release_block(weights, block);
    return r;
}

static int new_staging(WeightsDevice *device, ErrorDetail *reterr)
{
    const Placement *placement = &device->placement;
    int r = 0;

    for (uint32_t i = 0; i < placement->n_slots && !r; i++) {
        device->slots[i].part = WEIGHTS_SLOT_EMPTY;
        r = gpu_buffer_new(device->gpu, GPU_PURPOSE_STAGING, placement->slot_bytes, &device->slots[i].buffer, reterr);
    }
    if (!r && placement->window_bytes > 0)
        r = gpu_buffer_new(device->gpu, GPU_PURPOSE_STAGING, placement->window_bytes, &device->window, reterr);
    return r;
}

static void free_staging(WeightsDevice *device)
{
    for (uint32_t i = 0; i < PLACEMENT_MAX_SLOTS; i++) {
        (void)gpu_event_unref(device->slots[i].filled);
        (void)gpu_event_unref(device->slots[i].read);
        (void)gpu_buffer_free(device->slots[i].buffer);
        device->slots[i] = (WeightsSlot){.part = WEIGHTS_SLOT_EMPTY};
    }
    device->window = gpu_buffer_free(device->window);
}

static int new_order(WeightsDevice *device)
{
    const Placement *placement = &device->placement;
    uint32_t n_spans = weights_n_spans(device->weights), head = placement->span_parts[n_spans], last = placement->span_parts[n_spans - 1];
    uint32_t *order = realloc(device->order, MAX(placement->n_parts, 1u) * sizeof(*order));

    if (!order)
        return error_origin(-ENOMEM);
    device->order = order;
    device->n_order = device->n_spans_order = device->n_last = 0;
    for (uint32_t i = 0; i < placement->n_parts; i++) {
        if (!placement->parts[i].streamed)
            continue;
        order[device->n_order++] = i;
        device->n_spans_order += i < head;
        device->n_last += i >= last && i < head;
    }
    device->head = device->n_queued = device->n_read = device->n_pass = 0;
    return 0;
}

int weights_device_init(WeightsDevice *device, Gpu *gpu, Weights *weights, Placement *placement, ErrorDetail *reterr)
{
    int r;

    *device = (WeightsDevice){.gpu = gpu, .weights = weights, .placement = *placement};
    *placement = PLACEMENT_NULL;
    device->buffers = calloc(weights->n_blocks, sizeof(*device->buffers));
    r = device->buffers ? new_order(device) : error_origin(-ENOMEM);
    if (!r)
        r = new_staging(device, reterr);
    for (uint32_t i = 0; i < weights->n_blocks && !r; i++)
        r = bring_block(device, i, reterr);
    if (r)
        weights_device_deinit(device);
    return r;
}

void weights_device_deinit(WeightsDevice *device)
{
    /* Prefetched parts still come from the image. */
    if (device->gpu && device->n_order > 0 && !gpu_is_lost(device->gpu))
        (void)gpu_drain(device->gpu, NULL);
    free_staging(device);
    for (uint32_t i = 0; device->buffers && i < device->weights->n_blocks; i++)
        (void)gpu_buffer_free(device->buffers[i]);
    free(device->buffers);
    free(device->order);
    placement_clear(&device->placement);
    *device = WEIGHTS_DEVICE_NULL;
}

/* ---- moving ----------------------------------------------------------------------------------------------------------------- */

/* A block that leaves the device and is nowhere else comes back into the image, which is anonymous memory then. */
static int save_block(WeightsDevice *device, uint32_t block, ErrorDetail *reterr)
{
    Weights *weights = device->weights;
    WeightsBlock *b = &weights->blocks[block];
    int r;

    if (!b->absent)
        return 0;
    r = gpu_download(device->gpu, GPU_QUEUE_DOWNLOAD, device->buffers[block], 0, weights->image + b->offset, b->bytes, GPU_WAIT_NONE,
                     "weights", NULL);
    if (!r)
        r = gpu_drain(device->gpu, reterr);
    if (!r)
        b->absent = false;
    return r;
}

static bool changes(const WeightsDevice *device, const Placement *placement, uint32_t block)
{
    return device->placement.kinds[block] != placement->kinds[block] ||
           buffer_bytes(device->weights, &device->placement, block) != buffer_bytes(device->weights, placement, block);
}

int weights_device_move(WeightsDevice *device, Placement *placement, ErrorDetail *reterr)
{
    const Weights *weights = device->weights;
    int r = gpu_drain(device->gpu, reterr);

    for (uint32_t i = 0; i < weights->n_blocks && !r; i++)
        if (changes(device, placement, i))
            r = save_block(device, i, reterr);
    if (r) {
        placement_clear(placement);
        return r;
    }
    device->broken = true; /* until all is in its new place */
    free_staging(device);
    for (uint32_t i = 0; i < weights->n_blocks; i++)
        if (changes(device, placement, i))
            device->buffers[i] = gpu_buffer_free(device->buffers[i]);
    placement_clear(&device->placement);
    device->placement = *placement;
    *placement = PLACEMENT_NULL;
    r = new_order(device);
    if (!r)
        r = new_staging(device, reterr);
    for (uint32_t i = 0; i < weights->n_blocks && !r; i++)
        if (!device->buffers[i])
            r = bring_block(device, i, reterr);
    device->broken = r != 0;
    return r;
}

/* ---- the ring --------------------------------------------------------------------------------------------------------------- */

static WeightsSlot *slot_of(WeightsDevice *device, uint64_t number)
{
    return &device->slots[(device->head + number) % device->placement.n_slots];
}

/* Which part has a number of this pass; beyond its end, of the next pass, which will want logits too. */
static uint32_t part_of(const WeightsDevice *device, uint64_t number)
{
    uint32_t n_head = device->n_order - device->n_spans_order;

    if (number >= device->n_pass)
        return device->order[(number - device->n_pass) % device->n_order];
    if (number < device->n_pass_spans)
        return device->order[number];
    return device->order[device->n_spans_order + (number - device->n_pass_spans) % n_head];
}

/* A stretch of a part that lies side by side in both places. */
typedef struct Stretch {
    uint64_t from, to, bytes; /* in the block, in the slot */
} Stretch;

/* The copy queue of a part. */
static GpuQueue queue_of(const WeightsDevice *device, uint64_t number)
{
    return gpu_info(device->gpu)->unified_memory && (device->head + number) % 2 > 0 ? GPU_QUEUE_DOWNLOAD : GPU_QUEUE_UPLOAD;
}

/* In pieces of at most @most bytes; the last one's event is the slot's. */
static int copy_stretch(WeightsDevice *device, WeightsSlot *slot, const uint8_t *block, Stretch stretch, uint64_t most)
{
    GpuQueue queue = queue_of(device, device->n_queued);
    int r = 0;

    for (uint64_t done = 0, n; done < stretch.bytes && !r; done += n) {
        /* What was fetched and then not wanted came by the other queue, maybe. */
        GpuEvent *before[] = {slot->read, slot->filled}, *event = NULL;

        n = MIN(most, stretch.bytes - done);
        r = gpu_upload(device->gpu, queue, slot->buffer, stretch.to + done, block + stretch.from + done, n,
                       (GpuWait){before, N_ELEMENTS(before)}, "weights part", &event);
        if (!r) {
            (void)gpu_event_unref(slot->filled);
            slot->filled = event;
        }
    }
    return error_trace(r);
}

/* Queues the copies of one part: slices that lie side by side in both places go together. */
static int fill(WeightsDevice *device, WeightsSlot *slot, uint32_t index, uint64_t most)
{
    const PlacementPart *part = &device->placement.parts[index];
    const uint8_t *block = weights_block(device->weights, part->block);
    Stretch stretch = {0, 0, 0};
    int r;

    slot->part = WEIGHTS_SLOT_EMPTY; /* until all is queued */
    for (uint32_t p = 0; p < part->n_pieces; p++) {
        const PlacementPiece *piece = &device->placement.pieces[part->first_piece + p];

        for (uint32_t s = 0; s < piece->n_slices; s++) {
            const PlacementSlice *slice = &piece->slices[s];

            if (stretch.bytes > 0 && slice->from - stretch.from == slice->to - stretch.to) {
                stretch.bytes = slice->from - stretch.from + slice->bytes;
                continue;
            }
            r = copy_stretch(device, slot, block, stretch, most);
            if (r)
                return error_trace(r);
            stretch = (Stretch){slice->from, slice->to, slice->bytes};
        }
    }
    r = copy_stretch(device, slot, block, stretch, most);
    if (!r)
        slot->part = index;
    return error_trace(r);
}

/* Queues the copies of parts before number @end of this pass. */
static int queue_until(WeightsDevice *device, uint64_t end)
{
    int r;

    if (device->n_queued >= end)
        return 0;
    for (; device->n_queued < end; device->n_queued++) {
        WeightsSlot *slot = slot_of(device, device->n_queued);
        uint32_t part = part_of(device, device->n_queued);

        if (slot->part == part)
            continue;
        r = fill(device, slot, part, device->n_queued < device->n_pass ? UINT64_MAX : AHEAD_BYTES);
        if (r)
            return error_trace(r);
    }
    r = gpu_flush(device->gpu, GPU_QUEUE_UPLOAD);
    return r ? r : gpu_flush(device->gpu, GPU_QUEUE_DOWNLOAD);
}

/* As far ahead as the ring is long. */
static int queue_all(WeightsDevice *device)
{
    return queue_until(device, device->n_read + device->placement.n_slots);
}

int weights_device_begin(WeightsDevice *device, uint32_t n_head_rounds)
{
    if (device->n_order == 0)
        return 0;
    device->head += device->n_read;
    device->n_read = device->n_queued = 0;
    device->n_pass_spans = device->n_spans_order - (n_head_rounds > 0 ? 0 : device->n_last);
    device->n_pass = device->n_pass_spans + (uint64_t)n_head_rounds * (device->n_order - device->n_spans_order);
    return queue_all(device);
}

int weights_device_acquire(WeightsDevice *device, uint32_t part, const GpuBuffer **ret, GpuEvent **ret_wait)
{
    WeightsSlot *slot;
    int r;

    *ret_wait = NULL;
    if (!device->placement.parts[part].streamed) {
        *ret = device->buffers[device->placement.parts[part].block];
        return 0;
    }
    r = queue_until(device, device->n_read + 1);
    if (r)
        return error_trace(r);
    slot = slot_of(device, device->n_read);
    if (slot->part != part)
        return error_origin(-EINVAL);
    *ret = slot->buffer;
    *ret_wait = slot->filled;
    return 0;
}

int weights_device_release(WeightsDevice *device, uint32_t part, GpuEvent *event)
{
    WeightsSlot *slot;

    if (!device->placement.parts[part].streamed) {
        (void)gpu_event_unref(event);
        return 0;
    }
    slot = slot_of(device, device->n_read);
    (void)gpu_event_unref(slot->read);
    slot->read = event;
    device->n_read++;
    /* The slot of this launch waits for the next one, but at the end of the pass there is none. */
    return device->n_read == device->n_pass ? queue_all(device) : queue_until(device, device->n_read + device->placement.n_slots - 1);
}

void weights_device_abort(WeightsDevice *device)
{
    for (uint32_t i = 0; i < device->placement.n_slots; i++) {
        device->slots[i].filled = gpu_event_unref(device->slots[i].filled);
        device->slots[i].read = gpu_event_unref(device->slots[i].read);
        device->slots[i].part = WEIGHTS_SLOT_EMPTY;
    }
    device->head = device->n_read = device->n_queued = 0;
}
