/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pass layer by layer: pack, stream, attend.
 *
 * Pages that the pass completes are packed into one of two scratch buffers by the layer's parity, and travel home on the download
 * queue while later groups of rows already read them there.  The packing kernel of layer l + 2 must not overwrite what layer l's
 * copies still read: a *gate*, a copy of 64 bytes on the compute queue, waits for them (kernels after it wait by queue order).
 */

#include "cache/kv-store-internal.h"

#define GATE_BYTES 64

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
           homewards[length].block->pages[homewards[length].page] == homewards[0].block->pages[homewards[0].page] + length)
        length++;
    return length;
}

/* What the way home waits for: the packing, and copies that were queued ahead of a past that has changed since. */
static size_t home_waits(const KvStore *store, const KvLayerPlace *place, GpuEvent *packed, GpuEvent *ret_events[KV_MAX_SLOTS + 2])
{
    const KvSchedule *schedule = &store->sections[place->section].schedule;
    uint32_t slots = 0;
    size_t n = 0;

    ret_events[n++] = packed;
    ret_events[n++] = store->ring.dropped;
    for (uint32_t i = 0; i < schedule->n_packs; i++)
        kv_ring_readers(&store->ring, schedule->homewards[i].block, schedule->homewards[i].page, place->plane, &slots);
    for (uint32_t i = 0; i < KV_MAX_SLOTS; i++)
        if (slots & UINT32_C(1) << i)
            ret_events[n++] = store->ring.slots[i].filled;
    return n;
}

