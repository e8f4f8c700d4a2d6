/* SPDX-License-Identifier: Apache-2.0 */
/* Statements to nodes: text, {{ … }} and the tags. */

#include "daemon/text/jinja-parser.h"

#include <string.h>

static int parse_block(JinjaParser *parser, const char *const *ends, JinjaNode **ret);

static int expect_block_end(JinjaParser *parser)
{
    if (parser->token->kind != JINJA_TOKEN_BLOCK_END)
        return jinja_unexpected(parser, "the end of the tag");
    parser->token++;
    return 0;
}

/* "%} … {% end %}" with the names that may end it; the one that does is left as the next token. */
static int parse_body(JinjaParser *parser, const char *const *ends, JinjaNode **ret)
{
    JINJA_TRY(expect_block_end(parser));
    JINJA_TRY(jinja_enter(parser));
    JINJA_TRY(parse_block(parser, ends, ret));
    parser->depth--;
    return 0;
}

static int parse_whole_body(JinjaParser *parser, const char *end, JinjaNode **ret)
{
    const char *const ends[] = {end, NULL};

    JINJA_TRY(parse_body(parser, ends, ret));
    parser->token++;
    return expect_block_end(parser);
}

static int parse_if(JinjaParser *parser, JinjaNode **ret)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL}, *const last[] = {"endif", NULL};
    JinjaNode **link = ret;

    parser->conditions++;
    /* An elif is an if in the else of the one before. */
    do {
        JINJA_TRY(jinja_node_new(parser, JINJA_NODE_IF, link));
        JINJA_TRY(jinja_parse_tuple(parser, &(*link)->a));
        JINJA_TRY(parse_body(parser, ends, &(*link)->body));
        link = &(*link)->c;
    } while (jinja_take_name(parser, "elif"));
    if (jinja_take_name(parser, "else"))
        JINJA_TRY(parse_body(parser, last, link));
    parser->conditions--;
    parser->token++;
    return expect_block_end(parser);
}

static int parse_target_name(JinjaParser *parser, bool attributes, JinjaNode **ret)
{
    const JinjaString *name = NULL;

    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_NAME, ret));
    JINJA_TRY(jinja_expect_name(parser, &name));
    (*ret)->value = (JinjaValue){.type = JINJA_UNDEFINED, .string = name};
    if (attributes && jinja_take_symbol(parser, ".")) {
        JinjaNode *object = *ret;

        JINJA_TRY(jinja_node_new(parser, JINJA_NODE_ATTRIBUTE, ret));
        JINJA_TRY(jinja_expect_name(parser, &name));
        (*ret)->a = object;
        (*ret)->value = (JinjaValue){.type = JINJA_STRING, .string = name};
    }
    return 0;
}

int jinja_parse_target(JinjaParser *parser, bool attributes, JinjaNode **ret)
{
    bool parenthesis = jinja_take_symbol(parser, "(");
    JinjaNode *tuple = NULL, *item = NULL;

    JINJA_TRY(parse_target_name(parser, attributes, ret));
    while (jinja_take_symbol(parser, ",")) {
        if (!tuple) {
            JINJA_TRY(jinja_node_new(parser, JINJA_NODE_TUPLE, &tuple));
            JINJA_TRY(jinja_node_add(parser, tuple, *ret, NULL));
            *ret = tuple;
        }
        JINJA_TRY(parse_target_name(parser, attributes, &item));
        JINJA_TRY(jinja_node_add(parser, tuple, item, NULL));
    }
    return parenthesis ? jinja_expect_symbol(parser, ")") : 0;
}

static int parse_for(JinjaParser *parser, JinjaNode **ret)
{
    static const char *const ends[] = {"else", "endfor", NULL}, *const last[] = {"endfor", NULL};

    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_FOR, ret));
    JINJA_TRY(jinja_parse_target(parser, false, &(*ret)->a));
    if (!jinja_take_name(parser, "in"))
        return jinja_unexpected(parser, "in");
    JINJA_TRY(jinja_parse_unconditional(parser, &(*ret)->b));
    if (jinja_take_name(parser, "if"))
        JINJA_TRY(jinja_parse_expression(parser, &(*ret)->c));
    if (jinja_at_name(parser, "recursive"))
        return jinja_syntax_error(parser->jinja, parser->token->line, "a recursive for is not supported");
    parser->loops++;
    JINJA_TRY(parse_body(parser, ends, &(*ret)->body));
    parser->loops--;
    if (jinja_take_name(parser, "else"))
        JINJA_TRY(parse_body(parser, last, &(*ret)->d));
    parser->token++;
    return expect_block_end(parser);
}

