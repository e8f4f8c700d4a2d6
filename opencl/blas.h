#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense float32 products through CLBlast, on the compute queue.
 *
 * Where CLBlast is used, and where not: leat's graph uses its own products (opencl/ops.h) everywhere today, and this module
 * is for dense float passes that have no packed weights and no promise about bits.  The reasons, measured by
 * tests/bench/bench-gpu with CLBlast 1.5.3 on 2 cores with AVX-512, in parts of the speed of our kernel on the same shape
 * (rows x 1536 x 576):
 *
 *   rows                                       1      32     512    512, with parameters that CLBlast's tuner found
 *   PoCL 3.1: against our F32 weights          0.02   0.05   0.18   0.25
 *             against our Q4_1 weights         0.01   0.01   0.06   0.10
 *   Intel's CPU runtime, our portable kernels: F32
 *                                              0.03   0.67   2.8    -
 *             Q4_1                             0.03   1.4    4.0    -
 *
 * So it never helps a decode step.  It would help the prefill of a device on which only our portable kernels run, but it chooses
 * kernels by the whole shape: a row's bits then depend on how many rows share the pass, which the rule "alone = in a batch"
 * forbids in a decoder.  Its first product also compiles for up to 15 s inside the process.
 *
 *   Blas  CLBlast's workspace on one device, from the budget (GPU_PURPOSE_ACTIVATIONS).  Borrows the Gpu.
 */

#include "opencl/gpu.h"

typedef struct Blas Blas;

/* One matrix inside a buffer, row-major: element (r, c) is number offset + r * stride + c, in floats. */
typedef struct BlasMatrix {
    const GpuBuffer *buffer; /* borrowed until the product has completed */
    uint64_t offset, stride;
} BlasMatrix;

/* c (m, n) = alpha * a (m, k) * b (n, k)^T + beta * c.  With beta 0 what c holds is not read. */
typedef struct BlasProduct {
    uint32_t m, n, k;
    float alpha, beta;
    BlasMatrix a, b, c;
} BlasProduct;

int blas_new(Gpu *gpu, Blas **ret, ErrorDetail *reterr);
Blas *blas_free(Blas *blas);
DEFINE_CLEANUP(Blas, blas_free)

/* Grows the workspace to what @product needs, so that blas_product() creates no buffer.  0, GPU_E_OVER_BUDGET, or a
 * negative errno. */
int blas_prepare(Blas *blas, const BlasProduct *product, ErrorDetail *reterr);

/* Enqueues @product; @ret_event may be NULL.  The first product of each kind compiles CLBlast's kernels in this process.
 * 0, GPU_E_OVER_BUDGET, or a negative errno; -EINVAL when a matrix does not fit its buffer. */
int blas_product(Blas *blas, const BlasProduct *product, GpuWait wait, GpuEvent **ret_event, ErrorDetail *reterr);
