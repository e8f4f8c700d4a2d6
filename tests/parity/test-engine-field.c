/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What went wrong for users of other engines (tests/field-cases.txt), through the whole engine with tiny models: caches that outgrow the
 * host's memory, contexts that fill up, sessions that come back from files beside others, models that come and go.
 */

#include "tests/lib/engine-talk.h"
#include "tests/lib/model-rig.h"
#include "tests/lib/patience.h"

#include <sys/mman.h>
#include <unistd.h>

#define N_VOCAB 320

static char tied[4096], mixed[4096];

static EngineModel tiny(const char *name, const char *path, KvStrategy strategy)
{
    return (EngineModel){.name = name, .path = path, .policy = kv_policy_preset(strategy, false), .parallel = 2, .keep_alive_usec = UINT64_MAX};
}

static Talk *start(const EngineModel *models, size_t n, uint64_t host_memory_bytes)
{
    EngineOptions options = {.gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC},
                             .models = models,
                             .n_models = n,
                             .host_memory_bytes = host_memory_bytes};

    return talk_new(&options);
}

static EngineDeviceStatus status_of(Talk *talk)
{
    EngineDeviceStatus status;

    engine_device_status(talk->engine, &status);
    return status;
}

/* ---- the host's memory -------------------------------------------------------------------------------------------------------------- */

#define N_SESSIONS 10
#define N_IDS      700

/* Ten conversations with two models in the memory of two or three: whose turn it is not gives way, and says the same when it comes back. */
static void many_sessions_in_the_memory_of_a_few_say_what_each_says_alone(void **state)
{
    const EngineModel models[] = {tiny("packed", tied, KV_STRATEGY_OFFLOADED_QUANTIZED), tiny("whole", mixed, KV_STRATEGY_OFFLOADED)};
    Talk *free_talk = start(models, 2, UINT64_C(1) << 40), *talk;
    static int32_t ids[N_SESSIONS][N_IDS];
    uint64_t sessions[N_SESSIONS], most = 0, limit;
    uint32_t n_reused = 0, n_again = 0;

    (void)state;
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        rig_random_ids(60 + i, N_VOCAB, ids[i], N_IDS);
    sessions[0] = talk_open(free_talk, "whole", 1);
    (void)talk_ids(free_talk, NULL, sessions[0], ids[0], N_IDS, 10);
    talk_until(free_talk, status_of(free_talk).host_used_bytes > 0);
    limit = status_of(free_talk).host_used_bytes * 5 / 2;
    talk = start(models, 2, limit);
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        sessions[i] = talk_open(talk, models[i % 2].name, 1);
    for (uint32_t turn = 0; turn < 3; turn++)
        for (uint32_t k = 0; k < N_SESSIONS; k++) {
            uint32_t i = (k * 7 + turn * 3) % N_SESSIONS; /* in another order each time */
            size_t n = 500 + 100 * turn;
            Seen *seen = talk_ids(talk, NULL, sessions[i], ids[i], n, 10);

            assert_same_ids(seen, talk_ids(free_talk, models[i % 2].name, 0, ids[i], n, 10));
            most = MAX(most, status_of(talk).host_used_bytes);
            assert_true(status_of(talk).host_used_bytes <= limit);
            n_reused += seen->usage.reused_tokens > 0;
            n_again += turn > 0 && seen->usage.reused_tokens == 0;
        }
    print_message("%llu of %llu bytes at most; of 20 later turns %u had lost their cache\n", (unsigned long long)most,
                  (unsigned long long)limit, n_again);
    assert_true(most > limit / 2 && n_again >= 5);
    talk_free(talk);
    talk_free(free_talk);
}

/* A checkpoint in the host's memory was refused, then the device runs short: what an idle session has on the host is of no use there, and stays. */
static void what_is_idle_on_the_host_stays_when_the_device_runs_short(void **state)
{
    const EngineModel models[] = {tiny("packed", tied, KV_STRATEGY_OFFLOADED_QUANTIZED), tiny("whole", mixed, KV_STRATEGY_DYNAMIC)};
    EngineOptions options = {.gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC}, .models = models, .n_models = 2};
    uint64_t host = 0;
    int32_t ids[N_IDS];
    uint32_t n_run = 0;

    (void)state;
    rig_random_ids(75, N_VOCAB, ids, N_IDS);
    for (uint32_t tenths = 11; tenths >= 6; tenths--) { /* of the memory that all of it takes, which the first run finds */
        Talk *talk = talk_new(&options);
        EngineRequest request = ids_request(NULL, talk_open(talk, "packed", 1), ids, N_IDS, 5);
        EngineDeviceStatus before;

        if (talk_wait(talk, talk_generate(talk, &request))->result == ENGINE_RESULT_DONE) {
            (void)talk_ids(talk, NULL, talk_open(talk, "whole", 1), ids, N_IDS, 5);
            before = status_of(talk);
            (void)talk_ids(talk, NULL, talk_open(talk, "whole", 1), ids, N_IDS, 5);
            assert_true(status_of(talk).host_used_bytes >= before.host_used_bytes);
            if (host == 0) {
                host = before.host_used_bytes;
                options.gpu.default_max_memory_bytes = before.total_used_bytes + 4096; /* not for another session */
            }
            n_run++;
        }
        talk_free(talk);
        options.host_memory_bytes = host * (tenths - 1) / 10;
    }
    assert_true(n_run > 3);
}

