/* SPDX-License-Identifier: Apache-2.0 */
/* KV codecs: layout, rotation, error of the search, decoding, hostile values.  Seed: fixed, printed. */

#include "quant/kv-codec.h"

#include "quant/base/half.h"
#include "quant/kv-fp8.h"
#include "quant/kv-hqq.h"
#include "quant/kv-quanto.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define SEED 20240607u

/* Kind and bits; the rest is the kind's default. */
static const struct {
    KvFormKind kind;
    uint8_t k_bits, v_bits;
} kinds[] = {
    {KV_FORM_F32, 0, 0},    {KV_FORM_F16, 0, 0},    {KV_FORM_LEAT, 4, 4}, {KV_FORM_LEAT, 5, 4}, {KV_FORM_LEAT, 5, 5}, {KV_FORM_LEAT, 8, 8},
    {KV_FORM_LEAT, 4, 8},   {KV_FORM_LEAT, 8, 5},   {KV_FORM_LEAT, 4, 5}, {KV_FORM_LEAT, 6, 3}, {KV_FORM_LEAT, 3, 2}, {KV_FORM_LEAT, 2, 6},
    {KV_FORM_QUANTO, 4, 2}, {KV_FORM_QUANTO, 2, 4}, {KV_FORM_HQQ, 8, 4},  {KV_FORM_HQQ, 2, 8},  {KV_FORM_FP8, 8, 8},
};
#define N_FORMS N_ELEMENTS(kinds)
static KvForm form_at(size_t i)
{
    KvForm form = kv_form_default(kinds[i].kind);

    form.k_bits = kinds[i].k_bits;
    form.v_bits = kinds[i].v_bits;
    return form;
}
static const uint32_t head_dims[] = {16, 32, 64, 80, 96, 112, 128, 192, 256, 512, 576};

static float uniform(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) * 0x1p-24f;
}

static float gaussian(uint32_t *state)
{
    float u = uniform(state) + 0x1p-25f, v = uniform(state);

    return sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v);
}

/* One page of tokens with everything that packing needs; freed by page_case_clear(). */
typedef struct PageCase {
    KvShape shape;
    KvForm form;
    KvLayout layout;
    float *k, *v, *rope, *k_mean, *v_mean;
    uint8_t *page;
} PageCase;

static float *floats(size_t n)
{
    float *x = calloc(n, sizeof(*x));

    assert_non_null(x);
    return x;
}

static PageCase page_case_new(KvForm form, uint32_t k_dim, uint32_t v_dim, uint32_t n_kv_heads)
{
    PageCase c = {.form = form, .shape = {n_kv_heads, n_kv_heads, k_dim, v_dim, k_dim}};
    size_t n = (size_t)KV_PAGE_TOKENS * n_kv_heads;

    assert_int_equal(kv_layout(form, &c.shape, &c.layout, NULL), 0);
    c.k = floats(n * k_dim);
    c.v = floats(n * v_dim);
    c.rope = floats((size_t)KV_PAGE_TOKENS * k_dim);
    c.k_mean = floats((size_t)n_kv_heads * k_dim);
    c.v_mean = floats((size_t)n_kv_heads * v_dim);
    c.page = calloc(1, c.layout.page_bytes);
    assert_non_null(c.page);
    for (uint32_t t = 0; t < KV_PAGE_TOKENS; t++)
        for (uint32_t f = 0; f < k_dim / 2; f++) {
            double angle = (4096 + t) * pow(1e4, -2.0 * f / k_dim);

            c.rope[(t * k_dim / 2 + f) * 2] = (float)cos(angle);
            c.rope[(t * k_dim / 2 + f) * 2 + 1] = (float)sin(angle);
        }
    return c;
}

static void page_case_clear(PageCase *c)
{
    free(c->k);
    free(c->v);
    free(c->rope);
    free(c->k_mean);
    free(c->v_mean);
    free(c->page);
}

static void page_case_fill(PageCase *c, uint32_t seed)
{
    size_t n = (size_t)KV_PAGE_TOKENS * c->shape.n_kv_heads;

    for (size_t i = 0; i < n * c->shape.k_head_dim; i++)
        c->k[i] = gaussian(&seed);
    for (size_t i = 0; i < n * c->shape.v_head_dim; i++)
        c->v[i] = gaussian(&seed);
}

