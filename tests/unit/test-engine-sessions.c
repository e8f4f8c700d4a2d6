/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions on a model that is played: reuse by ids, warm equals cold, crop, clone, and whose cache goes when memory is short. */

#include "tests/fakes/fake.h"

#include <jansson.h>

static Talk *start_one(void)
{
    EngineModel model = fake_model("m", "m.gguf");

    fake_reset();
    return talk_start(&model, 1, 0);
}

static Seen *say(Talk *talk, uint64_t session, const char *text, uint32_t max_tokens)
{
    EngineRequest request = raw_request(NULL, text, max_tokens);

    request.session = session;
    return talk_wait(talk, talk_generate(talk, &request));
}

static json_int_t number_of(const EngineEvent *reply, const char *key)
{
    json_t *json = json_loads(reply->json ? reply->json : "", 0, NULL);
    json_int_t n = json_is_integer(json_object_get(json, key)) ? json_integer_value(json_object_get(json, key)) : -1;

    json_decref(json);
    return n;
}

static EngineEvent *ask_session(Talk *talk, EngineQueryKind kind, uint64_t session, int64_t n)
{
    return talk_ask(talk, (EngineQuery){.kind = kind, .owner = 1, .session = session, .n = n});
}

static void the_next_turn_reuses_what_agrees_by_ids(void **state)
{
    Talk *talk = start_one();
    uint64_t session = talk_open(talk, "m", 1);
    char prompt[256] = "First question";
    Seen *seen;

    (void)state;
    seen = say(talk, session, prompt, 20);
    assert_int_equal(seen->usage.reused_tokens, 0);
    (void)snprintf(prompt, sizeof(prompt), "First question%.100s Second", seen->text);
    seen = say(talk, session, prompt, 20);
    assert_int_equal(seen->usage.reused_tokens, 14 + 19); /* the last token of the answer was never run */
    assert_int_equal(seen->usage.prompt_tokens, 14 + 20 + 7);
    assert_speaks(seen, prompt, 20);
    talk_stop(talk);
}

static void an_edit_near_the_start_reuses_what_is_before_it(void **state)
{
    Talk *talk = start_one();
    uint64_t session = talk_open(talk, "m", 1);
    Seen *seen;

    (void)state;
    say(talk, session, "One two three four", 20);
    seen = say(talk, session, "One tWo three four", 20);
    assert_int_equal(seen->usage.reused_tokens, 5);
    assert_speaks(seen, "One tWo three four", 20);
    seen = say(talk, session, "One tWo three four", 20); /* the same again: all but the last id, which gives the logits */
    assert_int_equal(seen->usage.reused_tokens, 17);
    assert_speaks(seen, "One tWo three four", 20);
    seen = say(talk, session, "One", 20); /* shorter than what is cached */
    assert_int_equal(seen->usage.reused_tokens, 2);
    assert_speaks(seen, "One", 20);
    seen = say(talk, session, "Else", 20);
    assert_int_equal(seen->usage.reused_tokens, 0);
    assert_speaks(seen, "Else", 20);
    talk_stop(talk);
}

/* A packed cache goes back to checkpoints only: every 1024 tokens of a prompt, its end, the answer's end. */
static void a_packed_cache_runs_again_what_it_cannot_keep(void **state)
{
    Talk *talk = start_one();
    uint64_t session = talk_open(talk, "m", 1);
    char prompt[3001];
    Seen *seen;

    (void)state;
    FAKE_SET(packed, true);
    for (size_t i = 0; i < 3000; i++)
        prompt[i] = (char)('A' + i * 7 % 53 % 26);
    prompt[3000] = 0;
    seen = say(talk, session, prompt, 100);
    assert_speaks(seen, prompt, 100);
    prompt[2500] = '#';
    seen = say(talk, session, prompt, 10);
    assert_int_equal(seen->usage.reused_tokens, 2048);
    assert_speaks(seen, prompt, 10);
    prompt[1500] = '#';
    seen = say(talk, session, prompt, 10);
    assert_int_equal(seen->usage.reused_tokens, 1024);
    assert_speaks(seen, prompt, 10);
    talk_stop(talk);
}

