/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of OpenCL that fail; objects that were made and not given back. */

#include "tests/lib/fault-internal.h"

#include <CL/cl_ext.h>
#include <string.h>

/* ---- codes --------------------------------------------------------------------------------------------------------- */

/* What OpenCL 1.2 lists for each function, without what concerns images, samplers and devices in parts.  Two of them may always come. */
#define ALWAYS         CL_OUT_OF_RESOURCES, CL_OUT_OF_HOST_MEMORY
#define WAITS          CL_INVALID_EVENT_WAIT_LIST, CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST
#define COMMAND        ALWAYS, CL_INVALID_COMMAND_QUEUE, CL_INVALID_CONTEXT, CL_INVALID_EVENT_WAIT_LIST, CL_MEM_OBJECT_ALLOCATION_FAILURE
#define COPY           COMMAND, WAITS, CL_INVALID_MEM_OBJECT, CL_INVALID_VALUE, CL_MISALIGNED_SUB_BUFFER_OFFSET, CL_INVALID_OPERATION
#define CODES(name, ...) static const cl_int codes_##name[] = {__VA_ARGS__}

CODES(clGetPlatformIDs, CL_INVALID_VALUE, CL_OUT_OF_HOST_MEMORY, -1001);
CODES(clGetPlatformInfo, CL_INVALID_PLATFORM, CL_INVALID_VALUE, CL_OUT_OF_HOST_MEMORY);
CODES(clGetDeviceIDs, ALWAYS, CL_INVALID_PLATFORM, CL_INVALID_DEVICE_TYPE, CL_INVALID_VALUE, CL_DEVICE_NOT_FOUND);
CODES(clGetDeviceInfo, ALWAYS, CL_INVALID_DEVICE, CL_INVALID_VALUE);
CODES(clCreateContext, ALWAYS, CL_INVALID_PLATFORM, CL_INVALID_PROPERTY, CL_INVALID_VALUE, CL_INVALID_DEVICE, CL_DEVICE_NOT_AVAILABLE);
CODES(clReleaseContext, ALWAYS, CL_INVALID_CONTEXT);
CODES(clCreateCommandQueue, ALWAYS, CL_INVALID_CONTEXT, CL_INVALID_DEVICE, CL_INVALID_VALUE, CL_INVALID_QUEUE_PROPERTIES);
CODES(clReleaseCommandQueue, ALWAYS, CL_INVALID_COMMAND_QUEUE);
CODES(clCreateBuffer, ALWAYS, CL_INVALID_CONTEXT, CL_INVALID_VALUE, CL_INVALID_BUFFER_SIZE, CL_INVALID_HOST_PTR,
      CL_MEM_OBJECT_ALLOCATION_FAILURE);
CODES(clReleaseMemObject, ALWAYS, CL_INVALID_MEM_OBJECT);
CODES(clSetMemObjectDestructorCallback, ALWAYS, CL_INVALID_MEM_OBJECT, CL_INVALID_VALUE);
CODES(clCreateProgramWithSource, ALWAYS, CL_INVALID_CONTEXT, CL_INVALID_VALUE);
CODES(clCreateProgramWithBinary, ALWAYS, CL_INVALID_CONTEXT, CL_INVALID_VALUE, CL_INVALID_DEVICE, CL_INVALID_BINARY);
CODES(clReleaseProgram, ALWAYS, CL_INVALID_PROGRAM);
CODES(clBuildProgram, ALWAYS, CL_INVALID_PROGRAM, CL_INVALID_VALUE, CL_INVALID_DEVICE, CL_INVALID_BINARY, CL_INVALID_BUILD_OPTIONS,
      CL_INVALID_OPERATION, CL_COMPILER_NOT_AVAILABLE, CL_BUILD_PROGRAM_FAILURE);
CODES(clGetProgramInfo, ALWAYS, CL_INVALID_VALUE, CL_INVALID_PROGRAM, CL_INVALID_PROGRAM_EXECUTABLE);
CODES(clGetProgramBuildInfo, ALWAYS, CL_INVALID_DEVICE, CL_INVALID_VALUE, CL_INVALID_PROGRAM);
CODES(clCreateKernel, ALWAYS, CL_INVALID_PROGRAM, CL_INVALID_PROGRAM_EXECUTABLE, CL_INVALID_KERNEL_NAME, CL_INVALID_KERNEL_DEFINITION,
      CL_INVALID_VALUE);
