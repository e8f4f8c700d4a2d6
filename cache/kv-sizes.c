/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes of a store: sections, limits of a pass, the ring's tiles within the device budget, arenas. */

#include "cache/kv-sizes.h"
#include "quant/base/checked.h"

#include <string.h>

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

/* ---- layers and sections --------------------------------------------------------------------------------------------- */

/* The layer with the model's own values filled in. */
static KvLayer model_layer(const KvModel *model, uint32_t l)
{
    KvLayer layer = model->layers ? model->layers[l] : (KvLayer){.kind = KV_LAYER_FULL};

    if (layer.shape.n_heads == 0)
        layer.shape = model->shape;
    if (layer.scale == 0)
        layer.scale = model->scale;
    if (!layer.inv_freq)
        layer.inv_freq = model->inv_freq;
    return layer;
}

static bool same_frequencies(const AttendOptions *a, const AttendOptions *b)
{
    return a->inv_freq == b->inv_freq ||
           (a->inv_freq && b->inv_freq &&
            memcmp(a->inv_freq, b->inv_freq, a->shape.rotary_dim / 2 * sizeof(float)) == 0);
}

static bool same_section(const KvSectionSizes *a, const KvSectionSizes *b)
{
    const KvShape *x = &a->attend.shape, *y = &b->attend.shape;

    return a->kind == b->kind && a->home == b->home && kv_form_equal(&a->attend.form, &b->attend.form) &&
           x->n_heads == y->n_heads && x->n_kv_heads == y->n_kv_heads && x->k_head_dim == y->k_head_dim &&
           x->v_head_dim == y->v_head_dim && x->rotary_dim == y->rotary_dim && a->attend.scale == b->attend.scale && same_frequencies(&a->attend, &b->attend);
}

/* What says which section a layer belongs to. */
static KvSectionSizes describe(const KvModel *model, const KvPolicy *policy, const KvLayer *layer)
{
    KvForm form = layer->form ? *layer->form : policy->form;

    return (KvSectionSizes){
        .kind = layer->kind,
        .home = policy->home,
        .attend =
            {
                .form = form,
                .shape = layer->shape,
                .exact = model->exact,
                .tail_bits = form.kind == KV_FORM_F32 ? 32 : 16,
                .scale = layer->scale,
                .max_rows = model->max_rows,
                .inv_freq = layer->inv_freq,
                .max_pages = (policy->max_cache_tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS,
            },
    };
}

static int place_shared(KvSizes *sizes, const KvLayer *layer, uint32_t l, ErrorDetail *reterr)
{
    if (layer->source >= l || sizes->layers[layer->source].section == KV_NO_SECTION ||
        sizes->layers[layer->source].owner != layer->source)
        return error_detail_set(reterr, -EINVAL, "cache: layer %u shares with layer %u, which keeps nothing before it", l,
                                layer->source);
    sizes->layers[l] = sizes->layers[layer->source];
    sizes->layers[l].last = true;
    for (uint32_t i = layer->source; i < l; i++)
        if (sizes->layers[i].owner == layer->source)
            sizes->layers[i].last = false;
    return 0;
}

static int place_layer(KvSizes *sizes, const KvModel *model, uint32_t l, ErrorDetail *reterr)
{
    const KvLayer layer = model_layer(model, l);
    const KvSectionSizes described = describe(model, &sizes->policy, &layer);
    uint32_t s = 0;

    switch (layer.kind) {
    case KV_LAYER_NONE:
        sizes->layers[l] = (KvLayerPlace){.section = KV_NO_SECTION, .owner = l, .last = true};
        return 0;
    case KV_LAYER_SHARED:
        return place_shared(sizes, &layer, l, reterr);
    case KV_LAYER_FULL:
        break;
    }
    while (s < sizes->n_sections && !same_section(&sizes->sections[s], &described))
        s++;
    if (s == sizes->n_sections)
        sizes->sections[sizes->n_sections++] = described;
    sizes->layers[l] =
        (KvLayerPlace){.section = s, .plane = sizes->sections[s].n_planes++, .owner = l, .last = true};
    return 0;
}

static int place_layers(KvSizes *sizes, const KvModel *model, ErrorDetail *reterr)
{
    int r;

    sizes->layers = calloc(model->n_layers, sizeof(KvLayerPlace));
    sizes->sections = calloc(model->n_layers, sizeof(KvSectionSizes));
    if (!sizes->layers || !sizes->sections)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t l = 0; l < model->n_layers; l++) {
        r = place_layer(sizes, model, l, reterr);
        if (r)
            return error_trace(r);
    }
    if (sizes->n_sections == 0)
        return error_detail_set(reterr, -EINVAL, "cache: no layer has attention");
    return 0;
}

