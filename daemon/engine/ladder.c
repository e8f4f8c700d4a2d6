/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When the device runs out: exact steps down, one at a time, until what is wanted fits.
 *
 *   smaller-batch      buffers for fewer rows a pass: a prompt takes more passes
 *   smaller-staging    the cache's ring holds one tile of one block
 *   host-home          the cache's pages live in host memory
 *   streamed-weights   an eighth of what the weights hold of the device leaves it, and streams from then on
 *
 * Caches move with their pages (cache/kv-migrate.h) where both stores have room for a moment, which the batch gives while it is large enough;
 * else what they held is run again.
 * None changes a bit of an answer: a row's result depends on that row only, a block of pages is the unit of summation, and where pages and
 * weights live does not matter.  What was given up stays so until the model is loaded anew.
 */

#include "cache/kv-migrate.h"
#include "daemon/engine/engine-internal.h"
#include "quant/base/log.h"

#include <string.h>

static const struct {
    ModelStep step;
    const char *word;
} step_words[] = {
    {MODEL_STEP_ROWS, "smaller-batch"},
    {MODEL_STEP_STAGING, "smaller-staging"},
    {MODEL_STEP_HOME, "host-home"},
    {MODEL_STEP_WEIGHTS, "streamed-weights"},
};

void engine_ladder_text(unsigned steps, char *ret, size_t size)
{
    size_t length = 0;

    ret[0] = 0;
    for (size_t i = 0; i < N_ELEMENTS(step_words); i++)
        if (steps & (unsigned)step_words[i].step)
            length += (size_t)snprintf(ret + length, size - length, "%s%s", length ? " " : "", step_words[i].word);
}

static void note(Engine *engine, const ModelSlot *slot, ModelStep step)
{
    char words[32];

    engine_ladder_text((unsigned)step, words, sizeof(words));
    log_info("Model '%s': short of device memory: %s", slot->config.name, words);
    engine->status_dirty = true;
}

static bool fewer_rows(Engine *engine, ModelSlot *slot)
{
    if (slot->max_rows <= MODELS_MIN_ROWS || model_shrink_rows(slot->model, slot->max_rows / 2, NULL) != 0)
        return false;
    slot->max_rows = model_options(slot->model)->max_rows;
    slot->steps |= MODEL_STEP_ROWS;
    note(engine, slot, MODEL_STEP_ROWS);
    return true;
}

static int stream_an_eighth(Model *model, ErrorDetail *reterr)
{
    ModelPlan plan;

    model_weights_plan(model, &plan);
    return model_stream_more(model, (plan.weight_bytes + plan.weight_staging_bytes) / 8, reterr);
}

static bool stream_weights(Engine *engine, ModelSlot *slot)
{
    if (slot->config.weights.all_layers || stream_an_eighth(slot->model, NULL) != 0)
        return false;
    slot->steps |= MODEL_STEP_WEIGHTS;
    note(engine, slot, MODEL_STEP_WEIGHTS);
    return true;
}

/* The policy one step down; 0: as low as it can be.  Compatibility mode has no ring and is at home on the host from the start. */
static ModelStep lower_policy(KvPolicy *policy)
{
    if (policy->is_compatible)
        return 0;
    if (policy->home == KV_HOME_HOST && (policy->n_slots > 1 || policy->tile_blocks != 1)) {
        policy->n_slots = policy->tile_blocks = 1;
        return MODEL_STEP_STAGING;
    }
    if (policy->home == KV_HOME_DEVICE) {
        policy->home = KV_HOME_HOST;
        return MODEL_STEP_HOME;
    }
    return 0;
}

bool ladder_for_store(Engine *engine, ModelSlot *slot, StoreSlot *store, KvPolicy *policy)
{
    ModelStep step;

    if (fewer_rows(engine, slot))
        return true;
    step = lower_policy(policy);
    if (step) {
        store->steps |= (unsigned)step;
        note(engine, slot, step);
        return true;
    }
    return stream_weights(engine, slot);
}

/* A store beside those that there are; weights lend their room when nothing else is left. */
static int new_store_on_loan(ModelSlot *slot, const KvPolicy *policy, KvStore **ret, ErrorDetail *reterr)
{
    int r;

    do
        r = model_store_new(slot->model, policy, ret, reterr);
    while (r == MODEL_E_DEVICE_MEMORY && stream_an_eighth(slot->model, NULL) == 0);
    return r;
}

/* Gives weights the room back that they have lent. */
static void end_loan(ModelSlot *slot, uint64_t budget_bytes)
{
    if (model_options(slot->model)->weights.budget_bytes == budget_bytes || model_place_weights(slot->model, budget_bytes, NULL) == 0)
        return;
    slot->steps |= MODEL_STEP_WEIGHTS;
    (void)stream_an_eighth(slot->model, NULL);
}

