/* SPDX-License-Identifier: Apache-2.0 */
/* Model.Estimate: bytes by purpose and place before anything is allocated. */

#include "daemon/engine/engine-internal.h"
#include "daemon/model/speed.h"
#include "quant/base/log.h"

#include <jansson.h>

/* How it would be loaded on a device that holds nothing else; when it is loaded, how it is. */
static int plan_best(Engine *engine, ModelSlot *slot, const KvPolicy *policy, ModelFit *ret, ErrorDetail *reterr)
{
    const GpuInfo *info = gpu_info(engine->gpu);
    ModelOptions options = slot_options(engine, slot, MODELS_MAX_ROWS);
    ModelFit fit = {.policy = policy_equal(policy, &slot->asked_policy) ? slot->fit_policy : *policy, .steps = slot->steps};
    const StoreSlot *store = slot->model ? slot_find_store(slot, policy) : NULL;
    int r;

    if (!slot->model) {
        r = model_fit(info, slot_file(slot), &options, policy, info->budget_bytes, ret, reterr);
        if (r != MODEL_E_DEVICE_MEMORY)
            return r;
        /* It does not fit by any means: the smallest batch says by how much. */
        options.max_rows = MODELS_MIN_ROWS;
        *ret = (ModelFit){.options = options, .policy = *policy};
        return model_plan(info, slot_file(slot), &options, policy, &ret->plan, reterr);
    }
    if (store) {
        fit.policy = *kv_store_policy(store->store);
        fit.steps |= store->steps;
    }
    fit.options = *model_options(slot->model);
    r = model_plan(info, slot_file(slot), &fit.options, &fit.policy, &fit.plan, reterr);
    if (!r)
        *ret = fit;
    return r;
}

static const char *transfer_in_effect(const KvPolicy *policy, const ModelPlan *plan)
{
    if (policy->transfer != KV_TRANSFER_AUTO)
        return status_transfer(policy->transfer);
    return status_transfer(plan->kv.n_slots > 0 ? KV_TRANSFER_COPY : KV_TRANSFER_ZERO_COPY);
}

/* Nobody waits for the device, nor would what is measured be disturbed. */
static bool is_idle(const Engine *engine)
{
    for (const Job *job = engine->jobs; job; job = job->next)
        if (job->active)
            return false;
    return true;
}

static void add_speed(const ModelSpeed *speed, const ModelFit *fit, uint32_t depth, const char *suffix, json_t *json)
{
    ModelPrediction prediction;
    char key[64];

    model_predict(speed, fit, depth, &prediction);
    (void)snprintf(key, sizeof(key), "hidden-share%s", suffix);
    (void)json_object_set_new(json, key, json_real(prediction.hidden_share));
    (void)snprintf(key, sizeof(key), "seconds-per-token%s", suffix);
    (void)json_object_set_new(json, key, json_real(prediction.token_sec));
    (void)snprintf(key, sizeof(key), "decode-rate%s", suffix);
    (void)json_object_set_new(json, key, json_real(prediction.token_sec > 0 ? 1 / prediction.token_sec : 0));
    (void)snprintf(key, sizeof(key), "prefill-rate%s", suffix);
    (void)json_object_set_new(json, key, json_real(prediction.prefill_rate));
    (void)snprintf(key, sizeof(key), "limit%s", suffix);
    (void)json_object_set_new(json, key, json_string(prediction.bus_limited ? "bus" : "arithmetic"));
}

/* The speed to expect, when it was measured or can be now: at the first token, with the context full, and at a depth that is asked for. */
static void add_prediction(Engine *engine, const ModelSlot *slot, const ModelFit *fit, uint32_t context, int64_t depth, json_t *json)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    ModelSpeed speed;
    int r;

    mailbox_allow(engine->mailbox, now_usec() + ENGINE_LOAD_ALLOWANCE_USEC);
    r = model_speed(engine->gpu, slot_file(slot), fit, is_idle(engine), &speed, &detail);
    mailbox_allow(engine->mailbox, 0);
    if (r) {
        log_debug("The speed of '%s' is not known: %s", slot->config.name, detail.text);
        return;
    }
    (void)json_object_set_new(json, "upload-rate", json_real(speed.upload_rate));
    add_speed(&speed, fit, 0, "", json);
    add_speed(&speed, fit, context, "-full", json);
    if (depth < 0)
        return;
    (void)json_object_set_new(json, "depth", json_integer((json_int_t)depth));
    add_speed(&speed, fit, (uint32_t)MIN(depth, (int64_t)context), "-at-depth", json);
}

