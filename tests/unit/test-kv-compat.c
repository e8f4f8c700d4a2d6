/* SPDX-License-Identifier: Apache-2.0 */
/* Compatibility caches: operations and accessors of each kind, and what is refused. */

#include "cache/kv-compat-mask.h"
#include "tests/lib/compat-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

static const KvCompatLayerSpec dynamic = {.kind = KV_COMPAT_DYNAMIC};
static const KvCompatLayerSpec fixed = {.kind = KV_COMPAT_STATIC, .max_tokens = 4};
static const KvCompatLayerSpec sliding = {.kind = KV_COMPAT_SLIDING, .window = 4};
static const KvCompatLayerSpec static_sliding = {.kind = KV_COMPAT_STATIC_SLIDING, .window = 4, .max_tokens = 16};
static const KvCompatLayerSpec linear = {.linear = true};

static void row_3_dynamic_appends_crops_and_forgets(void **state)
{
    Rig rig;

    (void)state;
    rig_init(&rig, &dynamic, 1, 1);
    assert_int_equal(rig_length(&rig, 0), 0);
    assert_int_equal(kv_compat_crop(rig.cache, -2, NULL), 0); /* nothing there to lose */
    assert_int_equal(rig_update(&rig, 0, 3), 0);
    assert_string_equal(rig_mask(&rig, 0, 2), "5 0");
    assert_int_equal(kv_compat_max_length(rig.cache, 0), -1);
    assert_int_equal(kv_compat_crop(rig.cache, 0, NULL), 0);
    assert_int_equal(kv_compat_crop(rig.cache, 2, NULL), KV_COMPAT_E_VALUE);
    assert_string_equal(rig_kept(&rig, 0), "1 2 3");
    assert_int_equal(kv_compat_crop(rig.cache, -2, NULL), 0);
    assert_string_equal(rig_kept(&rig, 0), "1");
    assert_int_equal(rig_update(&rig, 0, 1), 0);
    assert_string_equal(rig_returned(&rig), "1 4");
    assert_int_equal(kv_compat_crop(rig.cache, -5, NULL), KV_COMPAT_E_GONE); /* never stale tokens */
    assert_string_equal(rig_kept(&rig, 0), "1 4");
    kv_compat_reset(rig.cache);
    assert_int_equal(rig_length(&rig, 0), 0);
    assert_false(kv_compat_is_initialised(rig.cache));
    assert_int_equal(rig_update(&rig, 0, 2), 0);
    assert_string_equal(rig_returned(&rig), "5 6");
    rig_deinit(&rig);
}

static void row_4_static_counts_from_its_cursor_and_checks_it(void **state)
{
    Rig rig;

    (void)state;
    rig_init(&rig, &fixed, 1, 1);
    assert_int_equal(kv_compat_crop(rig.cache, -2, NULL), 0);
    assert_int_equal(rig_length(&rig, 0), 0); /* not -2 */
    assert_int_equal(rig_update(&rig, 0, 3), 0);
    assert_string_equal(rig_mask(&rig, 0, 1), "4 0");
    assert_int_equal(kv_compat_max_length(rig.cache, 0), 4);
    assert_true(kv_compat_is_croppable(rig.cache));
    assert_int_equal(kv_compat_crop(rig.cache, -1, NULL), 0);
    assert_int_equal(rig_length(&rig, 0), 2);
    assert_int_equal(rig_update(&rig, 0, 1), 0);
    assert_string_equal(rig_returned(&rig), "1 2 4 0");
    assert_int_equal(kv_compat_crop(rig.cache, -9, NULL), KV_COMPAT_E_GONE);
    assert_int_equal(rig_length(&rig, 0), 3);
    assert_int_equal(rig_update(&rig, 0, 5), KV_COMPAT_E_FULL);
    assert_int_equal(rig_length(&rig, 0), 3);
    kv_compat_reset(rig.cache);
    assert_string_equal(rig_kept(&rig, 0), "0 0 0 0");
    assert_true(kv_compat_is_initialised(rig.cache));
    rig_deinit(&rig);
}

