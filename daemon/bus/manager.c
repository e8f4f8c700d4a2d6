/* SPDX-License-Identifier: Apache-2.0 */
/* org.leat.Inference1.Manager. */

#include "daemon/bus/bus-private.h"
#include "daemon/bus/bus-text.h"
#include "daemon/bus/request.h"
#include "daemon/bus/session.h"

#include <string.h>

static int bus_manager_ask(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    const uint64_t allowed = CALL_OPTIONS_RUN | CALL_OPTIONS_PROMPT | CALL_OPTION_BIT(CALL_OPTION_CACHE);
    _cleanup_(bus_request_freep) BusRequest *request = NULL;
    const char *name, *prompt;
    const ConfigModel *model;
    Bus *bus = userdata;
    int r;

    if ((r = sd_bus_message_read(m, "ss", &name, &prompt)) < 0)
        return error_trace(r);
    if (!(model = bus_find_model(bus, name, error)))
        return -ENOENT;
    if ((r = bus_request_new(bus, m, BUS_JOB_ASK, model, &request, error)) < 0 ||
        (r = call_options_read(m, allowed, &request->options, error)) < 0)
        return error_trace(r);
    if (call_options_have(&request->options, CALL_OPTION_CACHE)) {
        if ((r = bus_policy(bus, model, NULL, &request->options.cache, &request->policy, error)) < 0)
            return error_trace(r);
        request->has_policy = true;
    }
    if (!(request->prompt = strdup(prompt)))
        return error_origin(-ENOMEM);
    return bus_request_submit(TAKE_PTR(request), error);
}

static int bus_manager_open_session(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    return bus_session_open(userdata, m, error);
}

static int bus_manager_get_availability(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    ErrorDetail reason = ERROR_DETAIL_NULL;
    EngineDeviceStatus device;
    const ConfigModel *model;
    const BusNamed *object;
    const char *name, *state;
    Bus *bus = userdata;
    int r;

    if ((r = sd_bus_message_read(m, "s", &name)) < 0 || (r = call_options_read_none(m, error)) < 0)
        return error_trace(r);
    if (!(model = bus_find_model(bus, name, error)))
        return -ENOENT;
    memset(&device, 0, sizeof(device));
    engine_device_status(bus->engine, &device);
    object = bus_roster_find(&bus->models, model->name);
    state = bus_model_availability(bus, model->name, &reason);
    if (!reason.text[0])
        (void)snprintf(reason.text, sizeof(reason.text), "%s", device.info.reason);
    bus_text_scrub(reason.text);
    bus_text_scrub(device.info.name);
    return sd_bus_reply_method_return(m, "sa{sv}", state, 4, "model", "s", model->name, "path", "o", object ? object->path : "/", "device", "s",
                                      device.info.name, "reason", "s", reason.text);
}

static int bus_manager_reload(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Bus *bus = userdata;
    int r;

    if ((r = bus_authorise_admin(bus, m, error)) < 0 || (r = call_options_read_none(m, error)) < 0)
        return error_trace(r);
    r = bus->reload(bus->userdata, &detail);
    if (r == -EINVAL) {
        bus_text_scrub(detail.text);
        return sd_bus_error_set(error, BUS_ERROR_CONFIG_INVALID, detail.text[0] ? detail.text : "the configuration is invalid");
    }
    if (r < 0)
        return bus_error_set(error, bus_error_result(r), &detail);
    return sd_bus_reply_method_return(m, "");
}

static int bus_manager_append_message(sd_bus_message *reply, const ConfigMessage *message)
{
    int r = sd_bus_message_open_container(reply, 'r', "suuss");

    if (r < 0 || (r = bus_text_append(reply, message->file)) < 0 ||
        (r = sd_bus_message_append(reply, "uus", message->line, message->column, message->severity == CONFIG_ERROR ? "error" : "warning")) < 0 ||
        (r = bus_text_append(reply, message->text)) < 0)
        return error_trace(r);
    return sd_bus_message_close_container(reply);
}

static int bus_manager_check_config(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    __attribute__((__cleanup__(sd_bus_message_unrefp))) sd_bus_message *reply = NULL;
    _cleanup_(config_messages_clear) ConfigMessages messages = CONFIG_MESSAGES_NULL;
    _cleanup_(config_freep) Config *config = NULL;
    Bus *bus = userdata;
    int r;

    if ((r = call_options_read_none(m, error)) < 0)
        return error_trace(r);
    r = config_load(bus->config_path, &config, &messages);
    if (r < 0 && r != -EINVAL)
        return error_trace(r);
    if ((r = sd_bus_message_new_method_return(m, &reply)) < 0 || (r = sd_bus_message_open_container(reply, 'a', "(suuss)")) < 0)
        return error_trace(r);
    for (size_t i = 0; i < messages.n; i++)
        if ((r = bus_manager_append_message(reply, &messages.messages[i])) < 0)
            return error_trace(r);
    if ((r = sd_bus_message_close_container(reply)) < 0)
        return error_trace(r);
    return sd_bus_send(NULL, reply, NULL);
}

