#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From token bytes to text that may be shown: whole UTF-8 only, and nothing that could still turn out to be a stop string.  Invalid
 * bytes become U+FFFD, one for each maximal subpart.  Every character comes out exactly once, in order.
 *
 * The stop that is complete first wins; of several complete at the same character, the longest.  So the result does not depend on how
 * the bytes were cut into tokens.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct TextStream TextStream;

/* @stops: n stop strings (borrowed during the call; copied); empty ones and invalid UTF-8 are refused with -EINVAL. */
int text_stream_new(const char *const *stops, size_t n_stops, TextStream **ret);
TextStream *text_stream_free(TextStream *stream);
DEFINE_CLEANUP(TextStream, text_stream_free)
/* Feeds bytes of one token; *ret_text (borrowed until the next call) is what became certain, valid UTF-8, possibly "" (it may hold U+0000).
 * Returns 0, or 1 when a stop string is complete: the text before it is in *ret_text, the rest is dropped and the stream is closed
 * (further calls return 1 and ""). */
int text_stream_push(TextStream *stream, const char *bytes, size_t n, const char **ret_text, size_t *ret_length);
/* At the end: what was held back (a partial character becomes U+FFFD; should that complete a stop, the text before it).  Closes the
 * stream. */
int text_stream_finish(TextStream *stream, const char **ret_text, size_t *ret_length);