static void row_4_static_keeps_its_buffers_through_reset_reorder_and_crop(void **state)
{
    static const uint32_t rows[] = {1, 1};
    KvTensor k, v, again, other;
    Rig rig;

    (void)state;
    rig_init(&rig, &fixed, 1, 2);
    assert_int_equal(rig_update(&rig, 0, 2), 0);
    assert_int_equal(kv_compat_stored(rig.cache, 0, &k, &v, NULL), 0);
    assert_int_equal(kv_compat_reorder(rig.cache, rows, 2, NULL), 0);
    assert_int_equal(kv_compat_crop(rig.cache, -1, NULL), 0);
    kv_compat_reset(rig.cache);
    assert_int_equal(rig_update(&rig, 0, 2), 0);
    assert_int_equal(kv_compat_stored(rig.cache, 0, &again, &other, NULL), 0);
    assert_ptr_equal(k.values, again.values);
    assert_ptr_equal(v.values, other.values);
    rig_deinit(&rig);
}

static void row_4_another_row_count_is_taken_when_it_is_empty_only(void **state)
{
    Rig rig;

    (void)state;
    rig_init(&rig, &fixed, 1, 3);
    assert_int_equal(rig_update(&rig, 0, 2), 0);
    rig.n_rows = 2;
    assert_int_equal(rig_update(&rig, 0, 1), KV_COMPAT_E_SHAPE);
    kv_compat_reset(rig.cache);
    assert_int_equal(rig_update(&rig, 0, 1), 0);
    assert_string_equal(rig_returned(&rig), "3 0 0 0 1003 0 0 0");
    rig_deinit(&rig);
}

static void row_5_1_crop_without_recording(void **state)
{
    Rig rig;

    (void)state;
    rig_init(&rig, &sliding, 1, 1);
    assert_int_equal(kv_compat_crop(rig.cache, -1, NULL), 0); /* not initialised */
    assert_int_equal(rig_update(&rig, 0, 3), 0);
    assert_int_equal(kv_compat_crop(rig.cache, 1, NULL), KV_COMPAT_E_VALUE);
    assert_int_equal(kv_compat_crop(rig.cache, -1, NULL), 0);
    assert_string_equal(rig_kept(&rig, 0), "1 2");
    assert_int_equal(rig_update(&rig, 0, 2), 0);
    assert_int_equal(kv_compat_crop(rig.cache, -1, NULL), KV_COMPAT_E_NOT_RECORDING);
    assert_int_equal(kv_compat_crop(rig.cache, 0, NULL), KV_COMPAT_E_NOT_RECORDING);
    assert_string_equal(rig_kept(&rig, 0), "2 4 5");
    assert_true(kv_compat_is_croppable(rig.cache)); /* advice only */
    assert_int_equal(kv_compat_max_length(rig.cache, 0), 4);
    rig_deinit(&rig);
}

static void row_5_1_reset_keeps_recording_on(void **state)
{
    Rig rig;

    (void)state;
    rig_init(&rig, &sliding, 1, 1);
    kv_compat_record(rig.cache);
    assert_int_equal(rig_update(&rig, 0, 6), 0);
    kv_compat_reset(rig.cache);
    assert_int_equal(rig_update(&rig, 0, 6), 0);
    assert_string_equal(rig_kept(&rig, 0), "7 8 9 10 11 12");
    assert_int_equal(kv_compat_crop(rig.cache, -5, NULL), 0);
    assert_string_equal(rig_kept(&rig, 0), "7");
    rig_deinit(&rig);
}

static void row_5_2_static_sliding_crops_as_far_as_it_still_holds(void **state)
{
    KvCompatLayerSpec whole = {.kind = KV_COMPAT_STATIC_SLIDING, .window = 8, .max_tokens = 4};
    Rig rig;

    (void)state;
    rig_init(&rig, &whole, 1, 1);
    assert_true(kv_compat_is_croppable(rig.cache));
    assert_int_equal(rig_update(&rig, 0, 3), 0);
    assert_int_equal(kv_compat_crop(rig.cache, -1, NULL), 0);
    assert_int_equal(rig_update(&rig, 0, 2), 0);
    assert_string_equal(rig_returned(&rig), "1 2 4 5");
    rig_deinit(&rig);

    rig_init(&rig, &static_sliding, 1, 1);
    assert_false(kv_compat_is_croppable(rig.cache));
    assert_int_equal(rig_update(&rig, 0, 6), 0);
    assert_int_equal(kv_compat_crop(rig.cache, -2, NULL), KV_COMPAT_E_GONE);
    assert_int_equal(kv_compat_crop(rig.cache, -1, NULL), 0); /* the slot more than the next token needs */
    assert_string_equal(rig_kept(&rig, 0), "0 3 4 5");
    assert_int_equal(kv_compat_crop(rig.cache, -1, NULL), KV_COMPAT_E_GONE);
    assert_string_equal(rig_mask(&rig, 0, 1), "4 2");
    assert_int_equal(rig_update(&rig, 0, 1), 0);
    assert_string_equal(rig_returned(&rig), "3 4 5 7");
    rig_deinit(&rig);
}

