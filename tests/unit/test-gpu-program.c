/* SPDX-License-Identifier: Apache-2.0 */
/* Programs: sharing, the binary cache on disk, the compiler in a child process, launch checks. */

#include "opencl/gpu-internal.h"
#include "tests/lib/patience.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static const char *const sources[] = {"selftest.cl"};

/* A cache directory of its own for each case. */
typedef struct Fixture {
    char directory[64];
} Fixture;

static int setup(void **state)
{
    Fixture *fixture = calloc(1, sizeof(*fixture));

    if (!fixture)
        return -1;
    (void)snprintf(fixture->directory, sizeof(fixture->directory), "/tmp/leat-test-XXXXXX");
    *state = fixture;
    return mkdtemp(fixture->directory) ? 0 : -1;
}

/* Calls @each with every file of the cache; their number. */
static size_t for_each_entry(const Fixture *fixture, void (*each)(const char *path))
{
    DIR *directory = opendir(fixture->directory);
    size_t n = 0;

    assert_non_null(directory);
    for (struct dirent *entry; (entry = readdir(directory));) {
        char path[512];

        if (entry->d_name[0] == '.' && (!entry->d_name[1] || entry->d_name[1] == '.'))
            continue;
        (void)snprintf(path, sizeof(path), "%s/%s", fixture->directory, entry->d_name);
        n++;
        if (each)
            each(path);
    }
    (void)closedir(directory);
    return n;
}

static void remove_entry(const char *path)
{
    assert_int_equal(unlink(path), 0);
}

static int teardown(void **state)
{
    Fixture *fixture = *state;

    (void)chmod(fixture->directory, 0700);
    (void)for_each_entry(fixture, remove_entry);
    (void)rmdir(fixture->directory);
    free(fixture);
    return 0;
}

static Gpu *open_gpu(const char *cache_dir, const char *compiler)
{
    const GpuOptions options = {.cache_dir = cache_dir, .compiler = compiler, .deadline_usec = PATIENCE_USEC};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Gpu *gpu = NULL;
    int r = gpu_open(&options, &gpu, &detail);

    if (r)
        print_error("gpu_open: %d: %s\n", r, detail.text);
    assert_int_equal(r, 0);
    return gpu;
}

/* Runs a kernel of @program and looks at what it did, so that a program is known to work. */
static void check_works(Gpu *gpu, GpuProgram *program)
{
    _cleanup_(gpu_kernel_freep) GpuKernel *kernel = NULL;
    _cleanup_(gpu_buffer_freep) GpuBuffer *in = NULL, *out = NULL;
    const uint32_t x[2] = {0x12345678, 0x9abcdef0};
    uint32_t y[2] = {0};

    assert_int_equal(gpu_kernel_new(program, "selftest_answers", &kernel, NULL), 0);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, sizeof(x), &in, NULL), 0);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, sizeof(y), &out, NULL), 0);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_COMPUTE, in, 0, x, sizeof(x), GPU_WAIT_NONE, "x", NULL), 0);
    assert_int_equal(gpu_kernel_set_buffer(kernel, 0, in), 0);
    assert_int_equal(gpu_kernel_set_buffer(kernel, 1, out), 0);
    assert_int_equal(gpu_launch(kernel, GPU_RANGE_1D(2, 1), GPU_WAIT_NONE, NULL), 0);
    assert_int_equal(gpu_download(gpu, GPU_QUEUE_COMPUTE, out, 0, y, sizeof(y), GPU_WAIT_NONE, "y", NULL), 0);
    assert_int_equal(gpu_drain(gpu, NULL), 0);
    for (int i = 0; i < 2; i++) {
        float f = (float)(x[i] & 0xffff) * 0.25f + 1.0f;
        uint32_t bits;

        memcpy(&bits, &f, sizeof(bits));
        assert_int_equal(y[i], ((x[i] * UINT32_C(2654435761)) ^ (x[i] >> 7)) + bits);
    }
}

