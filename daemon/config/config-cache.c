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
    cache->has_strategy = true;
    return 0;
}

static int cache_set_max_cache_len(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    uint64_t value;
    int r = config_value_u64(text, 1, CACHE_MAX_TOKENS, &value, reterr);

    if (r)
        return r;
    cache->max_cache_len = (uint32_t)value;
    cache->has_max_cache_len = true;
    return 0;
}

static int cache_set_offload_only_non_sliding(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    int r = config_value_bool(text, &cache->offload_only_non_sliding, reterr);

    if (!r)
        cache->has_offload_only_non_sliding = true;
    return r;
}

static int cache_set_prefetch(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    uint64_t value;
    int r = config_value_u64(text, 1, 8, &value, reterr);

    if (r)
        return r;
    cache->prefetch = (uint32_t)value;
    cache->has_prefetch = true;
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
    cache->has_transfer = true;
    return 0;
}

static int cache_set_host_memory(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    int r = config_value_bytes(text, &cache->host_memory_bytes, reterr);

    if (!r)
        cache->has_host_memory = true;
    return r;
}

static int cache_set_device_budget(ConfigCache *cache, const char *text, ErrorDetail *reterr)
{
    int r = config_value_bytes(text, &cache->device_budget_bytes, reterr);

    if (!r)
        cache->has_device_budget = true;
    return r;
}

typedef int (*CacheSetter)(ConfigCache *cache, const char *text, ErrorDetail *reterr);

/* The names as in YAML; those of config-quant.h stand in a `quant:` mapping there. */
static const struct {
    const char *name;
    CacheSetter set;
} cache_keys[] = {
    {"strategy", cache_set_strategy},
    {"max_cache_len", cache_set_max_cache_len},
    {"offload_only_non_sliding", cache_set_offload_only_non_sliding},
    {"prefetch", cache_set_prefetch},
    {"transfer", cache_set_transfer},
    {"host-memory", cache_set_host_memory},
    {"device-budget", cache_set_device_budget},
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
        if (strcmp(cache_keys[i].name, name) == 0)
            return cache_keys[i].set(cache, value, reterr);
    return config_quant_set(&cache->quant, name + strlen("quant."), value, reterr);
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
    return error_detail_set(reterr, -EINVAL, "cache key '%.60s' is not known", key);
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
    return config_read_result(reader, node, r, &detail);
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

/* Later blocks are nearer: each written key of @from replaces that of @to. */
static void config_cache_overlay(ConfigCache *to, const ConfigCache *from)
{
#define OVERLAY(has, field)                                                                                          \
    if (from->has) {                                                                                                 \
        to->has = true;                                                                                              \
        to->field = from->field;                                                                                     \
    }
    OVERLAY(has_strategy, strategy)
    OVERLAY(has_max_cache_len, max_cache_len)
    OVERLAY(has_offload_only_non_sliding, offload_only_non_sliding)
    OVERLAY(has_prefetch, prefetch)
    OVERLAY(has_transfer, transfer)
    OVERLAY(has_host_memory, host_memory_bytes)
    OVERLAY(has_device_budget, device_budget_bytes)
#undef OVERLAY
    config_quant_overlay(&to->quant, &from->quant);
}

int config_policy(const ConfigCache *const *blocks, size_t n_blocks, bool exact, KvPolicy *ret, ErrorDetail *reterr)
{
    ConfigCache merged = {.strategy = KV_STRATEGY_OFFLOADED_QUANTIZED};
    KvPolicy policy;
    int r = 0;

    for (size_t i = 0; i < n_blocks; i++)
        if (blocks[i])
            config_cache_overlay(&merged, blocks[i]);
    policy = kv_policy_preset(merged.strategy, exact);
    if (merged.quant.written && !kv_form_is_coded(policy.form))
        return error_detail_set(reterr, -EINVAL, "quant.%s has no meaning for strategy %s: use quantized or offloaded_quantized",
                                config_quant_name((ConfigQuantKey)__builtin_ctz(merged.quant.written)),
                                kv_strategy_to_string(merged.strategy));
    if (config_quant_is_compatible(&merged.quant)) {
        if (policy.home == KV_HOME_HOST)
            return error_detail_set(reterr, -EINVAL, "quant.compatibility is for strategy quantized, as in Transformers");
        policy.is_compatible = true;
        policy.form = kv_form_default((KvFormKind)merged.quant.values[CONFIG_QUANT_BACKEND]);
        r = config_quant_compatible(&merged.quant, &policy.compatible, reterr);
    } else if (kv_form_is_coded(policy.form)) {
        r = config_quant_apply(&merged.quant, &policy, reterr);
    }
    if (r)
        return r;
    if (merged.has_transfer && merged.transfer != KV_TRANSFER_AUTO && policy.home == KV_HOME_DEVICE)
        return error_detail_set(reterr, -EINVAL,
                                "transfer has no meaning for strategy %s, whose home is the device: use an offloaded one",
                                kv_strategy_to_string(merged.strategy));
    if (merged.has_offload_only_non_sliding && policy.home == KV_HOME_DEVICE)
        return error_detail_set(reterr, -EINVAL,
                                "offload_only_non_sliding has no meaning for strategy %s, whose home is the device: use an offloaded one",
                                kv_strategy_to_string(merged.strategy));
    if (merged.has_offload_only_non_sliding)
        policy.offload_only_non_sliding = merged.offload_only_non_sliding;
    if (merged.has_max_cache_len)
        policy.max_cache_tokens = merged.max_cache_len;
    if (merged.has_prefetch)
        policy.n_slots = merged.prefetch;
    if (merged.has_transfer)
        policy.transfer = merged.transfer;
    if (merged.has_host_memory)
        policy.host_budget_bytes = merged.host_memory_bytes;
    if (merged.has_device_budget)
        policy.device_budget_bytes = merged.device_budget_bytes;
    *ret = policy;
    return 0;
}
