/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules of opencl/attend.h, bit for bit: tile size, launch shape, rows in the pass and company in the batch do not change a row; a
 * ring refilled after a crop is as good as one never cropped; the planner's bytes are the allocator's.  No tolerance.
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

static int set_up(void **state)
{
    GpuOptions options = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    static Gpu *gpu;

    if (gpu_open(&options, &gpu, &detail)) {
        printf("no device: %s\n", detail.text);
        return -1;
    }
    printf("device '%s' (%s)\n", gpu_info(gpu)->name, gpu_info(gpu)->platform);
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

static WorldOptions world_options(KvForm form, bool exact, AttendKernels kernels, AttendSpread spread, uint32_t tile_blocks)
{
    return (WorldOptions){
        .attend = {.form = form, .shape = {6, 2, 64, 64, 64}, .exact = exact, .tail_bits = form.kind == KV_FORM_F32 ? 32 : 16,
                   .scale = 0.125f, .max_rows = 256, .max_refs = 2048, .kernels = kernels, .spread = spread},
        .max_tokens = N_TOKENS, .calibrated = true, .tile_blocks = tile_blocks, .value = ordinary,
    };
}

#define WIDTH (6 * 64)

/* How a run is cut: rows of each pass, and whether a second sequence runs along. */
typedef struct Cut {
    AttendSpread spread;
    uint32_t tile_blocks, rows, company;
} Cut;

/* All N_TOKENS rows of sequence 0, (N_TOKENS, WIDTH). */
static float *run(Gpu *gpu, KvForm form, bool exact, AttendKernels kernels, Cut cut)
{
    WorldOptions options = world_options(form, exact, kernels, cut.spread, cut.tile_blocks);
    _cleanup_(world_freep) World *world = world_new(gpu, &options);
    _cleanup_(freep) float *out = malloc(256 * WIDTH * sizeof(float));
    float *all = malloc(N_TOKENS * WIDTH * sizeof(float));

    assert_true(out && all);
    for (uint32_t at = 0; at < N_TOKENS;) {
        /* The last rows always come singly: decoding. */
        uint32_t n = at >= N_TOKENS - 3 ? 1 : MIN(cut.rows, N_TOKENS - 3 - at);
        uint32_t beside = world_length(world, 1) + cut.company <= N_TOKENS ? cut.company : 0;
        WorldItem items[2] = {{1, beside}, {0, n}};

        world_pass(world, beside ? items : items + 1, beside ? 2 : 1, out);
        memcpy(all + (size_t)at * WIDTH, out + (size_t)beside * WIDTH, n * WIDTH * sizeof(float));
        at += n;
    }
    return all;
}

static void check_cuts(Gpu *gpu, KvForm form, bool exact, AttendKernels kernels)
{
    static const Cut cuts[] = {
        {ATTEND_SPREAD_SPLIT, 1, 150, 0},      /* tiles of one block: partial results fold between launches */
        {ATTEND_SPREAD_SEQUENTIAL, 2, 37, 0},
        {ATTEND_SPREAD_AUTO, 0, 64, 41},       /* beside another sequence */
        {ATTEND_SPREAD_AUTO, 0, 1, 1},         /* row by row beside another's: in one launch, but where pages are packed */
    };
    _cleanup_(freep) float *first = run(gpu, form, exact, kernels, (Cut){ATTEND_SPREAD_SEQUENTIAL, 0, 240, 0});

    for (size_t i = 0; i < N_ELEMENTS(cuts); i++) {
        _cleanup_(freep) float *other = run(gpu, form, exact, kernels, cuts[i]);

        for (uint32_t row = 0; row < N_TOKENS; row++)
            if (memcmp(first + (size_t)row * WIDTH, other + (size_t)row * WIDTH, WIDTH * sizeof(float)) != 0)
                fail_msg("form %d, kernels %d, cut %zu: row %u differs", (int)form.kind, (int)kernels, i, row);
    }
}

static void rows_do_not_depend_on_tiles_spread_or_company(void **state)
{
    check_cuts(*state, kv_form_leat(5, 4), false, ATTEND_KERNELS_AUTO);
    check_cuts(*state, kv_form_leat(5, 4), true, ATTEND_KERNELS_AUTO);
    check_cuts(*state, kv_form_default(KV_FORM_F16), false, ATTEND_KERNELS_AUTO);
}

/* Other tails, no sinks or a page of them, small groups, transforms: the border of every row lies elsewhere. */
static void rows_of_other_forms_do_not_depend_on_it_either(void **state)
{
    KvForm low = kv_form_leat(3, 2), hqq = kv_form_default(KV_FORM_HQQ), fp8 = kv_form_default(KV_FORM_FP8);

    low.tail_tokens = 96;
    low.sink_tokens = 0;
    low.group_dims = 32;
    low.centre = KV_CENTRE_AFTER_ROPE;
    low.pair_scale = true;
    hqq.sink_tokens = 32;
    check_cuts(*state, low, false, ATTEND_KERNELS_AUTO);
    check_cuts(*state, hqq, false, ATTEND_KERNELS_AUTO);
    check_cuts(*state, fp8, false, ATTEND_KERNELS_AUTO);
}

static void rows_do_not_depend_on_tiles_spread_or_company_on_lanes(void **state)
{
    if (gpu_info(*state)->simd == GPU_SIMD_PORTABLE) /* PoCL takes minutes to compile them */
        check_cuts(*state, kv_form_leat(4, 5), false, ATTEND_KERNELS_LANES);
    check_cuts(*state, kv_form_default(KV_FORM_F32), true, ATTEND_KERNELS_LANES);
}

static void refilled_ring_goes_on_with_the_same_bits(void **state)
{
    const KvForm forms[] = {kv_form_default(KV_FORM_F32), kv_form_default(KV_FORM_F16)};
    static const uint32_t cuts[] = {300, 290, 224, 130, 97, 64, 33, 2};
    _cleanup_(freep) float *out = malloc(256 * WIDTH * sizeof(float)), *again = malloc(256 * WIDTH * sizeof(float));

    assert_true(out && again);
    for (size_t f = 0; f < N_ELEMENTS(forms); f++) {
        WorldOptions options = world_options(forms[f], false, ATTEND_KERNELS_AUTO, ATTEND_SPREAD_AUTO, 0);
        _cleanup_(world_freep) World *world = world_new(*state, &options);
        float *all = malloc(301 * WIDTH * sizeof(float));

        assert_non_null(all);
        for (uint32_t at = 0; at < 301; at += 43) {
            world_pass(world, &(WorldItem){0, 43}, 1, out);
            memcpy(all + (size_t)at * WIDTH, out, 43 * WIDTH * sizeof(float));
        }
        for (size_t i = 0; i < N_ELEMENTS(cuts); i++) {
            uint32_t n = MIN(301 - cuts[i], 200u);

            world_crop(world, 0, cuts[i]);
            world_pass(world, &(WorldItem){0, n}, 1, again);
            assert_memory_equal(again, all + (size_t)cuts[i] * WIDTH, n * WIDTH * sizeof(float));
            while (world_length(world, 0) < 301)
                world_pass(world, &(WorldItem){0, MIN(301 - world_length(world, 0), 64u)}, 1, again);
        }
        free(all);
    }
}

static void planned_bytes_are_the_allocated_ones(void **state)
{
    const KvForm forms[] = {kv_form_default(KV_FORM_F32),    kv_form_default(KV_FORM_F16), kv_form_leat(5, 4), kv_form_leat(8, 8),
                            kv_form_default(KV_FORM_QUANTO), kv_form_default(KV_FORM_FP8)};
    float inv_freq[64] = {1.0f};
    Gpu *gpu = *state;

    for (size_t i = 0; i < N_ELEMENTS(forms); i++)
        for (int exact = 0; exact < 2; exact++) {
            WorldOptions options = world_options(forms[i], exact, ATTEND_KERNELS_AUTO, ATTEND_SPREAD_AUTO, 0);
            uint64_t by_purpose[GPU_PURPOSE_X_MAX], before, after, planned;
            _cleanup_(attend_freep) Attend *attend = NULL;

            options.attend.inv_freq = inv_freq;
            options.attend.max_pages = 100;
            assert_int_equal(attend_device_bytes(gpu_info(gpu), &options.attend, &planned), 0);
            gpu_memory_used(gpu, by_purpose, &before);
            assert_int_equal(attend_new(gpu, &options.attend, &attend, NULL), 0);
            gpu_memory_used(gpu, by_purpose, &after);
            assert_int_equal(after - before, planned);
        }
}

static void wrong_options_are_refused_by_name(void **state)
{
    AttendOptions good = world_options(kv_form_leat(5, 4), false, ATTEND_KERNELS_AUTO, ATTEND_SPREAD_AUTO, 0).attend, bad;
    float inv_freq[32] = {1.0f};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Attend *attend = NULL;
    uint64_t bytes;

    good.inv_freq = inv_freq;
    good.max_pages = 10;
#define REFUSED(change, word)                                                                                                     \
    do {                                                                                                                          \
        bad = good;                                                                                                               \
        change;                                                                                                                   \
        assert_int_equal(attend_new(*state, &bad, &attend, &detail), -EINVAL);                                                    \
        assert_null(attend);                                                                                                      \
        assert_non_null(strstr(detail.text, word));                                                                               \
        assert_int_equal(attend_device_bytes(gpu_info(*state), &bad, &bytes), -EINVAL);                                           \
    } while (0)
    REFUSED(bad.tail_bits = 8, "8 bits");
    REFUSED(bad.form = (kv_form_default(KV_FORM_F32)); bad.tail_bits = 16, "16 bits");
    REFUSED(bad.form.k_bits = 7, "7");
    REFUSED(bad.shape.n_kv_heads = 0, "heads");
    REFUSED(bad.shape.k_head_dim = 65, "k_head_dim 65");
    REFUSED(bad.shape.v_head_dim = 592, "v_head_dim 592");
    REFUSED(bad.max_rows = 0, "0 rows");
    REFUSED(bad.inv_freq = NULL, "frequencies");
    REFUSED(bad.exact = true; bad.kernels = ATTEND_KERNELS_VNNI, "kernels 5");
    bad = good;
    bad.max_rows = UINT32_MAX;
    bad.shape = (KvShape){1u << 20, 1u << 10, 256, 256, 64};
    assert_true(attend_new(*state, &bad, &attend, &detail) != 0);
}

static void wrong_passes_are_refused(void **state)
{
    AttendOptions options = world_options(kv_form_default(KV_FORM_F16), false, ATTEND_KERNELS_AUTO, ATTEND_SPREAD_AUTO, 0).attend;
    _cleanup_(attend_freep) Attend *attend = NULL;
    float inv_freq[32] = {1.0f};
    AttendLayer layer = {0};
    AttendTile tile = {.n_refs = options.max_refs + 1};

    options.inv_freq = inv_freq;
    options.max_pages = 4;
    assert_int_equal(attend_new(*state, &options, &attend, NULL), 0);
    assert_int_equal(attend_prepare(attend, &(AttendPass){0}, &layer, NULL), -EINVAL);
    assert_int_equal(attend_prepare(attend, &(AttendPass){.n_rows = options.max_rows + 1, .n_groups = 9}, &layer, NULL), -EINVAL);
    assert_int_equal(attend_finish(attend, &(AttendPass){.n_rows = 1, .n_groups = 2}, &layer, NULL), -EINVAL);
    assert_int_equal(attend_tile(attend, &(AttendPass){.n_rows = 1, .n_groups = 1}, &layer, &tile, GPU_WAIT_NONE, NULL), -EINVAL);
    /* In one launch: of a sequence each row, with as many blocks as a thread may walk alone. */
    assert_false(attend_is_whole(attend, &(AttendPass){.n_rows = 2, .n_groups = 1, .n_sequences = 1}, 0));
    assert_false(attend_is_whole(attend, &(AttendPass){.n_rows = 2, .n_groups = 2, .n_sequences = 1}, 0));
    assert_false(attend_is_whole(attend, &(AttendPass){.n_rows = 1, .n_groups = 1, .n_sequences = 1}, 1000));
    assert_int_equal(attend_whole(attend, &(AttendPass){.n_rows = 2, .n_groups = 1, .n_sequences = 1}, &layer, NULL, NULL, GPU_WAIT_NONE, NULL),
                     -EINVAL);
    assert_false(gpu_is_lost(*state));
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_do_not_depend_on_tiles_spread_or_company),
        cmocka_unit_test(rows_of_other_forms_do_not_depend_on_it_either),
        cmocka_unit_test(rows_do_not_depend_on_tiles_spread_or_company_on_lanes),
        cmocka_unit_test(refilled_ring_goes_on_with_the_same_bits),
        cmocka_unit_test(planned_bytes_are_the_allocated_ones),
        cmocka_unit_test(wrong_options_are_refused_by_name),
        cmocka_unit_test(wrong_passes_are_refused),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
