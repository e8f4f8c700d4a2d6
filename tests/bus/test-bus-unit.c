/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of the bus side by themselves: streams, texts, ids, errors, tables. */

#include "daemon/bus/bus-error.h"
#include "daemon/bus/bus-private.h"
#include "daemon/bus/bus-text.h"
#include "daemon/text/utf8.h"
#include "daemon/bus/id-table.h"
#include "daemon/bus/ids.h"
#include "daemon/bus/stream.h"
#include "daemon/bus/usage.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <cmocka.h>

/* ---- streams --------------------------------------------------------------------------------------------------------------------- */

typedef struct Fixture {
    sd_event *event;
    Stream *stream;
    int reader;
    unsigned n_pauses, n_resumes, n_slow, n_closed, n_done;
} Fixture;

static void on_pause(void *userdata, bool paused)
{
    Fixture *fixture = userdata;

    if (paused)
        fixture->n_pauses++;
    else
        fixture->n_resumes++;
}

static void on_end(void *userdata, StreamEnd end)
{
    Fixture *fixture = userdata;

    switch (end) {
    case STREAM_END_CLOSED:
        fixture->n_closed++;
        break;
    case STREAM_END_SLOW:
        fixture->n_slow++;
        break;
    case STREAM_END_DONE:
        fixture->n_done++;
        break;
    }
}

static const StreamOwner owner = {.pause = on_pause, .end = on_end};

static int stream_setup(void **state)
{
    Fixture *fixture = calloc(1, sizeof(*fixture));

    assert_non_null(fixture);
    assert_return_code(sd_event_new(&fixture->event), 0);
    assert_return_code(stream_new(fixture->event, 50000, &owner, fixture, &fixture->stream, &fixture->reader), 0);
    *state = fixture;
    return 0;
}

static int stream_teardown(void **state)
{
    Fixture *fixture = *state;

    stream_free(fixture->stream);
    close_fdp(&fixture->reader);
    sd_event_unref(fixture->event);
    free(fixture);
    return 0;
}

static void run_for(Fixture *fixture, unsigned msec)
{
    uint64_t now, until;

    assert_return_code(sd_event_now(fixture->event, CLOCK_MONOTONIC, &now), 0);
    until = now + msec * UINT64_C(1000);
    do {
        assert_return_code(sd_event_run(fixture->event, 5000), 0);
        assert_return_code(sd_event_now(fixture->event, CLOCK_MONOTONIC, &now), 0);
    } while (now < until);
}

/* Reads what is there; the number of frames. */
static unsigned drain(const Fixture *fixture, char *last_kind, size_t *n_text)
{
    char frame[STREAM_MAX_TEXT_BYTES + 1];
    unsigned n_frames = 0;
    ssize_t n;

    while ((n = recv(fixture->reader, frame, sizeof(frame), MSG_DONTWAIT)) > 0) {
        n_frames++;
        *last_kind = frame[0];
        if (frame[0] == 'T')
            *n_text += (size_t)n - 1;
    }
    return n_frames;
}

static unsigned fill(Fixture *fixture)
{
    char text[1000];
    unsigned n = 0;

    memset(text, 'x', sizeof(text));
    while (fixture->n_pauses == 0) {
        assert_return_code(stream_text(fixture->stream, text, sizeof(text)), 0);
        n++;
    }
    return n;
}

static void a_full_socket_pauses_and_a_read_one_resumes(void **state)
{
    Fixture *fixture = *state;
    unsigned n = fill(fixture);
    size_t n_text = 0;
    char last;

    assert_true(stream_is_blocked(fixture->stream));
    (void)drain(fixture, &last, &n_text);
    run_for(fixture, 10);
    assert_false(stream_is_blocked(fixture->stream));
    (void)drain(fixture, &last, &n_text);
    assert_int_equal(n_text, n * 1000);
    assert_int_equal(fixture->n_pauses, 1);
    assert_int_equal(fixture->n_resumes, 1);
    assert_int_equal(fixture->n_slow, 0);
}

