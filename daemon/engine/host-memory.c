/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory of the machine can be had. */

#include "daemon/engine/host-memory.h"
#include "quant/base/cleanup.h"

#include <ctype.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The number after @key at the begin of a line ("" for a file that is one number); false when there is none, as for "max". */
static bool read_number(const char *path, const char *key, uint64_t *ret)
{
    _cleanup_(close_filep) FILE *file = fopen(path, "re");
    char line[256];

    while (file && fgets(line, sizeof(line), file)) {
        const char *text = line + strlen(key);

        if (strncmp(line, key, strlen(key)) != 0)
            continue;
        while (*text == ' ' || *text == '\t')
            text++;
        if (!isdigit((unsigned char)*text))
            return false;
        *ret = strtoull(text, NULL, 10);
        return true;
    }
    return false;
}

/* What @limit of a group leaves; UINT64_MAX: it sets none. */
static uint64_t left_by(const char *group, const char *limit)
{
    uint64_t most, used;
    char path[PATH_MAX];

    (void)snprintf(path, sizeof(path), "%s/%s", group, limit);
    if (!read_number(path, "", &most))
        return UINT64_MAX;
    (void)snprintf(path, sizeof(path), "%s/memory.current", group);
    if (!read_number(path, "", &used))
        return UINT64_MAX;
    return used < most ? most - used : 0;
}

/* From our own group up to the root, which has limits when it is a container's. */
static uint64_t left_by_groups(const char *root)
{
    char path[PATH_MAX], line[PATH_MAX], group[2 * PATH_MAX], *slash;
    uint64_t left = UINT64_MAX;
    _cleanup_(close_filep) FILE *file = NULL;
    size_t base;

    (void)snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    file = fopen(path, "re");
    while (file && fgets(line, sizeof(line), file))
        if (strncmp(line, "0::/", 4) == 0) { /* version 2 */
            line[strcspn(line, "\n")] = 0;
            base = (size_t)snprintf(group, sizeof(group), "%s/sys/fs/cgroup", root);
            (void)snprintf(group + base, sizeof(group) - base, "%s", line + 3);
            for (;;) {
                left = MIN(left, left_by(group, "memory.max"));
                left = MIN(left, left_by(group, "memory.high"));
                slash = strrchr(group + base, '/');
                if (!slash)
                    break;
                *slash = 0;
            }
        }
    return left;
}

uint64_t host_memory_available(const char *root)
{
    char path[PATH_MAX];
    uint64_t kibibytes;

    (void)snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    if (!read_number(path, "MemAvailable:", &kibibytes))
        return UINT64_MAX;
    return MIN(kibibytes * 1024, left_by_groups(root));
}
