/* SPDX-License-Identifier: Apache-2.0 */
/* The store: everything that the caches of one model under one policy share. */

#include "cache/kv-store-internal.h"

#include <string.h>
#include <xxhash.h>

AttendLayer kv_store_layer(const KvStore *store, uint32_t layer)
{
    const KvLayerPlace *place = &store->sizes.layers[layer];
    const KvSection *section = &store->sections[place->section];

    return (AttendLayer){
        .calibration = section->calibration,
        .calibration_offset = place->plane * section->sizes->calibration_layer_bytes,
        .tail = store->tails.buffer,
        .tail_offset = section->sizes->tail_offset + place->plane * section->sizes->tail_layer_bytes,
        .tail_slot_stride = store->sizes.tail_slot_bytes,
        .sink_logits = store->sink_logits,
        .sink_logits_offset = (uint64_t)layer * store->sizes.logits_stride * sizeof(float),
    };
}

/* ---- pages on their way home ------------------------------------------------------------------------------------------ */

void kv_store_set_home(KvStore *store, uint32_t layer, GpuEvent *event)
{
    (void)gpu_event_unref(store->home_events[layer]);
    (void)gpu_event_unref(store->last_home);
    store->home_serial = store->serial;
    store->settled = MIN(store->settled, store->serial - 1); /* it may have been set in this very pass */
    store->home_events[layer] = event;
    store->last_home = event ? gpu_event_ref(event) : NULL;
}

void kv_store_forget_home(KvStore *store)
{
    for (uint32_t l = 0; l < store->sizes.n_layers; l++)
        store->home_events[l] = gpu_event_unref(store->home_events[l]);
    store->last_home = gpu_event_unref(store->last_home);
    store->settled = store->home_serial;
}

void kv_store_poll_home(KvStore *store)
{
    /* The download queue is in order: with the last copy all are done. */
    if (!store->last_home || gpu_event_status(store->last_home) == 1)
        kv_store_forget_home(store);
}

int kv_store_settle(KvStore *store, ErrorDetail *reterr)
{
    int r = store->last_home ? gpu_event_wait(store->gpu, store->last_home, reterr) : 0;

    if (r)
        return error_trace(kv_error(r));
    kv_store_forget_home(store);
    return 0;
}

/* ---- memory ------------------------------------------------------------------------------------------------------------- */

bool kv_store_charge_host(KvStore *store, uint64_t more_bytes)
{
    uint64_t bytes = more_bytes;

    if (!store->host)
        return true;
    for (const KvCache *cache = store->caches; cache; cache = cache->next)
        if (cache->past && cache->past->host) /* in the middle of an operation on rows one may have none */
            bytes += kv_host_past_bytes(cache->past->host);
    if (bytes > store->host_charged_bytes && !kv_budget_take(&store->host_budget, bytes - store->host_charged_bytes))
        return false;
    if (bytes < store->host_charged_bytes)
        kv_budget_return(&store->host_budget, store->host_charged_bytes - bytes);
    store->host_charged_bytes = bytes;
    return true;
}

void kv_store_trim(KvStore *store)
{
    bool can = false;

    (void)kv_store_charge_host(store, 0);
    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        can = can || kv_arenas_can_trim(&store->sections[s].arenas);
    if (!can || gpu_drain(store->gpu, NULL) != 0)
        return;
    kv_ring_clear(&store->ring);
    for (uint32_t s = 0; s < store->sizes.n_sections; s++)
        kv_arenas_trim(&store->sections[s].arenas);
}

int kv_store_reserve(KvStore *store, ErrorDetail *reterr)
{
    int r;

    if (store->sizes.policy.growth != KV_GROWTH_STATIC)
        return 0;
    for (uint32_t s = 0; s < store->sizes.n_sections; s++) {
        r = kv_arenas_reserve(&store->sections[s].arenas, store->sections[s].sizes->held_pages, reterr);
        if (r) {
            while (s-- > 0)
                kv_arenas_unreserve(&store->sections[s].arenas, store->sections[s].sizes->held_pages);
            return error_trace(r);
        }
    }
    return 0;
}

void kv_store_unreserve(KvStore *store)
{
    for (uint32_t s = 0; s < store->sizes.n_sections && store->sizes.policy.growth == KV_GROWTH_STATIC; s++)
        kv_arenas_unreserve(&store->sections[s].arenas, store->sections[s].sizes->held_pages);
}

