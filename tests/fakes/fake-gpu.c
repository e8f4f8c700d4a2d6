/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in for opencl/: a device with a budget, that is there or not; nothing runs on it. */

#include "tests/fakes/fake-internal.h"

#include <unistd.h>

int gpu_open(const GpuOptions *options, Gpu **ret, ErrorDetail *reterr)
{
    Gpu *gpu;

    (void)options;
    FAKE_SET(n_opens, fake.n_opens + 1);
    if (FAKE_GET(no_device))
        return error_detail_set(reterr, GPU_E_NO_PLATFORM, "no OpenCL platform: install pocl-opencl-icd");
    gpu = calloc(1, sizeof(*gpu));
    assert_non_null(gpu);
    gpu->info.budget_bytes = FAKE_GET(budget);
    (void)snprintf(gpu->info.name, sizeof(gpu->info.name), "Fake");
    *ret = gpu;
    return 0;
}

Gpu *gpu_free(Gpu *gpu)
{
    if (gpu)
        assert_true(gpu->lost || gpu->used == 0); /* everything on it was freed before */
    free(gpu);
    return NULL;
}

const GpuInfo *gpu_info(const Gpu *gpu)
{
    return &gpu->info;
}

bool gpu_is_lost(const Gpu *gpu)
{
    return gpu->lost;
}

void gpu_explain(const Gpu *gpu, ErrorDetail *reterr)
{
    if (gpu->lost && !reterr->text[0])
        (void)error_detail_set(reterr, -ENODEV, "played: lost");
}

bool gpu_is_hung(const Gpu *gpu)
{
    return gpu->hung;
}

void gpu_free_host(const Gpu *gpu, void *memory)
{
    (void)gpu; /* nothing writes there */
    free(memory);
}

const char *gpu_purpose_to_string(GpuPurpose purpose)
{
    static const char *const names[] = {"weights", "activations", "staging", "tail", "pages", "other"};

    return names[purpose];
}

const char *gpu_device_type_to_string(GpuDeviceType type)
{
    (void)type;
    return "gpu";
}

void gpu_memory_used(const Gpu *gpu, uint64_t ret_bytes[GPU_PURPOSE_X_MAX], uint64_t *ret_total)
{
    memset(ret_bytes, 0, GPU_PURPOSE_X_MAX * sizeof(*ret_bytes));
    ret_bytes[GPU_PURPOSE_WEIGHTS] = *ret_total = gpu->used;
}

void gpu_counters(const Gpu *gpu, GpuCounters *ret)
{
    (void)gpu;
    *ret = (GpuCounters){0};
}

/* The budget is too small for the planner's measuring, which would need these. */
int gpu_step_begin(Gpu *gpu)
{
    (void)gpu;
    fail_msg("not played");
    return -ENOTSUP;
}

int gpu_buffer_new(Gpu *gpu, GpuPurpose purpose, uint64_t bytes, GpuBuffer **ret, ErrorDetail *reterr)
{
    (void)gpu, (void)purpose, (void)bytes, (void)ret, (void)reterr;
    fail_msg("not played");
    return -ENOTSUP;
}

GpuBuffer *gpu_buffer_free(GpuBuffer *buffer)
{
    return buffer;
}

int gpu_upload(Gpu *gpu, GpuQueue queue, GpuBuffer *to, uint64_t offset, const void *from, uint64_t bytes,
               GpuWait wait, const char *label, GpuEvent **ret_event)
{
    (void)gpu, (void)queue, (void)to, (void)offset, (void)from, (void)bytes, (void)wait;
    (void)label, (void)ret_event;
    fail_msg("not played");
    return -ENOTSUP;
}

int gpu_copy(Gpu *gpu, GpuQueue queue, GpuBuffer *to, uint64_t to_offset, const GpuBuffer *from,
             uint64_t from_offset, uint64_t bytes, GpuWait wait, const char *label, GpuEvent **ret_event)
{
    (void)gpu, (void)queue, (void)to, (void)to_offset, (void)from, (void)from_offset;
    (void)bytes, (void)wait, (void)label, (void)ret_event;
    fail_msg("not played");
    return -ENOTSUP;
}

int gpu_flush(Gpu *gpu, GpuQueue queue)
{
    (void)gpu, (void)queue;
    fail_msg("not played");
    return -ENOTSUP;
}

GpuEvent *gpu_event_unref(GpuEvent *event)
{
    return event;
}

int gpu_event_wait(Gpu *gpu, GpuEvent *event, ErrorDetail *reterr)
{
    (void)gpu, (void)event, (void)reterr;
    fail_msg("not played");
    return -ENOTSUP;
}

int gpu_trace_start(Gpu *gpu)
{
    (void)gpu;
    return 0;
}

int gpu_trace_stop(Gpu *gpu, int fd)
{
    (void)gpu;
    return write(fd, "{}", 2) == 2 ? 0 : -errno;
}

int gpu_overlap_begin(Gpu *gpu)
{
    assert_false(gpu->overlap);
    gpu->overlap = true;
    return 0;
}

int gpu_overlap_end(Gpu *gpu, GpuOverlap *ret)
{
    assert_true(gpu->overlap);
    gpu->overlap = false;
    *ret = (GpuOverlap){.kernel_usec = 10, .upload_usec = 4, .overlap_usec = 3};
    return 0;
}
