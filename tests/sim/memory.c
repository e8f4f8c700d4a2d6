/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Buffers.  On the simulated device a buffer is memory that only the layer and the driver know (a USE_HOST_PTR buffer of the driver's over
 * pages of ours), or the driver's own where that does not work.  What the program gives as host_ptr is its host side: copied at creation
 * and at map and unmap, as a device with memory of its own does.
 */

#include "tests/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define HUGE_BYTES   (UINT64_C(2) << 20)
#define HOST_FLAGS   (CL_MEM_USE_HOST_PTR | CL_MEM_ALLOC_HOST_PTR | CL_MEM_COPY_HOST_PTR)
#define ACCESS_FLAGS (CL_MEM_HOST_WRITE_ONLY | CL_MEM_HOST_READ_ONLY | CL_MEM_HOST_NO_ACCESS)

/* What a buffer of the driver's takes from the devices, until the driver has destroyed it. */
typedef struct Backing {
    unsigned char *mapping;
    size_t mapping_bytes;
    uint64_t bytes;
    cl_uint n_devices;
    SimDevice *devices[];
} Backing;

SimMem *memory_root(SimMem *mem)
{
    while (mem->parent)
        mem = mem->parent;
    return mem;
}

uint64_t memory_origin(const SimMem *mem)
{
    return mem->parent ? mem->origin + memory_origin(mem->parent) : 0;
}

unsigned char *memory_data(const SimMem *mem)
{
    if (!mem->parent)
        return mem->data;
    return memory_data(mem->parent) ? memory_data(mem->parent) + mem->origin : NULL;
}

void memory_name(const SimMem *mem, char *text, size_t size)
{
    const SimObject *root = &mem->object;

    while (mem->parent) {
        mem = mem->parent;
        root = &mem->object;
    }
    (void)snprintf(text, size, "buffer %llu (%llu bytes)", (unsigned long long)root->made_at, (unsigned long long)mem->bytes);
}

void memory_destroy(SimMem *mem)
{
    (void)sim.next.clReleaseMemObject(mem->object.handle);
    while (mem->mappings) {
        SimMapping *next = mem->mappings->next;

        free(mem->mappings);
        mem->mappings = next;
    }
    if (mem->shadow && mem->shadow != mem->host)
        (void)munmap(mem->shadow, mem->bytes);
    free(mem->accesses.items);
    if (mem->parent)
        object_unref(&mem->parent->object);
}

/* ---- backing ------------------------------------------------------------------------------------------------------- */

static void backing_free(Backing *backing)
{
    if (!backing)
        return;
    sim_lock();
    for (cl_uint i = 0; i < backing->n_devices; i++)
        backing->devices[i]->used_bytes -= backing->bytes;
    sim_unlock();
    if (backing->mapping)
        (void)munmap(backing->mapping, backing->mapping_bytes);
    free(backing);
}

static void CL_CALLBACK backing_gone(cl_mem memory, void *userdata)
{
    (void)memory;
    backing_free(userdata);
}

/* Takes @bytes from every device of @context; the code that a real device gives when they are not there. */
static cl_int backing_new(const SimContext *context, uint64_t bytes, Backing **ret)
{
    Backing *backing;
    cl_int status = CL_SUCCESS;

    for (cl_uint i = 0; i < context->n_devices; i++)
        if (bytes > context->devices[i]->max_allocation_bytes)
            return CL_INVALID_BUFFER_SIZE;
    backing = calloc(1, sizeof(*backing) + context->n_devices * sizeof(*backing->devices));
    if (!backing)
        return CL_OUT_OF_HOST_MEMORY;
    backing->bytes = bytes;
    sim_lock();
    for (cl_uint i = 0; i < context->n_devices && status == CL_SUCCESS; i++) {
        SimDevice *device = context->devices[i];

        if (bytes > device->memory_bytes || device->used_bytes > device->memory_bytes - bytes) {
            status = CL_MEM_OBJECT_ALLOCATION_FAILURE;
            continue;
        }
        device->used_bytes += bytes;
        backing->devices[backing->n_devices++] = device;
    }
    sim_unlock();
    if (status != CL_SUCCESS) {
        backing_free(backing);
        return status;
    }
    *ret = backing;
    return CL_SUCCESS;
}

/* Pages of ours, in huge pages where they are worth it: kernels then read as fast as from the driver's best. */
static unsigned char *backing_map(Backing *backing)
{
    size_t bytes = (backing->bytes + 4095) & ~(uint64_t)4095, room = bytes + (bytes >= HUGE_BYTES ? HUGE_BYTES : 0);
    unsigned char *memory = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (memory == MAP_FAILED)
        return NULL;
    backing->mapping = memory;
    backing->mapping_bytes = room;
    if (bytes >= HUGE_BYTES) {
        memory += -(uintptr_t)memory % HUGE_BYTES;
        (void)madvise(memory, bytes, MADV_HUGEPAGE);
    }
    if (sim.config.poison)
        memset(memory, 0xff, bytes);
    return memory;
}

/* ---- creation ------------------------------------------------------------------------------------------------------ */

