/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-stream MODEL [KEY=VALUE …] POLICY …: decode steps under one policy of the cache after the other, over a past that is read from a file,
 * as a JSON array on standard output.  run-bench starts it on the simulated small GPU (tests/sim) and judges the steps by their timeline.
 *
 *   images=FOLDER  where pasts are, one a depth and form; one that is not there is made: run with 5 and 4 bits, then coded anew, since
 *                  time does not depend on values
 *   depth=N        tokens before the measured steps (2048)     steps=N   measured, each with its own wall time (32)
 *   warmup=N       of the depth, as steps (4): after a multiple of 32 tokens they pack a page, and so does one of 32 measured ones
 *   trace=FOLDER   a Chrome trace of the measured steps of each policy     state=FOLDER, programs=FOLDER  as for bench-model
 *
 * POLICY: NAME:KEY=VALUE,…, keys of the YAML cache block and
 *   sequences=N    so many pasts in one pass, none of whose pages are shared (1)    forks=N   each so many times, sharing pages (1)
 *   tile=N         blocks of pages a tile holds at most (0: chosen)                 resident=PERCENT  of the pages, on the device
 *   weights=N      percent of them that the device has room for, what the others stream through included (0: all stay there)
 */

#include "cache/kv-file.h"
#include "cache/kv-migrate.h"
#include "cache/kv-store-internal.h"
#include "daemon/config/config.h"
#include "daemon/model/model-private.h"
#include "opencl/gpu-internal.h"
#include "tests/lib/bench-keys.h"
#include "tests/sim/clsim.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_ITEMS 16
#define MAX_STEPS 512
#define CHUNK     512u

typedef struct Setup {
    const char *images, *trace, *state, *programs;
    uint32_t n_past /* in the file */, n_steps, n_warmup;
    Gpu *gpu;
    ModelFile *file;
    Model *model;
    KvStore *master_store; /* when a past had to be made */
    KvCache *master;
    float *logits;
} Setup;

/* One policy at work. */
typedef struct Run {
    const char *name;
    ConfigCache keys;
    uint32_t n_sequences, n_forks, tile_blocks, resident_percent, weights_percent;
    KvPolicy policy;
    KvStore *store;
    KvCache *caches[MAX_ITEMS];
    int32_t tokens[MAX_ITEMS];
    double step_usec[MAX_STEPS];
} Run;

static double now_usec(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

/* ---- arguments ------------------------------------------------------------------------------------------------------------------ */

static void parse_setup(Setup *setup, char *argument)
{
    const BenchKey keys[] = {{"images", NULL, &setup->images},     {"trace", NULL, &setup->trace},     {"state", NULL, &setup->state},
                             {"programs", NULL, &setup->programs}, {"depth", &setup->n_past, NULL},    {"steps", &setup->n_steps, NULL},
                             {"warmup", &setup->n_warmup, NULL}};

    bench_set(keys, N_ELEMENTS(keys), argument);
}

static void parse_run(Run *run, char *argument)
{
    const struct {
        const char *key;
        uint32_t *number;
    } own[] = {{"sequences", &run->n_sequences}, {"forks", &run->n_forks}, {"tile", &run->tile_blocks}, {"resident", &run->resident_percent},
               {"weights", &run->weights_percent}};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    char *rest = strchr(argument, ':');

    *run = (Run){.name = argument, .n_sequences = 1, .n_forks = 1};
    bench_must(rest ? 0 : -EINVAL, argument, NULL);
    *rest++ = '\0';
    for (char *key; (key = strsep(&rest, ","));) {
        const char *value = bench_cut(key);
        bool known = false;

        for (size_t i = 0; i < N_ELEMENTS(own); i++)
            if (strcmp(key, own[i].key) == 0) {
                *own[i].number = (uint32_t)strtoul(value, NULL, 10);
                known = true;
            }
        if (!known)
            bench_must(config_cache_set(&run->keys, key, value, &detail), key, &detail);
    }
    bench_must(run->n_sequences * run->n_forks - 1u < MAX_ITEMS ? 0 : -EINVAL, "sequences * forks", NULL);
}

/* ---- pasts ------------------------------------------------------------------------------------------------------------------------ */

static int32_t token_of(const Setup *setup, uint32_t position)
{
    return (int32_t)((position * 2654435761u >> 7) % model_file_params(setup->file)->n_vocab);
}

/* The past in the form that runs the quickest. */
static KvCache *make_master(Setup *setup)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int32_t tokens[CHUNK];

    if (setup->master)
        return setup->master;
    bench_must(model_store_new(setup->model, &policy, &setup->master_store, &detail), "store", &detail);
    bench_must(kv_cache_new(setup->master_store, &setup->master, &detail), "cache", &detail);
    for (uint32_t done = 0, n; done < setup->n_past; done += n) {
        ModelItem item = {.cache = setup->master, .tokens = tokens};

        n = item.n_tokens = MIN(CHUNK, setup->n_past - done);
        for (uint32_t i = 0; i < n; i++)
            tokens[i] = token_of(setup, done + i);
        bench_must(model_forward(setup->model, setup->master_store, &item, 1, NULL, &detail), "prefill", &detail);
    }
    return setup->master;
}

