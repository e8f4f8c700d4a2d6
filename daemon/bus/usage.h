#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What a generation did, for people: one table gives Finished, Ask and the U frame the same keys. */

#include "daemon/engine/engine.h"

#include <jansson.h>
#include <systemd/sd-bus.h>

/* Adds to an a{sv}: the open array of @m. */
int usage_append_entries(sd_bus_message *m, const EngineUsage *usage);
/* A whole a{sv}; with @ids (may be NULL) as key ids, and with @text (may be NULL) as key error-text. */
int usage_append(sd_bus_message *m, const EngineUsage *usage, const int32_t *ids, size_t n_ids, const char *text);
/* A new object, or NULL when memory is short. */
json_t *usage_to_json(const EngineUsage *usage);
