/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products against their C reference.
 *
 * Without a norm the reference below makes the same sums in the same order as the kernels, so results must agree in every bit
 * on devices whose fma and division are exact (PoCL); elsewhere, and with a norm, within TOLERANCE of the sum of |w x|: one
 * activation code that falls to the other side of a rounding is worth less than 1/127 of one term.  A device may flush
 * subnormals to zero: the tolerance has a term for that.
 */

#include "opencl/ops.h"
#include "quant/base/half.h"
#include "quant/weight-parts.h"
#include "tests/lib/patience.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define TOLERANCE    1e-4
#define MAX_ROWS     70
#define MAX_COLUMNS  768
#define NORM_EPS     1e-5f

static const uint32_t all_types[] = {0, 1, 30, 2, 3, 6, 7, 8, 12, 13, 14};

static uint64_t random_state = 0x243f6a8885a308d3;

static uint64_t random_u64(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static float random_float(void)
{
    return (float)(random_u64() >> 40) * 0x1p-23f - 1.0f;
}

/* ---- fixture: a device, ops of both kinds, buffers that every case reuses ---------------------------------------- */

typedef struct Matrix {
    const WeightTypeInfo *type;
    uint32_t n_rows, n_cols;
    uint64_t row_bytes;
    uint8_t *file;
    GpuBuffer *buffer;
    uint64_t offset;
} Matrix;

typedef struct Fixture {
    Gpu *gpu;
    Ops *ops[2]; /* fast, exact */
    bool bits;   /* results must agree in every bit */
    GpuBuffer *x, *norm, *rows, *y, *z;
} Fixture;

static int setup(void **state)
{
    const OpsOptions options[2] = {{false, MAX_ROWS, MAX_COLUMNS}, {true, MAX_ROWS, MAX_COLUMNS}};
    const uint64_t bytes = MAX_ROWS * (MAX_COLUMNS + 200) * sizeof(float);
    Fixture *fixture = calloc(1, sizeof(*fixture));
    GpuOptions gpu_options = {.deadline_usec = PATIENCE_USEC};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r;

    assert_non_null(fixture);
    r = gpu_open(&gpu_options, &fixture->gpu, &detail);
    if (r)
        fail_msg("no device: %s", detail.text);
    for (size_t i = 0; i < 2 && !r; i++)
        r = ops_new(fixture->gpu, &options[i], &fixture->ops[i], &detail);
    if (!r)
        r = gpu_buffer_new(fixture->gpu, GPU_PURPOSE_ACTIVATIONS, bytes, &fixture->x, &detail);
    if (!r)
        r = gpu_buffer_new(fixture->gpu, GPU_PURPOSE_ACTIVATIONS, MAX_COLUMNS * sizeof(float), &fixture->norm, &detail);
    if (!r)
        r = gpu_buffer_new(fixture->gpu, GPU_PURPOSE_ACTIVATIONS, MAX_ROWS * sizeof(int32_t) + 64, &fixture->rows, &detail);
    if (!r)
        r = gpu_buffer_new(fixture->gpu, GPU_PURPOSE_ACTIVATIONS, bytes, &fixture->y, &detail);
    if (!r)
        r = gpu_buffer_new(fixture->gpu, GPU_PURPOSE_ACTIVATIONS, bytes, &fixture->z, &detail);
    if (r)
        fail_msg("%s", detail.text);
    fixture->bits = strstr(gpu_info(fixture->gpu)->platform, "Portable Computing Language") != NULL;
    printf("%s, SIMD level %d, %s\n", gpu_info(fixture->gpu)->name, (int)gpu_info(fixture->gpu)->simd,
           fixture->bits ? "every bit" : "within tolerance");
    *state = fixture;
    return 0;
}

static int teardown(void **state)
{
    Fixture *fixture = *state;

    (void)gpu_buffer_free(fixture->x);
    (void)gpu_buffer_free(fixture->norm);
    (void)gpu_buffer_free(fixture->rows);
    (void)gpu_buffer_free(fixture->y);
    (void)gpu_buffer_free(fixture->z);
    (void)ops_free(fixture->ops[0]);
    (void)ops_free(fixture->ops[1]);
    (void)gpu_free(fixture->gpu);
    free(fixture);
    return 0;
}

static void upload(Fixture *fixture, GpuBuffer *to, const void *from, uint64_t bytes)
{
    assert_int_equal(gpu_upload(fixture->gpu, GPU_QUEUE_COMPUTE, to, 0, from, bytes, GPU_WAIT_NONE, "test", NULL), 0);
    assert_int_equal(gpu_drain(fixture->gpu, NULL), 0);
}

static void download(Fixture *fixture, const GpuBuffer *from, void *to, uint64_t bytes)
{
    assert_int_equal(gpu_download(fixture->gpu, GPU_QUEUE_COMPUTE, from, 0, to, bytes, GPU_WAIT_NONE, "test", NULL), 0);
    assert_int_equal(gpu_drain(fixture->gpu, NULL), 0);
}

/* Halves of about 0.01 with some zeros, subnormals, negatives and the largest; floats likewise. */
static uint16_t random_half(bool extreme)
{
    static const uint16_t odd[] = {0, 0x8000, 1, 0x83ff, 0x0400, 0x7bff, 0xfbff};

    if (extreme && random_u64() % 4 == 0)
        return odd[random_u64() % N_ELEMENTS(odd)];
    return half_from_float(0.02f * random_float());
}

static void random_blocks(const WeightTypeInfo *type, uint8_t *blocks, uint64_t bytes, bool extreme)
{
    uint64_t stride = type->block_bytes;

    for (uint64_t i = 0; i < bytes; i++)
        blocks[i] = (uint8_t)(random_u64() >> 20);
    for (uint64_t i = 0; i < bytes; i += stride) {
        uint16_t d = random_half(extreme), m = random_half(extreme);
        float f = extreme && random_u64() % 4 == 0 ? 0x1p-140f : random_float();

        if (type->type == WEIGHT_TYPE_F32)
            memcpy(blocks + i, &f, sizeof(f));
        else if (type->type == WEIGHT_TYPE_BF16)
            blocks[i] = (uint8_t)(float_to_bits(f) >> 16), blocks[i + 1] = (uint8_t)(float_to_bits(f) >> 24);
        else
            memcpy(blocks + i + (type->type == WEIGHT_TYPE_Q6_K ? 208 : 0), &d, sizeof(d));
        if (type->type == WEIGHT_TYPE_Q4_1 || type->type == WEIGHT_TYPE_Q5_1 || type->type == WEIGHT_TYPE_Q4_K ||
            type->type == WEIGHT_TYPE_Q5_K)
            memcpy(blocks + i + 2, &m, sizeof(m));
    }
}

static Matrix matrix_new(Fixture *fixture, uint32_t type, uint32_t n_rows, uint32_t n_cols, bool extreme)
{
    Matrix matrix = {.type = weight_type_info(type), .n_rows = n_rows, .n_cols = n_cols, .offset = 64 * (random_u64() % 3)};
    _cleanup_(freep) uint8_t *device = NULL;
    uint64_t bytes;

    assert_int_equal(weight_row_bytes(matrix.type, n_cols, &matrix.row_bytes), 0);
    assert_int_equal(weight_device_bytes(matrix.type, n_rows, n_cols, &bytes), 0);
    matrix.file = malloc(n_rows * matrix.row_bytes);
    device = calloc(1, bytes + matrix.offset);
    assert_true(matrix.file && device);
    random_blocks(matrix.type, matrix.file, n_rows * matrix.row_bytes, extreme);
    weight_pack(matrix.type, matrix.file, n_rows, n_cols, NULL, device + matrix.offset);
    assert_int_equal(gpu_buffer_new(fixture->gpu, GPU_PURPOSE_WEIGHTS, bytes + matrix.offset, &matrix.buffer, NULL), 0);
    upload(fixture, matrix.buffer, device, bytes + matrix.offset);
    return matrix;
}

static void matrix_clear(Matrix *matrix)
{
    free(matrix->file);
    (void)gpu_buffer_free(matrix->buffer);
}

static OpsWeight weight_of(const Matrix *matrix)
{
    return (OpsWeight){matrix->type, matrix->buffer, matrix->offset, matrix->n_rows, matrix->n_cols};
}

/* ---- the reference ----------------------------------------------------------------------------------------------- */

static bool is_float(const WeightTypeInfo *type)
{
    return type->block_elements == 1;
}

static int zero_point(WeightType type)
{
    return type == WEIGHT_TYPE_Q4_0   ? 8
           : type == WEIGHT_TYPE_Q5_0 ? 16
           : type == WEIGHT_TYPE_Q8_0 ? 128
           : type == WEIGHT_TYPE_Q6_K ? 32
                                      : 0;
}

static float reference_exact(const Matrix *matrix, uint32_t row, const float *x)
{
    float w[MAX_COLUMNS], sums[2] = {0.0f, 0.0f};

    weight_decode(matrix->type, matrix->file + row * matrix->row_bytes, w, matrix->n_cols);
    for (uint32_t c = 0; c < matrix->n_cols; c++)
        sums[c % 2] = fmaf(w[c], x[c], sums[c % 2]);
    return sums[0] + sums[1];
}

/* Sub-block s of @columns columns of one block. */
static float reference_sub_block(WeightType type, const WeightParts *parts, uint32_t s, uint32_t columns, const int16_t *codes,
                                 float scale, float y)
{
    bool k45 = type == WEIGHT_TYPE_Q4_K || type == WEIGHT_TYPE_Q5_K;
    float d = float_from_half(parts->d), m = float_from_half(parts->m);
    int32_t dot = 0, sum = 0;

    for (uint32_t i = 0; i < columns; i++) {
        dot += (parts->codes[columns * s + i] - zero_point(type)) * codes[i];
        sum += codes[i];
    }
    if (k45 || type == WEIGHT_TYPE_Q6_K)
        d *= (float)parts->scales[s];
    y = fmaf(d, scale * (float)dot, y);
    if (k45)
        y = fmaf(-(m * (float)parts->mins[s]), scale * (float)sum, y);
    else if (type == WEIGHT_TYPE_Q4_1 || type == WEIGHT_TYPE_Q5_1)
        y = fmaf(m, scale * (float)sum, y);
    return y;
}

static float reference_fast(const Matrix *matrix, bool fine, uint32_t row, const float *x)
{
    uint32_t sub = matrix->type->type == WEIGHT_TYPE_Q6_K ? 16 : 32, elements = matrix->type->block_elements;
    const uint8_t *block = matrix->file + row * matrix->row_bytes;
    float scales[MAX_COLUMNS / 32], y = 0.0f;
    int16_t codes[MAX_COLUMNS];
    int32_t sums[MAX_COLUMNS / 16];
    WeightParts parts;

    weight_quantize_activations(x, matrix->n_cols, fine ? WEIGHT_ACTIVATION_FINE : WEIGHT_ACTIVATION_CODE, codes, scales, sums);
    for (uint32_t c = 0; c < matrix->n_cols; c += elements, block += matrix->type->block_bytes) {
        weight_parts_from_block(matrix->type->type, block, &parts);
        for (uint32_t s = 0; s < elements / sub; s++)
            y = reference_sub_block(matrix->type->type, &parts, s, sub, codes + c + sub * s, scales[(c + sub * s) / 32], y);
    }
    return y;
}

static float reference(const Matrix *matrix, bool exact, bool fine, uint32_t row, const float *x)
{
    if (exact || is_float(matrix->type))
        return reference_exact(matrix, row, x);
    return reference_fast(matrix, fine, row, x);
}

static double tolerance_of(const Matrix *matrix, uint32_t row, const float *x)
{
    float w[MAX_COLUMNS];
    double sum = 0.0, flushed = 0.0;

    weight_decode(matrix->type, matrix->file + row * matrix->row_bytes, w, matrix->n_cols);
    for (uint32_t c = 0; c < matrix->n_cols; c++) {
        sum += fabs((double)w[c] * (double)x[c]);
        flushed += fabs((double)w[c]) + fabs((double)x[c]) + 1.0;
    }
    return TOLERANCE * sum + 0x1p-126 * flushed;
}

static void reference_norm(const float *x, const float *norm, uint32_t n, float *ret)
{
    double sum = 0.0;
    float factor;

    for (uint32_t c = 0; c < n; c++)
        sum += (double)x[c] * (double)x[c];
    factor = (float)(1.0 / sqrt(sum / n + (double)NORM_EPS));
    for (uint32_t c = 0; c < n; c++)
        ret[c] = x[c] * factor * norm[c];
}

static bool same(float a, float b)
{
    return a == b || (isnan(a) && isnan(b));
}

/* ---- plain products ---------------------------------------------------------------------------------------------- */

typedef enum Input { INPUT_RANDOM, INPUT_EXTREME, INPUT_X_MAX } Input;

static void fill_input(float *x, uint32_t n_rows, uint32_t n_cols, Input input)
{
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t c = 0; c < n_cols; c++) {
            float value = random_float();

            if (input == INPUT_EXTREME) {
                switch (r % 6) {
                case 0: value = 0.0f; break;
                case 1: value *= 0x1p-130f; break;               /* subnormal */
                case 2: value *= 0x1p100f; break;
                case 3: value = c == 3 ? 1000.0f : value; break; /* an outlier */
                case 4: value = c % 64 < 32 ? value * 0x1p-99f : value; break;
                case 5: value = value < 0.0f ? -1.0f : 1.0f; break;
                }
            }
            x[r * n_cols + c] = value;
        }
}

