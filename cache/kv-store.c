/* SPDX-License-Identifier: Apache-2.0 */
/* The store: everything that the caches of one model under one policy share. */

#include "cache/kv-store-internal.h"

#include <string.h>

AttendLayer kv_store_layer(const KvStore *store, uint32_t layer)
{
    return (AttendLayer){
        .calibration = store->calibration,
        .calibration_offset = layer * store->sizes.calibration_layer_bytes,
        .tail = store->tails.buffer,
        .tail_offset = layer * store->sizes.tail_layer_bytes,
        .tail_slot_stride = store->sizes.tail_slot_bytes,
    };
}

void kv_store_forget_home(KvStore *store)
{
    for (uint32_t l = 0; l < store->sizes.n_layers; l++)
        store->home_events[l] = gpu_event_unref(store->home_events[l]);
    store->settled = store->home_serial;
}

void kv_store_poll_home(KvStore *store)
{
    const GpuEvent *last = store->home_events[store->sizes.n_layers - 1];

    /* The download queue is in order: with the last layer's copies all are done. */
    if (!last || gpu_event_status(last) == 1)
        kv_store_forget_home(store);
}

int kv_store_settle(KvStore *store, ErrorDetail *reterr)
{
    GpuEvent *last = store->home_events[store->sizes.n_layers - 1];
    int r = last ? gpu_event_wait(store->gpu, last, KV_TIMEOUT_USEC, reterr) : 0;

    if (r)
        return error_trace(kv_error(r));
    kv_store_forget_home(store);
    return 0;
}

void kv_store_trim(KvStore *store)
{
    if (kv_arenas_can_trim(&store->arenas) && gpu_drain(store->gpu, KV_TIMEOUT_USEC, NULL) == 0) {
        kv_ring_clear(&store->ring);
        kv_arenas_trim(&store->arenas);
    }
}

static int upload_calibration(KvStore *store, const KvModel *model, ErrorDetail *reterr)
{
    size_t values = (size_t)model->shape.n_kv_heads * model->shape.head_dim, bytes = values * sizeof(float);
    uint64_t layer_bytes = store->sizes.calibration_layer_bytes, total = layer_bytes * model->n_layers;
    _cleanup_(gpu_event_unrefp) GpuEvent *event = NULL;
    _cleanup_(freep) uint8_t *memory = NULL;
    int r;

    memory = calloc(1, total);
    if (!memory)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t l = 0; model->calibration && l < model->n_layers; l++) {
        if (model->calibration[l].k_mean)
            memcpy(memory + l * layer_bytes, model->calibration[l].k_mean, bytes);
        if (model->calibration[l].v_mean)
            memcpy(memory + l * layer_bytes + bytes, model->calibration[l].v_mean, bytes);
    }
    r = gpu_buffer_new(store->gpu, GPU_PURPOSE_OTHER, total, &store->calibration, reterr);
    if (!r)
        r = gpu_upload(store->gpu, GPU_QUEUE_COMPUTE, store->calibration, 0, memory, total, GPU_WAIT_NONE, "kv means", &event);
    if (!r)
        r = gpu_event_wait(store->gpu, event, KV_TIMEOUT_USEC, reterr);
    return error_trace(kv_error(r));
}

static int new_memory(KvStore *store, const KvModel *model)
{
    size_t n_freq = model->shape.rotary_dim / 2, items = kv_store_max_items(store);

    store->inv_freq = calloc(MAX(n_freq, (size_t)1), sizeof(float));
    store->inputs_memory = malloc(store->sizes.inputs_bytes);
    store->home_events = calloc(store->sizes.n_layers, sizeof(GpuEvent *));
    store->items = calloc(items, sizeof(KvScheduleItem));
    store->pass.entries = calloc(items, sizeof(KvPassEntry));
    if (!store->inv_freq || !store->inputs_memory || !store->home_events || !store->items || !store->pass.entries)
        return error_origin(KV_E_HOST_MEMORY);
    memcpy(store->inv_freq, model->inv_freq, n_freq * sizeof(float));
    if (kv_schedule_init(&store->schedule, &store->sizes, false) || kv_schedule_init(&store->next_schedule, &store->sizes, true))
        return error_origin(KV_E_HOST_MEMORY);
    return 0;
}

