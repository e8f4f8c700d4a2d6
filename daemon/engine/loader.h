#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker that opens model files: mapping, checking, hashing and repacking take seconds and never run on the engine thread.  One
 * file at a time, in the order asked for; each answer is a COMMAND_FILE_OPENED in the mailbox.
 */

#include "daemon/engine/mailbox.h"

typedef struct Loader Loader;

int loader_new(Mailbox *mailbox, const char *state_dir, Loader **ret, ErrorDetail *reterr);
/* Waits for the file in work; answers that nobody took are in the mailbox. */
Loader *loader_free(Loader *loader);
DEFINE_CLEANUP(Loader, loader_free)
/* -ENOMEM, or 0 and an answer will come. */
int loader_open(Loader *loader, uint64_t slot, const char *path);
