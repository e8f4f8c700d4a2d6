/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine without a device, for tests of the bus side: a thread that "generates" by repeating the prompt, four bytes a token, one token of
 * every running job each millisecond.  It keeps the rules of daemon/engine/engine.h on states, pausing, cancelling and owners.
 *
 * Model names steer it: "corrupt" fails to load, "slow-load" loads for 300 ms.
 */

#include "daemon/engine/engine.h"

#include <assert.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

typedef struct FakeJob FakeJob;
struct FakeJob {
    FakeJob *next;
    uint64_t id, owner, session, deadline_usec, loading_until_usec;
    char *prompt, *model;
    size_t n_prompt, at;
    uint32_t max_tokens, n_output;
    bool paused, cancelled, want_ids, is_load, told;
    uint32_t n_prompts, n_sequences; /* n_sequences 0: one text that grows */
    int fd;
};

typedef struct FakeSession FakeSession;
struct FakeSession {
    FakeSession *next;
    uint64_t id, owner;
    uint32_t length;
};

typedef struct FakeEvent FakeEvent;
struct FakeEvent {
    EngineEvent event;
    FakeEvent *next;
};

struct Engine {
    pthread_t thread;
    pthread_mutex_t lock;
    int event_fd;
    bool quit, tracing;
    uint64_t last_id, heartbeat;
    FakeJob *jobs;
    FakeSession *sessions;
    FakeEvent *first, **last;
    EngineModelStatus models[16];
    size_t n_models;
};

