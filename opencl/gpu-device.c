/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a device: context and queues, known answers, what its compiler accepts, whether host memory is read in place. */

#include "opencl/gpu-internal.h"
#include "quant/base/half.h"
#include "quant/base/log.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SELFTEST_ITEMS 256
#define SELFTEST_LOCAL 64
/* The first launch may compile for seconds on a busy machine; a device that takes longer does not work. */
#define SELFTEST_USEC  UINT64_C(120000000)
#define DEADLINE_USEC  UINT64_C(60000000)

static void CL_CALLBACK context_notify(const char *text, const void *data, size_t size, void *userdata)
{
    (void)data;
    (void)size;
    (void)userdata;
    log_debug("OpenCL: %s", text);
}

static int open_queues(Gpu *gpu)
{
    const cl_context_properties properties[] = {CL_CONTEXT_PLATFORM, (cl_context_properties)gpu->platform, 0};
    cl_int status;
    int r;

    gpu->context = clCreateContext(properties, 1, &gpu->device, context_notify, NULL, &status);
    r = CL_CHECK(gpu, status, "clCreateContext");
    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX && !r; queue++) {
        gpu->queues[queue] = clCreateCommandQueue(gpu->context, gpu->device, CL_QUEUE_PROFILING_ENABLE, &status);
        r = CL_CHECK(gpu, status, "clCreateCommandQueue");
    }
    return r;
}

/* ---- self-test --------------------------------------------------------------------------------------------------- */

typedef struct Selftest {
    Gpu *gpu;
    GpuProgram *program; /* borrowed */
    size_t local;
    uint32_t in[SELFTEST_ITEMS], out[SELFTEST_ITEMS];
} Selftest;

/* C twin of selftest_answers. */
static uint32_t selftest_expected(const uint32_t *in, size_t i, size_t local)
{
    size_t mirror = i / local * local + (local - 1 - i % local);
    float y = (float)(in[i] & 0xffff) * 0.25f + 1.0f;

    return ((in[mirror] * UINT32_C(2654435761)) ^ (in[i] >> 7)) + float_to_bits(y);
}

static void selftest_input(uint32_t *in, uint32_t seed)
{
    for (size_t i = 0; i < SELFTEST_ITEMS; i++) {
        seed = seed * UINT32_C(1664525) + UINT32_C(1013904223);
        in[i] = seed;
    }
}

static bool selftest_equal(const Selftest *test, const uint32_t *in, const uint32_t *out)
{
    for (size_t i = 0; i < SELFTEST_ITEMS; i++)
        if (out[i] != selftest_expected(in, i, test->local))
            return false;
    return true;
}

static int selftest_launch(Selftest *test, GpuBuffer *in, GpuBuffer *out, ErrorDetail *reterr)
{
    _cleanup_(gpu_kernel_freep) GpuKernel *kernel = NULL;
    int r = gpu_kernel_new(test->program, "selftest_answers", &kernel, reterr);

    if (r)
        return error_trace(r);
    /* On a CPU device our kernels run in groups of one, and that variant is in the binary (gpu-compiler.c). */
    test->local = test->gpu->info.type == GPU_DEVICE_TYPE_CPU ? 1 : SELFTEST_LOCAL;
    while (test->local > gpu_kernel_max_work_group(kernel))
        test->local /= 2;
    r = gpu_kernel_set_buffer(kernel, 0, in);
    if (!r)
        r = gpu_kernel_set_buffer(kernel, 1, out);
    if (!r)
        r = gpu_launch(kernel, GPU_RANGE_1D(SELFTEST_ITEMS, test->local), GPU_WAIT_NONE, NULL);
    return r ? error_trace(r) : 0;
}

/* Copies in, runs, copies out, on all three queues. */
static int selftest_answers(Selftest *test, ErrorDetail *reterr)
{
    _cleanup_(gpu_buffer_freep) GpuBuffer *in = NULL, *out = NULL;
    _cleanup_(gpu_event_unrefp) GpuEvent *uploaded = NULL, *done = NULL;
    Gpu *gpu = test->gpu;
    int r;

    selftest_input(test->in, 1);
    r = gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, sizeof(test->in), &in, reterr);
    if (!r)
        r = gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, sizeof(test->out), &out, reterr);
    if (!r)
        r = gpu_upload(gpu, GPU_QUEUE_UPLOAD, in, 0, test->in, sizeof(test->in), GPU_WAIT_NONE, "self-test in", &uploaded);
    if (!r)
        r = gpu_event_wait(gpu, uploaded, reterr);
    if (!r)
        r = selftest_launch(test, in, out, reterr);
    if (!r)
        r = gpu_download(gpu, GPU_QUEUE_COMPUTE, out, 0, test->out, sizeof(test->out), GPU_WAIT_NONE, "self-test out", &done);
    if (!r)
        r = gpu_event_wait(gpu, done, reterr);
    if (r)
        return error_trace(r);
    if (!selftest_equal(test, test->in, test->out))
        return error_detail_set(reterr, -EBADMSG, "the self-test gives wrong results");
    return 0;
}