static void row_6_1_recording_before_layers_exist_holds_for_later_ones(void **state)
{
    KvCompat *cache;
    KvTensor k, got_k, got_v;
    float values[6] = {1, 2, 3, 4, 5, 6};

    (void)state;
    assert_int_equal(kv_compat_new_replicating(&sliding, &cache, NULL), 0);
    kv_compat_record(cache);
    k = (KvTensor){values, 1, 1, 6, 1, 6};
    assert_int_equal(kv_compat_update(cache, 1, &k, &k, &got_k, &got_v, NULL), 0);
    assert_int_equal(kv_compat_n_layers(cache), 2);
    assert_int_equal(kv_compat_crop(cache, -4, NULL), 0);
    assert_int_equal(kv_compat_stored(cache, 1, &got_k, &got_v, NULL), 0);
    assert_int_equal(got_k.n_tokens, 2);
    (void)kv_compat_free(cache);
}

static void row_6_1_is_croppable_of_every_kind(void **state)
{
    static const struct {
        KvCompatLayerSpec spec;
        bool croppable;
    } cases[] = {
        {{.kind = KV_COMPAT_DYNAMIC}, true},
        {{.kind = KV_COMPAT_SLIDING, .window = 4}, true},
        {{0}, true},
        {{.kind = KV_COMPAT_STATIC, .max_tokens = 4}, true},
        {{.kind = KV_COMPAT_STATIC_SLIDING, .window = 4, .max_tokens = 4}, true},
        {{.kind = KV_COMPAT_STATIC_SLIDING, .window = 4, .max_tokens = 5}, false},
        {{.linear = true}, false}, /* before the first forward */
    };
    Rig rig;

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        rig_init(&rig, &cases[i].spec, 1, 1);
        assert_int_equal(kv_compat_is_croppable(rig.cache), cases[i].croppable);
        rig_deinit(&rig);
    }
    rig_init(&rig, &linear, 1, 1);
    assert_int_equal(rig_conv(&rig, 0, 4), 0);
    assert_true(kv_compat_is_croppable(rig.cache));
    assert_int_equal(rig_state(&rig, 0, 4, 1), 0);
    assert_false(kv_compat_is_croppable(rig.cache));
    kv_compat_record(rig.cache);
    assert_true(kv_compat_is_croppable(rig.cache)); /* ours: snapshots */
    rig_deinit(&rig);
    rig_init(&rig, NULL, 0, 1);
    assert_true(kv_compat_is_croppable(rig.cache));
    rig_deinit(&rig);
}

static void row_2_lengths_and_masks_of_layers_without_keys(void **state)
{
    KvCompatLayerSpec specs[] = {linear, {0}, dynamic, linear, {0}};
    uint64_t length, offset;
    Rig rig;

    (void)state;
    rig_init(&rig, specs, N_ELEMENTS(specs), 1);
    assert_int_equal(rig_update(&rig, 2, 3), 0);
    assert_int_equal(rig_length(&rig, 0), 3); /* the first layer that has keys */
    assert_string_equal(rig_mask(&rig, 0, 2), "5 0");
    assert_int_equal(kv_compat_length(rig.cache, 1, &length, NULL), KV_COMPAT_E_NO_SEQUENCE);
    assert_int_equal(kv_compat_mask_sizes(rig.cache, 3, 1, &length, &offset, NULL), KV_COMPAT_E_NO_SEQUENCE);
    assert_int_equal(rig_length(&rig, 9), 0);
    assert_string_equal(rig_mask(&rig, 9, 5), "5 0");
    assert_int_equal(kv_compat_max_length(rig.cache, 9), -1);
    rig_deinit(&rig);
    rig_init(&rig, &linear, 1, 1);
    assert_int_equal(kv_compat_length(rig.cache, 0, &length, NULL), KV_COMPAT_E_NO_SEQUENCE);
    assert_int_equal(kv_compat_mask_sizes(rig.cache, 0, 1, &length, &offset, NULL), KV_COMPAT_E_NO_SEQUENCE);
    rig_deinit(&rig);
}

