/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The quantised layer of compatibility caches: the schedule of CACHE-SEMANTICS.md 8.1, what Transformers' layers returned
 * (tests/data/quantized-layer-golden.txt; quanto and fp8 in every bit, hqq within 1e-5 and two units of a 16-bit type), and what goes
 * beyond it.
 */

#include "cache/kv-compat-quantized.h"
#include "cache/kv-compat.h"
#include "tests/lib/oracle.h"
#include "tests/lib/quant-values.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#define MAX_VALUES 16384

/* A cache of one quantised layer. */
typedef struct Rig {
    KvCompat *cache;
    void *layer; /* of the cache */
    KvDtype dtype;
    uint32_t n_rows, n_heads, width;
    KvTensor k, v; /* of the last update */
} Rig;

static Rig rig_new(const KvQuantRequest *request, KvDtype dtype, KvFp8Rule rule, uint32_t n_rows, uint32_t n_heads, uint32_t width)
{
    Rig rig = {.dtype = dtype, .n_rows = n_rows, .n_heads = n_heads, .width = width};
    KvCompatLayerSpec spec = {.kind = KV_COMPAT_OTHER, .class = &kv_compat_quantized_class};
    KvQuantOptions options;

    assert_int_equal(kv_quant_options(request, &options, NULL), 0);
    assert_int_equal(kv_compat_quantized_new(&options, dtype, rule, &rig.layer, NULL), 0);
    spec.state = rig.layer;
    assert_int_equal(kv_compat_new(&spec, 1, &rig.cache, NULL), 0);
    return rig;
}

static KvQuantRequest request_of(const char *backend, int64_t nbits, int64_t axis, int64_t group, int64_t residual)
{
    return (KvQuantRequest){.backend = backend, .has_nbits = true, .nbits = nbits, .has_axis_key = true, .axis_key = axis,
                            .has_axis_value = true, .axis_value = axis, .has_q_group_size = true, .q_group_size = group,
                            .has_residual_length = true, .residual_length = residual};
}

/* Feeds made-up tokens: keys of @seed, values of the one after. */
static int rig_update(Rig *rig, uint32_t n_tokens, uint32_t seed, const char *k_kind, ErrorDetail *reterr)
{
    static float k[MAX_VALUES], v[MAX_VALUES];
    KvTensorShape shape = {rig->n_rows, rig->n_heads, n_tokens, rig->width};
    KvTensor k_new = {k, rig->n_rows, rig->n_heads, n_tokens, rig->width, n_tokens}, v_new = k_new;

    assert_true((size_t)rig->n_rows * rig->n_heads * n_tokens * rig->width <= MAX_VALUES);
    assert_true(quant_values(k_kind, seed, &shape, rig->dtype, k));
    assert_true(quant_values("normal", seed + 1, &shape, rig->dtype, v));
    v_new.values = v;
    return kv_compat_update(rig->cache, 0, &k_new, &v_new, &rig->k, &rig->v, reterr);
}

static void feed(Rig *rig, uint32_t n_tokens, uint32_t seed)
{
    assert_int_equal(rig_update(rig, n_tokens, seed, "normal", NULL), 0);
}

static uint64_t rig_length(const Rig *rig)
{
    uint64_t length;

    assert_int_equal(kv_compat_length(rig->cache, 0, &length, NULL), 0);
    return length;
}

static float *dense(const KvTensor *x)
{
    float *copy = calloc((size_t)x->n_rows * x->n_heads * x->n_tokens, x->width * sizeof(*copy));

    assert_non_null(copy);
    kv_tensor_copy(x, copy);
    return copy;
}

/* ---- schedule ------------------------------------------------------------------------------------------------------------------- */

typedef struct Schedule {
    int64_t residual_length;
    uint32_t prefill, chunks[10]; /* ends with 0 */
    uint32_t residual[10];        /* after each chunk; 0: all was quantised anew */
} Schedule;

