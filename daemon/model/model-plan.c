/* SPDX-License-Identifier: Apache-2.0 */
/* What a model takes of the device, before anything is allocated; and how it is made to fit. */

#include "daemon/model/model-private.h"
#include "daemon/model/nbits.h"

#include <math.h>

/* ---- options and sizes -------------------------------------------------------------------------------------------------------- */

ModelOptions model_complete_options(const ModelFile *file, const ModelOptions *options)
{
    ModelOptions complete = *options;
    uint32_t context = file->hparams.model.context_length;

    complete.context = options->context ? MIN(options->context, context) : context;
    complete.max_rows = options->max_rows ? MIN(options->max_rows, complete.context) : 1;
    complete.max_sequences = MAX(options->max_sequences, 1u);
    complete.weights.n_slots = options->weights.n_slots ? MIN(options->weights.n_slots, (uint32_t)PLACEMENT_MAX_SLOTS) : 2;
    return complete;
}

OpsOptions model_ops_options(const ModelFile *file, const ModelOptions *options)
{
    const ModelParams *params = &file->hparams.model;
    uint32_t widest = MAX(params->n_embd, params->n_ff);

    return (OpsOptions){
        .exact = options->exact,
        .max_rows = options->max_rows,
        .max_columns = MAX(widest, params->attention.n_heads * params->attention.v_head_dim),
    };
}

KvModel model_kv(const ModelFile *file, const ModelOptions *options, const KvCalibration *calibration)
{
    const ModelParams *params = &file->hparams.model;

    return (KvModel){
        .n_layers = params->n_layers,
        .shape = params->attention,
        .scale = (float)(1.0 / sqrt(params->attention.k_head_dim)),
        .inv_freq = file->hparams.inv_freq,
        .calibration = calibration,
        .exact = options->exact,
        .max_rows = options->max_rows,
        .max_sequences = options->max_sequences,
    };
}

ModelSizes model_sizes(const ModelFile *file, const ModelOptions *options)
{
    const ModelParams *params = &file->hparams.model;
    const KvShape *shape = &params->attention;
    uint64_t row = options->max_rows * sizeof(float);
    /* With a small batch, for want of memory, a sixteenth of its rows. */
    uint32_t share = MIN(options->max_rows / 16, (uint32_t)MODEL_LOGIT_ROWS), wanted = MAX(options->max_sequences, share);
    uint32_t n_logit_rows = MIN(options->max_rows, wanted);

    /* No product here can overflow: the dimensions are bounded in hparams.c, rows and context too. */
    return (ModelSizes){
        .x = row * params->n_embd,
        .qkv = row * kv_row_values(shape),
        .attended = row * shape->n_heads * shape->v_head_dim,
        .hidden = row * params->n_ff,
        .logits = (uint64_t)n_logit_rows * params->n_vocab * sizeof(float),
        .input = 2 * (uint64_t)options->max_rows * sizeof(int32_t),
        .n_logit_rows = n_logit_rows,
    };
}

/* A cache longer than the context would reserve memory that no sequence can use. */
KvPolicy model_complete_policy(const KvPolicy *policy, const ModelOptions *options)
{
    KvPolicy complete = *policy;

    complete.max_cache_tokens = policy->max_cache_tokens ? MIN(policy->max_cache_tokens, options->context) : options->context;
    return complete;
}

int model_activation_bytes(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, uint64_t *ret)
{
    ModelSizes sizes = model_sizes(file, options);
    OpsOptions ops_options = model_ops_options(file, options);
    uint64_t ops_bytes = 0;
    int r;

    r = ops_device_bytes(info, &ops_options, &ops_bytes);
    if (r)
        return error_fold(r);
    *ret = sizes.x + sizes.qkv + sizes.attended + sizes.hidden + sizes.logits + sizes.input + ops_bytes;
    return 0;
}

int model_placement(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, Placement *ret, ErrorDetail *reterr)
{
    const ModelWeights *weights = &options->weights;
    PlacementLimits limits = {
        .budget_bytes = weights->budget_bytes ? weights->budget_bytes : UINT64_MAX,
        .max_allocation_bytes = info->max_allocation_bytes,
        .max_layers = weights->limit_layers ? weights->max_layers : UINT32_MAX,
        .n_slots = weights->n_slots,
        .max_rows = options->max_rows,
        .in_place = weights->transfer == KV_TRANSFER_ZERO_COPY || (weights->transfer == KV_TRANSFER_AUTO && info->unified_memory),
    };

    if (weights->transfer == KV_TRANSFER_ZERO_COPY && !info->unified_memory)
        return error_detail_set(reterr, -ENOTSUP, "weights: transfer zero-copy needs a device that reads host memory in place; %s does not",
                                info->name);
    return placement_make(&file->weights, &limits, ret, reterr);
}

