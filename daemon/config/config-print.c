/* SPDX-License-Identifier: Apache-2.0 */
/* `leatd --print-config`: the configuration in effect, as YAML. */

#include "daemon/config/config.h"

#include <inttypes.h>
#include <string.h>

/* A double-quoted scalar, whatever is in it. */
static void print_text(FILE *file, const char *text)
{
    (void)fputc('"', file);
    for (const unsigned char *c = (const unsigned char *)(text ? text : ""); *c; c++) {
        if (*c == '"' || *c == '\\')
            (void)fprintf(file, "\\%c", *c);
        else if (*c == '\n')
            (void)fputs("\\n", file);
        else if (*c < 0x20 || *c == 0x7f)
            (void)fprintf(file, "\\x%02x", *c);
        else
            (void)fputc(*c, file);
    }
    (void)fputc('"', file);
}

static void print_key(FILE *file, const char *indent, const char *key, const char *text)
{
    if (!text)
        return;
    (void)fprintf(file, "%s%s: ", indent, key);
    print_text(file, text);
    (void)fputc('\n', file);
}

static void print_duration(FILE *file, const char *indent, const char *key, uint64_t usec)
{
    if (usec == UINT64_MAX)
        (void)fprintf(file, "%s%s: never\n", indent, key);
    else
        (void)fprintf(file, "%s%s: %" PRIu64 "ms\n", indent, key, usec / 1000);
}

/* The keys that were written; the rest are the strategy's. */
static void print_cache(FILE *file, const char *indent, const ConfigCache *cache)
{
    static const char *const transfers[] = {[KV_TRANSFER_AUTO] = "auto", [KV_TRANSFER_COPY] = "copy", [KV_TRANSFER_ZERO_COPY] = "zero-copy"};
    const char *divider = "";

    (void)fprintf(file, "%scache: {", indent);
#define PRINT(key, ...)                                                                                                                     \
    if (cache->written & 1u << CONFIG_CACHE_##key) {                                                                                       \
        (void)fputs(divider, file);                                                                                                        \
        (void)fprintf(file, __VA_ARGS__);                                                                                                  \
        divider = ", ";                                                                                                                    \
    }
    PRINT(STRATEGY, "strategy: %s", kv_strategy_to_string(cache->strategy))
    PRINT(OFFLOAD_ONLY_NON_SLIDING, "offload_only_non_sliding: %s", cache->offload_only_non_sliding ? "true" : "false")
    PRINT(MAX_CACHE_LEN, "max_cache_len: %" PRIu32, cache->max_cache_len)
    PRINT(PREFETCH, "prefetch: %" PRIu32, cache->prefetch)
    PRINT(TRANSFER, "transfer: %s", transfers[cache->transfer])
    PRINT(HOST_MEMORY, "host-memory: %" PRIu64, cache->host_memory_bytes)
    PRINT(DEVICE_BUDGET, "device-budget: %" PRIu64, cache->device_budget_bytes)
#undef PRINT
    if (cache->quant.written) {
        (void)fprintf(file, "%squant: {", divider);
        divider = "";
        for (int key = 0; key < CONFIG_QUANT_X_MAX; key++)
            if (cache->quant.written & 1u << key) {
                char value[KV_LAYER_BITS_TEXT];

                config_quant_print(&cache->quant, (ConfigQuantKey)key, value, sizeof(value));
                (void)fprintf(file, key == CONFIG_QUANT_NBITS_LAYERS ? "%s%s: '%s'" : "%s%s: %s", divider,
                              config_quant_name((ConfigQuantKey)key), value);
                divider = ", ";
            }
        (void)fputc('}', file);
    }
    (void)fputs("}\n", file);
}

static void print_sampling(FILE *file, const char *indent, const EngineSampling *sampling)
{
    (void)fprintf(file,
                  "%sparameters: {temperature: %g, top-k: %" PRIu32 ", top-p: %g, min-p: %g, repeat-penalty: %g, max-tokens: %" PRIu32
                  ", seed: %" PRIu64 ", min-tokens: %" PRIu32 ", no-repeat-ngram: %" PRIu32 ", stop: [",
                  indent, (double)sampling->temperature, sampling->top_k, (double)sampling->top_p, (double)sampling->min_p,
                  (double)sampling->repeat_penalty, sampling->max_tokens, sampling->seed,
                  sampling->min_tokens, sampling->no_repeat_ngram);
    for (size_t i = 0; i < sampling->n_stop; i++) {
        (void)fputs(i ? ", " : "", file);
        print_text(file, sampling->stop[i]);
    }
    (void)fputs("]}\n", file);
}

