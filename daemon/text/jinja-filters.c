/* SPDX-License-Identifier: Apache-2.0 */
/* Filters: value | name(arguments). */

#include "daemon/text/jinja-strings.h"

#include <math.h>
#include <string.h>

typedef struct FilterCall {
    const JinjaString *name;
    const JinjaValue *value;
    const JinjaArguments *arguments;
} FilterCall;

typedef int (*Filter)(Jinja *jinja, const FilterCall *call, JinjaValue *ret);

const JinjaValue *jinja_argument(const JinjaArguments *arguments, size_t index, const char *name)
{
    if (index < arguments->n && !arguments->names[index])
        return &arguments->values[index];
    for (size_t i = 0; i < arguments->n; i++)
        if (arguments->names[i] && jinja_is_text(arguments->names[i], name))
            return &arguments->values[i];
    return NULL;
}

int jinja_argument_string(Jinja *jinja, const JinjaArguments *arguments, size_t index, const char *name, const JinjaString **ret)
{
    const JinjaValue *value = jinja_argument(arguments, index, name);

    if (!value || value->type != JINJA_STRING)
        return jinja_fail(jinja, "argument %zu (%s) is to be a string", index + 1, name);
    *ret = value->string;
    return 0;
}

static bool argument_truth(const FilterCall *call, size_t index, const char *name, bool otherwise)
{
    const JinjaValue *value = jinja_argument(call->arguments, index, name);

    return value ? jinja_truth(value) : otherwise;
}

/* ---- text ------------------------------------------------------------------------------------------------------------------------- */

static int filter_trim(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaValue *characters = jinja_argument(call->arguments, 0, "chars");
    const JinjaString *text;

    JINJA_TRY(jinja_to_string(jinja, call->value, &text));
    return jinja_value_of_string(jinja, jinja_strip(text, characters && characters->type == JINJA_STRING ? characters->string : NULL, true, true),
                                 ret);
}

static int filter_case(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    static const char *const cases[] = {"upper", "lower", "capitalize", "title"};
    const JinjaString *text;
    size_t how = 0;

    while (!jinja_is_text(call->name, cases[how]))
        how++;
    JINJA_TRY(jinja_to_string(jinja, call->value, &text));
    return jinja_change_case(jinja, text, (JinjaCase)how, ret);
}

static int filter_string(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    *ret = (JinjaValue){.type = JINJA_STRING};
    return jinja_to_string(jinja, call->value, &ret->string);
}

static int filter_replace(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaValue *count = jinja_argument(call->arguments, 2, "count");
    const JinjaString *text, *from, *to;

    JINJA_TRY(jinja_to_string(jinja, call->value, &text));
    JINJA_TRY(jinja_argument_string(jinja, call->arguments, 0, "old", &from));
    JINJA_TRY(jinja_argument_string(jinja, call->arguments, 1, "new", &to));
    return jinja_replace(jinja, text, from, to, count && count->type == JINJA_INT ? count->integer : -1, ret);
}

static int filter_tojson(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaValue *indent = jinja_argument(call->arguments, 1, "indent");
    JinjaBuffer buffer = {0};

    /* Transformers' own: tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) */
    for (size_t i = 0; i < call->arguments->n; i++) {
        const JinjaString *name = call->arguments->names[i];

        if (!name || !jinja_is_text(name, "indent"))
            if (jinja_truth(&call->arguments->values[i]))
                return jinja_fail(jinja, "tojson: only indent= is supported");
    }
    if (indent && indent->type == JINJA_INT && (indent->integer < 0 || indent->integer > 16))
        return jinja_fail(jinja, "tojson: indent is to be 0 to 16");
    JINJA_TRY(jinja_print_json(jinja, call->value, indent && indent->type == JINJA_INT ? (int)indent->integer : -1, 0, &buffer));
    return jinja_buffer_value(jinja, &buffer, ret);
}

