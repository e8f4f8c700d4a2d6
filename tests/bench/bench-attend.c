/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention's cost: microseconds a layer of one decode step (tile alone, and prepare + tile + finish) at three depths, against reading
 * the same bytes; and of prefill chunks at the deepest cache.  Pages hold random bytes with sane scales: the work does not depend on
 * values.  Many layers' pages rotate, so that nothing stays in the caches.  Medians;
 * with LEAT_BENCH_CPU_TIME, for a busy machine, the least CPU time of all threads.
 * bench-attend [K_BITS V_BITS [N_HEADS N_KV K_HEAD_DIM [V_HEAD_DIM]]]; bits 16: form f16.  LEAT_BENCH_FORM names another coded form than leat,
 * LEAT_BENCH_KERNELS picks AttendKernels by number, LEAT_BENCH_DEPTH=N measures decode at one depth and nothing else.
 */

#include "opencl/attend-internal.h"
#include "quant/base/half.h"
#include "tests/lib/patience.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define ROTATING_BYTES (96u << 20)
#define MAX_ROWS       512
#define N_REPEATS      15

typedef struct Bench {
    Gpu *gpu;
    Attend *attend;
    AttendOptions options;
    KvLayout layout;
    GpuBuffer *pages, *input, *means, *tail, *qkv, *out;
    uint64_t tail_stride;
} Bench;

static void must(int r, const ErrorDetail *detail)
{
    if (r) {
        (void)fprintf(stderr, "bench-attend: error %d %s\n", r, detail ? detail->text : "");
        exit(EXIT_FAILURE);
    }
}

/* Wall time; or CPU time of all our threads. */
static double now_usec(void)
{
    bool cpu = getenv("LEAT_BENCH_CPU_TIME") != NULL;
    struct timespec t;

    (void)clock_gettime(cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static void drain(Bench *b)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    must(gpu_drain(b->gpu, &detail), &detail);
}

static GpuBuffer *buffer(Bench *b, uint64_t bytes)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuBuffer *ret = NULL;

    must(gpu_buffer_new(b->gpu, GPU_PURPOSE_OTHER, bytes, &ret, &detail), &detail);
    must(gpu_fill_zero(b->gpu, GPU_QUEUE_COMPUTE, ret, 0, bytes), NULL);
    return ret;
}

/* Random codes; scales near 0.1. */
static void fill_pages(Bench *b, uint64_t bytes)
{
    _cleanup_(freep) uint8_t *pages = malloc(bytes);
    uint32_t x = 1, scale_at = b->options.form.group_dims > 0 ? b->layout.k_scale_offset : 0;

    must(pages ? 0 : -ENOMEM, NULL);
    for (uint64_t i = 0; i + 1 < bytes; i += 2) {
        uint16_t half;

        x = x * 1664525u + 1013904223u;
        half = (uint16_t)(x >> 16);
        if (i % b->layout.record_bytes >= scale_at)
            half = half_from_float(0.05f + 0.1f * (float)(x >> 8) * 0x1p-24f);
        memcpy(pages + i, &half, sizeof(half));
    }
    must(gpu_upload(b->gpu, GPU_QUEUE_COMPUTE, b->pages, 0, pages, bytes, GPU_WAIT_NONE, "bench", NULL), NULL);
    drain(b);
}

