/* SPDX-License-Identifier: Apache-2.0 */
/* org.leat.Inference1.Session. */

#include "daemon/bus/session.h"
#include "daemon/bus/input.h"
#include "daemon/bus/job.h"
#include "daemon/bus/json-message.h"
#include "daemon/bus/messages.h"
#include "daemon/bus/question.h"
#include "daemon/bus/request.h"
#include "daemon/bus/usage.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

/* ---- life -------------------------------------------------------------------------------------------------------------------- */

static BusSession *bus_session_free(BusSession *session)
{
    if (!session)
        return NULL;
    session->client->n_sessions--;
    free(session->model);
    free(session->cache_json);
    free(session);
    return NULL;
}

static int bus_session_new(Bus *bus, BusClient *client, uint64_t id, const char *model, EnginePriority priority, BusSession **ret)
{
    BusSession *session = calloc(1, sizeof(*session));
    int r;

    if (!session || !(session->model = strdup(model))) {
        free(session);
        return error_origin(-ENOMEM);
    }
    session->bus = bus;
    session->id = id;
    session->client = client;
    session->priority = priority;
    client->n_sessions++;
    if ((r = id_table_add(&bus->sessions, id, session)) < 0) {
        bus_session_free(session);
        return error_trace(r);
    }
    *ret = session;
    return 0;
}

static void bus_session_remove(BusSession *session)
{
    (void)id_table_remove(&session->bus->sessions, session->id);
    bus_session_free(session);
}

void bus_session_closed(Bus *bus, uint64_t id)
{
    BusSession *session = id_table_find(&bus->sessions, id);

    if (session)
        bus_session_remove(session);
}

void bus_sessions_owner_gone(Bus *bus, BusClient *client)
{
    for (size_t i = bus->sessions.n; i-- > 0;) {
        BusSession *session = bus->sessions.entries[i].object;

        if (session->client == client)
            bus_session_remove(session); /* the engine closes it: engine_owner_gone() */
    }
}

void bus_sessions_clear(Bus *bus)
{
    while (bus->sessions.n > 0)
        bus_session_remove(bus->sessions.entries[0].object);
    id_table_clear(&bus->sessions);
}

/* ---- the cache's facts --------------------------------------------------------------------------------------------------------- */

static int bus_session_take_cache(BusSession *session, const char *json)
{
    char *copy = strdup(json ? json : "{}");

    if (!copy)
        return error_origin(-ENOMEM);
    free(session->cache_json);
    session->cache_json = copy;
    return 0;
}

static int bus_session_answer_cache(BusQuestion *question, const EngineEvent *event, sd_bus_error *error)
{
    __attribute__((__cleanup__(sd_bus_message_unrefp))) sd_bus_message *reply = NULL;
    BusSession *session = id_table_find(&question->bus->sessions, question->session);
    int r;

    if (!session)
        return bus_error_set(error, ENGINE_RESULT_NO_SUCH_SESSION, NULL);
    if ((r = bus_session_take_cache(session, event->json)) < 0)
        return error_trace(r);
    if (!question->call)
        return 0;
    if ((r = sd_bus_message_new_method_return(question->call, &reply)) < 0 || (r = sd_bus_message_open_container(reply, 'v', "a{sv}")) < 0 ||
        (r = json_message_append(reply, session->cache_json)) < 0 || (r = sd_bus_message_close_container(reply)) < 0)
        return error_trace(r);
    return sd_bus_send(NULL, reply, NULL);
}

/* Asks for the cache's facts; @call (may be NULL): a Properties.Get that waits for them. */
static int bus_session_ask_cache(BusSession *session, sd_bus_message *call, sd_bus_error *error)
{
    EngineQuery query = {.kind = ENGINE_QUERY_SESSION_CACHE, .owner = session->client->owner, .session = session->id, .fd = -1};

    return bus_ask_engine(session->bus, call, &query, bus_session_answer_cache, NULL, error);
}

void bus_session_job_finished(Bus *bus, uint64_t id, const EngineUsage *usage)
{
    BusSession *session = id_table_find(&bus->sessions, id);

    if (!session)
        return;
    session->usage = *usage;
    session->context_used = usage->prompt_tokens + usage->output_tokens;
    (void)bus_session_ask_cache(session, NULL, NULL);
}

/* ---- finding and authorising --------------------------------------------------------------------------------------------------- */

