/* SPDX-License-Identifier: Apache-2.0 */
/* Attention: which kernels a device gets, what they allocate, and the tables of angles. */

#include "opencl/attend-internal.h"

#include "quant/base/checked.h"

#include <math.h>

#define VECTOR_DIMS 16

static AttendKernels best_kernels(const GpuInfo *info, const AttendOptions *options)
{
    if (info->simd == GPU_SIMD_PORTABLE)
        return ATTEND_KERNELS_LANES;
    if (options->exact || options->form.group_dims == 0)
        return ATTEND_KERNELS_VECTORS;
    return info->simd >= GPU_SIMD_AVX512VNNI ? ATTEND_KERNELS_VNNI
           : info->simd >= GPU_SIMD_AVX512BW ? ATTEND_KERNELS_BW
                                             : ATTEND_KERNELS_AVX2;
}

static int check_visibility(const AttendOptions *options, ErrorDetail *reterr)
{
    AttendVisibility visibility = options->visibility;

    switch (visibility.mask) {
    case ATTEND_MASK_CAUSAL:
        if (visibility.window != 0)
            return error_detail_set(reterr, -EINVAL, "causal attention with a window of %u tokens", visibility.window);
        return 0;
    case ATTEND_MASK_SLIDING:
    case ATTEND_MASK_CHUNKED:
        if (visibility.window == 0 || visibility.window > ATTEND_WINDOW_MAX)
            return error_detail_set(reterr, -EINVAL, "a window of %u tokens, must be 1 to %u", visibility.window, ATTEND_WINDOW_MAX);
        return 0;
    case ATTEND_MASK_CROSS:
        if (visibility.window != 0 || options->shape.rotary_dim != 0)
            return error_detail_set(reterr, -EINVAL, "cross attention with a window of %u tokens or %u rotary dimensions",
                                    visibility.window, options->shape.rotary_dim);
        return 0;
    }
    return error_detail_set(reterr, -EINVAL, "attention mask %d is unknown", (int)visibility.mask);
}

static int check_options(const AttendOptions *options, ErrorDetail *reterr)
{
    if (options->tail_bits != 16 && options->tail_bits != 32)
        return error_detail_set(reterr, -EINVAL, "a tail of %u bits: only 16 and 32 are known", options->tail_bits);
    if ((options->form.kind == KV_FORM_F32 && options->tail_bits != 32) ||
        (options->form.kind == KV_FORM_F16 && options->tail_bits != 16))
        return error_detail_set(reterr, -EINVAL, "a tail of %u bits beside pages of another width", options->tail_bits);
    if (options->max_rows == 0 || options->max_refs == 0 || options->max_pages == 0)
        return error_detail_set(reterr, -EINVAL, "attention for %u rows, %u refs, %u pages", options->max_rows, options->max_refs,
                                options->max_pages);
    if (!isfinite(options->softcap) || options->softcap < 0)
        return error_detail_set(reterr, -EINVAL, "scores cannot be capped at %g", options->softcap);
    if (options->shape.rotary_dim > 0 && !options->inv_freq)
        return error_detail_set(reterr, -EINVAL, "rotary_dim %u without frequencies", options->shape.rotary_dim);
    return check_visibility(options, reterr);
}

int attend_choose(const GpuInfo *info, const AttendOptions *options, AttendKernels *ret, KvLayout *ret_layout, ErrorDetail *reterr)
{
    AttendKernels best;
    int r;

    r = kv_layout(options->form, &options->shape, ret_layout, reterr);
    if (!r)
        r = check_options(options, reterr);
    if (r)
        return error_trace(r);
    best = best_kernels(info, options);
    if (options->kernels > best && !(options->kernels == ATTEND_KERNELS_VECTORS && info->type == GPU_DEVICE_TYPE_CPU))
        return error_detail_set(reterr, -EINVAL, "'%s' cannot run kernels %d for this cache", info->name, (int)options->kernels);
    *ret = options->kernels == ATTEND_KERNELS_AUTO ? best : options->kernels;
    return 0;
}

/* Rotary pairs of the mean that turns. */
static uint32_t mean_pairs(const AttendOptions *options)
{
    return options->form.centre == KV_CENTRE_BEFORE_ROPE ? options->shape.rotary_dim / 2 : 0;
}

uint32_t attend_rotary_pad(const AttendOptions *options)
{
    return (mean_pairs(options) + VECTOR_DIMS - 1) / VECTOR_DIMS * VECTOR_DIMS;
}

/* OP_FLOATS of attend-common.cl. */
uint32_t attend_operand_floats(const AttendOptions *options, const KvLayout *layout)
{
    uint32_t n;

    if (!kv_form_is_coded(options->form))
        return options->shape.k_head_dim;
    n = 2 * options->shape.k_head_dim + 2 * attend_rotary_pad(options) + 1 + 2 * layout->k_groups;
    return (n + VECTOR_DIMS - 1) / VECTOR_DIMS * VECTOR_DIMS;
}

static int product(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t *ret)
{
    uint64_t p;

    if (!checked_mul(a, b, &p) || !checked_mul(p, c, &p) || !checked_mul(p, d, &p))
        return -EOVERFLOW;
    *ret = p;
    return 0;
}

