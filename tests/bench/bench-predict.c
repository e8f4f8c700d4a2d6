/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-predict MODEL [KEY=VALUE …] CASE …: what the planner says of each case before it is loaded, then the same measured, as a JSON array
 * on standard output.
 *
 *   steps=N         decode steps that are measured at each depth (33: one of them packs a page)     prompt=N  of the prefill (512)
 *   images=FOLDER   where pasts are, one a depth and form; one that is not there is made: run with 5 and 4 bits, then coded anew, since
 *                   time does not depend on values     prepare=1  make them, and nothing else
 *   state=FOLDER, programs=FOLDER  as for bench-model
 *
 * CASE: NAME:KEY=VALUE,…, keys of the YAML cache block and
 *   device=PERCENT  of the weights' bytes, for everything on the device: what does not fit streams     weights=copy | zero-copy  how
 */

#include "cache/kv-file.h"
#include "cache/kv-migrate.h"
#include "daemon/config/config.h"
#include "daemon/model/model-private.h"
#include "daemon/model/speed.h"
#include "tests/lib/bench-keys.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHUNK  512u
#define WARMUP 4u

static const uint32_t DEPTHS[] = {0, 2048, 8064};

typedef struct Setup {
    const char *path, *images, *state, *programs;
    uint32_t n_steps, n_prompt, prepare;
    Gpu *gpu;
    uint64_t budget_bytes; /* of the device, when no case limits it */
} Setup;

typedef struct Case {
    const char *name;
    ConfigCache keys;
    uint32_t device_percent;
    ModelOptions options;
    KvPolicy policy;
} Case;

/* One case at work. */
typedef struct Run {
    Model *model;
    KvStore *store;
    KvCache *cache;
    float *logits;
    int32_t token;
} Run;

static double now(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- arguments ------------------------------------------------------------------------------------------------------------------ */

static void parse_setup(Setup *setup, char *argument)
{
    const BenchKey keys[] = {{"images", NULL, &setup->images},   {"state", NULL, &setup->state},       {"programs", NULL, &setup->programs},
                             {"steps", &setup->n_steps, NULL}, {"prompt", &setup->n_prompt, NULL}, {"prepare", &setup->prepare, NULL}};

    bench_set(keys, N_ELEMENTS(keys), argument);
}

static void parse_case(Case *c, char *argument)
{
    const ConfigCache *blocks[] = {&c->keys};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    char *rest = strchr(argument, ':');

    *c = (Case){.name = argument, .options = {.max_rows = CHUNK, .max_sequences = 1}};
    bench_must(rest ? 0 : -EINVAL, argument, NULL);
    *rest++ = '\0';
    for (char *key; (key = strsep(&rest, ","));) {
        const char *value = bench_cut(key);

        if (strcmp(key, "device") == 0)
            c->device_percent = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(key, "weights") == 0)
            c->options.weights.transfer = strcmp(value, "copy") == 0 ? KV_TRANSFER_COPY : KV_TRANSFER_ZERO_COPY;
        else
            bench_must(config_cache_set(&c->keys, key, value, &detail), key, &detail);
    }
    bench_must(config_policy(blocks, 1, false, &c->policy, &detail), c->name, &detail);
}

/* ---- life ----------------------------------------------------------------------------------------------------------------------- */

static void run_begin(const Setup *setup, Run *run, ModelFile *file, const ModelOptions *options, const KvPolicy *policy)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    *run = (Run){.token = 1};
    bench_must(model_new(setup->gpu, file, options, &run->model, &detail), "model", &detail);
    bench_must(model_store_new(run->model, policy, &run->store, &detail), "store", &detail);
    bench_must(kv_cache_new(run->store, &run->cache, &detail), "cache", &detail);
    run->logits = calloc(model_file_params(file)->n_vocab, sizeof(*run->logits));
    bench_must(run->logits ? 0 : -ENOMEM, "logits", NULL);
}

static void run_end(Run *run)
{
    (void)kv_cache_free(run->cache);
    (void)kv_store_free(run->store);
    (void)model_free(run->model);
    free(run->logits);
}

static ModelFile *open_file(const Setup *setup)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    ModelFile *file = NULL;

    bench_must(model_file_open(setup->path, setup->state, &file, &detail), setup->path, &detail);
    return file;
}

/* ---- passes --------------------------------------------------------------------------------------------------------------------- */

static double prefill(Run *run, uint32_t n_prompt, bool logits)
{
    uint32_t n_vocab = model_file_params(model_file(run->model))->n_vocab, at_once = model_options(run->model)->max_rows;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    double begun = now();

    for (uint32_t done = 0; done < n_prompt;) {
        int32_t tokens[CHUNK];
        ModelItem item = {.cache = run->cache, .tokens = tokens, .n_tokens = MIN(at_once, n_prompt - done)};

        /* Spread over the vocabulary, so that embedding rows are not all in the cache. */
        for (uint32_t i = 0; i < item.n_tokens; i++)
            tokens[i] = (int32_t)(((done + i) * 2654435761u >> 7) % n_vocab);
        done += item.n_tokens;
        bench_must(model_forward(run->model, run->store, &item, 1, logits && done == n_prompt ? run->logits : NULL, &detail), "prefill", &detail);
    }
    return now() - begun;
}

