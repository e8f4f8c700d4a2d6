/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated small GPU: what a program does wrong is found.  Each defect is seeded in a scenario that is right but for it, and the scenario
 * without it must run clean.
 */

#include "tests/lib/sim-rig.h"
#include "tests/sim/clsim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#define N_BYTES (1u << 20)
#define N_INTS  (N_BYTES / 4)
#define N_BLOCK 65536u /* of the allocator's heap: still mapped when it is free */

/* ---- scenarios ----------------------------------------------------------------------------------------------------- */

/* A ring of one slot: filled on queue b, read on queue a, filled again. */
static void stream(bool waits_for_fill, bool waits_for_read)
{
    static cl_int host[2][N_INTS], out;
    cl_event filled[2], read[2];
    cl_mem slot, result;
    SimWorld world;

    sim_world_open(&world);
    slot = sim_world_buffer(&world, N_BYTES);
    result = sim_world_buffer(&world, sizeof(cl_int));
    for (unsigned i = 0; i < 2; i++) {
        bool again = i > 0 && waits_for_read;

        CHECK(clEnqueueWriteBuffer(world.b, slot, CL_FALSE, 0, N_BYTES, host[i], again, again ? &read[0] : NULL, &filled[i]) ==
              CL_SUCCESS);
        CHECK(clFlush(world.b) == CL_SUCCESS);
        CHECK(sim_world_sum(&world, world.a, slot, result, N_INTS, waits_for_fill, waits_for_fill ? &filled[i] : NULL, &read[i]) ==
              CL_SUCCESS);
        CHECK(clFlush(world.a) == CL_SUCCESS);
    }
    CHECK(clEnqueueReadBuffer(world.a, result, CL_TRUE, 0, sizeof(out), &out, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clFinish(world.b) == CL_SUCCESS);
    for (unsigned i = 0; i < 2; i++) {
        CHECK(clReleaseEvent(filled[i]) == CL_SUCCESS);
        CHECK(clReleaseEvent(read[i]) == CL_SUCCESS);
    }
    CHECK(clReleaseMemObject(result) == CL_SUCCESS);
    CHECK(clReleaseMemObject(slot) == CL_SUCCESS);
    sim_world_close(&world);
}

static void streams_well(void)
{
    stream(true, true);
}

static void reads_a_slot_that_is_being_filled(void)
{
    stream(false, true);
}

static void fills_a_slot_that_is_being_read(void)
{
    stream(true, false);
}

/* A command fails, the program sees it and goes on, well or not: the slot is read while it is filled, the memory that fills it is freed. */
static void fail_first(bool waits_for_fill, bool frees_early)
{
    clsim_set_faults_fn set;
    cl_event failed, filled;
    cl_mem slot, result;
    SimWorld world;
    char *block = calloc(1, N_BLOCK);
    cl_int out;

    sim_world_open(&world);
    *(void **)&set = clGetExtensionFunctionAddressForPlatform(world.platform, "clsimSetFaults");
    CHECK(block && set && set("clEnqueueWriteBuffer:1:event=CL_OUT_OF_RESOURCES") == CL_SUCCESS);
    slot = sim_world_buffer(&world, N_BLOCK);
    result = sim_world_buffer(&world, sizeof(cl_int));
    CHECK(clEnqueueWriteBuffer(world.b, slot, CL_FALSE, 0, N_BLOCK, block, 0, NULL, &failed) == CL_SUCCESS);
    CHECK(clFlush(world.b) == CL_SUCCESS && clWaitForEvents(1, &failed) == CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST);
    CHECK(clEnqueueWriteBuffer(world.b, slot, CL_FALSE, 0, N_BLOCK, block, 0, NULL, &filled) == CL_SUCCESS && clFlush(world.b) == CL_SUCCESS);
    if (frees_early)
        free(block);
    CHECK(sim_world_sum(&world, world.a, slot, result, N_BLOCK / 4, waits_for_fill, waits_for_fill ? &filled : NULL, NULL) == CL_SUCCESS);
    CHECK(clEnqueueReadBuffer(world.a, result, CL_TRUE, 0, sizeof(out), &out, 0, NULL, NULL) == CL_SUCCESS && clFinish(world.b) == CL_SUCCESS);
    if (!frees_early)
        free(block);
    CHECK(clReleaseEvent(filled) == CL_SUCCESS && clReleaseEvent(failed) == CL_SUCCESS);
    CHECK(clReleaseMemObject(result) == CL_SUCCESS && clReleaseMemObject(slot) == CL_SUCCESS);
    sim_world_close(&world);
}

static void goes_on_well_after_a_failure(void)
{
    fail_first(true, false);
}

static void reads_too_early_after_a_failure(void)
{
    fail_first(false, false);
}

static void frees_too_early_after_a_failure(void)
{
    fail_first(true, true);
}

/* Ordered by what the host has seen: every way of looking counts. */
static void orders_by_looking(void)
{
    static cl_int host[N_INTS];
    cl_event events[4], last;
    cl_mem slot;
    SimWorld world;

    sim_world_open(&world);
    slot = sim_world_buffer(&world, N_BYTES);
    for (unsigned i = 0; i < 4; i++) {
        CHECK(clEnqueueWriteBuffer(i % 2 ? world.a : world.b, slot, CL_FALSE, 0, N_BYTES, host, 0, NULL, &events[i]) == CL_SUCCESS);
        CHECK(clFlush(i % 2 ? world.a : world.b) == CL_SUCCESS);
        switch (i) {
        case 0:
            CHECK(clWaitForEvents(1, &events[i]) == CL_SUCCESS);
            break;
        case 1:
            while (sim_event_status(events[i]) != CL_COMPLETE)
                (void)usleep(1000);
            break;
        case 2:
            CHECK(clFinish(world.b) == CL_SUCCESS);
            break;
        default:
            /* One that comes after the last in the other queue stands for it. */
            CHECK(clEnqueueMarkerWithWaitList(world.b, 1, &events[i], &last) == CL_SUCCESS);
            CHECK(clWaitForEvents(1, &last) == CL_SUCCESS);
        }
    }
    CHECK(sim_world_add(&world, world.b, slot, N_INTS, 1, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clFinish(world.b) == CL_SUCCESS);
    for (unsigned i = 0; i < 4; i++)
        CHECK(clReleaseEvent(events[i]) == CL_SUCCESS);
    CHECK(clReleaseEvent(last) == CL_SUCCESS);
    CHECK(clReleaseMemObject(slot) == CL_SUCCESS);
    sim_world_close(&world);
}

/* Two copies of parts of one buffer, on two queues, with or without a byte in common. */
static void copy_parts(size_t second)
{
    static char host[4096];
    cl_mem buffer;
    SimWorld world;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, 8192);
    CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_FALSE, 0, 2048, host, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clEnqueueWriteBuffer(world.b, buffer, CL_FALSE, second, 2048, host + 2048, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS);
    CHECK(clFinish(world.b) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

static void copies_parts_apart(void)
{
    copy_parts(2048);
}

static void copies_parts_that_meet(void)
{
    copy_parts(2047);
}

/* Down to a page of the host and up from it, the second without waiting for the first. */
static void send_home(bool waits)
{
    static char home[65536];
    cl_event down = NULL;
    cl_mem from, to;
    SimWorld world;

    sim_world_open(&world);
    from = sim_world_buffer(&world, sizeof(home));
    to = sim_world_buffer(&world, sizeof(home));
    CHECK(clEnqueueReadBuffer(world.a, from, CL_FALSE, 0, sizeof(home), home, 0, NULL, &down) == CL_SUCCESS);
    CHECK(clFlush(world.a) == CL_SUCCESS);
    CHECK(clEnqueueWriteBuffer(world.b, to, CL_FALSE, 0, sizeof(home), home, waits, waits ? &down : NULL, NULL) == CL_SUCCESS);
    CHECK(clFinish(world.b) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS);
    CHECK(clReleaseEvent(down) == CL_SUCCESS);
    CHECK(clReleaseMemObject(to) == CL_SUCCESS);
    CHECK(clReleaseMemObject(from) == CL_SUCCESS);
    sim_world_close(&world);
}

static void sends_home_well(void)
{
    send_home(true);
}

static void reads_home_while_it_is_written(void)
{
    send_home(false);
}

typedef enum HostDefect { HOST_WELL, HOST_FREED, HOST_UNMAPPED, HOST_CHANGED } HostDefect;

/* The host's memory of a copy, given back or changed before the copy is done. */
static void copy_from_host(HostDefect defect)
{
    char *memory = mmap(NULL, N_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *block = malloc(N_BLOCK);
    cl_int expected = defect == HOST_UNMAPPED ? CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST : CL_SUCCESS;
    cl_event events[2];
    cl_mem buffer;
    SimWorld world;

    CHECK(memory != MAP_FAILED && block);
    memset(block, 1, N_BLOCK);
    sim_world_open(&world);
    buffer = sim_world_buffer(&world, 2 * N_BYTES);
    CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_FALSE, 0, N_BLOCK, block, 0, NULL, &events[0]) == CL_SUCCESS);
    CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_FALSE, N_BYTES, N_BYTES, memory, 0, NULL, &events[1]) == CL_SUCCESS);
    CHECK(clFlush(world.a) == CL_SUCCESS);
    if (defect == HOST_CHANGED)
        memory[N_BYTES - 1] = 1;
    if (defect == HOST_UNMAPPED)
        CHECK(munmap(memory, N_BYTES) == 0);
    if (defect == HOST_FREED) {
        free(block);
        block = NULL;
    }
    CHECK(clWaitForEvents(2, events) == expected);
    free(block);
    if (defect != HOST_UNMAPPED)
        CHECK(munmap(memory, N_BYTES) == 0);
    CHECK(clReleaseEvent(events[0]) == CL_SUCCESS);
    CHECK(clReleaseEvent(events[1]) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

static void keeps_host_memory(void)
{
    copy_from_host(HOST_WELL);
}

static void frees_host_memory(void)
{
    copy_from_host(HOST_FREED);
}

static void unmaps_host_memory(void)
{
    copy_from_host(HOST_UNMAPPED);
}

static void changes_host_memory(void)
{
    copy_from_host(HOST_CHANGED);
}

static volatile bool called;

static void CL_CALLBACK notice(cl_event event, cl_int status, void *userdata)
{
    (void)event;
    (void)status;
    *(volatile bool *)userdata = true;
}

/* A callback that comes when the queue of its command is gone. */
static void call_back(bool waits)
{
    static char host[65536];
    cl_event done;
    cl_mem buffer;
    SimWorld world;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, sizeof(host));
    CHECK(clRetainCommandQueue(world.a) == CL_SUCCESS);
    CHECK(clReleaseCommandQueue(world.b) == CL_SUCCESS);
    world.b = clCreateCommandQueue(world.context, world.device, 0, NULL);
    CHECK(clEnqueueWriteBuffer(world.b, buffer, CL_FALSE, 0, sizeof(host), host, 0, NULL, &done) == CL_SUCCESS);
    CHECK(clSetEventCallback(done, CL_COMPLETE, notice, (void *)(uintptr_t)&called) == CL_SUCCESS);
    for (unsigned i = 0; waits && i < 60000 && !called; i++)
        (void)usleep(1000);
    CHECK(clReleaseCommandQueue(world.b) == CL_SUCCESS);
    world.b = world.a;
    for (unsigned i = 0; i < 60000 && !called; i++)
        (void)usleep(1000);
    CHECK(called);
    CHECK(clReleaseEvent(done) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

static void waits_for_its_callback(void)
{
    call_back(true);
}

static void releases_the_queue_before_the_callback(void)
{
    call_back(false);
}

static void uses_a_released_buffer(void)
{
    cl_mem buffer, kept;
    char host[64];
    SimWorld world;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, 64);
    kept = sim_world_buffer(&world, 64);
    CHECK(sim_world_add(&world, world.a, buffer, 16, 1, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    CHECK(clEnqueueReadBuffer(world.a, buffer, CL_TRUE, 0, 64, host, 0, NULL, NULL) == CL_INVALID_MEM_OBJECT);
    /* Still the kernel's argument. */
    CHECK(clEnqueueNDRangeKernel(world.a, world.add, 1, NULL, &(size_t){16}, NULL, 0, NULL, NULL) == CL_INVALID_KERNEL_ARGS);
    CHECK(clReleaseMemObject(kept) == CL_SUCCESS);
    sim_world_close(&world);
}

static void uses_a_released_event(void)
{
    cl_event event;
    cl_int status;
    SimWorld world;

    sim_world_open(&world);
    CHECK(clEnqueueMarkerWithWaitList(world.a, 0, NULL, &event) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS);
    CHECK(clReleaseEvent(event) == CL_SUCCESS);
    CHECK(clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(status), &status, NULL) == CL_INVALID_EVENT);
    CHECK(clEnqueueMarkerWithWaitList(world.a, 1, &event, NULL) == CL_INVALID_EVENT_WAIT_LIST);
    sim_world_close(&world);
}

static void releases_twice(void)
{
    SimWorld world;
    cl_mem buffer;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, 64);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_INVALID_MEM_OBJECT);
    sim_world_close(&world);
}

static void leaves_objects(void)
{
    cl_int status;
    SimWorld world;

    sim_world_open(&world);
    (void)sim_world_buffer(&world, 12345);
    (void)clCreateUserEvent(world.context, &status);
    CHECK(clRetainKernel(world.add) == CL_SUCCESS);
    sim_world_close(&world);
}

static void uses_a_mapped_buffer(void)
{
    SimWorld world;
    cl_mem buffer;
    cl_int status;
    void *map;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, 64);
    map = clEnqueueMapBuffer(world.a, buffer, CL_TRUE, CL_MAP_WRITE, 0, 64, 0, NULL, NULL, &status);
    CHECK(status == CL_SUCCESS);
    CHECK(sim_world_add(&world, world.a, buffer, 16, 1, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clEnqueueUnmapMemObject(world.a, buffer, map, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* Queues without order: a barrier orders, being next to each other does not. */
static void work_without_order(bool barrier)
{
    static cl_int host[N_INTS];
    cl_command_queue queue;
    cl_mem buffer;
    SimWorld world;

    sim_world_open(&world);
    queue = clCreateCommandQueue(world.context, world.device, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, NULL);
    CHECK(queue);
    buffer = sim_world_buffer(&world, N_BYTES);
    for (unsigned i = 0; i < N_INTS; i++)
        host[i] = (cl_int)i;
    CHECK(clEnqueueWriteBuffer(queue, buffer, CL_FALSE, 0, N_BYTES, host, 0, NULL, NULL) == CL_SUCCESS);
    if (barrier)
        CHECK(clEnqueueBarrierWithWaitList(queue, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(sim_world_add(&world, queue, buffer, N_INTS, 5, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clFinish(queue) == CL_SUCCESS);
    CHECK(clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, N_BYTES, host, 0, NULL, NULL) == CL_SUCCESS);
    for (unsigned i = 0; i < N_INTS && barrier; i++)
        CHECK(host[i] == (cl_int)i + 5);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    CHECK(clReleaseCommandQueue(queue) == CL_SUCCESS);
    sim_world_close(&world);
}

static void works_without_order_behind_a_barrier(void)
{
    work_without_order(true);
}

static void works_without_order_or_barrier(void)
{
    work_without_order(false);
}

/* A kernel of a program that comes from its binary reads a buffer while a copy reads it too. */
static void reads_beside_a_copy_down(void)
{
    static cl_int host[N_INTS];
    unsigned char *binary;
    const unsigned char *given;
    cl_program program;
    cl_mem slot, result;
    cl_kernel sum;
    SimWorld world;
    size_t size;
    cl_int n = N_INTS, status;

    sim_world_open(&world);
    CHECK(clGetProgramInfo(world.program, CL_PROGRAM_BINARY_SIZES, sizeof(size), &size, NULL) == CL_SUCCESS);
    binary = malloc(size);
    CHECK(binary && clGetProgramInfo(world.program, CL_PROGRAM_BINARIES, sizeof(binary), &binary, NULL) == CL_SUCCESS);
    given = binary;
    program = clCreateProgramWithBinary(world.context, 1, &world.device, &size, &given, NULL, &status);
    CHECK(status == CL_SUCCESS && clBuildProgram(program, 1, &world.device, "", NULL, NULL) == CL_SUCCESS);
    sum = clCreateKernel(program, "sum", &status);
    CHECK(status == CL_SUCCESS);
    slot = sim_world_buffer(&world, N_BYTES);
    result = sim_world_buffer(&world, sizeof(cl_int));
    CHECK(clSetKernelArg(sum, 0, sizeof(slot), &slot) == CL_SUCCESS && clSetKernelArg(sum, 1, sizeof(result), &result) == CL_SUCCESS);
    CHECK(clSetKernelArg(sum, 2, sizeof(n), &n) == CL_SUCCESS);
    CHECK(clEnqueueReadBuffer(world.b, slot, CL_FALSE, 0, N_BYTES, host, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clEnqueueNDRangeKernel(world.a, sum, 1, NULL, &(size_t){1}, &(size_t){1}, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS && clFinish(world.b) == CL_SUCCESS);
    CHECK(clReleaseMemObject(result) == CL_SUCCESS && clReleaseMemObject(slot) == CL_SUCCESS);
    CHECK(clReleaseKernel(sum) == CL_SUCCESS && clReleaseProgram(program) == CL_SUCCESS);
    free(binary);
    sim_world_close(&world);
}

/* A copy into a tenth of a buffer that a kernel reads. */
static void fills_a_part_beside_a_kernel(void)
{
    static char host[4096];
    cl_mem arena, result;
    SimWorld world;

    sim_world_open(&world);
    arena = sim_world_buffer(&world, 10 * sizeof(host));
    result = sim_world_buffer(&world, sizeof(cl_int));
    CHECK(clEnqueueWriteBuffer(world.b, arena, CL_FALSE, 8 * sizeof(host), sizeof(host), host, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(sim_world_sum(&world, world.a, arena, result, 1024, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS && clFinish(world.b) == CL_SUCCESS);
    CHECK(clReleaseMemObject(result) == CL_SUCCESS && clReleaseMemObject(arena) == CL_SUCCESS);
    sim_world_close(&world);
}

static const SimScenario scenarios[] = {
    {"reads_beside_a_copy_down", reads_beside_a_copy_down},
    {"fills_a_part_beside_a_kernel", fills_a_part_beside_a_kernel},
    {"goes_on_well_after_a_failure", goes_on_well_after_a_failure},
    {"reads_too_early_after_a_failure", reads_too_early_after_a_failure},
    {"frees_too_early_after_a_failure", frees_too_early_after_a_failure},
    {"streams_well", streams_well},
    {"reads_a_slot_that_is_being_filled", reads_a_slot_that_is_being_filled},
    {"fills_a_slot_that_is_being_read", fills_a_slot_that_is_being_read},
    {"orders_by_looking", orders_by_looking},
    {"copies_parts_apart", copies_parts_apart},
    {"copies_parts_that_meet", copies_parts_that_meet},
    {"sends_home_well", sends_home_well},
    {"reads_home_while_it_is_written", reads_home_while_it_is_written},
    {"keeps_host_memory", keeps_host_memory},
    {"frees_host_memory", frees_host_memory},
    {"unmaps_host_memory", unmaps_host_memory},
    {"changes_host_memory", changes_host_memory},
    {"waits_for_its_callback", waits_for_its_callback},
    {"releases_the_queue_before_the_callback", releases_the_queue_before_the_callback},
    {"uses_a_released_buffer", uses_a_released_buffer},
    {"uses_a_released_event", uses_a_released_event},
    {"releases_twice", releases_twice},
    {"leaves_objects", leaves_objects},
    {"uses_a_mapped_buffer", uses_a_mapped_buffer},
    {"works_without_order_behind_a_barrier", works_without_order_behind_a_barrier},
    {"works_without_order_or_barrier", works_without_order_or_barrier},
};

/* ---- tests --------------------------------------------------------------------------------------------------------- */

/* 20 MB/s: a copy of a MiB takes 50 ms. */
#define CHECKED "CLSIM_CHECK=all CLSIM_MISUSE=99 CLSIM_LINK_RATE=20000000"

static void sim_buffer_read_while_a_copy_into_it_is_in_flight(void **state)
{
    (void)state;
    sim_rig_run_well("streams_well", CHECKED);
    sim_rig_run_to("reads_a_slot_that_is_being_filled", CHECKED, 99,
                   "race: clEnqueueNDRangeKernel #1 sum reads buffer|while clEnqueueWriteBuffer #1 writes it");
    /* No matter who makes the copies, and whether they meet in this run. */
    sim_rig_run_well("streams_well", CHECKED " CLSIM_UNIFIED=1");
    sim_rig_run_to("reads_a_slot_that_is_being_filled", CHECKED " CLSIM_UNIFIED=1", 99, "race: clEnqueueNDRangeKernel #1 sum reads");
}

static void sim_buffer_written_while_it_is_read(void **state)
{
    (void)state;
    sim_rig_run_to("fills_a_slot_that_is_being_read", CHECKED, 99,
                   "race: clEnqueueWriteBuffer #2 writes buffer|while clEnqueueNDRangeKernel #1 sum reads it");
}

static void sim_what_the_host_has_seen_complete_is_over(void **state)
{
    (void)state;
    sim_rig_run_well("orders_by_looking", CHECKED);
    sim_rig_run_well("orders_by_looking", CHECKED " CLSIM_UNIFIED=1");
}

static void sim_parts_of_a_buffer_meet_by_the_byte(void **state)
{
    (void)state;
    sim_rig_run_well("copies_parts_apart", CHECKED);
    sim_rig_run_to("copies_parts_that_meet", CHECKED, 99, "bytes 2047 to 2047 while clEnqueueWriteBuffer #1 writes it");
}

static void sim_host_memory_read_while_a_copy_writes_it(void **state)
{
    (void)state;
    sim_rig_run_well("sends_home_well", CHECKED);
    sim_rig_run_to("reads_home_while_it_is_written", CHECKED, 99, "race: clEnqueueWriteBuffer #1 reads host memory");
}

static void sim_host_memory_given_back_or_changed_while_in_use(void **state)
{
    (void)state;
    sim_rig_run_to("unmaps_host_memory", CHECKED, 99, "host-freed: host memory of clEnqueueWriteBuffer #2 was unmapped");
    sim_rig_run_to("changes_host_memory", CHECKED " CLSIM_CHECK=content", 99,
                   "host-changed: host memory that clEnqueueWriteBuffer #2 reads");
    sim_rig_run_well("keeps_host_memory", CHECKED " CLSIM_CHECK=all,content");
#ifndef __SANITIZE_ADDRESS__ /* whose free() must be the first */
    sim_rig_run_well("keeps_host_memory", CHECKED " LD_PRELOAD=layer");
    sim_rig_run_to("frees_host_memory", CHECKED " LD_PRELOAD=layer", 99,
                   "host-freed: free() of host memory that clEnqueueWriteBuffer #1 reads");
    sim_rig_run_to("unmaps_host_memory", CHECKED " LD_PRELOAD=layer", 99,
                   "host-freed: munmap() of host memory that clEnqueueWriteBuffer #2 reads");
#endif
}

static void sim_callback_on_a_dead_queue(void **state)
{
    (void)state;
    sim_rig_run_well("waits_for_its_callback", CHECKED);
    sim_rig_run_to("releases_the_queue_before_the_callback", CHECKED, 99, "dead-queue: the callback of clEnqueueWriteBuffer #1");
}

static void sim_use_after_release(void **state)
{
    (void)state;
    sim_rig_run_to("uses_a_released_buffer", CHECKED, 99,
                   "use-after-release: clEnqueueReadBuffer #1 uses a buffer|clEnqueueNDRangeKernel #2 add: argument 0 is a buffer");
    sim_rig_run_to("uses_a_released_event", CHECKED, 99,
                   "use-after-release: clGetEventInfo #1 uses an event|use-after-release: clEnqueueMarkerWithWaitList #2");
    sim_rig_run_to("releases_twice", CHECKED, 99, "over-release: clReleaseMemObject #2 releases a buffer");
}

static void sim_objects_left_at_exit(void **state)
{
    (void)state;
    sim_rig_run_to("leaves_objects", CHECKED, 99,
                   "(12345 bytes) of clCreateBuffer #1 is left|event of clCreateUserEvent #1 is left|kernel of clCreateKernel #1 is left");
}

static void sim_mapped_buffer_used_by_a_kernel(void **state)
{
    (void)state;
    sim_rig_run_to("uses_a_mapped_buffer", CHECKED, 99, "map: clEnqueueNDRangeKernel #1 add: argument 0 is a buffer that is mapped");
}

static void sim_queues_without_order(void **state)
{
    (void)state;
    sim_rig_run_well("works_without_order_behind_a_barrier", CHECKED);
    sim_rig_run_to("works_without_order_or_barrier", CHECKED, 99, "race: clEnqueueNDRangeKernel #1 add writes buffer");
}

static void sim_arguments_of_binaries_are_remembered(void **state)
{
    char folder[] = "/tmp/test-sim-XXXXXX", settings[256];

    (void)state;
    sim_rig_run_to("reads_beside_a_copy_down", CHECKED, 99, "race: clEnqueueNDRangeKernel #1 sum writes buffer");
    assert_non_null(mkdtemp(folder));
    (void)snprintf(settings, sizeof(settings), CHECKED " CLSIM_ARGUMENTS=%s", folder);
    sim_rig_run_well("reads_beside_a_copy_down", settings);
    (void)snprintf(settings, sizeof(settings), "rm -r %s", folder);
    assert_int_equal(system(settings), 0);
}

static void sim_parts_may_be_taken_as_apart(void **state)
{
    (void)state;
    sim_rig_run_to("fills_a_part_beside_a_kernel", CHECKED, 99, "race: clEnqueueNDRangeKernel #1 sum reads buffer");
    sim_rig_run_to("fills_a_part_beside_a_kernel", CHECKED " CLSIM_PART=10", 99, "race: clEnqueueNDRangeKernel #1 sum reads buffer");
    sim_rig_run_well("fills_a_part_beside_a_kernel", CHECKED " CLSIM_PART=9");
}

static void sim_settings_come_from_a_file_and_counts_go_to_one(void **state)
{
    char config[] = "/tmp/test-sim-XXXXXX", counts[] = "/tmp/test-sim-XXXXXX", settings[256], text[4096] = "";
    int config_fd = mkstemp(config), counts_fd = mkstemp(counts);
    ssize_t n;

    (void)state;
    assert_true(config_fd >= 0 && counts_fd >= 0);
    assert_true(dprintf(config_fd, "# settings\n\ncheck = release\n misuse= 55\ncounts = %s\n", counts) > 0);
    (void)snprintf(settings, sizeof(settings), "CLSIM_CONFIG=%s", config);
    sim_rig_run_to("releases_twice", settings, 55, "over-release");
    (void)snprintf(settings, sizeof(settings), "CLSIM_CONFIG=%s CLSIM_MISUSE=report", config);
    sim_rig_run_to("releases_twice", settings, EXIT_SUCCESS, "over-release");
    n = read(counts_fd, text, sizeof(text) - 1);
    (void)close(config_fd);
    (void)close(counts_fd);
    (void)unlink(config);
    (void)unlink(counts);
    assert_true(n > 0 && strstr(text, "clReleaseMemObject 2\n") && strstr(text, "clCreateBuffer 1\n"));
}

static void sim_misuse_can_abort_and_go_to_a_file(void **state)
{
    char path[] = "/tmp/test-sim-XXXXXX", settings[256], text[256] = "";
    int fd = mkstemp(path);
    ssize_t n;

    (void)state;
    assert_true(fd >= 0);
    sim_rig_run_to("releases_twice", "CLSIM_CHECK=release CLSIM_MISUSE=abort", 128 + 6, "over-release");
    (void)snprintf(settings, sizeof(settings), "CLSIM_CHECK=release CLSIM_LOG=%s", path);
    sim_rig_run_to("releases_twice", settings, EXIT_SUCCESS, "");
    n = read(fd, text, sizeof(text) - 1);
    (void)close(fd);
    (void)unlink(path);
    assert_true(n > 0 && strstr(text, "over-release"));
}

static void sim_misuse_behind_a_failed_command_is_found(void **state)
{
    (void)state;
#ifndef __SANITIZE_ADDRESS__ /* whose free() must be the first */
    sim_rig_run_well("goes_on_well_after_a_failure", CHECKED " LD_PRELOAD=layer");
    sim_rig_run_to("frees_too_early_after_a_failure", CHECKED " LD_PRELOAD=layer", 99, "host-freed: free() of host memory that clEnqueueWriteBuffer #2 reads");
#endif
    sim_rig_run_well("goes_on_well_after_a_failure", CHECKED);
    sim_rig_run_to("reads_too_early_after_a_failure", CHECKED, 99, "race: clEnqueueNDRangeKernel #1 sum reads");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sim_misuse_behind_a_failed_command_is_found),
        cmocka_unit_test(sim_buffer_read_while_a_copy_into_it_is_in_flight),
        cmocka_unit_test(sim_buffer_written_while_it_is_read),
        cmocka_unit_test(sim_what_the_host_has_seen_complete_is_over),
        cmocka_unit_test(sim_parts_of_a_buffer_meet_by_the_byte),
        cmocka_unit_test(sim_host_memory_read_while_a_copy_writes_it),
        cmocka_unit_test(sim_host_memory_given_back_or_changed_while_in_use),
        cmocka_unit_test(sim_callback_on_a_dead_queue),
        cmocka_unit_test(sim_use_after_release),
        cmocka_unit_test(sim_objects_left_at_exit),
        cmocka_unit_test(sim_mapped_buffer_used_by_a_kernel),
        cmocka_unit_test(sim_queues_without_order),
        cmocka_unit_test(sim_arguments_of_binaries_are_remembered),
        cmocka_unit_test(sim_parts_may_be_taken_as_apart),
        cmocka_unit_test(sim_settings_come_from_a_file_and_counts_go_to_one),
        cmocka_unit_test(sim_misuse_can_abort_and_go_to_a_file),
    };

    if (sim_rig_is_scenario(argc, argv, scenarios, sizeof(scenarios) / sizeof(*scenarios)))
        return EXIT_SUCCESS;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
