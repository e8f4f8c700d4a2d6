#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text as the bus takes it: well-formed UTF-8 without NUL; one bad string would cost the connection.  sd-bus takes less than D-Bus allows: no
 * noncharacters either (U+FDD0 to U+FDEF, and the last two code points of each plane), which a model may well say.
 */

#include <stdbool.h>
#include <stddef.h>
#include <systemd/sd-bus.h>

/* Whether @n bytes are well-formed UTF-8 without NUL; else *ret_offset (may be NULL) is the first byte that is not. */
bool bus_text_is_valid(const char *text, size_t n, size_t *ret_offset);
/* Makes a string fit to travel, in place (utf8_clean()). */
void bus_text_scrub(char *text);
/* Appends a string to @m, scrubbed; NULL is the empty one. */
int bus_text_append(sd_bus_message *m, const char *text);
/* The largest n <= @limit at which @text (valid, @n bytes) may be cut between characters. */
size_t bus_text_cut(const char *text, size_t n, size_t limit);
