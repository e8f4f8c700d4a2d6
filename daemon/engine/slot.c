/* SPDX-License-Identifier: Apache-2.0 */
/* One model: file, weights, stores. */

#include "daemon/engine/engine-internal.h"
#include "daemon/model/speed.h"
#include "quant/base/log.h"

#include <string.h>

bool slot_is_ready(const ModelSlot *slot)
{
    return slot->state == SLOT_LOADED && !slot->unload_wanted && !slot->has_pending && !slot->removed;
}

const char *slot_state_to_string(const ModelSlot *slot)
{
    switch (slot->state) {
    case SLOT_UNLOADED:
        return "unloaded";
    case SLOT_LOADING:
        return "loading";
    case SLOT_LOADED:
        return "loaded";
    case SLOT_FAILED:
        return "failed";
    }
    return "unknown";
}

const ModelFile *slot_file(const ModelSlot *slot)
{
    return slot->model ? model_file(slot->model) : slot->file;
}

uint32_t slot_context(const ModelSlot *slot, const KvPolicy *policy)
{
    const ModelFile *file = slot_file(slot);
    uint32_t context = slot->config.context;

    if (file) {
        uint32_t own = model_file_params(file)->context_length;

        context = context > 0 ? MIN(context, own) : own;
    }
    if (policy->max_cache_tokens > 0)
        context = MIN(context, policy->max_cache_tokens);
    return context;
}

ModelOptions slot_options(Engine *engine, const ModelSlot *slot, uint32_t max_rows)
{
    return (ModelOptions){
        .exact = slot->config.exact,
        .context = slot->config.context,
        .max_rows = max_rows,
        .max_sequences = MIN(slot->config.parallel, (uint32_t)ENGINE_MAX_ACTIVE),
        .host_memory = &engine->host_memory,
        .weights = slot->config.weights,
    };
}

uint32_t slot_chunk_rows(const ModelSlot *slot)
{
    uint32_t rows = MODELS_FIRST_ROWS;

    if (slot->row_usec > 0)
        rows = (uint32_t)MAX(MIN((double)MODELS_PASS_USEC / slot->row_usec, (double)MODELS_MAX_ROWS), (double)MODELS_MIN_ROWS);
    return MIN(rows, slot->max_rows);
}

void slot_time_pass(ModelSlot *slot, uint32_t n_rows, uint64_t usec)
{
    /* A few rows cost a pass over the weights, which says nothing about a row of many. */
    if (n_rows >= MODELS_MIN_ROWS)
        slot->row_usec = (double)usec / n_rows;
}

/* ---- loading --------------------------------------------------------------------------------------------------------------- */

static void slot_fail(Engine *engine, ModelSlot *slot, EngineResult result, const ErrorDetail *detail)
{
    slot->state = SLOT_FAILED;
    slot->failure = result;
    slot->error = *detail;
    slot->unload_wanted = false;
    slot->room_limit_bytes = 0;
    log_warning("Model '%s' cannot be loaded: %s", slot->config.name, detail->text);
    status_model_state(engine, slot);
    jobs_fail_slot(engine, slot, result, detail);
    files_slot_ready(engine, slot, result, detail);
}

static void slot_open(Engine *engine, ModelSlot *slot)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    if (slot->opening)
        return;
    if (loader_open(engine->loader, slot->id, slot->config.path, engine->state_dir) < 0) {
        (void)error_detail_set(&detail, -ENOMEM, "out of memory: model '%s' cannot be opened", slot->config.name);
        slot_fail(engine, slot, ENGINE_RESULT_OUT_OF_MEMORY, &detail);
        return;
    }
    slot->opening = true;
}

/* Whether a job needs it, other than one that only asked for it to be loaded: only then does idle work give way. */
static bool slot_is_needed(const Engine *engine, const ModelSlot *slot)
{
    for (const Job *job = engine->jobs; job; job = job->next)
        if (job->slot == slot && job->kind != JOB_LOAD)
            return true;
    return false;
}

