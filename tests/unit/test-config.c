/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration files: what is read, what is refused, and where the mistake is said to be. */

#include "daemon/config/config.h"
#include "tests/lib/place.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <cmocka.h>

typedef struct Fixture {
    char folder[TEST_FOLDER_SIZE], path[96];
    ConfigMessages messages;
    Config *config;
} Fixture;

static int fixture_setup(void **state)
{
    Fixture *fixture = calloc(1, sizeof(*fixture));

    assert_non_null(fixture);
    assert_int_equal(test_folder_new(fixture->folder), 0);
    (void)snprintf(fixture->path, sizeof(fixture->path), "%s/leat.yaml", fixture->folder);
    *state = fixture;
    return 0;
}

static int fixture_teardown(void **state)
{
    Fixture *fixture = *state;

    config_messages_clear(&fixture->messages);
    config_free(fixture->config);
    assert_int_equal(test_folder_remove(fixture->folder), 0);
    free(fixture);
    return 0;
}

static void write_bytes(const Fixture *fixture, const char *name, const void *bytes, size_t n)
{
    char path[256], *slash;
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/%s", fixture->folder, name);
    slash = strrchr(path, '/');
    *slash = 0;
    (void)mkdir(path, 0700);
    *slash = '/';
    file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    (void)fclose(file);
}

static void write_text(const Fixture *fixture, const char *name, const char *text)
{
    write_bytes(fixture, name, text, strlen(text));
}

static int load(Fixture *fixture)
{
    config_messages_clear(&fixture->messages);
    fixture->config = config_free(fixture->config);
    return config_load(fixture->path, &fixture->config, &fixture->messages);
}

/* The main file is refused, and one of the messages stands at the place and holds the words. */
static void assert_refused(Fixture *fixture, const char *text, uint32_t line, uint32_t column, const char *words)
{
    write_text(fixture, "leat.yaml", text);
    assert_int_equal(load(fixture), -EINVAL);
    assert_null(fixture->config);
    for (size_t i = 0; i < fixture->messages.n; i++) {
        const ConfigMessage *message = &fixture->messages.messages[i];

        if (message->line == line && (!column || message->column == column) && strstr(message->text, words))
            return;
    }
    for (size_t i = 0; i < fixture->messages.n; i++)
        print_error("%u:%u: %s\n", fixture->messages.messages[i].line, fixture->messages.messages[i].column,
                    fixture->messages.messages[i].text);
    fail_msg("no message at %u:%u with '%s'", line, column, words);
}

static void config_of_an_empty_file_is_the_defaults(void **state)
{
    static const char *const texts[] = {"", "# only a comment\n", "---\n", "\xef\xbb\xbf# with a byte order mark\n"};
    Fixture *fixture = *state;

    for (size_t i = 0; i < N_ELEMENTS(texts); i++) {
        write_text(fixture, "leat.yaml", texts[i]);
        assert_int_equal(load(fixture), 0);
        assert_int_equal(fixture->messages.n, 0);
        assert_int_equal(fixture->config->max_queue, 64);
        assert_int_equal(fixture->config->default_keep_alive_usec, 600000000);
        assert_true(fixture->config->idle_exit_usec == UINT64_MAX);
        assert_false(fixture->config->default_exact);
    }
}

static void config_names_the_nearest_known_key(void **state)
{
    Fixture *fixture = *state;

    assert_refused(fixture, "schedular: {}\n", 1, 1, "did you mean 'scheduler'");
    assert_refused(fixture, "defaults:\n  cache:\n    stratgy: dynamic\n", 3, 5, "did you mean 'strategy'");
    assert_refused(fixture, "defaults:\n  cache:\n    quant:\n      nbits_kye: 5\n", 4, 7, "did you mean 'quant.nbits_key'");
    assert_refused(fixture, "defaults: {cache: {strategy: dynamc}}\n", 1, 0, "did you mean 'dynamic'");
    assert_refused(fixture, "xyzzy: 1\n", 1, 1, "is not known here");
}

