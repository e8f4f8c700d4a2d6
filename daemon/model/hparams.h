#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What a GGUF file says about its network, checked. */

#include "daemon/model/model.h"

#define HPARAMS_MAX_ROTARY_PAIRS 128 /* half of the widest rotary part */

typedef struct HParams {
    ModelParams model;
    float inv_freq[HPARAMS_MAX_ROTARY_PAIRS]; /* (rotary_dim / 2), scaling applied */
} HParams;

/* 0, MODEL_E_CORRUPT, MODEL_E_UNSUPPORTED; the detail names the key. */
int hparams_read(const Gguf *gguf, HParams *ret, ErrorDetail *reterr);
