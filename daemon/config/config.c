/* SPDX-License-Identifier: Apache-2.0 */
/* Which files are read, in which order, and what they amount to. */

#include "daemon/config/config-read.h"
#include "quant/base/log.h"

#include <dirent.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#define CONFIG_DEFAULT_KEEP_ALIVE_USEC (10ull * 60 * 1000000)
#define CONFIG_DEFAULT_MAX_QUEUE       64

Config *config_free(Config *config)
{
    if (!config)
        return NULL;
    for (size_t i = 0; i < config->n_devices; i++) {
        free((void *)(uintptr_t)config->devices[i].vendor);
        free((void *)(uintptr_t)config->devices[i].name);
    }
    for (size_t i = 0; i < config->n_store_paths; i++)
        free(config->store_paths[i]);
    for (size_t i = 0; i < config->n_models; i++)
        config_model_clear(&config->models[i]);
    for (size_t i = 0; i < config->n_services; i++)
        config_service_clear(&config->services[i]);
    for (size_t i = 0; i < config->n_files; i++)
        free(config->files[i]);
    free(config->files);
    free(config->devices);
    free(config->store_paths);
    free(config->spill_dir);
    free(config->models);
    free(config->services);
    free(config);
    return NULL;
}

static int config_filter_yaml(const struct dirent *entry)
{
    const char *dot = strrchr(entry->d_name, '.');

    return entry->d_name[0] != '.' && dot && !strcmp(dot, ".yaml");
}

static int config_filter_gguf(const struct dirent *entry)
{
    const char *dot = strrchr(entry->d_name, '.');

    return entry->d_name[0] != '.' && dot && !strcmp(dot, ".gguf");
}

typedef int (*ConfigFileFunction)(ConfigReader *reader, const char *path, const char *stem);

/* Calls @function for each matching file of a folder, by name; a folder that is not there is empty. */
static int config_for_each_file(ConfigReader *reader, const char *folder, int (*filter)(const struct dirent *),
                                ConfigFileFunction function)
{
    struct dirent **entries;
    int n = scandir(folder, &entries, filter, alphasort), result = 0;

    if (n < 0)
        return errno == ENOMEM ? error_origin(-ENOMEM) : 0;
    for (int i = 0; i < n; i++) {
        _cleanup_(freep) char *path = NULL, *stem = strdup(entries[i]->d_name);

        if (!stem || asprintf(&path, "%s/%s", folder, entries[i]->d_name) < 0) {
            path = NULL;
            result = error_origin(-ENOMEM);
        } else if (!result || result == -EINVAL) {
            *strrchr(stem, '.') = 0;
            result = config_read_join(result, function(reader, path, stem));
        }
        free(entries[i]);
    }
    free(entries);
    return result;
}

static int config_load_main_file(ConfigReader *reader, const char *path, const char *stem)
{
    _cleanup_(yaml_node_freep) YamlNode *root = NULL;
    int r;

    (void)stem;
    reader->file = path;
    r = yaml_node_load(path, &root, reader->messages);
    return r ? r : config_read_main(reader, root);
}

static int config_load_service_file(ConfigReader *reader, const char *path, const char *stem)
{
    _cleanup_(yaml_node_freep) YamlNode *root = NULL;
    int r;

    if (!config_name_is_valid(stem))
        return config_message_add(reader->messages, path, 1, 1, CONFIG_ERROR, "'%s' cannot be a service's name", stem);
    reader->file = path;
    r = yaml_node_load(path, &root, reader->messages);
    return r ? r : config_read_service_file(reader, root, stem);
}

static int config_load_store_file(ConfigReader *reader, const char *path, const char *stem)
{
    for (size_t i = 0; i < reader->config->n_models; i++)
        if (reader->config->models[i].file && !strcmp(reader->config->models[i].file, path))
            return 0;
    return config_add_store_model(reader->config, stem, path);
}

