/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-beams FILE [KEY=VALUE …]: a beam search against as many separate runs, in one engine, as JSON on standard output.
 *
 *   beams=N (8)   prompt=N tokens of the prompt (64)   tokens=N to generate (48)   rounds=N pairs, alternating (3)
 *   parallel=N sequences of a pass (beams)   programs=FOLDER for compiled kernels   state=FOLDER for the calibration
 *
 * Rates are generated tokens by the time from the first token to the last, and, "whole", by the time from the request to its answer; the
 * search returns all its beams.
 */

#include "daemon/engine/engine.h"
#include "daemon/engine/mailbox.h"
#include "tests/lib/patience.h"

#include <string.h>
#include <time.h>

typedef struct Bench {
    const char *model, *programs, *state;
    uint32_t n_beams, n_prompt, n_tokens, n_rounds, parallel;
    int32_t *ids;
} Bench;

static void die(const char *what, const ErrorDetail *detail)
{
    (void)fprintf(stderr, "bench-beams: %s: %s\n", what, detail ? detail->text : "");
    exit(1);
}

static void parse(Bench *bench, char *argument)
{
    const struct {
        const char *key;
        uint32_t *number;
        const char **text;
    } keys[] = {{"beams", &bench->n_beams, NULL},     {"prompt", &bench->n_prompt, NULL},     {"tokens", &bench->n_tokens, NULL},
                {"rounds", &bench->n_rounds, NULL},   {"parallel", &bench->parallel, NULL},   {"programs", NULL, &bench->programs},
                {"state", NULL, &bench->state}};
    char *value = strchr(argument, '=');

    if (!value)
        die(argument, &(ErrorDetail){"KEY=VALUE is expected"});
    *value++ = 0;
    for (size_t i = 0; i < N_ELEMENTS(keys); i++)
        if (strcmp(argument, keys[i].key) == 0) {
            if (keys[i].number)
                *keys[i].number = (uint32_t)strtoul(value, NULL, 10);
            else
                *keys[i].text = value;
            return;
        }
    die(argument, &(ErrorDetail){"see the head of tests/bench/bench-beams.c"});
}

/* What requests have taken so far. */
typedef struct Spent {
    uint64_t decode_usec, whole_usec;
} Spent;

static double rate(const Bench *bench, uint32_t n_tokens, uint64_t usec)
{
    return (double)bench->n_beams * n_tokens * 1e6 / (double)usec;
}

/* Runs one request to its end. */
static void run(Engine *engine, const Bench *bench, uint32_t n_beams, Spent *spent)
{
    uint64_t begin_usec = now_usec();
    const struct timespec pause = {0, 500000};
    EngineRequest request = {
        .owner = 1,
        .model = "m",
        .priority = ENGINE_PRIORITY_NORMAL,
        .ids = bench->ids,
        .n_ids = bench->n_prompt,
        .sampling = {.max_tokens = bench->n_tokens, .top_p = 1, .repeat_penalty = 1, .ignore_eos = true, .num_beams = n_beams,
                     .num_return_sequences = MIN(n_beams, (uint32_t)ENGINE_MAX_RETURN), .length_penalty = 1,
                     .early_stopping = BEAM_EARLY_NEVER},
    };
    uint64_t job = 0;
    bool done = false;

    if (engine_generate(engine, &request, &job) < 0)
        die("engine_generate", NULL);
    while (!done) {
        EngineEvent *event = engine_next_event(engine);

        if (!event) {
            (void)nanosleep(&pause, NULL);
            continue;
        }
        if (event->kind == ENGINE_EVENT_FINISHED && event->job == job) {
            if (event->result != ENGINE_RESULT_DONE)
                die("generation", &event->detail);
            spent->decode_usec += event->usage.decode_usec;
            done = true;
        }
        engine_event_free(event);
    }
    spent->whole_usec += now_usec() - begin_usec;
}

int main(int argc, char **argv)
{
    Bench bench = {.n_beams = 8, .n_prompt = 64, .n_tokens = 48, .n_rounds = 3};
    EngineModel model = {.name = "m", .policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false), .keep_alive_usec = UINT64_MAX};
    EngineOptions options = {.gpu = {.deadline_usec = PATIENCE_USEC}, .models = &model, .n_models = 1};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Engine *engine;
    Spent warm = {0};

    if (argc < 2)
        die("usage", &(ErrorDetail){"bench-beams FILE [KEY=VALUE …]"});
    bench.model = argv[1];
    for (int i = 2; i < argc; i++)
        parse(&bench, argv[i]);
    bench.ids = calloc(bench.n_prompt + 1, sizeof(*bench.ids));
    for (uint32_t i = 0; i < bench.n_prompt; i++)
        bench.ids[i] = (int32_t)(i * 37 % 250); /* ids that every model has */
    model.path = bench.model;
    model.parallel = bench.parallel ? bench.parallel : bench.n_beams;
    options.gpu.cache_dir = bench.programs;
    options.state_dir = bench.state;
    if (engine_new(&options, &engine, &detail) < 0)
        die("engine", &detail);
    run(engine, &bench, bench.n_beams, &warm); /* kernels of every shape have run once */
    run(engine, &bench, 1, &warm);
    (void)printf("[");
    for (uint32_t round = 0; round < bench.n_rounds; round++) {
        Spent beams = {0}, separate = {0};

        run(engine, &bench, bench.n_beams, &beams);
        for (uint32_t i = 0; i < bench.n_beams; i++)
            run(engine, &bench, 1, &separate);
        /* The first token of each sequence is before the decode's clock starts. */
        (void)printf("%s{\"beams_rate\": %.3f, \"separate_rate\": %.3f, \"beams_whole_rate\": %.3f, \"separate_whole_rate\": %.3f}",
                     round ? ", " : "", rate(&bench, bench.n_tokens - 1, beams.decode_usec), rate(&bench, bench.n_tokens - 1, separate.decode_usec),
                     rate(&bench, bench.n_tokens, beams.whole_usec), rate(&bench, bench.n_tokens, separate.whole_usec));
    }
    (void)printf("]\n");
    engine_free(engine);
    free(bench.ids);
    return 0;
}
