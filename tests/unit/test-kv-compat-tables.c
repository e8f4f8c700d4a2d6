/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compatibility caches: the tables of the cache semantics, a case for each, named after it (section and row).  Numbers are positions,
 * from 0, unless a case says otherwise.
 */

#include "tests/lib/compat-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

static KvCompatLayerSpec sliding(uint32_t window)
{
    return (KvCompatLayerSpec){.kind = KV_COMPAT_SLIDING, .window = window};
}

static KvCompatLayerSpec static_sliding(uint32_t window, uint32_t max_tokens)
{
    return (KvCompatLayerSpec){.kind = KV_COMPAT_STATIC_SLIDING, .window = window, .max_tokens = max_tokens};
}

static const KvCompatLayerSpec dynamic = {.kind = KV_COMPAT_DYNAMIC};
static const KvCompatLayerSpec linear = {.linear = true};

/* One row of a trace: values are those of the rig (tokens from 1), so a position is one less. */
typedef struct Step {
    uint32_t q;
    const char *mask, *returned, *kept;
    uint32_t length;
} Step;

static void follow(Rig *rig, uint32_t layer, const Step *steps, size_t n_steps)
{
    for (size_t i = 0; i < n_steps; i++) {
        assert_string_equal(rig_mask(rig, layer, steps[i].q), steps[i].mask);
        assert_int_equal(rig_update(rig, layer, steps[i].q), 0);
        assert_string_equal(rig_returned(rig), steps[i].returned);
        assert_string_equal(rig_kept(rig, layer), steps[i].kept);
        assert_int_equal(rig_length(rig, layer), steps[i].length);
    }
}

static void trace(KvCompatLayerSpec spec, const Step *steps, size_t n_steps)
{
    Rig rig;

    rig_init(&rig, &spec, 1, 1);
    follow(&rig, 0, steps, n_steps);
    rig_deinit(&rig);
}

static void row_5_1_dynamic_sliding_w4_chunks_2_1_1_1(void **state)
{
    static const Step steps[] = {
        {2, "2 0", "1 2", "1 2", 2},
        {1, "3 0", "1 2 3", "1 2 3", 3},
        {1, "4 0", "1 2 3 4", "2 3 4", 4},
        {1, "4 1", "2 3 4 5", "3 4 5", 5},
    };

    (void)state;
    trace(sliding(4), steps, N_ELEMENTS(steps));
}

static void row_5_1_dynamic_sliding_w4_chunks_6_1_3_1(void **state)
{
    static const Step steps[] = {
        {6, "6 0", "1 2 3 4 5 6", "4 5 6", 6},
        {1, "4 3", "4 5 6 7", "5 6 7", 7},
        {3, "6 4", "5 6 7 8 9 10", "8 9 10", 10},
        {1, "4 7", "8 9 10 11", "9 10 11", 11},
    };

    (void)state;
    trace(sliding(4), steps, N_ELEMENTS(steps));
}

static void row_5_1_dynamic_sliding_w4_chunks_3_1_2_5(void **state)
{
    static const Step steps[] = {
        {3, "3 0", "1 2 3", "1 2 3", 3},
        {1, "4 0", "1 2 3 4", "2 3 4", 4},
        {2, "5 1", "2 3 4 5 6", "4 5 6", 6},
        {5, "8 3", "4 5 6 7 8 9 10 11", "9 10 11", 11},
    };

    (void)state;
    trace(sliding(4), steps, N_ELEMENTS(steps));
}

static void row_5_1_a_window_of_1_keeps_nothing(void **state)
{
    static const Step steps[] = {
        {2, "2 0", "1 2", "", 2},
        {1, "1 2", "3", "", 3},
        {3, "3 3", "4 5 6", "", 6},
    };

    (void)state;
    trace(sliding(1), steps, N_ELEMENTS(steps));
}