static int run_in_place(Selftest *test, char *in_memory, char *out_memory, bool *ret, ErrorDetail *reterr)
{
    _cleanup_(gpu_buffer_freep) GpuBuffer *in = NULL, *out = NULL;
    bool works = true;
    int r;

    r = gpu_buffer_wrap(test->gpu, in_memory, sizeof(test->in), &in, reterr);
    if (!r)
        r = gpu_buffer_wrap(test->gpu, out_memory, sizeof(test->out), &out, reterr);
    for (uint32_t round = 2; round < 4 && !r; round++) {
        selftest_input((uint32_t *)(void *)in_memory, round);
        r = selftest_launch(test, in, out, reterr);
        if (!r)
            r = gpu_drain(test->gpu, reterr);
        works = works && !r && selftest_equal(test, (uint32_t *)(void *)in_memory, (uint32_t *)(void *)out_memory);
    }
    if (r == GPU_E_OVER_BUDGET) /* refused to wrap: no reason to do without the device */
        works = false;
    else if (r)
        return error_trace(r);
    *ret = works;
    return 0;
}

/* Whether a kernel sees what the host writes into wrapped memory, and the host what the kernel writes, twice in a row and
 * without a copy or a map: some drivers claim unified memory and then keep a shadow of it. */
static int selftest_in_place(Selftest *test, bool *ret, ErrorDetail *reterr)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), half = (sizeof(test->in) + page - 1) / page * page;
    char *memory = mmap(NULL, 2 * half, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int r;

    if (memory == MAP_FAILED)
        return error_origin(-errno);
    r = run_in_place(test, memory, memory + half, ret, reterr);
    gpu_unmap_host(test->gpu, memory, 2 * half);
    return error_trace(r);
}

/* ---- SIMD level -------------------------------------------------------------------------------------------------- */

static bool host_has_vnni(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

/* LEAT_SIMD lowers the level, for tests of the other kernels. */
static GpuSimd simd_lowered(GpuSimd simd)
{
    static const char *const names[] = {"portable", "avx2", "avx512bw", "vnni"};
    const char *wanted = getenv("LEAT_SIMD");

    for (size_t i = 0; wanted && i < N_ELEMENTS(names); i++)
        if (strcmp(wanted, names[i]) == 0)
            return MIN(simd, (GpuSimd)i);
    return simd;
}

static int probe_simd(Selftest *test, GpuSimd *ret, ErrorDetail *reterr)
{
    _cleanup_(gpu_kernel_freep) GpuKernel *kernel = NULL;
    _cleanup_(gpu_buffer_freep) GpuBuffer *out = NULL;
    Gpu *gpu = test->gpu;
    uint32_t bits = 0;
    int r;

    r = gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, sizeof(bits), &out, reterr);
    if (!r)
        r = gpu_kernel_new(test->program, "selftest_simd", &kernel, reterr);
    if (!r)
        r = gpu_kernel_set_buffer(kernel, 0, out);
    if (!r)
        r = gpu_launch(kernel, GPU_RANGE_1D(1, 1), GPU_WAIT_NONE, NULL);
    if (!r)
        r = gpu_download(gpu, GPU_QUEUE_COMPUTE, out, 0, &bits, sizeof(bits), GPU_WAIT_NONE, "SIMD level", NULL);
    if (!r)
        r = gpu_drain(gpu, reterr);
    if (r)
        return error_trace(r);
    if (bits & 2)
        /* The compiler need not know VNNI (PoCL 3.1 does not): our kernels write it as inline assembly, which is
         * known to work on PoCL only. */
        *ret = host_has_vnni() && strcasestr(gpu->info.platform, "Portable Computing Language") ? GPU_SIMD_AVX512VNNI
                                                                                                  : GPU_SIMD_AVX512BW;
    else
        *ret = bits & 1 ? GPU_SIMD_AVX2 : GPU_SIMD_PORTABLE;
    return 0;
}

static bool may_have_simd(const GpuInfo *info)
{
#if defined(__x86_64__)
    return info->type == GPU_DEVICE_TYPE_CPU;
#else
    (void)info;
    return false;
#endif
}

