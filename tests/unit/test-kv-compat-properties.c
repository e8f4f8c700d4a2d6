/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compatibility caches: the properties of the cache semantics, section 13.3, a case for each row, named after it.  Every forward of
 * every case is compared with a model that keeps everything, bit for bit (tests/lib/compat-sim.h).
 */

#include "tests/lib/compat-sim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#define SEED 20260u

static const SimLayer full = {.spec = {.kind = KV_COMPAT_DYNAMIC}};
static const SimLayer fixed = {.spec = {.kind = KV_COMPAT_STATIC, .max_tokens = SIM_MAX_TOKENS}};
static const SimLayer linear = {.spec = {.linear = true}};
static const SimLayer hybrid = {.spec = {.kind = KV_COMPAT_DYNAMIC, .linear = true}};

static SimLayer windowed(bool is_static, uint32_t window, bool chunked)
{
    return (SimLayer){.spec = {.kind = is_static ? KV_COMPAT_STATIC_SLIDING : KV_COMPAT_SLIDING,
                               .window = window,
                               .max_tokens = is_static ? SIM_MAX_TOKENS : 0},
                      .chunked = chunked};
}

typedef struct Random {
    uint32_t state;
} Random;

static uint32_t roll(Random *random, uint32_t n)
{
    random->state = random->state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)random->state * n) >> 32);
}

/* Every kind of layer once; @round changes windows and order. */
static uint32_t all_kinds(uint32_t round, bool croppable, SimLayer *ret)
{
    static const uint32_t windows[] = {1, 2, 3, 5, 8, 40};
    uint32_t w = windows[round % N_ELEMENTS(windows)], n = 0;

    ret[n++] = round % 2 ? full : hybrid;
    ret[n++] = windowed(false, w, round % 3 == 0);
    ret[n++] = linear;
    ret[n++] = fixed;
    if (!croppable)
        ret[n++] = windowed(true, w, round % 3 == 1);
    ret[n++] = (SimLayer){0};
    return n;
}

static void feed_in_chunks(Sim *sim, Random *random, uint32_t until)
{
    while (sim->length < until)
        sim_feed(sim, MIN(until - sim->length, 1 + roll(random, roll(random, 2) ? 3 : 20)), 1);
}

static void property_1_any_chunking_gives_the_same_outputs_and_mask_sizes_hold(void **state)
{
    Random random = {SEED};

    (void)state;
    for (uint32_t round = 0; round < 24; round++) {
        SimLayer layers[SIM_MAX_LAYERS];
        Sim sim;

        sim_init(&sim, layers, all_kinds(round, false, layers), 1 + round % 3);
        for (uint32_t b = 0; b < sim.n_rows; b++) /* left padding moves the borders of chunks */
            sim.padding[b] = roll(&random, 7);
        if (round % 4 == 3)
            sim_record(&sim);
        feed_in_chunks(&sim, &random, SIM_MAX_TOKENS / 2);
        sim_deinit(&sim);
    }
}

static void property_2_static_equals_dynamic_and_a_wide_window_equals_full(void **state)
{
    Random random = {SEED + 1};
    SimLayer layers[] = {full, fixed, windowed(false, SIM_MAX_TOKENS, false), windowed(true, SIM_MAX_TOKENS, false)};
    Sim sim;

    (void)state;
    sim_init(&sim, layers, N_ELEMENTS(layers), 2);
    /* Each is compared with its own mask; so that these agree: */
    for (uint64_t a = 0; a < SIM_MAX_TOKENS; a++)
        for (uint64_t k = 0; k < SIM_MAX_TOKENS; k++)
            assert_int_equal(kv_mask_sees(&(KvMask){.kind = KV_MASK_CAUSAL}, 0, a, k),
                             kv_mask_sees(&(KvMask){.kind = KV_MASK_SLIDING, .window = SIM_MAX_TOKENS}, 0, a, k));
    feed_in_chunks(&sim, &random, SIM_MAX_TOKENS);
    sim_deinit(&sim);
}