static void row_5_2_static_sliding_w4_chunks_2_1_1_1(void **state)
{
    static const Step steps[] = {
        {2, "4 0", "1 2 0 0", "1 2 0 0", 2},
        {1, "4 0", "1 2 3 0", "1 2 3 0", 3},
        {1, "4 0", "1 2 3 4", "1 2 3 4", 4},
        {1, "4 1", "2 3 4 5", "2 3 4 5", 5},
    };

    (void)state;
    trace(static_sliding(4, 16), steps, N_ELEMENTS(steps));
}

static void row_5_2_static_sliding_w4_chunks_6_1_3(void **state)
{
    static const Step steps[] = {
        {6, "6 0", "1 2 3 4 5 6", "3 4 5 6", 6},
        {1, "4 3", "4 5 6 7", "4 5 6 7", 7},
        {3, "6 4", "5 6 7 8 9 10", "7 8 9 10", 10},
    };

    (void)state;
    trace(static_sliding(4, 16), steps, N_ELEMENTS(steps));
}

static void row_5_2_case_2_from_a_part_filled_buffer(void **state)
{
    static const Step steps[] = {
        {3, "4 0", "1 2 3 0", "1 2 3 0", 3},
        {2, "5 0", "1 2 3 4 5", "2 3 4 5", 5},
    };

    (void)state;
    trace(static_sliding(4, 16), steps, N_ELEMENTS(steps));
}

static void row_5_2_less_room_than_the_window_is_refused_before_it_is_wrong(void **state)
{
    KvCompatLayerSpec spec = static_sliding(4, 3);
    Rig rig;

    (void)state;
    rig_init(&rig, &spec, 1, 1);
    assert_int_equal(rig_update(&rig, 0, 2), 0);
    assert_int_equal(rig_update(&rig, 0, 1), 0);
    assert_int_equal(rig_update(&rig, 0, 1), KV_COMPAT_E_FULL);
    assert_string_equal(rig_kept(&rig, 0), "1 2 3");
    assert_int_equal(rig_length(&rig, 0), 3);
    assert_int_equal(kv_compat_max_length(rig.cache, 0), 3);
    rig_deinit(&rig);
}

static void row_6_3_the_guide_6_tokens_w2_crop_3(void **state)
{
    KvCompatLayerSpec specs[] = {dynamic, sliding(2)};
    Rig rig;

    (void)state;
    rig_init(&rig, specs, 2, 1);
    kv_compat_record(rig.cache);
    assert_int_equal(rig_update(&rig, 0, 6), 0);
    assert_int_equal(rig_update(&rig, 1, 6), 0);
    assert_int_equal(kv_compat_crop(rig.cache, -3, NULL), 0);
    assert_string_equal(rig_kept(&rig, 0), "1 2 3");
    assert_string_equal(rig_kept(&rig, 1), "3");
    assert_int_equal(rig_length(&rig, 0), 3);
    assert_int_equal(rig_length(&rig, 1), 3);
    assert_string_equal(rig_mask(&rig, 1, 1), "2 2");
    rig_deinit(&rig);
}

static void row_6_3_recording_returns_what_the_mask_covers_and_keeps_all(void **state)
{
    static const Step steps[] = {
        {3, "3 0", "1 2 3", "1 2 3", 3},
        {1, "4 0", "1 2 3 4", "1 2 3 4", 4},
        {2, "5 1", "2 3 4 5 6", "1 2 3 4 5 6", 6},
        {5, "8 3", "4 5 6 7 8 9 10 11", "1 2 3 4 5 6 7 8 9 10 11", 11},
    };
    KvCompatLayerSpec spec = sliding(4);
    Rig rig;

    (void)state;
    rig_init(&rig, &spec, 1, 1);
    kv_compat_record(rig.cache);
    follow(&rig, 0, steps, N_ELEMENTS(steps));
    assert_int_equal(kv_compat_crop(rig.cache, -2, NULL), 0);
    assert_string_equal(rig_kept(&rig, 0), "7 8 9");
    assert_int_equal(rig_length(&rig, 0), 9);
    assert_int_equal(kv_compat_crop(rig.cache, 0, NULL), 0);
    assert_string_equal(rig_kept(&rig, 0), "7 8 9");
    assert_int_equal(rig_length(&rig, 0), 9);
    rig_deinit(&rig);
}

