#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One chosen call fails: of OpenCL, by its number or by where it stands, with a chosen code; or of what gives memory and other things of the
 * system.  Works in programs that are linked with --wrap (FAULT_WRAP in the Makefile): calls of leat's own objects pass through here, those of
 * drivers and other libraries do not.  Everything that is made and given back by such calls is counted, so a leak shows at once.
 *
 * Faults are armed by one thread and hit on any.  At most one is armed, and it hits once.
 */

#define CL_USE_DEPRECATED_OPENCL_1_1_APIS
#include <CL/cl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- OpenCL -------------------------------------------------------------------------------------------------------- */

#define FAULT_FRAMES 4

/* A function, and the frames that it was called from. */
typedef struct FaultSite {
    const char *function;
    const cl_int *codes; /* (n_codes): what the specification lets the function return */
    size_t n_codes;
    void *frames[FAULT_FRAMES];
    uint32_t n_calls;
} FaultSite;

/* Before anything else. */
void fault_init(void);
/* Counts calls from zero; nothing fails.  With @sites it is noted where they stand (slower). */
void fault_count(bool sites);
/* The @n-th call of OpenCL from here on gives @code; n from 1. */
void fault_call(uint32_t n, cl_int code);
/* The @n-th call at @site. */
void fault_site(const FaultSite *site, uint32_t n, cl_int code);
/* The @n-th call that allocates gets nothing. */
void fault_allocation(uint32_t n);
/* Nothing fails any more; whether something has, and which function. */
bool fault_disarm(const char **ret_function);

/* Since fault_count(), fault_call(), fault_site(), fault_allocation(). */
uint32_t fault_n_calls(void);
uint32_t fault_n_allocations(void);
/* Of the last fault_count(true). */
size_t fault_n_sites(void);
const FaultSite *fault_site_at(size_t i);

/* ---- leaks --------------------------------------------------------------------------------------------------------- */

typedef struct FaultLive {
    int64_t objects;      /* of OpenCL: made or kept, and not given back */
    int64_t blocks;       /* of memory */
    int64_t mapped_bytes;
    int64_t descriptors;  /* of files, of the whole process */
} FaultLive;
void fault_live(FaultLive *ret);
/* Writes where blocks come from that were allocated after the first @n_known ever and are still there; a few of them. */
uint64_t fault_n_blocks_ever(void);
void fault_print_blocks(uint64_t n_known);
