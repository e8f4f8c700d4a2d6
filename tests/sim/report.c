/* SPDX-License-Identifier: Apache-2.0 */
/* One line a finding, written at once and without the allocator: free() may be what reports. */

#include "tests/sim/sim.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A race in a loop is found each time; what comes after these is only counted. */
#define LINES_MAX 50

static atomic_ullong n_misuses;

static void write_line(const char *kind, const char *format, va_list arguments)
{
    char line[1024];
    int length = snprintf(line, sizeof(line), "clsim: %s%s", kind, *kind ? ": " : "");
    int more = vsnprintf(line + length, sizeof(line) - (size_t)length - 1, format, arguments);

    length = more < 0 ? length : SIM_MIN(length + more, (int)sizeof(line) - 2);
    line[length++] = '\n';
    for (int done = 0; done < length;) {
        ssize_t n = write(sim.config.log_fd, line + done, (size_t)(length - done));

        if (n <= 0)
            return;
        done += (int)n;
    }
}

void report_misuse(const char *kind, const char *format, ...)
{
    unsigned long long n = atomic_fetch_add(&n_misuses, 1);

    if (n < LINES_MAX) {
        va_list arguments;

        va_start(arguments, format);
        write_line(kind, format, arguments);
        va_end(arguments);
    }
    if (sim.config.abort_on_misuse)
        abort();
}

void report_note(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    write_line("", format, arguments);
    va_end(arguments);
}

void report_detail(const char *format, ...)
{
    va_list arguments;

    if (!sim.config.verbose)
        return;
    va_start(arguments, format);
    write_line("", format, arguments);
    va_end(arguments);
}

uint64_t report_n_misuses(void)
{
    return atomic_load(&n_misuses);
}

int report_finish(void)
{
    unsigned long long n = atomic_load(&n_misuses);

    if (n > LINES_MAX)
        report_note("%llu further findings are not shown", n - LINES_MAX);
    return n > 0 ? sim.config.exit_code : 0;
}
