#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small files that spare work at the next start: STATE_DIR/FOLDER/NAME holds a header (magic, kind, version, size), a payload and the
 * SHA-256 of both.  Written under a temporary name, synced and renamed.  Whatever does not check out counts as absent.
 */

#include "quant/base/error.h"

#include <stdint.h>

typedef struct StateKind {
    const char *folder;   /* below the state directory */
    char magic[8];
    uint32_t version;
} StateKind;

/* Any thread.  0, or -ENOENT when there is none that is whole and of this kind, size and version.  @payload: @bytes. */
int state_file_read(const char *state_dir, const StateKind *kind, const char *name, void *payload, size_t bytes);
/* Makes the folders as needed.  0 or negative errno; on error nothing of the old file has changed. */
int state_file_write(const char *state_dir, const StateKind *kind, const char *name, const void *payload, size_t bytes);
