#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* GpuOptions.deadline_usec of tests: PoCL compiles inside a step, on a machine that may be busy; only a hang is longer. */

#define PATIENCE_USEC UINT64_C(600000000)
