/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every option key of calls, and every key of the cache among them, with values and combinations that it does not take: each is refused with
 * InvalidArgs and a text that names the key, the value and what is allowed, and leaves nothing behind.
 */

#include "tests/bus/harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* One value from a text; of "as" and "ai": items divided by commas. */
static void append_value(sd_bus_message *call, const char *type, const char *text)
{
    char copy[300];

    assert_return_code(sd_bus_message_open_container(call, 'v', type), 0);
    if (type[0] == 'a') {
        assert_return_code(sd_bus_message_open_container(call, 'a', type + 1), 0);
        (void)snprintf(copy, sizeof(copy), "%s", text);
        for (char *save = NULL, *item = strtok_r(copy, ",", &save); item; item = strtok_r(NULL, ",", &save))
            assert_return_code(type[1] == 'i' ? sd_bus_message_append(call, "i", atoi(item)) : sd_bus_message_append(call, "s", item), 0);
        assert_return_code(sd_bus_message_close_container(call), 0);
    } else if (type[0] == 's') {
        assert_return_code(sd_bus_message_append(call, "s", text), 0);
    } else if (type[0] == 'd') {
        assert_return_code(sd_bus_message_append(call, "d", strtod(text, NULL)), 0);
    } else if (type[0] == 'b') {
        assert_return_code(sd_bus_message_append(call, "b", strcmp(text, "true") == 0), 0);
    } else if (strchr("ui", type[0])) {
        assert_return_code(sd_bus_message_append(call, type, (uint32_t)strtoll(text, NULL, 10)), 0);
    } else {
        assert_return_code(sd_bus_message_append(call, type, strtoull(text, NULL, 10)), 0);
    }
    assert_return_code(sd_bus_message_close_container(call), 0);
}

/* "key type value; key type value", as {sv} into an open array. */
static void append_entries(sd_bus_message *call, const char *entries)
{
    char copy[300];

    (void)snprintf(copy, sizeof(copy), "%s", entries);
    for (char *save = NULL, *entry = strtok_r(copy, ";", &save); entry; entry = strtok_r(NULL, ";", &save)) {
        char key[64], type[8], value[160] = "";

        assert_true(sscanf(entry, " %63s %7s %159[^\n]", key, type, value) >= 2);
        assert_return_code(sd_bus_message_open_container(call, 'e', "sv"), 0);
        assert_return_code(sd_bus_message_append(call, "s", key), 0);
        append_value(call, type, value);
        assert_return_code(sd_bus_message_close_container(call), 0);
    }
}

/* Asks or opens a session with options; @cache instead: the entries are the cache's. */
static sd_bus_message *new_call(sd_bus *bus, const char *member, const char *prompt, const char *entries, bool cache)
{
    sd_bus_message *call = NULL;

    assert_return_code(sd_bus_message_new_method_call(bus, &call, BUS_NAME, BUS_ROOT, MANAGER, member), 0);
    assert_return_code(sd_bus_message_append(call, "s", "test"), 0);
    if (strcmp(member, "Ask") == 0)
        assert_return_code(sd_bus_message_append(call, "s", prompt), 0);
    assert_return_code(sd_bus_message_open_container(call, 'a', "{sv}"), 0);
    if (cache) {
        assert_return_code(sd_bus_message_open_container(call, 'e', "sv"), 0);
        assert_return_code(sd_bus_message_append(call, "s", "cache"), 0);
        assert_return_code(sd_bus_message_open_container(call, 'v', "a{sv}"), 0);
        assert_return_code(sd_bus_message_open_container(call, 'a', "{sv}"), 0);
    }
    append_entries(call, entries);
    for (int i = 0; i < (cache ? 4 : 1); i++)
        assert_return_code(sd_bus_message_close_container(call), 0);
    return call;
}

static void expect_refusal(sd_bus *bus, const char *member, const char *prompt, const char *entries, bool cache, const char *words)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = new_call(bus, member, prompt, entries, cache), *reply = NULL;
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    char copy[300];

    if (sd_bus_call(bus, call, 0, &error, &reply) >= 0)
        fail_msg("%s with %s is accepted", member, entries);
    if (strcmp(error.name, SD_BUS_ERROR_INVALID_ARGS) != 0)
        fail_msg("%s with %s: %s: %s", member, entries, error.name, error.message);
    (void)snprintf(copy, sizeof(copy), "%s", words);
    for (char *save = NULL, *word = strtok_r(copy, "|", &save); word; word = strtok_r(NULL, "|", &save))
        if (!strstr(error.message, word))
            fail_msg("%s with %s: \"%s\" does not say %s", member, entries, error.message, word);
}

