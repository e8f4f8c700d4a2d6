/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the device layer costs, as ratios of one run: launches and waits against bare OpenCL calls, copies against
 * memcpy(), a program from the cache against compiling it, CLBlast against our own products of the same shape.
 * Each pair is measured alternately and the ratio is the median of the paired ratios: absolute times move with the
 * machine, only the last column is to be compared.
 */

#include "opencl/blas.h"
#include "opencl/gpu-internal.h"
#include "opencl/ops.h"
#include "tests/lib/patience.h"

#include <clblast_c.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define N_LAUNCHES   2000
#define N_PAIRS      9

typedef struct Bench {
    Gpu *gpu;
    GpuProgram *program;
    GpuKernel *spin;
    GpuBuffer *state;
} Bench;

static void must(int r, const char *what)
{
    if (r == 0)
        return;
    (void)fprintf(stderr, "bench-gpu: %s: %d\n", what, r);
    exit(EXIT_FAILURE);
}
#define MUST(call) must((call), #call)

static double now_usec(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

typedef double (*Measure)(Bench *bench, void *userdata);

typedef struct Side {
    const char *name;
    Measure measure; /* usec */
    void *userdata;
} Side;

static double median(double values[N_PAIRS])
{
    qsort(values, N_PAIRS, sizeof(values[0]), compare_doubles);
    return values[N_PAIRS / 2];
}

/* Prints ours and theirs, in microseconds or, with @amount, in @amount a microsecond, and how many times theirs ours is. */
static void compare(Bench *bench, Side ours, Side theirs, double amount, const char *unit)
{
    double a[N_PAIRS], b[N_PAIRS], ratios[N_PAIRS];

    (void)ours.measure(bench, ours.userdata); /* warm */
    (void)theirs.measure(bench, theirs.userdata);
    for (size_t i = 0; i < N_PAIRS; i++) {
        a[i] = ours.measure(bench, ours.userdata);
        b[i] = theirs.measure(bench, theirs.userdata);
        if (amount > 0) {
            a[i] = amount / a[i];
            b[i] = amount / b[i];
        }
        ratios[i] = a[i] / b[i];
    }
    (void)printf("%-44s %10.2f  %-34s %10.2f %-7s %7.2f\n", ours.name, median(a), theirs.name, median(b), unit,
                 median(ratios));
}

/* ---- launches ------------------------------------------------------------------------------------------------------ */

static double launches_ours(Bench *bench, void *userdata)
{
    double began = now_usec();

    (void)userdata;
    MUST(gpu_step_begin(bench->gpu));
    for (int i = 0; i < N_LAUNCHES; i++)
        MUST(gpu_launch(bench->spin, GPU_RANGE_1D(1, 1), GPU_WAIT_NONE, NULL));
    MUST(gpu_step_finish(bench->gpu, NULL));
    return (now_usec() - began) / N_LAUNCHES;
}

static double launches_bare(Bench *bench, void *userdata)
{
    const size_t one = 1;
    double began = now_usec();

    (void)userdata;
    for (int i = 0; i < N_LAUNCHES; i++)
        MUST(clEnqueueNDRangeKernel(bench->gpu->queues[0], bench->spin->cl, 1, NULL, &one, &one, 0, NULL, NULL));
    MUST(clFinish(bench->gpu->queues[0]));
    return (now_usec() - began) / N_LAUNCHES;
}

static double round_trips_ours(Bench *bench, void *userdata)
{
    double began = now_usec();

    (void)userdata;
    for (int i = 0; i < 200; i++) {
        MUST(gpu_step_begin(bench->gpu));
        MUST(gpu_launch(bench->spin, GPU_RANGE_1D(1, 1), GPU_WAIT_NONE, NULL));
        MUST(gpu_step_finish(bench->gpu, NULL));
    }
    return (now_usec() - began) / 200;
}

static double round_trips_bare(Bench *bench, void *userdata)
{
    const size_t one = 1;
    double began = now_usec();

    (void)userdata;
    for (int i = 0; i < 200; i++) {
        MUST(clEnqueueNDRangeKernel(bench->gpu->queues[0], bench->spin->cl, 1, NULL, &one, &one, 0, NULL, NULL));
        MUST(clFinish(bench->gpu->queues[0]));
    }
    return (now_usec() - began) / 200;
}

static void bench_launches(Bench *bench)
{
    const Side bare = {"bare enqueue, no event", launches_bare, NULL};
    int fd = memfd_create("trace", MFD_CLOEXEC);
    GpuOverlap sums;

    MUST(gpu_kernel_set_u32(bench->spin, 1, 1));
    compare(bench, (Side){"launch, one of 2000 in a step", launches_ours, NULL}, bare, 0, "us");
    MUST(gpu_trace_start(bench->gpu));
    MUST(gpu_overlap_begin(bench->gpu));
    compare(bench, (Side){"the same, traced and summed", launches_ours, NULL}, bare, 0, "us");
    MUST(gpu_overlap_end(bench->gpu, &sums));
    MUST(gpu_trace_stop(bench->gpu, fd));
    (void)close(fd);
    compare(bench, (Side){"step of one launch, with deadline", round_trips_ours, NULL},
            (Side){"bare enqueue and clFinish", round_trips_bare, NULL}, 0, "us");
}

/* ---- copies -------------------------------------------------------------------------------------------------------- */

typedef struct Copy {
    GpuBuffer *buffer;
    char *host, *other;
    size_t bytes;
} Copy;

static double copy_up(Bench *bench, void *userdata)
{
    Copy *copy = userdata;
    double began = now_usec();

    MUST(gpu_upload(bench->gpu, GPU_QUEUE_UPLOAD, copy->buffer, 0, copy->host, copy->bytes, GPU_WAIT_NONE, "up", NULL));
    MUST(gpu_drain(bench->gpu, NULL));
    return now_usec() - began;
}

static double copy_down(Bench *bench, void *userdata)
{
    Copy *copy = userdata;
    double began = now_usec();

    MUST(gpu_download(bench->gpu, GPU_QUEUE_DOWNLOAD, copy->buffer, 0, copy->host, copy->bytes, GPU_WAIT_NONE, "down", NULL));
    MUST(gpu_drain(bench->gpu, NULL));
    return now_usec() - began;
}

static double copy_by_memcpy(Bench *bench, void *userdata)
{
    Copy *copy = userdata;
    double began = now_usec();

    (void)bench;
    memcpy(copy->other, copy->host, copy->bytes);
    __asm__ volatile("" : : "r"(copy->other) : "memory");
    return now_usec() - began;
}

static void bench_copies(Bench *bench)
{
    const size_t sizes[] = {64 << 10, 1 << 20, 8 << 20, 64 << 20};
    size_t most = sizes[N_ELEMENTS(sizes) - 1];
    Copy copy = {.host = malloc(most), .other = malloc(most)};
    const Side bare = {"memcpy, one thread", copy_by_memcpy, &copy};

    if (!copy.host || !copy.other)
        exit(EXIT_FAILURE);
    memset(copy.host, 1, most);
    memset(copy.other, 2, most);
    MUST(gpu_buffer_new(bench->gpu, GPU_PURPOSE_OTHER, most, &copy.buffer, NULL));
    for (size_t i = 0; i < N_ELEMENTS(sizes); i++) {
        char what[64];

        copy.bytes = sizes[i];
        (void)snprintf(what, sizeof(what), "upload of %zu KiB, waited for", copy.bytes >> 10);
        compare(bench, (Side){what, copy_up, &copy}, bare, (double)copy.bytes / 1e3, "GB/s");
        (void)snprintf(what, sizeof(what), "download of %zu KiB, waited for", copy.bytes >> 10);
        compare(bench, (Side){what, copy_down, &copy}, bare, (double)copy.bytes / 1e3, "GB/s");
    }
    gpu_buffer_free(copy.buffer);
    free(copy.host);
    free(copy.other);
}

static void bench_overlap(Bench *bench)
{
    const size_t bytes = 8 << 20;
    GpuBuffer *buffer = NULL;
    char *host = calloc(1, bytes);
    GpuOverlap sums;

    if (!host)
        exit(EXIT_FAILURE);
    MUST(gpu_buffer_new(bench->gpu, GPU_PURPOSE_OTHER, bytes, &buffer, NULL));
    MUST(gpu_kernel_set_u32(bench->spin, 1, 3000000));
    MUST(gpu_overlap_begin(bench->gpu));
    for (int i = 0; i < 20; i++) {
        MUST(gpu_launch(bench->spin, GPU_RANGE_1D(1, 1), GPU_WAIT_NONE, NULL));
        MUST(gpu_upload(bench->gpu, GPU_QUEUE_UPLOAD, buffer, 0, host, bytes, GPU_WAIT_NONE, "up", NULL));
        MUST(gpu_step_finish(bench->gpu, NULL));
    }
    MUST(gpu_drain(bench->gpu, NULL));
    MUST(gpu_overlap_end(bench->gpu, &sums));
    (void)printf("%-44s %10lu  %-34s %10lu %-7s %7.2f\n", "copy time hidden behind a one-group kernel",
                 (unsigned long)sums.overlap_usec, "copy time", (unsigned long)sums.upload_usec, "us",
                 (double)sums.overlap_usec / (double)MAX(sums.upload_usec, UINT64_C(1)));
    gpu_buffer_free(buffer);
    free(host);
}

/* ---- programs ------------------------------------------------------------------------------------------------------ */

static double get_program(const GpuOptions *options, const char *program_options)
{
    const char *const sources[] = {"selftest.cl"};
    GpuProgram *program = NULL;
    GpuKernel *kernel = NULL;
    GpuBuffer *buffer = NULL;
    Gpu *gpu = NULL;
    double began, took;

    MUST(gpu_open(options, &gpu, NULL));
    MUST(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 64, &buffer, NULL));
    began = now_usec();
    MUST(gpu_program_get(gpu, sources, 1, program_options, &program, NULL));
    MUST(gpu_kernel_new(program, "selftest_simd", &kernel, NULL));
    MUST(gpu_kernel_set_buffer(kernel, 0, buffer));
    MUST(gpu_launch(kernel, GPU_RANGE_1D(1, 1), GPU_WAIT_NONE, NULL));
    MUST(gpu_drain(gpu, NULL));
    took = now_usec() - began;
    gpu_kernel_free(kernel);
    gpu_buffer_free(buffer);
    gpu_free(gpu);
    return took / 1e3;
}

