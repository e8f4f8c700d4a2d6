/* SPDX-License-Identifier: Apache-2.0 */
/* Tests ("is …") and global functions. */

#include "daemon/text/jinja.h"

#include <string.h>
#include <time.h>

#define JINJA_RANGE_MAX 100000

/* ---- tests ------------------------------------------------------------------------------------------------------------------------ */

/* Tests without arguments that look at the type only: a mask of types. */
static const struct {
    const char *name;
    unsigned types;
} type_tests[] = {
    {"undefined", 1U << JINJA_UNDEFINED},
    {"none", 1U << JINJA_NONE},
    {"boolean", 1U << JINJA_BOOL},
    {"integer", 1U << JINJA_INT},
    {"float", 1U << JINJA_FLOAT},
    {"number", 1U << JINJA_INT | 1U << JINJA_FLOAT | 1U << JINJA_BOOL},
    {"string", 1U << JINJA_STRING},
    {"mapping", 1U << JINJA_DICT},
    /* Undefined is iterable in Jinja: it has __iter__. */
    {"iterable", 1U << JINJA_STRING | 1U << JINJA_LIST | 1U << JINJA_TUPLE | 1U << JINJA_DICT | 1U << JINJA_UNDEFINED | 1U << JINJA_LOOP},
    {"sequence", 1U << JINJA_STRING | 1U << JINJA_LIST | 1U << JINJA_TUPLE | 1U << JINJA_DICT | 1U << JINJA_UNDEFINED},
    {"callable", 1U << JINJA_MACRO | 1U << JINJA_FUNCTION | 1U << JINJA_UNDEFINED | 1U << JINJA_LOOP},
};

/* Tests that compare with an argument. */
static const struct {
    const char *name;
    JinjaOperator op;
} comparison_tests[] = {
    {"eq", JINJA_OP_EQUAL},        {"equalto", JINJA_OP_EQUAL},     {"==", JINJA_OP_EQUAL},    {"ne", JINJA_OP_UNEQUAL},
    {"lt", JINJA_OP_LESS},         {"lessthan", JINJA_OP_LESS},     {"le", JINJA_OP_LESS_EQUAL}, {"gt", JINJA_OP_GREATER},
    {"greaterthan", JINJA_OP_GREATER}, {"ge", JINJA_OP_GREATER_EQUAL}, {"in", JINJA_OP_IN},
};

static const char *const other_tests[] = {"defined", "true", "false", "odd", "even", "divisibleby", "sameas", "upper", "lower"};

bool jinja_test_exists(const JinjaString *name)
{
    for (size_t i = 0; i < N_ELEMENTS(type_tests); i++)
        if (jinja_is_text(name, type_tests[i].name))
            return true;
    for (size_t i = 0; i < N_ELEMENTS(comparison_tests); i++)
        if (jinja_is_text(name, comparison_tests[i].name))
            return true;
    for (size_t i = 0; i < N_ELEMENTS(other_tests); i++)
        if (jinja_is_text(name, other_tests[i]))
            return true;
    return false;
}

static int test_division(Jinja *jinja, const JinjaString *name, const JinjaValue *value, const JinjaValue *argument, bool *ret)
{
    int64_t divisor = 2, rest;

    if (jinja_is_text(name, "divisibleby")) {
        if (!argument || argument->type != JINJA_INT || argument->integer == 0)
            return jinja_fail(jinja, "divisibleby: needs an integer that is not 0");
        divisor = argument->integer;
    }
    if (value->type != JINJA_INT && value->type != JINJA_BOOL)
        return jinja_fail(jinja, "%.*s: %s is no integer", (int)name->n, name->data, jinja_type_name(value));
    rest = divisor == -1 ? 0 : (value->type == JINJA_INT ? value->integer : value->boolean) % divisor;
    *ret = (rest == 0) != jinja_is_text(name, "odd");
    return 0;
}

static int test_case(const JinjaString *string, bool upper, bool *ret)
{
    bool cased = false, wrong = false;

    for (size_t i = 0; i < string->n; i++) {
        char c = string->data[i];
        bool is_upper = c >= 'A' && c <= 'Z', is_lower = c >= 'a' && c <= 'z';

        cased |= is_upper || is_lower;
        wrong |= upper ? is_lower : is_upper;
    }
    *ret = cased && !wrong;
    return 0;
}

static int test_other(Jinja *jinja, const JinjaString *name, const JinjaValue *value, const JinjaValue *argument, bool *ret)
{
    if (jinja_is_text(name, "defined"))
        *ret = value->type != JINJA_UNDEFINED;
    else if (jinja_is_text(name, "true") || jinja_is_text(name, "false"))
        *ret = value->type == JINJA_BOOL && value->boolean == jinja_is_text(name, "true");
    else if (jinja_is_text(name, "sameas")) {
        if (!argument)
            return jinja_fail(jinja, "sameas: needs a value");
        *ret = value->type == argument->type && jinja_equal(value, argument);
    } else if (jinja_is_text(name, "upper") || jinja_is_text(name, "lower")) {
        const JinjaString *text;

        JINJA_TRY(jinja_to_string(jinja, value, &text));
        return test_case(text, jinja_is_text(name, "upper"), ret);
    } else
        return test_division(jinja, name, value, argument, ret);
    return 0;
}

