#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The configured models: which are loaded, with which stores.
 *
 * unloaded -> loading (a worker maps, checks and repacks the file; then the engine thread uploads it) -> loaded -> unloaded.  A load
 * that fails leaves `failed` with the reason; the next job tries again.  A configuration that changes what was loaded, and Unload(),
 * wait until the running jobs of the model have ended; jobs that come meanwhile wait for the new load.
 *
 * One store serves all sessions with an equal policy.  Stores and models without running jobs give way when another needs the room.
 */

#include "daemon/engine/engine.h"
#include "daemon/engine/prefixes.h"
#include "daemon/model/nbits.h"
#include "daemon/text/chat-template.h"

typedef struct Command Command;
typedef struct ModelSlot ModelSlot;
typedef struct Query Query;
typedef struct Session Session;
typedef struct StoreSlot StoreSlot;

/* Rows of the largest pass: a prompt chunk.  Larger chunks read the weights less often but delay a cancel and other jobs' tokens; the
 * planner halves it when the activations do not fit. */
#define MODELS_MAX_ROWS 512
/* A chunk of fewer rows says nothing about how long a row takes. */
#define MODELS_MIN_ROWS 32
/* A pass should take no longer: it is what a cancel and other jobs' tokens wait for, and what the watchdog sees of a slow device. */
#define MODELS_PASS_USEC 700000
/* Rows of a chunk before the first was timed. */
#define MODELS_FIRST_ROWS 256
/* How long an opened file that is not on the device is kept for the next question about it. */
#define MODELS_FILE_KEEP_USEC (30 * UINT64_C(1000000))

typedef enum SlotState { SLOT_UNLOADED, SLOT_LOADING, SLOT_LOADED, SLOT_FAILED } SlotState;

struct StoreSlot {
    StoreSlot *next;
    KvPolicy policy; /* as asked for; the store's own is what fitted */
    KvStore *store;
    unsigned steps;  /* ModelStep: what it took to make it fit */
    Prefixes prefixes;
    uint32_t group;  /* of the scheduler */
    uint64_t last_used_usec;
};

struct ModelSlot {
    ModelSlot *next;
    uint64_t id;
    EngineModel config; /* owned; what is loaded follows it */
    bool has_pending;
    EngineModel pending; /* owned; takes over when no job runs */
    bool removed;        /* from the configuration: goes when no job runs */
    SlotState state;
    EngineResult failure;
    ErrorDetail error;

    bool opening;     /* the worker is at it */
    ModelFile *file;  /* opened, not on the device */
    Model *model;     /* loaded; owns its file */
    Nbits *nbits;     /* loading: bits of its cache are being measured */
    ChatTemplate *chat_template;
    int template_error;
    ErrorDetail template_detail;
    StoreSlot *stores;
    float *logits;    /* (max_items, n_vocab) */
    uint32_t max_rows, max_items;
    double row_usec;     /* of the last chunk; 0: none was timed */
    uint64_t room_limit_bytes; /* of the next try to load, after the device refused what the plan allowed; 0: none */
    unsigned steps;      /* ModelStep: what the weights and the batch gave up */
    KvPolicy asked_policy, fit_policy; /* the configured one when it was loaded, and what it became so that it fits */
    uint64_t loading_since_usec;

    bool unload_wanted;
    uint64_t idle_since_usec, file_since_usec;
    Query *queries;   /* wait for the file */
    Query *restores;  /* wait for the load */
    EngineModelStatus facts;
};

typedef struct Engine Engine;

ModelSlot *models_find(Engine *engine, const char *name);
ModelSlot *models_find_id(Engine *engine, uint64_t id);
/* Takes a new configuration; @models (n) is taken. */
void models_configure(Engine *engine, EngineModel *models, size_t n);
/* Loads those that want to be loaded at start. */
void models_preload(Engine *engine);
void models_free_all(Engine *engine);

/* Whether a job may start on it now. */
bool slot_is_ready(const ModelSlot *slot);
const char *slot_state_to_string(const ModelSlot *slot);
/* Loaded or opened: the file, else NULL. */
const ModelFile *slot_file(const ModelSlot *slot);
/* The most tokens a sequence may have under @policy. */
uint32_t slot_context(const ModelSlot *slot, const KvPolicy *policy);
/* What of the device is left for it. */
uint64_t slot_room(const Engine *engine, const ModelSlot *slot);
ModelOptions slot_options(Engine *engine, const ModelSlot *slot, uint32_t max_rows);
/* Rows of a prompt that a pass may have now: by memory, and by how long the last took.  Results do not depend on it. */
uint32_t slot_chunk_rows(const ModelSlot *slot);
/* Learns from a pass. */
void slot_time_pass(ModelSlot *slot, uint32_t n_rows, uint64_t usec);
uint32_t slot_n_active(const Engine *engine, const ModelSlot *slot);

/* Starts loading unless it is loaded or being loaded. */
void slot_want_loaded(Engine *engine, ModelSlot *slot);
/* Has the worker open the file for @query (taken), which is answered when it is there. */
void slot_want_file(Engine *engine, ModelSlot *slot, Query *query);
/* The worker's answer. */
void models_file_opened(Engine *engine, Command *command);
void slot_unload(Engine *engine, ModelSlot *slot);
/* One pass of what it measures before its load ends. */
void slot_measure(Engine *engine, ModelSlot *slot);
/* The same of a model that has to, so that jobs of others go on meanwhile; false: there is none. */
bool models_measure(Engine *engine);

/* With its prefixes; no session has a cache of it.  Returns NULL. */
StoreSlot *store_slot_free(Engine *engine, StoreSlot *store);
/* The store for a policy, or NULL. */
StoreSlot *slot_find_store(ModelSlot *slot, const KvPolicy *policy);
/* The same, made when there is none; @make_room: at the cost of what is idle. */
EngineResult slot_store(Engine *engine, ModelSlot *slot, const KvPolicy *policy, bool make_room, StoreSlot **ret, ErrorDetail *reterr);
/* ---- ladder.c: steps down that free device memory and change no answer; false: none is left, or the device refused that too.  Each step
 * is noted where it belongs. */
/* For a store that is about to be made under @policy. */
bool ladder_for_store(Engine *engine, ModelSlot *slot, StoreSlot *store, KvPolicy *policy);
/* For a pass whose caches need room.  Caches may have moved or gone: the pass is to be planned anew. */
bool ladder_for_pass(Engine *engine, ModelSlot *slot, StoreSlot *store);
/* Frees one store, else one model other than @except, that no running job uses; false when there is nothing left to free. */
bool models_make_room(Engine *engine, const ModelSlot *except);

/* Unloads and closes what was idle for long enough or waits for its jobs to end; returns when to look again. */
uint64_t models_expire(Engine *engine, uint64_t now);
