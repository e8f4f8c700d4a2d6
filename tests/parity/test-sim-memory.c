/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated small GPU: what it says of itself, how much memory it has, and that the host reaches it through the interface only. */

#include "tests/lib/sim-rig.h"
#include "tests/sim/clsim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MIB (1024 * 1024)

/* ---- scenarios ----------------------------------------------------------------------------------------------------- */

static cl_ulong ask(cl_device_id device, cl_device_info what)
{
    cl_ulong answer = 0;

    CHECK(clGetDeviceInfo(device, what, sizeof(answer), &answer, NULL) == CL_SUCCESS);
    return answer;
}

static cl_bool ask_bool(cl_device_id device, cl_device_info what)
{
    cl_bool answer = 7;

    CHECK(clGetDeviceInfo(device, what, sizeof(answer), &answer, NULL) == CL_SUCCESS);
    return answer;
}

static void says_what_was_set(void)
{
    char extensions[4096];
    cl_device_id device = NULL;
    SimWorld world;

    sim_world_open(&world);
    CHECK(ask(world.device, CL_DEVICE_GLOBAL_MEM_SIZE) == 64 * MIB);
    CHECK(ask(world.device, CL_DEVICE_MAX_MEM_ALLOC_SIZE) == 16 * MIB);
    CHECK(ask(world.device, CL_DEVICE_TYPE) == CL_DEVICE_TYPE_GPU);
    CHECK(ask_bool(world.device, CL_DEVICE_HOST_UNIFIED_MEMORY) == CL_FALSE);
    CHECK(ask_bool(world.device, CL_DEVICE_IMAGE_SUPPORT) == CL_FALSE);
    CHECK(clGetDeviceInfo(world.device, CL_DEVICE_EXTENSIONS, sizeof(extensions), extensions, NULL) == CL_SUCCESS);
    CHECK(strstr(extensions, "cl_khr_byte_addressable_store") && !strstr(extensions, "command_buffer"));
    CHECK(clGetDeviceIDs(world.platform, CL_DEVICE_TYPE_GPU, 1, &device, NULL) == CL_SUCCESS && device == world.device);
    CHECK(clGetDeviceIDs(world.platform, CL_DEVICE_TYPE_CPU, 1, &device, NULL) == CL_DEVICE_NOT_FOUND);
    sim_world_close(&world);
}

static cl_int create(const SimWorld *world, size_t bytes, cl_mem *ret)
{
    cl_int status = 1;

    *ret = clCreateBuffer(world->context, CL_MEM_READ_WRITE, bytes, NULL, &status);
    CHECK((*ret != NULL) == (status == CL_SUCCESS));
    return status;
}

static void refuses_beyond_its_memory(void)
{
    cl_mem buffers[4], more;
    SimWorld world;

    sim_world_open(&world);
    CHECK(create(&world, 0, &more) == CL_INVALID_BUFFER_SIZE);
    CHECK(create(&world, 16 * MIB + 1, &more) == CL_INVALID_BUFFER_SIZE);
    for (size_t i = 0; i < 4; i++)
        CHECK(create(&world, 15 * MIB, &buffers[i]) == CL_SUCCESS);
    CHECK(ask(world.device, CLSIM_DEVICE_MEMORY_IN_USE) == 60 * MIB);
    CHECK(create(&world, 4 * MIB + 1, &more) == CL_MEM_OBJECT_ALLOCATION_FAILURE);
    CHECK(create(&world, 4 * MIB, &more) == CL_SUCCESS);
    CHECK(clReleaseMemObject(more) == CL_SUCCESS);
    for (size_t i = 0; i < 4; i++)
        CHECK(clReleaseMemObject(buffers[i]) == CL_SUCCESS);
    CHECK(ask(world.device, CLSIM_DEVICE_MEMORY_IN_USE) == 0);
    CHECK(create(&world, 16 * MIB, &more) == CL_SUCCESS);
    CHECK(clReleaseMemObject(more) == CL_SUCCESS);
    sim_world_close(&world);
}

