#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Configuration: YAML files into one struct, with every error of every file at once as file:line:column.
 *
 * Sources, later ones win per key: built-in defaults; PREFIX/lib/leat/leat.yaml, /etc/leat/leat.yaml, or the one file named; drop-ins
 * leat.d/NAME.yaml beside it (by name); services.d/NAME.yaml beside it.
 */

#include "daemon/config/config-quant.h"
#include "daemon/engine/engine.h"

typedef enum ConfigSeverity { CONFIG_ERROR, CONFIG_WARNING } ConfigSeverity;

typedef struct ConfigMessage {
    char *file; /* owned */
    uint32_t line, column; /* 1-based */
    ConfigSeverity severity;
    char *text; /* owned: one sentence, names the key and the nearest known one */
} ConfigMessage;

typedef struct ConfigMessages {
    ConfigMessage *messages;
    size_t n, capacity;
} ConfigMessages;
#define CONFIG_MESSAGES_NULL ((ConfigMessages){NULL, 0, 0})
void config_messages_clear(ConfigMessages *messages);
bool config_messages_have_error(const ConfigMessages *messages);

/* The keys of a cache: block; those of its quant: mapping follow as CONFIG_CACHE_QUANT + ConfigQuantKey. */
typedef enum ConfigCacheKey {
    CONFIG_CACHE_STRATEGY,
    CONFIG_CACHE_MAX_CACHE_LEN,
    CONFIG_CACHE_OFFLOAD_ONLY_NON_SLIDING,
    CONFIG_CACHE_PREFETCH,
    CONFIG_CACHE_TRANSFER,
    CONFIG_CACHE_HOST_MEMORY,
    CONFIG_CACHE_DEVICE_BUDGET,
    CONFIG_CACHE_QUANT,
    CONFIG_CACHE_X_MAX = CONFIG_CACHE_QUANT + CONFIG_QUANT_X_MAX,
} ConfigCacheKey;

/* Where a key's value stands; all zero for one that comes from no file. */
typedef struct ConfigPlace {
    uint32_t file; /* 1 + index into Config.files */
    uint32_t line, column;
} ConfigPlace;

/* The cache: block, as far as it was written, so that the nearest block wins key by key. */
typedef struct ConfigCache {
    uint32_t written; /* 1 << ConfigCacheKey; of the quant keys: quant.written */
    bool offload_only_non_sliding;
    KvStrategy strategy;
    uint32_t max_cache_len, prefetch;
    KvTransfer transfer;
    ConfigQuant quant;
    uint64_t host_memory_bytes, device_budget_bytes;
    ConfigPlace places[CONFIG_CACHE_X_MAX];
} ConfigCache;

typedef struct ConfigModel {
    char *name, *file;  /* file: absolute after resolving against the store paths */
    char **aliases;
    size_t n_aliases;
    bool has_exact, exact, preload;
    uint32_t context, parallel, prefixes;
    uint64_t keep_alive_usec;
    ModelWeights weights; /* without a budget: that is the planner's */
    ConfigCache cache;
    EngineSampling sampling;
    char *template_file, *chat_template;
} ConfigModel;

typedef struct ConfigInput {
    char *name;
    bool required;
    uint64_t max_bytes;
    char *default_value;
} ConfigInput;

typedef struct ConfigService {
    char *name, *description, *model, *system, *prompt; /* prompt: text with {{name}} places */
    ConfigInput *inputs;
    size_t n_inputs;
    EngineSampling sampling;
    bool has_sampling_key[16]; /* by ConfigSamplingKey, private to config/ */
    EnginePriority priority;
    ConfigCache cache;
    char *source_file;
    uint32_t source_line;
} ConfigService;

typedef struct Config {
    GpuMatch *devices;
    size_t n_devices;
    char **store_paths; /* where model files and bare names are looked up */
    size_t n_store_paths;
    ConfigCache default_cache;
    bool default_exact;
    uint32_t default_context;
    uint64_t default_keep_alive_usec, default_seed;
    ConfigModel *models;
    size_t n_models;
    ConfigService *services;
    size_t n_services;
    uint32_t max_queue;
    uint64_t host_memory_bytes; /* for the caches of all models; 0: automatic */
    int log_level;
    char *spill_dir;         /* absolute, or NULL: caches of idle sessions stay in memory */
    uint64_t spill_after_usec;
    char **files;            /* that keys of cache: blocks stand in */
    size_t n_files;
    uint64_t idle_exit_usec; /* bus activation with idle exit; UINT64_MAX: never */
} Config;

/* @path: the main file, or NULL for the system's.  Returns 0 with a usable config (perhaps with warnings in @messages), or -EINVAL when
 * any file has an error: then *ret is untouched and the old configuration goes on. */
int config_load(const char *path, Config **ret, ConfigMessages *messages);
/* Writes what is in effect as YAML, with every default filled in; 0 or a negative errno. */
int config_print(const Config *config, FILE *file);
Config *config_free(Config *config);
DEFINE_CLEANUP(Config, config_free)

const ConfigModel *config_find_model(const Config *config, const char *name_or_alias);
const ConfigService *config_find_service(const Config *config, const char *name);

/* The policy that results from blocks, the later ones nearer: preset of the strategy, then each written key.  Where a block names another
 * strategy or backend, keys of farther blocks that have no meaning there are left out; its own are -EINVAL. */
int config_policy(const ConfigCache *const *blocks, size_t n_blocks, bool exact, KvPolicy *ret, ErrorDetail *reterr);
/* One key of a cache block from a string ("transfer", "copy"), as D-Bus options and `--cache KEY=VALUE` give it. */
int config_cache_set(ConfigCache *cache, const char *key, const char *value, ErrorDetail *reterr);
/* Whether two keys as config_cache_set() takes them set the same: "nbits_key", "quant.nbits_key", "nbits". */
bool config_cache_same_key(const char *a, const char *b);
/* One sampling key from a string ("temperature", "0.7"). */
int config_sampling_set(EngineSampling *sampling, const char *key, const char *value, ErrorDetail *reterr);
/* The sampling of a service: the model's parameters, then the service's own.  Strings are borrowed from @config. */
void config_service_sampling(const Config *config, const ConfigService *service, EngineSampling *ret);
/* The models as the engine wants them (borrowed from @config). */
int config_engine_models(const Config *config, EngineModel **ret, size_t *ret_n, ErrorDetail *reterr);
/* Fills a service's prompt with its inputs; {{name}} is replaced by the value, nothing in values is interpreted. */
int config_service_render(const ConfigService *service, const char *const *names, const char *const *values, size_t n, char **ret_prompt,
                          ErrorDetail *reterr);
/* The known key nearest to @key (Damerau-Levenshtein distance at most 2, or a third of its length), or NULL. */
const char *config_nearest(const char *key, const char *const *known, size_t n_known);
