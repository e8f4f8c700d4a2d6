/* SPDX-License-Identifier: Apache-2.0 */
/* Mapping a buffer: a copy to memory of the host, and back when what was mapped may have been written. */

#include "tests/sim/sim.h"

#include <stdlib.h>
#include <sys/mman.h>

#define MAP_WRITES (CL_MAP_WRITE | CL_MAP_WRITE_INVALIDATE_REGION)

typedef struct Map {
    SimMem *mem; /* a reference */
    cl_bool blocking;
    SimMapping *mapping;
    SimEvent *event; /* of a blocking one; a reference */
} Map;

/* Where maps of @mem show it: always the same place. */
static cl_int ensure_shadow(SimMem *mem)
{
    void *memory;

    if (mem->shadow)
        return CL_SUCCESS;
    if (mem->host) {
        mem->shadow = mem->host;
        return CL_SUCCESS;
    }
    memory = mmap(NULL, mem->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return CL_MAP_FAILURE;
    mem->shadow = memory;
    return CL_SUCCESS;
}

static cl_int map_prepare(SimCommand *command, Map *map, cl_mem handle)
{
    SimMapping *mapping = map->mapping;
    cl_mem_flags refused = CL_MEM_HOST_NO_ACCESS | (mapping->flags & CL_MAP_READ ? CL_MEM_HOST_WRITE_ONLY : 0) |
                           (mapping->flags & MAP_WRITES ? CL_MEM_HOST_READ_ONLY : 0);
    cl_int status = object_check(command->call, SIM_MEM, handle);

    if (status != CL_SUCCESS)
        return status;
    map->mem = (SimMem *)object_find(SIM_MEM, handle);
    if (!map->mem)
        return CL_INVALID_MEM_OBJECT;
    if (map->mem->object.context != command->queue->object.context)
        return CL_INVALID_CONTEXT;
    if (mapping->bytes == 0 || mapping->offset > map->mem->bytes || mapping->bytes > map->mem->bytes - mapping->offset)
        return CL_INVALID_VALUE;
    if (map->mem->flags & refused)
        return CL_INVALID_OPERATION;
    return CL_SUCCESS;
}

/* A job between the buffer and its place in the host's memory; no bytes: only order. */
static SimJob *map_job(SimCommand *command, SimMem *mem, const SimMapping *mapping, bool down, bool moves)
{
    SimEnd device = {.mem = mem, .offset = mapping->offset}, host = {.host = mem->shadow, .offset = mapping->offset};
    SimJob *job = job_new(down ? SIM_LANE_DOWN : SIM_LANE_UP);

    if (!job || !moves)
        return job;
    (void)object_ref(&mem->object);
    job->to = down ? host : device;
    job->from = down ? device : host;
    job->region[0] = mapping->bytes;
    job->region[1] = job->region[2] = 1;
    command_access(command, (SimMem *)object_ref(&mem->object), mapping->offset, mapping->bytes, !down);
    return job;
}

static cl_int map_paced(SimCommand *command, Map *map, cl_event *ret_event)
{
    SimMapping *mapping = map->mapping;
    cl_int status = ensure_shadow(map->mem);
    SimJob *job;

    if (status != CL_SUCCESS)
        return status;
    mapping->pointer = map->mem->shadow + mapping->offset;
    job = map_job(command, map->mem, mapping, true, !(mapping->flags & CL_MAP_WRITE_INVALIDATE_REGION));
    if (!job)
        return CL_OUT_OF_HOST_MEMORY;
    return command_paced(command, job, CL_COMMAND_MAP_BUFFER, ret_event, map->blocking ? &map->event : NULL);
}

static cl_int map_by_driver(SimCommand *command, Map *map, cl_event *ret_event)
{
    SimMapping *mapping = map->mapping;
    cl_event handle = NULL;
    cl_int status;

    command_access(command, (SimMem *)object_ref(&map->mem->object), mapping->offset, mapping->bytes, false);
    mapping->pointer = sim.next.clEnqueueMapBuffer(command->queue->object.handle, map->mem->object.handle, CL_FALSE, mapping->flags,
                                                   mapping->offset, mapping->bytes, command->n_handles, command->handles, &handle,
                                                   &status);
    return command_driver(command, status, CL_COMMAND_MAP_BUFFER, handle, ret_event, map->blocking ? &map->event : NULL);
}

static void *map_run(SimCall *call, cl_command_queue queue, cl_mem buffer, Map *map, cl_uint n, const cl_event *waits,
                     cl_event *ret_event, cl_int *ret)
{
    SimCommand command;
    void *pointer = NULL;
    cl_int status = command_begin(&command, call, queue, n, waits);

    if (status == CL_SUCCESS)
        status = map_prepare(&command, map, buffer);
    if (status == CL_SUCCESS && (command.queue->object.context->discrete || command_is_faulty(&command)))
        status = map_paced(&command, map, ret_event);
    else if (status == CL_SUCCESS)
        status = map_by_driver(&command, map, ret_event);
    if (status == CL_SUCCESS) {
        pointer = map->mapping->pointer;
        sim_lock();
        map->mapping->next = map->mem->mappings;
        map->mem->mappings = map->mapping;
        sim_unlock();
        map->mapping = NULL;
    }
    command_end(&command);
    if (map->event)
        status = event_wait(map->event);
    object_unref(map->event ? &map->event->object : NULL);
    object_unref(map->mem ? &map->mem->object : NULL);
    *ret = status;
    return status == CL_SUCCESS ? pointer : NULL;
}

static void *CL_API_CALL layer_clEnqueueMapBuffer(cl_command_queue queue, cl_mem buffer, cl_bool blocking, cl_map_flags flags,
                                                  size_t offset, size_t size, cl_uint n, const cl_event *waits, cl_event *event,
                                                  cl_int *errcode_ret)
{
    Map map = {.blocking = blocking};
    void *pointer = NULL;
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueMapBuffer);

    if (status == CL_SUCCESS) {
        map.mapping = calloc(1, sizeof(*map.mapping));
        status = map.mapping ? CL_SUCCESS : CL_OUT_OF_HOST_MEMORY;
    }
    if (status == CL_SUCCESS) {
        *map.mapping = (SimMapping){.offset = offset, .bytes = size, .flags = flags};
        pointer = map_run(&call, queue, buffer, &map, n, waits, event, &status);
        free(map.mapping);
    }
    SIM_SET(errcode_ret, status);
    return pointer;
}

