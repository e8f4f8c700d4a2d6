/* SPDX-License-Identifier: Apache-2.0 */
/* Calls to the daemon, and what their errors mean for the exit code. */

#include "daemon/ctl/ctl.h"

#include <stdarg.h>
#include <string.h>

int ctl_fail(int exit_code, const char *format, ...)
{
    va_list args;

    (void)fflush(stdout);
    (void)fputs("leat: ", stderr);
    va_start(args, format);
    (void)vfprintf(stderr, format, args);
    va_end(args);
    (void)fputc('\n', stderr);
    return exit_code;
}

int ctl_exit_of_error_name(const char *name)
{
    static const struct {
        const char *name;
        CtlExit code;
    } table[] = {
        {"org.freedesktop.DBus.Error.InvalidArgs", CTL_EXIT_USAGE},
        {"org.freedesktop.DBus.Error.AccessDenied", CTL_EXIT_REFUSED},
        {"org.freedesktop.DBus.Error.InteractiveAuthorizationRequired", CTL_EXIT_REFUSED},
        {"org.freedesktop.DBus.Error.ServiceUnknown", CTL_EXIT_UNAVAILABLE},
        {"org.freedesktop.DBus.Error.NameHasNoOwner", CTL_EXIT_UNAVAILABLE},
        {"org.freedesktop.DBus.Error.NotSupported", CTL_EXIT_UNAVAILABLE},
        {"org.leat.Inference1.Error.NoSuchModel", CTL_EXIT_UNAVAILABLE},
        {"org.leat.Inference1.Error.NoSuchService", CTL_EXIT_UNAVAILABLE},
        {"org.leat.Inference1.Error.ModelNotInstalled", CTL_EXIT_UNAVAILABLE},
        {"org.leat.Inference1.Error.ShuttingDown", CTL_EXIT_UNAVAILABLE},
        {"org.leat.Inference1.Error.QueueFull", CTL_EXIT_REFUSED},
        {"org.leat.Inference1.Error.QuotaExceeded", CTL_EXIT_REFUSED},
        {"org.leat.Inference1.Error.ConfigInvalid", CTL_EXIT_CONFIG},
        {"org.leat.Inference1.Error.Cancelled", CTL_EXIT_INTERRUPTED},
    };

    for (size_t i = 0; i < N_ELEMENTS(table); i++)
        if (name && !strcmp(table[i].name, name))
            return table[i].code;
    return CTL_EXIT_FAILED;
}

int ctl_connect(Ctl *ctl)
{
    const char *bus = getenv("LEAT_BUS");
    int r;

    if (!ctl->user && !ctl->system_bus && bus)
        ctl->user = !strcmp(bus, "user");
    r = ctl->user ? sd_bus_default_user(&ctl->bus) : sd_bus_default_system(&ctl->bus);
    if (r < 0)
        return ctl_fail(CTL_EXIT_UNAVAILABLE, "no connection to the %s bus: %s", ctl->user ? "session" : "system", strerror(-r));
    return CTL_EXIT_DONE;
}

int ctl_new_call(Ctl *ctl, const char *path, const char *interface, const char *method, sd_bus_message **ret)
{
    int r = sd_bus_message_new_method_call(ctl->bus, ret, CTL_BUS_NAME, path, interface, method);

    return r < 0 ? ctl_fail(CTL_EXIT_FAILED, "%s: %s", method, strerror(-r)) : CTL_EXIT_DONE;
}

int ctl_call(Ctl *ctl, sd_bus_message *call, int appended, sd_bus_message **ret_reply)
{
    sd_bus_error error = SD_BUS_ERROR_NULL;
    int r = appended, code;

    if (r == -EINVAL) /* of all that is appended, only texts can be wrong */
        return ctl_fail(CTL_EXIT_USAGE, "%s: a text is not valid UTF-8 or holds a noncharacter, such as U+FFFE, which the bus does not take",
                        sd_bus_message_get_member(call));
    if (r < 0)
        return ctl_fail(CTL_EXIT_FAILED, "%s: the call cannot be written: %s", sd_bus_message_get_member(call), strerror(-r));
    r = sd_bus_call(ctl->bus, call, ctl->timeout_usec, &error, ret_reply);
    if (r >= 0)
        return CTL_EXIT_DONE;
    code = ctl_exit_of_error_name(error.name);
    if (sd_bus_error_has_name(&error, "org.freedesktop.DBus.Error.ServiceUnknown") ||
        sd_bus_error_has_name(&error, "org.freedesktop.DBus.Error.NameHasNoOwner"))
        (void)ctl_fail(code, "leatd is not running on the %s bus (see --user and --system)", ctl->user ? "session" : "system");
    else if (sd_bus_error_is_set(&error))
        (void)ctl_fail(code, "%s (%s)", error.message ? error.message : "failed", error.name);
    else
        (void)ctl_fail(code, "%s: %s", sd_bus_message_get_member(call), strerror(-r));
    sd_bus_error_free(&error);
    return code;
}