static void make(Bench *b, const GpuOptions *gpu_options)
{
    const KvShape *s = &b->options.shape;
    uint64_t width = kv_row_values(s);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    _cleanup_(freep) float *qkv = malloc(MAX_ROWS * width * sizeof(float));
    float inv_freq[128];

    must(qkv ? gpu_open(gpu_options, &b->gpu, &detail) : -ENOMEM, &detail);
    must(kv_layout(b->options.form, s, &b->layout, &detail), &detail);
    for (uint32_t f = 0; f < s->rotary_dim / 2; f++)
        inv_freq[f] = (float)pow(1e5, -2.0 * f / s->rotary_dim);
    b->options.inv_freq = inv_freq;
    must(attend_new(b->gpu, &b->options, &b->attend, &detail), &detail);
    b->pages = buffer(b, ROTATING_BYTES);
    b->input = buffer(b, 8u << 20);
    b->means = buffer(b, kv_constants_floats(s) * sizeof(float));
    b->tail_stride = (uint64_t)(kv_ring_tokens(b->options.form) + b->options.form.sink_tokens) * kv_token_values(s) * (b->options.tail_bits / 8);
    b->tail = buffer(b, b->tail_stride);
    b->qkv = buffer(b, MAX_ROWS * width * sizeof(float));
    b->out = buffer(b, (uint64_t)MAX_ROWS * s->n_heads * s->v_head_dim * sizeof(float));
    fill_pages(b, ROTATING_BYTES);
    for (uint64_t i = 0; i < MAX_ROWS * width; i++)
        qkv[i] = (float)(i * 2654435761u % 1000) * 0.004f - 2.0f;
    must(gpu_upload(b->gpu, GPU_QUEUE_COMPUTE, b->qkv, 0, qkv, MAX_ROWS * width * sizeof(float), GPU_WAIT_NONE, "bench", NULL), NULL);
    drain(b);
}

/* Groups, refs and spans of @n_rows rows that all see @n_pages packed pages. */
typedef struct Work {
    AttendPass pass;
    AttendLayer layer;
    AttendTile tile;
    uint64_t layer_bytes;
    uint32_t n_layers;
} Work;

