/* SPDX-License-Identifier: Apache-2.0 */
/* The engine thread and what other threads may call. */

#include "daemon/engine/engine-internal.h"
#include "daemon/engine/host-memory.h"
#include "quant/base/log.h"

#include <signal.h>
#include <string.h>

/* ---- the thread ------------------------------------------------------------------------------------------------------------- */

static void engine_handle(Engine *engine, Command *command)
{
    switch (command->kind) {
    case COMMAND_JOB:
        jobs_add(engine, TAKE_PTR(command->job));
        return;
    case COMMAND_CANCEL:
        jobs_cancel(engine, command->id);
        return;
    case COMMAND_PAUSE:
        jobs_pause(engine, command->id, command->paused);
        return;
    case COMMAND_OWNER_GONE:
        jobs_owner_gone(engine, command->id);
        return;
    case COMMAND_QUERY:
        query_handle(engine, TAKE_PTR(command->query));
        return;
    case COMMAND_MODELS:
        models_configure(engine, TAKE_PTR(command->models), command->n_models);
        models_preload(engine);
        return;
    case COMMAND_FILE_OPENED:
        models_file_opened(engine, command);
        return;
    case COMMAND_FILE_DONE:
        files_done(engine, command->id);
        return;
    case COMMAND_QUIT:
        engine->quitting = true;
        return;
    }
}

/* What is due by time, then what can start; returns when to look again. */
static uint64_t engine_tick(Engine *engine)
{
    uint64_t now = now_usec(), deadline, idle, spill;

    deadline = jobs_expire(engine, now);
    idle = models_expire(engine, now);
    spill = files_spill_idle(engine, now);
    jobs_admit(engine);
    idle = MIN(idle, spill);
    return MIN(deadline, idle);
}

static void engine_shut_down(Engine *engine)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    (void)error_detail_set(&detail, -ESHUTDOWN, "the daemon is shutting down");
    jobs_fail_slot(engine, NULL, ENGINE_RESULT_SHUTTING_DOWN, &detail);
    while (engine->sessions)
        sessions_close(engine, engine->sessions);
    models_free_all(engine);
    files_drop_store(engine, NULL);
    device_close(engine);
}

static void *engine_main(void *userdata)
{
    Engine *engine = userdata;
    sigset_t all;

    /* Signals are the main thread's. */
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, NULL);
    (void)device_ensure(engine, NULL);
    models_preload(engine);
    status_publish(engine);
    while (!engine->quitting) {
        uint64_t wait_until = engine_tick(engine);
        bool worked = pass_run(engine), measured = models_measure(engine);
        Command *command;

        status_publish(engine);
        /* All commands between two passes: a cancel waits for one token or one chunk at most. */
        command = mailbox_take(engine->mailbox, worked || measured ? 0 : wait_until);
        while (command) {
            engine_handle(engine, command);
            command_free(command);
            command = engine->quitting ? NULL : mailbox_take(engine->mailbox, 0);
        }
    }
    engine_shut_down(engine);
    return NULL;
}

/* ---- lifetime --------------------------------------------------------------------------------------------------------------- */

/* Half of what is available; on a machine that is full, as much as makes a start. */
static uint64_t automatic_host_memory(void)
{
    return MAX(host_memory_available("") / 2, UINT64_C(64) << 20);
}

static int engine_copy_options(Engine *engine, const EngineOptions *options)
{
    EngineModel *models = NULL;
    int r;

    r = gpu_options_copy(&options->gpu, &engine->gpu_options);
    if (r < 0)
        return error_trace(r);
    if (options->state_dir) {
        engine->state_dir = strdup(options->state_dir);
        if (!engine->state_dir)
            return error_origin(-ENOMEM);
    }
    engine->max_queue = options->max_queue ? MIN(options->max_queue, (uint32_t)ENGINE_MAX_QUEUE) : ENGINE_MAX_QUEUE;
    engine->host_memory.limit_bytes = options->host_memory_bytes ? options->host_memory_bytes : automatic_host_memory();
    r = model_configs_copy(options->models, options->n_models, &models);
    if (r < 0)
        return error_trace(r);
    models_configure(engine, models, options->n_models);
    return 0;
}

