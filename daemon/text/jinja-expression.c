/* SPDX-License-Identifier: Apache-2.0 */
/* Expressions to nodes: a function for each level of precedence, loosest first. */

#include "daemon/text/jinja-parser.h"

#include <string.h>

int jinja_node_new(JinjaParser *parser, JinjaNodeKind kind, JinjaNode **ret)
{
    JinjaNode *node = jinja_alloc(parser->jinja, sizeof(*node));

    if (!node)
        return jinja_alloc_failed(parser->jinja);
    node->kind = kind;
    node->line = parser->token->line;
    *ret = node;
    return 0;
}

int jinja_node_add(JinjaParser *parser, JinjaNode *node, JinjaNode *item, const JinjaString *name)
{
    if (node->n_items == node->capacity) {
        size_t capacity = MAX(2 * node->capacity, (size_t)4);
        JinjaNode **items = jinja_alloc(parser->jinja, capacity * sizeof(*items));
        const JinjaString **names = jinja_alloc(parser->jinja, capacity * sizeof(*names));

        if (!items || !names)
            return jinja_alloc_failed(parser->jinja);
        if (node->n_items) {
            memcpy(items, node->items, node->n_items * sizeof(*items));
            memcpy(names, node->names, node->n_items * sizeof(*names));
        }
        node->items = items;
        node->names = names;
        node->capacity = capacity;
    }
    node->items[node->n_items] = item;
    node->names[node->n_items++] = name;
    return 0;
}

bool jinja_at_symbol(const JinjaParser *parser, const char *symbol)
{
    return parser->token->kind == JINJA_TOKEN_SYMBOL && jinja_is_text(parser->token->value.string, symbol);
}

bool jinja_at_name(const JinjaParser *parser, const char *name)
{
    return parser->token->kind == JINJA_TOKEN_NAME && jinja_is_text(parser->token->value.string, name);
}

bool jinja_take_symbol(JinjaParser *parser, const char *symbol)
{
    bool there = jinja_at_symbol(parser, symbol);

    parser->token += there;
    return there;
}

bool jinja_take_name(JinjaParser *parser, const char *name)
{
    bool there = jinja_at_name(parser, name);

    parser->token += there;
    return there;
}

int jinja_unexpected(JinjaParser *parser, const char *wanted)
{
    const JinjaToken *token = parser->token;

    switch (token->kind) {
    case JINJA_TOKEN_END:
        return jinja_syntax_error(parser->jinja, token->line, "the template ends where %s should come", wanted);
    case JINJA_TOKEN_BLOCK_END:
    case JINJA_TOKEN_OUTPUT_END:
        return jinja_syntax_error(parser->jinja, token->line, "the tag ends where %s should come", wanted);
    case JINJA_TOKEN_NAME:
    case JINJA_TOKEN_SYMBOL:
    case JINJA_TOKEN_STRING:
        return jinja_syntax_error(parser->jinja, token->line, "'%.*s' where %s should come", (int)MIN(token->value.string->n, (size_t)60),
                                  token->value.string->data, wanted);
    case JINJA_TOKEN_INTEGER:
    case JINJA_TOKEN_FLOAT:
    case JINJA_TOKEN_TEXT:
    case JINJA_TOKEN_OUTPUT_BEGIN:
    case JINJA_TOKEN_BLOCK_BEGIN:
        break;
    }
    return jinja_syntax_error(parser->jinja, token->line, "something else where %s should come", wanted);
}

int jinja_expect_symbol(JinjaParser *parser, const char *symbol)
{
    return jinja_take_symbol(parser, symbol) ? 0 : jinja_unexpected(parser, symbol);
}

int jinja_expect_name(JinjaParser *parser, const JinjaString **ret)
{
    if (parser->token->kind != JINJA_TOKEN_NAME)
        return jinja_unexpected(parser, "a name");
    *ret = (parser->token++)->value.string;
    return 0;
}