static void check_product(Fixture *fixture, bool exact, bool fine, const Matrix *matrix, uint32_t n_rows, Input input)
{
    _cleanup_(freep) float *x = malloc(sizeof(float) * n_rows * matrix->n_cols);
    _cleanup_(freep) float *y = malloc(sizeof(float) * n_rows * matrix->n_rows);
    OpsLinear linear = {.x = fixture->x, .weights = {weight_of(matrix)}, .n_weights = 1, .fine = fine, .y = fixture->y};

    assert_true(x && y);
    fill_input(x, n_rows, matrix->n_cols, input);
    upload(fixture, fixture->x, x, sizeof(float) * n_rows * matrix->n_cols);
    assert_int_equal(ops_linear(fixture->ops[exact], &linear, n_rows), 0);
    download(fixture, fixture->y, y, sizeof(float) * n_rows * matrix->n_rows);
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t i = 0; i < matrix->n_rows; i++) {
            const float *row = x + r * matrix->n_cols;
            float got = y[r * matrix->n_rows + i];
            float want = reference(matrix, exact, fine, i, row);
            double error = fabs((double)got - (double)want);

            if (fixture->bits ? !same(got, want) : error > tolerance_of(matrix, i, row))
                fail_msg("%s %ux%u %s, %u rows, input %d: row %u output %u: %.9g, reference %.9g", matrix->type->name,
                         matrix->n_rows, matrix->n_cols, exact ? "exact" : fine ? "fine" : "fast", n_rows, (int)input, r, i, (double)got,
                         (double)want);
        }
}

