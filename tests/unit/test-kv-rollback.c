/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rollback and combinations: rows of sections 6, 8.6, 12 and 14 of the cache semantics on the loose device, a case for each, over growths, homes,
 * forms and kinds of layers.
 */

#include "tests/unit/semantics-rig.c"

/* ---- what users complain about (section 14) -------------------------------------------------------------------------------------------- */

/* #37574: off by one where a sequence first reaches the window.  Token by token past each border that there is. */
static void row_14_14_a_sequence_that_reaches_its_window_sees_neither_more_nor_less(void **state)
{
    static const uint32_t windows[] = {1, 2, 31, 32, 33, 63, 64, 65, 96, 127};

    (void)state;
    for (size_t w = 0; w < N_ELEMENTS(windows); w++)
        for (uint32_t axes = 0; axes < 4; axes++) {
            KvPolicy policy = streaming(axes & 1 ? KV_FORM_LEAT : KV_FORM_F16, axes & 1 ? KV_GROWTH_STATIC : KV_GROWTH_DYNAMIC);
            Fixture *fixture;

            policy.home = axes & 2 ? KV_HOME_DEVICE : KV_HOME_HOST;
            fixture = fixture_new(small, 2, policy);
            for (uint32_t l = 0; l < 2; l++)
                fixture->layers[l] = (KvLayer){.kind = l ? KV_LAYER_CHUNKED : KV_LAYER_SLIDING, .window = windows[w]};
            open_store(fixture);
            for (uint32_t t = 0; t < 200; t++)
                run_pass(fixture, 1, 1);
            (void)fixture_free(fixture);
        }
}

/* #30536, and section 12 "residual in steady state: whole cache re-quantised at each flush": a page is coded and sent home once. */
static void row_14_16_growing_sends_each_page_home_once(void **state)
{
    static const uint32_t chunks[] = {1, 150, 1, 7, 64, 33};

    (void)state;
    for (int kind = KV_FORM_F32; kind < KV_FORM_X_MAX; kind++)
        for (int growth = 0; growth < 2; growth++) {
            Fixture *fixture = opened(small, 3, streaming((KvFormKind)kind, growth ? KV_GROWTH_STATIC : KV_GROWTH_DYNAMIC));
            uint32_t length = 1;

            for (size_t i = 0; length < 700; length += chunks[i++ % N_ELEMENTS(chunks)])
                run_pass(fixture, 1, chunks[i % N_ELEMENTS(chunks)]);
            assert_int_equal(fixture->gpu.home_bytes, 3ull * (length / KV_PAGE_TOKENS) * page_bytes(fixture));
            (void)fixture_free(fixture);
        }
}

/* ---- combinations ---------------------------------------------------------------------------------------------------------------------- */

static void write_cross(Fixture *fixture, uint32_t *ids)
{
    KvPassItem item = {fixture->sequences[0].cache, N_CROSS};
    KvPass *pass;

    for (uint32_t t = 0; t < N_CROSS; t++) {
        ids[t] = fixture->next_id++;
        ((float *)fixture->qkv->data)[t * kv_token_values(&fixture->model.shape)] = (float)ids[t];
    }
    assert_int_equal(kv_cross_begin(fixture->store, &item, 1, &pass, NULL), 0);
    for (uint32_t l = 0; l < fixture->model.n_layers; l++)
        if (fixture->layers[l].kind == KV_LAYER_CROSS)
            assert_int_equal(kv_cross_layer(pass, l, fixture->qkv, NULL), 0);
    assert_int_equal(gpu_step_finish(&fixture->gpu, NULL), 0);
    assert_int_equal(kv_pass_commit(pass), 0);
}

static const KvShape no_rotation = {.n_heads = 1, .n_kv_heads = 1, .k_head_dim = 16, .v_head_dim = 16};

/* Each beside a full layer. */
static const KvLayer all_kinds[] = {
    {.kind = KV_LAYER_FULL},
    {.kind = KV_LAYER_SLIDING, .window = 70},
    {.kind = KV_LAYER_CHUNKED, .window = 70},
    {.kind = KV_LAYER_CROSS, .shape = no_rotation},
    {.kind = KV_LAYER_SHARED, .source = 0},
    {.kind = KV_LAYER_NONE, .conv_bytes = 64, .recurrent_bytes = 128},
    {.kind = KV_LAYER_FULL, .conv_bytes = 64, .recurrent_bytes = 128},
    {.kind = KV_LAYER_SLIDING, .window = 70, .conv_bytes = 64, .recurrent_bytes = 128},
};

