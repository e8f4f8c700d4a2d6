/* SPDX-License-Identifier: Apache-2.0 */
/* org.freedesktop.LogControl1: `systemctl service-log-level leatd debug`. */

#include "daemon/bus/bus-private.h"

#include <string.h>

static const struct {
    const char *name;
    LogLevel level;
} log_levels[] = {
    {"err", LOG_LEVEL_ERROR}, {"warning", LOG_LEVEL_WARNING}, {"notice", LOG_LEVEL_NOTICE}, {"info", LOG_LEVEL_INFO}, {"debug", LOG_LEVEL_DEBUG},
};

static int bus_log_get_level(sd_bus *connection _unused_, const char *path _unused_, const char *interface _unused_, const char *property _unused_,
                             sd_bus_message *reply, void *userdata _unused_, sd_bus_error *error _unused_)
{
    const char *name = "info";

    for (size_t i = 0; i < N_ELEMENTS(log_levels); i++)
        if (log_levels[i].level == log_get_level())
            name = log_levels[i].name;
    return sd_bus_message_append(reply, "s", name);
}

static int bus_log_set_level(sd_bus *connection, const char *path _unused_, const char *interface _unused_, const char *property _unused_,
                             sd_bus_message *value, void *userdata, sd_bus_error *error)
{
    sd_bus_message *call = sd_bus_get_current_message(connection);
    const char *name;
    int r;

    if (!call)
        return sd_bus_error_set(error, SD_BUS_ERROR_ACCESS_DENIED, "the caller is not known");
    if ((r = bus_authorise_admin(userdata, call, error)) < 0 || (r = sd_bus_message_read(value, "s", &name)) < 0)
        return error_trace(r);
    for (size_t i = 0; i < N_ELEMENTS(log_levels); i++)
        if (strcmp(log_levels[i].name, name) == 0) {
            log_set_level(log_levels[i].level);
            return 0;
        }
    return bus_error_invalid(error, "log level \"%.32s\" is none of: err, warning, notice, info, debug", name);
}

static int bus_log_get_target(sd_bus *connection _unused_, const char *path _unused_, const char *interface _unused_, const char *property _unused_,
                              sd_bus_message *reply, void *userdata _unused_, sd_bus_error *error _unused_)
{
    return sd_bus_message_append(reply, "s", getenv("JOURNAL_STREAM") ? "journal" : "console");
}

/* The protocol has it writable; standard error is the only target there is. */
static int bus_log_set_target(sd_bus *connection _unused_, const char *path _unused_, const char *interface _unused_, const char *property _unused_,
                              sd_bus_message *value _unused_, void *userdata _unused_, sd_bus_error *error)
{
    return sd_bus_error_set(error, SD_BUS_ERROR_NOT_SUPPORTED, "the log target cannot be changed at run time");
}

static int bus_log_get_identifier(sd_bus *connection _unused_, const char *path _unused_, const char *interface _unused_,
                                  const char *property _unused_, sd_bus_message *reply, void *userdata _unused_, sd_bus_error *error _unused_)
{
    return sd_bus_message_append(reply, "s", "leatd");
}

static const sd_bus_vtable bus_log_vtable[] = {
    SD_BUS_VTABLE_START(SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_WRITABLE_PROPERTY("LogLevel", "s", bus_log_get_level, bus_log_set_level, 0, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_WRITABLE_PROPERTY("LogTarget", "s", bus_log_get_target, bus_log_set_target, 0, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_PROPERTY("SyslogIdentifier", "s", bus_log_get_identifier, 0, 0),
    SD_BUS_VTABLE_END,
};

int bus_log_control_register(Bus *bus)
{
    return sd_bus_add_object_vtable(bus->bus, NULL, "/org/freedesktop/LogControl1", "org.freedesktop.LogControl1", bus_log_vtable, bus);
}
