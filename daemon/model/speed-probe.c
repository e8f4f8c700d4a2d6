/* SPDX-License-Identifier: Apache-2.0 */
/* A model of zeros (speed-zeros.c) is run and timed. */

#include "daemon/model/speed-schedule.h"
#include "daemon/model/speed-zeros.h"

#include <time.h>

/* Tokens of the past at further measurements.  The first tokens find all of it in the tail; the next pages cost launches of their own; a
 * short past does not keep all of a device busy, a long one does not stay in caches; beyond the last one errors grow with the distance. */
static const uint32_t PROBE_PASTS[MODEL_SPEED_PASTS] = {0, 128, 768, 2560, 8192};
#define PROBE_FIRST_TOKENS 28   /* which complete no page */
#define PROBE_CHUNK_PAST   2    /* of these: after which a chunk is timed, too */
/* In compatibility mode all of the past has to be run, on the host: no further than needed. */
#define PROBE_RUN_PAST     768
/* A pass takes the median of some, because what users get is not the luckiest one; but no more than by a third longer than the quickest,
 * because facts are kept: what is beyond that was the work of others. */
#define PROBE_PASSES    61
#define PROBE_LEAST     3
#define PROBE_SECONDS   0.3
#define PROBE_DISTURBED (4.0 / 3.0)
/* Of a sequence: the longest past, two chunks, and tokens. */
#define PROBE_TOKENS    (PROBE_PASTS[MODEL_SPEED_PASTS - 1] + 2 * SPEED_PROBE_ROWS + 4 * (PROBE_PASSES + 2))

/* ---- timing ----------------------------------------------------------------------------------------------------------------- */

