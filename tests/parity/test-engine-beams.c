/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Beams and several sequences through the whole engine, on tiny models: equal to Transformers' generate(num_beams=...), and the same to the
 * last bit however little of it the device holds.
 */

#include "tests/lib/engine-talk.h"
#include "tests/lib/model-rig.h"

#include <jansson.h>
#include <math.h>

#define N_VOCAB 320

static char tied[4096], mixed[4096];

static EngineModel tiny(const char *name, const char *path, KvStrategy strategy, bool exact, uint32_t parallel)
{
    EngineModel model = {.name = name,
                         .path = path,
                         .exact = exact,
                         .policy = kv_policy_preset(strategy, exact),
                         .parallel = parallel,
                         .keep_alive_usec = UINT64_MAX};

    return model;
}

/* @budget: bytes of device memory for all of it; 0: what there is. */
static Talk *start_within(const EngineModel *models, size_t n, uint64_t budget)
{
    EngineOptions options = {.gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .default_max_memory_bytes = budget},
                             .models = models,
                             .n_models = n,
                             .watchdog_usec = 60000000};

    return talk_new(&options);
}

static Talk *start(const EngineModel *models, size_t n)
{
    return start_within(models, n, 0);
}

static Seen *run(Talk *talk, const EngineRequest *request)
{
    Seen *seen = talk_wait(talk, talk_generate(talk, request));

    if (seen->result != ENGINE_RESULT_DONE)
        fail_msg("result %d: %s", (int)seen->result, seen->detail.text);
    assert_int_equal(seen->n_text, 0); /* nothing before the end */
    assert_int_equal(seen->n_ids, 0);
    return seen;
}

static EngineRequest beam_request(const char *model, const int32_t *ids, size_t n, uint32_t max_tokens, uint32_t beams, uint32_t n_return)
{
    EngineRequest request = raw_request(model, NULL, max_tokens);

    request.ids = ids;
    request.n_ids = n;
    request.want_ids = true;
    request.sampling.num_beams = beams;
    request.sampling.num_return_sequences = n_return;
    request.sampling.length_penalty = 1;
    return request;
}

static void expect_same(const Seen *a, const Seen *b)
{
    assert_int_equal(a->n_sequences, b->n_sequences);
    for (size_t i = 0; i < a->n_sequences; i++) {
        const EngineSequence *x = &a->sequences[i], *y = &b->sequences[i];

        assert_int_equal(x->prompt, y->prompt);
        assert_int_equal(x->n_tokens, y->n_tokens);
        assert_memory_equal(x->ids, y->ids, x->n_tokens * sizeof(int32_t));
        assert_memory_equal(&x->score, &y->score, sizeof(x->score));
        assert_string_equal(x->text, y->text);
        assert_string_equal(x->stop_reason, y->stop_reason);
    }
}

/* ---- the oracle ------------------------------------------------------------------------------------------------------------------ */

static size_t read_ids(const json_t *array, int32_t *ret, size_t max)
{
    size_t i;
    json_t *id;

    assert_true(json_array_size(array) <= max);
    json_array_foreach(array, i, id)
        ret[i] = (int32_t)json_integer_value(id);
    return json_array_size(array);
}

static BeamEarly early_of(const char *text)
{
    return strcmp(text, "true") == 0 ? BEAM_EARLY_TRUE : strcmp(text, "never") == 0 ? BEAM_EARLY_NEVER : BEAM_EARLY_FALSE;
}

static bool is_end(const json_t *eos, int32_t id)
{
    size_t i;
    json_t *one;

    json_array_foreach(eos, i, one)
        if (json_integer_value(one) == id)
            return true;
    return false;
}

