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
/* Seconds of a token from here on, the median of @n_steps of them or as many as take a fifth of a second, after some that warm up; those of
 * each half.  At most @most tokens of a sequence before it begins anew; 0: no limit.  @ret_tokens: run in all. */
double bench_decode(BenchRun *run, uint32_t n_steps, uint32_t most, uint32_t *ret_tokens, double ret_halves[static 2]);
