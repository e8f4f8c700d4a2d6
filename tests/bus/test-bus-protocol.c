/* SPDX-License-Identifier: Apache-2.0 */
/* The real bus side with an engine that needs no device: the protocol to the letter, and the shared cases. */

#include "tests/bus/cases.h"
#include "tests/bus/harness.h"

#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <cmocka.h>

#define NOBODY 65534

/* ---- introspection --------------------------------------------------------------------------------------------------------------- */

/* Drops comments and the blanks between elements. */
static void normalise_xml(char *xml)
{
    char *to = xml;
    bool in_tag = false;

    for (const char *c = xml; *c;) {
        if (strncmp(c, "<!--", 4) == 0) {
            c = strstr(c, "-->");
            assert_non_null(c);
            c += 3;
            continue;
        }
        if (*c == '<')
            in_tag = true;
        if (in_tag)
            *to++ = *c;
        if (*c++ == '>')
            in_tag = false;
    }
    *to = 0;
}

static char *read_document(void)
{
    _cleanup_(freep) char *path = harness_source_file("packaging/dbus/org.leat.Inference1.xml");
    _cleanup_(close_filep) FILE *file = fopen(path, "r");
    char *text = calloc(1, 1 << 17);

    assert_non_null(file);
    assert_non_null(text);
    assert_true(fread(text, 1, (1 << 17) - 1, file) > 0);
    normalise_xml(text);
    return text;
}

/* <interface name="NAME">…</interface> of @xml; the caller frees. */
static char *cut_interface(const char *xml, const char *name, const char *where)
{
    char opening[96];
    const char *begin, *end;

    (void)snprintf(opening, sizeof(opening), "<interface name=\"%s\">", name);
    begin = strstr(xml, opening);
    end = begin ? strstr(begin, "</interface>") : NULL;
    if (!end)
        fail_msg("%s is not in %s", name, where);
    return strndup(begin, (size_t)(end - begin));
}

static void check_introspection(sd_bus *bus, const char *document, const char *path, const char *interface)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = call_ok(bus, path, "org.freedesktop.DBus.Introspectable", "Introspect", "");
    _cleanup_(freep) char *actual = NULL, *own = NULL, *written = NULL;
    const char *xml;

    assert_return_code(sd_bus_message_read(reply, "s", &xml), 0);
    assert_non_null((actual = strdup(xml)));
    normalise_xml(actual);
    own = cut_interface(actual, interface, path);
    written = cut_interface(document, interface, "the document");
    assert_string_equal(own, written);
}

static void introspection_equals_the_interface_document(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *document = read_document(), *session = open_session(bus, "test"), *job = NULL;
    _cleanup_(close_fdp) int fd = -1;

    job = generate(bus, session, "Tell a very long story.", 0, false, &fd);
    check_introspection(bus, document, BUS_ROOT, MANAGER);
    check_introspection(bus, document, MODEL_PATH("test"), MODEL);
    check_introspection(bus, document, session, SESSION);
    check_introspection(bus, document, job, JOB);
    check_introspection(bus, document, BUS_ROOT "/device/0", DEVICE);
    check_introspection(bus, document, SERVICE_PATH("echo"), SERVICE);
}

static void object_managers_list_what_is_configured(void **state)
{
    static const struct {
        const char *root, *path;
    } expected[] = {{BUS_ROOT "/model", MODEL_PATH("test")}, {BUS_ROOT "/device", BUS_ROOT "/device/0"}, {BUS_ROOT "/service", SERVICE_PATH("echo")}};
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());

    for (size_t i = 0; i < N_ELEMENTS(expected); i++) {
        _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply =
            call_ok(bus, expected[i].root, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects", "");
        bool found = false;
        const char *path;

        assert_return_code(sd_bus_message_enter_container(reply, 'a', "{oa{sa{sv}}}"), 0);
        while (sd_bus_message_enter_container(reply, 'e', "oa{sa{sv}}") > 0) {
            assert_return_code(sd_bus_message_read(reply, "o", &path), 0);
            found = found || strcmp(path, expected[i].path) == 0;
            assert_return_code(sd_bus_message_skip(reply, "a{sa{sv}}"), 0);
            assert_return_code(sd_bus_message_exit_container(reply), 0);
        }
        assert_true(found);
    }
}