static void row_10_rows_can_be_repeated_and_selected_in_every_kind(void **state)
{
    KvCompatLayerSpec specs[] = {dynamic, fixed, sliding, static_sliding, {.kind = KV_COMPAT_DYNAMIC, .linear = true}, {0}};
    static const uint32_t rows[] = {3, 0, 3};
    int64_t n_rows;
    Rig rig;

    (void)state;
    rig_init(&rig, specs, N_ELEMENTS(specs), 2);
    rig.kernels[4] = 2;
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(rig_update(&rig, i, 2), 0);
    assert_int_equal(rig_conv(&rig, 4, 2), 0);
    assert_int_equal(rig_state(&rig, 4, 2, 1), 0);
    assert_int_equal(kv_compat_repeat(rig.cache, 2, NULL), 0); /* 0 0 1 1 */
    assert_string_equal(rig_kept(&rig, 0), "1 2 1 2 1001 1002 1001 1002");
    assert_int_equal(kv_compat_select(rig.cache, rows, 3, NULL), 0);
    assert_string_equal(rig_kept(&rig, 0), "1001 1002 1 2 1001 1002");
    assert_string_equal(rig_kept(&rig, 1), "1001 1002 0 0 1 2 0 0 1001 1002 0 0");
    assert_string_equal(rig_kept(&rig, 2), "1001 1002 1 2 1001 1002");
    assert_string_equal(rig_kept(&rig, 3), "1001 1002 0 0 1 2 0 0 1001 1002 0 0");
    assert_string_equal(rig_columns(&rig, 4), "1001 1002 1 2 1001 1002");
    assert_string_equal(rig_recurrent(&rig, 4), "1002 2 1002");
    assert_int_equal(kv_compat_n_rows(rig.cache, &n_rows, NULL), 0);
    assert_int_equal(n_rows, 3);
    rig_deinit(&rig);
}

static void row_10_row_numbers_are_checked_and_layers_must_agree(void **state)
{
    KvCompatLayerSpec specs[] = {dynamic, dynamic};
    static const uint32_t rows[] = {0, 2};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int64_t n_rows;
    Rig rig;

    (void)state;
    rig_init(&rig, specs, 2, 2);
    assert_int_equal(kv_compat_n_rows(rig.cache, &n_rows, NULL), 0);
    assert_int_equal(n_rows, -1);
    assert_int_equal(kv_compat_reorder(rig.cache, rows, 2, NULL), 0); /* nothing to reorder */
    assert_int_equal(rig_update(&rig, 0, 2), 0);
    assert_int_equal(kv_compat_reorder(rig.cache, rows, 2, &detail), KV_COMPAT_E_INDEX);
    assert_non_null(strstr(detail.text, "row 2"));
    assert_int_equal(kv_compat_reorder(rig.cache, rows, 1, NULL), KV_COMPAT_E_VALUE);
    rig.n_rows = 1;
    assert_int_equal(rig_update(&rig, 1, 2), 0);
    assert_int_equal(kv_compat_n_rows(rig.cache, &n_rows, NULL), KV_COMPAT_E_VALUE);
    assert_int_equal(kv_compat_repeat(rig.cache, 2, NULL), KV_COMPAT_E_VALUE);
    rig_deinit(&rig);
}

static void pair_new(KvCompatPair **ret, const KvCompatLayerSpec *self, const KvCompatLayerSpec *cross, uint32_t n_layers)
{
    KvCompat *a, *b;

    assert_int_equal(kv_compat_new(self, n_layers, &a, NULL), 0);
    assert_int_equal(kv_compat_new(cross, n_layers, &b, NULL), 0);
    assert_int_equal(kv_compat_pair_new(a, b, ret), 0);
}

