/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Program binaries on disk: DIR/<key in hex>.clbin, a header and the driver's bytes.  Whatever does not look exactly as
 * we would write it (size, key, checksum, owner) is removed and compiled again.  A cache that cannot be written costs
 * time, never a result.
 */

#include "opencl/gpu-internal.h"
#include "quant/base/file.h"
#include "quant/base/log.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CACHE_SUFFIX        ".clbin"
#define CACHE_VERSION       1
#define CACHE_BINARY_MAX    (UINT64_C(256) << 20)
/* A model needs about ten programs; old versions and drivers leave theirs behind. */
#define CACHE_ENTRIES_MAX   512

typedef struct CacheHeader {
    char magic[8];
    uint32_t version, header_bytes;
    uint64_t binary_bytes;
    unsigned char key[GPU_KEY_BYTES], checksum[32];
} CacheHeader;

_Static_assert(sizeof(CacheHeader) == 24 + 64, "written as it is");

static const char cache_magic[8] = {'l', 'e', 'a', 't', 'c', 'l', 'b', '\n'};

static void close_dirp(DIR **directory)
{
    if (*directory)
        (void)closedir(*directory);
}

static void entry_name(const unsigned char key[GPU_KEY_BYTES], char *name, size_t size)
{
    for (size_t i = 0; i < GPU_KEY_BYTES; i++)
        (void)snprintf(name + 2 * i, size - 2 * i, "%02x", key[i]);
    (void)snprintf(name + 2 * GPU_KEY_BYTES, size - 2 * GPU_KEY_BYTES, CACHE_SUFFIX);
}

#define ENTRY_NAME_BYTES (2 * GPU_KEY_BYTES + sizeof(CACHE_SUFFIX))

static int open_directory(const char *path, bool create, int *ret)
{
    int fd;

    if (create && mkdir(path, 0700) < 0 && errno != EEXIST)
        return error_origin(-errno);
    fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return create ? error_origin(-errno) : -errno;
    *ret = fd;
    return 0;
}

