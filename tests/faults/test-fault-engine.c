/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine with a toy model, as the daemon has it, on the simulated small GPU, while one thing fails: a call of OpenCL, an allocation, a command
 * after it was accepted.  Whoever asked gets the right tokens or an error that says something; the next request is served and right; when the engine
 * ends, nothing is left behind.
 *
 * Some cases are taken, evenly spaced from a start that LEAT_FAULT_SEED moves (printed); LEAT_SOAK=1 takes all, and with LEAT_SOAK_SLICES=N the
 * N-th part of all that LEAT_FAULT_SEED names.
 */

#include "quant/base/log.h"
#include "tests/lib/engine-talk.h"
#include "tests/lib/fault-rig.h"
#include "tests/lib/fault-script.h"
#include "tests/lib/sim-rig.h"
#include "tests/sim/clsim.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { N_PROMPT = 40, N_TOKENS = 8, N_BEAMS = 3 };

/* A question, one with beams, and the life of a session: it speaks, is saved, taken back a little, cloned, restored elsewhere, and goes on. */
typedef enum Kind { PLAIN, BEAMS, SESSION, N_KINDS } Kind;
static const char *const kind_names[N_KINDS] = {"request", "request with beams", "session"};

static char state_dir[] = "/tmp/leat-fault-XXXXXX", path[4096];
static int32_t prompt[N_PROMPT + N_TOKENS]; /* and the answer, when a session goes on */
static int file; /* what sessions are saved to */
static Talk *talk;

/* ---- requests ------------------------------------------------------------------------------------------------------ */

typedef struct Answer {
    EngineResult result;
    char said[600];
    int32_t ids[N_BEAMS * N_TOKENS];
    size_t n_ids;
} Answer;

static EngineRequest request_of(Kind kind)
{
    EngineRequest request = raw_request("m", NULL, N_TOKENS);

    request.ids = prompt;
    request.n_ids = N_PROMPT;
    request.want_ids = request.sampling.ignore_eos = true;
    if (kind == BEAMS)
        request.sampling.num_beams = request.sampling.num_return_sequences = N_BEAMS;
    return request;
}

/* What became of the job, its tokens after those that are there; the talk forgets it, so that there may be any number. */
static void hear(uint64_t job, Answer *ret)
{
    Seen *seen = talk_wait(talk, job);

    ret->result = seen->result;
    (void)snprintf(ret->said, sizeof(ret->said), "%s", seen->detail.text);
    MUST(seen->n_ids <= N_TOKENS && seen->n_sequences <= N_BEAMS);
    memcpy(ret->ids + ret->n_ids, seen->ids, seen->n_ids * sizeof(int32_t));
    ret->n_ids += seen->n_ids;
    for (size_t i = 0; i < seen->n_sequences; i++) {
        EngineSequence *sequence = &seen->sequences[i];

        MUST(sequence->n_tokens <= N_TOKENS);
        for (uint32_t t = 0; sequence->ids && t < sequence->n_tokens; t++)
            ret->ids[ret->n_ids++] = sequence->ids[t];
        free(sequence->text);
        free(sequence->ids);
    }
    free(seen->sequences);
    *seen = (Seen){.job = 0};
}

static void refused(int r, const char *function, Answer *ret)
{
    MUST(r == -ENOMEM);
    ret->result = ENGINE_RESULT_OUT_OF_MEMORY;
    (void)snprintf(ret->said, sizeof(ret->said), "%s: %s", function, strerror(-r));
}

/* Whether it was answered. */
static bool generate(const EngineRequest *request, Answer *ret)
{
    uint64_t job = 0;
    int r = engine_generate(talk->engine, request, &job);

    if (r == 0)
        hear(job, ret);
    else
        refused(r, "engine_generate", ret);
    return ret->result == ENGINE_RESULT_DONE;
}