static int filter_indent(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaValue *width = jinja_argument(call->arguments, 0, "width");
    bool first = argument_truth(call, 1, "first", false), blank = argument_truth(call, 2, "blank", false);
    JinjaString unit = {"                                ", 4, NULL, true};
    const JinjaString *text;
    JinjaBuffer buffer = {0};

    if (width && width->type == JINJA_STRING)
        unit = *width->string;
    else if (width && (width->type != JINJA_INT || width->integer < 0 || width->integer > 32))
        return jinja_fail(jinja, "indent: the width is to be 0 to 32, or a string");
    else if (width)
        unit.n = (size_t)width->integer;
    JINJA_TRY(jinja_to_string(jinja, call->value, &text));
    for (size_t begin = 0; begin <= text->n;) {
        const char *newline = begin < text->n ? memchr(text->data + begin, '\n', text->n - begin) : NULL;
        size_t end = newline ? (size_t)(newline - text->data) : text->n;
        JinjaString line = jinja_string_slice(text, begin, end - begin + (newline != NULL));

        if (begin == 0 ? first : blank || end > begin)
            JINJA_TRY(jinja_buffer_add(jinja, &buffer, &unit));
        JINJA_TRY(jinja_buffer_add(jinja, &buffer, &line));
        begin = end + 1;
        if (!newline)
            break;
    }
    return jinja_buffer_value(jinja, &buffer, ret);
}

/* ---- numbers ---------------------------------------------------------------------------------------------------------------------- */

static int filter_int(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaValue *otherwise = jinja_argument(call->arguments, 0, "default"), *value = call->value;
    JinjaString text;
    char number[64], *end;
    long long integer;

    *ret = otherwise ? *otherwise : (JinjaValue){.type = JINJA_INT, .integer = 0};
    if (value->type == JINJA_INT || value->type == JINJA_BOOL)
        *ret = (JinjaValue){.type = JINJA_INT, .integer = value->type == JINJA_INT ? value->integer : value->boolean};
    else if (value->type == JINJA_FLOAT && fabs(value->real) < 9e18)
        *ret = (JinjaValue){.type = JINJA_INT, .integer = (int64_t)value->real};
    if (value->type != JINJA_STRING)
        return jinja_charge(jinja, 1);
    text = jinja_strip(value->string, NULL, true, true);
    if (text.n == 0 || text.n >= sizeof(number))
        return 0;
    memcpy(number, text.data, text.n);
    number[text.n] = 0;
    errno = 0;
    integer = strtoll(number, &end, 10);
    if (*end == '.') /* as Python's int(float(text)) */
        integer = (long long)strtod(number, &end);
    if (!*end && errno == 0)
        *ret = (JinjaValue){.type = JINJA_INT, .integer = integer};
    return 0;
}

static int filter_float(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaValue *otherwise = jinja_argument(call->arguments, 0, "default"), *value = call->value;
    char number[64], *end;
    double real;

    *ret = otherwise ? *otherwise : (JinjaValue){.type = JINJA_FLOAT, .real = 0};
    if (value->type == JINJA_INT)
        *ret = (JinjaValue){.type = JINJA_FLOAT, .real = (double)value->integer};
    else if (value->type == JINJA_FLOAT)
        *ret = *value;
    if (value->type != JINJA_STRING || value->string->n == 0 || value->string->n >= sizeof(number))
        return jinja_charge(jinja, 1);
    memcpy(number, value->string->data, value->string->n);
    number[value->string->n] = 0;
    real = strtod(number, &end);
    if (!*end)
        *ret = (JinjaValue){.type = JINJA_FLOAT, .real = real};
    return 0;
}

static int filter_abs(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    *ret = *call->value;
    if (ret->type == JINJA_INT && ret->integer > INT64_MIN)
        ret->integer = llabs(ret->integer);
    else if (ret->type == JINJA_FLOAT)
        ret->real = fabs(ret->real);
    else
        return jinja_fail(jinja, "abs: %s has none", jinja_type_name(ret));
    return 0;
}

static int filter_round(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaValue *value = call->value;

    if (call->arguments->n > 0 || (value->type != JINJA_INT && value->type != JINJA_FLOAT))
        return jinja_fail(jinja, "round: a number without arguments is supported");
    *ret = (JinjaValue){.type = JINJA_FLOAT, .real = value->type == JINJA_INT ? (double)value->integer : rint(value->real)};
    return 0;
}

/* ---- sequences -------------------------------------------------------------------------------------------------------------------- */

static int filter_length(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    size_t n;

    JINJA_TRY(jinja_length(jinja, call->value, &n));
    *ret = (JinjaValue){.type = JINJA_INT, .integer = (int64_t)n};
    return 0;
}

