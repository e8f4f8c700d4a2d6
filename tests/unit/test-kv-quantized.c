/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised tensors against the libraries behind Transformers' caches (tests/data/quant-golden.txt, made by make-quant-golden.py).
 *
 * quanto and fp8: codes, scales and decoded values in every bit.  hqq: scales in every bit; zero points within 1e-5 (of their size
 * where that is above 1, and one unit of a 16-bit type); codes equal but within 1e-4 of a rounding tie; decoding in every bit.
 */

#include "quant/kv-fp8.h"
#include "quant/kv-hqq.h"
#include "quant/kv-pack.h"
#include "quant/kv-quanto.h"
#include "tests/lib/oracle.h"
#include "tests/lib/quant-values.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define MAX_VALUES 4096
#define MAX_BYTES  (4 * MAX_VALUES)

typedef struct Golden {
    char text[80]; /* for messages */
    KvBackend backend;
    KvQuantizeOptions options;
    KvTensorShape shape;
    uint64_t n_values;
    float values[MAX_VALUES];
    bool refused;
    uint8_t packed[MAX_BYTES], scales[MAX_BYTES], offsets[MAX_BYTES];
    int64_t n_packed, n_scales, n_offsets;
    uint64_t digest;
} Golden;

/* One line; false for a comment.  Any defect fails the test. */
static bool read_golden(char *line, Golden *ret)
{
    char codec[16], dtype[8], kind[16], *rest[4] = {NULL}, *save = NULL;
    unsigned nbits, group, seed;
    int axis, used;

    if (line[0] == '#')
        return false;
    *ret = (Golden){0};
    if (sscanf(line, "%15s %u %d %u %7s %u %u %u %u %15s %u %n", codec, &nbits, &axis, &group, dtype, &ret->shape.n_rows,
               &ret->shape.n_heads, &ret->shape.n_tokens, &ret->shape.width, kind, &seed, &used) != 11)
        fail_msg("golden line: %.60s", line);
    (void)snprintf(ret->text, sizeof(ret->text), "%.*s", used, line);
    ret->backend = kv_backend_from_string(codec);
    ret->options = (KvQuantizeOptions){(uint8_t)nbits, (int8_t)axis, group, quant_dtype(dtype)};
    assert_int_equal(kv_tensor_size(&ret->shape, &ret->n_values, NULL), 0);
    assert_true(ret->n_values <= MAX_VALUES);
    assert_true(quant_values(kind, seed, &ret->shape, ret->options.dtype, ret->values));
    for (int i = 0; i < 4; i++)
        rest[i] = strtok_r(i ? NULL : line + used, " \n", &save);
    ret->refused = rest[0] && strcmp(rest[0], "refused") == 0;
    if (ret->refused)
        return true;
    ret->n_packed = quant_unhex(rest[0], ret->packed, MAX_BYTES);
    ret->n_scales = quant_unhex(rest[1], ret->scales, MAX_BYTES);
    ret->n_offsets = strcmp(rest[2], "-") == 0 ? 0 : quant_unhex(rest[2], ret->offsets, MAX_BYTES);
    assert_true(ret->n_packed > 0 && ret->n_scales > 0 && ret->n_offsets >= 0);
    ret->digest = strtoull(rest[3], NULL, 16);
    return true;
}

static int encode(const Golden *g, KvQuantized **ret, ErrorDetail *reterr)
{
    switch (g->backend) {
    case KV_BACKEND_QUANTO:
        return kv_quanto_encode(&g->options, &g->shape, g->values, ret, reterr);
    case KV_BACKEND_HQQ:
        return kv_hqq_encode(&g->options, &g->shape, g->values, ret, reterr);
    case KV_BACKEND_FP8:
        return kv_fp8_encode_tensor(g->options.dtype, &g->shape, kv_fp8_scale(KV_FP8_RULE_LIBRARY, g->values, g->n_values), g->values,
                                    ret, NULL, reterr);
    case KV_BACKEND_X_MAX:
    case KV_BACKEND_X_INVALID:
        break;
    }
    fail_msg("%s: unknown codec", g->text);
    return -EINVAL;
}

