/* SPDX-License-Identifier: Apache-2.0 */
/* The `hqq` codec by its golden numbers (CACHE-SEMANTICS.md 13.2, the rows that the cases name) and by its edges. */

#include "quant/kv-hqq.h"

#include "quant/kv-pack.h"
#include "tests/lib/quant-values.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static const float golden[8] = {-0.50f, -0.23f, 0.02f, 0.11f, 0.21f, 0.37f, 0.62f, 1.00f};

/* One group of 8 as often as packing needs. */
static void expect(uint8_t nbits, const float *x, float inverse_scale, float zero, const uint8_t *codes, const float *values)
{
    float repeated[64], decoded[64];
    uint32_t n = kv_pack_blocks(nbits);
    KvQuantizeOptions options = {nbits, 1, 8, KV_DTYPE_F32};
    KvTensorShape shape = {1, 1, n, 8};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;
    uint8_t got[64];

    for (uint32_t i = 0; i < 8 * n; i++)
        repeated[i] = x[i % 8];
    assert_int_equal(kv_hqq_encode(&options, &shape, repeated, &tensor, NULL), 0);
    assert_true(fabsf(1.0f / kv_dtype_load(KV_DTYPE_F32, tensor->scales, 0) - inverse_scale) <= 1e-5f * inverse_scale);
    assert_true(fabsf(kv_dtype_load(KV_DTYPE_F32, tensor->offsets, 0) - zero) <= 1e-5f);
    kv_unpack_codes(KV_PACK_HIGH_FIRST, nbits, tensor->packed, n, 8, got);
    assert_int_equal(kv_quantized_decode(tensor, decoded, NULL), 0);
    for (int i = 0; i < 8; i++) {
        if (codes)
            assert_int_equal(got[i], codes[i]);
        if (values)
            assert_true(fabsf(decoded[i] - values[i]) < 1e-5f);
    }
}

static void hqq_4_bit_golden_group(void **state)
{
    static const uint8_t codes[8] = {0, 3, 5, 6, 7, 9, 11, 15};

    (void)state;
    expect(4, golden, 10.0f, 5.0f, codes, NULL);
}

static void hqq_2_bit_golden_group(void **state)
{
    static const uint8_t codes[8] = {0, 0, 1, 1, 1, 2, 2, 3};
    static const float values[8] = {-0.479735f, -0.479735f, 0.020265f, 0.020265f, 0.020265f, 0.520265f, 0.520265f, 1.020265f};

    (void)state;
    expect(2, golden, 2.0f, 0.959470f, codes, values);
}

/* A group by itself, with our own order of sums, stops at the same place. */
static void hqq_golden_group_by_itself(void **state)
{
    static const uint8_t codes_2[8] = {0, 0, 1, 1, 1, 2, 2, 3}, codes_4[8] = {0, 3, 5, 6, 7, 9, 11, 15};
    float scale, zero;
    uint8_t codes[8];

    (void)state;
    kv_hqq_group(2, golden, 8, codes, &scale, &zero);
    assert_true(scale == 0.5f && fabsf(zero - 0.959470f) <= 1e-5f);
    assert_memory_equal(codes, codes_2, 8);
    kv_hqq_group(4, golden, 8, codes, &scale, &zero);
    assert_true(fabsf(scale - 0.1f) <= 1e-6f && fabsf(zero - 5.0f) <= 1e-5f);
    assert_memory_equal(codes, codes_4, 8);
}

static void hqq_constant_group(void **state)
{
    static const float x[8] = {0.3f, 0.3f, 0.3f, 0.3f, 0.3f, 0.3f, 0.3f, 0.3f};
    static const uint8_t codes[8] = {0};

    (void)state;
    expect(4, x, 1.0f, -0.3f, codes, x);
}

static void hqq_worse_than_plain_case(void **state)
{
    static const float x[8] = {-0.50f, -0.25f, 0.0f, 0.10f, 0.20f, 0.35f, 0.60f, 1.00f};
    float scale, zero, error = 0;
    uint8_t codes[8];

    (void)state;
    expect(4, x, 10.0f, 4.875f, NULL, NULL);
    kv_hqq_group(4, x, 8, codes, &scale, &zero);
    for (int i = 0; i < 8; i++)
        error += fabsf(kv_hqq_value(KV_DTYPE_F32, codes[i], scale, zero) - x[i]) / 8.0f;
    assert_true(fabsf(error - 0.01875f) < 1e-4f);
}