/* F22: a session belongs to the connection that opened it; the bus never gives its name to another. */
static int bus_session_authorise(BusSession *session, sd_bus_message *m, sd_bus_error *error)
{
    BusClient *client;
    int r = bus_client_get(session->bus, m, &client, error);

    if (r < 0)
        return error_trace(r);
    if (client == session->client || client->uid == 0)
        return 0;
    return sd_bus_error_set(error, SD_BUS_ERROR_ACCESS_DENIED, "this is another client's session");
}

/* Root may look, crop and close, but what goes into a session's context is its owner's. */
static int bus_session_authorise_owner(BusSession *session, sd_bus_message *m, sd_bus_error *error)
{
    BusClient *client;
    int r = bus_client_get(session->bus, m, &client, error);

    if (r < 0)
        return error_trace(r);
    return client == session->client ? 0 : sd_bus_error_set(error, SD_BUS_ERROR_ACCESS_DENIED, "only the session's owner may do this");
}

/* 1 with the session, 0 when @path is none of a session's, or negative. */
static int bus_session_lookup(Bus *bus, sd_bus_message *m, const char *path, BusSession **ret, sd_bus_error *error)
{
    BusSession *session;
    uint64_t id;
    int r;

    if (!bus_path_to_id(path, BUS_SESSION_ROOT, &id) || !m)
        return 0;
    session = id_table_find(&bus->sessions, id);
    if (!session)
        return bus_error_set(error, ENGINE_RESULT_NO_SUCH_SESSION, NULL);
    if ((r = bus_session_authorise(session, m, error)) < 0)
        return error_trace(r);
    *ret = session;
    return 1;
}

static int bus_session_find(sd_bus *connection, const char *path, const char *interface, void *userdata, void **ret, sd_bus_error *error)
{
    BusSession *session = NULL;
    int r = bus_session_lookup(userdata, sd_bus_get_current_message(connection), path, &session, error);

    (void)interface;
    if (r > 0)
        *ret = session;
    return r;
}

/* ---- methods ------------------------------------------------------------------------------------------------------------------- */

/* OpenSession and Clone: the session exists in the engine, now it becomes an object. */
static int bus_session_answer_open(BusQuestion *question, const EngineEvent *event, sd_bus_error *error)
{
    BusClient *client = bus_client_find(question->bus, question->owner);
    EngineQuery close_query = {.kind = ENGINE_QUERY_CLOSE_SESSION, .owner = question->owner, .session = event->session, .fd = -1};
    char path[BUS_ID_PATH_BYTES];
    BusSession *session = NULL;
    int r = -ENOTCONN;

    if (client && question->call && (r = bus_client_check_session(client, error)) >= 0)
        r = bus_session_new(question->bus, client, event->session, question->model, question->priority, &session);
    if (!session) {
        (void)bus_ask_engine(question->bus, NULL, &close_query, bus_answer_empty, NULL, NULL);
        return error_trace(r);
    }
    if (question->session) {
        const BusSession *original = id_table_find(&question->bus->sessions, question->session);

        if (original)
            session->context_used = original->context_used;
    }
    (void)bus_session_ask_cache(session, NULL, NULL);
    bus_id_to_path(BUS_SESSION_ROOT, session->id, path);
    return sd_bus_reply_method_return(question->call, "o", path);
}

static int bus_session_ask_open(Bus *bus, sd_bus_message *m, EngineQuery *query, const char *model, EnginePriority priority, sd_bus_error *error)
{
    BusQuestion *question;
    BusClient *client;
    int r;

    query->model = model;
    if ((r = bus_client_get(bus, m, &client, error)) < 0 || (r = bus_client_check_session(client, error)) < 0 ||
        (r = bus_ask_engine(bus, m, query, bus_session_answer_open, &question, error)) < 0)
        return error_trace(r);
    question->priority = priority;
    return 1;
}

