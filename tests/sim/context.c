/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts: which devices, and how their memory is reached. */

#include "tests/sim/sim.h"

#include <stdlib.h>

static void mark_lost(SimObject *object, void *userdata)
{
    ((SimContext *)object)->lost = *(const cl_int *)userdata;
}

void context_reset(cl_int code)
{
    sim_lock();
    object_each_locked(SIM_CONTEXT, mark_lost, &code);
    sim_unlock();
}

void context_destroy(SimContext *context)
{
    for (size_t i = 0; i < SIM_LANE_MAX; i++)
        if (context->dma[i])
            (void)sim.next.clReleaseCommandQueue(context->dma[i]);
    (void)sim.next.clReleaseContext(context->object.handle);
    free(context->devices);
}

static cl_int add_devices(SimContext *context, cl_context handle)
{
    cl_device_id *devices;
    size_t size = 0;
    cl_int status = sim.next.clGetContextInfo(handle, CL_CONTEXT_DEVICES, 0, NULL, &size);

    if (status != CL_SUCCESS)
        return status;
    devices = calloc(1, size + 1);
    context->devices = calloc(size / sizeof(*devices) + 1, sizeof(*context->devices));
    if (!devices || !context->devices) {
        free(devices);
        return CL_OUT_OF_HOST_MEMORY;
    }
    status = sim.next.clGetContextInfo(handle, CL_CONTEXT_DEVICES, size, devices, NULL);
    for (size_t i = 0; i < size / sizeof(*devices) && status == CL_SUCCESS; i++) {
        SimDevice *device = device_get(devices[i], true);

        if (!device)
            status = CL_OUT_OF_HOST_MEMORY;
        else
            context->devices[context->n_devices++] = device;
        context->in_place = device && device->in_place && (i == 0 || context->in_place);
    }
    for (size_t i = 0; i < SIM_LANE_MAX && status == CL_SUCCESS && !context->in_place; i++)
        context->dma[i] = sim.next.clCreateCommandQueue(handle, devices[0], 0, &status);
    free(devices);
    return status;
}

/* The layer's record of a new context; NULL, with the context given back, when that fails. */
static cl_context context_new(const SimCall *call, cl_context handle, cl_int *errcode_ret)
{
    SimContext *context;
    cl_int status = CL_OUT_OF_HOST_MEMORY;

    if (!handle)
        return NULL;
    context = calloc(1, sizeof(*context));
    if (context) {
        context->discrete = !sim.config.unified;
        context->object.handle = handle;
        status = add_devices(context, handle);
    }
    if (status != CL_SUCCESS) {
        if (context)
            context_destroy(context);
        else
            (void)sim.next.clReleaseContext(handle);
        free(context);
        SIM_SET(errcode_ret, status);
        return NULL;
    }
    object_add(&context->object, SIM_CONTEXT, handle, call, NULL, true);
    return handle;
}

typedef void(CL_CALLBACK *ContextNotify)(const char *, const void *, size_t, void *);

static cl_context CL_API_CALL layer_clCreateContext(const cl_context_properties *properties, cl_uint n_devices,
                                                    const cl_device_id *devices, ContextNotify notify, void *userdata,
                                                    cl_int *errcode_ret)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clCreateContext);

    if (status != CL_SUCCESS) {
        SIM_SET(errcode_ret, status);
        return NULL;
    }
    return context_new(&call, sim.next.clCreateContext(properties, n_devices, devices, notify, userdata, errcode_ret), errcode_ret);
}

static cl_context CL_API_CALL layer_clCreateContextFromType(const cl_context_properties *properties, cl_device_type type,
                                                            ContextNotify notify, void *userdata, cl_int *errcode_ret)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clCreateContextFromType);

    if (status != CL_SUCCESS) {
        SIM_SET(errcode_ret, status);
        return NULL;
    }
    if (sim.config.device_type && type != CL_DEVICE_TYPE_ALL && type != CL_DEVICE_TYPE_DEFAULT)
        type = type & sim.config.device_type ? CL_DEVICE_TYPE_ALL : CL_DEVICE_TYPE_CUSTOM;
    return context_new(&call, sim.next.clCreateContextFromType(properties, type, notify, userdata, errcode_ret), errcode_ret);
}

static cl_int CL_API_CALL layer_clRetainContext(cl_context context)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clRetainContext);

    return status != CL_SUCCESS ? status : object_retain(&call, SIM_CONTEXT, context);
}

static cl_int CL_API_CALL layer_clReleaseContext(cl_context context)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clReleaseContext);

    return status != CL_SUCCESS ? status : object_release(&call, SIM_CONTEXT, context);
}

static cl_int CL_API_CALL layer_clGetContextInfo(cl_context context, cl_context_info what, size_t size, void *value,
                                                 size_t *size_ret)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clGetContextInfo);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_CONTEXT, context);
    if (status != CL_SUCCESS)
        return status;
    if (what == CL_CONTEXT_REFERENCE_COUNT && object_answer_refs(SIM_CONTEXT, context, size, value, size_ret, &status))
        return status;
    return sim.next.clGetContextInfo(context, what, size, value, size_ret);
}

void context_hook(void)
{
    SIM_HOOK(clCreateContext);
    SIM_HOOK(clCreateContextFromType);
    SIM_HOOK(clRetainContext);
    SIM_HOOK(clReleaseContext);
    SIM_HOOK(clGetContextInfo);
}
