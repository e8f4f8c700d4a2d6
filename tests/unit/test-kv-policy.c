/* SPDX-License-Identifier: Apache-2.0 */
/* Strategies, presets, and the plan of sizes within a device budget; no device. */

#include "cache/kv-sizes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static const GpuInfo small_gpu = {.name = "small", .max_allocation_bytes = 256u << 20};
static const float frequencies[32] = {1.0f, 0.5f};
static const KvModel smollm = {.n_layers = 30,
                               .shape = {.n_heads = 9, .n_kv_heads = 3, .k_head_dim = 64, .v_head_dim = 64, .rotary_dim = 64},
                               .scale = 0.125f,
                               .inv_freq = frequencies,
                               .max_rows = 512,
                               .max_sequences = 2};

static KvPolicy preset(KvStrategy strategy)
{
    KvPolicy policy = kv_policy_preset(strategy, false);

    policy.max_cache_tokens = 8192;
    return policy;
}

static KvPlan plan(const KvPolicy *policy)
{
    KvPlan result = {0};
    ErrorDetail detail = ERROR_DETAIL_NULL;

    if (kv_store_plan(&small_gpu, &smollm, policy, &result, &detail))
        fail_msg("%s", detail.text);
    return result;
}

static void strategy_names_go_both_ways(void **state)
{
    (void)state;
    for (int s = 0; s < KV_STRATEGY_X_MAX; s++)
        assert_int_equal(kv_strategy_from_string(kv_strategy_to_string((KvStrategy)s)), s);
    assert_string_equal(kv_strategy_to_string(KV_STRATEGY_OFFLOADED_QUANTIZED), "offloaded_quantized");
    assert_int_equal(kv_strategy_from_string("Dynamic"), KV_STRATEGY_X_INVALID);
    assert_int_equal(kv_strategy_from_string(NULL), KV_STRATEGY_X_INVALID);
    assert_null(kv_strategy_to_string(KV_STRATEGY_X_INVALID));
    assert_null(kv_strategy_to_string(KV_STRATEGY_X_MAX));
}

static void presets_are_points_on_the_three_axes(void **state)
{
    static const struct {
        KvStrategy strategy;
        KvGrowth growth;
        KvHome home;
        KvFormKind kind, exact_kind;
    } expected[] = {
        {KV_STRATEGY_DYNAMIC, KV_GROWTH_DYNAMIC, KV_HOME_DEVICE, KV_FORM_F16, KV_FORM_F32},
        {KV_STRATEGY_STATIC, KV_GROWTH_STATIC, KV_HOME_DEVICE, KV_FORM_F16, KV_FORM_F32},
        {KV_STRATEGY_OFFLOADED, KV_GROWTH_DYNAMIC, KV_HOME_HOST, KV_FORM_F16, KV_FORM_F32},
        {KV_STRATEGY_OFFLOADED_STATIC, KV_GROWTH_STATIC, KV_HOME_HOST, KV_FORM_F16, KV_FORM_F32},
        {KV_STRATEGY_QUANTIZED, KV_GROWTH_DYNAMIC, KV_HOME_DEVICE, KV_FORM_LEAT, KV_FORM_LEAT},
        {KV_STRATEGY_OFFLOADED_QUANTIZED, KV_GROWTH_DYNAMIC, KV_HOME_HOST, KV_FORM_LEAT, KV_FORM_LEAT},
        {KV_STRATEGY_NONE, KV_GROWTH_DYNAMIC, KV_HOME_DEVICE, KV_FORM_F16, KV_FORM_F32},
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(expected); i++) {
        KvPolicy policy = kv_policy_preset(expected[i].strategy, false);

        assert_int_equal(policy.strategy, expected[i].strategy);
        assert_int_equal(policy.growth, expected[i].growth);
        assert_int_equal(policy.home, expected[i].home);
        assert_int_equal(policy.form.kind, expected[i].kind);
        assert_int_equal(policy.n_slots, 2);
        assert_int_equal(policy.offload_only_non_sliding,
                         policy.strategy == KV_STRATEGY_OFFLOADED_STATIC || policy.strategy == KV_STRATEGY_OFFLOADED_QUANTIZED);
        assert_int_equal(policy.transfer, KV_TRANSFER_AUTO);
        assert_int_equal(kv_policy_preset(expected[i].strategy, true).form.kind, expected[i].exact_kind);
    }
    assert_int_equal(kv_policy_preset(KV_STRATEGY_QUANTIZED, true).form.k_bits, 5);
    assert_int_equal(kv_policy_preset(KV_STRATEGY_QUANTIZED, true).form.v_bits, 4);
}

static void plan_of_the_default_holds_one_layer_in_a_tile(void **state)
{
    KvPolicy policy = preset(KV_STRATEGY_OFFLOADED_QUANTIZED);
    KvPlan result = plan(&policy);
    uint64_t page = 3 * 2432;

    (void)state;
    assert_int_equal(result.n_slots, 2);
    assert_int_equal(result.tile_blocks, 64); /* both sequences, 1.87 MB each */
    assert_int_equal(result.host_bytes_per_token, 30 * page / 32);
    assert_int_equal(result.tail_bytes, 2 * 30 * 2 * 68 * 192 * 2);
    assert_int_equal(result.device_page_bytes, 0);
}

