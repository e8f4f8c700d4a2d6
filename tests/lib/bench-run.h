#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* A model at work in a bench, and passes of it, timed.  Whatever fails ends the program. */

#include "daemon/model/model.h"

#define BENCH_MAX_ROWS 512u /* of a pass */

typedef struct BenchRun {
    Model *model;
    KvStore *store;
    KvCache *cache;
    float *logits;
    int32_t token; /* the next one */
} BenchRun;

double bench_now(void);
/* @file is the run's from here on. */
void bench_run_begin(Gpu *gpu, BenchRun *run, ModelFile *file, const ModelOptions *options, const KvPolicy *policy);
void bench_run_end(BenchRun *run);
void bench_run_clear(BenchRun *run);
/* Seconds of a prompt of so many tokens. */
double bench_prefill(BenchRun *run, uint32_t n_prompt, bool logits);
/* Seconds of a token: the median, that of each half of them, and the least. */
typedef struct BenchTokens {
    double sec, halves[2], least;
    uint32_t n_run; /* with those that warm up */
} BenchTokens;

/* From here on: @n_steps tokens or as many as take a fifth of a second, after some that warm up.  At most @most of a sequence before it begins
 * anew; 0: no limit. */
BenchTokens bench_decode(BenchRun *run, uint32_t n_steps, uint32_t most);
