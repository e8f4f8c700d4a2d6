/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From the cache block of a YAML file to the policy of a store and its sizes: presets, the keys of each codec, bits of layers, compatibility
 * mode.  What they do to the numbers is in tests/parity/test-config-store.c.
 */

#include "cache/kv-sizes.h"
#include "daemon/config/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static const GpuInfo small_gpu = {.name = "small", .max_allocation_bytes = 256u << 20};
static const float frequencies[32] = {1.0f, 0.5f};
static const KvLayer mixed_layers[] = {{.kind = KV_LAYER_FULL}, {.kind = KV_LAYER_SLIDING, .window = 512}, {.kind = KV_LAYER_FULL},
                                       {.kind = KV_LAYER_CHUNKED, .window = 256}};

static KvModel model_of(const KvLayer *layers, uint32_t n_layers)
{
    return (KvModel){.n_layers = n_layers,
                     .layers = layers,
                     .shape = {.n_heads = 9, .n_kv_heads = 3, .k_head_dim = 64, .v_head_dim = 64, .rotary_dim = 64},
                     .scale = 0.125f,
                     .inv_freq = frequencies,
                     .max_rows = 64,
                     .max_sequences = 1};
}

/* The policy of the only model of a file whose cache block is @block; -EINVAL with the first message. */
static int read_policy(const char *block, bool exact, KvPolicy *ret, ConfigMessage *ret_message, char *text, size_t size)
{
    char path[] = "/tmp/leat-test-quant-XXXXXX";
    ConfigMessages messages = {0};
    Config *config = NULL;
    EngineModel *models = NULL;
    size_t n;
    int fd = mkstemp(path), r;

    assert_true(fd >= 0);
    assert_true(dprintf(fd, "models:\n  m:\n    file: /m.gguf\n    compute: %s\n    cache:\n%s\n", exact ? "exact" : "fast", block) > 0);
    (void)close(fd);
    r = config_load(path, &config, &messages);
    (void)unlink(path);
    if (r == 0) {
        assert_int_equal(config_engine_models(config, &models, &n, NULL), 0);
        assert_int_equal(n, 1);
        *ret = models[0].policy;
    } else if (messages.n > 0 && ret_message) {
        *ret_message = messages.messages[0];
        (void)snprintf(text, size, "%s", messages.messages[0].text);
    }
    free(models);
    config_free(config);
    config_messages_clear(&messages);
    return r;
}

static KvPolicy policy_of(const char *block, bool exact)
{
    ConfigMessage message;
    KvPolicy policy;
    char text[512] = "";

    if (read_policy(block, exact, &policy, &message, text, sizeof(text)))
        fail_msg("%s: %s", block, text);
    return policy;
}

/* @line and @column of the value; 0: anywhere. */
static void assert_refused(const char *block, uint32_t line, uint32_t column, const char *words)
{
    ConfigMessage message = {0};
    KvPolicy policy;
    char text[512] = "";

    assert_int_equal(read_policy(block, false, &policy, &message, text, sizeof(text)), -EINVAL);
    if (!strstr(text, words))
        fail_msg("%s: '%s' does not say '%s'", block, text, words);
    if (line > 0 && (message.line != line + 5 || message.column != column))
        fail_msg("%s: at %u:%u instead of %u:%u", block, message.line, message.column, line + 5, column);
}

static KvSizes sizes_of(const KvPolicy *policy, const KvModel *model)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvPolicy complete = *policy;
    KvSizes sizes;

    complete.max_cache_tokens = policy->max_cache_tokens ? policy->max_cache_tokens : 4096;
    if (kv_sizes_compute(&small_gpu, model, &complete, &sizes, &detail))
        fail_msg("%s", detail.text);
    return sizes;
}

/* ---- presets ------------------------------------------------------------------------------------------------------------------- */

