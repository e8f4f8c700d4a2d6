/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waiting and checking.  A wait is a driver callback that posts a condition variable with a deadline: clFinish() has
 * none, and several drivers spin in it and in clWaitForEvents().  OpenCL runs the next command although an earlier one
 * failed, so every command's status is looked at before a step's results are used.
 */

#include "opencl/gpu-internal.h"

#include <time.h>

/* How long commands are waited for when the device is closed or lost, before the driver's objects are abandoned. */
#define SETTLE_USEC UINT64_C(10000000)
/* How often a wait looks whether another command has failed. */
#define LOOK_USEC UINT64_C(250000)

/* Commands of which the last 1/LATE_SHARE are waited for apart: they run longer than it takes to look at the others (150 of them: 60 us). */
#define LATE_SHARE    8
#define LATE_AT_LEAST 64

uint64_t gpu_now_usec(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

int gpu_signal_new(GpuSignal **ret)
{
    GpuSignal *signal = calloc(1, sizeof(*signal));
    pthread_condattr_t attributes;

    if (!signal)
        return error_origin(-ENOMEM);
    atomic_init(&signal->n_refs, 1);
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_mutex_init(&signal->lock, NULL);
    (void)pthread_cond_init(&signal->changed, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    *ret = signal;
    return 0;
}

GpuSignal *gpu_signal_unref(GpuSignal *signal)
{
    if (!signal || atomic_fetch_sub(&signal->n_refs, 1) != 1)
        return NULL;
    (void)pthread_cond_destroy(&signal->changed);
    (void)pthread_mutex_destroy(&signal->lock);
    free(signal);
    return NULL;
}

/* On a thread of the driver, or inside clSetEventCallback() itself. */
static void CL_CALLBACK event_done(cl_event event, cl_int status, void *userdata)
{
    GpuSignal *signal = userdata;

    (void)event;
    (void)status;
    (void)pthread_mutex_lock(&signal->lock);
    signal->n_posted++;
    (void)pthread_cond_signal(&signal->changed);
    (void)pthread_mutex_unlock(&signal->lock);
    (void)gpu_signal_unref(signal);
}

/* Waits for the post number @expected; whether it came in time. */
static bool signal_wait(GpuSignal *signal, uint64_t expected, uint64_t deadline_usec)
{
    struct timespec deadline = {.tv_sec = (time_t)(deadline_usec / 1000000),
                                .tv_nsec = (long)(deadline_usec % 1000000) * 1000};
    bool posted;
    int r = 0;

    (void)pthread_mutex_lock(&signal->lock);
    while (signal->n_posted < expected && r == 0)
        r = pthread_cond_timedwait(&signal->changed, &signal->lock, &deadline);
    posted = signal->n_posted >= expected;
    (void)pthread_mutex_unlock(&signal->lock);
    return posted;
}

static int event_is_done(Gpu *gpu, cl_event event, bool *ret)
{
    cl_int status;
    int r = CL_TRY(gpu, clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(status), &status, NULL));

    if (!r)
        *ret = status <= CL_COMPLETE;
    return r;
}

int gpu_wait_until(Gpu *gpu, cl_event event, uint64_t deadline_usec)
{
    bool done = false;
    int r = event_is_done(gpu, event, &done);

    if (r || done)
        return r;
    atomic_fetch_add(&gpu->signal->n_refs, 1);
    r = CL_TRY(gpu, clSetEventCallback(event, CL_COMPLETE, event_done, gpu->signal));
    if (r) {
        (void)gpu_signal_unref(gpu->signal);
        return r;
    }
    gpu->n_expected++; /* only now: a call that fails has already let the device settle, with waits of its own */
    /* Not every implementation ends a command that waits for one that fails, or calls back for it: the failure is looked for, and after
     * it posts no longer count. */
    for (uint64_t now_usec = gpu_now_usec(); now_usec < deadline_usec; now_usec = gpu_now_usec()) {
        if (signal_wait(gpu->signal, gpu->n_expected, MIN(deadline_usec, now_usec + LOOK_USEC)))
            return 0;
        if (!gpu_is_lost(gpu) && gpu_sweep(gpu, NULL))
            return error_origin(-EIO);
        r = event_is_done(gpu, event, &done);
        if (r || done)
            return r;
    }
    gpu->hung = true;
    gpu_lose(gpu, "a command did not complete before its deadline");
    return error_origin(GPU_E_HUNG);
}

static void command_done(Gpu *gpu, GpuEvent *event)
{
    event->complete = true;
    gpu_trace_note(gpu, event);
}

/* Looks at one pending command: completed and fine (1), not yet (0), or failed (GPU_E_LOST as -1). */
static int command_check(Gpu *gpu, GpuEvent *event)
{
    cl_int status;

    if (CL_TRY(gpu, clGetEventInfo(event->cl, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(status), &status, NULL)))
        return -1;
    if (status > CL_COMPLETE)
        return 0;
    if (status < 0) {
        gpu_lose(gpu, "command '%s' failed: %s (%d): %s", event->label ? event->label : "?", gpu_cl_name(status),
                 (int)status, gpu_cl_text(status));
        return -1;
    }
    command_done(gpu, event);
    return 1;
}

int gpu_sweep(Gpu *gpu, ErrorDetail *reterr)
{
    size_t n_kept = 0;
    bool failed = false;

    for (size_t i = 0; i < gpu->n_pending; i++) {
        GpuEvent *event = gpu->pending[i];

        if (failed || command_check(gpu, event) == 0)
            gpu->pending[n_kept++] = event;
        else if (event->complete)
            (void)gpu_event_unref(event);
        else {
            failed = true;
            gpu->pending[n_kept++] = event;
        }
    }
    gpu->n_pending = n_kept;
    if (failed)
        return error_detail_set(reterr, GPU_E_LOST, "'%s': %s", gpu->info.name, gpu->lost_text);
    gpu_trace_fold(gpu);
    return 0;
}

/* Waits for an event and folds what can go wrong into the codes of the interface. */
static int wait_event(Gpu *gpu, GpuEvent *event, uint64_t deadline_usec, ErrorDetail *reterr)
{
    int r;

    if (!event || event->complete)
        return 0;
    r = gpu_wait_until(gpu, event->cl, deadline_usec);
    if (r == GPU_E_HUNG)
        return error_detail_set(reterr, GPU_E_HUNG, "'%s': '%s' did not complete before its deadline", gpu->info.name,
                                event->label ? event->label : "?");
    if (r < 0)
        return error_detail_set(reterr, GPU_E_LOST, "'%s': %s", gpu->info.name, gpu->lost_text);
    return 0;
}

static int flush_all(Gpu *gpu, ErrorDetail *reterr)
{
    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
        if (gpu_flush(gpu, queue))
            return error_detail_set(reterr, GPU_E_LOST, "'%s': %s", gpu->info.name, gpu->lost_text);
    return 0;
}

int gpu_event_wait(Gpu *gpu, GpuEvent *event, ErrorDetail *reterr)
{
    uint64_t deadline_usec = gpu_now_usec() + gpu->deadline_usec;
    int r;

    if (gpu_is_lost(gpu))
        return gpu_refuse_lost(gpu, reterr);
    if (event->complete)
        return 0;
    r = flush_all(gpu, reterr);
    if (!r)
        r = wait_event(gpu, event, deadline_usec, reterr);
    if (r)
        return r;
    switch (gpu_event_status(event)) {
    case 1:
        return 0;
    default:
        /* The sweep knows how to say what failed. */
        r = gpu_sweep(gpu, reterr);
        return r ? r : error_detail_set(reterr, GPU_E_LOST, "'%s': a command failed", gpu->info.name);
    }
}

/* A call that fails now and then is tried once more: what is at stake is everything that the driver holds. */
static bool queue_settles(Gpu *gpu, GpuQueue queue, uint64_t deadline_usec)
{
    for (int tries = 0; tries < 2; tries++) {
        int r = gpu_wait_until(gpu, gpu->last[queue]->cl, deadline_usec);

        if (r >= 0)
            return r == 0;
    }
    return false;
}

void gpu_settle(Gpu *gpu)
{
    uint64_t deadline_usec = gpu_now_usec() + SETTLE_USEC;

    if (gpu->hung)
        return;
    /* Of a queue whose last command is known to have ended nothing is asked: a device lost since then holds nothing of ours. */
    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
        if (gpu->last[queue] && !gpu->last[queue]->complete && clFlush(gpu->queues[queue]) != CL_SUCCESS &&
            clFlush(gpu->queues[queue]) != CL_SUCCESS)
            gpu->hung = true;
    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX && !gpu->hung; queue++)
        if (gpu->last[queue] && !gpu->last[queue]->complete)
            gpu->hung = !queue_settles(gpu, queue, deadline_usec);
}