/* ---- options --------------------------------------------------------------------------------------------------------------------- */

static void expect_refusal(sd_bus *bus, const char *needle, const char *key, const char *type, ...)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL;
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    va_list arguments;

    assert_return_code(sd_bus_message_new_method_call(bus, &call, BUS_NAME, BUS_ROOT, MANAGER, "Ask"), 0);
    assert_return_code(sd_bus_message_append(call, "ss", "test", "Hello"), 0);
    assert_return_code(sd_bus_message_open_container(call, 'a', "{sv}"), 0);
    assert_return_code(sd_bus_message_append(call, "{sv}", "max-tokens", "u", 1), 0);
    assert_return_code(sd_bus_message_open_container(call, 'e', "sv"), 0);
    assert_return_code(sd_bus_message_append(call, "s", key), 0);
    assert_return_code(sd_bus_message_open_container(call, 'v', type), 0);
    va_start(arguments, type);
    assert_return_code(sd_bus_message_appendv(call, type, arguments), 0);
    va_end(arguments);
    assert_return_code(sd_bus_message_close_container(call), 0);
    assert_return_code(sd_bus_message_close_container(call), 0);
    assert_return_code(sd_bus_message_close_container(call), 0);
    assert_true(sd_bus_call(bus, call, 0, &error, NULL) < 0);
    assert_string_equal(error.name, SD_BUS_ERROR_INVALID_ARGS);
    if (!strstr(error.message, key) || !strstr(error.message, needle))
        fail_msg("option %s: \"%s\" does not say %s", key, error.message, needle);
}

static void wrong_options_are_named_with_what_was_expected(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());

    expect_refusal(bus, "did you mean temperature", "temprature", "d", 0.5);
    expect_refusal(bus, "expected d", "temperature", "s", "hot");
    expect_refusal(bus, "expected d", "temperature", "u", 1);
    expect_refusal(bus, "-1", "temperature", "d", -1.0);
    expect_refusal(bus, "nan", "temperature", "d", (double)NAN);
    expect_refusal(bus, "inf", "temperature", "d", (double)INFINITY);
    expect_refusal(bus, "1.5", "top-p", "d", 1.5);
    expect_refusal(bus, "expected u", "top-k", "i", -1);
    expect_refusal(bus, "given twice", "max-tokens", "u", 2);
    expect_refusal(bus, "expected as", "stop", "s", "x");
    expect_refusal(bus, "1 to 256 bytes", "stop", "as", 2, "x", "");
    expect_refusal(bus, "none of: interactive, normal, background", "priority", "s", "urgent");
    expect_refusal(bus, "expected b", "raw", "u", 1);
    expect_refusal(bus, "at least one", "ids", "ai", 0);
    expect_refusal(bus, "element 1", "ids", "ai", 2, 1, -5);
    expect_refusal(bus, "prompt must be empty", "ids", "ai", 1, 1);
    expect_refusal(bus, "strategy", "cache", "a{sv}", 1, "stratgy", "s", "dynamic");
    expect_refusal(bus, "type as", "cache", "a{sv}", 1, "strategy", "as", 1, "dynamic");
    expect_refusal(bus, "unknown option", "parse-special", "b", true);
}

static void wrong_messages_are_named(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test"), *text = NULL;

    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, &text, session, SESSION, "Generate", "aa{sv}a{sv}", 1, 1, "role", "s", "user", 0);
    assert_string_equal(text, "message 0: no content");
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Generate", "aa{sv}a{sv}", 1, 2, "role", "s", "king", "content", "s", "x", 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Generate", "aa{sv}a{sv}", 1, 2, "role", "s", "user", "content", "u", 1, 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Generate", "aa{sv}a{sv}", 0, 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Generate", "aa{sv}a{sv}", 1, 2, "role", "s", "user", "content", "s", "x", 1,
               "cache", "a{sv}", 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Crop", "ia{sv}", 5, 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "", 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, BUS_ROOT, MANAGER, "Ask", "su", "test", 1);
}

