/* SPDX-License-Identifier: Apache-2.0 */
/* Device choice: what is taken, why, and what is said when there is none. */

#include "opencl/gpu-internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* The ICD loader reads its environment once per process, so each case with its own environment is a child. */
static int in_child(int (*body)(void *), void *userdata)
{
    int status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0)
        _exit(body(userdata));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int body_no_driver(void *userdata)
{
    const GpuOptions options = {0};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Gpu *gpu = NULL;

    if (setenv("OCL_ICD_VENDORS", userdata, 1) < 0)
        return 10;
    if (gpu_open(&options, &gpu, &detail) != GPU_E_NO_PLATFORM)
        return 11;
    if (gpu || !strstr(detail.text, userdata))
        return 12;
    return strstr(detail.text, "pocl-opencl-icd") && strstr(detail.text, "mesa-opencl-icd") ? 0 : 13;
}

static void gpu_open_without_a_driver_names_the_directory_and_the_packages(void **state)
{
    char directory[] = "/tmp/leat-test-XXXXXX";

    (void)state;
    assert_non_null(mkdtemp(directory));
    assert_int_equal(in_child(body_no_driver, directory), 0);
    assert_int_equal(rmdir(directory), 0);
}

static int open_with(const GpuMatch *matches, size_t n_matches, uint64_t default_max, Gpu **ret, ErrorDetail *reterr)
{
    const GpuOptions options = {.matches = matches, .n_matches = n_matches, .default_max_memory_bytes = default_max};

    return gpu_open(&options, ret, reterr);
}

static void gpu_open_says_what_it_took_and_why(void **state)
{
    _cleanup_(gpu_freep) Gpu *gpu = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const GpuInfo *info;

    (void)state;
    assert_int_equal(open_with(NULL, 0, 0, &gpu, &detail), 0);
    info = gpu_info(gpu);
    print_message("%s on %s: %s\n", info->name, info->platform, info->reason);
    assert_true(info->name[0] && info->vendor[0] && info->driver[0] && info->platform[0] && info->reason[0]);
    assert_true(strstr(info->reason, info->platform) != NULL);
    assert_non_null(gpu_device_type_to_string(info->type));
    assert_true(info->compute_units > 0 && info->max_work_group_size > 0 && info->max_allocation_bytes > 0);
    assert_true(info->budget_bytes == info->memory_bytes / 4 * 3);
    /* In bytes: no device needs more than 4 KiB, and in bits it would be 512 or more. */
    assert_true(info->base_alignment_bytes >= 1 && info->base_alignment_bytes <= 4096);
    assert_false(gpu_is_lost(gpu));
}

static void gpu_open_leaves_no_trace_of_its_self_test(void **state)
{
    _cleanup_(gpu_freep) Gpu *gpu = NULL;
    GpuCounters counters;
    uint64_t total;

    (void)state;
    assert_int_equal(open_with(NULL, 0, 0, &gpu, NULL), 0);
    gpu_counters(gpu, &counters);
    gpu_memory_used(gpu, NULL, &total);
    assert_int_equal(total, 0);
    assert_memory_equal(&counters, &(GpuCounters){0}, sizeof(counters));
}

static void gpu_open_refuses_when_the_configuration_excludes_every_device(void **state)
{
    const GpuMatch none = {.type = GPU_DEVICE_TYPE_X_INVALID, .use = GPU_USE_NO};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Gpu *gpu = NULL;

    (void)state;
    assert_int_equal(open_with(&none, 1, 0, &gpu, &detail), GPU_E_NO_DEVICE);
    assert_null(gpu);
    assert_non_null(strstr(detail.text, "excludes"));
}

static void gpu_open_takes_the_first_match_of_a_device(void **state)
{
    const GpuMatch matches[] = {
        {.name = "no such device", .type = GPU_DEVICE_TYPE_X_INVALID, .use = GPU_USE_YES, .max_memory_bytes = 1},
        {.vendor = "", .type = GPU_DEVICE_TYPE_X_INVALID, .use = GPU_USE_YES, .max_memory_bytes = 12345678},
        {.type = GPU_DEVICE_TYPE_X_INVALID, .use = GPU_USE_NO},
    };
    _cleanup_(gpu_freep) Gpu *gpu = NULL;

    (void)state;
    assert_int_equal(open_with(matches, N_ELEMENTS(matches), 99, &gpu, NULL), 0);
    assert_int_equal(gpu_info(gpu)->budget_bytes, 12345678);
}

