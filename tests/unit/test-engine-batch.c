/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Several sequences of one job, on a model that is played: what it says depends on every id that a cache was really given, so a beam that
 * went on from another's cache, or lost a token, says something else.
 */

#include "daemon/engine/log-softmax.h"
#include "tests/fakes/fake.h"

#include <math.h>

static Talk *start_one(uint32_t parallel)
{
    EngineModel model = fake_model("m", "m.gguf");

    fake_reset();
    model.parallel = parallel;
    return talk_start(&model, 1, 0);
}

static EngineRequest beam_request(const char *text, uint32_t max_tokens, uint32_t beams, uint32_t n_return)
{
    EngineRequest request = raw_request("m", text, max_tokens);

    request.want_ids = true;
    request.sampling.num_beams = beams;
    request.sampling.num_return_sequences = n_return;
    request.sampling.length_penalty = 1;
    return request;
}

/* The same search, with the ids of every beam kept whole and no cache at all. */
static BeamSearch *search_plainly(const EngineRequest *request)
{
    static int32_t ids[ENGINE_MAX_BEAMS][512], old[ENGINE_MAX_BEAMS][512];
    const int32_t eos = FAKE_EOG;
    uint32_t n = (uint32_t)strlen(request->raw), n_beams = request->sampling.num_beams;
    BeamOptions options = {.n_beams = n_beams, .n_vocab = FAKE_VOCAB, .max_new_tokens = request->sampling.max_tokens, .eos = &eos,
                           .n_eos = request->sampling.ignore_eos ? 0 : 1, .early_stopping = request->sampling.early_stopping,
                           .length_penalty = request->sampling.length_penalty};
    BeamSearch *search = NULL;
    int r = 0;

    assert_int_equal(beam_search_new(&options, &search, NULL), 0);
    for (uint32_t b = 0; b < n_beams; b++)
        for (uint32_t i = 0; i < n; i++)
            ids[b][i] = (unsigned char)request->raw[i];
    for (; r == 0; n++) {
        for (uint32_t b = 0; b < n_beams; b++) {
            float row[FAKE_VOCAB];

            fake_logits(ids[b], n, row);
            assert_true(log_softmax(row, FAKE_VOCAB));
            beam_search_row(search, b, row);
        }
        r = beam_search_step(search);
        memcpy(old, ids, sizeof(old));
        for (uint32_t b = 0; b < n_beams; b++) {
            memcpy(ids[b], old[beam_search_source(search, b)], n * sizeof(int32_t));
            ids[b][n] = beam_search_token(search, b);
        }
    }
    assert_int_equal(r, 1);
    return search;
}

static void assert_found(const Seen *seen, const EngineRequest *request)
{
    _cleanup_(beam_search_freep) BeamSearch *search = search_plainly(request);
    uint32_t n = MIN(beam_search_n_results(search), request->sampling.num_return_sequences);

    if (seen->result != ENGINE_RESULT_DONE)
        fail_msg("result %d: %s", (int)seen->result, seen->detail.text);
    assert_int_equal(seen->n_sequences, n);
    for (uint32_t i = 0; i < n; i++) {
        int32_t tokens[512];
        BeamResult result;
        uint32_t n_tokens;

        beam_search_result(search, i, &result);
        beam_search_tokens(search, i, tokens, NULL);
        n_tokens = result.n_tokens - (result.stop == BEAM_STOP_EOS);
        assert_int_equal(seen->sequences[i].n_tokens, n_tokens);
        assert_memory_equal(seen->sequences[i].ids, tokens, n_tokens * sizeof(int32_t));
        assert_true(seen->sequences[i].score == result.score);
        assert_string_equal(seen->sequences[i].stop_reason, result.stop == BEAM_STOP_EOS ? "stop" : "length");
    }
}

static void beams_go_on_from_their_sources_whatever_a_pass_holds(void **state)
{
    static const uint32_t parallels[] = {1, 3, 4, 40};

    (void)state;
    for (size_t p = 0; p < N_ELEMENTS(parallels); p++) {
        Talk *talk = start_one(parallels[p]);

        for (uint32_t beams = 2; beams <= 40; beams = beams * 2 + 1) {
            EngineRequest request = beam_request("Once upon a time", 12, beams, MIN(beams, (uint32_t)ENGINE_MAX_RETURN));

            for (int early = 0; early < BEAM_EARLY_X_MAX; early++) {
                request.sampling.early_stopping = (BeamEarly)early;
                request.sampling.ignore_eos = early == BEAM_EARLY_TRUE;
                assert_found(talk_wait(talk, talk_generate(talk, &request)), &request);
            }
        }
        talk_stop(talk);
    }
}

