#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory of the machine can be had. */

#include <stdint.h>

/* Bytes that programs could take now without swapping (MemAvailable of proc(5)), no more than any control group (v2) above us still
 * allows by memory.max and memory.high; UINT64_MAX when that cannot be read.  @root: "" but in tests, where it is the folder that proc/
 * and sys/ are in. */
uint64_t host_memory_available(const char *root);
