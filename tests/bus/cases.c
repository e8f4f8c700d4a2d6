/* SPDX-License-Identifier: Apache-2.0 */
/* Cases for every engine. */

#include "tests/bus/cases.h"
#include "tests/bus/harness.h"

#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <cmocka.h>

#define SECONDS 240 /* a model on a busy machine with sanitizers; a hang, not a pace, is what fails */

static uint64_t now_usec(void)
{
    struct timespec time = {0};

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

void a_stream_begins_with_its_version_and_ends_with_usage_and_reason(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test");
    _cleanup_(freep) char *job = NULL, *idle = NULL;
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
    _cleanup_(close_fdp) int fd = -1;
    Finished finished;
    size_t n;

    finished_watch(bus, &finished);
    job = generate(bus, session, "Count to ten.", 20, true, &fd);
    stream_hear(fd, SECONDS, &heard);
    n = strlen(heard.kinds);
    assert_int_equal(heard.kinds[0], 'V');
    assert_true(n > 3);
    assert_string_equal(heard.kinds + n - 2, "UD");
    assert_true(heard.n_text_bytes > 0);
    assert_int_equal(heard.n_ids, 20);
    assert_int_equal(heard.usage_output_tokens, 20);
    assert_true(heard.usage_prompt_tokens > 0);
    assert_string_equal(heard.reason, "length");
    finished_wait(bus, &finished, job, SECONDS);
    assert_string_equal(finished.result, "done");
    assert_true(get_u32(bus, session, SESSION, "ContextUsed") >= 20);
    idle = get_text(bus, session, SESSION, "State");
    assert_string_equal(idle, "idle");
}

void ask_answers_with_text_and_usage(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply =
        call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "small", "What is a leat?", 3, "max-tokens", "u", 6, "want-ids", "b", true, "ignore-eos",
                "b", true);
    const char *text, *key;
    bool has_ids = false, has_rate = false;

    assert_return_code(sd_bus_message_read(reply, "s", &text), 0);
    assert_true(text[0] != 0);
    assert_true(sd_bus_message_enter_container(reply, 'a', "{sv}") > 0);
    while (sd_bus_message_enter_container(reply, 'e', "sv") > 0) {
        assert_return_code(sd_bus_message_read(reply, "s", &key), 0);
        if (strcmp(key, "ids") == 0) {
            const void *ids;
            size_t n_bytes;

            assert_return_code(sd_bus_message_enter_container(reply, 'v', "ai"), 0);
            assert_return_code(sd_bus_message_read_array(reply, 'i', &ids, &n_bytes), 0);
            assert_int_equal(n_bytes, 6 * sizeof(int32_t));
            assert_return_code(sd_bus_message_exit_container(reply), 0);
            has_ids = true;
        } else {
            assert_return_code(sd_bus_message_skip(reply, "v"), 0);
        }
        has_rate = has_rate || strcmp(key, "decode-rate") == 0;
        assert_return_code(sd_bus_message_exit_container(reply), 0);
    }
    assert_true(has_ids);
    assert_true(has_rate);
}

void two_clients_at_once_hear_only_their_own(void **state)
{
    static const char *const secrets[2] = {"ZEBRA-7391", "MANGO-2846"};
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *first = harness_connect(*state, getuid()), *second = harness_connect(*state, getuid());
    sd_bus *buses[2] = {first, second};
    const Harness *harness = *state;
    Heard heard[2] = {0};
    int fds[2];

    for (int i = 0; i < 2; i++) {
        _cleanup_(freep) char *session = open_session(buses[i], "test");
        char prompt[128];

        (void)snprintf(prompt, sizeof(prompt), "The password is %s. Repeat the password three times.", secrets[i]);
        free(generate(buses[i], session, prompt, 40, true, &fds[i]));
    }
    for (int i = 0; i < 2; i++) {
        stream_hear(fds[i], SECONDS, &heard[i]);
        assert_string_equal(heard[i].reason, "length");
        assert_int_equal(heard[i].n_ids, 40);
        (void)close(fds[i]);
    }
    for (int i = 0; i < 2; i++) {
        if (strstr(heard[i].text, secrets[1 - i]))
            fail_msg("client %d heard the other's secret: %s", i, heard[i].text);
        if (harness->fake)
            assert_non_null(strstr(heard[i].text, secrets[i]));
    }
    heard_clear(&heard[0]);
    heard_clear(&heard[1]);
}

