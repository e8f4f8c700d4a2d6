/* SPDX-License-Identifier: Apache-2.0 */
/* Service files, and filling a prompt with inputs. */

#include "daemon/config/config-read.h"

#include <string.h>

void config_service_clear(ConfigService *service)
{
    for (size_t i = 0; i < service->n_inputs; i++) {
        free(service->inputs[i].name);
        free(service->inputs[i].default_value);
    }
    free(service->inputs);
    for (size_t i = 0; i < service->sampling.n_stop; i++)
        free((void *)(uintptr_t)service->sampling.stop[i]);
    free(service->sampling.stop);
    free(service->name);
    free(service->description);
    free(service->model);
    free(service->system);
    free(service->prompt);
    free(service->source_file);
    memset(service, 0, sizeof(*service));
}

#define SERVICE_STRING(field)                                                                                                \
    static int read_service_##field(ConfigReader *reader, const YamlNode *node, void *target)                                \
    {                                                                                                                        \
        return config_read_string(reader, node, &((ConfigService *)target)->field);                                         \
    }
SERVICE_STRING(name)
SERVICE_STRING(description)
SERVICE_STRING(model)
SERVICE_STRING(system)
SERVICE_STRING(prompt)
#undef SERVICE_STRING

static int read_input_required(ConfigReader *reader, const YamlNode *node, void *target)
{
    ConfigInput *input = target;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const char *text = NULL;
    int r = config_read_text(reader, node, &text);

    return r ? r : config_read_result(reader, node, config_value_bool(text, &input->required, &detail), &detail);
}

static int read_input_max_size(ConfigReader *reader, const YamlNode *node, void *target)
{
    ConfigInput *input = target;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const char *text = NULL;
    int r = config_read_text(reader, node, &text);

    return r ? r : config_read_result(reader, node, config_value_bytes(text, &input->max_bytes, &detail), &detail);
}

static int read_input_default(ConfigReader *reader, const YamlNode *node, void *target)
{
    return config_read_string(reader, node, &((ConfigInput *)target)->default_value);
}

static int read_input(ConfigReader *reader, const YamlNode *name, const YamlNode *node, void *target)
{
    static const ConfigKey keys[] = {
        {"required", read_input_required},
        {"max-size", read_input_max_size},
        {"default", read_input_default},
    };
    ConfigService *service = target;
    ConfigInput *grown = reallocarray(service->inputs, service->n_inputs + 1, sizeof(*grown)), *input;
    int r;

    if (!grown)
        return error_origin(-ENOMEM);
    service->inputs = grown;
    input = &grown[service->n_inputs];
    *input = (ConfigInput){.required = true, .max_bytes = 1 << 20};
    input->name = strdup(name->text);
    if (!input->name)
        return error_origin(-ENOMEM);
    service->n_inputs++;
    r = config_read_map(reader, node, keys, N_ELEMENTS(keys), input);
    if (!r && input->default_value)
        input->required = false;
    return r;
}

static int read_service_inputs(ConfigReader *reader, const YamlNode *node, void *target)
{
    return config_read_named(reader, node, read_input, target);
}

static int read_service_parameters(ConfigReader *reader, const YamlNode *node, void *target)
{
    ConfigService *service = target;

    return config_read_sampling(reader, node, &service->sampling, service->has_sampling_key);
}

static int read_service_priority(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const char *const words[] = {"interactive", "normal", "background"};
    ConfigService *service = target;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const char *text = NULL;
    size_t index = 0;
    int r = config_read_text(reader, node, &text);

    if (!r)
        r = config_read_result(reader, node, config_value_word(text, words, N_ELEMENTS(words), &index, &detail), &detail);
    if (!r)
        service->priority = (EnginePriority)index;
    return r;
}

static int read_service_cache(ConfigReader *reader, const YamlNode *node, void *target)
{
    return config_read_cache(reader, node, &((ConfigService *)target)->cache);
}

/* The next {{name}} at or after @text: its start, or NULL; *ret_end is behind the braces, the name is trimmed of blanks. */
static const char *service_next_place(const char *text, const char **ret_end, const char **ret_name, size_t *ret_length)
{
    const char *start = strstr(text, "{{"), *end = start ? strstr(start, "}}") : NULL, *name, *last;

    if (!end)
        return NULL;
    name = start + 2;
    last = end;
    while (name < last && *name == ' ')
        name++;
    while (last > name && last[-1] == ' ')
        last--;
    *ret_end = end + 2;
    *ret_name = name;
    *ret_length = (size_t)(last - name);
    return start;
}