static void a_reader_that_never_reads_is_slow_after_the_timeout(void **state)
{
    Fixture *fixture = *state;
    size_t n_text = 0;
    char last = 0;

    (void)fill(fixture);
    run_for(fixture, 100);
    assert_int_equal(fixture->n_slow, 1);
    /* The owner ends the job: the last words reach a reader that comes back after all. */
    assert_return_code(stream_text(fixture->stream, "lost", 4), 0);
    assert_return_code(stream_json(fixture->stream, 'X', json_pack("{s:s}", "name", "slow")), 0);
    stream_finish(fixture->stream);
    assert_int_equal(fixture->n_done, 0);
    (void)drain(fixture, &last, &n_text);
    run_for(fixture, 10);
    (void)drain(fixture, &last, &n_text);
    assert_int_equal(last, 'X');
    assert_int_equal(fixture->n_done, 1);
    assert_int_equal(fixture->n_resumes, 0);
}

static void a_finished_stream_is_given_up_when_nobody_reads(void **state)
{
    Fixture *fixture = *state;

    (void)fill(fixture);
    stream_finish(fixture->stream);
    assert_int_equal(fixture->n_done, 0);
    run_for(fixture, 100);
    assert_int_equal(fixture->n_done, 1);
    assert_int_equal(fixture->n_slow, 0);
}

static void a_reader_that_trickles_is_not_slow(void **state)
{
    Fixture *fixture = *state;
    char frame[STREAM_MAX_TEXT_BYTES + 1];

    (void)fill(fixture);
    for (int i = 0; i < 10; i++) { /* 10 x 30 ms, the timeout being 50 */
        run_for(fixture, 30);
        for (int k = 0; k < 2; k++)
            assert_true(recv(fixture->reader, frame, sizeof(frame), MSG_DONTWAIT) > 0);
        if (!stream_is_blocked(fixture->stream)) {
            fixture->n_pauses = 0;
            (void)fill(fixture);
        }
    }
    assert_int_equal(fixture->n_slow, 0);
}

static void a_closed_descriptor_is_noticed(void **state)
{
    Fixture *fixture = *state;

    run_for(fixture, 5);
    assert_int_equal(fixture->n_closed, 0);
    close_fdp(&fixture->reader);
    fixture->reader = -1;
    (void)stream_text(fixture->stream, "x", 1); /* must not raise SIGPIPE */
    run_for(fixture, 5);
    assert_int_equal(fixture->n_closed, 1);
}

static void a_queue_has_an_end(void **state)
{
    Fixture *fixture = *state;
    char text[16000];

    memset(text, 'x', sizeof(text));
    for (int i = 0; i < 1000 && fixture->n_slow == 0; i++)
        assert_return_code(stream_text(fixture->stream, text, sizeof(text)), 0);
    assert_int_equal(fixture->n_slow, 1);
}

static void long_text_is_cut_between_characters(void **state)
{
    Fixture *fixture = *state;
    char text[30000], frame[STREAM_MAX_TEXT_BYTES + 1];
    size_t total = 0;
    ssize_t n;

    for (size_t i = 0; i < sizeof(text); i += 3)
        memcpy(text + i, "\xe2\x82\xac", 3);
    assert_return_code(stream_text(fixture->stream, text, sizeof(text)), 0);
    while ((n = recv(fixture->reader, frame, sizeof(frame), MSG_DONTWAIT)) > 0) {
        assert_int_equal(frame[0], 'T');
        assert_true(bus_text_is_valid(frame + 1, (size_t)n - 1, NULL));
        total += (size_t)n - 1;
    }
    assert_int_equal(total, sizeof(text));
}

