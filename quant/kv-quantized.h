#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A quantised tensor as Transformers' quantised caches keep it: all keys, or all values, of one layer in one piece.
 *
 * kv-quanto.h, kv-hqq.h and kv-fp8.h make it and say what a code stands for; here is what they share.  It is never changed once made,
 * so copies are references.  What attention kernels read are the page forms of quant/kv-codec.h, not this.
 */

#include "quant/base/error.h"
#include "quant/kv-dtype.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum KvBackend {
    KV_BACKEND_QUANTO,
    KV_BACKEND_HQQ,
    KV_BACKEND_FP8,
    KV_BACKEND_X_MAX,
    KV_BACKEND_X_INVALID = -EINVAL,
} KvBackend;

const char *kv_backend_to_string(KvBackend backend);
KvBackend kv_backend_from_string(const char *name); /* KV_BACKEND_X_INVALID when unknown */

/* Row-major (n_rows, n_heads, n_tokens, width): batch rows, key/value heads, tokens, values of a head. */
typedef struct KvTensorShape {
    uint32_t n_rows, n_heads, n_tokens, width;
} KvTensorShape;

/* Number of values; -EINVAL for an empty tensor, -EOVERFLOW for one that cannot be addressed. */
int kv_tensor_size(const KvTensorShape *shape, uint64_t *ret, ErrorDetail *reterr);

typedef struct KvQuantizeOptions {
    uint8_t nbits;
    int8_t axis;         /* quanto: 0, -1; hqq: 0, 1 */
    uint32_t group_size;
    KvDtype dtype;       /* the tensor's; decoding gives it again */
} KvQuantizeOptions;

typedef struct KvQuantized {
    uint32_t n_refs;
    KvBackend backend;
    KvQuantizeOptions options; /* fp8: 8 bits, no groups */
    KvTensorShape shape;
    uint64_t n_values;
    bool rows_are_groups;        /* groups are runs of values in row-major order */
    uint64_t n_rows, n_columns;  /* of the matrix of codes */
    uint64_t n_groups, group_size; /* group_size 1: a tensor in a single quanto group */
    uint64_t packed_bytes;
    uint8_t *packed;
    void *scales, *offsets; /* (n_groups) of the dtype; quanto: shift, hqq: zero; fp8: NULL */
    float scale;            /* fp8 */
} KvQuantized;

/* Where the groups and codes of a tensor of @n_values lie, whether or not they come out even.  @alone: every value is a group of its own, as in
 * fp8, and in a tensor that is a single quanto group. */
KvQuantized kv_quantized_arrange(KvBackend backend, const KvQuantizeOptions *options, const KvTensorShape *shape, uint64_t n_values,
                                 bool alone);
static inline bool kv_quantized_is_alone(const KvQuantized *tensor)
{
    return tensor->group_size == 1 && tensor->n_rows == 1;
}
/* A tensor whose codes and scales are still to be written: shape, options and the matrix of codes are taken from @like.  -ENOMEM. */
int kv_quantized_new(const KvQuantized *like, KvQuantized **ret, ErrorDetail *reterr);
KvQuantized *kv_quantized_ref(KvQuantized *tensor);   /* takes NULL */
KvQuantized *kv_quantized_unref(KvQuantized *tensor); /* takes NULL, returns NULL */
DEFINE_CLEANUP(KvQuantized, kv_quantized_unref)

/* Where member @member of group @group lies: among the tensor's values, and in the matrix of codes. */
uint64_t kv_quantized_value_index(const KvQuantized *tensor, uint64_t group, uint64_t member);
uint64_t kv_quantized_code_index(const KvQuantized *tensor, uint64_t group, uint64_t member);

/* Bytes of codes and scales. */
uint64_t kv_quantized_bytes(const KvQuantized *tensor);
/* ret: (shape) values of the dtype.  -ENOMEM. */
int kv_quantized_decode(const KvQuantized *tensor, float *ret, ErrorDetail *reterr);

/* The first @n_tokens tokens of chosen rows (which may repeat), in codes: decodes to exactly the same values.  @rows NULL: all rows.
 * -EOPNOTSUPP, naming group and axis, when a group mixes what stays with what goes; -EINVAL for a row or token that is not there. */
int kv_quantized_gather(const KvQuantized *tensor, const uint32_t *rows, uint32_t n_rows, uint32_t n_tokens, KvQuantized **ret,
                        ErrorDetail *reterr);
/* Whether kv_quantized_gather() can keep @n_tokens of the tokens. */
bool kv_quantized_can_gather(const KvQuantized *tensor, uint32_t n_tokens);
