/* SPDX-License-Identifier: Apache-2.0 */
/* Text for the bus. */

#include "daemon/bus/bus-text.h"
#include "daemon/text/utf8.h"
#include "quant/base/error.h"

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
    text[utf8_clean(text, strlen(text), text)] = 0;
}

int bus_text_append(sd_bus_message *m, const char *text)
{
    _cleanup_(freep) char *copy = utf8_clean_copy(text, text ? strlen(text) : 0);

    return copy ? sd_bus_message_append_basic(m, 's', copy) : error_origin(-ENOMEM);
}

size_t bus_text_cut(const char *text, size_t n, size_t limit)
{
    if (n <= limit)
        return n;
    while (limit > 0 && ((unsigned char)text[limit] & 0xc0) == 0x80)
        limit--;
    return limit;
}
