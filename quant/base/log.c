/* SPDX-License-Identifier: Apache-2.0 */
/* The log: level, sink, and the default sink on standard error. */

#include "quant/base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>

static void log_sink_stderr(void *userdata, LogLevel level, const char *line);

/* The only mutable globals (STYLE: log level and sink); the sink is set before a second thread exists. */
static atomic_int log_level = LOG_LEVEL_INFO;
static LogSink log_sink = log_sink_stderr;
static void *log_sink_userdata;

static void log_sink_stderr(void *userdata, LogLevel level, const char *line)
{
    (void)userdata;
    /* The journal reads "<N>" as the priority; JOURNAL_STREAM is set by systemd when stderr goes there. */
    if (getenv("JOURNAL_STREAM"))
        (void)fprintf(stderr, "<%d>%s\n", (int)level, line);
    else
        (void)fprintf(stderr, "%s\n", line);
}

void log_set_sink(LogSink sink, void *userdata)
{
    log_sink = sink ? sink : log_sink_stderr;
    log_sink_userdata = sink ? userdata : NULL;
}

void log_set_level(LogLevel level)
{
    atomic_store(&log_level, (int)level);
}

LogLevel log_get_level(void)
{
    return (LogLevel)atomic_load_explicit(&log_level, memory_order_relaxed);
}

void log_write(LogLevel level, const char *format, ...)
{
    char line[1024];
    va_list args;

    if (level > log_get_level())
        return;
    va_start(args, format);
    (void)vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    for (char *c = line; *c; c++)
        if (*c == '\n')
            *c = ' ';
    log_sink(log_sink_userdata, level, line);
}
