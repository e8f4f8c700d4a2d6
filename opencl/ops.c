/* SPDX-License-Identifier: Apache-2.0 */
/* The ops object: kernels by weight type, scratch, embedding rows. */

#include "opencl/ops-internal.h"
#include "quant/base/checked.h"

#include <assert.h>

static bool has_vectors(const GpuInfo *info)
{
    return info->simd != GPU_SIMD_PORTABLE;
}

/* Groups of rows in the largest pass; each thread of linear_stages has one for itself. */
static uint64_t act_groups(const GpuInfo *info, const OpsOptions *options)
{
    uint64_t of_rows = ((uint64_t)options->max_rows + OPS_GROUP_ROWS - 1) / OPS_GROUP_ROWS;

    return has_vectors(info) ? MAX(of_rows, (uint64_t)info->compute_units) : of_rows;
}

static int act_bytes(const GpuInfo *info, const OpsOptions *options, uint64_t *ret)
{
    if (options->max_rows == 0 || options->max_columns == 0)
        return error_origin(-EINVAL);
    if (!checked_mul(act_groups(info, options), ops_act_group_words(options->max_columns) * 4, ret))
        return error_origin(-EOVERFLOW);
    return 0;
}

int ops_device_bytes(const GpuInfo *info, const OpsOptions *options, uint64_t *ret)
{
    uint64_t bytes = 0;
    int r;

    r = act_bytes(info, options, &bytes);
    if (r)
        return r;
    *ret = bytes + OPS_SYNC_BYTES;
    return 0;
}

int ops_new(Gpu *gpu, const OpsOptions *options, Ops **ret, ErrorDetail *reterr)
{
    _cleanup_(ops_freep) Ops *ops = NULL;
    const GpuInfo *info = gpu_info(gpu);
    uint64_t bytes = 0;
    int r;

    r = act_bytes(info, options, &bytes);
    if (r)
        return r;
    ops = calloc(1, sizeof(*ops));
    if (!ops)
        return error_origin(-ENOMEM);
    ops->gpu = gpu;
    ops->options = *options;
    ops->vectors = has_vectors(info);
    ops->n_groups = info->compute_units;
    r = gpu_buffer_new(gpu, GPU_PURPOSE_ACTIVATIONS, bytes, &ops->act, reterr);
    if (!r)
        r = gpu_buffer_new(gpu, GPU_PURPOSE_ACTIVATIONS, OPS_SYNC_BYTES, &ops->sync, reterr);
    if (!r)
        r = gpu_fill_zero(gpu, GPU_QUEUE_COMPUTE, ops->sync, 0, OPS_SYNC_BYTES);
    if (r)
        return r;
    *ret = TAKE_PTR(ops);
    return 0;
}

Ops *ops_free(Ops *ops)
{
    if (!ops)
        return NULL;
    for (size_t i = 0; i < N_ELEMENTS(ops->kernels); i++) {
        (void)gpu_kernel_free(ops->kernels[i].prepare);
        (void)gpu_kernel_free(ops->kernels[i].product);
        (void)gpu_kernel_free(ops->kernels[i].embed);
    }
    (void)gpu_buffer_free(ops->sync);
    (void)gpu_buffer_free(ops->act);
    free(ops);
    return NULL;
}

/* ---- kernels ------------------------------------------------------------------------------------------------------------- */

static bool is_float(WeightType type)
{
    return type == WEIGHT_TYPE_F32 || type == WEIGHT_TYPE_F16 || type == WEIGHT_TYPE_BF16;
}

static int build_linear(Ops *ops, WeightType type, OpsKernels *kernels, ErrorDetail *reterr)
{
    static const char *const sources[] = {"lanes.cl", "weight.cl", "norm.cl", "linear.cl", "linear-stages.cl"};
    GpuProgram *program;
    char options[96];
    int r;

    (void)snprintf(options, sizeof(options), "-DSIMD=%d -DWEIGHT_TYPE=%d -DFLOAT_ACTS=%d", (int)gpu_info(ops->gpu)->simd,
                   (int)type, ops->options.exact || is_float(type));
    r = gpu_program_get(ops->gpu, sources, N_ELEMENTS(sources), options, &program, reterr);
    if (!r)
        r = gpu_kernel_new(program, "prepare_rows", &kernels->prepare, reterr);
    if (!r)
        r = gpu_kernel_new(program, ops->vectors ? "linear_stages" : "linear_rows", &kernels->product, reterr);
    return r;
}

static int build_embed(Ops *ops, WeightType type, OpsKernels *kernels, ErrorDetail *reterr)
{
    static const char *const sources[] = {"lanes.cl", "weight.cl", "embed.cl"};
    GpuProgram *program;
    char options[64];
    int r;

    (void)snprintf(options, sizeof(options), "-DSIMD=0 -DWEIGHT_TYPE=%d", (int)type);
    r = gpu_program_get(ops->gpu, sources, N_ELEMENTS(sources), options, &program, reterr);
    if (!r)
        r = gpu_kernel_new(program, "embed_rows", &kernels->embed, reterr);
    return r;
}

int ops_prepare_type(Ops *ops, const WeightTypeInfo *type, ErrorDetail *reterr)
{
    OpsKernels *kernels = &ops->kernels[type->type];
    int r;

    assert((size_t)type->type < N_ELEMENTS(ops->kernels));
    if (kernels->embed)
        return 0;
    if (!kernels->prepare) {
        r = build_linear(ops, type->type, kernels, reterr);
        if (!r)
            r = ops_linear_warm(ops, kernels);
        if (r)
            return r;
    }
    return build_embed(ops, type->type, kernels, reterr);
}

int ops_kernels(Ops *ops, const WeightTypeInfo *type, OpsKernels **ret)
{
    int r;

    r = ops_prepare_type(ops, type, NULL);
    if (r)
        return error_fold(r);
    *ret = &ops->kernels[type->type];
    return 0;
}

/* ---- embedding ------------------------------------------------------------------------------------------------------------- */

int ops_embed(Ops *ops, const OpsWeight *table, float scale, const GpuBuffer *ids, uint64_t ids_offset, uint32_t n_rows,
              GpuBuffer *out)
{
    OpsKernels *kernels = &ops->kernels[table->type->type];
    uint32_t items = ops->vectors ? 1 : OPS_LOCAL_ITEMS;
    GpuKernel *kernel;
    int r;

    r = ops_kernels(ops, table->type, &kernels);
    if (r)
        return r;
    kernel = kernels->embed;
    r = gpu_kernel_set_buffer(kernel, 0, table->buffer);
    if (!r)
        r = gpu_kernel_set_bytes(kernel, 1, &table->offset, sizeof(table->offset));
    if (!r)
        r = gpu_kernel_set_u32(kernel, 2, table->n_rows);
    if (!r)
        r = gpu_kernel_set_u32(kernel, 3, table->n_cols);
    if (!r)
        r = gpu_kernel_set_f32(kernel, 4, scale);
    if (!r)
        r = gpu_kernel_set_buffer(kernel, 5, ids);
    if (!r)
        r = gpu_kernel_set_bytes(kernel, 6, &ids_offset, sizeof(ids_offset));
    if (!r)
        r = gpu_kernel_set_buffer(kernel, 7, out);
    if (!r)
        r = gpu_launch(kernel, GPU_RANGE_2D(items, n_rows, items, 1), GPU_WAIT_NONE, NULL);
    return r;
}
