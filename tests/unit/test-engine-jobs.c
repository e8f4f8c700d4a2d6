/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs from arrival to end, on a model that is played: text, limits, cancelling at every place, classes, queue. */

#include "tests/fakes/fake.h"

static Talk *start_one(void)
{
    EngineModel model = fake_model("m", "m.gguf");

    fake_reset();
    return talk_start(&model, 1, 0);
}

static void a_prompt_is_answered_and_the_usage_is_complete(void **state)
{
    Talk *talk = start_one();
    EngineRequest request = raw_request("m", "Tell me", 12);
    const EngineJobState states[] = {ENGINE_JOB_LOADING, ENGINE_JOB_PREFILL, ENGINE_JOB_DECODING};
    Seen *seen;

    (void)state;
    request.want_ids = true;
    FAKE_SET(open_usec, 20000);
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_DONE);
    assert_speaks(seen, "Tell me", 12);
    assert_int_equal(seen->n_ids, 12);
    for (size_t i = 0; i < 12; i++)
        assert_int_equal(seen->ids[i], seen->text[i]);
    assert_true(seen->n_states >= 3);
    assert_memory_equal(&seen->states[seen->n_states - 3], states, sizeof(states));

    assert_string_equal(seen->usage.stop_reason, "length");
    assert_string_equal(seen->usage.strategy, "offloaded_quantized");
    assert_string_equal(seen->usage.form, "leat-k5v4");
    assert_string_equal(seen->usage.home, "host");
    assert_string_equal(seen->usage.transfer, "copy");
    assert_string_equal(seen->usage.device, "Fake");
    assert_int_equal(seen->usage.prompt_tokens, 7);
    assert_int_equal(seen->usage.reused_tokens, 0);
    assert_int_equal(seen->usage.output_tokens, 12);
    assert_true(seen->usage.seed != 0);
    assert_true(seen->usage.load_usec >= 10000);
    assert_true(seen->usage.first_token_usec >= seen->usage.load_usec);
    assert_true(seen->usage.prefill_rate > 0 && seen->usage.decode_rate > 0);
    assert_int_equal(seen->usage.cache_host_bytes, 18); /* the last token is not cached */
    assert_int_equal(seen->usage.copy_usec, 4);
    assert_true(seen->usage.hidden_share == 0.75);
    talk_stop(talk);
}

static void messages_go_through_the_template(void **state)
{
    Talk *talk = start_one();
    const EngineMessage messages[] = {{"system", "Be brief."}, {"user", "Hi"}};
    EngineRequest request = raw_request("m", NULL, 5);
    Seen *seen;

    (void)state;
    request.messages = messages;
    request.n_messages = 2;
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_speaks(seen, "[system:Be brief.][user:Hi]", 5);
    talk_stop(talk);
}

static void a_model_without_template_says_so_and_takes_raw_text(void **state)
{
    EngineModel models[] = {fake_model("plain", "plain.gguf"), fake_model("broken", "m.gguf")};
    const EngineMessage messages[] = {{"user", "Hi"}};
    EngineRequest request = raw_request("plain", NULL, 5);
    Talk *talk;
    Seen *seen;

    (void)state;
    fake_reset();
    models[1].chat_template = "broken";
    talk = talk_start(models, 2, 0);
    request.messages = messages;
    request.n_messages = 1;
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_TEMPLATE_FAILED);
    assert_non_null(strstr(seen->detail.text, "no chat template"));
    request.model = "broken";
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_TEMPLATE_FAILED);
    assert_non_null(strstr(seen->detail.text, "line 1"));
    request = raw_request("plain", "x", 5);
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_DONE);
    talk_stop(talk);
}