/* ---- who may --------------------------------------------------------------------------------------------------------------------- */

static void another_user_sees_no_session_and_changes_nothing(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = NULL, *other = NULL;
    _cleanup_(freep) char *session = NULL, *job = NULL;
    _cleanup_(close_fdp) int fd = -1;

    if (geteuid() != 0) {
        print_message("skipped: needs root to be two users\n");
        skip();
    }
    bus = harness_connect(*state, getuid());
    other = harness_connect(*state, NOBODY);
    session = open_session(bus, "test");
    job = generate(bus, session, "Tell a very long story.", 0, false, &fd);
    call_fails(other, SD_BUS_ERROR_ACCESS_DENIED, NULL, session, SESSION, "Close", "a{sv}", 0);
    call_fails(other, SD_BUS_ERROR_ACCESS_DENIED, NULL, session, "org.freedesktop.DBus.Properties", "GetAll", "s", SESSION);
    call_fails(other, SD_BUS_ERROR_ACCESS_DENIED, NULL, session, "org.freedesktop.DBus.Properties", "Get", "ss", SESSION, "Cache");
    call_fails(other, SD_BUS_ERROR_ACCESS_DENIED, NULL, job, JOB, "Cancel", "a{sv}", 0);
    call_fails(other, SD_BUS_ERROR_ACCESS_DENIED, NULL, BUS_ROOT, MANAGER, "Reload", "a{sv}", 0);
    call_fails(other, SD_BUS_ERROR_ACCESS_DENIED, NULL, MODEL_PATH("test"), MODEL, "Load", "a{sv}", 0);
    call_fails(other, SD_BUS_ERROR_ACCESS_DENIED, NULL, MODEL_PATH("test"), MODEL, "Unload", "a{sv}", 0);
    call_fails(other, SD_BUS_ERROR_ACCESS_DENIED, NULL, BUS_ROOT "/device/0", DEVICE, "StartTrace", "a{sv}", 0);
    call_fails(other, SD_BUS_ERROR_ACCESS_DENIED, NULL, "/org/freedesktop/LogControl1", "org.freedesktop.DBus.Properties", "Set", "ssv",
               "org.freedesktop.LogControl1", "LogLevel", "s", "debug");
    sd_bus_message_unref(call_ok(other, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "Hello", 1, "max-tokens", "u", 2));
    sd_bus_message_unref(call_ok(bus, job, JOB, "Cancel", "a{sv}", 0));
}

/* Two connections of one user who is not root: a session belongs to the connection. */
static void another_connection_of_the_same_user_sees_no_session(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = NULL, *other = NULL;
    _cleanup_(freep) char *session = NULL;

    if (geteuid() != 0) {
        print_message("skipped: needs root to be another user\n");
        skip();
    }
    bus = harness_connect(*state, NOBODY);
    other = harness_connect(*state, NOBODY);
    session = open_session(bus, "test");
    sd_bus_message_unref(call_ok(bus, session, SESSION, "Crop", "ia{sv}", 0, 0));
    call_fails(other, SD_BUS_ERROR_ACCESS_DENIED, NULL, session, SESSION, "Crop", "ia{sv}", 0, 0);
    call_fails(other, SD_BUS_ERROR_ACCESS_DENIED, NULL, session, "org.freedesktop.DBus.Properties", "Get", "ss", SESSION, "Cache");
}

