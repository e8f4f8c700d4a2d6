/* SPDX-License-Identifier: Apache-2.0 */
/* The `quanto` codec by its golden numbers (CACHE-SEMANTICS.md 13.2, the rows that the cases name) and by its edges. */

#include "quant/kv-quanto.h"

#include "quant/kv-pack.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static const float golden[8] = {-0.50f, -0.23f, 0.02f, 0.11f, 0.21f, 0.37f, 0.62f, 1.00f};

/* The golden group in a number type. */
static void golden_group(KvDtype dtype, float *ret)
{
    for (int i = 0; i < 8; i++)
        ret[i] = kv_dtype_round(dtype, golden[i]);
}

static void expect_group(KvDtype dtype, uint8_t nbits, float scale, const uint8_t *codes, const float *values)
{
    float x[8], s, z;
    uint8_t q[8];

    golden_group(dtype, x);
    kv_quanto_group(dtype, nbits, x, 8, q, &s, &z);
    assert_true(fabsf(s - scale) <= 1e-5f * scale); /* the golden scales have six digits */
    assert_true(z == 0.5f);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(q[i], codes[i]);
        if (values)
            assert_true(fabsf(kv_quanto_value(dtype, q[i], s, z) - values[i]) < 1e-6f);
    }
}

static const uint8_t codes_of_4_bits[8] = {0, 3, 5, 6, 7, 9, 11, 15};

static void quanto_4_bit_golden_group(void **state)
{
    static const float values[8] = {-0.5f, -0.2f, 0.0f, 0.1f, 0.2f, 0.4f, 0.6f, 1.0f};

    (void)state;
    expect_group(KV_DTYPE_F32, 4, 0.1f, codes_of_4_bits, values);
}

static void quanto_2_bit_golden_group(void **state)
{
    static const uint8_t codes[8] = {0, 1, 1, 1, 1, 2, 2, 3};
    static const float values[8] = {-0.5f, 0.0f, 0.0f, 0.0f, 0.0f, 0.5f, 0.5f, 1.0f};

    (void)state;
    expect_group(KV_DTYPE_F32, 2, 0.5f, codes, values);
}

static void quanto_4_bit_golden_group_in_16_bit_types(void **state)
{
    (void)state;
    expect_group(KV_DTYPE_F16, 4, 0.0999756f, codes_of_4_bits, NULL);
    expect_group(KV_DTYPE_BF16, 4, 0.100098f, codes_of_4_bits, NULL);
}

static void quanto_packing_puts_the_first_block_of_rows_in_the_low_bits(void **state)
{
    static const uint8_t four[4] = {1, 2, 3, 4}, two[4] = {0, 1, 2, 3};
    uint8_t packed[2], codes[4];

    (void)state;
    kv_pack_codes(KV_PACK_LOW_FIRST, 4, four, 4, 1, packed);
    assert_int_equal(packed[0], 1 | 3 << 4);
    assert_int_equal(packed[1], 2 | 4 << 4);
    kv_unpack_codes(KV_PACK_LOW_FIRST, 4, packed, 4, 1, codes);
    assert_memory_equal(codes, four, 4);
    kv_pack_codes(KV_PACK_LOW_FIRST, 2, two, 4, 1, packed);
    assert_int_equal(packed[0], 0 | 1 << 2 | 2 << 4 | 3 << 6);
}

static void quanto_rows_that_do_not_fill_a_byte_leave_zero_bits(void **state)
{
    static const uint8_t five[5] = {1, 2, 3, 0, 1};
    uint8_t packed[2], codes[5];
    uint64_t bytes;

    (void)state;
    assert_true(kv_packed_bytes(2, 5, 1, &bytes));
    assert_int_equal(bytes, 2);
    kv_pack_codes(KV_PACK_LOW_FIRST, 2, five, 5, 1, packed);
    assert_int_equal(packed[0], 1 | 3 << 2 | 1 << 4);
    assert_int_equal(packed[1], 2);
    kv_unpack_codes(KV_PACK_LOW_FIRST, 2, packed, 5, 1, codes);
    assert_memory_equal(codes, five, 5);
}