static int selftest(Gpu *gpu, ErrorDetail *reterr)
{
    static const char *const sources[] = {"selftest.cl"};
    Selftest *test = calloc(1, sizeof(*test));
    GpuSimd simd = GPU_SIMD_PORTABLE;
    bool in_place = false;
    int r;

    if (!test)
        return error_origin(-ENOMEM);
    test->gpu = gpu;
    r = gpu_program_get(gpu, sources, N_ELEMENTS(sources), "", &test->program, reterr);
    if (!r)
        r = selftest_answers(test, reterr);
    if (!r && gpu->info.unified_memory)
        r = selftest_in_place(test, &in_place, reterr);
    if (!r && may_have_simd(&gpu->info))
        r = probe_simd(test, &simd, reterr);
    gpu_free_host(gpu, test);
    if (r)
        return error_trace(r);
    if (gpu->info.unified_memory && !in_place)
        log_debug("device '%s' claims unified memory but does not work in place", gpu->info.name);
    gpu->info.unified_memory = in_place;
    gpu->info.simd = simd_lowered(simd);
    return 0;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

static int copy_string(const char *from, char **ret)
{
    *ret = from ? strdup(from) : NULL;
    return from && !*ret ? error_origin(-ENOMEM) : 0;
}

/* The best device that has not been refused yet, opened and proven.  When it fails, @ret_failed names it. */
static int open_best(const GpuOptions *options, const GpuRefusals *refusals, Gpu **ret, cl_device_id *ret_failed,
                     ErrorDetail *reterr)
{
    _cleanup_(gpu_freep) Gpu *gpu = calloc(1, sizeof(*gpu));
    int r;

    if (!gpu)
        return error_origin(-ENOMEM);
    r = gpu_choose(options, refusals, gpu, reterr);
    if (r)
        return error_trace(r);
    gpu->compile_usec = GPU_COMPILE_SECONDS * UINT64_C(1000000);
    r = copy_string(options->cache_dir, &gpu->cache_dir);
    if (!r)
        r = copy_string(options->compiler, &gpu->compiler);
    if (!r)
        r = gpu_signal_new(&gpu->signal);
    if (r)
        return error_trace(r);
    *ret_failed = gpu->device;
    r = open_queues(gpu);
    if (r)
        return error_detail_set(reterr, r, "it does not open: %s", gpu->lost_text);
    atomic_store(&gpu->budget, UINT64_MAX); /* the self-test is not part of anyone's budget, nor of their deadline */
    gpu->deadline_usec = SELFTEST_USEC;
    r = selftest(gpu, reterr);
    if (r)
        return error_trace(r);
    atomic_store(&gpu->budget, gpu->info.budget_bytes);
    gpu->deadline_usec = options->deadline_usec ? options->deadline_usec : DEADLINE_USEC;
    gpu->counters = (GpuCounters){0};
    log_debug("opened '%s' of %s, driver %s: %s", gpu->info.name, gpu->info.vendor, gpu->info.driver, gpu->info.reason);
    *ret = TAKE_PTR(gpu);
    return 0;
}

int gpu_open(const GpuOptions *options, Gpu **ret, ErrorDetail *reterr)
{
    GpuRefusals refusals = {0};
    int r;

    for (;;) {
        ErrorDetail detail = ERROR_DETAIL_NULL;
        cl_device_id failed = NULL;

        r = open_best(options, &refusals, ret, &failed, &detail);
        if (r == 0)
            return 0;
        /* A device that does not work is passed over like one that is not there, and the reason of the next one tells. */
        if (!failed || r == -ENOMEM || refusals.n == GPU_REFUSALS_MAX) {
            if (reterr)
                *reterr = detail;
            return failed && r > 0 ? error_origin(GPU_E_NO_DEVICE) : error_trace(r);
        }
        log_debug("device does not work, ignoring: %s", detail.text);
        refusals.devices[refusals.n] = failed;
        (void)snprintf(refusals.reasons[refusals.n++], sizeof(refusals.reasons[0]), "%.159s", detail.text);
    }
}

static void free_events(Gpu *gpu)
{
    for (size_t i = 0; i < gpu->n_pending; i++)
        (void)gpu_event_unref(gpu->pending[i]);
    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
        (void)gpu_event_unref(gpu->last[queue]);
    (void)gpu_event_unref(gpu->last_input);
    while (gpu->event_blocks) {
        GpuEventBlock *next = gpu->event_blocks->next;

        free(gpu->event_blocks);
        gpu->event_blocks = next;
    }
    free(gpu->pending);
    free(gpu->waits);
}

Gpu *gpu_free(Gpu *gpu)
{
    if (!gpu)
        return NULL;
    gpu_settle(gpu);
    gpu_trace_deinit(gpu);
    /* Events after what takes long: PoCL tells the followers of a command a while after that counts as complete, one that has failed by then
     * among them, and aborts when it is no longer there. */
    gpu_programs_free(gpu);
    free_events(gpu);
    if (!gpu->hung) {
        for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
            if (gpu->queues[queue])
                (void)clReleaseCommandQueue(gpu->queues[queue]);
        if (gpu->context)
            (void)clReleaseContext(gpu->context);
    }
    (void)gpu_signal_unref(gpu->signal);
    free(gpu->cache_dir);
    free(gpu->compiler);
    free(gpu);
    return NULL;
}

const GpuInfo *gpu_info(const Gpu *gpu)
{
    return &gpu->info;
}

bool gpu_is_lost(const Gpu *gpu)
{
    return atomic_load_explicit(&gpu->lost, memory_order_relaxed);
}

bool gpu_is_hung(const Gpu *gpu)
{
    return gpu->hung;
}
