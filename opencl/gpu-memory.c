/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory, counted by purpose against the budget before the driver is asked. */

#include "opencl/gpu-internal.h"
#include "quant/base/checked.h"

#include <inttypes.h>
#include <sys/mman.h>
#include <unistd.h>

/* A device with memory of its own often allocates at first use; it gets this long to do it at creation instead. */
#define TOUCH_USEC UINT64_C(20000000)

const char *gpu_purpose_to_string(GpuPurpose purpose)
{
    switch (purpose) {
    case GPU_PURPOSE_WEIGHTS:
        return "weights";
    case GPU_PURPOSE_ACTIVATIONS:
        return "activations";
    case GPU_PURPOSE_STAGING:
        return "staging";
    case GPU_PURPOSE_TAIL:
        return "tail";
    case GPU_PURPOSE_PAGES:
        return "pages";
    case GPU_PURPOSE_OTHER:
        return "other";
    case GPU_PURPOSE_X_MAX:
        break;
    }
    return NULL;
}

static uint64_t total_used(const Gpu *gpu)
{
    uint64_t total = 0;

    for (size_t i = 0; i < GPU_PURPOSE_X_MAX; i++)
        total += atomic_load_explicit(&gpu->used[i], memory_order_relaxed);
    return total;
}

/* @status: what the driver said, CL_SUCCESS when it was not asked. */
static int refuse(const Gpu *gpu, GpuPurpose purpose, uint64_t bytes, cl_int status, ErrorDetail *reterr)
{
    uint64_t budget = atomic_load(&gpu->budget), used = total_used(gpu);

    return error_detail_set(reterr, GPU_E_OVER_BUDGET,
                            "no memory for %s on '%s' (%s): needed %" PRIu64 " bytes, available %" PRIu64
                            ", budget %" PRIu64 ", in use %" PRIu64,
                            gpu_purpose_to_string(purpose), gpu->info.name,
                            status ? gpu_cl_name(status) : "over the budget", bytes, used < budget ? budget - used : 0,
                            budget, used);
}

static int check_fits(const Gpu *gpu, GpuPurpose purpose, uint64_t bytes, ErrorDetail *reterr)
{
    uint64_t sum;

    if (bytes > gpu->info.max_allocation_bytes)
        return error_detail_set(reterr, GPU_E_OVER_BUDGET,
                                "no memory for %s on '%s': one allocation of %" PRIu64
                                " bytes is larger than the device allows (%" PRIu64 "); it must be split",
                                gpu_purpose_to_string(purpose), gpu->info.name, bytes, gpu->info.max_allocation_bytes);
    if (!checked_add(total_used(gpu), bytes, &sum) || sum > atomic_load(&gpu->budget))
        return refuse(gpu, purpose, bytes, CL_SUCCESS, reterr);
    return 0;
}

/* Makes the device allocate now, so that its refusal comes here and not in the middle of a step. */
static int touch(Gpu *gpu, cl_mem memory, cl_int *ret_status)
{
    cl_event event = NULL;
    cl_int status = clEnqueueMigrateMemObjects(gpu->queues[GPU_QUEUE_UPLOAD], 1, &memory,
                                               CL_MIGRATE_MEM_OBJECT_CONTENT_UNDEFINED, 0, NULL, &event);
    int r;

    *ret_status = status;
    if (status != CL_SUCCESS)
        return gpu_cl_is_refusal(status) ? 0 : CL_CHECK(gpu, status, "clEnqueueMigrateMemObjects");
    r = CL_TRY(gpu, clFlush(gpu->queues[GPU_QUEUE_UPLOAD]));
    if (!r)
        r = gpu_wait_until(gpu, event, gpu_now_usec() + TOUCH_USEC);
    if (!r)
        r = CL_TRY(gpu, clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(*ret_status), ret_status, NULL));
    (void)clReleaseEvent(event);
    if (r > 0)
        return error_origin(-ETIMEDOUT);
    if (r == 0 && *ret_status < 0 && !gpu_cl_is_refusal(*ret_status))
        return CL_CHECK(gpu, *ret_status, "clEnqueueMigrateMemObjects");
    return r;
}

