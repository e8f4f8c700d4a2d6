/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule of a streaming step. */

#include "daemon/model/speed-schedule.h"
#include "daemon/model/placement.h"

/* Steps until what they begin with no longer counts; the last two are timed. */
#define N_STEPS   6
#define MAX_SLOTS PLACEMENT_MAX_SLOTS /* of either ring */
#define MAX_BUSY  (4 * MAX_SLOTS) /* as many as the rings hold, and some that have ended */

/* Tiles or parts, counted over all steps. */
typedef struct Ring {
    uint32_t n_slots;
    uint64_t n_queued, n_read;
    double arrived[MAX_SLOTS], read[MAX_SLOTS]; /* by slot */
} Ring;

typedef struct Schedule {
    const SpeedStep *step;
    double beside, time;
    double link_free; /* when the last copy that is queued will have ended */
    struct {
        double begin, end;
    } busy[MAX_BUSY]; /* copies [first_busy, n_busy), by number: those that may not have ended */
    uint64_t first_busy, n_busy;
    Ring tiles, parts;
} Schedule;

/* ---- copies ------------------------------------------------------------------------------------------------------------------ */

static uint64_t step_parts(const SpeedStep *step)
{
    return (uint64_t)step->n_streamed_layers * step->n_parts + step->n_head_parts;
}

static double copy_sec(const Schedule *schedule, const Ring *ring, uint64_t number)
{
    const SpeedStep *step = schedule->step;

    if (ring == &schedule->tiles)
        return step->tile_copy_sec;
    return number % step_parts(step) < (uint64_t)step->n_streamed_layers * step->n_parts ? step->part_copy_sec : step->head_part_copy_sec;
}

static void queue_copies(Schedule *schedule, Ring *ring, uint64_t end)
{
    for (; ring->n_queued < end; ring->n_queued++) {
        uint32_t slot = (uint32_t)(ring->n_queued % ring->n_slots);
        double begin = MAX(schedule->link_free, ring->read[slot]);

        schedule->link_free = ring->arrived[slot] = begin + copy_sec(schedule, ring, ring->n_queued);
        schedule->busy[schedule->n_busy % MAX_BUSY].begin = begin;
        schedule->busy[schedule->n_busy++ % MAX_BUSY].end = schedule->link_free;
    }
}

/* ---- kernels ----------------------------------------------------------------------------------------------------------------- */

static void run_kernel(Schedule *schedule, double sec)
{
    for (; schedule->first_busy < schedule->n_busy; schedule->first_busy++) {
        double begin = schedule->busy[schedule->first_busy % MAX_BUSY].begin, end = schedule->busy[schedule->first_busy % MAX_BUSY].end, done;

        if (end <= schedule->time)
            continue;
        if (begin >= schedule->time + sec)
            break;
        if (begin > schedule->time) {
            sec -= begin - schedule->time;
            schedule->time = begin;
        }
        done = (end - schedule->time) * schedule->beside;
        if (done >= sec) {
            schedule->time += sec > 0 ? sec / schedule->beside : 0;
            return;
        }
        sec -= done;
        schedule->time = end;
    }
    schedule->time += sec;
}

/* A launch that reads what a ring brings; its slot is filled again as soon as it has ended. */
static void run_reader(Schedule *schedule, Ring *ring, double sec)
{
    uint32_t slot = (uint32_t)(ring->n_read % ring->n_slots);

    queue_copies(schedule, ring, ring->n_read + 1);
    schedule->time = MAX(schedule->time, ring->arrived[slot]);
    run_kernel(schedule, sec);
    ring->read[slot] = schedule->time;
    ring->n_read++;
    queue_copies(schedule, ring, ring->n_read + ring->n_slots);
}

/* Products in @n_parts launches, or as one when nothing streams. */
static void run_products(Schedule *schedule, uint32_t n_parts, double sec)
{
    if (n_parts == 0)
        run_kernel(schedule, sec);
    for (uint32_t i = 0; i < n_parts; i++)
        run_reader(schedule, &schedule->parts, sec / n_parts);
}

static bool streams(const SpeedStep *step, uint32_t layer)
{
    uint64_t n = step->n_streamed_layers;

    return (layer + 1) * n / step->n_layers > layer * n / step->n_layers;
}

static void run_step(Schedule *schedule)
{
    const SpeedStep *step = schedule->step;

    for (uint32_t l = 0; l < step->n_layers; l++) {
        run_products(schedule, streams(step, l) ? step->n_parts : 0, step->layer_sec);
        if (step->n_tiles == 0)
            run_kernel(schedule, step->past_sec);
        for (uint32_t t = 0; t < step->n_tiles; t++)
            run_reader(schedule, &schedule->tiles, step->past_sec / step->n_tiles);
    }
    run_products(schedule, step->n_head_parts, step->head_sec);
}

/* ---- questions --------------------------------------------------------------------------------------------------------------- */

static uint32_t pieces(double bytes, double most)
{
    double n = most > 0 ? bytes / most : 1;

    return n <= 1 ? 1 : n >= 1e6 ? 1000000 : (uint32_t)n + ((double)(uint32_t)n < n);
}

