/* SPDX-License-Identifier: Apache-2.0 */
/* ask: one question. */

#include "daemon/ctl/ctl.h"
#include "daemon/text/utf8.h"

#include <fcntl.h>
#include <string.h>

int ctl_open_session(Ctl *ctl, char **ret_path)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    const char *path = NULL;
    int r = ctl_new_call(ctl, CTL_ROOT, CTL_MANAGER, "OpenSession", &call), appended;

    if (r)
        return r;
    appended = sd_bus_message_append(call, "s", ctl->model ? ctl->model : "");
    if (appended >= 0)
        appended = ctl_append_cache_options(ctl, call);
    r = ctl_call(ctl, call, appended, &reply);
    if (r)
        return r;
    if (sd_bus_message_read(reply, "o", &path) < 0 || !(*ret_path = strdup(path)))
        return ctl_fail(CTL_EXIT_FAILED, "OpenSession: the reply cannot be read");
    return CTL_EXIT_DONE;
}

/* What a model has said may hold what the bus does not take: it goes back as it would have come over the bus. */
static int ctl_append_message(sd_bus_message *call, const char *role, const char *content)
{
    _cleanup_(freep) char *text = utf8_clean_copy(content, strlen(content));

    return text ? sd_bus_message_append(call, "a{sv}", 2, "role", "s", role, "content", "s", text) : -ENOMEM;
}

/* aa{sv}: the conversation so far, from a list of {"role", "content"}. */
static int ctl_append_messages(sd_bus_message *call, const json_t *messages)
{
    int r = sd_bus_message_open_container(call, 'a', "a{sv}");
    size_t index;
    json_t *message;

    json_array_foreach(messages, index, message)
        if (r >= 0)
            r = ctl_append_message(call, json_string_value(json_object_get(message, "role")),
                                   json_string_value(json_object_get(message, "content")));
    return r < 0 ? r : sd_bus_message_close_container(call);
}

int ctl_generate(Ctl *ctl, const char *session, const json_t *messages, int prompt_fd, char **ret_job, int *ret_fd)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    const char *job = NULL;
    int r = ctl_new_call(ctl, session, CTL_SESSION, "Generate", &call), appended, fd = -1;

    if (r)
        return r;
    appended = ctl_append_messages(call, messages);
    if (appended >= 0)
        appended = sd_bus_message_open_container(call, 'a', "{sv}");
    if (appended >= 0 && prompt_fd >= 0)
        appended = sd_bus_message_append(call, "{sv}", "prompt-fd", "h", prompt_fd);
    if (appended >= 0 && ctl->raw)
        appended = sd_bus_message_append(call, "{sv}", "raw", "b", 1);
    if (appended >= 0)
        appended = ctl_append_generation_options(ctl, call);
    if (appended >= 0)
        appended = sd_bus_message_close_container(call);
    r = ctl_call(ctl, call, appended, &reply);
    if (r)
        return r;
    if (sd_bus_message_read(reply, "oh", &job, &fd) < 0 || (*ret_fd = fcntl(fd, F_DUPFD_CLOEXEC, 3)) < 0 || !(*ret_job = strdup(job)))
        return ctl_fail(CTL_EXIT_FAILED, "Generate: the reply cannot be read");
    return CTL_EXIT_DONE;
}

int ctl_add_instructions(const Ctl *ctl, json_t *messages)
{
    if (json_array_append_new(messages, json_pack("{s:s,s:s}", "role", "system", "content", ctl->system)) < 0)
        return ctl_fail(CTL_EXIT_USAGE, "--instructions: the text is not valid UTF-8");
    return CTL_EXIT_DONE;
}

int ctl_verb_ask(Ctl *ctl)
{
    _cleanup_(freep) char *prompt = NULL, *session = NULL, *job = NULL;
    _cleanup_(close_fdp) int prompt_fd = -1, stream_fd = -1;
    CtlAnswer answer = CTL_ANSWER_NULL;
    json_t *messages = json_array();
    bool live = !ctl->json && !ctl->ids;
    size_t length;
    int r;

    if (ctl_wants_several(ctl)) {
        json_decref(messages);
        return ctl_ask_several(ctl);
    }
    r = ctl_read_prompt(ctl, &prompt, &length);
    if (ctl->system && ctl->raw && !r)
        r = ctl_fail(CTL_EXIT_USAGE, "--instructions has no meaning with --raw, which applies no template");
    if (!r && ctl->system)
        r = ctl_add_instructions(ctl, messages);
    if (!r)
        r = ctl_text_fd(prompt, length, &prompt_fd);
    if (!r)
        r = ctl_connect(ctl);
    if (!r)
        r = ctl_open_session(ctl, &session);
    if (!r)
        r = ctl_generate(ctl, session, messages, prompt_fd, &job, &stream_fd);
    if (!r)
        r = ctl_stream_read(ctl, stream_fd, job, live ? stdout : NULL, &answer);
    if (!r)
        r = ctl_answer_print(ctl, &answer, live);
    ctl_answer_clear(&answer);
    json_decref(messages);
    return r;
}
