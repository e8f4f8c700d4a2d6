/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated small GPU: copies take the time that they should, run beside kernels, and everything that waits for them waits.
 *
 * A copy is never faster than the rate (within 2 %); how much slower it may be depends on who else uses the machine: the best of some tries
 * must be within a quarter.
 */

#include "tests/lib/sim-rig.h"
#include "tests/sim/clsim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define MIB     (1024.0 * 1024.0)
#define RATE    (100.0 * MIB) /* LINK below */
#define N_BYTES (4u << 20)    /* 40 ms */
#define N_TRIES 8u

/* ---- scenarios ----------------------------------------------------------------------------------------------------- */

static double duration(cl_event event)
{
    return sim_event_time(event, CL_PROFILING_COMMAND_END) - sim_event_time(event, CL_PROFILING_COMMAND_START);
}

static cl_ulong ask(cl_device_id device, cl_device_info what)
{
    cl_ulong answer = 0;

    CHECK(clGetDeviceInfo(device, what, sizeof(answer), &answer, NULL) == CL_SUCCESS);
    return answer;
}

static cl_event copy(const SimWorld *world, cl_command_queue queue, cl_mem buffer, bool down, cl_uint n_waits, const cl_event *waits)
{
    static char host[2][N_BYTES];
    cl_event event = NULL;

    if (down)
        CHECK(clEnqueueReadBuffer(queue, buffer, CL_FALSE, 0, N_BYTES, host[1], n_waits, waits, &event) == CL_SUCCESS);
    else
        CHECK(clEnqueueWriteBuffer(queue, buffer, CL_FALSE, 0, N_BYTES, host[0], n_waits, waits, &event) == CL_SUCCESS);
    CHECK(clFlush(queue) == CL_SUCCESS);
    (void)world;
    return event;
}

/* One copy alone: its times, and the host's. */
static void keeps_to_the_rate(void)
{
    double best = 1e9, least = N_BYTES / RATE;
    SimWorld world;
    cl_mem buffer;

    sim_world_open(&world);
    CHECK(ask(world.device, CLSIM_DEVICE_LINK_RATE) == (cl_ulong)RATE);
    buffer = sim_world_buffer(&world, N_BYTES);
    for (unsigned i = 0; i < N_TRIES; i++) {
        double begin = sim_now(), wall;
        cl_event event = copy(&world, world.a, buffer, i % 2, 0, NULL);

        CHECK(clWaitForEvents(1, &event) == CL_SUCCESS);
        wall = sim_now() - begin;
        CHECK(wall >= 0.98 * least && duration(event) >= 0.98 * least && duration(event) <= wall);
        CHECK(sim_event_time(event, CL_PROFILING_COMMAND_QUEUED) <= sim_event_time(event, CL_PROFILING_COMMAND_SUBMIT));
        CHECK(sim_event_time(event, CL_PROFILING_COMMAND_SUBMIT) <= sim_event_time(event, CL_PROFILING_COMMAND_START));
        best = best < wall ? best : wall;
        CHECK(clReleaseEvent(event) == CL_SUCCESS);
    }
    CHECK(best <= 1.25 * least);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* Ten copies in a row: what the thread is late by does not add up. */
static void stays_on_time(void)
{
    double best = 1e9, least = 10 * N_BYTES / RATE / 8;
    static char host[N_BYTES];
    SimWorld world;
    cl_mem buffer;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, N_BYTES);
    for (unsigned i = 0; i < 4; i++) {
        double begin = sim_now(), wall;

        for (unsigned j = 0; j < 10; j++)
            CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_FALSE, 0, N_BYTES / 8, host, 0, NULL, NULL) == CL_SUCCESS);
        CHECK(clFinish(world.a) == CL_SUCCESS);
        wall = sim_now() - begin;
        CHECK(wall >= 0.98 * least);
        best = best < wall ? best : wall;
    }
    CHECK(best <= 1.25 * least);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* Seconds that the times of two events share. */