static void row_6_3_crop_0_keeps_w_minus_1_and_gives_the_memory_back_at_once(void **state)
{
    KvCompatLayerSpec specs[] = {sliding(4), linear};
    uint64_t before;
    Rig rig;

    (void)state;
    rig_init(&rig, specs, 2, 1);
    kv_compat_record(rig.cache);
    rig.kernels[1] = 4;
    assert_int_equal(rig_update(&rig, 0, 1000), 0);
    assert_int_equal(rig_conv(&rig, 1, 1000), 0);
    assert_int_equal(rig_state(&rig, 1, 1000, 1000), 0);
    before = kv_compat_bytes(rig.cache);
    assert_int_equal(kv_compat_crop(rig.cache, 0, NULL), 0);
    assert_string_equal(rig_kept(&rig, 0), "998 999 1000");
    assert_string_equal(rig_columns(&rig, 1), "997 998 999 1000");
    assert_string_equal(rig_recurrent(&rig, 1), "1000");
    assert_true(kv_compat_bytes(rig.cache) * 100 < before);
    rig_deinit(&rig);
}

static void row_6_3_deeper_than_recorded_is_an_error_and_changes_nothing(void **state)
{
    KvCompatLayerSpec specs[] = {dynamic, sliding(4)};
    _cleanup_(freep) char *before = NULL, *after = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Rig rig;

    (void)state;
    rig_init(&rig, specs, 2, 1);
    kv_compat_record(rig.cache);
    assert_int_equal(rig_update(&rig, 0, 11), 0);
    assert_int_equal(rig_update(&rig, 1, 11), 0);
    assert_int_equal(kv_compat_crop(rig.cache, 0, NULL), 0);
    before = rig_describe(&rig);
    assert_int_equal(kv_compat_crop(rig.cache, -2, &detail), KV_COMPAT_E_GONE);
    assert_non_null(strstr(detail.text, "layer 1"));
    assert_int_equal(kv_compat_crop(rig.cache, -12, NULL), KV_COMPAT_E_GONE);
    after = rig_describe(&rig);
    assert_string_equal(before, after);
    assert_int_equal(kv_compat_crop(rig.cache, -11, NULL), 0); /* nothing is needed of what is gone */
    assert_int_equal(rig_length(&rig, 1), 0);
    rig_deinit(&rig);
}

static void row_7_convolution_k4_first_call_shorter_than_the_kernel(void **state)
{
    KvCompatLayerSpec spec = linear;
    Rig rig;

    (void)state;
    rig_init(&rig, &spec, 1, 1);
    rig.kernels[0] = 4;
    assert_int_equal(rig_conv(&rig, 0, 2), 0);
    assert_string_equal(rig_returned(&rig), "0 0 1 2");
    assert_string_equal(rig_columns(&rig, 0), "0 0 1 2");
    assert_int_equal(rig_conv(&rig, 0, 1), 0);
    assert_string_equal(rig_returned(&rig), "0 0 1 2 3");
    assert_string_equal(rig_columns(&rig, 0), "0 1 2 3");
    assert_int_equal(rig_conv(&rig, 0, 5), 0);
    assert_string_equal(rig_returned(&rig), "0 1 2 3 4 5 6 7 8");
    assert_string_equal(rig_columns(&rig, 0), "5 6 7 8");
    rig_deinit(&rig);
}

