/* SPDX-License-Identifier: Apache-2.0 */
/* A model without weights, to drive the cache. */

#include "tests/lib/kv-bench.h"

#include <math.h>
#include <string.h>

static void must(int r, const char *what)
{
    if (r) {
        fprintf(stderr, "%s: error %d\n", what, r);
        abort();
    }
}

static void *must_alloc(size_t n, size_t size)
{
    void *memory = calloc(n, size);

    must(memory ? 0 : -ENOMEM, "calloc");
    return memory;
}

/* A number in [-1, 1) from a hash. */
static float noise(uint64_t key)
{
    key = (key ^ (key >> 31)) * 0x9e3779b97f4a7c15u;
    key = (key ^ (key >> 29)) * 0xbf58476d1ce4e5b9u;
    return (float)(int32_t)(key >> 32) * 0x1p-31f;
}

void kv_bench_init(KvBench *bench, Gpu *gpu, uint32_t max_sequences)
{
    const KvShape shape = {.n_heads = 4, .n_kv_heads = 2, .k_head_dim = 64, .v_head_dim = 64, .rotary_dim = 64};
    uint32_t values = shape.n_kv_heads * shape.k_head_dim;

    *bench = (KvBench){.gpu = gpu};
    bench->qkv_width = (uint32_t)kv_row_values(&shape);
    bench->out_width = shape.n_heads * shape.v_head_dim;
    bench->inv_freq = must_alloc(shape.rotary_dim / 2, sizeof(float));
    bench->means = must_alloc(KV_BENCH_LAYERS * 2 * values, sizeof(float));
    for (uint32_t f = 0; f < shape.rotary_dim / 2; f++)
        bench->inv_freq[f] = (float)pow(10000.0, -2.0 * f / shape.rotary_dim);
    for (uint32_t i = 0; i < KV_BENCH_LAYERS * 2 * values; i++)
        bench->means[i] = noise(i);
    for (uint32_t l = 0; l < KV_BENCH_LAYERS; l++) {
        size_t n = KV_BENCH_MAX_ROWS;

        bench->calibration[l] =
            (KvCalibration){.k_mean = bench->means + 2 * l * values, .v_mean = bench->means + (2 * l + 1) * values};
        bench->qkv_memory[l] = must_alloc(n * bench->qkv_width, sizeof(float));
        bench->out_memory[l] = must_alloc(n * bench->out_width, sizeof(float));
        must(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, n * bench->qkv_width * sizeof(float), &bench->qkv[l], NULL), "buffer");
        must(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, n * bench->out_width * sizeof(float), &bench->out[l], NULL), "buffer");
    }
    bench->model = (KvModel){
        .n_layers = KV_BENCH_LAYERS,
        .shape = shape,
        .scale = 0.125f,
        .inv_freq = bench->inv_freq,
        .calibration = bench->calibration,
        .exact = true,
        .max_rows = KV_BENCH_MAX_ROWS,
        .max_sequences = max_sequences,
    };
}

void kv_bench_deinit(KvBench *bench)
{
    for (uint32_t l = 0; l < KV_BENCH_LAYERS; l++) {
        (void)gpu_buffer_free(bench->qkv[l]);
        (void)gpu_buffer_free(bench->out[l]);
        free(bench->qkv_memory[l]);
        free(bench->out_memory[l]);
    }
    free(bench->inv_freq);
    free(bench->means);
}

KvPolicy kv_bench_policy(KvStrategy strategy, KvFormKind kind)
{
    KvPolicy policy = kv_policy_preset(strategy, kind == KV_FORM_F32);

    policy.max_cache_tokens = KV_BENCH_MAX_TOKENS;
    return policy;
}

KvStream *kv_stream_new(const KvBench *bench, uint32_t seed, uint32_t n_tokens)
{
    KvStream *stream = must_alloc(1, sizeof(*stream));

    stream->out = must_alloc((size_t)KV_BENCH_MAX_TOKENS * KV_BENCH_LAYERS * bench->out_width, sizeof(float));
    stream->n_tokens = n_tokens;
    for (uint32_t i = 0; i < KV_BENCH_MAX_TOKENS; i++)
        stream->ids[i] = seed;
    return stream;
}

