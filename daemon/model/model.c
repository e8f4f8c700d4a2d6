/* SPDX-License-Identifier: Apache-2.0 */
/* A model on the device: plan, upload, life and death.  The forward pass is in llama.c. */

#include "daemon/model/model-private.h"
#include "quant/base/checked.h"

#include <math.h>
#include <string.h>

/* ---- codes ------------------------------------------------------------------------------------------------------------------ */

int model_fold_gpu(int r)
{
    if (r == GPU_E_OVER_BUDGET)
        return MODEL_E_DEVICE_MEMORY;
    if (r == GPU_E_HUNG || r == GPU_E_LOST || r == -ENODEV || r == -EIO)
        return MODEL_E_DEVICE;
    return error_fold(r);
}

int model_fold_kv(int r)
{
    switch (r) {
    case KV_E_DEVICE_MEMORY:
        return MODEL_E_DEVICE_MEMORY;
    case KV_E_HOST_MEMORY:
        return MODEL_E_HOST_MEMORY;
    case KV_E_CONTEXT:
        return MODEL_E_CONTEXT;
    case KV_E_DEVICE:
    case -ENODEV:
    case -EIO:
        return MODEL_E_DEVICE;
    default:
        return error_fold(r);
    }
}

/* ---- options and sizes -------------------------------------------------------------------------------------------------------- */

ModelOptions model_complete_options(const ModelFile *file, const ModelOptions *options)
{
    ModelOptions complete = *options;
    uint32_t context = file->hparams.model.context_length;

    complete.context = options->context ? MIN(options->context, context) : context;
    complete.max_rows = options->max_rows ? MIN(options->max_rows, complete.context) : 1;
    complete.max_sequences = MAX(options->max_sequences, 1u);
    complete.deadline_usec = options->deadline_usec ? options->deadline_usec : MODEL_DEADLINE_USEC;
    return complete;
}

OpsOptions model_ops_options(const ModelFile *file, const ModelOptions *options)
{
    const ModelParams *params = &file->hparams.model;
    uint32_t widest = MAX(params->n_embd, params->n_ff);

    return (OpsOptions){
        .exact = options->exact,
        .max_rows = options->max_rows,
        .max_columns = MAX(widest, params->attention.n_heads * params->attention.head_dim),
    };
}

/* The head multiplies float activations also in compute `fast`: rounding its input costs more accuracy than that of any other product
 * (a third of the divergence from the oracle), and reading its weights takes longer than the sums. */
static OpsOptions head_options(const ModelFile *file, const ModelOptions *options)
{
    return (OpsOptions){
        .exact = true,
        .max_rows = model_sizes(file, options).n_logit_rows,
        .max_columns = file->hparams.model.n_embd,
    };
}

