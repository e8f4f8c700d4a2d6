/* SPDX-License-Identifier: Apache-2.0 */
/* Recent tokens put together from two places. */

#include "cache/kv-cache-splice.h"

#include <string.h>

bool kv_splice_find(const KvPast *past, uint32_t length, KvSplice *ret)
{
    KvSplice splice = {0};

    for (uint32_t i = 0; i < past->n_checkpoints; i++) { /* by length */
        const KvCheckpoint *checkpoint = past->checkpoints[i];

        if (checkpoint->length < length)
            splice.older = checkpoint;
        else if (!splice.newer)
            splice.newer = checkpoint;
    }
    *ret = splice;
    return splice.older != NULL;
}

/* The first position that the newer place has. */
static uint32_t newer_from(const KvPast *past, const KvSplice *splice, uint32_t s)
{
    return splice->newer ? splice->newer->marks[s].tail_from : past->sections[s].tail_from;
}

bool kv_splice_reaches(const KvPast *past, const KvSplice *splice, uint32_t s, uint32_t length)
{
    const KvSection *section = &past->store->sections[s];
    uint32_t needed = kv_needed_from(section, length), from = newer_from(past, splice, s);

    if (kv_section_is_cross(section))
        return true;
    return kv_section_sees(past, s, length) &&
           (from <= needed || (splice->older->marks[s].tail_from <= needed && from <= splice->older->length));
}

/* Positions [@from, @end) of all layers of a section, from one tail to another. */
static void copy_positions(const KvPast *past, uint32_t s, uint32_t from, uint32_t end, const uint8_t *source, uint8_t *target)
{
    const KvSectionSizes *sizes = past->store->sections[s].sizes;
    const KvShape *shape = &sizes->attend.shape;
    uint64_t k_bytes = (uint64_t)shape->n_kv_heads * shape->k_head_dim * (sizes->attend.tail_bits / 8);
    uint64_t v_bytes = (uint64_t)shape->n_kv_heads * shape->v_head_dim * (sizes->attend.tail_bits / 8);
    uint32_t ring = kv_ring_tokens(sizes->attend.form);

    for (uint32_t plane = 0; plane < sizes->n_planes; plane++) {
        uint64_t k_at = sizes->tail_offset + plane * sizes->tail_layer_bytes;
        uint64_t v_at = k_at + (ring + sizes->attend.form.sink_tokens) * k_bytes;

        for (uint32_t position = from; position < end; position++) {
            uint64_t slot = position % ring;

            memcpy(target + k_at + slot * k_bytes, source + k_at + slot * k_bytes, k_bytes);
            memcpy(target + v_at + slot * v_bytes, source + v_at + slot * v_bytes, v_bytes);
        }
    }
}

/* @saved is on its way from the device, or there. */
static int wait_saved(const KvStore *store, KvSaved *saved, ErrorDetail *reterr)
{
    return saved->event ? kv_error(gpu_event_wait(store->gpu, saved->event, reterr)) : 0;
}

/* Both places in host memory; references for the caller, so that neither gives way when memory is short. */
static int fetch(KvPast *past, const KvSplice *splice, KvSaved **older, KvSaved **newer, ErrorDetail *reterr)
{
    int r = 0;

    *older = kv_saved_ref(splice->older->saved);
    if (splice->newer)
        *newer = kv_saved_ref(splice->newer->saved);
    else
        r = kv_tail_save(past->tail, newer, reterr);
    if (!r)
        r = wait_saved(past->store, *older, reterr);
    if (!r)
        r = wait_saved(past->store, *newer, reterr);
    return error_trace(r);
}

/* Where each section's ring is complete from when it is the newer place's, and from where the older one's is laid over it (else its end). */
static void plan_rings(const KvPast *past, const KvSplice *splice, uint32_t length, uint32_t *newer_froms, uint32_t *older_froms)
{
    for (uint32_t s = 0; s < past->store->sizes.n_sections; s++) {
        bool cross = kv_section_is_cross(&past->store->sections[s]);

        newer_froms[s] = cross ? past->sections[s].tail_from : newer_from(past, splice, s);
        older_froms[s] = cross ? UINT32_MAX : kv_needed_from(&past->store->sections[s], length);
        if (newer_froms[s] <= older_froms[s] || !kv_splice_reaches(past, splice, s, length))
            older_froms[s] = UINT32_MAX;
    }
}

int kv_splice_tail(KvPast *past, const KvSplice *splice, uint32_t length, KvTail **ret, ErrorDetail *reterr)
{
    _cleanup_(kv_saved_unrefp) KvSaved *older = NULL, *newer = NULL, *made = NULL;
    uint32_t n_sections = past->store->sizes.n_sections, middle = splice->older->length;
    _cleanup_(freep) uint32_t *froms = calloc(2 * MAX(n_sections, 1u), sizeof(uint32_t));
    KvTail *tail;
    int r;

    if (!froms)
        return error_origin(KV_E_HOST_MEMORY);
    plan_rings(past, splice, length, froms, froms + n_sections); /* before memory is asked for: a checkpoint may give way */
    r = fetch(past, splice, &older, &newer, reterr);
    if (!r)
        r = kv_saved_new(&past->store->tails, &made, reterr);
    if (r)
        return error_trace(r);
    memcpy(made->memory, newer->memory, past->store->tails.slot_bytes);
    for (uint32_t s = 0; s < n_sections; s++)
        copy_positions(past, s, froms[n_sections + s], middle, older->memory, made->memory);
    tail = kv_tail_new_from(&past->store->tails, made);
    if (!tail)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t s = 0; s < n_sections; s++)
        past->sections[s].tail_from = MIN(froms[s], froms[n_sections + s]);
    *ret = tail;
    return 0;
}