static void layout_of_every_form_is_whole_cache_lines_in_order(void **state)
{
    (void)state;
    for (size_t f = 0; f < N_FORMS; f++)
        for (size_t d = 0; d < N_ELEMENTS(head_dims); d++) {
            KvShape shape = {6, 3, head_dims[d], head_dims[(d + 3) % N_ELEMENTS(head_dims)], 16};
            KvLayout l;

            assert_int_equal(kv_layout(form_at(f), &shape, &l, NULL), 0);
            assert_int_equal(l.record_bytes % 64, 0);
            assert_int_equal(l.page_bytes, 3 * l.record_bytes);
            assert_true(l.k_offset < l.v_offset && l.k_high_offset <= l.v_offset && l.v_offset < l.record_bytes);
            assert_true(l.v_high_offset <= l.k_scale_offset && l.k_scale_offset <= l.v_scale_offset);
        }
}

static void default_form_of_head_64_takes_2432_bytes(void **state)
{
    KvShape shape = {9, 3, 64, 64, 64};
    KvLayout l;

    (void)state;
    assert_int_equal(kv_layout(kv_form_leat(5, 4), &shape, &l, NULL), 0);
    assert_int_equal(l.record_bytes, 2432);
    assert_int_equal(l.k_high_offset, 1024);
    assert_int_equal(l.v_offset, 1280);
    assert_int_equal(l.k_scale_offset, 2304);
    assert_int_equal(l.v_scale_offset, 2368);
}

static void layout_refuses_what_it_does_not_know(void **state)
{
    static const KvShape bad[] = {{9, 3, 0, 64, 0},   {9, 3, 64, 0, 0},   {9, 3, 24, 64, 24}, {9, 3, 64, 24, 64}, {9, 3, 592, 64, 64},
                                  {9, 3, 64, 592, 64}, {9, 0, 64, 64, 64}, {0, 3, 64, 64, 64}, {8, 3, 64, 64, 64}, {9, 3, 64, 80, 66},
                                  {9, 3, 64, 64, 31},  {0x7fffffff, 0x7fffffff, 256, 256, 64}};
    const KvForm bad_forms[] = {kv_form_leat(7, 4), kv_form_leat(4, 0), kv_form_leat(16, 4), {.kind = KV_FORM_X_MAX}};
    KvShape good = {9, 3, 64, 64, 64};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvLayout l;

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(bad); i++)
        assert_int_equal(kv_layout(kv_form_leat(5, 4), &bad[i], &l, NULL), -EINVAL);
    for (size_t i = 0; i < N_ELEMENTS(bad_forms); i++)
        assert_int_equal(kv_layout(bad_forms[i], &good, &l, &detail), -EINVAL);
    assert_int_equal(kv_layout(bad_forms[0], &good, &l, &detail), -EINVAL);
    assert_non_null(strstr(detail.text, "7 bits"));
}

static void forms_are_refused_with_the_culprit(void **state)
{
    KvForm good = kv_form_leat(5, 4), hqq = kv_form_default(KV_FORM_HQQ), fp8 = kv_form_default(KV_FORM_FP8);
    KvForm plain = kv_form_default(KV_FORM_F16), bad;
    ErrorDetail detail = ERROR_DETAIL_NULL;

#define REFUSED(from, change, word)                                                                                    \
    do {                                                                                                               \
        bad = from;                                                                                                    \
        change;                                                                                                        \
        assert_int_equal(kv_form_check(bad, &detail), -EINVAL);                                                        \
        assert_non_null(strstr(detail.text, word));                                                                    \
    } while (0)
    (void)state;
    REFUSED(good, bad.k_bits = 7, "7 bits for keys");
    REFUSED(good, bad.v_bits = 1, "1 bits for values");
    REFUSED(hqq, bad.k_bits = 3, "hqq keeps pages of 8, 4 and 2 bits");
    REFUSED(fp8, bad.v_bits = 4, "fp8 keeps pages of 8 bits");
    REFUSED(fp8, bad.group_dims = 64, "one scale a layer");
    REFUSED(good, bad.group_dims = 24, "groups of 24 dims");
    REFUSED(good, bad.group_dims = 144, "groups of 144 dims");
    REFUSED(good, bad.group_dims = 0, "groups of 0 dims");
    REFUSED(good, bad.sink_tokens = 33, "33 sinks");
    REFUSED(good, bad.tail_tokens = 48, "tail of 48 tokens");
    REFUSED(good, bad.tail_tokens = 544, "tail of 544 tokens");
    REFUSED(hqq, bad.levels = KV_LEVELS_PLAIN, "levels are a part of leat");
    REFUSED(good, bad.centre = KV_CENTRE_X_MAX, "centring");
    REFUSED(plain, bad.k_bits = 4, "no meaning for a cache in f16");
    REFUSED(plain, bad.kind = KV_FORM_X_MAX, "unknown");
#undef REFUSED
    for (int kind = 0; kind < KV_FORM_X_MAX; kind++)
        assert_int_equal(kv_form_check(kv_form_default((KvFormKind)kind), NULL), 0);
    assert_int_equal(kv_form_check((KvForm){.kind = KV_FORM_LEAT}, NULL), -EINVAL);
}

