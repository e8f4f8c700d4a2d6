/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-predict MODEL [KEY=VALUE …] CASE …: what the planner says of each case before it is loaded, then the same measured, as a JSON array
 * on standard output.
 *
 * The machine may move between the two.  A control, tokens of the same model as it is with everything on the device and nothing behind them,
 * is therefore timed before and after the probe and before and after each measurement, which itself has two halves.  A number is steady when
 * the four controls lie within 15 %, and the two halves, and the median token takes at most a third more than the quickest one; for a number
 * that is not the probe and the measurement are repeated, twice at most and while there is time for it.  What was predicted has no part in
 * that.
 *
 *   steps=N         decode steps that are measured at each depth (33: one of them packs a page), at least, and for a fifth of a second
 *   prompt=N        of the prefill (512)     repeats=SECONDS  that may be spent on repeating (0)
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
#include "tests/lib/bench-run.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#define CHUNK    BENCH_MAX_ROWS
#define STEADY   1.15
#define ATTEMPTS 3
#define DISTURBED (4.0 / 3.0) /* as the probe judges: a median so far above the least has the work of others in it */
#define CONTROL_TOKENS 24u /* of a sequence: none completes a page */

static const uint32_t DEPTHS[] = {0, 2048, 8064};

typedef struct Case {
    const char *name;
    ConfigCache keys;
    uint32_t device_percent;
    ModelOptions options;
    KvPolicy policy;
} Case;

typedef struct Setup {
    const char *path, *images, *state, *programs;
    uint32_t n_steps, n_prompt, prepare, repeat_seconds;
    Gpu *gpu;
    uint64_t budget_bytes; /* of the device, when no case limits it */
    double repeat_left;
    BenchRun control; /* on a connection of its own */
    double last_control;
} Setup;

/* What is predicted and measured: a prefill, or decoding at a depth. */
typedef struct Number {
    uint32_t depth;
    bool prefill;
    double predicted_rate, rate;
    double least, most; /* of its controls */
    double halves[2];   /* seconds of a token */
    bool disturbed;
    uint32_t n_attempts; /* in which it was measured */
} Number;

#define N_NUMBERS (1 + N_ELEMENTS(DEPTHS))

/* ---- arguments ------------------------------------------------------------------------------------------------------------------ */

static void parse_setup(Setup *setup, char *argument)
{
    const BenchKey keys[] = {{"images", NULL, &setup->images},   {"state", NULL, &setup->state},       {"programs", NULL, &setup->programs},
                             {"steps", &setup->n_steps, NULL}, {"prompt", &setup->n_prompt, NULL}, {"prepare", &setup->prepare, NULL},
                             {"repeats", &setup->repeat_seconds, NULL}};

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

static ModelFile *open_file(const Setup *setup)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    ModelFile *file = NULL;

    bench_must(model_file_open(setup->path, setup->state, &file, &detail), setup->path, &detail);
    return file;
}

/* ---- pasts ---------------------------------------------------------------------------------------------------------------------- */

static void image_path(const Setup *setup, const KvStore *store, uint32_t depth, char ret[static 4096])
{
    (void)snprintf(ret, 4096, "%s/%u-%016" PRIx64 ".kv", setup->images, depth, kv_store_layout(store));
}

static void save(const BenchRun *run, KvStore *store, const char *path)
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
    BenchRun run;

    bench_run_begin(setup->gpu, &run, open_file(setup), &options, &policy);
    for (size_t d = 1; d < N_ELEMENTS(DEPTHS); d++) {
        (void)bench_prefill(&run, DEPTHS[d] - done, false);
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
    bench_run_end(&run);
}

static void restore(const Setup *setup, BenchRun *run, uint32_t depth)
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

static double control(Setup *setup)
{
    setup->last_control = bench_decode(&setup->control, 1, CONTROL_TOKENS).sec;
    return setup->last_control;
}

static void control_begin(Setup *setup)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_DYNAMIC, false);
    ModelOptions options = {.max_rows = CONTROL_TOKENS, .max_sequences = 1};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Gpu *gpu = NULL;

    bench_must(gpu_open(&(GpuOptions){.cache_dir = setup->programs}, &gpu, &detail), "device", &detail);
    bench_run_begin(gpu, &setup->control, open_file(setup), &options, &policy);
    (void)control(setup);
}

static void control_end(Setup *setup)
{
    Gpu *gpu = setup->control.model->gpu;

    bench_run_end(&setup->control);
    gpu_free(gpu);
}

