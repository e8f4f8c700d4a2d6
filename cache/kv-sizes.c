/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes of a store: sections, limits of a pass, the ring's tiles within the device budget, arenas. */

#include "cache/kv-sizes.h"
#include "cache/kv-host.h"
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
    if (model->max_state_steps > 1u << 20)
        return error_detail_set(reterr, -EINVAL, "cache: %u steps of states", model->max_state_steps);
    if (policy->n_slots < 1 || policy->n_slots > KV_MAX_SLOTS)
        return error_detail_set(reterr, -EINVAL, "cache: %u staging buffers, must be 1 to %d", policy->n_slots, KV_MAX_SLOTS);
    if (policy->max_cache_tokens == 0 || policy->max_cache_tokens > 1u << 28)
        return error_detail_set(reterr, -EINVAL, "cache: length of %u tokens", policy->max_cache_tokens);
    if (policy->transfer == KV_TRANSFER_ZERO_COPY && policy->home == KV_HOME_HOST && !info->unified_memory)
        return error_detail_set(reterr, -ENOTSUP, "cache: transfer zero-copy needs a device that reads host memory in place; "
                                "%s does not", info->name);
    return 0;
}

/* ---- one section ------------------------------------------------------------------------------------------------------ */

/* The most pages that one cache has: what is in sight before and after the largest pass, and what its tail can be read back from. */
static uint32_t held_pages(const KvSizes *sizes, const KvSectionSizes *section)
{
    uint64_t tokens = (uint64_t)section->attend.visibility.window + kv_ring_tokens(section->attend.form) + sizes->max_rows;
    uint32_t all = MAX(section->max_tokens / KV_PAGE_TOKENS, 1u); /* an incomplete page is in the tail alone */

    return section->attend.visibility.window == 0 ? all : (uint32_t)MIN((uint64_t)all, tokens / KV_PAGE_TOKENS + 2);
}

