#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What the statement parser and the expression parser share. */

#include "daemon/text/jinja-lexer.h"

/* Expressions and blocks nest no deeper, which bounds the recursion of the parser and of everything that walks the tree. */
#define JINJA_PARSE_DEPTH_MAX 100

typedef struct JinjaParser {
    Jinja *jinja;
    const JinjaToken *token; /* the next one; the last is JINJA_TOKEN_END */
    unsigned depth;
    unsigned loops;      /* how many for blocks enclose this place, within the macro */
    unsigned conditions; /* how many ifs: in them a filter or test that we lack is an error only when it is reached, as in Jinja */
} JinjaParser;

int jinja_node_new(JinjaParser *parser, JinjaNodeKind kind, JinjaNode **ret);
int jinja_node_add(JinjaParser *parser, JinjaNode *node, JinjaNode *item, const JinjaString *name);
bool jinja_at_symbol(const JinjaParser *parser, const char *symbol);
bool jinja_at_name(const JinjaParser *parser, const char *name);
/* Takes the token when it is there. */
bool jinja_take_symbol(JinjaParser *parser, const char *symbol);
bool jinja_take_name(JinjaParser *parser, const char *name);
int jinja_expect_symbol(JinjaParser *parser, const char *symbol);
int jinja_expect_name(JinjaParser *parser, const JinjaString **ret);
int jinja_unexpected(JinjaParser *parser, const char *wanted);
int jinja_enter(JinjaParser *parser);

int jinja_parse_expression(JinjaParser *parser, JinjaNode **ret);
/* An expression, or several with commas between: a tuple. */
int jinja_parse_tuple(JinjaParser *parser, JinjaNode **ret);
/* As an expression, but "if" ends it: what a for loops over. */
int jinja_parse_unconditional(JinjaParser *parser, JinjaNode **ret);
/* Names (and, in set, name.attribute) with commas between. */
int jinja_parse_target(JinjaParser *parser, bool attributes, JinjaNode **ret);
/* "| name(…) | …" behind @value. */
int jinja_parse_filters(JinjaParser *parser, JinjaNode *value, bool first_without_bar, JinjaNode **ret);
