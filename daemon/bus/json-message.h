#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's key-value facts (JSON) as a{sv}. */

#include "quant/base/error.h"

#include <systemd/sd-bus.h>

/* Appends the object in @json as a whole a{sv}: integers become t (x when negative), numbers d, texts s, booleans b, objects a{sv},
 * arrays av; null is left out.  NULL and "" are the empty object.  -EBADMSG when it is not an object. */
int json_message_append(sd_bus_message *m, const char *json);
/* The integer member @key of @json in *ret; -EBADMSG when there is none. */
int json_message_integer(const char *json, const char *key, uint64_t *ret);
