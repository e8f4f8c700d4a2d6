/* SPDX-License-Identifier: Apache-2.0 */
/* org.leat.Inference1.Service. */

#include "daemon/bus/service.h"
#include "daemon/bus/bus-text.h"
#include "daemon/bus/request.h"

#include <string.h>

/* Names and values of one Invoke. */
#define SERVICE_MAX_INPUTS 64

/* ---- objects ------------------------------------------------------------------------------------------------------------------- */

static const char *bus_service_name(const void *userdata, size_t index)
{
    const Config *config = userdata;

    return config->services[index].name;
}

int bus_service_set_config(Bus *bus, const Config *config)
{
    return bus_roster_set(&bus->services, bus, BUS_SERVICE_ROOT, config->n_services, bus_service_name, config);
}

void bus_service_count(Bus *bus, const char *name, bool done)
{
    BusNamed *service = bus_roster_find(&bus->services, name);

    if (service && !done)
        service->n_failures++;
}

static int bus_service_find_object(sd_bus *connection, const char *path, const char *interface, void *userdata, void **ret, sd_bus_error *error)
{
    static const char prefix[] = BUS_SERVICE_ROOT "/";
    Bus *bus = userdata;

    (void)connection;
    (void)interface;
    if ((*ret = bus_roster_find_path(&bus->services, path)))
        return 1;
    return strncmp(path, prefix, sizeof(prefix) - 1) == 0 ? bus_error_set(error, ENGINE_RESULT_NO_SUCH_SERVICE, NULL) : 0;
}

static int bus_service_enumerate(sd_bus *connection, const char *prefix, void *userdata, char ***ret_nodes, sd_bus_error *error)
{
    Bus *bus = userdata;

    (void)connection;
    (void)prefix;
    (void)error;
    return bus_roster_paths(&bus->services, ret_nodes);
}

static const ConfigService *bus_service_config(const BusNamed *service)
{
    return config_find_service(service->bus->config, service->name);
}

/* ---- Invoke -------------------------------------------------------------------------------------------------------------------- */

typedef struct ServiceInputs {
    const char *names[SERVICE_MAX_INPUTS], *values[SERVICE_MAX_INPUTS]; /* borrowed from the message */
    size_t n;
} ServiceInputs;

static int bus_service_read_inputs(sd_bus_message *m, ServiceInputs *ret, sd_bus_error *error)
{
    int r = sd_bus_message_enter_container(m, 'a', "{ss}");

    if (r < 0)
        return error_trace(r);
    for (ret->n = 0; (r = sd_bus_message_at_end(m, false)) == 0; ret->n++) {
        if (ret->n == SERVICE_MAX_INPUTS)
            return bus_error_invalid(error, "more than %d inputs", SERVICE_MAX_INPUTS);
        if ((r = sd_bus_message_read(m, "{ss}", &ret->names[ret->n], &ret->values[ret->n])) < 0)
            return error_trace(r);
        for (size_t i = 0; i < ret->n; i++)
            if (strcmp(ret->names[i], ret->names[ret->n]) == 0)
                return bus_error_invalid(error, "input \"%.64s\" is given twice", ret->names[i]);
    }
    return r < 0 ? error_trace(r) : sd_bus_message_exit_container(m);
}

/* system and prompt become messages; the first is the same in every request. */
static int bus_service_fill(const ConfigService *config, const ServiceInputs *inputs, Messages *ret, size_t *ret_n_shared, sd_bus_error *error)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    _cleanup_(freep) char *prompt = NULL;
    int r = config_service_render(config, inputs->names, inputs->values, inputs->n, &prompt, &detail);

    if (r == -ENOMEM)
        return error_trace(r);
    if (r != 0)
        return bus_error_invalid(error, "%s", detail.text[0] ? detail.text : "the inputs do not fit the service");
    if (config->system && config->system[0]) {
        if ((r = messages_add(ret, "system", config->system)) < 0)
            return error_trace(r);
        *ret_n_shared = 1;
    }
    return messages_add(ret, "user", prompt);
}

static int bus_service_invoke(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    _cleanup_(bus_request_freep) BusRequest *request = NULL;
    BusNamed *service = userdata;
    const ConfigService *config = bus_service_config(service);
    const ConfigModel *model;
    ServiceInputs inputs;
    int r;

    if (!config)
        return bus_error_set(error, ENGINE_RESULT_NO_SUCH_SERVICE, NULL);
    if (!(model = bus_find_model(service->bus, config->model ? config->model : "", error)))
        return -ENOENT;
    if ((r = bus_request_new(service->bus, m, BUS_JOB_INVOKE, model, &request, error)) < 0 ||
        (r = bus_service_read_inputs(m, &inputs, error)) < 0 ||
        (r = call_options_read(m, CALL_OPTIONS_RUN | CALL_OPTION_BIT(CALL_OPTION_CACHE), &request->options, error)) < 0 ||
        (r = bus_service_fill(config, &inputs, &request->messages, &request->n_shared, error)) < 0 ||
        (r = bus_policy(service->bus, model, &config->cache, &request->options.cache, &request->policy, error)) < 0)
        return error_trace(r);
    request->has_policy = true;
    request->priority = config->priority;
    if (!(request->service = strdup(service->name)))
        return error_origin(-ENOMEM);
    r = bus_request_submit(TAKE_PTR(request), error);
    if (r >= 0)
        service->n_requests++;
    return r;
}

