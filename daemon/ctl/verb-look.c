/* SPDX-License-Identifier: Apache-2.0 */
/* status, ps, services, models: what is there. */

#include "daemon/ctl/ctl.h"

#include <string.h>

typedef struct CtlColumn {
    const char *title, *key;
} CtlColumn;

static void ctl_cell(const json_t *row, const char *key, char *ret, size_t size)
{
    const json_t *value = json_object_get(row, key);
    char bytes[32];

    if (json_is_string(value)) {
        (void)snprintf(ret, size, "%s", json_string_value(value));
    } else if (json_is_integer(value) && (strstr(key, "Bytes") || strstr(key, "FileSize"))) {
        ctl_format_bytes((uint64_t)json_integer_value(value), bytes);
        (void)snprintf(ret, size, "%s", bytes);
    } else if (json_is_integer(value)) {
        (void)snprintf(ret, size, "%lld", (long long)json_integer_value(value));
    } else if (json_is_real(value)) {
        (void)snprintf(ret, size, "%.1f", json_real_value(value));
    } else {
        (void)snprintf(ret, size, "-");
    }
}

#define CTL_MAX_COLUMNS 10

static void ctl_print_table(Ctl *ctl, const json_t *rows, const CtlColumn *columns, size_t n_columns)
{
    int width[CTL_MAX_COLUMNS];
    char cell[256];
    size_t index;
    json_t *row;

    if (ctl->json) {
        ctl_print_json(rows);
        return;
    }
    for (size_t c = 0; c < n_columns; c++) {
        width[c] = ctl->no_legend ? 0 : (int)strlen(columns[c].title);
        json_array_foreach(rows, index, row) {
            ctl_cell(row, columns[c].key, cell, sizeof(cell));
            width[c] = MAX(width[c], (int)strlen(cell));
        }
    }
    for (size_t c = 0; c < n_columns && !ctl->no_legend; c++)
        (void)printf("%-*s%s", c + 1 < n_columns ? width[c] + 2 : 0, columns[c].title, c + 1 < n_columns ? "" : "\n");
    json_array_foreach(rows, index, row)
        for (size_t c = 0; c < n_columns; c++) {
            ctl_cell(row, columns[c].key, cell, sizeof(cell));
            (void)printf("%-*s%s", c + 1 < n_columns ? width[c] + 2 : 0, cell, c + 1 < n_columns ? "" : "\n");
        }
}

int ctl_verb_models(Ctl *ctl)
{
    static const CtlColumn columns[] = {
        {"MODEL", "Name"},       {"STATE", "State"},         {"ARCH", "Architecture"}, {"TYPE", "Quantization"},
        {"SIZE", "FileSize"},    {"CONTEXT", "ContextLength"}, {"DEVICE", "DeviceBytes"}, {"PROBLEM", "LastError"},
    };
    json_t *rows = NULL;
    int r = ctl_connect(ctl);

    if (!r)
        r = ctl_get_objects(ctl, CTL_ROOT "/model", CTL_MODEL, &rows);
    if (!r)
        ctl_print_table(ctl, rows, columns, N_ELEMENTS(columns));
    json_decref(rows);
    return r;
}

int ctl_verb_services(Ctl *ctl)
{
    static const CtlColumn columns[] = {
        {"SERVICE", "Name"}, {"MODEL", "Model"}, {"STATE", "State"}, {"REQUESTS", "Requests"}, {"FAILURES", "Failures"},
        {"DESCRIPTION", "Description"},
    };
    json_t *rows = NULL;
    int r = ctl_connect(ctl);

    if (!r)
        r = ctl_get_objects(ctl, CTL_ROOT "/service", CTL_SERVICE, &rows);
    if (!r)
        ctl_print_table(ctl, rows, columns, N_ELEMENTS(columns));
    json_decref(rows);
    return r;
}

int ctl_verb_ps(Ctl *ctl)
{
    static const CtlColumn columns[] = {
        {"JOB", "id"},           {"KIND", "kind"},     {"STATE", "state"},           {"PRIORITY", "priority"}, {"MODEL", "model"},
        {"PROMPT", "prompt-tokens"}, {"REUSED", "cached-tokens"}, {"OUTPUT", "output-tokens"}, {"RATE", "rate"}, {"OWNER", "owner"},
    };
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *call = NULL, *reply = NULL;
    json_t *rows;
    int r = ctl_connect(ctl);

    if (!r)
        r = ctl_new_call(ctl, CTL_ROOT, CTL_MANAGER, "ListJobs", &call);
    if (!r)
        r = ctl_call(ctl, call, sd_bus_message_append(call, "a{sv}", 0), &reply);
    if (r)
        return r;
    rows = ctl_message_read(reply);
    ctl_print_table(ctl, rows, columns, N_ELEMENTS(columns));
    json_decref(rows);
    return r;
}

int ctl_verb_status(Ctl *ctl)
{
    json_t *manager = NULL, *device = NULL, *models = NULL, *status;
    int r = ctl_connect(ctl);

    if (!r)
        r = ctl_get_all(ctl, CTL_ROOT, CTL_MANAGER, &manager);
    if (!r)
        r = ctl_get_all(ctl, CTL_ROOT "/device/0", CTL_DEVICE, &device);
    if (!r)
        r = ctl_get_objects(ctl, CTL_ROOT "/model", CTL_MODEL, &models);
    status = json_object();
    if (!r) {
        (void)json_object_set(status, "manager", manager);
        (void)json_object_set(status, "device", device);
    }
    if (!r && ctl->json) {
        (void)json_object_set(status, "models", models);
        ctl_print_json(status);
    } else if (!r) {
        json_t *model;
        size_t index;

        ctl_print_facts(stdout, status, "");
        (void)puts("models");
        json_array_foreach(models, index, model)
            (void)printf("  %s: %s\n", json_string_value(json_object_get(model, "Name")),
                         json_string_value(json_object_get(model, "State")));
    }
    json_decref(status);
    json_decref(manager);
    json_decref(device);
    json_decref(models);
    return r;
}
