#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scoped ownership: a local that owns something carries _cleanup_(x_freep); ownership is handed over by
 * TAKE_PTR(), which leaves NULL behind.
 */

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define _cleanup_(function) __attribute__((__cleanup__(function)))
#define _printf_(format, first) __attribute__((__format__(__printf__, format, first)))
#define _unused_ __attribute__((__unused__))

/* The pointer, and NULL in its place. */
#define TAKE_PTR(pointer)                                                                                    \
    ({                                                                                                       \
        __auto_type _taken_from = &(pointer);                                                                \
        __auto_type _taken = *_taken_from;                                                                   \
        *_taken_from = NULL;                                                                                 \
        _taken;                                                                                              \
    })

/* The descriptor, and -1 in its place. */
#define TAKE_FD(fd)                                                                                          \
    ({                                                                                                       \
        int *_taken_from = &(fd);                                                                            \
        int _taken = *_taken_from;                                                                           \
        *_taken_from = -1;                                                                                   \
        _taken;                                                                                              \
    })

/* Defines static inline void x_freep(T **) for a destructor that takes NULL. */
#define DEFINE_CLEANUP(Type, destructor)                                                                     \
    _unused_ static inline void destructor##p(Type **object)                                                 \
    {                                                                                                        \
        if (*object)                                                                                         \
            (void)destructor(*object);                                                                       \
    }

static inline void freep(void *object)
{
    free(*(void **)object);
}

static inline void close_fdp(const int *fd)
{
    if (*fd >= 0)
        (void)close(*fd);
}

static inline void close_filep(FILE **file)
{
    if (*file)
        (void)fclose(*file);
}

#define N_ELEMENTS(array) (sizeof(array) / sizeof((array)[0]))
#define MIN(a, b)                                                                                            \
    ({                                                                                                       \
        __auto_type _a = (a);                                                                                \
        __auto_type _b = (b);                                                                                \
        _a < _b ? _a : _b;                                                                                   \
    })
#define MAX(a, b)                                                                                            \
    ({                                                                                                       \
        __auto_type _a = (a);                                                                                \
        __auto_type _b = (b);                                                                                \
        _a > _b ? _a : _b;                                                                                   \
    })
