/* SPDX-License-Identifier: Apache-2.0 */
/* Models and the device, played: loading, room, unloading, reconfiguration, every fault, the heartbeat, and a storm of calls. */

#include "tests/fakes/fake.h"

#include <fcntl.h>
#include <jansson.h>
#include <sys/mman.h>

static Talk *start(EngineModel *models, size_t n)
{
    fake_reset();
    return talk_start(models, n, 0);
}

static Seen *load(Talk *talk, const char *name)
{
    uint64_t job = 0;

    assert_int_equal(engine_load(talk->engine, 1, name, &job), 0);
    return talk_wait(talk, job);
}

static const char *model_state(Talk *talk, const char *name)
{
    static EngineModelStatus status; /* one test thread */

    if (!engine_model_status_by_name(talk->engine, name, &status))
        return "none";
    return status.state;
}

static void a_load_ends_when_the_model_is_there(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    Talk *talk = start(&model, 1);
    EngineModelStatus status;
    EngineDeviceStatus device;

    (void)state;
    assert_string_equal(model_state(talk, "m"), "unloaded");
    assert_int_equal(load(talk, "m")->result, ENGINE_RESULT_DONE);
    assert_true(engine_model_status(talk->engine, 0, &status));
    assert_string_equal(status.state, "loaded");
    assert_memory_equal(status.digest, "d1ce", 4);
    assert_int_equal(status.device_bytes, 100);
    assert_int_equal(status.context, FAKE_CONTEXT);
    assert_false(engine_model_status(talk->engine, 1, &status));
    assert_int_equal(engine_n_models(talk->engine), 1);
    engine_device_status(talk->engine, &device);
    assert_true(device.open);
    assert_string_equal(device.info.name, "Fake");
    assert_int_equal(device.total_used_bytes, 116);
    assert_int_equal(load(talk, "m")->result, ENGINE_RESULT_DONE); /* again: at once */
    assert_int_equal(load(talk, "x")->result, ENGINE_RESULT_NO_SUCH_MODEL);
    talk_stop(talk);
}

static void files_that_cannot_be_loaded_fail_by_name_and_others_live(void **state)
{
    EngineModel models[] = {fake_model("a", "missing.gguf"), fake_model("b", "corrupt.gguf"), fake_model("c", "unsupported.gguf"),
                            fake_model("d", "good.gguf")};
    const EngineResult results[] = {ENGINE_RESULT_MODEL_NOT_INSTALLED, ENGINE_RESULT_MODEL_CORRUPT, ENGINE_RESULT_UNSUPPORTED_MODEL,
                                    ENGINE_RESULT_DONE};
    Talk *talk = start(models, 4);

    (void)state;
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < 4; i++) {
            EngineRequest request = raw_request(models[i].name, "x", 3);
            Seen *seen = talk_wait(talk, talk_generate(talk, &request));

            assert_int_equal(seen->result, results[i]);
            assert_int_equal(load(talk, models[i].name)->result, results[i]);
            assert_string_equal(model_state(talk, models[i].name), i == 3 ? "loaded" : "failed");
        }
    assert_int_equal(talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_ESTIMATE, .model = "b"})->result, ENGINE_RESULT_MODEL_CORRUPT);
    talk_stop(talk);
}

static void two_loads_that_fit_singly_only_one_succeeds(void **state)
{
    EngineModel models[] = {fake_model("a", "a600.gguf"), fake_model("b", "b600.gguf")};
    Talk *talk = start(models, 2);
    uint64_t a = 0, b = 0;
    Seen *seen;

    (void)state;
    assert_int_equal(engine_load(talk->engine, 1, "a", &a), 0);
    assert_int_equal(engine_load(talk->engine, 2, "b", &b), 0);
    assert_int_equal(talk_wait(talk, a)->result, ENGINE_RESULT_DONE);
    seen = talk_wait(talk, b);
    assert_int_equal(seen->result, ENGINE_RESULT_OUT_OF_DEVICE_MEMORY);
    assert_non_null(strstr(seen->detail.text, "'b'"));
    assert_string_equal(model_state(talk, "a"), "loaded");
    assert_string_equal(model_state(talk, "b"), "failed");
    talk_stop(talk);
}

