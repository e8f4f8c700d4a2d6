/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Going back.
 *
 * To go on from a length n, each section needs positions [kv_needed_from(n), n) in full precision, and the sinks; a windowed one the
 * blocks in sight; a state must be that after n tokens.  The tail ring holds [tail_from, length).  When that is not enough, a section with
 * an unpacked form reads it back from its pages.  What the past itself has not is in a checkpoint, or a snapshot of states, or nowhere.
 * A place inside a pass, behind the checkpoint that was made before it, is had by splicing the two (cache/kv-cache-splice.c).  The longest
 * of the places that something was kept for, and that all sections can go to, is where the past goes.
 */

#include "cache/kv-cache-splice.h"

/* ---- tails read back from pages ----------------------------------------------------------------------------------------- */

/* Brings one page of a plane where attend_refill() can read it; *@pages, *@offset, *@index say where. */
static int refill_source(KvStore *store, const KvArenas *arenas, const KvBlock *block, uint32_t plane, uint32_t page, uint32_t place,
                         const GpuBuffer **pages, uint64_t *offset, uint32_t *index)
{
    uint32_t page_bytes = arenas->options.page_bytes;

    if (block->arena->buffer) {
        *pages = block->arena->buffer;
        *offset = plane * block->arena->plane_bytes;
        *index = block->pages[page];
        return 0;
    }
    *pages = store->fresh[0];
    *offset = 0;
    *index = place;
    return gpu_upload(store->gpu, GPU_QUEUE_COMPUTE, store->fresh[0], (uint64_t)place * page_bytes,
                      block->arena->memory + kv_block_offset(block, plane, page), page_bytes, GPU_WAIT_NONE, "kv refill",
                      NULL);
}

/* One page of one layer.  @first_layer: the record is not on the device yet. */
static int refill_layer(KvStore *store, const KvPast *past, uint32_t layer, uint32_t page, uint32_t place, bool first_layer)
{
    const KvLayerPlace *where = &store->sizes.layers[layer];
    KvSection *section = &store->sections[where->section];
    const KvBlock *block = past->sections[where->section].blocks[page / KV_BLOCK_PAGES];
    AttendPack *record = (AttendPack *)section->inputs_memory + place;
    AttendLayer buffers = kv_store_layer(store, layer);
    const GpuBuffer *pages;
    uint64_t offset;
    uint32_t index;
    int r;

    r = refill_source(store, &section->arenas, block, where->plane, page % KV_BLOCK_PAGES, place, &pages, &offset, &index);
    /* The record is the same for all layers: where the source differs by layer, only the offset does.  Written once: it is being read. */
    if (!r && first_layer) {
        *record = (AttendPack){.tail_slot = past->tail->slot, .page = (int32_t)page, .to = index};
        r = gpu_upload(store->gpu, GPU_QUEUE_COMPUTE, section->inputs, place * sizeof(AttendPack), record, sizeof(AttendPack),
                       GPU_WAIT_NONE, "kv refill", NULL);
    }
    if (!r)
        r = attend_refill(section->attend, &buffers, section->inputs, place * sizeof(AttendPack), 1, pages, offset);
    return error_trace(r);
}

