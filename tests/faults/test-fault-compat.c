/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compatibility mode with a toy model, and everything that its caches do, on the simulated small GPU, while one thing fails:
 * tests/lib/fault-cases.h.  quanto's rows are coded apart, so sequences change places; fp8 keeps a scale; hqq's rows stay where they are.
 */

#include "tests/lib/fault-cases.h"
#include "tests/lib/fault-rig.h"
#include "tests/lib/sim-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_ROWS = 32, N_PROMPT = 75 };

/* ---- scripts ------------------------------------------------------------------------------------------------------- */

static const ScriptOp whole[] = {
    {SCRIPT_FORWARD, 0, 0, N_PROMPT}, {SCRIPT_FORWARD, 0, 0, 1}, {SCRIPT_FORK, 0, 1, 0},    {SCRIPT_DECODE, 0, 0, 3},
    {SCRIPT_FORWARD, 1, 0, 12},       {SCRIPT_CROP, 1, 0, 60},   {SCRIPT_DECODE, 0, 0, 3},  {SCRIPT_RECORD, 0, 0, 0},
    {SCRIPT_FORWARD, 0, 0, 3},        {SCRIPT_TAKE_BACK, 0, 0, 2}, {SCRIPT_DECODE, 0, 0, 3}, {SCRIPT_SAVE, 0, 0, 0},
    {SCRIPT_RESTORE, 0, 2, 0},        {SCRIPT_DECODE, 0, 0, 7},  {SCRIPT_MIGRATE, 0, 0, 0}, {SCRIPT_DECODE, 0, 0, 7},
    {SCRIPT_MIGRATE, 0, 0, 0},        {SCRIPT_DROP, 2, 0, 0},    {SCRIPT_SELECT, 2, 0, 4},  {SCRIPT_DECODE, 0, 0, 15},
    {SCRIPT_REORDER, 0, 0, 4},        {SCRIPT_DECODE, 0, 0, 15}, {SCRIPT_CLEAR, 3, 0, 0},   {SCRIPT_FORWARD, 3, 0, 40},
    {SCRIPT_DECODE, 0, 0, 9},
};
/* The same without rows that change places. */
#define N_APART 18

static KvPolicy policy_of(const char *backend, int64_t axis)
{
    bool coded = strcmp(backend, "fp8") != 0;
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_QUANTIZED, true);
    KvQuantRequest request = {.backend = backend, .has_nbits = coded, .has_axis_key = coded, .has_axis_value = coded,
                              .has_q_group_size = coded, .has_residual_length = coded, .nbits = 4, .axis_key = axis, .axis_value = axis,
                              .q_group_size = 16, .residual_length = 5};
    ErrorDetail detail = ERROR_DETAIL_NULL;

    policy.is_compatible = true;
    if (kv_quant_options(&request, &policy.compatible, &detail))
        script_fail(__FILE__, __LINE__, "%s", detail.text);
    policy.form = kv_form_default(policy.compatible.backend == KV_BACKEND_HQQ   ? KV_FORM_HQQ
                                  : policy.compatible.backend == KV_BACKEND_FP8 ? KV_FORM_FP8
                                                                                : KV_FORM_QUANTO);
    return policy;
}

static const char *const shape_names[] = {"quanto", "hqq", "fp8"};

static ScriptShape shape_of(const char *name)
{
    ScriptShape shape = {
        .name = name,
        .file = "tiny-llama-tied.gguf",
        .options = {.max_rows = MAX_ROWS, .max_sequences = SCRIPT_CACHES},
        .deadline_usec = 120000000,
        .policy = policy_of(name, strcmp(name, "hqq") == 0),
        .has_other = true,
        .ops = whole,
        .n_ops = strcmp(name, "hqq") == 0 ? N_APART : N_ELEMENTS(whole),
    };

    shape.other = shape.policy;
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
    sim_rig_run_well("every_event-quanto", FAULT_RIG_LATER);
}

static void a_device_that_does_not_answer_is_left_and_the_next_run_is_right(void **state)
{
    (void)state;
    sim_rig_run_well("stalls-fp8", FAULT_RIG_STALLS);
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