int bus_session_open(Bus *bus, sd_bus_message *m, sd_bus_error *error)
{
    const uint64_t allowed = CALL_OPTION_BIT(CALL_OPTION_CACHE) | CALL_OPTION_BIT(CALL_OPTION_PRIORITY);
    _cleanup_(call_options_clear) CallOptions options = CALL_OPTIONS_NULL;
    EngineQuery query = {.kind = ENGINE_QUERY_OPEN_SESSION, .fd = -1};
    const ConfigModel *model;
    const char *name;
    KvPolicy policy;
    int r;

    if ((r = sd_bus_message_read(m, "s", &name)) < 0 || (r = call_options_read(m, allowed, &options, error)) < 0)
        return error_trace(r);
    if (!(model = bus_find_model(bus, name, error)))
        return sd_bus_error_get_errno(error) ? -sd_bus_error_get_errno(error) : -ENOENT;
    if (call_options_have(&options, CALL_OPTION_CACHE)) {
        if ((r = bus_policy(bus, model, NULL, &options.cache, &policy, error)) < 0)
            return error_trace(r);
        query.policy = &policy;
    }
    return bus_session_ask_open(bus, m, &query, model->name, options.priority, error);
}

static int bus_session_clone(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    BusSession *session = userdata;
    EngineQuery query = {.kind = ENGINE_QUERY_CLONE_SESSION, .session = session->id, .fd = -1};
    int r;

    if ((r = bus_session_authorise_owner(session, m, error)) < 0 || (r = call_options_read_none(m, error)) < 0)
        return error_trace(r);
    return bus_session_ask_open(session->bus, m, &query, session->model, session->priority, error);
}

static int bus_session_generate(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    _cleanup_(bus_request_freep) BusRequest *request = NULL;
    BusSession *session = userdata;
    const ConfigModel *model;
    int r;

    if ((r = bus_session_authorise_owner(session, m, error)) < 0)
        return error_trace(r);
    if (bus_job_of_session(session->bus, session->id))
        return bus_error_set(error, ENGINE_RESULT_SESSION_BUSY, NULL);
    if (!(model = bus_find_model(session->bus, session->model, error)))
        return -ENOENT;
    if ((r = bus_request_new(session->bus, m, BUS_JOB_GENERATE, model, &request, error)) < 0 ||
        (r = messages_read(m, &request->messages, error)) < 0 ||
        (r = call_options_read(m, CALL_OPTIONS_RUN | CALL_OPTIONS_PROMPT, &request->options, error)) < 0)
        return error_trace(r);
    request->session = session->id;
    request->priority = session->priority;
    return bus_request_submit(TAKE_PTR(request), error);
}

static int bus_session_count_tokens(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    _cleanup_(messages_clear) Messages messages = MESSAGES_NULL;
    BusSession *session = userdata;
    EngineQuery query = {.kind = ENGINE_QUERY_COUNT_TOKENS, .owner = session->client->owner, .session = session->id, .model = session->model, .fd = -1};
    int r;

    if ((r = messages_read(m, &messages, error)) < 0 || (r = call_options_read_none(m, error)) < 0)
        return error_trace(r);
    if (messages.n == 0)
        return bus_error_invalid(error, "there are no messages");
    query.messages = messages.messages;
    query.n_messages = messages.n;
    r = bus_ask_engine(session->bus, m, &query, bus_answer_tokens, NULL, error);
    return r < 0 ? error_trace(r) : 1;
}

/* The answer to Crop and Restore: the session's new length. */
static int bus_session_answer_length(BusQuestion *question, const EngineEvent *event, sd_bus_error *error)
{
    BusSession *session = id_table_find(&question->bus->sessions, question->session);
    uint64_t length;
    int r = json_message_integer(event->json, "length", &length);

    (void)error;
    if (r < 0)
        return error_trace(r);
    if (session) {
        session->context_used = (uint32_t)MIN(length, (uint64_t)UINT32_MAX);
        (void)bus_session_ask_cache(session, NULL, NULL);
    }
    return question->call ? sd_bus_reply_method_return(question->call, "u", (uint32_t)MIN(length, (uint64_t)UINT32_MAX)) : 0;
}

static int bus_session_crop(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    BusSession *session = userdata;
    EngineQuery query = {.kind = ENGINE_QUERY_CROP_SESSION, .owner = session->client->owner, .session = session->id, .fd = -1};
    int32_t n;
    int r;

    if ((r = sd_bus_message_read(m, "i", &n)) < 0 || (r = call_options_read_none(m, error)) < 0)
        return error_trace(r);
    if (n > 0)
        return bus_error_invalid(error, "n is %d, expected 0 or less: -n tokens are removed from the end", n);
    query.n = n;
    r = bus_ask_engine(session->bus, m, &query, bus_session_answer_length, NULL, error);
    return r < 0 ? error_trace(r) : 1;
}

