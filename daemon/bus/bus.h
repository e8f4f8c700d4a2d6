#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bus side of leatd: org.leat.Inference1 over sd-bus.  What a caller sees is in packaging/dbus/org.leat.Inference1.xml.
 *
 * One file for each interface: it parses, authorises, replies.  The work is the engine's.  Everything here runs in the main thread
 * and never waits for the engine or for a client; the bus driver alone is asked synchronously (who is this caller?).
 */

#include "daemon/config/config.h"

#include <systemd/sd-bus.h>
#include <systemd/sd-event.h>

typedef struct Bus Bus;

#define BUS_NAME                 "org.leat.Inference1"
#define BUS_STREAM_TIMEOUT_USEC  (UINT64_C(30) * 1000000)

typedef struct BusOptions {
    sd_event *event;        /* borrowed; must outlive the bus, as engine and config must */
    Engine *engine;
    const Config *config;
    const char *config_path; /* what CheckConfig reads; NULL: the system's */
    bool user;               /* the session bus instead of the system bus */
    uint64_t stream_timeout_usec; /* how long a stream may stay full */
    /* Reads the configuration again, tells the engine and calls bus_set_config(); -EINVAL with the first mistake when it is wrong. */
    int (*reload)(void *userdata, ErrorDetail *reterr);
    /* The device was opened, could not be, or was lost. */
    void (*device_changed)(void *userdata);
    void *userdata;
} BusOptions;

/* Connects, puts up the objects and takes the name.  Returns 0; -EEXIST when another process has the name; another negative errno
 * when there is no bus. */
int bus_new(const BusOptions *options, Bus **ret, ErrorDetail *reterr);
Bus *bus_free(Bus *bus);
DEFINE_CLEANUP(Bus, bus_free)

/* After a reload: @config (borrowed, must outlive the bus) is in effect; objects that came or went are announced.  On failure the
 * old configuration's objects stay. */
int bus_set_config(Bus *bus, const Config *config);
/* After a reload that was refused. */
void bus_set_config_failed(Bus *bus);
/* No job, session or question of anybody's, and for how long. */
bool bus_is_idle(const Bus *bus, uint64_t *ret_idle_usec);
/* Gives the name up; 0, or 1 when a call came in meanwhile: then the name is ours again and the caller goes on. */
int bus_release_if_idle(Bus *bus);
/* Ends every job of every client with ShuttingDown, and flushes. */
void bus_shut_down(Bus *bus);
