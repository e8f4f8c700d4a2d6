#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a step takes whose cache, weights or both stream: the schedule that the rings of cache/kv-ring.h and weights-device.h make.  Pure
 * arithmetic; tests/bench/simulated.py works out the same from a timeline.
 *
 *   kernels    one at a time in order; one that reads a tile or a part begins when that has arrived
 *   copies     one at a time in the order in which the host queues them; one begins when the launch that read its slot before has ended
 *   both       a copy that is under way may slow kernels down: on a CPU device it takes a worker's time
 *
 * Steps follow each other: what the rings hold ahead at the end of one is of the next.
 */

#include "daemon/model/speed.h"

/* A step; seconds of kernels, and of copies of one tile or part each. */
typedef struct SpeedStep {
    uint32_t n_layers;
    double layer_sec, past_sec; /* kernels of a layer: products; attention over the past */
    double head_sec;
    uint32_t n_tiles, tile_slots; /* of a layer's past; 0: it is read where it is */
    double tile_copy_sec;
    uint32_t n_streamed_layers, n_parts; /* evenly spread; parts of each */
    double part_copy_sec;
    uint32_t n_head_parts, part_slots;
    double head_part_copy_sec;
} SpeedStep;

/* What of a step is copied after @depth tokens, the head with logits only; rates of tiles and of parts in bytes a second.  Kernels are the
 * caller's to fill in. */
SpeedStep speed_step(const ModelFit *fit, uint32_t depth, double tile_rate, double part_rate, bool logits);
static inline double speed_step_kernels(const SpeedStep *step)
{
    return step->head_sec + step->n_layers * (step->layer_sec + step->past_sec);
}
double speed_step_copies(const SpeedStep *step);
/* Seconds from one step to the next.  @beside: how fast kernels run while a copy is under way, 1: as alone, 0: not at all. */
double speed_schedule(const SpeedStep *step, double beside);
/* The other way round: @beside with which the step takes @sec, as near as can be. */
double speed_schedule_solve(const SpeedStep *step, double sec);
/* For a step whose copies alone take longer than its kernels: the share, up to 1, of their rate with which it takes @sec while kernels run as
 * if alone.  1 for other steps. */
double speed_schedule_solve_rate(const SpeedStep *step, double sec);
/* The same step with copies at a share of their rate. */
SpeedStep speed_step_slower(const SpeedStep *step, double share);

/* Seconds of kernels that a past of @depth tokens costs a token and layer beyond what it costs after the first ones. */
double speed_past(const ModelSpeed *speed, double depth);
/* Between the two measured ones around @depth; nothing is lost where none were. */
ModelLink speed_link(const ModelLink *links, uint64_t n_links, double depth);
