/* SPDX-License-Identifier: Apache-2.0 */
/* CLBlast behind our budget, events and error codes. */

#include "opencl/blas.h"
#include "opencl/gpu-internal.h"
#include "quant/base/checked.h"
#include "quant/base/log.h"

#include <clblast_c.h>

struct Blas {
    Gpu *gpu;
    GpuBuffer *workspace; /* NULL until a product needs one */
};

int blas_new(Gpu *gpu, Blas **ret, ErrorDetail *reterr)
{
    Blas *blas;

    if (gpu_is_lost(gpu))
        return gpu_refuse_lost(gpu, reterr);
    blas = calloc(1, sizeof(*blas));
    if (!blas)
        return error_origin(-ENOMEM);
    blas->gpu = gpu;
    *ret = blas;
    return 0;
}

Blas *blas_free(Blas *blas)
{
    if (!blas)
        return NULL;
    (void)gpu_buffer_free(blas->workspace);
    free(blas);
    return NULL;
}

/* CLBlast shares the numbers of OpenCL's codes and adds its own, which our checks of shapes leave no way to. */
static int blas_check(Gpu *gpu, CLBlastStatusCode status, const char *call, ErrorDetail *reterr)
{
    if (status == CLBlastSuccess)
        return 0;
    if (gpu_cl_is_refusal((cl_int)status))
        return error_detail_set(reterr, GPU_E_OVER_BUDGET, "'%s': %s: %s", gpu->info.name, call,
                                gpu_cl_name((cl_int)status));
    if (status > CLBlastNotImplemented)
        gpu_lose(gpu, "%s: %s (%d): %s", call, gpu_cl_name((cl_int)status), (int)status, gpu_cl_text((cl_int)status));
    else
        gpu_lose(gpu, "%s: CLBlast status %d", call, (int)status);
    return error_detail_set(reterr, -EIO, "'%s': %s", gpu->info.name, gpu->lost_text);
}

static bool matrix_fits(const BlasMatrix *matrix, uint32_t n_rows, uint32_t n_columns)
{
    uint64_t end;

    return matrix->buffer && matrix->stride >= n_columns && checked_mul(n_rows - UINT64_C(1), matrix->stride, &end) &&
           checked_add(end, n_columns, &end) && checked_add(end, matrix->offset, &end) &&
           end <= gpu_buffer_bytes(matrix->buffer) / sizeof(float);
}

static int check_product(const BlasProduct *product, ErrorDetail *reterr)
{
    if (product->m == 0 || product->n == 0 || product->k == 0)
        return error_detail_set(reterr, -EINVAL, "a product of %u x %u x %u is empty", product->m, product->n, product->k);
    if (!matrix_fits(&product->a, product->m, product->k) || !matrix_fits(&product->b, product->n, product->k) ||
        !matrix_fits(&product->c, product->m, product->n))
        return error_detail_set(reterr, -EINVAL, "a matrix of a product of %u x %u x %u does not fit its buffer", product->m,
                                product->n, product->k);
    return 0;
}

int blas_prepare(Blas *blas, const BlasProduct *product, ErrorDetail *reterr)
{
    Gpu *gpu = blas->gpu;
    GpuBuffer *workspace = NULL;
    size_t bytes = 0;
    int r;

    if (gpu_is_lost(gpu))
        return gpu_refuse_lost(gpu, reterr);
    r = check_product(product, reterr);
    if (r)
        return r;
    r = blas_check(gpu,
                   CLBlastSGemmTempBufferSize(CLBlastLayoutRowMajor, CLBlastTransposeNo, CLBlastTransposeYes, product->m,
                                              product->n, product->k, product->a.offset, product->a.stride,
                                              product->b.offset, product->b.stride, product->c.offset, product->c.stride,
                                              &gpu->queues[GPU_QUEUE_COMPUTE], &bytes),
                   "CLBlastSGemmTempBufferSize", reterr);
    if (r || bytes == 0 || (blas->workspace && gpu_buffer_bytes(blas->workspace) >= bytes))
        return r;
    /* The driver keeps the old one until the commands that use it are done. */
    blas->workspace = gpu_buffer_free(blas->workspace);
    r = gpu_buffer_new(gpu, GPU_PURPOSE_ACTIVATIONS, bytes, &workspace, reterr);
    if (r)
        return r;
    blas->workspace = workspace;
    return 0;
}

/* CLBlast takes no events to wait for: on an in-order queue a barrier before it does the same. */
static int wait_first(Gpu *gpu, GpuWait wait)
{
    const cl_event *waits;
    cl_uint n_waits;
    int r = gpu_command_waits(gpu, GPU_QUEUE_COMPUTE, wait, &n_waits, &waits);

    if (r || n_waits == 0)
        return r;
    return CL_TRY(gpu, clEnqueueBarrierWithWaitList(gpu->queues[GPU_QUEUE_COMPUTE], n_waits, waits, NULL));
}

int blas_product(Blas *blas, const BlasProduct *product, GpuWait wait, GpuEvent **ret_event, ErrorDetail *reterr)
{
    Gpu *gpu = blas->gpu;
    CLBlastStatusCode status;
    GpuEvent *event;
    int r;

    r = blas_prepare(blas, product, reterr);
    if (r)
        return r;
    r = gpu_command_begin(gpu, GPU_QUEUE_COMPUTE, GPU_COMMAND_KERNEL, "clblast_sgemm", 0, &event);
    if (r)
        return error_trace(r);
    r = wait_first(gpu, wait);
    if (r) {
        (void)gpu_event_unref(event);
        return error_trace(r);
    }
    status = CLBlastSgemmWithTempBuffer(
        CLBlastLayoutRowMajor, CLBlastTransposeNo, CLBlastTransposeYes, product->m, product->n, product->k, product->alpha,
        product->a.buffer->cl, product->a.offset, product->a.stride, product->b.buffer->cl, product->b.offset,
        product->b.stride, product->beta, product->c.buffer->cl, product->c.offset, product->c.stride,
        &gpu->queues[GPU_QUEUE_COMPUTE], &event->cl, blas->workspace ? blas->workspace->cl : NULL);
    if (status != CLBlastSuccess) {
        event->cl = NULL;
        (void)gpu_event_unref(event);
        return blas_check(gpu, status, "CLBlastSgemm", reterr);
    }
    r = gpu_command_end(gpu, event, CL_SUCCESS, "CLBlastSgemm", ret_event);
    if (r)
        return error_trace(r);
    gpu->counters.n_launches++;
    return 0;
}
