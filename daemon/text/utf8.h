#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* UTF-8 by the table of well-formed sequences (Unicode, chapter 3, table 3-7), one character at a time. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Looks at the first character of @n > 0 bytes.  Returns its length (1 to 4) and the code point; or the negated length of the ill-formed
 * maximal subpart that one U+FFFD stands for; or 0 when the bytes end within a sequence that is well-formed so far.
 */
static inline int utf8_decode(const char *text, size_t n, uint32_t *ret_code_point)
{
    const uint8_t *s = (const uint8_t *)text;
    uint8_t low = 0x80, high = 0xbf;
    uint32_t code_point;
    int length;

    if (s[0] < 0x80) {
        *ret_code_point = s[0];
        return 1;
    }
    if (s[0] < 0xc2 || s[0] > 0xf4)
        return -1;
    length = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    code_point = s[0] & (0x7fU >> length);
    if (s[0] == 0xe0)
        low = 0xa0;
    else if (s[0] == 0xed)
        high = 0x9f;
    else if (s[0] == 0xf0)
        low = 0x90;
    else if (s[0] == 0xf4)
        high = 0x8f;
    for (int i = 1; i < length; i++) {
        if ((size_t)i == n)
            return 0;
        if (s[i] < low || s[i] > high)
            return -i;
        code_point = code_point << 6 | (s[i] & 0x3f);
        low = 0x80;
        high = 0xbf;
    }
    *ret_code_point = code_point;
    return length;
}

/* Writes 1 to 4 bytes. */
static inline int utf8_encode(uint32_t code_point, char *ret)
{
    if (code_point < 0x80) {
        ret[0] = (char)code_point;
        return 1;
    }
    if (code_point < 0x800) {
        ret[0] = (char)(0xc0 | code_point >> 6);
        ret[1] = (char)(0x80 | (code_point & 0x3f));
        return 2;
    }
    if (code_point < 0x10000) {
        ret[0] = (char)(0xe0 | code_point >> 12);
        ret[1] = (char)(0x80 | (code_point >> 6 & 0x3f));
        ret[2] = (char)(0x80 | (code_point & 0x3f));
        return 3;
    }
    ret[0] = (char)(0xf0 | code_point >> 18);
    ret[1] = (char)(0x80 | (code_point >> 12 & 0x3f));
    ret[2] = (char)(0x80 | (code_point >> 6 & 0x3f));
    ret[3] = (char)(0x80 | (code_point & 0x3f));
    return 4;
}

/* Length of the longest prefix that is whole, well-formed UTF-8. */
static inline size_t utf8_valid_prefix(const char *text, size_t n)
{
    size_t i = 0;

    while (i < n) {
        uint32_t code_point;
        int length = utf8_decode(text + i, n - i, &code_point);

        if (length <= 0)
            break;
        i += (size_t)length;
    }
    return i;
}

/* What stands for a character that cannot be shown. */
#define UTF8_REPLACEMENT 0xfffdU

/* Code points that are for internal use and never get a character (Unicode, section 23.7). */
static inline bool utf8_is_noncharacter(uint32_t c)
{
    return (c >= 0xfdd0 && c <= 0xfdef) || (c & 0xfffe) == 0xfffe;
}

/* White space as Unicode's property White_Space has it. */
static inline bool utf8_is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

/* @n bytes of @text to @ret, made fit for a bus: every byte that is not well-formed or is NUL becomes '?', every noncharacter U+FFFD.  Nothing
 * becomes longer, and @ret may be @text.  Returns the length; writes no NUL at the end. */
size_t utf8_clean(const char *text, size_t n, char *ret);
/* The same as a string that the caller frees; @text may be NULL when @n is 0.  NULL: no memory. */
char *utf8_clean_copy(const char *text, size_t n);
