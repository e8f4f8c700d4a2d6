/* SPDX-License-Identifier: Apache-2.0 */
/* The stream of a generation, and Ctrl-C. */

#include "daemon/ctl/ctl.h"

#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>

/* Larger than any frame: text frames have at most 16 KiB, token frames grow with a batch of ids. */
#define CTL_FRAME_BYTES (256 * 1024)

void ctl_answer_clear(CtlAnswer *answer)
{
    free(answer->text);
    free(answer->error_name);
    free(answer->error_text);
    json_decref(answer->ids);
    json_decref(answer->usage);
    json_decref(answer->sequences);
    *answer = CTL_ANSWER_NULL;
}

static int ctl_answer_add_text(CtlAnswer *answer, const char *text, size_t length)
{
    char *grown = realloc(answer->text, answer->length + length + 1);

    if (!grown)
        return -ENOMEM;
    memcpy(grown + answer->length, text, length);
    answer->text = grown;
    answer->length += length;
    answer->text[answer->length] = 0;
    return 0;
}

static char *ctl_json_string(const json_t *object, const char *key)
{
    const char *value = json_string_value(json_object_get(object, key));

    return value ? strdup(value) : NULL;
}

static void ctl_stream_progress(const json_t *facts)
{
    const char *phase = json_string_value(json_object_get(facts, "phase"));

    (void)fprintf(stderr, "\r%s %3.0f %%\033[K\r", phase ? phase : "", 100 * json_number_value(json_object_get(facts, "progress")));
}

static void ctl_stream_event(CtlAnswer *answer, const json_t *event)
{
    json_t *ids = json_object_get(event, "ids");

    if (!json_is_array(ids))
        return;
    if (!answer->ids)
        answer->ids = json_array();
    (void)json_array_extend(answer->ids, ids);
}

/* One frame; 1 when it was the last, negative errno on failure. */
static int ctl_stream_frame(Ctl *ctl, const char *frame, size_t length, FILE *live, CtlAnswer *answer)
{
    json_t *facts = frame[0] == 'T' ? NULL : json_loadb(frame + 1, length - 1, 0, NULL);
    bool terminal = !ctl->quiet && isatty(STDERR_FILENO);
    int r = 0;

    switch (frame[0]) {
    case 'T':
        if (terminal && !answer->length)
            (void)fputs("\r\033[K", stderr);
        r = ctl_answer_add_text(answer, frame + 1, length - 1);
        if (live) {
            (void)fwrite(frame + 1, 1, length - 1, live);
            (void)fflush(live);
        }
        break;
    case 'P':
        if (terminal && !answer->length)
            ctl_stream_progress(facts);
        break;
    case 'E':
        ctl_stream_event(answer, facts);
        break;
    case 'U':
        json_decref(answer->usage);
        answer->usage = json_incref(facts);
        break;
    case 'X':
        answer->error_name = ctl_json_string(facts, "name");
        answer->error_text = ctl_json_string(facts, "text");
        r = 1;
        break;
    case 'D':
        r = 1;
        break;
    default: /* kinds of later versions */
        break;
    }
    json_decref(facts);
    return r;
}

static void ctl_cancel_job(Ctl *ctl, const char *job_path)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL;

    if (ctl_new_call(ctl, job_path, CTL_JOB, "Cancel", &call) == 0 && sd_bus_message_append(call, "a{sv}", 0) >= 0)
        (void)sd_bus_call(ctl->bus, call, 0, NULL, NULL);
}

/* Waits for the stream or for Ctrl-C; 1: readable, 0: Ctrl-C, negative: error. */
static int ctl_stream_wait(int fd, int signal_fd)
{
    struct pollfd fds[] = {{.fd = fd, .events = POLLIN}, {.fd = signal_fd, .events = POLLIN}};
    struct signalfd_siginfo info;

    while (poll(fds, N_ELEMENTS(fds), -1) < 0)
        if (errno != EINTR)
            return -errno;
    return fds[1].revents && read(signal_fd, &info, sizeof(info)) > 0 ? 0 : 1;
}