/* A question about sessions; *ret_session (may be NULL) is one that it made.  Whether it was answered. */
static bool query(EngineQueryKind kind, uint64_t session, int64_t n, int fd, uint64_t *ret_session, Answer *ret)
{
    EngineQuery query = {.kind = kind, .cookie = 1, .owner = 1, .session = session, .model = session ? NULL : "m", .n = n, .fd = fd < 0 ? fd : dup(fd)};
    int r = engine_query(talk->engine, &query);

    if (r != 0) {
        if (query.fd >= 0)
            (void)close(query.fd);
        refused(r, "engine_query", ret);
        return false;
    }
    talk_until(talk, talk->replies[1]);
    ret->result = talk->replies[1]->result;
    (void)snprintf(ret->said, sizeof(ret->said), "%s", talk->replies[1]->detail.text);
    if (ret_session && ret->result == ENGINE_RESULT_DONE)
        *ret_session = talk->replies[1]->session;
    talk->replies[1] = engine_event_free(talk->replies[1]);
    return ret->result == ENGINE_RESULT_DONE;
}

/* Each step, until one fails. */
static void live(uint64_t sessions[static 3], Answer *ret)
{
    EngineRequest request = request_of(SESSION);

    if (!query(ENGINE_QUERY_OPEN_SESSION, 0, 0, -1, &sessions[0], ret))
        return;
    request.session = sessions[0];
    if (!generate(&request, ret) || !query(ENGINE_QUERY_SAVE_SESSION, sessions[0], 0, file, NULL, ret) ||
        !query(ENGINE_QUERY_CROP_SESSION, sessions[0], -3, -1, NULL, ret) ||
        !query(ENGINE_QUERY_CLONE_SESSION, sessions[0], 0, -1, &sessions[1], ret) || !query(ENGINE_QUERY_OPEN_SESSION, 0, 0, -1, &sessions[2], ret) ||
        !query(ENGINE_QUERY_RESTORE_SESSION, sessions[2], 0, file, NULL, ret))
        return;
    memcpy(prompt + N_PROMPT, ret->ids, sizeof(int32_t) * N_TOKENS);
    request.n_ids = N_PROMPT + N_TOKENS;
    for (size_t i = 1; i < 3; i++) {
        request.session = sessions[i];
        if (!generate(&request, ret))
            return;
    }
}

/* What has failed is told by @ret; closing may fail once. */
static void ask_session(Answer *ret)
{
    uint64_t sessions[3] = {0};
    Answer close_answer = {.n_ids = 0};

    live(sessions, ret);
    for (size_t i = 0; i < 3; i++)
        if (sessions[i] && !query(ENGINE_QUERY_CLOSE_SESSION, sessions[i], 0, -1, NULL, &close_answer)) {
            if (ret->result == ENGINE_RESULT_DONE)
                *ret = close_answer;
            MUST(query(ENGINE_QUERY_CLOSE_SESSION, sessions[i], 0, -1, NULL, &close_answer));
        }
}

static void ask(Kind kind, Answer *ret)
{
    EngineRequest request = request_of(kind);

    *ret = (Answer){.n_ids = 0};
    if (kind == SESSION)
        ask_session(ret);
    else
        (void)generate(&request, ret);
}

static Answer expected[N_KINDS];

static bool is_right(const Answer *answer, Kind kind)
{
    return answer->result == ENGINE_RESULT_DONE && answer->n_ids == expected[kind].n_ids &&
           memcmp(answer->ids, expected[kind].ids, answer->n_ids * sizeof(int32_t)) == 0;
}

/* Without faults.  A device that did not open is tried again after a second. */
static void ask_well(Kind kind)
{
    Answer answer;

    for (int i = 0; i < 100; i++) {
        ask(kind, &answer);
        if (answer.result != ENGINE_RESULT_NO_DEVICE)
            break;
        talk_sleep(100000);
    }
    if (answer.result != ENGINE_RESULT_DONE)
        script_fail(__FILE__, __LINE__, "the next request ends with %d: %s", (int)answer.result, answer.said);
    if (!is_right(&answer, kind))
        script_fail(__FILE__, __LINE__, "the next request has other tokens");
}

