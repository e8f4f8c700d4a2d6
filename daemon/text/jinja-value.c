/* SPDX-License-Identifier: Apache-2.0 */
/* The arena, strings with trust tags, lists and dicts. */

#include "daemon/text/jinja.h"

#include <stdarg.h>
#include <string.h>

#define JINJA_CHUNK_BYTES 16384
#define JINJA_NESTING_MAX 64

typedef struct JinjaChunk {
    struct JinjaChunk *next;
    size_t used, size;
    max_align_t data[];
} JinjaChunk;

void jinja_arena_deinit(JinjaArena *arena)
{
    while (arena->chunks) {
        JinjaChunk *next = arena->chunks->next;

        free(arena->chunks);
        arena->chunks = next;
    }
    arena->used_bytes = 0;
}

void jinja_note_error(Jinja *jinja, uint32_t line, const char *format, ...)
{
    char text[400];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    (void)error_detail_set(jinja->reterr, CHAT_TEMPLATE_E_FAILED, "template line %u: %s", line, text);
}

void *jinja_alloc(Jinja *jinja, size_t size)
{
    JinjaArena *arena = jinja->arena;
    JinjaChunk *chunk = arena->chunks;
    void *place;

    if (size > arena->limit_bytes) {
        arena->full = true;
        return NULL;
    }
    size = (size + 15) & ~(size_t)15;
    if (!chunk || chunk->size - chunk->used < size) {
        size_t chunk_bytes = MAX(size, (size_t)JINJA_CHUNK_BYTES);

        arena->full = arena->used_bytes + chunk_bytes > arena->limit_bytes;
        if (arena->full)
            return NULL;
        chunk = calloc(1, sizeof(*chunk) + chunk_bytes);
        if (!chunk)
            return NULL;
        chunk->size = chunk_bytes;
        arena->used_bytes += chunk_bytes;
        if (arena->chunks && size > JINJA_CHUNK_BYTES / 2) {
            /* Large ones go behind the chunk in use, which may have room for many small ones yet. */
            chunk->next = arena->chunks->next;
            arena->chunks->next = chunk;
        } else {
            chunk->next = arena->chunks;
            arena->chunks = chunk;
        }
    }
    place = (char *)chunk->data + chunk->used;
    chunk->used += size;
    return place;
}

bool jinja_arena_is_full(const Jinja *jinja)
{
    return jinja->arena->full;
}

int jinja_charge(Jinja *jinja, size_t steps)
{
    if (steps > jinja->max_steps - jinja->steps)
        return jinja_fail(jinja, "the template takes more than %llu steps", (unsigned long long)jinja->max_steps);
    jinja->steps += steps;
    return 0;
}

int jinja_value_of_string(Jinja *jinja, JinjaString string, JinjaValue *ret)
{
    JinjaString *copy = jinja_alloc(jinja, sizeof(*copy));

    if (!copy)
        return jinja_alloc_failed(jinja);
    *copy = string;
    *ret = (JinjaValue){.type = JINJA_STRING, .string = copy};
    return 0;
}

int jinja_string_new(Jinja *jinja, const char *data, size_t n, bool trusted, JinjaValue *ret)
{
    char *copy = jinja_alloc(jinja, n + 1);

    if (!copy)
        return jinja_alloc_failed(jinja);
    if (n)
        memcpy(copy, data, n);
    return jinja_value_of_string(jinja, (JinjaString){copy, n, NULL, trusted}, ret);
}

JinjaString jinja_string_slice(const JinjaString *string, size_t begin, size_t n)
{
    return (JinjaString){string->data + begin, n, string->tags ? string->tags + begin : NULL, string->trusted};
}

static int jinja_buffer_reserve(Jinja *jinja, JinjaBuffer *buffer, size_t n)
{
    size_t capacity = MAX(2 * buffer->capacity, (size_t)64);
    char *data;
    uint8_t *tags;

    JINJA_TRY(jinja_charge(jinja, n / 16));
    if (n <= buffer->capacity - buffer->n)
        return 0;
    if (n > SIZE_MAX / 8)
        return jinja_fail(jinja, "a text is too long");
    capacity = MAX(capacity, buffer->n + n);
    data = jinja_alloc(jinja, capacity);
    tags = jinja_alloc(jinja, capacity);
    if (!data || !tags)
        return jinja_alloc_failed(jinja);
    if (buffer->n) {
        memcpy(data, buffer->data, buffer->n);
        memcpy(tags, buffer->tags, buffer->n);
    }
    buffer->data = data;
    buffer->tags = tags;
    buffer->capacity = capacity;
    return 0;
}

