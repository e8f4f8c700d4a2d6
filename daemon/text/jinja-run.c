/* SPDX-License-Identifier: Apache-2.0 */
/* Statements: output, conditions, loops, assignments, macros. */

#include "daemon/text/jinja.h"

#include <string.h>

/* Besides errors, a statement can end so; loops take them. */
#define JINJA_BREAK    100
#define JINJA_CONTINUE 101

static int assign(Jinja *jinja, const JinjaNode *target, JinjaValue value)
{
    const JinjaList *parts;
    JinjaValue object;

    if (target->kind == JINJA_NODE_NAME)
        return jinja_scope_set(jinja, target->value.string, value);
    if (target->kind == JINJA_NODE_ATTRIBUTE) {
        JINJA_TRY(jinja_evaluate(jinja, target->a, &object));
        if (object.type != JINJA_NAMESPACE)
            return jinja_fail(jinja, "only attributes of a namespace can be set, not of %s", jinja_type_name(&object));
        return jinja_dict_set(jinja, object.dict, target->value, value);
    }
    JINJA_TRY(jinja_iterate(jinja, &value, &parts));
    if (parts->n != target->n_items)
        return jinja_fail(jinja, "%zu values for %zu names", parts->n, target->n_items);
    for (size_t i = 0; i < parts->n; i++)
        JINJA_TRY(assign(jinja, target->items[i], parts->items[i]));
    return 0;
}

/* Runs @body in a scope of its own under @parent and gives back what it printed. */
static int capture(Jinja *jinja, const JinjaNode *body, JinjaScope *parent, JinjaValue *ret)
{
    JinjaBuffer buffer = {0}, *output = jinja->output;
    JinjaScope *scope = jinja->scope;
    int r;

    JINJA_TRY(jinja_scope_push(jinja, parent));
    jinja->output = &buffer;
    r = jinja_run(jinja, body);
    jinja->output = output;
    jinja->scope = scope;
    return r ? r : jinja_buffer_value(jinja, &buffer, ret);
}

/* ---- macros ----------------------------------------------------------------------------------------------------------------------- */

static int bind_parameters(Jinja *jinja, const JinjaNode *node, const JinjaArguments *arguments)
{
    for (size_t i = 0; i < arguments->n; i++) {
        const JinjaString *name = arguments->names[i];
        bool known = !name && i < node->n_items;

        for (size_t k = 0; name && k < node->n_items; k++)
            known |= name->n == node->names[k]->n && memcmp(name->data, node->names[k]->data, name->n) == 0;
        if (!known)
            return jinja_fail(jinja, "the macro takes %zu arguments, none called '%.*s'", node->n_items, name ? (int)MIN(name->n, (size_t)60) : 0,
                              name ? name->data : "");
    }
    for (size_t i = 0; i < node->n_items; i++) {
        char name[64];
        const JinjaValue *given;
        JinjaValue value = {.type = JINJA_UNDEFINED, .string = node->names[i]};

        if (node->names[i]->n >= sizeof(name))
            return jinja_fail(jinja, "the name of a parameter is too long");
        memcpy(name, node->names[i]->data, node->names[i]->n);
        name[node->names[i]->n] = 0;
        given = jinja_argument(arguments, i, name);
        if (given)
            value = *given;
        else if (node->items[i])
            JINJA_TRY(jinja_evaluate(jinja, node->items[i], &value));
        JINJA_TRY(jinja_scope_set(jinja, node->names[i], value));
    }
    return 0;
}

int jinja_call_macro(Jinja *jinja, const JinjaMacro *macro, const JinjaArguments *arguments, JinjaValue *ret)
{
    JinjaScope *scope = jinja->scope;
    size_t loop_depth = jinja->loop_depth;

    JINJA_TRY(jinja_scope_push(jinja, macro->scope));
    jinja->loop_depth = 0;
    JINJA_TRY(bind_parameters(jinja, macro->node, arguments));
    JINJA_TRY(capture(jinja, macro->node->body, jinja->scope, ret));
    jinja->loop_depth = loop_depth;
    jinja->scope = scope;
    return 0;
}

