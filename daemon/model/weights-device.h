#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model's weights as a pass finds them: buffers that stay, host memory read in place, and a ring of staging buffers.
 *
 * A pass reads its streamed parts in a known order: those of the spans, then those of the head, the latter once for each batch of rows
 * that want logits.  Number g of that order passes through slot (head + g) % n_slots.  When the launches that read numbers g and g + 1 are
 * queued, the copy of number g + n_slots is queued on the upload queue, where the cache's tiles travel too: it waits for the launch of g
 * (write after read) and for nothing else; launches wait for the copy's event.  Every command waits only for commands that were queued
 * before it, so the two rings cannot wait for each other in a circle.  After the last part the ring goes on with the first of the next pass;
 * a slot that already holds what it should is not filled again, which is all that makes a prefetch count.
 *
 * The copy comes after launch g + 1, which the host queues long before the device is there, because PoCL begins what was queued last first
 * among commands that become ready at once, and both its workers turn to a kernel that has begun: with the copy queued before, copies and
 * kernels took turns (2 slots, 71 MB a token: 12.3 ms instead of 9.2).
 *
 * Where the device's memory is the host's the processors that compute make the copies too, each one alone: there parts travel by the upload
 * and the download queue in turn, so that a processor without work can begin the next copy while another still makes the last one.
 */

#include "daemon/model/placement.h"
#include "opencl/gpu.h"

#define WEIGHTS_SLOT_EMPTY UINT32_MAX

typedef struct WeightsSlot {
    GpuBuffer *buffer;
    GpuEvent *filled; /* the copy of what is in it, or on its way */
    GpuEvent *read;   /* the last launch that read it */
    uint32_t part;
} WeightsSlot;

typedef struct WeightsDevice {
    Gpu *gpu;            /* borrowed */
    Weights *weights;    /* borrowed */
    Placement placement;
    GpuBuffer **buffers; /* (n_blocks): whole blocks and those in place; the head's first rows; NULL: streamed, or rows only */
    GpuBuffer *window;   /* tiles of the embedding */
    WeightsSlot slots[PLACEMENT_MAX_SLOTS];
    uint32_t *order;     /* streamed parts of the spans, then those of the head */
    uint32_t n_spans_order, n_order, n_last; /* of these in the last span, which a pass without logits leaves out */
    uint64_t head;       /* number of the pass's first part, counted over all passes */
    uint64_t n_queued, n_read; /* parts of this pass: copies queued, launches queued */
    uint32_t n_pass_spans;     /* parts of spans in this pass */
    uint64_t n_pass;           /* all parts of this pass */
    bool broken;         /* a change of place failed half-way: no pass can be run any more */
} WeightsDevice;
#define WEIGHTS_DEVICE_NULL ((WeightsDevice){.gpu = NULL})

/* Takes @placement (its contents).  Uploads what stays, and gives the host's copy of that back.  0, GPU_E_OVER_BUDGET, another code of
 * gpu.h, or negative errno. */
int weights_device_init(WeightsDevice *device, Gpu *gpu, Weights *weights, Placement *placement, ErrorDetail *reterr);
void weights_device_deinit(WeightsDevice *device);
/* Between passes: moves to another placement (taken); what leaves the device and is no longer in host memory comes back from there.  On
 * error before anything was given up nothing has changed; later, `broken` is set. */
int weights_device_move(WeightsDevice *device, Placement *placement, ErrorDetail *reterr);

/* A pass begins that reads the spans, without the last one when @n_head_rounds is 0, and the head that many times. */
int weights_device_begin(WeightsDevice *device, uint32_t n_head_rounds);
/* Where the part is, and what the launch has to wait for (borrowed; NULL: nothing). */
int weights_device_acquire(WeightsDevice *device, uint32_t part, const GpuBuffer **ret, GpuEvent **ret_wait);
/* The last launch that reads it is queued, with @event (taken). */
int weights_device_release(WeightsDevice *device, uint32_t part, GpuEvent *event);
/* A pass was given up, and all queues have drained. */
void weights_device_abort(WeightsDevice *device);