int jinja_buffer_add(Jinja *jinja, JinjaBuffer *buffer, const JinjaString *string)
{
    if (string->n == 0)
        return 0;
    JINJA_TRY(jinja_buffer_reserve(jinja, buffer, string->n));
    memcpy(buffer->data + buffer->n, string->data, string->n);
    if (string->tags)
        memcpy(buffer->tags + buffer->n, string->tags, string->n);
    else
        memset(buffer->tags + buffer->n, string->trusted, string->n);
    buffer->n += string->n;
    return 0;
}

int jinja_buffer_add_text(Jinja *jinja, JinjaBuffer *buffer, const char *text, size_t n, bool trusted)
{
    JinjaString string = {text, n, NULL, trusted};

    return jinja_buffer_add(jinja, buffer, &string);
}

/* The text so far; later additions to the buffer do not change it. */
int jinja_buffer_value(Jinja *jinja, const JinjaBuffer *buffer, JinjaValue *ret)
{
    JinjaString string = {buffer->n ? buffer->data : "", buffer->n, NULL, buffer->n == 0 || buffer->tags[0]};

    if (buffer->n && memchr(buffer->tags, !string.trusted, buffer->n))
        string.tags = buffer->tags;
    return jinja_value_of_string(jinja, string, ret);
}

static int jinja_list_note_nesting(Jinja *jinja, JinjaList *list, const JinjaValue *value)
{
    unsigned nesting = 0;

    if (value->type == JINJA_LIST || value->type == JINJA_TUPLE)
        nesting = value->list->nesting + 1;
    else if (value->type == JINJA_DICT)
        nesting = value->dict->values.nesting + 1;
    if (nesting > JINJA_NESTING_MAX)
        return jinja_fail(jinja, "a value is nested too deeply");
    list->nesting = MAX(list->nesting, nesting);
    return 0;
}

int jinja_list_push(Jinja *jinja, JinjaList *list, JinjaValue value)
{
    JINJA_TRY(jinja_charge(jinja, 1));
    JINJA_TRY(jinja_list_note_nesting(jinja, list, &value));
    if (list->n == list->capacity) {
        size_t capacity = MAX(2 * list->capacity, (size_t)4);
        JinjaValue *items = jinja_alloc(jinja, capacity * sizeof(*items));

        if (!items)
            return jinja_alloc_failed(jinja);
        if (list->n)
            memcpy(items, list->items, list->n * sizeof(*items));
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->n++] = value;
    return 0;
}

const JinjaValue *jinja_dict_find(const JinjaDict *dict, const JinjaValue *key)
{
    for (size_t i = 0; i < dict->keys.n; i++)
        if (jinja_equal(&dict->keys.items[i], key))
            return &dict->values.items[i];
    return NULL;
}

const JinjaValue *jinja_dict_find_text(const JinjaDict *dict, const char *key)
{
    JinjaString string = {key, strlen(key), NULL, true};
    JinjaValue value = {.type = JINJA_STRING, .string = &string};

    return jinja_dict_find(dict, &value);
}

int jinja_dict_set(Jinja *jinja, JinjaDict *dict, JinjaValue key, JinjaValue value)
{
    JINJA_TRY(jinja_charge(jinja, 1 + dict->keys.n / 8));
    if (key.type >= JINJA_LIST && key.type != JINJA_TUPLE)
        return jinja_fail(jinja, "%s cannot be a key", jinja_type_name(&key));
    for (size_t i = 0; i < dict->keys.n; i++)
        if (jinja_equal(&dict->keys.items[i], &key)) {
            dict->values.items[i] = value;
            return jinja_list_note_nesting(jinja, &dict->values, &value);
        }
    JINJA_TRY(jinja_list_push(jinja, &dict->keys, key));
    return jinja_list_push(jinja, &dict->values, value);
}

