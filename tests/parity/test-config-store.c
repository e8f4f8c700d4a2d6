/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From the quant: keys of a configuration to the bytes of pages: what a store made of it packs is what C packs in the form that the keys mean,
 * byte for byte; recent tokens and sinks have the room they mean.  The sequence is longer than a page, the device packs.
 */

#include "daemon/config/config.h"
#include "quant/base/half.h"
#include "tests/lib/kv-rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

#define SEED     77u
#define N_TOKENS 70u /* two pages and a rest */
#define N_PAGES  2u
#define CHUNK_PAGES 3u /* kv-file-internal.h */

static KvPolicy policy_of(const char *const (*keys)[2], size_t n)
{
    ConfigCache cache = {0};
    const ConfigCache *blocks[] = {&cache};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvPolicy policy;

    for (size_t i = 0; i < n && keys[i][0]; i++)
        if (config_cache_set(&cache, keys[i][0], keys[i][1], &detail))
            fail_msg("%s", detail.text);
    if (config_policy(blocks, 1, true, &policy, &detail))
        fail_msg("%s", detail.text);
    return policy;
}

static float to_tail(float x)
{
    return float_from_half(half_from_float(x));
}

/* The page's keys and values as the tail has them, from the rows of the only pass; keys turned by their positions. */
static void page_values(const KvRig *rig, uint32_t layer, uint32_t page, float *ret_k, float *ret_v)
{
    const KvBench *bench = &rig->bench;
    const KvShape *s = &bench->model.shape;
    uint32_t half = s->rotary_dim / 2;

    for (uint32_t t = 0; t < KV_PAGE_TOKENS; t++) {
        uint32_t position = page * KV_PAGE_TOKENS + t;
        const float *k = bench->qkv_memory[layer] + (size_t)position * bench->qkv_width + s->n_heads * s->k_head_dim;
        const float *v = k + s->n_kv_heads * s->k_head_dim;

        for (uint32_t h = 0; h < s->n_kv_heads; h++, k += s->k_head_dim, ret_k += s->k_head_dim) {
            for (uint32_t f = 0; f < half; f++) {
                float angle = (float)position * bench->inv_freq[f], c = (float)cos((double)angle), sn = (float)sin((double)angle);

                ret_k[f] = to_tail(fmaf(k[f], c, -(k[f + half] * sn)));
                ret_k[f + half] = to_tail(fmaf(k[f + half], c, k[f] * sn));
            }
        }
        for (uint32_t d = 0; d < s->n_kv_heads * s->v_head_dim; d++)
            *ret_v++ = to_tail(v[d]);
    }
}

/* Rotations by the positions of a page as the packing kernel has them: of the page's middle, and from there. */
static void page_rope(const KvBench *bench, uint32_t page, float *ret)
{
    uint32_t half = bench->model.shape.rotary_dim / 2;

    for (uint32_t t = 0; t < KV_PAGE_TOKENS; t++)
        for (uint32_t f = 0; f < half; f++, ret += 2) {
            double turn = (double)bench->inv_freq[f], centre = page * 32.0 + 15.5, place = t - 15.5;
            float pc = (float)cos(centre * turn), ps = (float)sin(centre * turn), c = (float)cos(place * turn), sn = (float)sin(place * turn);

            ret[0] = fmaf(c, pc, -(sn * ps));
            ret[1] = fmaf(c, ps, sn * pc);
        }
}

/* Layer @l of what was saved is packed in @form. */
static void assert_packed(KvRig *rig, const KvImage *image, uint32_t l, KvForm form, const char *what)
{
    const KvShape *shape = &rig->bench.model.shape;
    const KvImageChunk *chunk = kv_image_find(image, CHUNK_PAGES, l, 0);
    float k[KV_PAGE_TOKENS * 128], v[KV_PAGE_TOKENS * 128], rope[KV_PAGE_TOKENS * 64];
    _cleanup_(freep) uint8_t *page = NULL;
    KvLayout layout;

    assert_int_equal(kv_layout(form, shape, &layout, NULL), 0);
    page = calloc(1, layout.page_bytes);
    if (!page || !chunk || chunk->bytes != (uint64_t)N_PAGES * layout.page_bytes)
        fail_msg("%s: layer %u has %llu bytes, not %u pages of %u", what, l, chunk ? (unsigned long long)chunk->bytes : 0, N_PAGES,
                 layout.page_bytes);
    for (uint32_t p = 0; p < N_PAGES; p++) {
        page_values(rig, l, p, k, v);
        page_rope(&rig->bench, p, rope);
        kv_pack_page(form, shape, &rig->bench.calibration[l], rope, k, v, page);
        if (memcmp(page, (const uint8_t *)chunk->data + (size_t)p * layout.page_bytes, layout.page_bytes) != 0)
            fail_msg("%s: page %u of layer %u is packed differently", what, p, l);
    }
}

