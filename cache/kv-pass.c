/* SPDX-License-Identifier: Apache-2.0 */
/* One forward pass: reserve, plan, commit or abort.  What happens in between, layer by layer, is in kv-pass-layer.c. */

#include "cache/kv-store-internal.h"

#include <math.h>
#include <string.h>

/* Whether there is room for the tokens, and what they ask for. */
static int check_room(const KvStore *store, const KvPassItem *items, uint32_t n_items, bool cross, ErrorDetail *reterr)
{
    uint32_t most = store->sizes.policy.max_cache_tokens;
    bool asks = false;

    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        if (kv_section_is_cross(&store->sections[s])) {
            asks = true;
            most = cross ? store->sections[s].sizes->max_tokens : most;
        }
    if (cross && !asks)
        return error_detail_set(reterr, -EINVAL, "cache: no layer reads encoder output");
    for (uint32_t i = 0; i < n_items; i++) {
        const KvPast *past = items[i].cache->past;
        uint32_t has = cross ? past->cross_length : past->length;

        if (items[i].n_tokens > most - has)
            return error_detail_set(reterr, KV_E_CONTEXT, "cache: %u tokens after %u exceed its %u", items[i].n_tokens, has, most);
        if (asks && !cross && past->cross_length == 0)
            return error_detail_set(reterr, -EINVAL, "cache: item %u has no encoder output to attend to", i);
    }
    return 0;
}

static int check_items(const KvStore *store, const KvPassItem *items, uint32_t n_items, bool cross, ErrorDetail *reterr)
{
    uint64_t n_rows = 0;

    if (store->pass.active)
        return error_detail_set(reterr, -EBUSY, "cache: a pass is in progress");
    if (n_items == 0 || n_items > store->sizes.max_items)
        return error_detail_set(reterr, -EINVAL, "cache: a pass of %u sequences, must be 1 to %u", n_items,
                                store->sizes.max_items);
    for (uint32_t i = 0; i < n_items; i++) {
        const KvCache *cache = items[i].cache;

        if (cache->store != store || items[i].n_tokens == 0)
            return error_detail_set(reterr, -EINVAL, "cache: item %u has no tokens or another store", i);
        for (uint32_t j = 0; j < i; j++)
            if (items[j].cache == cache)
                return error_detail_set(reterr, -EINVAL, "cache: items %u and %u are the same sequence", j, i);
        n_rows += items[i].n_tokens;
    }
    if (n_rows > store->sizes.max_rows)
        return error_detail_set(reterr, -EINVAL, "cache: a pass of %llu rows, at most %u", (unsigned long long)n_rows,
                                store->sizes.max_rows);
    return error_trace(check_room(store, items, n_items, cross, reterr));
}

/* Steps of a sequence's states: those of its tokens but the last when it is recorded and there are slots left for them all, else none. */
static uint32_t take_steps(const KvPassItem *item, uint32_t *left)
{
    uint32_t n = item->n_tokens - 1;

    if (!item->cache->past->recording || n > *left || n >= KV_SNAPSHOTS_MAX)
        return 0;
    *left -= n;
    return n;
}

/* Compatibility mode has no arenas that would watch over the host budget. */
static int charge_host(KvStore *store, const KvPassItem *items, uint32_t n_items, ErrorDetail *reterr)
{
    const KvBudget *budget = kv_budget_tightest(&store->host_budget);
    uint64_t n_tokens = 0, bytes;

    for (uint32_t i = 0; i < n_items; i++)
        n_tokens += items[i].n_tokens;
    bytes = n_tokens * store->sizes.plan.host_bytes_per_token;
    if (!kv_store_charge_host(store, bytes))
        return error_detail_set(reterr, KV_E_HOST_MEMORY, "cache: %llu bytes more for %llu tokens in compatibility mode, %llu of %llu "
                                "(host-memory) are in use", (unsigned long long)bytes, (unsigned long long)n_tokens,
                                (unsigned long long)budget->used_bytes, (unsigned long long)budget->limit_bytes);
    return 0;
}

