/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every key of a cache: block with values that it does not take, and combinations that are none: refused with file:line:column of the value to
 * blame, the key's name, the value and what is allowed; from YAML and as KEY=VALUE of options alike.
 */

#include "daemon/config/config.h"
#include "tests/lib/place.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct Fixture {
    char folder[TEST_FOLDER_SIZE], path[96];
} Fixture;

static int setup(void **state)
{
    static Fixture fixture;
    char folder[160];

    assert_int_equal(test_folder_new(fixture.folder), 0);
    (void)snprintf(fixture.path, sizeof(fixture.path), "%s/leat.yaml", fixture.folder);
    (void)snprintf(folder, sizeof(folder), "%s/leat.d", fixture.folder);
    (void)mkdir(folder, 0700);
    (void)snprintf(folder, sizeof(folder), "%s/services.d", fixture.folder);
    (void)mkdir(folder, 0700);
    *state = &fixture;
    return 0;
}

static int teardown(void **state)
{
    return test_folder_remove(((Fixture *)*state)->folder);
}

static void write_file(const Fixture *fixture, const char *name, const char *text)
{
    char path[160];
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/%s", fixture->folder, name);
    if (!text) {
        (void)unlink(path);
        return;
    }
    file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* One message stands in the file NAME at the place and holds all words, which are separated by '|'. */
static void assert_message(const Fixture *fixture, const char *name, uint32_t line, uint32_t column, const char *words)
{
    ConfigMessages messages = CONFIG_MESSAGES_NULL;
    Config *config = NULL;
    char path[160];
    bool found = false;

    (void)snprintf(path, sizeof(path), "%s/%s", fixture->folder, name);
    assert_int_equal(config_load(fixture->path, &config, &messages), -EINVAL);
    assert_null(config);
    for (size_t i = 0; i < messages.n && !found; i++) {
        const ConfigMessage *m = &messages.messages[i];
        char all[400];

        (void)snprintf(all, sizeof(all), "%s", words);
        found = strcmp(m->file, path) == 0 && m->line == line && m->column == column;
        for (char *save = NULL, *word = strtok_r(all, "|", &save); word && found; word = strtok_r(NULL, "|", &save))
            found = strstr(m->text, word) != NULL;
    }
    for (size_t i = 0; i < messages.n && !found; i++)
        print_error("%s:%u:%u: %s\n", messages.messages[i].file, messages.messages[i].line, messages.messages[i].column,
                    messages.messages[i].text);
    if (!found)
        fail_msg("no message at %s:%u:%u with %s", name, line, column, words);
    config_messages_clear(&messages);
}

/* ---- one key, one wrong value ---------------------------------------------------------------------------------------------------- */

static const struct {
    const char *key, *value, *words;
} wrong_values[] = {
    {"strategy", "dynamc", "did you mean 'dynamic'|offloaded_static"},
    {"strategy", "3", "'3' is not one of dynamic, static, offloaded, offloaded_static, quantized, offloaded_quantized, none"},
    {"strategy", "true", "'true'"},
    {"strategy", "''", "'' is not one of"},
    {"max_cache_len", "0", "0 is out of range: 1 to 16777216"},
    {"max_cache_len", "16777217", "out of range"},
    {"max_cache_len", "18446744073709551616", "out of range"},
    {"max_cache_len", "lots", "'lots' is not a whole number"},
    {"max_cache_len", "-1", "not a whole number"},
    {"max_cache_len", "1e3", "not a whole number"},
    {"max_cache_len", "010", "begins with a zero"},
    {"offload_only_non_sliding", "yes", "'yes'|true or false"},
    {"offload_only_non_sliding", "1", "'1'|true or false"},
    {"prefetch", "0", "0 is out of range: 1 to 8"},
    {"prefetch", "9", "9 is out of range: 1 to 8"},
    {"prefetch", "2.5", "not a whole number"},
    {"prefetch", "4294967298", "out of range"},
    {"transfer", "zero", "'zero'|zero-copy"},
    {"transfer", "true", "not one of auto, copy, zero-copy"},
    {"host-memory", "0", "0 bytes|leave it out"},
    {"host-memory", "lots", "'lots' is not a size|MiB"},
    {"host-memory", "1XB", "not a size|MiB"},
    {"host-memory", "99999999TiB", "'99999999TiB' is out of range"},
    {"device-budget", "0KiB", "0 bytes|leave it out"},
    {"device-budget", "-5", "'-5'"},
    {"device-budget", "1e6", "not a size"},
    {"quant.backend", "ggml", "'ggml' is not one of leat, hqq, quanto, fp8"},
    {"quant.nbits", "7", "'7' is not one of auto, 8, 6, 5, 4, 3, 2, 1"},
    {"quant.nbits", "0", "not one of"},
    {"quant.nbits_key", "16", "not one of"},
    {"quant.nbits_key", "1", "quant.nbits_key 1|leat keeps pages of 8, 6, 5, 4, 3 and 2 bits"},
    {"quant.nbits_value", "1", "quant.nbits_value 1|leat keeps pages of"},
    {"quant.nbits_value", "four", "not one of"},
    {"quant.axis_key", "2", "'2'|0, 1, -1"},
    {"quant.axis_value", "-2", "'-2'|0, 1, -1"},
    {"quant.axis_key", "0", "no meaning for backend leat"},
    {"quant.q_group_size", "0", "0 is out of range: 1 to 1048576"},
    {"quant.q_group_size", "17", "quant.q_group_size 17|multiple of 16 from 16 to 128"},
    {"quant.q_group_size", "129", "129: must be a multiple of 16 from 16 to 128"},
    {"quant.q_group_size", "65600", "65600: must be a multiple of 16 from 16 to 128"},
    {"quant.q_group_size", "9999999", "out of range"},
    {"quant.nbits_layers", "0-1", "nbits_layers|has no bits|0-1:8/8"},
    {"quant.nbits_layers", "x:4", "names no layer|0-1:8/8"},
    {"quant.nbits_layers", "5-2:4", "no range of layers"},
    {"quant.nbits_layers", "4096:4", "0 to 4095"},
    {"quant.residual_length", "31", "quant.residual_length 31|multiple of 32 from 0 to 512"},
    {"quant.residual_length", "544", "544: must be a multiple of 32 from 0 to 512"},
    {"quant.residual_length", "-1", "not a whole number"},
    {"quant.sinks", "33", "out of range: 0 to 32"},
    {"quant.sinks", "some", "not a whole number"},
    {"quant.centre", "middle", "'middle'|none, before-rope, after-rope"},
    {"quant.rotate", "maybe", "'maybe'|false, true"},
    {"quant.pair-scale", "2", "'2'|false, true"},
    {"quant.levels", "best", "'best'|searched, plain"},
    {"quant.compatibility", "x", "'x'|false, true"},
    {"quant.compatibility", "true", "strategy quantized|not offloaded_quantized"},
    {"quant.kld-budget", "0", "out of range: 1e-06 to 1"},
    {"quant.kld-budget", "nan", "not a number"},
    {"quant.kld-budget", "1e999", "out of range"},
};

/* "    quant:\n      KEY: VALUE" or "    KEY: VALUE", indented by two more than a block; the column of the value. */
static uint32_t entry(char *text, size_t size, const char *key, const char *value)
{
    bool quant = strncmp(key, "quant.", 6) == 0;

    (void)snprintf(text, size, quant ? "    quant:\n      %s: %s\n" : "    %s: %s\n", quant ? key + 6 : key, value);
    return (uint32_t)(strlen(quant ? key + 6 : key) + (quant ? 9 : 7));
}

static void every_wrong_value_of_a_key_is_refused_where_it_stands(void **state)
{
    const Fixture *fixture = *state;

    for (size_t i = 0; i < N_ELEMENTS(wrong_values); i++) {
        const char *key = wrong_values[i].key;
        char line[200], text[400], words[300];
        uint32_t column = entry(line, sizeof(line), key, wrong_values[i].value), more = strncmp(key, "quant.", 6) == 0;

        (void)snprintf(words, sizeof(words), "%s|%s", strrchr(key, '.') ? strrchr(key, '.') + 1 : key, wrong_values[i].words);
        (void)snprintf(text, sizeof(text), "defaults:\n  cache:\n%s", line);
        write_file(fixture, "leat.yaml", text);
        assert_message(fixture, "leat.yaml", 3 + more, column, words);

        write_file(fixture, "leat.yaml", "version: 1\n");
        (void)snprintf(text, sizeof(text), "# a drop-in\nmodels: {a: {\n file: /a,\n cache:\n  {%s%s: %s%s}}}\n", more ? "quant: {" : "",
                       more ? key + 6 : key, wrong_values[i].value, more ? "}" : "");
        write_file(fixture, "leat.d/20.yaml", text);
        assert_message(fixture, "leat.d/20.yaml", 5, (uint32_t)strlen(key) + (more ? 8 : 6), words);
        write_file(fixture, "leat.d/20.yaml", NULL);

        write_file(fixture, "leat.yaml", "models: {m: {file: /m}}\n");
        (void)snprintf(text, sizeof(text), "model: m\nprompt: hello\ncache:\n%s", line);
        write_file(fixture, "services.d/s.yaml", text);
        assert_message(fixture, "services.d/s.yaml", 4 + more, column, words);
        write_file(fixture, "services.d/s.yaml", NULL);
    }
}

static void a_value_that_is_no_scalar_or_a_key_that_is_unknown_is_refused(void **state)
{
    const Fixture *fixture = *state;

    write_file(fixture, "leat.yaml", "defaults:\n  cache:\n    strategy: [dynamic]\n");
    assert_message(fixture, "leat.yaml", 3, 15, "single value|list");
    write_file(fixture, "leat.yaml", "defaults:\n  cache: dynamic\n");
    assert_message(fixture, "leat.yaml", 2, 10, "mapping of cache keys");
    write_file(fixture, "leat.yaml", "defaults:\n  cache:\n    quant: 4\n");
    assert_message(fixture, "leat.yaml", 3, 12, "mapping of quantisation keys");
    write_file(fixture, "leat.yaml", "defaults:\n  cache:\n    xyzzy: 4\n");
    assert_message(fixture, "leat.yaml", 3, 5, "'xyzzy'|known are strategy, max_cache_len|quant.kld-budget");
    write_file(fixture, "leat.yaml", "defaults:\n  cache:\n    quant:\n      xyzzy: 4\n");
    assert_message(fixture, "leat.yaml", 4, 7, "xyzzy|known are");
    write_file(fixture, "leat.yaml", "defaults:\n  cache:\n    prefetch: 2\n    prefetch: 3\n");
    assert_message(fixture, "leat.yaml", 4, 5, "the first is at line 3");
}

/* ---- combinations ------------------------------------------------------------------------------------------------------------------- */

/* A block of {LINES}; the message blames the value on line BLAME. */
static const struct {
    const char *lines;
    uint32_t blame, column;
    const char *words;
} wrong_combinations[] = {
    {"strategy: dynamic\ntransfer: copy\n", 2, 11, "transfer|dynamic|offloaded_quantized"},
    {"transfer: zero-copy\nstrategy: static\n", 1, 11, "transfer|static"},
    {"strategy: quantized\noffload_only_non_sliding: false\n", 2, 27, "offload_only_non_sliding|quantized|offloaded"},
    {"strategy: none\ntransfer: copy\n", 2, 11, "none"},
    {"strategy: dynamic\nquant: {nbits: 4}\n", 2, 16, "nbits_key|dynamic|quantized or offloaded_quantized"},
    {"strategy: offloaded\nquant: {sinks: 4}\n", 2, 16, "sinks|offloaded"},
    {"quant: {backend: quanto, nbits: 3}\n", 1, 33, "nbits_key 3|quanto|4 and 2"},
    {"quant: {backend: hqq, nbits_value: 6}\n", 1, 36, "nbits_value 6|hqq|8, 4 and 2"},
    {"quant: {backend: fp8, nbits: 4}\n", 1, 30, "nbits_key 4|fp8|8"},
    {"quant: {backend: fp8, q_group_size: 64}\n", 1, 37, "q_group_size|fp8"},
    {"quant: {backend: fp8, residual_length: 32}\n", 1, 40, "residual_length|fp8"},
    {"quant: {backend: quanto, axis_key: 1}\n", 1, 36, "axis_key 1|quanto need 0"},
    {"quant: {backend: hqq, axis_value: 0}\n", 1, 35, "axis_value 0|hqq need 1"},
    {"quant: {axis_value: 0}\n", 1, 21, "axis_value|leat"},
    {"quant: {backend: quanto, levels: plain}\n", 1, 34, "levels|leat"},
    {"quant: {backend: hqq, compatibility: true}\n", 1, 38, "compatibility|strategy quantized"},
    {"strategy: quantized\nquant: {compatibility: true}\n", 2, 24, "needs quant.backend hqq, quanto or fp8"},
    {"strategy: quantized\nquant: {backend: hqq, compatibility: true, sinks: 4}\n", 2, 51, "sinks|compatibility"},
    {"strategy: quantized\nquant: {backend: hqq, compatibility: true, levels: plain}\n", 2, 52, "levels|compatibility"},
    {"strategy: quantized\nquant: {backend: quanto, compatibility: true, nbits: 3}\n", 2, 54, "nbits 3|quanto|2 or 4"},
    {"strategy: quantized\nquant: {backend: quanto, compatibility: true, axis_key: 1}\n", 2, 57, "axis_key 1|quanto|0 or -1"},
    {"strategy: quantized\nquant: {backend: fp8, compatibility: true, nbits: 8}\n", 2, 51, "nbits|fp8"},
    {"strategy: quantized\nquant: {backend: hqq, compatibility: true, nbits_key: 4}\n", 2, 55, "one number of bits"},
    {"strategy: quantized\nquant: {backend: hqq, compatibility: true, nbits: auto}\n", 2, 51, "auto|compatibility"},
};

/* Each line with @n spaces before it. */
static void indent(char *to, size_t size, const char *lines, int n)
{
    to[0] = 0;
    for (const char *end; (end = strchr(lines, '\n')); lines = end + 1)
        (void)snprintf(to + strlen(to), size - strlen(to), "%*s%.*s\n", n, "", (int)(end - lines), lines);
}

static void every_wrong_combination_is_refused_where_its_key_stands(void **state)
{
    const Fixture *fixture = *state;

    for (size_t i = 0; i < N_ELEMENTS(wrong_combinations); i++) {
        uint32_t blame = wrong_combinations[i].blame, column = wrong_combinations[i].column;
        char lines[300], text[500];

        indent(lines, sizeof(lines), wrong_combinations[i].lines, 4);
        (void)snprintf(text, sizeof(text), "models: {a: {file: /a}}\ndefaults:\n  cache:\n%s", lines);
        write_file(fixture, "leat.yaml", text);
        assert_message(fixture, "leat.yaml", 3 + blame, column + 4, wrong_combinations[i].words);

        write_file(fixture, "leat.yaml", "version: 1\n");
        indent(lines, sizeof(lines), wrong_combinations[i].lines, 6);
        (void)snprintf(text, sizeof(text), "models:\n  a:\n    file: /a\n    cache:\n%s", lines);
        write_file(fixture, "leat.d/30.yaml", text);
        assert_message(fixture, "leat.d/30.yaml", 4 + blame, column + 6, wrong_combinations[i].words);
        write_file(fixture, "leat.d/30.yaml", NULL);

        write_file(fixture, "leat.yaml", "models: {m: {file: /m}}\n");
        indent(lines, sizeof(lines), wrong_combinations[i].lines, 2);
        (void)snprintf(text, sizeof(text), "model: m\nprompt: hello\ncache:\n%s", lines);
        write_file(fixture, "services.d/s.yaml", text);
        assert_message(fixture, "services.d/s.yaml", 3 + blame, column + 2, wrong_combinations[i].words);
        write_file(fixture, "services.d/s.yaml", NULL);
    }
}

/* What a farther block says of the cache it meant does not stand in the way of another one. */
static void a_nearer_strategy_or_backend_leaves_out_what_was_meant_for_another(void **state)
{
    static const struct {
        const char *defaults, *nearer;
        KvStrategy strategy;
        KvFormKind kind;
        uint8_t k_bits;
    } rows[] = {
        {"quant.nbits=5", "strategy=dynamic", KV_STRATEGY_DYNAMIC, KV_FORM_F16, 0},
        {"transfer=copy", "strategy=static", KV_STRATEGY_STATIC, KV_FORM_F16, 0},
        {"offload_only_non_sliding=false", "strategy=quantized", KV_STRATEGY_QUANTIZED, KV_FORM_LEAT, KV_BITS_AUTO},
        {"quant.nbits=5", "quant.backend=hqq", KV_STRATEGY_OFFLOADED_QUANTIZED, KV_FORM_HQQ, 4},
        {"quant.levels=plain", "quant.backend=quanto", KV_STRATEGY_OFFLOADED_QUANTIZED, KV_FORM_QUANTO, 4},
        {"quant.nbits=5", "quant.backend=leat", KV_STRATEGY_OFFLOADED_QUANTIZED, KV_FORM_LEAT, 5},
        {"quant.nbits=5", "strategy=quantized", KV_STRATEGY_QUANTIZED, KV_FORM_LEAT, 5},
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        ConfigCache far = {0}, near = {0};
        const ConfigCache *blocks[] = {&far, NULL, &near};
        ErrorDetail detail = ERROR_DETAIL_NULL;
        KvPolicy policy;
        char text[80], *equals;

        (void)snprintf(text, sizeof(text), "%s", rows[i].defaults);
        *(equals = strchr(text, '=')) = 0;
        assert_int_equal(config_cache_set(&far, text, equals + 1, NULL), 0);
        (void)snprintf(text, sizeof(text), "%s", rows[i].nearer);
        *(equals = strchr(text, '=')) = 0;
        assert_int_equal(config_cache_set(&near, text, equals + 1, NULL), 0);
        if (config_policy(blocks, N_ELEMENTS(blocks), false, &policy, &detail))
            fail_msg("%s, then %s: %s", rows[i].defaults, rows[i].nearer, detail.text);
        assert_int_equal(policy.strategy, rows[i].strategy);
        assert_int_equal(policy.form.kind, rows[i].kind);
        assert_int_equal(policy.form.k_bits, rows[i].k_bits);
    }
}

static void keys_of_one_meaning_are_known_as_such(void **state)
{
    (void)state;
    assert_true(config_cache_same_key("nbits", "quant.nbits_key"));
    assert_true(config_cache_same_key("nbits_value", "quant.nbits"));
    assert_true(config_cache_same_key("strategy", "strategy"));
    assert_false(config_cache_same_key("nbits_key", "nbits_value"));
    assert_false(config_cache_same_key("prefetch", "transfer"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_wrong_value_of_a_key_is_refused_where_it_stands),
        cmocka_unit_test(a_value_that_is_no_scalar_or_a_key_that_is_unknown_is_refused),
        cmocka_unit_test(every_wrong_combination_is_refused_where_its_key_stands),
        cmocka_unit_test(a_nearer_strategy_or_backend_leaves_out_what_was_meant_for_another),
        cmocka_unit_test(keys_of_one_meaning_are_known_as_such),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
