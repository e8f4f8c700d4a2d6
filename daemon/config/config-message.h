#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Collecting what is wrong with a configuration; inside daemon/config only. */

#include "daemon/config/config.h"

/* Adds one message; returns -EINVAL for an error, 0 for a warning, or -ENOMEM. */
int config_message_add(ConfigMessages *messages, const char *file, uint32_t line, uint32_t column, ConfigSeverity severity,
                       const char *format, ...) _printf_(6, 7);
