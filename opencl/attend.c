/* SPDX-License-Identifier: Apache-2.0 */
/* Attention: construction.  Kernels for the options, buffers, tables. */

#include "opencl/attend-internal.h"

#include "quant/base/half.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define NO_GROUPS          65536u /* GROUP_DIMS of a form without groups: all dims are in the first */

Attend *attend_free(Attend *attend)
{
    if (!attend)
        return NULL;
    (void)gpu_kernel_free(attend->prepare);
    (void)gpu_kernel_free(attend->pack);
    (void)gpu_kernel_free(attend->tile);
    (void)gpu_kernel_free(attend->fold);
    (void)gpu_kernel_free(attend->finish);
    (void)gpu_kernel_free(attend->whole);
    (void)gpu_kernel_free(attend->commit);
    (void)gpu_kernel_free(attend->refill);
    (void)gpu_buffer_free(attend->operands);
    (void)gpu_buffer_free(attend->state);
    (void)gpu_buffer_free(attend->kept);
    (void)gpu_buffer_free(attend->partials);
    (void)gpu_buffer_free(attend->page_angles);
    (void)gpu_buffer_free(attend->places);
    (void)gpu_buffer_free(attend->scratch);
    free(attend);
    return NULL;
}

/* All query heads of a KV head up to four, else even shares of at most four; fewer when there are many groups of V scales, each with
 * weights of its own: a work-group has 16 KiB of local memory for them. */
static uint32_t choose_columns(const Attend *attend)
{
    uint32_t n_rep = attend->options.shape.n_heads / attend->options.shape.n_kv_heads;
    uint32_t most = MIN(MAX(16 / MAX(attend->layout.v_groups, 1u), 1u), 4u), n_shares = (n_rep + most - 1) / most;

    return (n_rep + n_shares - 1) / n_shares;
}

/* The -D options of attend-common.cl.  Floats go as bits: no locale, no rounding. */
static int format_options(const Attend *attend, char *buffer, size_t size)
{
    const AttendOptions *o = &attend->options;
    const KvLayout *l = &attend->layout;
    bool lanes = attend->kernels == ATTEND_KERNELS_LANES;
    int n;

    n = snprintf(buffer, size,
                 "-DK_DIM=%u -DV_DIM=%u -DN_HEADS=%u -DN_KV=%u -DROT_HALF=%u -DFORM=%d -DK_BITS=%u -DV_BITS=%u -DGROUP_DIMS=%u -DK_GROUPS=%u "
                 "-DV_GROUPS=%u -DCENTRE=%d -DPAIR_SCALE=%d -DROTATE=%d -DPLAIN_LEVELS=%d -DSINK_TOKENS=%u -DTAIL_TOKENS=%u -DTAIL_BITS=%u "
                 "-DRECORD_BYTES=%u -DPAGE_BYTES=%u -DK_HIGH=%u -DV_OFFSET=%u -DV_HIGH=%u -DK_SCALE=%u -DV_SCALE=%u "
                 "-DSCORE_SCALE=as_float(0x%08xu) -DLANES=%d -DW=%d -DCOLS=%u -DN_FAST=%u -DINTEGER=%d -DVNNI=%d -DNARROW=%d "
                 "-DCAPPED=%d -DSOFTCAP=as_float(0x%08xu) -DSINK_LOGITS=%d",
                 o->shape.k_head_dim, o->shape.v_head_dim, o->shape.n_heads, o->shape.n_kv_heads, o->shape.rotary_dim / 2, (int)o->form.kind,
                 o->form.k_bits, o->form.v_bits, o->form.group_dims ? o->form.group_dims : NO_GROUPS, l->k_groups, l->v_groups,
                 (int)o->form.centre, o->form.pair_scale, o->form.rotation == KV_ROTATION_HADAMARD, o->form.levels == KV_LEVELS_PLAIN,
                 o->form.sink_tokens, kv_ring_tokens(o->form), o->tail_bits, l->record_bytes, l->page_bytes, l->k_high_offset, l->v_offset,
                 l->v_high_offset, l->k_scale_offset, l->v_scale_offset, float_to_bits((float)(o->scale * M_LOG2E)),
                 lanes ? ATTEND_LANES : 1, lanes ? 1 : 16, attend->columns, attend->n_fast, attend->kernels >= ATTEND_KERNELS_AVX2,
                 attend->kernels == ATTEND_KERNELS_VNNI, attend->kernels == ATTEND_KERNELS_AVX2, o->softcap > 0,
                 float_to_bits((float)(o->softcap * M_LOG2E)), o->sink_logits);
    return n < 0 || (size_t)n >= size ? -EOVERFLOW : 0;
}

