/* SPDX-License-Identifier: Apache-2.0 */
/* leat: the command line, its verbs and its options. */

#include "daemon/config/config.h"
#include "daemon/ctl/ctl.h"

#include <getopt.h>
#include <locale.h>
#include <string.h>

static const struct {
    const char *name;
    CtlVerb run;
    const char *arguments, *help;
} ctl_verbs[] = {
    {"ask", ctl_verb_ask, "[PROMPT...]", "ask one question (arguments, --file, or standard input)"},
    {"chat", ctl_verb_chat, "", "a conversation, line by line"},
    {"run", ctl_verb_run, "SERVICE", "run a YAML service; standard input is its input"},
    {"status", ctl_verb_status, "", "daemon, device and memory"},
    {"ps", ctl_verb_ps, "", "running and waiting jobs"},
    {"services", ctl_verb_services, "", "configured services"},
    {"models", ctl_verb_models, "", "configured and stored models"},
    {"load", ctl_verb_load, "[MODEL]", "load a model now"},
    {"unload", ctl_verb_unload, "[MODEL]", "take a model off the device"},
    {"tokenize", ctl_verb_tokenize, "[TEXT...]", "token ids of a text"},
    {"estimate", ctl_verb_estimate, "[MODEL] [--depth N]", "bytes by purpose and place, and speed, before loading"},
    {"eval", ctl_verb_eval, "--ids FILE --npy OUT", "teacher-forced logits, float32 [tokens, vocabulary]"},
    {"trace", ctl_verb_trace, "[-- COMMAND...]", "record kernels and copies while a command runs (or for --duration)"},
    {"config", ctl_verb_config, "check [FILE]", "all mistakes of the configuration, with their places"},
    {"reload", ctl_verb_reload, "", "let the daemon read its configuration again"},
};

static void ctl_help(void)
{
    (void)puts("leat VERB [OPTIONS] …: talk to the inference daemon\n\nVerbs");
    for (size_t i = 0; i < N_ELEMENTS(ctl_verbs); i++)
        (void)printf("  %-9s %-21s %s\n", ctl_verbs[i].name, ctl_verbs[i].arguments, ctl_verbs[i].help);
    (void)puts("\nOptions\n"
               "  -m, --model NAME         the model; without it the first one configured\n"
               "      --user, --system     session bus or system bus (default: system, or LEAT_BUS=user)\n"
               "      --json               the result as JSON, with the whole usage\n"
               "  -q, --quiet              no progress, no remarks\n"
               "      --no-legend          tables without a head line\n"
               "      --timeout SECONDS    for replies of the daemon (default 25; answers have no limit)\n"
               "      --priority CLASS     interactive, normal or background\n"
               "      --cache KEY=VALUE,...  keys of the YAML cache block: strategy, transfer, quant.nbits, device-budget, …");
    (void)puts("ask, chat, run\n"
               "      --temperature T  --top-k N  --top-p P  --min-p P  --repeat-penalty R  --seed N\n"
               "      --max-tokens N       0: until the model stops or the context is full\n"
               "      --stop TEXT          ends the answer; may be repeated\n"
               "      --bad-word TEXT      never said; may be repeated\n"
               "      --min-tokens N       no end before so many;  --no-repeat-ngram N: no run of N tokens comes twice\n"
               "      --ignore-eos         go on after the model's end token\n"
               "  -f, --file FILE          read the prompt (run: the input) from a file; - is standard input\n"
               "  -s, --instructions TEXT  the system message (ask, chat)\n"
               "      --keep FILE          chat: go on from FILE when it is there, and keep the conversation in it\n"
               "      --raw                no chat template: the prompt as it is\n"
               "      --ids                print token ids instead of text (eval: --ids FILE)\n"
               "      --stats              the usage on standard error\n"
               "  -i, --input NAME=VALUE   an input of the service (run); may be repeated\n"
               "      --spool FOLDER       run once for each file of the folder; answers go to FOLDER/done");
    (void)puts("ask, several answers at once (printed when all are done, the best first)\n"
               "      --beams N            beam search with N beams, 2 to 40\n"
               "      --return N           so many answers, 1 to 20: the best beams, or without --beams so many draws\n"
               "      --early-stopping W   false, true or never: when the search may end\n"
               "      --length-penalty P   score = log-probability / length^P (default 1); above 0 favours long answers\n"
               "      --sample             draw the beams (--temperature, --top-k, …) instead of taking the best\n"
               "      --prompts FILE       one prompt a line, all in one call; - is standard input");
    (void)puts("others\n"
               "      --special            tokenize: special tokens in the text count as such\n"
               "  -o, --output FILE        trace: where to write (default leat-trace.json)\n"
               "      --duration SECONDS   trace: how long to record without a command (default 10)\n"
               "  -h, --help  --version\n\n"
               "Exit codes: 0 done, 1 failed, 2 usage, 3 not available, 4 refused, 5 configuration invalid, 130 interrupted.");
}

