/* SPDX-License-Identifier: Apache-2.0 */
/* Saving and restoring a sequence's past. */

#include "cache/kv-file.h"
#include "cache/kv-store-internal.h"

#include <assert.h>
#include <string.h>
#include <xxhash.h>

enum {
    CHUNK_PAST = 1, /* PastRecord, then a LayerRecord a layer */
    CHUNK_TAIL,     /* a: layer */
    CHUNK_PAGES,    /* a: layer */
    CHUNK_STATE,
    CHUNK_EXTRA,
};

typedef struct PastRecord {
    uint32_t length, cross_length, n_layers, reserved;
} PastRecord;

/* Of a layer that keeps keys and values of its own; zero for others. */
typedef struct LayerRecord {
    uint32_t tail_from, first_page, n_pages, reserved; /* pages [first_page, n_pages) */
} LayerRecord;

static_assert(sizeof(PastRecord) == 16 && sizeof(LayerRecord) == 16, "no padding in the file");

struct KvSave {
    KvPast *past; /* holds the blocks */
    KvSaved *tail, *state;
    KvImage *image;
    void *record, *extra;
    void **buffers; /* (n_layers): pages that were on the device */
};

static bool keeps_pages(const KvStore *store, uint32_t layer)
{
    return store->sizes.layers[layer].section != KV_NO_SECTION && store->sizes.layers[layer].owner == layer;
}

static const KvSectionSizes *section_of(const KvStore *store, uint32_t layer)
{
    return &store->sizes.sections[store->sizes.layers[layer].section];
}

static uint64_t tail_place(const KvStore *store, uint32_t layer)
{
    const KvSectionSizes *sizes = section_of(store, layer);

    return sizes->tail_offset + store->sizes.layers[layer].plane * sizes->tail_layer_bytes;
}

