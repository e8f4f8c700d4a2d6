/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory: the sums are exact, a refusal changes nothing, wrapped memory is read and written in place. */

#include "opencl/gpu-internal.h"
#include "tests/lib/patience.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static int setup(void **state)
{
    const GpuOptions options = {.deadline_usec = PATIENCE_USEC};

    return gpu_open(&options, (Gpu **)state, NULL);
}

static int teardown(void **state)
{
    gpu_free(*state);
    return 0;
}

static uint64_t used(Gpu *gpu, uint64_t by_purpose[GPU_PURPOSE_X_MAX])
{
    uint64_t total;

    gpu_memory_used(gpu, by_purpose, &total);
    return total;
}

static void gpu_memory_sums_are_exact_by_purpose(void **state)
{
    Gpu *gpu = *state;
    GpuBuffer *buffers[GPU_PURPOSE_X_MAX][3] = {0};
    uint64_t by_purpose[GPU_PURPOSE_X_MAX], expected = 0;

    for (size_t i = 0; i < GPU_PURPOSE_X_MAX; i++) {
        assert_non_null(gpu_purpose_to_string((GpuPurpose)i));
        for (size_t j = 0; j < 3; j++) {
            uint64_t bytes = 1 + 1000 * i + 77 * j; /* odd sizes are counted as they are */

            assert_int_equal(gpu_buffer_new(gpu, (GpuPurpose)i, bytes, &buffers[i][j], NULL), 0);
            assert_int_equal(gpu_buffer_bytes(buffers[i][j]), bytes);
            expected += bytes;
        }
    }
    assert_int_equal(used(gpu, by_purpose), expected);
    for (size_t i = 0; i < GPU_PURPOSE_X_MAX; i++)
        assert_int_equal(by_purpose[i], 3 * (1 + 1000 * i) + 3 * 77);
    for (size_t i = 0; i < GPU_PURPOSE_X_MAX; i++)
        for (size_t j = 0; j < 3; j++)
            assert_null(gpu_buffer_free(buffers[i][j]));
    assert_int_equal(used(gpu, by_purpose), 0);
}

static void gpu_memory_budget_is_met_to_the_byte(void **state)
{
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *a = NULL, *b = NULL, *c = NULL;
    uint64_t before = gpu_info(gpu)->budget_bytes, by_purpose[GPU_PURPOSE_X_MAX];
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuCounters counters, after;

    gpu_set_budget(gpu, 10000);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_WEIGHTS, 6000, &a, NULL), 0);
    gpu_counters(gpu, &counters);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_STAGING, 4001, &b, &detail), GPU_E_OVER_BUDGET);
    print_message("%s\n", detail.text);
    assert_non_null(strstr(detail.text, "needed 4001"));
    assert_non_null(strstr(detail.text, "available 4000"));
    assert_non_null(strstr(detail.text, "budget 10000"));
    /* Nothing has changed. */
    assert_null(b);
    gpu_counters(gpu, &after);
    assert_memory_equal(&counters, &after, sizeof(counters));
    assert_int_equal(used(gpu, by_purpose), 6000);
    assert_false(gpu_is_lost(gpu));
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_STAGING, 4000, &b, NULL), 0);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 1, &c, NULL), GPU_E_OVER_BUDGET);
    /* Below what is in use only later allocations are refused. */
    gpu_set_budget(gpu, 100);
    assert_int_equal(used(gpu, by_purpose), 10000);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 1, &c, &detail), GPU_E_OVER_BUDGET);
    assert_non_null(strstr(detail.text, "available 0"));
    gpu_set_budget(gpu, before);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 1, &c, NULL), 0);
}

static void gpu_buffer_new_refuses_what_the_device_cannot_give_and_keeps_it(void **state)
{
    Gpu *gpu = *state;
    uint64_t before = gpu_info(gpu)->budget_bytes, by_purpose[GPU_PURPOSE_X_MAX];
    const uint64_t huge[] = {gpu_info(gpu)->max_allocation_bytes + 1, UINT64_MAX, UINT64_MAX - 4095};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuBuffer *buffer = NULL;

    gpu_set_budget(gpu, UINT64_MAX);
    for (size_t i = 0; i < N_ELEMENTS(huge); i++) {
        assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_PAGES, huge[i], &buffer, &detail), GPU_E_OVER_BUDGET);
        assert_non_null(strstr(detail.text, "larger than the device allows"));
    }
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_PAGES, 0, &buffer, NULL), -EINVAL);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_X_MAX, 1, &buffer, NULL), -EINVAL);
    /* A device that says yes to its limit and then does not have it: whatever it answers, nothing is lost. */
    gpu->info.max_allocation_bytes = UINT64_MAX;
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_PAGES, UINT64_C(1) << 60, &buffer, &detail), GPU_E_OVER_BUDGET);
    print_message("%s\n", detail.text);
    assert_non_null(strstr(detail.text, "CL_"));
    gpu->info.max_allocation_bytes = huge[0] - 1;
    assert_null(buffer);
    assert_false(gpu_is_lost(gpu));
    assert_int_equal(used(gpu, by_purpose), 0);
    gpu_set_budget(gpu, before);
}