static int bus_session_set_recording(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    BusSession *session = userdata;
    EngineQuery query = {.kind = ENGINE_QUERY_RECORD_SESSION, .owner = session->client->owner, .session = session->id, .fd = -1};
    int on, r;

    if ((r = sd_bus_message_read(m, "b", &on)) < 0 || (r = call_options_read_none(m, error)) < 0)
        return error_trace(r);
    query.n = on;
    r = bus_ask_engine(session->bus, m, &query, bus_answer_empty, NULL, error);
    return r < 0 ? error_trace(r) : 1;
}

static int bus_session_answer_save(BusQuestion *question, const EngineEvent *event, sd_bus_error *error)
{
    uint64_t bytes;
    int r = json_message_integer(event->json, "bytes", &bytes);

    (void)error;
    if (r < 0)
        return error_trace(r);
    return question->call ? sd_bus_reply_method_return(question->call, "t", bytes) : 0;
}

/* A descriptor of the message's, checked, as our own. */
static int bus_session_take_file(sd_bus_message *m, bool write, int *ret_fd, sd_bus_error *error)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int fd, r;

    if ((r = sd_bus_message_read(m, "h", &fd)) < 0 || (r = call_options_read_none(m, error)) < 0)
        return error_trace(r);
    if (input_check_file(fd, write, &detail) < 0)
        return bus_error_invalid(error, "%s", detail.text);
    *ret_fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    return *ret_fd < 0 ? error_origin(-errno) : 0;
}

/* What is in a session's context is its owner's, in a file as well. */
static int bus_session_ask_file(sd_bus_message *m, BusSession *session, bool save, sd_bus_error *error)
{
    EngineQuery query = {.kind = save ? ENGINE_QUERY_SAVE_SESSION : ENGINE_QUERY_RESTORE_SESSION,
                         .owner = session->client->owner,
                         .session = session->id};
    int r;

    if ((r = bus_session_authorise_owner(session, m, error)) < 0 || (r = bus_session_take_file(m, save, &query.fd, error)) < 0)
        return error_trace(r);
    r = bus_ask_engine(session->bus, m, &query, save ? bus_session_answer_save : bus_session_answer_length, NULL, error);
    if (r < 0) {
        (void)close(query.fd);
        return error_trace(r);
    }
    return 1;
}

static int bus_session_save(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    return bus_session_ask_file(m, userdata, true, error);
}

static int bus_session_restore(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    return bus_session_ask_file(m, userdata, false, error);
}

static int bus_session_cancel(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    BusSession *session = userdata;
    BusJob *job;
    int r = call_options_read_none(m, error);

    if (r < 0)
        return error_trace(r);
    if ((job = bus_job_of_session(session->bus, session->id)))
        engine_cancel(session->bus->engine, job->id);
    return sd_bus_reply_method_return(m, "");
}

static int bus_session_close(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    BusSession *session = userdata;
    Bus *bus = session->bus;
    EngineQuery query = {.kind = ENGINE_QUERY_CLOSE_SESSION, .owner = session->client->owner, .session = session->id, .fd = -1};
    BusJob *job;
    int r;

    if ((r = call_options_read_none(m, error)) < 0)
        return error_trace(r);
    if ((job = bus_job_of_session(bus, session->id)))
        engine_cancel(bus->engine, job->id);
    if ((r = bus_ask_engine(bus, m, &query, bus_answer_empty, NULL, error)) < 0)
        return error_trace(r);
    bus_session_remove(session);
    return 1;
}

/* ---- properties ---------------------------------------------------------------------------------------------------------------- */

#define SESSION_GETTER(name)                                                                                                                \
    static int bus_session_get_##name(sd_bus *connection _unused_, const char *path _unused_, const char *interface _unused_,             \
                                      const char *property _unused_, sd_bus_message *reply, void *userdata, sd_bus_error *error _unused_)

SESSION_GETTER(model)
{
    const BusSession *session = userdata;
    const BusNamed *model = bus_roster_find(&session->bus->models, session->model);

    return sd_bus_message_append(reply, "o", model ? model->path : "/");
}

SESSION_GETTER(state)
{
    const BusSession *session = userdata;

    return sd_bus_message_append(reply, "s", bus_job_of_session(session->bus, session->id) ? "busy" : "idle");
}

