/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints: saved tails to crop back to. */

#include "cache/kv-store-internal.h"

bool kv_store_drop_checkpoint(void *userdata)
{
    KvStore *store = userdata;
    KvPast *oldest = NULL;
    uint32_t index = 0;

    for (KvCache *cache = store->caches; cache; cache = cache->next)
        for (uint32_t i = 0; i < cache->past->n_checkpoints; i++)
            if (!oldest || cache->past->checkpoints[i]->made < oldest->checkpoints[index]->made) {
                oldest = cache->past;
                index = i;
            }
    if (!oldest)
        return false;
    for (KvCache *cache = store->caches; cache; cache = cache->next)
        kv_tail_forget(cache->past->tail, oldest->checkpoints[index]->saved);
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
        if (newest->tail_from[s] > past->sections[s].tail_from)
            return false;
    return true;
}

int kv_cache_checkpoint(KvCache *cache)
{
    KvStore *store = cache->store;
    KvPast *past = cache->past;
    KvCheckpoint *checkpoint;
    int r;

    if (cache->in_pass)
        return error_origin(-EBUSY);
    if (past->length == 0 || is_saved(past))
        return 0;
    checkpoint = malloc(sizeof(*checkpoint) + store->sizes.n_sections * sizeof(uint32_t));
    if (!checkpoint)
        return error_origin(KV_E_HOST_MEMORY);
    r = kv_tail_save(past->tail, &checkpoint->saved, NULL);
    if (r) {
        free(checkpoint);
        return error_trace(r);
    }
    if (past->n_checkpoints == KV_CHECKPOINTS_MAX)
        thin_checkpoints(past);
    checkpoint->length = past->length;
    checkpoint->made = ++store->made;
    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        checkpoint->tail_from[s] = past->sections[s].tail_from;
    past->checkpoints[past->n_checkpoints++] = checkpoint;
    return 0;
}