/* ---- one plan --------------------------------------------------------------------------------------------------------------- */

void model_plan_placement(const Weights *weights, const Placement *placement, ModelPlan *plan)
{
    plan->weight_total_bytes = weights_total_bytes(weights);
    plan->weight_bytes = placement->device_bytes;
    plan->weight_staging_bytes = placement->staging_bytes;
    plan->weight_in_place_bytes = placement->in_place_bytes;
    plan->weight_streamed_bytes = placement->streamed_bytes;
    plan->weight_streamed_head_bytes = placement->streamed_head_bytes;
    plan->weight_slots = placement->n_slots;
    plan->weight_slot_bytes = placement->slot_bytes;
    plan->n_layers = weights->n_layers;
    for (uint32_t l = 0; l < weights->n_layers; l++)
        plan->n_layers_resident += placement->kinds[WEIGHTS_BLOCK_SPANS + l + 1] == PLACEMENT_DEVICE;
}

/* Everything but the weights: what they get when they must share is the rest. */
static int plan_others(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, const KvPolicy *policy, ModelPlan *ret,
                       ErrorDetail *reterr)
{
    bool known;
    KvPolicy resolved = model_nbits_resolve(file, options->exact, policy, &known), kv_policy = model_complete_policy(&resolved, options);
    KvModel kv_model = model_kv(file, options, NULL);
    ModelPlan plan = {.device_budget_bytes = info->budget_bytes};
    int r;

    r = model_activation_bytes(info, file, options, &plan.activation_bytes);
    if (r)
        return r;
    r = kv_store_plan(info, &kv_model, &kv_policy, &plan.kv, reterr);
    if (r)
        return model_fold_kv(r);
    plan.device_total_bytes = plan.activation_bytes + plan.kv.staging_bytes + plan.kv.tail_bytes + plan.kv.operand_bytes +
                              plan.kv.device_page_bytes;
    *ret = plan;
    return 0;
}

static int plan_weights(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, ModelPlan *plan, ErrorDetail *reterr)
{
    Placement placement = PLACEMENT_NULL;
    int r = model_placement(info, file, options, &placement, reterr);

    if (r)
        return r;
    model_plan_placement(&file->weights, &placement, plan);
    placement_clear(&placement);
    plan->device_total_bytes += plan->weight_bytes + plan->weight_staging_bytes;
    plan->fits = plan->device_total_bytes <= plan->device_budget_bytes;
    return 0;
}

int model_plan(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, const KvPolicy *policy, ModelPlan *ret,
               ErrorDetail *reterr)
{
    ModelOptions complete = model_complete_options(file, options);
    ModelPlan plan;
    int r;

    r = plan_others(info, file, &complete, policy, &plan, reterr);
    if (!r)
        r = plan_weights(info, file, &complete, &plan, reterr);
    if (!r)
        *ret = plan;
    return r;
}

/* ---- making it fit ---------------------------------------------------------------------------------------------------------- */

typedef struct Fitting {
    const GpuInfo *info;
    const ModelFile *file;
    uint64_t available_bytes;
    ModelFit *fit; /* what is tried, then what fits */
    bool fits;
    ErrorDetail *reterr;
} Fitting;

/* Not enough memory is an answer here, anything else an error. */
static int unless_memory(int r)
{
    return r == MODEL_E_DEVICE_MEMORY ? 0 : r;
}

/* What has to be free besides weights: the store's own bytes, or those of the ones that calibration and automatic bits need before. */
static int bytes_besides_weights(const Fitting *fitting, const ModelPlan *plan, uint64_t *ret)
{
    const ModelFit *fit = fitting->fit;
    ModelOptions complete = model_complete_options(fitting->file, &fit->options);
    uint64_t others = plan->device_total_bytes - plan->weight_bytes - plan->weight_staging_bytes, calibration = 0, bits = 0, before;
    bool known;
    int r = 0;

    if (kv_form_is_calibrated(&fit->policy.form))
        r = model_calibration_plan(fitting->info, fitting->file, &complete, &calibration, fitting->reterr);
    (void)model_nbits_resolve(fitting->file, complete.exact, &fit->policy, &known);
    if (!r && !known)
        r = model_nbits_plan(fitting->info, fitting->file, &complete, &fit->policy, &bits, fitting->reterr);
    before = MAX(calibration, bits);
    *ret = MAX(others, plan->activation_bytes + before);
    return r;
}

