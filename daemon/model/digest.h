#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* A model's name for itself: the SHA-256 of its file, remembered so that the next start need not read all of it. */

#include "daemon/model/gguf.h"

#define DIGEST_BYTES 32

/* @state_dir: where digests are remembered by device, inode, size and time of change; NULL: nowhere.  0 or negative errno. */
int digest_of_file(const Gguf *gguf, const char *state_dir, uint8_t ret[static DIGEST_BYTES]);
/* 64 hex digits and NUL. */
void digest_to_hex(const uint8_t digest[static DIGEST_BYTES], char ret[static 2 * DIGEST_BYTES + 1]);
/* -EINVAL when it is not 64 hex digits. */
int digest_from_hex(const char *hex, uint8_t ret[static DIGEST_BYTES]);