static void a_generation_makes_an_idle_model_give_way(void **state)
{
    EngineModel models[] = {fake_model("a", "a600.gguf"), fake_model("b", "b600.gguf"), fake_model("c", "c600.gguf")};
    EngineRequest request = raw_request("b", "x", 3), long_one = raw_request("b", "y", 100);
    uint64_t running;
    Talk *talk;
    Seen *seen;

    (void)state;
    models[0].keep_alive_usec = models[1].keep_alive_usec = 60000000;
    talk = start(models, 3);
    assert_int_equal(load(talk, "a")->result, ENGINE_RESULT_DONE);
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_DONE);
    assert_string_equal(model_state(talk, "a"), "unloaded");
    assert_string_equal(model_state(talk, "b"), "loaded");
    FAKE_SET(pass_usec, 1000);
    running = talk_generate(talk, &long_one);
    talk_until(talk, talk->seen[running].n_text > 0);
    request.model = "c"; /* nothing idle to push out */
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_OUT_OF_DEVICE_MEMORY);
    assert_speaks(talk_wait(talk, running), "y", 100);
    talk_stop(talk);
}

static void the_batch_shrinks_until_it_fits(void **state)
{
    EngineModel model = fake_model("m", "m994.gguf"); /* 512 rows would need 16 more, 128 need 4 */
    EngineRequest request = raw_request("m", NULL, 2);
    char prompt[1025];
    Talk *talk = start(&model, 1);
    Seen *seen;

    (void)state;
    memset(prompt, 'x', 1024);
    prompt[1024] = 0;
    request.raw = prompt;
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_DONE);
    assert_speaks(seen, prompt, 2);
    assert_int_equal(fake.passes[0].n_rows, 128);
    talk_stop(talk);
}

static void weights_stream_when_nothing_else_makes_them_fit(void **state)
{
    EngineModel models[] = {fake_model("a", "a600.gguf"), fake_model("b", "b600.gguf"), fake_model("c", "c9000.gguf")};
    EngineRequest request = raw_request("b", "x", 3);
    Talk *talk = start(models, 3);
    Seen *seen;

    (void)state;
    FAKE_SET(can_stream, true);
    assert_int_equal(load(talk, "a")->result, ENGINE_RESULT_DONE);
    assert_int_equal(load(talk, "b")->result, ENGINE_RESULT_DONE); /* half of it, beside the other */
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_speaks(seen, "x", 3);
    assert_string_equal(seen->usage.ladder, "smaller-batch streamed-weights");
    request.model = "a";
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_string_equal(seen->usage.ladder, "");
    seen = load(talk, "c"); /* not even so */
    assert_int_equal(seen->result, ENGINE_RESULT_OUT_OF_DEVICE_MEMORY);
    assert_non_null(strstr(seen->detail.text, "9000"));
    talk_stop(talk);
}

/* ---- the ladder in the middle of a generation ------------------------------------------------------------------------------- */

static Talk *start_on_device(uint64_t device_tokens, uint32_t n_streams)
{
    EngineModel model = fake_model("m", "m.gguf");
    Talk *talk;

    model.policy.home = KV_HOME_DEVICE;
    model.policy.strategy = KV_STRATEGY_DYNAMIC;
    talk = start(&model, 1);
    FAKE_SET(device_tokens, device_tokens);
    FAKE_SET(n_streams, n_streams);
    return talk;
}

static void a_generation_that_outgrows_the_device_goes_on_where_it_was(void **state)
{
    Talk *talk = start_on_device(30, 0);
    EngineRequest request = raw_request("m", "Tell me", 60);
    Seen *seen;

    (void)state;
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_DONE);
    assert_speaks(seen, "Tell me", 60);
    assert_string_equal(seen->usage.ladder, "smaller-batch"); /* 512, 256, 128, 64, 32 rows: 40 tokens more */
    request = raw_request("m", "And then", 200);
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_speaks(seen, "And then", 200);
    assert_string_equal(seen->usage.ladder, "smaller-batch host-home");
    assert_string_equal(seen->usage.home, "host");
    assert_int_equal(seen->usage.output_tokens, 200);
    assert_int_equal(FAKE_GET(n_moves), 1);
    talk_stop(talk);
}

static void sessions_survive_the_ladder(void **state)
{
    Talk *talk = start_on_device(50, 0);
    EngineRequest long_one = raw_request("m", "Long", 300), turn = raw_request(NULL, "Turn", 20);
    uint64_t job, other;

    (void)state;
    turn.session = talk_open(talk, "m", 1);
    assert_speaks(talk_wait(talk, talk_generate(talk, &turn)), "Turn", 20);
    job = talk_generate(talk, &long_one);
    other = talk_generate(talk, &turn);
    assert_speaks(talk_wait(talk, other), "Turn", 20);
    assert_speaks(talk_wait(talk, job), "Long", 300);
    assert_string_equal(talk->seen[job].usage.home, "host");
    talk_stop(talk);
}

