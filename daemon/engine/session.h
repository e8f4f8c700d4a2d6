#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A session: the ids of a conversation and, when it is warm, the cache that holds their keys and values.
 *
 * The cache always holds a prefix of the ids.  It may be taken away at any token boundary (its model is unloaded, the device is lost,
 * another job needs the room): the ids stay, and what is missing is run again, bit for bit the same.
 */

#include "daemon/engine/engine.h"

typedef struct Job Job;
typedef struct ModelSlot ModelSlot;
typedef struct Session Session;
typedef struct StoreSlot StoreSlot;

struct Session {
    Session *next;
    uint64_t id; /* 0: belongs to a job and ends with it */
    uint64_t owner;
    ModelSlot *slot;
    KvPolicy policy;
    TokenList ids;
    KvCache *cache;   /* NULL: cold */
    StoreSlot *store; /* of the cache */
    Job *job;         /* the one generation that may use it, or NULL */
    uint64_t last_used_usec;
    int spill_fd;      /* an unnamed file with what the session was when it was written, or -1 */
    bool recording;    /* its cache keeps what a crop needs */
    bool in_file_task; /* it is being written there or read back */
};

Session *session_new(ModelSlot *slot, const KvPolicy *policy, uint64_t id, uint64_t owner);
Session *session_free(Session *session);
DEFINE_CLEANUP(Session, session_free)

/* How many ids the cache holds. */
uint32_t session_cached(const Session *session);
/* Forgets the cache, keeps the ids. */
void session_drop_cache(Session *session);
/* Forgets what was written of it. */
void session_forget_file(Session *session);
/* Forgets the ids that the cache does not hold: after a generation, so that the next one starts from what was computed. */
void session_trim(Session *session);
/* How many leading ids of two lists are equal. */
size_t ids_common_prefix(const int32_t *a, size_t n_a, const int32_t *b, size_t n_b);
/* The same of the session's. */
size_t session_common_prefix(const Session *session, const int32_t *ids, size_t n);
/* Makes the ids those of @ids, keeping as much of the cache as agrees with them and leaving at least one id to run.  KvError. */
int session_rebase(Session *session, const int32_t *ids, size_t n, ErrorDetail *reterr);