static int parse_set(JinjaParser *parser, JinjaNode **ret)
{
    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_SET, ret));
    JINJA_TRY(jinja_parse_target(parser, true, &(*ret)->a));
    if (jinja_take_symbol(parser, "=")) {
        JINJA_TRY(jinja_parse_tuple(parser, &(*ret)->b));
        return expect_block_end(parser);
    }
    (*ret)->kind = JINJA_NODE_SET_BLOCK;
    /* The captured text is a constant that the filters start from. */
    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_CONST, &(*ret)->c));
    JINJA_TRY(jinja_parse_filters(parser, (*ret)->c, false, &(*ret)->b));
    return parse_whole_body(parser, "endset", &(*ret)->body);
}

/* "(a, b=1)": parameters with their defaults (NULL: none). */
static int parse_parameters(JinjaParser *parser, JinjaNode *macro)
{
    while (!jinja_take_symbol(parser, ")")) {
        const JinjaString *name = NULL;
        JinjaNode *otherwise = NULL;

        if (macro->n_items)
            JINJA_TRY(jinja_expect_symbol(parser, ","));
        JINJA_TRY(jinja_expect_name(parser, &name));
        if (jinja_take_symbol(parser, "="))
            JINJA_TRY(jinja_parse_expression(parser, &otherwise));
        JINJA_TRY(jinja_node_add(parser, macro, otherwise, name));
    }
    return 0;
}

static int parse_macro(JinjaParser *parser, JinjaNode **ret)
{
    const JinjaString *name = NULL;
    unsigned loops = parser->loops;

    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_MACRO, ret));
    JINJA_TRY(jinja_expect_name(parser, &name));
    (*ret)->value = (JinjaValue){.type = JINJA_STRING, .string = name};
    JINJA_TRY(jinja_expect_symbol(parser, "("));
    JINJA_TRY(parse_parameters(parser, *ret));
    parser->loops = 0;
    JINJA_TRY(parse_whole_body(parser, "endmacro", &(*ret)->body));
    parser->loops = loops;
    return 0;
}

static int parse_call(JinjaParser *parser, JinjaNode **ret)
{
    unsigned loops = parser->loops;

    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_CALL_BLOCK, ret));
    if (jinja_take_symbol(parser, "("))
        JINJA_TRY(parse_parameters(parser, *ret));
    JINJA_TRY(jinja_parse_expression(parser, &(*ret)->a));
    if ((*ret)->a->kind != JINJA_NODE_CALL)
        return jinja_unexpected(parser, "a call of a macro");
    parser->loops = 0;
    JINJA_TRY(parse_whole_body(parser, "endcall", &(*ret)->body));
    parser->loops = loops;
    return 0;
}

static int parse_filter_block(JinjaParser *parser, JinjaNode **ret)
{
    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_FILTER_BLOCK, ret));
    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_CONST, &(*ret)->c));
    JINJA_TRY(jinja_parse_filters(parser, (*ret)->c, true, &(*ret)->b));
    return parse_whole_body(parser, "endfilter", &(*ret)->body);
}

static int parse_with(JinjaParser *parser, JinjaNode **ret)
{
    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_WITH, ret));
    while (parser->token->kind != JINJA_TOKEN_BLOCK_END) {
        const JinjaString *name = NULL;
        JinjaNode *value = NULL;

        if ((*ret)->n_items)
            JINJA_TRY(jinja_expect_symbol(parser, ","));
        JINJA_TRY(jinja_expect_name(parser, &name));
        JINJA_TRY(jinja_expect_symbol(parser, "="));
        JINJA_TRY(jinja_parse_expression(parser, &value));
        JINJA_TRY(jinja_node_add(parser, *ret, value, name));
    }
    return parse_whole_body(parser, "endwith", &(*ret)->body);
}

