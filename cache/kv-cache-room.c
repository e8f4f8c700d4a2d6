/* SPDX-License-Identifier: Apache-2.0 */
/* Room for a pass: new blocks, and the incomplete last block made writable. */

#include "cache/kv-store-internal.h"

#include <string.h>

/* Pages of a plane from one block to another. */
static int copy_plane(KvStore *store, uint32_t layer, const KvBlock *from, KvBlock *to, uint32_t n_pages)
{
    const KvLayerPlace *place = &store->sizes.layers[layer];
    const KvArenas *arenas = &store->sections[place->section].arenas;
    uint64_t source = kv_block_offset(arenas, from, place->plane, 0), target = kv_block_offset(arenas, to, place->plane, 0);
    uint64_t bytes = (uint64_t)n_pages * arenas->options.page_bytes;
    GpuEvent *event;
    int r;

    if (!from->arena->buffer) {
        memcpy(to->arena->memory + target, from->arena->memory + source, bytes);
        return 0;
    }
    r = gpu_copy(store->gpu, GPU_QUEUE_DOWNLOAD, to->arena->buffer, target, from->arena->buffer, source, bytes, GPU_WAIT_NONE,
                 "kv unshare", &event);
    if (r)
        return error_trace(kv_error(r));
    kv_store_set_home(store, layer, event);
    return 0;
}

/* Copies the first @n_pages of a block that others go on using.  The device's copies run in the order of pages going home. */
static int copy_block(KvStore *store, uint32_t s, const KvBlock *from, KvBlock *to, uint32_t n_pages, ErrorDetail *reterr)
{
    int r = 0;

    /* On the host nothing orders this copy against pages that still travel: to @from, or to what @to was before. */
    if (!from->arena->buffer)
        r = kv_store_settle(store, reterr);
    else
        store->home_serial = store->serial;
    for (uint32_t l = 0; l < store->sizes.n_layers && !r; l++)
        if (store->sizes.layers[l].section == s && store->sizes.layers[l].owner == l)
            r = copy_plane(store, l, from, to, n_pages);
    to->serial = store->serial;
    return error_trace(r);
}

/* Makes the incomplete last block writable. */
static int claim_block(KvStore *store, uint32_t s, KvSectionPast *past, KvEntrySection *entry, uint32_t n_pages, ErrorDetail *reterr)
{
    KvArenas *arenas = &store->sections[s].arenas;
    KvBlock **block = &past->blocks[past->n_blocks - 1], *copy;
    int r;

    if ((*block)->n_refs > 1 && (*block)->n_filled != n_pages) {
        r = kv_arenas_take(arenas, past->n_blocks > 1 ? past->blocks[past->n_blocks - 2] : NULL, &copy, reterr);
        if (r)
            return error_trace(r);
        r = copy_block(store, s, *block, copy, n_pages, reterr);
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

static int grow_section(KvCache *cache, uint32_t s, KvPassEntry *entry, ErrorDetail *reterr)
{
    KvStore *store = cache->store;
    KvSectionPast *past = &cache->past->sections[s];
    uint32_t length = cache->past->length, home = length / KV_PAGE_TOKENS, end = (length + entry->n_tokens) / KV_PAGE_TOKENS;
    uint32_t n_blocks = kv_blocks_of(length + entry->n_tokens);
    int r;

    if (end == home)
        return 0;
    if (home % KV_BLOCK_PAGES != 0) {
        r = claim_block(store, s, past, &entry->sections[s], home % KV_BLOCK_PAGES, reterr);
        if (r)
            return error_trace(r);
    }
    while (past->n_blocks < n_blocks) {
        const KvBlock *last = past->n_blocks > 0 ? past->blocks[past->n_blocks - 1] : NULL;

        r = kv_arenas_take(&store->sections[s].arenas, last, &past->blocks[past->n_blocks], reterr);
        if (r)
            return error_trace(r);
        past->n_blocks++;
    }
    for (uint32_t b = home / KV_BLOCK_PAGES; b < n_blocks; b++) {
        past->blocks[b]->n_filled = MIN(end - b * KV_BLOCK_PAGES, (uint32_t)KV_BLOCK_PAGES);
        past->blocks[b]->write_serial = store->serial;
    }
    return 0;
}

int kv_cache_grow(KvCache *cache, KvPassEntry *entry, ErrorDetail *reterr)
{
    uint32_t n_sections = cache->store->sizes.n_sections;
    int r;

    entry->cache = cache;
    for (uint32_t s = 0; s < n_sections; s++)
        entry->sections[s] = (KvEntrySection){.n_blocks_before = cache->past->sections[s].n_blocks};
    for (uint32_t s = 0; s < n_sections; s++) {
        r = grow_section(cache, s, entry, reterr);
        if (r)
            return error_trace(r);
    }
    return 0;
}

void kv_cache_shrink(KvPassEntry *entry)
{
    KvCache *cache = entry->cache;

    for (uint32_t s = 0; s < cache->store->sizes.n_sections; s++) {
        KvSectionPast *past = &cache->past->sections[s];
        KvEntrySection *section = &entry->sections[s];

        while (past->n_blocks > section->n_blocks_before) {
            KvBlock **block = &past->blocks[--past->n_blocks];

            *block = kv_arenas_unref(&cache->store->sections[s].arenas, *block);
        }
        if (section->claimed) {
            section->claimed->n_filled = cache->past->length / KV_PAGE_TOKENS % KV_BLOCK_PAGES;
            section->claimed->write_serial = 0;
        }
    }
}
