/* SPDX-License-Identifier: Apache-2.0 */
/* A past without a pass: what attention costs does not depend on what it reads. */

#include "cache/kv-store-internal.h"

#include <string.h>

/* Pages [@first, @end) of a block in every plane. */
static int blank_block(KvStore *store, const KvSection *section, const KvBlock *block, uint32_t first, uint32_t end)
{
    uint32_t page_bytes = section->sizes->layout.page_bytes, n;
    int r = 0;

    for (; first < end && !r; first += n) {
        n = kv_block_run(block, first, end);
        for (uint32_t plane = 0; plane < section->sizes->n_planes && !r; plane++) {
            uint64_t offset = kv_block_offset(block, plane, first), bytes = (uint64_t)n * page_bytes;

            if (block->arena->memory)
                memset(block->arena->memory + offset, 0, bytes);
            else
                r = kv_error(gpu_fill_zero(store->gpu, GPU_QUEUE_COMPUTE, block->arena->buffer, offset, bytes));
        }
    }
    return error_trace(r);
}

/* The pages that the pass in progress completes. */
static int blank_pages(const KvCache *cache, uint32_t n_tokens)
{
    KvStore *store = cache->store;
    int r = 0;

    for (uint32_t s = 0; s < store->sizes.n_sections && !r; s++) {
        const KvSectionPast *past = &cache->past->sections[s];
        uint32_t length = kv_past_tokens(cache->past, s), home = length / KV_PAGE_TOKENS, end = (length + n_tokens) / KV_PAGE_TOKENS;

        for (uint32_t page = home, next; page < end && !r; page = next) {
            uint32_t b = page / KV_BLOCK_PAGES, base = b * KV_BLOCK_PAGES;

            next = MIN(end, base + KV_BLOCK_PAGES);
            r = blank_block(store, &store->sections[s], past->blocks[b], page - base, next - base);
        }
    }
    return error_trace(r);
}

static int add_some(KvCache *cache, uint32_t n_tokens, ErrorDetail *reterr)
{
    KvStore *store = cache->store;
    KvPassItem item = {cache, n_tokens};
    KvPass *pass = NULL;
    int r = kv_error(gpu_step_begin(store->gpu));

    if (!r)
        r = kv_pass_begin(store, &item, 1, &pass, reterr);
    if (r)
        return error_trace(r);
    r = blank_pages(cache, n_tokens);
    if (!r)
        r = kv_tails_zero(&store->tails, cache->past->tail);
    if (!r)
        r = kv_error(gpu_step_finish(store->gpu, reterr));
    if (r) {
        (void)kv_pass_abort(pass);
        return error_trace(r);
    }
    pass->n_layers_done = store->sizes.n_layers;
    return kv_pass_commit(pass);
}

int kv_cache_add_blank(KvCache *cache, uint32_t n_tokens, ErrorDetail *reterr)
{
    const KvStore *store = cache->store;
    int r = 0;

    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        if (kv_section_is_cross(&store->sections[s]) || kv_section_is_windowed(&store->sections[s]))
            return error_detail_set(reterr, -ENOTSUP, "cache: only layers that keep everything can have a blank past");
    if (store->host || store->states.n_slots > 0 || cache->past->recording)
        return error_detail_set(reterr, -ENOTSUP, "cache: no blank past in compatibility mode, beside states, or while it is recorded");
    if (n_tokens > store->sizes.policy.max_cache_tokens - cache->past->length)
        return error_detail_set(reterr, KV_E_CONTEXT, "cache: %u tokens after %u exceed its %u", n_tokens, cache->past->length,
                                store->sizes.policy.max_cache_tokens);
    for (uint32_t n; n_tokens > 0 && !r; n_tokens -= n) {
        n = MIN(n_tokens, store->sizes.max_rows);
        r = add_some(cache, n, reterr);
    }
    return error_trace(r);
}