static const Schedule schedules[] = {
    {0, 10, {1, 1, 1}, {0, 0, 0}},
    {1, 10, {1, 1, 1}, {0, 0, 0}},
    {2, 10, {1, 1, 1, 1}, {1, 0, 1, 0}},
    {3, 10, {1, 1, 1, 1, 1, 1}, {1, 2, 0, 1, 2, 0}},
    {4, 10, {1, 1, 1, 1, 1, 1, 1, 1}, {1, 2, 3, 0, 1, 2, 3, 0}},
    {4, 10, {1, 5, 1}, {1, 0, 1}},
    {4, 10, {2, 2, 1}, {2, 0, 1}},
    {4, 10, {3, 1, 1}, {3, 0, 1}},
    {4, 10, {1, 2, 1, 3, 1}, {1, 3, 0, 3, 0}},
    {128, 10, {400, 1}, {0, 1}},
    {128, 1, {127, 1}, {127, 0}},
};

static void quantized_layer_flushes_by_residual_and_new_tokens(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(schedules); i++) {
        const Schedule *s = &schedules[i];
        KvQuantRequest request = request_of("quanto", 4, 0, 16, s->residual_length);
        Rig rig = rig_new(&request, KV_DTYPE_F32, KV_FP8_RULE_CAREFUL, 1, 2, 16);
        uint64_t length = s->prefill, mask, offset;

        feed(&rig, s->prefill, 1);
        assert_int_equal(kv_compat_quantized_residual(rig.layer), 0);
        for (uint32_t c = 0; s->chunks[c]; c++) {
            assert_int_equal(kv_compat_mask_sizes(rig.cache, 0, s->chunks[c], &mask, &offset, NULL), 0);
            feed(&rig, s->chunks[c], 10 * c);
            length += s->chunks[c];
            assert_int_equal(rig.k.n_tokens, length);
            assert_int_equal(mask, length);
            assert_int_equal(offset, 0);
            assert_int_equal(rig_length(&rig), length);
            assert_int_equal(kv_compat_quantized_residual(rig.layer), s->residual[c]);
        }
        kv_compat_free(rig.cache);
    }
}

static void quantized_layer_returns_the_originals_at_first_and_has_no_bound(void **state)
{
    KvQuantRequest request = request_of("quanto", 2, 0, 16, 4);
    Rig rig = rig_new(&request, KV_DTYPE_F16, KV_FP8_RULE_CAREFUL, 2, 2, 16);
    KvTensorShape shape = {2, 2, 3, 16};
    float x[192];

    (void)state;
    assert_int_equal(rig_length(&rig), 0);
    feed(&rig, 3, 5);
    assert_true(quant_values("normal", 5, &shape, KV_DTYPE_F16, x));
    assert_memory_equal(rig.k.values, x, sizeof(x));
    assert_int_equal(kv_compat_max_length(rig.cache, 0), -1);
    kv_compat_free(rig.cache);
}

/* ---- the library's layers ------------------------------------------------------------------------------------------------------- */

typedef struct Replay {
    Rig rig;
    char text[96];
    bool exact;
    uint32_t n_updates, n_layers;
    double worst;
} Replay;

static void replay_layer(Replay *replay, const char *line)
{
    char codec[16], dtype[8];
    int nbits, axis_key, axis_value, group, residual;
    unsigned rows, heads, width;
    KvQuantRequest request;

    if (sscanf(line, "layer %15s %d %d %d %d %d %7s %u %u %u", codec, &nbits, &axis_key, &axis_value, &group, &residual, dtype, &rows,
               &heads, &width) != 10)
        fail_msg("golden line: %s", line);
    request = request_of(codec, nbits, axis_key, group, residual);
    request.axis_value = axis_value;
    if (strcmp(codec, "fp8") == 0)
        request = (KvQuantRequest){.backend = "fp8"};
    kv_compat_free(replay->rig.cache);
    replay->rig = rig_new(&request, quant_dtype(dtype), KV_FP8_RULE_LIBRARY, rows, heads, width);
    replay->exact = strcmp(codec, "hqq") != 0;
    replay->n_layers++;
    (void)snprintf(replay->text, sizeof(replay->text), "%.*s", (int)strcspn(line, "\n"), line);
}