int ctl_append_cache(Ctl *ctl, sd_bus_message *call)
{
    int r;

    if (!ctl->n_cache)
        return 0;
    r = sd_bus_message_open_container(call, 'e', "sv");
    if (r >= 0)
        r = sd_bus_message_append(call, "s", "cache");
    if (r >= 0)
        r = sd_bus_message_open_container(call, 'v', "a{sv}");
    if (r >= 0)
        r = sd_bus_message_open_container(call, 'a', "{sv}");
    for (size_t i = 0; i < ctl->n_cache && r >= 0; i++)
        r = sd_bus_message_append(call, "{sv}", ctl->cache[i].key, "s", ctl->cache[i].value);
    for (int i = 0; i < 3 && r >= 0; i++)
        r = sd_bus_message_close_container(call);
    return r;
}

int ctl_append_cache_options(Ctl *ctl, sd_bus_message *call)
{
    int r = sd_bus_message_open_container(call, 'a', "{sv}");

    if (r >= 0)
        r = ctl_append_cache(ctl, call);
    return r < 0 ? r : sd_bus_message_close_container(call);
}

int ctl_get_all(Ctl *ctl, const char *path, const char *interface, json_t **ret)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    int r = ctl_new_call(ctl, path, CTL_PROPERTIES, "GetAll", &call);

    if (!r)
        r = ctl_call(ctl, call, sd_bus_message_append(call, "s", interface), &reply);
    if (r)
        return r;
    *ret = ctl_message_read(reply);
    return *ret ? CTL_EXIT_DONE : ctl_fail(CTL_EXIT_FAILED, "%s: the reply cannot be read", path);
}

int ctl_get_objects(Ctl *ctl, const char *manager_path, const char *interface, json_t **ret)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    json_t *objects, *interfaces, *list = json_array();
    const char *path;
    int r = ctl_new_call(ctl, manager_path, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects", &call);

    if (!r)
        r = ctl_call(ctl, call, 0, &reply);
    if (r) {
        json_decref(list);
        return r;
    }
    objects = ctl_message_read(reply);
    json_object_foreach(objects, path, interfaces) {
        json_t *properties = json_object_get(interfaces, interface), *row;

        if (!properties)
            continue;
        row = json_object();
        (void)json_object_set_new(row, "Path", json_string(path));
        (void)json_object_update(row, properties);
        (void)json_array_append_new(list, row);
    }
    json_decref(objects);
    *ret = list;
    return CTL_EXIT_DONE;
}

int ctl_model_path(Ctl *ctl, char **ret_path)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    json_t *details;
    const char *path;
    int r = ctl_new_call(ctl, CTL_ROOT, CTL_MANAGER, "GetAvailability", &call);

    if (!r)
        r = ctl_call(ctl, call, sd_bus_message_append(call, "sa{sv}", ctl->model ? ctl->model : "", 0), &reply);
    if (r)
        return r;
    json_decref(ctl_message_read(reply));
    details = ctl_message_read(reply);
    path = json_string_value(json_object_get(details, "path"));
    *ret_path = path ? strdup(path) : NULL;
    json_decref(details);
    return *ret_path ? CTL_EXIT_DONE : ctl_fail(CTL_EXIT_FAILED, "the daemon did not name the model's object");
}

static int ctl_on_finished(sd_bus_message *message, void *userdata, sd_bus_error *reterr)
{
    Ctl *ctl = userdata;
    json_t *finished = json_object();

    (void)reterr;
    (void)json_object_set_new(finished, "result", ctl_message_read(message));
    (void)json_object_set_new(finished, "usage", ctl_message_read(message));
    (void)json_object_set_new(ctl->finished, sd_bus_message_get_path(message), finished);
    return 0;
}

int ctl_watch_jobs(Ctl *ctl)
{
    int r;

    ctl->finished = json_object();
    r = sd_bus_match_signal(ctl->bus, NULL, CTL_BUS_NAME, NULL, CTL_JOB, "Finished", ctl_on_finished, ctl);
    return r < 0 ? ctl_fail(CTL_EXIT_FAILED, "watching jobs: %s", strerror(-r)) : CTL_EXIT_DONE;
}

int ctl_wait_job(Ctl *ctl, const char *job_path, json_t **ret_usage)
{
    json_t *finished;
    const char *result, *text;
    int r;

    while (!(finished = json_object_get(ctl->finished, job_path))) {
        r = sd_bus_process(ctl->bus, NULL);
        if (r == 0)
            r = sd_bus_wait(ctl->bus, UINT64_MAX);
        if (r < 0 && r != -EINTR)
            return ctl_fail(CTL_EXIT_UNAVAILABLE, "the daemon left the bus: %s", strerror(-r));
    }
    result = json_string_value(json_object_get(finished, "result"));
    if (result && strcmp(result, "done")) {
        text = json_string_value(json_object_get(json_object_get(finished, "usage"), "error-text"));
        (void)ctl_fail(CTL_EXIT_FAILED, "%s (%s)", text ? text : "failed", result);
        return ctl_exit_of_error_name(result);
    }
    if (ret_usage)
        *ret_usage = json_incref(json_object_get(finished, "usage"));
    return CTL_EXIT_DONE;
}
