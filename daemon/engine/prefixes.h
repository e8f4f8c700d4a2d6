#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pasts that are kept for those who begin alike: forks of caches with the ids that they hold.  Pages are shared until somebody goes on
 * from them, so an entry costs its pages once however many use it, and taking one costs pointers.
 *
 * Two kinds.  Everyone's (owner 0): the messages of a request that are marked as shared, a service's system prompt; kept as soon as the
 * first request has run them, never what a caller wrote.  An owner's: what a generation without a session leaves behind, for that
 * owner only (how quickly an answer begins must not tell one program what another one asked), until it leaves.
 *
 * Entries give way by last use: beyond the number configured, and when host or device memory is short, before anybody's running work.
 */

#include "daemon/engine/engine.h"

typedef struct Prefix Prefix;

/* Of one store. */
typedef struct Prefixes {
    Prefix *first;
    uint32_t n;
} Prefixes;

/* A shorter beginning is as quick to run as to look for. */
#define PREFIXES_MIN_TOKENS 32

/* Forks the past that agrees best with @ids, for at most n - 1 tokens: *ret holds a beginning of @ids, or is NULL when there is none.
 * Returns how many tokens agree with an entry; a packed past may not hold a place to go on from so far. */
size_t prefixes_fork(Prefixes *prefixes, uint64_t owner, const int32_t *ids, size_t n, KvCache **ret);
/* Keeps a fork of @cache, which holds the first of @ids, in place of @owner's entries that it covers; at most @max entries in all.  What
 * cannot be kept is not, nor what others would not go on from as if they had run it (kv_cache_is_as_cold()). */
void prefixes_keep(Prefixes *prefixes, uint64_t owner, const int32_t *ids, KvCache *cache, uint32_t max);
/* Time of last use of the oldest entry; UINT64_MAX: there is none. */
uint64_t prefixes_oldest_usec(const Prefixes *prefixes);
bool prefixes_drop_oldest(Prefixes *prefixes);
void prefixes_drop_owner(Prefixes *prefixes, uint64_t owner);
void prefixes_clear(Prefixes *prefixes);