/* ---- unmap --------------------------------------------------------------------------------------------------------- */

/* The newest map of @pointer, taken from the list. */
static SimMapping *take_mapping(SimMem *mem, const void *pointer)
{
    SimMapping *mapping = NULL;

    sim_lock();
    for (SimMapping **at = &mem->mappings; *at; at = &(*at)->next)
        if ((*at)->pointer == pointer) {
            mapping = *at;
            *at = mapping->next;
            break;
        }
    sim_unlock();
    return mapping;
}

static cl_int unmap(SimCommand *command, SimMem *mem, void *pointer, cl_event *ret_event)
{
    SimMapping *mapping = take_mapping(mem, pointer);
    bool paced = mem->object.context->discrete || command_is_faulty(command);
    cl_event handle = NULL;
    cl_int status;

    if (!mapping) {
        if (sim.config.checks & SIM_CHECK_MAP)
            report_misuse("map", "%s #%llu unmaps a pointer that is not mapped", sim_function_name(command->call->function),
                          (unsigned long long)command->call->ordinal);
        return CL_INVALID_VALUE;
    }
    if (paced) {
        SimJob *job = map_job(command, mem, mapping, false, mapping->flags & MAP_WRITES);

        status = job ? command_paced(command, job, CL_COMMAND_UNMAP_MEM_OBJECT, ret_event, NULL) : CL_OUT_OF_HOST_MEMORY;
    } else {
        if (mapping->flags & MAP_WRITES)
            command_access(command, (SimMem *)object_ref(&mem->object), mapping->offset, mapping->bytes, true);
        status = sim.next.clEnqueueUnmapMemObject(command->queue->object.handle, mem->object.handle, pointer, command->n_handles,
                                                  command->handles, &handle);
        status = command_driver(command, status, CL_COMMAND_UNMAP_MEM_OBJECT, handle, ret_event, NULL);
    }
    free(mapping);
    return status;
}

static cl_int CL_API_CALL layer_clEnqueueUnmapMemObject(cl_command_queue queue, cl_mem buffer, void *pointer, cl_uint n,
                                                        const cl_event *waits, cl_event *event)
{
    SimCommand command;
    SimMem *mem = NULL;
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueUnmapMemObject);

    if (status != CL_SUCCESS)
        return status;
    status = command_begin(&command, &call, queue, n, waits);
    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_MEM, buffer);
    if (status == CL_SUCCESS) {
        mem = (SimMem *)object_find(SIM_MEM, buffer);
        if (mem) {
            status = unmap(&command, mem, pointer, event);
        } else {
            cl_event handle = NULL;

            /* An image: the driver's. */
            status = sim.next.clEnqueueUnmapMemObject(queue, buffer, pointer, command.n_handles, command.handles, &handle);
            status = command_driver(&command, status, CL_COMMAND_UNMAP_MEM_OBJECT, handle, event, NULL);
        }
    }
    command_end(&command);
    object_unref(mem ? &mem->object : NULL);
    return status;
}

void map_hook(void)
{
    SIM_HOOK(clEnqueueMapBuffer);
    SIM_HOOK(clEnqueueUnmapMemObject);
}
