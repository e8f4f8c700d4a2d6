#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Recent tokens in full precision: a pool of tail slots on the device, and their copies in host memory.
 *
 *   KvTail   the ring and sinks of one point of one sequence's past, all layers; shared by forks until one of them goes on.
 *            It is in a slot, or saved in host memory, or both.
 *   KvSaved  a host copy; shared by checkpoints and tails.
 *
 * Before a pass every cache in it gets a tail of its own in a slot (kv_tails_acquire): copied when it was shared, read back when it
 * was saved, at the expense of the tail that was used longest ago when no slot is free.  All copies go through the compute queue,
 * so they need no waits against the kernels that read and write tails.
 */

#include "cache/kv-budget.h"
#include "cache/kv-store.h"

typedef struct KvTails KvTails;

typedef struct KvSaved {
    KvTails *tails;
    uint32_t n_refs;
    GpuEvent *event; /* the last copy from or to the memory */
    uint8_t memory[];
} KvSaved;

typedef struct KvTail {
    KvTails *tails;
    uint32_t n_refs;
    int32_t slot;   /* -1: not on the device */
    uint64_t used;  /* value of the pool's clock when it was acquired last */
    KvSaved *saved; /* NULL, or equal to what is or was in the slot */
    KvSaved *stale; /* read back from; kept until the copy is certainly over */
} KvTail;

struct KvTails {
    Gpu *gpu;
    GpuBuffer *buffer; /* n_slots of slot_bytes */
    KvTail **slots;
    uint32_t n_slots;
    uint64_t slot_bytes, clock;
    KvBudget *host_budget; /* borrowed */
};

#define KV_TAILS_NULL ((KvTails){0})

/* KvError or negative errno. */
int kv_tails_init(KvTails *tails, Gpu *gpu, uint32_t n_slots, uint64_t slot_bytes, KvBudget *host_budget, ErrorDetail *reterr);
void kv_tails_deinit(KvTails *tails);

/* A new pass: what is acquired from here on keeps its slot until the next call. */
void kv_tails_next_pass(KvTails *tails);
/* Makes *@tail (NULL: an empty past) private and resident.  At most n_slots times a pass.  KvError or negative errno; then *@tail is
 * as before, though it may have moved to host memory. */
int kv_tails_acquire(KvTails *tails, KvTail **tail, ErrorDetail *reterr);
/* Makes @tail resident, to be read in the pass, whoever shares it. */
int kv_tails_pin(KvTails *tails, KvTail *tail, ErrorDetail *reterr);
/* Fills the slot of a resident tail with zeros. */
int kv_tails_zero(KvTails *tails, const KvTail *tail);
/* A copy of the tail in host memory, with a reference for the caller.  KvError or negative errno. */
int kv_tail_save(KvTail *tail, KvSaved **ret, ErrorDetail *reterr);
/* Host memory of a tail's size, its contents undefined.  KvError. */
int kv_saved_new(KvTails *tails, KvSaved **ret, ErrorDetail *reterr);
/* A tail that is not on the device but saved in @saved (a reference of its own is taken); NULL when memory is short. */
KvTail *kv_tail_new_from(KvTails *tails, KvSaved *saved);

/* The copies of a finished pass are over: lets go of what was kept for them. */
void kv_tail_settle(KvTail *tail);
/* Lets go of @saved when the device has the same.  Takes NULL. */
void kv_tail_forget(KvTail *tail, const KvSaved *saved);

KvTail *kv_tail_ref(KvTail *tail);     /* takes NULL */
KvTail *kv_tail_unref(KvTail *tail);   /* takes NULL, returns NULL */
KvSaved *kv_saved_ref(KvSaved *saved);
KvSaved *kv_saved_unref(KvSaved *saved); /* takes NULL, returns NULL; waits for a copy in flight */
DEFINE_CLEANUP(KvSaved, kv_saved_unref)
