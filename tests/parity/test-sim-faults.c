/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated small GPU: the n-th call fails, hangs, or loses the device; commands that were accepted fail or do not end. */

#include "tests/lib/sim-rig.h"
#include "tests/sim/clsim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- scenarios ----------------------------------------------------------------------------------------------------- */

static void set_faults(const SimWorld *world, const char *text)
{
    clsim_set_faults_fn set;

    *(void **)&set = clGetExtensionFunctionAddressForPlatform(world->platform, "clsimSetFaults");
    CHECK(set && set(text) == CL_SUCCESS);
}

static cl_int create(const SimWorld *world)
{
    cl_int status = 1;
    cl_mem buffer = clCreateBuffer(world->context, CL_MEM_READ_WRITE, 64, NULL, &status);

    CHECK((buffer != NULL) == (status == CL_SUCCESS));
    CHECK(!buffer || clReleaseMemObject(buffer) == CL_SUCCESS);
    return status;
}

/* CLSIM_FAULT: the second buffer, and every flush from the third on. */
static void named_calls_fail(void)
{
    SimWorld world;

    sim_world_open(&world);
    CHECK(create(&world) == CL_SUCCESS);
    CHECK(create(&world) == CL_MEM_OBJECT_ALLOCATION_FAILURE);
    CHECK(create(&world) == CL_SUCCESS);
    for (unsigned i = 1; i < 6; i++)
        CHECK(clFlush(world.a) == (i < 3 ? CL_SUCCESS : CL_INVALID_COMMAND_QUEUE));
    sim_world_close(&world);
}

static void any_call_fails(void)
{
    clsim_count_calls_fn count;
    clsim_set_faults_fn set;
    SimWorld world;

    sim_world_open(&world);
    *(void **)&count = clGetExtensionFunctionAddressForPlatform(world.platform, "clsimCountCalls");
    *(void **)&set = clGetExtensionFunctionAddressForPlatform(world.platform, "clsimSetFaults");
    set_faults(&world, "any:3:CL_OUT_OF_HOST_MEMORY");
    CHECK(clFlush(world.a) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS);
    CHECK(clFlush(world.b) == CL_OUT_OF_HOST_MEMORY);
    CHECK(clFlush(world.b) == CL_SUCCESS);
    CHECK(count("any") == 4 && count("clFlush") == 3 && count("clFinish") == 1 && count("clNoSuchFunction") == 0);
    CHECK(set("clFlush:0:-5") == CL_INVALID_VALUE && set("clFlush:1:NO_SUCH_CODE") == CL_INVALID_VALUE);
    CHECK(set("clNoSuchFunction:1:-5") == CL_INVALID_VALUE && set("clFlush:1:5") == CL_INVALID_VALUE);
    CHECK(count("any") == 4);
    set_faults(&world, "clFlush:2:-6;clFinish:1:OUT_OF_RESOURCES");
    CHECK(clFlush(world.a) == CL_SUCCESS && clFinish(world.a) == CL_OUT_OF_RESOURCES && clFlush(world.a) == CL_OUT_OF_HOST_MEMORY);
    set_faults(&world, NULL);
    CHECK(clFlush(world.a) == CL_SUCCESS);
    sim_world_close(&world);
}

static void a_call_hangs_for_a_time(void)
{
    SimWorld world;
    double begin;

    sim_world_open(&world);
    set_faults(&world, "clFinish:1:hang=200");
    begin = sim_now();
    CHECK(clFinish(world.a) == CL_SUCCESS && sim_now() - begin >= 0.2);
    sim_world_close(&world);
}

static void a_call_hangs(void)
{
    SimWorld world;

    sim_world_open(&world);
    set_faults(&world, "clFinish:1:hang");
    (void)alarm(2);
    (void)clFinish(world.a);
    CHECK(false);
}

static volatile cl_int called_with = 1;

static void CL_CALLBACK called(cl_event event, cl_int status, void *userdata)
{
    (void)event;
    *(volatile cl_int *)userdata = status;
}

