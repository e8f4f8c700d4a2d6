#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A script (tests/lib/fault-script.h) on the simulated small GPU, once for each fault that may befall it: each call of OpenCL with one code,
 * each place that calls it with each code that the specification lists for it, each allocation of ours, commands that fail or do not end after
 * they were accepted, a device that is lost.
 *
 * What must hold: who succeeds has the outputs of the run without faults, bit for bit; who fails says so, and when the device is still there
 * nothing has changed, so the same once more succeeds, and all that comes after it too; else the device is opened again and the next run is
 * right.  Nothing is left behind: no object of OpenCL, no block, no mapping, no descriptor, no byte of the device's budget.
 *
 * Some cases are taken from each row of cases, evenly spaced from a start that LEAT_FAULT_SEED moves (printed); LEAT_SOAK=1 takes all, and
 * with LEAT_SOAK_SLICES=N the N-th part of all that LEAT_FAULT_SEED names.
 */

#include "tests/lib/fault-script.h"

/* main() of a test program whose scenarios are named KIND-SHAPE: runs the one that the command line names; false when it names none.  Kinds:
 * refusals (without faults: what is refused after each operation changes nothing), every_call, every_site, every_allocation, every_event,
 * stalls. */
bool fault_cases_is_scenario(int argc, char **argv, ScriptShape (*shape_of)(const char *name));
/* A kind of faults on each of @n shapes, in processes of their own: sim_rig_run_well(). */
void fault_cases_run_well(const char *kind, const char *const *shapes, size_t n, const char *settings);
