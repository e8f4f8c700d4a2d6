/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention against the double precision answer.  Seed: values are hashes of their place (tests/lib/attend-world.c).
 * Tolerance, of the largest output of the row's head: float32 kernels 1e-5, integer kernels 3e-3; 7e-2 for the integer kernels where
 * |q| |k| / 8 reaches 700, as a query of 14 bits moves a score by 1e-4 of it.
 */

#include "tests/lib/attend-world.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

typedef struct Fixture {
    Gpu *gpu;
    GpuInfo info;
} Fixture;

static int set_up(void **state)
{
    static Fixture fixture;
    GpuOptions options = {.cache_dir = getenv("LEAT_TEST_CACHE")};
    ErrorDetail detail = ERROR_DETAIL_NULL;

    if (gpu_open(&options, &fixture.gpu, &detail)) {
        printf("no device: %s\n", detail.text);
        return -1;
    }
    fixture.info = *gpu_info(fixture.gpu);
    printf("device '%s' (%s), SIMD level %d\n", fixture.info.name, fixture.info.platform, (int)fixture.info.simd);
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    (void)gpu_free(((Fixture *)*state)->gpu);
    return 0;
}

/* Scores with a deviation of about 2 and a few tokens that stand out. */
static float ordinary(int what, uint32_t sequence, uint32_t position, uint32_t head, uint32_t dim)
{
    float x = world_gaussian((uint32_t)what, sequence, position, head, dim);

    return what == 0 ? 2.0f * x : what == 1 && position % 97 == 13 ? 2.0f * x : x;
}

/* Zero keys here and there, values of very different size, one huge score, tiny numbers. */
static float extreme(int what, uint32_t sequence, uint32_t position, uint32_t head, uint32_t dim)
{
    float x = world_gaussian((uint32_t)what, sequence, position, head, dim);

    if (what == 1)
        return position % 5 == 0 ? 0.0f : position == 150 ? 30.0f * x : position % 7 == 0 ? 1e-6f * x : x;
    if (what == 2)
        return position % 64 == 20 ? 300.0f * x : position % 9 == 0 ? 0.0f : position % 11 == 0 ? 1e-4f * x : x;
    return head % 4 == 1 ? 0.0f : 3.0f * x;
}

static double row_error(const float *out, const double *reference, size_t n)
{
    double worst = 0, range = 1e-30;

    for (size_t i = 0; i < n; i++) {
        range = fmax(range, fabs(reference[i]));
        worst = fmax(worst, isfinite(out[i]) ? fabs(out[i] - reference[i]) : INFINITY);
    }
    return worst / range;
}

/* Passes of ragged sizes over two sequences; every row of the last passes is checked head by head. */
static double walk(World *world, const KvShape *shape, const WorldItem (*passes)[2], size_t n_passes, size_t first_checked)
{
    size_t dim = shape->v_head_dim, width = shape->n_heads * dim;
    _cleanup_(freep) float *out = malloc(512 * width * sizeof(float));
    _cleanup_(freep) double *reference = malloc(width * sizeof(double));
    double worst = 0;

    assert_true(out && reference);
    for (size_t i = 0; i < n_passes; i++) {
        uint32_t n_items = passes[i][1].n_tokens > 0 ? 2 : 1, row = 0;

        world_pass(world, passes[i], n_items, out);
        for (uint32_t item = 0; item < n_items; item++)
            for (uint32_t t = 0; t < passes[i][item].n_tokens; t++, row++) {
                uint32_t position = world_length(world, passes[i][item].sequence) - passes[i][item].n_tokens + t;

                if (i < first_checked && t % 13)
                    continue;
                world_reference(world, passes[i][item].sequence, position, reference);
                for (uint32_t head = 0; head < shape->n_heads; head++) {
                    double error = row_error(out + row * width + head * dim, reference + head * dim, dim);

                    if (error > 0.1)
                        print_message("pass %zu, sequence %u, position %u, head %u: error %g\n", i, passes[i][item].sequence, position,
                                      head, error);
                    worst = fmax(worst, error);
                }
            }
    }
    return worst;
}