static void check_type(Fixture *fixture, bool exact, uint32_t type, bool extreme)
{
    static const uint32_t shapes[][2] = {{16, 1}, {50, 3}, {7, 2}, {33, 1}};
    static const uint32_t rows[] = {1, 2, 3, 5, 7, 8, 9, 13, 23};
    const WeightTypeInfo *info = weight_type_info(type);

    for (size_t s = 0; s < N_ELEMENTS(shapes); s++) {
        uint32_t n_cols = shapes[s][1] * info->record_columns - (is_float(info) && s % 2 ? 13 : 0);
        Matrix matrix = matrix_new(fixture, type, shapes[s][0], n_cols, extreme);

        for (size_t r = 0; r < N_ELEMENTS(rows); r++)
            for (int fine = 0; fine <= !exact; fine++)
                check_product(fixture, exact, fine, &matrix, rows[r], extreme ? INPUT_EXTREME : INPUT_RANDOM);
        matrix_clear(&matrix);
    }
}

static void linear_fast_equals_the_reference_for_every_type(void **state)
{
    for (size_t t = 0; t < N_ELEMENTS(all_types); t++)
        check_type(*state, false, all_types[t], false);
}

static void linear_exact_equals_the_reference_for_every_type(void **state)
{
    for (size_t t = 0; t < N_ELEMENTS(all_types); t++)
        check_type(*state, true, all_types[t], false);
}

