#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Binding YAML nodes to structs by tables of keys; inside daemon/config only.  Readers report what is wrong where it stands and return
 * -EINVAL; the callers go on to find the other errors and return -EINVAL in the end.  Other negative errnos stop everything.
 */

#include "daemon/config/config-message.h"
#include "daemon/config/config-value.h"
#include "daemon/config/yaml-node.h"

typedef struct ConfigReader {
    Config *config;
    const char *file;
    ConfigMessages *messages;
} ConfigReader;

typedef int (*ConfigReadFunction)(ConfigReader *reader, const YamlNode *node, void *target);

typedef struct ConfigKey {
    const char *name;
    ConfigReadFunction read;
} ConfigKey;

/* Reads a mapping; unknown keys are errors that name the nearest known one. */
int config_read_map(ConfigReader *reader, const YamlNode *node, const ConfigKey *keys, size_t n_keys, void *target);
/* Calls @read for each value of a mapping with free names; *name is the key. */
typedef int (*ConfigReadNamed)(ConfigReader *reader, const YamlNode *name, const YamlNode *node, void *target);
int config_read_named(ConfigReader *reader, const YamlNode *node, ConfigReadNamed read, void *target);

int config_read_fail(ConfigReader *reader, const YamlNode *node, const char *format, ...) _printf_(3, 4);
/* Turns a detail from config_value_* into a message at the node; 0 stays 0. */
int config_read_result(ConfigReader *reader, const YamlNode *node, int r, const ErrorDetail *detail);
/* The node's text; fails when it is no scalar. */
int config_read_text(ConfigReader *reader, const YamlNode *node, const char **ret);
/* A copy of the node's text into *target (char *), replacing what was there. */
int config_read_string(ConfigReader *reader, const YamlNode *node, void *target);
/* A list of strings (or one string) appended to an array. */
int config_read_strings(ConfigReader *reader, const YamlNode *node, char ***strings, size_t *n_strings);

/* Joins results: the first fatal one wins over -EINVAL over 0. */
int config_read_join(int a, int b);

/* Names of services and models: letters, digits, and ._- inside; at most 100 characters. */
bool config_name_is_valid(const char *name);

int config_read_cache(ConfigReader *reader, const YamlNode *node, void *cache);
/* As config_policy(); -EINVAL also says where the key stands that is to blame. */
int config_policy_at(const ConfigCache *const *blocks, size_t n_blocks, bool exact, KvPolicy *ret, ConfigPlace *ret_place, ErrorDetail *reterr);
int config_read_sampling(ConfigReader *reader, const YamlNode *node, EngineSampling *sampling, bool *has_key);
int config_read_service_file(ConfigReader *reader, const YamlNode *root, const char *name);
int config_read_main(ConfigReader *reader, const YamlNode *root);
/* A model for a *.gguf found in a store path; nothing happens when the name is taken or cannot be one. */
int config_add_store_model(Config *config, const char *name, const char *path);

/* Sampling keys, in the order of the bits of has_key. */
typedef enum ConfigSamplingKey {
    CONFIG_SAMPLING_MAX_TOKENS,
    CONFIG_SAMPLING_TEMPERATURE,
    CONFIG_SAMPLING_TOP_K,
    CONFIG_SAMPLING_TOP_P,
    CONFIG_SAMPLING_MIN_P,
    CONFIG_SAMPLING_REPEAT_PENALTY,
    CONFIG_SAMPLING_SEED,
    CONFIG_SAMPLING_MIN_TOKENS,
    CONFIG_SAMPLING_NO_REPEAT_NGRAM,
    CONFIG_SAMPLING_STOP,
    CONFIG_SAMPLING_X_MAX,
} ConfigSamplingKey;
#define CONFIG_SAMPLING_DEFAULT                                                                                              \
    ((EngineSampling){.temperature = 0.7f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .repeat_penalty = 1.0f, .length_penalty = 1})

void config_model_clear(ConfigModel *model);
void config_service_clear(ConfigService *service);
