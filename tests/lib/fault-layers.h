#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model that is layers of every kind and no weights, for fault scripts: queries, keys, values, encoder output and states follow from a
 * token's id, its position and the layer.  While something is to fail nothing here allocates.
 */

#include "tests/lib/random-world.h"

/* Numbers of the forms that random_form() makes. */
enum { FAULT_FORM_LEAT, FAULT_FORM_F16, FAULT_FORM_F32 };
/* As RandomLayer.form has it: not the policy's. */
#define FAULT_OWN_FORM(form) ((form) + 1)

typedef struct FaultLayers FaultLayers;

/* @config: borrowed. */
int fault_layers_new(Gpu *gpu, const RandomConfig *config, FaultLayers **ret, ErrorDetail *reterr);
FaultLayers *fault_layers_free(FaultLayers *layers);
/* A store of these layers under the policy of @config. */
int fault_layers_store(const FaultLayers *layers, const RandomConfig *config, KvStore **ret, ErrorDetail *reterr);

typedef struct FaultItem {
    KvCache *cache;
    const int32_t *ids; /* of the whole sequence */
    uint32_t n_tokens;  /* after those that are there */
    uint32_t encoder;   /* which encoder output */
} FaultItem;

/* A pass; @ret: (n_items, stride), two numbers a layer: the bits of the last token's output, folded.  A state that is not that of the tokens
 * before ends the test. */
int fault_layers_forward(FaultLayers *layers, KvStore *store, const FaultItem *items, uint32_t n_items, float *ret, size_t stride,
                         ErrorDetail *reterr);
/* So many tokens more of encoder output. */
int fault_layers_encode(FaultLayers *layers, KvStore *store, const FaultItem *item, ErrorDetail *reterr);
