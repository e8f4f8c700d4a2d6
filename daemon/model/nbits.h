#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `nbits: auto`: the cheapest K and V bits of a coded cache form that keep the divergence they add within a budget.
 *
 * What is measured: the model runs over a built-in text under a store in f16, then under a store of each candidate; a candidate's number is
 * the mean KL divergence of its distributions from those of the f16 run, over the positions that see most of their keys coded.  All runs are
 * the model's own, in its own compute mode.  Compute `fast` rounds activations, and any change of the cache makes it round others
 * differently: that alone moves the distributions (0.0005 with SmolLM2), though not away from the truth.  It is measured by a run under a
 * store in f32 and taken off, as divergences of independent causes add up.
 *
 * The candidates are the bits that kv_form_check() allows for the form, both sides apart.  More bits on a side never do worse, so one that is
 * beyond the budget settles all that have no more bits on either side, and one within it all that are no cheaper.  Measured is each time the
 * one that settles most, whichever way it ends: five to seven of 36.  Those that were not needed have no number.
 *
 * Cost, once for a model (by its digest), compute mode and recipe: a pass over NBITS_TOKENS tokens for the f16 run, the f32 run and each
 * candidate, with logits of the later two thirds (a second each for SmolLM2 on two cores), and the kernels of each, compiled once for a
 * device.  The f16 run's distributions are kept in host memory meanwhile, but for the unlikeliest ten-thousandth of each, which counts as
 * one: some tens of MB.  Numbers are kept in STATE_DIR/bits as they come; another budget measures only what it needs beyond them.
 */

#include "daemon/model/model.h"

#define NBITS_TOKENS     768
#define NBITS_MAX        36     /* candidates */
#define NBITS_AT_TOKENS  8192   /* true bits are those of a cache of so many tokens */
#define NBITS_NO_CHOICE  UINT32_MAX

typedef enum NbitsState {
    NBITS_OPEN,     /* not measured */
    NBITS_MEASURED,
    NBITS_REFUSED,  /* the model cannot have a cache of it */
} NbitsState;

typedef struct NbitsEntry {
    uint8_t k_bits, v_bits;
    NbitsState state;
    double true_bits; /* a cached value, everything counted; of a model's table the mean of its layers, those with bits of their own among them */
    double kld;       /* measured: added by the cache */
    char reason[120]; /* refused: why */
} NbitsEntry;

typedef struct NbitsTable {
    uint32_t n;
    double rounding; /* what another rounding of the activations alone makes; negative: not measured yet */
    NbitsEntry entries[NBITS_MAX]; /* the cheapest first, then the more bits for K first */
} NbitsTable;

/* ---- the search; no model is needed */

/* All candidates of @form, whose sides of KV_BITS_AUTO are free and the others fixed, none measured.  -EINVAL when there is none. */
int nbits_table_init(NbitsTable *table, KvForm form, const KvShape *shape, ErrorDetail *reterr);
/* The place of the candidate to measure next; false: none is needed any more, or none is left. */
bool nbits_next(const NbitsTable *table, double budget, uint32_t *ret);
/* When nbits_next() is false: the cheapest within the budget, of equally cheap ones the closest; when none is within it, the one with most
 * bits.  Else, and when all are refused, NBITS_NO_CHOICE. */
uint32_t nbits_choice(const NbitsTable *table, double budget);

/* ---- of a model */

/* What is known of the form of @policy.  Any thread.  @ret: the table; 0 or -EINVAL. */
int model_nbits_table(const ModelFile *file, bool exact, const KvPolicy *policy, NbitsTable *ret, ErrorDetail *reterr);
/* A policy to plan with: automatic bits become those that were chosen, or, before that was measured, the backend's usual ones (then
 * *ret_known is false).  Any thread. */
KvPolicy model_nbits_resolve(const ModelFile *file, bool exact, const KvPolicy *policy, bool *ret_known);

/* A measurement in work: a step is one pass of a few rows, so that others can have the device between two. */
typedef struct Nbits Nbits;
/* Engine thread, between passes.  @model is borrowed; it must be calibrated if the form wants that. */
int nbits_new(Model *model, const KvPolicy *policy, Nbits **ret, ErrorDetail *reterr);
Nbits *nbits_free(Nbits *nbits);
DEFINE_CLEANUP(Nbits, nbits_free)
/* One pass; *ret_done: nothing is left to measure, and it is kept.  ModelError. */
int nbits_step(Nbits *nbits, bool *ret_done, ErrorDetail *reterr);

/* The built-in text. */
extern const char model_nbits_text[];
