/* SPDX-License-Identifier: Apache-2.0 */
/* run: a YAML service, once or for every file of a spool folder. */

#include "daemon/ctl/ctl.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

/* The service's object path: its name as the bus encodes it. */
static int ctl_service_path(const char *name, char **ret)
{
    return sd_bus_path_encode(CTL_ROOT "/service", name, ret) < 0 ? ctl_fail(CTL_EXIT_FAILED, "out of memory") : CTL_EXIT_DONE;
}

static int ctl_append_inputs(Ctl *ctl, sd_bus_message *call, const char *input)
{
    int r = sd_bus_message_open_container(call, 'a', "{ss}");

    for (size_t i = 0; i < ctl->n_inputs && r >= 0; i++)
        r = sd_bus_message_append(call, "{ss}", ctl->inputs[i].key, ctl->inputs[i].value);
    if (r >= 0 && input)
        r = sd_bus_message_append(call, "{ss}", "input", input);
    return r < 0 ? r : sd_bus_message_close_container(call);
}

static int ctl_invoke(Ctl *ctl, const char *path, const char *input, FILE *live, CtlAnswer *ret)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    const char *job = NULL;
    int r = ctl_new_call(ctl, path, CTL_SERVICE, "Invoke", &call), appended, fd = -1;

    if (r)
        return r;
    appended = ctl_append_inputs(ctl, call, input);
    if (appended >= 0)
        appended = sd_bus_message_open_container(call, 'a', "{sv}");
    if (appended >= 0)
        appended = ctl_append_generation_options(ctl, call);
    if (appended >= 0)
        appended = ctl_append_cache(ctl, call);
    if (appended >= 0)
        appended = sd_bus_message_close_container(call);
    r = ctl_call(ctl, call, appended, &reply);
    if (r)
        return r;
    if (sd_bus_message_read(reply, "oh", &job, &fd) < 0)
        return ctl_fail(CTL_EXIT_FAILED, "Invoke: the reply cannot be read");
    /* The descriptor and the path belong to the reply, which lives until the answer is complete. */
    return ctl_stream_read(ctl, fd, job, live, ret);
}

static bool ctl_has_input(const Ctl *ctl, const char *name)
{
    for (size_t i = 0; i < ctl->n_inputs; i++)
        if (!strcmp(ctl->inputs[i].key, name))
            return true;
    return false;
}

static int ctl_run_once(Ctl *ctl, const char *path)
{
    _cleanup_(freep) char *input = NULL;
    CtlAnswer answer = CTL_ANSWER_NULL;
    bool live = !ctl->json && !ctl->ids;
    size_t length;
    int r = CTL_EXIT_DONE;

    if (ctl->file)
        r = ctl_read_file(ctl->file, &input, &length);
    else if (!ctl_has_input(ctl, "input") && !ctl->spool && !isatty(STDIN_FILENO))
        r = ctl_read_file("-", &input, &length);
    if (!r && input && strlen(input) != length)
        r = ctl_fail(CTL_EXIT_USAGE, "the input holds a NUL character");
    if (!r && input && !length) {
        free(input);
        input = NULL;
    }
    if (!r)
        r = ctl_invoke(ctl, path, input, live ? stdout : NULL, &answer);
    if (!r)
        r = ctl_answer_print(ctl, &answer, live);
    ctl_answer_clear(&answer);
    return r;
}

/* Writes a text beside and renames it into place. */
static int ctl_write_file(int folder_fd, const char *name, const char *text, size_t length)
{
    char temporary[NAME_MAX + 8];
    _cleanup_(close_fdp) int fd = -1;
    size_t done = 0;

    (void)snprintf(temporary, sizeof(temporary), ".%.240s.new", name);
    fd = openat(folder_fd, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0640);
    while (fd >= 0 && done < length) {
        ssize_t n = write(fd, text + done, length - done);

        if (n < 0 && errno != EINTR)
            break;
        done += n > 0 ? (size_t)n : 0;
    }
    if (fd < 0 || done < length || fsync(fd) < 0 || renameat(folder_fd, temporary, folder_fd, name) < 0)
        return ctl_fail(CTL_EXIT_FAILED, "%s: %s", name, strerror(errno));
    return CTL_EXIT_DONE;
}

