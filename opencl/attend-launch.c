/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention: launches.  A decode step of one tile takes one a layer where attend_is_whole(), else three: prepare, tile (split), finish, which
 * merges the partial results and commits; each further tile adds the merge of the one before it.
 */

#include "opencl/attend-internal.h"

#include <string.h>

/* Arguments of one launch, in order; remembers the first error. */
typedef struct Arguments {
    GpuKernel *kernel;
    unsigned next;
    int r;
} Arguments;

static void pass_buffer(Arguments *a, const GpuBuffer *buffer)
{
    if (!a->r)
        a->r = gpu_kernel_set_buffer(a->kernel, a->next++, buffer);
}

static void pass_bytes(Arguments *a, const void *value, size_t size)
{
    if (!a->r)
        a->r = gpu_kernel_set_bytes(a->kernel, a->next++, value, size);
}

static void pass_int(Arguments *a, uint32_t value)
{
    pass_bytes(a, &value, sizeof(value));
}

/* A buffer with its byte offset. */
static void pass_part(Arguments *a, const GpuBuffer *buffer, uint64_t offset)
{
    pass_buffer(a, buffer);
    pass_bytes(a, &offset, sizeof(offset));
}

static void pass_tail(Arguments *a, const AttendLayer *layer)
{
    pass_part(a, layer->tail, layer->tail_offset);
    pass_bytes(a, &layer->tail_slot_stride, sizeof(layer->tail_slot_stride));
}

/* Work-groups for @n_units: on CPUs few, since the second thread of a small launch wakes late; @per_group units are worth one. */
static GpuRange range_for(const Attend *attend, uint64_t n_units, uint64_t per_group, uint64_t most)
{
    uint64_t n;

    if (attend->kernels == ATTEND_KERNELS_LANES) {
        n = MIN(n_units, (uint64_t)65535);
        return GPU_RANGE_1D(n * ATTEND_LANES, ATTEND_LANES);
    }
    n = MAX(n_units / per_group, (uint64_t)1);
    return GPU_RANGE_1D(MIN(n, most), 1);
}

static bool pass_fits(const Attend *attend, const AttendPass *pass)
{
    return pass->n_rows > 0 && pass->n_rows <= attend->options.max_rows && pass->n_groups > 0 && pass->n_groups <= pass->n_rows;
}

/* Rows of @from have heads [first, first + n) of q, k and v. */
static int launch_prepare(Attend *attend, const AttendPass *pass, const AttendLayer *layer, uint32_t first, uint32_t n,
                          uint64_t row_values, const GpuBuffer *from)
{
    uint64_t n_units = (uint64_t)pass->n_rows * n, n_groups;
    Arguments a = {.kernel = attend->prepare};
    GpuRange range;

    if (!pass_fits(attend, pass))
        return error_origin(-EINVAL);
    attend->pending.spans = NULL;
    pass_int(&a, pass->n_rows);
    pass_int(&a, first);
    pass_int(&a, n);
    pass_int(&a, (uint32_t)row_values);
    pass_buffer(&a, from);
    pass_part(&a, pass->rope, pass->rope_offset);
    pass_part(&a, layer->calibration, layer->calibration_offset);
    pass_buffer(&a, attend->operands);
    pass_buffer(&a, attend->state);
    pass_buffer(&a, attend->kept);
    if (a.r)
        return error_trace(a.r);
    n_groups = (n_units + ATTEND_LANES - 1) / ATTEND_LANES; /* a work-item a unit, not a group */
    range = range_for(attend, attend->kernels == ATTEND_KERNELS_LANES ? n_groups : n_units, 32, 16);
    return gpu_launch(attend->prepare, range, GPU_WAIT_NONE, NULL);
}

int attend_prepare(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *qkv)
{
    const KvShape *shape = &attend->options.shape;

    if (attend->options.visibility.mask == ATTEND_MASK_CROSS)
        return launch_prepare(attend, pass, layer, 0, shape->n_heads, kv_row_values(shape) - kv_token_values(shape), qkv);
    return launch_prepare(attend, pass, layer, 0, shape->n_heads + 2 * shape->n_kv_heads, kv_row_values(shape), qkv);
}