/* Returns the largest difference of a score. */
static double compare_case(const json_t *json, const json_t *one, const Seen *answer, size_t index)
{
    const json_t *sequences = json_object_get(one, "sequences");
    bool ends = !json_is_true(json_object_get(one, "ignore_eos"));
    double worst = 0;

    assert_int_equal(answer->n_sequences, json_array_size(sequences));
    for (size_t i = 0; i < answer->n_sequences; i++) {
        const EngineSequence *got = &answer->sequences[i];
        double score = json_number_value(json_array_get(json_object_get(one, "scores"), i));
        int32_t ids[64];
        size_t n = read_ids(json_array_get(sequences, i), ids, N_ELEMENTS(ids));
        bool stopped, ended = ends && is_end(json_object_get(json, "eos"), ids[n - 1]);

        if (ended)
            n--;
        stopped = !ended && n < (size_t)json_integer_value(json_object_get(one, "max_new"));
        if (got->n_tokens != n || memcmp(got->ids, ids, n * sizeof(*ids)) != 0)
            fail_msg("case %zu: sequence %zu is another", index, i);
        if (json_array_size(json_object_get(one, "stop")) == 0 || stopped || ended) /* the last token may do both */
            assert_string_equal(got->stop_reason, ended ? "stop" : stopped ? "stop_string" : "length");
        worst = fmax(worst, fabs((double)got->score - score));
    }
    return worst;
}

static void beams_are_those_of_transformers(void **state)
{
    const EngineModel models[] = {tiny("tied", tied, KV_STRATEGY_DYNAMIC, true, 8), tiny("mixed", mixed, KV_STRATEGY_OFFLOADED, true, 3)};
    Talk *talk = start(models, 2);
    json_t *json, *one;
    char path[4096];
    double worst = 0;
    size_t i;

    (void)state;
    rig_path("tiny-llama-beams.json", path, sizeof(path));
    json = json_load_file(path, 0, NULL);
    assert_non_null(json);
    json_array_foreach(json_object_get(json, "cases"), i, one) {
        const char *stops[16];
        int32_t prompt[128];
        size_t n = read_ids(json_object_get(one, "prompt"), prompt, N_ELEMENTS(prompt));
        EngineRequest request = beam_request(json_string_value(json_object_get(one, "model")), prompt, n,
                                             (uint32_t)json_integer_value(json_object_get(one, "max_new")),
                                             (uint32_t)json_integer_value(json_object_get(one, "beams")),
                                             (uint32_t)json_integer_value(json_object_get(one, "return")));

        request.sampling.stop = stops;
        request.sampling.n_stop = json_array_size(json_object_get(one, "stop"));
        assert_true(request.sampling.n_stop <= N_ELEMENTS(stops));
        for (size_t s = 0; s < request.sampling.n_stop; s++)
            stops[s] = json_string_value(json_array_get(json_object_get(one, "stop"), s));
        request.sampling.early_stopping = early_of(json_string_value(json_object_get(one, "early")));
        request.sampling.length_penalty = json_number_value(json_object_get(one, "penalty"));
        request.sampling.ignore_eos = json_is_true(json_object_get(one, "ignore_eos"));
        worst = fmax(worst, compare_case(json, one, run(talk, &request), i));
    }
    print_message("%zu cases, scores within %.1e\n", i, worst);
    assert_true(worst < 1e-4);
    json_decref(json);
    talk_free(talk);
}

/* ---- the same however it is kept -------------------------------------------------------------------------------------------------------- */