static void root_may_look_into_a_session_but_not_speak_in_it(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = NULL, *root = NULL;
    _cleanup_(freep) char *session = NULL;

    if (geteuid() != 0) {
        print_message("skipped: needs root\n");
        skip();
    }
    bus = harness_connect(*state, NOBODY);
    root = harness_connect(*state, getuid());
    session = open_session(bus, "test");
    sd_bus_message_unref(call_ok(root, session, "org.freedesktop.DBus.Properties", "Get", "ss", SESSION, "Cache"));
    call_fails(root, SD_BUS_ERROR_ACCESS_DENIED, NULL, session, SESSION, "Generate", "aa{sv}a{sv}", 1, 2, "role", "s", "user", "content", "s", "x", 0);
    call_fails(root, SD_BUS_ERROR_ACCESS_DENIED, NULL, session, SESSION, "Clone", "a{sv}", 0);
    sd_bus_message_unref(call_ok(root, session, SESSION, "Close", "a{sv}", 0));
    call_fails(bus, ERROR("NoSuchSession"), NULL, session, SESSION, "Crop", "ia{sv}", 0, 0);
}

/* ---- quotas ---------------------------------------------------------------------------------------------------------------------- */

static void a_client_has_limits_and_others_are_not_touched(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid()), *other = harness_connect(*state, getuid());
    char *sessions[32];
    int fds[16];

    for (size_t i = 0; i < N_ELEMENTS(sessions); i++)
        sessions[i] = open_session(bus, "test");
    call_fails(bus, ERROR("QuotaExceeded"), NULL, BUS_ROOT, MANAGER, "OpenSession", "sa{sv}", "test", 0);
    call_fails(bus, ERROR("QuotaExceeded"), NULL, sessions[0], SESSION, "Clone", "a{sv}", 0);
    for (size_t i = 0; i < N_ELEMENTS(fds); i++)
        free(generate(bus, sessions[i], "Tell a very long story.", 0, false, &fds[i]));
    call_fails(bus, ERROR("SessionBusy"), NULL, sessions[0], SESSION, "Generate", "aa{sv}a{sv}", 1, 2, "role", "s", "user", "content", "s", "x", 0);
    call_fails(bus, ERROR("QuotaExceeded"), NULL, sessions[20], SESSION, "Generate", "aa{sv}a{sv}", 1, 2, "role", "s", "user", "content", "s", "x", 0);
    call_fails(bus, ERROR("QuotaExceeded"), NULL, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "Hello", 0);
    sd_bus_message_unref(call_ok(other, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "Hello", 1, "max-tokens", "u", 2));
    for (size_t i = 0; i < N_ELEMENTS(fds); i++)
        (void)close(fds[i]);
    wait_until_idle(bus);
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "Hello", 1, "max-tokens", "u", 2));
    for (size_t i = 0; i < N_ELEMENTS(sessions); i++) {
        sd_bus_message_unref(call_ok(bus, sessions[i], SESSION, "Close", "a{sv}", 0));
        free(sessions[i]);
    }
}

static void a_descriptor_that_is_too_big_or_unreadable_is_refused(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(close_fdp) int big = memfd_create("big", MFD_CLOEXEC), folder = open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC),
                             null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    _cleanup_(freep) char *text = NULL;

    assert_int_equal(ftruncate(big, (64 << 20) + 1), 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, &text, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "", 1, "prompt-fd", "h", big);
    assert_non_null(strstr(text, "67108864"));
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "", 1, "prompt-fd", "h", folder);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "", 1, "prompt-fd", "h", null);
}

/* F29: within a message, and by descriptor beyond what the bus would carry. */
static void a_prompt_of_a_mebibyte_and_of_thirty_arrive(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(close_fdp) int fd = memfd_create("prompt", MFD_CLOEXEC);
    _cleanup_(freep) char *prompt = malloc((1 << 20) + 1);

    assert_non_null(prompt);
    memset(prompt, 'a', 1 << 20);
    prompt[1 << 20] = 0;
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", prompt, 1, "max-tokens", "u", 2));
    for (int i = 0; i < 30; i++)
        assert_int_equal(write(fd, prompt, 1 << 20), 1 << 20);
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "", 2, "max-tokens", "u", 2, "prompt-fd", "h", fd));
}

