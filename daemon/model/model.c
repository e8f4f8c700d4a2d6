/* SPDX-License-Identifier: Apache-2.0 */
/* A model on the device: plan, upload, life and death.  The forward pass is in llama.c. */

#include "daemon/model/model-private.h"
#include "daemon/model/nbits.h"

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

/* ---- life --------------------------------------------------------------------------------------------------------------------- */

/* All numbers at once, before the first byte is uploaded. */
static int check_fits(const Model *model, ErrorDetail *reterr)
{
    uint64_t by_purpose[GPU_PURPOSE_X_MAX], used, activations = 0, weights;
    uint64_t budget = gpu_info(model->gpu)->budget_bytes, available;
    Placement placement = PLACEMENT_NULL;
    int r;

    r = model_activation_bytes(gpu_info(model->gpu), model->file, &model->options, &activations);
    if (!r)
        r = model_placement(gpu_info(model->gpu), model->file, &model->options, &placement, reterr);
    if (r)
        return r;
    weights = placement.device_bytes + placement.staging_bytes;
    placement_clear(&placement);
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

    model->host_input = calloc(3, (size_t)model->options.max_rows * sizeof(*model->host_input));
    if (!model->host_input)
        return error_origin(-ENOMEM);
    for (size_t i = 0; i < N_ELEMENTS(buffers); i++) {
        int r = gpu_buffer_new(model->gpu, GPU_PURPOSE_ACTIVATIONS, buffers[i].bytes, buffers[i].buffer, reterr);

        if (r)
            return model_fold_gpu(r);
    }
    return 0;
}

static int upload_weights(Model *model, ErrorDetail *reterr)
{
    Placement placement = PLACEMENT_NULL;
    int r;

    r = model_placement(gpu_info(model->gpu), model->file, &model->options, &placement, reterr);
    if (r)
        return r;
    return model_fold_gpu(weights_device_init(&model->weights, model->gpu, &model->file->weights, &placement, reterr));
}

static int prepare_types(Model *model, ErrorDetail *reterr)
{
    const Weights *weights = &model->file->weights;
    int r;

    r = ops_prepare_type(model->ops, weights->embedding.tensor->type, reterr);
    if (!r)
        r = ops_prepare_type(model->ops, weights->output.tensor->type, reterr);
    for (uint32_t l = 0; l < weights->n_layers; l++)
        for (WeightsTensor i = 0; i < WEIGHTS_TENSOR_X_MAX && !r; i++)
            if (!weights->layers[l].tensors[i].norm)
                r = ops_prepare_type(model->ops, weights->layers[l].tensors[i].tensor->type, reterr);
    return model_fold_gpu(r);
}

/* Products and buffers for so many rows. */
static int build_rows(Model *model, ErrorDetail *reterr)
{
    OpsOptions ops_options = model_ops_options(model->file, &model->options);
    int r;

    r = model_fold_gpu(ops_new(model->gpu, &ops_options, &model->ops, reterr));
    if (!r)
        r = prepare_types(model, reterr);
    return r ? r : new_activations(model, reterr);
}

static void free_rows(Model *model)
{
    model->x = gpu_buffer_free(model->x);
    model->qkv = gpu_buffer_free(model->qkv);
    model->attended = gpu_buffer_free(model->attended);
    model->hidden = gpu_buffer_free(model->hidden);
    model->logits = gpu_buffer_free(model->logits);
    model->input = gpu_buffer_free(model->input);
    model->ops = ops_free(model->ops);
    gpu_free_host(model->gpu, model->host_input);
    model->host_input = NULL;
}

static int build(Model *model, ErrorDetail *reterr)
{
    int r;

    r = check_fits(model, reterr);
    if (!r)
        r = build_rows(model, reterr);
    return r ? r : upload_weights(model, reterr);
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
    weights_device_deinit(&model->weights);
    free_rows(model);
    free(model->calibration);
    free(model->means);
    /* Uploads read from it. */
    if (!gpu_is_hung(model->gpu))
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
    const Placement *placement = &model->weights.placement;
    uint64_t activations = 0;

    (void)model_activation_bytes(gpu_info(model->gpu), model->file, &model->options, &activations);
    return placement->device_bytes + placement->staging_bytes + activations;
}

