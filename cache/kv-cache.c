/* SPDX-License-Identifier: Apache-2.0 */
/* One sequence's past: its life, forks, bytes. */

#include "cache/kv-store-internal.h"

#include <string.h>

KvPast *kv_past_new(KvStore *store)
{
    const KvSizes *sizes = &store->sizes;
    size_t bytes = sizeof(KvPast) + sizes->n_sections * sizeof(KvSectionPast);
    KvBlock **blocks;
    KvPast *past;

    for (uint32_t s = 0; s < sizes->n_sections; s++)
        bytes += sizes->sections[s].max_blocks * sizeof(KvBlock *);
    past = calloc(1, bytes);
    if (!past)
        return NULL;
    past->store = store;
    blocks = (KvBlock **)&past->sections[sizes->n_sections];
    for (uint32_t s = 0; s < sizes->n_sections; s++) {
        past->sections[s].blocks = blocks;
        blocks += sizes->sections[s].max_blocks;
    }
    return past;
}

KvPast *kv_past_copy(const KvPast *from)
{
    const KvStore *store = from->store;
    size_t checkpoint_bytes = sizeof(KvCheckpoint) + store->sizes.n_sections * sizeof(uint32_t);
    KvPast *past = kv_past_new(from->store);

    if (!past)
        return NULL;
    for (uint32_t i = 0; i < from->n_checkpoints; i++) {
        past->checkpoints[i] = malloc(checkpoint_bytes);
        if (!past->checkpoints[i])
            return kv_past_free(past);
        memcpy(past->checkpoints[i], from->checkpoints[i], checkpoint_bytes);
        (void)kv_saved_ref(past->checkpoints[i]->saved);
        past->n_checkpoints++;
    }
    past->length = from->length;
    past->tail = kv_tail_ref(from->tail);
    for (uint32_t s = 0; s < store->sizes.n_sections; s++) {
        past->sections[s].tail_from = from->sections[s].tail_from;
        past->sections[s].n_blocks = from->sections[s].n_blocks;
        for (uint32_t b = 0; b < from->sections[s].n_blocks; b++)
            past->sections[s].blocks[b] = kv_block_ref(from->sections[s].blocks[b]);
    }
    return past;
}

void kv_past_drop_checkpoint(KvPast *past, uint32_t index)
{
    KvCheckpoint *checkpoint = past->checkpoints[index];

    past->n_checkpoints--;
    memmove(&past->checkpoints[index], &past->checkpoints[index + 1],
            (past->n_checkpoints - index) * sizeof(past->checkpoints[0]));
    (void)kv_saved_unref(checkpoint->saved);
    free(checkpoint);
}

void kv_past_drop_beyond(KvPast *past, uint32_t length)
{
    KvStore *store = past->store;

    for (uint32_t s = 0; s < store->sizes.n_sections; s++) {
        KvSectionPast *section = &past->sections[s];

        while (section->n_blocks > kv_blocks_of(length)) {
            KvBlock **block = &section->blocks[--section->n_blocks];

            *block = kv_arenas_unref(&store->sections[s].arenas, *block);
        }
        if (length == 0)
            section->tail_from = 0;
    }
    while (past->n_checkpoints > 0 && past->checkpoints[past->n_checkpoints - 1]->length > length)
        kv_past_drop_checkpoint(past, past->n_checkpoints - 1);
    past->length = length;
    if (length == 0)
        past->tail = kv_tail_unref(past->tail);
}

KvPast *kv_past_free(KvPast *past)
{
    if (past)
        kv_past_drop_beyond(past, 0);
    free(past);
    return NULL;
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
    *cache = (KvCache){.store = store, .next = store->caches, .past = past};
    if (cache->next)
        cache->next->previous = cache;
    store->caches = cache;
    store->n_caches++;
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
    if (cache->next)
        cache->next->previous = cache->previous;
    if (cache->previous)
        cache->previous->next = cache->next;
    else
        store->caches = cache->next;
    store->n_caches--;
    kv_store_trim(store);
    free(cache);
    return NULL;
}

int kv_cache_clear(KvCache *cache)
{
    if (cache->in_pass)
        return error_origin(-EBUSY);
    kv_past_drop_beyond(cache->past, 0);
    kv_store_trim(cache->store);
    return 0;
}

uint32_t kv_cache_length(const KvCache *cache)
{
    return cache->past->length;
}

/* A page counts once, whatever the number of sections; it is shared when all of it is. */
static uint32_t shared_pages(const KvPast *past)
{
    uint32_t n = 0;

    for (uint32_t p = 0; p < past->length / KV_PAGE_TOKENS; p++) {
        bool shared = true;

        for (uint32_t s = 0; s < past->store->sizes.n_sections; s++)
            shared = shared && past->sections[s].blocks[p / KV_BLOCK_PAGES]->n_refs > 1;
        n += shared;
    }
    return n;
}

void kv_cache_bytes(const KvCache *cache, KvBytes *ret)
{
    const KvStore *store = cache->store;
    const KvPast *past = cache->past;

    *ret = (KvBytes){
        .staging = store->sizes.plan.staging_bytes,
        .checkpoints = past->n_checkpoints * store->tails.slot_bytes,
        .n_pages = past->length / KV_PAGE_TOKENS,
        .n_pages_shared = shared_pages(past),
        .length = past->length,
    };
    for (uint32_t s = 0; s < store->sizes.n_sections; s++) {
        const KvSectionSizes *sizes = store->sections[s].sizes;
        bool fixed = store->sizes.policy.growth == KV_GROWTH_STATIC;
        uint64_t bytes = (fixed ? sizes->max_blocks : past->sections[s].n_blocks) * sizes->block_bytes;

        *(sizes->home == KV_HOME_HOST ? &ret->host : &ret->device) += bytes;
    }
    if (past->tail)
        *(past->tail->slot >= 0 ? &ret->device : &ret->host) += store->tails.slot_bytes;
}