/* The client keeps the writing end open: nobody else waits for it, and its leaving takes the request along. */
static void a_pipe_that_never_ends_holds_up_nobody(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid()), *other = harness_connect(*state, getuid());
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL;
    int ends[2];

    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    assert_int_equal(write(ends[1], "Hel", 3), 3);
    assert_return_code(sd_bus_message_new_method_call(bus, &call, BUS_NAME, BUS_ROOT, MANAGER, "Ask"), 0);
    assert_return_code(sd_bus_message_append(call, "ssa{sv}", "test", "", 1, "prompt-fd", "h", ends[0]), 0);
    assert_return_code(sd_bus_send(bus, call, NULL), 0);
    assert_return_code(sd_bus_flush(bus), 0);
    call = sd_bus_message_unref(call); /* and with it our copy of the reading end */
    (void)close(ends[0]);
    sd_bus_message_unref(call_ok(other, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "Hello", 1, "max-tokens", "u", 2));
    sd_bus_flush_close_unref(bus);
    bus = NULL;
    /* Once the daemon has let go of the reading end, writing fails. */
    (void)signal(SIGPIPE, SIG_IGN);
    for (int i = 0; write(ends[1], "x", 1) == 1; i++) {
        if (i == 2000)
            fail_msg("the daemon still holds the descriptor");
        (void)usleep(5000);
    }
    (void)close(ends[1]);
}

/* ---- the rest of the interfaces --------------------------------------------------------------------------------------------------- */

static void facts_of_the_engine_become_variants(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = call_ok(bus, MODEL_PATH("test"), MODEL, "Estimate", "a{sv}", 0);
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *tokens = call_ok(bus, MODEL_PATH("test"), MODEL, "CountTokens", "sa{sv}", "Hello", 0);
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *ids = call_ok(bus, MODEL_PATH("test"), MODEL, "Tokenize", "sa{sv}", "AB", 0);
    _cleanup_(freep) char *name = get_text(bus, BUS_ROOT "/device/0", DEVICE, "Name");
    const int32_t *list;
    size_t n_bytes, n = 0;
    uint32_t count;

    assert_true(sd_bus_message_enter_container(reply, 'a', "{sv}") > 0);
    while (sd_bus_message_skip(reply, "{sv}") > 0)
        n++;
    assert_int_equal(n, 4); /* null is left out */
    assert_return_code(sd_bus_message_read(tokens, "u", &count), 0);
    assert_int_equal(count, 5);
    assert_return_code(sd_bus_message_read_array(ids, 'i', (const void **)&list, &n_bytes), 0);
    assert_int_equal(n_bytes, 8);
    assert_int_equal(list[0], 'A');
    assert_string_equal(name, "fake device ?"); /* a driver's name with a bad byte does not cost the connection (F23) */
}

static void load_and_evaluate_are_jobs(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *load = NULL, *evaluate = NULL;
    _cleanup_(close_fdp) int ids = memfd_create("ids", MFD_CLOEXEC), npy = memfd_create("npy", MFD_CLOEXEC);
    _cleanup_(freep) char *loaded = NULL;
    char bytes[4] = "";
    Finished finished;
    const char *job;
    int ends[2];

    finished_watch(bus, &finished);
    load = call_ok(bus, MODEL_PATH("test"), MODEL, "Load", "a{sv}", 0);
    assert_return_code(sd_bus_message_read(load, "o", &job), 0);
    finished_wait(bus, &finished, job, 30);
    assert_string_equal(finished.result, "done");
    loaded = get_text(bus, MODEL_PATH("test"), MODEL, "State");
    assert_string_equal(loaded, "loaded");
    assert_int_equal(write(ids, "1, 2\n3", 6), 6);
    assert_int_equal(lseek(ids, 0, SEEK_SET), 0);
    evaluate = call_ok(bus, MODEL_PATH("test"), MODEL, "Evaluate", "hha{sv}", ids, npy, 0);
    assert_return_code(sd_bus_message_read(evaluate, "o", &job), 0);
    finished_wait(bus, &finished, job, 30);
    assert_string_equal(finished.result, "done");
    assert_int_equal(pread(npy, bytes, 3, 0), 3);
    assert_string_equal(bytes, "npy");
    /* A pipe could make the engine wait. */
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, MODEL_PATH("test"), MODEL, "Evaluate", "hha{sv}", ids, ends[1], 0);
    (void)close(ends[0]);
    (void)close(ends[1]);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, MODEL_PATH("test"), MODEL, "Evaluate", "hha{sv}", ids, npy, 0); /* ids at its end: none */
}

