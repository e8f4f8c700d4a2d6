/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Embedding rows against the file's decode, and what the ops object takes from the device.  A row must agree in every bit; a
 * device other than PoCL may flush subnormals to zero (2^-126 times the scale).
 */

#include "opencl/ops.h"
#include "quant/base/half.h"
#include "tests/lib/patience.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static const uint32_t all_types[] = {0, 1, 30, 2, 3, 6, 7, 8, 12, 13, 14};
static const OpsOptions options = {false, 16, 512};

static uint64_t random_state = 0x13198a2e03707344;

static uint64_t random_u64(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

typedef struct Fixture {
    Gpu *gpu;
    Ops *ops;
} Fixture;

static int setup(void **state)
{
    Fixture *fixture = calloc(1, sizeof(*fixture));
    ErrorDetail detail = ERROR_DETAIL_NULL;
    GpuOptions gpu_options = {.deadline_usec = PATIENCE_USEC};

    assert_non_null(fixture);
    if (gpu_open(&gpu_options, &fixture->gpu, &detail) || ops_new(fixture->gpu, &options, &fixture->ops, &detail))
        fail_msg("%s", detail.text);
    printf("%s, SIMD level %d\n", gpu_info(fixture->gpu)->name, (int)gpu_info(fixture->gpu)->simd);
    *state = fixture;
    return 0;
}

static int teardown(void **state)
{
    Fixture *fixture = *state;

    (void)ops_free(fixture->ops);
    (void)gpu_free(fixture->gpu);
    free(fixture);
    return 0;
}

static GpuBuffer *buffer_of(Fixture *fixture, const void *from, uint64_t bytes)
{
    GpuBuffer *buffer = NULL;

    assert_int_equal(gpu_buffer_new(fixture->gpu, GPU_PURPOSE_OTHER, bytes, &buffer, NULL), 0);
    if (from)
        assert_int_equal(gpu_upload(fixture->gpu, GPU_QUEUE_COMPUTE, buffer, 0, from, bytes, GPU_WAIT_NONE, "test", NULL), 0);
    assert_int_equal(gpu_drain(fixture->gpu, NULL), 0);
    return buffer;
}

/* Random blocks whose halves are finite: no exponent byte has all its bits. */
static uint8_t *random_rows(const WeightTypeInfo *type, uint64_t bytes)
{
    uint8_t *rows = malloc(bytes);

    assert_non_null(rows);
    for (uint64_t i = 0; i < bytes; i++)
        rows[i] = (uint8_t)(random_u64() >> 20);
    for (uint64_t i = 0; i < bytes && type->block_elements > 1; i += type->block_bytes) {
        uint64_t d = type->type == WEIGHT_TYPE_Q6_K ? 208 : 0;

        rows[i + d + 1] &= 0xbb;
        rows[i + 3] &= 0xbb; /* m where there is one, else codes */
    }
    for (uint64_t i = type->block_bytes - 1; i < bytes && type->block_elements == 1; i += type->block_bytes)
        rows[i] &= 0xbb;
    return rows;
}

static void check_rows(Fixture *fixture, const WeightTypeInfo *type, const uint8_t *file, const OpsWeight *table, float scale)
{
    const int32_t ids[] = {7, 7, 0, 1, (int32_t)table->n_rows - 1, 5, 16, 17, 2, -1, (int32_t)table->n_rows, 3};
    const uint32_t n = N_ELEMENTS(ids), n_cols = table->n_cols;
    uint64_t row_bytes = 0, bytes = (uint64_t)(n - 2) * n_cols * sizeof(float);
    _cleanup_(gpu_buffer_freep) GpuBuffer *id_buffer = buffer_of(fixture, ids, sizeof(ids)), *out = buffer_of(fixture, NULL, bytes);
    _cleanup_(freep) float *got = malloc(bytes), *want = malloc(n_cols * sizeof(float));

    assert_true(got && want);
    assert_int_equal(weight_row_bytes(type, n_cols, &row_bytes), 0);
    assert_int_equal(ops_embed(fixture->ops, table, scale, id_buffer, 2 * sizeof(int32_t), n - 2, out), 0);
    assert_int_equal(gpu_download(fixture->gpu, GPU_QUEUE_COMPUTE, out, 0, got, bytes, GPU_WAIT_NONE, "test", NULL), 0);
    assert_int_equal(gpu_drain(fixture->gpu, NULL), 0);
    for (uint32_t r = 0; r < n - 2; r++) {
        bool known = ids[2 + r] >= 0 && ids[2 + r] < (int32_t)table->n_rows;

        if (known)
            weight_decode(type, file + (uint64_t)ids[2 + r] * row_bytes, want, n_cols);
        for (uint32_t c = 0; c < n_cols; c++) {
            float value = got[r * n_cols + c];

            if (known ? !(fabsf(value - want[c] * scale) <= 0x1p-125f * scale) : !isnan(value))
                fail_msg("%s row %u (id %d) column %u: %.9g, file %.9g", type->name, r, (int)ids[2 + r], c, (double)value,
                         (double)(want[c] * scale));
        }
    }
}

static void embed_decodes_rows_of_every_type(void **state)
{
    Fixture *fixture = *state;

    for (size_t i = 0; i < N_ELEMENTS(all_types); i++) {
        const WeightTypeInfo *type = weight_type_info(all_types[i]);
        uint32_t n_rows = 37, n_cols = type->block_elements == 1 ? 75 : 2 * type->record_columns;
        uint64_t row_bytes = 0, bytes = 0;
        _cleanup_(freep) uint8_t *file = NULL, *device = NULL;
        _cleanup_(gpu_buffer_freep) GpuBuffer *buffer = NULL;

        assert_int_equal(weight_row_bytes(type, n_cols, &row_bytes), 0);
        assert_int_equal(weight_device_bytes(type, n_rows, n_cols, &bytes), 0);
        file = random_rows(type, n_rows * row_bytes);
        device = calloc(1, bytes + 64);
        assert_non_null(device);
        weight_pack(type, file, n_rows, n_cols, NULL, device + 64);
        buffer = buffer_of(fixture, device, bytes + 64);
        check_rows(fixture, type, file, &(OpsWeight){type, buffer, 64, n_rows, n_cols}, 1.0f);
        check_rows(fixture, type, file, &(OpsWeight){type, buffer, 64, n_rows, n_cols}, 24.0f);
    }
}

static void ops_take_exactly_the_bytes_they_said(void **state)
{
    Fixture *fixture = *state;
    uint64_t before, after, said = 0, by_purpose[GPU_PURPOSE_X_MAX];
    Ops *ops = NULL;

    gpu_memory_used(fixture->gpu, by_purpose, &before);
    assert_int_equal(ops_device_bytes(gpu_info(fixture->gpu), &options, &said), 0);
    assert_int_equal(ops_new(fixture->gpu, &options, &ops, NULL), 0);
    gpu_memory_used(fixture->gpu, by_purpose, &after);
    assert_int_equal(after - before, said);
    ops = ops_free(ops);
    gpu_memory_used(fixture->gpu, by_purpose, &after);
    assert_int_equal(after, before);
    assert_int_equal(ops_device_bytes(gpu_info(fixture->gpu), &(OpsOptions){false, 0, 32}, &said), -EINVAL);
    assert_int_equal(ops_new(fixture->gpu, &(OpsOptions){false, 8, 0}, &ops, NULL), -EINVAL);
    assert_null(ops_free(NULL));
}

static void ops_refuse_a_budget_that_is_too_small(void **state)
{
    Fixture *fixture = *state;
    const uint64_t budget = gpu_info(fixture->gpu)->budget_bytes;
    uint64_t used, by_purpose[GPU_PURPOSE_X_MAX], said = 0;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Ops *ops = NULL;

    gpu_memory_used(fixture->gpu, by_purpose, &used);
    assert_int_equal(ops_device_bytes(gpu_info(fixture->gpu), &options, &said), 0);
    gpu_set_budget(fixture->gpu, used + said - 1);
    assert_int_equal(ops_new(fixture->gpu, &options, &ops, &detail), GPU_E_OVER_BUDGET);
    assert_null(ops);
    assert_string_not_equal(detail.text, "");
    gpu_set_budget(fixture->gpu, budget);
    assert_int_equal(ops_new(fixture->gpu, &options, &ops, &detail), 0);
    ops = ops_free(ops);
}

static void ops_build_and_allocate_nothing_once_a_type_is_prepared(void **state)
{
    Fixture *fixture = *state;
    const WeightTypeInfo *type = weight_type_info(WEIGHT_TYPE_Q8_0);
    uint64_t bytes = 0;
    GpuCounters before, after;
    _cleanup_(gpu_buffer_freep) GpuBuffer *weight = NULL, *x = buffer_of(fixture, NULL, 16 * 64 * 4), *y = NULL, *ids = NULL;
    OpsLinear linear = {.x = x, .n_weights = 1};

    assert_int_equal(weight_device_bytes(type, 48, 64, &bytes), 0);
    weight = buffer_of(fixture, NULL, bytes);
    y = buffer_of(fixture, NULL, 16 * 48 * 4);
    ids = buffer_of(fixture, NULL, 64);
    assert_int_equal(gpu_fill_zero(fixture->gpu, GPU_QUEUE_COMPUTE, ids, 0, 64), 0);
    linear.weights[0] = (OpsWeight){type, weight, 0, 48, 64};
    linear.y = y;
    assert_int_equal(ops_prepare_type(fixture->ops, type, NULL), 0);
    gpu_counters(fixture->gpu, &before);
    for (uint32_t n_rows = 1; n_rows <= 16; n_rows++) {
        assert_int_equal(ops_embed(fixture->ops, &linear.weights[0], 1.0f, ids, 0, n_rows, x), 0);
        assert_int_equal(ops_linear(fixture->ops, &linear, n_rows), 0);
        assert_int_equal(ops_chain(fixture->ops, (OpsLinear[]){linear, linear, linear}, 3, n_rows), 0);
    }
    assert_int_equal(gpu_drain(fixture->gpu, NULL), 0);
    gpu_counters(fixture->gpu, &after);
    assert_int_equal(after.n_programs_built, before.n_programs_built);
    assert_int_equal(after.n_programs_from_cache, before.n_programs_from_cache);
    assert_int_equal(after.n_buffers_created, before.n_buffers_created);
    assert_int_equal(after.upload_bytes, before.upload_bytes);
    assert_true(after.n_launches > before.n_launches);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embed_decodes_rows_of_every_type),
        cmocka_unit_test(ops_take_exactly_the_bytes_they_said),
        cmocka_unit_test(ops_refuse_a_budget_that_is_too_small),
        cmocka_unit_test(ops_build_and_allocate_nothing_once_a_type_is_prepared),
    };

    printf("seed %#llx\n", (unsigned long long)random_state);
    return cmocka_run_group_tests(tests, setup, teardown);
}
