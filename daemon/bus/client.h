#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* A client: one connection to the bus, by its unique name, with its user and what it may still ask for. */

#include "daemon/bus/bus.h"

#include <sys/types.h>

typedef struct BusClient {
    Bus *bus;
    uint64_t owner; /* what the engine knows it by */
    char *name;     /* unique name; the bus never gives it to another connection */
    uid_t uid;
    sd_bus_track *track;
    uint32_t n_sessions, n_jobs, n_questions;
    uint64_t n_prompt_bytes;
} BusClient;

#define BUS_CLIENT_MAX_SESSIONS     32
#define BUS_CLIENT_MAX_JOBS         16
#define BUS_CLIENT_MAX_QUESTIONS    64
#define BUS_CLIENT_MAX_PROMPT_BYTES (UINT64_C(128) << 20)
/* Of all clients together: a user may open many connections. */
#define BUS_MAX_PROMPT_BYTES        (UINT64_C(512) << 20)

/* The sender of @m, made known when it is new: the bus tells when it leaves. */
int bus_client_get(Bus *bus, sd_bus_message *m, BusClient **ret, sd_bus_error *error);
/* NULL when it has left. */
BusClient *bus_client_find(Bus *bus, uint64_t owner);
BusClient *bus_client_free(BusClient *client);

/* Root, or the daemon's own user. */
bool bus_client_is_admin(const BusClient *client);

/* One more job (with so many bytes of prompt), session or question; 0, or negative with QuotaExceeded in @error.  What was
 * taken is given back when the thing ends. */
int bus_client_take_job(BusClient *client, sd_bus_error *error);
void bus_client_give_job(BusClient *client);
int bus_client_take_prompt(BusClient *client, uint64_t n_bytes, sd_bus_error *error);
void bus_client_give_prompt(Bus *bus, BusClient *client, uint64_t n_bytes);
int bus_client_check_session(BusClient *client, sd_bus_error *error);
int bus_client_check_question(BusClient *client, sd_bus_error *error);