static void bench_programs(void)
{
    char directory[] = "/tmp/leat-bench-XXXXXX", command[64], unique[64];
    GpuOptions options = {.cache_dir = directory, .compiler = "/proc/self/exe", .deadline_usec = PATIENCE_USEC};
    double cold, warm;

    if (!mkdtemp(directory))
        exit(EXIT_FAILURE);
    /* A program that the driver's own cache has never seen. */
    (void)snprintf(unique, sizeof(unique), "-DUNIQUE=%ld", (long)getpid() * 1000000 + (long)now_usec() % 1000000);
    cold = get_program(&options, unique);
    warm = get_program(&options, unique);
    (void)printf("%-44s %10.2f  %-34s %10.2f %-7s %7.3f\n", "program and first launch, from our cache", warm,
                 "compiled by the child", cold, "ms", warm / cold);
    (void)snprintf(command, sizeof(command), "rm -rf %s", directory);
    if (system(command) != 0)
        (void)fprintf(stderr, "bench-gpu: cannot remove %s\n", directory);
}

/* ---- products ------------------------------------------------------------------------------------------------------ */

/* One shape, y (m, n) = x (m, k) * w (n, k)^T, three ways. */
typedef struct Product {
    Blas *blas;
    Ops *ops;
    BlasProduct dense;
    OpsLinear linear; /* with dense or packed weights */
    uint32_t m, n, k;
    GpuBuffer *x, *w, *packed, *y;
} Product;

