/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CLBlast products against sums in double, on odd sizes from 1 to 69 in every dimension.  Tolerance per element: k + 2
 * roundings of the sum of absolute products, the bound of any order of summation.
 */

#include "opencl/blas.h"
#include "tests/lib/patience.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#define SIZE_MAX_ODD 69
#define STRIDE       75
#define OFFSET       13
#define N_FLOATS     (OFFSET + SIZE_MAX_ODD * STRIDE)

typedef struct Fixture {
    Gpu *gpu;
    Blas *blas;
    GpuBuffer *a, *b, *c;
    float host_a[N_FLOATS], host_b[N_FLOATS], host_c[N_FLOATS], result[N_FLOATS];
    uint32_t seed;
} Fixture;

static int setup(void **state)
{
    const GpuOptions options = {.deadline_usec = PATIENCE_USEC};
    Fixture *fixture = calloc(1, sizeof(*fixture));

    if (!fixture)
        return -1;
    *state = fixture;
    fixture->seed = (uint32_t)time(NULL);
    print_message("seed %u\n", fixture->seed);
    return gpu_open(&options, &fixture->gpu, NULL) || blas_new(fixture->gpu, &fixture->blas, NULL) ||
                   gpu_buffer_new(fixture->gpu, GPU_PURPOSE_OTHER, sizeof(fixture->host_a), &fixture->a, NULL) ||
                   gpu_buffer_new(fixture->gpu, GPU_PURPOSE_OTHER, sizeof(fixture->host_b), &fixture->b, NULL) ||
                   gpu_buffer_new(fixture->gpu, GPU_PURPOSE_OTHER, sizeof(fixture->host_c), &fixture->c, NULL)
               ? -1
               : 0;
}

static int teardown(void **state)
{
    Fixture *fixture = *state;

    gpu_buffer_free(fixture->a);
    gpu_buffer_free(fixture->b);
    gpu_buffer_free(fixture->c);
    blas_free(fixture->blas);
    gpu_free(fixture->gpu);
    free(fixture);
    return 0;
}

static uint32_t next_random(Fixture *fixture)
{
    fixture->seed = fixture->seed * UINT32_C(1664525) + UINT32_C(1013904223);
    return fixture->seed >> 8;
}

static void fill(Fixture *fixture, float *values)
{
    for (size_t i = 0; i < N_FLOATS; i++)
        values[i] = (float)(int32_t)(next_random(fixture) - (1u << 23)) * 0x1p-20f;
}

static BlasProduct product_of(const Fixture *fixture, uint32_t m, uint32_t n, uint32_t k)
{
    return (BlasProduct){.m = m,
                         .n = n,
                         .k = k,
                         .alpha = 1,
                         .a = {fixture->a, OFFSET, STRIDE},
                         .b = {fixture->b, OFFSET, STRIDE},
                         .c = {fixture->c, OFFSET, STRIDE}};
}

static void run(Fixture *fixture, const BlasProduct *product)
{
    Gpu *gpu = fixture->gpu;
    _cleanup_(gpu_event_unrefp) GpuEvent *event = NULL;
    GpuEvent *uploaded[2] = {0};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r;

    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_UPLOAD, fixture->a, 0, fixture->host_a, sizeof(fixture->host_a),
                                GPU_WAIT_NONE, "a", &uploaded[0]),
                     0);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_UPLOAD, fixture->b, 0, fixture->host_b, sizeof(fixture->host_b),
                                GPU_WAIT_NONE, "b", &uploaded[1]),
                     0);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_COMPUTE, fixture->c, 0, fixture->host_c, sizeof(fixture->host_c),
                                GPU_WAIT_NONE, "c", NULL),
                     0);
    r = blas_product(fixture->blas, product, (GpuWait){uploaded, 2}, &event, &detail);
    if (r)
        print_error("%d: %s\n", r, detail.text);
    assert_int_equal(r, 0);
    assert_int_equal(gpu_download(gpu, GPU_QUEUE_DOWNLOAD, fixture->c, 0, fixture->result, sizeof(fixture->result),
                                  (GpuWait){&event, 1}, "c", NULL),
                     0);
    assert_int_equal(gpu_drain(gpu, NULL), 0);
    gpu_event_unref(uploaded[0]);
    gpu_event_unref(uploaded[1]);
}

/* The whole buffer: elements outside of the matrix must be as before. */
static void check(const Fixture *fixture, const BlasProduct *product)
{
    for (size_t i = 0; i < N_FLOATS; i++) {
        size_t row = i < OFFSET ? SIZE_MAX : (i - OFFSET) / STRIDE, column = i < OFFSET ? 0 : (i - OFFSET) % STRIDE;
        double sum = 0, absolute = 0, bound;

        if (row >= product->m || column >= product->n) {
            assert_memory_equal(&fixture->result[i], &fixture->host_c[i], sizeof(float));
            continue;
        }
        for (size_t j = 0; j < product->k; j++) {
            double x = (double)fixture->host_a[OFFSET + row * STRIDE + j] * fixture->host_b[OFFSET + column * STRIDE + j];

            sum += x;
            absolute += fabs(x);
        }
        absolute = absolute * fabs((double)product->alpha);
        sum *= product->alpha;
        if (product->beta != 0) {
            sum += (double)product->beta * fixture->host_c[i];
            absolute += fabs((double)product->beta * fixture->host_c[i]);
        }
        bound = (product->k + 2) * absolute * FLT_EPSILON;
        if (!(fabs(sum - fixture->result[i]) <= bound))
            print_error("%u x %u x %u at %zu, %zu: %g, not %g (bound %g)\n", product->m, product->n, product->k, row, column,
                        fixture->result[i], sum, bound);
        assert_true(fabs(sum - fixture->result[i]) <= bound);
    }
}

