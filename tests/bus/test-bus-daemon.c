/* SPDX-License-Identifier: Apache-2.0 */
/* The real daemon with a real model on a private bus.  LEAT_TEST_MODEL names the GGUF file. */

#include "tests/bus/cases.h"
#include "tests/bus/harness.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

/* Asks both what comes next: the one that went on and the one that was restored. */
static void assert_say_the_same(sd_bus *a, const char *session_a, sd_bus *b, const char *session_b)
{
    Heard heard[2] = {0};
    int fds[2];

    free(generate(a, session_a, "And then?", 12, true, &fds[0]));
    free(generate(b, session_b, "And then?", 12, true, &fds[1]));
    for (int i = 0; i < 2; i++) {
        stream_hear(fds[i], 300, &heard[i]);
        assert_string_equal(heard[i].reason, "length");
        (void)close(fds[i]);
    }
    assert_string_equal(heard[0].text, heard[1].text);
    for (int i = 0; i < 2; i++)
        heard_clear(&heard[i]);
}

static void save(sd_bus *bus, const char *session, int file)
{
    sd_bus_message *reply = call_ok(bus, session, SESSION, "Save", "ha{sv}", file, 0);
    uint64_t bytes;

    assert_return_code(sd_bus_message_read(reply, "t", &bytes), 0);
    assert_int_equal(lseek(file, 0, SEEK_END), bytes);
    sd_bus_message_unref(reply);
}

/* Tokens that are there again. */
static uint32_t restore(sd_bus *bus, const char *session, int file)
{
    sd_bus_message *reply = call_ok(bus, session, SESSION, "Restore", "ha{sv}", file, 0);
    uint32_t length;

    assert_return_code(sd_bus_message_read(reply, "u", &length), 0);
    assert_int_equal(get_u32(bus, session, SESSION, "ContextUsed"), length);
    sd_bus_message_unref(reply);
    return length;
}

static void a_saved_session_goes_on_in_another_connection(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *first = harness_connect(*state, getuid());
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *second = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(first, "test"), *other = open_session(second, "test");
    int stream, file = memfd_create("session", MFD_CLOEXEC);
    Heard heard = {0};

    free(generate(first, session, "Tell me of a mill.", 16, false, &stream));
    stream_hear(stream, 300, &heard);
    heard_clear(&heard);
    (void)close(stream);
    wait_until_idle(first);
    save(first, session, file);
    assert_int_not_equal(restore(second, other, file), 0);
    assert_say_the_same(first, session, second, other);
    (void)close(file);
}

static void an_empty_session_is_saved_and_makes_another_empty(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test"), *other = open_session(bus, "test");
    int stream, file = memfd_create("session", MFD_CLOEXEC);
    Heard heard = {0};

    save(bus, session, file);
    free(generate(bus, other, "Tell me of a mill.", 8, true, &stream));
    stream_hear(stream, 300, &heard);
    heard_clear(&heard);
    (void)close(stream);
    wait_until_idle(bus);
    assert_int_not_equal(get_u32(bus, other, SESSION, "ContextUsed"), 0);
    assert_int_equal(restore(bus, other, file), 0);
    assert_say_the_same(bus, session, bus, other);
    (void)close(file);
}

static void files_that_are_none_or_damaged_are_refused(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test"), *text = NULL;
    int ends[2], file = memfd_create("session", MFD_CLOEXEC), null = open("/dev/null", O_RDWR | O_CLOEXEC);

    assert_int_equal(pipe(ends), 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Save", "ha{sv}", ends[1], 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Restore", "ha{sv}", ends[0], 0);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Save", "ha{sv}", null, 0);
    assert_int_equal(write(file, "<html>not found</html>", 22), 22);
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, &text, session, SESSION, "Restore", "ha{sv}", file, 0);
    assert_non_null(strstr(text, "shorter than a header"));
    (void)close(ends[0]);
    (void)close(ends[1]);
    (void)close(null);
    (void)close(file);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_saved_session_goes_on_in_another_connection),
                                       cmocka_unit_test(an_empty_session_is_saved_and_makes_another_empty),
                                       cmocka_unit_test(files_that_are_none_or_damaged_are_refused), SHARED_CASES};

    if (case_client(argc, argv) >= 0)
        return 0;
    return cmocka_run_group_tests_name("bus-daemon", tests, harness_setup_real, harness_teardown);
}
