/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Facts of a device: of what the plan streams, and what becomes of them.  They are believed for a minute, then while a token takes as long
 * as it did, and measured anew when it does not.  What a token takes is the machine's to say, so files are made older and other than they were;
 * a busy machine may give several times for the same token, so the one that is to hold is tried more than once.
 */

#include "daemon/model/speed-probe.h"
#include "tests/lib/model-rig.h"
#include "tests/lib/place.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#define FIXTURE "tiny-llama-tied.gguf"
#define MARK    12345.0 /* a rate that nothing has: facts that bear it are those that were stored */
#define TRIES   20

typedef struct Rig {
    Gpu *gpu;
    ModelFile *file;
    ModelFit fit;
    char folder[TEST_FOLDER_SIZE], name[17];
} Rig;

static SpeedFile stored(const Rig *rig)
{
    SpeedFile facts;

    assert_int_equal(state_file_read(rig->folder, &SPEED_KIND, rig->name, &facts, sizeof(facts)), 0);
    return facts;
}

/* The stored facts become those of a token of @token_sec, @age seconds ago. */
static void make_stored(const Rig *rig, int64_t age, double token_sec)
{
    SpeedFile facts = stored(rig);

    facts.speed.upload_rate = MARK;
    facts.checked = (int64_t)time(NULL) - age;
    facts.token_sec = token_sec;
    assert_int_equal(state_file_write(rig->folder, &SPEED_KIND, rig->name, &facts, sizeof(facts)), 0);
}

static bool are_believed(const Rig *rig, bool may_measure)
{
    ModelSpeed speed;

    assert_int_equal(model_speed(rig->gpu, rig->file, &rig->fit, may_measure, &speed, NULL), 0);
    assert_true(speed.upload_rate > 0 && speed.n_pasts >= 1);
    return speed.upload_rate == MARK;
}

static int64_t age(const Rig *rig)
{
    return (int64_t)time(NULL) - stored(rig).checked;
}

static void facts_of_the_last_minute_are_believed_unseen(void **state)
{
    Rig *rig = *state;

    make_stored(rig, 30, 1000); /* a token that takes a quarter of an hour would not hold */
    assert_true(are_believed(rig, true));
    assert_in_range(age(rig), 30, 50);
}

static void old_facts_hold_while_a_token_takes_as_long_and_are_then_young_again(void **state)
{
    Rig *rig = *state;
    bool held = false;

    for (uint32_t i = 0; i < TRIES && !held; i++) {
        double token_sec;

        assert_int_equal(speed_probe_again(rig->gpu, rig->file, &rig->fit, stored(rig).run_bytes, &token_sec, NULL), 0);
        make_stored(rig, 1000, token_sec);
        held = are_believed(rig, true);
        assert_in_range(age(rig), 0, 20);
        if (held)
            assert_true(stored(rig).token_sec == token_sec && stored(rig).speed.upload_rate == MARK);
    }
    assert_true(held);
}

static void old_facts_of_another_speed_are_measured_anew(void **state)
{
    static const double factors[] = {100, 0.01};
    Rig *rig = *state;

    for (size_t i = 0; i < N_ELEMENTS(factors); i++) {
        double token_sec = stored(rig).token_sec;

        make_stored(rig, 1000, factors[i] * token_sec);
        assert_false(are_believed(rig, true));
        assert_in_range(age(rig), 0, 20);
        assert_true(stored(rig).token_sec < 50 * token_sec && stored(rig).token_sec > token_sec / 50);
        assert_true(stored(rig).speed.upload_rate != MARK);
    }
}

static void facts_of_a_time_to_come_are_as_old_ones(void **state)
{
    Rig *rig = *state;

    make_stored(rig, -1000, 1000);
    assert_false(are_believed(rig, true));
    assert_in_range(age(rig), 0, 20);
}

static void facts_are_believed_whatever_their_age_when_the_device_is_not_to_be_taken(void **state)
{
    Rig *rig = *state;

    make_stored(rig, 1000, 1000);
    assert_true(are_believed(rig, false));
    assert_in_range(age(rig), 1000, 1020);
}

/* ---- what the plan streams, or has read in place --------------------------------------------------------------------------------- */

static ModelFit planned(const Rig *rig, KvStrategy strategy, KvTransfer tiles, uint32_t weight_percent, KvTransfer parts)
{
    ModelFit fit = {.options = {.max_rows = 64, .context = 1024, .weights = {.transfer = parts}}, .policy = kv_policy_preset(strategy, false)};

    fit.policy.transfer = tiles;
    assert_int_equal(model_plan(gpu_info(rig->gpu), rig->file, &fit.options, &fit.policy, &fit.plan, NULL), 0);
    if (weight_percent < 100) {
        fit.options.weights.budget_bytes = fit.plan.weight_total_bytes * weight_percent / 100;
        assert_int_equal(model_plan(gpu_info(rig->gpu), rig->file, &fit.options, &fit.policy, &fit.plan, NULL), 0);
    }
    return fit;
}

static void check_links(const ModelLink *links, uint64_t n_links, bool any)
{
    assert_true((n_links > 0) == any);
    for (uint64_t i = 0; i < n_links; i++) {
        assert_true(links[i].share > 0 && links[i].share <= 1 && links[i].beside >= 0 && links[i].beside <= 1);
        assert_true(i == 0 || links[i].tokens > links[i - 1].tokens);
    }
}

