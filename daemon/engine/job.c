/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs: making, telling, freeing. */

#include "daemon/engine/job.h"
#include "daemon/engine/batch.h"
#include "daemon/engine/evaluate.h"
#include "daemon/engine/mailbox.h"
#include "daemon/engine/session.h"

#include <string.h>

const char *engine_job_state_to_string(EngineJobState state)
{
    static const char *const names[ENGINE_JOB_X_MAX] = {
        [ENGINE_JOB_QUEUED] = "queued",     [ENGINE_JOB_LOADING] = "loading", [ENGINE_JOB_PREFILL] = "prefill",
        [ENGINE_JOB_DECODING] = "decoding", [ENGINE_JOB_PAUSED] = "paused",   [ENGINE_JOB_DONE] = "done",
        [ENGINE_JOB_FAILED] = "failed",     [ENGINE_JOB_CANCELLED] = "cancelled",
    };

    return (unsigned)state < ENGINE_JOB_X_MAX ? names[state] : "unknown";
}

static int job_new(JobKind kind, uint64_t owner, const char *model, uint64_t id, Job **ret)
{
    _cleanup_(job_freep) Job *job = calloc(1, sizeof(*job));

    if (!job)
        return error_origin(-ENOMEM);
    job->kind = kind;
    job->id = id;
    job->owner = owner;
    job->fd = -1;
    job->priority = ENGINE_PRIORITY_NORMAL;
    job->submitted_usec = now_usec();
    job->overlap = (GpuOverlap){0};
    job->finished = event_new(ENGINE_EVENT_FINISHED);
    job->model = strdup(model ? model : "");
    if (!job->finished || !job->model)
        return error_origin(-ENOMEM);
    *ret = TAKE_PTR(job);
    return 0;
}

static int copy_ids(Job *job, const int32_t *ids, size_t n)
{
    job->ids = calloc(n ? n : 1, sizeof(*ids));
    if (!job->ids)
        return error_origin(-ENOMEM);
    if (n > 0)
        memcpy(job->ids, ids, n * sizeof(*ids));
    job->n_ids = n;
    return 0;
}

int job_new_generate(const EngineRequest *request, uint64_t id, Job **ret)
{
    _cleanup_(job_freep) Job *job = NULL;
    int r;

    r = job_new(JOB_GENERATE, request->owner, request->session ? "" : request->model, id, &job);
    if (r < 0)
        return r;
    job->priority = request->priority;
    job->session_id = request->session;
    job->has_policy = request->policy != NULL;
    if (request->policy)
        job->policy = *request->policy;
    job->deadline_usec = request->deadline_usec;
    job->want_ids = request->want_ids;
    if (request->messages) {
        r = messages_copy(request->messages, request->n_messages, &job->messages);
        if (r < 0)
            return r;
        job->n_messages = request->n_messages;
        job->n_shared = MIN(request->n_shared, request->n_messages);
    }
    if (request->raw) {
        job->raw = strdup(request->raw);
        if (!job->raw)
            return error_origin(-ENOMEM);
    }
    if (request->ids) {
        r = copy_ids(job, request->ids, request->n_ids);
        if (r < 0)
            return r;
    }
    r = strings_copy(request->prompts, request->n_prompts, &job->prompts);
    if (r < 0)
        return r;
    job->n_prompts = request->n_prompts;
    job->prompts_raw = request->prompts_raw;
    r = sampling_copy(&request->sampling, &job->sampling);
    if (r < 0)
        return r;
    *ret = TAKE_PTR(job);
    return 0;
}

int job_new_load(uint64_t owner, const char *model, uint64_t id, Job **ret)
{
    return job_new(JOB_LOAD, owner, model, id, ret);
}

int job_new_evaluate(uint64_t owner, const char *model, const KvPolicy *policy, const int32_t *ids, size_t n_ids, int fd, uint64_t id,
                     Job **ret)
{
    _cleanup_(job_freep) Job *job = NULL;
    int r;

    r = job_new(JOB_EVALUATE, owner, model, id, &job);
    if (r < 0)
        return r;
    job->has_policy = policy != NULL;
    if (policy)
        job->policy = *policy;
    r = copy_ids(job, ids, n_ids);
    if (r < 0)
        return r;
    job->fd = fd;
    *ret = TAKE_PTR(job);
    return 0;
}

Job *job_free(Job *job)
{
    if (!job)
        return NULL;
    free(job->model);
    messages_free(job->messages, job->n_messages);
    free(job->raw);
    free(job->ids);
    strings_free(job->prompts, job->n_prompts);
    sampling_clear(&job->sampling);
    batch_free(job->batch);
    free(job->eos);
    token_list_clear(&job->bad_words);
    if (job->fd >= 0)
        (void)close(job->fd);
    sampler_free(job->sampler);
    text_stream_free(job->stream);
    evaluation_free(job->evaluation);
    if (job->session && job->session->id == 0)
        session_free(job->session);
    engine_event_free(job->finished);
    free(job);
    return NULL;
}