static void gpu_buffer_on_a_device_with_its_own_memory_is_allocated_at_once(void **state)
{
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;
    bool unified = gpu->info.unified_memory;

    gpu->info.unified_memory = false;
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_PAGES, 1 << 20, &buffer, NULL), 0);
    gpu->info.unified_memory = unified;
}

static void gpu_copies_give_back_the_same_bytes(void **state)
{
    enum { N = 100003 };
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *a = NULL, *b = NULL;
    _cleanup_(freep) unsigned char *from = malloc(N), *to = calloc(1, N);
    _cleanup_(gpu_event_unrefp) GpuEvent *uploaded = NULL, *copied = NULL;
    GpuCounters before, after;

    for (size_t i = 0; i < N; i++)
        from[i] = (unsigned char)(i * 7 + i / 251);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, N + 10, &a, NULL), 0);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, N + 10, &b, NULL), 0);
    gpu_counters(gpu, &before);
    /* Odd offsets, and each command on another queue than the one it waits for. */
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_UPLOAD, a, 3, from, N, GPU_WAIT_NONE, "a", &uploaded), 0);
    assert_int_equal(gpu_copy(gpu, GPU_QUEUE_COMPUTE, b, 5, a, 3, N, (GpuWait){&uploaded, 1}, "b", &copied), 0);
    assert_int_equal(gpu_download(gpu, GPU_QUEUE_DOWNLOAD, b, 5, to, N, (GpuWait){&copied, 1}, "c", NULL), 0);
    assert_int_equal(gpu_drain(gpu, NULL), 0);
    assert_memory_equal(from, to, N);
    gpu_counters(gpu, &after);
    assert_int_equal(after.n_uploads - before.n_uploads, 1);
    assert_int_equal(after.n_copies - before.n_copies, 1);
    assert_int_equal(after.n_downloads - before.n_downloads, 1);
    assert_int_equal(after.upload_bytes - before.upload_bytes, N);
    assert_int_equal(after.copy_bytes - before.copy_bytes, N);
    assert_int_equal(after.download_bytes - before.download_bytes, N);
}

static void gpu_fill_zero_fills_exactly_its_range(void **state)
{
    enum { N = 1000 };
    Gpu *gpu = *state;
    unsigned char bytes[N];

    for (uint64_t offset = 0; offset < 40; offset += 3)
        for (uint64_t n = 1; n < 300; n += 53) {
            _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;

            memset(bytes, 0xa5, sizeof(bytes));
            assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, N, &buffer, NULL), 0);
            assert_int_equal(gpu_upload(gpu, GPU_QUEUE_COMPUTE, buffer, 0, bytes, N, GPU_WAIT_NONE, "x", NULL), 0);
            assert_int_equal(gpu_fill_zero(gpu, GPU_QUEUE_COMPUTE, buffer, offset, n), 0);
            assert_int_equal(gpu_drain(gpu, NULL), 0);
            assert_int_equal(gpu_download(gpu, GPU_QUEUE_COMPUTE, buffer, 0, bytes, N, GPU_WAIT_NONE, "y", NULL), 0);
            assert_int_equal(gpu_drain(gpu, NULL), 0);
            for (uint64_t i = 0; i < N; i++)
                assert_int_equal(bytes[i], i >= offset && i < offset + n ? 0 : 0xa5);
        }
}

static void gpu_copies_refuse_ranges_outside_of_a_buffer_and_keep_the_device(void **state)
{
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *a = NULL, *b = NULL;
    char bytes[64] = {0};

    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 64, &a, NULL), 0);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 64, &b, NULL), 0);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_UPLOAD, a, 1, bytes, 64, GPU_WAIT_NONE, "", NULL), -EINVAL);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_UPLOAD, a, UINT64_MAX, bytes, 2, GPU_WAIT_NONE, "", NULL), -EINVAL);
    assert_int_equal(gpu_download(gpu, GPU_QUEUE_UPLOAD, a, 64, bytes, 1, GPU_WAIT_NONE, "", NULL), -EINVAL);
    assert_int_equal(gpu_copy(gpu, GPU_QUEUE_UPLOAD, a, 0, b, 32, 33, GPU_WAIT_NONE, "", NULL), -EINVAL);
    assert_int_equal(gpu_copy(gpu, GPU_QUEUE_UPLOAD, a, 32, b, 0, 33, GPU_WAIT_NONE, "", NULL), -EINVAL);
    assert_int_equal(gpu_fill_zero(gpu, GPU_QUEUE_UPLOAD, a, 0, 65), -EINVAL);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_UPLOAD, a, 0, bytes, 0, GPU_WAIT_NONE, "", NULL), -EINVAL);
    assert_false(gpu_is_lost(gpu));
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_UPLOAD, a, 0, bytes, 64, GPU_WAIT_NONE, "", NULL), 0);
    assert_int_equal(gpu_drain(gpu, NULL), 0);
}