static void make_image(Setup *setup, const KvForm *form, const uint8_t digest[static KV_IMAGE_DIGEST], const char *path)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);
    KvCache *cache = NULL;
    KvStore *store = NULL;
    KvSave *save = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int fd;

    policy.form = *form;
    bench_must(model_store_new(setup->model, &policy, &store, &detail), "store", &detail);
    bench_must(kv_cache_fork(make_master(setup), &cache, &detail), "fork", &detail);
    bench_must(kv_caches_migrate(&cache, 1, store, true, &detail), "another form", &detail);
    bench_must(kv_save_begin(cache, digest, NULL, 0, &save, &detail), "save", &detail);
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bench_must(fd < 0 ? -errno : kv_save_write(save, fd), path, NULL);
    bench_must(close(fd), path, NULL);
    (void)kv_save_end(save);
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);
}

static void restore(Setup *setup, Run *run)
{
    const KvForm *form = &kv_store_policy(run->store)->form;
    KvImageFacts facts = {.layout = kv_store_layout(run->store)};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvImage *image = NULL;
    char path[4096];
    int fd;

    bench_must(digest_from_hex(model_file_digest(setup->file), facts.model), "digest", NULL);
    (void)snprintf(path, sizeof(path), "%s/%u-%016" PRIx64 ".kv", setup->images, setup->n_past, facts.layout);
    if (access(path, F_OK) != 0)
        make_image(setup, form, facts.model, path);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    bench_must(fd < 0 ? -errno : 0, path, NULL);
    bench_must(kv_image_open(fd, path, &facts, true, &image, &detail), path, &detail);
    for (uint32_t i = 0; i < run->n_sequences; i++) {
        KvCache **family = &run->caches[i * run->n_forks];

        bench_must(kv_restore(run->store, image, &family[0], &detail), "restore", &detail);
        for (uint32_t k = 1; k < run->n_forks; k++)
            bench_must(kv_cache_fork(family[0], &family[k], &detail), "fork", &detail);
    }
    (void)kv_image_free(image);
    (void)close(fd);
}

/* ---- a policy ------------------------------------------------------------------------------------------------------------------ */

/* A budget of the device that leaves room for so many percent of the pages beside what must be there. */
static uint64_t resident_budget(const Setup *setup, const Run *run)
{
    const Model *model = setup->model;
    ModelPlan plan;
    uint64_t pages;
    ErrorDetail detail = ERROR_DETAIL_NULL;

    bench_must(model_plan(gpu_info(setup->gpu), setup->file, model_options(model), &run->policy, &plan, &detail), "plan", &detail);
    pages = plan.kv.host_bytes_per_token * run->policy.max_cache_tokens;
    return plan.kv.staging_bytes + plan.kv.tail_bytes + pages / 100 * run->resident_percent;
}