static uint64_t fake_now_usec(void)
{
    struct timespec time = {0};

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

/* ---- events (all with the lock held) -------------------------------------------------------------------------------------------- */

static EngineEvent *fake_emit(Engine *engine, EngineEventKind kind)
{
    FakeEvent *event = calloc(1, sizeof(*event));
    uint64_t one = 1;

    assert(event);
    event->event.kind = kind;
    *engine->last = event;
    engine->last = &event->next;
    (void)!write(engine->event_fd, &one, sizeof(one));
    return &event->event;
}

EngineEvent *engine_next_event(Engine *engine)
{
    FakeEvent *event;
    uint64_t count;

    (void)pthread_mutex_lock(&engine->lock);
    event = engine->first;
    if (event && !(engine->first = event->next))
        engine->last = &engine->first;
    if (!engine->first)
        (void)!read(engine->event_fd, &count, sizeof(count));
    (void)pthread_mutex_unlock(&engine->lock);
    return event ? &event->event : NULL;
}

EngineEvent *engine_event_free(EngineEvent *event)
{
    if (!event)
        return NULL;
    free(event->text);
    free(event->ids);
    free(event->json);
    for (size_t i = 0; i < event->n_sequences; i++) {
        free(event->sequences[i].text);
        free(event->sequences[i].ids);
    }
    free(event->sequences);
    free(event); /* the first member of a FakeEvent */
    return NULL;
}

/* Sequence i of prompt p is "p.i", with score -i. */
static void fake_sequences(EngineEvent *event, const FakeJob *job)
{
    event->sequences = calloc(job->n_prompts * job->n_sequences, sizeof(*event->sequences));
    assert(event->sequences);
    for (uint32_t p = 0; p < job->n_prompts; p++)
        for (uint32_t i = 0; i < job->n_sequences; i++) {
            EngineSequence *s = &event->sequences[event->n_sequences++];

            *s = (EngineSequence){.prompt = p, .score = -(float)i, .n_tokens = 1, .stop_reason = "length", .text = malloc(32)};
            assert(s->text);
            s->text_length = (size_t)snprintf(s->text, 32, "%u.%u", p, i);
            if (job->want_ids) {
                s->ids = calloc(1, sizeof(int32_t));
                assert(s->ids);
                s->ids[0] = (int32_t)i;
            }
        }
}

static void fake_finish(Engine *engine, FakeJob **place, EngineResult result, const char *reason)
{
    EngineEvent *event = fake_emit(engine, ENGINE_EVENT_FINISHED);
    FakeJob *job = *place;

    event->job = job->id;
    event->session = job->session;
    event->result = result;
    event->state = result == ENGINE_RESULT_DONE ? ENGINE_JOB_DONE : ENGINE_JOB_FAILED;
    if (!job->is_load) {
        event->usage.prompt_tokens = (uint32_t)(job->n_prompt + 3) / 4;
        event->usage.output_tokens = job->n_output;
    }
    (void)snprintf(event->usage.stop_reason, sizeof(event->usage.stop_reason), "%s", reason);
    (void)snprintf(event->usage.device, sizeof(event->usage.device), "fake");
    if (result == ENGINE_RESULT_DONE && job->n_sequences > 0)
        fake_sequences(event, job);
    for (FakeSession *s = engine->sessions; s; s = s->next)
        if (job->session && s->id == job->session)
            s->length = event->usage.prompt_tokens + job->n_output;
    *place = job->next;
    if (job->fd >= 0)
        (void)close(job->fd);
    free(job->prompt);
    free(job->model);
    free(job);
}

/* ---- the thread ------------------------------------------------------------------------------------------------------------------ */

static EngineModelStatus *fake_model(Engine *engine, const char *name)
{
    for (size_t i = 0; i < engine->n_models; i++)
        if (strcmp(engine->models[i].name, name) == 0)
            return &engine->models[i];
    return NULL;
}

static void fake_set_model_state(Engine *engine, const char *name, const char *state)
{
    EngineModelStatus *model = fake_model(engine, name);
    EngineEvent *event;

    if (!model || strcmp(model->state, state) == 0)
        return;
    (void)snprintf(model->state, sizeof(model->state), "%s", state);
    event = fake_emit(engine, ENGINE_EVENT_MODEL_STATE);
    (void)snprintf(event->model, sizeof(event->model), "%s", name);
}

static EngineEvent *fake_emit_job(Engine *engine, const FakeJob *job, EngineEventKind kind)
{
    EngineEvent *event = fake_emit(engine, kind);

    event->job = job->id;
    event->usage.prompt_tokens = (uint32_t)(job->n_prompt + 3) / 4;
    event->usage.output_tokens = job->n_output;
    return event;
}

static void fake_token(Engine *engine, FakeJob *job)
{
    EngineEvent *event;
    size_t n = 0;

    job->n_output++;
    event = fake_emit_job(engine, job, ENGINE_EVENT_TEXT);
    event->text = malloc(16);
    assert(event->text);
    while (n < 4 || ((unsigned char)job->prompt[job->at % job->n_prompt] & 0xc0) == 0x80)
        event->text[n++] = job->prompt[job->at++ % job->n_prompt];
    event->text_length = n;
    if (job->want_ids) {
        event = fake_emit_job(engine, job, ENGINE_EVENT_TOKENS);
        event->ids = malloc(sizeof(int32_t));
        assert(event->ids);
        event->ids[0] = (int32_t)job->n_output;
        event->n_ids = 1;
    }
}

static void fake_state(Engine *engine, FakeJob *job, EngineJobState state)
{
    fake_emit_job(engine, job, ENGINE_EVENT_JOB_STATE)->state = state;
}

/* One turn of one job; false when it has ended. */
static bool fake_step(Engine *engine, FakeJob **place, uint64_t now)
{
    FakeJob *job = *place;
    EngineModelStatus *model = fake_model(engine, job->model);

    if (job->cancelled)
        fake_finish(engine, place, ENGINE_RESULT_CANCELLED, "cancelled");
    else if (job->deadline_usec && now > job->deadline_usec)
        fake_finish(engine, place, ENGINE_RESULT_DEADLINE_EXCEEDED, "error");
    else if (!model)
        fake_finish(engine, place, ENGINE_RESULT_NO_SUCH_MODEL, "error");
    else if (strcmp(job->model, "corrupt") == 0)
        fake_finish(engine, place, ENGINE_RESULT_MODEL_CORRUPT, "error");
    else if (now < job->loading_until_usec)
        return true;
    else if (job->is_load) {
        fake_set_model_state(engine, job->model, "loaded");
        fake_finish(engine, place, ENGINE_RESULT_DONE, "stop");
    } else if (job->fd >= 0) {
        (void)!write(job->fd, "npy", 3);
        fake_finish(engine, place, ENGINE_RESULT_DONE, "stop");
    } else if (job->n_output >= job->max_tokens)
        fake_finish(engine, place, ENGINE_RESULT_DONE, "length");
    else if (job->n_sequences > 0)
        fake_finish(engine, place, ENGINE_RESULT_DONE, "length");
    else {
        if (!job->told)
            fake_state(engine, job, ENGINE_JOB_DECODING);
        job->told = true;
        fake_set_model_state(engine, job->model, "loaded");
        if (!job->paused)
            fake_token(engine, job);
        return true;
    }
    return false;
}

static void *fake_main(void *userdata)
{
    Engine *engine = userdata;

    (void)pthread_mutex_lock(&engine->lock);
    (void)fake_emit(engine, ENGINE_EVENT_DEVICE_STATE);
    while (!engine->quit) {
        FakeJob **place = &engine->jobs;

        while (*place)
            if (fake_step(engine, place, fake_now_usec()))
                place = &(*place)->next;
        (void)__atomic_add_fetch(&engine->heartbeat, 1, __ATOMIC_RELAXED);
        (void)pthread_mutex_unlock(&engine->lock);
        (void)usleep(1000);
        (void)pthread_mutex_lock(&engine->lock);
    }
    (void)pthread_mutex_unlock(&engine->lock);
    return NULL;
}

/* ---- life ------------------------------------------------------------------------------------------------------------------------ */

int engine_reconfigure(Engine *engine, const EngineModel *models, size_t n_models)
{
    (void)pthread_mutex_lock(&engine->lock);
    memset(engine->models, 0, sizeof(engine->models));
    for (engine->n_models = 0; engine->n_models < n_models && engine->n_models < N_ELEMENTS(engine->models); engine->n_models++) {
        EngineModelStatus *status = &engine->models[engine->n_models];

        (void)snprintf(status->name, sizeof(status->name), "%s", models[engine->n_models].name);
        (void)snprintf(status->path, sizeof(status->path), "%s", models[engine->n_models].path ? models[engine->n_models].path : "");
        (void)snprintf(status->state, sizeof(status->state), "unloaded");
        status->context = 2048;
    }
    (void)pthread_mutex_unlock(&engine->lock);
    return 0;
}

int engine_new(const EngineOptions *options, Engine **ret, ErrorDetail *reterr)
{
    Engine *engine = calloc(1, sizeof(*engine));

    (void)reterr;
    assert(engine);
    (void)pthread_mutex_init(&engine->lock, NULL);
    engine->last = &engine->first;
    engine->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert(engine->event_fd >= 0);
    (void)engine_reconfigure(engine, options->models, options->n_models);
    if (pthread_create(&engine->thread, NULL, fake_main, engine) != 0)
        abort();
    *ret = engine;
    return 0;
}

Engine *engine_free(Engine *engine)
{
    EngineEvent *event;

    if (!engine)
        return NULL;
    (void)pthread_mutex_lock(&engine->lock);
    engine->quit = true;
    (void)pthread_mutex_unlock(&engine->lock);
    (void)pthread_join(engine->thread, NULL);
    while (engine->jobs)
        fake_finish(engine, &engine->jobs, ENGINE_RESULT_SHUTTING_DOWN, "error");
    while ((event = engine_next_event(engine)))
        (void)engine_event_free(event);
    while (engine->sessions) {
        FakeSession *next = engine->sessions->next;

        free(engine->sessions);
        engine->sessions = next;
    }
    (void)close(engine->event_fd);
    free(engine);
    return NULL;
}

int engine_event_fd(const Engine *engine)
{
    return engine->event_fd;
}

uint64_t engine_heartbeat(const Engine *engine)
{
    return __atomic_load_n(&engine->heartbeat, __ATOMIC_RELAXED);
}

const char *engine_job_state_to_string(EngineJobState state)
{
    static const char *const names[] = {"queued", "loading", "prefill", "decoding", "paused", "done", "failed", "cancelled"};

    return names[state];
}

/* ---- jobs ------------------------------------------------------------------------------------------------------------------------ */

static FakeJob *fake_job_new(uint64_t owner, const char *model)
{
    FakeJob *job = calloc(1, sizeof(*job));

    assert(job);
    job->owner = owner;
    job->model = strdup(model ? model : "");
    job->fd = -1;
    return job;
}

static int fake_job_start(Engine *engine, FakeJob *job, uint64_t *ret_job)
{
    (void)pthread_mutex_lock(&engine->lock);
    if (strcmp(job->model, "slow-load") == 0)
        job->loading_until_usec = fake_now_usec() + 300000;
    *ret_job = job->id = ++engine->last_id;
    job->next = engine->jobs;
    engine->jobs = job;
    (void)pthread_mutex_unlock(&engine->lock);
    return 0;
}

int engine_generate(Engine *engine, const EngineRequest *request, uint64_t *ret_job)
{
    FakeJob *job = fake_job_new(request->owner, request->model);
    const char *prompt = request->raw ? request->raw : request->n_messages ? request->messages[request->n_messages - 1].content : "ids ";

    job->session = request->session;
    job->prompt = strdup(prompt[0] ? prompt : " ");
    assert(job->prompt);
    job->n_prompt = strlen(job->prompt);
    job->max_tokens = request->sampling.max_tokens ? request->sampling.max_tokens : UINT32_MAX;
    job->deadline_usec = request->deadline_usec;
    job->want_ids = request->want_ids;
    job->n_prompts = MAX((uint32_t)request->n_prompts, 1u);
    if (request->prompts || request->sampling.num_beams > 1 || request->sampling.num_return_sequences > 1)
        job->n_sequences = MAX(request->sampling.num_return_sequences, 1u);
    return fake_job_start(engine, job, ret_job);
}

int engine_load(Engine *engine, uint64_t owner, const char *model, uint64_t *ret_job)
{
    FakeJob *job = fake_job_new(owner, model);

    job->is_load = true;
    return fake_job_start(engine, job, ret_job);
}

int engine_evaluate(Engine *engine, uint64_t owner, const char *model, const KvPolicy *policy, const int32_t *ids, size_t n_ids, int fd,
                    uint64_t *ret_job)
{
    FakeJob *job = fake_job_new(owner, model);

    (void)policy;
    (void)ids;
    (void)n_ids;
    job->fd = fd;
    return fake_job_start(engine, job, ret_job);
}

static void fake_each_job(Engine *engine, uint64_t id, uint64_t owner, int cancel, int pause)
{
    (void)pthread_mutex_lock(&engine->lock);
    for (FakeJob *job = engine->jobs; job; job = job->next) {
        if (job->id != id && (owner == 0 || job->owner != owner))
            continue;
        if (cancel)
            job->cancelled = true;
        if (pause >= 0)
            job->paused = pause;
    }
    (void)pthread_mutex_unlock(&engine->lock);
}

void engine_cancel(Engine *engine, uint64_t job)
{
    fake_each_job(engine, job, 0, 1, -1);
}

void engine_pause(Engine *engine, uint64_t job, bool paused)
{
    fake_each_job(engine, job, 0, 0, paused);
}

void engine_owner_gone(Engine *engine, uint64_t owner)
{
    fake_each_job(engine, 0, owner, 1, -1);
}

/* ---- questions ------------------------------------------------------------------------------------------------------------------- */

static FakeSession *fake_session(Engine *engine, const EngineQuery *query)
{
    for (FakeSession *s = engine->sessions; s; s = s->next)
        if (s->id == query->session && (query->owner == 0 || s->owner == query->owner))
            return s;
    return NULL;
}

static uint64_t fake_session_new(Engine *engine, uint64_t owner, uint32_t length)
{
    FakeSession *session = calloc(1, sizeof(*session));

    assert(session);
    *session = (FakeSession){.next = engine->sessions, .id = ++engine->last_id, .owner = owner, .length = length};
    engine->sessions = session;
    return session->id;
}

static void fake_tokens(const EngineQuery *query, EngineEvent *reply)
{
    size_t n = query->text ? strlen(query->text) : 0;

    for (size_t i = 0; i < query->n_messages; i++)
        n += strlen(query->messages[i].content);
    if (query->want_ids) {
        reply->ids = calloc(n + 1, sizeof(int32_t));
        assert(reply->ids);
        for (size_t i = 0; i < n; i++)
            reply->ids[i] = (unsigned char)query->text[i];
        reply->n_ids = n;
    }
    if (asprintf(&reply->json, "{\"tokens\": %zu}", n) < 0)
        abort();
}

static void fake_session_query(Engine *engine, const EngineQuery *query, FakeSession *session, EngineEvent *reply)
{
    if (query->kind == ENGINE_QUERY_CLONE_SESSION) {
        reply->session = fake_session_new(engine, query->owner, session->length);
    } else if (query->kind == ENGINE_QUERY_CLOSE_SESSION) {
        FakeSession **place = &engine->sessions;

        while (*place != session)
            place = &(*place)->next;
        *place = session->next;
        free(session);
    } else if (query->kind == ENGINE_QUERY_CROP_SESSION && query->n < -(int64_t)session->length) {
        reply->result = ENGINE_RESULT_INVALID_ARGS;
    } else {
        if (query->kind == ENGINE_QUERY_CROP_SESSION)
            session->length -= (uint32_t)-query->n;
        if (asprintf(&reply->json, "{\"length\": %u, \"strategy\": \"fake\", \"warm\": true}", session->length) < 0)
            abort();
    }
}

int engine_query(Engine *engine, const EngineQuery *query)
{
    FakeSession *session;
    EngineEvent *reply;

    (void)pthread_mutex_lock(&engine->lock);
    session = query->session ? fake_session(engine, query) : NULL;
    if (query->kind == ENGINE_QUERY_UNLOAD)
        fake_set_model_state(engine, query->model, "unloaded");
    reply = fake_emit(engine, ENGINE_EVENT_REPLY);
    reply->cookie = query->cookie;
    if (query->session && !session)
        reply->result = ENGINE_RESULT_NO_SUCH_SESSION;
    else if (query->kind == ENGINE_QUERY_COUNT_TOKENS)
        fake_tokens(query, reply);
    else if (query->kind == ENGINE_QUERY_ESTIMATE)
        reply->json = strdup("{\"fits\": true, \"total\": 12, \"nested\": {\"rate\": 1.5, \"list\": [1, \"two\"]}, \"none\": null, \"below\": -1}");
    else if (query->kind == ENGINE_QUERY_OPEN_SESSION)
        reply->session = fake_session_new(engine, query->owner, 0);
    else if (session)
        fake_session_query(engine, query, session, reply);
    else if (query->kind == ENGINE_QUERY_TRACE_STOP) {
        (void)!write(query->fd, "{\"traceEvents\": []}", 19);
        (void)close(query->fd);
    }
    (void)pthread_mutex_unlock(&engine->lock);
    return 0;
}

/* ---- the snapshot ---------------------------------------------------------------------------------------------------------------- */

size_t engine_n_models(const Engine *engine)
{
    return engine->n_models;
}

bool engine_model_status(const Engine *engine, size_t index, EngineModelStatus *ret)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)(uintptr_t)&engine->lock;
    bool found;

    (void)pthread_mutex_lock(lock);
    found = index < engine->n_models;
    if (found)
        *ret = engine->models[index];
    (void)pthread_mutex_unlock(lock);
    return found;
}

bool engine_model_status_by_name(const Engine *engine, const char *name, EngineModelStatus *ret)
{
    for (size_t i = 0; engine_model_status(engine, i, ret); i++)
        if (strcmp(ret->name, name) == 0)
            return true;
    return false;
}

void engine_device_status(const Engine *engine, EngineDeviceStatus *ret)
{
    (void)engine;
    memset(ret, 0, sizeof(*ret));
    ret->open = true;
    (void)snprintf(ret->info.name, sizeof(ret->info.name), "fake device \xff");
    (void)snprintf(ret->info.reason, sizeof(ret->info.reason), "the only one");
    ret->info.type = GPU_DEVICE_TYPE_CPU;
}

void engine_queue_status(const Engine *engine, uint32_t *ret_n_jobs, uint32_t *ret_n_queued)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)(uintptr_t)&engine->lock;

    *ret_n_jobs = *ret_n_queued = 0;
    (void)pthread_mutex_lock(lock);
    for (const FakeJob *job = engine->jobs; job; job = job->next)
        ++*ret_n_jobs;
    (void)pthread_mutex_unlock(lock);
}
