#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The errors of the bus: one table from the engine's results to D-Bus names and errnos. */

#include "daemon/engine/engine.h"

#include <systemd/sd-bus.h>

#define BUS_ERROR_PREFIX          "org.leat.Inference1.Error."
#define BUS_ERROR_QUOTA_EXCEEDED  BUS_ERROR_PREFIX "QuotaExceeded"
#define BUS_ERROR_CONFIG_INVALID  BUS_ERROR_PREFIX "ConfigInvalid"
#define BUS_ERROR_NO_SUCH_JOB     BUS_ERROR_PREFIX "NoSuchJob"
#define BUS_ERROR_NO_SUCH_SESSION BUS_ERROR_PREFIX "NoSuchSession"

/* The D-Bus name; of ENGINE_RESULT_DONE, "done". */
const char *bus_error_name(EngineResult result);
/* The errno that a client of sd-bus sees (negative), 0 for ENGINE_RESULT_DONE. */
int bus_error_errno(EngineResult result);
/* What a function of the engine returned when it refused at once: a positive EngineResult or a negative errno. */
EngineResult bus_error_result(int r);

/* Fills @error and returns its negative errno, to be returned from a method handler. */
int bus_error_set(sd_bus_error *error, EngineResult result, const ErrorDetail *detail);
int bus_error_invalid(sd_bus_error *error, const char *format, ...) _printf_(2, 3);