static void config_places_weights(void **state)
{
    Fixture *fixture = *state;
    EngineModel *models = NULL;
    size_t n = 0;

    write_text(fixture, "leat.yaml",
               "models:\n  a: {file: x.gguf}\n  b: {file: x.gguf, layers: all}\n"
               "  c: {file: x.gguf, layers: 0, weights: {prefetch: 8, transfer: copy}}\n  d: {file: x.gguf, layers: auto}\n");
    assert_int_equal(load(fixture), 0);
    assert_int_equal(config_engine_models(fixture->config, &models, &n, NULL), 0);
    assert_int_equal(n, 4);
    assert_int_equal(models[0].weights.n_slots, 2);
    assert_false(models[0].weights.limit_layers || models[0].weights.all_layers);
    assert_true(models[1].weights.all_layers);
    assert_true(models[2].weights.limit_layers);
    assert_int_equal(models[2].weights.max_layers, 0);
    assert_int_equal(models[2].weights.n_slots, 8);
    assert_int_equal(models[2].weights.transfer, KV_TRANSFER_COPY);
    assert_false(models[3].weights.limit_layers || models[3].weights.all_layers);
    free(models);
    assert_refused(fixture, "models: {a: {file: x.gguf, layers: some}}\n", 1, 36, "none of auto, all and a number");
    assert_refused(fixture, "models: {a: {file: x.gguf, layers: 4097}}\n", 1, 36, "out of range");
    assert_refused(fixture, "models: {a: {file: x.gguf, weights: {prefetch: 9}}}\n", 1, 48, "out of range");
    assert_refused(fixture, "models: {a: {file: x.gguf, weights: {prefetch: 0}}}\n", 1, 48, "out of range");
    assert_refused(fixture, "models: {a: {file: x.gguf, weights: {transfer: zero}}}\n", 1, 48, "zero-copy");
    assert_refused(fixture, "models: {a: {file: x.gguf, weights: {slots: 2}}}\n", 1, 38, "not known");
}

static void config_reports_all_errors_of_all_files_at_once(void **state)
{
    Fixture *fixture = *state;
    bool seen_service = false;

    write_text(fixture, "leat.d/10-a.yaml", "log: {level: loud}\n");
    write_text(fixture, "services.d/broken.yaml", "prompt: '{{nobody}}'\n");
    assert_refused(fixture, "version: 2\nschedular: {}\nscheduler: {max-queue: 0}\n", 1, 10, "out of range");
    assert_true(fixture->messages.n >= 6);
    for (size_t i = 0; i < fixture->messages.n; i++)
        seen_service = seen_service || (strstr(fixture->messages.messages[i].file, "services.d/broken.yaml") &&
                                        strstr(fixture->messages.messages[i].text, "{{nobody}}"));
    assert_true(seen_service);
}

static void config_refuses_duplicate_keys_with_both_lines(void **state)
{
    Fixture *fixture = *state;

    assert_refused(fixture, "version: 1\nversion: 1\n", 2, 1, "the first is at line 1");
    assert_refused(fixture, "log:\n  level: info\n  \"level\": debug\n", 3, 3, "the first is at line 2");
}

static void config_refuses_what_yaml_allows_but_nobody_means(void **state)
{
    Fixture *fixture = *state;

    assert_refused(fixture, "models: {a: {file: x.gguf, preload: yes}}\n", 1, 0, "write true or false");
    assert_refused(fixture, "models: {a: {file: x.gguf, preload: off}}\n", 1, 0, "write true or false");
    assert_refused(fixture, "scheduler: {max-queue: 010}\n", 1, 0, "begins with a zero");
    assert_refused(fixture, "scheduler: {host-memory: 0}\n", 1, 26, "0 bytes hold no cache: write auto");
    assert_refused(fixture, "scheduler: {host-memory: lots}\n", 1, 26, "'lots' is not a size");
    assert_refused(fixture, "scheduler: {max-queue: 1e3}\n", 1, 0, "not a whole number");
    assert_refused(fixture, "scheduler: {max-queue: -1}\n", 1, 0, "not a whole number");
    assert_refused(fixture, "defaults: {seed: 18446744073709551616}\n", 1, 0, "out of range");
    assert_refused(fixture, "models: {a: {file: x, parameters: {temperature: 1e400}}}\n", 1, 0, "out of range");
    assert_refused(fixture, "models: {a: {file: x, parameters: {temperature: nan}}}\n", 1, 0, "not a number");
    assert_refused(fixture, "version: 1\n---\nversion: 1\n", 2, 1, "second document");
    assert_refused(fixture, "log: &a {level: info}\nx: *a\n", 2, 0, "aliases");
    assert_refused(fixture, "- a\n- b\n", 1, 1, "must be a mapping");
    assert_refused(fixture, "just words\n", 1, 1, "must be a mapping");
}

