/* SPDX-License-Identifier: Apache-2.0 */
/* Named objects of the bus tree. */

#include "daemon/bus/roster.h"
#include "daemon/bus/bus-private.h"

#include <string.h>

static BusNamed *bus_named_free(BusNamed *named)
{
    if (!named)
        return NULL;
    free(named->name);
    free(named->path);
    free(named);
    return NULL;
}
DEFINE_CLEANUP(BusNamed, bus_named_free)

static int bus_named_new(Bus *bus, const char *root, const char *name, BusNamed **ret)
{
    _cleanup_(bus_named_freep) BusNamed *named = calloc(1, sizeof(*named));
    int r;

    if (!named || !(named->name = strdup(name)))
        return error_origin(-ENOMEM);
    named->bus = bus;
    if ((r = sd_bus_path_encode(root, name, &named->path)) < 0)
        return error_trace(r);
    *ret = TAKE_PTR(named);
    return 0;
}

BusNamed *bus_roster_find(const BusRoster *roster, const char *name)
{
    for (size_t i = 0; i < roster->n_named; i++)
        if (strcmp(roster->named[i]->name, name) == 0)
            return roster->named[i];
    return NULL;
}

BusNamed *bus_roster_find_path(const BusRoster *roster, const char *path)
{
    for (size_t i = 0; i < roster->n_named; i++)
        if (strcmp(roster->named[i]->path, path) == 0)
            return roster->named[i];
    return NULL;
}

void bus_roster_clear(BusRoster *roster)
{
    for (size_t i = 0; i < roster->n_named; i++)
        bus_named_free(roster->named[i]);
    free(roster->named);
    *roster = (BusRoster){0};
}

/* Objects of @next that are not in @roster are new, those of @roster that are not in @next go. */
static void bus_roster_swap(BusRoster *roster, Bus *bus, BusRoster next)
{
    BusRoster old = *roster;

    for (size_t i = 0; i < old.n_named; i++)
        if (!bus_roster_find(&next, old.named[i]->name))
            (void)sd_bus_emit_object_removed(bus->bus, old.named[i]->path);
    *roster = next;
    for (size_t i = 0; i < next.n_named; i++)
        if (!bus_roster_find(&old, next.named[i]->name))
            (void)sd_bus_emit_object_added(bus->bus, next.named[i]->path);
    bus_roster_clear(&old);
}

int bus_roster_set(BusRoster *roster, Bus *bus, const char *root, size_t n_names, const char *(*name_of)(const void *userdata, size_t index),
                   const void *userdata)
{
    BusRoster next = {.named = calloc(MAX(n_names, (size_t)1), sizeof(*next.named))};
    int r = next.named ? 0 : error_origin(-ENOMEM);

    for (size_t i = 0; r >= 0 && i < n_names; i++) {
        const BusNamed *old = bus_roster_find(roster, name_of(userdata, i));

        if ((r = bus_named_new(bus, root, name_of(userdata, i), &next.named[i])) < 0)
            break;
        next.n_named++;
        if (old) {
            next.named[i]->n_requests = old->n_requests;
            next.named[i]->n_failures = old->n_failures;
        }
    }
    if (r < 0) {
        bus_roster_clear(&next);
        return error_trace(r);
    }
    bus_roster_swap(roster, bus, next);
    return 0;
}

int bus_roster_paths(const BusRoster *roster, char ***ret)
{
    char **paths = calloc(roster->n_named + 1, sizeof(*paths));

    for (size_t i = 0; paths && i < roster->n_named; i++)
        if (!(paths[i] = strdup(roster->named[i]->path))) {
            while (i-- > 0)
                free(paths[i]);
            free(paths);
            paths = NULL;
            break;
        }
    if (!paths)
        return error_origin(-ENOMEM);
    *ret = paths;
    return 0;
}