KvModel model_kv(const ModelFile *file, const ModelOptions *options, const KvCalibration *calibration)
{
    const ModelParams *params = &file->hparams.model;

    return (KvModel){
        .n_layers = params->n_layers,
        .shape = params->attention,
        .scale = (float)(1.0 / sqrt(params->attention.head_dim)),
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
    uint32_t wanted = MAX(options->max_sequences, (uint32_t)MODEL_LOGIT_ROWS), n_logit_rows = MIN(options->max_rows, wanted);

    /* No product here can overflow: the dimensions are bounded in hparams.c, rows and context too. */
    return (ModelSizes){
        .x = row * params->n_embd,
        .qkv = row * (shape->n_heads + 2 * (uint64_t)shape->n_kv_heads) * shape->head_dim,
        .attended = row * shape->n_heads * shape->head_dim,
        .hidden = row * params->n_ff,
        .logits = (uint64_t)n_logit_rows * params->n_vocab * sizeof(float),
        .input = 2 * (uint64_t)options->max_rows * sizeof(int32_t),
        .n_logit_rows = n_logit_rows,
    };
}

/* A cache longer than the context would reserve memory that no sequence can use. */
static KvPolicy complete_policy(const KvPolicy *policy, const ModelOptions *options)
{
    KvPolicy complete = *policy;

    complete.max_cache_tokens = policy->max_cache_tokens ? MIN(policy->max_cache_tokens, options->context) : options->context;
    return complete;
}

static int activation_bytes(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, uint64_t *ret)
{
    ModelSizes sizes = model_sizes(file, options);
    OpsOptions ops_options = model_ops_options(file, options), head = head_options(file, options);
    uint64_t ops_bytes = 0, head_bytes = 0;
    int r;

    r = ops_device_bytes(info, &ops_options, &ops_bytes);
    if (!r && !options->exact)
        r = ops_device_bytes(info, &head, &head_bytes);
    if (r)
        return error_fold(r);
    *ret = sizes.x + sizes.qkv + sizes.attended + sizes.hidden + sizes.logits + sizes.input + ops_bytes + head_bytes;
    return 0;
}

int model_plan(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, const KvPolicy *policy, ModelPlan *ret,
               ErrorDetail *reterr)
{
    ModelOptions complete = model_complete_options(file, options);
    KvPolicy kv_policy = complete_policy(policy, &complete);
    KvModel kv_model = model_kv(file, &complete, NULL);
    ModelPlan plan = {.weight_bytes = weights_total_bytes(&file->weights), .device_budget_bytes = info->budget_bytes};
    int r;

    r = activation_bytes(info, file, &complete, &plan.activation_bytes);
    if (r)
        return r;
    r = kv_store_plan(info, &kv_model, &kv_policy, &plan.kv, reterr);
    if (r)
        return model_fold_kv(r);
    plan.device_total_bytes = plan.weight_bytes + plan.activation_bytes + plan.kv.staging_bytes + plan.kv.tail_bytes +
                              plan.kv.operand_bytes + plan.kv.device_page_bytes;
    plan.fits = plan.device_total_bytes <= plan.device_budget_bytes;
    *ret = plan;
    return 0;
}

/* ---- life --------------------------------------------------------------------------------------------------------------------- */

/* All numbers at once, before the first byte is uploaded. */
static int check_fits(const Model *model, uint64_t activations, ErrorDetail *reterr)
{
    uint64_t by_purpose[GPU_PURPOSE_X_MAX], used, weights = weights_total_bytes(&model->file->weights);
    uint64_t budget = gpu_info(model->gpu)->budget_bytes, available;

    gpu_memory_used(model->gpu, by_purpose, &used);
    available = used < budget ? budget - used : 0;
    if (weights + activations <= available)
        return 0;
    return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY,
                            "'%.60s' needs %llu bytes on the device (weights %llu, activations %llu); %llu of the budget of %llu are free: "
                            "raise max-memory, unload another model, or use a smaller one",
                            model->file->hparams.model.name, (unsigned long long)(weights + activations), (unsigned long long)weights,
                            (unsigned long long)activations, (unsigned long long)available, (unsigned long long)budget);
}

static int new_activations(Model *model, ErrorDetail *reterr)
{
    ModelSizes sizes = model_sizes(model->file, &model->options);
    const struct {
        uint64_t bytes;
        GpuBuffer **buffer;
    } buffers[] = {
        {sizes.x, &model->x},           {sizes.qkv, &model->qkv},       {sizes.attended, &model->attended},
        {sizes.hidden, &model->hidden}, {sizes.logits, &model->logits}, {sizes.input, &model->input},
    };

    model->host_input = calloc(2, (size_t)model->options.max_rows * sizeof(*model->host_input));
    if (!model->host_input)
        return error_origin(-ENOMEM);
    for (size_t i = 0; i < N_ELEMENTS(buffers); i++) {
        int r = gpu_buffer_new(model->gpu, GPU_PURPOSE_ACTIVATIONS, buffers[i].bytes, buffers[i].buffer, reterr);

        if (r)
            return model_fold_gpu(r);
    }
    return 0;
}

/* One block after another; the host's copy is given back as soon as the device has its own. */
static int upload_weights(Model *model, ErrorDetail *reterr)
{
    Weights *weights = &model->file->weights;

    model->blocks = calloc(weights->n_blocks, sizeof(*model->blocks));
    if (!model->blocks)
        return error_origin(-ENOMEM);
    model->n_blocks = weights->n_blocks;
    for (uint32_t i = 0; i < weights->n_blocks; i++) {
        int r;

        if (!weights->blocks[i])
            return error_detail_set(reterr, -EINVAL, "this model file was uploaded before: open it again");
        r = gpu_buffer_new(model->gpu, GPU_PURPOSE_WEIGHTS, weights->block_bytes[i], &model->blocks[i], reterr);
        if (!r)
            r = gpu_upload(model->gpu, GPU_QUEUE_UPLOAD, model->blocks[i], 0, weights->blocks[i], weights->block_bytes[i],
                           GPU_WAIT_NONE, "weights", NULL);
        if (!r)
            r = gpu_drain(model->gpu, model->options.deadline_usec, reterr);
        if (r)
            return model_fold_gpu(r);
        weights_release_block(weights, i);
    }
    return 0;
}

