/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences move to another store. */

#include "cache/kv-migrate-internal.h"

#include <string.h>

static bool same_shape(const KvShape *a, const KvShape *b)
{
    return memcmp(a, b, sizeof(*a)) == 0;
}

static bool same_form(const KvSectionSizes *a, const KvSectionSizes *b)
{
    return kv_form_equal(&a->attend.form, &b->attend.form);
}

/* Whether a layer means the same in both stores, whatever its form. */
static bool same_layer(const KvStore *from, const KvStore *to, uint32_t l)
{
    const KvLayerPlace *a = &from->sizes.layers[l], *b = &to->sizes.layers[l];
    const AttendOptions *x, *y;

    if (a->has_state != b->has_state || a->conv_offset != b->conv_offset || a->recurrent_offset != b->recurrent_offset ||
        a->owner != b->owner || (a->section == KV_NO_SECTION) != (b->section == KV_NO_SECTION))
        return false;
    if (a->section == KV_NO_SECTION)
        return true;
    x = &from->sizes.sections[a->section].attend;
    y = &to->sizes.sections[b->section].attend;
    return same_shape(&x->shape, &y->shape) && x->scale == y->scale &&
           from->sizes.sections[a->section].kind == to->sizes.sections[b->section].kind &&
           x->visibility.window == y->visibility.window && x->softcap == y->softcap && x->sink_logits == y->sink_logits;
}

static bool same_layers(const KvStore *from, const KvStore *to)
{
    if (from->sizes.n_layers != to->sizes.n_layers || from->sizes.state_slot_bytes != to->sizes.state_slot_bytes)
        return false;
    for (uint32_t l = 0; l < from->sizes.n_layers; l++)
        if (!same_layer(from, to, l))
            return false;
    return true;
}

static bool same_forms(const KvStore *from, const KvStore *to)
{
    for (uint32_t l = 0; l < from->sizes.n_layers; l++) {
        uint32_t a = from->sizes.layers[l].section, b = to->sizes.layers[l].section;

        if (a != KV_NO_SECTION && !same_form(&from->sizes.sections[a], &to->sizes.sections[b]))
            return false;
    }
    return true;
}

bool kv_migrate_is_same(const KvMigration *m, uint32_t l)
{
    uint32_t a = m->from->sizes.layers[l].section, b = m->to->sizes.layers[l].section;

    return same_form(&m->from->sizes.sections[a], &m->to->sizes.sections[b]);
}

bool kv_store_is_same(const KvStore *from, const KvStore *to)
{
    if (from->host || to->host)
        return from->host && to->host && kv_host_is_same(from->host, to->host);
    return same_layers(from, to) && same_forms(from, to);
}

/* ---- what has been moved ---------------------------------------------------------------------------------------------------- */

void *kv_moved_find(const KvMovedList *list, const void *from)
{
    for (uint32_t i = list->n; i-- > 0;)
        if (list->entries[i].from == from)
            return list->entries[i].to;
    return NULL;
}

int kv_moved_add(KvMovedList *list, const void *from, void *to)
{
    KvMoved *grown;

    if (list->n == list->n_room) {
        grown = realloc(list->entries, (2 * list->n_room + 8) * sizeof(KvMoved));
        if (!grown)
            return error_origin(KV_E_HOST_MEMORY);
        list->entries = grown;
        list->n_room = 2 * list->n_room + 8;
    }
    list->entries[list->n++] = (KvMoved){from, to};
    return 0;
}

/* ---- tails and states ----------------------------------------------------------------------------------------------------------- */

/* What @saved is in the target, with a reference for the caller. */
static int move_saved(KvMigration *m, const KvPast *past, KvSaved *saved, bool state, KvSaved **ret, ErrorDetail *reterr)
{
    KvSaved *own = kv_moved_find(&m->saved, saved);
    int r;

    if (own) {
        *ret = kv_saved_ref(own);
        return 0;
    }
    r = saved->event ? kv_error(gpu_event_wait(m->from->gpu, saved->event, reterr)) : 0; /* it may still be coming */
    if (!r)
        r = kv_saved_new(state ? &m->to->states : &m->to->tails, &own, reterr);
    if (r)
        return error_trace(r);
    if (state)
        memcpy(own->memory, saved->memory, m->to->states.slot_bytes);
    else
        r = kv_migrate_tail(m, past, saved->memory, own->memory);
    if (!r)
        r = kv_moved_add(&m->saved, saved, own);
    if (r) {
        (void)kv_saved_unref(own);
        return error_trace(r);
    }
    *ret = own;
    return 0;
}