static void row_7_a_short_first_input_fixes_the_kernel_size(void **state)
{
    KvCompatLayerSpec spec = linear;
    Rig rig;

    (void)state;
    rig_init(&rig, &spec, 1, 1);
    assert_int_equal(rig_conv(&rig, 0, 2), 0);
    assert_string_equal(rig_returned(&rig), "1 2");
    assert_int_equal(rig_conv(&rig, 0, 1), 0);
    assert_string_equal(rig_returned(&rig), "1 2 3");
    assert_string_equal(rig_columns(&rig, 0), "2 3");
    rig_deinit(&rig);
}

static void row_7_recorded_convolution_crops_and_pads_with_zeros(void **state)
{
    KvCompatLayerSpec spec = linear;
    Rig rig;

    (void)state;
    rig_init(&rig, &spec, 1, 1);
    rig.kernels[0] = 4;
    kv_compat_record(rig.cache);
    assert_int_equal(rig_conv(&rig, 0, 2), 0);
    assert_string_equal(rig_returned(&rig), "1 2");
    assert_int_equal(rig_conv(&rig, 0, 5), 0);
    assert_string_equal(rig_columns(&rig, 0), "1 2 3 4 5 6 7");
    assert_int_equal(kv_compat_crop(rig.cache, -1, NULL), 0);
    assert_string_equal(rig_columns(&rig, 0), "3 4 5 6");
    assert_int_equal(kv_compat_crop(rig.cache, -2, NULL), KV_COMPAT_E_GONE);
    assert_string_equal(rig_columns(&rig, 0), "3 4 5 6");
    kv_compat_reset(rig.cache);
    assert_int_equal(rig_conv(&rig, 0, 5), 0); /* 8 .. 12 */
    assert_int_equal(kv_compat_crop(rig.cache, -3, NULL), 0);
    assert_string_equal(rig_columns(&rig, 0), "0 0 8 9");
    rig_deinit(&rig);
}

static void row_7_crop_without_recording_and_positive_crop_are_errors(void **state)
{
    KvCompatLayerSpec spec = linear;
    Rig rig;

    (void)state;
    rig_init(&rig, &spec, 1, 1);
    assert_int_equal(rig_conv(&rig, 0, 4), 0);
    assert_int_equal(kv_compat_crop(rig.cache, 0, NULL), KV_COMPAT_E_NOT_RECORDING);
    kv_compat_record(rig.cache);
    assert_int_equal(kv_compat_crop(rig.cache, 1, NULL), KV_COMPAT_E_VALUE);
    assert_int_equal(kv_compat_crop(rig.cache, 0, NULL), 0);
    rig_deinit(&rig);
}

static void row_7_recurrent_states_go_back_exactly_while_recording(void **state)
{
    KvCompatLayerSpec spec = linear;
    Rig rig;

    (void)state;
    rig_init(&rig, &spec, 1, 2);
    assert_int_equal(rig_state(&rig, 0, 3, 1), 0);
    kv_compat_record(rig.cache);
    assert_int_equal(rig_state(&rig, 0, 4, 4), 0); /* after 4 .. 7 tokens */
    assert_string_equal(rig_recurrent(&rig, 0), "7 1007");
    assert_int_equal(kv_compat_crop(rig.cache, -2, NULL), 0);
    assert_string_equal(rig_recurrent(&rig, 0), "5 1005");
    assert_int_equal(kv_compat_crop(rig.cache, -1, NULL), KV_COMPAT_E_GONE); /* not recorded since */
    assert_int_equal(rig_state(&rig, 0, 4, 1), 0); /* one state for four tokens: no way to end between */
    assert_int_equal(kv_compat_crop(rig.cache, -2, NULL), KV_COMPAT_E_GONE);
    assert_int_equal(kv_compat_crop(rig.cache, -4, NULL), 0);
    assert_string_equal(rig_recurrent(&rig, 0), "5 1005");
    assert_int_equal(kv_compat_crop(rig.cache, -5, NULL), 0); /* the beginning is known: no state */
    assert_string_equal(rig_recurrent(&rig, 0), "");
    assert_false(kv_compat_has_previous_state(rig.cache));
    rig_deinit(&rig);
}

