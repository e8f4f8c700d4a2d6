/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters of quantised caches: defaults, and every row of CACHE-SEMANTICS.md 8.6 that is ours to check. */

#include "quant/kv-quant-options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static void quant_options_default_to_quanto_4_bits_axis_0_groups_of_64_and_128_tokens(void **state)
{
    KvQuantRequest request = {0};
    KvQuantOptions o;

    (void)state;
    assert_int_equal(kv_quant_options(&request, &o, NULL), 0);
    assert_int_equal(o.backend, KV_BACKEND_QUANTO);
    assert_int_equal(o.nbits, 4);
    assert_int_equal(o.axis_key, 0);
    assert_int_equal(o.axis_value, 0);
    assert_int_equal(o.q_group_size, 64);
    assert_int_equal(o.residual_length, 128);
}

static void quant_options_take_what_each_backend_has(void **state)
{
    static const int8_t hqq_bits[] = {1, 2, 3, 4, 8}, quanto_bits[] = {2, 4};
    KvQuantOptions o;

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(hqq_bits); i++)
        for (int axis = 0; axis < 2; axis++) {
            KvQuantRequest request = {.backend = "hqq", .has_nbits = true, .nbits = hqq_bits[i], .has_axis_key = true, .axis_key = axis,
                                      .has_residual_length = true};

            assert_int_equal(kv_quant_options(&request, &o, NULL), 0);
            assert_int_equal(o.nbits, hqq_bits[i]);
            assert_int_equal(o.axis_key, axis);
            assert_int_equal(o.residual_length, 0);
        }
    for (size_t i = 0; i < N_ELEMENTS(quanto_bits); i++)
        for (int axis = -1; axis < 1; axis++) {
            KvQuantRequest request = {.backend = "quanto", .has_nbits = true, .nbits = quanto_bits[i], .has_axis_value = true,
                                      .axis_value = axis};

            assert_int_equal(kv_quant_options(&request, &o, NULL), 0);
            assert_int_equal(o.axis_value, axis);
        }
    assert_int_equal(kv_quant_options(&(KvQuantRequest){.backend = "fp8"}, &o, NULL), 0);
    assert_int_equal(o.backend, KV_BACKEND_FP8);
}

static void quant_options_refuse_by_key_value_and_what_is_allowed(void **state)
{
    static const struct {
        KvQuantRequest request;
        const char *texts[3];
    } rows[] = {
        {{.backend = "x"}, {"'x'", "quanto", "fp8"}},
        {{.backend = ""}, {"''", "quanto", "fp8"}},
        {{.backend = "quanto", .has_nbits = true, .nbits = 8}, {"nbits 8", "quanto", "2 or 4"}},
        {{.has_axis_key = true, .axis_key = 1}, {"axis_key 1", "quanto", "0 or -1"}},
        {{.has_axis_value = true, .axis_value = 2}, {"axis_value 2", "quanto", "0 or -1"}},
        {{.backend = "hqq", .has_nbits = true, .nbits = 5}, {"nbits 5", "hqq", "1, 2, 3, 4 or 8"}},
        {{.backend = "hqq", .has_nbits = true, .nbits = INT64_MAX}, {"nbits 9223372036854775807", "hqq", "8"}},
        {{.backend = "hqq", .has_axis_key = true, .axis_key = -1}, {"axis_key -1", "hqq", "0 or 1"}},
        {{.backend = "hqq", .has_axis_value = true, .axis_value = -1}, {"axis_value -1", "hqq", "0 or 1"}},
        {{.has_q_group_size = true, .q_group_size = 0}, {"q_group_size 0", "from 1", "1048576"}},
        {{.has_residual_length = true, .residual_length = -1}, {"residual_length -1", "from 0", "to"}},
        {{.backend = "fp8", .has_nbits = true, .nbits = 8}, {"nbits", "fp8", "quanto"}},
        {{.backend = "fp8", .has_axis_key = true, .has_residual_length = true}, {"axis_key, residual_length", "fp8", "hqq"}},
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        KvQuantOptions o = {.nbits = 77};
        ErrorDetail detail = ERROR_DETAIL_NULL;

        assert_int_equal(kv_quant_options(&rows[i].request, &o, &detail), -EINVAL);
        assert_int_equal(o.nbits, 77);
        for (int t = 0; t < 3; t++)
            if (!strstr(detail.text, rows[i].texts[t]))
                fail_msg("row %zu: '%s' does not say '%s'", i, detail.text, rows[i].texts[t]);
    }
}

static void quant_layer_types_other_than_full_attention_are_named_once(void **state)
{
    static const char *const full[] = {"full_attention", "full_attention"};
    static const char *const mixed[] = {"sliding_attention", "full_attention", "linear_attention", "sliding_attention"};
    ErrorDetail detail = ERROR_DETAIL_NULL;

    (void)state;
    assert_int_equal(kv_quant_check_layer_types(full, 2, &detail), 0);
    assert_int_equal(kv_quant_check_layer_types(mixed, 4, &detail), -EINVAL);
    assert_non_null(strstr(detail.text, "type sliding_attention, linear_attention:"));
}

static void quant_backends_have_names(void **state)
{
    (void)state;
    for (int i = 0; i < KV_BACKEND_X_MAX; i++)
        assert_int_equal(kv_backend_from_string(kv_backend_to_string((KvBackend)i)), i);
    assert_int_equal(kv_backend_from_string("leat"), KV_BACKEND_X_INVALID);
    assert_null(kv_backend_to_string(KV_BACKEND_X_INVALID));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quant_options_default_to_quanto_4_bits_axis_0_groups_of_64_and_128_tokens),
        cmocka_unit_test(quant_options_take_what_each_backend_has),
        cmocka_unit_test(quant_options_refuse_by_key_value_and_what_is_allowed),
        cmocka_unit_test(quant_layer_types_other_than_full_attention_are_named_once),
        cmocka_unit_test(quant_backends_have_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