/* Each has facts of its own, of the copies that it makes, and the device is left as it was. */
static void whatever_streams_is_measured_as_it_streams(void **state)
{
    static const struct {
        KvStrategy strategy;
        KvTransfer tiles, parts;
        uint32_t percent;
    } plans[] = {
        {KV_STRATEGY_OFFLOADED_QUANTIZED, KV_TRANSFER_COPY, KV_TRANSFER_COPY, 100},
        {KV_STRATEGY_OFFLOADED_QUANTIZED, KV_TRANSFER_COPY, KV_TRANSFER_COPY, 40},
        {KV_STRATEGY_OFFLOADED_QUANTIZED, KV_TRANSFER_COPY, KV_TRANSFER_ZERO_COPY, 40},
        {KV_STRATEGY_STATIC, KV_TRANSFER_AUTO, KV_TRANSFER_COPY, 40},
        {KV_STRATEGY_STATIC, KV_TRANSFER_AUTO, KV_TRANSFER_ZERO_COPY, 40},
    };
    Rig *rig = *state;
    uint64_t used[GPU_PURPOSE_X_MAX], before, after;

    gpu_memory_used(rig->gpu, used, &before);
    for (size_t i = 0; i < N_ELEMENTS(plans); i++) {
        bool in_place = plans[i].parts == KV_TRANSFER_ZERO_COPY, tiles = plans[i].tiles == KV_TRANSFER_COPY;
        ModelPrediction at_once, later;
        ModelSpeed speed;
        ModelFit fit;

        if (in_place && !gpu_info(rig->gpu)->unified_memory)
            continue;
        fit = planned(rig, plans[i].strategy, plans[i].tiles, plans[i].percent, plans[i].parts);
        assert_true((fit.plan.weight_in_place_bytes > 0) == in_place);
        assert_true((fit.plan.weight_streamed_bytes > 0) == (!in_place && plans[i].percent < 100));
        assert_int_equal(model_speed(rig->gpu, rig->file, &fit, false, &speed, NULL), -ENOENT);
        assert_int_equal(model_speed(rig->gpu, rig->file, &fit, true, &speed, NULL), 0);
        gpu_memory_used(rig->gpu, used, &after);
        assert_int_equal(before, after);
        assert_true(speed.n_pasts > 1 && speed.pasts[0].layer_sec == 0 && speed.upload_rate > 0 && (speed.tile_rate > 0 || !tiles));
        for (uint64_t p = 1; p < speed.n_pasts; p++)
            assert_true(speed.pasts[p].layer_sec >= speed.pasts[p - 1].layer_sec && speed.pasts[p].tokens > speed.pasts[p - 1].tokens);
        check_links(speed.links, speed.n_links, tiles || fit.plan.weight_streamed_bytes > 0);
        check_links(speed.chunk_links, speed.n_chunk_links, fit.plan.weight_streamed_bytes > 0 || (tiles && speed.n_chunk_links > 0));
        model_predict(&speed, &fit, 0, &at_once);
        model_predict(&speed, &fit, 900, &later);
        assert_true(at_once.token_sec > 0 && at_once.prefill_rate > 0 && later.token_sec > 0 && later.prefill_rate > 0);
    }
}

static int setup(void **state)
{
    static Rig rig;
    char path[4096];
    ModelSpeed speed;
    DIR *folder;

    assert_int_equal(test_folder_new(rig.folder), 0);
    rig.gpu = rig_open_gpu();
    rig_path(FIXTURE, path, sizeof(path));
    assert_int_equal(model_file_open(path, rig.folder, &rig.file, NULL), 0);
    rig.fit = (ModelFit){.options = {.max_rows = 64, .context = 1024}, .policy = kv_policy_preset(KV_STRATEGY_STATIC, false)};
    assert_int_equal(model_plan(gpu_info(rig.gpu), rig.file, &rig.fit.options, &rig.fit.policy, &rig.fit.plan, NULL), 0);
    assert_int_equal(model_speed(rig.gpu, rig.file, &rig.fit, true, &speed, NULL), 0);
    (void)snprintf(path, sizeof(path), "%s/speeds", rig.folder);
    folder = opendir(path);
    assert_non_null(folder);
    for (const struct dirent *entry; (entry = readdir(folder));)
        if (entry->d_name[0] != '.') {
            assert_int_equal(strlen(entry->d_name), sizeof(rig.name) - 1);
            (void)snprintf(rig.name, sizeof(rig.name), "%.16s", entry->d_name);
        }
    assert_int_equal(closedir(folder), 0);
    *state = &rig;
    return 0;
}

static int teardown(void **state)
{
    Rig *rig = *state;

    (void)model_file_free(rig->file);
    gpu_free(rig->gpu);
    return test_folder_remove(rig->folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(facts_of_the_last_minute_are_believed_unseen),
        cmocka_unit_test(old_facts_hold_while_a_token_takes_as_long_and_are_then_young_again),
        cmocka_unit_test(old_facts_of_another_speed_are_measured_anew),
        cmocka_unit_test(facts_of_a_time_to_come_are_as_old_ones),
        cmocka_unit_test(facts_are_believed_whatever_their_age_when_the_device_is_not_to_be_taken),
        cmocka_unit_test(whatever_streams_is_measured_as_it_streams),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
