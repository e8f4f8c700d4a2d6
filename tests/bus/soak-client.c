/* SPDX-License-Identifier: Apache-2.0 */
/* One client of the soak: random things until the time is over, every answer compared with the first one. */

#include "tests/bus/soak.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>
#include <cmocka.h>

#define N_SESSIONS 4
#define SECONDS    240

typedef struct ClientSession {
    char *path;
    unsigned model;
    const SoakPolicy *policy;
    bool recording;
} ClientSession;

typedef struct Client {
    Harness harness; /* its address only */
    sd_bus *bus;
    SoakTable *table;
    uint64_t seed;
    ClientSession sessions[N_SESSIONS];
} Client;

static uint64_t pick(Client *client, uint64_t n)
{
    return soak_random(&client->seed, n);
}

/* What may be answered while configurations change and queues fill.  A model that was taken out of the configuration takes its sessions along.
 * LEAT_SOAK_TIGHT: the device may be too small for what is asked of it at once. */
static bool is_refusal(const char *error)
{
    static const char *const names[] = {ERROR("QueueFull"), ERROR("NoSuchModel"), ERROR("NoSuchSession"), ERROR("SessionBusy")};

    for (size_t i = 0; i < N_ELEMENTS(names); i++)
        if (strcmp(error, names[i]) == 0)
            return true;
    return getenv("LEAT_SOAK_TIGHT") && (strcmp(error, ERROR("OutOfDeviceMemory")) == 0 || strcmp(error, ERROR("OutOfMemory")) == 0);
}

static void refused(Client *client, const char *what, const char *error)
{
    if (!error || !is_refusal(error))
        fail_msg("%s: %s", what, error ? error : "no error");
    (void)__atomic_add_fetch(&client->table->n_refused, 1, __ATOMIC_RELAXED);
}

static void forget(ClientSession *session)
{
    free(session->path);
    *session = (ClientSession){.path = NULL};
}

/* The model has left the configuration and taken its sessions along. */
static void forget_path(Client *client, const char *path)
{
    for (size_t i = 0; i < N_SESSIONS; i++)
        if (client->sessions[i].path && strcmp(client->sessions[i].path, path) == 0)
            forget(&client->sessions[i]);
}

/* The reply, or NULL when it was refused as it may be, or with one of the names in @allowed (or NULL). */
static sd_bus_message *try_call(Client *client, sd_bus_message *m, const char *allowed)
{
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    sd_bus_message *reply = NULL;

    if (sd_bus_call(client->bus, m, 0, &error, &reply) >= 0)
        return reply;
    if (error.name && strcmp(error.name, ERROR("NoSuchSession")) == 0)
        forget_path(client, sd_bus_message_get_path(m));
    if (!error.name || !allowed || !strstr(allowed, error.name)) {
        if (!error.name || !is_refusal(error.name))
            fail_msg("%s.%s: %s: %s", sd_bus_message_get_interface(m), sd_bus_message_get_member(m), error.name, error.message);
        refused(client, sd_bus_message_get_member(m), error.name);
    }
    return NULL;
}

static sd_bus_message *try_session(Client *client, const ClientSession *session, const char *member, const char *allowed, const char *types, ...)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *m = NULL;
    va_list arguments;
    int r;

    assert_return_code(sd_bus_message_new_method_call(client->bus, &m, BUS_NAME, session->path, SESSION, member), 0);
    va_start(arguments, types);
    r = sd_bus_message_appendv(m, types, arguments);
    va_end(arguments);
    assert_return_code(r, -r);
    assert_return_code(sd_bus_message_append(m, "a{sv}", 0), 0);
    return try_call(client, m, allowed);
}

/* ---- sessions -------------------------------------------------------------------------------------------------------------------- */

static void forget_all(Client *client)
{
    for (size_t i = 0; i < N_SESSIONS; i++)
        forget(&client->sessions[i]);
}

static bool open_one(Client *client, ClientSession *session)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
    const char *path;

    session->model = (unsigned)pick(client, SOAK_MODELS);
    session->policy = &soak_policies[pick(client, soak_n_policies)];
    assert_return_code(sd_bus_message_new_method_call(client->bus, &m, BUS_NAME, BUS_ROOT, MANAGER, "OpenSession"), 0);
    assert_return_code(sd_bus_message_append(m, "s", soak_models[session->model]), 0);
    assert_return_code(sd_bus_message_open_container(m, 'a', "{sv}"), 0);
    soak_append_policy(m, session->policy);
    assert_return_code(sd_bus_message_close_container(m), 0);
    if (!(reply = try_call(client, m, NULL)))
        return false;
    assert_return_code(sd_bus_message_read(reply, "o", &path), 0);
    session->path = strdup(path);
    return true;
}

