/* SPDX-License-Identifier: Apache-2.0 */
/* The probe, its file, and what follows from it. */

#include "daemon/model/speed.h"
#include "daemon/model/model-private.h"
#include "daemon/model/nbits.h"
#include "daemon/model/state-file.h"
#include "quant/base/log.h"

#include <string.h>
#include <time.h>

/* Weights that are run over: beyond the caches of the CPUs that we know, a tenth of a second to upload. */
#define PROBE_BYTES     (UINT64_C(64) << 20)
#define PROBE_MIN_BYTES (UINT64_C(1) << 16)
#define PROBE_ROWS      256
#define PROBE_PAST      1024 /* tokens of the past at the second measurement */
/* The quickest of some counts, because facts are kept and what disturbed one measurement should not be: it ends when so many in a row were
 * not quicker by a fiftieth, or when there were so many in all. */
#define PROBE_CALM       10
#define PROBE_STEPS      80
#define PROBE_CALM_CHUNK 2
#define PROBE_CHUNKS     8
#define PROBE_KEY_BYTES 600

/* The version counts changes of what is measured. */
static const StateKind SPEED_KIND = {"speeds", {'L', 'E', 'A', 'T', 'S', 'P', 'E', 'D'}, 1};

typedef struct SpeedFile {
    char key[PROBE_KEY_BYTES];
    ModelSpeed speed;
} SpeedFile;

/* ---- what it is stored by ---------------------------------------------------------------------------------------------------- */

static uint32_t probe_rows(const ModelFit *fit)
{
    return MIN(fit->options.max_rows, (uint32_t)PROBE_ROWS);
}

/* Everything that the facts depend on, in words. */
static void make_key(const GpuInfo *info, const ModelFile *file, const ModelFit *fit, char ret[static PROBE_KEY_BYTES])
{
    const ModelParams *p = &file->hparams.model;
    const WeightsMatrix *tensors = file->weights.layers[file->weights.n_layers / 2].tensors;
    const KvForm *form = &fit->policy.form;
    int n;

    n = snprintf(ret, PROBE_KEY_BYTES, "%s|%s|%s|%s|%d|%u|%u %u %u %u %u %u %u %u|%d|%d %u %u %d %d %d %d %u %u %u|%u|", info->name,
                 info->driver, info->platform, info->opencl_c, (int)info->simd, info->compute_units, p->n_layers, p->n_embd, p->n_ff,
                 p->n_vocab, p->attention.n_heads, p->attention.n_kv_heads, p->attention.k_head_dim, p->attention.v_head_dim,
                 fit->options.exact, (int)form->kind, form->k_bits, form->v_bits, (int)form->centre, (int)form->rotation,
                 (int)form->levels, form->pair_scale, form->group_dims, form->sink_tokens, form->tail_tokens, probe_rows(fit));
    for (WeightsTensor i = 0; i < WEIGHTS_TENSOR_X_MAX; i++)
        n += snprintf(ret + n, (size_t)(PROBE_KEY_BYTES - n), "%s ", tensors[i].tensor->type->name);
    (void)snprintf(ret + n, (size_t)(PROBE_KEY_BYTES - n), "%s", file->weights.output.tensor->type->name);
}

static void make_name(const char *key, char ret[static 17])
{
    uint64_t hash = 0xcbf29ce484222325u;

    for (; *key; key++)
        hash = (hash ^ (uint8_t)*key) * 0x100000001b3u;
    (void)snprintf(ret, 17, "%016llx", (unsigned long long)hash);
}

/* ---- a model of zeros ------------------------------------------------------------------------------------------------------- */

