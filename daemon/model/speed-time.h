#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Passes of a model of zeros, timed. */

#include "daemon/model/speed-zeros.h"

/* Tokens of a sequence that the timing of pasts needs room for. */
extern const uint32_t SPEED_TIME_TOKENS;

/* At the beginning of a sequence: a token with logits, and a chunk of as many rows as the model takes. */
typedef struct SpeedTimes {
    double token, chunk;
} SpeedTimes;

/* Passes without logits after pasts of different lengths.  The first ones are of a sequence that completes no page; the others are fewer where
 * the context or the device is short. */
typedef struct SpeedDepths {
    uint32_t n, tokens_at[MODEL_SPEED_PASTS], chunk_at; /* chunk_at 0: no chunk was timed */
    double token[MODEL_SPEED_PASTS], chunk;
    double token_kernels[MODEL_SPEED_PASTS], chunk_kernels; /* of these the time during which kernels ran, as the device says */
    double copy_rates[MODEL_SPEED_PASTS]; /* bytes a second of what streamed in beside the tokens; 0: nothing did */
} SpeedDepths;

/* Of one row, as in @ret->token. */
int speed_time_token(SpeedZeros *zeros, double *ret, ErrorDetail *reterr);
int speed_time_beginning(SpeedZeros *zeros, SpeedTimes *ret, ErrorDetail *reterr);
/* The first @n_most of them. */
int speed_time_depths(SpeedZeros *zeros, uint32_t n_most, SpeedDepths *ret, ErrorDetail *reterr);
/* Copies of all parts of the weights that stream, and nothing else: bytes a second. */
int speed_time_copies(SpeedZeros *zeros, double *ret_rate, ErrorDetail *reterr);
