/* SPDX-License-Identifier: Apache-2.0 */
/* Text made fit to travel. */

#include "daemon/text/utf8.h"

#include <stdlib.h>
#include <string.h>

size_t utf8_clean(const char *text, size_t n, char *ret)
{
    size_t at = 0, length = 0;

    while (at < n) {
        uint32_t code_point;
        int size = utf8_decode(text + at, n - at, &code_point);

        if (size <= 0 || code_point == 0) {
            ret[length++] = '?';
            at++;
        } else if (utf8_is_noncharacter(code_point)) {
            length += (size_t)utf8_encode(UTF8_REPLACEMENT, ret + length);
            at += (size_t)size;
        } else {
            memmove(ret + length, text + at, (size_t)size);
            length += (size_t)size;
            at += (size_t)size;
        }
    }
    return length;
}

char *utf8_clean_copy(const char *text, size_t n)
{
    char *copy = malloc(n + 1);

    if (copy)
        copy[utf8_clean(text, n, copy)] = 0;
    return copy;
}