int kv_section_take(KvSection *section, const KvBlock *after, uint32_t first_page, uint32_t n_filled, KvBlock **ret,
                    ErrorDetail *reterr)
{
    const KvBlock *neighbour = after && after->arena->owner == &section->resident ? after : NULL;

    if (section->resident.options.limit_pages > 0 &&
        kv_arenas_take(&section->resident, neighbour, first_page, n_filled, ret, NULL) == 0)
        return 0;
    neighbour = after && after->arena->owner == &section->arenas ? after : NULL;
    return error_trace(kv_arenas_take(&section->arenas, neighbour, first_page, n_filled, ret, reterr));
}

/* ---- construction --------------------------------------------------------------------------------------------------------- */

/* Constants of the section's layers, plane by plane. */
static void gather_calibration(const KvStore *store, uint32_t s, const KvModel *model, uint8_t *memory)
{
    const KvSectionSizes *sizes = store->sections[s].sizes;

    for (uint32_t l = 0; l < model->n_layers; l++) {
        const KvLayerPlace *place = &store->sizes.layers[l];

        if (place->section == s && place->owner == l)
            kv_constants_fill(sizes->attend.form, &sizes->attend.shape, model->calibration ? &model->calibration[l] : NULL,
                              (float *)(void *)(memory + place->plane * sizes->calibration_layer_bytes));
    }
}

static int upload_calibration(KvStore *store, uint32_t s, const KvModel *model, ErrorDetail *reterr)
{
    KvSection *section = &store->sections[s];
    uint64_t total = section->sizes->calibration_layer_bytes * section->sizes->n_planes;
    _cleanup_(gpu_event_unrefp) GpuEvent *event = NULL;
    int r;

    section->constants = calloc(1, total);
    if (!section->constants)
        return error_origin(KV_E_HOST_MEMORY);
    gather_calibration(store, s, model, section->constants);
    r = gpu_buffer_new(store->gpu, GPU_PURPOSE_OTHER, total, &section->calibration, reterr);
    if (!r)
        r = gpu_upload(store->gpu, GPU_QUEUE_COMPUTE, section->calibration, 0, section->constants, total, GPU_WAIT_NONE, "kv means",
                       &event);
    if (!r)
        r = gpu_event_wait(store->gpu, event, reterr);
    return error_trace(kv_error(r));
}

/* A shared layer's are its own. */
static int upload_logits(KvStore *store, const KvModel *model, ErrorDetail *reterr)
{
    _cleanup_(gpu_event_unrefp) GpuEvent *event = NULL;
    _cleanup_(freep) float *logits = NULL;
    int r;

    if (store->sizes.logits_bytes == 0)
        return 0;
    logits = calloc(1, store->sizes.logits_bytes);
    if (!logits)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t l = 0; l < model->n_layers; l++) {
        uint32_t section = store->sizes.layers[l].section;

        if (section != KV_NO_SECTION && store->sizes.sections[section].attend.sink_logits && model->layers[l].sink_logits)
            memcpy(logits + (size_t)l * store->sizes.logits_stride, model->layers[l].sink_logits,
                   store->sizes.sections[section].attend.shape.n_heads * sizeof(float));
    }
    r = gpu_buffer_new(store->gpu, GPU_PURPOSE_OTHER, store->sizes.logits_bytes, &store->sink_logits, reterr);
    if (!r)
        r = gpu_upload(store->gpu, GPU_QUEUE_COMPUTE, store->sink_logits, 0, logits, store->sizes.logits_bytes, GPU_WAIT_NONE,
                       "kv logits", &event);
    if (!r)
        r = gpu_event_wait(store->gpu, event, reterr);
    return error_trace(kv_error(r));
}

static void new_arenas(KvStore *store, KvSection *section)
{
    const KvSectionSizes *sizes = section->sizes;

    kv_arenas_init(&section->arenas, &(KvArenaOptions){
                                         .gpu = store->gpu,
                                         .home = sizes->home,
                                         .wrap = sizes->home == KV_HOME_HOST && sizes->direct,
                                         .fixed = store->sizes.policy.growth == KV_GROWTH_STATIC,
                                         .n_layers = sizes->n_planes,
                                         .page_bytes = sizes->layout.page_bytes,
                                         .first_pages = sizes->first_arena_pages,
                                         .max_pages = sizes->max_arena_pages,
                                         .keep_pages = sizes->device_pages,
                                         .device_budget = &store->device_budget,
                                         .host_budget = &store->host_budget,
                                     });
    kv_arenas_init(&section->resident, &(KvArenaOptions){
                                           .gpu = store->gpu,
                                           .home = KV_HOME_DEVICE,
                                           .n_layers = sizes->n_planes,
                                           .page_bytes = sizes->layout.page_bytes,
                                           .max_pages = sizes->max_resident_pages,
                                           .limit_pages = sizes->resident_pages,
                                           .keep_pages = sizes->resident_pages,
                                           .device_budget = &store->device_budget,
                                       });
}