/* Sends @fd over @socket. */
static void send_fd(int socket, int fd)
{
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    if (sendmsg(socket, &message, 0) < 0)
        _exit(1);
}

static int receive_fd(int socket)
{
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct cmsghdr *header;
    int fd = -1;

    assert_int_equal(recvmsg(socket, &message, MSG_CMSG_CLOEXEC), 1);
    header = CMSG_FIRSTHDR(&message);
    if (header)
        memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    assert_true(fd >= 0);
    return fd;
}

int case_client(int argc, char **argv)
{
    Harness harness = {.fake = false};
    char *session;
    sd_bus *bus;
    int fd;

    if (argc != 3 || strcmp(argv[1], "client") != 0)
        return -1;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)snprintf(harness.address, sizeof(harness.address), "%s", argv[2]);
    bus = harness_connect(&harness, getuid());
    session = open_session(bus, "test");
    free(generate(bus, session, "Tell a very long story.", 0, true, &fd));
    send_fd(3, fd);
    for (;;)
        (void)pause();
}

/* This program again, as a client that generates without end and hands its stream over @socket. */
static pid_t start_client(const Harness *harness, int socket)
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    if (dup2(socket, 3) == 3)
        (void)execl("/proc/self/exe", "client", "client", harness->address, (char *)NULL);
    _exit(127);
}

/* The client lives in a child; we keep its stream, so that only its leaving the bus can end the job. */
void a_killed_client_ends_its_job(void **state)
{
    const Harness *harness = *state;
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(harness, getuid());
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
    _cleanup_(close_fdp) int stream = -1;
    uint64_t first, second, killed, idle;
    int ends[2];
    pid_t pid;

    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    pid = start_client(harness, ends[1]);
    (void)close(ends[1]);
    stream = receive_fd(ends[0]);
    (void)close(ends[0]);
    stream_hear_some(stream, SECONDS, 4, &heard);
    first = get_launches(bus);
    stream_hear_some(stream, SECONDS, 24, &heard);
    second = get_launches(bus);
    assert_false(heard.ended);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    killed = get_launches(bus);
    wait_until_idle(bus);
    idle = get_launches(bus);
    stream_hear(stream, SECONDS, &heard);
    assert_false(heard.ended); /* the socket was closed, nobody was there to be told */
    if (harness->fake)
        return;
    /* Every token takes as many launches: what ran after the client's death was two tokens at most, and the one that had begun. */
    print_message("%.1f tokens after the client was killed\n", (double)(idle - killed) * 20 / (double)(second - first));
    assert_true((idle - killed) * 20 <= 3 * (second - first) + (second - first) / 2);
}

void closing_the_stream_cancels_the_job(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test");
    _cleanup_(freep) char *job = NULL;
    Finished finished;
    int fd;

    finished_watch(bus, &finished);
    job = generate(bus, session, "Tell a very long story.", 0, false, &fd);
    (void)close(fd);
    finished_wait(bus, &finished, job, SECONDS);
    assert_string_equal(finished.result, ERROR("Cancelled"));
    wait_until_idle(bus);
}

void a_slow_reader_is_ended_and_others_go_on(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid()), *other = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test");
    _cleanup_(freep) char *job = NULL;
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
    _cleanup_(close_fdp) int fd = -1;
    Finished finished;

    finished_watch(bus, &finished);
    job = generate(bus, session, "Tell a very long story.", 1500, true, &fd);
    sd_bus_message_unref(call_ok(other, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "Hello", 1, "max-tokens", "u", 4));
    finished_wait(bus, &finished, job, SECONDS);
    assert_string_equal(finished.result, ERROR("SlowReader"));
    stream_hear(fd, SECONDS, &heard);
    assert_true(heard.n_frames > 10);
    if (heard.ended)
        assert_string_equal(heard.error, ERROR("SlowReader"));
    wait_until_idle(bus);
}

void a_reader_that_comes_back_hears_everything(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test");
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
    _cleanup_(close_fdp) int fd = -1;

    free(generate(bus, session, "Tell a very long story.", 400, true, &fd));
    for (int i = 0; i < 4; i++) {
        (void)usleep(400000);
        stream_hear_some(fd, SECONDS, heard.n_ids + 20, &heard);
    }
    stream_hear(fd, SECONDS, &heard);
    assert_string_equal(heard.reason, "length");
    assert_int_equal(heard.n_ids, 400);
    assert_int_equal(heard.usage_output_tokens, 400);
}

