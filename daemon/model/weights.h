#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The weights of a model on their way from the file to the device: which tensor lies where.
 *
 * A *block* is what is uploaded, and later streamed, as one piece: block 0 holds the embedding and the last norm, block 1 + l layer l,
 * and, when the head is not tied, the last one holds the head.  Inside a block every matrix starts at a multiple of WEIGHTS_ALIGNMENT.
 */

#include "daemon/model/hparams.h"

#define WEIGHTS_ALIGNMENT 256 /* of every matrix in its block; OpenCL devices ask for at most 128 bytes */

typedef struct WeightsMatrix {
    const GgufTensor *tensor;
    uint32_t block, n_rows, n_cols;
    uint64_t offset;    /* bytes in the block */
    bool rotary;        /* q or k: rows go from adjacent to half-split pairs */
    bool norm;          /* a vector, as float32 */
} WeightsMatrix;

typedef enum WeightsPart {
    WEIGHTS_ATTN_NORM,
    WEIGHTS_Q,
    WEIGHTS_K,
    WEIGHTS_V,
    WEIGHTS_O,
    WEIGHTS_FFN_NORM,
    WEIGHTS_GATE,
    WEIGHTS_UP,
    WEIGHTS_DOWN,
    WEIGHTS_PART_X_MAX,
} WeightsPart;

typedef struct WeightsLayer {
    WeightsMatrix parts[WEIGHTS_PART_X_MAX];
} WeightsLayer;

typedef struct Weights {
    WeightsMatrix embedding, output_norm, output; /* output: the embedding's own place when tied */
    WeightsLayer *layers;                         /* (n_layers); owned */
    uint32_t n_layers, n_blocks;
    uint64_t *block_bytes;                        /* (n_blocks); owned */
    void **blocks;                                /* (n_blocks): packed, page aligned, NULL before packing; owned */
} Weights;
#define WEIGHTS_NULL ((Weights){.layers = NULL})

void weights_clear(Weights *weights);

/* Finds and checks every tensor, refuses unknown ones by name, and lays out the blocks.  0, MODEL_E_CORRUPT, MODEL_E_UNSUPPORTED or -ENOMEM. */
int weights_plan(const Gguf *gguf, const ModelParams *params, Weights *ret, ErrorDetail *reterr);
/* Repacks all blocks into host memory.  0, MODEL_E_HOST_MEMORY or negative errno. */
int weights_pack(Weights *weights, const ModelParams *params, ErrorDetail *reterr);
/* Gives back the host memory of a block that has been uploaded. */
void weights_release_block(Weights *weights, uint32_t block);
uint64_t weights_total_bytes(const Weights *weights);