/* The caller counts down again. */
int jinja_enter(JinjaParser *parser)
{
    if (++parser->depth > JINJA_PARSE_DEPTH_MAX)
        return jinja_syntax_error(parser->jinja, parser->token->line, "nested more than %d deep", JINJA_PARSE_DEPTH_MAX);
    return 0;
}

/* A chain of left operands grows the tree as nesting does: a + b + c … */
static int wrap(JinjaParser *parser, JinjaNodeKind kind, JinjaNode *a, unsigned *length, JinjaNode **ret)
{
    if (++*length > 2 * JINJA_PARSE_DEPTH_MAX)
        return jinja_syntax_error(parser->jinja, parser->token->line, "an expression of more than %d parts", 2 * JINJA_PARSE_DEPTH_MAX);
    JINJA_TRY(jinja_node_new(parser, kind, ret));
    (*ret)->a = a;
    return 0;
}

static int parse_unary(JinjaParser *parser, bool with_filters, JinjaNode **ret);

/* ---- primaries ------------------------------------------------------------------------------------------------------------------ */

/* Elements up to @close; a comma may end them. */
static int parse_elements(JinjaParser *parser, JinjaNode *node, const char *close)
{
    while (!jinja_take_symbol(parser, close)) {
        JinjaNode *item;

        if (node->n_items)
            JINJA_TRY(jinja_expect_symbol(parser, ","));
        if (jinja_take_symbol(parser, close))
            break;
        JINJA_TRY(jinja_parse_expression(parser, &item));
        JINJA_TRY(jinja_node_add(parser, node, item, NULL));
        if (node->kind != JINJA_NODE_DICT)
            continue;
        JINJA_TRY(jinja_expect_symbol(parser, ":"));
        JINJA_TRY(jinja_parse_expression(parser, &item));
        JINJA_TRY(jinja_node_add(parser, node, item, NULL));
    }
    return 0;
}

static int parse_parenthesis(JinjaParser *parser, JinjaNode **ret)
{
    if (jinja_at_symbol(parser, ")"))
        JINJA_TRY(jinja_node_new(parser, JINJA_NODE_TUPLE, ret));
    else
        JINJA_TRY(jinja_parse_tuple(parser, ret));
    return jinja_expect_symbol(parser, ")");
}

/* Strings that stand side by side are one. */
static int parse_string(JinjaParser *parser, JinjaNode **ret)
{
    JinjaBuffer buffer = {0};

    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_CONST, ret));
    for (; parser->token->kind == JINJA_TOKEN_STRING; parser->token++)
        JINJA_TRY(jinja_buffer_add(parser->jinja, &buffer, parser->token->value.string));
    return jinja_buffer_value(parser->jinja, &buffer, &(*ret)->value);
}

static int parse_name(JinjaParser *parser, JinjaNode **ret)
{
    const JinjaString *name = parser->token->value.string;
    JinjaValue value = {.type = JINJA_UNDEFINED, .string = name};

    if (jinja_is_text(name, "true") || jinja_is_text(name, "True"))
        value = (JinjaValue){.type = JINJA_BOOL, .boolean = true};
    else if (jinja_is_text(name, "false") || jinja_is_text(name, "False"))
        value = (JinjaValue){.type = JINJA_BOOL, .boolean = false};
    else if (jinja_is_text(name, "none") || jinja_is_text(name, "None"))
        value = (JinjaValue){.type = JINJA_NONE};
    JINJA_TRY(jinja_node_new(parser, value.type == JINJA_UNDEFINED ? JINJA_NODE_NAME : JINJA_NODE_CONST, ret));
    (*ret)->value = value;
    parser->token++;
    return 0;
}