/* CACHE-SEMANTICS 1.2: DynamicCache moves sliding layers too, StaticCache does not; ours as the latter. */
static void presets_reach_the_store_with_their_own_defaults(void **state)
{
    static const struct {
        const char *strategy;
        KvGrowth growth;
        KvHome home, sliding_home;
        bool coded, sliding_coded;
    } expected[] = {
        {"dynamic", KV_GROWTH_DYNAMIC, KV_HOME_DEVICE, KV_HOME_DEVICE, false, false},
        {"static", KV_GROWTH_STATIC, KV_HOME_DEVICE, KV_HOME_DEVICE, false, false},
        {"offloaded", KV_GROWTH_DYNAMIC, KV_HOME_HOST, KV_HOME_HOST, false, false},
        {"offloaded_static", KV_GROWTH_STATIC, KV_HOME_HOST, KV_HOME_DEVICE, false, false},
        {"quantized", KV_GROWTH_DYNAMIC, KV_HOME_DEVICE, KV_HOME_DEVICE, true, true},
        {"offloaded_quantized", KV_GROWTH_DYNAMIC, KV_HOME_HOST, KV_HOME_DEVICE, true, false},
        {"none", KV_GROWTH_DYNAMIC, KV_HOME_DEVICE, KV_HOME_DEVICE, false, false},
    };
    KvModel model = model_of(mixed_layers, 4);

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(expected); i++)
        for (int exact = 0; exact < 2; exact++) {
            KvFormKind plain = exact ? KV_FORM_F32 : KV_FORM_F16;
            char block[160];
            KvPolicy policy;
            KvSizes sizes;

            (void)snprintf(block, sizeof(block), "      strategy: %s%s", expected[i].strategy,
                           expected[i].coded ? "\n      quant: {nbits: 4}" : "");
            policy = policy_of(block, exact);
            model.exact = exact;
            assert_int_equal(policy.strategy, kv_strategy_from_string(expected[i].strategy));
            assert_int_equal(policy.growth, expected[i].growth);
            assert_int_equal(policy.n_slots, 2);
            assert_int_equal(policy.transfer, KV_TRANSFER_AUTO);
            sizes = sizes_of(&policy, &model);
            for (uint32_t l = 0; l < 4; l++) {
                const KvSectionSizes *section = &sizes.sections[sizes.layers[l].section];
                bool sliding = mixed_layers[l].kind != KV_LAYER_FULL;

                assert_int_equal(section->home, sliding ? expected[i].sliding_home : expected[i].home);
                assert_int_equal(section->attend.form.kind,
                                 (sliding ? expected[i].sliding_coded : expected[i].coded) ? KV_FORM_LEAT : plain);
            }
            kv_sizes_deinit(&sizes);
        }
}

static void offload_only_non_sliding_is_each_offloaded_presets_own_until_it_is_written(void **state)
{
    static const char *const strategies[] = {"offloaded", "offloaded_static", "offloaded_quantized"};
    KvModel model = model_of(mixed_layers, 4);

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(strategies); i++)
        for (int written = 0; written < 2; written++) {
            char block[160];
            KvPolicy policy;
            KvSizes sizes;

            (void)snprintf(block, sizeof(block), "      strategy: %s\n      quant: {%s}\n      offload_only_non_sliding: %s", strategies[i],
                           i == 2 ? "nbits: 4" : "", written ? "true" : "false");
            policy = policy_of(block, false);
            assert_int_equal(policy.offload_only_non_sliding, written);
            sizes = sizes_of(&policy, &model);
            assert_int_equal(sizes.sections[sizes.layers[1].section].home, written ? KV_HOME_DEVICE : KV_HOME_HOST);
            assert_int_equal(sizes.sections[sizes.layers[3].section].home, written ? KV_HOME_DEVICE : KV_HOME_HOST);
            assert_int_equal(sizes.sections[sizes.layers[0].section].home, KV_HOME_HOST);
            kv_sizes_deinit(&sizes);
        }
    assert_refused("      strategy: static\n      offload_only_non_sliding: true", 0, 0, "offload_only_non_sliding has no meaning for strategy static");
    assert_refused("      strategy: quantized\n      offload_only_non_sliding: false", 0, 0, "has no meaning for strategy quantized");
    assert_refused("      offload_only_non_sliding: maybe", 1, 33, "write true or false");
}

