/* SPDX-License-Identifier: Apache-2.0 */
/* Which device: every device of every platform is looked at, GPU before accelerator before CPU, and the reason is kept. */

#include "opencl/gpu-internal.h"
#include "quant/base/log.h"

#include <stdarg.h>
#include <string.h>

#define PLATFORMS_MAX            32
#define DEVICES_PER_PLATFORM_MAX 32
#define DEFAULT_VENDORS_DIR      "/etc/OpenCL/vendors"
#define PACKAGES_TO_INSTALL      "pocl-opencl-icd (any CPU), intel-opencl-icd, mesa-opencl-icd or nvidia-opencl-icd"

/* A device that could be used, or the reason why it cannot. */
typedef struct Candidate {
    cl_platform_id platform;
    cl_device_id device;
    GpuInfo info;
    const GpuMatch *match; /* NULL: none matched */
    const char *refused;   /* NULL: usable */
    bool preferred_cpu;    /* PoCL: measured far ahead of the other CPU drivers with our kernels */
} Candidate;

typedef struct Candidates {
    Candidate *items;
    size_t n_items;
    char platforms[256]; /* their names, for texts */
} Candidates;

static void candidates_deinit(Candidates *candidates)
{
    free(candidates->items);
}

const char *gpu_device_type_to_string(GpuDeviceType type)
{
    switch (type) {
    case GPU_DEVICE_TYPE_GPU:
        return "gpu";
    case GPU_DEVICE_TYPE_ACCELERATOR:
        return "accelerator";
    case GPU_DEVICE_TYPE_CPU:
        return "cpu";
    case GPU_DEVICE_TYPE_X_MAX:
    case GPU_DEVICE_TYPE_X_INVALID:
        break;
    }
    return NULL;
}

static const char *type_in_words(GpuDeviceType type)
{
    switch (type) {
    case GPU_DEVICE_TYPE_GPU:
        return "GPU";
    case GPU_DEVICE_TYPE_ACCELERATOR:
        return "accelerator";
    case GPU_DEVICE_TYPE_CPU:
        return "CPU";
    case GPU_DEVICE_TYPE_X_MAX:
    case GPU_DEVICE_TYPE_X_INVALID:
        break;
    }
    return "other";
}

static void append(char *text, size_t size, const char *format, ...) _printf_(3, 4);
static void append(char *text, size_t size, const char *format, ...)
{
    size_t n = strlen(text);
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text + n, size - n, format, args);
    va_end(args);
}

/* Drivers pad names with blanks and may forget the NUL. */
static void tidy(char *text, size_t size)
{
    size_t from = 0, to = 0;

    text[size - 1] = 0;
    for (; text[from]; from++) {
        unsigned char c = (unsigned char)text[from];
        bool blank = c <= ' ' || c >= 0x7f;

        if (blank && (to == 0 || text[to - 1] == ' '))
            continue;
        text[to++] = blank ? ' ' : (char)c;
    }
    while (to > 0 && text[to - 1] == ' ')
        to--;
    text[to] = 0;
}

void gpu_device_string(cl_device_id device, cl_device_info what, char *text, size_t size)
{
    char value[1024] = "";

    /* A longer value than 1 KiB (only extension lists are) leaves the text empty. */
    if (clGetDeviceInfo(device, what, sizeof(value) - 1, value, NULL) != CL_SUCCESS)
        value[0] = 0;
    tidy(value, sizeof(value));
    (void)snprintf(text, size, "%s", value);
}

void gpu_platform_string(cl_platform_id platform, cl_platform_info what, char *text, size_t size)
{
    char value[1024] = "";

    if (clGetPlatformInfo(platform, what, sizeof(value) - 1, value, NULL) != CL_SUCCESS)
        value[0] = 0;
    tidy(value, sizeof(value));
    (void)snprintf(text, size, "%s", value);
}

static uint64_t device_number(cl_device_id device, cl_device_info what, size_t size)
{
    union {
        cl_uint u32;
        cl_ulong u64;
        size_t size;
    } value = {0};

    if (clGetDeviceInfo(device, what, size, &value, NULL) != CL_SUCCESS)
        return 0;
    return size == sizeof(cl_uint) ? value.u32 : value.u64;
}

