/* SPDX-License-Identifier: Apache-2.0 */
/* Programs from embedded sources: text, key, build. */

#include "opencl/gpu-internal.h"
#include "opencl/kernels.h"
#include "quant/base/log.h"

#include <openssl/evp.h>
#include <string.h>

/* What all kernels are written in. */
#define BASE_OPTIONS "-cl-std=CL1.2"

/* ---- text and key ------------------------------------------------------------------------------------------------ */

static const KernelSource *find_source(const char *name)
{
    for (const KernelSource *source = leat_kernel_sources; source->name; source++)
        if (strcmp(source->name, name) == 0)
            return source;
    return NULL;
}

/* All sources in one text; "#line" makes the compiler's messages name the right file. */
static int program_text(const char *const *sources, size_t n_sources, char **ret, ErrorDetail *reterr)
{
    _cleanup_(freep) char *text = NULL;
    size_t size = 0;
    FILE *stream = open_memstream(&text, &size);

    if (!stream)
        return error_origin(-ENOMEM);
    for (size_t i = 0; i < n_sources; i++) {
        const KernelSource *source = find_source(sources[i]);

        if (!source) {
            (void)fclose(stream);
            return error_detail_set(reterr, -ENOENT, "no kernel source '%s' is built in", sources[i]);
        }
        (void)fprintf(stream, "#line 1 \"%s\"\n%s\n", source->name, source->text);
    }
    if (fclose(stream) != 0)
        return error_origin(-ENOMEM);
    *ret = TAKE_PTR(text);
    return 0;
}

/* Everything that a binary depends on; with the NULs, so that "ab" "c" is not "a" "bc". */
static int program_key(const Gpu *gpu, const char *text, const char *options, unsigned char ret[GPU_KEY_BYTES])
{
    const char *const parts[] = {LEAT_VERSION,      text,
                                 options,           gpu->info.name,
                                 gpu->info.vendor,  gpu->info.driver,
                                 gpu->info.opencl_c, gpu->info.platform,
                                 gpu->platform_version};
    _cleanup_(freep) char *all = NULL;
    size_t size = 0;
    FILE *stream = open_memstream(&all, &size);

    if (!stream)
        return error_origin(-ENOMEM);
    for (size_t i = 0; i < N_ELEMENTS(parts); i++)
        (void)fwrite(parts[i], 1, strlen(parts[i]) + 1, stream);
    if (fclose(stream) != 0)
        return error_origin(-ENOMEM);
    if (EVP_Digest(all, size, ret, NULL, EVP_sha256(), NULL) != 1)
        return error_origin(-EIO);
    return 0;
}

/* ---- build ------------------------------------------------------------------------------------------------------- */

/* The line of a build log that a person needs: the first that says "error", else the first. */
static void log_line(const char *log, char *line, size_t size)
{
    const char *from = strcasestr(log, "error"), *end;

    if (!from)
        from = log;
    while (from > log && from[-1] != '\n')
        from--;
    end = strchrnul(from, '\n');
    (void)snprintf(line, size, "%.*s", (int)MIN((size_t)(end - from), size - 1), from);
}

static void debug_log(const char *log)
{
    for (const char *end; *log; log = *end ? end + 1 : end) {
        end = strchrnul(log, '\n');
        log_debug("build: %.*s", (int)MIN(end - log, (ptrdiff_t)900), log);
    }
}

static int build_failed(const Gpu *gpu, const char *log, ErrorDetail *reterr)
{
    char line[300];

    debug_log(log);
    log_line(log, line, sizeof(line));
    return error_detail_set(reterr, GPU_E_BUILD_FAILED, "a program does not compile on '%s': %s", gpu->info.name, line);
}

static char *read_build_log(cl_program program, cl_device_id device)
{
    size_t size = 0;
    char *log;

    if (clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, 0, NULL, &size) != CL_SUCCESS || size > 1 << 20)
        size = 0;
    log = calloc(1, size + 1);
    if (log && size && clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, size, log, NULL) != CL_SUCCESS)
        log[0] = 0;
    return log;
}

int gpu_build_source(cl_context context, cl_device_id device, const char *text, const char *options, cl_program *ret,
                     char **ret_log)
{
    cl_program program;
    cl_int status;

    program = clCreateProgramWithSource(context, 1, &text, NULL, &status);
    if (status != CL_SUCCESS)
        return CL_CHECK(NULL, status, "clCreateProgramWithSource");
    status = clBuildProgram(program, 1, &device, options, NULL, NULL);
    if (status != CL_SUCCESS) {
        *ret_log = read_build_log(program, device);
        if (*ret_log && !(*ret_log)[0]) {
            free(*ret_log);
            *ret_log = strdup(gpu_cl_text(status));
        }
        (void)clReleaseProgram(program);
        return error_origin(GPU_E_BUILD_FAILED);
    }
    *ret = program;
    return 0;
}

void gpu_binary_deinit(GpuBinary *binary)
{
    free(binary->bytes);
}

int gpu_program_binary(cl_program program, GpuBinary *ret)
{
    _cleanup_(gpu_binary_deinit) GpuBinary binary = {0};
    cl_uint n_devices = 0;
    int r;

    r = CL_TRY(NULL, clGetProgramInfo(program, CL_PROGRAM_NUM_DEVICES, sizeof(n_devices), &n_devices, NULL));
    if (r || n_devices != 1)
        return r ? r : error_origin(-EIO);
    r = CL_TRY(NULL, clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof(binary.n_bytes), &binary.n_bytes, NULL));
    if (r || binary.n_bytes == 0)
        return r ? r : error_origin(-ENODATA);
    binary.bytes = malloc(binary.n_bytes);
    if (!binary.bytes)
        return error_origin(-ENOMEM);
    r = CL_TRY(NULL, clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof(binary.bytes), &binary.bytes, NULL));
    if (r)
        return r;
    *ret = binary;
    binary = (GpuBinary){0};
    return 0;
}