/* A command of the compute queue towards the end of a step; NULL: the step is short. */
static GpuEvent *late_command(const Gpu *gpu)
{
    for (size_t i = gpu->n_pending - gpu->n_pending / LATE_SHARE; i > 0 && gpu->n_pending >= LATE_AT_LEAST; i--)
        if (gpu->pending[i - 1]->queue == GPU_QUEUE_COMPUTE)
            return gpu->pending[i - 1];
    return NULL;
}

/* Looks at most of a step's commands while the last ones run: when those are done the caller waits for nothing else.  Only what went well is
 * taken: a failure is for the look at the end, since PoCL aborts when followers of a failed command are released that still follow others. */
static int look_early(Gpu *gpu, uint64_t deadline_usec, ErrorDetail *reterr)
{
    GpuEvent *late = gpu_event_ref(late_command(gpu));
    int r = late ? wait_event(gpu, late, deadline_usec, reterr) : 0;
    size_t n_kept = 0;
    cl_int status;

    for (size_t i = 0; i < gpu->n_pending && late && !r; i++) {
        GpuEvent *event = gpu->pending[i];

        if (clGetEventInfo(event->cl, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(status), &status, NULL) == CL_SUCCESS && status == CL_COMPLETE) {
            command_done(gpu, event);
            (void)gpu_event_unref(event);
        } else
            gpu->pending[n_kept++] = event;
    }
    if (late && !r)
        gpu->n_pending = n_kept;
    (void)gpu_event_unref(late);
    return r;
}

