/* SPDX-License-Identifier: Apache-2.0 */
/* JSON to a{sv}. */

#include "daemon/bus/json-message.h"
#include "daemon/bus/bus-text.h"

#include <jansson.h>
#include <stdint.h>

/* Facts are shallow; deeper is a mistake of ours, not a reason to overflow the stack. */
#define JSON_MESSAGE_MAX_DEPTH 8

static int json_append_value(sd_bus_message *m, json_t *value, unsigned depth);

static int json_append_object(sd_bus_message *m, json_t *object, unsigned depth)
{
    const char *key;
    json_t *value;
    int r;

    if (depth > JSON_MESSAGE_MAX_DEPTH)
        return error_origin(-EBADMSG);
    if ((r = sd_bus_message_open_container(m, 'a', "{sv}")) < 0)
        return error_trace(r);
    json_object_foreach(object, key, value) {
        if (json_is_null(value))
            continue;
        if ((r = sd_bus_message_open_container(m, 'e', "sv")) < 0 || (r = bus_text_append(m, key)) < 0 ||
            (r = json_append_value(m, value, depth)) < 0 || (r = sd_bus_message_close_container(m)) < 0)
            return error_trace(r);
    }
    return sd_bus_message_close_container(m);
}

static int json_append_array(sd_bus_message *m, json_t *array, unsigned depth)
{
    json_t *value;
    size_t i;
    int r;

    if (depth > JSON_MESSAGE_MAX_DEPTH)
        return error_origin(-EBADMSG);
    if ((r = sd_bus_message_open_container(m, 'a', "v")) < 0)
        return error_trace(r);
    json_array_foreach(array, i, value) {
        if (!json_is_null(value) && (r = json_append_value(m, value, depth)) < 0)
            return error_trace(r);
    }
    return sd_bus_message_close_container(m);
}

/* One variant. */
static int json_append_value(sd_bus_message *m, json_t *value, unsigned depth)
{
    int r;

    switch (json_typeof(value)) {
    case JSON_INTEGER:
        return json_integer_value(value) >= 0 ? sd_bus_message_append(m, "v", "t", (uint64_t)json_integer_value(value))
                                              : sd_bus_message_append(m, "v", "x", (int64_t)json_integer_value(value));
    case JSON_REAL:
        return sd_bus_message_append(m, "v", "d", json_real_value(value));
    case JSON_STRING:
        if ((r = sd_bus_message_open_container(m, 'v', "s")) < 0 || (r = bus_text_append(m, json_string_value(value))) < 0)
            return error_trace(r);
        return sd_bus_message_close_container(m);
    case JSON_TRUE:
    case JSON_FALSE:
        return sd_bus_message_append(m, "v", "b", (int)json_is_true(value));
    case JSON_OBJECT:
        r = sd_bus_message_open_container(m, 'v', "a{sv}");
        if (r >= 0)
            r = json_append_object(m, value, depth + 1);
        return r < 0 ? r : sd_bus_message_close_container(m);
    case JSON_ARRAY:
        r = sd_bus_message_open_container(m, 'v', "av");
        if (r >= 0)
            r = json_append_array(m, value, depth + 1);
        return r < 0 ? r : sd_bus_message_close_container(m);
    case JSON_NULL:
        break;
    }
    return error_origin(-EBADMSG);
}

int json_message_append(sd_bus_message *m, const char *json)
{
    _cleanup_(json_decrefp) json_t *object = json && json[0] ? json_loads(json, 0, NULL) : json_object();

    if (!json_is_object(object))
        return error_origin(-EBADMSG);
    return json_append_object(m, object, 0);
}

int json_message_integer(const char *json, const char *key, uint64_t *ret)
{
    _cleanup_(json_decrefp) json_t *object = json ? json_loads(json, 0, NULL) : NULL;
    json_t *value = json_object_get(object, key);

    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return error_origin(-EBADMSG);
    *ret = (uint64_t)json_integer_value(value);
    return 0;
}