static double product_by_clblast(Bench *bench, void *userdata)
{
    Product *product = userdata;
    double began = now_usec();

    MUST(blas_product(product->blas, &product->dense, GPU_WAIT_NONE, NULL, NULL));
    MUST(gpu_drain(bench->gpu, NULL));
    return now_usec() - began;
}

static double product_by_ops(Bench *bench, void *userdata)
{
    Product *product = userdata;
    double began = now_usec();

    MUST(ops_linear(product->ops, &product->linear, product->m));
    MUST(gpu_drain(bench->gpu, NULL));
    return now_usec() - began;
}

static void upload_fractions(Bench *bench, GpuBuffer *buffer)
{
    size_t n = gpu_buffer_bytes(buffer) / sizeof(float);
    float *values = malloc(n * sizeof(float));

    if (!values)
        exit(EXIT_FAILURE);
    for (size_t i = 0; i < n; i++)
        values[i] = (float)(i % 97) / 97;
    MUST(gpu_upload(bench->gpu, GPU_QUEUE_COMPUTE, buffer, 0, values, n * sizeof(float), GPU_WAIT_NONE, "x", NULL));
    MUST(gpu_drain(bench->gpu, NULL));
    free(values);
}

static void product_against(Bench *bench, Product *product, WeightType type, const char *clblast)
{
    const WeightTypeInfo *info = weight_type_info((uint32_t)type);
    double kiloflops = 2e-3 * product->m * product->n * product->k;
    uint64_t bytes;
    char what[64], against[64];

    MUST(weight_device_bytes(info, product->n, product->k, &bytes));
    MUST(gpu_buffer_new(bench->gpu, GPU_PURPOSE_OTHER, bytes, &product->packed, NULL));
    MUST(gpu_fill_zero(bench->gpu, GPU_QUEUE_COMPUTE, product->packed, 0, bytes));
    MUST(ops_prepare_type(product->ops, info, NULL));
    product->linear = (OpsLinear){.x = product->x,
                                  .weights = {{info, product->packed, 0, product->n, product->k}},
                                  .n_weights = 1,
                                  .epilogue = OPS_EPILOGUE_STORE,
                                  .y = product->y};
    (void)snprintf(what, sizeof(what), "%s %u x %u x %u", clblast, product->m, product->n, product->k);
    (void)snprintf(against, sizeof(against), "ours, %s weights", info->name);
    compare(bench, (Side){what, product_by_clblast, product}, (Side){against, product_by_ops, product}, kiloflops,
            "GFLOP/s");
    product->packed = gpu_buffer_free(product->packed);
}