int attend_keep(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *kv)
{
    const KvShape *shape = &attend->options.shape;

    if (attend->options.visibility.mask != ATTEND_MASK_CROSS)
        return error_origin(-EINVAL);
    return launch_prepare(attend, pass, layer, shape->n_heads, 2 * shape->n_kv_heads, kv_token_values(shape), kv);
}

int attend_pack(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *packs, uint64_t packs_offset,
                uint32_t n_packs, GpuBuffer *fresh, GpuEvent **ret_event)
{
    const KvForm *form = &attend->options.form;
    Arguments a = {.kernel = attend->pack};

    if (n_packs == 0 || !pass_fits(attend, pass))
        return error_origin(-EINVAL);
    pass_int(&a, n_packs);
    pass_part(&a, packs, packs_offset);
    pass_int(&a, pass->n_rows);
    pass_buffer(&a, attend->kept);
    pass_tail(&a, layer);
    pass_part(&a, layer->calibration, layer->calibration_offset);
    pass_buffer(&a, attend->page_angles);
    pass_buffer(&a, attend->places);
    pass_bytes(&a, kv_search(form->k_bits), KV_SEARCH_FLOATS * sizeof(float));
    pass_bytes(&a, kv_search(form->v_bits), KV_SEARCH_FLOATS * sizeof(float));
    pass_buffer(&a, fresh);
    if (a.r)
        return error_trace(a.r);
    return gpu_launch(attend->pack, range_for(attend, (uint64_t)n_packs * attend->options.shape.n_kv_heads * 2, 3, 64), GPU_WAIT_NONE,
                      ret_event);
}

/* Merges a split tile's partial results into the state, before the next tile overwrites them. */
static int fold_pending(Attend *attend, const AttendPass *pass)
{
    uint64_t n_units = (uint64_t)pass->n_rows * attend->options.shape.n_heads;
    Arguments a = {.kernel = attend->fold};

    pass_int(&a, pass->n_rows);
    pass_int(&a, pass->n_groups);
    pass_int(&a, attend->pending.ref_rows);
    pass_part(&a, pass->groups, pass->groups_offset);
    pass_part(&a, attend->pending.spans, attend->pending.spans_offset);
    pass_buffer(&a, attend->partials);
    pass_buffer(&a, attend->state);
    if (a.r)
        return error_trace(a.r);
    attend->pending.spans = NULL;
    return gpu_launch(attend->fold, range_for(attend, n_units, 64, 16), GPU_WAIT_NONE, NULL);
}

/* So many sequential walks keep all threads busy. */
static uint64_t enough_walks(const Attend *attend)
{
    return (uint64_t)gpu_info(attend->gpu)->compute_units * (attend->kernels == ATTEND_KERNELS_LANES ? 8 : 4);
}

/* Whether to split @tile, and rows of a ref in the partial results: one more than rows can be spared from the other groups. */
static bool choose_split(const Attend *attend, const AttendPass *pass, const AttendTile *tile, uint32_t *ret_ref_rows)
{
    uint32_t ref_rows = MIN(pass->n_rows - pass->n_groups + 1, (uint32_t)KV_PAGE_TOKENS);
    uint64_t n_walks = (uint64_t)pass->n_groups * attend->options.shape.n_kv_heads;

    *ret_ref_rows = ref_rows;
    if ((uint64_t)tile->n_refs * ref_rows > attend->options.max_refs || attend->options.spread == ATTEND_SPREAD_SEQUENTIAL)
        return false;
    return attend->options.spread == ATTEND_SPREAD_SPLIT || n_walks < enough_walks(attend);
}

