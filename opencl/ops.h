#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Everything of a decoder that is not attention: embedding rows, RMSNorm, products with packed weights, gated activation.
 *
 * A row's result depends on that row only, bit for bit: the same sums in the same order whether the pass has one row or many.
 * compute `fast`: activations are rounded to 8 or 16 bits in blocks of 32 (weight_quantize_activations) before products with packed
 * integer weights; F32, F16 and BF16 weights always multiply float activations.  compute `exact`: float32 throughout.
 */

#include "opencl/gpu.h"
#include "quant/weight.h"

typedef struct OpsOptions {
    bool exact;
    uint32_t max_rows;    /* rows of the largest pass */
    uint32_t max_columns; /* longest row of an input of any product */
} OpsOptions;

typedef struct Ops Ops;

/* A weight matrix on the device: rows [0, n_rows) of n_cols, in the device layout of quant/weight.h. */
typedef struct OpsWeight {
    const WeightTypeInfo *type;
    const GpuBuffer *buffer; /* borrowed */
    uint64_t offset;         /* bytes, a multiple of 64 */
    uint32_t n_rows, n_cols;
} OpsWeight;

int ops_new(Gpu *gpu, const OpsOptions *options, Ops **ret, ErrorDetail *reterr);
Ops *ops_free(Ops *ops);
DEFINE_CLEANUP(Ops, ops_free)
/* Builds the kernels that products with this type need, so that the first pass builds nothing. */
int ops_prepare_type(Ops *ops, const WeightTypeInfo *type, ErrorDetail *reterr);
/* Device bytes that ops_new() takes, for the planner. */
int ops_device_bytes(const GpuInfo *info, const OpsOptions *options, uint64_t *ret);

/* out[r, :] = decoded row ids[r] of @table times @scale, NaN where there is no such row.  ids: int32 [n_rows] at ids_offset
 * bytes. */
int ops_embed(Ops *ops, const OpsWeight *table, float scale, const GpuBuffer *ids, uint64_t ids_offset, uint32_t n_rows,
              GpuBuffer *out);

typedef enum OpsEpilogue {
    OPS_EPILOGUE_STORE,  /* y = W x */
    OPS_EPILOGUE_ADD,    /* y += W x  (the residual stream) */
    OPS_EPILOGUE_SWIGLU, /* y = silu(W0 x) * (W1 x): two weights, one output */
} OpsEpilogue;

/* y = epilogue(W prologue(x)).  All weights share n_cols.  With STORE, the outputs of weights[0..n) lie side by side in each row of
 * y: y is (n_rows, sum of weights' n_rows).  x is (n_rows, n_cols) f32, or rows picked by x_rows.  x and y do not overlap. */
typedef struct OpsLinear {
    const GpuBuffer *x;
    const GpuBuffer *x_rows;      /* NULL, or int32 [n_rows]: row of x for each output row (logits of the last rows only) */
    uint64_t x_rows_offset;
    const GpuBuffer *norm_weight; /* NULL, or f32 (n_cols): RMSNorm before the product */
    uint64_t norm_offset;
    float norm_eps;
    OpsWeight weights[3];
    uint32_t n_weights;
    OpsEpilogue epilogue;
    bool fine; /* compute `fast`: activations in 16 bits (WEIGHT_ACTIVATION_FINE), not 8; `exact` and float weights: no difference */
    GpuBuffer *y;
    /* When the weights are some rows of larger matrices: y is (n_rows, y_cols), and their outputs begin at column y_first.  The bits are
     * those of the whole product.  y_cols 0: the weights are whole. */
    uint32_t y_cols, y_first;
} OpsLinear;

int ops_linear(Ops *ops, const OpsLinear *linear, uint32_t n_rows);
/* The same as ops_linear() on each in order; one may read what an earlier one has written.  Products that follow each other
 * directly are best given together: on CPUs up to four of one weight type, for up to 8 rows, become one launch. */
int ops_chain(Ops *ops, const OpsLinear *linears, uint32_t n_linears, uint32_t n_rows);
/* The same for weights that are on their way: the first command waits, and so all do; @ret_event is that of the last one, after which the
 * weights may be overwritten. */
int ops_chain_after(Ops *ops, const OpsLinear *linears, uint32_t n_linears, uint32_t n_rows, GpuWait wait, GpuEvent **ret_event);
