/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a query sees: windows, chunks, encoder output, capped scores and sink logits, against the double precision answer over the keys
 * that are left; and bit for bit the same however rows are cut into passes and tiles, and whether hidden pages are named or not.
 * Seed: values are hashes of their place (tests/lib/attend-world.c).  Tolerance, of the largest output of the row's head: float32 kernels
 * 1e-5, 3e-5 with capped scores (the cap times 1e-7); integer kernels 3e-3.
 */

#include "tests/lib/attend-world.h"
#include "tests/lib/patience.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define N_TOKENS 620 /* 18 packed pages at the end: two whole blocks and a piece */
#define N_ASKED  45  /* rows that ask an encoder's output */

static int set_up(void **state)
{
    GpuOptions options = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    static Gpu *gpu;

    if (gpu_open(&options, &gpu, &detail)) {
        printf("no device: %s\n", detail.text);
        return -1;
    }
    printf("device '%s' (%s), SIMD level %d\n", gpu_info(gpu)->name, gpu_info(gpu)->platform, (int)gpu_info(gpu)->simd);
    *state = gpu;
    return 0;
}

static int tear_down(void **state)
{
    (void)gpu_free(*state);
    return 0;
}

static float ordinary(int what, uint32_t sequence, uint32_t position, uint32_t head, uint32_t dim)
{
    return (what == 0 ? 2.0f : 1.0f) * world_gaussian((uint32_t)what, sequence, position, head, dim);
}

/* Kernels with a form and a shape. */
typedef struct Case {
    KvFormKind kind;
    uint8_t k_bits, v_bits;
    KvShape shape;
    AttendKernels kernels;
} Case;

static const Case cases[] = {
    {KV_FORM_LEAT, 5, 4, {4, 2, 32, 48, 16}, ATTEND_KERNELS_LANES},
    {KV_FORM_F16, 0, 0, {4, 2, 48, 32, 48}, ATTEND_KERNELS_VECTORS},
    {KV_FORM_LEAT, 4, 5, {6, 2, 32, 64, 32}, ATTEND_KERNELS_VECTORS},
    {KV_FORM_LEAT, 5, 4, {6, 2, 64, 64, 64}, ATTEND_KERNELS_VNNI},
    {KV_FORM_LEAT, 4, 4, {4, 2, 80, 32, 80}, ATTEND_KERNELS_BW},
    {KV_FORM_LEAT, 5, 4, {6, 2, 64, 64, 64}, ATTEND_KERNELS_AVX2},
};

/* Kernels of lanes run where they are all there is: PoCL takes minutes to compile them. */
static bool device_has(const GpuInfo *info, AttendKernels kernels)
{
    return (kernels <= ATTEND_KERNELS_LANES && info->simd == GPU_SIMD_PORTABLE) ||
           (kernels == ATTEND_KERNELS_VECTORS && info->simd >= GPU_SIMD_AVX2) ||
           (kernels == ATTEND_KERNELS_AVX2 && info->simd >= GPU_SIMD_AVX2) ||
           (kernels == ATTEND_KERNELS_BW && info->simd >= GPU_SIMD_AVX512BW) ||
           (kernels == ATTEND_KERNELS_VNNI && info->simd >= GPU_SIMD_AVX512VNNI);
}

/* How a run is cut: rows of a pass, rows of another sequence beside them. */
typedef struct Cut {
    AttendSpread spread;
    uint32_t tile_blocks, rows, company;
    bool untrimmed;
} Cut;

static const Cut cuts[] = {
    {ATTEND_SPREAD_SEQUENTIAL, 0, 240, 0, false},
    {ATTEND_SPREAD_SPLIT, 1, 37, 0, true},  /* tiles of one block, pages named that nobody sees */
    {ATTEND_SPREAD_AUTO, 2, 64, 41, false}, /* beside another sequence */
};

static World *case_world(Gpu *gpu, const Case *c, const AttendOptions *extra, const Cut *cut)
{
    WorldOptions options = {.attend = *extra, .max_tokens = N_TOKENS, .calibrated = true, .value = ordinary};

    options.attend.form = kv_form_default(c->kind);
    options.attend.form.k_bits = c->k_bits;
    options.attend.form.v_bits = c->v_bits;
    options.attend.shape = c->shape;
    if (extra->visibility.mask == ATTEND_MASK_CROSS)
        options.attend.shape.rotary_dim = 0;
    options.attend.exact = c->kernels < ATTEND_KERNELS_AVX2;
    options.attend.kernels = c->kernels;
    options.attend.tail_bits = 16;
    options.attend.scale = 1.0f / sqrtf((float)c->shape.k_head_dim);
    options.attend.max_rows = 256;
    options.attend.max_refs = 2048;
    options.attend.spread = cut->spread;
    options.tile_blocks = cut->tile_blocks;
    options.untrimmed = cut->untrimmed;
    return world_new(gpu, &options);
}