static void try_combination(KvPolicy policy, const KvLayer *layer)
{
    Fixture *fixture = fixture_new(small, 2, policy);
    uint32_t ids[N_CROSS];

    fixture->layers[0] = all_kinds[0];
    fixture->layers[1] = *layer;
    fixture->model.max_cross_tokens = layer->kind == KV_LAYER_CROSS ? N_CROSS : 0;
    open_store(fixture);
    assert_int_equal(kv_cache_new(fixture->store, &fixture->sequences[0].cache, NULL), 0);
    if (layer->kind == KV_LAYER_CROSS)
        write_cross(fixture, ids);
    fixture->cross_ids = ids;
    run_pass(fixture, 1, 150);
    run_pass(fixture, 1, 1);
    run_pass(fixture, 1, 40);
    fork_to(fixture, 1);
    run_pass(fixture, 2, 3);
    (void)fixture_free(fixture);
}

/* The library refuses most of these (section 12, first rows; 8.6). */
static void row_12_every_growth_home_form_and_kind_of_layer_works_together(void **state)
{
    static const KvTransfer transfers[] = {KV_TRANSFER_COPY, KV_TRANSFER_ZERO_COPY};
    uint32_t n = 0;

    (void)state;
    for (int kind = KV_FORM_F32; kind < KV_FORM_X_MAX; kind++)
        for (size_t l = 0; l < N_ELEMENTS(all_kinds); l++)
            for (uint32_t axes = 0; axes < 16; axes++, n++) {
                KvPolicy policy = streaming((KvFormKind)kind, axes & 1 ? KV_GROWTH_STATIC : KV_GROWTH_DYNAMIC);

                policy.home = axes & 2 ? KV_HOME_HOST : KV_HOME_DEVICE;
                policy.offload_only_non_sliding = axes & 4;
                policy.transfer = transfers[axes >> 3];
                try_combination(policy, &all_kinds[l]);
            }
    print_message("%u combinations\n", n);
}

/* In compatibility mode as there: full layers only (8.6), and the layer is named. */
static void row_8_6_compatibility_mode_refuses_other_layers_by_name(void **state)
{
    (void)state;
    for (size_t l = 1; l < N_ELEMENTS(all_kinds); l++) {
        Fixture *fixture = fixture_new(small, 2, streaming(KV_FORM_F16, KV_GROWTH_DYNAMIC));
        ErrorDetail detail = ERROR_DETAIL_NULL;
        KvStore *store = NULL;
        int r;

        fixture->layers[1] = all_kinds[l];
        fixture->model.max_cross_tokens = N_CROSS;
        fixture->policy.is_compatible = true;
        assert_int_equal(kv_quant_options(&(KvQuantRequest){0}, &fixture->policy.compatible, NULL), 0);
        r = kv_store_new(&fixture->gpu, &fixture->model, &fixture->policy, &store, &detail);
        assert_true(r == -ENOTSUP || r == -EINVAL);
        if (!strstr(detail.text, "layer 1"))
            fail_msg("'%s' does not name the layer", detail.text);
        (void)fixture_free(fixture);
    }
}

/* ---- rollback -------------------------------------------------------------------------------------------------------------------------- */

#define FULL    {.kind = KV_LAYER_FULL}
#define SLIDING {.kind = KV_LAYER_SLIDING, .window = 100}
#define CHUNKED {.kind = KV_LAYER_CHUNKED, .window = 100}
#define LINEAR  {.kind = KV_LAYER_NONE, .conv_bytes = 64, .recurrent_bytes = 128}

static const KvLayer kinds_of_layers[][2] = {{FULL, FULL}, {FULL, SLIDING}, {CHUNKED, SLIDING}, {LINEAR, FULL}, {LINEAR, SLIDING}};

/* With @layers, under the i-th of all growths and homes. */
static Fixture *rolling(const KvLayer layers[2], KvFormKind kind, uint32_t i)
{
    KvPolicy policy = streaming(kind, i & 1 ? KV_GROWTH_STATIC : KV_GROWTH_DYNAMIC);
    Fixture *fixture;

    policy.home = i & 2 ? KV_HOME_DEVICE : KV_HOME_HOST;
    policy.offload_only_non_sliding = i & 4;
    fixture = fixture_new(small, 2, policy);
    memcpy(fixture->layers, layers, 2 * sizeof(KvLayer));
    fixture->model.max_state_steps = 20;
    open_store(fixture);
    run_pass(fixture, 1, 1);
    return fixture;
}