/* The main file, its drop-ins and services: beside @path, a file. */
static int config_load_tree(ConfigReader *reader, const char *path)
{
    _cleanup_(freep) char *drop_ins = NULL, *services = NULL;
    const char *slash = strrchr(path, '/');
    int folder = slash ? (int)(slash - path) + 1 : 0, r = 0;

    if (asprintf(&drop_ins, "%.*sleat.d", folder, path) < 0 || asprintf(&services, "%.*sservices.d", folder, path) < 0)
        return error_origin(-ENOMEM);
    if (access(path, F_OK) == 0 || reader->file)
        r = config_load_main_file(reader, path, NULL);
    if (!r || r == -EINVAL)
        r = config_read_join(r, config_for_each_file(reader, drop_ins, config_filter_yaml, config_load_main_file));
    if (!r || r == -EINVAL)
        r = config_read_join(r, config_for_each_file(reader, services, config_filter_yaml, config_load_service_file));
    return r;
}

/* A later folder's service of the same name replaces an earlier one's. */
static void config_drop_shadowed_services(Config *config)
{
    for (size_t i = 0; i < config->n_services; i++)
        for (size_t j = i + 1; j < config->n_services; j++)
            if (!strcmp(config->services[i].name, config->services[j].name)) {
                config_service_clear(&config->services[i]);
                memmove(&config->services[i], &config->services[i + 1],
                        (config->n_services - i - 1) * sizeof(config->services[0]));
                config->n_services--;
                i--;
                break;
            }
}

/* Relative files are looked for in the store paths; the first that is there wins, else the first path is named. */
static int config_resolve_file(const Config *config, ConfigModel *model)
{
    char *first = NULL;

    if (!model->file || model->file[0] == '/')
        return 0;
    for (size_t i = 0; i < config->n_store_paths; i++) {
        char *path;

        if (asprintf(&path, "%s/%s", config->store_paths[i], model->file) < 0) {
            free(first);
            return error_origin(-ENOMEM);
        }
        if (access(path, F_OK) == 0) {
            free(first);
            first = path;
            break;
        }
        if (first)
            free(path);
        else
            first = path;
    }
    if (first) {
        free(model->file);
        model->file = first;
    }
    return 0;
}

static int config_check_services(ConfigReader *reader)
{
    const Config *config = reader->config;
    int r = 0;

    for (size_t i = 0; i < config->n_services; i++) {
        const ConfigService *service = &config->services[i];

        if (service->model && !config_find_model(config, service->model))
            r = config_read_join(r, config_message_add(reader->messages, service->source_file, service->source_line, 1,
                                                       CONFIG_WARNING, "model '%s' is not configured and not in the store",
                                                       service->model));
    }
    return r;
}

/* The policy of these blocks, or a message where the key stands that is to blame. */
static int config_check_policy(ConfigReader *reader, const ConfigCache *const blocks[static 3], bool exact, const char *what, const char *name)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    ConfigPlace place;
    KvPolicy policy;
    int r = config_policy_at(blocks, 3, exact, &policy, &place, &detail);

    if (r != -EINVAL)
        return r;
    return config_message_add(reader->messages, place.file ? reader->config->files[place.file - 1] : reader->file, MAX(place.line, 1u),
                              MAX(place.column, 1u), CONFIG_ERROR, "cache%s%s%s%s: %s", what, *name ? " '" : "", name, *name ? "'" : "",
                              detail.text);
}

/* Policies are computed once here so that a wrong combination is an error with its place: the defaults', then those of the models and services
 * that these are not to blame for. */
static int config_check_policies(ConfigReader *reader)
{
    const Config *config = reader->config;
    const ConfigCache *blocks[3] = {&config->default_cache};
    int result = config_check_policy(reader, blocks, config->default_exact, " of the defaults", "");

    if (result)
        return result;
    for (size_t i = 0; i < config->n_models; i++) {
        const ConfigModel *model = &config->models[i];
        int r;

        blocks[1] = &model->cache;
        blocks[2] = NULL;
        r = config_check_policy(reader, blocks, model->exact, " of model", model->name);
        for (size_t k = 0; k < config->n_services && !r; k++) {
            const ConfigService *service = &config->services[k];

            blocks[2] = &service->cache;
            if (service->model && config_find_model(config, service->model) == model)
                r = config_read_join(r, config_check_policy(reader, blocks, model->exact, " of service", service->name));
        }
        result = config_read_join(result, r);
    }
    return result;
}

