#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The weights of a model on their way from the file to the device: which tensor lies where.
 *
 * The *image* holds every matrix in the device's layout, in blocks.  A block is what stays on the device, is read in place, or streams:
 *     0          all norms, as float32: always on the device
 *     1          the embedding, which is the head as well when that is tied
 *     2 + s      *span* s of n_layers + 1: what a pass multiplies with between two attentions, so that one launch needs one block:
 *                o, gate, up and down of layer s - 1, then q, k and v of layer s
 *     the last   the head, when it is not tied
 * A block begins at a multiple of WEIGHTS_BLOCK_ALIGNMENT of the image, inside a block every matrix at one of WEIGHTS_ALIGNMENT.
 *
 * The image lies in anonymous memory, or is a mapped file (weights-file.h).
 */

#include "daemon/model/hparams.h"

#define WEIGHTS_ALIGNMENT       256   /* OpenCL devices ask for at most 128 bytes */
#define WEIGHTS_BLOCK_ALIGNMENT 65536 /* the largest page of a machine that we know: blocks are read in place and given back alone */

#define WEIGHTS_BLOCK_NORMS     0
#define WEIGHTS_BLOCK_EMBEDDING 1
#define WEIGHTS_BLOCK_SPANS     2

typedef struct WeightsMatrix {
    const GgufTensor *tensor;
    uint32_t block, n_rows, n_cols;
    uint64_t offset;     /* bytes in the block */
    uint64_t tile_bytes; /* of WEIGHT_TILE_ROWS rows; 0: a norm */
    bool rotary;         /* q or k: rows go from adjacent to half-split pairs */
    bool norm;           /* a vector, as float32 */
} WeightsMatrix;

typedef enum WeightsTensor {
    WEIGHTS_ATTN_NORM,
    WEIGHTS_Q,
    WEIGHTS_K,
    WEIGHTS_V,
    WEIGHTS_O,
    WEIGHTS_FFN_NORM,
    WEIGHTS_GATE,
    WEIGHTS_UP,
    WEIGHTS_DOWN,
    WEIGHTS_TENSOR_X_MAX,
} WeightsTensor;

typedef struct WeightsLayer {
    WeightsMatrix tensors[WEIGHTS_TENSOR_X_MAX];
} WeightsLayer;

typedef struct WeightsBlock {
    uint64_t offset, bytes; /* in the image */
    bool absent;            /* given back, and nothing would bring it back */
} WeightsBlock;

typedef struct Weights {
    WeightsMatrix embedding, output_norm, output; /* output: the embedding's own place when tied */
    WeightsLayer *layers;                         /* (n_layers); owned */
    uint32_t n_layers, n_blocks;
    WeightsBlock *blocks;                         /* (n_blocks); owned */
    uint64_t image_bytes;
    uint8_t *image;                               /* page aligned; NULL before there is one; owned, inside of @mapping */
    void *mapping;
    uint64_t mapping_bytes;
    bool mapped;                                  /* a file: blocks that are given back can be read again */
} Weights;
#define WEIGHTS_NULL ((Weights){.layers = NULL})

void weights_clear(Weights *weights);

/* Finds and checks every tensor, refuses unknown ones by name, and lays out the blocks.  0, MODEL_E_CORRUPT, MODEL_E_UNSUPPORTED or -ENOMEM. */
int weights_plan(const Gguf *gguf, const ModelParams *params, Weights *ret, ErrorDetail *reterr);
/* An image in anonymous memory.  0 or MODEL_E_HOST_MEMORY. */
int weights_new_image(Weights *weights, ErrorDetail *reterr);
/* Repacks the tensors into the image.  0 or -ENOMEM. */
int weights_pack(const Weights *weights, const ModelParams *params);
/* Gives back the host memory of a block that has been uploaded. */
void weights_release_block(Weights *weights, uint32_t block);
/* The bytes of a block, NULL when they are gone. */
const uint8_t *weights_block(const Weights *weights, uint32_t block);
const void *weights_matrix(const Weights *weights, const WeightsMatrix *matrix);
/* Of all blocks, without what lies between them. */
uint64_t weights_total_bytes(const Weights *weights);

static inline uint32_t weights_n_spans(const Weights *weights)
{
    return weights->n_layers + 1;
}

static inline bool weights_tied(const Weights *weights)
{
    return weights->output.block == WEIGHTS_BLOCK_EMBEDDING;
}