static void row_10_1_cross_keys_are_computed_once_and_crop_is_of_self(void **state)
{
    KvCompatLayerSpec self[] = {dynamic, dynamic}, cross[] = {{.kind = KV_COMPAT_STATIC, .max_tokens = 3}, dynamic};
    _cleanup_(kv_compat_pair_freep) KvCompatPair *pair = NULL, *copy = NULL;
    static const uint32_t rows[] = {1, 0}, bad[] = {0, 5};
    float values[6] = {1, 2, 3, 4, 5, 6};
    KvTensor k = {values, 2, 1, 3, 1, 3}, got_k, got_v;
    uint64_t length;

    (void)state;
    pair_new(&pair, self, cross, 2);
    assert_false(kv_compat_pair_is_updated(pair, 0));
    assert_int_equal(kv_compat_pair_update_cross(pair, 0, &k, &k, &got_k, &got_v, NULL), 0);
    assert_int_equal(got_k.n_tokens, 3); /* as many as the static layer holds */
    assert_true(kv_compat_pair_is_updated(pair, 0));
    assert_false(kv_compat_pair_is_updated(pair, 1));
    assert_int_equal(kv_compat_pair_update_cross(pair, 0, &k, &k, &got_k, &got_v, NULL), KV_COMPAT_E_VALUE);
    assert_int_equal(kv_compat_update(kv_compat_pair_self(pair), 0, &k, &k, &got_k, &got_v, NULL), 0);
    assert_int_equal(kv_compat_pair_crop(pair, -1, NULL), 0);
    assert_int_equal(kv_compat_length(kv_compat_pair_self(pair), 0, &length, NULL), 0);
    assert_int_equal(length, 2);
    assert_int_equal(kv_compat_length(kv_compat_pair_cross(pair), 0, &length, NULL), 0);
    assert_int_equal(length, 3);

    assert_int_equal(kv_compat_pair_copy(pair, &copy, NULL), 0);
    assert_true(kv_compat_pair_is_updated(copy, 0));
    assert_int_equal(kv_compat_pair_reorder(pair, rows, 2, NULL), 0);
    assert_int_equal(kv_compat_stored(kv_compat_pair_cross(pair), 0, &got_k, &got_v, NULL), 0);
    assert_true(*kv_tensor_at(&got_k, 0, 0, 0) == 4);
    assert_int_equal(kv_compat_stored(kv_compat_pair_cross(copy), 0, &got_k, &got_v, NULL), 0);
    assert_true(*kv_tensor_at(&got_k, 0, 0, 0) == 1);
    assert_int_equal(kv_compat_pair_reorder(pair, bad, 2, NULL), KV_COMPAT_E_INDEX);
    assert_int_equal(kv_compat_pair_repeat(pair, 2, NULL), 0);
    assert_int_equal(kv_compat_pair_select(pair, rows, 1, NULL), 0);
    assert_int_equal(kv_compat_stored(kv_compat_pair_self(pair), 0, &got_k, &got_v, NULL), 0);
    assert_int_equal(got_k.n_rows, 1);
    kv_compat_pair_reset(pair);
    assert_false(kv_compat_pair_is_updated(pair, 0));
    assert_int_equal(kv_compat_length(kv_compat_pair_cross(pair), 0, &length, NULL), 0);
    assert_int_equal(length, 0);
}

static void row_10_1_a_pair_made_of_filled_caches_knows_what_is_there(void **state)
{
    KvCompatLayerSpec layers[] = {dynamic, dynamic};
    _cleanup_(kv_compat_pair_freep) KvCompatPair *pair = NULL;
    float values[3] = {1, 2, 3};
    KvTensor k = {values, 1, 1, 3, 1, 3}, got_k, got_v;
    KvCompat *self, *cross;

    (void)state;
    assert_int_equal(kv_compat_new(layers, 2, &self, NULL), 0);
    assert_int_equal(kv_compat_new(layers, 2, &cross, NULL), 0);
    assert_int_equal(kv_compat_update(cross, 1, &k, &k, &got_k, &got_v, NULL), 0);
    assert_int_equal(kv_compat_pair_new(self, cross, &pair), 0);
    assert_false(kv_compat_pair_is_updated(pair, 0));
    assert_true(kv_compat_pair_is_updated(pair, 1));
    assert_false(kv_compat_pair_is_updated(pair, 7));
}

