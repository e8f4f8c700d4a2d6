/* SPDX-License-Identifier: Apache-2.0 */
/* Tail slots on the device and saved tails in host memory. */

#include "cache/kv-tail.h"
#include "cache/kv-error.h"

/* A copy of a tail takes milliseconds; a device that needs longer is hung. */

int kv_tails_init(KvTails *tails, Gpu *gpu, uint32_t n_slots, uint64_t slot_bytes, KvBudget *host_budget, ErrorDetail *reterr)
{
    *tails = (KvTails){.gpu = gpu, .n_slots = n_slots, .slot_bytes = slot_bytes, .clock = 1, .host_budget = host_budget};
    tails->slots = calloc(n_slots, sizeof(KvTail *));
    if (!tails->slots)
        return error_origin(KV_E_HOST_MEMORY);
    return kv_error(gpu_buffer_new(gpu, GPU_PURPOSE_TAIL, n_slots * slot_bytes, &tails->buffer, reterr));
}

void kv_tails_deinit(KvTails *tails)
{
    tails->buffer = gpu_buffer_free(tails->buffer);
    free(tails->slots);
    *tails = KV_TAILS_NULL;
}

void kv_tails_next_pass(KvTails *tails)
{
    tails->clock++;
}

KvSaved *kv_saved_ref(KvSaved *saved)
{
    saved->n_refs++;
    return saved;
}

KvSaved *kv_saved_unref(KvSaved *saved)
{
    if (!saved || --saved->n_refs > 0)
        return NULL;
    if (saved->event && gpu_event_status(saved->event) == 0)
        (void)gpu_event_wait(saved->tails->gpu, saved->event, NULL);
    saved->event = gpu_event_unref(saved->event);
    kv_budget_return(saved->tails->host_budget, saved->tails->slot_bytes);
    gpu_free_host(saved->tails->gpu, saved);
    return NULL;
}

int kv_saved_new(KvTails *tails, KvSaved **ret, ErrorDetail *reterr)
{
    KvSaved *saved;

    if (!kv_budget_take(tails->host_budget, tails->slot_bytes)) {
        const KvBudget *budget = kv_budget_tightest(tails->host_budget);

        return error_detail_set(reterr, KV_E_HOST_MEMORY, "cache: %llu bytes to save recent tokens, %llu of %llu (host-memory) are in use",
                                (unsigned long long)tails->slot_bytes, (unsigned long long)budget->used_bytes,
                                (unsigned long long)budget->limit_bytes);
    }
    saved = malloc(sizeof(*saved) + tails->slot_bytes);
    if (!saved) {
        kv_budget_return(tails->host_budget, tails->slot_bytes);
        return error_origin(KV_E_HOST_MEMORY);
    }
    saved->tails = tails;
    saved->n_refs = 1;
    saved->event = NULL;
    *ret = saved;
    return 0;
}

static KvTail *tail_new(KvTails *tails)
{
    KvTail *tail = calloc(1, sizeof(*tail));

    if (tail)
        *tail = (KvTail){.tails = tails, .n_refs = 1, .slot = -1};
    return tail;
}

KvTail *kv_tail_new_from(KvTails *tails, KvSaved *saved)
{
    KvTail *tail = tail_new(tails);

    if (tail)
        tail->saved = kv_saved_ref(saved);
    return tail;
}

KvTail *kv_tail_ref(KvTail *tail)
{
    if (tail)
        tail->n_refs++;
    return tail;
}

KvTail *kv_tail_unref(KvTail *tail)
{
    if (!tail || --tail->n_refs > 0)
        return NULL;
    if (tail->slot >= 0)
        tail->tails->slots[tail->slot] = NULL;
    (void)kv_saved_unref(tail->saved);
    (void)kv_saved_unref(tail->stale);
    free(tail);
    return NULL;
}

void kv_tail_settle(KvTail *tail)
{
    tail->stale = kv_saved_unref(tail->stale);
}

void kv_tail_forget(KvTail *tail, const KvSaved *saved)
{
    if (tail && tail->slot >= 0 && tail->saved == saved)
        tail->saved = kv_saved_unref(tail->saved);
}

