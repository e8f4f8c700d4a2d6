/* SPDX-License-Identifier: Apache-2.0 */
/* Packed images in files: fingerprint, sums, making, mapping, and giving way. */

#include "daemon/model/weights-file.h"
#include "quant/base/checked.h"
#include "quant/base/file.h"
#include "quant/base/log.h"

#include <assert.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>

#define FOLDER       "packed"
#define UNUSED_SEC   (30 * 24 * 3600)
#define HEADER_BYTES WEIGHTS_BLOCK_ALIGNMENT
/* What stays free of the file system. */
#define FREE_SHARE   20

typedef struct Header {
    char magic[8];
    uint32_t version, n_blocks;
    uint64_t image_bytes, fingerprint;
    uint8_t digest[DIGEST_BYTES];
    uint64_t sums_sum; /* of the sums of the blocks, which follow */
} Header;

static_assert(sizeof(Header) == 72, "the header has no padding");

#define MAX_BLOCKS ((HEADER_BYTES - sizeof(Header)) / sizeof(uint64_t))

/* ---- sums ------------------------------------------------------------------------------------------------------------------- */

/* Against accidents, not against malice: four chains of bijections, so that no single wrong word goes unseen, at the speed of memory.
 * @bytes is a multiple of 8. */
static uint64_t sum_bytes(uint64_t seed, const void *data, uint64_t bytes)
{
    uint64_t lanes[4] = {seed, seed ^ 0x9e3779b97f4a7c15u, ~seed, seed + 0xd1b54a32d192ed03u}, sum = bytes;
    const uint8_t *from = data;

    for (uint64_t i = 0; i < bytes / 8; i++) {
        uint64_t word, *lane = &lanes[i % 4];

        memcpy(&word, from + 8 * i, 8);
        *lane ^= word;
        *lane = (*lane << 23 | *lane >> 41) * 0xff51afd7ed558ccdu;
    }
    for (size_t i = 0; i < 4; i++) {
        sum ^= lanes[i] ^ lanes[i] >> 32;
        sum = (sum << 29 | sum >> 35) * 0x9fb21c651e98df25u;
    }
    return sum;
}

/* How one type is packed: 17 rows, so that the second tile is padded. */
static int sum_type(uint64_t seed, const WeightTypeInfo *type, uint64_t *ret)
{
    uint64_t row_bytes, device_bytes;
    _cleanup_(freep) uint8_t *rows = NULL, *packed = NULL;
    int r;

    r = weight_row_bytes(type, 256, &row_bytes);
    if (!r)
        r = weight_device_bytes(type, WEIGHT_TILE_ROWS + 1, 256, &device_bytes);
    if (r)
        return error_trace(r);
    rows = malloc((WEIGHT_TILE_ROWS + 1) * row_bytes);
    packed = calloc(1, device_bytes);
    if (!rows || !packed)
        return error_origin(-ENOMEM);
    for (uint64_t i = 0; i < (WEIGHT_TILE_ROWS + 1) * row_bytes; i++)
        rows[i] = (uint8_t)(i * 167 + (i >> 8) * 13 + 5);
    weight_pack(type, rows, WEIGHT_TILE_ROWS + 1, 256, NULL, packed);
    *ret = sum_bytes(seed, packed, device_bytes / 8 * 8);
    return 0;
}

typedef struct Fingerprint {
    uint64_t sum;
    uint64_t types; /* seen */
} Fingerprint;

static int add_matrix(Fingerprint *print, const WeightsMatrix *matrix)
{
    const WeightTypeInfo *type = matrix->tensor->type;
    const uint64_t facts[] = {(uint64_t)type->type, matrix->block, matrix->n_rows, matrix->n_cols, matrix->offset, matrix->rotary};
    uint64_t bit = UINT64_C(1) << ((unsigned)type->type & 63);

    print->sum = sum_bytes(print->sum, facts, sizeof(facts));
    if (matrix->norm || (print->types & bit))
        return 0;
    print->types |= bit;
    return sum_type(print->sum, type, &print->sum);
}