static double shared(cl_event a, cl_event b)
{
    double begin_a = sim_event_time(a, CL_PROFILING_COMMAND_START), begin_b = sim_event_time(b, CL_PROFILING_COMMAND_START);
    double end_a = sim_event_time(a, CL_PROFILING_COMMAND_END), end_b = sim_event_time(b, CL_PROFILING_COMMAND_END);
    double begin = begin_a > begin_b ? begin_a : begin_b, end = end_a < end_b ? end_a : end_b;

    return end > begin ? end - begin : 0;
}

/* A kernel of about three copies; a copy that is enqueued while it runs does not wait for it, nor for a worker of the driver's. */
static void copies_beside_kernels(void)
{
    double best = 0;
    SimWorld world;
    cl_mem buffer, out;
    cl_int rounds;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, N_BYTES);
    out = sim_world_buffer(&world, sizeof(cl_int));
    rounds = sim_world_rounds(&world, 3 * N_BYTES / RATE);
    for (unsigned i = 0; i < N_TRIES && best < 0.7; i++) {
        cl_event kernel, written;
        double share;

        CHECK(sim_world_spin(&world, world.a, out, rounds, &kernel) == CL_SUCCESS);
        CHECK(clFlush(world.a) == CL_SUCCESS);
        written = copy(&world, world.b, buffer, false, 0, NULL);
        CHECK(clFinish(world.a) == CL_SUCCESS);
        CHECK(clFinish(world.b) == CL_SUCCESS);
        share = shared(kernel, written) / duration(written);
        best = best > share ? best : share;
        CHECK(clReleaseEvent(kernel) == CL_SUCCESS);
        CHECK(clReleaseEvent(written) == CL_SUCCESS);
    }
    CHECK(best >= 0.7);
    CHECK(clReleaseMemObject(out) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* How much of a copy down lies within one up. */
static double both_ways(void)
{
    double best = 0;
    SimWorld world;
    cl_mem a, b;

    sim_world_open(&world);
    a = sim_world_buffer(&world, N_BYTES);
    b = sim_world_buffer(&world, N_BYTES);
    for (unsigned i = 0; i < N_TRIES && best < 0.7; i++) {
        cl_event up = copy(&world, world.a, a, false, 0, NULL), down = copy(&world, world.b, b, true, 0, NULL);
        double share;

        CHECK(clFinish(world.a) == CL_SUCCESS);
        CHECK(clFinish(world.b) == CL_SUCCESS);
        share = shared(up, down) / duration(down);
        best = best > share ? best : share;
        CHECK(clReleaseEvent(up) == CL_SUCCESS);
        CHECK(clReleaseEvent(down) == CL_SUCCESS);
    }
    CHECK(clReleaseMemObject(b) == CL_SUCCESS);
    CHECK(clReleaseMemObject(a) == CL_SUCCESS);
    sim_world_close(&world);
    return best;
}

static void copies_both_ways_at_once(void)
{
    CHECK(both_ways() >= 0.7);
}

static void copies_one_way_at_a_time(void)
{
    CHECK(both_ways() <= 0.05);
}

static void waits_for_latency(void)
{
    static char host[64];
    SimWorld world;
    cl_event event;
    cl_mem buffer;
    double waited;

    sim_world_open(&world);
    CHECK(ask(world.device, CLSIM_DEVICE_LATENCY) == 20000000);
    buffer = sim_world_buffer(&world, 64);
    CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_FALSE, 0, 64, host, 0, NULL, &event) == CL_SUCCESS);
    CHECK(clWaitForEvents(1, &event) == CL_SUCCESS);
    waited = sim_event_time(event, CL_PROFILING_COMMAND_START) - sim_event_time(event, CL_PROFILING_COMMAND_SUBMIT);
    CHECK(waited >= 0.0195);
    CHECK(clReleaseEvent(event) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* Of copies behind each other in a queue only the first waits for it. */
static void fetches_ahead(void)
{
    static char host[64];
    cl_event events[10];
    SimWorld world;
    cl_mem buffer;
    double begin;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, 64);
    for (unsigned i = 0; i < 10; i++)
        CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_FALSE, 0, 64, host, 0, NULL, &events[i]) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS);
    begin = sim_event_time(events[0], CL_PROFILING_COMMAND_SUBMIT);
    CHECK(sim_event_time(events[0], CL_PROFILING_COMMAND_START) - begin >= 0.0195);
    CHECK(sim_event_time(events[9], CL_PROFILING_COMMAND_END) - begin < 0.15);
    for (unsigned i = 1; i < 10; i++)
        CHECK(sim_event_time(events[i - 1], CL_PROFILING_COMMAND_START) <= sim_event_time(events[i], CL_PROFILING_COMMAND_START));
    for (unsigned i = 0; i < 10; i++)
        CHECK(clReleaseEvent(events[i]) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* The contents that a buffer begins with, and maps, come over the same link. */
static void maps_and_contents_take_their_time(void)
{
    double begin, least = N_BYTES / RATE;
    char *host = calloc(1, N_BYTES);
    cl_event event;
    SimWorld world;
    cl_int status;
    cl_mem buffer;
    void *map;

    CHECK(host);
    sim_world_open(&world);
    begin = sim_now();
    buffer = clCreateBuffer(world.context, CL_MEM_COPY_HOST_PTR, N_BYTES, host, &status);
    CHECK(status == CL_SUCCESS && sim_now() - begin >= 0.98 * least);
    begin = sim_now();
    map = clEnqueueMapBuffer(world.a, buffer, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0, N_BYTES, 0, NULL, NULL, &status);
    CHECK(status == CL_SUCCESS && sim_now() - begin >= 0.98 * least);
    CHECK(clEnqueueUnmapMemObject(world.a, buffer, map, 0, NULL, &event) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS && duration(event) >= 0.98 * least);
    CHECK(clReleaseEvent(event) == CL_SUCCESS);
    map = clEnqueueMapBuffer(world.a, buffer, CL_FALSE, CL_MAP_WRITE_INVALIDATE_REGION, 0, N_BYTES, 0, NULL, &event, &status);
    CHECK(status == CL_SUCCESS && clFinish(world.a) == CL_SUCCESS && duration(event) <= 0.5 * least);
    CHECK(clReleaseEvent(event) == CL_SUCCESS);
    CHECK(clEnqueueUnmapMemObject(world.a, buffer, map, 0, NULL, NULL) == CL_SUCCESS && clFinish(world.a) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    free(host);
    sim_world_close(&world);
}

/* Copy in, kernel, copy out of one queue: in this order, with the right numbers, and the times say so. */
static void one_queue_keeps_its_order(void)
{
    static cl_int host[1u << 18];
    const size_t n = sizeof(host) / sizeof(*host);
    cl_event events[3];
    SimWorld world;
    cl_mem buffer;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, sizeof(host));
    for (cl_int round = 0; round < 3; round++) {
        for (size_t i = 0; i < n; i++)
            host[i] = (cl_int)i * (round + 1);
        CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_FALSE, 0, sizeof(host), host, 0, NULL, &events[0]) == CL_SUCCESS);
        CHECK(sim_world_add(&world, world.a, buffer, n, 7, 0, NULL, &events[1]) == CL_SUCCESS);
        CHECK(clEnqueueReadBuffer(world.a, buffer, CL_FALSE, 0, sizeof(host), host, 0, NULL, &events[2]) == CL_SUCCESS);
        CHECK(clFinish(world.a) == CL_SUCCESS);
        for (size_t i = 0; i < n; i++)
            CHECK(host[i] == (cl_int)i * (round + 1) + 7);
        for (unsigned i = 0; i < 3; i++) {
            CHECK(sim_event_status(events[i]) == CL_COMPLETE);
            CHECK(i == 0 ||
                  sim_event_time(events[i - 1], CL_PROFILING_COMMAND_END) <= sim_event_time(events[i], CL_PROFILING_COMMAND_START));
        }
        for (unsigned i = 0; i < 3; i++)
            CHECK(clReleaseEvent(events[i]) == CL_SUCCESS);
    }
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