static double step(Run *run)
{
    uint32_t n_vocab = model_file_params(model_file(run->model))->n_vocab, best = 0;
    ModelItem item = {.cache = run->cache, .tokens = &run->token, .n_tokens = 1};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    double begun = now();

    bench_must(model_forward(run->model, run->store, &item, 1, run->logits, &detail), "decode", &detail);
    for (uint32_t v = 1; v < n_vocab; v++)
        best = run->logits[v] > run->logits[best] ? v : best;
    run->token = (int32_t)best;
    return now() - begun;
}

/* ---- pasts ---------------------------------------------------------------------------------------------------------------------- */

static void image_path(const Setup *setup, const KvStore *store, uint32_t depth, char ret[static 4096])
{
    (void)snprintf(ret, 4096, "%s/%u-%016" PRIx64 ".kv", setup->images, depth, kv_store_layout(store));
}

static void save(const Run *run, KvStore *store, const char *path)
{
    uint8_t digest[KV_IMAGE_DIGEST];
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvCache *cache = NULL;
    KvSave *saved = NULL;
    int fd;

    bench_must(digest_from_hex(model_file_digest(model_file(run->model)), digest), "digest", NULL);
    bench_must(kv_cache_fork(run->cache, &cache, &detail), "fork", &detail);
    bench_must(kv_caches_migrate(&cache, 1, store, true, &detail), "another form", &detail);
    bench_must(kv_save_begin(cache, digest, NULL, 0, &saved, &detail), "save", &detail);
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bench_must(fd < 0 ? -errno : kv_save_write(saved, fd), path, NULL);
    bench_must(close(fd), path, NULL);
    (void)kv_save_end(saved);
    (void)kv_cache_free(cache);
}

/* Of all cases, at one depth after the other. */
static void prepare(const Setup *setup, int n_cases, char **cases)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    ModelOptions options = {.max_rows = CHUNK, .max_sequences = 1};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    uint32_t done = 0;
    Run run;

    run_begin(setup, &run, open_file(setup), &options, &policy);
    for (size_t d = 1; d < N_ELEMENTS(DEPTHS); d++) {
        (void)prefill(&run, DEPTHS[d] - done, false);
        done = DEPTHS[d];
        for (int i = 0; i < n_cases; i++) {
            KvStore *store = NULL;
            char path[4096];
            Case c;
            char text[1024];

            (void)snprintf(text, sizeof(text), "%s", cases[i]);
            parse_case(&c, text);
            policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
            policy.form = c.policy.form;
            bench_must(model_store_new(run.model, &policy, &store, &detail), "store", &detail);
            image_path(setup, store, done, path);
            if (access(path, F_OK) != 0)
                save(&run, store, path);
            (void)kv_store_free(store);
        }
    }
    run_end(&run);
}

static void restore(const Setup *setup, Run *run, uint32_t depth)
{
    KvImageFacts facts = {.layout = kv_store_layout(run->store)};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvImage *image = NULL;
    char path[4096];
    int fd;

    bench_must(digest_from_hex(model_file_digest(model_file(run->model)), facts.model), "digest", NULL);
    image_path(setup, run->store, depth, path);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    bench_must(fd < 0 ? -errno : 0, path, NULL);
    bench_must(kv_image_open(fd, path, &facts, true, &image, &detail), path, &detail);
    (void)kv_cache_free(run->cache);
    run->cache = NULL;
    bench_must(kv_restore(run->store, image, &run->cache, &detail), "restore", &detail);
    (void)kv_image_free(image);
    (void)close(fd);
}

/* ---- a case --------------------------------------------------------------------------------------------------------------------- */

static void print_links(const char *name, const ModelLink *links, uint64_t n_links)
{
    (void)printf(", \"%s\": [", name);
    for (uint64_t i = 0; i < n_links; i++)
        (void)printf("%s[%.0f, %.2f, %.2f]", i ? ", " : "", links[i].tokens, links[i].share, links[i].beside);
    (void)printf("]");
}

static void print_speed(const ModelSpeed *speed)
{
    (void)printf("\"facts\": {\"head_usec\": %.1f, \"layer_usec\": %.2f, \"pasts\": [", 1e6 * speed->head_sec, 1e6 * speed->layer_sec);
    for (uint32_t i = 0; i < speed->n_pasts; i++)
        (void)printf("%s[%.0f, %.2f]", i ? ", " : "", speed->pasts[i].tokens, 1e6 * speed->pasts[i].layer_sec);
    (void)printf("], \"chunk_rows\": %.0f, \"chunk_usec\": %.0f, \"chunk_layer_usec\": %.0f, \"chunk_layer_past_nsec\": %.1f, "
                 "\"upload_rate\": %.3g, \"tile_rate\": %.3g",
                 speed->chunk_rows, 1e6 * speed->chunk_sec, 1e6 * speed->chunk_layer_sec, 1e9 * speed->chunk_layer_past_sec,
                 speed->upload_rate, speed->tile_rate);
    print_links("links", speed->links, speed->n_links);
    print_links("chunk_links", speed->chunk_links, speed->n_chunk_links);
    (void)printf("}, ");
}

