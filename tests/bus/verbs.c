/* SPDX-License-Identifier: Apache-2.0 */
/* What bus tests say and hear. */

#include "tests/bus/harness.h"

#include <jansson.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <cmocka.h>

static uint64_t now_usec(void)
{
    struct timespec time = {0};

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

/* ---- calls ----------------------------------------------------------------------------------------------------------------------- */

sd_bus_message *call_ok(sd_bus *bus, const char *path, const char *interface, const char *member, const char *types, ...)
{
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    sd_bus_message *reply = NULL;
    va_list arguments;
    int r;

    va_start(arguments, types);
    r = sd_bus_call_methodv(bus, BUS_NAME, path, interface, member, &error, &reply, types, arguments);
    va_end(arguments);
    if (r < 0)
        fail_msg("%s.%s of %s: %s: %s", interface, member, path, error.name, error.message);
    return reply;
}

void call_fails(sd_bus *bus, const char *expected, char **ret_text, const char *path, const char *interface, const char *member, const char *types,
                ...)
{
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
    va_list arguments;
    int r;

    va_start(arguments, types);
    r = sd_bus_call_methodv(bus, BUS_NAME, path, interface, member, &error, &reply, types, arguments);
    va_end(arguments);
    if (r >= 0)
        fail_msg("%s.%s of %s: succeeded, expected %s", interface, member, path, expected);
    assert_non_null(error.name);
    if (strcmp(error.name, expected) != 0)
        fail_msg("%s.%s of %s: %s (%s), expected %s", interface, member, path, error.name, error.message, expected);
    if (ret_text)
        *ret_text = strdup(error.message);
}

uint32_t get_u32(sd_bus *bus, const char *path, const char *interface, const char *property)
{
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    uint32_t value = 0;

    if (sd_bus_get_property_trivial(bus, BUS_NAME, path, interface, property, &error, 'u', &value) < 0)
        fail_msg("%s.%s of %s: %s", interface, property, path, error.message);
    return value;
}

char *get_text(sd_bus *bus, const char *path, const char *interface, const char *property)
{
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    char *value = NULL;

    if (sd_bus_get_property_string(bus, BUS_NAME, path, interface, property, &error, &value) < 0)
        fail_msg("%s.%s of %s: %s", interface, property, path, error.message);
    return value;
}

uint64_t get_launches(sd_bus *bus)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
    uint64_t value;
    const char *key;

    assert_return_code(sd_bus_get_property(bus, BUS_NAME, BUS_ROOT "/device/0", DEVICE, "Counters", NULL, &reply, "a{st}"), 0);
    assert_return_code(sd_bus_message_enter_container(reply, 'a', "{st}"), 0);
    while (sd_bus_message_read(reply, "{st}", &key, &value) > 0)
        if (strcmp(key, "launches") == 0)
            return value;
    fail_msg("the device does not count launches");
    return 0;
}

void wait_until_idle(sd_bus *bus)
{
    uint64_t until = now_usec() + 30 * UINT64_C(1000000);

    while (get_u32(bus, BUS_ROOT, MANAGER, "NJobs") > 0) {
        if (now_usec() > until)
            fail_msg("jobs are left after 30 s");
        (void)usleep(2000);
    }
}

char *open_session(sd_bus *bus, const char *model)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = call_ok(bus, BUS_ROOT, MANAGER, "OpenSession", "sa{sv}", model, 0);
    const char *path;

    assert_return_code(sd_bus_message_read(reply, "o", &path), 0);
    return strdup(path);
}

char *generate(sd_bus *bus, const char *session, const char *prompt, uint32_t max_tokens, bool want_ids, int *ret_fd)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply =
        call_ok(bus, session, SESSION, "Generate", "aa{sv}a{sv}", 1, 2, "role", "s", "user", "content", "s", prompt, 4, "max-tokens", "u",
                max_tokens, "ignore-eos", "b", true, "want-ids", "b", want_ids, "temperature", "d", 0.0);
    const char *path;
    int fd;

    assert_return_code(sd_bus_message_read(reply, "oh", &path, &fd), 0);
    *ret_fd = dup(fd);
    assert_return_code(*ret_fd, errno);
    return strdup(path);
}

/* ---- streams --------------------------------------------------------------------------------------------------------------------- */

void heard_clear(Heard *heard)
{
    free(heard->text);
    memset(heard, 0, sizeof(*heard));
}