/* One of the client's, opened when need be; NULL: refused. */
static ClientSession *some_session(Client *client)
{
    ClientSession *session = &client->sessions[pick(client, N_SESSIONS)];

    return session->path || open_one(client, session) ? session : NULL;
}

/* ---- turns ----------------------------------------------------------------------------------------------------------------------- */

typedef struct Turn {
    char job[96];
    unsigned talk;
    uint32_t first, n; /* of the answer */
    int fd;
} Turn;

/* Says the prompt and the first part of the answer; what comes next must be the next part.  False: refused. */
static bool turn_start(Client *client, const ClientSession *session, Turn *ret)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
    const SoakTable *table = client->table;
    int32_t ids[SOAK_PROMPT + SOAK_ANSWER];
    const char *job;
    int fd;

    ret->talk = (unsigned)pick(client, SOAK_TALKS);
    ret->first = (uint32_t)pick(client, SOAK_ANSWER);
    ret->n = 1 + (uint32_t)pick(client, SOAK_ANSWER - ret->first);
    memcpy(ids, table->prompts[ret->talk], table->n_prompt[ret->talk] * sizeof(*ids));
    memcpy(ids + table->n_prompt[ret->talk], table->answers[session->model][session->policy->form][ret->talk], ret->first * sizeof(*ids));
    assert_return_code(sd_bus_message_new_method_call(client->bus, &m, BUS_NAME, session->path, SESSION, "Generate"), 0);
    assert_return_code(sd_bus_message_append(m, "aa{sv}", 0), 0);
    assert_return_code(sd_bus_message_open_container(m, 'a', "{sv}"), 0);
    assert_return_code(sd_bus_message_append(m, "{sv}{sv}{sv}{sv}{sv}", "max-tokens", "u", ret->n, "ignore-eos", "b", true, "want-ids", "b", true,
                                             "temperature", "d", 0.0, "priority", "s", pick(client, 2) ? "interactive" : "background"),
                       0);
    soak_append_ids(m, ids, table->n_prompt[ret->talk] + ret->first);
    assert_return_code(sd_bus_message_close_container(m), 0);
    if (!(reply = try_call(client, m, NULL)))
        return false;
    assert_return_code(sd_bus_message_read(reply, "oh", &job, &fd), 0);
    (void)snprintf(ret->job, sizeof(ret->job), "%s", job);
    ret->fd = dup(fd);
    assert_return_code(ret->fd, errno);
    return true;
}

/* What was heard is the beginning of what was said first; all of it when the turn ended by itself. */
static void turn_check(Client *client, const ClientSession *session, const Turn *turn, const Heard *heard, bool is_cancelled)
{
    const int32_t *expected = client->table->answers[session->model][session->policy->form][turn->talk] + turn->first;

    for (uint32_t i = 0; i < MIN(heard->n_ids, turn->n); i++)
        if (heard->ids[i] != expected[i])
            fail_msg("%s, %s, talk %u from %" PRIu32 ": token %" PRIu32 " is %" PRId32 " and was %" PRId32 " first", soak_models[session->model],
                     session->policy->strategy, turn->talk, turn->first, i, heard->ids[i], expected[i]);
    if (heard->error[0] && !(is_cancelled && strcmp(heard->error, ERROR("Cancelled")) == 0))
        refused(client, heard->error_text, heard->error);
    else if (!is_cancelled && (heard->n_ids != turn->n || strcmp(heard->reason, "length") != 0))
        fail_msg("%" PRIu32 " of %" PRIu32 " tokens, reason '%s'", heard->n_ids, turn->n, heard->reason);
}

static void turn_finish(Client *client, const ClientSession *session, Turn *turn)
{
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};

    stream_hear(turn->fd, SECONDS, &heard);
    turn_check(client, session, turn, &heard, false);
    close_fdp(&turn->fd);
}

static void say(Client *client)
{
    ClientSession *session = some_session(client);
    Turn turn;

    if (session && turn_start(client, session, &turn))
        turn_finish(client, session, &turn);
}

/* Turns in all of the client's sessions at once. */
static void say_in_all(Client *client)
{
    Turn turns[N_SESSIONS];

    for (size_t i = 0; i < N_SESSIONS; i++) {
        turns[i].fd = -1;
        if (client->sessions[i].path)
            (void)turn_start(client, &client->sessions[i], &turns[i]);
    }
    for (size_t i = 0; i < N_SESSIONS; i++)
        if (turns[i].fd >= 0)
            turn_finish(client, &client->sessions[i], &turns[i]);
}

