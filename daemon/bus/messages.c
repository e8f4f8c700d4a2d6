/* SPDX-License-Identifier: Apache-2.0 */
/* Messages of a conversation. */

#include "daemon/bus/messages.h"
#include "daemon/bus/bus-error.h"

#include <string.h>

/* Far beyond a context's worth of turns. */
#define MESSAGES_MAX 65536

void messages_clear(Messages *messages)
{
    for (size_t i = 0; i < messages->n; i++) {
        free((void *)(uintptr_t)messages->messages[i].role);
        free((void *)(uintptr_t)messages->messages[i].content);
    }
    free(messages->messages);
    *messages = MESSAGES_NULL;
}

int messages_add(Messages *messages, const char *role, const char *content)
{
    _cleanup_(freep) char *own_role = strdup(role), *own_content = strdup(content);

    if (!own_role || !own_content)
        return error_origin(-ENOMEM);
    if (messages->n == messages->capacity) {
        size_t capacity = messages->capacity ? messages->capacity * 2 : 4;
        EngineMessage *grown = reallocarray(messages->messages, capacity, sizeof(*grown));

        if (!grown)
            return error_origin(-ENOMEM);
        messages->messages = grown;
        messages->capacity = capacity;
    }
    messages->n_bytes += strlen(role) + strlen(content) + sizeof(EngineMessage);
    messages->messages[messages->n++] = (EngineMessage){TAKE_PTR(own_role), TAKE_PTR(own_content)};
    return 0;
}

/* One {sv} of message @index, entered. */
static int messages_read_entry(sd_bus_message *m, size_t index, const char **role, const char **content, sd_bus_error *error)
{
    const char *key, *contents, **place;
    int r = sd_bus_message_read_basic(m, 's', &key);

    if (r < 0 || (r = sd_bus_message_peek_type(m, NULL, &contents)) < 0)
        return error_trace(r);
    if (strcmp(key, "role") == 0)
        place = role;
    else if (strcmp(key, "content") == 0)
        place = content;
    else
        return bus_error_invalid(error, "message %zu: unknown key \"%.64s\", expected role and content", index, key);
    if (strcmp(contents, "s") != 0)
        return bus_error_invalid(error, "message %zu: %s has type %.32s, expected s", index, key, contents);
    if (*place)
        return bus_error_invalid(error, "message %zu: %s is given twice", index, key);
    return sd_bus_message_read(m, "v", "s", place) < 0 ? error_origin(-EBADMSG) : 0;
}

/* One a{sv}, entered. */
static int messages_read_one(sd_bus_message *m, Messages *messages, sd_bus_error *error)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    const char *role = NULL, *content = NULL;
    int r;

    while ((r = sd_bus_message_enter_container(m, 'e', "sv")) > 0)
        if ((r = messages_read_entry(m, messages->n, &role, &content, error)) < 0 || (r = sd_bus_message_exit_container(m)) < 0)
            return error_trace(r);
    if (r < 0)
        return error_trace(r);
    if (!role || !content)
        return bus_error_invalid(error, "message %zu: no %s", messages->n, role ? "content" : "role");
    for (size_t i = 0; i < N_ELEMENTS(roles); i++)
        if (strcmp(role, roles[i]) == 0)
            return messages_add(messages, role, content);
    return bus_error_invalid(error, "message %zu: role \"%.64s\" is none of: system, user, assistant, tool", messages->n, role);
}

int messages_read(sd_bus_message *m, Messages *ret, sd_bus_error *error)
{
    Messages messages = MESSAGES_NULL;
    int r = sd_bus_message_enter_container(m, 'a', "a{sv}");

    while (r >= 0 && (r = sd_bus_message_enter_container(m, 'a', "{sv}")) > 0) {
        r = messages.n < MESSAGES_MAX ? messages_read_one(m, &messages, error)
                                      : bus_error_invalid(error, "more than %d messages", MESSAGES_MAX);
        if (r >= 0)
            r = sd_bus_message_exit_container(m);
    }
    if (r >= 0)
        r = sd_bus_message_exit_container(m);
    if (r < 0) {
        messages_clear(&messages);
        return error_trace(r);
    }
    *ret = messages;
    return 0;
}
