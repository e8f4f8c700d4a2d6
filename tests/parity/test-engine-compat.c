/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compatibility mode through the whole engine, on a tiny model: sessions that were saved, cloned or spilled go on as those that were left
 * alone, requests do not depend on each other, prompts may take any number of passes, and beams are Transformers' where rows are coded apart
 * (tests/parity/make-quantized-beams.py), else refused.
 */

#include "tests/lib/beam-oracle.h"
#include "tests/lib/model-rig.h"
#include "tests/lib/patience.h"

#include <jansson.h>
#include <sys/mman.h>
#include <unistd.h>

#define N_VOCAB 320

static char tied[4096];

static KvPolicy compatible(const char *backend, int64_t nbits, int64_t axis, int64_t group, int64_t residual)
{
    bool fp8 = strcmp(backend, "fp8") == 0;
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_QUANTIZED, true);
    KvQuantRequest request = {.backend = backend, .has_nbits = !fp8, .has_axis_key = !fp8, .has_axis_value = !fp8, .has_q_group_size = !fp8,
                              .has_residual_length = !fp8, .nbits = nbits, .axis_key = axis, .axis_value = axis, .q_group_size = group,
                              .residual_length = residual};
    ErrorDetail detail = ERROR_DETAIL_NULL;

    policy.is_compatible = true;
    if (kv_quant_options(&request, &policy.compatible, &detail))
        fail_msg("%s", detail.text);
    policy.form = kv_form_default(policy.compatible.backend == KV_BACKEND_HQQ   ? KV_FORM_HQQ
                                  : policy.compatible.backend == KV_BACKEND_FP8 ? KV_FORM_FP8
                                                                                : KV_FORM_QUANTO);
    return policy;
}

static EngineModel tiny(const char *name, KvPolicy policy)
{
    return (EngineModel){.name = name, .path = tied, .exact = true, .policy = policy, .parallel = 2, .keep_alive_usec = UINT64_MAX};
}

static Talk *start(const EngineModel *models, size_t n, uint64_t budget)
{
    EngineOptions options = {.gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC, .default_max_memory_bytes = budget},
                             .models = models,
                             .n_models = n};

    return talk_new(&options);
}

#define N_PROMPT 90
#define N_SAID   30
#define N_SECOND 17

/* The second turn of a conversation whose first one was said; what was reused is all but the last id that was said. */
static Seen *second_turn(Talk *talk, uint64_t session, const int32_t *ids)
{
    Seen *seen = talk_ids(talk, NULL, session, ids, N_PROMPT + N_SAID + N_SECOND, N_SAID);

    assert_int_equal(seen->usage.reused_tokens, N_PROMPT + N_SAID - 1);
    return seen;
}

static bool is_warm(Talk *talk, uint64_t session)
{
    EngineEvent *reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_SESSION_CACHE, .owner = 1, .session = session});
    json_t *json = json_loads(reply->json, 0, NULL);
    bool warm = json_is_true(json_object_get(json, "warm"));

    json_decref(json);
    return warm;
}