static void the_end_of_a_turn_ends_it_unless_it_is_to_be_ignored(void **state)
{
    Talk *talk = start_one();
    EngineRequest request = raw_request("m", "Tell me", 20);
    Seen *seen;

    (void)state;
    FAKE_SET(eog_at, 10);
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_string_equal(seen->usage.stop_reason, "stop");
    assert_int_equal(seen->usage.output_tokens, 3);
    assert_speaks(seen, "Tell me", 3);
    request.sampling.ignore_eos = true;
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_string_equal(seen->usage.stop_reason, "length");
    assert_int_equal(seen->usage.output_tokens, 20);
    talk_stop(talk);
}

static void a_stop_string_ends_it_and_is_not_shown(void **state)
{
    Talk *talk = start_one();
    EngineRequest request = raw_request("m", "Tell me", 40);
    char text[64], stop[4] = "";
    const char *stops[] = {"never in it!", stop};
    Seen *seen;

    (void)state;
    memcpy(stop, expected_text("Tell me", 40, text) + 20, 3); /* over three tokens */
    *strstr(text, stop) = 0;
    request.sampling.stop = stops;
    request.sampling.n_stop = 2;
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_string_equal(seen->usage.stop_reason, "stop_string");
    assert_string_equal(seen->text, text);
    talk_stop(talk);
}

static void the_context_is_filled_exactly_and_never_shifted(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest request = raw_request("m", "0123456789", 0);
    Talk *talk;
    Seen *seen;

    (void)state;
    fake_reset();
    model.context = 32;
    talk = talk_start(&model, 1, 0);
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_string_equal(seen->usage.stop_reason, "context_full");
    assert_int_equal(seen->usage.output_tokens, 22);
    assert_speaks(seen, "0123456789", 22);
    request.raw = "01234567890123456789012345678901"; /* fills it alone */
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_DONE);
    assert_string_equal(seen->usage.stop_reason, "context_full");
    assert_int_equal(seen->usage.output_tokens, 0);
    request.raw = "012345678901234567890123456789012";
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_CONTEXT_EXCEEDED);
    assert_string_equal(seen->detail.text, "the prompt has 33 tokens, the context holds 32");
    talk_stop(talk);
}

static void wrong_requests_are_refused_and_change_nothing(void **state)
{
    Talk *talk = start_one();
    EngineRequest ok = raw_request("m", "x", 3), bad[] = {ok, ok, ok, ok, ok, ok, ok};
    const EngineResult results[] = {ENGINE_RESULT_INVALID_ARGS,   ENGINE_RESULT_INVALID_ARGS, ENGINE_RESULT_INVALID_ARGS,
                                    ENGINE_RESULT_NO_SUCH_MODEL,  ENGINE_RESULT_INVALID_ARGS, ENGINE_RESULT_NO_SUCH_SESSION,
                                    ENGINE_RESULT_INVALID_ARGS};
    const int32_t ids[] = {1, FAKE_VOCAB};
    const EngineMessage empty[] = {{"user", ""}};

    (void)state;
    bad[0].raw = "";
    bad[1].ids = ids; /* two prompts */
    bad[1].n_ids = 1;
    bad[2].raw = NULL;
    bad[2].ids = ids;
    bad[2].n_ids = 2; /* outside the vocabulary */
    bad[3].model = "other";
    bad[4].sampling.top_p = 7;
    bad[5].session = 99;
    bad[6].raw = NULL;
    bad[6].messages = empty;
    bad[6].n_messages = 1;
    for (size_t i = 0; i < N_ELEMENTS(bad); i++) {
        Seen *seen = talk_wait(talk, talk_generate(talk, &bad[i]));

        assert_int_equal(seen->result, results[i]);
        assert_string_equal(seen->usage.stop_reason, "error");
        assert_true(seen->detail.text[0]);
    }
    assert_int_equal(talk_wait(talk, talk_generate(talk, &ok))->result, ENGINE_RESULT_DONE);
    talk_stop(talk);
}