/* A copy is under way, a kernel and a callback wait for it, then the device is lost: all of them end, with an error. */
static void device_is_lost(void)
{
    static char host[1u << 20];
    cl_event copied, summed;
    cl_mem buffer, out;
    SimWorld world;
    cl_uint n;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, sizeof(host));
    out = sim_world_buffer(&world, 4);
    CHECK(clEnqueueWriteBuffer(world.b, buffer, CL_FALSE, 0, sizeof(host), host, 0, NULL, &copied) == CL_SUCCESS);
    CHECK(sim_world_sum(&world, world.a, buffer, out, 16, 1, &copied, &summed) == CL_SUCCESS);
    CHECK(clSetEventCallback(summed, CL_COMPLETE, called, (void *)(uintptr_t)&called_with) == CL_SUCCESS);
    CHECK(clFlush(world.a) == CL_SUCCESS);
    set_faults(&world, "clFlush:1:lost=CL_DEVICE_NOT_AVAILABLE");
    CHECK(clFlush(world.b) == CL_DEVICE_NOT_AVAILABLE);
    for (unsigned i = 0; i < 20000 && called_with == 1; i++)
        (void)usleep(1000);
    CHECK(called_with < 0);
    CHECK(clFinish(world.a) == CL_DEVICE_NOT_AVAILABLE && create(&world) == CL_DEVICE_NOT_AVAILABLE);
    CHECK(clGetPlatformIDs(1, NULL, &n) == CL_DEVICE_NOT_AVAILABLE);
    CHECK(clWaitForEvents(1, &copied) == CL_DEVICE_NOT_AVAILABLE);
    CHECK(clReleaseEvent(summed) == CL_SUCCESS && clReleaseEvent(copied) == CL_SUCCESS);
    CHECK(clReleaseMemObject(out) == CL_SUCCESS && clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

static void device_is_reset(void)
{
    SimWorld old, new;

    sim_world_open(&old);
    set_faults(&old, "clFinish:1:reset");
    CHECK(clFinish(old.a) == CL_OUT_OF_RESOURCES);
    CHECK(create(&old) == CL_OUT_OF_RESOURCES && clFlush(old.b) == CL_OUT_OF_RESOURCES);
    sim_world_open(&new);
    CHECK(create(&new) == CL_SUCCESS && clFinish(new.a) == CL_SUCCESS);
    sim_world_close(&new);
    sim_world_close(&old);
}

/* Accepted, then failed: who waits for its event fails, what only stands behind it runs. */
static void commands_fail_later(void)
{
    static cl_int host[256];
    cl_event copied, added, summed;
    cl_mem buffer, other, out;
    SimWorld world;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, sizeof(host));
    other = sim_world_buffer(&world, sizeof(host));
    out = sim_world_buffer(&world, 4);
    set_faults(&world, "clEnqueueWriteBuffer:1:event=CL_OUT_OF_RESOURCES;clEnqueueNDRangeKernel:3:event=CL_OUT_OF_HOST_MEMORY");
    CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_FALSE, 0, sizeof(host), host, 0, NULL, &copied) == CL_SUCCESS);
    CHECK(sim_world_add(&world, world.a, buffer, 256, 1, 0, NULL, &added) == CL_SUCCESS);
    CHECK(sim_world_sum(&world, world.b, other, out, 256, 1, &copied, &summed) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS);
    (void)clFinish(world.b);
    CHECK(sim_event_status(copied) == CL_OUT_OF_RESOURCES);
    CHECK(sim_event_status(added) == CL_COMPLETE);
    CHECK(sim_event_status(summed) < 0);
    CHECK(clWaitForEvents(1, &copied) == CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST);
    CHECK(clReleaseEvent(summed) == CL_SUCCESS && clReleaseEvent(added) == CL_SUCCESS && clReleaseEvent(copied) == CL_SUCCESS);
    CHECK(sim_world_add(&world, world.a, buffer, 256, 1, 0, NULL, &added) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS && sim_event_status(added) == CL_OUT_OF_HOST_MEMORY);
    CHECK(clReleaseEvent(added) == CL_SUCCESS && clReleaseMemObject(other) == CL_SUCCESS);
    CHECK(clReleaseMemObject(out) == CL_SUCCESS && clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

static void commands_do_not_end(void)
{
    static cl_int host[256];
    cl_event late, added, never;
    SimWorld world;
    double begin;
    cl_mem buffer;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, sizeof(host));
    set_faults(&world, "clEnqueueReadBuffer:1:stall=300;clEnqueueNDRangeKernel:2:stall");
    begin = sim_now();
    CHECK(clEnqueueReadBuffer(world.a, buffer, CL_FALSE, 0, sizeof(host), host, 0, NULL, &late) == CL_SUCCESS);
    CHECK(sim_world_add(&world, world.a, buffer, 256, 1, 0, NULL, &added) == CL_SUCCESS);
    CHECK(clFlush(world.a) == CL_SUCCESS && sim_event_status(added) > CL_COMPLETE);
    CHECK(clWaitForEvents(1, &added) == CL_SUCCESS && sim_now() - begin >= 0.3 && sim_event_status(late) == CL_COMPLETE);
    CHECK(sim_world_add(&world, world.a, buffer, 256, 1, 0, NULL, &never) == CL_SUCCESS);
    CHECK(clFlush(world.a) == CL_SUCCESS);
    (void)usleep(300000);
    CHECK(sim_event_status(never) > CL_COMPLETE);
    CHECK(clReleaseEvent(never) == CL_SUCCESS && clReleaseEvent(added) == CL_SUCCESS && clReleaseEvent(late) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* Copies that do not end keep their queue and who waits for them; others have the link, both ways.  Losing the device ends them. */
static void copies_stall_beside_the_link(void)
{
    static cl_int host[4096], back[4096], lost[4096];
    cl_event up, down, behind;
    cl_command_queue queue;
    cl_mem buffer, other;
    SimWorld world;

    sim_world_open(&world);
    queue = clCreateCommandQueue(world.context, world.device, 0, NULL);
    buffer = sim_world_buffer(&world, sizeof(host));
    other = sim_world_buffer(&world, sizeof(host));
    set_faults(&world, "clEnqueueWriteBuffer:1:stall;clEnqueueReadBuffer:1:stall");
    CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_FALSE, 0, sizeof(host), host, 0, NULL, &up) == CL_SUCCESS);
    CHECK(sim_world_add(&world, world.a, buffer, 4096, 1, 0, NULL, &behind) == CL_SUCCESS && clFlush(world.a) == CL_SUCCESS);
    CHECK(clSetEventCallback(behind, CL_COMPLETE, called, (void *)(uintptr_t)&called_with) == CL_SUCCESS);
    for (cl_int i = 0; i < 3; i++) {
        CHECK(clEnqueueWriteBuffer(world.b, other, CL_FALSE, 0, sizeof(host), host, 0, NULL, NULL) == CL_SUCCESS);
        CHECK(sim_world_add(&world, world.b, other, 4096, i, 0, NULL, NULL) == CL_SUCCESS && clFinish(world.b) == CL_SUCCESS);
    }
    CHECK(clEnqueueReadBuffer(queue, buffer, CL_FALSE, 0, sizeof(lost), lost, 0, NULL, &down) == CL_SUCCESS && clFlush(queue) == CL_SUCCESS);
    CHECK(clEnqueueReadBuffer(world.b, other, CL_TRUE, 0, sizeof(back), back, 0, NULL, NULL) == CL_SUCCESS && back[4095] == 2);
    CHECK(sim_event_status(up) > CL_COMPLETE && sim_event_status(behind) > CL_COMPLETE && sim_event_status(down) > CL_COMPLETE);
    set_faults(&world, "clFlush:1:reset");
    CHECK(clFlush(world.b) == CL_OUT_OF_RESOURCES);
    for (unsigned i = 0; i < 20000 && called_with == 1; i++)
        (void)usleep(1000);
    CHECK(called_with <= CL_COMPLETE);
    CHECK(clReleaseEvent(down) == CL_SUCCESS && clReleaseEvent(behind) == CL_SUCCESS && clReleaseEvent(up) == CL_SUCCESS);
    CHECK(clReleaseMemObject(other) == CL_SUCCESS && clReleaseMemObject(buffer) == CL_SUCCESS && clReleaseCommandQueue(queue) == CL_SUCCESS);
    sim_world_close(&world);
}