void cancel_ends_the_job_and_the_session_goes_on(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test");
    Finished finished;

    finished_watch(bus, &finished);
    for (int i = 0; i < 3; i++) {
        _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
        _cleanup_(close_fdp) int fd = -1;
        _cleanup_(freep) char *job = generate(bus, session, "Tell a very long story.", 0, true, &fd);

        if (i > 0) /* the first is cancelled before its first token */
            stream_hear_some(fd, SECONDS, 4, &heard);
        if (i < 2)
            sd_bus_message_unref(call_ok(bus, job, JOB, "Cancel", "a{sv}", 0));
        else
            sd_bus_message_unref(call_ok(bus, session, SESSION, "Cancel", "a{sv}", 0));
        stream_hear(fd, SECONDS, &heard);
        assert_true(heard.ended);
        assert_string_equal(heard.error, ERROR("Cancelled"));
        finished_wait(bus, &finished, job, SECONDS);
        assert_string_equal(finished.result, ERROR("Cancelled"));
        call_fails(bus, ERROR("NoSuchJob"), NULL, job, JOB, "Cancel", "a{sv}", 0);
    }
    a_stream_begins_with_its_version_and_ends_with_usage_and_reason(state);
}

void unload_during_a_generation_keeps_the_daemon(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test");
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
    _cleanup_(close_fdp) int fd = -1;

    free(generate(bus, session, "Tell a very long story.", 60, true, &fd));
    stream_hear_some(fd, SECONDS, 4, &heard);
    sd_bus_message_unref(call_ok(bus, MODEL_PATH("test"), MODEL, "Unload", "a{sv}", 0));
    stream_hear(fd, SECONDS, &heard);
    assert_true(heard.ended);
    assert_string_equal(heard.reason, "length");
    assert_int_equal(heard.n_ids, 60);
    /* The session lives on, and the model comes back for it. */
    heard_clear(&heard);
    (void)close(fd);
    free(generate(bus, session, "And then?", 5, true, &fd));
    stream_hear(fd, SECONDS, &heard);
    assert_string_equal(heard.reason, "length");
}

void a_broken_reload_keeps_the_old_configuration(void **state)
{
    const Harness *harness = *state;
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(harness, getuid());
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *messages = NULL;
    _cleanup_(freep) char *text = NULL;
    uint32_t line, column;
    const char *file, *severity, *message;
    int ok = 1;

    harness_write_config(harness, "schedular: {max-queue: 8}\nlog: {level: loud}\n");
    call_fails(bus, ERROR("ConfigInvalid"), &text, BUS_ROOT, MANAGER, "Reload", "a{sv}", 0);
    assert_non_null(strstr(text, "leat.yaml:"));
    assert_return_code(sd_bus_get_property_trivial(bus, BUS_NAME, BUS_ROOT, MANAGER, "ConfigOk", NULL, 'b', &ok), 0);
    assert_false(ok);
    messages = call_ok(bus, BUS_ROOT, MANAGER, "CheckConfig", "a{sv}", 0);
    assert_return_code(sd_bus_message_enter_container(messages, 'a', "(suuss)"), 0);
    for (unsigned i = 0; i < 2; i++) {
        assert_true(sd_bus_message_read(messages, "(suuss)", &file, &line, &column, &severity, &message) > 0);
        assert_string_equal(file, harness->config);
        assert_true(line > 0 && column > 0);
        assert_string_equal(severity, "error");
    }
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "Hello", 1, "max-tokens", "u", 2));
    harness_write_config(harness, "");
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, MANAGER, "Reload", "a{sv}", 0));
    assert_return_code(sd_bus_get_property_trivial(bus, BUS_NAME, BUS_ROOT, MANAGER, "ConfigOk", NULL, 'b', &ok), 0);
    assert_true(ok);
}