static void run_open(Setup *setup, Run *run)
{
    const ConfigCache *blocks[] = {&run->keys};
    ErrorDetail detail = ERROR_DETAIL_NULL;

    bench_must(config_policy(blocks, 1, false, &run->policy, &detail), run->name, &detail);
    run->policy.max_cache_tokens = setup->n_past + setup->n_warmup + setup->n_steps + 64;
    run->policy.tile_blocks = run->tile_blocks;
    if (run->resident_percent > 0)
        run->policy.device_budget_bytes = resident_budget(setup, run);
    bench_must(model_place_weights(setup->model, weights_total_bytes(&setup->file->weights) * run->weights_percent / 100, &detail), run->name, &detail);
    bench_must(model_store_new(setup->model, &run->policy, &run->store, &detail), run->name, &detail);
    restore(setup, run);
}

/* One token more of each sequence. */
static void step(Setup *setup, Run *run)
{
    uint32_t n = run->n_sequences * run->n_forks, n_vocab = model_file_params(setup->file)->n_vocab;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    ModelItem items[MAX_ITEMS];

    for (uint32_t i = 0; i < n; i++)
        items[i] = (ModelItem){.cache = run->caches[i], .tokens = &run->tokens[i], .n_tokens = 1};
    bench_must(model_forward(setup->model, run->store, items, n, setup->logits, &detail), run->name, &detail);
    for (uint32_t i = 0; i < n; i++) {
        const float *row = setup->logits + (size_t)i * n_vocab;
        uint32_t best = 0;

        for (uint32_t v = 1; v < n_vocab; v++)
            best = row[v] > row[best] ? v : best;
        run->tokens[i] = (int32_t)best;
    }
}

/* Of the step that was just made: bytes of each tile of a layer that came through the ring, 0 for one that was read in place. */
static void print_tiles(const Run *run, bool first)
{
    const char *separator = first ? "[" : ", [";

    for (uint32_t s = 0; s < run->store->sizes.n_sections; s++) {
        const KvSection *section = &run->store->sections[s];
        const KvSchedule *schedule = &section->schedule;

        for (uint32_t t = 0; t < schedule->n_tiles; t++) {
            const KvTile *tile = &schedule->tiles[t];
            uint64_t pages = 0;

            for (uint32_t i = 0; tile->staged && i < tile->n_loads; i++) {
                const KvLoad *load = &schedule->loads[tile->first_load + i];

                pages += load->n_pages - MIN(load->block->first_page, load->n_pages);
            }
            (void)printf("%s%" PRIu64, separator, pages * section->sizes->layout.page_bytes);
            separator = ", ";
        }
    }
    (void)printf("]");
}

/* Bytes of each part of the weights in the order of the launches that read them, 0 for one that stays. */
static void print_parts(const Setup *setup)
{
    const Placement *placement = &setup->model->weights.placement;

    (void)printf(", \"weight_slots\": %u, \"parts\": [", placement->n_slots);
    for (uint32_t i = 0; i < placement->n_parts; i++)
        (void)printf("%s%" PRIu64, i ? ", " : "", placement->parts[i].streamed ? placement->parts[i].bytes : 0);
    (void)printf("]");
}

static cl_ulong ask(const Setup *setup, cl_device_info what)
{
    cl_ulong value = 0;

    return clGetDeviceInfo(setup->gpu->device, what, sizeof(value), &value, NULL) == CL_SUCCESS ? value : 0;
}

