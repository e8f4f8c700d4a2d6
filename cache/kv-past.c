/* SPDX-License-Identifier: Apache-2.0 */
/* The past of a sequence as references: blocks, tail, states, checkpoints. */

#include "cache/kv-store-internal.h"

#include <string.h>

/* ---- checkpoints ------------------------------------------------------------------------------------------------------- */

KvCheckpoint *kv_checkpoint_new(const KvStore *store)
{
    return calloc(1, sizeof(KvCheckpoint) + store->sizes.n_sections * sizeof(KvMark));
}

KvCheckpoint *kv_checkpoint_free(const KvStore *store, KvCheckpoint *checkpoint)
{
    if (!checkpoint)
        return NULL;
    for (uint32_t s = 0; s < store->sizes.n_sections; s++) {
        KvMark *mark = &checkpoint->marks[s];

        for (uint32_t i = 0; mark->blocks && i < mark->n_blocks - mark->first_block; i++)
            (void)kv_block_unref(mark->blocks[i]);
        free(mark->blocks);
    }
    (void)kv_saved_unref(checkpoint->saved);
    (void)kv_saved_unref(checkpoint->state);
    free(checkpoint);
    return NULL;
}

static int copy_mark(KvMark *mark, const KvMark *from)
{
    uint32_t n = from->n_blocks - from->first_block;

    *mark = *from;
    if (!from->blocks)
        return 0;
    mark->blocks = calloc(MAX(n, 1u), sizeof(KvBlock *));
    if (!mark->blocks)
        return error_origin(-ENOMEM);
    for (uint32_t i = 0; i < n; i++)
        mark->blocks[i] = kv_block_ref(from->blocks[i]);
    return 0;
}

static KvCheckpoint *checkpoint_copy(const KvStore *store, const KvCheckpoint *from)
{
    KvCheckpoint *checkpoint = kv_checkpoint_new(store);

    if (!checkpoint)
        return NULL;
    checkpoint->length = from->length;
    checkpoint->made = from->made;
    checkpoint->recorded = from->recorded;
    checkpoint->saved = from->saved ? kv_saved_ref(from->saved) : NULL;
    checkpoint->state = from->state ? kv_saved_ref(from->state) : NULL;
    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        if (copy_mark(&checkpoint->marks[s], &from->marks[s]))
            return kv_checkpoint_free(store, checkpoint);
    return checkpoint;
}

void kv_past_drop_checkpoint(KvPast *past, uint32_t index)
{
    KvCheckpoint *checkpoint = past->checkpoints[index];

    past->n_checkpoints--;
    memmove(&past->checkpoints[index], &past->checkpoints[index + 1],
            (past->n_checkpoints - index) * sizeof(past->checkpoints[0]));
    (void)kv_checkpoint_free(past->store, checkpoint);
}

/* ---- pasts --------------------------------------------------------------------------------------------------------------- */

KvPast *kv_past_new(KvStore *store)
{
    const KvSizes *sizes = &store->sizes;
    size_t bytes = sizeof(KvPast) + sizes->n_sections * sizeof(KvSectionPast);
    KvBlock **blocks;
    KvPast *past;

    for (uint32_t s = 0; s < sizes->n_sections; s++)
        bytes += sizes->sections[s].max_blocks * sizeof(KvBlock *);
    past = calloc(1, bytes);
    if (!past)
        return NULL;
    past->store = store;
    past->host = store->host ? kv_host_past_new(store->host) : NULL;
    if (store->host && !past->host) {
        free(past);
        return NULL;
    }
    blocks = (KvBlock **)&past->sections[sizes->n_sections];
    for (uint32_t s = 0; s < sizes->n_sections; s++) {
        past->sections[s].blocks = blocks;
        blocks += sizes->sections[s].max_blocks;
    }
    return past;
}

static void copy_section(KvSectionPast *section, const KvSectionPast *from)
{
    section->tail_from = from->tail_from;
    section->first_block = from->first_block;
    section->n_blocks = from->n_blocks;
    for (uint32_t b = from->first_block; b < from->n_blocks; b++)
        section->blocks[b] = kv_block_ref(from->blocks[b]);
}