static void linear_equals_the_reference_on_extreme_values(void **state)
{
    for (size_t t = 0; t < N_ELEMENTS(all_types); t++) {
        check_type(*state, false, all_types[t], true);
        check_type(*state, true, all_types[t], true);
    }
}

static void linear_keeps_a_bad_row_to_itself(void **state)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    Fixture *fixture = *state;
    Matrix matrix = matrix_new(fixture, WEIGHT_TYPE_Q4_1, 32, 96, false);
    OpsLinear linear = {.x = fixture->x, .weights = {weight_of(&matrix)}, .n_weights = 1, .y = fixture->y};

    for (uint32_t n_rows = 4; n_rows <= 20; n_rows += 16)
        for (uint32_t i = 0; i < 6; i++) {
            float x[20 * 96], y[20 * 32];

            fill_input(x, n_rows, 96, INPUT_RANDOM);
            x[2 * 96 + 40] = bad[i % 3];
            upload(fixture, fixture->x, x, sizeof(float) * n_rows * 96);
            assert_int_equal(ops_linear(fixture->ops[i / 3], &linear, n_rows), 0);
            download(fixture, fixture->y, y, sizeof(float) * n_rows * 32);
            for (uint32_t r = 0; r < n_rows; r++)
                for (uint32_t c = 0; c < 32; c++)
                    assert_true((r == 2) == !isfinite(y[r * 32 + c]));
        }
    matrix_clear(&matrix);
}