/* Ends it early in one of three ways; the session goes on. */
static void cancel(Client *client)
{
    _cleanup_(heard_clear) Heard heard = {.n_ids = 0};
    const ClientSession *some = some_session(client);
    ClientSession session;
    sd_bus_message *m = NULL;
    Turn turn;

    if (!some || !turn_start(client, some, &turn))
        return;
    session = *some; /* which may be forgotten in between */
    stream_hear_some(turn.fd, SECONDS, (uint32_t)pick(client, turn.n), &heard);
    switch (pick(client, 3)) {
    case 0:
        close_fdp(&turn.fd);
        turn_check(client, &session, &turn, &heard, true);
        return;
    case 1:
        sd_bus_message_unref(try_session(client, &session, "Cancel", NULL, ""));
        break;
    default:
        assert_return_code(sd_bus_message_new_method_call(client->bus, &m, BUS_NAME, turn.job, JOB, "Cancel"), 0);
        assert_return_code(sd_bus_message_append(m, "a{sv}", 0), 0);
        sd_bus_message_unref(try_call(client, m, ERROR("NoSuchJob")));
        sd_bus_message_unref(m);
    }
    if (!heard.ended)
        stream_hear(turn.fd, SECONDS, &heard);
    turn_check(client, &session, &turn, &heard, true);
    close_fdp(&turn.fd);
}

/* ---- the cache ------------------------------------------------------------------------------------------------------------------- */

static void crop(Client *client)
{
    ClientSession *session = some_session(client);

    if (session)
        sd_bus_message_unref(try_session(client, session, "Crop", SD_BUS_ERROR_INVALID_ARGS, "i", -(int)pick(client, 60)));
}

static void record(Client *client)
{
    ClientSession *session = some_session(client);

    if (!session)
        return;
    session->recording = !session->recording;
    sd_bus_message_unref(try_session(client, session, "SetRecording", NULL, "b", session->recording));
}

static void clone(Client *client)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
    ClientSession *session = some_session(client), *other = &client->sessions[pick(client, N_SESSIONS)];
    const char *path;

    if (!session || other->path || !(reply = try_session(client, session, "Clone", NULL, "")))
        return;
    assert_return_code(sd_bus_message_read(reply, "o", &path), 0);
    *other = *session;
    other->path = strdup(path);
}

static void close_session(Client *client)
{
    ClientSession *session = &client->sessions[pick(client, N_SESSIONS)];

    if (!session->path)
        return;
    sd_bus_message_unref(try_session(client, session, "Close", NULL, ""));
    forget(session);
}

/* Another session takes over what was saved, when it is of the same model and form; a damaged file is refused and changes nothing.  The model
 * may be unloaded in the middle, which is said: Cancelled. */
static void save_and_restore(Client *client)
{
    _cleanup_(close_fdp) int file = memfd_create("session", MFD_CLOEXEC);
    ClientSession *session = some_session(client), *other = some_session(client);
    bool same, damaged = pick(client, 3) == 0;
    sd_bus_message *reply;
    off_t size;
    char byte;

    /* Nothing to save: InvalidArgs. */
    if (!session || !other || !(reply = try_session(client, session, "Save", SD_BUS_ERROR_INVALID_ARGS " " ERROR("Cancelled"), "h", file)))
        return;
    sd_bus_message_unref(reply);
    size = lseek(file, 0, SEEK_END);
    assert_true(size > 0);
    same = session->model == other->model && session->policy->form == other->policy->form;
    if (damaged) {
        off_t at = (off_t)pick(client, (uint64_t)size);

        assert_int_equal(pread(file, &byte, 1, at), 1);
        byte = (char)(byte ^ (1 << pick(client, 8)));
        assert_int_equal(pwrite(file, &byte, 1, at), 1);
    }
    sd_bus_message_unref(try_session(client, other, "Restore",
                                     damaged ? SD_BUS_ERROR_INVALID_ARGS " " ERROR("DigestMismatch") " " ERROR("Cancelled")
                                     : same  ? ERROR("Cancelled")
                                             : ERROR("DigestMismatch") " " ERROR("Cancelled"),
                                     "h", file));
}

/* Long enough for caches to go to files. */
static void idle(Client *client)
{
    (void)usleep(200000 + (unsigned)pick(client, 1500000));
    say(client);
}

/* ---- questions ------------------------------------------------------------------------------------------------------------------- */

static void ask(Client *client, uint64_t deadline_usec)
{
    unsigned model = (unsigned)pick(client, SOAK_MODELS), talk = (unsigned)pick(client, SOAK_TALKS);
    const SoakPolicy *policy = &soak_policies[pick(client, soak_n_policies)];
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
    _cleanup_(freep) char *error = NULL;
    uint32_t n = 1 + (uint32_t)pick(client, SOAK_ANSWER);
    int32_t ids[SOAK_ANSWER];

    reply = soak_ask(client->bus, model, policy, client->table->prompts[talk], client->table->n_prompt[talk], n, deadline_usec, &error);
    if (!reply) {
        if (!deadline_usec || strcmp(error, ERROR("DeadlineExceeded")) != 0)
            refused(client, "Ask", error);
        return;
    }
    assert_int_equal(soak_read_ids(reply, ids, SOAK_ANSWER), n);
    if (memcmp(ids, client->table->answers[model][policy->form][talk], n * sizeof(*ids)) != 0)
        fail_msg("Ask, %s, %s, talk %u: another answer than the first", soak_models[model], policy->strategy, talk);
}

