/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-reuse FILE [KEY=VALUE …]: what it saves to come back to a past, in one engine, as JSON on standard output.
 *
 *   prefix=N tokens that two prompts share (2048)   rest=N that they do not (32)   depth=N tokens of a session (8064)
 *   rounds=N (3)   programs=FOLDER for compiled kernels   state=FOLDER for the calibration
 *
 * Per round: time to the first token of prefix + rest, cold and as a hit of the prefix store; prefill of a session, time of a clone of it, time
 * from a restore to the first token, bytes of the file at 4 bits and in f16.
 */

#include "tests/lib/engine-talk.h"
#include "tests/lib/patience.h"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef struct Bench {
    const char *programs, *state;
    uint32_t n_prefix, n_rest, depth, n_rounds;
    int32_t *ids;
    Talk *talk;
} Bench;

static uint64_t now(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void die(const char *what)
{
    (void)fprintf(stderr, "bench-reuse: %s: see the head of tests/bench/bench-reuse.c\n", what);
    exit(1);
}

static void parse(Bench *bench, char *argument)
{
    const struct {
        const char *key;
        uint32_t *number;
        const char **text;
    } keys[] = {{"prefix", &bench->n_prefix, NULL}, {"rest", &bench->n_rest, NULL},         {"depth", &bench->depth, NULL},
                {"rounds", &bench->n_rounds, NULL}, {"programs", NULL, &bench->programs}, {"state", NULL, &bench->state}};
    char *value = strchr(argument, '=');

    if (!value)
        die(argument);
    *value++ = 0;
    for (size_t i = 0; i < N_ELEMENTS(keys); i++)
        if (strcmp(argument, keys[i].key) == 0) {
            if (keys[i].number)
                *keys[i].number = (uint32_t)strtoul(value, NULL, 10);
            else
                *keys[i].text = value;
            return;
        }
    die(argument);
}

/* Ids that every model has; the last @n_rest of @n depend on @seed. */
static void fill(Bench *bench, uint32_t n, uint32_t n_rest, uint32_t seed)
{
    for (uint32_t i = 0; i < n; i++)
        bench->ids[i] = (int32_t)(((i * 2654435761u) ^ (i >= n - n_rest ? seed * 40503u : 0)) % 250);
}

/* The first @n ids, one token; fails the program unless all went well. */
static EngineUsage first_token(Bench *bench, const char *model, uint64_t session, uint32_t n)
{
    EngineRequest request = raw_request(session ? NULL : model, NULL, 1);
    Seen *seen;

    request.session = session;
    request.ids = bench->ids;
    request.n_ids = n;
    request.sampling.ignore_eos = true;
    seen = talk_wait(bench->talk, talk_generate(bench->talk, &request));
    if (seen->result != ENGINE_RESULT_DONE) {
        (void)fprintf(stderr, "bench-reuse: %s\n", seen->detail.text);
        exit(1);
    }
    return seen->usage;
}

static void must(const EngineEvent *reply, const char *what)
{
    if (reply->result == ENGINE_RESULT_DONE)
        return;
    (void)fprintf(stderr, "bench-reuse: %s: %s\n", what, reply->detail.text);
    exit(1);
}

static void bench_prefix(Bench *bench, uint32_t round)
{
    uint32_t n = bench->n_prefix + bench->n_rest;
    EngineUsage cold, hit;

    fill(bench, n, bench->n_rest, 100 + round);
    cold = first_token(bench, "cold", 0, n);
    fill(bench, n, bench->n_rest, 200 + round);
    (void)first_token(bench, "kept", 0, bench->n_prefix);
    hit = first_token(bench, "kept", 0, n);
    (void)printf("\"cold_usec\": %llu, \"hit_usec\": %llu, \"hit_tokens\": %u", (unsigned long long)cold.first_token_usec,
                 (unsigned long long)hit.first_token_usec, hit.reused_tokens);
}

/* Saves @session; returns the bytes of the file, which is *ret_fd. */
static off_t save(Bench *bench, uint64_t session, int *ret_fd)
{
    *ret_fd = memfd_create("session", MFD_CLOEXEC);
    must(talk_ask(bench->talk, (EngineQuery){.kind = ENGINE_QUERY_SAVE_SESSION, .owner = 1, .session = session, .fd = dup(*ret_fd)}), "save");
    return lseek(*ret_fd, 0, SEEK_END);
}

static void bench_session(Bench *bench)
{
    uint64_t session = talk_open(bench->talk, "four", 1), wide = talk_open(bench->talk, "f16", 1), again = talk_open(bench->talk, "four", 1);
    uint64_t clones[16], begin, clone_usec, restore_usec;
    EngineUsage prefill;
    off_t bytes, wide_bytes;
    int fd, wide_fd;

    fill(bench, bench->depth + 1, 0, 0);
    prefill = first_token(bench, NULL, session, bench->depth);
    begin = now();
    for (size_t i = 0; i < N_ELEMENTS(clones); i++) {
        EngineEvent *reply = talk_ask(bench->talk, (EngineQuery){.kind = ENGINE_QUERY_CLONE_SESSION, .owner = 1, .session = session});

        must(reply, "clone");
        clones[i] = reply->session;
    }
    clone_usec = (now() - begin) / N_ELEMENTS(clones);
    for (size_t i = 0; i < N_ELEMENTS(clones); i++)
        must(talk_ask(bench->talk, (EngineQuery){.kind = ENGINE_QUERY_CLOSE_SESSION, .owner = 1, .session = clones[i]}), "close");
    bytes = save(bench, session, &fd);
    begin = now();
    must(talk_ask(bench->talk, (EngineQuery){.kind = ENGINE_QUERY_RESTORE_SESSION, .owner = 1, .session = again, .fd = dup(fd)}), "restore");
    (void)first_token(bench, NULL, again, bench->depth + 1);
    restore_usec = now() - begin;
    (void)first_token(bench, NULL, wide, bench->depth);
    wide_bytes = save(bench, wide, &wide_fd);
    (void)printf(", \"prefill_usec\": %llu, \"clone_usec\": %llu, \"restore_usec\": %llu, \"file_bytes\": %lld, \"f16_file_bytes\": %lld",
                 (unsigned long long)prefill.first_token_usec, (unsigned long long)clone_usec, (unsigned long long)restore_usec,
                 (long long)bytes, (long long)wide_bytes);
    (void)close(fd);
    (void)close(wide_fd);
    for (size_t i = 0; i < 3; i++)
        must(talk_ask(bench->talk, (EngineQuery){.kind = ENGINE_QUERY_CLOSE_SESSION, .owner = 1, .session = i == 0 ? session : i == 1 ? wide : again}),
             "close");
}

int main(int argc, char **argv)
{
    Bench bench = {.n_prefix = 2048, .n_rest = 32, .depth = 8064, .n_rounds = 3};
    KvPolicy packed = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false), wide = kv_policy_preset(KV_STRATEGY_OFFLOADED, false);
    KvPolicy four = packed;
    EngineModel models[] = {{.name = "four", .policy = packed, .parallel = 2, .keep_alive_usec = UINT64_MAX},
                            {.name = "cold", .policy = packed, .parallel = 2, .keep_alive_usec = UINT64_MAX},
                            {.name = "kept", .policy = packed, .parallel = 2, .keep_alive_usec = UINT64_MAX, .n_prefixes = 4},
                            {.name = "f16", .policy = wide, .parallel = 2, .keep_alive_usec = UINT64_MAX}};
    EngineOptions options = {.gpu = {.deadline_usec = PATIENCE_USEC}, .models = models, .n_models = N_ELEMENTS(models)};

    if (argc < 2)
        die("FILE");
    four.form = kv_form_leat(4, 4);
    models[0].policy = four;
    for (int i = 2; i < argc; i++)
        parse(&bench, argv[i]);
    for (size_t i = 0; i < N_ELEMENTS(models); i++)
        models[i].path = argv[1];
    options.gpu.cache_dir = bench.programs;
    options.state_dir = bench.state;
    bench.ids = calloc(MAX(bench.depth, bench.n_prefix + bench.n_rest) + 1u, sizeof(*bench.ids));
    bench.talk = talk_new(&options);
    for (size_t i = 0; i < N_ELEMENTS(models); i++) {
        fill(&bench, 600, 600, 1);
        (void)first_token(&bench, models[i].name, 0, 600); /* loaded, kernels of every shape have run once */
    }
    (void)printf("[");
    for (uint32_t round = 0; round < bench.n_rounds; round++) {
        (void)printf("%s{", round ? ", " : "");
        bench_prefix(&bench, round);
        bench_session(&bench);
        (void)printf("}");
    }
    (void)printf("]\n");
    talk_free(bench.talk);
    free(bench.ids);
    return 0;
}