/* ---- every call ---------------------------------------------------------------------------------------------------- */

/* What a careful program holds; everything is given back whatever has failed, once more where giving back failed. */
typedef struct Work {
    cl_mem buffer;
    cl_event copied, added;
    cl_int *map, sum;
} Work;

#define GIVE_BACK(call) ((call) == CL_SUCCESS || (call) == CL_SUCCESS)

static cl_int work_map(const SimWorld *world, Work *work)
{
    cl_int status = CL_SUCCESS, again;

    work->map = clEnqueueMapBuffer(world->a, work->buffer, CL_TRUE, CL_MAP_READ, 0, 1024, 0, NULL, NULL, &status);
    if (status != CL_SUCCESS)
        return status;
    work->sum = work->map[0] + work->map[255];
    status = clEnqueueUnmapMemObject(world->a, work->buffer, work->map, 0, NULL, NULL);
    again = status == CL_SUCCESS ? status : clEnqueueUnmapMemObject(world->a, work->buffer, work->map, 0, NULL, NULL);
    CHECK(again == CL_SUCCESS);
    return status;
}

static cl_int work_run(const SimWorld *world, Work *work)
{
    static cl_int host[256];
    cl_int status = CL_SUCCESS, value = 4;

    for (cl_int i = 0; i < 256; i++)
        host[i] = i;
    work->buffer = clCreateBuffer(world->context, CL_MEM_READ_WRITE, sizeof(host), NULL, &status);
    if (status == CL_SUCCESS)
        status = clEnqueueWriteBuffer(world->b, work->buffer, CL_FALSE, 0, sizeof(host), host, 0, NULL, &work->copied);
    if (status == CL_SUCCESS)
        status = clFlush(world->b);
    if (status == CL_SUCCESS)
        status = clSetKernelArg(world->add, 0, sizeof(work->buffer), &work->buffer);
    if (status == CL_SUCCESS)
        status = clSetKernelArg(world->add, 1, sizeof(value), &value);
    if (status == CL_SUCCESS)
        status = clEnqueueNDRangeKernel(world->a, world->add, 1, NULL, &(size_t){256}, &(size_t){1}, 1, &work->copied, &work->added);
    if (status == CL_SUCCESS)
        status = clWaitForEvents(1, &work->added);
    return status == CL_SUCCESS ? work_map(world, work) : status;
}

