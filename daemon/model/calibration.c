/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calibration of coded cache forms, over a built-in text: of every layer the mean key before and after RoPE, a factor for each rotary
 * pair, the mean value, the largest key and value.
 *
 * The first FIRST_TOKENS tokens are left out of all but the largest: sinks stay in full precision, and the outliers that they are would
 * spoil the mean.  Measured once per model, in an unquantised run, and stored under its digest.
 */

#include "daemon/model/model-private.h"
#include "daemon/model/state-file.h"
#include "quant/base/log.h"

#include <math.h>
#include <string.h>

#define CALIBRATION_TOKENS 512
#define FIRST_TOKENS       4
/* Rows of a pass: bounds the host memory that the copies of all layers' qkv take. */
#define CALIBRATION_ROWS   64

static const StateKind CALIBRATION_KIND = {"calibration", {'L', 'E', 'A', 'T', 'K', 'V', 'C', 'L'}, MODEL_CALIBRATION_VERSION};

/* Sizes of one layer, in values: of all K heads, all V heads, all query heads; floats that a layer's results take. */
typedef struct Sides {
    size_t k, v, q, all;
} Sides;

/* Sums over tokens of one layer. */
typedef struct Sums {
    double *k, *k_square, *k_turned; /* (n_kv_heads, k_head_dim) */
    double *q_square;                /* the same, of the query heads that share the key head */
    double *v;
    float k_largest, v_largest; /* of a rotary pair's length: no rotation makes a key's channel larger */
} Sums;

typedef struct Measurement {
    Model *model;
    Sides sides;
    Sums *sums;      /* (n_layers) */
    double *memory;  /* what they point into */
    float *qkv;      /* one pass */
    uint32_t n_counted;
} Measurement;

static Sides sides_of(const Model *model)
{
    const KvShape *shape = &model->file->hparams.model.attention;
    Sides sides = {
        .k = (size_t)shape->n_kv_heads * shape->k_head_dim,
        .v = (size_t)shape->n_kv_heads * shape->v_head_dim,
        .q = (size_t)shape->n_heads * shape->k_head_dim,
    };

    sides.all = 3 * sides.k + sides.v + 2;
    return sides;
}

/* Points the per-layer table into @results (taken): K mean, turned mean, pair scale, V mean, largest K, largest V of each layer. */
static int adopt(Model *model, float *results)
{
    uint32_t n_layers = model->file->hparams.model.n_layers;
    KvCalibration *calibration = calloc(n_layers, sizeof(*calibration));
    Sides sides = sides_of(model);

    if (!calibration) {
        free(results);
        return error_origin(-ENOMEM);
    }
    for (uint32_t l = 0; l < n_layers; l++) {
        const float *layer = results + l * sides.all, *v = layer + 3 * sides.k;

        calibration[l] = (KvCalibration){.k_mean = layer, .k_turned_mean = layer + sides.k, .k_pair_scale = layer + 2 * sides.k,
                                         .v_mean = v, .k_largest = v[sides.v], .v_largest = v[sides.v + 1]};
    }
    model->means = results;
    model->calibration = calibration;
    return 0;
}

/* ---- measuring --------------------------------------------------------------------------------------------------------------- */

static void add_key_head(const KvShape *shape, const float *inv_freq, uint32_t position, const float *k, double *turned)
{
    uint32_t half = shape->rotary_dim / 2;

    for (uint32_t f = 0; f < half; f++) {
        double angle = (double)position * inv_freq[f], c = cos(angle), s = sin(angle);

        turned[f] += (double)k[f] * c - (double)k[f + half] * s;
        turned[f + half] += (double)k[f + half] * c + (double)k[f] * s;
    }
    for (uint32_t d = shape->rotary_dim; d < shape->k_head_dim; d++)
        turned[d] += (double)k[d];
}

/* The first tokens too: a form without sinks codes them like all others, and their keys are the largest. */
static void add_largest(const Measurement *measurement, Sums *sums, const float *qkv)
{
    const KvShape *shape = &measurement->model->file->hparams.model.attention;
    const float *k = qkv + measurement->sides.q, *v = k + measurement->sides.k;
    uint32_t half = shape->rotary_dim / 2;

    for (size_t i = 0; i < measurement->sides.k; i++) {
        uint32_t d = (uint32_t)(i % shape->k_head_dim);
        float length = d < half ? hypotf(k[i], k[i + half]) : fabsf(k[i]);

        sums->k_largest = fmaxf(sums->k_largest, length);
    }
    for (size_t i = 0; i < measurement->sides.v; i++)
        sums->v_largest = fmaxf(sums->v_largest, fabsf(v[i]));
}

