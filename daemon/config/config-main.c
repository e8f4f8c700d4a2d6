/* SPDX-License-Identifier: Apache-2.0 */
/* The main file and its drop-ins. */

#include "daemon/config/config-read.h"
#include "quant/base/log.h"

#include <string.h>
#include <syslog.h>

/* Readers of one scalar each; @target is the struct that the table belongs to. */
static int read_u64(ConfigReader *reader, const YamlNode *node, uint64_t min, uint64_t max, uint64_t *ret)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const char *text = NULL;
    int r = config_read_text(reader, node, &text);

    return r ? r : config_read_result(reader, node, config_value_u64(text, min, max, ret, &detail), &detail);
}

static int read_u32(ConfigReader *reader, const YamlNode *node, uint32_t min, uint32_t max, uint32_t *ret)
{
    uint64_t value;
    int r = read_u64(reader, node, min, max, &value);

    if (!r)
        *ret = (uint32_t)value;
    return r;
}

static int read_bytes(ConfigReader *reader, const YamlNode *node, uint64_t *ret)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const char *text = NULL;
    int r = config_read_text(reader, node, &text);

    return r ? r : config_read_result(reader, node, config_value_bytes(text, ret, &detail), &detail);
}

static int read_duration(ConfigReader *reader, const YamlNode *node, uint64_t *ret_usec)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const char *text = NULL;
    int r = config_read_text(reader, node, &text);

    return r ? r : config_read_result(reader, node, config_value_duration(text, ret_usec, &detail), &detail);
}

static int read_bool(ConfigReader *reader, const YamlNode *node, bool *ret)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const char *text = NULL;
    int r = config_read_text(reader, node, &text);

    return r ? r : config_read_result(reader, node, config_value_bool(text, ret, &detail), &detail);
}

static int read_word(ConfigReader *reader, const YamlNode *node, const char *const *words, size_t n_words, size_t *ret)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const char *text = NULL;
    int r = config_read_text(reader, node, &text);

    return r ? r : config_read_result(reader, node, config_value_word(text, words, n_words, ret, &detail), &detail);
}

static int read_exact(ConfigReader *reader, const YamlNode *node, bool *ret)
{
    static const char *const words[] = {"fast", "exact"};
    size_t index = 0;
    int r = read_word(reader, node, words, N_ELEMENTS(words), &index);

    if (!r)
        *ret = index == 1;
    return r;
}

/* ---- devices ----------------------------------------------------------------------------------------------------------- */

static int read_match_vendor(ConfigReader *reader, const YamlNode *node, void *target)
{
    return config_read_string(reader, node, &((GpuMatch *)target)->vendor);
}

static int read_match_name(ConfigReader *reader, const YamlNode *node, void *target)
{
    return config_read_string(reader, node, &((GpuMatch *)target)->name);
}

static int read_match_type(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const char *const words[] = {"gpu", "accelerator", "cpu"};
    size_t index = 0;
    int r = read_word(reader, node, words, N_ELEMENTS(words), &index);

    if (!r)
        ((GpuMatch *)target)->type = (GpuDeviceType)index;
    return r;
}

static int read_device_match(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const ConfigKey keys[] = {
        {"vendor", read_match_vendor},
        {"name", read_match_name},
        {"type", read_match_type},
    };

    return config_read_map(reader, node, keys, N_ELEMENTS(keys), target);
}

static int read_device_use(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const char *const words[] = {"always", "never", "fallback"};
    size_t index = 0;
    int r = read_word(reader, node, words, N_ELEMENTS(words), &index);

    if (!r)
        ((GpuMatch *)target)->use = (GpuUse)index;
    return r;
}

static int read_device_reserve(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_bytes(reader, node, &((GpuMatch *)target)->reserve_bytes);
}

static int read_device_max_memory(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_bytes(reader, node, &((GpuMatch *)target)->max_memory_bytes);
}

