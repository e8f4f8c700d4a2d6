#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inside of chat templates: the subset of Jinja that they use, as Transformers sets it up (trim_blocks, lstrip_blocks, loop controls).
 * chat-template.h is the outside.
 *
 * Life: everything lives in an arena with a byte limit, the tree in the template's, values in the one of the render; nothing is freed alone.
 * Lists and dicts are never changed once built (a template can change namespaces only).
 * Trust: each byte of a string is tagged by whether it came from the template; a string with both kinds carries a tag a byte.
 * Results: 0, -ENOMEM, or a ChatTemplateError with the detail set; JINJA_TRY passes them up.
 * Cost: every evaluated node, element and 16 bytes copied is a step; steps, nesting and arena bytes are bounded.
 */

#include "daemon/text/chat-template.h"

#define JINJA_TRY(call)                                                                                      \
    do {                                                                                                     \
        int _result = (call);                                                                                \
        if (_result)                                                                                         \
            return _result;                                                                                  \
    } while (0)

typedef struct JinjaArena {
    struct JinjaChunk *chunks;
    size_t used_bytes, limit_bytes;
    bool full; /* an allocation was refused by the limit */
} JinjaArena;
#define JINJA_ARENA_NULL(limit) ((JinjaArena){NULL, 0, (limit), false})
void jinja_arena_deinit(JinjaArena *arena);

typedef enum JinjaType {
    JINJA_UNDEFINED, JINJA_NONE, JINJA_BOOL, JINJA_INT, JINJA_FLOAT, JINJA_STRING, JINJA_LIST, JINJA_TUPLE, JINJA_DICT,
    JINJA_NAMESPACE, JINJA_LOOP, JINJA_MACRO, JINJA_FUNCTION,
} JinjaType;

typedef struct JinjaString {
    const char *data; /* valid UTF-8 */
    size_t n;
    const uint8_t *tags; /* one a byte, 1: trusted; NULL: all as @trusted */
    bool trusted;
} JinjaString;

typedef struct JinjaValue {
    JinjaType type;
    union {
        bool boolean;
        int64_t integer;
        double real;
        const JinjaString *string; /* of undefined: its name, or NULL */
        struct JinjaList *list;
        struct JinjaDict *dict; /* also of namespaces */
        struct JinjaLoop *loop;
        struct JinjaMacro *macro;
    };
} JinjaValue;

typedef struct JinjaList {
    JinjaValue *items;
    size_t n, capacity;
    unsigned nesting; /* of what is inside: bounds every recursion over values */
} JinjaList;

typedef struct JinjaDict {
    JinjaList keys, values;
} JinjaDict;

typedef struct JinjaLoop {
    const JinjaList *items;
    size_t index0, depth;
    JinjaList *changed; /* arguments of the last loop.changed() */
} JinjaLoop;

typedef enum JinjaNodeKind {
    JINJA_NODE_CONST, JINJA_NODE_NAME, JINJA_NODE_LIST, JINJA_NODE_TUPLE, JINJA_NODE_DICT, JINJA_NODE_ATTRIBUTE, JINJA_NODE_ITEM,
    JINJA_NODE_SLICE, JINJA_NODE_CALL, JINJA_NODE_FILTER, JINJA_NODE_TEST, JINJA_NODE_NEGATE, JINJA_NODE_NOT, JINJA_NODE_AND,
    JINJA_NODE_OR, JINJA_NODE_BINARY, JINJA_NODE_COMPARE, JINJA_NODE_CONDITIONAL,
    JINJA_NODE_BLOCK, JINJA_NODE_TEXT, JINJA_NODE_OUTPUT, JINJA_NODE_IF, JINJA_NODE_FOR, JINJA_NODE_SET, JINJA_NODE_SET_BLOCK,
    JINJA_NODE_MACRO, JINJA_NODE_CALL_BLOCK, JINJA_NODE_FILTER_BLOCK, JINJA_NODE_WITH, JINJA_NODE_BREAK, JINJA_NODE_CONTINUE,
} JinjaNodeKind;

