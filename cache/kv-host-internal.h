#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What compatibility mode keeps, for cache/kv-host.c and cache/kv-file-host.c only. */

#include "cache/kv-compat-internal.h"
#include "cache/kv-compat-quantized.h"
#include "cache/kv-host.h"

struct KvHost {
    Gpu *gpu;
    KvQuantOptions options;
    KvDtype dtype;
    uint32_t n_layers, max_rows, max_tokens;
    KvLayer *layers;    /* (n_layers), complete; inv_freq points into the next */
    float *inv_freq;    /* (n_layers, most rotary pairs) */
    float *qkv, *out;   /* (max_rows, widest) */
    double *scores;     /* (max_tokens) */
    float *k, *v;       /* new keys, values of one sequence: (n_kv_heads, n_tokens, head_dim) */
};

struct KvHostPast {
    const KvHost *host;
    KvCompat *now, *next; /* next: with what the pass in progress adds */
    KvHeld *pending;      /* (n_layers, 2): keys, values of a prompt whose last pass is to come */
    uint32_t n_pending;
    uint32_t length, n_tokens; /* of the pass in progress */
};

/* The quantised layers are the only kind of layer there is. */
static inline void *kv_host_past_layer(const KvHostPast *past, uint32_t layer)
{
    return past->now->layers[layer].self;
}