static int filter_default(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaValue *otherwise = jinja_argument(call->arguments, 0, "default_value");
    bool falsy = argument_truth(call, 1, "boolean", false);

    *ret = *call->value;
    if (ret->type == JINJA_UNDEFINED || (falsy && !jinja_truth(ret))) {
        if (!otherwise)
            return jinja_string_new(jinja, "", 0, true, ret);
        *ret = *otherwise;
    }
    return 0;
}

/* "a.b" of an element, for attribute=. */
static int attribute_of(Jinja *jinja, const JinjaValue *value, const JinjaString *path, JinjaValue *ret)
{
    *ret = *value;
    for (size_t begin = 0; begin <= path->n;) {
        const char *dot = memchr(path->data + begin, '.', path->n - begin);
        size_t end = dot ? (size_t)(dot - path->data) : path->n;
        JinjaValue key, object = *ret;

        JINJA_TRY(jinja_value_of_string(jinja, jinja_string_slice(path, begin, end - begin), &key));
        if (object.type == JINJA_UNDEFINED)
            return 0;
        JINJA_TRY(jinja_attribute(jinja, &object, key.string, ret));
        begin = end + 1;
    }
    return 0;
}

static int filter_join(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaValue *separator = jinja_argument(call->arguments, 0, "d"), *attribute = jinja_argument(call->arguments, 1, "attribute");
    const JinjaList *items;
    JinjaBuffer buffer = {0};

    JINJA_TRY(jinja_iterate(jinja, call->value, &items));
    for (size_t i = 0; i < items->n; i++) {
        JinjaValue item = items->items[i];

        if (attribute && attribute->type == JINJA_STRING)
            JINJA_TRY(attribute_of(jinja, &items->items[i], attribute->string, &item));
        if (i && separator)
            JINJA_TRY(jinja_print(jinja, separator, &buffer));
        JINJA_TRY(jinja_print(jinja, &item, &buffer));
    }
    return jinja_buffer_value(jinja, &buffer, ret);
}

static int filter_edge(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaList *items;

    JINJA_TRY(jinja_iterate(jinja, call->value, &items));
    *ret = (JinjaValue){.type = JINJA_UNDEFINED};
    if (items->n)
        *ret = items->items[jinja_is_text(call->name, "first") ? 0 : items->n - 1];
    return 0;
}

static int filter_list(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaList *items;
    JinjaBuffer buffer = {0};
    bool reverse = jinja_is_text(call->name, "reverse");

    JINJA_TRY(jinja_iterate(jinja, call->value, &items));
    JINJA_TRY(jinja_new_list(jinja, ret));
    for (size_t i = 0; i < items->n; i++)
        JINJA_TRY(jinja_list_push(jinja, ret->list, items->items[reverse ? items->n - 1 - i : i]));
    if (!reverse || call->value->type != JINJA_STRING)
        return 0;
    items = ret->list;
    for (size_t i = 0; i < items->n; i++)
        JINJA_TRY(jinja_buffer_add(jinja, &buffer, items->items[i].string));
    return jinja_buffer_value(jinja, &buffer, ret);
}

static int filter_items(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    static const JinjaString items = {"items", 5, NULL, true};
    JinjaArguments none = {NULL, NULL, 0};

    if (call->value->type == JINJA_UNDEFINED)
        return jinja_new_list(jinja, ret);
    if (call->value->type != JINJA_DICT)
        return jinja_fail(jinja, "%.*s: %s is no mapping", (int)call->name->n, call->name->data, jinja_type_name(call->value));
    return jinja_method(jinja, call->value, &items, &none, ret);
}

/* What an element is sorted or compared by: itself or its attribute, without regard to case unless asked. */
static int sort_key(Jinja *jinja, const FilterCall *call, const JinjaValue *item, JinjaValue *ret)
{
    bool pairs = jinja_is_text(call->name, "dictsort"), sort = jinja_is_text(call->name, "sort");
    const JinjaValue *attribute = pairs ? NULL : jinja_argument(call->arguments, sort ? 2 : 1, "attribute");

    *ret = pairs ? item->list->items[0] : *item;
    if (attribute && attribute->type == JINJA_STRING)
        JINJA_TRY(attribute_of(jinja, item, attribute->string, ret));
    if (ret->type == JINJA_STRING && !argument_truth(call, sort ? 1 : 0, "case_sensitive", false))
        return jinja_change_case(jinja, ret->string, JINJA_CASE_LOWER, ret);
    return 0;
}