static int new_section(KvStore *store, uint32_t s, const KvModel *model, ErrorDetail *reterr)
{
    KvSection *section = &store->sections[s];
    const KvSectionSizes *sizes = section->sizes;
    size_t n_freq = sizes->attend.shape.rotary_dim / 2;
    int r;

    section->inv_freq = calloc(MAX(n_freq, (size_t)1), sizeof(float));
    section->inputs_memory = malloc(sizes->inputs_bytes);
    if (!section->inv_freq || !section->inputs_memory || kv_schedule_init(&section->schedule, sizes, false) ||
        kv_schedule_init(&section->next_schedule, sizes, true))
        return error_origin(KV_E_HOST_MEMORY);
    if (n_freq > 0)
        memcpy(section->inv_freq, sizes->attend.inv_freq, n_freq * sizeof(float));
    r = gpu_buffer_new(store->gpu, GPU_PURPOSE_ACTIVATIONS, sizes->inputs_bytes, &section->inputs, reterr);
    if (!r)
        r = attend_new(store->gpu, &sizes->attend, &section->attend, reterr);
    if (r)
        return error_trace(kv_error(r));
    r = upload_calibration(store, s, model, reterr);
    if (!r)
        r = kv_arenas_prepare(&section->arenas, sizes->device_pages, reterr);
    if (!r)
        r = kv_arenas_prepare(&section->resident, sizes->resident_pages, reterr);
    return error_trace(r);
}

static int new_memory(KvStore *store)
{
    const KvSizes *sizes = &store->sizes;

    store->sections = calloc(sizes->n_sections, sizeof(KvSection));
    store->home_events = calloc(sizes->n_layers, sizeof(GpuEvent *));
    store->items = calloc(sizes->max_items, sizeof(KvScheduleItem));
    store->pass.entries = calloc(sizes->max_items, sizeof(KvPassEntry));
    if (!store->sections || !store->home_events || !store->items || !store->pass.entries)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t s = 0; s < sizes->n_sections; s++) {
        store->sections[s].sizes = &sizes->sections[s];
        new_arenas(store, &store->sections[s]);
    }
    for (uint32_t i = 0; i < sizes->max_items; i++) {
        store->pass.entries[i].sections = calloc(sizes->n_sections, sizeof(KvEntrySection));
        if (!store->pass.entries[i].sections)
            return error_origin(KV_E_HOST_MEMORY);
    }
    return 0;
}

/* Tells the ring where each layer's tiles come from. */
static void describe_layers(KvStore *store)
{
    for (uint32_t l = 0; l < store->sizes.n_layers; l++) {
        const KvLayerPlace *place = &store->sizes.layers[l];
        const KvSection *section;

        if (place->section == KV_NO_SECTION || store->sizes.sections[place->section].direct)
            continue;
        section = &store->sections[place->section];
        store->ring.layers[l] = (KvRingLayer){
            .arenas = &section->arenas,
            .schedules = {&section->schedule, &section->next_schedule},
            .plane = place->plane,
            .owner = place->owner,
        };
    }
}

static int new_shared(KvStore *store, ErrorDetail *reterr)
{
    const KvSizes *sizes = &store->sizes;
    int r = 0;

    for (int i = 0; i < 2 && !r; i++)
        r = gpu_buffer_new(store->gpu, GPU_PURPOSE_STAGING, sizes->fresh_bytes, &store->fresh[i], reterr);
    if (r)
        return error_trace(kv_error(r));
    r = kv_tails_init(&store->tails, store->gpu, sizes->n_sequences, sizes->tail_slot_bytes, &store->host_budget, reterr);
    if (!r && sizes->state_slot_bytes > 0)
        r = kv_tails_init(&store->states, store->gpu, kv_state_slots(sizes), sizes->state_slot_bytes, &store->host_budget, reterr);
    if (!r)
        r = kv_ring_init(&store->ring, store->gpu, sizes, reterr);
    if (r)
        return error_trace(r);
    describe_layers(store);
    return 0;
}

static uint64_t hash_floats(uint64_t hash, const float *floats, uint32_t n_heads, uint32_t head_dim)
{
    return floats ? XXH3_64bits_withSeed(floats, (size_t)n_heads * head_dim * sizeof(float), hash) : hash;
}

