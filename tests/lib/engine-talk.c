/* SPDX-License-Identifier: Apache-2.0 */
/* Speaking with an engine from a test. */

#include "tests/lib/engine-talk.h"

#include <time.h>

void talk_sleep(uint64_t usec)
{
    struct timespec t = {(time_t)(usec / 1000000), (long)(usec % 1000000) * 1000};

    (void)nanosleep(&t, NULL);
}

Talk *talk_new(const EngineOptions *options)
{
    Talk *talk = calloc(1, sizeof(*talk));
    ErrorDetail detail = ERROR_DETAIL_NULL;

    assert_non_null(talk);
    if (engine_new(options, &talk->engine, &detail) != 0)
        fail_msg("no engine: %s", detail.text);
    return talk;
}

Talk *talk_free(Talk *talk)
{
    if (!talk)
        return NULL;
    engine_free(talk->engine);
    for (size_t i = 0; i < N_ELEMENTS(talk->seen); i++) {
        for (size_t k = 0; k < talk->seen[i].n_sequences; k++) {
            free(talk->seen[i].sequences[k].text);
            free(talk->seen[i].sequences[k].ids);
        }
        free(talk->seen[i].sequences);
    }
    for (size_t i = 0; i < N_ELEMENTS(talk->replies); i++)
        engine_event_free(talk->replies[i]);
    free(talk);
    return NULL;
}

static void talk_hear(Talk *talk, EngineEvent *event)
{
    Seen *seen = &talk->seen[event->job % N_ELEMENTS(talk->seen)];

    if (event->job) {
        assert_false(seen->finished); /* nothing comes after the end */
        seen->job = event->job;
    }
    switch (event->kind) {
    case ENGINE_EVENT_TEXT:
        assert_true(seen->n_text + event->text_length < sizeof(seen->text));
        memcpy(seen->text + seen->n_text, event->text, event->text_length + 1);
        seen->n_text += event->text_length;
        break;
    case ENGINE_EVENT_TOKENS:
        memcpy(seen->ids + seen->n_ids, event->ids, event->n_ids * sizeof(int32_t));
        seen->n_ids += event->n_ids;
        break;
    case ENGINE_EVENT_JOB_STATE:
        seen->queue_position = event->queue_position;
        if (seen->n_states < N_ELEMENTS(seen->states) && (!seen->n_states || seen->states[seen->n_states - 1] != event->state))
            seen->states[seen->n_states++] = event->state;
        break;
    case ENGINE_EVENT_PROGRESS:
        assert_true(event->progress >= 0 && event->progress <= 1);
        break;
    case ENGINE_EVENT_FINISHED:
        seen->finished = true;
        seen->result = event->result;
        seen->detail = event->detail;
        seen->usage = event->usage;
        seen->sequences = TAKE_PTR(event->sequences);
        seen->n_sequences = event->n_sequences;
        event->n_sequences = 0;
        break;
    case ENGINE_EVENT_REPLY:
        assert_true(event->cookie < N_ELEMENTS(talk->replies) && !talk->replies[event->cookie]);
        talk->replies[event->cookie] = event;
        return;
    case ENGINE_EVENT_SESSION_CLOSED:
        talk->n_closed++;
        break;
    case ENGINE_EVENT_MODEL_STATE:
    case ENGINE_EVENT_DEVICE_STATE:
        break;
    }
    engine_event_free(event);
}

void talk_listen(Talk *talk)
{
    EngineEvent *event;

    while ((event = engine_next_event(talk->engine)))
        talk_hear(talk, event);
}

Seen *talk_wait(Talk *talk, uint64_t job)
{
    Seen *seen = &talk->seen[job % N_ELEMENTS(talk->seen)];

    talk_until(talk, seen->finished);
    return seen;
}

EngineEvent *talk_ask(Talk *talk, EngineQuery query)
{
    uint64_t cookie = ++talk->last_cookie;

    query.cookie = cookie;
    assert_int_equal(engine_query(talk->engine, &query), 0);
    talk_until(talk, talk->replies[cookie]);
    return talk->replies[cookie];
}

EngineRequest raw_request(const char *model, const char *text, uint32_t max_tokens)
{
    return (EngineRequest){
        .owner = 1,
        .model = model,
        .priority = ENGINE_PRIORITY_NORMAL,
        .raw = text,
        .sampling = {.max_tokens = max_tokens, .top_p = 1, .repeat_penalty = 1},
    };
}

EngineRequest ids_request(const char *model, uint64_t session, const int32_t *ids, size_t n, uint32_t max_tokens)
{
    EngineRequest request = raw_request(session ? NULL : model, NULL, max_tokens);

    request.session = session;
    request.ids = ids;
    request.n_ids = n;
    request.want_ids = true;
    request.sampling.ignore_eos = true;
    return request;
}

Seen *talk_ids(Talk *talk, const char *model, uint64_t session, const int32_t *ids, size_t n, uint32_t max_tokens)
{
    EngineRequest request = ids_request(model, session, ids, n, max_tokens);
    Seen *seen = talk_wait(talk, talk_generate(talk, &request));

    if (seen->result != ENGINE_RESULT_DONE)
        fail_msg("result %d: %s", (int)seen->result, seen->detail.text);
    return seen;
}

void assert_same_ids(const Seen *a, const Seen *b)
{
    assert_int_equal(a->n_ids, b->n_ids);
    assert_memory_equal(a->ids, b->ids, a->n_ids * sizeof(int32_t));
}

uint64_t talk_generate(Talk *talk, const EngineRequest *request)
{
    uint64_t job = 0;

    assert_int_equal(engine_generate(talk->engine, request, &job), 0);
    assert_true(job > 0);
    return job;
}

uint64_t talk_open(Talk *talk, const char *model, uint64_t owner)
{
    EngineEvent *reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_OPEN_SESSION, .owner = owner, .model = model});

    assert_int_equal(reply->result, ENGINE_RESULT_DONE);
    return reply->session;
}