static void row_7_reset_answers_none_afterwards(void **state)
{
    KvCompatLayerSpec spec = linear;
    KvTensor tensor;
    Rig rig;

    (void)state;
    rig_init(&rig, &spec, 1, 1);
    assert_int_equal(rig_conv(&rig, 0, 4), 0);
    assert_int_equal(rig_state(&rig, 0, 4, 1), 0);
    assert_true(kv_compat_has_previous_state(rig.cache));
    kv_compat_reset(rig.cache);
    assert_false(kv_compat_has_previous_state(rig.cache));
    assert_int_equal(kv_compat_conv(rig.cache, 0, 0, &tensor, NULL), KV_COMPAT_E_NO_STATE);
    assert_int_equal(kv_compat_recurrent(rig.cache, 0, 0, &tensor, NULL), KV_COMPAT_E_NO_STATE);
    rig_deinit(&rig);
}

static void row_7_states_are_for_linear_layers_only(void **state)
{
    KvCompatLayerSpec specs[] = {dynamic, linear};
    Rig rig;

    (void)state;
    rig_init(&rig, specs, 2, 1);
    assert_int_equal(rig_conv(&rig, 0, 1), KV_COMPAT_E_NO_STATE);
    assert_int_equal(rig_state(&rig, 0, 1, 1), KV_COMPAT_E_NO_STATE);
    assert_int_equal(rig_update(&rig, 1, 1), KV_COMPAT_E_NO_STATE);
    rig_deinit(&rig);
}

static void row_9_1_next_offloadable_of_dyn_linear_sliding_dummy_hybrid_dyn(void **state)
{
    KvCompatLayerSpec specs[] = {dynamic, linear, sliding(4), {0}, {.kind = KV_COMPAT_DYNAMIC, .linear = true}, dynamic};
    static const int32_t only[] = {4, 4, 4, 4, 5, 0}, all[] = {2, 2, 4, 4, 5, 0};
    Rig rig;

    (void)state;
    rig_init(&rig, specs, N_ELEMENTS(specs), 1);
    for (uint32_t i = 0; i < N_ELEMENTS(specs); i++) {
        assert_int_equal(kv_compat_next_offloadable(rig.cache, i, true), only[i]);
        assert_int_equal(kv_compat_next_offloadable(rig.cache, i, false), all[i]);
    }
    rig_deinit(&rig);
}

static void row_9_2_nothing_to_offload_is_valid_and_one_layer_follows_itself(void **state)
{
    KvCompatLayerSpec none[] = {sliding(4), linear, {0}}, one[] = {linear, sliding(4), dynamic};
    Rig rig;

    (void)state;
    rig_init(&rig, none, 3, 1);
    assert_int_equal(kv_compat_next_offloadable(rig.cache, 0, true), -1);
    assert_int_equal(kv_compat_next_offloadable(rig.cache, 0, false), 0);
    rig_deinit(&rig);
    rig_init(&rig, one, 3, 1);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(kv_compat_next_offloadable(rig.cache, i, true), 2);
    rig_deinit(&rig);
}

/* ---- 13.1: the scalar traces; values as they stand there ------------------------------------------------------------------ */

/* Gives these values to a layer of one row and head; what comes back, as text. */
static int give(KvCompat *cache, uint32_t layer, const char *values, char *ret, size_t size)
{
    float given[8];
    uint32_t n = 0;
    KvTensor k, got, other;
    int r;

    for (char *end; *values; values = end) {
        given[n++] = strtof(values, &end);
        if (end == values)
            fail_msg("no number: %s", values);
    }
    k = (KvTensor){given, 1, 1, n, 1, n};
    r = kv_compat_update(cache, layer, &k, &k, &got, &other, NULL);
    ret[0] = '\0';
    for (uint32_t t = 0; r == 0 && t < got.n_tokens; t++)
        snprintf(ret + strlen(ret), size - strlen(ret), "%s%g", t > 0 ? " " : "", (double)*kv_tensor_at(&got, 0, 0, t));
    return r;
}