static int prepare_types(Model *model, ErrorDetail *reterr)
{
    const Weights *weights = &model->file->weights;
    int r;

    r = ops_prepare_type(model->ops, weights->embedding.tensor->type, reterr);
    if (!r)
        r = ops_prepare_type(model->head, weights->output.tensor->type, reterr);
    for (uint32_t l = 0; l < weights->n_layers; l++)
        for (WeightsPart i = 0; i < WEIGHTS_PART_X_MAX && !r; i++)
            if (!weights->layers[l].parts[i].norm)
                r = ops_prepare_type(model->ops, weights->layers[l].parts[i].tensor->type, reterr);
    return model_fold_gpu(r);
}

static int build(Model *model, ErrorDetail *reterr)
{
    OpsOptions ops_options = model_ops_options(model->file, &model->options), head = head_options(model->file, &model->options);
    uint64_t activations;
    int r;

    r = activation_bytes(gpu_info(model->gpu), model->file, &model->options, &activations);
    if (!r)
        r = check_fits(model, activations, reterr);
    if (r)
        return r;
    r = model_fold_gpu(ops_new(model->gpu, &ops_options, &model->ops, reterr));
    if (!r && model->options.exact)
        model->head = model->ops;
    else if (!r)
        r = model_fold_gpu(ops_new(model->gpu, &head, &model->head, reterr));
    if (!r)
        r = prepare_types(model, reterr);
    if (!r)
        r = new_activations(model, reterr);
    if (!r)
        r = upload_weights(model, reterr);
    return r;
}

int model_new(Gpu *gpu, ModelFile *file, const ModelOptions *options, Model **ret, ErrorDetail *reterr)
{
    _cleanup_(model_freep) Model *model = calloc(1, sizeof(*model));
    int r;

    if (!model)
        return error_origin(-ENOMEM);
    model->gpu = gpu;
    model->file = file;
    model->options = model_complete_options(file, options);
    r = build(model, reterr);
    if (r) {
        model->file = NULL; /* stays the caller's */
        return error_trace(r);
    }
    *ret = TAKE_PTR(model);
    return 0;
}

Model *model_free(Model *model)
{
    if (!model)
        return NULL;
    for (uint32_t i = 0; i < model->n_blocks; i++)
        gpu_buffer_free(model->blocks[i]);
    free(model->blocks);
    gpu_buffer_free(model->x);
    gpu_buffer_free(model->qkv);
    gpu_buffer_free(model->attended);
    gpu_buffer_free(model->hidden);
    gpu_buffer_free(model->logits);
    gpu_buffer_free(model->input);
    if (model->head != model->ops)
        ops_free(model->head);
    ops_free(model->ops);
    free(model->host_input);
    free(model->calibration);
    free(model->means);
    model_file_free(model->file);
    free(model);
    return NULL;
}

const ModelFile *model_file(const Model *model)
{
    return model->file;
}

const ModelOptions *model_options(const Model *model)
{
    return &model->options;
}

uint64_t model_device_bytes(const Model *model)
{
    uint64_t activations = 0;

    (void)activation_bytes(gpu_info(model->gpu), model->file, &model->options, &activations);
    return weights_total_bytes(&model->file->weights) + activations;
}

int model_store_new(Model *model, const KvPolicy *policy, KvStore **ret, ErrorDetail *reterr)
{
    KvPolicy complete = complete_policy(policy, &model->options);
    KvModel kv_model;
    int r;

    if (policy->form.kind == KV_FORM_LEAT && !model->calibration) {
        r = model_calibrate(model, reterr);
        if (r)
            return error_trace(r);
    }
    kv_model = model_kv(model->file, &model->options, model->calibration);
    return model_fold_kv(kv_store_new(model->gpu, &kv_model, &complete, ret, reterr));
}
