#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What a generation did, for people: one table gives Finished, Ask and the U frame the same keys. */

#include "daemon/engine/engine.h"

#include <jansson.h>
#include <systemd/sd-bus.h>

/* Adds to an a{sv}: the open array of @m. */
int usage_append_entries(sd_bus_message *m, const EngineUsage *usage);
/* What may stand beside the usage; all borrowed. */
typedef struct UsageExtra {
    const int32_t *ids; /* key ids, unless NULL */
    size_t n_ids;
    const char *text;   /* key error-text, unless NULL */
    const EngineSequence *sequences; /* key sequences (aa{sv}), when there are some */
    size_t n_sequences;
} UsageExtra;
/* A whole a{sv}; @extra may be NULL. */
int usage_append(sd_bus_message *m, const EngineUsage *usage, const UsageExtra *extra);
/* A new object, or NULL when memory is short. */
json_t *usage_to_json(const EngineUsage *usage);