/* ---- prologue and epilogues -------------------------------------------------------------------------------------- */

typedef struct Fused {
    uint32_t types[3], rows[3], n_weights, n_cols;
    OpsEpilogue epilogue;
    bool norm, gather;
} Fused;

static uint32_t fused_columns(const Fused *fused)
{
    return fused->epilogue == OPS_EPILOGUE_SWIGLU ? fused->rows[0]
                                                  : fused->rows[0] + (fused->n_weights > 1 ? fused->rows[1] : 0) +
                                                        (fused->n_weights > 2 ? fused->rows[2] : 0);
}

/* One row of y, and what it may be off by. */
static void reference_fused(const Fused *fused, bool exact, bool fine, const Matrix *matrices, const float *x, const float *norm,
                            const float *before, float *ret, double *ret_tolerance)
{
    float input[MAX_COLUMNS];
    uint32_t column = 0;

    memcpy(input, x, sizeof(float) * fused->n_cols);
    if (fused->norm)
        reference_norm(x, norm, fused->n_cols, input);
    for (uint32_t w = 0; w < fused->n_weights; w++)
        for (uint32_t i = 0; i < fused->rows[w]; i++) {
            float value = reference(&matrices[w], exact, fine, i, input);
            double tolerance = tolerance_of(&matrices[w], i, input) + 1e-6 * fabs((double)value);

            if (fused->epilogue == OPS_EPILOGUE_SWIGLU && w == 1) {
                double gate = (double)ret[i], silu = gate / (1.0 + exp(-gate));

                ret_tolerance[i] = tolerance * fabs(silu) + ret_tolerance[i] * 1.1 * fabs((double)value) +
                                   1e-6 * fabs(silu * (double)value);
                ret[i] = (float)(silu * (double)value);
                continue;
            }
            ret[column] = fused->epilogue == OPS_EPILOGUE_ADD ? before[column] + value : value;
            ret_tolerance[column++] = tolerance;
        }
}

