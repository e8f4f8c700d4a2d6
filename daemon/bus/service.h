#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* org.leat.Inference1.Service: one object for each service of the configuration. */

#include "daemon/bus/bus-private.h"

/* A job of the service has ended. */
void bus_service_count(Bus *bus, const char *name, bool done);
