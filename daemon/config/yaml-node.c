/* SPDX-License-Identifier: Apache-2.0 */
/* libyaml's events into a tree; its 1/0 results end here. */

#include "daemon/config/yaml-node.h"
#include "daemon/config/config-message.h"

#include <string.h>
#include <sys/stat.h>
#include <yaml.h>

#define YAML_MAX_DEPTH 16
#define YAML_MAX_BYTES (1024 * 1024)

typedef struct YamlReader {
    yaml_parser_t parser;
    const char *path;
    ConfigMessages *messages;
} YamlReader;

YamlNode *yaml_node_free(YamlNode *node)
{
    if (!node)
        return NULL;
    for (size_t i = 0; i < node->n_children; i++) {
        yaml_node_free(node->children[i]);
        if (node->keys)
            yaml_node_free(node->keys[i]);
    }
    free(node->children);
    free(node->keys);
    free(node->text);
    free(node);
    return NULL;
}

static int yaml_node_new(YamlKind kind, const yaml_mark_t *mark, YamlNode **ret)
{
    YamlNode *node = calloc(1, sizeof(*node));

    if (!node)
        return error_origin(-ENOMEM);
    node->kind = kind;
    node->line = (uint32_t)mark->line + 1;
    node->column = (uint32_t)mark->column + 1;
    *ret = node;
    return 0;
}

/* Takes @key (NULL in a list) and @value also when it fails. */
static int yaml_node_add(YamlNode *parent, YamlNode *key, YamlNode *value)
{
    _cleanup_(yaml_node_freep) YamlNode *owned_key = key, *owned_value = value;

    if (parent->n_children == parent->capacity) {
        size_t capacity = parent->capacity ? 2 * parent->capacity : 8;
        YamlNode **children = reallocarray(parent->children, capacity, sizeof(YamlNode *)), **keys;

        if (!children)
            return error_origin(-ENOMEM);
        parent->children = children;
        if (parent->kind == YAML_KIND_MAP) {
            keys = reallocarray(parent->keys, capacity, sizeof(YamlNode *));
            if (!keys)
                return error_origin(-ENOMEM);
            parent->keys = keys;
        }
        parent->capacity = capacity;
    }
    if (parent->kind == YAML_KIND_MAP)
        parent->keys[parent->n_children] = TAKE_PTR(owned_key);
    parent->children[parent->n_children++] = TAKE_PTR(owned_value);
    return 0;
}

static int yaml_reader_fail(YamlReader *reader, const yaml_mark_t *mark, const char *text)
{
    return config_message_add(reader->messages, reader->path, (uint32_t)mark->line + 1, (uint32_t)mark->column + 1,
                              CONFIG_ERROR, "%s", text);
}

/* What libyaml says, in our words where its own are hard to understand. */
static int yaml_reader_parse_error(YamlReader *reader)
{
    const yaml_parser_t *parser = &reader->parser;
    const char *problem = parser->problem ? parser->problem : "cannot be read";
    bool tab = strstr(problem, "cannot start any token") != NULL;

    if (parser->error == YAML_READER_ERROR)
        return config_message_add(reader->messages, reader->path, (uint32_t)parser->mark.line + 1, 1, CONFIG_ERROR,
                                  "not valid UTF-8 text: %s at byte %zu", problem, parser->problem_offset);
    if (parser->error == YAML_MEMORY_ERROR)
        return error_origin(-ENOMEM);
    return config_message_add(reader->messages, reader->path, (uint32_t)parser->problem_mark.line + 1,
                              (uint32_t)parser->problem_mark.column + 1, CONFIG_ERROR, "%s%s%s%s",
                              tab ? "a tab or other character that cannot stand here (indent with spaces); " : "",
                              parser->context ? parser->context : "", parser->context ? ": " : "", problem);
}

static int yaml_reader_next(YamlReader *reader, yaml_event_t *event)
{
    if (!yaml_parser_parse(&reader->parser, event))
        return yaml_reader_parse_error(reader);
    return 0;
}

static int yaml_reader_node(YamlReader *reader, yaml_event_t *event, unsigned depth, YamlNode **ret);

static int yaml_reader_scalar(YamlReader *reader, const yaml_event_t *event, YamlNode **ret)
{
    _cleanup_(yaml_node_freep) YamlNode *node = NULL;
    const char *value = (const char *)event->data.scalar.value;
    size_t length = event->data.scalar.length;
    int r;

    if (event->data.scalar.anchor || (event->data.scalar.tag && !event->data.scalar.plain_implicit &&
                                      !event->data.scalar.quoted_implicit))
        return yaml_reader_fail(reader, &event->start_mark, "anchors and tags are not used here");
    if (memchr(value, 0, length))
        return yaml_reader_fail(reader, &event->start_mark, "the text holds a NUL character");
    r = yaml_node_new(YAML_KIND_SCALAR, &event->start_mark, &node);
    if (r)
        return error_trace(r);
    node->text = strndup(value, length);
    if (!node->text)
        return error_origin(-ENOMEM);
    node->quoted = event->data.scalar.style != YAML_PLAIN_SCALAR_STYLE;
    *ret = TAKE_PTR(node);
    return 0;
}

static int yaml_reader_check_key(YamlReader *reader, const YamlNode *map, const YamlNode *key)
{
    for (size_t i = 0; i < map->n_children; i++)
        if (!strcmp(map->keys[i]->text, key->text))
            return config_message_add(reader->messages, reader->path, key->line, key->column, CONFIG_ERROR,
                                      "key '%s' is here a second time; the first is at line %u", key->text,
                                      map->keys[i]->line);
    return 0;
}

