/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events.  The driver's own pass through, seen; a paced command's event is a user event of the driver's for all that waits, and what it cannot
 * say (queue, type, state, times) is said here.
 */

#include "tests/sim/sim.h"

#include <stdlib.h>
#include <string.h>

/* ---- life ---------------------------------------------------------------------------------------------------------- */

SimEvent *event_new(const SimCall *call, SimQueue *queue, cl_command_type type, bool paced, cl_event handle, bool shown)
{
    SimEvent *event = calloc(1, sizeof(*event));
    cl_int status = CL_SUCCESS;

    if (!event)
        return NULL;
    event->type = type;
    event->function = call->function;
    event->ordinal = call->ordinal;
    event->paced = paced;
    event->queued_nsec = sim_now_nsec(CLOCK_MONOTONIC);
    if (paced) {
        cl_context context = queue->object.context->object.handle;

        event->status = CL_QUEUED;
        event->order = sim.next.clCreateUserEvent(context, &status);
        handle = event->order && shown ? sim.next.clCreateUserEvent(context, &status) : event->order;
        if (!handle) {
            if (event->order)
                (void)sim.next.clReleaseEvent(event->order);
            free(event);
            return NULL;
        }
    }
    if (queue)
        event->queue = (SimQueue *)object_ref(&queue->object);
    object_add(&event->object, SIM_EVENT, handle, call, queue ? queue->object.context : NULL, shown);
    return event;
}

void event_destroy(SimEvent *event)
{
    dependents_free(event->dependents, false);
    (void)sim.next.clReleaseEvent(event->object.handle);
    if (event->tail)
        (void)sim.next.clReleaseEvent(event->tail);
    if (event->order && event->order != event->object.handle)
        (void)sim.next.clReleaseEvent(event->order);
    object_unref(event->queue ? &event->queue->object : NULL);
}

void event_seen(SimEvent *event)
{
    SimDependent *dependents;

    sim_lock();
    dependents = event->dependents;
    if (!event->paced)
        event->dependents = NULL;
    order_seen(&event->stamp);
    if (event->stamp.chain < 0)
        event->stamp.chain = event->stamp.at = 0;
    sim_unlock();
    if (!event->paced)
        dependents_free(dependents, true);
}

static void set_times(SimEvent *event, cl_int status)
{
    uint64_t now = sim_now_nsec(CLOCK_MONOTONIC), ahead;
    const SimDevice *device = event->queue->device;

    if (status == CL_SUBMITTED)
        event->submit_nsec = now;
    if (status == CL_RUNNING)
        event->start_nsec = SIM_MIN(now, event->start_nsec ? event->start_nsec : now);
    if (status > CL_COMPLETE)
        return;
    ahead = device_ahead(device);
    event->submit_nsec = (event->submit_nsec ? event->submit_nsec : now) + ahead;
    event->start_nsec = (event->start_nsec ? event->start_nsec : now) + ahead;
    event->end_nsec = now + ahead;
    event->queued_nsec += ahead;
}

/* The event is over: the driver is told, and all that waits is let go. */
static void settle(SimEvent *event, cl_int status)
{
    SimDependent *dependents;

    /* What waits for the copy by name first: kernels of other queues.  Each call takes the time that the driver needs to wake a worker. */
    if (event->object.handle != event->order)
        (void)sim.next.clSetUserEventStatus(event->object.handle, status);
    (void)sim.next.clSetUserEventStatus(event->order, CL_COMPLETE);
    sim_lock();
    /* Not before the driver knows: what was enqueued until then may fail with it. */
    event->settled = true;
    dependents = event->dependents;
    event->dependents = NULL;
    sim_unlock();
    dependents_free(dependents, status < 0);
}

static void advance(SimFollower *followers, cl_int status)
{
    while (followers) {
        SimFollower *next = followers->next;

        job_advance(followers->job, followers->fails && status < 0 ? status : CL_SUCCESS, followers->is_next);
        free(followers);
        followers = next;
    }
}

void event_set(SimEvent *event, cl_int status)
{
    SimFollower *followers = NULL;

    /* PoCL loses a command that is enqueued while an event of its wait list fails. */
    if (status < 0)
        (void)pthread_mutex_lock(&sim.enqueuing);
    sim_lock();
    set_times(event, status);
    event->status = status;
    if (status <= CL_COMPLETE) {
        followers = event->followers;
        event->followers = NULL;
        (void)pthread_cond_broadcast(&sim.changed);
    }
    sim_unlock();
    /* The next copy may begin now, not when the driver is done with what it wakes. */
    if (status == CL_COMPLETE)
        advance(followers, status);
    if (status <= CL_COMPLETE)
        settle(event, status);
    if (status < 0) {
        (void)pthread_mutex_unlock(&sim.enqueuing);
        advance(followers, status);
    }
    sim_lock();
    callbacks_queue(event, status);
    sim_unlock();
}

static cl_int wait_paced(SimEvent *event)
{
    cl_int status;

    sim_lock();
    while (event->status > CL_COMPLETE)
        sim_wait(&sim.changed);
    status = event->status;
    sim_unlock();
    return status;
}

