/* SPDX-License-Identifier: Apache-2.0 */
/* org.leat.Inference1.Job, and the list of jobs. */

#include "daemon/bus/job.h"

/* Jobs carry no text: their user's other connections (leat ps, leat cancel) may see and cancel them. */
static bool bus_job_is_visible(const BusJob *job, const BusClient *client)
{
    return job->uid == client->uid || bus_client_is_admin(client);
}

static int bus_job_find(sd_bus *connection, const char *path, const char *interface, void *userdata, void **ret, sd_bus_error *error)
{
    Bus *bus = userdata;
    sd_bus_message *m = sd_bus_get_current_message(connection);
    BusClient *client;
    BusJob *job;
    uint64_t id;
    int r;

    (void)interface;
    if (!bus_path_to_id(path, BUS_JOB_ROOT, &id) || !m)
        return 0;
    job = id_table_find(&bus->jobs, id);
    if (!job || job->finished)
        return bus_error_set(error, ENGINE_RESULT_NO_SUCH_JOB, NULL);
    if ((r = bus_client_get(bus, m, &client, error)) < 0)
        return error_trace(r);
    if (!bus_job_is_visible(job, client))
        return sd_bus_error_set(error, SD_BUS_ERROR_ACCESS_DENIED, "this is another user's job");
    *ret = job;
    return 1;
}

static int bus_job_cancel(sd_bus_message *m, void *userdata, sd_bus_error *error)
{
    BusJob *job = userdata;
    int r = call_options_read_none(m, error);

    if (r < 0)
        return error_trace(r);
    engine_cancel(job->bus->engine, job->id);
    return sd_bus_reply_method_return(m, "");
}

#define JOB_PROPERTY(name, type, expression)                                                                                                \
    static int bus_job_get_##name(sd_bus *connection, const char *path, const char *interface, const char *property, sd_bus_message *reply, \
                                  void *userdata, sd_bus_error *error)                                                                     \
    {                                                                                                                                      \
        const BusJob *job = userdata;                                                                                                      \
                                                                                                                                           \
        (void)connection;                                                                                                                  \
        (void)path;                                                                                                                        \
        (void)interface;                                                                                                                   \
        (void)property;                                                                                                                    \
        (void)error;                                                                                                                       \
        return sd_bus_message_append(reply, type, expression);                                                                             \
    }

JOB_PROPERTY(id, "t", job->id)
JOB_PROPERTY(kind, "s", bus_job_kind_to_string(job->kind))
JOB_PROPERTY(model, "s", job->model)
JOB_PROPERTY(state, "s", engine_job_state_to_string(job->state))
JOB_PROPERTY(queue_position, "u", job->queue_position)
JOB_PROPERTY(progress, "d", job->progress)
JOB_PROPERTY(prompt_tokens, "u", job->usage.prompt_tokens)
JOB_PROPERTY(cached_tokens, "u", job->usage.reused_tokens)
JOB_PROPERTY(output_tokens, "u", job->usage.output_tokens)
JOB_PROPERTY(rate, "d", job->usage.decode_rate)

static const sd_bus_vtable bus_job_vtable[] = {
    SD_BUS_VTABLE_START(SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_METHOD_WITH_NAMES("Cancel", "a{sv}", SD_BUS_PARAM(options), "", , bus_job_cancel, SD_BUS_VTABLE_UNPRIVILEGED),
    SD_BUS_PROPERTY("Id", "t", bus_job_get_id, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("Kind", "s", bus_job_get_kind, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("Model", "s", bus_job_get_model, 0, SD_BUS_VTABLE_PROPERTY_CONST),
    SD_BUS_PROPERTY("State", "s", bus_job_get_state, 0, 0),
    SD_BUS_PROPERTY("QueuePosition", "u", bus_job_get_queue_position, 0, 0),
    SD_BUS_PROPERTY("Progress", "d", bus_job_get_progress, 0, 0),
    SD_BUS_PROPERTY("PromptTokens", "u", bus_job_get_prompt_tokens, 0, 0),
    SD_BUS_PROPERTY("CachedTokens", "u", bus_job_get_cached_tokens, 0, 0),
    SD_BUS_PROPERTY("OutputTokens", "u", bus_job_get_output_tokens, 0, 0),
    SD_BUS_PROPERTY("Rate", "d", bus_job_get_rate, 0, 0),
    SD_BUS_SIGNAL_WITH_NAMES("Finished", "sa{sv}", SD_BUS_PARAM(result) SD_BUS_PARAM(usage), 0),
    SD_BUS_VTABLE_END,
};

int bus_job_register(Bus *bus)
{
    return sd_bus_add_fallback_vtable(bus->bus, NULL, BUS_JOB_ROOT, BUS_INTERFACE_JOB, bus_job_vtable, bus_job_find, bus);
}

static int bus_job_append_facts(sd_bus_message *m, const BusJob *job)
{
    char path[BUS_ID_PATH_BYTES];

    bus_id_to_path(BUS_JOB_ROOT, job->id, path);
    return sd_bus_message_append(
        m, "a{sv}", 14, "id", "t", job->id, "path", "o", path, "kind", "s", bus_job_kind_to_string(job->kind), "state", "s",
        engine_job_state_to_string(job->state), "model", "s", job->model, "priority", "s", engine_priority_to_name(job->priority),
        "queue-position", "u", job->queue_position, "progress", "d", job->progress, "prompt-tokens", "u", job->usage.prompt_tokens,
        "cached-tokens", "u", job->usage.reused_tokens, "output-tokens", "u", job->usage.output_tokens, "rate", "d", job->usage.decode_rate,
        "uid", "u", (uint32_t)job->uid, "owner", "s", job->client ? job->client->name : "");
}

int bus_jobs_append(Bus *bus, const BusClient *client, sd_bus_message *m)
{
    int r = sd_bus_message_open_container(m, 'a', "a{sv}");

    for (size_t i = 0; r >= 0 && i < bus->jobs.n; i++) {
        const BusJob *job = bus->jobs.entries[i].object;

        if (!job->finished && bus_job_is_visible(job, client))
            r = bus_job_append_facts(m, job);
    }
    return r < 0 ? error_trace(r) : sd_bus_message_close_container(m);
}
