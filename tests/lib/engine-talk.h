#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Speaking with an engine from a test: calls, and what it told about each job and question.  A broken promise fails the test. */

#include "daemon/engine/engine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

typedef struct Seen {
    uint64_t job;
    char text[8192];
    int32_t ids[4096];
    size_t n_text, n_ids;
    EngineJobState states[64];
    uint32_t n_states, queue_position;
    bool finished;
    EngineResult result;
    ErrorDetail detail;
    EngineUsage usage;
    EngineSequence *sequences; /* owned by the talk */
    size_t n_sequences;
} Seen;

/* One test's engine and what it told. */
typedef struct Talk {
    Engine *engine;
    Seen seen[256];            /* by job id */
    EngineEvent *replies[256]; /* by cookie, owned */
    uint64_t last_cookie;
    uint32_t n_closed;
} Talk;

Talk *talk_new(const EngineOptions *options);
Talk *talk_free(Talk *talk);

void talk_sleep(uint64_t usec);
/* Takes what was told until now. */
void talk_listen(Talk *talk);
/* Listens until @condition holds, two minutes at most. */
#define talk_until(talk, condition)                                                                                                    \
    do {                                                                                                                               \
        unsigned _n = 0;                                                                                                               \
        for (talk_listen(talk); !(condition); talk_listen(talk)) {                                                                     \
            if (++_n > 240000)                                                                                                         \
                fail_msg("waited in vain for: %s", #condition);                                                                        \
            talk_sleep(500);                                                                                                           \
        }                                                                                                                              \
    } while (0)

uint64_t talk_generate(Talk *talk, const EngineRequest *request);
Seen *talk_wait(Talk *talk, uint64_t job);
/* Answer to a question (its cookie is set here); owned by @talk. */
EngineEvent *talk_ask(Talk *talk, EngineQuery query);
uint64_t talk_open(Talk *talk, const char *model, uint64_t owner);
/* Greedy, of owner 1, no template. */
EngineRequest raw_request(const char *model, const char *text, uint32_t max_tokens);
/* The same for ids, in a session or (0) with a model; goes on beyond the end of a turn, and tells its ids. */
EngineRequest ids_request(const char *model, uint64_t session, const int32_t *ids, size_t n, uint32_t max_tokens);
/* Asks that and waits; anything but DONE fails the test. */
Seen *talk_ids(Talk *talk, const char *model, uint64_t session, const int32_t *ids, size_t n, uint32_t max_tokens);
void assert_same_ids(const Seen *a, const Seen *b);
