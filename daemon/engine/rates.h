#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* How fast the opened device moves bytes, measured once, for the planner's prediction of speed. */

#include "opencl/gpu.h"

typedef struct DeviceRates {
    double upload; /* bytes a second from the host's memory */
    double read;   /* bytes a second of the device's own memory */
} DeviceRates;

/* Takes some milliseconds and up to 32 MiB of the device for that time; -ENOSPC when so little is free that it would measure nothing. */
int device_rates_measure(Gpu *gpu, uint64_t timeout_usec, DeviceRates *ret);

/* Seconds that one token takes at least: weights and past are read at the device's rate, what is streamed crosses the bus meanwhile. */
double device_rates_predict(const DeviceRates *rates, uint64_t read_bytes, uint64_t streamed_bytes, const char **ret_limit);
