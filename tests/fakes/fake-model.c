/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in for daemon/model/: files whose path says what they are, what fits, and steps that make room. */

#include "daemon/model/speed.h"
#include "tests/fakes/fake-internal.h"

/* The path says what happens: missing, corrupt, unsupported, or the device bytes as a number at its end. */
int model_file_open(const char *path, const char *state_dir, ModelFile **ret, ErrorDetail *reterr)
{
    ModelFile *file;

    (void)state_dir;
    talk_sleep(FAKE_GET(open_usec));
    if (strstr(path, "missing"))
        return error_detail_set(reterr, MODEL_E_NOT_FOUND, "'%s' does not exist", path);
    if (strstr(path, "corrupt"))
        return error_detail_set(reterr, MODEL_E_CORRUPT, "'%s' is cut", path);
    if (strstr(path, "unsupported"))
        return error_detail_set(reterr, MODEL_E_UNSUPPORTED, "architecture 'x' is not known");
    file = calloc(1, sizeof(*file));
    assert_non_null(file);
    file->params.n_vocab = FAKE_VOCAB;
    file->params.context_length = FAKE_CONTEXT;
    file->bytes = strpbrk(path, "0123456789") ? strtoull(strpbrk(path, "0123456789"), NULL, 10) : 100;
    file->other = strstr(path, "other") != NULL;
    file->no_template = strstr(path, "plain") != NULL;
    FAKE_SET(n_files, fake.n_files + 1);
    *ret = file;
    return 0;
}

ModelFile *model_file_free(ModelFile *file)
{
    if (file)
        FAKE_SET(n_files, fake.n_files - 1);
    free(file);
    return NULL;
}

const ModelParams *model_file_params(const ModelFile *file)
{
    return &file->params;
}

const Tokenizer *model_file_tokenizer(const ModelFile *file)
{
    return (const Tokenizer *)(const void *)file;
}

const char *model_file_chat_template(const ModelFile *file)
{
    return file->no_template ? NULL : "template";
}

const char *model_file_digest(const ModelFile *file)
{
    return file->other ? "d1ce000000000000000000000000000000000000000000000000000000000001"
                       : "d1ce000000000000000000000000000000000000000000000000000000000000";
}

uint64_t model_file_bytes(const ModelFile *file)
{
    return file->bytes;
}

static uint64_t fake_weight_bytes(const ModelFile *file, const ModelOptions *options)
{
    return options->weights.budget_bytes ? options->weights.budget_bytes : file->bytes;
}

static uint64_t fake_model_bytes(const ModelFile *file, const ModelOptions *options)
{
    return fake_weight_bytes(file, options) + options->max_rows / 32;
}

int model_plan(const GpuInfo *info, const ModelFile *file, const ModelOptions *options,
               const KvPolicy *policy, ModelPlan *ret, ErrorDetail *reterr)
{
    (void)policy, (void)reterr;
    *ret = (ModelPlan){.weight_bytes = fake_weight_bytes(file, options),
                       .activation_bytes = options->max_rows / 32,
                       .device_total_bytes = fake_model_bytes(file, options),
                       .device_budget_bytes = info->budget_bytes};
    ret->fits = ret->device_total_bytes <= ret->device_budget_bytes;
    return 0;
}

int model_fit(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, const KvPolicy *policy,
              uint64_t available_bytes, ModelFit *ret, ErrorDetail *reterr)
{
    ModelFit fit = {.options = *options, .policy = *policy};

    for (; fit.options.max_rows >= 32; fit.options.max_rows /= 2) {
        (void)model_plan(info, file, &fit.options, policy, &fit.plan, NULL);
        fit.steps = fit.options.max_rows < options->max_rows ? MODEL_STEP_ROWS : 0;
        if (fit.plan.device_total_bytes <= available_bytes) {
            *ret = fit;
            return 0;
        }
    }
    fit.options.max_rows = 32;
    fit.options.weights.budget_bytes = file->bytes / 2;
    (void)model_plan(info, file, &fit.options, policy, &fit.plan, NULL);
    fit.steps = MODEL_STEP_ROWS | MODEL_STEP_WEIGHTS;
    if (!FAKE_GET(can_stream) || fit.plan.device_total_bytes > available_bytes)
        return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY, "model needs %llu, %llu are free",
                                (unsigned long long)file->bytes, (unsigned long long)available_bytes);
    *ret = fit;
    return 0;
}

