/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a client's descriptor. */

#include "daemon/bus/input.h"

#include <inttypes.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#ifndef FUSE_SUPER_MAGIC
#define FUSE_SUPER_MAGIC 0x65735546
#endif

/* Read in one turn of the event loop, so that a client with a lot to say does not keep the others waiting. */
#define INPUT_CHUNK_BYTES (256 * 1024)

typedef enum InputKind { INPUT_FILE, INPUT_PIPE, INPUT_SOCKET } InputKind;

struct Input {
    InputKind kind;
    InputHandler handler;
    void *userdata;
    sd_event_source *source;
    uint64_t max_bytes;
    char *bytes;
    size_t n, capacity;
    int fd;
    int relay[2]; /* a pipe of our own: see input_read_pipe() */
};

Input *input_free(Input *input)
{
    if (!input)
        return NULL;
    (void)sd_event_source_disable_unref(input->source);
    close_fdp(&input->fd);
    close_fdp(&input->relay[0]);
    close_fdp(&input->relay[1]);
    free(input->bytes);
    free(input);
    return NULL;
}

static void input_done(Input *input, int r, const ErrorDetail *detail)
{
    (void)sd_event_source_set_enabled(input->source, SD_EVENT_OFF);
    if (r == 0)
        input->bytes[input->n] = 0;
    input->handler(input->userdata, r, input->bytes, input->n, detail);
}

/* Room for a chunk and the NUL. */
static int input_grow(Input *input)
{
    size_t need = input->n + INPUT_CHUNK_BYTES + 1, capacity = MAX(need, input->capacity * 2);
    char *bytes;

    if (need <= input->capacity)
        return 0;
    if (!(bytes = realloc(input->bytes, capacity)))
        return error_origin(-ENOMEM);
    input->bytes = bytes;
    input->capacity = capacity;
    return 0;
}

/* The client may hold the reading end, too, and drain it or clear O_NONBLOCK between our poll and our read; splice() with
 * SPLICE_F_NONBLOCK never waits, whatever the flags of the description say. */
static ssize_t input_read_pipe(Input *input, char *to, size_t n_bytes)
{
    ssize_t n = splice(input->fd, NULL, input->relay[1], NULL, n_bytes, SPLICE_F_NONBLOCK);

    return n > 0 ? read(input->relay[0], to, (size_t)n) : n;
}

static ssize_t input_read_some(Input *input, char *to, size_t n_bytes)
{
    switch (input->kind) {
    case INPUT_FILE:
        return read(input->fd, to, n_bytes);
    case INPUT_PIPE:
        return input_read_pipe(input, to, n_bytes);
    case INPUT_SOCKET:
        return recv(input->fd, to, n_bytes, MSG_DONTWAIT);
    }
    errno = EBADF;
    return -1;
}

/* One chunk.  1: more to come; 0: the end; negative: failed. */
static int input_read(Input *input, ErrorDetail *reterr)
{
    ssize_t n;
    int r = input_grow(input);

    if (r < 0)
        return error_detail_set(reterr, r, "no memory for %zu bytes of input", input->n);
    n = input_read_some(input, input->bytes + input->n, INPUT_CHUNK_BYTES);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 1;
    if (n < 0)
        return error_detail_set(reterr, -errno, "cannot read the descriptor: %s", strerror(errno));
    input->n += (size_t)n;
    if (input->n > input->max_bytes)
        return error_detail_set(reterr, -EFBIG, "the descriptor has more than %" PRIu64 " bytes", input->max_bytes);
    return n > 0;
}

static int input_on_io(sd_event_source *source, int fd, uint32_t events, void *userdata)
{
    Input *input = userdata;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r;

    (void)source;
    (void)fd;
    (void)events;
    r = input_read(input, &detail);
    if (r <= 0)
        input_done(input, r, &detail);
    return 0;
}

/* Ordinary files are always ready, which epoll refuses to say. */
static int input_on_turn(sd_event_source *source, void *userdata)
{
    return input_on_io(source, -1, EPOLLIN, userdata);
}

int input_refuse_fuse(int fd)
{
    struct statfs system;

    if (fstatfs(fd, &system) < 0)
        return error_origin(-errno);
    return (uint64_t)system.f_type == FUSE_SUPER_MAGIC ? error_origin(-EBADF) : 0;
}

static int input_check_kind(int fd, InputKind *ret_kind, ErrorDetail *reterr)
{
    struct stat status;
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0 || fstat(fd, &status) < 0)
        return error_detail_set(reterr, -errno, "the descriptor cannot be used: %s", strerror(errno));
    if ((flags & O_ACCMODE) == O_WRONLY || (flags & O_PATH))
        return error_detail_set(reterr, -EBADF, "the descriptor is not open for reading");
    if (!S_ISREG(status.st_mode) && !S_ISFIFO(status.st_mode) && !S_ISSOCK(status.st_mode))
        return error_detail_set(reterr, -EBADF, "the descriptor is not a pipe, socket, memfd or ordinary file");
    if (S_ISREG(status.st_mode) && input_refuse_fuse(fd) < 0)
        return error_detail_set(reterr, -EBADF, "the descriptor is a file of a FUSE file system; send it through a pipe");
    *ret_kind = S_ISREG(status.st_mode) ? INPUT_FILE : S_ISFIFO(status.st_mode) ? INPUT_PIPE : INPUT_SOCKET;
    return 0;
}

int input_new(sd_event *event, int fd, uint64_t max_bytes, InputHandler handler, void *userdata, Input **ret, ErrorDetail *reterr)
{
    _cleanup_(input_freep) Input *input = calloc(1, sizeof(*input));
    int r;

    if (!input) {
        (void)close(fd);
        return error_origin(-ENOMEM);
    }
    *input = (Input){.handler = handler, .userdata = userdata, .max_bytes = max_bytes, .fd = fd, .relay = {-1, -1}};
    if ((r = input_check_kind(fd, &input->kind, reterr)) < 0)
        return error_trace(r);
    if (input->kind == INPUT_PIPE && pipe2(input->relay, O_CLOEXEC | O_NONBLOCK) < 0)
        return error_origin(-errno);
    if (input->kind == INPUT_FILE) {
        r = sd_event_add_defer(event, &input->source, input_on_turn, input);
        if (r >= 0) /* a defer source runs once unless told otherwise */
            r = sd_event_source_set_enabled(input->source, SD_EVENT_ON);
    } else {
        r = sd_event_add_io(event, &input->source, fd, EPOLLIN, input_on_io, input);
    }
    if (r < 0)
        return error_trace(r);
    *ret = TAKE_PTR(input);
    return 0;
}

int input_check_file(int fd, bool write, ErrorDetail *reterr)
{
    struct stat status;
    int flags = fcntl(fd, F_GETFL), wrong = write ? O_RDONLY : O_WRONLY;

    if (flags < 0 || fstat(fd, &status) < 0)
        return error_detail_set(reterr, -EBADF, "the descriptor: %s", strerror(errno));
    if ((flags & O_ACCMODE) == wrong || (flags & O_PATH))
        return error_detail_set(reterr, -EBADF, "the descriptor is not open for %s", write ? "writing" : "reading");
    if (!S_ISREG(status.st_mode))
        return error_detail_set(reterr, -EBADF, "the descriptor is not an ordinary file");
    return input_refuse_fuse(fd) < 0 ? error_detail_set(reterr, -EBADF, "the descriptor is a file of a FUSE file system") : 0;
}