static void the_prompt_is_run_once_and_each_beam_a_row_a_step(void **state)
{
    Talk *talk = start_one(4);
    EngineRequest request = beam_request("0123456789", 6, 4, 4);
    uint32_t n_rows = 0;
    Seen *seen;

    (void)state;
    request.sampling.ignore_eos = true;
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_found(seen, &request);
    for (uint32_t i = 0; i < FAKE_GET(n_passes); i++)
        n_rows += fake.passes[i].n_rows;
    assert_int_equal(n_rows, 10 + 4 * 5);
    assert_int_equal(FAKE_GET(n_passes), 1 + 5);
    assert_int_equal(seen->usage.prompt_tokens, 10);
    assert_int_equal(seen->usage.output_tokens, 4 * 6);
    talk_stop(talk);
}

static void draws_and_prompts_are_those_of_calls_of_their_own(void **state)
{
    static const char *const prompts[] = {"first", "the second one", "3"};
    Talk *talk = start_one(3);
    EngineRequest request = raw_request("m", NULL, 30);
    Seen *all;

    (void)state;
    request.prompts = prompts;
    request.n_prompts = N_ELEMENTS(prompts);
    request.prompts_raw = true;
    request.sampling.temperature = 3;
    request.sampling.seed = 77;
    request.sampling.num_return_sequences = 5;
    all = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(all->result, ENGINE_RESULT_DONE);
    assert_int_equal(all->n_sequences, 15);
    for (uint32_t i = 0; i < 15; i++) {
        EngineRequest one = raw_request("m", prompts[i / 5], 30);
        Seen *seen;

        one.sampling.temperature = 3;
        one.sampling.seed = 77 + i % 5;
        seen = talk_wait(talk, talk_generate(talk, &one));
        assert_int_equal(all->sequences[i].prompt, i / 5);
        assert_int_equal(all->sequences[i].text_length, seen->n_text);
        assert_memory_equal(all->sequences[i].text, seen->text, seen->n_text);
        assert_int_equal(all->sequences[i].n_tokens, seen->usage.output_tokens);
        assert_string_equal(all->sequences[i].stop_reason, seen->usage.stop_reason);
        assert_null(all->sequences[i].ids); /* not asked for */
    }
    talk_stop(talk);
}

static void many_prompts_take_their_turns(void **state)
{
    static char texts[ENGINE_MAX_PROMPTS][16];
    const char *prompts[ENGINE_MAX_PROMPTS];
    Talk *talk = start_one(8);
    EngineRequest request = raw_request("m", NULL, 5);
    Seen *all;

    (void)state;
    for (uint32_t i = 0; i < ENGINE_MAX_PROMPTS; i++) {
        (void)snprintf(texts[i], sizeof(texts[i]), "prompt %u", i);
        prompts[i] = texts[i];
    }
    request.prompts = prompts;
    request.n_prompts = ENGINE_MAX_PROMPTS;
    request.prompts_raw = true;
    request.sampling.num_beams = 20;
    request.sampling.num_return_sequences = 1;
    request.sampling.length_penalty = 1;
    all = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(all->n_sequences, ENGINE_MAX_PROMPTS);
    for (uint32_t i = 0; i < ENGINE_MAX_PROMPTS; i++) {
        EngineRequest one = beam_request(prompts[i], 5, 20, 1);

        assert_float_equal(all->sequences[i].score, talk_wait(talk, talk_generate(talk, &one))->sequences[0].score, 0);
    }
    talk_stop(talk);
}

static void bad_words_and_least_lengths_hold_for_one_sequence_and_for_beams(void **state)
{
    static const char *const words[] = {"e", "n", "ab"};
    Talk *talk = start_one(4);

    (void)state;
    for (uint32_t beams = 1; beams <= 4; beams += 3) {
        EngineRequest request = beam_request("Once upon a time", 80, beams, beams);
        Seen *seen;

        request.sampling.bad_words = (const char **)(uintptr_t)words;
        request.sampling.n_bad_words = N_ELEMENTS(words);
        request.sampling.no_repeat_ngram = 2;
        request.sampling.min_tokens = 30;
        FAKE_SET(eog_at, 20);
        seen = talk_wait(talk, talk_generate(talk, &request));
        assert_int_equal(seen->result, ENGINE_RESULT_DONE);
        for (uint32_t i = 0; i < beams; i++) {
            const char *text = beams > 1 ? seen->sequences[i].text : seen->text;
            uint32_t n_tokens = beams > 1 ? seen->sequences[i].n_tokens : seen->usage.output_tokens;

            assert_null(strpbrk(text, "en"));
            assert_null(strstr(text, "ab"));
            assert_true(n_tokens >= 30);
        }
        if (beams == 1) /* the model wanted to end long before */
            assert_string_equal(seen->usage.stop_reason, "stop");
    }
    talk_stop(talk);
}

