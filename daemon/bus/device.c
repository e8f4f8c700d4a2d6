/* SPDX-License-Identifier: Apache-2.0 */
/* org.leat.Inference1.Device: the one device of this version. */

#include "daemon/bus/bus-private.h"
#include "daemon/bus/bus-text.h"
#include "daemon/bus/question.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

void bus_device_changed(Bus *bus)
{
    (void)sd_bus_emit_properties_changed(bus->bus, BUS_DEVICE_PATH, BUS_INTERFACE_DEVICE, "State", "LastError", "Name", "Vendor", "Driver", "Platform",
                                         "Type", "Reason", "MemoryTotal", "MemoryBudget", NULL);
}

/* ---- the trace ----------------------------------------------------------------------------------------------------------------- */

static int bus_device_start_trace(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    EngineQuery query = {.kind = ENGINE_QUERY_TRACE_START, .fd = -1};
    Bus *bus = userdata;
    int r;

    if ((r = bus_authorise_admin(bus, m, error)) < 0 || (r = call_options_read_none(m, error)) < 0 ||
        (r = bus_ask_engine(bus, m, &query, bus_answer_empty, NULL, error)) < 0)
        return error_trace(r);
    return 1;
}

static int bus_device_answer_trace(BusQuestion *question, const EngineEvent *event, sd_bus_error *error)
{
    (void)event;
    (void)error;
    if (!question->call)
        return 0;
    if (lseek(question->fd, 0, SEEK_SET) < 0)
        return error_origin(-errno);
    return sd_bus_reply_method_return(question->call, "h", question->fd);
}

static int bus_device_stop_trace(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    EngineQuery query = {.kind = ENGINE_QUERY_TRACE_STOP, .fd = -1};
    _cleanup_(close_fdp) int ours = -1;
    BusQuestion *question;
    Bus *bus = userdata;
    int r;

    if ((r = bus_authorise_admin(bus, m, error)) < 0 || (r = call_options_read_none(m, error)) < 0)
        return error_trace(r);
    if ((ours = memfd_create("leat-trace", MFD_CLOEXEC)) < 0 || (query.fd = fcntl(ours, F_DUPFD_CLOEXEC, 3)) < 0)
        return error_origin(-errno);
    if ((r = bus_ask_engine(bus, m, &query, bus_device_answer_trace, &question, error)) < 0) {
        close_fdp(&query.fd);
        return error_trace(r);
    }
    question->fd = TAKE_FD(ours);
    return 1;
}

/* ---- properties ---------------------------------------------------------------------------------------------------------------- */

static EngineDeviceStatus bus_device_status(const Bus *bus)
{
    EngineDeviceStatus status;

    memset(&status, 0, sizeof(status));
    engine_device_status(bus->engine, &status);
    bus_text_scrub(status.info.name);
    bus_text_scrub(status.info.vendor);
    bus_text_scrub(status.info.driver);
    bus_text_scrub(status.info.platform);
    bus_text_scrub(status.info.reason);
    bus_text_scrub(status.error.text);
    return status;
}

#define DEVICE_GETTER(name)                                                                                                                 \
    static int bus_device_get_##name(sd_bus *connection _unused_, const char *path _unused_, const char *interface _unused_,             \
                                     const char *property _unused_, sd_bus_message *reply, void *userdata, sd_bus_error *error _unused_)
#define DEVICE_PROPERTY(name, type, expression)                                                                                             \
    DEVICE_GETTER(name)                                                                                                                    \
    {                                                                                                                                      \
        const EngineDeviceStatus status = bus_device_status(userdata);                                                                     \
                                                                                                                                           \
        return sd_bus_message_append(reply, type, expression);                                                                             \
    }

DEVICE_PROPERTY(name, "s", status.info.name)
DEVICE_PROPERTY(vendor, "s", status.info.vendor)
DEVICE_PROPERTY(driver, "s", status.info.driver)
DEVICE_PROPERTY(platform, "s", status.info.platform)
DEVICE_PROPERTY(type, "s", status.open ? gpu_device_type_to_string(status.info.type) : "")
DEVICE_PROPERTY(reason, "s", status.info.reason)
DEVICE_PROPERTY(state, "s", status.open ? "open" : "unavailable")
DEVICE_PROPERTY(last_error, "s", status.error.text)
DEVICE_PROPERTY(memory_total, "t", status.info.memory_bytes)
DEVICE_PROPERTY(memory_budget, "t", status.info.budget_bytes)
DEVICE_PROPERTY(memory_used, "t", status.total_used_bytes)

DEVICE_GETTER(memory_by_purpose)
{
    const EngineDeviceStatus status = bus_device_status(userdata);
    int r = sd_bus_message_open_container(reply, 'a', "{st}");

    for (int i = 0; r >= 0 && i < GPU_PURPOSE_X_MAX; i++)
        r = sd_bus_message_append(reply, "{st}", gpu_purpose_to_string((GpuPurpose)i), status.used_bytes[i]);
    return r < 0 ? error_trace(r) : sd_bus_message_close_container(reply);
}

DEVICE_GETTER(counters)
{
    const EngineDeviceStatus status = bus_device_status(userdata);
    const GpuCounters *c = &status.counters;

    return sd_bus_message_append(reply, "a{st}", 10, "programs-built", c->n_programs_built, "programs-from-cache", c->n_programs_from_cache,
                                 "buffers-created", c->n_buffers_created, "launches", c->n_launches, "uploads", c->n_uploads, "downloads",
                                 c->n_downloads, "copies", c->n_copies, "upload-bytes", c->upload_bytes, "download-bytes", c->download_bytes,
                                 "copy-bytes", c->copy_bytes);
}

static const sd_bus_vtable bus_device_vtable[] = {
    SD_BUS_VTABLE_START(SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("StartTrace", "a{sv}", SD_BUS_PARAM(options), "", , bus_device_start_trace, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("StopTrace", "a{sv}", SD_BUS_PARAM(options), "h", SD_BUS_PARAM(trace), bus_device_stop_trace,
                             SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_PROPERTY("Name", "s", bus_device_get_name, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("Vendor", "s", bus_device_get_vendor, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("Driver", "s", bus_device_get_driver, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("Platform", "s", bus_device_get_platform, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("Type", "s", bus_device_get_type, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("Reason", "s", bus_device_get_reason, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("State", "s", bus_device_get_state, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("LastError", "s", bus_device_get_last_error, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("MemoryTotal", "t", bus_device_get_memory_total, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("MemoryBudget", "t", bus_device_get_memory_budget, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
    SD_BUS_PROPERTY("MemoryUsed", "t", bus_device_get_memory_used, 0, 0),
    SD_BUS_PROPERTY("MemoryByPurpose", "a{st}", bus_device_get_memory_by_purpose, 0, 0),
    SD_BUS_PROPERTY("Counters", "a{st}", bus_device_get_counters, 0, 0),
    SD_BUS_VTABLE_END,
};

int bus_device_register(Bus *bus)
{
    int r;

    if ((r = sd_bus_add_object_vtable(bus->bus, NULL, BUS_DEVICE_PATH, BUS_INTERFACE_DEVICE, bus_device_vtable, bus)) < 0 ||
        (r = sd_bus_add_object_manager(bus->bus, NULL, BUS_DEVICE_ROOT)) < 0)
        return error_trace(r);
    return 0;
}