static void ask_greedy(Client *client)
{
    ask(client, 0);
}

static void ask_in_haste(Client *client)
{
    ask(client, 1 + pick(client, 100000));
}

static void ask_other(Client *client)
{
    SoakOther kind = (SoakOther)pick(client, SOAK_OTHER_X_MAX);
    unsigned i = (unsigned)pick(client, SOAK_OTHERS), model = (unsigned)pick(client, SOAK_MODELS);
    const SoakPolicy *policy = &soak_policies[pick(client, soak_n_policies)];
    _cleanup_(freep) char *error = NULL;
    uint64_t hash;

    if (!soak_other(client->bus, client->table, kind, i, model, policy, &hash, &error))
        refused(client, "another question", error);
    else if (hash != client->table->others[kind][model][policy->form][i])
        fail_msg("question %u of kind %d, %s, %s: another answer than the first", i, (int)kind, soak_models[model], policy->strategy);
}

/* Leaves in the middle of whatever it has begun, and comes again. */
static void leave(Client *client)
{
    Turn turn;

    for (size_t i = 0; i < N_SESSIONS; i++)
        if (client->sessions[i].path && pick(client, 2) && turn_start(client, &client->sessions[i], &turn) && pick(client, 2))
            close_fdp(&turn.fd);
    sd_bus_flush_close_unref(client->bus);
    forget_all(client);
    client->bus = harness_connect(&client->harness, getuid());
}

static void look(Client *client)
{
    ClientSession *session = some_session(client);

    if (session) {
        _cleanup_(sd_bus_message_unrefp) sd_bus_message *m = NULL;

        assert_return_code(sd_bus_message_new_method_call(client->bus, &m, BUS_NAME, session->path, "org.freedesktop.DBus.Properties", "GetAll"), 0);
        assert_return_code(sd_bus_message_append(m, "s", SESSION), 0);
        sd_bus_message_unref(try_call(client, m, SD_BUS_ERROR_UNKNOWN_OBJECT));
    }
    sd_bus_message_unref(call_ok(client->bus, BUS_ROOT, MANAGER, "ListJobs", "a{sv}", 0));
}

static const struct {
    const char *name;
    void (*act)(Client *client);
    unsigned weight;
} actions[] = {
    {"turns", say, 10},       {"turns at once", say_in_all, 4},  {"cancelled turns", cancel, 6},      {"crops", crop, 3},
    {"recordings", record, 2}, {"clones", clone, 3},             {"closed sessions", close_session, 3}, {"saved and restored", save_and_restore, 4},
    {"idle times", idle, 1},  {"greedy questions", ask_greedy, 5}, {"questions in haste", ask_in_haste, 2}, {"other questions", ask_other, 4},
    {"sudden leaves", leave, 1}, {"looks", look, 2},
};

const char *soak_action(size_t i)
{
    static_assert(N_ELEMENTS(actions) <= N_ELEMENTS(((SoakTable *)0)->n_done), "each action has a counter");
    return i < N_ELEMENTS(actions) ? actions[i].name : NULL;
}

static void act(Client *client)
{
    unsigned sum = 0, choice;

    for (size_t i = 0; i < N_ELEMENTS(actions); i++)
        sum += actions[i].weight;
    choice = (unsigned)pick(client, sum);
    for (size_t i = 0; i < N_ELEMENTS(actions); i++) {
        if (choice < actions[i].weight) {
            actions[i].act(client);
            (void)__atomic_add_fetch(&client->table->n_done[i], 1, __ATOMIC_RELAXED);
            return;
        }
        choice -= actions[i].weight;
    }
}

int soak_client(int argc, char **argv)
{
    Client client = {.bus = NULL};

    if (argc != 4 || strcmp(argv[1], "soak-client") != 0)
        return -1;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)snprintf(client.harness.address, sizeof(client.harness.address), "%s", argv[2]);
    client.seed = strtoull(argv[3], NULL, 10);
    client.table = mmap(NULL, sizeof(*client.table), PROT_READ | PROT_WRITE, MAP_SHARED, 3, 0);
    assert_true(client.table != MAP_FAILED);
    client.bus = harness_connect(&client.harness, getuid());
    while (soak_now_usec() < client.table->end_usec)
        act(&client);
    forget_all(&client);
    sd_bus_flush_close_unref(client.bus);
    return 0;
}
