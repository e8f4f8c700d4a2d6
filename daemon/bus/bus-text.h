#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Text as the bus demands it: well-formed UTF-8 without NUL; one bad string would cost the connection. */

#include <stdbool.h>
#include <stddef.h>

/* Whether @n bytes may travel in a D-Bus string; else *ret_offset (may be NULL) is the first byte that may not. */
bool bus_text_is_valid(const char *text, size_t n, size_t *ret_offset);
/* Replaces every byte that may not travel by '?', in place. */
void bus_text_scrub(char *text);
/* The largest n <= @limit at which @text (valid, @n bytes) may be cut between characters. */
size_t bus_text_cut(const char *text, size_t n, size_t limit);
