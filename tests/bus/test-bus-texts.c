/* SPDX-License-Identifier: Apache-2.0 */
/* Texts that D-Bus lets pass and sd-bus does not: an answer that holds one still arrives, a call that holds one is refused by argument. */

#include "tests/bus/harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

/* U+FDD0 and U+1FFFF between letters, and what becomes of them. */
#define NONCHARACTERS "ok\xef\xb7\x90\xf0\x9f\xbf\xbf."
#define REPLACED      "ok\xef\xbf\xbd\xef\xbf\xbd."

static int memfd_of(const char *text)
{
    int fd = memfd_create("prompt", MFD_CLOEXEC);

    assert_return_code(fd, errno);
    assert_int_equal(pwrite(fd, text, strlen(text), 0), strlen(text));
    return fd;
}

/* The fake engine says again what it is asked. */
static sd_bus_message *ask_by_descriptor(sd_bus *bus, const char *prompt)
{
    int fd = memfd_of(prompt);
    sd_bus_message *reply = call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "", 3, "max-tokens", "u", 6, "raw", "b", true, "prompt-fd", "h", fd);

    (void)close(fd);
    return reply;
}

static void an_answer_with_noncharacters_arrives(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = ask_by_descriptor(bus, NONCHARACTERS);
    const char *text;

    assert_return_code(sd_bus_message_read(reply, "s", &text), 0);
    assert_int_equal(strncmp(text, REPLACED REPLACED, 2 * strlen(REPLACED)), 0);
}

/* A method call whose second argument is @text; sd-bus would not append it as a string. */
static sd_bus_message *call_with(sd_bus *bus, const char *text)
{
    sd_bus_message *call = NULL;
    char *space;

    assert_return_code(sd_bus_message_new_method_call(bus, &call, BUS_NAME, BUS_ROOT, MANAGER, "Ask"), 0);
    assert_return_code(sd_bus_message_append(call, "s", "test"), 0);
    assert_return_code(sd_bus_message_append_string_space(call, strlen(text), &space), 0);
    memcpy(space, text, strlen(text) + 1);
    assert_return_code(sd_bus_message_append(call, "a{sv}", 1, "max-tokens", "u", 3), 0);
    return call;
}

static void a_call_with_noncharacters_is_refused_by_argument(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = call_with(bus, NONCHARACTERS), *good = call_with(bus, "ok"), *reply = NULL;
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;

    assert_true(sd_bus_call(bus, call, 0, &error, &reply) < 0);
    assert_string_equal(error.name, SD_BUS_ERROR_INVALID_ARGS);
    assert_non_null(strstr(error.message, "argument 2"));
    assert_non_null(strstr(error.message, "prompt-fd"));
    sd_bus_error_free(&error);
    assert_return_code(sd_bus_call(bus, good, 0, &error, &reply), 0); /* on the same connection */
}

static void a_description_with_noncharacters_is_a_property(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *description = NULL;
    char path[128];
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/services.d/odd.yaml", ((Harness *)*state)->folder);
    assert_non_null(file = fopen(path, "we"));
    (void)fputs("name: odd\ndescription: \"a\\uFDD0b\"\nmodel: test\nprompt: \"Say {{word}}.\"\ninputs: {word: {default: \"\\uFFFE\"}}\n", file);
    assert_int_equal(fclose(file), 0);
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, MANAGER, "Reload", "a{sv}", 0));
    description = get_text(bus, SERVICE_PATH("odd"), SERVICE, "Description");
    assert_string_equal(description, "a\xef\xbf\xbd" "b");
    sd_bus_message_unref(call_ok(bus, SERVICE_PATH("odd"), "org.freedesktop.DBus.Properties", "GetAll", "s", SERVICE));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_with_noncharacters_arrives),
        cmocka_unit_test(a_call_with_noncharacters_is_refused_by_argument),
        cmocka_unit_test(a_description_with_noncharacters_is_a_property),
    };

    return cmocka_run_group_tests_name("bus-texts", tests, harness_setup_fake, harness_teardown);
}
