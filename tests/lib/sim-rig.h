#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Programs under the simulated small GPU (tests/sim).  A scenario is a small OpenCL program; it runs in a process of its own, started with the
 * layer and its settings in the environment, and says by its exit status whether all was as it should be.
 */

#define CL_USE_DEPRECATED_OPENCL_1_1_APIS
#include <CL/cl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define SIM_RIG_FAILED 70 /* exit status of a scenario that finds something wrong */

typedef struct SimScenario {
    const char *name;
    void (*run)(void);
} SimScenario;

typedef struct SimRun {
    int status;       /* exit status; 128 + signal */
    char text[32768]; /* what it wrote to standard error */
    double seconds;
} SimRun;

/* main() of a test program: runs the scenario that the command line names; false when it names none. */
bool sim_rig_is_scenario(int argc, char **argv, const SimScenario *scenarios, size_t n);
/* Starts this program again for a scenario; @settings: "NAME=VALUE …" separated by spaces, beyond the layer itself. */
void sim_rig_run(const char *scenario, const char *settings, SimRun *ret);
/* The same, and it must end well. */
void sim_rig_run_well(const char *scenario, const char *settings);
/* It must end with @status, and its text contain every one of @words ("a|b|c"); a failure prints the text. */
void sim_rig_run_to(const char *scenario, const char *settings, int status, const char *words);

/* ---- for scenarios ------------------------------------------------------------------------------------------------- */

#define CHECK(condition)                                                                                    \
    do {                                                                                                    \
        if (!(condition))                                                                                   \
            sim_rig_fail(__FILE__, __LINE__, #condition);                                                   \
    } while (0)
_Noreturn void sim_rig_fail(const char *file, int line, const char *text);

/* The only device, a context, two queues in order with profiling, and kernels:
 *   add(global int *data, int n)                          data[i] += n, one item an element
 *   sum(global const int *in, global int *out, int n)     out[0] = the sum of in[0 .. n), one item
 *   spin(global int *out, int rounds)                     busy for a time in proportion to rounds, one item */
typedef struct SimWorld {
    cl_platform_id platform;
    cl_device_id device;
    cl_context context;
    cl_command_queue a, b;
    cl_program program;
    cl_kernel add, sum, spin;
} SimWorld;

void sim_world_open(SimWorld *world);
void sim_world_close(SimWorld *world);
cl_mem sim_world_buffer(const SimWorld *world, size_t bytes);
/* Launches; the event may be NULL. */
cl_int sim_world_add(const SimWorld *world, cl_command_queue queue, cl_mem data, size_t n, cl_int value, cl_uint n_waits,
                     const cl_event *waits, cl_event *event);
cl_int sim_world_sum(const SimWorld *world, cl_command_queue queue, cl_mem in, cl_mem out, cl_int n, cl_uint n_waits,
                     const cl_event *waits, cl_event *event);
cl_int sim_world_spin(const SimWorld *world, cl_command_queue queue, cl_mem out, cl_int rounds, cl_event *event);
/* Rounds that keep the device busy for about @seconds. */
cl_int sim_world_rounds(const SimWorld *world, double seconds);
cl_int sim_event_status(cl_event event);
double sim_event_time(cl_event event, cl_profiling_info what); /* seconds */
double sim_now(void);
