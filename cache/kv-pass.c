/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One forward pass: reserve, plan, then layer by layer pack, stream and attend.
 *
 * Pages that the pass completes are packed into one of two scratch buffers by the layer's parity, and travel home on the download
 * queue while later groups of rows already read them there.  The packing kernel of layer l + 2 must not overwrite what layer l's
 * copies still read: a *gate*, a copy of 64 bytes on the compute queue, waits for them (kernels after it wait by queue order).
 */

#include "cache/kv-store-internal.h"

#include <math.h>
#include <string.h>

#define GATE_BYTES 64

static int check_items(const KvStore *store, const KvPassItem *items, uint32_t n_items, ErrorDetail *reterr)
{
    uint64_t n_rows = 0;

    if (store->pass.active)
        return error_detail_set(reterr, -EBUSY, "cache: a pass is in progress");
    if (n_items == 0 || n_items > store->sizes.max_items)
        return error_detail_set(reterr, -EINVAL, "cache: a pass of %u sequences, must be 1 to %u", n_items,
                                store->sizes.max_items);
    for (uint32_t i = 0; i < n_items; i++) {
        const KvCache *cache = items[i].cache;

        if (cache->store != store || items[i].n_tokens == 0)
            return error_detail_set(reterr, -EINVAL, "cache: item %u has no tokens or another store", i);
        for (uint32_t j = 0; j < i; j++)
            if (items[j].cache == cache)
                return error_detail_set(reterr, -EINVAL, "cache: items %u and %u are the same sequence", j, i);
        n_rows += items[i].n_tokens;
    }
    if (n_rows > store->sizes.max_rows)
        return error_detail_set(reterr, -EINVAL, "cache: a pass of %llu rows, at most %u", (unsigned long long)n_rows,
                                store->sizes.max_rows);
    for (uint32_t i = 0; i < n_items; i++)
        if (items[i].n_tokens > store->sizes.policy.max_cache_tokens - items[i].cache->past->length)
            return error_detail_set(reterr, KV_E_CONTEXT, "cache: %u tokens after %u exceed its %u", items[i].n_tokens,
                                    items[i].cache->past->length, store->sizes.policy.max_cache_tokens);
    return 0;
}

/* Blocks, then tails; on failure what was reserved returns. */
static int reserve(KvPass *pass, const KvPassItem *items, uint32_t n_items, ErrorDetail *reterr)
{
    KvStore *store = pass->store;
    int r = 0;

    pass->n_entries = 0;
    for (uint32_t i = 0; i < n_items && !r; i++) {
        pass->entries[i].n_tokens = items[i].n_tokens;
        pass->n_entries = i + 1;
        r = kv_cache_grow(items[i].cache, &pass->entries[i], reterr);
    }
    kv_tails_next_pass(&store->tails);
    for (uint32_t i = 0; i < n_items && !r; i++)
        r = kv_tails_acquire(&store->tails, &items[i].cache->past->tail, reterr);
    for (uint32_t i = 0; i < pass->n_entries && r; i++)
        kv_cache_shrink(&pass->entries[i]);
    return error_trace(r);
}

/* The sequences as section @s sees them, in this pass or in the one to come. */
static void fill_items(KvStore *store, uint32_t s, bool after)
{
    for (uint32_t i = 0; i < store->pass.n_entries; i++) {
        const KvPassEntry *entry = &store->pass.entries[i];
        const KvPast *past = entry->cache->past;

        store->items[i] = (KvScheduleItem){
            .blocks = past->sections[s].blocks,
            .length = past->length + (after ? entry->n_tokens : 0),
            .n_tokens = after ? 1 : entry->n_tokens,
            .tail_slot = (uint32_t)past->tail->slot,
        };
    }
}

/* Angles as the oracle computes them: position times frequency, rounded to float32, then cosine and sine. */
static void write_rope(const KvSection *section, float *rope)
{
    uint32_t n_freq = section->sizes->attend.shape.rotary_dim / 2;

    for (uint32_t g = 0; g < section->schedule.n_groups; g++) {
        const AttendGroup *group = &section->schedule.groups[g];

        for (int32_t row = 0; row < group->n_rows; row++)
            for (uint32_t f = 0; f < n_freq; f++) {
                float angle = (float)(group->pos0 + row) * section->inv_freq[f];

                *rope++ = (float)cos((double)angle);
                *rope++ = (float)sin((double)angle);
            }
    }
}

/* Where the next part of the step input goes. */
static uint64_t part(uint64_t *end, uint64_t bytes)
{
    uint64_t offset = *end;

    *end += (bytes + 63) & ~(uint64_t)63;
    return offset;
}

