/* SPDX-License-Identifier: Apache-2.0 */
/* The list of models: configuration, expiry, and making room. */

#include "daemon/engine/engine-internal.h"
#include "quant/base/log.h"

#include <string.h>

ModelSlot *models_find(Engine *engine, const char *name)
{
    for (ModelSlot *slot = engine->slots; slot; slot = slot->next)
        if (!slot->removed && strcmp(slot->config.name, name) == 0)
            return slot;
    return NULL;
}

ModelSlot *models_find_id(Engine *engine, uint64_t id)
{
    for (ModelSlot *slot = engine->slots; slot; slot = slot->next)
        if (slot->id == id)
            return slot;
    return NULL;
}

uint32_t slot_n_active(const Engine *engine, const ModelSlot *slot)
{
    uint32_t n = 0;

    for (const Job *job = engine->jobs; job; job = job->next)
        n += job->active && job->slot == slot;
    return n;
}

static bool slot_has_waiting(const Engine *engine, const ModelSlot *slot)
{
    for (const Job *job = engine->jobs; job; job = job->next)
        if (!job->active && job->slot == slot)
            return true;
    return false;
}

/* ---- configuration ---------------------------------------------------------------------------------------------------------- */

/* A new number, so that the worker's answer about another file does not find the slot. */
static void slot_renumber(Engine *engine, ModelSlot *slot)
{
    slot->id = ++engine->last_slot;
    slot->opening = false;
    slot->file = model_file_free(slot->file);
}

/* No job runs on it: what was configured meanwhile takes over. */
static void slot_take_pending(Engine *engine, ModelSlot *slot)
{
    Query *queries = TAKE_PTR(slot->queries);

    slot_unload(engine, slot);
    slot_renumber(engine, slot);
    model_config_clear(&slot->config);
    slot->config = slot->pending;
    slot->pending = (EngineModel){0};
    slot->has_pending = false;
    slot->state = SLOT_UNLOADED;
    slot->error = ERROR_DETAIL_NULL;
    slot->facts = (EngineModelStatus){0};
    status_model_state(engine, slot);
    while (queries) {
        Query *query = queries;

        queries = query->next;
        query->next = NULL;
        slot_want_file(engine, slot, query);
    }
}

/* @model is taken (its contents). */
static void slot_reconfigure(ModelSlot *slot, EngineModel *model)
{
    slot->removed = false;
    if (slot->has_pending)
        model_config_clear(&slot->pending);
    slot->has_pending = false;
    slot->pending = (EngineModel){0};
    if (model_config_same_load(&slot->config, model)) {
        model_config_clear(&slot->config);
        slot->config = *model;
    } else {
        slot->pending = *model;
        slot->has_pending = true;
    }
    *model = (EngineModel){0};
}

static void models_append(Engine *engine, EngineModel *model)
{
    ModelSlot *slot = calloc(1, sizeof(*slot)), **last;

    if (!slot) {
        log_error("Out of memory: model '%s' is left out", model->name);
        return;
    }
    slot->id = ++engine->last_slot;
    slot->config = *model;
    *model = (EngineModel){0};
    for (last = &engine->slots; *last; last = &(*last)->next)
        continue;
    *last = slot;
    status_model_state(engine, slot);
}

void models_configure(Engine *engine, EngineModel *models, size_t n)
{
    for (ModelSlot *slot = engine->slots; slot; slot = slot->next)
        slot->removed = true;
    for (size_t i = 0; i < n; i++) {
        ModelSlot *slot;

        for (slot = engine->slots; slot; slot = slot->next)
            if (strcmp(slot->config.name, models[i].name) == 0)
                break;
        if (slot)
            slot_reconfigure(slot, &models[i]);
        else
            models_append(engine, &models[i]);
    }
    model_configs_free(models, n);
    engine->status_dirty = engine->admission_due = true;
}

void models_preload(Engine *engine)
{
    for (ModelSlot *slot = engine->slots; slot; slot = slot->next)
        if (slot->config.preload && !slot->removed && slot->state == SLOT_UNLOADED)
            slot_want_loaded(engine, slot);
}

bool models_measure(Engine *engine)
{
    for (ModelSlot *slot = engine->slots; slot; slot = slot->next)
        if (slot->nbits) {
            slot_measure(engine, slot);
            return true;
        }
    return false;
}

/* ---- end ------------------------------------------------------------------------------------------------------------------- */