static void gpu_buffer_wrap_is_read_and_written_in_place_and_not_counted(void **state)
{
    enum { N = 4096 };
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *wrapped = NULL, *other = NULL;
    uint32_t *memory = mmap(NULL, N * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), back[N];
    uint64_t by_purpose[GPU_PURPOSE_X_MAX], max = gpu_info(gpu)->max_allocation_bytes;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuBuffer *refused = NULL;

    if (!gpu_info(gpu)->unified_memory) {
        assert_int_equal(gpu_buffer_wrap(gpu, memory, N * 4, &refused, &detail), -EOPNOTSUPP);
        print_message("skipped: this device has memory of its own\n");
        skip();
    }
    assert_int_equal(gpu_buffer_wrap(gpu, memory, N * 4, &wrapped, NULL), 0);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, N * 4, &other, NULL), 0);
    assert_int_equal(used(gpu, by_purpose), N * 4);
    for (uint32_t round = 1; round < 4; round++) {
        for (uint32_t i = 0; i < N; i++)
            memory[i] = round * i;
        assert_int_equal(gpu_copy(gpu, GPU_QUEUE_COMPUTE, other, 0, wrapped, 0, N * 4, GPU_WAIT_NONE, "", NULL), 0);
        assert_int_equal(gpu_download(gpu, GPU_QUEUE_COMPUTE, other, 0, back, N * 4, GPU_WAIT_NONE, "", NULL), 0);
        assert_int_equal(gpu_drain(gpu, NULL), 0);
        assert_memory_equal(back, memory, N * 4);
    }
    assert_int_equal(gpu_buffer_wrap(gpu, (char *)memory + 64, 64, &refused, &detail), -EINVAL);
    assert_int_equal(gpu_buffer_wrap(gpu, memory, 0, &refused, &detail), -EINVAL);
    assert_int_equal(gpu_buffer_wrap(gpu, memory, max + 1, &refused, &detail), GPU_E_OVER_BUDGET);
    (void)gpu_buffer_free(TAKE_PTR(wrapped));
    assert_int_equal(memory[3], 9); /* still ours */
    assert_int_equal(munmap(memory, N * 4), 0);
}

static uint64_t address_space_pages(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");

    assert_non_null(file);
    assert_int_equal(fscanf(file, "%lu", &pages), 1);
    (void)fclose(file);
    return pages;
}

/* Large buffers may live in memory of ours: it is given back, also when commands are still using it at the time. */
static void gpu_buffer_free_of_a_large_buffer_in_use_gives_its_memory_back(void **state)
{
    enum { ROUNDS = 20 };
    const uint64_t bytes = (UINT64_C(64) << 20) + 12345, page = (uint64_t)sysconf(_SC_PAGESIZE);
    Gpu *gpu = *state;
    uint64_t before = address_space_pages();

    for (int round = 0; round < ROUNDS; round++) {
        GpuBuffer *a = NULL, *b = NULL;
        unsigned char last = 0;

        assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_WEIGHTS, bytes, &a, NULL), 0);
        assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_WEIGHTS, 1000, &b, NULL), 0);
        assert_int_equal(gpu_fill_zero(gpu, GPU_QUEUE_COMPUTE, a, bytes - 5000, 5000), 0);
        assert_int_equal(gpu_copy(gpu, GPU_QUEUE_COMPUTE, b, 0, a, bytes - 1000, 1000, GPU_WAIT_NONE, "x", NULL), 0);
        assert_int_equal(gpu_download(gpu, GPU_QUEUE_COMPUTE, a, bytes - 1, &last, 1, GPU_WAIT_NONE, "y", NULL), 0);
        gpu_buffer_free(a);
        gpu_buffer_free(b);
        assert_int_equal(gpu_drain(gpu, NULL), 0);
    }
    assert_true(address_space_pages() < before + 2 * bytes / page);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpu_memory_sums_are_exact_by_purpose),
        cmocka_unit_test(gpu_memory_budget_is_met_to_the_byte),
        cmocka_unit_test(gpu_buffer_new_refuses_what_the_device_cannot_give_and_keeps_it),
        cmocka_unit_test(gpu_buffer_on_a_device_with_its_own_memory_is_allocated_at_once),
        cmocka_unit_test(gpu_copies_give_back_the_same_bytes),
        cmocka_unit_test(gpu_fill_zero_fills_exactly_its_range),
        cmocka_unit_test(gpu_copies_refuse_ranges_outside_of_a_buffer_and_keep_the_device),
        cmocka_unit_test(gpu_buffer_free_of_a_large_buffer_in_use_gives_its_memory_back),
        cmocka_unit_test(gpu_buffer_wrap_is_read_and_written_in_place_and_not_counted),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