static int read_devices(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const ConfigKey keys[] = {
        {"match", read_device_match},
        {"use", read_device_use},
        {"reserve", read_device_reserve},
        {"max-memory", read_device_max_memory},
    };
    Config *config = target;
    int result = 0;

    if (node->kind != YAML_KIND_LIST)
        return config_read_fail(reader, node, "a list of devices is expected here");
    for (size_t i = 0; i < node->n_children; i++) {
        GpuMatch *grown = reallocarray(config->devices, config->n_devices + 1, sizeof(*grown));

        if (!grown)
            return error_origin(-ENOMEM);
        config->devices = grown;
        grown[config->n_devices] = (GpuMatch){.type = GPU_DEVICE_TYPE_X_INVALID};
        result = config_read_join(
            result, config_read_map(reader, node->children[i], keys, N_ELEMENTS(keys), &grown[config->n_devices++]));
    }
    return result;
}

/* ---- store and defaults ------------------------------------------------------------------------------------------------- */

static int read_store_path(ConfigReader *reader, const YamlNode *node, void *target)
{
    Config *config = target;

    return config_read_strings(reader, node, &config->store_paths, &config->n_store_paths);
}

static int read_store(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const ConfigKey keys[] = {{"path", read_store_path}, {"read-only", read_store_path}};

    return config_read_map(reader, node, keys, N_ELEMENTS(keys), target);
}

static int read_default_context(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_u32(reader, node, 0, 16u << 20, &((Config *)target)->default_context);
}

static int read_default_keep_alive(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_duration(reader, node, &((Config *)target)->default_keep_alive_usec);
}

static int read_default_compute(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_exact(reader, node, &((Config *)target)->default_exact);
}

static int read_default_seed(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_u64(reader, node, 0, UINT64_MAX, &((Config *)target)->default_seed);
}

static int read_default_cache(ConfigReader *reader, const YamlNode *node, void *target)
{
    return config_read_cache(reader, node, &((Config *)target)->default_cache);
}

static int read_defaults(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const ConfigKey keys[] = {
        {"context", read_default_context}, {"keep-alive", read_default_keep_alive}, {"compute", read_default_compute},
        {"seed", read_default_seed},       {"cache", read_default_cache},
    };

    return config_read_map(reader, node, keys, N_ELEMENTS(keys), target);
}

/* ---- models -------------------------------------------------------------------------------------------------------------- */

static int read_model_file(ConfigReader *reader, const YamlNode *node, void *target)
{
    return config_read_string(reader, node, &((ConfigModel *)target)->file);
}

static int read_model_aliases(ConfigReader *reader, const YamlNode *node, void *target)
{
    ConfigModel *model = target;

    return config_read_strings(reader, node, &model->aliases, &model->n_aliases);
}

static int read_model_context(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_u32(reader, node, 1, 16u << 20, &((ConfigModel *)target)->context);
}

static int read_model_parallel(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_u32(reader, node, 1, 64, &((ConfigModel *)target)->parallel);
}

static int read_model_prefixes(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_u32(reader, node, 0, 1024, &((ConfigModel *)target)->prefixes);
}

static int read_model_keep_alive(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_duration(reader, node, &((ConfigModel *)target)->keep_alive_usec);
}

static int read_model_preload(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_bool(reader, node, &((ConfigModel *)target)->preload);
}

static int read_model_compute(ConfigReader *reader, const YamlNode *node, void *target)
{
    ConfigModel *model = target;
    int r = read_exact(reader, node, &model->exact);

    model->has_exact = model->has_exact || !r;
    return r;
}

static int read_model_cache(ConfigReader *reader, const YamlNode *node, void *target)
{
    return config_read_cache(reader, node, &((ConfigModel *)target)->cache);
}

