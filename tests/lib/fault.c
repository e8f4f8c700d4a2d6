/* SPDX-License-Identifier: Apache-2.0 */
/* Which call fails. */

#include "tests/lib/fault-internal.h"

#include <dirent.h>
#include <execinfo.h>
#include <pthread.h>
#include <string.h>

/* This function and the wrapper stand above the caller. */
#define SKIPPED 2

enum { SITES_MAX = 4096 };

typedef enum FaultKind { FAULT_NONE, FAULT_SITES, FAULT_CALL, FAULT_SITE, FAULT_ALLOCATION } FaultKind;

static struct {
    pthread_mutex_t lock;
    _Atomic FaultKind kind;
    uint32_t at, n_seen; /* n_seen: at the site */
    cl_int code;
    FaultSite site;
    const char *hit;
    FaultSite sites[SITES_MAX];
    size_t n_sites;
} fault = {.lock = PTHREAD_MUTEX_INITIALIZER};
static atomic_uint n_calls, n_allocations;

void fault_init(void)
{
    void *frames[1];

    (void)backtrace(frames, 1); /* loads what it needs */
}

static void arm(FaultKind kind, uint32_t at, cl_int code, const FaultSite *site)
{
    (void)pthread_mutex_lock(&fault.lock);
    fault.at = at;
    fault.code = code;
    fault.hit = NULL;
    fault.n_seen = 0;
    if (site)
        fault.site = *site;
    if (kind == FAULT_SITES)
        fault.n_sites = 0;
    atomic_store(&n_calls, 0);
    atomic_store(&n_allocations, 0);
    atomic_store(&fault.kind, kind);
    (void)pthread_mutex_unlock(&fault.lock);
}

void fault_count(bool sites)
{
    arm(sites ? FAULT_SITES : FAULT_NONE, 0, 0, NULL);
}

void fault_call(uint32_t n, cl_int code)
{
    arm(FAULT_CALL, n, code, NULL);
}

void fault_site(const FaultSite *site, uint32_t n, cl_int code)
{
    arm(FAULT_SITE, n, code, site);
}

void fault_allocation(uint32_t n)
{
    arm(FAULT_ALLOCATION, n, 0, NULL);
}

bool fault_disarm(const char **ret_function)
{
    const char *hit;

    (void)pthread_mutex_lock(&fault.lock);
    hit = fault.hit;
    atomic_store(&fault.kind, FAULT_NONE);
    (void)pthread_mutex_unlock(&fault.lock);
    if (ret_function)
        *ret_function = hit ? hit : "nothing";
    return hit != NULL;
}

uint32_t fault_n_calls(void)
{
    return atomic_load(&n_calls);
}

uint32_t fault_n_allocations(void)
{
    return atomic_load(&n_allocations);
}

size_t fault_n_sites(void)
{
    return fault.n_sites;
}

const FaultSite *fault_site_at(size_t i)
{
    return &fault.sites[i];
}

/* ---- on the way of a call ------------------------------------------------------------------------------------------ */

static void frames_here(void *ret[FAULT_FRAMES])
{
    void *frames[FAULT_FRAMES + SKIPPED + 1] = {NULL};

    (void)backtrace(frames, FAULT_FRAMES + SKIPPED + 1);
    memcpy(ret, frames + SKIPPED + 1, FAULT_FRAMES * sizeof(*ret));
}

static bool is_at(const FaultSite *site, const char *function, void *const frames[FAULT_FRAMES])
{
    return site->function == function && memcmp(site->frames, frames, sizeof(site->frames)) == 0;
}

static void note_site(const char *function, const cl_int *codes, size_t n_codes, void *const frames[FAULT_FRAMES])
{
    size_t i = 0;

    while (i < fault.n_sites && !is_at(&fault.sites[i], function, frames))
        i++;
    if (i == SITES_MAX)
        return;
    if (i == fault.n_sites) {
        fault.sites[fault.n_sites++] = (FaultSite){.function = function, .codes = codes, .n_codes = n_codes};
        memcpy(fault.sites[i].frames, frames, sizeof(fault.sites[i].frames));
    }
    fault.sites[i].n_calls++;
}

static __attribute__((__noinline__)) bool site_decides(const char *function, const cl_int *codes, size_t n_codes)
{
    void *frames[FAULT_FRAMES];

    frames_here(frames);
    if (atomic_load(&fault.kind) == FAULT_SITES)
        note_site(function, codes, n_codes, frames);
    return atomic_load(&fault.kind) == FAULT_SITE && is_at(&fault.site, function, frames) && ++fault.n_seen == fault.at;
}

cl_int fault_enter(const char *function, const cl_int *codes, size_t n_codes)
{
    uint32_t n = atomic_fetch_add(&n_calls, 1) + 1;
    FaultKind kind = atomic_load(&fault.kind);
    cl_int code = CL_SUCCESS;
    bool hits = false;

    if (kind == FAULT_NONE || kind == FAULT_ALLOCATION)
        return CL_SUCCESS;
    (void)pthread_mutex_lock(&fault.lock);
    if (kind == FAULT_CALL)
        hits = n == fault.at;
    else if (!fault.hit)
        hits = site_decides(function, codes, n_codes);
    if (hits) {
        fault.hit = function;
        code = fault.code;
    }
    (void)pthread_mutex_unlock(&fault.lock);
    return code;
}

bool fault_enter_allocation(const char *function)
{
    uint32_t n = atomic_fetch_add(&n_allocations, 1) + 1;
    bool hits = false;

    if (atomic_load(&fault.kind) != FAULT_ALLOCATION)
        return false;
    (void)pthread_mutex_lock(&fault.lock);
    if (n == fault.at) {
        fault.hit = function;
        hits = true;
    }
    (void)pthread_mutex_unlock(&fault.lock);
    return hits;
}

/* ---- leaks --------------------------------------------------------------------------------------------------------- */

void fault_live(FaultLive *ret)
{
    DIR *folder = opendir("/proc/self/fd");

    *ret = (FaultLive){.objects = fault_live_objects(), .blocks = fault_live_blocks(), .mapped_bytes = fault_mapped_bytes()};
    while (folder && readdir(folder))
        ret->descriptors++;
    if (folder)
        (void)closedir(folder);
}