static json_t *plan_json(const ModelFit *fit, uint32_t context)
{
    const ModelPlan *p = &fit->plan;
    const KvPolicy *policy = &fit->policy;
    char form[32], ladder[72];

    status_form(policy, form, sizeof(form));
    engine_ladder_text(fit->steps, ladder, sizeof(ladder));
    return json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b}",
        "strategy", kv_strategy_to_string(policy->strategy), "form", form, "home", policy->home == KV_HOME_HOST || policy->is_compatible ? "host" : "device",
        "transfer", transfer_in_effect(policy, p), "ladder", ladder, "context", (json_int_t)context, "rows-per-pass",
        (json_int_t)fit->options.max_rows, "weight-bytes", (json_int_t)p->weight_bytes, "weight-total-bytes",
        (json_int_t)p->weight_total_bytes, "weight-staging-bytes", (json_int_t)p->weight_staging_bytes, "weight-streamed-bytes",
        (json_int_t)p->weight_streamed_bytes, "weight-in-place-bytes", (json_int_t)p->weight_in_place_bytes, "weight-slots",
        (json_int_t)p->weight_slots, "layers", (json_int_t)p->n_layers, "layers-resident", (json_int_t)p->n_layers_resident,
        "activation-bytes", (json_int_t)p->activation_bytes, "staging-bytes", (json_int_t)p->kv.staging_bytes, "tail-bytes",
        (json_int_t)p->kv.tail_bytes, "operand-bytes", (json_int_t)p->kv.operand_bytes, "device-page-bytes",
        (json_int_t)p->kv.device_page_bytes, "host-bytes-per-token", (json_int_t)p->kv.host_bytes_per_token, "host-bytes",
        (json_int_t)(p->kv.host_bytes_per_token * context + p->kv.host_window_bytes), "staging-slots", (json_int_t)p->kv.n_slots, "tile-tokens",
        (json_int_t)p->kv.tile_blocks * KV_BLOCK_PAGES * KV_PAGE_TOKENS, "device-bytes", (json_int_t)p->device_total_bytes, "fits",
        p->device_total_bytes <= p->device_budget_bytes);
}

EngineResult estimate_json(Engine *engine, ModelSlot *slot, const KvPolicy *policy, int64_t depth, char **ret_json, ErrorDetail *reterr)
{
    uint32_t context = slot_context(slot, policy);
    uint64_t used[GPU_PURPOSE_X_MAX], total = 0;
    EngineResult result;
    json_t *json, *bits;
    ModelFit fit;
    bool known;
    int r;

    result = device_ensure(engine, reterr);
    if (result != ENGINE_RESULT_DONE)
        return result;
    r = plan_best(engine, slot, policy, &fit, reterr);
    if (r)
        return result_from_model(r);
    /* Automatic bits as they are or would be now. */
    fit.policy = model_nbits_resolve(slot_file(slot), fit.options.exact, &fit.policy, &known);
    gpu_memory_used(engine->gpu, used, &total);
    json = plan_json(&fit, context);
    if (json) {
        (void)json_object_set_new(json, "streamed-bytes-per-token", json_integer((json_int_t)model_streamed_bytes(&fit, context)));
        (void)json_object_set_new(json, "device-budget-bytes", json_integer((json_int_t)fit.plan.device_budget_bytes));
        (void)json_object_set_new(json, "device-used-bytes", json_integer((json_int_t)total));
        if (fit.policy.n_layer_bits > 0) {
            char bits_text[KV_LAYER_BITS_TEXT];

            kv_layer_bits_to_text(fit.policy.layer_bits, fit.policy.n_layer_bits, bits_text, sizeof(bits_text));
            (void)json_object_set_new(json, "nbits-layers", json_string(bits_text));
        }
        add_prediction(engine, slot, &fit, context, depth, json);
        bits = estimate_bits_json(slot_file(slot), fit.options.exact, policy, &fit.policy.form);
        if (bits)
            (void)json_object_set_new(json, "bits", bits);
    }
    *ret_json = json ? json_dumps(json, JSON_COMPACT) : NULL;
    json_decref(json);
    return *ret_json ? ENGINE_RESULT_DONE : ENGINE_RESULT_OUT_OF_MEMORY;
}