/* ---- one section ------------------------------------------------------------------------------------------------------ */

/* What does not depend on the ring. */
static int section_basics(const GpuInfo *info, const KvSizes *sizes, KvSectionSizes *section, ErrorDetail *reterr)
{
    const KvShape *shape = &section->attend.shape;
    uint64_t items = sizes->max_items, rows = sizes->max_rows, values = kv_token_values(shape);
    int r;

    r = kv_layout(section->attend.form, shape, &section->layout, reterr);
    if (r)
        return error_trace(r);
    (void)info;
    section->direct = section->home == KV_HOME_DEVICE || sizes->policy.transfer == KV_TRANSFER_ZERO_COPY;
    section->max_blocks = (sizes->policy.max_cache_tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    /* n rows that start anywhere in a page touch at most (n + 62) / 32 pages, and complete at most (n + 31) / 32. */
    section->max_groups = (uint32_t)MIN(rows, (62 * items + rows) / KV_PAGE_TOKENS);
    /* A refill after a crop needs the pages of a ring. */
    section->max_packs = (uint32_t)MAX((uint64_t)kv_ring_tokens(section->attend.form) / KV_PAGE_TOKENS, (31 * items + rows) / KV_PAGE_TOKENS);
    section->block_layer_bytes = (uint64_t)KV_BLOCK_PAGES * section->layout.page_bytes;
    section->block_bytes = section->block_layer_bytes * section->n_planes;
    section->tail_layer_bytes = (uint64_t)(kv_ring_tokens(section->attend.form) + section->attend.form.sink_tokens) * values *
                                (section->attend.tail_bits / 8);
    section->tail_layer_bytes = (section->tail_layer_bytes + 63) & ~(uint64_t)63;
    section->calibration_layer_bytes = (kv_constants_floats(shape) * sizeof(float) + 63) & ~(uint64_t)63;
    return 0;
}

/* Totals over a pass, once the tiles are known; false on overflow. */
static bool section_totals(const KvSizes *sizes, KvSectionSizes *section)
{
    uint64_t loads = (uint64_t)sizes->max_items * section->max_blocks;
    uint64_t refs = (uint64_t)section->max_groups * section->max_blocks, tiles = loads, bytes;

    /* A tile in the ring is full but for the last; one that is read in place ends where the arena changes. */
    if (!section->direct)
        tiles = (loads + section->tile_blocks - 1) / section->tile_blocks;
    if (loads > UINT32_MAX || refs > UINT32_MAX || tiles * section->max_groups > UINT32_MAX)
        return false;
    section->max_loads = (uint32_t)loads;
    section->max_refs = (uint32_t)refs;
    section->max_tiles = (uint32_t)tiles;
    section->attend.max_refs = (uint32_t)MIN(refs, (uint64_t)section->tile_blocks * section->max_groups);
    bytes = 64 + (uint64_t)section->max_groups * sizeof(AttendGroup);
    bytes += 64 + (uint64_t)section->max_packs * sizeof(AttendPack);
    bytes += 64 + (uint64_t)sizes->max_rows * section->attend.shape.rotary_dim * sizeof(float);
    bytes += 64 + refs * sizeof(AttendRef);
    bytes += 64 + tiles * section->max_groups * sizeof(AttendSpan);
    return checked_align(bytes, 64, &section->inputs_bytes);
}

static int section_arenas(const GpuInfo *info, const KvSizes *sizes, KvSectionSizes *section, ErrorDetail *reterr)
{
    uint64_t wanted = (uint64_t)section->max_blocks * sizes->n_sequences, limit;
    bool device = section->home == KV_HOME_DEVICE, fixed = sizes->policy.growth == KV_GROWTH_STATIC;

    limit = (device ? DEVICE_ARENA_BYTES : HOST_ARENA_BYTES) / section->block_bytes;
    if (fixed)
        limit = MAX(limit, (uint64_t)section->max_blocks); /* one arena a cache where the device allows it */
    limit = MAX(limit, (uint64_t)1);
    if (section->direct)
        limit = MIN(limit, info->max_allocation_bytes / section->block_bytes);
    if (limit == 0)
        return error_detail_set(reterr, KV_E_DEVICE_MEMORY,
                                "cache: a block of pages has %llu bytes, the device allocates at most %llu",
                                (unsigned long long)section->block_bytes, (unsigned long long)info->max_allocation_bytes);
    section->max_arena_blocks = (uint32_t)MIN(limit, wanted);
    section->first_arena_blocks = section->max_arena_blocks;
    if (fixed)
        section->first_arena_blocks = MIN(section->max_blocks, section->max_arena_blocks);
    else if (device)
        section->first_arena_blocks = MIN(MIN(section->max_blocks, (uint32_t)DEVICE_FIRST_BLOCKS), section->max_arena_blocks);
    if (device)
        section->device_blocks = fixed ? section->max_blocks : section->first_arena_blocks;
    return 0;
}

/* ---- the ring and the budget ------------------------------------------------------------------------------------------- */

/* Slots of the ring and blocks a tile within @budget_bytes; a slot holds a tile of any section. */
static int ring_size(KvSizes *sizes, uint64_t budget_bytes, ErrorDetail *reterr)
{
    uint64_t largest = 0;
    uint32_t n_slots = sizes->policy.n_slots;

    for (uint32_t s = 0; s < sizes->n_sections; s++)
        if (!sizes->sections[s].direct)
            largest = MAX(largest, sizes->sections[s].block_layer_bytes);
    while (n_slots > 1 && budget_bytes / n_slots < largest)
        n_slots--;
    if (budget_bytes / n_slots < largest)
        return error_detail_set(reterr, KV_E_DEVICE_MEMORY,
                                "cache: the device budget leaves %llu bytes for the ring; one block of pages needs %llu",
                                (unsigned long long)budget_bytes, (unsigned long long)largest);
    for (uint32_t s = 0; s < sizes->n_sections; s++) {
        KvSectionSizes *section = &sizes->sections[s];
        uint64_t block = section->block_layer_bytes, blocks = MAX((uint64_t)1, TILE_BYTES / block);

        if (sizes->policy.tile_blocks > 0)
            blocks = sizes->policy.tile_blocks;
        blocks = MIN(blocks, (uint64_t)section->max_blocks * sizes->n_sequences);
        if (!section->direct) {
            blocks = MIN(blocks, budget_bytes / n_slots / block);
            sizes->tile_bytes = MAX(sizes->tile_bytes, blocks * block);
        }
        section->tile_blocks = (uint32_t)blocks;
    }
    sizes->policy.n_slots = n_slots;
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

static int plan_section(const GpuInfo *info, const KvSectionSizes *section, KvPlan *plan, ErrorDetail *reterr)
{
    uint64_t attend_bytes;
    int r;

    r = attend_device_bytes(info, &section->attend, &attend_bytes);
    if (r)
        return error_detail_set(reterr, r < 0 ? r : -EINVAL, "cache: '%s' has no attention kernels for this model", info->name);
    plan->operand_bytes += attend_bytes + section->inputs_bytes + section->n_planes * section->calibration_layer_bytes;
    if (section->home == KV_HOME_HOST)
        plan->host_bytes_per_token += (uint64_t)section->n_planes * section->layout.page_bytes / KV_PAGE_TOKENS;
    plan->device_page_bytes += section->device_blocks * section->block_bytes;
    return 0;
}

static int plan_fill(const GpuInfo *info, KvSizes *sizes, ErrorDetail *reterr)
{
    KvPlan *plan = &sizes->plan;
    int r;

    for (uint32_t s = 0; s < sizes->n_sections; s++) {
        r = plan_section(info, &sizes->sections[s], plan, reterr);
        if (r)
            return error_trace(r);
    }
    plan->n_slots = sizes->tile_bytes > 0 ? sizes->policy.n_slots : 0;
    plan->staging_bytes = 2 * sizes->fresh_bytes + plan->n_slots * sizes->tile_bytes;
    plan->tail_bytes = sizes->n_sequences * sizes->tail_slot_bytes;
    for (uint32_t s = 0; s < sizes->n_sections; s++) /* of what is staged, else of what is read in place */
        if (plan->tile_blocks == 0 || (plan->n_slots > 0 && !sizes->sections[s].direct))
            plan->tile_blocks = sizes->sections[s].tile_blocks;
    sizes->policy.tile_blocks = plan->tile_blocks;
    if (plan->device_page_bytes > sizes->device_page_limit_bytes)
        return error_detail_set(reterr, KV_E_DEVICE_MEMORY, "cache: pages need %llu bytes on the device, its budget leaves %llu",
                                (unsigned long long)plan->device_page_bytes,
                                (unsigned long long)sizes->device_page_limit_bytes);
    return 0;
}

/* ---- all of it ------------------------------------------------------------------------------------------------------------ */

static int all_basics(const GpuInfo *info, KvSizes *sizes, ErrorDetail *reterr)
{
    int r;

    for (uint32_t s = 0; s < sizes->n_sections; s++) {
        KvSectionSizes *section = &sizes->sections[s];

        r = section_basics(info, sizes, section, reterr);
        if (r)
            return error_trace(r);
        section->tail_offset = sizes->tail_slot_bytes;
        sizes->tail_slot_bytes += section->tail_layer_bytes * section->n_planes;
        /* Beside the pages, the gate of kv-pass.c. */
        sizes->fresh_bytes = MAX(sizes->fresh_bytes, (uint64_t)section->max_packs * section->layout.page_bytes + 128);
    }
    return 0;
}

static int compute(const GpuInfo *info, const KvModel *model, KvSizes *sizes, ErrorDetail *reterr)
{
    uint64_t rest;
    int r;

    r = check_arguments(info, model, &sizes->policy, reterr);
    if (!r)
        r = place_layers(sizes, model, reterr);
    if (r)
        return error_trace(r);
    if (sizes->policy.home == KV_HOME_HOST && sizes->policy.transfer == KV_TRANSFER_AUTO)
        sizes->policy.transfer = info->unified_memory ? KV_TRANSFER_ZERO_COPY : KV_TRANSFER_COPY;
    r = all_basics(info, sizes, reterr);
    if (!r)
        r = budget_rest(sizes, &rest, reterr);
    if (!r)
        r = ring_size(sizes, rest, reterr);
    if (r)
        return error_trace(r);
    sizes->device_page_limit_bytes = rest;
    for (uint32_t s = 0; s < sizes->n_sections; s++) {
        if (!section_totals(sizes, &sizes->sections[s]))
            return error_detail_set(reterr, -EINVAL, "cache: %u sequences of %u tokens are too many", model->max_sequences,
                                    sizes->policy.max_cache_tokens);
        r = section_arenas(info, sizes, &sizes->sections[s], reterr);
        if (r)
            return error_trace(r);
    }
    return error_trace(plan_fill(info, sizes, reterr));
}

void kv_sizes_deinit(KvSizes *sizes)
{
    free(sizes->layers);
    free(sizes->sections);
    *sizes = KV_SIZES_NULL;
}

int kv_sizes_compute(const GpuInfo *info, const KvModel *model, const KvPolicy *policy, KvSizes *ret, ErrorDetail *reterr)
{
    KvSizes sizes = {
        .policy = *policy,
        .n_layers = model->n_layers,
        .n_sequences = model->max_sequences,
        .max_items = MIN(model->max_sequences, model->max_rows),
        .max_rows = model->max_rows,
    };
    int r;

    r = compute(info, model, &sizes, reterr);
    if (r) {
        kv_sizes_deinit(&sizes);
        return error_trace(r);
    }
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
    kv_sizes_deinit(&sizes);
    return 0;
}