static void blas_product_equals_sums_in_double_on_odd_sizes(void **state)
{
    Fixture *fixture = *state;

    for (uint32_t m = 1; m <= SIZE_MAX_ODD; m += 2)
        for (uint32_t i = 0; i < 4; i++) {
            /* Each dimension takes every odd size once, beside random ones. */
            uint32_t x = 1 + 2 * (next_random(fixture) % 35), y = 1 + 2 * (next_random(fixture) % 35);
            BlasProduct product = product_of(fixture, i == 0 ? m : x, i == 1 ? m : i == 0 ? x : y, i >= 2 ? m : y);

            fill(fixture, fixture->host_a);
            fill(fixture, fixture->host_b);
            fill(fixture, fixture->host_c);
            run(fixture, &product);
            check(fixture, &product);
        }
}

static void blas_product_scales_and_adds(void **state)
{
    Fixture *fixture = *state;
    BlasProduct product = product_of(fixture, 33, 17, 21);

    product.alpha = -0.375f;
    product.beta = 2.5f;
    fill(fixture, fixture->host_a);
    fill(fixture, fixture->host_b);
    fill(fixture, fixture->host_c);
    run(fixture, &product);
    check(fixture, &product);
}

static void blas_product_refuses_what_does_not_fit_and_keeps_the_device(void **state)
{
    Fixture *fixture = *state;
    BlasProduct good = product_of(fixture, 69, 69, 69), bad[7];
    ErrorDetail detail = ERROR_DETAIL_NULL;

    for (size_t i = 0; i < N_ELEMENTS(bad); i++)
        bad[i] = good;
    bad[0].m = 0;
    bad[1].m = 70;
    bad[2].k = 76;
    bad[3].a.offset = OFFSET + STRIDE;
    bad[4].b.stride = 68;
    bad[5].c.offset = UINT64_MAX;
    bad[6].c.stride = UINT64_MAX / 8;
    for (size_t i = 0; i < N_ELEMENTS(bad); i++)
        assert_int_equal(blas_product(fixture->blas, &bad[i], GPU_WAIT_NONE, NULL, &detail), -EINVAL);
    assert_false(gpu_is_lost(fixture->gpu));
    assert_int_equal(blas_prepare(fixture->blas, &good, &detail), 0);
}

static void blas_workspace_is_within_the_budget(void **state)
{
    Fixture *fixture = *state;
    Gpu *gpu = fixture->gpu;
    _cleanup_(gpu_buffer_freep) GpuBuffer *matrix = NULL;
    uint64_t by_purpose[GPU_PURPOSE_X_MAX], before, after, budget = gpu_info(gpu)->budget_bytes;
    /* Large enough for CLBlast's kernels that pad into a workspace, and ragged so that they must. */
    uint32_t n = 1501;
    BlasProduct product = {.m = n, .n = n, .k = n, .alpha = 1};

    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, 4ul * n * n, &matrix, NULL), 0);
    product.a = product.b = product.c = (BlasMatrix){matrix, 0, n};
    gpu_memory_used(gpu, by_purpose, &before);
    gpu_set_budget(gpu, before + 1000);
    assert_int_equal(blas_prepare(fixture->blas, &product, NULL), GPU_E_OVER_BUDGET);
    gpu_set_budget(gpu, budget);
    assert_int_equal(blas_prepare(fixture->blas, &product, NULL), 0);
    gpu_memory_used(gpu, by_purpose, &after);
    print_message("workspace of %u^3: %lu bytes\n", n, (unsigned long)by_purpose[GPU_PURPOSE_ACTIVATIONS]);
    assert_true(by_purpose[GPU_PURPOSE_ACTIVATIONS] > 0);
}

/* CLBlast's other path: operands padded into the workspace.  Every element of the result must be k. */
static void blas_product_of_large_ragged_matrices_goes_through_the_workspace(void **state)
{
    enum { M = 523, N = 541, K = 547 };
    Fixture *fixture = *state;
    Gpu *gpu = fixture->gpu;
    _cleanup_(gpu_buffer_freep) GpuBuffer *ones = NULL, *c = NULL;
    _cleanup_(freep) float *host = malloc(sizeof(float) * N * K), *result = calloc(M * N, sizeof(float));
    BlasProduct product = {.m = M, .n = N, .k = K, .alpha = 1};

    for (size_t i = 0; i < (size_t)N * K; i++)
        host[i] = 1;
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, sizeof(float) * N * K, &ones, NULL), 0);
    assert_int_equal(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, sizeof(float) * M * N, &c, NULL), 0);
    assert_int_equal(gpu_upload(gpu, GPU_QUEUE_COMPUTE, ones, 0, host, sizeof(float) * N * K, GPU_WAIT_NONE, "x", NULL), 0);
    product.a = product.b = (BlasMatrix){ones, 0, K};
    product.c = (BlasMatrix){c, 0, N};
    assert_int_equal(blas_product(fixture->blas, &product, GPU_WAIT_NONE, NULL, NULL), 0);
    assert_int_equal(gpu_download(gpu, GPU_QUEUE_COMPUTE, c, 0, result, sizeof(float) * M * N, GPU_WAIT_NONE, "y", NULL), 0);
    assert_int_equal(gpu_drain(gpu, NULL), 0);
    for (size_t i = 0; i < (size_t)M * N; i++)
        assert_true(result[i] == K);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blas_product_equals_sums_in_double_on_odd_sizes),
        cmocka_unit_test(blas_product_scales_and_adds),
        cmocka_unit_test(blas_product_refuses_what_does_not_fit_and_keeps_the_device),
        cmocka_unit_test(blas_workspace_is_within_the_budget),
        cmocka_unit_test(blas_product_of_large_ragged_matrices_goes_through_the_workspace),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
