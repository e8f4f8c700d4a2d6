/* SPDX-License-Identifier: Apache-2.0 */
/* Beginnings of prompts that are kept for others, on a model that is played: who reuses what, and what gives way. */

#include "tests/fakes/fake.h"

#define SYSTEM "You answer in one short sentence, whoever asks and whatever they ask."

static Talk *start(uint32_t n_prefixes)
{
    EngineModel model = fake_model("m", "m.gguf");

    model.n_prefixes = n_prefixes;
    fake_reset();
    return talk_start(&model, 1, 0);
}

/* A service's request: the first message is shared. */
static Seen *invoke(Talk *talk, uint64_t owner, const char *text, size_t n_shared)
{
    EngineMessage messages[] = {{"system", SYSTEM}, {"user", text}};
    EngineRequest request = raw_request("m", NULL, 8);

    request.owner = owner;
    request.raw = NULL;
    request.messages = messages;
    request.n_messages = 2;
    request.n_shared = n_shared;
    return talk_wait(talk, talk_generate(talk, &request));
}

static Seen *ask(Talk *talk, uint64_t owner, const char *text, uint32_t max_tokens)
{
    EngineRequest request = raw_request("m", text, max_tokens);

    request.owner = owner;
    return talk_wait(talk, talk_generate(talk, &request));
}

static void shared_messages_are_run_once_for_everyone(void **state)
{
    Talk *talk = start(4);
    const uint32_t n_shared = (uint32_t)strlen("[system:" SYSTEM "][user:");
    char full[256];
    Seen *seen;

    (void)state;
    seen = invoke(talk, 1, "What is the time?", 1);
    assert_int_equal(seen->usage.reused_tokens, 0);
    seen = invoke(talk, 2, "What else is there?", 1);
    assert_int_equal(seen->usage.reused_tokens, n_shared);
    (void)snprintf(full, sizeof(full), "[system:%s][user:What else is there?]", SYSTEM);
    assert_speaks(seen, full, 8);
    talk_stop(talk);
}

static void what_one_owner_asked_is_not_seen_by_another(void **state)
{
    Talk *talk = start(4);
    const char *text = "A long document that nobody else is to know about, and a question.";
    Seen *seen;

    (void)state;
    ask(talk, 1, text, 8);
    seen = ask(talk, 2, text, 8);
    assert_int_equal(seen->usage.reused_tokens, 0);
    seen = ask(talk, 1, text, 8);
    assert_int_equal(seen->usage.reused_tokens, strlen(text) - 1);
    assert_speaks(seen, text, 8);
    /* Nor is more of a service's prompt than is marked. */
    invoke(talk, 1, "secret words of the first owner", 1);
    seen = invoke(talk, 2, "secret words of the first owner", 1);
    assert_int_equal(seen->usage.reused_tokens, strlen("[system:" SYSTEM "][user:"));
    talk_stop(talk);
}

static void an_owner_that_leaves_takes_its_pasts_with_it(void **state)
{
    Talk *talk = start(4);
    Seen *seen;

    (void)state;
    ask(talk, 7, "Another long document, with a question at its end.", 8);
    assert_int_equal(FAKE_GET(n_caches), 1);
    engine_owner_gone(talk->engine, 7);
    seen = ask(talk, 7, "Another long document, with a question at its end.", 8);
    assert_int_equal(seen->usage.reused_tokens, 0);
    talk_stop(talk);
}

static void the_oldest_gives_way_to_a_new_one(void **state)
{
    const char *texts[] = {"The first of three documents, long enough to be kept.", "Second of three documents, long enough to be kept.",
                           "Third of the three documents, long enough to be kept."};
    Talk *talk = start(2);

    (void)state;
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(ask(talk, 1, texts[i], 4)->usage.reused_tokens, 0);
    assert_int_equal(FAKE_GET(n_caches), 2);
    assert_int_equal(ask(talk, 1, texts[2], 4)->usage.reused_tokens, strlen(texts[2]) - 1);
    assert_int_equal(ask(talk, 1, texts[0], 4)->usage.reused_tokens, 0);
    talk_stop(talk);
}

static void kept_pasts_give_way_to_running_work(void **state)
{
    Talk *talk = start(4);
    Seen *seen;

    (void)state;
    ask(talk, 1, "A document that is long enough to be kept for later.", 4);
    FAKE_SET(room_tokens, 80);
    seen = ask(talk, 1, "Quite another one, which needs nearly all of the room that there is.", 8);
    assert_int_equal(seen->result, ENGINE_RESULT_DONE);
    assert_speaks(seen, "Quite another one, which needs nearly all of the room that there is.", 8);
    talk_stop(talk);
}

static void a_packed_past_is_gone_on_from_where_it_can_be(void **state)
{
    char prompt[200];
    Talk *talk = start(4);
    Seen *seen;

    (void)state;
    FAKE_SET(packed, true);
    memset(prompt, 'x', sizeof(prompt) - 1);
    prompt[sizeof(prompt) - 1] = 0;
    seen = ask(talk, 1, prompt, 60);
    assert_int_equal(seen->result, ENGINE_RESULT_DONE);
    seen = ask(talk, 1, prompt, 8); /* the checkpoint at the prompt's end is one token too far */
    assert_int_equal(seen->usage.reused_tokens, 0);
    assert_speaks(seen, prompt, 8);
    prompt[150] = 'y';
    seen = ask(talk, 1, prompt, 8); /* there is no place to come back to yet: this one makes it */
    assert_int_equal(seen->usage.reused_tokens, 0);
    assert_speaks(seen, prompt, 8);
    prompt[150] = 'z';
    seen = ask(talk, 1, prompt, 8);
    assert_int_equal(seen->usage.reused_tokens, 150);
    assert_speaks(seen, prompt, 8);
    talk_stop(talk);
}

static void none_are_kept_when_none_are_wanted(void **state)
{
    Talk *talk = start(0);

    (void)state;
    ask(talk, 1, "A document that is long enough to be kept for later.", 4);
    assert_int_equal(FAKE_GET(n_caches), 0);
    invoke(talk, 1, "What is the time?", 1);
    assert_int_equal(invoke(talk, 1, "What is the time?", 1)->usage.reused_tokens, 0);
    talk_stop(talk);
}

static void short_beginnings_are_not_worth_keeping(void **state)
{
    Talk *talk = start(4);

    (void)state;
    ask(talk, 1, "Short", 4);
    assert_int_equal(FAKE_GET(n_caches), 0);
    talk_stop(talk);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shared_messages_are_run_once_for_everyone),
        cmocka_unit_test(what_one_owner_asked_is_not_seen_by_another),
        cmocka_unit_test(an_owner_that_leaves_takes_its_pasts_with_it),
        cmocka_unit_test(the_oldest_gives_way_to_a_new_one),
        cmocka_unit_test(kept_pasts_give_way_to_running_work),
        cmocka_unit_test(a_packed_past_is_gone_on_from_where_it_can_be),
        cmocka_unit_test(none_are_kept_when_none_are_wanted),
        cmocka_unit_test(short_beginnings_are_not_worth_keeping),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