/* auto, all, or how many may stay on the device. */
static int read_model_layers(ConfigReader *reader, const YamlNode *node, void *target)
{
    ModelWeights *weights = &((ConfigModel *)target)->weights;
    const char *text = NULL;
    uint32_t n = 0;
    int r = config_read_text(reader, node, &text);

    if (r)
        return r;
    weights->all_layers = !strcmp(text, "all");
    weights->limit_layers = false;
    if (weights->all_layers || !strcmp(text, "auto"))
        return 0;
    if (text[0] < '0' || text[0] > '9')
        return config_read_fail(reader, node, "'%.40s' is none of auto, all and a number of layers", text);
    r = read_u32(reader, node, 0, 4096, &n);
    weights->limit_layers = !r;
    weights->max_layers = n;
    return r;
}

static int read_weights_prefetch(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_u32(reader, node, 1, 8, &((ModelWeights *)target)->n_slots);
}

static int read_weights_transfer(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const char *const words[] = {"auto", "copy", "zero-copy"};
    size_t index = 0;
    int r = read_word(reader, node, words, N_ELEMENTS(words), &index);

    if (!r)
        ((ModelWeights *)target)->transfer = (KvTransfer)index;
    return r;
}

static int read_model_weights(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const ConfigKey keys[] = {{"prefetch", read_weights_prefetch}, {"transfer", read_weights_transfer}};

    return config_read_map(reader, node, keys, N_ELEMENTS(keys), &((ConfigModel *)target)->weights);
}

static int read_model_parameters(ConfigReader *reader, const YamlNode *node, void *target)
{
    return config_read_sampling(reader, node, &((ConfigModel *)target)->sampling, NULL);
}

static int read_model_template(ConfigReader *reader, const YamlNode *node, void *target)
{
    ConfigModel *model = target;
    _cleanup_(close_filep) FILE *file = NULL;
    const char *path = NULL;
    char *source = NULL;
    size_t size = 0;
    int r = config_read_text(reader, node, &path);

    if (r)
        return r;
    free(model->chat_template);
    model->chat_template = NULL;
    if (!strcmp(path, "auto"))
        return 0;
    file = fopen(path, "re");
    if (!file)
        return config_read_fail(reader, node, "template file '%.200s' cannot be opened: %s", path, strerror(errno));
    if (getdelim(&source, &size, 0, file) < 0) {
        free(source);
        return config_read_fail(reader, node, "template file '%.200s' is empty or cannot be read", path);
    }
    model->chat_template = source;
    return config_read_string(reader, node, &model->template_file);
}

void config_model_clear(ConfigModel *model)
{
    for (size_t i = 0; i < model->n_aliases; i++)
        free(model->aliases[i]);
    for (size_t i = 0; i < model->sampling.n_stop; i++)
        free((void *)(uintptr_t)model->sampling.stop[i]);
    free(model->sampling.stop);
    free(model->aliases);
    free(model->name);
    free(model->file);
    free(model->template_file);
    free(model->chat_template);
    memset(model, 0, sizeof(*model));
}

static int config_model_get(Config *config, const char *name, ConfigModel **ret)
{
    ConfigModel *grown;

    for (size_t i = 0; i < config->n_models; i++)
        if (!strcmp(config->models[i].name, name)) {
            *ret = &config->models[i];
            return 0;
        }
    grown = reallocarray(config->models, config->n_models + 1, sizeof(*grown));
    if (!grown)
        return error_origin(-ENOMEM);
    config->models = grown;
    grown[config->n_models] =
        (ConfigModel){.parallel = 4, .prefixes = 16, .weights = {.n_slots = 2}, .sampling = CONFIG_SAMPLING_DEFAULT};
    grown[config->n_models].name = strdup(name);
    if (!grown[config->n_models].name)
        return error_origin(-ENOMEM);
    *ret = &grown[config->n_models++];
    return 0;
}