uint64_t slot_room(const Engine *engine, const ModelSlot *slot)
{
    uint64_t used[GPU_PURPOSE_X_MAX], total, budget = gpu_info(engine->gpu)->budget_bytes, room;

    gpu_memory_used(engine->gpu, used, &total);
    room = budget > total ? budget - total : 0;
    return slot->room_limit_bytes ? MIN(room, slot->room_limit_bytes) : room;
}

/* What of the cache's pages is worth keeping on the device depends on how fast that is, when it is known. */
static void fit_by_rates(Engine *engine, const ModelSlot *slot, const ModelOptions *options, ModelFit *fit)
{
    KvPolicy policy = slot->config.policy;
    ModelSpeed speed;
    ModelFit again;

    if (policy.device_budget_bytes == 0 || fit->policy.home != KV_HOME_HOST || fit->plan.kv.n_slots == 0 ||
        model_speed(engine->gpu, slot->file, fit, false, &speed, NULL) != 0)
        return;
    policy.rates = model_speed_rates(&speed, fit);
    if (model_fit(gpu_info(engine->gpu), slot->file, options, &policy, slot_room(engine, slot), &again, NULL) == 0)
        *fit = again;
}

/* How it fits: as configured, after what is idle has given way, else by the planner's ladder. */
static int slot_fit(Engine *engine, ModelSlot *slot, bool make_room, ModelFit *ret, ErrorDetail *reterr)
{
    ModelOptions options = slot_options(engine, slot, MODELS_MAX_ROWS);
    int r;

    do
        r = model_fit(gpu_info(engine->gpu), slot->file, &options, &slot->config.policy, slot_room(engine, slot), ret, reterr);
    while ((r == MODEL_E_DEVICE_MEMORY || (r == 0 && ret->steps != 0)) && make_room && models_make_room(engine, slot));
    if (r)
        error_detail_prefix(reterr, "model '%s'", slot->config.name);
    else
        fit_by_rates(engine, slot, &options, ret);
    return r;
}

/* The model on the device.  A device that refuses what the plan allowed is tried again with less: *ret_again, and the file is opened
 * anew, because a failed try uses it up. */
static EngineResult slot_make_model(Engine *engine, ModelSlot *slot, bool *ret_again, ErrorDetail *reterr)
{
    bool make_room = slot_is_needed(engine, slot);
    ModelFit fit;
    int r;

    r = slot_fit(engine, slot, make_room, &fit, reterr);
    if (r)
        return result_from_model(r);
    r = model_new(engine->gpu, slot->file, &fit.options, &slot->model, reterr);
    if (r) {
        slot->file = model_file_free(slot->file);
        if (r == MODEL_E_DEVICE_MEMORY && !(make_room && models_make_room(engine, slot)))
            slot->room_limit_bytes = fit.plan.device_total_bytes / 8 * 7; /* it ends where the planner refuses */
        *ret_again = r == MODEL_E_DEVICE_MEMORY;
        return result_from_model(r);
    }
    slot->file = NULL;
    slot->room_limit_bytes = 0;
    slot->row_usec = 0;
    slot->max_rows = model_options(slot->model)->max_rows;
    slot->max_items = model_options(slot->model)->max_sequences;
    slot->steps = fit.steps & (MODEL_STEP_ROWS | MODEL_STEP_WEIGHTS);
    slot->asked_policy = slot->config.policy;
    slot->fit_policy = fit.policy;
    return ENGINE_RESULT_DONE;
}

static void slot_make_template(ModelSlot *slot)
{
    const char *source = slot->config.chat_template ? slot->config.chat_template : model_file_chat_template(model_file(slot->model));

    slot->template_detail = ERROR_DETAIL_NULL;
    if (!source) {
        slot->template_error = error_detail_set(&slot->template_detail, -ENOENT,
                                                "model '%s' has no chat template: set `template`, or send raw text",
                                                slot->config.name);
        return;
    }
    slot->template_error = chat_template_new(source, &slot->chat_template, &slot->template_detail);
}

