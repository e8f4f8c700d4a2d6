#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Drives a compatibility cache with numbers that say where they come from: token t (from 1) that a layer was ever given in row b
 * has the value 1000 b + t in K and its negative in V.  Failures are cmocka assertions.
 */

#include "cache/kv-compat.h"

#define RIG_MAX_LAYERS 8

typedef struct Rig {
    KvCompat *cache;
    uint32_t n_rows;                 /* of what is given next */
    uint32_t fed[RIG_MAX_LAYERS], convs[RIG_MAX_LAYERS], states[RIG_MAX_LAYERS]; /* given so far */
    uint32_t kernels[RIG_MAX_LAYERS];
    /* Of the last update: what was returned, (rows, tokens). */
    float returned[4096];
    uint32_t n_returned;
} Rig;

void rig_init(Rig *rig, const KvCompatLayerSpec *layers, uint32_t n_layers, uint32_t n_rows);
void rig_deinit(Rig *rig);

/* The code of the update; on success checks mask sizes against what came back, and K against V. */
int rig_update(Rig *rig, uint32_t layer, uint32_t n_tokens);
int rig_conv(Rig *rig, uint32_t layer, uint32_t n_columns);
/* @n_states of @n_tokens, as kv_compat_update_recurrent(). */
int rig_state(Rig *rig, uint32_t layer, uint32_t n_tokens, uint32_t n_states);

/* "1 2 3": what the last update returned; what a layer keeps; its columns; its recurrent state.  In a buffer of the rig's that the
 * next call reuses. */
const char *rig_returned(Rig *rig);
const char *rig_kept(Rig *rig, uint32_t layer);
const char *rig_columns(Rig *rig, uint32_t layer);
const char *rig_recurrent(Rig *rig, uint32_t layer);
uint32_t rig_length(const Rig *rig, uint32_t layer);
/* "length offset" of the next update of @n_tokens. */
const char *rig_mask(Rig *rig, uint32_t layer, uint32_t n_tokens);
/* Everything that can be seen of the cache, for comparison before and after a failure; freed by the caller. */
char *rig_describe(const Rig *rig);