static int run_macro(Jinja *jinja, const JinjaNode *node, JinjaScope *scope, JinjaValue *ret)
{
    JinjaMacro *macro = jinja_alloc(jinja, sizeof(*macro));

    if (!macro)
        return jinja_alloc_failed(jinja);
    *macro = (JinjaMacro){node, scope};
    *ret = (JinjaValue){.type = JINJA_MACRO, .macro = macro};
    return 0;
}

/* {% call(x) m(…) %}: runs m with the block as its macro "caller". */
static int run_call_block(Jinja *jinja, const JinjaNode *node)
{
    static const JinjaString caller_name = {"caller", 6, NULL, true};
    JinjaScope *scope = jinja->scope;
    JinjaArguments arguments;
    JinjaValue callee, caller, text;
    JinjaMacro macro;

    JINJA_TRY(jinja_evaluate(jinja, node->a->a, &callee));
    if (callee.type != JINJA_MACRO)
        return jinja_fail(jinja, "call goes with a macro, not with %s", jinja_type_name(&callee));
    JINJA_TRY(jinja_evaluate_arguments(jinja, node->a, &arguments));
    JINJA_TRY(run_macro(jinja, node, scope, &caller));
    JINJA_TRY(jinja_scope_push(jinja, callee.macro->scope));
    JINJA_TRY(jinja_scope_set(jinja, &caller_name, caller));
    macro = (JinjaMacro){callee.macro->node, jinja->scope};
    JINJA_TRY(jinja_call_macro(jinja, &macro, &arguments, &text));
    jinja->scope = scope;
    return jinja_print(jinja, &text, jinja->output);
}

/* ---- loops ------------------------------------------------------------------------------------------------------------------------ */

/* The elements that the loop's own "if" lets through; it sees the names of the loop. */
static int filter_items(Jinja *jinja, const JinjaNode *node, const JinjaList **items)
{
    JinjaScope *scope = jinja->scope;
    JinjaValue kept, value;

    JINJA_TRY(jinja_new_list(jinja, &kept));
    for (size_t i = 0; i < (*items)->n; i++) {
        JINJA_TRY(jinja_scope_push(jinja, scope));
        JINJA_TRY(assign(jinja, node->a, (*items)->items[i]));
        JINJA_TRY(jinja_evaluate(jinja, node->c, &value));
        if (jinja_truth(&value))
            JINJA_TRY(jinja_list_push(jinja, kept.list, (*items)->items[i]));
        jinja->scope = scope;
    }
    *items = kept.list;
    return 0;
}

static int run_for(Jinja *jinja, const JinjaNode *node)
{
    static const JinjaString loop_name = {"loop", 4, NULL, true};
    JinjaScope *scope = jinja->scope;
    JinjaLoop *loop = jinja_alloc(jinja, sizeof(*loop));
    JinjaValue iterable;
    int r = 0;

    if (!loop)
        return jinja_alloc_failed(jinja);
    JINJA_TRY(jinja_evaluate(jinja, node->b, &iterable));
    JINJA_TRY(jinja_iterate(jinja, &iterable, &loop->items));
    if (node->c)
        JINJA_TRY(filter_items(jinja, node, &loop->items));
    loop->depth = jinja->loop_depth++;
    for (; loop->index0 < loop->items->n && r != JINJA_BREAK; loop->index0++) {
        JINJA_TRY(jinja_scope_push(jinja, scope));
        JINJA_TRY(jinja_scope_set(jinja, &loop_name, (JinjaValue){.type = JINJA_LOOP, .loop = loop}));
        JINJA_TRY(assign(jinja, node->a, loop->items->items[loop->index0]));
        r = jinja_run(jinja, node->body);
        if (r && r != JINJA_BREAK && r != JINJA_CONTINUE)
            return r;
    }
    jinja->scope = scope;
    jinja->loop_depth--;
    return loop->items->n == 0 && node->d ? jinja_run(jinja, node->d) : 0;
}

