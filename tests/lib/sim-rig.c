/* SPDX-License-Identifier: Apache-2.0 */
/* Programs under the simulated small GPU. */

#include "tests/lib/sim-rig.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

/* A scenario that takes longer hangs; a busy machine may compile kernels for minutes. */
#define LIMIT_SECONDS (getenv("LEAT_SOAK") ? 43200 : 900)

double sim_now(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- starting ------------------------------------------------------------------------------------------------------ */

bool sim_rig_is_scenario(int argc, char **argv, const SimScenario *scenarios, size_t n)
{
    if (argc != 3 || strcmp(argv[1], "--scenario") != 0)
        return false;
    (void)alarm(LIMIT_SECONDS);
    for (size_t i = 0; i < n; i++)
        if (strcmp(scenarios[i].name, argv[2]) == 0) {
            scenarios[i].run();
            exit(EXIT_SUCCESS);
        }
    sim_rig_fail(__FILE__, __LINE__, argv[2]);
}

static void set_environment(const char *settings)
{
    char self[4096], layer[4200], awake[4200], words[4096], *rest = words;
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

    if (n < 0)
        _exit(SIM_RIG_FAILED);
    self[n] = '\0';
    *strrchr(self, '/') = '\0';
    (void)snprintf(layer, sizeof(layer), "%s/../sim/libclsim.so", self);
    (void)snprintf(awake, sizeof(awake), "%s/../sim/libawake.so", self);
    (void)setenv("OPENCL_LAYERS", layer, 1);
    /* Kernels get one worker, the copies a thread of their own. */
    (void)setenv("POCL_MAX_PTHREAD_COUNT", "1", 1);
    (void)snprintf(words, sizeof(words), "%s", settings);
    for (char *word; (word = strsep(&rest, " "));) {
        char *value = strchr(word, '=');

        if (!value)
            continue;
        *value++ = '\0';
        if (strcmp(word, "LD_PRELOAD") == 0)
            value = strcmp(value, "awake") == 0 ? awake : layer;
        (void)setenv(word, value, 1);
    }
}

void sim_rig_run(const char *scenario, const char *settings, SimRun *ret)
{
    double begin = sim_now();
    size_t length = 0;
    int ends[2], status;
    ssize_t n;
    pid_t pid;

    assert_int_equal(pipe(ends), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)dup2(ends[1], STDERR_FILENO);
        (void)close(ends[0]);
        (void)close(ends[1]);
        set_environment(settings);
        (void)execl("/proc/self/exe", "scenario", "--scenario", scenario, (char *)NULL);
        _exit(SIM_RIG_FAILED);
    }
    (void)close(ends[1]);
    while ((n = read(ends[0], ret->text + length, sizeof(ret->text) - 1 - length)) > 0) {
        length += (size_t)n;
        if (length == sizeof(ret->text) - 1) { /* the end tells most */
            length /= 2;
            memmove(ret->text, ret->text + sizeof(ret->text) - 1 - length, length);
        }
    }
    ret->text[length] = '\0';
    (void)close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    ret->status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    ret->seconds = sim_now() - begin;
}

void sim_rig_run_to(const char *scenario, const char *settings, int status, const char *words)
{
    static SimRun run;
    char copy[512], *rest = copy;

    sim_rig_run(scenario, settings, &run);
    if (run.status != status)
        print_message("%s", run.text);
    assert_int_equal(run.status, status);
    (void)snprintf(copy, sizeof(copy), "%s", words);
    for (char *word; (word = strsep(&rest, "|"));)
        if (!strstr(run.text, word)) {
            print_message("'%s' is not said: %s\n", word, run.text);
            fail();
        }
}

void sim_rig_run_well(const char *scenario, const char *settings)
{
    sim_rig_run_to(scenario, settings, EXIT_SUCCESS, "");
}

void sim_rig_fail(const char *file, int line, const char *text)
{
    (void)fprintf(stderr, "%s:%d: %s\n", file, line, text);
    (void)fflush(stderr);
    _exit(SIM_RIG_FAILED);
}

/* ---- world --------------------------------------------------------------------------------------------------------- */

static const char source[] =
    "kernel void add(global int *data, int n) { data[get_global_id(0)] += n; }\n"
    "kernel void sum(const global int *in, global int *out, int n)\n"
    "{\n"
    "    int total = 0;\n"
    "    for (int i = 0; i < n; i++)\n"
    "        total += in[i];\n"
    "    out[0] = total;\n"
    "}\n"
    "kernel void spin(global int *out, int rounds)\n"
    "{\n"
    "    uint x = (uint)rounds;\n"
    "    for (int i = 0; i < rounds; i++)\n"
    "        for (int j = 0; j < 1000; j++)\n"
    "            x = x * 1664525u + 1013904223u ^ x >> 7;\n"
    "    out[0] = (int)x;\n"
    "}\n";

