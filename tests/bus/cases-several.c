/* SPDX-License-Identifier: Apache-2.0 */
/* Beams, several draws and several prompts over the bus; with either engine. */

#include "tests/bus/cases.h"
#include "tests/bus/harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#define MAX_SEQUENCES 64

typedef struct Several {
    size_t n;
    uint32_t prompts[MAX_SEQUENCES];
    double scores[MAX_SEQUENCES];
    size_t n_ids[MAX_SEQUENCES];
    uint32_t n_tokens[MAX_SEQUENCES];
} Several;

/* One entry {sv} of a sequence, entered. */
static void read_fact(sd_bus_message *reply, Several *ret)
{
    const char *key, *text;
    const void *ids;
    size_t n_bytes;

    assert_return_code(sd_bus_message_read(reply, "s", &key), 0);
    if (strcmp(key, "prompt") == 0) {
        assert_return_code(sd_bus_message_read(reply, "v", "u", &ret->prompts[ret->n]), 0);
    } else if (strcmp(key, "score") == 0) {
        assert_return_code(sd_bus_message_read(reply, "v", "d", &ret->scores[ret->n]), 0);
    } else if (strcmp(key, "tokens") == 0) {
        assert_return_code(sd_bus_message_read(reply, "v", "u", &ret->n_tokens[ret->n]), 0);
    } else if (strcmp(key, "text") == 0 || strcmp(key, "stop-reason") == 0) {
        assert_return_code(sd_bus_message_read(reply, "v", "s", &text), 0);
    } else if (strcmp(key, "ids") == 0) {
        assert_return_code(sd_bus_message_enter_container(reply, 'v', "ai"), 0);
        assert_return_code(sd_bus_message_read_array(reply, 'i', &ids, &n_bytes), 0);
        ret->n_ids[ret->n] = n_bytes / sizeof(int32_t);
        assert_return_code(sd_bus_message_exit_container(reply), 0);
    } else {
        fail_msg("an unknown key: %s", key);
    }
}

static void read_sequences(sd_bus_message *reply, Several *ret)
{
    assert_return_code(sd_bus_message_enter_container(reply, 'v', "aa{sv}"), 0);
    assert_return_code(sd_bus_message_enter_container(reply, 'a', "a{sv}"), 0);
    while (sd_bus_message_enter_container(reply, 'a', "{sv}") > 0) {
        assert_true(ret->n < MAX_SEQUENCES);
        while (sd_bus_message_enter_container(reply, 'e', "sv") > 0) {
            read_fact(reply, ret);
            assert_return_code(sd_bus_message_exit_container(reply), 0);
        }
        assert_return_code(sd_bus_message_exit_container(reply), 0);
        ret->n++;
    }
    assert_return_code(sd_bus_message_exit_container(reply), 0);
    assert_return_code(sd_bus_message_exit_container(reply), 0);
}

/* What Ask's reply says of its sequences. */
static void read_several(sd_bus_message *reply, Several *ret)
{
    const char *text, *key;

    *ret = (Several){.n = 0};
    assert_return_code(sd_bus_message_read(reply, "s", &text), 0);
    assert_return_code(sd_bus_message_enter_container(reply, 'a', "{sv}"), 0);
    while (sd_bus_message_enter_container(reply, 'e', "sv") > 0) {
        assert_return_code(sd_bus_message_read(reply, "s", &key), 0);
        if (strcmp(key, "sequences") == 0)
            read_sequences(reply, ret);
        else
            assert_return_code(sd_bus_message_skip(reply, "v"), 0);
        assert_return_code(sd_bus_message_exit_container(reply), 0);
    }
}

void ask_for_beams_answers_with_every_sequence_and_its_score(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply =
        call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "What is a leat?", 6, "num-beams", "u", 4, "num-return-sequences", "u", 3,
                "early-stopping", "s", "never", "length-penalty", "d", 0.5, "max-tokens", "u", 5, "want-ids", "b", true);
    Several several;

    read_several(reply, &several);
    assert_int_equal(several.n, 3);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(several.prompts[i], 0);
        assert_int_equal(several.n_ids[i], several.n_tokens[i]);
        assert_true(i == 0 || several.scores[i] <= several.scores[i - 1]);
    }
}

