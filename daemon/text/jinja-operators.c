/* SPDX-License-Identifier: Apache-2.0 */
/* Operators, comparison, iteration, subscripts: the rules are Python's. */

#include "daemon/text/jinja.h"
#include "daemon/text/utf8.h"

#include <math.h>
#include <string.h>

static bool is_integer(const JinjaValue *value)
{
    return value->type == JINJA_INT || value->type == JINJA_BOOL;
}

static int64_t integer_of(const JinjaValue *value)
{
    return value->type == JINJA_BOOL ? value->boolean : value->integer;
}

static bool is_number(const JinjaValue *value)
{
    return is_integer(value) || value->type == JINJA_FLOAT;
}

static double number_of(const JinjaValue *value)
{
    return value->type == JINJA_FLOAT ? value->real : (double)integer_of(value);
}

static int refuse_operands(Jinja *jinja, const JinjaValue *a, const JinjaValue *b)
{
    const JinjaValue *undefined = a->type == JINJA_UNDEFINED ? a : b->type == JINJA_UNDEFINED ? b : NULL;

    if (undefined && undefined->string)
        return jinja_fail(jinja, "'%.*s' is undefined", (int)MIN(undefined->string->n, (size_t)80), undefined->string->data);
    return jinja_fail(jinja, "%s and %s do not go with this operator", jinja_type_name(a), jinja_type_name(b));
}

static int64_t floor_divide(int64_t x, int64_t y)
{
    return x / y - ((x % y != 0) && ((x < 0) != (y < 0)));
}

static int integer_binary(Jinja *jinja, JinjaOperator op, int64_t x, int64_t y, JinjaValue *ret)
{
    int64_t result = 1;
    bool overflow = false;

    if ((op == JINJA_OP_FLOOR_DIVIDE || op == JINJA_OP_MODULO) && y == 0)
        return jinja_fail(jinja, "division by zero");
    if (op == JINJA_OP_ADD)
        overflow = __builtin_add_overflow(x, y, &result);
    else if (op == JINJA_OP_SUBTRACT)
        overflow = __builtin_sub_overflow(x, y, &result);
    else if (op == JINJA_OP_MULTIPLY)
        overflow = __builtin_mul_overflow(x, y, &result);
    else if (y == -1) { /* INT64_MIN / -1 traps */
        result = 0;
        if (op == JINJA_OP_FLOOR_DIVIDE)
            overflow = __builtin_sub_overflow((int64_t)0, x, &result);
    } else if (op == JINJA_OP_FLOOR_DIVIDE)
        result = floor_divide(x, y);
    else
        result = x - y * floor_divide(x, y);
    if (overflow)
        return jinja_fail(jinja, "integer overflow");
    *ret = (JinjaValue){.type = JINJA_INT, .integer = result};
    return 0;
}

static int integer_power(Jinja *jinja, int64_t base, int64_t exponent, JinjaValue *ret)
{
    int64_t result = 1;

    for (int64_t i = 0; i < exponent && (base < -1 || base > 1 || i < 2); i++)
        if (__builtin_mul_overflow(result, base, &result))
            return jinja_fail(jinja, "integer overflow");
    if (base == -1)
        result = exponent % 2 ? -1 : 1;
    *ret = (JinjaValue){.type = JINJA_INT, .integer = result};
    return 0;
}