typedef struct Refusal {
    const char *entries, *words;
} Refusal;

static void wrong_values_of_call_options_are_refused(void **state)
{
    static const Refusal rows[] = {
        {"max-tokens s many", "max-tokens|type s|expected u"},
        {"max-tokens i 5", "max-tokens|type i|expected u"},
        {"temperature d -0.5", "temperature|-0.5|0 to 100"},
        {"temperature d 101", "temperature|101|0 to 100"},
        {"temperature d nan", "temperature|nan|0 to 100"},
        {"temperature u 1", "temperature|type u|expected d"},
        {"top-k i 5", "top-k|expected u"},
        {"top-p d 1.5", "top-p|1.5|0 to 1"},
        {"top-p d -0.1", "top-p|-0.1|0 to 1"},
        {"min-p d 2", "min-p|2|0 to 1"},
        {"min-p d inf", "min-p|inf|0 to 1"},
        {"repeat-penalty d 0", "repeat-penalty|0.01 to 100"},
        {"repeat-penalty d 1000", "repeat-penalty|1000|0.01 to 100"},
        {"seed u 1", "seed|type u|expected t"},
        {"stop s x", "stop|type s|expected as"},
        {"ignore-eos u 1", "ignore-eos|type u|expected b"},
        {"min-tokens i 1", "min-tokens|expected u"},
        {"no-repeat-ngram d 1", "no-repeat-ngram|expected u"},
        {"bad-words s x", "bad-words|expected as"},
        {"do-sample u 1", "do-sample|expected b"},
        {"num-beams u 0", "num-beams|0|1 to 40"},
        {"num-beams u 41", "num-beams|41|1 to 40"},
        {"num-beams u 4294967295", "num-beams|4294967295|1 to 40"},
        {"num-beams i 4", "num-beams|type i|expected u"},
        {"num-return-sequences u 0", "num-return-sequences|0|1 to 20"},
        {"num-return-sequences u 21", "num-return-sequences|21|1 to 20"},
        {"early-stopping s maybe; num-beams u 2", "early-stopping|\"maybe\"|false, true, never"},
        {"early-stopping b true", "early-stopping|type b|expected s"},
        {"early-stopping s true", "early-stopping|num-beams from 2 to 40"},
        {"early-stopping s true; num-beams u 1", "early-stopping|num-beams from 2 to 40"},
        {"length-penalty d -101; num-beams u 2", "length-penalty|-101|-100 to 100"},
        {"length-penalty d 1", "length-penalty|num-beams from 2 to 40"},
        {"prompts as", "prompts|at least one"},
        {"prompts s x", "prompts|type s|expected as"},
        {"prompts as x", "prompts|prompt must be empty"},
        {"priority s now", "priority|\"now\"|interactive, normal, background"},
        {"deadline-usec u 1", "deadline-usec|expected t"},
        {"raw s yes", "raw|expected b"},
        {"ids ai 1", "ids|prompt must be empty"},
        {"ids as 1", "ids|type as|expected ai"},
        {"want-ids u 1", "want-ids|expected b"},
        {"temperature d 0.5; temperature d 0.5", "temperature|given twice"},
        {"temprature d 0.5", "temprature|did you mean temperature"},
        {"xyzzy d 0.5", "xyzzy|known are max-tokens, temperature|num-beams|prompts|cache"},
        {"cache s dynamic", "cache|type s|expected a{sv}"},
    };
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());

    for (size_t i = 0; i < N_ELEMENTS(rows); i++)
        expect_refusal(bus, "Ask", "Hello", rows[i].entries, false, rows[i].words);
    expect_refusal(bus, "Ask", "", "ids ai 1,-5", false, "ids|element 1|-5");
    expect_refusal(bus, "Ask", "", "ids ai", false, "ids|at least one");
    expect_refusal(bus, "Ask", "", "max-tokens u 1", false, "prompt is empty");
    expect_refusal(bus, "OpenSession", "", "temperature d 0.5", false, "temperature|known are|cache");
}