SESSION_GETTER(priority)
{
    const BusSession *session = userdata;

    return sd_bus_message_append(reply, "s", engine_priority_to_name(session->priority));
}

SESSION_GETTER(context_used)
{
    const BusSession *session = userdata;

    return sd_bus_message_append(reply, "u", session->context_used);
}

SESSION_GETTER(context_limit)
{
    const BusSession *session = userdata;
    EngineModelStatus status = {.context = 0};

    (void)engine_model_status_by_name(session->bus->engine, session->model, &status);
    return sd_bus_message_append(reply, "u", status.context);
}

SESSION_GETTER(usage)
{
    const BusSession *session = userdata;

    return usage_append(reply, &session->usage, NULL);
}

SESSION_GETTER(cache)
{
    const BusSession *session = userdata;

    return json_message_append(reply, session->cache_json);
}

/* Properties.Get of Cache waits for the engine, which sd-bus's getters cannot do: this handler comes before them. */
static int bus_session_intercept(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    const char *interface, *property;
    BusSession *session;
    int r;

    if (!sd_bus_message_is_method_call(m, "org.freedesktop.DBus.Properties", "Get") || !sd_bus_message_has_signature(m, "ss"))
        return 0;
    if ((r = sd_bus_message_read(m, "ss", &interface, &property)) < 0 || (r = sd_bus_message_rewind(m, true)) < 0)
        return error_trace(r);
    if (strcmp(interface, BUS_INTERFACE_SESSION) != 0 || strcmp(property, "Cache") != 0)
        return 0;
    if ((r = bus_session_lookup(userdata, m, sd_bus_message_get_path(m), &session, error)) <= 0)
        return r;
    r = bus_session_ask_cache(session, m, error);
    return r < 0 ? error_trace(r) : 1;
}

static const sd_bus_vtable bus_session_vtable[] = {
    SD_BUS_VTABLE_START(SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Generate", "aa{sv}a{sv}", SD_BUS_PARAM(messages) SD_BUS_PARAM(options), "oh",
                             SD_BUS_PARAM(job) SD_BUS_PARAM(stream), bus_session_generate, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("CountTokens", "aa{sv}a{sv}", SD_BUS_PARAM(messages) SD_BUS_PARAM(options), "u", SD_BUS_PARAM(tokens),
                             bus_session_count_tokens, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Crop", "ia{sv}", SD_BUS_PARAM(n) SD_BUS_PARAM(options), "u", SD_BUS_PARAM(length), bus_session_crop,
                             SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("SetRecording", "ba{sv}", SD_BUS_PARAM(on) SD_BUS_PARAM(options), "", , bus_session_set_recording,
                             SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Clone", "a{sv}", SD_BUS_PARAM(options), "o", SD_BUS_PARAM(session), bus_session_clone,
                             SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Save", "ha{sv}", SD_BUS_PARAM(file) SD_BUS_PARAM(options), "t", SD_BUS_PARAM(bytes), bus_session_save,
                             SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Restore", "ha{sv}", SD_BUS_PARAM(file) SD_BUS_PARAM(options), "u", SD_BUS_PARAM(length), bus_session_restore,
                             SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Cancel", "a{sv}", SD_BUS_PARAM(options), "", , bus_session_cancel, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Close", "a{sv}", SD_BUS_PARAM(options), "", , bus_session_close, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_PROPERTY("Model", "o", bus_session_get_model, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("State", "s", bus_session_get_state, 0, 0),
    SD_BUS_PROPERTY("Priority", "s", bus_session_get_priority, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("ContextUsed", "u", bus_session_get_context_used, 0, 0),
    SD_BUS_PROPERTY("ContextLimit", "u", bus_session_get_context_limit, 0, 0),
    SD_BUS_PROPERTY("Usage", "a{sv}", bus_session_get_usage, 0, 0),
    SD_BUS_PROPERTY("Cache", "a{sv}", bus_session_get_cache, 0, 0),
    SD_BUS_VTABLE_END,
};

int bus_session_register(Bus *bus)
{
    int r = sd_bus_add_fallback(bus->bus, NULL, BUS_SESSION_ROOT, bus_session_intercept, bus);

    if (r < 0)
        return error_trace(r);
    return sd_bus_add_fallback_vtable(bus->bus, NULL, BUS_SESSION_ROOT, BUS_INTERFACE_SESSION, bus_session_vtable, bus_session_find, bus);
}