int model_new(Gpu *gpu, ModelFile *file, const ModelOptions *options, Model **ret, ErrorDetail *reterr)
{
    uint64_t bytes = fake_model_bytes(file, options);
    Model *model;

    assert_false(file->used);
    file->used = true;
    if (gpu->used + bytes > gpu->info.budget_bytes)
        return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY, "needs %llu", (unsigned long long)bytes);
    model = calloc(1, sizeof(*model));
    assert_non_null(model);
    *model = (Model){gpu, file, *options};
    gpu->used += bytes;
    FAKE_SET(n_models, fake.n_models + 1);
    *ret = model;
    return 0;
}

int model_prepare_form(Model *model, const KvForm *form, ErrorDetail *reterr)
{
    (void)model, (void)form, (void)reterr;
    return 0;
}

Model *model_free(Model *model)
{
    if (!model)
        return NULL;
    model->gpu->used -= fake_model_bytes(model->file, &model->options);
    FAKE_SET(n_models, fake.n_models - 1);
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
    return fake_weight_bytes(model->file, &model->options);
}

void model_weights_plan(const Model *model, ModelPlan *ret)
{
    *ret = (ModelPlan){.weight_bytes = fake_weight_bytes(model->file, &model->options)};
}

int model_shrink_rows(Model *model, uint32_t max_rows, ErrorDetail *reterr)
{
    (void)reterr;
    if (!FAKE_GET(device_tokens) || max_rows >= model->options.max_rows)
        return MODEL_E_DEVICE_MEMORY;
    model->gpu->used -= model->options.max_rows / 32;
    model->options.max_rows = max_rows;
    model->gpu->used += model->options.max_rows / 32;
    FAKE_SET(device_tokens, fake.device_tokens + 10);
    return 0;
}

int model_stream_more(Model *model, uint64_t bytes, ErrorDetail *reterr)
{
    (void)model, (void)bytes, (void)reterr;
    if (!FAKE_GET(n_streams))
        return MODEL_E_DEVICE_MEMORY;
    FAKE_SET(n_streams, fake.n_streams - 1);
    FAKE_SET(device_tokens, fake.device_tokens + 100);
    return 0;
}

int model_store_new(Model *model, const KvPolicy *policy, KvStore **ret, ErrorDetail *reterr)
{
    KvStore *store = calloc(1, sizeof(*store));

    (void)reterr;
    assert_non_null(store);
    *store = (KvStore){.model = model, .policy = *policy};
    if (kv_form_is_auto(policy->form))
        store->policy.form = kv_form_leat(3, 2);
    FAKE_SET(n_stores, fake.n_stores + 1);
    *ret = store;
    return 0;
}

int model_place_weights(Model *model, uint64_t budget_bytes, ErrorDetail *reterr)
{
    (void)model, (void)budget_bytes, (void)reterr;
    return 0;
}

int model_speed(Gpu *gpu, const ModelFile *file, const ModelFit *fit, bool may_measure, ModelSpeed *ret,
                ErrorDetail *reterr)
{
    (void)gpu, (void)file, (void)fit, (void)reterr;
    *ret = (ModelSpeed){.layer_sec = 0.001};
    return may_measure ? 0 : -ENOENT;
}

void model_predict(const ModelSpeed *speed, const ModelFit *fit, uint32_t depth, ModelPrediction *ret)
{
    (void)fit;
    *ret = (ModelPrediction){.token_sec = speed->layer_sec * (1 + depth), .prefill_rate = 5};
}

KvRates model_speed_rates(const ModelSpeed *speed, const ModelFit *fit)
{
    (void)speed, (void)fit;
    return (KvRates){0, 0, 0};
}