static int config_finish(ConfigReader *reader)
{
    Config *config = reader->config;
    int r = 0;

    config_drop_shadowed_services(config);
    for (size_t i = 0; i < config->n_models && !r; i++)
        r = config_resolve_file(config, &config->models[i]);
    for (size_t i = 0; i < config->n_store_paths && !r; i++)
        r = config_for_each_file(reader, config->store_paths[i], config_filter_gguf, config_load_store_file);
    for (size_t i = 0; i < config->n_models && !r; i++) {
        ConfigModel *model = &config->models[i];

        if (!model->has_exact)
            model->exact = config->default_exact;
        if (!model->context)
            model->context = config->default_context;
        if (!model->keep_alive_usec)
            model->keep_alive_usec = config->default_keep_alive_usec;
        if (!model->sampling.seed)
            model->sampling.seed = config->default_seed;
    }
    if (!r)
        r = config_check_policies(reader);
    if (!r)
        r = config_check_services(reader);
    return r;
}

int config_load(const char *path, Config **ret, ConfigMessages *messages)
{
    static const char *const system_paths[] = {LEAT_PREFIX "/lib/leat/leat.yaml", LEAT_SYSCONFDIR "/leat/leat.yaml"};
    _cleanup_(config_freep) Config *config = calloc(1, sizeof(*config));
    ConfigReader reader = {.config = config, .messages = messages, .file = path};
    int r = 0;

    if (!config)
        return error_origin(-ENOMEM);
    config->default_keep_alive_usec = CONFIG_DEFAULT_KEEP_ALIVE_USEC;
    config->max_queue = CONFIG_DEFAULT_MAX_QUEUE;
    config->log_level = LOG_LEVEL_INFO;
    config->spill_after_usec = 60 * UINT64_C(1000000);
    config->idle_exit_usec = UINT64_MAX;
    if (path)
        r = config_load_tree(&reader, path);
    else
        for (size_t i = 0; i < N_ELEMENTS(system_paths) && (!r || r == -EINVAL); i++) {
            reader.file = NULL;
            r = config_read_join(r, config_load_tree(&reader, system_paths[i]));
        }
    if (!r && !config->n_store_paths) {
        config->store_paths = calloc(1, sizeof(char *));
        if (!config->store_paths || !(config->store_paths[0] = strdup(LEAT_LOCALSTATEDIR "/lib/leat/models")))
            return error_origin(-ENOMEM);
        config->n_store_paths = 1;
    }
    reader.file = path ? path : system_paths[1];
    if (!r)
        r = config_finish(&reader);
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(config);
    return 0;
}

const ConfigModel *config_find_model(const Config *config, const char *name)
{
    for (size_t i = 0; i < config->n_models; i++) {
        const ConfigModel *model = &config->models[i];

        if (!strcmp(model->name, name))
            return model;
    }
    for (size_t i = 0; i < config->n_models; i++)
        for (size_t j = 0; j < config->models[i].n_aliases; j++)
            if (!strcmp(config->models[i].aliases[j], name))
                return &config->models[i];
    return NULL;
}

const ConfigService *config_find_service(const Config *config, const char *name)
{
    for (size_t i = 0; i < config->n_services; i++)
        if (!strcmp(config->services[i].name, name))
            return &config->services[i];
    return NULL;
}

int config_engine_models(const Config *config, EngineModel **ret, size_t *ret_n, ErrorDetail *reterr)
{
    _cleanup_(freep) EngineModel *models = calloc(MAX(config->n_models, (size_t)1), sizeof(*models));

    if (!models)
        return error_origin(-ENOMEM);
    for (size_t i = 0; i < config->n_models; i++) {
        const ConfigModel *from = &config->models[i];
        const ConfigCache *blocks[] = {&config->default_cache, &from->cache};
        int r;

        models[i] = (EngineModel){
            .name = from->name,
            .path = from->file,
            .exact = from->exact,
            .context = from->context,
            .weights = from->weights,
            .parallel = from->parallel,
            .n_prefixes = from->prefixes,
            .spill_dir = config->spill_dir,
            .spill_after_usec = config->spill_after_usec,
            .keep_alive_usec = from->keep_alive_usec,
            .preload = from->preload,
            .sampling = from->sampling,
            .chat_template = from->chat_template,
        };
        r = config_policy(blocks, N_ELEMENTS(blocks), from->exact, &models[i].policy, reterr);
        if (r)
            return error_trace(r);
    }
    *ret = TAKE_PTR(models);
    *ret_n = config->n_models;
    return 0;
}