static void a_running_job_shows_how_far_it_has_come(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test"), *job = NULL, *kind = NULL, *job_state = NULL, *busy = NULL;
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *jobs = NULL;
    _cleanup_(close_fdp) int fd = -1;

    job = generate(bus, session, "12345678", 0, true, &fd);
    stream_hear_some(fd, 30, 8, &heard);
    assert_int_equal(get_u32(bus, job, JOB, "PromptTokens"), 2);
    assert_true(get_u32(bus, job, JOB, "OutputTokens") >= 8);
    kind = get_text(bus, job, JOB, "Kind");
    assert_string_equal(kind, "generate");
    job_state = get_text(bus, job, JOB, "State");
    assert_string_equal(job_state, "decoding");
    busy = get_text(bus, session, SESSION, "State");
    assert_string_equal(busy, "busy");
    jobs = call_ok(bus, BUS_ROOT, MANAGER, "ListJobs", "a{sv}", 0);
    assert_true(sd_bus_message_enter_container(jobs, 'a', "a{sv}") > 0);
    assert_true(sd_bus_message_enter_container(jobs, 'a', "{sv}") > 0); /* at least this one */
}

static void a_clone_has_its_own_length(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test");
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL, *crop = NULL, *crop_clone = NULL;
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
    uint32_t length, clone_length;
    const char *clone;
    int fd;

    free(generate(bus, session, "12345678", 8, false, &fd));
    stream_hear(fd, 30, &heard);
    (void)close(fd);
    reply = call_ok(bus, session, SESSION, "Clone", "a{sv}", 0);
    assert_return_code(sd_bus_message_read(reply, "o", &clone), 0);
    assert_int_equal(get_u32(bus, clone, SESSION, "ContextUsed"), 10);
    sd_bus_message_unref(call_ok(bus, clone, SESSION, "SetRecording", "ba{sv}", 1, 0));
    crop_clone = call_ok(bus, clone, SESSION, "Crop", "ia{sv}", -4, 0);
    assert_return_code(sd_bus_message_read(crop_clone, "u", &clone_length), 0);
    crop = call_ok(bus, session, SESSION, "Crop", "ia{sv}", 0, 0);
    assert_return_code(sd_bus_message_read(crop, "u", &length), 0);
    assert_int_equal(clone_length, 6);
    assert_int_equal(length, 10);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, clone, SESSION, "Crop", "ia{sv}", -100, 0);
}

static void the_log_level_is_settable(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    static const char path[] = "/org/freedesktop/LogControl1", interface[] = "org.freedesktop.LogControl1";
    _cleanup_(freep) char *level = NULL;

    sd_bus_message_unref(call_ok(bus, path, "org.freedesktop.DBus.Properties", "Set", "ssv", interface, "LogLevel", "s", "debug"));
    level = get_text(bus, path, interface, "LogLevel");
    assert_string_equal(level, "debug");
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, path, "org.freedesktop.DBus.Properties", "Set", "ssv", interface, "LogLevel", "s", "loud");
    sd_bus_message_unref(call_ok(bus, path, "org.freedesktop.DBus.Properties", "Set", "ssv", interface, "LogLevel", "s", "info"));
}