/* All weights on the device. */
static int try_resident(Fitting *fitting)
{
    ModelFit *fit = fitting->fit;
    const ModelPlan *plan = &fit->plan;
    uint64_t besides = 0;
    int r;

    fit->options.weights.budget_bytes = 0;
    r = model_plan(fitting->info, fitting->file, &fit->options, &fit->policy, &fit->plan, fitting->reterr);
    if (!r)
        r = bytes_besides_weights(fitting, plan, &besides);
    fitting->fits = r == 0 && plan->weight_bytes + plan->weight_staging_bytes + besides <= fitting->available_bytes;
    return unless_memory(r);
}

/* Weights in what the others leave.  @share: the others may take a quarter of the device at most. */
static int try_streamed(Fitting *fitting, bool share)
{
    ModelFit *fit = fitting->fit;
    ModelOptions complete = model_complete_options(fitting->file, &fit->options);
    uint64_t besides = 0;
    ModelPlan plan;
    int r;

    r = plan_others(fitting->info, fitting->file, &complete, &fit->policy, &plan, fitting->reterr);
    if (!r)
        r = bytes_besides_weights(fitting, &plan, &besides);
    if (r)
        return unless_memory(r);
    if (besides >= (share ? fitting->available_bytes / 4 : fitting->available_bytes))
        return 0;
    fit->options.weights.budget_bytes = fitting->available_bytes - besides;
    r = model_plan(fitting->info, fitting->file, &fit->options, &fit->policy, &fit->plan, fitting->reterr);
    fitting->fits = r == 0;
    return unless_memory(r);
}

/* Fewer and fewer rows. */
static int fit_rows(Fitting *fitting, uint32_t most, bool streamed)
{
    ModelFit *fit = fitting->fit;
    int r = 0;

    for (uint32_t rows = most;; rows = MAX(rows / 2, (uint32_t)MODEL_MIN_ROWS)) {
        bool last = rows <= MODEL_MIN_ROWS;

        fit->options.max_rows = rows;
        r = streamed ? try_streamed(fitting, !last) : try_resident(fitting);
        if (r || fitting->fits || last)
            return r;
    }
}

/* The ring of the cache as small as it can be. */
static void shrink_staging(ModelFit *fit)
{
    fit->policy.n_slots = 1;
    fit->policy.tile_blocks = 1;
}

static int fit_all_rows(Fitting *fitting, uint32_t most, const KvPolicy *policy, bool streamed)
{
    ModelFit *fit = fitting->fit;
    int r;

    fit->policy = *policy;
    fit->steps &= ~(unsigned)MODEL_STEP_STAGING;
    r = fit_rows(fitting, most, streamed);
    if (r || fitting->fits || policy->is_compatible) /* which has no ring */
        return r;
    shrink_staging(fit);
    fit->steps |= MODEL_STEP_STAGING;
    return streamed ? try_streamed(fitting, false) : try_resident(fitting);
}

static int say_what_is_missing(const Fitting *fitting)
{
    const ModelFit *fit = fitting->fit;
    const ModelPlan *plan = &fit->plan;
    uint64_t weights = weights_total_bytes(&fitting->file->weights);

    return error_detail_set(fitting->reterr, MODEL_E_DEVICE_MEMORY,
                            "does not fit: %.1f MiB of the device are free; with the smallest batch, the cache at home in host memory and "
                            "weights (%.1f MiB) that stream it still needs about %.1f MiB: unload another model, lower `parallel` or "
                            "`context`, or raise `max-memory`",
                            (double)fitting->available_bytes / 0x1p20, (double)weights / 0x1p20,
                            (double)(plan->device_total_bytes + weights / 100) / 0x1p20);
}

int model_fit(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, const KvPolicy *policy, uint64_t available_bytes,
              ModelFit *ret, ErrorDetail *reterr)
{
    const ModelWeights *weights = &options->weights;
    bool all = !weights->limit_layers || weights->max_layers >= file->weights.n_layers;
    ModelFit fit = {.options = *options, .policy = *policy};
    Fitting fitting = {.info = info, .file = file, .available_bytes = available_bytes, .fit = &fit, .reterr = reterr};
    uint32_t most = model_complete_options(file, options).max_rows;
    KvPolicy home = *policy;
    int r = 0;

    if (all)
        r = fit_all_rows(&fitting, most, &home, false);
    if (!r && all && !fitting.fits && home.home == KV_HOME_DEVICE && !home.is_compatible) {
        home.home = KV_HOME_HOST;
        fit.steps |= MODEL_STEP_HOME;
        r = fit_all_rows(&fitting, most, &home, false);
    }
    if (!r && !fitting.fits && !weights->all_layers) {
        fit.steps |= MODEL_STEP_WEIGHTS;
        r = fit_all_rows(&fitting, most, &home, true);
    }
    if (!r && !fitting.fits)
        r = say_what_is_missing(&fitting);
    if (r)
        return r;
    if (fit.options.max_rows < most)
        fit.steps |= MODEL_STEP_ROWS;
    *ret = fit;
    return 0;
}
