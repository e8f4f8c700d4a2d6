#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One job, from the call that made it to its last event.
 *
 * Made by the main thread (job_new_*), then owned by the engine thread.  Waiting: queued or loading.  Active: it has what it needs and
 * takes part in passes.  What remains to be run is always ids of its session that its cache does not hold yet, so a cache that was
 * taken away (another job needed the room) is simply run again, with the same result.
 */

#include "daemon/engine/model-config.h"
#include "daemon/engine/sampler.h"
#include "daemon/text/text-stream.h"

typedef struct Job Job;
typedef struct Mailbox Mailbox;
typedef struct ModelSlot ModelSlot;
typedef struct Session Session;
typedef struct StoreSlot StoreSlot;
typedef struct Evaluation Evaluation;
typedef struct Batch Batch;

typedef enum JobKind { JOB_GENERATE, JOB_LOAD, JOB_EVALUATE } JobKind;

struct Job {
    Job *next;
    uint64_t id, owner;
    JobKind kind;
    EnginePriority priority;

    /* the request, owned */
    char *model;
    uint64_t session_id;
    bool has_policy, want_ids;
    KvPolicy policy;
    ChatMessage *messages;
    size_t n_messages, n_shared;
    char *raw;
    int32_t *ids;
    size_t n_ids;
    const char **prompts;
    size_t n_prompts;
    bool prompts_raw;
    EngineSampling sampling;
    uint64_t deadline_usec;
    int fd;

    /* its way */
    EngineJobState state;
    bool waiting, active, in_pass, reader_paused, memory_blocked, yielding;
    ModelSlot *slot;     /* borrowed; set while it may not go away */
    Session *session;    /* borrowed, or owned when it has no id */
    Sampler *sampler;
    TextStream *stream;
    Evaluation *evaluation;
    Batch *batch;        /* instead of session, sampler and stream when there are several sequences */
    int32_t *eos;        /* (n_eos) end tokens in effect, when something needs their list */
    uint32_t n_eos;
    TokenList bad_words; /* ids, each word ended by -1 */
    uint32_t context, n_output, queue_position;
    uint32_t shared_tokens; /* of the prompt, by the shared messages; 0: nothing is kept for everyone */
    uint32_t fork_tokens;   /* where the prompt leaves what came before it: a place that others may come back to; 0: nowhere */
    uint64_t last_served;
    double progress;

    /* times */
    uint64_t submitted_usec, loading_usec, started_usec, first_usec, last_usec;
    uint64_t uploads_before, downloads_before;
    GpuOverlap overlap;
    EngineUsage usage;
    EngineEvent *finished; /* made with the job, so that its end can always be told */
};

int job_new_generate(const EngineRequest *request, uint64_t id, Job **ret);
int job_new_load(uint64_t owner, const char *model, uint64_t id, Job **ret);
/* @fd is taken on success. */
int job_new_evaluate(uint64_t owner, const char *model, const KvPolicy *policy, const int32_t *ids, size_t n_ids, int fd, uint64_t id,
                     Job **ret);
Job *job_free(Job *job);
DEFINE_CLEANUP(Job, job_free)

/* Whether it has beams, several sequences or several prompts. */
bool job_is_batch(const Job *job);
/* That it runs under, or NULL when that is the model's own. */
const KvPolicy *job_policy(const Job *job);
/* Whose caches it holds, or NULL. */
StoreSlot *job_store(const Job *job);
void job_drop_caches(Job *job);

/* Tells the state, the queue position or the progress when it differs from what was told last. */
void job_set_state(Job *job, Mailbox *mailbox, EngineJobState state);
void job_set_queue_position(Job *job, Mailbox *mailbox, uint32_t position);
void job_set_progress(Job *job, Mailbox *mailbox, double progress);
/* -ENOMEM when the event cannot be made. */
int job_emit_text(Job *job, Mailbox *mailbox, const char *text, size_t length);
int job_emit_token(Job *job, Mailbox *mailbox, int32_t id);
/* The last event; once.  @reason: the usage's stop reason. */
void job_emit_finished(Job *job, Mailbox *mailbox, EngineResult result, const char *reason, const ErrorDetail *detail);
