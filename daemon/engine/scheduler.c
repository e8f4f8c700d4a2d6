/* SPDX-License-Identifier: Apache-2.0 */
/* Who goes next.  See the header. */

#include "daemon/engine/scheduler.h"

static bool waits_before(const SchedulerWaiting *a, const SchedulerWaiting *b)
{
    if (a->priority != b->priority)
        return a->priority < b->priority;
    if (a->round != b->round)
        return a->round < b->round;
    if (a->owner_admitted != b->owner_admitted)
        return a->owner_admitted < b->owner_admitted;
    return a->id < b->id;
}

void scheduler_order(SchedulerWaiting *jobs, size_t n, size_t *ret_order)
{
    for (size_t i = 0; i < n; i++) {
        jobs[i].round = 0;
        for (size_t j = 0; j < n; j++)
            jobs[i].round += jobs[j].owner == jobs[i].owner && jobs[j].priority == jobs[i].priority && jobs[j].id < jobs[i].id;
    }
    /* Insertion: the queue is bounded and nearly sorted by arrival. */
    for (size_t i = 0; i < n; i++) {
        size_t at = i;

        while (at > 0 && waits_before(&jobs[i], &jobs[ret_order[at - 1]])) {
            ret_order[at] = ret_order[at - 1];
            at--;
        }
        ret_order[at] = i;
    }
}

bool scheduler_yields(const SchedulerActive *jobs, size_t n, EnginePriority priority)
{
    if (priority != ENGINE_PRIORITY_BACKGROUND)
        return false;
    for (size_t i = 0; i < n; i++)
        if (jobs[i].runnable && jobs[i].priority == ENGINE_PRIORITY_INTERACTIVE)
            return true;
    return false;
}

/* Better class, then longest unserved, then older. */
static bool goes_before(const SchedulerActive *a, const SchedulerActive *b)
{
    if (a->priority != b->priority)
        return a->priority < b->priority;
    if (a->last_served != b->last_served)
        return a->last_served < b->last_served;
    return a->id < b->id;
}

/* Whether job @i may share the pass of @leader. */
static bool joins(const SchedulerActive *jobs, size_t i, size_t leader, bool background_yields)
{
    return i != leader && jobs[i].runnable && !jobs[i].exclusive && jobs[i].group == jobs[leader].group &&
           !(background_yields && jobs[i].priority == ENGINE_PRIORITY_BACKGROUND);
}

size_t scheduler_pick(const SchedulerActive *jobs, size_t n, SchedulerPick *ret_picks)
{
    const SchedulerLimits *limits;
    bool background_yields = scheduler_yields(jobs, n, ENGINE_PRIORITY_BACKGROUND);
    size_t leader = SIZE_MAX, chunk, n_picks = 1;
    uint32_t rows_left, chunk_rows;

    for (size_t i = 0; i < n; i++)
        if (jobs[i].runnable && (leader == SIZE_MAX || goes_before(&jobs[i], &jobs[leader])))
            leader = i;
    if (leader == SIZE_MAX)
        return 0;
    limits = &jobs[leader].limits;

    ret_picks[0] = (SchedulerPick){leader, 1};
    rows_left = limits->max_rows - 1;
    for (size_t i = 0; i < n && n_picks < limits->max_items && rows_left > 0 && !jobs[leader].exclusive; i++)
        if (joins(jobs, i, leader, background_yields) && !jobs[i].prefill) {
            ret_picks[n_picks++] = (SchedulerPick){i, 1};
            rows_left--;
        }

    if (jobs[leader].prefill) {
        chunk_rows = rows_left + 1;
        if (n_picks > 1)
            chunk_rows = MIN(chunk_rows, (uint32_t)SCHEDULER_SHARED_CHUNK);
        ret_picks[0].n_rows = MIN(jobs[leader].n_rows, chunk_rows);
        return n_picks;
    }
    chunk = SIZE_MAX;
    for (size_t i = 0; i < n && !jobs[leader].exclusive; i++)
        if (joins(jobs, i, leader, background_yields) && jobs[i].prefill &&
            (chunk == SIZE_MAX || goes_before(&jobs[i], &jobs[chunk])))
            chunk = i;
    if (chunk != SIZE_MAX && n_picks < limits->max_items && rows_left > 0) {
        chunk_rows = MIN(rows_left, (uint32_t)SCHEDULER_SHARED_CHUNK);
        ret_picks[n_picks++] = (SchedulerPick){chunk, MIN(jobs[chunk].n_rows, chunk_rows)};
    }
    return n_picks;
}