CODES(clReleaseKernel, ALWAYS, CL_INVALID_KERNEL);
CODES(clSetKernelArg, ALWAYS, CL_INVALID_KERNEL, CL_INVALID_ARG_INDEX, CL_INVALID_ARG_VALUE, CL_INVALID_MEM_OBJECT, CL_INVALID_ARG_SIZE);
CODES(clGetKernelWorkGroupInfo, ALWAYS, CL_INVALID_DEVICE, CL_INVALID_VALUE, CL_INVALID_KERNEL);
CODES(clEnqueueNDRangeKernel, COMMAND, CL_INVALID_PROGRAM_EXECUTABLE, CL_INVALID_KERNEL, CL_INVALID_KERNEL_ARGS, CL_INVALID_WORK_DIMENSION,
      CL_INVALID_GLOBAL_WORK_SIZE, CL_INVALID_GLOBAL_OFFSET, CL_INVALID_WORK_GROUP_SIZE, CL_INVALID_WORK_ITEM_SIZE,
      CL_MISALIGNED_SUB_BUFFER_OFFSET);
CODES(clEnqueueWriteBuffer, COPY);
CODES(clEnqueueReadBuffer, COPY);
CODES(clEnqueueCopyBuffer, COPY, CL_MEM_COPY_OVERLAP);
CODES(clEnqueueFillBuffer, COPY);
CODES(clEnqueueMigrateMemObjects, COMMAND, CL_INVALID_MEM_OBJECT, CL_INVALID_VALUE);
CODES(clEnqueueBarrierWithWaitList, COMMAND);
CODES(clFlush, ALWAYS, CL_INVALID_COMMAND_QUEUE);
CODES(clFinish, ALWAYS, CL_INVALID_COMMAND_QUEUE);
CODES(clWaitForEvents, ALWAYS, CL_INVALID_VALUE, CL_INVALID_CONTEXT, CL_INVALID_EVENT, CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST);
CODES(clGetEventInfo, ALWAYS, CL_INVALID_VALUE, CL_INVALID_EVENT);
CODES(clSetEventCallback, ALWAYS, CL_INVALID_EVENT, CL_INVALID_VALUE);
CODES(clReleaseEvent, ALWAYS, CL_INVALID_EVENT);
CODES(clGetEventProfilingInfo, ALWAYS, CL_PROFILING_INFO_NOT_AVAILABLE, CL_INVALID_VALUE, CL_INVALID_EVENT);

/* ---- wrappers ------------------------------------------------------------------------------------------------------ */

static atomic_llong n_live;

int64_t fault_live_objects(void)
{
    return atomic_load(&n_live);
}

#define ENTER(name) fault_enter(#name, codes_##name, sizeof(codes_##name) / sizeof(cl_int))

/* Only asks or starts something. */
#define WRAP_CALL(name, parameters, arguments)                                                                                          \
    cl_int CL_API_CALL __real_##name parameters;                                                                                        \
    cl_int CL_API_CALL __wrap_##name parameters;                                                                                        \
    cl_int CL_API_CALL __wrap_##name parameters                                                                                         \
    {                                                                                                                                   \
        cl_int status = ENTER(name);                                                                                                    \
                                                                                                                                        \
        return status == CL_SUCCESS ? __real_##name arguments : status;                                                                 \
    }

/* Makes an event for who wants one. */
#define WRAP_COMMAND(name, parameters, arguments)                                                                                       \
    cl_int CL_API_CALL __real_##name parameters;                                                                                        \
    cl_int CL_API_CALL __wrap_##name parameters;                                                                                        \
    cl_int CL_API_CALL __wrap_##name parameters                                                                                         \
    {                                                                                                                                   \
        cl_int status = ENTER(name);                                                                                                    \
                                                                                                                                        \
        if (status == CL_SUCCESS)                                                                                                       \
            status = __real_##name arguments;                                                                                           \
        if (status == CL_SUCCESS && event)                                                                                              \
            atomic_fetch_add(&n_live, 1);                                                                                               \
        return status;                                                                                                                  \
    }