/* Tails, and the states where the pass has to do with them. */
static int reserve_slots(KvPass *pass, const KvPassItem *items, uint32_t n_items, ErrorDetail *reterr)
{
    KvStore *store = pass->store;
    uint32_t steps_left = store->sizes.n_state_steps;
    int r = 0;

    kv_tails_next_pass(&store->tails);
    kv_tails_next_pass(&store->states);
    for (uint32_t i = 0; i < n_items && !r; i++) {
        KvPast *past = items[i].cache->past;

        r = kv_tails_acquire(&store->tails, &past->tail, reterr);
        if (!r && store->states.n_slots > 0 && !pass->cross)
            r = kv_states_acquire(&past->states, &store->states, take_steps(&items[i], &steps_left), reterr);
    }
    return error_trace(r);
}

/* Blocks, then slots; on failure what was reserved returns. */
static int reserve(KvPass *pass, const KvPassItem *items, uint32_t n_items, ErrorDetail *reterr)
{
    int r = 0;

    pass->n_entries = 0;
    r = charge_host(pass->store, items, n_items, reterr);
    for (uint32_t i = 0; i < n_items && !r; i++) {
        pass->entries[i].n_tokens = items[i].n_tokens;
        pass->n_entries = i + 1;
        r = kv_cache_grow(items[i].cache, &pass->entries[i], reterr);
        if (!r && pass->store->host)
            r = kv_host_past_begin(items[i].cache->past->host, items[i].cache->past->length, items[i].n_tokens);
        if (!r && !pass->cross && items[i].cache->past->recording)
            r = kv_cache_save_recorded(items[i].cache, items[i].n_tokens, reterr);
    }
    if (!r)
        r = reserve_slots(pass, items, n_items, reterr);
    for (uint32_t i = 0; i < pass->n_entries && r; i++) {
        kv_cache_shrink(&pass->entries[i]);
        if (pass->store->host)
            kv_host_past_abort(items[i].cache->past->host);
        kv_states_abort(&pass->entries[i].cache->past->states);
    }
    return error_trace(r);
}

/* The sequences as section @s sees them, in this pass or in the one to come. */
static void fill_items(KvStore *store, uint32_t s, bool after)
{
    bool still = kv_section_is_cross(&store->sections[s]) && !store->pass.cross; /* what it reads does not grow */

    for (uint32_t i = 0; i < store->pass.n_entries; i++) {
        const KvPassEntry *entry = &store->pass.entries[i];
        const KvPast *past = entry->cache->past;

        store->items[i] = (KvScheduleItem){
            .blocks = past->sections[s].blocks,
            .length = kv_past_tokens(past, s) + (after && !still ? entry->n_tokens : 0),
            .n_tokens = after ? 1 : entry->n_tokens,
            .tail_slot = (uint32_t)past->tail->slot,
        };
    }
}

/* Angles as the oracle computes them: position times frequency, rounded to float32, then cosine and sine. */
static void write_rope(const KvSection *section, float *rope)
{
    uint32_t n_freq = section->sizes->attend.shape.rotary_dim / 2;

    for (uint32_t g = 0; g < section->schedule.n_groups; g++) {
        const AttendGroup *group = &section->schedule.groups[g];

        for (int32_t row = 0; row < group->n_rows; row++)
            for (uint32_t f = 0; f < n_freq; f++) {
                float angle = (float)(group->pos0 + row) * section->inv_freq[f];

                *rope++ = (float)cos((double)angle);
                *rope++ = (float)sin((double)angle);
            }
    }
}

/* Where the next part of the step input goes. */
static uint64_t part(uint64_t *end, uint64_t bytes)
{
    uint64_t offset = *end;

    *end += (bytes + 63) & ~(uint64_t)63;
    return offset;
}

