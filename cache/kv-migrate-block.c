/* SPDX-License-Identifier: Apache-2.0 */
/* Migration: pages and tails, in equal forms or coded anew. */

#include "cache/kv-migrate-internal.h"

#include <string.h>

static KvBlock *source_block(const KvPast *past, const KvCheckpoint *checkpoint, uint32_t section, uint32_t b)
{
    if (past)
        return past->sections[section].blocks[b];
    return checkpoint->marks[section].blocks[b - checkpoint->marks[section].first_block];
}

/* Pages [first, end) of one layer. */
static int move_plane(const KvMigration *m, uint32_t l, const KvBlock *from, KvBlock *to, uint32_t block, uint32_t first, uint32_t end)
{
    const KvLayerPlace *a = &m->from->sizes.layers[l], *b = &m->to->sizes.layers[l];
    uint64_t page_bytes = m->to->sizes.sections[b->section].layout.page_bytes;
    uint32_t n;
    int r = 0;

    if (!kv_migrate_is_same(m, l))
        return error_trace(kv_migrate_plane(m, l, from, to, block, first, end));
    for (; first < end && !r; first += n) {
        n = MIN(kv_block_run(from, first, end), kv_block_run(to, first, end));
        r = kv_arena_copy(m->to->gpu, GPU_QUEUE_COMPUTE, from->arena, kv_block_offset(from, a->plane, first), to->arena,
                          kv_block_offset(to, b->plane, first), n * page_bytes, "kv move", NULL);
    }
    return error_trace(r);
}

/* The pages that the block has in every section which is to be one with it in the target. */
static void common_pages(const KvMigration *m, uint32_t s, const KvPast *past, const KvCheckpoint *checkpoint, uint32_t b,
                         uint32_t *ret_first, uint32_t *ret_end)
{
    *ret_first = 0;
    *ret_end = KV_BLOCK_PAGES;
    for (uint32_t l = 0; l < m->to->sizes.n_layers; l++) {
        const KvBlock *block;

        if (m->to->sizes.layers[l].section != s)
            continue;
        block = source_block(past, checkpoint, m->from->sizes.layers[l].section, b);
        *ret_first = MAX(*ret_first, block->first_page);
        *ret_end = MIN(*ret_end, block->n_filled);
    }
}

static int fill_block(KvMigration *m, uint32_t s, const KvPast *past, const KvCheckpoint *checkpoint, uint32_t b, KvBlock *to)
{
    int r = 0;

    for (uint32_t l = 0; l < m->to->sizes.n_layers && !r; l++) {
        const KvLayerPlace *place = &m->to->sizes.layers[l];

        if (place->section == s && place->owner == l)
            r = move_plane(m, l, source_block(past, checkpoint, m->from->sizes.layers[l].section, b), to, b, to->first_page, to->n_filled);
    }
    if (r)
        return error_trace(kv_error(r));
    to->serial = ++m->to->serial; /* no slot of the ring holds it */
    return 0;
}

int kv_migrate_block(KvMigration *m, uint32_t s, const KvPast *past, const KvCheckpoint *checkpoint, uint32_t b, uint32_t n_pages,
                     KvBlock **ret, ErrorDetail *reterr)
{
    const KvBlock *lead = source_block(past, checkpoint, m->leads[s], b);
    KvMovedList *list = &m->blocks[s];
    KvBlock *block = kv_moved_find(list, lead);
    uint32_t first, end;
    int r;

    if (block && block->n_filled >= MIN(n_pages - b * KV_BLOCK_PAGES, (uint32_t)KV_BLOCK_PAGES)) {
        *ret = kv_block_ref(block);
        return 0;
    }
    common_pages(m, s, past, checkpoint, b, &first, &end);
    r = kv_section_take(&m->to->sections[s], list->n > 0 ? list->entries[list->n - 1].to : NULL, first, end, &block, reterr);
    if (r)
        return error_trace(r);
    r = kv_moved_add(list, lead, block);
    if (!r)
        r = fill_block(m, s, past, checkpoint, b, block);
    if (r) {
        (void)kv_block_unref(block);
        return error_trace(r);
    }
    *ret = block;
    return 0;
}

int kv_migrate_tail(const KvMigration *m, const KvPast *past, uint8_t *from, uint8_t *to)
{
    int r = 0;

    for (uint32_t l = 0; l < m->to->sizes.n_layers && !r; l++) {
        const KvLayerPlace *a = &m->from->sizes.layers[l], *b = &m->to->sizes.layers[l];
        const KvSectionSizes *source, *target;

        if (a->section == KV_NO_SECTION || a->owner != l)
            continue;
        if (!kv_migrate_is_same(m, l)) {
            r = kv_error(kv_migrate_recent(m, l, past, from, to));
            continue;
        }
        source = &m->from->sizes.sections[a->section];
        target = &m->to->sizes.sections[b->section];
        memcpy(to + target->tail_offset + b->plane * target->tail_layer_bytes,
               from + source->tail_offset + a->plane * source->tail_layer_bytes, target->tail_layer_bytes);
    }
    return error_trace(r);
}
