/* SPDX-License-Identifier: Apache-2.0 */
/* Drives a compatibility cache with numbers that say where they come from. */

#include "tests/lib/compat-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

void rig_init(Rig *rig, const KvCompatLayerSpec *layers, uint32_t n_layers, uint32_t n_rows)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    assert_true(n_layers <= RIG_MAX_LAYERS);
    *rig = (Rig){.n_rows = n_rows};
    if (kv_compat_new(layers, n_layers, &rig->cache, &detail) != 0)
        fail_msg("%s", detail.text);
}

void rig_deinit(Rig *rig)
{
    rig->cache = kv_compat_free(rig->cache);
}

static float *numbers(const Rig *rig, uint32_t first, uint32_t n, float sign)
{
    float *values = calloc((size_t)rig->n_rows * n + 1, sizeof(*values));

    assert_non_null(values);
    for (uint32_t b = 0; b < rig->n_rows; b++)
        for (uint32_t t = 0; t < n; t++)
            values[b * n + t] = sign * (float)(1000 * b + first + t);
    return values;
}

static void keep(Rig *rig, const KvTensor *returned)
{
    rig->n_returned = returned->n_rows * returned->n_heads * returned->n_tokens * returned->width;
    assert_true(rig->n_returned <= N_ELEMENTS(rig->returned));
    kv_tensor_copy(returned, rig->returned);
}

int rig_update(Rig *rig, uint32_t layer, uint32_t n_tokens)
{
    _cleanup_(freep) float *keys = numbers(rig, rig->fed[layer] + 1, n_tokens, 1);
    _cleanup_(freep) float *values = numbers(rig, rig->fed[layer] + 1, n_tokens, -1);
    KvTensor k = {keys, rig->n_rows, 1, n_tokens, 1, n_tokens}, v = k, got_k, got_v;
    uint64_t length = 0, offset, before = 0, after;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r, masked, measured;

    v.values = values;
    masked = kv_compat_mask_sizes(rig->cache, layer, n_tokens, &length, &offset, NULL);
    measured = kv_compat_length(rig->cache, layer, &before, NULL);
    r = kv_compat_update(rig->cache, layer, &k, &v, &got_k, &got_v, &detail);
    if (r != 0) {
        assert_true(detail.text[0]);
        return r;
    }
    rig->fed[layer] += n_tokens;
    assert_int_equal(masked, 0);
    assert_int_equal(measured, 0);
    assert_int_equal(got_k.n_tokens, length);
    assert_int_equal(got_v.n_tokens, length);
    assert_int_equal(kv_compat_length(rig->cache, layer, &after, NULL), 0);
    assert_int_equal(after, before + n_tokens);
    keep(rig, &got_v);
    for (uint32_t i = 0; i < rig->n_returned; i++)
        rig->returned[i] = -rig->returned[i];
    {
        _cleanup_(freep) float *other = calloc(rig->n_returned + 1, sizeof(float));

        assert_non_null(other);
        kv_tensor_copy(&got_k, other);
        for (uint32_t i = 0; i < rig->n_returned; i++)
            assert_true(other[i] == rig->returned[i]);
    }
    return 0;
}

int rig_conv(Rig *rig, uint32_t layer, uint32_t n_columns)
{
    _cleanup_(freep) float *values = numbers(rig, rig->convs[layer] + 1, n_columns, 1);
    KvTensor x = {values, rig->n_rows, 1, n_columns, 1, n_columns}, got;
    int r = kv_compat_update_conv(rig->cache, layer, 0, rig->kernels[layer], &x, &got, NULL);

    if (r != 0)
        return r;
    rig->convs[layer] += n_columns;
    keep(rig, &got);
    return 0;
}

int rig_state(Rig *rig, uint32_t layer, uint32_t n_tokens, uint32_t n_states)
{
    uint32_t first = rig->states[layer] + 1 + (n_tokens - n_states);
    _cleanup_(freep) float *values = numbers(rig, first, n_states, 1);
    KvTensor states = {values, rig->n_rows, 1, n_states, 1, n_states};
    int r = kv_compat_update_recurrent(rig->cache, layer, 0, n_tokens, &states, NULL);

    if (r == 0)
        rig->states[layer] += n_tokens;
    return r;
}

