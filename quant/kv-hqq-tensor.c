/* SPDX-License-Identifier: Apache-2.0 */
/* The `hqq` codec: a tensor, with sums in the library's order. */

#include "quant/kv-hqq.h"

#include "quant/kv-pack.h"

#include <math.h>

#define SHRINKS_ABOVE 0.16f /* below 0.1^(1/1.3) = 0.170 shrink() is 0 */
#define SHRINK_FACTOR 0.1f
#define SHRINK_POWER  -0.3f

#define SUM_LANES  8 /* of a vector; the order depends on it, so it is fixed */
#define SUM_CHAINS 4 /* that are summed side by side */
#define SUM_LEVELS 4

/* ---- sums ----------------------------------------------------------------------------------------------------------------------- */

/*
 * A sum of up to 2^16 numbers takes 16 of them at a time, in order; 16 such sums go into one of the next level, and so on; longer ones
 * take more at a time.  What is left at the end is added to the lowest level, then the levels to it.
 */
static float sum_levels(const float *x, size_t stride, uint64_t n)
{
    float levels[SUM_LEVELS] = {0};
    uint32_t log2_n = 0, log2_step;
    uint64_t step, i = 0;

    while (UINT64_C(1) << log2_n < n)
        log2_n++;
    log2_step = MAX(log2_n / SUM_LEVELS, 4u);
    step = UINT64_C(1) << log2_step;
    while (n - i >= step) {
        for (uint64_t end = i + step; i < end; i++)
            levels[0] += x[i * stride];
        for (uint32_t level = 1; level < SUM_LEVELS; level++) {
            levels[level] += levels[level - 1];
            levels[level - 1] = 0;
            if (i & (step - 1) << level * log2_step)
                break;
        }
    }
    for (; i < n; i++)
        levels[0] += x[i * stride];
    for (uint32_t level = 1; level < SUM_LEVELS; level++)
        levels[0] += levels[level];
    return levels[0];
}

/* Four chains, one number each in turn; the rest goes to the first. */
static float sum_chains(const float *x, size_t stride, uint64_t n)
{
    uint64_t per_chain = n / SUM_CHAINS;
    float sum = sum_levels(x, SUM_CHAINS * stride, per_chain);

    for (uint64_t i = per_chain * SUM_CHAINS; i < n; i++)
        sum += x[i * stride];
    for (uint32_t chain = 1; chain < SUM_CHAINS; chain++)
        sum += sum_levels(x + chain * stride, SUM_CHAINS * stride, per_chain);
    return sum;
}

/* Numbers side by side: the rest behind whole vectors first, then lane after lane. */
static float sum_run(const float *x, uint64_t n)
{
    float sum = 0;

    if (n < SUM_LANES)
        return sum_chains(x, 1, n);
    for (uint64_t i = n / SUM_LANES * SUM_LANES; i < n; i++)
        sum += x[i];
    for (uint32_t lane = 0; lane < SUM_LANES; lane++)
        sum += sum_chains(x + lane, SUM_LANES, n / SUM_LANES);
    return sum;
}

/* A column of a matrix: columns go by chains of vectors, or of numbers where a row is shorter than a vector; those left over alone. */
static float sum_column(const float *x, uint64_t n_rows, uint64_t n_columns, uint64_t column)
{
    uint64_t together = n_columns >= SUM_LANES ? SUM_CHAINS * SUM_LANES : SUM_CHAINS;

    if (n_columns == 1)
        return sum_run(x, n_rows);
    if (column < n_columns / together * together)
        return sum_levels(x + column, n_columns, n_rows);
    return sum_chains(x + column, n_columns, n_rows);
}

/* ---- search --------------------------------------------------------------------------------------------------------------------- */

/* What the search works on: the matrix of values, which lie as the codes do. */
typedef struct Search {
    const KvQuantized *tensor;
    const float *x;        /* (n_rows, n_columns) */
    float levels;
    float *scales, *zeros; /* (n_groups); scales are S until the end */
    float *moved, *errors; /* (n_rows, n_columns): what the next zero points are the means of; sizes of the errors */
} Search;

static uint64_t group_of(const KvQuantized *tensor, uint64_t i)
{
    return tensor->rows_are_groups ? i / tensor->n_columns : i % tensor->n_columns;
}

static void search_start(Search *search)
{
    const KvQuantized *tensor = search->tensor;

    for (uint64_t group = 0; group < tensor->n_groups; group++) {
        float low = search->x[kv_quantized_code_index(tensor, group, 0)], high = low;

        for (uint64_t i = 1; i < tensor->group_size; i++) {
            float x = search->x[kv_quantized_code_index(tensor, group, i)];

            low = kv_hqq_lower(low, x);
            high = kv_hqq_higher(high, x);
        }
        kv_hqq_start(search->levels, low, high, &search->scales[group], &search->zeros[group]);
    }
}

