#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* A model of the shape and weight types of another, with fewer layers and weights of zero: what a pass takes does not depend on values. */

#include "daemon/model/model-private.h"
#include "daemon/model/speed-probe.h"

/* It, with a store and a sequence, when it has them. */
typedef struct SpeedZeros {
    Gpu *gpu;
    Model *model;
    KvStore *store;
    KvCache *cache;
    float *logits;
    int32_t *ids; /* zeros */
} SpeedZeros;

/* @n_layers of them and @head_bytes of the head; @weights: which of these stay on the device.  A code of model_new(); then, too, it is to be
 * ended. */
int speed_zeros_begin(SpeedZeros *zeros, const ModelFile *file, const ModelFit *fit, uint32_t n_layers, uint64_t head_bytes,
                      ModelWeights weights, ErrorDetail *reterr);
/* A store, instead of the one before, and an empty sequence of up to @max_tokens.  The form is the policy's; pages are where kernels read them,
 * or with @tiles where the plan has them, whose tiles stream through a ring like the plan's.  A code of model_store_new(). */
int speed_zeros_store(SpeedZeros *zeros, const ModelFit *fit, bool tiles, uint32_t max_tokens, ErrorDetail *reterr);
void speed_zeros_end(SpeedZeros *zeros);