static int write_inputs(const KvPass *pass, KvSection *section)
{
    const KvSchedule *schedule = &section->schedule;
    uint64_t end = 0, rope_bytes = (uint64_t)schedule->n_rows * section->sizes->attend.shape.rotary_dim * sizeof(float);
    uint64_t groups_bytes = schedule->n_groups * sizeof(AttendGroup), packs_bytes = schedule->n_packs * sizeof(AttendPack);
    uint64_t refs_bytes = schedule->n_refs * sizeof(AttendRef);
    uint64_t spans_bytes = (uint64_t)schedule->n_tiles * schedule->n_groups * sizeof(AttendSpan);
    uint8_t *memory = section->inputs_memory;

    section->pass = (AttendPass){
        .n_rows = schedule->n_rows,
        .n_groups = schedule->n_groups,
        .rope = section->inputs,
        .rope_offset = part(&end, rope_bytes),
        .groups = section->inputs,
        .groups_offset = part(&end, groups_bytes),
        .n_sequences = pass->n_entries,
    };
    section->packs_offset = part(&end, packs_bytes);
    section->refs_offset = part(&end, refs_bytes);
    section->spans_offset = part(&end, spans_bytes);

    write_rope(section, (float *)(memory + section->pass.rope_offset));
    memcpy(memory + section->pass.groups_offset, schedule->groups, groups_bytes);
    memcpy(memory + section->packs_offset, schedule->packs, packs_bytes);
    memcpy(memory + section->refs_offset, schedule->refs, refs_bytes);
    memcpy(memory + section->spans_offset, schedule->spans, spans_bytes);
    return gpu_upload(pass->store->gpu, GPU_QUEUE_COMPUTE, section->inputs, 0, memory, end, GPU_WAIT_NONE, "kv inputs", NULL);
}

/* Layers without attention are done when those before them are. */
static void skip_layers(KvPass *pass)
{
    const KvSizes *sizes = &pass->store->sizes;

    while (pass->n_layers_done < sizes->n_layers && sizes->layers[pass->n_layers_done].section == KV_NO_SECTION)
        pass->n_layers_done++;
}

static int plan_pass(KvPass *pass)
{
    KvStore *store = pass->store;
    int r = 0;

    for (uint32_t s = 0; s < store->sizes.n_sections && !r; s++) {
        fill_items(store, s, false);
        kv_schedule_build(&store->sections[s].schedule, store->items, pass->n_entries);
        r = write_inputs(pass, &store->sections[s]);
    }
    return r ? error_trace(r) : kv_ring_begin(&store->ring, false, kv_store_home(store));
}

int kv_pass_begin(KvStore *store, const KvPassItem *items, uint32_t n_items, KvPass **ret, ErrorDetail *reterr)
{
    KvPass *pass = &store->pass;
    int r;

    r = check_items(store, items, n_items, reterr);
    if (r)
        return error_trace(r);
    kv_store_poll_home(store);
    store->serial++;
    pass->store = store;
    pass->n_layers_done = 0;
    pass->layer_started = false;
    skip_layers(pass);
    r = reserve(pass, items, n_items, reterr);
    if (r)
        return error_trace(r);
    pass->active = true;
    for (uint32_t i = 0; i < n_items; i++)
        items[i].cache->in_pass = true;
    r = plan_pass(pass);
    if (r) {
        (void)kv_pass_abort(pass);
        return error_trace(kv_error(r));
    }
    *ret = pass;
    return 0;
}

/* ---- one layer -------------------------------------------------------------------------------------------------------- */

/* Holds the compute queue until the copies that read this scratch buffer are over. */
static int gate(KvStore *store, uint32_t parity)
{
    GpuEvent *event = store->fresh_events[parity];
    uint64_t at = store->sizes.fresh_bytes - 2 * GATE_BYTES;

    if (!event || gpu_event_status(event) == 1)
        return 0;
    return gpu_copy(store->gpu, GPU_QUEUE_COMPUTE, store->fresh[parity], at + GATE_BYTES, store->fresh[parity], at, GATE_BYTES,
                    (GpuWait){&event, 1}, "kv gate", NULL);
}

/* Packed pages that are neighbours in the scratch buffer and at home. */
static uint32_t homeward_run(const KvHomeward *homewards, uint32_t n)
{
    uint32_t length = 1;

    while (length < n && homewards[length].block->arena == homewards[0].block->arena &&
           homewards[length].block->index * KV_BLOCK_PAGES + homewards[length].page ==
               homewards[0].block->index * KV_BLOCK_PAGES + homewards[0].page + length)
        length++;
    return length;
}

