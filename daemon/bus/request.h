#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A generation on its way to the engine: what Ask, Session.Generate and Service.Invoke have in common, and Model.Evaluate.
 *
 * The handler fills a BusRequest and submits it.  When the prompt comes by descriptor the request is kept until that has been read;
 * then, or at once, the job is started and the call answered.
 */

#include "daemon/bus/bus-private.h"
#include "daemon/bus/input.h"
#include "daemon/bus/job.h"
#include "daemon/bus/messages.h"

typedef struct BusRequest {
    Bus *bus;
    uint64_t cookie, owner;
    sd_bus_message *call;    /* owned */
    BusJobKind kind;
    uint64_t session;        /* 0: none */
    char *model, *service;   /* owned; model's configured name */
    CallOptions options;
    Messages messages;
    size_t n_shared; /* of them, the same in every request of the service */
    char *prompt;            /* text that stands alone: Ask's, Invoke's; owned */
    EnginePriority priority;
    bool has_policy;
    KvPolicy policy;
    Input *input;
    int npy_fd;              /* Evaluate: owned, or -1 */
    uint64_t n_prompt_bytes; /* taken from the client's quota */
    bool has_job;            /* so is one job */
} BusRequest;

/* Takes the job quota of @call's sender. */
int bus_request_new(Bus *bus, sd_bus_message *call, BusJobKind kind, const ConfigModel *model, BusRequest **ret, sd_bus_error *error);
BusRequest *bus_request_free(BusRequest *request);
DEFINE_CLEANUP(BusRequest, bus_request_free)
/* @request is taken.  Negative with @error filled in: the handler returns it; else the call is or will be answered. */
int bus_request_submit(BusRequest *request, sd_bus_error *error);

void bus_requests_owner_gone(Bus *bus, uint64_t owner);
void bus_requests_clear(Bus *bus);
