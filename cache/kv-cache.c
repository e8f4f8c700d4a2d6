/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One sequence's past: pages, tail, checkpoints; fork and crop.
 *
 * Crop.  Going on from a length n needs positions [32 * max(0, n / 32 - 1), n) in full precision, and the sinks.  The tail ring holds
 * [tail_from, length).  When that is not enough, unpacked forms read the two pages back; packed forms go back to a checkpoint.
 */

#include "cache/kv-store-internal.h"

#include <string.h>

/* The lowest position that a cache of this length needs in full precision. */
static uint32_t tail_needed_from(uint32_t length)
{
    return kv_packed_pages(length) * KV_PAGE_TOKENS;
}

static uint32_t blocks_of(uint32_t length)
{
    return (length / KV_PAGE_TOKENS + KV_BLOCK_PAGES - 1) / KV_BLOCK_PAGES;
}

static bool is_fixed(const KvStore *store)
{
    return store->sizes.policy.growth == KV_GROWTH_STATIC;
}

int kv_cache_new(KvStore *store, KvCache **ret, ErrorDetail *reterr)
{
    KvCache *cache;
    int r;

    cache = calloc(1, sizeof(*cache));
    if (cache)
        cache->blocks = calloc(store->sizes.max_blocks, sizeof(KvBlock *));
    if (!cache || !cache->blocks) {
        free(cache);
        return error_origin(KV_E_HOST_MEMORY);
    }
    if (is_fixed(store)) {
        r = kv_arenas_reserve(&store->arenas, store->sizes.max_blocks, reterr);
        if (r) {
            free(cache->blocks);
            free(cache);
            return error_trace(r);
        }
    }
    cache->store = store;
    cache->next = store->caches;
    if (cache->next)
        cache->next->previous = cache;
    store->caches = cache;
    store->n_caches++;
    *ret = cache;
    return 0;
}

static void drop_checkpoint(KvCache *cache, uint32_t index)
{
    (void)kv_saved_unref(cache->checkpoints[index].saved);
    cache->n_checkpoints--;
    memmove(&cache->checkpoints[index], &cache->checkpoints[index + 1],
            (cache->n_checkpoints - index) * sizeof(KvCheckpoint));
}

/* Keeps blocks for @length tokens, checkpoints up to it. */
static void drop_beyond(KvCache *cache, uint32_t length)
{
    while (cache->n_blocks > blocks_of(length)) {
        KvBlock **block = &cache->blocks[--cache->n_blocks];

        *block = kv_arenas_unref(&cache->store->arenas, *block);
    }
    while (cache->n_checkpoints > 0 && cache->checkpoints[cache->n_checkpoints - 1].length > length)
        drop_checkpoint(cache, cache->n_checkpoints - 1);
    cache->length = length;
    if (length == 0) {
        cache->tail = kv_tail_unref(cache->tail);
        cache->tail_from = 0;
    }
}

KvCache *kv_cache_free(KvCache *cache)
{
    KvStore *store;

    if (!cache)
        return NULL;
    store = cache->store;
    drop_beyond(cache, 0);
    if (is_fixed(store))
        kv_arenas_unreserve(&store->arenas, store->sizes.max_blocks);
    if (cache->next)
        cache->next->previous = cache->previous;
    if (cache->previous)
        cache->previous->next = cache->next;
    else
        store->caches = cache->next;
    store->n_caches--;
    kv_store_trim(store);
    free(cache->blocks);
    free(cache);
    return NULL;
}

int kv_cache_clear(KvCache *cache)
{
    if (cache->in_pass)
        return error_origin(-EBUSY);
    drop_beyond(cache, 0);
    kv_store_trim(cache->store);
    return 0;
}

uint32_t kv_cache_length(const KvCache *cache)
{
    return cache->length;
}

int kv_cache_fork(KvCache *cache, KvCache **ret, ErrorDetail *reterr)
{
    KvCache *fork;
    int r;

    if (cache->in_pass)
        return error_detail_set(reterr, -EBUSY, "cache: a sequence cannot be forked in the middle of a pass");
    r = kv_cache_new(cache->store, &fork, reterr);
    if (r)
        return error_trace(r);
    fork->length = cache->length;
    fork->n_blocks = cache->n_blocks;
    for (uint32_t i = 0; i < cache->n_blocks; i++)
        fork->blocks[i] = kv_block_ref(cache->blocks[i]);
    fork->tail = kv_tail_ref(cache->tail);
    fork->tail_from = cache->tail_from;
    fork->n_checkpoints = cache->n_checkpoints;
    for (uint32_t i = 0; i < cache->n_checkpoints; i++) {
        fork->checkpoints[i] = cache->checkpoints[i];
        (void)kv_saved_ref(fork->checkpoints[i].saved);
    }
    *ret = fork;
    return 0;
}