static void work_end(const SimWorld *world, Work *work)
{
    CHECK(GIVE_BACK(clFinish(world->b)) && GIVE_BACK(clFinish(world->a)));
    CHECK(!work->added || GIVE_BACK(clReleaseEvent(work->added)));
    CHECK(!work->copied || GIVE_BACK(clReleaseEvent(work->copied)));
    CHECK(!work->buffer || GIVE_BACK(clReleaseMemObject(work->buffer)));
}

/* Each call of a small program fails once, in each way; it never ends with a wrong number, and nothing is left. */
static void every_call_fails_once(void)
{
    static const char *const ways[] = {"CL_OUT_OF_RESOURCES", "CL_MEM_OBJECT_ALLOCATION_FAILURE", "event=CL_OUT_OF_RESOURCES"};
    clsim_count_calls_fn count;
    clsim_set_faults_fn set;
    SimWorld world;

    sim_world_open(&world);
    *(void **)&count = clGetExtensionFunctionAddressForPlatform(world.platform, "clsimCountCalls");
    *(void **)&set = clGetExtensionFunctionAddressForPlatform(world.platform, "clsimSetFaults");
    for (size_t way = 0; way < 3; way++) {
        unsigned n_failed = 0;

        for (unsigned n = 1; n == 1 || count("any") + 1 >= n; n++) {
            Work work = {.buffer = NULL};
            char text[64];
            cl_int status;

            (void)snprintf(text, sizeof(text), "any:%u:%s", n, ways[way]);
            CHECK(set(text) == CL_SUCCESS);
            status = work_run(&world, &work);
            CHECK(status != CL_SUCCESS || work.sum == 4 + 255 + 4);
            n_failed += status != CL_SUCCESS;
            work_end(&world, &work);
        }
        CHECK(n_failed >= (way < 2 ? 9 : 2));
    }
    CHECK(set(NULL) == CL_SUCCESS);
    sim_world_close(&world);
}

