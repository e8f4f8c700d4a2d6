#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parameters of the quantised caches that Transformers has: names, defaults and what each backend takes.
 */

#include "quant/kv-quantized.h"

/* As somebody gave it; what is not given has the default. */
typedef struct KvQuantRequest {
    const char *backend; /* borrowed; NULL: quanto */
    bool has_nbits, has_axis_key, has_axis_value, has_q_group_size, has_residual_length;
    int64_t nbits, axis_key, axis_value, q_group_size, residual_length;
} KvQuantRequest;

typedef struct KvQuantOptions {
    KvBackend backend;
    uint8_t nbits;            /* the rest is 0 for fp8, but for 8 bits */
    int8_t axis_key, axis_value;
    uint32_t q_group_size;    /* values of a group, 1 to 2^20 */
    uint32_t residual_length; /* recent tokens that stay as they are before all are quantised again, 0 to 2^24 */
} KvQuantOptions;

/* 4 bits, axes 0, groups of 64, residual 128.  -EINVAL with key, value and what is allowed. */
int kv_quant_options(const KvQuantRequest *request, KvQuantOptions *ret, ErrorDetail *reterr);

static inline bool kv_quant_options_equal(const KvQuantOptions *a, const KvQuantOptions *b)
{
    return a->backend == b->backend && a->nbits == b->nbits && a->axis_key == b->axis_key && a->axis_value == b->axis_value &&
           a->q_group_size == b->q_group_size && a->residual_length == b->residual_length;
}

/* Whether a row of a batch is coded the same whatever other rows there are: hqq ends its search for all rows of a tensor together, and groups
 * of quanto's axis -1 go on from one row to the next. */
static inline bool kv_quant_rows_are_apart(const KvQuantOptions *options)
{
    return options->backend == KV_BACKEND_FP8 || (options->backend == KV_BACKEND_QUANTO && options->axis_key == 0 && options->axis_value == 0);
}

/* Transformers quantises models whose layers are all "full_attention".  -EINVAL naming every other type once. */
int kv_quant_check_layer_types(const char *const *types, uint32_t n_types, ErrorDetail *reterr);