/* ---- room for a pass ------------------------------------------------------------------------------------------------ */

/* Copies the first @n_pages of a block that others go on using.  The device's copies run in the order of pages going home. */
static int copy_block(KvStore *store, const KvBlock *from, KvBlock *to, uint32_t n_pages, ErrorDetail *reterr)
{
    uint64_t bytes = (uint64_t)n_pages * store->sizes.layout.page_bytes;
    bool in_place = from->arena->buffer != NULL;
    int r = 0;

    /* On the host nothing orders this copy against pages that still travel: to @from, or to what @to was before. */
    if (!in_place)
        r = kv_store_settle(store, reterr);
    else
        store->home_serial = store->serial;
    for (uint32_t l = 0; l < store->sizes.n_layers && !r; l++) {
        uint64_t source = kv_block_offset(&store->arenas, from, l, 0), target = kv_block_offset(&store->arenas, to, l, 0);

        if (!in_place) {
            memcpy(to->arena->memory + target, from->arena->memory + source, bytes);
            continue;
        }
        store->home_events[l] = gpu_event_unref(store->home_events[l]);
        r = kv_error(gpu_copy(store->gpu, GPU_QUEUE_DOWNLOAD, to->arena->buffer, target, from->arena->buffer, source, bytes,
                              GPU_WAIT_NONE, "kv unshare", &store->home_events[l]));
    }
    to->serial = store->serial;
    return error_trace(r);
}

/* Makes the incomplete last block writable. */
static int claim_block(KvCache *cache, KvPassEntry *entry, uint32_t n_pages, ErrorDetail *reterr)
{
    KvArenas *arenas = &cache->store->arenas;
    KvBlock **block = &cache->blocks[cache->n_blocks - 1], *copy;
    int r;

    if ((*block)->n_refs > 1 && (*block)->n_filled != n_pages) {
        r = kv_arenas_take(arenas, cache->n_blocks > 1 ? cache->blocks[cache->n_blocks - 2] : NULL, &copy, reterr);
        if (r)
            return error_trace(r);
        r = copy_block(cache->store, *block, copy, n_pages, reterr);
        if (r) {
            (void)kv_arenas_unref(arenas, copy);
            return error_trace(r);
        }
        (void)kv_arenas_unref(arenas, *block);
        *block = copy;
    }
    entry->claimed = *block;
    return 0;
}

int kv_cache_grow(KvCache *cache, KvPassEntry *entry, ErrorDetail *reterr)
{
    KvStore *store = cache->store;
    uint32_t home = cache->length / KV_PAGE_TOKENS, end = (cache->length + entry->n_tokens) / KV_PAGE_TOKENS;
    uint32_t n_blocks = blocks_of(cache->length + entry->n_tokens);
    int r;

    entry->cache = cache;
    entry->n_blocks_before = cache->n_blocks;
    entry->claimed = NULL;
    if (end == home)
        return 0;
    if (home % KV_BLOCK_PAGES != 0) {
        r = claim_block(cache, entry, home % KV_BLOCK_PAGES, reterr);
        if (r)
            return error_trace(r);
    }
    while (cache->n_blocks < n_blocks) {
        const KvBlock *last = cache->n_blocks > 0 ? cache->blocks[cache->n_blocks - 1] : NULL;

        r = kv_arenas_take(&store->arenas, last, &cache->blocks[cache->n_blocks], reterr);
        if (r)
            return error_trace(r);
        cache->n_blocks++;
    }
    for (uint32_t b = home / KV_BLOCK_PAGES; b < n_blocks; b++) {
        cache->blocks[b]->n_filled = MIN(end - b * KV_BLOCK_PAGES, (uint32_t)KV_BLOCK_PAGES);
        cache->blocks[b]->write_serial = store->serial;
    }
    return 0;
}

void kv_cache_shrink(KvPassEntry *entry)
{
    KvCache *cache = entry->cache;

    while (cache->n_blocks > entry->n_blocks_before) {
        KvBlock **block = &cache->blocks[--cache->n_blocks];

        *block = kv_arenas_unref(&cache->store->arenas, *block);
    }
    if (entry->claimed) {
        entry->claimed->n_filled = cache->length / KV_PAGE_TOKENS % KV_BLOCK_PAGES;
        entry->claimed->write_serial = 0;
    }
}

/* ---- going back ----------------------------------------------------------------------------------------------------- */