static void a_cancelled_generation_leaves_a_session_that_goes_on_right(void **state)
{
    Talk *talk = start_one();
    uint64_t session = talk_open(talk, "m", 1), job;
    EngineRequest request = raw_request(NULL, "Tell me", 100);
    char prompt[256];
    Seen *seen;

    (void)state;
    request.session = session;
    FAKE_SET(pass_usec, 300);
    for (uint32_t at = 0; at < 12; at += 3) {
        job = talk_generate(talk, &request);
        talk_until(talk, talk->seen[job].n_text >= at);
        engine_cancel(talk->engine, job);
        talk_wait(talk, job);
        (void)snprintf(prompt, sizeof(prompt), "Tell me%s and", talk->seen[job].text);
        seen = say(talk, session, prompt, 10);
        assert_speaks(seen, prompt, 10);
    }
    talk_stop(talk);
}

static void a_busy_session_and_another_owners_are_refused(void **state)
{
    Talk *talk = start_one();
    uint64_t session = talk_open(talk, "m", 1), job;
    EngineRequest request = raw_request(NULL, "Tell me", 10);
    Seen *seen;

    (void)state;
    request.session = session;
    FAKE_SET(hold, true);
    job = talk_generate(talk, &request);
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_SESSION_BUSY);
    FAKE_SET(hold, false);
    assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_DONE);
    request.owner = 2;
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_NO_SUCH_SESSION);
    for (int kind = ENGINE_QUERY_CLOSE_SESSION; kind <= ENGINE_QUERY_SESSION_CACHE; kind++)
        assert_int_equal(talk_ask(talk, (EngineQuery){.kind = (EngineQueryKind)kind, .owner = 2, .session = session})->result,
                         ENGINE_RESULT_NO_SUCH_SESSION);
    request.owner = 1;
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_DONE);
    talk_stop(talk);
}

/* A session that is cold begins to record when it is warmed; a crop begins anew, off is off. */
static void recording_is_a_state_of_the_session(void **state)
{
    Talk *talk = start_one();
    uint64_t session = talk_open(talk, "m", 1);

    (void)state;
    assert_int_equal(ask_session(talk, ENGINE_QUERY_RECORD_SESSION, session, 1)->result, ENGINE_RESULT_DONE);
    say(talk, session, "0123456789", 6);
    assert_true(fake_cache_is_recording(0));
    assert_int_equal(number_of(ask_session(talk, ENGINE_QUERY_CROP_SESSION, session, -3), "length"), 12);
    assert_true(fake_cache_is_recording(0));
    assert_int_equal(ask_session(talk, ENGINE_QUERY_RECORD_SESSION, session, 0)->result, ENGINE_RESULT_DONE);
    assert_false(fake_cache_is_recording(0));
    talk_stop(talk);
}

static void crop_removes_from_the_end_and_says_the_length(void **state)
{
    Talk *talk = start_one();
    uint64_t session = talk_open(talk, "m", 1);
    EngineEvent *reply;
    Seen *seen;

    (void)state;
    say(talk, session, "0123456789", 6); /* 15 tokens are cached */
    reply = ask_session(talk, ENGINE_QUERY_CROP_SESSION, session, 0);
    assert_int_equal(number_of(reply, "length"), 15);
    reply = ask_session(talk, ENGINE_QUERY_CROP_SESSION, session, -7);
    assert_int_equal(number_of(reply, "length"), 8);
    seen = say(talk, session, "0123456789", 6);
    assert_int_equal(seen->usage.reused_tokens, 8);
    assert_speaks(seen, "0123456789", 6);
    assert_int_equal(ask_session(talk, ENGINE_QUERY_CROP_SESSION, session, 1)->result, ENGINE_RESULT_INVALID_ARGS);
    assert_int_equal(ask_session(talk, ENGINE_QUERY_CROP_SESSION, session, -16)->result, ENGINE_RESULT_INVALID_ARGS);
    assert_int_equal(ask_session(talk, ENGINE_QUERY_CROP_SESSION, session, INT64_MIN)->result, ENGINE_RESULT_INVALID_ARGS);
    assert_int_equal(number_of(ask_session(talk, ENGINE_QUERY_CROP_SESSION, session, -15), "length"), 0);
    talk_stop(talk);
}