static int bus_manager_list_jobs(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    __attribute__((__cleanup__(sd_bus_message_unrefp))) sd_bus_message *reply = NULL;
    BusClient *client;
    Bus *bus = userdata;
    int r;

    if ((r = call_options_read_none(m, error)) < 0 || (r = bus_client_get(bus, m, &client, error)) < 0 ||
        (r = sd_bus_message_new_method_return(m, &reply)) < 0 || (r = bus_jobs_append(bus, client, reply)) < 0)
        return error_trace(r);
    return sd_bus_send(NULL, reply, NULL);
}

/* ---- properties ---------------------------------------------------------------------------------------------------------------- */

#define MANAGER_GETTER(name)                                                                                                                \
    static int bus_manager_get_##name(sd_bus *connection _unused_, const char *path _unused_, const char *interface _unused_,            \
                                      const char *property _unused_, sd_bus_message *reply, void *userdata _unused_,                      \
                                      sd_bus_error *error _unused_)

MANAGER_GETTER(version)
{
    return sd_bus_message_append(reply, "s", LEAT_VERSION);
}

MANAGER_GETTER(features)
{
    return sd_bus_message_append(reply, "as", 6, "stream-frames", "prompt-fd", "token-ids", "evaluate", "trace", "beams");
}

MANAGER_GETTER(n_jobs)
{
    const Bus *bus = userdata;
    uint32_t n_jobs = 0, n_queued = 0;

    engine_queue_status(bus->engine, &n_jobs, &n_queued);
    return sd_bus_message_append(reply, "u", n_jobs);
}

MANAGER_GETTER(n_queued)
{
    const Bus *bus = userdata;
    uint32_t n_jobs = 0, n_queued = 0;

    engine_queue_status(bus->engine, &n_jobs, &n_queued);
    return sd_bus_message_append(reply, "u", n_queued);
}

MANAGER_GETTER(max_queue)
{
    const Bus *bus = userdata;

    return sd_bus_message_append(reply, "u", bus->max_queue);
}

MANAGER_GETTER(host_memory)
{
    const Bus *bus = userdata;
    EngineDeviceStatus device;

    engine_device_status(bus->engine, &device);
    return sd_bus_message_append(reply, "t", device.host_memory_bytes);
}

MANAGER_GETTER(host_memory_used)
{
    const Bus *bus = userdata;
    EngineDeviceStatus device;

    engine_device_status(bus->engine, &device);
    return sd_bus_message_append(reply, "t", device.host_used_bytes);
}

MANAGER_GETTER(config_generation)
{
    const Bus *bus = userdata;

    return sd_bus_message_append(reply, "t", bus->config_generation);
}

MANAGER_GETTER(config_ok)
{
    const Bus *bus = userdata;

    return sd_bus_message_append(reply, "b", (int)bus->config_ok);
}

static const sd_bus_vtable bus_manager_vtable[] = {
    SD_BUS_VTABLE_START(SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Ask", "ssa{sv}", SD_BUS_PARAM(model) SD_BUS_PARAM(prompt) SD_BUS_PARAM(options), "sa{sv}",
                             SD_BUS_PARAM(text) SD_BUS_PARAM(usage), bus_manager_ask, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("GetAvailability", "sa{sv}", SD_BUS_PARAM(model) SD_BUS_PARAM(options), "sa{sv}",
                             SD_BUS_PARAM(state) SD_BUS_PARAM(details), bus_manager_get_availability, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("OpenSession", "sa{sv}", SD_BUS_PARAM(model) SD_BUS_PARAM(options), "o", SD_BUS_PARAM(session),
                             bus_manager_open_session, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Reload", "a{sv}", SD_BUS_PARAM(options), "", , bus_manager_reload, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("CheckConfig", "a{sv}", SD_BUS_PARAM(options), "a(suuss)", SD_BUS_PARAM(messages), bus_manager_check_config,
                             SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("ListJobs", "a{sv}", SD_BUS_PARAM(options), "aa{sv}", SD_BUS_PARAM(jobs), bus_manager_list_jobs,
                             SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_PROPERTY("Version", "s", bus_manager_get_version, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("Features", "as", bus_manager_get_features, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("NJobs", "u", bus_manager_get_n_jobs, 0, 0),
    SD_BUS_PROPERTY("NQueued", "u", bus_manager_get_n_queued, 0, 0),
    SD_BUS_PROPERTY("MaxQueue", "u", bus_manager_get_max_queue, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("HostMemory", "t", bus_manager_get_host_memory, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("HostMemoryUsed", "t", bus_manager_get_host_memory_used, 0, 0),
    SD_BUS_PROPERTY("ConfigGeneration", "t", bus_manager_get_config_generation, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("ConfigOk", "b", bus_manager_get_config_ok, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_VTABLE_END,
};

int bus_manager_register(Bus *bus)
{
    return sd_bus_add_object_vtable(bus->bus, NULL, BUS_ROOT, BUS_INTERFACE_MANAGER, bus_manager_vtable, bus);
}