static void config_refuses_broken_files(void **state)
{
    static const unsigned char nul[] = "version: \"a\\0b\"\n", latin1[] = "log: {level: \xe9}\n";
    Fixture *fixture = *state;
    char *deep = malloc(20001);

    assert_refused(fixture, "log:\n\tlevel: info\n", 2, 0, "tab");
    assert_refused(fixture, "log: {level: info\n", 2, 0, "");
    assert_refused(fixture, (const char *)nul, 1, 10, "NUL");
    write_bytes(fixture, "leat.yaml", latin1, sizeof(latin1) - 1);
    assert_int_equal(load(fixture), -EINVAL);
    assert_non_null(strstr(fixture->messages.messages[0].text, "UTF-8"));
    assert_non_null(deep);
    memset(deep, '[', 10000);
    deep[10000] = 0;
    assert_refused(fixture, deep, 1, 17, "16 levels");
    free(deep);
    (void)remove(fixture->path);
    assert_int_equal(load(fixture), -EINVAL);
    assert_non_null(strstr(fixture->messages.messages[0].text, "cannot be opened"));
}

static void config_drop_ins_replace_key_by_key(void **state)
{
    Fixture *fixture = *state;
    const ConfigModel *model;

    write_text(fixture, "leat.yaml",
               "models:\n  a: {file: /m/a.gguf, context: 100, aliases: [small]}\nscheduler: {max-queue: 5}\n");
    write_text(fixture, "leat.d/20.yaml", "models: {a: {context: 300}}\n");
    write_text(fixture, "leat.d/10.yaml", "models: {a: {context: 200, compute: exact}}\n");
    assert_int_equal(load(fixture), 0);
    model = config_find_model(fixture->config, "small");
    assert_non_null(model);
    assert_string_equal(model->name, "a");
    assert_string_equal(model->file, "/m/a.gguf");
    assert_int_equal(model->context, 300);
    assert_true(model->exact);
    assert_int_equal(fixture->config->max_queue, 5);
}

static void config_finds_models_in_the_store(void **state)
{
    Fixture *fixture = *state;
    char text[256];

    write_text(fixture, "store/one.gguf", "x");
    write_text(fixture, "store/not a name.gguf", "x");
    write_text(fixture, "store/three.gguf", "x");
    (void)snprintf(text, sizeof(text), "store: {path: %s/store}\nmodels: {two: {file: three.gguf}}\n", fixture->folder);
    write_text(fixture, "leat.yaml", text);
    assert_int_equal(load(fixture), 0);
    /* A file that a model names is not a second one by its own name. */
    assert_int_equal(fixture->config->n_models, 2);
    assert_string_equal(strrchr(config_find_model(fixture->config, "two")->file, '/'), "/three.gguf");
    assert_string_equal(strrchr(config_find_model(fixture->config, "one")->file, '/'), "/one.gguf");
}

