/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's jobs: arrival, admission, end. */

#include "daemon/engine/engine-internal.h"
#include "quant/base/log.h"

Job *jobs_find(Engine *engine, uint64_t id)
{
    for (Job *job = engine->jobs; job; job = job->next)
        if (job->id == id)
            return job;
    return NULL;
}

static void jobs_leave_queue(Engine *engine, Job *job)
{
    if (!job->waiting)
        return;
    job->waiting = false;
    (void)pthread_mutex_lock(&engine->status_lock);
    engine->n_waiting--;
    (void)pthread_mutex_unlock(&engine->status_lock);
}

void jobs_unblock(Engine *engine)
{
    for (Job *job = engine->jobs; job; job = job->next)
        job->memory_blocked = false;
}

/* ---- end ------------------------------------------------------------------------------------------------------------------- */

/* Causes that a client cannot give itself are worth a line; the text of others may quote what it sent. */
static bool result_is_ours(EngineResult result)
{
    return result == ENGINE_RESULT_OUT_OF_DEVICE_MEMORY || result == ENGINE_RESULT_OUT_OF_MEMORY ||
           result == ENGINE_RESULT_NUMERIC || result == ENGINE_RESULT_FAILED;
}

void jobs_finish(Engine *engine, Job *job, EngineResult result, const ErrorDetail *detail)
{
    ErrorDetail complete = detail ? *detail : ERROR_DETAIL_NULL;
    const char *reason = "error";
    char stopped[sizeof(job->usage.stop_reason)];

    for (Job **j = &engine->jobs; *j; j = &(*j)->next)
        if (*j == job) {
            *j = job->next;
            break;
        }
    if (job->active)
        generate_end(engine, job);
    jobs_leave_queue(engine, job);
    if (result == ENGINE_RESULT_DONE) {
        (void)snprintf(stopped, sizeof(stopped), "%s", job->usage.stop_reason);
        reason = stopped;
    } else if (result == ENGINE_RESULT_CANCELLED) {
        reason = "cancelled";
    }
    result_explain(result, &complete);
    if (result_is_ours(result))
        log_warning("Job %llu failed: %s", (unsigned long long)job->id, complete.text);
    if (job->session) {
        job->session->job = NULL;
        job->session->last_used_usec = now_usec();
    }
    if (job->slot)
        job->slot->idle_since_usec = now_usec();
    (void)pthread_mutex_lock(&engine->status_lock);
    engine->n_jobs--;
    (void)pthread_mutex_unlock(&engine->status_lock);
    job_emit_finished(job, engine->mailbox, result, reason, &complete);
    job_free(job);
    jobs_unblock(engine);
    engine->admission_due = engine->status_dirty = true;
}

void jobs_cancel(Engine *engine, uint64_t id)
{
    Job *job = jobs_find(engine, id);

    if (job)
        jobs_finish(engine, job, ENGINE_RESULT_CANCELLED, NULL);
}

void jobs_pause(Engine *engine, uint64_t id, bool paused)
{
    Job *job = jobs_find(engine, id);

    if (!job)
        return;
    job->reader_paused = paused;
    engine->admission_due = true; /* background work may start while an interactive reader sleeps */
}

void jobs_owner_gone(Engine *engine, uint64_t owner)
{
    for (Job *job = engine->jobs, *next; job; job = next) {
        next = job->next;
        if (job->owner == owner)
            jobs_finish(engine, job, ENGINE_RESULT_CANCELLED, NULL);
    }
    sessions_close_owner(engine, owner);
}

void jobs_fail_slot(Engine *engine, const ModelSlot *slot, EngineResult result, const ErrorDetail *detail)
{
    for (Job *job = engine->jobs, *next; job; job = next) {
        next = job->next;
        if (!slot || job->slot == slot)
            jobs_finish(engine, job, result, detail);
    }
}

uint64_t jobs_expire(Engine *engine, uint64_t now)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    uint64_t nearest = UINT64_MAX;

    for (Job *job = engine->jobs, *next; job; job = next) {
        next = job->next;
        if (job->deadline_usec == 0)
            continue;
        if (job->deadline_usec <= now) {
            (void)error_detail_set(&detail, -ETIMEDOUT, "the deadline passed after %u tokens while the job was %s", job->n_output,
                                   engine_job_state_to_string(job->state));
            jobs_finish(engine, job, ENGINE_RESULT_DEADLINE_EXCEEDED, &detail);
        } else {
            nearest = MIN(nearest, job->deadline_usec);
        }
    }
    return nearest;
}

/* ---- arrival --------------------------------------------------------------------------------------------------------------- */