enum {
    OPTION_USER = 256, OPTION_SYSTEM, OPTION_JSON, OPTION_NO_LEGEND, OPTION_TIMEOUT, OPTION_PRIORITY, OPTION_CACHE, OPTION_STOP,
    OPTION_IGNORE_EOS, OPTION_RAW, OPTION_IDS, OPTION_STATS, OPTION_SPOOL, OPTION_SPECIAL, OPTION_DURATION, OPTION_NPY, OPTION_VERSION,
    OPTION_DEPTH, OPTION_KEEP,
    OPTION_BEAMS, OPTION_RETURN, OPTION_EARLY_STOPPING, OPTION_LENGTH_PENALTY, OPTION_SAMPLE, OPTION_PROMPTS, OPTION_BAD_WORD,
    OPTION_SAMPLING, /* and the following ones, in the order of ctl_sampling_options */
};

static const char *const ctl_sampling_options[] = {"temperature", "top-k", "top-p", "min-p", "repeat-penalty", "seed", "max-tokens",
                                                   "min-tokens", "no-repeat-ngram"};

static const struct option ctl_options[] = {
    {"model", required_argument, NULL, 'm'},
    {"user", no_argument, NULL, OPTION_USER},
    {"system", no_argument, NULL, OPTION_SYSTEM},
    {"json", no_argument, NULL, OPTION_JSON},
    {"quiet", no_argument, NULL, 'q'},
    {"no-legend", no_argument, NULL, OPTION_NO_LEGEND},
    {"timeout", required_argument, NULL, OPTION_TIMEOUT},
    {"priority", required_argument, NULL, OPTION_PRIORITY},
    {"cache", required_argument, NULL, OPTION_CACHE},
    {"stop", required_argument, NULL, OPTION_STOP},
    {"ignore-eos", no_argument, NULL, OPTION_IGNORE_EOS},
    {"file", required_argument, NULL, 'f'},
    {"instructions", required_argument, NULL, 's'},
    {"raw", no_argument, NULL, OPTION_RAW},
    {"ids", no_argument, NULL, OPTION_IDS},
    {"stats", no_argument, NULL, OPTION_STATS},
    {"input", required_argument, NULL, 'i'},
    {"spool", required_argument, NULL, OPTION_SPOOL},
    {"special", no_argument, NULL, OPTION_SPECIAL},
    {"output", required_argument, NULL, 'o'},
    {"duration", required_argument, NULL, OPTION_DURATION},
    {"npy", required_argument, NULL, OPTION_NPY},
    {"depth", required_argument, NULL, OPTION_DEPTH},
    {"keep", required_argument, NULL, OPTION_KEEP},
    {"help", no_argument, NULL, 'h'},
    {"version", no_argument, NULL, OPTION_VERSION},
    {"temperature", required_argument, NULL, OPTION_SAMPLING + 0},
    {"top-k", required_argument, NULL, OPTION_SAMPLING + 1},
    {"top-p", required_argument, NULL, OPTION_SAMPLING + 2},
    {"min-p", required_argument, NULL, OPTION_SAMPLING + 3},
    {"repeat-penalty", required_argument, NULL, OPTION_SAMPLING + 4},
    {"seed", required_argument, NULL, OPTION_SAMPLING + 5},
    {"max-tokens", required_argument, NULL, OPTION_SAMPLING + 6},
    {"min-tokens", required_argument, NULL, OPTION_SAMPLING + 7},
    {"no-repeat-ngram", required_argument, NULL, OPTION_SAMPLING + 8},
    {"beams", required_argument, NULL, OPTION_BEAMS},
    {"return", required_argument, NULL, OPTION_RETURN},
    {"early-stopping", required_argument, NULL, OPTION_EARLY_STOPPING},
    {"length-penalty", required_argument, NULL, OPTION_LENGTH_PENALTY},
    {"sample", no_argument, NULL, OPTION_SAMPLE},
    {"prompts", required_argument, NULL, OPTION_PROMPTS},
    {"bad-word", required_argument, NULL, OPTION_BAD_WORD},
    {NULL, 0, NULL, 0},
};

static int ctl_add_pair(CtlPair **pairs, size_t *n, const char *key, const char *value)
{
    CtlPair *grown = reallocarray(*pairs, *n + 1, sizeof(*grown));

    if (!grown)
        return ctl_fail(CTL_EXIT_FAILED, "out of memory");
    *pairs = grown;
    grown[(*n)++] = (CtlPair){key, value};
    return CTL_EXIT_DONE;
}

