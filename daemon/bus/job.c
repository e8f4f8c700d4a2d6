/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs: what the engine says of them goes to streams, replies and signals. */

#include "daemon/bus/job.h"
#include "daemon/bus/service.h"
#include "daemon/bus/session.h"
#include "daemon/bus/usage.h"
#include "daemon/text/utf8.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

const char *bus_job_kind_to_string(BusJobKind kind)
{
    static const char *const names[BUS_JOB_X_MAX] = {
        [BUS_JOB_ASK] = "ask",
        [BUS_JOB_GENERATE] = "generate",
        [BUS_JOB_INVOKE] = "invoke",
        [BUS_JOB_LOAD] = "load",
        [BUS_JOB_EVALUATE] = "evaluate",
    };

    assert(kind >= 0 && kind < BUS_JOB_X_MAX);
    return names[kind];
}

/* ---- life -------------------------------------------------------------------------------------------------------------------- */

BusJob *bus_job_free(BusJob *job)
{
    if (!job)
        return NULL;
    bus_client_give_job(job->client);
    bus_client_give_prompt(job->bus, job->client, job->n_prompt_bytes);
    stream_free(job->stream);
    sd_bus_message_unref(job->ask);
    free(job->model);
    free(job->service);
    free(job->text);
    free(job->ids);
    free(job);
    return NULL;
}

int bus_job_new(Bus *bus, BusClient *client, BusJobKind kind, const char *model, uint64_t n_prompt_bytes, BusJob **ret)
{
    BusJob *job = calloc(1, sizeof(*job));

    if (!job || !(job->model = strdup(model))) {
        free(job);
        return error_origin(-ENOMEM);
    }
    job->bus = bus;
    job->client = client;
    job->uid = client->uid;
    job->kind = kind;
    job->n_prompt_bytes = n_prompt_bytes;
    job->priority = ENGINE_PRIORITY_NORMAL;
    job->state = ENGINE_JOB_QUEUED;
    *ret = job;
    return 0;
}

static void bus_job_remove(BusJob *job)
{
    (void)id_table_remove(&job->bus->jobs, job->id);
    bus_job_free(job);
}

static void bus_job_on_pause(void *userdata, bool paused)
{
    BusJob *job = userdata;

    engine_pause(job->bus->engine, job->id, paused);
}

static void bus_job_on_stream_end(void *userdata, StreamEnd end)
{
    BusJob *job = userdata;

    if (end == STREAM_END_SLOW) {
        log_debug("job %" PRIu64 ": the reader is too slow", job->id);
        job->verdict = ENGINE_RESULT_SLOW_READER;
        engine_cancel(job->bus->engine, job->id);
        return;
    }
    job->stream = stream_free(job->stream);
    if (job->finished)
        bus_job_remove(job);
    else
        engine_cancel(job->bus->engine, job->id);
}

int bus_job_open_stream(BusJob *job, int *ret_fd)
{
    static const StreamOwner owner = {.pause = bus_job_on_pause, .end = bus_job_on_stream_end};

    return stream_new(job->bus->event, job->bus->stream_timeout_usec, &owner, job, &job->stream, ret_fd);
}

int bus_job_started(BusJob *job, uint64_t id)
{
    char path[BUS_ID_PATH_BYTES];
    int r;

    job->id = id;
    r = id_table_add(&job->bus->jobs, id, job);
    if (r < 0) {
        engine_cancel(job->bus->engine, id);
        bus_job_free(job);
        return error_trace(r);
    }
    bus_id_to_path(BUS_JOB_ROOT, id, path);
    if (job->stream)
        (void)stream_json(job->stream, 'V', json_pack("{s:i, s:s, s:s}", "version", 1, "job", path, "model", job->model));
    return 0;
}

void bus_jobs_owner_gone(Bus *bus, BusClient *client)
{
    for (size_t i = bus->jobs.n; i-- > 0;) {
        BusJob *job = bus->jobs.entries[i].object;

        if (job->client != client)
            continue;
        if (job->finished) {
            bus_job_remove(job);
            continue;
        }
        bus_client_give_prompt(bus, client, job->n_prompt_bytes);
        job->n_prompt_bytes = 0;
        job->client = NULL; /* the engine cancels it: engine_owner_gone() */
        job->stream = stream_free(job->stream);
        job->ask = sd_bus_message_unref(job->ask);
    }
}

BusJob *bus_job_of_session(Bus *bus, uint64_t session)
{
    for (size_t i = 0; i < bus->jobs.n; i++) {
        BusJob *job = bus->jobs.entries[i].object;

        if (!job->finished && job->session == session)
            return job;
    }
    return NULL;
}

void bus_jobs_clear(Bus *bus)
{
    while (bus->jobs.n > 0)
        bus_job_remove(bus->jobs.entries[0].object);
    id_table_clear(&bus->jobs);
}

/* ---- the end of a job ---------------------------------------------------------------------------------------------------------- */

