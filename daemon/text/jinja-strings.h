#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Operations on strings that methods and filters share; tags stay with their characters. */

#include "daemon/text/jinja.h"

/* Strips at one or both ends: blanks (@characters NULL), or any of these characters. */
JinjaString jinja_strip(const JinjaString *string, const JinjaString *characters, bool left, bool right);
/* At most @count times (< 0: all). */
int jinja_replace(Jinja *jinja, const JinjaString *string, const JinjaString *from, const JinjaString *to, int64_t count, JinjaValue *ret);

typedef enum JinjaCase {
    JINJA_CASE_UPPER,
    JINJA_CASE_LOWER,
    JINJA_CASE_CAPITALIZE, /* first character upper, others lower */
    JINJA_CASE_TITLE,      /* so in each word */
} JinjaCase;
/* Characters that map to one character; others stay. */
int jinja_change_case(Jinja *jinja, const JinjaString *string, JinjaCase how, JinjaValue *ret);
