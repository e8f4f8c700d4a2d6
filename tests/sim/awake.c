/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Workers of an OpenCL implementation that do not fall asleep: libawake.so, for LD_PRELOAD, beside the layer or without it.
 *
 * A GPU that waits for a copy starts its kernel within microseconds.  A thread that sleeps is woken by an interrupt, which from one virtual
 * processor to another takes tens of them.  Here pthread_cond_wait() of a thread that is bound to one processor, and not to the program's
 * last, which is the copies', looks for its signal for a while (AWAKE_USEC, 100 ms) before it sleeps.
 *
 * A library of its own: within the layer the names would mean the C library's oldest versions wherever it is not preloaded.
 */

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define AWAKE_USEC 100000
#define N_TRIES    64 /* waits of a thread until it must be bound */
#define N_COUNTERS 64
#define LOOKS      64 /* between two looks at the clock */

#define SHOWN __attribute__((visibility("default")))

static struct {
    int (*wait)(pthread_cond_t *, pthread_mutex_t *);
    int (*signal)(pthread_cond_t *);
    int (*broadcast)(pthread_cond_t *);
    cpu_set_t copies; /* the processor that they have */
    uint64_t awake_nsec;
    /* Signals so far, by condition; that two may share a counter only makes a wait end for nothing, which it may. */
    atomic_uint counters[N_COUNTERS];
} awake;

/* How often this thread was looked at; < 0: it has a processor to itself. */
static __thread int looked_at __attribute__((tls_model("initial-exec")));

/* The C library has conditions of two kinds, which do not know each other; without a version dlsym() may find the old one. */
static void *find(const char *name)
{
    void *function = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");

    return function ? function : dlsym(RTLD_NEXT, name);
}

__attribute__((constructor)) static void begin(void)
{
    const char *usec = getenv("AWAKE_USEC");
    cpu_set_t allowed;

    *(void **)&awake.signal = find("pthread_cond_signal");
    *(void **)&awake.broadcast = find("pthread_cond_broadcast");
    *(void **)&awake.wait = find("pthread_cond_wait");
    CPU_ZERO(&awake.copies);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0)
        return;
    for (size_t i = CPU_SETSIZE; i-- > 0 && CPU_COUNT(&awake.copies) == 0;)
        if (CPU_ISSET(i, &allowed))
            CPU_SET(i, &awake.copies);
    awake.awake_nsec = 1000 * (usec ? strtoull(usec, NULL, 10) : AWAKE_USEC);
}

static atomic_uint *counter_of(const pthread_cond_t *cond)
{
    return &awake.counters[((uintptr_t)cond / 16) % N_COUNTERS];
}

static bool has_processor(void)
{
    cpu_set_t allowed;

    if (looked_at < 0 || looked_at == N_TRIES)
        return looked_at < 0;
    looked_at++;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0 && CPU_COUNT(&allowed) == 1 && !CPU_EQUAL(&allowed, &awake.copies))
        looked_at = -1;
    return looked_at < 0;
}

static uint64_t now_nsec(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void look_for_signal(const atomic_uint *counter, unsigned seen)
{
    uint64_t until = now_nsec() + awake.awake_nsec;

    do {
        for (unsigned i = 0; i < LOOKS; i++) {
            if (atomic_load_explicit(counter, memory_order_acquire) != seen)
                return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    } while (now_nsec() < until);
}

SHOWN int pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex)
{
    const atomic_uint *counter = counter_of(cond);
    unsigned seen = atomic_load(counter);

    if (awake.awake_nsec == 0 || !has_processor())
        return awake.wait(cond, mutex);
    (void)pthread_mutex_unlock(mutex);
    look_for_signal(counter, seen);
    (void)pthread_mutex_lock(mutex);
    /* With the mutex held the condition is still as it was: nobody has said otherwise. */
    return atomic_load(counter) != seen ? 0 : awake.wait(cond, mutex);
}

SHOWN int pthread_cond_signal(pthread_cond_t *cond)
{
    (void)atomic_fetch_add_explicit(counter_of(cond), 1, memory_order_release);
    return awake.signal(cond);
}

SHOWN int pthread_cond_broadcast(pthread_cond_t *cond)
{
    (void)atomic_fetch_add_explicit(counter_of(cond), 1, memory_order_release);
    return awake.broadcast(cond);
}
