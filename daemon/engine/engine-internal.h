#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the engine share: one struct, and who may touch which part of it.
 *
 *   status_lock  guards what the main thread reads at once (status, counts, the last job id).
 *   mailbox      has its own lock.
 *   the rest     is written before the thread starts, or belongs to the engine thread alone.
 */

#include "daemon/engine/batch.h"
#include "daemon/engine/files.h"
#include "daemon/engine/job.h"
#include "daemon/engine/loader.h"
#include "daemon/engine/mailbox.h"
#include "daemon/engine/models.h"
#include "daemon/engine/query.h"
#include "daemon/engine/scheduler.h"
#include "daemon/engine/session.h"

#include <pthread.h>

/* Owners whose turns are remembered; an older one counts as new. */
#define ENGINE_TURNS 64
/* Jobs that take part in passes at once, over all models; more wait. */
#define ENGINE_MAX_ACTIVE 64
/* Jobs that may wait, whatever the configuration says. */
#define ENGINE_MAX_QUEUE 1024
/* Sessions that are kept at once; the bus has limits per client below it. */
#define ENGINE_MAX_SESSIONS 1024
/* A model of many GB on a cold binary cache compiles and uploads this long at most before the watchdog may bite. */
#define ENGINE_LOAD_ALLOWANCE_USEC (10 * 60 * UINT64_C(1000000))

typedef struct OwnerTurn {
    uint64_t owner, admitted;
} OwnerTurn;

struct Engine {
    pthread_t thread;
    bool thread_started;
    Mailbox *mailbox;
    Worker *loader, *file_worker;
    GpuOptions gpu_options;
    char *state_dir;
    uint32_t max_queue;
    KvBudget host_memory; /* of the caches of all models */

    pthread_mutex_t status_lock;
    EngineModelStatus *model_status;
    size_t n_model_status;
    EngineDeviceStatus device_status;
    uint32_t n_jobs, n_waiting;
    uint64_t last_job;

    Gpu *gpu;
    ErrorDetail device_error;
    uint64_t device_retry_usec, device_backoff_usec;
    ModelSlot *slots;
    uint64_t last_slot;
    uint64_t ladder_serial; /* of steps down that took caches away */
    uint32_t last_group;
    Session *sessions;
    uint64_t last_session;
    FileTask *file_tasks;
    uint64_t last_file_task;
    uint32_t n_sessions;
    Job *jobs; /* in order of arrival */
    OwnerTurn turns[ENGINE_TURNS];
    uint64_t turn_serial, pass_serial;
    uint64_t overlap_job; /* whose copies are being measured; 0: nobody's */
    bool status_dirty, admission_due, quitting, spill_failed;
};

/* ---- device.c */
/* 0, or NO_DEVICE with the reason; tries to open again when the last failure is long enough ago. */
EngineResult device_ensure(Engine *engine, ErrorDetail *reterr);
/* After a hung or lost device: running jobs fail, everything on it is dropped, the next job opens it again. */
void device_abandon(Engine *engine, const ErrorDetail *detail);
void device_close(Engine *engine);

/* ---- jobs.c */
Job *jobs_find(Engine *engine, uint64_t id);
void jobs_add(Engine *engine, Job *job); /* taken */
/* Ends a job with its last event; it is freed. */
void jobs_finish(Engine *engine, Job *job, EngineResult result, const ErrorDetail *detail);
void jobs_cancel(Engine *engine, uint64_t id);
void jobs_pause(Engine *engine, uint64_t id, bool paused);
void jobs_owner_gone(Engine *engine, uint64_t owner);
/* Fails every job that waits for or runs on @slot (NULL: any). */
void jobs_fail_slot(Engine *engine, const ModelSlot *slot, EngineResult result, const ErrorDetail *detail);
/* Ends what is past its deadline; returns the nearest deadline to come. */
uint64_t jobs_expire(Engine *engine, uint64_t now);
/* Starts what can start. */
void jobs_admit(Engine *engine);
/* Room was made: who waits for memory may try again. */
void jobs_unblock(Engine *engine);