SpeedStep speed_step(const ModelFit *fit, uint32_t depth, double tile_rate, double part_rate, bool logits)
{
    const ModelPlan *plan = &fit->plan;
    double layers = MAX(plan->n_layers, 1u), per_token = (double)plan->kv.host_bytes_per_token / layers;
    double past = (double)(model_streamed_bytes(fit, depth) - plan->weight_streamed_bytes) / layers;
    double head = logits ? (double)plan->weight_streamed_head_bytes : 0;
    double spans = (double)(plan->weight_streamed_bytes - plan->weight_streamed_head_bytes), slot = (double)plan->weight_slot_bytes;
    SpeedStep step = {.n_layers = plan->n_layers, .tile_slots = MIN(plan->kv.n_slots, (uint32_t)MAX_SLOTS),
                      .part_slots = MIN(plan->weight_slots, (uint32_t)MAX_SLOTS)};

    if (past > 0 && step.tile_slots > 0) {
        step.n_tiles = pieces(past, per_token * plan->kv.tile_blocks * (KV_BLOCK_PAGES * KV_PAGE_TOKENS));
        step.tile_copy_sec = past / step.n_tiles / tile_rate;
    }
    if (spans > 0 && step.part_slots > 0) {
        step.n_streamed_layers = MAX(plan->n_layers - MIN(plan->n_layers_resident, plan->n_layers), 1u);
        step.n_parts = pieces(spans / step.n_streamed_layers, slot);
        step.part_copy_sec = spans / step.n_streamed_layers / step.n_parts / part_rate;
    }
    if (head > 0 && step.part_slots > 0) {
        step.n_head_parts = pieces(head, slot);
        step.head_part_copy_sec = head / step.n_head_parts / part_rate;
    }
    return step;
}

double speed_step_copies(const SpeedStep *step)
{
    return step->n_layers * (step->n_tiles * step->tile_copy_sec) + step->n_streamed_layers * (step->n_parts * step->part_copy_sec) +
           step->n_head_parts * step->head_part_copy_sec;
}

double speed_schedule(const SpeedStep *step, double beside)
{
    Schedule schedule = {.step = step, .beside = beside, .tiles = {.n_slots = step->tile_slots}, .parts = {.n_slots = step->part_slots}};
    double begun = 0;

    if (step->n_tiles > 0)
        queue_copies(&schedule, &schedule.tiles, step->tile_slots);
    if (step_parts(step) > 0)
        queue_copies(&schedule, &schedule.parts, step->part_slots);
    for (uint32_t i = 0; i < N_STEPS; i++) {
        if (i == N_STEPS - 2)
            begun = schedule.time;
        run_step(&schedule);
    }
    return (schedule.time - begun) / 2;
}

double speed_schedule_solve(const SpeedStep *step, double sec)
{
    double low = 0, high = 1;

    for (uint32_t i = 0; i < 20; i++) {
        double middle = (low + high) / 2;

        if (speed_schedule(step, middle) > sec)
            low = middle;
        else
            high = middle;
    }
    return high;
}

SpeedStep speed_step_slower(const SpeedStep *step, double share)
{
    SpeedStep slower = *step;

    slower.tile_copy_sec /= share;
    slower.part_copy_sec /= share;
    slower.head_part_copy_sec /= share;
    return slower;
}

double speed_schedule_solve_rate(const SpeedStep *step, double sec)
{
    double low = 0.1, high = 1;

    if (speed_step_copies(step) <= speed_step_kernels(step))
        return 1;
    for (uint32_t i = 0; i < 20; i++) {
        double middle = (low + high) / 2;
        SpeedStep slower = speed_step_slower(step, middle);

        if (speed_schedule(&slower, 1) > sec)
            low = middle;
        else
            high = middle;
    }
    return high;
}

/* ---- between what was measured ------------------------------------------------------------------------------------------------ */

double speed_past(const ModelSpeed *speed, double depth)
{
    const ModelPast *past = speed->pasts;
    uint32_t n = (uint32_t)MIN(speed->n_pasts, (uint64_t)MODEL_SPEED_PASTS), i = 1;

    if (n < 2 || depth <= past[0].tokens)
        return 0;
    while (i + 1 < n && depth > past[i].tokens)
        i++;
    return past[i - 1].layer_sec + (depth - past[i - 1].tokens) * (past[i].layer_sec - past[i - 1].layer_sec) / (past[i].tokens - past[i - 1].tokens);
}

ModelLink speed_link(const ModelLink *links, uint64_t n_links, double depth)
{
    uint64_t i = 0;
    double t;

    if (n_links == 0)
        return (ModelLink){.share = 1, .beside = 1};
    while (i < n_links && links[i].tokens < depth)
        i++;
    if (i == 0 || i == n_links)
        return links[i == 0 ? 0 : n_links - 1];
    t = (depth - links[i - 1].tokens) / (links[i].tokens - links[i - 1].tokens);
    return (ModelLink){depth, links[i - 1].share + t * (links[i].share - links[i - 1].share),
                       links[i - 1].beside + t * (links[i].beside - links[i - 1].beside)};
}