int engine_new(const EngineOptions *options, Engine **ret, ErrorDetail *reterr)
{
    _cleanup_(engine_freep) Engine *engine = calloc(1, sizeof(*engine));
    int r;

    if (!engine)
        return error_origin(-ENOMEM);
    (void)pthread_mutex_init(&engine->status_lock, NULL);
    r = mailbox_new(&engine->mailbox, reterr);
    if (r < 0)
        return error_trace(r);
    r = engine_copy_options(engine, options);
    if (r < 0)
        return error_trace(r);
    r = worker_new(engine->mailbox, "leat-loader", &engine->loader, reterr);
    if (r == 0)
        r = worker_new(engine->mailbox, "leat-files", &engine->file_worker, reterr);
    if (r < 0)
        return error_trace(r);
    log_notice("Caches have up to %llu MiB of host memory%s", (unsigned long long)(engine->host_memory.limit_bytes >> 20),
               options->host_memory_bytes ? "" : ", half of what is available");
    status_publish(engine);
    r = pthread_create(&engine->thread, NULL, engine_main, engine);
    if (r > 0)
        return error_detail_set(reterr, -r, "cannot start the engine thread: %s", strerror(r));
    (void)pthread_setname_np(engine->thread, "leat-engine");
    engine->thread_started = true;
    *ret = TAKE_PTR(engine);
    return 0;
}

Engine *engine_free(Engine *engine)
{
    Command *quit;

    if (!engine)
        return NULL;
    if (engine->thread_started) {
        quit = command_new(COMMAND_QUIT, 0);
        while (!quit) { /* nothing else can end the thread: wait for memory */
            (void)usleep(10000);
            quit = command_new(COMMAND_QUIT, 0);
        }
        mailbox_post(engine->mailbox, quit);
        (void)pthread_join(engine->thread, NULL);
    }
    engine->loader = worker_free(engine->loader);
    engine->file_worker = worker_free(engine->file_worker);
    if (!engine->thread_started && engine->mailbox)
        models_free_all(engine);
    mailbox_free(engine->mailbox);
    gpu_options_clear(&engine->gpu_options);
    free(engine->state_dir);
    free(engine->model_status);
    (void)pthread_mutex_destroy(&engine->status_lock);
    free(engine);
    return NULL;
}

int engine_event_fd(const Engine *engine)
{
    return mailbox_event_fd(engine->mailbox);
}

uint64_t engine_heartbeat(const Engine *engine)
{
    return mailbox_heartbeat(engine->mailbox);
}

EngineEvent *engine_next_event(Engine *engine)
{
    return mailbox_next_event(engine->mailbox);
}

/* ---- calls ------------------------------------------------------------------------------------------------------------------ */

int engine_reconfigure(Engine *engine, const EngineModel *models, size_t n_models)
{
    _cleanup_(command_freep) Command *command = command_new(COMMAND_MODELS, 0);
    int r;

    if (!command)
        return error_origin(-ENOMEM);
    r = model_configs_copy(models, n_models, &command->models);
    if (r < 0)
        return error_trace(r);
    command->n_models = n_models;
    mailbox_post(engine->mailbox, TAKE_PTR(command));
    return 0;
}

/* A number for a new job; *ret_full when too many wait already. */
static uint64_t engine_next_job(Engine *engine, bool *ret_full)
{
    uint64_t id;

    (void)pthread_mutex_lock(&engine->status_lock);
    id = ++engine->last_job;
    *ret_full = engine->n_waiting >= engine->max_queue;
    if (!*ret_full) {
        engine->n_jobs++;
        engine->n_waiting++;
    }
    (void)pthread_mutex_unlock(&engine->status_lock);
    return id;
}

static void engine_forget_job(Engine *engine)
{
    (void)pthread_mutex_lock(&engine->status_lock);
    engine->n_jobs--;
    engine->n_waiting--;
    (void)pthread_mutex_unlock(&engine->status_lock);
}

/* Hands @job (taken) over; a full queue ends it at once, without troubling the engine thread. */
static int engine_submit(Engine *engine, Job *job, bool full)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Command *command;

    if (full) {
        (void)error_detail_set(&detail, -EBUSY, "%u jobs wait already", engine->max_queue);
        job_emit_finished(job, engine->mailbox, ENGINE_RESULT_QUEUE_FULL, "error", &detail);
        job_free(job);
        return 0;
    }
    command = command_new(COMMAND_JOB, 0);
    if (!command) {
        job->fd = -1; /* the caller's again */
        job_free(job);
        engine_forget_job(engine);
        return error_origin(-ENOMEM);
    }
    job->waiting = true;
    command->job = job;
    mailbox_post(engine->mailbox, command);
    return 0;
}

