#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What a code of opencl/ means to a user of the cache. */

#include "cache/kv-store.h"

/* A GpuError or negative errno as KvError or negative errno. */
static inline int kv_error(int r)
{
    switch (r) {
    case GPU_E_OK:
        return KV_E_OK;
    case GPU_E_OVER_BUDGET:
        return KV_E_DEVICE_MEMORY;
    case GPU_E_HUNG:
    case GPU_E_LOST:
    case -ENODEV:
        return KV_E_DEVICE;
    case -ENOMEM:
        return KV_E_HOST_MEMORY;
    default:
        return error_fold(r);
    }
}