static void max_cache_len_is_what_a_static_cache_reserves(void **state)
{
    KvModel model = model_of(mixed_layers, 4);
    KvPolicy policy = policy_of("      strategy: static\n      max_cache_len: 1000", false);
    KvSizes sizes = sizes_of(&policy, &model);
    uint64_t page = 32 * 2 * 192 * 2;

    (void)state;
    assert_int_equal(policy.max_cache_tokens, 1000);
    assert_int_equal(sizes.sections[sizes.layers[0].section].device_pages, 31); /* what is beyond is in the tail alone */
    assert_int_equal(sizes.sections[sizes.layers[0].section].page_bytes, 2 * page);
    assert_int_equal(policy_of("      strategy: dynamic\n      max_cache_len: 77", false).max_cache_tokens, 77);
    assert_int_equal(policy_of("      strategy: dynamic", false).max_cache_tokens, 0); /* the model's context */
    assert_refused("      max_cache_len: 0", 1, 22, "out of range");
    assert_refused("      max_cache_len: 16777217", 1, 22, "out of range");
    assert_refused("      max_cache_len: -4", 1, 22, "not a whole number");
    kv_sizes_deinit(&sizes);
}

/* ---- the recipe ------------------------------------------------------------------------------------------------------------------ */

static void every_part_of_a_recipe_is_a_key(void **state)
{
    const KvForm leat = kv_form_leat(KV_BITS_AUTO, KV_BITS_AUTO), hqq = kv_form_default(KV_FORM_HQQ), quanto = kv_form_default(KV_FORM_QUANTO),
                 fp8 = kv_form_default(KV_FORM_FP8);
    struct {
        const char *keys;
        KvForm form;
    } cases[40] = {{"", leat},
                   {"backend: leat", leat},
                   {"backend: hqq", hqq},
                   {"backend: quanto", quanto},
                   {"backend: fp8", fp8},
                   {"backend: hqq, axis_key: 1, axis_value: 1", hqq},
                   {"backend: quanto, axis_key: 0, axis_value: 0", quanto}};
    static const uint8_t bits[] = {8, 6, 5, 4, 3, 2};
    static char texts[40][64];
    size_t n = 7;

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(bits); i++) {
        (void)snprintf(texts[n], sizeof(texts[n]), "nbits_key: %u, nbits_value: %u", bits[i], bits[5 - i]);
        cases[n].form = leat;
        cases[n].form.k_bits = bits[i];
        cases[n].form.v_bits = bits[5 - i];
        cases[n].keys = texts[n];
        n++;
        (void)snprintf(texts[n], sizeof(texts[n]), "nbits: %u", bits[i]);
        cases[n].form = leat;
        cases[n].form.k_bits = cases[n].form.v_bits = bits[i];
        cases[n].keys = texts[n];
        n++;
    }
#define CASE(text, base, field, value)                                                                               \
    cases[n].keys = text;                                                                                            \
    cases[n].form = base;                                                                                            \
    cases[n++].form.field = value
    CASE("centre: none", leat, centre, KV_CENTRE_NONE);
    CASE("centre: before-rope", leat, centre, KV_CENTRE_BEFORE_ROPE);
    CASE("centre: after-rope", leat, centre, KV_CENTRE_AFTER_ROPE);
    CASE("rotate: false", leat, rotation, KV_ROTATION_NONE);
    CASE("rotate: true", leat, rotation, KV_ROTATION_HADAMARD);
    CASE("pair-scale: true", leat, pair_scale, true);
    CASE("levels: plain", leat, levels, KV_LEVELS_PLAIN);
    CASE("levels: searched", leat, levels, KV_LEVELS_SEARCHED);
    CASE("q_group_size: 16", leat, group_dims, 16);
    CASE("q_group_size: 128", leat, group_dims, 128);
    CASE("sinks: 0", leat, sink_tokens, 0);
    CASE("sinks: 32", leat, sink_tokens, 32);
    CASE("residual_length: 0", leat, tail_tokens, 0);
    CASE("residual_length: 512", leat, tail_tokens, 512);
    CASE("backend: hqq, rotate: true", hqq, rotation, KV_ROTATION_HADAMARD);
    CASE("backend: quanto, sinks: 4", quanto, sink_tokens, 4);
