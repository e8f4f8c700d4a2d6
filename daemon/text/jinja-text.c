/* SPDX-License-Identifier: Apache-2.0 */
/* Values as text: as Python prints them, and as JSON. */

#include "daemon/text/jinja.h"
#include "daemon/text/utf8.h"

#include <math.h>
#include <string.h>

static int add_trusted(Jinja *jinja, JinjaBuffer *buffer, const char *text)
{
    return jinja_buffer_add_text(jinja, buffer, text, strlen(text), true);
}

/* The shortest decimal that reads back as the same double, with a point or an exponent, as Python writes it. */
static int print_float(Jinja *jinja, double real, JinjaBuffer *buffer, bool json)
{
    char text[40];
    int exponent;

    if (isnan(real))
        return add_trusted(jinja, buffer, json ? "NaN" : "nan");
    if (isinf(real))
        return add_trusted(jinja, buffer, json ? (real < 0 ? "-Infinity" : "Infinity") : (real < 0 ? "-inf" : "inf"));
    for (int digits = 1; digits <= 17; digits++) {
        (void)snprintf(text, sizeof(text), "%.*e", digits - 1, real);
        if (strtod(text, NULL) != real)
            continue;
        exponent = atoi(strchr(text, 'e') + 1);
        if (exponent >= -4 && exponent < 16)
            (void)snprintf(text, sizeof(text), "%.*f", MAX(digits - 1 - exponent, 1), real);
        break;
    }
    return add_trusted(jinja, buffer, text);
}

/* What both forms write alike; digits cannot carry a message's text, so they count as the template's. */
static int print_number(Jinja *jinja, const JinjaValue *value, JinjaBuffer *buffer)
{
    char text[32];

    (void)snprintf(text, sizeof(text), "%lld", (long long)value->integer);
    return add_trusted(jinja, buffer, text);
}

/* Python's repr() of a string, for strings inside printed lists and mappings. */
static int print_repr(Jinja *jinja, const JinjaString *string, JinjaBuffer *buffer)
{
    bool quote_double = memchr(string->data, '\'', string->n) && !memchr(string->data, '"', string->n);
    const char *quote = quote_double ? "\"" : "'";

    JINJA_TRY(add_trusted(jinja, buffer, quote));
    for (size_t i = 0; i < string->n; i++) {
        unsigned char c = (unsigned char)string->data[i];
        JinjaString slice = jinja_string_slice(string, i, 1);
        char text[8];

        if (c == '\n' || c == '\t' || c == '\r')
            (void)snprintf(text, sizeof(text), "\\%c", c == '\n' ? 'n' : c == '\t' ? 't' : 'r');
        else if (c == '\\' || c == (unsigned char)*quote)
            (void)snprintf(text, sizeof(text), "\\%c", c);
        else if (c < 0x20 || c == 0x7f)
            (void)snprintf(text, sizeof(text), "\\x%02x", c);
        else {
            JINJA_TRY(jinja_buffer_add(jinja, buffer, &slice));
            continue;
        }
        JINJA_TRY(jinja_buffer_add_text(jinja, buffer, text, strlen(text), false));
    }
    return add_trusted(jinja, buffer, quote);
}

static int print_nested(Jinja *jinja, const JinjaValue *value, JinjaBuffer *buffer);

static int print_element(Jinja *jinja, const JinjaValue *value, JinjaBuffer *buffer)
{
    return value->type == JINJA_STRING ? print_repr(jinja, value->string, buffer) : print_nested(jinja, value, buffer);
}

static int print_sequence(Jinja *jinja, const JinjaValue *value, JinjaBuffer *buffer)
{
    bool tuple = value->type == JINJA_TUPLE;

    JINJA_TRY(add_trusted(jinja, buffer, tuple ? "(" : "["));
    for (size_t i = 0; i < value->list->n; i++) {
        if (i)
            JINJA_TRY(add_trusted(jinja, buffer, ", "));
        JINJA_TRY(print_element(jinja, &value->list->items[i], buffer));
    }
    return add_trusted(jinja, buffer, tuple ? (value->list->n == 1 ? ",)" : ")") : "]");
}

static int print_dict(Jinja *jinja, const JinjaDict *dict, JinjaBuffer *buffer)
{
    JINJA_TRY(add_trusted(jinja, buffer, "{"));
    for (size_t i = 0; i < dict->keys.n; i++) {
        if (i)
            JINJA_TRY(add_trusted(jinja, buffer, ", "));
        JINJA_TRY(print_element(jinja, &dict->keys.items[i], buffer));
        JINJA_TRY(add_trusted(jinja, buffer, ": "));
        JINJA_TRY(print_element(jinja, &dict->values.items[i], buffer));
    }
    return add_trusted(jinja, buffer, "}");
}

static int print_nested(Jinja *jinja, const JinjaValue *value, JinjaBuffer *buffer)
{
    JINJA_TRY(jinja_charge(jinja, 1));
    switch (value->type) {
    case JINJA_UNDEFINED:
        return 0;
    case JINJA_NONE:
        return add_trusted(jinja, buffer, "None");
    case JINJA_BOOL:
        return add_trusted(jinja, buffer, value->boolean ? "True" : "False");
    case JINJA_INT:
        return print_number(jinja, value, buffer);
    case JINJA_FLOAT:
        return print_float(jinja, value->real, buffer, false);
    case JINJA_STRING:
        return jinja_buffer_add(jinja, buffer, value->string);
    case JINJA_LIST:
    case JINJA_TUPLE:
        return print_sequence(jinja, value, buffer);
    case JINJA_DICT:
        return print_dict(jinja, value->dict, buffer);
    case JINJA_NAMESPACE:
    case JINJA_LOOP:
    case JINJA_MACRO:
    case JINJA_FUNCTION:
        break;
    }
    return jinja_fail(jinja, "%s cannot be printed", jinja_type_name(value));
}