/* Automatic bits of the cache that were not measured yet: then slot->nbits is what to do first. */
static EngineResult slot_begin_bits(ModelSlot *slot, ErrorDetail *reterr)
{
    const KvPolicy *policy = &slot->config.policy;
    bool known;
    int r;

    (void)model_nbits_resolve(model_file(slot->model), slot->config.exact, policy, &known);
    if (known)
        return ENGINE_RESULT_DONE;
    r = model_prepare_form(slot->model, &policy->form, reterr);
    if (!r)
        r = nbits_new(slot->model, policy, &slot->nbits, reterr);
    return r ? result_from_model(r) : ENGINE_RESULT_DONE;
}

static EngineResult slot_load_steps(Engine *engine, ModelSlot *slot, bool *ret_again, ErrorDetail *reterr)
{
    const ModelParams *params;
    EngineResult result;

    result = device_ensure(engine, reterr);
    if (result == ENGINE_RESULT_DONE)
        result = slot_make_model(engine, slot, ret_again, reterr);
    if (result != ENGINE_RESULT_DONE)
        return result;
    params = model_file_params(model_file(slot->model));
    slot->logits = calloc((size_t)slot->max_items * params->n_vocab, sizeof(*slot->logits));
    if (!slot->logits) {
        (void)error_detail_set(reterr, -ENOMEM, "out of memory: %u rows of logits", slot->max_items);
        return ENGINE_RESULT_OUT_OF_MEMORY;
    }
    slot_make_template(slot);
    return slot_begin_bits(slot, reterr);
}

static void slot_log_loaded(const ModelSlot *slot)
{
    double seconds = (double)(slot->idle_since_usec - slot->loading_since_usec) / 1e6;
    ModelPlan plan;

    model_weights_plan(slot->model, &plan);
    log_info("Model '%s' is loaded: %.1f MiB on the device, %u of %u layers, %u rows a pass, %.2f s", slot->config.name,
             (double)model_device_bytes(slot->model) / 0x1p20, plan.n_layers_resident, plan.n_layers, slot->max_rows, seconds);
}

static void slot_load_failed(Engine *engine, ModelSlot *slot, EngineResult result, ErrorDetail *detail)
{
    if (!detail->text[0])
        (void)error_detail_set(detail, -EIO, "model '%s' cannot be brought to the device", slot->config.name);
    slot_unload(engine, slot);
    slot_fail(engine, slot, result, detail);
    if (result == ENGINE_RESULT_DEVICE_LOST && engine->gpu)
        device_abandon(engine, detail);
}

/* The store of the model's own policy comes with it, so that a load that succeeded is ready to generate. */
static void slot_load_end(Engine *engine, ModelSlot *slot)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    EngineResult result;
    StoreSlot *store;

    result = slot_store(engine, slot, &slot->config.policy, slot_is_needed(engine, slot), &store, &detail);
    if (result != ENGINE_RESULT_DONE) {
        slot_load_failed(engine, slot, result, &detail);
        return;
    }
    slot->state = SLOT_LOADED;
    engine->admission_due = true;
    slot->error = ERROR_DETAIL_NULL;
    slot->idle_since_usec = now_usec();
    slot_log_loaded(slot);
    status_model_state(engine, slot);
    files_slot_ready(engine, slot, ENGINE_RESULT_DONE, NULL);
}

/* The file is open: the rest of the load. */
static void slot_load(Engine *engine, ModelSlot *slot)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    EngineResult result;
    bool again = false;

    mailbox_allow(engine->mailbox, now_usec() + ENGINE_LOAD_ALLOWANCE_USEC);
    result = slot_load_steps(engine, slot, &again, &detail);
    mailbox_allow(engine->mailbox, 0);
    if (again)
        slot_open(engine, slot);
    else if (result != ENGINE_RESULT_DONE)
        slot_load_failed(engine, slot, result, &detail);
    else if (!slot->nbits)
        slot_load_end(engine, slot);
}