#undef CASE
    for (size_t i = 0; i < n; i++) {
        char block[160];
        KvPolicy policy;

        (void)snprintf(block, sizeof(block), "      quant: {%s}", cases[i].keys);
        policy = policy_of(block, false);
        if (!kv_form_equal(&policy.form, &cases[i].form))
            fail_msg("'%s' makes another form", cases[i].keys);
    }
}

static void values_that_no_recipe_has_are_refused_where_they_stand(void **state)
{
    static const struct {
        const char *key, *value, *words;
    } cases[] = {
        {"backend", "int8", "leat, hqq, quanto, fp8"},
        {"nbits", "7", "auto, 8, 6, 5, 4, 3, 2, 1"},
        {"nbits", "1", "leat keeps pages of 8, 6, 5, 4, 3 and 2 bits"},
        {"nbits_key", "0", "auto, 8, 6, 5, 4, 3, 2, 1"},
        {"nbits_value", "4.5", "auto, 8, 6, 5, 4, 3, 2, 1"},
        {"centre", "middle", "none, before-rope, after-rope"},
        {"rotate", "yes", "false, true"},
        {"pair-scale", "1", "false, true"},
        {"levels", "lloyd", "searched, plain"},
        {"q_group_size", "0", "out of range"},
        {"q_group_size", "17", "multiple of 16"},
        {"q_group_size", "144", "16 to 128"},
        {"q_group_size", "8", "16 to 128"},
        {"sinks", "33", "out of range: 0 to 32"},
        {"sinks", "-1", "not a whole number"},
        {"residual_length", "31", "multiple of 32"},
        {"residual_length", "544", "0 to 512"},
        {"axis_key", "2", "0, 1, -1"},
        {"nbits_layers", "x", "names no layer"},
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        char block[160];

        (void)snprintf(block, sizeof(block), "      quant:\n        %s: %s", cases[i].key, cases[i].value);
        assert_refused(block, 2, (uint32_t)strlen(cases[i].key) + 11, cases[i].words);
    }
}

/* ---- bits of layers --------------------------------------------------------------------------------------------------------------- */

static void layers_have_bits_of_their_own(void **state)
{
    KvModel model = model_of(NULL, 30);
    KvPolicy policy = policy_of("      quant: {nbits_key: 5, nbits_value: 4, nbits_layers: '28-29:6/3, 0-1:8 7:2/2'}", false), plain = policy, text;
    KvSizes sizes = sizes_of(&policy, &model);
    uint64_t expected = 0;
    char printed[KV_LAYER_BITS_TEXT], block[700];

    (void)state;
    for (uint32_t l = 0; l < 30; l++) {
        const KvSectionSizes *section = &sizes.sections[sizes.layers[l].section];
        uint8_t k = l < 2 ? 8 : l == 7 ? 2 : l >= 28 ? 6 : 5, v = l < 2 ? 8 : l == 7 ? 2 : l >= 28 ? 3 : 4;
        KvForm form = kv_form_leat(5, 4); /* bits are all that differs: the tail is everybody's */
        KvLayout layout;

        form.k_bits = k;
        form.v_bits = v;
        assert_true(kv_form_equal(&section->attend.form, &form));
        assert_int_equal(kv_layout(form, &model.shape, &layout, NULL), 0);
        assert_int_equal(section->layout.page_bytes, layout.page_bytes);
        expected += layout.page_bytes;
    }
    assert_int_equal(sizes.n_sections, 4);
    assert_int_equal(sizes.plan.host_bytes_per_token, expected / 32);
    kv_sizes_deinit(&sizes);
    plain.n_layer_bits = 0;
    assert_false(kv_layer_bits_equal(&policy, &plain));
    kv_layer_bits_to_text(policy.layer_bits, policy.n_layer_bits, printed, sizeof(printed));
    assert_string_equal(printed, "0-1:8/8 7:2/2 28-29:6/3");
    (void)snprintf(block, sizeof(block), "      quant: {nbits_key: 5, nbits_value: 4, nbits_layers: '%s'}", printed);
    text = policy_of(block, false);
    assert_true(kv_layer_bits_equal(&policy, &text));
    /* Automatic bits are those of the others. */
    text = policy_of("      quant: {nbits_layers: 0:8}", false);
    assert_int_equal(text.form.k_bits, KV_BITS_AUTO);
    assert_int_equal(text.n_layer_bits, 1);
}