static void refused(Fixture *fixture, uint32_t n_rows, uint32_t n_back, const char *culprit)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvCache *caches[N_CACHES];
    uint32_t lengths[N_CACHES];

    for (uint32_t i = 0; i < n_rows; i++) {
        caches[i] = fixture->sequences[i].cache;
        lengths[i] = kv_cache_length(caches[i]);
    }
    assert_int_equal(kv_caches_crop(caches, n_rows, -(int64_t)n_back, &detail), KV_E_ROLLBACK);
    if (!strstr(detail.text, culprit))
        fail_msg("%s does not name %s", detail.text, culprit);
    for (uint32_t i = 0; i < n_rows; i++)
        assert_int_equal(kv_cache_length(caches[i]), lengths[i]);
}

static void row_6_3_taking_back_more_than_was_recorded_is_refused_by_name_and_changes_nothing(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_ELEMENTS(kinds_of_layers); k++)
        for (uint32_t i = 0; i < 8; i++) {
            Fixture *fixture = rolling(kinds_of_layers[k], KV_FORM_LEAT, i);
            KvCache **cache = &fixture->sequences[0].cache;

            run_to(fixture, 1, 400);
            assert_int_equal(kv_cache_record(*cache, true), 0);
            run_pass(fixture, 1, 10);
            run_pass(fixture, 1, 10);
            refused(fixture, 1, 200, "row 0 cannot take back 200 of 420 tokens");
            run_pass(fixture, 1, 1); /* it goes on as if nothing had been asked */
            assert_int_equal(kv_caches_crop(cache, 1, -21, NULL), 0);
            assert_int_equal(kv_cache_length(*cache), 400);
            refused(fixture, 1, 200, "not recorded"); /* recording began anew */
            run_pass(fixture, 1, 40);
            (void)fixture_free(fixture);
        }
}

/* 5.24 refuses draft and verification on hybrids and on quantised caches (6.4); here any part of a draft can be taken back. */
static void row_12_any_part_of_a_recorded_draft_is_taken_back_exactly_in_every_kind_of_layer(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_ELEMENTS(kinds_of_layers); k++)
        for (uint32_t i = 0; i < 8; i++) {
            Fixture *fixture = rolling(kinds_of_layers[k], i % 2 ? KV_FORM_HQQ : KV_FORM_LEAT, i);
            KvCache **cache = &fixture->sequences[0].cache;

            assert_int_equal(kv_cache_record(*cache, true), 0);
            run_to(fixture, 1, 300 + i);
            for (uint32_t draft = 0; draft < 60; draft++) { /* across the borders of pages, too */
                uint32_t length = kv_cache_length(*cache), back = draft % 13;

                run_pass(fixture, 1, 12);
                assert_int_equal(kv_caches_crop(cache, 1, -(int64_t)back, NULL), 0);
                assert_int_equal(kv_cache_length(*cache), length + 12 - back);
            }
            (void)fixture_free(fixture);
        }
}

static void row_6_3_the_middle_of_a_pass_that_is_too_long_to_keep_is_refused_by_name(void **state)
{
    Fixture *fixture = rolling(kinds_of_layers[0], KV_FORM_LEAT, 0);
    KvCache **cache = &fixture->sequences[0].cache;

    (void)state;
    assert_int_equal(kv_cache_record(*cache, true), 0);
    run_pass(fixture, 1, 256);
    run_pass(fixture, 1, 256);
    refused(fixture, 1, 128, "from 385 was not recorded"); /* 64 recent tokens, and they are of the last pages */
    assert_int_equal(kv_caches_crop(cache, 1, -256, NULL), 0);
    (void)fixture_free(fixture);
    fixture = rolling(kinds_of_layers[3], KV_FORM_F16, 0); /* states: slots for 20 steps */
    cache = &fixture->sequences[0].cache;
    assert_int_equal(kv_cache_record(*cache, true), 0);
    run_pass(fixture, 1, 30);
    refused(fixture, 1, 3, "cannot take back 3 of 31");
    assert_int_equal(kv_caches_crop(cache, 1, -30, NULL), 0);
    (void)fixture_free(fixture);
}

