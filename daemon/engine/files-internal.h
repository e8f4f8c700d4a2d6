#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* A task of the worker for files, for daemon/engine/files*.c. */

#include "cache/kv-file.h"
#include "daemon/engine/engine-internal.h"

typedef enum FileTaskKind {
    FILE_TASK_SAVE,    /* to a client's file, for a query */
    FILE_TASK_RESTORE, /* from one, for a query */
    FILE_TASK_SPILL,   /* to a file of our own */
    FILE_TASK_FETCH,   /* from that */
} FileTaskKind;

struct FileTask {
    Task task; /* first; the engine thread frees it */
    FileTask *next;
    uint64_t id;
    FileTaskKind kind;
    Query *query;
    int fd;      /* the query's, else owned */
    int copy_fd; /* save: the spilled session, whose file is copied; owned, or -1 */
    char *folder;
    uint64_t used_usec; /* the session's, when it began */
    uint64_t session;
    const StoreSlot *store; /* NULL: a cold session is saved */

    KvSave *save;
    KvImageFacts expected;
    KvImage *image;
    int code; /* of the worker */
    ErrorDetail detail;
};

/* NULL when memory is short. */
FileTask *file_task_new(FileTaskKind kind, const Session *session, const StoreSlot *store);
void file_task_free(FileTask *task);
/* Hands it over, with its query when it has one. */
void file_task_post(Engine *engine, FileTask *task);
/* Takes it from the list, answers its query, frees it. */
void file_task_answer(Engine *engine, FileTask *task, EngineResult result, const ErrorDetail *detail);

/* ---- files-spill.c: files of our own ---- */

/* On the worker's thread: a file without a name in task->folder, written. */
void file_task_spill(FileTask *task);
/* It is written, or read: @task is over. */
void file_task_spill_done(Engine *engine, FileTask *task);
