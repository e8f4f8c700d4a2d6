/* SPDX-License-Identifier: Apache-2.0 */
/* CLSIM_* and the file that CLSIM_CONFIG names; the environment wins. */

#include "tests/sim/sim.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LINE_MAX_BYTES 4096

bool config_number(const char *text, double *ret)
{
    char *end;
    double value;

    errno = 0;
    value = strtod(text, &end);
    if (end == text || errno || !(value >= 0))
        return false;
    switch (toupper((unsigned char)*end)) {
    case 'K':
        value *= 1024.0, end++;
        break;
    case 'M':
        value *= 1024.0 * 1024, end++;
        break;
    case 'G':
        value *= 1024.0 * 1024 * 1024, end++;
        break;
    }
    if (*end || value > 1e18)
        return false;
    *ret = value;
    return true;
}

static bool set_bytes(const char *text, uint64_t *ret)
{
    double value;

    if (!config_number(text, &value))
        return false;
    *ret = (uint64_t)value;
    return true;
}

static bool set_flag(const char *text, bool *ret)
{
    if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0)
        return false;
    *ret = *text == '1';
    return true;
}

static bool set_checks(const char *text, unsigned *ret)
{
    static const struct {
        const char *name;
        unsigned checks;
    } names[] = {
        {"none", 0},
        {"all", SIM_CHECK_ALL & ~(unsigned)SIM_CHECK_CONTENT},
        {"race", SIM_CHECK_RACE},
        {"host", SIM_CHECK_HOST},
        {"content", SIM_CHECK_CONTENT},
        {"callback", SIM_CHECK_CALLBACK},
        {"release", SIM_CHECK_RELEASE},
        {"leak", SIM_CHECK_LEAK},
        {"map", SIM_CHECK_MAP},
    };
    unsigned checks = 0;

    for (const char *at = text; *at;) {
        size_t length = strcspn(at, ","), i;

        for (i = 0; i < SIM_N_ELEMENTS(names); i++)
            if (strlen(names[i].name) == length && strncmp(names[i].name, at, length) == 0)
                break;
        if (i == SIM_N_ELEMENTS(names))
            return false;
        checks |= names[i].checks;
        at += length + (at[length] == ',');
    }
    *ret = checks;
    return true;
}

static bool set_misuse(const char *text, SimConfig *config)
{
    char *end;
    long code;

    config->abort_on_misuse = strcmp(text, "abort") == 0;
    config->exit_code = 0;
    if (config->abort_on_misuse || strcmp(text, "report") == 0)
        return true;
    code = strtol(text, &end, 10);
    if (end == text || *end || code < 1 || code > 255)
        return false;
    config->exit_code = (int)code;
    return true;
}

static bool set_type(const char *text, cl_device_type *ret)
{
    *ret = strcmp(text, "gpu") == 0           ? CL_DEVICE_TYPE_GPU
           : strcmp(text, "cpu") == 0         ? CL_DEVICE_TYPE_CPU
           : strcmp(text, "accelerator") == 0 ? CL_DEVICE_TYPE_ACCELERATOR
                                              : 0;
    return *ret != 0;
}

static bool set_access(const char *text, SimAccessTo *ret)
{
    *ret = strcmp(text, "in-place") == 0 ? SIM_MEMORY_IN_PLACE : strcmp(text, "driver") == 0 ? SIM_MEMORY_DRIVER : SIM_MEMORY_AUTO;
    return *ret != SIM_MEMORY_AUTO || strcmp(text, "auto") == 0;
}

static bool set_log(const char *text, int *ret)
{
    int fd = open(text, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);

    if (fd < 0)
        return false;
    if (*ret != STDERR_FILENO)
        (void)close(*ret);
    *ret = fd;
    return true;
}

static bool set_text(const char *text, char **ret)
{
    free(*ret);
    *ret = strdup(text);
    return *ret != NULL;
}