const KvPolicy *job_policy(const Job *job)
{
    if (job->batch)
        return &job->batch->policy;
    if (job->session)
        return &job->session->policy;
    return job->has_policy ? &job->policy : NULL;
}

StoreSlot *job_store(const Job *job)
{
    if (job->batch)
        return job->batch->store;
    return job->session && job->session->cache ? job->session->store : NULL;
}

void job_drop_caches(Job *job)
{
    if (job->batch)
        batch_drop_caches(job->batch);
    if (job->session)
        session_drop_cache(job->session);
}

bool job_is_batch(const Job *job)
{
    return job->kind == JOB_GENERATE && (job->prompts || job->sampling.num_beams > 1 || job->sampling.num_return_sequences > 1);
}

/* ---- telling ---------------------------------------------------------------------------------------------------------------- */

/* Whose event it is, and how far the job has come. */
static void job_fill_event(const Job *job, EngineEvent *event)
{
    event->job = job->id;
    event->session = job->session_id;
    event->state = job->state;
    event->usage.prompt_tokens = job->usage.prompt_tokens;
    event->usage.reused_tokens = job->usage.reused_tokens;
    event->usage.output_tokens = job->n_output;
}

/* News that may be lost when memory is short: the state can be asked for, and the end is always told. */
static void emit_news(const Job *job, Mailbox *mailbox, EngineEventKind kind)
{
    EngineEvent *event = event_new(kind);

    if (!event)
        return;
    job_fill_event(job, event);
    event->queue_position = job->queue_position;
    event->progress = job->progress;
    mailbox_emit(mailbox, event);
}

void job_set_state(Job *job, Mailbox *mailbox, EngineJobState state)
{
    if (job->state == state)
        return;
    job->state = state;
    if (state != ENGINE_JOB_QUEUED && state != ENGINE_JOB_LOADING)
        job->queue_position = 0;
    emit_news(job, mailbox, ENGINE_EVENT_JOB_STATE);
}

void job_set_queue_position(Job *job, Mailbox *mailbox, uint32_t position)
{
    if (job->queue_position == position)
        return;
    job->queue_position = position;
    emit_news(job, mailbox, ENGINE_EVENT_JOB_STATE);
}

void job_set_progress(Job *job, Mailbox *mailbox, double progress)
{
    if (progress <= job->progress)
        return;
    job->progress = progress;
    emit_news(job, mailbox, ENGINE_EVENT_PROGRESS);
}

int job_emit_text(Job *job, Mailbox *mailbox, const char *text, size_t length)
{
    EngineEvent *event;

    if (length == 0)
        return 0;
    event = event_new(ENGINE_EVENT_TEXT);
    if (!event)
        return error_origin(-ENOMEM);
    job_fill_event(job, event);
    event->text = malloc(length + 1);
    if (!event->text) {
        engine_event_free(event);
        return error_origin(-ENOMEM);
    }
    memcpy(event->text, text, length);
    event->text[length] = 0;
    event->text_length = length;
    mailbox_emit(mailbox, event);
    return 0;
}

int job_emit_token(Job *job, Mailbox *mailbox, int32_t id)
{
    EngineEvent *event;

    if (!job->want_ids)
        return 0;
    event = event_new(ENGINE_EVENT_TOKENS);
    if (!event)
        return error_origin(-ENOMEM);
    job_fill_event(job, event);
    event->ids = malloc(sizeof(id));
    if (!event->ids) {
        engine_event_free(event);
        return error_origin(-ENOMEM);
    }
    event->ids[0] = id;
    event->n_ids = 1;
    mailbox_emit(mailbox, event);
    return 0;
}

void job_emit_finished(Job *job, Mailbox *mailbox, EngineResult result, const char *reason, const ErrorDetail *detail)
{
    EngineEvent *event = TAKE_PTR(job->finished);

    if (!event)
        return;
    event->job = job->id;
    event->session = job->session_id;
    event->result = result;
    event->state = result == ENGINE_RESULT_DONE        ? ENGINE_JOB_DONE
                   : result == ENGINE_RESULT_CANCELLED ? ENGINE_JOB_CANCELLED
                                                       : ENGINE_JOB_FAILED;
    event->progress = result == ENGINE_RESULT_DONE ? 1 : job->progress;
    if (detail)
        event->detail = *detail;
    job->state = event->state;
    (void)snprintf(job->usage.stop_reason, sizeof(job->usage.stop_reason), "%s", reason);
    event->usage = job->usage;
    mailbox_emit(mailbox, event);
}
