/* SPDX-License-Identifier: Apache-2.0 */
/* Commands that are the driver's own: fills, migrations, markers, barriers; and those that a device with memory of its own does not have. */

#include "tests/sim/sim.h"

/* A buffer that the command uses as a whole or in part; unknown ones are the driver's. */
static cl_int use_buffer(SimCommand *command, cl_mem handle, uint64_t offset, uint64_t bytes, bool writes)
{
    cl_int status = object_check(command->call, SIM_MEM, handle);
    SimMem *mem = status == CL_SUCCESS && handle ? (SimMem *)object_find(SIM_MEM, handle) : NULL;

    if (mem)
        command_access(command, mem, offset, bytes ? bytes : mem->bytes, writes);
    return status;
}

static cl_int CL_API_CALL layer_clEnqueueFillBuffer(cl_command_queue queue, cl_mem buffer, const void *pattern, size_t pattern_size,
                                                    size_t offset, size_t size, cl_uint n, const cl_event *waits, cl_event *event)
{
    SimCommand command;
    cl_event driver = NULL;
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueFillBuffer);

    if (status != CL_SUCCESS)
        return status;
    status = command_begin(&command, &call, queue, n, waits);
    if (status == CL_SUCCESS)
        status = use_buffer(&command, buffer, offset, size, true);
    if (status == CL_SUCCESS && command_is_faulty(&command)) {
        status = command_faulty(&command, CL_COMMAND_FILL_BUFFER, event);
    } else if (status == CL_SUCCESS) {
        status = sim.next.clEnqueueFillBuffer(queue, buffer, pattern, pattern_size, offset, size, command.n_handles, command.handles,
                                              &driver);
        status = command_driver(&command, status, CL_COMMAND_FILL_BUFFER, driver, event, NULL);
    }
    command_end(&command);
    return status;
}

static cl_int CL_API_CALL layer_clEnqueueMigrateMemObjects(cl_command_queue queue, cl_uint n_buffers, const cl_mem *buffers,
                                                           cl_mem_migration_flags flags, cl_uint n, const cl_event *waits,
                                                           cl_event *event)
{
    SimCommand command;
    cl_event driver = NULL;
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueMigrateMemObjects);

    if (status != CL_SUCCESS)
        return status;
    status = command_begin(&command, &call, queue, n, waits);
    for (cl_uint i = 0; buffers && i < n_buffers && status == CL_SUCCESS; i++)
        status = object_check(&call, SIM_MEM, buffers[i]);
    if (status == CL_SUCCESS && command_is_faulty(&command)) {
        status = command_faulty(&command, CL_COMMAND_MIGRATE_MEM_OBJECTS, event);
    } else if (status == CL_SUCCESS) {
        status = sim.next.clEnqueueMigrateMemObjects(queue, n_buffers, buffers, flags, command.n_handles, command.handles, &driver);
        status = command_driver(&command, status, CL_COMMAND_MIGRATE_MEM_OBJECTS, driver, event, NULL);
    }
    command_end(&command);
    return status;
}

static cl_int order_only(SimCall *call, cl_command_queue queue, cl_command_type type, cl_uint n, const cl_event *waits,
                         cl_event *event)
{
    SimCommand command;
    cl_event driver = NULL;
    cl_int status = command_begin(&command, call, queue, n, waits);

    command.waits_for_all = n == 0;
    if (status == CL_SUCCESS && command_is_faulty(&command)) {
        status = command_faulty(&command, type, event);
    } else if (status == CL_SUCCESS) {
        status = type == CL_COMMAND_MARKER
                     ? sim.next.clEnqueueMarkerWithWaitList(queue, command.n_handles, command.handles, &driver)
                     : sim.next.clEnqueueBarrierWithWaitList(queue, command.n_handles, command.handles, &driver);
        status = command_driver(&command, status, type, driver, event, NULL);
    }
    command_end(&command);
    return status;
}

static cl_int CL_API_CALL layer_clEnqueueMarkerWithWaitList(cl_command_queue queue, cl_uint n, const cl_event *waits, cl_event *event)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueMarkerWithWaitList);

    return status != CL_SUCCESS ? status : order_only(&call, queue, CL_COMMAND_MARKER, n, waits, event);
}

static cl_int CL_API_CALL layer_clEnqueueBarrierWithWaitList(cl_command_queue queue, cl_uint n, const cl_event *waits,
                                                             cl_event *event)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueBarrierWithWaitList);

    return status != CL_SUCCESS ? status : order_only(&call, queue, CL_COMMAND_BARRIER, n, waits, event);
}

static cl_int CL_API_CALL layer_clEnqueueMarker(cl_command_queue queue, cl_event *event)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueMarker);

    if (status == CL_SUCCESS && !event)
        status = CL_INVALID_VALUE;
    return status != CL_SUCCESS ? status : order_only(&call, queue, CL_COMMAND_MARKER, 0, NULL, event);
}

static cl_int CL_API_CALL layer_clEnqueueBarrier(cl_command_queue queue)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueBarrier);

    return status != CL_SUCCESS ? status : order_only(&call, queue, CL_COMMAND_BARRIER, 0, NULL, NULL);
}

static cl_int CL_API_CALL layer_clEnqueueWaitForEvents(cl_command_queue queue, cl_uint n, const cl_event *waits)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueWaitForEvents);

    if (status == CL_SUCCESS && (n == 0 || !waits))
        status = CL_INVALID_VALUE;
    return status != CL_SUCCESS ? status : order_only(&call, queue, CL_COMMAND_BARRIER, n, waits, NULL);
}

static cl_int CL_API_CALL layer_clEnqueueNativeKernel(cl_command_queue queue, void(CL_CALLBACK *function)(void *), void *arguments,
                                                      size_t size, cl_uint n_buffers, const cl_mem *buffers, const void **places,
                                                      cl_uint n, const cl_event *waits, cl_event *event)
{
    SimCommand command;
    cl_event driver = NULL;
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueNativeKernel);

    if (status == CL_SUCCESS && !sim.config.unified)
        status = CL_INVALID_OPERATION; /* CL_DEVICE_EXECUTION_CAPABILITIES says so */
    if (status != CL_SUCCESS)
        return status;
    status = command_begin(&command, &call, queue, n, waits);
    for (cl_uint i = 0; buffers && i < n_buffers && status == CL_SUCCESS; i++)
        status = use_buffer(&command, buffers[i], 0, 0, true);
    if (status == CL_SUCCESS) {
        status = sim.next.clEnqueueNativeKernel(queue, function, arguments, size, n_buffers, buffers, places, command.n_handles,
                                                command.handles, &driver);
        status = command_driver(&command, status, CL_COMMAND_NATIVE_KERNEL, driver, event, NULL);
    }
    command_end(&command);
    return status;
}

void enqueue_hook(void)
{
    SIM_HOOK(clEnqueueFillBuffer);
    SIM_HOOK(clEnqueueMigrateMemObjects);
    SIM_HOOK(clEnqueueMarkerWithWaitList);
    SIM_HOOK(clEnqueueBarrierWithWaitList);
    SIM_HOOK(clEnqueueMarker);
    SIM_HOOK(clEnqueueBarrier);
    SIM_HOOK(clEnqueueWaitForEvents);
    SIM_HOOK(clEnqueueNativeKernel);
}