static void a_session_goes_on_from_a_file_a_clone_and_a_spill(void **state)
{
    KvPolicy policies[] = {compatible("hqq", 4, 1, 16, 7), compatible("quanto", 2, 0, 32, 40), compatible("fp8", 0, 0, 0, 0)};
    char folder[] = "/tmp/leat-spill-XXXXXX";

    (void)state;
    assert_non_null(mkdtemp(folder));
    for (size_t p = 0; p < N_ELEMENTS(policies); p++) {
        EngineModel models[] = {tiny("stay", policies[p]), tiny("spill", policies[p])};
        int32_t ids[N_PROMPT + N_SAID + N_SECOND];
        uint64_t alone, saved, restored, spilled;
        int fd = memfd_create("session", MFD_CLOEXEC);
        EngineEvent *reply;
        Seen *first, *expected;
        Talk *talk;

        models[1].spill_dir = folder;
        models[1].spill_after_usec = 20000;
        talk = start(models, 2, 0);
        rig_random_ids(40 + (uint32_t)p, 256, ids, N_ELEMENTS(ids));
        alone = talk_open(talk, "stay", 1);
        first = talk_ids(talk, NULL, alone, ids, N_PROMPT, N_SAID);
        memcpy(ids + N_PROMPT, first->ids, N_SAID * sizeof(int32_t));
        saved = talk_open(talk, "stay", 1);
        assert_same_ids(talk_ids(talk, NULL, saved, ids, N_PROMPT, N_SAID), first);
        reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_SAVE_SESSION, .owner = 1, .session = saved, .fd = dup(fd)});
        assert_int_equal(reply->result, ENGINE_RESULT_DONE);
        reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_CLONE_SESSION, .owner = 1, .session = saved});
        assert_int_equal(reply->result, ENGINE_RESULT_DONE);
        expected = second_turn(talk, alone, ids);
        assert_same_ids(second_turn(talk, reply->session, ids), expected);
        restored = talk_open(talk, "stay", 1);
        reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_RESTORE_SESSION, .owner = 1, .session = restored, .fd = dup(fd)});
        if (reply->result != ENGINE_RESULT_DONE)
            fail_msg("%s", reply->detail.text);
        assert_same_ids(second_turn(talk, restored, ids), expected);
        spilled = talk_open(talk, "spill", 1);
        talk_ids(talk, NULL, spilled, ids, N_PROMPT, N_SAID);
        talk_until(talk, !is_warm(talk, spilled) || (talk_sleep(20000), false));
        assert_same_ids(second_turn(talk, spilled, ids), expected);
        (void)close(fd);
        talk_free(talk);
    }
    (void)rmdir(folder);
}

/* What another request left behind is quantised where its prompt ended: nobody goes on from there. */
static void requests_do_not_go_on_from_each_other(void **state)
{
    EngineModel model = tiny("m", compatible("hqq", 2, 1, 16, 4));
    Seen *first, *longer;
    int32_t ids[200];
    Talk *talk;

    (void)state;
    model.n_prefixes = 4;
    talk = start(&model, 1, 0);
    rig_random_ids(50, 256, ids, N_ELEMENTS(ids));
    longer = talk_ids(talk, "m", 0, ids, 200, 20);
    first = talk_ids(talk, "m", 0, ids, 120, 20);
    for (int again = 0; again < 2; again++) {
        Seen *seen = talk_ids(talk, "m", 0, ids, 120, 20);

        assert_int_equal(seen->usage.reused_tokens, 0);
        assert_same_ids(seen, first);
        seen = talk_ids(talk, "m", 0, ids, 200, 20);
        assert_int_equal(seen->usage.reused_tokens, 0);
        assert_same_ids(seen, longer);
    }
    talk_free(talk);
}

/* Two long prompts of one call share passes, so the second is cut; a prompt is one update all the same. */
static void prompts_of_one_call_say_what_each_says_alone(void **state)
{
    EngineModel model = tiny("m", compatible("hqq", 2, 1, 16, 4));
    static char texts[2][701];
    const char *prompts[] = {texts[0], texts[1]};
    Talk *talk = start(&model, 1, 0);
    EngineRequest request = raw_request("m", NULL, 24);
    Seen *together;

    (void)state;
    for (size_t i = 0; i < 2; i++)
        for (size_t c = 0; c < 700; c++)
            texts[i][c] = (char)('a' + (c * c + 31 * c * (i + 1) + c / 7) % 26);
    request.prompts = prompts;
    request.n_prompts = 2;
    request.prompts_raw = true;
    request.want_ids = true;
    request.sampling.ignore_eos = true;
    together = beam_run(talk, &request);
    assert_int_equal(together->n_sequences, 2);
    for (size_t i = 0; i < 2; i++) {
        EngineRequest one = raw_request("m", texts[i], 24);
        Seen *alone;

        one.want_ids = true;
        one.sampling.ignore_eos = true;
        alone = talk_wait(talk, talk_generate(talk, &one));
        assert_int_equal(alone->result, ENGINE_RESULT_DONE);
        assert_true(alone->usage.prompt_tokens > 300);
        assert_int_equal(alone->n_ids, together->sequences[i].n_tokens);
        assert_memory_equal(alone->ids, together->sequences[i].ids, alone->n_ids * sizeof(int32_t));
    }
    talk_free(talk);
}

