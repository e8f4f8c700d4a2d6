/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention against the double precision answer, packed pages against kv_pack_page() byte for byte (tests/lib/attend-world.c).  Seed:
 * values are hashes of their place.
 *
 * A covering array of 59 programs: every pair of K and V bits of every form once; every bits of leat, on either side, with every head size;
 * transforms, groups, sinks, tails and kernels dealt out over them, widths that differ and long heads over the other forms.  Platforms other
 * than PoCL run a quarter of it and the rows of GPU kernels, of which PoCL, which compiles each for half a minute, runs one.  With LEAT_SOAK set: all head sizes and kernels for every pair.  LEAT_TEST_ROWS=FIRST-LAST picks rows.
 *
 * Tolerance, of the largest output of the row's head, less than twice the worst row's: float32 kernels 2e-5; integer kernels 5e-3; for extreme values 7e-2, as a query of
 * 14 bits moves a score by 1e-4 of |q| |k| / 8, which reaches 700.
 */

#include "tests/lib/attend-world.h"
#include "tests/lib/patience.h"

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
    GpuOptions options = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC};
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
           (kernels == ATTEND_KERNELS_AVX2 && info->simd >= GPU_SIMD_AVX2) ||
           (kernels == ATTEND_KERNELS_BW && info->simd >= GPU_SIMD_AVX512BW) ||
           (kernels == ATTEND_KERNELS_VNNI && info->simd >= GPU_SIMD_AVX512VNNI);
}

/* One program. */
typedef struct Row {
    KvForm form;
    KvShape shape;
    AttendKernels kernels; /* AUTO instead where the device has them not */
    bool extreme;
} Row;

static double tolerance_of(const Row *row, AttendKernels kernels)
{
    return kernels < ATTEND_KERNELS_AVX2 ? 2e-5 : row->extreme ? 7e-2 : 5e-3;
}

static void check(Fixture *fixture, const Row *row)
{
    const KvForm *f = &row->form;
    AttendKernels kernels = device_has(&fixture->info, row->kernels) ? row->kernels : ATTEND_KERNELS_AUTO;
    WorldOptions options = {
        .attend = {.form = *f, .shape = row->shape, .exact = kernels > ATTEND_KERNELS_AUTO && kernels < ATTEND_KERNELS_AVX2,
                   .tail_bits = f->kind == KV_FORM_F32 ? 32 : 16, .scale = 1.0f / sqrtf((float)row->shape.k_head_dim), .max_rows = 256,
                   .max_refs = 64, .kernels = kernels},
        .max_tokens = 512, .calibrated = true, .value = row->extreme ? extreme : ordinary,
    };
    _cleanup_(world_freep) World *world = world_new(fixture->gpu, &options);
    double error = walk(world, &row->shape, ragged_passes, N_ELEMENTS(ragged_passes), N_ELEMENTS(ragged_passes) - 4);
    double tolerance = tolerance_of(row, world_kernels(world));

    printf("  %s K%u V%u, heads %u/%u of %u/%u, rotary %u, groups of %u, centre %d, pair scale %d, rotation %d, levels %d, sinks %u, tail %u, "
           "kernels %d: error %.2e of %.0e\n",
           kv_form_kind_to_string(f->kind), f->k_bits, f->v_bits, row->shape.n_heads, row->shape.n_kv_heads, row->shape.k_head_dim,
           row->shape.v_head_dim, row->shape.rotary_dim, f->group_dims, (int)f->centre, f->pair_scale, (int)f->rotation, (int)f->levels, f->sink_tokens,
           f->tail_tokens, (int)world_kernels(world), error, tolerance);
    (void)fflush(stdout);
    assert_true(error <= tolerance);
}

/* ---- the array ---------------------------------------------------------------------------------------------------------------- */

static const uint32_t head_dims[] = {64, 80, 128, 32, 96, 256, 112};
#define N_HEAD_DIMS N_ELEMENTS(head_dims)
#define FIRST_OTHER 42 /* rows before it are leat */

/* Everything but bits, head size and kernels, dealt out by the row's number so that nearly all pairs of values meet (searched for). */
static Row deal(uint32_t i, KvForm form, uint32_t head_dim, AttendKernels kernels)
{
    static const uint16_t groups[] = {64, 32, 16, 128, 48}, sinks[] = {4, 0, 32}, tails[] = {32, 0, 64, 128, 32, 96, 32};
    static const uint32_t heads[][2] = {{3, 1}, {4, 2}, {2, 2}, {8, 1}, {6, 3}};
    /* Of the rows that are not leat: K and V of different widths, none turned, and heads too long for registers and local memories. */
    static const KvShape others[] = {
        {4, 2, 80, 112, 32},    {4, 2, 192, 112, 64},  {2, 2, 64, 64, 64},     {4, 1, 192, 64, 64}, {16, 1, 576, 512, 64}, {16, 1, 576, 512, 64},
        {4, 2, 112, 192, 0},    {2, 1, 80, 80, 80},    {4, 2, 96, 112, 48},    {3, 1, 64, 64, 64},  {4, 2, 32, 160, 32},   {2, 1, 128, 128, 128},
        {4, 2, 256, 256, 128},  {4, 2, 96, 80, 96},    {16, 1, 576, 512, 64},  {4, 2, 64, 64, 64},  {4, 2, 32, 160, 32},
    };
    const uint32_t *n = heads[i % N_ELEMENTS(heads)];
    Row row = {.form = form, .shape = {n[0], n[1], head_dim, head_dim, i / 5 % 4 == 1 ? head_dim / 2 : head_dim}, .kernels = kernels, .extreme = i % 6 == 5};

    if (i >= FIRST_OTHER && i - FIRST_OTHER < N_ELEMENTS(others) && !getenv("LEAT_SOAK"))
        row.shape = others[i - FIRST_OTHER];
    row.form.sink_tokens = sinks[i % N_ELEMENTS(sinks)];
    row.form.tail_tokens = tails[i % N_ELEMENTS(tails)];
    if (!kv_form_is_coded(form))
        return row;
    if (form.kind != KV_FORM_FP8)
        row.form.group_dims = groups[i % N_ELEMENTS(groups)];
    row.form.rotation = i / 7 % 2 == 0 ? KV_ROTATION_HADAMARD : KV_ROTATION_NONE;
    row.form.centre = (KvCentre[]){KV_CENTRE_BEFORE_ROPE, KV_CENTRE_NONE, KV_CENTRE_AFTER_ROPE, KV_CENTRE_BEFORE_ROPE}[i / 6 % 4];
    row.form.pair_scale = i / 3 % 2;
    row.form.levels = form.kind == KV_FORM_LEAT && i % 4 == 3 ? KV_LEVELS_PLAIN : KV_LEVELS_SEARCHED;
    return row;
}

