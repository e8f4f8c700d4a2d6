/* SPDX-License-Identifier: Apache-2.0 */
/* What the engine tells about itself: the snapshot for other threads, the status question. */

#include "daemon/engine/engine-internal.h"

#include <jansson.h>
#include <string.h>

/* "leat-k5v4"; what is not chosen yet is "auto"; "-mixed": some layers have others. */
static void status_bits(const KvPolicy *policy, char *ret, size_t size)
{
    const char *mixed = policy->n_layer_bits > 0 ? "-mixed" : "";
    const KvForm form = policy->form;
    char k[8] = "auto", v[8] = "auto";

    if (form.k_bits != KV_BITS_AUTO)
        (void)snprintf(k, sizeof(k), "%u", form.k_bits);
    if (form.v_bits != KV_BITS_AUTO)
        (void)snprintf(v, sizeof(v), "%u", form.v_bits);
    if (form.k_bits == KV_BITS_AUTO && form.v_bits == KV_BITS_AUTO)
        (void)snprintf(ret, size, "%s-auto%s", kv_form_kind_to_string(form.kind), mixed);
    else
        (void)snprintf(ret, size, "%s-k%sv%s%s", kv_form_kind_to_string(form.kind), k, v, mixed);
}

void status_form(const KvPolicy *policy, char *ret, size_t size)
{
    const KvForm form = policy->form;

    if (policy->is_compatible) {
        (void)snprintf(ret, size, "%s%u-compat", kv_form_kind_to_string(form.kind), policy->compatible.nbits);
        return;
    }
    switch (form.kind) {
    case KV_FORM_F32:
        (void)snprintf(ret, size, "f32");
        return;
    case KV_FORM_F16:
        (void)snprintf(ret, size, "f16");
        return;
    case KV_FORM_LEAT:
    case KV_FORM_QUANTO:
    case KV_FORM_HQQ:
        status_bits(policy, ret, size);
        return;
    case KV_FORM_FP8:
        (void)snprintf(ret, size, "fp8");
        return;
    case KV_FORM_X_MAX:
    case KV_FORM_X_INVALID:
        break;
    }
    (void)snprintf(ret, size, "unknown");
}

const char *status_transfer(KvTransfer transfer)
{
    switch (transfer) {
    case KV_TRANSFER_AUTO:
        return "auto";
    case KV_TRANSFER_COPY:
        return "copy";
    case KV_TRANSFER_ZERO_COPY:
        return "zero-copy";
    }
    return "unknown";
}

/* ---- snapshot -------------------------------------------------------------------------------------------------------------- */

static uint64_t slot_host_bytes(const Engine *engine, const ModelSlot *slot)
{
    uint64_t sum = 0;
    KvBytes bytes;

    for (const Session *s = engine->sessions; s; s = s->next)
        if (s->slot == slot && s->cache) {
            kv_cache_bytes(s->cache, &bytes);
            sum += bytes.host + bytes.checkpoints;
        }
    for (const Job *job = engine->jobs; job; job = job->next)
        if (job->slot == slot && job_store(job) && (job->batch || job->session->id == 0)) {
            if (job->batch)
                batch_bytes(job->batch, &bytes);
            else
                kv_cache_bytes(job->session->cache, &bytes);
            sum += bytes.host + bytes.checkpoints;
        }
    return sum;
}

static void describe_model(const Engine *engine, const ModelSlot *slot, EngineModelStatus *ret)
{
    *ret = slot->facts;
    (void)snprintf(ret->name, sizeof(ret->name), "%s", slot->config.name);
    (void)snprintf(ret->path, sizeof(ret->path), "%s", slot->config.path ? slot->config.path : "");
    (void)snprintf(ret->state, sizeof(ret->state), "%s", slot_state_to_string(slot));
    ret->context = slot_context(slot, &slot->config.policy);
    ret->device_bytes = slot->model ? model_device_bytes(slot->model) : 0;
    ret->host_bytes = slot_host_bytes(engine, slot);
    ret->error = slot->error;
}

