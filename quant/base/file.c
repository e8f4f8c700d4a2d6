/* SPDX-License-Identifier: Apache-2.0 */
/* Whole reads and writes, and files that are there whole or not at all. */

#include "quant/base/file.h"

#include <fcntl.h>
#include <limits.h>
#include <string.h>

int file_read(int fd, void *to, size_t bytes)
{
    for (char *at = to; bytes > 0;) {
        ssize_t n = read(fd, at, bytes);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EBADMSG;
        at += n;
        bytes -= (size_t)n;
    }
    return 0;
}

int file_write(int fd, const void *from, size_t bytes)
{
    for (const char *at = from; bytes > 0;) {
        ssize_t n = write(fd, at, bytes);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        at += n;
        bytes -= (size_t)n;
    }
    return 0;
}

/* So that the name survives, too; some file systems cannot. */
static void sync_folder(const char *path)
{
    _cleanup_(close_fdp) int fd = -1;
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    int length = slash ? (int)MAX(slash - path, (ptrdiff_t)1) : 1;

    (void)snprintf(folder, sizeof(folder), "%.*s", length, slash ? path : ".");
    fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0)
        (void)fsync(fd);
}

int file_replace(const char *path, FileFill fill, void *userdata)
{
    _cleanup_(close_fdp) int fd = -1;
    char temporary[PATH_MAX];
    int r;

    if (snprintf(temporary, sizeof(temporary), "%s.XXXXXX", path) >= (int)sizeof(temporary))
        return error_origin(-ENAMETOOLONG);
    fd = mkostemp(temporary, O_CLOEXEC);
    if (fd < 0)
        return error_origin(-errno);
    r = fill(userdata, fd);
    if (!r && (fsync(fd) < 0 || rename(temporary, path) < 0))
        r = error_origin(-errno);
    if (r) {
        (void)unlink(temporary);
        return error_trace(r);
    }
    sync_folder(path);
    return 0;
}