/* Opens, gets the program, runs it; whether it came from the cache. */
static bool build_once(const char *cache_dir, const char *compiler, const char *program_options)
{
    _cleanup_(gpu_freep) Gpu *gpu = open_gpu(cache_dir, compiler);
    GpuProgram *program = NULL;
    GpuCounters counters;

    assert_int_equal(gpu_program_get(gpu, sources, 1, program_options, &program, NULL), 0);
    check_works(gpu, program);
    gpu_counters(gpu, &counters);
    assert_int_equal(counters.n_programs_built + counters.n_programs_from_cache, 1);
    return counters.n_programs_from_cache == 1;
}

static void gpu_program_get_shares_one_program_by_sources_and_options(void **state)
{
    _cleanup_(gpu_freep) Gpu *gpu = open_gpu(NULL, NULL);
    GpuProgram *a = NULL, *b = NULL, *c = NULL;
    GpuCounters counters;

    (void)state;
    assert_int_equal(gpu_program_get(gpu, sources, 1, "-DSIZE=1", &a, NULL), 0);
    assert_int_equal(gpu_program_get(gpu, sources, 1, "-DSIZE=1", &b, NULL), 0);
    assert_int_equal(gpu_program_get(gpu, sources, 1, "-DSIZE=2", &c, NULL), 0);
    assert_ptr_equal(a, b);
    assert_ptr_not_equal(a, c);
    gpu_counters(gpu, &counters);
    assert_int_equal(counters.n_programs_built, 2);
}

static void gpu_program_get_refuses_an_unknown_source(void **state)
{
    _cleanup_(gpu_freep) Gpu *gpu = open_gpu(NULL, NULL);
    const char *const unknown[] = {"no-such.cl"};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuProgram *program = NULL;

    (void)state;
    assert_int_equal(gpu_program_get(gpu, unknown, 1, "", &program, &detail), -ENOENT);
    assert_non_null(strstr(detail.text, "no-such.cl"));
    assert_false(gpu_is_lost(gpu));
}

static void gpu_program_get_says_what_does_not_compile_and_keeps_the_device(void **state)
{
    _cleanup_(gpu_freep) Gpu *gpu = open_gpu(NULL, NULL);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuProgram *program = NULL;

    (void)state;
    /* The macro breaks the source; the message names our file. */
    assert_int_equal(gpu_program_get(gpu, sources, 1, "-Dselftest_simd=1", &program, &detail), GPU_E_BUILD_FAILED);
    print_message("%s\n", detail.text);
    assert_non_null(strstr(detail.text, "selftest.cl"));
    assert_false(gpu_is_lost(gpu));
    assert_int_equal(gpu_program_get(gpu, sources, 1, "", &program, &detail), 0);
    check_works(gpu, program);
}

static void gpu_cache_second_start_builds_nothing(void **state)
{
    Fixture *fixture = *state;

    assert_false(build_once(fixture->directory, NULL, "-DX=1"));
    assert_int_equal(for_each_entry(fixture, NULL), 2); /* the self-test and this one */
    assert_true(build_once(fixture->directory, NULL, "-DX=1"));
    assert_false(build_once(fixture->directory, NULL, "-DX=2"));
    assert_int_equal(for_each_entry(fixture, NULL), 3);
}

static void flip_last_byte(const char *path)
{
    int fd = open(path, O_RDWR);
    unsigned char byte;

    assert_true(fd >= 0);
    assert_true(lseek(fd, -1, SEEK_END) > 0);
    assert_int_equal(read(fd, &byte, 1), 1);
    byte ^= 1;
    assert_true(lseek(fd, -1, SEEK_END) > 0);
    assert_int_equal(write(fd, &byte, 1), 1);
    (void)close(fd);
}

static void cut_by_one(const char *path)
{
    struct stat status;

    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(truncate(path, status.st_size - 1), 0);
}

static void cut_in_header(const char *path)
{
    assert_int_equal(truncate(path, 50), 0);
}

static void make_empty(const char *path)
{
    assert_int_equal(truncate(path, 0), 0);
}

static void change_key(const char *path)
{
    int fd = open(path, O_RDWR);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "another", 7, 24), 7);
    (void)close(fd);
}

static void change_size(const char *path)
{
    int fd = open(path, O_RDWR);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "\xff\xff\xff\xff\xff\xff\xff\xff", 8, 16), 8);
    (void)close(fd);
}