/* One token of one layer: @qkv before RoPE. */
static void add_token(const Measurement *measurement, Sums *sums, uint32_t position, const float *qkv)
{
    const KvShape *shape = &measurement->model->file->hparams.model.attention;
    const float *k = qkv + measurement->sides.q, *v = k + measurement->sides.k;
    uint32_t dim = shape->k_head_dim, n_rep = shape->n_heads / shape->n_kv_heads;

    for (size_t i = 0; i < measurement->sides.q; i++)
        sums->q_square[i / dim / n_rep * dim + i % dim] += (double)qkv[i] * (double)qkv[i];
    for (size_t i = 0; i < measurement->sides.k; i++) {
        sums->k[i] += (double)k[i];
        sums->k_square[i] += (double)k[i] * (double)k[i];
    }
    for (uint32_t h = 0; h < shape->n_kv_heads; h++)
        add_key_head(shape, measurement->model->file->hparams.inv_freq, position, k + (size_t)h * dim, sums->k_turned + (size_t)h * dim);
    for (size_t i = 0; i < measurement->sides.v; i++)
        sums->v[i] += (double)v[i];
}

static void add_rows(Measurement *measurement, uint32_t first, uint32_t n_rows)
{
    const ModelParams *params = &measurement->model->file->hparams.model;
    size_t width = measurement->sides.q + measurement->sides.k + measurement->sides.v;

    for (uint32_t l = 0; l < params->n_layers; l++)
        for (uint32_t row = 0; row < n_rows; row++) {
            const float *qkv = measurement->qkv + ((size_t)l * n_rows + row) * width;

            add_largest(measurement, &measurement->sums[l], qkv);
            if (first + row >= FIRST_TOKENS)
                add_token(measurement, &measurement->sums[l], first + row, qkv);
        }
    for (uint32_t row = 0; row < n_rows; row++)
        measurement->n_counted += first + row >= FIRST_TOKENS;
}

/*
 * w of channels @a and @b (equal: one that does not turn): the fourth root of the key's variance over the query's power.  The error of a
 * rotated code spreads evenly over the channels of k / w, so a score's error is the sum of q^2 w^2 times the sum of the variances of k / w:
 * least at w^4 = variance / power.
 */
static float pair_scale(const Sums *sums, size_t a, size_t b, double n)
{
    double variance = 0, power = 0, w;

    for (int i = 0; i < 2; i++) {
        size_t d = i ? b : a;

        variance += sums->k_square[d] / n - sums->k[d] / n * (sums->k[d] / n);
        power += sums->q_square[d] / n;
    }
    w = variance > 0 && power > 0 ? sqrt(sqrt(variance / power)) : 0;
    return isfinite(w) ? (float)w : 0.0f;
}

/* Factors of one head, the largest brought to 1: a channel that never moves gets a small one, not none. */
static void head_scales(const KvShape *shape, const Sums *sums, size_t first, double n, float *ret)
{
    uint32_t half = shape->rotary_dim / 2;
    float largest = 0.0f;

    for (uint32_t d = 0; d < shape->k_head_dim; d++) {
        uint32_t a = d < 2 * half ? d % half : d, b = d < 2 * half ? a + half : d;

        ret[d] = pair_scale(sums, first + a, first + b, n);
        largest = fmaxf(largest, ret[d]);
    }
    for (uint32_t d = 0; d < shape->k_head_dim; d++)
        ret[d] = largest > 0.0f ? fmaxf(ret[d] / largest, 1e-3f) : 1.0f;
}

static int conclude(const Measurement *measurement, const Sums *sums, float *ret, ErrorDetail *reterr)
{
    const KvShape *shape = &measurement->model->file->hparams.model.attention;
    const Sides *sides = &measurement->sides;
    double n = measurement->n_counted ? measurement->n_counted : 1;
    float *v = ret + 3 * sides->k;

    for (size_t i = 0; i < sides->k; i++) {
        ret[i] = (float)(sums->k[i] / n);
        ret[sides->k + i] = (float)(sums->k_turned[i] / n);
    }
    for (uint32_t h = 0; h < shape->n_kv_heads; h++)
        head_scales(shape, sums, (size_t)h * shape->k_head_dim, n, ret + 2 * sides->k + (size_t)h * shape->k_head_dim);
    for (size_t i = 0; i < sides->v; i++)
        v[i] = (float)(sums->v[i] / n);
    v[sides->v] = sums->k_largest;
    v[sides->v + 1] = sums->v_largest;
    for (size_t i = 0; i < sides->all; i++)
        if (!isfinite(ret[i]))
            return error_detail_set(reterr, MODEL_E_CORRUPT, "the model computes no finite keys and values: its weights are damaged");
    return 0;
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

/* An unquantised store of its own: its home is the host, and its ring as small as can be, so that it fits where the real one does. */
static KvPolicy calibration_policy(bool exact)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED, exact);

    policy.max_cache_tokens = CALIBRATION_TOKENS;
    policy.n_slots = policy.tile_blocks = 1;
    return policy;
}

