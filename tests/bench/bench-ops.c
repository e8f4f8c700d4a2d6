/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Speed of everything of a decoder but attention, at SmolLM2-135M's shapes and types: one token, and a prefill of 512.
 * All layers have their own weights, so that a token reads what a real one reads (about 96 MB).  Beside each figure stands
 * what the same bytes cost to read plainly, by as many threads, in the same run; and the processor time of the process, which
 * tells on a busy machine what the kernels themselves need.
 *
 * Usage: bench-ops [--exact] [--wrap] [--rounds N]     --wrap: weights stay in host memory (zero copy), in huge pages
 */

#include "opencl/ops.h"
#include "tests/lib/patience.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define LAYERS       30
#define EMBD         576
#define QKV          960
#define FF           1536
#define VOCABULARY   49152
#define PREFILL      512
#define FEW          8 /* rows of a step of several sequences */
#define NORM_EPS     1e-5f
#define HUGE_PAGE    (2u << 20)

static double clock_usec(clockid_t clock)
{
    struct timespec time;

    (void)clock_gettime(clock, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

static void must(int r, const char *what, const ErrorDetail *detail)
{
    if (r == 0)
        return;
    (void)fprintf(stderr, "%s: %d %s\n", what, r, detail ? detail->text : "");
    exit(EXIT_FAILURE);
}

/* ---- plain reading ----------------------------------------------------------------------------------------------- */

typedef struct Reader {
    const uint64_t *words;
    size_t n;
    uint64_t sum;
} Reader;

static void *read_words(void *userdata)
{
    Reader *reader = userdata;
    uint64_t sums[8] = {0};

    for (size_t i = 0; i + 8 <= reader->n; i += 8)
        for (size_t j = 0; j < 8; j++)
            sums[j] += reader->words[i + j];
    for (size_t j = 0; j < 8; j++)
        reader->sum += sums[j];
    return NULL;
}

/* Microseconds to read the bytes with @n_threads. */
static double read_usec(const void *memory, uint64_t bytes, uint32_t n_threads)
{
    Reader readers[64];
    pthread_t threads[64];
    double start = clock_usec(CLOCK_MONOTONIC);

    n_threads = MIN(n_threads, (uint32_t)N_ELEMENTS(readers));
    for (uint32_t i = 0; i < n_threads; i++) {
        readers[i] = (Reader){(const uint64_t *)memory + bytes / 8 / n_threads * i, bytes / 8 / n_threads, 0};
        must(pthread_create(&threads[i], NULL, read_words, &readers[i]), "pthread_create", NULL);
    }
    for (uint32_t i = 0; i < n_threads; i++)
        must(pthread_join(threads[i], NULL), "pthread_join", NULL);
    return clock_usec(CLOCK_MONOTONIC) - start;
}

/* ---- the model's products ---------------------------------------------------------------------------------------- */

typedef struct Bench {
    Gpu *gpu;
    Ops *ops, *head_ops;
    GpuBuffer *weights, *norm, *ids, *hidden, *qkv, *attention, *wide, *logits;
    uint64_t weight_bytes, host_bytes;
    void *host;
    OpsWeight q[LAYERS], k[LAYERS], v[LAYERS], o[LAYERS], gate[LAYERS], up[LAYERS], down[LAYERS], head;
} Bench;

static OpsWeight place(Bench *bench, uint32_t type, uint32_t n_rows, uint32_t n_cols)
{
    OpsWeight weight = {weight_type_info(type), NULL, bench->weight_bytes, n_rows, n_cols};
    uint64_t bytes = 0;

    must(weight_device_bytes(weight.type, n_rows, n_cols, &bytes), "weight_device_bytes", NULL);
    bench->weight_bytes += (bytes + 63) / 64 * 64;
    return weight;
}

static void place_all(Bench *bench)
{
    for (uint32_t i = 0; i < LAYERS; i++) {
        bench->q[i] = place(bench, WEIGHT_TYPE_Q4_1, 576, EMBD);
        bench->k[i] = place(bench, WEIGHT_TYPE_Q4_1, 192, EMBD);
        bench->v[i] = place(bench, WEIGHT_TYPE_Q4_1, 192, EMBD);
        bench->o[i] = place(bench, WEIGHT_TYPE_Q4_1, EMBD, EMBD);
        bench->gate[i] = place(bench, WEIGHT_TYPE_Q4_1, FF, EMBD);
        bench->up[i] = place(bench, WEIGHT_TYPE_Q4_1, FF, EMBD);
        bench->down[i] = place(bench, WEIGHT_TYPE_Q4_1, EMBD, FF);
    }
    bench->head = place(bench, WEIGHT_TYPE_Q8_0, VOCABULARY, EMBD);
}

static void buffer_new(Bench *bench, uint64_t bytes, GpuBuffer **ret)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    must(gpu_buffer_new(bench->gpu, GPU_PURPOSE_OTHER, bytes, ret, &detail), "gpu_buffer_new", &detail);
    must(gpu_fill_zero(bench->gpu, GPU_QUEUE_COMPUTE, *ret, 0, bytes), "gpu_fill_zero", NULL);
}

static void bench_open(Bench *bench, bool exact, bool wrap)
{
    const OpsOptions options = {exact, PREFILL, FF}, head_options = {exact, PREFILL, FF};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuOptions gpu_options = {.deadline_usec = PATIENCE_USEC};

    place_all(bench);
    must(gpu_open(&gpu_options, &bench->gpu, &detail), "gpu_open", &detail);
    must(ops_new(bench->gpu, &options, &bench->ops, &detail), "ops_new", &detail);
    must(ops_prepare_type(bench->ops, weight_type_info(WEIGHT_TYPE_Q4_1), &detail), "ops_prepare_type", &detail);
    must(ops_new(bench->gpu, &head_options, &bench->head_ops, &detail), "ops_new", &detail);
    must(ops_prepare_type(bench->head_ops, weight_type_info(WEIGHT_TYPE_Q8_0), &detail), "ops_prepare_type", &detail);
    /* in huge pages, as a plain reader would like it */
    bench->host_bytes = (bench->weight_bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    bench->host = aligned_alloc(HUGE_PAGE, bench->host_bytes);
    if (!bench->host)
        must(-ENOMEM, "aligned_alloc", NULL);
    (void)madvise(bench->host, bench->host_bytes, MADV_HUGEPAGE);
    /* small halves whatever the offset: bytes 0x1c1c.. are 0.004 */
    (void)memset(bench->host, 0x1c, bench->host_bytes);
    if (wrap)
        must(gpu_buffer_wrap(bench->gpu, bench->host, bench->host_bytes, &bench->weights, &detail), "gpu_buffer_wrap", &detail);
    else
        buffer_new(bench, bench->weight_bytes, &bench->weights);
    buffer_new(bench, EMBD * 4, &bench->norm);
    buffer_new(bench, PREFILL * 4, &bench->ids);
    buffer_new(bench, PREFILL * EMBD * 4, &bench->hidden);
    buffer_new(bench, PREFILL * QKV * 4, &bench->qkv);
    buffer_new(bench, PREFILL * EMBD * 4, &bench->attention);
    buffer_new(bench, PREFILL * FF * 4, &bench->wide);
    buffer_new(bench, FEW * VOCABULARY * 4, &bench->logits);
    if (!wrap)
        must(gpu_upload(bench->gpu, GPU_QUEUE_COMPUTE, bench->weights, 0, bench->host, bench->weight_bytes, GPU_WAIT_NONE,
                        "weights", NULL),
             "gpu_upload", NULL);
    must(gpu_drain(bench->gpu, &detail), "gpu_drain", &detail);
}

static void bench_close(Bench *bench)
{
    GpuBuffer *buffers[] = {bench->weights,   bench->norm, bench->ids,  bench->hidden, bench->qkv,
                            bench->attention, bench->wide, bench->logits};

    for (size_t i = 0; i < N_ELEMENTS(buffers); i++)
        (void)gpu_buffer_free(buffers[i]);
    (void)ops_free(bench->head_ops);
    (void)ops_free(bench->ops);
    (void)gpu_free(bench->gpu);
    free(bench->host);
}

typedef enum Piece { PIECE_QKV = 1, PIECE_O = 2, PIECE_GATE_UP = 4, PIECE_DOWN = 8, PIECE_HEAD = 16, PIECE_EMBED = 32,
                     PIECE_CHAIN = 64 } Piece;

static OpsWeight in(const Bench *bench, OpsWeight weight)
{
    weight.buffer = bench->weights;
    return weight;
}

static OpsLinear linear_of(Bench *bench, Piece piece, uint32_t layer)
{
    switch (piece) {
    case PIECE_QKV:
        return (OpsLinear){.x = bench->hidden, .norm_weight = bench->norm, .norm_eps = NORM_EPS, .n_weights = 3, .y = bench->qkv, .fine = true,
                           .weights = {in(bench, bench->q[layer]), in(bench, bench->k[layer]), in(bench, bench->v[layer])}};
    case PIECE_O:
        return (OpsLinear){.x = bench->attention, .n_weights = 1, .weights = {in(bench, bench->o[layer])},
                           .epilogue = OPS_EPILOGUE_ADD, .y = bench->hidden, .fine = true};
    case PIECE_GATE_UP:
        return (OpsLinear){.x = bench->hidden, .norm_weight = bench->norm, .norm_eps = NORM_EPS, .n_weights = 2,
                           .weights = {in(bench, bench->gate[layer]), in(bench, bench->up[layer])},
                           .epilogue = OPS_EPILOGUE_SWIGLU, .y = bench->wide};
    case PIECE_DOWN:
        return (OpsLinear){.x = bench->wide, .n_weights = 1, .weights = {in(bench, bench->down[layer])},
                           .epilogue = OPS_EPILOGUE_ADD, .y = bench->hidden, .fine = true};
    case PIECE_HEAD:
    case PIECE_EMBED:
    case PIECE_CHAIN:
        break;
    }
    return (OpsLinear){.x = bench->hidden, .norm_weight = bench->norm, .norm_eps = NORM_EPS, .n_weights = 1,
                       .weights = {in(bench, bench->head)}, .y = bench->logits, .fine = true};
}

/* o, gate and up, down, and the next layer's qkv in one call, as a model's graph gives them. */
static void run_chain(Bench *bench, uint32_t layer, uint32_t n_rows)
{
    OpsLinear linears[4] = {linear_of(bench, PIECE_O, layer), linear_of(bench, PIECE_GATE_UP, layer),
                            linear_of(bench, PIECE_DOWN, layer), linear_of(bench, PIECE_QKV, (layer + 1) % LAYERS)};

    must(ops_chain(bench->ops, linears, 4, n_rows), "ops_chain", NULL);
}

/* A prefill wants the logits of its last row, a step of several sequences those of each. */
static uint32_t head_rows(uint32_t n_rows)
{
    return n_rows <= FEW ? n_rows : 1;
}

static void run_pieces(Bench *bench, unsigned pieces, uint32_t n_rows)
{
    const OpsWeight table = in(bench, bench->head);

    if (pieces & PIECE_EMBED)
        must(ops_embed(bench->head_ops, &table, 1.0f, bench->ids, 0, n_rows, bench->hidden), "ops_embed", NULL);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        if (pieces & PIECE_CHAIN)
            run_chain(bench, layer, n_rows);
        for (unsigned piece = PIECE_QKV; piece <= PIECE_DOWN; piece *= 2)
            if (pieces & piece) {
                OpsLinear linear = linear_of(bench, piece, layer);

                must(ops_linear(bench->ops, &linear, n_rows), "ops_linear", NULL);
            }
    }
    if (pieces & PIECE_HEAD) {
        OpsLinear linear = linear_of(bench, PIECE_HEAD, 0);

        must(ops_linear(bench->head_ops, &linear, head_rows(n_rows)), "ops_linear", NULL);
    }
}

static double pieces_usec(Bench *bench, unsigned pieces, uint32_t n_rows, double *ret_cpu_usec)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    double start = clock_usec(CLOCK_MONOTONIC), cpu_start = clock_usec(CLOCK_PROCESS_CPUTIME_ID);

    must(gpu_step_begin(bench->gpu), "gpu_step_begin", NULL);
    run_pieces(bench, pieces, n_rows);
    must(gpu_step_finish(bench->gpu, &detail), "gpu_step_finish", &detail);
    *ret_cpu_usec = clock_usec(CLOCK_PROCESS_CPUTIME_ID) - cpu_start;
    return clock_usec(CLOCK_MONOTONIC) - start;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static uint64_t weight_bytes(const OpsWeight *weight)
{
    uint64_t bytes = 0;

    (void)weight_device_bytes(weight->type, weight->n_rows, weight->n_cols, &bytes);
    return bytes;
}

static void report(Bench *bench, const char *name, unsigned pieces, uint32_t n_rows, uint32_t n_rounds)
{
    const OpsWeight *weights[] = {bench->q, bench->k, bench->v, bench->o, bench->gate, bench->up, bench->down};
    static const unsigned piece_of[] = {PIECE_QKV, PIECE_QKV, PIECE_QKV, PIECE_O, PIECE_GATE_UP, PIECE_GATE_UP, PIECE_DOWN};
    double usec[101], cpu[101], plain[101], macs = 0.0;
    uint64_t bytes = 0;

    n_rounds = MIN(n_rounds, (uint32_t)N_ELEMENTS(usec));
    for (size_t i = 0; i < N_ELEMENTS(weights); i++)
        if (pieces & (piece_of[i] | PIECE_CHAIN)) {
            bytes += LAYERS * weight_bytes(weights[i]);
            macs += (double)LAYERS * weights[i]->n_rows * weights[i]->n_cols * n_rows;
        }
    if (pieces & PIECE_HEAD) {
        bytes += weight_bytes(&bench->head);
        macs += (double)bench->head.n_rows * bench->head.n_cols * head_rows(n_rows);
    }
    for (uint32_t i = 0; i < n_rounds; i++) {
        plain[i] = read_usec(bench->host, MIN(bytes, bench->weight_bytes), gpu_info(bench->gpu)->compute_units);
        usec[i] = pieces_usec(bench, pieces, n_rows, &cpu[i]);
    }
    qsort(usec, n_rounds, sizeof(*usec), compare_doubles);
    qsort(cpu, n_rounds, sizeof(*cpu), compare_doubles);
    qsort(plain, n_rounds, sizeof(*plain), compare_doubles);
    printf("%-34s %5u %9.0f %9.0f %9.0f %8.1f %8.1f %8.1f %8.1f\n", name, n_rows, usec[0], usec[n_rounds / 2], cpu[n_rounds / 2],
           (double)bytes / usec[0] * 1e-3, (double)bytes / plain[0] * 1e-3, macs / usec[0] * 1e-3,
           macs / cpu[n_rounds / 2] * 1e-3);
    if (pieces & PIECE_HEAD && pieces != PIECE_HEAD)
        printf("%-34s       %.0f tokens/s best, %.0f median\n", "", 1e6 * n_rows / usec[0], 1e6 * n_rows / usec[n_rounds / 2]);
}

int main(int argc, char **argv)
{
    Bench bench = {0};
    uint32_t n_rounds = 15;
    bool exact = false, wrap = false;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--exact") == 0)
            exact = true;
        else if (strcmp(argv[i], "--wrap") == 0)
            wrap = true;
        else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            n_rounds = (uint32_t)MAX(atoi(argv[++i]), 1);
        else
            must(-EINVAL, "usage: bench-ops [--exact] [--wrap] [--rounds N]", NULL);
    }
    bench_open(&bench, exact, wrap);
    printf("%s, SIMD level %d, %u compute units, compute %s\n", gpu_info(bench.gpu)->name, (int)gpu_info(bench.gpu)->simd,
           gpu_info(bench.gpu)->compute_units, exact ? "exact" : "fast");
    printf("%-34s %5s %9s %9s %9s %8s %8s %8s %8s\n", "of 30 layers", "rows", "best us", "median", "cpu us", "GB/s", "read",
           "GMAC/s", "a cpu s");
    report(&bench, "qkv   960 x 576   Q4_1", PIECE_QKV, 1, n_rounds);
    report(&bench, "o     576 x 576   Q4_1", PIECE_O, 1, n_rounds);
    report(&bench, "gate, up 1536 x 576 Q4_1", PIECE_GATE_UP, 1, n_rounds);
    report(&bench, "down  576 x 1536  Q4_1", PIECE_DOWN, 1, n_rounds);
    report(&bench, "head  49152 x 576 Q8_0", PIECE_HEAD, 1, n_rounds);
    report(&bench, "token, a launch a product", PIECE_EMBED | PIECE_QKV | PIECE_O | PIECE_GATE_UP | PIECE_DOWN | PIECE_HEAD, 1,
           n_rounds);
    report(&bench, "token, chained", PIECE_EMBED | PIECE_CHAIN | PIECE_HEAD, 1, n_rounds);
    report(&bench, "4 tokens, chained", PIECE_EMBED | PIECE_CHAIN | PIECE_HEAD, 4, n_rounds);
    report(&bench, "qkv", PIECE_QKV, FEW, n_rounds);
    report(&bench, "o", PIECE_O, FEW, n_rounds);
    report(&bench, "gate, up", PIECE_GATE_UP, FEW, n_rounds);
    report(&bench, "down", PIECE_DOWN, FEW, n_rounds);
    report(&bench, "chained", PIECE_CHAIN, FEW, n_rounds);
    report(&bench, "head", PIECE_HEAD, FEW, n_rounds);
    report(&bench, "8 tokens, chained", PIECE_EMBED | PIECE_CHAIN | PIECE_HEAD, FEW, n_rounds);
    n_rounds = MIN(n_rounds, 5u);
    report(&bench, "qkv", PIECE_QKV, PREFILL, n_rounds);
    report(&bench, "o", PIECE_O, PREFILL, n_rounds);
    report(&bench, "gate, up", PIECE_GATE_UP, PREFILL, n_rounds);
    report(&bench, "down", PIECE_DOWN, PREFILL, n_rounds);
    report(&bench, "prefill", PIECE_EMBED | PIECE_CHAIN | PIECE_HEAD, PREFILL, n_rounds);
    bench_close(&bench);
    return EXIT_SUCCESS;
}