/* ---- memory and faults ----------------------------------------------------------------------------------------------------------- */

static void an_idle_session_gives_way_and_too_little_memory_is_an_error_with_numbers(void **state)
{
    Talk *talk = start_one(4);
    uint64_t session = talk_open(talk, "m", 1);
    EngineRequest request = raw_request(NULL, "0123456789012345678901234567890123456789", 10);
    Seen *seen;

    (void)state;
    request.session = session;
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_DONE);
    FAKE_SET(room_tokens, 100); /* its 49 and four beams of 20 are more; the beams alone are not */
    request = beam_request("0123456789", 10, 4, 4);
    request.sampling.ignore_eos = true;
    assert_found(talk_wait(talk, talk_generate(talk, &request)), &request);
    FAKE_SET(room_tokens, 60);
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_OUT_OF_MEMORY);
    assert_non_null(strstr(seen->detail.text, "tokens do not fit"));
    assert_int_equal(seen->n_sequences, 0);
    FAKE_SET(room_tokens, 0);
    assert_found(talk_wait(talk, talk_generate(talk, &request)), &request);
    talk_stop(talk);
}

/* Forty beams outgrow the device in the middle: they move, and no token is run again. */
static void beams_that_outgrow_the_device_go_on_where_they_were(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest request = beam_request("0123456789", 20, 40, 20);
    Talk *talk;
    Seen *seen;

    (void)state;
    fake_reset();
    model.policy.home = KV_HOME_DEVICE;
    model.policy.strategy = KV_STRATEGY_DYNAMIC;
    request.sampling.ignore_eos = true;
    talk = talk_start(&model, 1, 0);
    FAKE_SET(device_tokens, 700); /* of 40 * 29 */
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_found(seen, &request);
    assert_string_equal(seen->usage.ladder, "smaller-batch host-home");
    assert_string_equal(seen->usage.home, "host");
    assert_int_equal(FAKE_GET(n_moves), 1);
    assert_int_equal(FAKE_GET(n_rows), 10 + 40 * 19);
    talk_stop(talk);
}

/* Background beams lose their caches to an interactive job, more than once, and find what they would have found. */
static void beams_that_lose_their_caches_find_the_same(void **state)
{
    Talk *talk = start_one(4);
    EngineRequest request = beam_request("0123456789", 60, 5, 5), other;
    char question[301];
    uint32_t n_rows = 0;
    uint64_t job;

    (void)state;
    request.sampling.ignore_eos = true;
    request.priority = ENGINE_PRIORITY_BACKGROUND;
    memset(question, 'q', 300);
    question[300] = 0;
    other = raw_request("m", question, 10);
    other.priority = ENGINE_PRIORITY_INTERACTIVE;
    FAKE_SET(pass_usec, 300);
    FAKE_SET(room_tokens, 360); /* five beams of 70; hardly any of them beside 310 more */
    job = talk_generate(talk, &request);
    for (int i = 0; i < 4; i++) {
        talk_sleep(8000);
        assert_int_equal(talk_wait(talk, talk_generate(talk, &other))->result, ENGINE_RESULT_DONE);
    }
    assert_found(talk_wait(talk, job), &request);
    for (uint32_t i = 0; i < FAKE_GET(n_passes); i++)
        n_rows += fake.passes[i].n_rows;
    assert_true(n_rows > 10 + 5 * 59 + 4 * 309); /* some were run again */
    talk_stop(talk);
}

static void a_lost_device_and_a_logit_that_is_no_number_end_the_job(void **state)
{
    Talk *talk = start_one(2);
    EngineRequest request = beam_request("0123456789", 40, 6, 6);
    uint64_t job;

    (void)state;
    FAKE_SET(pass_usec, 500);
    job = talk_generate(talk, &request);
    talk_sleep(10000);
    FAKE_SET(lose, true);
    assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_DEVICE_LOST);
    FAKE_SET(pass_usec, 0);
    FAKE_SET(nan_for, '0');
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_NUMERIC);
    FAKE_SET(nan_for, 0);
    assert_found(talk_wait(talk, talk_generate(talk, &request)), &request);
    talk_stop(talk);
}

static void a_cancel_takes_effect_at_once_and_leaves_nothing(void **state)
{
    Talk *talk = start_one(4);
    EngineRequest request = beam_request("0123456789", 3000, 30, 10);

    (void)state;
    request.sampling.ignore_eos = true;
    FAKE_SET(pass_usec, 100);
    for (uint64_t usec = 0; usec < 40000; usec += 2500) {
        uint64_t job = talk_generate(talk, &request);

        talk_sleep(usec);
        engine_cancel(talk->engine, job);
        assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_CANCELLED);
    }
    talk_until(talk, FAKE_GET(n_caches) == 0); /* the job tells its end first */
    talk_stop(talk);
}