/* The worst head of a row. */
static double row_error(World *world, const KvShape *shape, uint32_t position, const float *out)
{
    size_t dim = shape->v_head_dim;
    _cleanup_(freep) double *reference = malloc(shape->n_heads * dim * sizeof(double));
    double worst = 0;

    assert_non_null(reference);
    world_reference(world, 0, position, reference);
    for (size_t head = 0; head < shape->n_heads; head++) {
        double error = 0, range = 1e-30;

        for (size_t d = head * dim; d < (head + 1) * dim; d++) {
            range = fmax(range, fabs(reference[d]));
            error = fmax(error, isfinite(out[d]) ? fabs(out[d] - reference[d]) : INFINITY);
        }
        worst = fmax(worst, error / range);
    }
    return worst;
}

/* All N_TOKENS rows of sequence 0; @ret_error: the worst of some of them, or NULL. */
static float *run(Gpu *gpu, const Case *c, const AttendOptions *extra, const Cut *cut, double *ret_error)
{
    _cleanup_(world_freep) World *world = case_world(gpu, c, extra, cut);
    size_t width = (size_t)c->shape.n_heads * c->shape.v_head_dim;
    _cleanup_(freep) float *out = malloc(256 * width * sizeof(float));
    float *all = malloc(N_TOKENS * width * sizeof(float));

    assert_true(out && all);
    for (uint32_t at = 0; at < N_TOKENS;) {
        /* The last rows always come singly: decoding. */
        uint32_t n = at >= N_TOKENS - 3 ? 1 : MIN(cut->rows, N_TOKENS - 3 - at);
        uint32_t beside = world_length(world, 1) + cut->company <= N_TOKENS ? cut->company : 0;
        WorldItem items[2] = {{1, beside}, {0, n}};

        world_pass(world, beside ? items : items + 1, beside ? 2 : 1, out);
        memcpy(all + at * width, out + beside * width, n * width * sizeof(float));
        for (uint32_t row = at; ret_error && row < at + n; row++)
            if (row % 41 == 7 || row % 32 == 31 || row >= N_TOKENS - 2)
                *ret_error = fmax(*ret_error, row_error(world, &c->shape, row, all + row * width));
        at += n;
    }
    return all;
}

static void check(Gpu *gpu, const Case *c, const AttendOptions *extra)
{
    double error = 0, tolerance = c->kernels >= ATTEND_KERNELS_AVX2 ? 3e-3 : extra->softcap > 0 ? 3e-5 : 1e-5;
    size_t width = (size_t)c->shape.n_heads * c->shape.v_head_dim;
    _cleanup_(freep) float *first = NULL;

    if (!device_has(gpu_info(gpu), c->kernels))
        return;
    first = run(gpu, c, extra, &cuts[0], &error);
    printf("  kernels %d, mask %d, window %u, cap %g, sink logits %d: error %.2e of %.0e\n", (int)c->kernels,
           (int)extra->visibility.mask, extra->visibility.window, extra->softcap, extra->sink_logits, error, tolerance);
    assert_true(error <= tolerance);
    for (size_t i = 1; i < N_ELEMENTS(cuts); i++) {
        _cleanup_(freep) float *other = run(gpu, c, extra, &cuts[i], NULL);

        for (uint32_t row = 0; row < N_TOKENS; row++)
            if (memcmp(first + row * width, other + row * width, width * sizeof(float)) != 0)
                fail_msg("kernels %d, mask %d, window %u, cut %zu: row %u differs", (int)c->kernels, (int)extra->visibility.mask,
                         extra->visibility.window, i, row);
    }
}

static void check_windows(Gpu *gpu, AttendMask mask, const uint32_t *windows, size_t n)
{
    for (size_t i = 0; i < N_ELEMENTS(cases); i++)
        for (size_t k = 0; k < n; k++)
            check(gpu, &cases[i], &(AttendOptions){.visibility = {mask, windows[k]}});
}

static void sliding_windows_show_their_last_keys(void **state)
{
    static const uint32_t windows[] = {1, 33, 64, 100, 300, 1000};

    check_windows(*state, ATTEND_MASK_SLIDING, windows, N_ELEMENTS(windows));
}

static void chunks_show_their_own_keys(void **state)
{
    static const uint32_t windows[] = {1, 50, 70, 256, 300};

    check_windows(*state, ATTEND_MASK_CHUNKED, windows, N_ELEMENTS(windows));
}