#define WRAP_CREATE(type, name, parameters, arguments)                                                                                  \
    type CL_API_CALL __real_##name parameters;                                                                                          \
    type CL_API_CALL __wrap_##name parameters;                                                                                          \
    type CL_API_CALL __wrap_##name parameters                                                                                           \
    {                                                                                                                                   \
        cl_int fault = ENTER(name);                                                                                                     \
        type object = NULL;                                                                                                             \
                                                                                                                                        \
        if (fault == CL_SUCCESS)                                                                                                        \
            object = __real_##name arguments;                                                                                           \
        else if (status)                                                                                                                \
            *status = fault;                                                                                                            \
        if (object)                                                                                                                     \
            atomic_fetch_add(&n_live, 1);                                                                                               \
        return object;                                                                                                                  \
    }

/* What is given back is gone, whatever is said about it. */
#define WRAP_RELEASE(name, type)                                                                                                        \
    cl_int CL_API_CALL __real_##name(type object);                                                                                      \
    cl_int CL_API_CALL __wrap_##name(type object);                                                                                      \
    cl_int CL_API_CALL __wrap_##name(type object)                                                                                       \
    {                                                                                                                                   \
        cl_int fault = ENTER(name), status = __real_##name(object);                                                                     \
                                                                                                                                        \
        if (status == CL_SUCCESS)                                                                                                       \
            atomic_fetch_sub(&n_live, 1);                                                                                               \
        return fault == CL_SUCCESS ? status : fault;                                                                                    \
    }

WRAP_CALL(clGetPlatformIDs, (cl_uint n, cl_platform_id *ids, cl_uint *ret_n), (n, ids, ret_n))
WRAP_CALL(clGetPlatformInfo, (cl_platform_id id, cl_platform_info what, size_t size, void *to, size_t *ret), (id, what, size, to, ret))
WRAP_CALL(clGetDeviceIDs, (cl_platform_id id, cl_device_type type, cl_uint n, cl_device_id *ids, cl_uint *ret_n), (id, type, n, ids, ret_n))
WRAP_CALL(clGetDeviceInfo, (cl_device_id id, cl_device_info what, size_t size, void *to, size_t *ret), (id, what, size, to, ret))
WRAP_CREATE(cl_context, clCreateContext,
            (const cl_context_properties *properties, cl_uint n, const cl_device_id *ids,
             void(CL_CALLBACK *notify)(const char *, const void *, size_t, void *), void *data, cl_int *status),
            (properties, n, ids, notify, data, status))
WRAP_RELEASE(clReleaseContext, cl_context)
WRAP_CREATE(cl_command_queue, clCreateCommandQueue,
            (cl_context context, cl_device_id id, cl_command_queue_properties properties, cl_int *status), (context, id, properties, status))
WRAP_RELEASE(clReleaseCommandQueue, cl_command_queue)
WRAP_CREATE(cl_mem, clCreateBuffer, (cl_context context, cl_mem_flags flags, size_t size, void *memory, cl_int *status),
            (context, flags, size, memory, status))
WRAP_RELEASE(clReleaseMemObject, cl_mem)
WRAP_CALL(clSetMemObjectDestructorCallback, (cl_mem memory, void(CL_CALLBACK *notify)(cl_mem, void *), void *data), (memory, notify, data))
WRAP_CREATE(cl_program, clCreateProgramWithSource,
            (cl_context context, cl_uint n, const char **texts, const size_t *lengths, cl_int *status), (context, n, texts, lengths, status))
WRAP_CREATE(cl_program, clCreateProgramWithBinary,
            (cl_context context, cl_uint n, const cl_device_id *ids, const size_t *lengths, const unsigned char **binaries, cl_int *each,
             cl_int *status),
            (context, n, ids, lengths, binaries, each, status))
WRAP_RELEASE(clReleaseProgram, cl_program)
WRAP_CALL(clBuildProgram,
          (cl_program program, cl_uint n, const cl_device_id *ids, const char *options, void(CL_CALLBACK *notify)(cl_program, void *),
           void *data),
          (program, n, ids, options, notify, data))