typedef enum JinjaOperator {
    JINJA_OP_ADD, JINJA_OP_SUBTRACT, JINJA_OP_MULTIPLY, JINJA_OP_DIVIDE, JINJA_OP_FLOOR_DIVIDE, JINJA_OP_MODULO, JINJA_OP_POWER,
    JINJA_OP_CONCAT,
    JINJA_OP_EQUAL, JINJA_OP_UNEQUAL, JINJA_OP_LESS, JINJA_OP_LESS_EQUAL, JINJA_OP_GREATER, JINJA_OP_GREATER_EQUAL, JINJA_OP_IN,
    JINJA_OP_NOT_IN,
} JinjaOperator;

typedef struct JinjaNode {
    JinjaNodeKind kind;
    JinjaOperator op;
    uint32_t line;
    bool negate;      /* "is not" */
    JinjaValue value; /* constants; names of variables, attributes, filters, tests, macros; text */
    struct JinjaNode *a, *b, *c, *d, *body; /* by kind: see the parser */
    struct JinjaNode **items; /* elements, arguments, statements, operands */
    const JinjaString **names; /* of items: keyword names (NULL: positional), parameters */
    size_t n_items, capacity;
} JinjaNode;

typedef struct JinjaScope {
    struct JinjaScope *parent;
    JinjaDict variables;
} JinjaScope;

typedef struct JinjaMacro {
    const JinjaNode *node; /* MACRO or CALL_BLOCK */
    JinjaScope *scope;
} JinjaMacro;

/* Text with tags, growing in the arena. */
typedef struct JinjaBuffer {
    char *data;
    uint8_t *tags;
    size_t n, capacity;
} JinjaBuffer;

/* One parse or one render. */
typedef struct Jinja {
    JinjaArena *arena;
    ErrorDetail *reterr;
    uint32_t line; /* of what is being evaluated */
    unsigned depth;
    uint64_t steps, max_steps;
    JinjaScope *scope, *globals;
    JinjaBuffer *output;
    size_t loop_depth;
} Jinja;

typedef struct JinjaArguments {
    const JinjaValue *values;
    const JinjaString *const *names; /* NULL: positional; positional ones come first */
    size_t n;
} JinjaArguments;

/* jinja-value.c */
void jinja_note_error(Jinja *jinja, uint32_t line, const char *format, ...) _printf_(3, 4);
/* "template line N: …"; macros, so that the compiler sees that they do not return 0. */
#define jinja_fail(jinja, ...)               (jinja_note_error((jinja), (jinja)->line, __VA_ARGS__), CHAT_TEMPLATE_E_FAILED)
#define jinja_syntax_error(jinja, line, ...) (jinja_note_error((jinja), (line), __VA_ARGS__), CHAT_TEMPLATE_E_SYNTAX)
void *jinja_alloc(Jinja *jinja, size_t size); /* zeroed; NULL: jinja_alloc_failed() says why */
bool jinja_arena_is_full(const Jinja *jinja);
#define jinja_alloc_failed(jinja)                                                                            \
    (jinja_arena_is_full(jinja)                                                                              \
         ? jinja_fail((jinja), "the template needs more than %zu MiB of memory", (jinja)->arena->limit_bytes >> 20) \
         : -ENOMEM)
