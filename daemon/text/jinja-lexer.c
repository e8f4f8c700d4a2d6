/* SPDX-License-Identifier: Apache-2.0 */
/* Template source to tokens. */

#include "daemon/text/jinja-lexer.h"
#include "daemon/text/utf8.h"

#include <string.h>

typedef struct Lexer {
    Jinja *jinja;
    const char *source;
    size_t n, at;
    uint32_t line;
    bool line_starting; /* the last tag ended a line, or there was none yet */
    JinjaTokens tokens;
} Lexer;

static int lexer_push(Lexer *lexer, JinjaTokenKind kind, JinjaValue value)
{
    JinjaTokens *tokens = &lexer->tokens;

    if (tokens->n == tokens->capacity) {
        size_t capacity = MAX(2 * tokens->capacity, (size_t)64);
        JinjaToken *grown = jinja_alloc(lexer->jinja, capacity * sizeof(*grown));

        if (!grown)
            return jinja_alloc_failed(lexer->jinja);
        if (tokens->n)
            memcpy(grown, tokens->tokens, tokens->n * sizeof(*grown));
        tokens->tokens = grown;
        tokens->capacity = capacity;
    }
    tokens->tokens[tokens->n++] = (JinjaToken){kind, lexer->line, value};
    return 0;
}

static int lexer_push_text(Lexer *lexer, JinjaTokenKind kind, const char *text, size_t n)
{
    JinjaValue value;

    JINJA_TRY(jinja_value_of_string(lexer->jinja, (JinjaString){text, n, NULL, true}, &value));
    return lexer_push(lexer, kind, value);
}

/* Goes on to @at, counting lines. */
static void lexer_advance(Lexer *lexer, size_t at)
{
    for (; lexer->at < at; lexer->at++)
        lexer->line += lexer->source[lexer->at] == '\n';
}

static bool lexer_looks_at(const Lexer *lexer, size_t at, const char *text)
{
    size_t n = strlen(text);

    return n <= lexer->n - at && memcmp(lexer->source + at, text, n) == 0;
}

/* Bytes of the blank character at @at; 0: none. */
static size_t blank_size(const char *text, size_t n, size_t at)
{
    uint32_t code_point;
    int size = at < n ? utf8_decode(text + at, n - at, &code_point) : 0;

    return size > 0 && (utf8_is_space(code_point) || (code_point >= 0x1c && code_point <= 0x1f)) ? (size_t)size : 0;
}

static size_t skip_blanks(const Lexer *lexer, size_t at)
{
    size_t size;

    while ((size = blank_size(lexer->source, lexer->n, at)) > 0)
        at += size;
    return at;
}

/* The length of @text without blanks at its end. */
static size_t strip_end(const char *text, size_t n)
{
    for (;;) {
        size_t begin = n;

        while (begin > 0 && ((unsigned char)text[--begin] & 0xc0) == 0x80)
            ;
        if (n == 0 || blank_size(text, n, begin) != n - begin)
            return n;
        n = begin;
    }
}

/* The text before a tag, as the tag's sign and lstrip_blocks leave it. */
static int lexer_push_before(Lexer *lexer, size_t begin, size_t end, char sign, bool strips_line)
{
    const char *text = lexer->source + begin;
    size_t n = end - begin;

    if (sign == '-')
        n = strip_end(text, n);
    else if (sign != '+' && strips_line) {
        const char *newline = n ? memrchr(text, '\n', n) : NULL;
        size_t line_begin = newline ? (size_t)(newline - text) + 1 : 0;

        if ((line_begin > 0 || lexer->line_starting) && strip_end(text + line_begin, n - line_begin) == 0)
            n = line_begin;
    }
    return n ? lexer_push_text(lexer, JINJA_TOKEN_TEXT, text, n) : 0;
}

/* Goes behind a tag's end of @n bytes and what its sign and trim_blocks take along. */
static void lexer_finish_tag(Lexer *lexer, size_t at, size_t n, char sign, bool trims)
{
    size_t end = at + n;

    if (sign == '-')
        end = skip_blanks(lexer, end);
    else if (sign != '+' && trims && end < lexer->n && lexer->source[end] == '\n')
        end++;
    lexer->line_starting = end > 0 && lexer->source[end - 1] == '\n';
    lexer_advance(lexer, end);
}