static ModelSlot *slot_free(Engine *engine, ModelSlot *slot)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    for (ModelSlot **s = &engine->slots; *s; s = &(*s)->next)
        if (*s == slot) {
            *s = slot->next;
            break;
        }
    (void)error_detail_set(&detail, -ENOENT, "model '%s' is no longer configured", slot->config.name);
    while (slot->queries) {
        Query *query = slot->queries;

        slot->queries = query->next;
        query->next = NULL;
        query_answer(engine, query, ENGINE_RESULT_NO_SUCH_MODEL, &detail);
    }
    files_slot_ready(engine, slot, ENGINE_RESULT_NO_SUCH_MODEL, &detail);
    jobs_fail_slot(engine, slot, ENGINE_RESULT_NO_SUCH_MODEL, &detail);
    sessions_close_slot(engine, slot);
    slot_unload(engine, slot);
    model_file_free(slot->file);
    model_config_clear(&slot->config);
    model_config_clear(&slot->pending);
    free(slot);
    engine->status_dirty = true;
    return NULL;
}

void models_free_all(Engine *engine)
{
    while (engine->slots)
        slot_free(engine, engine->slots);
}

/* ---- time and room --------------------------------------------------------------------------------------------------------- */

static uint64_t after(uint64_t since, uint64_t span)
{
    return span > UINT64_MAX - since ? UINT64_MAX : since + span;
}

/* Does what is due for one slot; returns when something will be, or 0 when the slot is gone. */
static uint64_t slot_expire(Engine *engine, ModelSlot *slot, uint64_t now)
{
    uint64_t next = UINT64_MAX, due;

    if (slot_n_active(engine, slot) > 0)
        return next;
    if (slot->removed) {
        slot_free(engine, slot);
        return 0;
    }
    if (slot->has_pending)
        slot_take_pending(engine, slot);
    if (slot->state == SLOT_LOADED) {
        due = slot_has_waiting(engine, slot) ? UINT64_MAX : after(slot->idle_since_usec, slot->config.keep_alive_usec);
        if (slot->unload_wanted || due <= now)
            slot_unload(engine, slot);
        else
            next = due;
    }
    if (slot->restores && slot->state == SLOT_UNLOADED)
        slot_want_loaded(engine, slot); /* asked for while the old load was on its way out */
    if (slot->file && slot->state != SLOT_LOADING && !slot->queries) {
        due = after(slot->file_since_usec, MODELS_FILE_KEEP_USEC);
        if (due <= now)
            slot->file = model_file_free(slot->file);
        else
            next = MIN(next, due);
    }
    return next;
}

uint64_t models_expire(Engine *engine, uint64_t now)
{
    uint64_t next = UINT64_MAX;

    for (ModelSlot *slot = engine->slots, *following; slot; slot = following) {
        uint64_t due;

        following = slot->next;
        due = slot_expire(engine, slot, now);
        if (due > 0)
            next = MIN(next, due);
    }
    return next;
}

static bool store_in_use(const Engine *engine, const StoreSlot *store)
{
    for (const Job *job = engine->jobs; job; job = job->next)
        if (job->active && job_store(job) == store)
            return true;
    return false;
}

/* The store that no running job uses and that was used longest ago. */
static StoreSlot **find_idle_store(Engine *engine, ModelSlot **ret_slot)
{
    StoreSlot **found = NULL;

    for (ModelSlot *slot = engine->slots; slot; slot = slot->next)
        for (StoreSlot **s = &slot->stores; *s; s = &(*s)->next)
            if (!store_in_use(engine, *s) && (!found || (*s)->last_used_usec < (*found)->last_used_usec)) {
                found = s;
                *ret_slot = slot;
            }
    return found;
}

bool models_make_room(Engine *engine, const ModelSlot *except)
{
    ModelSlot *slot = NULL, *idle = NULL;
    StoreSlot **found = find_idle_store(engine, &slot), *store;

    if (found) {
        store = *found;
        sessions_drop_caches(engine, slot, store);
        *found = store->next;
        store_slot_free(engine, store);
        return true;
    }
    for (slot = engine->slots; slot; slot = slot->next)
        if (slot != except && slot->state == SLOT_LOADED && slot->config.keep_alive_usec != UINT64_MAX &&
            slot_n_active(engine, slot) == 0 && (!idle || slot->idle_since_usec < idle->idle_since_usec))
            idle = slot;
    if (!idle)
        return false;
    log_info("Model '%s' is unloaded to make room", idle->config.name);
    slot_unload(engine, idle);
    return true;
}