static cl_int check_flags(cl_mem_flags flags, const void *host_ptr)
{
    if ((flags & CL_MEM_USE_HOST_PTR) && (flags & (CL_MEM_ALLOC_HOST_PTR | CL_MEM_COPY_HOST_PTR)))
        return CL_INVALID_VALUE;
    if (!host_ptr != !(flags & (CL_MEM_USE_HOST_PTR | CL_MEM_COPY_HOST_PTR)))
        return CL_INVALID_HOST_PTR;
    return CL_SUCCESS;
}

/* The contents that a buffer begins with come over the link, while the program waits in clCreateBuffer(). */
static cl_int fill_from_host(const SimContext *context, const SimMem *mem, const void *host_ptr)
{
    double rate = context->devices[0]->link_rate;
    uint64_t begin = sim_now_nsec(CLOCK_MONOTONIC), due = begin;
    cl_int status = CL_SUCCESS;
    struct timespec until;

    if (mem->data)
        memcpy(mem->data, host_ptr, mem->bytes);
    else
        status = sim.next.clEnqueueWriteBuffer(context->dma[SIM_LANE_UP], mem->object.handle, CL_TRUE, 0, mem->bytes, host_ptr, 0,
                                               NULL, NULL);
    due += sim.config.latency_nsec + (rate > 0 ? (uint64_t)((double)mem->bytes / rate * 1e9) : 0);
    until = (struct timespec){.tv_sec = (time_t)(due / 1000000000), .tv_nsec = (long)(due % 1000000000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0)
        continue;
    return status;
}

static cl_mem driver_buffer(SimMem *mem, const SimContext *context, const cl_mem_properties *properties, Backing *backing,
                            void *host_ptr, cl_int *status)
{
    cl_mem_flags flags = mem->flags;
    cl_context handle = context->object.handle;

    if (context->discrete) {
        flags &= ~(cl_mem_flags)(HOST_FLAGS | ACCESS_FLAGS);
        host_ptr = NULL;
        if (context->in_place) {
            mem->data = backing_map(backing);
            flags |= CL_MEM_USE_HOST_PTR;
            host_ptr = mem->data;
        }
        if (context->in_place && !mem->data) {
            *status = CL_MEM_OBJECT_ALLOCATION_FAILURE;
            return NULL;
        }
    }
    if (properties && *properties && sim.next.clCreateBufferWithProperties)
        return sim.next.clCreateBufferWithProperties(handle, properties, flags, mem->bytes, host_ptr, status);
    return sim.next.clCreateBuffer(handle, flags, mem->bytes, host_ptr, status);
}

/* Fills @mem and enters it. */
static cl_int buffer_init(SimMem *mem, const SimCall *call, SimContext *context, const cl_mem_properties *properties,
                          void *host_ptr)
{
    Backing *backing = NULL;
    cl_mem handle;
    cl_int status = mem->bytes == 0 ? CL_INVALID_BUFFER_SIZE : CL_SUCCESS;

    if (status == CL_SUCCESS && context->discrete)
        status = check_flags(mem->flags, host_ptr);
    if (status == CL_SUCCESS)
        status = backing_new(context, mem->bytes, &backing);
    if (status != CL_SUCCESS)
        return status;
    handle = driver_buffer(mem, context, properties, backing, host_ptr, &status);
    if (!handle) {
        backing_free(backing);
        return status;
    }
    /* Last in, first out: the program's own callbacks come before. */
    if (sim.next.clSetMemObjectDestructorCallback(handle, backing_gone, backing) != CL_SUCCESS) {
        (void)sim.next.clReleaseMemObject(handle);
        backing_free(backing);
        return CL_OUT_OF_HOST_MEMORY;
    }
    mem->object.handle = handle;
    if (context->discrete && host_ptr) {
        if (mem->flags & CL_MEM_USE_HOST_PTR)
            mem->host = host_ptr;
        status = fill_from_host(context, mem, host_ptr);
    }
    if (status != CL_SUCCESS) {
        (void)sim.next.clReleaseMemObject(handle);
        return status;
    }
    object_add(&mem->object, SIM_MEM, handle, call, context, true);
    return CL_SUCCESS;
}

static cl_mem buffer_new(const SimCall *call, cl_context handle, const cl_mem_properties *properties, cl_mem_flags flags,
                         size_t size, void *host_ptr, cl_int *errcode_ret)
{
    SimContext *context = (SimContext *)object_find(SIM_CONTEXT, handle);
    SimMem *mem = context ? calloc(1, sizeof(*mem)) : NULL;
    cl_int status = !context ? CL_INVALID_CONTEXT : !mem ? CL_OUT_OF_HOST_MEMORY : CL_SUCCESS;

    if (status == CL_SUCCESS) {
        mem->flags = flags;
        mem->bytes = size;
        status = buffer_init(mem, call, context, properties, host_ptr);
    }
    if (status != CL_SUCCESS) {
        free(mem);
        mem = NULL;
    }
    object_unref(context ? &context->object : NULL);
    SIM_SET(errcode_ret, status);
    return mem ? mem->object.handle : NULL;
}

static cl_mem CL_API_CALL layer_clCreateBuffer(cl_context context, cl_mem_flags flags, size_t size, void *host_ptr,
                                               cl_int *errcode_ret)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clCreateBuffer);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_CONTEXT, context);
    if (status != CL_SUCCESS) {
        SIM_SET(errcode_ret, status);
        return NULL;
    }
    return buffer_new(&call, context, NULL, flags, size, host_ptr, errcode_ret);
}