/* Queues the refill of a section's ring from the pages that the ring of a sequence of @length is to hold. */
static int refill_section(KvStore *store, const KvPast *past, uint32_t s, uint32_t length)
{
    uint32_t first = kv_needed_from(&store->sections[s], length) / KV_PAGE_TOKENS;
    uint32_t end = MIN((length + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS, past->length / KV_PAGE_TOKENS);
    int r = 0;

    for (uint32_t page = first; page < end && !r; page++) {
        bool first_layer = true;

        for (uint32_t l = 0; l < store->sizes.n_layers && !r; l++) {
            if (store->sizes.layers[l].section != s || store->sizes.layers[l].owner != l)
                continue;
            r = refill_layer(store, past, l, page, page - first, first_layer);
            first_layer = false;
        }
    }
    return r;
}

static bool must_refill(const KvPast *past, uint32_t s, uint32_t length)
{
    return !kv_section_is_cross(&past->store->sections[s]) && length > 0 &&
           past->sections[s].tail_from > kv_needed_from(&past->store->sections[s], length);
}

/* Reads tails of a past to be cropped to @length back from its pages, which still are those of the longer one. */
static int refill_tail(KvPast *past, uint32_t length, ErrorDetail *reterr)
{
    KvStore *store = past->store;
    int r;

    r = kv_store_settle(store, reterr);
    if (r)
        return error_trace(r);
    kv_tails_next_pass(&store->tails);
    r = kv_tails_acquire(&store->tails, &past->tail, reterr);
    if (r)
        return error_trace(r);
    for (uint32_t s = 0; s < store->sizes.n_sections && !r; s++)
        if (must_refill(past, s, length))
            r = refill_section(store, past, s, length);
    if (!r)
        r = gpu_drain(store->gpu, reterr);
    return error_trace(kv_error(r));
}

/* ---- where to go back to ----------------------------------------------------------------------------------------------------- */

typedef struct Retreat {
    uint32_t length;
    const KvCheckpoint *checkpoint; /* NULL: with what the past has itself */
    KvSplice splice;                /* older NULL: none */
} Retreat;

/* Whether a section can go back to @length with what it has. */
static bool section_reaches(const KvPast *past, uint32_t s, uint32_t length)
{
    const KvSection *section = &past->store->sections[s];
    uint32_t complete = past->length / KV_PAGE_TOKENS * KV_PAGE_TOKENS;

    if (kv_section_is_cross(section))
        return true;
    if (!kv_section_sees(past, s, length))
        return false;
    if (!must_refill(past, s, length))
        return true;
    /* Tokens after the last complete page are nowhere but in the tail. */
    return !kv_section_is_packed(section) && (length <= complete || past->sections[s].tail_from <= complete);
}

static bool has_state(const KvPast *past, uint32_t length)
{
    return past->store->states.n_slots == 0 || kv_states_find(&past->states, length, past->length);
}

static bool past_reaches(const KvPast *past, uint32_t length)
{
    if (length == 0)
        return true;
    if (!has_state(past, length))
        return false;
    for (uint32_t s = 0; s < past->store->sizes.n_sections; s++)
        if (!section_reaches(past, s, length))
            return false;
    return true;
}

static uint32_t mark_first_page(const KvMark *mark)
{
    return mark->first_block * KV_BLOCK_PAGES + (mark->first_block < mark->n_blocks ? mark->blocks[0]->first_page : 0);
}

static bool checkpoint_reaches(const KvPast *past, const KvCheckpoint *checkpoint, uint32_t length)
{
    if (checkpoint->length < length || checkpoint->length > past->length)
        return false;
    if (checkpoint->length != length && !has_state(past, length))
        return false;
    for (uint32_t s = 0; s < past->store->sizes.n_sections; s++) {
        const KvSection *section = &past->store->sections[s];
        const KvMark *mark = &checkpoint->marks[s];

        if (!kv_section_is_cross(section) &&
            (mark->tail_from > kv_needed_from(section, length) || (mark->blocks && mark_first_page(mark) > kv_kept_page(section, length))))
            return false;
    }
    return true;
}

/* @best or @length, when it is longer and can be gone back to. */
static void consider(const KvPast *past, uint32_t length, uint32_t n_keep, Retreat *best)
{
    KvSplice splice;

    if (length > n_keep || length <= best->length)
        return;
    if (past_reaches(past, length)) {
        *best = (Retreat){.length = length};
        return;
    }
    for (uint32_t i = 0; i < past->n_checkpoints; i++)
        if (checkpoint_reaches(past, past->checkpoints[i], length)) {
            *best = (Retreat){.length = length, .checkpoint = past->checkpoints[i]};
            return;
        }
    if (!has_state(past, length) || !kv_splice_find(past, length, &splice))
        return;
    for (uint32_t s = 0; s < past->store->sizes.n_sections; s++)
        if (!kv_splice_reaches(past, &splice, s, length) && !section_reaches(past, s, length))
            return;
    *best = (Retreat){.length = length, .splice = splice};
}

/* The longest place, of those that something was kept for. */
static Retreat find_retreat(const KvPast *past, uint32_t n_keep)
{
    Retreat best = {0};

    consider(past, n_keep, n_keep, &best);
    if (best.length == n_keep)
        return best;
    consider(past, past->length / KV_PAGE_TOKENS * KV_PAGE_TOKENS, n_keep, &best);
    for (uint32_t i = 0; i < past->states.n_snapshots; i++)
        consider(past, past->states.snapshots[i].length, n_keep, &best);
    for (uint32_t i = 0; i < past->n_checkpoints; i++)
        consider(past, past->checkpoints[i]->length, n_keep, &best);
    return best;
}

/* ---- going there ---------------------------------------------------------------------------------------------------------------- */

/* The windows of the checkpoint instead of those that the past has. */
static void restore_marks(KvPast *past, const KvCheckpoint *checkpoint)
{
    for (uint32_t s = 0; s < past->store->sizes.n_sections; s++) {
        KvSectionPast *section = &past->sections[s];
        const KvMark *mark = &checkpoint->marks[s];

        if (kv_section_is_cross(&past->store->sections[s]))
            continue;
        section->tail_from = mark->tail_from;
        if (!mark->blocks)
            continue;
        for (uint32_t b = mark->first_block; b < mark->n_blocks; b++)
            (void)kv_block_ref(mark->blocks[b - mark->first_block]);
        for (uint32_t b = section->first_block; b < section->n_blocks; b++)
            section->blocks[b] = kv_block_unref(section->blocks[b]);
        for (uint32_t b = mark->first_block; b < mark->n_blocks; b++)
            section->blocks[b] = mark->blocks[b - mark->first_block];
        section->first_block = mark->first_block;
        section->n_blocks = mark->n_blocks;
    }
}

static int go_to_checkpoint(KvPast *past, const Retreat *retreat)
{
    KvTail *tail = kv_tail_new_from(&past->store->tails, retreat->checkpoint->saved);

    if (!tail)
        return error_origin(KV_E_HOST_MEMORY);
    restore_marks(past, retreat->checkpoint);
    (void)kv_tail_unref(past->tail);
    past->tail = tail;
    return 0;
}

static int go_by_pages(KvPast *past, uint32_t length, ErrorDetail *reterr)
{
    const KvStore *store = past->store;
    bool any = false;
    int r;

    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        any = any || must_refill(past, s, length);
    if (!any)
        return 0;
    r = refill_tail(past, length, reterr);
    if (r)
        return error_trace(r);
    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        if (must_refill(past, s, length))
            past->sections[s].tail_from = kv_needed_from(&store->sections[s], length);
    return 0;
}

/* The recent tokens that two places have together; then those that pages have. */
static int go_by_splice(KvPast *past, const Retreat *retreat, ErrorDetail *reterr)
{
    uint32_t n_sections = past->store->sizes.n_sections;
    _cleanup_(freep) uint32_t *before = calloc(MAX(n_sections, 1u), sizeof(uint32_t));
    KvTail *old = past->tail, *tail;
    int r;

    if (!before)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t s = 0; s < n_sections; s++)
        before[s] = past->sections[s].tail_from;
    r = kv_splice_tail(past, &retreat->splice, retreat->length, &tail, reterr);
    if (r)
        return error_trace(r);
    past->tail = tail;
    r = go_by_pages(past, retreat->length, reterr);
    if (!r) {
        (void)kv_tail_unref(old);
        return 0;
    }
    (void)kv_tail_unref(past->tail);
    past->tail = old;
    for (uint32_t s = 0; s < n_sections; s++)
        past->sections[s].tail_from = before[s];
    return error_trace(r);
}

