/* SPDX-License-Identifier: Apache-2.0 */
/* Binding YAML nodes to structs: maps, strings, results. */

#include "daemon/config/config-read.h"

#include <stdarg.h>
#include <string.h>

int config_read_join(int a, int b)
{
    if (a && a != -EINVAL)
        return a;
    return b ? b : a;
}

int config_read_fail(ConfigReader *reader, const YamlNode *node, const char *format, ...)
{
    char text[512];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return config_message_add(reader->messages, reader->file, node->line, node->column, CONFIG_ERROR, "%s", text);
}

int config_read_result(ConfigReader *reader, const YamlNode *node, int r, const ErrorDetail *detail)
{
    return r == -EINVAL ? config_read_fail(reader, node, "%s", detail->text) : r;
}

int config_read_text(ConfigReader *reader, const YamlNode *node, const char **ret)
{
    if (node->kind != YAML_KIND_SCALAR)
        return config_read_fail(reader, node, "a single value is expected here, not a %s",
                                node->kind == YAML_KIND_MAP ? "mapping" : "list");
    *ret = node->text;
    return 0;
}

int config_read_string(ConfigReader *reader, const YamlNode *node, void *target)
{
    char **string = target, *copy;
    const char *text = NULL;
    int r = config_read_text(reader, node, &text);

    if (r)
        return r;
    copy = strdup(text);
    if (!copy)
        return error_origin(-ENOMEM);
    free(*string);
    *string = copy;
    return 0;
}

static int config_read_strings_add(ConfigReader *reader, const YamlNode *node, char ***strings, size_t *n_strings)
{
    char **grown = reallocarray(*strings, *n_strings + 1, sizeof(char *));
    int r;

    if (!grown)
        return error_origin(-ENOMEM);
    *strings = grown;
    grown[*n_strings] = NULL;
    r = config_read_string(reader, node, &grown[*n_strings]);
    if (!r)
        (*n_strings)++;
    return r;
}

int config_read_strings(ConfigReader *reader, const YamlNode *node, char ***strings, size_t *n_strings)
{
    int r = 0;

    if (node->kind == YAML_KIND_SCALAR)
        return config_read_strings_add(reader, node, strings, n_strings);
    if (node->kind == YAML_KIND_MAP)
        return config_read_fail(reader, node, "a list is expected here");
    for (size_t i = 0; i < node->n_children; i++)
        r = config_read_join(r, config_read_strings_add(reader, node->children[i], strings, n_strings));
    return r;
}

static int config_read_unknown_key(ConfigReader *reader, const YamlNode *key, const ConfigKey *keys, size_t n_keys)
{
    const char *names[64], *nearest;
    size_t n = MIN(n_keys, N_ELEMENTS(names)), used = 0;
    char list[400] = "";

    for (size_t i = 0; i < n; i++) {
        names[i] = keys[i].name;
        if (used < sizeof(list))
            used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "", names[i]);
    }
    nearest = config_nearest(key->text, names, n);
    if (nearest)
        return config_read_fail(reader, key, "key '%s' is not known here; did you mean '%s'?", key->text, nearest);
    return config_read_fail(reader, key, "key '%.60s' is not known here; known are %s", key->text, list);
}

int config_read_map(ConfigReader *reader, const YamlNode *node, const ConfigKey *keys, size_t n_keys, void *target)
{
    int result = 0;

    if (node->kind != YAML_KIND_MAP)
        return config_read_fail(reader, node, "a mapping of keys to values is expected here");
    for (size_t i = 0; i < node->n_children; i++) {
        size_t k = 0;
        int r;

        while (k < n_keys && strcmp(keys[k].name, node->keys[i]->text))
            k++;
        r = k == n_keys ? config_read_unknown_key(reader, node->keys[i], keys, n_keys)
                        : keys[k].read(reader, node->children[i], target);
        if (r && r != -EINVAL)
            return error_trace(r);
        result = config_read_join(result, r);
    }
    return result;
}

int config_read_named(ConfigReader *reader, const YamlNode *node, ConfigReadNamed read, void *target)
{
    int result = 0;

    if (node->kind != YAML_KIND_MAP)
        return config_read_fail(reader, node, "a mapping of names is expected here");
    for (size_t i = 0; i < node->n_children; i++) {
        int r;

        if (!config_name_is_valid(node->keys[i]->text))
            r = config_read_fail(reader, node->keys[i],
                                 "'%.100s' cannot be a name: use letters, digits, '.', '_' and '-', beginning with a letter or digit",
                                 node->keys[i]->text);
        else
            r = read(reader, node->keys[i], node->children[i], target);
        if (r && r != -EINVAL)
            return error_trace(r);
        result = config_read_join(result, r);
    }
    return result;
}

bool config_name_is_valid(const char *name)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    static const char inside[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t n = strlen(name);

    return n > 0 && n <= 100 && strchr(letters, name[0]) && strspn(name, inside) == n;
}