/* Brings one page of a layer where attend_refill() can read it; *@pages, *@offset, *@index say where. */
static int refill_source(KvStore *store, const KvBlock *block, uint32_t layer, uint32_t page, uint32_t place,
                         const GpuBuffer **pages, uint64_t *offset, uint32_t *index)
{
    uint32_t page_bytes = store->sizes.layout.page_bytes;

    if (block->arena->buffer) {
        *pages = block->arena->buffer;
        *offset = layer * block->arena->plane_bytes;
        *index = block->index * KV_BLOCK_PAGES + page;
        return 0;
    }
    *pages = store->fresh[0];
    *offset = 0;
    *index = place;
    return gpu_upload(store->gpu, GPU_QUEUE_COMPUTE, store->fresh[0], (uint64_t)place * page_bytes,
                      block->arena->memory + kv_block_offset(&store->arenas, block, layer, page), page_bytes, GPU_WAIT_NONE,
                      "kv refill", NULL);
}

/* Queues the refill of pages [first, end) of the sequence, at most two. */
static int queue_refill(KvCache *cache, uint32_t first, uint32_t end)
{
    KvStore *store = cache->store;
    AttendPack *packs = (AttendPack *)store->inputs_memory;
    int r = 0;

    for (uint32_t page = first; page < end && !r; page++)
        for (uint32_t l = 0; l < store->sizes.n_layers && !r; l++) {
            const KvBlock *block = cache->blocks[page / KV_BLOCK_PAGES];
            AttendLayer layer = kv_store_layer(store, l);
            const GpuBuffer *pages;
            uint64_t offset;
            uint32_t index, place = page - first;

            r = refill_source(store, block, l, page % KV_BLOCK_PAGES, place, &pages, &offset, &index);
            /* The record is the same for all layers: where the source differs by layer, only the offset does. */
            packs[place] = (AttendPack){.tail_slot = cache->tail->slot, .page = (int32_t)page, .to = index};
            if (!r && l == 0)
                r = gpu_upload(store->gpu, GPU_QUEUE_COMPUTE, store->inputs, place * sizeof(AttendPack), &packs[place],
                               sizeof(AttendPack), GPU_WAIT_NONE, "kv refill", NULL);
            if (!r)
                r = attend_refill(store->attend, &layer, store->inputs, place * sizeof(AttendPack), 1, pages, offset);
        }
    return r;
}