/* The answer, and of several the best of the first prompt; an answer that grew with the events takes ids and text from there. */
static int bus_job_append_answer(BusJob *job, sd_bus_message *reply, const EngineEvent *event)
{
    UsageExtra extra = {.ids = job->want_ids ? job->ids : NULL, .n_ids = job->n_ids};
    _cleanup_(freep) char *text = NULL;
    int r;

    if (event) {
        extra.sequences = event->sequences;
        extra.n_sequences = event->n_sequences;
    }
    text = extra.n_sequences > 0 ? utf8_clean_copy(extra.sequences[0].text, extra.sequences[0].text_length)
                                 : utf8_clean_copy(job->text, job->n_text_bytes);
    if (!text)
        return error_origin(-ENOMEM);
    r = sd_bus_message_append(reply, "s", text);
    return r < 0 ? error_trace(r) : usage_append(reply, &job->usage, &extra);
}

/* @event: the engine's last word, or NULL. */
static int bus_job_reply_ask(BusJob *job, EngineResult result, const ErrorDetail *detail, const EngineEvent *event)
{
    __attribute__((__cleanup__(sd_bus_error_free))) sd_bus_error error = SD_BUS_ERROR_NULL;
    __attribute__((__cleanup__(sd_bus_message_unrefp))) sd_bus_message *reply = NULL;
    int r;

    if (result != ENGINE_RESULT_DONE) {
        (void)bus_error_set(&error, result, detail);
        return sd_bus_reply_method_error(job->ask, &error);
    }
    if ((r = sd_bus_message_new_method_return(job->ask, &reply)) < 0 || (r = bus_job_append_answer(job, reply, event)) < 0)
        return error_trace(r);
    return sd_bus_send(NULL, reply, NULL);
}

static int bus_job_send_finished(BusJob *job, EngineResult result, const char *text)
{
    __attribute__((__cleanup__(sd_bus_message_unrefp))) sd_bus_message *signal = NULL;
    char path[BUS_ID_PATH_BYTES];
    int r;

    bus_id_to_path(BUS_JOB_ROOT, job->id, path);
    if ((r = sd_bus_message_new_signal(job->bus->bus, &signal, path, BUS_INTERFACE_JOB, "Finished")) < 0 ||
        (r = sd_bus_message_set_destination(signal, job->client->name)) < 0 ||
        (r = sd_bus_message_append(signal, "s", bus_error_name(result))) < 0 ||
        (r = usage_append(signal, &job->usage, &(UsageExtra){.text = text})) < 0)
        return error_trace(r);
    return sd_bus_send(job->bus->bus, signal, NULL);
}

static void bus_job_end_stream(BusJob *job, EngineResult result, const char *text)
{
    (void)stream_json(job->stream, 'U', usage_to_json(&job->usage));
    if (result == ENGINE_RESULT_DONE)
        (void)stream_json(job->stream, 'D', json_pack("{s:s}", "reason", job->usage.stop_reason));
    else
        (void)stream_json(job->stream, 'X', json_pack("{s:s, s:s}", "name", bus_error_name(result), "text", text));
    stream_finish(job->stream); /* may end and free the job */
}

/* Tells everybody whom it concerns; @job may be gone afterwards. */
static void bus_job_finish(BusJob *job, EngineResult result, const ErrorDetail *detail, const EngineEvent *event)
{
    __attribute__((__cleanup__(sd_bus_error_free))) sd_bus_error error = SD_BUS_ERROR_NULL;
    int r;

    if (job->verdict != ENGINE_RESULT_DONE) { /* even when the engine was done first: the answer has a hole */
        result = job->verdict;
        detail = NULL;
    }
    job->finished = true;
    if (result != ENGINE_RESULT_DONE)
        (void)bus_error_set(&error, result, detail);
    if (job->service)
        bus_service_count(job->bus, job->service, result == ENGINE_RESULT_DONE);
    if (job->session)
        bus_session_job_finished(job->bus, job->session, &job->usage);
    if (job->ask && (r = bus_job_reply_ask(job, result, detail, event)) < 0) { /* who waits must hear something */
        log_warning("job %" PRIu64 ": cannot answer: %s", job->id, strerror(-r));
        (void)sd_bus_reply_method_errorf(job->ask, bus_error_name(r == -ENOMEM ? ENGINE_RESULT_OUT_OF_MEMORY : ENGINE_RESULT_FAILED),
                                         "the answer cannot be sent: %s", strerror(-r));
    }
    job->ask = sd_bus_message_unref(job->ask);
    if (job->client && (r = bus_job_send_finished(job, result, error.message)) < 0)
        log_warning("job %" PRIu64 ": cannot send Finished: %s, ignoring", job->id, strerror(-r));
    if (job->stream)
        bus_job_end_stream(job, result, error.message);
    else
        bus_job_remove(job);
}

void bus_jobs_shut_down(Bus *bus)
{
    for (size_t i = bus->jobs.n; i-- > 0;) {
        BusJob *job = bus->jobs.entries[i].object;

        if (!job->finished)
            bus_job_finish(job, ENGINE_RESULT_SHUTTING_DOWN, NULL, NULL);
    }
}

/* ---- what the engine says ------------------------------------------------------------------------------------------------------ */

