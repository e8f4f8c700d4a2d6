/* SPDX-License-Identifier: Apache-2.0 */
/* The cache: block, and the policy that results from several of them. */

#include "daemon/config/config-read.h"

#include <string.h>

#define CACHE_MAX_TOKENS (16u << 20)

static int cache_set_strategy(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    const char *names[KV_STRATEGY_X_MAX];
    size_t index;
    int r;

    for (int i = 0; i < KV_STRATEGY_X_MAX; i++)
        names[i] = kv_strategy_to_string((KvStrategy)i);
    r = config_value_word(text, names, KV_STRATEGY_X_MAX, &index, reterr);
    if (r)
        return r;
    cache->strategy = (KvStrategy)index;
    return 0;
}

static int cache_set_max_cache_len(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    uint64_t value;
    int r = config_value_u64(text, 1, CACHE_MAX_TOKENS, &value, reterr);

    if (r)
        return r;
    cache->max_cache_len = (uint32_t)value;
    return 0;
}

static int cache_set_offload_only_non_sliding(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    return config_value_bool(text, &cache->offload_only_non_sliding, reterr);
}

static int cache_set_prefetch(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    uint64_t value;
    int r = config_value_u64(text, 1, 8, &value, reterr);

    if (r)
        return r;
    cache->prefetch = (uint32_t)value;
    return 0;
}

static int cache_set_transfer(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    static const char *const words[] = {"auto", "copy", "zero-copy"};
    size_t index;
    int r = config_value_word(text, words, N_ELEMENTS(words), &index, reterr);

    if (r)
        return r;
    cache->transfer = (KvTransfer)index;
    return 0;
}

/* Nothing fits into nothing: it would be read as no limit. */
static int cache_set_bytes(const char *text, uint64_t *ret, ErrorDetail *reterr)
{
    uint64_t bytes;
    int r = config_value_bytes(text, &bytes, reterr);

    if (r)
        return r;
    if (bytes == 0)
        return error_detail_set(reterr, -EINVAL, "0 bytes hold nothing: leave it out for no limit");
    *ret = bytes;
    return 0;
}

static int cache_set_host_memory(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    return cache_set_bytes(text, &cache->host_memory_bytes, reterr);
}

static int cache_set_device_budget(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    return cache_set_bytes(text, &cache->device_budget_bytes, reterr);
}

typedef int (*CacheSetter)(ConfigCache *cache, const char *text, ErrorDetail *reterr);

/* The names as in YAML; those of config-quant.h stand in a `quant:` mapping there. */
static const struct {
    const char *name;
    CacheSetter set;
} cache_keys[CONFIG_CACHE_QUANT] = {
    [CONFIG_CACHE_STRATEGY] = {"strategy", cache_set_strategy},
    [CONFIG_CACHE_MAX_CACHE_LEN] = {"max_cache_len", cache_set_max_cache_len},
    [CONFIG_CACHE_OFFLOAD_ONLY_NON_SLIDING] = {"offload_only_non_sliding", cache_set_offload_only_non_sliding},
    [CONFIG_CACHE_PREFETCH] = {"prefetch", cache_set_prefetch},
    [CONFIG_CACHE_TRANSFER] = {"transfer", cache_set_transfer},
    [CONFIG_CACHE_HOST_MEMORY] = {"host-memory", cache_set_host_memory},
    [CONFIG_CACHE_DEVICE_BUDGET] = {"device-budget", cache_set_device_budget},
};
#define MAX_NAMES 40

/* All names that a key may have. */
static size_t cache_names(const char *ret[MAX_NAMES])
{
    size_t n = 0;

    for (size_t i = 0; i < N_ELEMENTS(cache_keys); i++)
        ret[n++] = cache_keys[i].name;
    for (size_t i = 0; i < config_quant_n_names && n < MAX_NAMES; i++)
        ret[n++] = config_quant_names[i];
    return n;
}