/* The same tensors in fewer layers, the head with fewer rows; nothing of @file is copied but places. */
static int cut_weights(const ModelFile *file, uint32_t n_layers, uint64_t head_bytes, Weights *ret)
{
    const Weights *from = &file->weights;
    bool tied = weights_tied(from);
    uint32_t n_blocks = WEIGHTS_BLOCK_SPANS + n_layers + 1 + (tied ? 0 : 1), n_tiles;
    Weights w = {.n_layers = n_layers, .n_blocks = n_blocks, .embedding = from->embedding, .output_norm = from->output_norm};

    w.layers = calloc(n_layers, sizeof(*w.layers));
    w.blocks = calloc(n_blocks, sizeof(*w.blocks));
    if (!w.layers || !w.blocks) {
        weights_clear(&w);
        return error_origin(-ENOMEM);
    }
    memcpy(w.layers, from->layers, n_layers * sizeof(*w.layers));
    for (uint32_t i = 0; i < WEIGHTS_BLOCK_SPANS + n_layers + 1; i++)
        w.blocks[i].bytes = from->blocks[i].bytes;
    head_bytes = MIN(head_bytes, from->blocks[from->output.block].bytes);
    n_tiles = (uint32_t)MAX(head_bytes / from->output.tile_bytes, UINT64_C(1));
    w.embedding.n_rows = MIN(from->embedding.n_rows, n_tiles * WEIGHT_TILE_ROWS);
    w.blocks[WEIGHTS_BLOCK_EMBEDDING].bytes = (uint64_t)n_tiles * w.embedding.tile_bytes;
    w.output = w.embedding;
    if (!tied) {
        w.output = from->output;
        w.output.block = n_blocks - 1;
        w.output.n_rows = w.embedding.n_rows;
        w.blocks[n_blocks - 1].bytes = (uint64_t)n_tiles * w.output.tile_bytes;
    }
    for (uint32_t i = 0; i < n_blocks; i++) {
        w.blocks[i].bytes = (w.blocks[i].bytes + WEIGHTS_ALIGNMENT - 1) & ~(uint64_t)(WEIGHTS_ALIGNMENT - 1);
        w.blocks[i].offset = w.image_bytes;
        w.image_bytes += (w.blocks[i].bytes + WEIGHTS_BLOCK_ALIGNMENT - 1) & ~(uint64_t)(WEIGHTS_BLOCK_ALIGNMENT - 1);
    }
    *ret = w;
    return 0;
}

/* A probe in work: one model of zeros with a store and a sequence. */
typedef struct Probe {
    Gpu *gpu;
    Model *model;
    KvStore *store;
    KvCache *cache;
    float *logits;
    int32_t *ids; /* zeros */
} Probe;

static void probe_end(Probe *probe)
{
    kv_cache_free(probe->cache);
    kv_store_free(probe->store);
    model_free(probe->model);
    free(probe->logits);
    free(probe->ids);
    *probe = (Probe){.gpu = probe->gpu};
}

static int new_model(Probe *probe, const ModelFile *file, const ModelOptions *options, uint32_t n_layers, uint64_t head_bytes,
                     ErrorDetail *reterr)
{
    _cleanup_(model_file_freep) ModelFile *zeros = calloc(1, sizeof(*zeros));
    int r;

    if (!zeros)
        return error_origin(-ENOMEM);
    zeros->hparams = file->hparams;
    r = cut_weights(file, n_layers, head_bytes, &zeros->weights);
    if (r)
        return r;
    zeros->hparams.model.n_layers = n_layers;
    zeros->hparams.model.n_vocab = zeros->weights.output.n_rows;
    r = weights_new_image(&zeros->weights, reterr);
    if (r)
        return r;
    /* Pages of their own: the system's one page of zeros would be copied from the nearest cache. */
    memset(zeros->weights.image, 0, zeros->weights.image_bytes);
    r = model_new(probe->gpu, zeros, options, &probe->model, reterr);
    if (r)
        return r;
    zeros = NULL;
    /* No means: zeros have none, and there is no tokenizer to read the text with. */
    probe->model->calibration = calloc(n_layers, sizeof(*probe->model->calibration));
    return probe->model->calibration ? 0 : error_origin(-ENOMEM);
}

static int probe_begin(Probe *probe, const ModelFile *file, const ModelFit *fit, uint32_t n_layers, uint64_t head_bytes, bool streamed,
                       ErrorDetail *reterr)
{
    KvPolicy policy = fit->policy;
    ModelOptions options = {
        .exact = fit->options.exact,
        .context = fit->options.context,
        .max_rows = probe_rows(fit),
        .max_sequences = 1,
        .deadline_usec = fit->options.deadline_usec,
        .weights = {.transfer = KV_TRANSFER_COPY, .n_slots = 2, .limit_layers = streamed, .max_layers = 0},
    };
    int r;

    /* Pages on the device: what copies cost is measured apart. */
    policy.home = KV_HOME_DEVICE;
    policy.n_layer_bits = 0; /* few layers stand for all */
    policy.growth = KV_GROWTH_DYNAMIC;
    policy.transfer = KV_TRANSFER_AUTO;
    policy.max_cache_tokens = PROBE_PAST + PROBE_ROWS + 2 * (PROBE_STEPS + 2);
    policy.device_budget_bytes = 0;
    r = new_model(probe, file, &options, n_layers, head_bytes, reterr);
    if (!r)
        r = model_store_new(probe->model, &policy, &probe->store, reterr);
    if (!r)
        r = model_fold_kv(kv_cache_new(probe->store, &probe->cache, reterr));
    if (r)
        return r;
    probe->logits = calloc(probe->model->file->hparams.model.n_vocab, sizeof(*probe->logits));
    probe->ids = calloc(PROBE_ROWS, sizeof(*probe->ids));
    return probe->logits && probe->ids ? 0 : error_origin(-ENOMEM);
}

