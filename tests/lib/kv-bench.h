#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model without weights, to drive the cache: the queries, keys and values of a token are random numbers that depend on its id, its
 * position and the layer only.  Sequences are lists of ids; what attention makes of every position is kept for comparison.
 */

#include "cache/kv-store.h"

#define KV_BENCH_MAX_TOKENS 1536
#define KV_BENCH_MAX_ROWS   512
#define KV_BENCH_LAYERS     2

/* The tokens of one sequence and the attention outputs at each position. */
typedef struct KvStream {
    uint32_t n_tokens;
    uint32_t ids[KV_BENCH_MAX_TOKENS];
    float *out; /* (KV_BENCH_MAX_TOKENS, KV_BENCH_LAYERS, n_heads * v_head_dim) */
} KvStream;

typedef struct KvBench {
    Gpu *gpu;
    KvModel model;
    float *inv_freq, *means;
    KvCalibration calibration[KV_BENCH_LAYERS];
    GpuBuffer *qkv[KV_BENCH_LAYERS], *out[KV_BENCH_LAYERS];
    float *qkv_memory[KV_BENCH_LAYERS], *out_memory[KV_BENCH_LAYERS];
    uint32_t qkv_width, out_width;
} KvBench;

typedef struct KvBenchItem {
    KvCache *cache;
    KvStream *stream; /* tokens [length of the cache, + n_tokens) are run */
    uint32_t n_tokens;
} KvBenchItem;

/* Out of memory or a failing device end the program.  @max_sequences: tail slots of its stores. */
void kv_bench_init(KvBench *bench, Gpu *gpu, uint32_t max_sequences);
void kv_bench_deinit(KvBench *bench);
KvPolicy kv_bench_policy(KvStrategy strategy, KvFormKind kind);

KvStream *kv_stream_new(const KvBench *bench, uint32_t seed, uint32_t n_tokens);
/* The same first @n_same tokens, others after. */
KvStream *kv_stream_branch(const KvBench *bench, const KvStream *from, uint32_t n_same, uint32_t seed);
KvStream *kv_stream_free(KvStream *stream);
DEFINE_CLEANUP(KvStream, kv_stream_free)

/* One pass; the result of kv_pass_begin() or of the first layer that fails. */
int kv_bench_pass(KvBench *bench, KvStore *store, const KvBenchItem *items, uint32_t n_items, ErrorDetail *reterr);
/* Runs one cache up to @end tokens in passes of @chunk. */
void kv_bench_run(KvBench *bench, KvStore *store, KvCache *cache, KvStream *stream, uint32_t end, uint32_t chunk);
