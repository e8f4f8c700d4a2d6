/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queues and steps: waits across queues, deadlines, failures.  An OpenCL user event in the place of a command's event
 * completes, fails or hangs when the test says so, which no real command does.
 */

#include "opencl/gpu-internal.h"
#include "tests/lib/patience.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__)
/* After a hang the driver's objects are abandoned on purpose. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libpocl\nleak:libRusticlOpenCL\n";
}
#endif

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

static void sleep_usec(long usec)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = usec * 1000}, NULL);
}

/* Puts a user event where a command of @queue would stand. */
static cl_event fake_command(Gpu *gpu, GpuQueue queue, const char *label, GpuEvent **ret)
{
    GpuEvent *event;
    cl_int status;

    assert_int_equal(gpu_command_begin(gpu, queue, GPU_COMMAND_UPLOAD, label, 0, &event), 0);
    event->cl = clCreateUserEvent(gpu->context, &status);
    assert_int_equal(gpu_command_end(gpu, event, status, "clCreateUserEvent", ret), 0);
    return event->cl;
}

static void gpu_command_waits_for_events_of_other_queues_and_not_longer(void **state)
{
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;
    _cleanup_(gpu_event_unrefp) GpuEvent *first = NULL, *uploaded = NULL, *back = NULL;
    uint32_t value = 42, result = 0;
    cl_event user = fake_command(gpu, GPU_QUEUE_DOWNLOAD, "held", &first);

    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 4, &buffer, NULL), 0);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_UPLOAD, buffer, 0, &value, 4,
                                (GpuWait){(GpuEvent *const[]){NULL, first, NULL}, 3}, "after", &uploaded),
                     0);
    assert_int_equal(gpu_download(gpu, GPU_QUEUE_COMPUTE, buffer, 0, &result, 4, (GpuWait){&uploaded, 1}, "last", &back), 0);
    assert_int_equal(gpu_flush(gpu, GPU_QUEUE_COMPUTE), 0);
    sleep_usec(20000);
    assert_int_equal(gpu_event_status(first), 0);
    assert_int_equal(gpu_event_status(uploaded), 0);
    assert_int_equal(gpu_event_status(back), 0);
    assert_int_equal(clSetUserEventStatus(user, CL_COMPLETE), CL_SUCCESS);
    assert_int_equal(gpu_event_wait(gpu, back, NULL), 0);
    assert_int_equal(gpu_event_status(back), 1);
    assert_int_equal(result, 42);
    assert_int_equal(gpu_event_wait(gpu, uploaded, NULL), 0);
    assert_int_equal(gpu_drain(gpu, NULL), 0);
    assert_int_equal(gpu->n_pending, 0);
}

static void gpu_step_finish_leaves_copies_in_flight_to_a_later_step(void **state)
{
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;
    cl_event prefetch;

    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 4096, &buffer, NULL), 0);
    assert_int_equal(gpu_step_begin(gpu), 0);
    prefetch = fake_command(gpu, GPU_QUEUE_UPLOAD, "prefetch", NULL);
    assert_int_equal(gpu_fill_zero(gpu, GPU_QUEUE_COMPUTE, buffer, 0, 4096), 0);
    assert_int_equal(gpu_step_finish(gpu, NULL), 0);
    assert_int_equal(gpu->n_pending, 1);
    assert_int_equal(gpu_step_begin(gpu), 0);
    assert_int_equal(gpu_fill_zero(gpu, GPU_QUEUE_COMPUTE, buffer, 0, 4096), 0);
    assert_int_equal(clSetUserEventStatus(prefetch, CL_COMPLETE), CL_SUCCESS);
    assert_int_equal(gpu_step_finish(gpu, NULL), 0);
    assert_int_equal(gpu->n_pending, 0);
}