static void a_clone_shares_the_past_and_goes_its_own_way(void **state)
{
    Talk *talk = start_one();
    uint64_t session = talk_open(talk, "m", 1), clone;
    EngineEvent *reply;
    Seen *seen;

    (void)state;
    say(talk, session, "Common past", 6);
    reply = ask_session(talk, ENGINE_QUERY_CLONE_SESSION, session, 0);
    assert_int_equal(reply->result, ENGINE_RESULT_DONE);
    clone = reply->session;
    assert_int_not_equal(clone, session);
    seen = say(talk, clone, "Common past, its own", 6);
    assert_int_equal(seen->usage.reused_tokens, 11);
    assert_speaks(seen, "Common past, its own", 6);
    seen = say(talk, session, "Common past, other", 6);
    assert_int_equal(seen->usage.reused_tokens, 11);
    assert_speaks(seen, "Common past, other", 6);
    assert_int_equal(FAKE_GET(n_forked), 1);
    talk_stop(talk);
}

static void facts_of_the_cache_are_told(void **state)
{
    Talk *talk = start_one();
    uint64_t session = talk_open(talk, "m", 1);
    EngineEvent *reply;

    (void)state;
    reply = ask_session(talk, ENGINE_QUERY_SESSION_CACHE, session, 0); /* before anything is loaded */
    assert_int_equal(number_of(reply, "length"), 0);
    say(talk, session, "0123456789", 6);
    reply = ask_session(talk, ENGINE_QUERY_SESSION_CACHE, session, 0);
    assert_non_null(strstr(reply->json, "\"strategy\":\"offloaded_quantized\""));
    assert_non_null(strstr(reply->json, "\"form\":\"leat-k5v4\""));
    assert_int_equal(number_of(reply, "length"), 15);
    assert_int_equal(number_of(reply, "cached-length"), 15);
    assert_int_equal(number_of(reply, "host-bytes"), 15);
    assert_int_equal(number_of(reply, "context"), FAKE_CONTEXT);
    talk_stop(talk);
}

static void closing_a_session_cancels_its_job(void **state)
{
    Talk *talk = start_one();
    uint64_t session = talk_open(talk, "m", 1), job;
    EngineRequest request = raw_request(NULL, "Tell me", 0);

    (void)state;
    request.session = session;
    FAKE_SET(pass_usec, 300);
    job = talk_generate(talk, &request);
    talk_until(talk, talk->seen[job].n_text > 2);
    assert_int_equal(ask_session(talk, ENGINE_QUERY_CLOSE_SESSION, session, 0)->result, ENGINE_RESULT_DONE);
    assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_CANCELLED);
    assert_int_equal(talk->n_closed, 1);
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_NO_SUCH_SESSION);
    talk_stop(talk);
}

static void idle_sessions_give_their_cache_when_memory_is_short(void **state)
{
    Talk *talk = start_one();
    uint64_t a = talk_open(talk, "m", 1), b = talk_open(talk, "m", 1);
    Seen *seen;

    (void)state;
    FAKE_SET(room_tokens, 60);
    say(talk, a, "Session A has spoken of this", 10);
    seen = say(talk, b, "Session B needs much more room than it", 15);
    assert_int_equal(seen->result, ENGINE_RESULT_DONE);
    assert_speaks(seen, "Session B needs much more room than it", 15);
    seen = say(talk, a, "Session A has spoken of this", 10); /* cold, and the same */
    assert_int_equal(seen->usage.reused_tokens, 0);
    assert_speaks(seen, "Session A has spoken of this", 10);
    talk_stop(talk);
}

