#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* A device and a model for tests: opened or the program ends with the reason. */

#include "tests/lib/oracle.h"

/* The first device that the ICD loader offers, with binaries cached in LEAT_TEST_CACHE when that is set; LEAT_TEST_DEBUG shows where
 * errors come from. */
Gpu *rig_open_gpu(void);
/* @path: a GGUF file; @state_dir may be NULL.  The options' zeros are the model's defaults. */
Model *rig_open_model(Gpu *gpu, const char *path, const char *state_dir, ModelOptions options);
/* A fixture of the data folder. */
void rig_path(const char *name, char *ret, size_t size);
KvStore *rig_new_store(Model *model, const KvPolicy *policy);

/* A way to keep the cache; every exact one must give the same bits. */
typedef struct RigPolicy {
    const char *name;
    KvStrategy strategy;
    KvTransfer transfer;
    uint32_t n_slots, tile_blocks; /* 0: the preset's */
} RigPolicy;
KvPolicy rig_policy(const RigPolicy *policy, bool exact);

/* Runs ids in passes of @chunk tokens in a cache of its own; @ret_logits: (n_wanted, n_vocab) of the last rows.  Ends the program on errors. */
void rig_run(Model *model, KvStore *store, const int32_t *ids, uint32_t n_ids, uint32_t chunk, uint32_t n_wanted, float *ret_logits);
/* Pseudo-random ids below @n_vocab, the same for the same seed. */
void rig_random_ids(uint32_t seed, uint32_t n_vocab, int32_t *ret, uint32_t n);
