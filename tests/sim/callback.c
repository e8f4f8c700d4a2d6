/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who is called when an event gets somewhere.  Callbacks of paced events come from a thread of their own, as from a driver.  Those of the driver's
 * events come from the driver, or from here when the driver forgets: PoCL 3.1 neither calls back nor wakes those that wait when a command
 * fails because one that it waited for has failed.
 */

#include "tests/sim/sim.h"

#include <stdlib.h>
#include <time.h>

/* ---- callbacks ----------------------------------------------------------------------------------------------------- */

static struct {
    pthread_t thread;
    bool started, stopping;
    SimCallback *first, *last;
} dispatcher;
static pthread_cond_t dispatcher_changed = PTHREAD_COND_INITIALIZER;

static void callback_run(SimCallback *callback, cl_int status)
{
    SimEvent *event = callback->event;
    bool is_dead;

    if (callback->job) {
        job_advance(callback->job, callback->fails && status < 0 ? status : CL_SUCCESS, false);
        object_unref(&event->object);
        return;
    }
    sim_lock();
    is_dead = event->queue && event->queue->object.app_refs == 0;
    sim_unlock();
    if (is_dead && !callback->is_wait && sim.config.checks & SIM_CHECK_CALLBACK)
        report_misuse("dead-queue", "the callback of %s #%llu%s%s comes after its queue was released",
                      sim_function_name(event->function), (unsigned long long)event->ordinal, *event->label ? " " : "", event->label);
    if (status <= CL_COMPLETE)
        event_seen(event);
    callback->notify(event->object.handle, status, callback->userdata);
    object_unref(&event->object);
}

/* Fired by the layer.  The driver may still come with them, so they stay. */
static SimCallback *fired_callbacks;

/* Takes @callback from its event's list; false when the layer has fired it. */
static bool callback_take(SimCallback *callback)
{
    bool fired;

    sim_lock();
    fired = callback->fired;
    for (SimCallback **at = fired ? NULL : &callback->event->callbacks; at && *at; at = &(*at)->next)
        if (*at == callback) {
            *at = callback->next;
            break;
        }
    sim_unlock();
    return !fired;
}

static void CL_CALLBACK driver_notify(cl_event handle, cl_int status, void *userdata)
{
    SimCallback *callback = userdata;

    (void)handle;
    if (!callback_take(callback))
        return;
    callback_run(callback, status);
    free(callback);
}

void event_check_failed(SimEvent *event)
{
    SimCallback *callbacks;
    SimDependent *dependents;
    cl_int status = CL_QUEUED;

    if (event->paced || sim.next.clGetEventInfo(event->object.handle, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(status), &status,
                                                NULL) != CL_SUCCESS || status >= CL_COMPLETE)
        return;
    sim_lock();
    callbacks = event->callbacks;
    event->callbacks = NULL;
    for (SimCallback *callback = callbacks; callback; callback = callback->next)
        callback->fired = true;
    dependents = event->dependents;
    event->dependents = NULL;
    sim_unlock();
    while (callbacks) {
        SimCallback *next = callbacks->next;

        callback_run(callbacks, status);
        sim_lock();
        callbacks->next = fired_callbacks;
        fired_callbacks = callbacks;
        sim_unlock();
        callbacks = next;
    }
    dependents_free(dependents, true);
}

cl_int event_watch(SimCallback *callback)
{
    SimEvent *event = (SimEvent *)object_ref(&callback->event->object);
    cl_int status;

    sim_lock();
    callback->next = event->callbacks;
    event->callbacks = callback;
    sim_unlock();
    status = sim.next.clSetEventCallback(event->object.handle, callback->type, driver_notify, callback);
    if (status != CL_SUCCESS)
        (void)callback_take(callback);
    else
        event_check_failed(event);
    object_unref(&event->object);
    return status;
}

void event_add_dependent_locked(SimEvent *event, SimEvent *dependent)
{
    SimDependent *node;

    if (event->settled)
        return;
    node = malloc(sizeof(*node));
    if (!node)
        return;
    (void)object_ref_locked(&dependent->object);
    *node = (SimDependent){event->dependents, dependent};
    event->dependents = node;
}

static void *dispatch(void *userdata)
{
    (void)userdata;
    sim_lock();
    for (;;) {
        SimCallback *callback;

        while (!dispatcher.first && !dispatcher.stopping)
            sim_wait(&dispatcher_changed);
        if (dispatcher.stopping)
            break;
        callback = dispatcher.first;
        dispatcher.first = callback->next;
        sim_unlock();
        callback_run(callback, callback->status);
        free(callback);
        sim_lock();
    }
    sim_unlock();
    return NULL;
}

void callbacks_queue(SimEvent *event, cl_int status)
{
    for (SimCallback **at = &event->callbacks; *at;) {
        SimCallback *callback = *at;

        if (status > callback->type) {
            at = &callback->next;
            continue;
        }
        *at = callback->next;
        callback->next = NULL;
        callback->status = status < 0 ? status : callback->type;
        if (dispatcher.first)
            dispatcher.last->next = callback;
        else
            dispatcher.first = callback;
        dispatcher.last = callback;
        if (!dispatcher.started)
            dispatcher.started = pthread_create(&dispatcher.thread, NULL, dispatch, NULL) == 0;
        (void)pthread_cond_signal(&dispatcher_changed);
    }
}

void callbacks_stop(void)
{
    struct timespec until;
    bool started;

    sim_lock();
    dispatcher.stopping = true;
    started = dispatcher.started;
    (void)pthread_cond_signal(&dispatcher_changed);
    sim_unlock();
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    if (started)
        (void)pthread_timedjoin_np(dispatcher.thread, NULL, &until);
}

void dependents_free(SimDependent *dependents, bool failed)
{
    while (dependents) {
        SimDependent *next = dependents->next;

        if (failed)
            event_check_failed(dependents->event);
        object_unref(&dependents->event->object);
        free(dependents);
        dependents = next;
    }
}

/* ---- waiting ------------------------------------------------------------------------------------------------------ */

typedef struct Wait {
    bool over;
    cl_int status;
} Wait;

static void CL_CALLBACK end_wait(cl_event event, cl_int status, void *userdata)
{
    Wait *wait = userdata;

    (void)event;
    sim_lock();
    *wait = (Wait){true, status};
    (void)pthread_cond_broadcast(&sim.changed);
    sim_unlock();
}

cl_int callback_wait(SimEvent *event)
{
    SimCallback *callback = calloc(1, sizeof(*callback));
    Wait wait = {.over = false};
    cl_int status;

    if (!callback)
        return CL_OUT_OF_HOST_MEMORY;
    *callback = (SimCallback){.event = (SimEvent *)object_ref(&event->object), .type = CL_COMPLETE, .notify = end_wait,
                              .userdata = &wait, .is_wait = true};
    status = event_watch(callback);
    if (status != CL_SUCCESS) {
        object_unref(&event->object);
        free(callback);
        return status;
    }
    sim_lock();
    while (!wait.over) {
        struct timespec until;

        (void)clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 20000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (sim_wait_until(&sim.changed, &until))
            continue;
        /* In case that the driver has failed it and says nothing. */
        sim_unlock();
        event_check_failed(event);
        sim_lock();
    }
    sim_unlock();
    return wait.status;
}