int jinja_test(Jinja *jinja, const JinjaString *name, const JinjaValue *value, const JinjaArguments *arguments, bool *ret)
{
    const JinjaValue *argument = arguments->n ? &arguments->values[0] : NULL;

    for (size_t i = 0; i < N_ELEMENTS(type_tests); i++)
        if (jinja_is_text(name, type_tests[i].name)) {
            *ret = type_tests[i].types >> value->type & 1;
            return 0;
        }
    for (size_t i = 0; i < N_ELEMENTS(comparison_tests); i++)
        if (jinja_is_text(name, comparison_tests[i].name)) {
            if (!argument)
                return jinja_fail(jinja, "test '%.*s' needs a value", (int)name->n, name->data);
            return jinja_compare(jinja, comparison_tests[i].op, value, argument, ret);
        }
    if (!jinja_test_exists(name))
        return jinja_fail(jinja, "test '%.*s' is not supported", (int)MIN(name->n, (size_t)60), name->data);
    return test_other(jinja, name, value, argument, ret);
}

/* ---- functions -------------------------------------------------------------------------------------------------------------------- */

static int function_range(Jinja *jinja, const JinjaArguments *arguments, JinjaValue *ret)
{
    int64_t bounds[3] = {0, 0, 1};

    if (arguments->n < 1 || arguments->n > 3)
        return jinja_fail(jinja, "range: takes 1 to 3 integers");
    for (size_t i = 0; i < arguments->n; i++) {
        if (arguments->values[i].type != JINJA_INT)
            return jinja_fail(jinja, "range: %s is no integer", jinja_type_name(&arguments->values[i]));
        bounds[arguments->n == 1 ? 1 : i] = arguments->values[i].integer;
    }
    if (bounds[2] == 0)
        return jinja_fail(jinja, "range: the step is 0");
    JINJA_TRY(jinja_new_list(jinja, ret));
    for (int64_t at = bounds[0]; bounds[2] > 0 ? at < bounds[1] : at > bounds[1];) {
        if (ret->list->n == JINJA_RANGE_MAX)
            return jinja_fail(jinja, "range: more than %d numbers", JINJA_RANGE_MAX);
        JINJA_TRY(jinja_list_push(jinja, ret->list, (JinjaValue){.type = JINJA_INT, .integer = at}));
        if (__builtin_add_overflow(at, bounds[2], &at))
            break;
    }
    return 0;
}

/* namespace(a=1), dict(a=1): also from a mapping. */
static int function_dict(Jinja *jinja, const JinjaArguments *arguments, bool is_namespace, JinjaValue *ret)
{
    JINJA_TRY(jinja_new_dict(jinja, ret));
    for (size_t i = 0; i < arguments->n; i++) {
        const JinjaValue *value = &arguments->values[i];

        if (arguments->names[i]) {
            JINJA_TRY(jinja_dict_set(jinja, ret->dict, (JinjaValue){.type = JINJA_STRING, .string = arguments->names[i]}, *value));
            continue;
        }
        if (value->type != JINJA_DICT)
            return jinja_fail(jinja, "namespace and dict take names with values, not %s", jinja_type_name(value));
        for (size_t k = 0; k < value->dict->keys.n; k++)
            JINJA_TRY(jinja_dict_set(jinja, ret->dict, value->dict->keys.items[k], value->dict->values.items[k]));
    }
    ret->type = is_namespace ? JINJA_NAMESPACE : JINJA_DICT;
    return 0;
}

static int function_raise(Jinja *jinja, const JinjaArguments *arguments)
{
    const JinjaValue *message = jinja_argument(arguments, 0, "message");
    const JinjaString *text;

    if (!message)
        return jinja_fail(jinja, "raise_exception: needs a message");
    JINJA_TRY(jinja_to_string(jinja, message, &text));
    (void)error_detail_set(jinja->reterr, CHAT_TEMPLATE_E_REFUSED, "template refused: %.*s", (int)MIN(text->n, (size_t)400), text->data);
    return CHAT_TEMPLATE_E_REFUSED;
}

/* The local time in a form of strftime(3), as Transformers' function of this name. */
static int function_now(Jinja *jinja, const JinjaArguments *arguments, JinjaValue *ret)
{
    const JinjaString *string;
    char format[128], text[512];
    time_t now = time(NULL);
    struct tm parts;
    size_t n;

    JINJA_TRY(jinja_argument_string(jinja, arguments, 0, "format", &string));
    if (string->n >= sizeof(format) || !localtime_r(&now, &parts))
        return jinja_fail(jinja, "strftime_now: the format is too long");
    memcpy(format, string->data, string->n);
    format[string->n] = 0;
    /* The format is the template's, of a bounded length, and the result has a bound of its own. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    n = strftime(text, sizeof(text), format, &parts);
#pragma GCC diagnostic pop
    return jinja_string_new(jinja, text, n, true, ret);
}

bool jinja_function_exists(const JinjaString *name)
{
    static const char *const names[] = {"range", "namespace", "dict", "raise_exception", "strftime_now"};

    for (size_t i = 0; i < N_ELEMENTS(names); i++)
        if (jinja_is_text(name, names[i]))
            return true;
    return false;
}

/* Only functions that exist come here. */
int jinja_function(Jinja *jinja, const JinjaString *name, const JinjaArguments *arguments, JinjaValue *ret)
{
    if (jinja_is_text(name, "range"))
        return function_range(jinja, arguments, ret);
    if (jinja_is_text(name, "raise_exception"))
        return function_raise(jinja, arguments);
    if (jinja_is_text(name, "strftime_now"))
        return function_now(jinja, arguments, ret);
    return function_dict(jinja, arguments, jinja_is_text(name, "namespace"), ret);
}
