/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Paced jobs.  A device has a thread for each copy engine.  A job starts when all that it waits for is done and the latency has passed, or when
 * the one before it on its engine ends, and takes bytes / rate: a piece is moved, then its time is slept, so what has not arrived yet cannot be
 * read.  The latency of what is only behind others in its queue passes while they run: an engine has fetched its next command by then.  The
 * engine's time is reckoned, not measured: a thread that the system runs late does not make the link slower.
 *
 * A job that stalls is parked beside its engine, so that what others send goes on; what waits for it by its queue or its event does not.
 */

#include "tests/sim/sim.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define PIECE_NSEC      400000        /* about this much is moved at once: every turn takes the processor from the program's own thread … */
#define PIECE_LEAST     (32u << 10)
#define PIECE_MOST      (1u << 20)    /* … but memory is looked after often */
#define SPIN_NSEC       100000u       /* the end of a copy is waited for awake, for a virtual machine ends a sleep 50 us late … */
#define SPIN_SHARE      3             /* … but no more than a third of the time, for others need the processor, … */
#define SPIN_MOST_NSEC  1000000u      /* … of a while */
#define CATCH_UP_NSEC   1000000u      /* how far an engine may lag behind its reckoned time */

/* ---- jobs ---------------------------------------------------------------------------------------------------------- */

SimJob *job_new(SimLaneKind lane)
{
    SimJob *job = calloc(1, sizeof(*job));

    if (job)
        job->lane = lane;
    return job;
}

void job_free(SimJob *job)
{
    object_unref(job->to.mem ? &job->to.mem->object : NULL);
    object_unref(job->from.mem ? &job->from.mem->object : NULL);
    object_unref(job->event ? &job->event->object : NULL);
    free(job);
}

uint64_t job_bytes(const SimJob *job)
{
    return (uint64_t)job->region[0] * job->region[1] * job->region[2];
}

static bool job_is_lost(const SimJob *job, cl_int *ret)
{
    cl_int code = fault_lost() != CL_SUCCESS ? fault_lost() : job->event->object.context->lost;

    if (code != CL_SUCCESS)
        *ret = code;
    return code != CL_SUCCESS;
}

static SimLane *lane_of(SimDevice *device, SimLaneKind kind)
{
    if (kind == SIM_LANE_DOWN && sim.config.n_engines == 1)
        kind = SIM_LANE_UP;
    return &device->lanes[kind];
}

static void job_after_paced(SimJob *job, SimEvent *event, bool fails)
{
    SimFollower *follower = calloc(1, sizeof(*follower));
    bool is_done;

    sim_lock();
    is_done = event->status <= CL_COMPLETE;
    if (is_done && event->status < 0 && fails)
        job->status = job->status ? job->status : CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST;
    if (!is_done && follower) {
        *follower = (SimFollower){.next = event->followers, .job = job, .fails = fails, .is_next = !fails && event->lane == job->lane};
        event->followers = follower;
        job->pending++;
    }
    sim_unlock();
    if (is_done || !follower)
        free(follower);
}

void job_after(SimJob *job, SimEvent *event, bool fails)
{
    SimCallback *callback;

    if (event->paced) {
        job_after_paced(job, event, fails);
        return;
    }
    callback = calloc(1, sizeof(*callback));
    if (!callback)
        return;
    *callback = (SimCallback){.event = (SimEvent *)object_ref(&event->object), .type = CL_COMPLETE, .job = job, .fails = fails};
    sim_lock();
    job->pending++;
    sim_unlock();
    if (event_watch(callback) != CL_SUCCESS) {
        object_unref(&event->object);
        free(callback);
        job_advance(job, CL_SUCCESS, false);
    }
}

/* ---- time ---------------------------------------------------------------------------------------------------------- */

/* sim.lock is held. */
static bool lane_wait_until(SimLane *lane, uint64_t nsec)
{
    struct timespec until = {.tv_sec = (time_t)(nsec / 1000000000), .tv_nsec = (long)(nsec % 1000000000)};

    return sim_wait_until(&lane->changed, &until);
}

