#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Whole reads and writes, and files that are there whole or not at all. */

#include "quant/base/error.h"

#include <stddef.h>

/* 0, -EBADMSG when the file ends before, or a negative errno. */
int file_read(int fd, void *to, size_t bytes);
int file_write(int fd, const void *from, size_t bytes);

/* Fills a new file (readable and writable, mode 0600) from its beginning; 0 or a code that file_replace() returns. */
typedef int (*FileFill)(void *userdata, int fd);
/* A new file beside @path, filled, synced and put in its place, the folder synced; on error what was there is untouched and nothing is
 * left behind.  Whoever reads finds the old or the new one; of two writers the last one wins. */
int file_replace(const char *path, FileFill fill, void *userdata);