static void config_policy_takes_the_nearest_block_key_by_key(void **state)
{
    Fixture *fixture = *state;
    EngineModel *models = NULL;
    size_t n;

    write_text(fixture, "leat.yaml",
               "defaults: {cache: {transfer: copy, prefetch: 4}}\n"
               "models: {a: {file: /a, cache: {prefetch: 3, quant: {nbits_key: 8}}}}\n");
    assert_int_equal(load(fixture), 0);
    assert_int_equal(config_engine_models(fixture->config, &models, &n, NULL), 0);
    assert_int_equal(n, 1);
    assert_int_equal(models[0].policy.strategy, KV_STRATEGY_OFFLOADED_QUANTIZED);
    assert_int_equal(models[0].policy.transfer, KV_TRANSFER_COPY);
    assert_int_equal(models[0].policy.n_slots, 3);
    assert_int_equal(models[0].policy.form.k_bits, 8);
    assert_int_equal(models[0].policy.form.v_bits, KV_BITS_AUTO);
    free(models);
}

static void config_leaves_bits_to_the_model_unless_they_are_written(void **state)
{
    static const char *const names[] = {"own", "fixed", "again", "side", "hqq", "hqq-auto", "budget"};
    static const uint8_t k_bits[] = {KV_BITS_AUTO, 4, KV_BITS_AUTO, 5, 4, KV_BITS_AUTO, KV_BITS_AUTO},
                         v_bits[] = {KV_BITS_AUTO, 4, KV_BITS_AUTO, KV_BITS_AUTO, 4, KV_BITS_AUTO, KV_BITS_AUTO};
    static const double budgets[] = {0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.05};
    Fixture *fixture = *state;
    EngineModel *models = NULL;
    char *printed = NULL;
    size_t n, size = 0;
    FILE *file;

    write_text(fixture, "leat.yaml",
               "defaults: {cache: {quant: {kld-budget: 0.001}}}\n"
               "models:\n"
               "  own: {file: /a}\n"
               "  fixed: {file: /b, cache: {quant: {nbits: 4}}}\n"
               "  again: {file: /c, cache: {quant: {nbits: auto}}}\n"
               "  side: {file: /d, cache: {quant: {nbits_key: 5, nbits_value: auto}}}\n"
               "  hqq: {file: /e, cache: {quant: {backend: hqq}}}\n"
               "  hqq-auto: {file: /f, cache: {quant: {backend: hqq, nbits: auto}}}\n"
               "  budget: {file: /g, cache: {quant: {kld-budget: 0.05}}}\n");
    assert_int_equal(load(fixture), 0);
    assert_int_equal(config_engine_models(fixture->config, &models, &n, NULL), 0);
    assert_int_equal(n, N_ELEMENTS(names));
    for (size_t i = 0; i < n; i++) {
        size_t at = 0;

        while (strcmp(names[at], models[i].name) != 0)
            assert_true(++at < N_ELEMENTS(names));
        assert_int_equal(models[i].policy.form.k_bits, k_bits[at]);
        assert_int_equal(models[i].policy.form.v_bits, v_bits[at]);
        assert_true(models[i].policy.kld_budget > budgets[at] * 0.999 && models[i].policy.kld_budget < budgets[at] * 1.001);
    }
    free(models);
    file = open_memstream(&printed, &size);
    assert_int_equal(config_print(fixture->config, file), 0);
    (void)fclose(file);
    assert_non_null(strstr(printed, "kld-budget: 0.05"));
    assert_non_null(strstr(printed, "nbits_key: auto"));
    free(printed);
}

static void config_refuses_budgets_that_are_none(void **state)
{
    Fixture *fixture = *state;

    assert_refused(fixture, "defaults:\n  cache:\n    quant:\n      kld-budget: little\n", 4, 19, "kld-budget");
    assert_refused(fixture, "defaults:\n  cache:\n    quant:\n      kld-budget: 0\n", 4, 19, "out of range");
    assert_refused(fixture, "defaults:\n  cache:\n    quant:\n      kld-budget: 2\n", 4, 19, "out of range");
    assert_refused(fixture, "defaults:\n  cache:\n    quant:\n      kld-budget: -0.1\n", 4, 19, "kld-budget");
    assert_refused(fixture, "defaults:\n  cache:\n    quant:\n      nbits: automatic\n", 4, 14, "not one of auto, 8, 6, 5, 4, 3, 2, 1");
    assert_refused(fixture, "defaults:\n  cache:\n    quant:\n      kld_budget: 0.01\n", 4, 7, "did you mean 'quant.kld-budget'");
    assert_refused(fixture, "models: {a: {file: /a, cache: {strategy: dynamic, quant: {kld-budget: 0.01}}}}\n", 1, 0, "no meaning");
    assert_refused(fixture,
                   "models: {a: {file: /a, cache: {strategy: quantized, quant: {backend: hqq, compatibility: true, nbits: auto}}}}\n", 1, 0,
                   "nbits auto has no meaning with quant.compatibility");
}

