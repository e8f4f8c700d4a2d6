/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The example that the project began with, on a simulated small GPU: 40 beams, 20 of them returned, where the device can hold a few beams'
 * caches only.  Every refusal is the device's own, every copy is looked at for races, and device memory is full of NaN until something
 * has arrived.
 */

#include "tests/lib/beam-oracle.h"
#include "tests/lib/model-rig.h"
#include "tests/lib/patience.h"
#include "tests/lib/sim-rig.h"

#define N_PROMPT 400
#define N_NEW    24

/* One number for all that was found. */
static uint64_t digest(const Seen *seen)
{
    uint64_t hash = UINT64_C(14695981039346656037);

    for (size_t i = 0; i < seen->n_sequences; i++) {
        const EngineSequence *s = &seen->sequences[i];
        uint32_t score;

        memcpy(&score, &s->score, sizeof(score));
        hash = (hash ^ score) * UINT64_C(1099511628211);
        for (uint32_t t = 0; t < s->n_tokens; t++)
            hash = (hash ^ (uint32_t)s->ids[t]) * UINT64_C(1099511628211);
    }
    return hash;
}

static void search(KvStrategy strategy, uint32_t parallel)
{
    static char path[4096];
    EngineModel model = {.name = "m", .path = path, .policy = kv_policy_preset(strategy, false), .parallel = parallel, .keep_alive_usec = UINT64_MAX};
    EngineOptions options = {
        .gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC}, .models = &model, .n_models = 1};
    EngineRequest request;
    EngineDeviceStatus device;
    int32_t ids[N_PROMPT];
    uint64_t job = 0;
    bool done = false;
    Engine *engine;

    rig_path("tiny-llama-tied.gguf", path, sizeof(path));
    rig_random_ids(31, 256, ids, N_PROMPT);
    request = beam_ids_request("m", ids, N_PROMPT, N_NEW, 40, 20);
    request.sampling.ignore_eos = true;
    CHECK(engine_new(&options, &engine, NULL) == 0);
    CHECK(engine_generate(engine, &request, &job) == 0);
    while (!done) {
        EngineEvent *event = engine_next_event(engine);

        if (!event) {
            talk_sleep(500);
            continue;
        }
        if (event->kind == ENGINE_EVENT_FINISHED && event->job == job) {
            Seen seen = {.sequences = event->sequences, .n_sequences = event->n_sequences};

            engine_device_status(engine, &device);
            (void)fprintf(stderr, "beams %zu %016llx; %s; gave up: %s; %s\n", seen.n_sequences, (unsigned long long)digest(&seen),
                          event->usage.home, event->usage.ladder, event->detail.text);
            CHECK(event->result == ENGINE_RESULT_DONE);
            CHECK(event->usage.output_tokens == 20 * N_NEW);
            done = true;
        }
        engine_event_free(event);
    }
    engine_free(engine);
}

static void on_the_device(void)
{
    search(KV_STRATEGY_DYNAMIC, 4);
}

static void on_the_host(void)
{
    search(KV_STRATEGY_OFFLOADED_QUANTIZED, 40);
}

static void on_the_host_by_threes(void)
{
    search(KV_STRATEGY_OFFLOADED_QUANTIZED, 3);
}

static const SimScenario scenarios[] = {
    {"device", on_the_device},
    {"host", on_the_host},
    {"threes", on_the_host_by_threes},
};

/* What a scenario found, as it says it. */
static void find(const char *scenario, const char *settings, char ret[32], const char *words)
{
    static SimRun run;
    const char *found;

    sim_rig_run(scenario, settings, &run);
    found = strstr(run.text, "beams ");
    if (run.status != 0 || !found)
        print_message("%s", run.text);
    assert_int_equal(run.status, 0);
    assert_non_null(found);
    print_message("%s with %s: %.*s (%.1f s)\n", scenario, settings, (int)strcspn(found, "\n"), found, run.seconds);
    (void)snprintf(ret, 32, "%.25s", found);
    assert_non_null(strstr(found, words));
}

#define CHECKS " CLSIM_CHECK=all CLSIM_PART=1 CLSIM_POISON=1 CLSIM_MISUSE=3"

static void test_beams_that_outgrow_the_device_move_to_the_host_and_find_the_same(void **state)
{
    char big[32], small[32];

    (void)state;
    find("device", "CLSIM_MEMORY=1G", big, "device; gave up: ;");
    find("device", "CLSIM_MEMORY=8M CLSIM_MAX_ALLOCATION=2M" CHECKS, small, "host-home");
    assert_string_equal(big, small);
}

static void test_recent_tokens_of_forty_beams_pass_through_three_places(void **state)
{
    char big[32], small[32];

    (void)state;
    find("host", "CLSIM_MEMORY=1G", big, "host; gave up: ;");
    find("threes", "CLSIM_MEMORY=6M CLSIM_MAX_ALLOCATION=2M" CHECKS, small, "host;");
    assert_string_equal(big, small);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beams_that_outgrow_the_device_move_to_the_host_and_find_the_same),
        cmocka_unit_test(test_recent_tokens_of_forty_beams_pass_through_three_places),
    };

    if (sim_rig_is_scenario(argc, argv, scenarios, N_ELEMENTS(scenarios)))
        return EXIT_SUCCESS;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
