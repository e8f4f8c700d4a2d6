#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A descriptor of a client's, read to its end without ever blocking: pipes, sockets and terminals through the event loop, memfds and
 * ordinary files at once.  Files of a FUSE file system are refused: their owner decides how long a read takes.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stdint.h>
#include <systemd/sd-event.h>

typedef struct Input Input;

#define INPUT_MAX_BYTES (UINT64_C(64) << 20)

/* Called once: @r is 0 with @n bytes (borrowed, followed by a NUL), or negative with the reason in @detail.  The owner frees the input in it or
 * later.  Never called from input_new(). */
typedef void (*InputHandler)(void *userdata, int r, char *bytes, size_t n, const ErrorDetail *detail);

/* @fd is taken, also on failure. */
int input_new(sd_event *event, int fd, uint64_t max_bytes, InputHandler handler, void *userdata, Input **ret, ErrorDetail *reterr);
Input *input_free(Input *input);
DEFINE_CLEANUP(Input, input_free)

/* 0, or -EBADF when @fd is a file of a FUSE file system. */
int input_refuse_fuse(int fd);
/* 0 when @fd is an ordinary file that is open for reading, or with @write for writing, and whose owner cannot make that wait; else -EBADF
 * with the reason. */
int input_check_file(int fd, bool write, ErrorDetail *reterr);
