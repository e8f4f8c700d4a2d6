/* SPDX-License-Identifier: Apache-2.0 */
/* Calls that pass through: counted, made to fail when their turn has come, and refused on handles that were released. */

#include "tests/sim/sim.h"

#define PASS(name, params, ...)                                                      \
    static cl_int CL_API_CALL layer_##name params                                    \
    {                                                                                \
        SimCall call;                                                                \
        cl_int status = SIM_ENTER(&call, name);                                      \
                                                                                     \
        return status != CL_SUCCESS ? status : sim.next.name(__VA_ARGS__);           \
    }

#define PASS_OF(kind, handle, name, params, ...)                                     \
    static cl_int CL_API_CALL layer_##name params                                    \
    {                                                                                \
        SimCall call;                                                                \
        cl_int status = SIM_ENTER(&call, name);                                      \
                                                                                     \
        if (status == CL_SUCCESS)                                                    \
            status = object_check(&call, kind, handle);                              \
        return status != CL_SUCCESS ? status : sim.next.name(__VA_ARGS__);           \
    }

/* What a device with memory of its own, as this one says of itself, does not have. */
#define REFUSE(type, name, params, ...)                                              \
    static type CL_API_CALL layer_##name params                                      \
    {                                                                                \
        SimCall call;                                                                \
        cl_int status = SIM_ENTER(&call, name);                                      \
                                                                                     \
        if (status == CL_SUCCESS && !sim.config.unified)                             \
            status = CL_INVALID_OPERATION;                                           \
        if (status == CL_SUCCESS)                                                    \
            return sim.next.name(__VA_ARGS__);                                       \
        SIM_SET(errcode_ret, status);                                                \
        return NULL;                                                                 \
    }

#define WAITS cl_uint n, const cl_event *waits, cl_event *event

/* ---- platforms and devices ----------------------------------------------------------------------------------------- */

PASS(clGetPlatformIDs, (cl_uint n, cl_platform_id *platforms, cl_uint *ret_n), n, platforms, ret_n)
PASS(clCreateSubDevices,
     (cl_device_id device, const cl_device_partition_property *properties, cl_uint n, cl_device_id *devices, cl_uint *ret_n), device,
     properties, n, devices, ret_n)
PASS(clCreateSubDevicesEXT,
     (cl_device_id device, const cl_device_partition_property_ext *properties, cl_uint n, cl_device_id *devices, cl_uint *ret_n),
     device, properties, n, devices, ret_n)
PASS(clRetainDevice, (cl_device_id device), device)
PASS(clReleaseDevice, (cl_device_id device), device)
PASS(clRetainDeviceEXT, (cl_device_id device), device)
PASS(clReleaseDeviceEXT, (cl_device_id device), device)
PASS(clGetDeviceAndHostTimer, (cl_device_id device, cl_ulong *device_time, cl_ulong *host_time), device, device_time, host_time)
PASS(clGetHostTimer, (cl_device_id device, cl_ulong *host_time), device, host_time)
PASS(clUnloadCompiler, (void))
PASS(clUnloadPlatformCompiler, (cl_platform_id platform), platform)

/* ---- contexts, queues ---------------------------------------------------------------------------------------------- */

PASS_OF(SIM_CONTEXT, context, clSetContextDestructorCallback,
        (cl_context context, void(CL_CALLBACK *notify)(cl_context, void *), void *userdata), context, notify, userdata)
PASS_OF(SIM_CONTEXT, context, clSetDefaultDeviceCommandQueue, (cl_context context, cl_device_id device, cl_command_queue queue),
        context, device, queue)
PASS_OF(SIM_QUEUE, queue, clSetCommandQueueProperty,
        (cl_command_queue queue, cl_command_queue_properties properties, cl_bool enable, cl_command_queue_properties *old), queue,
        properties, enable, old)

/* ---- memory -------------------------------------------------------------------------------------------------------- */

PASS_OF(SIM_MEM, mem, clSetMemObjectDestructorCallback, (cl_mem mem, void(CL_CALLBACK *notify)(cl_mem, void *), void *userdata), mem,
        notify, userdata)
REFUSE(cl_mem, clCreateImage,
       (cl_context context, cl_mem_flags flags, const cl_image_format *format, const cl_image_desc *description, void *host,
        cl_int *errcode_ret),
       context, flags, format, description, host, errcode_ret)