/* Native code runs from these files: nobody else may have written them. */
static bool is_ours(const struct stat *entry)
{
    return S_ISREG(entry->st_mode) && (entry->st_uid == geteuid() || entry->st_uid == 0) &&
           (entry->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

static int read_entry(int fd, const unsigned char key[GPU_KEY_BYTES], GpuBinary *ret)
{
    _cleanup_(freep) unsigned char *bytes = NULL;
    unsigned char checksum[32];
    CacheHeader header;
    struct stat entry;
    int r;

    if (fstat(fd, &entry) < 0)
        return -errno;
    if (!is_ours(&entry))
        return -EPERM;
    r = file_read(fd, &header, sizeof(header));
    if (r)
        return r;
    if (memcmp(header.magic, cache_magic, sizeof(cache_magic)) != 0 || header.version != CACHE_VERSION ||
        header.header_bytes != sizeof(header) || header.binary_bytes == 0 || header.binary_bytes > CACHE_BINARY_MAX ||
        (uint64_t)entry.st_size != sizeof(header) + header.binary_bytes || memcmp(header.key, key, GPU_KEY_BYTES) != 0)
        return -EBADMSG;
    bytes = malloc(header.binary_bytes);
    if (!bytes)
        return -ENOMEM;
    r = file_read(fd, bytes, header.binary_bytes);
    if (r)
        return r;
    if (EVP_Digest(bytes, header.binary_bytes, checksum, NULL, EVP_sha256(), NULL) != 1 ||
        memcmp(checksum, header.checksum, sizeof(checksum)) != 0)
        return -EBADMSG;
    *ret = (GpuBinary){.bytes = TAKE_PTR(bytes), .n_bytes = header.binary_bytes};
    return 0;
}

int gpu_cache_load(const char *path, const unsigned char key[GPU_KEY_BYTES], GpuBinary *ret)
{
    _cleanup_(close_fdp) int directory = -1, fd = -1;
    char name[ENTRY_NAME_BYTES];
    int r = open_directory(path, false, &directory);

    if (r)
        return r;
    entry_name(key, name, sizeof(name));
    fd = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return -errno;
    r = read_entry(fd, key, ret);
    if (r) {
        log_debug("program cache: '%s' is damaged or foreign (%s), ignoring", name, strerror(-r));
        (void)unlinkat(directory, name, 0);
        return r;
    }
    (void)futimens(fd, NULL); /* the least recently used goes first */
    return 0;
}

void gpu_cache_drop(const char *path, const unsigned char key[GPU_KEY_BYTES])
{
    _cleanup_(close_fdp) int directory = -1;
    char name[ENTRY_NAME_BYTES];

    if (open_directory(path, false, &directory))
        return;
    entry_name(key, name, sizeof(name));
    (void)unlinkat(directory, name, 0);
}

/* Removes the oldest entry when there are too many; one is added at a time. */
static void trim(int directory_fd)
{
    _cleanup_(close_dirp) DIR *directory = NULL;
    int fd = openat(directory_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    char oldest[ENTRY_NAME_BYTES] = "";
    struct timespec oldest_time = {0};
    size_t n = 0;

    directory = fd >= 0 ? fdopendir(fd) : NULL;
    if (!directory) {
        close_fdp(&fd);
        return;
    }
    for (struct dirent *entry; (entry = readdir(directory));) {
        size_t length = strlen(entry->d_name);
        struct stat status;

        if (length != ENTRY_NAME_BYTES - 1 || strcmp(entry->d_name + 2 * GPU_KEY_BYTES, CACHE_SUFFIX) != 0 ||
            fstatat(directory_fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        n++;
        if (!oldest[0] || status.st_mtim.tv_sec < oldest_time.tv_sec ||
            (status.st_mtim.tv_sec == oldest_time.tv_sec && status.st_mtim.tv_nsec < oldest_time.tv_nsec)) {
            memcpy(oldest, entry->d_name, length + 1);
            oldest_time = status.st_mtim;
        }
    }
    if (n > CACHE_ENTRIES_MAX)
        (void)unlinkat(directory_fd, oldest, 0);
}

typedef struct CacheEntry {
    CacheHeader header;
    const GpuBinary *binary;
} CacheEntry;

static int write_entry(void *userdata, int fd)
{
    const CacheEntry *entry = userdata;
    int r = file_write(fd, &entry->header, sizeof(entry->header));

    return r ? r : file_write(fd, entry->binary->bytes, entry->binary->n_bytes);
}

int gpu_cache_store(const char *path, const unsigned char key[GPU_KEY_BYTES], const GpuBinary *binary)
{
    CacheEntry entry = {{.version = CACHE_VERSION, .header_bytes = sizeof(CacheHeader), .binary_bytes = binary->n_bytes}, binary};
    _cleanup_(close_fdp) int directory = -1;
    _cleanup_(freep) char *file = NULL;
    char name[ENTRY_NAME_BYTES];
    int r = open_directory(path, true, &directory);

    if (r)
        return r;
    if (binary->n_bytes == 0 || binary->n_bytes > CACHE_BINARY_MAX)
        return error_origin(-EFBIG);
    memcpy(entry.header.magic, cache_magic, sizeof(entry.header.magic));
    memcpy(entry.header.key, key, GPU_KEY_BYTES);
    if (EVP_Digest(binary->bytes, binary->n_bytes, entry.header.checksum, NULL, EVP_sha256(), NULL) != 1)
        return error_origin(-EIO);
    entry_name(key, name, sizeof(name));
    if (asprintf(&file, "%s/%s", path, name) < 0) {
        file = NULL;
        return error_origin(-ENOMEM);
    }
    r = file_replace(file, write_entry, &entry);
    if (r)
        return error_trace(r);
    trim(directory);
    return 0;
}
