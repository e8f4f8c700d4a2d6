/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What quantising the whole sequence again at every flush does to values (CACHE-SEMANTICS.md 8.1): the last bits of a few values where groups
 * lie within one head's values of one token, so that quantising each token once is the same cache; growing errors on the other axes.
 * Seeds are fixed; values are nearly Gaussian.
 */

#include "cache/kv-compat-quantized.h"
#include "cache/kv-compat.h"
#include "quant/kv-hqq.h"
#include "quant/kv-quanto.h"
#include "tests/lib/quant-values.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

enum { N_FLUSHES = 12, N_PREFILL = 4, N_STEP = 2, N_ROWS = 2, N_HEADS = 8, WIDTH = 16, MAX_TOKENS = N_PREFILL + N_FLUSHES * N_STEP + 1 };

typedef struct Case {
    const char *backend;
    int64_t nbits, axis, group;
    KvDtype dtype;
} Case;

/* Keys of the tokens from @from on, (N_ROWS, N_HEADS, n_tokens, WIDTH): the same for each token however they are cut. */
static void make_keys(KvDtype dtype, uint32_t from, uint32_t n_tokens, float *ret)
{
    for (uint32_t row = 0; row < N_ROWS * N_HEADS; row++)
        for (uint32_t t = 0; t < n_tokens; t++)
            for (uint32_t d = 0; d < WIDTH; d++)
                *ret++ = kv_dtype_round(dtype, quant_normal(17, ((from + t) * N_ROWS * N_HEADS + row) * WIDTH + d));
}

static KvCompat *new_cache(const Case *c)
{
    KvQuantRequest request = {.backend = c->backend, .has_nbits = true, .nbits = c->nbits, .has_axis_key = true, .axis_key = c->axis,
                              .has_axis_value = true, .axis_value = c->axis, .has_q_group_size = true, .q_group_size = c->group,
                              .has_residual_length = true, .residual_length = N_STEP};
    KvCompatLayerSpec spec = {.kind = KV_COMPAT_OTHER, .class = &kv_compat_quantized_class};
    KvQuantOptions options;
    KvCompat *cache;

    assert_int_equal(kv_quant_options(&request, &options, NULL), 0);
    assert_int_equal(kv_compat_quantized_new(&options, c->dtype, KV_FP8_RULE_CAREFUL, &spec.state, NULL), 0);
    assert_int_equal(kv_compat_new(&spec, 1, &cache, NULL), 0);
    return cache;
}

static void feed(KvCompat *cache, KvDtype dtype, uint32_t from, uint32_t n_tokens, KvTensor *ret_k)
{
    static float keys[N_ROWS * N_HEADS * MAX_TOKENS * WIDTH];
    KvTensor k = {keys, N_ROWS, N_HEADS, n_tokens, WIDTH, n_tokens}, v;

    make_keys(dtype, from, n_tokens, keys);
    assert_int_equal(kv_compat_update(cache, 0, &k, &k, ret_k, &v, NULL), 0);
}

/* The first tokens after @n_flushes, as the update after them returns them: mean distance from the originals. */
static double run(const Case *c, uint32_t n_flushes, KvTensor *ret_k, KvCompat **ret_cache)
{
    KvCompat *cache = new_cache(c);
    uint32_t length = N_PREFILL;
    double sum = 0;

    feed(cache, c->dtype, 0, N_PREFILL, ret_k);
    for (uint32_t i = 0; i < n_flushes; i++, length += N_STEP)
        feed(cache, c->dtype, length, N_STEP, ret_k);
    feed(cache, c->dtype, length, 1, ret_k);
    for (uint32_t row = 0; row < N_ROWS * N_HEADS; row++)
        for (uint32_t i = 0; i < N_PREFILL * WIDTH; i++) {
            float x = kv_dtype_round(c->dtype, quant_normal(17, (i / WIDTH * N_ROWS * N_HEADS + row) * WIDTH + i % WIDTH));

            sum += fabs((double)x - (double)kv_tensor_at(ret_k, row / N_HEADS, row % N_HEADS, 0)[i]);
        }
    *ret_cache = cache;
    return sum / (N_ROWS * N_HEADS * N_PREFILL * WIDTH);
}

/* Each token quantised once, when it comes out of the residual: (N_ROWS, N_HEADS, n, WIDTH) values of the chunk from @from on. */
static void quantise_once(const Case *c, uint32_t from, uint32_t n, float *ret)
{
    static float keys[N_ROWS * N_HEADS * MAX_TOKENS * WIDTH];
    KvQuantizeOptions options = {(uint8_t)c->nbits, (int8_t)c->axis, (uint32_t)c->group, c->dtype};
    KvTensorShape shape = {N_ROWS, N_HEADS, n, WIDTH};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;

    make_keys(c->dtype, from, n, keys);
    if (strcmp(c->backend, "quanto") == 0)
        assert_int_equal(kv_quanto_encode(&options, &shape, keys, &tensor, NULL), 0);
    else
        assert_int_equal(kv_hqq_encode(&options, &shape, keys, &tensor, NULL), 0);
    assert_int_equal(kv_quantized_decode(tensor, ret, NULL), 0);
}