static int number_binary(Jinja *jinja, JinjaOperator op, const JinjaValue *a, const JinjaValue *b, JinjaValue *ret)
{
    double x = number_of(a), y = number_of(b), result;

    if (is_integer(a) && is_integer(b) && op != JINJA_OP_DIVIDE && (op != JINJA_OP_POWER || integer_of(b) >= 0)) {
        if (op == JINJA_OP_POWER)
            return integer_power(jinja, integer_of(a), integer_of(b), ret);
        return integer_binary(jinja, op, integer_of(a), integer_of(b), ret);
    }
    if ((op == JINJA_OP_DIVIDE || op == JINJA_OP_FLOOR_DIVIDE || op == JINJA_OP_MODULO) && y == 0)
        return jinja_fail(jinja, "division by zero");
    switch ((int)op) {
    case JINJA_OP_ADD:
        result = x + y;
        break;
    case JINJA_OP_SUBTRACT:
        result = x - y;
        break;
    case JINJA_OP_MULTIPLY:
        result = x * y;
        break;
    case JINJA_OP_DIVIDE:
        result = x / y;
        break;
    case JINJA_OP_FLOOR_DIVIDE:
        result = floor(x / y);
        break;
    case JINJA_OP_MODULO:
        result = fmod(x, y);
        if (result != 0 && (result < 0) != (y < 0))
            result += y;
        break;
    default: /* JINJA_OP_POWER: the others do not come here */
        result = pow(x, y);
        break;
    }
    *ret = (JinjaValue){.type = JINJA_FLOAT, .real = result};
    return 0;
}

static int concatenate(Jinja *jinja, const JinjaString *a, const JinjaString *b, JinjaValue *ret)
{
    JinjaBuffer buffer = {0};

    JINJA_TRY(jinja_buffer_add(jinja, &buffer, a));
    JINJA_TRY(jinja_buffer_add(jinja, &buffer, b));
    return jinja_buffer_value(jinja, &buffer, ret);
}

static int repeat(Jinja *jinja, const JinjaValue *value, int64_t times, JinjaValue *ret)
{
    JinjaBuffer buffer = {0};

    if (value->type == JINJA_STRING) {
        for (int64_t i = 0; i < times && value->string->n; i++) {
            JINJA_TRY(jinja_charge(jinja, 1));
            JINJA_TRY(jinja_buffer_add(jinja, &buffer, value->string));
        }
        return jinja_buffer_value(jinja, &buffer, ret);
    }
    JINJA_TRY(jinja_new_list(jinja, ret));
    ret->type = value->type;
    for (int64_t i = 0; i < times && value->list->n; i++)
        for (size_t k = 0; k < value->list->n; k++)
            JINJA_TRY(jinja_list_push(jinja, ret->list, value->list->items[k]));
    return 0;
}

static bool is_sequence(const JinjaValue *value)
{
    return value->type == JINJA_LIST || value->type == JINJA_TUPLE;
}

int jinja_binary(Jinja *jinja, JinjaOperator op, const JinjaValue *a, const JinjaValue *b, JinjaValue *ret)
{
    if (op == JINJA_OP_CONCAT) {
        const JinjaString *left, *right;

        JINJA_TRY(jinja_to_string(jinja, a, &left));
        JINJA_TRY(jinja_to_string(jinja, b, &right));
        return concatenate(jinja, left, right, ret);
    }
    if (is_number(a) && is_number(b))
        return number_binary(jinja, op, a, b, ret);
    if (op == JINJA_OP_ADD && a->type == JINJA_STRING && b->type == JINJA_STRING)
        return concatenate(jinja, a->string, b->string, ret);
    if (op == JINJA_OP_ADD && is_sequence(a) && a->type == b->type) {
        JINJA_TRY(jinja_new_list(jinja, ret));
        ret->type = a->type;
        for (size_t i = 0; i < a->list->n + b->list->n; i++)
            JINJA_TRY(jinja_list_push(jinja, ret->list, i < a->list->n ? a->list->items[i] : b->list->items[i - a->list->n]));
        return 0;
    }
    if (op == JINJA_OP_MULTIPLY && (a->type == JINJA_STRING || is_sequence(a)) && is_integer(b))
        return repeat(jinja, a, integer_of(b), ret);
    if (op == JINJA_OP_MULTIPLY && (b->type == JINJA_STRING || is_sequence(b)) && is_integer(a))
        return repeat(jinja, b, integer_of(a), ret);
    return refuse_operands(jinja, a, b);
}

