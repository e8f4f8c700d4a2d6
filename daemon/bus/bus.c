/* SPDX-License-Identifier: Apache-2.0 */
/* The bus side: connection, objects, the engine's events. */

#include "daemon/bus/bus-private.h"
#include "daemon/bus/job.h"
#include "daemon/bus/question.h"
#include "daemon/bus/request.h"
#include "daemon/bus/session.h"

#include <inttypes.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>

/* ---- shared by the interfaces --------------------------------------------------------------------------------------------------- */

int bus_authorise_admin(Bus *bus, sd_bus_message *m, sd_bus_error *error)
{
    BusClient *client;
    int r = bus_client_get(bus, m, &client, error);

    if (r < 0)
        return error_trace(r);
    if (bus_client_is_admin(client))
        return 0;
    return sd_bus_error_set(error, SD_BUS_ERROR_ACCESS_DENIED, "only root and the daemon's own user may do this");
}

const ConfigModel *bus_find_model(Bus *bus, const char *name, sd_bus_error *error)
{
    const ConfigModel *model = name[0] ? config_find_model(bus->config, name) : bus->config->n_models > 0 ? &bus->config->models[0] : NULL;
    _cleanup_(freep) const char **known = NULL;
    const char *nearest = NULL;
    ErrorDetail detail;

    if (model)
        return model;
    known = calloc(bus->config->n_models + 1, sizeof(*known));
    for (size_t i = 0; known && i < bus->config->n_models; i++)
        known[i] = bus->config->models[i].name;
    if (known && name[0])
        nearest = config_nearest(name, known, bus->config->n_models);
    if (bus->config->n_models == 0)
        (void)error_detail_set(&detail, 0, "no model is configured: put a GGUF file into the store or name one under models:");
    else if (nearest)
        (void)error_detail_set(&detail, 0, "no model \"%.100s\" is configured; did you mean %s?", name, nearest);
    else
        (void)error_detail_set(&detail, 0, "no model \"%.100s\" is configured", name);
    (void)bus_error_set(error, ENGINE_RESULT_NO_SUCH_MODEL, &detail);
    return NULL;
}

bool bus_path_to_id(const char *path, const char *root, uint64_t *ret)
{
    size_t n = strlen(root);
    uint64_t id = 0;

    if (strncmp(path, root, n) != 0 || path[n] != '/')
        return false;
    *ret = 0;
    /* Decimal without a leading zero, so that each object has one path. */
    if (path[n + 1] == '0')
        return true;
    for (const char *c = path + n + 1; *c; c++)
        if (*c < '0' || *c > '9' || __builtin_mul_overflow(id, 10, &id) || __builtin_add_overflow(id, *c - '0', &id))
            return true;
    *ret = id;
    return true;
}

void bus_id_to_path(const char *root, uint64_t id, char ret[BUS_ID_PATH_BYTES])
{
    (void)snprintf(ret, BUS_ID_PATH_BYTES, "%s/%" PRIu64, root, id);
}

/* ---- events of the engine -------------------------------------------------------------------------------------------------------- */

static void bus_on_event(Bus *bus, const EngineEvent *event)
{
    switch (event->kind) {
    case ENGINE_EVENT_JOB_STATE:
    case ENGINE_EVENT_TEXT:
    case ENGINE_EVENT_TOKENS:
    case ENGINE_EVENT_PROGRESS:
    case ENGINE_EVENT_FINISHED:
        bus_jobs_on_event(bus, event);
        break;
    case ENGINE_EVENT_REPLY:
        bus_questions_on_reply(bus, event);
        break;
    case ENGINE_EVENT_MODEL_STATE:
        bus_model_changed(bus, event->model);
        break;
    case ENGINE_EVENT_SESSION_CLOSED:
        bus_session_closed(bus, event->session);
        break;
    case ENGINE_EVENT_DEVICE_STATE:
        bus_device_changed(bus);
        bus->device_changed(bus->userdata);
        break;
    }
}

static bool bus_has_work(const Bus *bus)
{
    return bus->jobs.n + bus->sessions.n + bus->questions.n + bus->requests.n > 0;
}

