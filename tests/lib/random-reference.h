#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What attention must give, in double, by a model that keeps every token of every sequence: keys and values as the tail holds them,
 * and each page as the C reference packs and decodes it.  A query sees a key packed or not by positions only (opencl/attend.h).
 *
 * A token is an id; queries, keys and values depend on id, position and layer alone.  A sequence can be copied and cut.
 */

#include "tests/lib/random-program.h"

typedef struct Reference Reference;

typedef struct RefSequence {
    const Reference *reference;
    uint32_t n_tokens;
    uint32_t ids[RANDOM_MAX_TOKENS];
    uint64_t hashes[RANDOM_MAX_TOKENS]; /* of all ids up to here, encoder output included */
    uint32_t n_cross;                   /* tokens of encoder output */
    uint64_t cross_hash;
    struct RefLayer *layers;            /* (n_layers); layers without keys of their own have none */
} RefSequence;

/* Out of memory ends the program, here and below. */
Reference *reference_new(const RandomConfig *config);
Reference *reference_free(Reference *reference);
DEFINE_CLEANUP(Reference, reference_free)

/* Values that a layer takes and gives for a token; what it takes are queries, and keys and values before RoPE unless they are those of
 * encoder output. */
uint32_t reference_row_values(const Reference *reference, uint32_t layer);
uint32_t reference_out_values(const Reference *reference, uint32_t layer);
const float *reference_inv_freq(const Reference *reference, uint32_t layer); /* (rotary_dim / 2) */
const KvCalibration *reference_calibration(const Reference *reference); /* (n_layers) or NULL */
void reference_row(const Reference *reference, uint32_t layer, uint32_t id, uint32_t position, float *ret);
/* Keys, then values of encoder output; 0 values where a layer keeps none. */
uint32_t reference_cross_values(const Reference *reference, uint32_t layer);
void reference_cross_row(const Reference *reference, uint32_t layer, uint32_t id, uint32_t position, float *ret);
/* A state after the tokens that hash to @hash (0: none), @n_bytes; @which: 0 convolution, 1 recurrent. */
void reference_state(uint32_t layer, uint32_t which, uint64_t hash, uint8_t *ret, uint32_t n_bytes);

RefSequence *ref_sequence_new(const Reference *reference);
RefSequence *ref_sequence_copy(const RefSequence *from);
RefSequence *ref_sequence_free(RefSequence *sequence);
DEFINE_CLEANUP(RefSequence, ref_sequence_free)
void ref_sequence_append(RefSequence *sequence, uint32_t id);
void ref_sequence_append_cross(RefSequence *sequence, uint32_t id);
/* The hash with @n of these ids behind it; of no tokens 0. */
uint64_t ref_sequence_hash(const RefSequence *sequence, const uint32_t *ids, uint32_t n);
void ref_sequence_cut(RefSequence *sequence, uint32_t n_tokens);

/* The output of a layer at a position that the sequence has: (n_heads, v_head_dim). */
void ref_sequence_attend(RefSequence *sequence, uint32_t layer, uint32_t position, double *ret);