static void bits_of_layers_are_refused_by_the_entry(void **state)
{
    static const struct {
        const char *keys, *words;
    } cases[] = {
        {"nbits_layers: '3-1:4'", "'3-1:4' is no range of layers"},
        {"nbits_layers: '0-1'", "'0-1' has no bits"},
        {"nbits_layers: '0:0'", "'0:0' has no bits"},
        {"nbits_layers: '0:9'", "'0:9' has no bits"},
        {"nbits_layers: '0:8/'", "'0:8/' has no bits of values"},
        {"nbits_layers: '0:8/8/8'", "has more than that"},
        {"nbits_layers: '0:8 all:4'", "'all:4' names no layer"},
        {"nbits_layers: '4096:8'", "names no layer of 0 to 4095"},
        {"nbits_layers: '99999999999:8'", "names no layer of 0 to 4095"},
        {"nbits_layers: '0-5:8 5:4'", "layer 5 has its bits twice"},
        {"nbits_layers: '4:8 0-9:4'", "layer 4 has its bits twice"},
        {"nbits_layers: '01:8'", "names no layer"},
        {"nbits_layers: '0:7'", "quant.nbits_layers '0:7/7'"},
        {"backend: quanto, nbits_layers: '0:4/8'", "quant.nbits_layers '0:4/8'"},
        {"backend: fp8, nbits_layers: '0:4'", "quant.nbits_layers '0:4/4'"},
    };
    KvModel model = model_of(NULL, 30);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    char block[700], many[600] = "";
    KvPolicy policy;
    KvPlan plan;

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        (void)snprintf(block, sizeof(block), "      quant: {%s}", cases[i].keys);
        assert_refused(block, 0, 0, cases[i].words);
    }
    for (uint32_t l = 0; l <= KV_MAX_LAYER_BITS; l++)
        (void)snprintf(many + strlen(many), sizeof(many) - strlen(many), "%u:4 ", 2 * l);
    (void)snprintf(block, sizeof(block), "      quant: {nbits_layers: '%s'}", many);
    assert_refused(block, 0, 0, "more than 32 ranges");
    assert_refused("      strategy: dynamic\n      quant: {nbits_layers: 0:8}", 0, 0, "nbits_layers has no meaning for strategy dynamic");
    assert_refused("      strategy: quantized\n      quant: {backend: hqq, compatibility: true, nbits_layers: 0:8}", 0, 0,
                   "nbits_layers has no meaning with quant.compatibility");
    policy = policy_of("      quant: {nbits: 4, nbits_layers: 29-30:8}", false);
    policy.max_cache_tokens = 512;
    assert_int_equal(kv_store_plan(&small_gpu, &model, &policy, &plan, &detail), -EINVAL);
    assert_non_null(strstr(detail.text, "layer 30 (quant.nbits_layers), the model's layers are 0 to 29"));
}