/* KEY=VALUE, cut in place. */
static int ctl_add_assignment(CtlPair **pairs, size_t *n, char *text, const char *option)
{
    char *equals = strchr(text, '=');

    if (!equals || equals == text)
        return ctl_fail(CTL_EXIT_USAGE, "--%s takes NAME=VALUE, not '%s'", option, text);
    *equals = 0;
    return ctl_add_pair(pairs, n, text, equals + 1);
}

static int ctl_add_cache(Ctl *ctl, char *text)
{
    ConfigCache scratch = {0};
    int r = CTL_EXIT_DONE;

    for (char *save = NULL, *item = strtok_r(text, ",", &save); item && !r; item = strtok_r(NULL, ",", &save)) {
        ErrorDetail detail = ERROR_DETAIL_NULL;

        r = ctl_add_assignment(&ctl->cache, &ctl->n_cache, item, "cache");
        if (!r && config_cache_set(&scratch, ctl->cache[ctl->n_cache - 1].key, ctl->cache[ctl->n_cache - 1].value, &detail))
            r = ctl_fail(CTL_EXIT_USAGE, "%s", detail.text);
    }
    return r;
}

static int ctl_add_sampling(Ctl *ctl, const char *name, const char *value)
{
    EngineSampling scratch = {0};
    ErrorDetail detail = ERROR_DETAIL_NULL;

    if (config_sampling_set(&scratch, name, value, &detail))
        return ctl_fail(CTL_EXIT_USAGE, "%s", detail.text);
    return ctl_add_pair(&ctl->sampling, &ctl->n_sampling, name, value);
}

static int ctl_add_text(const char ***texts, size_t *n, const char *text, const char *option)
{
    const char **grown = reallocarray(*texts, *n + 1, sizeof(*grown));

    if (!grown)
        return ctl_fail(CTL_EXIT_FAILED, "out of memory");
    *texts = grown;
    grown[(*n)++] = text;
    return text[0] ? CTL_EXIT_DONE : ctl_fail(CTL_EXIT_USAGE, "--%s must not be empty", option);
}

static int ctl_parse_seconds(const char *text, double *ret)
{
    char *end;

    *ret = strtod(text, &end);
    if (end == text || *end || !(*ret > 0) || *ret > 1e9)
        return ctl_fail(CTL_EXIT_USAGE, "'%s' is not a number of seconds", text);
    return CTL_EXIT_DONE;
}

static int ctl_parse_timeout(Ctl *ctl, const char *text)
{
    double seconds;
    int r = ctl_parse_seconds(text, &seconds);

    if (!r)
        ctl->timeout_usec = (uint64_t)(seconds * 1e6);
    return r;
}

/* Options of several answers; their values are checked when they are sent. */
static int ctl_parse_several(Ctl *ctl, int option)
{
    switch (option) {
    case OPTION_BEAMS:
        ctl->beams = optarg;
        break;
    case OPTION_RETURN:
        ctl->n_return = optarg;
        break;
    case OPTION_EARLY_STOPPING:
        ctl->early_stopping = optarg;
        break;
    case OPTION_LENGTH_PENALTY:
        ctl->length_penalty = optarg;
        break;
    case OPTION_SAMPLE:
        ctl->sample = true;
        break;
    case OPTION_PROMPTS:
        ctl->prompts_file = optarg;
        break;
    default:
        return CTL_EXIT_USAGE;
    }
    return CTL_EXIT_DONE;
}

static int ctl_parse_depth(Ctl *ctl, const char *text)
{
    char *end;
    unsigned long long depth;

    errno = 0;
    depth = strtoull(text, &end, 10);
    if (errno || *end || end == text || depth > UINT32_MAX || text[0] == '-')
        return ctl_fail(CTL_EXIT_USAGE, "--depth %s: a number of tokens is expected", text);
    ctl->has_depth = true;
    ctl->depth = (uint32_t)depth;
    return CTL_EXIT_DONE;
}