static void config_refuses_wrong_combinations_of_cache_keys(void **state)
{
    Fixture *fixture = *state;

    assert_refused(fixture, "models: {a: {file: /a, cache: {strategy: dynamic, quant: {nbits: 4}}}}\n", 1, 0, "no meaning");
    assert_refused(fixture, "models: {a: {file: /a, cache: {strategy: static, transfer: copy}}}\n", 1, 0, "no meaning");
    assert_refused(fixture, "models: {a: {file: /a, cache: {quant: {nbits: 7}}}}\n", 1, 0, "not one of auto, 8, 6, 5, 4, 3, 2, 1");
    assert_refused(fixture, "models: {a: {file: /a, cache: {quant: {backend: quanto, nbits: 3}}}}\n", 1, 0, "nbits_key 3: backend quanto keeps pages of 4 and 2 bits");
    assert_refused(fixture, "models: {a: {file: /a, cache: {quant: {backend: hqq, axis_key: 0}}}}\n", 1, 0, "pages of hqq need 1");
    assert_refused(fixture, "models: {a: {file: /a, cache: {quant: {backend: fp8, q_group_size: 64}}}}\n", 1, 0, "neither groups");
    assert_refused(fixture, "models: {a: {file: /a, cache: {quant: {backend: leat, axis_key: 0}}}}\n", 1, 0, "no meaning for backend leat");
    assert_refused(fixture, "models: {a: {file: /a, cache: {quant: {residual_length: 100}}}}\n", 1, 0, "multiple of 32");
    assert_refused(fixture, "models: {a: {file: /a, cache: {quant: {backend: quanto, levels: plain}}}}\n", 1, 0, "levels are a part of leat");
    assert_refused(fixture, "models: {a: {file: /a, cache: {quant: {rotat: true}}}}\n", 1, 0, "quant.rotate");
    assert_refused(fixture, "models: {a: {file: /a, cache: {strategy: quantized, quant: {compatibility: true}}}}\n", 1, 0,
                   "needs quant.backend hqq, quanto or fp8");
    assert_refused(fixture, "models: {a: {file: /a, cache: {quant: {backend: hqq, compatibility: true}}}}\n", 1, 0, "for strategy quantized");
    assert_refused(fixture, "models: {a: {file: /a, cache: {strategy: quantized, quant: {backend: quanto, nbits: 3, compatibility: true}}}}\n", 1, 0,
                   "nbits");
    assert_refused(fixture, "models: {a: {file: /a, cache: {strategy: quantized, quant: {backend: hqq, sinks: 4, compatibility: true}}}}\n", 1, 0,
                   "no meaning with quant.compatibility");
    assert_refused(fixture, "models: {a: {file: /a, cache: {strategy: quantized, quant: {backend: fp8, nbits: 4, compatibility: true}}}}\n", 1, 0,
                   "fp8");
    assert_refused(fixture, "models: {a: {file: /a, cache: {prefetch: 9}}}\n", 1, 0, "out of range");
    assert_refused(fixture, "models: {a: {}}\n", 1, 0, "has no 'file'");
    assert_refused(fixture, "models: {'../a': {file: x}}\n", 1, 0, "cannot be a name");
}

