/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised tensors: memory, where groups lie, rows and tokens of one. */

#include "quant/kv-quantized.h"

#include "quant/base/checked.h"
#include "quant/kv-fp8.h"
#include "quant/kv-hqq.h"
#include "quant/kv-pack.h"
#include "quant/kv-quanto.h"

static const char *const backend_names[KV_BACKEND_X_MAX] = {
    [KV_BACKEND_QUANTO] = "quanto",
    [KV_BACKEND_HQQ] = "hqq",
    [KV_BACKEND_FP8] = "fp8",
};

const char *kv_backend_to_string(KvBackend backend)
{
    return backend >= 0 && backend < KV_BACKEND_X_MAX ? backend_names[backend] : NULL;
}

KvBackend kv_backend_from_string(const char *name)
{
    for (int i = 0; i < KV_BACKEND_X_MAX; i++)
        if (strcmp(name, backend_names[i]) == 0)
            return (KvBackend)i;
    return KV_BACKEND_X_INVALID;
}

int kv_tensor_size(const KvTensorShape *shape, uint64_t *ret, ErrorDetail *reterr)
{
    uint64_t n;

    if (shape->n_rows == 0 || shape->n_heads == 0 || shape->n_tokens == 0 || shape->width == 0)
        return error_detail_set(reterr, -EINVAL, "a tensor of %u rows, %u heads, %u tokens and %u values a head is empty",
                                shape->n_rows, shape->n_heads, shape->n_tokens, shape->width);
    if (!checked_mul((uint64_t)shape->n_rows * shape->n_heads, shape->n_tokens, &n) || !checked_mul(n, shape->width, &n) ||
        n > PTRDIFF_MAX / sizeof(float))
        return error_detail_set(reterr, -EOVERFLOW, "a tensor of %u rows, %u heads, %u tokens and %u values a head is too large",
                                shape->n_rows, shape->n_heads, shape->n_tokens, shape->width);
    *ret = n;
    return 0;
}

KvQuantized kv_quantized_arrange(KvBackend backend, const KvQuantizeOptions *options, const KvTensorShape *shape, uint64_t n_values,
                                 bool alone)
{
    KvQuantized tensor = {.backend = backend, .options = *options, .shape = *shape, .n_values = n_values};
    uint64_t g = alone ? 1 : options->group_size;

    tensor.group_size = g;
    tensor.n_groups = backend == KV_BACKEND_FP8 ? 0 : n_values / g;
    tensor.rows_are_groups = alone || options->axis == (backend == KV_BACKEND_HQQ ? 1 : 0);
    tensor.n_rows = alone ? 1 : tensor.rows_are_groups ? tensor.n_groups : g;
    tensor.n_columns = alone ? n_values : tensor.rows_are_groups ? g : tensor.n_groups;
    return tensor;
}

/* ---- memory --------------------------------------------------------------------------------------------------------------------- */

int kv_quantized_new(const KvQuantized *like, KvQuantized **ret, ErrorDetail *reterr)
{
    _cleanup_(kv_quantized_unrefp) KvQuantized *tensor = calloc(1, sizeof(*tensor));
    size_t bytes = kv_dtype_bytes(like->options.dtype);

    if (!tensor)
        return error_detail_set(reterr, -ENOMEM, "no memory for a quantised tensor");
    *tensor = *like;
    tensor->n_refs = 1;
    tensor->packed = NULL;
    tensor->scales = tensor->offsets = NULL;
    if (!kv_packed_bytes(like->options.nbits, like->n_rows, like->n_columns, &tensor->packed_bytes))
        return error_detail_set(reterr, -EOVERFLOW, "a quantised tensor of %llu rows of codes is too large",
                                (unsigned long long)like->n_rows);
    tensor->packed = calloc(1, tensor->packed_bytes);
    if (like->n_groups) {
        tensor->scales = calloc(like->n_groups, bytes);
        tensor->offsets = calloc(like->n_groups, bytes);
    }
    if (!tensor->packed || (like->n_groups && (!tensor->scales || !tensor->offsets)))
        return error_detail_set(reterr, -ENOMEM, "no memory for a quantised tensor of %llu bytes",
                                (unsigned long long)tensor->packed_bytes);
    *ret = TAKE_PTR(tensor);
    return 0;
}

