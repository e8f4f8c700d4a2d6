/* SPDX-License-Identifier: Apache-2.0 */
/* Room for a pass: new blocks, and the incomplete last block made writable. */

#include "cache/kv-store-internal.h"

#include <string.h>

/* Pages [@first, @end) of a plane from one block to another. */
static int copy_plane(KvStore *store, uint32_t layer, const KvBlock *from, KvBlock *to, uint32_t first, uint32_t end)
{
    const KvLayerPlace *place = &store->sizes.layers[layer];
    uint32_t page_bytes = store->sizes.sections[place->section].layout.page_bytes, n;
    GpuEvent *event;
    int r;

    for (; first < end; first += n) {
        uint64_t source = kv_block_offset(from, place->plane, first), target = kv_block_offset(to, place->plane, first);

        n = MIN(kv_block_run(from, first, end), kv_block_run(to, first, end));
        event = NULL;
        r = kv_arena_copy(store->gpu, GPU_QUEUE_DOWNLOAD, from->arena, source, to->arena, target, (uint64_t)n * page_bytes, "kv unshare",
                          &event);
        if (r)
            return error_trace(kv_error(r));
        if (event)
            kv_store_set_home(store, layer, event);
    }
    return 0;
}

/* Copies the first @n_pages of a block that others go on using.  The device's copies run in the order of pages going home. */
static int copy_block(KvStore *store, uint32_t s, const KvBlock *from, KvBlock *to, uint32_t n_pages, ErrorDetail *reterr)
{
    int r = 0;

    /* On the host nothing orders this copy against pages that still travel: to @from, or to what @to was before. */
    if (!from->arena->buffer || !to->arena->buffer)
        r = kv_store_settle(store, reterr);
    for (uint32_t l = 0; l < store->sizes.n_layers && !r; l++)
        if (store->sizes.layers[l].section == s && store->sizes.layers[l].owner == l)
            r = copy_plane(store, l, from, to, from->first_page, n_pages);
    to->serial = store->serial;
    return error_trace(r);
}

/* A block; where windows are kept for checkpoints, the oldest of these give way first. */
static int take_block(KvStore *store, uint32_t s, const KvSectionPast *past, uint32_t index, uint32_t first_page, uint32_t n_filled,
                      KvBlock **ret, ErrorDetail *reterr)
{
    const KvBlock *after = index > past->first_block ? past->blocks[index - 1] : NULL;
    int r;

    do
        r = kv_section_take(&store->sections[s], after, first_page, n_filled, ret, reterr);
    while (r == KV_E_DEVICE_MEMORY && kv_section_is_windowed(&store->sections[s]) && kv_store_drop_checkpoint(store));
    return error_trace(r);
}

/* Makes the incomplete last block, of which the sequence has @n_pages, writable up to @n_filled. */
static int claim_block(KvStore *store, uint32_t s, KvSectionPast *past, KvEntrySection *entry, uint32_t n_pages, uint32_t n_filled,
                       ErrorDetail *reterr)
{
    KvBlock **block = &past->blocks[past->n_blocks - 1], *copy;
    int r;

    if (((*block)->n_refs == 1 || (*block)->n_filled == n_pages) && kv_block_can_grow(*block, n_filled)) {
        r = kv_block_grow(*block, n_filled, reterr);
        if (r)
            return error_trace(r);
    } else {
        r = take_block(store, s, past, past->n_blocks - 1, (*block)->first_page, n_filled, &copy, reterr);
        if (r)
            return error_trace(r);
        r = copy_block(store, s, *block, copy, n_pages, reterr);
        if (r) {
            (void)kv_block_unref(copy);
            return error_trace(r);
        }
        (void)kv_block_unref(*block);
        *block = copy;
    }
    entry->claimed = *block;
    return 0;
}

static int grow_section(KvCache *cache, uint32_t s, KvPassEntry *entry, ErrorDetail *reterr)
{
    KvStore *store = cache->store;
    KvSectionPast *past = &cache->past->sections[s];
    uint32_t length = kv_past_tokens(cache->past, s), home = length / KV_PAGE_TOKENS, end = (length + entry->n_tokens) / KV_PAGE_TOKENS;
    uint32_t n_blocks = kv_blocks_of(length + entry->n_tokens);
    int r;

    if (end == home)
        return 0;
    if (home % KV_BLOCK_PAGES != 0) {
        r = claim_block(store, s, past, &entry->sections[s], home % KV_BLOCK_PAGES,
                        MIN(end - home / KV_BLOCK_PAGES * KV_BLOCK_PAGES, (uint32_t)KV_BLOCK_PAGES), reterr);
        if (r)
            return error_trace(r);
    }
    for (; past->n_blocks < n_blocks; past->n_blocks++) {
        r = take_block(store, s, past, past->n_blocks, 0, MIN(end - past->n_blocks * KV_BLOCK_PAGES, (uint32_t)KV_BLOCK_PAGES),
                       &past->blocks[past->n_blocks], reterr);
        if (r)
            return error_trace(r);
    }
    for (uint32_t b = home / KV_BLOCK_PAGES; b < n_blocks; b++)
        past->blocks[b]->write_serial = store->serial;
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
        if (kv_section_is_cross(&cache->store->sections[s]) != cache->store->pass.cross)
            continue;
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

            *block = kv_block_unref(*block);
        }
        if (section->claimed) {
            kv_block_shrink(section->claimed, section->claimed->first_page,
                             kv_past_tokens(cache->past, s) / KV_PAGE_TOKENS % KV_BLOCK_PAGES);
            section->claimed->write_serial = 0;
        }
    }
}