/* Zeros of either sign, and all NaN, are the same. */
static void expect_same(const Golden *g, const char *what, KvDtype dtype, const void *got, const void *golden, int64_t n_bytes)
{
    for (size_t i = 0; i < (size_t)n_bytes / kv_dtype_bytes(dtype); i++) {
        float a = kv_dtype_load(dtype, got, i), b = kv_dtype_load(dtype, golden, i);

        if (a != b && !(isnan(a) && isnan(b)))
            fail_msg("%s: %s %zu is %.9g, golden %.9g", g->text, what, i, (double)a, (double)b);
    }
}

static void expect_digest(const Golden *g, const KvQuantized *tensor)
{
    static float decoded[MAX_VALUES];

    assert_int_equal(kv_quantized_decode(tensor, decoded, NULL), 0);
    if (quant_digest(decoded, g->n_values) != g->digest)
        fail_msg("%s: decoded values differ", g->text);
}

static void expect_exact(const Golden *g, const KvQuantized *tensor)
{
    assert_int_equal((uint64_t)g->n_packed, tensor->packed_bytes);
    for (uint64_t i = 0; i < tensor->packed_bytes; i++) {
        uint8_t a = tensor->packed[i], b = g->packed[i];
        bool nan = g->backend == KV_BACKEND_FP8 && (a & 0x7f) == 0x7f && (b & 0x7f) == 0x7f; /* of either sign */

        if (a != b && !nan)
            fail_msg("%s: byte %d of the codes is %02x, golden %02x", g->text, (int)i, a, b);
    }
    if (g->backend == KV_BACKEND_FP8) {
        expect_same(g, "scale", KV_DTYPE_F32, &tensor->scale, g->scales, 4);
    } else {
        expect_same(g, "scale", g->options.dtype, tensor->scales, g->scales, g->n_scales);
        expect_same(g, "shift", g->options.dtype, tensor->offsets, g->offsets, g->n_offsets);
    }
    expect_digest(g, tensor);
}

/* The distance between neighbours of the type at @x. */
static float unit_of(KvDtype dtype, float x)
{
    return dtype == KV_DTYPE_F32 ? 0.0f : ldexpf(fabsf(x), dtype == KV_DTYPE_F16 ? -10 : -7) + 0x1p-24f;
}

static void expect_zeros(const Golden *g, const KvQuantized *tensor, double *worst)
{
    KvDtype dtype = g->options.dtype;

    for (uint64_t i = 0; i < tensor->n_groups; i++) {
        float a = kv_dtype_load(dtype, tensor->offsets, i), b = kv_dtype_load(dtype, g->offsets, i);
        double distance = a == b || (isnan(a) && isnan(b)) ? 0 : fabs((double)a - (double)b) / fmax(1, fabs((double)b));

        if (distance > 1e-5 + (double)unit_of(dtype, 1.0f))
            fail_msg("%s: zero point %d is %.9g, golden %.9g", g->text, (int)i, (double)a, (double)b);
        if (dtype == KV_DTYPE_F32)
            *worst = fmax(*worst, distance);
    }
}

/* Codes that differ must stem from a value within 1e-4 of a tie, by the zero point of an exact tensor. */
static uint32_t expect_codes(const Golden *g, const KvQuantized *tensor, const float *scales, const float *zeros)
{
    static uint8_t ours[MAX_VALUES], golden[MAX_VALUES];
    uint32_t n_ties = 0;

    kv_unpack_codes(KV_PACK_HIGH_FIRST, g->options.nbits, tensor->packed, tensor->n_rows, tensor->n_columns, ours);
    kv_unpack_codes(KV_PACK_HIGH_FIRST, g->options.nbits, g->packed, tensor->n_rows, tensor->n_columns, golden);
    for (uint64_t group = 0; group < tensor->n_groups; group++)
        for (uint64_t i = 0; i < tensor->group_size; i++) {
            uint64_t at = kv_quantized_code_index(tensor, group, i);
            double level = (double)g->values[kv_quantized_value_index(tensor, group, i)] / (double)scales[group] + (double)zeros[group];

            if (ours[at] == golden[at])
                continue;
            n_ties++;
            if (abs(ours[at] - golden[at]) > 1 || fabs(fabs(level - floor(level)) - 0.5) > 1e-4)
                fail_msg("%s: code %d of group %d is %u, golden %u at %.7f", g->text, (int)i, (int)group, ours[at], golden[at], level);
        }
    return n_ties;
}