/* ---- properties ---------------------------------------------------------------------------------------------------------------- */

#define SERVICE_GETTER(name)                                                                                                                \
    static int bus_service_get_##name(sd_bus *connection _unused_, const char *path _unused_, const char *interface _unused_,            \
                                      const char *property _unused_, sd_bus_message *reply, void *userdata, sd_bus_error *error _unused_)

SERVICE_GETTER(name)
{
    const BusNamed *service = userdata;

    return sd_bus_message_append(reply, "s", service->name);
}

SERVICE_GETTER(description)
{
    const ConfigService *config = bus_service_config(userdata);

    return bus_text_append(reply, config ? config->description : NULL);
}

SERVICE_GETTER(model)
{
    const ConfigService *config = bus_service_config(userdata);

    return bus_text_append(reply, config ? config->model : NULL);
}

SERVICE_GETTER(state)
{
    const BusNamed *service = userdata;
    const ConfigService *config = bus_service_config(service);
    const ConfigModel *model = config ? bus_find_model(service->bus, config->model ? config->model : "", NULL) : NULL;
    ErrorDetail reason = ERROR_DETAIL_NULL;

    return sd_bus_message_append(reply, "s", model ? bus_model_availability(service->bus, model->name, &reason) : "unavailable");
}

SERVICE_GETTER(requests)
{
    const BusNamed *service = userdata;

    return sd_bus_message_append(reply, "t", service->n_requests);
}

SERVICE_GETTER(failures)
{
    const BusNamed *service = userdata;

    return sd_bus_message_append(reply, "t", service->n_failures);
}

SERVICE_GETTER(source)
{
    const ConfigService *config = bus_service_config(userdata);
    int r = sd_bus_message_open_container(reply, 'r', "su");

    if (r < 0 || (r = bus_text_append(reply, config ? config->source_file : NULL)) < 0 ||
        (r = sd_bus_message_append(reply, "u", config ? config->source_line : 0)) < 0)
        return error_trace(r);
    return sd_bus_message_close_container(reply);
}

SERVICE_GETTER(unit)
{
    const BusNamed *service = userdata;
    char unit[256];

    (void)snprintf(unit, sizeof(unit), "leat@%.200s.service", service->name);
    return sd_bus_message_append(reply, "s", unit);
}

SERVICE_GETTER(inputs)
{
    const ConfigService *config = bus_service_config(userdata);
    int r = sd_bus_message_open_container(reply, 'a', "(sbts)");

    for (size_t i = 0; r >= 0 && config && i < config->n_inputs; i++) {
        const ConfigInput *input = &config->inputs[i];

        if ((r = sd_bus_message_open_container(reply, 'r', "sbts")) < 0 || (r = bus_text_append(reply, input->name)) < 0 ||
            (r = sd_bus_message_append(reply, "bt", (int)input->required, input->max_bytes)) < 0 ||
            (r = bus_text_append(reply, input->default_value)) < 0)
            break;
        r = sd_bus_message_close_container(reply);
    }
    return r < 0 ? error_trace(r) : sd_bus_message_close_container(reply);
}

static const sd_bus_vtable bus_service_vtable[] = {
    SD_BUS_VTABLE_START(SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Invoke", "a{ss}a{sv}", SD_BUS_PARAM(inputs) SD_BUS_PARAM(options), "oh", SD_BUS_PARAM(job) SD_BUS_PARAM(stream),
                             bus_service_invoke, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_PROPERTY("Name", "s", bus_service_get_name, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("Description", "s", bus_service_get_description, 0, 0),
    SD_BUS_PROPERTY("Model", "s", bus_service_get_model, 0, 0),
    SD_BUS_PROPERTY("State", "s", bus_service_get_state, 0, 0),
    SD_BUS_PROPERTY("Requests", "t", bus_service_get_requests, 0, 0),
    SD_BUS_PROPERTY("Failures", "t", bus_service_get_failures, 0, 0),
    SD_BUS_PROPERTY("Source", "(su)", bus_service_get_source, 0, 0),
    SD_BUS_PROPERTY("Unit", "s", bus_service_get_unit, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("Inputs", "a(sbts)", bus_service_get_inputs, 0, 0),
    SD_BUS_VTABLE_END,
};

int bus_service_register(Bus *bus)
{
    int r;

    if ((r = sd_bus_add_fallback_vtable(bus->bus, NULL, BUS_SERVICE_ROOT, BUS_INTERFACE_SERVICE, bus_service_vtable, bus_service_find_object,
                                        bus)) < 0 ||
        (r = sd_bus_add_node_enumerator(bus->bus, NULL, BUS_SERVICE_ROOT, bus_service_enumerate, bus)) < 0 ||
        (r = sd_bus_add_object_manager(bus->bus, NULL, BUS_SERVICE_ROOT)) < 0)
        return error_trace(r);
    return 0;
}