static void a_session_larger_than_all_memory_is_refused_and_the_next_is_served(void **state)
{
    static const KvStrategy strategies[] = {KV_STRATEGY_OFFLOADED_QUANTIZED, KV_STRATEGY_OFFLOADED, KV_STRATEGY_OFFLOADED_STATIC};
    int32_t ids[900];

    (void)state;
    rig_random_ids(71, N_VOCAB, ids, N_ELEMENTS(ids));
    for (size_t s = 0; s < N_ELEMENTS(strategies); s++) {
        EngineModel model = tiny("m", tied, strategies[s]);
        EngineRequest request = ids_request("m", 0, ids, N_ELEMENTS(ids), 10);
        Talk *talk = start(&model, 1, 50000);
        Seen *seen = talk_wait(talk, talk_generate(talk, &request));

        print_message("%s\n", seen->detail.text);
        assert_int_equal(seen->result, ENGINE_RESULT_OUT_OF_MEMORY);
        assert_non_null(strstr(seen->detail.text, "50000 (host-memory)"));
        assert_int_equal(status_of(talk).host_used_bytes, 0);
        if (strategies[s] != KV_STRATEGY_OFFLOADED_STATIC) /* which asks for the whole context whatever the prompt */
            (void)talk_ids(talk, "m", 0, ids, 40, 10);
        talk_free(talk);
    }
}

static void twenty_loads_leave_nothing_behind(void **state)
{
    EngineModel model = tiny("m", tied, KV_STRATEGY_OFFLOADED_QUANTIZED);
    Talk *talk = start(&model, 1, 0);
    EngineModelStatus status;
    uint64_t loaded = 0;
    int32_t ids[300];

    (void)state;
    rig_random_ids(72, N_VOCAB, ids, N_ELEMENTS(ids));
    for (uint32_t i = 0; i < 20; i++) {
        (void)talk_ids(talk, "m", 0, ids, N_ELEMENTS(ids), 3);
        if (i == 0)
            loaded = status_of(talk).total_used_bytes;
        assert_int_equal(status_of(talk).total_used_bytes, loaded);
        assert_int_equal(talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_UNLOAD, .model = "m"})->result, ENGINE_RESULT_DONE);
        talk_until(talk, engine_model_status_by_name(talk->engine, "m", &status) && strcmp(status.state, "unloaded") == 0);
        assert_int_equal(status_of(talk).total_used_bytes, 0);
        assert_int_equal(status_of(talk).host_used_bytes, 0);
    }
    talk_free(talk);
}

/* ---- the context -------------------------------------------------------------------------------------------------------------------- */

/* Nothing is ever shifted: whatever form the cache has, the context is filled to its last place and the answer ends there. */
static void a_cache_of_any_form_ends_with_its_context(void **state)
{
    static const uint32_t contexts[] = {10, 64, 300};
    int32_t ids[200];

    (void)state;
    rig_random_ids(73, N_VOCAB, ids, N_ELEMENTS(ids));
    for (KvStrategy strategy = KV_STRATEGY_DYNAMIC; strategy <= KV_STRATEGY_OFFLOADED_QUANTIZED; strategy++)
        for (size_t c = 0; c < N_ELEMENTS(contexts); c++) {
            EngineModel model = tiny("m", tied, strategy);
            uint32_t n = contexts[c] / 3;
            Talk *talk;
            Seen *seen;

            model.context = contexts[c];
            if (model.policy.form.kind == KV_FORM_LEAT)
                model.policy.form.k_bits = model.policy.form.v_bits = c % 2 ? 8 : 4;
            talk = start(&model, 1, 0);
            seen = talk_ids(talk, "m", 0, ids, n, 2000);
            assert_string_equal(seen->usage.stop_reason, "context_full");
            assert_int_equal(seen->n_ids, contexts[c] - n);
            talk_free(talk);
        }
}

/* ---- sessions ----------------------------------------------------------------------------------------------------------------------- */