KvQuantized *kv_quantized_ref(KvQuantized *tensor)
{
    if (tensor)
        tensor->n_refs++;
    return tensor;
}

KvQuantized *kv_quantized_unref(KvQuantized *tensor)
{
    if (!tensor || --tensor->n_refs > 0)
        return NULL;
    free(tensor->packed);
    free(tensor->scales);
    free(tensor->offsets);
    free(tensor);
    return NULL;
}

uint64_t kv_quantized_bytes(const KvQuantized *tensor)
{
    uint64_t scales = tensor->n_groups ? 2 * tensor->n_groups * kv_dtype_bytes(tensor->options.dtype) : sizeof(tensor->scale);

    return tensor->packed_bytes + scales;
}

/* ---- groups --------------------------------------------------------------------------------------------------------------------- */

uint64_t kv_quantized_code_index(const KvQuantized *tensor, uint64_t group, uint64_t member)
{
    return tensor->rows_are_groups ? group * tensor->group_size + member : member * tensor->n_groups + group;
}

uint64_t kv_quantized_value_index(const KvQuantized *tensor, uint64_t group, uint64_t member)
{
    if (!tensor->rows_are_groups && tensor->backend == KV_BACKEND_QUANTO) {
        uint64_t per_channel = tensor->n_groups / tensor->shape.width, channel = group / per_channel;

        return (group % per_channel * tensor->group_size + member) * tensor->shape.width + channel;
    }
    return kv_quantized_code_index(tensor, group, member);
}

static KvPackOrder pack_order(const KvQuantized *tensor)
{
    return tensor->backend == KV_BACKEND_QUANTO ? KV_PACK_LOW_FIRST : KV_PACK_HIGH_FIRST;
}

static void decode_group(const KvQuantized *tensor, const uint8_t *codes, uint64_t group, float *ret)
{
    KvDtype dtype = tensor->options.dtype;
    float scale = kv_dtype_load(dtype, tensor->scales, group), offset = kv_dtype_load(dtype, tensor->offsets, group);

    for (uint64_t i = 0; i < tensor->group_size; i++) {
        uint8_t code = codes[kv_quantized_code_index(tensor, group, i)];

        ret[kv_quantized_value_index(tensor, group, i)] = tensor->backend == KV_BACKEND_QUANTO ? kv_quanto_value(dtype, code, scale, offset)
                                                                                               : kv_hqq_value(dtype, code, scale, offset);
    }
}

int kv_quantized_decode(const KvQuantized *tensor, float *ret, ErrorDetail *reterr)
{
    _cleanup_(freep) uint8_t *codes = NULL;

    if (tensor->backend == KV_BACKEND_FP8) {
        kv_fp8_decode_tensor(tensor, ret);
        return 0;
    }
    codes = calloc(tensor->n_values, 1);
    if (!codes)
        return error_detail_set(reterr, -ENOMEM, "no memory to decode %llu values", (unsigned long long)tensor->n_values);
    kv_unpack_codes(pack_order(tensor), tensor->options.nbits, tensor->packed, tensor->n_rows, tensor->n_columns, codes);
    for (uint64_t group = 0; group < tensor->n_groups; group++)
        decode_group(tensor, codes, group, ret);
    return 0;
}

/* ---- gather --------------------------------------------------------------------------------------------------------------------- */

/* What is copied in one go: a batch row when all tokens stay, else the tokens that stay of one head. */
typedef struct Run {
    uint64_t from_stride, n_values;
    uint32_t per_row;
} Run;

static Run run_of(const KvTensorShape *shape, uint32_t n_tokens)
{
    uint64_t head = (uint64_t)shape->n_tokens * shape->width;

    if (n_tokens == shape->n_tokens)
        return (Run){head * shape->n_heads, head * shape->n_heads, 1};
    return (Run){head, (uint64_t)n_tokens * shape->width, shape->n_heads};
}

