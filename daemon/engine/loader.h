#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening model files on a worker: mapping, checking, hashing and repacking take seconds and never run on the engine thread.  Each answer
 * is a COMMAND_FILE_OPENED in the mailbox.
 */

#include "daemon/engine/worker.h"

/* -ENOMEM, or 0 and an answer will come.  @state_dir: outlives the worker; may be NULL. */
int loader_open(Worker *worker, uint64_t slot, const char *path, const char *state_dir);
