/* SPDX-License-Identifier: Apache-2.0 */
/* Bus values as JSON, and JSON for people. */

#include "daemon/ctl/ctl.h"

#include <string.h>

static json_t *ctl_read_basic(sd_bus_message *message, char type)
{
    union {
        uint8_t u8;
        int b;
        int16_t i16;
        uint16_t u16;
        int32_t i32;
        uint32_t u32;
        int64_t i64;
        uint64_t u64;
        double d;
        const char *s;
    } value;

    if (sd_bus_message_read_basic(message, type, &value) <= 0)
        return NULL;
    switch (type) {
    case 'y':
        return json_integer(value.u8);
    case 'b':
        return json_boolean(value.b);
    case 'n':
        return json_integer(value.i16);
    case 'q':
        return json_integer(value.u16);
    case 'i':
        return json_integer(value.i32);
    case 'u':
        return json_integer(value.u32);
    case 'x':
        return json_integer(value.i64);
    case 't':
        return json_integer((json_int_t)value.u64);
    case 'd':
        return json_real(value.d);
    case 's':
    case 'o':
    case 'g':
        return json_string(value.s);
    default: /* a descriptor, or a type of later versions */
        return json_null();
    }
}

/* Dictionaries with string keys become objects; other arrays and structs become lists. */
static json_t *ctl_read_container(sd_bus_message *message, char type, const char *contents)
{
    bool dictionary = type == 'a' && contents[0] == '{' && strchr("sog", contents[1]);
    json_t *result, *value;

    if (sd_bus_message_enter_container(message, type, contents) < 0)
        return NULL;
    result = dictionary ? json_object() : json_array();
    if (dictionary) {
        while (sd_bus_message_enter_container(message, 'e', NULL) > 0) {
            const char *key = NULL;

            if (sd_bus_message_read_basic(message, contents[1], &key) > 0 && (value = ctl_message_read(message)))
                (void)json_object_set_new(result, key, value);
            (void)sd_bus_message_exit_container(message);
        }
    } else {
        while ((value = ctl_message_read(message)))
            (void)json_array_append_new(result, value);
    }
    (void)sd_bus_message_exit_container(message);
    return result;
}

json_t *ctl_message_read(sd_bus_message *message)
{
    const char *contents = NULL;
    json_t *value;
    char type;

    if (sd_bus_message_peek_type(message, &type, &contents) <= 0)
        return NULL;
    if (type != 'v')
        return contents ? ctl_read_container(message, type, contents) : ctl_read_basic(message, type);
    if (sd_bus_message_enter_container(message, 'v', contents) < 0)
        return NULL;
    value = ctl_message_read(message);
    (void)sd_bus_message_exit_container(message);
    return value;
}

void ctl_print_json(const json_t *value)
{
    (void)json_dumpf(value, stdout, JSON_INDENT(2) | JSON_ENCODE_ANY);
    (void)putchar('\n');
}

void ctl_format_bytes(uint64_t bytes, char ret[static 32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t unit = 0;

    while (value >= 1024 && unit + 1 < N_ELEMENTS(units)) {
        value /= 1024;
        unit++;
    }
    (void)snprintf(ret, 32, "%.*f %s", unit ? 1 : 0, value, units[unit]);
}

static bool ctl_key_ends_with(const char *key, const char *ending)
{
    size_t n = strlen(key), m = strlen(ending);

    return n >= m && !strcasecmp(key + n - m, ending);
}

/* The daemon's names carry their unit: -bytes, -usec, -rate, -share. */
static void ctl_print_fact(FILE *file, const char *key, const json_t *value)
{
    char text[32];

    if (json_is_integer(value) &&
        (ctl_key_ends_with(key, "bytes") || ctl_key_ends_with(key, "FileSize") || strstr(key, "Memory"))) {
        ctl_format_bytes((uint64_t)json_integer_value(value), text);
        (void)fprintf(file, "%s\n", text);
    } else if (json_is_integer(value) && ctl_key_ends_with(key, "usec")) {
        (void)fprintf(file, "%.3f s\n", (double)json_integer_value(value) * 1e-6);
    } else if (json_is_real(value) && ctl_key_ends_with(key, "rate")) {
        (void)fprintf(file, "%.1f tokens/s\n", json_real_value(value));
    } else if (json_is_real(value) && ctl_key_ends_with(key, "share")) {
        (void)fprintf(file, "%.0f %%\n", 100 * json_real_value(value));
    } else if (json_is_string(value)) {
        (void)fprintf(file, "%s\n", json_string_value(value));
    } else {
        (void)json_dumpf(value, file, JSON_ENCODE_ANY | JSON_COMPACT);
        (void)fputc('\n', file);
    }
}

void ctl_print_facts(FILE *file, const json_t *object, const char *indent)
{
    json_t *facts = (json_t *)(uintptr_t)object, *value;
    const char *key;
    int width = 0;

    json_object_foreach(facts, key, value)
        width = MAX(width, (int)strlen(key));
    json_object_foreach(facts, key, value) {
        if (json_is_object(value)) {
            char deeper[32];

            (void)snprintf(deeper, sizeof(deeper), "%.20s  ", indent);
            (void)fprintf(file, "%s%s\n", indent, key);
            ctl_print_facts(file, value, deeper);
            continue;
        }
        (void)fprintf(file, "%s%-*s  ", indent, width, key);
        ctl_print_fact(file, key, value);
    }
}