static void config_service_prompt_takes_inputs_literally(void **state)
{
    static const char *const names[] = {"input"}, *const values[] = {"a {{host}} %s <|im_end|>"};
    static const char *const unknown[] = {"other"};
    Fixture *fixture = *state;
    const ConfigService *service;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    char *prompt = NULL;

    write_text(fixture, "leat.yaml", "models: {m: {file: /m}}\n");
    write_text(fixture, "services.d/s.yaml",
               "model: m\nprompt: 'on {{host}}: {{ input }}.'\ninputs:\n  input: {max-size: 64}\n  host: {default: here}\n"
               "parameters: {temperature: 0, stop: ['\\n', END]}\npriority: background\n");
    assert_int_equal(load(fixture), 0);
    service = config_find_service(fixture->config, "s");
    assert_non_null(service);
    assert_int_equal(service->priority, ENGINE_PRIORITY_BACKGROUND);
    assert_int_equal(service->sampling.n_stop, 2);
    assert_int_equal(config_service_render(service, names, values, 1, &prompt, &detail), 0);
    assert_string_equal(prompt, "on here: a {{host}} %s <|im_end|>.");
    free(prompt);
    assert_int_equal(config_service_render(service, NULL, NULL, 0, &prompt, &detail), -EINVAL);
    assert_non_null(strstr(detail.text, "needs input 'input'"));
    assert_int_equal(config_service_render(service, unknown, values, 1, &prompt, &detail), -EINVAL);
    assert_non_null(strstr(detail.text, "no input 'other'"));
}

static void config_service_sampling_overlays_the_models(void **state)
{
    Fixture *fixture = *state;
    EngineSampling sampling;

    write_text(fixture, "leat.yaml", "models: {m: {file: /m, parameters: {top-k: 7, temperature: 0.5}}}\n");
    write_text(fixture, "services.d/s.yaml", "model: m\nprompt: hello\nparameters: {temperature: 0}\n");
    assert_int_equal(load(fixture), 0);
    config_service_sampling(fixture->config, config_find_service(fixture->config, "s"), &sampling);
    assert_int_equal(sampling.top_k, 7);
    assert_true(sampling.temperature == 0.0f);
}

static void config_values_have_units(void **state)
{
    Fixture *fixture = *state;

    write_text(fixture, "leat.yaml",
               "devices: [{match: {type: gpu, vendor: intel}, use: always, max-memory: 2GiB, reserve: 512MiB}]\n"
               "defaults: {keep-alive: 90s}\nscheduler: {idle-exit: 5min, host-memory: 3GiB}\n");
    assert_int_equal(load(fixture), 0);
    assert_int_equal(fixture->config->n_devices, 1);
    assert_true(fixture->config->devices[0].max_memory_bytes == 2ull << 30);
    assert_true(fixture->config->devices[0].reserve_bytes == 512ull << 20);
    assert_int_equal(fixture->config->devices[0].type, GPU_DEVICE_TYPE_GPU);
    assert_true(fixture->config->default_keep_alive_usec == 90000000);
    assert_true(fixture->config->idle_exit_usec == 300000000);
    assert_true(fixture->config->host_memory_bytes == 3ull << 30);
    assert_refused(fixture, "defaults: {keep-alive: 5 parsecs}\n", 1, 0, "time span");
    assert_refused(fixture, "devices: [{max-memory: 2 lots}]\n", 1, 0, "not a size");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
        CASE(config_of_an_empty_file_is_the_defaults),
        CASE(config_names_the_nearest_known_key),
        CASE(config_places_weights),
        CASE(config_reports_all_errors_of_all_files_at_once),
        CASE(config_refuses_duplicate_keys_with_both_lines),
        CASE(config_refuses_what_yaml_allows_but_nobody_means),
        CASE(config_refuses_broken_files),
        CASE(config_drop_ins_replace_key_by_key),
        CASE(config_finds_models_in_the_store),
        CASE(config_policy_takes_the_nearest_block_key_by_key),
        CASE(config_leaves_bits_to_the_model_unless_they_are_written),
        CASE(config_refuses_budgets_that_are_none),
        CASE(config_refuses_wrong_combinations_of_cache_keys),
        CASE(config_service_prompt_takes_inputs_literally),
        CASE(config_service_sampling_overlays_the_models),
        CASE(config_values_have_units),
#undef CASE
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
