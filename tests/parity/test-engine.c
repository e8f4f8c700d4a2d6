/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine with the real model, whose file LEAT_TEST_MODEL names: its own template and tokenizer lead to the oracle's ids, a
 * conversation reuses its past, a seed repeats itself, and what a user does in the middle does no harm.
 */

#include "tests/lib/beam-oracle.h"
#include "tests/lib/model-rig.h"
#include "tests/lib/patience.h"
#include "tests/lib/place.h"

static const char *model_path;

static Talk *start(KvStrategy strategy, bool exact, KvTransfer transfer)
{
    EngineModel model = {.name = "real",
                         .path = model_path,
                         .exact = exact,
                         .policy = kv_policy_preset(strategy, exact),
                         .parallel = 4,
                         .keep_alive_usec = UINT64_MAX};
    EngineOptions options = {.gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC}, .models = &model, .n_models = 1};

    model.policy.transfer = transfer;
    return talk_new(&options);
}

static const OraclePrompt *find_prompt(const Oracle *oracle, const char *name)
{
    for (size_t i = 0; i < oracle->n_prompts; i++)
        if (strcmp(oracle->prompts[i].name, name) == 0)
            return &oracle->prompts[i];
    print_error("the fixture has no prompt '%s'\n", name);
    abort();
}

static void expect_done(const Seen *seen)
{
    if (seen->result != ENGINE_RESULT_DONE)
        fail_msg("result %d: %s", (int)seen->result, seen->detail.text);
}

static void a_chat_in_exact_compute_gives_the_oracles_ids(void **state)
{
    const EngineMessage messages[] = {
        {"system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"},
        {"user", "Why does the moon always show us the same side? Answer in three sentences."},
    };
    _cleanup_(oracle_freep) Oracle *oracle = oracle_load("smollm2-oracle.json");
    const OraclePrompt *chat = find_prompt(oracle, "chat");
    Talk *talk = start(KV_STRATEGY_OFFLOADED, true, KV_TRANSFER_COPY);
    EngineRequest request = raw_request("real", NULL, 48);
    EngineEvent *count;
    Seen *seen;

    (void)state;
    count = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_COUNT_TOKENS, .model = "real", .messages = messages, .n_messages = 2,
                                         .want_ids = true});
    assert_int_equal(count->result, ENGINE_RESULT_DONE);
    assert_int_equal(count->n_ids, chat->n_prompt);
    assert_memory_equal(count->ids, chat->ids, chat->n_prompt * sizeof(int32_t));
    request.messages = messages;
    request.n_messages = 2;
    request.want_ids = true;
    request.sampling.ignore_eos = true;
    seen = talk_wait(talk, talk_generate(talk, &request));
    expect_done(seen);
    for (uint32_t i = 0; i < seen->n_ids; i++) {
        if (chat->tie[i] == seen->ids[i]) {
            print_message("a tie at step %u was taken the other way\n", i);
            break;
        }
        assert_int_equal(seen->ids[i], chat->ids[chat->n_prompt + i]);
    }
    print_message("prefill %.1f, decode %.1f tokens a second\n", seen->usage.prefill_rate, seen->usage.decode_rate);
    talk_free(talk);
}

static void a_conversation_reuses_its_past_and_says_what_a_cold_one_says(void **state)
{
    EngineMessage messages[5] = {{"user", "Name three rivers of Europe."},
                                 {"assistant", NULL},
                                 {"user", "Which of them is the longest? Say why."},
                                 {"assistant", NULL},
                                 {"user", "And in Africa?"}};
    Talk *talk = start(KV_STRATEGY_OFFLOADED_QUANTIZED, false, KV_TRANSFER_COPY);
    EngineRequest request = raw_request(NULL, NULL, 32);
    uint64_t session = talk_open(talk, "real", 1);

    (void)state;
    request.messages = messages;
    for (size_t turn = 0; turn < 3; turn++) {
        Seen *warm, *cold;

        request.n_messages = 2 * turn + 1;
        request.session = session;
        request.model = NULL;
        warm = talk_wait(talk, talk_generate(talk, &request));
        expect_done(warm);
        request.session = 0;
        request.model = "real";
        cold = talk_wait(talk, talk_generate(talk, &request));
        expect_done(cold);
        assert_string_equal(warm->text, cold->text);
        assert_true(warm->n_text > 0);
        if (turn > 0) {
            assert_true(warm->usage.reused_tokens > cold->usage.prompt_tokens / 2);
            assert_true(warm->usage.upload_bytes > 0);
        }
        print_message("turn %zu: %u of %u tokens reused, prefill %.1f, decode %.1f tokens a second, %.0f %% of %llu us of copies hidden\n",
                      turn, warm->usage.reused_tokens, warm->usage.prompt_tokens, warm->usage.prefill_rate, warm->usage.decode_rate,
                      warm->usage.hidden_share * 100, (unsigned long long)warm->usage.copy_usec);
        if (turn < 2)
            messages[2 * turn + 1].content = warm->text;
    }
    talk_free(talk);
}