cl_int event_wait(SimEvent *event)
{
    cl_int status = event->queue ? sim.next.clFlush(event->queue->object.handle) : CL_SUCCESS;

    if (event->paced)
        status = wait_paced(event);
    else if (event->may_fail)
        status = callback_wait(event);
    else
        status = sim.next.clWaitForEvents(1, (const cl_event *)&event->object.handle);
    event_seen(event);
    return SIM_MIN(status, CL_SUCCESS);
}

/* ---- calls --------------------------------------------------------------------------------------------------------- */

static SimEvent *find_event(cl_event handle)
{
    return (SimEvent *)object_find(SIM_EVENT, handle);
}

static cl_int paced_info(const SimEvent *event, cl_event_info what, size_t size, void *value, size_t *size_ret)
{
    cl_command_queue queue = event->queue->object.handle;
    cl_context context = event->object.context->object.handle;

    switch (what) {
    case CL_EVENT_COMMAND_QUEUE:
        return sim_answer(&queue, sizeof(queue), size, value, size_ret);
    case CL_EVENT_CONTEXT:
        return sim_answer(&context, sizeof(context), size, value, size_ret);
    case CL_EVENT_COMMAND_TYPE:
        return sim_answer(&event->type, sizeof(event->type), size, value, size_ret);
    case CL_EVENT_COMMAND_EXECUTION_STATUS:
        return sim_answer(&event->status, sizeof(event->status), size, value, size_ret);
    }
    return CL_INVALID_VALUE;
}

static cl_int CL_API_CALL layer_clGetEventInfo(cl_event handle, cl_event_info what, size_t size, void *value, size_t *size_ret)
{
    SimCall call;
    SimEvent *event;
    cl_int status = SIM_ENTER(&call, clGetEventInfo), state = CL_QUEUED;

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_EVENT, handle);
    if (status != CL_SUCCESS)
        return status;
    if (what == CL_EVENT_REFERENCE_COUNT && object_answer_refs(SIM_EVENT, handle, size, value, size_ret, &status))
        return status;
    event = find_event(handle);
    if (event && event->paced) {
        sim_lock();
        status = paced_info(event, what, size, value, size_ret);
        sim_unlock();
    } else
        status = sim.next.clGetEventInfo(handle, what, size, value, size_ret);
    if (event && status == CL_SUCCESS && what == CL_EVENT_COMMAND_EXECUTION_STATUS && value) {
        memcpy(&state, value, sizeof(state));
        if (state <= CL_COMPLETE)
            event_seen(event);
        if (state < CL_COMPLETE)
            event_check_failed(event);
    }
    object_unref(event ? &event->object : NULL);
    return status;
}

static cl_int paced_profiling(const SimEvent *event, cl_profiling_info what, size_t size, void *value, size_t *size_ret)
{
    cl_ulong time;

    if (!event->queue->profiling || event->status != CL_COMPLETE)
        return CL_PROFILING_INFO_NOT_AVAILABLE;
    switch (what) {
    case CL_PROFILING_COMMAND_QUEUED:
        time = event->queued_nsec;
        break;
    case CL_PROFILING_COMMAND_SUBMIT:
        time = event->submit_nsec;
        break;
    case CL_PROFILING_COMMAND_START:
        time = event->start_nsec;
        break;
    case CL_PROFILING_COMMAND_END:
    case CL_PROFILING_COMMAND_COMPLETE:
        time = event->end_nsec;
        break;
    default:
        return CL_INVALID_VALUE;
    }
    return sim_answer(&time, sizeof(time), size, value, size_ret);
}

static cl_int CL_API_CALL layer_clGetEventProfilingInfo(cl_event handle, cl_profiling_info what, size_t size, void *value,
                                                        size_t *size_ret)
{
    SimCall call;
    SimEvent *event;
    cl_int status = SIM_ENTER(&call, clGetEventProfilingInfo);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_EVENT, handle);
    if (status != CL_SUCCESS)
        return status;
    event = find_event(handle);
    if (event && event->paced) {
        sim_lock();
        status = paced_profiling(event, what, size, value, size_ret);
        sim_unlock();
    } else
        status = sim.next.clGetEventProfilingInfo(handle, what, size, value, size_ret);
    /* Times are there only when it is complete. */
    if (event && status == CL_SUCCESS)
        event_seen(event);
    object_unref(event ? &event->object : NULL);
    return status;
}

/* Waits for those that are not the driver's to wait for and puts the others into @rest. */
static cl_int wait_here(cl_uint n, const cl_event *handles, cl_event *rest, cl_uint *ret_n_rest)
{
    cl_int status = CL_SUCCESS;

    for (cl_uint i = 0; i < n; i++) {
        SimEvent *event = find_event(handles[i]);

        if (event && event->queue)
            (void)sim.next.clFlush(event->queue->object.handle);
        object_unref(event ? &event->object : NULL);
    }
    for (cl_uint i = 0; i < n; i++) {
        SimEvent *event = find_event(handles[i]);

        if (!event || !(event->paced || event->may_fail))
            rest[(*ret_n_rest)++] = handles[i];
        else if (event_wait(event) < 0)
            status = CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST;
        object_unref(event ? &event->object : NULL);
    }
    return status;
}

