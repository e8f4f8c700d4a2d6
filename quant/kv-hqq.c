/* SPDX-License-Identifier: Apache-2.0 */
/* The `hqq` codec. */

#include "quant/kv-hqq.h"

#include "quant/kv-pack.h"

#include <math.h>

#define SMALL_RANGE   1e-4f
#define LARGEST_SCALE 2e4f
#define SHRINK_FACTOR 0.1f /* 1 / beta */
#define SHRINKS_ABOVE 0.16f /* below 0.1^(1/1.3) = 0.170 shrink() is 0 */

/* ---- one group ------------------------------------------------------------------------------------------------------------------ */

/* u^-0.3 = y with y^10 u^3 = 1: a first guess within 4 % from the exponent, then Newton steps that square the error 5.5
 * times over.  (u y^3)^3 y is that product without large intermediate numbers. */
float kv_hqq_power(float u)
{
    float y = float_from_bits(0x5285a1cau - float_to_bits(u) / 10 * 3);

    for (int i = 0; i < 4; i++) {
        float w = u * y * y * y;

        y = fmaf(y * 0.1f, 1.0f - w * w * w * y, y);
    }
    return y;
}

float kv_hqq_shrink(float u)
{
    float size = fabsf(u), rest;

    if (size < SHRINKS_ABOVE)
        return 0.0f;
    if (!isfinite(u))
        return u;
    rest = size - SHRINK_FACTOR * kv_hqq_power(size);
    return rest > 0.0f ? copysignf(rest, u) : 0.0f;
}

/* NaN passes through, as it does in the library. */
static float clamp(float x, float low, float high)
{
    return x < low ? low : x > high ? high : x;
}

static float level_of(float x, float scale, float zero, float levels)
{
    return clamp(rintf(x * scale + zero), 0.0f, levels);
}

static void start_group(float levels, const float *x, uint32_t n, float *ret_scale, float *ret_zero)
{
    float low = x[0], high = x[0], scale;

    for (uint32_t i = 1; i < n; i++) {
        if (x[i] < low || isnan(x[i]))
            low = x[i];
        if (x[i] > high || isnan(x[i]))
            high = x[i];
    }
    scale = fabsf(high - low) <= SMALL_RANGE ? 1.0f : 1.0f / (high - low) * levels;
    *ret_scale = scale > LARGEST_SCALE ? LARGEST_SCALE : scale;
    *ret_zero = -low * *ret_scale;
}

/* A sum whose rounding errors are summed too: errors of two steps may differ in their last bit only, and this decides when to stop. */
typedef struct Sum {
    float high, low;
} Sum;

static void sum_add(Sum *sum, float x)
{
    float high = sum->high + x, added = high - sum->high;

    sum->low += (sum->high - (high - added)) + (x - added);
    sum->high = high;
}

static void sum_join(Sum *sum, Sum other)
{
    sum_add(sum, other.high);
    sum->low += other.low;
}

/* Moves the zero point once; returns the sum of the errors that the old one had. */
static Sum step_group(float levels, const float *x, uint32_t n, float scale, float *zero)
{
    float zeros[KV_HQQ_LANES] = {0};
    Sum errors[KV_HQQ_LANES] = {{0}};

    for (uint32_t i = 0; i < n; i++) {
        float level = level_of(x[i], scale, *zero, levels), error = x[i] - (level - *zero) / scale;

        zeros[i % KV_HQQ_LANES] += level - (x[i] - kv_hqq_shrink(error)) * scale;
        sum_add(&errors[i % KV_HQQ_LANES], fabsf(error));
    }
    for (uint32_t width = KV_HQQ_LANES / 2; width; width /= 2)
        for (uint32_t i = 0; i < width; i++) {
            zeros[i] += zeros[i + width];
            sum_join(&errors[i], errors[i + width]);
        }
    *zero = zeros[0] / (float)n;
    return errors[0];
}

/* Scales are inverse ones (S) until the end. */
static void encode_span(float levels, const float *x, uint64_t n_groups, uint32_t n, uint8_t *codes, float *scales, float *zeros)
{
    float best = INFINITY;

    for (uint64_t group = 0; group < n_groups; group++)
        start_group(levels, x + group * n, n, &scales[group], &zeros[group]);
    for (int i = 0; i < KV_HQQ_ITERATIONS; i++) {
        Sum sum = {0};
        float mean;

        for (uint64_t group = 0; group < n_groups; group++)
            sum_join(&sum, step_group(levels, x + group * n, n, scales[group], &zeros[group]));
        mean = (sum.high + sum.low) / ((float)n_groups * (float)n);
        if (!(mean < best))
            break;
        best = mean;
    }
    for (uint64_t group = 0; group < n_groups; group++) {
        for (uint64_t i = group * n; i < (group + 1) * n; i++) {
            float level = level_of(x[i], scales[group], zeros[group], levels);

            codes[i] = isnan(level) ? 0 : (uint8_t)level;
        }
        scales[group] = 1.0f / scales[group];
    }
}

void kv_hqq_groups(uint8_t nbits, const float *x, uint64_t n_groups, uint32_t group_size, uint64_t span_groups, uint8_t *ret_codes,
                   float *ret_scales, float *ret_zeros)
{
    float levels = (float)((1u << nbits) - 1);

    for (uint64_t at = 0; at < n_groups; at += span_groups) {
        uint64_t n = MIN(span_groups, n_groups - at);

        encode_span(levels, x + at * group_size, n, group_size, ret_codes + at * group_size, ret_scales + at, ret_zeros + at);
    }
}