int jinja_print(Jinja *jinja, const JinjaValue *value, JinjaBuffer *buffer)
{
    return print_nested(jinja, value, buffer);
}

int jinja_to_string(Jinja *jinja, const JinjaValue *value, const JinjaString **ret)
{
    JinjaBuffer buffer = {0};
    JinjaValue text;

    if (value->type == JINJA_STRING) {
        *ret = value->string;
        return 0;
    }
    JINJA_TRY(jinja_print(jinja, value, &buffer));
    JINJA_TRY(jinja_buffer_value(jinja, &buffer, &text));
    *ret = text.string;
    return 0;
}

/* ---- JSON, as json.dumps(ensure_ascii=False) -------------------------------------------------------------------------------------- */

static int json_string(Jinja *jinja, const JinjaString *string, JinjaBuffer *buffer)
{
    static const char escaped[] = "\"\\\n\r\t\b\f", letters[] = "\"\\nrtbf";

    JINJA_TRY(add_trusted(jinja, buffer, "\""));
    for (size_t i = 0; i < string->n; i++) {
        unsigned char c = (unsigned char)string->data[i];
        JinjaString slice = jinja_string_slice(string, i, 1);
        const char *found = c ? strchr(escaped, c) : NULL;
        char text[8];

        if (found)
            (void)snprintf(text, sizeof(text), "\\%c", letters[found - escaped]);
        else if (c < 0x20)
            (void)snprintf(text, sizeof(text), "\\u%04x", c);
        else {
            JINJA_TRY(jinja_buffer_add(jinja, buffer, &slice));
            continue;
        }
        JINJA_TRY(jinja_buffer_add_text(jinja, buffer, text, strlen(text), false));
    }
    return add_trusted(jinja, buffer, "\"");
}

/* Between elements: a blank, or a new line and the indentation. */
static int json_break(Jinja *jinja, int indent, int level, const char *flat, JinjaBuffer *buffer)
{
    if (indent < 0)
        return add_trusted(jinja, buffer, flat);
    JINJA_TRY(add_trusted(jinja, buffer, "\n"));
    for (int i = 0; i < indent * level; i++)
        JINJA_TRY(add_trusted(jinja, buffer, " "));
    return 0;
}

static int json_sequence(Jinja *jinja, const JinjaList *list, int indent, int level, JinjaBuffer *buffer)
{
    JINJA_TRY(add_trusted(jinja, buffer, "["));
    for (size_t i = 0; i < list->n; i++) {
        if (i)
            JINJA_TRY(add_trusted(jinja, buffer, ","));
        JINJA_TRY(json_break(jinja, indent, level + 1, i ? " " : "", buffer));
        JINJA_TRY(jinja_print_json(jinja, &list->items[i], indent, level + 1, buffer));
    }
    if (list->n)
        JINJA_TRY(json_break(jinja, indent, level, "", buffer));
    return add_trusted(jinja, buffer, "]");
}

static int json_dict(Jinja *jinja, const JinjaDict *dict, int indent, int level, JinjaBuffer *buffer)
{
    JINJA_TRY(add_trusted(jinja, buffer, "{"));
    for (size_t i = 0; i < dict->keys.n; i++) {
        const JinjaValue *key = &dict->keys.items[i];

        if (i)
            JINJA_TRY(add_trusted(jinja, buffer, ","));
        JINJA_TRY(json_break(jinja, indent, level + 1, i ? " " : "", buffer));
        if (key->type == JINJA_STRING)
            JINJA_TRY(json_string(jinja, key->string, buffer));
        else if (key->type == JINJA_TUPLE)
            return jinja_fail(jinja, "tojson: keys must be strings");
        else {
            JINJA_TRY(add_trusted(jinja, buffer, "\""));
            JINJA_TRY(jinja_print_json(jinja, key, -1, level + 1, buffer));
            JINJA_TRY(add_trusted(jinja, buffer, "\""));
        }
        JINJA_TRY(add_trusted(jinja, buffer, ": "));
        JINJA_TRY(jinja_print_json(jinja, &dict->values.items[i], indent, level + 1, buffer));
    }
    if (dict->keys.n)
        JINJA_TRY(json_break(jinja, indent, level, "", buffer));
    return add_trusted(jinja, buffer, "}");
}

/* @indent: blanks a level, -1: one line. */
int jinja_print_json(Jinja *jinja, const JinjaValue *value, int indent, int level, JinjaBuffer *buffer)
{
    JINJA_TRY(jinja_charge(jinja, 1));
    switch (value->type) {
    case JINJA_NONE:
        return add_trusted(jinja, buffer, "null");
    case JINJA_BOOL:
        return add_trusted(jinja, buffer, value->boolean ? "true" : "false");
    case JINJA_INT:
        return print_number(jinja, value, buffer);
    case JINJA_FLOAT:
        return print_float(jinja, value->real, buffer, true);
    case JINJA_STRING:
        return json_string(jinja, value->string, buffer);
    case JINJA_LIST:
    case JINJA_TUPLE:
        return json_sequence(jinja, value->list, indent, level, buffer);
    case JINJA_DICT:
        return json_dict(jinja, value->dict, indent, level, buffer);
    case JINJA_UNDEFINED:
    case JINJA_NAMESPACE:
    case JINJA_LOOP:
    case JINJA_MACRO:
    case JINJA_FUNCTION:
        break;
    }
    return jinja_fail(jinja, "tojson: %s cannot be written as JSON", jinja_type_name(value));
}
