/* SPDX-License-Identifier: Apache-2.0 */
/* One sequence's past: its life, forks, bytes. */

#include "cache/kv-store-internal.h"

void kv_cache_link(KvCache *cache, KvStore *store)
{
    cache->store = store;
    cache->previous = NULL;
    cache->next = store->caches;
    if (cache->next)
        cache->next->previous = cache;
    store->caches = cache;
    store->n_caches++;
}

void kv_cache_unlink(KvCache *cache)
{
    if (cache->next)
        cache->next->previous = cache->previous;
    if (cache->previous)
        cache->previous->next = cache->next;
    else
        cache->store->caches = cache->next;
    cache->store->n_caches--;
}

/* Takes @past, on success. */
static int cache_new(KvStore *store, KvPast *past, KvCache **ret, ErrorDetail *reterr)
{
    KvCache *cache;
    int r;

    cache = past ? calloc(1, sizeof(*cache)) : NULL;
    if (!cache)
        return error_origin(KV_E_HOST_MEMORY);
    r = kv_store_reserve(store, reterr);
    if (r) {
        free(cache);
        return error_trace(r);
    }
    cache->past = past;
    kv_cache_link(cache, store);
    *ret = cache;
    return 0;
}

int kv_cache_new(KvStore *store, KvCache **ret, ErrorDetail *reterr)
{
    KvPast *past = kv_past_new(store);
    int r = cache_new(store, past, ret, reterr);

    if (r)
        (void)kv_past_free(past);
    return error_trace(r);
}

int kv_cache_fork(KvCache *cache, KvCache **ret, ErrorDetail *reterr)
{
    KvPast *past;
    int r;

    if (cache->in_pass)
        return error_detail_set(reterr, -EBUSY, "cache: a sequence cannot be forked in the middle of a pass");
    past = kv_past_copy(cache->past);
    r = cache_new(cache->store, past, ret, reterr);
    if (r)
        (void)kv_past_free(past);
    return error_trace(r);
}

KvCache *kv_cache_free(KvCache *cache)
{
    KvStore *store;

    if (!cache)
        return NULL;
    store = cache->store;
    (void)kv_past_free(cache->past);
    kv_store_unreserve(store);
    kv_cache_unlink(cache);
    kv_store_trim(store);
    free(cache);
    return NULL;
}

int kv_cache_clear(KvCache *cache)
{
    if (cache->in_pass)
        return error_origin(-EBUSY);
    kv_past_clear(cache->past);
    kv_store_trim(cache->store);
    return 0;
}

uint32_t kv_cache_length(const KvCache *cache)
{
    return cache->past->length;
}

uint32_t kv_cache_cross_length(const KvCache *cache)
{
    return cache->past->cross_length;
}

bool kv_cache_is_as_cold(const KvCache *cache)
{
    return !cache->past->host || kv_host_past_pending(cache->past->host) == cache->past->length;
}

void kv_cache_set_more(KvCache *cache, bool more)
{
    cache->more = more;
}

int kv_cache_record(KvCache *cache, bool on)
{
    KvPast *past = cache->past;

    if (cache->in_pass)
        return error_origin(-EBUSY);
    if (past->recording == on)
        return 0;
    past->record_from = past->length;
    past->recording = on;
    if (on)
        return 0;
    kv_past_drop_recorded(past);
    kv_store_trim(cache->store);
    return 0;
}

/* A page counts once, whatever the number of sections; it is shared when all that is still there of it is. */
static uint32_t shared_pages(const KvPast *past)
{
    uint32_t n = 0;

    for (uint32_t p = 0; p < past->length / KV_PAGE_TOKENS; p++) {
        bool shared = true;

        for (uint32_t s = 0; s < past->store->sizes.n_sections; s++)
            if (!kv_section_is_cross(&past->store->sections[s]) && p / KV_BLOCK_PAGES >= past->sections[s].first_block)
                shared = shared && past->sections[s].blocks[p / KV_BLOCK_PAGES]->n_refs > 1;
        n += shared;
    }
    return n;
}

/* Pages of a section, and of these the resident ones. */
static uint32_t own_pages(const KvPast *past, uint32_t s, uint32_t *ret_resident)
{
    const KvSectionPast *section = &past->sections[s];
    uint32_t end = kv_past_tokens(past, s) / KV_PAGE_TOKENS, n = 0;

    *ret_resident = 0;
    for (uint32_t b = section->first_block; b < section->n_blocks; b++) {
        const KvBlock *block = section->blocks[b];
        uint32_t pages = MIN(end - b * KV_BLOCK_PAGES, (uint32_t)KV_BLOCK_PAGES) - block->first_page;

        n += pages;
        if (block->arena->owner == &past->store->sections[s].resident)
            *ret_resident += pages;
    }
    return n;
}

static uint64_t checkpoint_bytes(const KvPast *past)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < past->n_checkpoints; i++)
        bytes += past->store->tails.slot_bytes + (past->checkpoints[i]->state ? past->store->states.slot_bytes : 0);
    return bytes;
}

static void count_tail(const KvTail *tail, uint64_t slot_bytes, KvBytes *bytes)
{
    if (tail)
        *(tail->slot >= 0 ? &bytes->device : &bytes->host) += slot_bytes;
}

void kv_cache_bytes(const KvCache *cache, KvBytes *ret)
{
    const KvStore *store = cache->store;
    const KvPast *past = cache->past;

    *ret = (KvBytes){
        .staging = store->sizes.plan.staging_bytes,
        .checkpoints = checkpoint_bytes(past),
        .n_pages = past->host ? 0 : past->length / KV_PAGE_TOKENS,
        .n_pages_shared = past->host ? 0 : shared_pages(past),
        .length = past->length,
    };
    for (uint32_t s = 0; s < store->sizes.n_sections; s++) {
        const KvSectionSizes *sizes = store->sections[s].sizes;
        uint32_t resident, n = own_pages(past, s, &resident) - resident;

        if (store->sizes.policy.growth == KV_GROWTH_STATIC)
            n = MAX(n, sizes->held_pages);
        *(sizes->home == KV_HOME_HOST ? &ret->host : &ret->device) += n * sizes->page_bytes;
        ret->device += resident * sizes->page_bytes;
    }
    if (past->host)
        ret->host += kv_host_past_bytes(past->host);
    count_tail(past->tail, store->tails.slot_bytes, ret);
    count_tail(past->states.now, store->states.slot_bytes, ret);
    for (uint32_t i = 0; i < past->states.n_snapshots; i++)
        count_tail(past->states.snapshots[i].state, store->states.slot_bytes, ret);
}