REFUSE(cl_mem, clCreateImageWithProperties,
       (cl_context context, const cl_mem_properties *properties, cl_mem_flags flags, const cl_image_format *format,
        const cl_image_desc *description, void *host, cl_int *errcode_ret),
       context, properties, flags, format, description, host, errcode_ret)
REFUSE(cl_mem, clCreateImage2D,
       (cl_context context, cl_mem_flags flags, const cl_image_format *format, size_t width, size_t height, size_t pitch, void *host,
        cl_int *errcode_ret),
       context, flags, format, width, height, pitch, host, errcode_ret)
REFUSE(cl_mem, clCreateImage3D,
       (cl_context context, cl_mem_flags flags, const cl_image_format *format, size_t width, size_t height, size_t depth, size_t row,
        size_t slice, void *host, cl_int *errcode_ret),
       context, flags, format, width, height, depth, row, slice, host, errcode_ret)
REFUSE(cl_mem, clCreatePipe,
       (cl_context context, cl_mem_flags flags, cl_uint size, cl_uint n, const cl_pipe_properties *properties, cl_int *errcode_ret),
       context, flags, size, n, properties, errcode_ret)
PASS(clGetImageInfo, (cl_mem image, cl_image_info what, size_t size, void *value, size_t *size_ret), image, what, size, value, size_ret)
PASS(clGetPipeInfo, (cl_mem pipe, cl_pipe_info what, size_t size, void *value, size_t *size_ret), pipe, what, size, value, size_ret)

static cl_int CL_API_CALL layer_clGetSupportedImageFormats(cl_context context, cl_mem_flags flags, cl_mem_object_type type, cl_uint n,
                                                           cl_image_format *formats, cl_uint *ret_n)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clGetSupportedImageFormats);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_CONTEXT, context);
    if (status == CL_SUCCESS && sim.config.unified)
        return sim.next.clGetSupportedImageFormats(context, flags, type, n, formats, ret_n);
    if (status == CL_SUCCESS)
        SIM_SET(ret_n, 0);
    return status;
}

static void *CL_API_CALL layer_clSVMAlloc(cl_context context, cl_svm_mem_flags flags, size_t size, unsigned alignment)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clSVMAlloc);

    return status == CL_SUCCESS && sim.config.unified ? sim.next.clSVMAlloc(context, flags, size, alignment) : NULL;
}

static void CL_API_CALL layer_clSVMFree(cl_context context, void *memory)
{
    SimCall call;

    if (SIM_ENTER(&call, clSVMFree) == CL_SUCCESS)
        sim.next.clSVMFree(context, memory);
}

/* ---- samplers ------------------------------------------------------------------------------------------------------ */

REFUSE(cl_sampler, clCreateSampler,
       (cl_context context, cl_bool normalized, cl_addressing_mode addressing, cl_filter_mode filter, cl_int *errcode_ret), context,
       normalized, addressing, filter, errcode_ret)
REFUSE(cl_sampler, clCreateSamplerWithProperties,
       (cl_context context, const cl_sampler_properties *properties, cl_int *errcode_ret), context, properties, errcode_ret)
PASS(clRetainSampler, (cl_sampler sampler), sampler)
PASS(clReleaseSampler, (cl_sampler sampler), sampler)
PASS(clGetSamplerInfo, (cl_sampler sampler, cl_sampler_info what, size_t size, void *value, size_t *size_ret), sampler, what, size,
     value, size_ret)

/* ---- programs and kernels ------------------------------------------------------------------------------------------ */

typedef void(CL_CALLBACK *ProgramNotify)(cl_program, void *);

PASS_OF(SIM_PROGRAM, program, clCompileProgram,
        (cl_program program, cl_uint n, const cl_device_id *devices, const char *options, cl_uint n_headers, const cl_program *headers,
         const char **names, ProgramNotify notify, void *userdata),
        program, n, devices, options, n_headers, headers, names, notify, userdata)
PASS_OF(SIM_PROGRAM, program, clGetProgramBuildInfo,
        (cl_program program, cl_device_id device, cl_program_build_info what, size_t size, void *value, size_t *size_ret), program,
        device, what, size, value, size_ret)
PASS_OF(SIM_PROGRAM, program, clSetProgramReleaseCallback, (cl_program program, ProgramNotify notify, void *userdata), program, notify,
        userdata)
PASS_OF(SIM_PROGRAM, program, clSetProgramSpecializationConstant,
        (cl_program program, cl_uint id, size_t size, const void *value), program, id, size, value)
