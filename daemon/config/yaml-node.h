#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A YAML file as a tree of nodes that know their place.  The one place where libyaml is called.
 *
 * Stricter than YAML on purpose: one document, no anchors, aliases or tags, no duplicate keys, keys are scalars, at most 16 levels
 * deep and 1 MiB long.  An empty file, or one with comments only, is an empty mapping.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct ConfigMessages ConfigMessages;

typedef enum YamlKind { YAML_KIND_SCALAR, YAML_KIND_LIST, YAML_KIND_MAP } YamlKind;

typedef struct YamlNode YamlNode;
struct YamlNode {
    YamlKind kind;
    uint32_t line, column; /* 1-based */
    char *text;            /* scalar: NUL-terminated, no NUL inside; else NULL */
    bool quoted;
    YamlNode **children;   /* list: items; map: values */
    YamlNode **keys;       /* map: scalars, same order */
    size_t n_children, capacity;
};

/* 0 and the root (a map), or -EINVAL with a message added for what is wrong, or another negative errno. */
int yaml_node_load(const char *path, YamlNode **ret, ConfigMessages *messages);
YamlNode *yaml_node_free(YamlNode *node);
DEFINE_CLEANUP(YamlNode, yaml_node_free)
