/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-model FILE [KEY=VALUE …]: prefill and decode of one sequence, in this process, as JSON on standard output.
 *
 *   prompt=N    tokens of the prompt (512)       tokens=N   tokens to decode (64)      chunk=N   rows of a prefill pass (512)
 *   exact=1     compute: exact                   trace=FILE a Chrome trace of eight decode steps after the measured ones
 *   cache.KEY=VALUE  the keys of the YAML cache block, "cache.strategy=dynamic"        state=FOLDER for the calibration
 *   warmup=N    decode steps before the measured ones (4)    programs=FOLDER for compiled kernels
 *   device=N    budget of the device in percent of the weights: what does not fit streams     slots=N  it streams through (2)
 *   weights=copy | zero-copy    how
 */

#include "daemon/config/config.h"
#include "daemon/model/model.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <time.h>

typedef struct Bench {
    const char *model, *trace, *state, *programs;
    uint32_t n_prompt, n_tokens, chunk, n_warmup;
    bool exact;
    uint32_t device_percent; /* 0: no limit */
    ModelWeights weights;
    ConfigCache cache;
} Bench;

static double now(void)
{
    struct timespec time;

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void die(const char *what, int code, const ErrorDetail *detail)
{
    (void)fprintf(stderr, "bench-model: %s: %s (%d)\n", what, detail ? detail->text : "", code);
    exit(1);
}

static void parse(Bench *bench, char *argument)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    char *value = strchr(argument, '=');

    if (!value)
        die("KEY=VALUE is expected", 0, &(ErrorDetail){"see the head of tests/bench/bench-model.c"});
    *value++ = 0;
    if (!strncmp(argument, "cache.", 6)) {
        int r = config_cache_set(&bench->cache, argument + 6, value, &detail);

        if (r)
            die(argument, r, &detail);
    } else if (!strcmp(argument, "prompt")) {
        bench->n_prompt = (uint32_t)strtoul(value, NULL, 10);
    } else if (!strcmp(argument, "tokens")) {
        bench->n_tokens = (uint32_t)strtoul(value, NULL, 10);
    } else if (!strcmp(argument, "warmup")) {
        bench->n_warmup = (uint32_t)strtoul(value, NULL, 10);
    } else if (!strcmp(argument, "chunk")) {
        bench->chunk = (uint32_t)strtoul(value, NULL, 10);
    } else if (!strcmp(argument, "exact")) {
        bench->exact = value[0] == '1';
    } else if (!strcmp(argument, "device")) {
        bench->device_percent = (uint32_t)strtoul(value, NULL, 10);
    } else if (!strcmp(argument, "slots")) {
        bench->weights.n_slots = (uint32_t)strtoul(value, NULL, 10);
    } else if (!strcmp(argument, "weights")) {
        bench->weights.transfer = !strcmp(value, "copy") ? KV_TRANSFER_COPY : KV_TRANSFER_ZERO_COPY;
    } else if (!strcmp(argument, "trace")) {
        bench->trace = value;
    } else if (!strcmp(argument, "state")) {
        bench->state = value;
    } else if (!strcmp(argument, "programs")) {
        bench->programs = value;
    } else {
        die("unknown key", 0, &(ErrorDetail){"see the head of tests/bench/bench-model.c"});
    }
}

/* Ids that every model has; spread over the vocabulary so that embedding rows are not all in the cache. */
static int32_t prompt_token(uint32_t position, uint32_t n_vocab)
{
    return (int32_t)((position * 2654435761u >> 7) % n_vocab);
}

static double run_prefill(const Bench *bench, Model *model, KvStore *store, KvCache *cache, float *logits)
{
    uint32_t n_vocab = model_file_params(model_file(model))->n_vocab;
    int32_t *tokens = calloc(bench->chunk, sizeof(*tokens));
    ErrorDetail detail = ERROR_DETAIL_NULL;
    double begin = now();

    for (uint32_t done = 0; done < bench->n_prompt;) {
        uint32_t n = MIN(bench->chunk, bench->n_prompt - done);
        ModelItem item = {.cache = cache, .tokens = tokens, .n_tokens = n};
        int r;

        for (uint32_t i = 0; i < n; i++)
            tokens[i] = prompt_token(done + i, n_vocab);
        r = model_forward(model, store, &item, 1, done + n == bench->n_prompt ? logits : NULL, &detail);
        if (r)
            die("prefill", r, &detail);
        done += n;
    }
    free(tokens);
    return now() - begin;
}