static EngineResult job_check_prompts(const Job *job, ErrorDetail *reterr)
{
    if (job->n_prompts > ENGINE_MAX_PROMPTS) {
        (void)error_detail_set(reterr, -EINVAL, "%zu prompts are more than %d", job->n_prompts, ENGINE_MAX_PROMPTS);
        return ENGINE_RESULT_INVALID_ARGS;
    }
    for (size_t i = 0; i < job->n_prompts; i++)
        if (!job->prompts[i] || !job->prompts[i][0]) {
            (void)error_detail_set(reterr, -EINVAL, "prompt %zu is empty", i + 1);
            return ENGINE_RESULT_INVALID_ARGS;
        }
    return ENGINE_RESULT_DONE;
}

static EngineResult job_check_request(const Job *job, ErrorDetail *reterr)
{
    int n_prompts = (job->messages != NULL) + (job->raw != NULL) + (job->ids != NULL) + (job->prompts != NULL);

    if (job->kind == JOB_LOAD)
        return ENGINE_RESULT_DONE;
    if (n_prompts != 1) {
        (void)error_detail_set(reterr, -EINVAL, "exactly one of messages, raw text, ids and prompts is needed, got %d", n_prompts);
        return ENGINE_RESULT_INVALID_ARGS;
    }
    if ((job->messages && (job->n_messages == 0 || !job->messages[job->n_messages - 1].content[0])) || (job->raw && !job->raw[0]) ||
        (job->ids && job->n_ids == 0)) {
        (void)error_detail_set(reterr, -EINVAL, "the prompt is empty");
        return ENGINE_RESULT_INVALID_ARGS;
    }
    if ((unsigned)job->priority >= ENGINE_PRIORITY_X_MAX) {
        (void)error_detail_set(reterr, -EINVAL, "there is no priority %d", (int)job->priority);
        return ENGINE_RESULT_INVALID_ARGS;
    }
    if (job->kind == JOB_GENERATE && sampler_check(&job->sampling, reterr) < 0)
        return ENGINE_RESULT_INVALID_ARGS;
    return job_check_prompts(job, reterr);
}

static EngineResult job_bind_session(Engine *engine, Job *job, ErrorDetail *reterr)
{
    Session *session = sessions_find(engine, job->session_id, job->owner);

    if (!session) {
        (void)error_detail_set(reterr, -ENOENT, "there is no session %llu of this caller", (unsigned long long)job->session_id);
        return ENGINE_RESULT_NO_SUCH_SESSION;
    }
    if (session->job) {
        (void)error_detail_set(reterr, -EBUSY, "session %llu is busy with job %llu", (unsigned long long)session->id,
                               (unsigned long long)session->job->id);
        return ENGINE_RESULT_SESSION_BUSY;
    }
    if (job->has_policy && !policy_equal(&job->policy, &session->policy)) {
        session_drop_cache(session);
        session->policy = job->policy;
    }
    session->job = job;
    job->session = session;
    job->slot = session->slot;
    return ENGINE_RESULT_DONE;
}

static EngineResult job_bind(Engine *engine, Job *job, ErrorDetail *reterr)
{
    EngineResult result;

    if (engine->quitting)
        return ENGINE_RESULT_SHUTTING_DOWN;
    result = job_check_request(job, reterr);
    if (result != ENGINE_RESULT_DONE)
        return result;
    if (job->session_id)
        return job_bind_session(engine, job, reterr);
    job->slot = models_find(engine, job->model);
    if (!job->slot) {
        (void)error_detail_set(reterr, -ENOENT, "there is no model '%s'", job->model);
        return ENGINE_RESULT_NO_SUCH_MODEL;
    }
    return ENGINE_RESULT_DONE;
}

void jobs_add(Engine *engine, Job *job)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    EngineResult result;
    Job **last;

    for (last = &engine->jobs; *last; last = &(*last)->next)
        continue;
    *last = job;
    engine->admission_due = true;
    result = job_bind(engine, job, &detail);
    if (result != ENGINE_RESULT_DONE)
        jobs_finish(engine, job, result, &detail);
}

/* ---- admission ------------------------------------------------------------------------------------------------------------- */

static OwnerTurn *owner_turn(Engine *engine, uint64_t owner)
{
    OwnerTurn *oldest = &engine->turns[0];

    for (size_t i = 0; i < ENGINE_TURNS; i++) {
        if (engine->turns[i].admitted && engine->turns[i].owner == owner)
            return &engine->turns[i];
        if (engine->turns[i].admitted < oldest->admitted)
            oldest = &engine->turns[i];
    }
    *oldest = (OwnerTurn){.owner = owner};
    return oldest;
}