void ask_for_several_prompts_answers_each(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
    Several several;

    reply = call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "", 4, "prompts", "as", 3, "One", "Two", "Three", "max-tokens", "u", 4,
                    "num-return-sequences", "u", 2, "temperature", "d", 0.9);
    read_several(reply, &several);
    assert_int_equal(several.n, 6);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(several.prompts[i], i / 2);
}

/* The call must fail, and the text must name all of @words (divided by '|'). */
static void refuse(sd_bus *bus, const char *words, const char *key, const char *type, ...)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    _cleanup_(freep) char *copy = strdup(words);
    va_list values;

    assert_non_null(copy);
    assert_return_code(sd_bus_message_new_method_call(bus, &call, BUS_NAME, BUS_ROOT, MANAGER, "Ask"), 0);
    assert_return_code(sd_bus_message_append(call, "ss", "test", "Hello"), 0);
    assert_return_code(sd_bus_message_open_container(call, 'a', "{sv}"), 0);
    assert_return_code(sd_bus_message_open_container(call, 'e', "sv"), 0);
    assert_return_code(sd_bus_message_append(call, "s", key), 0);
    assert_return_code(sd_bus_message_open_container(call, 'v', type), 0);
    va_start(values, type);
    assert_return_code(sd_bus_message_appendv(call, type, values), 0);
    va_end(values);
    for (int i = 0; i < 3; i++)
        assert_return_code(sd_bus_message_close_container(call), 0);
    assert_true(sd_bus_call(bus, call, 0, &error, &reply) < 0);
    assert_string_equal(error.name, SD_BUS_ERROR_INVALID_ARGS);
    for (char *save = NULL, *word = strtok_r(copy, "|", &save); word; word = strtok_r(NULL, "|", &save))
        if (!strstr(error.message, word))
            fail_msg("\"%s\" does not say %s", error.message, word);
}

void wrong_values_of_beam_options_are_refused_by_name_value_and_range(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());

    refuse(bus, "num-beams|41|1|40", "num-beams", "u", 41);
    refuse(bus, "num-beams|0|1|40", "num-beams", "u", 0);
    refuse(bus, "num-return-sequences|21|20", "num-return-sequences", "u", 21);
    refuse(bus, "early-stopping|sometimes|false|true|never", "early-stopping", "s", "sometimes");
    refuse(bus, "early-stopping|expected s", "early-stopping", "b", true);
    refuse(bus, "early-stopping|no meaning|num-beams|40", "early-stopping", "s", "true");
    refuse(bus, "length-penalty|no meaning|num-beams|40", "length-penalty", "d", 2.0);
    refuse(bus, "length-penalty|1000|-100|100", "length-penalty", "d", 1000.0);
    refuse(bus, "length-penalty|nan", "length-penalty", "d", (double)__builtin_nan(""));
    refuse(bus, "prompts|must be empty", "prompts", "as", 1, "Two");
    refuse(bus, "prompts|at least one", "prompts", "as", 0);
    refuse(bus, "bad-words|1 to 256", "bad-words", "as", 1, "");
    refuse(bus, "did you mean num-beams", "num-beam", "u", 2);
}

void a_stream_refuses_several_sequences_by_name(void **state)
{
    static const char *const keys[] = {"num-beams", "num-return-sequences"};
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test"), *text = NULL;

    for (size_t i = 0; i < N_ELEMENTS(keys); i++) {
        call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, &text, session, SESSION, "Generate", "aa{sv}a{sv}", 1, 2, "role", "s", "user", "content", "s",
                   "Hello", 1, keys[i], "u", 3);
        assert_non_null(strstr(text, keys[i]));
        assert_non_null(strstr(text, "use Ask"));
        free(text);
        text = NULL;
    }
    call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, &text, SERVICE_PATH("echo"), SERVICE, "Invoke", "a{ss}a{sv}", 1, "word", "x", 1, "num-beams", "u",
               2);
    assert_non_null(strstr(text, "num-beams"));
}