static void given_returns(Rig *rig, uint32_t layer, const char *values, const char *returned, const char *stored)
{
    char got[256];

    assert_int_equal(give(rig->cache, layer, values, got, sizeof(got)), 0);
    assert_string_equal(got, returned);
    assert_string_equal(rig_kept(rig, layer), stored);
}

static void row_13_1_static_of_4(void **state)
{
    KvCompatLayerSpec spec = {.kind = KV_COMPAT_STATIC, .max_tokens = 4};
    char got[256];
    Rig rig;

    (void)state;
    rig_init(&rig, &spec, 1, 1);
    given_returns(&rig, 0, "1 2", "1 2 0 0", "1 2 0 0");
    given_returns(&rig, 0, "3", "1 2 3 0", "1 2 3 0");
    given_returns(&rig, 0, "4", "1 2 3 4", "1 2 3 4");
    assert_int_equal(give(rig.cache, 0, "5", got, sizeof(got)), KV_COMPAT_E_FULL);
    assert_int_equal(rig_length(&rig, 0), 4);
    assert_string_equal(rig_kept(&rig, 0), "1 2 3 4");
    rig_deinit(&rig);
}

static void row_13_1_static_sliding_w4(void **state)
{
    KvCompatLayerSpec spec = static_sliding(4, 16);
    Rig rig;

    (void)state;
    rig_init(&rig, &spec, 1, 1);
    given_returns(&rig, 0, "1 2 3 4", "1 2 3 4", "1 2 3 4");
    given_returns(&rig, 0, "5", "2 3 4 5", "2 3 4 5");
    given_returns(&rig, 0, "6", "3 4 5 6", "3 4 5 6");
    rig_deinit(&rig);
    rig_init(&rig, &spec, 1, 1);
    given_returns(&rig, 0, "1 2 3 4 5 6", "1 2 3 4 5 6", "3 4 5 6");
    rig_deinit(&rig);
}

static void row_13_1_mixed_full_and_sliding_w2(void **state)
{
    KvCompatLayerSpec specs[] = {{.kind = KV_COMPAT_STATIC, .max_tokens = 4}, static_sliding(2, 10)};
    Rig rig;

    (void)state;
    rig_init(&rig, specs, 2, 1);
    given_returns(&rig, 0, "1 2 3", "1 2 3 0", "1 2 3 0");
    given_returns(&rig, 1, "10 20 30", "10 20 30", "20 30");
    given_returns(&rig, 1, "50", "30 50", "30 50");
    given_returns(&rig, 1, "60 70", "50 60 70", "60 70");
    rig_deinit(&rig);
}

static void row_13_1_static_sliding_w3(void **state)
{
    KvCompatLayerSpec spec = static_sliding(3, 10);
    Rig rig;

    (void)state;
    rig_init(&rig, &spec, 1, 1);
    given_returns(&rig, 0, "10 20", "10 20 0", "10 20 0");
    given_returns(&rig, 0, "30 40", "10 20 30 40", "20 30 40");
    rig_deinit(&rig);
}

static void row_13_1_two_dynamic_layers_stay_independent(void **state)
{
    KvCompatLayerSpec specs[] = {dynamic, dynamic};
    Rig rig;

    (void)state;
    rig_init(&rig, specs, 2, 1);
    given_returns(&rig, 0, "1 2", "1 2", "1 2");
    given_returns(&rig, 1, "10", "10", "10");
    given_returns(&rig, 0, "3", "1 2 3", "1 2 3");
    given_returns(&rig, 1, "20 30", "10 20 30", "10 20 30");
    assert_int_equal(rig_length(&rig, 0), 3);
    assert_int_equal(rig_length(&rig, 1), 3);
    rig_deinit(&rig);
}