static void property_3_crop_and_feeding_again_is_as_if_never_cropped(void **state)
{
    Random random = {SEED + 2};

    (void)state;
    for (uint32_t round = 0; round < 30; round++) {
        SimLayer layers[SIM_MAX_LAYERS];
        Sim sim, before;

        sim_init(&sim, layers, all_kinds(round, true, layers), 2);
        sim_record(&sim);
        while (sim.length < SIM_MAX_TOKENS - 24) {
            uint32_t n = 1 + roll(&random, 12), back = roll(&random, n + 1);

            sim_feed(&sim, n, round);
            sim_copy(&sim, &before);
            assert_int_equal(sim_crop(&sim, -(int64_t)back), 0);
            if (back > 0)
                sim_feed_again(&sim, &before, back);
            sim_deinit(&before);
            assert_int_equal(sim_crop(&sim, 0), 0);
        }
        sim_deinit(&sim);
    }
}

static void property_3_a_rejected_draft_leaves_no_trace_even_in_recurrent_states(void **state)
{
    SimLayer layers[] = {linear, hybrid, windowed(false, 4, false)};
    Random random = {SEED + 3};
    Sim sim;

    (void)state;
    sim_init(&sim, layers, N_ELEMENTS(layers), 1);
    sim_record(&sim);
    sim_feed(&sim, 9, 0);
    assert_int_equal(sim_crop(&sim, 0), 0);
    for (uint32_t round = 0; round < 20; round++) {
        uint32_t drafted = 1 + roll(&random, 5), matched = roll(&random, drafted);

        sim_feed(&sim, drafted, 100 + round); /* wrong from the first that is rejected */
        assert_int_equal(sim_crop(&sim, -(int64_t)(drafted - matched)), 0);
        sim_feed(&sim, 1, 200 + round);
    }
    sim_deinit(&sim);
}

static void property_4_crop_0_never_changes_the_next_output(void **state)
{
    Random random = {SEED + 4};

    (void)state;
    for (uint32_t round = 0; round < 12; round++) {
        SimLayer layers[SIM_MAX_LAYERS];
        Sim sim;

        sim_init(&sim, layers, all_kinds(round, false, layers), 1);
        sim_record(&sim);
        while (sim.length < SIM_MAX_TOKENS - 24) {
            sim_feed(&sim, 1 + roll(&random, 9), round);
            assert_int_equal(sim_crop(&sim, 0), 0);
        }
        sim_deinit(&sim);
    }
}

static void property_5_a_permutation_and_its_inverse_are_the_identity(void **state)
{
    static const uint32_t there[] = {2, 0, 3, 1}, back[] = {1, 3, 0, 2};
    SimLayer layers[SIM_MAX_LAYERS];
    Sim sim, before;

    (void)state;
    for (uint32_t round = 0; round < 12; round++) {
        sim_init(&sim, layers, all_kinds(round, false, layers), 4);
        sim_feed(&sim, 7 + round, 1);
        sim_copy(&sim, &before);
        assert_int_equal(sim_select(&sim, there, 4), 0);
        sim_feed(&sim, 2, 2);
        sim_deinit(&sim);
        sim_copy(&before, &sim);
        assert_int_equal(sim_select(&sim, there, 4), 0);
        assert_int_equal(sim_select(&sim, back, 4), 0);
        assert_memory_equal(sim.ids, before.ids, sizeof(sim.ids));
        sim_feed(&sim, 3, 3);
        sim_deinit(&sim);
        sim_deinit(&before);
    }
}

static void property_5_reorder_with_repeats_equals_separate_runs(void **state)
{
    Random random = {SEED + 5};

    (void)state;
    for (uint32_t round = 0; round < 16; round++) {
        SimLayer layers[SIM_MAX_LAYERS];
        Sim sim;

        sim_init(&sim, layers, all_kinds(round, false, layers), 3);
        if (round % 2)
            sim_record(&sim);
        sim_feed(&sim, 5, 0);
        for (uint32_t step = 1; step < 12; step++) {
            uint32_t rows[3] = {roll(&random, 3), roll(&random, 3), roll(&random, 3)};

            assert_int_equal(sim_select(&sim, rows, 3), 0);
            sim_feed(&sim, 1 + roll(&random, 3), step);
        }
        sim_deinit(&sim);
    }
}

static void property_6_reset_then_reuse_is_a_fresh_cache(void **state)
{
    SimLayer layers[SIM_MAX_LAYERS];
    Random random = {SEED + 6};
    Sim sim;

    (void)state;
    for (uint32_t round = 0; round < 12; round++) {
        sim_init(&sim, layers, all_kinds(round, false, layers), 3);
        for (uint32_t use = 0; use < 3; use++) {
            sim.n_rows = 3 - use; /* fewer rows each time, static layers too */
            feed_in_chunks(&sim, &random, 10 + roll(&random, 30));
            sim_reset(&sim);
        }
        sim_deinit(&sim);
    }
}