static int parse_primary(JinjaParser *parser, JinjaNode **ret)
{
    switch (parser->token->kind) {
    case JINJA_TOKEN_NAME:
        return parse_name(parser, ret);
    case JINJA_TOKEN_STRING:
        return parse_string(parser, ret);
    case JINJA_TOKEN_INTEGER:
    case JINJA_TOKEN_FLOAT:
        JINJA_TRY(jinja_node_new(parser, JINJA_NODE_CONST, ret));
        (*ret)->value = (parser->token++)->value;
        return 0;
    case JINJA_TOKEN_SYMBOL:
        if (jinja_take_symbol(parser, "("))
            return parse_parenthesis(parser, ret);
        if (jinja_take_symbol(parser, "[")) {
            JINJA_TRY(jinja_node_new(parser, JINJA_NODE_LIST, ret));
            return parse_elements(parser, *ret, "]");
        }
        if (jinja_take_symbol(parser, "{")) {
            JINJA_TRY(jinja_node_new(parser, JINJA_NODE_DICT, ret));
            return parse_elements(parser, *ret, "}");
        }
        break;
    case JINJA_TOKEN_TEXT:
    case JINJA_TOKEN_OUTPUT_BEGIN:
    case JINJA_TOKEN_OUTPUT_END:
    case JINJA_TOKEN_BLOCK_BEGIN:
    case JINJA_TOKEN_BLOCK_END:
    case JINJA_TOKEN_END:
        break;
    }
    return jinja_unexpected(parser, "a value");
}

/* ---- what follows a primary --------------------------------------------------------------------------------------------------------- */

static int parse_arguments(JinjaParser *parser, JinjaNode *node)
{
    bool named = false;

    while (!jinja_take_symbol(parser, ")")) {
        const JinjaString *name = NULL;
        JinjaNode *value;

        if (node->n_items)
            JINJA_TRY(jinja_expect_symbol(parser, ","));
        if (jinja_take_symbol(parser, ")"))
            break;
        if (jinja_at_symbol(parser, "*") || jinja_at_symbol(parser, "**"))
            return jinja_syntax_error(parser->jinja, parser->token->line, "arguments unpacked by * are not supported");
        if (parser->token->kind == JINJA_TOKEN_NAME && parser->token[1].kind == JINJA_TOKEN_SYMBOL &&
            jinja_is_text(parser->token[1].value.string, "=")) {
            name = parser->token->value.string;
            parser->token += 2;
        }
        if (named && !name)
            return jinja_unexpected(parser, "an argument with a name");
        named = name != NULL;
        JINJA_TRY(jinja_parse_expression(parser, &value));
        JINJA_TRY(jinja_node_add(parser, node, value, name));
    }
    return 0;
}

static int parse_subscript(JinjaParser *parser, JinjaNode *node)
{
    bool slice = false;

    for (int i = 0; i < 3; i++) {
        JinjaNode *bound = NULL;

        if (!jinja_at_symbol(parser, ":") && !jinja_at_symbol(parser, "]"))
            JINJA_TRY(jinja_parse_tuple(parser, &bound));
        JINJA_TRY(jinja_node_add(parser, node, bound, NULL));
        if (i == 2 || !jinja_take_symbol(parser, ":"))
            break;
        slice = true;
    }
    if (!slice && !node->items[0])
        return jinja_unexpected(parser, "a subscript");
    node->kind = slice ? JINJA_NODE_SLICE : JINJA_NODE_ITEM;
    node->b = node->items[0];
    return jinja_expect_symbol(parser, "]");
}

/* .name  [key]  (arguments); *length counts the parts. */
static int parse_postfix(JinjaParser *parser, JinjaNode *value, unsigned *length, JinjaNode **ret)
{
    for (;;) {
        if (jinja_take_symbol(parser, ".")) {
            JINJA_TRY(wrap(parser, JINJA_NODE_ATTRIBUTE, value, length, &value));
            if (parser->token->kind == JINJA_TOKEN_INTEGER) { /* tuple.0 */
                value->kind = JINJA_NODE_ITEM;
                JINJA_TRY(parse_primary(parser, &value->b));
                continue;
            }
            value->value.type = JINJA_STRING;
            JINJA_TRY(jinja_expect_name(parser, &value->value.string));
        } else if (jinja_take_symbol(parser, "[")) {
            JINJA_TRY(wrap(parser, JINJA_NODE_ITEM, value, length, &value));
            JINJA_TRY(parse_subscript(parser, value));
        } else if (jinja_take_symbol(parser, "(")) {
            JINJA_TRY(wrap(parser, JINJA_NODE_CALL, value, length, &value));
            JINJA_TRY(parse_arguments(parser, value));
        } else
            break;
    }
    *ret = value;
    return 0;
}

