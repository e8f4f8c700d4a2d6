/* SPDX-License-Identifier: Apache-2.0 */
/* What is run with a model of zeros (speed-zeros.c, speed-time.c), and what follows from its times. */

#include "daemon/model/speed-schedule.h"
#include "daemon/model/speed-time.h"

/* ---- sizes ------------------------------------------------------------------------------------------------------------------ */

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

/* ---- what times say --------------------------------------------------------------------------------------------------------- */

/* From few layers to many; not less than nothing, which noise may give. */
static double slope(double few, double many, double n)
{
    return MAX((many - few) / n, 0.0);
}

/* What the probe's own model costs: as in ModelSpeed. */
typedef struct Costs {
    double head, layer, chunk, chunk_layer;
} Costs;

/* @bare: a token without logits, of many layers. */
static Costs solve(const Sizes *sizes, const SpeedTimes *few, const SpeedTimes *many, double bare)
{
    double n = sizes->n_many - sizes->n_few;
    Costs costs = {.chunk_layer = slope(few->chunk, many->chunk, n)};

    costs.layer = sizes->n_few > 0 ? slope(few->token, many->token, n) : MIN(bare / MAX(n - sizes->last_share, 1.0), many->token / n);
    costs.head = MAX(many->token - costs.layer * sizes->n_many, 0.0);
    costs.chunk = MAX(many->chunk - costs.chunk_layer * sizes->n_many, 0.0);
    return costs;
}

/* What the past costs @n_layers, never less than a shorter one.  Beside tiles that stream, of the kernels' own time: a tile that has just come
 * may be in a cache, and is then read in less time than pages on the device. */
static void solve_depths(const SpeedDepths *depths, bool tiles, double chunk, uint32_t n_layers, ModelSpeed *speed)
{
    const double *token = tiles ? depths->token_kernels : depths->token;
    double least = 0;

    for (uint32_t i = 0; i < depths->n; i++) {
        least = MAX(least, slope(token[0], token[i], n_layers));
        speed->pasts[i] = (ModelPast){depths->tokens_at[i], least};
    }
    speed->n_pasts = depths->n;
    if (depths->chunk_at > 0)
        speed->chunk_layer_past_sec = slope(chunk, tiles ? depths->chunk_kernels : depths->chunk, (double)n_layers * depths->chunk_at);
}

/* What a pass of @sec after @depth tokens says of the copies that it had: when they outlast kernels how fast they were, else how fast kernels
 * were beside them.  Nothing if it had none. */
static void solve_link(SpeedStep step, double depth, double sec, ModelLink *links, uint64_t *n_links)
{
    ModelLink link = {.tokens = depth};

    if (speed_step_copies(&step) <= 0)
        return;
    link.share = speed_schedule_solve_rate(&step, sec);
    step = speed_step_slower(&step, link.share);
    link.beside = speed_schedule_solve(&step, sec);
    links[(*n_links)++] = link;
}

/* ---- what is run ------------------------------------------------------------------------------------------------------------ */

typedef struct Probe {
    SpeedZeros zeros;
    const ModelFile *file;
    const ModelFit *fit;
    Sizes sizes;
    Costs costs;
    ModelSpeed speed;
} Probe;

static ModelWeights weights_of_layers(uint32_t max_layers)
{
    return (ModelWeights){.transfer = KV_TRANSFER_COPY, .n_slots = 2, .limit_layers = true, .max_layers = max_layers};
}

static int begin(Probe *probe, uint32_t n_layers, ModelWeights weights, ErrorDetail *reterr)
{
    return speed_zeros_begin(&probe->zeros, probe->file, probe->fit, n_layers, probe->sizes.head_bytes, weights, reterr);
}

/* Weights of @n_layers as the plan has them: the same share on the device, the rest streams or is read in place. */
static ModelWeights planned_weights(const Probe *probe, uint32_t n_layers)
{
    const Weights *from = &probe->file->weights;
    double run = (double)probe->sizes.head_bytes + span_bytes(from, 0, n_layers + 1);
    double whole = (double)from->blocks[from->output.block].bytes + span_bytes(from, 0, weights_n_spans(from));
    ModelWeights weights = probe->fit->options.weights;

    weights.transfer = probe->fit->plan.weight_in_place_bytes > 0 ? KV_TRANSFER_ZERO_COPY : KV_TRANSFER_COPY;
    weights.budget_bytes = (uint64_t)((double)weights.budget_bytes * MIN(run / whole, 1.0));
    weights.max_layers = (uint32_t)((uint64_t)weights.max_layers * n_layers / from->n_layers);
    return weights;
}