static void unload_lets_running_jobs_end_and_sessions_keep_their_ids(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    Talk *talk = start(&model, 1);
    EngineRequest request = raw_request(NULL, "Tell me", 60);
    uint64_t job, after;
    char prompt[256];

    (void)state;
    request.session = talk_open(talk, "m", 1);
    FAKE_SET(pass_usec, 300);
    job = talk_generate(talk, &request);
    talk_until(talk, talk->seen[job].n_text > 3);
    assert_int_equal(talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_UNLOAD, .model = "m"})->result, ENGINE_RESULT_DONE);
    request.session = 0;
    request.model = "m";
    after = talk_generate(talk, &request); /* waits for the next load */
    assert_speaks(talk_wait(talk, job), "Tell me", 60);
    assert_speaks(talk_wait(talk, after), "Tell me", 60);
    assert_int_equal(talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_UNLOAD, .model = "m"})->result, ENGINE_RESULT_DONE);
    talk_until(talk, strcmp(model_state(talk, "m"), "unloaded") == 0);
    assert_int_equal(FAKE_GET(n_models), 0);
    (void)snprintf(prompt, sizeof(prompt), "Tell me%.100s more", talk->seen[job].text);
    request.session = 1;
    request.raw = prompt;
    job = talk_generate(talk, &request);
    assert_speaks(talk_wait(talk, job), prompt, 60);
    assert_int_equal(talk->seen[job].usage.reused_tokens, 0);
    talk_stop(talk);
}

static void an_idle_model_is_unloaded_in_time(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest request = raw_request("m", "x", 3);
    Talk *talk;

    (void)state;
    model.keep_alive_usec = 30000;
    talk = start(&model, 1);
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_DONE);
    talk_until(talk, strcmp(model_state(talk, "m"), "unloaded") == 0);
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_DONE);
    talk_stop(talk);
}

static void a_model_to_preload_is_loaded_at_start(void **state)
{
    EngineModel models[] = {fake_model("a", "a.gguf"), fake_model("b", "missing.gguf")};
    Talk *talk;

    (void)state;
    models[0].preload = models[1].preload = true;
    talk = start(models, 2);
    talk_until(talk, strcmp(model_state(talk, "a"), "loaded") == 0 && strcmp(model_state(talk, "b"), "failed") == 0);
    talk_stop(talk);
}

static void a_new_configuration_waits_for_running_jobs(void **state)
{
    EngineModel models[] = {fake_model("a", "a.gguf"), fake_model("b", "b.gguf")},
                next[] = {fake_model("a", "a2.gguf"), fake_model("c", "c.gguf")};
    EngineRequest on_a = raw_request("a", "A", 60), on_b = raw_request("b", "B", 60);
    uint64_t a, b, again, gone, session;
    EngineModelStatus status;
    Talk *talk = start(models, 2);

    (void)state;
    FAKE_SET(pass_usec, 300);
    session = talk_open(talk, "b", 1);
    a = talk_generate(talk, &on_a);
    b = talk_generate(talk, &on_b);
    talk_until(talk, talk->seen[a].n_text > 2 && talk->seen[b].n_text > 2);
    assert_int_equal(engine_reconfigure(talk->engine, next, 2), 0);
    again = talk_generate(talk, &on_a);
    gone = talk_generate(talk, &on_b);
    assert_int_equal(talk_wait(talk, gone)->result, ENGINE_RESULT_NO_SUCH_MODEL);
    assert_speaks(talk_wait(talk, a), "A", 60);
    assert_speaks(talk_wait(talk, b), "B", 60);
    assert_speaks(talk_wait(talk, again), "A", 60);
    assert_true(engine_model_status_by_name(talk->engine, "a", &status));
    assert_string_equal(status.path, "a2.gguf");
    assert_string_equal(model_state(talk, "b"), "none");
    assert_string_equal(model_state(talk, "c"), "unloaded");
    talk_until(talk, talk->n_closed == 1);
    assert_int_equal(talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_SESSION_CACHE, .session = session})->result,
                     ENGINE_RESULT_NO_SUCH_SESSION);
    talk_stop(talk);
}

static void a_path_that_changes_while_it_is_opened_is_opened_anew(void **state)
{
    EngineModel model = fake_model("m", "missing.gguf"), next = fake_model("m", "good.gguf");
    EngineRequest request = raw_request("m", "x", 3);
    Talk *talk = start(&model, 1);
    uint64_t job;

    (void)state;
    FAKE_SET(open_usec, 50000);
    job = talk_generate(talk, &request);
    talk_until(talk, talk->seen[job].n_states > 0); /* loading */
    assert_int_equal(engine_reconfigure(talk->engine, &next, 1), 0);
    assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_DONE);
    talk_stop(talk);
}

/* ---- automatic bits ---------------------------------------------------------------------------------------------------------- */

static EngineModel auto_model(const char *name, const char *path)
{
    EngineModel model = fake_model(name, path);

    model.policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    model.policy.form.k_bits = model.policy.form.v_bits = KV_BITS_AUTO;
    return model;
}

