#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The log.  Library folders (quant, opencl, cache) never log above debug; in daemon/ a failure is logged once,
 * where it is handled.  Prompts and answers are never logged at any level.
 */

#include "quant/base/cleanup.h"

/* The values of syslog(3). */
typedef enum LogLevel {
    LOG_LEVEL_ERROR = 3,
    LOG_LEVEL_WARNING = 4,
    LOG_LEVEL_NOTICE = 5,
    LOG_LEVEL_INFO = 6,
    LOG_LEVEL_DEBUG = 7,
} LogLevel;

/* Receives one finished line without newline; called from any thread. */
typedef void (*LogSink)(void *userdata, LogLevel level, const char *line);

/* Default: standard error, with a "<N>" prefix when it is the journal, level info.  NULL restores the default. */
void log_set_sink(LogSink sink, void *userdata);
void log_set_level(LogLevel level);
LogLevel log_get_level(void);

void log_write(LogLevel level, const char *format, ...) _printf_(2, 3);

#define log_error(...)   log_write(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warning(...) log_write(LOG_LEVEL_WARNING, __VA_ARGS__)
#define log_notice(...)  log_write(LOG_LEVEL_NOTICE, __VA_ARGS__)
#define log_info(...)    log_write(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...)                                                                                       \
    do {                                                                                                     \
        if (log_get_level() >= LOG_LEVEL_DEBUG)                                                              \
            log_write(LOG_LEVEL_DEBUG, __VA_ARGS__);                                                         \
    } while (0)
