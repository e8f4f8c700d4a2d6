/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calibration of the `leat` cache form: the mean key before RoPE and the mean value of every layer, over a built-in text.
 *
 * The first KV_SINK_TOKENS tokens are left out: they stay in full precision, and the outliers that they are would spoil the mean.
 * Means are taken once per model, from an unquantised run, and stored under its digest.
 */

#include "daemon/model/model-private.h"
#include "daemon/model/state-file.h"
#include "quant/base/log.h"

#include <math.h>
#include <string.h>

#define CALIBRATION_TOKENS 512
/* Rows of a pass: bounds the host memory that the copies of all layers' qkv take. */
#define CALIBRATION_ROWS   64

/* The version counts changes of text or recipe. */
static const StateKind CALIBRATION_KIND = {"calibration", {'L', 'E', 'A', 'T', 'K', 'V', 'C', 'L'}, 1};

typedef struct Measurement {
    Model *model;
    double *sums;     /* (n_layers, 2, n_kv_heads, head_dim) */
    float *qkv;       /* one pass */
    uint32_t n_means; /* n_kv_heads * head_dim */
    uint32_t n_counted;
} Measurement;

static size_t means_count(const Model *model)
{
    const ModelParams *params = &model->file->hparams.model;

    return (size_t)params->n_layers * 2 * params->attention.n_kv_heads * params->attention.head_dim;
}

/* Points the per-layer table into @means (taken). */
static int adopt(Model *model, float *means)
{
    uint32_t n_layers = model->file->hparams.model.n_layers;
    size_t n = means_count(model) / n_layers / 2;
    KvCalibration *calibration = calloc(n_layers, sizeof(*calibration));

    if (!calibration) {
        free(means);
        return error_origin(-ENOMEM);
    }
    for (uint32_t l = 0; l < n_layers; l++)
        calibration[l] = (KvCalibration){means + 2 * l * n, means + (2 * l + 1) * n};
    model->means = means;
    model->calibration = calibration;
    return 0;
}

/* ---- measuring --------------------------------------------------------------------------------------------------------------- */

static void add_rows(Measurement *measurement, uint32_t first, uint32_t n_rows)
{
    const ModelParams *params = &measurement->model->file->hparams.model;
    const KvShape *shape = &params->attention;
    size_t n_q = (size_t)shape->n_heads * shape->head_dim, n_kv = 2 * (size_t)measurement->n_means, width = n_q + n_kv;

    for (uint32_t l = 0; l < params->n_layers; l++)
        for (uint32_t row = first < KV_SINK_TOKENS ? KV_SINK_TOKENS - first : 0; row < n_rows; row++) {
            const float *kv = measurement->qkv + ((size_t)l * n_rows + row) * width + n_q;
            double *sums = measurement->sums + l * n_kv;

            for (size_t i = 0; i < n_kv; i++)
                sums[i] += (double)kv[i];
        }
    for (uint32_t row = 0; row < n_rows; row++)
        measurement->n_counted += first + row >= KV_SINK_TOKENS;
}

static int run_text(Measurement *measurement, KvStore *store, const int32_t *ids, uint32_t n_ids, ErrorDetail *reterr)
{
    uint32_t rows = MIN((uint32_t)CALIBRATION_ROWS, measurement->model->options.max_rows);
    _cleanup_(kv_cache_freep) KvCache *cache = NULL;
    ModelTap tap = {measurement->qkv};
    int r;

    r = model_fold_kv(kv_cache_new(store, &cache, reterr));
    for (uint32_t done = 0; done < n_ids && !r;) {
        uint32_t n = MIN(rows, n_ids - done);
        ModelItem item = {.cache = cache, .tokens = ids + done, .n_tokens = n};

        r = model_run(measurement->model, store, &item, 1, NULL, &tap, reterr);
        if (!r)
            add_rows(measurement, done, n);
        done += n;
    }
    return r;
}

/* An unquantised store of its own: its home is the host, so that it fits beside whatever else the device holds. */
static int run_in_store(Measurement *measurement, const TokenList *list, ErrorDetail *reterr)
{
    Model *model = measurement->model;
    uint32_t limit = MIN((uint32_t)CALIBRATION_TOKENS, model->options.context), n_ids = (uint32_t)MIN(list->n, (size_t)limit);
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED, model->options.exact);
    ModelOptions options = model->options;
    _cleanup_(kv_store_freep) KvStore *store = NULL;
    KvModel kv_model;
    int r;

    policy.max_cache_tokens = CALIBRATION_TOKENS;
    options.max_rows = MIN((uint32_t)CALIBRATION_ROWS, options.max_rows);
    options.max_sequences = 1;
    kv_model = model_kv(model->file, &options, NULL);
    r = model_fold_kv(kv_store_new(model->gpu, &kv_model, &policy, &store, reterr));
    if (r) {
        error_detail_prefix(reterr, "calibration");
        return r;
    }
    return run_text(measurement, store, list->ids, n_ids, reterr);
}

static int measure(Model *model, float *means, ErrorDetail *reterr)
{
    const ModelParams *params = &model->file->hparams.model;
    size_t n = means_count(model), n_means = (size_t)params->attention.n_kv_heads * params->attention.head_dim;
    size_t width = (size_t)params->attention.n_heads * params->attention.head_dim + 2 * n_means;
    _cleanup_(token_list_clearp) TokenList list = TOKEN_LIST_NULL;
    _cleanup_(freep) double *sums = calloc(n, sizeof(*sums));
    _cleanup_(freep) float *qkv = calloc(params->n_layers * (size_t)CALIBRATION_ROWS, width * sizeof(*qkv));
    Measurement measurement = {.model = model, .sums = sums, .qkv = qkv, .n_means = (uint32_t)n_means};
    int32_t bos = tokenizer_bos(model->file->tokenizer);
    int r = 0;

    if (!sums || !qkv)
        return error_origin(-ENOMEM);
    if (tokenizer_add_bos(model->file->tokenizer) && bos >= 0)
        r = token_list_append(&list, &bos, 1);
    if (!r)
        r = tokenizer_encode(model->file->tokenizer, model_calibration_text, strlen(model_calibration_text), false, &list);
    if (!r)
        r = run_in_store(&measurement, &list, reterr);
    if (r)
        return error_trace(r);
    for (size_t i = 0; i < n; i++) {
        means[i] = measurement.n_counted ? (float)(sums[i] / measurement.n_counted) : 0.0f;
        if (!isfinite(means[i]))
            return error_detail_set(reterr, MODEL_E_CORRUPT, "the model computes no finite keys and values: its weights are damaged");
    }
    return 0;
}

int model_calibrate(Model *model, ErrorDetail *reterr)
{
    const char *state_dir = model->file->state_dir, *name = model->file->digest_hex;
    size_t bytes = means_count(model) * sizeof(float);
    _cleanup_(freep) float *means = malloc(bytes);
    char file_name[96];
    int r;

    if (!means)
        return error_origin(-ENOMEM);
    (void)snprintf(file_name, sizeof(file_name), "%s.kvcal", name);
    if (state_dir && state_file_read(state_dir, &CALIBRATION_KIND, file_name, means, bytes) == 0)
        return adopt(model, TAKE_PTR(means));
    r = measure(model, means, reterr);
    if (r)
        return error_trace(r);
    if (state_dir) {
        r = state_file_write(state_dir, &CALIBRATION_KIND, file_name, means, bytes);
        if (r)
            log_warning("cannot store the model's calibration in '%s': %s, ignoring", state_dir, strerror(-r));
    }
    return adopt(model, TAKE_PTR(means));
}