static void measure_number(const Setup *setup, BenchRun *run, const ModelSpeed *speed, const ModelFit *fit, Number *number)
{
    ModelPrediction predicted;

    if (number->depth > 0)
        restore(setup, run, number->depth);
    else
        bench_run_clear(run);
    if (number->prefill) {
        model_predict(speed, fit, (setup->n_prompt - MIN(setup->n_prompt, fit->options.max_rows)) / 2, &predicted);
        number->predicted_rate = predicted.prefill_rate;
        for (uint32_t i = 0; i < 2; i++) {
            number->halves[i] = bench_prefill(run, setup->n_prompt, true) / setup->n_prompt;
            bench_run_clear(run);
        }
        number->rate = 2 / (number->halves[0] + number->halves[1]);
    } else {
        BenchTokens tokens = bench_decode(run, setup->n_steps, 0);

        model_predict(speed, fit, number->depth + tokens.n_run / 2, &predicted);
        number->predicted_rate = 1 / predicted.token_sec;
        number->rate = 1 / tokens.sec;
        number->disturbed = tokens.sec > tokens.least * DISTURBED;
        memcpy(number->halves, tokens.halves, sizeof(number->halves));
    }
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

/* Facts of another case, or of a while ago, must not be this one's. */
static void forget_speeds(const Setup *setup)
{
    char path[4096];
    DIR *folder;

    (void)snprintf(path, sizeof(path), "%s/speeds", setup->state ? setup->state : "");
    folder = setup->state ? opendir(path) : NULL;
    for (const struct dirent *entry; folder && (entry = readdir(folder));)
        if (entry->d_name[0] != '.')
            bench_must(unlinkat(dirfd(folder), entry->d_name, 0) ? -errno : 0, entry->d_name, NULL);
    if (folder)
        (void)closedir(folder);
}

static bool are_close(double a, double b)
{
    return MAX(a, b) <= MIN(a, b) * STEADY;
}

static bool is_steady(const Number *number)
{
    return number->n_attempts > 0 && !number->disturbed && are_close(number->least, number->most) && are_close(number->halves[0], number->halves[1]);
}

static void add_control(Number *number, double sec)
{
    number->least = MIN(number->least, sec);
    number->most = MAX(number->most, sec);
}

/* The probe, then the numbers that are not steady yet.  When the machine moved meanwhile they are measured in the @last attempt only, to have
 * something to show. */
static void attempt(Setup *setup, const Case *c, bool last, Number numbers[static N_NUMBERS], ModelSpeed *ret_speed, ModelFit *ret_fit,
                    uint64_t *ret_device_bytes)
{
    double before = setup->last_control, after, least, most;
    uint64_t used[GPU_PURPOSE_X_MAX];
    ModelFile *file = open_file(setup);
    BenchRun run;

    forget_speeds(setup);
    *ret_fit = plan(setup, file, c, ret_speed);
    after = control(setup);
    least = MIN(before, after);
    most = MAX(before, after);
    if (!are_close(least, most) && !last) {
        (void)model_file_free(file);
        return;
    }
    bench_run_begin(setup->gpu, &run, file, &ret_fit->options, &ret_fit->policy);
    gpu_memory_used(setup->gpu, used, ret_device_bytes);
    (void)bench_prefill(&run, setup->n_prompt, true); /* kernels have run once before anything is measured */
    for (size_t i = 0; i < N_NUMBERS; i++) {
        Number *number = &numbers[i];

        if (is_steady(number))
            continue;
        before = after;
        measure_number(setup, &run, ret_speed, ret_fit, number);
        after = control(setup);
        number->least = least;
        number->most = most;
        add_control(number, before);
        add_control(number, after);
        number->n_attempts++;
    }
    bench_run_end(&run);
}

static bool all_steady(const Number numbers[static N_NUMBERS])
{
    for (size_t i = 0; i < N_NUMBERS; i++)
        if (!is_steady(&numbers[i]))
            return false;
    return true;
}

static void measure(Setup *setup, char *argument)
{
    Number numbers[N_NUMBERS] = {{.prefill = true}};
    uint64_t device_bytes = 0;
    uint32_t n_attempts = 0;
    double repeated = setup->repeat_left;
    ModelSpeed speed;
    ModelFit fit;
    Case c;

    parse_case(&c, argument);
    for (size_t d = 0; d < N_ELEMENTS(DEPTHS); d++)
        numbers[1 + d].depth = DEPTHS[d];
    for (bool last = false; !last && !all_steady(numbers); n_attempts++) {
        double begun = bench_now();

        last = n_attempts == ATTEMPTS - 1 || setup->repeat_left <= 0;
        attempt(setup, &c, last, numbers, &speed, &fit, &device_bytes);
        if (n_attempts > 0)
            setup->repeat_left -= bench_now() - begun;
    }
    repeated -= setup->repeat_left;
    (void)printf("{\"name\": \"%s\", \"attempts\": %u, \"device_bytes\": %" PRIu64 ", \"planned_device_bytes\": %" PRIu64 ", \"rows\": %u, ",
                 c.name, n_attempts, device_bytes, fit.plan.device_total_bytes, fit.options.max_rows);
    (void)printf("\"repeat_sec\": %.1f, ", repeated);
    (void)printf("\"streamed_bytes\": %" PRIu64 ", \"in_place_bytes\": %" PRIu64 ", ", fit.plan.weight_streamed_bytes,
                 fit.plan.weight_in_place_bytes);
    print_speed(&speed);
    (void)printf("\"numbers\": [");
    for (size_t i = 0; i < N_NUMBERS; i++)
        (void)printf("%s{\"depth\": %u, \"prefill\": %s, \"predicted_rate\": %.2f, \"rate\": %.2f, \"control_usec\": [%.0f, %.0f], "
                     "\"halves_usec\": [%.1f, %.1f], \"measured\": %u, \"steady\": %s}",
                     i ? ", " : "", numbers[i].depth, numbers[i].prefill ? "true" : "false", numbers[i].predicted_rate, numbers[i].rate,
                     1e6 * numbers[i].least, 1e6 * numbers[i].most, 1e6 * numbers[i].halves[0], 1e6 * numbers[i].halves[1], numbers[i].n_attempts,
                     is_steady(&numbers[i]) ? "true" : "false");
    (void)printf("]}");
    (void)fflush(stdout);
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
        setup.repeat_left = setup.repeat_seconds;
        control_begin(&setup);
        (void)printf("[");
        for (int i = first; i < argc; i++) {
            (void)printf("%s", i > first ? ",\n" : "");
            measure(&setup, argv[i]);
        }
        (void)printf("]\n");
        control_end(&setup);
    }
    gpu_free(setup.gpu);
    return EXIT_SUCCESS;
}