static void check_fused(Fixture *fixture, bool exact, bool fine, const Fused *fused, uint32_t n_rows)
{
    uint32_t n_out = fused_columns(fused), n_x = n_rows + 3;
    _cleanup_(freep) float *x = malloc(sizeof(float) * n_x * fused->n_cols), *before = malloc(sizeof(float) * n_rows * n_out);
    _cleanup_(freep) float *y = malloc(sizeof(float) * n_rows * n_out), *want = malloc(sizeof(float) * n_out);
    _cleanup_(freep) double *tolerance = malloc(sizeof(double) * n_out);
    float norm[MAX_COLUMNS];
    int32_t rows[MAX_ROWS + 4];
    Matrix matrices[3];
    OpsLinear linear = {.x = fixture->x, .x_rows = fused->gather ? fixture->rows : NULL, .x_rows_offset = 16,
                        .norm_weight = fused->norm ? fixture->norm : NULL, .norm_eps = NORM_EPS,
                        .n_weights = fused->n_weights, .epilogue = fused->epilogue, .fine = fine, .y = fixture->y};

    assert_true(x && y && before && want && tolerance);
    for (uint32_t w = 0; w < fused->n_weights; w++) {
        matrices[w] = matrix_new(fixture, fused->types[w], fused->rows[w], fused->n_cols, false);
        linear.weights[w] = weight_of(&matrices[w]);
    }
    fill_input(x, n_x, fused->n_cols, INPUT_RANDOM);
    fill_input(before, n_rows, n_out, INPUT_RANDOM);
    fill_input(norm, 1, fused->n_cols, INPUT_RANDOM);
    for (uint32_t r = 0; r < n_rows; r++)
        rows[4 + r] = (int32_t)((r * 5 + 2) % n_x);
    upload(fixture, fixture->x, x, sizeof(float) * n_x * fused->n_cols);
    upload(fixture, fixture->y, before, sizeof(float) * n_rows * n_out);
    upload(fixture, fixture->norm, norm, sizeof(float) * fused->n_cols);
    upload(fixture, fixture->rows, rows, sizeof(int32_t) * (4 + n_rows));
    assert_int_equal(ops_linear(fixture->ops[exact], &linear, n_rows), 0);
    download(fixture, fixture->y, y, sizeof(float) * n_rows * n_out);
    for (uint32_t r = 0; r < n_rows; r++) {
        uint32_t from = fused->gather ? (uint32_t)rows[4 + r] : r;

        reference_fused(fused, exact, fine, matrices, x + from * fused->n_cols, norm, before + r * n_out, want, tolerance);
        for (uint32_t i = 0; i < n_out; i++)
            if (!(fabs((double)y[r * n_out + i] - (double)want[i]) <= tolerance[i]))
                fail_msg("epilogue %d, %u rows, %s: row %u column %u: %.9g, reference %.9g within %.3g", (int)fused->epilogue,
                         n_rows, exact ? "exact" : "fast", r, i, (double)y[r * n_out + i], (double)want[i], tolerance[i]);
    }
    for (uint32_t w = 0; w < fused->n_weights; w++)
        matrix_clear(&matrices[w]);
}

static void linear_fuses_norm_gather_and_epilogues(void **state)
{
    static const Fused cases[] = {
        {{3, 3, 3}, {48, 17, 16}, 3, 192, OPS_EPILOGUE_STORE, true, false},
        {{3}, {50}, 1, 96, OPS_EPILOGUE_ADD, false, false},
        {{3, 3}, {72, 72}, 2, 192, OPS_EPILOGUE_SWIGLU, true, false},
        {{8}, {100}, 1, 64, OPS_EPILOGUE_STORE, true, true},
        /* types mixed in one linear */
        {{12, 12, 14}, {40, 16, 16}, 3, 512, OPS_EPILOGUE_STORE, true, false},
        {{0, 3, 14}, {20, 21, 22}, 3, 256, OPS_EPILOGUE_ADD, true, true},
        {{12, 14}, {40, 40}, 2, 256, OPS_EPILOGUE_SWIGLU, true, true},
        {{1, 1}, {19, 19}, 2, 45, OPS_EPILOGUE_SWIGLU, true, false},
    };
    static const uint32_t rows[] = {1, 3, 8, 21};

    for (size_t i = 0; i < N_ELEMENTS(cases); i++)
        for (size_t r = 0; r < N_ELEMENTS(rows); r++) {
            check_fused(*state, false, false, &cases[i], rows[r]);
            check_fused(*state, false, true, &cases[i], rows[r]);
            check_fused(*state, true, false, &cases[i], rows[r]);
        }
}

/* ---- a row alone, a row in company, linears in a chain ----------------------------------------------------------- */

#define LAYER_EMBD 96
#define LAYER_FF   256