static void heard_add_text(Heard *heard, const char *text, size_t n)
{
    heard->text = realloc(heard->text, heard->n_text_bytes + n + 1);
    assert_non_null(heard->text);
    memcpy(heard->text + heard->n_text_bytes, text, n);
    heard->n_text_bytes += n;
    heard->text[heard->n_text_bytes] = 0;
}

static void heard_copy(char *to, size_t size, const json_t *object, const char *key)
{
    const char *value = json_string_value(json_object_get(object, key));

    (void)snprintf(to, size, "%s", value ? value : "");
}

static void heard_add_ids(Heard *heard, const json_t *ids)
{
    for (size_t i = 0; i < json_array_size(ids); i++, heard->n_ids++)
        if (heard->n_ids < N_ELEMENTS(heard->ids))
            heard->ids[heard->n_ids] = (int32_t)json_integer_value(json_array_get(ids, i));
}

static void heard_frame(Heard *heard, const char *frame, size_t n)
{
    size_t n_kinds = strlen(heard->kinds);
    json_t *object;

    heard->n_frames++;
    if (n_kinds + 1 < sizeof(heard->kinds) && (n_kinds == 0 || heard->kinds[n_kinds - 1] != frame[0]))
        heard->kinds[n_kinds] = frame[0];
    if (heard->ended)
        fail_msg("a frame of kind %c after the last one", frame[0]);
    if (frame[0] == 'T') {
        assert_true(n <= 1 + 16 * 1024);
        heard_add_text(heard, frame + 1, n - 1);
        return;
    }
    object = json_loadb(frame + 1, n - 1, 0, NULL);
    if (!object)
        fail_msg("frame %c is not JSON: %.*s", frame[0], (int)n - 1, frame + 1);
    if (frame[0] == 'E')
        heard_add_ids(heard, json_object_get(object, "ids"));
    if (frame[0] == 'U') {
        heard->usage_output_tokens = (uint32_t)json_integer_value(json_object_get(object, "output-tokens"));
        heard->usage_prompt_tokens = (uint32_t)json_integer_value(json_object_get(object, "prompt-tokens"));
    }
    if (frame[0] == 'D')
        heard_copy(heard->reason, sizeof(heard->reason), object, "reason");
    if (frame[0] == 'X') {
        heard_copy(heard->error, sizeof(heard->error), object, "name");
        heard_copy(heard->error_text, sizeof(heard->error_text), object, "text");
    }
    heard->ended = strchr("DX", frame[0]) != NULL;
    json_decref(object);
}

void stream_hear_some(int fd, unsigned seconds, uint32_t n, Heard *heard)
{
    uint64_t until = now_usec() + seconds * UINT64_C(1000000);
    char frame[256 * 1024];

    while (heard->n_ids < n && heard->n_frames < (n == UINT32_MAX ? SIZE_MAX : (size_t)n * 4)) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        uint64_t now = now_usec();
        ssize_t size;

        if (now > until || poll(&ready, 1, (int)((until - now) / 1000) + 1) <= 0)
            fail_msg("the stream was silent too long (heard %s)", heard->kinds);
        size = recv(fd, frame, sizeof(frame), MSG_DONTWAIT);
        if (size <= 0)
            return;
        heard_frame(heard, frame, (size_t)size);
    }
}

void stream_hear(int fd, unsigned seconds, Heard *heard)
{
    stream_hear_some(fd, seconds, UINT32_MAX, heard);
}

/* ---- signals --------------------------------------------------------------------------------------------------------------------- */

static int on_finished(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    Finished *finished = userdata;
    const char *result;

    (void)error;
    assert_return_code(sd_bus_message_read(m, "s", &result), 0);
    (void)snprintf(finished->job, sizeof(finished->job), "%s", sd_bus_message_get_path(m));
    (void)snprintf(finished->result, sizeof(finished->result), "%s", result);
    finished->n++;
    return 0;
}

void finished_watch(sd_bus *bus, Finished *ret)
{
    *ret = (Finished){.n = 0};
    assert_return_code(sd_bus_match_signal(bus, NULL, BUS_NAME, NULL, JOB, "Finished", on_finished, ret), 0);
}

void finished_wait(sd_bus *bus, Finished *finished, const char *job, unsigned seconds)
{
    uint64_t until = now_usec() + seconds * UINT64_C(1000000);

    while (strcmp(finished->job, job) != 0) {
        int r = sd_bus_process(bus, NULL);

        assert_return_code(r, -r);
        if (now_usec() > until)
            fail_msg("no Finished of %s (the last was of %s)", job, finished->job);
        if (r == 0)
            (void)sd_bus_wait(bus, 100000);
    }
}