static const Refusal wrong_caches[] = {
    {"stratgy s dynamic", "cache|stratgy|did you mean 'strategy'"},
    {"xyzzy s dynamic", "cache|xyzzy|known are strategy, max_cache_len|quant.kld-budget"},
    {"strategy s dynamc", "cache|strategy|'dynamc'|dynamic, static, offloaded, offloaded_static, quantized, offloaded_quantized, none"},
    {"strategy u 3", "cache|strategy|'3'|dynamic, static"},
    {"strategy b true", "cache|strategy|'true'|dynamic, static"},
    {"strategy as dynamic", "cache|strategy|type as|text, number or boolean"},
    {"strategy s dynamic; strategy s static", "cache|strategy|given twice"},
    {"nbits u 4; quant.nbits_key u 4", "cache|nbits_key|given twice"},
    {"prefetch u 0", "cache|prefetch|0|1 to 8"},
    {"prefetch u 9", "cache|prefetch|9|1 to 8"},
    {"prefetch i -1", "cache|prefetch|'-1'|whole number"},
    {"prefetch d 2.5", "cache|prefetch|'2.5'|whole number"},
    {"max_cache_len u 0", "cache|max_cache_len|0|1 to 16777216"},
    {"max_cache_len t 99999999999", "cache|max_cache_len|99999999999|1 to 16777216"},
    {"max_cache_len t 18446744073709551615", "cache|max_cache_len|18446744073709551615|1 to 16777216"},
    {"transfer s zero", "cache|transfer|'zero'|auto, copy, zero-copy"},
    {"transfer s copy; strategy s static", "cache|transfer|static|offloaded_quantized"},
    {"offload_only_non_sliding u 1", "cache|offload_only_non_sliding|'1'|true or false"},
    {"offload_only_non_sliding b true; strategy s dynamic", "cache|offload_only_non_sliding|dynamic|offloaded"},
    {"host-memory u 0", "cache|host-memory|0 bytes|leave it out"},
    {"host-memory i -5", "cache|host-memory|'-5'|size"},
    {"device-budget u 0", "cache|device-budget|0 bytes|leave it out"},
    {"device-budget s 1XB", "cache|device-budget|'1XB'|MiB"},
    {"nbits u 7", "cache|nbits|'7'|auto, 8, 6, 5, 4, 3, 2, 1"},
    {"nbits_key u 1", "cache|nbits_key 1|leat|8, 6, 5, 4, 3 and 2"},
    {"backend s ggml", "cache|backend|'ggml'|leat, hqq, quanto, fp8"},
    {"backend s quanto; nbits u 3", "cache|nbits_key 3|quanto|4 and 2"},
    {"backend s hqq; axis_key u 0", "cache|axis_key 0|hqq need 1"},
    {"backend s fp8; q_group_size u 64", "cache|q_group_size|fp8"},
    {"backend s hqq; levels s plain", "cache|levels|leat"},
    {"axis_value i -2", "cache|axis_value|'-2'|0, 1, -1"},
    {"q_group_size u 17", "cache|q_group_size 17|multiple of 16 from 16 to 128"},
    {"residual_length u 31", "cache|residual_length 31|multiple of 32 from 0 to 512"},
    {"sinks u 33", "cache|sinks|33|0 to 32"},
    {"centre s middle", "cache|centre|'middle'|none, before-rope, after-rope"},
    {"rotate s maybe", "cache|rotate|'maybe'|false, true"},
    {"pair-scale u 2", "cache|pair-scale|'2'|false, true"},
    {"levels s best", "cache|levels|'best'|searched, plain"},
    {"nbits_layers s 0-1", "cache|nbits_layers|'0-1'|0-1:8/8"},
    {"nbits_layers s 3-1:4", "cache|nbits_layers|'3-1:4'|range"},
    {"nbits_layers s 0:7", "cache|nbits_layers|0:7/7|8, 6, 5, 4, 3 and 2"},
    {"nbits_layers s 0-2:8,2:4", "cache|nbits_layers|layer 2|twice"},
    {"nbits_layers u 4", "cache|nbits_layers|'4'|colon"},
    {"backend s quanto; nbits_layers s 1:8", "cache|nbits_layers|1:8/8|quanto|4 and 2"},
    {"strategy s dynamic; nbits_layers s 0:8", "cache|nbits_layers|dynamic"},
    {"strategy s quantized; backend s hqq; compatibility b true; nbits_layers s 0:8", "cache|nbits_layers|compatibility"},
    {"kld-budget d 2", "cache|kld-budget|2|1e-06 to 1"},
    {"kld-budget d nan", "cache|kld-budget|nan"},
    {"strategy s dynamic; nbits u 4", "cache|nbits_key|dynamic|quantized or offloaded_quantized"},
    {"compatibility b true", "cache|compatibility|strategy quantized"},
    {"strategy s quantized; compatibility b true; backend s leat", "cache|compatibility|hqq, quanto or fp8"},
    {"strategy s quantized; backend s hqq; compatibility b true; sinks u 4", "cache|sinks|compatibility"},
    {"strategy s quantized; backend s quanto; compatibility b true; nbits u 3", "cache|nbits 3|quanto|2 or 4"},
};

