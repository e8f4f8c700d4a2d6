/* SPDX-License-Identifier: Apache-2.0 */
/* Whole characters out of token bytes, stop strings held back: one KMP automaton per stop. */

#include "daemon/text/text-stream.h"
#include "daemon/text/utf8.h"

#include <string.h>

typedef struct Stop {
    char *text;
    size_t length;
    size_t *fallback; /* fallback[i]: longest proper border of the first i bytes */
    size_t matched;   /* how many bytes of the stop the text seen so far ends with */
} Stop;

struct TextStream {
    Stop *stops;
    size_t n_stops;
    char *text; /* [0, released) went out with the last call; [released, length) is held back */
    size_t released, length, capacity;
    char partial[4]; /* a sequence that is well-formed so far */
    size_t n_partial;
    bool closed;
};

static int stop_init(Stop *stop, const char *text)
{
    size_t border = 0;

    stop->length = strlen(text);
    if (stop->length == 0 || utf8_valid_prefix(text, stop->length) != stop->length)
        return error_origin(-EINVAL);
    stop->text = strdup(text);
    stop->fallback = calloc(stop->length + 1, sizeof(*stop->fallback));
    if (!stop->text || !stop->fallback)
        return error_origin(-ENOMEM);
    for (size_t i = 1; i < stop->length; i++) {
        while (border > 0 && text[i] != text[border])
            border = stop->fallback[border];
        border += text[i] == text[border];
        stop->fallback[i + 1] = border;
    }
    return 0;
}

/* Whether the stop is complete with this byte. */
static bool stop_step(Stop *stop, char byte)
{
    while (stop->matched > 0 && stop->text[stop->matched] != byte)
        stop->matched = stop->fallback[stop->matched];
    stop->matched += stop->text[stop->matched] == byte;
    return stop->matched == stop->length;
}

int text_stream_new(const char *const *stops, size_t n_stops, TextStream **ret)
{
    _cleanup_(text_stream_freep) TextStream *stream = calloc(1, sizeof(*stream));
    int r;

    if (!stream)
        return error_origin(-ENOMEM);
    stream->stops = calloc(n_stops ? n_stops : 1, sizeof(*stream->stops));
    if (!stream->stops)
        return error_origin(-ENOMEM);
    for (; stream->n_stops < n_stops; stream->n_stops++) {
        r = stop_init(&stream->stops[stream->n_stops], stops[stream->n_stops]);
        if (r) {
            stream->n_stops++; /* the half-built one is freed with the rest */
            return error_trace(r);
        }
    }
    *ret = TAKE_PTR(stream);
    return 0;
}

TextStream *text_stream_free(TextStream *stream)
{
    if (!stream)
        return NULL;
    for (size_t i = 0; i < stream->n_stops; i++) {
        free(stream->stops[i].text);
        free(stream->stops[i].fallback);
    }
    free(stream->stops);
    free(stream->text);
    free(stream);
    return NULL;
}

/* Drops what the last call gave out and makes room for @n input bytes, each of which becomes at most one U+FFFD (3 bytes). */
static int text_stream_reserve(TextStream *stream, size_t n)
{
    size_t held = stream->length - stream->released, needed;
    char *text;

    if (held)
        memmove(stream->text, stream->text + stream->released, held);
    stream->length = held;
    stream->released = 0;
    if (n > (SIZE_MAX / 8) || held > SIZE_MAX / 8)
        return error_origin(-EOVERFLOW);
    needed = held + 3 * (n + sizeof(stream->partial)) + 1;
    if (needed <= stream->capacity)
        return 0;
    needed += needed / 2;
    text = realloc(stream->text, needed);
    if (!text)
        return error_origin(-ENOMEM);
    stream->text = text;
    stream->capacity = needed;
    return 0;
}

/* Appends one whole character; true when it completes a stop, and the text is then cut before it. */
static bool text_stream_append(TextStream *stream, const char *bytes, size_t n)
{
    size_t longest = 0;

    memcpy(stream->text + stream->length, bytes, n);
    stream->length += n;
    for (size_t i = 0; i < stream->n_stops; i++) {
        Stop *stop = &stream->stops[i];
        bool complete = false;

        for (size_t k = 0; k < n; k++)
            complete = stop_step(stop, bytes[k]);
        if (complete)
            longest = MAX(longest, stop->length);
    }
    stream->length -= longest;
    return longest > 0;
}

/* How much of the end of the text may still become a stop. */
static size_t text_stream_held(const TextStream *stream)
{
    size_t held = 0;

    for (size_t i = 0; i < stream->n_stops; i++)
        held = MAX(held, stream->stops[i].matched);
    return held;
}

static void text_stream_release(TextStream *stream, const char **ret_text, size_t *ret_length)
{
    stream->released = stream->length - (stream->closed ? 0 : text_stream_held(stream));
    *ret_text = stream->released ? stream->text : "";
    *ret_length = stream->released;
}

int text_stream_push(TextStream *stream, const char *bytes, size_t n, const char **ret_text, size_t *ret_length)
{
    bool stopped = stream->closed;
    size_t i = 0;
    int r;

    r = text_stream_reserve(stream, n);
    if (r)
        return error_trace(r);
    while (i < n && !stopped) {
        uint32_t code_point;
        int length;

        /* Bytes pass through the partial sequence, which is empty or a single undecided beginning. */
        stream->partial[stream->n_partial++] = bytes[i++];
        length = utf8_decode(stream->partial, stream->n_partial, &code_point);
        if (length == 0)
            continue;
        if (length > 0) {
            stopped = text_stream_append(stream, stream->partial, (size_t)length);
            stream->n_partial = 0;
            continue;
        }
        stopped = text_stream_append(stream, "\xef\xbf\xbd", 3);
        if (stream->n_partial > (size_t)-length)
            i--; /* the last byte did not belong to the sequence: it begins the next one */
        stream->n_partial = 0;
    }
    stream->closed = stopped;
    text_stream_release(stream, ret_text, ret_length);
    return stopped;
}

int text_stream_finish(TextStream *stream, const char **ret_text, size_t *ret_length)
{
    int r;

    r = text_stream_reserve(stream, 0);
    if (r)
        return error_trace(r);
    if (stream->n_partial > 0 && !stream->closed)
        (void)text_stream_append(stream, "\xef\xbf\xbd", 3);
    stream->n_partial = 0;
    stream->closed = true;
    text_stream_release(stream, ret_text, ret_length);
    return 0;
}