static uint64_t owner_admitted(const Engine *engine, uint64_t owner)
{
    for (size_t i = 0; i < ENGINE_TURNS; i++)
        if (engine->turns[i].admitted && engine->turns[i].owner == owner)
            return engine->turns[i].admitted;
    return 0;
}

/* Whether a place is free: jobs of lower classes do not count, they give their caches up when it comes to it. */
static bool job_has_place(const Engine *engine, const Job *job)
{
    uint32_t n_active = 0, n_before = 0;

    for (const Job *other = engine->jobs; other; other = other->next) {
        if (!other->active)
            continue;
        if (job->priority == ENGINE_PRIORITY_BACKGROUND && other->priority == ENGINE_PRIORITY_INTERACTIVE && !other->reader_paused)
            return false;
        n_active++;
        n_before += other->slot == job->slot && other->priority <= job->priority;
    }
    return n_active < ENGINE_MAX_ACTIVE && n_before < job->slot->max_items;
}

static void job_start(Engine *engine, Job *job)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    EngineResult result;

    owner_turn(engine, job->owner)->admitted = ++engine->turn_serial;
    result = generate_start(engine, job, &detail);
    if (result != ENGINE_RESULT_DONE) {
        jobs_finish(engine, job, result, &detail);
        if (result == ENGINE_RESULT_DEVICE_LOST && engine->gpu)
            device_abandon(engine, &detail);
        return;
    }
    jobs_leave_queue(engine, job);
    if (job->usage.stop_reason[0])
        jobs_finish(engine, job, ENGINE_RESULT_DONE, NULL); /* nothing to generate */
}

/* What can be done for one waiting job now.  True when the list of jobs may have changed beyond this one. */
static bool job_admit(Engine *engine, Job *job)
{
    ModelSlot *slot = job->slot;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    EngineResult result;

    if (slot->removed || slot->has_pending || slot->unload_wanted) {
        job_set_state(job, engine->mailbox, ENGINE_JOB_QUEUED);
        return false; /* models_expire() acts when its last job has ended */
    }
    if (slot->state == SLOT_UNLOADED || slot->state == SLOT_FAILED) {
        result = device_ensure(engine, &detail);
        if (result != ENGINE_RESULT_DONE)
            jobs_finish(engine, job, result, &detail);
        else
            slot_want_loaded(engine, slot);
        return true;
    }
    if (slot->state == SLOT_LOADING) {
        if (!job->loading_usec)
            job->loading_usec = now_usec();
        job_set_state(job, engine->mailbox, ENGINE_JOB_LOADING);
        return false;
    }
    if (job->kind == JOB_LOAD) {
        jobs_finish(engine, job, ENGINE_RESULT_DONE, NULL);
        return true;
    }
    if (job->session && files_fetch(engine, job->session)) {
        job_set_state(job, engine->mailbox, ENGINE_JOB_LOADING);
        return false;
    }
    if (!job_has_place(engine, job)) {
        job_set_state(job, engine->mailbox, ENGINE_JOB_QUEUED);
        return false;
    }
    job_start(engine, job);
    return true;
}

static size_t jobs_order_waiting(Engine *engine, Job **ret_jobs, size_t max)
{
    SchedulerWaiting waiting[ENGINE_MAX_QUEUE];
    Job *jobs[ENGINE_MAX_QUEUE];
    size_t order[ENGINE_MAX_QUEUE], n = 0;

    for (Job *job = engine->jobs; job && n < max; job = job->next)
        if (!job->active) {
            waiting[n] = (SchedulerWaiting){.id = job->id,
                                            .owner = job->owner,
                                            .priority = job->priority,
                                            .owner_admitted = owner_admitted(engine, job->owner)};
            jobs[n++] = job;
        }
    scheduler_order(waiting, n, order);
    for (size_t i = 0; i < n; i++)
        ret_jobs[i] = jobs[order[i]];
    return n;
}

void jobs_admit(Engine *engine)
{
    Job *jobs[ENGINE_MAX_QUEUE];
    bool again;
    size_t n;

    if (!engine->admission_due)
        return;
    engine->admission_due = false;
    if (engine->gpu && gpu_is_lost(engine->gpu)) /* while nothing ran: what comes now should not pay for it */
        (void)device_ensure(engine, NULL);
    do {
        again = false;
        n = jobs_order_waiting(engine, jobs, ENGINE_MAX_QUEUE);
        for (size_t i = 0; i < n && !again; i++)
            again = job_admit(engine, jobs[i]);
    } while (again);
    for (size_t i = 0; i < n; i++)
        job_set_queue_position(jobs[i], engine->mailbox, (uint32_t)(i + 1));
}
