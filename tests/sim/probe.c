/* SPDX-License-Identifier: Apache-2.0 */
/* Measuring the driver: whether it reads memory of ours in place, which clock its times follow, how fast a kernel reads. */

#include "tests/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define READ_BYTES  (UINT64_C(128) << 20) /* beyond any cache that a small device has */
#define READ_ITEMS  64u
#define READ_ROUNDS 9u
#define PLACE_BYTES 4096u

typedef struct Probe {
    SimDevice *device;
    cl_context context;
    cl_command_queue queue;
} Probe;

uint64_t sim_now_nsec(clockid_t clock)
{
    struct timespec now;

    (void)clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* ---- in place ------------------------------------------------------------------------------------------------------ */

/* The device fills memory of ours, then copies what the host has written there: both without a map. */
static bool works_in_place(const Probe *probe)
{
    unsigned char *memory = mmap(NULL, 2 * PLACE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cl_mem a = NULL, b = NULL;
    bool works = memory != MAP_FAILED;

    for (unsigned round = 1; round < 3 && works; round++) {
        unsigned char pattern = (unsigned char)(16 * round + 5);
        cl_int status = CL_SUCCESS;

        if (!a)
            a = sim.next.clCreateBuffer(probe->context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, PLACE_BYTES, memory, &status);
        if (a && !b)
            b = sim.next.clCreateBuffer(probe->context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, PLACE_BYTES,
                                        memory + PLACE_BYTES, &status);
        if (!a || !b)
            works = false;
        works = works && sim.next.clEnqueueFillBuffer(probe->queue, a, &pattern, 1, 0, PLACE_BYTES, 0, NULL, NULL) == CL_SUCCESS &&
                sim.next.clFinish(probe->queue) == CL_SUCCESS && memory[0] == pattern && memory[PLACE_BYTES - 1] == pattern;
        if (works)
            memset(memory, pattern + 1, PLACE_BYTES);
        works = works && sim.next.clEnqueueCopyBuffer(probe->queue, a, b, 0, 0, PLACE_BYTES, 0, NULL, NULL) == CL_SUCCESS &&
                sim.next.clFinish(probe->queue) == CL_SUCCESS && memory[PLACE_BYTES] == (unsigned char)(pattern + 1);
    }
    if (a)
        (void)sim.next.clReleaseMemObject(a);
    if (b)
        (void)sim.next.clReleaseMemObject(b);
    if (memory != MAP_FAILED)
        (void)munmap(memory, 2 * PLACE_BYTES);
    return works;
}

/* ---- clock --------------------------------------------------------------------------------------------------------- */

static void find_clock(const Probe *probe)
{
    static const clockid_t clocks[] = {CLOCK_MONOTONIC, CLOCK_MONOTONIC_RAW, CLOCK_REALTIME};
    bool fits[SIM_N_ELEMENTS(clocks)] = {true, true, true};
    uint64_t least = UINT64_MAX;
    int64_t offset = 0;

    for (unsigned round = 0; round < 5; round++) {
        uint64_t before[SIM_N_ELEMENTS(clocks)], after[SIM_N_ELEMENTS(clocks)];
        cl_event event = NULL;
        cl_ulong time = 0;

        for (size_t i = 0; i < SIM_N_ELEMENTS(clocks); i++)
            before[i] = sim_now_nsec(clocks[i]);
        if (sim.next.clEnqueueMarkerWithWaitList(probe->queue, 0, NULL, &event) != CL_SUCCESS)
            return;
        if (sim.next.clWaitForEvents(1, &event) != CL_SUCCESS ||
            sim.next.clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_END, sizeof(time), &time, NULL) != CL_SUCCESS)
            time = 0;
        for (size_t i = 0; i < SIM_N_ELEMENTS(clocks); i++) {
            after[i] = sim_now_nsec(clocks[i]);
            fits[i] = fits[i] && before[i] <= time && time <= after[i];
        }
        (void)sim.next.clReleaseEvent(event);
        if (time > 0 && after[0] - before[0] < least) {
            least = after[0] - before[0];
            offset = (int64_t)(time - (before[0] + least / 2));
        }
    }
    probe->device->clock_offset = offset;
    for (size_t i = SIM_N_ELEMENTS(clocks); i-- > 0;)
        if (fits[i]) {
            probe->device->clock = clocks[i];
            probe->device->clock_offset = 0;
        }
}

/* ---- read rate ----------------------------------------------------------------------------------------------------- */

static const char read_source[] =
    "__kernel void clsim_read(__global const ulong8 *in, uint n, uint step, uint stride, __global ulong *out)\n"
    "{\n"
    "    __global const ulong8 *at = in + get_global_id(0) * step;\n"
    "    ulong8 sum = 0;\n"
    "    for (uint i = 0; i < n; i++, at += stride)\n"
    "        sum += *at;\n"
    "    ulong4 half4 = sum.lo + sum.hi;\n"
    "    ulong2 half2 = half4.lo + half4.hi;\n"
    "    out[get_global_id(0)] = half2.lo + half2.hi;\n"
    "}\n";

static cl_kernel read_kernel(const Probe *probe, cl_program *ret_program)
{
    const char *source = read_source;
    cl_int status;
    cl_program program = sim.next.clCreateProgramWithSource(probe->context, 1, &source, NULL, &status);

    *ret_program = program;
    if (!program || sim.next.clBuildProgram(program, 1, &probe->device->handle, "", NULL, NULL) != CL_SUCCESS)
        return NULL;
    return sim.next.clCreateKernel(program, "clsim_read", &status);
}

/* Seconds of one pass over @in; 0 when it failed. */
static double read_once(const Probe *probe, cl_kernel kernel, size_t items)
{
    uint64_t begin = sim_now_nsec(CLOCK_MONOTONIC);

    if (sim.next.clEnqueueNDRangeKernel(probe->queue, kernel, 1, NULL, &items, NULL, 0, NULL, NULL) != CL_SUCCESS ||
        sim.next.clFinish(probe->queue) != CL_SUCCESS)
        return 0;
    return (double)(sim_now_nsec(CLOCK_MONOTONIC) - begin) * 1e-9;
}

static bool set_arguments(cl_kernel kernel, cl_mem in, cl_mem out, size_t items, bool interleaved)
{
    cl_uint n = (cl_uint)(READ_BYTES / 64 / items), step = interleaved ? 1 : n, stride = interleaved ? (cl_uint)items : 1;

    return sim.next.clSetKernelArg(kernel, 0, sizeof(in), &in) == CL_SUCCESS &&
           sim.next.clSetKernelArg(kernel, 1, sizeof(n), &n) == CL_SUCCESS &&
           sim.next.clSetKernelArg(kernel, 2, sizeof(step), &step) == CL_SUCCESS &&
           sim.next.clSetKernelArg(kernel, 3, sizeof(stride), &stride) == CL_SUCCESS &&
           sim.next.clSetKernelArg(kernel, 4, sizeof(out), &out) == CL_SUCCESS;
}

/* Bytes a second; 0 when it cannot be measured.  Processors read one stretch an item, other devices side by side. */
static double measure_read(const Probe *probe)
{
    cl_device_type type = CL_DEVICE_TYPE_CPU;
    cl_program program = NULL;
    cl_kernel kernel = read_kernel(probe, &program);
    size_t items = READ_ITEMS;
    cl_mem in, out;
    cl_int status;
    double best = 0;

    (void)sim.next.clGetDeviceInfo(probe->device->handle, CL_DEVICE_TYPE, sizeof(type), &type, NULL);
    if (!(type & CL_DEVICE_TYPE_CPU))
        items *= 256;
    in = sim.next.clCreateBuffer(probe->context, CL_MEM_READ_WRITE, READ_BYTES, NULL, &status);
    out = sim.next.clCreateBuffer(probe->context, CL_MEM_READ_WRITE, items * sizeof(cl_ulong), NULL, &status);
    if (kernel && in && out && set_arguments(kernel, in, out, items, !(type & CL_DEVICE_TYPE_CPU))) {
        const cl_uchar pattern = 3;

        status = sim.next.clEnqueueFillBuffer(probe->queue, in, &pattern, 1, 0, READ_BYTES, 0, NULL, NULL);
        for (unsigned round = 0; round <= READ_ROUNDS && status == CL_SUCCESS; round++) {
            double seconds = read_once(probe, kernel, items);

            if (seconds > 0 && round > 0)
                best = SIM_MAX(best, (double)READ_BYTES / seconds);
        }
    }
    if (out)
        (void)sim.next.clReleaseMemObject(out);
    if (in)
        (void)sim.next.clReleaseMemObject(in);
    if (kernel)
        (void)sim.next.clReleaseKernel(kernel);
    if (program)
        (void)sim.next.clReleaseProgram(program);
    return best;
}

/* ---- all ----------------------------------------------------------------------------------------------------------- */

void probe_device(SimDevice *device)
{
    Probe probe = {.device = device};
    cl_int status;

    probe.context = sim.next.clCreateContext(NULL, 1, &device->handle, NULL, NULL, &status);
    if (probe.context)
        probe.queue = sim.next.clCreateCommandQueue(probe.context, device->handle, CL_QUEUE_PROFILING_ENABLE, &status);
    device->read_rate = sim.config.read_rate;
    device->in_place = sim.config.memory == SIM_MEMORY_IN_PLACE;
    if (probe.queue) {
        find_clock(&probe);
        if (sim.config.memory == SIM_MEMORY_AUTO)
            device->in_place = works_in_place(&probe);
        if (device->read_rate <= 0 && sim.config.link_ratio > 0 && sim.config.link_rate <= 0)
            device->read_rate = measure_read(&probe);
        (void)sim.next.clReleaseCommandQueue(probe.queue);
    }
    if (probe.context)
        (void)sim.next.clReleaseContext(probe.context);
    if (device->read_rate <= 0 && sim.config.link_ratio > 0 && sim.config.link_rate <= 0)
        report_note("the read rate could not be measured: copies are not paced");
    report_detail("kernels read %.2f GB/s%s; device memory is %s", device->read_rate * 1e-9,
                  sim.config.read_rate > 0 ? " (given)" : "", device->in_place ? "the layer's, in place" : "the driver's");
}
