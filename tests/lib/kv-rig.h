#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device with a model without weights on it (tests/lib/kv-bench.h), and what tests of stores and of saved
 * sequences do with both.  What does not work ends the test and says why.
 */

#include "cache/kv-file.h"
#include "tests/lib/kv-bench.h"

typedef struct KvRig {
    Gpu *gpu;
    KvBench bench;
    KvStream *cold[KV_FORM_X_MAX]; /* by kv_rig_run_cold(): what the others must equal */
} KvRig;

/* @max_sequences: tail slots of its stores. */
KvRig *kv_rig_new(uint32_t max_sequences);
KvRig *kv_rig_free(KvRig *rig); /* returns NULL */

KvStore *kv_rig_store(KvRig *rig, const KvPolicy *policy);
KvCache *kv_rig_cache(KvStore *store);
/* Runs @n_tokens of a fresh cache of a fresh store, in passes of @chunk, and keeps them in rig->cold[kind].
 */
void kv_rig_run_cold(KvRig *rig, KvFormKind kind, const KvPolicy *policy, uint32_t seed, uint32_t n_tokens,
                     uint32_t chunk);
/* Of the outputs of a stream's first tokens. */
size_t kv_rig_out_bytes(const KvRig *rig, uint32_t n_tokens);

/* ---- saved sequences ------------------------------------------------------------------------------- */

/* Files of one made-up model.  @extra: a text that lies beside the tokens. */
KvSave *kv_rig_save_begin(KvCache *cache, const char *extra);
/* Takes the save; a new file. */
int kv_rig_save_end(KvSave *save);
int kv_rig_save(KvCache *cache, const char *extra);
/* What kv_image_open() gives; @map: it keeps to the file. */
int kv_rig_open(const KvStore *store, int fd, bool map, KvImage **ret, ErrorDetail *reterr);
/* The same, and it must open. */
KvImage *kv_rig_image(const KvStore *store, int fd, bool map);
/* A new file, with hashes that agree, where @chunk has another number @at, or with @cut lacks its last byte.
 */
int kv_rig_forge(const KvImage *image, const KvImageChunk *chunk, size_t at, uint32_t value, bool cut);
