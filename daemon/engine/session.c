/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions: ids and the cache that holds a prefix of them. */

#include "daemon/engine/session.h"
#include "daemon/engine/mailbox.h"

#include <string.h>
#include <unistd.h>

Session *session_new(ModelSlot *slot, const KvPolicy *policy, uint64_t id, uint64_t owner)
{
    Session *session = calloc(1, sizeof(*session));

    if (!session)
        return NULL;
    session->slot = slot;
    session->policy = *policy;
    session->id = id;
    session->owner = owner;
    session->last_used_usec = now_usec();
    session->spill_fd = -1;
    return session;
}

Session *session_free(Session *session)
{
    if (!session)
        return NULL;
    session_drop_cache(session);
    session_forget_file(session);
    token_list_clear(&session->ids);
    free(session);
    return NULL;
}

uint32_t session_cached(const Session *session)
{
    return session->cache ? kv_cache_length(session->cache) : 0;
}

void session_drop_cache(Session *session)
{
    session->cache = kv_cache_free(session->cache);
    session->store = NULL;
}

void session_forget_file(Session *session)
{
    if (session->spill_fd >= 0)
        (void)close(session->spill_fd);
    session->spill_fd = -1;
}

void session_trim(Session *session)
{
    session->ids.n = MIN(session->ids.n, (size_t)session_cached(session));
}

size_t ids_common_prefix(const int32_t *a, size_t n_a, const int32_t *b, size_t n_b)
{
    size_t n = MIN(n_a, n_b), common = 0;

    while (common < n && a[common] == b[common])
        common++;
    return common;
}

size_t session_common_prefix(const Session *session, const int32_t *ids, size_t n)
{
    return ids_common_prefix(session->ids.ids, session->ids.n, ids, n);
}

int session_rebase(Session *session, const int32_t *ids, size_t n, ErrorDetail *reterr)
{
    size_t keep = session_common_prefix(session, ids, n);
    uint32_t left = 0;
    int r;

    /* The logits of the last id are wanted, so that one is always run. */
    if (n > 0)
        keep = MIN(keep, n - 1);
    if (session->cache && session_cached(session) > keep) {
        r = kv_cache_crop(session->cache, (uint32_t)keep, &left, reterr);
        if (r)
            return r;
    }
    keep = MIN(keep, session->ids.n);
    session->ids.n = keep;
    return token_list_append(&session->ids, ids + keep, n - keep);
}