static void gpu_step_finish_finds_the_one_command_that_failed(void **state)
{
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuEvent *failed = NULL;
    uint64_t total;
    cl_event user;

    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 4096, &buffer, NULL), 0);
    assert_int_equal(gpu_step_begin(gpu), 0);
    for (int i = 0; i < 50; i++)
        assert_int_equal(gpu_fill_zero(gpu, GPU_QUEUE_COMPUTE, buffer, 0, 4096), 0);
    user = fake_command(gpu, GPU_QUEUE_COMPUTE, "the culprit", &failed);
    for (int i = 0; i < 50; i++)
        assert_int_equal(gpu_fill_zero(gpu, GPU_QUEUE_COMPUTE, buffer, 0, 4096), 0);
    assert_int_equal(clSetUserEventStatus(user, CL_OUT_OF_RESOURCES), CL_SUCCESS);
    assert_int_equal(gpu_step_finish(gpu, &detail), GPU_E_LOST);
    print_message("%s\n", detail.text);
    assert_non_null(strstr(detail.text, "the culprit"));
    assert_non_null(strstr(detail.text, "CL_OUT_OF_RESOURCES"));
    assert_true(gpu_is_lost(gpu));
    assert_int_equal(gpu_event_status(failed), -EIO);
    assert_int_equal(gpu_step_finish(gpu, &detail), -ENODEV);
    assert_int_equal(gpu_drain(gpu, &detail), -ENODEV);
    assert_int_equal(gpu_event_wait(gpu, failed, &detail), -ENODEV);
    assert_int_equal(gpu_fill_zero(gpu, GPU_QUEUE_COMPUTE, buffer, 0, 4096), -ENODEV);
    assert_int_equal(gpu_flush(gpu, GPU_QUEUE_COMPUTE), -ENODEV);
    assert_non_null(strstr(detail.text, "the culprit")); /* the reason stays */
    gpu_event_unref(failed);
    gpu_memory_used(gpu, NULL, &total); /* still answers */
    assert_int_equal(total, 4096);
}

static void *fail_then_go_on(void *userdata)
{
    const cl_event *events = userdata;

    sleep_usec(50000);
    (void)clSetUserEventStatus(events[0], CL_OUT_OF_RESOURCES);
    (void)clSetUserEventStatus(events[1], CL_COMPLETE);
    return NULL;
}

/* Of a long step most is looked at while its end runs: a copy that was fine by then fails before the last command ends. */
static void gpu_step_finish_finds_what_fails_after_its_first_look(void **state)
{
    enum { N_COMMANDS = 200 };
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;
    _cleanup_(gpu_event_unrefp) GpuEvent *failed = NULL, *held = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const uint32_t value = 42;
    cl_event users[2];
    pthread_t thread;

    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 4096, &buffer, NULL), 0);
    assert_int_equal(gpu_step_begin(gpu), 0);
    users[0] = fake_command(gpu, GPU_QUEUE_UPLOAD, "the late culprit", &failed);
    users[1] = fake_command(gpu, GPU_QUEUE_DOWNLOAD, "held", &held);
    for (int i = 0; i < N_COMMANDS; i++)
        assert_int_equal(gpu_fill_zero(gpu, GPU_QUEUE_COMPUTE, buffer, 0, 4096), 0);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_COMPUTE, buffer, 0, &value, sizeof(value), (GpuWait){&held, 1}, "last", NULL), 0);
    assert_int_equal(pthread_create(&thread, NULL, fail_then_go_on, users), 0);
    assert_int_equal(gpu_step_finish(gpu, &detail), GPU_E_LOST);
    assert_int_equal(pthread_join(thread, NULL), 0);
    print_message("%s\n", detail.text);
    assert_non_null(strstr(detail.text, "the late culprit"));
    assert_true(gpu_is_lost(gpu));
    /* The culprit is the oldest, behind which nothing is looked at any more: what is gone went before it failed. */
    assert_in_range(gpu->n_pending, 2, N_COMMANDS / 4);
    assert_int_equal(gpu_step_finish(gpu, &detail), -ENODEV);
    assert_int_equal(gpu_event_status(failed), -EIO);
}

/* PoCL never calls back for a command that waits for one that fails; those that end later are not taken for hung. */
static void gpu_wait_needs_no_callback_of_an_earlier_wait(void **state)
{
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;
    _cleanup_(gpu_event_unrefp) GpuEvent *held = NULL, *last = NULL;
    const uint32_t value = 42;
    cl_event users[2];
    pthread_t thread;
    cl_int status;

    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 4096, &buffer, NULL), 0);
    gpu->n_expected++; /* of the one that does not come */
    users[0] = fake_command(gpu, GPU_QUEUE_UPLOAD, "fails", NULL);
    users[1] = fake_command(gpu, GPU_QUEUE_DOWNLOAD, "held", &held);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_COMPUTE, buffer, 0, &value, sizeof(value), (GpuWait){&held, 1}, "last", &last), 0);
    assert_int_equal(pthread_create(&thread, NULL, fail_then_go_on, users), 0);
    gpu_lose(gpu, "a case of this test");
    gpu_settle(gpu);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_false(gpu_is_hung(gpu));
    assert_int_equal(clGetEventInfo(last->cl, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(status), &status, NULL), CL_SUCCESS);
    assert_int_equal(status, CL_COMPLETE);
}