static void the_tail_says_what_is_seen_coded(void **state)
{
    KvForm form = kv_form_leat(4, 4);

    (void)state;
    assert_int_equal(kv_ring_tokens(form), 64);
    assert_int_equal(kv_packed_pages(form, 63), 0);
    assert_int_equal(kv_packed_pages(form, 64), 1);
    form.tail_tokens = 0; /* but the page that is being filled */
    assert_int_equal(kv_packed_pages(form, 31), 0);
    assert_int_equal(kv_packed_pages(form, 32), 1);
    form.tail_tokens = 160;
    assert_int_equal(kv_packed_pages(form, 191), 0);
    assert_int_equal(kv_packed_pages(form, 192), 1);
    assert_int_equal(kv_ring_tokens(form), 192);
}

/* Pages of quanto, hqq and fp8 decode to what the references of these codecs give for each group, before its rounding to f16. */
static void pages_hold_what_the_references_code(void **state)
{
    KvForm forms[] = {kv_form_default(KV_FORM_QUANTO), kv_form_default(KV_FORM_HQQ), kv_form_default(KV_FORM_FP8)};
    KvCalibration calibration = {.k_largest = 5.0f};
    enum { DIM = 80 };

    (void)state;
    for (size_t f = 0; f < N_ELEMENTS(forms); f++) {
        float k[KV_PAGE_TOKENS * DIM], v[KV_PAGE_TOKENS * DIM], scale, zero;
        PageCase c = page_case_new(forms[f], DIM, DIM, 1);
        uint8_t codes[64];

        page_case_fill(&c, SEED);
        for (uint32_t i = 0; i < KV_PAGE_TOKENS * DIM; i++)
            c.k[i] = float_from_half(half_from_float(c.k[i]));
        kv_pack_page(c.form, &c.shape, &calibration, c.rope, c.k, c.v, c.page);
        kv_unpack_page(c.form, &c.shape, c.page, 0, k, v);
        for (uint32_t t = 0; t < KV_PAGE_TOKENS; t++)
            for (uint32_t first = 0; first < DIM; first += 64) {
                const float *x = c.k + t * DIM + first;
                uint32_t n = MIN(DIM - first, 64u);

                if (c.form.kind == KV_FORM_QUANTO)
                    kv_quanto_group(KV_DTYPE_F16, 4, x, n, codes, &scale, &zero);
                else if (c.form.kind == KV_FORM_HQQ)
                    kv_hqq_group(4, x, n, codes, &scale, &zero);
                for (uint32_t i = 0; i < n; i++) {
                    float decoded = k[t * DIM + first + i], expected;

                    if (c.form.kind == KV_FORM_QUANTO)
                        expected = kv_quanto_value(KV_DTYPE_F16, codes[i], scale, zero);
                    else if (c.form.kind == KV_FORM_HQQ)
                        expected = kv_hqq_value(KV_DTYPE_F16, codes[i], kv_dtype_round(KV_DTYPE_F16, scale), kv_dtype_round(KV_DTYPE_F16, zero));
                    else
                        expected = kv_fp8_decode(kv_fp8_encode(x[i] / (5.0f * KV_FP8_HEADROOM / 448.0f)));
                    assert_true(fabsf(decoded - expected) <= 0x1p-8f); /* half a step of the largest products, twice */
                }
            }
        page_case_clear(&c);
    }
}