uint64_t kv_store_layout(const KvStore *store)
{
    uint64_t hash = store->calibration_hash;

    for (uint32_t l = 0; l < store->sizes.n_layers; l++) {
        const KvLayerPlace *place = &store->sizes.layers[l];
        uint64_t facts[40] = {l, KV_PAGE_TOKENS, place->owner, place->has_state, place->conv_offset, place->recurrent_offset,
                              store->sizes.state_slot_bytes};

        if (place->section != KV_NO_SECTION) {
            const KvSectionSizes *sizes = section_of(store, l);
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
    return hash;
}

/* ---- saving ------------------------------------------------------------------------------------------------------------------- */

KvSave *kv_save_end(KvSave *save)
{
    KvStore *store;

    if (!save)
        return NULL;
    store = save->past ? save->past->store : NULL;
    kv_image_free(save->image);
    (void)kv_saved_unref(save->tail);
    (void)kv_saved_unref(save->state);
    for (uint32_t l = 0; save->buffers && l < store->sizes.n_layers; l++)
        free(save->buffers[l]);
    free(save->buffers);
    free(save->record);
    free(save->extra);
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
        r = kv_error(gpu_event_wait((*ret)->tails->gpu, (*ret)->event, KV_TIMEOUT_USEC, reterr));
    return error_trace(r);
}

static int add_record(KvSave *save)
{
    const KvStore *store = save->past->store;
    size_t bytes = sizeof(PastRecord) + store->sizes.n_layers * sizeof(LayerRecord);
    PastRecord *past = calloc(1, bytes);
    LayerRecord *layers = (LayerRecord *)(past + 1);
    int r;

    save->record = past;
    if (!past)
        return error_origin(KV_E_HOST_MEMORY);
    *past = (PastRecord){save->past->length, save->past->cross_length, store->sizes.n_layers, 0};
    for (uint32_t l = 0; l < store->sizes.n_layers; l++)
        if (keeps_pages(store, l)) {
            uint32_t s = store->sizes.layers[l].section;
            const KvSectionPast *section = &save->past->sections[s];
            uint32_t n_pages = kv_past_tokens(save->past, s) / KV_PAGE_TOKENS;

            layers[l] = (LayerRecord){section->tail_from, MIN(kv_section_first_page(section), n_pages), n_pages, 0};
        }
    r = kv_image_chunk(save->image, CHUNK_PAST, 0, 0);
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
        bytes = (uint64_t)run * section_of(store, layer)->layout.page_bytes;
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
static bool is_on_device(const KvSectionPast *section, const LayerRecord *record)
{
    for (uint32_t page = record->first_page; page < record->n_pages; page++)
        if (!section->blocks[page / KV_BLOCK_PAGES]->arena->memory)
            return true;
    return false;
}

static int add_pages(KvSave *save, uint32_t layer)
{
    const KvStore *store = save->past->store;
    const LayerRecord *record = (const LayerRecord *)((const PastRecord *)save->record + 1) + layer;
    const KvSectionPast *section = &save->past->sections[store->sizes.layers[layer].section];
    uint32_t page_bytes = section_of(store, layer)->layout.page_bytes;
    int r;

    r = kv_image_chunk(save->image, CHUNK_PAGES, layer, 0);
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
        r = kv_image_chunk(save->image, CHUNK_TAIL, layer, 0);
        if (!r)
            r = kv_image_piece(save->image, save->tail->memory + tail_place(store, layer), section_of(store, layer)->tail_layer_bytes);
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
    r = kv_image_chunk(save->image, CHUNK_EXTRA, 0, 0);
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
        if (keeps_pages(store, l))
            r = add_layer(save, l);
    if (!r && save->state) {
        r = kv_image_chunk(save->image, CHUNK_STATE, 0, 0);
        if (!r)
            r = kv_image_piece(save->image, save->state->memory, store->sizes.state_slot_bytes);
    }
    if (!r)
        r = kv_error(gpu_drain(store->gpu, KV_TIMEOUT_USEC, reterr));
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

/* ---- restoring ---------------------------------------------------------------------------------------------------------------- */

typedef struct Restore {
    KvStore *store;
    const KvImage *image;
    const PastRecord *record;
    const LayerRecord *layers;
    KvPast *past; /* of the new cache */
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
    const LayerRecord *record = &restore->layers[layer];
    bool cross = sizes->kind == KV_LAYER_CROSS;
    uint32_t tokens = cross ? restore->record->cross_length : restore->record->length;

    if (tokens > sizes->max_tokens)
        return error_detail_set(reterr, KV_E_CONTEXT, "saved cache: %u tokens, there is room for %u", tokens, sizes->max_tokens);
    if (record->n_pages != tokens / KV_PAGE_TOKENS || record->first_page > record->n_pages ||
        (!cross && record->first_page > kv_kept_page(section, tokens)))
        return bad(reterr, layer, "the pages");
    if (!cross && tokens > 0 && record->tail_from > kv_needed_from(section, tokens))
        return bad(reterr, layer, "the recent tokens");
    if (!chunk_data(restore, CHUNK_PAGES, layer, (uint64_t)(record->n_pages - record->first_page) * sizes->layout.page_bytes))
        return bad(reterr, layer, "the bytes of the pages");
    if (tokens > 0 && !chunk_data(restore, CHUNK_TAIL, layer, sizes->tail_layer_bytes))
        return bad(reterr, layer, "the bytes of the recent tokens");
    for (uint32_t l = 0; l < layer; l++)
        if (keeps_pages(store, l) && store->sizes.layers[l].section == place->section &&
            memcmp(&restore->layers[l], record, sizeof(*record)) != 0)
            return bad(reterr, layer, "the pages");
    return 0;
}

static int check_record(Restore *restore, ErrorDetail *reterr)
{
    const KvStore *store = restore->store;
    uint64_t bytes = sizeof(PastRecord) + store->sizes.n_layers * sizeof(LayerRecord);
    int r = 0;

    restore->record = chunk_data(restore, CHUNK_PAST, 0, bytes);
    if (!restore->record || restore->record->n_layers != store->sizes.n_layers ||
        restore->record->length != restore->image->facts.n_tokens)
        return error_detail_set(reterr, -EBADMSG, "saved cache: its record does not add up");
    restore->layers = (const LayerRecord *)(restore->record + 1);
    if (store->sizes.state_slot_bytes > 0 && restore->record->length > 0 &&
        !chunk_data(restore, CHUNK_STATE, 0, store->sizes.state_slot_bytes))
        return error_detail_set(reterr, -EBADMSG, "saved cache: it has no states");
    for (uint32_t l = 0; l < store->sizes.n_layers && !r; l++)
        if (keeps_pages(store, l))
            r = check_layer(restore, l, reterr);
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
        if (keeps_pages(store, l)) {
            uint64_t bytes = section_of(store, l)->tail_layer_bytes;
            const void *from = chunk_data(restore, CHUNK_TAIL, l, bytes);

            if (from)
                memcpy(tail->memory + tail_place(store, l), from, bytes);
        }
    restore->past->tail = kv_tail_new_from(&store->tails, tail);
    if (!restore->past->tail)
        return error_origin(KV_E_HOST_MEMORY);
    if (store->sizes.state_slot_bytes == 0 || restore->record->length == 0)
        return 0;
    r = kv_saved_new(&store->states, &state, reterr);
    if (r)
        return error_trace(r);
    memcpy(state->memory, chunk_data(restore, CHUNK_STATE, 0, store->sizes.state_slot_bytes), store->sizes.state_slot_bytes);
    restore->past->states.now = kv_tail_new_from(&store->states, state);
    return restore->past->states.now ? 0 : error_origin(KV_E_HOST_MEMORY);
}

/* Blocks of a section, still empty. */
static int take_blocks(Restore *restore, uint32_t s, uint32_t layer, ErrorDetail *reterr)
{
    KvSection *home = &restore->store->sections[s];
    KvSectionPast *section = &restore->past->sections[s];
    const LayerRecord *record = &restore->layers[layer];
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
    const LayerRecord *record = &restore->layers[layer];
    uint32_t page_bytes = section_of(restore->store, layer)->layout.page_bytes;
    const uint8_t *from = chunk_data(restore, CHUNK_PAGES, layer, (uint64_t)(record->n_pages - record->first_page) * page_bytes);
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

        if (!keeps_pages(store, l))
            continue;
        if (store->sizes.layers[l].plane == 0)
            r = take_blocks(restore, s, l, reterr);
        if (!r)
            r = fill_pages(restore, l);
    }
    if (!r)
        r = kv_error(gpu_drain(store->gpu, KV_TIMEOUT_USEC, reterr));
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
    if (r)
        return error_trace(r);
    restore.past = cache->past;
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
    const KvImageChunk *chunk = kv_image_find(image, CHUNK_EXTRA, 0, 0);

    *ret_n = chunk ? (size_t)chunk->bytes : 0;
    return chunk ? chunk->data : NULL;
}