/* Room for @n_more elements in an array that doubles. */
static int bus_job_grow(void **array, size_t *capacity, size_t n, size_t n_more, size_t element_bytes)
{
    size_t wanted = MAX(*capacity * 2, n + n_more);
    void *grown;

    if (n + n_more <= *capacity)
        return 0;
    if (!(grown = reallocarray(*array, wanted, element_bytes)))
        return error_origin(-ENOMEM);
    *array = grown;
    *capacity = wanted;
    return 0;
}

static int bus_job_on_text(BusJob *job, const EngineEvent *event)
{
    void *text = job->text;
    int r;

    if (job->stream)
        (void)stream_text(job->stream, event->text, event->text_length);
    if (!job->ask)
        return 0;
    if ((r = bus_job_grow(&text, &job->text_capacity, job->n_text_bytes, event->text_length + 1, 1)) < 0)
        return error_trace(r);
    job->text = text;
    memcpy(job->text + job->n_text_bytes, event->text, event->text_length);
    job->n_text_bytes += event->text_length;
    job->text[job->n_text_bytes] = 0;
    return 0;
}

static json_t *bus_job_ids_to_json(const int32_t *ids, size_t n)
{
    json_t *array = json_array();

    for (size_t i = 0; array && i < n; i++)
        (void)json_array_append_new(array, json_integer(ids[i]));
    return array;
}

static int bus_job_on_tokens(BusJob *job, const EngineEvent *event)
{
    void *ids = job->ids;
    int r;

    if (!job->want_ids)
        return 0;
    if (job->stream)
        (void)stream_json(job->stream, 'E', json_pack("{s:s, s:o}", "event", "tokens", "ids", bus_job_ids_to_json(event->ids, event->n_ids)));
    if (!job->ask)
        return 0;
    if ((r = bus_job_grow(&ids, &job->ids_capacity, job->n_ids, event->n_ids, sizeof(int32_t))) < 0)
        return error_trace(r);
    job->ids = ids;
    memcpy(job->ids + job->n_ids, event->ids, event->n_ids * sizeof(int32_t));
    job->n_ids += event->n_ids;
    return 0;
}

static void bus_job_on_state(BusJob *job, const EngineEvent *event)
{
    bool paused = event->state == ENGINE_JOB_PAUSED;

    job->state = event->state;
    job->queue_position = event->queue_position;
    if (!job->stream)
        return;
    if (event->state == ENGINE_JOB_QUEUED)
        (void)stream_json(job->stream, 'E', json_pack("{s:s, s:i}", "event", "queued", "position", (int)event->queue_position));
    /* A reader that is itself the reason has no use for the news. */
    if (paused != job->told_paused && !(paused && stream_is_blocked(job->stream))) {
        job->told_paused = paused;
        (void)stream_json(job->stream, 'E', json_pack("{s:s}", "event", paused ? "paused" : "resumed"));
    }
}

static void bus_job_on_progress(BusJob *job, const EngineEvent *event)
{
    const char *phase = job->state == ENGINE_JOB_LOADING ? "loading" : "prefill";

    job->progress = event->progress;
    if (job->stream && !stream_is_blocked(job->stream))
        (void)stream_json(job->stream, 'P', json_pack("{s:s, s:f}", "phase", phase, "progress", event->progress));
}

/* The counts so far, and a rate from the clock of this side; the engine's own comes with the end. */
static void bus_job_count(BusJob *job, const EngineUsage *usage)
{
    uint64_t now = bus_now_usec();

    job->usage.prompt_tokens = usage->prompt_tokens;
    job->usage.reused_tokens = usage->reused_tokens;
    job->usage.output_tokens = usage->output_tokens;
    if (usage->output_tokens == 0)
        return;
    if (job->first_token_usec == 0)
        job->first_token_usec = now;
    else if (now > job->first_token_usec)
        job->usage.decode_rate = 1e6 * (usage->output_tokens - 1) / (double)(now - job->first_token_usec);
}

void bus_jobs_on_event(Bus *bus, const EngineEvent *event)
{
    BusJob *job = id_table_find(&bus->jobs, event->job);
    int r = 0;

    if (!job || job->finished)
        return;
    if (event->kind == ENGINE_EVENT_FINISHED)
        job->usage = event->usage;
    else
        bus_job_count(job, &event->usage);
    if (event->kind == ENGINE_EVENT_JOB_STATE)
        bus_job_on_state(job, event);
    else if (event->kind == ENGINE_EVENT_PROGRESS)
        bus_job_on_progress(job, event);
    else if (event->kind == ENGINE_EVENT_TEXT)
        r = bus_job_on_text(job, event);
    else if (event->kind == ENGINE_EVENT_TOKENS)
        r = bus_job_on_tokens(job, event);
    else if (event->kind == ENGINE_EVENT_FINISHED)
        bus_job_finish(job, event->result, &event->detail, event);
    if (r < 0) { /* no memory for the answer: it must not reach the caller with a hole */
        job->verdict = ENGINE_RESULT_OUT_OF_MEMORY;
        engine_cancel(bus->engine, job->id);
    }
}
