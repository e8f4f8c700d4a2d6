/* SPDX-License-Identifier: Apache-2.0 */
/* Error texts and the trace of a failing path. */

#include "quant/base/error.h"
#include "quant/base/log.h"

#include <stdarg.h>
#include <string.h>

/* Cuts a text that vsnprintf() truncated back to a whole UTF-8 character and turns control characters to spaces. */
static void error_detail_tidy(char *text, size_t size)
{
    size_t n = strnlen(text, size - 1);

    text[n] = 0;
    if (n == size - 1) {
        while (n > 0 && ((unsigned char)text[n - 1] & 0xc0) == 0x80)
            n--;
        if (n > 0 && (unsigned char)text[n - 1] >= 0xc0)
            n--;
        text[n] = 0;
    }
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = ' ';
}

int error_detail_set(ErrorDetail *reterr, int code, const char *format, ...)
{
    if (reterr) {
        va_list args;

        va_start(args, format);
        (void)vsnprintf(reterr->text, sizeof(reterr->text), format, args);
        va_end(args);
        error_detail_tidy(reterr->text, sizeof(reterr->text));
    }
    return error_origin(code);
}

void error_detail_prefix(ErrorDetail *reterr, const char *format, ...)
{
    char prefix[sizeof(reterr->text)], rest[sizeof(reterr->text)];
    va_list args;

    if (!reterr)
        return;
    va_start(args, format);
    (void)vsnprintf(prefix, sizeof(prefix), format, args);
    va_end(args);
    memcpy(rest, reterr->text, sizeof(rest));
    if (rest[0])
        (void)snprintf(reterr->text, sizeof(reterr->text), "%.200s: %.270s", prefix, rest);
    else
        (void)snprintf(reterr->text, sizeof(reterr->text), "%.470s", prefix);
    error_detail_tidy(reterr->text, sizeof(reterr->text));
}

int error_trace_at(int code, const char *file, int line, const char *function, const char *what)
{
    if (code)
        log_debug("%s:%d: %s: error %d %s", file, line, function, code, what);
    return code;
}