static int cache_set_known(ConfigCache *cache, const char *name, const char *value, ErrorDetail *reterr)
{
    for (size_t i = 0; i < N_ELEMENTS(cache_keys); i++)
        if (strcmp(cache_keys[i].name, name) == 0) {
            int r = cache_keys[i].set(cache, value, reterr);

            if (!r)
                cache->written |= 1u << i;
            return r;
        }
    return config_quant_set(&cache->quant, name + strlen("quant."), value, reterr);
}

static int unknown_cache_key(const char *key, const char *const *names, size_t n_names, ErrorDetail *reterr)
{
    char list[400] = "";
    size_t used = 0;

    for (size_t i = 0; i < n_names && used < sizeof(list); i++)
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "", names[i]);
    return error_detail_set(reterr, -EINVAL, "cache key '%.60s' is not known; known are %s", key, list);
}

int config_cache_set(ConfigCache *cache, const char *key, const char *value, ErrorDetail *reterr)
{
    const char *names[MAX_NAMES], *nearest;
    size_t n_names = cache_names(names);

    for (size_t i = 0; i < n_names; i++) {
        bool in_quant = !strncmp(names[i], "quant.", 6);

        /* "nbits_key" alone is clear enough on a command line. */
        if (!strcmp(key, names[i]) || (in_quant && !strcmp(key, names[i] + 6))) {
            int r = cache_set_known(cache, names[i], value, reterr);

            if (r == -EINVAL)
                error_detail_prefix(reterr, "cache key '%s'", key);
            return r;
        }
    }
    nearest = config_nearest(key, names, n_names);
    if (nearest)
        return error_detail_set(reterr, -EINVAL, "cache key '%.60s' is not known; did you mean '%s'?", key, nearest);
    return unknown_cache_key(key, names, n_names, reterr);
}

static const char *without_quant(const char *key)
{
    return strncmp(key, "quant.", 6) == 0 ? key + 6 : key;
}

bool config_cache_same_key(const char *a, const char *b)
{
    a = without_quant(a);
    b = without_quant(b);
    return strcmp(a, b) == 0 || (strcmp(a, "nbits") == 0 && strncmp(b, "nbits_", 6) == 0) || (strcmp(b, "nbits") == 0 && strncmp(a, "nbits_", 6) == 0);
}

/* Where the value stands, for what turns out to be wrong when blocks come together. */
static int note_place(ConfigReader *reader, const char *name, const YamlNode *node, ConfigCache *cache)
{
    Config *config = reader->config;
    ConfigPlace place = {.line = node->line, .column = node->column};

    if (config->n_files == 0 || strcmp(config->files[config->n_files - 1], reader->file) != 0) {
        char **grown = reallocarray(config->files, config->n_files + 1, sizeof(char *));

        if (!grown)
            return error_origin(-ENOMEM);
        config->files = grown;
        if (!(grown[config->n_files] = strdup(reader->file)))
            return error_origin(-ENOMEM);
        config->n_files++;
    }
    place.file = (uint32_t)config->n_files;
    for (size_t i = 0; i < N_ELEMENTS(cache_keys); i++)
        if (strcmp(cache_keys[i].name, name) == 0)
            cache->places[i] = place;
    for (int key = 0; key < CONFIG_QUANT_X_MAX; key++)
        if (config_cache_same_key(config_quant_name((ConfigQuantKey)key), name))
            cache->places[CONFIG_CACHE_QUANT + key] = place;
    return 0;
}

static int config_read_cache_key(ConfigReader *reader, const YamlNode *key, const char *name, const YamlNode *node,
                                 ConfigCache *cache)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const char *text = NULL;
    const char *names[MAX_NAMES];
    size_t n_names = cache_names(names);
    bool known = false;
    int r;

    for (size_t i = 0; i < n_names; i++)
        known = known || !strcmp(names[i], name);
    if (!known) {
        r = config_cache_set(cache, name, "", &detail);
        return config_read_result(reader, key, r, &detail);
    }
    r = config_read_text(reader, node, &text);
    if (r)
        return r;
    r = config_cache_set(cache, name, text, &detail);
    return r ? config_read_result(reader, node, r, &detail) : note_place(reader, name, node, cache);
}