/* @ret_best: the quickest step, what a busy machine has disturbed least; may be NULL. */
static double run_decode(Model *model, KvStore *store, KvCache *cache, float *logits, uint32_t n, int32_t *token, double *ret_best)
{
    uint32_t n_vocab = model_file_params(model_file(model))->n_vocab;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    double begin = now(), quickest = 1e9, last = begin;

    for (uint32_t i = 0; i < n; i++) {
        ModelItem item = {.cache = cache, .tokens = token, .n_tokens = 1};
        uint32_t best = 0;
        int r = model_forward(model, store, &item, 1, logits, &detail);

        if (r)
            die("decode", r, &detail);
        for (uint32_t v = 1; v < n_vocab; v++)
            if (logits[v] > logits[best])
                best = v;
        *token = (int32_t)best;
        quickest = MIN(quickest, now() - last);
        last = now();
    }
    if (ret_best)
        *ret_best = quickest;
    return now() - begin;
}

static void run_trace(const Bench *bench, Gpu *gpu, Model *model, KvStore *store, KvCache *cache, float *logits, int32_t *token)
{
    int fd = open(bench->trace, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);

    if (fd < 0 || gpu_trace_start(gpu))
        die(bench->trace, -errno, NULL);
    (void)run_decode(model, store, cache, logits, 8, token, NULL);
    if (gpu_trace_stop(gpu, fd))
        die(bench->trace, -EIO, NULL);
    (void)close(fd);
}

/* How it fits. */
static ModelFit plan(const Bench *bench, Gpu *gpu, const ModelFile *file, const KvPolicy *policy)
{
    ModelOptions options = {.exact = bench->exact, .max_rows = bench->chunk, .max_sequences = 1, .weights = bench->weights};
    uint64_t available = gpu_info(gpu)->budget_bytes;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    ModelFit fit;
    int r = model_fit(gpu_info(gpu), file, &options, policy, available, &fit, &detail);

    if (!r && bench->device_percent > 0) {
        available = fit.plan.weight_total_bytes * bench->device_percent / 100;
        r = model_fit(gpu_info(gpu), file, &options, policy, available, &fit, &detail);
    }
    if (r)
        die("plan", r, &detail);
    gpu_set_budget(gpu, available);
    (void)printf("{\"weight_bytes\": %" PRIu64 ", \"weight_total_bytes\": %" PRIu64 ", \"weight_streamed_bytes\": %" PRIu64
                 ", \"weight_in_place_bytes\": %" PRIu64 ", \"layers_resident\": %u, \"planned_device_bytes\": %" PRIu64 ", ",
                 fit.plan.weight_bytes, fit.plan.weight_total_bytes, fit.plan.weight_streamed_bytes, fit.plan.weight_in_place_bytes,
                 fit.plan.n_layers_resident, fit.plan.device_total_bytes);
    return fit;
}