static int order_of(Jinja *jinja, const JinjaValue *a, const JinjaValue *b, int *ret)
{
    if (is_number(a) && is_number(b)) {
        double x = number_of(a), y = number_of(b);

        *ret = is_integer(a) && is_integer(b) ? (integer_of(a) > integer_of(b)) - (integer_of(a) < integer_of(b)) : (x > y) - (x < y);
        return 0;
    }
    if (a->type == JINJA_STRING && b->type == JINJA_STRING) {
        /* The order of UTF-8 bytes is that of code points. */
        int order = memcmp(a->string->data, b->string->data, MIN(a->string->n, b->string->n));

        *ret = order ? order : (a->string->n > b->string->n) - (a->string->n < b->string->n);
        return 0;
    }
    if (is_sequence(a) && a->type == b->type) {
        for (size_t i = 0; i < MIN(a->list->n, b->list->n); i++)
            if (!jinja_equal(&a->list->items[i], &b->list->items[i]))
                return order_of(jinja, &a->list->items[i], &b->list->items[i], ret);
        *ret = (a->list->n > b->list->n) - (a->list->n < b->list->n);
        return 0;
    }
    return refuse_operands(jinja, a, b);
}

static int contains(Jinja *jinja, const JinjaValue *needle, const JinjaValue *hay, bool *ret)
{
    if (hay->type == JINJA_STRING) {
        if (needle->type != JINJA_STRING)
            return refuse_operands(jinja, needle, hay);
        JINJA_TRY(jinja_charge(jinja, 1 + hay->string->n / 16));
        *ret = needle->string->n == 0 || memmem(hay->string->data, hay->string->n, needle->string->data, needle->string->n);
        return 0;
    }
    if (hay->type == JINJA_DICT) {
        JINJA_TRY(jinja_charge(jinja, 1 + hay->dict->keys.n));
        *ret = jinja_dict_find(hay->dict, needle) != NULL;
        return 0;
    }
    *ret = false;
    if (hay->type == JINJA_UNDEFINED)
        return 0;
    if (!is_sequence(hay))
        return refuse_operands(jinja, needle, hay);
    JINJA_TRY(jinja_charge(jinja, 1 + hay->list->n));
    for (size_t i = 0; i < hay->list->n && !*ret; i++)
        *ret = jinja_equal(needle, &hay->list->items[i]);
    return 0;
}

int jinja_compare(Jinja *jinja, JinjaOperator op, const JinjaValue *a, const JinjaValue *b, bool *ret)
{
    int order = 0;

    if (op == JINJA_OP_EQUAL || op == JINJA_OP_UNEQUAL) {
        JINJA_TRY(jinja_charge(jinja, 1 + (a->type == JINJA_STRING ? a->string->n / 16 : 0)));
        *ret = jinja_equal(a, b) == (op == JINJA_OP_EQUAL);
        return 0;
    }
    if (op == JINJA_OP_IN || op == JINJA_OP_NOT_IN) {
        JINJA_TRY(contains(jinja, a, b, ret));
        *ret ^= op == JINJA_OP_NOT_IN;
        return 0;
    }
    if ((a->type == JINJA_FLOAT && isnan(a->real)) || (b->type == JINJA_FLOAT && isnan(b->real))) {
        *ret = false;
        return 0;
    }
    JINJA_TRY(order_of(jinja, a, b, &order));
    *ret = op == JINJA_OP_LESS ? order < 0 : op == JINJA_OP_LESS_EQUAL ? order <= 0 : op == JINJA_OP_GREATER ? order > 0 : order >= 0;
    return 0;
}

/* ---- sequences ------------------------------------------------------------------------------------------------------------- */

static size_t character_size(const JinjaString *string, size_t at)
{
    uint32_t code_point;
    int size = utf8_decode(string->data + at, string->n - at, &code_point);

    return size > 0 ? (size_t)size : 1; /* strings are valid; 1 keeps a walk going all the same */
}