static void a_reload_brings_and_takes_objects(void **state)
{
    const Harness *harness = *state;
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(harness, getuid());
    uint64_t before = 0, after = 0;

    assert_return_code(sd_bus_get_property_trivial(bus, BUS_NAME, BUS_ROOT, MANAGER, "ConfigGeneration", NULL, 't', &before), 0);
    harness_write_config(harness, "  another: {file: /nonexistent/another.gguf}\n");
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, MANAGER, "Reload", "a{sv}", 0));
    free(get_text(bus, MODEL_PATH("another"), MODEL, "State"));
    harness_write_config(harness, "");
    assert_int_equal(kill(harness->daemon_pid, SIGHUP), 0);
    for (int i = 0; after < before + 2; i++) {
        assert_true(i < 1000);
        (void)usleep(5000);
        assert_return_code(sd_bus_get_property_trivial(bus, BUS_NAME, BUS_ROOT, MANAGER, "ConfigGeneration", NULL, 't', &after), 0);
    }
    call_fails(bus, ERROR("NoSuchModel"), NULL, MODEL_PATH("another"), MODEL, "Load", "a{sv}", 0);
}

static void exit_statuses_are_those_of_the_manual(void **state)
{
    const Harness *harness = *state;
    char broken[128];
    FILE *file;

    (void)snprintf(broken, sizeof(broken), "%s/broken.yaml", harness->folder);
    assert_non_null((file = fopen(broken, "w")));
    (void)fputs("nonsense: 1\n", file);
    (void)fclose(file);
    assert_int_equal(harness_run_daemon(harness, (const char *[]){"--version", NULL}), 0);
    assert_int_equal(harness_run_daemon(harness, (const char *[]){"--help", NULL}), 0);
    assert_int_equal(harness_run_daemon(harness, (const char *[]){"--nonsense", NULL}), 2);
    assert_int_equal(harness_run_daemon(harness, (const char *[]){"--stream-timeout", "soon", NULL}), 2);
    assert_int_equal(harness_run_daemon(harness, (const char *[]){"--user", "--config", broken, NULL}), 5);
    assert_int_equal(harness_run_daemon(harness, (const char *[]){"--user", "--config", harness->config, "--print-config", NULL}), 0);
    /* The name is taken. */
    assert_int_equal(harness_run_daemon(harness, (const char *[]){"--user", "--config", harness->config, NULL}), 3);
}