static void row_10_2_whole_cache_accessors(void **state)
{
    KvCompatLayerSpec mixed[] = {dynamic, sliding}, compileable[] = {fixed, static_sliding, {0}, linear};
    int64_t longest;
    Rig rig;

    (void)state;
    rig_init(&rig, mixed, 2, 1);
    assert_int_equal(kv_compat_max_length_all(rig.cache, &longest, NULL), 0);
    assert_int_equal(longest, 4); /* the window, although the other layer is unbounded */
    assert_false(kv_compat_is_fixed(rig.cache));
    assert_false(kv_compat_is_sliding(rig.cache, 0));
    assert_true(kv_compat_is_sliding(rig.cache, 1));
    assert_false(kv_compat_is_sliding(rig.cache, 2));
    rig_deinit(&rig);
    rig_init(&rig, compileable, 4, 1);
    assert_true(kv_compat_is_fixed(rig.cache));
    kv_compat_record(rig.cache);
    assert_false(kv_compat_is_fixed(rig.cache));
    rig_deinit(&rig);
    rig_init(&rig, NULL, 0, 1);
    assert_int_equal(kv_compat_max_length_all(rig.cache, &longest, NULL), KV_COMPAT_E_VALUE);
    assert_false(kv_compat_is_fixed(rig.cache));
    rig_deinit(&rig);
}

static void row_1_early_initialisation_takes_one_or_a_list_for_each_layer(void **state)
{
    KvCompatLayerSpec specs[] = {dynamic, linear, fixed};
    static const uint32_t heads[] = {2, 9, 3}, k_width[] = {4}, v_width[] = {6}, zero[] = {0};
    KvCompatShapes shapes = {2, heads, k_width, v_width, 3, 1, 1};
    float values[2 * 3 * 6] = {0};
    KvTensor k = {values, 2, 3, 1, 4, 1}, v = {values, 2, 3, 1, 6, 1}, got_k, got_v;
    int64_t n_rows;
    Rig rig;

    (void)state;
    rig_init(&rig, specs, 3, 2);
    shapes.n_n_heads = 2;
    assert_int_equal(kv_compat_early(rig.cache, &shapes, NULL), KV_COMPAT_E_VALUE);
    shapes.n_n_heads = 3;
    shapes.k_widths = zero;
    assert_int_equal(kv_compat_early(rig.cache, &shapes, NULL), KV_COMPAT_E_VALUE);
    shapes.k_widths = k_width;
    assert_int_equal(kv_compat_n_rows(rig.cache, &n_rows, NULL), 0);
    assert_int_equal(n_rows, -1);
    assert_int_equal(kv_compat_early(rig.cache, &shapes, NULL), 0);
    assert_int_equal(kv_compat_n_rows(rig.cache, &n_rows, NULL), 0);
    assert_int_equal(n_rows, 2);
    assert_int_equal(rig_length(&rig, 2), 0);
    assert_int_equal(kv_compat_stored(rig.cache, 2, &got_k, &got_v, NULL), 0);
    assert_int_equal(got_k.n_tokens, 4);
    assert_int_equal(got_v.width, 6);
    assert_int_equal(kv_compat_update(rig.cache, 0, &k, &v, &got_k, &got_v, NULL), KV_COMPAT_E_SHAPE); /* 2 heads were announced */
    assert_int_equal(kv_compat_update(rig.cache, 2, &k, &v, &got_k, &got_v, NULL), 0);
    rig_deinit(&rig);
}

static void caches_that_make_no_sense_are_refused_by_layer(void **state)
{
    static const KvCompatLayerSpec bad[] = {
        {.kind = KV_COMPAT_SLIDING},
        {.kind = KV_COMPAT_STATIC},
        {.kind = KV_COMPAT_STATIC_SLIDING, .window = 4},
        {.kind = KV_COMPAT_STATIC_SLIDING, .max_tokens = 4},
        {.kind = KV_COMPAT_OTHER},
        {.kind = KV_COMPAT_KIND_X_MAX},
        {.linear = true, .n_states = 1000000},
    };
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvCompat *cache = NULL;

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(bad); i++) {
        KvCompatLayerSpec specs[] = {dynamic, bad[i]};

        assert_int_equal(kv_compat_new(specs, 2, &cache, &detail), KV_COMPAT_E_VALUE);
        assert_non_null(strstr(detail.text, "layer 1"));
        assert_null(cache);
    }
    assert_int_equal(kv_compat_new_replicating(&bad[4], &cache, NULL), KV_COMPAT_E_VALUE);
}

