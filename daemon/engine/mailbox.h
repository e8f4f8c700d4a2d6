#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the main thread, the workers and the engine thread meet: commands in, events out, one lock, one eventfd, one number
 * that says that the engine is alive.  The lock is never held across a call that may block.
 */

#include "daemon/engine/engine.h"

typedef struct Mailbox Mailbox;
typedef struct Command Command;
typedef struct Job Job;
typedef struct Query Query;

typedef enum CommandKind {
    COMMAND_JOB,         /* job */
    COMMAND_CANCEL,      /* id */
    COMMAND_PAUSE,       /* id, paused */
    COMMAND_OWNER_GONE,  /* id */
    COMMAND_QUERY,       /* query */
    COMMAND_MODELS,      /* models: a new configuration */
    COMMAND_FILE_OPENED, /* from the worker: id of the slot, file or result with detail, usec it took */
    COMMAND_FILE_DONE,   /* from the worker for sessions in files: id of the task */
    COMMAND_QUIT,
} CommandKind;

/* Owns what its pointers name until a handler takes it by setting NULL. */
struct Command {
    Command *next;
    CommandKind kind;
    uint64_t id;
    bool paused;
    Job *job;
    Query *query;
    EngineModel *models;
    size_t n_models;
    ModelFile *file;
    EngineResult result;
    ErrorDetail detail;
};
/* NULL when out of memory. */
Command *command_new(CommandKind kind, uint64_t id);
Command *command_free(Command *command);
DEFINE_CLEANUP(Command, command_free)

int mailbox_new(Mailbox **ret, ErrorDetail *reterr);
Mailbox *mailbox_free(Mailbox *mailbox);
DEFINE_CLEANUP(Mailbox, mailbox_free)

/* Any thread.  @command is taken. */
void mailbox_post(Mailbox *mailbox, Command *command);
/* Engine thread: the next command, or NULL when there is none before @until_usec (CLOCK_MONOTONIC; 0: do not wait, UINT64_MAX: for
 * ever). */
Command *mailbox_take(Mailbox *mailbox, uint64_t until_usec);

/* Events are made by event_new() and freed by engine_event_free(); emitting takes them and cannot fail.  Text and ids join the last
 * waiting event when that is of the same job and kind, so a busy main thread does not find one event a token. */
EngineEvent *event_new(EngineEventKind kind);
void mailbox_emit(Mailbox *mailbox, EngineEvent *event);
EngineEvent *mailbox_next_event(Mailbox *mailbox);
int mailbox_event_fd(const Mailbox *mailbox);

/* Progress.  An engine that waits with nothing to do is alive, and so is one in a phase that was announced as long (compiling the
 * kernels of a model) until that allowance is over.  Otherwise the number grows with every look for commands: once a pass. */
void mailbox_allow(Mailbox *mailbox, uint64_t until_usec);
uint64_t mailbox_heartbeat(Mailbox *mailbox);

/* CLOCK_MONOTONIC in microseconds. */
uint64_t now_usec(void);
