/* SPDX-License-Identifier: Apache-2.0 */
/* Restoring a sequence's past. */

#include "cache/kv-file-internal.h"

#include <string.h>

typedef struct Restore {
    KvStore *store;
    const KvImage *image;
    const KvPastRecord *record;
    const KvLayerRecord *layers;
    KvPast *past; /* of the new cache */
    KvHostPast *host; /* compatibility mode: what it is to hold */
} Restore;

static int bad(ErrorDetail *reterr, uint32_t layer, const char *what)
{
    return error_detail_set(reterr, -EBADMSG, "saved cache: %s of layer %u do not add up", what, layer);
}

/* The chunk, which must have so many bytes. */
static const void *chunk_data(const Restore *restore, uint32_t kind, uint32_t a, uint64_t bytes)
{
    const KvImageChunk *chunk = kv_image_find(restore->image, kind, a, 0);

    return chunk && chunk->bytes == bytes ? chunk->data : NULL;
}

/* What the record says of a layer must be what this store would keep of such a past. */
static int check_layer(const Restore *restore, uint32_t layer, ErrorDetail *reterr)
{
    const KvStore *store = restore->store;
    const KvLayerPlace *place = &store->sizes.layers[layer];
    const KvSection *section = &store->sections[place->section];
    const KvSectionSizes *sizes = section->sizes;
    const KvLayerRecord *record = &restore->layers[layer];
    bool cross = sizes->kind == KV_LAYER_CROSS;
    uint32_t tokens = cross ? restore->record->cross_length : restore->record->length;

    if (tokens > sizes->max_tokens)
        return error_detail_set(reterr, KV_E_CONTEXT, "saved cache: %u tokens, there is room for %u", tokens, sizes->max_tokens);
    if (record->n_pages != tokens / KV_PAGE_TOKENS || record->first_page > record->n_pages ||
        (!cross && record->first_page > kv_kept_page(section, tokens)))
        return bad(reterr, layer, "the pages");
    if (!cross && tokens > 0 && record->tail_from > kv_needed_from(section, tokens))
        return bad(reterr, layer, "the recent tokens");
    if (!chunk_data(restore, KV_CHUNK_PAGES, layer, (uint64_t)(record->n_pages - record->first_page) * sizes->layout.page_bytes))
        return bad(reterr, layer, "the bytes of the pages");
    if (tokens > 0 && !chunk_data(restore, KV_CHUNK_TAIL, layer, sizes->tail_layer_bytes))
        return bad(reterr, layer, "the bytes of the recent tokens");
    for (uint32_t l = 0; l < layer; l++)
        if (kv_layer_keeps_pages(store, l) && store->sizes.layers[l].section == place->section &&
            memcmp(&restore->layers[l], record, sizeof(*record)) != 0)
            return bad(reterr, layer, "the pages");
    return 0;
}

static int check_record(Restore *restore, ErrorDetail *reterr)
{
    const KvStore *store = restore->store;
    uint64_t bytes = sizeof(KvPastRecord) + store->sizes.n_layers * sizeof(KvLayerRecord);
    int r = 0;

    restore->record = chunk_data(restore, KV_CHUNK_PAST, 0, bytes);
    if (!restore->record || restore->record->n_layers != store->sizes.n_layers ||
        restore->record->length != restore->image->facts.n_tokens)
        return error_detail_set(reterr, -EBADMSG, "saved cache: its record does not add up");
    restore->layers = (const KvLayerRecord *)(restore->record + 1);
    if (store->sizes.state_slot_bytes > 0 && restore->record->length > 0 &&
        !chunk_data(restore, KV_CHUNK_STATE, 0, store->sizes.state_slot_bytes))
        return error_detail_set(reterr, -EBADMSG, "saved cache: it has no states");
    for (uint32_t l = 0; l < store->sizes.n_layers && !r; l++)
        if (kv_layer_keeps_pages(store, l))
            r = check_layer(restore, l, reterr);
    if (!r && store->host)
        r = kv_host_past_restore(store->host, restore->image, restore->record->length, &restore->host, reterr);
    return r;
}

/* Tail and state as if they had been saved when the device needed their slots. */
static int restore_slots(Restore *restore, ErrorDetail *reterr)
{
    KvStore *store = restore->store;
    _cleanup_(kv_saved_unrefp) KvSaved *tail = NULL, *state = NULL;
    int r;

    if (restore->record->length == 0 && restore->record->cross_length == 0)
        return 0;
    r = kv_saved_new(&store->tails, &tail, reterr);
    if (r)
        return error_trace(r);
    memset(tail->memory, 0, store->tails.slot_bytes);
    for (uint32_t l = 0; l < store->sizes.n_layers; l++)
        if (kv_layer_keeps_pages(store, l)) {
            uint64_t bytes = kv_layer_section(store, l)->tail_layer_bytes;
            const void *from = chunk_data(restore, KV_CHUNK_TAIL, l, bytes);

            if (from)
                memcpy(tail->memory + kv_layer_tail(store, l), from, bytes);
        }
    restore->past->tail = kv_tail_new_from(&store->tails, tail);
    if (!restore->past->tail)
        return error_origin(KV_E_HOST_MEMORY);
    if (store->sizes.state_slot_bytes == 0 || restore->record->length == 0)
        return 0;
    r = kv_saved_new(&store->states, &state, reterr);
    if (r)
        return error_trace(r);
    memcpy(state->memory, chunk_data(restore, KV_CHUNK_STATE, 0, store->sizes.state_slot_bytes), store->sizes.state_slot_bytes);
    restore->past->states.now = kv_tail_new_from(&store->states, state);
    return restore->past->states.now ? 0 : error_origin(KV_E_HOST_MEMORY);
}

