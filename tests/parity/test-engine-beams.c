/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Beams and several sequences through the whole engine, on tiny models: equal to Transformers' generate(num_beams=...), and the same to the
 * last bit however little of it the device holds.
 */

#include "tests/lib/beam-oracle.h"
#include "tests/lib/model-rig.h"
#include "tests/lib/patience.h"

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
    EngineOptions options = {.gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC, .default_max_memory_bytes = budget},
                             .models = models,
                             .n_models = n};

    return talk_new(&options);
}

static Talk *start(const EngineModel *models, size_t n)
{
    return start_within(models, n, 0);
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

static void beams_are_those_of_transformers(void **state)
{
    const EngineModel models[] = {tiny("tied", tied, KV_STRATEGY_DYNAMIC, true, 8), tiny("mixed", mixed, KV_STRATEGY_OFFLOADED, true, 3)};
    Talk *talk = start(models, 2);
    double worst;
    size_t n;

    (void)state;
    worst = beam_oracle_compare(talk, "tiny-llama-beams.json", NULL, &n);
    print_message("%zu cases, scores within %.1e\n", n, worst);
    assert_true(n >= 40 && worst < 1e-4);
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
        EngineRequest request = beam_ids_request("m", ids, N_ELEMENTS(ids), 70, 7, 7);

        print_message("%s\n", ways[i].name);
        model.policy.transfer = KV_TRANSFER_COPY;
        model.policy.max_cache_tokens = 700;
        request.sampling.ignore_eos = true;
        talks[i] = start(&model, 1);
        seen[i] = beam_run(talks[i], &request);
        assert_int_equal(seen[i]->n_sequences, 7);
        expect_same(seen[ways[i].strategy == KV_STRATEGY_OFFLOADED_QUANTIZED ? i - 1 : ways[i].strategy == KV_STRATEGY_QUANTIZED ? i : 0],
                    seen[i]);
    }
    for (size_t i = 0; i < N_ELEMENTS(ways); i++)
        talk_free(talks[i]);
}

static void without_a_cache_they_say_the_same(void **state)
{
    Talk *with, *without;
    EngineRequest request;
    int32_t ids[70];

    (void)state;
    rig_random_ids(27, 256, ids, N_ELEMENTS(ids));
    request = beam_ids_request("m", ids, N_ELEMENTS(ids), 8, 4, 4);
    request.sampling.ignore_eos = true;
    for (int beams = 1; beams >= 0; beams--) {
        EngineModel model = tiny("m", tied, KV_STRATEGY_DYNAMIC, false, 3);

        if (!beams) { /* draws */
            request.sampling.num_beams = 1;
            request.sampling.temperature = 1;
            request.sampling.seed = 5;
        }
        with = start(&model, 1);
        model.policy = kv_policy_preset(KV_STRATEGY_NONE, false);
        without = start(&model, 1);
        expect_same(beam_run(with, &request), beam_run(without, &request));
        talk_free(with);
        talk_free(without);
    }
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
    request = beam_ids_request("m", ids, N_ELEMENTS(ids), 48, 40, 20);
    request.sampling.ignore_eos = true;
    model.policy.transfer = KV_TRANSFER_COPY;
    big = start(&model, 1);
    from_big = beam_run(big, &request);

    model.parallel = 3;
    model.policy.tile_blocks = 1;
    little = start(&model, 1);
    from_little = beam_run(little, &request);
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
    request = beam_ids_request("m", ids, N_ELEMENTS(ids), 48, 40, 20);
    request.sampling.ignore_eos = true;
    model.policy.transfer = KV_TRANSFER_COPY;
    big = start(&model, 1);
    assert_int_equal(engine_load(big->engine, 1, "m", &job), 0);
    assert_int_equal(talk_wait(big, job)->result, ENGINE_RESULT_DONE);
    engine_device_status(big->engine, &device);
    from_big = beam_run(big, &request);
    assert_string_equal(from_big->usage.ladder, "");
    assert_string_equal(from_big->usage.home, "device");

    little = start_within(&model, 1, device.total_used_bytes + 1024 * 1024);
    from_little = beam_run(little, &request);
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
    request = beam_ids_request("m", ids, 500, 20, 6, 6);
    request.sampling.ignore_eos = true;
    cold = start(&model, 1);
    model.n_prefixes = 4;
    warm = start(&model, 1);
    for (int i = 0; i < 4; i++) {
        Seen *a, *b;

        request.n_ids = i < 2 ? 500 : 600;
        if (i == 3)
            ids[550]++; /* where nobody has been before */
        a = beam_run(cold, &request);
        b = beam_run(warm, &request);
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
    request = beam_ids_request("m", ids, N_ELEMENTS(ids), 40, 1, 6);
    request.sampling.temperature = 1;
    request.sampling.top_k = 50;
    request.sampling.seed = 1000;
    several = beam_run(talk, &request);
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
    EngineRequest request = beam_ids_request("m", NULL, 0, 20, 1, 1);

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
        all = beam_run(talk, &request);
        assert_int_equal(all->n_sequences, N_ELEMENTS(prompts) * request.sampling.num_return_sequences);
        request.n_prompts = 1;
        for (size_t p = 0; p < N_ELEMENTS(prompts); p++) {
            request.prompts = &prompts[p];
            alone = beam_run(talk, &request);
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
    request = beam_ids_request("m", ids, N_ELEMENTS(ids), 30, 5, 5);
    request.sampling.ignore_eos = true;
    answer = beam_run(talk, &request);
    for (uint64_t usec = 1000; usec < 200000; usec *= 3) {
        uint64_t job;

        request.sampling.max_tokens = 800;
        job = talk_generate(talk, &request);
        talk_sleep(usec);
        engine_cancel(talk->engine, job);
        assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_CANCELLED);
    }
    request.sampling.max_tokens = 30;
    expect_same(answer, beam_run(talk, &request));
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
        cmocka_unit_test(without_a_cache_they_say_the_same),
        cmocka_unit_test(forty_beams_on_a_device_that_holds_a_few_return_what_the_big_device_returns),
        cmocka_unit_test(beams_that_outgrow_the_device_move_and_return_what_the_big_device_returns),
        cmocka_unit_test(a_prompt_that_was_run_before_is_not_run_again),
        cmocka_unit_test(each_draw_is_what_its_own_seed_draws_alone),
        cmocka_unit_test(each_prompt_gets_what_it_gets_alone),
        cmocka_unit_test(a_cancelled_search_leaves_the_engine_in_order),
    };

    return cmocka_run_group_tests(tests, setup, NULL);
}