static int write_inputs(const KvPass *pass, KvSection *section)
{
    const KvSchedule *schedule = &section->schedule;
    uint64_t end = 0, rope_bytes = (uint64_t)schedule->n_rows * section->sizes->attend.shape.rotary_dim * sizeof(float);
    uint64_t groups_bytes = schedule->n_groups * sizeof(AttendGroup), packs_bytes = schedule->n_packs * sizeof(AttendPack);
    uint64_t refs_bytes = schedule->n_refs * sizeof(AttendRef);
    uint64_t spans_bytes = (uint64_t)schedule->n_tiles * schedule->n_groups * sizeof(AttendSpan);
    uint8_t *memory = section->inputs_memory;

    section->pass = (AttendPass){
        .n_rows = schedule->n_rows,
        .n_groups = schedule->n_groups,
        .rope = section->inputs,
        .rope_offset = part(&end, rope_bytes),
        .groups = section->inputs,
        .groups_offset = part(&end, groups_bytes),
        .n_sequences = pass->n_entries,
    };
    section->packs_offset = part(&end, packs_bytes);
    section->refs_offset = part(&end, refs_bytes);
    section->spans_offset = part(&end, spans_bytes);

    write_rope(section, (float *)(memory + section->pass.rope_offset));
    memcpy(memory + section->pass.groups_offset, schedule->groups, groups_bytes);
    memcpy(memory + section->packs_offset, schedule->packs, packs_bytes);
    memcpy(memory + section->refs_offset, schedule->refs, refs_bytes);
    memcpy(memory + section->spans_offset, schedule->spans, spans_bytes);
    return gpu_upload(pass->store->gpu, GPU_QUEUE_COMPUTE, section->inputs, 0, memory, end, GPU_WAIT_NONE, "kv inputs", NULL);
}

static bool takes_part(const KvPass *pass, uint32_t layer)
{
    const KvLayerPlace *place = &pass->store->sizes.layers[layer];

    if (pass->store->host)
        return true;
    if (place->section == KV_NO_SECTION)
        return false;
    return !pass->cross || (kv_section_is_cross(&pass->store->sections[place->section]) && place->owner == layer);
}

void kv_pass_skip_layers(KvPass *pass)
{
    while (pass->n_layers_done < pass->store->sizes.n_layers && !takes_part(pass, pass->n_layers_done))
        pass->n_layers_done++;
}

static int plan_pass(KvPass *pass)
{
    KvStore *store = pass->store;
    int r = 0;

    for (uint32_t s = 0; s < store->sizes.n_sections && !r; s++) {
        if (pass->cross && !kv_section_is_cross(&store->sections[s]))
            continue;
        fill_items(store, s, false);
        if (pass->cross)
            kv_schedule_keep(&store->sections[s].schedule, store->items, pass->n_entries);
        else
            kv_schedule_build(&store->sections[s].schedule, store->items, pass->n_entries);
        r = write_inputs(pass, &store->sections[s]);
    }
    if (r || pass->cross)
        return error_trace(r);
    return kv_ring_begin(&store->ring, false, kv_store_home(store));
}

static int begin(KvStore *store, const KvPassItem *items, uint32_t n_items, bool cross, KvPass **ret, ErrorDetail *reterr)
{
    KvPass *pass = &store->pass;
    int r;

    r = check_items(store, items, n_items, cross, reterr);
    if (r)
        return error_trace(r);
    kv_store_poll_home(store);
    store->serial++;
    pass->store = store;
    pass->cross = cross;
    pass->n_layers_done = 0;
    pass->layer_started = false;
    kv_pass_skip_layers(pass);
    r = reserve(pass, items, n_items, reterr);
    if (r)
        return error_trace(r);
    pass->active = true;
    for (uint32_t i = 0; i < n_items; i++)
        items[i].cache->in_pass = true;
    r = plan_pass(pass);
    if (r) {
        (void)kv_pass_abort(pass);
        return error_trace(kv_error(r));
    }
    *ret = pass;
    return 0;
}

int kv_pass_begin(KvStore *store, const KvPassItem *items, uint32_t n_items, KvPass **ret, ErrorDetail *reterr)
{
    return error_trace(begin(store, items, n_items, false, ret, reterr));
}

int kv_cross_begin(KvStore *store, const KvPassItem *items, uint32_t n_items, KvPass **ret, ErrorDetail *reterr)
{
    return error_trace(begin(store, items, n_items, true, ret, reterr));
}

/* ---- the end ---------------------------------------------------------------------------------------------------------- */