/* A tail that is in its slot only.  It is read into memory of the migration: the source's budget need not have room for what leaves it, and
 * no checkpoint of its gives way. */
static int fetch_tail(KvMigration *m, const KvPast *past, const KvTail *tail, bool state, KvSaved **ret, ErrorDetail *reterr)
{
    _cleanup_(gpu_event_unrefp) GpuEvent *event = NULL;
    _cleanup_(kv_saved_unrefp) KvSaved *own = NULL;
    uint64_t bytes = tail->tails->slot_bytes;
    uint8_t *memory = malloc(bytes);
    int r;

    if (!memory)
        return error_origin(KV_E_HOST_MEMORY);
    r = gpu_download(m->from->gpu, GPU_QUEUE_COMPUTE, tail->tails->buffer, (uint64_t)tail->slot * bytes, memory, bytes, GPU_WAIT_NONE,
                     "tail move", &event);
    if (!r)
        r = gpu_event_wait(m->from->gpu, event, reterr);
    if (r) {
        gpu_free_host(m->from->gpu, memory); /* which a device that does not come to rest may still write to, whatever the code */
        return error_trace(kv_error(r));
    }
    r = kv_saved_new(state ? &m->to->states : &m->to->tails, &own, reterr);
    if (!r && state)
        memcpy(own->memory, memory, m->to->states.slot_bytes);
    else if (!r)
        r = kv_migrate_tail(m, past, memory, own->memory);
    free(memory);
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(own);
    return 0;
}

static int move_tail(KvMigration *m, const KvPast *past, KvTail *tail, bool state, KvTail **ret, ErrorDetail *reterr)
{
    _cleanup_(kv_saved_unrefp) KvSaved *own = NULL;
    KvTail *moved = kv_moved_find(&m->tails, tail);
    int r;

    if (!tail || moved) {
        *ret = kv_tail_ref(moved);
        return 0;
    }
    r = tail->saved ? move_saved(m, past, tail->saved, state, &own, reterr)
                    : fetch_tail(m, past, tail, state, &own, reterr);
    if (r)
        return error_trace(r);
    moved = kv_tail_new_from(state ? &m->to->states : &m->to->tails, own);
    if (!moved)
        return error_origin(KV_E_HOST_MEMORY);
    r = kv_moved_add(&m->tails, tail, moved);
    if (r) {
        (void)kv_tail_unref(moved);
        return error_trace(r);
    }
    *ret = moved;
    return 0;
}

static int move_states(KvMigration *m, const KvPast *past, KvStates *to, ErrorDetail *reterr)
{
    const KvStates *from = &past->states;
    int r;

    r = move_tail(m, past, from->now, true, &to->now, reterr);
    for (uint32_t i = 0; i < from->n_snapshots && !r; i++) {
        to->snapshots[i].length = from->snapshots[i].length;
        r = move_tail(m, past, from->snapshots[i].state, true, &to->snapshots[i].state, reterr);
        to->n_snapshots += r == 0;
    }
    return error_trace(r);
}

/* ---- pasts -------------------------------------------------------------------------------------------------------------------------- */

/* The first block that all sections of the source have which are one in the target: windows let go of theirs when their own forms no
 * longer need them. */
static uint32_t first_common_block(const KvMigration *m, uint32_t s, const KvPast *past, const KvCheckpoint *checkpoint)
{
    uint32_t first = 0;

    for (uint32_t l = 0; l < m->to->sizes.n_layers; l++) {
        uint32_t source = m->from->sizes.layers[l].section;

        if (m->to->sizes.layers[l].section == s)
            first = MAX(first, past ? past->sections[source].first_block : checkpoint->marks[source].first_block);
    }
    return first;
}

static int move_checkpoint(KvMigration *m, const KvCheckpoint *from, KvCheckpoint *to, ErrorDetail *reterr)
{
    int r;

    to->length = from->length;
    to->made = ++m->to->made;
    r = move_saved(m, NULL, from->saved, false, &to->saved, reterr);
    if (!r && from->state)
        r = move_saved(m, NULL, from->state, true, &to->state, reterr);
    for (uint32_t s = 0; s < m->to->sizes.n_sections && !r; s++) {
        const KvMark *mark = &from->marks[m->leads[s]];
        KvMark *own = &to->marks[s];

        *own = (KvMark){.tail_from = mark->tail_from, .first_block = mark->first_block, .n_blocks = mark->n_blocks};
        if (!mark->blocks)
            continue;
        own->first_block = own->n_blocks = MIN(first_common_block(m, s, NULL, from), mark->n_blocks); /* grows as they come */
        own->blocks = calloc(MAX(mark->n_blocks - own->first_block, 1u), sizeof(KvBlock *));
        if (!own->blocks)
            return error_origin(KV_E_HOST_MEMORY);
        for (uint32_t b = own->first_block; b < mark->n_blocks && !r; b++) {
            r = kv_migrate_block(m, s, NULL, from, b, from->length / KV_PAGE_TOKENS, &own->blocks[b - own->first_block], reterr);
            own->n_blocks += r == 0;
        }
    }
    return error_trace(r);
}