/* A prompt of several blocks, so that beams share full pages, and a part of one. */
static void beams_say_the_same_under_every_policy_and_in_passes_of_any_size(void **state)
{
    static const struct {
        const char *name;
        KvStrategy strategy;
        uint32_t parallel;
    } ways[] = {{"dynamic", KV_STRATEGY_DYNAMIC, 16},
                {"dynamic, one a pass", KV_STRATEGY_DYNAMIC, 1},
                {"offloaded", KV_STRATEGY_OFFLOADED, 5},
                {"static", KV_STRATEGY_STATIC, 3},
                {"offloaded_static", KV_STRATEGY_OFFLOADED_STATIC, 2},
                {"quantized", KV_STRATEGY_QUANTIZED, 7}, /* another form, other bits: the one after is compared with it */
                {"offloaded_quantized", KV_STRATEGY_OFFLOADED_QUANTIZED, 2}};
    Talk *talks[N_ELEMENTS(ways)];
    Seen *seen[N_ELEMENTS(ways)];
    int32_t ids[600];

    (void)state;
    rig_random_ids(21, 256, ids, N_ELEMENTS(ids));
    for (size_t i = 0; i < N_ELEMENTS(ways); i++) {
        EngineModel model = tiny("m", mixed, ways[i].strategy, false, ways[i].parallel);
        EngineRequest request = beam_request("m", ids, N_ELEMENTS(ids), 70, 7, 7);

        print_message("%s\n", ways[i].name);
        model.policy.transfer = KV_TRANSFER_COPY;
        model.policy.max_cache_tokens = 700;
        request.sampling.ignore_eos = true;
        talks[i] = start(&model, 1);
        seen[i] = run(talks[i], &request);
        assert_int_equal(seen[i]->n_sequences, 7);
        expect_same(seen[ways[i].strategy == KV_STRATEGY_OFFLOADED_QUANTIZED ? i - 1 : ways[i].strategy == KV_STRATEGY_QUANTIZED ? i : 0],
                    seen[i]);
    }
    for (size_t i = 0; i < N_ELEMENTS(ways); i++)
        talk_free(talks[i]);
}

static uint64_t cache_bytes(const Talk *talk)
{
    EngineDeviceStatus device;

    engine_device_status(talk->engine, &device);
    return device.used_bytes[GPU_PURPOSE_TAIL] + device.used_bytes[GPU_PURPOSE_STAGING] + device.used_bytes[GPU_PURPOSE_PAGES];
}

/* The example that the project began with: 40 beams, 20 of them returned. */
static void forty_beams_on_a_device_that_holds_a_few_return_what_the_big_device_returns(void **state)
{
    EngineModel model = tiny("m", tied, KV_STRATEGY_OFFLOADED_QUANTIZED, false, 40);
    Talk *big, *little;
    EngineRequest request;
    Seen *from_big, *from_little;
    int32_t ids[500];

    (void)state;
    rig_random_ids(22, 256, ids, N_ELEMENTS(ids));
    request = beam_request("m", ids, N_ELEMENTS(ids), 48, 40, 20);
    request.sampling.ignore_eos = true;
    model.policy.transfer = KV_TRANSFER_COPY;
    big = start(&model, 1);
    from_big = run(big, &request);

    model.parallel = 3;
    model.policy.tile_blocks = 1;
    little = start(&model, 1);
    from_little = run(little, &request);
    print_message("cache on the device: %llu bytes, where all beams have room %llu\n", (unsigned long long)cache_bytes(little),
                  (unsigned long long)cache_bytes(big));
    assert_true(cache_bytes(little) * 4 < cache_bytes(big));
    assert_int_equal(from_little->n_sequences, 20);
    expect_same(from_big, from_little);
    talk_free(big);
    talk_free(little);
}