static void sleep_until(uint64_t nsec)
{
    struct timespec until = {.tv_sec = (time_t)(nsec / 1000000000), .tv_nsec = (long)(nsec % 1000000000)};

    if (nsec > sim_now_nsec(CLOCK_MONOTONIC))
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
            continue;
}

/* What others see is to be on time. */
static void wait_until(SimLane *lane, uint64_t nsec)
{
    uint64_t now = sim_now_nsec(CLOCK_MONOTONIC), spin, begin;

    lane->may_spin_nsec = SIM_MIN(SPIN_MOST_NSEC, lane->may_spin_nsec + (now - SIM_MIN(now, lane->spun_at_nsec)) / SPIN_SHARE);
    spin = SIM_MIN(SPIN_NSEC, lane->may_spin_nsec);
    sleep_until(nsec - spin);
    begin = sim_now_nsec(CLOCK_MONOTONIC);
    for (now = begin; now < nsec; now = sim_now_nsec(CLOCK_MONOTONIC))
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        continue;
#endif
    lane->may_spin_nsec -= SIM_MIN(lane->may_spin_nsec, now - begin);
    lane->spun_at_nsec = now;
}

/* ---- moving -------------------------------------------------------------------------------------------------------- */

static unsigned char *end_pointer(const SimEnd *end, uint64_t at)
{
    unsigned char *data = end->mem ? memory_data(end->mem) : end->host;

    return data ? data + at : NULL;
}

/* Through the driver, on a queue of the layer's own, for memory that is not in reach. */
static cl_int move_by_driver(const SimJob *job, uint64_t to, uint64_t from, size_t n)
{
    const SimContext *context = job->event->object.context;
    cl_command_queue queue = context->dma[job->lane];
    cl_int status;

    if (job->to.mem && job->from.mem) {
        status = sim.next.clEnqueueCopyBuffer(queue, job->from.mem->object.handle, job->to.mem->object.handle, from, to, n, 0, NULL,
                                              NULL);
        return status == CL_SUCCESS ? sim.next.clFinish(queue) : status;
    }
    if (job->to.mem)
        return sim.next.clEnqueueWriteBuffer(queue, job->to.mem->object.handle, CL_TRUE, to, n, end_pointer(&job->from, from), 0, NULL,
                                             NULL);
    return sim.next.clEnqueueReadBuffer(queue, job->from.mem->object.handle, CL_TRUE, from, n, end_pointer(&job->to, to), 0, NULL, NULL);
}

static cl_int move(const SimJob *job, uint64_t to, uint64_t from, size_t n)
{
    unsigned char *to_data = end_pointer(&job->to, to), *from_data = end_pointer(&job->from, from);
    const unsigned char *host = !job->to.mem ? to_data : !job->from.mem ? from_data : NULL;

    if (host && !host_is_mapped(host, n)) {
        if (sim.config.checks & SIM_CHECK_HOST)
            report_misuse("host-freed", "host memory of %s #%llu was unmapped before the command was complete",
                          sim_function_name(job->event->function), (unsigned long long)job->event->ordinal);
        return CL_OUT_OF_RESOURCES;
    }
    if (!to_data || !from_data)
        return move_by_driver(job, to, from, n);
    memcpy(to_data, from_data, n);
    return CL_SUCCESS;
}

static uint64_t place(const SimEnd *end, const size_t at[3])
{
    return end->offset + at[2] * end->slice_pitch + at[1] * end->row_pitch + at[0];
}

/* Moves @n bytes from @at on, row by row. */
static cl_int move_rows(const SimJob *job, size_t at[3], size_t n)
{
    while (n > 0) {
        size_t run = SIM_MIN(n, job->region[0] - at[0]);
        cl_int status = move(job, place(&job->to, at), place(&job->from, at), run);

        if (status != CL_SUCCESS)
            return status;
        n -= run;
        at[0] += run;
        if (at[0] == job->region[0]) {
            at[0] = 0;
            if (++at[1] == job->region[1]) {
                at[1] = 0;
                at[2]++;
            }
        }
    }
    return CL_SUCCESS;
}