static double seconds_now(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Passes of one kind, the quickest first. */
typedef struct Samples {
    double begun, seconds[PROBE_PASSES];
    uint32_t n;
} Samples;

/* True when they are enough. */
static bool samples_add(Samples *samples, double seconds)
{
    uint32_t place = samples->n++;

    for (; place > 0 && samples->seconds[place - 1] > seconds; place--)
        samples->seconds[place] = samples->seconds[place - 1];
    samples->seconds[place] = seconds;
    return samples->n == PROBE_PASSES || (samples->n >= PROBE_LEAST && seconds_now() - samples->begun > PROBE_SECONDS);
}

static double samples_judge(const Samples *samples)
{
    return samples->n > 0 ? MIN(samples->seconds[samples->n / 2], samples->seconds[0] * PROBE_DISTURBED) : 0;
}

static int time_pass(SpeedZeros *probe, uint32_t n_rows, bool logits, double *ret, ErrorDetail *reterr)
{
    ModelItem item = {.cache = probe->cache, .tokens = probe->ids, .n_tokens = n_rows};
    double begun = seconds_now();
    int r = model_forward(probe->model, probe->store, &item, 1, logits ? probe->logits : NULL, reterr);

    *ret = seconds_now() - begun;
    return r;
}

/* Tokens from here on, as far as the context goes; the first two wake the device.  @most: tokens of a sequence before it begins anew; 0: no
 * limit. */
static int time_tokens(SpeedZeros *probe, bool logits, uint32_t most, double *ret, ErrorDetail *reterr)
{
    Samples samples = {.begun = seconds_now()};
    double seconds = 0;
    bool enough = false;
    int r = 0;

    for (uint32_t i = 0; !enough && !r; i++) {
        if (most > 0 && kv_cache_length(probe->cache) >= most)
            r = model_fold_kv(kv_cache_clear(probe->cache));
        if (!r)
            r = time_pass(probe, 1, logits, &seconds, reterr);
        if (i >= 2)
            enough = samples_add(&samples, seconds);
        enough |= kv_cache_length(probe->cache) >= probe->model->options.context;
    }
    *ret = samples_judge(&samples);
    return r;
}

/* Chunks at the beginning of a sequence; the first one wakes the device. */
static int time_chunks(SpeedZeros *probe, double *ret, ErrorDetail *reterr)
{
    Samples samples = {.begun = seconds_now()};
    double seconds = 0;
    bool enough = false;
    int r = 0;

    for (uint32_t i = 0; !enough && !r; i++) {
        r = time_pass(probe, probe->model->options.max_rows, false, &seconds, reterr);
        if (!r)
            r = model_fold_kv(kv_cache_clear(probe->cache));
        if (i >= 1)
            enough = samples_add(&samples, seconds);
    }
    *ret = samples_judge(&samples);
    return r;
}

/* One number of layers, at the beginning of a sequence. */
typedef struct Times {
    double token, chunk;
} Times;

static int time_beginning(SpeedZeros *probe, Times *ret, ErrorDetail *reterr)
{
    int r = time_chunks(probe, &ret->chunk, reterr);

    return r ? r : time_tokens(probe, true, PROBE_FIRST_TOKENS, &ret->token, reterr);
}

/* Passes without logits after pasts of different lengths; the first may be all, if the context is short. */
typedef struct Depths {
    uint32_t n, tokens_at[MODEL_SPEED_PASTS], chunk_at;
    double token[MODEL_SPEED_PASTS], chunk;
} Depths;

/* A past of so many tokens or a little more, zeros where that can be. */
static int reach(SpeedZeros *probe, uint32_t n_tokens, ErrorDetail *reterr)
{
    uint32_t length = kv_cache_length(probe->cache), rows = probe->model->options.max_rows;
    double seconds;
    int r = 0;

    if (length >= n_tokens)
        return 0;
    if (!kv_store_policy(probe->store)->is_compatible)
        return model_fold_kv(kv_cache_add_blank(probe->cache, n_tokens - length, reterr));
    for (uint32_t n; length < n_tokens && !r; length += n) {
        n = MIN(rows, n_tokens - length);
        r = time_pass(probe, n, false, &seconds, reterr);
    }
    return r;
}

/* One chunk after the past; the second one of two, because kernels may differ. */
static int time_deep_chunk(SpeedZeros *probe, Depths *depths, ErrorDetail *reterr)
{
    uint32_t rows = probe->model->options.max_rows;
    int r = time_pass(probe, rows, false, &depths->chunk, reterr);

    depths->chunk_at = kv_cache_length(probe->cache);
    return r ? r : time_pass(probe, rows, false, &depths->chunk, reterr);
}

static int time_depths(SpeedZeros *probe, Depths *ret, ErrorDetail *reterr)
{
    uint32_t rows = probe->model->options.max_rows, context = probe->model->options.context;
    /* Room for two chunks and for tokens. */
    uint64_t room = 2 * (uint64_t)rows + PROBE_PASSES + 2;
    uint32_t most = context > room ? (uint32_t)(context - room) : 0;
    Depths times = {.n = 0};
    int r = model_fold_kv(kv_cache_clear(probe->cache));

    if (kv_store_policy(probe->store)->is_compatible)
        most = MIN(most, (uint32_t)PROBE_RUN_PAST);
    for (uint32_t i = 0; i < MODEL_SPEED_PASTS && !r; i++) {
        uint32_t depth = MIN(PROBE_PASTS[i], most);

        if (i > 0 && depth <= times.tokens_at[i - 1])
            break;
        r = reach(probe, depth, reterr);
        if (r == MODEL_E_DEVICE_MEMORY && i > 1) {
            r = 0; /* the shorter ones have to do */
            break;
        }
        if (!r && i == PROBE_CHUNK_PAST)
            r = time_deep_chunk(probe, &times, reterr);
        times.tokens_at[i] = i > 0 ? kv_cache_length(probe->cache) : 0;
        if (!r)
            r = time_tokens(probe, false, i > 0 ? 0 : PROBE_FIRST_TOKENS, &times.token[i], reterr);
        times.tokens_at[i] = (times.tokens_at[i] + kv_cache_length(probe->cache)) / 2;
        times.n = i + 1;
    }
    times.tokens_at[0] = PROBE_FIRST_TOKENS;
    *ret = times;
    return r;
}

/* All streamed parts once, as a step would bring them, and nothing else. */
static int copy_parts(SpeedZeros *probe, double *ret_sec, ErrorDetail *reterr)
{
    const WeightsDevice *device = &probe->model->weights;
    uint64_t deadline_usec = probe->model->options.deadline_usec;
    double begun = seconds_now();
    int r = 0;

    for (uint32_t i = 0; i < device->placement.n_parts && !r; i++) {
        const PlacementPart *part = &device->placement.parts[i];
        const uint8_t *block = weights_block(device->weights, part->block);

        if (part->streamed)
            r = model_fold_gpu(gpu_upload(probe->gpu, GPU_QUEUE_UPLOAD, device->slots[i % device->placement.n_slots].buffer, 0,
                                          block + device->placement.pieces[part->first_piece].slices[0].from, part->bytes, GPU_WAIT_NONE,
                                          "measure", NULL));
    }
    if (!r)
        r = model_fold_gpu(gpu_drain(probe->gpu, deadline_usec, reterr));
    *ret_sec = seconds_now() - begun;
    return r;
}

static int time_copies(SpeedZeros *probe, double *ret_rate, ErrorDetail *reterr)
{
    Samples samples = {.begun = seconds_now()};
    double seconds = 0;
    bool enough = false;
    int r = model_fold_gpu(gpu_drain(probe->gpu, probe->model->options.deadline_usec, reterr));

    while (!enough && !r) {
        r = copy_parts(probe, &seconds, reterr);
        enough = samples_add(&samples, seconds);
    }
    *ret_rate = (double)probe->model->weights.placement.streamed_bytes / MAX(samples_judge(&samples), 1e-9);
    weights_device_abort(&probe->model->weights); /* the slots hold something else now */
    return r;
}

/* ---- the probe -------------------------------------------------------------------------------------------------------------- */

typedef struct Sizes {
    uint32_t n_few, n_many;
    uint64_t head_bytes;
    double head_scale, layer_scale; /* of the whole model over what is run */
    double last_share;              /* of a layer: what a pass without logits leaves out of the last one */
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
    if (sizes.n_many < 1 || bytes < SPEED_PROBE_MIN_BYTES)
        return false;
    /* All of them need no slope. */
    sizes.n_few = sizes.n_many > 1 && sizes.n_many < weights->n_layers ? MAX(sizes.n_many / 3, 1u) : 0;
    sizes.last_share = (double)weights->blocks[WEIGHTS_BLOCK_SPANS + weights->n_layers].bytes / (double)MAX(span, UINT64_C(1));
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

/* @bare: a token without logits, of many layers. */
static void solve(const Sizes *sizes, const Times *few, const Times *many, double bare, ModelSpeed *speed)
{
    double n = sizes->n_many - sizes->n_few, layer, chunk_layer;

    layer = sizes->n_few > 0 ? slope(few->token, many->token, n) : MIN(bare / MAX(n - sizes->last_share, 1.0), many->token / n);
    chunk_layer = slope(few->chunk, many->chunk, n);
    speed->layer_sec = layer * sizes->layer_scale;
    speed->head_sec = MAX(many->token - layer * sizes->n_many, 0.0) * sizes->head_scale;
    speed->chunk_layer_sec = chunk_layer * sizes->layer_scale;
    speed->chunk_sec = MAX(many->chunk - chunk_layer * sizes->n_many, 0.0);
}

/* What the past costs @n_layers, never less than a shorter one. */
static void solve_depths(const Depths *depths, double chunk, uint32_t n_layers, ModelSpeed *speed)
{
    double least = 0;

    for (uint32_t i = 0; i < depths->n; i++) {
        least = MAX(least, slope(depths->token[0], depths->token[i], n_layers));
        speed->pasts[i] = (ModelPast){depths->tokens_at[i], least};
    }
    speed->n_pasts = depths->n;
    if (depths->chunk_at > 0)
        speed->chunk_layer_past_sec = slope(chunk, depths->chunk, (double)n_layers * depths->chunk_at);
}

/* The pass that streams what the probe's model does, its kernels taking @kernels seconds. */
static SpeedStep streaming_step(const SpeedZeros *probe, const ModelSpeed *speed, double kernels, double part_rate, bool logits)
{
    ModelFit fit = {.policy = {.home = KV_HOME_DEVICE}};
    SpeedStep step;

    model_weights_plan(probe->model, &fit.plan);
    step = speed_step(&fit, 0, speed->upload_rate, part_rate, logits);
    step.head_sec = logits ? MIN(speed->head_sec, kernels) : 0;
    step.layer_sec = (kernels - step.head_sec) / MAX(step.n_layers, 1u);
    return step;
}

/* What passes of @sec say: when copies outlast kernels how fast they were, else how fast kernels were beside them. */
static void solve_streaming(const SpeedZeros *probe, const ModelSpeed *speed, double kernels, bool logits, double sec, double *part_rate,
                            double *beside)
{
    SpeedStep step = streaming_step(probe, speed, kernels, speed->upload_rate, logits);

    *part_rate = speed->upload_rate * speed_schedule_solve_rate(&step, sec);
    step = streaming_step(probe, speed, kernels, *part_rate, logits);
    *beside = speed_schedule_solve(&step, sec);
}

/* What streams in the probe's model. */
static int measure_streaming(SpeedZeros *probe, const Times *resident, ModelSpeed *speed, double *ret_copies, ErrorDetail *reterr)
{
    Times streamed = {.token = 0};
    int r;

    r = time_copies(probe, &speed->upload_rate, reterr);
    if (!r)
        r = time_beginning(probe, &streamed, reterr);
    if (r)
        return r;
    solve_streaming(probe, speed, resident->chunk, false, streamed.chunk, &speed->chunk_part_rate, &speed->chunk_beside);
    solve_streaming(probe, speed, resident->token, true, streamed.token, &speed->part_rate, &speed->beside);
    *ret_copies = (double)probe->model->weights.placement.streamed_bytes / speed->part_rate;
    return 0;
}

/* With as many layers streamed as take about as long as the kernels. */
static int measure_balance(SpeedZeros *probe, double resident, ModelSpeed *speed, ErrorDetail *reterr)
{
    double streamed = 0;
    int r = time_tokens(probe, true, PROBE_FIRST_TOKENS, &streamed, reterr);

    if (!r) {
        SpeedStep step = streaming_step(probe, speed, resident, speed->part_rate, true);

        speed->beside = speed_schedule_solve(&step, streamed);
    }
    return r;
}

static ModelWeights weights_of_layers(uint32_t max_layers)
{
    return (ModelWeights){.transfer = KV_TRANSFER_COPY, .n_slots = 2, .limit_layers = true, .max_layers = max_layers};
}

/* All layers, then as many as take about as long as the kernels. */
static int probe_any_streaming(SpeedZeros *probe, const ModelFile *file, const ModelFit *fit, const Sizes *sizes, const Times *resident,
                               ModelSpeed *speed, ErrorDetail *reterr)
{
    double copies = 0;
    uint32_t n;
    int r;

    r = speed_zeros_begin(probe, file, fit, sizes->n_many, sizes->head_bytes, weights_of_layers(0), PROBE_TOKENS, reterr);
    if (!r)
        r = measure_streaming(probe, resident, speed, &copies, reterr);
    speed_zeros_end(probe);
    n = !r && copies > resident->token ? (uint32_t)(sizes->n_many * resident->token / copies + 0.5) : sizes->n_many;
    if (r || n == sizes->n_many || n == 0)
        return r;
    r = speed_zeros_begin(probe, file, fit, sizes->n_many, sizes->head_bytes, weights_of_layers(sizes->n_many - n), PROBE_TOKENS, reterr);
    if (!r)
        r = measure_balance(probe, resident->token, speed, reterr);
    speed_zeros_end(probe);
    return r;
}

/* As the plan streams them, if it does: with the same share of the device.  MODEL_E_DEVICE_MEMORY when that is too little for what is run. */
static int probe_planned_streaming(SpeedZeros *probe, const ModelFile *file, const ModelFit *fit, const Sizes *sizes, const Times *resident,
                                   ModelSpeed *speed, ErrorDetail *reterr)
{
    const Weights *from = &file->weights;
    double run = (double)sizes->head_bytes + span_bytes(from, 0, sizes->n_many + 1);
    double whole = (double)from->blocks[from->output.block].bytes + span_bytes(from, 0, weights_n_spans(from)), copies;
    ModelWeights weights = fit->options.weights;
    int r;

    weights.transfer = KV_TRANSFER_COPY;
    weights.budget_bytes = (uint64_t)((double)weights.budget_bytes * MIN(run / whole, 1.0));
    weights.max_layers = (uint32_t)((uint64_t)weights.max_layers * sizes->n_many / from->n_layers);
    r = speed_zeros_begin(probe, file, fit, sizes->n_many, sizes->head_bytes, weights, PROBE_TOKENS, reterr);
    if (!r && probe->model->weights.placement.streamed_bytes == 0)
        r = MODEL_E_DEVICE_MEMORY; /* rounding left nothing to copy */
    if (!r)
        r = measure_streaming(probe, resident, speed, &copies, reterr);
    speed_zeros_end(probe);
    return r;
}

static int probe_streaming(SpeedZeros *probe, const ModelFile *file, const ModelFit *fit, const Sizes *sizes, const Times *resident,
                           ModelSpeed *speed, ErrorDetail *reterr)
{
    int r = MODEL_E_DEVICE_MEMORY;

    if (fit->plan.weight_streamed_bytes > 0)
        r = probe_planned_streaming(probe, file, fit, sizes, resident, speed, reterr);
    return r == MODEL_E_DEVICE_MEMORY ? probe_any_streaming(probe, file, fit, sizes, resident, speed, reterr) : r;
}

int speed_probe(Gpu *gpu, const ModelFile *file, const ModelFit *fit, uint64_t bytes, ModelSpeed *ret, ErrorDetail *reterr)
{
    Times times[2] = {{.token = 0}, {.token = 0}};
    ModelSpeed speed = {.chunk_rows = speed_probe_rows(fit)};
    SpeedZeros probe = {.gpu = gpu};
    Depths depths = {.n = 0};
    Sizes sizes;
    int r = 0;

    if (!choose_sizes(&file->weights, bytes, &sizes))
        return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY, "%llu bytes of the device are too few to measure with",
                                (unsigned long long)bytes);
    for (int many = sizes.n_few > 0 ? 0 : 1; many < 2 && !r; many++) {
        uint32_t n_layers = many ? sizes.n_many : sizes.n_few;

        r = speed_zeros_begin(&probe, file, fit, n_layers, sizes.head_bytes, weights_of_layers(UINT32_MAX), PROBE_TOKENS, reterr);
        if (!r)
            r = time_beginning(&probe, &times[many], reterr);
        if (!r && many)
            r = time_depths(&probe, &depths, reterr);
        speed_zeros_end(&probe);
    }
    if (r)
        return r;
    solve(&sizes, &times[0], &times[1], depths.token[0], &speed);
    solve_depths(&depths, times[1].chunk, sizes.n_many, &speed);
    r = probe_streaming(&probe, file, fit, &sizes, &times[1], &speed, reterr);
    if (!r)
        *ret = speed;
    return r;
}
