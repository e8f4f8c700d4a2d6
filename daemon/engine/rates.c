/* SPDX-License-Identifier: Apache-2.0 */
/* How fast the device moves bytes. */

#include "daemon/engine/rates.h"

#include <string.h>
#include <time.h>

#define RATES_BYTES     (16u << 20) /* beyond the caches of every device we know, well below a second on the slowest bus */
#define RATES_MIN_BYTES (1u << 20)
#define RATES_ROUNDS    3           /* the first touches fresh memory; the best of the others counts */

static double seconds_now(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Seconds of one copy, from the host when @from is NULL. */
static int time_copy(Gpu *gpu, GpuBuffer *to, const GpuBuffer *from, const void *host, uint64_t bytes, uint64_t timeout_usec, double *ret)
{
    _cleanup_(gpu_event_unrefp) GpuEvent *event = NULL;
    double begun = seconds_now();
    int r;

    if (from)
        r = gpu_copy(gpu, GPU_QUEUE_COMPUTE, to, 0, from, 0, bytes, GPU_WAIT_NONE, "measure", &event);
    else
        r = gpu_upload(gpu, GPU_QUEUE_UPLOAD, to, 0, host, bytes, GPU_WAIT_NONE, "measure", &event);
    if (!r)
        r = gpu_flush(gpu, from ? GPU_QUEUE_COMPUTE : GPU_QUEUE_UPLOAD);
    if (!r)
        r = gpu_event_wait(gpu, event, timeout_usec, NULL);
    *ret = seconds_now() - begun;
    return r;
}

static int measure(Gpu *gpu, GpuBuffer *a, GpuBuffer *b, const void *host, uint64_t bytes, uint64_t timeout_usec, DeviceRates *ret)
{
    double upload = 1e9, copy = 1e9, seconds;
    int r = 0;

    for (int round = 0; round < RATES_ROUNDS && !r; round++) {
        r = time_copy(gpu, a, NULL, host, bytes, timeout_usec, &seconds);
        upload = MIN(upload, seconds);
        if (!r)
            r = time_copy(gpu, b, a, NULL, bytes, timeout_usec, &seconds);
        copy = MIN(copy, seconds);
    }
    if (!r)
        *ret = (DeviceRates){(double)bytes / MAX(upload, 1e-9), 2 * (double)bytes / MAX(copy, 1e-9)};
    return r;
}

int device_rates_measure(Gpu *gpu, uint64_t timeout_usec, DeviceRates *ret)
{
    _cleanup_(gpu_buffer_freep) GpuBuffer *a = NULL, *b = NULL;
    _cleanup_(freep) void *host = NULL;
    uint64_t used[GPU_PURPOSE_X_MAX], total, budget = gpu_info(gpu)->budget_bytes, bytes;
    int r;

    gpu_memory_used(gpu, used, &total);
    bytes = budget > total ? MIN((budget - total) / 4, (uint64_t)RATES_BYTES) : 0;
    bytes &= ~(uint64_t)4095;
    if (bytes < RATES_MIN_BYTES)
        return error_origin(-ENOSPC);
    host = aligned_alloc(4096, bytes);
    if (!host)
        return error_origin(-ENOMEM);
    memset(host, 1, bytes);
    r = gpu_step_begin(gpu);
    if (!r)
        r = gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, bytes, &a, NULL);
    if (!r)
        r = gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, bytes, &b, NULL);
    if (!r)
        r = measure(gpu, a, b, host, bytes, timeout_usec, ret);
    if (gpu_is_lost(gpu))
        host = NULL; /* the device may still read it */
    return r > 0 ? error_origin(r == GPU_E_OVER_BUDGET ? -ENOSPC : -ENODEV) : r;
}

double device_rates_predict(const DeviceRates *rates, uint64_t read_bytes, uint64_t streamed_bytes, const char **ret_limit)
{
    double arithmetic = (double)read_bytes / rates->read, bus = (double)streamed_bytes / rates->upload;

    *ret_limit = bus > arithmetic ? "bus" : "arithmetic";
    return MAX(bus, arithmetic);
}
