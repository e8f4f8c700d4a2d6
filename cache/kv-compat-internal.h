#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The body of a compatibility cache, for cache/kv-compat*.c only. */

#include "cache/kv-compat-linear.h"
#include "cache/kv-compat.h"

typedef struct KvCompatLayer {
    const KvCompatClass *class; /* NULL: no attention part */
    void *self;
    bool initialised; /* the shapes hold */
    uint32_t n_rows, n_heads, k_width, v_width;
    KvLinear *linear; /* NULL: no linear part */
} KvCompatLayer;

struct KvCompat {
    KvCompatLayer *layers;
    uint32_t n_layers;
    bool grows; /* makes layers as `replicate` when they are asked for */
    bool recording;
    KvCompatLayerSpec replicate;
};

void kv_compat_layer_deinit(KvCompatLayer *layer);
/* Rows that the layer holds; 0: none yet. */
uint32_t kv_compat_layer_rows(const KvCompatLayer *layer);
/* A deep copy with other rows; @rows are checked.  Parts that hold nothing are copied as they are. */
int kv_compat_layer_copy(const KvCompatLayer *layer, const uint32_t *rows, uint32_t n_rows, KvCompatLayer *ret, ErrorDetail *reterr);
/* Whether @rows can be selected; *@ret_n: the rows there are, -1 when there are none to select from. */
int kv_compat_check_rows(const KvCompat *cache, const uint32_t *rows, uint32_t n_rows, int64_t *ret_n, ErrorDetail *reterr);
/* New layers with other rows, all or none; they replace the old ones. */
int kv_compat_make_rows(const KvCompat *cache, const uint32_t *rows, uint32_t n_rows, KvCompatLayer **ret, ErrorDetail *reterr);
void kv_compat_take_rows(KvCompat *cache, KvCompatLayer *layers);
KvCompatLayer *kv_compat_free_rows(const KvCompat *cache, KvCompatLayer *layers);
/* The rows of repeat(n_times): b0 b0 b1 b1.  -ENOMEM or KV_COMPAT_E_VALUE. */
int kv_compat_repeated_rows(const KvCompat *cache, uint32_t n_times, uint32_t **ret, uint32_t *ret_n, ErrorDetail *reterr);