static cl_int copy_paced(SimLane *lane, double rate, const SimJob *job, uint64_t start)
{
    uint64_t bytes = job_bytes(job), done = 0;
    size_t piece = rate > 0 ? (size_t)SIM_MIN(SIM_MAX(rate * PIECE_NSEC * 1e-9, PIECE_LEAST), PIECE_MOST) : PIECE_MOST, at[3] = {0};
    cl_int status = CL_SUCCESS;

    while (done < bytes && status == CL_SUCCESS) {
        size_t n = bytes - done < 2 * piece ? (size_t)(bytes - done) : piece; /* no last one that is over before a sleep ends */

        status = move_rows(job, at, n);
        done += n;
        if (status == CL_SUCCESS)
            (void)job_is_lost(job, &status);
        if (rate > 0 && status == CL_SUCCESS && done < bytes)
            sleep_until(start + (uint64_t)((double)done / rate * 1e9));
    }
    if (rate > 0 && status == CL_SUCCESS)
        wait_until(lane, start + (uint64_t)((double)done / rate * 1e9));
    lane->busy_until_nsec = start + (rate > 0 ? (uint64_t)((double)done / rate * 1e9) : 0);
    return status;
}

/* What is about to be overwritten is no longer there: who reads it before the copy is done gets neither the old nor the new. */
static void poison(const SimJob *job)
{
    size_t at[3] = {0};

    if (!sim.config.poison || !job->to.mem || !memory_data(job->to.mem))
        return;
    for (at[2] = 0; at[2] < job->region[2]; at[2]++)
        for (at[1] = 0; at[1] < job->region[1]; at[1]++)
            memset(end_pointer(&job->to, place(&job->to, at)), 0xff, job->region[0]);
}

static void check_content(const SimJob *job)
{
    if (job->hashed && host_hash(job) != job->hash)
        report_misuse("host-changed", "host memory that %s #%llu reads was changed before the command was complete",
                      sim_function_name(job->event->function), (unsigned long long)job->event->ordinal);
}

/* ---- lanes --------------------------------------------------------------------------------------------------------- */

static void job_run(SimLane *lane, SimJob *job)
{
    SimEvent *event = job->event;
    cl_int status = job->status;
    double rate = event->queue->device->lanes[job->lane].rate;

    if (status == CL_SUCCESS && !job_is_lost(job, &status) && lane->stopping)
        status = CL_OUT_OF_RESOURCES; /* the program is ending */
    if (status == CL_SUCCESS && job_bytes(job) > 0) {
        uint64_t latency = job->lane == SIM_LANE_DEVICE ? 0 : sim.config.latency_nsec;
        uint64_t start = SIM_MAX(job->ready_nsec + latency, lane->busy_until_nsec), now;

        event->submit_nsec = job->ready_nsec;
        wait_until(lane, start);
        now = sim_now_nsec(CLOCK_MONOTONIC);
        /* What the thread was late by is made up for, within limits. */
        start = now - start > CATCH_UP_NSEC ? now - CATCH_UP_NSEC : start;
        event->start_nsec = start;
        event_set(event, CL_RUNNING);
        poison(job);
        status = copy_paced(lane, rate, job, start);
        check_content(job);
    } else
        event_set(event, CL_RUNNING);
    event_set(event, status < 0 ? status : CL_COMPLETE);
    job_free(job);
}

/* A copy engine does not take turns with kernels: its thread, which sleeps mostly, has the last processor, and there goes first where that is
 * allowed. */
static void take_processor(void)
{
    struct sched_param first;
    cpu_set_t last;
    int policy;

    if (pthread_getschedparam(pthread_self(), &policy, &first) == 0) {
        first.sched_priority++; /* than the program itself */
        (void)pthread_setschedparam(pthread_self(), SCHED_RR, &first);
    }
    if (sim.copy_processor < 0)
        return;
    CPU_ZERO(&last);
    CPU_SET((size_t)sim.copy_processor, &last);
    (void)pthread_setaffinity_np(pthread_self(), sizeof(last), &last);
}