static void check(KvRig *rig, const char *const (*keys)[2], size_t n, const KvForm *forms)
{
    KvPolicy policy = policy_of(keys, n);
    _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
    _cleanup_(kv_image_freep) KvImage *image = NULL;
    uint64_t tail = 0, used[GPU_PURPOSE_X_MAX], before, after;
    KvStore *store;
    KvCache *cache;
    KvPlan plan;
    int fd;

    policy.max_cache_tokens = 128;
    gpu_memory_used(rig->gpu, used, &before);
    store = kv_rig_store(rig, &policy);
    gpu_memory_used(rig->gpu, used, &after);
    cache = kv_rig_cache(store);
    kv_bench_run(&rig->bench, store, cache, stream, N_TOKENS, N_TOKENS);
    fd = kv_rig_save(cache, "");
    image = kv_rig_image(store, fd, false);
    (void)close(fd);
    for (uint32_t l = 0; l < KV_BENCH_LAYERS; l++) {
        assert_packed(rig, image, l, forms[l], keys[0][1]);
        tail += (uint64_t)(forms[l].tail_tokens + KV_PAGE_TOKENS + forms[l].sink_tokens) * 2 * (64 + 64) * 2;
    }
    assert_int_equal(kv_store_plan(gpu_info(rig->gpu), &rig->bench.model, &policy, &plan, NULL), 0);
    assert_int_equal(plan.tail_bytes, tail);
    assert_int_equal(plan.staging_bytes + plan.tail_bytes + plan.operand_bytes + plan.device_page_bytes, after - before);
    kv_cache_free(cache);
    kv_store_free(store);
}

static void keys_of_leat_are_the_bytes_of_pages(void **state)
{
    static const char *const plain[][2] = {
        {"nbits_key", "8"}, {"nbits_value", "2"}, {"centre", "none"}, {"rotate", "false"}, {"levels", "plain"},
        {"q_group_size", "32"}, {"sinks", "0"}, {"residual_length", "64"}};
    static const char *const rich[][2] = {
        {"quant.nbits_key", "6"}, {"quant.nbits_value", "3"}, {"quant.centre", "after-rope"}, {"quant.pair-scale", "true"},
        {"quant.q_group_size", "16"}, {"quant.sinks", "32"}, {"quant.residual_length", "0"}};
    KvForm forms[2] = {kv_form_leat(8, 2), kv_form_leat(8, 2)};

    forms[0].centre = KV_CENTRE_NONE;
    forms[0].rotation = KV_ROTATION_NONE;
    forms[0].levels = KV_LEVELS_PLAIN;
    forms[0].group_dims = 32;
    forms[0].sink_tokens = 0;
    forms[0].tail_tokens = 64;
    forms[1] = forms[0];
    check(*state, plain, N_ELEMENTS(plain), forms);
    forms[0] = kv_form_leat(6, 3);
    forms[0].centre = KV_CENTRE_AFTER_ROPE;
    forms[0].pair_scale = true;
    forms[0].group_dims = 16;
    forms[0].sink_tokens = 32;
    forms[0].tail_tokens = 0;
    forms[1] = forms[0];
    check(*state, rich, N_ELEMENTS(rich), forms);
}

static void layers_are_packed_with_their_own_bits(void **state)
{
    static const char *const keys[][2] = {{"nbits_key", "5"}, {"nbits_value", "4"}, {"nbits_layers", "1:3/6"}};
    KvForm forms[2] = {kv_form_leat(5, 4), kv_form_leat(5, 4)};

    forms[1].k_bits = 3;
    forms[1].v_bits = 6;
    check(*state, keys, N_ELEMENTS(keys), forms);
}

