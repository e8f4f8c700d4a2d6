#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sequences of a job that has several: beams, draws of one prompt, prompts of one call.
 *
 * Each live prompt has n_sequences sequences, each with the ids that it consists of so far and a cache that holds a prefix of them.  The
 * first sequence runs the prompt alone; where the prompt ends the others fork from it, so the prompt is run once and its pages are kept
 * once.  A step needs the logits after the last id of every sequence; they come from as many passes as it takes (a pass has at most the
 * model's `parallel` sequences).  What a row says does not depend on who shares its pass, so neither does the result.
 *
 * When the best continuations are chosen, new beam j goes on from the cache of its source: the first that continues a source takes its
 * cache over, every further one gets a fork, and caches that nobody continues are freed first.
 *
 * All caches may be taken away at any token boundary.  The ids stay: the prompt is run again by one, forked, and each sequence runs its own
 * tokens again, with the same result.
 *
 * Prompts take their turns: as many are live as have BATCH_MAX_LIVE sequences together, at least one.
 */

#include "daemon/engine/job.h"
#include "daemon/engine/processors.h"

#define BATCH_MAX_LIVE 64

typedef struct StoreSlot StoreSlot;

typedef struct BatchSequence {
    TokenList ids;   /* prompt and answer */
    KvCache *cache;  /* of the first ids; NULL: cold */
    bool taken;      /* its logits of this step were seen */
    bool ended;
    Sampler *sampler; /* without beams */
    TextStream *stream;
    char stop_reason[24];
} BatchSequence;

typedef struct BatchPrompt {
    TokenList ids;
    BeamSearch *search;       /* with beams, while live */
    BatchSequence *sequences; /* (n_sequences) while live, else NULL */
    uint32_t n_steps;
    uint32_t fork_tokens; /* where it leaves what came before it: a place that others may come back to; 0: nowhere */
    uint32_t n_reused;    /* tokens that others had run */
    bool ended;
    EngineSequence *results;  /* (n_results), owned until the job ends */
    size_t n_results;
} BatchPrompt;

typedef struct Batch {
    Job *job;               /* borrowed: it owns this */
    const Tokenizer *tokenizer;
    KvPolicy policy;
    StoreSlot *store;       /* of the caches; NULL: there are none */
    uint32_t n_sequences, n_vocab, context;
    BatchPrompt *prompts;
    size_t n_prompts;
    BatchSequence *next;    /* (n_sequences) while beams are reordered */
    float *row, *scratch;   /* (n_vocab) */
    char *bytes;            /* of the end of a sequence, for stop strings */
    size_t bytes_capacity;
    const BatchPrompt *judged; /* whose candidates are looked at */
} Batch;

/* @prompts (n, its lists' ids) are taken, also on failure. */
int batch_new(Job *job, const Tokenizer *tokenizer, const KvPolicy *policy, TokenList *prompts, size_t n_prompts, uint32_t n_vocab,
              Batch **ret, ErrorDetail *reterr);
Batch *batch_free(Batch *batch);
DEFINE_CLEANUP(Batch, batch_free)

/* Forgets all caches, keeps the ids. */
void batch_drop_caches(Batch *batch);
/* Empties those of a prompt: each of its sequences runs all that it has again. */
void batch_clear_caches(Batch *batch, BatchPrompt *prompt);
bool batch_has_cache(const Batch *batch);
/* Sums over all caches; pages that forks share count once, about. */
void batch_bytes(const Batch *batch, KvBytes *ret);

/* Makes prompts live whose turn has come. */
int batch_open_prompts(Batch *batch, ErrorDetail *reterr);
/* The logits after the last id of @sequence of @prompt, changed; as long as nothing was generated they are those of all its sequences. */
int batch_take(Batch *batch, BatchPrompt *prompt, uint32_t sequence, float *logits, ErrorDetail *reterr);
/* Whether all sequences of the prompt have had theirs. */
bool batch_step_is_complete(const Batch *batch, const BatchPrompt *prompt);
/* Chooses tokens, reorders; the prompt may end.  KvError, negative errno. */
int batch_step(Batch *batch, BatchPrompt *prompt, ErrorDetail *reterr);
bool batch_is_over(const Batch *batch);
/* Moves all results to @event, by prompt; *ret_n_tokens: of them all. */
int batch_take_results(Batch *batch, EngineEvent *event, uint32_t *ret_n_tokens);
