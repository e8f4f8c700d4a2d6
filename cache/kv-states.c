/* SPDX-License-Identifier: Apache-2.0 */
/* States of convolutions and recurrences. */

#include "cache/kv-states.h"

#include <string.h>

int kv_states_acquire(KvStates *states, KvTails *pool, uint32_t n_steps, ErrorDetail *reterr)
{
    bool empty = states->now == NULL;
    int r;

    r = empty ? kv_tails_acquire(pool, &states->now, reterr) : kv_tails_pin(pool, states->now, reterr);
    if (!r && empty)
        r = kv_tails_zero(pool, states->now);
    if (!r)
        r = kv_tails_acquire(pool, &states->next, reterr);
    while (states->n_steps < n_steps && !r) {
        r = kv_tails_acquire(pool, &states->steps[states->n_steps], reterr);
        states->n_steps += r == 0;
    }
    if (r && empty)
        states->now = kv_tail_unref(states->now);
    return error_trace(r);
}

void kv_states_abort(KvStates *states)
{
    while (states->n_steps > 0) {
        KvTail **step = &states->steps[--states->n_steps];

        *step = kv_tail_unref(*step);
    }
    states->next = kv_tail_unref(states->next);
}

static void drop_oldest(KvStates *states)
{
    (void)kv_tail_unref(states->snapshots[0].state);
    states->n_snapshots--;
    memmove(&states->snapshots[0], &states->snapshots[1], states->n_snapshots * sizeof(KvSnapshot));
}

static void keep(KvStates *states, uint32_t length, KvTail *state)
{
    if (states->n_snapshots == KV_SNAPSHOTS_MAX)
        drop_oldest(states);
    states->snapshots[states->n_snapshots++] = (KvSnapshot){length, state};
}

void kv_states_commit(KvStates *states, uint32_t length, bool record)
{
    if (!states->next)
        return;
    kv_tail_settle(states->now);
    if (record)
        keep(states, length, TAKE_PTR(states->now));
    for (uint32_t i = 0; i < states->n_steps; i++) {
        if (record)
            keep(states, length + 1 + i, TAKE_PTR(states->steps[i]));
        states->steps[i] = kv_tail_unref(states->steps[i]);
    }
    states->n_steps = 0;
    (void)kv_tail_unref(states->now);
    states->now = TAKE_PTR(states->next);
}

void kv_states_copy(KvStates *states, const KvStates *from)
{
    states->now = kv_tail_ref(from->now);
    states->n_snapshots = from->n_snapshots;
    for (uint32_t i = 0; i < from->n_snapshots; i++)
        states->snapshots[i] = (KvSnapshot){from->snapshots[i].length, kv_tail_ref(from->snapshots[i].state)};
}

void kv_states_drop_snapshots(KvStates *states)
{
    while (states->n_snapshots > 0)
        (void)kv_tail_unref(states->snapshots[--states->n_snapshots].state);
}

void kv_states_clear(KvStates *states)
{
    kv_states_drop_snapshots(states);
    kv_states_abort(states);
    states->now = kv_tail_unref(states->now);
}

KvTail *kv_states_find(const KvStates *states, uint32_t length, uint32_t end)
{
    if (length == end)
        return states->now;
    for (uint32_t i = 0; i < states->n_snapshots; i++)
        if (states->snapshots[i].length == length)
            return states->snapshots[i].state;
    return NULL;
}

void kv_states_go_back(KvStates *states, uint32_t length, KvTail *state)
{
    while (states->n_snapshots > 0 && states->snapshots[states->n_snapshots - 1].length >= length)
        (void)kv_tail_unref(states->snapshots[--states->n_snapshots].state);
    (void)kv_tail_unref(states->now);
    states->now = state;
}