uint64_t bus_now_usec(void)
{
    struct timespec time = {0};

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

static int bus_on_engine(sd_event_source *source, int fd, uint32_t events, void *userdata)
{
    Bus *bus = userdata;

    (void)source;
    (void)fd;
    (void)events;
    for (;;) {
        _cleanup_(engine_event_freep) EngineEvent *event = engine_next_event(bus->engine);

        if (!event)
            break;
        bus_on_event(bus, event);
    }
    return 0;
}

/* D-Bus lets texts pass that sd-bus does not read (bus-text.h): whoever sends one hears where, once for all methods. */
static int bus_check_texts(sd_bus_message *m, sd_bus_error *error)
{
    unsigned argument = 0;
    int r = 0;

    while (r >= 0 && sd_bus_message_at_end(m, true) == 0) {
        argument++;
        r = sd_bus_message_skip(m, NULL);
    }
    if (r == -EBADMSG)
        return bus_error_invalid(error, "argument %u: a text holds a noncharacter, such as U+FFFE, which the daemon's bus library does not read; "
                                        "a prompt may come through the option prompt-fd", argument);
    if (r >= 0)
        r = sd_bus_message_rewind(m, true);
    return r < 0 ? error_trace(r) : 0;
}

/* Every message counts as activity, also those that leave nothing behind. */
static int bus_on_message(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    Bus *bus = userdata;

    if (!sd_bus_message_is_method_call(m, NULL, NULL))
        return 0;
    bus->idle_since_usec = bus_now_usec();
    return bus_check_texts(m, error);
}

bool bus_is_idle(const Bus *bus, uint64_t *ret_idle_usec)
{
    if (bus_has_work(bus))
        return false;
    *ret_idle_usec = bus_now_usec() - bus->idle_since_usec;
    return true;
}

int bus_release_if_idle(Bus *bus)
{
    uint64_t since = bus->idle_since_usec;
    int r = sd_bus_release_name(bus->bus, BUS_NAME);

    if (r < 0)
        return error_trace(r);
    /* Calls that came before the release are here already; the bus starts another daemon for later ones. */
    while ((r = sd_bus_process(bus->bus, NULL)) > 0)
        continue;
    if (r < 0)
        return error_trace(r);
    if (!bus_has_work(bus) && bus->idle_since_usec == since)
        return 0;
    r = sd_bus_request_name(bus->bus, BUS_NAME, 0);
    return r < 0 ? error_trace(r) : 1;
}

/* ---- life ------------------------------------------------------------------------------------------------------------------------ */

int bus_set_config(Bus *bus, const Config *config)
{
    int r = bus_model_set_config(bus, config);

    if (r < 0)
        return error_trace(r);
    bus->config = config; /* of a service whose object is missing nothing hangs */
    bus->config_generation++;
    bus->config_ok = true;
    if ((r = bus_service_set_config(bus, config)) < 0)
        log_warning("cannot announce the services: %s, ignoring", strerror(-r));
    (void)sd_bus_emit_properties_changed(bus->bus, BUS_ROOT, BUS_INTERFACE_MANAGER, "ConfigGeneration", "ConfigOk", NULL);
    return 0;
}

void bus_set_config_failed(Bus *bus)
{
    bus->config_ok = false;
    (void)sd_bus_emit_properties_changed(bus->bus, BUS_ROOT, BUS_INTERFACE_MANAGER, "ConfigOk", NULL);
}

static int bus_register(Bus *bus)
{
    static int (*const registers[])(Bus *) = {
        bus_manager_register, bus_model_register, bus_device_register,      bus_service_register,
        bus_session_register, bus_job_register,   bus_log_control_register,
    };
    int r = sd_bus_add_filter(bus->bus, NULL, bus_on_message, bus);

    for (size_t i = 0; r >= 0 && i < N_ELEMENTS(registers); i++)
        r = registers[i](bus);
    if (r < 0 || (r = bus_model_set_config(bus, bus->config)) < 0 || (r = bus_service_set_config(bus, bus->config)) < 0)
        return error_trace(r);
    return 0;
}

static int bus_connect(Bus *bus, bool user, ErrorDetail *reterr)
{
    int r = user ? sd_bus_open_user_with_description(&bus->bus, "leatd") : sd_bus_open_system_with_description(&bus->bus, "leatd");

    if (r < 0)
        return error_detail_set(reterr, r, "no %s bus: %s", user ? "session" : "system", strerror(-r));
    if ((r = sd_bus_set_exit_on_disconnect(bus->bus, true)) < 0 || (r = sd_bus_attach_event(bus->bus, bus->event, SD_EVENT_PRIORITY_NORMAL)) < 0)
        return error_trace(r);
    return 0;
}

int bus_new(const BusOptions *options, Bus **ret, ErrorDetail *reterr)
{
    _cleanup_(bus_freep) Bus *bus = calloc(1, sizeof(*bus));
    int r;

    if (!bus)
        return error_origin(-ENOMEM);
    bus->event = sd_event_ref(options->event);
    bus->engine = options->engine;
    bus->config = options->config;
    bus->config_path = options->config_path;
    bus->reload = options->reload;
    bus->device_changed = options->device_changed;
    bus->userdata = options->userdata;
    bus->stream_timeout_usec = options->stream_timeout_usec;
    bus->uid = geteuid();
    bus->max_queue = options->config->max_queue;
    bus->config_generation = 1;
    bus->config_ok = true;
    bus->idle_since_usec = bus_now_usec();
    if ((r = bus_connect(bus, options->user, reterr)) < 0)
        return error_trace(r);
    if ((r = bus_register(bus)) < 0)
        return error_detail_set(reterr, r, "cannot put up the bus objects: %s", strerror(-r));
    if ((r = sd_event_add_io(bus->event, &bus->engine_source, engine_event_fd(bus->engine), EPOLLIN, bus_on_engine, bus)) < 0)
        return error_trace(r);
    r = sd_bus_request_name(bus->bus, BUS_NAME, 0);
    if (r == -EEXIST)
        return error_detail_set(reterr, r, "another process has the name %s", BUS_NAME);
    if (r < 0)
        return error_detail_set(reterr, r, "cannot take the name %s: %s", BUS_NAME, strerror(-r));
    *ret = TAKE_PTR(bus);
    return 0;
}

void bus_shut_down(Bus *bus)
{
    bus_jobs_shut_down(bus);
    (void)sd_bus_flush(bus->bus);
}

Bus *bus_free(Bus *bus)
{
    if (!bus)
        return NULL;
    (void)sd_event_source_disable_unref(bus->engine_source);
    bus_requests_clear(bus);
    bus_questions_clear(bus);
    bus_jobs_clear(bus);
    bus_sessions_clear(bus);
    while (bus->clients.n > 0)
        bus_client_free(id_table_remove(&bus->clients, bus->clients.entries[0].id));
    id_table_clear(&bus->clients);
    bus_roster_clear(&bus->models);
    bus_roster_clear(&bus->services);
    sd_bus_flush_close_unref(bus->bus);
    sd_event_unref(bus->event);
    free(bus);
    return NULL;
}