static const ConfigInput *service_find_input(const ConfigService *service, const char *name, size_t length)
{
    for (size_t i = 0; i < service->n_inputs; i++)
        if (strlen(service->inputs[i].name) == length && !memcmp(service->inputs[i].name, name, length))
            return &service->inputs[i];
    return NULL;
}

static int service_check(ConfigReader *reader, const YamlNode *root, const ConfigService *service, const char *file_name)
{
    const char *end, *name;
    size_t length;
    int r = 0;

    if (service->name && strcmp(service->name, file_name))
        r = config_read_join(r, config_read_fail(reader, root, "name '%s' differs from the file's name '%s'", service->name, file_name));
    if (!service->model)
        r = config_read_join(r, config_read_fail(reader, root, "key 'model' is missing"));
    if (!service->prompt)
        return config_read_join(r, config_read_fail(reader, root, "key 'prompt' is missing"));
    for (const char *c = service->prompt; (c = service_next_place(c, &end, &name, &length)); c = end)
        if (!service_find_input(service, name, length))
            r = config_read_join(r, config_read_fail(reader, root, "the prompt names '{{%.*s}}', which is not among the inputs",
                                                     (int)MIN(length, (size_t)60), name));
    return r;
}

int config_read_service_file(ConfigReader *reader, const YamlNode *root, const char *name)
{
    static const ConfigKey keys[] = {
        {"name", read_service_name},         {"description", read_service_description}, {"model", read_service_model},
        {"system", read_service_system},     {"prompt", read_service_prompt},           {"inputs", read_service_inputs},
        {"parameters", read_service_parameters}, {"priority", read_service_priority},   {"cache", read_service_cache},
    };
    ConfigService service = {.priority = ENGINE_PRIORITY_NORMAL, .source_line = root->line}, *grown;
    int r = config_read_map(reader, root, keys, N_ELEMENTS(keys), &service);

    if (!r || r == -EINVAL)
        r = config_read_join(r, service_check(reader, root, &service, name));
    if (!service.name)
        service.name = strdup(name);
    service.source_file = strdup(reader->file);
    grown = reallocarray(reader->config->services, reader->config->n_services + 1, sizeof(*grown));
    if (grown)
        reader->config->services = grown;
    if (!service.name || !service.source_file || !grown) {
        config_service_clear(&service);
        return error_origin(-ENOMEM);
    }
    grown[reader->config->n_services++] = service;
    return r;
}

/* The value of an input in a call, its default, or NULL. */
static const char *service_input_value(const ConfigInput *input, const char *const *names, const char *const *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(names[i], input->name))
            return values[i];
    return input->default_value;
}

static int service_check_inputs(const ConfigService *service, const char *const *names, const char *const *values, size_t n,
                                ErrorDetail *reterr)
{
    for (size_t i = 0; i < n; i++) {
        const ConfigInput *input = service_find_input(service, names[i], strlen(names[i]));

        if (!input)
            return error_detail_set(reterr, -EINVAL, "service '%s' has no input '%.60s'", service->name, names[i]);
        if (strlen(values[i]) > input->max_bytes)
            return error_detail_set(reterr, -EINVAL, "input '%s' has %zu bytes; service '%s' takes at most %llu", names[i],
                                    strlen(values[i]), service->name, (unsigned long long)input->max_bytes);
    }
    for (size_t i = 0; i < service->n_inputs; i++)
        if (service->inputs[i].required && !service_input_value(&service->inputs[i], names, values, n))
            return error_detail_set(reterr, -EINVAL, "service '%s' needs input '%s'", service->name, service->inputs[i].name);
    return 0;
}

int config_service_render(const ConfigService *service, const char *const *names, const char *const *values, size_t n,
                          char **ret_prompt, ErrorDetail *reterr)
{
    const char *c = service->prompt, *start, *end, *name;
    char *prompt = NULL;
    size_t size, length;
    FILE *stream;
    int r = service_check_inputs(service, names, values, n, reterr);

    if (r)
        return r;
    stream = open_memstream(&prompt, &size);
    if (!stream)
        return error_origin(-ENOMEM);
    while ((start = service_next_place(c, &end, &name, &length))) {
        const ConfigInput *input = service_find_input(service, name, length);
        const char *value = input ? service_input_value(input, names, values, n) : NULL;

        (void)fwrite(c, 1, (size_t)(start - c), stream);
        (void)fputs(value ? value : "", stream);
        c = end;
    }
    (void)fputs(c, stream);
    if (fclose(stream)) {
        free(prompt);
        return error_origin(-ENOMEM);
    }
    *ret_prompt = prompt;
    return 0;
}
