/* SPDX-License-Identifier: Apache-2.0 */
/* The `fp8` codec by its golden numbers (CACHE-SEMANTICS.md 13.2, the rows that the cases name) and by its edges. */

#include "quant/kv-fp8.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static const float golden[8] = {0.0f, 1.0f, -2.0f, 0.013f, 3.5f, -3.5f, 0.5f, 2.75f};

static void fp8_golden_values(void **state)
{
    static const uint8_t codes[8] = {0x00, 0x70, 0xf8, 0x3d, 0x7e, 0xfe, 0x68, 0x7b};
    KvTensorShape shape = {1, 1, 8, 1};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;
    float decoded[8], scale = kv_fp8_scale(KV_FP8_RULE_LIBRARY, golden, 8);
    uint64_t n_saturated = 0;

    (void)state;
    assert_true(scale == 0.0078125f);
    assert_int_equal(kv_fp8_encode_tensor(KV_DTYPE_F32, &shape, scale, golden, &tensor, &n_saturated, NULL), 0);
    assert_memory_equal(tensor->packed, codes, 8);
    assert_int_equal(kv_quantized_decode(tensor, decoded, NULL), 0);
    for (int i = 0; i < 8; i++)
        assert_true(i == 3 ? fabsf(decoded[i] - 0.012695f) < 1e-6f : decoded[i] == golden[i]);
    assert_int_equal(n_saturated, 0);
}

static void fp8_late_5_saturates_and_is_counted(void **state)
{
    static const float late = 5.0f;
    KvTensorShape shape = {1, 1, 8, 1};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL, *longer = NULL;
    float decoded[9];
    uint64_t n_saturated = 0;

    (void)state;
    assert_int_equal(kv_fp8_encode_tensor(KV_DTYPE_F32, &shape, kv_fp8_scale(KV_FP8_RULE_LIBRARY, golden, 8), golden, &tensor,
                                          &n_saturated, NULL), 0);
    assert_int_equal(kv_fp8_append(tensor, 1, &late, &longer, &n_saturated, NULL), 0);
    assert_int_equal(longer->packed[8], 0x7e);
    assert_int_equal(kv_quantized_decode(longer, decoded, NULL), 0);
    assert_true(decoded[8] == 3.5f);
    assert_int_equal(n_saturated, 1);
}

static void fp8_encoder_golden_values(void **state)
{
    static const struct {
        float value;
        uint8_t code;
    } rows[] = {
        {1.0f, 0x38},       {17.0f, 0x58},  {18.0f, 0x59},  {19.0f, 0x5a},    {0x1p-9f, 0x01}, {0x1p-10f, 0x00},   {0.0029296875f, 0x02},
        {0x1p-6f, 0x08},    {-0.0f, 0x80},  {448.0f, 0x7e}, {449.0f, 0x7e},   {470.0f, 0x7e},  {1e9f, 0x7e},       {-1e9f, 0xfe},
        {INFINITY, 0x7e},   {-INFINITY, 0xfe}, {NAN, 0x7f}, {FLT_MIN, 0x00},  {-FLT_MAX, 0xfe}, {0x1.fp-7f, 0x08}, {431.9f, 0x7d},
        {432.0f, 0x7e},
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++)
        assert_int_equal(kv_fp8_encode(rows[i].value), rows[i].code);
    assert_false(kv_fp8_saturates(448.0f));
    assert_false(kv_fp8_saturates(464.0f));
    assert_true(kv_fp8_saturates(465.0f) && kv_fp8_saturates(-INFINITY));
}

static void fp8_all_254_finite_codes_round_trip(void **state)
{
    uint32_t n = 0;

    (void)state;
    for (uint32_t code = 0; code < 256; code++) {
        float value = kv_fp8_decode((uint8_t)code);

        if ((code & 0x7f) == 0x7f) {
            assert_true(isnan(value));
            continue;
        }
        assert_int_equal(kv_fp8_encode(value), code);
        n++;
    }
    assert_int_equal(n, 254);
}

