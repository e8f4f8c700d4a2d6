/* SPDX-License-Identifier: Apache-2.0 */
/* Writing and checked reading of images. */

#include "cache/kv-image.h"
#include "quant/base/checked.h"

#include <assert.h>
#include <limits.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

static const char image_magic[8] = {'l', 'e', 'a', 't', 'k', 'v', '\r', '\n'};

/* Of the file.  The hash is that of the header with this field zero, and of the table. */
typedef struct ImageHeader {
    char magic[8];
    uint32_t version, n_chunks;
    uint64_t file_bytes, hash, layout;
    uint32_t n_tokens, reserved;
    uint8_t model[KV_IMAGE_DIGEST];
} ImageHeader;

typedef struct ImageEntry {
    uint32_t kind, a, b, reserved;
    uint64_t offset, bytes, hash;
} ImageEntry;

static_assert(sizeof(ImageHeader) == 80 && sizeof(ImageEntry) == 40, "no padding in the file");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file is little endian");

KvImage *kv_image_new(const KvImageFacts *facts)
{
    KvImage *image = calloc(1, sizeof(*image));

    if (image)
        image->facts = *facts;
    return image;
}

KvImage *kv_image_free(KvImage *image)
{
    if (!image)
        return NULL;
    for (uint32_t i = 0; i < image->n_chunks; i++)
        free(image->chunks[i].pieces);
    free(image->chunks);
    if (image->mapped)
        (void)munmap(image->memory, image->memory_bytes);
    else
        free(image->memory);
    free(image);
    return NULL;
}

int kv_image_chunk(KvImage *image, uint32_t kind, uint32_t a, uint32_t b)
{
    if (image->n_chunks == KV_IMAGE_MAX_CHUNKS)
        return error_origin(-E2BIG);
    if (image->n_chunks == image->capacity) {
        uint32_t capacity = image->capacity ? 2 * image->capacity : 64;
        KvImageChunk *chunks = reallocarray(image->chunks, capacity, sizeof(*chunks));

        if (!chunks)
            return error_origin(-ENOMEM);
        image->chunks = chunks;
        image->capacity = capacity;
    }
    image->chunks[image->n_chunks++] = (KvImageChunk){.kind = kind, .a = a, .b = b};
    return 0;
}

int kv_image_piece(KvImage *image, const void *data, size_t bytes)
{
    KvImageChunk *chunk = &image->chunks[image->n_chunks - 1];
    struct iovec *last = chunk->n_pieces > 0 ? &chunk->pieces[chunk->n_pieces - 1] : NULL, *pieces;

    chunk->bytes += bytes;
    if (last && (const char *)last->iov_base + last->iov_len == data) {
        last->iov_len += bytes;
        return 0;
    }
    if ((chunk->n_pieces & (chunk->n_pieces - 1)) == 0) {
        pieces = reallocarray(chunk->pieces, chunk->n_pieces ? 2 * (size_t)chunk->n_pieces : 1, sizeof(*pieces));
        if (!pieces)
            return error_origin(-ENOMEM);
        chunk->pieces = pieces;
    }
    chunk->pieces[chunk->n_pieces++] = (struct iovec){(void *)(uintptr_t)data, bytes};
    return 0;
}

/* ---- writing ---------------------------------------------------------------------------------------------------------- */

static uint64_t align_up(uint64_t bytes)
{
    return (bytes + KV_IMAGE_ALIGN - 1) & ~(uint64_t)(KV_IMAGE_ALIGN - 1);
}

/* Places the chunks; returns the size of the file. */
static uint64_t place_chunks(const KvImage *image, ImageEntry *entries)
{
    uint64_t end = sizeof(ImageHeader) + image->n_chunks * sizeof(ImageEntry);

    for (uint32_t i = 0; i < image->n_chunks; i++) {
        uint64_t offset = align_up(end);

        end = offset + image->chunks[i].bytes;
        if (entries)
            entries[i] = (ImageEntry){.kind = image->chunks[i].kind,
                                      .a = image->chunks[i].a,
                                      .b = image->chunks[i].b,
                                      .offset = offset,
                                      .bytes = image->chunks[i].bytes};
    }
    return end;
}

