#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Between fault.c, which decides, and the wrappers in fault-cl.c and fault-memory.c. */

#include "tests/lib/fault.h"

#include <stdatomic.h>

/* At the start of a call of OpenCL, by the wrapper itself: what it is to return, CL_SUCCESS to go on. */
cl_int fault_enter(const char *function, const cl_int *codes, size_t n_codes);
/* At the start of a call that allocates: whether it fails. */
bool fault_enter_allocation(const char *function);

int64_t fault_live_objects(void);
int64_t fault_live_blocks(void);
int64_t fault_mapped_bytes(void);