static void report(const Setup *setup, const Run *run, double read_usec)
{
    const KvPolicy *policy = kv_store_policy(run->store);
    uint64_t used[GPU_PURPOSE_X_MAX], total;

    gpu_memory_used(setup->gpu, used, &total);
    (void)printf(", \"form\": \"%s\", \"k_bits\": %u, \"v_bits\": %u, \"slots\": %u, \"sequences\": %u, \"staging_bytes\": %" PRIu64
                 ", \"page_bytes\": %" PRIu64 ", \"read_usec\": %.0f",
                 kv_form_kind_to_string(policy->form.kind), policy->form.k_bits, policy->form.v_bits, run->store->ring.n_slots,
                 run->n_sequences * run->n_forks, used[GPU_PURPOSE_STAGING], used[GPU_PURPOSE_PAGES], read_usec);
    (void)printf(", \"read_rate\": %lu, \"link_rate\": %lu, \"latency_nsec\": %lu, \"step_usec\": [", ask(setup, CLSIM_DEVICE_READ_RATE),
                 ask(setup, CLSIM_DEVICE_LINK_RATE), ask(setup, CLSIM_DEVICE_LATENCY));
    for (uint32_t i = 0; i < setup->n_steps; i++)
        (void)printf("%s%.1f", i ? ", " : "", run->step_usec[i]);
    (void)printf("]}");
}

static void run_steps(Setup *setup, Run *run)
{
    char path[4096];
    double begin = now_usec();
    int fd = -1;

    run_open(setup, run);
    for (uint32_t i = 0; i < setup->n_warmup; i++)
        step(setup, run);
    begin = now_usec() - begin;
    (void)snprintf(path, sizeof(path), "%s/%s.json", setup->trace ? setup->trace : "", run->name);
    if (setup->trace) {
        fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        bench_must(fd < 0 ? -errno : gpu_trace_start(setup->gpu), path, NULL);
    }
    (void)printf("{\"name\": \"%s\", \"tiles\": [", run->name);
    for (uint32_t i = 0; i < setup->n_steps; i++) {
        double start = now_usec();

        step(setup, run);
        run->step_usec[i] = now_usec() - start;
        print_tiles(run, i == 0);
    }
    (void)printf("]");
    print_parts(setup);
    if (setup->trace) {
        bench_must(gpu_trace_stop(setup->gpu, fd), path, NULL);
        (void)close(fd);
    }
    report(setup, run, begin);
    for (uint32_t i = 0; i < MAX_ITEMS; i++)
        (void)kv_cache_free(run->caches[i]);
    (void)kv_store_free(run->store);
}

int main(int argc, char **argv)
{
    Setup setup = {.images = ".", .n_past = 2048, .n_steps = 32, .n_warmup = 4};
    ModelOptions options = {.max_rows = CHUNK, .max_sequences = MAX_ITEMS};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int i = 2;

    bench_must(argc < 3 ? -EINVAL : 0, "usage", NULL);
    for (; i < argc && !strchr(argv[i], ':'); i++)
        parse_setup(&setup, argv[i]);
    bench_must(setup.n_steps - 1u < MAX_STEPS && setup.n_warmup < setup.n_past ? 0 : -EINVAL, "steps, warmup, depth", NULL);
    setup.n_past -= setup.n_warmup;
    bench_must(gpu_open(&(GpuOptions){.cache_dir = setup.programs}, &setup.gpu, &detail), "device", &detail);
    bench_must(model_file_open(argv[1], setup.state, &setup.file, &detail), argv[1], &detail);
    bench_must(model_new(setup.gpu, setup.file, &options, &setup.model, &detail), argv[1], &detail);
    setup.logits = calloc((size_t)MAX_ITEMS * model_file_params(setup.file)->n_vocab, sizeof(*setup.logits));
    bench_must(setup.logits ? 0 : -ENOMEM, "logits", NULL);
    (void)printf("[");
    for (int first = i; i < argc; i++) {
        Run run;

        parse_run(&run, argv[i]);
        (void)printf("%s", i > first ? ",\n" : "");
        run_steps(&setup, &run);
    }
    (void)printf("]\n");
    (void)kv_cache_free(setup.master);
    (void)kv_store_free(setup.master_store);
    (void)model_free(setup.model);
    gpu_free(setup.gpu);
    free(setup.logits);
    return EXIT_SUCCESS;
}