static void row_12_a_crop_that_one_row_refuses_crops_none(void **state)
{
    Fixture *fixture = rolling(kinds_of_layers[4], KV_FORM_LEAT, 0);
    KvCache *caches[2];

    (void)state;
    run_to(fixture, 1, 150);
    fork_to(fixture, 1);
    assert_int_equal(kv_cache_record(fixture->sequences[0].cache, true), 0);
    run_pass(fixture, 2, 4);
    refused(fixture, 2, 2, "row 1");
    caches[0] = fixture->sequences[1].cache;
    caches[1] = fixture->sequences[0].cache;
    assert_int_equal(kv_caches_crop(caches, 2, 1, NULL), -EINVAL);
    assert_int_equal(kv_caches_crop(caches, 2, -155, NULL), -EINVAL);
    assert_int_equal(kv_caches_crop(&caches[1], 1, -2, NULL), 0);
    fixture->sequences[0].cache = kv_cache_free(fixture->sequences[0].cache);
    (void)fixture_free(fixture);
}

/* Memory that is refused for the second row: the first is as it was. */
static void row_12_a_crop_that_memory_refuses_crops_none(void **state)
{
    uint32_t n_refused = 0;

    (void)state;
    for (uint64_t fail_at = 0; fail_at < 60; fail_at++) {
        Fixture *fixture = rolling(kinds_of_layers[1], KV_FORM_F16, 2);
        KvCache *caches[2];
        int r;

        run_to(fixture, 1, 150);
        fork_to(fixture, 1);
        caches[0] = fixture->sequences[0].cache;
        caches[1] = fixture->sequences[1].cache;
        run_pass(fixture, 2, 100);
        fixture->gpu.fail_at = (int64_t)fail_at;
        r = kv_caches_crop(caches, 2, -90, NULL);
        fixture->gpu.fail_at = -1;
        assert_int_equal(kv_cache_length(caches[0]), r ? 250 : 160);
        assert_int_equal(kv_cache_length(caches[1]), r ? 250 : 160);
        n_refused += r != 0;
        (void)fixture_free(fixture);
    }
    assert_true(n_refused > 3);
}

/* crop(0) after a long recorded prefill gives the memory back at once (6.1). */
static void row_6_1_crop_0_gives_what_was_recorded_back_at_once(void **state)
{
    (void)state;
    for (size_t k = 1; k < N_ELEMENTS(kinds_of_layers); k++) {
        Fixture *fixture = rolling(kinds_of_layers[k], KV_FORM_LEAT, 0), *plain = rolling(kinds_of_layers[k], KV_FORM_LEAT, 0);
        KvBytes recorded, after, without;

        assert_int_equal(kv_cache_record(fixture->sequences[0].cache, true), 0);
        run_to(fixture, 1, 1000);
        run_to(plain, 1, 1000);
        kv_cache_bytes(fixture->sequences[0].cache, &recorded);
        assert_int_equal(kv_caches_crop(&fixture->sequences[0].cache, 1, 0, NULL), 0);
        kv_cache_bytes(fixture->sequences[0].cache, &after);
        kv_cache_bytes(plain->sequences[0].cache, &without);
        assert_true(recorded.host + recorded.checkpoints > without.host);
        assert_int_equal(after.host, without.host);
        assert_int_equal(after.checkpoints, 0);
        (void)fixture_free(fixture);
        (void)fixture_free(plain);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(row_12_every_growth_home_form_and_kind_of_layer_works_together),
        cmocka_unit_test(row_8_6_compatibility_mode_refuses_other_layers_by_name),
        cmocka_unit_test(row_6_1_crop_0_gives_what_was_recorded_back_at_once),
        cmocka_unit_test(row_6_3_taking_back_more_than_was_recorded_is_refused_by_name_and_changes_nothing),
        cmocka_unit_test(row_6_3_the_middle_of_a_pass_that_is_too_long_to_keep_is_refused_by_name),
        cmocka_unit_test(row_12_any_part_of_a_recorded_draft_is_taken_back_exactly_in_every_kind_of_layer),
        cmocka_unit_test(row_12_a_crop_that_one_row_refuses_crops_none),
        cmocka_unit_test(row_12_a_crop_that_memory_refuses_crops_none),
        cmocka_unit_test(row_14_14_a_sequence_that_reaches_its_window_sees_neither_more_nor_less),
        cmocka_unit_test(row_14_16_growing_sends_each_page_home_once),
    };

    printf("seed %u\n", SEED);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