static void report(const Bench *bench, Gpu *gpu, KvStore *store, KvCache *cache, double prefill, double decode, double best,
                   const GpuCounters *before,
                   const GpuCounters *after)
{
    const KvPolicy *policy = kv_store_policy(store);
    uint64_t used[GPU_PURPOSE_X_MAX], total;
    KvBytes bytes;

    gpu_memory_used(gpu, used, &total);
    kv_cache_bytes(cache, &bytes);
    (void)printf("\"device\": \"%s\", \"simd\": %d, \"strategy\": \"%s\", \"k_bits\": %u, \"v_bits\": %u, \"prompt\": %u, \"tokens\": %u",
                 gpu_info(gpu)->name, (int)gpu_info(gpu)->simd, kv_strategy_to_string(policy->strategy), policy->form.k_bits,
                 policy->form.v_bits, bench->n_prompt, bench->n_tokens);
    (void)printf(", \"prefill_rate\": %.2f, \"decode_rate\": %.2f, \"best_decode_rate\": %.2f, \"launches_per_token\": %.2f, \"uploads_per_token\": %.2f",
                 bench->n_prompt / prefill, bench->n_tokens / decode, 1 / best, (double)(after->n_launches - before->n_launches) / bench->n_tokens,
                 (double)(after->n_uploads - before->n_uploads) / bench->n_tokens);
    (void)printf(", \"upload_bytes_per_token\": %.0f, \"buffers_created\": %" PRIu64 ", \"programs_built\": %" PRIu64,
                 (double)(after->upload_bytes - before->upload_bytes) / bench->n_tokens, after->n_buffers_created - before->n_buffers_created,
                 after->n_programs_built - before->n_programs_built);
    (void)printf(", \"device_bytes\": %" PRIu64 ", \"staging_bytes\": %" PRIu64 ", \"tail_bytes\": %" PRIu64 ", \"cache_host_bytes\": %" PRIu64
                 ", \"tile_blocks\": %u, \"slots\": %u}\n",
                 total, used[GPU_PURPOSE_STAGING], used[GPU_PURPOSE_TAIL], bytes.host, policy->tile_blocks, policy->n_slots);
}

int main(int argc, char **argv)
{
    Bench bench = {.n_prompt = 512, .n_tokens = 64, .chunk = 512, .n_warmup = 4};
    const ConfigCache *blocks[] = {&bench.cache};
    GpuOptions gpu_options = {.cache_dir = NULL};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    ModelFit fit;
    ModelFile *file;
    Model *model;
    Gpu *gpu;
    KvStore *store;
    KvCache *cache;
    KvPolicy policy;
    GpuCounters before, after;
    double prefill, decode, best = 1;
    int32_t token;
    float *logits;
    int r;

    if (argc < 2)
        die("usage", 0, &(ErrorDetail){"bench-model FILE [KEY=VALUE …]"});
    bench.model = argv[1];
    for (int i = 2; i < argc; i++)
        parse(&bench, argv[i]);
    gpu_options.cache_dir = bench.programs;
    if ((r = gpu_open(&gpu_options, &gpu, &detail)) || (r = model_file_open(bench.model, bench.state, &file, &detail)) ||
        (r = config_policy(blocks, 1, bench.exact, &policy, &detail)))
        die("start", r, &detail);
    fit = plan(&bench, gpu, file, &policy);
    bench.chunk = fit.options.max_rows;
    if ((r = model_new(gpu, file, &fit.options, &model, &detail)) || (r = model_store_new(model, &fit.policy, &store, &detail)) ||
        (r = kv_cache_new(store, &cache, &detail)))
        die("start", r, &detail);
    logits = calloc(model_file_params(model_file(model))->n_vocab, sizeof(*logits));
    token = prompt_token(bench.n_prompt, model_file_params(model_file(model))->n_vocab);
    /* Kernels of every shape have run once before anything is measured. */
    {
        Bench small = bench;

        small.n_prompt = MIN(bench.n_prompt, bench.chunk + 3);
        if (small.n_prompt)
            (void)run_prefill(&small, model, store, cache, logits);
        (void)run_decode(model, store, cache, logits, 2, &token, NULL);
        (void)kv_cache_clear(cache);
    }
    prefill = bench.n_prompt ? run_prefill(&bench, model, store, cache, logits) : 1;
    (void)run_decode(model, store, cache, logits, bench.n_warmup, &token, NULL);
    gpu_counters(gpu, &before);
    decode = run_decode(model, store, cache, logits, bench.n_tokens, &token, &best);
    gpu_counters(gpu, &after);
    if (bench.trace)
        run_trace(&bench, gpu, model, store, cache, logits, &token);
    report(&bench, gpu, store, cache, prefill, decode, best, &before, &after);
    kv_cache_free(cache);
    kv_store_free(store);
    model_free(model);
    gpu_free(gpu);
    free(logits);
    return 0;
}