/* A prompt, decoding across page borders, a second sequence joining, a chunk that crosses several pages. */
static const WorldItem ragged_passes[][2] = {
    {{0, 3}, {0, 0}},  {{0, 150}, {1, 40}}, {{1, 1}, {0, 1}},   {{0, 1}, {0, 0}}, {{0, 37}, {1, 90}}, {{1, 64}, {0, 1}},
    {{0, 100}, {0, 0}}, {{0, 1}, {1, 1}},   {{0, 20}, {1, 33}},
};

static bool device_has(const GpuInfo *info, AttendKernels kernels)
{
    return kernels <= ATTEND_KERNELS_LANES || (kernels == ATTEND_KERNELS_VECTORS && info->simd >= GPU_SIMD_AVX2) ||
           (kernels == ATTEND_KERNELS_BW && info->simd >= GPU_SIMD_AVX512BW) ||
           (kernels == ATTEND_KERNELS_VNNI && info->simd >= GPU_SIMD_AVX512VNNI);
}

static void check(void **state, KvForm form, KvShape shape, bool exact, bool calibrated, AttendKernels kernels,
                  float (*value)(int, uint32_t, uint32_t, uint32_t, uint32_t), double tolerance)
{
    Fixture *fixture = *state;
    WorldOptions options = {
        .attend = {.form = form, .shape = shape, .exact = exact, .tail_bits = form.kind == KV_FORM_F32 ? 32 : 16,
                   .scale = 1.0f / sqrtf((float)shape.k_head_dim), .max_rows = 256, .max_refs = 64, .kernels = kernels},
        .max_tokens = 512, .calibrated = calibrated, .value = value,
    };
    _cleanup_(world_freep) World *world = NULL;
    double error;

    if (!device_has(&fixture->info, kernels)) {
        printf("  kernels %d: not on this device\n", (int)kernels);
        return;
    }
    world = world_new(fixture->gpu, &options);
    error = walk(world, &shape, ragged_passes, N_ELEMENTS(ragged_passes), N_ELEMENTS(ragged_passes) - 4);
    printf("  form %d K%u V%u, heads %u/%u of %u/%u, rotary %u, kernels %d: error %.2e of %.0e\n", (int)form.kind, form.k_bits,
           form.v_bits, shape.n_heads, shape.n_kv_heads, shape.k_head_dim, shape.v_head_dim, shape.rotary_dim, (int)world_kernels(world),
           error, tolerance);
    assert_true(error <= tolerance);
}

#define F32       (kv_form_default(KV_FORM_F32))
#define F16       (kv_form_default(KV_FORM_F16))
#define LEAT(k, v) kv_form_leat(k, v)

static void float_kernels_on_lanes_equal_the_definition(void **state)
{
    check(state, F32, (KvShape){9, 3, 64, 64, 64}, true, false, ATTEND_KERNELS_LANES, ordinary, 1e-5);
    check(state, F16, (KvShape){4, 1, 80, 80, 80}, true, false, ATTEND_KERNELS_LANES, ordinary, 1e-5);
    check(state, LEAT(5, 4), (KvShape){9, 3, 64, 64, 64}, true, true, ATTEND_KERNELS_LANES, extreme, 1e-5);
    check(state, LEAT(8, 5), (KvShape){2, 2, 80, 80, 40}, true, true, ATTEND_KERNELS_LANES, ordinary, 1e-5);
    check(state, LEAT(5, 4), (KvShape){4, 2, 192, 112, 64}, true, true, ATTEND_KERNELS_LANES, ordinary, 1e-5);
}