bool kv_quantized_can_gather(const KvQuantized *tensor, uint32_t n_tokens)
{
    Run run = run_of(&tensor->shape, n_tokens);

    return tensor->rows_are_groups && run.from_stride % tensor->group_size == 0 && run.n_values % tensor->group_size == 0;
}

static int check_gather(const KvQuantized *tensor, const uint32_t *rows, uint32_t n_rows, uint32_t n_tokens, ErrorDetail *reterr)
{
    if (n_rows == 0 || n_tokens == 0 || n_tokens > tensor->shape.n_tokens || (!rows && n_rows != tensor->shape.n_rows))
        return error_detail_set(reterr, -EINVAL, "%u rows of %u tokens cannot be taken from a tensor of %u rows of %u tokens", n_rows,
                                n_tokens, tensor->shape.n_rows, tensor->shape.n_tokens);
    for (uint32_t i = 0; rows && i < n_rows; i++)
        if (rows[i] >= tensor->shape.n_rows)
            return error_detail_set(reterr, -EINVAL, "row %u is not in a tensor of %u rows", rows[i], tensor->shape.n_rows);
    if (!kv_quantized_can_gather(tensor, n_tokens))
        return error_detail_set(reterr, -EOPNOTSUPP, "q_group_size %u on axis %d of %s mixes tokens that stay with others: rows of %u "
                                "of its %u tokens cannot be taken out", tensor->options.group_size, tensor->options.axis,
                                kv_backend_to_string(tensor->backend), n_tokens, tensor->shape.n_tokens);
    return 0;
}

/* Copies each run from the old order to the new one: items of @size bytes, one for @per values. */
static void gather_items(Run run, const uint32_t *rows, uint32_t n_rows, size_t size, uint64_t per, const void *from, void *ret)
{
    size_t run_bytes = run.n_values / per * size, stride = run.from_stride / per * size;
    char *to = ret;

    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t i = 0; i < run.per_row; i++, to += run_bytes)
            memcpy(to, (const char *)from + ((rows ? rows[r] : r) * (uint64_t)run.per_row + i) * stride, run_bytes);
}

int kv_quantized_gather(const KvQuantized *tensor, const uint32_t *rows, uint32_t n_rows, uint32_t n_tokens, KvQuantized **ret,
                        ErrorDetail *reterr)
{
    _cleanup_(kv_quantized_unrefp) KvQuantized *gathered = NULL;
    _cleanup_(freep) uint8_t *codes = NULL, *new_codes = NULL;
    KvPackOrder order = pack_order(tensor);
    size_t bytes = kv_dtype_bytes(tensor->options.dtype);
    uint8_t nbits = tensor->options.nbits;
    KvTensorShape shape = {n_rows, tensor->shape.n_heads, n_tokens, tensor->shape.width};
    KvQuantized plan;
    uint64_t n_values;
    Run run;
    int r;

    r = check_gather(tensor, rows, n_rows, n_tokens, reterr);
    if (!r)
        r = kv_tensor_size(&shape, &n_values, reterr);
    if (r)
        return error_trace(r);
    plan = kv_quantized_arrange(tensor->backend, &tensor->options, &shape, n_values, kv_quantized_is_alone(tensor));
    plan.scale = tensor->scale;
    r = kv_quantized_new(&plan, &gathered, reterr);
    if (r)
        return error_trace(r);
    codes = calloc(tensor->n_values, 1);
    new_codes = calloc(n_values, 1);
    if (!codes || !new_codes)
        return error_detail_set(reterr, -ENOMEM, "no memory to gather %llu values", (unsigned long long)n_values);
    run = run_of(&tensor->shape, n_tokens);
    kv_unpack_codes(order, nbits, tensor->packed, tensor->n_rows, tensor->n_columns, codes);
    gather_items(run, rows, n_rows, 1, 1, codes, new_codes);
    kv_pack_codes(order, nbits, new_codes, gathered->n_rows, gathered->n_columns, gathered->packed);
    if (tensor->n_groups) {
        gather_items(run, rows, n_rows, bytes, tensor->group_size, tensor->scales, gathered->scales);
        gather_items(run, rows, n_rows, bytes, tensor->group_size, tensor->offsets, gathered->offsets);
    }
    *ret = TAKE_PTR(gathered);
    return 0;
}
