/* SPDX-License-Identifier: Apache-2.0 */
/* Weight types: decode against golden values, the device layout, the rounding of activations. */

#include "quant/base/half.h"
#include "quant/weight.h"
#include "tests/data/weight-golden.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

/* Deterministic bytes (xorshift); the seed is printed by main. */
static uint64_t random_state = 0x9e3779b97f4a7c15;

static uint64_t random_u64(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static const uint32_t all_types[] = {0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30};

/* A zero of either sign decodes from a scale of zero; everything else must agree in every bit. */
static bool same_float(float a, float b)
{
    return float_to_bits(a) == float_to_bits(b) || (a == 0.0f && b == 0.0f) || (isnan(a) && isnan(b));
}

static void weight_decodes_golden_blocks_of_every_type(void **state)
{
    float values[512];

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(weight_golden); i++) {
        const WeightTypeInfo *info = weight_type_info(weight_golden[i].type);

        assert_non_null(info);
        assert_string_equal(info->name, weight_golden[i].name);
        weight_decode(info, weight_golden[i].blocks, values, weight_golden[i].n);
        for (size_t j = 0; j < weight_golden[i].n; j++)
            if (!same_float(values[j], float_from_bits(weight_golden[i].values[j])))
                fail_msg("%s element %zu: %.9g, golden %.9g", info->name, j, (double)values[j],
                         (double)float_from_bits(weight_golden[i].values[j]));
    }
}

static void weight_types_we_lack_are_known_by_name(void **state)
{
    (void)state;
    assert_null(weight_type_info(23));
    assert_string_equal(weight_type_name(23), "IQ4_XS");
    assert_string_equal(weight_type_name(14), "Q6_K");
    assert_null(weight_type_name(9999));
    for (size_t i = 0; i < N_ELEMENTS(all_types); i++)
        assert_string_equal(weight_type_name(all_types[i]), weight_type_info(all_types[i])->name);
}

static void weight_sizes_are_checked(void **state)
{
    const WeightTypeInfo *q4 = weight_type_info(WEIGHT_TYPE_Q4_1), *f32 = weight_type_info(WEIGHT_TYPE_F32);
    uint64_t bytes = 77;

    (void)state;
    assert_int_equal(weight_row_bytes(q4, 576, &bytes), 0);
    assert_int_equal(bytes, 360);
    assert_int_equal(weight_row_bytes(q4, 577, &bytes), -EINVAL);
    assert_int_equal(weight_row_bytes(f32, UINT64_MAX, &bytes), -EOVERFLOW);
    assert_int_equal(bytes, 360);
    assert_int_equal(weight_device_bytes(q4, 17, 576, &bytes), 0);
    assert_int_equal(bytes, 2 * 18 * 320);
    assert_int_equal(weight_device_bytes(f32, 1, 33, &bytes), 0);
    assert_int_equal(bytes, 2 * 2048);
    assert_int_equal(weight_device_bytes(q4, 1, 48, &bytes), -EINVAL);
    assert_int_equal(weight_device_bytes(q4, UINT64_MAX, 32, &bytes), -EOVERFLOW);
    assert_int_equal(weight_device_bytes(q4, UINT64_MAX / 2, UINT64_MAX / 64 * 32, &bytes), -EOVERFLOW);
}

/* Packs random bytes (whatever halves they form) with a shuffled row map and compares each row with the file's decode. */
static void check_layout(const WeightTypeInfo *info, uint64_t n_rows, uint64_t n_cols)
{
    uint64_t row_bytes, device_bytes;
    _cleanup_(freep) uint8_t *file = NULL, *device = NULL;
    _cleanup_(freep) float *expected = NULL, *decoded = NULL;
    _cleanup_(freep) uint32_t *row_map = NULL;

    assert_int_equal(weight_row_bytes(info, n_cols, &row_bytes), 0);
    assert_int_equal(weight_device_bytes(info, n_rows, n_cols, &device_bytes), 0);
    file = malloc(n_rows * row_bytes);
    device = malloc(device_bytes);
    expected = malloc(n_cols * sizeof(float));
    decoded = malloc(n_cols * sizeof(float));
    row_map = malloc(n_rows * sizeof(uint32_t));
    assert_true(file && device && expected && decoded && row_map);
    for (uint64_t i = 0; i < n_rows * row_bytes; i++)
        file[i] = (uint8_t)random_u64();
    memset(device, 0xa5, device_bytes);
    for (uint64_t r = 0; r < n_rows; r++)
        row_map[r] = (uint32_t)((r * 7 + 3) % n_rows);
    weight_pack(info, file, n_rows, n_cols, n_rows % 7 ? row_map : NULL, device);
    for (uint64_t r = 0; r < n_rows; r++) {
        weight_decode(info, file + (n_rows % 7 ? row_map[r] : r) * row_bytes, expected, n_cols);
        weight_device_decode_row(info, device, n_rows, n_cols, r, decoded);
        for (uint64_t c = 0; c < n_cols; c++)
            if (!same_float(expected[c], decoded[c]))
                fail_msg("%s %llux%llu row %llu column %llu", info->name, (unsigned long long)n_rows,
                         (unsigned long long)n_cols, (unsigned long long)r, (unsigned long long)c);
    }
}

static void weight_device_layout_loses_nothing(void **state)
{
    static const uint64_t rows[] = {1, 7, 15, 16, 17, 48, 50};

    (void)state;
    for (size_t t = 0; t < N_ELEMENTS(all_types); t++) {
        const WeightTypeInfo *info = weight_type_info(all_types[t]);

        for (size_t r = 0; r < N_ELEMENTS(rows); r++) {
            check_layout(info, rows[r], info->record_columns);
            check_layout(info, rows[r], 3 * info->record_columns);
            if (info->block_elements == 1)
                check_layout(info, rows[r], 45);
        }
    }
}

