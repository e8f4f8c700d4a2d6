/* SPDX-License-Identifier: Apache-2.0 */
/* The policy file of packaging/dbus on a system bus where nothing else is allowed, with users who are not the daemon's. */

#include "tests/bus/harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#define NOBODY 65534

static void everybody_may_use_it(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, NOBODY);
    _cleanup_(freep) char *session = open_session(bus, "test"), *job = NULL;
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
    _cleanup_(close_fdp) int fd = -1;
    Finished finished;

    finished_watch(bus, &finished);
    job = generate(bus, session, "Hello", 5, true, &fd);
    stream_hear(fd, 30, &heard);
    assert_string_equal(heard.reason, "length");
    finished_wait(bus, &finished, job, 30);
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "Hello", 1, "max-tokens", "u", 2));
    sd_bus_message_unref(call_ok(bus, BUS_ROOT "/model", "org.freedesktop.DBus.ObjectManager", "GetManagedObjects", ""));
    sd_bus_message_unref(call_ok(bus, session, "org.freedesktop.DBus.Properties", "GetAll", "s", SESSION));
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, "org.freedesktop.DBus.Introspectable", "Introspect", ""));
}

static void nobody_else_may_own_the_name(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, NOBODY);

    assert_int_equal(sd_bus_request_name(bus, BUS_NAME, 0), -EACCES);
    assert_int_equal(sd_bus_request_name(bus, BUS_NAME ".Other", 0), -EACCES);
}

static void nothing_else_is_opened(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, NOBODY), *other = harness_connect(*state, getuid());
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    const char *name;

    assert_return_code(sd_bus_get_unique_name(other, &name), 0);
    assert_true(sd_bus_call_method(bus, name, "/", "org.freedesktop.DBus.Peer", "Ping", &error, NULL, "") < 0);
    assert_string_equal(error.name, SD_BUS_ERROR_ACCESS_DENIED);
}

static void what_changes_the_daemon_is_for_its_user_and_root(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, NOBODY), *root = harness_connect(*state, 0);

    call_fails(bus, SD_BUS_ERROR_ACCESS_DENIED, NULL, BUS_ROOT, MANAGER, "Reload", "a{sv}", 0);
    call_fails(bus, SD_BUS_ERROR_ACCESS_DENIED, NULL, MODEL_PATH("test"), MODEL, "Unload", "a{sv}", 0);
    sd_bus_message_unref(call_ok(root, BUS_ROOT, MANAGER, "Reload", "a{sv}", 0));
    sd_bus_message_unref(call_ok(root, MODEL_PATH("test"), MODEL, "Unload", "a{sv}", 0));
}

/* I17: no wildcard. */
static void every_rule_names_our_name(void **state)
{
    _cleanup_(freep) char *path = harness_source_file("packaging/dbus/org.leat.Inference1.conf");
    _cleanup_(close_filep) FILE *file = fopen(path, "r");
    unsigned n_rules = 0;
    char line[512];

    (void)state;
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        if (!strstr(line, "<allow"))
            continue;
        n_rules++;
        assert_true(strstr(line, "own=\"" BUS_NAME "\"") || strstr(line, "send_destination=\"" BUS_NAME "\""));
        assert_null(strchr(line, '*'));
    }
    assert_true(n_rules > 5);
}

static void needs_root(void **state)
{
    (void)state;
    print_message("skipped: a system bus with two users needs root\n");
    skip();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_rule_names_our_name),
        cmocka_unit_test(everybody_may_use_it),
        cmocka_unit_test(nobody_else_may_own_the_name),
        cmocka_unit_test(nothing_else_is_opened),
        cmocka_unit_test(what_changes_the_daemon_is_for_its_user_and_root),
    };
    const struct CMUnitTest without_root[] = {cmocka_unit_test(every_rule_names_our_name), cmocka_unit_test(needs_root)};

    if (geteuid() != 0)
        return cmocka_run_group_tests_name("bus-policy", without_root, NULL, NULL);
    return cmocka_run_group_tests_name("bus-policy", tests, harness_setup_system, harness_teardown);
}