PASS_OF(SIM_KERNEL, kernel, clGetKernelArgInfo,
        (cl_kernel kernel, cl_uint index, cl_kernel_arg_info what, size_t size, void *value, size_t *size_ret), kernel, index, what,
        size, value, size_ret)
PASS_OF(SIM_KERNEL, kernel, clGetKernelWorkGroupInfo,
        (cl_kernel kernel, cl_device_id device, cl_kernel_work_group_info what, size_t size, void *value, size_t *size_ret), kernel,
        device, what, size, value, size_ret)
PASS_OF(SIM_KERNEL, kernel, clGetKernelSubGroupInfo,
        (cl_kernel kernel, cl_device_id device, cl_kernel_sub_group_info what, size_t in_size, const void *in, size_t size, void *value,
         size_t *size_ret),
        kernel, device, what, in_size, in, size, value, size_ret)
PASS_OF(SIM_KERNEL, kernel, clGetKernelSubGroupInfoKHR,
        (cl_kernel kernel, cl_device_id device, cl_kernel_sub_group_info what, size_t in_size, const void *in, size_t size, void *value,
         size_t *size_ret),
        kernel, device, what, in_size, in, size, value, size_ret)
PASS_OF(SIM_KERNEL, kernel, clSetKernelArgSVMPointer, (cl_kernel kernel, cl_uint index, const void *value), kernel, index, value)
PASS_OF(SIM_KERNEL, kernel, clSetKernelExecInfo, (cl_kernel kernel, cl_kernel_exec_info what, size_t size, const void *value), kernel,
        what, size, value)

/* ---- images and shared virtual memory: only on a device that says it has them ------------------------------------------ */

PASS_OF(SIM_QUEUE, queue, clEnqueueReadImage,
        (cl_command_queue queue, cl_mem image, cl_bool blocking, const size_t *at, const size_t *region, size_t row, size_t slice,
         void *host, WAITS),
        queue, image, blocking, at, region, row, slice, host, n, waits, event)
PASS_OF(SIM_QUEUE, queue, clEnqueueWriteImage,
        (cl_command_queue queue, cl_mem image, cl_bool blocking, const size_t *at, const size_t *region, size_t row, size_t slice,
         const void *host, WAITS),
        queue, image, blocking, at, region, row, slice, host, n, waits, event)
PASS_OF(SIM_QUEUE, queue, clEnqueueFillImage,
        (cl_command_queue queue, cl_mem image, const void *color, const size_t at[3], const size_t region[3], WAITS), queue, image,
        color, at, region, n, waits, event)
PASS_OF(SIM_QUEUE, queue, clEnqueueCopyImage,
        (cl_command_queue queue, cl_mem from, cl_mem to, const size_t *from_at, const size_t *to_at, const size_t *region, WAITS), queue,
        from, to, from_at, to_at, region, n, waits, event)
PASS_OF(SIM_QUEUE, queue, clEnqueueCopyImageToBuffer,
        (cl_command_queue queue, cl_mem image, cl_mem buffer, const size_t *at, const size_t *region, size_t offset, WAITS), queue, image,
        buffer, at, region, offset, n, waits, event)
PASS_OF(SIM_QUEUE, queue, clEnqueueCopyBufferToImage,
        (cl_command_queue queue, cl_mem buffer, cl_mem image, size_t offset, const size_t *at, const size_t *region, WAITS), queue,
        buffer, image, offset, at, region, n, waits, event)
PASS_OF(SIM_QUEUE, queue, clEnqueueSVMFree,
        (cl_command_queue queue, cl_uint n_pointers, void **pointers,
         void(CL_CALLBACK *notify)(cl_command_queue, cl_uint, void **, void *), void *userdata, WAITS),
        queue, n_pointers, pointers, notify, userdata, n, waits, event)
PASS_OF(SIM_QUEUE, queue, clEnqueueSVMMemcpy,
        (cl_command_queue queue, cl_bool blocking, void *to, const void *from, size_t size, WAITS), queue, blocking, to, from, size, n,
        waits, event)
PASS_OF(SIM_QUEUE, queue, clEnqueueSVMMemFill,
        (cl_command_queue queue, void *to, const void *pattern, size_t pattern_size, size_t size, WAITS), queue, to, pattern,
        pattern_size, size, n, waits, event)
PASS_OF(SIM_QUEUE, queue, clEnqueueSVMMap,
        (cl_command_queue queue, cl_bool blocking, cl_map_flags flags, void *pointer, size_t size, WAITS), queue, blocking, flags,
        pointer, size, n, waits, event)
