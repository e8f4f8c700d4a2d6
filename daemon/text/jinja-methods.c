/* SPDX-License-Identifier: Apache-2.0 */
/* Methods of strings, lists and mappings that templates call.  Those that would change a value do not exist (as in Jinja's sandbox). */

#include "daemon/text/jinja-strings.h"
#include "daemon/text/utf8.h"

#include <locale.h>
#include <string.h>
#include <wctype.h>

/* ---- strings ---------------------------------------------------------------------------------------------------------------------- */

static bool strips(const JinjaString *characters, const char *character, size_t n)
{
    uint32_t code_point = 0;

    if (!characters)
        return utf8_decode(character, n, &code_point) > 0 && (utf8_is_space(code_point) || (code_point >= 0x1c && code_point <= 0x1f));
    /* A match within valid UTF-8 begins at a character. */
    return memmem(characters->data, characters->n, character, n) != NULL;
}

JinjaString jinja_strip(const JinjaString *string, const JinjaString *characters, bool left, bool right)
{
    size_t begin = 0, end = string->n;

    while (left && begin < end) {
        size_t n = 1;

        while (begin + n < end && ((unsigned char)string->data[begin + n] & 0xc0) == 0x80)
            n++;
        if (!strips(characters, string->data + begin, n))
            break;
        begin += n;
    }
    while (right && begin < end) {
        size_t last = end - 1;

        while (last > begin && ((unsigned char)string->data[last] & 0xc0) == 0x80)
            last--;
        if (!strips(characters, string->data + last, end - last))
            break;
        end = last;
    }
    return jinja_string_slice(string, begin, end - begin);
}

int jinja_replace(Jinja *jinja, const JinjaString *string, const JinjaString *from, const JinjaString *to, int64_t count, JinjaValue *ret)
{
    JinjaBuffer buffer = {0};
    JinjaString rest;
    size_t done = 0;

    if (from->n == 0)
        return jinja_fail(jinja, "replace: an empty text cannot be replaced");
    JINJA_TRY(jinja_charge(jinja, string->n / 16));
    for (; count != 0; count -= count > 0) {
        const char *found = memmem(string->data + done, string->n - done, from->data, from->n);
        JinjaString before;

        if (!found)
            break;
        before = jinja_string_slice(string, done, (size_t)(found - string->data) - done);
        JINJA_TRY(jinja_charge(jinja, 1));
        JINJA_TRY(jinja_buffer_add(jinja, &buffer, &before));
        JINJA_TRY(jinja_buffer_add(jinja, &buffer, to));
        done = (size_t)(found - string->data) + from->n;
    }
    rest = jinja_string_slice(string, done, string->n - done);
    JINJA_TRY(jinja_buffer_add(jinja, &buffer, &rest));
    return jinja_buffer_value(jinja, &buffer, ret);
}

int jinja_change_case(Jinja *jinja, const JinjaString *string, JinjaCase how, JinjaValue *ret)
{
    locale_t locale = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
    JinjaBuffer buffer = {0};
    bool in_word = false;
    int r = 0;

    if (!locale)
        return error_origin(-errno);
    for (size_t i = 0; r == 0 && i < string->n;) {
        uint32_t code_point = 0xfffd;
        int n = utf8_decode(string->data + i, string->n - i, &code_point);
        bool upper = how == JINJA_CASE_UPPER || (how != JINJA_CASE_LOWER && !in_word);
        JinjaString character = jinja_string_slice(string, i, (size_t)MAX(n, 1));
        char text[4];

        in_word = how == JINJA_CASE_TITLE ? iswalpha_l((wint_t)code_point, locale) : true;
        code_point = upper ? towupper_l((wint_t)code_point, locale) : towlower_l((wint_t)code_point, locale);
        i += character.n;
        /* The mapped character takes its tag from the original; the bytes of a character are tagged alike. */
        r = jinja_buffer_add_text(jinja, &buffer, text, (size_t)utf8_encode(code_point, text),
                                  character.tags ? character.tags[0] : character.trusted);
    }
    freelocale(locale);
    return r ? r : jinja_buffer_value(jinja, &buffer, ret);
}