static void slot_log_bits(const ModelSlot *slot)
{
    const KvPolicy *asked = &slot->config.policy;
    bool known;
    KvPolicy policy = model_nbits_resolve(model_file(slot->model), slot->config.exact, asked, &known);

    if (known)
        log_info("Model '%s': K %u, V %u bits for its cache, chosen for a budget of %g (mean KL divergence added)", slot->config.name,
                 policy.form.k_bits, policy.form.v_bits, asked->kld_budget);
}

void slot_measure(Engine *engine, ModelSlot *slot)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    bool done = false;
    int r;

    mailbox_allow(engine->mailbox, now_usec() + ENGINE_LOAD_ALLOWANCE_USEC); /* a step may compile kernels */
    r = nbits_step(slot->nbits, &done, &detail);
    mailbox_allow(engine->mailbox, 0);
    if (!r && !done)
        return;
    slot->nbits = nbits_free(slot->nbits);
    slot_log_bits(slot);
    /* For want of memory the store's own way: it frees what is idle, steps down the ladder, and measures. */
    if (r && r != MODEL_E_DEVICE_MEMORY && r != MODEL_E_HOST_MEMORY)
        slot_load_failed(engine, slot, result_from_model(r), &detail);
    else
        slot_load_end(engine, slot);
}

void slot_want_loaded(Engine *engine, ModelSlot *slot)
{
    if (slot->state == SLOT_LOADED || slot->state == SLOT_LOADING)
        return;
    slot->state = SLOT_LOADING;
    slot->error = ERROR_DETAIL_NULL;
    slot->loading_since_usec = now_usec();
    status_model_state(engine, slot);
    if (slot->file)
        slot_load(engine, slot);
    else
        slot_open(engine, slot);
}

void slot_want_file(Engine *engine, ModelSlot *slot, Query *query)
{
    Query **last;

    if (slot_file(slot)) {
        slot->file_since_usec = now_usec();
        query_with_file(engine, query);
        return;
    }
    for (last = &slot->queries; *last; last = &(*last)->next)
        continue;
    *last = query;
    slot_open(engine, slot);
}

static void slot_learn_facts(ModelSlot *slot)
{
    const ModelParams *params = model_file_params(slot->file);
    EngineModelStatus *f = &slot->facts;

    (void)snprintf(f->digest, sizeof(f->digest), "%s", model_file_digest(slot->file));
    (void)snprintf(f->architecture, sizeof(f->architecture), "%s", params->architecture);
    (void)snprintf(f->quantization, sizeof(f->quantization), "%s", params->quantization);
    (void)snprintf(f->license, sizeof(f->license), "%s", params->license);
    f->parameters = params->n_parameters;
    f->file_bytes = model_file_bytes(slot->file);
}

void models_file_opened(Engine *engine, Command *command)
{
    ModelSlot *slot = models_find_id(engine, command->id);
    Query *queries;

    if (!slot)
        return; /* removed or reconfigured meanwhile; the command frees the file */
    slot->opening = false;
    slot->file_since_usec = now_usec();
    if (command->result == ENGINE_RESULT_DONE) {
        slot->file = TAKE_PTR(command->file);
        slot_learn_facts(slot);
        engine->status_dirty = true;
    } else if (!command->detail.text[0]) {
        (void)error_detail_set(&command->detail, -EIO, "'%s' cannot be opened", slot->config.path);
    }
    queries = TAKE_PTR(slot->queries);
    while (queries) {
        Query *query = queries;

        queries = query->next;
        query->next = NULL;
        if (command->result == ENGINE_RESULT_DONE)
            query_with_file(engine, query);
        else
            query_answer(engine, query, command->result, &command->detail);
    }
    if (slot->state != SLOT_LOADING)
        return;
    if (command->result == ENGINE_RESULT_DONE)
        slot_load(engine, slot);
    else
        slot_fail(engine, slot, command->result, &command->detail);
}