static void constants_of_a_form_are_neutral_where_it_does_not_use_them(void **state)
{
    enum { DIM = 32 };
    KvShape shape = {2, 1, DIM, DIM, DIM};
    float k[DIM], turned[DIM], w[DIM], v[DIM], got[4 * DIM + KV_SCALE_FLOATS];
    KvCalibration calibration = {k, v, turned, w, 7.0f, 0.0f};
    KvForm form = kv_form_leat(4, 4);

    (void)state;
    assert_int_equal(kv_constants_floats(&shape), N_ELEMENTS(got));
    for (int d = 0; d < DIM; d++) {
        k[d] = 1.0f;
        turned[d] = 2.0f;
        w[d] = 4.0f;
        v[d] = 3.0f;
    }
    kv_constants_fill(form, &shape, &calibration, got);
    assert_true(got[0] == 1.0f && got[DIM] == 1.0f && got[2 * DIM] == 1.0f && got[3 * DIM] == 3.0f);
    assert_true(got[4 * DIM] == 7.0f * KV_FP8_HEADROOM / 448.0f && got[4 * DIM + 1] == 1.0f);
    form.centre = KV_CENTRE_AFTER_ROPE;
    form.pair_scale = true;
    kv_constants_fill(form, &shape, &calibration, got);
    assert_true(got[0] == 2.0f && got[DIM] == 0.25f && got[2 * DIM] == 4.0f);
    form.centre = KV_CENTRE_NONE;
    kv_constants_fill(form, &shape, &calibration, got);
    assert_true(got[0] == 0.0f && got[3 * DIM] == 0.0f);
    kv_constants_fill(form, &shape, NULL, got);
    assert_true(got[DIM] == 1.0f && got[2 * DIM] == 1.0f && got[4 * DIM] == 1.0f);
}

static void true_bits_count_scales_sinks_and_tail(void **state)
{
    KvShape shape = {9, 3, 64, 64, 64};
    KvForm five_four = kv_form_leat(5, 4), four = kv_form_leat(4, 4);

    (void)state;
    assert_true(fabs(kv_true_bits(five_four, &shape, 8192, 16) - 4.846) < 0.001);
    assert_true(kv_true_bits(four, &shape, 8192, 16) <= 4.4);
    assert_true(fabs(kv_true_bits(four, &shape, 40, 16) - 16.0) < 1e-9); /* all of it is tail */
    assert_true(kv_true_bits(four, &shape, 0, 16) == 0);
}

static void hadamard_is_its_own_inverse_and_keeps_lengths(void **state)
{
    (void)state;
    for (size_t d = 0; d < N_ELEMENTS(head_dims); d++) {
        float x[KV_MAX_HEAD_DIM], y[KV_MAX_HEAD_DIM];
        uint32_t n = head_dims[d], seed = SEED;
        double before = 0, after = 0;

        for (uint32_t i = 0; i < n; i++) {
            x[i] = y[i] = gaussian(&seed);
            before += (double)x[i] * x[i];
        }
        kv_hadamard(y, n);
        for (uint32_t i = 0; i < n; i++)
            after += (double)y[i] * y[i];
        assert_true(fabs(after - before) < 1e-5 * before);
        kv_hadamard(y, n);
        for (uint32_t i = 0; i < n; i++)
            assert_true(fabsf(x[i] - y[i]) < 1e-5f);
    }
}

static void hadamard_of_80_is_a_block_of_64_and_one_of_16(void **state)
{
    float x[80] = {1.0f};

    (void)state;
    x[79] = 1.0f;
    kv_hadamard(x, 80);
    for (int i = 0; i < 64; i++)
        assert_true(x[i] == 0.125f);
    for (int i = 64; i < 80; i++)
        assert_true(fabsf(x[i]) == 0.25f);
}

/* Squared error over squared length of one side after Hadamard, the domain of the codes. */
static double relative_error(const PageCase *c, bool is_key)
{
    uint32_t dim = is_key ? c->shape.k_head_dim : c->shape.v_head_dim, kv_heads = c->shape.n_kv_heads;
    _cleanup_(freep) float *k = floats((size_t)KV_PAGE_TOKENS * c->shape.k_head_dim);
    _cleanup_(freep) float *v = floats((size_t)KV_PAGE_TOKENS * c->shape.v_head_dim);
    double error = 0, length = 0;

    for (uint32_t h = 0; h < kv_heads; h++) {
        kv_unpack_page(c->form, &c->shape, c->page, h, k, v);
        for (uint32_t t = 0; t < KV_PAGE_TOKENS; t++) {
            float x[KV_MAX_HEAD_DIM];

            memcpy(x, (is_key ? c->k : c->v) + ((size_t)t * kv_heads + h) * dim, dim * sizeof(float));
            if (c->form.rotation == KV_ROTATION_HADAMARD)
                kv_hadamard(x, dim);
            for (uint32_t d = 0; d < dim; d++) {
                double difference = (double)x[d] - (is_key ? k : v)[t * dim + d];

                error += difference * difference;
                length += (double)x[d] * x[d];
            }
        }
    }
    return error / length;
}

