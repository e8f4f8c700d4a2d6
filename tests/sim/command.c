/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The way of one enqueued command.  An ordinary one goes to the driver, with one more event in its wait list when the command before it in an
 * in-order queue is paced.  A paced one becomes a job that waits by callbacks for its wait list and for the command before it, so no worker
 * of the driver is needed to find out that a copy may begin.
 */

#include "tests/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- begin and end ------------------------------------------------------------------------------------------------- */

/* Drivers run, fail or forget a command that is enqueued behind a failed event; here it fails, as it should. */
static bool has_failed(const SimEvent *event)
{
    cl_int status = CL_QUEUED;

    if (event->paced)
        return event->status < 0;
    return event->may_fail && sim.next.clGetEventInfo(event->object.handle, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(status), &status,
                                                      NULL) == CL_SUCCESS && status < 0;
}

static cl_int take_waits(SimCommand *command, cl_uint n, const cl_event *handles)
{
    command->waits = command->few_waits;
    command->handles = command->few_handles;
    if (n > SIM_N_WAITS) {
        command->allocated = calloc(2 * (size_t)n + 1, sizeof(void *));
        if (!command->allocated)
            return CL_OUT_OF_HOST_MEMORY;
        command->waits = command->allocated;
        command->handles = (cl_event *)command->allocated + n;
    }
    for (cl_uint i = 0; i < n; i++) {
        cl_int status = handles[i] ? object_check(command->call, SIM_EVENT, handles[i]) : CL_INVALID_EVENT_WAIT_LIST;
        SimObject *event;

        if (status != CL_SUCCESS)
            return status == CL_INVALID_EVENT ? CL_INVALID_EVENT_WAIT_LIST : status;
        event = object_find(SIM_EVENT, handles[i]);
        command->waits[i] = (SimEvent *)event;
        command->handles[i] = handles[i];
        command->n_waits = command->n_handles = i + 1;
        if (event && event->context != command->queue->object.context)
            return CL_INVALID_CONTEXT;
        if (event && has_failed((SimEvent *)event) && command->call->event_status == CL_SUCCESS)
            command->call->event_status = CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST;
    }
    return CL_SUCCESS;
}

cl_int command_begin(SimCommand *command, SimCall *call, cl_command_queue handle, cl_uint n, const cl_event *waits)
{
    cl_int status;
    const SimEvent *last;

    command->call = call;
    command->queue = NULL;
    command->n_waits = command->n_handles = 0;
    command->n_accesses = 0;
    command->allocated = NULL;
    command->label = "";
    command->waits_for_all = false;
    (void)pthread_mutex_lock(&sim.enqueuing);
    status = object_check(call, SIM_QUEUE, handle);
    if (status != CL_SUCCESS)
        return status;
    command->queue = (SimQueue *)object_find(SIM_QUEUE, handle);
    if (!command->queue)
        return CL_INVALID_COMMAND_QUEUE;
    if ((n == 0) != (waits == NULL))
        return CL_INVALID_EVENT_WAIT_LIST;
    status = take_waits(command, n, waits);
    if (status != CL_SUCCESS)
        return status;
    last = command->queue->last;
    if (command->queue->in_order && last && last->paced && last->status > CL_COMPLETE)
        command->handles[command->n_handles++] = last->order;
    if (command->n_handles == 0)
        command->handles = NULL;
    return CL_SUCCESS;
}

void command_end(SimCommand *command)
{
    for (cl_uint i = 0; i < command->n_waits; i++)
        object_unref(command->waits[i] ? &command->waits[i]->object : NULL);
    for (size_t i = 0; i < command->n_accesses; i++)
        object_unref(command->accesses[i].mem ? &command->accesses[i].mem->object : NULL);
    free(command->allocated);
    (void)pthread_mutex_unlock(&sim.enqueuing);
    object_unref(command->queue ? &command->queue->object : NULL);
}

void command_access(SimCommand *command, SimMem *mem, uint64_t begin, uint64_t bytes, bool writes)
{
    if (command->n_accesses == SIM_N_ACCESSES) {
        object_unref(mem ? &mem->object : NULL);
        return;
    }
    command->accesses[command->n_accesses].mem = mem;
    command->accesses[command->n_accesses].may_read_only = false;
    command->accesses[command->n_accesses].begin = begin + (mem ? memory_origin(mem) : 0);
    command->accesses[command->n_accesses].end = begin + bytes + (mem ? memory_origin(mem) : 0);
    command->accesses[command->n_accesses++].writes = writes;
}

/* ---- order --------------------------------------------------------------------------------------------------------- */

static void note_accesses(const SimCommand *command, const SimEvent *event)
{
    for (size_t i = 0; i < command->n_accesses; i++) {
        SimMem *mem = command->accesses[i].mem;
        SimAccess access = {
            .begin = command->accesses[i].begin,
            .end = command->accesses[i].end,
            .writes = command->accesses[i].writes,
            .function = event->function,
            .ordinal = event->ordinal,
        };
        char name[64];

        memcpy(access.label, event->label, sizeof(access.label));
        access.may_read_only = command->accesses[i].may_read_only;
        access.is_part = mem && sim.config.part > 0 && *event->label == '\0' &&
                         (double)(access.end - access.begin) * sim.config.part < (double)memory_root(mem)->bytes;
        if (mem) {
            memory_name(mem, name, sizeof(name));
            order_access(&memory_root(mem)->accesses, &event->stamp, access, name);
        } else {
            order_access(&sim.host, &event->stamp, access, NULL);
            atomic_store(&sim.n_host, sim.host.n_items);
        }
    }
}

