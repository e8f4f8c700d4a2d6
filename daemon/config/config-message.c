/* SPDX-License-Identifier: Apache-2.0 */
/* Messages with their place, and the nearest known word. */

#include "daemon/config/config-message.h"

#include <stdarg.h>
#include <string.h>

int config_message_add(ConfigMessages *messages, const char *file, uint32_t line, uint32_t column, ConfigSeverity severity,
                       const char *format, ...)
{
    ConfigMessage message = {.line = line, .column = column, .severity = severity};
    va_list args;
    int n;

    if (messages->n == messages->capacity) {
        size_t capacity = messages->capacity ? 2 * messages->capacity : 8;
        ConfigMessage *grown = reallocarray(messages->messages, capacity, sizeof(*grown));

        if (!grown)
            return error_origin(-ENOMEM);
        messages->messages = grown;
        messages->capacity = capacity;
    }
    va_start(args, format);
    n = vasprintf(&message.text, format, args);
    va_end(args);
    if (n < 0)
        return error_origin(-ENOMEM);
    message.file = strdup(file);
    if (!message.file) {
        free(message.text);
        return error_origin(-ENOMEM);
    }
    for (char *c = message.text; *c; c++)
        if ((unsigned char)*c < 0x20)
            *c = ' ';
    messages->messages[messages->n++] = message;
    return severity == CONFIG_ERROR ? -EINVAL : 0;
}

void config_messages_clear(ConfigMessages *messages)
{
    for (size_t i = 0; i < messages->n; i++) {
        free(messages->messages[i].file);
        free(messages->messages[i].text);
    }
    free(messages->messages);
    *messages = CONFIG_MESSAGES_NULL;
}

bool config_messages_have_error(const ConfigMessages *messages)
{
    for (size_t i = 0; i < messages->n; i++)
        if (messages->messages[i].severity == CONFIG_ERROR)
            return true;
    return false;
}

#define NEAREST_MAX_LENGTH 63

/* Damerau-Levenshtein distance (adjacent transpositions count one), three rows at a time. */
static size_t config_distance(const char *a, const char *b)
{
    size_t rows[3][NEAREST_MAX_LENGTH + 2], *before = rows[0], *last = rows[1], *now = rows[2];
    size_t n_a = strlen(a), n_b = strlen(b);

    if (n_a > NEAREST_MAX_LENGTH || n_b > NEAREST_MAX_LENGTH)
        return SIZE_MAX;
    for (size_t j = 0; j <= n_b; j++)
        before[j] = last[j] = j;
    for (size_t i = 1; i <= n_a; i++) {
        size_t *spare;

        now[0] = i;
        for (size_t j = 1; j <= n_b; j++) {
            now[j] = MIN(MIN(last[j] + 1, now[j - 1] + 1), last[j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                now[j] = MIN(now[j], before[j - 2] + 1);
        }
        spare = before;
        before = last;
        last = now;
        now = spare;
    }
    return last[n_b];
}

const char *config_nearest(const char *key, const char *const *known, size_t n_known)
{
    size_t best = SIZE_MAX, limit = MAX((size_t)2, strlen(key) / 3);
    const char *nearest = NULL;

    for (size_t i = 0; i < n_known; i++) {
        size_t distance = config_distance(key, known[i]);

        if (distance < best && distance <= limit && distance < strlen(known[i])) {
            best = distance;
            nearest = known[i];
        }
    }
    return nearest;
}
