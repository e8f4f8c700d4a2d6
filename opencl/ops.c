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
    *ret = bytes + ops_sync_bytes(info->compute_units);
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
        r = gpu_buffer_new(gpu, GPU_PURPOSE_ACTIVATIONS, ops_sync_bytes(ops->n_groups), &ops->sync, reterr);
    if (!r)
        r = gpu_fill_zero(gpu, GPU_QUEUE_COMPUTE, ops->sync, 0, ops_sync_bytes(ops->n_groups));
    if (r)
        return r;
    *ret = TAKE_PTR(ops);
    return 0;
}

static void kernels_clear(OpsKernels *kernels)
{
    kernels->prepare = gpu_kernel_free(kernels->prepare);
    kernels->product = gpu_kernel_free(kernels->product);
    kernels->embed = gpu_kernel_free(kernels->embed);
}

Ops *ops_free(Ops *ops)
{
    if (!ops)
        return NULL;
    for (size_t i = 0; i < N_ELEMENTS(ops->kernels); i++)
        kernels_clear(&ops->kernels[i]);
    (void)gpu_buffer_free(ops->sync);
    (void)gpu_buffer_free(ops->act);
    free(ops);
    return NULL;
}

/* ---- embedding --------------------------------------------------------------------------------------------------- */

static int launch_embed(const Ops *ops, GpuKernel *kernel, const OpsWeight *table, float scale, const GpuBuffer *ids,
                        uint64_t ids_offset, uint32_t n_rows, const GpuBuffer *out)
{
    uint32_t items = ops->vectors ? 1 : OPS_LOCAL_ITEMS;
    int r;

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

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

static bool is_float(WeightType type)
{
    return type == WEIGHT_TYPE_F32 || type == WEIGHT_TYPE_F16 || type == WEIGHT_TYPE_BF16;
}

static int build(Ops *ops, WeightType type, OpsKernels *ret, ErrorDetail *reterr)
{
    static const char *const sources[] = {"lanes.cl", "weight.cl", "norm.cl", "norm-eight.cl",
                                          "linear.cl", "linear-stages.cl", "embed.cl"};
    GpuProgram *program;
    char options[96];
    int r;

    (void)snprintf(options, sizeof(options), "-DSIMD=%d -DWEIGHT_TYPE=%d -DFLOAT_ACTS=%d", (int)gpu_info(ops->gpu)->simd,
                   (int)type, ops->options.exact || is_float(type));
    r = gpu_program_get(ops->gpu, sources, N_ELEMENTS(sources), options, &program, reterr);
    if (!r && !ops->vectors)
        r = gpu_kernel_new(program, "prepare_rows", &ret->prepare, reterr);
    if (!r)
        r = gpu_kernel_new(program, ops->vectors ? "linear_stages" : "linear_rows", &ret->product, reterr);
    if (!r)
        r = gpu_kernel_new(program, "embed_rows", &ret->embed, reterr);
    return r;
}

/* A row of no columns. */
static int warm_embed(const Ops *ops, GpuKernel *kernel)
{
    const OpsWeight nothing = {.n_rows = 1};

    return launch_embed(ops, kernel, &nothing, 1.0f, ops->sync, 0, 1, ops->act);
}

int ops_prepare_type(Ops *ops, const WeightTypeInfo *type, ErrorDetail *reterr)
{
    OpsKernels *kernels;
    int r;

    assert((size_t)type->type < N_ELEMENTS(ops->kernels));
    kernels = &ops->kernels[type->type];
    if (kernels->embed)
        return 0;
    r = build(ops, type->type, kernels, reterr);
    if (!r)
        r = ops_linear_warm(ops, kernels);
    if (!r)
        r = warm_embed(ops, kernels->embed);
    if (r)
        kernels_clear(kernels);
    return r;
}

int ops_require_type(Ops *ops, const WeightTypeInfo *type)
{
    return error_fold(ops_prepare_type(ops, type, NULL));
}

int ops_embed(Ops *ops, const OpsWeight *table, float scale, const GpuBuffer *ids, uint64_t ids_offset, uint32_t n_rows,
              GpuBuffer *out)
{
    int r;

    if (n_rows == 0)
        return error_origin(-EINVAL);
    r = ops_require_type(ops, table->type);
    if (r)
        return r;
    return launch_embed(ops, ops->kernels[table->type->type].embed, table, scale, ids, ids_offset, n_rows, out);
}