static void keys_of_the_other_codecs_are_the_bytes_of_pages(void **state)
{
    static const char *const hqq[][2] = {{"backend", "hqq"}, {"nbits_key", "2"}, {"nbits_value", "8"}, {"q_group_size", "48"},
                                         {"residual_length", "32"}};
    static const char *const quanto[][2] = {{"backend", "quanto"}, {"nbits_value", "2"}, {"rotate", "true"}, {"sinks", "3"}};
    static const char *const fp8[][2] = {{"backend", "fp8"}, {"centre", "before-rope"}};
    KvForm forms[2];

    forms[0] = kv_form_default(KV_FORM_HQQ);
    forms[0].k_bits = 2;
    forms[0].v_bits = 8;
    forms[0].group_dims = 48;
    forms[0].tail_tokens = 32;
    forms[1] = forms[0];
    check(*state, hqq, N_ELEMENTS(hqq), forms);
    forms[0] = kv_form_default(KV_FORM_QUANTO);
    forms[0].v_bits = 2;
    forms[0].rotation = KV_ROTATION_HADAMARD;
    forms[0].sink_tokens = 3;
    forms[1] = forms[0];
    check(*state, quanto, N_ELEMENTS(quanto), forms);
    forms[0] = kv_form_default(KV_FORM_FP8);
    forms[0].centre = KV_CENTRE_BEFORE_ROPE;
    forms[1] = forms[0];
    check(*state, fp8, N_ELEMENTS(fp8), forms);
}

/* A session that was saved with other bits in one layer. */
static void a_file_of_other_bits_is_refused_with_the_reason(void **state)
{
    static const char *const keys[][2] = {{"nbits_key", "5"}, {"nbits_value", "4"}, {"nbits_layers", "1:3/6"}};
    static const char *const others[][2] = {{"0-1:5/4", ""}, {"0:3/6", ""}, {"0-1:3/6", ""}};
    KvRig *rig = *state;
    KvPolicy policy = policy_of(keys, N_ELEMENTS(keys));
    _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
    KvStore *store;
    KvCache *cache;
    int fd;

    policy.max_cache_tokens = 128;
    store = kv_rig_store(rig, &policy);
    cache = kv_rig_cache(store);
    kv_bench_run(&rig->bench, store, cache, stream, N_TOKENS, N_TOKENS);
    fd = kv_rig_save(cache, "");
    for (size_t i = 0; i < N_ELEMENTS(others); i++) {
        const char *const changed[][2] = {{"nbits_key", "5"}, {"nbits_value", "4"}, {"nbits_layers", others[i][0]}};
        KvPolicy other = policy_of(changed, N_ELEMENTS(changed));
        ErrorDetail detail = ERROR_DETAIL_NULL;
        KvImage *image = NULL;
        KvStore *to;

        other.max_cache_tokens = 128;
        if (i == 0) { /* the same bits by other words are another fingerprint only when they differ */
            KvPolicy same = policy;

            same.form.k_bits = 3;
            same.form.v_bits = 6;
            same.layer_bits[0] = (KvLayerBits){0, 0, 5, 4};
            to = kv_rig_store(rig, &same);
            image = kv_image_free(kv_rig_image(to, fd, false));
            to = kv_store_free(to);
        }
        to = kv_rig_store(rig, &other);
        assert_int_equal(kv_rig_open(to, fd, false, &image, &detail), KV_IMAGE_E_DIFFERENT);
        assert_non_null(strstr(detail.text, "another form of the cache"));
        kv_store_free(to);
    }
    kv_cache_free(cache);
    kv_store_free(store);
    (void)close(fd);
}

static int setup(void **state)
{
    static float more[2 * 128]; /* what calibration measured besides the bench's means */
    KvRig *rig = kv_rig_new(1);

    for (uint32_t i = 0; i < 128; i++) {
        more[i] = 0.3f - (float)i / 200.0f;
        more[128 + i] = 1.0f + (float)(i % 32) / 64.0f; /* equal for both of a rotary pair */
    }
    for (uint32_t l = 0; l < KV_BENCH_LAYERS; l++) {
        rig->bench.calibration[l].k_turned_mean = more;
        rig->bench.calibration[l].k_pair_scale = more + 128;
        rig->bench.calibration[l].k_largest = rig->bench.calibration[l].v_largest = 3.0f;
    }
    *state = rig;
    return 0;
}

static int teardown(void **state)
{
    *state = kv_rig_free(*state);
    return 0;
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_of_leat_are_the_bytes_of_pages),
        cmocka_unit_test(layers_are_packed_with_their_own_bits),
        cmocka_unit_test(keys_of_the_other_codecs_are_the_bytes_of_pages),
        cmocka_unit_test(a_file_of_other_bits_is_refused_with_the_reason),
    };

    printf("seed %u\n", SEED);
    return cmocka_run_group_tests(tests, setup, teardown);
}