/* ---- the others ------------------------------------------------------------------------------------------------------------------- */

/* @node: filters around the node @constant, which stands for @text. */
static int apply_filters(Jinja *jinja, const JinjaNode *node, const JinjaNode *constant, const JinjaValue *text, JinjaValue *ret)
{
    JinjaArguments arguments;
    JinjaValue value;

    if (node == constant) {
        *ret = *text;
        return 0;
    }
    JINJA_TRY(apply_filters(jinja, node->a, constant, text, &value));
    JINJA_TRY(jinja_evaluate_arguments(jinja, node, &arguments));
    return jinja_filter(jinja, node->value.string, &value, &arguments, ret);
}

static int run_captured(Jinja *jinja, const JinjaNode *node)
{
    JinjaValue value, text;

    JINJA_TRY(capture(jinja, node->body, jinja->scope, &text));
    JINJA_TRY(apply_filters(jinja, node->b, node->c, &text, &value));
    if (node->kind == JINJA_NODE_FILTER_BLOCK)
        return jinja_print(jinja, &value, jinja->output);
    return assign(jinja, node->a, value);
}

static int run_with(Jinja *jinja, const JinjaNode *node)
{
    JinjaScope *outer = jinja->scope;
    JinjaArguments values;
    int r;

    JINJA_TRY(jinja_evaluate_arguments(jinja, &(JinjaNode){.items = node->items, .n_items = node->n_items}, &values));
    JINJA_TRY(jinja_scope_push(jinja, outer));
    for (size_t i = 0; i < node->n_items; i++)
        JINJA_TRY(jinja_scope_set(jinja, node->names[i], values.values[i]));
    r = jinja_run(jinja, node->body);
    jinja->scope = outer;
    return r;
}

static int run_if(Jinja *jinja, const JinjaNode *node)
{
    for (; node && node->kind == JINJA_NODE_IF; node = node->c) {
        JinjaValue condition;

        JINJA_TRY(jinja_evaluate(jinja, node->a, &condition));
        if (jinja_truth(&condition))
            return jinja_run(jinja, node->body);
    }
    return node ? jinja_run(jinja, node) : 0;
}

static int run_node(Jinja *jinja, const JinjaNode *node)
{
    JinjaValue value;

    switch ((int)node->kind) {
    case JINJA_NODE_BLOCK:
        for (size_t i = 0; i < node->n_items; i++)
            JINJA_TRY(jinja_run(jinja, node->items[i]));
        return 0;
    case JINJA_NODE_TEXT:
        return jinja_buffer_add(jinja, jinja->output, node->value.string);
    case JINJA_NODE_OUTPUT:
        JINJA_TRY(jinja_evaluate(jinja, node->a, &value));
        return jinja_print(jinja, &value, jinja->output);
    case JINJA_NODE_IF:
        return run_if(jinja, node);
    case JINJA_NODE_FOR:
        return run_for(jinja, node);
    case JINJA_NODE_SET:
        JINJA_TRY(jinja_evaluate(jinja, node->b, &value));
        return assign(jinja, node->a, value);
    case JINJA_NODE_SET_BLOCK:
    case JINJA_NODE_FILTER_BLOCK:
        return run_captured(jinja, node);
    case JINJA_NODE_MACRO:
        JINJA_TRY(run_macro(jinja, node, jinja->scope, &value));
        return jinja_scope_set(jinja, node->value.string, value);
    case JINJA_NODE_CALL_BLOCK:
        return run_call_block(jinja, node);
    case JINJA_NODE_WITH:
        return run_with(jinja, node);
    case JINJA_NODE_BREAK:
        return JINJA_BREAK;
    case JINJA_NODE_CONTINUE:
        return JINJA_CONTINUE;
    default: /* an expression: the parser puts none here */
        return error_origin(-ENOTRECOVERABLE);
    }
}

int jinja_run(Jinja *jinja, const JinjaNode *node)
{
    int r;

    JINJA_TRY(jinja_enter_run(jinja, node));
    r = run_node(jinja, node);
    jinja->depth--;
    return r;
}