int kv_tail_save(KvTail *tail, KvSaved **ret, ErrorDetail *reterr)
{
    KvTails *tails = tail->tails;
    _cleanup_(kv_saved_unrefp) KvSaved *saved = NULL;
    int r;

    if (!tail->saved) {
        r = kv_saved_new(tails, &saved, reterr);
        if (r)
            return error_trace(r);
        r = gpu_download(tails->gpu, GPU_QUEUE_COMPUTE, tails->buffer, (uint64_t)tail->slot * tails->slot_bytes, saved->memory,
                         tails->slot_bytes, GPU_WAIT_NONE, "tail save", &saved->event);
        if (r)
            return error_trace(kv_error(r));
        tail->saved = TAKE_PTR(saved);
    }
    *ret = kv_saved_ref(tail->saved);
    return 0;
}

/* Frees the slot of the tail that was used longest ago, not in this pass. */
static int tails_evict(KvTails *tails, int32_t *ret_slot, ErrorDetail *reterr)
{
    _cleanup_(kv_saved_unrefp) KvSaved *saved = NULL;
    KvTail *victim = NULL;
    int r;

    for (uint32_t i = 0; i < tails->n_slots; i++)
        if (tails->slots[i]->used != tails->clock && (!victim || tails->slots[i]->used < victim->used))
            victim = tails->slots[i];
    if (!victim)
        return error_origin(-EBUSY); /* more acquired in a pass than there are slots: refused by kv_pass_begin() before */
    r = kv_tail_save(victim, &saved, reterr);
    if (r)
        return error_trace(r);
    *ret_slot = victim->slot;
    tails->slots[victim->slot] = NULL;
    victim->slot = -1;
    return 0;
}

static int tails_free_slot(KvTails *tails, int32_t *ret_slot, ErrorDetail *reterr)
{
    for (uint32_t i = 0; i < tails->n_slots; i++)
        if (!tails->slots[i]) {
            *ret_slot = (int32_t)i;
            return 0;
        }
    return tails_evict(tails, ret_slot, reterr);
}

/* Brings what @from holds into @slot. */
static int tail_fill(KvTails *tails, KvTail *from, int32_t slot)
{
    uint64_t to = (uint64_t)slot * tails->slot_bytes;
    int r;

    if (from->slot >= 0)
        return gpu_copy(tails->gpu, GPU_QUEUE_COMPUTE, tails->buffer, to, tails->buffer,
                        (uint64_t)from->slot * tails->slot_bytes, tails->slot_bytes, GPU_WAIT_NONE, "tail fork", NULL);
    (void)gpu_event_unref(from->saved->event); /* earlier copies are earlier in the same queue */
    from->saved->event = NULL;
    r = gpu_upload(tails->gpu, GPU_QUEUE_COMPUTE, tails->buffer, to, from->saved->memory, tails->slot_bytes, GPU_WAIT_NONE,
                   "tail restore", &from->saved->event);
    return error_trace(r);
}

int kv_tails_acquire(KvTails *tails, KvTail **tail, ErrorDetail *reterr)
{
    KvTail *from = *tail, *own = from;
    int32_t slot = -1;
    int r;

    if (!from || from->n_refs > 1 || from->slot < 0) {
        if (!from || from->n_refs > 1)
            own = tail_new(tails);
        if (!own)
            return error_origin(KV_E_HOST_MEMORY);
        r = tails_free_slot(tails, &slot, reterr);
        if (r == 0 && from)
            r = kv_error(tail_fill(tails, from, slot));
        if (r) {
            if (own != from)
                (void)kv_tail_unref(own);
            return error_trace(r);
        }
        own->slot = slot;
        tails->slots[slot] = own;
        if (own != from)
            (void)kv_tail_unref(from);
        *tail = own;
    }
    /* The pass is going to write: the host copy, if any, is of the past.  It may still be on its way. */
    kv_tail_settle(own);
    own->stale = own->saved;
    own->saved = NULL;
    own->used = tails->clock;
    return 0;
}

int kv_tails_pin(KvTails *tails, KvTail *tail, ErrorDetail *reterr)
{
    int32_t slot;
    int r;

    if (tail->slot < 0) {
        r = tails_free_slot(tails, &slot, reterr);
        if (r == 0)
            r = kv_error(tail_fill(tails, tail, slot));
        if (r)
            return error_trace(r);
        tail->slot = slot;
        tails->slots[slot] = tail;
    }
    tail->used = tails->clock;
    return 0;
}

int kv_tails_zero(KvTails *tails, const KvTail *tail)
{
    return kv_error(gpu_fill_zero(tails->gpu, GPU_QUEUE_COMPUTE, tails->buffer, (uint64_t)tail->slot * tails->slot_bytes,
                                  tails->slot_bytes));
}
