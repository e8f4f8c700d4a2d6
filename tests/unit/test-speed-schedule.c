/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule of a streaming step, against sums by hand.  Tolerance 1e-9 of the sum where steps repeat exactly, else as stated. */

#include "daemon/model/speed-schedule.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* Ten layers: 2 ms of products and 1 ms of attention each, and a head of 5 ms: 35 ms. */
static SpeedStep usual_step(void)
{
    return (SpeedStep){.n_layers = 10, .layer_sec = 0.002, .past_sec = 0.001, .head_sec = 0.005, .tile_slots = 2, .part_slots = 2};
}

static void assert_takes(const SpeedStep *step, double beside, double sec, double tolerance)
{
    double got = speed_schedule(step, beside);

    if (fabs(got - sec) > tolerance * sec)
        fail_msg("%.6f s, not %.6f", got, sec);
}

static void kernels_alone_follow_each_other(void **state)
{
    SpeedStep step = usual_step();

    (void)state;
    assert_takes(&step, 0.5, 0.035, 1e-9);
    assert_true(fabs(speed_step_kernels(&step) - 0.035) < 1e-12 && speed_step_copies(&step) == 0);
}

static void copies_that_are_shorter_hide_behind_kernels(void **state)
{
    SpeedStep step = usual_step();

    (void)state;
    step.n_tiles = 1;
    step.tile_copy_sec = 0.002;
    assert_takes(&step, 1, 0.035, 1e-9);
    assert_takes(&step, 0.75, 0.04, 1e-9); /* 20 ms of copies cost a quarter of that */
    assert_takes(&step, 0, 0.055, 1e-9);   /* nothing hides */
}

static void copies_that_are_longer_take_the_time(void **state)
{
    SpeedStep step = usual_step();

    (void)state;
    step.n_tiles = 4;
    step.tile_copy_sec = 0.002;
    /* Two tiles arrive while the head and the first products run; the third one's copy waits for the launch that reads the first. */
    assert_takes(&step, 1, 0.08 + 0.0035, 1e-9);
    step.n_tiles = 0;
    step.n_streamed_layers = 10;
    step.n_parts = 2;
    step.part_copy_sec = 0.004;
    step.n_head_parts = 3;
    step.head_part_copy_sec = 0.005;
    assert_takes(&step, 1, 0.095, 1e-9);
    step.n_tiles = 1;
    step.tile_copy_sec = 0.001;
    assert_takes(&step, 1, 0.105, 0.05); /* both rings on one link; a tile may wait behind parts */
}

/* The copy waits for the launch that reads, and the launch for the copy: products alone run beside it. */
static void one_slot_hides_less(void **state)
{
    SpeedStep step = usual_step();

    (void)state;
    step.tile_slots = 1;
    step.n_tiles = 1;
    step.tile_copy_sec = 0.0015;
    assert_takes(&step, 1, 0.035, 1e-9);
    step.tile_copy_sec = 0.003;
    assert_takes(&step, 1, 9 * 0.004 + 0.008, 1e-9); /* behind the head and products of the first layer more is hidden */
    step.tile_slots = 2;
    assert_takes(&step, 1, 0.035, 0.03);
}

static void some_layers_that_stream_are_spread_among_those_that_stay(void **state)
{
    SpeedStep step = usual_step();

    (void)state;
    step.n_streamed_layers = 5;
    step.n_parts = 1;
    step.part_copy_sec = 0.0059;
    assert_takes(&step, 1, 0.035, 1e-9); /* each has two layers' time */
    step.n_streamed_layers = 1;
    step.part_copy_sec = 0.05;
    assert_takes(&step, 1, 0.05, 1e-9);
}

static void what_kernels_lose_beside_copies_is_found_again(void **state)
{
    SpeedStep step = usual_step();

    (void)state;
    step.n_tiles = 2;
    step.tile_copy_sec = 0.001;
    for (double beside = 0; beside <= 1; beside += 0.125)
        assert_true(fabs(speed_schedule_solve(&step, speed_schedule(&step, beside)) - beside) < 1e-4);
    assert_true(speed_schedule_solve(&step, 0.01) > 0.9999); /* faster than can be */
    assert_true(speed_schedule_solve(&step, 1) < 1e-4);
}

static void what_copies_lose_beside_kernels_is_found_again(void **state)
{
    SpeedStep step = usual_step(), slower;

    (void)state;
    step.n_streamed_layers = 10;
    step.n_parts = 1;
    step.part_copy_sec = 0.004;
    slower = step;
    slower.part_copy_sec = 0.008;
    assert_true(fabs(speed_schedule_solve_rate(&step, speed_schedule(&slower, 1)) - 0.5) < 1e-4);
    assert_true(speed_schedule_solve_rate(&step, 0.01) > 0.9999);
    step.part_copy_sec = 0.003; /* hidden: how long it took says nothing of copies */
    assert_true(speed_schedule_solve_rate(&step, 1) > 0.9999);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_alone_follow_each_other),
        cmocka_unit_test(copies_that_are_shorter_hide_behind_kernels),
        cmocka_unit_test(copies_that_are_longer_take_the_time),
        cmocka_unit_test(one_slot_hides_less),
        cmocka_unit_test(some_layers_that_stream_are_spread_among_those_that_stay),
        cmocka_unit_test(what_kernels_lose_beside_copies_is_found_again),
        cmocka_unit_test(what_copies_lose_beside_kernels_is_found_again),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