/* ---- a tensor ------------------------------------------------------------------------------------------------------------------- */

static int arrange(const KvQuantizeOptions *options, const KvTensorShape *shape, KvQuantized *ret, ErrorDetail *reterr)
{
    uint64_t n_values, g = options->group_size;
    uint32_t blocks = kv_pack_blocks(options->nbits);
    int r;

    r = kv_tensor_size(shape, &n_values, reterr);
    if (r)
        return error_trace(r);
    if (g == 0 || n_values % g)
        return error_detail_set(reterr, -EINVAL, "q_group_size %u of hqq must divide the %llu values of all rows",
                                options->group_size, (unsigned long long)n_values);
    *ret = (KvQuantized){.backend = KV_BACKEND_HQQ, .options = *options, .shape = *shape, .n_values = n_values,
                         .rows_are_groups = options->axis == 1, .n_groups = n_values / g, .group_size = g};
    ret->n_rows = options->axis == 1 ? ret->n_groups : g;
    ret->n_columns = options->axis == 1 ? g : ret->n_groups;
    if (options->nbits == 3 && options->axis == 1)
        return error_detail_set(reterr, -EINVAL, "nbits 3 of hqq needs axis 0: on axis 1 its packing cannot be taken apart");
    if (options->nbits != 3 && ret->n_rows % blocks)
        return error_detail_set(reterr, -EINVAL, "nbits %u of hqq packs %u rows of codes together: the %llu rows that axis %d and "
                                "q_group_size %u make do not come out even", options->nbits, blocks,
                                (unsigned long long)ret->n_rows, options->axis, options->group_size);
    return 0;
}

/* Between the tensor's order and group after group. */
static void collect(const KvQuantized *tensor, const float *x, float *ret_members)
{
    for (uint64_t group = 0; group < tensor->n_groups; group++)
        for (uint64_t i = 0; i < tensor->group_size; i++)
            ret_members[group * tensor->group_size + i] = x[kv_quantized_value_index(tensor, group, i)];
}

static void spread(const KvQuantized *tensor, const uint8_t *member_codes, uint8_t *ret_codes)
{
    for (uint64_t group = 0; group < tensor->n_groups; group++)
        for (uint64_t i = 0; i < tensor->group_size; i++)
            ret_codes[kv_quantized_code_index(tensor, group, i)] = member_codes[group * tensor->group_size + i];
}

int kv_hqq_encode(const KvQuantizeOptions *options, const KvTensorShape *shape, const float *x, KvQuantized **ret,
                  ErrorDetail *reterr)
{
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;
    _cleanup_(freep) float *members = NULL, *scales = NULL, *zeros = NULL;
    _cleanup_(freep) uint8_t *codes = NULL, *member_codes = NULL;
    KvQuantized plan;
    int r;

    r = arrange(options, shape, &plan, reterr);
    if (r)
        return error_trace(r);
    r = kv_quantized_new(&plan, &tensor, reterr);
    if (r)
        return error_trace(r);
    members = calloc(tensor->n_values, sizeof(*members));
    scales = calloc(tensor->n_groups, sizeof(*scales));
    zeros = calloc(tensor->n_groups, sizeof(*zeros));
    member_codes = calloc(tensor->n_values, 1);
    codes = calloc(tensor->n_values, 1);
    if (!members || !scales || !zeros || !member_codes || !codes)
        return error_detail_set(reterr, -ENOMEM, "no memory to quantise %llu values", (unsigned long long)tensor->n_values);
    collect(tensor, x, members);
    kv_hqq_groups(options->nbits, members, tensor->n_groups, options->group_size, tensor->n_groups, member_codes, scales, zeros);
    spread(tensor, member_codes, codes);
    kv_pack_codes(KV_PACK_HIGH_FIRST, options->nbits, codes, tensor->n_rows, tensor->n_columns, tensor->packed);
    for (uint64_t group = 0; group < tensor->n_groups; group++) {
        kv_dtype_store(options->dtype, tensor->scales, group, scales[group]);
        kv_dtype_store(options->dtype, tensor->offsets, group, zeros[group]);
    }
    *ret = TAKE_PTR(tensor);
    return 0;
}

int kv_hqq_decode(const KvQuantized *tensor, float *ret, ErrorDetail *reterr)
{
    KvDtype dtype = tensor->options.dtype;
    _cleanup_(freep) uint8_t *codes = calloc(tensor->n_values, 1);

    if (!codes)
        return error_detail_set(reterr, -ENOMEM, "no memory to decode %llu values", (unsigned long long)tensor->n_values);
    kv_unpack_codes(KV_PACK_HIGH_FIRST, tensor->options.nbits, tensor->packed, tensor->n_rows, tensor->n_columns, codes);
    for (uint64_t group = 0; group < tensor->n_groups; group++) {
        float scale = kv_dtype_load(dtype, tensor->scales, group), zero = kv_dtype_load(dtype, tensor->offsets, group);

        for (uint64_t i = 0; i < tensor->group_size; i++)
            ret[kv_quantized_value_index(tensor, group, i)] =
                kv_hqq_value(dtype, codes[kv_quantized_code_index(tensor, group, i)], scale, zero);
    }
    return 0;
}
