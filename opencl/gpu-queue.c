/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Commands: three in-order queues, copies between host and device, events.
 *
 * Every command gets a GpuEvent from a pool and stands in Gpu.pending until a sweep (gpu-step.c) has seen it complete
 * and checked it, so a failure is noticed even when the caller kept no event.  Once the pool is as large as a step, a
 * command allocates nothing of ours.
 */

#include "opencl/gpu-internal.h"
#include "quant/base/checked.h"

#include <string.h>
#include <sys/mman.h>

/* Without gpu_step_finish() (loading weights) pending commands are swept when there are this many. */
#define SWEEP_AT_LEAST 4096

static int events_grow(Gpu *gpu)
{
    GpuEventBlock *block = calloc(1, sizeof(*block));

    if (!block)
        return error_origin(-ENOMEM);
    block->next = gpu->event_blocks;
    gpu->event_blocks = block;
    for (size_t i = 0; i < GPU_EVENT_BLOCK; i++) {
        block->events[i].next_free = gpu->free_events;
        gpu->free_events = &block->events[i];
    }
    return 0;
}

static void event_recycle(GpuEvent *event)
{
    Gpu *gpu = event->gpu;

    if (event->cl && !gpu->hung)
        (void)clReleaseEvent(event->cl);
    *event = (GpuEvent){.next_free = gpu->free_events};
    gpu->free_events = event;
}

GpuEvent *gpu_event_ref(GpuEvent *event)
{
    if (event)
        event->n_refs++;
    return event;
}

GpuEvent *gpu_event_unref(GpuEvent *event)
{
    if (event && --event->n_refs == 0)
        event_recycle(event);
    return NULL;
}

int gpu_event_status(const GpuEvent *event)
{
    cl_int status;
    int r;

    if (event->complete)
        return 1;
    if (gpu_is_lost(event->gpu))
        return -EIO;
    r = CL_TRY(event->gpu, clGetEventInfo(event->cl, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(status), &status, NULL));
    if (r || status < 0)
        return -EIO;
    return status == CL_COMPLETE;
}

static int pending_reserve(Gpu *gpu)
{
    GpuEvent **pending;
    size_t n;

    if (gpu->n_pending >= gpu->sweep_at) {
        if (gpu_sweep(gpu, NULL))
            return error_origin(-EIO);
        gpu->sweep_at = MAX(2 * gpu->n_pending, (size_t)SWEEP_AT_LEAST);
    }
    if (gpu->n_pending < gpu->n_pending_allocated)
        return 0;
    n = MAX(2 * gpu->n_pending_allocated, (size_t)GPU_EVENT_BLOCK);
    pending = realloc(gpu->pending, n * sizeof(*pending));
    if (!pending)
        return error_origin(-ENOMEM);
    gpu->pending = pending;
    gpu->n_pending_allocated = n;
    return 0;
}

int gpu_command_begin(Gpu *gpu, GpuQueue queue, GpuCommandKind kind, const char *label, uint64_t bytes, GpuEvent **ret)
{
    GpuEvent *event;
    int r;

    if (gpu_is_lost(gpu))
        return error_origin(-ENODEV);
    if (gpu->sweep_at == 0)
        gpu->sweep_at = SWEEP_AT_LEAST;
    r = pending_reserve(gpu);
    if (!r && !gpu->free_events)
        r = events_grow(gpu);
    if (r)
        return error_trace(r);
    event = gpu->free_events;
    gpu->free_events = event->next_free;
    *event = (GpuEvent){.gpu = gpu, .n_refs = 1, .queue = queue, .kind = kind, .label = label, .bytes = bytes};
    *ret = event;
    return 0;
}

