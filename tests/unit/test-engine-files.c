/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions in files, on a model that is played: what is restored goes on as if nothing had been; what cannot be is refused and changes nothing. */

#include "tests/fakes/fake.h"

#include <sys/mman.h>
#include <unistd.h>

static Talk *start(void)
{
    EngineModel models[] = {fake_model("m", "m.gguf"), fake_model("other", "other.gguf")};

    fake_reset();
    return talk_start(models, 2, 0);
}

static Seen *say(Talk *talk, uint64_t session, const char *text, uint32_t max_tokens)
{
    EngineRequest request = raw_request(NULL, text, max_tokens);

    request.session = session;
    return talk_wait(talk, talk_generate(talk, &request));
}

/* The engine takes the descriptor: each call gets its own. */
static EngineEvent *file_query(Talk *talk, EngineQueryKind kind, uint64_t session, int fd)
{
    return talk_ask(talk, (EngineQuery){.kind = kind, .owner = 1, .session = session, .fd = dup(fd)});
}

static EngineEvent *save(Talk *talk, uint64_t session, int fd)
{
    return file_query(talk, ENGINE_QUERY_SAVE_SESSION, session, fd);
}

static EngineEvent *restore(Talk *talk, uint64_t session, int fd)
{
    return file_query(talk, ENGINE_QUERY_RESTORE_SESSION, session, fd);
}

static int new_file(void)
{
    int fd = memfd_create("session", MFD_CLOEXEC);

    assert_true(fd >= 0);
    return fd;
}

/* A saved session that heard @prompt and said 20 tokens. */
static int saved_session(Talk *talk, const char *prompt)
{
    uint64_t session = talk_open(talk, "m", 1);
    int fd = new_file();

    say(talk, session, prompt, 20);
    assert_int_equal(save(talk, session, fd)->result, ENGINE_RESULT_DONE);
    return fd;
}

static void a_restored_session_goes_on_warm(void **state)
{
    Talk *talk = start();
    int fd = saved_session(talk, "First question");
    uint64_t session = talk_open(talk, "m", 1);
    char prompt[256], first[64];
    Seen *seen;

    (void)state;
    assert_int_equal(restore(talk, session, fd)->result, ENGINE_RESULT_DONE);
    expected_text("First question", 20, first);
    (void)snprintf(prompt, sizeof(prompt), "First question%s Second", first);
    seen = say(talk, session, prompt, 20);
    assert_int_equal(seen->usage.reused_tokens, 14 + 19);
    assert_speaks(seen, prompt, 20);
    talk_stop(talk);
    (void)close(fd);
}

static void a_restore_loads_the_model_and_replaces_what_was_there(void **state)
{
    Talk *talk = start();
    int fd = saved_session(talk, "The one that is kept");
    uint64_t session = talk_open(talk, "m", 1);
    Seen *seen;

    (void)state;
    say(talk, session, "Something else entirely", 8);
    talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_UNLOAD, .model = "m"});
    talk_until(talk, FAKE_GET(n_models) == 0);
    assert_int_equal(restore(talk, session, fd)->result, ENGINE_RESULT_DONE);
    assert_int_equal(FAKE_GET(n_models), 1);
    seen = say(talk, session, "The one that is kept", 4);
    assert_int_equal(seen->usage.reused_tokens, 19);
    assert_speaks(seen, "The one that is kept", 4);
    talk_stop(talk);
    (void)close(fd);
}

/* Its ids are all that it has, and all that is needed. */
static void a_cold_session_is_saved_and_restored_too(void **state)
{
    Talk *talk = start();
    uint64_t session = talk_open(talk, "m", 1), again = talk_open(talk, "m", 1);
    int fd = new_file();

    (void)state;
    say(talk, session, "A question before the model went", 8);
    talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_UNLOAD, .model = "m"});
    talk_until(talk, FAKE_GET(n_models) == 0);
    assert_int_equal(save(talk, session, fd)->result, ENGINE_RESULT_DONE);
    assert_int_equal(restore(talk, again, fd)->result, ENGINE_RESULT_DONE);
    assert_speaks(say(talk, again, "A question before the model went", 8), "A question before the model went", 8);
    talk_stop(talk);
    (void)close(fd);
}