static void capped_scores_and_sink_logits_equal_the_definition(void **state)
{
    check(*state, &cases[1], &(AttendOptions){.softcap = 2.5f});
    for (size_t i = 0; i < N_ELEMENTS(cases); i++)
        check(*state, &cases[i], &(AttendOptions){.visibility = {ATTEND_MASK_SLIDING, 128}, .softcap = 2.5f, .sink_logits = true});
}

/* Keys in pieces of @piece, then N_ASKED rows together and again one by one. */
static float *ask(Gpu *gpu, const Case *c, uint32_t n_keys, uint32_t piece, bool singly, double *ret_error)
{
    const AttendOptions extra = {.visibility = {ATTEND_MASK_CROSS, 0}};
    _cleanup_(world_freep) World *world = case_world(gpu, c, &extra, &cuts[singly ? 1 : 0]);
    size_t width = (size_t)c->shape.n_heads * c->shape.v_head_dim;
    float *all = malloc(N_ASKED * width * sizeof(float));

    assert_non_null(all);
    for (uint32_t at = 0; at < n_keys; at += piece) {
        if (singly && at < n_keys / 2) /* another encoder's output grows beside it */
            world_keep(world, 1, MIN(piece, n_keys - at));
        world_keep(world, 0, MIN(piece, n_keys - at));
    }
    for (uint32_t row = 0; row < N_ASKED; row += singly ? 1 : N_ASKED)
        world_pass(world, &(WorldItem){0, singly ? 1 : N_ASKED}, 1, all + row * width);
    for (uint32_t row = 0; ret_error && row < N_ASKED; row += 11)
        *ret_error = fmax(*ret_error, row_error(world, &c->shape, row, all + row * width));
    return all;
}

static void encoder_output_is_seen_whole_by_every_row(void **state)
{
    static const uint32_t sizes[] = {1, 31, 32, 64, 77, 256, 601};

    for (size_t i = 0; i < N_ELEMENTS(cases); i++)
        for (size_t k = 0; device_has(gpu_info(*state), cases[i].kernels) && k < N_ELEMENTS(sizes); k++) {
            double error = 0, tolerance = cases[i].kernels >= ATTEND_KERNELS_AVX2 ? 3e-3 : 1e-5;
            _cleanup_(freep) float *together = ask(*state, &cases[i], sizes[k], 250, false, &error);
            _cleanup_(freep) float *singly = ask(*state, &cases[i], sizes[k], 45, true, NULL);

            printf("  kernels %d, %u keys: error %.2e of %.0e\n", (int)cases[i].kernels, sizes[k], error, tolerance);
            assert_true(error <= tolerance);
            assert_memory_equal(together, singly,
                                N_ASKED * sizeof(float) * cases[i].shape.n_heads * cases[i].shape.v_head_dim);
        }
}

static void wrong_sights_are_refused_by_name(void **state)
{
    static const struct {
        AttendVisibility visibility;
        float softcap;
        uint32_t rotary_dim;
        const char *word;
    } wrong[] = {
        {{ATTEND_MASK_CAUSAL, 5}, 0, 32, "window of 5"},        {{ATTEND_MASK_SLIDING, 0}, 0, 32, "window of 0"},
        {{ATTEND_MASK_CHUNKED, 2000000000}, 0, 32, "2000000000"}, {{ATTEND_MASK_CROSS, 0}, 0, 32, "32 rotary"},
        {{ATTEND_MASK_CROSS, 7}, 0, 0, "window of 7"},          {{(AttendMask)9, 0}, 0, 32, "mask 9"},
        {{ATTEND_MASK_CAUSAL, 0}, -1.0f, 32, "-1"},             {{ATTEND_MASK_CAUSAL, 0}, INFINITY, 32, "inf"},
    };
    float inv_freq[16] = {1.0f};

    for (size_t i = 0; i < N_ELEMENTS(wrong); i++) {
        AttendOptions options = {.form = kv_form_default(KV_FORM_F16), .shape = {2, 1, 32, 32, wrong[i].rotary_dim}, .tail_bits = 16,
                                 .scale = 1.0f, .visibility = wrong[i].visibility, .softcap = wrong[i].softcap, .max_rows = 1, .max_refs = 1,
                                 .inv_freq = inv_freq, .max_pages = 1};
        ErrorDetail detail = ERROR_DETAIL_NULL;
        Attend *attend = NULL;

        assert_int_equal(attend_new(*state, &options, &attend, &detail), -EINVAL);
        assert_null(attend);
        assert_non_null(strstr(detail.text, wrong[i].word));
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(sliding_windows_show_their_last_keys),
        cmocka_unit_test(chunks_show_their_own_keys),
        cmocka_unit_test(capped_scores_and_sink_logits_equal_the_definition),
        cmocka_unit_test(encoder_output_is_seen_whole_by_every_row),
        cmocka_unit_test(wrong_sights_are_refused_by_name),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
