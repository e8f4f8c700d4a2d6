#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every size of a store, computed once from the device's facts, the model's and the policy: by the planner before anything is
 * allocated, and by kv_store_new() to allocate exactly that.
 */

#include "cache/kv-store.h"

#define KV_BLOCK_TOKENS ((uint32_t)(KV_PAGE_TOKENS * KV_BLOCK_PAGES))
#define KV_MAX_SLOTS    8
#define KV_NO_SECTION   UINT32_MAX

/* One section: layers that agree in all of this. */
typedef struct KvSectionSizes {
    KvLayerKind kind;
    KvHome home;
    KvLayout layout;
    AttendOptions attend; /* inv_freq is borrowed from the model */
    bool direct;          /* tiles are read where the pages live, not from the ring */
    uint32_t n_planes;    /* layers that keep something */

    uint32_t max_items;
    uint32_t max_tokens;  /* of one cache: of its own, or of encoder output */
    uint32_t max_blocks;  /* for so many tokens */
    uint32_t held_pages;  /* the most that one cache has at a time, unless it is recorded: fewer where a window passes over them */
    uint32_t max_groups, max_loads, max_tiles, max_refs, max_packs; /* of one pass */
    uint32_t tile_blocks;

    uint64_t block_layer_bytes; /* one block of pages, one layer */
    uint64_t page_bytes;        /* a page of all planes */
    uint64_t tail_offset, tail_layer_bytes; /* its part of a tail slot, and a layer of it */
    uint64_t calibration_layer_bytes, inputs_bytes;

    uint32_t first_arena_pages, max_arena_pages, device_pages /* home device: there from the start to the end */;
    uint32_t resident_pages, max_resident_pages /* of an arena */; /* home host: as much of it as the device has room for, from the start */
} KvSectionSizes;

/* Where a layer is. */
typedef struct KvLayerPlace {
    uint32_t section; /* KV_NO_SECTION: it has no attention */
    uint32_t plane;
    uint32_t owner;   /* the layer that writes the plane: itself, or a shared layer's source */
    bool last;        /* no later layer reads the plane in a pass */
    bool has_state;
    uint64_t conv_offset, recurrent_offset; /* in a slot of states */
} KvLayerPlace;

typedef struct KvSizes {
    KvPolicy policy; /* every automatic value filled in */
    uint32_t n_layers, n_sections, n_sequences, max_items, max_rows, n_state_steps;
    KvLayerPlace *layers;     /* (n_layers) */
    KvSectionSizes *sections; /* (n_sections) */
    uint64_t logits_bytes; /* sink logits of all layers; 0: no layer has them */
    uint32_t logits_stride; /* heads of the widest layer */
    uint64_t tile_bytes, fresh_bytes, tail_slot_bytes, state_slot_bytes /* 0: no layer has a state */;
    uint64_t slots_bytes; /* of all tails and states */
    uint64_t device_page_limit_bytes; /* what the policy's budget leaves for pages; UINT64_MAX: no limit of ours */
    KvPlan plan;
} KvSizes;

#define KV_SIZES_NULL ((KvSizes){0})

/* 0, KV_E_DEVICE_MEMORY when not even one block a tile fits, KV_E_HOST_MEMORY, or -EINVAL / -ENOTSUP; the detail names the culprit. */
int kv_sizes_compute(const GpuInfo *info, const KvModel *model, const KvPolicy *policy, KvSizes *ret, ErrorDetail *reterr);
void kv_sizes_deinit(KvSizes *sizes);
/* A layer with the model's own values filled in. */
KvLayer kv_model_layer(const KvModel *model, uint32_t l);
/* Slots of the pool of states: before and after a pass, and steps. */
static inline uint32_t kv_state_slots(const KvSizes *sizes)
{
    return 2 * sizes->n_sequences + sizes->n_state_steps;
}
/* The part of it that finds each layer's place, and what tells the sections apart.  KV_E_HOST_MEMORY or -EINVAL. */
int kv_sizes_place_layers(KvSizes *sizes, const KvModel *model, ErrorDetail *reterr);