/* For groups of 64 Gaussian values; leat: 4, 8, 16 and 32 Lloyd-Max levels with a searched f16 scale reach 0.11, 0.033, 0.0073 and 0.00185.
 * Smaller groups of odd head sizes are easier. */
static double error_bound(const KvForm *form, int bits)
{
    switch (form->kind) {
    case KV_FORM_LEAT:
        return bits == 2 ? 0.11 : bits == 3 ? 0.03 : bits == 4 ? 0.0074 : bits == 5 ? 0.0019 : bits == 6 ? 0.0005 : 0.00004;
    case KV_FORM_QUANTO:
    case KV_FORM_HQQ:
        return bits == 2 ? 0.25 : bits == 4 ? 0.0105 : 0.00005;
    case KV_FORM_FP8:
        return 0.0008;
    case KV_FORM_F16:
        return 1e-7;
    case KV_FORM_F32:
    case KV_FORM_X_MAX:
    case KV_FORM_X_INVALID:
        break;
    }
    return 0;
}

static void decoding_is_within_the_error_of_the_levels(void **state)
{
    (void)state;
    for (size_t f = 0; f < N_FORMS; f++)
        for (size_t d = 0; d < N_ELEMENTS(head_dims); d++) {
            PageCase c = page_case_new(form_at(f), head_dims[d], head_dims[(d + 2) % N_ELEMENTS(head_dims)], 3);

            page_case_fill(&c, SEED + (uint32_t)d);
            kv_pack_page(c.form, &c.shape, NULL, c.rope, c.k, c.v, c.page);
            for (int side = 0; side < 2; side++)
                assert_true(relative_error(&c, side == 0) <= error_bound(&c.form, side ? c.form.v_bits : c.form.k_bits));
            page_case_clear(&c);
        }
}

static void searched_scale_beats_the_largest_magnitude(void **state)
{
    PageCase c = page_case_new(kv_form_leat(4, 4), 64, 64, 1);

    (void)state;
    page_case_fill(&c, SEED);
    kv_pack_page(c.form, &c.shape, NULL, c.rope, c.k, c.v, c.page);
    printf("4 bits: relative squared error %.5f (largest magnitude as the scale: about 0.0101)\n", relative_error(&c, true));
    assert_true(relative_error(&c, true) < 0.0074);
    page_case_clear(&c);
}

/* A key that is the turned mean exactly leaves nothing to code, and a huge mean costs no precision. */
static void centring_removes_the_turned_mean(void **state)
{
    PageCase c = page_case_new(kv_form_leat(5, 4), 64, 64, 2);
    KvCalibration calibration = {.k_mean = c.k_mean, .v_mean = c.v_mean};
    uint32_t seed = SEED, dim = 64;
    float k[KV_PAGE_TOKENS * 64], v[KV_PAGE_TOKENS * 64];
    double largest_k = 0, largest_v = 0;

    (void)state;
    for (uint32_t i = 0; i < 2 * dim; i++) {
        c.k_mean[i] = 100.0f * gaussian(&seed);
        c.v_mean[i] = 100.0f * gaussian(&seed);
    }
    for (uint32_t t = 0; t < KV_PAGE_TOKENS; t++)
        for (uint32_t h = 0; h < 2; h++)
            for (uint32_t f = 0; f < dim / 2; f++) {
                const float *m = c.k_mean + h * dim, *r = c.rope + (size_t)t * dim + 2 * f;
                float *key = c.k + (t * 2 + h) * dim, *value = c.v + (t * 2 + h) * dim;

                key[f] = m[f] * r[0] - m[f + dim / 2] * r[1];
                key[f + dim / 2] = m[f + dim / 2] * r[0] + m[f] * r[1];
                value[f] = c.v_mean[h * dim + f];
                value[f + dim / 2] = c.v_mean[h * dim + f + dim / 2];
            }
    kv_pack_page(c.form, &c.shape, &calibration, c.rope, c.k, c.v, c.page);
    for (uint32_t h = 0; h < 2; h++) {
        kv_unpack_page(c.form, &c.shape, c.page, h, k, v);
        for (uint32_t i = 0; i < KV_PAGE_TOKENS * dim; i++) {
            largest_k = fmax(largest_k, fabs(k[i]));
            largest_v = fmax(largest_v, fabs(v[i]));
        }
    }
    assert_true(largest_k < 1e-3); /* rounding of products of 100s */
    assert_true(largest_v == 0);
    page_case_clear(&c);
}