uint64_t kv_image_bytes(const KvImage *image)
{
    return place_chunks(image, NULL);
}

static int hash_chunk(const KvImageChunk *chunk, uint64_t *ret)
{
    XXH3_state_t *state = XXH3_createState();

    if (!state)
        return error_origin(-ENOMEM);
    (void)XXH3_64bits_reset(state);
    for (uint32_t i = 0; i < chunk->n_pieces; i++)
        (void)XXH3_64bits_update(state, chunk->pieces[i].iov_base, chunk->pieces[i].iov_len);
    *ret = XXH3_64bits_digest(state);
    (void)XXH3_freeState(state);
    return 0;
}

static uint64_t hash_table(ImageHeader header, const ImageEntry *entries)
{
    header.hash = 0;
    return XXH3_64bits(&header, sizeof(header)) ^ XXH3_64bits_withSeed(entries, header.n_chunks * sizeof(*entries), header.file_bytes);
}

static int write_all(int fd, struct iovec *pieces, size_t n)
{
    while (n > 0) {
        ssize_t done = writev(fd, pieces, (int)MIN(n, (size_t)IOV_MAX));

        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return error_origin(-errno);
        for (; n > 0 && (size_t)done >= pieces->iov_len; n--, pieces++)
            done -= (ssize_t)pieces->iov_len;
        if (n > 0) {
            pieces->iov_base = (char *)pieces->iov_base + done;
            pieces->iov_len -= (size_t)done;
        }
    }
    return 0;
}

/* The chunk after @pad zero bytes. */
static int write_chunk(int fd, const KvImageChunk *chunk, size_t pad)
{
    static char zeros[KV_IMAGE_ALIGN];
    _cleanup_(freep) struct iovec *pieces = calloc((size_t)chunk->n_pieces + 1, sizeof(*pieces));

    if (!pieces)
        return error_origin(-ENOMEM);
    pieces[0] = (struct iovec){zeros, pad};
    if (chunk->n_pieces > 0)
        memcpy(pieces + 1, chunk->pieces, chunk->n_pieces * sizeof(*pieces));
    return write_all(fd, pieces, (size_t)chunk->n_pieces + 1);
}

int kv_image_write(const KvImage *image, int fd)
{
    _cleanup_(freep) ImageEntry *entries = calloc(MAX(image->n_chunks, 1u), sizeof(*entries));
    ImageHeader header = {.version = KV_IMAGE_VERSION, .n_chunks = image->n_chunks, .layout = image->facts.layout,
                          .n_tokens = image->facts.n_tokens};
    struct iovec head[2] = {{&header, sizeof(header)}, {entries, image->n_chunks * sizeof(*entries)}};
    uint64_t end = sizeof(header) + image->n_chunks * sizeof(*entries);
    int r = 0;

    if (!entries)
        return error_origin(-ENOMEM);
    memcpy(header.magic, image_magic, sizeof(header.magic));
    memcpy(header.model, image->facts.model, sizeof(header.model));
    header.file_bytes = place_chunks(image, entries);
    for (uint32_t i = 0; i < image->n_chunks && r == 0; i++)
        r = hash_chunk(&image->chunks[i], &entries[i].hash);
    if (r)
        return error_trace(r);
    header.hash = hash_table(header, entries);
    r = write_all(fd, head, 2);
    for (uint32_t i = 0; i < image->n_chunks && r == 0; i++) {
        r = write_chunk(fd, &image->chunks[i], (size_t)(entries[i].offset - end));
        end = entries[i].offset + entries[i].bytes;
    }
    return r;
}

/* ---- reading ---------------------------------------------------------------------------------------------------------- */