static void automatic_bits_are_measured_by_the_load_and_shown(void **state)
{
    EngineModel model = auto_model("m", "m.gguf");
    EngineRequest request = raw_request("m", "x", 3);
    Talk *talk = start(&model, 1);
    EngineEvent *reply;
    json_t *json, *bits;
    Seen *seen;

    (void)state;
    reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_ESTIMATE, .model = "m"});
    json = json_loads(reply->json, 0, NULL);
    assert_string_equal(json_string_value(json_object_get(json, "form")), "leat-k5v4");
    bits = json_object_get(json, "bits");
    assert_string_equal(json_string_value(json_object_get(bits, "choice")), "usual");
    assert_string_equal(json_string_value(json_object_get(json_array_get(json_object_get(bits, "candidates"), 0), "state")), "not measured");
    json_decref(json);
    FAKE_SET(n_bits_steps, 5);
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_speaks(seen, "x", 3);
    assert_string_equal(seen->usage.form, "leat-k3v2");
    reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_ESTIMATE, .model = "m"});
    json = json_loads(reply->json, 0, NULL);
    assert_string_equal(json_string_value(json_object_get(json, "form")), "leat-k3v2");
    bits = json_object_get(json, "bits");
    assert_string_equal(json_string_value(json_object_get(bits, "choice")), "measured");
    bits = json_array_get(json_object_get(bits, "candidates"), 0);
    assert_true(json_is_true(json_object_get(bits, "used")));
    assert_true(json_real_value(json_object_get(bits, "kld")) > 0.0009);
    json_decref(json);
    talk_stop(talk);
}

static void jobs_of_others_go_on_while_bits_are_measured(void **state)
{
    EngineModel models[] = {fake_model("a", "a.gguf"), auto_model("b", "b.gguf")};
    EngineRequest on_a = raw_request("a", "A", 40), on_b = raw_request("b", "B", 3);
    Talk *talk = start(models, 2);
    uint64_t a, b;

    (void)state;
    assert_int_equal(load(talk, "a")->result, ENGINE_RESULT_DONE);
    FAKE_SET(pass_usec, 500);
    FAKE_SET(n_bits_steps, 400);
    b = talk_generate(talk, &on_b);
    talk_until(talk, FAKE_GET(n_nbits) == 1);
    a = talk_generate(talk, &on_a);
    assert_speaks(talk_wait(talk, a), "A", 40);
    assert_int_equal(FAKE_GET(n_nbits), 1); /* still at it */
    assert_string_equal(model_state(talk, "b"), "loading");
    assert_speaks(talk_wait(talk, b), "B", 3);
    talk_stop(talk);
}

static void a_load_that_measures_can_be_left_in_the_middle(void **state)
{
    EngineModel model = auto_model("m", "m.gguf"), next = auto_model("m", "n.gguf");
    EngineRequest request = raw_request("m", "x", 3);
    Talk *talk = start(&model, 1);
    uint64_t job;

    (void)state;
    FAKE_SET(pass_usec, 500);
    FAKE_SET(n_bits_steps, 100000);
    job = talk_generate(talk, &request);
    talk_until(talk, FAKE_GET(n_nbits) == 1);
    FAKE_SET(n_bits_steps, 2);
    assert_int_equal(engine_reconfigure(talk->engine, &next, 1), 0); /* another file: the load begins anew */
    assert_speaks(talk_wait(talk, job), "x", 3);
    assert_int_equal(engine_reconfigure(talk->engine, NULL, 0), 0);
    talk_stop(talk);
    talk = start(&model, 1);
    FAKE_SET(pass_usec, 500);
    FAKE_SET(n_bits_steps, 100000);
    job = talk_generate(talk, &request);
    talk_until(talk, FAKE_GET(n_nbits) == 1);
    talk_stop(talk); /* the job ends with the daemon */
}

static void a_measurement_that_fails_fails_the_load(void **state)
{
    EngineModel model = auto_model("m", "m.gguf");
    EngineRequest request = raw_request("m", "x", 3);
    Talk *talk = start(&model, 1);
    Seen *seen;

    (void)state;
    FAKE_SET(n_bits_steps, 3);
    FAKE_SET(bits_error, MODEL_E_CORRUPT);
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_MODEL_CORRUPT);
    assert_non_null(strstr(seen->detail.text, "cannot be measured"));
    assert_string_equal(model_state(talk, "m"), "failed");
    FAKE_SET(bits_error, MODEL_E_DEVICE);
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_DEVICE_LOST);
    FAKE_SET(bits_error, MODEL_E_DEVICE_MEMORY); /* the store then does it in its own way */
    assert_speaks(talk_wait(talk, talk_generate(talk, &request)), "x", 3);
    talk_stop(talk);
}

