/* SPDX-License-Identifier: Apache-2.0 */
/* OpenCL status codes in words, and what a failing call does to the device. */

#include "opencl/gpu-internal.h"
#include "quant/base/log.h"

#include <stdarg.h>
#include <string.h>

#define STATUS_PLATFORM_NOT_FOUND (-1001)

typedef struct StatusText {
    cl_int status;
    const char *name, *text;
} StatusText;

#define STATUS(name, text) {name, #name, text}

/* What the OpenCL 1.2 headers do not name is here by number. */
static const StatusText status_texts[] = {
    STATUS(CL_SUCCESS, "no error"),
    STATUS(CL_DEVICE_NOT_FOUND, "the platform has no device of this type"),
    STATUS(CL_DEVICE_NOT_AVAILABLE, "the device is in use or switched off"),
    STATUS(CL_COMPILER_NOT_AVAILABLE, "the driver comes without a compiler"),
    STATUS(CL_MEM_OBJECT_ALLOCATION_FAILURE, "the device has no room for the buffer"),
    STATUS(CL_OUT_OF_RESOURCES, "the device ran out of resources, or a kernel was killed or touched foreign memory"),
    STATUS(CL_OUT_OF_HOST_MEMORY, "the driver got no host memory"),
    STATUS(CL_PROFILING_INFO_NOT_AVAILABLE, "the command has no timestamps"),
    STATUS(CL_MEM_COPY_OVERLAP, "source and target of a copy overlap"),
    STATUS(CL_IMAGE_FORMAT_MISMATCH, "two images differ in format"),
    STATUS(CL_IMAGE_FORMAT_NOT_SUPPORTED, "the device does not know the image format"),
    STATUS(CL_BUILD_PROGRAM_FAILURE, "a program does not compile for this device"),
    STATUS(CL_MAP_FAILURE, "a buffer could not be mapped into host memory"),
    STATUS(CL_MISALIGNED_SUB_BUFFER_OFFSET, "a sub-buffer starts off the device's base alignment"),
    STATUS(CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST, "a command that this one waited for has failed"),
    STATUS(CL_COMPILE_PROGRAM_FAILURE, "a program does not compile for this device"),
    STATUS(CL_LINKER_NOT_AVAILABLE, "the driver comes without a linker"),
    STATUS(CL_LINK_PROGRAM_FAILURE, "compiled programs do not link"),
    STATUS(CL_DEVICE_PARTITION_FAILED, "the device cannot be partitioned so"),
    STATUS(CL_KERNEL_ARG_INFO_NOT_AVAILABLE, "the program keeps no argument names"),
    STATUS(CL_INVALID_VALUE, "an argument is out of its range"),
    STATUS(CL_INVALID_DEVICE_TYPE, "there is no such device type"),
    STATUS(CL_INVALID_PLATFORM, "the platform handle is not valid"),
    STATUS(CL_INVALID_DEVICE, "the device handle is not valid"),
    STATUS(CL_INVALID_CONTEXT, "the context is not valid, or objects of two contexts were mixed"),
    STATUS(CL_INVALID_QUEUE_PROPERTIES, "the device does not support this kind of queue"),
    STATUS(CL_INVALID_COMMAND_QUEUE, "the queue is not valid: the driver has most likely reset the device"),
    STATUS(CL_INVALID_HOST_PTR, "host memory was given where none is allowed, or the reverse"),
    STATUS(CL_INVALID_MEM_OBJECT, "the buffer is not valid"),
    STATUS(CL_INVALID_IMAGE_FORMAT_DESCRIPTOR, "the image format is not valid"),
    STATUS(CL_INVALID_IMAGE_SIZE, "the image is larger than the device allows"),
    STATUS(CL_INVALID_SAMPLER, "the sampler is not valid"),
    STATUS(CL_INVALID_BINARY, "the program binary is damaged or made for another device or driver"),
    STATUS(CL_INVALID_BUILD_OPTIONS, "the compiler does not know one of the build options"),
    STATUS(CL_INVALID_PROGRAM, "the program handle is not valid"),
    STATUS(CL_INVALID_PROGRAM_EXECUTABLE, "the program has not been built for this device"),
    STATUS(CL_INVALID_KERNEL_NAME, "the program has no kernel of this name"),
    STATUS(CL_INVALID_KERNEL_DEFINITION, "the kernel is declared differently for two devices"),
    STATUS(CL_INVALID_KERNEL, "the kernel handle is not valid"),
    STATUS(CL_INVALID_ARG_INDEX, "the kernel has fewer arguments"),
    STATUS(CL_INVALID_ARG_VALUE, "the kernel argument is not a valid object"),
    STATUS(CL_INVALID_ARG_SIZE, "the kernel argument has another size"),
    STATUS(CL_INVALID_KERNEL_ARGS, "a kernel argument was never set"),
    STATUS(CL_INVALID_WORK_DIMENSION, "a launch has one to three dimensions"),
    STATUS(CL_INVALID_WORK_GROUP_SIZE, "the work-group is too large for this kernel, or does not divide the range"),
    STATUS(CL_INVALID_WORK_ITEM_SIZE, "the work-group is too long in one dimension"),
    STATUS(CL_INVALID_GLOBAL_OFFSET, "the range does not fit the device's address width"),
    STATUS(CL_INVALID_EVENT_WAIT_LIST, "an event to wait for is not valid"),
    STATUS(CL_INVALID_EVENT, "the event is not valid"),
    STATUS(CL_INVALID_OPERATION, "the driver does not do this with these objects"),
    STATUS(CL_INVALID_GL_OBJECT, "the OpenGL object is not valid"),
    STATUS(CL_INVALID_BUFFER_SIZE, "the buffer is empty or larger than the device allows"),
    STATUS(CL_INVALID_MIP_LEVEL, "the mip level is not valid"),
    STATUS(CL_INVALID_GLOBAL_WORK_SIZE, "the range of a launch is empty or too large"),
    STATUS(CL_INVALID_PROPERTY, "a property is not known"),
    STATUS(CL_INVALID_IMAGE_DESCRIPTOR, "the image description is not valid"),
    STATUS(CL_INVALID_COMPILER_OPTIONS, "the compiler does not know one of the options"),
    STATUS(CL_INVALID_LINKER_OPTIONS, "the linker does not know one of the options"),
    STATUS(CL_INVALID_DEVICE_PARTITION_COUNT, "the device cannot be cut into so many parts"),
    {-69, "CL_INVALID_PIPE_SIZE", "the pipe is larger than the device allows"},
    {-70, "CL_INVALID_DEVICE_QUEUE", "the device queue is not valid"},
    {-71, "CL_INVALID_SPEC_ID", "the program has no such specialization constant"},
    {-72, "CL_MAX_SIZE_RESTRICTION_EXCEEDED", "a size exceeds what the kernel declares"},
    {-1000, "CL_INVALID_GL_SHAREGROUP_REFERENCE_KHR", "the OpenGL context cannot be shared"},
    {STATUS_PLATFORM_NOT_FOUND, "CL_PLATFORM_NOT_FOUND_KHR", "no OpenCL driver is installed"},
    {-1002, "CL_INVALID_D3D10_DEVICE_KHR", "the Direct3D 10 device is not valid"},
    {-1003, "CL_INVALID_D3D10_RESOURCE_KHR", "the Direct3D 10 resource is not valid"},
    {-1004, "CL_D3D10_RESOURCE_ALREADY_ACQUIRED_KHR", "the Direct3D 10 resource is already acquired"},
    {-1005, "CL_D3D10_RESOURCE_NOT_ACQUIRED_KHR", "the Direct3D 10 resource is not acquired"},
    {-1006, "CL_INVALID_D3D11_DEVICE_KHR", "the Direct3D 11 device is not valid"},
    {-1007, "CL_INVALID_D3D11_RESOURCE_KHR", "the Direct3D 11 resource is not valid"},
    {-1008, "CL_D3D11_RESOURCE_ALREADY_ACQUIRED_KHR", "the Direct3D 11 resource is already acquired"},
    {-1009, "CL_D3D11_RESOURCE_NOT_ACQUIRED_KHR", "the Direct3D 11 resource is not acquired"},
    {-1010, "CL_INVALID_DX9_MEDIA_ADAPTER_KHR", "the DirectX 9 adapter is not valid"},
    {-1011, "CL_INVALID_DX9_MEDIA_SURFACE_KHR", "the DirectX 9 surface is not valid"},
    {-1012, "CL_DX9_MEDIA_SURFACE_ALREADY_ACQUIRED_KHR", "the DirectX 9 surface is already acquired"},
    {-1013, "CL_DX9_MEDIA_SURFACE_NOT_ACQUIRED_KHR", "the DirectX 9 surface is not acquired"},
    {-1057, "CL_DEVICE_PARTITION_FAILED_EXT", "the device cannot be partitioned so"},
    {-1058, "CL_INVALID_PARTITION_COUNT_EXT", "the device cannot be cut into so many parts"},
    {-1059, "CL_INVALID_PARTITION_NAME_EXT", "the device has no such partition"},
    {-1092, "CL_EGL_RESOURCE_NOT_ACQUIRED_KHR", "the EGL resource is not acquired"},
    {-1093, "CL_INVALID_EGL_OBJECT_KHR", "the EGL object is not valid"},
    {-1094, "CL_INVALID_ACCELERATOR_INTEL", "the accelerator object is not valid"},
    {-1095, "CL_INVALID_ACCELERATOR_TYPE_INTEL", "the accelerator type is not known"},
    {-1096, "CL_INVALID_ACCELERATOR_DESCRIPTOR_INTEL", "the accelerator description is not valid"},
    {-1097, "CL_ACCELERATOR_TYPE_NOT_SUPPORTED_INTEL", "the device has no such accelerator"},
    {-1098, "CL_INVALID_VA_API_MEDIA_ADAPTER_INTEL", "the VA-API adapter is not valid"},
    {-1099, "CL_INVALID_VA_API_MEDIA_SURFACE_INTEL", "the VA-API surface is not valid"},
    {-1100, "CL_VA_API_MEDIA_SURFACE_ALREADY_ACQUIRED_INTEL", "the VA-API surface is already acquired"},
    {-1101, "CL_VA_API_MEDIA_SURFACE_NOT_ACQUIRED_INTEL", "the VA-API surface is not acquired"},
    {-1108, "CL_COMMAND_TERMINATED_ITSELF_WITH_FAILURE_ARM", "a kernel ended itself with a failure"},
    {-1121, "CL_CONTEXT_TERMINATED_KHR", "the driver has terminated the context: the device was reset or removed"},
    {-1138, "CL_INVALID_COMMAND_BUFFER_KHR", "the command buffer is not valid"},
    {-1139, "CL_INVALID_SYNC_POINT_WAIT_LIST_KHR", "a sync point to wait for is not valid"},
    {-1140, "CL_INCOMPATIBLE_COMMAND_QUEUE_KHR", "the command buffer was made for another queue"},
    {-1141, "CL_INVALID_MUTABLE_COMMAND_KHR", "the recorded command cannot be changed so"},
    {-1142, "CL_INVALID_SEMAPHORE_KHR", "the semaphore is not valid"},
    {-9999, "CL_NV_ILLEGAL_MEMORY_ACCESS", "a kernel read or wrote outside of its buffers"},
};

