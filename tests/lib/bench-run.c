/* SPDX-License-Identifier: Apache-2.0 */
/* A model at work in a bench. */

#include "tests/lib/bench-run.h"
#include "tests/lib/bench-keys.h"

#include <string.h>
#include <time.h>

/* Passes after others are slower at first: weights come from memory that later are in a cache. */
#define WARMUP          4u
#define WARMUP_SECONDS  0.1
#define MEASURE_SECONDS 0.2
#define MAX_STEPS       512u

double bench_now(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void bench_run_begin(Gpu *gpu, BenchRun *run, ModelFile *file, const ModelOptions *options, const KvPolicy *policy)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    *run = (BenchRun){.token = 1};
    bench_must(model_new(gpu, file, options, &run->model, &detail), "model", &detail);
    bench_must(model_store_new(run->model, policy, &run->store, &detail), "store", &detail);
    bench_must(kv_cache_new(run->store, &run->cache, &detail), "cache", &detail);
    run->logits = calloc(model_file_params(file)->n_vocab, sizeof(*run->logits));
    bench_must(run->logits ? 0 : -ENOMEM, "logits", NULL);
}

void bench_run_end(BenchRun *run)
{
    (void)kv_cache_free(run->cache);
    (void)kv_store_free(run->store);
    (void)model_free(run->model);
    free(run->logits);
}

void bench_run_clear(BenchRun *run)
{
    bench_must(kv_cache_clear(run->cache), "clear", NULL);
}

double bench_prefill(BenchRun *run, uint32_t n_prompt, bool logits)
{
    uint32_t n_vocab = model_file_params(model_file(run->model))->n_vocab, at_once = model_options(run->model)->max_rows;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    double begun = bench_now();

    for (uint32_t done = 0; done < n_prompt;) {
        int32_t tokens[BENCH_MAX_ROWS];
        ModelItem item = {.cache = run->cache, .tokens = tokens, .n_tokens = MIN(at_once, n_prompt - done)};

        /* Spread over the vocabulary, so that embedding rows are not all in the cache. */
        for (uint32_t i = 0; i < item.n_tokens; i++)
            tokens[i] = (int32_t)(((done + i) * 2654435761u >> 7) % n_vocab);
        done += item.n_tokens;
        bench_must(model_forward(run->model, run->store, &item, 1, logits && done == n_prompt ? run->logits : NULL, &detail), "prefill", &detail);
    }
    return bench_now() - begun;
}

static double step(BenchRun *run)
{
    uint32_t n_vocab = model_file_params(model_file(run->model))->n_vocab, best = 0;
    ModelItem item = {.cache = run->cache, .tokens = &run->token, .n_tokens = 1};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    double begun = bench_now();

    bench_must(model_forward(run->model, run->store, &item, 1, run->logits, &detail), "decode", &detail);
    for (uint32_t v = 1; v < n_vocab; v++)
        best = run->logits[v] > run->logits[best] ? v : best;
    run->token = (int32_t)best;
    return bench_now() - begun;
}

static double median(double *values, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t j = i; j > 0 && values[j - 1] > values[j]; j--) {
            double value = values[j];

            values[j] = values[j - 1];
            values[j - 1] = value;
        }
    return values[n / 2];
}

BenchTokens bench_decode(BenchRun *run, uint32_t n_steps, uint32_t most)
{
    double seconds[MAX_STEPS], half[MAX_STEPS], begun = bench_now();
    uint32_t n = 0, n_warm = 0;
    BenchTokens tokens;

    while (n < MAX_STEPS && (n < n_steps || bench_now() - begun < MEASURE_SECONDS)) {
        bool warm = n_warm >= WARMUP && (n > 0 || bench_now() - begun >= WARMUP_SECONDS);

        if (most > 0 && kv_cache_length(run->cache) >= most)
            bench_run_clear(run);
        if (!warm) {
            (void)step(run);
            n_warm++;
            continue;
        }
        begun = n == 0 ? bench_now() : begun;
        seconds[n++] = step(run);
    }
    tokens.n_run = n_warm + n;
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t first = i * (n / 2), end = i ? n : (n + 1) / 2;

        memcpy(half, seconds + first, (end - first) * sizeof(*half));
        tokens.halves[i] = median(half, end - first);
    }
    tokens.sec = median(seconds, n);
    tokens.least = seconds[0]; /* in order now */
    return tokens;
}