static void wrong_caches_are_refused_by_every_method_that_takes_one(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());

    for (size_t i = 0; i < N_ELEMENTS(wrong_caches); i++) {
        expect_refusal(bus, "Ask", "Hello", wrong_caches[i].entries, true, wrong_caches[i].words);
        expect_refusal(bus, "OpenSession", "", wrong_caches[i].entries, true, wrong_caches[i].words);
    }
}

/* The model's own block has bits of leat (harness.c). */
static void another_strategy_or_backend_than_the_models_is_no_contradiction(void **state)
{
    static const char *const caches[] = {"strategy s dynamic", "strategy s static", "strategy s offloaded", "backend s hqq", "backend s fp8",
                                         "strategy s quantized; backend s quanto; compatibility b true"};
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());

    for (size_t i = 0; i < N_ELEMENTS(caches); i++) {
        _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = new_call(bus, "OpenSession", "", caches[i], true), *reply = NULL;
        _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;

        if (sd_bus_call(bus, call, 0, &error, &reply) < 0)
            fail_msg("%s: %s", caches[i], error.message);
    }
}

/* Refused requests hold no quota, no job and no session, and a session's length stays. */
static void refusals_leave_nothing_behind(void **state)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(*state, getuid());
    _cleanup_(freep) char *session = open_session(bus, "test");
    int fd;
    uint32_t used;

    free(generate(bus, session, "Hello", 4, false, &fd));
    (void)close(fd);
    wait_until_idle(bus);
    used = get_u32(bus, session, SESSION, "ContextUsed");
    for (int i = 0; i < 50; i++) { /* more than a client may have of anything */
        expect_refusal(bus, "OpenSession", "", "strategy s dynamc", true, "dynamc");
        expect_refusal(bus, "Ask", "Hello", "num-beams u 41", false, "num-beams");
        call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Generate", "aa{sv}a{sv}", 1, 2, "role", "s", "user", "content", "s", "x", 1,
                   "top-p", "d", 7.0);
        call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Crop", "ia{sv}", 1, 0);
        call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Crop", "ia{sv}", -(int)used - 1, 0);
        call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "Crop", "ia{sv}", INT32_MIN, 0);
        call_fails(bus, SD_BUS_ERROR_INVALID_ARGS, NULL, session, SESSION, "SetRecording", "ba{sv}", true, 1, "x", "s", "y");
    }
    assert_int_equal(get_u32(bus, session, SESSION, "ContextUsed"), used);
    assert_int_equal(get_u32(bus, BUS_ROOT, MANAGER, "NJobs"), 0);
    sd_bus_message_unref(call_ok(bus, session, SESSION, "Crop", "ia{sv}", 0, 0));
    sd_bus_message_unref(call_ok(bus, BUS_ROOT, MANAGER, "Ask", "ssa{sv}", "test", "Hello", 1, "max-tokens", "u", 2));
    sd_bus_message_unref(call_ok(bus, session, SESSION, "Close", "a{sv}", 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_values_of_call_options_are_refused),
        cmocka_unit_test(wrong_caches_are_refused_by_every_method_that_takes_one),
        cmocka_unit_test(another_strategy_or_backend_than_the_models_is_no_contradiction),
        cmocka_unit_test(refusals_leave_nothing_behind),
    };

    return cmocka_run_group_tests_name("bus-refusals", tests, harness_setup_fake, harness_teardown);
}