#define LAST_LANES 58
/* GPU kernels: one row of each form. */
static AttendKernels deal_kernels(uint32_t i, KvFormKind kind)
{
    static const AttendKernels grouped[] = {ATTEND_KERNELS_VNNI, ATTEND_KERNELS_VECTORS, ATTEND_KERNELS_BW, ATTEND_KERNELS_AVX2};
    static const uint32_t lanes[] = {2, 43, 50, 55, LAST_LANES};

    for (size_t k = 0; k < N_ELEMENTS(lanes); k++)
        if (i == lanes[k])
            return ATTEND_KERNELS_LANES;
    return kind == KV_FORM_LEAT || kind == KV_FORM_QUANTO || kind == KV_FORM_HQQ ? grouped[i % N_ELEMENTS(grouped)] : ATTEND_KERNELS_VECTORS;
}

static bool is_chosen(const Fixture *fixture, uint32_t i, KvFormKind kind)
{
    bool pocl = strcmp(fixture->info.platform, "Portable Computing Language") == 0, lanes = deal_kernels(i, kind) == ATTEND_KERNELS_LANES;
    const char *rows = getenv("LEAT_TEST_ROWS");
    unsigned first, last;

    if (rows && sscanf(rows, "%u-%u", &first, &last) == 2)
        return i >= first && i <= last;
    if (getenv("LEAT_SOAK"))
        return true;
    return pocl ? !lanes || i == LAST_LANES : i % 4 == 2 || lanes;
}

static void check_pair(Fixture *fixture, uint32_t i, KvForm form, uint32_t dim)
{
    Row row;

    if (!is_chosen(fixture, i, form.kind))
        return;
    if (!getenv("LEAT_SOAK")) {
        row = deal(i, form, head_dims[dim % N_HEAD_DIMS], deal_kernels(i, form.kind));
        check(fixture, &row);
        return;
    }
    for (uint32_t d = 0; d < N_HEAD_DIMS; d++)
        for (int kernels = ATTEND_KERNELS_LANES; kernels <= ATTEND_KERNELS_VNNI; kernels++)
            if (device_has(&fixture->info, (AttendKernels)kernels) && (kernels < ATTEND_KERNELS_AVX2 || deal(i, form, 64, 0).form.group_dims)) {
                row = deal(i + d, form, head_dims[d], (AttendKernels)kernels);
                check(fixture, &row);
            }
}

/* All pairs of some bits. */
static void check_bits(void **state, uint32_t i, KvFormKind kind, const uint8_t *bits, uint32_t n_bits)
{
    KvForm form = kv_form_default(kind);

    for (uint32_t k = 0; k < n_bits; k++)
        for (uint32_t v = 0; v < n_bits; v++, i++) {
            form.k_bits = bits[k];
            form.v_bits = bits[v];
            check_pair(*state, i, form, k + v);
        }
}

static const uint8_t leat_bits[] = {5, 4, 8, 3, 2, 6}, quanto_bits[] = {4, 2}, hqq_bits[] = {8, 4, 2};

static void all_bits_of_leat_in_pairs(void **state)
{
    check_bits(state, 0, KV_FORM_LEAT, leat_bits, N_ELEMENTS(leat_bits));
}

/* Row (k, v) above has head size k + v of seven: for each bits the seventh is missing. */
static void all_bits_of_leat_with_the_head_size_that_their_pairs_left_out(void **state)
{
    for (uint32_t k = 0; k < N_ELEMENTS(leat_bits); k++)
        check_pair(*state, 36 + k, kv_form_leat(leat_bits[k], leat_bits[k]), k + 6);
}

static void all_bits_of_quanto_in_pairs(void **state)
{
    check_bits(state, FIRST_OTHER, KV_FORM_QUANTO, quanto_bits, N_ELEMENTS(quanto_bits));
}

static void all_bits_of_hqq_in_pairs(void **state)
{
    check_bits(state, 46, KV_FORM_HQQ, hqq_bits, N_ELEMENTS(hqq_bits));
}

static void fp8_and_what_is_not_coded(void **state)
{
    check_pair(*state, 55, kv_form_default(KV_FORM_FP8), 0);
    check_pair(*state, 56, kv_form_default(KV_FORM_F16), 1);
    check_pair(*state, 57, kv_form_default(KV_FORM_FP8), 3);
    check_pair(*state, 58, kv_form_default(KV_FORM_F32), 0);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_bits_of_leat_in_pairs),
        cmocka_unit_test(all_bits_of_leat_with_the_head_size_that_their_pairs_left_out),
        cmocka_unit_test(all_bits_of_quanto_in_pairs),
        cmocka_unit_test(all_bits_of_hqq_in_pairs),
        cmocka_unit_test(fp8_and_what_is_not_coded),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