int attend_sizes(const AttendOptions *options, AttendKernels kernels, AttendSizes *ret, ErrorDetail *reterr)
{
    const KvShape *shape = &options->shape;
    bool integer = kernels >= ATTEND_KERNELS_AVX2;
    uint32_t state_bytes = (shape->v_head_dim + 2) * (uint32_t)sizeof(float), pad = attend_rotary_pad(options);
    AttendSizes sizes = {0};
    KvLayout layout;
    int r;

    r = kv_layout(options->form, shape, &layout, reterr);
    if (r)
        return error_trace(r);
    r = product(options->max_rows, shape->n_heads, attend_operand_floats(options, &layout), sizeof(float), &sizes.operands);
    if (!r)
        r = product(options->max_rows, shape->n_heads, state_bytes, 1, &sizes.state);
    if (!r)
        r = product(options->max_rows, kv_token_values(shape), options->tail_bits / 8, 1, &sizes.kept);
    if (!r)
        r = product(options->max_refs, shape->n_heads, state_bytes, 1, &sizes.partials);
    if (!r && pad)
        r = product(options->max_pages, 2, pad, sizeof(float), &sizes.page_angles);
    if (!r && pad)
        sizes.places = (2 * (uint64_t)pad * (KV_PAGE_TOKENS + ATTEND_NODES) + 4 * ATTEND_NODE_TOKENS) * sizeof(float);
    if (!r && integer)
        r = product(ATTEND_TILE_GROUPS_MAX, KV_BLOCK_PAGES * KV_PAGE_TOKENS, shape->k_head_dim + shape->v_head_dim, 1, &sizes.scratch);
    if (r)
        return error_detail_set(reterr, r, "attention buffers for %u rows and %u refs would overflow", options->max_rows,
                                options->max_refs);
    *ret = sizes;
    return 0;
}

int attend_device_bytes(const GpuInfo *info, const AttendOptions *options, uint64_t *ret)
{
    AttendKernels kernels;
    AttendSizes sizes;
    KvLayout layout;
    int r;

    r = attend_choose(info, options, &kernels, &layout, NULL);
    if (!r)
        r = attend_sizes(options, kernels, &sizes, NULL);
    if (r)
        return error_trace(r);
    *ret = sizes.operands + sizes.state + sizes.kept + sizes.partials + sizes.page_angles + sizes.places + sizes.scratch;
    return 0;
}

/* (max_pages, 2, pad): cos, sin of pair f at position 32 page + 15.5; padding is cos 0, whatever (its coefficients are zero). */
void attend_fill_page_angles(const AttendOptions *options, float *ret)
{
    uint32_t pad = attend_rotary_pad(options);

    for (uint32_t page = 0; page < options->max_pages; page++)
        for (uint32_t f = 0; f < pad; f++) {
            double turn = f < options->shape.rotary_dim / 2 ? options->inv_freq[f] : 0;
            double angle = ((double)page * KV_PAGE_TOKENS + (KV_PAGE_TOKENS - 1) / 2.0) * turn;

            ret[((size_t)page * 2) * pad + f] = (float)cos(angle);
            ret[((size_t)page * 2 + 1) * pad + f] = (float)sin(angle);
        }
}

uint32_t attend_n_fast(const AttendOptions *options)
{
    uint32_t n = mean_pairs(options);

    while (n > 0 && fabsf(options->inv_freq[n - 1]) * ATTEND_NODE_TOKENS <= 0.25f)
        n--;
    return n;
}

/* cos and sin of pair f at @n points @step tokens apart, the first at @first: (pad, 2, n). */
static float *fill_angles(const AttendOptions *options, double first, double step, uint32_t n, float *to)
{
    for (uint32_t f = 0; f < attend_rotary_pad(options); f++, to += 2 * n)
        for (uint32_t i = 0; i < n; i++) {
            double turn = f < options->shape.rotary_dim / 2 ? options->inv_freq[f] : 0;

            to[i] = (float)cos((first + i * step) * turn);
            to[n + i] = (float)sin((first + i * step) * turn);
        }
    return to;
}

/* Places -15.5 .. 15.5 from a page's centre; a block's nodes from -32 on; weights of the cubic through four nodes for the 16 tokens
 * between the middle two. */
void attend_fill_places(const AttendOptions *options, float *ret)
{
    ret = fill_angles(options, -(KV_PAGE_TOKENS - 1) / 2.0, 1, KV_PAGE_TOKENS, ret);
    ret = fill_angles(options, -2.0 * ATTEND_NODE_TOKENS, ATTEND_NODE_TOKENS, ATTEND_NODES, ret);
    for (uint32_t i = 0; i < ATTEND_NODE_TOKENS; i++) {
        double u = (i + 0.5) / ATTEND_NODE_TOKENS;

        ret[i] = (float)(-u * (u - 1) * (u - 2) / 6);
        ret[ATTEND_NODE_TOKENS + i] = (float)((u + 1) * (u - 1) * (u - 2) / 2);
        ret[2 * ATTEND_NODE_TOKENS + i] = (float)(-(u + 1) * u * (u - 2) / 2);
        ret[3 * ATTEND_NODE_TOKENS + i] = (float)((u + 1) * u * (u - 1) / 6);
    }
}