static int read_model(ConfigReader *reader, const YamlNode *name, const YamlNode *node, void *target)
{
    static const ConfigKey keys[] = {
        {"file", read_model_file},         {"aliases", read_model_aliases},       {"context", read_model_context},
        {"parallel", read_model_parallel}, {"keep-alive", read_model_keep_alive}, {"preload", read_model_preload},
        {"compute", read_model_compute},   {"cache", read_model_cache},           {"parameters", read_model_parameters},
        {"template", read_model_template}, {"layers", read_model_layers},         {"weights", read_model_weights},
        {"prefixes", read_model_prefixes},
    };
    ConfigModel *model;
    int r = config_model_get(target, name->text, &model);

    if (r)
        return error_trace(r);
    r = config_read_map(reader, node, keys, N_ELEMENTS(keys), model);
    if (!model->file)
        r = config_read_join(r, config_read_fail(reader, name, "model '%s' has no 'file'", name->text));
    return r;
}

static int read_models(ConfigReader *reader, const YamlNode *node, void *target)
{
    return config_read_named(reader, node, read_model, target);
}

int config_add_store_model(Config *config, const char *name, const char *path)
{
    ConfigModel *model;
    int r;

    if (!config_name_is_valid(name) || config_find_model(config, name))
        return 0;
    r = config_model_get(config, name, &model);
    if (r)
        return error_trace(r);
    model->file = strdup(path);
    return model->file ? 0 : error_origin(-ENOMEM);
}

/* ---- the rest --------------------------------------------------------------------------------------------------------------- */

static int read_version(ConfigReader *reader, const YamlNode *node, void *target)
{
    uint64_t version;

    (void)target;
    return read_u64(reader, node, 1, 1, &version);
}

static int read_max_queue(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_u32(reader, node, 1, 10000, &((Config *)target)->max_queue);
}

static int read_idle_exit(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_duration(reader, node, &((Config *)target)->idle_exit_usec);
}

static int read_spill(ConfigReader *reader, const YamlNode *node, void *target)
{
    int r = config_read_string(reader, node, &((Config *)target)->spill_dir);

    if (!r && ((Config *)target)->spill_dir[0] != '/')
        r = config_read_fail(reader, node, "'%s' is not an absolute path", ((Config *)target)->spill_dir);
    return r;
}

static int read_spill_after(ConfigReader *reader, const YamlNode *node, void *target)
{
    return read_duration(reader, node, &((Config *)target)->spill_after_usec);
}

static int read_host_memory(ConfigReader *reader, const YamlNode *node, void *target)
{
    uint64_t *bytes = &((Config *)target)->host_memory_bytes;
    int r;

    *bytes = 0;
    if (node->kind == YAML_KIND_SCALAR && strcmp(node->text, "auto") == 0)
        return 0;
    r = read_bytes(reader, node, bytes);
    if (!r && *bytes == 0)
        r = config_read_fail(reader, node, "0 bytes hold no cache: write auto, or leave it out");
    return r;
}

static int read_scheduler(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const ConfigKey keys[] = {
        {"max-queue", read_max_queue}, {"host-memory", read_host_memory}, {"idle-exit", read_idle_exit}, {"spill", read_spill}, {"spill-after", read_spill_after}};

    return config_read_map(reader, node, keys, N_ELEMENTS(keys), target);
}

static int read_log_level(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const char *const words[] = {"error", "warning", "notice", "info", "debug"};
    size_t index = 0;
    int r = read_word(reader, node, words, N_ELEMENTS(words), &index);

    if (!r)
        ((Config *)target)->log_level = LOG_LEVEL_ERROR + (int)index;
    return r;
}

static int read_log(ConfigReader *reader, const YamlNode *node, void *target)
{
    static const ConfigKey keys[] = {{"level", read_log_level}};

    return config_read_map(reader, node, keys, N_ELEMENTS(keys), target);
}

int config_read_main(ConfigReader *reader, const YamlNode *root)
{
    static const ConfigKey keys[] = {
        {"version", read_version}, {"devices", read_devices}, {"store", read_store}, {"defaults", read_defaults},
        {"models", read_models},   {"scheduler", read_scheduler}, {"log", read_log},
    };

    return config_read_map(reader, root, keys, N_ELEMENTS(keys), reader->config);
}