/* A windowed layer that stays in full precision has no bits. */
static void layers_that_are_not_coded_stay_as_they_are(void **state)
{
    KvModel model = model_of(mixed_layers, 4);
    KvPolicy policy = policy_of("      quant: {nbits: 4, nbits_layers: 0-1:8}", false);
    KvSizes sizes = sizes_of(&policy, &model);

    (void)state;
    assert_int_equal(sizes.sections[sizes.layers[0].section].attend.form.k_bits, 8);
    assert_int_equal(sizes.sections[sizes.layers[1].section].attend.form.kind, KV_FORM_F16);
    assert_int_equal(sizes.sections[sizes.layers[2].section].attend.form.k_bits, 4);
    kv_sizes_deinit(&sizes);
}

/* ---- compatibility mode ------------------------------------------------------------------------------------------------------------ */

static void compatibility_has_transformers_defaults_and_ranges(void **state)
{
    static const struct {
        const char *keys;
        KvQuantOptions options;
    } cases[] = {
        {"backend: quanto", {KV_BACKEND_QUANTO, 4, 0, 0, 64, 128}},
        {"backend: hqq", {KV_BACKEND_HQQ, 4, 0, 0, 64, 128}},
        {"backend: fp8", {KV_BACKEND_FP8, 8, 0, 0, 0, 0}},
        {"backend: quanto, nbits: 2, axis_key: -1, axis_value: 0, q_group_size: 4, residual_length: 1", {KV_BACKEND_QUANTO, 2, -1, 0, 4, 1}},
        {"backend: hqq, nbits: 1, axis_key: 1, axis_value: 1, q_group_size: 256, residual_length: 1000", {KV_BACKEND_HQQ, 1, 1, 1, 256, 1000}},
        {"backend: hqq, nbits: 3, residual_length: 0", {KV_BACKEND_HQQ, 3, 0, 0, 64, 0}},
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        char block[200];
        KvPolicy policy;

        (void)snprintf(block, sizeof(block), "      strategy: quantized\n      quant: {compatibility: true, %s}", cases[i].keys);
        policy = policy_of(block, false);
        assert_true(policy.is_compatible);
        if (!kv_quant_options_equal(&policy.compatible, &cases[i].options))
            fail_msg("'%s' makes other options", cases[i].keys);
    }
    assert_refused("      strategy: quantized\n      quant: {compatibility: true, backend: quanto, nbits: 8}", 0, 0, "nbits");
    assert_refused("      strategy: quantized\n      quant: {compatibility: true, backend: quanto, axis_key: 1}", 0, 0, "axis_key");
    assert_refused("      strategy: quantized\n      quant: {compatibility: true, backend: hqq, axis_value: -1}", 0, 0, "axis_value");
    assert_refused("      strategy: quantized\n      quant: {compatibility: true, backend: fp8, residual_length: 4}", 0, 0, "residual_length");
    assert_refused("      strategy: quantized\n      quant: {compatibility: true, backend: hqq, nbits_key: 4, nbits_value: 8}", 0, 0, "use quant.nbits");
    assert_refused("      strategy: offloaded_quantized\n      quant: {compatibility: true, backend: hqq}", 0, 0, "for strategy quantized");
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(presets_reach_the_store_with_their_own_defaults),
        cmocka_unit_test(offload_only_non_sliding_is_each_offloaded_presets_own_until_it_is_written),
        cmocka_unit_test(max_cache_len_is_what_a_static_cache_reserves),
        cmocka_unit_test(every_part_of_a_recipe_is_a_key),
        cmocka_unit_test(values_that_no_recipe_has_are_refused_where_they_stand),
        cmocka_unit_test(layers_have_bits_of_their_own),
        cmocka_unit_test(bits_of_layers_are_refused_by_the_entry),
        cmocka_unit_test(layers_that_are_not_coded_stay_as_they_are),
        cmocka_unit_test(compatibility_has_transformers_defaults_and_ranges),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