/* Released while a kernel works on it: its memory comes back when the kernel is done. */
static void keeps_memory_that_a_kernel_uses(void)
{
    SimWorld world;
    cl_event done;
    cl_mem buffer;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, 16 * MIB);
    CHECK(sim_world_spin(&world, world.a, buffer, sim_world_rounds(&world, 0.3), &done) == CL_SUCCESS);
    CHECK(clFlush(world.a) == CL_SUCCESS);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    if (sim_event_status(done) > CL_COMPLETE)
        CHECK(ask(world.device, CLSIM_DEVICE_MEMORY_IN_USE) == 16 * MIB);
    CHECK(clFinish(world.a) == CL_SUCCESS);
    CHECK(clReleaseEvent(done) == CL_SUCCESS);
    for (unsigned i = 0; i < 1000 && ask(world.device, CLSIM_DEVICE_MEMORY_IN_USE) > 0; i++)
        CHECK(clFinish(world.a) == CL_SUCCESS);
    sim_world_close(&world);
}

static cl_int first_of(const SimWorld *world, cl_mem buffer)
{
    cl_int value = -1;

    CHECK(clEnqueueReadBuffer(world->a, buffer, CL_TRUE, 0, sizeof(value), &value, 0, NULL, NULL) == CL_SUCCESS);
    return value;
}