/* One option; `eval --ids FILE` takes its file from what follows. */
static int ctl_parse_option(Ctl *ctl, int option)
{
    if (option >= OPTION_SAMPLING)
        return ctl_add_sampling(ctl, ctl_sampling_options[option - OPTION_SAMPLING], optarg);
    if (option >= OPTION_BEAMS && option <= OPTION_PROMPTS)
        return ctl_parse_several(ctl, option);
    switch (option) {
    case 'm':
        ctl->model = optarg;
        break;
    case 'q':
        ctl->quiet = true;
        break;
    case 'f':
        ctl->file = optarg;
        break;
    case 's':
        ctl->system = optarg;
        break;
    case 'i':
        return ctl_add_assignment(&ctl->inputs, &ctl->n_inputs, optarg, "input");
    case 'o':
        ctl->output = optarg;
        break;
    case OPTION_USER:
        ctl->user = true;
        break;
    case OPTION_SYSTEM:
        ctl->system_bus = true;
        break;
    case OPTION_JSON:
        ctl->json = true;
        break;
    case OPTION_NO_LEGEND:
        ctl->no_legend = true;
        break;
    case OPTION_TIMEOUT:
        return ctl_parse_timeout(ctl, optarg);
    case OPTION_PRIORITY:
        ctl->priority = optarg;
        break;
    case OPTION_CACHE:
        return ctl_add_cache(ctl, optarg);
    case OPTION_STOP:
        return ctl_add_text(&ctl->stops, &ctl->n_stops, optarg, "stop");
    case OPTION_BAD_WORD:
        return ctl_add_text(&ctl->bad_words, &ctl->n_bad_words, optarg, "bad-word");
    case OPTION_IGNORE_EOS:
        ctl->ignore_eos = true;
        break;
    case OPTION_RAW:
        ctl->raw = true;
        break;
    case OPTION_IDS:
        ctl->ids = true;
        break;
    case OPTION_STATS:
        ctl->stats = true;
        break;
    case OPTION_SPOOL:
        ctl->spool = optarg;
        break;
    case OPTION_SPECIAL:
        ctl->special = true;
        break;
    case OPTION_DURATION:
        return ctl_parse_seconds(optarg, &ctl->duration);
    case OPTION_NPY:
        ctl->npy = optarg;
        break;
    case OPTION_KEEP:
        ctl->keep = optarg;
        break;
    case OPTION_DEPTH:
        return ctl_parse_depth(ctl, optarg);
    default:
        return CTL_EXIT_USAGE;
    }
    return CTL_EXIT_DONE;
}

static void ctl_clear(Ctl *ctl)
{
    ctl->bus = sd_bus_flush_close_unref(ctl->bus);
    json_decref(ctl->finished);
    free(ctl->cache);
    free(ctl->sampling);
    free(ctl->inputs);
    free(ctl->stops);
    free(ctl->bad_words);
}

static int ctl_unknown_verb(const char *verb)
{
    const char *names[N_ELEMENTS(ctl_verbs)], *nearest;

    for (size_t i = 0; i < N_ELEMENTS(ctl_verbs); i++)
        names[i] = ctl_verbs[i].name;
    nearest = config_nearest(verb, names, N_ELEMENTS(names));
    if (nearest)
        return ctl_fail(CTL_EXIT_USAGE, "unknown verb '%s'; did you mean '%s'?", verb, nearest);
    return ctl_fail(CTL_EXIT_USAGE, "unknown verb '%s' (see leat --help)", verb);
}

static int ctl_run(Ctl *ctl, int argc, char **argv)
{
    const char *verb;
    int option, r = CTL_EXIT_DONE;

    /* Options may stand anywhere up to "--"; the verb is the first word that is none. */
    while (!r && (option = getopt_long(argc, argv, "m:qf:s:i:o:h", ctl_options, NULL)) >= 0) {
        if (option == 'h') {
            ctl_help();
            return CTL_EXIT_DONE;
        }
        if (option == OPTION_VERSION) {
            (void)puts("leat " LEAT_VERSION);
            return CTL_EXIT_DONE;
        }
        r = ctl_parse_option(ctl, option);
    }
    if (r)
        return r;
    if (optind == argc)
        return ctl_fail(CTL_EXIT_USAGE, "a verb is missing (see leat --help)");
    verb = argv[optind];
    ctl->arguments = argv + optind + 1;
    ctl->n_arguments = argc - optind - 1;
    if (!strcmp(verb, "eval") && ctl->ids && ctl->n_arguments) {
        ctl->ids_file = ctl->arguments[0];
        ctl->arguments++;
        ctl->n_arguments--;
    }
    for (size_t i = 0; i < N_ELEMENTS(ctl_verbs); i++)
        if (!strcmp(ctl_verbs[i].name, verb))
            return ctl_verbs[i].run(ctl);
    return ctl_unknown_verb(verb);
}

int main(int argc, char **argv)
{
    Ctl ctl = {.timeout_usec = 25000000};
    int r;

    (void)setlocale(LC_CTYPE, "");
    r = ctl_run(&ctl, argc, argv);
    ctl_clear(&ctl);
    return r;
}
