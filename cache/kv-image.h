#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The container of a sequence's past in a file: a header, a table of chunks, the chunks.  Nothing here knows what a chunk means.
 *
 *   header   "leatkv", version, sizes, digest of the model, fingerprint of how bytes are laid out, tokens; then the table; both under one hash
 *   chunk    kind and two numbers that say what it is, its place, its length and the XXH3 hash of its bytes; in ascending order of place,
 *            each at a multiple of KV_IMAGE_ALIGN, nothing overlaps, the last one ends the file
 * Little endian, as the machines are.
 *
 * Files are untrusted: every number is checked before it is used, every byte (by hash, padding for being zero) before kv_image_open()
 * returns, and the header before memory is taken for the rest.  A descriptor that
 * somebody else may write to or cut is read into memory of our own; only our own files are mapped.
 *
 * Making and writing are two steps, so that one thread can say what is to be written and another one write it.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define KV_IMAGE_VERSION    1
#define KV_IMAGE_ALIGN      4096
#define KV_IMAGE_MAX_CHUNKS 65536
#define KV_IMAGE_DIGEST     32 /* bytes of a model's digest */

typedef enum KvImageError {
    KV_IMAGE_E_OK,
    KV_IMAGE_E_DAMAGED,   /* the detail says what and where */
    KV_IMAGE_E_DIFFERENT, /* whole, but of another version, model or layout */
} KvImageError;

typedef struct KvImageFacts {
    uint8_t model[KV_IMAGE_DIGEST];
    uint64_t layout;   /* fingerprint: equal numbers, equal meaning of every byte; of no matter when there are no tokens */
    uint32_t n_tokens;
    uint64_t max_bytes; /* expected: a larger file is refused before it is read; 0: any */
} KvImageFacts;

typedef struct KvImageChunk {
    uint32_t kind, a, b;
    uint64_t bytes;
    const void *data;     /* of an opened image: in it; of a made one: NULL */
    struct iovec *pieces; /* of a made one: where its bytes are now */
    uint32_t n_pieces;
} KvImageChunk;

typedef struct KvImage {
    KvImageFacts facts;
    KvImageChunk *chunks;
    uint32_t n_chunks, capacity;
    void *memory; /* of an opened image */
    size_t memory_bytes;
    bool mapped;
} KvImage;

KvImage *kv_image_new(const KvImageFacts *facts);
KvImage *kv_image_free(KvImage *image);
DEFINE_CLEANUP(KvImage, kv_image_free)

/* Appends a chunk, then pieces of it; their memory is borrowed until the image has been written.  -ENOMEM or -E2BIG. */
int kv_image_chunk(KvImage *image, uint32_t kind, uint32_t a, uint32_t b);
int kv_image_piece(KvImage *image, const void *data, size_t bytes);

/* Bytes of the file. */
uint64_t kv_image_bytes(const KvImage *image);
/* Writes the whole file to @fd from where it stands.  Any thread.  Negative errno. */
int kv_image_write(const KvImage *image, int fd);
/* Any thread.  @expected: the facts that must hold, tokens aside.  With @map the file is mapped, else read.  @path names it in the
 * detail.  KvImageError or negative errno. */
int kv_image_open(int fd, const char *path, const KvImageFacts *expected, bool map, KvImage **ret, ErrorDetail *reterr);
/* The chunk, or NULL. */
const KvImageChunk *kv_image_find(const KvImage *image, uint32_t kind, uint32_t a, uint32_t b);