static void expect_hqq(const Golden *g, KvQuantized *tensor, double *worst_zero, uint32_t *n_ties)
{
    static float scales[MAX_VALUES], zeros[MAX_VALUES];
    size_t bytes = kv_dtype_bytes(g->options.dtype) * tensor->n_groups;

    assert_int_equal((uint64_t)g->n_packed, tensor->packed_bytes);
    assert_int_equal((uint64_t)g->n_scales, bytes);
    expect_same(g, "scale", g->options.dtype, tensor->scales, g->scales, g->n_scales);
    expect_zeros(g, tensor, worst_zero);
    for (uint64_t i = 0; i < tensor->n_groups; i++) {
        scales[i] = kv_dtype_load(g->options.dtype, tensor->scales, i);
        zeros[i] = kv_dtype_load(g->options.dtype, tensor->offsets, i);
    }
    *n_ties += expect_codes(g, tensor, scales, zeros);
    /* the library's own blob decodes to what the library decodes */
    memcpy(tensor->packed, g->packed, tensor->packed_bytes);
    memcpy(tensor->scales, g->scales, bytes);
    memcpy(tensor->offsets, g->offsets, bytes);
    expect_digest(g, tensor);
}

static void expect_refused(const Golden *g)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvQuantized *tensor = NULL;
    int r = encode(g, &tensor, &detail);

    if (r != -EINVAL || tensor || !detail.text[0])
        fail_msg("%s: must be refused, not %d '%s'", g->text, r, detail.text);
}

static void expect_golden(const Golden *g, double *worst_zero, uint32_t *n_ties)
{
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r = encode(g, &tensor, &detail);

    if (r)
        fail_msg("%s: %d %s", g->text, r, detail.text);
    if (g->backend == KV_BACKEND_HQQ)
        expect_hqq(g, tensor, worst_zero, n_ties);
    else
        expect_exact(g, tensor);
}

static void quantized_tensors_equal_the_libraries(void **state)
{
    static Golden golden;
    static char line[1 << 16];
    _cleanup_(close_filep) FILE *file = NULL;
    char path[512];
    uint32_t n_tensors = 0, n_refused = 0, n_ties = 0;
    double worst_zero = 0;

    (void)state;
    (void)snprintf(path, sizeof(path), "%s/quant-golden.txt", test_data_folder());
    file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        if (!read_golden(line, &golden))
            continue;
        if (golden.refused) {
            expect_refused(&golden);
            n_refused++;
        } else {
            expect_golden(&golden, &worst_zero, &n_ties);
            n_tensors++;
        }
    }
    print_message("%u tensors, %u refused; hqq: zero points within %.3g, %u codes at ties differ\n", n_tensors, n_refused, worst_zero,
                  n_ties);
    assert_true(n_tensors > 250 && n_refused > 20);
}

static void quantized_tensor_of_impossible_size_is_refused(void **state)
{
    KvTensorShape shape = {UINT32_MAX, UINT32_MAX, UINT32_MAX, 64};
    uint64_t n = 5;

    (void)state;
    assert_int_equal(kv_tensor_size(&shape, &n, NULL), -EOVERFLOW);
    shape = (KvTensorShape){1u << 31, 1u << 31, 1, 1};
    assert_int_equal(kv_tensor_size(&shape, &n, NULL), -EOVERFLOW);
    assert_int_equal(n, 5);
}

static void quantized_bytes_are_codes_and_scales(void **state)
{
    float x[2 * 4 * 64] = {1.0f};
    KvTensorShape shape = {1, 2, 4, 64};
    KvQuantizeOptions options = {4, 0, 64, KV_DTYPE_F16};
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;

    (void)state;
    assert_int_equal(kv_quanto_encode(&options, &shape, x, &tensor, NULL), 0);
    assert_int_equal(kv_quantized_bytes(tensor) * 8, (uint64_t)(4.5 * 512)); /* 4 + 32 / 64 bits a value */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantized_tensors_equal_the_libraries),
        cmocka_unit_test(quantized_tensor_of_impossible_size_is_refused),
        cmocka_unit_test(quantized_bytes_are_codes_and_scales),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