static int engine_job_made(Engine *engine, int r, Job *job, uint64_t id, bool full, uint64_t *ret_job)
{
    if (r < 0) {
        if (!full)
            engine_forget_job(engine);
        return error_trace(r);
    }
    r = engine_submit(engine, job, full);
    if (r == 0)
        *ret_job = id;
    return r;
}

int engine_generate(Engine *engine, const EngineRequest *request, uint64_t *ret_job)
{
    Job *job = NULL;
    bool full;
    uint64_t id = engine_next_job(engine, &full);
    int r = job_new_generate(request, id, &job);

    return engine_job_made(engine, r, job, id, full, ret_job);
}

int engine_load(Engine *engine, uint64_t owner, const char *model, uint64_t *ret_job)
{
    Job *job = NULL;
    bool full;
    uint64_t id = engine_next_job(engine, &full);
    int r = job_new_load(owner, model, id, &job);

    return engine_job_made(engine, r, job, id, full, ret_job);
}

int engine_evaluate(Engine *engine, uint64_t owner, const char *model, const KvPolicy *policy, const int32_t *ids, size_t n_ids, int fd,
                    uint64_t *ret_job)
{
    Job *job = NULL;
    bool full;
    uint64_t id = engine_next_job(engine, &full);
    int r = job_new_evaluate(owner, model, policy, ids, n_ids, fd, id, &job);

    return engine_job_made(engine, r, job, id, full, ret_job);
}

/* A command that is a few numbers: when memory is so short, the caller's next event or deadline has to do. */
static void engine_post(Engine *engine, CommandKind kind, uint64_t id, bool paused)
{
    Command *command = command_new(kind, id);

    if (!command) {
        log_error("Out of memory: a command to the engine is lost");
        return;
    }
    command->paused = paused;
    mailbox_post(engine->mailbox, command);
}

void engine_cancel(Engine *engine, uint64_t job)
{
    engine_post(engine, COMMAND_CANCEL, job, false);
}

void engine_pause(Engine *engine, uint64_t job, bool paused)
{
    engine_post(engine, COMMAND_PAUSE, job, paused);
}

void engine_owner_gone(Engine *engine, uint64_t owner)
{
    engine_post(engine, COMMAND_OWNER_GONE, owner, false);
}

int engine_query(Engine *engine, const EngineQuery *query)
{
    _cleanup_(command_freep) Command *command = command_new(COMMAND_QUERY, 0);
    int r;

    if (!command)
        return error_origin(-ENOMEM);
    r = query_new(query, &command->query);
    if (r < 0)
        return error_trace(r);
    mailbox_post(engine->mailbox, TAKE_PTR(command));
    return 0;
}

/* ---- the snapshot ------------------------------------------------------------------------------------------------------------ */

/* The lock is not part of what const promises. */
static pthread_mutex_t *status_lock(const Engine *engine)
{
    return (pthread_mutex_t *)(uintptr_t)&engine->status_lock;
}

size_t engine_n_models(const Engine *engine)
{
    size_t n;

    (void)pthread_mutex_lock(status_lock(engine));
    n = engine->n_model_status;
    (void)pthread_mutex_unlock(status_lock(engine));
    return n;
}

bool engine_model_status(const Engine *engine, size_t index, EngineModelStatus *ret)
{
    bool found;

    (void)pthread_mutex_lock(status_lock(engine));
    found = index < engine->n_model_status;
    if (found)
        *ret = engine->model_status[index];
    (void)pthread_mutex_unlock(status_lock(engine));
    return found;
}

bool engine_model_status_by_name(const Engine *engine, const char *name, EngineModelStatus *ret)
{
    bool found = false;

    (void)pthread_mutex_lock(status_lock(engine));
    for (size_t i = 0; i < engine->n_model_status && !found; i++)
        if (strcmp(engine->model_status[i].name, name) == 0) {
            *ret = engine->model_status[i];
            found = true;
        }
    (void)pthread_mutex_unlock(status_lock(engine));
    return found;
}

void engine_device_status(const Engine *engine, EngineDeviceStatus *ret)
{
    (void)pthread_mutex_lock(status_lock(engine));
    *ret = engine->device_status;
    (void)pthread_mutex_unlock(status_lock(engine));
}

void engine_queue_status(const Engine *engine, uint32_t *ret_n_jobs, uint32_t *ret_n_queued)
{
    (void)pthread_mutex_lock(status_lock(engine));
    *ret_n_jobs = engine->n_jobs;
    *ret_n_queued = engine->n_waiting;
    (void)pthread_mutex_unlock(status_lock(engine));
}