static int push_slice(Jinja *jinja, JinjaList *list, const JinjaString *string, size_t begin, size_t n, bool front)
{
    JinjaValue part;

    JINJA_TRY(jinja_value_of_string(jinja, jinja_string_slice(string, begin, n), &part));
    JINJA_TRY(jinja_list_push(jinja, list, part));
    if (front) { /* rsplit finds the last part first */
        memmove(&list->items[1], &list->items[0], (list->n - 1) * sizeof(*list->items));
        list->items[0] = part;
        return jinja_charge(jinja, list->n / 8);
    }
    return 0;
}

static int split_at(Jinja *jinja, const JinjaString *string, const JinjaString *separator, int64_t limit, JinjaList *list)
{
    size_t done = 0;

    if (separator->n == 0)
        return jinja_fail(jinja, "split: the separator is empty");
    for (; limit != 0; limit -= limit > 0) {
        const char *found = memmem(string->data + done, string->n - done, separator->data, separator->n);

        if (!found)
            break;
        JINJA_TRY(push_slice(jinja, list, string, done, (size_t)(found - string->data) - done, false));
        done = (size_t)(found - string->data) + separator->n;
    }
    return push_slice(jinja, list, string, done, string->n - done, false);
}

static int split_at_last(Jinja *jinja, const JinjaString *string, const JinjaString *separator, int64_t limit, JinjaList *list)
{
    size_t end = string->n, at = end;

    if (separator->n == 0)
        return jinja_fail(jinja, "rsplit: the separator is empty");
    while (limit != 0 && at >= separator->n) {
        if (memcmp(string->data + at - separator->n, separator->data, separator->n) != 0) {
            at--;
            continue;
        }
        JINJA_TRY(push_slice(jinja, list, string, at, end - at, true));
        at -= separator->n;
        end = at;
        limit -= limit > 0;
    }
    return push_slice(jinja, list, string, 0, end, true);
}

/* Runs of blanks separate, and none stand at the ends, but behind the last part of a limited split. */
static int split_at_blanks(Jinja *jinja, const JinjaString *string, int64_t limit, JinjaList *list)
{
    JinjaString rest = jinja_strip(string, NULL, true, false);

    while (rest.n > 0) {
        size_t n = 0;

        if (limit == 0)
            return push_slice(jinja, list, &rest, 0, rest.n, false);
        while (n < rest.n) {
            size_t size = 1;

            while (n + size < rest.n && ((unsigned char)rest.data[n + size] & 0xc0) == 0x80)
                size++;
            if (strips(NULL, rest.data + n, size))
                break;
            n += size;
        }
        JINJA_TRY(push_slice(jinja, list, &rest, 0, n, false));
        rest = jinja_string_slice(&rest, n, rest.n - n);
        rest = jinja_strip(&rest, NULL, true, false);
        limit -= limit > 0;
    }
    return 0;
}

static int split_lines(Jinja *jinja, const JinjaString *string, JinjaList *list)
{
    size_t begin = 0;

    for (size_t i = 0; i < string->n; i++) {
        if (string->data[i] != '\n' && string->data[i] != '\r')
            continue;
        JINJA_TRY(push_slice(jinja, list, string, begin, i - begin, false));
        i += string->data[i] == '\r' && i + 1 < string->n && string->data[i + 1] == '\n';
        begin = i + 1;
    }
    return begin < string->n ? push_slice(jinja, list, string, begin, string->n - begin, false) : 0;
}

static int method_split(Jinja *jinja, const JinjaString *string, const JinjaString *name, const JinjaArguments *arguments, JinjaValue *ret)
{
    const JinjaValue *separator = jinja_argument(arguments, 0, "sep"), *limit = jinja_argument(arguments, 1, "maxsplit");
    int64_t n = limit && limit->type == JINJA_INT ? limit->integer : -1;

    JINJA_TRY(jinja_new_list(jinja, ret));
    JINJA_TRY(jinja_charge(jinja, string->n / 16));
    if (jinja_is_text(name, "splitlines"))
        return split_lines(jinja, string, ret->list);
    if (!separator || separator->type == JINJA_NONE) {
        if (jinja_is_text(name, "rsplit") && n >= 0)
            return jinja_fail(jinja, "rsplit: a limit without a separator is not supported");
        return split_at_blanks(jinja, string, n, ret->list);
    }
    if (separator->type != JINJA_STRING)
        return jinja_fail(jinja, "split: the separator is %s", jinja_type_name(separator));
    return (jinja_is_text(name, "split") ? split_at : split_at_last)(jinja, string, separator->string, n, ret->list);
}

