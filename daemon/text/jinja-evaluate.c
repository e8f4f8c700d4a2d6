/* SPDX-License-Identifier: Apache-2.0 */
/* Expressions to values. */

#include "daemon/text/jinja.h"

/* Deeper than any tree (JINJA_PARSE_DEPTH_MAX), so that macros can call each other some levels deep. */
#define JINJA_RUN_DEPTH_MAX 1000

/* ---- variables ---------------------------------------------------------------------------------------------------------------- */

int jinja_scope_push(Jinja *jinja, JinjaScope *parent)
{
    JinjaScope *scope = jinja_alloc(jinja, sizeof(*scope));

    if (!scope)
        return jinja_alloc_failed(jinja);
    scope->parent = parent;
    jinja->scope = scope;
    return 0;
}

int jinja_scope_set(Jinja *jinja, const JinjaString *name, JinjaValue value)
{
    return jinja_dict_set(jinja, &jinja->scope->variables, (JinjaValue){.type = JINJA_STRING, .string = name}, value);
}

static int look_up(Jinja *jinja, const JinjaString *name, JinjaValue *ret)
{
    JinjaValue key = {.type = JINJA_STRING, .string = name};

    for (const JinjaScope *scope = jinja->scope; scope; scope = scope->parent) {
        const JinjaValue *found = jinja_dict_find(&scope->variables, &key);

        JINJA_TRY(jinja_charge(jinja, 1 + scope->variables.keys.n / 8));
        if (found) {
            *ret = *found;
            return 0;
        }
    }
    *ret = (JinjaValue){.type = jinja_function_exists(name) ? JINJA_FUNCTION : JINJA_UNDEFINED, .string = name};
    return 0;
}

/* ---- calls ------------------------------------------------------------------------------------------------------------------------ */

int jinja_evaluate_arguments(Jinja *jinja, const JinjaNode *node, JinjaArguments *ret)
{
    JinjaValue *values = jinja_alloc(jinja, (node->n_items + 1) * sizeof(*values));

    if (!values)
        return jinja_alloc_failed(jinja);
    for (size_t i = 0; i < node->n_items; i++)
        JINJA_TRY(jinja_evaluate(jinja, node->items[i], &values[i]));
    *ret = (JinjaArguments){values, node->names, node->n_items};
    return 0;
}

static int call_loop_method(Jinja *jinja, JinjaLoop *loop, const JinjaString *name, const JinjaArguments *arguments, JinjaValue *ret)
{
    if (jinja_is_text(name, "cycle") && arguments->n > 0) {
        *ret = arguments->values[loop->index0 % arguments->n];
        return 0;
    }
    if (jinja_is_text(name, "changed")) {
        JinjaValue now;
        bool same;

        JINJA_TRY(jinja_new_list(jinja, &now));
        for (size_t i = 0; i < arguments->n; i++)
            JINJA_TRY(jinja_list_push(jinja, now.list, arguments->values[i]));
        same = loop->changed && jinja_equal(&now, &(JinjaValue){.type = JINJA_LIST, .list = loop->changed});
        loop->changed = now.list;
        *ret = (JinjaValue){.type = JINJA_BOOL, .boolean = !same};
        return 0;
    }
    return jinja_fail(jinja, "a loop variable has no method '%.*s'", (int)MIN(name->n, (size_t)60), name->data);
}

static int call_value(Jinja *jinja, const JinjaValue *callee, const JinjaArguments *arguments, JinjaValue *ret)
{
    if (callee->type == JINJA_MACRO)
        return jinja_call_macro(jinja, callee->macro, arguments, ret);
    if (callee->type == JINJA_FUNCTION)
        return jinja_function(jinja, callee->string, arguments, ret);
    if (callee->type == JINJA_UNDEFINED && callee->string)
        return jinja_fail(jinja, "'%.*s' is undefined", (int)MIN(callee->string->n, (size_t)80), callee->string->data);
    return jinja_fail(jinja, "%s cannot be called", jinja_type_name(callee));
}

