#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Errors.  Functions return 0, or a negative errno that is passed up unchanged, or one of their own documented
 * positive X_E_… codes, which the direct caller handles.  What a person should read travels in an ErrorDetail,
 * the last parameter, which may be NULL.
 */

#include "quant/base/cleanup.h"

#include <errno.h>

typedef struct ErrorDetail {
    /* One sentence that names the culprit (key, tensor, file, number), valid UTF-8, no newline; empty when unset. */
    char text[480];
} ErrorDetail;

#define ERROR_DETAIL_NULL ((ErrorDetail){{0}})

/* Writes the text (cut at a whole UTF-8 character) unless @reterr is NULL; always returns @code. */
int error_detail_set(ErrorDetail *reterr, int code, const char *format, ...) _printf_(3, 4);

/* Puts "prefix: " before what is there. */
void error_detail_prefix(ErrorDetail *reterr, const char *format, ...) _printf_(2, 3);

/* A line of trace at debug level on the failing path only; each evaluates to @code. */
int error_trace_at(int code, const char *file, int line, const char *function, const char *what);

/* The place where an error arises. */
#define error_origin(code) error_trace_at((code), __FILE__, __LINE__, __func__, "raised")
/* A place that passes it on. */
#define error_trace(code) error_trace_at((code), __FILE__, __LINE__, __func__, "passed on")
/* A callee's positive code that this caller did not expect becomes a fatal one. */
#define error_fold(code)                                                                                     \
    ({                                                                                                       \
        int _code = (code);                                                                                  \
        _code > 0 ? error_trace_at(-ENOTRECOVERABLE, __FILE__, __LINE__, __func__, "folded") : _code;        \
    })
