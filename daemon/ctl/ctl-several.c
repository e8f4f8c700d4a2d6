/* SPDX-License-Identifier: Apache-2.0 */
/* ask with several answers: beams, draws, prompts.  One call of Ask, which answers when all are done. */

#include "daemon/ctl/ctl.h"

#include <errno.h>
#include <string.h>

bool ctl_wants_several(const Ctl *ctl)
{
    return ctl->beams || ctl->n_return || ctl->early_stopping || ctl->length_penalty || ctl->prompts_file;
}

static int ctl_append_count(sd_bus_message *call, const char *key, const char *option, const char *text)
{
    unsigned long value;
    char *end;

    errno = 0;
    value = strtoul(text, &end, 10);
    if (errno || end == text || *end || text[0] == '-' || value > UINT32_MAX) {
        (void)ctl_fail(CTL_EXIT_USAGE, "--%s takes a number, not '%s'", option, text);
        return -EINVAL;
    }
    return sd_bus_message_append(call, "{sv}", key, "u", (uint32_t)value);
}

static int ctl_append_penalty(sd_bus_message *call, const char *text)
{
    char *end;
    double value = strtod(text, &end);

    if (end == text || *end) {
        (void)ctl_fail(CTL_EXIT_USAGE, "--length-penalty takes a number, not '%s'", text);
        return -EINVAL;
    }
    return sd_bus_message_append(call, "{sv}", "length-penalty", "d", value);
}

static int ctl_append_several(const Ctl *ctl, sd_bus_message *call)
{
    int r = 0;

    if (ctl->beams)
        r = ctl_append_count(call, "num-beams", "beams", ctl->beams);
    if (r >= 0 && ctl->n_return)
        r = ctl_append_count(call, "num-return-sequences", "return", ctl->n_return);
    if (r >= 0 && ctl->early_stopping)
        r = sd_bus_message_append(call, "{sv}", "early-stopping", "s", ctl->early_stopping);
    if (r >= 0 && ctl->length_penalty)
        r = ctl_append_penalty(call, ctl->length_penalty);
    return r;
}

/* The lines of @text (changed) that are not empty, as option prompts. */
static int ctl_append_lines(sd_bus_message *call, char *text)
{
    const char **lines = NULL;
    size_t n = 0;
    int r = 0;

    for (char *save = NULL, *line = strtok_r(text, "\n", &save); line && r >= 0; line = strtok_r(NULL, "\n", &save)) {
        const char **grown = reallocarray(lines, n + 1, sizeof(*grown));

        r = grown ? 0 : -ENOMEM;
        if (grown) {
            lines = grown;
            lines[n++] = line;
        }
    }
    if (r >= 0)
        r = ctl_append_strings(call, "prompts", lines, n);
    free(lines);
    return r;
}

static int ctl_read_several(Ctl *ctl, char **ret_text)
{
    size_t length;
    int r;

    if (ctl->system)
        return ctl_fail(CTL_EXIT_USAGE, "--instructions has no place in a call for several answers");
    r = ctl->prompts_file ? ctl_read_file(ctl->prompts_file, ret_text, &length) : ctl_read_prompt(ctl, ret_text, &length);
    if (!r && strlen(*ret_text) != length)
        r = ctl_fail(CTL_EXIT_USAGE, "the prompt holds a NUL character");
    return r;
}

/* The call, answered; what is wrong with an option has been said when the result is USAGE. */
static int ctl_call_ask(Ctl *ctl, char *text, sd_bus_message **ret_reply)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL;
    int r = ctl_new_call(ctl, CTL_ROOT, CTL_MANAGER, "Ask", &call), appended;

    if (r)
        return r;
    appended = sd_bus_message_append(call, "ss", ctl->model ? ctl->model : "", ctl->prompts_file ? "" : text);
    if (appended >= 0)
        appended = sd_bus_message_open_container(call, 'a', "{sv}");
    if (appended >= 0 && (appended = ctl_append_several(ctl, call)) == -EINVAL)
        return CTL_EXIT_USAGE;
    if (appended >= 0 && ctl->prompts_file)
        appended = ctl_append_lines(call, text);
    if (appended >= 0 && ctl->raw)
        appended = sd_bus_message_append(call, "{sv}", "raw", "b", 1);
    if (appended >= 0)
        appended = ctl_append_generation_options(ctl, call);
    if (appended >= 0)
        appended = ctl_append_cache(ctl, call);
    if (appended >= 0)
        appended = sd_bus_message_close_container(call);
    ctl->timeout_usec = UINT64_MAX; /* an answer takes what it takes; leaving the bus cancels it */
    return ctl_call(ctl, call, appended, ret_reply);
}

int ctl_ask_several(Ctl *ctl)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
    _cleanup_(freep) char *text = NULL;
    CtlAnswer answer = CTL_ANSWER_NULL;
    const char *best;
    int r = ctl_read_several(ctl, &text);

    if (!r)
        r = ctl_connect(ctl);
    if (!r)
        r = ctl_call_ask(ctl, text, &reply);
    if (r)
        return r;
    if (sd_bus_message_read(reply, "s", &best) < 0 || !(answer.usage = ctl_message_read(reply)))
        return ctl_fail(CTL_EXIT_FAILED, "Ask: the reply cannot be read");
    answer.sequences = json_incref(json_object_get(answer.usage, "sequences"));
    (void)json_object_del(answer.usage, "sequences");
    if (!answer.sequences) /* one answer of one prompt */
        answer.sequences = json_pack("[{s:i, s:s, s:O*}]", "prompt", 0, "text", best, "ids", json_object_get(answer.usage, "ids"));
    r = ctl_answer_print(ctl, &answer, false);
    ctl_answer_clear(&answer);
    return r;
}

static void ctl_print_ids(const json_t *ids)
{
    size_t index;
    json_t *id;

    json_array_foreach(ids, index, id)
        (void)printf("%s%lld", index ? " " : "", (long long)json_integer_value(id));
    (void)putchar('\n');
}

/* A line of facts before each answer, unless --no-legend. */
void ctl_print_sequences(const Ctl *ctl, const json_t *sequences)
{
    const json_t *sequence;
    json_int_t last = -1;
    size_t index;
    int n = 0;

    json_array_foreach(sequences, index, sequence) {
        json_int_t prompt = json_integer_value(json_object_get(sequence, "prompt"));
        const char *text = json_string_value(json_object_get(sequence, "text"));
        size_t length = text ? strlen(text) : 0;

        n = prompt == last ? n + 1 : 1;
        last = prompt;
        if (!ctl->no_legend)
            (void)printf("%s-- prompt %lld, answer %d, score %.4f\n", index ? "\n" : "", (long long)prompt + 1, n,
                         json_number_value(json_object_get(sequence, "score")));
        if (ctl->ids)
            ctl_print_ids(json_object_get(sequence, "ids"));
        else
            (void)printf("%s%s", text ? text : "", length && text[length - 1] == '\n' ? "" : "\n");
    }
}