static void measure_decode(const Setup *setup, Run *run, const ModelSpeed *speed, const ModelFit *fit, uint32_t depth)
{
    ModelPrediction predicted;

    if (depth > 0)
        restore(setup, run, depth);
    else
        bench_must(kv_cache_clear(run->cache), "clear", NULL);
    model_predict(speed, fit, depth + WARMUP + setup->n_steps / 2, &predicted);
    (void)printf("{\"depth\": %u, \"predicted_usec\": %.1f, \"usec\": [", depth, 1e6 * predicted.token_sec);
    for (uint32_t i = 0; i < WARMUP; i++)
        (void)step(run);
    for (uint32_t i = 0; i < setup->n_steps; i++)
        (void)printf("%s%.0f", i ? ", " : "", 1e6 * step(run));
    (void)printf("]}");
}

static ModelFit plan(const Setup *setup, const ModelFile *file, const Case *c, ModelSpeed *ret_speed)
{
    uint64_t available = setup->budget_bytes;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    ModelFit fit;

    gpu_set_budget(setup->gpu, available);
    bench_must(model_fit(gpu_info(setup->gpu), file, &c->options, &c->policy, available, &fit, &detail), c->name, &detail);
    if (c->device_percent > 0) {
        available = fit.plan.weight_total_bytes * c->device_percent / 100;
        bench_must(model_fit(gpu_info(setup->gpu), file, &c->options, &c->policy, available, &fit, &detail), c->name, &detail);
    }
    bench_must(model_speed(setup->gpu, file, &fit, true, ret_speed, &detail), "speed", &detail);
    gpu_set_budget(setup->gpu, available);
    return fit;
}

static void measure(const Setup *setup, char *argument)
{
    uint64_t used[GPU_PURPOSE_X_MAX], total;
    double seconds, begun = now(), probed;
    ModelPrediction predicted;
    ModelSpeed speed;
    ModelFile *file = open_file(setup);
    ModelFit fit;
    Case c;
    Run run;

    parse_case(&c, argument);
    fit = plan(setup, file, &c, &speed);
    probed = now() - begun;
    run_begin(setup, &run, file, &fit.options, &fit.policy);
    gpu_memory_used(setup->gpu, used, &total);
    (void)printf("{\"name\": \"%s\", \"probe_sec\": %.1f, \"device_bytes\": %" PRIu64 ", \"planned_device_bytes\": %" PRIu64
                 ", \"rows\": %u, \"streamed_bytes\": %" PRIu64 ", \"in_place_bytes\": %" PRIu64 ", ",
                 c.name, probed, total, fit.plan.device_total_bytes, fit.options.max_rows, fit.plan.weight_streamed_bytes,
                 fit.plan.weight_in_place_bytes);
    print_speed(&speed);
    (void)prefill(&run, setup->n_prompt, true); /* kernels have run once before anything is measured */
    bench_must(kv_cache_clear(run.cache), "clear", NULL);
    seconds = prefill(&run, setup->n_prompt, true);
    model_predict(&speed, &fit, (setup->n_prompt - MIN(setup->n_prompt, fit.options.max_rows)) / 2, &predicted);
    (void)printf("\"prefill_rate\": %.2f, \"predicted_prefill_rate\": %.2f, \"decode\": [", setup->n_prompt / seconds, predicted.prefill_rate);
    for (size_t d = 0; d < N_ELEMENTS(DEPTHS); d++) {
        (void)printf(d ? ", " : "");
        measure_decode(setup, &run, &speed, &fit, DEPTHS[d]);
    }
    (void)printf("]}");
    (void)fflush(stdout);
    run_end(&run);
}

int main(int argc, char **argv)
{
    Setup setup = {.images = ".", .n_steps = 33, .n_prompt = CHUNK};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int first = 2;

    bench_must(argc < 3 ? -EINVAL : 0, "usage", NULL);
    setup.path = argv[1];
    for (; first < argc && !strchr(argv[first], ':'); first++)
        parse_setup(&setup, argv[first]);
    bench_must(setup.n_steps > 0 && setup.n_prompt > 0 ? 0 : -EINVAL, "steps, prompt", NULL);
    bench_must(gpu_open(&(GpuOptions){.cache_dir = setup.programs}, &setup.gpu, &detail), "device", &detail);
    setup.budget_bytes = gpu_info(setup.gpu)->budget_bytes;
    if (setup.prepare) {
        prepare(&setup, argc - first, argv + first);
    } else {
        (void)printf("[");
        for (int i = first; i < argc; i++) {
            (void)printf("%s", i > first ? ",\n" : "");
            measure(&setup, argv[i]);
        }
        (void)printf("]\n");
    }
    gpu_free(setup.gpu);
    return EXIT_SUCCESS;
}
