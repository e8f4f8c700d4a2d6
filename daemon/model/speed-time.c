/* SPDX-License-Identifier: Apache-2.0 */
/* Passes of a model of zeros, timed. */

#include "daemon/model/speed-time.h"

#include <time.h>

/* Tokens of the past at further measurements.  The first tokens find all of it in the tail; the next pages cost launches of their own; a
 * short past does not keep all of a device busy, a long one does not stay in caches; beyond the last one errors grow with the distance. */
static const uint32_t PROBE_PASTS[MODEL_SPEED_PASTS] = {0, 128, 768, 2560, 8192};
#define PROBE_FIRST_TOKENS 28   /* of a sequence: they complete no page */
#define PROBE_CHUNK_PAST   2    /* of these: after which a chunk is timed, too */
/* In compatibility mode all of the past has to be run, on the host: no further than needed. */
#define PROBE_RUN_PAST     768
/* A pass takes the median of some, because what users get is not the luckiest one; but no more than by a third longer than the quickest,
 * because facts are kept: what is beyond that was the work of others. */
#define PROBE_PASSES    61
#define PROBE_LEAST     3
#define PROBE_SECONDS   0.3
#define PROBE_DISTURBED (4.0 / 3.0)
#define PROBE_DEEP_CHUNKS 4
/* The longest past, chunks, and tokens. */
const uint32_t SPEED_TIME_TOKENS = 8192 + PROBE_DEEP_CHUNKS * SPEED_PROBE_ROWS + 4 * (PROBE_PASSES + 2);

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

static int time_pass(SpeedZeros *zeros, uint32_t n_rows, bool logits, double *ret, ErrorDetail *reterr)
{
    ModelItem item = {.cache = zeros->cache, .tokens = zeros->ids, .n_tokens = n_rows};
    double begun = seconds_now();
    int r = model_forward(zeros->model, zeros->store, &item, 1, logits ? zeros->logits : NULL, reterr);

    *ret = seconds_now() - begun;
    return r;
}

/* Tokens from here on, as far as the context goes; the first two wake the device.  @most: tokens of a sequence before it begins anew; 0: no
 * limit. */
static int time_tokens(SpeedZeros *zeros, bool logits, uint32_t most, double *ret, ErrorDetail *reterr)
{
    Samples samples = {.begun = seconds_now()};
    double seconds = 0;
    bool enough = false;
    int r = 0;

    for (uint32_t i = 0; !enough && !r; i++) {
        if (most > 0 && kv_cache_length(zeros->cache) >= most)
            r = model_fold_kv(kv_cache_clear(zeros->cache));
        if (!r)
            r = time_pass(zeros, 1, logits, &seconds, reterr);
        if (i >= 2)
            enough = samples_add(&samples, seconds);
        enough |= kv_cache_length(zeros->cache) >= zeros->model->options.context;
    }
    *ret = samples_judge(&samples);
    return r;
}

/* Chunks at the beginning of a sequence; the first one wakes the device. */
static int time_chunks(SpeedZeros *zeros, double *ret, ErrorDetail *reterr)
{
    Samples samples = {.begun = seconds_now()};
    double seconds = 0;
    bool enough = false;
    int r = 0;

    for (uint32_t i = 0; !enough && !r; i++) {
        r = time_pass(zeros, zeros->model->options.max_rows, false, &seconds, reterr);
        if (!r)
            r = model_fold_kv(kv_cache_clear(zeros->cache));
        if (i >= 1)
            enough = samples_add(&samples, seconds);
    }
    *ret = samples_judge(&samples);
    return r;
}

int speed_time_token(SpeedZeros *zeros, double *ret, ErrorDetail *reterr)
{
    return time_tokens(zeros, true, PROBE_FIRST_TOKENS, ret, reterr);
}

int speed_time_beginning(SpeedZeros *zeros, SpeedTimes *ret, ErrorDetail *reterr)
{
    int r = time_chunks(zeros, &ret->chunk, reterr);

    return r ? r : speed_time_token(zeros, &ret->token, reterr);
}

/* A past of so many tokens or a little more, zeros where that can be. */
static int reach(SpeedZeros *zeros, uint32_t n_tokens, ErrorDetail *reterr)
{
    uint32_t length = kv_cache_length(zeros->cache), rows = zeros->model->options.max_rows;
    double seconds;
    int r = 0;

    if (length >= n_tokens)
        return 0;
    if (!kv_store_policy(zeros->store)->is_compatible)
        return model_fold_kv(kv_cache_add_blank(zeros->cache, n_tokens - length, reterr));
    for (uint32_t n; length < n_tokens && !r; length += n) {
        n = MIN(rows, n_tokens - length);
        r = time_pass(zeros, n, false, &seconds, reterr);
    }
    return r;
}

/* What the device says of the passes between. */
typedef struct Watch {
    bool asked;
    double begun;
    GpuOverlap overlap;
    double kernel_share; /* of the time that passed; 0 when the device did not say */
} Watch;

static Watch watch_begin(SpeedZeros *zeros)
{
    return (Watch){.asked = gpu_overlap_begin(zeros->gpu) == 0, .begun = seconds_now()};
}