static bool has_end(const JinjaString *string, const JinjaString *end, bool at_start)
{
    return end->n <= string->n && memcmp(string->data + (at_start ? 0 : string->n - end->n), end->data, end->n) == 0;
}

static int method_ends(Jinja *jinja, const JinjaString *string, bool start, const JinjaArguments *arguments, JinjaValue *ret)
{
    const JinjaValue *end = jinja_argument(arguments, 0, "prefix");

    *ret = (JinjaValue){.type = JINJA_BOOL, .boolean = false};
    if (end && end->type == JINJA_STRING)
        ret->boolean = has_end(string, end->string, start);
    else if (end && end->type == JINJA_TUPLE) {
        for (size_t i = 0; i < end->list->n; i++)
            ret->boolean |= end->list->items[i].type == JINJA_STRING && has_end(string, end->list->items[i].string, start);
    } else
        return jinja_fail(jinja, "%s: needs a string", start ? "startswith" : "endswith");
    return 0;
}

static int method_remove_end(Jinja *jinja, const JinjaString *string, bool start, const JinjaArguments *arguments, JinjaValue *ret)
{
    const JinjaString *end;
    size_t n;

    JINJA_TRY(jinja_argument_string(jinja, arguments, 0, "prefix", &end));
    n = has_end(string, end, start) ? end->n : 0;
    return jinja_value_of_string(jinja, jinja_string_slice(string, start ? n : 0, string->n - n), ret);
}

/* find, rfind, index, count: positions in characters. */
static int method_find(Jinja *jinja, const JinjaString *string, const JinjaString *name, const JinjaArguments *arguments, JinjaValue *ret)
{
    const JinjaString *needle;
    bool counts = jinja_is_text(name, "count"), last = jinja_is_text(name, "rfind");
    const char *found = NULL;
    int64_t n = 0;

    JINJA_TRY(jinja_argument_string(jinja, arguments, 0, "sub", &needle));
    JINJA_TRY(jinja_charge(jinja, string->n / 16));
    if (arguments->n > 1 || (needle->n == 0 && (counts || last)))
        return jinja_fail(jinja, "%.*s: these arguments are not supported", (int)name->n, name->data);
    for (size_t at = 0; at <= string->n;) {
        const char *next = memmem(string->data + at, string->n - at, needle->data, needle->n);

        if (!next)
            break;
        found = next;
        n++;
        if (!counts && !last)
            break;
        at = (size_t)(next - string->data) + (counts ? needle->n : 1);
    }
    if (!found && jinja_is_text(name, "index"))
        return jinja_fail(jinja, "index: the text is not there");
    *ret = (JinjaValue){.type = JINJA_INT, .integer = counts ? n : found ? 0 : -1};
    for (const char *c = string->data; !counts && found && c < found; c++)
        ret->integer += ((unsigned char)*c & 0xc0) != 0x80;
    return 0;
}

static int method_join(Jinja *jinja, const JinjaString *string, const JinjaArguments *arguments, JinjaValue *ret)
{
    const JinjaValue *value = jinja_argument(arguments, 0, "iterable");
    const JinjaList *items;
    JinjaBuffer buffer = {0};

    if (!value)
        return jinja_fail(jinja, "join: needs a sequence");
    JINJA_TRY(jinja_iterate(jinja, value, &items));
    for (size_t i = 0; i < items->n; i++) {
        if (items->items[i].type != JINJA_STRING)
            return jinja_fail(jinja, "join: %s is not a string", jinja_type_name(&items->items[i]));
        if (i)
            JINJA_TRY(jinja_buffer_add(jinja, &buffer, string));
        JINJA_TRY(jinja_buffer_add(jinja, &buffer, items->items[i].string));
    }
    return jinja_buffer_value(jinja, &buffer, ret);
}

static bool is_all(const JinjaString *string, int (*is)(wint_t, locale_t), locale_t locale)
{
    bool all = string->n > 0;

    for (size_t i = 0; i < string->n && all;) {
        uint32_t code_point = 0xfffd;
        int n = utf8_decode(string->data + i, string->n - i, &code_point);

        all = is((wint_t)code_point, locale);
        i += (size_t)MAX(n, 1);
    }
    return all;
}