/* Merge sort: stable, and its comparisons may fail. */
static int merge_sort(Jinja *jinja, JinjaValue *items, JinjaValue *keys, JinjaValue *spare, size_t n, bool reverse)
{
    for (size_t width = 1; width < n; width *= 2)
        for (size_t begin = 0; begin + width < n; begin += 2 * width) {
            size_t middle = begin + width, end = MIN(begin + 2 * width, n), left = begin, right = middle, at = 0;

            while (left < middle && right < end) {
                bool after;

                JINJA_TRY(jinja_charge(jinja, 1));
                JINJA_TRY(jinja_compare(jinja, reverse ? JINJA_OP_GREATER : JINJA_OP_LESS, &keys[right], &keys[left], &after));
                spare[2 * at] = items[after ? right : left];
                spare[2 * at++ + 1] = keys[after ? right : left];
                right += after;
                left += !after;
            }
            for (; left < middle; left++, at++) {
                spare[2 * at] = items[left];
                spare[2 * at + 1] = keys[left];
            }
            for (size_t i = 0; i < at; i++) {
                items[begin + i] = spare[2 * i];
                keys[begin + i] = spare[2 * i + 1];
            }
        }
    return 0;
}

static int filter_sort(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    FilterCall list_call = {&(JinjaString){"list", 4, NULL, true}, call->value, call->arguments};
    bool pairs = jinja_is_text(call->name, "dictsort");
    JinjaValue *keys, *spare;

    JINJA_TRY(pairs ? filter_items(jinja, call, ret) : filter_list(jinja, &list_call, ret));
    keys = jinja_alloc(jinja, (ret->list->n + 1) * sizeof(*keys));
    spare = jinja_alloc(jinja, 2 * (ret->list->n + 1) * sizeof(*spare));
    if (!keys || !spare)
        return jinja_alloc_failed(jinja);
    for (size_t i = 0; i < ret->list->n; i++)
        JINJA_TRY(sort_key(jinja, call, &ret->list->items[i], &keys[i]));
    return merge_sort(jinja, ret->list->items, keys, spare, ret->list->n, argument_truth(call, pairs ? 2 : 0, "reverse", false));
}

static int filter_unique(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaList *items;
    JinjaValue seen, key;

    JINJA_TRY(jinja_iterate(jinja, call->value, &items));
    JINJA_TRY(jinja_new_list(jinja, ret));
    JINJA_TRY(jinja_new_dict(jinja, &seen));
    for (size_t i = 0; i < items->n; i++) {
        JINJA_TRY(sort_key(jinja, call, &items->items[i], &key));
        if (jinja_dict_find(seen.dict, &key))
            continue;
        JINJA_TRY(jinja_dict_set(jinja, seen.dict, key, key));
        JINJA_TRY(jinja_list_push(jinja, ret->list, items->items[i]));
    }
    return 0;
}

static int filter_fold(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaList *items;
    bool sum = jinja_is_text(call->name, "sum"), better;

    JINJA_TRY(jinja_iterate(jinja, call->value, &items));
    *ret = sum ? (JinjaValue){.type = JINJA_INT} : (JinjaValue){.type = JINJA_UNDEFINED};
    for (size_t i = 0; i < items->n; i++) {
        JinjaValue before = *ret;

        if (sum)
            JINJA_TRY(jinja_binary(jinja, JINJA_OP_ADD, &before, &items->items[i], ret));
        else {
            better = i == 0;
            if (!better)
                JINJA_TRY(jinja_compare(jinja, jinja_is_text(call->name, "max") ? JINJA_OP_GREATER : JINJA_OP_LESS, &items->items[i], &before,
                                        &better));
            *ret = better ? items->items[i] : before;
        }
    }
    return 0;
}