static int evaluate_call(Jinja *jinja, const JinjaNode *node, JinjaValue *ret)
{
    JinjaArguments arguments;
    JinjaValue object, callee;

    if (node->a->kind != JINJA_NODE_ATTRIBUTE) {
        JINJA_TRY(jinja_evaluate(jinja, node->a, &callee));
        JINJA_TRY(jinja_evaluate_arguments(jinja, node, &arguments));
        return call_value(jinja, &callee, &arguments, ret);
    }
    JINJA_TRY(jinja_evaluate(jinja, node->a->a, &object));
    JINJA_TRY(jinja_evaluate_arguments(jinja, node, &arguments));
    if (object.type == JINJA_LOOP)
        return call_loop_method(jinja, object.loop, node->a->value.string, &arguments, ret);
    if (jinja_method_exists(&object, node->a->value.string))
        return jinja_method(jinja, &object, node->a->value.string, &arguments, ret);
    JINJA_TRY(jinja_attribute(jinja, &object, node->a->value.string, &callee));
    if (callee.type == JINJA_UNDEFINED)
        return jinja_fail(jinja, "%s has no method '%.*s' that is supported", jinja_type_name(&object),
                          (int)MIN(node->a->value.string->n, (size_t)60), node->a->value.string->data);
    return call_value(jinja, &callee, &arguments, ret);
}

/* ---- expressions ------------------------------------------------------------------------------------------------------------------ */

static int evaluate_collection(Jinja *jinja, const JinjaNode *node, JinjaValue *ret)
{
    JinjaValue item, value;

    if (node->kind == JINJA_NODE_DICT) {
        JINJA_TRY(jinja_new_dict(jinja, ret));
        for (size_t i = 0; i + 1 < node->n_items; i += 2) {
            JINJA_TRY(jinja_evaluate(jinja, node->items[i], &item));
            JINJA_TRY(jinja_evaluate(jinja, node->items[i + 1], &value));
            JINJA_TRY(jinja_dict_set(jinja, ret->dict, item, value));
        }
        return 0;
    }
    JINJA_TRY(jinja_new_list(jinja, ret));
    ret->type = node->kind == JINJA_NODE_TUPLE ? JINJA_TUPLE : JINJA_LIST;
    for (size_t i = 0; i < node->n_items; i++) {
        JINJA_TRY(jinja_evaluate(jinja, node->items[i], &item));
        JINJA_TRY(jinja_list_push(jinja, ret->list, item));
    }
    return 0;
}

static int evaluate_comparison(Jinja *jinja, const JinjaNode *node, JinjaValue *ret)
{
    JinjaValue left, right;

    JINJA_TRY(jinja_evaluate(jinja, node->a, &left));
    *ret = (JinjaValue){.type = JINJA_BOOL, .boolean = true};
    for (size_t i = 0; i < node->n_items && ret->boolean; i++) {
        JINJA_TRY(jinja_evaluate(jinja, node->items[i]->a, &right));
        JINJA_TRY(jinja_compare(jinja, node->items[i]->op, &left, &right, &ret->boolean));
        left = right;
    }
    return 0;
}

static int evaluate_slice(Jinja *jinja, const JinjaNode *node, const JinjaValue *value, JinjaValue *ret)
{
    JinjaValue bounds[3] = {{.type = JINJA_NONE}, {.type = JINJA_NONE}, {.type = JINJA_NONE}};

    for (size_t i = 0; i < node->n_items; i++)
        if (node->items[i])
            JINJA_TRY(jinja_evaluate(jinja, node->items[i], &bounds[i]));
    return jinja_slice(jinja, value, bounds, ret);
}

static int evaluate_negation(Jinja *jinja, bool minus, const JinjaValue *value, JinjaValue *ret)
{
    JinjaValue zero = {.type = JINJA_INT, .integer = 0};

    if (value->type == JINJA_FLOAT && minus) { /* 0 - 0.0 would lose the sign */
        *ret = (JinjaValue){.type = JINJA_FLOAT, .real = -value->real};
        return 0;
    }
    return jinja_binary(jinja, minus ? JINJA_OP_SUBTRACT : JINJA_OP_ADD, &zero, value, ret);
}