/* Sends the scratch buffer's pages home once @packed has completed. */
static int send_home(KvStore *store, uint32_t layer, GpuEvent *packed)
{
    const KvLayerPlace *place = &store->sizes.layers[layer];
    const KvSection *section = &store->sections[place->section];
    const KvSchedule *schedule = &section->schedule;
    uint32_t parity = layer & 1, page_bytes = section->sizes->layout.page_bytes, run;
    GpuWait wait = {&packed, 1};
    GpuEvent *last = NULL;
    int r = 0;

    store->home_serial = store->serial;
    for (uint32_t i = 0; i < schedule->n_packs && !r; i += run) {
        const KvHomeward *to = &schedule->homewards[i];
        KvArena *arena = to->block->arena;
        uint64_t offset = kv_block_offset(&section->arenas, to->block, place->plane, to->page), from = (uint64_t)i * page_bytes;

        run = homeward_run(to, schedule->n_packs - i);
        last = gpu_event_unref(last);
        if (arena->buffer)
            r = gpu_copy(store->gpu, GPU_QUEUE_DOWNLOAD, arena->buffer, offset, store->fresh[parity], from,
                         (uint64_t)run * page_bytes, wait, "kv home", &last);
        else
            r = gpu_download(store->gpu, GPU_QUEUE_DOWNLOAD, store->fresh[parity], from, arena->memory + offset,
                             (uint64_t)run * page_bytes, wait, "kv home", &last);
    }
    if (r)
        return error_trace(r);
    (void)gpu_event_unref(store->fresh_events[parity]);
    store->fresh_events[parity] = gpu_event_ref(last);
    kv_store_set_home(store, layer, last);
    return gpu_flush(store->gpu, GPU_QUEUE_DOWNLOAD);
}

static int pack_pages(KvStore *store, uint32_t layer, const AttendLayer *buffers)
{
    _cleanup_(gpu_event_unrefp) GpuEvent *packed = NULL;
    const KvLayerPlace *place = &store->sizes.layers[layer];
    const KvSection *section = &store->sections[place->section];
    int r;

    if (section->schedule.n_packs == 0)
        return 0;
    r = gate(store, layer & 1);
    if (r)
        return error_trace(r);
    r = attend_pack(section->attend, &section->pass, buffers, section->inputs, section->packs_offset, section->schedule.n_packs,
                    store->fresh[layer & 1], &packed);
    if (r || place->owner != layer) /* the source has sent the same pages home */
        return error_trace(r);
    return error_trace(send_home(store, layer, packed));
}

static int attend_one_tile(KvStore *store, uint32_t layer, uint32_t t, const AttendLayer *buffers)
{
    _cleanup_(gpu_event_unrefp) GpuEvent *done = NULL;
    const KvLayerPlace *place = &store->sizes.layers[layer];
    const KvSection *section = &store->sections[place->section];
    const KvTile *tile = &section->schedule.tiles[t];
    KvHomeEvents home = kv_store_home(store);
    KvRingSlot *slot = NULL;
    GpuEvent *wait = NULL;
    AttendTile args = {
        .pages = store->fresh[layer & 1], /* when nothing of the tile is at home */
        .fresh = store->fresh[layer & 1],
        .refs = section->inputs,
        .refs_offset = section->refs_offset + tile->first_ref * sizeof(AttendRef),
        .spans = section->inputs,
        .spans_offset = section->spans_offset + (uint64_t)t * section->schedule.n_groups * sizeof(AttendSpan),
        .n_refs = tile->n_refs,
    };
    int r;

    if (tile->arena) {
        args.pages = tile->arena->buffer;
        args.pages_offset = place->plane * tile->arena->plane_bytes;
        wait = tile->serial > home.settled ? home.events[place->owner] : NULL;
    } else if (tile->staged) {
        r = kv_ring_acquire(&store->ring, home, &slot);
        if (r)
            return error_trace(r);
        args.pages = slot->buffer;
        wait = slot->filled;
    }
    r = attend_tile(section->attend, &section->pass, buffers, &args, (GpuWait){&wait, 1}, slot ? &done : NULL);
    if (r || !slot)
        return error_trace(r);
    return error_trace(kv_ring_release(&store->ring, home, TAKE_PTR(done)));
}

