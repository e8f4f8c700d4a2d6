#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * States of layers that keep a convolution's last columns and a recurrent state instead of keys and values.
 *
 * A slot holds the states of all such layers after one token of one sequence; slots come from a pool like that of the tails
 * (cache/kv-tail.h): on the device, saved in host memory when others need the place, shared by forks.  Nothing is ever written in place:
 * a pass reads one slot and writes another.  So forks cost nothing, an aborted pass leaves the state as it was, and what it was before
 * the pass can be kept as a *snapshot*, to go back to exactly: recorded sequences do so.  A pass of several tokens of such a sequence also
 * writes the *steps* between them, as long as there are slots for that, so that any of its tokens can be taken back.
 */

#include "cache/kv-tail.h"

#define KV_SNAPSHOTS_MAX 64 /* places that can be gone back to: tokens, or ends of passes that have no steps */

typedef struct KvSnapshot {
    uint32_t length;
    KvTail *state;
} KvSnapshot;

/* Of one sequence. */
typedef struct KvStates {
    KvTail *now;  /* NULL: an empty past, all zero */
    KvTail *next; /* what the pass in progress writes */
    uint32_t n_steps;
    KvTail *steps[KV_SNAPSHOTS_MAX - 1]; /* and after each of its tokens but the last */
    uint32_t n_snapshots;
    KvSnapshot snapshots[KV_SNAPSHOTS_MAX]; /* by length */
} KvStates;

/* Before a pass: `now`, `next` and @n_steps steps (fewer than KV_SNAPSHOTS_MAX) are in slots until the next kv_tails_next_pass().  KvError or
 * negative errno; then kv_states_abort(). */
int kv_states_acquire(KvStates *states, KvTails *pool, uint32_t n_steps, ErrorDetail *reterr);
/* The pass of a sequence of @length tokens is over; with @record the state before it is kept, and the steps. */
void kv_states_commit(KvStates *states, uint32_t length, bool record);
void kv_states_abort(KvStates *states);

/* Shares everything. */
void kv_states_copy(KvStates *states, const KvStates *from);
void kv_states_clear(KvStates *states);
/* The state after @length tokens (borrowed), where `now` is that after @end; NULL when it was not kept. */
KvTail *kv_states_find(const KvStates *states, uint32_t length, uint32_t end);
/* Goes back to @length with @state (taken); later snapshots are dropped. */
void kv_states_go_back(KvStates *states, uint32_t length, KvTail *state);
void kv_states_drop_snapshots(KvStates *states);