/* The host's pointer is copied when the buffer is made, when it is mapped and when it is unmapped; at no other time. */
static void host_pointers_are_copied(void)
{
    static cl_int host[1024];
    void *asked = NULL;
    SimWorld world;
    cl_int status, *map;
    cl_mem buffer;

    sim_world_open(&world);
    host[0] = 5;
    buffer = clCreateBuffer(world.context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, sizeof(host), host, &status);
    CHECK(status == CL_SUCCESS && first_of(&world, buffer) == 5);
    CHECK(clGetMemObjectInfo(buffer, CL_MEM_HOST_PTR, sizeof(asked), &asked, NULL) == CL_SUCCESS && asked == host);
    host[0] = 6;
    CHECK(first_of(&world, buffer) == 5);
    CHECK(sim_world_add(&world, world.a, buffer, 1024, 10, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clFinish(world.a) == CL_SUCCESS && host[0] == 6);
    map = clEnqueueMapBuffer(world.a, buffer, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0, sizeof(host), 0, NULL, NULL, &status);
    CHECK(status == CL_SUCCESS && map == host && host[0] == 15);
    map[0] = 100;
    CHECK(clEnqueueUnmapMemObject(world.a, buffer, map, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(first_of(&world, buffer) == 100);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* A plain buffer's map is a copy as well; one that was not written is not copied back. */
static void maps_are_copies(void)
{
    SimWorld world;
    cl_int status, *map, value = 3;
    cl_mem buffer;

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, 4096);
    CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_TRUE, 0, sizeof(value), &value, 0, NULL, NULL) == CL_SUCCESS);
    map = clEnqueueMapBuffer(world.a, buffer, CL_TRUE, CL_MAP_READ, 0, 4096, 0, NULL, NULL, &status);
    CHECK(status == CL_SUCCESS && map[0] == 3);
    map[0] = 9;
    CHECK(clEnqueueUnmapMemObject(world.a, buffer, map, 0, NULL, NULL) == CL_SUCCESS && first_of(&world, buffer) == 3);
    map = clEnqueueMapBuffer(world.a, buffer, CL_TRUE, CL_MAP_WRITE_INVALIDATE_REGION, 0, 4, 0, NULL, NULL, &status);
    CHECK(status == CL_SUCCESS);
    map[0] = 11;
    CHECK(first_of(&world, buffer) == 3);
    CHECK(clEnqueueUnmapMemObject(world.a, buffer, map, 0, NULL, NULL) == CL_SUCCESS && first_of(&world, buffer) == 11);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

#define SIDE 16

/* The byte that a rectangle copy must put at (x, y, z), or 0xee outside of it. */
static unsigned char expected(size_t x, size_t y, size_t z, const size_t to[3], const size_t from[3], const size_t region[3])
{
    if (x < to[0] || x >= to[0] + region[0] || y < to[1] || y >= to[1] + region[1] || z < to[2] || z >= to[2] + region[2])
        return 0xee;
    return (unsigned char)((x - to[0] + from[0]) + 3 * (y - to[1] + from[1]) + 7 * (z - to[2] + from[2]));
}

static void rectangles_arrive_where_they_should(void)
{
    static unsigned char in[SIDE * SIDE * SIDE], out[SIDE * SIDE * SIDE], empty[SIDE * SIDE * SIDE];
    const size_t from[3] = {2, 3, 1}, to[3] = {5, 1, 4}, zero[3] = {0}, region[3] = {7, 9, 5}, row = SIDE, slice = SIDE * SIDE;
    SimWorld world;
    cl_mem a, b;

    for (size_t i = 0; i < sizeof(in); i++)
        in[i] = (unsigned char)(i % SIDE + 3 * (i / SIDE % SIDE) + 7 * (i / SIDE / SIDE));
    memset(empty, 0xee, sizeof(empty));
    sim_world_open(&world);
    a = sim_world_buffer(&world, sizeof(in));
    b = sim_world_buffer(&world, sizeof(in));
    CHECK(clEnqueueWriteBufferRect(world.a, a, CL_FALSE, from, from, region, row, slice, row, slice, in, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clEnqueueWriteBuffer(world.a, b, CL_FALSE, 0, sizeof(empty), empty, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clEnqueueCopyBufferRect(world.a, a, b, from, to, region, row, slice, row, slice, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clEnqueueReadBufferRect(world.a, b, CL_TRUE, zero, zero, (const size_t[]){SIDE, SIDE, SIDE}, 0, 0, 0, 0, out, 0, NULL, NULL) ==
          CL_SUCCESS);
    for (size_t i = 0; i < sizeof(out); i++)
        CHECK(out[i] == expected(i % SIDE, i / SIDE % SIDE, i / SIDE / SIDE, to, from, region));
    CHECK(clReleaseMemObject(b) == CL_SUCCESS);
    CHECK(clReleaseMemObject(a) == CL_SUCCESS);
    sim_world_close(&world);
}

static void sub_buffers_are_parts(void)
{
    const cl_buffer_region region = {4096, 4096};
    SimWorld world;
    cl_int status, value = 21, got = 0;
    cl_mem whole, part;

    sim_world_open(&world);
    whole = sim_world_buffer(&world, 16384);
    part = clCreateSubBuffer(whole, CL_MEM_READ_WRITE, CL_BUFFER_CREATE_TYPE_REGION, &region, &status);
    CHECK(status == CL_SUCCESS);
    CHECK(clEnqueueWriteBuffer(world.a, part, CL_FALSE, 8, sizeof(value), &value, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(sim_world_add(&world, world.a, part, 16, 1, 0, NULL, NULL) == CL_SUCCESS);
    CHECK(clEnqueueReadBuffer(world.a, whole, CL_TRUE, 4096 + 8, sizeof(got), &got, 0, NULL, NULL) == CL_SUCCESS && got == 22);
    CHECK(clEnqueueCopyBuffer(world.a, part, whole, 0, 4100, 64, 0, NULL, NULL) == CL_MEM_COPY_OVERLAP);
    CHECK(clReleaseMemObject(whole) == CL_SUCCESS);
    CHECK(clEnqueueReadBuffer(world.a, part, CL_TRUE, 8, sizeof(got), &got, 0, NULL, NULL) == CL_SUCCESS && got == 22);
    CHECK(clReleaseMemObject(part) == CL_SUCCESS);
    sim_world_close(&world);
}

static void wrong_copies_are_refused(void)
{
    const cl_event none = NULL;
    SimWorld world;
    cl_mem buffer;
    char host[64];

    sim_world_open(&world);
    buffer = sim_world_buffer(&world, 64);
    CHECK(clEnqueueReadBuffer(world.a, buffer, CL_TRUE, 60, 5, host, 0, NULL, NULL) == CL_INVALID_VALUE);
    CHECK(clEnqueueReadBuffer(world.a, buffer, CL_TRUE, SIZE_MAX, 2, host, 0, NULL, NULL) == CL_INVALID_VALUE);
    CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_TRUE, 0, 0, host, 0, NULL, NULL) == CL_INVALID_VALUE);
    CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_TRUE, 0, 64, NULL, 0, NULL, NULL) == CL_INVALID_VALUE);
    CHECK(clEnqueueWriteBuffer(world.a, NULL, CL_TRUE, 0, 64, host, 0, NULL, NULL) == CL_INVALID_MEM_OBJECT);
    CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_TRUE, 0, 64, host, 1, NULL, NULL) == CL_INVALID_EVENT_WAIT_LIST);
    CHECK(clEnqueueWriteBuffer(world.a, buffer, CL_TRUE, 0, 64, host, 1, &none, NULL) == CL_INVALID_EVENT_WAIT_LIST);
    CHECK(clEnqueueUnmapMemObject(world.a, buffer, host, 0, NULL, NULL) == CL_INVALID_VALUE);
    CHECK(clReleaseMemObject(buffer) == CL_SUCCESS);
    sim_world_close(&world);
}

/* By name a program gets the layer's functions, or none that would reach past it. */
static void entry_points_by_name_are_the_layers(void)
{
    typedef cl_int(CL_API_CALL * Flush)(cl_command_queue);
    typedef cl_int(CL_API_CALL * PlatformIds)(cl_uint, cl_platform_id *, cl_uint *);
    clsim_count_calls_fn count;
    PlatformIds platform_ids;
    SimWorld world;
    cl_ulong before;
    cl_uint n = 0;
    Flush flush;

    sim_world_open(&world);
    *(void **)&count = clGetExtensionFunctionAddressForPlatform(world.platform, "clsimCountCalls");
    *(void **)&flush = clGetExtensionFunctionAddressForPlatform(world.platform, "clFlush");
    *(void **)&platform_ids = clGetExtensionFunctionAddressForPlatform(world.platform, "clIcdGetPlatformIDsKHR");
    CHECK(count && flush && platform_ids);
    before = count("any");
    CHECK(flush(world.a) == CL_SUCCESS && platform_ids(0, NULL, &n) == CL_SUCCESS && n > 0);
    CHECK(count("any") == before + 2 && count("clFlush") == 1 && count("clGetPlatformIDs") == 2);
    CHECK(!clGetExtensionFunctionAddressForPlatform(world.platform, "clCreateCommandBufferKHR"));
    CHECK(!clGetExtensionFunctionAddressForPlatform(world.platform, "clNoSuchFunction"));
    sim_world_close(&world);
}

static const SimScenario scenarios[] = {
    {"says_what_was_set", says_what_was_set},
    {"refuses_beyond_its_memory", refuses_beyond_its_memory},
    {"keeps_memory_that_a_kernel_uses", keeps_memory_that_a_kernel_uses},
    {"host_pointers_are_copied", host_pointers_are_copied},
    {"maps_are_copies", maps_are_copies},
    {"rectangles_arrive_where_they_should", rectangles_arrive_where_they_should},
    {"sub_buffers_are_parts", sub_buffers_are_parts},
    {"wrong_copies_are_refused", wrong_copies_are_refused},
    {"entry_points_by_name_are_the_layers", entry_points_by_name_are_the_layers},
};

/* ---- tests --------------------------------------------------------------------------------------------------------- */

#define SMALL "CLSIM_MEMORY=64M CLSIM_CHECK=all CLSIM_MISUSE=99"

static void sim_device_says_what_was_set(void **state)
{
    (void)state;
    sim_rig_run_well("says_what_was_set", SMALL " CLSIM_DEVICE_TYPE=gpu");
}

static void sim_allocations_beyond_memory_are_refused_with_the_real_codes(void **state)
{
    (void)state;
    sim_rig_run_well("refuses_beyond_its_memory", SMALL);
    sim_rig_run_well("refuses_beyond_its_memory", SMALL " CLSIM_DEVICE_MEMORY=driver");
    sim_rig_run_well("refuses_beyond_its_memory", SMALL " CLSIM_UNIFIED=1");
}

static void sim_memory_in_use_by_a_kernel_is_not_free(void **state)
{
    (void)state;
    sim_rig_run_well("keeps_memory_that_a_kernel_uses", SMALL);
}

static void sim_host_pointers_and_maps_are_copies_at_their_time(void **state)
{
    (void)state;
    sim_rig_run_well("host_pointers_are_copied", SMALL);
    sim_rig_run_well("host_pointers_are_copied", SMALL " CLSIM_DEVICE_MEMORY=driver");
    sim_rig_run_well("maps_are_copies", SMALL);
    sim_rig_run_well("maps_are_copies", SMALL " CLSIM_DEVICE_MEMORY=driver");
}

static void sim_rectangles_and_parts_arrive(void **state)
{
    (void)state;
    sim_rig_run_well("rectangles_arrive_where_they_should", SMALL);
    sim_rig_run_well("rectangles_arrive_where_they_should", SMALL " CLSIM_DEVICE_MEMORY=driver");
    sim_rig_run_well("rectangles_arrive_where_they_should", SMALL " CLSIM_UNIFIED=1");
    sim_rig_run_well("sub_buffers_are_parts", SMALL);
    sim_rig_run_well("sub_buffers_are_parts", SMALL " CLSIM_DEVICE_MEMORY=driver");
}

static void sim_wrong_copies_get_the_real_codes(void **state)
{
    (void)state;
    sim_rig_run_to("wrong_copies_are_refused", "CLSIM_CHECK=all", EXIT_SUCCESS, "map: clEnqueueUnmapMemObject #1");
}

static void sim_entry_points_by_name_are_wrapped(void **state)
{
    (void)state;
    sim_rig_run_well("entry_points_by_name_are_the_layers", SMALL);
}

static void sim_wrong_settings_end_the_program(void **state)
{
    (void)state;
    sim_rig_run_to("says_what_was_set", "CLSIM_MEMORY=lots", 2, "CLSIM_MEMORY: 'lots'");
    sim_rig_run_to("says_what_was_set", "CLSIM_COLOUR=red", 2, "CLSIM_COLOUR");
    sim_rig_run_to("says_what_was_set", "CLSIM_CONFIG=/does/not/exist", 2, "/does/not/exist");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sim_device_says_what_was_set),
        cmocka_unit_test(sim_allocations_beyond_memory_are_refused_with_the_real_codes),
        cmocka_unit_test(sim_memory_in_use_by_a_kernel_is_not_free),
        cmocka_unit_test(sim_host_pointers_and_maps_are_copies_at_their_time),
        cmocka_unit_test(sim_rectangles_and_parts_arrive),
        cmocka_unit_test(sim_wrong_copies_get_the_real_codes),
        cmocka_unit_test(sim_entry_points_by_name_are_wrapped),
        cmocka_unit_test(sim_wrong_settings_end_the_program),
    };

    if (sim_rig_is_scenario(argc, argv, scenarios, sizeof(scenarios) / sizeof(*scenarios)))
        return EXIT_SUCCESS;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