static void let_others_write(const char *path)
{
    assert_int_equal(chmod(path, 0666), 0);
}

static void replace_by_link(const char *path)
{
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink("/dev/zero", path), 0);
}

static void gpu_cache_compiles_again_when_an_entry_is_damaged_or_foreign(void **state)
{
    void (*const damages[])(const char *) = {flip_last_byte, cut_by_one,  cut_in_header,    make_empty,
                                             change_key,     change_size, let_others_write, replace_by_link};
    Fixture *fixture = *state;

    assert_false(build_once(fixture->directory, NULL, "-DX=1"));
    for (size_t i = 0; i < N_ELEMENTS(damages); i++) {
        (void)for_each_entry(fixture, damages[i]);
        assert_false(build_once(fixture->directory, NULL, "-DX=1"));
        assert_true(build_once(fixture->directory, NULL, "-DX=1")); /* and it was written anew */
    }
}

static void gpu_cache_with_valid_frame_and_a_binary_the_driver_refuses_compiles_again(void **state)
{
    Fixture *fixture = *state;
    GpuBinary nonsense = {.bytes = (unsigned char[]){"not a program"}, .n_bytes = 13};
    _cleanup_(gpu_freep) Gpu *gpu = open_gpu(NULL, NULL);
    GpuProgram *program = NULL;
    GpuCounters counters;

    if (strstr(gpu_info(gpu)->platform, "rusticl")) {
        print_message("skipped: this driver aborts the process when a binary is not its own\n");
        skip();
    }
    assert_int_equal(gpu_program_get(gpu, sources, 1, "-DX=1", &program, NULL), 0);
    assert_int_equal(gpu_cache_store(fixture->directory, program->key, &nonsense), 0);
    assert_false(build_once(fixture->directory, NULL, "-DX=1"));
    assert_true(build_once(fixture->directory, NULL, "-DX=1"));
    gpu_counters(gpu, &counters);
    assert_int_equal(counters.n_programs_built, 1);
}

static void gpu_cache_that_cannot_be_used_costs_time_only(void **state)
{
    Fixture *fixture = *state;
    char path[128];

    assert_false(build_once("/proc/no/such/directory", NULL, "-DX=1"));
    (void)snprintf(path, sizeof(path), "%s/made", fixture->directory);
    assert_false(build_once(path, NULL, "-DX=1")); /* is created */
    assert_true(build_once(path, NULL, "-DX=1"));
    {
        Fixture inner;

        (void)snprintf(inner.directory, sizeof(inner.directory), "%.60s", path);
        assert_int_equal(for_each_entry(&inner, remove_entry), 2);
    }
    assert_int_equal(rmdir(path), 0);
}

/* ---- the child --------------------------------------------------------------------------------------------------- */

/* This program is its own compiler: see main(). */
#define OWN_COMPILER "/proc/self/exe"

static void gpu_compiler_child_builds_and_the_cache_keeps_it(void **state)
{
    Fixture *fixture = *state;

    assert_false(build_once(fixture->directory, OWN_COMPILER, "-DX=3"));
    assert_true(build_once(fixture->directory, OWN_COMPILER, "-DX=3"));
    assert_false(build_once(NULL, OWN_COMPILER, "-DX=3"));
}

static void gpu_compiler_child_reports_what_does_not_compile(void **state)
{
    _cleanup_(gpu_freep) Gpu *gpu = open_gpu(NULL, OWN_COMPILER);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuProgram *program = NULL;

    (void)state;
    assert_int_equal(gpu_program_get(gpu, sources, 1, "-Dselftest_simd=1", &program, &detail), GPU_E_BUILD_FAILED);
    assert_non_null(strstr(detail.text, "selftest.cl"));
    assert_false(gpu_is_lost(gpu));
}

static void check_compiler_fails(const char *compiler, const char *expected)
{
    _cleanup_(gpu_freep) Gpu *gpu = open_gpu(NULL, NULL);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuProgram *program = NULL;

    gpu->compiler = strdup(compiler);
    gpu->compile_usec = 2000000;
    assert_int_equal(gpu_program_get(gpu, sources, 1, "-DX=4", &program, &detail), GPU_E_BUILD_FAILED);
    print_message("%s\n", detail.text);
    assert_non_null(strstr(detail.text, expected));
    assert_non_null(strstr(detail.text, compiler));
    assert_false(gpu_is_lost(gpu));
}