static void a_stopping_daemon_ends_jobs_with_shutting_down(void **state)
{
    Harness *harness = *state;
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(harness, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test");
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
    int fd;

    free(generate(bus, session, "Tell a very long story.", 0, true, &fd));
    stream_hear_some(fd, 30, 4, &heard);
    assert_int_equal(harness_stop_daemon(harness), 0);
    stream_hear(fd, 30, &heard);
    assert_string_equal(heard.error, ERROR("ShuttingDown"));
    (void)close(fd);
    harness_start_daemon(harness);
}

/* What systemd is told: messages until one begins with @wanted, at most 10 s; the last one in @ret. */
static void hear_notify(int socket, const char *wanted, char *ret, size_t size)
{
    for (;;) {
        struct pollfd ready = {.fd = socket, .events = POLLIN};
        ssize_t n;

        if (poll(&ready, 1, 10000) <= 0)
            fail_msg("systemd was not told %s", wanted);
        n = recv(socket, ret, size - 1, 0);
        assert_true(n >= 0);
        ret[n] = 0;
        if (strncmp(ret, wanted, strlen(wanted)) == 0)
            return;
    }
}

static void systemd_is_told_of_readiness_reload_life_and_end(void **state)
{
    Harness *harness = *state;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    _cleanup_(close_fdp) int socket_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    char text[1024];

    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s/notify", harness->folder);
    assert_return_code(bind(socket_fd, (const struct sockaddr *)&address, sizeof(address)), errno);
    assert_int_equal(harness_stop_daemon(harness), 0);
    harness->notify = address.sun_path;
    harness_start_daemon(harness);
    harness->notify = NULL;
    hear_notify(socket_fd, "READY=1\nSTATUS=", text, sizeof(text));
    hear_notify(socket_fd, "WATCHDOG=1", text, sizeof(text));
    assert_int_equal(kill(harness->daemon_pid, SIGHUP), 0);
    hear_notify(socket_fd, "RELOADING=1\nMONOTONIC_USEC=", text, sizeof(text));
    hear_notify(socket_fd, "READY=1", text, sizeof(text));
    harness_write_config(harness, "nonsense: 1\n"); /* F13: the second READY comes all the same */
    assert_int_equal(kill(harness->daemon_pid, SIGHUP), 0);
    hear_notify(socket_fd, "RELOADING=1", text, sizeof(text));
    hear_notify(socket_fd, "READY=1", text, sizeof(text));
    harness_write_config(harness, "");
    hear_notify(socket_fd, "WATCHDOG=1", text, sizeof(text));
    assert_int_equal(kill(harness->daemon_pid, SIGTERM), 0);
    hear_notify(socket_fd, "STOPPING=1", text, sizeof(text));
    assert_int_equal(harness_wait_daemon(harness), 0);
    harness_start_daemon(harness);
}

static void an_idle_daemon_leaves_when_it_is_told_so(void **state)
{
    Harness *harness = *state;
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = NULL;
    _cleanup_(freep) char *session = NULL;

    assert_int_equal(harness_stop_daemon(harness), 0);
    harness_write_config(harness, "scheduler: {idle-exit: 300ms}\n");
    harness_start_daemon(harness);
    bus = harness_connect(harness, getuid());
    session = open_session(bus, "test"); /* an open session keeps it */
    (void)usleep(700000);
    assert_int_equal(get_u32(bus, session, SESSION, "ContextUsed"), 0);
    sd_bus_message_unref(call_ok(bus, session, SESSION, "Close", "a{sv}", 0));
    assert_int_equal(harness_wait_daemon(harness), 0);
    harness_write_config(harness, "");
    harness_start_daemon(harness);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(introspection_equals_the_interface_document),
        cmocka_unit_test(object_managers_list_what_is_configured),
        cmocka_unit_test(wrong_options_are_named_with_what_was_expected),
        cmocka_unit_test(wrong_messages_are_named),
        cmocka_unit_test(another_user_sees_no_session_and_changes_nothing),
        cmocka_unit_test(another_connection_of_the_same_user_sees_no_session),
        cmocka_unit_test(root_may_look_into_a_session_but_not_speak_in_it),
        cmocka_unit_test(a_client_has_limits_and_others_are_not_touched),
        cmocka_unit_test(a_descriptor_that_is_too_big_or_unreadable_is_refused),
        cmocka_unit_test(a_prompt_of_a_mebibyte_and_of_thirty_arrive),
        cmocka_unit_test(a_pipe_that_never_ends_holds_up_nobody),
        cmocka_unit_test(facts_of_the_engine_become_variants),
        cmocka_unit_test(load_and_evaluate_are_jobs),
        cmocka_unit_test(a_running_job_shows_how_far_it_has_come),
        cmocka_unit_test(a_clone_has_its_own_length),
        cmocka_unit_test(the_log_level_is_settable),
        cmocka_unit_test(a_reload_brings_and_takes_objects),
        cmocka_unit_test(exit_statuses_are_those_of_the_manual),
        SHARED_CASES,
        cmocka_unit_test(a_stopping_daemon_ends_jobs_with_shutting_down),
        cmocka_unit_test(systemd_is_told_of_readiness_reload_life_and_end),
        cmocka_unit_test(an_idle_daemon_leaves_when_it_is_told_so),
    };

    if (case_client(argc, argv) >= 0)
        return 0;
    return cmocka_run_group_tests_name("bus-protocol", tests, harness_setup_fake, harness_teardown);
}