static void hostile_values_give_finite_pages(void **state)
{
    static const float values[] = {0.0f,  -0.0f, 1e-45f,   -1e-38f,   0x1p-24f, 1e-7f,    65504.0f, -1e6f,
                                   1e30f, 3e38f, INFINITY, -INFINITY, NAN,      -3.4e38f, 1.0f,     5e-8f};

    (void)state;
    for (size_t f = 2; f < N_FORMS; f++) {
        PageCase c = page_case_new(form_at(f), 80, 80, 1);
        float k[KV_PAGE_TOKENS * 80], v[KV_PAGE_TOKENS * 80];

        for (uint32_t t = 0; t < KV_PAGE_TOKENS; t++) /* token t: one hostile value alone, or in company */
            for (uint32_t d = 0; d < 80; d++) {
                c.k[t * 80 + d] = d == 7 ? values[t % 16] : t < 16 ? 0.0f : 0.1f * (float)(d % 5);
                c.v[t * 80 + d] = values[(t + (t < 16 ? 0 : d)) % 16];
            }
        kv_pack_page(c.form, &c.shape, NULL, c.rope, c.k, c.v, c.page);
        kv_unpack_page(c.form, &c.shape, c.page, 0, k, v);
        for (uint32_t i = 0; i < KV_PAGE_TOKENS * 80; i++)
            assert_true(isfinite(k[i]) && isfinite(v[i]));
        for (uint32_t d = 0; d < 80; d++)
            assert_true(k[d] == 0.0f && v[d] == 0.0f); /* token 0 is all zeros */
        page_case_clear(&c);
    }
}

static void packing_twice_gives_the_same_bytes(void **state)
{
    PageCase c = page_case_new(kv_form_leat(5, 5), 128, 128, 2);
    _cleanup_(freep) uint8_t *copy = malloc(c.layout.page_bytes);

    (void)state;
    assert_non_null(copy);
    page_case_fill(&c, SEED);
    kv_pack_page(c.form, &c.shape, NULL, c.rope, c.k, c.v, c.page);
    memcpy(copy, c.page, c.layout.page_bytes);
    memset(c.page, 0xff, c.layout.page_bytes);
    kv_pack_page(c.form, &c.shape, NULL, c.rope, c.k, c.v, c.page);
    assert_memory_equal(copy, c.page, c.layout.page_bytes);
    page_case_clear(&c);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(layout_of_every_form_is_whole_cache_lines_in_order),
        cmocka_unit_test(default_form_of_head_64_takes_2432_bytes),
        cmocka_unit_test(layout_refuses_what_it_does_not_know),
        cmocka_unit_test(forms_are_refused_with_the_culprit),
        cmocka_unit_test(the_tail_says_what_is_seen_coded),
        cmocka_unit_test(pages_hold_what_the_references_code),
        cmocka_unit_test(constants_of_a_form_are_neutral_where_it_does_not_use_them),
        cmocka_unit_test(true_bits_count_scales_sinks_and_tail),
        cmocka_unit_test(hadamard_is_its_own_inverse_and_keeps_lengths),
        cmocka_unit_test(hadamard_of_80_is_a_block_of_64_and_one_of_16),
        cmocka_unit_test(decoding_is_within_the_error_of_the_levels),
        cmocka_unit_test(searched_scale_beats_the_largest_magnitude),
        cmocka_unit_test(centring_removes_the_turned_mean),
        cmocka_unit_test(hostile_values_give_finite_pages),
        cmocka_unit_test(packing_twice_gives_the_same_bytes),
    };

    printf("seed %u\n", SEED);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
