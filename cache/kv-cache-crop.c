/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Going back.
 *
 * Going on from a length n needs, in each section, positions [kv_needed_from(n), n) in full precision, and the sinks.  The tail ring
 * holds [tail_from, length).  When that is not enough, a section with an unpacked form reads them back from its pages; a packed one
 * goes back to a checkpoint, and so do all others with it.
 */

#include "cache/kv-store-internal.h"

static bool is_packed(const KvSection *section)
{
    return kv_form_is_coded(section->sizes->attend.form);
}

/* ---- tails read back from pages ----------------------------------------------------------------------------------------- */

/* Brings one page of a plane where attend_refill() can read it; *@pages, *@offset, *@index say where. */
static int refill_source(KvStore *store, const KvArenas *arenas, const KvBlock *block, uint32_t plane, uint32_t page, uint32_t place,
                         const GpuBuffer **pages, uint64_t *offset, uint32_t *index)
{
    uint32_t page_bytes = arenas->options.page_bytes;

    if (block->arena->buffer) {
        *pages = block->arena->buffer;
        *offset = plane * block->arena->plane_bytes;
        *index = block->index * KV_BLOCK_PAGES + page;
        return 0;
    }
    *pages = store->fresh[0];
    *offset = 0;
    *index = place;
    return gpu_upload(store->gpu, GPU_QUEUE_COMPUTE, store->fresh[0], (uint64_t)place * page_bytes,
                      block->arena->memory + kv_block_offset(arenas, block, plane, page), page_bytes, GPU_WAIT_NONE, "kv refill",
                      NULL);
}

/* One page of one layer.  @first_layer: the record is not on the device yet. */
static int refill_layer(KvStore *store, const KvPast *past, uint32_t layer, uint32_t page, uint32_t place, bool first_layer)
{
    const KvLayerPlace *where = &store->sizes.layers[layer];
    KvSection *section = &store->sections[where->section];
    const KvBlock *block = past->sections[where->section].blocks[page / KV_BLOCK_PAGES];
    AttendPack *record = (AttendPack *)section->inputs_memory + place;
    AttendLayer buffers = kv_store_layer(store, layer);
    const GpuBuffer *pages;
    uint64_t offset;
    uint32_t index;
    int r;

    r = refill_source(store, &section->arenas, block, where->plane, page % KV_BLOCK_PAGES, place, &pages, &offset, &index);
    /* The record is the same for all layers: where the source differs by layer, only the offset does. */
    *record = (AttendPack){.tail_slot = past->tail->slot, .page = (int32_t)page, .to = index};
    if (!r && first_layer)
        r = gpu_upload(store->gpu, GPU_QUEUE_COMPUTE, section->inputs, place * sizeof(AttendPack), record, sizeof(AttendPack),
                       GPU_WAIT_NONE, "kv refill", NULL);
    if (!r)
        r = attend_refill(section->attend, &buffers, section->inputs, place * sizeof(AttendPack), 1, pages, offset);
    return error_trace(r);
}