static void weight_device_layout_pads_with_zeros(void **state)
{
    const WeightTypeInfo *info = weight_type_info(WEIGHT_TYPE_F32);
    float file[3 * 5], device[16 * 32];

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(file); i++)
        file[i] = (float)i + 1.0f;
    memset(device, 0xff, sizeof(device));
    weight_pack(info, file, 3, 5, NULL, device);
    for (size_t c = 0; c < 32; c++)
        for (size_t lane = 0; lane < 16; lane++)
            assert_true(device[16 * c + lane] == (lane < 3 && c < 5 ? file[5 * lane + c] : 0.0f));
}

static void activations_round_half_to_even_with_exact_sums(void **state)
{
    float x[96] = {0}, scales[3];
    int16_t codes[96];
    int32_t sums[6];

    (void)state;
    /* scale 1: values are their own codes */
    x[0] = 127.0f, x[1] = 0.5f, x[2] = 1.5f, x[3] = -0.5f, x[4] = -2.5f, x[16] = -127.0f, x[17] = 3.49f;
    weight_quantize_activations(x, 96, WEIGHT_ACTIVATION_CODE, codes, scales, sums);
    assert_true(scales[0] == 1.0f && scales[1] == 0.0f && scales[2] == 0.0f);
    assert_int_equal(codes[0], 127);
    assert_int_equal(codes[1], 0);
    assert_int_equal(codes[2], 2);
    assert_int_equal(codes[3], 0);
    assert_int_equal(codes[4], -2);
    assert_int_equal(codes[16], -127);
    assert_int_equal(codes[17], 3);
    assert_int_equal(sums[0], 127);
    assert_int_equal(sums[1], -124);
    assert_int_equal(sums[2], 0);
}

static void check_half_a_step(const float *x, int max_code)
{
    int16_t codes[64];
    int32_t sums[4];
    float scales[2];

    weight_quantize_activations(x, 64, max_code, codes, scales, sums);
    for (size_t i = 0; i < 64; i++) {
        int high = (codes[i] + 128) >> 8, low = codes[i] - 256 * high;

        /* half a code, and for fine ones what float32 itself rounds */
        assert_true(fabsf(x[i] - scales[i / 32] * (float)codes[i]) <= 0.503f * scales[i / 32] + 0x1p-100f);
        assert_in_range(codes[i] + max_code, 0, 2 * max_code);
        assert_true(high >= -127 && high <= 127 && low >= -128 && low <= 127);
    }
}

static void activations_stay_within_half_a_step(void **state)
{
    float x[64];

    (void)state;
    for (int round = 0; round < 1000; round++) {
        float magnitude = ldexpf(1.0f, (int)(random_u64() % 200) - 100);

        for (size_t i = 0; i < 64; i++)
            x[i] = magnitude * ((float)(random_u64() >> 40) * 0x1p-23f - 1.0f);
        check_half_a_step(x, WEIGHT_ACTIVATION_CODE);
        check_half_a_step(x, WEIGHT_ACTIVATION_FINE);
    }
}

static void activations_of_extreme_size_are_defined(void **state)
{
    float x[160] = {0}, scales[5];
    int16_t codes[160];
    int32_t sums[10];

    (void)state;
    x[3] = 0x1p-140f;                  /* subnormal: counts as zero */
    x[32] = INFINITY, x[33] = 1.0f;
    x[64] = 1.0f, x[70] = NAN;
    x[96] = FLT_MAX, x[97] = -FLT_MAX;
    x[128] = WEIGHT_ACTIVATION_MIN, x[129] = -0.0f;
    weight_quantize_activations(x, 160, WEIGHT_ACTIVATION_CODE, codes, scales, sums);
    assert_true(scales[0] == 0.0f && codes[3] == 0);
    assert_true(isinf(scales[1]) && codes[32] == 0 && codes[33] == 0);
    assert_true(isnan(scales[2]) && codes[64] == 0 && sums[4] == 0);
    assert_true(isfinite(scales[3]) && codes[96] == 127 && codes[97] == -127);
    assert_true(scales[4] > 0.0f && codes[128] == 127 && codes[129] == 0);
}

static void activations_of_a_ragged_row_are_padded_with_zeros(void **state)
{
    float x[33], scales[2];
    int16_t codes[64];
    int32_t sums[4];

    (void)state;
    for (size_t i = 0; i < 33; i++)
        x[i] = 1.0f;
    memset(codes, 0x55, sizeof(codes));
    weight_quantize_activations(x, 33, WEIGHT_ACTIVATION_CODE, codes, scales, sums);
    assert_int_equal(codes[32], 127);
    for (size_t i = 33; i < 64; i++)
        assert_int_equal(codes[i], 0);
    assert_int_equal(sums[2], 127);
    assert_int_equal(sums[3], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weight_decodes_golden_blocks_of_every_type),
        cmocka_unit_test(weight_types_we_lack_are_known_by_name),
        cmocka_unit_test(weight_sizes_are_checked),
        cmocka_unit_test(weight_device_layout_loses_nothing),
        cmocka_unit_test(weight_device_layout_pads_with_zeros),
        cmocka_unit_test(activations_round_half_to_even_with_exact_sums),
        cmocka_unit_test(activations_stay_within_half_a_step),
        cmocka_unit_test(activations_of_extreme_size_are_defined),
        cmocka_unit_test(activations_of_a_ragged_row_are_padded_with_zeros),
    };

    printf("seed %#llx\n", (unsigned long long)random_state);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