/* The same where the pages live on the device: it runs out in the middle of the search, which goes on from where it was. */
static void beams_that_outgrow_the_device_move_and_return_what_the_big_device_returns(void **state)
{
    EngineModel model = tiny("m", tied, KV_STRATEGY_DYNAMIC, false, 4);
    Talk *big, *little;
    EngineRequest request;
    EngineDeviceStatus device;
    Seen *from_big, *from_little;
    int32_t ids[700];
    uint64_t job;

    (void)state;
    rig_random_ids(25, 256, ids, N_ELEMENTS(ids));
    request = beam_request("m", ids, N_ELEMENTS(ids), 48, 40, 20);
    request.sampling.ignore_eos = true;
    model.policy.transfer = KV_TRANSFER_COPY;
    big = start(&model, 1);
    assert_int_equal(engine_load(big->engine, 1, "m", &job), 0);
    assert_int_equal(talk_wait(big, job)->result, ENGINE_RESULT_DONE);
    engine_device_status(big->engine, &device);
    from_big = run(big, &request);
    assert_string_equal(from_big->usage.ladder, "");
    assert_string_equal(from_big->usage.home, "device");

    little = start_within(&model, 1, device.total_used_bytes + 1024 * 1024);
    from_little = run(little, &request);
    print_message("%llu bytes at the start, %llu allowed: %s\n", (unsigned long long)device.total_used_bytes,
                  (unsigned long long)device.total_used_bytes + 1024 * 1024, from_little->usage.ladder);
    assert_non_null(strstr(from_little->usage.ladder, "host-home"));
    assert_string_equal(from_little->usage.home, "host");
    assert_int_equal(from_little->n_sequences, 20);
    expect_same(from_big, from_little);
    talk_free(big);
    talk_free(little);
}

/* The same question again, and one that begins alike. */
static void a_prompt_that_was_run_before_is_not_run_again(void **state)
{
    EngineModel model = tiny("m", mixed, KV_STRATEGY_OFFLOADED_QUANTIZED, false, 4);
    EngineRequest request;
    Talk *cold, *warm;
    int32_t ids[600];

    (void)state;
    rig_random_ids(26, 256, ids, N_ELEMENTS(ids));
    request = beam_request("m", ids, 500, 20, 6, 6);
    request.sampling.ignore_eos = true;
    cold = start(&model, 1);
    model.n_prefixes = 4;
    warm = start(&model, 1);
    for (int i = 0; i < 4; i++) {
        Seen *a, *b;

        request.n_ids = i < 2 ? 500 : 600;
        if (i == 3)
            ids[550]++; /* where nobody has been before */
        a = run(cold, &request);
        b = run(warm, &request);
        print_message("%u of %u tokens reused\n", b->usage.reused_tokens, b->usage.prompt_tokens);
        assert_int_equal(a->usage.reused_tokens, 0);
        assert_true(i == 0 ? b->usage.reused_tokens == 0 : b->usage.reused_tokens >= 400);
        expect_same(a, b);
    }
    talk_free(cold);
    talk_free(warm);
}

/* ---- several draws, several prompts -------------------------------------------------------------------------------------------------------- */

static void each_draw_is_what_its_own_seed_draws_alone(void **state)
{
    const EngineModel model = tiny("m", tied, KV_STRATEGY_OFFLOADED_QUANTIZED, false, 4);
    Talk *talk = start(&model, 1);
    EngineRequest request;
    int32_t ids[90];
    Seen *several;

    (void)state;
    rig_random_ids(23, 256, ids, N_ELEMENTS(ids));
    request = beam_request("m", ids, N_ELEMENTS(ids), 40, 1, 6);
    request.sampling.temperature = 1;
    request.sampling.top_k = 50;
    request.sampling.seed = 1000;
    several = run(talk, &request);
    assert_int_equal(several->n_sequences, 6);
    for (uint32_t i = 0; i < 6; i++) {
        const EngineSequence *one = &several->sequences[i];
        Seen *seen;

        request.sampling.num_return_sequences = 1;
        request.sampling.seed = 1000 + i;
        seen = talk_wait(talk, talk_generate(talk, &request));
        assert_int_equal(seen->result, ENGINE_RESULT_DONE);
        assert_int_equal(seen->n_ids, one->n_tokens);
        assert_memory_equal(seen->ids, one->ids, seen->n_ids * sizeof(int32_t));
        assert_string_equal(seen->usage.stop_reason, one->stop_reason);
        assert_int_equal(seen->n_text, one->text_length);
        assert_memory_equal(seen->text, one->text, seen->n_text);
    }
    talk_free(talk);
}