int kv_pass_prefetch(KvPass *pass)
{
    KvStore *store = pass->store;

    if (pass->n_layers_done != store->sizes.n_layers)
        return error_origin(-EINVAL);
    if (store->ring.n_slots == 0 || pass->cross)
        return 0;
    for (uint32_t i = 0; i < pass->n_entries; i++)
        if (pass->entries[i].cache->past->length + pass->entries[i].n_tokens >= store->sizes.policy.max_cache_tokens)
            return 0; /* there is no next pass for it */
    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        if (!store->sections[s].sizes->direct) {
            fill_items(store, s, true);
            kv_schedule_tiles(&store->sections[s].next_schedule, store->items, pass->n_entries);
        }
    return error_trace(kv_error(kv_ring_begin(&store->ring, true, kv_store_home(store))));
}

static void pass_end(KvPass *pass)
{
    pass->active = false;
    for (uint32_t i = 0; i < pass->n_entries; i++)
        pass->entries[i].cache->in_pass = false;
}

/* Pages that the pass wrote are now the section's past. */
static void commit_section(const KvStore *store, uint32_t s, KvPast *past, uint32_t n_tokens)
{
    KvSectionPast *section = &past->sections[s];
    uint32_t end = kv_past_tokens(past, s) + n_tokens, ring = kv_ring_tokens(store->sections[s].sizes->attend.form);

    for (uint32_t b = (end - n_tokens) / KV_BLOCK_TOKENS; b < section->n_blocks; b++)
        if (section->blocks[b]->write_serial == store->serial) {
            section->blocks[b]->serial = store->serial;
            section->blocks[b]->write_serial = 0;
        }
    if (end > ring)
        section->tail_from = MAX(section->tail_from, end - ring);
}

static void commit_entry(const KvPass *pass, const KvPassEntry *entry)
{
    const KvStore *store = pass->store;
    KvPast *past = entry->cache->past;

    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        if (kv_section_is_cross(&store->sections[s]) == pass->cross)
            commit_section(store, s, past, entry->n_tokens);
    kv_tail_settle(past->tail);
    if (pass->cross) {
        past->cross_length += entry->n_tokens;
        while (past->n_checkpoints > 0) /* their tails are from before it */
            kv_past_drop_checkpoint(past, past->n_checkpoints - 1);
        return;
    }
    kv_states_commit(&past->states, past->length, past->recording);
    if (past->host)
        kv_host_past_commit(past->host, entry->cache->more);
    past->length += entry->n_tokens;
    kv_past_drop_unseen(past);
}

int kv_pass_commit(KvPass *pass)
{
    if (pass->n_layers_done != pass->store->sizes.n_layers)
        return error_origin(-EINVAL);
    for (uint32_t i = 0; i < pass->n_entries; i++)
        commit_entry(pass, &pass->entries[i]);
    pass_end(pass);
    return 0;
}

/* The pass had begun to write the tail: goes on from where that is exact. */
static void recover(const KvPass *pass, KvCache *cache, uint32_t n_tokens)
{
    if (pass->cross && cache->past->cross_length == 0)
        return;
    /* Of encoder output there is no other copy; that of recent tokens is lost with the device. */
    if (pass->cross || kv_cache_recover(cache, cache->past->length + n_tokens, NULL))
        (void)kv_cache_clear(cache);
}

KvPass *kv_pass_abort(KvPass *pass)
{
    KvStore *store;

    if (!pass || !pass->active)
        return NULL;
    store = pass->store;
    if (gpu_drain(store->gpu, NULL) == 0)
        kv_store_forget_home(store);
    kv_ring_end(&store->ring);
    kv_ring_clear(&store->ring);
    for (uint32_t i = 0; i < pass->n_entries; i++) {
        kv_cache_shrink(&pass->entries[i]);
        kv_states_abort(&pass->entries[i].cache->past->states);
        if (store->host)
            kv_host_past_abort(pass->entries[i].cache->past->host);
    }
    pass_end(pass);
    for (uint32_t i = 0; i < pass->n_entries && pass->layer_started; i++)
        recover(pass, pass->entries[i].cache, pass->entries[i].n_tokens);
    return NULL;
}