static void property_7_copies_do_not_influence_each_other(void **state)
{
    SimLayer layers[SIM_MAX_LAYERS];
    Sim first, second, third;

    (void)state;
    for (uint32_t round = 0; round < 12; round++) {
        sim_init(&first, layers, all_kinds(round, false, layers), 2);
        if (round % 2)
            sim_record(&first);
        sim_feed(&first, 6 + round, 1);
        sim_copy(&first, &second);
        sim_copy(&second, &third);
        for (uint32_t step = 0; step < 9; step++) {
            sim_feed(&second, 1 + step % 3, 10 + step);
            sim_feed(&first, 2, 20 + step);
            sim_feed(&third, 1, 30 + step);
        }
        sim_deinit(&second);
        sim_feed(&third, 3, 40);
        sim_deinit(&first);
        sim_feed(&third, 3, 41);
        sim_deinit(&third);
    }
}

static void refuses(int r)
{
    assert_true(r > 0);
}

/* Whatever is refused, the next forward is what it would have been. */
static void property_8_a_failure_leaves_lengths_and_outputs_unchanged(void **state)
{
    SimLayer layers[] = {full, windowed(false, 4, false), {.spec = {.kind = KV_COMPAT_STATIC, .max_tokens = 24}}, linear,
                         windowed(true, 3, true)};
    static const uint32_t bad[] = {0, 2}, odd[] = {0, 0, 0};
    static float values[2 * 2 * 40 * 4];
    KvTensor k = {values, 2, 2, 1, 4, 1}, v = {values, 2, 2, 1, 3, 1}, got_k, got_v;
    Sim sim, before;

    (void)state;
    sim_init(&sim, layers, N_ELEMENTS(layers), 2);
    for (uint32_t round = 0; round < 2; round++) {
        for (uint32_t step = 0; step < 4; step++) {
            sim_feed(&sim, 1 + step, step);
            refuses(sim_crop(&sim, 1));
            refuses(sim_crop(&sim, -(int64_t)sim.length - 1));
            if (!sim.recording)
                refuses(sim_crop(&sim, -1)); /* of the linear layer */
            refuses(sim_crop(&sim, INT64_MIN));
            refuses(kv_compat_reorder(sim.cache, bad, 2, NULL));
            refuses(kv_compat_reorder(sim.cache, odd, 3, NULL));
            refuses(kv_compat_select(sim.cache, bad, 0, NULL));
            refuses(kv_compat_repeat(sim.cache, 0, NULL));
            refuses(kv_compat_repeat(sim.cache, UINT32_MAX, NULL));
            for (uint32_t l = 0; l < N_ELEMENTS(layers); l++) {
                k.n_rows = v.n_rows = 1;
                if (layers[l].spec.kind != KV_COMPAT_DUMMY)
                    refuses(kv_compat_update(sim.cache, l, &k, &v, &got_k, &got_v, NULL));
                k.n_rows = 2;
                v.n_rows = 1;
                refuses(kv_compat_update(sim.cache, l, &k, &v, &got_k, &got_v, NULL));
                k.n_tokens = 0;
                refuses(kv_compat_update(sim.cache, l, &k, &v, &got_k, &got_v, NULL));
                k.n_tokens = 1;
                v.n_rows = 2;
            }
            k.n_tokens = v.n_tokens = 40;
            k.head_tokens = v.head_tokens = 40;
            refuses(kv_compat_update(sim.cache, 2, &k, &v, &got_k, &got_v, NULL));
            k.n_tokens = v.n_tokens = k.head_tokens = v.head_tokens = 1;
            refuses(kv_compat_update(sim.cache, 9, &k, &v, &got_k, &got_v, NULL));
        }
        sim_copy(&sim, &before);
        sim_feed(&sim, 1, 50);
        sim_deinit(&before);
        sim_reset(&sim);
        if (round == 0) {
            sim_record(&sim);
            sim_feed(&sim, 6, 8);
            assert_int_equal(sim_crop(&sim, 0), 0);
        }
    }
    sim_deinit(&sim);
}

