/* SPDX-License-Identifier: Apache-2.0 */
/* A toy model and everything that its caches do, on the simulated small GPU, while one thing fails: tests/lib/fault-cases.h. */

#include "tests/lib/fault-cases.h"
#include "tests/lib/fault-rig.h"
#include "tests/lib/sim-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_ROWS = 160, N_PROMPT = 264 }; /* a whole block and a few tokens */

/* ---- scripts ------------------------------------------------------------------------------------------------------- */

static const ScriptOp whole[] = {
    {SCRIPT_FORWARD, 0, 0, N_PROMPT}, {SCRIPT_CHECKPOINT, 0, 0, 0}, {SCRIPT_FORWARD, 0, 0, 1},  {SCRIPT_FORK, 0, 1, 0},
    {SCRIPT_DECODE, 0, 0, 3},         {SCRIPT_FORWARD, 1, 0, 28},   {SCRIPT_CROP, 1, 0, 282},   {SCRIPT_DECODE, 0, 0, 3},
    {SCRIPT_RECORD, 0, 0, 0},         {SCRIPT_FORWARD, 0, 0, 2},    {SCRIPT_TAKE_BACK, 0, 0, 1}, {SCRIPT_DECODE, 0, 0, 3},
    {SCRIPT_SAVE, 0, 0, 0},           {SCRIPT_RESTORE, 0, 2, 0},    {SCRIPT_DECODE, 0, 0, 7},   {SCRIPT_MIGRATE, 0, 0, 0},
    {SCRIPT_DECODE, 0, 0, 7},         {SCRIPT_MIGRATE, 0, 0, 0},    {SCRIPT_DROP, 2, 0, 0},     {SCRIPT_SELECT, 2, 0, 4},
    {SCRIPT_DECODE, 0, 0, 15},        {SCRIPT_REORDER, 0, 0, 4},    {SCRIPT_DECODE, 0, 0, 15},  {SCRIPT_CLEAR, 3, 0, 0},
    {SCRIPT_FORWARD, 3, 0, 40},       {SCRIPT_DECODE, 0, 0, 9},
};
static const ScriptOp plain[] = {
    {SCRIPT_FORWARD, 0, 0, N_PROMPT}, {SCRIPT_FORWARD, 0, 0, 1}, {SCRIPT_FORK, 0, 1, 0}, {SCRIPT_DECODE, 0, 0, 3}, {SCRIPT_DECODE, 0, 0, 3},
};

#define OPS(array) .ops = (array), .n_ops = N_ELEMENTS(array)

/* The cache's ring is small, so that a layer takes several tiles. */
static KvPolicy policy_of(KvStrategy strategy)
{
    KvPolicy policy = kv_policy_preset(strategy, false);

    policy.tile_blocks = 1;
    return policy;
}

static const char *const shape_names[] = {"streamed", "resident", "weights"};

static ScriptShape shape_of(const char *name)
{
    ScriptShape shape = {.name = name, .options = {.max_rows = MAX_ROWS, .max_sequences = SCRIPT_CACHES}, .deadline_usec = 120000000};

    if (strcmp(name, "streamed") == 0) {
        shape.file = "tiny-llama-tied.gguf";
        shape.policy = policy_of(KV_STRATEGY_OFFLOADED_QUANTIZED);
        shape.other = policy_of(KV_STRATEGY_QUANTIZED);
        shape.other.form = shape.policy.form;
        shape.has_other = true;
    } else if (strcmp(name, "resident") == 0) {
        shape.file = "tiny-llama-tied.gguf";
        shape.policy = policy_of(KV_STRATEGY_STATIC);
        shape.policy.max_cache_tokens = SCRIPT_TOKENS;
        shape.other = policy_of(KV_STRATEGY_OFFLOADED);
        shape.has_other = true;
    } else {
        shape.file = "tiny-llama-mixed.gguf";
        shape.options.weights = (ModelWeights){.budget_bytes = 50000, .n_slots = 2};
        shape.policy = policy_of(KV_STRATEGY_OFFLOADED_QUANTIZED);
        shape = (ScriptShape){shape.name, shape.file, shape.options, shape.deadline_usec, shape.policy, shape.other, false, OPS(plain)};
    }
    if (!shape.ops) {
        shape.ops = whole;
        shape.n_ops = N_ELEMENTS(whole);
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
    sim_rig_run_well("stalls-streamed", FAULT_RIG_STALLS);
    sim_rig_run_well("stalls-weights", FAULT_RIG_STALLS);
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