static void each_prompt_gets_what_it_gets_alone(void **state)
{
    static const char *const prompts[] = {"The mill", "A leat carries water to the mill, and the mill grinds what the farmers bring.", "on the",
                                          "It is not for us to say that he is right, or that they are"};
    static const char *const stops[] = {"q", "zz"};
    const EngineModel model = tiny("m", mixed, KV_STRATEGY_OFFLOADED_QUANTIZED, false, 5);
    Talk *talk = start(&model, 1);
    EngineRequest request = beam_request("m", NULL, 0, 20, 1, 1);

    (void)state;
    request.prompts_raw = true;
    request.sampling.stop = (const char **)(uintptr_t)stops;
    request.sampling.n_stop = N_ELEMENTS(stops);
    for (uint32_t beams = 1; beams <= 6; beams += 5) {
        Seen *all, *alone;

        request.sampling.num_beams = beams;
        request.sampling.num_return_sequences = beams > 1 ? 2 : 1;
        request.prompts = prompts;
        request.n_prompts = N_ELEMENTS(prompts);
        all = run(talk, &request);
        assert_int_equal(all->n_sequences, N_ELEMENTS(prompts) * request.sampling.num_return_sequences);
        request.n_prompts = 1;
        for (size_t p = 0; p < N_ELEMENTS(prompts); p++) {
            request.prompts = &prompts[p];
            alone = run(talk, &request);
            assert_int_equal(alone->n_sequences, request.sampling.num_return_sequences);
            for (size_t i = 0; i < alone->n_sequences; i++) {
                const EngineSequence *a = &all->sequences[p * alone->n_sequences + i], *b = &alone->sequences[i];

                assert_int_equal(a->prompt, p);
                assert_string_equal(a->text, b->text);
                assert_int_equal(a->n_tokens, b->n_tokens);
                assert_memory_equal(&a->score, &b->score, sizeof(a->score));
                assert_null(strchr(a->text, 'q'));
            }
        }
    }
    talk_free(talk);
}

static void a_cancelled_search_leaves_the_engine_in_order(void **state)
{
    const EngineModel model = tiny("m", tied, KV_STRATEGY_OFFLOADED_QUANTIZED, false, 2);
    Talk *talk = start(&model, 1);
    EngineRequest request;
    int32_t ids[100];
    Seen *answer;

    (void)state;
    rig_random_ids(24, 256, ids, N_ELEMENTS(ids));
    request = beam_request("m", ids, N_ELEMENTS(ids), 30, 5, 5);
    request.sampling.ignore_eos = true;
    answer = run(talk, &request);
    for (uint64_t usec = 1000; usec < 200000; usec *= 3) {
        uint64_t job;

        request.sampling.max_tokens = 800;
        job = talk_generate(talk, &request);
        talk_sleep(usec);
        engine_cancel(talk->engine, job);
        assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_CANCELLED);
    }
    request.sampling.max_tokens = 30;
    expect_same(answer, run(talk, &request));
    talk_free(talk);
}

static int setup(void **state)
{
    (void)state;
    rig_path("tiny-llama-tied.gguf", tied, sizeof(tied));
    rig_path("tiny-llama-mixed.gguf", mixed, sizeof(mixed));
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(beams_are_those_of_transformers),
        cmocka_unit_test(beams_say_the_same_under_every_policy_and_in_passes_of_any_size),
        cmocka_unit_test(forty_beams_on_a_device_that_holds_a_few_return_what_the_big_device_returns),
        cmocka_unit_test(beams_that_outgrow_the_device_move_and_return_what_the_big_device_returns),
        cmocka_unit_test(a_prompt_that_was_run_before_is_not_run_again),
        cmocka_unit_test(each_draw_is_what_its_own_seed_draws_alone),
        cmocka_unit_test(each_prompt_gets_what_it_gets_alone),
        cmocka_unit_test(a_cancelled_search_leaves_the_engine_in_order),
    };

    return cmocka_run_group_tests(tests, setup, NULL);
}
