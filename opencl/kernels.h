#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel sources that make embeds (Makefile, "Kernels become bytes"), ended by a NULL name. */

#include <stddef.h>
#include <stdint.h>

typedef struct KernelSource {
    const char *name; /* "matmul.cl" */
    const char *text; /* NUL-terminated */
    uint64_t length;
} KernelSource;

extern const KernelSource leat_kernel_sources[];
