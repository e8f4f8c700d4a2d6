/* SPDX-License-Identifier: Apache-2.0 */
/* org.leat.Inference1.Model: one object for each configured model. */

#include "daemon/bus/bus-private.h"
#include "daemon/bus/bus-text.h"
#include "daemon/bus/json-message.h"
#include "daemon/bus/messages.h"
#include "daemon/bus/question.h"
#include "daemon/bus/request.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

/* ---- objects ------------------------------------------------------------------------------------------------------------------- */

static const char *bus_model_name(const void *userdata, size_t index)
{
    const Config *config = userdata;

    return config->models[index].name;
}

int bus_model_set_config(Bus *bus, const Config *config)
{
    return bus_roster_set(&bus->models, bus, BUS_MODEL_ROOT, config->n_models, bus_model_name, config);
}

void bus_model_changed(Bus *bus, const char *name)
{
    const BusNamed *model = bus_roster_find(&bus->models, name);

    if (model)
        (void)sd_bus_emit_properties_changed(bus->bus, model->path, BUS_INTERFACE_MODEL, "State", "Device", "DeviceBytes", "HostBytes", "LastError",
                                             "Digest", "Architecture", "Quantization", "License", "Parameters", "FileSize", "ContextLength", NULL);
}

static int bus_model_find_object(sd_bus *connection, const char *path, const char *interface, void *userdata, void **ret, sd_bus_error *error)
{
    static const char prefix[] = BUS_MODEL_ROOT "/";
    Bus *bus = userdata;

    (void)connection;
    (void)interface;
    if ((*ret = bus_roster_find_path(&bus->models, path)))
        return 1;
    return strncmp(path, prefix, sizeof(prefix) - 1) == 0 ? bus_error_set(error, ENGINE_RESULT_NO_SUCH_MODEL, NULL) : 0;
}

static int bus_model_enumerate(sd_bus *connection, const char *prefix, void *userdata, char ***ret_nodes, sd_bus_error *error)
{
    Bus *bus = userdata;

    (void)connection;
    (void)prefix;
    (void)error;
    return bus_roster_paths(&bus->models, ret_nodes);
}

/* ---- facts --------------------------------------------------------------------------------------------------------------------- */

/* All zero when the engine does not know it (yet). */
static EngineModelStatus bus_model_status(const BusNamed *model)
{
    EngineModelStatus status;

    memset(&status, 0, sizeof(status));
    if (!engine_model_status_by_name(model->bus->engine, model->name, &status))
        (void)snprintf(status.state, sizeof(status.state), "unloaded");
    bus_text_scrub(status.digest);
    bus_text_scrub(status.architecture);
    bus_text_scrub(status.quantization);
    bus_text_scrub(status.license);
    bus_text_scrub(status.state);
    bus_text_scrub(status.error.text);
    return status;
}

const char *bus_model_availability(Bus *bus, const char *name, ErrorDetail *ret_reason)
{
    const BusNamed *model = bus_roster_find(&bus->models, name);
    EngineDeviceStatus device;
    EngineModelStatus status;

    if (!model) {
        (void)error_detail_set(ret_reason, 0, "the model is not configured any more");
        return "unavailable";
    }
    status = bus_model_status(model);
    if (strcmp(status.state, "loaded") == 0)
        return "ready";
    if (strcmp(status.state, "loading") == 0)
        return "loading";
    engine_device_status(bus->engine, &device);
    *ret_reason = device.open ? status.error : device.error;
    if (device.open && ret_reason->text[0] == 0 && access(status.path, R_OK) < 0)
        (void)error_detail_set(ret_reason, 0, "%.300s: %s", status.path[0] ? status.path : name, strerror(errno));
    return device.open && ret_reason->text[0] == 0 ? "available" : "unavailable";
}

int bus_policy(Bus *bus, const ConfigModel *model, const ConfigCache *service, const ConfigCache *nearest, KvPolicy *ret, sd_bus_error *error)
{
    const ConfigCache *blocks[] = {&bus->config->default_cache, &model->cache, service, nearest};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r = config_policy(blocks, N_ELEMENTS(blocks), model->exact, ret, &detail);

    if (r == -ENOMEM)
        return error_trace(r);
    return r == 0 ? 0 : bus_error_invalid(error, "option cache: %s", detail.text[0] ? detail.text : "invalid combination");
}

/* ---- methods ------------------------------------------------------------------------------------------------------------------- */

/* The configuration's word on an object's model. */
static int bus_model_config(const BusNamed *model, const ConfigModel **ret, sd_bus_error *error)
{
    *ret = config_find_model(model->bus->config, model->name);
    return *ret ? 0 : bus_error_set(error, ENGINE_RESULT_NO_SUCH_MODEL, NULL);
}