/* ---- inside of tags ------------------------------------------------------------------------------------------------------------- */

static int hex_digits(const Lexer *lexer, size_t at, int n, uint32_t *ret)
{
    *ret = 0;
    for (int i = 0; i < n; i++) {
        char c = at + (size_t)i < lexer->n ? lexer->source[at + (size_t)i] : 0;
        int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;

        if (digit < 0)
            return -1;
        *ret = *ret * 16 + (uint32_t)digit;
    }
    return 0;
}

/* One escape at *at, which is behind the backslash. */
static int lexer_escape(Lexer *lexer, size_t *at, JinjaBuffer *buffer)
{
    static const char letters[] = "ntrabfv\\'\"", bytes[] = "\n\t\r\a\b\f\v\\'\"";
    char c = lexer->source[*at], text[4];
    const char *found = c ? strchr(letters, c) : NULL;
    int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    uint32_t code_point;

    ++*at;
    if (c == '\n') /* a continued line */
        return 0;
    if (found)
        return jinja_buffer_add_text(lexer->jinja, buffer, &bytes[found - letters], 1, true);
    if (c == '0') {
        text[0] = 0;
        return jinja_buffer_add_text(lexer->jinja, buffer, text, 1, true);
    }
    if (digits == 0) /* not an escape: both characters stay; the second is read with what follows */
        return --*at, jinja_buffer_add_text(lexer->jinja, buffer, "\\", 1, true);
    if (hex_digits(lexer, *at, digits, &code_point) || code_point > 0x10ffff || (code_point >= 0xd800 && code_point < 0xe000))
        return jinja_syntax_error(lexer->jinja, lexer->line, "escape \\%c without the digits of a character", c);
    *at += (size_t)digits;
    return jinja_buffer_add_text(lexer->jinja, buffer, text, (size_t)utf8_encode(code_point, text), true);
}