static void jobs_wait_for_each_other_when_memory_is_short_and_one_alone_fails(void **state)
{
    Talk *talk = start_one();
    const char *prompts[] = {"A twenty tokens here", "B twenty tokens here", "C twenty tokens here"};
    uint64_t jobs[3];
    EngineRequest request = raw_request("m", NULL, 60);
    Seen *seen;

    (void)state;
    FAKE_SET(room_tokens, 100);
    FAKE_SET(hold, true);
    for (size_t i = 0; i < 3; i++) {
        request.raw = prompts[i];
        jobs[i] = talk_generate(talk, &request);
    }
    FAKE_SET(hold, false);
    for (size_t i = 0; i < 3; i++) {
        seen = talk_wait(talk, jobs[i]);
        assert_int_equal(seen->result, ENGINE_RESULT_DONE);
        assert_speaks(seen, prompts[i], 60);
    }
    request.sampling.max_tokens = 200;
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_OUT_OF_MEMORY);
    assert_non_null(strstr(seen->detail.text, "101 tokens do not fit"));
    assert_string_equal(seen->usage.stop_reason, "error");
    request.sampling.max_tokens = 5;
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_DONE);
    talk_stop(talk);
}

static void an_own_policy_is_kept_by_the_session(void **state)
{
    Talk *talk = start_one();
    KvPolicy policy = {.strategy = KV_STRATEGY_DYNAMIC, .home = KV_HOME_DEVICE, .form = kv_form_default(KV_FORM_F16), .max_cache_tokens = 30};
    EngineEvent *reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_OPEN_SESSION, .owner = 1, .model = "m", .policy = &policy});
    uint64_t session = reply->session;
    Seen *seen;

    (void)state;
    seen = say(talk, session, "0123456789", 0);
    assert_string_equal(seen->usage.form, "f16");
    assert_string_equal(seen->usage.home, "device");
    assert_string_equal(seen->usage.stop_reason, "context_full");
    assert_int_equal(seen->usage.output_tokens, 20);
    assert_int_equal(FAKE_GET(n_stores), 2);
    seen = say(talk, talk_open(talk, "m", 1), "0123456789", 3);
    assert_string_equal(seen->usage.form, "leat-k5v4");
    assert_int_equal(FAKE_GET(n_stores), 2);
    talk_stop(talk);
}

static void tokens_are_counted_without_loading_the_weights(void **state)
{
    Talk *talk = start_one();
    const EngineMessage messages[] = {{"user", "Hi"}};
    EngineEvent *reply;

    (void)state;
    reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_COUNT_TOKENS, .model = "m", .text = "abc", .want_ids = true});
    assert_int_equal(number_of(reply, "tokens"), 3);
    assert_int_equal(reply->n_ids, 3);
    assert_int_equal(reply->ids[2], 'c');
    assert_int_equal(FAKE_GET(n_models), 0);
    reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_COUNT_TOKENS, .model = "m", .text = ""});
    assert_int_equal(number_of(reply, "tokens"), 0);
    reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_COUNT_TOKENS,
                                         .owner = 1,
                                         .session = talk_open(talk, "m", 1),
                                         .messages = messages,
                                         .n_messages = 1});
    assert_int_equal(number_of(reply, "tokens"), 9);
    reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_COUNT_TOKENS, .model = "none", .text = "abc"});
    assert_int_equal(reply->result, ENGINE_RESULT_NO_SUCH_MODEL);
    talk_stop(talk);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_next_turn_reuses_what_agrees_by_ids),
        cmocka_unit_test(an_edit_near_the_start_reuses_what_is_before_it),
        cmocka_unit_test(a_packed_cache_runs_again_what_it_cannot_keep),
        cmocka_unit_test(a_cancelled_generation_leaves_a_session_that_goes_on_right),
        cmocka_unit_test(a_busy_session_and_another_owners_are_refused),
        cmocka_unit_test(recording_is_a_state_of_the_session),
        cmocka_unit_test(crop_removes_from_the_end_and_says_the_length),
        cmocka_unit_test(a_clone_shares_the_past_and_goes_its_own_way),
        cmocka_unit_test(facts_of_the_cache_are_told),
        cmocka_unit_test(closing_a_session_cancels_its_job),
        cmocka_unit_test(idle_sessions_give_their_cache_when_memory_is_short),
        cmocka_unit_test(jobs_wait_for_each_other_when_memory_is_short_and_one_alone_fails),
        cmocka_unit_test(an_own_policy_is_kept_by_the_session),
        cmocka_unit_test(tokens_are_counted_without_loading_the_weights),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