/* A layer that others share is committed after the last of them: until then they read the tail as it was before the pass. */
static int run_layer(KvStore *store, uint32_t layer, const GpuBuffer *qkv, GpuBuffer *out)
{
    const KvLayerPlace *place = &store->sizes.layers[layer];
    KvSection *section = &store->sections[place->section];
    AttendLayer buffers = kv_store_layer(store, layer);
    int r;

    r = attend_prepare(section->attend, &section->pass, &buffers, qkv);
    if (!r)
        r = pack_pages(store, layer, &buffers);
    for (uint32_t t = 0; t < section->schedule.n_tiles && !r; t++)
        r = attend_one_tile(store, layer, t, &buffers);
    if (!r)
        r = attend_finish(section->attend, &section->pass, &buffers, out);
    if (!r && place->last)
        r = attend_commit(section->attend, &section->pass, &buffers);
    return error_trace(r);
}

int kv_pass_layer(KvPass *pass, uint32_t layer, const GpuBuffer *qkv, GpuBuffer *out, ErrorDetail *reterr)
{
    int r;

    if (layer != pass->n_layers_done || layer >= pass->store->sizes.n_layers)
        return error_detail_set(reterr, -EINVAL, "cache: layer %u, but %u is next", layer, pass->n_layers_done);
    pass->layer_started = true;
    r = run_layer(pass->store, layer, qkv, out);
    if (r)
        return error_detail_set(reterr, kv_error(r), "cache: attention of layer %u could not be queued", layer);
    pass->n_layers_done++;
    skip_layers(pass);
    return 0;
}

/* ---- the end ---------------------------------------------------------------------------------------------------------- */

int kv_pass_prefetch(KvPass *pass)
{
    KvStore *store = pass->store;

    if (pass->n_layers_done != store->sizes.n_layers)
        return error_origin(-EINVAL);
    if (store->ring.n_slots == 0)
        return 0;
    for (uint32_t i = 0; i < pass->n_entries; i++)
        if (pass->entries[i].cache->past->length + pass->entries[i].n_tokens >= store->sizes.policy.max_cache_tokens)
            return 0; /* there is no next pass for it */
    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        if (!store->sections[s].sizes->direct) {
            fill_items(store, s, true);
            kv_schedule_tiles(&store->sections[s].next_schedule, store->items, pass->n_entries);
        }
    return error_trace(kv_error(kv_ring_begin(&store->ring, true, kv_store_home(store))));
}

static void pass_end(KvPass *pass)
{
    pass->active = false;
    for (uint32_t i = 0; i < pass->n_entries; i++)
        pass->entries[i].cache->in_pass = false;
}

/* Pages that the pass wrote are now the section's past. */
static void commit_section(const KvStore *store, uint32_t s, KvPast *past, uint32_t n_tokens)
{
    uint32_t ring = kv_ring_tokens(store->sections[s].sizes->attend.form);
    KvSectionPast *section = &past->sections[s];

    for (uint32_t b = past->length / KV_PAGE_TOKENS / KV_BLOCK_PAGES; b < section->n_blocks; b++)
        if (section->blocks[b]->write_serial == store->serial) {
            section->blocks[b]->serial = store->serial;
            section->blocks[b]->write_serial = 0;
        }
    if (past->length + n_tokens > ring)
        section->tail_from = MAX(section->tail_from, past->length + n_tokens - ring);
}

int kv_pass_commit(KvPass *pass)
{
    KvStore *store = pass->store;

    if (pass->n_layers_done != store->sizes.n_layers)
        return error_origin(-EINVAL);
    for (uint32_t i = 0; i < pass->n_entries; i++) {
        KvPassEntry *entry = &pass->entries[i];
        KvPast *past = entry->cache->past;

        for (uint32_t s = 0; s < store->sizes.n_sections; s++)
            commit_section(store, s, past, entry->n_tokens);
        kv_tail_settle(past->tail);
        past->length += entry->n_tokens;
    }
    pass_end(pass);
    return 0;
}

KvPass *kv_pass_abort(KvPass *pass)
{
    KvStore *store;

    if (!pass || !pass->active)
        return NULL;
    store = pass->store;
    if (gpu_drain(store->gpu, KV_TIMEOUT_USEC, NULL) == 0)
        kv_store_forget_home(store);
    kv_ring_end(&store->ring);
    kv_ring_clear(&store->ring);
    for (uint32_t i = 0; i < pass->n_entries; i++)
        kv_cache_shrink(&pass->entries[i]);
    pass_end(pass);
    for (uint32_t i = 0; i < pass->n_entries && pass->layer_started; i++)
        if (kv_cache_recover(pass->entries[i].cache, pass->entries[i].cache->past->length + pass->entries[i].n_tokens, NULL))
            (void)kv_cache_clear(pass->entries[i].cache); /* its recent tokens are lost with the device */
    return NULL;
}