KvPast *kv_past_copy(const KvPast *from)
{
    _cleanup_(kv_past_freep) KvPast *past = kv_past_new(from->store);

    if (!past)
        return NULL;
    for (uint32_t i = 0; i < from->n_checkpoints; i++) {
        past->checkpoints[i] = checkpoint_copy(from->store, from->checkpoints[i]);
        if (!past->checkpoints[i])
            return NULL;
        past->n_checkpoints++;
    }
    if (from->host) {
        (void)kv_host_past_free(past->host);
        past->host = kv_host_past_copy(from->store->host, from->host);
        if (!past->host)
            return NULL;
    }
    past->length = from->length;
    past->cross_length = from->cross_length;
    past->recording = from->recording;
    past->record_from = from->record_from;
    past->tail = kv_tail_ref(from->tail);
    kv_states_copy(&past->states, &from->states);
    for (uint32_t s = 0; s < from->store->sizes.n_sections; s++)
        copy_section(&past->sections[s], &from->sections[s]);
    return TAKE_PTR(past);
}

static void drop_blocks(KvPast *past, uint32_t s, uint32_t n_keep)
{
    KvSectionPast *section = &past->sections[s];

    while (section->n_blocks > MAX(n_keep, section->first_block)) {
        KvBlock **block = &section->blocks[--section->n_blocks];

        *block = kv_block_unref(*block);
    }
    if (n_keep == 0)
        section->first_block = section->n_blocks = section->tail_from = 0;
}

/* The last block keeps the pages of @length tokens; those that a sequence which shares it has added are that one's. */
static void drop_pages(KvPast *past, uint32_t s, uint32_t length)
{
    KvSectionPast *section = &past->sections[s];
    KvBlock *last = section->n_blocks > section->first_block ? section->blocks[section->n_blocks - 1] : NULL;

    if (last && last->n_refs == 1)
        kv_block_shrink(last, last->first_page,
                         length / KV_PAGE_TOKENS - (section->n_blocks - 1) * KV_BLOCK_PAGES);
}

void kv_past_drop_beyond(KvPast *past, uint32_t length)
{
    for (uint32_t s = 0; s < past->store->sizes.n_sections; s++)
        if (!kv_section_is_cross(&past->store->sections[s])) {
            drop_blocks(past, s, kv_blocks_of(length));
            drop_pages(past, s, length);
            if (length == 0)
                past->sections[s].tail_from = 0;
        }
    while (past->n_checkpoints > 0 && past->checkpoints[past->n_checkpoints - 1]->length > length)
        kv_past_drop_checkpoint(past, past->n_checkpoints - 1);
    past->length = length;
    past->record_from = MIN(past->record_from, length);
    if (length > 0)
        return;
    kv_states_clear(&past->states);
    if (past->cross_length == 0)
        past->tail = kv_tail_unref(past->tail);
}

void kv_past_drop_unseen(KvPast *past)
{
    uint32_t length = past->recording ? MIN(past->record_from, past->length) : past->length;

    for (uint32_t s = 0; s < past->store->sizes.n_sections; s++) {
        KvSection *section = &past->store->sections[s];
        KvSectionPast *own = &past->sections[s];
        KvBlock *first;
        uint32_t page;

        if (!kv_section_is_windowed(section))
            continue;
        page = kv_kept_page(section, length);
        for (uint32_t end = MIN(page / KV_BLOCK_PAGES, own->n_blocks); own->first_block < end; own->first_block++)
            own->blocks[own->first_block] = kv_block_unref(own->blocks[own->first_block]);
        first = own->first_block < own->n_blocks ? own->blocks[own->first_block] : NULL;
        if (first && first->n_refs == 1 && page > own->first_block * KV_BLOCK_PAGES)
            kv_block_shrink(first, page - own->first_block * KV_BLOCK_PAGES, first->n_filled);
    }
}

void kv_past_drop_recorded(KvPast *past)
{
    for (uint32_t i = past->n_checkpoints; i-- > 0;)
        if (past->checkpoints[i]->recorded)
            kv_past_drop_checkpoint(past, i);
    kv_states_drop_snapshots(&past->states);
    kv_past_drop_unseen(past);
}

void kv_past_clear(KvPast *past)
{
    past->cross_length = 0;
    for (uint32_t s = 0; s < past->store->sizes.n_sections; s++)
        drop_blocks(past, s, 0);
    kv_past_drop_beyond(past, 0);
    if (past->host)
        kv_host_past_clear(past->host);
    past->recording = false;
}

KvPast *kv_past_free(KvPast *past)
{
    if (past) {
        kv_past_clear(past);
        (void)kv_host_past_free(past->host);
    }
    free(past);
    return NULL;
}
