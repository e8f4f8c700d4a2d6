#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions on the bus, and org.leat.Inference1.Session: for the connection that opened them, and for root. */

#include "daemon/bus/bus-private.h"

typedef struct BusSession {
    Bus *bus;
    uint64_t id;
    BusClient *client;
    char *model; /* owned: the configured name */
    EnginePriority priority;
    uint32_t context_used;
    EngineUsage usage; /* of the last generation */
    char *cache_json;  /* owned: the engine's last word, or NULL */
} BusSession;

/* Manager.OpenSession: parses and answers. */
int bus_session_open(Bus *bus, sd_bus_message *m, sd_bus_error *error);
/* A generation has ended. */
void bus_session_job_finished(Bus *bus, uint64_t session, const EngineUsage *usage);
/* The engine closed it. */
void bus_session_closed(Bus *bus, uint64_t session);
void bus_sessions_owner_gone(Bus *bus, BusClient *client);
void bus_sessions_clear(Bus *bus);