/* Nodes whose first operand has been evaluated to @value. */
static int evaluate_behind(Jinja *jinja, const JinjaNode *node, const JinjaValue *value, JinjaValue *ret)
{
    JinjaArguments arguments;
    JinjaValue other;

    switch ((int)node->kind) {
    case JINJA_NODE_ATTRIBUTE:
        return jinja_attribute(jinja, value, node->value.string, ret);
    case JINJA_NODE_SLICE:
        return evaluate_slice(jinja, node, value, ret);
    case JINJA_NODE_FILTER:
        JINJA_TRY(jinja_evaluate_arguments(jinja, node, &arguments));
        return jinja_filter(jinja, node->value.string, value, &arguments, ret);
    case JINJA_NODE_TEST:
        JINJA_TRY(jinja_evaluate_arguments(jinja, node, &arguments));
        *ret = (JinjaValue){.type = JINJA_BOOL};
        JINJA_TRY(jinja_test(jinja, node->value.string, value, &arguments, &ret->boolean));
        ret->boolean ^= node->negate;
        return 0;
    case JINJA_NODE_NEGATE:
        return evaluate_negation(jinja, node->negate, value, ret);
    case JINJA_NODE_NOT:
        *ret = (JinjaValue){.type = JINJA_BOOL, .boolean = !jinja_truth(value)};
        return 0;
    case JINJA_NODE_AND:
    case JINJA_NODE_OR:
        *ret = *value;
        return jinja_truth(value) == (node->kind == JINJA_NODE_AND) ? jinja_evaluate(jinja, node->b, ret) : 0;
    default: /* ITEM, BINARY: two operands */
        JINJA_TRY(jinja_evaluate(jinja, node->b, &other));
        if (node->kind == JINJA_NODE_ITEM)
            return jinja_item(jinja, value, &other, ret);
        return jinja_binary(jinja, node->op, value, &other, ret);
    }
}

static int evaluate_node(Jinja *jinja, const JinjaNode *node, JinjaValue *ret)
{
    JinjaValue value;

    switch ((int)node->kind) {
    case JINJA_NODE_CONST:
        *ret = node->value;
        return 0;
    case JINJA_NODE_NAME:
        return look_up(jinja, node->value.string, ret);
    case JINJA_NODE_LIST:
    case JINJA_NODE_TUPLE:
    case JINJA_NODE_DICT:
        return evaluate_collection(jinja, node, ret);
    case JINJA_NODE_CALL:
        return evaluate_call(jinja, node, ret);
    case JINJA_NODE_COMPARE:
        return evaluate_comparison(jinja, node, ret);
    case JINJA_NODE_CONDITIONAL:
        JINJA_TRY(jinja_evaluate(jinja, node->a, &value));
        *ret = (JinjaValue){.type = JINJA_UNDEFINED};
        if (jinja_truth(&value))
            return jinja_evaluate(jinja, node->b, ret);
        return node->c ? jinja_evaluate(jinja, node->c, ret) : 0;
    default:
        JINJA_TRY(jinja_evaluate(jinja, node->a, &value));
        jinja->line = node->line;
        return evaluate_behind(jinja, node, &value, ret);
    }
}

int jinja_enter_run(Jinja *jinja, const JinjaNode *node)
{
    jinja->line = node->line;
    if (++jinja->depth > JINJA_RUN_DEPTH_MAX)
        return jinja_fail(jinja, "calls are nested more than %d deep", JINJA_RUN_DEPTH_MAX);
    return jinja_charge(jinja, 1);
}

int jinja_evaluate(Jinja *jinja, const JinjaNode *node, JinjaValue *ret)
{
    JINJA_TRY(jinja_enter_run(jinja, node));
    JINJA_TRY(evaluate_node(jinja, node, ret));
    jinja->depth--;
    return 0;
}