void unknown_things_have_their_error(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *text = NULL;

    call_fails(bus, ERROR("NoSuchModel"), &text, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "tset", "Hello", 0);
    assert_non_null(strstr(text, "did you mean test"));
    call_fails(bus, ERROR("NoSuchModel"), NULL, BUS_ROOT, MANAGER, "OpenSession", "sa{sv}", "../../etc/shadow", 0);
    call_fails(bus, ERROR("NoSuchModel"), NULL, MODEL_PATH("other"), MODEL, "Load", "a{sv}", 0);
    call_fails(bus, ERROR("NoSuchSession"), NULL, BUS_ROOT "/session/999999", SESSION, "Close", "a{sv}", 0);
    call_fails(bus, ERROR("NoSuchJob"), NULL, BUS_ROOT "/job/999999", JOB, "Cancel", "a{sv}", 0);
    call_fails(bus, ERROR("NoSuchService"), NULL, SERVICE_PATH("other"), SERVICE, "Invoke", "a{ss}a{sv}", 0, 0);
    call_fails(bus, ERROR("NoSuchSession"), NULL, BUS_ROOT "/session/0x1", SESSION, "Close", "a{sv}", 0);
    call_fails(bus, ERROR("NoSuchJob"), NULL, BUS_ROOT "/job/99999999999999999999999", JOB, "Cancel", "a{sv}", 0);
}

/* Writes it all into a memfd. */
static int memfd_of(const void *bytes, size_t n)
{
    int fd = memfd_create("prompt", MFD_CLOEXEC);

    assert_return_code(fd, errno);
    assert_int_equal(write(fd, bytes, n), n);
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    return fd;
}

void a_prompt_by_descriptor_is_the_prompt(void **state)
{
    static const char bad_utf8[] = "abc\xff", nul[] = "ab\0c";
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *text = NULL;
    int fd, ends[2];

    fd = memfd_of("Hello", 5);
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "", 2, "max-tokens", "u", 3, "prompt-fd", "h", fd));
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "both", 1, "prompt-fd", "h", fd);
    (void)close(fd);
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], "Hello", 5), 5);
    (void)close(ends[1]);
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "", 3, "max-tokens", "u", 3, "prompt-fd", "h", ends[0], "raw", "b",
                                 true));
    (void)close(ends[0]);
    fd = memfd_of(bad_utf8, 4);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, &text, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "", 1, "prompt-fd", "h", fd);
    assert_non_null(strstr(text, "byte 3"));
    (void)close(fd);
    free(text);
    fd = memfd_of(nul, 4);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, &text, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "", 1, "prompt-fd", "h", fd);
    assert_non_null(strstr(text, "byte 2 is NUL"));
    (void)close(fd);
}

void a_service_is_invoked_with_its_inputs(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
    const Harness *harness = *state;
    const char *job;
    int fd;

    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, SERVICE_PATH("echo"), SERVICE, "Invoke", "a{ss}a{sv}", 0, 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, SERVICE_PATH("echo"), SERVICE, "Invoke", "a{ss}a{sv}", 2, "word", "x", "other", "y", 0);
    reply = call_ok(bus, SERVICE_PATH("echo"), SERVICE, "Invoke", "a{ss}a{sv}", 1, "word", "quagmire", 1, "ignore-eos", "b", true);
    assert_return_code(sd_bus_message_read(reply, "oh", &job, &fd), 0);
    stream_hear(fd, SECONDS, &heard);
    assert_string_equal(heard.reason, "length");
    assert_int_equal(heard.usage_output_tokens, 8);
    if (harness->fake)
        assert_memory_equal(heard.text, "Say quagmire.", 13);
}

void a_damaged_model_is_an_error_and_harms_nobody(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());

    call_fails(bus, ERROR("ModelCorrupt"), NULL, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "corrupt", "Hello", 0);
    ask_answers_with_text_and_usage(state);
}

/* ---- random calls ---------------------------------------------------------------------------------------------------------------- */