static ModelOptions calibration_options(const ModelOptions *options)
{
    ModelOptions small = *options;

    small.max_rows = MIN((uint32_t)CALIBRATION_ROWS, options->max_rows);
    small.max_sequences = 1;
    return small;
}

int model_calibration_plan(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, uint64_t *ret_bytes, ErrorDetail *reterr)
{
    KvPolicy policy = calibration_policy(options->exact);
    ModelOptions small = calibration_options(options);
    KvModel kv_model = model_kv(file, &small, NULL);
    KvPlan plan;
    int r = model_fold_kv(kv_store_plan(info, &kv_model, &policy, &plan, reterr));

    if (!r)
        *ret_bytes = plan.staging_bytes + plan.tail_bytes + plan.operand_bytes + plan.device_page_bytes;
    return r;
}

static int run_in_store(Measurement *measurement, const TokenList *list, ErrorDetail *reterr)
{
    Model *model = measurement->model;
    uint32_t limit = MIN((uint32_t)CALIBRATION_TOKENS, model->options.context), n_ids = (uint32_t)MIN(list->n, (size_t)limit);
    KvPolicy policy = calibration_policy(model->options.exact);
    ModelOptions options = calibration_options(&model->options);
    _cleanup_(kv_store_freep) KvStore *store = NULL;
    KvModel kv_model;
    int r;

    kv_model = model_kv(model->file, &options, NULL);
    r = model_fold_kv(kv_store_new(model->gpu, &kv_model, &policy, &store, reterr));
    if (r) {
        error_detail_prefix(reterr, "calibration");
        return r;
    }
    return run_text(measurement, store, list->ids, n_ids, reterr);
}

/* Rooms of every layer's sums in one piece. */
static int measurement_init(Measurement *measurement, Model *model)
{
    const ModelParams *params = &model->file->hparams.model;
    Sides sides = sides_of(model);
    size_t width = sides.q + sides.k + sides.v, layer = 4 * sides.k + sides.v;

    *measurement = (Measurement){.model = model, .sides = sides};
    measurement->sums = calloc(params->n_layers, sizeof(Sums));
    measurement->memory = calloc(params->n_layers * layer, sizeof(double));
    measurement->qkv = calloc(params->n_layers * (size_t)CALIBRATION_ROWS, width * sizeof(float));
    if (!measurement->sums || !measurement->memory || !measurement->qkv)
        return error_origin(-ENOMEM);
    for (uint32_t l = 0; l < params->n_layers; l++) {
        double *room = measurement->memory + l * layer;

        measurement->sums[l] = (Sums){.k = room, .k_square = room + sides.k, .k_turned = room + 2 * sides.k, .q_square = room + 3 * sides.k,
                                      .v = room + 4 * sides.k};
    }
    return 0;
}

static void measurement_deinit(Measurement *measurement)
{
    free(measurement->sums);
    free(measurement->memory);
    free(measurement->qkv);
}

static int measure(Model *model, float *results, ErrorDetail *reterr)
{
    _cleanup_(token_list_clearp) TokenList list = TOKEN_LIST_NULL;
    _cleanup_(measurement_deinit) Measurement measurement = {0};
    int32_t bos = tokenizer_bos(model->file->tokenizer);
    int r;

    r = measurement_init(&measurement, model);
    if (!r && tokenizer_add_bos(model->file->tokenizer) && bos >= 0)
        r = token_list_append(&list, &bos, 1);
    if (!r)
        r = tokenizer_encode(model->file->tokenizer, model_calibration_text, strlen(model_calibration_text), false, &list);
    if (!r)
        r = run_in_store(&measurement, &list, reterr);
    for (uint32_t l = 0; l < model->file->hparams.model.n_layers && !r; l++)
        r = conclude(&measurement, &measurement.sums[l], results + l * measurement.sides.all, reterr);
    return error_trace(r);
}

int model_calibrate(Model *model, ErrorDetail *reterr)
{
    const char *state_dir = model->file->state_dir, *name = model->file->digest_hex;
    size_t bytes = model->file->hparams.model.n_layers * sides_of(model).all * sizeof(float);
    _cleanup_(freep) float *results = malloc(bytes);
    char file_name[96];
    int r;

    if (!results)
        return error_origin(-ENOMEM);
    (void)snprintf(file_name, sizeof(file_name), "%s.kvcal", name);
    if (state_dir && state_file_read(state_dir, &CALIBRATION_KIND, file_name, results, bytes) == 0)
        return adopt(model, TAKE_PTR(results));
    r = measure(model, results, reterr);
    if (r)
        return error_trace(r);
    if (state_dir) {
        r = state_file_write(state_dir, &CALIBRATION_KIND, file_name, results, bytes);
        if (r)
            log_warning("cannot store the model's calibration in '%s': %s, ignoring", state_dir, strerror(-r));
    }
    return adopt(model, TAKE_PTR(results));
}