typedef struct Note {
    volatile double at;
    volatile cl_int status;
    volatile bool came;
} Note;

static void CL_CALLBACK note(cl_event event, cl_int status, void *userdata)
{
    Note *to = userdata;

    (void)event;
    to->at = sim_now();
    to->status = status;
    to->came = true;
}

/* A copy says at each time what it is: queued, running, complete; and calls back then. */
static void tells_its_state(void)
{
    double begin = sim_now(), least = N_BYTES / RATE;
    Note running = {.came = false}, done = {.came = false};
    cl_event gate, event, marker;
    cl_command_queue queue = NULL;
    cl_command_type type = 0;
    cl_context context = NULL;
    cl_ulong time;
    SimWorld world;
    cl_mem buffer;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, N_BYTES);
    gate = clCreateUserEvent(world.context, NULL);
    event = copy(&world, world.a, buffer, false, 1, &gate);
    CHECK(clEnqueueMarkerWithWaitList(world.b, 1, &event, &marker) == CL_SUCCESS && clFlush(world.b) == CL_SUCCESS);
    CHECK(clSetEventCallback(event, CL_RUNNING, note, &running) == CL_SUCCESS);
    CHECK(clSetEventCallback(event, CL_COMPLETE, note, &done) == CL_SUCCESS);
    CHECK(clGetEventInfo(event, CL_EVENT_COMMAND_QUEUE, sizeof(queue), &queue, NULL) == CL_SUCCESS && queue == world.a);
    CHECK(clGetEventInfo(event, CL_EVENT_CONTEXT, sizeof(context), &context, NULL) == CL_SUCCESS && context == world.context);
    CHECK(clGetEventInfo(event, CL_EVENT_COMMAND_TYPE, sizeof(type), &type, NULL) == CL_SUCCESS && type == CL_COMMAND_WRITE_BUFFER);
    (void)usleep(20000);
    CHECK(sim_event_status(event) == CL_QUEUED && !running.came && !done.came && sim_event_status(marker) > CL_COMPLETE);
    CHECK(clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_END, sizeof(time), &time, NULL) == CL_PROFILING_INFO_NOT_AVAILABLE);
    CHECK(clSetUserEventStatus(event, CL_COMPLETE) == CL_INVALID_EVENT);
    begin = sim_now();
    CHECK(clSetUserEventStatus(gate, CL_COMPLETE) == CL_SUCCESS);
    for (unsigned i = 0; i < 20000 && !running.came; i++)
        (void)usleep(500);
    CHECK(running.came && running.status == CL_RUNNING);
    CHECK(sim_event_status(event) <= CL_RUNNING);
    CHECK(clWaitForEvents(1, &marker) == CL_SUCCESS && sim_now() - begin >= 0.98 * least);
    CHECK(sim_event_status(event) == CL_COMPLETE);
    for (unsigned i = 0; i < 20000 && !done.came; i++)
        (void)usleep(500);
    CHECK(done.came && done.status == CL_COMPLETE && done.at - begin >= 0.98 * least);
    done.came = false;
    CHECK(clSetEventCallback(event, CL_COMPLETE, note, &done) == CL_SUCCESS); /* late, but called */
    for (unsigned i = 0; i < 20000 && !done.came; i++)
        (void)usleep(500);
    CHECK(done.came);
    CHECK(clReleaseEvent(marker) == CL_SUCCESS && clReleaseEvent(event) == CL_SUCCESS && clReleaseEvent(gate) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* Across queues, both ways: a kernel waits for a copy, a copy for a kernel; blocking calls come back with the bytes. */
static void queues_wait_for_each_other(void)
{
    static cl_int host[1u << 16];
    const size_t n = sizeof(host) / sizeof(*host);
    cl_event written, added, read;
    SimWorld world;
    cl_mem buffer;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, sizeof(host));
    for (cl_int round = 1; round <= 20; round++) {
        for (size_t i = 0; i < n; i++)
            host[i] = round;
        CHECK(clEnqueueWriteBuffer(world.b, buffer, CL_FALSE, 0, sizeof(host), host, 0, NULL, &written) == CL_SUCCESS);
        CHECK(clFlush(world.b) == CL_SUCCESS);
        CHECK(sim_world_add(&world, world.a, buffer, n, 1, 1, &written, &added) == CL_SUCCESS);
        CHECK(clFlush(world.a) == CL_SUCCESS);
        if (round % 2) {
            CHECK(clEnqueueReadBuffer(world.b, buffer, CL_TRUE, 0, sizeof(host), host, 1, &added, NULL) == CL_SUCCESS);
        } else {
            CHECK(clEnqueueReadBuffer(world.b, buffer, CL_FALSE, 0, sizeof(host), host, 1, &added, &read) == CL_SUCCESS);
            CHECK(clWaitForEvents(1, &read) == CL_SUCCESS && clReleaseEvent(read) == CL_SUCCESS);
        }
        for (size_t i = 0; i < n; i++)
            CHECK(host[i] == round + 1);
        CHECK(clReleaseEvent(written) == CL_SUCCESS && clReleaseEvent(added) == CL_SUCCESS);
    }
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* A kernel that waits for a copy begins at once; the worker that looks for it falls asleep when nothing comes. */
static void wakes_at_once(void)
{
    static char host[N_BYTES / 16];
    double best = 1, used;
    cl_event written, added;
    SimWorld world;
    cl_mem buffer;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, N_BYTES);
    /* Somebody else may have the worker's processor for a while. */
    for (unsigned i = 0; i < 1000 && best >= 100e-6; i++) {
        double gap;

        CHECK(clEnqueueWriteBuffer(world.b, buffer, CL_FALSE, 0, sizeof(host), host, 0, NULL, &written) == CL_SUCCESS);
        CHECK(clFlush(world.b) == CL_SUCCESS);
        CHECK(sim_world_add(&world, world.a, buffer, 1, 1, 1, &written, &added) == CL_SUCCESS);
        CHECK(clFinish(world.a) == CL_SUCCESS);
        gap = sim_event_time(added, CL_PROFILING_COMMAND_START) - sim_event_time(written, CL_PROFILING_COMMAND_END);
        best = best < gap ? best : gap;
        CHECK(clReleaseEvent(written) == CL_SUCCESS && clReleaseEvent(added) == CL_SUCCESS);
    }
    CHECK(best < 100e-6);
    (void)usleep(200000);
    used = (double)clock() / CLOCKS_PER_SEC;
    (void)usleep(200000);
    CHECK((double)clock() / CLOCKS_PER_SEC - used < 0.1);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* The rate of the link is the measured rate of the kernels divided by the ratio. */
static void measures_its_kernels(void)
{
    double read, link, between;
    SimWorld world;

    sim_world_open(&world);
    read = (double)ask(world.device, CLSIM_DEVICE_READ_RATE);
    link = (double)ask(world.device, CLSIM_DEVICE_LINK_RATE);
    between = (double)ask(world.device, CLSIM_DEVICE_COPY_RATE);
    CHECK(read > 1e8 && read < 1e12);
    CHECK(read / link > 19.99 && read / link < 20.01 && read / between > 1.99 && read / between < 2.01);
    sim_world_close(&world);
}

static const SimScenario scenarios[] = {
    {"keeps_to_the_rate", keeps_to_the_rate},
    {"stays_on_time", stays_on_time},
    {"copies_beside_kernels", copies_beside_kernels},
    {"copies_both_ways_at_once", copies_both_ways_at_once},
    {"copies_one_way_at_a_time", copies_one_way_at_a_time},
    {"waits_for_latency", waits_for_latency},
    {"fetches_ahead", fetches_ahead},
    {"maps_and_contents_take_their_time", maps_and_contents_take_their_time},
    {"one_queue_keeps_its_order", one_queue_keeps_its_order},
    {"tells_its_state", tells_its_state},
    {"queues_wait_for_each_other", queues_wait_for_each_other},
    {"wakes_at_once", wakes_at_once},
    {"measures_its_kernels", measures_its_kernels},
};

/* ---- tests --------------------------------------------------------------------------------------------------------- */

#define LINK  "CLSIM_LINK_RATE=100M CLSIM_CHECK=all CLSIM_MISUSE=99"
/* A sanitizer wants to be loaded first, but nothing of what it watches is wrapped here. */
#define AWAKE " LD_PRELOAD=awake POCL_AFFINITY=1 ASAN_OPTIONS=use_sigaltstack=0:verify_asan_link_order=0"

static void sim_copies_keep_to_the_rate(void **state)
{
    (void)state;
    sim_rig_run_well("keeps_to_the_rate", LINK);
    sim_rig_run_well("keeps_to_the_rate", LINK " CLSIM_DEVICE_MEMORY=driver");
    sim_rig_run_well("stays_on_time", LINK);
}

static void sim_copies_run_beside_kernels(void **state)
{
    (void)state;
    sim_rig_run_well("copies_beside_kernels", LINK);
}

static void sim_engines_run_both_ways_or_one(void **state)
{
    (void)state;
    sim_rig_run_well("copies_both_ways_at_once", LINK);
    sim_rig_run_well("copies_one_way_at_a_time", LINK " CLSIM_ENGINES=1");
}

static void sim_latency_comes_first(void **state)
{
    (void)state;
    sim_rig_run_well("waits_for_latency", LINK " CLSIM_LATENCY_USEC=20000");
    sim_rig_run_well("fetches_ahead", LINK " CLSIM_LATENCY_USEC=20000");
}

static void sim_maps_and_first_contents_use_the_link(void **state)
{
    (void)state;
    sim_rig_run_well("maps_and_contents_take_their_time", LINK);
}

static void sim_a_queue_keeps_its_order(void **state)
{
    (void)state;
    sim_rig_run_well("one_queue_keeps_its_order", LINK);
    sim_rig_run_well("one_queue_keeps_its_order", LINK " CLSIM_DEVICE_MEMORY=driver");
}

static void sim_a_copy_tells_its_state(void **state)
{
    (void)state;
    sim_rig_run_well("tells_its_state", LINK);
}

static void sim_queues_wait_for_each_other(void **state)
{
    (void)state;
    sim_rig_run_well("queues_wait_for_each_other", LINK " CLSIM_POISON=1");
    sim_rig_run_well("queues_wait_for_each_other", "CLSIM_POISON=1"); /* as fast as memory is */
}

static void sim_workers_stay_awake_for_a_while(void **state)
{
    (void)state;
    sim_rig_run_well("wakes_at_once", LINK AWAKE);
    sim_rig_run_well("queues_wait_for_each_other", "CLSIM_POISON=1" AWAKE);
    sim_rig_run_well("one_queue_keeps_its_order", LINK AWAKE);
}

static void sim_the_rate_follows_from_the_ratio(void **state)
{
    (void)state;
    sim_rig_run_well("measures_its_kernels", "CLSIM_LINK_RATIO=20");
    sim_rig_run_well("measures_its_kernels", "CLSIM_LINK_RATIO=20 CLSIM_READ_RATE=4G");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sim_copies_keep_to_the_rate),
        cmocka_unit_test(sim_copies_run_beside_kernels),
        cmocka_unit_test(sim_engines_run_both_ways_or_one),
        cmocka_unit_test(sim_latency_comes_first),
        cmocka_unit_test(sim_maps_and_first_contents_use_the_link),
        cmocka_unit_test(sim_a_queue_keeps_its_order),
        cmocka_unit_test(sim_a_copy_tells_its_state),
        cmocka_unit_test(sim_queues_wait_for_each_other),
        cmocka_unit_test(sim_workers_stay_awake_for_a_while),
        cmocka_unit_test(sim_the_rate_follows_from_the_ratio),
    };

    if (sim_rig_is_scenario(argc, argv, scenarios, sizeof(scenarios) / sizeof(*scenarios)))
        return EXIT_SUCCESS;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