/* map(attribute="a", default=…), map("filter", …) */
static int filter_map(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    const JinjaValue *attribute = jinja_argument(call->arguments, 99, "attribute"), *otherwise = jinja_argument(call->arguments, 99, "default");
    JinjaArguments rest = *call->arguments;
    const JinjaString *name = NULL;
    const JinjaList *items;
    JinjaValue value;

    if (!attribute) {
        JINJA_TRY(jinja_argument_string(jinja, call->arguments, 0, "filter", &name));
        rest = (JinjaArguments){rest.values + 1, rest.names + 1, rest.n - 1};
    } else if (attribute->type != JINJA_STRING)
        return jinja_fail(jinja, "map: the attribute is to be a string");
    JINJA_TRY(jinja_new_list(jinja, ret));
    if (!jinja_truth(call->value)) /* none as well, as in Jinja */
        return 0;
    JINJA_TRY(jinja_iterate(jinja, call->value, &items));
    for (size_t i = 0; i < items->n; i++) {
        if (name)
            JINJA_TRY(jinja_filter(jinja, name, &items->items[i], &rest, &value));
        else
            JINJA_TRY(attribute_of(jinja, &items->items[i], attribute->string, &value));
        if (value.type == JINJA_UNDEFINED && otherwise)
            value = *otherwise;
        JINJA_TRY(jinja_list_push(jinja, ret->list, value));
    }
    return 0;
}

/* select("test", …), selectattr("attribute", "test", …) and their opposites */
static int filter_select(Jinja *jinja, const FilterCall *call, JinjaValue *ret)
{
    bool by_attribute = call->name->n == strlen("selectattr"), keep = call->name->data[0] == 's';
    JinjaArguments rest = *call->arguments;
    const JinjaString *attribute = NULL, *test = NULL;
    const JinjaList *items;

    if (by_attribute)
        JINJA_TRY(jinja_argument_string(jinja, call->arguments, 0, "attribute", &attribute));
    if (rest.n > by_attribute) {
        JINJA_TRY(jinja_argument_string(jinja, call->arguments, by_attribute, "test", &test));
        rest = (JinjaArguments){rest.values + by_attribute + 1, rest.names + by_attribute + 1, rest.n - by_attribute - 1};
    }
    JINJA_TRY(jinja_new_list(jinja, ret));
    if (!jinja_truth(call->value)) /* none as well, as in Jinja */
        return 0;
    JINJA_TRY(jinja_iterate(jinja, call->value, &items));
    for (size_t i = 0; i < items->n; i++) {
        JinjaValue value = items->items[i];
        bool holds;

        if (attribute)
            JINJA_TRY(attribute_of(jinja, &items->items[i], attribute, &value));
        holds = jinja_truth(&value);
        if (test)
            JINJA_TRY(jinja_test(jinja, test, &value, &rest, &holds));
        if (holds == keep)
            JINJA_TRY(jinja_list_push(jinja, ret->list, items->items[i]));
    }
    return 0;
}

static const struct {
    const char *name;
    Filter filter;
} filters[] = {
    {"trim", filter_trim},       {"upper", filter_case},      {"lower", filter_case},      {"capitalize", filter_case},
    {"title", filter_case},      {"string", filter_string},   {"safe", filter_string},     {"replace", filter_replace},
    {"tojson", filter_tojson},   {"indent", filter_indent},   {"int", filter_int},         {"float", filter_float},
    {"abs", filter_abs},         {"round", filter_round},     {"length", filter_length},   {"count", filter_length},
    {"default", filter_default}, {"d", filter_default},       {"join", filter_join},       {"first", filter_edge},
    {"last", filter_edge},       {"list", filter_list},       {"reverse", filter_list},    {"items", filter_items},
    {"sort", filter_sort},       {"dictsort", filter_sort},   {"unique", filter_unique},   {"sum", filter_fold},
    {"min", filter_fold},        {"max", filter_fold},        {"map", filter_map},         {"select", filter_select},
    {"reject", filter_select},   {"selectattr", filter_select}, {"rejectattr", filter_select},
};

static Filter filter_named(const JinjaString *name)
{
    for (size_t i = 0; i < N_ELEMENTS(filters); i++)
        if (jinja_is_text(name, filters[i].name))
            return filters[i].filter;
    return NULL;
}

bool jinja_filter_exists(const JinjaString *name)
{
    return filter_named(name) != NULL;
}

int jinja_filter(Jinja *jinja, const JinjaString *name, const JinjaValue *value, const JinjaArguments *arguments, JinjaValue *ret)
{
    FilterCall call = {name, value, arguments};
    JinjaValue result = {.type = JINJA_NONE};
    Filter filter = filter_named(name);

    if (!filter)
        return jinja_fail(jinja, "filter '%.*s' is not supported", (int)MIN(name->n, (size_t)60), name->data);
    JINJA_TRY(filter(jinja, &call, &result));
    *ret = result;
    return 0;
}
