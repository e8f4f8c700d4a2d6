#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Template source to tokens.  White space control is done here: "-" strips to the next text, trim_blocks drops the newline after a
 * block or comment, lstrip_blocks the blanks before one on its line ("+" keeps either), and one newline at the very end is dropped.
 */

#include "daemon/text/jinja.h"

typedef enum JinjaTokenKind {
    JINJA_TOKEN_TEXT,         /* outside of tags */
    JINJA_TOKEN_OUTPUT_BEGIN, /* {{ */
    JINJA_TOKEN_OUTPUT_END,
    JINJA_TOKEN_BLOCK_BEGIN, /* {% */
    JINJA_TOKEN_BLOCK_END,
    JINJA_TOKEN_NAME,
    JINJA_TOKEN_STRING, /* escapes resolved */
    JINJA_TOKEN_INTEGER,
    JINJA_TOKEN_FLOAT,
    JINJA_TOKEN_SYMBOL,
    JINJA_TOKEN_END,
} JinjaTokenKind;

typedef struct JinjaToken {
    JinjaTokenKind kind;
    uint32_t line;
    JinjaValue value; /* the text of text, names, strings and symbols; numbers */
} JinjaToken;

typedef struct JinjaTokens {
    JinjaToken *tokens;
    size_t n, capacity;
} JinjaTokens;

/* In the arena; ends with JINJA_TOKEN_END.  @source: valid UTF-8, newlines already as \n, kept as long as the arena. */
int jinja_tokenize(Jinja *jinja, const char *source, size_t n, JinjaTokens *ret);