/* Of everything that the image depends on besides the model's file. */
static int fingerprint(const Weights *weights, const ModelParams *params, uint64_t *ret)
{
    const uint64_t shape[] = {params->attention.k_head_dim, params->attention.v_head_dim, params->attention.rotary_dim,
                              params->attention.n_heads, params->attention.n_kv_heads};
    Fingerprint print = {.sum = sum_bytes(1, shape, sizeof(shape))};
    int r;

    r = add_matrix(&print, &weights->embedding);
    if (!r)
        r = add_matrix(&print, &weights->output_norm);
    if (!r)
        r = add_matrix(&print, &weights->output);
    for (uint32_t l = 0; l < weights->n_layers; l++)
        for (WeightsTensor i = 0; i < WEIGHTS_TENSOR_X_MAX && !r; i++)
            r = add_matrix(&print, &weights->layers[l].tensors[i]);
    *ret = print.sum;
    return error_trace(r);
}

static int make_header(const Weights *weights, const ModelParams *params, const uint8_t digest[static DIGEST_BYTES], Header *ret)
{
    Header header = {.magic = {'L', 'E', 'A', 'T', 'P', 'A', 'C', 'K'}, .version = 1, .n_blocks = weights->n_blocks,
                     .image_bytes = weights->image_bytes};
    int r;

    if (weights->n_blocks > MAX_BLOCKS)
        return error_origin(-EFBIG);
    memcpy(header.digest, digest, DIGEST_BYTES);
    r = fingerprint(weights, params, &header.fingerprint);
    *ret = header;
    return r;
}

/* ---- paths ------------------------------------------------------------------------------------------------------------------ */

static int make_path(char path[static PATH_MAX], const char *state_dir, const uint8_t digest[static DIGEST_BYTES])
{
    char name[2 * DIGEST_BYTES + 1];
    int n;

    digest_to_hex(digest, name);
    n = snprintf(path, PATH_MAX, "%s/" FOLDER "/%s", state_dir, name);
    return n < 0 || n >= PATH_MAX ? error_origin(-ENAMETOOLONG) : 0;
}

static int make_folder(const char *state_dir)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/" FOLDER, state_dir);

    if (n < 0 || (size_t)n >= sizeof(path))
        return error_origin(-ENAMETOOLONG);
    if (mkdir(state_dir, 0700) < 0 && errno != EEXIST)
        return error_origin(-errno);
    return mkdir(path, 0700) < 0 && errno != EEXIST ? error_origin(-errno) : 0;
}

/* ---- giving way ------------------------------------------------------------------------------------------------------------- */

/* Removes what nobody has used for long, or @any: the file that was used longest ago.  Whether there was one. */
static bool remove_oldest(const char *state_dir, bool any)
{
    char folder[PATH_MAX], oldest[NAME_MAX + 1] = "";
    time_t now = time(NULL), oldest_time = any ? now + 1 : now - UNUSED_SEC;
    const struct dirent *entry;
    bool removed = false;
    DIR *dir;

    if (snprintf(folder, sizeof(folder), "%s/" FOLDER, state_dir) >= (int)sizeof(folder))
        return false;
    dir = opendir(folder);
    if (!dir)
        return false;
    while ((entry = readdir(dir))) {
        struct stat st;

        if (fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode) || st.st_mtime >= oldest_time)
            continue;
        oldest_time = st.st_mtime;
        (void)snprintf(oldest, sizeof(oldest), "%s", entry->d_name);
    }
    if (oldest[0])
        removed = unlinkat(dirfd(dir), oldest, 0) == 0;
    (void)closedir(dir);
    return removed;
}

/* -ENOSPC when the file system has no room for @bytes more. */
static int make_room(const char *state_dir, uint64_t bytes)
{
    struct statvfs fs;

    while (remove_oldest(state_dir, false))
        continue;
    for (;;) {
        uint64_t free_bytes;

        if (statvfs(state_dir, &fs) < 0)
            return error_origin(-errno);
        free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
        if (free_bytes > bytes && free_bytes - bytes >= (uint64_t)fs.f_blocks * fs.f_frsize / FREE_SHARE)
            return 0;
        if (!remove_oldest(state_dir, true))
            return -ENOSPC;
    }
}

/* ---- opening ---------------------------------------------------------------------------------------------------------------- */

/* Written to by nobody, but some drivers take only memory that could be written for reading in place: private copies then. */
static int map_file(int fd, Weights *weights)
{
    uint64_t bytes = HEADER_BYTES + weights->image_bytes;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);

    if (memory == MAP_FAILED)
        return error_origin(-errno);
    weights->mapping = memory;
    weights->mapping_bytes = bytes;
    weights->image = (uint8_t *)memory + HEADER_BYTES;
    weights->mapped = true;
    return 0;
}