static void cancel_takes_effect_at_every_token(void **state)
{
    Talk *talk = start_one();
    EngineRequest request = raw_request("m", "Tell me", 600);

    (void)state;
    request.want_ids = true;
    FAKE_SET(pass_usec, 300);
    for (uint32_t at = 0; at <= 20; at++) {
        uint64_t job = talk_generate(talk, &request);
        Seen *seen = &talk->seen[job];

        talk_until(talk, seen->n_ids >= at);
        engine_cancel(talk->engine, job);
        engine_cancel(talk->engine, job); /* once more does no harm */
        talk_wait(talk, job);
        assert_int_equal(seen->result, ENGINE_RESULT_CANCELLED);
        assert_string_equal(seen->usage.stop_reason, "cancelled");
        assert_memory_equal(seen->text, expected_text("Tell me", 600, (char[1024]){0}), seen->n_text);
        assert_true(seen->n_ids < 600);
    }
    talk_stop(talk);
}

static void cancel_of_a_long_prompt_waits_for_one_chunk_at_most(void **state)
{
    Talk *talk = start_one();
    char prompt[4001];
    EngineRequest request = raw_request("m", prompt, 1);
    uint64_t job;
    Seen *seen;

    (void)state;
    memset(prompt, 'p', 4000);
    prompt[4000] = 0;
    FAKE_SET(hold, true);
    job = talk_generate(talk, &request);
    talk_until(talk, talk->seen[job].n_states && talk->seen[job].states[talk->seen[job].n_states - 1] == ENGINE_JOB_PREFILL);
    engine_cancel(talk->engine, job);
    FAKE_SET(hold, false);
    seen = talk_wait(talk, job);
    assert_int_equal(seen->result, ENGINE_RESULT_CANCELLED);
    assert_int_equal(FAKE_GET(n_passes), 1);
    talk_stop(talk);
}

static void cancel_reaches_jobs_that_load_or_wait_and_no_other(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest request = raw_request("m", "A", 30);
    uint64_t a, b, c;
    Talk *talk;

    (void)state;
    fake_reset();
    model.parallel = 1;
    talk = talk_start(&model, 1, 0);
    FAKE_SET(open_usec, 50000);
    a = talk_generate(talk, &request);
    engine_cancel(talk->engine, a); /* while loading */
    assert_int_equal(talk_wait(talk, a)->result, ENGINE_RESULT_CANCELLED);
    FAKE_SET(hold, true);
    a = talk_generate(talk, &request);
    request.raw = "B";
    b = talk_generate(talk, &request);
    request.raw = "C";
    c = talk_generate(talk, &request);
    talk_until(talk, talk->seen[c].queue_position == 2 && talk->seen[b].queue_position == 1);
    engine_cancel(talk->engine, b); /* while waiting */
    FAKE_SET(hold, false);
    assert_int_equal(talk_wait(talk, b)->result, ENGINE_RESULT_CANCELLED);
    assert_int_equal(talk->seen[b].n_text, 0);
    assert_speaks(talk_wait(talk, a), "A", 30);
    assert_speaks(talk_wait(talk, c), "C", 30);
    for (uint32_t i = 0; i < FAKE_GET(n_passes); i++)
        assert_int_not_equal(fake.passes[i].first_ids[0], 'B');
    engine_cancel(talk->engine, 4711); /* unknown: nothing */
    talk_stop(talk);
}

