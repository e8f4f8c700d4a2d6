#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A sequence's past to and from an image (cache/kv-image.h), layer by layer, so that it goes on with the same bits in any store of the same
 * layers and forms, whatever its growth, home, ring and budgets are.
 *
 *   pages   of each layer in the order of positions, as they are at home; of a window those in sight
 *   tail    of each layer, in full precision; the state, when layers have one
 *   extra   bytes of the caller's: the token ids
 * In compatibility mode there are no pages; saved is what it keeps instead (kv-file-host.c), and where its schedule is.
 * Not saved: checkpoints, recordings.  What a restored sequence can crop back to is its tail.
 *
 * Saving takes references, so the sequence goes on meanwhile: kv_save_begin() and kv_save_end() belong to the engine thread,
 * kv_save_write() to any.  Pages at home on the device are downloaded first.
 */

#include "cache/kv-image.h"
#include "cache/kv-store.h"

typedef struct KvSave KvSave;

/* The fingerprint of what bytes mean here: layers, shapes, forms, calibration. */
uint64_t kv_store_layout(const KvStore *store);

/* @cache NULL: the extra alone is saved, an image without tokens.  @extra: copied.  KvError or negative errno; -EBUSY in a pass. */
int kv_save_begin(KvCache *cache, const uint8_t model[static KV_IMAGE_DIGEST], const void *extra, size_t n_extra, KvSave **ret,
                  ErrorDetail *reterr);
uint64_t kv_save_bytes(const KvSave *save);
int kv_save_write(const KvSave *save, int fd);
KvSave *kv_save_end(KvSave *save); /* takes NULL, returns NULL */
DEFINE_CLEANUP(KvSave, kv_save_end)

/* A new cache of @store from an opened image, whose facts agree with the store.  KvError, -EBADMSG when it does not add up; then nothing
 * has changed. */
int kv_restore(KvStore *store, const KvImage *image, KvCache **ret, ErrorDetail *reterr);
/* What was saved with it; part of the image. */
const void *kv_image_extra(const KvImage *image, size_t *ret_n);
