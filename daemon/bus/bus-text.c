/* SPDX-License-Identifier: Apache-2.0 */
/* Text for the bus. */

#include "daemon/bus/bus-text.h"
#include "daemon/text/utf8.h"

#include <string.h>

bool bus_text_is_valid(const char *text, size_t n, size_t *ret_offset)
{
    size_t valid = strnlen(text, n);

    valid = utf8_valid_prefix(text, valid);
    if (valid < n && ret_offset)
        *ret_offset = valid;
    return valid == n;
}

void bus_text_scrub(char *text)
{
    size_t n = strlen(text), offset;

    while (!bus_text_is_valid(text, n, &offset)) {
        text[offset] = '?';
        text += offset + 1;
        n -= offset + 1;
    }
}

size_t bus_text_cut(const char *text, size_t n, size_t limit)
{
    if (n <= limit)
        return n;
    while (limit > 0 && ((unsigned char)text[limit] & 0xc0) == 0x80)
        limit--;
    return limit;
}