/* As kv_hqq_shrink(), with the library's power. */
static float shrink(float u)
{
    float size = fabsf(u), rest;

    if (size < SHRINKS_ABOVE)
        return 0.0f;
    rest = size - SHRINK_FACTOR * (float)pow((double)size, (double)SHRINK_POWER);
    return rest > 0.0f ? copysignf(rest, u) : isnan(rest) ? rest : 0.0f;
}

/* Moves all zero points once; returns the mean error that the old ones had. */
static float search_step(Search *search)
{
    const KvQuantized *tensor = search->tensor;

    for (uint64_t i = 0; i < tensor->n_values; i++) {
        uint64_t group = group_of(tensor, i);
        float x = search->x[i], scale = search->scales[group], zero = search->zeros[group];
        float level = kv_hqq_level(search->levels, x, scale, zero), error = x - (level - zero) / scale;

        search->errors[i] = fabsf(error);
        search->moved[i] = level - (x - shrink(error)) * scale;
    }
    for (uint64_t group = 0; group < tensor->n_groups; group++) {
        float sum = tensor->rows_are_groups
                        ? sum_run(search->moved + group * tensor->n_columns, tensor->n_columns)
                        : sum_column(search->moved, tensor->n_rows, tensor->n_columns, group);

        search->zeros[group] = sum / (float)tensor->group_size;
    }
    return sum_run(search->errors, tensor->n_values) / (float)tensor->n_values;
}

static void search_run(Search *search)
{
    float best = INFINITY;

    search_start(search);
    for (int i = 0; i < KV_HQQ_ITERATIONS; i++) {
        float mean = search_step(search);

        if (!(mean < best))
            break;
        best = mean;
    }
}

/* ---- encode --------------------------------------------------------------------------------------------------------------------- */

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
    *ret = kv_quantized_arrange(KV_BACKEND_HQQ, options, shape, n_values, false);
    if (options->nbits == 3 && options->axis == 1)
        return error_detail_set(reterr, -EINVAL, "nbits 3 of hqq needs axis 0: on axis 1 its packing cannot be taken apart");
    if (options->nbits != 3 && ret->n_rows % blocks)
        return error_detail_set(reterr, -EINVAL, "nbits %u of hqq packs %u rows of codes together: the %llu rows that axis %d and "
                                "q_group_size %u make do not come out even", options->nbits, blocks,
                                (unsigned long long)ret->n_rows, options->axis, options->group_size);
    return 0;
}

int kv_hqq_encode(const KvQuantizeOptions *options, const KvTensorShape *shape, const float *x, KvQuantized **ret,
                  ErrorDetail *reterr)
{
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = NULL;
    _cleanup_(freep) float *scales = NULL, *zeros = NULL, *moved = NULL, *errors = NULL;
    _cleanup_(freep) uint8_t *codes = NULL;
    Search search;
    KvQuantized plan;
    int r;

    r = arrange(options, shape, &plan, reterr);
    if (r)
        return error_trace(r);
    r = kv_quantized_new(&plan, &tensor, reterr);
    if (r)
        return error_trace(r);
    scales = calloc(tensor->n_groups, sizeof(*scales));
    zeros = calloc(tensor->n_groups, sizeof(*zeros));
    moved = calloc(tensor->n_values, sizeof(*moved));
    errors = calloc(tensor->n_values, sizeof(*errors));
    codes = calloc(tensor->n_values, 1);
    if (!scales || !zeros || !moved || !errors || !codes)
        return error_detail_set(reterr, -ENOMEM, "no memory to quantise %llu values", (unsigned long long)tensor->n_values);
    search = (Search){tensor, x, (float)((1u << options->nbits) - 1), scales, zeros, moved, errors};
    search_run(&search);
    for (uint64_t i = 0; i < tensor->n_values; i++)
        codes[i] = kv_hqq_code(search.levels, x[i], scales[group_of(tensor, i)], zeros[group_of(tensor, i)]);
    kv_pack_codes(KV_PACK_HIGH_FIRST, options->nbits, codes, tensor->n_rows, tensor->n_columns, tensor->packed);
    for (uint64_t group = 0; group < tensor->n_groups; group++) {
        kv_dtype_store(options->dtype, tensor->scales, group, 1.0f / scales[group]);
        kv_dtype_store(options->dtype, tensor->offsets, group, zeros[group]);
    }
    *ret = TAKE_PTR(tensor);
    return 0;
}