/* Of what packed pages stand on. */
static uint64_t hash_calibration(const KvStore *store, const KvModel *model)
{
    uint64_t hash = 0;

    for (uint32_t l = 0; model->calibration && l < model->n_layers; l++) {
        const KvLayerPlace *place = &store->sizes.layers[l];
        const KvCalibration *c = &model->calibration[l];
        const AttendOptions *attend;

        if (place->section == KV_NO_SECTION || place->owner != l)
            continue;
        attend = &store->sections[place->section].sizes->attend;
        if (!kv_form_is_calibrated(&attend->form))
            continue;
        hash = hash_floats(hash + l, c->k_mean, attend->shape.n_kv_heads, attend->shape.k_head_dim);
        hash = hash_floats(hash, c->v_mean, attend->shape.n_kv_heads, attend->shape.v_head_dim);
        hash = hash_floats(hash, c->k_turned_mean, attend->shape.n_kv_heads, attend->shape.k_head_dim);
        hash = hash_floats(hash, c->k_pair_scale, attend->shape.n_kv_heads, attend->shape.k_head_dim);
        hash = XXH3_64bits_withSeed((const float[]){c->k_largest, c->v_largest}, 2 * sizeof(float), hash);
    }
    return hash;
}

int kv_store_new(Gpu *gpu, const KvModel *model, const KvPolicy *policy, KvStore **ret, ErrorDetail *reterr)
{
    _cleanup_(kv_store_freep) KvStore *store = NULL;
    int r;

    store = calloc(1, sizeof(*store));
    if (!store)
        return error_origin(KV_E_HOST_MEMORY);
    store->gpu = gpu;
    r = kv_sizes_compute(gpu_info(gpu), model, policy, &store->sizes, reterr);
    if (r)
        return error_trace(r);
    store->host_budget = (KvBudget){.limit_bytes = policy->host_budget_bytes,
                                    .shared = model->host_memory,
                                    .reclaim = kv_store_drop_checkpoint,
                                    .userdata = store};
    if (store->sizes.device_page_limit_bytes < UINT64_MAX)
        store->device_budget.limit_bytes = MAX(store->sizes.device_page_limit_bytes, (uint64_t)1); /* 0 would be no limit */
    r = new_memory(store);
    if (!r)
        r = new_shared(store, reterr);
    if (!r)
        r = upload_logits(store, model, reterr);
    for (uint32_t s = 0; s < store->sizes.n_sections && !r; s++)
        r = new_section(store, s, model, reterr);
    if (!r && policy->is_compatible)
        r = kv_host_new(gpu, model, policy, &store->host, reterr);
    if (r)
        return error_trace(r);
    store->calibration_hash = hash_calibration(store, model);
    *ret = TAKE_PTR(store);
    return 0;
}

static void section_deinit(const Gpu *gpu, KvSection *section)
{
    (void)gpu_buffer_free(section->inputs);
    (void)gpu_buffer_free(section->calibration);
    (void)attend_free(section->attend);
    kv_schedule_deinit(&section->schedule);
    kv_schedule_deinit(&section->next_schedule);
    gpu_free_host(gpu, section->inputs_memory);
    gpu_free_host(gpu, section->constants);
    free(section->inv_freq);
}

KvStore *kv_store_free(KvStore *store)
{
    if (!store)
        return NULL;
    /* Prefetched tiles and pages on their way home still use the memory below. */
    (void)gpu_drain(store->gpu, NULL);
    for (uint32_t s = 0; store->sections && s < store->sizes.n_sections; s++) {
        kv_arenas_deinit(&store->sections[s].arenas);
        kv_arenas_deinit(&store->sections[s].resident);
    }
    kv_ring_deinit(&store->ring);
    kv_tails_deinit(&store->tails);
    kv_tails_deinit(&store->states);
    for (uint32_t l = 0; store->home_events && l < store->sizes.n_layers; l++)
        (void)gpu_event_unref(store->home_events[l]);
    (void)gpu_event_unref(store->last_home);
    for (int i = 0; i < 2; i++) {
        (void)gpu_event_unref(store->fresh_events[i]);
        (void)gpu_buffer_free(store->fresh[i]);
    }
    (void)gpu_buffer_free(store->sink_logits);
    for (uint32_t s = 0; store->sections && s < store->sizes.n_sections; s++)
        section_deinit(store->gpu, &store->sections[s]);
    for (uint32_t i = 0; store->pass.entries && i < store->sizes.max_items; i++)
        free(store->pass.entries[i].sections);
    free(store->pass.entries);
    free(store->items);
    free(store->home_events);
    free(store->sections);
    kv_sizes_deinit(&store->sizes);
    (void)kv_host_free(store->host);
    kv_budget_return(&store->host_budget, store->host_budget.used_bytes); /* what a shared one was charged */
    free(store);
    return NULL;
}

const KvPolicy *kv_store_policy(const KvStore *store)
{
    return &store->sizes.policy;
}

bool kv_store_others_can_help(const KvStore *store)
{
    return kv_budget_others_can_help(&store->host_budget);
}