/* @key: as in the file. */
static bool set(SimConfig *config, const char *key, const char *value)
{
    double number;

    if (strcmp(key, "memory") == 0)
        return set_bytes(value, &config->memory_bytes);
    if (strcmp(key, "max_allocation") == 0)
        return set_bytes(value, &config->max_allocation_bytes);
    if (strcmp(key, "unified") == 0)
        return set_flag(value, &config->unified);
    if (strcmp(key, "poison") == 0)
        return set_flag(value, &config->poison);
    if (strcmp(key, "device_type") == 0)
        return set_type(value, &config->device_type);
    if (strcmp(key, "link_ratio") == 0)
        return config_number(value, &config->link_ratio);
    if (strcmp(key, "read_rate") == 0)
        return config_number(value, &config->read_rate);
    if (strcmp(key, "link_rate") == 0)
        return config_number(value, &config->link_rate);
    if (strcmp(key, "copy_rate") == 0)
        return config_number(value, &config->copy_rate);
    if (strcmp(key, "latency_usec") == 0) {
        if (!config_number(value, &number))
            return false;
        config->latency_nsec = (uint64_t)(number * 1000);
        return true;
    }
    if (strcmp(key, "engines") == 0) {
        config->n_engines = strcmp(value, "1") == 0 ? 1 : 2;
        return config->n_engines == 1 || strcmp(value, "2") == 0;
    }
    if (strcmp(key, "device_memory") == 0)
        return set_access(value, &config->memory);
    if (strcmp(key, "check") == 0)
        return set_checks(value, &config->checks);
    if (strcmp(key, "misuse") == 0)
        return set_misuse(value, config);
    if (strcmp(key, "log") == 0)
        return set_log(value, &config->log_fd);
    if (strcmp(key, "counts") == 0)
        return set_text(value, &config->counts);
    if (strcmp(key, "arguments") == 0)
        return set_text(value, &config->arguments);
    if (strcmp(key, "part") == 0)
        return config_number(value, &config->part);
    if (strcmp(key, "verbose") == 0)
        return set_flag(value, &config->verbose);
    if (strcmp(key, "fault") == 0)
        return fault_set(value) == CL_SUCCESS;
    return false;
}

static char *trim(char *text)
{
    char *end;

    while (isspace((unsigned char)*text))
        text++;
    end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1]))
        *--end = '\0';
    return text;
}

static bool load_file(SimConfig *config, const char *path)
{
    char line[LINE_MAX_BYTES];
    FILE *file = fopen(path, "re");
    bool good = true;

    if (!file) {
        report_note("cannot read %s: %s", path, strerror(errno));
        return false;
    }
    for (unsigned number = 1; fgets(line, sizeof(line), file); number++) {
        char *text = trim(line), *value = strchr(text, '=');

        if (*text == '\0' || *text == '#')
            continue;
        if (value)
            *value++ = '\0';
        if (!value || !set(config, trim(text), trim(value))) {
            report_note("%s:%u: '%s' is no setting with a good value", path, number, trim(text));
            good = false;
        }
    }
    (void)fclose(file);
    return good;
}

extern char **environ;

static bool load_environment(SimConfig *config)
{
    bool good = true;

    for (char **entry = environ; entry && *entry; entry++) {
        char key[64];
        const char *name = *entry, *value = strchr(name, '=');
        size_t n;

        if (strncmp(name, "CLSIM_", 6) != 0 || !value || strncmp(name, "CLSIM_CONFIG=", 13) == 0)
            continue;
        name += 6;
        n = (size_t)(value - name);
        for (size_t i = 0; i < n && i < sizeof(key); i++)
            key[i] = (char)tolower((unsigned char)name[i]);
        if (n < sizeof(key))
            key[n] = '\0';
        if (n >= sizeof(key) || !set(config, key, value + 1)) {
            report_note("CLSIM_%.*s: '%s' is no setting with a good value", (int)n, name, value + 1);
            good = false;
        }
    }
    return good;
}

bool config_load(SimConfig *config)
{
    const char *path = getenv("CLSIM_CONFIG");
    bool good;

    *config = (SimConfig){.n_engines = 2, .log_fd = STDERR_FILENO};
    good = !path || load_file(config, path);
    return load_environment(config) && good;
}
