/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints: saved tails to crop back to. */

#include "cache/kv-store-internal.h"

bool kv_store_drop_checkpoint(void *userdata)
{
    KvStore *store = userdata;
    KvPast *oldest = NULL;
    uint32_t index = 0;

    for (KvCache *cache = store->caches; cache; cache = cache->next)
        for (uint32_t i = 0; cache->past && i < cache->past->n_checkpoints; i++)
            if (!oldest || cache->past->checkpoints[i]->made < oldest->checkpoints[index]->made) {
                oldest = cache->past;
                index = i;
            }
    if (!oldest)
        return false;
    for (KvCache *cache = store->caches; cache; cache = cache->next) {
        kv_tail_forget(cache->past->tail, oldest->checkpoints[index]->saved);
        kv_tail_forget(cache->past->states.now, oldest->checkpoints[index]->state);
    }
    kv_past_drop_checkpoint(oldest, index);
    return true;
}

/* Of the checkpoints that are not among the newest, drops the one whose loss leaves the smallest gap. */
static void thin_checkpoints(KvPast *past)
{
    uint32_t best = 0, best_gap = UINT32_MAX;

    for (uint32_t i = 0; i + KV_CHECKPOINTS_NEW < past->n_checkpoints; i++) {
        uint32_t gap = past->checkpoints[i + 1]->length - (i > 0 ? past->checkpoints[i - 1]->length : 0);

        if (gap < best_gap) {
            best = i;
            best_gap = gap;
        }
    }
    kv_past_drop_checkpoint(past, best);
}

/* Whether the newest checkpoint is all that the tail now is. */
static bool is_saved(const KvPast *past)
{
    const KvCheckpoint *newest = past->n_checkpoints > 0 ? past->checkpoints[past->n_checkpoints - 1] : NULL;

    if (!newest || newest->length != past->length)
        return false;
    for (uint32_t s = 0; s < past->store->sizes.n_sections; s++)
        if (newest->marks[s].tail_from > past->sections[s].tail_from || newest->marks[s].first_block > past->sections[s].first_block)
            return false;
    return true;
}

static int fill_mark(KvMark *mark, const KvSectionPast *from, bool windowed)
{
    *mark = (KvMark){.tail_from = from->tail_from, .first_block = from->first_block, .n_blocks = from->n_blocks};
    if (!windowed)
        return 0;
    mark->blocks = calloc(MAX(from->n_blocks - from->first_block, 1u), sizeof(KvBlock *));
    if (!mark->blocks)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t b = from->first_block; b < from->n_blocks; b++)
        mark->blocks[b - from->first_block] = kv_block_ref(from->blocks[b]);
    return 0;
}

static int fill_checkpoint(const KvPast *past, KvCheckpoint *checkpoint, ErrorDetail *reterr)
{
    KvStore *store = past->store;
    int r;

    checkpoint->length = past->length;
    checkpoint->made = ++store->made;
    r = kv_tail_save(past->tail, &checkpoint->saved, reterr);
    if (!r && past->states.now)
        r = kv_tail_save(past->states.now, &checkpoint->state, reterr);
    for (uint32_t s = 0; s < store->sizes.n_sections && !r; s++)
        r = fill_mark(&checkpoint->marks[s], &past->sections[s], kv_section_is_windowed(&store->sections[s]));
    return error_trace(r);
}

static int make_checkpoint(KvPast *past, bool recorded, ErrorDetail *reterr)
{
    KvStore *store = past->store;
    KvCheckpoint *checkpoint;
    int r;

    if (past->length == 0)
        return 0;
    if (is_saved(past)) {
        past->checkpoints[past->n_checkpoints - 1]->recorded &= recorded;
        return 0;
    }
    checkpoint = kv_checkpoint_new(store);
    if (!checkpoint)
        return error_detail_set(reterr, error_origin(KV_E_HOST_MEMORY), "cache: no memory for a checkpoint");
    r = fill_checkpoint(past, checkpoint, reterr);
    if (r) {
        (void)kv_checkpoint_free(store, checkpoint);
        return error_trace(r);
    }
    if (past->n_checkpoints == KV_CHECKPOINTS_MAX)
        thin_checkpoints(past);
    checkpoint->recorded = recorded;
    past->checkpoints[past->n_checkpoints++] = checkpoint;
    return 0;
}

int kv_cache_checkpoint(KvCache *cache)
{
    if (cache->in_pass)
        return error_origin(-EBUSY);
    if (cache->past->host) /* any place can be gone back to */
        return 0;
    return error_trace(make_checkpoint(cache->past, false, NULL));
}

/* Whether, of the lengths from @record_from on, one needs a position that the ring has now and will not have when it ends at @end. */
static bool loses_recorded(const KvSection *section, const KvSectionPast *own, const KvPast *past, uint32_t end)
{
    uint32_t from = MAX(own->tail_from, kv_needed_from(section, past->record_from)), ring = kv_ring_tokens(section->sizes->attend.form);

    from = (from + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
    return from <= kv_needed_from(section, past->length) && end > ring && from < end - ring;
}

int kv_cache_save_recorded(KvCache *cache, uint32_t n_tokens, ErrorDetail *reterr)
{
    KvPast *past = cache->past;

    for (uint32_t s = 0; s < past->store->sizes.n_sections; s++) {
        const KvSection *section = &past->store->sections[s];

        if (kv_section_is_packed(section) && !kv_section_is_cross(section) &&
            loses_recorded(section, &past->sections[s], past, past->length + n_tokens))
            return error_trace(make_checkpoint(past, true, reterr));
    }
    return 0;
}
