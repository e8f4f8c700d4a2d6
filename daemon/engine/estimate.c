/* SPDX-License-Identifier: Apache-2.0 */
/* Model.Estimate: bytes by purpose and place before anything is allocated. */

#include "daemon/engine/engine-internal.h"

#include <jansson.h>

/* The plan of the largest batch that fits the whole budget, else of the smallest batch. */
static int plan_best(Engine *engine, ModelSlot *slot, const KvPolicy *policy, ModelPlan *ret, uint32_t *ret_rows, ErrorDetail *reterr)
{
    uint32_t rows = slot->model ? slot->max_rows : MODELS_MAX_ROWS;
    int r;

    for (;;) {
        ModelOptions options = slot_options(engine, slot, rows);

        r = model_plan(gpu_info(engine->gpu), slot_file(slot), &options, policy, ret, reterr);
        if (r && r != MODEL_E_DEVICE_MEMORY)
            return r;
        *ret_rows = rows;
        if (ret->fits || slot->model || rows <= MODELS_MIN_ROWS)
            return 0;
        rows /= 2;
    }
}

/* What crosses the bus for one token at full depth: the packed past, when its home is the host and it is not read in place. */
static uint64_t streamed_bytes(const KvPolicy *policy, const ModelPlan *plan, uint32_t context)
{
    return policy->home == KV_HOME_HOST && plan->kv.n_slots > 0 ? plan->kv.host_bytes_per_token * context : 0;
}

static const char *transfer_in_effect(const KvPolicy *policy, const ModelPlan *plan)
{
    if (policy->transfer != KV_TRANSFER_AUTO)
        return status_transfer(policy->transfer);
    return status_transfer(plan->kv.n_slots > 0 ? KV_TRANSFER_COPY : KV_TRANSFER_ZERO_COPY);
}

/* The speed to expect, when it can be measured: at the first token and with the context full. */
static void add_prediction(Engine *engine, const ModelPlan *plan, uint64_t streamed, uint32_t context, json_t *json)
{
    uint64_t past = plan->kv.host_bytes_per_token * context + plan->kv.device_page_bytes;
    const char *limit;
    double first, full;

    if (engine->rates.read == 0 && device_rates_measure(engine->gpu, engine->watchdog_usec, &engine->rates) != 0)
        return;
    first = device_rates_predict(&engine->rates, plan->weight_bytes, 0, &limit);
    full = device_rates_predict(&engine->rates, plan->weight_bytes + past, streamed, &limit);
    (void)json_object_set_new(json, "seconds-per-token", json_real(first));
    (void)json_object_set_new(json, "seconds-per-token-full", json_real(full));
    (void)json_object_set_new(json, "limit-full", json_string(limit));
}

EngineResult estimate_json(Engine *engine, ModelSlot *slot, const KvPolicy *policy, char **ret_json, ErrorDetail *reterr)
{
    uint32_t context = slot_context(slot, policy), rows = 0;
    uint64_t used[GPU_PURPOSE_X_MAX], total = 0;
    EngineResult result;
    char form[16];
    json_t *json;
    ModelPlan p;
    int r;

    result = device_ensure(engine, reterr);
    if (result != ENGINE_RESULT_DONE)
        return result;
    r = plan_best(engine, slot, policy, &p, &rows, reterr);
    if (r)
        return result_from_model(r);
    gpu_memory_used(engine->gpu, used, &total);
    status_form(policy->form, form, sizeof(form));
    json = json_pack(
        "{s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b}", "strategy",
        kv_strategy_to_string(policy->strategy), "form", form, "home", policy->home == KV_HOME_HOST ? "host" : "device", "transfer",
        transfer_in_effect(policy, &p), "context", (json_int_t)context, "rows-per-pass", (json_int_t)rows, "weight-bytes",
        (json_int_t)p.weight_bytes, "activation-bytes", (json_int_t)p.activation_bytes, "staging-bytes",
        (json_int_t)p.kv.staging_bytes, "tail-bytes", (json_int_t)p.kv.tail_bytes, "operand-bytes", (json_int_t)p.kv.operand_bytes,
        "device-page-bytes", (json_int_t)p.kv.device_page_bytes, "host-bytes-per-token", (json_int_t)p.kv.host_bytes_per_token,
        "host-bytes", (json_int_t)(p.kv.host_bytes_per_token * context), "staging-slots", (json_int_t)p.kv.n_slots,
        "tile-tokens", (json_int_t)p.kv.tile_blocks * KV_BLOCK_PAGES * KV_PAGE_TOKENS, "streamed-bytes-per-token",
        (json_int_t)streamed_bytes(policy, &p, context), "device-bytes", (json_int_t)p.device_total_bytes,
        "device-budget-bytes", (json_int_t)p.device_budget_bytes, "fits", p.fits);
    if (json) {
        (void)json_object_set_new(json, "device-used-bytes", json_integer((json_int_t)total));
        add_prediction(engine, &p, streamed_bytes(policy, &p, context), context, json);
    }
    *ret_json = json ? json_dumps(json, JSON_COMPACT) : NULL;
    json_decref(json);
    return *ret_json ? ENGINE_RESULT_DONE : ENGINE_RESULT_OUT_OF_MEMORY;
}