static int characters(Jinja *jinja, const JinjaString *string, JinjaList *list)
{
    for (size_t i = 0; i < string->n;) {
        size_t n = character_size(string, i);
        JinjaValue character;

        JINJA_TRY(jinja_value_of_string(jinja, jinja_string_slice(string, i, n), &character));
        JINJA_TRY(jinja_list_push(jinja, list, character));
        i += n;
    }
    return 0;
}

int jinja_iterate(Jinja *jinja, const JinjaValue *value, const JinjaList **ret)
{
    JinjaValue list;

    if (is_sequence(value)) {
        *ret = value->list;
        return 0;
    }
    if (value->type == JINJA_DICT) {
        *ret = &value->dict->keys;
        return 0;
    }
    if (value->type != JINJA_STRING && value->type != JINJA_UNDEFINED)
        return jinja_fail(jinja, "%s cannot be looped over", jinja_type_name(value));
    JINJA_TRY(jinja_new_list(jinja, &list));
    if (value->type == JINJA_STRING)
        JINJA_TRY(characters(jinja, value->string, list.list));
    *ret = list.list;
    return 0;
}

int jinja_length(Jinja *jinja, const JinjaValue *value, size_t *ret)
{
    size_t n = 0;

    if (value->type == JINJA_STRING) {
        JINJA_TRY(jinja_charge(jinja, value->string->n / 16));
        for (size_t i = 0; i < value->string->n; i++)
            n += ((unsigned char)value->string->data[i] & 0xc0) != 0x80;
    } else if (is_sequence(value))
        n = value->list->n;
    else if (value->type == JINJA_DICT)
        n = value->dict->keys.n;
    else if (value->type != JINJA_UNDEFINED)
        return jinja_fail(jinja, "%s has no length", jinja_type_name(value));
    *ret = n;
    return 0;
}

static int64_t clamp(int64_t value, int64_t lowest, int64_t highest)
{
    return value < lowest ? lowest : value > highest ? highest : value;
}

static int slice_bound(Jinja *jinja, const JinjaValue *bound, int64_t n, int64_t lowest, int64_t otherwise, int64_t *ret)
{
    int64_t at;

    if (bound->type == JINJA_NONE) {
        *ret = otherwise;
        return 0;
    }
    if (!is_integer(bound))
        return jinja_fail(jinja, "a slice goes by integers, not %s", jinja_type_name(bound));
    at = integer_of(bound);
    if (at < 0)
        at = at < -n ? lowest : at + n;
    *ret = clamp(at, lowest, n + lowest); /* lowest is -1 for backward slices, whose ends are one lower */
    return 0;
}

/* value[bounds[0]:bounds[1]:bounds[2]], none for what is left out. */
int jinja_slice(Jinja *jinja, const JinjaValue *value, const JinjaValue bounds[3], JinjaValue *ret)
{
    const JinjaList *list;
    JinjaBuffer buffer = {0};
    int64_t n, begin, end, step = 1;

    if (value->type != JINJA_STRING && !is_sequence(value))
        return jinja_fail(jinja, "%s cannot be sliced", jinja_type_name(value));
    JINJA_TRY(jinja_iterate(jinja, value, &list));
    n = (int64_t)list->n;
    if (bounds[2].type != JINJA_NONE) {
        if (!is_integer(&bounds[2]) || integer_of(&bounds[2]) == 0)
            return jinja_fail(jinja, "the step of a slice is an integer that is not 0");
        step = clamp(integer_of(&bounds[2]), -n - 1, n + 1);
    }
    JINJA_TRY(slice_bound(jinja, &bounds[0], n, step < 0 ? -1 : 0, step < 0 ? n - 1 : 0, &begin));
    JINJA_TRY(slice_bound(jinja, &bounds[1], n, step < 0 ? -1 : 0, step < 0 ? -1 : n, &end));
    JINJA_TRY(jinja_new_list(jinja, ret));
    ret->type = value->type == JINJA_TUPLE ? JINJA_TUPLE : JINJA_LIST;
    for (int64_t i = begin; step < 0 ? i > end : i < end; i += step)
        JINJA_TRY(jinja_list_push(jinja, ret->list, list->items[i]));
    if (value->type != JINJA_STRING)
        return 0;
    list = ret->list;
    for (size_t i = 0; i < list->n; i++)
        JINJA_TRY(jinja_buffer_add(jinja, &buffer, list->items[i].string));
    return jinja_buffer_value(jinja, &buffer, ret);
}

