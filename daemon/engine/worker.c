/* SPDX-License-Identifier: Apache-2.0 */
/* A thread with a queue of tasks. */

#include "daemon/engine/worker.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>

struct Worker {
    Mailbox *mailbox;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Task *tasks, *in_work;
    bool started, quitting;
};

static void task_free(Task *task)
{
    task->answer = command_free(task->answer);
    if (task->free)
        (void)task->free(task);
}

static Task *worker_next(Worker *worker)
{
    Task *task;

    (void)pthread_mutex_lock(&worker->lock);
    while (!worker->tasks && !worker->quitting)
        (void)pthread_cond_wait(&worker->changed, &worker->lock);
    task = worker->quitting ? NULL : worker->tasks;
    if (task)
        worker->tasks = task->next;
    worker->in_work = task;
    (void)pthread_mutex_unlock(&worker->lock);
    return task;
}

/* From here on the task belongs to whoever posted it. */
static void worker_done(Worker *worker)
{
    (void)pthread_mutex_lock(&worker->lock);
    worker->in_work = NULL;
    (void)pthread_cond_broadcast(&worker->changed);
    (void)pthread_mutex_unlock(&worker->lock);
}

static void *worker_main(void *userdata)
{
    Worker *worker = userdata;
    sigset_t all;
    Task *task;

    /* Signals are the main thread's. */
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, NULL);
    while ((task = worker_next(worker))) {
        Command *answer;

        task->run(task);
        answer = TAKE_PTR(task->answer);
        if (task->free)
            (void)task->free(task);
        worker_done(worker);
        mailbox_post(worker->mailbox, answer);
    }
    return NULL;
}

int worker_new(Mailbox *mailbox, const char *name, Worker **ret, ErrorDetail *reterr)
{
    _cleanup_(worker_freep) Worker *worker = calloc(1, sizeof(*worker));
    int r;

    if (!worker)
        return error_origin(-ENOMEM);
    worker->mailbox = mailbox;
    (void)pthread_mutex_init(&worker->lock, NULL);
    (void)pthread_cond_init(&worker->changed, NULL);
    r = pthread_create(&worker->thread, NULL, worker_main, worker);
    if (r > 0)
        return error_detail_set(reterr, -r, "cannot start the thread '%s': %s", name, strerror(r));
    (void)pthread_setname_np(worker->thread, name);
    worker->started = true;
    *ret = TAKE_PTR(worker);
    return 0;
}

Worker *worker_free(Worker *worker)
{
    if (!worker)
        return NULL;
    (void)pthread_mutex_lock(&worker->lock);
    worker->quitting = true;
    (void)pthread_cond_broadcast(&worker->changed);
    (void)pthread_mutex_unlock(&worker->lock);
    if (worker->started)
        (void)pthread_join(worker->thread, NULL);
    for (Task *task = worker->tasks, *next; task; task = next) {
        next = task->next;
        task_free(task);
    }
    (void)pthread_cond_destroy(&worker->changed);
    (void)pthread_mutex_destroy(&worker->lock);
    free(worker);
    return NULL;
}

void worker_post(Worker *worker, Task *task)
{
    Task **last;

    task->next = NULL;
    (void)pthread_mutex_lock(&worker->lock);
    for (last = &worker->tasks; *last; last = &(*last)->next)
        continue;
    *last = task;
    (void)pthread_cond_broadcast(&worker->changed);
    (void)pthread_mutex_unlock(&worker->lock);
}

void worker_cancel(Worker *worker, Task *task)
{
    (void)pthread_mutex_lock(&worker->lock);
    for (Task **t = &worker->tasks; *t; t = &(*t)->next)
        if (*t == task) {
            *t = task->next;
            break;
        }
    while (worker->in_work == task)
        (void)pthread_cond_wait(&worker->changed, &worker->lock);
    (void)pthread_mutex_unlock(&worker->lock);
}
