/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of handles.  The layer keeps the driver's only reference; what the program retains and releases is counted here, so an object that
 * the program has released stays known while a command still needs it, and for a while after.
 */

#include "tests/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_BUCKETS 4096
#define N_DEAD    256 /* the last handles that were destroyed */

typedef struct Dead {
    const void *handle;
    SimKind kind;
} Dead;

static SimObject *buckets[N_BUCKETS];
static Dead dead[N_DEAD];
static size_t n_dead;
static uint64_t n_made;

static const struct {
    const char *name, *article;
    cl_int invalid;
} kinds[SIM_KIND_MAX] = {
    [SIM_CONTEXT] = {"context", "a context", CL_INVALID_CONTEXT}, [SIM_QUEUE] = {"queue", "a queue", CL_INVALID_COMMAND_QUEUE},
    [SIM_MEM] = {"buffer", "a buffer", CL_INVALID_MEM_OBJECT},   [SIM_PROGRAM] = {"program", "a program", CL_INVALID_PROGRAM},
    [SIM_KERNEL] = {"kernel", "a kernel", CL_INVALID_KERNEL},    [SIM_EVENT] = {"event", "an event", CL_INVALID_EVENT},
    [SIM_SAMPLER] = {"sampler", "a sampler", CL_INVALID_SAMPLER},
};

static SimObject **bucket_of(const void *handle)
{
    uintptr_t bits = (uintptr_t)handle;

    return &buckets[(bits >> 4 ^ bits >> 16) % N_BUCKETS];
}

SimObject *object_ref_locked(SimObject *object)
{
    if (object)
        object->refs++;
    return object;
}

SimObject *object_ref(SimObject *object)
{
    sim_lock();
    (void)object_ref_locked(object);
    sim_unlock();
    return object;
}

void object_add(SimObject *object, SimKind kind, void *handle, const SimCall *call, SimContext *context, bool shown)
{
    SimObject **bucket = bucket_of(handle);

    object->kind = kind;
    object->handle = handle;
    object->shown = shown;
    object->app_refs = shown;
    object->refs = 1;
    object->made_by = call->function;
    object->made_at = call->ordinal;
    sim_lock();
    object->id = ++n_made;
    object->context = context;
    if (context)
        (void)object_ref_locked(&context->object);
    object->next = *bucket;
    *bucket = object;
    sim_unlock();
}

SimObject *object_find_locked(SimKind kind, const void *handle)
{
    for (SimObject *object = *bucket_of(handle); object; object = object->next)
        if (object->handle == handle && object->kind == kind)
            return object;
    return NULL;
}

SimObject *object_find(SimKind kind, const void *handle)
{
    SimObject *object;

    sim_lock();
    object = object_ref_locked(object_find_locked(kind, handle));
    sim_unlock();
    return object;
}

static void destroy(SimObject *object)
{
    SimContext *context = object->context;

    switch (object->kind) {
    case SIM_CONTEXT:
        context_destroy((SimContext *)object);
        break;
    case SIM_QUEUE:
        queue_destroy((SimQueue *)object);
        break;
    case SIM_MEM:
        memory_destroy((SimMem *)object);
        break;
    case SIM_PROGRAM:
        (void)sim.next.clReleaseProgram(object->handle);
        break;
    case SIM_KERNEL:
        (void)sim.next.clReleaseKernel(object->handle);
        break;
    case SIM_EVENT:
        event_destroy((SimEvent *)object);
        break;
    case SIM_SAMPLER:
        (void)sim.next.clReleaseSampler(object->handle);
        break;
    case SIM_KIND_MAX:
        break;
    }
    free(object);
    if (context)
        object_unref(&context->object);
}

void object_unref(SimObject *object)
{
    SimObject **at;
    bool last;

    if (!object)
        return;
    sim_lock();
    last = --object->refs == 0;
    if (last) {
        for (at = bucket_of(object->handle); *at != object; at = &(*at)->next)
            continue;
        *at = object->next;
        if (object->shown)
            dead[n_dead++ % N_DEAD] = (Dead){object->handle, object->kind};
    }
    sim_unlock();
    if (last)
        destroy(object);
}

static bool is_dead_locked(SimKind kind, const void *handle)
{
    for (size_t i = 0; i < N_DEAD; i++)
        if (dead[i].handle == handle && dead[i].kind == kind)
            return true;
    return false;
}