static uint64_t random_next(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

static uint64_t random_below(uint64_t *seed, uint64_t n)
{
    return random_next(seed) % n;
}

typedef struct RandomMethod {
    const char *path, *interface, *member, *types;
} RandomMethod;

static const RandomMethod random_methods[] = {
    {BUS_ROOT, MANAGER, "Ask", "ss"},
    {BUS_ROOT, MANAGER, "GetAvailability", "s"},
    {BUS_ROOT, MANAGER, "OpenSession", "s"},
    {BUS_ROOT, MANAGER, "Reload", ""},
    {BUS_ROOT, MANAGER, "CheckConfig", ""},
    {BUS_ROOT, MANAGER, "ListJobs", ""},
    {MODEL_PATH("test"), MODEL, "Estimate", ""},
    {MODEL_PATH("test"), MODEL, "CountTokens", "s"},
    {MODEL_PATH("test"), MODEL, "Tokenize", "s"},
    {MODEL_PATH("corrupt"), MODEL, "Load", ""},
    {MODEL_PATH("test"), MODEL, "Evaluate", "hh"},
    {MODEL_PATH("test"), "org.freedesktop.DBus.Properties", "GetAll", "I"},
    {BUS_ROOT "/device/0", DEVICE, "StartTrace", ""},
    {BUS_ROOT "/device/0", DEVICE, "StopTrace", ""},
    {BUS_ROOT "/device/0", "org.freedesktop.DBus.Properties", "GetAll", "I"},
    {SERVICE_PATH("echo"), SERVICE, "Invoke", "m"},
    {"session", SESSION, "Generate", "M"},
    {"session", SESSION, "CountTokens", "M"},
    {"session", SESSION, "Crop", "i"},
    {"session", SESSION, "SetRecording", "b"},
    {"session", SESSION, "Clone", ""},
    {"session", SESSION, "Cancel", ""},
    {"session", SESSION, "Close", ""},
    {"session", "org.freedesktop.DBus.Properties", "GetAll", "I"},
    {"job", JOB, "Cancel", ""},
    {"job", "org.freedesktop.DBus.Properties", "GetAll", "I"},
    {"/org/freedesktop/LogControl1", "org.freedesktop.DBus.Properties", "GetAll", "I"},
};

static const char *const random_texts[] = {"", "test", "small", "corrupt", "Hello", "ünïcödé \xf0\x9f\x8c\x8a", "<|im_end|>", "../../etc/passwd", "nobody"};
static const char *const random_keys[] = {"max-tokens", "temperature", "top-k", "top-p", "min-p", "repeat-penalty", "seed", "stop", "priority", "cache",
                                          "raw", "ids", "want-ids", "ignore-eos", "deadline-usec", "parse-special", "ids-format", "nonsense",
                                          "min-tokens", "no-repeat-ngram", "bad-words", "do-sample", "num-beams", "num-return-sequences",
                                          "early-stopping", "length-penalty", "prompts"};

static const char *random_text(uint64_t *seed)
{
    return random_texts[random_below(seed, N_ELEMENTS(random_texts))];
}

/* One variant of any type; now and then the right one. */
static int random_variant(sd_bus_message *m, uint64_t *seed, const char *key)
{
    if (random_below(seed, 3) == 0 && strcmp(key, "max-tokens") == 0)
        return sd_bus_message_append(m, "v", "u", (uint32_t)random_below(seed, 4) + 1);
    switch (random_below(seed, 9)) {
    case 0:
        return sd_bus_message_append(m, "v", "s", random_text(seed));
    case 1:
        return sd_bus_message_append(m, "v", "u", (uint32_t)random_below(seed, 5));
    case 2:
        return sd_bus_message_append(m, "v", "d", (double)(int64_t)random_next(seed) / 1e18);
    case 3:
        return sd_bus_message_append(m, "v", "b", (int)random_below(seed, 2));
    case 4:
        return sd_bus_message_append(m, "v", "t", random_next(seed));
    case 5:
        return sd_bus_message_append(m, "v", "as", 2, random_text(seed), random_text(seed));
    case 6:
        return sd_bus_message_append(m, "v", "ai", 3, (int)random_below(seed, 40000), (int)random_next(seed), 1);
    case 7:
        return sd_bus_message_append(m, "v", "a{sv}", 1, random_text(seed), "s", random_text(seed));
    default:
        return sd_bus_message_append(m, "v", "i", (int)random_next(seed));
    }
}

/* The options; a call that may generate always ends soon. */
static void random_options(sd_bus_message *m, uint64_t *seed, bool generates)
{
    size_t n = random_below(seed, 3);

    assert_return_code(sd_bus_message_open_container(m, 'a', "{sv}"), 0);
    if (generates)
        assert_return_code(sd_bus_message_append(m, "{sv}", "max-tokens", "u", (uint32_t)random_below(seed, 3) + 1), 0);
    for (size_t i = 0; i < n; i++) {
        const char *key = random_keys[random_below(seed, N_ELEMENTS(random_keys))];

        assert_return_code(sd_bus_message_open_container(m, 'e', "sv"), 0);
        assert_return_code(sd_bus_message_append(m, "s", key), 0);
        assert_return_code(random_variant(m, seed, key), 0);
        assert_return_code(sd_bus_message_close_container(m), 0);
    }
    assert_return_code(sd_bus_message_close_container(m), 0);
}

static void random_argument(sd_bus_message *m, uint64_t *seed, const RandomMethod *method, char type)
{
    int fd;

    switch (type) {
    case 's':
        assert_return_code(sd_bus_message_append(m, "s", random_text(seed)), 0);
        break;
    case 'i':
        assert_return_code(sd_bus_message_append(m, "i", (int)random_below(seed, 40) - 30), 0);
        break;
    case 'b':
        assert_return_code(sd_bus_message_append(m, "b", (int)random_below(seed, 2)), 0);
        break;
    case 'I':
        assert_return_code(sd_bus_message_append(m, "s", method->path[0] == '/' ? "" : method->interface), 0);
        break;
    case 'h':
        fd = memfd_of("1 2 3", random_below(seed, 6));
        assert_return_code(sd_bus_message_append(m, "h", fd), 0);
        (void)close(fd);
        break;
    case 'm':
        assert_return_code(sd_bus_message_append(m, "a{ss}", 1, "word", random_text(seed)), 0);
        break;
    case 'M':
        assert_return_code(sd_bus_message_append(m, "aa{sv}", 1, 2, "role", "s", random_below(seed, 4) ? "user" : "nobody", "content", "s",
                                                 random_text(seed)),
                           0);
        break;
    default:
        fail();
    }
}

typedef struct RandomState {
    uint64_t seed;
    char sessions[64][64];
    size_t n_sessions;
    uint64_t last_job;
    unsigned n_errors;
} RandomState;

/* One call, which must be answered; sessions that it opens are used by later ones. */
static void random_call(sd_bus *bus, RandomState *random)
{
    const RandomMethod *method = &random_methods[random_below(&random->seed, N_ELEMENTS(random_methods))];
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    bool generates = strcmp(method->member, "Ask") == 0 || strcmp(method->member, "Generate") == 0 || strcmp(method->member, "Invoke") == 0;
    char path[96];
    const char *result;

    (void)snprintf(path, sizeof(path), "%s", method->path);
    if (strcmp(method->path, "session") == 0)
        (void)snprintf(path, sizeof(path), "%s", random->n_sessions ? random->sessions[random_below(&random->seed, random->n_sessions)] : BUS_ROOT "/session/7");
    if (strcmp(method->path, "job") == 0)
        (void)snprintf(path, sizeof(path), BUS_ROOT "/job/%" PRIu64, random->last_job + random_below(&random->seed, 2));
    assert_return_code(sd_bus_message_new_method_call(bus, &call, BUS_NAME, path, method->interface, method->member), 0);
    for (const char *type = method->types; *type; type++)
        random_argument(call, &random->seed, method, *type);
    if (!strchr(method->types, 'I'))
        random_options(call, &random->seed, generates);
    if (sd_bus_call(bus, call, 0, &error, &reply) < 0) {
        random->n_errors++;
        if (!error.name || strcmp(error.name, SD_BUS_ERROR_NO_REPLY) == 0 || strcmp(error.name, SD_BUS_ERROR_TIMEOUT) == 0 ||
            strcmp(error.name, SD_BUS_ERROR_SERVICE_UNKNOWN) == 0)
            fail_msg("%s: %s: %s", method->member, error.name ? error.name : "?", error.message ? error.message : "?");
        return;
    }
    if (sd_bus_message_has_signature(reply, "o") || sd_bus_message_has_signature(reply, "oh")) {
        assert_return_code(sd_bus_message_read(reply, "o", &result), 0);
        if (strstr(result, "/session/"))
            (void)snprintf(random->sessions[random->n_sessions++ % N_ELEMENTS(random->sessions)], 64, "%s", result);
        else
            random->last_job = strtoull(strrchr(result, '/') + 1, NULL, 10);
        random->n_sessions = MIN(random->n_sessions, N_ELEMENTS(random->sessions));
    }
}

void a_thousand_random_calls_leave_the_daemon_alive(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    const char *given = getenv("LEAT_TEST_SEED");
    RandomState random = {.seed = given ? strtoull(given, NULL, 10) : now_usec() | 1};

    print_message("seed %" PRIu64 "\n", random.seed);
    for (int i = 0; i < 1000; i++)
        random_call(bus, &random);
    print_message("%u of 1000 calls were refused\n", random.n_errors);
    sd_bus_flush_close_unref(bus);
    bus = harness_connect(*state, getuid());
    wait_until_idle(bus);
    ask_answers_with_text_and_usage(state);
}
