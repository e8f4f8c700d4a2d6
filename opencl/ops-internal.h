#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of the ops: ops.c makes the object, its kernels and embeddings; ops-linear.c makes products. */

#include "opencl/ops.h"

#include <stdint.h>

#define OPS_GROUP_ROWS   8  /* GROUP_ROWS of norm.cl */
#define OPS_STAGES       4  /* STAGES of linear-stages.cl */
#define OPS_TYPE_NUMBERS 31 /* WEIGHT_TYPE_* are below */
/* Work-items of a portable group: a multiple of a tile's rows, and PREPARE_ITEMS of norm.cl. */
#define OPS_LOCAL_ITEMS  32

typedef struct OpsKernels {
    GpuKernel *product, *embed;
    GpuKernel *prepare;    /* not on x86 CPUs: there it is a stage */
    uint32_t n_stages_set; /* of linear_stages: those whose arguments name buffers */
} OpsKernels;

struct Ops {
    Gpu *gpu;
    OpsOptions options;
    bool vectors;      /* work-items carry 8 or 16 rows and are groups of their own */
    uint32_t n_groups; /* of linear_stages: one a thread */
    GpuBuffer *act;    /* prepared activations */
    GpuBuffer *sync;
    OpsKernels kernels[OPS_TYPE_NUMBERS];
    /* of the chain in work */
    GpuWait wait;         /* for its first launch */
    GpuEvent **ret_event; /* NULL, or where the event of its last launch so far is kept */
};

/* Words of one group of rows of prepared activations in the larger form (float). */
static inline uint64_t ops_act_group_words(uint32_t n_cols)
{
    return ((uint64_t)n_cols + 31) / 32 * 32 * OPS_GROUP_ROWS;
}

/* Counters of linear_stages for that many groups. */
static inline uint64_t ops_sync_bytes(uint32_t n_groups)
{
    return (1 + OPS_STAGES * ((uint64_t)n_groups + 1)) * 64;
}

/* Builds the kernels of a type when that has not happened yet; then they are ops->kernels[type]. */
int ops_require_type(Ops *ops, const WeightTypeInfo *type);
/* Launches the products' kernels of @kernels on nothing, so that the driver specialises them now. */
int ops_linear_warm(Ops *ops, OpsKernels *kernels);