int jinja_charge(Jinja *jinja, size_t steps);
int jinja_string_new(Jinja *jinja, const char *data, size_t n, bool trusted, JinjaValue *ret);
JinjaString jinja_string_slice(const JinjaString *string, size_t begin, size_t n);
int jinja_value_of_string(Jinja *jinja, JinjaString string, JinjaValue *ret);
int jinja_buffer_add(Jinja *jinja, JinjaBuffer *buffer, const JinjaString *string);
int jinja_buffer_add_text(Jinja *jinja, JinjaBuffer *buffer, const char *text, size_t n, bool trusted);
int jinja_buffer_value(Jinja *jinja, const JinjaBuffer *buffer, JinjaValue *ret);
int jinja_list_push(Jinja *jinja, JinjaList *list, JinjaValue value);
int jinja_dict_set(Jinja *jinja, JinjaDict *dict, JinjaValue key, JinjaValue value);
const JinjaValue *jinja_dict_find(const JinjaDict *dict, const JinjaValue *key);
const JinjaValue *jinja_dict_find_text(const JinjaDict *dict, const char *key);
int jinja_new_list(Jinja *jinja, JinjaValue *ret);
int jinja_new_dict(Jinja *jinja, JinjaValue *ret);
bool jinja_truth(const JinjaValue *value);
bool jinja_equal(const JinjaValue *a, const JinjaValue *b);
bool jinja_is_text(const JinjaString *string, const char *text);
const char *jinja_type_name(const JinjaValue *value);
/* jinja-text.c: values as text */
int jinja_print(Jinja *jinja, const JinjaValue *value, JinjaBuffer *buffer);
int jinja_to_string(Jinja *jinja, const JinjaValue *value, const JinjaString **ret);
int jinja_print_json(Jinja *jinja, const JinjaValue *value, int indent, int level, JinjaBuffer *buffer);
/* jinja-operators.c */
int jinja_binary(Jinja *jinja, JinjaOperator op, const JinjaValue *a, const JinjaValue *b, JinjaValue *ret);
int jinja_compare(Jinja *jinja, JinjaOperator op, const JinjaValue *a, const JinjaValue *b, bool *ret);
int jinja_iterate(Jinja *jinja, const JinjaValue *value, const JinjaList **ret);
int jinja_length(Jinja *jinja, const JinjaValue *value, size_t *ret);
int jinja_slice(Jinja *jinja, const JinjaValue *value, const JinjaValue bounds[3], JinjaValue *ret);
int jinja_item(Jinja *jinja, const JinjaValue *value, const JinjaValue *key, JinjaValue *ret);
int jinja_attribute(Jinja *jinja, const JinjaValue *value, const JinjaString *name, JinjaValue *ret);
/* jinja-parser.c, jinja-expression.c, jinja-evaluate.c, jinja-run.c */
int jinja_parse(Jinja *jinja, const char *source, size_t n, JinjaNode **ret);
int jinja_run(Jinja *jinja, const JinjaNode *node);
int jinja_evaluate(Jinja *jinja, const JinjaNode *node, JinjaValue *ret);
int jinja_evaluate_arguments(Jinja *jinja, const JinjaNode *node, JinjaArguments *ret);
int jinja_enter_run(Jinja *jinja, const JinjaNode *node); /* counts depth and steps; the caller counts depth down */
int jinja_scope_push(Jinja *jinja, JinjaScope *parent);
int jinja_scope_set(Jinja *jinja, const JinjaString *name, JinjaValue value);
int jinja_call_macro(Jinja *jinja, const JinjaMacro *macro, const JinjaArguments *arguments, JinjaValue *ret);
/* jinja-filters.c, jinja-methods.c, jinja-functions.c */
bool jinja_filter_exists(const JinjaString *name);
bool jinja_test_exists(const JinjaString *name);
int jinja_filter(Jinja *jinja, const JinjaString *name, const JinjaValue *value, const JinjaArguments *arguments, JinjaValue *ret);
int jinja_test(Jinja *jinja, const JinjaString *name, const JinjaValue *value, const JinjaArguments *arguments, bool *ret);
bool jinja_method_exists(const JinjaValue *value, const JinjaString *name);
int jinja_method(Jinja *jinja, const JinjaValue *value, const JinjaString *name, const JinjaArguments *arguments, JinjaValue *ret);
bool jinja_function_exists(const JinjaString *name);
int jinja_function(Jinja *jinja, const JinjaString *name, const JinjaArguments *arguments, JinjaValue *ret);
/* The argument at @index or called @name; NULL: not given. */
const JinjaValue *jinja_argument(const JinjaArguments *arguments, size_t index, const char *name);
int jinja_argument_string(Jinja *jinja, const JinjaArguments *arguments, size_t index, const char *name, const JinjaString **ret);