/* ---- huge pages -------------------------------------------------------------------------------------------------- */

#define HUGE_PAGE_BYTES (UINT64_C(2) << 20)
/* Below this the driver's own allocation does as well. */
#define HUGE_AT_LEAST   HUGE_PAGE_BYTES

typedef struct Backing {
    void *memory;
    size_t bytes;
} Backing;

static Backing *backing_free(Backing *backing)
{
    if (backing->memory)
        (void)munmap(backing->memory, backing->bytes);
    free(backing);
    return NULL;
}

DEFINE_CLEANUP(Backing, backing_free)

/* Aligned memory that asks for huge pages; NULL when there is none. */
static Backing *backing_new(uint64_t bytes)
{
    _cleanup_(backing_freep) Backing *backing = calloc(1, sizeof(*backing));
    uint64_t room, lead;
    char *memory;

    if (!backing || !checked_align(bytes, (uint64_t)sysconf(_SC_PAGESIZE), &bytes) ||
        !checked_add(bytes, HUGE_PAGE_BYTES, &room))
        return NULL;
    memory = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    lead = -(uintptr_t)memory % HUGE_PAGE_BYTES;
    if (lead > 0)
        (void)munmap(memory, lead);
    if (lead < HUGE_PAGE_BYTES)
        (void)munmap(memory + lead + bytes, HUGE_PAGE_BYTES - lead);
    *backing = (Backing){memory + lead, bytes};
    (void)madvise(backing->memory, bytes, MADV_HUGEPAGE);
    return TAKE_PTR(backing);
}

/* When the last command that uses the buffer is done, on whatever thread the driver chooses. */
static void CL_CALLBACK buffer_gone(cl_mem memory, void *userdata)
{
    (void)memory;
    (void)backing_free(userdata);
}

/* On a CPU device large buffers are our own memory in huge pages: PoCL's kernels read it 2 to 14 % faster (medians of 300
 * pairs, 4 to 48 MiB) where the kernel gives huge pages on request only.  Without success the ordinary way is left. */
static bool create_in_huge_pages(Gpu *gpu, GpuBuffer *buffer)
{
    _cleanup_(backing_freep) Backing *backing = NULL;
    cl_int status;
    cl_mem memory;

    if (gpu->info.type != GPU_DEVICE_TYPE_CPU || !gpu->info.unified_memory || buffer->bytes < HUGE_AT_LEAST)
        return false;
    backing = backing_new(buffer->bytes);
    if (!backing)
        return false;
    memory = clCreateBuffer(gpu->context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, buffer->bytes, backing->memory, &status);
    if (status != CL_SUCCESS)
        return false;
    if (clSetMemObjectDestructorCallback(memory, buffer_gone, backing) != CL_SUCCESS) {
        (void)clReleaseMemObject(memory);
        return false;
    }
    (void)TAKE_PTR(backing);
    buffer->cl = memory;
    return true;
}

/* ---- buffers ----------------------------------------------------------------------------------------------------- */

static int buffer_create(Gpu *gpu, GpuBuffer *buffer, void *memory, cl_int *ret_status)
{
    cl_mem_flags flags = CL_MEM_READ_WRITE | (memory ? CL_MEM_USE_HOST_PTR : 0);
    int r = 0;

    *ret_status = CL_SUCCESS;
    if (!memory && create_in_huge_pages(gpu, buffer))
        return 0;
    buffer->cl = clCreateBuffer(gpu->context, flags, buffer->bytes, memory, ret_status);
    if (*ret_status != CL_SUCCESS) {
        buffer->cl = NULL;
        return gpu_cl_is_refusal(*ret_status) ? 0 : CL_CHECK(gpu, *ret_status, "clCreateBuffer");
    }
    if (!memory && !gpu->info.unified_memory)
        r = touch(gpu, buffer->cl, ret_status);
    return r;
}