static cl_int CL_API_CALL layer_clWaitForEvents(cl_uint n, const cl_event *handles)
{
    SimCall call;
    cl_event *rest;
    cl_uint n_rest = 0;
    cl_int status = SIM_ENTER(&call, clWaitForEvents), driver = CL_SUCCESS;

    for (cl_uint i = 0; i < n && handles && status == CL_SUCCESS; i++)
        status = object_check(&call, SIM_EVENT, handles[i]);
    if (status != CL_SUCCESS)
        return status;
    if (n == 0 || !handles)
        return sim.next.clWaitForEvents(n, handles);
    rest = calloc(n, sizeof(*rest));
    if (!rest)
        return CL_OUT_OF_HOST_MEMORY;
    status = wait_here(n, handles, rest, &n_rest);
    if (n_rest > 0)
        driver = sim.next.clWaitForEvents(n_rest, rest);
    free(rest);
    for (cl_uint i = 0; i < n && (driver == CL_SUCCESS || driver == CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST); i++) {
        SimEvent *event = find_event(handles[i]);

        if (event)
            event_seen(event);
        object_unref(event ? &event->object : NULL);
    }
    return fault_lost() != CL_SUCCESS ? fault_lost() : status != CL_SUCCESS ? status : driver;
}

static cl_int CL_API_CALL layer_clSetEventCallback(cl_event handle, cl_int type, SimNotify notify, void *userdata)
{
    SimCall call;
    SimCallback *callback;
    SimEvent *event;
    bool paced;
    cl_int status = SIM_ENTER(&call, clSetEventCallback);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_EVENT, handle);
    if (status != CL_SUCCESS)
        return status;
    event = find_event(handle);
    if (!event)
        return sim.next.clSetEventCallback(handle, type, notify, userdata);
    callback = notify && type >= CL_COMPLETE && type <= CL_SUBMITTED ? calloc(1, sizeof(*callback)) : NULL;
    paced = event->paced;
    if (callback) {
        *callback = (SimCallback){.event = event, .type = type, .notify = notify, .userdata = userdata};
        if (!paced) {
            status = event_watch(callback);
        } else {
            sim_lock();
            callback->next = event->callbacks;
            event->callbacks = callback;
            callbacks_queue(event, event->status);
            sim_unlock();
        }
    } else
        status = CL_INVALID_VALUE;
    if (status != CL_SUCCESS) {
        object_unref(&event->object);
        free(callback);
    }
    return status;
}

static cl_event CL_API_CALL layer_clCreateUserEvent(cl_context context, cl_int *errcode_ret)
{
    SimCall call;
    SimEvent *event = NULL;
    SimObject *object;
    cl_event handle;
    cl_int status = SIM_ENTER(&call, clCreateUserEvent);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_CONTEXT, context);
    if (status != CL_SUCCESS) {
        SIM_SET(errcode_ret, status);
        return NULL;
    }
    handle = sim.next.clCreateUserEvent(context, errcode_ret);
    if (!handle)
        return NULL;
    object = object_find(SIM_CONTEXT, context);
    event = calloc(1, sizeof(*event));
    if (event) {
        event->function = call.function;
        event->ordinal = call.ordinal;
        event->stamp.chain = -1; /* until the program sets it, nobody knows what it comes after */
        object_add(&event->object, SIM_EVENT, handle, &call, (SimContext *)object, true);
    }
    object_unref(object);
    return handle;
}

static cl_int CL_API_CALL layer_clSetUserEventStatus(cl_event handle, cl_int state)
{
    SimCall call;
    SimEvent *event;
    bool paced;
    cl_int status = SIM_ENTER(&call, clSetUserEventStatus);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_EVENT, handle);
    if (status != CL_SUCCESS)
        return status;
    event = find_event(handle);
    paced = event && event->paced;
    if (event && !paced) {
        sim_lock();
        if (event->stamp.chain < 0)
            order_begin(&event->stamp);
        sim_unlock();
    }
    object_unref(event ? &event->object : NULL);
    return paced ? CL_INVALID_EVENT : sim.next.clSetUserEventStatus(handle, state);
}

static cl_int CL_API_CALL layer_clRetainEvent(cl_event event)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clRetainEvent);

    return status != CL_SUCCESS ? status : object_retain(&call, SIM_EVENT, event);
}

static cl_int CL_API_CALL layer_clReleaseEvent(cl_event event)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clReleaseEvent);

    return status != CL_SUCCESS ? status : object_release(&call, SIM_EVENT, event);
}

void event_hook(void)
{
    SIM_HOOK(clGetEventInfo);
    SIM_HOOK(clGetEventProfilingInfo);
    SIM_HOOK(clWaitForEvents);
    SIM_HOOK(clSetEventCallback);
    SIM_HOOK(clCreateUserEvent);
    SIM_HOOK(clSetUserEventStatus);
    SIM_HOOK(clRetainEvent);
    SIM_HOOK(clReleaseEvent);
}
