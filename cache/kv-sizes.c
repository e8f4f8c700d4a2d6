/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes of a store: limits of a pass, the ring's tiles within the device budget, arenas. */

#include "cache/kv-sizes.h"
#include "quant/base/checked.h"

/* Largest tile by default: what leaves the second read of a staged tile to a last-level cache (PERFORMANCE bar 7). */
#define TILE_BYTES ((uint64_t)4 << 20)
/* Growth steps of the page arenas.  Host arenas cost address space only; device arenas are memory from the start, so they begin
 * small and double. */
#define HOST_ARENA_BYTES   ((uint64_t)256 << 20)
#define DEVICE_ARENA_BYTES ((uint64_t)64 << 20)
#define DEVICE_FIRST_BLOCKS 4

static int check_arguments(const GpuInfo *info, const KvModel *model, const KvPolicy *policy, ErrorDetail *reterr)
{
    if (model->n_layers == 0 || model->n_layers > 4096)
        return error_detail_set(reterr, -EINVAL, "cache: %u layers", model->n_layers);
    if (model->max_rows == 0 || model->max_sequences == 0 || model->max_rows > 1u << 20 || model->max_sequences > 4096)
        return error_detail_set(reterr, -EINVAL, "cache: passes of %u rows for %u sequences", model->max_rows,
                                model->max_sequences);
    if (policy->n_slots < 1 || policy->n_slots > KV_MAX_SLOTS)
        return error_detail_set(reterr, -EINVAL, "cache: %u staging buffers, must be 1 to %d", policy->n_slots, KV_MAX_SLOTS);
    if (policy->max_cache_tokens == 0 || policy->max_cache_tokens > 1u << 28)
        return error_detail_set(reterr, -EINVAL, "cache: length of %u tokens", policy->max_cache_tokens);
    if (policy->transfer == KV_TRANSFER_ZERO_COPY && policy->home == KV_HOME_HOST && !info->unified_memory)
        return error_detail_set(reterr, -ENOTSUP, "cache: transfer zero-copy needs a device that reads host memory in place; "
                                "%s does not", info->name);
    return 0;
}