static void an_owner_that_leaves_takes_its_jobs_and_sessions_along(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest request = raw_request("m", "A", 200);
    uint64_t active, waiting, other, session;
    Talk *talk;

    (void)state;
    fake_reset();
    model.parallel = 1;
    talk = talk_start(&model, 1, 0);
    FAKE_SET(pass_usec, 200);
    session = talk_open(talk, "m", 1);
    active = talk_generate(talk, &request);
    request.raw = "B";
    waiting = talk_generate(talk, &request);
    request.raw = "C";
    request.owner = 2;
    request.sampling.max_tokens = 10;
    other = talk_generate(talk, &request);
    talk_until(talk, talk->seen[active].n_text > 3);
    engine_owner_gone(talk->engine, 1);
    assert_int_equal(talk_wait(talk, active)->result, ENGINE_RESULT_CANCELLED);
    assert_int_equal(talk_wait(talk, waiting)->result, ENGINE_RESULT_CANCELLED);
    assert_int_equal(talk->seen[waiting].n_text, 0);
    assert_speaks(talk_wait(talk, other), "C", 10);
    assert_int_equal(talk->n_closed, 1);
    assert_int_equal(talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_SESSION_CACHE, .session = session})->result,
                     ENGINE_RESULT_NO_SUCH_SESSION);
    talk_stop(talk);
}

static void a_full_queue_refuses_at_once(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest request = raw_request("m", "A", 5);
    uint64_t jobs[5];
    uint32_t n_jobs, n_queued;
    Talk *talk;

    (void)state;
    fake_reset();
    model.parallel = 1;
    talk = talk_start(&model, 1, 2);
    FAKE_SET(hold, true);
    jobs[0] = talk_generate(talk, &request);
    talk_until(talk, talk->seen[jobs[0]].n_states && talk->seen[jobs[0]].states[talk->seen[jobs[0]].n_states - 1] == ENGINE_JOB_PREFILL);
    for (size_t i = 1; i < 5; i++)
        jobs[i] = talk_generate(talk, &request);
    for (size_t i = 3; i < 5; i++) {
        talk_wait(talk, jobs[i]);
        assert_int_equal(talk->seen[jobs[i]].result, ENGINE_RESULT_QUEUE_FULL);
        assert_string_equal(talk->seen[jobs[i]].detail.text, "2 jobs wait already");
    }
    engine_queue_status(talk->engine, &n_jobs, &n_queued);
    assert_int_equal(n_jobs, 3);
    assert_int_equal(n_queued, 2);
    FAKE_SET(hold, false);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(talk_wait(talk, jobs[i])->result, ENGINE_RESULT_DONE);
    engine_queue_status(talk->engine, &n_jobs, &n_queued);
    assert_int_equal(n_jobs + n_queued, 0);
    talk_stop(talk);
}

