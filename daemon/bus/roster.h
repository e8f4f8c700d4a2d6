#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The named objects of one kind that the configuration asks for: models, services.
 *
 * Each has the path ROOT/NAME.  An object stays, with its counts, as long as its name is configured; what comes and what goes is announced on
 * the bus.  The roster owns its objects; a pointer to one holds until the next bus_roster_set(). */

#include "quant/base/cleanup.h"

#include <stddef.h>
#include <stdint.h>
#include <systemd/sd-bus.h>

struct Bus;

typedef struct BusNamed {
    struct Bus *bus;                   /* borrowed */
    char *name, *path;
    uint64_t n_requests, n_failures;   /* of a service */
} BusNamed;

typedef struct BusRoster {
    BusNamed **named;
    size_t n_named;
} BusRoster;

/* The object of this name, or of this path; NULL when there is none. */
BusNamed *bus_roster_find(const BusRoster *roster, const char *name);
BusNamed *bus_roster_find_path(const BusRoster *roster, const char *path);

/* Makes the roster what name_of(@userdata, 0 to @n_names - 1) names, below @root.  Announced are those that go while they can still be found,
 * and those that come when they can.  Negative errno: nothing has changed. */
int bus_roster_set(BusRoster *roster, struct Bus *bus, const char *root, size_t n_names, const char *(*name_of)(const void *userdata, size_t index),
                   const void *userdata);

/* The paths of all, as a node enumerator gives them: the caller frees each and the array.  Negative errno: nothing is returned. */
int bus_roster_paths(const BusRoster *roster, char ***ret);

/* Frees all without a word on the bus. */
void bus_roster_clear(BusRoster *roster);