static void print_values(FILE *to, const float *values, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        fprintf(to, "%s%g", i > 0 ? " " : "", (double)(values[i] + 0.0f));
}

static void print_tensor(FILE *to, const KvTensor *tensor)
{
    uint32_t n = tensor->n_rows * tensor->n_heads * tensor->n_tokens * tensor->width;
    float *values = calloc(n + 1, sizeof(*values));

    assert_non_null(values);
    kv_tensor_copy(tensor, values);
    print_values(to, values, n);
    free(values);
}

/* What is printed below lands here; one at a time. */
static char text[1 << 15];

static FILE *open_text(void)
{
    FILE *to;

    memset(text, 0, sizeof(text));
    to = fmemopen(text, sizeof(text) - 1, "w");
    assert_non_null(to);
    return to;
}

const char *rig_returned(Rig *rig)
{
    FILE *to = open_text();

    print_values(to, rig->returned, rig->n_returned);
    fclose(to);
    return text;
}

const char *rig_kept(Rig *rig, uint32_t layer)
{
    FILE *to = open_text();
    KvTensor k, v;

    if (kv_compat_stored(rig->cache, layer, &k, &v, NULL) == 0)
        print_tensor(to, &k);
    fclose(to);
    return text;
}

const char *rig_columns(Rig *rig, uint32_t layer)
{
    FILE *to = open_text();
    KvTensor columns;

    if (kv_compat_conv(rig->cache, layer, 0, &columns, NULL) == 0)
        print_tensor(to, &columns);
    fclose(to);
    return text;
}

const char *rig_recurrent(Rig *rig, uint32_t layer)
{
    FILE *to = open_text();
    KvTensor state;

    if (kv_compat_recurrent(rig->cache, layer, 0, &state, NULL) == 0)
        print_tensor(to, &state);
    fclose(to);
    return text;
}

uint32_t rig_length(const Rig *rig, uint32_t layer)
{
    uint64_t length;

    assert_int_equal(kv_compat_length(rig->cache, layer, &length, NULL), 0);
    return (uint32_t)length;
}

const char *rig_mask(Rig *rig, uint32_t layer, uint32_t n_tokens)
{
    FILE *to = open_text();
    uint64_t length, offset;

    assert_int_equal(kv_compat_mask_sizes(rig->cache, layer, n_tokens, &length, &offset, NULL), 0);
    fprintf(to, "%llu %llu", (unsigned long long)length, (unsigned long long)offset);
    fclose(to);
    return text;
}

char *rig_describe(const Rig *rig)
{
    size_t size;
    char *description = NULL;
    FILE *to = open_memstream(&description, &size);
    int64_t n_rows = -2;

    assert_non_null(to);
    (void)kv_compat_n_rows(rig->cache, &n_rows, NULL);
    fprintf(to, "rows %lld croppable %d initialised %d previous %d\n", (long long)n_rows, kv_compat_is_croppable(rig->cache),
            kv_compat_is_initialised(rig->cache), kv_compat_has_previous_state(rig->cache));
    for (uint32_t i = 0; i < kv_compat_n_layers(rig->cache); i++) {
        uint64_t length = 0, mask = 0, offset = 0;
        KvTensor a, b;

        (void)kv_compat_length(rig->cache, i, &length, NULL);
        (void)kv_compat_mask_sizes(rig->cache, i, 3, &mask, &offset, NULL);
        fprintf(to, "layer %u length %llu mask %llu %llu max %lld\n  ", i, (unsigned long long)length, (unsigned long long)mask,
                (unsigned long long)offset, (long long)kv_compat_max_length(rig->cache, i));
        if (kv_compat_stored(rig->cache, i, &a, &b, NULL) == 0) {
            print_tensor(to, &a);
            print_tensor(to, &b);
        }
        fprintf(to, "\n  ");
        if (kv_compat_conv(rig->cache, i, 0, &a, NULL) == 0)
            print_tensor(to, &a);
        fprintf(to, "\n  ");
        if (kv_compat_recurrent(rig->cache, i, 0, &a, NULL) == 0)
            print_tensor(to, &a);
        fprintf(to, "\n");
    }
    fclose(to);
    return description;
}