/* Reads the tail of a cache cropped to @length back from its pages, which still are those of the longer one. */
static int refill_tail(KvCache *cache, uint32_t length, ErrorDetail *reterr)
{
    KvStore *store = cache->store;
    uint32_t end;
    int r;

    r = kv_store_settle(store, reterr);
    if (r)
        return error_trace(r);
    kv_tails_next_pass(&store->tails);
    r = kv_tails_acquire(&store->tails, &cache->tail, reterr);
    if (r)
        return error_trace(r);
    end = MIN((length + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS, cache->length / KV_PAGE_TOKENS);
    r = queue_refill(cache, kv_packed_pages(length), end);
    if (!r)
        r = gpu_drain(store->gpu, KV_TIMEOUT_USEC, reterr);
    return error_trace(kv_error(r));
}

/* The checkpoint to go back to for @n_keep: one that leads there exactly, else the longest before it; NULL: none. */
static const KvCheckpoint *find_checkpoint(const KvCache *cache, uint32_t n_keep, uint32_t *ret_length)
{
    const KvCheckpoint *best = NULL;

    for (uint32_t i = 0; i < cache->n_checkpoints; i++) {
        const KvCheckpoint *checkpoint = &cache->checkpoints[i];

        if (checkpoint->length <= n_keep) {
            best = checkpoint;
            *ret_length = checkpoint->length;
        } else if (checkpoint->length <= cache->length && checkpoint->tail_from <= tail_needed_from(n_keep)) {
            *ret_length = n_keep;
            return checkpoint;
        }
    }
    return best;
}

/* Unpacked forms.  Tokens after the last complete page are nowhere but in the tail. */
static int rewind_by_pages(KvCache *cache, uint32_t n_keep, ErrorDetail *reterr)
{
    uint32_t complete = cache->length / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
    int r;

    if (n_keep > complete && cache->tail_from > complete)
        n_keep = complete;
    r = refill_tail(cache, n_keep, reterr);
    if (r)
        return error_trace(r);
    drop_beyond(cache, n_keep);
    cache->tail_from = tail_needed_from(n_keep);
    return 0;
}

/* Goes back to @n_keep or less. */
static int rewind_cache(KvCache *cache, uint32_t n_keep, ErrorDetail *reterr)
{
    KvStore *store = cache->store;
    const KvCheckpoint *checkpoint;
    uint32_t length = 0;
    KvTail *tail;

    if (n_keep == 0 || cache->tail_from <= tail_needed_from(n_keep)) {
        drop_beyond(cache, n_keep);
        return 0;
    }
    if (store->sizes.policy.form.kind != KV_FORM_LEAT)
        return rewind_by_pages(cache, n_keep, reterr);
    checkpoint = find_checkpoint(cache, n_keep, &length);
    if (checkpoint) {
        tail = kv_tail_new_from(&store->tails, checkpoint->saved);
        if (!tail)
            return error_origin(KV_E_HOST_MEMORY);
        cache->tail_from = checkpoint->tail_from;
        (void)kv_tail_unref(cache->tail);
        cache->tail = tail;
    }
    drop_beyond(cache, length);
    return 0;
}

int kv_cache_crop(KvCache *cache, uint32_t n_keep, uint32_t *ret_length, ErrorDetail *reterr)
{
    int r;

    if (cache->in_pass)
        return error_detail_set(reterr, -EBUSY, "cache: a sequence cannot be cropped in the middle of a pass");
    if (n_keep < cache->length) {
        r = rewind_cache(cache, n_keep, reterr);
        if (r)
            return error_trace(r);
        kv_store_trim(cache->store);
    }
    *ret_length = cache->length;
    return 0;
}

int kv_cache_recover(KvCache *cache, uint32_t end, ErrorDetail *reterr)
{
    uint32_t from = end > KV_TAIL_TOKENS ? end - KV_TAIL_TOKENS : 0;

    from = MIN(from, cache->length);
    cache->tail_from = MAX(cache->tail_from, from);
    return error_trace(rewind_cache(cache, cache->length, reterr));
}

/* ---- checkpoints and bytes -------------------------------------------------------------------------------------------- */

bool kv_store_drop_checkpoint(void *userdata)
{
    KvStore *store = userdata;
    KvCache *oldest = NULL;
    uint32_t index = 0;

    for (KvCache *cache = store->caches; cache; cache = cache->next)
        for (uint32_t i = 0; i < cache->n_checkpoints; i++)
            if (!oldest || cache->checkpoints[i].made < oldest->checkpoints[index].made) {
                oldest = cache;
                index = i;
            }
    if (!oldest)
        return false;
    for (KvCache *cache = store->caches; cache; cache = cache->next)
        kv_tail_forget(cache->tail, oldest->checkpoints[index].saved);
    drop_checkpoint(oldest, index);
    return true;
}

/* Of the checkpoints that are not among the newest, drops the one whose loss leaves the smallest gap. */
static void thin_checkpoints(KvCache *cache)
{
    uint32_t best = 0, best_gap = UINT32_MAX;

    for (uint32_t i = 0; i + KV_CHECKPOINTS_NEW < cache->n_checkpoints; i++) {
        uint32_t gap = cache->checkpoints[i + 1].length - (i > 0 ? cache->checkpoints[i - 1].length : 0);

        if (gap < best_gap) {
            best = i;
            best_gap = gap;
        }
    }
    drop_checkpoint(cache, best);
}

int kv_cache_checkpoint(KvCache *cache)
{
    KvSaved *saved;
    int r;

    if (cache->in_pass)
        return error_origin(-EBUSY);
    if (cache->length == 0 ||
        (cache->n_checkpoints > 0 && cache->checkpoints[cache->n_checkpoints - 1].length == cache->length &&
         cache->checkpoints[cache->n_checkpoints - 1].tail_from <= cache->tail_from))
        return 0;
    r = kv_tail_save(cache->tail, &saved, NULL);
    if (r)
        return error_trace(r);
    if (cache->n_checkpoints == KV_CHECKPOINTS_MAX)
        thin_checkpoints(cache);
    cache->checkpoints[cache->n_checkpoints++] = (KvCheckpoint){
        .length = cache->length, .tail_from = cache->tail_from, .made = ++cache->store->made, .saved = saved};
    return 0;
}

void kv_cache_bytes(const KvCache *cache, KvBytes *ret)
{
    const KvStore *store = cache->store;
    uint64_t pages = (is_fixed(store) ? store->sizes.max_blocks : cache->n_blocks) * store->sizes.block_bytes;
    bool host = store->sizes.policy.home == KV_HOME_HOST;

    *ret = (KvBytes){
        .host = host ? pages : 0,
        .device = host ? 0 : pages,
        .staging = store->sizes.plan.staging_bytes,
        .checkpoints = cache->n_checkpoints * store->tails.slot_bytes,
        .n_pages = cache->length / KV_PAGE_TOKENS,
        .length = cache->length,
    };
    if (cache->tail && cache->tail->slot >= 0)
        ret->device += store->tails.slot_bytes;
    else if (cache->tail)
        ret->host += store->tails.slot_bytes;
    for (uint32_t p = 0; p < ret->n_pages; p++)
        ret->n_pages_shared += cache->blocks[p / KV_BLOCK_PAGES]->n_refs > 1;
}