/* Lets go of the model, so that the next request loads it. */
static void unload(void)
{
    EngineEvent *reply = talk_ask(talk, (EngineQuery){.kind = ENGINE_QUERY_UNLOAD, .model = "m"});

    MUST(reply->result == ENGINE_RESULT_DONE);
    talk->replies[talk->last_cookie] = engine_event_free(reply);
    talk->last_cookie = 0;
}

/* ---- cases --------------------------------------------------------------------------------------------------------- */

typedef struct Tally {
    uint32_t n_cases, n_failed, n_survived;
} Tally;

/* A fault is armed: the request, then the next one.  Whether it was met; @layer: it cannot be told. */
static bool run_case(Kind kind, clsim_set_faults_fn layer, Tally *tally)
{
    const char *function;
    Answer answer;
    bool hit;

    ask(kind, &answer);
    hit = fault_disarm(&function);
    if (layer)
        CHECK(layer(NULL) == CL_SUCCESS);
    if (answer.result == ENGINE_RESULT_DONE) {
        if (!is_right(&answer, kind))
            script_fail(__FILE__, __LINE__, "wrong tokens");
        tally->n_survived += hit;
    } else {
        if (!hit && !layer)
            script_fail(__FILE__, __LINE__, "ends with %d though no fault was met: %s", (int)answer.result, answer.said);
        if (!answer.said[0])
            script_fail(__FILE__, __LINE__, "%s fails, the request ends with %d and does not say why", function, (int)answer.result);
        tally->n_failed++;
    }
    if (getenv("LEAT_FAULT_VERBOSE"))
        (void)printf("  %s: %d: %s\n", function, (int)answer.result, answer.said);
    tally->n_cases++;
    ask_well((kind + 1) % N_KINDS);
    return hit;
}

static void say_tally(const char *what, Kind kind, bool cold, uint32_t n, const Tally *tally)
{
    (void)printf("%s, %s %s: of %u %u cases, %u failed, %u went on\n", what, cold ? "cold" : "warm", kind_names[kind], n, tally->n_cases,
                 tally->n_failed, tally->n_survived);
    (void)fflush(stdout);
}

/* ---- the engine ---------------------------------------------------------------------------------------------------- */

static void quiet(void *userdata, LogLevel level, const char *line)
{
    (void)userdata;
    (void)level;
    (void)line;
}

static void start(uint64_t deadline_usec)
{
    EngineModel model = {.name = "m",
                         .path = path,
                         .policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false),
                         .parallel = 2,
                         .n_prefixes = 2,
                         .keep_alive_usec = UINT64_MAX};
    EngineOptions options = {.gpu = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = deadline_usec},
                             .models = &model,
                             .n_models = 1,
                             .state_dir = state_dir, /* measured once */
                             .max_queue = 8};

    talk = talk_new(&options);
}

enum { DEADLINE_USEC = 60000000, SHORT_DEADLINE_USEC = 4000000 };

/* An engine that has served each kind of request twice, and what is there before it. */
static void open_engine(uint64_t deadline_usec, FaultLive *ret_none)
{
    script_init();
    log_set_sink(quiet, NULL);
    CHECK(mkdtemp(state_dir) != NULL);
    rig_path("tiny-llama-mixed.gguf", path, sizeof(path));
    rig_random_ids(77, SCRIPT_VOCAB, prompt, N_PROMPT);
    file = memfd_create("session", MFD_CLOEXEC);
    CHECK(file >= 0);
    script_say("without faults");
    for (int i = 0; i < 2; i++) {
        start(deadline_usec);
        for (Kind kind = 0; kind < N_KINDS; kind++) {
            ask(kind, &expected[kind]);
            if (expected[kind].result != ENGINE_RESULT_DONE)
                script_fail(__FILE__, __LINE__, "%s", expected[kind].said);
        }
        talk = talk_free(talk);
        fault_live(ret_none);
    }
    start(deadline_usec);
    for (Kind kind = 0; kind < N_KINDS; kind++)
        ask_well(kind);
}

