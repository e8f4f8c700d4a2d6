/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chat: a conversation.
 *
 * With --keep FILE it is kept from one time to the next: FILE has the messages as JSON, FILE.kv the session as the daemon saved it, so that
 * going on does not run the whole conversation again.  FILE.kv is a matter of speed only: without it, or with one that does not fit the
 * model any more, the answers are the same.
 */

#include "daemon/ctl/ctl.h"
#include "quant/base/file.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

/* ---- what is kept ------------------------------------------------------------------------------------------------------------ */

static int ctl_kept_path(const Ctl *ctl, const char *suffix, char **ret)
{
    return asprintf(ret, "%s%s", ctl->keep, suffix) < 0 ? ctl_fail(CTL_EXIT_FAILED, "out of memory") : CTL_EXIT_DONE;
}

static bool ctl_is_conversation(const json_t *messages)
{
    size_t index;
    json_t *message;

    json_array_foreach(messages, index, message)
        if (!json_is_string(json_object_get(message, "role")) || !json_is_string(json_object_get(message, "content")))
            return false;
    return json_is_array(messages);
}

/* The messages of last time; none when there was none. */
static int ctl_kept_read(const Ctl *ctl, json_t **messages)
{
    json_error_t error;
    json_t *kept;

    if (access(ctl->keep, F_OK) < 0 && errno == ENOENT)
        return CTL_EXIT_DONE;
    kept = json_load_file(ctl->keep, 0, &error);
    if (!kept)
        return ctl_fail(CTL_EXIT_USAGE, "--keep %s: no conversation in JSON: line %d: %s", ctl->keep, error.line, error.text);
    if (!ctl_is_conversation(kept)) {
        json_decref(kept);
        return ctl_fail(CTL_EXIT_USAGE, "--keep %s: not a list of messages with role and content", ctl->keep);
    }
    json_decref(*messages);
    *messages = kept;
    return CTL_EXIT_DONE;
}

static int ctl_kept_call(Ctl *ctl, const char *session, const char *method, int fd)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    int r = ctl_new_call(ctl, session, CTL_SESSION, method, &call);

    return r ? r : ctl_call(ctl, call, sd_bus_message_append(call, "ha{sv}", fd, 0), &reply);
}

/* What cannot be restored is run again: said, no more. */
static void ctl_kept_restore(Ctl *ctl, const char *session)
{
    _cleanup_(freep) char *path = NULL;
    _cleanup_(close_fdp) int fd = -1;

    if (ctl_kept_path(ctl, ".kv", &path))
        return;
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && ctl_kept_call(ctl, session, "Restore", fd) && !ctl->quiet)
        (void)fprintf(stderr, "leat: %s is of no use: the conversation is run again\n", path);
}

typedef struct CtlKept {
    Ctl *ctl;
    const char *session;
    const json_t *messages;
    int said; /* the exit status of what has been told already */
} CtlKept;

static int ctl_write_messages(void *userdata, int fd)
{
    CtlKept *kept = userdata;

    if (json_dumpfd(kept->messages, fd, JSON_INDENT(1)) < 0)
        kept->said = ctl_fail(CTL_EXIT_FAILED, "--keep %s: cannot be written", kept->ctl->keep);
    return kept->said ? -ECANCELED : 0;
}

static int ctl_write_session(void *userdata, int fd)
{
    CtlKept *kept = userdata;

    kept->said = ctl_kept_call(kept->ctl, kept->session, "Save", fd);
    return kept->said ? -ECANCELED : 0;
}

static int ctl_kept_replace(CtlKept *kept, const char *suffix, FileFill fill)
{
    _cleanup_(freep) char *path = NULL;
    int r = ctl_kept_path(kept->ctl, suffix, &path);

    if (r)
        return r;
    r = file_replace(path, fill, kept);
    if (kept->said)
        return kept->said;
    return r ? ctl_fail(CTL_EXIT_FAILED, "%s: %s", path, strerror(-r)) : CTL_EXIT_DONE;
}

static int ctl_kept_write(Ctl *ctl, const char *session, const json_t *messages)
{
    CtlKept kept = {ctl, session, messages, CTL_EXIT_DONE};
    int r = ctl_kept_replace(&kept, "", ctl_write_messages);

    return r ? r : ctl_kept_replace(&kept, ".kv", ctl_write_session);
}

/* ---- turns --------------------------------------------------------------------------------------------------------------------- */

/* One turn: the answer joins the conversation when it is complete. */
static int ctl_chat_turn(Ctl *ctl, const char *session, json_t *messages)
{
    _cleanup_(freep) char *job = NULL;
    _cleanup_(close_fdp) int stream_fd = -1;
    CtlAnswer answer = CTL_ANSWER_NULL;
    int r = ctl_generate(ctl, session, messages, -1, &job, &stream_fd);

    if (!r)
        r = ctl_stream_read(ctl, stream_fd, job, stdout, &answer);
    if (!r)
        r = ctl_answer_print(ctl, &answer, true);
    if (r == CTL_EXIT_DONE || r == CTL_EXIT_INTERRUPTED)
        (void)json_array_append_new(messages,
                                    json_pack("{s:s,s:s}", "role", "assistant", "content", answer.text ? answer.text : ""));
    else
        (void)json_array_remove(messages, json_array_size(messages) - 1);
    ctl_answer_clear(&answer);
    return r;
}

/* Line by line until the input ends. */
static int ctl_chat_turns(Ctl *ctl, const char *session, json_t *messages)
{
    _cleanup_(freep) char *line = NULL;
    bool terminal = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
    size_t capacity = 0;
    int r = CTL_EXIT_DONE;

    if (terminal && !ctl->quiet)
        (void)fputs("Ctrl-D ends the conversation, Ctrl-C an answer.\n", stderr);
    while (r == CTL_EXIT_DONE || r == CTL_EXIT_INTERRUPTED || terminal) {
        ssize_t n;

        if (terminal) {
            (void)fputs("> ", stdout);
            (void)fflush(stdout);
        }
        n = getline(&line, &capacity, stdin);
        if (n < 0)
            break;
        if (n > 0 && line[n - 1] == '\n')
            line[--n] = 0;
        if (!n)
            continue;
        if (json_array_append_new(messages, json_pack("{s:s,s:s}", "role", "user", "content", line)) < 0) {
            r = ctl_fail(CTL_EXIT_USAGE, "the line is not valid UTF-8");
            continue;
        }
        r = ctl_chat_turn(ctl, session, messages);
    }
    return r == CTL_EXIT_INTERRUPTED ? CTL_EXIT_DONE : r;
}

int ctl_verb_chat(Ctl *ctl)
{
    _cleanup_(freep) char *session = NULL;
    json_t *messages = json_array();
    size_t n_before;
    int r = ctl->keep ? ctl_kept_read(ctl, &messages) : CTL_EXIT_DONE;

    if (!r && ctl->system && json_array_size(messages) == 0)
        r = ctl_add_instructions(ctl, messages);
    n_before = json_array_size(messages);
    if (!r)
        r = ctl_connect(ctl);
    if (!r)
        r = ctl_open_session(ctl, &session);
    if (!r && ctl->keep)
        ctl_kept_restore(ctl, session);
    if (!r)
        r = ctl_chat_turns(ctl, session, messages);
    if (!r && ctl->keep && json_array_size(messages) > n_before)
        r = ctl_kept_write(ctl, session, messages);
    json_decref(messages);
    return r;
}
