#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What a saved past consists of, for cache/kv-file*.c. */

#include "cache/kv-file.h"
#include "cache/kv-store-internal.h"

#include <assert.h>

typedef enum KvFileChunk {
    KV_CHUNK_PAST = 1, /* KvPastRecord, then a KvLayerRecord a layer */
    KV_CHUNK_TAIL,     /* a: layer */
    KV_CHUNK_PAGES,    /* a: layer */
    KV_CHUNK_STATE,
    KV_CHUNK_EXTRA,
    KV_CHUNK_HOST, /* a: layer, b: 0 keys, 1 values (kv-file-host.c) */
} KvFileChunk;

typedef struct KvPastRecord {
    uint32_t length, cross_length, n_layers, reserved;
} KvPastRecord;

/* Of a layer that keeps keys and values of its own; zero for others. */
typedef struct KvLayerRecord {
    uint32_t tail_from, first_page, n_pages, reserved; /* pages [first_page, n_pages) */
} KvLayerRecord;

static_assert(sizeof(KvPastRecord) == 16 && sizeof(KvLayerRecord) == 16, "no padding in the file");

static inline bool kv_layer_keeps_pages(const KvStore *store, uint32_t layer)
{
    return store->sizes.layers[layer].section != KV_NO_SECTION && store->sizes.layers[layer].owner == layer;
}

static inline const KvSectionSizes *kv_layer_section(const KvStore *store, uint32_t layer)
{
    return &store->sizes.sections[store->sizes.layers[layer].section];
}

static inline uint64_t kv_layer_tail(const KvStore *store, uint32_t layer)
{
    const KvSectionSizes *sizes = kv_layer_section(store, layer);

    return sizes->tail_offset + store->sizes.layers[layer].plane * sizes->tail_layer_bytes;
}