static int bus_model_load(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    _cleanup_(bus_request_freep) BusRequest *request = NULL;
    BusNamed *model = userdata;
    const ConfigModel *config;
    int r;

    if ((r = bus_authorise_admin(model->bus, m, error)) < 0 || (r = bus_model_config(model, &config, error)) < 0 ||
        (r = bus_request_new(model->bus, m, BUS_JOB_LOAD, config, &request, error)) < 0 || (r = call_options_read_none(m, error)) < 0)
        return error_trace(r);
    return bus_request_submit(TAKE_PTR(request), error);
}

static int bus_model_unload(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    BusNamed *model = userdata;
    EngineQuery query = {.kind = ENGINE_QUERY_UNLOAD, .model = model->name, .fd = -1};
    int r;

    if ((r = bus_authorise_admin(model->bus, m, error)) < 0 || (r = call_options_read_none(m, error)) < 0 ||
        (r = bus_ask_engine(model->bus, m, &query, bus_answer_empty, NULL, error)) < 0)
        return error_trace(r);
    return 1;
}

static int bus_model_answer_estimate(BusQuestion *question, const EngineEvent *event, sd_bus_error *error)
{
    __attribute__((__cleanup__(sd_bus_message_unrefp))) sd_bus_message *reply = NULL;
    int r;

    (void)error;
    if (!question->call)
        return 0;
    if ((r = sd_bus_message_new_method_return(question->call, &reply)) < 0 || (r = json_message_append(reply, event->json)) < 0)
        return error_trace(r);
    return sd_bus_send(NULL, reply, NULL);
}

static int bus_model_estimate(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    _cleanup_(call_options_clear) CallOptions options = CALL_OPTIONS_NULL;
    BusNamed *model = userdata;
    EngineQuery query = {.kind = ENGINE_QUERY_ESTIMATE, .model = model->name, .n = -1, .fd = -1};
    const ConfigModel *config;
    KvPolicy policy;
    int r;

    if ((r = call_options_read(m, CALL_OPTION_BIT(CALL_OPTION_CACHE) | CALL_OPTION_BIT(CALL_OPTION_DEPTH), &options, error)) < 0 ||
        (r = bus_model_config(model, &config, error)) < 0)
        return error_trace(r);
    if (call_options_have(&options, CALL_OPTION_DEPTH))
        query.n = options.depth;
    if (call_options_have(&options, CALL_OPTION_CACHE)) {
        if ((r = bus_policy(model->bus, config, NULL, &options.cache, &policy, error)) < 0)
            return error_trace(r);
        query.policy = &policy;
    }
    r = bus_ask_engine(model->bus, m, &query, bus_model_answer_estimate, NULL, error);
    return r < 0 ? error_trace(r) : 1;
}

static int bus_model_answer_ids(BusQuestion *question, const EngineEvent *event, sd_bus_error *error)
{
    __attribute__((__cleanup__(sd_bus_message_unrefp))) sd_bus_message *reply = NULL;
    int r;

    (void)error;
    if (!question->call)
        return 0;
    if ((r = sd_bus_message_new_method_return(question->call, &reply)) < 0 ||
        (r = sd_bus_message_append_array(reply, 'i', event->ids, event->n_ids * sizeof(int32_t))) < 0)
        return error_trace(r);
    return sd_bus_send(NULL, reply, NULL);
}

static int bus_model_ask_tokens(sd_bus_message *m, BusNamed *model, bool want_ids, sd_bus_error *error)
{
    _cleanup_(call_options_clear) CallOptions options = CALL_OPTIONS_NULL;
    EngineQuery query = {.kind = ENGINE_QUERY_COUNT_TOKENS, .model = model->name, .want_ids = want_ids, .fd = -1};
    int r;

    if ((r = sd_bus_message_read(m, "s", &query.text)) < 0 ||
        (r = call_options_read(m, CALL_OPTION_BIT(CALL_OPTION_PARSE_SPECIAL), &options, error)) < 0)
        return error_trace(r);
    query.parse_special = options.parse_special;
    r = bus_ask_engine(model->bus, m, &query, want_ids ? bus_model_answer_ids : bus_answer_tokens, NULL, error);
    return r < 0 ? error_trace(r) : 1;
}

static int bus_model_count_tokens(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    return bus_model_ask_tokens(m, userdata, false, error);
}

static int bus_model_tokenize(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    return bus_model_ask_tokens(m, userdata, true, error);
}

/* The engine thread writes it, so it must not be able to wait. */
static int bus_model_check_npy(int fd, sd_bus_error *error)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    return input_check_file(fd, true, &detail) < 0 ? bus_error_invalid(error, "npy: %s", detail.text) : 0;
}

