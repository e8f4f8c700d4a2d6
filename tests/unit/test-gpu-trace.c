/* SPDX-License-Identifier: Apache-2.0 */
/* Timeline and overlap: the trace is JSON that a viewer reads, the sums are those of a slow count. */

#include "opencl/gpu-internal.h"
#include "tests/lib/patience.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct Fixture {
    Gpu *gpu;
    GpuKernel *spin;
    GpuBuffer *state, *data;
    unsigned char *host;
    size_t data_bytes;
} Fixture;

static int setup(void **state)
{
    static const char *const sources[] = {"selftest.cl"};
    const GpuOptions options = {.deadline_usec = PATIENCE_USEC};
    GpuProgram *program = NULL;
    Fixture *fixture = calloc(1, sizeof(*fixture));

    if (!fixture)
        return -1;
    fixture->data_bytes = 4 << 20;
    fixture->host = calloc(1, fixture->data_bytes);
    *state = fixture;
    return !fixture->host || gpu_open(&options, &fixture->gpu, NULL) ||
                   gpu_program_get(fixture->gpu, sources, 1, "", &program, NULL) ||
                   gpu_kernel_new(program, "selftest_spin", &fixture->spin, NULL) ||
                   gpu_buffer_new(fixture->gpu, GPU_PURPOSE_OTHER, 64, &fixture->state, NULL) ||
                   gpu_buffer_new(fixture->gpu, GPU_PURPOSE_OTHER, fixture->data_bytes, &fixture->data, NULL) ||
                   gpu_kernel_set_buffer(fixture->spin, 0, fixture->state)
               ? -1
               : 0;
}

static int teardown(void **state)
{
    Fixture *fixture = *state;

    gpu_kernel_free(fixture->spin);
    gpu_buffer_free(fixture->state);
    gpu_buffer_free(fixture->data);
    gpu_free(fixture->gpu);
    free(fixture->host);
    free(fixture);
    return 0;
}

/* One kernel, one copy in and one out, beside each other on their queues. */
static void enqueue_round(Fixture *fixture, uint32_t rounds)
{
    Gpu *gpu = fixture->gpu;
    uint64_t half = fixture->data_bytes / 2;

    assert_int_equal(gpu_kernel_set_u32(fixture->spin, 1, rounds), 0);
    assert_int_equal(gpu_launch(fixture->spin, GPU_RANGE_1D(1, 1), GPU_WAIT_NONE, NULL), 0);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_UPLOAD, fixture->data, 0, fixture->host, half, GPU_WAIT_NONE, "in", NULL), 0);
    assert_int_equal(gpu_download(gpu, GPU_QUEUE_DOWNLOAD, fixture->data, half, fixture->host + half, half, GPU_WAIT_NONE,
                                  "out \"quoted\"", NULL),
                     0);
}

static json_t *stop_and_parse(Gpu *gpu)
{
    int fd = memfd_create("trace", 0);
    json_error_t error;
    json_t *root;

    assert_true(fd >= 0);
    assert_int_equal(gpu_trace_stop(gpu, fd), 0);
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    root = json_loadfd(fd, 0, &error);
    if (!root)
        print_error("%s at %d:%d\n", error.text, error.line, error.column);
    assert_non_null(root);
    (void)close(fd);
    return root;
}

static void gpu_trace_is_json_with_one_track_a_queue(void **state)
{
    Fixture *fixture = *state;
    size_t n_on_track[GPU_QUEUE_X_MAX + 1] = {0}, i;
    const char *const kinds[] = {"", "kernel", "upload", "download"};
    json_t *root, *events, *event;

    enqueue_round(fixture, 1000); /* before the start: not in the trace */
    assert_int_equal(gpu_trace_start(fixture->gpu), 0);
    for (int round = 0; round < 5; round++)
        enqueue_round(fixture, 1000);
    assert_int_equal(gpu_drain(fixture->gpu, NULL), 0);
    root = stop_and_parse(fixture->gpu);
    events = json_object_get(root, "traceEvents");
    json_array_foreach(events, i, event)
    {
        json_int_t tid = json_integer_value(json_object_get(event, "tid"));

        if (strcmp(json_string_value(json_object_get(event, "ph")), "X") != 0)
            continue;
        assert_true(tid >= 1 && tid <= 3);
        n_on_track[tid]++;
        assert_string_equal(json_string_value(json_object_get(event, "cat")), kinds[tid]);
        assert_true(json_number_value(json_object_get(event, "ts")) >= 0);
        assert_true(json_number_value(json_object_get(event, "dur")) >= 0);
        assert_int_equal(json_integer_value(json_object_get(json_object_get(event, "args"), "bytes")),
                         tid == 1 ? 0 : (json_int_t)fixture->data_bytes / 2);
        if (tid == 1)
            assert_string_equal(json_string_value(json_object_get(event, "name")), "selftest_spin");
    }
    for (i = 1; i <= GPU_QUEUE_X_MAX; i++)
        assert_int_equal(n_on_track[i], 5);
    json_decref(root);
}

static void gpu_trace_without_a_command_is_still_json(void **state)
{
    Fixture *fixture = *state;

    assert_int_equal(gpu_trace_stop(fixture->gpu, STDERR_FILENO), -EINVAL);
    assert_int_equal(gpu_trace_start(fixture->gpu), 0);
    json_decref(stop_and_parse(fixture->gpu));
}