static void publish_models(Engine *engine)
{
    EngineModelStatus *status, *old;
    size_t n = 0, i = 0;

    for (const ModelSlot *slot = engine->slots; slot; slot = slot->next)
        n += !slot->removed;
    status = calloc(n ? n : 1, sizeof(*status));
    if (!status)
        return; /* the old one stays; the next change tries again */
    for (const ModelSlot *slot = engine->slots; slot; slot = slot->next)
        if (!slot->removed)
            describe_model(engine, slot, &status[i++]);
    (void)pthread_mutex_lock(&engine->status_lock);
    old = engine->model_status;
    engine->model_status = status;
    engine->n_model_status = n;
    (void)pthread_mutex_unlock(&engine->status_lock);
    free(old);
    engine->status_dirty = false;
}

static void publish_device(Engine *engine)
{
    EngineDeviceStatus status = {.open = engine->gpu != NULL,
                                 .host_memory_bytes = engine->host_memory.limit_bytes,
                                 .host_used_bytes = engine->host_memory.used_bytes,
                                 .error = engine->device_error};

    if (engine->gpu) {
        status.info = *gpu_info(engine->gpu);
        gpu_memory_used(engine->gpu, status.used_bytes, &status.total_used_bytes);
        gpu_counters(engine->gpu, &status.counters);
    }
    (void)pthread_mutex_lock(&engine->status_lock);
    engine->device_status = status;
    (void)pthread_mutex_unlock(&engine->status_lock);
}

void status_publish(Engine *engine)
{
    if (engine->status_dirty)
        publish_models(engine);
    publish_device(engine);
}

/* The snapshot first: who gets the event reads it. */
void status_model_state(Engine *engine, ModelSlot *slot)
{
    EngineEvent *event = event_new(ENGINE_EVENT_MODEL_STATE);

    engine->status_dirty = true;
    status_publish(engine);
    if (!event)
        return;
    (void)snprintf(event->model, sizeof(event->model), "%s", slot->config.name);
    event->detail = slot->error;
    mailbox_emit(engine->mailbox, event);
}

void status_device_state(Engine *engine)
{
    EngineEvent *event = event_new(ENGINE_EVENT_DEVICE_STATE);

    status_publish(engine);
    if (!event)
        return;
    event->detail = engine->device_error;
    mailbox_emit(engine->mailbox, event);
}

/* ---- question -------------------------------------------------------------------------------------------------------------- */

static json_t *device_json(const EngineDeviceStatus *d)
{
    json_t *used = json_object();

    for (int p = 0; p < GPU_PURPOSE_X_MAX; p++)
        (void)json_object_set_new(used, gpu_purpose_to_string((GpuPurpose)p), json_integer((json_int_t)d->used_bytes[p]));
    return json_pack("{s:b, s:s, s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:o, s:I, s:I, s:s}", "open", d->open, "name", d->info.name, "vendor",
                     d->info.vendor, "driver", d->info.driver, "type", d->open ? gpu_device_type_to_string(d->info.type) : "",
                     "reason", d->info.reason, "memory-bytes", (json_int_t)d->info.memory_bytes, "budget-bytes",
                     (json_int_t)d->info.budget_bytes, "used-bytes", (json_int_t)d->total_used_bytes, "used", used,
                     "host-memory-bytes", (json_int_t)d->host_memory_bytes, "host-used-bytes", (json_int_t)d->host_used_bytes, "error",
                     d->error.text);
}

static json_t *counters_json(const GpuCounters *c)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "programs-built", (json_int_t)c->n_programs_built,
                     "programs-from-cache", (json_int_t)c->n_programs_from_cache, "buffers-created",
                     (json_int_t)c->n_buffers_created, "launches", (json_int_t)c->n_launches, "uploads", (json_int_t)c->n_uploads,
                     "downloads", (json_int_t)c->n_downloads, "copies", (json_int_t)c->n_copies, "upload-bytes",
                     (json_int_t)c->upload_bytes, "download-bytes", (json_int_t)c->download_bytes, "copy-bytes",
                     (json_int_t)c->copy_bytes);
}