int gpu_command_end(Gpu *gpu, GpuEvent *event, cl_int status, const char *call, GpuEvent **ret_event)
{
    int r = CL_CHECK(gpu, status, call);

    if (r) {
        event->cl = NULL;
        (void)gpu_event_unref(event);
        return r;
    }
    event->sequence = ++gpu->sequence;
    (void)gpu_event_unref(gpu->last[event->queue]);
    gpu->last[event->queue] = gpu_event_ref(event);
    if (ret_event)
        *ret_event = gpu_event_ref(event);
    gpu->pending[gpu->n_pending++] = event;
    return 0;
}

static int waits_reserve(Gpu *gpu, size_t n)
{
    cl_event *waits;

    if (n <= gpu->n_waits_allocated)
        return 0;
    if (n > UINT32_MAX / 2)
        return error_origin(-EINVAL);
    n = MAX(n, (size_t)64);
    waits = realloc(gpu->waits, n * sizeof(*waits));
    if (!waits)
        return error_origin(-ENOMEM);
    gpu->waits = waits;
    gpu->n_waits_allocated = n;
    return 0;
}

int gpu_command_waits(Gpu *gpu, GpuQueue queue, GpuWait wait, cl_uint *ret_n, const cl_event **ret)
{
    cl_uint n = 0;
    int r = waits_reserve(gpu, wait.n_events + 1);

    if (r)
        return error_trace(r);
    for (size_t i = 0; i < wait.n_events; i++) {
        const GpuEvent *event = wait.events[i];

        if (!event || event->complete || event->queue == queue)
            continue;
        /* A queue that waits for a command which nobody submits waits for ever. */
        if (event->sequence > gpu->flushed[event->queue]) {
            r = gpu_flush(gpu, event->queue);
            if (r)
                return error_trace(r);
        }
        gpu->waits[n++] = event->cl;
    }
    if (queue == GPU_QUEUE_COMPUTE && gpu->last_input && !gpu->last_input->complete)
        gpu->waits[n++] = gpu->last_input->cl;
    *ret_n = n;
    *ret = n ? gpu->waits : NULL;
    return 0;
}

int gpu_flush(Gpu *gpu, GpuQueue queue)
{
    int r;

    if (gpu_is_lost(gpu))
        return error_origin(-ENODEV);
    if (!gpu->last[queue] || gpu->flushed[queue] >= gpu->last[queue]->sequence)
        return 0;
    r = CL_TRY(gpu, clFlush(gpu->queues[queue]));
    if (r)
        return r;
    gpu->flushed[queue] = gpu->last[queue]->sequence;
    return 0;
}

static bool in_range(const GpuBuffer *buffer, uint64_t offset, uint64_t bytes)
{
    uint64_t end;

    return checked_add(offset, bytes, &end) && end <= buffer->bytes;
}

void gpu_free_host(const Gpu *gpu, void *memory)
{
    if (!gpu || !gpu->hung)
        free(memory);
}

void gpu_unmap_host(const Gpu *gpu, void *memory, size_t bytes)
{
    if (!gpu || !gpu->hung)
        (void)munmap(memory, bytes);
}

int gpu_upload(Gpu *gpu, GpuQueue queue, GpuBuffer *to, uint64_t offset, const void *from, uint64_t bytes, GpuWait wait,
               const char *label, GpuEvent **ret_event)
{
    const cl_event *waits;
    GpuEvent *event;
    cl_uint n_waits;
    cl_int status;
    int r;

    if (!in_range(to, offset, bytes) || bytes == 0)
        return error_origin(-EINVAL);
    r = gpu_command_begin(gpu, queue, GPU_COMMAND_UPLOAD, label, bytes, &event);
    if (r)
        return error_trace(r);
    r = gpu_command_waits(gpu, queue, wait, &n_waits, &waits);
    if (r) {
        (void)gpu_event_unref(event);
        return error_trace(r);
    }
    status = clEnqueueWriteBuffer(gpu->queues[queue], to->cl, CL_FALSE, offset, bytes, from, n_waits, waits, &event->cl);
    r = gpu_command_end(gpu, event, status, "clEnqueueWriteBuffer", ret_event);
    if (r)
        return error_trace(r);
    if (queue == GPU_QUEUE_COMPUTE) {
        (void)gpu_event_unref(gpu->last_input);
        gpu->last_input = gpu_event_ref(gpu->last[queue]);
    }
    gpu->counters.n_uploads++;
    gpu->counters.upload_bytes += bytes;
    return 0;
}