static void a_layer_of_a_foreign_class_is_taken_on_success(void **state)
{
    KvCompatLayerSpec specs[] = {dynamic, {.kind = KV_COMPAT_OTHER, .class = &kv_compat_sliding_class}};
    Rig rig;

    (void)state;
    assert_int_equal(kv_compat_sliding_new(3, &specs[1].state), 0);
    rig_init(&rig, specs, 2, 1);
    assert_int_equal(rig_update(&rig, 1, 5), 0);
    assert_string_equal(rig_kept(&rig, 1), "4 5");
    rig_deinit(&rig);
}

static void masks_of_every_kind_by_hand(void **state)
{
    static const uint8_t padding[] = {0, 0, 1, 1, 1, 1, 1, 1, /* and a row without */ 1, 1, 1, 1, 1, 1, 1, 1};
    KvMask sliding_mask = {.kind = KV_MASK_SLIDING, .window = 3}, chunked = {KV_MASK_CHUNKED, 4, padding, 8};
    KvMask all = {.kind = KV_MASK_ALL}, causal = {KV_MASK_CAUSAL, 0, padding, 8};

    (void)state;
    assert_true(kv_mask_sees(&sliding_mask, 0, 5, 3));
    assert_false(kv_mask_sees(&sliding_mask, 0, 5, 2));
    assert_false(kv_mask_sees(&sliding_mask, 0, 5, 6));
    assert_true(kv_mask_sees(&all, 0, 0, 9));
    assert_int_equal(kv_mask_left_padding(&chunked, 0), 2);
    assert_int_equal(kv_mask_left_padding(&chunked, 1), 0);
    assert_true(kv_mask_sees(&chunked, 0, 5, 2));  /* chunk 2..5 of the padded row */
    assert_false(kv_mask_sees(&chunked, 0, 6, 5)); /* its border */
    assert_false(kv_mask_sees(&chunked, 1, 5, 3)); /* the border of the other row */
    assert_false(kv_mask_sees(&chunked, 0, 5, 1)); /* padding */
    assert_true(kv_mask_sees(&causal, 1, 7, 0));
    assert_false(kv_mask_sees(&causal, 0, 7, 0));
    assert_false(kv_mask_sees(&causal, 1, 9, 8)); /* beyond the two-dimensional mask */
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(row_3_dynamic_appends_crops_and_forgets),
        cmocka_unit_test(row_4_static_counts_from_its_cursor_and_checks_it),
        cmocka_unit_test(row_4_static_keeps_its_buffers_through_reset_reorder_and_crop),
        cmocka_unit_test(row_4_another_row_count_is_taken_when_it_is_empty_only),
        cmocka_unit_test(row_5_1_crop_without_recording),
        cmocka_unit_test(row_5_1_reset_keeps_recording_on),
        cmocka_unit_test(row_5_2_static_sliding_crops_as_far_as_it_still_holds),
        cmocka_unit_test(row_6_1_recording_before_layers_exist_holds_for_later_ones),
        cmocka_unit_test(row_6_1_is_croppable_of_every_kind),
        cmocka_unit_test(row_2_lengths_and_masks_of_layers_without_keys),
        cmocka_unit_test(row_10_rows_can_be_repeated_and_selected_in_every_kind),
        cmocka_unit_test(row_10_row_numbers_are_checked_and_layers_must_agree),
        cmocka_unit_test(row_10_1_cross_keys_are_computed_once_and_crop_is_of_self),
        cmocka_unit_test(row_10_1_a_pair_made_of_filled_caches_knows_what_is_there),
        cmocka_unit_test(row_10_2_whole_cache_accessors),
        cmocka_unit_test(row_1_early_initialisation_takes_one_or_a_list_for_each_layer),
        cmocka_unit_test(caches_that_make_no_sense_are_refused_by_layer),
        cmocka_unit_test(a_layer_of_a_foreign_class_is_taken_on_success),
        cmocka_unit_test(masks_of_every_kind_by_hand),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