static const SimScenario scenarios[] = {
    {"named_calls_fail", named_calls_fail},
    {"any_call_fails", any_call_fails},
    {"a_call_hangs_for_a_time", a_call_hangs_for_a_time},
    {"a_call_hangs", a_call_hangs},
    {"device_is_lost", device_is_lost},
    {"device_is_reset", device_is_reset},
    {"commands_fail_later", commands_fail_later},
    {"commands_do_not_end", commands_do_not_end},
    {"copies_stall_beside_the_link", copies_stall_beside_the_link},
    {"every_call_fails_once", every_call_fails_once},
};

/* ---- tests --------------------------------------------------------------------------------------------------------- */

#define CHECKED "CLSIM_CHECK=all CLSIM_MISUSE=99"
#define UNIFIED CHECKED " CLSIM_UNIFIED=1"

static void sim_the_nth_call_of_a_function_fails(void **state)
{
    const char *faults = " CLSIM_FAULT=clCreateBuffer:2:CL_MEM_OBJECT_ALLOCATION_FAILURE;clFlush:3+:CL_INVALID_COMMAND_QUEUE";
    char settings[256];

    (void)state;
    (void)snprintf(settings, sizeof(settings), CHECKED "%s", faults);
    sim_rig_run_well("named_calls_fail", settings);
    (void)snprintf(settings, sizeof(settings), UNIFIED "%s", faults);
    sim_rig_run_well("named_calls_fail", settings);
    sim_rig_run_to("named_calls_fail", "CLSIM_FAULT=clCreateBuffer:2", 2, "CLSIM_FAULT");
}

static void sim_the_nth_call_of_any_function_fails(void **state)
{
    (void)state;
    sim_rig_run_well("any_call_fails", CHECKED);
}

static void sim_calls_hang(void **state)
{
    (void)state;
    sim_rig_run_well("a_call_hangs_for_a_time", CHECKED);
    sim_rig_run_to("a_call_hangs", CHECKED, 128 + 14, "");
}

static void sim_a_lost_device_fails_everything_and_lets_go(void **state)
{
    (void)state;
    sim_rig_run_well("device_is_lost", CHECKED " CLSIM_LINK_RATE=100000");
}

static void sim_a_reset_device_can_be_opened_again(void **state)
{
    (void)state;
    sim_rig_run_well("device_is_reset", CHECKED);
    sim_rig_run_well("device_is_reset", UNIFIED);
}

static void sim_accepted_commands_fail(void **state)
{
    (void)state;
    sim_rig_run_well("commands_fail_later", CHECKED);
    sim_rig_run_well("commands_fail_later", UNIFIED);
}

static void sim_accepted_commands_do_not_end(void **state)
{
    (void)state;
    sim_rig_run_well("commands_do_not_end", CHECKED);
    sim_rig_run_well("commands_do_not_end", UNIFIED);
}

#define STALLED "CLSIM_CHECK=host,callback,release,leak,map CLSIM_MISUSE=99 ASAN_OPTIONS=use_sigaltstack=0:detect_leaks=0"

static void sim_a_copy_that_does_not_end_leaves_the_link_to_others(void **state)
{
    (void)state;
    /* What has not been seen to end may be in use for ever, and what the driver keeps for it is never given back. */
    sim_rig_run_well("copies_stall_beside_the_link", STALLED);
    sim_rig_run_well("copies_stall_beside_the_link", STALLED " CLSIM_ENGINES=1");
}

static void sim_every_call_of_a_program_fails_once(void **state)
{
    (void)state;
    sim_rig_run_well("every_call_fails_once", CHECKED);
    sim_rig_run_well("every_call_fails_once", UNIFIED);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sim_the_nth_call_of_a_function_fails),
        cmocka_unit_test(sim_the_nth_call_of_any_function_fails),
        cmocka_unit_test(sim_calls_hang),
        cmocka_unit_test(sim_a_lost_device_fails_everything_and_lets_go),
        cmocka_unit_test(sim_a_reset_device_can_be_opened_again),
        cmocka_unit_test(sim_accepted_commands_fail),
        cmocka_unit_test(sim_accepted_commands_do_not_end),
        cmocka_unit_test(sim_a_copy_that_does_not_end_leaves_the_link_to_others),
        cmocka_unit_test(sim_every_call_of_a_program_fails_once),
    };

    if (sim_rig_is_scenario(argc, argv, scenarios, sizeof(scenarios) / sizeof(*scenarios)))
        return EXIT_SUCCESS;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