/* ---- timing ----------------------------------------------------------------------------------------------------------------- */

static double seconds_now(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The quickest measurement so far. */
typedef struct Quickest {
    double seconds;
    uint32_t n, n_calm; /* in all; since it was last beaten */
} Quickest;

/* True when that is enough. */
static bool quickest_add(Quickest *quickest, double seconds, uint32_t calm, uint32_t most)
{
    bool better = quickest->n == 0 || seconds < quickest->seconds * 0.98;

    quickest->n_calm = better ? 0 : quickest->n_calm + 1;
    quickest->seconds = quickest->n == 0 ? seconds : MIN(quickest->seconds, seconds);
    return ++quickest->n >= most || quickest->n_calm >= calm;
}

static int time_pass(Probe *probe, uint32_t n_rows, bool logits, double *ret, ErrorDetail *reterr)
{
    ModelItem item = {.cache = probe->cache, .tokens = probe->ids, .n_tokens = n_rows};
    double begun = seconds_now();
    int r = model_forward(probe->model, probe->store, &item, 1, logits ? probe->logits : NULL, reterr);

    *ret = seconds_now() - begun;
    return r;
}

/* Tokens from here on; the first two wake the device. */
static int time_tokens(Probe *probe, double *ret, ErrorDetail *reterr)
{
    Quickest quickest = {0, 0, 0};
    double seconds = 0;
    bool enough = false;
    int r = 0;

    for (uint32_t i = 0; !enough && !r; i++) {
        r = time_pass(probe, 1, true, &seconds, reterr);
        if (i >= 2)
            enough = quickest_add(&quickest, seconds, PROBE_CALM, PROBE_STEPS);
    }
    *ret = quickest.seconds;
    return r;
}

/* One number of layers. */
typedef struct Times {
    double token, token_past, chunk, chunk_past;
    uint32_t past, chunk_from; /* where the second of each was taken */
} Times;

static int time_model(Probe *probe, uint32_t context, Times *ret, ErrorDetail *reterr)
{
    uint32_t rows = probe->model->options.max_rows, most = context > 32 ? context - 32 : 0, room = MIN(most, (uint32_t)PROBE_PAST);
    Times times = {0};
    Quickest quickest = {0, 0, 0};
    double seconds = 0;
    bool enough = false;
    int r = 0;

    while (!enough && !r) {
        r = time_pass(probe, rows, false, &seconds, reterr);
        if (!r)
            r = model_fold_kv(kv_cache_clear(probe->cache));
        enough = quickest_add(&quickest, seconds, PROBE_CALM_CHUNK, PROBE_CHUNKS);
    }
    times.chunk = quickest.seconds;
    if (!r)
        r = time_tokens(probe, &times.token, reterr);
    while (!r && kv_cache_length(probe->cache) + rows <= room) {
        times.chunk_from = kv_cache_length(probe->cache);
        r = time_pass(probe, rows, false, &times.chunk_past, reterr);
    }
    times.past = kv_cache_length(probe->cache);
    if (!r && times.chunk_from > 0)
        r = time_tokens(probe, &times.token_past, reterr);
    *ret = times;
    return r;
}

/* What copies alone take: the image block by block, as a step would bring it. */
static int time_copies(Probe *probe, double *ret_rate, ErrorDetail *reterr)
{
    const WeightsDevice *device = &probe->model->weights;
    uint64_t bytes = 0;
    double begun;
    int r = model_fold_gpu(gpu_drain(probe->gpu, probe->model->options.deadline_usec, reterr));

    begun = seconds_now();
    for (uint32_t i = 0; i < device->placement.n_parts && !r; i++) {
        const PlacementPart *part = &device->placement.parts[i];
        const uint8_t *block = weights_block(device->weights, part->block);

        if (!part->streamed)
            continue;
        r = model_fold_gpu(gpu_upload(probe->gpu, GPU_QUEUE_UPLOAD, device->slots[i % device->placement.n_slots].buffer, 0,
                                      block + device->placement.pieces[part->first_piece].slices[0].from, part->bytes, GPU_WAIT_NONE,
                                      "measure", NULL));
        bytes += part->bytes;
    }
    if (!r)
        r = model_fold_gpu(gpu_drain(probe->gpu, probe->model->options.deadline_usec, reterr));
    *ret_rate = (double)bytes / MAX(seconds_now() - begun, 1e-9);
    weights_device_abort(&probe->model->weights); /* the slots hold something else now */
    return r;
}

/* ---- the probe -------------------------------------------------------------------------------------------------------------- */

typedef struct Sizes {
    uint32_t n_few, n_many;
    uint64_t head_bytes;
    double head_scale, layer_scale; /* of the whole model over what is run */
} Sizes;

static double span_bytes(const Weights *weights, uint32_t first, uint32_t end)
{
    uint64_t bytes = 0;

    for (uint32_t s = first; s < end; s++)
        bytes += weights->blocks[WEIGHTS_BLOCK_SPANS + s].bytes;
    return (double)bytes;
}

/* Layers and rows of the head that fit into @bytes; false when that would say nothing. */
static bool choose_sizes(const Weights *weights, uint64_t bytes, Sizes *ret)
{
    uint64_t head = weights->blocks[weights->output.block].bytes, span = weights->blocks[WEIGHTS_BLOCK_SPANS + 1].bytes;
    Sizes sizes = {.head_bytes = MIN(head, bytes / 2)};
    uint64_t n = (bytes - sizes.head_bytes) / MAX(span, UINT64_C(1));

    sizes.n_many = (uint32_t)MIN(n, (uint64_t)weights->n_layers);
    if (sizes.n_many < 1 || bytes < PROBE_MIN_BYTES)
        return false;
    sizes.n_few = sizes.n_many > 1 ? MAX(sizes.n_many / 3, 1u) : 0;
    sizes.head_scale = (double)head / (double)sizes.head_bytes;
    sizes.layer_scale = span_bytes(weights, 1, weights->n_layers + 1) / weights->n_layers /
                        (span_bytes(weights, sizes.n_few + 1, sizes.n_many + 1) / (sizes.n_many - sizes.n_few));
    *ret = sizes;
    return true;
}

/* From few layers to many; not less than nothing, which noise may give. */
static double slope(double few, double many, double n)
{
    return MAX((many - few) / n, 0.0);
}

static void solve(const Sizes *sizes, const Times *few, const Times *many, uint32_t rows, ModelSpeed *ret)
{
    double n = sizes->n_many - sizes->n_few, layer, chunk_layer;
    ModelSpeed speed = {.chunk_rows = rows};

    layer = slope(few->token, many->token, n);
    chunk_layer = slope(few->chunk, many->chunk, n);
    speed.layer_sec = layer * sizes->layer_scale;
    speed.head_sec = MAX(few->token - layer * sizes->n_few, 0.0) * sizes->head_scale;
    speed.chunk_layer_sec = chunk_layer * sizes->layer_scale;
    speed.chunk_sec = MAX(few->chunk - chunk_layer * sizes->n_few, 0.0);
    if (many->chunk_from > 0) {
        double deeper = slope(few->token_past, many->token_past, n), later = slope(few->chunk_past, many->chunk_past, n);

        speed.layer_past_sec = MAX(deeper - layer, 0.0) / many->past;
        speed.chunk_layer_past_sec = MAX(later - chunk_layer, 0.0) / many->chunk_from;
    }
    *ret = speed;
}

static int measure_streaming(Probe *probe, double resident, ModelSpeed *speed, ErrorDetail *reterr)
{
    double together_sec = 0, copies, shorter, share;
    int r;

    r = time_copies(probe, &speed->upload_rate, reterr);
    if (!r)
        r = time_tokens(probe, &together_sec, reterr);
    if (r)
        return r;
    copies = (double)probe->model->weights.placement.streamed_bytes / speed->upload_rate;
    shorter = MIN(resident, copies);
    share = (resident + copies - together_sec) / MAX(shorter, 1e-9);
    share = MAX(share, 0.0);
    speed->hidden_share = MIN(share, 1.0);
    return 0;
}

static int measure(Gpu *gpu, const ModelFile *file, const ModelFit *fit, uint64_t bytes, ModelSpeed *ret, ErrorDetail *reterr)
{
    uint32_t context = model_complete_options(file, &fit->options).context;
    Times times[2] = {{.token = 0}, {.token = 0}};
    Probe probe = {.gpu = gpu};
    Sizes sizes;
    int r = 0;

    if (!choose_sizes(&file->weights, bytes, &sizes))
        return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY, "%llu bytes of the device are too few to measure with",
                                (unsigned long long)bytes);
    for (int many = sizes.n_few > 0 ? 0 : 1; many < 2 && !r; many++) {
        r = probe_begin(&probe, file, fit, many ? sizes.n_many : sizes.n_few, sizes.head_bytes, false, reterr);
        if (!r)
            r = time_model(&probe, context, &times[many], reterr);
        probe_end(&probe);
    }
    if (!r)
        solve(&sizes, &times[0], &times[1], probe_rows(fit), ret);
    if (!r)
        r = probe_begin(&probe, file, fit, sizes.n_many, sizes.head_bytes, true, reterr);
    if (!r)
        r = measure_streaming(&probe, times[1].token, ret, reterr);
    probe_end(&probe);
    return r;
}