static void beams_and_others_take_turns(void **state)
{
    Talk *talk = start_one(4);
    EngineRequest request = beam_request("0123456789", 40, 10, 10), other = raw_request("m", "Tell me", 30);
    uint64_t jobs[3];

    (void)state;
    request.sampling.ignore_eos = true;
    FAKE_SET(pass_usec, 200);
    jobs[0] = talk_generate(talk, &request);
    jobs[1] = talk_generate(talk, &other);
    jobs[2] = talk_generate(talk, &request);
    assert_speaks(talk_wait(talk, jobs[1]), "Tell me", 30);
    assert_false(talk->seen[jobs[0]].finished); /* three passes a step, and turns with two others */
    assert_found(talk_wait(talk, jobs[0]), &request);
    assert_found(talk_wait(talk, jobs[2]), &request);
    talk_stop(talk);
}

/* ---- refusals -------------------------------------------------------------------------------------------------------------------- */

static void refuse(Talk *talk, const EngineRequest *request, EngineResult result, const char *word)
{
    Seen *seen = talk_wait(talk, talk_generate(talk, request));

    assert_int_equal(seen->result, result);
    if (!strstr(seen->detail.text, word))
        fail_msg("\"%s\" does not say %s", seen->detail.text, word);
}

static void what_makes_no_sense_is_refused_by_name_and_value(void **state)
{
    static const char *const empty[] = {"one", ""};
    static const char *const too_many[ENGINE_MAX_PROMPTS + 1] = {"one"};
    Talk *talk = start_one(4);
    EngineRequest r;

    (void)state;
    refuse(talk, (r = beam_request("x", 5, 41, 1), &r), ENGINE_RESULT_INVALID_ARGS, "num-beams is 41, it must be from 1 to 40");
    refuse(talk, (r = beam_request("x", 5, 40, 21), &r), ENGINE_RESULT_INVALID_ARGS, "num-return-sequences is 21, it must be from 1 to 20");
    refuse(talk, (r = beam_request("x", 5, 3, 4), &r), ENGINE_RESULT_INVALID_ARGS, "num-return-sequences is 4, with num-beams 3");
    refuse(talk, (r = beam_request("x", 5, 1, 2), &r), ENGINE_RESULT_INVALID_ARGS, "num-return-sequences is 2, it must be 1");
    r = beam_request("x", 5, 2, 1);
    r.sampling.length_penalty = (double)NAN;
    refuse(talk, &r, ENGINE_RESULT_INVALID_ARGS, "length-penalty");
    r = beam_request("x", 5, 2, 1);
    r.sampling.draw = ENGINE_DRAW_YES;
    refuse(talk, &r, ENGINE_RESULT_INVALID_ARGS, "temperature is 0, with do-sample");
    r = beam_request("x", 5, 2, 1);
    r.session = talk_open(talk, "m", 1);
    refuse(talk, &r, ENGINE_RESULT_INVALID_ARGS, "a session has one sequence");
    r = raw_request("m", "both", 5);
    r.prompts = empty;
    r.n_prompts = 1;
    refuse(talk, &r, ENGINE_RESULT_INVALID_ARGS, "exactly one of");
    r.raw = NULL;
    r.n_prompts = 2;
    refuse(talk, &r, ENGINE_RESULT_INVALID_ARGS, "prompt 2 is empty");
    r.prompts = too_many;
    r.n_prompts = N_ELEMENTS(too_many);
    refuse(talk, &r, ENGINE_RESULT_INVALID_ARGS, "65 prompts");
    talk_stop(talk);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(beams_go_on_from_their_sources_whatever_a_pass_holds),
        cmocka_unit_test(the_prompt_is_run_once_and_each_beam_a_row_a_step),
        cmocka_unit_test(draws_and_prompts_are_those_of_calls_of_their_own),
        cmocka_unit_test(many_prompts_take_their_turns),
        cmocka_unit_test(bad_words_and_least_lengths_hold_for_one_sequence_and_for_beams),
        cmocka_unit_test(an_idle_session_gives_way_and_too_little_memory_is_an_error_with_numbers),
        cmocka_unit_test(beams_that_outgrow_the_device_go_on_where_they_were),
        cmocka_unit_test(beams_that_lose_their_caches_find_the_same),
        cmocka_unit_test(a_lost_device_and_a_logit_that_is_no_number_end_the_job),
        cmocka_unit_test(a_cancel_takes_effect_at_once_and_leaves_nothing),
        cmocka_unit_test(beams_and_others_take_turns),
        cmocka_unit_test(what_makes_no_sense_is_refused_by_name_and_value),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
