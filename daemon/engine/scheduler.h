#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who goes next.  Pure decisions over descriptors: no device, no clock, no allocation.
 *
 * Waiting jobs are admitted in the order of scheduler_order(): by class; within a class the owners take turns, each with its oldest job
 * first, so that one program's fifty jobs do not stand before another's one.
 *
 * Active jobs share passes.  scheduler_pick() is asked before every pass (a token boundary):
 *   - while an interactive job can run, background jobs do not (they yield);
 *   - the job that leads is of the best class, and of these the one served longest ago; only jobs of its *group* (one model, one
 *     store) can share the pass;
 *   - every decoding job of the group joins with one row, because the weights are read once for all of them;
 *   - at most one job joins with a chunk of its prompt.  A chunk beside other jobs' decode rows is short, so that their next tokens do
 *     not wait for a long prompt.
 */

#include "daemon/engine/engine.h"

/* Rows of a prompt chunk that shares a pass with decode rows of others: about the work that delays a token by one more pass on a
 * device that is bound by reading the weights. */
#define SCHEDULER_SHARED_CHUNK 128

typedef struct SchedulerWaiting {
    uint64_t id;          /* grows with arrival */
    uint64_t owner;
    EnginePriority priority;
    uint64_t owner_admitted; /* when a job of this owner was admitted last (a serial number); 0: never */
    size_t round;            /* set by scheduler_order(): how many of the same owner and class arrived before */
} SchedulerWaiting;

/* Writes the indices of @jobs in the order of admission into @ret_order (n). */
void scheduler_order(SchedulerWaiting *jobs, size_t n, size_t *ret_order);

typedef struct SchedulerLimits {
    uint32_t max_rows, max_items; /* of one pass */
} SchedulerLimits;

typedef struct SchedulerActive {
    uint64_t id;
    EnginePriority priority;
    uint32_t group;
    uint32_t n_rows;      /* rows that it could run: 1 when decoding, the rest of the prompt in prefill; at least 1 */
    bool prefill;         /* wants a chunk, even of one row */
    bool runnable;        /* not paused from outside, not waiting for memory */
    bool exclusive;       /* never shares a pass */
    uint64_t last_served; /* serial of its last pass; 0: none */
    SchedulerLimits limits; /* of its group */
} SchedulerActive;

typedef struct SchedulerPick {
    size_t index;    /* of the jobs given */
    uint32_t n_rows; /* to run in this pass */
} SchedulerPick;

/* The jobs of the next pass, the leader first; returns how many (0: none can run), at most the group's max_items. */
size_t scheduler_pick(const SchedulerActive *jobs, size_t n, SchedulerPick *ret_picks);

/* Whether a job of this class stands back at this boundary. */
bool scheduler_yields(const SchedulerActive *jobs, size_t n, EnginePriority priority);