static void gpu_open_takes_a_fallback_when_there_is_nothing_else(void **state)
{
    const GpuMatch fallback = {.type = GPU_DEVICE_TYPE_X_INVALID, .use = GPU_USE_FALLBACK};
    _cleanup_(gpu_freep) Gpu *gpu = NULL;

    (void)state;
    assert_int_equal(open_with(&fallback, 1, 0, &gpu, NULL), 0);
    assert_non_null(strstr(gpu_info(gpu)->reason, "fallback"));
}

static void gpu_budget_follows_reserve_and_maximum(void **state)
{
    GpuMatch match = {.type = GPU_DEVICE_TYPE_X_INVALID, .use = GPU_USE_YES};
    uint64_t memory_bytes;

    (void)state;
    for (int round = 0; round < 4; round++) {
        _cleanup_(gpu_freep) Gpu *gpu = NULL;
        uint64_t expected;

        match.reserve_bytes = round == 1 ? 1 << 20 : round == 2 ? UINT64_MAX : 0;
        match.max_memory_bytes = round == 3 ? 1 << 20 : 0;
        assert_int_equal(open_with(&match, 1, 4096, &gpu, NULL), 0);
        memory_bytes = gpu_info(gpu)->memory_bytes;
        expected = round == 1 ? memory_bytes - (1 << 20) : round == 2 ? 0 : round == 3 ? 1 << 20 : 4096;
        assert_int_equal(gpu_info(gpu)->budget_bytes, expected);
    }
}

static int body_simd(void *userdata)
{
    _cleanup_(gpu_freep) Gpu *gpu = NULL;

    if (setenv("LEAT_SIMD", userdata, 1) < 0 || open_with(NULL, 0, 0, &gpu, NULL))
        return 100;
    return (int)gpu_info(gpu)->simd;
}

static void gpu_simd_level_is_lowered_by_the_environment_and_never_raised(void **state)
{
    static char names[][16] = {"portable", "avx2", "avx512bw", "vnni"};
    int usual, last = -1;

    (void)state;
    usual = in_child(body_simd, (char[]){"nonsense"});
    assert_true(usual <= GPU_SIMD_AVX512VNNI);
    for (int i = 0; i <= GPU_SIMD_AVX512VNNI; i++) {
        int level = in_child(body_simd, names[i]);

        assert_int_equal(level, MIN(i, usual));
        assert_true(level >= last);
        last = level;
    }
}

static void gpu_cl_every_status_of_the_standard_has_a_name_and_a_text(void **state)
{
    (void)state;
    for (cl_int status = 0; status >= -72; status--) {
        if (status < -19 && status > -30) /* not assigned */
            continue;
        assert_string_not_equal(gpu_cl_name(status), "CL_UNKNOWN_STATUS");
        assert_true(strlen(gpu_cl_text(status)) > 5);
    }
    assert_string_equal(gpu_cl_name(-61), "CL_INVALID_BUFFER_SIZE");
    assert_string_equal(gpu_cl_name(-1001), "CL_PLATFORM_NOT_FOUND_KHR");
    assert_string_equal(gpu_cl_name(-12345), "CL_UNKNOWN_STATUS");
    assert_true(strlen(gpu_cl_text(-12345)) > 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        /* First: the cases that need their own environment, before this process loads a driver. */
        cmocka_unit_test(gpu_open_without_a_driver_names_the_directory_and_the_packages),
        cmocka_unit_test(gpu_simd_level_is_lowered_by_the_environment_and_never_raised),
        cmocka_unit_test(gpu_open_says_what_it_took_and_why),
        cmocka_unit_test(gpu_open_leaves_no_trace_of_its_self_test),
        cmocka_unit_test(gpu_open_refuses_when_the_configuration_excludes_every_device),
        cmocka_unit_test(gpu_open_takes_the_first_match_of_a_device),
        cmocka_unit_test(gpu_open_takes_a_fallback_when_there_is_nothing_else),
        cmocka_unit_test(gpu_budget_follows_reserve_and_maximum),
        cmocka_unit_test(gpu_cl_every_status_of_the_standard_has_a_name_and_a_text),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
