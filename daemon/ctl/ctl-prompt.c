/* SPDX-License-Identifier: Apache-2.0 */
/* Prompts from arguments, files and pipes; generation options. */

#include "daemon/ctl/ctl.h"

#include <string.h>
#include <sys/mman.h>

static int ctl_append_sampling(sd_bus_message *call, const CtlPair *pair)
{
    if (!strcmp(pair->key, "max-tokens") || !strcmp(pair->key, "top-k") || !strcmp(pair->key, "min-tokens") ||
        !strcmp(pair->key, "no-repeat-ngram"))
        return sd_bus_message_append(call, "{sv}", pair->key, "u", (uint32_t)strtoul(pair->value, NULL, 10));
    if (!strcmp(pair->key, "seed"))
        return sd_bus_message_append(call, "{sv}", pair->key, "t", (uint64_t)strtoull(pair->value, NULL, 10));
    return sd_bus_message_append(call, "{sv}", pair->key, "d", strtod(pair->value, NULL));
}

int ctl_append_strings(sd_bus_message *call, const char *key, const char *const *strings, size_t n)
{
    int r = sd_bus_message_open_container(call, 'e', "sv");

    if (r >= 0)
        r = sd_bus_message_append(call, "s", key);
    if (r >= 0)
        r = sd_bus_message_open_container(call, 'v', "as");
    if (r >= 0)
        r = sd_bus_message_open_container(call, 'a', "s");
    for (size_t i = 0; i < n && r >= 0; i++)
        r = sd_bus_message_append(call, "s", strings[i]);
    for (int i = 0; i < 3 && r >= 0; i++)
        r = sd_bus_message_close_container(call);
    return r;
}

int ctl_append_generation_options(Ctl *ctl, sd_bus_message *call)
{
    int r = 0;

    for (size_t i = 0; i < ctl->n_sampling && r >= 0; i++)
        r = ctl_append_sampling(call, &ctl->sampling[i]);
    if (r >= 0 && ctl->n_stops)
        r = ctl_append_strings(call, "stop", ctl->stops, ctl->n_stops);
    if (r >= 0 && ctl->n_bad_words)
        r = ctl_append_strings(call, "bad-words", ctl->bad_words, ctl->n_bad_words);
    if (r >= 0 && ctl->sample)
        r = sd_bus_message_append(call, "{sv}", "do-sample", "b", 1);
    if (r >= 0 && ctl->ignore_eos)
        r = sd_bus_message_append(call, "{sv}", "ignore-eos", "b", 1);
    if (r >= 0 && ctl->ids)
        r = sd_bus_message_append(call, "{sv}", "want-ids", "b", 1);
    if (r >= 0 && ctl->priority)
        r = sd_bus_message_append(call, "{sv}", "priority", "s", ctl->priority);
    return r;
}

static int ctl_read_stream(FILE *file, const char *name, char **ret_text, size_t *ret_length)
{
    _cleanup_(freep) char *text = NULL;
    size_t length = 0, capacity = 0, n;

    do {
        if (capacity - length < 4096) {
            char *grown = realloc(text, capacity = capacity ? 2 * capacity : 65536);

            if (!grown)
                return ctl_fail(CTL_EXIT_FAILED, "%s: out of memory", name);
            text = grown;
        }
        n = fread(text + length, 1, capacity - length - 1, file);
        length += n;
    } while (n > 0);
    if (ferror(file))
        return ctl_fail(CTL_EXIT_FAILED, "%s: %s", name, strerror(errno));
    text[length] = 0;
    *ret_text = TAKE_PTR(text);
    *ret_length = length;
    return CTL_EXIT_DONE;
}

int ctl_read_file(const char *path, char **ret_text, size_t *ret_length)
{
    _cleanup_(close_filep) FILE *file = NULL;

    if (!strcmp(path, "-"))
        return ctl_read_stream(stdin, "standard input", ret_text, ret_length);
    file = fopen(path, "re");
    if (!file)
        return ctl_fail(CTL_EXIT_USAGE, "%s: %s", path, strerror(errno));
    return ctl_read_stream(file, path, ret_text, ret_length);
}

/* The arguments joined by blanks, then the file's text after a line break. */
static int ctl_join_prompt(Ctl *ctl, const char *file_text, size_t file_length, char **ret_text, size_t *ret_length)
{
    FILE *stream = open_memstream(ret_text, ret_length);

    if (!stream)
        return ctl_fail(CTL_EXIT_FAILED, "out of memory");
    for (int i = 0; i < ctl->n_arguments; i++)
        (void)fprintf(stream, "%s%s", i ? " " : "", ctl->arguments[i]);
    if (ctl->n_arguments && file_length)
        (void)fputc('\n', stream);
    (void)fwrite(file_text, 1, file_length, stream);
    return fclose(stream) ? ctl_fail(CTL_EXIT_FAILED, "out of memory") : CTL_EXIT_DONE;
}

int ctl_read_prompt(Ctl *ctl, char **ret_text, size_t *ret_length)
{
    _cleanup_(freep) char *file_text = NULL;
    size_t file_length = 0;
    const char *path = ctl->file;
    int r;

    if (!path && !ctl->n_arguments) {
        if (isatty(STDIN_FILENO))
            return ctl_fail(CTL_EXIT_USAGE, "nothing to ask: give the prompt as arguments, with --file, or on standard input");
        path = "-";
    }
    if (path) {
        r = ctl_read_file(path, &file_text, &file_length);
        if (r)
            return r;
    }
    return ctl_join_prompt(ctl, file_text ? file_text : "", file_length, ret_text, ret_length);
}

int ctl_text_fd(const char *text, size_t length, int *ret_fd)
{
    _cleanup_(close_fdp) int fd = memfd_create("leat-prompt", MFD_CLOEXEC);
    size_t done = 0;

    while (fd >= 0 && done < length) {
        ssize_t n = write(fd, text + done, length - done);

        if (n < 0 && errno != EINTR)
            break;
        done += n > 0 ? (size_t)n : 0;
    }
    if (fd < 0 || done < length || lseek(fd, 0, SEEK_SET) < 0)
        return ctl_fail(CTL_EXIT_FAILED, "the prompt cannot be passed on: %s", strerror(errno));
    *ret_fd = TAKE_FD(fd);
    return CTL_EXIT_DONE;
}