static void plan_shrinks_the_ring_into_its_budget(void **state)
{
    KvPolicy policy = preset(KV_STRATEGY_OFFLOADED_QUANTIZED);
    KvPlan roomy = plan(&policy), capped;
    uint64_t block = 8 * 3 * 2432, fixed = roomy.staging_bytes + roomy.tail_bytes - 2 * 64 * block;

    (void)state;
    for (uint64_t blocks = 1; blocks < 200; blocks++) {
        policy.device_budget_bytes = fixed + blocks * block + 100;
        capped = plan(&policy);
        assert_true(capped.staging_bytes + capped.tail_bytes <= policy.device_budget_bytes);
        assert_int_equal(capped.n_slots, blocks < 2 ? 1 : 2);
        assert_int_equal(capped.tile_blocks, MIN((uint64_t)64, blocks / capped.n_slots));
    }
}

static void plan_names_the_numbers_when_nothing_fits(void **state)
{
    KvPolicy policy = preset(KV_STRATEGY_OFFLOADED_QUANTIZED);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvPlan roomy = plan(&policy), result;

    (void)state;
    policy.device_budget_bytes = roomy.staging_bytes + roomy.tail_bytes - 2 * 64 * (uint64_t)58368 + 58367;
    assert_int_equal(kv_store_plan(&small_gpu, &smollm, &policy, &result, &detail), KV_E_DEVICE_MEMORY);
    assert_non_null(strstr(detail.text, "58367"));
    assert_non_null(strstr(detail.text, "58368"));
    policy.device_budget_bytes = 1000;
    assert_int_equal(kv_store_plan(&small_gpu, &smollm, &policy, &result, &detail), KV_E_DEVICE_MEMORY);
    assert_non_null(strstr(detail.text, "1000"));
}

static void plan_of_a_static_device_cache_counts_its_pages(void **state)
{
    KvPolicy policy = preset(KV_STRATEGY_STATIC);
    KvPlan result = plan(&policy);

    (void)state;
    assert_int_equal(result.n_slots, 0);
    assert_int_equal(result.device_page_bytes, (uint64_t)8192 * 30 * 2 * 192 * 2);
    policy.device_budget_bytes = result.tail_bytes + result.staging_bytes + result.device_page_bytes;
    assert_int_equal(plan(&policy).device_page_bytes, result.device_page_bytes);
    policy.device_budget_bytes--;
    assert_int_equal(kv_store_plan(&small_gpu, &smollm, &policy, &result, NULL), KV_E_DEVICE_MEMORY);
}

static uint64_t of_the_budget(const KvPlan *p)
{
    return p->staging_bytes + p->tail_bytes + p->device_page_bytes;
}

static void plan_within(const KvModel *model, KvPolicy policy, uint64_t more_bytes)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvPlan whole, within;

    if (kv_store_plan(&small_gpu, model, &policy, &whole, &detail))
        fail_msg("%s", detail.text);
    policy.device_budget_bytes = of_the_budget(&whole) + more_bytes;
    if (kv_store_plan(&small_gpu, model, &policy, &within, &detail))
        fail_msg("%s, %u tokens, %u sequences, %u slots, tiles of %u, %llu more: %s", kv_strategy_to_string(policy.strategy),
                 policy.max_cache_tokens, model->max_sequences, policy.n_slots, policy.tile_blocks, (unsigned long long)more_bytes, detail.text);
    assert_true(of_the_budget(&within) <= policy.device_budget_bytes);
}

/* Windows that stay on the device are whole blocks there, which is more than short ones hold: that must not be promised to the ring or to
 * resident pages. */
static void what_a_plan_needs_is_enough_of_a_budget(void **state)
{
    static const KvStrategy strategies[] = {KV_STRATEGY_DYNAMIC, KV_STRATEGY_STATIC, KV_STRATEGY_OFFLOADED, KV_STRATEGY_OFFLOADED_STATIC,
                                            KV_STRATEGY_OFFLOADED_QUANTIZED};
    static const uint32_t windows[] = {20, 512}, tokens[] = {64, 700, 8192}, slots[] = {1, 2, 4}, tiles[] = {0, 1, 3};
    static const uint64_t more[] = {0, 1024, 30000, 200000, 3000000, 20000000};
    enum { N_EACH = 3 };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(strategies) * 2 * N_EACH * N_EACH * N_EACH * 4 * N_ELEMENTS(more); i++) {
        size_t n = i;
        KvPolicy policy = kv_policy_preset(strategies[n % N_ELEMENTS(strategies)], false);
        KvModel model = smollm;
        const KvLayer layers[] = {{.kind = KV_LAYER_SLIDING, .window = windows[(n /= N_ELEMENTS(strategies)) % 2]}, {.kind = KV_LAYER_FULL}};

        model.layers = layers;
        model.n_layers = N_ELEMENTS(layers);
        model.max_rows = 64;
        policy.max_cache_tokens = tokens[(n /= 2) % N_EACH];
        policy.n_slots = slots[(n /= N_EACH) % N_EACH];
        policy.tile_blocks = tiles[(n /= N_EACH) % N_EACH];
        model.max_sequences = 1 + (uint32_t)((n /= N_EACH) % 4);
        policy.offload_only_non_sliding = true;
        plan_within(&model, policy, more[n / 4]);
    }
}