WRAP_CALL(clGetProgramInfo, (cl_program program, cl_program_info what, size_t size, void *to, size_t *ret), (program, what, size, to, ret))
WRAP_CALL(clGetProgramBuildInfo, (cl_program program, cl_device_id id, cl_program_build_info what, size_t size, void *to, size_t *ret),
          (program, id, what, size, to, ret))
WRAP_CREATE(cl_kernel, clCreateKernel, (cl_program program, const char *name, cl_int *status), (program, name, status))
WRAP_RELEASE(clReleaseKernel, cl_kernel)
WRAP_CALL(clSetKernelArg, (cl_kernel kernel, cl_uint index, size_t size, const void *value), (kernel, index, size, value))
WRAP_CALL(clGetKernelWorkGroupInfo, (cl_kernel kernel, cl_device_id id, cl_kernel_work_group_info what, size_t size, void *to, size_t *ret),
          (kernel, id, what, size, to, ret))
WRAP_COMMAND(clEnqueueNDRangeKernel,
             (cl_command_queue queue, cl_kernel kernel, cl_uint n_dimensions, const size_t *offset, const size_t *global, const size_t *local,
              cl_uint n_waits, const cl_event *waits, cl_event *event),
             (queue, kernel, n_dimensions, offset, global, local, n_waits, waits, event))
WRAP_COMMAND(clEnqueueWriteBuffer,
             (cl_command_queue queue, cl_mem memory, cl_bool blocking, size_t offset, size_t size, const void *host, cl_uint n_waits,
              const cl_event *waits, cl_event *event),
             (queue, memory, blocking, offset, size, host, n_waits, waits, event))
WRAP_COMMAND(clEnqueueReadBuffer,
             (cl_command_queue queue, cl_mem memory, cl_bool blocking, size_t offset, size_t size, void *host, cl_uint n_waits,
              const cl_event *waits, cl_event *event),
             (queue, memory, blocking, offset, size, host, n_waits, waits, event))
WRAP_COMMAND(clEnqueueCopyBuffer,
             (cl_command_queue queue, cl_mem from, cl_mem to, size_t from_offset, size_t to_offset, size_t size, cl_uint n_waits,
              const cl_event *waits, cl_event *event),
             (queue, from, to, from_offset, to_offset, size, n_waits, waits, event))
WRAP_COMMAND(clEnqueueFillBuffer,
             (cl_command_queue queue, cl_mem memory, const void *pattern, size_t pattern_size, size_t offset, size_t size, cl_uint n_waits,
              const cl_event *waits, cl_event *event),
             (queue, memory, pattern, pattern_size, offset, size, n_waits, waits, event))
WRAP_COMMAND(clEnqueueMigrateMemObjects,
             (cl_command_queue queue, cl_uint n, const cl_mem *memory, cl_mem_migration_flags flags, cl_uint n_waits, const cl_event *waits,
              cl_event *event),
             (queue, n, memory, flags, n_waits, waits, event))
WRAP_COMMAND(clEnqueueBarrierWithWaitList, (cl_command_queue queue, cl_uint n_waits, const cl_event *waits, cl_event *event),
             (queue, n_waits, waits, event))
WRAP_CALL(clFlush, (cl_command_queue queue), (queue))
WRAP_CALL(clFinish, (cl_command_queue queue), (queue))
WRAP_CALL(clWaitForEvents, (cl_uint n, const cl_event *events), (n, events))
WRAP_CALL(clGetEventInfo, (cl_event event, cl_event_info what, size_t size, void *to, size_t *ret), (event, what, size, to, ret))
WRAP_CALL(clSetEventCallback, (cl_event event, cl_int type, void(CL_CALLBACK *notify)(cl_event, cl_int, void *), void *data),
          (event, type, notify, data))
WRAP_RELEASE(clReleaseEvent, cl_event)
WRAP_CALL(clGetEventProfilingInfo, (cl_event event, cl_profiling_info what, size_t size, void *to, size_t *ret), (event, what, size, to, ret))
