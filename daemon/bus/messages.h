#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* A conversation from the bus: aa{sv} with role and content. */

#include "daemon/engine/engine.h"

#include <systemd/sd-bus.h>

typedef struct Messages {
    EngineMessage *messages; /* owned, with their strings */
    size_t n, capacity;
    uint64_t n_bytes;
} Messages;
#define MESSAGES_NULL ((Messages){NULL, 0, 0, 0})
void messages_clear(Messages *messages);
/* Copies both. */
int messages_add(Messages *messages, const char *role, const char *content);
/* Reads the aa{sv} at @m's place: role s (system, user, assistant, tool) and content s of each.  Negative with InvalidArgs in
 * @error and nothing to clear. */
int messages_read(sd_bus_message *m, Messages *ret, sd_bus_error *error);