/* What does not depend on the ring. */
static int section_basics(const KvSizes *sizes, KvSectionSizes *section, ErrorDetail *reterr)
{
    const KvShape *shape = &section->attend.shape;
    uint64_t items = sizes->max_items, rows = sizes->max_rows, values = kv_token_values(shape);
    int r;

    r = kv_layout(section->attend.form, shape, &section->layout, reterr);
    if (r)
        return error_trace(r);
    section->max_items = sizes->max_items;
    section->attend.max_pages = (section->max_tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    section->direct = section->home == KV_HOME_DEVICE || sizes->policy.transfer == KV_TRANSFER_ZERO_COPY;
    section->max_blocks = (section->max_tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    section->held_pages = held_pages(sizes, section);
    /* n rows that start anywhere in a page touch at most (n + 62) / 32 pages, and complete at most (n + 31) / 32. */
    section->max_groups = (uint32_t)MIN(rows, (62 * items + rows) / KV_PAGE_TOKENS);
    /* A refill after a crop needs the pages of a ring. */
    section->max_packs = (uint32_t)MAX((uint64_t)kv_ring_tokens(section->attend.form) / KV_PAGE_TOKENS, (31 * items + rows) / KV_PAGE_TOKENS);
    section->block_layer_bytes = (uint64_t)KV_BLOCK_PAGES * section->layout.page_bytes;
    section->page_bytes = (uint64_t)section->layout.page_bytes * section->n_planes;
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
    if (!section->direct && section->resident_pages == 0)
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

static uint64_t whole_frames(uint64_t n_pages)
{
    return (n_pages + KV_BLOCK_PAGES - 1) / KV_BLOCK_PAGES * KV_BLOCK_PAGES;
}

static int section_arenas(const GpuInfo *info, const KvSizes *sizes, KvSectionSizes *section, ErrorDetail *reterr)
{
    uint64_t wanted = (uint64_t)section->held_pages * sizes->n_sequences, limit, first;
    bool device = section->home == KV_HOME_DEVICE, fixed = sizes->policy.growth == KV_GROWTH_STATIC;

    limit = (device ? DEVICE_ARENA_BYTES : HOST_ARENA_BYTES) / section->page_bytes / KV_BLOCK_PAGES * KV_BLOCK_PAGES;
    if (fixed)
        limit = MAX(limit, (uint64_t)section->held_pages); /* one arena a cache where the device allows it */
    limit = MAX(limit, (uint64_t)KV_BLOCK_PAGES);
    if (section->direct)
        limit = MIN(limit, info->max_allocation_bytes / section->page_bytes);
    if (limit < MIN(section->held_pages, (uint32_t)KV_BLOCK_PAGES))
        return error_detail_set(reterr, KV_E_DEVICE_MEMORY,
                                "cache: a block of pages has %llu bytes, the device allocates at most %llu",
                                (unsigned long long)(KV_BLOCK_PAGES * section->page_bytes),
                                (unsigned long long)info->max_allocation_bytes);
    section->max_arena_pages = (uint32_t)MIN(limit, fixed ? wanted : whole_frames(wanted));
    first = section->max_arena_pages;
    if (fixed)
        first = section->held_pages;
    else if (device)
        first = MIN(whole_frames(section->held_pages), (uint64_t)DEVICE_FIRST_BLOCKS * KV_BLOCK_PAGES);
    section->first_arena_pages = (uint32_t)MIN(first, (uint64_t)section->max_arena_pages);
    if (device)
        section->device_pages = fixed ? section->held_pages : section->first_arena_pages;
    return 0;
}

/* ---- the ring and the budget ------------------------------------------------------------------------------------------- */

/* Blocks that so many pages, which may begin within one, are in. */
static uint32_t most_blocks(const KvSectionSizes *section)
{
    return MIN(section->held_pages / KV_BLOCK_PAGES + 2, section->max_blocks);
}

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
        blocks = MIN(blocks, (uint64_t)most_blocks(section) * sizes->n_sequences);
        if (!section->direct) {
            blocks = MIN(blocks, budget_bytes / n_slots / block);
            sizes->tile_bytes = MAX(sizes->tile_bytes, blocks * block);
        }
        section->tile_blocks = (uint32_t)blocks;
    }
    sizes->policy.n_slots = n_slots;
    return 0;
}

/* Of a section at home on the device when all sequences are there; its first arena has whole blocks, which few short windows do not fill. */
static uint64_t most_device_bytes(const KvSizes *sizes, const KvSectionSizes *section)
{
    return MAX((uint64_t)section->held_pages * sizes->n_sequences, (uint64_t)section->device_pages) * section->page_bytes;
}

/* What of @rest the ring may have: windows that stay on the device come first, as long as two blocks are left to stream through. */
static uint64_t ring_budget(const KvSizes *sizes, uint64_t rest)
{
    uint64_t pages = 0, least = 0;

    for (uint32_t s = 0; s < sizes->n_sections; s++) {
        const KvSectionSizes *section = &sizes->sections[s];

        if (section->home == KV_HOME_DEVICE)
            pages += most_device_bytes(sizes, section);
        else
            least = MAX(least, 2 * section->block_layer_bytes);
    }
    least = MIN(rest, least);
    return rest - MIN(pages, rest - least);
}

/* How many of @n_pages of a section must be resident for the link to bring the others while the kernels of the layers before work: of
 * T tokens of k bytes behind W bytes of weights, 1 - (link / device) (1 + W / (k T)). */
static uint64_t useful_pages(const KvSizes *sizes, const KvSectionSizes *section, uint64_t n_pages)
{
    const KvRates *rates = &sizes->policy.rates;
    double link, past = (double)n_pages * section->layout.page_bytes, share;

    if (rates->device_bytes_per_second == 0 || rates->link_bytes_per_second == 0)
        return n_pages;
    link = (double)rates->link_bytes_per_second / (double)rates->device_bytes_per_second;
    share = 1 - link * (1 + (double)rates->weight_bytes_per_layer / past);
    return share > 0 ? (uint64_t)(share * (double)n_pages) + 1 : 0;
}

/* Shares what the budget leaves among the sections that are streamed, by their sizes. */
static void resident_share(const GpuInfo *info, KvSizes *sizes)
{
    double all = 0, left = (double)sizes->device_page_limit_bytes;

    for (uint32_t s = 0; s < sizes->n_sections; s++) {
        const KvSectionSizes *section = &sizes->sections[s];

        if (section->home == KV_HOME_DEVICE)
            left -= (double)most_device_bytes(sizes, section);
        else if (!section->direct)
            all += (double)section->held_pages * sizes->n_sequences * (double)section->page_bytes;
    }
    for (uint32_t s = 0; s < sizes->n_sections && sizes->policy.device_budget_bytes > 0 && left > 0; s++) {
        KvSectionSizes *section = &sizes->sections[s];
        uint64_t total = (uint64_t)section->held_pages * sizes->n_sequences, n, most;

        if (section->direct)
            continue;
        n = (uint64_t)(MIN(left / all, 1.0) * (double)total);
        n = MIN(n, useful_pages(sizes, section, total)) / KV_BLOCK_PAGES * KV_BLOCK_PAGES;
        most = info->max_allocation_bytes / section->page_bytes / KV_BLOCK_PAGES * KV_BLOCK_PAGES;
        section->resident_pages = most > 0 ? (uint32_t)n : 0;
        section->max_resident_pages = (uint32_t)MIN(n, most);
    }
}

/* What the policy's device budget leaves once tails and the scratch for fresh pages are paid. */
static int budget_rest(const KvSizes *sizes, uint64_t *ret, ErrorDetail *reterr)
{
    uint64_t fixed = sizes->slots_bytes + 2 * sizes->fresh_bytes;

    *ret = UINT64_MAX;
    if (sizes->policy.device_budget_bytes == 0)
        return 0;
    if (sizes->policy.device_budget_bytes < fixed)
        return error_detail_set(reterr, KV_E_DEVICE_MEMORY,
                                "cache: the recent tokens of %u sequences need %llu bytes on the device, device-budget is %llu",
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
    if (section->home == KV_HOME_HOST && (section->attend.visibility.window > 0 || section->kind == KV_LAYER_CROSS))
        plan->host_window_bytes += section->held_pages * section->page_bytes;
    else if (section->home == KV_HOME_HOST)
        plan->host_bytes_per_token += (uint64_t)section->n_planes * section->layout.page_bytes / KV_PAGE_TOKENS;
    plan->device_page_bytes += (section->device_pages + section->resident_pages) * section->page_bytes;
    return 0;
}

static int plan_fill(const GpuInfo *info, const KvModel *model, KvSizes *sizes, ErrorDetail *reterr)
{
    KvPlan *plan = &sizes->plan;
    int r;

    for (uint32_t s = 0; s < sizes->n_sections; s++) {
        r = plan_section(info, &sizes->sections[s], plan, reterr);
        if (r)
            return error_trace(r);
    }
    if (sizes->policy.is_compatible)
        kv_host_plan(model, &sizes->policy, &plan->host_bytes_per_token, &plan->host_window_bytes);
    plan->operand_bytes += sizes->logits_bytes;
    plan->n_slots = sizes->tile_bytes > 0 ? sizes->policy.n_slots : 0;
    plan->staging_bytes = 2 * sizes->fresh_bytes + plan->n_slots * sizes->tile_bytes;
    plan->tail_bytes = sizes->slots_bytes;
    for (uint32_t s = 0; s < sizes->n_sections; s++) /* of what is staged, else of what is read in place */
        if (plan->tile_blocks == 0 || (plan->n_slots > 0 && !sizes->sections[s].direct))
            plan->tile_blocks = sizes->sections[s].tile_blocks;
    sizes->policy.tile_blocks = plan->tile_blocks;
    if (plan->device_page_bytes > sizes->device_page_limit_bytes)
        return error_detail_set(reterr, KV_E_DEVICE_MEMORY, "cache: pages need %llu bytes on the device, device-budget leaves %llu",
                                (unsigned long long)plan->device_page_bytes,
                                (unsigned long long)sizes->device_page_limit_bytes);
    return 0;
}

/* ---- all of it ------------------------------------------------------------------------------------------------------------ */

static int all_basics(KvSizes *sizes, ErrorDetail *reterr)
{
    int r;

    for (uint32_t s = 0; s < sizes->n_sections; s++) {
        KvSectionSizes *section = &sizes->sections[s];

        r = section_basics(sizes, section, reterr);
        if (r)
            return error_trace(r);
        section->tail_offset = sizes->tail_slot_bytes;
        sizes->tail_slot_bytes += section->tail_layer_bytes * section->n_planes;
        /* Beside the pages, the gate of kv-pass-layer.c. */
        sizes->fresh_bytes = MAX(sizes->fresh_bytes, (uint64_t)section->max_packs * section->layout.page_bytes + 128);
    }
    if (sizes->n_sections == 0) /* states only; buffers are never empty */
        sizes->tail_slot_bytes = sizes->fresh_bytes = 128;
    sizes->slots_bytes = sizes->n_sequences * sizes->tail_slot_bytes + kv_state_slots(sizes) * sizes->state_slot_bytes;
    return 0;
}

static int compute(const GpuInfo *info, const KvModel *model, KvSizes *sizes, ErrorDetail *reterr)
{
    uint64_t rest;
    int r;

    r = check_arguments(info, model, &sizes->policy, reterr);
    if (!r)
        r = kv_sizes_place_layers(sizes, model, reterr);
    if (r)
        return error_trace(r);
    if (sizes->policy.home == KV_HOME_HOST && sizes->policy.transfer == KV_TRANSFER_AUTO)
        sizes->policy.transfer = info->unified_memory ? KV_TRANSFER_ZERO_COPY : KV_TRANSFER_COPY;
    r = all_basics(sizes, reterr);
    for (uint32_t s = 0; s < sizes->n_sections && !r; s++)
        r = section_arenas(info, sizes, &sizes->sections[s], reterr);
    if (!r)
        r = budget_rest(sizes, &rest, reterr);
    if (!r)
        r = ring_size(sizes, rest == UINT64_MAX ? rest : ring_budget(sizes, rest), reterr);
    if (r)
        return error_trace(r);
    sizes->device_page_limit_bytes = rest == UINT64_MAX ? rest : rest - sizes->policy.n_slots * sizes->tile_bytes;
    resident_share(info, sizes);
    for (uint32_t s = 0; s < sizes->n_sections; s++)
        if (!section_totals(sizes, &sizes->sections[s]))
            return error_detail_set(reterr, -EINVAL, "cache: %u sequences of %u tokens are too many", model->max_sequences,
                                    sizes->policy.max_cache_tokens);
    return error_trace(plan_fill(info, model, sizes, reterr));
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
        .n_state_steps = model->max_state_steps,
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