/* One launch over a tile; sequential ones walk refs [skip, skip + most) of each group. */
static int launch_tile(Attend *attend, const AttendPass *pass, const AttendTile *tile, bool split, uint32_t ref_rows, uint32_t skip,
                       uint32_t most, GpuWait wait, GpuEvent **ret_event)
{
    const KvShape *shape = &attend->options.shape;
    bool lanes = attend->kernels == ATTEND_KERNELS_LANES;
    uint32_t n_shares = lanes ? (ref_rows * (shape->n_heads / shape->n_kv_heads) + attend->columns - 1) / attend->columns : 1;
    uint32_t n_units = (split ? tile->n_refs : pass->n_groups) * shape->n_kv_heads * n_shares;
    Arguments a = {.kernel = attend->tile};

    pass_int(&a, !split);
    pass_int(&a, n_units);
    pass_int(&a, n_shares);
    pass_int(&a, ref_rows);
    pass_int(&a, skip);
    pass_int(&a, most);
    pass_int(&a, attend->options.visibility.mask);
    pass_int(&a, attend->options.visibility.window);
    pass_part(&a, pass->groups, pass->groups_offset);
    pass_part(&a, tile->refs, tile->refs_offset);
    pass_part(&a, tile->spans, tile->spans_offset);
    pass_part(&a, tile->pages, tile->pages_offset);
    pass_buffer(&a, tile->fresh);
    pass_buffer(&a, attend->operands);
    pass_buffer(&a, attend->state);
    pass_buffer(&a, attend->partials);
    pass_buffer(&a, attend->page_angles);
    pass_buffer(&a, attend->places);
    pass_buffer(&a, attend->scratch);
    if (a.r)
        return error_trace(a.r);
    return gpu_launch(attend->tile, range_for(attend, n_units, split ? 3 : 1, ATTEND_TILE_GROUPS_MAX), wait, ret_event);
}

int attend_tile(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const AttendTile *tile, GpuWait wait,
                GpuEvent **ret_event)
{
    uint32_t ref_rows, most = attend->blocks_per_launch, skip;
    int r;

    (void)layer;
    if (!pass_fits(attend, pass) || tile->n_refs == 0 || tile->n_refs > attend->options.max_refs)
        return error_origin(-EINVAL);
    if (attend->pending.spans) {
        r = fold_pending(attend, pass);
        if (r)
            return error_trace(r);
    }
    if (choose_split(attend, pass, tile, &ref_rows)) {
        attend->pending.spans = tile->spans;
        attend->pending.spans_offset = tile->spans_offset;
        attend->pending.ref_rows = ref_rows;
        return launch_tile(attend, pass, tile, true, ref_rows, 0, most, wait, ret_event);
    }
    for (skip = 0; tile->n_refs - skip > most; skip += most) {
        r = launch_tile(attend, pass, tile, false, ref_rows, skip, most, wait, NULL);
        if (r)
            return error_trace(r);
    }
    return launch_tile(attend, pass, tile, false, ref_rows, skip, most, wait, ret_event);
}

int attend_finish(Attend *attend, const AttendPass *pass, const AttendLayer *layer, GpuBuffer *out)
{
    Arguments a = {.kernel = attend->finish};

    if (!pass_fits(attend, pass) || (attend->options.sink_logits && !layer->sink_logits))
        return error_origin(-EINVAL);
    pass_int(&a, pass->n_rows);
    pass_int(&a, pass->n_groups);
    pass_int(&a, attend->options.visibility.mask);
    pass_int(&a, attend->options.visibility.window);
    pass_part(&a, pass->groups, pass->groups_offset);
    pass_int(&a, attend->pending.spans != NULL);
    pass_int(&a, attend->pending.ref_rows);
    pass_part(&a, attend->pending.spans, attend->pending.spans_offset);
    pass_buffer(&a, attend->partials);
    pass_buffer(&a, attend->state);
    pass_buffer(&a, attend->operands);
    pass_part(&a, layer->calibration, layer->calibration_offset);
    pass_buffer(&a, attend->kept);
    pass_tail(&a, layer);
    pass_part(&a, layer->sink_logits, layer->sink_logits_offset);
    pass_buffer(&a, out);
    if (a.r)
        return error_trace(a.r);
    attend->pending.spans = NULL;
    return gpu_launch(attend->finish, range_for(attend, (uint64_t)pass->n_rows * attend->options.shape.n_kv_heads, 3, 16),
                      GPU_WAIT_NONE, NULL);
}

/* Blocks that one thread may walk while others have nothing to do: a launch and its gap take as long. */
#define WHOLE_FEW_REFS 4

