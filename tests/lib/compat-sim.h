#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model of attention and linear layers on a compatibility cache, beside one that keeps every token: queries, keys, values and
 * columns are random numbers that depend on a token's id, its position and the layer.  Both attend in double, over the visible keys
 * in order of position, so they must agree in every bit.  Failures are cmocka assertions.
 */

#include "cache/kv-compat-mask.h"
#include "cache/kv-compat.h"

#define SIM_MAX_TOKENS 96
#define SIM_MAX_ROWS   12
#define SIM_MAX_LAYERS 6

typedef struct SimLayer {
    KvCompatLayerSpec spec;
    bool chunked; /* sliding kinds: the mask */
} SimLayer;

typedef struct Sim {
    KvCompat *cache;
    SimLayer layers[SIM_MAX_LAYERS];
    uint32_t n_layers, n_rows, length;
    uint32_t ids[SIM_MAX_ROWS][SIM_MAX_TOKENS];
    uint32_t padding[SIM_MAX_ROWS]; /* leading tokens that are padding */
    bool recording;
} Sim;

void sim_init(Sim *sim, const SimLayer *layers, uint32_t n_layers, uint32_t n_rows);
void sim_deinit(Sim *sim);
/* A deep copy of cache and tokens. */
void sim_copy(const Sim *sim, Sim *ret);

/* One forward of @n_tokens new tokens a row, compared with the model that keeps everything.  Their ids follow from @seed, row (the
 * same row always gets the same) and position. */
void sim_feed(Sim *sim, uint32_t n_tokens, uint32_t seed);
/* The same forward with these ids again, as after a crop. */
void sim_feed_again(Sim *sim, const Sim *before, uint32_t n_tokens);
void sim_record(Sim *sim);
int sim_crop(Sim *sim, int64_t n);
int sim_select(Sim *sim, const uint32_t *rows, uint32_t n_rows);
void sim_reset(Sim *sim);