static int move_checkpoints(KvMigration *m, const KvPast *from, KvPast *to, ErrorDetail *reterr)
{
    int r = 0;

    for (uint32_t i = 0; i < from->n_checkpoints && !r; i++) {
        KvCheckpoint *checkpoint = kv_checkpoint_new(m->to);

        if (!checkpoint)
            return error_origin(KV_E_HOST_MEMORY);
        r = move_checkpoint(m, from->checkpoints[i], checkpoint, reterr);
        if (r)
            (void)kv_checkpoint_free(m->to, checkpoint);
        else
            to->checkpoints[to->n_checkpoints++] = checkpoint;
    }
    return error_trace(r);
}

/* Where the tail of a section of the target begins: with that of its layers in the source, or where it is needed from. */
static uint32_t tail_from(const KvMigration *m, const KvPast *from, uint32_t s)
{
    uint32_t tail = 0;

    for (uint32_t l = 0; l < m->to->sizes.n_layers; l++) {
        uint32_t source = m->from->sizes.layers[l].section;

        if (m->to->sizes.layers[l].section != s)
            continue;
        if (!kv_migrate_is_same(m, l))
            return kv_needed_from(&m->to->sections[s], kv_past_tokens(from, source));
        tail = MAX(tail, from->sections[source].tail_from);
    }
    return tail;
}

static int move_section(KvMigration *m, const KvPast *from, KvPast *to, uint32_t s, ErrorDetail *reterr)
{
    const KvSectionPast *lead = &from->sections[m->leads[s]];
    uint32_t n_pages = kv_past_tokens(from, m->leads[s]) / KV_PAGE_TOKENS;
    KvSectionPast *own = &to->sections[s];
    int r = 0;

    own->tail_from = tail_from(m, from, s);
    own->first_block = own->n_blocks = MIN(first_common_block(m, s, from, NULL), lead->n_blocks);
    for (uint32_t b = own->first_block; b < lead->n_blocks && !r; b++) {
        r = kv_migrate_block(m, s, from, NULL, b, n_pages, &own->blocks[b], reterr);
        own->n_blocks += r == 0;
    }
    return error_trace(r);
}

static int move_past(KvMigration *m, const KvPast *from, KvPast *to, ErrorDetail *reterr)
{
    int r;

    if (from->length > m->to->sizes.policy.max_cache_tokens)
        return error_detail_set(reterr, KV_E_CONTEXT, "cache: %u tokens do not fit into %u", from->length,
                                m->to->sizes.policy.max_cache_tokens);
    to->length = from->length;
    to->cross_length = from->cross_length;
    to->recording = from->recording;
    to->record_from = from->record_from;
    if (from->host) {
        (void)kv_host_past_free(to->host);
        to->host = kv_host_past_copy(m->to->host, from->host);
        return to->host ? 0 : error_origin(KV_E_HOST_MEMORY);
    }
    r = move_tail(m, from, from->tail, false, &to->tail, reterr);
    if (!r)
        r = move_states(m, from, &to->states, reterr);
    for (uint32_t s = 0; s < m->to->sizes.n_sections && !r; s++)
        r = move_section(m, from, to, s, reterr);
    if (!r && same_forms(m->from, m->to)) /* another form has no use for tails of the past */
        r = move_checkpoints(m, from, to, reterr);
    return error_trace(r);
}

/* ---- all of it ------------------------------------------------------------------------------------------------------------------------ */

/* Every flush of the source's schedule has already changed what it keeps; another schedule would not have. */
static int refuse_host(const KvStore *from, const KvStore *to, ErrorDetail *reterr)
{
    char source[96] = "pages", target[96] = "pages";

    if (from->host)
        kv_host_describe(from->host, source, sizeof(source));
    if (to->host)
        kv_host_describe(to->host, target, sizeof(target));
    return error_detail_set(reterr, -ENOTSUP, "cache: compatibility mode moves only to the same keys and layers; from %s to %s no number would "
                            "be what it was", source, target);
}

