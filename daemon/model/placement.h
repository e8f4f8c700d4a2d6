#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where each block of a model's weights is during a pass, and in which pieces the products of a pass read it.  Pure arithmetic.
 *
 *   on the device   the whole block in a buffer of its own
 *   in place        host memory that the device reads itself (it shares the host's memory, and `transfer` allows it)
 *   streamed        in *parts* through a ring of staging buffers (weights-device.h)
 *   rows            an embedding that is not on the device: rows of the pass's tokens are brought by the tile
 *
 * When not all fits: a separate embedding gives way first, because a token needs one tile of it.  Of spans and head the same share stays:
 * spans evenly spread, and the first rows of the head by turns with those that stream, so that what stays gives copies time everywhere.
 * A part is one launch's work: whole products of a span, or some rows of one, at most PLACEMENT_PART_BYTES, so that on a device whose
 * memory is the host's the second read of a staged part comes from its last cache level, and a slot costs little.  With a small budget
 * parts are smaller, with slots at most half of it.
 */

#include "daemon/model/weights.h"

#define PLACEMENT_PART_BYTES  (UINT64_C(4) << 20)
#define PLACEMENT_MAX_SLOTS   8
#define PLACEMENT_WINDOW_ROWS 32 /* of tokens whose embedding rows are on the device at once */

typedef enum PlacementKind { PLACEMENT_DEVICE, PLACEMENT_IN_PLACE, PLACEMENT_STREAMED, PLACEMENT_ROWS } PlacementKind;

/* Which product of the graph. */
typedef enum PlacementUse { PLACEMENT_O, PLACEMENT_GATED, PLACEMENT_DOWN, PLACEMENT_QKV, PLACEMENT_HEAD } PlacementUse;

/* Some rows of one matrix: whole tiles, but for the matrix's own end. */
typedef struct PlacementSlice {
    const WeightsMatrix *matrix;
    uint32_t n_rows;
    uint64_t from, to, bytes; /* in the block; in the buffer */
} PlacementSlice;

/* One product, or some columns of its result. */
typedef struct PlacementPiece {
    PlacementUse use;
    uint32_t layer, y_first, n_slices;
    PlacementSlice slices[3];
} PlacementPiece;

typedef struct PlacementPart {
    uint32_t first_piece, n_pieces, block;
    uint64_t bytes;
    bool streamed;
} PlacementPart;

typedef struct PlacementLimits {
    uint64_t budget_bytes;         /* of the device, for weights and what they stream through; UINT64_MAX: no limit */
    uint64_t max_allocation_bytes; /* of one buffer */
    uint32_t max_layers;           /* that may stay on the device; UINT32_MAX: no limit */
    uint32_t n_slots;              /* of the ring, 1 to 8 */
    uint32_t max_rows;             /* of a pass */
    bool in_place;                 /* what does not fit is read in host memory */
} PlacementLimits;

typedef struct Placement {
    PlacementKind *kinds;          /* (n_blocks); owned */
    uint32_t head_rows;            /* on the device, when the head is streamed */
    PlacementPiece *pieces;        /* owned */
    PlacementPart *parts;          /* those of spans in order, then those of the head; owned */
    uint32_t n_pieces, n_parts;
    uint32_t *span_parts;          /* (n_spans + 1): first part of each, then of the head; owned */
    uint32_t n_slots, window_rows; /* 0: none needed */
    uint64_t slot_bytes, window_bytes;
    uint64_t device_bytes;         /* blocks, without staging */
    uint64_t staging_bytes;        /* ring and window */
    uint64_t in_place_bytes, streamed_bytes; /* host memory that each token reads so; a token's embedding row is left out */
    uint64_t streamed_head_bytes;  /* of these what a pass without logits does not read */
} Placement;
#define PLACEMENT_NULL ((Placement){.kinds = NULL})

void placement_clear(Placement *placement);
/* 0, MODEL_E_DEVICE_MEMORY when not even one slot fits (with the numbers), or -ENOMEM. */
int placement_make(const Weights *weights, const PlacementLimits *limits, Placement *ret, ErrorDetail *reterr);