/* ---- sessions.c */
Session *sessions_find(Engine *engine, uint64_t id, uint64_t owner);
Session *sessions_open(Engine *engine, ModelSlot *slot, const KvPolicy *policy, uint64_t owner);
/* Cancels its generation, tells, frees. */
void sessions_close(Engine *engine, Session *session);
void sessions_close_owner(Engine *engine, uint64_t owner);
void sessions_close_slot(Engine *engine, const ModelSlot *slot);
/* Forgets every cache of a store, or of all stores of a slot. */
void sessions_drop_caches(Engine *engine, const ModelSlot *slot, const StoreSlot *store);
/* Takes the cache of whoever needs it least: an idle session or a kept prefix, whichever was used longest ago, then a job of a lower class than
 * @claimant that is not in the pass.  Of @store only, unless NULL; when @host memory is what has run short, and not for this store alone, of all
 * that keep pages there.  False: nobody. */
bool sessions_evict_one(Engine *engine, const StoreSlot *store, bool host, const Job *claimant);
/* Compatibility mode: what was given up in the middle of a generation is not run again. */
EngineResult sessions_refuse_rerun(ErrorDetail *reterr);
/* Whether another active job of the same model holds caches: then waiting may help. */
bool sessions_others_hold_memory(const Engine *engine, const Job *job);
/* Gives the session of @job a cache when it has none; caches of others may go for it (ladder_serial tells). */
EngineResult sessions_warm(Engine *engine, Job *job, ErrorDetail *reterr);

/* ---- generate.c */
/* Tokenises, checks, reuses, makes sampler and stream: the job becomes active. */
EngineResult generate_start(Engine *engine, Job *job, ErrorDetail *reterr);
/* The logits of the last row, when the whole sequence has been run.  The job may end in it. */
void generate_step(Engine *engine, Job *job, float *logits);
/* Fills the usage at the end and leaves the session in order. */
void generate_end(Engine *engine, Job *job);
/* Whether somebody may go on from the past of @job when it has ended. */
bool generate_leaves_past(const Job *job);
/* Ends the measuring of copies that pass.c began for @job, if it did. */
void generate_measure_stop(Engine *engine, Job *job);
/* Ids of a prompt: messages through the template, or raw text. */
EngineResult generate_encode(const ModelSlot *slot, const ChatMessage *messages, size_t n_messages, const char *raw, TokenList *list,
                             ErrorDetail *reterr);

/* Ids of one prompt of @job, checked against its context. */
EngineResult generate_prompt_ids(Job *job, const ChatMessage *messages, size_t n_messages, const char *raw, TokenList *list, ErrorDetail *reterr);
/* Seed, end tokens and bad words in effect. */
EngineResult generate_constraints(Job *job, ErrorDetail *reterr);
/* The job runs from now on, in caches of @store. */
void generate_begin(Engine *engine, Job *job, const StoreSlot *store, uint32_t n_prompt_tokens);

/* ---- batch-run.c: generate_start() and pass_run() of a job with several sequences */
EngineResult batch_start(Engine *engine, Job *job, ErrorDetail *reterr);
/* One pass, and the choices that it completes; the job may end in it. */
void batch_run(Engine *engine, Job *job);

/* ---- pass.c */
/* One pass of the scheduler's choice; false when nobody can run. */
bool pass_run(Engine *engine);

/* ---- result.c */
EngineResult result_from_model(int r);
EngineResult result_from_kv(int r);
/* Says in @reterr what became of it, unless something says more there already. */
void result_explain(EngineResult result, ErrorDetail *reterr);
EngineResult result_from_errno(int r);

/* ---- status.c */
/* Makes the snapshot that other threads read. */
void status_publish(Engine *engine);
char *status_json(Engine *engine);
void status_model_state(Engine *engine, ModelSlot *slot);
void status_device_state(Engine *engine);
/* "f16", "leat-k5v4", "hqq4-compat" */
void status_form(const KvPolicy *policy, char *ret, size_t size);
const char *status_transfer(KvTransfer transfer);

/* ---- estimate-bits.c */
/* The bits that a policy may have, as a table (a json_t); NULL for a form without.  @used: the form in effect. */
struct json_t *estimate_bits_json(const ModelFile *file, bool exact, const KvPolicy *asked, const KvForm *used);

/* ---- estimate.c */
/* Json of Model.Estimate; the slot's file must be there.  @depth: of the past that the speed is wanted for; negative: none. */
EngineResult estimate_json(Engine *engine, ModelSlot *slot, const KvPolicy *policy, int64_t depth, char **ret_json, ErrorDetail *reterr);
