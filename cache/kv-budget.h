#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes that the caches of a store may hold: on the host blocks of pages in use, saved tails, checkpoints; on the device arenas.
 * The host budgets of several stores may share one, which is charged for all of them.
 */

#include <stdbool.h>
#include <stdint.h>

typedef struct KvBudget KvBudget;

struct KvBudget {
    uint64_t limit_bytes; /* 0: none */
    uint64_t used_bytes;
    KvBudget *shared; /* charged as well; has none above it; borrowed; NULL: none */
    bool (*reclaim)(void *userdata); /* gives something up (the oldest checkpoint); false when nothing is left; may be NULL */
    void *userdata;
};

static inline uint64_t kv_budget_own_left(const KvBudget *budget)
{
    if (budget->limit_bytes == 0)
        return UINT64_MAX;
    return budget->used_bytes < budget->limit_bytes ? budget->limit_bytes - budget->used_bytes : 0;
}

/* The one of the two that leaves less: whose numbers a refusal is about. */
static inline const KvBudget *kv_budget_tightest(const KvBudget *budget)
{
    const KvBudget *shared = budget->shared;

    return shared && kv_budget_own_left(shared) < kv_budget_own_left(budget) ? shared : budget;
}

/* After a refusal: whether those who share a budget can make room, for it leaves no more than the own one. */
static inline bool kv_budget_others_can_help(const KvBudget *budget)
{
    return budget->shared && kv_budget_own_left(budget->shared) <= kv_budget_own_left(budget);
}

/* How much could be taken without a reclaim. */
static inline uint64_t kv_budget_left(const KvBudget *budget)
{
    return kv_budget_own_left(kv_budget_tightest(budget));
}

static inline bool kv_budget_could_hold(const KvBudget *budget, uint64_t bytes)
{
    return (budget->limit_bytes == 0 || bytes <= budget->limit_bytes) && (!budget->shared || kv_budget_could_hold(budget->shared, bytes));
}

static inline bool kv_budget_take(KvBudget *budget, uint64_t bytes)
{
    while (bytes > kv_budget_left(budget))
        if (!kv_budget_could_hold(budget, bytes) || !budget->reclaim || !budget->reclaim(budget->userdata))
            return false;
    budget->used_bytes += bytes;
    if (budget->shared)
        budget->shared->used_bytes += bytes;
    return true;
}

static inline void kv_budget_return(KvBudget *budget, uint64_t bytes)
{
    budget->used_bytes -= bytes;
    if (budget->shared)
        budget->shared->used_bytes -= bytes;
}