static void a_device_that_is_lost_while_bits_are_measured_has_the_model_loaded_anew(void **state)
{
    EngineModel models[] = {fake_model("a", "a.gguf"), auto_model("b", "b.gguf")};
    EngineRequest on_a = raw_request("a", "A", 40), on_b = raw_request("b", "B", 3);
    Talk *talk = start(models, 2);
    uint64_t a, b;

    (void)state;
    assert_int_equal(load(talk, "a")->result, ENGINE_RESULT_DONE);
    FAKE_SET(pass_usec, 500);
    FAKE_SET(n_bits_steps, 100000);
    b = talk_generate(talk, &on_b);
    talk_until(talk, FAKE_GET(n_nbits) == 1);
    FAKE_SET(n_bits_steps, 2);
    FAKE_SET(lose, true);
    a = talk_generate(talk, &on_a);
    assert_int_equal(talk_wait(talk, a)->result, ENGINE_RESULT_DEVICE_LOST);
    assert_speaks(talk_wait(talk, b), "B", 3);
    talk_stop(talk);
}

/* ---- faults ------------------------------------------------------------------------------------------------------------------- */

static void without_a_device_jobs_fail_with_the_reason_and_the_rest_works(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest request = raw_request("m", "x", 3);
    EngineDeviceStatus device;
    Talk *talk;
    Seen *seen;

    (void)state;
    fake_reset();
    FAKE_SET(no_device, true);
    talk = talk_start(&model, 1, 0);
    seen = talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(seen->result, ENGINE_RESULT_NO_DEVICE);
    assert_non_null(strstr(seen->detail.text, "pocl-opencl-icd"));
    engine_device_status(talk->engine, &device);
    assert_false(device.open);
    assert_non_null(strstr(device.error.text, "pocl-opencl-icd"));
    assert_int_equal(talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_COUNT_TOKENS, .model = "m", .text = "abc"})->result,
                     ENGINE_RESULT_DONE);
    assert_int_equal(talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_TRACE_START})->result, ENGINE_RESULT_NO_DEVICE);
    for (int i = 0; i < 20; i++) /* does not hammer the driver */
        talk_wait(talk, talk_generate(talk, &request));
    assert_int_equal(FAKE_GET(n_opens), 1);
    FAKE_SET(no_device, false);
    talk_sleep(1100000); /* the first back-off is a second */
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_DONE);
    assert_int_equal(FAKE_GET(n_opens), 2);
    talk_stop(talk);
}

static void a_lost_device_fails_what_runs_and_serves_what_comes_next(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest request = raw_request(NULL, "Tell me", 60), other = raw_request("m", "Other", 60);
    uint64_t session, job, second;
    Talk *talk = start(&model, 1);

    (void)state;
    session = request.session = talk_open(talk, "m", 1);
    for (int hang = 0; hang < 2; hang++) {
        FAKE_SET(pass_usec, 300);
        job = talk_generate(talk, &request);
        second = talk_generate(talk, &other);
        talk_until(talk, talk->seen[job].n_text > 3 && talk->seen[second].n_text > 3);
        if (hang)
            FAKE_SET(hang, true);
        else
            FAKE_SET(lose, true);
        assert_int_equal(talk_wait(talk, job)->result, hang ? ENGINE_RESULT_DEVICE_HUNG : ENGINE_RESULT_DEVICE_LOST);
        assert_int_equal(talk_wait(talk, second)->result, hang ? ENGINE_RESULT_DEVICE_HUNG : ENGINE_RESULT_DEVICE_LOST);
        assert_non_null(strstr(talk->seen[job].detail.text, "gone"));
        FAKE_SET(pass_usec, 0);
        job = talk_generate(talk, &request); /* the session has kept its ids */
        assert_speaks(talk_wait(talk, job), "Tell me", 60);
        assert_int_equal(FAKE_GET(n_opens), 2 + hang);
    }
    assert_int_equal(talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_CLOSE_SESSION, .owner = 1, .session = session})->result,
                     ENGINE_RESULT_DONE);
    talk_stop(talk);
}

static void logits_that_are_no_numbers_fail_their_job_only(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest good = raw_request("m", "Good", 60), bad = raw_request("m", "Bad", 60);
    Talk *talk = start(&model, 1);
    uint64_t a, b;

    (void)state;
    FAKE_SET(nan_for, 'B');
    FAKE_SET(hold, true);
    a = talk_generate(talk, &good);
    b = talk_generate(talk, &bad);
    FAKE_SET(hold, false);
    assert_int_equal(talk_wait(talk, b)->result, ENGINE_RESULT_NUMERIC);
    assert_non_null(strstr(talk->seen[b].detail.text, "token 3"));
    assert_speaks(talk_wait(talk, a), "Good", 60);
    talk_stop(talk);
}