static void beams_in_exact_compute_are_those_of_transformers(void **state)
{
    Talk *talk = start(KV_STRATEGY_OFFLOADED, true, KV_TRANSFER_COPY);
    double worst;
    size_t n;

    (void)state;
    worst = beam_oracle_compare(talk, "smollm2-beams.json", "real", &n);
    print_message("%zu searches, scores within %.1e\n", n, worst);
    assert_true(n >= 4 && worst < 1e-3);
    talk_free(talk);
}

static void a_seed_repeats_itself(void **state)
{
    Talk *talk = start(KV_STRATEGY_OFFLOADED_QUANTIZED, false, KV_TRANSFER_AUTO);
    EngineRequest request = raw_request("real", "The old mill by the river", 24);
    Seen *a, *b, *c;

    (void)state;
    request.sampling.temperature = 0.9f;
    request.sampling.top_k = 40;
    request.sampling.top_p = 0.95f;
    request.sampling.seed = 11;
    a = talk_wait(talk, talk_generate(talk, &request));
    b = talk_wait(talk, talk_generate(talk, &request));
    request.sampling.seed = 12;
    c = talk_wait(talk, talk_generate(talk, &request));
    expect_done(a);
    assert_string_equal(a->text, b->text);
    assert_string_not_equal(a->text, c->text);
    talk_free(talk);
}

static void background_work_and_a_person_both_get_their_answers(void **state)
{
    Talk *talk = start(KV_STRATEGY_OFFLOADED_QUANTIZED, false, KV_TRANSFER_AUTO);
    EngineRequest back = raw_request("real", "Water flows from the reservoir to the mill because", 40),
                  front = raw_request("real", "Once upon a time", 16);
    uint64_t b, f, alone;

    (void)state;
    back.priority = ENGINE_PRIORITY_BACKGROUND;
    front.priority = ENGINE_PRIORITY_INTERACTIVE;
    alone = talk_generate(talk, &back);
    expect_done(talk_wait(talk, alone));
    b = talk_generate(talk, &back);
    talk_until(talk, talk->seen[b].n_text > 10);
    f = talk_generate(talk, &front);
    expect_done(talk_wait(talk, f));
    expect_done(talk_wait(talk, b));
    assert_string_equal(talk->seen[b].text, talk->seen[alone].text);
    talk_free(talk);
}

static void a_prompt_beyond_the_context_is_refused_with_the_numbers(void **state)
{
    Talk *talk = start(KV_STRATEGY_OFFLOADED_QUANTIZED, false, KV_TRANSFER_AUTO);
    EngineRequest request = raw_request("real", NULL, 4);
    _cleanup_(freep) int32_t *ids = calloc(8193, sizeof(*ids));
    Seen *seen;

    (void)state;
    assert_non_null(ids);
    request.ids = ids;
    request.n_ids = 8193;
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_CONTEXT_EXCEEDED);
    assert_string_equal(seen->detail.text, "the prompt has 8193 tokens, the context holds 8192");
    talk_free(talk);
}

static int setup(void **state)
{
    (void)state;
    model_path = test_model_path();
    return model_path ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chat_in_exact_compute_gives_the_oracles_ids),
        cmocka_unit_test(a_conversation_reuses_its_past_and_says_what_a_cold_one_says),
        cmocka_unit_test(beams_in_exact_compute_are_those_of_transformers),
        cmocka_unit_test(a_seed_repeats_itself),
        cmocka_unit_test(background_work_and_a_person_both_get_their_answers),
        cmocka_unit_test(a_prompt_beyond_the_context_is_refused_with_the_numbers),
    };

    return cmocka_run_group_tests(tests, setup, NULL);
}