/* One child of a collection: for a map, @event is the key's.  Takes what it reads. */
static int yaml_reader_child(YamlReader *reader, YamlNode *parent, yaml_event_t *event, unsigned depth)
{
    _cleanup_(yaml_node_freep) YamlNode *key = NULL, *value = NULL;
    yaml_event_t next;
    int r;

    if (parent->kind == YAML_KIND_LIST) {
        r = yaml_reader_node(reader, event, depth + 1, &value);
        return r ? error_trace(r) : yaml_node_add(parent, NULL, TAKE_PTR(value));
    }
    if (event->type != YAML_SCALAR_EVENT)
        return yaml_reader_fail(reader, &event->start_mark, "a key must be a plain word");
    r = yaml_reader_scalar(reader, event, &key);
    if (!r)
        r = yaml_reader_check_key(reader, parent, key);
    if (!r)
        r = yaml_reader_next(reader, &next);
    if (r)
        return error_trace(r);
    r = yaml_reader_node(reader, &next, depth + 1, &value);
    yaml_event_delete(&next);
    return r ? error_trace(r) : yaml_node_add(parent, TAKE_PTR(key), TAKE_PTR(value));
}

static int yaml_reader_collection(YamlReader *reader, const yaml_event_t *event, unsigned depth, YamlNode **ret)
{
    bool map = event->type == YAML_MAPPING_START_EVENT;
    yaml_event_type_t end = map ? YAML_MAPPING_END_EVENT : YAML_SEQUENCE_END_EVENT;
    _cleanup_(yaml_node_freep) YamlNode *node = NULL;
    int r = yaml_node_new(map ? YAML_KIND_MAP : YAML_KIND_LIST, &event->start_mark, &node);

    if (r)
        return error_trace(r);
    if (depth >= YAML_MAX_DEPTH)
        return yaml_reader_fail(reader, &event->start_mark, "nested more than 16 levels deep");
    for (;;) {
        yaml_event_t next;
        bool done;

        r = yaml_reader_next(reader, &next);
        if (r)
            return error_trace(r);
        done = next.type == end;
        r = done ? 0 : yaml_reader_child(reader, node, &next, depth);
        yaml_event_delete(&next);
        if (r)
            return error_trace(r);
        if (done)
            break;
    }
    *ret = TAKE_PTR(node);
    return 0;
}

static int yaml_reader_node(YamlReader *reader, yaml_event_t *event, unsigned depth, YamlNode **ret)
{
    if (event->type == YAML_SCALAR_EVENT)
        return yaml_reader_scalar(reader, event, ret);
    if (event->type == YAML_MAPPING_START_EVENT || event->type == YAML_SEQUENCE_START_EVENT)
        return yaml_reader_collection(reader, event, depth, ret);
    return yaml_reader_fail(reader, &event->start_mark, "aliases are not used here");
}

/* Stream start, documents, stream end. */
static int yaml_reader_document(YamlReader *reader, YamlNode **ret)
{
    _cleanup_(yaml_node_freep) YamlNode *root = NULL;
    yaml_mark_t origin = {0, 0, 0};
    int r;

    for (bool done = false; !done;) {
        yaml_event_t event;

        r = yaml_reader_next(reader, &event);
        if (r)
            return error_trace(r);
        if (event.type == YAML_STREAM_END_EVENT)
            done = true;
        else if (event.type == YAML_DOCUMENT_START_EVENT && root)
            r = yaml_reader_fail(reader, &event.start_mark, "a second document begins here; a file holds one");
        else if (event.type != YAML_STREAM_START_EVENT && event.type != YAML_DOCUMENT_START_EVENT &&
                 event.type != YAML_DOCUMENT_END_EVENT)
            r = yaml_reader_node(reader, &event, 0, &root);
        yaml_event_delete(&event);
        if (r)
            return error_trace(r);
    }
    if (root && root->kind == YAML_KIND_SCALAR && !root->quoted && !root->text[0])
        root = yaml_node_free(root);
    if (!root)
        r = yaml_node_new(YAML_KIND_MAP, &origin, &root);
    else if (root->kind != YAML_KIND_MAP)
        r = config_message_add(reader->messages, reader->path, root->line, root->column, CONFIG_ERROR,
                               "the file must be a mapping of keys to values");
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(root);
    return 0;
}

int yaml_node_load(const char *path, YamlNode **ret, ConfigMessages *messages)
{
    YamlReader reader = {.path = path, .messages = messages};
    _cleanup_(close_filep) FILE *file = fopen(path, "re");
    struct stat status;
    int r;

    if (!file || fstat(fileno(file), &status) < 0)
        return config_message_add(messages, path, 1, 1, CONFIG_ERROR, "cannot be opened: %s", strerror(errno));
    if (!S_ISREG(status.st_mode))
        return config_message_add(messages, path, 1, 1, CONFIG_ERROR, "is not a regular file");
    if (status.st_size > YAML_MAX_BYTES)
        return config_message_add(messages, path, 1, 1, CONFIG_ERROR, "is longer than 1 MiB (%lld bytes)",
                                  (long long)status.st_size);
    if (!yaml_parser_initialize(&reader.parser))
        return error_origin(-ENOMEM);
    yaml_parser_set_input_file(&reader.parser, file);
    r = yaml_reader_document(&reader, ret);
    yaml_parser_delete(&reader.parser);
    return r;
}
