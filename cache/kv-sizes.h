#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every size of a store, computed once from the device's facts, the model's and the policy: by the planner before anything is
 * allocated, and by kv_store_new() to allocate exactly that.
 */

#include "cache/kv-store.h"

#define KV_BLOCK_TOKENS ((uint32_t)(KV_PAGE_TOKENS * KV_BLOCK_PAGES))
#define KV_MAX_SLOTS    8

typedef struct KvSizes {
    KvPolicy policy; /* every automatic value filled in */
    KvLayout layout;
    AttendOptions attend;
    bool direct; /* tiles are read where the pages live: there is no ring */
    uint32_t n_layers, n_sequences;

    uint32_t max_blocks; /* of one cache */
    uint32_t max_groups, max_loads, max_tiles, max_refs, max_packs; /* of one pass */

    uint64_t block_layer_bytes; /* one block of pages, one layer */
    uint64_t block_bytes;       /* all layers */
    uint64_t tile_bytes, fresh_bytes, tail_layer_bytes, tail_slot_bytes, calibration_layer_bytes, inputs_bytes;

    uint32_t first_arena_blocks, max_arena_blocks;
    uint64_t device_page_limit_bytes; /* home device: what the policy's budget leaves for pages; UINT64_MAX: no limit of ours */
    KvPlan plan;
} KvSizes;

/* 0, KV_E_DEVICE_MEMORY when not even one block a tile fits, or -EINVAL / -ENOTSUP; the detail names the culprit. */
int kv_sizes_compute(const GpuInfo *info, const KvModel *model, const KvPolicy *policy, KvSizes *ret, ErrorDetail *reterr);
