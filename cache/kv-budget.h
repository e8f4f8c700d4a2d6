#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes that the caches of a store may hold: on the host blocks of pages in use, saved tails, checkpoints; on the device arenas. */

#include <stdbool.h>
#include <stdint.h>

typedef struct KvBudget {
    uint64_t limit_bytes; /* 0: none */
    uint64_t used_bytes;
    bool (*reclaim)(void *userdata); /* gives something up (the oldest checkpoint); false when nothing is left; may be NULL */
    void *userdata;
} KvBudget;

/* How much could be taken without a reclaim. */
static inline uint64_t kv_budget_left(const KvBudget *budget)
{
    if (budget->limit_bytes == 0)
        return UINT64_MAX;
    return budget->used_bytes < budget->limit_bytes ? budget->limit_bytes - budget->used_bytes : 0;
}

static inline bool kv_budget_take(KvBudget *budget, uint64_t bytes)
{
    while (budget->limit_bytes > 0 &&
           (budget->used_bytes > budget->limit_bytes || bytes > budget->limit_bytes - budget->used_bytes))
        if (bytes > budget->limit_bytes || !budget->reclaim || !budget->reclaim(budget->userdata))
            return false;
    budget->used_bytes += bytes;
    return true;
}

static inline void kv_budget_return(KvBudget *budget, uint64_t bytes)
{
    budget->used_bytes -= bytes;
}
