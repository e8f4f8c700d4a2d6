/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layers of every kind in one store, and everything that their caches do, on the simulated small GPU, while one thing fails:
 * tests/lib/fault-cases.h.
 */

#include "tests/lib/fault-cases.h"
#include "tests/lib/fault-rig.h"
#include "tests/lib/sim-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_ROWS = 160, N_PROMPT = 300, N_ENCODER = 50 };

/* ---- scripts ------------------------------------------------------------------------------------------------------- */

/* Two sequences in a pass at most: tails and states of others are saved in host memory meanwhile. */
static const ScriptOp whole[] = {
    {SCRIPT_ENCODE, 0, 0, N_ENCODER}, {SCRIPT_FORWARD, 0, 0, N_PROMPT}, {SCRIPT_CHECKPOINT, 0, 0, 0}, {SCRIPT_FORWARD, 0, 0, 1},
    {SCRIPT_FORK, 0, 1, 0},           {SCRIPT_DECODE, 0, 0, 3},         {SCRIPT_FORWARD, 1, 0, 40},   {SCRIPT_CROP, 1, 0, 310},
    {SCRIPT_DECODE, 0, 0, 3},         {SCRIPT_RECORD, 0, 0, 0},         {SCRIPT_FORWARD, 0, 0, 3},    {SCRIPT_TAKE_BACK, 0, 0, 2},
    {SCRIPT_DECODE, 0, 0, 3},         {SCRIPT_SAVE, 0, 0, 0},           {SCRIPT_RESTORE, 0, 2, 0},    {SCRIPT_DECODE, 0, 0, 5},
    {SCRIPT_MOVE, 0, 0, 0},           {SCRIPT_DECODE, 0, 0, 6},         {SCRIPT_MOVE, 0, 0, 0},       {SCRIPT_DROP, 2, 0, 0},
    {SCRIPT_SELECT, 2, 0, 4},         {SCRIPT_DECODE, 0, 0, 9},         {SCRIPT_REORDER, 0, 0, 4},    {SCRIPT_DECODE, 0, 0, 6},
    {SCRIPT_CLEAR, 3, 0, 0},          {SCRIPT_ENCODE, 3, 0, 7},         {SCRIPT_FORWARD, 3, 0, 70},   {SCRIPT_DECODE, 0, 0, 9},
};
/* Without encoder output. */
static const ScriptOp plain[] = {
    {SCRIPT_FORWARD, 0, 0, N_PROMPT}, {SCRIPT_CHECKPOINT, 0, 0, 0}, {SCRIPT_RECORD, 0, 0, 0},     {SCRIPT_FORWARD, 0, 0, 3},
    {SCRIPT_FORK, 0, 1, 0},           {SCRIPT_DECODE, 0, 0, 3},     {SCRIPT_TAKE_BACK, 0, 0, 2},  {SCRIPT_CROP, 1, 0, 301},
    {SCRIPT_DECODE, 0, 0, 3},         {SCRIPT_SAVE, 1, 0, 0},       {SCRIPT_MOVE, 0, 0, 0},       {SCRIPT_RESTORE, 1, 2, 0},
    {SCRIPT_DECODE, 0, 0, 6},         {SCRIPT_REORDER, 0, 0, 2},    {SCRIPT_DECODE, 0, 0, 5},     {SCRIPT_MOVE, 0, 0, 0},
    {SCRIPT_SELECT, 3, 0, 2},         {SCRIPT_DECODE, 0, 0, 3},
};

/* Keys are wider than values in all but the chunked layer; the second keeps a state beside its keys, the last nothing else. */
static const RandomConfig mixed = {
    .n_layers = 6,
    .layers = {{.kind = RANDOM_FULL, .shape = 1},
               {.kind = RANDOM_SLIDING, .window = 33, .shape = 1, .state = true},
               {.kind = RANDOM_CHUNKED, .window = 64, .form = FAULT_OWN_FORM(FAULT_FORM_F16)},
               {.kind = RANDOM_CROSS, .shape = 1},
               {.kind = RANDOM_SHARED, .source = 1},
               {.kind = RANDOM_NONE, .state = true}},
    .form = FAULT_FORM_LEAT,
    .exact = true,
    .calibrated = true,
    .home = KV_HOME_HOST,
    .transfer = KV_TRANSFER_COPY,
    .n_slots = 2,
    .tile_blocks = 1,
    .max_tokens = SCRIPT_TOKENS,
    .max_sequences = 2,
};