/* A long step whose first part does not end either is given up at the same deadline as a short one. */
static void gpu_step_finish_gives_up_at_its_first_look(void **state)
{
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;
    _cleanup_(gpu_event_unrefp) GpuEvent *held = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const uint32_t value = 42;
    uint64_t begin_usec;
    cl_event user;

    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 4096, &buffer, NULL), 0);
    assert_int_equal(gpu_step_begin(gpu), 0);
    user = fake_command(gpu, GPU_QUEUE_UPLOAD, "held", &held);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_COMPUTE, buffer, 0, &value, sizeof(value), (GpuWait){&held, 1}, "first", NULL), 0);
    for (int i = 0; i < 200; i++)
        assert_int_equal(gpu_fill_zero(gpu, GPU_QUEUE_COMPUTE, buffer, 0, 4096), 0);
    gpu->deadline_usec = 300000;
    begin_usec = gpu_now_usec();
    assert_int_equal(gpu_step_finish(gpu, &detail), GPU_E_HUNG);
    assert_in_range(gpu_now_usec() - begin_usec, 300000, 2000000);
    assert_true(gpu_is_lost(gpu));
    assert_int_equal(gpu_step_finish(gpu, &detail), -ENODEV);
    assert_int_equal(clSetUserEventStatus(user, CL_COMPLETE), CL_SUCCESS); /* lets the driver's threads go */
    for (int tries = 0; tries < 1000 && atomic_load(&gpu->signal->n_refs) > 1; tries++)
        sleep_usec(10000);
    assert_int_equal(atomic_load(&gpu->signal->n_refs), 1); /* all callbacks have come */
}

static void gpu_event_wait_reports_the_failure_of_its_event(void **state)
{
    Gpu *gpu = *state;
    _cleanup_(gpu_event_unrefp) GpuEvent *failed = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    cl_event user = fake_command(gpu, GPU_QUEUE_UPLOAD, "broken copy", &failed);

    assert_int_equal(clSetUserEventStatus(user, CL_MEM_OBJECT_ALLOCATION_FAILURE), CL_SUCCESS);
    assert_int_equal(gpu_event_wait(gpu, failed, &detail), GPU_E_LOST);
    assert_non_null(strstr(detail.text, "broken copy"));
}

static void gpu_step_finish_gives_up_at_its_deadline_without_spinning(void **state)
{
    Gpu *gpu = *state;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    struct timespec cpu_before, cpu_after;
    uint64_t began = gpu_now_usec(), took;
    cl_event user = fake_command(gpu, GPU_QUEUE_COMPUTE, "hangs", NULL);
    long cpu_usec;

    assert_int_equal(clRetainEvent(user), CL_SUCCESS);
    gpu->deadline_usec = 150000;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_before);
    assert_int_equal(gpu_step_finish(gpu, &detail), GPU_E_HUNG);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_after);
    took = gpu_now_usec() - began;
    cpu_usec = (cpu_after.tv_sec - cpu_before.tv_sec) * 1000000 + (cpu_after.tv_nsec - cpu_before.tv_nsec) / 1000;
    print_message("%s (%lu us, %ld us of CPU)\n", detail.text, (unsigned long)took, cpu_usec);
    assert_true(took >= 150000);
    assert_true(cpu_usec < 75000);
    assert_non_null(strstr(detail.text, "hangs"));
    assert_true(gpu_is_lost(gpu));
    assert_int_equal(gpu_step_begin(gpu), -ENODEV);
    /* The late completion posts to a signal that must still be there. */
    assert_int_equal(clSetUserEventStatus(user, CL_COMPLETE), CL_SUCCESS);
    sleep_usec(20000);
    assert_int_equal(clReleaseEvent(user), CL_SUCCESS);
}

static void gpu_free_after_a_hang_does_not_wait(void **state)
{
    const GpuOptions options = {.deadline_usec = 1000};
    cl_event user;
    uint64_t began;
    Gpu *gpu = NULL;

    (void)state;
    assert_int_equal(gpu_open(&options, &gpu, NULL), 0);
    user = fake_command(gpu, GPU_QUEUE_COMPUTE, "hangs", NULL);
    assert_int_equal(clRetainEvent(user), CL_SUCCESS);
    assert_int_equal(gpu_drain(gpu, NULL), GPU_E_HUNG);
    began = gpu_now_usec();
    assert_null(gpu_free(gpu));
    assert_true(gpu_now_usec() - began < 1000000);
    assert_int_equal(clSetUserEventStatus(user, CL_COMPLETE), CL_SUCCESS);
    sleep_usec(20000);
    assert_int_equal(clReleaseEvent(user), CL_SUCCESS);
}