/* All weights on the device, but those that the plan has read in place. */
static int begin_resident(Probe *probe, uint32_t n_layers, ErrorDetail *reterr)
{
    int r = MODEL_E_DEVICE_MEMORY;

    if (probe->fit->plan.weight_in_place_bytes > 0 && probe->fit->plan.weight_streamed_bytes == 0)
        r = begin(probe, n_layers, planned_weights(probe, n_layers), reterr);
    if (r == MODEL_E_DEVICE_MEMORY) {
        speed_zeros_end(&probe->zeros);
        r = begin(probe, n_layers, weights_of_layers(UINT32_MAX), reterr);
    }
    return r;
}

/* Parts as the plan streams them; MODEL_E_DEVICE_MEMORY when the share of the device is too little for what is run. */
static int begin_planned(Probe *probe, ErrorDetail *reterr)
{
    uint32_t n_layers = probe->sizes.n_many;
    int r = begin(probe, n_layers, planned_weights(probe, n_layers), reterr);

    if (!r && probe->zeros.model->weights.placement.streamed_bytes == 0)
        r = MODEL_E_DEVICE_MEMORY; /* rounding left nothing to copy */
    return r;
}

static int take_store(Probe *probe, bool tiles, ErrorDetail *reterr)
{
    return speed_zeros_store(&probe->zeros, probe->fit, tiles, SPEED_TIME_TOKENS, reterr);
}

/* The step of a pass over the probe's model as it streams, after @depth tokens. */
static SpeedStep streaming_step(const Probe *probe, uint32_t depth, bool chunk, bool logits)
{
    const ModelSpeed *speed = &probe->speed;
    const Costs *costs = &probe->costs;
    ModelFit fit = {.policy = *kv_store_policy(probe->zeros.store)};
    SpeedStep step;

    model_weights_plan(probe->zeros.model, &fit.plan);
    fit.plan.kv = probe->fit->plan.kv;
    fit.plan.kv.device_page_bytes = 0;
    fit.plan.kv.host_bytes_per_token = fit.plan.kv.host_bytes_per_token / MAX(probe->fit->plan.n_layers, 1u) * fit.plan.n_layers;
    step = speed_step(&fit, depth, MAX(speed->tile_rate, 1.0), MAX(speed->upload_rate, 1.0), logits);
    step.head_sec = chunk ? costs->chunk : logits ? costs->head : 0;
    step.layer_sec = chunk ? costs->chunk_layer : costs->layer;
    step.past_sec = chunk ? speed->chunk_layer_past_sec * depth : speed_past(speed, depth);
    return step;
}

/* What passes say that had copies; @first: those at the beginning, when parts of the weights stream, which are then all that does at first. */
static void solve_streaming(Probe *probe, const SpeedTimes *first, const SpeedDepths *depths)
{
    ModelSpeed *speed = &probe->speed;

    speed->tile_rate = depths->n > 1 ? depths->copy_rates[depths->n - 1] : 0;
    if (!first)
        speed->upload_rate = speed->tile_rate;
    else if (speed->tile_rate <= 0)
        speed->tile_rate = speed->upload_rate;
    if (speed_probe_tiles(probe->fit))
        solve_depths(depths, true, probe->costs.chunk + probe->costs.chunk_layer * probe->sizes.n_many, probe->sizes.n_many, speed);
    speed->n_links = speed->n_chunk_links = 0;
    if (first) {
        solve_link(streaming_step(probe, 0, false, true), 0, first->token, speed->links, &speed->n_links);
        solve_link(streaming_step(probe, 0, true, false), 0, first->chunk, speed->chunk_links, &speed->n_chunk_links);
    }
    for (uint32_t i = 1; i < depths->n; i++)
        solve_link(streaming_step(probe, depths->tokens_at[i], false, false), depths->tokens_at[i], depths->token[i], speed->links, &speed->n_links);
    if (depths->chunk_at > 0)
        solve_link(streaming_step(probe, depths->chunk_at, true, false), depths->chunk_at, depths->chunk, speed->chunk_links, &speed->n_chunk_links);
}