int gpu_download(Gpu *gpu, GpuQueue queue, const GpuBuffer *from, uint64_t offset, void *to, uint64_t bytes,
                 GpuWait wait, const char *label, GpuEvent **ret_event)
{
    const cl_event *waits;
    GpuEvent *event;
    cl_uint n_waits;
    cl_int status;
    int r;

    if (!in_range(from, offset, bytes) || bytes == 0)
        return error_origin(-EINVAL);
    r = gpu_command_begin(gpu, queue, GPU_COMMAND_DOWNLOAD, label, bytes, &event);
    if (r)
        return error_trace(r);
    r = gpu_command_waits(gpu, queue, wait, &n_waits, &waits);
    if (r) {
        (void)gpu_event_unref(event);
        return error_trace(r);
    }
    status = clEnqueueReadBuffer(gpu->queues[queue], from->cl, CL_FALSE, offset, bytes, to, n_waits, waits, &event->cl);
    r = gpu_command_end(gpu, event, status, "clEnqueueReadBuffer", ret_event);
    if (r)
        return error_trace(r);
    gpu->counters.n_downloads++;
    gpu->counters.download_bytes += bytes;
    return 0;
}

int gpu_copy(Gpu *gpu, GpuQueue queue, GpuBuffer *to, uint64_t to_offset, const GpuBuffer *from, uint64_t from_offset,
             uint64_t bytes, GpuWait wait, const char *label, GpuEvent **ret_event)
{
    const cl_event *waits;
    GpuEvent *event;
    cl_uint n_waits;
    cl_int status;
    int r;

    if (!in_range(to, to_offset, bytes) || !in_range(from, from_offset, bytes) || bytes == 0)
        return error_origin(-EINVAL);
    r = gpu_command_begin(gpu, queue, GPU_COMMAND_COPY, label, bytes, &event);
    if (r)
        return error_trace(r);
    r = gpu_command_waits(gpu, queue, wait, &n_waits, &waits);
    if (r) {
        (void)gpu_event_unref(event);
        return error_trace(r);
    }
    status = clEnqueueCopyBuffer(gpu->queues[queue], from->cl, to->cl, from_offset, to_offset, bytes, n_waits, waits,
                                 &event->cl);
    r = gpu_command_end(gpu, event, status, "clEnqueueCopyBuffer", ret_event);
    if (r)
        return error_trace(r);
    gpu->counters.n_copies++;
    gpu->counters.copy_bytes += bytes;
    return 0;
}

int gpu_fill_zero(Gpu *gpu, GpuQueue queue, GpuBuffer *buffer, uint64_t offset, uint64_t bytes)
{
    static const unsigned char zero[16];
    size_t pattern = sizeof(zero);
    GpuEvent *event;
    cl_int status;
    int r;

    if (!in_range(buffer, offset, bytes) || bytes == 0)
        return error_origin(-EINVAL);
    while (offset % pattern || bytes % pattern)
        pattern /= 2;
    r = gpu_command_begin(gpu, queue, GPU_COMMAND_FILL, "fill zero", bytes, &event);
    if (r)
        return error_trace(r);
    status = clEnqueueFillBuffer(gpu->queues[queue], buffer->cl, zero, pattern, offset, bytes, 0, NULL, &event->cl);
    r = gpu_command_end(gpu, event, status, "clEnqueueFillBuffer", NULL);
    if (r)
        return error_trace(r);
    gpu->counters.n_copies++;
    gpu->counters.copy_bytes += bytes;
    return 0;
}