static void pass_limits(const KvModel *model, KvSizes *sizes)
{
    uint64_t items = MIN(model->max_sequences, model->max_rows), rows = model->max_rows;

    sizes->max_blocks = (sizes->policy.max_cache_tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    /* n rows that start anywhere in a page touch at most (n + 62) / 32 pages, and complete at most (n + 31) / 32. */
    sizes->max_groups = (uint32_t)MIN(rows, (62 * items + rows) / KV_PAGE_TOKENS);
    sizes->max_packs = (uint32_t)MAX((uint64_t)2, (31 * items + rows) / KV_PAGE_TOKENS); /* a refill after a crop needs two */
}

/* Totals over a pass; false on overflow. */
static bool pass_totals(const KvModel *model, KvSizes *sizes)
{
    uint64_t items = MIN(model->max_sequences, model->max_rows), loads = items * sizes->max_blocks;
    uint64_t refs = (uint64_t)sizes->max_groups * sizes->max_blocks, tiles = loads, bytes;

    /* A tile in the ring is full but for the last; one that is read in place ends where the arena changes. */
    if (!sizes->direct)
        tiles = (loads + sizes->policy.tile_blocks - 1) / sizes->policy.tile_blocks;
    if (loads > UINT32_MAX || refs > UINT32_MAX || tiles * sizes->max_groups > UINT32_MAX)
        return false;
    sizes->max_loads = (uint32_t)loads;
    sizes->max_refs = (uint32_t)refs;
    sizes->max_tiles = (uint32_t)tiles;
    bytes = 64 + (uint64_t)sizes->max_groups * sizeof(AttendGroup);
    bytes += 64 + (uint64_t)sizes->max_packs * sizeof(AttendPack);
    bytes += 64 + (uint64_t)model->max_rows * model->shape.rotary_dim * sizeof(float);
    bytes += 64 + refs * sizeof(AttendRef);
    bytes += 64 + tiles * sizes->max_groups * sizeof(AttendSpan);
    return checked_align(bytes, 64, &sizes->inputs_bytes);
}

/* Blocks a tile and slots of the ring within @budget_bytes. */
static int ring_size(KvSizes *sizes, uint64_t budget_bytes, ErrorDetail *reterr)
{
    uint64_t block = sizes->block_layer_bytes, blocks = MAX((uint64_t)1, TILE_BYTES / block);
    uint32_t n_slots = sizes->policy.n_slots;

    if (sizes->policy.tile_blocks > 0)
        blocks = sizes->policy.tile_blocks;
    blocks = MIN(blocks, (uint64_t)sizes->max_blocks * sizes->n_sequences);
    if (!sizes->direct) {
        while (n_slots > 1 && budget_bytes / n_slots < block)
            n_slots--;
        if (budget_bytes / n_slots < block)
            return error_detail_set(reterr, KV_E_DEVICE_MEMORY,
                                    "cache: the device budget leaves %llu bytes for the ring; one block of pages needs %llu",
                                    (unsigned long long)budget_bytes, (unsigned long long)block);
        blocks = MIN(blocks, budget_bytes / n_slots / block);
    }
    sizes->policy.tile_blocks = (uint32_t)blocks;
    sizes->policy.n_slots = n_slots;
    sizes->tile_bytes = blocks * block;
    return 0;
}

static int arena_size(const GpuInfo *info, KvSizes *sizes, ErrorDetail *reterr)
{
    uint64_t wanted = (uint64_t)sizes->max_blocks * sizes->n_sequences, limit;
    bool device = sizes->policy.home == KV_HOME_DEVICE, fixed = sizes->policy.growth == KV_GROWTH_STATIC;

    limit = (device ? DEVICE_ARENA_BYTES : HOST_ARENA_BYTES) / sizes->block_bytes;
    if (fixed)
        limit = MAX(limit, (uint64_t)sizes->max_blocks); /* one arena a cache where the device allows it */
    limit = MAX(limit, (uint64_t)1);
    if (sizes->direct)
        limit = MIN(limit, info->max_allocation_bytes / sizes->block_bytes);
    if (limit == 0)
        return error_detail_set(reterr, KV_E_DEVICE_MEMORY,
                                "cache: a block of pages has %llu bytes, the device allocates at most %llu",
                                (unsigned long long)sizes->block_bytes, (unsigned long long)info->max_allocation_bytes);
    sizes->max_arena_blocks = (uint32_t)MIN(limit, wanted);
    sizes->first_arena_blocks = sizes->max_arena_blocks;
    if (fixed)
        sizes->first_arena_blocks = MIN(sizes->max_blocks, sizes->max_arena_blocks);
    else if (device)
        sizes->first_arena_blocks = MIN(MIN(sizes->max_blocks, (uint32_t)DEVICE_FIRST_BLOCKS), sizes->max_arena_blocks);
    return 0;
}

/* What the policy's device budget leaves once tails and the scratch for fresh pages are paid. */
static int budget_rest(const KvSizes *sizes, uint64_t *ret, ErrorDetail *reterr)
{
    uint64_t fixed = sizes->tail_slot_bytes * sizes->n_sequences + 2 * sizes->fresh_bytes;

    *ret = UINT64_MAX;
    if (sizes->policy.device_budget_bytes == 0)
        return 0;
    if (sizes->policy.device_budget_bytes < fixed)
        return error_detail_set(reterr, KV_E_DEVICE_MEMORY,
                                "cache: the recent tokens of %u sequences need %llu bytes on the device, its budget is %llu",
                                sizes->n_sequences, (unsigned long long)fixed,
                                (unsigned long long)sizes->policy.device_budget_bytes);
    *ret = sizes->policy.device_budget_bytes - fixed;
    return 0;
}

static int plan_fill(const GpuInfo *info, KvSizes *sizes, ErrorDetail *reterr)
{
    uint64_t attend_bytes, arena_blocks = 0;
    KvPlan *plan = &sizes->plan;
    int r;

    r = attend_device_bytes(info, &sizes->attend, &attend_bytes);
    if (r)
        return error_detail_set(reterr, r < 0 ? r : -EINVAL, "cache: '%s' has no attention kernels for this model", info->name);
    if (sizes->policy.home == KV_HOME_DEVICE)
        arena_blocks = sizes->policy.growth == KV_GROWTH_STATIC ? sizes->max_blocks : sizes->first_arena_blocks;
    plan->staging_bytes = 2 * sizes->fresh_bytes + (sizes->direct ? 0 : sizes->policy.n_slots * sizes->tile_bytes);
    plan->tail_bytes = sizes->n_sequences * sizes->tail_slot_bytes;
    plan->operand_bytes = attend_bytes + sizes->inputs_bytes + sizes->n_layers * sizes->calibration_layer_bytes;
    plan->device_page_bytes = arena_blocks * sizes->block_bytes;
    plan->host_bytes_per_token = sizes->policy.home == KV_HOME_HOST
                                     ? (uint64_t)sizes->n_layers * sizes->layout.page_bytes / KV_PAGE_TOKENS
                                     : 0;
    plan->tile_blocks = sizes->policy.tile_blocks;
    plan->n_slots = sizes->direct ? 0 : sizes->policy.n_slots;
    if (plan->device_page_bytes > sizes->device_page_limit_bytes)
        return error_detail_set(reterr, KV_E_DEVICE_MEMORY, "cache: pages need %llu bytes on the device, its budget leaves %llu",
                                (unsigned long long)plan->device_page_bytes,
                                (unsigned long long)sizes->device_page_limit_bytes);
    return 0;
}

int kv_sizes_compute(const GpuInfo *info, const KvModel *model, const KvPolicy *policy, KvSizes *ret, ErrorDetail *reterr)
{
    KvSizes sizes = {.policy = *policy, .n_layers = model->n_layers, .n_sequences = model->max_sequences};
    uint64_t values = (uint64_t)model->shape.n_kv_heads * model->shape.head_dim, rest;
    uint32_t tail_bits = policy->form.kind == KV_FORM_F32 ? 32 : 16;
    int r;

    r = check_arguments(info, model, policy, reterr);
    if (r)
        return error_trace(r);
    r = kv_layout(policy->form, &model->shape, &sizes.layout, reterr);
    if (r)
        return error_trace(r);
    if (policy->home == KV_HOME_HOST && policy->transfer == KV_TRANSFER_AUTO)
        sizes.policy.transfer = info->unified_memory ? KV_TRANSFER_ZERO_COPY : KV_TRANSFER_COPY;
    sizes.direct = policy->home == KV_HOME_DEVICE || sizes.policy.transfer == KV_TRANSFER_ZERO_COPY;
    pass_limits(model, &sizes);

    sizes.block_layer_bytes = (uint64_t)KV_BLOCK_PAGES * sizes.layout.page_bytes;
    sizes.block_bytes = sizes.block_layer_bytes * model->n_layers;
    sizes.fresh_bytes = (uint64_t)sizes.max_packs * sizes.layout.page_bytes + 128; /* + the gate of kv-pass.c */
    sizes.tail_layer_bytes = 2 * (KV_TAIL_TOKENS + KV_SINK_TOKENS) * values * (tail_bits / 8);
    sizes.tail_layer_bytes = (sizes.tail_layer_bytes + 63) & ~(uint64_t)63;
    sizes.tail_slot_bytes = sizes.tail_layer_bytes * model->n_layers;
    sizes.calibration_layer_bytes = (2 * values * sizeof(float) + 63) & ~(uint64_t)63;

    r = budget_rest(&sizes, &rest, reterr);
    if (r)
        return error_trace(r);
    r = ring_size(&sizes, rest, reterr);
    if (r)
        return error_trace(r);
    sizes.device_page_limit_bytes = policy->home == KV_HOME_DEVICE ? rest : UINT64_MAX;
    r = arena_size(info, &sizes, reterr);
    if (r)
        return error_trace(r);
    if (!pass_totals(model, &sizes))
        return error_detail_set(reterr, -EINVAL, "cache: %u sequences of %u tokens are too many", model->max_sequences,
                                policy->max_cache_tokens);
    sizes.attend = (AttendOptions){
        .form = policy->form,
        .shape = model->shape,
        .exact = model->exact,
        .tail_bits = tail_bits,
        .scale = model->scale,
        .max_rows = model->max_rows,
        .max_refs = (uint32_t)MIN((uint64_t)sizes.max_refs, (uint64_t)sizes.policy.tile_blocks * sizes.max_groups),
        .inv_freq = model->inv_freq,
        .max_pages = (policy->max_cache_tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS,
    };
    r = plan_fill(info, &sizes, reterr);
    if (r)
        return error_trace(r);
    *ret = sizes;
    return 0;
}

int kv_store_plan(const GpuInfo *info, const KvModel *model, const KvPolicy *policy, KvPlan *ret, ErrorDetail *reterr)
{
    KvSizes sizes;
    int r;

    r = kv_sizes_compute(info, model, policy, &sizes, reterr);
    if (r)
        return error_trace(r);
    *ret = sizes.plan;
    return 0;
}