bool attend_is_whole(const Attend *attend, const AttendPass *pass, uint32_t n_refs)
{
    uint64_t n_walks = (uint64_t)pass->n_groups * attend->options.shape.n_kv_heads;

    if (!attend->whole || attend->options.spread != ATTEND_SPREAD_AUTO || attend->options.visibility.mask == ATTEND_MASK_CROSS ||
        attend->blocks_per_launch < n_refs)
        return false;
    return pass->n_rows == pass->n_groups && pass->n_rows == pass->n_sequences &&
           (n_refs <= WHOLE_FEW_REFS || n_walks >= enough_walks(attend));
}

int attend_whole(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *qkv, const AttendTile *tile,
                 GpuWait wait, GpuBuffer *out)
{
    AttendVisibility visibility = attend->options.visibility;
    Arguments a = {.kernel = attend->whole};

    if (!pass_fits(attend, pass) || !attend_is_whole(attend, pass, tile ? tile->n_refs : 0) ||
        (attend->options.sink_logits && !layer->sink_logits))
        return error_origin(-EINVAL);
    attend->pending.spans = NULL;
    pass_int(&a, pass->n_rows);
    pass_int(&a, tile != NULL);
    pass_int(&a, visibility.mask);
    pass_int(&a, visibility.window);
    pass_buffer(&a, qkv);
    pass_part(&a, pass->rope, pass->rope_offset);
    pass_part(&a, layer->calibration, layer->calibration_offset);
    pass_part(&a, pass->groups, pass->groups_offset);
    pass_part(&a, tile ? tile->refs : NULL, tile ? tile->refs_offset : 0);
    pass_part(&a, tile ? tile->spans : NULL, tile ? tile->spans_offset : 0);
    pass_part(&a, tile ? tile->pages : NULL, tile ? tile->pages_offset : 0);
    pass_buffer(&a, attend->operands);
    pass_buffer(&a, attend->state);
    pass_buffer(&a, attend->kept);
    pass_buffer(&a, attend->page_angles);
    pass_buffer(&a, attend->places);
    pass_buffer(&a, attend->scratch);
    pass_tail(&a, layer);
    pass_part(&a, layer->sink_logits, layer->sink_logits_offset);
    pass_buffer(&a, out);
    if (a.r)
        return error_trace(a.r);
    return gpu_launch(attend->whole, range_for(attend, (uint64_t)pass->n_rows * attend->options.shape.n_kv_heads, 3, ATTEND_TILE_GROUPS_MAX),
                      wait, NULL);
}

int attend_commit(Attend *attend, const AttendPass *pass, const AttendLayer *layer)
{
    Arguments a = {.kernel = attend->commit};

    if (!pass_fits(attend, pass))
        return error_origin(-EINVAL);
    if (attend->options.visibility.mask != ATTEND_MASK_CROSS && (pass->n_groups == 1 || pass->n_sequences == pass->n_groups))
        return 0; /* attend_finish() has done it */
    pass_int(&a, pass->n_rows);
    pass_int(&a, pass->n_groups);
    pass_int(&a, attend->options.visibility.mask);
    pass_part(&a, pass->groups, pass->groups_offset);
    pass_buffer(&a, attend->kept);
    pass_tail(&a, layer);
    if (a.r)
        return error_trace(a.r);
    return gpu_launch(attend->commit, range_for(attend, (uint64_t)pass->n_rows * attend->options.shape.n_kv_heads, 32, 16),
                      GPU_WAIT_NONE, NULL);
}

int attend_refill(Attend *attend, const AttendLayer *layer, const GpuBuffer *packs, uint64_t packs_offset, uint32_t n_packs,
                  const GpuBuffer *pages, uint64_t pages_offset)
{
    Arguments a = {.kernel = attend->refill};

    if (n_packs == 0 || !attend->refill)
        return error_origin(-EINVAL);
    pass_int(&a, n_packs);
    pass_part(&a, packs, packs_offset);
    pass_part(&a, pages, pages_offset);
    pass_tail(&a, layer);
    if (a.r)
        return error_trace(a.r);
    return gpu_launch(attend->refill, range_for(attend, (uint64_t)n_packs * attend->options.shape.n_kv_heads, 1, 16), GPU_WAIT_NONE,
                      NULL);
}