static void watch_end(SpeedZeros *zeros, Watch *watch)
{
    double sec = seconds_now() - watch->begun;

    watch->asked = watch->asked && gpu_overlap_end(zeros->gpu, &watch->overlap) == 0;
    if (watch->asked)
        watch->kernel_share = MIN((double)watch->overlap.kernel_usec * 1e-6 / MAX(sec, 1e-9), 1.0);
}

/* Chunks after the past, one after the other; not the first one, because kernels may differ. */
static int time_deep_chunks(SpeedZeros *zeros, SpeedDepths *depths, ErrorDetail *reterr)
{
    Samples samples = {.n = 0};
    Watch watch = watch_begin(zeros);
    double seconds = 0;
    int r = 0;

    for (uint32_t i = 0; i < PROBE_DEEP_CHUNKS && !r; i++) {
        if (i == PROBE_DEEP_CHUNKS / 2)
            depths->chunk_at = kv_cache_length(zeros->cache);
        r = time_pass(zeros, zeros->model->options.max_rows, false, &seconds, reterr);
        if (i > 0)
            (void)samples_add(&samples, seconds);
    }
    watch_end(zeros, &watch);
    depths->chunk = samples_judge(&samples);
    depths->chunk_kernels = depths->chunk * watch.kernel_share;
    return r;
}

/* As time_tokens(); with what the device says of kernels and of what streams in meanwhile. */
static int time_deep_tokens(SpeedZeros *zeros, bool first, SpeedDepths *depths, ErrorDetail *reterr)
{
    Watch watch = watch_begin(zeros);
    uint32_t at = kv_cache_length(zeros->cache), n = depths->n++;
    int r = time_tokens(zeros, false, first ? PROBE_FIRST_TOKENS : 0, &depths->token[n], reterr);

    watch_end(zeros, &watch);
    depths->token_kernels[n] = depths->token[n] * watch.kernel_share;
    if (watch.overlap.upload_usec > 0)
        depths->copy_rates[n] = (double)watch.overlap.upload_bytes * 1e6 / (double)watch.overlap.upload_usec;
    depths->tokens_at[n] = first ? PROBE_FIRST_TOKENS / 2 : (at + kv_cache_length(zeros->cache)) / 2;
    return r;
}

int speed_time_depths(SpeedZeros *zeros, uint32_t n_most, SpeedDepths *ret, ErrorDetail *reterr)
{
    uint32_t rows = zeros->model->options.max_rows, context = zeros->model->options.context;
    /* Room for chunks and for tokens. */
    uint64_t room = PROBE_DEEP_CHUNKS * (uint64_t)rows + PROBE_PASSES + 2;
    uint32_t most = context > room ? (uint32_t)(context - room) : 0;
    SpeedDepths times = {.n = 0};
    int r = model_fold_kv(kv_cache_clear(zeros->cache));

    if (kv_store_policy(zeros->store)->is_compatible)
        most = MIN(most, (uint32_t)PROBE_RUN_PAST);
    for (uint32_t i = 0; i < MIN(n_most, (uint32_t)MODEL_SPEED_PASTS) && !r; i++) {
        uint32_t depth = MIN(PROBE_PASTS[i], most);

        if (i > 0 && depth <= times.tokens_at[i - 1])
            break;
        r = reach(zeros, depth, reterr);
        if ((r == MODEL_E_DEVICE_MEMORY || r == MODEL_E_HOST_MEMORY) && i > 1) {
            r = 0; /* the shorter ones have to do */
            break;
        }
        if (!r)
            r = time_deep_tokens(zeros, i == 0, &times, reterr);
        if (!r && i == PROBE_CHUNK_PAST)
            r = time_deep_chunks(zeros, &times, reterr);
    }
    *ret = times;
    return r;
}

/* All streamed parts once, as a step would bring them, and nothing else. */
static int copy_parts(SpeedZeros *zeros, double *ret_sec, ErrorDetail *reterr)
{
    const WeightsDevice *device = &zeros->model->weights;
    double begun = seconds_now();
    int r = 0;

    for (uint32_t i = 0; i < device->placement.n_parts && !r; i++) {
        const PlacementPart *part = &device->placement.parts[i];
        const uint8_t *block = weights_block(device->weights, part->block);

        if (part->streamed)
            r = model_fold_gpu(gpu_upload(zeros->gpu, GPU_QUEUE_UPLOAD, device->slots[i % device->placement.n_slots].buffer, 0,
                                          block + device->placement.pieces[part->first_piece].slices[0].from, part->bytes, GPU_WAIT_NONE,
                                          "measure", NULL));
    }
    if (!r)
        r = model_fold_gpu(gpu_drain(zeros->gpu, reterr));
    *ret_sec = seconds_now() - begun;
    return r;
}

int speed_time_copies(SpeedZeros *zeros, double *ret_rate, ErrorDetail *reterr)
{
    Samples samples = {.begun = seconds_now()};
    double seconds = 0;
    bool enough = false;
    int r = model_fold_gpu(gpu_drain(zeros->gpu, reterr));

    while (!enough && !r) {
        r = copy_parts(zeros, &seconds, reterr);
        enough = samples_add(&samples, seconds);
    }
    *ret_rate = (double)zeros->model->weights.placement.streamed_bytes / MAX(samples_judge(&samples), 1e-9);
    weights_device_abort(&zeros->model->weights); /* the slots hold something else now */
    return r;
}