static int method_is(const JinjaString *string, const JinjaString *name, JinjaValue *ret)
{
    locale_t locale = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
    bool all;

    if (!locale)
        return error_origin(-errno);
    if (jinja_is_text(name, "isspace")) {
        JinjaString rest = jinja_strip(string, NULL, true, false);

        all = string->n > 0 && rest.n == 0;
    } else
        all = is_all(string, jinja_is_text(name, "isdigit") ? iswdigit_l : jinja_is_text(name, "isalpha") ? iswalpha_l : iswalnum_l, locale);
    freelocale(locale);
    *ret = (JinjaValue){.type = JINJA_BOOL, .boolean = all};
    return 0;
}

/* "{} and {}": plain fields only. */
static int method_format(Jinja *jinja, const JinjaString *string, const JinjaArguments *arguments, JinjaValue *ret)
{
    JinjaBuffer buffer = {0};
    size_t next = 0;

    for (size_t i = 0; i < string->n; i++) {
        JinjaString character = jinja_string_slice(string, i, 1);
        char c = string->data[i], after = i + 1 < string->n ? string->data[i + 1] : 0;

        if ((c == '{' || c == '}') && after == c) {
            JINJA_TRY(jinja_buffer_add(jinja, &buffer, &character));
            i++;
        } else if (c == '{' && after == '}' && next < arguments->n && !arguments->names[next]) {
            JINJA_TRY(jinja_print(jinja, &arguments->values[next++], &buffer));
            i++;
        } else if (c == '{' || c == '}')
            return jinja_fail(jinja, "format: only plain {} fields with an argument each are supported");
        else
            JINJA_TRY(jinja_buffer_add(jinja, &buffer, &character));
    }
    return jinja_buffer_value(jinja, &buffer, ret);
}

static int method_strip(Jinja *jinja, const JinjaString *string, const JinjaString *name, const JinjaArguments *arguments, JinjaValue *ret)
{
    const JinjaValue *characters = jinja_argument(arguments, 0, "chars");

    if (characters && characters->type != JINJA_STRING && characters->type != JINJA_NONE)
        return jinja_fail(jinja, "strip: characters are given by a string");
    return jinja_value_of_string(jinja,
                                 jinja_strip(string, characters && characters->type == JINJA_STRING ? characters->string : NULL,
                                             !jinja_is_text(name, "rstrip"), !jinja_is_text(name, "lstrip")),
                                 ret);
}

static int method_replace(Jinja *jinja, const JinjaString *string, const JinjaArguments *arguments, JinjaValue *ret)
{
    const JinjaValue *count = jinja_argument(arguments, 2, "count");
    const JinjaString *from, *to;

    JINJA_TRY(jinja_argument_string(jinja, arguments, 0, "old", &from));
    JINJA_TRY(jinja_argument_string(jinja, arguments, 1, "new", &to));
    return jinja_replace(jinja, string, from, to, count && count->type == JINJA_INT ? count->integer : -1, ret);
}

static int string_method(Jinja *jinja, const JinjaString *string, const JinjaString *name, const JinjaArguments *arguments, JinjaValue *ret)
{
    static const char *const cases[] = {"upper", "lower", "capitalize", "title"};

    for (size_t i = 0; i < N_ELEMENTS(cases); i++)
        if (jinja_is_text(name, cases[i]))
            return jinja_change_case(jinja, string, (JinjaCase)i, ret);
    if (jinja_is_text(name, "strip") || jinja_is_text(name, "lstrip") || jinja_is_text(name, "rstrip"))
        return method_strip(jinja, string, name, arguments, ret);
    if (jinja_is_text(name, "startswith") || jinja_is_text(name, "endswith"))
        return method_ends(jinja, string, jinja_is_text(name, "startswith"), arguments, ret);
    if (jinja_is_text(name, "removeprefix") || jinja_is_text(name, "removesuffix"))
        return method_remove_end(jinja, string, jinja_is_text(name, "removeprefix"), arguments, ret);
    if (jinja_is_text(name, "replace"))
        return method_replace(jinja, string, arguments, ret);
    if (jinja_is_text(name, "join"))
        return method_join(jinja, string, arguments, ret);
    if (jinja_is_text(name, "format"))
        return method_format(jinja, string, arguments, ret);
    if (jinja_is_text(name, "split") || jinja_is_text(name, "rsplit") || jinja_is_text(name, "splitlines"))
        return method_split(jinja, string, name, arguments, ret);
    if (name->n > 2 && memcmp(name->data, "is", 2) == 0)
        return method_is(string, name, ret);
    return method_find(jinja, string, name, arguments, ret);
}