/* After each the session says what it would have said. */
static void what_is_damaged_or_different_is_refused(void **state)
{
    Talk *talk = start();
    int fd = saved_session(talk, "A good session"), copy;
    uint64_t session = talk_open(talk, "m", 1), other = talk_open(talk, "other", 1);
    off_t bytes = lseek(fd, 0, SEEK_END);
    EngineEvent *reply;
    char *file = mmap(NULL, (size_t)bytes, PROT_READ, MAP_PRIVATE, fd, 0);

    (void)state;
    say(talk, session, "What the session knows", 8);
    for (off_t at = 3; at < bytes; at += bytes / 7) {
        copy = new_file();
        assert_int_equal(write(copy, file, (size_t)bytes), bytes);
        assert_int_equal(pwrite(copy, "\xff\x55", 2, at), 2);
        reply = restore(talk, session, copy);
        assert_int_equal(reply->result, ENGINE_RESULT_INVALID_ARGS);
        assert_true(reply->detail.text[0]);
        (void)close(copy);
        copy = new_file();
        assert_int_equal(write(copy, file, (size_t)at), at);
        assert_int_equal(restore(talk, session, copy)->result, ENGINE_RESULT_INVALID_ARGS);
        (void)close(copy);
    }
    reply = restore(talk, other, fd);
    assert_int_equal(reply->result, ENGINE_RESULT_DIGEST_MISMATCH);
    assert_non_null(strstr(reply->detail.text, "another model"));
    (void)munmap(file, (size_t)bytes);
    (void)close(fd);
    talk_stop(talk);
}

static void a_refused_restore_leaves_the_session_as_it_was(void **state)
{
    Talk *talk = start();
    uint64_t session = talk_open(talk, "m", 1);
    int fd = new_file();
    Seen *seen;

    (void)state;
    say(talk, session, "What the session knows", 8);
    assert_int_equal(restore(talk, session, fd)->result, ENGINE_RESULT_INVALID_ARGS); /* empty */
    seen = say(talk, session, "What the session knows", 8);
    assert_int_equal(seen->usage.reused_tokens, 21);
    assert_speaks(seen, "What the session knows", 8);
    talk_stop(talk);
    (void)close(fd);
}

static void another_form_of_the_cache_is_refused(void **state)
{
    Talk *talk = start();
    int fd = saved_session(talk, "A question to a packed cache");
    EngineModel models[] = {fake_model("m", "m.gguf"), fake_model("other", "other.gguf")};
    KvPolicy policy = models[0].policy;
    EngineEvent *opened, *reply;

    (void)state;
    policy.form.k_bits = 8;
    opened = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_OPEN_SESSION, .owner = 1, .model = "m", .policy = &policy});
    reply = restore(talk, opened->session, fd);
    assert_int_equal(reply->result, ENGINE_RESULT_DIGEST_MISMATCH);
    assert_non_null(strstr(reply->detail.text, "another form"));
    talk_stop(talk);
    (void)close(fd);
}

/* Also before its model was ever loaded; restored it makes a session that knows something an empty one. */
static void an_empty_session_is_saved_and_restored(void **state)
{
    Talk *talk = start();
    uint64_t empty = talk_open(talk, "m", 1), session = talk_open(talk, "m", 1);
    int fd = new_file(), again = new_file();
    EngineEvent *reply;
    Seen *seen;

    (void)state;
    assert_int_equal(FAKE_GET(n_models), 0);
    assert_int_equal(save(talk, empty, fd)->result, ENGINE_RESULT_DONE);
    assert_int_equal(FAKE_GET(n_models), 1);
    say(talk, session, "What the session knows", 8);
    reply = restore(talk, session, fd);
    assert_int_equal(reply->result, ENGINE_RESULT_DONE);
    assert_non_null(strstr(reply->json, "\"length\":0"));
    assert_int_equal(save(talk, session, again)->result, ENGINE_RESULT_DONE);
    assert_int_equal(restore(talk, empty, again)->result, ENGINE_RESULT_DONE);
    seen = say(talk, empty, "Another question", 8);
    assert_int_equal(seen->usage.reused_tokens, 0);
    assert_speaks(seen, "Another question", 8);
    assert_speaks(say(talk, session, "A third one", 8), "A third one", 8);
    talk_stop(talk);
    (void)close(fd);
    (void)close(again);
}

static void busy_and_unknown_sessions_are_refused(void **state)
{
    Talk *talk = start();
    uint64_t session = talk_open(talk, "m", 1);
    EngineRequest request = raw_request(NULL, "A long answer, please", 0);
    int fd = new_file();
    uint64_t job;

    (void)state;
    assert_int_equal(save(talk, 999, fd)->result, ENGINE_RESULT_NO_SUCH_SESSION);
    FAKE_SET(pass_usec, 1000);
    request.session = session;
    job = talk_generate(talk, &request);
    talk_until(talk, talk->seen[job].n_text > 3);
    assert_int_equal(save(talk, session, fd)->result, ENGINE_RESULT_SESSION_BUSY);
    assert_int_equal(restore(talk, session, fd)->result, ENGINE_RESULT_SESSION_BUSY);
    engine_cancel(talk->engine, job);
    talk_wait(talk, job);
    assert_int_equal(save(talk, session, fd)->result, ENGINE_RESULT_DONE);
    talk_stop(talk);
    (void)close(fd);
}

