/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels: arguments, and the one function through which every launch goes. */

#include "opencl/gpu-internal.h"
#include "quant/base/checked.h"
#include "quant/base/log.h"

#include <inttypes.h>
#include <string.h>

int gpu_kernel_new(GpuProgram *program, const char *name, GpuKernel **ret, ErrorDetail *reterr)
{
    _cleanup_(gpu_kernel_freep) GpuKernel *kernel = NULL;
    Gpu *gpu = program->gpu;
    cl_ulong local_bytes = 0;
    size_t max_work_group = 0;
    cl_int status;
    int r;

    if (gpu_is_lost(gpu))
        return gpu_refuse_lost(gpu, reterr);
    kernel = calloc(1, sizeof(*kernel));
    if (!kernel)
        return error_origin(-ENOMEM);
    kernel->gpu = gpu;
    kernel->name = gpu_intern(gpu, name);
    if (!kernel->name)
        return error_origin(-ENOMEM);
    kernel->cl = clCreateKernel(program->cl, name, &status);
    if (status == CL_INVALID_KERNEL_NAME)
        return error_detail_set(reterr, -ENOENT, "the program has no kernel '%s'", name);
    r = CL_CHECK(gpu, status, "clCreateKernel");
    if (!r)
        r = CL_TRY(gpu, clGetKernelWorkGroupInfo(kernel->cl, gpu->device, CL_KERNEL_WORK_GROUP_SIZE,
                                                 sizeof(max_work_group), &max_work_group, NULL));
    if (!r)
        r = CL_TRY(gpu, clGetKernelWorkGroupInfo(kernel->cl, gpu->device, CL_KERNEL_LOCAL_MEM_SIZE, sizeof(local_bytes),
                                                 &local_bytes, NULL));
    if (r)
        return error_detail_set(reterr, r, "'%s': kernel '%s': %s", gpu->info.name, name, gpu->lost_text);
    kernel->max_work_group = MIN(max_work_group, gpu->info.max_work_group_size);
    kernel->own_local_bytes = local_bytes;
    *ret = TAKE_PTR(kernel);
    return 0;
}

GpuKernel *gpu_kernel_free(GpuKernel *kernel)
{
    if (!kernel)
        return NULL;
    if (kernel->cl && !kernel->gpu->hung)
        (void)clReleaseKernel(kernel->cl);
    free(kernel);
    return NULL;
}

size_t gpu_kernel_max_work_group(const GpuKernel *kernel)
{
    return kernel->max_work_group;
}

static int set_argument(GpuKernel *kernel, unsigned index, size_t size, const void *value)
{
    if (gpu_is_lost(kernel->gpu))
        return error_origin(-ENODEV);
    return CL_TRY(kernel->gpu, clSetKernelArg(kernel->cl, index, size, value));
}

int gpu_kernel_set_buffer(GpuKernel *kernel, unsigned index, const GpuBuffer *buffer)
{
    cl_mem memory = buffer ? buffer->cl : NULL;

    return set_argument(kernel, index, sizeof(memory), &memory);
}

int gpu_kernel_set_bytes(GpuKernel *kernel, unsigned index, const void *value, size_t size)
{
    return set_argument(kernel, index, size, value);
}

int gpu_kernel_set_u32(GpuKernel *kernel, unsigned index, uint32_t value)
{
    return set_argument(kernel, index, sizeof(value), &value);
}

int gpu_kernel_set_f32(GpuKernel *kernel, unsigned index, float value)
{
    return set_argument(kernel, index, sizeof(value), &value);
}

int gpu_kernel_set_local(GpuKernel *kernel, unsigned index, size_t bytes)
{
    if (index >= GPU_KERNEL_ARGS_MAX || bytes == 0)
        return error_origin(-EINVAL);
    kernel->local_bytes[index] = bytes;
    return set_argument(kernel, index, bytes, NULL);
}

/* A wrong launch is our own mistake: it is refused before the driver sees it, and the device stays usable. */
static int check_range(const GpuKernel *kernel, const GpuRange *range)
{
    uint64_t group = 1, local_bytes = kernel->own_local_bytes;

    for (size_t i = 0; i < 3; i++)
        if (range->local[i] == 0 || range->global[i] == 0 || range->global[i] % range->local[i] != 0 ||
            !checked_mul(group, range->local[i], &group)) {
            log_debug("kernel '%s': dimension %zu: %zu work-items in groups of %zu", kernel->name, i, range->global[i],
                      range->local[i]);
            return error_origin(-EINVAL);
        }
    for (size_t i = 0; i < GPU_KERNEL_ARGS_MAX; i++)
        local_bytes += kernel->local_bytes[i];
    if (group > kernel->max_work_group || local_bytes > kernel->gpu->info.local_memory_bytes) {
        log_debug("kernel '%s': groups of %" PRIu64 " (limit %zu), %" PRIu64 " bytes of local memory (limit %" PRIu64 ")",
                  kernel->name, group, kernel->max_work_group, local_bytes, kernel->gpu->info.local_memory_bytes);
        return error_origin(-EINVAL);
    }
    return 0;
}

int gpu_launch(GpuKernel *kernel, GpuRange range, GpuWait wait, GpuEvent **ret_event)
{
    cl_uint n_waits, n_dimensions = range.global[2] > 1 ? 3 : range.global[1] > 1 ? 2 : 1;
    Gpu *gpu = kernel->gpu;
    const cl_event *waits;
    GpuEvent *event;
    cl_int status;
    int r;

    r = check_range(kernel, &range);
    if (r)
        return r;
    r = gpu_command_begin(gpu, GPU_QUEUE_COMPUTE, GPU_COMMAND_KERNEL, kernel->name, 0, &event);
    if (r)
        return error_trace(r);
    r = gpu_command_waits(gpu, GPU_QUEUE_COMPUTE, wait, &n_waits, &waits);
    if (r) {
        (void)gpu_event_unref(event);
        return error_trace(r);
    }
    status = clEnqueueNDRangeKernel(gpu->queues[GPU_QUEUE_COMPUTE], kernel->cl, n_dimensions, NULL, range.global,
                                    range.local, n_waits, waits, &event->cl);
    r = gpu_command_end(gpu, event, status, "clEnqueueNDRangeKernel", ret_event);
    if (r)
        return error_trace(r);
    gpu->counters.n_launches++;
    return 0;
}