/* One decode step's worth of commands. */
static void warm_step(Gpu *gpu, GpuBuffer *a, GpuBuffer *b, char *host)
{
    assert_int_equal(gpu_step_begin(gpu), 0);
    for (int i = 0; i < 100; i++) {
        _cleanup_(gpu_event_unrefp) GpuEvent *uploaded = NULL, *copied = NULL;

        assert_int_equal(gpu_upload(gpu, GPU_QUEUE_UPLOAD, a, 0, host, 64, GPU_WAIT_NONE, "in", &uploaded), 0);
        assert_int_equal(gpu_copy(gpu, GPU_QUEUE_COMPUTE, b, 0, a, 0, 64, (GpuWait){&uploaded, 1}, "copy", &copied), 0);
        assert_int_equal(gpu_download(gpu, GPU_QUEUE_DOWNLOAD, b, 0, host + 64, 64, (GpuWait){&copied, 1}, "out", NULL), 0);
    }
    assert_int_equal(gpu_step_finish(gpu, NULL), 0);
}

static size_t n_event_blocks(const Gpu *gpu)
{
    size_t n = 0;

    for (const GpuEventBlock *block = gpu->event_blocks; block; block = block->next)
        n++;
    return n;
}

static size_t n_free_events(const Gpu *gpu)
{
    size_t n = 0;

    for (const GpuEvent *event = gpu->free_events; event; event = event->next_free)
        n++;
    return n;
}

static void gpu_step_after_warm_up_allocates_nothing_of_ours_and_leaks_no_event(void **state)
{
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *a = NULL, *b = NULL;
    char host[128] = {0};
    size_t blocks, pending, waits, leaked;
    GpuCounters before, after;

    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 64, &a, NULL), 0);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 64, &b, NULL), 0);
    for (int i = 0; i < 3; i++)
        warm_step(gpu, a, b, host);
    assert_int_equal(gpu_drain(gpu, NULL), 0);
    blocks = n_event_blocks(gpu);
    pending = gpu->n_pending_allocated;
    waits = gpu->n_waits_allocated;
    gpu_counters(gpu, &before);
    for (int i = 0; i < 100; i++) {
        warm_step(gpu, a, b, host);
        assert_int_equal(gpu_drain(gpu, NULL), 0);
    }
    gpu_counters(gpu, &after);
    assert_int_equal(n_event_blocks(gpu), blocks);
    assert_int_equal(gpu->n_pending_allocated, pending);
    assert_int_equal(gpu->n_waits_allocated, waits);
    assert_int_equal(after.n_buffers_created, before.n_buffers_created);
    assert_int_equal(after.n_programs_built, before.n_programs_built);
    /* Every event is back but the newest of each queue. */
    leaked = blocks * GPU_EVENT_BLOCK - n_free_events(gpu);
    assert_int_equal(leaked, GPU_QUEUE_X_MAX);
}

static void gpu_commands_without_a_step_do_not_pile_up(void **state)
{
    Gpu *gpu = *state;
    _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;

    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 64, &buffer, NULL), 0);
    for (int i = 0; i < 30000; i++) {
        assert_int_equal(gpu_fill_zero(gpu, GPU_QUEUE_UPLOAD, buffer, 0, 64), 0);
        if (i % 1000 == 999)
            assert_int_equal(gpu_event_wait(gpu, gpu->last[GPU_QUEUE_UPLOAD], NULL), 0);
    }
    assert_true(gpu->n_pending_allocated <= 8192);
    assert_int_equal(gpu_drain(gpu, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(gpu_command_waits_for_events_of_other_queues_and_not_longer, setup, teardown),
        cmocka_unit_test_setup_teardown(gpu_step_finish_leaves_copies_in_flight_to_a_later_step, setup, teardown),
        cmocka_unit_test_setup_teardown(gpu_step_finish_finds_the_one_command_that_failed, setup, teardown),
        cmocka_unit_test_setup_teardown(gpu_step_finish_finds_what_fails_after_its_first_look, setup, teardown),
        cmocka_unit_test_setup_teardown(gpu_step_finish_gives_up_at_its_first_look, setup, teardown),
        cmocka_unit_test_setup_teardown(gpu_wait_needs_no_callback_of_an_earlier_wait, setup, teardown),
        cmocka_unit_test_setup_teardown(gpu_event_wait_reports_the_failure_of_its_event, setup, teardown),
        cmocka_unit_test_setup_teardown(gpu_step_finish_gives_up_at_its_deadline_without_spinning, setup, teardown),
        cmocka_unit_test(gpu_free_after_a_hang_does_not_wait),
        cmocka_unit_test_setup_teardown(gpu_step_after_warm_up_allocates_nothing_of_ours_and_leaks_no_event, setup, teardown),
        cmocka_unit_test_setup_teardown(gpu_commands_without_a_step_do_not_pile_up, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
