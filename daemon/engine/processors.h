#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What changes the scores of the next token before one is chosen.
 *
 * The order for beams is that of Transformers (and each does what its namesake there does):
 *   repetition penalty, no repeated n-grams, bad words, minimum of new tokens;
 *   and only when tokens are drawn: temperature, top-k, top-p, min-p, which always leave @min_keep tokens.
 * A single sequence takes the first four from here too, but for the penalty (sampler.h: of the last tokens only), and has its own order for
 * the rest.
 *
 * Scores are logits or log-probabilities; forbidden means -INFINITY.
 */

#include "daemon/engine/engine.h"

/* @history: prompt and answer so far (n); ids outside the vocabulary are skipped.  A score below 0 is multiplied by the penalty, another
 * divided, once for every token that occurs.  @scratch: (n_vocab). */
void processors_penalise(float *scores, uint32_t n_vocab, const int32_t *history, size_t n, float penalty, float *scratch);
/* Forbids what would make the last @size tokens occur a second time. */
void processors_no_repeat_ngram(float *scores, uint32_t n_vocab, const int32_t *history, size_t n, uint32_t size);
/* Forbids the last token of each of @words (ids, each ended by -1) whose beginning the history ends with.  A word that is one of @eos alone
 * is skipped. */
void processors_bad_words(float *scores, uint32_t n_vocab, const int32_t *history, size_t n, const int32_t *words, size_t n_word_ids,
                          const int32_t *eos, uint32_t n_eos);
void processors_forbid(float *scores, uint32_t n_vocab, const int32_t *ids, uint32_t n_ids);

/* Temperature, top-k, top-p and min-p of @sampling.  @scratch: (n_vocab). */
void processors_warp(float *scores, uint32_t n_vocab, const EngineSampling *sampling, uint32_t min_keep, float *scratch);

typedef struct ProcessorsState {
    const EngineSampling *sampling;
    const int32_t *eos;       /* (n_eos) end tokens in effect */
    uint32_t n_eos;
    const int32_t *bad_words; /* (n_bad_words) ids, each word ended by -1 */
    size_t n_bad_words;
    size_t n_prompt;          /* of the history */
    bool draws;               /* tokens are drawn */
} ProcessorsState;
/* The three of the list after the penalty, for any sequence. */
void processors_forbid_all(float *scores, uint32_t n_vocab, const int32_t *history, size_t n, const ProcessorsState *state);
/* All of them, in the order of the head, for beams: what is drawn from keeps one token more than there are end tokens, two at least. */
void processors_run(float *scores, uint32_t n_vocab, const int32_t *history, size_t n, const ProcessorsState *state, float *scratch);
