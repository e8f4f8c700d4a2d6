#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* A method call that the engine answers: kept from engine_query() to its ENGINE_EVENT_REPLY. */

#include "daemon/bus/bus-private.h"

typedef struct BusQuestion BusQuestion;

/* Replies to question->call, or fails with the error filled in.  Only called when the engine's answer is ENGINE_RESULT_DONE. */
typedef int (*BusAnswer)(BusQuestion *question, const EngineEvent *event, sd_bus_error *error);

struct BusQuestion {
    Bus *bus;
    uint64_t cookie, owner, session;
    sd_bus_message *call; /* owned; NULL: nobody waits, the answer is for us */
    BusAnswer answer;
    char *model;          /* owned copy of the query's, or NULL */
    EnginePriority priority;
    int fd;               /* owned, or -1: for the answer to hand on */
};

/* Asks.  @query: the cookie is filled in here, and the owner unless it is given (a session's, when root asks).  @call (may be NULL) gets a reply later; *ret (may be NULL) is for
 * further facts that the answer needs.  Negative with @error filled in: nothing was asked, query->fd is still the caller's. */
int bus_ask_engine(Bus *bus, sd_bus_message *call, EngineQuery *query, BusAnswer answer, BusQuestion **ret, sd_bus_error *error);
/* The answer. */
void bus_questions_on_reply(Bus *bus, const EngineEvent *event);
void bus_questions_owner_gone(Bus *bus, uint64_t owner);
void bus_questions_clear(Bus *bus);

/* Answers that several methods share. */
int bus_answer_empty(BusQuestion *question, const EngineEvent *event, sd_bus_error *error);
int bus_answer_tokens(BusQuestion *question, const EngineEvent *event, sd_bus_error *error);