/* o, gate and up, down, and the next layer's qkv, of one type or of two. */
static void run_layer(Fixture *fixture, bool exact, const Matrix *matrices, uint32_t n_rows, bool chained, const float *x,
                      const float *before, float *ret)
{
    uint32_t x_bytes = n_rows * LAYER_EMBD * sizeof(float);
    _cleanup_(gpu_buffer_freep) GpuBuffer *hidden = NULL, *wide = NULL;
    OpsLinear linears[4];

    assert_int_equal(gpu_buffer_new(fixture->gpu, GPU_PURPOSE_ACTIVATIONS, x_bytes, &hidden, NULL), 0);
    assert_int_equal(gpu_buffer_new(fixture->gpu, GPU_PURPOSE_ACTIVATIONS, n_rows * LAYER_FF * sizeof(float), &wide, NULL), 0);
    /* As the models do: one term for gate and up, two for the others. */
    linears[0] = (OpsLinear){.x = fixture->x, .weights = {weight_of(&matrices[0])}, .n_weights = 1,
                             .epilogue = OPS_EPILOGUE_ADD, .fine = true, .y = hidden};
    linears[1] = (OpsLinear){.x = hidden, .norm_weight = fixture->norm, .norm_eps = NORM_EPS,
                             .weights = {weight_of(&matrices[1]), weight_of(&matrices[2])}, .n_weights = 2,
                             .epilogue = OPS_EPILOGUE_SWIGLU, .y = wide};
    linears[2] = (OpsLinear){.x = wide, .weights = {weight_of(&matrices[3])}, .n_weights = 1, .epilogue = OPS_EPILOGUE_ADD,
                             .fine = true, .y = hidden};
    linears[3] = (OpsLinear){.x = hidden, .norm_weight = fixture->norm, .norm_eps = NORM_EPS,
                             .weights = {weight_of(&matrices[4])}, .n_weights = 1, .fine = true, .y = fixture->y};
    upload(fixture, fixture->x, x, x_bytes);
    upload(fixture, hidden, before, x_bytes);
    for (uint32_t i = 0; i < 4 && !chained; i++)
        assert_int_equal(ops_linear(fixture->ops[exact], &linears[i], n_rows), 0);
    if (chained)
        assert_int_equal(ops_chain(fixture->ops[exact], linears, 4, n_rows), 0);
    download(fixture, fixture->y, ret, n_rows * matrices[4].n_rows * sizeof(float));
}

static void check_layer(Fixture *fixture, bool exact, uint32_t type, uint32_t down_type)
{
    const uint32_t shapes[5][2] = {{LAYER_EMBD, LAYER_EMBD}, {LAYER_FF, LAYER_EMBD}, {LAYER_FF, LAYER_EMBD},
                                   {LAYER_EMBD, LAYER_FF}, {150, LAYER_EMBD}};
    static const uint32_t counts[] = {2, 5, 8, 9, 41};
    float x[41 * LAYER_EMBD], before[41 * LAYER_EMBD], norm[LAYER_EMBD];
    _cleanup_(freep) float *alone = malloc(41 * 150 * sizeof(float)), *many = malloc(41 * 150 * sizeof(float));
    Matrix matrices[5];

    assert_true(alone && many);
    for (size_t i = 0; i < 5; i++)
        matrices[i] = matrix_new(fixture, i == 3 ? down_type : type, shapes[i][0], shapes[i][1], false);
    fill_input(x, 41, LAYER_EMBD, INPUT_RANDOM);
    fill_input(before, 41, LAYER_EMBD, INPUT_RANDOM);
    fill_input(norm, 1, LAYER_EMBD, INPUT_RANDOM);
    upload(fixture, fixture->norm, norm, sizeof(norm));
    for (uint32_t r = 0; r < 41; r++)
        run_layer(fixture, exact, matrices, 1, true, x + r * LAYER_EMBD, before + r * LAYER_EMBD, alone + r * 150);
    for (size_t i = 0; i < 2 * N_ELEMENTS(counts); i++) {
        uint32_t n_rows = counts[i / 2];

        run_layer(fixture, exact, matrices, n_rows, i % 2, x, before, many);
        for (uint32_t j = 0; j < n_rows * 150; j++)
            if (float_to_bits(many[j]) != float_to_bits(alone[j]))
                fail_msg("%s, %u rows, %s: output %u of row %u: %.9g, alone %.9g", exact ? "exact" : "fast", n_rows,
                         i % 2 ? "chained" : "one by one", j % 150, j / 150, (double)many[j], (double)alone[j]);
    }
    for (size_t i = 0; i < 5; i++)
        matrix_clear(&matrices[i]);
}