/* Every float between two codes goes to the nearer one, a tie to the even one. */
static void fp8_rounds_to_the_nearest_code(void **state)
{
    (void)state;
    for (uint8_t code = 0; code < 0x7e; code++) {
        float low = kv_fp8_decode(code), high = kv_fp8_decode((uint8_t)(code + 1)), middle = (low + high) / 2;

        assert_int_equal(kv_fp8_encode(middle), code % 2 ? code + 1 : code);
        assert_int_equal(kv_fp8_encode(nextafterf(middle, 0.0f)), code);
        assert_int_equal(kv_fp8_encode(nextafterf(middle, 500.0f)), code + 1);
        assert_int_equal(kv_fp8_encode(-nextafterf(middle, 500.0f)), 0x80 | (code + 1));
    }
}

static void fp8_zeros_first_get_scale_1_by_our_rule_and_the_smallest_by_the_librarys(void **state)
{
    static const float zeros[4] = {0.0f, -0.0f, 0.0f, 0.0f};

    (void)state;
    assert_true(kv_fp8_scale(KV_FP8_RULE_CAREFUL, zeros, 4) == 1.0f);
    assert_true(kv_fp8_scale(KV_FP8_RULE_LIBRARY, zeros, 4) == 1.1754944e-38f);
    /* what the library's rule does to a later 1 */
    assert_true(kv_fp8_decode(kv_fp8_encode(1.0f / FLT_MIN)) * FLT_MIN < 5.3e-36f);
}

static void fp8_scale_looks_past_what_is_not_finite_by_our_rule_only(void **state)
{
    static const float x[4] = {1.0f, INFINITY, NAN, -44.8f};

    (void)state;
    assert_true(fabsf(kv_fp8_scale(KV_FP8_RULE_CAREFUL, x, 4) - 0.1f) < 1e-6f);
    assert_true(isnan(kv_fp8_scale(KV_FP8_RULE_LIBRARY, x, 4)));
    assert_true(isinf(kv_fp8_scale(KV_FP8_RULE_LIBRARY, x, 2)));
}

static void fp8_appended_tokens_lie_behind_those_of_their_head(void **state)
{
    float first[2 * 2 * 1 * 2], more[2 * 2 * 2 * 2], decoded[2 * 2 * 3 * 2];
    KvTensorShape shape = {2, 2, 1, 2};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL, *longer = NULL, *part = NULL;
    uint32_t rows[2] = {1, 0};

    (void)state;
    for (int i = 0; i < 8; i++)
        first[i] = (float)(i + 1);
    for (int i = 0; i < 16; i++)
        more[i] = (float)(-i) / 4.0f;
    assert_int_equal(kv_fp8_encode_tensor(KV_DTYPE_F16, &shape, 1.0f, first, &tensor, NULL, NULL), 0);
    assert_int_equal(kv_fp8_append(tensor, 2, more, &longer, NULL, NULL), 0);
    assert_int_equal(kv_quantized_gather(longer, rows, 2, 2, &part, NULL), 0);
    assert_int_equal(kv_quantized_decode(part, decoded, NULL), 0);
    /* row 1, head 0: tokens (5, 6), then (-2, -2.25) */
    assert_true(decoded[0] == 5.0f && decoded[1] == 6.0f && decoded[2] == -2.0f && decoded[3] == -2.25f);
    assert_int_equal(kv_fp8_append(tensor, UINT32_MAX, more, &longer, NULL, NULL), -EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp8_golden_values),
        cmocka_unit_test(fp8_late_5_saturates_and_is_counted),
        cmocka_unit_test(fp8_encoder_golden_values),
        cmocka_unit_test(fp8_all_254_finite_codes_round_trip),
        cmocka_unit_test(fp8_rounds_to_the_nearest_code),
        cmocka_unit_test(fp8_zeros_first_get_scale_1_by_our_rule_and_the_smallest_by_the_librarys),
        cmocka_unit_test(fp8_scale_looks_past_what_is_not_finite_by_our_rule_only),
        cmocka_unit_test(fp8_appended_tokens_lie_behind_those_of_their_head),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