void sim_world_open(SimWorld *world)
{
    const char *text = source;
    cl_int status;

    CHECK(clGetPlatformIDs(1, &world->platform, NULL) == CL_SUCCESS);
    CHECK(clGetDeviceIDs(world->platform, CL_DEVICE_TYPE_ALL, 1, &world->device, NULL) == CL_SUCCESS);
    world->context = clCreateContext(NULL, 1, &world->device, NULL, NULL, &status);
    CHECK(status == CL_SUCCESS);
    world->a = clCreateCommandQueue(world->context, world->device, CL_QUEUE_PROFILING_ENABLE, &status);
    CHECK(status == CL_SUCCESS);
    world->b = clCreateCommandQueue(world->context, world->device, CL_QUEUE_PROFILING_ENABLE, &status);
    CHECK(status == CL_SUCCESS);
    world->program = clCreateProgramWithSource(world->context, 1, &text, NULL, &status);
    CHECK(status == CL_SUCCESS);
    CHECK(clBuildProgram(world->program, 1, &world->device, "", NULL, NULL) == CL_SUCCESS);
    world->add = clCreateKernel(world->program, "add", &status);
    CHECK(status == CL_SUCCESS);
    world->sum = clCreateKernel(world->program, "sum", &status);
    CHECK(status == CL_SUCCESS);
    world->spin = clCreateKernel(world->program, "spin", &status);
    CHECK(status == CL_SUCCESS);
}

void sim_world_close(SimWorld *world)
{
    CHECK(clReleaseKernel(world->spin) == CL_SUCCESS);
    CHECK(clReleaseKernel(world->sum) == CL_SUCCESS);
    CHECK(clReleaseKernel(world->add) == CL_SUCCESS);
    CHECK(clReleaseProgram(world->program) == CL_SUCCESS);
    CHECK(clReleaseCommandQueue(world->b) == CL_SUCCESS);
    CHECK(clReleaseCommandQueue(world->a) == CL_SUCCESS);
    CHECK(clReleaseContext(world->context) == CL_SUCCESS);
}

cl_mem sim_world_buffer(const SimWorld *world, size_t bytes)
{
    cl_int status;
    cl_mem buffer = clCreateBuffer(world->context, CL_MEM_READ_WRITE, bytes, NULL, &status);

    CHECK(status == CL_SUCCESS);
    return buffer;
}

static cl_int launch(cl_command_queue queue, cl_kernel kernel, size_t n, cl_uint n_waits, const cl_event *waits, cl_event *event)
{
    const size_t one = 1;

    return clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &n, &one, n_waits, waits, event);
}

cl_int sim_world_add(const SimWorld *world, cl_command_queue queue, cl_mem data, size_t n, cl_int value, cl_uint n_waits,
                     const cl_event *waits, cl_event *event)
{
    CHECK(clSetKernelArg(world->add, 0, sizeof(data), &data) == CL_SUCCESS);
    CHECK(clSetKernelArg(world->add, 1, sizeof(value), &value) == CL_SUCCESS);
    return launch(queue, world->add, n, n_waits, waits, event);
}

cl_int sim_world_sum(const SimWorld *world, cl_command_queue queue, cl_mem in, cl_mem out, cl_int n, cl_uint n_waits,
                     const cl_event *waits, cl_event *event)
{
    CHECK(clSetKernelArg(world->sum, 0, sizeof(in), &in) == CL_SUCCESS);
    CHECK(clSetKernelArg(world->sum, 1, sizeof(out), &out) == CL_SUCCESS);
    CHECK(clSetKernelArg(world->sum, 2, sizeof(n), &n) == CL_SUCCESS);
    return launch(queue, world->sum, 1, n_waits, waits, event);
}

cl_int sim_world_spin(const SimWorld *world, cl_command_queue queue, cl_mem out, cl_int rounds, cl_event *event)
{
    CHECK(clSetKernelArg(world->spin, 0, sizeof(out), &out) == CL_SUCCESS);
    CHECK(clSetKernelArg(world->spin, 1, sizeof(rounds), &rounds) == CL_SUCCESS);
    return launch(queue, world->spin, 1, 0, NULL, event);
}

cl_int sim_world_rounds(const SimWorld *world, double seconds)
{
    cl_mem out = sim_world_buffer(world, sizeof(cl_int));
    cl_int rounds = 100;
    double taken = 0;

    for (unsigned i = 0; i < 20 && taken < 0.02; i++) {
        double begin;

        rounds *= i > 0 ? 2 : 1;
        CHECK(clFinish(world->a) == CL_SUCCESS);
        begin = sim_now();
        CHECK(sim_world_spin(world, world->a, out, rounds, NULL) == CL_SUCCESS);
        CHECK(clFinish(world->a) == CL_SUCCESS);
        taken = i > 0 ? sim_now() - begin : 0;
    }
    CHECK(clReleaseMemObject(out) == CL_SUCCESS);
    return (cl_int)(seconds / taken * rounds);
}

cl_int sim_event_status(cl_event event)
{
    cl_int status = 0;

    CHECK(clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof(status), &status, NULL) == CL_SUCCESS);
    return status;
}

double sim_event_time(cl_event event, cl_profiling_info what)
{
    cl_ulong time = 0;

    CHECK(clGetEventProfilingInfo(event, what, sizeof(time), &time, NULL) == CL_SUCCESS);
    return 1e-9 * (double)time;
}