static void property_8_a_crop_that_one_layer_refuses_crops_no_layer(void **state)
{
    SimLayer layers[] = {full, fixed, windowed(true, 5, false), windowed(false, 3, false), hybrid};
    Sim sim;

    (void)state;
    sim_init(&sim, layers, N_ELEMENTS(layers), 1);
    sim_record(&sim);
    sim_feed(&sim, 12, 1);
    refuses(sim_crop(&sim, -4)); /* the static window of 5 kept 5 */
    sim_feed(&sim, 1, 2);
    assert_int_equal(sim_crop(&sim, -1), 0); /* of which it can spare one */
    sim_feed(&sim, 2, 3);
    assert_int_equal(sim_crop(&sim, -1), 0);
    refuses(sim_crop(&sim, -1));
    sim_feed(&sim, 1, 4);
    sim_deinit(&sim);
}

static void property_10_offload_choices_with_0_1_and_2_layers_that_move(void **state)
{
    SimLayer dummy = {.chunked = false}, window = windowed(false, 4, false);
    SimLayer sets[3][3] = {{linear, window, dummy}, {linear, full, window}, {full, linear, hybrid}};

    (void)state;
    for (uint32_t n = 0; n < 3; n++) {
        Sim sim;
        uint32_t n_moving = 0;
        int32_t at = 0;

        sim_init(&sim, sets[n], 3, 1);
        for (uint32_t i = 0; i < 3; i++)
            n_moving += sets[n][i].spec.kind == KV_COMPAT_DYNAMIC;
        assert_int_equal(n_moving, n);
        for (uint32_t i = 0; i < 6; i++) { /* the chain visits those that move, in order, and no other */
            at = kv_compat_next_offloadable(sim.cache, (uint32_t)MAX(at, 0), true);
            assert_true(n > 0 ? sets[n][at].spec.kind == KV_COMPAT_DYNAMIC : at == -1);
        }
        sim_feed(&sim, 5, 1);
        sim_deinit(&sim);
    }
}

/* All of the above at once, at random. */
static void random_programs_agree_with_the_model_that_keeps_everything(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 150; round++) {
        Random random = {SEED + 100 + round};
        SimLayer layers[SIM_MAX_LAYERS];
        Sim sim;

        sim_init(&sim, layers, all_kinds(round, roll(&random, 2), layers), 1 + roll(&random, 3));
        for (uint32_t b = 0; b < sim.n_rows; b++)
            sim.padding[b] = roll(&random, 5);
        for (uint32_t step = 0; step < 25; step++) {
            uint32_t what = roll(&random, 10);

            if (what == 0) {
                sim_record(&sim);
            } else if (what == 1 && sim.n_rows > 1) {
                uint32_t rows[SIM_MAX_ROWS], n = 1 + roll(&random, 4);

                for (uint32_t i = 0; i < n; i++)
                    rows[i] = roll(&random, sim.n_rows);
                if (sim.length > 0)
                    assert_int_equal(sim_select(&sim, rows, n), 0);
            } else if (what <= 3 && sim.length > 0) {
                (void)sim_crop(&sim, -(int64_t)roll(&random, MIN(sim.length + 1, 9u))); /* refused or exact */
            } else if (what == 4 && roll(&random, 4) == 0) {
                sim_reset(&sim);
            } else if (sim.length < SIM_MAX_TOKENS - 8) {
                sim_feed(&sim, 1 + roll(&random, 8), step);
            }
        }
        sim_deinit(&sim);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(property_1_any_chunking_gives_the_same_outputs_and_mask_sizes_hold),
        cmocka_unit_test(property_2_static_equals_dynamic_and_a_wide_window_equals_full),
        cmocka_unit_test(property_3_crop_and_feeding_again_is_as_if_never_cropped),
        cmocka_unit_test(property_3_a_rejected_draft_leaves_no_trace_even_in_recurrent_states),
        cmocka_unit_test(property_4_crop_0_never_changes_the_next_output),
        cmocka_unit_test(property_5_a_permutation_and_its_inverse_are_the_identity),
        cmocka_unit_test(property_5_reorder_with_repeats_equals_separate_runs),
        cmocka_unit_test(property_6_reset_then_reuse_is_a_fresh_cache),
        cmocka_unit_test(property_7_copies_do_not_influence_each_other),
        cmocka_unit_test(property_8_a_failure_leaves_lengths_and_outputs_unchanged),
        cmocka_unit_test(property_8_a_crop_that_one_layer_refuses_crops_no_layer),
        cmocka_unit_test(property_10_offload_choices_with_0_1_and_2_layers_that_move),
        cmocka_unit_test(random_programs_agree_with_the_model_that_keeps_everything),
    };

    printf("seed %u, exact\n", SEED);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