static void what_a_reader_writes_is_refused(void **state)
{
    const Fixture *fixture = *state;

    assert_true(send(fixture->reader, "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0);
    assert_int_equal(errno, EPIPE);
}

/* ---- texts ----------------------------------------------------------------------------------------------------------------------- */

static void bytes_that_may_not_travel_are_found_and_replaced(void **state)
{
    static const struct {
        const char *bytes;
        size_t n, offset;
    } bad[] = {
        {"\xff", 1, 0}, {"ab\x80", 3, 2}, {"a\xc3", 2, 1}, {"\xed\xa0\x80", 3, 0}, {"x\xc0\x80", 3, 1}, {"\xf4\x90\x80\x80", 4, 0}, {"ab\0c", 4, 2},
    };
    _cleanup_(freep) char *copy = NULL;
    char text[] = "ok \xff\xfe \xe2\x82\xac \xc3";
    size_t offset;

    (void)state;
    assert_true(bus_text_is_valid("", 0, NULL));
    assert_true(bus_text_is_valid("\xe2\x82\xac\xf0\x9f\x8c\x8a", 7, NULL));
    for (size_t i = 0; i < N_ELEMENTS(bad); i++) {
        assert_false(bus_text_is_valid(bad[i].bytes, bad[i].n, &offset));
        assert_int_equal(offset, bad[i].offset);
    }
    bus_text_scrub(text);
    assert_string_equal(text, "ok ?? \xe2\x82\xac ?");
    copy = utf8_clean_copy("a\0b\xef\xb7\x90\xf0\x9f\xbf\xbe\xef\xbf\xbf\xef\xbf\xbd\xf0\x9f", 18);
    assert_string_equal(copy, "a?b\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd??");
}

/* ---- errors ---------------------------------------------------------------------------------------------------------------------- */

static void every_result_has_one_name_and_an_errno(void **state)
{
    (void)state;
    for (int i = ENGINE_RESULT_DONE + 1; i < ENGINE_RESULT_X_MAX; i++) {
        __attribute__((__cleanup__(sd_bus_error_free))) sd_bus_error error = SD_BUS_ERROR_NULL;
        const char *name = bus_error_name((EngineResult)i);

        assert_true(strncmp(name, BUS_ERROR_PREFIX, strlen(BUS_ERROR_PREFIX)) == 0 || strncmp(name, "org.freedesktop.DBus.Error.", 27) == 0);
        assert_true(bus_error_errno((EngineResult)i) < 0);
        assert_true(bus_error_set(&error, (EngineResult)i, NULL) < 0);
        assert_string_equal(error.name, name);
        assert_true(strlen(error.message) > 3);
        for (int k = ENGINE_RESULT_DONE + 1; k < i; k++)
            assert_string_not_equal(name, bus_error_name((EngineResult)k));
    }
    assert_int_equal(bus_error_result(-ENOMEM), ENGINE_RESULT_OUT_OF_MEMORY);
    assert_int_equal(bus_error_result(-EXDEV), ENGINE_RESULT_FAILED);
    assert_int_equal(bus_error_result(ENGINE_RESULT_QUEUE_FULL), ENGINE_RESULT_QUEUE_FULL);
    assert_int_equal(bus_error_result(ENGINE_RESULT_X_MAX), ENGINE_RESULT_FAILED);
}

static void an_error_text_with_a_bad_byte_is_cleaned(void **state)
{
    __attribute__((__cleanup__(sd_bus_error_free))) sd_bus_error error = SD_BUS_ERROR_NULL;
    ErrorDetail detail = {.text = "tensor \xff is odd"};

    (void)state;
    (void)bus_error_set(&error, ENGINE_RESULT_MODEL_CORRUPT, &detail);
    assert_string_equal(error.message, "tensor ? is odd");
}

/* ---- ids ------------------------------------------------------------------------------------------------------------------------- */

static void ids_are_read_as_text_and_as_int32(void **state)
{
    static const char binary[] = {1, 0, 0, 0, 0, 1, 0, 0}, negative[] = {0, 0, 0, (char)0x80};
    ErrorDetail detail;
    int32_t *ids;
    size_t n;

    (void)state;
    assert_return_code(ids_parse("1, 22\n333\t4,", 12, CALL_IDS_AUTO, &ids, &n, &detail), 0);
    assert_int_equal(n, 4);
    assert_int_equal(ids[2], 333);
    free(ids);
    assert_return_code(ids_parse(binary, sizeof(binary), CALL_IDS_AUTO, &ids, &n, &detail), 0);
    assert_int_equal(n, 2);
    assert_int_equal(ids[1], 256);
    free(ids);
    assert_int_equal(ids_parse(binary, 7, CALL_IDS_INT32, &ids, &n, &detail), -EINVAL);
    assert_int_equal(ids_parse(negative, 4, CALL_IDS_INT32, &ids, &n, &detail), -EINVAL);
    assert_int_equal(ids_parse("12x", 3, CALL_IDS_TEXT, &ids, &n, &detail), -EINVAL);
    assert_int_equal(ids_parse("-1", 2, CALL_IDS_TEXT, &ids, &n, &detail), -EINVAL);
    assert_int_equal(ids_parse("2147483648", 10, CALL_IDS_TEXT, &ids, &n, &detail), -EINVAL);
    assert_return_code(ids_parse("2147483647", 10, CALL_IDS_TEXT, &ids, &n, &detail), 0);
    assert_int_equal(ids[0], INT32_MAX);
    free(ids);
    assert_int_equal(ids_parse("", 0, CALL_IDS_AUTO, &ids, &n, &detail), -EINVAL);
    assert_int_equal(ids_parse(" \n", 2, CALL_IDS_AUTO, &ids, &n, &detail), -EINVAL);
}

/* ---- tables ---------------------------------------------------------------------------------------------------------------------- */

static void a_table_keeps_its_objects_by_id(void **state)
{
    IdTable table = ID_TABLE_NULL;
    int objects[64];

    (void)state;
    assert_null(id_table_find(&table, 1));
    for (uint64_t i = 0; i < 64; i++) /* 37 and 64 have no common divisor: every id once, out of order */
        assert_int_equal(id_table_add(&table, 1 + i * 37 % 64, &objects[i * 37 % 64]), 0);
    assert_int_equal(id_table_add(&table, 5, objects), -EEXIST);
    for (uint64_t i = 0; i < 64; i++)
        assert_ptr_equal(id_table_find(&table, 1 + i), &objects[i]);
    assert_ptr_equal(id_table_remove(&table, 5), &objects[4]);
    assert_null(id_table_remove(&table, 5));
    assert_null(id_table_find(&table, 5));
    assert_int_equal(table.n, 63);
    id_table_clear(&table);
}

static void paths_and_ids_are_one_to_one(void **state)
{
    static const char *const none[] = {"/0", "/01", "/1x", "/-1", "/", "/1/2", "/18446744073709551616"};
    char path[BUS_ID_PATH_BYTES], bad[128];
    uint64_t id;

    (void)state;
    bus_id_to_path(BUS_JOB_ROOT, UINT64_MAX, path);
    assert_true(bus_path_to_id(path, BUS_JOB_ROOT, &id));
    assert_true(id == UINT64_MAX);
    assert_false(bus_path_to_id(BUS_JOB_ROOT, BUS_JOB_ROOT, &id));
    assert_false(bus_path_to_id(BUS_SESSION_ROOT "/1", BUS_JOB_ROOT, &id));
    for (size_t i = 0; i < N_ELEMENTS(none); i++) {
        (void)snprintf(bad, sizeof(bad), "%s%s", BUS_JOB_ROOT, none[i]);
        assert_true(bus_path_to_id(bad, BUS_JOB_ROOT, &id));
        assert_true(id == 0);
    }
}

static void usage_without_numbers_is_still_json(void **state)
{
    EngineUsage usage = {.decode_rate = (double)NAN, .prefill_rate = (double)INFINITY, .seed = UINT64_MAX, .stop_reason = "stop", .device = "a\xff"};
    json_t *object = usage_to_json(&usage);

    (void)state;
    assert_non_null(object);
    assert_true(json_real_value(json_object_get(object, "decode-rate")) == 0);
    assert_true(json_number_value(json_object_get(object, "seed")) > 1.8e19);
    assert_string_equal(json_string_value(json_object_get(object, "device")), "a?");
    json_decref(object);
}

#define STREAM_CASE(name) cmocka_unit_test_setup_teardown(name, stream_setup, stream_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        STREAM_CASE(a_full_socket_pauses_and_a_read_one_resumes),
        STREAM_CASE(a_reader_that_never_reads_is_slow_after_the_timeout),
        STREAM_CASE(a_finished_stream_is_given_up_when_nobody_reads),
        STREAM_CASE(a_reader_that_trickles_is_not_slow),
        STREAM_CASE(a_closed_descriptor_is_noticed),
        STREAM_CASE(a_queue_has_an_end),
        STREAM_CASE(long_text_is_cut_between_characters),
        STREAM_CASE(what_a_reader_writes_is_refused),
        cmocka_unit_test(bytes_that_may_not_travel_are_found_and_replaced),
        cmocka_unit_test(every_result_has_one_name_and_an_errno),
        cmocka_unit_test(an_error_text_with_a_bad_byte_is_cleaned),
        cmocka_unit_test(ids_are_read_as_text_and_as_int32),
        cmocka_unit_test(a_table_keeps_its_objects_by_id),
        cmocka_unit_test(paths_and_ids_are_one_to_one),
        cmocka_unit_test(usage_without_numbers_is_still_json),
    };

    return cmocka_run_group_tests_name("bus-unit", tests, NULL, NULL);
}