static void linear_rows_and_chains_do_not_change_a_bit(void **state)
{
    check_layer(*state, false, WEIGHT_TYPE_Q4_1, WEIGHT_TYPE_Q4_1);
    check_layer(*state, true, WEIGHT_TYPE_Q4_1, WEIGHT_TYPE_Q4_1);
    check_layer(*state, false, WEIGHT_TYPE_Q8_0, WEIGHT_TYPE_Q6_K);
    check_layer(*state, false, WEIGHT_TYPE_F16, WEIGHT_TYPE_Q5_0);
}

static void linear_chain_gives_the_same_every_time(void **state)
{
    Fixture *fixture = *state;
    float x[8 * LAYER_EMBD], before[8 * LAYER_EMBD], norm[LAYER_EMBD], first[8 * 150], again[8 * 150];
    Matrix matrices[5];
    const uint32_t shapes[5][2] = {{LAYER_EMBD, LAYER_EMBD}, {LAYER_FF, LAYER_EMBD}, {LAYER_FF, LAYER_EMBD},
                                   {LAYER_EMBD, LAYER_FF}, {150, LAYER_EMBD}};

    for (size_t i = 0; i < 5; i++)
        matrices[i] = matrix_new(fixture, WEIGHT_TYPE_Q4_1, shapes[i][0], shapes[i][1], false);
    fill_input(x, 8, LAYER_EMBD, INPUT_RANDOM);
    fill_input(before, 8, LAYER_EMBD, INPUT_RANDOM);
    fill_input(norm, 1, LAYER_EMBD, INPUT_RANDOM);
    upload(fixture, fixture->norm, norm, sizeof(norm));
    run_layer(fixture, false, matrices, 8, true, x, before, first);
    for (int i = 0; i < 300; i++) {
        run_layer(fixture, false, matrices, 8, true, x, before, again);
        assert_memory_equal(first, again, sizeof(first));
    }
    for (size_t i = 0; i < 5; i++)
        matrix_clear(&matrices[i]);
}

static void linear_refuses_what_does_not_fit(void **state)
{
    Fixture *fixture = *state;
    Matrix matrix = matrix_new(fixture, WEIGHT_TYPE_Q4_1, 32, 96, false), other = matrix_new(fixture, WEIGHT_TYPE_Q4_1, 16, 64, false);
    OpsLinear linear = {.x = fixture->x, .weights = {weight_of(&matrix)}, .n_weights = 1, .y = fixture->y};

    assert_int_equal(ops_linear(fixture->ops[0], &linear, 0), -EINVAL);
    assert_int_equal(ops_linear(fixture->ops[0], &linear, MAX_ROWS + 1), -EINVAL);
    linear.n_weights = 2;
    linear.weights[1] = weight_of(&other);
    assert_int_equal(ops_linear(fixture->ops[0], &linear, 1), -EINVAL);
    linear.weights[0] = weight_of(&matrix);
    linear.weights[0].n_cols = MAX_COLUMNS + 32;
    linear.n_weights = 1;
    assert_int_equal(ops_linear(fixture->ops[0], &linear, 1), -EINVAL);
    linear.weights[0] = weight_of(&matrix);
    linear.epilogue = OPS_EPILOGUE_SWIGLU;
    assert_int_equal(ops_linear(fixture->ops[0], &linear, 1), -EINVAL);
    assert_false(gpu_is_lost(fixture->gpu));
    matrix_clear(&matrix);
    matrix_clear(&other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_fast_equals_the_reference_for_every_type),
        cmocka_unit_test(linear_exact_equals_the_reference_for_every_type),
        cmocka_unit_test(linear_equals_the_reference_on_extreme_values),
        cmocka_unit_test(linear_keeps_a_bad_row_to_itself),
        cmocka_unit_test(linear_fuses_norm_gather_and_epilogues),
        cmocka_unit_test(linear_rows_and_chains_do_not_change_a_bit),
        cmocka_unit_test(linear_chain_gives_the_same_every_time),
        cmocka_unit_test(linear_refuses_what_does_not_fit),
    };

    printf("seed %#llx\n", (unsigned long long)random_state);
    return cmocka_run_group_tests(tests, setup, teardown);
}