static void hqq_packing_puts_the_first_block_of_rows_in_the_high_bits(void **state)
{
    static const uint8_t four[4] = {1, 2, 3, 4}, two[4] = {0, 1, 2, 3}, one[8] = {1, 0, 0, 1, 1, 1, 0, 1};
    uint8_t packed[8], codes[8];

    (void)state;
    kv_pack_codes(KV_PACK_HIGH_FIRST, 4, four, 4, 1, packed);
    assert_int_equal(packed[0], 1 << 4 | 3);
    assert_int_equal(packed[1], 2 << 4 | 4);
    kv_pack_codes(KV_PACK_HIGH_FIRST, 2, two, 4, 1, packed);
    assert_int_equal(packed[0], 0 << 6 | 1 << 4 | 2 << 2 | 3);
    kv_pack_codes(KV_PACK_HIGH_FIRST, 1, one, 8, 1, packed);
    assert_int_equal(packed[0], 0x9d);
    kv_unpack_codes(KV_PACK_HIGH_FIRST, 1, packed, 8, 1, codes);
    assert_memory_equal(codes, one, 8);
    kv_pack_codes(KV_PACK_HIGH_FIRST, 8, four, 4, 1, packed);
    assert_memory_equal(packed, four, 4);
}

static void hqq_3_bit_packing_is_ten_blocks_in_32_bits(void **state)
{
    uint8_t codes[12], packed[8], back[12];
    uint64_t bytes;
    uint32_t word = 0;

    (void)state;
    for (uint8_t i = 0; i < 12; i++)
        codes[i] = i % 8;
    assert_true(kv_packed_bytes(3, 12, 1, &bytes));
    assert_int_equal(bytes, 8);
    kv_pack_codes(KV_PACK_HIGH_FIRST, 3, codes, 12, 1, packed);
    for (uint32_t block = 0; block < 6; block++) /* rows 0, 2, 4, ... of two packed rows */
        word |= (uint32_t)codes[2 * block] << (27 - 3 * block);
    for (int i = 0; i < 4; i++)
        assert_int_equal(packed[i], word >> 8 * i & 0xff);
    kv_unpack_codes(KV_PACK_HIGH_FIRST, 3, packed, 12, 1, back);
    assert_memory_equal(back, codes, 12);
}

static void hqq_axis_0_groups_are_strided_over_the_whole_tensor(void **state)
{
    float x[32];
    KvQuantizeOptions options = {4, 0, 8, KV_DTYPE_F32};
    KvTensorShape shape = {1, 1, 4, 8};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;

    (void)state;
    for (uint32_t i = 0; i < 32; i++)
        x[i] = quant_normal(7, i);
    assert_int_equal(kv_hqq_encode(&options, &shape, x, &tensor, NULL), 0);
    for (uint32_t j = 0; j < 4; j++) {
        float low = INFINITY, high = -INFINITY;

        for (uint32_t k = 0; k < 8; k++) {
            low = fminf(low, x[j + 4 * k]);
            high = fmaxf(high, x[j + 4 * k]);
        }
        assert_true(fabsf(kv_dtype_load(KV_DTYPE_F32, tensor->scales, j) - (high - low) / 15.0f) < 1e-6f);
    }
}

static void hqq_power_is_within_its_tolerance(void **state)
{
    double worst = 0;

    (void)state;
    for (float u = 0.1f; u < 1e38f; u *= 1.0009f)
        worst = fmax(worst, fabs((double)kv_hqq_power(u) / pow((double)u, -0.3) - 1));
    print_message("largest relative error of u^-0.3: %.3g\n", worst);
    assert_true(worst <= 2e-7);
}

static void hqq_shrink_is_odd_zero_near_zero_and_lets_nan_through(void **state)
{
    (void)state;
    assert_true(kv_hqq_shrink(0.17f) == 0.0f && kv_hqq_shrink(-0.1f) == 0.0f && kv_hqq_shrink(0.0f) == 0.0f);
    assert_true(kv_hqq_shrink(0.171f) > 0.0f && kv_hqq_shrink(-2.0f) == -kv_hqq_shrink(2.0f));
    assert_true(fabsf(kv_hqq_shrink(1.0f) - 0.9f) < 1e-6f);
    assert_true(isnan(kv_hqq_shrink(NAN)) && isinf(kv_hqq_shrink(-INFINITY)));
}

/* A span's groups stop together; groups that are alike stop as one alone does. */
static void hqq_groups_stop_by_span(void **state)
{
    float x[128], s_alone[2], z_alone[2], s[2], z[2];
    uint8_t c_alone[128], c[128];

    (void)state;
    for (uint32_t i = 0; i < 128; i++)
        x[i] = 3.0f * quant_normal(11, i % 64);
    kv_hqq_groups(2, x, 2, 64, 1, c_alone, s_alone, z_alone);
    kv_hqq_groups(2, x, 2, 64, 2, c, s, z);
    assert_memory_equal(c, c_alone, 128);
    assert_true(z[0] == z_alone[0] && z[1] == z_alone[1] && s[0] == s_alone[0]);
    for (uint32_t i = 64; i < 128; i++)
        x[i] = 40.0f * quant_normal(12, i);
    kv_hqq_groups(2, x, 2, 64, 1, c_alone, s_alone, z_alone);
    for (uint32_t group = 0; group < 2; group++) {
        float scale, zero;

        kv_hqq_group(2, x + 64 * group, 64, c, &scale, &zero);
        assert_true(scale == s_alone[group] && zero == z_alone[group]);
        assert_memory_equal(c, c_alone + 64 * group, 64);
    }
}