/* @none: NULL when something has hung: what it holds is left to it. */
static void close_engine(const FaultLive *none)
{
    char command[64];

    talk = talk_free(talk);
    if (none)
        fault_rig_check_none_left(none, 0);
    (void)snprintf(command, sizeof(command), "rm -r %s", state_dir);
    CHECK(system(command) == 0);
}

/* ---- scenarios ----------------------------------------------------------------------------------------------------- */

static void fail_call(uint32_t i)
{
    fault_call(i, CL_OUT_OF_RESOURCES);
}

/* What a request does many times, and how a fault is armed at the i-th. */
typedef struct Point {
    const char *name;
    uint32_t (*count)(void);
    void (*arm)(uint32_t i);
} Point;
static const Point call_of_opencl = {"call of OpenCL", fault_n_calls, fail_call}, allocation = {"allocation", fault_n_allocations, fault_allocation};

/* The @cold request loads the model. */
static void each(const Point *point, Kind kind, bool cold, uint32_t wanted)
{
    Tally tally = {0};
    uint32_t n, stride;

    if (cold)
        unload();
    fault_count(false);
    ask_well(kind);
    n = point->count();
    stride = fault_rig_stride(n, wanted);
    for (uint32_t i = 1 + fault_rig_seed() % stride; i <= n; i += stride) {
        script_say("%s %u of a %s %s fails", point->name, i, cold ? "cold" : "warm", kind_names[kind]);
        if (cold)
            unload();
        point->arm(i);
        (void)run_case(kind, NULL, &tally);
    }
    say_tally(point->name, kind, cold, n, &tally);
}

static clsim_set_faults_fn find_layer(void)
{
    clsim_set_faults_fn layer = NULL;
    cl_platform_id platform;

    CHECK(clGetPlatformIDs(1, &platform, NULL) == CL_SUCCESS);
    *(void **)&layer = clGetExtensionFunctionAddressForPlatform(platform, "clsimSetFaults");
    CHECK(layer);
    return layer;
}

static void every_event(Kind kind, uint32_t wanted)
{
    clsim_set_faults_fn layer = find_layer();
    Tally tally = {0};

    for (uint32_t i = 0; i < (getenv("LEAT_SOAK") ? 50 * wanted : wanted); i++) {
        char fault[96];

        (void)snprintf(fault, sizeof(fault), "%s:%u:event=CL_OUT_OF_RESOURCES", i % 2 ? "clEnqueueNDRangeKernel" : "clEnqueueWriteBuffer",
                       1 + (fault_rig_seed() + 13 * i) % (i % 2 ? 100 : 20));
        script_say("%s", fault);
        fault_count(false);
        CHECK(layer(fault) == CL_SUCCESS);
        (void)run_case(kind, layer, &tally);
    }
    say_tally("events", kind, false, tally.n_cases, &tally);
}

static void calls(void)
{
    FaultLive none;

    open_engine(DEADLINE_USEC, &none);
    each(&call_of_opencl, PLAIN, true, 6);
    each(&call_of_opencl, BEAMS, false, 4);
    each(&call_of_opencl, SESSION, false, 6);
    close_engine(&none);
}

/* PoCL may not end a kernel that waits for one that fails: then the device hangs, and what it holds is left to it. */
static void events(void)
{
    FaultLive none;

    open_engine(DEADLINE_USEC, &none);
    for (Kind kind = 0; kind < N_KINDS; kind++)
        every_event(kind, 2);
    close_engine(NULL);
}

static void allocations(void)
{
    FaultLive none;

    open_engine(DEADLINE_USEC, &none);
    each(&allocation, PLAIN, true, 10);
    for (Kind kind = 0; kind < N_KINDS; kind++)
        each(&allocation, kind, false, 12);
    close_engine(&none);
}

/* Two turns of a session, the second as many times as it takes: what it answers.  @fault hits in the second, which must then end with
 * "hung" and succeed once more: the session is at home on the host. */
