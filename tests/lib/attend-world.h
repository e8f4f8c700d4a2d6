#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small cache around opencl/attend.h for its tests and bench: sequences of made-up queries, keys and values, one layer, an arena of
 * packed pages, tail slots; passes cut into tiles of any size; and the double precision answer straight from the definition in
 * quant/kv-codec.h.  Failures are cmocka assertions.
 */

#include "opencl/attend.h"

#define WORLD_MAX_SEQUENCES 4

typedef struct WorldOptions {
    AttendOptions attend;
    uint32_t max_tokens;    /* of one sequence */
    bool calibrated;
    uint32_t tile_blocks;   /* blocks of a group in one tile; 0: all */
    bool untrimmed;         /* refs name pages and blocks that no row sees, too */
    /* Queries, keys, values before RoPE: one float.  @what: 0 q, 1 k, 2 v. */
    float (*value)(int what, uint32_t sequence, uint32_t position, uint32_t head, uint32_t dim);
} WorldOptions;

typedef struct World World;

World *world_new(Gpu *gpu, const WorldOptions *options);
World *world_free(World *world);
DEFINE_CLEANUP(World, world_free)

/* New tokens of one sequence. */
typedef struct WorldItem {
    uint32_t sequence, n_tokens;
} WorldItem;

/* Runs one pass; rows of out (n_rows, n_heads * v_head_dim) are the items' tokens in order.  Pages packed on the way are compared with
 * kv_pack_page(), bit for bit. */
void world_pass(World *world, const WorldItem *items, uint32_t n_items, float *ret_out);
/* Cross attention: writes the next keys and values of a sequence.  Rows of world_pass() are then queries, numbered from 0 on. */
void world_keep(World *world, uint32_t sequence, uint32_t n_tokens);
/* Tokens that are there; cross: queries that were asked. */
uint32_t world_length(const World *world, uint32_t sequence);
/* The answer for the row of one position, (n_heads * v_head_dim), from the pages and tail as packed by C. */
void world_reference(World *world, uint32_t sequence, uint32_t position, double *ret_out);
/* Cuts sequences back by hand: the next pass goes on at @length (unpacked forms refill the ring from their pages). */
void world_crop(World *world, uint32_t sequence, uint32_t length);
void world_set_tile_blocks(World *world, uint32_t tile_blocks);
AttendKernels world_kernels(const World *world);

float world_uniform(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e);  /* 0..1 by hash */
float world_gaussian(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e);