static void bench_shape(Bench *bench, Blas *blas, Ops *ops, const char *clblast, uint32_t m, uint32_t n, uint32_t k)
{
    Product product = {.blas = blas, .ops = ops, .m = m, .n = n, .k = k};

    MUST(gpu_buffer_new(bench->gpu, GPU_PURPOSE_OTHER, UINT64_C(4) * m * k, &product.x, NULL));
    MUST(gpu_buffer_new(bench->gpu, GPU_PURPOSE_OTHER, UINT64_C(4) * n * k, &product.w, NULL));
    MUST(gpu_buffer_new(bench->gpu, GPU_PURPOSE_OTHER, UINT64_C(4) * m * n, &product.y, NULL));
    upload_fractions(bench, product.x);
    upload_fractions(bench, product.w);
    product.dense = (BlasProduct){.m = m,
                                  .n = n,
                                  .k = k,
                                  .alpha = 1,
                                  .a = {product.x, 0, k},
                                  .b = {product.w, 0, k},
                                  .c = {product.y, 0, n}};
    product_against(bench, &product, WEIGHT_TYPE_F32, clblast);
    product_against(bench, &product, WEIGHT_TYPE_Q4_1, clblast);
    gpu_buffer_free(product.x);
    gpu_buffer_free(product.w);
    gpu_buffer_free(product.y);
}

static void bench_products(Bench *bench)
{
    /* What CLBlast's own tuner found for PoCL on this kind of machine. */
    static const char *names[] = {"MWG", "NWG", "KWG", "MDIMC", "NDIMC", "MDIMA", "NDIMB", "KWI",
                                  "VWM", "VWN", "STRM", "STRN", "SA", "SB", "GEMMK", "KREG"};
    static const size_t values[] = {128, 128, 16, 8, 16, 16, 32, 2, 8, 4, 0, 0, 1, 1, 0, 1};
    const OpsOptions options = {.max_rows = 512, .max_columns = 1536};
    Blas *blas = NULL;
    Ops *ops = NULL;

    MUST(blas_new(bench->gpu, &blas, NULL));
    MUST(ops_new(bench->gpu, &options, &ops, NULL));
    bench_shape(bench, blas, ops, "CLBlast", 1, 1536, 576);
    bench_shape(bench, blas, ops, "CLBlast", 32, 1536, 576);
    bench_shape(bench, blas, ops, "CLBlast", 512, 1536, 576);
    if (CLBlastOverrideParameters(bench->gpu->device, "Xgemm", CLBlastPrecisionSingle, N_ELEMENTS(names), names, values) ==
        CLBlastSuccess)
        bench_shape(bench, blas, ops, "CLBlast, tuned", 512, 1536, 576);
    ops_free(ops);
    blas_free(blas);
}

int main(int argc, char **argv)
{
    const char *const sources[] = {"selftest.cl"};
    const GpuOptions options = {.deadline_usec = PATIENCE_USEC};
    Bench bench = {0};

    if (argc == 2 && strcmp(argv[1], "--compile-program") == 0)
        return gpu_compiler_main(STDIN_FILENO, STDOUT_FILENO);
    MUST(gpu_open(&options, &bench.gpu, NULL));
    MUST(gpu_program_get(bench.gpu, sources, 1, "", &bench.program, NULL));
    MUST(gpu_kernel_new(bench.program, "selftest_spin", &bench.spin, NULL));
    MUST(gpu_buffer_new(bench.gpu, GPU_PURPOSE_OTHER, 64, &bench.state, NULL));
    MUST(gpu_kernel_set_buffer(bench.spin, 0, bench.state));
    (void)printf("%s, driver %s: %s\n", gpu_info(bench.gpu)->name, gpu_info(bench.gpu)->driver, gpu_info(bench.gpu)->reason);
    (void)printf("%-44s %10s  %-34s %10s %-7s %7s\n", "ours", "", "against", "", "unit", "ratio");
    bench_launches(&bench);
    bench_copies(&bench);
    bench_overlap(&bench);
    bench_programs();
    bench_products(&bench);
    gpu_kernel_free(bench.spin);
    gpu_buffer_free(bench.state);
    gpu_free(bench.gpu);
    return EXIT_SUCCESS;
}