/* Sends the scratch buffer's pages home once @packed has completed. */
static int send_home(KvStore *store, uint32_t layer, GpuEvent *packed)
{
    const KvLayerPlace *place = &store->sizes.layers[layer];
    const KvSection *section = &store->sections[place->section];
    const KvSchedule *schedule = &section->schedule;
    uint32_t parity = layer & 1, page_bytes = section->sizes->layout.page_bytes, run;
    GpuEvent *events[KV_MAX_SLOTS + 2], *last = NULL;
    GpuWait wait = {events, home_waits(store, place, packed, events)};
    int r = 0;

    for (uint32_t i = 0; i < schedule->n_packs && !r; i += run) {
        const KvHomeward *to = &schedule->homewards[i];
        KvArena *arena = to->block->arena;
        uint64_t offset = kv_block_offset(to->block, place->plane, to->page), from = (uint64_t)i * page_bytes;

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

/* Where a tile of a layer is, but for what comes by a ring; what it waits for. */
static AttendTile find_tile(const KvStore *store, uint32_t layer, uint32_t t, GpuEvent **ret_wait)
{
    const KvLayerPlace *place = &store->sizes.layers[layer];
    const KvSection *section = &store->sections[place->section];
    const KvTile *tile = &section->schedule.tiles[t];
    KvHomeEvents home = kv_store_home(store);
    AttendTile args = {
        .pages = store->fresh[layer & 1], /* when nothing of the tile is at home */
        .fresh = store->fresh[layer & 1],
        .refs = section->inputs,
        .refs_offset = section->refs_offset + tile->first_ref * sizeof(AttendRef),
        .spans = section->inputs,
        .spans_offset = section->spans_offset + (uint64_t)t * section->schedule.n_groups * sizeof(AttendSpan),
        .n_refs = tile->n_refs,
    };

    *ret_wait = NULL;
    if (tile->arena) {
        args.pages = tile->arena->buffer;
        args.pages_offset = place->plane * tile->arena->plane_bytes;
        *ret_wait = tile->serial > home.settled ? home.events[place->owner] : NULL;
    }
    return args;
}

static int attend_one_tile(KvStore *store, uint32_t layer, uint32_t t, const AttendLayer *buffers)
{
    _cleanup_(gpu_event_unrefp) GpuEvent *done = NULL;
    const KvSection *section = &store->sections[store->sizes.layers[layer].section];
    const KvTile *tile = &section->schedule.tiles[t];
    KvHomeEvents home = kv_store_home(store);
    KvRingSlot *slot = NULL;
    GpuEvent *wait;
    AttendTile args = find_tile(store, layer, t, &wait);
    int r;

    if (!tile->arena && tile->staged) {
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

/* A layer in one launch, which commits.  Not what comes by a ring: its slot would be free later, and what does not read it would wait for
 * it. */
static bool is_whole(const KvStore *store, uint32_t layer)
{
    const KvLayerPlace *place = &store->sizes.layers[layer];
    const KvSection *section = &store->sections[place->section];
    const KvSchedule *schedule = &section->schedule;
    const KvTile *tile = schedule->n_tiles > 0 ? &schedule->tiles[0] : NULL;

    if (!place->last || schedule->n_packs > 0 || schedule->n_tiles > 1 || (tile && tile->staged && !tile->arena))
        return false;
    return attend_is_whole(section->attend, &section->pass, tile ? tile->n_refs : 0);
}

static int run_whole_layer(KvStore *store, uint32_t layer, const AttendLayer *buffers, const GpuBuffer *qkv, GpuBuffer *out)
{
    const KvSection *section = &store->sections[store->sizes.layers[layer].section];
    GpuEvent *wait = NULL;
    AttendTile tile;

    if (section->schedule.n_tiles > 0)
        tile = find_tile(store, layer, 0, &wait);
    return error_trace(attend_whole(section->attend, &section->pass, buffers, qkv, section->schedule.n_tiles > 0 ? &tile : NULL,
                                    (GpuWait){&wait, 1}, out));
}

/* A layer that others share is committed after the last of them: until then they read the tail as it was before the pass. */
static int run_layer(KvStore *store, uint32_t layer, const GpuBuffer *qkv, GpuBuffer *out)
{
    const KvLayerPlace *place = &store->sizes.layers[layer];
    KvSection *section = &store->sections[place->section];
    AttendLayer buffers = kv_store_layer(store, layer);
    int r;

    if (is_whole(store, layer))
        return error_trace(run_whole_layer(store, layer, &buffers, qkv, out));
    r = attend_prepare(section->attend, &section->pass, &buffers, qkv);
    if (!r)
        r = pack_pages(store, layer, &buffers);
    for (uint32_t t = 0; t < section->schedule.n_tiles && !r; t++)
        r = attend_one_tile(store, layer, t, &buffers);
    if (!r)
        r = attend_finish(section->attend, &section->pass, &buffers, out);
    if (!r && place->last && !kv_section_is_cross(section))
        r = attend_commit(section->attend, &section->pass, &buffers);
    return error_trace(r);
}

static int run_cross_layer(KvStore *store, uint32_t layer, const GpuBuffer *kv)
{
    KvSection *section = &store->sections[store->sizes.layers[layer].section];
    AttendLayer buffers = kv_store_layer(store, layer);
    int r;

    r = attend_keep(section->attend, &section->pass, &buffers, kv);
    if (!r)
        r = pack_pages(store, layer, &buffers);
    if (!r)
        r = attend_commit(section->attend, &section->pass, &buffers);
    return error_trace(r);
}

static int check_turn(const KvPass *pass, uint32_t layer, bool cross, ErrorDetail *reterr)
{
    if (layer != pass->n_layers_done || layer >= pass->store->sizes.n_layers)
        return error_detail_set(reterr, -EINVAL, "cache: layer %u, but %u is next", layer, pass->n_layers_done);
    if (pass->cross != cross)
        return error_detail_set(reterr, -EINVAL, "cache: layer %u in a pass that %s encoder output", layer,
                                pass->cross ? "writes" : "does not write");
    return 0;
}

static int layer_done(KvPass *pass, uint32_t layer, int r, ErrorDetail *reterr)
{
    if (r)
        return error_detail_set(reterr, kv_error(r), "cache: attention of layer %u could not be queued", layer);
    pass->n_layers_done++;
    kv_pass_skip_layers(pass);
    return 0;
}

static int run_host_layer(KvPass *pass, uint32_t layer, const GpuBuffer *qkv, GpuBuffer *out, ErrorDetail *reterr)
{
    _cleanup_(freep) KvHostPast **pasts = calloc(pass->n_entries, sizeof(KvHostPast *));

    if (!pasts)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t i = 0; i < pass->n_entries; i++)
        pasts[i] = pass->entries[i].cache->past->host;
    return kv_host_layer(pass->store->host, layer, pasts, pass->n_entries, qkv, out, reterr);
}

int kv_pass_layer(KvPass *pass, uint32_t layer, const GpuBuffer *qkv, GpuBuffer *out, ErrorDetail *reterr)
{
    int r;

    r = check_turn(pass, layer, false, reterr);
    if (r)
        return error_trace(r);
    pass->layer_started = true;
    if (pass->store->host) {
        r = run_host_layer(pass, layer, qkv, out, reterr);
        return r ? error_trace(r) : layer_done(pass, layer, 0, reterr);
    }
    return layer_done(pass, layer, run_layer(pass->store, layer, qkv, out), reterr);
}

int kv_cross_layer(KvPass *pass, uint32_t layer, const GpuBuffer *kv, ErrorDetail *reterr)
{
    int r;

    r = check_turn(pass, layer, true, reterr);
    if (r)
        return error_trace(r);
    pass->layer_started = true;
    return layer_done(pass, layer, run_cross_layer(pass->store, layer, kv), reterr);
}

static uint64_t slot_offset(const KvStore *store, const KvTail *state)
{
    return (uint64_t)state->slot * store->states.slot_bytes;
}

static int check_state(const KvPass *pass, uint32_t layer, uint32_t item, ErrorDetail *reterr)
{
    const KvSizes *sizes = &pass->store->sizes;

    if (layer >= sizes->n_layers || !sizes->layers[layer].has_state || item >= pass->n_entries || pass->cross)
        return error_detail_set(reterr, -EINVAL, "cache: layer %u has no state of item %u in this pass", layer, item);
    return 0;
}

int kv_pass_state(KvPass *pass, uint32_t layer, uint32_t item, KvState *ret, ErrorDetail *reterr)
{
    const KvStore *store = pass->store;
    const KvLayerPlace *place;
    const KvStates *states;
    int r;

    r = check_state(pass, layer, item, reterr);
    if (r)
        return error_trace(r);
    place = &store->sizes.layers[layer];
    states = &pass->entries[item].cache->past->states;
    *ret = (KvState){
        .buffer = store->states.buffer,
        .conv_from = slot_offset(store, states->now) + place->conv_offset,
        .recurrent_from = slot_offset(store, states->now) + place->recurrent_offset,
        .conv_to = slot_offset(store, states->next) + place->conv_offset,
        .recurrent_to = slot_offset(store, states->next) + place->recurrent_offset,
        .n_steps = states->n_steps,
    };
    return 0;
}

int kv_pass_state_step(KvPass *pass, uint32_t layer, uint32_t item, uint32_t n_tokens, uint64_t *ret_conv, uint64_t *ret_recurrent,
                       ErrorDetail *reterr)
{
    const KvStates *states;
    uint64_t to;
    int r;

    r = check_state(pass, layer, item, reterr);
    if (r)
        return error_trace(r);
    states = &pass->entries[item].cache->past->states;
    if (n_tokens == 0 || n_tokens > states->n_steps)
        return error_detail_set(reterr, -EINVAL, "cache: no state after %u tokens of item %u, of %u", n_tokens, item, states->n_steps);
    to = slot_offset(pass->store, states->steps[n_tokens - 1]);
    *ret_conv = to + pass->store->sizes.layers[layer].conv_offset;
    *ret_recurrent = to + pass->store->sizes.layers[layer].recurrent_offset;
    return 0;
}