int model_shrink_rows(Model *model, uint32_t max_rows, ErrorDetail *reterr)
{
    int r;

    if (max_rows == 0 || max_rows >= model->options.max_rows)
        return error_detail_set(reterr, -EINVAL, "%u rows are not fewer than %u", max_rows, model->options.max_rows);
    r = model_fold_gpu(gpu_drain(model->gpu, reterr));
    if (r)
        return r;
    /* A device may refuse even what was given back just now. */
    do {
        free_rows(model);
        model->options.max_rows = max_rows;
        r = build_rows(model, reterr);
        max_rows /= 2;
    } while (r == MODEL_E_DEVICE_MEMORY && max_rows > 0);
    model->weights.broken |= r != 0;
    return r;
}

static int move_weights(Model *model, const ModelOptions *options, Placement *placement, ErrorDetail *reterr)
{
    int r = model_fold_gpu(weights_device_move(&model->weights, placement, reterr));

    if (!r)
        model->options = *options;
    return r;
}

int model_stream_more(Model *model, uint64_t bytes, ErrorDetail *reterr)
{
    const Placement *now = &model->weights.placement;
    uint64_t taken = now->device_bytes + now->staging_bytes;
    ModelOptions options = model->options;
    int r;

    if (bytes == 0 || bytes >= taken)
        return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY, "the weights take %llu bytes of the device and cannot give %llu back",
                                (unsigned long long)taken, (unsigned long long)bytes);
    options.weights.budget_bytes = taken - bytes;
    /* A device may refuse even what was given back just now: then with less, as long as there is less. */
    do {
        Placement placement = PLACEMENT_NULL;

        r = model_placement(gpu_info(model->gpu), model->file, &options, &placement, reterr);
        if (r)
            return r;
        r = move_weights(model, &options, &placement, reterr);
        options.weights.budget_bytes -= options.weights.budget_bytes / 8;
    } while (r == MODEL_E_DEVICE_MEMORY && model->weights.broken);
    return r;
}

int model_place_weights(Model *model, uint64_t budget_bytes, ErrorDetail *reterr)
{
    const Placement *now = &model->weights.placement;
    uint64_t by_purpose[GPU_PURPOSE_X_MAX], used, budget = gpu_info(model->gpu)->budget_bytes, wanted;
    ModelOptions options = model->options;
    Placement placement = PLACEMENT_NULL;
    int r;

    options.weights.budget_bytes = budget_bytes;
    r = model_placement(gpu_info(model->gpu), model->file, &options, &placement, reterr);
    if (r)
        return r;
    gpu_memory_used(model->gpu, by_purpose, &used);
    wanted = used - now->device_bytes - now->staging_bytes + placement.device_bytes + placement.staging_bytes;
    if (wanted > budget) {
        placement_clear(&placement);
        return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY, "%llu bytes of the device would be in use, its budget is %llu",
                                (unsigned long long)wanted, (unsigned long long)budget);
    }
    return move_weights(model, &options, &placement, reterr);
}

void model_weights_plan(const Model *model, ModelPlan *ret)
{
    *ret = (ModelPlan){.fits = true};
    model_plan_placement(&model->file->weights, &model->weights.placement, ret);
}

int model_prepare_form(Model *model, const KvForm *form, ErrorDetail *reterr)
{
    return kv_form_is_calibrated(form) && !model->calibration ? model_calibrate(model, reterr) : 0;
}

/* Automatic bits become those that were measured for the model, or are now; without a tokenizer there is nothing to measure them with. */
static int choose_bits(Model *model, KvPolicy *policy, ErrorDetail *reterr)
{
    _cleanup_(nbits_freep) Nbits *nbits = NULL;
    bool done = false;
    int r;

    if (!kv_form_is_auto(policy->form))
        return 0;
    if (!model->file->tokenizer) {
        *policy = model_nbits_resolve(model->file, model->options.exact, policy, &done);
        return 0;
    }
    r = nbits_new(model, policy, &nbits, reterr);
    while (!r && !done)
        r = nbits_step(nbits, &done, reterr);
    if (!r)
        *policy = model_nbits_resolve(model->file, model->options.exact, policy, &done);
    return r;
}

int model_store_new(Model *model, const KvPolicy *policy, KvStore **ret, ErrorDetail *reterr)
{
    KvPolicy complete = model_complete_policy(policy, &model->options);
    KvModel kv_model;
    int r;

    r = model_prepare_form(model, &policy->form, reterr);
    if (!r)
        r = choose_bits(model, &complete, reterr);
    if (r)
        return error_trace(r);
    kv_model = model_kv(model->file, &model->options, model->calibration);
    kv_model.host_memory = model->options.host_memory;
    return model_fold_kv(kv_store_new(model->gpu, &kv_model, &complete, ret, reterr));
}
