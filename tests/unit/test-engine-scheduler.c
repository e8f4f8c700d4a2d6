/* SPDX-License-Identifier: Apache-2.0 */
/* Who goes next: decisions over descriptors. */

#include "daemon/engine/scheduler.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#define INTERACTIVE ENGINE_PRIORITY_INTERACTIVE
#define NORMAL      ENGINE_PRIORITY_NORMAL
#define BACKGROUND  ENGINE_PRIORITY_BACKGROUND

static SchedulerActive decoding(uint64_t id, EnginePriority priority, uint32_t group, uint64_t last_served)
{
    return (SchedulerActive){.id = id,
                             .priority = priority,
                             .group = group,
                             .n_rows = 1,
                             .runnable = true,
                             .last_served = last_served,
                             .limits = {512, 8}};
}

static SchedulerActive prefilling(uint64_t id, EnginePriority priority, uint32_t group, uint64_t last_served, uint32_t n_rows)
{
    SchedulerActive job = decoding(id, priority, group, last_served);

    job.prefill = true;
    job.n_rows = n_rows;
    return job;
}

/* The pass as text, "id:rows id:rows", the leader first. */
static const char *pass(const SchedulerActive *jobs, size_t n, char text[256])
{
    SchedulerPick picks[16];
    size_t n_picks = scheduler_pick(jobs, n, picks), at = 0;

    text[0] = 0;
    for (size_t i = 0; i < n_picks; i++)
        at += (size_t)snprintf(text + at, 256 - at, "%s%llu:%u", i ? " " : "", (unsigned long long)jobs[picks[i].index].id,
                               picks[i].n_rows);
    return text;
}

#define assert_pass(jobs, expected) assert_string_equal(pass((jobs), N_ELEMENTS(jobs), (char[256]){0}), (expected))

static void nobody_to_run_is_no_pass(void **state)
{
    SchedulerActive jobs[] = {decoding(1, NORMAL, 1, 0)};
    SchedulerPick picks[1];

    (void)state;
    jobs[0].runnable = false;
    assert_pass(jobs, "");
    assert_int_equal(scheduler_pick(NULL, 0, picks), 0);
}

static void decoding_jobs_of_a_group_share_the_pass(void **state)
{
    SchedulerActive jobs[] = {decoding(1, NORMAL, 1, 5), decoding(2, INTERACTIVE, 1, 6), decoding(3, NORMAL, 2, 1),
                              decoding(4, NORMAL, 1, 7)};

    (void)state;
    assert_pass(jobs, "2:1 1:1 4:1");
}

static void groups_of_a_class_take_turns(void **state)
{
    SchedulerActive jobs[] = {decoding(1, NORMAL, 1, 5), decoding(2, NORMAL, 2, 4), decoding(3, NORMAL, 1, 5)};

    (void)state;
    assert_pass(jobs, "2:1");
    jobs[1].last_served = 6;
    assert_pass(jobs, "1:1 3:1");
}

static void background_stands_still_while_interactive_work_can_run(void **state)
{
    SchedulerActive jobs[] = {decoding(1, BACKGROUND, 1, 0), prefilling(2, BACKGROUND, 1, 0, 100), decoding(3, INTERACTIVE, 1, 9),
                              decoding(4, NORMAL, 1, 3)};

    (void)state;
    assert_pass(jobs, "3:1 4:1");
    assert_true(scheduler_yields(jobs, 4, BACKGROUND));
    assert_false(scheduler_yields(jobs, 4, NORMAL));
    jobs[2].runnable = false; /* its reader is slow */
    assert_false(scheduler_yields(jobs, 4, BACKGROUND));
    assert_pass(jobs, "4:1 1:1 2:100");
}

static void a_lone_prompt_gets_the_whole_pass(void **state)
{
    SchedulerActive jobs[] = {prefilling(1, NORMAL, 1, 0, 3000)};

    (void)state;
    assert_pass(jobs, "1:512");
    jobs[0].n_rows = 7;
    assert_pass(jobs, "1:7");
}

static void a_prompt_beside_decoding_jobs_gets_a_short_chunk(void **state)
{
    SchedulerActive jobs[] = {prefilling(1, NORMAL, 1, 0, 3000), decoding(2, NORMAL, 1, 1), decoding(3, NORMAL, 1, 1)};

    (void)state;
    assert_pass(jobs, "1:128 2:1 3:1");
    jobs[0].last_served = 2; /* now a decoding job leads */
    assert_pass(jobs, "2:1 3:1 1:128");
}

static void one_prompt_a_pass_and_prompts_take_turns(void **state)
{
    SchedulerActive jobs[] = {prefilling(1, NORMAL, 1, 4, 3000), prefilling(2, NORMAL, 1, 3, 40)};

    (void)state;
    assert_pass(jobs, "2:40");
    jobs[1].last_served = 5;
    assert_pass(jobs, "1:512");
}

