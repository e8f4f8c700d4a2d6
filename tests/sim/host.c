/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of the host that copies use.  free(), realloc() and munmap() are here for programs that are started with the layer in LD_PRELOAD as
 * well: giving back memory that a command still uses, or that the program has not seen it be done with, is reported at the call.  Without
 * LD_PRELOAD only memory that is no longer mapped when its turn comes is found.
 */

#include "tests/sim/sim.h"

#include <dlfcn.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

bool host_is_mapped(const void *from, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)from & ~(uintptr_t)(page - 1), end = (uintptr_t)from + bytes;
    unsigned char present[256];

    while (begin < end) {
        size_t n = SIM_MIN(end - begin, page * sizeof(present));

        if (mincore((void *)begin, n, present) != 0)
            return false;
        begin += n;
    }
    return true;
}

/* Of what the job reads from the host, row by row; 64-bit words mixed, for a change of any byte. */
uint64_t host_hash(const SimJob *job)
{
    uint64_t hash = UINT64_C(0x9e3779b97f4a7c15);

    for (size_t z = 0; z < job->region[2]; z++)
        for (size_t y = 0; y < job->region[1]; y++) {
            const unsigned char *row = job->from.host + job->from.offset + z * job->from.slice_pitch + y * job->from.row_pitch;

            for (size_t x = 0; x < job->region[0]; x += sizeof(uint64_t)) {
                uint64_t word = 0;

                memcpy(&word, row + x, SIM_MIN(sizeof(word), job->region[0] - x));
                hash = (hash ^ word) * UINT64_C(0xff51afd7ed558ccd);
                hash ^= hash >> 32;
            }
        }
    return hash;
}

/* ---- giving back ---------------------------------------------------------------------------------------------------- */

static void check_returned(const char *call, const void *memory, size_t bytes)
{
    SimAccess access;
    bool found;

    /* The layer's own calls come with the lock held, or are for memory that no copy uses. */
    if (bytes == 0 || sim_is_locked() || atomic_load(&sim.n_host) == 0 || !(sim.config.checks & SIM_CHECK_HOST))
        return;
    sim_lock();
    found = order_find_unseen(&sim.host, (uintptr_t)memory, (uintptr_t)memory + bytes, &access);
    atomic_store(&sim.n_host, sim.host.n_items);
    sim_unlock();
    if (found)
        report_misuse("host-freed", "%s of host memory that %s #%llu %s: its completion was not waited for", call,
                      sim_function_name(access.function), (unsigned long long)access.ordinal, access.writes ? "writes" : "reads");
}

/* The C library's, or whatever stands between. */
extern void __libc_free(void *memory);
extern void *__libc_realloc(void *memory, size_t size);

static void (*next_free)(void *);
static void *(*next_realloc)(void *, size_t);
static int (*next_munmap)(void *, size_t);

__attribute__((constructor)) static void find_next(void)
{
    next_free = dlsym(RTLD_NEXT, "free");
    next_realloc = dlsym(RTLD_NEXT, "realloc");
    next_munmap = dlsym(RTLD_NEXT, "munmap");
}

__attribute__((visibility("default"))) void free(void *memory)
{
    if (memory && atomic_load(&sim.n_host) > 0)
        check_returned("free()", memory, malloc_usable_size(memory));
    if (next_free)
        next_free(memory);
    else
        __libc_free(memory);
}

__attribute__((visibility("default"))) void *realloc(void *memory, size_t size)
{
    if (memory && atomic_load(&sim.n_host) > 0)
        check_returned("realloc()", memory, malloc_usable_size(memory));
    return next_realloc ? next_realloc(memory, size) : __libc_realloc(memory, size);
}

__attribute__((visibility("default"))) int munmap(void *memory, size_t bytes)
{
    if (atomic_load(&sim.n_host) > 0)
        check_returned("munmap()", memory, bytes);
    return next_munmap ? next_munmap(memory, bytes) : -1;
}