PASS_OF(SIM_QUEUE, queue, clEnqueueSVMUnmap, (cl_command_queue queue, void *pointer, WAITS), queue, pointer, n, waits, event)
PASS_OF(SIM_QUEUE, queue, clEnqueueSVMMigrateMem,
        (cl_command_queue queue, cl_uint n_pointers, const void **pointers, const size_t *sizes, cl_mem_migration_flags flags, WAITS),
        queue, n_pointers, pointers, sizes, flags, n, waits, event)

static void *CL_API_CALL layer_clEnqueueMapImage(cl_command_queue queue, cl_mem image, cl_bool blocking, cl_map_flags flags,
                                                 const size_t *at, const size_t *region, size_t *row, size_t *slice, cl_uint n,
                                                 const cl_event *waits, cl_event *event, cl_int *errcode_ret)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueMapImage);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_QUEUE, queue);
    if (status == CL_SUCCESS)
        return sim.next.clEnqueueMapImage(queue, image, blocking, flags, at, region, row, slice, n, waits, event, errcode_ret);
    SIM_SET(errcode_ret, status);
    return NULL;
}

static void hook_devices(void)
{
    SIM_HOOK(clGetPlatformIDs);
    SIM_HOOK(clCreateSubDevices);
    SIM_HOOK(clCreateSubDevicesEXT);
    SIM_HOOK(clRetainDevice);
    SIM_HOOK(clReleaseDevice);
    SIM_HOOK(clRetainDeviceEXT);
    SIM_HOOK(clReleaseDeviceEXT);
    SIM_HOOK(clGetDeviceAndHostTimer);
    SIM_HOOK(clGetHostTimer);
    SIM_HOOK(clUnloadCompiler);
    SIM_HOOK(clUnloadPlatformCompiler);
    SIM_HOOK(clSetContextDestructorCallback);
    SIM_HOOK(clSetDefaultDeviceCommandQueue);
    SIM_HOOK(clSetCommandQueueProperty);
}

static void hook_objects(void)
{
    SIM_HOOK(clSetMemObjectDestructorCallback);
    SIM_HOOK(clCreateImage);
    SIM_HOOK(clCreateImageWithProperties);
    SIM_HOOK(clCreateImage2D);
    SIM_HOOK(clCreateImage3D);
    SIM_HOOK(clCreatePipe);
    SIM_HOOK(clGetImageInfo);
    SIM_HOOK(clGetPipeInfo);
    SIM_HOOK(clGetSupportedImageFormats);
    SIM_HOOK(clSVMAlloc);
    SIM_HOOK(clSVMFree);
    SIM_HOOK(clCreateSampler);
    SIM_HOOK(clCreateSamplerWithProperties);
    SIM_HOOK(clRetainSampler);
    SIM_HOOK(clReleaseSampler);
    SIM_HOOK(clGetSamplerInfo);
    SIM_HOOK(clCompileProgram);
    SIM_HOOK(clGetProgramBuildInfo);
    SIM_HOOK(clSetProgramReleaseCallback);
    SIM_HOOK(clSetProgramSpecializationConstant);
    SIM_HOOK(clGetKernelArgInfo);
    SIM_HOOK(clGetKernelWorkGroupInfo);
    SIM_HOOK(clGetKernelSubGroupInfo);
    SIM_HOOK(clGetKernelSubGroupInfoKHR);
    SIM_HOOK(clSetKernelArgSVMPointer);
    SIM_HOOK(clSetKernelExecInfo);
}

void pass_hook(void)
{
    hook_devices();
    hook_objects();
    SIM_HOOK(clEnqueueReadImage);
    SIM_HOOK(clEnqueueWriteImage);
    SIM_HOOK(clEnqueueFillImage);
    SIM_HOOK(clEnqueueCopyImage);
    SIM_HOOK(clEnqueueCopyImageToBuffer);
    SIM_HOOK(clEnqueueCopyBufferToImage);
    SIM_HOOK(clEnqueueMapImage);
    SIM_HOOK(clEnqueueSVMFree);
    SIM_HOOK(clEnqueueSVMMemcpy);
    SIM_HOOK(clEnqueueSVMMemFill);
    SIM_HOOK(clEnqueueSVMMap);
    SIM_HOOK(clEnqueueSVMUnmap);
    SIM_HOOK(clEnqueueSVMMigrateMem);
}