static void quanto_constant_group_is_exact(void **state)
{
    float x[8], s, z;
    uint8_t q[8];

    (void)state;
    for (int i = 0; i < 8; i++)
        x[i] = 0.3f;
    kv_quanto_group(KV_DTYPE_F32, 4, x, 8, q, &s, &z);
    assert_true(s == 0.0f);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(q[i], 0);
        assert_true(kv_quanto_value(KV_DTYPE_F32, q[i], s, z) == 0.3f);
    }
}

static void quanto_nan_stays_in_its_group(void **state)
{
    float x[16], decoded[16];
    KvQuantizeOptions options = {4, 0, 8, KV_DTYPE_F32};
    KvTensorShape shape = {1, 1, 2, 8};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;

    (void)state;
    for (int i = 0; i < 16; i++)
        x[i] = golden[i % 8];
    x[3] = NAN;
    assert_int_equal(kv_quanto_encode(&options, &shape, x, &tensor, NULL), 0);
    assert_int_equal(kv_quantized_decode(tensor, decoded, NULL), 0);
    for (int i = 0; i < 16; i++)
        assert_true(i < 8 ? isnan(decoded[i]) != 0 : fabsf(decoded[i] - x[i]) <= 0.051f);
}

static void quanto_single_group_on_axis_0_is_exact_value_by_value(void **state)
{
    float decoded[8];
    KvQuantizeOptions options = {4, 0, 8, KV_DTYPE_F32};
    KvTensorShape shape = {1, 1, 1, 8};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;

    (void)state;
    assert_int_equal(kv_quanto_encode(&options, &shape, golden, &tensor, NULL), 0);
    assert_int_equal(tensor->n_groups, 8);
    assert_int_equal(kv_quantized_decode(tensor, decoded, NULL), 0);
    assert_memory_equal(decoded, golden, sizeof(golden));
}

/* axis -1: group c = d * A + a holds channel d of rows a * g ... (a + 1) * g - 1 */
static void quanto_axis_minus_1_groups_one_channel_of_consecutive_tokens(void **state)
{
    float x[32], decoded[32];
    KvQuantizeOptions options = {4, -1, 4, KV_DTYPE_F32};
    KvTensorShape shape = {1, 2, 4, 4};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;

    (void)state;
    for (int i = 0; i < 32; i++)
        x[i] = (float)((i * 7) % 13) * (float)(1 + i % 4);
    assert_int_equal(kv_quanto_encode(&options, &shape, x, &tensor, NULL), 0);
    assert_int_equal(tensor->n_groups, 8);
    for (uint32_t d = 0; d < 4; d++)
        for (uint32_t a = 0; a < 2; a++) {
            float low = INFINITY, high = -INFINITY;

            for (uint32_t k = 0; k < 4; k++) {
                low = fminf(low, x[(a * 4 + k) * 4 + d]);
                high = fmaxf(high, x[(a * 4 + k) * 4 + d]);
            }
            assert_true(kv_dtype_load(KV_DTYPE_F32, tensor->scales, d * 2 + a) == (high - low) / 15.0f);
            assert_true(kv_dtype_load(KV_DTYPE_F32, tensor->offsets, d * 2 + a) == -low);
        }
    assert_int_equal(kv_quantized_decode(tensor, decoded, NULL), 0);
    for (int i = 0; i < 32; i++)
        assert_true(fabsf(decoded[i] - x[i]) <= 0.51f * 48.0f / 15.0f);
}

static void quanto_refuses_groups_that_do_not_come_out_even(void **state)
{
    static const struct {
        int8_t axis;
        uint32_t group_size;
        KvTensorShape shape;
    } bad[] = {
        {0, 64, {1, 2, 1, 16}}, {0, 64, {1, 2, 3, 16}}, {0, 96, {2, 1, 3, 16}}, {-1, 16, {1, 2, 3, 16}},
        {-1, 64, {1, 2, 3, 16}}, {0, 0, {1, 1, 2, 16}}, {0, 16, {1, 1, 0, 16}},
    };
    float x[192] = {0};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(bad); i++) {
        KvQuantizeOptions options = {4, bad[i].axis, bad[i].group_size, KV_DTYPE_F32};
        KvQuantized *tensor = NULL;
        ErrorDetail detail = ERROR_DETAIL_NULL;

        assert_int_equal(kv_quanto_encode(&options, &bad[i].shape, x, &tensor, &detail), -EINVAL);
        assert_null(tensor);
        assert_non_null(strstr(detail.text, bad[i].shape.n_tokens ? "q_group_size" : "empty"));
    }
}