static void hqq_nan_stops_the_search_of_its_span_and_stays_in_its_group(void **state)
{
    float x[32], decoded[32];
    KvQuantizeOptions options = {4, 1, 8, KV_DTYPE_F32};
    KvTensorShape shape = {1, 1, 4, 8};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;

    (void)state;
    for (int i = 0; i < 32; i++)
        x[i] = golden[i % 8];
    x[9] = NAN;
    assert_int_equal(kv_hqq_encode(&options, &shape, x, &tensor, NULL), 0);
    assert_int_equal(kv_quantized_decode(tensor, decoded, NULL), 0);
    for (int i = 0; i < 32; i++)
        assert_true(i / 8 == 1 ? isnan(decoded[i]) != 0 : fabsf(decoded[i] - x[i]) < 0.06f);
}

static void hqq_refuses_what_the_library_cannot_pack_or_take_apart(void **state)
{
    static const struct {
        uint8_t nbits;
        int8_t axis;
        uint32_t group_size;
        KvTensorShape shape;
        const char *culprit;
    } bad[] = {
        {4, 1, 24, {1, 1, 2, 16}, "q_group_size 24"}, {4, 1, 16, {1, 1, 3, 16}, "nbits 4"}, {2, 1, 16, {1, 1, 6, 16}, "nbits 2"},
        {1, 1, 16, {1, 1, 4, 16}, "nbits 1"},         {3, 1, 16, {1, 1, 10, 16}, "axis 0"}, {4, 0, 0, {1, 1, 2, 16}, "q_group_size 0"},
        {1, 0, 4, {1, 1, 2, 16}, "nbits 1"},          {8, 1, 16, {0, 1, 2, 16}, "empty"},
    };
    float x[192] = {0};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(bad); i++) {
        KvQuantizeOptions options = {bad[i].nbits, bad[i].axis, bad[i].group_size, KV_DTYPE_F32};
        KvQuantized *tensor = NULL;
        ErrorDetail detail = ERROR_DETAIL_NULL;

        assert_int_equal(kv_hqq_encode(&options, &bad[i].shape, x, &tensor, &detail), -EINVAL);
        assert_null(tensor);
        assert_non_null(strstr(detail.text, bad[i].culprit));
    }
}

static void hqq_tokens_are_taken_out_on_axis_1_and_refused_on_axis_0(void **state)
{
    float x[64], decoded[64], taken[48];
    KvTensorShape shape = {1, 1, 4, 16};
    KvQuantizeOptions options = {4, 1, 16, KV_DTYPE_F32}, strided = {4, 0, 16, KV_DTYPE_F32};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL, *other = NULL, *part = NULL, *none = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;

    (void)state;
    for (uint32_t i = 0; i < 64; i++)
        x[i] = quant_normal(3, i);
    assert_int_equal(kv_hqq_encode(&options, &shape, x, &tensor, NULL), 0);
    assert_int_equal(kv_quantized_gather(tensor, NULL, 1, 3, &part, NULL), 0);
    assert_int_equal(kv_quantized_decode(tensor, decoded, NULL), 0);
    assert_int_equal(kv_quantized_decode(part, taken, NULL), 0);
    assert_memory_equal(taken, decoded, sizeof(taken));
    assert_int_equal(kv_hqq_encode(&strided, &shape, x, &other, NULL), 0);
    assert_int_equal(kv_quantized_gather(other, NULL, 1, 3, &none, &detail), -EOPNOTSUPP);
    assert_non_null(strstr(detail.text, "axis 0 of hqq"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hqq_4_bit_golden_group),
        cmocka_unit_test(hqq_2_bit_golden_group),
        cmocka_unit_test(hqq_golden_group_by_itself),
        cmocka_unit_test(hqq_constant_group),
        cmocka_unit_test(hqq_worse_than_plain_case),
        cmocka_unit_test(hqq_packing_puts_the_first_block_of_rows_in_the_high_bits),
        cmocka_unit_test(hqq_3_bit_packing_is_ten_blocks_in_32_bits),
        cmocka_unit_test(hqq_axis_0_groups_are_strided_over_the_whole_tensor),
        cmocka_unit_test(hqq_power_is_within_its_tolerance),
        cmocka_unit_test(hqq_shrink_is_odd_zero_near_zero_and_lets_nan_through),
        cmocka_unit_test(hqq_groups_stop_by_span),
        cmocka_unit_test(hqq_nan_stops_the_search_of_its_span_and_stays_in_its_group),
        cmocka_unit_test(hqq_refuses_what_the_library_cannot_pack_or_take_apart),
        cmocka_unit_test(hqq_tokens_are_taken_out_on_axis_1_and_refused_on_axis_0),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