#define DEVICE_U32(device, what) ((uint32_t)device_number((device), (what), sizeof(cl_uint)))
#define DEVICE_U64(device, what) device_number((device), (what), sizeof(cl_ulong))

static GpuDeviceType type_of(cl_device_id device)
{
    cl_device_type type = DEVICE_U64(device, CL_DEVICE_TYPE);

    if (type & CL_DEVICE_TYPE_GPU)
        return GPU_DEVICE_TYPE_GPU;
    if (type & CL_DEVICE_TYPE_ACCELERATOR)
        return GPU_DEVICE_TYPE_ACCELERATOR;
    if (type & CL_DEVICE_TYPE_CPU)
        return GPU_DEVICE_TYPE_CPU;
    return GPU_DEVICE_TYPE_X_INVALID; /* CL_DEVICE_TYPE_CUSTOM: runs built-in kernels only */
}

static void read_info(Candidate *candidate)
{
    cl_device_id device = candidate->device;
    GpuInfo *info = &candidate->info;

    gpu_device_string(device, CL_DEVICE_NAME, info->name, sizeof(info->name));
    gpu_device_string(device, CL_DEVICE_VENDOR, info->vendor, sizeof(info->vendor));
    gpu_device_string(device, CL_DRIVER_VERSION, info->driver, sizeof(info->driver));
    gpu_device_string(device, CL_DEVICE_OPENCL_C_VERSION, info->opencl_c, sizeof(info->opencl_c));
    gpu_platform_string(candidate->platform, CL_PLATFORM_NAME, info->platform, sizeof(info->platform));
    info->type = type_of(device);
    info->simd = GPU_SIMD_PORTABLE;
    info->unified_memory = DEVICE_U32(device, CL_DEVICE_HOST_UNIFIED_MEMORY) != 0;
    info->compute_units = DEVICE_U32(device, CL_DEVICE_MAX_COMPUTE_UNITS);
    info->max_work_group_size = device_number(device, CL_DEVICE_MAX_WORK_GROUP_SIZE, sizeof(size_t));
    info->memory_bytes = DEVICE_U64(device, CL_DEVICE_GLOBAL_MEM_SIZE);
    info->max_allocation_bytes = DEVICE_U64(device, CL_DEVICE_MAX_MEM_ALLOC_SIZE);
    info->local_memory_bytes = DEVICE_U64(device, CL_DEVICE_LOCAL_MEM_SIZE);
    /* In bits, not bytes. */
    info->base_alignment_bytes = MAX(DEVICE_U32(device, CL_DEVICE_MEM_BASE_ADDR_ALIGN) / 8, 1u);
    candidate->preferred_cpu = strcasestr(info->platform, "Portable Computing Language") != NULL;
}

static bool matches(const GpuMatch *match, const GpuInfo *info)
{
    return (!match->vendor || strcasestr(info->vendor, match->vendor)) &&
           (!match->name || strcasestr(info->name, match->name)) &&
           (match->type == GPU_DEVICE_TYPE_X_INVALID || match->type == info->type);
}

static const char *failed_before(const GpuRefusals *refusals, cl_device_id device)
{
    for (size_t i = 0; i < refusals->n; i++)
        if (refusals->devices[i] == device)
            return refusals->reasons[i];
    return NULL;
}

static void judge(Candidate *candidate, const GpuOptions *options, const GpuRefusals *refusals)
{
    for (size_t i = 0; i < options->n_matches && !candidate->match; i++)
        if (matches(&options->matches[i], &candidate->info))
            candidate->match = &options->matches[i];
    candidate->refused = failed_before(refusals, candidate->device);
    if (candidate->refused)
        return;
    if (candidate->info.type == GPU_DEVICE_TYPE_X_INVALID)
        candidate->refused = "it does not run kernels";
    else if (!DEVICE_U32(candidate->device, CL_DEVICE_AVAILABLE))
        candidate->refused = "it is not available";
    else if (!DEVICE_U32(candidate->device, CL_DEVICE_COMPILER_AVAILABLE))
        candidate->refused = "its driver has no compiler";
    else if (!DEVICE_U32(candidate->device, CL_DEVICE_ENDIAN_LITTLE))
        candidate->refused = "it is big-endian";
    else if (candidate->info.memory_bytes == 0 || candidate->info.max_allocation_bytes == 0 ||
             candidate->info.max_work_group_size == 0)
        candidate->refused = "its driver reports no memory";
    else if (candidate->match && candidate->match->use == GPU_USE_NO)
        candidate->refused = "the configuration excludes it";
}