static int parse_filter(JinjaParser *parser, JinjaNode *value, unsigned *length, JinjaNode **ret)
{
    const JinjaString *name = NULL;
    uint32_t line = parser->token->line;

    JINJA_TRY(wrap(parser, JINJA_NODE_FILTER, value, length, ret));
    JINJA_TRY(jinja_expect_name(parser, &name));
    if (parser->conditions == 0 && !jinja_filter_exists(name))
        return jinja_syntax_error(parser->jinja, line, "filter '%.*s' is not supported", (int)MIN(name->n, (size_t)60), name->data);
    (*ret)->value = (JinjaValue){.type = JINJA_STRING, .string = name};
    if (jinja_take_symbol(parser, "("))
        return parse_arguments(parser, *ret);
    return 0;
}

int jinja_parse_filters(JinjaParser *parser, JinjaNode *value, bool first_without_bar, JinjaNode **ret)
{
    unsigned length = 0;

    while (first_without_bar || jinja_take_symbol(parser, "|")) {
        JINJA_TRY(parse_filter(parser, value, &length, &value));
        first_without_bar = false;
    }
    *ret = value;
    return 0;
}

/* Whether the next token may begin a test's argument that stands without parenthesis. */
static bool at_bare_argument(const JinjaParser *parser)
{
    switch (parser->token->kind) {
    case JINJA_TOKEN_STRING:
    case JINJA_TOKEN_INTEGER:
    case JINJA_TOKEN_FLOAT:
        return true;
    case JINJA_TOKEN_NAME:
        return !jinja_at_name(parser, "else") && !jinja_at_name(parser, "or") && !jinja_at_name(parser, "and") &&
               !jinja_at_name(parser, "is") && !jinja_at_name(parser, "if") && !jinja_at_name(parser, "not") && !jinja_at_name(parser, "in");
    case JINJA_TOKEN_SYMBOL:
        return jinja_at_symbol(parser, "[") || jinja_at_symbol(parser, "{");
    case JINJA_TOKEN_TEXT:
    case JINJA_TOKEN_OUTPUT_BEGIN:
    case JINJA_TOKEN_OUTPUT_END:
    case JINJA_TOKEN_BLOCK_BEGIN:
    case JINJA_TOKEN_BLOCK_END:
    case JINJA_TOKEN_END:
        break;
    }
    return false;
}

static int parse_test(JinjaParser *parser, JinjaNode *value, unsigned *length, JinjaNode **ret)
{
    const JinjaString *name = NULL;
    uint32_t line = parser->token->line;
    JinjaNode *argument;

    JINJA_TRY(wrap(parser, JINJA_NODE_TEST, value, length, ret));
    (*ret)->negate = jinja_take_name(parser, "not");
    JINJA_TRY(jinja_expect_name(parser, &name));
    if (parser->conditions == 0 && !jinja_test_exists(name))
        return jinja_syntax_error(parser->jinja, line, "test '%.*s' is not supported", (int)MIN(name->n, (size_t)60), name->data);
    (*ret)->value = (JinjaValue){.type = JINJA_STRING, .string = name};
    if (jinja_take_symbol(parser, "("))
        return parse_arguments(parser, *ret);
    if (!at_bare_argument(parser))
        return 0;
    JINJA_TRY(parse_primary(parser, &argument));
    JINJA_TRY(parse_postfix(parser, argument, length, &argument));
    return jinja_node_add(parser, *ret, argument, NULL);
}

static int parse_filters_and_tests(JinjaParser *parser, JinjaNode *value, unsigned *length, JinjaNode **ret)
{
    for (;;) {
        if (jinja_take_symbol(parser, "|"))
            JINJA_TRY(parse_filter(parser, value, length, &value));
        else if (jinja_take_name(parser, "is"))
            JINJA_TRY(parse_test(parser, value, length, &value));
        else if (jinja_take_symbol(parser, "(")) {
            JINJA_TRY(wrap(parser, JINJA_NODE_CALL, value, length, &value));
            JINJA_TRY(parse_arguments(parser, value));
        } else
            break;
    }
    *ret = value;
    return 0;
}