/* ---- evaluation, status, heartbeat ------------------------------------------------------------------------------------------------ */

#define N_EVALUATED 200

static void evaluated_ids(int32_t *ret)
{
    for (int i = 0; i < N_EVALUATED; i++)
        ret[i] = i * 31 % 256;
}

/* A whole file: the header, and the logits that each row has. */
static void assert_evaluated(int fd)
{
    _cleanup_(freep) float *rows = malloc(N_EVALUATED * FAKE_VOCAB * sizeof(float));
    int32_t ids[N_EVALUATED];
    char header[129] = "";

    assert_non_null(rows);
    evaluated_ids(ids);
    assert_int_equal(pread(fd, header, 128, 0), 128);
    assert_memory_equal(header, "\x93NUMPY\x01\x00\x76\x00", 10);
    assert_non_null(strstr(header + 10, "'shape': (200, 260)"));
    assert_int_equal(header[127], '\n');
    assert_int_equal(lseek(fd, 0, SEEK_END), 128 + N_EVALUATED * FAKE_VOCAB * sizeof(float));
    assert_int_equal(pread(fd, rows, N_EVALUATED * FAKE_VOCAB * sizeof(float), 128), N_EVALUATED * FAKE_VOCAB * sizeof(float));
    for (uint32_t i = 0; i < N_EVALUATED; i++)
        assert_true(rows[i * FAKE_VOCAB + (uint32_t)fake_next(ids, i + 1, 0)] == 10);
}

static void evaluation_writes_the_logits_of_every_row(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    int fd = memfd_create("npy", MFD_CLOEXEC), keep = dup(fd);
    EngineRequest request = raw_request("m", NULL, 1);
    int32_t ids[N_EVALUATED];
    uint64_t job = 0;
    Talk *talk;

    (void)state;
    request.ids = ids;
    request.n_ids = N_EVALUATED;
    model.n_prefixes = 4;
    talk = start(&model, 1);
    evaluated_ids(ids);
    /* A question before it leaves its prompt for the next one that begins alike, which this is not: it wants those rows, too. */
    assert_int_equal(talk_wait(talk, talk_generate(talk, &request))->result, ENGINE_RESULT_DONE);
    assert_int_equal(engine_evaluate(talk->engine, 1, "m", NULL, ids, N_EVALUATED, fd, &job), 0);
    assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_DONE);
    assert_evaluated(keep);
    (void)close(keep);
    talk_stop(talk);
}

static void evaluation_that_loses_its_cache_writes_each_row_once(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    Talk *talk = start(&model, 1);
    EngineRequest request = raw_request("m", "who needs the room that it has", 30);
    int fd = memfd_create("npy", MFD_CLOEXEC), keep = dup(fd);
    int32_t ids[N_EVALUATED];
    uint64_t job = 0, other;

    (void)state;
    evaluated_ids(ids);
    request.priority = ENGINE_PRIORITY_INTERACTIVE;
    FAKE_SET(room_tokens, N_EVALUATED + 4);
    FAKE_SET(pass_usec, 20000);
    assert_int_equal(engine_evaluate(talk->engine, 1, "m", NULL, ids, N_EVALUATED, fd, &job), 0);
    talk_until(talk, lseek(keep, 0, SEEK_END) >= (off_t)(128 + 128 * FAKE_VOCAB * sizeof(float)));
    FAKE_SET(hold, true);
    other = talk_generate(talk, &request);
    FAKE_SET(hold, false);
    assert_int_equal(talk_wait(talk, other)->result, ENGINE_RESULT_DONE);
    assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_DONE);
    assert_evaluated(keep);
    (void)close(keep);
    talk_stop(talk);
}

static void evaluation_refuses_a_pipe(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    Talk *talk = start(&model, 1);
    uint64_t job = 0;
    int fds[2];

    (void)state;
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    assert_int_equal(engine_evaluate(talk->engine, 1, "m", NULL, (int32_t[]){1, 2}, 2, fds[1], &job), 0);
    assert_int_equal(talk_wait(talk, job)->result, ENGINE_RESULT_INVALID_ARGS);
    assert_int_equal(read(fds[0], &job, 1), 0); /* closed */
    (void)close(fds[0]);
    talk_stop(talk);
}

