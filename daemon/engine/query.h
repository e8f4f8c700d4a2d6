#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Questions of the main thread, answered once each by an event with the question's cookie. */

#include "daemon/engine/engine.h"
#include "daemon/text/chat-template.h"

typedef struct Query Query;
typedef struct Mailbox Mailbox;

struct Query {
    Query *next;
    EngineQueryKind kind;
    uint64_t cookie, owner, session;
    char *model;
    bool has_policy, want_ids, parse_special;
    KvPolicy policy;
    int64_t n;
    ChatMessage *messages;
    size_t n_messages;
    char *text;
    int fd;
    EngineEvent *reply; /* made with the question, so that it can always be answered */
};

int query_new(const EngineQuery *query, Query **ret);
Query *query_free(Query *query);
DEFINE_CLEANUP(Query, query_free)

/* Sends query->reply with @result and frees the query. */
void query_answer(Engine *engine, Query *query, EngineResult result, const ErrorDetail *detail);
/* Answers now or later; @query is taken. */
void query_handle(Engine *engine, Query *query);
/* Answers a question that waited for its model's file; @query is taken. */
void query_with_file(Engine *engine, Query *query);