static void print_devices(FILE *file, const Config *config)
{
    static const char *const uses[] = {[GPU_USE_YES] = "always", [GPU_USE_NO] = "never", [GPU_USE_FALLBACK] = "fallback"};

    (void)fputs(config->n_devices ? "devices:\n" : "devices: []\n", file);
    for (size_t i = 0; i < config->n_devices; i++) {
        const GpuMatch *match = &config->devices[i];

        (void)fprintf(file, "  - use: %s\n", uses[match->use]);
        if (match->type != GPU_DEVICE_TYPE_X_INVALID || match->vendor || match->name)
            (void)fputs("    match:\n", file);
        if (match->type != GPU_DEVICE_TYPE_X_INVALID)
            (void)fprintf(file, "      type: %s\n", gpu_device_type_to_string(match->type));
        print_key(file, "      ", "vendor", match->vendor);
        print_key(file, "      ", "name", match->name);
        if (match->max_memory_bytes)
            (void)fprintf(file, "    max-memory: %" PRIu64 "\n", match->max_memory_bytes);
        if (match->reserve_bytes)
            (void)fprintf(file, "    reserve: %" PRIu64 "\n", match->reserve_bytes);
    }
}

static void print_weights(FILE *file, const ModelWeights *weights)
{
    static const char *const transfers[] = {
        [KV_TRANSFER_AUTO] = "auto", [KV_TRANSFER_COPY] = "copy", [KV_TRANSFER_ZERO_COPY] = "zero-copy"};

    if (weights->limit_layers)
        (void)fprintf(file, "    layers: %" PRIu32 "\n", weights->max_layers);
    else
        (void)fprintf(file, "    layers: %s\n", weights->all_layers ? "all" : "auto");
    (void)fprintf(file, "    weights:\n      prefetch: %" PRIu32 "\n      transfer: %s\n", weights->n_slots, transfers[weights->transfer]);
}

static void print_model(FILE *file, const ConfigModel *model)
{
    (void)fputs("  ", file);
    print_text(file, model->name);
    (void)fputs(":\n", file);
    print_key(file, "    ", "file", model->file);
    (void)fputs("    aliases: [", file);
    for (size_t i = 0; i < model->n_aliases; i++) {
        (void)fputs(i ? ", " : "", file);
        print_text(file, model->aliases[i]);
    }
    (void)fprintf(file, "]\n    context: %" PRIu32 "\n    compute: %s\n    parallel: %" PRIu32 "\n    prefixes: %" PRIu32 "\n    preload: %s\n",
                  model->context, model->exact ? "exact" : "fast", model->parallel, model->prefixes, model->preload ? "true" : "false");
    print_duration(file, "    ", "keep-alive", model->keep_alive_usec);
    print_key(file, "    ", "template", model->template_file);
    print_weights(file, &model->weights);
    print_cache(file, "    ", &model->cache);
    print_sampling(file, "    ", &model->sampling);
}

int config_print(const Config *config, FILE *file)
{
    (void)fputs("version: 1\n", file);
    print_devices(file, config);
    for (size_t i = 0; i < config->n_store_paths; i++) {
        (void)fputs(i == 0 ? "store:\n  path: " : i == 1 ? "  read-only:\n    - " : "    - ", file);
        print_text(file, config->store_paths[i]);
        (void)fputc('\n', file);
    }
    (void)fprintf(file, "defaults:\n  context: %" PRIu32 "\n  compute: %s\n  seed: %" PRIu64 "\n", config->default_context,
                  config->default_exact ? "exact" : "fast", config->default_seed);
    print_duration(file, "  ", "keep-alive", config->default_keep_alive_usec);
    print_cache(file, "  ", &config->default_cache);
    (void)fputs(config->n_models ? "models:\n" : "models: {}\n", file);
    for (size_t i = 0; i < config->n_models; i++)
        print_model(file, &config->models[i]);
    (void)fprintf(file, "scheduler:\n  max-queue: %" PRIu32 "\n", config->max_queue);
    if (config->host_memory_bytes > 0)
        (void)fprintf(file, "  host-memory: %" PRIu64 "\n", config->host_memory_bytes);
    else
        (void)fputs("  host-memory: auto\n", file);
    print_duration(file, "  ", "idle-exit", config->idle_exit_usec);
    print_key(file, "  ", "spill", config->spill_dir);
    print_duration(file, "  ", "spill-after", config->spill_after_usec);
    (void)fputs("log:\n", file);
    (void)fprintf(file, "  level: %s\n", config->log_level <= 3   ? "error"
                                         : config->log_level == 4 ? "warning"
                                         : config->log_level == 5 ? "notice"
                                         : config->log_level == 6 ? "info"
                                                                  : "debug");
    for (size_t i = 0; i < config->n_services; i++)
        (void)fprintf(file, "# service %s: %s:%" PRIu32 "\n", config->services[i].name, config->services[i].source_file,
                      config->services[i].source_line);
    return ferror(file) || fflush(file) != 0 ? error_origin(-EIO) : 0;
}
