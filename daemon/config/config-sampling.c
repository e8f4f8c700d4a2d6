/* SPDX-License-Identifier: Apache-2.0 */
/* Sampling parameters, from YAML and from strings. */

#include "daemon/config/config-read.h"

#include <string.h>

static int sampling_set_float(const char *text, double min, double max, float *ret, ErrorDetail *reterr)
{
    double value;
    int r = config_value_double(text, min, max, &value, reterr);

    if (!r)
        *ret = (float)value;
    return r;
}

static int sampling_set_u32(const char *text, uint32_t *ret, ErrorDetail *reterr)
{
    uint64_t value;
    int r = config_value_u64(text, 0, UINT32_MAX, &value, reterr);

    if (!r)
        *ret = (uint32_t)value;
    return r;
}

static const char *const sampling_names[CONFIG_SAMPLING_X_MAX] = {
    "max-tokens", "temperature", "top-k", "top-p", "min-p", "repeat-penalty", "seed", "min-tokens", "no-repeat-ngram", "stop",
};

static int sampling_set_key(EngineSampling *sampling, ConfigSamplingKey key, const char *value, ErrorDetail *reterr)
{
    switch (key) {
    case CONFIG_SAMPLING_MAX_TOKENS:
        return sampling_set_u32(value, &sampling->max_tokens, reterr);
    case CONFIG_SAMPLING_TEMPERATURE:
        return sampling_set_float(value, 0, 100, &sampling->temperature, reterr);
    case CONFIG_SAMPLING_TOP_K:
        return sampling_set_u32(value, &sampling->top_k, reterr);
    case CONFIG_SAMPLING_TOP_P:
        return sampling_set_float(value, 0, 1, &sampling->top_p, reterr);
    case CONFIG_SAMPLING_MIN_P:
        return sampling_set_float(value, 0, 1, &sampling->min_p, reterr);
    case CONFIG_SAMPLING_REPEAT_PENALTY:
        return sampling_set_float(value, 0.01, 100, &sampling->repeat_penalty, reterr);
    case CONFIG_SAMPLING_SEED:
        return config_value_u64(value, 0, UINT64_MAX, &sampling->seed, reterr);
    case CONFIG_SAMPLING_MIN_TOKENS:
        return sampling_set_u32(value, &sampling->min_tokens, reterr);
    case CONFIG_SAMPLING_NO_REPEAT_NGRAM:
        return sampling_set_u32(value, &sampling->no_repeat_ngram, reterr);
    case CONFIG_SAMPLING_STOP:
    case CONFIG_SAMPLING_X_MAX:
        break;
    }
    return error_detail_set(reterr, -EINVAL, "is a list of strings");
}

int config_sampling_set(EngineSampling *sampling, const char *key, const char *value, ErrorDetail *reterr)
{
    const char *nearest;

    for (int i = 0; i < CONFIG_SAMPLING_X_MAX; i++)
        if (!strcmp(key, sampling_names[i])) {
            int r = sampling_set_key(sampling, (ConfigSamplingKey)i, value, reterr);

            if (r == -EINVAL)
                error_detail_prefix(reterr, "%s", key);
            return r;
        }
    nearest = config_nearest(key, sampling_names, CONFIG_SAMPLING_X_MAX);
    if (nearest)
        return error_detail_set(reterr, -EINVAL, "'%.60s' is not known; did you mean '%s'?", key, nearest);
    return error_detail_set(reterr, -EINVAL, "'%.60s' is not a sampling parameter", key);
}

static int config_read_stop(ConfigReader *reader, const YamlNode *node, EngineSampling *sampling)
{
    char **strings = NULL;
    size_t n = 0;
    int r = config_read_strings(reader, node, &strings, &n);

    for (size_t i = 0; i < sampling->n_stop; i++)
        free((void *)(uintptr_t)sampling->stop[i]);
    free(sampling->stop);
    /* Owned by the config, read-only for everyone else. */
    sampling->stop = (const char **)(void *)strings;
    sampling->n_stop = n;
    for (size_t i = 0; i < n; i++)
        if (!strings[i][0])
            r = config_read_join(r, config_read_fail(reader, node, "a stop string must not be empty"));
    return r;
}

int config_read_sampling(ConfigReader *reader, const YamlNode *node, EngineSampling *sampling, bool *has_key)
{
    int result = 0;

    if (node->kind != YAML_KIND_MAP)
        return config_read_fail(reader, node, "a mapping of sampling parameters is expected here");
    for (size_t i = 0; i < node->n_children; i++) {
        const YamlNode *key = node->keys[i], *value = node->children[i];
        ErrorDetail detail = ERROR_DETAIL_NULL;
        const char *text = NULL;
        int k = 0, r;

        while (k < CONFIG_SAMPLING_X_MAX && strcmp(key->text, sampling_names[k]))
            k++;
        if (k == CONFIG_SAMPLING_STOP) {
            r = config_read_stop(reader, value, sampling);
        } else if (k == CONFIG_SAMPLING_X_MAX) {
            r = config_read_result(reader, key, config_sampling_set(sampling, key->text, "", &detail), &detail);
        } else {
            r = config_read_text(reader, value, &text);
            if (!r)
                r = config_read_result(reader, value, sampling_set_key(sampling, (ConfigSamplingKey)k, text, &detail), &detail);
        }
        if (k < CONFIG_SAMPLING_X_MAX && has_key)
            has_key[k] = true;
        result = config_read_join(result, r);
    }
    return result;
}

void config_service_sampling(const Config *config, const ConfigService *service, EngineSampling *ret)
{
    const ConfigModel *model = config_find_model(config, service->model);
    const EngineSampling *own = &service->sampling;

    *ret = model ? model->sampling : CONFIG_SAMPLING_DEFAULT;
#define OVERLAY(key, field)                                                                                                  \
    if (service->has_sampling_key[CONFIG_SAMPLING_##key])                                                                   \
        ret->field = own->field;
    OVERLAY(MAX_TOKENS, max_tokens)
    OVERLAY(TEMPERATURE, temperature)
    OVERLAY(TOP_K, top_k)
    OVERLAY(TOP_P, top_p)
    OVERLAY(MIN_P, min_p)
    OVERLAY(REPEAT_PENALTY, repeat_penalty)
    OVERLAY(SEED, seed)
    OVERLAY(MIN_TOKENS, min_tokens)
    OVERLAY(NO_REPEAT_NGRAM, no_repeat_ngram)
    OVERLAY(STOP, stop)
    OVERLAY(STOP, n_stop)
#undef OVERLAY
}