static void expect_samples(Replay *replay, char **save, uint32_t seed, const KvTensor *x)
{
    uint32_t n = x->n_rows * x->n_heads * x->n_tokens * x->width;
    double unit = replay->rig.dtype == KV_DTYPE_F16 ? 0x1p-10 : replay->rig.dtype == KV_DTYPE_BF16 ? 0x1p-7 : 0;

    for (uint32_t i = 0; i < 6; i++) {
        const char *word = strtok_r(NULL, " \n", save);
        double golden, got = (double)x->values[quant_hash(seed, i) % n];

        assert_non_null(word);
        golden = strtod(word, NULL);
        replay->worst = fmax(replay->worst, unit == 0 ? fabs(got - golden) : 0);
        if (fabs(got - golden) > 1e-5 + 2 * unit * fabs(golden))
            fail_msg("%s: sample %u of %u tokens is %.9g, golden %.9g", replay->text, i, x->n_tokens, got, golden);
    }
}

static void replay_update(Replay *replay, char *line)
{
    unsigned n_tokens, seed, length, residual;
    unsigned long long digest_k, digest_v;
    Rig *rig = &replay->rig;
    char *save = NULL;
    int used;

    if (sscanf(line, "update %u %u %u %u %llx %llx %n", &n_tokens, &seed, &length, &residual, &digest_k, &digest_v, &used) != 6)
        fail_msg("golden line: %s", line);
    assert_int_equal(rig_update(rig, n_tokens, seed, "outliers", NULL), 0);
    assert_int_equal(rig_length(rig), length);
    assert_int_equal(rig->k.n_tokens, length);
    assert_int_equal(kv_compat_quantized_residual(rig->layer), residual);
    line[used - 1] = ' ';
    save = line + used;
    if (replay->exact) {
        uint64_t n = (uint64_t)rig->k.n_rows * rig->k.n_heads * length * rig->k.width;

        if (quant_digest(rig->k.values, n) != digest_k || quant_digest(rig->v.values, n) != digest_v)
            fail_msg("%s: returned values differ at length %u", replay->text, length);
    }
    expect_samples(replay, &save, seed, &rig->k);
    expect_samples(replay, &save, seed, &rig->v);
    replay->n_updates++;
}

static void replay_reorder(Replay *replay, char *line)
{
    uint32_t rows[8], n = 0;
    char *save = NULL;

    (void)strtok_r(line, " \n", &save);
    for (char *word; n < 8 && (word = strtok_r(NULL, " \n", &save)); n++)
        rows[n] = (uint32_t)strtoul(word, NULL, 10);
    assert_int_equal(kv_compat_reorder(replay->rig.cache, rows, n, NULL), 0);
}

static void quantized_layers_return_what_transformers_returns(void **state)
{
    static char line[4096];
    _cleanup_(close_filep) FILE *file = NULL;
    Replay replay = {0};
    char path[512];

    (void)state;
    (void)snprintf(path, sizeof(path), "%s/quantized-layer-golden.txt", test_data_folder());
    file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        if (strncmp(line, "layer ", 6) == 0)
            replay_layer(&replay, line);
        else if (strncmp(line, "update ", 7) == 0)
            replay_update(&replay, line);
        else if (strncmp(line, "reorder ", 8) == 0)
            replay_reorder(&replay, line);
    }
    print_message("%u layers, %u updates; hqq in float within %.3g\n", replay.n_layers, replay.n_updates, replay.worst);
    assert_true(replay.n_layers > 20 && replay.n_updates > 120);
    kv_compat_free(replay.rig.cache);
}

/* ---- rows ----------------------------------------------------------------------------------------------------------------------- */

/* Head rows of @got must be those of @was, from the tokens that both have. */
static void expect_rows(const KvTensor *got, const float *was, const KvTensor *was_shape, const uint32_t *rows, uint32_t n_tokens)
{
    for (uint32_t r = 0; r < got->n_rows; r++)
        for (uint32_t h = 0; h < got->n_heads; h++)
            assert_memory_equal(kv_tensor_at(got, r, h, 0),
                                was + (size_t)(rows[r] * got->n_heads + h) * was_shape->n_tokens * got->width,
                                (size_t)n_tokens * got->width * sizeof(float));
}

static const struct {
    const char *backend;
    int64_t nbits, axis, group;
    KvDtype dtype;
} every[] = {
    {"quanto", 4, 0, 16, KV_DTYPE_F32}, {"quanto", 2, -1, 4, KV_DTYPE_F16}, {"hqq", 4, 1, 16, KV_DTYPE_BF16},
    {"hqq", 8, 0, 8, KV_DTYPE_F32},     {"hqq", 3, 0, 16, KV_DTYPE_F32},    {"hqq", 1, 1, 8, KV_DTYPE_F32},
    {"fp8", 0, 0, 0, KV_DTYPE_F16},
};