static void a_better_class_goes_first_with_its_prompt(void **state)
{
    SchedulerActive jobs[] = {prefilling(1, NORMAL, 1, 0, 3000), prefilling(2, INTERACTIVE, 1, 9, 40), decoding(3, NORMAL, 1, 0)};

    (void)state;
    assert_pass(jobs, "2:40 3:1");
}

static void exclusive_jobs_run_alone_in_their_turn(void **state)
{
    SchedulerActive jobs[] = {prefilling(1, NORMAL, 1, 0, 64), decoding(2, NORMAL, 1, 1)};

    (void)state;
    jobs[0].exclusive = true;
    assert_pass(jobs, "1:64");
    jobs[0].last_served = 2;
    assert_pass(jobs, "2:1");
}

static void limits_of_the_group_hold(void **state)
{
    SchedulerActive jobs[] = {decoding(1, NORMAL, 1, 0), decoding(2, NORMAL, 1, 1), decoding(3, NORMAL, 1, 2),
                              prefilling(4, NORMAL, 1, 3, 100)};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(jobs); i++)
        jobs[i].limits = (SchedulerLimits){32, 3};
    assert_pass(jobs, "1:1 2:1 3:1");
    for (size_t i = 0; i < N_ELEMENTS(jobs); i++)
        jobs[i].limits = (SchedulerLimits){32, 8};
    assert_pass(jobs, "1:1 2:1 3:1 4:29");
    for (size_t i = 0; i < N_ELEMENTS(jobs); i++)
        jobs[i].limits = (SchedulerLimits){1, 8};
    assert_pass(jobs, "1:1");
}

static void every_runnable_job_of_the_best_class_is_served_soon(void **state)
{
    SchedulerActive jobs[6];
    uint64_t serial = 0;

    (void)state;
    for (uint32_t i = 0; i < 6; i++)
        jobs[i] = i % 2 ? decoding(i + 1, NORMAL, i % 3, 0) : prefilling(i + 1, NORMAL, i % 3, 0, 100000);
    for (unsigned round = 0; round < 60; round++) {
        SchedulerPick picks[16];
        size_t n = scheduler_pick(jobs, 6, picks);

        serial++;
        for (size_t i = 0; i < n; i++)
            jobs[picks[i].index].last_served = serial;
        for (size_t i = 0; round > 12 && i < 6; i++)
            assert_true(serial - jobs[i].last_served <= 12);
    }
}

static SchedulerWaiting waiting(uint64_t id, uint64_t owner, EnginePriority priority, uint64_t admitted)
{
    return (SchedulerWaiting){.id = id, .owner = owner, .priority = priority, .owner_admitted = admitted};
}

static void check_order(SchedulerWaiting *jobs, size_t n, const char *expected)
{
    char text[256] = "";
    size_t order[16], at = 0;

    scheduler_order(jobs, n, order);
    for (size_t i = 0; i < n; i++)
        at += (size_t)snprintf(text + at, sizeof(text) - at, "%s%llu", i ? " " : "", (unsigned long long)jobs[order[i]].id);
    assert_string_equal(text, expected);
}

static void admission_is_by_class_then_by_turns_of_owners(void **state)
{
    SchedulerWaiting one[] = {waiting(1, 7, NORMAL, 0), waiting(2, 7, NORMAL, 0), waiting(3, 7, NORMAL, 0)};
    SchedulerWaiting flood[] = {waiting(1, 7, NORMAL, 3), waiting(2, 7, NORMAL, 3), waiting(3, 7, NORMAL, 3),
                                waiting(4, 8, NORMAL, 0), waiting(5, 9, BACKGROUND, 0), waiting(6, 7, INTERACTIVE, 3),
                                waiting(7, 8, NORMAL, 0)};

    (void)state;
    check_order(one, N_ELEMENTS(one), "1 2 3");
    check_order(flood, N_ELEMENTS(flood), "6 4 1 7 2 3 5");
    scheduler_order(NULL, 0, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nobody_to_run_is_no_pass),
        cmocka_unit_test(decoding_jobs_of_a_group_share_the_pass),
        cmocka_unit_test(groups_of_a_class_take_turns),
        cmocka_unit_test(background_stands_still_while_interactive_work_can_run),
        cmocka_unit_test(a_lone_prompt_gets_the_whole_pass),
        cmocka_unit_test(a_prompt_beside_decoding_jobs_gets_a_short_chunk),
        cmocka_unit_test(one_prompt_a_pass_and_prompts_take_turns),
        cmocka_unit_test(a_better_class_goes_first_with_its_prompt),
        cmocka_unit_test(exclusive_jobs_run_alone_in_their_turn),
        cmocka_unit_test(limits_of_the_group_hold),
        cmocka_unit_test(every_runnable_job_of_the_best_class_is_served_soon),
        cmocka_unit_test(admission_is_by_class_then_by_turns_of_owners),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