static void check_script_fails(const Fixture *fixture, const char *script, const char *expected)
{
    char path[128];
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/compiler", fixture->directory);
    file = fopen(path, "w");
    assert_non_null(file);
    (void)fprintf(file, "#!/bin/sh\n%s\n", script);
    assert_int_equal(fchmod(fileno(file), 0700), 0);
    assert_int_equal(fclose(file), 0);
    check_compiler_fails(path, expected);
}

static void gpu_compiler_that_fails_is_a_build_failure_with_its_reason(void **state)
{
    Fixture *fixture = *state;

    check_compiler_fails("/no/such/compiler", "No such file");
    check_compiler_fails("/bin/false", "status 1");
    check_compiler_fails("/bin/cat", "");              /* does not know the option */
    check_script_fails(fixture, "kill -SEGV $$", "SIGSEGV");
    check_script_fails(fixture, "exit 7", "status 7");
    check_script_fails(fixture, "cat", "");            /* sends the job back */
    check_script_fails(fixture, "exec sleep 60", "2000 ms");
    check_script_fails(fixture, "printf leatclb1; exec sleep 60", "2000 ms");
    check_script_fails(fixture, "printf 'leatclb1\\377\\377\\377\\377\\377\\377\\377\\377\\377\\377\\377\\377\\377\\377\\377\\377"
                                "\\377\\377\\377\\377\\377\\377\\377\\377'", "");
}

static void gpu_compiler_main_refuses_what_is_not_a_job(void **state)
{
    int fds[2];

    (void)state;
    assert_int_equal(pipe(fds), 0);
    assert_int_equal(write(fds[1], "leatjob1\xff\xff\xff\xff\xff\xff\xff\xff", 16), 16);
    (void)close(fds[1]);
    assert_int_not_equal(gpu_compiler_main(fds[0], STDERR_FILENO), 0);
    (void)alarm(0);
    (void)close(fds[0]);
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

static void gpu_kernel_new_refuses_an_unknown_name(void **state)
{
    _cleanup_(gpu_freep) Gpu *gpu = open_gpu(NULL, NULL);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuProgram *program = NULL;
    GpuKernel *kernel = NULL;

    (void)state;
    assert_int_equal(gpu_program_get(gpu, sources, 1, "", &program, NULL), 0);
    assert_int_equal(gpu_kernel_new(program, "no_such_kernel", &kernel, &detail), -ENOENT);
    assert_null(kernel);
    assert_non_null(strstr(detail.text, "no_such_kernel"));
    assert_false(gpu_is_lost(gpu));
}

static void gpu_launch_refuses_ranges_that_do_not_fit_and_keeps_the_device(void **state)
{
    _cleanup_(gpu_freep) Gpu *gpu = open_gpu(NULL, NULL);
    _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;
    _cleanup_(gpu_kernel_freep) GpuKernel *kernel = NULL;
    GpuProgram *program = NULL;
    GpuCounters counters;
    size_t most;

    (void)state;
    assert_int_equal(gpu_program_get(gpu, sources, 1, "", &program, NULL), 0);
    assert_int_equal(gpu_kernel_new(program, "selftest_answers", &kernel, NULL), 0);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 4096, &buffer, NULL), 0);
    assert_int_equal(gpu_kernel_set_buffer(kernel, 0, buffer), 0);
    assert_int_equal(gpu_kernel_set_buffer(kernel, 1, buffer), 0);
    most = gpu_kernel_max_work_group(kernel);
    assert_true(most >= 1 && most <= gpu_info(gpu)->max_work_group_size);
    assert_int_equal(gpu_launch(kernel, GPU_RANGE_1D(3, 2), GPU_WAIT_NONE, NULL), -EINVAL);
    assert_int_equal(gpu_launch(kernel, GPU_RANGE_1D(0, 1), GPU_WAIT_NONE, NULL), -EINVAL);
    assert_int_equal(gpu_launch(kernel, GPU_RANGE_1D(1, 0), GPU_WAIT_NONE, NULL), -EINVAL);
    assert_int_equal(gpu_launch(kernel, GPU_RANGE_2D(4, 3, 2, 2), GPU_WAIT_NONE, NULL), -EINVAL);
    assert_int_equal(gpu_launch(kernel, GPU_RANGE_1D(2 * most, 2 * most), GPU_WAIT_NONE, NULL), -EINVAL);
    assert_int_equal(gpu_launch(kernel, GPU_RANGE_2D(most, 2, most, 2), GPU_WAIT_NONE, NULL), -EINVAL);
    gpu_counters(gpu, &counters);
    assert_int_equal(counters.n_launches, 0);
    assert_false(gpu_is_lost(gpu));
    assert_int_equal(gpu_launch(kernel, GPU_RANGE_1D(4, 1), GPU_WAIT_NONE, NULL), 0);
    assert_int_equal(gpu_drain(gpu, NULL), 0);
    gpu_counters(gpu, &counters);
    assert_int_equal(counters.n_launches, 1);
}