static Rig rig_of(size_t i, int64_t residual, uint32_t n_rows)
{
    KvQuantRequest request = request_of(every[i].backend, every[i].nbits, every[i].axis, every[i].group, residual);

    if (strcmp(every[i].backend, "fp8") == 0)
        request = (KvQuantRequest){.backend = "fp8"};
    return rig_new(&request, every[i].dtype, KV_FP8_RULE_CAREFUL, n_rows, 2, 16);
}

static void quantized_rows_are_reordered_repeated_and_selected_exactly(void **state)
{
    static const uint32_t order[4] = {3, 0, 0, 2}, repeated[8] = {3, 3, 0, 0, 0, 0, 2, 2}, chosen[4] = {7, 1, 4, 2};
    uint32_t composed[4];

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(every); i++) {
        Rig rig = rig_of(i, 100, 4);
        _cleanup_(freep) float *k = NULL;
        KvTensor shape;

        feed(&rig, 8, 1);
        feed(&rig, 1, 3);
        feed(&rig, 1, 5);
        shape = rig.k;
        k = dense(&rig.k);
        assert_int_equal(kv_compat_reorder(rig.cache, order, 4, NULL), 0);
        assert_int_equal(kv_compat_repeat(rig.cache, 2, NULL), 0);
        rig.n_rows = 8;
        feed(&rig, 1, 7);
        expect_rows(&rig.k, k, &shape, repeated, 10);
        assert_int_equal(kv_compat_select(rig.cache, chosen, 4, NULL), 0);
        rig.n_rows = 4;
        feed(&rig, 1, 9);
        for (uint32_t r = 0; r < 4; r++)
            composed[r] = repeated[chosen[r]];
        expect_rows(&rig.k, k, &shape, composed, 10);
        kv_compat_free(rig.cache);
    }
}

static void quantized_copies_go_their_own_ways(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(every); i++) {
        Rig rig = rig_of(i, 4, 4), twin = rig_of(i, 4, 4), copy;
        _cleanup_(freep) float *k = NULL;

        feed(&rig, 4, 1);
        feed(&rig, 1, 3);
        feed(&twin, 4, 1);
        feed(&twin, 1, 3);
        copy = rig;
        assert_int_equal(kv_compat_copy(rig.cache, &copy.cache, NULL), 0);
        feed(&copy, 5, 9); /* quantises anew */
        feed(&rig, 1, 5);
        feed(&twin, 1, 5);
        feed(&copy, 1, 11);
        feed(&rig, 3, 7);
        feed(&twin, 3, 7);
        k = dense(&twin.k);
        expect_rows(&rig.k, k, &twin.k, (const uint32_t[]){0, 1, 2, 3}, 9);
        assert_int_equal(rig_length(&copy), 11);
        kv_compat_free(copy.cache);
        kv_compat_free(twin.cache);
        kv_compat_free(rig.cache);
    }
}

/* ---- crop ----------------------------------------------------------------------------------------------------------------------- */

static void quantized_crop_keeps_the_values_of_what_stays(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(every); i++) {
        Rig rig = rig_of(i, 100, 4);
        static const uint32_t same[4] = {0, 1, 2, 3};
        _cleanup_(freep) float *k = NULL, *v = NULL;
        KvTensor shape;

        feed(&rig, 8, 1);
        feed(&rig, 2, 3);
        shape = rig.k;
        k = dense(&rig.k);
        v = dense(&rig.v);
        assert_int_equal(kv_compat_crop(rig.cache, 0, NULL), 0);
        assert_int_equal(rig_length(&rig), 10);
        assert_int_equal(kv_compat_crop(rig.cache, -1, NULL), 0); /* within the residual */
        assert_int_equal(rig_length(&rig), 9);
        feed(&rig, 1, 5);
        expect_rows(&rig.k, k, &shape, same, 9);
        assert_int_equal(kv_compat_crop(rig.cache, -5, NULL), 0); /* into what is quantised */
        assert_int_equal(rig_length(&rig), 5);
        feed(&rig, 3, 7);
        assert_int_equal(rig.k.n_tokens, 8);
        expect_rows(&rig.k, k, &shape, same, 5);
        expect_rows(&rig.v, v, &shape, same, 5);
        assert_int_equal(kv_compat_crop(rig.cache, 1, NULL), KV_COMPAT_E_VALUE);
        assert_int_equal(rig_length(&rig), 8);
        kv_compat_free(rig.cache);
    }
}