static void float_kernels_on_vectors_equal_the_definition(void **state)
{
    check(state, F32, (KvShape){9, 3, 64, 64, 64}, true, false, ATTEND_KERNELS_VECTORS, ordinary, 1e-5);
    check(state, F16, (KvShape){8, 1, 96, 96, 96}, true, false, ATTEND_KERNELS_VECTORS, extreme, 1e-5);
    check(state, LEAT(5, 4), (KvShape){9, 3, 64, 64, 64}, true, true, ATTEND_KERNELS_VECTORS, extreme, 1e-5);
    check(state, LEAT(4, 5), (KvShape){4, 4, 80, 80, 80}, true, true, ATTEND_KERNELS_VECTORS, ordinary, 1e-5);
    check(state, LEAT(8, 8), (KvShape){4, 1, 256, 256, 256}, true, true, ATTEND_KERNELS_VECTORS, ordinary, 1e-5);
    check(state, LEAT(4, 5), (KvShape){4, 2, 112, 192, 0}, true, true, ATTEND_KERNELS_VECTORS, ordinary, 1e-5);
    check(state, F32, (KvShape){4, 2, 32, 160, 32}, true, false, ATTEND_KERNELS_VECTORS, ordinary, 1e-5);
}

static void integer_kernels_with_vnni_stay_within_three_thousandths(void **state)
{
    check(state, LEAT(5, 4), (KvShape){9, 3, 64, 64, 64}, false, true, ATTEND_KERNELS_VNNI, ordinary, 3e-3);
    check(state, LEAT(5, 4), (KvShape){9, 3, 64, 64, 64}, false, true, ATTEND_KERNELS_VNNI, extreme, 7e-2);
    check(state, LEAT(8, 8), (KvShape){8, 1, 128, 128, 128}, false, true, ATTEND_KERNELS_VNNI, ordinary, 3e-3);
    check(state, LEAT(4, 5), (KvShape){4, 4, 32, 32, 16}, false, true, ATTEND_KERNELS_VNNI, ordinary, 3e-3);
    check(state, LEAT(5, 5), (KvShape){2, 1, 256, 256, 256}, false, true, ATTEND_KERNELS_VNNI, ordinary, 3e-3);
    check(state, LEAT(5, 4), (KvShape){4, 2, 80, 112, 32}, false, true, ATTEND_KERNELS_VNNI, ordinary, 3e-3);
}

static void integer_kernels_without_vnni_stay_within_three_thousandths(void **state)
{
    check(state, LEAT(5, 4), (KvShape){9, 3, 64, 64, 64}, false, true, ATTEND_KERNELS_BW, extreme, 7e-2);
    check(state, LEAT(8, 8), (KvShape){8, 2, 128, 128, 128}, false, true, ATTEND_KERNELS_BW, ordinary, 3e-3);
    check(state, LEAT(5, 5), (KvShape){4, 1, 192, 64, 64}, false, true, ATTEND_KERNELS_BW, ordinary, 3e-3);
}

/* Many query heads over one wide key and value head, the shape of latent attention. */
static void heads_of_576_and_512_equal_the_definition(void **state)
{
    const KvShape shape = {16, 1, 576, 512, 64};

    check(state, LEAT(5, 4), shape, true, true, ATTEND_KERNELS_VECTORS, ordinary, 1e-5);
    check(state, LEAT(5, 4), shape, false, true, ATTEND_KERNELS_VNNI, ordinary, 3e-3);
    check(state, F16, shape, true, false, ATTEND_KERNELS_VECTORS, ordinary, 1e-5);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(float_kernels_on_lanes_equal_the_definition),
        cmocka_unit_test(float_kernels_on_vectors_equal_the_definition),
        cmocka_unit_test(integer_kernels_with_vnni_stay_within_three_thousandths),
        cmocka_unit_test(integer_kernels_without_vnni_stay_within_three_thousandths),
        cmocka_unit_test(heads_of_576_and_512_equal_the_definition),
    };

    cmocka_set_test_filter(getenv("CMOCKA_TEST_FILTER"));
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