/* A binary that the driver refuses is no fault of the device: the caller compiles instead. */
static int program_from_binary(Gpu *gpu, const GpuBinary *binary, cl_program *ret)
{
    const unsigned char *bytes = binary->bytes;
    cl_int status, binary_status = CL_SUCCESS;
    cl_program program;
    int r;

    program = clCreateProgramWithBinary(gpu->context, 1, &gpu->device, &binary->n_bytes, &bytes, &binary_status, &status);
    if (status != CL_SUCCESS)
        return CL_CHECK(NULL, status, "clCreateProgramWithBinary");
    r = CL_CHECK(NULL, binary_status, "clCreateProgramWithBinary");
    if (!r)
        r = CL_CHECK(NULL, clBuildProgram(program, 1, &gpu->device, BASE_OPTIONS, NULL, NULL), "clBuildProgram");
    if (r) {
        (void)clReleaseProgram(program);
        return r;
    }
    *ret = program;
    return 0;
}

/* ---- where a program comes from ---------------------------------------------------------------------------------- */

static bool program_from_cache(Gpu *gpu, const unsigned char *key, cl_program *ret)
{
    _cleanup_(gpu_binary_deinit) GpuBinary binary = {0};

    if (!gpu->cache_dir || gpu_cache_load(gpu->cache_dir, key, &binary))
        return false;
    if (program_from_binary(gpu, &binary, ret)) {
        gpu_cache_drop(gpu->cache_dir, key);
        return false;
    }
    return true;
}

static void program_to_cache(Gpu *gpu, const unsigned char *key, const GpuBinary *binary)
{
    int r = gpu->cache_dir && binary->n_bytes ? gpu_cache_store(gpu->cache_dir, key, binary) : 0;

    if (r)
        log_debug("program cache: cannot write to '%s' (%s), ignoring", gpu->cache_dir, strerror(-r));
}

static int program_build(Gpu *gpu, const char *text, const char *options, GpuBinary *binary, cl_program *ret,
                         ErrorDetail *reterr)
{
    _cleanup_(freep) char *log = NULL;
    int r;

    if (gpu->compiler)
        r = gpu_compile_in_child(gpu, text, options, binary, &log, reterr);
    else
        r = gpu_build_source(gpu->context, gpu->device, text, options, ret, &log);
    if (r && log)
        return build_failed(gpu, log, reterr);
    if (r)
        return error_trace(r);
    if (!gpu->compiler) /* without a binary there is nothing to cache, and no harm */
        return gpu->cache_dir && gpu_program_binary(*ret, binary) == -ENOMEM ? error_origin(-ENOMEM) : 0;
    if (program_from_binary(gpu, binary, ret))
        return error_detail_set(reterr, GPU_E_BUILD_FAILED, "'%s' does not load what its own compiler made", gpu->info.name);
    return 0;
}

static int program_new(Gpu *gpu, const unsigned char *key, const char *text, const char *options, GpuProgram **ret,
                       ErrorDetail *reterr)
{
    _cleanup_(gpu_binary_deinit) GpuBinary binary = {0};
    _cleanup_(freep) GpuProgram *program = calloc(1, sizeof(*program));
    int r;

    if (!program)
        return error_origin(-ENOMEM);
    if (program_from_cache(gpu, key, &program->cl)) {
        gpu->counters.n_programs_from_cache++;
    } else {
        r = program_build(gpu, text, options, &binary, &program->cl, reterr);
        if (r)
            return r;
        gpu->counters.n_programs_built++;
        program_to_cache(gpu, key, &binary);
    }
    program->gpu = gpu;
    memcpy(program->key, key, GPU_KEY_BYTES);
    program->next = gpu->programs;
    gpu->programs = program;
    *ret = TAKE_PTR(program);
    return 0;
}

int gpu_program_get(Gpu *gpu, const char *const *sources, size_t n_sources, const char *options, GpuProgram **ret,
                    ErrorDetail *reterr)
{
    _cleanup_(freep) char *text = NULL, *all_options = NULL;
    unsigned char key[GPU_KEY_BYTES];
    int r;

    if (gpu_is_lost(gpu))
        return gpu_refuse_lost(gpu, reterr);
    if (asprintf(&all_options, "%s %s", BASE_OPTIONS, options ? options : "") < 0) {
        all_options = NULL;
        return error_origin(-ENOMEM);
    }
    r = program_text(sources, n_sources, &text, reterr);
    if (!r)
        r = program_key(gpu, text, all_options, key);
    if (r)
        return error_trace(r);
    for (GpuProgram *program = gpu->programs; program; program = program->next)
        if (memcmp(program->key, key, sizeof(key)) == 0) {
            *ret = program;
            return 0;
        }
    return program_new(gpu, key, text, all_options, ret, reterr);
}

void gpu_programs_free(Gpu *gpu)
{
    while (gpu->programs) {
        GpuProgram *program = gpu->programs;

        gpu->programs = program->next;
        if (!gpu->hung)
            (void)clReleaseProgram(program->cl);
        free(program);
    }
    while (gpu->names) {
        GpuName *name = gpu->names;

        gpu->names = name->next;
        free(name);
    }
}

const char *gpu_intern(Gpu *gpu, const char *text)
{
    GpuName *name;
    size_t size = strlen(text) + 1;

    for (name = gpu->names; name; name = name->next)
        if (strcmp(name->text, text) == 0)
            return name->text;
    name = malloc(sizeof(*name) + size);
    if (!name)
        return NULL;
    memcpy(name->text, text, size);
    name->next = gpu->names;
    gpu->names = name;
    return name->text;
}