static int new_buffers(KvStore *store, ErrorDetail *reterr)
{
    const KvSizes *sizes = &store->sizes;
    int r;

    r = gpu_buffer_new(store->gpu, GPU_PURPOSE_ACTIVATIONS, sizes->inputs_bytes, &store->inputs, reterr);
    for (int i = 0; i < 2 && !r; i++)
        r = gpu_buffer_new(store->gpu, GPU_PURPOSE_STAGING, sizes->fresh_bytes, &store->fresh[i], reterr);
    if (r)
        return error_trace(kv_error(r));
    r = kv_tails_init(&store->tails, store->gpu, sizes->n_sequences, sizes->tail_slot_bytes, &store->host_budget, reterr);
    if (r)
        return error_trace(r);
    r = kv_ring_init(&store->ring, store->gpu, sizes, &store->arenas, reterr);
    if (r)
        return error_trace(r);
    r = attend_new(store->gpu, &sizes->attend, &store->attend, reterr);
    return error_trace(kv_error(r));
}

/* What the plan promises for the device: there from the start to the end. */
static uint32_t device_blocks(const KvSizes *sizes)
{
    return (uint32_t)(sizes->plan.device_page_bytes / sizes->block_bytes);
}

static void new_arenas(KvStore *store)
{
    const KvSizes *sizes = &store->sizes;

    kv_arenas_init(&store->arenas, &(KvArenaOptions){
                                       .gpu = store->gpu,
                                       .home = sizes->policy.home,
                                       .wrap = sizes->policy.home == KV_HOME_HOST && sizes->direct,
                                       .fixed = sizes->policy.growth == KV_GROWTH_STATIC,
                                       .n_layers = sizes->n_layers,
                                       .page_bytes = sizes->layout.page_bytes,
                                       .first_blocks = sizes->first_arena_blocks,
                                       .max_blocks = sizes->max_arena_blocks,
                                       .keep_blocks = device_blocks(sizes),
                                       .device_limit_bytes = sizes->device_page_limit_bytes,
                                       .host_budget = &store->host_budget,
                                   });
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
    store->host_budget = (KvBudget){
        .limit_bytes = policy->host_budget_bytes, .reclaim = kv_store_drop_checkpoint, .userdata = store};
    new_arenas(store);
    r = new_memory(store, model);
    if (!r)
        r = new_buffers(store, reterr);
    if (!r)
        r = upload_calibration(store, model, reterr);
    if (!r)
        r = kv_arenas_prepare(&store->arenas, device_blocks(&store->sizes), reterr);
    if (r)
        return error_trace(r);
    store->sizes.attend.inv_freq = store->inv_freq;
    *ret = TAKE_PTR(store);
    return 0;
}

KvStore *kv_store_free(KvStore *store)
{
    if (!store)
        return NULL;
    /* Prefetched tiles and pages on their way home still use the memory below. */
    if (store->home_events && gpu_drain(store->gpu, KV_TIMEOUT_USEC, NULL) != GPU_E_HUNG)
        kv_arenas_deinit(&store->arenas);
    kv_ring_deinit(&store->ring);
    kv_tails_deinit(&store->tails);
    for (uint32_t l = 0; store->home_events && l < store->sizes.n_layers; l++)
        (void)gpu_event_unref(store->home_events[l]);
    for (int i = 0; i < 2; i++) {
        (void)gpu_event_unref(store->fresh_events[i]);
        (void)gpu_buffer_free(store->fresh[i]);
    }
    (void)gpu_buffer_free(store->inputs);
    (void)gpu_buffer_free(store->calibration);
    (void)attend_free(store->attend);
    kv_schedule_deinit(&store->schedule);
    kv_schedule_deinit(&store->next_schedule);
    free(store->pass.entries);
    free(store->items);
    free(store->home_events);
    free(store->inputs_memory);
    free(store->inv_freq);
    free(store);
    return NULL;
}

const KvPolicy *kv_store_policy(const KvStore *store)
{
    return &store->sizes.policy;
}