static const StatusText *gpu_cl_find(cl_int status)
{
    for (size_t i = 0; i < N_ELEMENTS(status_texts); i++)
        if (status_texts[i].status == status)
            return &status_texts[i];
    return NULL;
}

const char *gpu_cl_name(cl_int status)
{
    const StatusText *found = gpu_cl_find(status);

    return found ? found->name : "CL_UNKNOWN_STATUS";
}

const char *gpu_cl_text(cl_int status)
{
    const StatusText *found = gpu_cl_find(status);

    return found ? found->text : "a status that no OpenCL version or known vendor defines";
}

bool gpu_cl_is_refusal(cl_int status)
{
    return status == CL_MEM_OBJECT_ALLOCATION_FAILURE || status == CL_OUT_OF_RESOURCES ||
           status == CL_INVALID_BUFFER_SIZE || status == CL_OUT_OF_HOST_MEMORY;
}

static int gpu_cl_errno(cl_int status)
{
    if (status == CL_OUT_OF_HOST_MEMORY)
        return -ENOMEM;
    if (status <= CL_INVALID_VALUE && status >= -72)
        return -EINVAL;
    return -EIO;
}

int gpu_cl_check(Gpu *gpu, cl_int status, const char *call, const char *file, int line, const char *function)
{
    int name_length = (int)strcspn(call, "(");

    if (status == CL_SUCCESS)
        return 0;
    log_debug("%s:%d: %s: %s: %s (%d): %s", file, line, function, call, gpu_cl_name(status), (int)status,
              gpu_cl_text(status));
    if (gpu)
        gpu_lose(gpu, "%.*s: %s (%d): %s", name_length, call, gpu_cl_name(status), (int)status, gpu_cl_text(status));
    return gpu_cl_errno(status);
}

void gpu_lose(Gpu *gpu, const char *format, ...)
{
    va_list args;

    if (atomic_load(&gpu->lost))
        return;
    va_start(args, format);
    (void)vsnprintf(gpu->lost_text, sizeof(gpu->lost_text), format, args);
    va_end(args);
    atomic_store(&gpu->lost, true);
    log_debug("device '%s' is lost: %s", gpu->info.name, gpu->lost_text);
    gpu_settle(gpu);
}

void gpu_explain(const Gpu *gpu, ErrorDetail *reterr)
{
    if (reterr && !reterr->text[0] && gpu_is_lost(gpu))
        (void)error_detail_set(reterr, -ENODEV, "'%s': %s", gpu->info.name, gpu->lost_text);
}

int gpu_refuse_lost(Gpu *gpu, ErrorDetail *reterr)
{
    return error_detail_set(reterr, -ENODEV, "the device '%s' is lost: %s", gpu->info.name, gpu->lost_text);
}