int config_read_cache(ConfigReader *reader, const YamlNode *node, void *target)
{
    ConfigCache *cache = target;
    int result = 0;

    if (node->kind != YAML_KIND_MAP)
        return config_read_fail(reader, node, "a mapping of cache keys is expected here");
    for (size_t i = 0; i < node->n_children; i++) {
        const YamlNode *key = node->keys[i], *value = node->children[i];
        int r = 0;

        if (strcmp(key->text, "quant")) {
            r = config_read_cache_key(reader, key, key->text, value, cache);
        } else if (value->kind != YAML_KIND_MAP) {
            r = config_read_fail(reader, value, "a mapping of quantisation keys is expected here");
        } else {
            for (size_t j = 0; j < value->n_children; j++) {
                char name[80];

                (void)snprintf(name, sizeof(name), "quant.%.70s", value->keys[j]->text);
                r = config_read_join(r, config_read_cache_key(reader, value->keys[j], name, value->children[j], cache));
            }
        }
        result = config_read_join(result, r);
    }
    return result;
}

/* ---- what several blocks amount to ------------------------------------------------------------------------------------------- */

static bool has(const ConfigCache *cache, ConfigCacheKey key)
{
    return cache->written & 1u << key;
}

/* Later blocks are nearer: each written key of @from replaces that of @to. */
static void config_cache_overlay(ConfigCache *to, const ConfigCache *from)
{
    if (has(from, CONFIG_CACHE_STRATEGY))
        to->strategy = from->strategy;
    if (has(from, CONFIG_CACHE_MAX_CACHE_LEN))
        to->max_cache_len = from->max_cache_len;
    if (has(from, CONFIG_CACHE_OFFLOAD_ONLY_NON_SLIDING))
        to->offload_only_non_sliding = from->offload_only_non_sliding;
    if (has(from, CONFIG_CACHE_PREFETCH))
        to->prefetch = from->prefetch;
    if (has(from, CONFIG_CACHE_TRANSFER))
        to->transfer = from->transfer;
    if (has(from, CONFIG_CACHE_HOST_MEMORY))
        to->host_memory_bytes = from->host_memory_bytes;
    if (has(from, CONFIG_CACHE_DEVICE_BUDGET))
        to->device_budget_bytes = from->device_budget_bytes;
    for (int key = 0; key < CONFIG_CACHE_X_MAX; key++)
        if (key < CONFIG_CACHE_QUANT ? has(from, (ConfigCacheKey)key) : from->quant.written & 1u << (key - CONFIG_CACHE_QUANT))
            to->places[key] = from->places[key];
    to->written |= from->written;
    config_quant_overlay(&to->quant, &from->quant);
}

/* Keys that were written for another strategy, farther away, and say nothing here. */
static void drop_what_has_no_meaning(ConfigCache *cache, const KvPolicy *preset)
{
    if (!kv_form_is_coded(preset->form))
        cache->quant = (ConfigQuant){0};
    if (preset->home == KV_HOME_HOST)
        cache->quant.written &= ~(1u << CONFIG_QUANT_COMPATIBILITY);
    else
        cache->written &= ~(1u << CONFIG_CACHE_TRANSFER | 1u << CONFIG_CACHE_OFFLOAD_ONLY_NON_SLIDING);
}

static ConfigCache merge(const ConfigCache *const *blocks, size_t n_blocks, bool exact)
{
    ConfigCache merged = {.strategy = KV_STRATEGY_OFFLOADED_QUANTIZED};

    for (size_t i = 0; i < n_blocks; i++) {
        if (!blocks[i])
            continue;
        if (has(blocks[i], CONFIG_CACHE_STRATEGY)) {
            KvPolicy preset = kv_policy_preset(blocks[i]->strategy, exact);

            drop_what_has_no_meaning(&merged, &preset);
        }
        config_cache_overlay(&merged, blocks[i]);
    }
    return merged;
}

