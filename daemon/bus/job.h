#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jobs on the bus, and org.leat.Inference1.Job.
 *
 * A job is an object until the engine has finished it; then Finished goes to its owner, Ask is answered, the stream gets its
 * last frames.  It is kept, without being an object, until the stream has delivered them, and counts in its owner's quota so long.
 */

#include "daemon/bus/bus-private.h"
#include "daemon/bus/stream.h"

typedef enum BusJobKind {
    BUS_JOB_ASK,
    BUS_JOB_GENERATE,
    BUS_JOB_INVOKE,
    BUS_JOB_LOAD,
    BUS_JOB_EVALUATE,
    BUS_JOB_X_MAX,
} BusJobKind;

typedef struct BusJob {
    Bus *bus;
    uint64_t id;
    BusClient *client; /* NULL when it has left */
    uid_t uid;
    BusJobKind kind;
    char *model, *service; /* owned; service or NULL */
    uint64_t session;      /* 0: none */
    EnginePriority priority;
    EngineJobState state;
    uint32_t queue_position;
    double progress;
    EngineUsage usage;      /* so far; complete once finished */
    uint64_t first_token_usec; /* when the first token was heard of; for the rate so far */
    Stream *stream;        /* or NULL */
    bool told_paused;      /* an E frame said paused */
    sd_bus_message *ask;   /* the call that waits for the answer, or NULL */
    char *text;            /* Ask's answer so far */
    size_t n_text_bytes, text_capacity;
    bool want_ids;
    int32_t *ids;          /* Ask's, when wanted */
    size_t n_ids, ids_capacity;
    uint64_t n_prompt_bytes;
    EngineResult verdict;  /* what the bus side found (SlowReader), else ENGINE_RESULT_DONE */
    bool finished;
} BusJob;

/* A job that the engine is about to run.  What bus_client_take_job() and _take_prompt() have taken becomes the job's on success.  Then
 * bus_job_started() with the id that the engine gave, or bus_job_free(). */
int bus_job_new(Bus *bus, BusClient *client, BusJobKind kind, const char *model, uint64_t n_prompt_bytes, BusJob **ret);
BusJob *bus_job_free(BusJob *job);
DEFINE_CLEANUP(BusJob, bus_job_free)
/* Gives it a stream; *ret_fd is the reader's end. */
int bus_job_open_stream(BusJob *job, int *ret_fd);
/* @job (taken) is known from here on by @id. */
int bus_job_started(BusJob *job, uint64_t id);

/* JOB_STATE, TEXT, TOKENS, PROGRESS, FINISHED */
void bus_jobs_on_event(Bus *bus, const EngineEvent *event);
void bus_jobs_owner_gone(Bus *bus, BusClient *client);
/* The unfinished job of a session, or NULL. */
BusJob *bus_job_of_session(Bus *bus, uint64_t session);
/* Ends all with ShuttingDown. */
void bus_jobs_shut_down(Bus *bus);
void bus_jobs_clear(Bus *bus);

const char *bus_job_kind_to_string(BusJobKind kind);
/* ListJobs: one a{sv} for each job that @client may see. */
int bus_jobs_append(Bus *bus, const BusClient *client, sd_bus_message *m);
