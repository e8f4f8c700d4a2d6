/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who is ordered after whom, and who meets whom.
 *
 * Commands stand in at most SIM_N_CHAINS chains; in a chain each is ordered after the one before.  A command's clock says, for each chain, how far
 * all is complete when it begins; the host's clock says what the host has seen complete.  Two accesses of the same bytes of which one writes
 * race when neither command's clock covers the other: nothing orders them, whatever the times of this run were.
 */

#include "tests/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    uint64_t tail; /* place of the last command */
    bool owned;    /* by an in-order queue */
} chains[SIM_N_CHAINS];
static uint64_t host_clock[SIM_N_CHAINS];
static bool told_short;

void order_begin(SimStamp *stamp)
{
    *stamp = (SimStamp){.chain = 0};
    memcpy(stamp->clock, host_clock, sizeof(host_clock));
}

void order_after(SimStamp *stamp, const SimStamp *before)
{
    /* What is not known stays so for all that follows. */
    if (before->chain < 0 && before->at == 0)
        stamp->chain = -1;
    for (size_t i = 0; i < SIM_N_CHAINS; i++)
        stamp->clock[i] = SIM_MAX(stamp->clock[i], before->clock[i]);
    if (before->chain >= 0)
        stamp->clock[before->chain] = SIM_MAX(stamp->clock[before->chain], before->at);
}

static int chain_for(const uint64_t *clock)
{
    for (int i = 0; i < SIM_N_CHAINS; i++)
        if (!chains[i].owned && clock[i] >= chains[i].tail)
            return i;
    if (!told_short)
        report_note("more than %d streams of commands at once: races of some are not looked for", SIM_N_CHAINS);
    told_short = true;
    return -1;
}

int order_chain_new(void)
{
    int chain = chain_for(host_clock);

    if (chain >= 0)
        chains[chain].owned = true;
    return chain;
}

void order_chain_free(int chain)
{
    if (chain >= 0)
        chains[chain].owned = false;
}

void order_place(SimStamp *stamp, int chain)
{
    if (stamp->chain < 0) {
        stamp->at = 0;
        return;
    }
    stamp->chain = chain >= 0 ? chain : chain_for(stamp->clock);
    if (stamp->chain < 0)
        return;
    stamp->at = ++chains[stamp->chain].tail;
    stamp->clock[stamp->chain] = stamp->at;
}

void order_seen(const SimStamp *stamp)
{
    for (size_t i = 0; i < SIM_N_CHAINS; i++)
        host_clock[i] = SIM_MAX(host_clock[i], stamp->clock[i]);
}

bool order_is_seen(int chain, uint64_t at)
{
    return chain < 0 || host_clock[chain] >= at;
}

static void report_race(const SimAccess *earlier, const SimAccess *later, const char *what)
{
    char place[96];

    if (what)
        (void)snprintf(place, sizeof(place), "%s bytes %llu to %llu", what,
                       (unsigned long long)SIM_MAX(earlier->begin, later->begin),
                       (unsigned long long)(SIM_MIN(earlier->end, later->end) - 1));
    else
        (void)snprintf(place, sizeof(place), "host memory %#llx, %llu bytes",
                       (unsigned long long)SIM_MAX(earlier->begin, later->begin),
                       (unsigned long long)(SIM_MIN(earlier->end, later->end) - SIM_MAX(earlier->begin, later->begin)));
    report_misuse("race", "%s #%llu%s%s %s %s while %s #%llu%s%s %s it: nothing orders them", sim_function_name(later->function),
                  (unsigned long long)later->ordinal, *later->label ? " " : "", later->label, later->writes ? "writes" : "reads",
                  place, sim_function_name(earlier->function), (unsigned long long)earlier->ordinal, *earlier->label ? " " : "",
                  earlier->label, earlier->writes ? "writes" : "reads");
}

/* A kernel that reads a buffer may read another part of it than a copy of a small part writes. */
static bool may_be_apart(const SimAccess *a, const SimAccess *b)
{
    return (a->may_read_only && b->is_part) || (b->may_read_only && a->is_part);
}

/* Whether an access need no longer be kept once @later is: whoever meets it meets @later too, or it is over for everybody. */
static bool is_covered(const SimAccess *earlier, const SimAccess *later, bool ordered)
{
    if (order_is_seen(earlier->chain, earlier->at))
        return true;
    if (*later->label && earlier->is_part)
        return false; /* it may not use what the earlier one does */
    return ordered && later->begin <= earlier->begin && later->end >= earlier->end && (later->writes || !earlier->writes);
}

void order_access(SimAccesses *accesses, const SimStamp *stamp, SimAccess access, const char *what)
{
    size_t n_kept = 0;

    if (access.begin >= access.end || stamp->chain < 0)
        return;
    access.chain = stamp->chain;
    access.at = stamp->at;
    for (size_t i = 0; i < accesses->n_items; i++) {
        SimAccess *earlier = &accesses->items[i];
        bool same = earlier->chain == access.chain && earlier->at == access.at;
        bool ordered = same || stamp->clock[earlier->chain] >= earlier->at;

        if (!ordered && (earlier->writes || access.writes) && earlier->begin < access.end && access.begin < earlier->end &&
            sim.config.checks & SIM_CHECK_RACE && !may_be_apart(earlier, &access))
            report_race(earlier, &access, what);
        if (!is_covered(earlier, &access, ordered))
            accesses->items[n_kept++] = *earlier;
    }
    accesses->n_items = n_kept;
    if (accesses->n_items == accesses->n_allocated) {
        size_t n = SIM_MAX(2 * accesses->n_allocated, (size_t)16);
        SimAccess *items = realloc(accesses->items, n * sizeof(*items));

        if (!items)
            return;
        accesses->items = items;
        accesses->n_allocated = n;
    }
    accesses->items[accesses->n_items++] = access;
}

bool order_find_unseen(SimAccesses *accesses, uint64_t begin, uint64_t end, SimAccess *ret)
{
    size_t n_kept = 0;
    bool found = false;

    for (size_t i = 0; i < accesses->n_items; i++) {
        SimAccess *access = &accesses->items[i];

        if (order_is_seen(access->chain, access->at))
            continue;
        if (!found && access->begin < end && begin < access->end) {
            *ret = *access;
            found = true;
        }
        accesses->items[n_kept++] = *access;
    }
    accesses->n_items = n_kept;
    return found;
}