int model_speed(Gpu *gpu, const ModelFile *file, const ModelFit *fit, bool may_measure, ModelSpeed *ret, ErrorDetail *reterr)
{
    uint64_t used[GPU_PURPOSE_X_MAX], total, budget = gpu_info(gpu)->budget_bytes, bytes;
    ModelFit resolved = *fit;
    SpeedFile stored, wanted;
    char name[17];
    bool known;
    int r;

    /* The bits that it has, or would have as far as is known: a model of zeros has no text to choose them by. */
    resolved.policy = model_nbits_resolve(file, fit->options.exact, &fit->policy, &known);
    fit = &resolved;
    memset(&wanted, 0, sizeof(wanted));
    make_key(gpu_info(gpu), file, fit, wanted.key);
    make_name(wanted.key, name);
    if (file->state_dir && state_file_read(file->state_dir, &SPEED_KIND, name, &stored, sizeof(stored)) == 0 &&
        memcmp(stored.key, wanted.key, sizeof(stored.key)) == 0) {
        *ret = stored.speed;
        return 0;
    }
    if (!may_measure)
        return -ENOENT;
    gpu_memory_used(gpu, used, &total);
    bytes = budget > total ? MIN((budget - total) / 2, PROBE_BYTES) : 0;
    do {
        r = measure(gpu, file, fit, bytes, &wanted.speed, reterr);
        bytes /= 2;
    } while (r == MODEL_E_DEVICE_MEMORY && bytes >= PROBE_MIN_BYTES);
    if (r)
        return r;
    *ret = wanted.speed;
    if (file->state_dir && state_file_write(file->state_dir, &SPEED_KIND, name, &wanted, sizeof(wanted)))
        log_debug("The measured speed of this device is not kept: it will be measured again");
    return 0;
}

