#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a program may ask the simulated small GPU (README.md).  Nothing here is needed to run under it; a bench asks for the rates that its
 * schedule is judged by, a fault test arms faults at the moment that it means.  Without the layer the queries give CL_INVALID_VALUE and
 * the addresses are NULL.
 */

#include <CL/cl.h>

/* clGetDeviceInfo(): cl_ulong each.  Rates in bytes a second, 0 when not limited; latency in nanoseconds; n_misuses since the start. */
#define CLSIM_DEVICE_READ_RATE        0x51D0 /* of kernels, measured or given */
#define CLSIM_DEVICE_LINK_RATE        0x51D1 /* between host and device */
#define CLSIM_DEVICE_COPY_RATE        0x51D2 /* between two buffers of the device */
#define CLSIM_DEVICE_LATENCY          0x51D3
#define CLSIM_DEVICE_MEMORY_IN_USE    0x51D4 /* bytes of live buffers */
#define CLSIM_DEVICE_N_MISUSES        0x51D5

/* From clGetExtensionFunctionAddressForPlatform(platform, "clsimSetFaults"): replaces what CLSIM_FAULT gave and counts calls from here on.
 * NULL or "" disarms.  CL_INVALID_VALUE when @faults cannot be read; then nothing has changed.  Does not bring a lost device back. */
typedef cl_int(CL_API_CALL *clsim_set_faults_fn)(const char *faults);
/* "clsimCountCalls": how often @function ("any" for all) was called since the start or the last clsimSetFaults(). */
typedef cl_ulong(CL_API_CALL *clsim_count_calls_fn)(const char *function);
