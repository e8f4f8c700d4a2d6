#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sessions in files: token ids and, when the session is warm, its cache (cache/kv-file.h).
 *
 * Writing, reading and checking are done by a worker; the session may go on while it is being saved.  A restore needs the model's store, so
 * it waits until the model is loaded; the session keeps what it has until all of the file has been found to be whole and right.
 *
 * Idle sessions are spilled where that is configured: their cache goes to a file without a name, which nobody else can open and which is
 * gone with the descriptor, whatever becomes of the daemon; then the memory is free.  The next turn reads it back, mapped, before it
 * begins; when that fails the ids are run again, with the same result.
 */

#include "daemon/engine/engine.h"

typedef struct FileTask FileTask;
typedef struct ModelSlot ModelSlot;
typedef struct Query Query;
typedef struct Session Session;
typedef struct StoreSlot StoreSlot;

/* Answers now or when it is done; @query is taken. */
void files_save(Engine *engine, Query *query, Session *session);
void files_restore(Engine *engine, Query *query, Session *session);
/* Begins to write what has been idle for long enough; returns when to look again. */
uint64_t files_spill_idle(Engine *engine, uint64_t now);
/* Whether @session has to be read back first, which then begins; the jobs are looked at again when it is done. */
bool files_fetch(Engine *engine, Session *session);
/* The worker's answer. */
void files_done(Engine *engine, uint64_t id);
/* The model that restores wait for is loaded, or will not be: @result says why. */
void files_slot_ready(Engine *engine, ModelSlot *slot, EngineResult result, const ErrorDetail *detail);
/* @store goes: saving from it is cut off, restoring into it as well. */
void files_drop_store(Engine *engine, const StoreSlot *store);