static int lexer_string(Lexer *lexer)
{
    char quote = lexer->source[lexer->at];
    size_t at = lexer->at + 1;
    JinjaBuffer buffer = {0};
    JinjaValue value;

    while (at < lexer->n && lexer->source[at] != quote) {
        size_t run = at;

        while (run < lexer->n && lexer->source[run] != quote && lexer->source[run] != '\\')
            run++;
        JINJA_TRY(jinja_buffer_add_text(lexer->jinja, &buffer, lexer->source + at, run - at, true));
        at = run;
        if (at + 1 < lexer->n && lexer->source[at] == '\\') {
            size_t before = ++at;

            JINJA_TRY(lexer_escape(lexer, &at, &buffer));
            if (at == before) { /* an unknown escape: its character is ordinary, even a multi-byte one's first byte */
                size_t size = 1;

                while (at + size < lexer->n && ((unsigned char)lexer->source[at + size] & 0xc0) == 0x80)
                    size++;
                JINJA_TRY(jinja_buffer_add_text(lexer->jinja, &buffer, lexer->source + at, size, true));
                at += size;
            }
        } else if (at < lexer->n && lexer->source[at] == '\\')
            at++;
    }
    if (at >= lexer->n)
        return jinja_syntax_error(lexer->jinja, lexer->line, "a string is not closed");
    JINJA_TRY(jinja_buffer_value(lexer->jinja, &buffer, &value));
    JINJA_TRY(lexer_push(lexer, JINJA_TOKEN_STRING, value));
    lexer_advance(lexer, at + 1);
    return 0;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_name_byte(char c)
{
    return is_digit(c) || ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_' || (unsigned char)c >= 0x80;
}

static int lexer_number(Lexer *lexer)
{
    size_t at = lexer->at, n = 0;
    bool real = false;
    char text[64], *end;
    JinjaValue value = {.type = JINJA_INT};

    for (; at < lexer->n && n + 1 < sizeof(text); at++) {
        char c = lexer->source[at], next = at + 1 < lexer->n ? lexer->source[at + 1] : 0;
        bool exponent = (c == 'e' || c == 'E') && (is_digit(next) || next == '+' || next == '-');

        if (c == '_' && is_digit(next))
            continue;
        if (!is_digit(c) && !(c == '.' && is_digit(next) && !real) && !exponent)
            break;
        real |= c == '.' || exponent;
        text[n++] = c;
        if (exponent && !is_digit(next) && n + 1 < sizeof(text))
            text[n++] = lexer->source[++at];
    }
    text[n] = 0;
    errno = 0;
    if (real) {
        value.type = JINJA_FLOAT;
        value.real = strtod(text, &end);
    } else
        value.integer = strtoll(text, &end, 10);
    if (*end || (errno && !real) || n + 1 >= sizeof(text) || (at < lexer->n && is_name_byte(lexer->source[at])))
        return jinja_syntax_error(lexer->jinja, lexer->line, "the number %.60s is not understood", text);
    lexer->at = at;
    return lexer_push(lexer, real ? JINJA_TOKEN_FLOAT : JINJA_TOKEN_INTEGER, value);
}

static int lexer_symbol(Lexer *lexer)
{
    static const char *const symbols[] = {"//", "**", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">",
                                          "=",  "(",  ")",  "[",  "]",  "{",  "}", ",", ".", ":", "|", ";"};

    for (size_t i = 0; i < N_ELEMENTS(symbols); i++)
        if (lexer_looks_at(lexer, lexer->at, symbols[i])) {
            JINJA_TRY(lexer_push_text(lexer, JINJA_TOKEN_SYMBOL, symbols[i], strlen(symbols[i])));
            lexer->at += strlen(symbols[i]);
            return 0;
        }
    return jinja_syntax_error(lexer->jinja, lexer->line, "character '%c' is not understood here", lexer->source[lexer->at]);
}

static int lexer_token(Lexer *lexer)
{
    char c = lexer->source[lexer->at];

    if (c == '\'' || c == '"')
        return lexer_string(lexer);
    if (is_digit(c))
        return lexer_number(lexer);
    if (is_name_byte(c)) {
        size_t begin = lexer->at;

        while (lexer->at < lexer->n && is_name_byte(lexer->source[lexer->at]))
            lexer->at++;
        return lexer_push_text(lexer, JINJA_TOKEN_NAME, lexer->source + begin, lexer->at - begin);
    }
    return lexer_symbol(lexer);
}

/* The tokens of one tag, up to its end: "}}" or "%}", maybe with a sign before it, outside of brackets. */
static int lexer_tag(Lexer *lexer, JinjaTokenKind end_kind, const char *end)
{
    unsigned brackets = 0;

    for (;;) {
        size_t at = skip_blanks(lexer, lexer->at);
        char sign, c;

        lexer_advance(lexer, at);
        if (at >= lexer->n)
            return jinja_syntax_error(lexer->jinja, lexer->line, "a tag is not closed by %s", end);
        c = lexer->source[at];
        sign = c == '-' || (c == '+' && end_kind == JINJA_TOKEN_BLOCK_END) ? c : 0;
        if (brackets == 0 && lexer_looks_at(lexer, at + (sign != 0), end)) {
            JINJA_TRY(lexer_push(lexer, end_kind, (JinjaValue){.type = JINJA_NONE}));
            lexer_finish_tag(lexer, at, 2 + (sign != 0), sign, end_kind == JINJA_TOKEN_BLOCK_END);
            return 0;
        }
        brackets += c == '(' || c == '[' || c == '{';
        brackets -= brackets > 0 && (c == ')' || c == ']' || c == '}');
        JINJA_TRY(lexer_token(lexer));
    }
}

/* ---- outside ---------------------------------------------------------------------------------------------------------------------- */

/* Whether "{% NAME %}" stands at @at; *ret_end is behind it, *ret_signs its two signs. */
static bool lexer_block_named(const Lexer *lexer, size_t at, const char *name, size_t *ret_end, char ret_signs[2])
{
    ret_signs[0] = ret_signs[1] = 0;
    if (!lexer_looks_at(lexer, at, "{%"))
        return false;
    at += 2;
    if (at < lexer->n && (lexer->source[at] == '-' || lexer->source[at] == '+'))
        ret_signs[0] = lexer->source[at++];
    at = skip_blanks(lexer, at);
    if (!lexer_looks_at(lexer, at, name))
        return false;
    at = skip_blanks(lexer, at + strlen(name));
    if (at < lexer->n && (lexer->source[at] == '-' || lexer->source[at] == '+'))
        ret_signs[1] = lexer->source[at++];
    *ret_end = at + 2;
    return lexer_looks_at(lexer, at, "%}");
}

/* {% raw %} … {% endraw %}: text, whatever is in it. */
static int lexer_raw(Lexer *lexer, size_t end, char sign)
{
    size_t begin, close_end = 0;
    char signs[2];

    lexer_finish_tag(lexer, end, 0, sign, true);
    begin = lexer->at;
    for (size_t at = begin; at < lexer->n; at++)
        if (lexer_block_named(lexer, at, "endraw", &close_end, signs)) {
            JINJA_TRY(lexer_push_before(lexer, begin, at, signs[0], true));
            lexer_finish_tag(lexer, close_end, 0, signs[1], true);
            return 0;
        }
    return jinja_syntax_error(lexer->jinja, lexer->line, "raw is not closed by endraw");
}

static int lexer_comment(Lexer *lexer)
{
    const char *end = memmem(lexer->source + lexer->at + 2, lexer->n - lexer->at - 2, "#}", 2);
    char sign;

    if (!end)
        return jinja_syntax_error(lexer->jinja, lexer->line, "a comment is not closed by #}");
    sign = end - 1 >= lexer->source + lexer->at + 2 ? end[-1] : 0;
    lexer_finish_tag(lexer, (size_t)(end - lexer->source), 2, sign == '-' || sign == '+' ? sign : 0, true);
    return 0;
}

/* The tag that begins at lexer->at. */
static int lexer_any_tag(Lexer *lexer, size_t text_begin)
{
    char kind = lexer->source[lexer->at + 1], sign = lexer->at + 2 < lexer->n ? lexer->source[lexer->at + 2] : 0, signs[2];
    size_t end;

    JINJA_TRY(lexer_push_before(lexer, text_begin, lexer->at, sign, kind != '{'));
    if (kind == '#')
        return lexer_comment(lexer);
    if (lexer_block_named(lexer, lexer->at, "raw", &end, signs)) {
        lexer_advance(lexer, end);
        return lexer_raw(lexer, end, signs[1]);
    }
    JINJA_TRY(lexer_push(lexer, kind == '{' ? JINJA_TOKEN_OUTPUT_BEGIN : JINJA_TOKEN_BLOCK_BEGIN, (JinjaValue){.type = JINJA_NONE}));
    lexer_advance(lexer, lexer->at + 2 + (sign == '-' || sign == '+'));
    if (kind == '{')
        return lexer_tag(lexer, JINJA_TOKEN_OUTPUT_END, "}}");
    return lexer_tag(lexer, JINJA_TOKEN_BLOCK_END, "%}");
}

int jinja_tokenize(Jinja *jinja, const char *source, size_t n, JinjaTokens *ret)
{
    Lexer lexer = {.jinja = jinja, .source = source, .n = n, .line = 1, .line_starting = true};

    if (lexer.n > 0 && source[lexer.n - 1] == '\n')
        lexer.n--;
    while (lexer.at < lexer.n) {
        size_t begin = lexer.at, at = begin;

        while (at < lexer.n && !lexer_looks_at(&lexer, at, "{{") && !lexer_looks_at(&lexer, at, "{%") && !lexer_looks_at(&lexer, at, "{#"))
            at++;
        if (at == lexer.n)
            JINJA_TRY(lexer_push_text(&lexer, JINJA_TOKEN_TEXT, source + begin, at - begin));
        lexer_advance(&lexer, at);
        if (at < lexer.n)
            JINJA_TRY(lexer_any_tag(&lexer, begin));
    }
    JINJA_TRY(lexer_push(&lexer, JINJA_TOKEN_END, (JinjaValue){.type = JINJA_NONE}));
    *ret = lexer.tokens;
    return 0;
}
