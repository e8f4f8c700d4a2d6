/* SPDX-License-Identifier: Apache-2.0 */
/* Model.Estimate: bytes by purpose and place before anything is allocated. */

#include "daemon/engine/engine-internal.h"

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

/* What crosses the bus for one token at full depth: weights that stream; the packed past, when its home is the host and it is not read
 * in place. */
static uint64_t streamed_bytes(const ModelFit *fit, uint32_t context)
{
    const ModelPlan *plan = &fit->plan;
    bool past = fit->policy.home == KV_HOME_HOST && plan->kv.n_slots > 0;

    return plan->weight_streamed_bytes + (past ? plan->kv.host_bytes_per_token * context : 0);
}

static const char *transfer_in_effect(const KvPolicy *policy, const ModelPlan *plan)
{
    if (policy->transfer != KV_TRANSFER_AUTO)
        return status_transfer(policy->transfer);
    return status_transfer(plan->kv.n_slots > 0 ? KV_TRANSFER_COPY : KV_TRANSFER_ZERO_COPY);
}

/* The speed to expect, when it can be measured: at the first token and with the context full. */
static void add_prediction(Engine *engine, const ModelFit *fit, uint32_t context, json_t *json)
{
    const ModelPlan *plan = &fit->plan;
    uint64_t past = plan->kv.host_bytes_per_token * context + plan->kv.device_page_bytes;
    const char *limit;
    double first, full;

    if (engine->rates.read == 0 && device_rates_measure(engine->gpu, engine->watchdog_usec, &engine->rates) != 0)
        return;
    first = device_rates_predict(&engine->rates, plan->weight_total_bytes, plan->weight_streamed_bytes, &limit);
    full = device_rates_predict(&engine->rates, plan->weight_total_bytes + past, streamed_bytes(fit, context), &limit);
    (void)json_object_set_new(json, "seconds-per-token", json_real(first));
    (void)json_object_set_new(json, "seconds-per-token-full", json_real(full));
    (void)json_object_set_new(json, "limit-full", json_string(limit));
}

static json_t *plan_json(const ModelFit *fit, uint32_t context)
{
    const ModelPlan *p = &fit->plan;
    const KvPolicy *policy = &fit->policy;
    char form[16], ladder[72];

    status_form(policy->form, form, sizeof(form));
    engine_ladder_text(fit->steps, ladder, sizeof(ladder));
    return json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b}",
        "strategy", kv_strategy_to_string(policy->strategy), "form", form, "home", policy->home == KV_HOME_HOST ? "host" : "device",
        "transfer", transfer_in_effect(policy, p), "ladder", ladder, "context", (json_int_t)context, "rows-per-pass",
        (json_int_t)fit->options.max_rows, "weight-bytes", (json_int_t)p->weight_bytes, "weight-total-bytes",
        (json_int_t)p->weight_total_bytes, "weight-staging-bytes", (json_int_t)p->weight_staging_bytes, "weight-streamed-bytes",
        (json_int_t)p->weight_streamed_bytes, "weight-in-place-bytes", (json_int_t)p->weight_in_place_bytes, "weight-slots",
        (json_int_t)p->weight_slots, "layers", (json_int_t)p->n_layers, "layers-resident", (json_int_t)p->n_layers_resident,
        "activation-bytes", (json_int_t)p->activation_bytes, "staging-bytes", (json_int_t)p->kv.staging_bytes, "tail-bytes",
        (json_int_t)p->kv.tail_bytes, "operand-bytes", (json_int_t)p->kv.operand_bytes, "device-page-bytes",
        (json_int_t)p->kv.device_page_bytes, "host-bytes-per-token", (json_int_t)p->kv.host_bytes_per_token, "host-bytes",
        (json_int_t)(p->kv.host_bytes_per_token * context), "staging-slots", (json_int_t)p->kv.n_slots, "tile-tokens",
        (json_int_t)p->kv.tile_blocks * KV_BLOCK_PAGES * KV_PAGE_TOKENS, "device-bytes", (json_int_t)p->device_total_bytes, "fits",
        p->device_total_bytes <= p->device_budget_bytes);
}

EngineResult estimate_json(Engine *engine, ModelSlot *slot, const KvPolicy *policy, char **ret_json, ErrorDetail *reterr)
{
    uint32_t context = slot_context(slot, policy);
    uint64_t used[GPU_PURPOSE_X_MAX], total = 0;
    EngineResult result;
    json_t *json;
    ModelFit fit;
    int r;

    result = device_ensure(engine, reterr);
    if (result != ENGINE_RESULT_DONE)
        return result;
    r = plan_best(engine, slot, policy, &fit, reterr);
    if (r)
        return result_from_model(r);
    gpu_memory_used(engine->gpu, used, &total);
    json = plan_json(&fit, context);
    if (json) {
        (void)json_object_set_new(json, "streamed-bytes-per-token", json_integer((json_int_t)streamed_bytes(&fit, context)));
        (void)json_object_set_new(json, "device-budget-bytes", json_integer((json_int_t)fit.plan.device_budget_bytes));
        (void)json_object_set_new(json, "device-used-bytes", json_integer((json_int_t)total));
        add_prediction(engine, &fit, context, json);
    }
    *ret_json = json ? json_dumps(json, JSON_COMPACT) : NULL;
    json_decref(json);
    return *ret_json ? ENGINE_RESULT_DONE : ENGINE_RESULT_OUT_OF_MEMORY;
}