/* A reference to the state to go on with; NULL when none is needed, or memory is short. */
static KvTail *state_of(const KvPast *past, const Retreat *retreat)
{
    KvTail *kept = kv_states_find(&past->states, retreat->length, past->length);

    if (kept)
        return kv_tail_ref(kept);
    if (retreat->checkpoint && retreat->checkpoint->state)
        return kv_tail_new_from(&past->store->states, retreat->checkpoint->state);
    return NULL;
}

/* Goes back to @n_keep or less. */
static int rewind_past(KvPast *past, uint32_t n_keep, ErrorDetail *reterr)
{
    const Retreat retreat = find_retreat(past, n_keep);
    KvTail *state = NULL;
    int r = 0;

    if (retreat.length > 0 && past->store->states.n_slots > 0) {
        state = state_of(past, &retreat);
        if (!state)
            return error_origin(KV_E_HOST_MEMORY);
    }
    if (retreat.checkpoint)
        r = go_to_checkpoint(past, &retreat);
    else if (retreat.splice.older)
        r = go_by_splice(past, &retreat, reterr);
    else if (retreat.length > 0)
        r = go_by_pages(past, retreat.length, reterr);
    if (r) {
        (void)kv_tail_unref(state);
        return error_trace(r);
    }
    if (retreat.length < past->length || state)
        kv_states_go_back(&past->states, retreat.length, state);
    kv_past_drop_beyond(past, retreat.length);
    if (retreat.length == 0)
        past->recording = false;
    return 0;
}

uint32_t kv_cache_crop_length(const KvCache *cache, uint32_t n_keep)
{
    if (n_keep >= cache->past->length)
        return cache->past->length;
    return find_retreat(cache->past, n_keep).length;
}

int kv_past_crop(KvPast *past, uint32_t n_keep, ErrorDetail *reterr)
{
    int r = past->host ? kv_host_past_crop(past->host, past->length - n_keep, reterr) : 0;

    return r ? error_trace(r) : error_trace(rewind_past(past, n_keep, reterr));
}

int kv_cache_crop(KvCache *cache, uint32_t n_keep, uint32_t *ret_length, ErrorDetail *reterr)
{
    int r;

    if (cache->in_pass)
        return error_detail_set(reterr, -EBUSY, "cache: a sequence cannot be cropped in the middle of a pass");
    if (n_keep < cache->past->length) {
        r = kv_past_crop(cache->past, n_keep, reterr);
        if (r)
            return error_trace(r);
        kv_store_trim(cache->store);
    }
    *ret_length = cache->past->length;
    return 0;
}

int kv_cache_recover(KvCache *cache, uint32_t end, ErrorDetail *reterr)
{
    KvPast *past = cache->past;

    for (uint32_t s = 0; s < cache->store->sizes.n_sections; s++) {
        uint32_t ring = kv_ring_tokens(cache->store->sections[s].sizes->attend.form);
        uint32_t from = MIN(end > ring ? end - ring : 0, past->length);

        if (!kv_section_is_cross(&cache->store->sections[s]))
            past->sections[s].tail_from = MAX(past->sections[s].tail_from, from);
    }
    return error_trace(rewind_past(past, past->length, reterr));
}