static Work work_new(Bench *b, uint32_t n_rows, uint32_t n_pages)
{
    uint32_t n_groups = (n_rows + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS, n_blocks = (n_pages + KV_BLOCK_PAGES - 1) / KV_BLOCK_PAGES;
    uint64_t groups_at = 0, spans_at = n_groups * sizeof(AttendGroup), refs_at = spans_at + n_groups * sizeof(AttendSpan);
    uint64_t rope_at = refs_at + (uint64_t)n_groups * n_blocks * sizeof(AttendRef), bytes;
    Work w = {.layer_bytes = (uint64_t)n_pages * b->layout.page_bytes};
    _cleanup_(freep) uint8_t *input = NULL;

    bytes = rope_at + (uint64_t)n_rows * b->options.shape.rotary_dim * sizeof(float);
    input = calloc(1, bytes);
    must(input ? 0 : -ENOMEM, NULL);
    for (uint32_t g = 0; g < n_groups; g++) {
        AttendGroup *group = (AttendGroup *)(input + groups_at) + g;
        AttendSpan *span = (AttendSpan *)(input + spans_at) + g;

        *group = (AttendGroup){.row0 = (int32_t)(g * KV_PAGE_TOKENS), .n_rows = (int32_t)MIN(n_rows - g * KV_PAGE_TOKENS, 32u),
                               .pos0 = (int32_t)((n_pages + 1) * KV_PAGE_TOKENS), .n_packed = (int32_t)n_pages,
                               .new_start = (int32_t)((n_pages + 1) * KV_PAGE_TOKENS), .new_row0 = (int32_t)(g * KV_PAGE_TOKENS)};
        *span = (AttendSpan){(int32_t)(g * n_blocks), (int32_t)n_blocks};
        for (uint32_t i = 0; i < n_blocks; i++) {
            AttendRef *ref = (AttendRef *)(input + refs_at) + g * n_blocks + i;

            *ref = (AttendRef){.group = (int32_t)g, .block = (int32_t)i, .n_pages = (int32_t)MIN(n_pages - i * 8, 8u)};
            for (uint32_t p = 0; p < (uint32_t)ref->n_pages; p++)
                ref->pages[p] = i * 8 + p;
        }
    }
    for (uint64_t i = rope_at; i < bytes; i += sizeof(float))
        memcpy(input + i, &(float){0.7f}, sizeof(float));
    must(gpu_upload(b->gpu, GPU_QUEUE_COMPUTE, b->input, 0, input, bytes, GPU_WAIT_NONE, "bench", NULL), NULL);
    drain(b);
    w.pass = (AttendPass){n_rows, n_groups, b->input, rope_at, b->input, groups_at, n_groups};
    w.layer = (AttendLayer){.calibration = b->means, .tail = b->tail, .tail_slot_stride = b->tail_stride};
    w.tile = (AttendTile){b->pages, 0, NULL, b->input, refs_at, b->input, spans_at, n_groups * n_blocks};
    w.n_layers = (uint32_t)MAX(MIN(ROTATING_BYTES / w.layer_bytes, (uint64_t)120), (uint64_t)1);
    return w;
}

/* Microseconds a layer; @whole: prepare and finish too. */
static double measure(Bench *b, Work *w, bool whole, uint32_t n_repeats)
{
    double times[N_REPEATS];

    for (uint32_t i = 0; i < n_repeats + 1; i++) {
        double start = now_usec();

        must(gpu_step_begin(b->gpu), NULL);
        for (uint32_t layer = 0; layer < w->n_layers; layer++) {
            w->tile.pages_offset = layer * w->layer_bytes;
            if (whole || layer == 0)
                must(attend_prepare(b->attend, &w->pass, &w->layer, b->qkv), NULL);
            if (!whole)
                b->attend->pending.spans = NULL;
            must(attend_tile(b->attend, &w->pass, &w->layer, &w->tile, GPU_WAIT_NONE, NULL), NULL);
            if (whole)
                must(attend_finish(b->attend, &w->pass, &w->layer, b->out), NULL);
        }
        must(gpu_step_finish(b->gpu, NULL), NULL);
        if (i > 0)
            times[i - 1] = (now_usec() - start) / w->n_layers;
    }
    qsort(times, n_repeats, sizeof(*times), compare);
    return times[getenv("LEAT_BENCH_CPU_TIME") ? 0 : n_repeats / 2];
}

/* The same bytes, only read. */
static double measure_read(Bench *b, const Work *w)
{
    static const char *const sources[] = {"attend-read.cl"};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuProgram *program;
    GpuKernel *kernel;
    double times[N_REPEATS];

    must(gpu_program_get(b->gpu, sources, 1, "", &program, &detail), &detail);
    must(gpu_kernel_new(program, "attend_read", &kernel, &detail), &detail);
    must(gpu_kernel_set_buffer(kernel, 0, b->pages), NULL);
    must(gpu_kernel_set_u32(kernel, 2, (uint32_t)(w->layer_bytes / 64)), NULL);
    must(gpu_kernel_set_buffer(kernel, 3, b->out), NULL);
    for (int i = 0; i < N_REPEATS + 1; i++) {
        double start = now_usec();

        for (uint32_t layer = 0; layer < w->n_layers; layer++) {
            uint64_t offset = layer * w->layer_bytes;

            must(gpu_kernel_set_bytes(kernel, 1, &offset, sizeof(offset)), NULL);
            must(gpu_launch(kernel, GPU_RANGE_1D(2, 1), GPU_WAIT_NONE, NULL), NULL);
        }
        drain(b);
        if (i > 0)
            times[i - 1] = (now_usec() - start) / w->n_layers;
    }
    (void)gpu_kernel_free(kernel);
    qsort(times, N_REPEATS, sizeof(*times), compare);
    return times[getenv("LEAT_BENCH_CPU_TIME") ? 0 : N_REPEATS / 2];
}

/* Microseconds a page, of a prefill chunk of MAX_ROWS rows. */
static double measure_pack(Bench *b)
{
    AttendPack packs[MAX_ROWS / KV_PAGE_TOKENS] = {{0}};
    uint32_t n = N_ELEMENTS(packs);
    GpuBuffer *fresh = buffer(b, (uint64_t)n * b->layout.page_bytes);
    Work w = work_new(b, MAX_ROWS, KV_BLOCK_PAGES);
    double times[N_REPEATS];

    for (uint32_t i = 0; i < n; i++)
        packs[i] = (AttendPack){.page = (int32_t)i, .to = i};
    must(attend_prepare(b->attend, &w.pass, &w.layer, b->qkv), NULL);
    must(gpu_upload(b->gpu, GPU_QUEUE_COMPUTE, b->input, 0, packs, sizeof(packs), GPU_WAIT_NONE, "bench", NULL), NULL);
    for (int i = 0; i < N_REPEATS; i++) {
        double start;

        drain(b);
        start = now_usec();
        must(attend_pack(b->attend, &w.pass, &w.layer, b->input, 0, n, fresh, NULL), NULL);
        drain(b);
        times[i] = (now_usec() - start) / n;
    }
    (void)gpu_buffer_free(fresh);
    qsort(times, N_REPEATS, sizeof(*times), compare);
    return times[getenv("LEAT_BENCH_CPU_TIME") ? 0 : N_REPEATS / 2];
}

/* LEAT_BENCH_FORM names a coded form other than leat. */
static KvForm choose_form(int k_bits, int v_bits)
{
    const char *name = getenv("LEAT_BENCH_FORM");
    KvForm form = kv_form_default(k_bits == 16 ? KV_FORM_F16 : KV_FORM_LEAT);

    for (int kind = KV_FORM_LEAT; name && kind < KV_FORM_X_MAX; kind++)
        if (strcmp(name, kv_form_kind_to_string((KvFormKind)kind)) == 0)
            form = kv_form_default((KvFormKind)kind);
    if (kv_form_is_coded(form)) {
        form.k_bits = (uint8_t)k_bits;
        form.v_bits = (uint8_t)v_bits;
    }
    return form;
}

int main(int argc, char **argv)
{
    static const uint32_t depths[] = {2048, 8064, 32768}, chunks[] = {32, 128, 512};
    int k_bits = argc > 2 ? atoi(argv[1]) : 5, v_bits = argc > 2 ? atoi(argv[2]) : 4;
    GpuOptions gpu_options = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC};
    KvForm form = choose_form(k_bits, v_bits);
    KvShape shape = {9, 3, 64, 64, 64};
    const char *kernels = getenv("LEAT_BENCH_KERNELS"), *only = getenv("LEAT_BENCH_DEPTH");
    Bench b = {0};

    if (argc > 5)
        shape = (KvShape){(uint32_t)atoi(argv[3]), (uint32_t)atoi(argv[4]), (uint32_t)atoi(argv[5]),
                          (uint32_t)atoi(argv[argc > 6 ? 6 : 5]), (uint32_t)atoi(argv[5])};
    b.options = (AttendOptions){.form = form, .shape = shape, .tail_bits = 16, .scale = 1.0f / sqrtf((float)shape.k_head_dim),
                                .max_rows = MAX_ROWS, .max_refs = 1024, .max_pages = 4096,
                                .kernels = kernels ? (AttendKernels)atoi(kernels) : ATTEND_KERNELS_AUTO};
    make(&b, &gpu_options);
    if (!only)
        printf("%s; K %d V %d bits, %u/%u heads of %u/%u, kernels %d\n", gpu_info(b.gpu)->name, k_bits, v_bits, shape.n_heads, shape.n_kv_heads,
           shape.k_head_dim, shape.v_head_dim, (int)b.attend->kernels);
    for (size_t i = 0; i < N_ELEMENTS(depths); i++) {
        Work w = work_new(&b, 1, (only ? (uint32_t)atoi(only) : depths[i]) / KV_PAGE_TOKENS);
        double tile = measure(&b, &w, false, N_REPEATS), whole = measure(&b, &w, true, N_REPEATS), bytes = measure_read(&b, &w);

        if (only) {
            printf("{\"tile_usec\": %.2f, \"layer_usec\": %.2f, \"read_usec\": %.2f}\n", tile, whole, bytes);
            return EXIT_SUCCESS;
        }
        printf("decode at %5u: tile %7.1f us, whole layer %7.1f us, reading %7.1f us, ratio %.2f\n", depths[i], tile, whole, bytes,
               tile / bytes);
    }
    for (size_t i = 0; i < N_ELEMENTS(chunks); i++) {
        Work w = work_new(&b, chunks[i], 8064 / KV_PAGE_TOKENS);

        w.n_layers = 4;
        printf("prefill %3u over 8064: tile %8.1f us, whole layer %8.1f us\n", chunks[i], measure(&b, &w, false, 3), measure(&b, &w, true, 3));
    }
    printf("packing: %.1f us a page\n", measure_pack(&b));
    return EXIT_SUCCESS;
}