static void quanto_rows_and_tokens_are_taken_out_in_codes(void **state)
{
    static const uint32_t rows[3] = {1, 1, 0};
    float x[2 * 2 * 3 * 8], decoded[96], taken[3 * 2 * 2 * 8];
    KvQuantizeOptions options = {2, 0, 4, KV_DTYPE_F16};
    KvTensorShape shape = {2, 2, 3, 8};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL, *part = NULL;

    (void)state;
    for (int i = 0; i < 96; i++)
        x[i] = kv_dtype_round(KV_DTYPE_F16, sinf((float)(i * i)));
    assert_int_equal(kv_quanto_encode(&options, &shape, x, &tensor, NULL), 0);
    assert_int_equal(kv_quantized_decode(tensor, decoded, NULL), 0);
    assert_int_equal(kv_quantized_gather(tensor, rows, 3, 2, &part, NULL), 0);
    assert_int_equal(kv_quantized_decode(part, taken, NULL), 0);
    for (int r = 0; r < 3; r++)
        for (int h = 0; h < 2; h++)
            assert_memory_equal(taken + (r * 2 + h) * 16, decoded + (rows[r] * 2 + (uint32_t)h) * 24, 16 * sizeof(float));
}

static void quanto_tokens_that_share_a_group_are_not_taken_out(void **state)
{
    float x[64] = {1, 2, 3};
    KvTensorShape shape = {1, 2, 4, 8};
    KvQuantizeOptions options = {4, -1, 4, KV_DTYPE_F32}, wide = {4, 0, 16, KV_DTYPE_F32};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL, *pairs = NULL, *part = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;

    (void)state;
    assert_int_equal(kv_quanto_encode(&options, &shape, x, &tensor, NULL), 0);
    assert_int_equal(kv_quantized_gather(tensor, NULL, 1, 3, &part, &detail), -EOPNOTSUPP);
    assert_non_null(strstr(detail.text, "axis -1 of quanto"));
    assert_int_equal(kv_quanto_encode(&wide, &shape, x, &pairs, NULL), 0);
    assert_int_equal(kv_quantized_gather(pairs, NULL, 1, 3, &part, NULL), -EOPNOTSUPP);
    assert_int_equal(kv_quantized_gather(pairs, NULL, 1, 2, &part, NULL), 0);
    assert_int_equal(kv_quantized_gather(pairs, (const uint32_t[]){1}, 1, 2, &part, NULL), -EINVAL);
    assert_int_equal(kv_quantized_gather(pairs, NULL, 1, 5, &part, NULL), -EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quanto_4_bit_golden_group),
        cmocka_unit_test(quanto_2_bit_golden_group),
        cmocka_unit_test(quanto_4_bit_golden_group_in_16_bit_types),
        cmocka_unit_test(quanto_packing_puts_the_first_block_of_rows_in_the_low_bits),
        cmocka_unit_test(quanto_rows_that_do_not_fill_a_byte_leave_zero_bits),
        cmocka_unit_test(quanto_constant_group_is_exact),
        cmocka_unit_test(quanto_nan_stays_in_its_group),
        cmocka_unit_test(quanto_single_group_on_axis_0_is_exact_value_by_value),
        cmocka_unit_test(quanto_axis_minus_1_groups_one_channel_of_consecutive_tokens),
        cmocka_unit_test(quanto_refuses_groups_that_do_not_come_out_even),
        cmocka_unit_test(quanto_rows_and_tokens_are_taken_out_in_codes),
        cmocka_unit_test(quanto_tokens_that_share_a_group_are_not_taken_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