static int undefined_item(Jinja *jinja, const JinjaValue *value, const JinjaValue *key, JinjaValue *ret)
{
    if (value->type == JINJA_UNDEFINED && value->string)
        return jinja_fail(jinja, "'%.*s' is undefined", (int)MIN(value->string->n, (size_t)80), value->string->data);
    if (value->type == JINJA_UNDEFINED)
        return jinja_fail(jinja, "an undefined value has no items");
    *ret = (JinjaValue){.type = JINJA_UNDEFINED, .string = key->type == JINJA_STRING ? key->string : NULL};
    return 0;
}

/* value[key]; what is not there is undefined. */
int jinja_item(Jinja *jinja, const JinjaValue *value, const JinjaValue *key, JinjaValue *ret)
{
    const JinjaValue *found = NULL;

    if (value->type == JINJA_DICT || value->type == JINJA_NAMESPACE) {
        JINJA_TRY(jinja_charge(jinja, value->dict->keys.n / 8));
        found = jinja_dict_find(value->dict, key);
    } else if (is_integer(key) && (is_sequence(value) || value->type == JINJA_STRING)) {
        const JinjaList *list;
        int64_t at = integer_of(key);

        JINJA_TRY(jinja_iterate(jinja, value, &list));
        at += at < 0 ? (int64_t)list->n : 0;
        if (at >= 0 && (uint64_t)at < list->n)
            found = &list->items[at];
    } else if (key->type == JINJA_STRING)
        return jinja_attribute(jinja, value, key->string, ret);
    if (!found)
        return undefined_item(jinja, value, key, ret);
    *ret = *found;
    return 0;
}

static bool loop_attribute(const JinjaLoop *loop, const JinjaString *name, JinjaValue *ret)
{
    const JinjaList *items = loop->items;
    size_t i = loop->index0;

    if (jinja_is_text(name, "first") || jinja_is_text(name, "last"))
        *ret = (JinjaValue){.type = JINJA_BOOL, .boolean = jinja_is_text(name, "first") ? i == 0 : i + 1 == items->n};
    else if (jinja_is_text(name, "previtem") || jinja_is_text(name, "nextitem")) {
        bool next = jinja_is_text(name, "nextitem");

        *ret = (JinjaValue){.type = JINJA_UNDEFINED, .string = name};
        if (next ? i + 1 < items->n : i > 0)
            *ret = items->items[next ? i + 1 : i - 1];
    } else {
        size_t number;

        if (jinja_is_text(name, "index"))
            number = i + 1;
        else if (jinja_is_text(name, "index0"))
            number = i;
        else if (jinja_is_text(name, "revindex"))
            number = items->n - i;
        else if (jinja_is_text(name, "revindex0"))
            number = items->n - i - 1;
        else if (jinja_is_text(name, "length"))
            number = items->n;
        else if (jinja_is_text(name, "depth") || jinja_is_text(name, "depth0"))
            number = loop->depth + jinja_is_text(name, "depth");
        else
            return false;
        *ret = (JinjaValue){.type = JINJA_INT, .integer = (int64_t)number};
    }
    return true;
}

/* value.name */
int jinja_attribute(Jinja *jinja, const JinjaValue *value, const JinjaString *name, JinjaValue *ret)
{
    JinjaValue key = {.type = JINJA_STRING, .string = name};

    if (value->type == JINJA_DICT || value->type == JINJA_NAMESPACE)
        return jinja_item(jinja, value, &key, ret);
    if (value->type == JINJA_LOOP && loop_attribute(value->loop, name, ret))
        return 0;
    return undefined_item(jinja, value, &key, ret);
}