KvStream *kv_stream_branch(const KvBench *bench, const KvStream *from, uint32_t n_same, uint32_t seed)
{
    KvStream *stream = kv_stream_new(bench, seed, from->n_tokens);

    memcpy(stream->ids, from->ids, n_same * sizeof(uint32_t));
    memcpy(stream->out, from->out, (size_t)n_same * KV_BENCH_LAYERS * bench->out_width * sizeof(float));
    return stream;
}

KvStream *kv_stream_free(KvStream *stream)
{
    if (stream)
        free(stream->out);
    free(stream);
    return NULL;
}

static void fill_row(const KvBench *bench, uint32_t layer, uint32_t id, uint32_t position, float *qkv)
{
    uint64_t key = ((uint64_t)id << 40) + ((uint64_t)position << 20) + ((uint64_t)layer << 16);
    uint32_t q_width = bench->out_width, values = (bench->qkv_width - q_width) / 2;
    const float *means = bench->means + 2 * layer * values;

    for (uint32_t c = 0; c < bench->qkv_width; c++)
        qkv[c] = 2.0f * noise(key + c) + (c >= q_width ? means[c - q_width] : 0.0f);
}

static void fill_inputs(KvBench *bench, const KvBenchItem *items, uint32_t n_items)
{
    uint32_t row = 0;

    for (uint32_t i = 0; i < n_items; i++)
        for (uint32_t t = 0; t < items[i].n_tokens; t++, row++) {
            uint32_t position = kv_cache_length(items[i].cache) + t;

            for (uint32_t l = 0; l < KV_BENCH_LAYERS; l++)
                fill_row(bench, l, items[i].stream->ids[position], position,
                         bench->qkv_memory[l] + (size_t)row * bench->qkv_width);
        }
    for (uint32_t l = 0; l < KV_BENCH_LAYERS; l++)
        must(gpu_upload(bench->gpu, GPU_QUEUE_COMPUTE, bench->qkv[l], 0, bench->qkv_memory[l],
                        (uint64_t)row * bench->qkv_width * sizeof(float), GPU_WAIT_NONE, "bench qkv", NULL),
             "upload");
}

static void keep_outputs(const KvBench *bench, const KvBenchItem *items, uint32_t n_items)
{
    size_t width = bench->out_width, row = 0;

    for (uint32_t i = 0; i < n_items; i++)
        for (uint32_t t = 0; t < items[i].n_tokens; t++, row++) {
            size_t position = kv_cache_length(items[i].cache) + t;

            for (uint32_t l = 0; l < KV_BENCH_LAYERS; l++)
                memcpy(items[i].stream->out + (position * KV_BENCH_LAYERS + l) * width, bench->out_memory[l] + row * width,
                       width * sizeof(float));
        }
}

int kv_bench_pass(KvBench *bench, KvStore *store, const KvBenchItem *items, uint32_t n_items, ErrorDetail *reterr)
{
    KvPassItem pass_items[16];
    KvPass *pass;
    uint32_t n_rows = 0;
    int r;

    for (uint32_t i = 0; i < n_items; i++) {
        pass_items[i] = (KvPassItem){items[i].cache, items[i].n_tokens};
        n_rows += items[i].n_tokens;
    }
    must(gpu_step_begin(bench->gpu), "step");
    r = kv_pass_begin(store, pass_items, n_items, &pass, reterr);
    if (r)
        return r;
    fill_inputs(bench, items, n_items);
    for (uint32_t l = 0; l < KV_BENCH_LAYERS; l++) {
        r = kv_pass_layer(pass, l, bench->qkv[l], bench->out[l], reterr);
        if (r) {
            (void)kv_pass_abort(pass);
            return r;
        }
        must(gpu_download(bench->gpu, GPU_QUEUE_COMPUTE, bench->out[l], 0, bench->out_memory[l],
                          (uint64_t)n_rows * bench->out_width * sizeof(float), GPU_WAIT_NONE, "bench out", NULL),
             "download");
    }
    must(kv_pass_prefetch(pass), "prefetch");
    must(gpu_step_finish(bench->gpu, NULL), "finish");
    keep_outputs(bench, items, n_items);
    must(kv_pass_commit(pass), "commit");
    return 0;
}

void kv_bench_run(KvBench *bench, KvStore *store, KvCache *cache, KvStream *stream, uint32_t end, uint32_t chunk)
{
    while (kv_cache_length(cache) < end) {
        uint32_t n = MIN(chunk, end - kv_cache_length(cache));

        must(kv_bench_pass(bench, store, &(KvBenchItem){cache, stream, n}, 1, NULL), "pass");
    }
}
