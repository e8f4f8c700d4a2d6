#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From logits to one token.
 *
 * The order is fixed and documented, because users tune against it:
 *   1. repeat penalty over the last SAMPLER_PENALTY_TOKENS tokens (a positive logit is divided by it, a negative one multiplied); then what no-repeat-ngram,
 *      bad-words and min-tokens forbid;
 *   2. temperature 0: the largest logit wins, the lower id when two are equal; nothing below applies;
 *   3. top-k keeps the k largest (0: all);
 *   4. top-p keeps the fewest, largest first, whose probabilities sum to at least p (1: all; at least one stays);
 *   5. min-p keeps what has at least min_p times the probability of the best (0: all);
 *   6. temperature scales what is left, and one draw picks.
 * Steps 3 to 5 see probabilities at temperature 1, each renormalised over what the step before left, so a high temperature flattens
 * the choice among plausible tokens and never lets implausible ones in.
 *
 * The n-th draw depends on the seed and on n only: the same seed gives the same text.
 *
 * Beams have the order of processors.h instead, and the penalty over the whole sequence.
 *
 * Cost: a few passes over the vocabulary; the best are found by selection, never by sorting all of it.
 */

#include "daemon/engine/processors.h"

#define SAMPLER_PENALTY_TOKENS 64

typedef struct Sampler Sampler;

typedef enum SamplerError {
    SAMPLER_E_OK,
    SAMPLER_E_NUMERIC, /* a logit is NaN or infinite: which one is in the detail */
} SamplerError;

/* Whether the values make sense: -EINVAL with the option's name and value in the detail. */
int sampler_check(const EngineSampling *sampling, ErrorDetail *reterr);

/* @seed is the one in effect, not 0. */
int sampler_new(const EngineSampling *sampling, uint64_t seed, uint32_t n_vocab, Sampler **ret, ErrorDetail *reterr);
Sampler *sampler_free(Sampler *sampler);
DEFINE_CLEANUP(Sampler, sampler_free)

/* What is forbidden from now on; what @state points at is kept borrowed. */
void sampler_constrain(Sampler *sampler, const ProcessorsState *state);

/* 0, or SAMPLER_E_NUMERIC. */
int sampler_check_finite(const float *logits, uint32_t n, ErrorDetail *reterr);

/* @logits: (n_vocab), changed in place.  @history: the sequence so far, oldest first. */
int sampler_pick(Sampler *sampler, float *logits, const int32_t *history, size_t n_history, int32_t *ret_token, ErrorDetail *reterr);

/* The @index-th number in [0, 1) of a seed. */
double sampler_uniform(uint64_t seed, uint64_t index);