static int ctl_stream_loop(Ctl *ctl, int fd, int signal_fd, const char *job_path, FILE *live, CtlAnswer *answer)
{
    _cleanup_(freep) char *frame = malloc(CTL_FRAME_BYTES);

    if (!frame)
        return -ENOMEM;
    for (;;) {
        ssize_t n;
        int r = ctl_stream_wait(fd, signal_fd);

        if (r < 0)
            return r;
        if (r == 0) {
            if (answer->interrupted)
                return 0;
            answer->interrupted = true;
            ctl_cancel_job(ctl, job_path);
            continue;
        }
        n = recv(fd, frame, CTL_FRAME_BYTES, 0);
        if (n < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        if (n < 0)
            return -errno;
        if (n == 0) {
            answer->error_name = strdup("org.freedesktop.DBus.Error.Disconnected");
            answer->error_text = strdup("the daemon closed the stream before the answer was complete");
            return 0;
        }
        r = ctl_stream_frame(ctl, frame, (size_t)n, live, answer);
        if (r)
            return MIN(r, 0);
    }
}

int ctl_stream_read(Ctl *ctl, int fd, const char *job_path, FILE *live, CtlAnswer *ret)
{
    _cleanup_(close_fdp) int signal_fd = -1;
    sigset_t signals, old;
    int r;

    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    (void)sigprocmask(SIG_BLOCK, &signals, &old);
    signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    r = signal_fd < 0 ? -errno : ctl_stream_loop(ctl, fd, signal_fd, job_path, live, ret);
    (void)sigprocmask(SIG_SETMASK, &old, NULL);
    return r < 0 ? ctl_fail(CTL_EXIT_FAILED, "stream: %s", strerror(-r)) : CTL_EXIT_DONE;
}

static void ctl_answer_print_json(Ctl *ctl, const CtlAnswer *answer)
{
    json_t *result = json_object();

    if (answer->sequences)
        (void)json_object_set(result, "sequences", answer->sequences);
    else if (ctl->ids)
        (void)json_object_set_new(result, "ids", answer->ids ? json_incref(answer->ids) : json_array());
    else
        (void)json_object_set_new(result, "text", json_string(answer->text ? answer->text : ""));
    if (answer->usage)
        (void)json_object_set(result, "usage", answer->usage);
    if (answer->error_name)
        (void)json_object_set_new(
            result, "error",
            json_pack("{s:s,s:s}", "name", answer->error_name, "text", answer->error_text ? answer->error_text : ""));
    ctl_print_json(result);
    json_decref(result);
}

static void ctl_answer_print_ids(const CtlAnswer *answer)
{
    size_t index;
    json_t *id;

    json_array_foreach(answer->ids, index, id)
        (void)printf("%s%lld", index ? " " : "", (long long)json_integer_value(id));
    (void)putchar('\n');
}

int ctl_answer_print(Ctl *ctl, const CtlAnswer *answer, bool streamed)
{
    if (ctl->json) {
        ctl_answer_print_json(ctl, answer);
    } else if (answer->sequences) {
        ctl_print_sequences(ctl, answer->sequences);
    } else if (ctl->ids) {
        ctl_answer_print_ids(answer);
    } else {
        if (!streamed && answer->text)
            (void)fputs(answer->text, stdout);
        if (answer->length && answer->text[answer->length - 1] != '\n')
            (void)putchar('\n');
    }
    (void)fflush(stdout);
    if (ctl->stats && answer->usage && !ctl->json)
        ctl_print_facts(stderr, answer->usage, "  ");
    if (answer->interrupted)
        return CTL_EXIT_INTERRUPTED;
    if (answer->error_name) {
        (void)ctl_fail(CTL_EXIT_FAILED, "%s (%s)", answer->error_text ? answer->error_text : "failed", answer->error_name);
        return ctl_exit_of_error_name(answer->error_name);
    }
    return CTL_EXIT_DONE;
}