/* ---- operators ---------------------------------------------------------------------------------------------------------------------- */

typedef struct OperatorName {
    const char *symbol;
    JinjaOperator op;
} OperatorName;

static bool take_operator(JinjaParser *parser, const OperatorName *names, size_t n, JinjaOperator *ret)
{
    for (size_t i = 0; i < n; i++)
        if (jinja_take_symbol(parser, names[i].symbol)) {
            *ret = names[i].op;
            return true;
        }
    return false;
}

static int parse_power(JinjaParser *parser, bool with_filters, JinjaNode **ret)
{
    unsigned length = 0;
    JinjaNode *value;

    JINJA_TRY(parse_primary(parser, &value));
    JINJA_TRY(parse_postfix(parser, value, &length, &value));
    if (with_filters)
        JINJA_TRY(parse_filters_and_tests(parser, value, &length, &value));
    *ret = value;
    return 0;
}

/* Jinja binds filters and tests to the whole of "-x". */
static int parse_unary(JinjaParser *parser, bool with_filters, JinjaNode **ret)
{
    bool minus = jinja_at_symbol(parser, "-");
    unsigned length = 0;

    if (!minus && !jinja_at_symbol(parser, "+"))
        return parse_power(parser, with_filters, ret);
    parser->token++;
    JINJA_TRY(jinja_enter(parser));
    JINJA_TRY(parse_unary(parser, false, ret));
    parser->depth--;
    JINJA_TRY(wrap(parser, JINJA_NODE_NEGATE, *ret, &length, ret));
    (*ret)->negate = minus;
    return with_filters ? parse_filters_and_tests(parser, *ret, &length, ret) : 0;
}

/* Levels of left-associative operators, loosest first; level 4 is a unary. */
static int parse_binary(JinjaParser *parser, int level, JinjaNode **ret)
{
    static const OperatorName sums[] = {{"+", JINJA_OP_ADD}, {"-", JINJA_OP_SUBTRACT}}, concat[] = {{"~", JINJA_OP_CONCAT}};
    static const OperatorName products[] = {
        {"*", JINJA_OP_MULTIPLY}, {"//", JINJA_OP_FLOOR_DIVIDE}, {"/", JINJA_OP_DIVIDE}, {"%", JINJA_OP_MODULO}};
    static const OperatorName powers[] = {{"**", JINJA_OP_POWER}};
    static const struct {
        const OperatorName *names;
        size_t n;
    } levels[] = {{sums, 2}, {concat, 1}, {products, 4}, {powers, 1}};
    JinjaOperator op;
    unsigned length = 0;
    JinjaNode *right;

    if (level == 4)
        return parse_unary(parser, true, ret);
    JINJA_TRY(parse_binary(parser, level + 1, ret));
    while (take_operator(parser, levels[level].names, levels[level].n, &op)) {
        JINJA_TRY(wrap(parser, JINJA_NODE_BINARY, *ret, &length, ret));
        JINJA_TRY(parse_binary(parser, level + 1, &right));
        (*ret)->op = op;
        (*ret)->b = right;
    }
    return 0;
}

static bool take_comparison(JinjaParser *parser, JinjaOperator *ret)
{
    static const OperatorName names[] = {{"==", JINJA_OP_EQUAL},   {"!=", JINJA_OP_UNEQUAL},       {"<=", JINJA_OP_LESS_EQUAL},
                                         {">=", JINJA_OP_GREATER_EQUAL}, {"<", JINJA_OP_LESS}, {">", JINJA_OP_GREATER}};

    if (take_operator(parser, names, N_ELEMENTS(names), ret))
        return true;
    if (jinja_take_name(parser, "in")) {
        *ret = JINJA_OP_IN;
        return true;
    }
    if (jinja_at_name(parser, "not") && parser->token[1].kind == JINJA_TOKEN_NAME && jinja_is_text(parser->token[1].value.string, "in")) {
        parser->token += 2;
        *ret = JINJA_OP_NOT_IN;
        return true;
    }
    return false;
}