static void two_turns(clsim_set_faults_fn layer, const char *fault, Answer *ret)
{
    EngineRequest request = request_of(SESSION);
    Answer failed = {.n_ids = 0};
    uint64_t session = 0;

    *ret = (Answer){.n_ids = 0};
    MUST(query(ENGINE_QUERY_OPEN_SESSION, 0, 0, -1, &session, ret));
    request.session = session;
    MUST(generate(&request, ret) && ret->n_ids == N_TOKENS);
    memcpy(prompt + N_PROMPT, ret->ids, sizeof(int32_t) * N_TOKENS);
    request.n_ids = N_PROMPT + N_TOKENS;
    if (fault) {
        script_say("second turn of a session, %s", fault);
        CHECK(layer(fault) == CL_SUCCESS);
        MUST(!generate(&request, &failed));
        if (failed.result != ENGINE_RESULT_DEVICE_HUNG || !strstr(failed.said, "deadline"))
            script_fail(__FILE__, __LINE__, "ends with %d: %s", (int)failed.result, failed.said);
        CHECK(layer(NULL) == CL_SUCCESS);
    }
    MUST(generate(&request, ret));
    MUST(query(ENGINE_QUERY_CLOSE_SESSION, session, 0, -1, NULL, &failed));
}

/* Commands that are accepted and never end. */
static void stalls(void)
{
    static const struct {
        Kind kind;
        const char *function;
    } cases[] = {{PLAIN, "clEnqueueWriteBuffer"}, {BEAMS, "clEnqueueReadBuffer"}, {SESSION, "clEnqueueNDRangeKernel"}, {BEAMS, "clEnqueueCopyBuffer"}};
    Answer turns, again;
    clsim_set_faults_fn layer;
    Tally tally = {0};
    FaultLive none;

    open_engine(SHORT_DEADLINE_USEC, &none);
    layer = find_layer();
    for (size_t f = 0; f < N_ELEMENTS(cases); f++) {
        char fault[96];

        (void)snprintf(fault, sizeof(fault), "%s:%u:stall", cases[f].function, 1 + (fault_rig_seed() + (uint32_t)f) % 3);
        script_say("%s, %s", kind_names[cases[f].kind], fault);
        fault_count(false);
        CHECK(layer(fault) == CL_SUCCESS);
        (void)run_case(cases[f].kind, layer, &tally);
        MUST(tally.n_failed == f + 1);
    }
    two_turns(layer, NULL, &turns);
    two_turns(layer, "clEnqueueWriteBuffer:3:stall", &again);
    MUST(again.n_ids == turns.n_ids && memcmp(again.ids, turns.ids, again.n_ids * sizeof(int32_t)) == 0);
    close_engine(NULL);
}

static const SimScenario scenarios[] = {{"calls", calls}, {"events", events}, {"allocations", allocations}, {"stalls", stalls}};

/* ---- tests --------------------------------------------------------------------------------------------------------- */

static void whatever_fails_on_the_device_the_engine_serves_the_next_request(void **state)
{
    (void)state;
    sim_rig_run_well("calls", FAULT_RIG_DEVICE);
    sim_rig_run_well("events", FAULT_RIG_LATER);
}

static void whatever_memory_is_refused_the_engine_serves_the_next_request(void **state)
{
    (void)state;
    sim_rig_run_well("allocations", FAULT_RIG_DEVICE);
}

static void whatever_does_not_end_the_engine_says_so_and_serves_the_next_request(void **state)
{
    (void)state;
    sim_rig_run_well("stalls", FAULT_RIG_STALLS);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whatever_fails_on_the_device_the_engine_serves_the_next_request),
        cmocka_unit_test(whatever_memory_is_refused_the_engine_serves_the_next_request),
        cmocka_unit_test(whatever_does_not_end_the_engine_says_so_and_serves_the_next_request),
    };

    if (sim_rig_is_scenario(argc, argv, scenarios, N_ELEMENTS(scenarios)))
        return EXIT_SUCCESS;
    fault_rig_begin();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
