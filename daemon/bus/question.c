/* SPDX-License-Identifier: Apache-2.0 */
/* Questions to the engine. */

#include "daemon/bus/question.h"
#include "daemon/bus/json-message.h"

#include <string.h>

static BusQuestion *bus_question_free(BusQuestion *question)
{
    BusClient *client;

    if (!question)
        return NULL;
    client = bus_client_find(question->bus, question->owner);
    if (client && question->call)
        client->n_questions--;
    sd_bus_message_unref(question->call);
    if (question->fd >= 0)
        (void)close(question->fd);
    free(question->model);
    free(question);
    return NULL;
}
DEFINE_CLEANUP(BusQuestion, bus_question_free)

/* NULL when memory is short. */
static BusQuestion *bus_question_new(Bus *bus, BusClient *client, sd_bus_message *call, const EngineQuery *query, BusAnswer answer)
{
    _cleanup_(freep) BusQuestion *question = calloc(1, sizeof(*question));

    if (!question)
        return NULL;
    *question = (BusQuestion){.bus = bus, .cookie = bus->last_cookie + 1, .session = query->session, .answer = answer, .fd = -1};
    if (query->model && !(question->model = strdup(query->model)))
        return NULL;
    if (client) {
        question->owner = client->owner;
        client->n_questions++;
    }
    question->call = sd_bus_message_ref(call);
    bus->last_cookie++;
    return TAKE_PTR(question);
}

int bus_ask_engine(Bus *bus, sd_bus_message *call, EngineQuery *query, BusAnswer answer, BusQuestion **ret, sd_bus_error *error)
{
    _cleanup_(bus_question_freep) BusQuestion *question = NULL;
    BusClient *client = NULL;
    int r;

    if (call) {
        if ((r = bus_client_get(bus, call, &client, error)) < 0 || (r = bus_client_check_question(client, error)) < 0)
            return error_trace(r);
        if (!query->owner)
            query->owner = client->owner;
    }
    if (!(question = bus_question_new(bus, client, call, query, answer)))
        return error_origin(-ENOMEM);
    if ((r = id_table_add(&bus->questions, question->cookie, question)) < 0)
        return error_trace(r);
    query->cookie = question->cookie;
    r = engine_query(bus->engine, query);
    if (r != 0) {
        (void)id_table_remove(&bus->questions, question->cookie);
        return bus_error_set(error, bus_error_result(r), NULL);
    }
    if (ret)
        *ret = question;
    question = NULL; /* the table's */
    return 0;
}

void bus_questions_on_reply(Bus *bus, const EngineEvent *event)
{
    _cleanup_(bus_question_freep) BusQuestion *question = id_table_remove(&bus->questions, event->cookie);
    __attribute__((__cleanup__(sd_bus_error_free))) sd_bus_error error = SD_BUS_ERROR_NULL;
    int r;

    if (!question)
        return;
    if (event->result == ENGINE_RESULT_DONE)
        r = question->answer(question, event, &error);
    else
        r = bus_error_set(&error, event->result, &event->detail);
    if (r < 0 && question->call)
        (void)sd_bus_reply_method_errno(question->call, r, &error);
}

void bus_questions_owner_gone(Bus *bus, uint64_t owner)
{
    for (size_t i = 0; i < bus->questions.n; i++) {
        BusQuestion *question = bus->questions.entries[i].object;

        /* The engine still answers: what it made (a session) must be found and undone. */
        if (question->owner == owner && question->call) {
            sd_bus_message_unref(question->call);
            question->call = NULL;
        }
    }
}

void bus_questions_clear(Bus *bus)
{
    while (bus->questions.n > 0)
        bus_question_free(id_table_remove(&bus->questions, bus->questions.entries[0].id));
    id_table_clear(&bus->questions);
}

int bus_answer_empty(BusQuestion *question, const EngineEvent *event, sd_bus_error *error)
{
    (void)event;
    (void)error;
    return question->call ? sd_bus_reply_method_return(question->call, "") : 0;
}

int bus_answer_tokens(BusQuestion *question, const EngineEvent *event, sd_bus_error *error)
{
    uint64_t n;
    int r = json_message_integer(event->json, "tokens", &n);

    (void)error;
    if (r < 0)
        return error_trace(r);
    return question->call ? sd_bus_reply_method_return(question->call, "u", (uint32_t)MIN(n, (uint64_t)UINT32_MAX)) : 0;
}
