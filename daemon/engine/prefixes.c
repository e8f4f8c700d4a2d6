/* SPDX-License-Identifier: Apache-2.0 */
/* The prefix store: a list per store of caches, by last use. */

#include "daemon/engine/prefixes.h"
#include "daemon/engine/mailbox.h"
#include "daemon/engine/session.h"

#include <string.h>

struct Prefix {
    Prefix *next;
    uint64_t owner; /* 0: everyone's */
    KvCache *cache;
    uint64_t last_used_usec;
    size_t n;
    int32_t ids[];
};

static void prefix_free(Prefix *prefix)
{
    kv_cache_free(prefix->cache);
    free(prefix);
}

static void prefixes_remove(Prefixes *prefixes, Prefix **at)
{
    Prefix *prefix = *at;

    *at = prefix->next;
    prefixes->n--;
    prefix_free(prefix);
}

/* A fork of @prefix's past cropped to @keep; NULL when nothing worth it is left, which a packed past without a place to go back to is. */
static KvCache *fork_cropped(const Prefix *prefix, size_t keep)
{
    _cleanup_(kv_cache_freep) KvCache *cache = NULL;
    uint32_t length = 0;

    if (kv_cache_fork(prefix->cache, &cache, NULL) != 0 || kv_cache_crop(cache, (uint32_t)keep, &length, NULL) != 0)
        return NULL;
    return length >= PREFIXES_MIN_TOKENS ? TAKE_PTR(cache) : NULL;
}

size_t prefixes_fork(Prefixes *prefixes, uint64_t owner, const int32_t *ids, size_t n, KvCache **ret)
{
    KvCache *best = NULL;
    size_t most = 0;

    /* The logits of the last id are wanted, so that one is always run. */
    for (Prefix *prefix = prefixes->first; prefix && n > 0; prefix = prefix->next) {
        size_t common = prefix->owner == 0 || prefix->owner == owner ? ids_common_prefix(prefix->ids, prefix->n, ids, n - 1) : 0;
        KvCache *cache;

        most = MAX(most, common);
        if (common < PREFIXES_MIN_TOKENS || (best && common <= kv_cache_length(best)))
            continue;
        cache = fork_cropped(prefix, common);
        if (!cache)
            continue;
        if (best && kv_cache_length(cache) <= kv_cache_length(best)) {
            kv_cache_free(cache);
            continue;
        }
        kv_cache_free(best);
        best = cache;
        prefix->last_used_usec = now_usec();
    }
    *ret = best;
    return most;
}

void prefixes_keep(Prefixes *prefixes, uint64_t owner, const int32_t *ids, KvCache *cache, uint32_t max)
{
    size_t n = kv_cache_length(cache);
    Prefix *prefix;

    if (max == 0 || n < PREFIXES_MIN_TOKENS || !kv_cache_is_as_cold(cache))
        return;
    for (Prefix **at = &prefixes->first; *at;) {
        size_t common = (*at)->owner == owner ? ids_common_prefix((*at)->ids, (*at)->n, ids, n) : 0;

        if (common == n) {
            (*at)->last_used_usec = now_usec();
            return;
        }
        /* Everyone's are ends of prompts that come again as they are; an owner's is where a conversation was, and went on. */
        if (owner != 0 && common == (*at)->n && common > 0)
            prefixes_remove(prefixes, at);
        else
            at = &(*at)->next;
    }
    while (prefixes->n >= max)
        (void)prefixes_drop_oldest(prefixes);
    prefix = malloc(sizeof(*prefix) + n * sizeof(*ids));
    if (!prefix)
        return;
    *prefix = (Prefix){.next = prefixes->first, .owner = owner, .last_used_usec = now_usec(), .n = n};
    memcpy(prefix->ids, ids, n * sizeof(*ids));
    if (kv_cache_fork(cache, &prefix->cache, NULL) != 0) {
        free(prefix);
        return;
    }
    prefixes->first = prefix;
    prefixes->n++;
}

uint64_t prefixes_oldest_usec(const Prefixes *prefixes)
{
    uint64_t oldest = UINT64_MAX;

    for (const Prefix *prefix = prefixes->first; prefix; prefix = prefix->next)
        oldest = MIN(oldest, prefix->last_used_usec);
    return oldest;
}

bool prefixes_drop_oldest(Prefixes *prefixes)
{
    Prefix **oldest = NULL;

    for (Prefix **at = &prefixes->first; *at; at = &(*at)->next)
        if (!oldest || (*at)->last_used_usec <= (*oldest)->last_used_usec)
            oldest = at;
    if (!oldest)
        return false;
    prefixes_remove(prefixes, oldest);
    return true;
}

void prefixes_drop_owner(Prefixes *prefixes, uint64_t owner)
{
    for (Prefix **at = &prefixes->first; *at;)
        if ((*at)->owner == owner)
            prefixes_remove(prefixes, at);
        else
            at = &(*at)->next;
}

void prefixes_clear(Prefixes *prefixes)
{
    while (prefixes->first)
        prefixes_remove(prefixes, &prefixes->first);
}