/* a < b < c: operands in items, each but the first with the operator before it as its own node's op. */
static int parse_comparison(JinjaParser *parser, JinjaNode **ret)
{
    JinjaOperator op;
    JinjaNode *operand, *comparison = NULL;

    JINJA_TRY(parse_binary(parser, 0, ret));
    while (take_comparison(parser, &op)) {
        JinjaNode *part;

        if (!comparison) {
            JINJA_TRY(jinja_node_new(parser, JINJA_NODE_COMPARE, &comparison));
            comparison->a = *ret;
            *ret = comparison;
        }
        JINJA_TRY(parse_binary(parser, 0, &operand));
        JINJA_TRY(jinja_node_new(parser, JINJA_NODE_COMPARE, &part));
        part->op = op;
        part->a = operand;
        JINJA_TRY(jinja_node_add(parser, comparison, part, NULL));
    }
    return 0;
}

static int parse_not(JinjaParser *parser, JinjaNode **ret)
{
    if (!jinja_take_name(parser, "not"))
        return parse_comparison(parser, ret);
    JINJA_TRY(jinja_enter(parser));
    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_NOT, ret));
    JINJA_TRY(parse_not(parser, &(*ret)->a));
    parser->depth--;
    return 0;
}

static int parse_logic(JinjaParser *parser, bool and, JinjaNode **ret)
{
    unsigned length = 0;

    JINJA_TRY(and ? parse_not(parser, ret) : parse_logic(parser, true, ret));
    while (jinja_take_name(parser, and ? "and" : "or")) {
        JINJA_TRY(wrap(parser, and ? JINJA_NODE_AND : JINJA_NODE_OR, *ret, &length, ret));
        JINJA_TRY(and ? parse_not(parser, &(*ret)->b) : parse_logic(parser, true, &(*ret)->b));
    }
    return 0;
}

int jinja_parse_unconditional(JinjaParser *parser, JinjaNode **ret)
{
    JINJA_TRY(jinja_enter(parser));
    JINJA_TRY(parse_logic(parser, false, ret));
    parser->depth--;
    return 0;
}

int jinja_parse_expression(JinjaParser *parser, JinjaNode **ret)
{
    unsigned length = 0;

    JINJA_TRY(jinja_parse_unconditional(parser, ret));
    while (jinja_take_name(parser, "if")) {
        JinjaNode *value = *ret;

        JINJA_TRY(wrap(parser, JINJA_NODE_CONDITIONAL, NULL, &length, ret));
        (*ret)->b = value;
        JINJA_TRY(jinja_parse_unconditional(parser, &(*ret)->a));
        if (jinja_take_name(parser, "else")) {
            JINJA_TRY(jinja_enter(parser));
            JINJA_TRY(jinja_parse_expression(parser, &(*ret)->c));
            parser->depth--;
        }
    }
    return 0;
}

int jinja_parse_tuple(JinjaParser *parser, JinjaNode **ret)
{
    JinjaNode *tuple, *item;

    JINJA_TRY(jinja_parse_expression(parser, ret));
    if (!jinja_at_symbol(parser, ","))
        return 0;
    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_TUPLE, &tuple));
    JINJA_TRY(jinja_node_add(parser, tuple, *ret, NULL));
    while (jinja_take_symbol(parser, ",")) {
        if (jinja_at_symbol(parser, ")") || jinja_at_symbol(parser, "]") || parser->token->kind == JINJA_TOKEN_BLOCK_END ||
            parser->token->kind == JINJA_TOKEN_OUTPUT_END)
            break;
        JINJA_TRY(jinja_parse_expression(parser, &item));
        JINJA_TRY(jinja_node_add(parser, tuple, item, NULL));
    }
    *ret = tuple;
    return 0;
}