/* The kernels alone, but for what the cache streams if the weights do not. */
static int probe_resident(Probe *probe, ErrorDetail *reterr)
{
    const Sizes *sizes = &probe->sizes;
    bool tiles = speed_probe_tiles(probe->fit), parts = probe->fit->plan.weight_streamed_bytes > 0;
    SpeedTimes times[2] = {{.token = 0}, {.token = 0}};
    SpeedDepths depths = {.n = 0};
    int r = 0;

    for (int many = sizes->n_few > 0 ? 0 : 1; many < 2 && !r; many++) {
        speed_zeros_end(&probe->zeros);
        r = begin_resident(probe, many ? sizes->n_many : sizes->n_few, reterr);
        if (!r)
            r = take_store(probe, tiles, reterr);
        if (!r)
            r = speed_time_beginning(&probe->zeros, &times[many], reterr);
    }
    if (!r) /* beside parts of the weights tiles are measured with these */
        r = speed_time_depths(&probe->zeros, tiles && parts ? 1 : MODEL_SPEED_PASTS, &depths, reterr);
    if (!r) {
        probe->costs = solve(sizes, &times[0], &times[1], depths.token[0]);
        if (!tiles)
            solve_depths(&depths, false, times[1].chunk, sizes->n_many, &probe->speed);
        else if (!parts)
            solve_streaming(probe, NULL, &depths);
    }
    speed_zeros_end(&probe->zeros);
    return r;
}

/* What parts cost, or if none stream only how fast they would come. */
static int probe_parts(Probe *probe, ErrorDetail *reterr)
{
    bool streams = probe->fit->plan.weight_streamed_bytes > 0;
    SpeedTimes first = {.token = 0};
    SpeedDepths depths = {.n = 0};
    int r = MODEL_E_DEVICE_MEMORY;

    if (!streams && probe->speed.upload_rate > 0)
        return 0;
    if (streams)
        r = begin_planned(probe, reterr);
    if (r == MODEL_E_DEVICE_MEMORY) {
        speed_zeros_end(&probe->zeros);
        r = begin(probe, probe->sizes.n_many, weights_of_layers(0), reterr);
    }
    if (!r)
        r = speed_time_copies(&probe->zeros, &probe->speed.upload_rate, reterr);
    if (!r && streams)
        r = take_store(probe, speed_probe_tiles(probe->fit), reterr);
    if (!r && streams)
        r = speed_time_beginning(&probe->zeros, &first, reterr);
    if (!r && streams)
        r = speed_time_depths(&probe->zeros, MODEL_SPEED_PASTS, &depths, reterr);
    if (!r && streams)
        solve_streaming(probe, &first, &depths);
    speed_zeros_end(&probe->zeros);
    return r;
}

static int probe_begin(Probe *probe, uint64_t bytes, ErrorDetail *reterr)
{
    if (!choose_sizes(&probe->file->weights, bytes, &probe->sizes))
        return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY, "%llu bytes of the device are too few to measure with",
                                (unsigned long long)bytes);
    return 0;
}

int speed_probe(Gpu *gpu, const ModelFile *file, const ModelFit *fit, uint64_t bytes, ModelSpeed *ret, double *ret_token_sec,
                ErrorDetail *reterr)
{
    Probe probe = {.zeros = {.gpu = gpu}, .file = file, .fit = fit, .speed = {.chunk_rows = speed_probe_rows(fit)}};
    int r = probe_begin(&probe, bytes, reterr);

    if (!r)
        r = probe_resident(&probe, reterr);
    if (!r)
        r = probe_parts(&probe, reterr);
    if (r)
        return r;
    probe.speed.layer_sec = probe.costs.layer * probe.sizes.layer_scale;
    probe.speed.head_sec = probe.costs.head * probe.sizes.head_scale;
    probe.speed.chunk_layer_sec = probe.costs.chunk_layer * probe.sizes.layer_scale;
    probe.speed.chunk_sec = probe.costs.chunk;
    *ret = probe.speed;
    *ret_token_sec = probe.costs.head + probe.costs.layer * probe.sizes.n_many;
    return 0;
}

int speed_probe_again(Gpu *gpu, const ModelFile *file, const ModelFit *fit, uint64_t bytes, double *ret_token_sec, ErrorDetail *reterr)
{
    Probe probe = {.zeros = {.gpu = gpu}, .file = file, .fit = fit};
    int r = probe_begin(&probe, bytes, reterr);

    if (!r)
        r = begin_resident(&probe, probe.sizes.n_many, reterr);
    if (!r)
        r = take_store(&probe, speed_probe_tiles(fit), reterr);
    if (!r)
        r = speed_time_token(&probe.zeros, ret_token_sec, reterr);
    speed_zeros_end(&probe.zeros);
    return r;
}