static int add_devices(Candidates *candidates, cl_platform_id platform, const GpuOptions *options,
                       const GpuRefusals *refusals)
{
    cl_device_id devices[DEVICES_PER_PLATFORM_MAX];
    cl_uint n_devices = 0;
    cl_int status = clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, DEVICES_PER_PLATFORM_MAX, devices, &n_devices);
    Candidate *items;
    char name[128];

    gpu_platform_string(platform, CL_PLATFORM_NAME, name, sizeof(name));
    append(candidates->platforms, sizeof(candidates->platforms), "%s%s", candidates->platforms[0] ? ", " : "", name);
    if (status != CL_SUCCESS) { /* A platform without a device is ordinary: Mesa's Clover on a machine without a GPU. */
        log_debug("platform '%s' offers no device: %s", name, gpu_cl_name(status));
        return 0;
    }
    n_devices = MIN(n_devices, (cl_uint)DEVICES_PER_PLATFORM_MAX);
    items = realloc(candidates->items, (candidates->n_items + n_devices) * sizeof(*items));
    if (!items)
        return n_devices ? error_origin(-ENOMEM) : 0;
    candidates->items = items;
    for (cl_uint i = 0; i < n_devices; i++) {
        Candidate *candidate = &items[candidates->n_items++];

        *candidate = (Candidate){.platform = platform, .device = devices[i]};
        read_info(candidate);
        judge(candidate, options, refusals);
        log_debug("device '%s' (%s) on '%s': %s", candidate->info.name, type_in_words(candidate->info.type), name,
                  candidate->refused ? candidate->refused : "usable");
    }
    return 0;
}

static int no_platform(ErrorDetail *reterr)
{
    const char *where = getenv("OCL_ICD_VENDORS"), *variable = "OCL_ICD_VENDORS";

    if (!where || !*where) {
        where = getenv("OPENCL_VENDOR_PATH");
        variable = "OPENCL_VENDOR_PATH";
    }
    if (!where || !*where)
        return error_detail_set(reterr, GPU_E_NO_PLATFORM,
                                "no OpenCL driver: no ICD file in " DEFAULT_VENDORS_DIR
                                " names one that loads; install one of " PACKAGES_TO_INSTALL);
    return error_detail_set(reterr, GPU_E_NO_PLATFORM,
                            "no OpenCL driver: no ICD in %.150s (from %s) loads; install one of " PACKAGES_TO_INSTALL
                            ", or unset %s to look in " DEFAULT_VENDORS_DIR,
                            where, variable, variable);
}

static int collect(const GpuOptions *options, const GpuRefusals *refusals, Candidates *candidates, ErrorDetail *reterr)
{
    cl_platform_id platforms[PLATFORMS_MAX];
    cl_uint n_platforms = 0;
    cl_int status = clGetPlatformIDs(PLATFORMS_MAX, platforms, &n_platforms);
    int r;

    /* The loader says CL_PLATFORM_NOT_FOUND_KHR, some loaders 0 platforms. */
    if (status != CL_SUCCESS || n_platforms == 0)
        return no_platform(reterr);
    n_platforms = MIN(n_platforms, (cl_uint)PLATFORMS_MAX);
    for (cl_uint i = 0; i < n_platforms; i++) {
        r = add_devices(candidates, platforms[i], options, refusals);
        if (r)
            return error_trace(r);
    }
    return 0;
}

static bool is_fallback(const Candidate *candidate)
{
    return candidate->match && candidate->match->use == GPU_USE_FALLBACK;
}

/* Whether @a comes before @b; on a tie the driver's order stays. */
static bool is_better(const Candidate *a, const Candidate *b)
{
    if (is_fallback(a) != is_fallback(b))
        return is_fallback(b);
    if (a->info.type != b->info.type)
        return a->info.type < b->info.type;
    if (a->info.type == GPU_DEVICE_TYPE_CPU)
        return a->preferred_cpu && !b->preferred_cpu;
    return false;
}

