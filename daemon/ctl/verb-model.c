/* SPDX-License-Identifier: Apache-2.0 */
/* load, unload, tokenize, estimate, eval: verbs of one model. */

#include "daemon/ctl/ctl.h"

#include <fcntl.h>
#include <string.h>

/* The model may also be the verb's argument: leat load NAME. */
static int ctl_connect_model(Ctl *ctl, bool argument, char **ret_path)
{
    int r = ctl_connect(ctl);

    if (argument && !ctl->model && ctl->n_arguments == 1)
        ctl->model = ctl->arguments[0];
    else if (argument && ctl->n_arguments)
        return ctl_fail(CTL_EXIT_USAGE, "one model at a time");
    return r ? r : ctl_model_path(ctl, ret_path);
}

/* Calls a method that returns a job, and waits for it. */
static int ctl_call_job(Ctl *ctl, sd_bus_message *call, int appended, json_t **ret_usage)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
    const char *job = NULL;
    int r = ctl_watch_jobs(ctl);

    if (!r)
        r = ctl_call(ctl, call, appended, &reply);
    if (r)
        return r;
    if (sd_bus_message_read(reply, "o", &job) < 0)
        return ctl_fail(CTL_EXIT_FAILED, "the reply cannot be read");
    return ctl_wait_job(ctl, job, ret_usage);
}

int ctl_verb_load(Ctl *ctl)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL;
    _cleanup_(freep) char *path = NULL;
    int r = ctl_connect_model(ctl, true, &path);

    if (!r)
        r = ctl_new_call(ctl, path, CTL_MODEL, "Load", &call);
    return r ? r : ctl_call_job(ctl, call, sd_bus_message_append(call, "a{sv}", 0), NULL);
}

int ctl_verb_unload(Ctl *ctl)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    _cleanup_(freep) char *path = NULL;
    int r = ctl_connect_model(ctl, true, &path);

    if (!r)
        r = ctl_new_call(ctl, path, CTL_MODEL, "Unload", &call);
    return r ? r : ctl_call(ctl, call, sd_bus_message_append(call, "a{sv}", 0), &reply);
}

int ctl_verb_tokenize(Ctl *ctl)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    _cleanup_(freep) char *path = NULL, *text = NULL;
    size_t length, index;
    json_t *ids, *id;
    int r = ctl_read_prompt(ctl, &text, &length), appended;

    if (!r && strlen(text) != length)
        r = ctl_fail(CTL_EXIT_USAGE, "the text holds a NUL character");
    if (!r)
        r = ctl_connect_model(ctl, false, &path);
    if (!r)
        r = ctl_new_call(ctl, path, CTL_MODEL, "Tokenize", &call);
    if (r)
        return r;
    appended = sd_bus_message_append(call, "s", text);
    if (appended >= 0)
        appended = ctl->special ? sd_bus_message_append(call, "a{sv}", 1, "parse-special", "b", 1)
                                : sd_bus_message_append(call, "a{sv}", 0);
    r = ctl_call(ctl, call, appended, &reply);
    if (r)
        return r;
    ids = ctl_message_read(reply);
    if (ctl->json) {
        json_t *result = json_pack("{s:o}", "ids", ids);

        ctl_print_json(result);
        json_decref(result);
        return CTL_EXIT_DONE;
    }
    json_array_foreach(ids, index, id)
        (void)printf("%s%lld", index ? " " : "", (long long)json_integer_value(id));
    (void)putchar('\n');
    json_decref(ids);
    return CTL_EXIT_DONE;
}

static int append_estimate_options(Ctl *ctl, sd_bus_message *call)
{
    int r = sd_bus_message_open_container(call, 'a', "{sv}");

    if (r >= 0)
        r = ctl_append_cache(ctl, call);
    if (r >= 0 && ctl->has_depth)
        r = sd_bus_message_append(call, "{sv}", "depth", "u", ctl->depth);
    return r < 0 ? r : sd_bus_message_close_container(call);
}

/* Every choice of bits, what it costs and adds. */
static void print_bits(const json_t *bits)
{
    const char *choice = json_string_value(json_object_get(bits, "choice"));
    json_t *candidates = json_object_get(bits, "candidates"), *row;
    size_t index;

    if (!json_is_object(bits))
        return;
    (void)printf("\nbits of keys and values: %s; budget: a mean KLD of %g over an f16 cache\n", choice ? choice : "unknown",
                 json_number_value(json_object_get(bits, "kld-budget")));
    (void)printf("    K  V  bits/value  added KLD\n");
    json_array_foreach(candidates, index, row) {
        const char *state = json_string_value(json_object_get(row, "state"));

        (void)printf("%s  %lld  %lld  %10.2f  ", json_is_true(json_object_get(row, "used")) ? " *" : "  ",
                     (long long)json_integer_value(json_object_get(row, "k")), (long long)json_integer_value(json_object_get(row, "v")),
                     json_number_value(json_object_get(row, "true-bits")));
        if (state)
            (void)printf("%s\n", state);
        else
            (void)printf("%.5f\n", json_number_value(json_object_get(row, "kld")));
    }
}

int ctl_verb_estimate(Ctl *ctl)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    _cleanup_(freep) char *path = NULL;
    json_t *estimate;
    int r = ctl_connect_model(ctl, true, &path);

    if (!r)
        r = ctl_new_call(ctl, path, CTL_MODEL, "Estimate", &call);
    if (!r)
        r = ctl_call(ctl, call, append_estimate_options(ctl, call), &reply);
    if (r)
        return r;
    estimate = ctl_message_read(reply);
    if (ctl->json) {
        ctl_print_json(estimate);
    } else {
        json_t *bits = json_incref(json_object_get(estimate, "bits"));

        (void)json_object_del(estimate, "bits");
        ctl_print_facts(stdout, estimate, "");
        print_bits(bits);
        json_decref(bits);
    }
    json_decref(estimate);
    return CTL_EXIT_DONE;
}

int ctl_verb_eval(Ctl *ctl)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL;
    _cleanup_(close_fdp) int ids_fd = -1, npy_fd = -1;
    _cleanup_(freep) char *path = NULL;
    json_t *usage = NULL;
    int r = CTL_EXIT_DONE, appended;

    if (!ctl->ids_file || !ctl->npy)
        return ctl_fail(CTL_EXIT_USAGE, "eval needs --ids FILE (token ids, as text) and --npy OUT");
    ids_fd = open(ctl->ids_file, O_RDONLY | O_CLOEXEC);
    if (ids_fd < 0)
        return ctl_fail(CTL_EXIT_USAGE, "%s: %s", ctl->ids_file, strerror(errno));
    npy_fd = open(ctl->npy, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (npy_fd < 0)
        return ctl_fail(CTL_EXIT_USAGE, "%s: %s", ctl->npy, strerror(errno));
    r = ctl_connect_model(ctl, true, &path);
    if (!r)
        r = ctl_new_call(ctl, path, CTL_MODEL, "Evaluate", &call);
    if (r)
        return r;
    appended = sd_bus_message_append(call, "hh", ids_fd, npy_fd);
    if (appended >= 0)
        appended = ctl_append_cache_options(ctl, call);
    r = ctl_call_job(ctl, call, appended, &usage);
    if (!r && ctl->json)
        ctl_print_json(usage);
    else if (!r && ctl->stats)
        ctl_print_facts(stderr, usage, "  ");
    json_decref(usage);
    return r;
}
