/* SPDX-License-Identifier: Apache-2.0 */
/* The `quanto` codec. */

#include "quant/kv-quanto.h"

#include "quant/kv-pack.h"

#include <math.h>

/* ---- one group ------------------------------------------------------------------------------------------------------------------ */

static uint8_t code_of(KvDtype dtype, float levels, float x, float scale, float shift)
{
    float code = rintf(kv_dtype_round(dtype, kv_dtype_round(dtype, x + shift) / scale));

    if (isnan(code))
        return 0;
    return (uint8_t)(code < 0.0f ? 0.0f : code > levels ? levels : code);
}

void kv_quanto_group(KvDtype dtype, uint8_t nbits, const float *x, uint32_t n, uint8_t *ret_codes, float *ret_scale, float *ret_shift)
{
    float levels = (float)((1u << nbits) - 1), low = x[0], high = x[0], scale, shift;

    for (uint32_t i = 1; i < n; i++) {
        /* a NaN, once met, stays: it compares false with everything */
        if (x[i] < low || isnan(x[i]))
            low = x[i];
        if (x[i] > high || isnan(x[i]))
            high = x[i];
    }
    scale = kv_dtype_round(dtype, kv_dtype_round(dtype, high - low) / levels);
    shift = -low;
    for (uint32_t i = 0; i < n; i++)
        ret_codes[i] = code_of(dtype, levels, x[i], scale, shift);
    *ret_scale = scale;
    *ret_shift = shift;
}

/* ---- a tensor ------------------------------------------------------------------------------------------------------------------- */

/* Matrix and groups of the tensor; axis and bits have been checked by the options. */
static int arrange(const KvQuantizeOptions *options, const KvTensorShape *shape, KvQuantized *ret, ErrorDetail *reterr)
{
    uint64_t n_values, of_axis, g = options->group_size;
    int r;

    r = kv_tensor_size(shape, &n_values, reterr);
    if (r)
        return error_trace(r);
    /* axis 0 counts the values of one batch row, as the library does */
    of_axis = options->axis == 0 ? n_values / shape->n_rows : n_values / shape->width;
    if (g == 0 || g > of_axis || of_axis % g)
        return error_detail_set(reterr, -EINVAL, "q_group_size %u of quanto must divide the %llu %s", options->group_size,
                                (unsigned long long)of_axis,
                                options->axis == 0 ? "values of a batch row" : "tokens of all rows and heads");
    *ret = kv_quantized_arrange(KV_BACKEND_QUANTO, options, shape, n_values, options->axis == 0 && n_values == g);
    return 0;
}

/* x and codes of one group, gathered. */
static void encode_group(KvQuantized *tensor, const float *x, uint64_t group, float *members, uint8_t *member_codes, uint8_t *codes)
{
    const KvQuantizeOptions *o = &tensor->options;
    float scale, shift;

    for (uint64_t i = 0; i < tensor->group_size; i++)
        members[i] = x[kv_quantized_value_index(tensor, group, i)];
    kv_quanto_group(o->dtype, o->nbits, members, (uint32_t)tensor->group_size, member_codes, &scale, &shift);
    for (uint64_t i = 0; i < tensor->group_size; i++)
        codes[kv_quantized_code_index(tensor, group, i)] = member_codes[i];
    kv_dtype_store(o->dtype, tensor->scales, group, scale);
    kv_dtype_store(o->dtype, tensor->offsets, group, shift);
}

int kv_quanto_encode(const KvQuantizeOptions *options, const KvTensorShape *shape, const float *x, KvQuantized **ret,
                     ErrorDetail *reterr)
{
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;
    _cleanup_(freep) float *members = NULL;
    _cleanup_(freep) uint8_t *codes = NULL, *member_codes = NULL;
    KvQuantized plan;
    int r;

    r = arrange(options, shape, &plan, reterr);
    if (r)
        return error_trace(r);
    r = kv_quantized_new(&plan, &tensor, reterr);
    if (r)
        return error_trace(r);
    members = calloc(tensor->group_size, sizeof(*members));
    member_codes = calloc(tensor->group_size, 1);
    codes = calloc(tensor->n_values, 1);
    if (!members || !member_codes || !codes)
        return error_detail_set(reterr, -ENOMEM, "no memory to quantise %llu values", (unsigned long long)tensor->n_values);
    for (uint64_t group = 0; group < tensor->n_groups; group++)
        encode_group(tensor, x, group, members, member_codes, codes);
    kv_pack_codes(KV_PACK_LOW_FIRST, options->nbits, codes, tensor->n_rows, tensor->n_columns, tensor->packed);
    *ret = TAKE_PTR(tensor);
    return 0;
}