static int read_all(int fd, void *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(fd, (char *)data + done, bytes - done, (off_t)done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_origin(-errno);
        if (n == 0)
            return KV_IMAGE_E_DAMAGED; /* it became shorter */
        done += (size_t)n;
    }
    return 0;
}

/* What a header says by itself; of a file of @bytes. */
static int check_header(const ImageHeader *header, uint64_t bytes, const char *path, const KvImageFacts *expected, ErrorDetail *reterr)
{
    if (memcmp(header->magic, image_magic, sizeof(header->magic)) != 0)
        return error_detail_set(reterr, KV_IMAGE_E_DAMAGED, "%s: not a saved cache", path);
    if (header->version != KV_IMAGE_VERSION)
        return error_detail_set(reterr, KV_IMAGE_E_DIFFERENT, "%s: version %u, this program reads %u", path, header->version,
                                KV_IMAGE_VERSION);
    if (header->file_bytes != bytes)
        return error_detail_set(reterr, KV_IMAGE_E_DAMAGED, "%s: %llu bytes instead of the %llu that were written", path,
                                (unsigned long long)bytes, (unsigned long long)header->file_bytes);
    if (header->n_chunks > KV_IMAGE_MAX_CHUNKS || header->n_chunks * sizeof(ImageEntry) > bytes - sizeof(ImageHeader))
        return error_detail_set(reterr, KV_IMAGE_E_DAMAGED, "%s: a table of %u chunks does not fit into it", path, header->n_chunks);
    if (expected->max_bytes > 0 && bytes > expected->max_bytes)
        return error_detail_set(reterr, KV_IMAGE_E_DAMAGED, "%s: %llu bytes, more than the %llu that may be read", path,
                                (unsigned long long)bytes, (unsigned long long)expected->max_bytes);
    return 0;
}