/* The store under another policy, with all caches that it has: built beside it, so there has to be room for both for a moment. */
static bool move_to(ModelSlot *slot, StoreSlot *store, const KvPolicy *policy)
{
    uint64_t budget_bytes = model_options(slot->model)->weights.budget_bytes;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvStore *target = NULL;
    int r;

    r = new_store_on_loan(slot, policy, &target, &detail);
    if (!r)
        r = kv_store_migrate(store->store, target, false, &detail);
    if (r) {
        log_debug("Caches of '%s' cannot move: %s", slot->config.name, detail.text);
        kv_store_free(target);
        end_loan(slot, budget_bytes);
        return false;
    }
    kv_store_free(store->store);
    store->store = target;
    end_loan(slot, budget_bytes);
    return true;
}

/* The smallest ring there is. */
static KvPolicy tight_policy(const KvPolicy *policy)
{
    KvPolicy tight = *policy;

    tight.n_slots = tight.tile_blocks = 1;
    return tight;
}

/* Where the ring that it should have does not fit beside the old store it comes in a second step, when that has gone. */
static bool move_store(Engine *engine, ModelSlot *slot, StoreSlot *store, const KvPolicy *policy)
{
    KvPolicy tight = tight_policy(policy);

    if (move_to(slot, store, policy))
        return true;
    if (!move_to(slot, store, &tight))
        return false;
    if (!move_to(slot, store, policy)) {
        store->steps |= MODEL_STEP_STAGING;
        note(engine, slot, MODEL_STEP_STAGING);
    }
    return true;
}

/* The store anew.  Its caches go: what they held is run again, with the same result. */
static void remake_store(Engine *engine, ModelSlot *slot, StoreSlot *store, const KvPolicy *policy)
{
    int r;

    sessions_drop_caches(engine, slot, store);
    engine->ladder_serial++;
    store->store = kv_store_free(store->store);
    r = model_store_new(slot->model, policy, &store->store, NULL);
    if (r == 0)
        return;
    for (StoreSlot **s = &slot->stores; *s; s = &(*s)->next)
        if (*s == store) {
            *s = store->next;
            break;
        }
    free(store); /* the next pass makes one, or fails for good */
}

/* A smaller ring is not worth running everything again; a home in host memory is. */
static bool lower_store(Engine *engine, ModelSlot *slot, StoreSlot *store)
{
    KvPolicy policy = *kv_store_policy(store->store);
    ModelStep step;

    policy.tile_blocks = store->policy.tile_blocks; /* kv_store_policy() has filled it in */
    if (policy.home == KV_HOME_HOST && (policy.transfer != KV_TRANSFER_COPY || (store->steps & MODEL_STEP_STAGING)))
        return false; /* there is no ring, or it is as small as can be */
    step = lower_policy(&policy);
    if (!step || (!move_store(engine, slot, store, &policy) && step != MODEL_STEP_HOME))
        return false;
    store->steps |= (unsigned)step;
    note(engine, slot, step);
    if (kv_store_policy(store->store)->home != policy.home)
        remake_store(engine, slot, store, &policy);
    return true;
}

/* Whether a smaller batch would no longer leave the room that the cache's new home needs while the old one stands. */
static bool is_last_chance_to_move(Engine *engine, const ModelSlot *slot, const StoreSlot *store)
{
    ModelOptions options = *model_options(slot->model);
    KvPolicy policy = tight_policy(&store->policy);
    ModelPlan half, least;

    if (kv_store_policy(store->store)->home != KV_HOME_DEVICE || store->policy.is_compatible)
        return false;
    policy.home = KV_HOME_HOST;
    options.max_rows = MAX(slot->max_rows / 2, (uint32_t)MODELS_MIN_ROWS);
    if (model_plan(gpu_info(engine->gpu), slot_file(slot), &options, &policy, &half, NULL) != 0)
        return false;
    options.max_rows = MODELS_MIN_ROWS;
    if (model_plan(gpu_info(engine->gpu), slot_file(slot), &options, &policy, &least, NULL) != 0)
        return false;
    return half.activation_bytes - least.activation_bytes < least.kv.staging_bytes + least.kv.tail_bytes + least.kv.operand_bytes;
}

/* A smaller batch; when that is the last which makes room for a move of the cache, the smallest one and the move. */
static bool shrink_batch(Engine *engine, ModelSlot *slot, StoreSlot *store)
{
    bool move = is_last_chance_to_move(engine, slot, store);

    if (!fewer_rows(engine, slot))
        return false;
    while (move && fewer_rows(engine, slot))
        continue;
    if (move)
        (void)lower_store(engine, slot, store);
    return true;
}

bool ladder_for_pass(Engine *engine, ModelSlot *slot, StoreSlot *store)
{
    bool done;

    mailbox_allow(engine->mailbox, now_usec() + ENGINE_LOAD_ALLOWANCE_USEC);
    done = shrink_batch(engine, slot, store) || lower_store(engine, slot, store) || stream_weights(engine, slot);
    mailbox_allow(engine->mailbox, 0);
    return done;
}