static int check_home(const ConfigCache *merged, const KvPolicy *policy, ConfigCacheKey *ret_key, ErrorDetail *reterr)
{
    static const ConfigCacheKey keys[] = {CONFIG_CACHE_TRANSFER, CONFIG_CACHE_OFFLOAD_ONLY_NON_SLIDING};

    for (size_t i = 0; i < N_ELEMENTS(keys) && policy->home == KV_HOME_DEVICE; i++)
        if (has(merged, keys[i]) && (keys[i] != CONFIG_CACHE_TRANSFER || merged->transfer != KV_TRANSFER_AUTO)) {
            *ret_key = keys[i];
            return error_detail_set(reterr, -EINVAL,
                                    "%s has no meaning for strategy %s, whose home is the device: use offloaded, offloaded_static or "
                                    "offloaded_quantized",
                                    cache_keys[keys[i]].name, kv_strategy_to_string(merged->strategy));
        }
    return 0;
}

static int apply_quant(const ConfigCache *merged, KvPolicy *policy, ConfigCacheKey *ret_key, ErrorDetail *reterr)
{
    ConfigQuantKey key = CONFIG_QUANT_BACKEND;
    int r = 0;

    if (merged->quant.written && !kv_form_is_coded(policy->form)) {
        key = (ConfigQuantKey)__builtin_ctz(merged->quant.written);
        r = error_detail_set(reterr, -EINVAL, "quant.%s has no meaning for strategy %s: use quantized or offloaded_quantized",
                             config_quant_name(key), kv_strategy_to_string(merged->strategy));
    } else if (config_quant_is_compatible(&merged->quant) && policy->home == KV_HOME_HOST) {
        key = CONFIG_QUANT_COMPATIBILITY;
        r = error_detail_set(reterr, -EINVAL, "quant.compatibility is for strategy quantized, as in Transformers, not %s",
                             kv_strategy_to_string(merged->strategy));
    } else if (config_quant_is_compatible(&merged->quant)) {
        policy->is_compatible = true;
        policy->form = kv_form_default((KvFormKind)merged->quant.values[CONFIG_QUANT_BACKEND]);
        r = config_quant_compatible(&merged->quant, &policy->compatible, &key, reterr);
    } else if (kv_form_is_coded(policy->form)) {
        r = config_quant_apply(&merged->quant, policy, &key, reterr);
    }
    if (r)
        *ret_key = (ConfigCacheKey)(CONFIG_CACHE_QUANT + key);
    return r;
}

int config_policy_at(const ConfigCache *const *blocks, size_t n_blocks, bool exact, KvPolicy *ret, ConfigPlace *ret_place, ErrorDetail *reterr)
{
    ConfigCache merged = merge(blocks, n_blocks, exact);
    KvPolicy policy = kv_policy_preset(merged.strategy, exact);
    ConfigCacheKey key = CONFIG_CACHE_STRATEGY;
    int r = apply_quant(&merged, &policy, &key, reterr);

    if (!r)
        r = check_home(&merged, &policy, &key, reterr);
    *ret_place = merged.places[key];
    if (r)
        return r;
    if (has(&merged, CONFIG_CACHE_OFFLOAD_ONLY_NON_SLIDING))
        policy.offload_only_non_sliding = merged.offload_only_non_sliding;
    if (has(&merged, CONFIG_CACHE_MAX_CACHE_LEN))
        policy.max_cache_tokens = merged.max_cache_len;
    if (has(&merged, CONFIG_CACHE_PREFETCH))
        policy.n_slots = merged.prefetch;
    if (has(&merged, CONFIG_CACHE_TRANSFER))
        policy.transfer = merged.transfer;
    if (has(&merged, CONFIG_CACHE_HOST_MEMORY))
        policy.host_budget_bytes = merged.host_memory_bytes;
    if (has(&merged, CONFIG_CACHE_DEVICE_BUDGET))
        policy.device_budget_bytes = merged.device_budget_bytes;
    *ret = policy;
    return 0;
}

int config_policy(const ConfigCache *const *blocks, size_t n_blocks, bool exact, KvPolicy *ret, ErrorDetail *reterr)
{
    ConfigPlace place;

    return config_policy_at(blocks, n_blocks, exact, ret, &place, reterr);
}