static int build_kernels(Attend *attend, ErrorDetail *reterr)
{
    static const char *const sources[] = {"attend-common.cl", "attend-prepare.cl", "attend-group.cl",    "attend-pack.cl",  "attend-block.cl",
                                          "attend-tile.cl",   "attend-x86.cl",     "attend-tile-x86.cl", "attend-walk.cl", "attend-finish.cl",
                                          "attend-whole.cl"};
    struct {
        const char *name;
        GpuKernel **kernel;
    } kernels[] = {
        {"attend_prepare", &attend->prepare}, {"attend_pack", &attend->pack},     {"attend_tile", &attend->tile},
        {"attend_fold", &attend->fold},       {"attend_finish", &attend->finish}, {"attend_commit", &attend->commit},
        {"attend_refill", &attend->refill},   {"attend_whole", &attend->whole},
    };
    GpuProgram *program;
    char options[1024];
    int r;

    r = format_options(attend, options, sizeof(options));
    if (r)
        return error_trace(r);
    r = gpu_program_get(attend->gpu, sources, N_ELEMENTS(sources), options, &program, reterr);
    for (size_t i = 0; !r && i < N_ELEMENTS(kernels); i++) {
        bool is_there = kernels[i].kernel == &attend->refill ? !kv_form_is_coded(attend->options.form)
                        : kernels[i].kernel == &attend->whole ? attend->kernels != ATTEND_KERNELS_LANES
                                                              : true;

        if (is_there)
            r = gpu_kernel_new(program, kernels[i].name, kernels[i].kernel, reterr);
    }
    return r;
}

static int allocate(Attend *attend, ErrorDetail *reterr)
{
    struct {
        uint64_t bytes;
        GpuBuffer **buffer;
    } buffers[] = {
        {attend->sizes.operands, &attend->operands}, {attend->sizes.state, &attend->state},
        {attend->sizes.kept, &attend->kept},         {attend->sizes.partials, &attend->partials},
        {attend->sizes.page_angles, &attend->page_angles}, {attend->sizes.places, &attend->places},
        {attend->sizes.scratch, &attend->scratch},
    };

    for (size_t i = 0; i < N_ELEMENTS(buffers); i++)
        if (buffers[i].bytes > 0) {
            int r = gpu_buffer_new(attend->gpu, GPU_PURPOSE_ACTIVATIONS, buffers[i].bytes, buffers[i].buffer, reterr);

            if (r)
                return r;
        }
    return 0;
}

static int upload_table(Attend *attend, GpuBuffer *to, uint64_t bytes, const AttendOptions *options,
                        void (*fill)(const AttendOptions *options, float *ret), ErrorDetail *reterr)
{
    _cleanup_(gpu_event_unrefp) GpuEvent *event = NULL;
    _cleanup_(freep) float *table = NULL;
    int r;

    if (bytes == 0)
        return 0;
    table = malloc(bytes);
    if (!table)
        return error_origin(-ENOMEM);
    fill(options, table);
    r = gpu_upload(attend->gpu, GPU_QUEUE_COMPUTE, to, 0, table, bytes, GPU_WAIT_NONE, "attend_table", &event);
    if (r)
        return error_trace(r);
    return gpu_event_wait(attend->gpu, event, reterr);
}

/* llvmpipe's guard against endless shaders counts 65,535 iterations of all loops of a work-item; a block of head size 64 takes up to
 * 6,000, and they grow with the head. */
static uint32_t choose_blocks_per_launch(const GpuInfo *info, const KvShape *shape)
{
    if (!strcasestr(info->platform, "rusticl"))
        return INT32_MAX;
    return MAX(512 / (shape->k_head_dim + shape->v_head_dim), 1u);
}

int attend_new(Gpu *gpu, const AttendOptions *options, Attend **ret, ErrorDetail *reterr)
{
    _cleanup_(attend_freep) Attend *attend = NULL;
    int r;

    attend = calloc(1, sizeof(*attend));
    if (!attend)
        return error_origin(-ENOMEM);
    attend->gpu = gpu;
    attend->options = *options;
    attend->options.inv_freq = NULL;
    r = attend_choose(gpu_info(gpu), options, &attend->kernels, &attend->layout, reterr);
    if (!r)
        r = attend_sizes(options, attend->kernels, &attend->sizes, reterr);
    if (r)
        return r;
    attend->columns = choose_columns(attend);
    attend->n_fast = attend_n_fast(options);
    attend->blocks_per_launch = choose_blocks_per_launch(gpu_info(gpu), &options->shape);
    r = build_kernels(attend, reterr);
    if (!r)
        r = allocate(attend, reterr);
    if (!r)
        r = upload_table(attend, attend->page_angles, attend->sizes.page_angles, options, attend_fill_page_angles, reterr);
    if (!r)
        r = upload_table(attend, attend->places, attend->sizes.places, options, attend_fill_places, reterr);
    if (r)
        return r;
    *ret = TAKE_PTR(attend);
    return 0;
}