/* Where a loaded model's weights are, and what it gave up for want of device memory. */
static json_t *weights_json(const ModelSlot *slot)
{
    ModelPlan plan = {.fits = true};
    char ladder[72] = "";

    if (slot->model) {
        model_weights_plan(slot->model, &plan);
        engine_ladder_text(slot->steps, ladder, sizeof(ladder));
    }
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s}", "layers", (json_int_t)plan.n_layers, "layers-resident",
                     (json_int_t)plan.n_layers_resident, "device-bytes", (json_int_t)plan.weight_bytes, "staging-bytes",
                     (json_int_t)plan.weight_staging_bytes, "staging-slots", (json_int_t)plan.weight_slots, "streamed-bytes",
                     (json_int_t)plan.weight_streamed_bytes, "in-place-bytes", (json_int_t)plan.weight_in_place_bytes, "ladder", ladder);
}

static json_t *models_json(const Engine *engine)
{
    json_t *array = json_array();

    for (const ModelSlot *slot = engine->slots; slot; slot = slot->next) {
        EngineModelStatus m;

        describe_model(engine, slot, &m);
        (void)json_array_append_new(
            array, json_pack("{s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:o, s:s}", "name", m.name, "state", m.state, "architecture",
                             m.architecture, "quantization", m.quantization, "context", (json_int_t)m.context, "file-bytes",
                             (json_int_t)m.file_bytes, "device-bytes", (json_int_t)m.device_bytes, "host-bytes",
                             (json_int_t)m.host_bytes, "active-jobs", (json_int_t)slot_n_active(engine, slot), "weights",
                             weights_json(slot), "error", m.error.text));
    }
    return array;
}

static json_t *sessions_json(const Engine *engine)
{
    json_t *array = json_array();

    for (const Session *s = engine->sessions; s; s = s->next) {
        KvBytes bytes = {0};

        if (s->cache)
            kv_cache_bytes(s->cache, &bytes);
        (void)json_array_append_new(
            array, json_pack("{s:I, s:s, s:I, s:I, s:I, s:I, s:b}", "id", (json_int_t)s->id, "model", s->slot->config.name, "tokens",
                             (json_int_t)s->ids.n, "cached-tokens", (json_int_t)session_cached(s), "host-bytes",
                             (json_int_t)(bytes.host + bytes.checkpoints), "device-bytes", (json_int_t)bytes.device, "busy",
                             s->job != NULL));
    }
    return array;
}

static json_t *jobs_json(const Engine *engine)
{
    static const char *const kinds[] = {[JOB_GENERATE] = "generate", [JOB_LOAD] = "load", [JOB_EVALUATE] = "evaluate"};
    static const char *const priorities[] = {"interactive", "normal", "background"};
    json_t *array = json_array();

    for (const Job *job = engine->jobs; job; job = job->next)
        (void)json_array_append_new(
            array, json_pack("{s:I, s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:f}", "id", (json_int_t)job->id, "kind", kinds[job->kind],
                             "state", engine_job_state_to_string(job->state), "model", job->slot ? job->slot->config.name : "",
                             "priority", priorities[job->priority], "queue-position", (json_int_t)job->queue_position,
                             "prompt-tokens", (json_int_t)job->usage.prompt_tokens, "output-tokens", (json_int_t)job->n_output,
                             "progress", job->progress));
    return array;
}

/* NULL members that memory did not suffice for make json_pack() fail as a whole: then there is no answer, which is said. */
char *status_json(Engine *engine)
{
    json_t *status;
    char *text;

    publish_device(engine);
    status = json_pack("{s:o, s:o, s:o, s:o, s:o}", "device", device_json(&engine->device_status), "counters",
                       counters_json(&engine->device_status.counters), "models", models_json(engine), "sessions",
                       sessions_json(engine), "jobs", jobs_json(engine));
    text = status ? json_dumps(status, JSON_COMPACT) : NULL;
    json_decref(status);
    return text;
}