static void unmap(Weights *weights)
{
    if (weights->mapping)
        (void)munmap(weights->mapping, weights->mapping_bytes);
    weights->mapping = weights->image = NULL;
    weights->mapping_bytes = 0;
    weights->mapped = false;
}

/* The sums of a mapped or new image behind its header. */
static uint64_t *block_sums(const Weights *weights)
{
    return (uint64_t *)((uint8_t *)weights->mapping + sizeof(Header));
}

static bool check_file(const Weights *weights, const Header *wanted)
{
    const Header *header = weights->mapping;
    const uint64_t *sums = block_sums(weights);

    if (memcmp(header, wanted, offsetof(Header, sums_sum)) != 0 ||
        header->sums_sum != sum_bytes(0, sums, weights->n_blocks * sizeof(*sums)))
        return false;
    (void)madvise(weights->mapping, weights->mapping_bytes, MADV_SEQUENTIAL);
    for (uint32_t i = 0; i < weights->n_blocks; i++)
        if (sums[i] != sum_bytes(i, weights->image + weights->blocks[i].offset, weights->blocks[i].bytes))
            return false;
    (void)madvise(weights->mapping, weights->mapping_bytes, MADV_NORMAL);
    return true;
}

int weights_file_open(const char *state_dir, const uint8_t digest[static DIGEST_BYTES], const ModelParams *params, Weights *weights)
{
    _cleanup_(close_fdp) int fd = -1;
    char path[PATH_MAX];
    struct stat st;
    Header wanted;

    if (make_header(weights, params, digest, &wanted) || make_path(path, state_dir, digest))
        return -ENOENT;
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size != HEADER_BYTES + weights->image_bytes)
        return -ENOENT;
    if (map_file(fd, weights))
        return -ENOENT;
    if (!check_file(weights, &wanted)) {
        unmap(weights);
        log_debug("'%s' is damaged or of another version: made again", path);
        return -ENOENT;
    }
    (void)futimens(fd, NULL); /* used now */
    return 0;
}

/* ---- making ----------------------------------------------------------------------------------------------------------------- */

/* Packs straight into the file's pages. */
static int fill_file(int fd, const Header *header, const ModelParams *params, Weights *weights)
{
    uint64_t bytes = HEADER_BYTES + weights->image_bytes, *sums;
    Header *to;
    int r;

    /* A hole that finds no room later would be a signal, not an error. */
    if (fallocate(fd, 0, 0, (off_t)bytes) < 0)
        return error_origin(-errno);
    weights->mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (weights->mapping == MAP_FAILED) {
        weights->mapping = NULL;
        return error_origin(-errno);
    }
    weights->mapping_bytes = bytes;
    weights->image = (uint8_t *)weights->mapping + HEADER_BYTES;
    r = weights_pack(weights, params);
    if (r)
        return error_trace(r);
    sums = block_sums(weights);
    for (uint32_t i = 0; i < weights->n_blocks; i++)
        sums[i] = sum_bytes(i, weights->image + weights->blocks[i].offset, weights->blocks[i].bytes);
    to = weights->mapping;
    *to = *header;
    to->sums_sum = sum_bytes(0, sums, weights->n_blocks * sizeof(*sums));
    return 0;
}

typedef struct Making {
    const Header *header;
    const ModelParams *params;
    Weights *weights;
} Making;

/* And maps what was written, which keeps its memory under whatever name. */
static int fill_and_map(void *userdata, int fd)
{
    const Making *making = userdata;
    int r = fill_file(fd, making->header, making->params, making->weights);

    unmap(making->weights);
    return r ? r : map_file(fd, making->weights);
}

int weights_file_make(const char *state_dir, const uint8_t digest[static DIGEST_BYTES], const ModelParams *params, Weights *weights)
{
    char path[PATH_MAX];
    Header header;
    int r;

    r = make_header(weights, params, digest, &header);
    if (!r)
        r = make_folder(state_dir);
    if (!r)
        r = make_path(path, state_dir, digest);
    if (!r)
        r = make_room(state_dir, HEADER_BYTES + weights->image_bytes);
    if (!r)
        r = file_replace(path, fill_and_map, &(Making){&header, params, weights});
    if (r)
        unmap(weights);
    return error_trace(r);
}
