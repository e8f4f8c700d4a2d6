/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of bench programs. */

#include "tests/lib/bench-keys.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void bench_must(int r, const char *what, const ErrorDetail *detail)
{
    if (r == 0)
        return;
    (void)fprintf(stderr, "%s: %s: %s (%d)\n", program_invocation_short_name, what, detail ? detail->text : "see its head", r);
    exit(EXIT_FAILURE);
}

char *bench_cut(char *argument)
{
    char *value = strchr(argument, '=');

    bench_must(value ? 0 : -EINVAL, argument, NULL);
    *value++ = '\0';
    return value;
}

void bench_set(const BenchKey *keys, size_t n_keys, char *argument)
{
    const char *value = bench_cut(argument);

    for (size_t i = 0; i < n_keys; i++)
        if (strcmp(argument, keys[i].key) == 0) {
            if (keys[i].number)
                *keys[i].number = (uint32_t)strtoul(value, NULL, 10);
            else
                *keys[i].text = value;
            return;
        }
    bench_must(-EINVAL, argument, NULL);
}