static void row_13_1_mha_gqa_and_mqa_store_key_value_heads(void **state)
{
    static const uint32_t n_kv_heads[] = {8, 2, 1};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(n_kv_heads); i++) {
        static float values[2 * 8 * 3 * 16];
        KvTensor k = {values, 2, n_kv_heads[i], 3, 16, 3}, v = {values, 2, n_kv_heads[i], 3, 8, 3}, got_k, got_v;
        KvCompatLayerSpec spec = dynamic;
        Rig rig;

        rig_init(&rig, &spec, 1, 2);
        assert_int_equal(kv_compat_update(rig.cache, 0, &k, &v, &got_k, &got_v, NULL), 0);
        assert_int_equal(got_k.n_rows, 2);
        assert_int_equal(got_k.n_heads, n_kv_heads[i]);
        assert_int_equal(got_k.n_tokens, 3);
        assert_int_equal(got_k.width, 16); /* K and V of different widths */
        assert_int_equal(got_v.width, 8);
        k.n_heads = v.n_heads = n_kv_heads[i] + 1;
        assert_int_equal(kv_compat_update(rig.cache, 0, &k, &v, &got_k, &got_v, NULL), KV_COMPAT_E_SHAPE);
        rig_deinit(&rig);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(row_5_1_dynamic_sliding_w4_chunks_2_1_1_1),
        cmocka_unit_test(row_5_1_dynamic_sliding_w4_chunks_6_1_3_1),
        cmocka_unit_test(row_5_1_dynamic_sliding_w4_chunks_3_1_2_5),
        cmocka_unit_test(row_5_1_a_window_of_1_keeps_nothing),
        cmocka_unit_test(row_5_2_static_sliding_w4_chunks_2_1_1_1),
        cmocka_unit_test(row_5_2_static_sliding_w4_chunks_6_1_3),
        cmocka_unit_test(row_5_2_case_2_from_a_part_filled_buffer),
        cmocka_unit_test(row_5_2_less_room_than_the_window_is_refused_before_it_is_wrong),
        cmocka_unit_test(row_6_3_the_guide_6_tokens_w2_crop_3),
        cmocka_unit_test(row_6_3_recording_returns_what_the_mask_covers_and_keeps_all),
        cmocka_unit_test(row_6_3_crop_0_keeps_w_minus_1_and_gives_the_memory_back_at_once),
        cmocka_unit_test(row_6_3_deeper_than_recorded_is_an_error_and_changes_nothing),
        cmocka_unit_test(row_7_convolution_k4_first_call_shorter_than_the_kernel),
        cmocka_unit_test(row_7_a_short_first_input_fixes_the_kernel_size),
        cmocka_unit_test(row_7_recorded_convolution_crops_and_pads_with_zeros),
        cmocka_unit_test(row_7_crop_without_recording_and_positive_crop_are_errors),
        cmocka_unit_test(row_7_recurrent_states_go_back_exactly_while_recording),
        cmocka_unit_test(row_7_reset_answers_none_afterwards),
        cmocka_unit_test(row_7_states_are_for_linear_layers_only),
        cmocka_unit_test(row_9_1_next_offloadable_of_dyn_linear_sliding_dummy_hybrid_dyn),
        cmocka_unit_test(row_9_2_nothing_to_offload_is_valid_and_one_layer_follows_itself),
        cmocka_unit_test(row_13_1_static_of_4),
        cmocka_unit_test(row_13_1_static_sliding_w4),
        cmocka_unit_test(row_13_1_mixed_full_and_sliding_w2),
        cmocka_unit_test(row_13_1_static_sliding_w3),
        cmocka_unit_test(row_13_1_two_dynamic_layers_stay_independent),
        cmocka_unit_test(row_13_1_mha_gqa_and_mqa_store_key_value_heads),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