/* The file as memory: only once its header says that there is a reason to. */
static int load_file(int fd, const char *path, const KvImageFacts *expected, bool map, KvImage *image, ErrorDetail *reterr)
{
    ImageHeader header;
    struct stat status;
    int r;

    if (fstat(fd, &status) < 0)
        return error_detail_set(reterr, -errno, "%s: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        return error_detail_set(reterr, KV_IMAGE_E_DAMAGED, "%s: not an ordinary file", path);
    if (status.st_size < (off_t)sizeof(ImageHeader))
        return error_detail_set(reterr, KV_IMAGE_E_DAMAGED, "%s: %lld bytes, shorter than a header", path, (long long)status.st_size);
    image->memory_bytes = (size_t)status.st_size;
    r = read_all(fd, &header, sizeof(header));
    if (!r)
        r = check_header(&header, image->memory_bytes, path, expected, reterr);
    if (r)
        return r < 0 ? error_detail_set(reterr, r, "%s: %s", path, strerror(-r)) : r;
    if (map) {
        void *memory = mmap(NULL, image->memory_bytes, PROT_READ, MAP_PRIVATE, fd, 0);

        if (memory == MAP_FAILED)
            return error_detail_set(reterr, -errno, "%s: cannot be mapped: %s", path, strerror(errno));
        image->memory = memory;
        image->mapped = true;
        return 0;
    }
    image->memory = malloc(image->memory_bytes);
    if (!image->memory)
        return error_detail_set(reterr, -ENOMEM, "%s: out of memory for %zu bytes", path, image->memory_bytes);
    r = read_all(fd, image->memory, image->memory_bytes);
    return r ? error_detail_set(reterr, r, "%s: %s", path, r < 0 ? strerror(-r) : "cut while it was read") : 0;
}

/* The header that is in memory now, which somebody may have written meanwhile, with its table. */
static int check_table(const KvImage *image, const char *path, const KvImageFacts *expected, ErrorDetail *reterr)
{
    const ImageHeader *header = image->memory;
    int r = check_header(header, image->memory_bytes, path, expected, reterr);

    if (r)
        return r;
    if (header->hash != hash_table(*header, (const ImageEntry *)(header + 1)))
        return error_detail_set(reterr, KV_IMAGE_E_DAMAGED, "%s: the header or the table is damaged", path);
    if (memcmp(header->model, expected->model, KV_IMAGE_DIGEST) != 0)
        return error_detail_set(reterr, KV_IMAGE_E_DIFFERENT, "%s: saved with another model", path);
    if (header->n_tokens > 0 && header->layout != expected->layout)
        return error_detail_set(reterr, KV_IMAGE_E_DIFFERENT, "%s: saved with another form of the cache, calibration or layout", path);
    return 0;
}

static bool is_zero(const char *bytes, uint64_t n)
{
    while (n > 0 && *bytes == 0) {
        bytes++;
        n--;
    }
    return n == 0;
}

static int check_chunks(KvImage *image, const ImageHeader *header, const char *path, ErrorDetail *reterr)
{
    const ImageEntry *entries = (const ImageEntry *)(header + 1);
    uint64_t end = sizeof(*header) + header->n_chunks * sizeof(*entries);

    for (uint32_t i = 0; i < header->n_chunks; i++) {
        const ImageEntry *entry = &entries[i];
        uint64_t chunk_end;

        if (entry->offset % KV_IMAGE_ALIGN != 0 || entry->offset < end || entry->offset - end >= KV_IMAGE_ALIGN ||
            !checked_add(entry->offset, entry->bytes, &chunk_end) || chunk_end > image->memory_bytes)
            return error_detail_set(reterr, KV_IMAGE_E_DAMAGED, "%s: chunk %u does not lie in it", path, i);
        if (!is_zero((const char *)image->memory + end, entry->offset - end))
            return error_detail_set(reterr, KV_IMAGE_E_DAMAGED, "%s: the bytes before chunk %u are damaged", path, i);
        if (XXH3_64bits((const char *)image->memory + entry->offset, entry->bytes) != entry->hash)
            return error_detail_set(reterr, KV_IMAGE_E_DAMAGED, "%s: chunk %u (kind %u, %u, %u) is damaged", path, i, entry->kind, entry->a,
                                    entry->b);
        image->chunks[i] = (KvImageChunk){.kind = entry->kind,
                                          .a = entry->a,
                                          .b = entry->b,
                                          .bytes = entry->bytes,
                                          .data = (const char *)image->memory + entry->offset};
        image->n_chunks++;
        end = chunk_end;
    }
    return end == image->memory_bytes ? 0
                                      : error_detail_set(reterr, KV_IMAGE_E_DAMAGED, "%s: %llu bytes after its end", path,
                                                         (unsigned long long)(image->memory_bytes - end));
}

int kv_image_open(int fd, const char *path, const KvImageFacts *expected, bool map, KvImage **ret, ErrorDetail *reterr)
{
    _cleanup_(kv_image_freep) KvImage *image = calloc(1, sizeof(*image));
    const ImageHeader *header;
    int r;

    if (!image)
        return error_origin(-ENOMEM);
    r = load_file(fd, path, expected, map, image, reterr);
    if (r)
        return error_trace(r);
    header = image->memory;
    r = check_table(image, path, expected, reterr);
    if (r)
        return error_trace(r);
    image->facts = *expected;
    image->facts.n_tokens = header->n_tokens;
    image->chunks = calloc(MAX(header->n_chunks, 1u), sizeof(*image->chunks));
    if (!image->chunks)
        return error_origin(-ENOMEM);
    r = check_chunks(image, header, path, reterr);
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(image);
    return 0;
}

const KvImageChunk *kv_image_find(const KvImage *image, uint32_t kind, uint32_t a, uint32_t b)
{
    for (uint32_t i = 0; i < image->n_chunks; i++)
        if (image->chunks[i].kind == kind && image->chunks[i].a == a && image->chunks[i].b == b)
            return &image->chunks[i];
    return NULL;
}
