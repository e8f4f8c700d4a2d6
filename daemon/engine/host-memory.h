#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory of the machine can be had. */

#include <stdint.h>

/* Bytes that programs could take now without swapping (MemAvailable of proc(5)), no more than any control group (v2) above us still
 * allows by memory.max and memory.high.  @root: "" but in tests, where it is the folder that proc/ and sys/ are in.  0: it cannot be
 * read. */
uint64_t host_memory_available(const char *root);