/* A stalled command comes back when its time is over, the device is lost, or the program ends.  sim.lock is held. */
static SimJob *take_parked(SimLane *lane, uint64_t *ret_until)
{
    uint64_t now = sim_now_nsec(CLOCK_MONOTONIC);
    cl_int code;

    *ret_until = UINT64_MAX;
    for (SimJob **at = &lane->parked; *at; at = &(*at)->next) {
        SimJob *job = *at;

        if (lane->stopping || job->until_nsec <= now || job_is_lost(job, &code)) {
            *at = job->next;
            return job;
        }
        *ret_until = SIM_MIN(*ret_until, job->until_nsec);
    }
    return NULL;
}

static void park(SimLane *lane, SimJob *job)
{
    job->until_nsec = job->stall_msec < 0 ? UINT64_MAX : sim_now_nsec(CLOCK_MONOTONIC) + (uint64_t)job->stall_msec * 1000000;
    job->next = lane->parked;
    lane->parked = job;
}

/* What is to be run next; NULL: nothing any more.  sim.lock is held. */
static SimJob *lane_take(SimLane *lane)
{
    for (;;) {
        uint64_t until;
        SimJob *job = take_parked(lane, &until);

        if (job || lane->stopping)
            return job;
        job = lane->first;
        if (job) {
            lane->first = job->next;
            if (!job->stalls)
                return job;
            park(lane, job);
        } else if (until == UINT64_MAX)
            sim_wait(&lane->changed);
        else
            (void)lane_wait_until(lane, until);
    }
}

static void *lane_run(void *userdata)
{
    SimLane *lane = userdata;
    SimJob *job;

    take_processor();
    (void)prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
    (void)prctl(PR_SET_NAME, "clsim copy", 0UL, 0UL, 0UL);
    sim_lock();
    while ((job = lane_take(lane))) {
        sim_unlock();
        job_run(lane, job);
        sim_lock();
    }
    sim_unlock();
    return NULL;
}

/* sim.lock is held. */
static bool lane_push(SimLane *lane, SimJob *job)
{
    if (!lane->started)
        lane->started = pthread_create(&lane->thread, NULL, lane_run, lane) == 0;
    if (!lane->started)
        return false;
    job->next = NULL;
    if (lane->first)
        lane->last->next = job;
    else
        lane->first = job;
    lane->last = job;
    (void)pthread_cond_signal(&lane->changed);
    return true;
}

void job_advance(SimJob *job, cl_int status, bool is_next)
{
    bool is_ready, pushed = false;

    sim_lock();
    if (!is_next)
        job->ready_nsec = sim_now_nsec(CLOCK_MONOTONIC);
    if (status < 0 && job->status == CL_SUCCESS)
        job->status = CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST;
    is_ready = --job->pending == 0;
    sim_unlock();
    if (!is_ready)
        return;
    event_set(job->event, CL_SUBMITTED);
    sim_lock();
    if (job->status < 0 || job_bytes(job) == 0)
        job->lane = SIM_LANE_ORDER;
    pushed = lane_push(lane_of(job->event->queue->device, job->lane), job);
    sim_unlock();
    if (!pushed) {
        event_set(job->event, CL_OUT_OF_RESOURCES);
        job_free(job);
    }
}

static void each_lane(void (*visit)(SimLane *lane))
{
    for (SimDevice *device = sim.devices; device; device = device->next)
        for (size_t i = 0; i < SIM_LANE_MAX; i++)
            visit(&device->lanes[i]);
}

static void wake(SimLane *lane)
{
    (void)pthread_cond_broadcast(&lane->changed);
}

static void stop(SimLane *lane)
{
    lane->stopping = true;
    wake(lane);
}

static void join(SimLane *lane)
{
    struct timespec until;

    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    if (lane->started)
        (void)pthread_timedjoin_np(lane->thread, NULL, &until);
}

void pacer_lose(void)
{
    sim_lock();
    each_lane(wake);
    sim_unlock();
}

void pacer_stop(void)
{
    sim_lock();
    each_lane(stop);
    sim_unlock();
    each_lane(join);
}