cl_int object_check(const SimCall *call, SimKind kind, const void *handle)
{
    SimObject *object;
    cl_int status = CL_SUCCESS;
    bool released;

    if (!handle)
        return CL_SUCCESS; /* the driver says what that means */
    sim_lock();
    object = object_find_locked(kind, handle);
    released = object ? object->shown && object->app_refs == 0 : is_dead_locked(kind, handle);
    if (object && !released)
        status = object->context ? object->context->lost : kind == SIM_CONTEXT ? ((SimContext *)object)->lost : CL_SUCCESS;
    sim_unlock();
    if (!released)
        return status;
    if (sim.config.checks & SIM_CHECK_RELEASE)
        report_misuse("use-after-release", "%s #%llu uses %s that was released", sim_function_name(call->function),
                      (unsigned long long)call->ordinal, kinds[kind].article);
    return kinds[kind].invalid;
}

static cl_int pass_release(SimKind kind, void *handle)
{
    switch (kind) {
    case SIM_CONTEXT:
        return sim.next.clReleaseContext(handle);
    case SIM_QUEUE:
        return sim.next.clReleaseCommandQueue(handle);
    case SIM_MEM:
        return sim.next.clReleaseMemObject(handle);
    case SIM_PROGRAM:
        return sim.next.clReleaseProgram(handle);
    case SIM_KERNEL:
        return sim.next.clReleaseKernel(handle);
    case SIM_EVENT:
        return sim.next.clReleaseEvent(handle);
    case SIM_SAMPLER:
        return sim.next.clReleaseSampler(handle);
    case SIM_KIND_MAX:
        break;
    }
    return CL_INVALID_VALUE;
}

cl_int object_retain(SimCall *call, SimKind kind, void *handle)
{
    cl_int status = object_check(call, kind, handle);
    SimObject *object;

    if (status != CL_SUCCESS)
        return status;
    sim_lock();
    object = object_find_locked(kind, handle);
    if (object)
        object->app_refs++;
    sim_unlock();
    return object ? CL_SUCCESS : kinds[kind].invalid;
}

cl_int object_release(SimCall *call, SimKind kind, void *handle)
{
    SimObject *object;
    bool released, last = false;

    if (!handle)
        return kinds[kind].invalid;
    sim_lock();
    object = object_find_locked(kind, handle);
    released = object ? object->app_refs == 0 : is_dead_locked(kind, handle);
    if (object && !released)
        last = --object->app_refs == 0;
    sim_unlock();
    if (released) {
        if (sim.config.checks & SIM_CHECK_RELEASE)
            report_misuse("over-release", "%s #%llu releases %s that was released", sim_function_name(call->function),
                          (unsigned long long)call->ordinal, kinds[kind].article);
        return kinds[kind].invalid;
    }
    if (!object)
        return pass_release(kind, handle);
    if (last)
        object_unref(object);
    return CL_SUCCESS;
}

cl_int sim_answer(const void *answer, size_t answer_size, size_t size, void *value, size_t *size_ret)
{
    if (value && size < answer_size)
        return CL_INVALID_VALUE;
    if (value)
        memcpy(value, answer, answer_size);
    SIM_SET(size_ret, answer_size);
    return CL_SUCCESS;
}

bool object_answer_refs(SimKind kind, const void *handle, size_t size, void *value, size_t *size_ret, cl_int *ret)
{
    SimObject *object;
    cl_uint refs = 0;

    sim_lock();
    object = object_find_locked(kind, handle);
    if (object)
        refs = object->app_refs;
    sim_unlock();
    if (object)
        *ret = sim_answer(&refs, sizeof(refs), size, value, size_ret);
    return object != NULL;
}

void object_each_locked(SimKind kind, void (*visit)(SimObject *object, void *userdata), void *userdata)
{
    for (size_t i = 0; i < N_BUCKETS; i++)
        for (SimObject *object = buckets[i]; object; object = object->next)
            if (object->kind == kind)
                visit(object, userdata);
}

static void report_leak(const SimObject *object)
{
    char what[64];

    (void)snprintf(what, sizeof(what), "%s", kinds[object->kind].name);
    if (object->kind == SIM_MEM)
        memory_name((const SimMem *)object, what, sizeof(what));
    report_misuse("leak", "%s of %s #%llu is left at exit (%u references)", what, sim_function_name(object->made_by),
                  (unsigned long long)object->made_at, object->app_refs);
}

void object_report_leaks(void)
{
    sim_lock();
    for (size_t i = 0; i < N_BUCKETS; i++)
        for (SimObject *object = buckets[i]; object; object = object->next) {
            if (object->app_refs > 0)
                report_leak(object);
            if (object->kind == SIM_MEM && ((const SimMem *)object)->mappings)
                report_misuse("leak", "a map of the buffer of %s #%llu is left at exit", sim_function_name(object->made_by),
                              (unsigned long long)object->made_at);
        }
    sim_unlock();
}