static void a_deadline_ends_what_runs_and_what_waits(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest request = raw_request("m", "A", 0);
    struct timespec t;
    uint64_t a, b;
    Talk *talk;

    (void)state;
    fake_reset();
    model.parallel = 1;
    talk = talk_start(&model, 1, 0);
    FAKE_SET(pass_usec, 1000);
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    request.deadline_usec = (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000 + 60000;
    a = talk_generate(talk, &request);
    b = talk_generate(talk, &request);
    assert_int_equal(talk_wait(talk, a)->result, ENGINE_RESULT_DEADLINE_EXCEEDED);
    assert_int_equal(talk_wait(talk, b)->result, ENGINE_RESULT_DEADLINE_EXCEEDED);
    assert_true(talk->seen[a].n_text > 0);
    assert_non_null(strstr(talk->seen[b].detail.text, "queued"));
    talk_stop(talk);
}

static void a_paused_job_generates_nothing_until_it_is_resumed(void **state)
{
    Talk *talk = start_one();
    EngineRequest request = raw_request("m", "A", 300);
    uint32_t passes;
    uint64_t job;

    (void)state;
    FAKE_SET(pass_usec, 200);
    job = talk_generate(talk, &request);
    talk_until(talk, talk->seen[job].n_text > 5);
    engine_pause(talk->engine, job, true);
    talk_until(talk, talk->seen[job].states[talk->seen[job].n_states - 1] == ENGINE_JOB_PAUSED);
    passes = FAKE_GET(n_passes);
    talk_sleep(20000);
    assert_int_equal(FAKE_GET(n_passes), passes);
    engine_pause(talk->engine, job, false);
    assert_speaks(talk_wait(talk, job), "A", 300);
    assert_int_equal(talk->seen[job].states[talk->seen[job].n_states - 1], ENGINE_JOB_DECODING);
    talk_stop(talk);
}

static void jobs_share_passes_and_say_what_they_say_alone(void **state)
{
    Talk *talk = start_one();
    const char *prompts[] = {"A first", "B second", "C third", "D fourth"};
    uint64_t jobs[4];
    uint32_t widest = 0;

    (void)state;
    FAKE_SET(hold, true);
    for (size_t i = 0; i < 4; i++) {
        EngineRequest request = raw_request("m", prompts[i], 50 + (uint32_t)i);

        jobs[i] = talk_generate(talk, &request);
    }
    FAKE_SET(hold, false);
    for (size_t i = 0; i < 4; i++)
        assert_speaks(talk_wait(talk, jobs[i]), prompts[i], 50 + (uint32_t)i);
    for (uint32_t i = 0; i < FAKE_GET(n_passes); i++)
        widest = MAX(widest, fake.passes[i].n_items);
    assert_int_equal(widest, 4);
    assert_true(FAKE_GET(n_passes) < 4 + 60);
    talk_stop(talk);
}

static void background_work_yields_at_a_token_and_goes_on_afterwards(void **state)
{
    Talk *talk = start_one();
    EngineRequest back = raw_request("m", "Back", 200), front = raw_request("m", "Front", 30);
    uint32_t first, last, n;
    uint64_t b, f;

    (void)state;
    back.priority = ENGINE_PRIORITY_BACKGROUND;
    front.priority = ENGINE_PRIORITY_INTERACTIVE;
    FAKE_SET(pass_usec, 300);
    b = talk_generate(talk, &back);
    talk_until(talk, talk->seen[b].n_text > 5);
    f = talk_generate(talk, &front);
    assert_speaks(talk_wait(talk, f), "Front", 30);
    assert_speaks(talk_wait(talk, b), "Back", 200);
    n = FAKE_GET(n_passes);
    for (first = 0; fake.passes[first].first_ids[0] != 'F'; first++)
        continue;
    for (last = n - 1; fake.passes[last].first_ids[0] != 'F'; last--)
        continue;
    for (uint32_t i = first; i <= last; i++) {
        assert_int_equal(fake.passes[i].n_items, 1);
        assert_int_equal(fake.passes[i].first_ids[0], 'F');
    }
    assert_int_equal(last - first + 1, 30);
    for (n = 0; n < talk->seen[b].n_states && talk->seen[b].states[n] != ENGINE_JOB_PAUSED; n++)
        continue;
    assert_true(n < talk->seen[b].n_states); /* and it was told */
    talk_stop(talk);
}

static void an_interactive_job_takes_the_place_of_background_work(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest back = raw_request("m", "Back", 100), front = raw_request("m", "Front", 20);
    uint64_t b, f;
    Talk *talk;

    (void)state;
    fake_reset();
    model.parallel = 1;
    talk = talk_start(&model, 1, 0);
    back.priority = ENGINE_PRIORITY_BACKGROUND;
    front.priority = ENGINE_PRIORITY_INTERACTIVE;
    FAKE_SET(pass_usec, 300);
    b = talk_generate(talk, &back);
    talk_until(talk, talk->seen[b].n_text > 5);
    f = talk_generate(talk, &front);
    assert_speaks(talk_wait(talk, f), "Front", 20);
    assert_false(talk->seen[b].finished);
    assert_speaks(talk_wait(talk, b), "Back", 100);
    talk_stop(talk);
}

static void owners_take_turns_in_the_queue(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest request = raw_request("m", NULL, 10);
    const char *prompts[] = {"1", "2", "3", "4", "5", "6"};
    char order[8] = "";
    uint64_t flood[6], other;
    Talk *talk;

    (void)state;
    fake_reset();
    model.parallel = 1;
    talk = talk_start(&model, 1, 0);
    FAKE_SET(hold, true);
    for (size_t i = 0; i < 6; i++) {
        request.raw = prompts[i];
        flood[i] = talk_generate(talk, &request);
    }
    request.owner = 2;
    request.raw = "Z";
    other = talk_generate(talk, &request);
    talk_until(talk, talk->seen[other].queue_position == 1);
    FAKE_SET(hold, false);
    for (size_t i = 0; i < 6; i++)
        talk_wait(talk, flood[i]);
    talk_wait(talk, other);
    for (uint32_t i = 0, n = 0; i < FAKE_GET(n_passes) && n < 7; i++)
        if (n == 0 || order[n - 1] != fake.passes[i].first_ids[0])
            order[n++] = (char)fake.passes[i].first_ids[0];
    assert_string_equal(order, "1Z23456");
    talk_stop(talk);
}

static void a_seed_gives_the_same_text_and_another_another(void **state)
{
    Talk *talk = start_one();
    EngineRequest request = raw_request("m", "A", 60);
    Seen *a, *b, *c;

    (void)state;
    request.sampling.temperature = 10; /* so flat that chance decides */
    request.sampling.seed = 5;
    a = talk_wait(talk, talk_generate(talk, &request));
    b = talk_wait(talk, talk_generate(talk, &request));
    request.sampling.seed = 6;
    c = talk_wait(talk, talk_generate(talk, &request));
    assert_string_equal(a->text, b->text);
    assert_string_not_equal(a->text, c->text);
    assert_int_equal(a->usage.seed, 5);
    talk_stop(talk);
}

static void ending_with_work_in_hand_leaves_nothing_behind(void **state)
{
    Talk *talk = start_one();
    EngineRequest request = raw_request("m", "A", 0);

    (void)state;
    FAKE_SET(pass_usec, 200);
    for (size_t i = 0; i < 6; i++)
        talk_generate(talk, &request);
    talk_until(talk, talk->seen[1].n_text > 2);
    talk_stop(talk); /* checks the counts */
    talk = start_one();
    FAKE_SET(open_usec, 30000);
    talk_generate(talk, &request);
    talk_stop(talk); /* while the file is being opened */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prompt_is_answered_and_the_usage_is_complete),
        cmocka_unit_test(messages_go_through_the_template),
        cmocka_unit_test(a_model_without_template_says_so_and_takes_raw_text),
        cmocka_unit_test(the_end_of_a_turn_ends_it_unless_it_is_to_be_ignored),
        cmocka_unit_test(a_stop_string_ends_it_and_is_not_shown),
        cmocka_unit_test(the_context_is_filled_exactly_and_never_shifted),
        cmocka_unit_test(wrong_requests_are_refused_and_change_nothing),
        cmocka_unit_test(cancel_takes_effect_at_every_token),
        cmocka_unit_test(cancel_of_a_long_prompt_waits_for_one_chunk_at_most),
        cmocka_unit_test(cancel_reaches_jobs_that_load_or_wait_and_no_other),
        cmocka_unit_test(an_owner_that_leaves_takes_its_jobs_and_sessions_along),
        cmocka_unit_test(a_full_queue_refuses_at_once),
        cmocka_unit_test(a_deadline_ends_what_runs_and_what_waits),
        cmocka_unit_test(a_paused_job_generates_nothing_until_it_is_resumed),
        cmocka_unit_test(jobs_share_passes_and_say_what_they_say_alone),
        cmocka_unit_test(background_work_yields_at_a_token_and_goes_on_afterwards),
        cmocka_unit_test(an_interactive_job_takes_the_place_of_background_work),
        cmocka_unit_test(owners_take_turns_in_the_queue),
        cmocka_unit_test(a_seed_gives_the_same_text_and_another_another),
        cmocka_unit_test(ending_with_work_in_hand_leaves_nothing_behind),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