/* What a crop left is what the next quantising sees. */
static void quantized_crop_then_flush_equals_quantising_what_stayed(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(every); i++) {
        Rig rig = rig_of(i, 4, 4);
        static const uint32_t same[4] = {0, 1, 2, 3};
        _cleanup_(freep) float *kept = NULL;
        KvTensor shape;

        feed(&rig, 8, 1);
        assert_int_equal(kv_compat_crop(rig.cache, -4, NULL), 0);
        feed(&rig, 4, 3); /* flushes */
        shape = rig.k;
        kept = dense(&rig.k);
        assert_int_equal(kv_compat_quantized_residual(rig.layer), 0);
        feed(&rig, 1, 5);
        assert_int_equal(rig.k.n_tokens, 9);
        if (strcmp(every[i].backend, "fp8") == 0) /* codes are never made again */
            expect_rows(&rig.k, kept, &shape, same, 8);
        kv_compat_free(rig.cache);
    }
}

static void quantized_layer_cropped_to_nothing_is_as_new(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(every); i++) {
        Rig rig = rig_of(i, 100, 4);
        static const uint32_t same[4] = {0, 1, 2, 3};
        KvTensorShape shape = {4, 2, 4, 16};
        float x[512];

        feed(&rig, 8, 1);
        feed(&rig, 1, 3);
        assert_int_equal(kv_compat_crop(rig.cache, i % 2 ? -9 : -100, NULL), 0);
        assert_int_equal(rig_length(&rig), 0);
        feed(&rig, 4, 21);
        assert_true(quant_values("normal", 21, &shape, rig.dtype, x));
        expect_rows(&rig.k, x, &(KvTensor){.n_tokens = 4}, same, 4);
        kv_compat_reset(rig.cache);
        assert_int_equal(rig_length(&rig), 0);
        feed(&rig, 4, 21);
        expect_rows(&rig.k, x, &(KvTensor){.n_tokens = 4}, same, 4);
        kv_compat_free(rig.cache);
    }
}

/* ---- what fails ----------------------------------------------------------------------------------------------------------------- */

static void quantized_update_that_cannot_be_packed_changes_nothing(void **state)
{
    KvQuantRequest request = request_of("hqq", 4, 1, 16, 2);
    Rig rig = rig_new(&request, KV_DTYPE_F32, KV_FP8_RULE_CAREFUL, 1, 1, 16);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    _cleanup_(freep) float *k = NULL;
    KvTensor shape;

    (void)state;
    assert_int_equal(rig_update(&rig, 3, 1, "normal", &detail), KV_COMPAT_E_VALUE);
    assert_non_null(strstr(detail.text, "nbits 4"));
    assert_int_equal(rig_length(&rig), 0);
    feed(&rig, 4, 1);
    feed(&rig, 1, 3);
    shape = rig.k;
    k = dense(&rig.k);
    assert_int_equal(rig_update(&rig, 2, 5, "normal", NULL), KV_COMPAT_E_VALUE); /* 7 rows of codes */
    assert_int_equal(rig_length(&rig), 5);
    assert_int_equal(kv_compat_quantized_residual(rig.layer), 1);
    feed(&rig, 1, 7);
    assert_int_equal(rig_length(&rig), 6);
    expect_rows(&rig.k, k, &shape, (const uint32_t[]){0}, 5);
    kv_compat_free(rig.cache);
}

static void quantized_group_that_does_not_divide_is_named(void **state)
{
    KvQuantRequest request = request_of("quanto", 4, 0, 64, 4);
    Rig rig = rig_new(&request, KV_DTYPE_F32, KV_FP8_RULE_CAREFUL, 1, 2, 16);
    ErrorDetail detail = ERROR_DETAIL_NULL;

    (void)state;
    assert_int_equal(rig_update(&rig, 3, 1, "normal", &detail), KV_COMPAT_E_VALUE);
    assert_non_null(strstr(detail.text, "q_group_size 64"));
    assert_int_equal(rig_length(&rig), 0);
    kv_compat_free(rig.cache);
}