static void gpu_overlap_sums_are_sane_on_the_device(void **state)
{
    Fixture *fixture = *state;
    GpuOverlap sums, unused;
    uint64_t began, wall;

    assert_int_equal(gpu_overlap_end(fixture->gpu, &unused), -EINVAL);
    began = gpu_now_usec();
    assert_int_equal(gpu_overlap_begin(fixture->gpu), 0);
    for (int round = 0; round < 5; round++)
        enqueue_round(fixture, 2000000);
    assert_int_equal(gpu_drain(fixture->gpu, NULL), 0);
    assert_int_equal(gpu_overlap_end(fixture->gpu, &sums), 0);
    wall = gpu_now_usec() - began;
    print_message("wall %lu, kernels %lu, in %lu, out %lu, overlap %lu us\n", (unsigned long)wall,
                  (unsigned long)sums.kernel_usec, (unsigned long)sums.upload_usec, (unsigned long)sums.download_usec,
                  (unsigned long)sums.overlap_usec);
    assert_int_equal(sums.upload_bytes, 5 * fixture->data_bytes / 2);
    assert_int_equal(sums.download_bytes, 5 * fixture->data_bytes / 2);
    if (sums.kernel_usec + sums.upload_usec + sums.download_usec == 0) {
        print_message("skipped: this driver has no timestamps\n");
        skip();
    }
    assert_true(sums.kernel_usec > 0 && sums.kernel_usec <= wall);
    assert_true(sums.upload_usec <= wall && sums.download_usec <= wall);
    assert_true(sums.overlap_usec <= sums.upload_usec + sums.download_usec);
    assert_true(sums.overlap_usec <= 2 * sums.kernel_usec);
    /* A second stretch starts from nothing. */
    assert_int_equal(gpu_overlap_begin(fixture->gpu), 0);
    assert_int_equal(gpu_overlap_end(fixture->gpu, &sums), 0);
    assert_int_equal(sums.kernel_usec + sums.upload_usec + sums.download_usec + sums.overlap_usec + sums.upload_bytes, 0);
}

/* ---- the arithmetic ------------------------------------------------------------------------------------------------ */

static uint32_t next_random(uint32_t *seed)
{
    *seed = *seed * UINT32_C(1664525) + UINT32_C(1013904223);
    return *seed >> 8;
}

#define SLOTS 200000

/* Three queues of random work in slots of one microsecond, noted in random portions with folding in between while
 * the queues that lag behind have something pending, against a count slot by slot. */
static void gpu_overlap_equals_a_count_slot_by_slot_however_it_is_folded(void **state)
{
    static const GpuLane lanes[GPU_QUEUE_X_MAX] = {GPU_LANE_KERNEL, GPU_LANE_UPLOAD, GPU_LANE_DOWNLOAD};
    Fixture *fixture = *state;
    Gpu *gpu = fixture->gpu;
    uint32_t seed = (uint32_t)gpu_now_usec();
    unsigned char *busy = calloc(GPU_QUEUE_X_MAX, SLOTS);
    uint64_t at[GPU_QUEUE_X_MAX] = {0}, expected[GPU_QUEUE_X_MAX] = {0}, expected_overlap = 0;
    GpuEvent lagging[GPU_QUEUE_X_MAX] = {{.queue = 0}, {.queue = 1}, {.queue = 2}};
    GpuEvent *pending[GPU_QUEUE_X_MAX];
    GpuOverlap sums;

    print_message("seed %u\n", seed);
    assert_non_null(busy);
    assert_int_equal(gpu_drain(gpu, NULL), 0);
    assert_int_equal(gpu_overlap_begin(gpu), 0);
    while (at[0] < SLOTS || at[1] < SLOTS || at[2] < SLOTS) {
        GpuEvent **saved = gpu->pending;
        uint32_t queue = next_random(&seed) % GPU_QUEUE_X_MAX;

        for (uint32_t n = next_random(&seed) % 200; n > 0 && at[queue] < SLOTS; n--) {
            uint64_t start = at[queue] + next_random(&seed) % 4, end = start + next_random(&seed) % 9;

            start = MIN(start, (uint64_t)SLOTS);
            end = MIN(end, (uint64_t)SLOTS);
            memset(busy + queue * SLOTS + start, 1, end - start);
            gpu_trace_interval(&gpu->trace, queue, lanes[queue], start * 1000, end * 1000);
            at[queue] = end == at[queue] ? end + 1 : end;
        }
        gpu->pending = pending;
        gpu->n_pending = 0;
        for (uint32_t i = 0; i < GPU_QUEUE_X_MAX; i++)
            if (at[i] < SLOTS)
                pending[gpu->n_pending++] = &lagging[i];
        gpu_trace_fold(gpu);
        gpu->pending = saved;
        gpu->n_pending = 0;
    }
    assert_int_equal(gpu_overlap_end(gpu, &sums), 0);
    for (size_t i = 0; i < SLOTS; i++) {
        for (size_t queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
            expected[queue] += busy[queue * SLOTS + i];
        expected_overlap += busy[i] ? busy[SLOTS + i] + busy[2 * SLOTS + i] : 0;
    }
    assert_int_equal(sums.kernel_usec, expected[0]);
    assert_int_equal(sums.upload_usec, expected[1]);
    assert_int_equal(sums.download_usec, expected[2]);
    assert_int_equal(sums.overlap_usec, expected_overlap);
    /* What is kept stays small although there were tens of thousands of intervals. */
    assert_true(gpu->trace.lanes[0][GPU_LANE_KERNEL].n_allocated < 20000);
    free(busy);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpu_trace_without_a_command_is_still_json),
        cmocka_unit_test(gpu_trace_is_json_with_one_track_a_queue),
        cmocka_unit_test(gpu_overlap_sums_are_sane_on_the_device),
        cmocka_unit_test(gpu_overlap_equals_a_count_slot_by_slot_however_it_is_folded),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
