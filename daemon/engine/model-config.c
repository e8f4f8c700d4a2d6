/* SPDX-License-Identifier: Apache-2.0 */
/* Owned copies of what the main thread describes by borrowed pointers. */

#include "daemon/engine/model-config.h"

#include <string.h>

/* The copies are ours although the public structs say const. */
static void free_string(const char *string)
{
    free((char *)(uintptr_t)string);
}

/* NULL stays NULL. */
static int copy_string(const char *string, const char **ret)
{
    *ret = string ? strdup(string) : NULL;
    return string && !*ret ? error_origin(-ENOMEM) : 0;
}

static bool strings_equal(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

void strings_free(const char **strings, size_t n)
{
    for (size_t i = 0; strings && i < n; i++)
        free_string(strings[i]);
    free(strings);
}

int strings_copy(const char *const *strings, size_t n, const char ***ret)
{
    const char **copy = n > 0 ? calloc(n, sizeof(*copy)) : NULL;

    if (n > 0 && !copy)
        return error_origin(-ENOMEM);
    for (size_t i = 0; i < n; i++)
        if (copy_string(strings[i], &copy[i]) < 0) {
            strings_free(copy, n);
            return -ENOMEM;
        }
    *ret = copy;
    return 0;
}

int sampling_copy(const EngineSampling *sampling, EngineSampling *ret)
{
    EngineSampling copy = *sampling;
    int r;

    r = strings_copy(sampling->stop, sampling->n_stop, &copy.stop);
    if (r < 0)
        return r;
    r = strings_copy(sampling->bad_words, sampling->n_bad_words, &copy.bad_words);
    if (r < 0) {
        strings_free(copy.stop, copy.n_stop);
        return r;
    }
    *ret = copy;
    return 0;
}

void sampling_clear(EngineSampling *sampling)
{
    strings_free(sampling->stop, sampling->n_stop);
    strings_free(sampling->bad_words, sampling->n_bad_words);
    sampling->stop = sampling->bad_words = NULL;
    sampling->n_stop = sampling->n_bad_words = 0;
}

int messages_copy(const EngineMessage *messages, size_t n, ChatMessage **ret)
{
    ChatMessage *copy = calloc(n ? n : 1, sizeof(*copy));

    if (!copy)
        return error_origin(-ENOMEM);
    for (size_t i = 0; i < n; i++)
        if (copy_string(messages[i].role ? messages[i].role : "", &copy[i].role) < 0 ||
            copy_string(messages[i].content ? messages[i].content : "", &copy[i].content) < 0) {
            messages_free(copy, n);
            return -ENOMEM;
        }
    *ret = copy;
    return 0;
}

ChatMessage *messages_free(ChatMessage *messages, size_t n)
{
    if (!messages)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        free_string(messages[i].role);
        free_string(messages[i].content);
    }
    free(messages);
    return NULL;
}

static int model_config_copy(const EngineModel *model, EngineModel *ret)
{
    EngineModel copy = *model;
    int r;

    copy.name = copy.path = copy.chat_template = copy.spill_dir = NULL;
    copy.sampling.stop = NULL;
    copy.sampling.n_stop = 0;
    r = copy_string(model->name, &copy.name);
    if (r == 0)
        r = copy_string(model->path, &copy.path);
    if (r == 0)
        r = copy_string(model->chat_template, &copy.chat_template);
    if (r == 0)
        r = copy_string(model->spill_dir, &copy.spill_dir);
    if (r == 0)
        r = sampling_copy(&model->sampling, &copy.sampling);
    if (r < 0) {
        model_config_clear(&copy);
        return r;
    }
    copy.parallel = MAX(copy.parallel, 1u);
    *ret = copy;
    return 0;
}

void model_config_clear(EngineModel *model)
{
    free_string(model->name);
    free_string(model->path);
    free_string(model->chat_template);
    free_string(model->spill_dir);
    sampling_clear(&model->sampling);
    model->name = model->path = model->chat_template = model->spill_dir = NULL;
}

int model_configs_copy(const EngineModel *models, size_t n, EngineModel **ret)
{
    EngineModel *copy = calloc(n ? n : 1, sizeof(*copy));

    if (!copy)
        return error_origin(-ENOMEM);
    for (size_t i = 0; i < n; i++) {
        int r = model_config_copy(&models[i], &copy[i]);

        if (r < 0) {
            model_configs_free(copy, i);
            return error_trace(r);
        }
    }
    *ret = copy;
    return 0;
}

EngineModel *model_configs_free(EngineModel *models, size_t n)
{
    if (!models)
        return NULL;
    for (size_t i = 0; i < n; i++)
        model_config_clear(&models[i]);
    free(models);
    return NULL;
}

bool model_config_same_load(const EngineModel *a, const EngineModel *b)
{
    return strings_equal(a->path, b->path) && strings_equal(a->chat_template, b->chat_template) && a->exact == b->exact &&
           a->context == b->context && a->parallel == b->parallel && a->weights.n_slots == b->weights.n_slots &&
           a->weights.transfer == b->weights.transfer && a->weights.limit_layers == b->weights.limit_layers &&
           a->weights.max_layers == b->weights.max_layers && a->weights.all_layers == b->weights.all_layers;
}

bool policy_equal(const KvPolicy *a, const KvPolicy *b)
{
    return a->strategy == b->strategy && a->growth == b->growth && a->home == b->home && kv_form_equal(&a->form, &b->form) &&
           kv_layer_bits_equal(a, b) && a->transfer == b->transfer &&
           a->n_slots == b->n_slots && a->max_cache_tokens == b->max_cache_tokens &&
           a->host_budget_bytes == b->host_budget_bytes && a->device_budget_bytes == b->device_budget_bytes &&
           a->tile_blocks == b->tile_blocks && a->is_compatible == b->is_compatible &&
           (!a->is_compatible || kv_quant_options_equal(&a->compatible, &b->compatible)) && a->offload_only_non_sliding == b->offload_only_non_sliding &&
           (!kv_form_is_auto(a->form) || !(a->kld_budget < b->kld_budget || a->kld_budget > b->kld_budget));
}

int gpu_options_copy(const GpuOptions *options, GpuOptions *ret)
{
    GpuOptions copy = *options;
    GpuMatch *matches = calloc(options->n_matches ? options->n_matches : 1, sizeof(*matches));
    int r;

    copy.matches = matches;
    copy.n_matches = 0;
    copy.cache_dir = copy.compiler = NULL;
    r = matches ? 0 : error_origin(-ENOMEM);
    for (size_t i = 0; i < options->n_matches && r == 0; i++) {
        matches[i] = options->matches[i];
        matches[i].vendor = matches[i].name = NULL;
        copy.n_matches = i + 1;
        r = copy_string(options->matches[i].vendor, &matches[i].vendor);
        if (r == 0)
            r = copy_string(options->matches[i].name, &matches[i].name);
    }
    if (r == 0)
        r = copy_string(options->cache_dir, &copy.cache_dir);
    if (r == 0)
        r = copy_string(options->compiler, &copy.compiler);
    if (r < 0) {
        gpu_options_clear(&copy);
        return r;
    }
    *ret = copy;
    return 0;
}

void gpu_options_clear(GpuOptions *options)
{
    for (size_t i = 0; options->matches && i < options->n_matches; i++) {
        free_string(options->matches[i].vendor);
        free_string(options->matches[i].name);
    }
    free((GpuMatch *)(uintptr_t)options->matches);
    free_string(options->cache_dir);
    free_string(options->compiler);
    *options = (GpuOptions){0};
}