static void the_status_is_valid_json_at_any_time(void **state)
{
    EngineModel models[] = {fake_model("m", "m.gguf"), fake_model("bad", "missing.gguf")};
    EngineRequest request = raw_request("m", "x", 0);
    Talk *talk = start(models, 2);
    uint64_t job;

    (void)state;
    FAKE_SET(pass_usec, 300);
    talk_open(talk, "m", 1);
    load(talk, "bad");
    job = talk_generate(talk, &request);
    for (int i = 0; i < 20; i++) {
        EngineEvent *reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_STATUS});
        json_t *json = json_loads(reply->json, 0, NULL);

        assert_int_equal(json_array_size(json_object_get(json, "models")), 2);
        assert_int_equal(json_array_size(json_object_get(json, "sessions")), 1);
        assert_int_equal(json_array_size(json_object_get(json, "jobs")), 1);
        assert_true(json_is_object(json_object_get(json, "device")) && json_is_object(json_object_get(json, "counters")));
        json_decref(json);
    }
    engine_cancel(talk->engine, job);
    talk_wait(talk, job);
    talk_stop(talk);
}

static void an_estimate_needs_no_loaded_model(void **state)
{
    EngineModel model = fake_model("m", "m994.gguf");
    Talk *talk = start(&model, 1);
    EngineEvent *reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_ESTIMATE, .model = "m"});
    json_t *json;

    (void)state;
    assert_int_equal(reply->result, ENGINE_RESULT_DONE);
    json = json_loads(reply->json, 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(json, "weight-bytes")), 994);
    assert_int_equal(json_integer_value(json_object_get(json, "rows-per-pass")), 128);
    assert_true(json_is_true(json_object_get(json, "fits")));
    json_decref(json);
    assert_int_equal(FAKE_GET(n_models), 0);
    talk_stop(talk);
}

static void the_heartbeat_tells_idle_from_stuck(void **state)
{
    EngineModel model = fake_model("m", "m.gguf");
    EngineRequest request = raw_request("m", "x", 30);
    Talk *talk = start(&model, 1);
    uint64_t beat, job;

    (void)state;
    load(talk, "m");
    talk_sleep(20000);
    beat = engine_heartbeat(talk->engine);
    assert_true(engine_heartbeat(talk->engine) > beat); /* idle is fine */
    FAKE_SET(hold, true);
    job = talk_generate(talk, &request);
    talk_until(talk, talk->seen[job].n_states > 0);
    talk_sleep(20000);
    beat = engine_heartbeat(talk->engine);
    talk_sleep(20000);
    assert_int_equal(engine_heartbeat(talk->engine), beat); /* a pass that does not come back is not */
    FAKE_SET(hold, false);
    talk_wait(talk, job);
    assert_true(engine_heartbeat(talk->engine) > beat);
    talk_stop(talk);
}

/* ---- a storm --------------------------------------------------------------------------------------------------------------------- */

static uint32_t random_below(uint64_t *at, uint32_t n)
{
    *at = *at * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*at >> 33) % n;
}

typedef struct Storm {
    Talk *talk;
    const EngineModel *models;
    uint64_t at, jobs[200], n_jobs, sessions[8];
} Storm;

static void storm_generate(Storm *storm)
{
    static const char *const names[] = {"a", "b", "bad", "none"};
    static const char *const prompts[] = {"One", "One two", "Other", "Another quite long prompt of many tokens"};
    EngineRequest request;

    if (storm->n_jobs == N_ELEMENTS(storm->jobs))
        return;
    request = raw_request(names[random_below(&storm->at, 4)], prompts[random_below(&storm->at, 4)], 1 + random_below(&storm->at, 30));
    request.priority = (EnginePriority)random_below(&storm->at, 3);
    request.owner = 1 + random_below(&storm->at, 3);
    if (random_below(&storm->at, 2)) {
        request.session = storm->sessions[random_below(&storm->at, 8)];
        request.owner = 1;
    }
    storm->jobs[storm->n_jobs++] = talk_generate(storm->talk, &request);
}

static void storm_ask(Storm *storm)
{
    static const char *const names[] = {"a", "b", "bad", "none"};
    EngineQuery query = {.kind = (EngineQueryKind)random_below(&storm->at, ENGINE_QUERY_TRACE_START),
                         .owner = 1,
                         .model = names[random_below(&storm->at, 4)],
                         .session = storm->sessions[random_below(&storm->at, 8)],
                         .text = "abc",
                         .n = -(int64_t)random_below(&storm->at, 5)};

    if (storm->talk->last_cookie + 1 >= N_ELEMENTS(storm->talk->replies))
        return;
    if (query.kind == ENGINE_QUERY_SAVE_SESSION || query.kind == ENGINE_QUERY_RESTORE_SESSION)
        query.fd = memfd_create("session", MFD_CLOEXEC);
    query.cookie = ++storm->talk->last_cookie;
    assert_int_equal(engine_query(storm->talk->engine, &query), 0);
}

