/* SPDX-License-Identifier: Apache-2.0 */
/* config check, reload, trace. */

#include "daemon/config/config.h"
#include "daemon/ctl/ctl.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

static void ctl_print_messages(Ctl *ctl, const ConfigMessages *messages)
{
    json_t *list = json_array();

    for (size_t i = 0; i < messages->n; i++) {
        const ConfigMessage *message = &messages->messages[i];
        const char *severity = message->severity == CONFIG_ERROR ? "error" : "warning";

        if (ctl->json)
            (void)json_array_append_new(list, json_pack("{s:s,s:i,s:i,s:s,s:s}", "file", message->file, "line", (int)message->line,
                                                        "column", (int)message->column, "severity", severity, "text", message->text));
        else
            (void)fprintf(stderr, "%s:%u:%u: %s%s\n", message->file, message->line, message->column,
                          message->severity == CONFIG_WARNING ? "warning: " : "", message->text);
    }
    if (ctl->json)
        ctl_print_json(list);
    json_decref(list);
}

int ctl_verb_config(Ctl *ctl)
{
    _cleanup_(config_freep) Config *config = NULL;
    ConfigMessages messages = CONFIG_MESSAGES_NULL;
    int r;

    if (ctl->n_arguments < 1 || ctl->n_arguments > 2 || strcmp(ctl->arguments[0], "check"))
        return ctl_fail(CTL_EXIT_USAGE, "usage: leat config check [FILE]");
    r = config_load(ctl->n_arguments == 2 ? ctl->arguments[1] : NULL, &config, &messages);
    ctl_print_messages(ctl, &messages);
    config_messages_clear(&messages);
    if (r == -EINVAL)
        return CTL_EXIT_CONFIG;
    if (r < 0)
        return ctl_fail(CTL_EXIT_FAILED, "%s", strerror(-r));
    if (!ctl->quiet && !ctl->json)
        (void)fprintf(stderr, "no errors: %zu models, %zu services\n", config->n_models, config->n_services);
    return CTL_EXIT_DONE;
}

int ctl_verb_reload(Ctl *ctl)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    int r = ctl_connect(ctl);

    if (!r)
        r = ctl_new_call(ctl, CTL_ROOT, CTL_MANAGER, "Reload", &call);
    return r ? r : ctl_call(ctl, call, sd_bus_message_append(call, "a{sv}", 0), &reply);
}

/* Runs the command that was given, or waits for --duration. */
static int ctl_trace_meanwhile(Ctl *ctl)
{
    pid_t child;
    int status;

    if (!ctl->n_arguments) {
        double seconds = ctl->duration > 0 ? ctl->duration : 10;
        struct timespec time = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};

        (void)nanosleep(&time, NULL);
        return CTL_EXIT_DONE;
    }
    child = fork();
    if (child == 0) {
        (void)execvp(ctl->arguments[0], ctl->arguments);
        _exit(127);
    }
    if (child < 0 || waitpid(child, &status, 0) < 0)
        return ctl_fail(CTL_EXIT_FAILED, "%s: %s", ctl->arguments[0], strerror(errno));
    return WIFEXITED(status) ? WEXITSTATUS(status) : CTL_EXIT_FAILED;
}

static int ctl_copy_trace(const char *path, int from)
{
    _cleanup_(close_fdp) int to = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    struct stat status;
    ssize_t n = 1;

    if (to < 0 || fstat(from, &status) < 0)
        return ctl_fail(CTL_EXIT_FAILED, "%s: %s", path, strerror(errno));
    for (off_t left = status.st_size; left > 0 && n > 0; left -= n) {
        n = sendfile(to, from, NULL, (size_t)left);
        if (n < 0)
            return ctl_fail(CTL_EXIT_FAILED, "%s: %s", path, strerror(errno));
    }
    return CTL_EXIT_DONE;
}

int ctl_verb_trace(Ctl *ctl)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *start = NULL, *started = NULL, *stop = NULL, *stopped = NULL;
    const char *device = CTL_ROOT "/device/0", *output = ctl->output ? ctl->output : "leat-trace.json";
    int r = ctl_connect(ctl), result, fd = -1;

    if (!r)
        r = ctl_new_call(ctl, device, CTL_DEVICE, "StartTrace", &start);
    if (!r)
        r = ctl_call(ctl, start, sd_bus_message_append(start, "a{sv}", 0), &started);
    if (r)
        return r;
    result = ctl_trace_meanwhile(ctl);
    r = ctl_new_call(ctl, device, CTL_DEVICE, "StopTrace", &stop);
    if (!r)
        r = ctl_call(ctl, stop, sd_bus_message_append(stop, "a{sv}", 0), &stopped);
    if (r)
        return r;
    if (sd_bus_message_read(stopped, "h", &fd) < 0)
        return ctl_fail(CTL_EXIT_FAILED, "StopTrace: the reply cannot be read");
    r = ctl_copy_trace(output, fd);
    if (!r && !ctl->quiet)
        (void)fprintf(stderr, "the trace is in %s: open it with Perfetto or chrome://tracing\n", output);
    return r ? r : result;
}