/* ---- mappings and lists ------------------------------------------------------------------------------------------------------------ */

/* The pairs of a mapping as tuples. */
static int pairs_of(Jinja *jinja, const JinjaDict *dict, JinjaList *list)
{
    for (size_t i = 0; i < dict->keys.n; i++) {
        JinjaValue pair;

        JINJA_TRY(jinja_new_list(jinja, &pair));
        pair.type = JINJA_TUPLE;
        JINJA_TRY(jinja_list_push(jinja, pair.list, dict->keys.items[i]));
        JINJA_TRY(jinja_list_push(jinja, pair.list, dict->values.items[i]));
        JINJA_TRY(jinja_list_push(jinja, list, pair));
    }
    return 0;
}

static int dict_method(Jinja *jinja, const JinjaDict *dict, const JinjaString *name, const JinjaArguments *arguments, JinjaValue *ret)
{
    const JinjaValue *key = jinja_argument(arguments, 0, "key"), *otherwise = jinja_argument(arguments, 1, "default"), *found;
    bool keys = jinja_is_text(name, "keys");

    if (jinja_is_text(name, "get")) {
        if (!key)
            return jinja_fail(jinja, "get: needs a key");
        found = jinja_dict_find(dict, key);
        *ret = found ? *found : otherwise ? *otherwise : (JinjaValue){.type = JINJA_NONE};
        return 0;
    }
    JINJA_TRY(jinja_new_list(jinja, ret));
    if (jinja_is_text(name, "items"))
        return pairs_of(jinja, dict, ret->list);
    for (size_t i = 0; i < dict->keys.n; i++)
        JINJA_TRY(jinja_list_push(jinja, ret->list, keys ? dict->keys.items[i] : dict->values.items[i]));
    return 0;
}

static int list_method(Jinja *jinja, const JinjaList *list, const JinjaString *name, const JinjaArguments *arguments, JinjaValue *ret)
{
    const JinjaValue *value = jinja_argument(arguments, 0, "value");
    int64_t n = 0;

    if (!value)
        return jinja_fail(jinja, "%.*s: needs a value", (int)name->n, name->data);
    JINJA_TRY(jinja_charge(jinja, list->n));
    for (size_t i = 0; i < list->n; i++) {
        if (!jinja_equal(&list->items[i], value))
            continue;
        n++;
        if (jinja_is_text(name, "index")) {
            *ret = (JinjaValue){.type = JINJA_INT, .integer = (int64_t)i};
            return 0;
        }
    }
    if (jinja_is_text(name, "index"))
        return jinja_fail(jinja, "index: the value is not in the list");
    *ret = (JinjaValue){.type = JINJA_INT, .integer = n};
    return 0;
}

static bool is_listed(const char *names, const JinjaString *name)
{
    while (*names) {
        size_t n = strcspn(names, " ");

        if (n == name->n && memcmp(names, name->data, n) == 0)
            return true;
        names += n;
        names += strspn(names, " ");
    }
    return false;
}

bool jinja_method_exists(const JinjaValue *value, const JinjaString *name)
{
    if (value->type == JINJA_STRING)
        return is_listed("upper lower capitalize title strip lstrip rstrip startswith endswith removeprefix removesuffix replace join format "
                         "split rsplit splitlines isspace isdigit isalpha isalnum find rfind index count",
                         name);
    if (value->type == JINJA_DICT)
        return is_listed("get items keys values", name);
    return (value->type == JINJA_LIST || value->type == JINJA_TUPLE) && is_listed("index count", name);
}

/* Only methods that exist come here. */
int jinja_method(Jinja *jinja, const JinjaValue *value, const JinjaString *name, const JinjaArguments *arguments, JinjaValue *ret)
{
    if (value->type == JINJA_STRING)
        return string_method(jinja, value->string, name, arguments, ret);
    if (value->type == JINJA_DICT)
        return dict_method(jinja, value->dict, name, arguments, ret);
    return list_method(jinja, value->list, name, arguments, ret);
}