static cl_mem CL_API_CALL layer_clCreateBufferWithProperties(cl_context context, const cl_mem_properties *properties,
                                                             cl_mem_flags flags, size_t size, void *host_ptr, cl_int *errcode_ret)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clCreateBufferWithProperties);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_CONTEXT, context);
    if (status != CL_SUCCESS) {
        SIM_SET(errcode_ret, status);
        return NULL;
    }
    return buffer_new(&call, context, properties, flags, size, host_ptr, errcode_ret);
}

static cl_mem CL_API_CALL layer_clCreateSubBuffer(cl_mem parent, cl_mem_flags flags, cl_buffer_create_type type, const void *info,
                                                  cl_int *errcode_ret)
{
    SimCall call;
    SimMem *whole, *mem;
    cl_mem handle;
    cl_int status = SIM_ENTER(&call, clCreateSubBuffer);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_MEM, parent);
    if (status != CL_SUCCESS) {
        SIM_SET(errcode_ret, status);
        return NULL;
    }
    whole = (SimMem *)object_find(SIM_MEM, parent);
    mem = whole ? calloc(1, sizeof(*mem)) : NULL;
    handle = sim.next.clCreateSubBuffer(parent, sim.config.unified ? flags : flags & ~(cl_mem_flags)ACCESS_FLAGS, type, info,
                                        errcode_ret);
    if (!handle || !mem || type != CL_BUFFER_CREATE_TYPE_REGION) {
        free(mem);
        object_unref(whole ? &whole->object : NULL);
        return handle;
    }
    mem->parent = whole;
    mem->origin = ((const cl_buffer_region *)info)->origin;
    mem->bytes = ((const cl_buffer_region *)info)->size;
    mem->flags = flags;
    mem->host = whole->host ? whole->host + mem->origin : NULL;
    object_add(&mem->object, SIM_MEM, handle, &call, whole->object.context, true);
    return handle;
}

/* ---- the rest ------------------------------------------------------------------------------------------------------ */

static cl_int CL_API_CALL layer_clRetainMemObject(cl_mem mem)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clRetainMemObject);

    return status != CL_SUCCESS ? status : object_retain(&call, SIM_MEM, mem);
}

static cl_int CL_API_CALL layer_clReleaseMemObject(cl_mem mem)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clReleaseMemObject);

    return status != CL_SUCCESS ? status : object_release(&call, SIM_MEM, mem);
}

static cl_uint count_mappings(const SimMem *mem)
{
    cl_uint n = 0;

    sim_lock();
    for (const SimMapping *mapping = mem->mappings; mapping; mapping = mapping->next)
        n++;
    sim_unlock();
    return n;
}

static cl_int mem_info(SimMem *mem, cl_mem_info what, size_t size, void *value, size_t *size_ret)
{
    cl_uint n_mappings = count_mappings(mem);
    void *host = mem->host;

    switch (what) {
    case CL_MEM_FLAGS:
        return sim_answer(&mem->flags, sizeof(mem->flags), size, value, size_ret);
    case CL_MEM_HOST_PTR:
        return sim_answer(&host, sizeof(host), size, value, size_ret);
    case CL_MEM_MAP_COUNT:
        return sim_answer(&n_mappings, sizeof(n_mappings), size, value, size_ret);
    }
    return sim.next.clGetMemObjectInfo(mem->object.handle, what, size, value, size_ret);
}

static cl_int CL_API_CALL layer_clGetMemObjectInfo(cl_mem handle, cl_mem_info what, size_t size, void *value, size_t *size_ret)
{
    SimMem *mem;
    SimCall call;
    cl_int status = SIM_ENTER(&call, clGetMemObjectInfo);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_MEM, handle);
    if (status != CL_SUCCESS)
        return status;
    if (what == CL_MEM_REFERENCE_COUNT && object_answer_refs(SIM_MEM, handle, size, value, size_ret, &status))
        return status;
    mem = (SimMem *)object_find(SIM_MEM, handle);
    if (mem && mem->object.context->discrete)
        status = mem_info(mem, what, size, value, size_ret);
    else
        status = sim.next.clGetMemObjectInfo(handle, what, size, value, size_ret);
    object_unref(mem ? &mem->object : NULL);
    return status;
}

void memory_hook(void)
{
    SIM_HOOK(clCreateBuffer);
    SIM_HOOK(clCreateBufferWithProperties);
    SIM_HOOK(clCreateSubBuffer);
    SIM_HOOK(clRetainMemObject);
    SIM_HOOK(clReleaseMemObject);
    SIM_HOOK(clGetMemObjectInfo);
}
