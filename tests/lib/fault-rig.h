#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What the fault tests have in common: the simulated small GPU that they run on, which cases they take, and
 * that nothing is left behind. */

#include "tests/lib/fault.h"

#ifdef __SANITIZE_ADDRESS__ /* whose free() must be the first */
#define FAULT_RIG_PRELOAD
#else
#define FAULT_RIG_PRELOAD " LD_PRELOAD=layer"
#endif

/* For sim_rig_run().  CLSIM_PART=1: pages of a cache at home on the device are written beside those that a
 * kernel reads. */
#define FAULT_RIG_DEVICE                                                                                     \
    "CLSIM_DEVICE_TYPE=gpu CLSIM_UNIFIED=0 CLSIM_MEMORY=64M CLSIM_MAX_ALLOCATION=8M CLSIM_READ_RATE=8G "     \
    "CLSIM_LINK_RATE=4G CLSIM_POISON=1 CLSIM_PART=1 CLSIM_CHECK=all CLSIM_MISUSE=71" FAULT_RIG_PRELOAD

/* What stands behind a command that failed is not known to be after it: races are not looked for.  PoCL never ends a kernel
 * that waits for a command which fails later: the device is then given up with what it holds, as one that hangs. */
#define FAULT_RIG_LATER \
    FAULT_RIG_DEVICE " CLSIM_CHECK=host,callback,release,map ASAN_OPTIONS=use_sigaltstack=0:detect_leaks=0"
/* What a device holds that hangs, or does not even tell what has ended, is left to it, and the host's memory with it; the
 * test goes on with its own. */
#define FAULT_RIG_STALLS FAULT_RIG_DEVICE " CLSIM_CHECK=host,map ASAN_OPTIONS=use_sigaltstack=0:detect_leaks=0"

/* First in main(): sets LEAT_FAULT_SEED when it is not there, and prints it; a soak keeps compiled programs beside the driver's. */
void fault_rig_begin(void);
uint32_t fault_rig_seed(void);
/* How far apart the cases are, of which there are @n, when @wanted of them are enough.  LEAT_SOAK: all of them; with
 * LEAT_SOAK_SLICES=N every N-th, from the LEAT_FAULT_SEED-th (modulo N) on, so that N seeds in turn take all. */
uint32_t fault_rig_stride(uint32_t n, uint32_t wanted);
/* What is there is what was at @none.  Blocks are told that were allocated after the first @n_known ever. */
void fault_rig_check_none_left(const FaultLive *none, uint64_t n_known);