static void fp8_zeros_first_lose_nothing_by_our_rule_and_everything_by_the_librarys(void **state)
{
    (void)state;
    for (int rule = KV_FP8_RULE_CAREFUL; rule <= KV_FP8_RULE_LIBRARY; rule++) {
        Rig rig = rig_new(&(KvQuantRequest){.backend = "fp8"}, KV_DTYPE_F32, (KvFp8Rule)rule, 1, 1, 16);
        float last;

        assert_int_equal(rig_update(&rig, 2, 1, "zero", NULL), 0);
        assert_int_equal(rig_update(&rig, 1, 3, "offset", NULL), 0);
        last = *kv_tensor_at(&rig.k, 0, 0, 2);
        if (rule == KV_FP8_RULE_CAREFUL)
            assert_true(fabsf(last - 50.0f) < 4.0f);
        else
            assert_true(last < 5.3e-36f);
        assert_true((kv_compat_quantized_saturated(rig.layer) >= 16) == (rule == KV_FP8_RULE_LIBRARY)); /* all keys */
        kv_compat_free(rig.cache);
    }
}

static void fp8_values_above_the_first_maximum_are_counted(void **state)
{
    Rig rig = rig_new(&(KvQuantRequest){.backend = "fp8"}, KV_DTYPE_F32, KV_FP8_RULE_CAREFUL, 1, 1, 16);

    (void)state;
    assert_int_equal(rig_update(&rig, 2, 1, "small", NULL), 0);
    assert_int_equal(kv_compat_quantized_saturated(rig.layer), 0);
    assert_int_equal(rig_update(&rig, 1, 3, "offset", NULL), 0);
    assert_true(kv_compat_quantized_saturated(rig.layer) >= 16);
    kv_compat_reset(rig.cache);
    assert_int_equal(kv_compat_quantized_saturated(rig.layer), 0);
    kv_compat_free(rig.cache);
}

static void quantized_bytes_shrink_with_the_tokens_where_groups_allow(void **state)
{
    KvQuantRequest request = request_of("quanto", 4, 0, 16, 8);
    Rig rig = rig_new(&request, KV_DTYPE_F16, KV_FP8_RULE_CAREFUL, 1, 2, 16);
    uint64_t a_token = 2 * 2 * (8 + 4); /* K and V, heads, nibbles and scale with shift */

    (void)state;
    feed(&rig, 10, 1);
    assert_int_equal(kv_compat_bytes(rig.cache), 10 * a_token);
    assert_int_equal(kv_compat_crop(rig.cache, -4, NULL), 0);
    assert_int_equal(kv_compat_bytes(rig.cache), 6 * a_token);
    feed(&rig, 1, 3);
    assert_true(kv_compat_bytes(rig.cache) > 6 * a_token);
    kv_compat_free(rig.cache);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantized_layer_flushes_by_residual_and_new_tokens),
        cmocka_unit_test(quantized_layer_returns_the_originals_at_first_and_has_no_bound),
        cmocka_unit_test(quantized_layers_return_what_transformers_returns),
        cmocka_unit_test(quantized_rows_are_reordered_repeated_and_selected_exactly),
        cmocka_unit_test(quantized_copies_go_their_own_ways),
        cmocka_unit_test(quantized_crop_keeps_the_values_of_what_stays),
        cmocka_unit_test(quantized_crop_then_flush_equals_quantising_what_stayed),
        cmocka_unit_test(quantized_layer_cropped_to_nothing_is_as_new),
        cmocka_unit_test(quantized_update_that_cannot_be_packed_changes_nothing),
        cmocka_unit_test(quantized_group_that_does_not_divide_is_named),
        cmocka_unit_test(fp8_zeros_first_lose_nothing_by_our_rule_and_everything_by_the_librarys),
        cmocka_unit_test(fp8_values_above_the_first_maximum_are_counted),
        cmocka_unit_test(quantized_bytes_shrink_with_the_tokens_where_groups_allow),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
