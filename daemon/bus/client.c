/* SPDX-License-Identifier: Apache-2.0 */
/* Clients and their quotas. */

#include "daemon/bus/bus-private.h"
#include "daemon/bus/job.h"
#include "daemon/bus/question.h"
#include "daemon/bus/request.h"
#include "daemon/bus/session.h"

#include <inttypes.h>
#include <string.h>

BusClient *bus_client_free(BusClient *client)
{
    if (!client)
        return NULL;
    sd_bus_track_unref(client->track);
    free(client->name);
    free(client);
    return NULL;
}
DEFINE_CLEANUP(BusClient, bus_client_free)

/* The connection is gone: its requests are dropped, its jobs cancelled, its sessions closed. */
static int bus_client_on_gone(sd_bus_track *track, void *userdata)
{
    BusClient *client = userdata;
    Bus *bus = client->bus;

    (void)track;
    log_debug("client %s has left", client->name);
    bus_requests_owner_gone(bus, client->owner);
    bus_questions_owner_gone(bus, client->owner);
    bus_jobs_owner_gone(bus, client);
    bus_sessions_owner_gone(bus, client);
    engine_owner_gone(bus->engine, client->owner);
    (void)id_table_remove(&bus->clients, client->owner);
    bus_client_free(client);
    return 0;
}

static int bus_client_new(Bus *bus, sd_bus_message *m, const char *name, BusClient **ret)
{
    _cleanup_(bus_client_freep) BusClient *client = calloc(1, sizeof(*client));
    __attribute__((__cleanup__(sd_bus_creds_unrefp))) sd_bus_creds *creds = NULL;
    int r;

    if (!client || !(client->name = strdup(name)))
        return error_origin(-ENOMEM);
    client->bus = bus;
    if ((r = sd_bus_query_sender_creds(m, SD_BUS_CREDS_EUID, &creds)) < 0 || (r = sd_bus_creds_get_euid(creds, &client->uid)) < 0 ||
        (r = sd_bus_track_new(bus->bus, &client->track, bus_client_on_gone, client)) < 0 ||
        (r = sd_bus_track_add_sender(client->track, m)) < 0)
        return error_trace(r);
    client->owner = bus->last_owner + 1;
    if ((r = id_table_add(&bus->clients, client->owner, client)) < 0)
        return error_trace(r);
    bus->last_owner = client->owner;
    *ret = TAKE_PTR(client);
    return 0;
}

int bus_client_get(Bus *bus, sd_bus_message *m, BusClient **ret, sd_bus_error *error)
{
    const char *name = sd_bus_message_get_sender(m);
    int r;

    if (!name)
        return sd_bus_error_set(error, SD_BUS_ERROR_ACCESS_DENIED, "a call without sender");
    for (size_t i = 0; i < bus->clients.n; i++) {
        BusClient *client = bus->clients.entries[i].object;

        if (strcmp(client->name, name) == 0) {
            *ret = client;
            return 0;
        }
    }
    r = bus_client_new(bus, m, name, ret);
    if (r == -ENOMEM)
        return error_trace(r);
    if (r < 0) /* it left already, or the bus will not say who it is */
        return sd_bus_error_set(error, SD_BUS_ERROR_ACCESS_DENIED, "the caller's user is not known");
    return 0;
}

BusClient *bus_client_find(Bus *bus, uint64_t owner)
{
    return id_table_find(&bus->clients, owner);
}

bool bus_client_is_admin(const BusClient *client)
{
    return client->uid == 0 || client->uid == client->bus->uid;
}

int bus_client_take_job(BusClient *client, sd_bus_error *error)
{
    if (client->n_jobs >= BUS_CLIENT_MAX_JOBS)
        return sd_bus_error_setf(error, BUS_ERROR_QUOTA_EXCEEDED, "a client may have %d unfinished jobs; wait for one to end",
                                 BUS_CLIENT_MAX_JOBS);
    client->n_jobs++;
    return 0;
}

void bus_client_give_job(BusClient *client)
{
    if (client)
        client->n_jobs--;
}

int bus_client_take_prompt(BusClient *client, uint64_t n_bytes, sd_bus_error *error)
{
    Bus *bus = client->bus;

    if (n_bytes > BUS_CLIENT_MAX_PROMPT_BYTES - client->n_prompt_bytes)
        return sd_bus_error_setf(error, BUS_ERROR_QUOTA_EXCEEDED,
                                 "a client may have %" PRIu64 " bytes of prompts in unfinished jobs; it has %" PRIu64 " and wants %" PRIu64 " more",
                                 BUS_CLIENT_MAX_PROMPT_BYTES, client->n_prompt_bytes, n_bytes);
    if (n_bytes > BUS_MAX_PROMPT_BYTES - bus->n_prompt_bytes)
        return sd_bus_error_setf(error, BUS_ERROR_QUOTA_EXCEEDED, "all clients together have %" PRIu64 " bytes of prompts in unfinished jobs",
                                 bus->n_prompt_bytes);
    client->n_prompt_bytes += n_bytes;
    bus->n_prompt_bytes += n_bytes;
    return 0;
}

void bus_client_give_prompt(Bus *bus, BusClient *client, uint64_t n_bytes)
{
    bus->n_prompt_bytes -= n_bytes;
    if (client)
        client->n_prompt_bytes -= n_bytes;
}

int bus_client_check_session(BusClient *client, sd_bus_error *error)
{
    if (client->n_sessions < BUS_CLIENT_MAX_SESSIONS)
        return 0;
    return sd_bus_error_setf(error, BUS_ERROR_QUOTA_EXCEEDED, "a client may have %d sessions; close one", BUS_CLIENT_MAX_SESSIONS);
}

int bus_client_check_question(BusClient *client, sd_bus_error *error)
{
    if (client->n_questions < BUS_CLIENT_MAX_QUESTIONS)
        return 0;
    return sd_bus_error_setf(error, BUS_ERROR_QUOTA_EXCEEDED, "a client may have %d unanswered calls", BUS_CLIENT_MAX_QUESTIONS);
}