static int bus_model_evaluate(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    const uint64_t allowed = CALL_OPTION_BIT(CALL_OPTION_CACHE) | CALL_OPTION_BIT(CALL_OPTION_IDS_FORMAT);
    _cleanup_(bus_request_freep) BusRequest *request = NULL;
    BusNamed *model = userdata;
    const ConfigModel *config;
    int ids_fd, npy_fd, r;

    if ((r = bus_model_config(model, &config, error)) < 0 ||
        (r = bus_request_new(model->bus, m, BUS_JOB_EVALUATE, config, &request, error)) < 0 || (r = sd_bus_message_read(m, "hh", &ids_fd, &npy_fd)) < 0 ||
        (r = call_options_read(m, allowed, &request->options, error)) < 0 || (r = bus_model_check_npy(npy_fd, error)) < 0)
        return error_trace(r);
    if (call_options_have(&request->options, CALL_OPTION_CACHE)) {
        if ((r = bus_policy(model->bus, config, NULL, &request->options.cache, &request->policy, error)) < 0)
            return error_trace(r);
        request->has_policy = true;
    }
    if ((request->options.prompt_fd = fcntl(ids_fd, F_DUPFD_CLOEXEC, 3)) < 0 || (request->npy_fd = fcntl(npy_fd, F_DUPFD_CLOEXEC, 3)) < 0)
        return error_origin(-errno);
    return bus_request_submit(TAKE_PTR(request), error);
}

/* ---- properties ---------------------------------------------------------------------------------------------------------------- */

#define MODEL_PROPERTY(name, type, expression)                                                                                              \
    static int bus_model_get_##name(sd_bus *connection _unused_, const char *path _unused_, const char *interface _unused_,              \
                                    const char *property _unused_, sd_bus_message *reply, void *userdata, sd_bus_error *error _unused_)  \
    {                                                                                                                                      \
        const EngineModelStatus status = bus_model_status(userdata);                                                                       \
                                                                                                                                           \
        return sd_bus_message_append(reply, type, expression);                                                                             \
    }

MODEL_PROPERTY(digest, "s", status.digest)
MODEL_PROPERTY(architecture, "s", status.architecture)
MODEL_PROPERTY(quantization, "s", status.quantization)
MODEL_PROPERTY(license, "s", status.license)
MODEL_PROPERTY(parameters, "t", status.parameters)
MODEL_PROPERTY(file_size, "t", status.file_bytes)
MODEL_PROPERTY(context_length, "u", status.context)
MODEL_PROPERTY(state, "s", status.state)
MODEL_PROPERTY(device, "o", strcmp(status.state, "loaded") == 0 ? BUS_DEVICE_PATH : "/")
MODEL_PROPERTY(device_bytes, "t", status.device_bytes)
MODEL_PROPERTY(host_bytes, "t", status.host_bytes)
MODEL_PROPERTY(last_error, "s", status.error.text)

static int bus_model_get_name(sd_bus *connection _unused_, const char *path _unused_, const char *interface _unused_,
                              const char *property _unused_, sd_bus_message *reply, void *userdata, sd_bus_error *error _unused_)
{
    const BusNamed *model = userdata;

    return sd_bus_message_append(reply, "s", model->name);
}

static const sd_bus_vtable bus_model_vtable[] = {
    SD_BUS_VTABLE_START(SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Load", "a{sv}", SD_BUS_PARAM(options), "o", SD_BUS_PARAM(job), bus_model_load, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Unload", "a{sv}", SD_BUS_PARAM(options), "", , bus_model_unload, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Estimate", "a{sv}", SD_BUS_PARAM(options), "a{sv}", SD_BUS_PARAM(estimate), bus_model_estimate,
                             SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("CountTokens", "sa{sv}", SD_BUS_PARAM(text) SD_BUS_PARAM(options), "u", SD_BUS_PARAM(tokens),
                             bus_model_count_tokens, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Tokenize", "sa{sv}", SD_BUS_PARAM(text) SD_BUS_PARAM(options), "ai", SD_BUS_PARAM(ids), bus_model_tokenize,
                             SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Evaluate", "hha{sv}", SD_BUS_PARAM(ids) SD_BUS_PARAM(npy) SD_BUS_PARAM(options), "o", SD_BUS_PARAM(job),
                             bus_model_evaluate, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_PROPERTY("Name", "s", bus_model_get_name, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("Digest", "s", bus_model_get_digest, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("Architecture", "s", bus_model_get_architecture, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("Quantization", "s", bus_model_get_quantization, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("License", "s", bus_model_get_license, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("Parameters", "t", bus_model_get_parameters, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("FileSize", "t", bus_model_get_file_size, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("ContextLength", "u", bus_model_get_context_length, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("State", "s", bus_model_get_state, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("Device", "o", bus_model_get_device, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("DeviceBytes", "t", bus_model_get_device_bytes, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("HostBytes", "t", bus_model_get_host_bytes, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("LastError", "s", bus_model_get_last_error, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_VTABLE_END,
};

int bus_model_register(Bus *bus)
{
    int r;

    if ((r = sd_bus_add_fallback_vtable(bus->bus, NULL, BUS_MODEL_ROOT, BUS_INTERFACE_MODEL, bus_model_vtable, bus_model_find_object, bus)) < 0 ||
        (r = sd_bus_add_node_enumerator(bus->bus, NULL, BUS_MODEL_ROOT, bus_model_enumerate, bus)) < 0 ||
        (r = sd_bus_add_object_manager(bus->bus, NULL, BUS_MODEL_ROOT)) < 0)
        return error_trace(r);
    return 0;
}