int gpu_buffer_new(Gpu *gpu, GpuPurpose purpose, uint64_t bytes, GpuBuffer **ret, ErrorDetail *reterr)
{
    _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;
    cl_int status = CL_SUCCESS;
    int r;

    if (gpu_is_lost(gpu))
        return gpu_refuse_lost(gpu, reterr);
    if (bytes == 0 || (unsigned)purpose >= GPU_PURPOSE_X_MAX)
        return error_detail_set(reterr, -EINVAL, "a buffer needs a size and a purpose");
    r = check_fits(gpu, purpose, bytes, reterr);
    if (r)
        return r;
    buffer = calloc(1, sizeof(*buffer));
    if (!buffer)
        return error_origin(-ENOMEM);
    *buffer = (GpuBuffer){.gpu = gpu, .bytes = bytes, .purpose = purpose, .wrapped = true /* not counted yet */};
    r = buffer_create(gpu, buffer, NULL, &status);
    if (r)
        return error_detail_set(reterr, r, "'%s': %s", gpu->info.name, gpu->lost_text);
    if (status != CL_SUCCESS)
        return refuse(gpu, purpose, bytes, status, reterr);
    buffer->wrapped = false;
    atomic_fetch_add(&gpu->used[purpose], bytes);
    gpu->counters.n_buffers_created++;
    *ret = TAKE_PTR(buffer);
    return 0;
}

int gpu_buffer_wrap(Gpu *gpu, void *memory, uint64_t bytes, GpuBuffer **ret, ErrorDetail *reterr)
{
    _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;
    cl_int status = CL_SUCCESS;
    int r;

    if (gpu_is_lost(gpu))
        return gpu_refuse_lost(gpu, reterr);
    if (!gpu->info.unified_memory)
        return error_detail_set(reterr, -EOPNOTSUPP, "'%s' does not read host memory in place", gpu->info.name);
    if (bytes == 0 || !memory || (uintptr_t)memory % (uintptr_t)sysconf(_SC_PAGESIZE) != 0)
        return error_detail_set(reterr, -EINVAL, "memory to wrap must be page aligned and not empty");
    if (bytes > gpu->info.max_allocation_bytes)
        return check_fits(gpu, GPU_PURPOSE_OTHER, bytes, reterr);
    buffer = calloc(1, sizeof(*buffer));
    if (!buffer)
        return error_origin(-ENOMEM);
    *buffer = (GpuBuffer){.gpu = gpu, .bytes = bytes, .purpose = GPU_PURPOSE_OTHER, .wrapped = true};
    r = buffer_create(gpu, buffer, memory, &status);
    if (r)
        return error_detail_set(reterr, r, "'%s': %s", gpu->info.name, gpu->lost_text);
    if (status != CL_SUCCESS)
        return refuse(gpu, GPU_PURPOSE_OTHER, bytes, status, reterr);
    gpu->counters.n_buffers_created++;
    *ret = TAKE_PTR(buffer);
    return 0;
}

GpuBuffer *gpu_buffer_free(GpuBuffer *buffer)
{
    if (!buffer)
        return NULL;
    if (buffer->cl && !buffer->gpu->hung)
        (void)clReleaseMemObject(buffer->cl);
    if (!buffer->wrapped)
        atomic_fetch_sub(&buffer->gpu->used[buffer->purpose], buffer->bytes);
    free(buffer);
    return NULL;
}

uint64_t gpu_buffer_bytes(const GpuBuffer *buffer)
{
    return buffer->bytes;
}

void gpu_memory_used(const Gpu *gpu, uint64_t ret_bytes[GPU_PURPOSE_X_MAX], uint64_t *ret_total)
{
    uint64_t total = 0;

    for (size_t i = 0; i < GPU_PURPOSE_X_MAX; i++) {
        uint64_t bytes = atomic_load(&gpu->used[i]);

        if (ret_bytes)
            ret_bytes[i] = bytes;
        total += bytes;
    }
    if (ret_total)
        *ret_total = total;
}

void gpu_set_budget(Gpu *gpu, uint64_t bytes)
{
    atomic_store(&gpu->budget, bytes);
    gpu->info.budget_bytes = bytes;
}

void gpu_counters(const Gpu *gpu, GpuCounters *ret)
{
    *ret = gpu->counters;
}