void slot_unload(Engine *engine, ModelSlot *slot)
{
    bool was_loaded = slot->state == SLOT_LOADED;

    if (slot->nbits && slot->state == SLOT_LOADING)
        slot->state = SLOT_UNLOADED; /* who waits for it has it loaded anew */
    slot->nbits = nbits_free(slot->nbits);
    sessions_drop_caches(engine, slot, NULL);
    for (StoreSlot *store = slot->stores, *next; store; store = next) {
        next = store->next;
        store_slot_free(engine, store);
    }
    slot->stores = NULL;
    slot->model = model_free(slot->model);
    slot->chat_template = chat_template_free(slot->chat_template);
    gpu_free_host(engine->gpu, TAKE_PTR(slot->logits));
    slot->unload_wanted = false;
    engine->admission_due = true;
    if (!was_loaded)
        return;
    slot->state = SLOT_UNLOADED;
    log_info("Model '%s' is unloaded", slot->config.name);
    status_model_state(engine, slot);
}

/* ---- stores ---------------------------------------------------------------------------------------------------------------- */

StoreSlot *store_slot_free(Engine *engine, StoreSlot *store)
{
    files_drop_store(engine, store);
    prefixes_clear(&store->prefixes);
    kv_store_free(store->store);
    free(store);
    return NULL;
}

StoreSlot *slot_find_store(ModelSlot *slot, const KvPolicy *policy)
{
    for (StoreSlot *store = slot->stores; store; store = store->next)
        if (policy_equal(&store->policy, policy))
            return store;
    return NULL;
}

/* Whoever is idle gives way, then the ladder. */
static int store_new(Engine *engine, ModelSlot *slot, StoreSlot *store, bool make_room, ErrorDetail *reterr)
{
    KvPolicy policy = policy_equal(&store->policy, &slot->asked_policy) ? slot->fit_policy : store->policy;
    int r;

    if (policy.home != store->policy.home)
        store->steps |= MODEL_STEP_HOME;
    if (policy.n_slots != store->policy.n_slots || policy.tile_blocks != store->policy.tile_blocks)
        store->steps |= MODEL_STEP_STAGING;
    do
        r = model_store_new(slot->model, &policy, &store->store, reterr);
    while (((r == MODEL_E_DEVICE_MEMORY || r == MODEL_E_HOST_MEMORY) && make_room && models_make_room(engine, slot)) ||
           (r == MODEL_E_DEVICE_MEMORY && ladder_for_store(engine, slot, store, &policy)));
    return r;
}

EngineResult slot_store(Engine *engine, ModelSlot *slot, const KvPolicy *policy, bool make_room, StoreSlot **ret, ErrorDetail *reterr)
{
    StoreSlot *store = slot_find_store(slot, policy);
    int r;

    if (store) {
        store->last_used_usec = now_usec();
        *ret = store;
        return ENGINE_RESULT_DONE;
    }
    store = calloc(1, sizeof(*store));
    if (!store)
        return ENGINE_RESULT_OUT_OF_MEMORY;
    store->policy = *policy;
    mailbox_allow(engine->mailbox, now_usec() + ENGINE_LOAD_ALLOWANCE_USEC);
    r = store_new(engine, slot, store, make_room, reterr);
    mailbox_allow(engine->mailbox, 0);
    if (r) {
        free(store);
        return result_from_model(r);
    }
    store->group = ++engine->last_group;
    store->last_used_usec = now_usec();
    store->next = slot->stores;
    slot->stores = store;
    *ret = store;
    return ENGINE_RESULT_DONE;
}