/* Windows stay on the device unquantised, what keeps everything streams. */
static const RandomConfig stays = {
    .n_layers = 4,
    .layers = {{.kind = RANDOM_SLIDING, .window = 33, .shape = 1},
               {.kind = RANDOM_FULL, .shape = 1, .state = true},
               {.kind = RANDOM_CHUNKED, .window = 64, .shape = 1},
               {.kind = RANDOM_SHARED, .source = 1}},
    .form = FAULT_FORM_F16,
    .calibrated = true,
    .growth = KV_GROWTH_STATIC,
    .home = KV_HOME_HOST,
    .only_non_sliding = true,
    .transfer = KV_TRANSFER_COPY,
    .n_slots = 3,
    .tile_blocks = 1,
    .max_tokens = SCRIPT_TOKENS,
    .max_sequences = 2,
};

static const char *const shape_names[] = {"mixed", "stays"};

static ScriptShape shape_of(const char *name)
{
    ScriptShape shape = {.name = name, .options = {.max_rows = MAX_ROWS, .max_sequences = 2}, .deadline_usec = 120000000};

    if (strcmp(name, "mixed") == 0) {
        shape.layers[0] = shape.layers[1] = mixed;
        shape.layers[1].growth = KV_GROWTH_STATIC;
        shape.layers[1].home = KV_HOME_DEVICE;
        shape.ops = whole;
        shape.n_ops = N_ELEMENTS(whole);
    } else {
        shape.layers[0] = shape.layers[1] = stays;
        shape.layers[1].growth = KV_GROWTH_DYNAMIC;
        shape.layers[1].n_slots = 1;
        shape.layers[1].device_more_kib = 200;
        shape.ops = plain;
        shape.n_ops = N_ELEMENTS(plain);
    }
    return shape;
}

/* ---- tests --------------------------------------------------------------------------------------------------------- */

static void each_shape(const char *kind, const char *settings)
{
    fault_cases_run_well(kind, shape_names, N_ELEMENTS(shape_names), settings);
}

static void what_is_refused_changes_nothing(void **state)
{
    (void)state;
    each_shape("refusals", FAULT_RIG_DEVICE);
}

static void a_failing_call_is_told_and_the_next_run_is_right(void **state)
{
    (void)state;
    each_shape("every_call", FAULT_RIG_DEVICE);
}

static void every_place_with_every_code(void **state)
{
    (void)state;
    each_shape("every_site", FAULT_RIG_DEVICE);
}

static void every_refused_allocation(void **state)
{
    (void)state;
    each_shape("every_allocation", FAULT_RIG_DEVICE);
}

static void every_command_that_fails_later(void **state)
{
    (void)state;
    each_shape("every_event", FAULT_RIG_LATER);
}

static void a_device_that_does_not_answer_is_left_and_the_next_run_is_right(void **state)
{
    (void)state;
    sim_rig_run_well("stalls-mixed", FAULT_RIG_STALLS " CLSIM_MEMORY=512M"); /* those that hang keep theirs */
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_refused_changes_nothing),
        cmocka_unit_test(a_failing_call_is_told_and_the_next_run_is_right),
        cmocka_unit_test(every_place_with_every_code),
        cmocka_unit_test(every_refused_allocation),
        cmocka_unit_test(every_command_that_fails_later),
        cmocka_unit_test(a_device_that_does_not_answer_is_left_and_the_next_run_is_right),
    };

    if (fault_cases_is_scenario(argc, argv, shape_of))
        return EXIT_SUCCESS;
    fault_rig_begin();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