typedef struct Difference {
    double largest;  /* absolute; where the type has 16 bits in its units at the value, or at 1 */
    double share;    /* of values that differ */
} Difference;

static Difference compare_with_once(const Case *c)
{
    static float once[N_ROWS * N_HEADS * MAX_TOKENS * WIDTH];
    double n = 0, n_differ = 0, unit = c->dtype == KV_DTYPE_F16 ? 0x1p-10 : 0x1p-7;
    Difference d = {0};
    KvCompat *cache;
    KvTensor k;

    (void)run(c, N_FLUSHES, &k, &cache);
    for (uint32_t from = 0; from < MAX_TOKENS - 1; from += from ? N_STEP : N_PREFILL) {
        uint32_t n_tokens = from ? N_STEP : N_PREFILL;

        quantise_once(c, from, n_tokens, once);
        for (uint32_t row = 0; row < N_ROWS * N_HEADS; row++)
            for (uint32_t i = 0; i < n_tokens * WIDTH; i++, n++) {
                float a = kv_tensor_at(&k, row / N_HEADS, row % N_HEADS, from)[i], b = once[row * n_tokens * WIDTH + i];
                double distance = fabs((double)a - (double)b);

                if (c->dtype != KV_DTYPE_F32)
                    distance /= unit * exp2(floor(log2(fmax(fabs((double)b), 1))));
                d.largest = fmax(d.largest, distance);
                n_differ += a != b;
            }
    }
    kv_compat_free(cache);
    d.share = n_differ / n;
    print_message("%s %d bits axis %d, type %d: %.2g %% differ, by %.3g at most\n", c->backend, (int)c->nbits, (int)c->axis, c->dtype,
                  100 * d.share, d.largest);
    return d;
}

static void quanto_axis_0_quantised_again_is_quantised_once(void **state)
{
    static const Case cases[] = {
        {"quanto", 4, 0, 16, KV_DTYPE_F32}, {"quanto", 2, 0, 16, KV_DTYPE_F32}, {"quanto", 4, 0, 16, KV_DTYPE_BF16},
        {"quanto", 4, 0, 8, KV_DTYPE_F16},
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        Difference d = compare_with_once(&cases[i]);

        assert_true(d.share < 0.02 && d.largest <= (cases[i].dtype == KV_DTYPE_F32 ? 1.2e-6 : 8)); /* twelve flushes */
    }
}

static void quantising_again_lets_errors_grow_on_axes_that_mix_tokens(void **state)
{
    static const Case hqq = {"hqq", 4, 0, 64, KV_DTYPE_F32}, quanto = {"quanto", 4, -1, 16, KV_DTYPE_F32},
                      still = {"quanto", 4, 0, 16, KV_DTYPE_F32};
    static const struct {
        const Case *c;
        double least, most; /* error after all flushes over that after the first */
    } rows[] = {{&hqq, 1.8, 6}, {&quanto, 1.3, 6}, {&still, 1, 1}};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        KvCompat *cache;
        KvTensor k;
        double first = run(rows[i].c, 0, &k, &cache), last;

        kv_compat_free(cache);
        last = run(rows[i].c, N_FLUSHES, &k, &cache);
        kv_compat_free(cache);
        print_message("%s axis %d: mean error %.4f at first, %.4f after %d flushes\n", rows[i].c->backend, (int)rows[i].c->axis, first,
                      last, N_FLUSHES);
        assert_true(last >= rows[i].least * first && last <= rows[i].most * first);
    }
}

static void hqq_axis_1_quantised_again_stays_near_quantised_once(void **state)
{
    static const Case cases[] = {{"hqq", 4, 1, 16, KV_DTYPE_F32}, {"hqq", 8, 1, 16, KV_DTYPE_F32}, {"hqq", 4, 1, 16, KV_DTYPE_F16},
                                 {"hqq", 4, 1, 16, KV_DTYPE_BF16}};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        Difference d = compare_with_once(&cases[i]);

        /* the zero point is a rounded mean: it moves by a last bit or two at each of the twelve flushes */
        assert_true(d.largest <= (cases[i].dtype == KV_DTYPE_F32 ? 3e-6 : 4));
        assert_true(cases[i].dtype == KV_DTYPE_F32 || d.share < 0.15);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quanto_axis_0_quantised_again_is_quantised_once),
        cmocka_unit_test(hqq_axis_1_quantised_again_stays_near_quantised_once),
        cmocka_unit_test(quantising_again_lets_errors_grow_on_axes_that_mix_tokens),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