int gpu_step_begin(Gpu *gpu)
{
    return gpu_is_lost(gpu) ? error_origin(-ENODEV) : 0;
}

int gpu_step_finish(Gpu *gpu, ErrorDetail *reterr)
{
    uint64_t deadline_usec = gpu_now_usec() + gpu->deadline_usec;
    int r;

    if (gpu_is_lost(gpu))
        return gpu_refuse_lost(gpu, reterr);
    r = flush_all(gpu, reterr);
    if (!r)
        r = look_early(gpu, deadline_usec, reterr);
    if (!r)
        r = wait_event(gpu, gpu->last[GPU_QUEUE_COMPUTE], deadline_usec, reterr);
    if (!r)
        r = gpu_sweep(gpu, reterr);
    return r;
}

int gpu_drain(Gpu *gpu, ErrorDetail *reterr)
{
    uint64_t deadline_usec = gpu_now_usec() + gpu->deadline_usec;
    int r;

    if (gpu_is_lost(gpu))
        return gpu_refuse_lost(gpu, reterr);
    r = flush_all(gpu, reterr);
    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX && !r; queue++)
        r = wait_event(gpu, gpu->last[queue], deadline_usec, reterr);
    if (!r)
        r = gpu_sweep(gpu, reterr);
    return r;
}
