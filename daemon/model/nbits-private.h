#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What nbits.c and nbits-measure.c share: the file of a model's measured bits. */

#include "daemon/model/model-private.h"
#include "daemon/model/nbits.h"
#include "daemon/model/state-file.h"

#define NBITS_RECIPE_BYTES 160
#define NBITS_PLACE(entry) ((entry)->k_bits * (KV_MAX_BITS + 1) + (entry)->v_bits)

/* All numbers of one recipe, whatever the budget and the sides that were free. */
struct NbitsKept {
    char recipe[NBITS_RECIPE_BYTES];
    float rounding; /* negative: not measured */
    float kld[(KV_MAX_BITS + 1) * (KV_MAX_BITS + 1)]; /* by NBITS_PLACE; negative: none, or refused */
};

/* Candidates of the form of @policy with the numbers that are kept. */
int nbits_load(const ModelFile *file, bool exact, const KvPolicy *policy, NbitsKept *ret_kept, NbitsTable *ret, ErrorDetail *reterr);
/* Adds the table's numbers to @kept, which stays with the file and, when there is a state directory, on disk. */
void nbits_keep(ModelFile *file, NbitsKept *kept, const NbitsTable *table);