static void beams_are_those_of_transformers_where_rows_are_coded_apart(void **state)
{
    EngineModel models[] = {tiny("quanto4", compatible("quanto", 4, 0, 16, 4)), tiny("quanto2", compatible("quanto", 2, 0, 32, 6)),
                            tiny("fp8", compatible("fp8", 0, 0, 0, 0)), tiny("hqq", compatible("hqq", 4, 1, 16, 4)),
                            tiny("strided", compatible("quanto", 4, -1, 2, 4))};
    Talk *talk = start(models, N_ELEMENTS(models), 0);
    int32_t ids[10] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    double worst;
    size_t n;

    (void)state;
    worst = beam_oracle_compare(talk, "tiny-llama-quantized-beams.json", NULL, &n);
    print_message("%zu cases, scores within %.1e\n", n, worst);
    assert_true(n >= 8 && worst < 1e-3);
    for (size_t i = 3; i < N_ELEMENTS(models); i++) {
        EngineRequest request = beam_ids_request(models[i].name, ids, N_ELEMENTS(ids), 4, 3, 1);
        Seen *seen = talk_wait(talk, talk_generate(talk, &request));

        assert_int_equal(seen->result, ENGINE_RESULT_INVALID_ARGS);
        assert_non_null(strstr(seen->detail.text, "num-beams 3"));
        assert_non_null(strstr(seen->detail.text, i == 3 ? "hqq" : "quanto"));
    }
    talk_free(talk);
}

/* Of the steps down only those are taken that it has. */
static void the_ladder_knows_that_there_is_no_ring_and_no_home_to_give_up(void **state)
{
    EngineModel model = tiny("m", compatible("hqq", 4, 1, 16, 4));
    Talk *roomy = start(&model, 1, 0);
    EngineEvent *reply = talk_ask(roomy, (EngineQuery){.kind = ENGINE_QUERY_ESTIMATE, .model = "m", .n = -1});
    json_t *json = json_loads(reply->json, 0, NULL);
    uint64_t needed = (uint64_t)json_integer_value(json_object_get(json, "device-bytes"));
    int32_t ids[100];
    Seen *expected;

    (void)state;
    assert_string_equal(json_string_value(json_object_get(json, "home")), "host");
    assert_string_equal(json_string_value(json_object_get(json, "form")), "hqq4-compat");
    assert_true(json_integer_value(json_object_get(json, "host-bytes-per-token")) > 0);
    json_decref(json);
    rig_random_ids(60, 256, ids, N_ELEMENTS(ids));
    expected = talk_ids(roomy, "m", 0, ids, N_ELEMENTS(ids), 40);
    for (uint64_t share = 2; share <= 4; share += 2) {
        Talk *small = start(&model, 1, needed / share);
        Seen *seen = talk_ids(small, "m", 0, ids, N_ELEMENTS(ids), 40);

        assert_same_ids(seen, expected);
        assert_string_equal(seen->usage.home, "host");
        print_message("with 1/%llu of %llu bytes: '%s'\n", (unsigned long long)share, (unsigned long long)needed, seen->usage.ladder);
        assert_true(seen->usage.ladder[0]);
        assert_null(strstr(seen->usage.ladder, "staging"));
        assert_null(strstr(seen->usage.ladder, "home"));
        talk_free(small);
    }
    talk_free(roomy);
}

static int setup(void **state)
{
    (void)state;
    rig_path("tiny-llama-tied.gguf", tied, sizeof(tied));
    return 0;
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_session_goes_on_from_a_file_a_clone_and_a_spill),
        cmocka_unit_test(requests_do_not_go_on_from_each_other),
        cmocka_unit_test(prompts_of_one_call_say_what_each_says_alone),
        cmocka_unit_test(beams_are_those_of_transformers_where_rows_are_coded_apart),
        cmocka_unit_test(the_ladder_knows_that_there_is_no_ring_and_no_home_to_give_up),
    };

    return cmocka_run_group_tests(tests, setup, NULL);
}