/* ---- prediction ------------------------------------------------------------------------------------------------------------- */

/* Kernels and copies side by side. */
static double together(const ModelSpeed *speed, double kernels, double copies)
{
    return kernels + copies - speed->hidden_share * MIN(kernels, copies);
}

KvRates model_speed_rates(const ModelSpeed *speed, const ModelFit *fit)
{
    double per_layer = (double)fit->plan.kv.host_bytes_per_token / MAX(fit->plan.n_layers, 1u), rate;

    if (speed->layer_past_sec <= 0 || speed->upload_rate <= 0)
        return (KvRates){0, 0, 0};
    rate = per_layer / speed->layer_past_sec;
    return (KvRates){
        .device_bytes_per_second = (uint64_t)rate,
        .link_bytes_per_second = (uint64_t)speed->upload_rate,
        .weight_bytes_per_layer = (uint64_t)(speed->layer_sec * rate), /* as many as take as long at that rate */
    };
}

void model_predict(const ModelSpeed *speed, const ModelFit *fit, uint32_t depth, ModelPrediction *ret)
{
    const ModelPlan *plan = &fit->plan;
    double copies = (double)model_streamed_bytes(fit, depth) / MAX(speed->upload_rate, 1.0);
    double token = speed->head_sec + plan->n_layers * (speed->layer_sec + speed->layer_past_sec * depth);
    double chunk = speed->chunk_sec + plan->n_layers * (speed->chunk_layer_sec + speed->chunk_layer_past_sec * depth);

    *ret = (ModelPrediction){
        .token_sec = together(speed, token, copies),
        .prefill_rate = chunk > 0 ? speed->chunk_rows / together(speed, chunk, copies) : 0,
        .bus_limited = copies > token,
    };
}