static void storm_call(Storm *storm)
{
    Engine *engine = storm->talk->engine;

    switch (random_below(&storm->at, 10)) {
    case 0:
    case 1:
        storm_generate(storm);
        return;
    case 2:
        engine_cancel(engine, 1 + random_below(&storm->at, 200));
        return;
    case 3:
        engine_pause(engine, 1 + random_below(&storm->at, 200), random_below(&storm->at, 3) == 0);
        return;
    case 4:
        if (random_below(&storm->at, 20) == 0)
            engine_owner_gone(engine, 2 + random_below(&storm->at, 2));
        return;
    case 5:
        storm_ask(storm);
        return;
    case 6:
        storm->sessions[random_below(&storm->at, 8)] = 1 + random_below(&storm->at, 12);
        return;
    case 7:
        if (random_below(&storm->at, 40) == 0)
            FAKE_SET(lose, true);
        return;
    case 8:
        if (random_below(&storm->at, 30) == 0)
            assert_int_equal(engine_reconfigure(engine, storm->models, 2 + random_below(&storm->at, 2)), 0);
        return;
    case 9:
        talk_sleep(random_below(&storm->at, 300));
        return;
    }
}

/* 3,000 calls in any order, with faults: every job ends exactly once (the listener checks) and nothing stays behind. */
static void any_order_of_calls_ends_every_job_once(void **state)
{
    EngineModel models[] = {fake_model("a", "a400.gguf"), fake_model("b", "b400.gguf"), fake_model("bad", "missing.gguf")};

    (void)state;
    models[0].keep_alive_usec = models[1].keep_alive_usec = 5000;
    models[0].parallel = 2;
    for (uint64_t seed = 20241129; seed < 20241133; seed++) {
        Storm storm = {.talk = start(models, 3), .models = models, .at = seed};

        print_message("seed %llu\n", (unsigned long long)seed);
        FAKE_SET(room_tokens, 400);
        for (int i = 0; i < 3000; i++) {
            storm_call(&storm);
            talk_listen(storm.talk);
        }
        for (uint64_t i = 0; i < storm.n_jobs; i++)
            engine_pause(storm.talk->engine, storm.jobs[i], false);
        for (uint64_t i = 0; i < storm.n_jobs; i++)
            talk_wait(storm.talk, storm.jobs[i]);
        talk_stop(storm.talk);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_load_ends_when_the_model_is_there),
        cmocka_unit_test(files_that_cannot_be_loaded_fail_by_name_and_others_live),
        cmocka_unit_test(two_loads_that_fit_singly_only_one_succeeds),
        cmocka_unit_test(a_generation_makes_an_idle_model_give_way),
        cmocka_unit_test(the_batch_shrinks_until_it_fits),
        cmocka_unit_test(weights_stream_when_nothing_else_makes_them_fit),
        cmocka_unit_test(a_generation_that_outgrows_the_device_goes_on_where_it_was),
        cmocka_unit_test(sessions_survive_the_ladder),
        cmocka_unit_test(unload_lets_running_jobs_end_and_sessions_keep_their_ids),
        cmocka_unit_test(an_idle_model_is_unloaded_in_time),
        cmocka_unit_test(a_model_to_preload_is_loaded_at_start),
        cmocka_unit_test(a_new_configuration_waits_for_running_jobs),
        cmocka_unit_test(a_path_that_changes_while_it_is_opened_is_opened_anew),
        cmocka_unit_test(without_a_device_jobs_fail_with_the_reason_and_the_rest_works),
        cmocka_unit_test(a_lost_device_fails_what_runs_and_serves_what_comes_next),
        cmocka_unit_test(logits_that_are_no_numbers_fail_their_job_only),
        cmocka_unit_test(evaluation_writes_the_logits_of_every_row),
        cmocka_unit_test(evaluation_that_loses_its_cache_writes_each_row_once),
        cmocka_unit_test(evaluation_refuses_a_pipe),
        cmocka_unit_test(the_status_is_valid_json_at_any_time),
        cmocka_unit_test(automatic_bits_are_measured_by_the_load_and_shown),
        cmocka_unit_test(jobs_of_others_go_on_while_bits_are_measured),
        cmocka_unit_test(a_load_that_measures_can_be_left_in_the_middle),
        cmocka_unit_test(a_measurement_that_fails_fails_the_load),
        cmocka_unit_test(a_device_that_is_lost_while_bits_are_measured_has_the_model_loaded_anew),
        cmocka_unit_test(an_estimate_needs_no_loaded_model),
        cmocka_unit_test(the_heartbeat_tells_idle_from_stuck),
        cmocka_unit_test(any_order_of_calls_ends_every_job_once),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