int jinja_new_list(Jinja *jinja, JinjaValue *ret)
{
    JinjaList *list = jinja_alloc(jinja, sizeof(*list));

    if (!list)
        return jinja_alloc_failed(jinja);
    *ret = (JinjaValue){.type = JINJA_LIST, .list = list};
    return 0;
}

int jinja_new_dict(Jinja *jinja, JinjaValue *ret)
{
    JinjaDict *dict = jinja_alloc(jinja, sizeof(*dict));

    if (!dict)
        return jinja_alloc_failed(jinja);
    *ret = (JinjaValue){.type = JINJA_DICT, .dict = dict};
    return 0;
}

bool jinja_truth(const JinjaValue *value)
{
    switch (value->type) {
    case JINJA_UNDEFINED:
    case JINJA_NONE:
        return false;
    case JINJA_BOOL:
        return value->boolean;
    case JINJA_INT:
        return value->integer != 0;
    case JINJA_FLOAT:
        return value->real != 0;
    case JINJA_STRING:
        return value->string->n > 0;
    case JINJA_LIST:
    case JINJA_TUPLE:
        return value->list->n > 0;
    case JINJA_DICT:
        return value->dict->keys.n > 0;
    case JINJA_NAMESPACE:
    case JINJA_LOOP:
    case JINJA_MACRO:
    case JINJA_FUNCTION:
        return true;
    }
    return false;
}

static bool jinja_is_number(const JinjaValue *value)
{
    return value->type == JINJA_BOOL || value->type == JINJA_INT || value->type == JINJA_FLOAT;
}

static double jinja_number(const JinjaValue *value)
{
    return value->type == JINJA_FLOAT ? value->real : value->type == JINJA_INT ? (double)value->integer : value->boolean;
}

static bool jinja_lists_equal(const JinjaList *a, const JinjaList *b)
{
    if (a->n != b->n)
        return false;
    for (size_t i = 0; i < a->n; i++)
        if (!jinja_equal(&a->items[i], &b->items[i]))
            return false;
    return true;
}

static bool jinja_dicts_equal(const JinjaDict *a, const JinjaDict *b)
{
    if (a->keys.n != b->keys.n)
        return false;
    for (size_t i = 0; i < a->keys.n; i++) {
        const JinjaValue *other = jinja_dict_find(b, &a->keys.items[i]);

        if (!other || !jinja_equal(&a->values.items[i], other))
            return false;
    }
    return true;
}

bool jinja_equal(const JinjaValue *a, const JinjaValue *b)
{
    if (jinja_is_number(a) && jinja_is_number(b)) {
        if (a->type == JINJA_INT && b->type == JINJA_INT)
            return a->integer == b->integer;
        return jinja_number(a) == jinja_number(b);
    }
    if (a->type != b->type)
        return false;
    switch (a->type) {
    case JINJA_UNDEFINED:
    case JINJA_NONE:
        return true;
    case JINJA_STRING:
    case JINJA_FUNCTION:
        return a->string->n == b->string->n && memcmp(a->string->data, b->string->data, a->string->n) == 0;
    case JINJA_LIST:
    case JINJA_TUPLE:
        return jinja_lists_equal(a->list, b->list);
    case JINJA_DICT:
        return jinja_dicts_equal(a->dict, b->dict);
    case JINJA_NAMESPACE:
        return a->dict == b->dict;
    case JINJA_LOOP:
        return a->loop == b->loop;
    case JINJA_MACRO:
        return a->macro == b->macro;
    case JINJA_BOOL:
    case JINJA_INT:
    case JINJA_FLOAT:
        break; /* numbers: above */
    }
    return false;
}

bool jinja_is_text(const JinjaString *string, const char *text)
{
    return strlen(text) == string->n && memcmp(text, string->data, string->n) == 0;
}

const char *jinja_type_name(const JinjaValue *value)
{
    static const char *const names[] = {"an undefined value", "none",  "a boolean",   "an integer",     "a float",   "a string",  "a list",
                                        "a tuple",            "a mapping", "a namespace", "a loop variable", "a macro", "a function"};

    return names[value->type];
}
