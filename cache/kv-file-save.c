/* SPDX-License-Identifier: Apache-2.0 */
/* Saving a sequence's past; what its bytes mean. */

#include "cache/kv-file-internal.h"

#include <string.h>
#include <xxhash.h>

struct KvSave {
    KvPast *past; /* holds the blocks */
    KvSaved *tail, *state;
    KvImage *image;
    void *record, *extra;
    void *host_memory; /* of compatibility mode */
    void **buffers; /* (n_layers): pages that were on the device */
};

uint64_t kv_store_layout(const KvStore *store)
{
    uint64_t hash = store->calibration_hash;

    for (uint32_t l = 0; l < store->sizes.n_layers; l++) {
        const KvLayerPlace *place = &store->sizes.layers[l];
        uint64_t facts[40] = {l, KV_PAGE_TOKENS, place->owner, place->has_state, place->conv_offset, place->recurrent_offset,
                              store->sizes.state_slot_bytes};

        if (place->section != KV_NO_SECTION) {
            const KvSectionSizes *sizes = kv_layer_section(store, l);
            const AttendOptions *a = &sizes->attend;
            const KvForm *form = &a->form;
            const uint64_t more[] = {sizes->kind, sizes->layout.page_bytes, sizes->tail_layer_bytes, a->tail_bits, a->exact,
                                     a->visibility.mask, a->visibility.window, a->shape.n_kv_heads, a->shape.k_head_dim,
                                     a->shape.v_head_dim, a->shape.rotary_dim, form->kind, form->k_bits, form->v_bits, form->centre,
                                     form->rotation, form->levels, form->pair_scale, form->group_dims, form->sink_tokens,
                                     form->tail_tokens};

            static_assert(sizeof(more) <= sizeof(facts) - 7 * sizeof(facts[0]), "they have their place");
            memcpy(facts + 7, more, sizeof(more));
        }
        hash = XXH3_64bits_withSeed(facts, sizeof(facts), hash);
    }
    return store->host ? kv_host_layout(store->host, hash) : hash;
}

/* ---- saving ----------------------------------------------------------------------------------------------------------------- */

KvSave *kv_save_end(KvSave *save)
{
    KvStore *store;

    if (!save)
        return NULL;
    store = save->past ? save->past->store : NULL;
    kv_image_free(save->image);
    (void)kv_saved_unref(save->tail);
    (void)kv_saved_unref(save->state);
    for (uint32_t l = 0; store && save->buffers && l < store->sizes.n_layers; l++)
        gpu_free_host(store->gpu, save->buffers[l]);
    free(save->buffers);
    free(save->record);
    free(save->extra);
    free(save->host_memory);
    (void)kv_past_free(save->past);
    free(save);
    return NULL;
}

/* A host copy of a tail or a state, complete. */
static int save_slot(KvTail *tail, KvSaved **ret, ErrorDetail *reterr)
{
    int r;

    if (!tail)
        return 0;
    r = kv_tail_save(tail, ret, reterr);
    if (!r && (*ret)->event)
        r = kv_error(gpu_event_wait((*ret)->tails->gpu, (*ret)->event, reterr));
    return error_trace(r);
}

static int add_record(KvSave *save)
{
    const KvStore *store = save->past->store;
    size_t bytes = sizeof(KvPastRecord) + store->sizes.n_layers * sizeof(KvLayerRecord);
    KvPastRecord *past = calloc(1, bytes);
    KvLayerRecord *layers = (KvLayerRecord *)(past + 1);
    int r;

    save->record = past;
    if (!past)
        return error_origin(KV_E_HOST_MEMORY);
    *past = (KvPastRecord){save->past->length, save->past->cross_length, store->sizes.n_layers, 0};
    for (uint32_t l = 0; l < store->sizes.n_layers; l++)
        if (kv_layer_keeps_pages(store, l)) {
            uint32_t s = store->sizes.layers[l].section;
            const KvSectionPast *section = &save->past->sections[s];
            uint32_t n_pages = kv_past_tokens(save->past, s) / KV_PAGE_TOKENS;

            layers[l] = (KvLayerRecord){section->tail_from, MIN(kv_section_first_page(section), n_pages), n_pages, 0};
        }
    r = kv_image_chunk(save->image, KV_CHUNK_PAST, 0, 0);
    return r ? error_trace(r) : kv_image_piece(save->image, past, bytes);
}

/* Pages [@first, @end) of a block of a layer: where they are, or downloaded to @to. */
static int add_block(KvSave *save, uint32_t layer, const KvBlock *block, uint32_t first, uint32_t end, uint8_t *to)
{
    const KvStore *store = save->past->store;
    const KvLayerPlace *place = &store->sizes.layers[layer];
    uint32_t run;
    int r = 0;

    for (uint32_t page = first; page < end && !r; page += run) {
        uint64_t offset = kv_block_offset(block, place->plane, page), bytes;

        run = kv_block_run(block, page, end);
        bytes = (uint64_t)run * kv_layer_section(store, layer)->layout.page_bytes;
        if (block->arena->memory) {
            r = kv_image_piece(save->image, block->arena->memory + offset, bytes);
            continue;
        }
        r = kv_error(gpu_download(store->gpu, GPU_QUEUE_COMPUTE, block->arena->buffer, offset, to, bytes, GPU_WAIT_NONE, "kv save", NULL));
        if (!r)
            r = kv_image_piece(save->image, to, bytes);
        to += bytes;
    }
    return error_trace(r);
}

