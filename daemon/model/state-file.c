/* SPDX-License-Identifier: Apache-2.0 */
/* State files: checked reading, atomic writing. */

#include "daemon/model/state-file.h"
#include "quant/base/file.h"

#include <assert.h>
#include <fcntl.h>
#include <limits.h>
#include <openssl/evp.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>

#define SUM_BYTES 32

typedef struct StateHeader {
    char magic[8];
    uint32_t version, reserved;
    uint64_t payload_bytes;
} StateHeader;

static_assert(sizeof(StateHeader) == 24, "the header has no padding");

static StateHeader make_header(const StateKind *kind, size_t bytes)
{
    StateHeader header = {.version = kind->version, .payload_bytes = bytes};

    memcpy(header.magic, kind->magic, sizeof(header.magic));
    return header;
}

static int make_path(char path[static PATH_MAX], const char *state_dir, const StateKind *kind, const char *name)
{
    int n = snprintf(path, PATH_MAX, "%s/%s/%s", state_dir, kind->folder, name);

    return n < 0 || n >= PATH_MAX ? error_origin(-ENAMETOOLONG) : 0;
}

/* SHA-256 of the header, then of the payload. */
static int checksum(const StateHeader *header, const void *payload, size_t bytes, uint8_t ret[static SUM_BYTES])
{
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    bool done = context && EVP_DigestInit_ex(context, EVP_sha256(), NULL) && EVP_DigestUpdate(context, header, sizeof(*header)) &&
                EVP_DigestUpdate(context, payload, bytes) && EVP_DigestFinal_ex(context, ret, NULL);

    EVP_MD_CTX_free(context);
    return done ? 0 : error_origin(-ENOMEM);
}

int state_file_read(const char *state_dir, const StateKind *kind, const char *name, void *payload, size_t bytes)
{
    StateHeader header, wanted = make_header(kind, bytes);
    uint8_t sum[SUM_BYTES], stored[SUM_BYTES];
    _cleanup_(freep) void *data = malloc(bytes);
    _cleanup_(close_fdp) int fd = -1;
    char path[PATH_MAX];
    struct stat st;

    if (!data)
        return error_origin(-ENOMEM);
    if (make_path(path, state_dir, kind, name))
        return -ENOENT;
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size != sizeof(header) + bytes + SUM_BYTES)
        return -ENOENT;
    if (file_read(fd, &header, sizeof(header)) || memcmp(&header, &wanted, sizeof(header)) || file_read(fd, data, bytes) ||
        file_read(fd, stored, sizeof(stored)))
        return -ENOENT;
    if (checksum(&header, data, bytes, sum) || memcmp(sum, stored, sizeof(sum)))
        return -ENOENT;
    memcpy(payload, data, bytes);
    return 0;
}

static int make_folders(const char *state_dir, const StateKind *kind)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/%s", state_dir, kind->folder);

    if (n < 0 || (size_t)n >= sizeof(path))
        return error_origin(-ENAMETOOLONG);
    for (char *at = path + 1; *at; at++) {
        if (*at != '/')
            continue;
        *at = 0;
        if (mkdir(path, 0700) < 0 && errno != EEXIST)
            return error_origin(-errno);
        *at = '/';
    }
    return mkdir(path, 0700) < 0 && errno != EEXIST ? error_origin(-errno) : 0;
}

typedef struct Content {
    const StateKind *kind;
    const void *payload;
    size_t bytes;
} Content;

static int write_content(void *userdata, int fd)
{
    const Content *content = userdata;
    StateHeader header = make_header(content->kind, content->bytes);
    uint8_t sum[SUM_BYTES];
    int r;

    r = checksum(&header, content->payload, content->bytes, sum);
    if (!r)
        r = file_write(fd, &header, sizeof(header));
    if (!r)
        r = file_write(fd, content->payload, content->bytes);
    return r ? r : file_write(fd, sum, sizeof(sum));
}

int state_file_write(const char *state_dir, const StateKind *kind, const char *name, const void *payload, size_t bytes)
{
    Content content = {kind, payload, bytes};
    char path[PATH_MAX];
    int r;

    r = make_folders(state_dir, kind);
    if (!r)
        r = make_path(path, state_dir, kind, name);
    return r ? error_trace(r) : file_replace(path, write_content, &content);
}
