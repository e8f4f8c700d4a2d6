/* SPDX-License-Identifier: Apache-2.0 */
/* A job's stream. */

#include "daemon/bus/stream.h"
#include "daemon/bus/bus-text.h"

#include <assert.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

typedef struct StreamFrame StreamFrame;
struct StreamFrame {
    StreamFrame *next;
    size_t n_bytes;
    char bytes[]; /* the kind, then the payload */
};

/* How far a reader may lag behind before its job is paused; the kernel doubles it for its own book-keeping. */
#define STREAM_SOCKET_BYTES (64 * 1024)

struct Stream {
    const StreamOwner *owner;
    void *userdata;
    uint64_t timeout_usec;
    sd_event_source *io, *timer;
    StreamFrame *first, **last;
    size_t n_waiting_bytes;
    int fd;
    bool paused;   /* the owner was told */
    bool slow;     /* the timeout has passed once */
    bool finished;
};

static void stream_drop_frames(Stream *stream)
{
    while (stream->first) {
        StreamFrame *next = stream->first->next;

        free(stream->first);
        stream->first = next;
    }
    stream->last = &stream->first;
    stream->n_waiting_bytes = 0;
}

Stream *stream_free(Stream *stream)
{
    if (!stream)
        return NULL;
    stream_drop_frames(stream);
    (void)sd_event_source_disable_unref(stream->io);
    (void)sd_event_source_disable_unref(stream->timer);
    if (stream->fd >= 0)
        (void)close(stream->fd);
    free(stream);
    return NULL;
}

/* The last call into the owner: nothing may touch the stream after it. */
static void stream_end(Stream *stream, StreamEnd end)
{
    (void)sd_event_source_set_enabled(stream->io, SD_EVENT_OFF);
    (void)sd_event_source_set_enabled(stream->timer, SD_EVENT_OFF);
    stream->owner->end(stream->userdata, end);
}

/* 0: sent; 1: the socket is full; else a negative errno (the reader is gone, or worse). */
static int stream_send(Stream *stream, char kind, const void *payload, size_t n_bytes)
{
    struct iovec parts[2] = {{&kind, 1}, {(void *)(uintptr_t)payload, n_bytes}};
    struct msghdr header = {.msg_iov = parts, .msg_iovlen = 2};

    if (sendmsg(stream->fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL | MSG_EOR) >= 0)
        return 0;
    return errno == EAGAIN || errno == ENOBUFS || errno == EINTR ? 1 : -errno;
}

static void stream_start_timer(Stream *stream)
{
    (void)sd_event_source_set_time_relative(stream->timer, stream->timeout_usec);
    (void)sd_event_source_set_enabled(stream->timer, SD_EVENT_ONESHOT);
}

static void stream_set_blocked(Stream *stream, bool blocked)
{
    (void)sd_event_source_set_io_events(stream->io, blocked ? EPOLLOUT : 0);
    if (blocked)
        stream_start_timer(stream);
    else
        (void)sd_event_source_set_enabled(stream->timer, SD_EVENT_OFF);
    if (stream->paused == blocked || stream->slow)
        return;
    stream->paused = blocked;
    if (!stream->finished)
        stream->owner->pause(stream->userdata, blocked);
}

/* What waited is dropped: the text has a hole now, so the job must end.  The last frames may follow. */
static void stream_fail_slow(Stream *stream)
{
    if (stream->slow)
        return;
    stream->slow = true;
    stream_drop_frames(stream);
    if (!stream->finished)
        stream->owner->end(stream->userdata, STREAM_END_SLOW);
}

static int stream_enqueue(Stream *stream, char kind, const void *payload, size_t n_bytes)
{
    StreamFrame *frame;

    if (stream->n_waiting_bytes + n_bytes > STREAM_MAX_QUEUE_BYTES) {
        stream_fail_slow(stream);
        return 0;
    }
    if (!(frame = malloc(sizeof(*frame) + 1 + n_bytes)))
        return error_origin(-ENOMEM);
    frame->next = NULL;
    frame->n_bytes = 1 + n_bytes;
    frame->bytes[0] = kind;
    memcpy(frame->bytes + 1, payload, n_bytes);
    *stream->last = frame;
    stream->last = &frame->next;
    stream->n_waiting_bytes += frame->n_bytes;
    return 0;
}

static int stream_frame(Stream *stream, char kind, const void *payload, size_t n_bytes)
{
    bool was_blocked = stream->first != NULL;
    int r;

    assert(!stream->finished);
    /* Once slow, only the last word goes out: the text has a hole. */
    if (stream->slow && !strchr("UDX", kind))
        return 0;
    if (!was_blocked) {
        r = stream_send(stream, kind, payload, n_bytes);
        if (r <= 0)
            return r == 0 ? 0 : error_trace(r); /* the event loop sees the hang-up, too, and tells the owner */
    }
    if ((r = stream_enqueue(stream, kind, payload, n_bytes)) < 0)
        return error_trace(r);
    if (!was_blocked && stream->first)
        stream_set_blocked(stream, true);
    return 0;
}