/* Queues the refill of a section's ring from the pages that the ring of a sequence of @length is to hold. */
static int refill_section(KvStore *store, const KvPast *past, uint32_t s, uint32_t length)
{
    uint32_t first = kv_needed_from(&store->sections[s], length) / KV_PAGE_TOKENS;
    uint32_t end = MIN((length + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS, past->length / KV_PAGE_TOKENS);
    int r = 0;

    for (uint32_t page = first; page < end && !r; page++) {
        bool first_layer = true;

        for (uint32_t l = 0; l < store->sizes.n_layers && !r; l++) {
            if (store->sizes.layers[l].section != s || store->sizes.layers[l].owner != l)
                continue;
            r = refill_layer(store, past, l, page, page - first, first_layer);
            first_layer = false;
        }
    }
    return r;
}

static bool must_refill(const KvPast *past, uint32_t s, uint32_t length)
{
    return past->sections[s].tail_from > kv_needed_from(&past->store->sections[s], length);
}

/* Reads tails of a past to be cropped to @length back from its pages, which still are those of the longer one. */
static int refill_tail(KvPast *past, uint32_t length, ErrorDetail *reterr)
{
    KvStore *store = past->store;
    int r;

    r = kv_store_settle(store, reterr);
    if (r)
        return error_trace(r);
    kv_tails_next_pass(&store->tails);
    r = kv_tails_acquire(&store->tails, &past->tail, reterr);
    if (r)
        return error_trace(r);
    for (uint32_t s = 0; s < store->sizes.n_sections && !r; s++)
        if (must_refill(past, s, length))
            r = refill_section(store, past, s, length);
    if (!r)
        r = gpu_drain(store->gpu, KV_TIMEOUT_USEC, reterr);
    return error_trace(kv_error(r));
}

/* ---- where to go back to ----------------------------------------------------------------------------------------------------- */

/* The checkpoint to go back to for @n_keep: one that leads there exactly, else the longest before it; NULL: none. */
static const KvCheckpoint *find_checkpoint(const KvPast *past, uint32_t n_keep, uint32_t *ret_length)
{
    const KvStore *store = past->store;
    const KvCheckpoint *best = NULL;

    for (uint32_t i = 0; i < past->n_checkpoints; i++) {
        const KvCheckpoint *checkpoint = past->checkpoints[i];
        bool covers = checkpoint->length <= past->length;

        for (uint32_t s = 0; s < store->sizes.n_sections; s++)
            covers = covers && checkpoint->tail_from[s] <= kv_needed_from(&store->sections[s], n_keep);
        if (checkpoint->length <= n_keep) {
            best = checkpoint;
            *ret_length = checkpoint->length;
        } else if (covers) {
            *ret_length = n_keep;
            return checkpoint;
        }
    }
    return best;
}

/* To @n_keep, or to the last complete page: tokens after it are nowhere but in the tail. */
static int rewind_by_pages(KvPast *past, uint32_t n_keep, ErrorDetail *reterr)
{
    const KvStore *store = past->store;
    uint32_t complete = past->length / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
    int r;

    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        if (n_keep > complete && must_refill(past, s, n_keep) && past->sections[s].tail_from > complete)
            n_keep = complete;
    r = refill_tail(past, n_keep, reterr);
    if (r)
        return error_trace(r);
    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        if (must_refill(past, s, n_keep))
            past->sections[s].tail_from = kv_needed_from(&store->sections[s], n_keep);
    kv_past_drop_beyond(past, n_keep);
    return 0;
}

static int rewind_to_checkpoint(KvPast *past, uint32_t n_keep)
{
    const KvStore *store = past->store;
    uint32_t length = 0;
    const KvCheckpoint *checkpoint = find_checkpoint(past, n_keep, &length);
    KvTail *tail;

    if (checkpoint) {
        tail = kv_tail_new_from(&past->store->tails, checkpoint->saved);
        if (!tail)
            return error_origin(KV_E_HOST_MEMORY);
        for (uint32_t s = 0; s < store->sizes.n_sections; s++)
            past->sections[s].tail_from = checkpoint->tail_from[s];
        (void)kv_tail_unref(past->tail);
        past->tail = tail;
    }
    kv_past_drop_beyond(past, length);
    return 0;
}

/* Goes back to @n_keep or less. */
static int rewind_past(KvPast *past, uint32_t n_keep, ErrorDetail *reterr)
{
    const KvStore *store = past->store;
    bool refill = false, lost = false;

    for (uint32_t s = 0; n_keep > 0 && s < store->sizes.n_sections; s++)
        if (must_refill(past, s, n_keep)) {
            refill = true;
            lost = lost || is_packed(&store->sections[s]);
        }
    if (lost)
        return rewind_to_checkpoint(past, n_keep);
    if (refill)
        return rewind_by_pages(past, n_keep, reterr);
    kv_past_drop_beyond(past, n_keep);
    return 0;
}

int kv_cache_crop(KvCache *cache, uint32_t n_keep, uint32_t *ret_length, ErrorDetail *reterr)
{
    int r;

    if (cache->in_pass)
        return error_detail_set(reterr, -EBUSY, "cache: a sequence cannot be cropped in the middle of a pass");
    if (n_keep < cache->past->length) {
        r = rewind_past(cache->past, n_keep, reterr);
        if (r)
            return error_trace(r);
        kv_store_trim(cache->store);
    }
    *ret_length = cache->past->length;
    return 0;
}

int kv_cache_recover(KvCache *cache, uint32_t end, ErrorDetail *reterr)
{
    KvPast *past = cache->past;

    for (uint32_t s = 0; s < cache->store->sizes.n_sections; s++) {
        uint32_t ring = kv_ring_tokens(cache->store->sections[s].sizes->attend.form);
        uint32_t from = MIN(end > ring ? end - ring : 0, past->length);

        past->sections[s].tail_from = MAX(past->sections[s].tail_from, from);
    }
    return error_trace(rewind_past(past, past->length, reterr));
}
