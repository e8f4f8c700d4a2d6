/* SPDX-License-Identifier: Apache-2.0 */
/* Queues: what is last in them, flush and finish. */

#include "tests/sim/sim.h"

#include <stdlib.h>

void queue_destroy(SimQueue *queue)
{
    (void)sim.next.clReleaseCommandQueue(queue->object.handle);
    sim_lock();
    order_chain_free(queue->chain);
    sim_unlock();
}

static cl_command_queue queue_new(const SimCall *call, cl_command_queue handle, SimObject *context, cl_device_id device,
                                  cl_command_queue_properties properties, cl_int *errcode_ret)
{
    SimQueue *queue;

    if (!handle || !context)
        return handle;
    queue = calloc(1, sizeof(*queue));
    if (queue)
        queue->device = device_get(device, false);
    if (!queue || !queue->device) {
        free(queue);
        (void)sim.next.clReleaseCommandQueue(handle);
        SIM_SET(errcode_ret, CL_OUT_OF_HOST_MEMORY);
        return NULL;
    }
    queue->in_order = !(properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
    queue->profiling = properties & CL_QUEUE_PROFILING_ENABLE;
    sim_lock();
    order_begin(&queue->all);
    queue->chain = queue->in_order ? order_chain_new() : -1;
    sim_unlock();
    object_add(&queue->object, SIM_QUEUE, handle, call, (SimContext *)context, true);
    return handle;
}

static cl_command_queue CL_API_CALL layer_clCreateCommandQueue(cl_context context, cl_device_id device,
                                                               cl_command_queue_properties properties, cl_int *errcode_ret)
{
    SimCall call;
    SimObject *object;
    cl_command_queue queue;
    cl_int status = SIM_ENTER(&call, clCreateCommandQueue);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_CONTEXT, context);
    if (status != CL_SUCCESS) {
        SIM_SET(errcode_ret, status);
        return NULL;
    }
    object = object_find(SIM_CONTEXT, context);
    queue = sim.next.clCreateCommandQueue(context, device, properties, errcode_ret);
    queue = queue_new(&call, queue, object, device, properties, errcode_ret);
    object_unref(object);
    return queue;
}

static cl_command_queue CL_API_CALL layer_clCreateCommandQueueWithProperties(cl_context context, cl_device_id device,
                                                                             const cl_queue_properties *properties,
                                                                             cl_int *errcode_ret)
{
    SimCall call;
    SimObject *object;
    cl_command_queue queue;
    cl_command_queue_properties flags = 0;
    cl_int status = SIM_ENTER(&call, clCreateCommandQueueWithProperties);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_CONTEXT, context);
    if (status != CL_SUCCESS) {
        SIM_SET(errcode_ret, status);
        return NULL;
    }
    for (const cl_queue_properties *at = properties; at && *at; at += 2)
        if (*at == CL_QUEUE_PROPERTIES)
            flags = at[1];
    object = object_find(SIM_CONTEXT, context);
    queue = sim.next.clCreateCommandQueueWithProperties(context, device, properties, errcode_ret);
    queue = queue_new(&call, queue, object, device, flags, errcode_ret);
    object_unref(object);
    return queue;
}

static cl_int CL_API_CALL layer_clRetainCommandQueue(cl_command_queue queue)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clRetainCommandQueue);

    return status != CL_SUCCESS ? status : object_retain(&call, SIM_QUEUE, queue);
}

static cl_int CL_API_CALL layer_clReleaseCommandQueue(cl_command_queue handle)
{
    SimCall call;
    SimQueue *queue;
    SimEvent *last = NULL, *barrier = NULL;
    cl_int status = SIM_ENTER(&call, clReleaseCommandQueue);

    if (status != CL_SUCCESS)
        return status;
    queue = (SimQueue *)object_find(SIM_QUEUE, handle);
    if (queue && queue->object.app_refs > 0)
        (void)sim.next.clFlush(handle);
    status = object_release(&call, SIM_QUEUE, handle);
    if (queue) {
        /* Nothing can follow any more; the last command knows its queue, so this must not know it. */
        sim_lock();
        if (queue->object.app_refs == 0) {
            last = queue->last;
            barrier = queue->barrier;
            queue->last = queue->barrier = NULL;
        }
        sim_unlock();
        object_unref(last ? &last->object : NULL);
        object_unref(barrier ? &barrier->object : NULL);
        object_unref(&queue->object);
    }
    return status;
}

static cl_int CL_API_CALL layer_clGetCommandQueueInfo(cl_command_queue queue, cl_command_queue_info what, size_t size, void *value,
                                                      size_t *size_ret)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clGetCommandQueueInfo);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_QUEUE, queue);
    if (status != CL_SUCCESS)
        return status;
    if (what == CL_QUEUE_REFERENCE_COUNT && object_answer_refs(SIM_QUEUE, queue, size, value, size_ret, &status))
        return status;
    return sim.next.clGetCommandQueueInfo(queue, what, size, value, size_ret);
}

static cl_int CL_API_CALL layer_clFlush(cl_command_queue queue)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clFlush);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_QUEUE, queue);
    return status != CL_SUCCESS ? status : sim.next.clFlush(queue);
}

static cl_int CL_API_CALL layer_clFinish(cl_command_queue handle)
{
    SimCall call;
    SimQueue *queue;
    SimEvent *last;
    SimStamp all;
    cl_int status = SIM_ENTER(&call, clFinish);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_QUEUE, handle);
    if (status != CL_SUCCESS)
        return status;
    queue = (SimQueue *)object_find(SIM_QUEUE, handle);
    if (!queue)
        return sim.next.clFinish(handle);
    sim_lock();
    last = queue->last;
    if (last)
        (void)object_ref_locked(&last->object);
    all = queue->all;
    sim_unlock();
    (void)sim.next.clFlush(handle);
    /* A paced command is no command of the driver's queue, and PoCL does not always wake for one that fails. */
    if (last && (last->paced || last->may_fail))
        (void)event_wait(last);
    status = fault_lost() != CL_SUCCESS ? fault_lost() : sim.next.clFinish(handle);
    if (status == CL_SUCCESS) {
        if (last)
            event_seen(last);
        sim_lock();
        order_seen(&all);
        sim_unlock();
    }
    object_unref(last ? &last->object : NULL);
    object_unref(&queue->object);
    return status;
}

void queue_hook(void)
{
    SIM_HOOK(clCreateCommandQueue);
    SIM_HOOK(clCreateCommandQueueWithProperties);
    SIM_HOOK(clRetainCommandQueue);
    SIM_HOOK(clReleaseCommandQueue);
    SIM_HOOK(clGetCommandQueueInfo);
    SIM_HOOK(clFlush);
    SIM_HOOK(clFinish);
}