/* One spool file: the answer lands in done/, the input is removed after it; what fails moves to failed/, unless the daemon
 * could not take it now. */
static int ctl_spool_file(Ctl *ctl, const char *path, int spool_fd, int done_fd, int failed_fd, const char *name)
{
    _cleanup_(freep) char *file = NULL, *input = NULL;
    CtlAnswer answer = CTL_ANSWER_NULL;
    size_t length;
    int r;

    if (asprintf(&file, "%s/%s", ctl->spool, name) < 0)
        return ctl_fail(CTL_EXIT_FAILED, "out of memory");
    r = ctl_read_file(file, &input, &length);
    if (!r && strlen(input) != length)
        r = ctl_fail(CTL_EXIT_USAGE, "%s holds a NUL character", name);
    if (!r)
        r = ctl_invoke(ctl, path, input, NULL, &answer);
    if (!r && answer.error_name) {
        r = ctl_exit_of_error_name(answer.error_name);
        (void)ctl_fail(r, "%s: %s (%s)", name, answer.error_text ? answer.error_text : "failed", answer.error_name);
    }
    if (!r)
        r = ctl_write_file(done_fd, name, answer.text ? answer.text : "", answer.length);
    if (!r && unlinkat(spool_fd, name, 0) < 0)
        r = ctl_fail(CTL_EXIT_FAILED, "%s: %s", name, strerror(errno));
    if ((r == CTL_EXIT_FAILED || r == CTL_EXIT_USAGE) && renameat(spool_fd, name, failed_fd, name) < 0)
        (void)ctl_fail(r, "%s: %s", name, strerror(errno));
    ctl_answer_clear(&answer);
    return r;
}

static int ctl_open_folder(int at, const char *name, int *ret)
{
    if (at != AT_FDCWD && mkdirat(at, name, 0750) < 0 && errno != EEXIST)
        return ctl_fail(CTL_EXIT_FAILED, "%s: %s", name, strerror(errno));
    *ret = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *ret < 0 ? ctl_fail(CTL_EXIT_FAILED, "%s: %s", name, strerror(errno)) : CTL_EXIT_DONE;
}

static int ctl_filter_spool(const struct dirent *entry)
{
    return entry->d_name[0] != '.' && (entry->d_type == DT_REG || entry->d_type == DT_UNKNOWN);
}

static int ctl_run_spool(Ctl *ctl, const char *path)
{
    _cleanup_(close_fdp) int spool_fd = -1, done_fd = -1, failed_fd = -1;
    struct dirent **entries = NULL;
    int r, n, result = CTL_EXIT_DONE;

    n = scandir(ctl->spool, &entries, ctl_filter_spool, alphasort);
    if (n <= 0)
        return n < 0 && errno != ENOENT ? ctl_fail(CTL_EXIT_FAILED, "%s: %s", ctl->spool, strerror(errno))
                                        : ctl_run_once(ctl, path);
    r = ctl_open_folder(AT_FDCWD, ctl->spool, &spool_fd);
    if (!r)
        r = ctl_open_folder(spool_fd, "done", &done_fd);
    if (!r)
        r = ctl_open_folder(spool_fd, "failed", &failed_fd);
    for (int i = 0; i < n; i++) {
        if (!r) {
            int one = ctl_spool_file(ctl, path, spool_fd, done_fd, failed_fd, entries[i]->d_name);

            result = one ? one : result;
            /* When the daemon is not there for this one, it is not there for the next. */
            r = one == CTL_EXIT_UNAVAILABLE || one == CTL_EXIT_INTERRUPTED ? one : 0;
        }
        free(entries[i]);
    }
    free(entries);
    return r ? r : result;
}

int ctl_verb_run(Ctl *ctl)
{
    _cleanup_(freep) char *path = NULL;
    int r;

    if (ctl->n_arguments != 1)
        return ctl_fail(CTL_EXIT_USAGE, "run takes the name of one service (see leat services)");
    r = ctl_connect(ctl);
    if (!r)
        r = ctl_service_path(ctl->arguments[0], &path);
    if (r)
        return r;
    return ctl->spool ? ctl_run_spool(ctl, path) : ctl_run_once(ctl, path);
}