/* Two sessions from two files, their generations in the same passes. */
static void restored_sessions_keep_apart(void **state)
{
    const EngineModel model = tiny("m", tied, KV_STRATEGY_OFFLOADED_QUANTIZED);
    Talk *talk = start(&model, 1, 0), *other;
    int32_t ids[2][500];
    uint64_t jobs[2];
    Seen *alone[2];
    int fds[2];

    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t session = talk_open(talk, "m", 1);

        rig_random_ids(80 + i, N_VOCAB, ids[i], 500);
        fds[i] = memfd_create("session", MFD_CLOEXEC);
        (void)talk_ids(talk, NULL, session, ids[i], 400, 5);
        assert_int_equal(talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_SAVE_SESSION, .owner = 1, .session = session, .fd = dup(fds[i])})->result,
                         ENGINE_RESULT_DONE);
        alone[i] = talk_ids(talk, "m", 0, ids[i], 500, 60);
    }
    other = start(&model, 1, 0);
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t session = talk_open(other, "m", 1);
        EngineRequest request = ids_request(NULL, session, ids[i], 500, 60);

        assert_int_equal(
            talk_ask(other, (EngineQuery){.kind = ENGINE_QUERY_RESTORE_SESSION, .owner = 1, .session = session, .fd = dup(fds[i])})->result,
            ENGINE_RESULT_DONE);
        jobs[i] = talk_generate(other, &request);
    }
    for (uint32_t i = 0; i < 2; i++) {
        Seen *seen = talk_wait(other, jobs[i]);

        assert_int_equal(seen->usage.reused_tokens, 400);
        assert_same_ids(seen, alone[i]);
        (void)close(fds[i]);
    }
    talk_free(talk);
    talk_free(other);
}

/* The file has no pages and no tokens; what is restored from it has none. */
static void a_session_without_tokens_is_saved_and_restored(void **state)
{
    const EngineModel model = tiny("m", tied, KV_STRATEGY_OFFLOADED_QUANTIZED);
    Talk *talk = start(&model, 1, 0);
    uint64_t empty = talk_open(talk, "m", 1), session = talk_open(talk, "m", 1);
    int fd = memfd_create("session", MFD_CLOEXEC);
    EngineEvent *reply;
    int32_t ids[80];
    Seen *seen;

    (void)state;
    rig_random_ids(85, N_VOCAB, ids, N_ELEMENTS(ids));
    reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_SAVE_SESSION, .owner = 1, .session = empty, .fd = dup(fd)});
    assert_int_equal(reply->result, ENGINE_RESULT_DONE);
    (void)talk_ids(talk, NULL, session, ids, 40, 5);
    reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_RESTORE_SESSION, .owner = 1, .session = session, .fd = dup(fd)});
    assert_int_equal(reply->result, ENGINE_RESULT_DONE);
    assert_non_null(strstr(reply->json, "\"length\":0"));
    seen = talk_ids(talk, NULL, session, ids, N_ELEMENTS(ids), 10);
    assert_int_equal(seen->usage.reused_tokens, 0);
    assert_same_ids(seen, talk_ids(talk, "m", 0, ids, N_ELEMENTS(ids), 10));
    talk_free(talk);
    (void)close(fd);
}

/* Of two kept beginnings of one conversation the longer one, whichever was kept or used last. */
static void the_longest_beginning_is_gone_on_from(void **state)
{
    int32_t ids[1000];

    (void)state;
    rig_random_ids(90, N_VOCAB, ids, N_ELEMENTS(ids));
    for (uint32_t order = 0; order < 2; order++) {
        EngineModel model = tiny("m", tied, KV_STRATEGY_OFFLOADED);
        Talk *talk;
        Seen *seen;

        model.n_prefixes = 4;
        talk = start(&model, 1, 0);
        (void)talk_ids(talk, "m", 0, ids, order ? 800 : 200, 1);
        (void)talk_ids(talk, "m", 0, ids, order ? 200 : 800, 1);
        seen = talk_ids(talk, "m", 0, ids, 1000, 10);
        assert_true(seen->usage.reused_tokens >= 800 - 1);
        talk_free(talk);
    }
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
        cmocka_unit_test(what_is_idle_on_the_host_stays_when_the_device_runs_short),
        cmocka_unit_test(many_sessions_in_the_memory_of_a_few_say_what_each_says_alone),
        cmocka_unit_test(a_session_larger_than_all_memory_is_refused_and_the_next_is_served),
        cmocka_unit_test(twenty_loads_leave_nothing_behind),
        cmocka_unit_test(a_cache_of_any_form_ends_with_its_context),
        cmocka_unit_test(restored_sessions_keep_apart),
        cmocka_unit_test(a_session_without_tokens_is_saved_and_restored),
        cmocka_unit_test(the_longest_beginning_is_gone_on_from),
    };

    return cmocka_run_group_tests(tests, setup, NULL);
}