static int check(KvCache *const *caches, uint32_t n, const KvStore *to, bool lossy, ErrorDetail *reterr)
{
    const KvStore *from = caches[0]->store;

    for (uint32_t i = 0; i < n; i++)
        if (caches[i]->in_pass || caches[i]->store != from)
            return error_detail_set(reterr, -EBUSY, "cache: sequence %u to be moved is in a pass, or in another store", i);
    if (from == to || from->pass.active || to->pass.active)
        return error_detail_set(reterr, from == to ? -EINVAL : -EBUSY, "cache: a store cannot move into itself, nor during a pass");
    if ((from->host || to->host) && !kv_store_is_same(from, to))
        return refuse_host(from, to, reterr);
    if (!same_layers(from, to))
        return error_detail_set(reterr, -EINVAL, "cache: the two stores are for different layers");
    if (!lossy && !same_forms(from, to))
        return error_detail_set(reterr, -EINVAL, "cache: moving would code the past anew, which is not asked for");
    return 0;
}

static int migration_init(KvMigration *m, KvStore *from, KvStore *to, ErrorDetail *reterr)
{
    int r;

    *m = (KvMigration){.from = from, .to = to};
    m->leads = calloc(MAX(to->sizes.n_sections, 1u), sizeof(uint32_t));
    m->blocks = calloc(MAX(to->sizes.n_sections, 1u), sizeof(KvMovedList));
    if (!m->leads || !m->blocks)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t l = to->sizes.n_layers; l-- > 0;)
        if (to->sizes.layers[l].section != KV_NO_SECTION)
            m->leads[to->sizes.layers[l].section] = from->sizes.layers[l].section;
    r = kv_store_settle(from, reterr);
    if (!r)
        r = kv_store_settle(to, reterr);
    return error_trace(r);
}

/* Tails and states of the migration itself: pasts have their own references. */
static void migration_deinit(KvMigration *m)
{
    for (uint32_t s = 0; m->blocks && s < m->to->sizes.n_sections; s++)
        free(m->blocks[s].entries);
    free(m->blocks);
    free(m->leads);
    free(m->tails.entries);
    free(m->saved.entries);
}

static void change_over(KvCache *cache, KvStore *to, KvPast *past)
{
    (void)kv_past_free(cache->past);
    kv_store_unreserve(cache->store);
    kv_cache_unlink(cache);
    cache->past = past;
    kv_cache_link(cache, to);
}

static int move_all(KvMigration *m, KvCache *const *caches, uint32_t n, KvPast **pasts, ErrorDetail *reterr)
{
    int r = 0;

    for (uint32_t i = 0; i < n && !r; i++) {
        pasts[i] = kv_past_new(m->to);
        r = pasts[i] ? move_past(m, caches[i]->past, pasts[i], reterr) : error_origin(KV_E_HOST_MEMORY);
    }
    if (!r)
        r = kv_error(gpu_drain(m->to->gpu, reterr));
    return error_trace(r);
}

int kv_caches_migrate(KvCache *const *caches, uint32_t n, KvStore *to, bool lossy, ErrorDetail *reterr)
{
    _cleanup_(freep) KvPast **pasts = calloc(MAX(n, 1u), sizeof(KvPast *));
    uint32_t n_reserved = 0;
    KvMigration m;
    KvStore *from;
    int r;

    r = pasts ? 0 : error_origin(KV_E_HOST_MEMORY);
    if (r || n == 0)
        return r;
    r = check(caches, n, to, lossy, reterr);
    if (r)
        return error_trace(r);
    from = caches[0]->store;
    r = migration_init(&m, from, to, reterr);
    for (; n_reserved < n && !r; n_reserved += r == 0)
        r = kv_store_reserve(to, reterr);
    if (!r)
        r = move_all(&m, caches, n, pasts, reterr);
    migration_deinit(&m);
    for (uint32_t i = 0; i < n && r; i++)
        (void)kv_past_free(pasts[i]);
    for (; n_reserved > 0 && r; n_reserved--)
        kv_store_unreserve(to);
    for (uint32_t i = 0; i < n && !r; i++)
        change_over(caches[i], to, pasts[i]);
    kv_store_trim(r ? to : from);
    (void)kv_store_charge_host(to, 0); /* beyond the budget the next pass is refused */
    return error_trace(r);
}

int kv_store_migrate(KvStore *from, KvStore *to, bool lossy, ErrorDetail *reterr)
{
    _cleanup_(freep) KvCache **caches = calloc(MAX(from->n_caches, 1u), sizeof(KvCache *));
    uint32_t n = 0;

    if (!caches)
        return error_origin(KV_E_HOST_MEMORY);
    for (KvCache *cache = from->caches; cache; cache = cache->next)
        caches[n++] = cache;
    return error_trace(kv_caches_migrate(caches, n, to, lossy, reterr));
}
