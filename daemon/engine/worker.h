#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A thread for what takes long and must not hold up the engine thread: tasks, one at a time, in the order asked for.  Each ends with its
 * answer in the mailbox.
 */

#include "daemon/engine/mailbox.h"

typedef struct Worker Worker;
typedef struct Task Task;

struct Task {
    Task *next;
    void (*run)(Task *task);    /* on the worker's thread; may fill the answer */
    Task *(*free)(Task *task);  /* after that, and when it is not run at all; NULL: whoever posted it does */
    Command *answer;            /* made with the task, so that it can always be sent; owned until then */
};

int worker_new(Mailbox *mailbox, const char *name, Worker **ret, ErrorDetail *reterr);
/* Waits for the task in work; those that wait are freed without an answer. */
Worker *worker_free(Worker *worker);
DEFINE_CLEANUP(Worker, worker_free)

void worker_post(Worker *worker, Task *task);
/* When it returns @task is not run any more, nor will be: waits for it when it is in work.  One that waits is not freed. */
void worker_cancel(Worker *worker, Task *task);