/* Whether some of it must be downloaded. */
static bool is_on_device(const KvSectionPast *section, const KvLayerRecord *record)
{
    for (uint32_t page = record->first_page; page < record->n_pages; page++)
        if (!section->blocks[page / KV_BLOCK_PAGES]->arena->memory)
            return true;
    return false;
}

static int add_pages(KvSave *save, uint32_t layer)
{
    const KvStore *store = save->past->store;
    const KvLayerRecord *record = (const KvLayerRecord *)((const KvPastRecord *)save->record + 1) + layer;
    const KvSectionPast *section = &save->past->sections[store->sizes.layers[layer].section];
    uint32_t page_bytes = kv_layer_section(store, layer)->layout.page_bytes;
    int r;

    r = kv_image_chunk(save->image, KV_CHUNK_PAGES, layer, 0);
    if (!r && is_on_device(section, record)) {
        save->buffers[layer] = malloc((size_t)(record->n_pages - record->first_page) * page_bytes);
        if (!save->buffers[layer])
            return error_origin(KV_E_HOST_MEMORY);
    }
    for (uint32_t page = record->first_page, end; page < record->n_pages && !r; page = end) {
        uint32_t b = page / KV_BLOCK_PAGES;

        end = MIN(record->n_pages, (b + 1) * KV_BLOCK_PAGES);
        r = add_block(save, layer, section->blocks[b], page - b * KV_BLOCK_PAGES, end - b * KV_BLOCK_PAGES,
                      (uint8_t *)save->buffers[layer] + (uint64_t)(page - record->first_page) * page_bytes);
    }
    return error_trace(r);
}

static int add_layer(KvSave *save, uint32_t layer)
{
    const KvStore *store = save->past->store;
    int r = 0;

    if (save->tail) {
        r = kv_image_chunk(save->image, KV_CHUNK_TAIL, layer, 0);
        if (!r)
            r = kv_image_piece(save->image, save->tail->memory + kv_layer_tail(store, layer), kv_layer_section(store, layer)->tail_layer_bytes);
    }
    return r ? error_trace(r) : add_pages(save, layer);
}

static int add_extra(KvSave *save, const void *extra, size_t n_extra)
{
    int r;

    save->extra = malloc(MAX(n_extra, (size_t)1));
    if (!save->extra)
        return error_origin(KV_E_HOST_MEMORY);
    if (n_extra > 0)
        memcpy(save->extra, extra, n_extra);
    r = kv_image_chunk(save->image, KV_CHUNK_EXTRA, 0, 0);
    return r ? error_trace(r) : kv_image_piece(save->image, save->extra, n_extra);
}

static int add_all(KvSave *save, const void *extra, size_t n_extra, ErrorDetail *reterr)
{
    KvStore *store;
    int r;

    if (!save->past)
        return add_extra(save, extra, n_extra);
    store = save->past->store;
    r = save_slot(save->past->tail, &save->tail, reterr);
    if (!r)
        r = save_slot(save->past->states.now, &save->state, reterr);
    if (!r)
        r = add_record(save);
    if (!r)
        r = add_extra(save, extra, n_extra);
    for (uint32_t l = 0; l < store->sizes.n_layers && !r; l++)
        if (kv_layer_keeps_pages(store, l))
            r = add_layer(save, l);
    if (!r && save->past->host)
        r = kv_host_past_save(save->past->host, save->image, &save->host_memory);
    if (!r && save->state) {
        r = kv_image_chunk(save->image, KV_CHUNK_STATE, 0, 0);
        if (!r)
            r = kv_image_piece(save->image, save->state->memory, store->sizes.state_slot_bytes);
    }
    if (!r)
        r = kv_error(gpu_drain(store->gpu, reterr));
    else if (!gpu_is_lost(store->gpu))
        (void)gpu_drain(store->gpu, NULL); /* what is downloaded already still writes to the buffers */
    return error_trace(r);
}

static int share_past(KvSave *save, KvCache *cache, KvImageFacts *facts, ErrorDetail *reterr)
{
    int r;

    if (cache->in_pass)
        return error_detail_set(reterr, -EBUSY, "cache: a sequence cannot be saved in the middle of a pass");
    r = kv_store_settle(cache->store, reterr);
    if (r)
        return error_trace(r);
    facts->layout = kv_store_layout(cache->store);
    facts->n_tokens = cache->past->length;
    save->past = kv_past_copy(cache->past);
    save->buffers = calloc(MAX(cache->store->sizes.n_layers, 1u), sizeof(void *));
    return save->past && save->buffers ? 0 : error_origin(KV_E_HOST_MEMORY);
}

int kv_save_begin(KvCache *cache, const uint8_t model[static KV_IMAGE_DIGEST], const void *extra, size_t n_extra, KvSave **ret,
                  ErrorDetail *reterr)
{
    _cleanup_(kv_save_endp) KvSave *save = calloc(1, sizeof(*save));
    KvImageFacts facts = {.n_tokens = 0};
    int r = 0;

    if (!save)
        return error_origin(KV_E_HOST_MEMORY);
    memcpy(facts.model, model, sizeof(facts.model));
    if (cache)
        r = share_past(save, cache, &facts, reterr);
    if (r)
        return error_trace(r);
    save->image = kv_image_new(&facts);
    if (!save->image)
        return error_origin(KV_E_HOST_MEMORY);
    r = add_all(save, extra, n_extra, reterr);
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(save);
    return 0;
}

uint64_t kv_save_bytes(const KvSave *save)
{
    return kv_image_bytes(save->image);
}

int kv_save_write(const KvSave *save, int fd)
{
    return kv_image_write(save->image, fd);
}
