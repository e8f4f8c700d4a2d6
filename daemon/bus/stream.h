#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job's stream: a SEQPACKET socket, one frame a packet, first byte the kind (packaging/dbus/org.leat.Inference1.xml).
 *
 * Writes never block.  When the socket is full the frame waits here, the owner is told to pause its job, and to resume it when everything
 * waiting has gone.  A socket that takes nothing for the timeout makes the stream fail as slow: what waited is dropped, and the owner
 * ends the job, whose last frames still go out if the reader comes back within another timeout.
 */

#include "quant/base/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <systemd/sd-event.h>

typedef struct Stream Stream;

#define STREAM_MAX_TEXT_BYTES  (16 * 1024)
/* Pausing takes effect at a token boundary, so little can pile up; more than this is a mistake and ends the stream as slow. */
#define STREAM_MAX_QUEUE_BYTES (1024 * 1024)

typedef enum StreamEnd {
    STREAM_END_CLOSED, /* the reader closed its end */
    STREAM_END_SLOW,   /* the socket was full for too long; the stream still takes its last frames */
    STREAM_END_DONE,   /* stream_finish() and everything delivered (or given up); the owner frees it */
} StreamEnd;

/* Called from the event loop or from inside a stream_* call, so the owner must not free the stream in them but for
 * STREAM_END_DONE and STREAM_END_CLOSED, after which the stream touches nothing. */
typedef struct StreamOwner {
    void (*pause)(void *userdata, bool paused);
    void (*end)(void *userdata, StreamEnd end);
} StreamOwner;

/* @event, @owner (static) and @userdata are borrowed.  *ret_fd is the reader's end. */
int stream_new(sd_event *event, uint64_t timeout_usec, const StreamOwner *owner, void *userdata, Stream **ret, int *ret_fd);
Stream *stream_free(Stream *stream);
DEFINE_CLEANUP(Stream, stream_free)

/* Valid UTF-8 of any size: cut into T frames between characters. */
int stream_text(Stream *stream, const char *text, size_t n_bytes);
/* A frame of @kind with @object (taken, also on failure; NULL is -ENOMEM). */
int stream_json(Stream *stream, char kind, json_t *object);
/* No more frames. */
void stream_finish(Stream *stream);
/* Whether frames wait for the reader: what may be left out should be. */
bool stream_is_blocked(const Stream *stream);