/* Marks what the assistant said, for training; here its content only. */
static int parse_generation(JinjaParser *parser, JinjaNode **ret)
{
    return parse_whole_body(parser, "endgeneration", ret);
}

static int parse_jump(JinjaParser *parser, JinjaNodeKind kind, JinjaNode **ret)
{
    JINJA_TRY(jinja_node_new(parser, kind, ret));
    if (parser->loops == 0)
        return jinja_syntax_error(parser->jinja, parser->token->line, "break or continue outside of a loop");
    return expect_block_end(parser);
}

static int parse_break(JinjaParser *parser, JinjaNode **ret)
{
    return parse_jump(parser, JINJA_NODE_BREAK, ret);
}

static int parse_continue(JinjaParser *parser, JinjaNode **ret)
{
    return parse_jump(parser, JINJA_NODE_CONTINUE, ret);
}

static int parse_tag(JinjaParser *parser, JinjaNode **ret)
{
    static const struct {
        const char *name;
        int (*parse)(JinjaParser *parser, JinjaNode **ret);
    } tags[] = {
        {"if", parse_if},         {"for", parse_for},   {"set", parse_set},     {"macro", parse_macro},
        {"call", parse_call},     {"with", parse_with}, {"break", parse_break}, {"continue", parse_continue},
        {"filter", parse_filter_block}, {"generation", parse_generation},
    };
    const JinjaString *name = parser->token->value.string;

    if (parser->token->kind != JINJA_TOKEN_NAME)
        return jinja_unexpected(parser, "the name of a tag");
    for (size_t i = 0; i < N_ELEMENTS(tags); i++)
        if (jinja_take_name(parser, tags[i].name))
            return tags[i].parse(parser, ret);
    return jinja_syntax_error(parser->jinja, parser->token->line, "tag '%.*s' is not supported here", (int)MIN(name->n, (size_t)60), name->data);
}

static bool at_one_of(const JinjaParser *parser, const char *const *names)
{
    for (size_t i = 0; names && names[i]; i++)
        if (jinja_at_name(parser, names[i]))
            return true;
    return false;
}

static int parse_output(JinjaParser *parser, JinjaNode **ret)
{
    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_OUTPUT, ret));
    parser->token++;
    JINJA_TRY(jinja_parse_tuple(parser, &(*ret)->a));
    if (parser->token->kind != JINJA_TOKEN_OUTPUT_END)
        return jinja_unexpected(parser, "}}");
    parser->token++;
    return 0;
}

/* Up to one of @ends (NULL: the end of the template), which stays the next token, behind its "{%". */
static int parse_block(JinjaParser *parser, const char *const *ends, JinjaNode **ret)
{
    JINJA_TRY(jinja_node_new(parser, JINJA_NODE_BLOCK, ret));
    while (parser->token->kind != JINJA_TOKEN_END) {
        JinjaNode *node = NULL;

        if (parser->token->kind == JINJA_TOKEN_TEXT) {
            JINJA_TRY(jinja_node_new(parser, JINJA_NODE_TEXT, &node));
            node->value = (parser->token++)->value;
        } else if (parser->token->kind == JINJA_TOKEN_OUTPUT_BEGIN) {
            JINJA_TRY(parse_output(parser, &node));
        } else {
            parser->token++; /* {% */
            if (at_one_of(parser, ends))
                return 0;
            JINJA_TRY(parse_tag(parser, &node));
        }
        JINJA_TRY(jinja_node_add(parser, *ret, node, NULL));
    }
    if (!ends)
        return 0;
    return jinja_syntax_error(parser->jinja, (*ret)->line, "the block that begins here is not closed by %s",
                              ends[1] && ends[2] ? ends[2] : ends[1] ? ends[1] : ends[0]);
}

int jinja_parse(Jinja *jinja, const char *source, size_t n, JinjaNode **ret)
{
    JinjaTokens tokens = {NULL, 0, 0};
    JinjaParser parser = {.jinja = jinja};

    JINJA_TRY(jinja_tokenize(jinja, source, n, &tokens));
    parser.token = tokens.tokens;
    return parse_block(&parser, NULL, ret);
}