static void gpu_launch_that_the_driver_refuses_loses_the_device(void **state)
{
    _cleanup_(gpu_freep) Gpu *gpu = open_gpu(NULL, NULL);
    _cleanup_(gpu_kernel_freep) GpuKernel *kernel = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuProgram *program = NULL;
    GpuBuffer *buffer = NULL;

    (void)state;
    assert_int_equal(gpu_program_get(gpu, sources, 1, "", &program, NULL), 0);
    assert_int_equal(gpu_kernel_new(program, "selftest_answers", &kernel, NULL), 0);
    /* Arguments never set. */
    assert_int_equal(gpu_launch(kernel, GPU_RANGE_1D(1, 1), GPU_WAIT_NONE, NULL), -EINVAL);
    assert_true(gpu_is_lost(gpu));
    assert_int_equal(gpu_launch(kernel, GPU_RANGE_1D(1, 1), GPU_WAIT_NONE, NULL), -ENODEV);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 64, &buffer, &detail), -ENODEV);
    print_message("%s\n", detail.text);
    assert_non_null(strstr(detail.text, "CL_INVALID_KERNEL_ARGS"));
    assert_non_null(strstr(detail.text, "clEnqueueNDRangeKernel"));
    assert_int_equal(gpu_step_begin(gpu), -ENODEV);
    assert_int_equal(gpu_step_finish(gpu, &detail), -ENODEV);
    assert_int_equal(gpu_program_get(gpu, sources, 1, "-DX=9", &program, &detail), -ENODEV);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpu_program_get_shares_one_program_by_sources_and_options),
        cmocka_unit_test(gpu_program_get_refuses_an_unknown_source),
        cmocka_unit_test(gpu_program_get_says_what_does_not_compile_and_keeps_the_device),
        cmocka_unit_test_setup_teardown(gpu_cache_second_start_builds_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(gpu_cache_compiles_again_when_an_entry_is_damaged_or_foreign, setup, teardown),
        cmocka_unit_test_setup_teardown(gpu_cache_with_valid_frame_and_a_binary_the_driver_refuses_compiles_again, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(gpu_cache_that_cannot_be_used_costs_time_only, setup, teardown),
        cmocka_unit_test_setup_teardown(gpu_compiler_child_builds_and_the_cache_keeps_it, setup, teardown),
        cmocka_unit_test(gpu_compiler_child_reports_what_does_not_compile),
        cmocka_unit_test_setup_teardown(gpu_compiler_that_fails_is_a_build_failure_with_its_reason, setup, teardown),
        cmocka_unit_test(gpu_compiler_main_refuses_what_is_not_a_job),
        cmocka_unit_test(gpu_kernel_new_refuses_an_unknown_name),
        cmocka_unit_test(gpu_launch_refuses_ranges_that_do_not_fit_and_keeps_the_device),
        cmocka_unit_test(gpu_launch_that_the_driver_refuses_loses_the_device),
    };

    if (argc == 2 && strcmp(argv[1], "--compile-program") == 0)
        return gpu_compiler_main(STDIN_FILENO, STDOUT_FILENO);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