static void say_why(const Candidates *candidates, Candidate *best)
{
    char *text = best->info.reason;
    size_t size = sizeof(best->info.reason), n_usable = 0, n_better_type = 0;

    for (size_t i = 0; i < candidates->n_items; i++) {
        n_usable += !candidates->items[i].refused;
        n_better_type += candidates->items[i].info.type < best->info.type;
    }
    text[0] = 0;
    if (is_fallback(best))
        append(text, size, "configured as fallback, and no other device is usable");
    else if (best->info.type == GPU_DEVICE_TYPE_GPU)
        append(text, size, "%s GPU", n_usable > 1 ? "first usable" : "only usable");
    else if (n_better_type == 0)
        append(text, size, "only %s devices found", type_in_words(best->info.type));
    else
        append(text, size, "no usable GPU, so %s", type_in_words(best->info.type));
    append(text, size, " on %s", candidates->platforms);
    for (size_t i = 0; i < candidates->n_items; i++) {
        const Candidate *other = &candidates->items[i];

        if (other->refused && other->info.type < best->info.type)
            append(text, size, "; %.60s not used: %.100s", other->info.name, other->refused);
        else if (!other->refused && is_fallback(other) && other->info.type < best->info.type)
            append(text, size, "; %.60s is only a fallback", other->info.name);
    }
    if (best->info.type == GPU_DEVICE_TYPE_CPU && best->preferred_cpu && n_usable > 1)
        append(text, size, "; PoCL preferred");
}

static int no_device(const Candidates *candidates, ErrorDetail *reterr)
{
    char refusals[220] = "";

    for (size_t i = 0; i < candidates->n_items; i++)
        append(refusals, sizeof(refusals), "; %.50s: %.100s", candidates->items[i].info.name, candidates->items[i].refused);
    if (candidates->n_items == 0)
        return error_detail_set(reterr, GPU_E_NO_DEVICE,
                                "the OpenCL platforms (%.150s) offer no device; install one of " PACKAGES_TO_INSTALL,
                                candidates->platforms);
    return error_detail_set(reterr, GPU_E_NO_DEVICE, "no usable OpenCL device on %.150s%s", candidates->platforms, refusals);
}

static uint64_t budget_of(const Candidate *best, const GpuOptions *options)
{
    const GpuMatch *match = best->match;
    uint64_t memory = best->info.memory_bytes, budget;

    if (match && (match->max_memory_bytes || match->reserve_bytes)) {
        budget = memory > match->reserve_bytes ? memory - match->reserve_bytes : 0;
        return match->max_memory_bytes ? MIN(budget, match->max_memory_bytes) : budget;
    }
    return options->default_max_memory_bytes ? MIN(options->default_max_memory_bytes, memory) : memory / 4 * 3;
}

int gpu_choose(const GpuOptions *options, const GpuRefusals *refusals, Gpu *gpu, ErrorDetail *reterr)
{
    _cleanup_(candidates_deinit) Candidates candidates = {0};
    Candidate *best = NULL;
    int r = collect(options, refusals, &candidates, reterr);

    if (r)
        return error_trace(r);
    for (size_t i = 0; i < candidates.n_items; i++) {
        Candidate *candidate = &candidates.items[i];

        if (!candidate->refused && (!best || is_better(candidate, best)))
            best = candidate;
    }
    if (!best)
        return no_device(&candidates, reterr);
    say_why(&candidates, best);
    best->info.budget_bytes = budget_of(best, options);
    gpu->info = best->info;
    gpu->platform = best->platform;
    gpu->device = best->device;
    atomic_store(&gpu->budget, best->info.budget_bytes);
    gpu_platform_string(gpu->platform, CL_PLATFORM_VERSION, gpu->platform_version, sizeof(gpu->platform_version));
    return 0;
}

int gpu_find_device(const char *platform, const char *name, cl_platform_id *ret_platform, cl_device_id *ret_device)
{
    _cleanup_(candidates_deinit) Candidates candidates = {0};
    const GpuOptions options = {0};
    int r = collect(&options, &(GpuRefusals){0}, &candidates, NULL);

    if (r < 0)
        return error_trace(r);
    for (size_t i = 0; i < candidates.n_items; i++) {
        const Candidate *candidate = &candidates.items[i];

        if (strcmp(candidate->info.platform, platform) == 0 && strcmp(candidate->info.name, name) == 0) {
            *ret_platform = candidate->platform;
            *ret_device = candidate->device;
            return 0;
        }
    }
    return error_origin(-ENODEV);
}