/* Blocks of a section, still empty. */
static int take_blocks(Restore *restore, uint32_t s, uint32_t layer, ErrorDetail *reterr)
{
    KvSection *home = &restore->store->sections[s];
    KvSectionPast *section = &restore->past->sections[s];
    const KvLayerRecord *record = &restore->layers[layer];
    uint32_t end = (record->n_pages + KV_BLOCK_PAGES - 1) / KV_BLOCK_PAGES;
    int r;

    section->tail_from = record->tail_from;
    section->first_block = section->n_blocks = MIN(record->first_page / KV_BLOCK_PAGES, end);
    for (; section->n_blocks < end; section->n_blocks++) {
        const KvBlock *last = section->n_blocks > section->first_block ? section->blocks[section->n_blocks - 1] : NULL;
        KvBlock **block = &section->blocks[section->n_blocks];

        uint32_t at = section->n_blocks * KV_BLOCK_PAGES, first = record->first_page > at ? record->first_page - at : 0;

        r = kv_section_take(home, last, first, MIN(record->n_pages - at, (uint32_t)KV_BLOCK_PAGES), block, reterr);
        if (r)
            return error_trace(r);
        (*block)->serial = ++restore->store->serial; /* no slot of the ring holds it */
    }
    return 0;
}

static int fill_pages(Restore *restore, uint32_t layer)
{
    const KvLayerPlace *place = &restore->store->sizes.layers[layer];
    const KvSectionPast *section = &restore->past->sections[place->section];
    const KvLayerRecord *record = &restore->layers[layer];
    uint32_t page_bytes = kv_layer_section(restore->store, layer)->layout.page_bytes;
    const uint8_t *from = chunk_data(restore, KV_CHUNK_PAGES, layer, (uint64_t)(record->n_pages - record->first_page) * page_bytes);
    int r = 0;

    for (uint32_t b = section->first_block; b < section->n_blocks && !r; b++) {
        const KvBlock *block = section->blocks[b];
        uint32_t run;

        for (uint32_t page = block->first_page; page < block->n_filled && !r; page += run) {
            uint64_t offset = kv_block_offset(block, place->plane, page), bytes;

            run = kv_block_run(block, page, block->n_filled);
            bytes = (uint64_t)run * page_bytes;
            if (block->arena->memory)
                memcpy(block->arena->memory + offset, from, bytes);
            else
                r = kv_error(gpu_upload(restore->store->gpu, GPU_QUEUE_COMPUTE, block->arena->buffer, offset, from, bytes, GPU_WAIT_NONE,
                                        "kv restore", NULL));
            from += bytes;
        }
    }
    return error_trace(r);
}

static int restore_past(Restore *restore, ErrorDetail *reterr)
{
    KvStore *store = restore->store;
    int r;

    r = restore_slots(restore, reterr);
    for (uint32_t l = 0; l < store->sizes.n_layers && !r; l++) {
        uint32_t s = store->sizes.layers[l].section;

        if (!kv_layer_keeps_pages(store, l))
            continue;
        if (store->sizes.layers[l].plane == 0)
            r = take_blocks(restore, s, l, reterr);
        if (!r)
            r = fill_pages(restore, l);
    }
    if (!r)
        r = kv_error(gpu_drain(store->gpu, reterr));
    restore->past->length = restore->record->length;
    restore->past->cross_length = restore->record->cross_length;
    return error_trace(r);
}

int kv_restore(KvStore *store, const KvImage *image, KvCache **ret, ErrorDetail *reterr)
{
    _cleanup_(kv_cache_freep) KvCache *cache = NULL;
    Restore restore = {.store = store, .image = image};
    int r;

    if (store->pass.active)
        return error_detail_set(reterr, -EBUSY, "cache: a sequence cannot be restored during a pass");
    r = check_record(&restore, reterr);
    if (r)
        return r;
    r = kv_store_settle(store, reterr);
    if (!r)
        r = kv_cache_new(store, &cache, reterr);
    if (r) {
        (void)kv_host_past_free(restore.host);
        return error_trace(r);
    }
    restore.past = cache->past;
    if (restore.host) {
        (void)kv_host_past_free(cache->past->host);
        cache->past->host = restore.host;
    }
    r = restore_past(&restore, reterr);
    if (r) {
        kv_past_clear(cache->past);
        return error_trace(r);
    }
    *ret = TAKE_PTR(cache);
    return 0;
}

const void *kv_image_extra(const KvImage *image, size_t *ret_n)
{
    const KvImageChunk *chunk = kv_image_find(image, KV_CHUNK_EXTRA, 0, 0);

    *ret_n = chunk ? (size_t)chunk->bytes : 0;
    return chunk ? chunk->data : NULL;
}