int stream_text(Stream *stream, const char *text, size_t n_bytes)
{
    while (n_bytes > 0) {
        size_t n = bus_text_cut(text, n_bytes, STREAM_MAX_TEXT_BYTES);
        int r;

        if (n == 0) /* not UTF-8; still never more than a frame's worth */
            n = MIN(n_bytes, (size_t)STREAM_MAX_TEXT_BYTES);
        if ((r = stream_frame(stream, 'T', text, n)) < 0)
            return error_trace(r);
        text += n;
        n_bytes -= n;
    }
    return 0;
}

int stream_json(Stream *stream, char kind, json_t *object)
{
    _cleanup_(freep) char *payload = object ? json_dumps(object, JSON_COMPACT | JSON_SORT_KEYS) : NULL;

    json_decref(object);
    if (!payload)
        return error_origin(-ENOMEM);
    return stream_frame(stream, kind, payload, strlen(payload));
}

bool stream_is_blocked(const Stream *stream)
{
    return stream->first != NULL;
}

/* 0: all sent; 1: the socket is full again; negative: the reader is gone. */
static int stream_flush(Stream *stream, bool *ret_progress)
{
    *ret_progress = false;
    while (stream->first) {
        StreamFrame *frame = stream->first;
        int r = stream_send(stream, frame->bytes[0], frame->bytes + 1, frame->n_bytes - 1);

        if (r != 0)
            return r;
        *ret_progress = true;
        stream->n_waiting_bytes -= frame->n_bytes;
        if (!(stream->first = frame->next))
            stream->last = &stream->first;
        free(frame);
    }
    return 0;
}

/* Sends what the socket takes; false when that was nothing.  The stream may have ended afterwards. */
static bool stream_go_on(Stream *stream)
{
    bool progress;
    int r = stream_flush(stream, &progress);

    if (r < 0)
        stream_end(stream, STREAM_END_CLOSED);
    else if (r > 0 && progress)
        stream_start_timer(stream);
    else if (r > 0)
        return false;
    else if (stream->finished)
        stream_end(stream, STREAM_END_DONE);
    else
        stream_set_blocked(stream, false);
    return true;
}

static int stream_on_io(sd_event_source *source, int fd, uint32_t events, void *userdata)
{
    Stream *stream = userdata;

    (void)source;
    (void)fd;
    if (events & (EPOLLHUP | EPOLLERR))
        stream_end(stream, STREAM_END_CLOSED);
    else
        (void)stream_go_on(stream);
    return 0;
}

static int stream_on_timer(sd_event_source *source, uint64_t usec, void *userdata)
{
    Stream *stream = userdata;

    (void)source;
    (void)usec;
    /* poll() calls a socket writable only when three quarters of it are free: a reader may have made room that we do not know of. */
    if (stream_go_on(stream))
        return 0;
    if (stream->finished)
        stream_end(stream, STREAM_END_DONE); /* given up */
    else
        stream_fail_slow(stream);
    return 0;
}

void stream_finish(Stream *stream)
{
    assert(!stream->finished);
    stream->finished = true;
    if (!stream->first) {
        stream_end(stream, STREAM_END_DONE);
        return;
    }
    stream_start_timer(stream);
}

int stream_new(sd_event *event, uint64_t timeout_usec, const StreamOwner *owner, void *userdata, Stream **ret, int *ret_fd)
{
    _cleanup_(stream_freep) Stream *stream = calloc(1, sizeof(*stream));
    _cleanup_(close_fdp) int reader = -1;
    int ends[2], size = STREAM_SOCKET_BYTES, r;

    if (!stream)
        return error_origin(-ENOMEM);
    *stream = (Stream){.owner = owner, .userdata = userdata, .timeout_usec = timeout_usec, .fd = -1};
    stream->last = &stream->first;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
        return error_origin(-errno);
    stream->fd = ends[0];
    reader = ends[1];
    /* Frames flow one way; what a reader writes is refused at once instead of piling up. */
    if (setsockopt(stream->fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size)) < 0 || shutdown(stream->fd, SHUT_RD) < 0)
        return error_origin(-errno);
    if ((r = sd_event_add_io(event, &stream->io, stream->fd, 0, stream_on_io, stream)) < 0 ||
        (r = sd_event_add_time_relative(event, &stream->timer, CLOCK_MONOTONIC, 0, 0, stream_on_timer, stream)) < 0 ||
        (r = sd_event_source_set_enabled(stream->timer, SD_EVENT_OFF)) < 0)
        return error_trace(r);
    *ret = TAKE_PTR(stream);
    *ret_fd = TAKE_FD(reader);
    return 0;
}