/* Spills after 20 ms. */
static Talk *start_spilling(const char *folder)
{
    EngineModel model = fake_model("m", "m.gguf");

    model.spill_dir = folder;
    model.spill_after_usec = 20000;
    fake_reset();
    return talk_start(&model, 1, 0);
}

static void an_idle_session_goes_to_a_file_and_comes_back(void **state)
{
    char folder[] = "/tmp/leat-spill-XXXXXX", prompt[256], first[64];
    uint64_t session;
    Talk *talk;
    Seen *seen;

    (void)state;
    assert_non_null(mkdtemp(folder));
    talk = start_spilling(folder);
    session = talk_open(talk, "m", 1);
    say(talk, session, "First question", 20);
    talk_until(talk, FAKE_GET(n_caches) == 0);
    assert_int_equal(rmdir(folder), 0); /* nothing with a name is in it */
    expected_text("First question", 20, first);
    (void)snprintf(prompt, sizeof(prompt), "First question%s Second", first);
    seen = say(talk, session, prompt, 20);
    assert_int_equal(seen->usage.reused_tokens, 14 + 19);
    assert_speaks(seen, prompt, 20);
    talk_stop(talk);
}

/* Cropped, edited, saved and closed while its cache is in a file. */
static void a_spilled_session_can_be_used_in_every_way(void **state)
{
    char folder[] = "/tmp/leat-spill-XXXXXX";
    uint64_t session, again;
    int fd = new_file();
    Talk *talk;
    Seen *seen;

    (void)state;
    assert_non_null(mkdtemp(folder));
    talk = start_spilling(folder);
    session = talk_open(talk, "m", 1);
    again = talk_open(talk, "m", 1);
    say(talk, session, "One two three four five", 8);
    talk_until(talk, FAKE_GET(n_caches) == 0);
    assert_int_equal(save(talk, session, fd)->result, ENGINE_RESULT_DONE);
    assert_int_equal(restore(talk, again, fd)->result, ENGINE_RESULT_DONE);
    seen = say(talk, again, "One two three four five six", 8);
    assert_int_equal(seen->usage.reused_tokens, 23);
    talk_until(talk, FAKE_GET(n_caches) == 0);
    talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_CROP_SESSION, .owner = 1, .session = session, .n = -20});
    seen = say(talk, session, "One two tHree", 8);
    assert_int_equal(seen->usage.reused_tokens, 9);
    assert_speaks(seen, "One two tHree", 8);
    talk_until(talk, FAKE_GET(n_caches) == 0);
    talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_CLOSE_SESSION, .owner = 1, .session = session});
    talk_stop(talk);
    (void)rmdir(folder);
    (void)close(fd);
}

static void a_folder_that_is_not_there_costs_nothing_but_memory(void **state)
{
    Talk *talk = start_spilling("/nonexistent/folder");
    uint64_t session = talk_open(talk, "m", 1);
    Seen *seen;

    (void)state;
    say(talk, session, "A question", 8);
    talk_sleep(80000);
    assert_int_equal(FAKE_GET(n_caches), 1);
    seen = say(talk, session, "A question", 8);
    assert_int_equal(seen->usage.reused_tokens, 9);
    talk_stop(talk);
}

/* Nobody waits for an answer any more; nothing may be left. */
static void ending_in_the_middle_leaves_nothing(void **state)
{
    Talk *talk = start();
    uint64_t session = talk_open(talk, "m", 1);
    int fd = new_file();

    (void)state;
    say(talk, session, "A session that is being saved", 8);
    for (int i = 0; i < 20; i++) {
        EngineQuery query = {.kind = i % 2 ? ENGINE_QUERY_RESTORE_SESSION : ENGINE_QUERY_SAVE_SESSION,
                             .cookie = 200 + (uint64_t)i,
                             .owner = 1,
                             .session = session,
                             .fd = dup(fd)};

        assert_int_equal(engine_query(talk->engine, &query), 0);
    }
    talk_stop(talk);
    (void)close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_restored_session_goes_on_warm),
        cmocka_unit_test(a_restore_loads_the_model_and_replaces_what_was_there),
        cmocka_unit_test(a_cold_session_is_saved_and_restored_too),
        cmocka_unit_test(what_is_damaged_or_different_is_refused),
        cmocka_unit_test(a_refused_restore_leaves_the_session_as_it_was),
        cmocka_unit_test(another_form_of_the_cache_is_refused),
        cmocka_unit_test(an_empty_session_is_saved_and_restored),
        cmocka_unit_test(busy_and_unknown_sessions_are_refused),
        cmocka_unit_test(an_idle_session_goes_to_a_file_and_comes_back),
        cmocka_unit_test(a_spilled_session_can_be_used_in_every_way),
        cmocka_unit_test(a_folder_that_is_not_there_costs_nothing_but_memory),
        cmocka_unit_test(ending_in_the_middle_leaves_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