static void plan_refuses_nonsense_by_name(void **state)
{
    KvPolicy policy = preset(KV_STRATEGY_OFFLOADED_QUANTIZED);
    ErrorDetail detail;
    KvPlan result;

    (void)state;
    policy.n_slots = 9;
    assert_int_equal(kv_store_plan(&small_gpu, &smollm, &policy, &result, &detail), -EINVAL);
    assert_non_null(strstr(detail.text, "9"));
    policy = preset(KV_STRATEGY_OFFLOADED_QUANTIZED);
    policy.max_cache_tokens = 0;
    assert_int_equal(kv_store_plan(&small_gpu, &smollm, &policy, &result, &detail), -EINVAL);
    policy = preset(KV_STRATEGY_OFFLOADED_QUANTIZED);
    policy.transfer = KV_TRANSFER_ZERO_COPY;
    assert_int_equal(kv_store_plan(&small_gpu, &smollm, &policy, &result, &detail), -ENOTSUP);
    assert_non_null(strstr(detail.text, "small"));
    policy = preset(KV_STRATEGY_OFFLOADED_QUANTIZED);
    policy.form.k_bits = 7;
    assert_int_equal(kv_store_plan(&small_gpu, &smollm, &policy, &result, &detail), -EINVAL);
}

/* Its new tokens are committed there, so it must be exactly one. */
static void of_layers_that_share_one_past_the_last_is_marked(void **state)
{
    static const KvLayer layers[] = {{.kind = KV_LAYER_FULL}, {.kind = KV_LAYER_SHARED}, {.kind = KV_LAYER_SHARED}, {.kind = KV_LAYER_FULL}};
    KvPolicy policy = preset(KV_STRATEGY_DYNAMIC);
    KvModel model = smollm;
    KvSizes sizes;

    (void)state;
    model.layers = layers;
    model.n_layers = N_ELEMENTS(layers);
    assert_int_equal(kv_sizes_compute(&small_gpu, &model, &policy, &sizes, NULL), 0);
    for (uint32_t l = 0; l < N_ELEMENTS(layers); l++)
        assert_int_equal(sizes.layers[l].last, l >= 2);
    kv_sizes_deinit(&sizes);
}

/* A layer with a window is as long as its window, wherever it lives; on the device it is part of the budget before the ring is. */
static void plan_of_a_window_does_not_grow_with_the_context(void **state)
{
    static const KvLayer layers[] = {{.kind = KV_LAYER_FULL}, {.kind = KV_LAYER_SLIDING, .window = 512}};
    KvPolicy policy = preset(KV_STRATEGY_OFFLOADED);
    uint64_t page = 32 * 3 * (64 + 64) * 2;
    KvModel model = smollm;
    KvPlan moved, stays, more;

    (void)state;
    model.layers = layers;
    model.n_layers = 2;
    model.max_rows = 64;
    assert_int_equal(kv_store_plan(&small_gpu, &model, &policy, &moved, NULL), 0);
    assert_int_equal(moved.host_bytes_per_token, page / 32);
    assert_int_equal(moved.host_window_bytes, ((512 + 64 + 64) / 32 + 2) * page);
    assert_int_equal(moved.device_page_bytes, 0);
    policy.max_cache_tokens = 32768;
    assert_int_equal(kv_store_plan(&small_gpu, &model, &policy, &more, NULL), 0);
    assert_int_equal(more.host_window_bytes, moved.host_window_bytes);
    policy.offload_only_non_sliding = true;
    assert_int_equal(kv_store_plan(&small_gpu, &model, &policy, &stays, NULL), 0);
    assert_int_equal(stays.host_window_bytes, 0);
    assert_int_equal(stays.host_bytes_per_token, page / 32);
    assert_true(stays.device_page_bytes > 0 && stays.device_page_bytes <= 2 * moved.host_window_bytes);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(strategy_names_go_both_ways),
        cmocka_unit_test(presets_are_points_on_the_three_axes),
        cmocka_unit_test(plan_of_the_default_holds_one_layer_in_a_tile),
        cmocka_unit_test(plan_shrinks_the_ring_into_its_budget),
        cmocka_unit_test(plan_names_the_numbers_when_nothing_fits),
        cmocka_unit_test(plan_of_a_static_device_cache_counts_its_pages),
        cmocka_unit_test(what_a_plan_needs_is_enough_of_a_budget),
        cmocka_unit_test(plan_refuses_nonsense_by_name),
        cmocka_unit_test(plan_of_a_window_does_not_grow_with_the_context),
        cmocka_unit_test(of_layers_that_share_one_past_the_last_is_marked),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