/* @event becomes the last of its queue. */
static void note_event(const SimCommand *command, SimEvent *event)
{
    SimQueue *queue = command->queue;
    SimEvent *before = NULL;
    bool is_barrier = !queue->in_order && event->type == CL_COMMAND_BARRIER;

    (void)snprintf(event->label, sizeof(event->label), "%s", command->label);
    sim_lock();
    order_begin(&event->stamp);
    for (cl_uint i = 0; i < command->n_waits; i++)
        if (command->waits[i]) {
            order_after(&event->stamp, &command->waits[i]->stamp);
            if (!event->paced)
                event_add_dependent_locked(command->waits[i], event);
            event->may_fail = event->may_fail || command->waits[i]->paced || command->waits[i]->may_fail || !command->waits[i]->queue;
        }
    if (queue->in_order && queue->last)
        order_after(&event->stamp, &queue->last->stamp);
    else if (command->waits_for_all)
        order_after(&event->stamp, &queue->all);
    else if (queue->barrier)
        order_after(&event->stamp, &queue->barrier->stamp);
    order_place(&event->stamp, queue->chain);
    if (!queue->in_order)
        order_after(&queue->all, &event->stamp);
    if (sim.config.checks & (SIM_CHECK_RACE | SIM_CHECK_HOST))
        note_accesses(command, event);
    if (queue->in_order || is_barrier) {
        SimEvent **place = queue->in_order ? &queue->last : &queue->barrier;

        before = *place;
        *place = event;
        (void)object_ref_locked(&event->object);
    }
    sim_unlock();
    object_unref(before ? &before->object : NULL);
}

cl_int command_driver(SimCommand *command, cl_int status, cl_command_type type, cl_event handle, cl_event *ret_event,
                      SimEvent **ret_wait)
{
    SimEvent *event;

    if (status != CL_SUCCESS || !handle)
        return status;
    event = event_new(command->call, command->queue, type, false, handle, ret_event != NULL);
    if (!event) {
        (void)sim.next.clReleaseEvent(handle);
        return CL_OUT_OF_HOST_MEMORY;
    }
    note_event(command, event);
    SIM_SET(ret_event, handle);
    SIM_SET(ret_wait, (SimEvent *)object_ref(&event->object));
    /* Shown: the reference is the program's. */
    if (!ret_event)
        object_unref(&event->object);
    return CL_SUCCESS;
}

/* ---- paced --------------------------------------------------------------------------------------------------------- */

static bool all_are_known(const SimCommand *command)
{
    for (cl_uint i = 0; i < command->n_waits; i++)
        if (!command->waits[i])
            return false;
    return true;
}

static cl_int start_job(SimCommand *command, SimJob *job, SimEvent *event)
{
    SimQueue *queue = command->queue;
    SimEvent *last = queue->in_order ? queue->last : queue->barrier;
    cl_int status = CL_SUCCESS;

    job->pending = 1;
    for (cl_uint i = 0; i < command->n_waits; i++)
        job_after(job, command->waits[i], true);
    if (last)
        job_after(job, last, false);
    /* Barriers of a queue without order are the driver's, which must find this among what came before. */
    if (!queue->in_order)
        status = sim.next.clEnqueueMarkerWithWaitList(queue->object.handle, 1, &event->order, &event->tail);
    note_event(command, event);
    job_advance(job, status, false);
    return CL_SUCCESS;
}

cl_int command_paced(SimCommand *command, SimJob *job, cl_command_type type, cl_event *ret_event, SimEvent **ret_wait)
{
    SimEvent *event;

    if (!all_are_known(command)) {
        job_free(job);
        return CL_INVALID_EVENT_WAIT_LIST;
    }
    event = event_new(command->call, command->queue, type, true, NULL, ret_event != NULL);
    if (!event) {
        job_free(job);
        return CL_OUT_OF_HOST_MEMORY;
    }
    job->event = (SimEvent *)object_ref(&event->object);
    event->lane = job->lane;
    if (command->call->event_status < 0)
        job->status = command->call->event_status;
    job->stalls = command->call->stalls;
    job->stall_msec = command->call->stall_msec;
    SIM_SET(ret_event, event->object.handle);
    SIM_SET(ret_wait, (SimEvent *)object_ref(&event->object));
    /* A reference of this function's own: the program may release its before this returns. */
    (void)object_ref(&event->object);
    (void)start_job(command, job, event);
    object_unref(&event->object);
    if (!ret_event)
        object_unref(&event->object);
    return CL_SUCCESS;
}

bool command_is_faulty(const SimCommand *command)
{
    return command->call->event_status < 0 || command->call->stalls;
}

cl_int command_faulty(SimCommand *command, cl_command_type type, cl_event *ret_event)
{
    SimJob *job = job_new(SIM_LANE_ORDER);

    return job ? command_paced(command, job, type, ret_event, NULL) : CL_OUT_OF_HOST_MEMORY;
}
