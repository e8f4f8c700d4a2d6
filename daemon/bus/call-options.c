/* SPDX-License-Identifier: Apache-2.0 */
/* Options of a method call. */

#include "daemon/bus/call-options.h"
#include "daemon/bus/bus-error.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#define CALL_MAX_STOPS      16
#define CALL_MAX_STOP_BYTES 256
#define CALL_MAX_BAD_WORDS  256
/* More than any context; bounds what one message can make us keep. */
#define CALL_MAX_IDS        (1 << 22)

typedef struct CallKey CallKey;
struct CallKey {
    const char *name, *type;
    int (*read)(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error);
    size_t offset;       /* of the member that receives it */
    double least, most;  /* of numbers */
};

static void *call_key_place(const CallKey *key, CallOptions *options)
{
    return (char *)options + key->offset;
}

static int call_read_u32(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    uint32_t value;
    int r = sd_bus_message_read_basic(m, 'u', &value);

    if (r < 0)
        return error_trace(r);
    if (key->least > 0 && (value < key->least || value > key->most))
        return bus_error_invalid(error, "option %s: %" PRIu32 " is not from %.0f to %.0f", key->name, value, key->least, key->most);
    if (value > key->most)
        return bus_error_invalid(error, "option %s: %" PRIu32 " is more than %.0f", key->name, value, key->most);
    *(uint32_t *)call_key_place(key, options) = value;
    return 0;
}

static int call_read_u64(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    (void)error;
    return sd_bus_message_read_basic(m, 't', call_key_place(key, options));
}

static int call_read_bool(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    int value, r = sd_bus_message_read_basic(m, 'b', &value);

    (void)error;
    if (r < 0)
        return error_trace(r);
    *(bool *)call_key_place(key, options) = value;
    return 0;
}

/* NaN fails both comparisons. */
static int call_read_float(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    double value;
    int r = sd_bus_message_read_basic(m, 'd', &value);

    if (r < 0)
        return error_trace(r);
    if (!(value >= key->least && value <= key->most))
        return bus_error_invalid(error, "option %s: %g is not from %g to %g", key->name, value, key->least, key->most);
    *(float *)call_key_place(key, options) = (float)value;
    return 0;
}

/* At most @most strings of 1 to @most_bytes bytes into an array of our own; what was read so far is there on failure, too. */
static int call_read_strings(const CallKey *key, sd_bus_message *m, size_t most, size_t most_bytes, const char *what, const char ***ret,
                             size_t *ret_n, sd_bus_error *error)
{
    const char **strings = calloc(most, sizeof(*strings)), *string;
    int r;

    if (!strings)
        return error_origin(-ENOMEM);
    *ret = strings;
    if ((r = sd_bus_message_enter_container(m, 'a', "s")) < 0)
        return error_trace(r);
    while ((r = sd_bus_message_read_basic(m, 's', &string)) > 0) {
        size_t n = strlen(string);

        if (n == 0 || n > most_bytes)
            return bus_error_invalid(error, "option %s: a %s has 1 to %zu bytes, not %zu", key->name, what, most_bytes, n);
        if (*ret_n == most)
            return bus_error_invalid(error, "option %s: at most %zu strings", key->name, most);
        if (!(strings[*ret_n] = strdup(string)))
            return error_origin(-ENOMEM);
        (*ret_n)++;
    }
    return r < 0 ? error_trace(r) : sd_bus_message_exit_container(m);
}

static int call_read_stop(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    return call_read_strings(key, m, CALL_MAX_STOPS, CALL_MAX_STOP_BYTES, "stop string", &options->sampling.stop, &options->sampling.n_stop,
                             error);
}

static int call_read_bad_words(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    return call_read_strings(key, m, CALL_MAX_BAD_WORDS, CALL_MAX_STOP_BYTES, "text", &options->sampling.bad_words,
                             &options->sampling.n_bad_words, error);
}

static int call_read_prompts(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    int r = call_read_strings(key, m, ENGINE_MAX_PROMPTS, INT32_MAX, "prompt", &options->prompts, &options->n_prompts, error);

    return r >= 0 && options->n_prompts == 0 ? bus_error_invalid(error, "option %s: at least one prompt", key->name) : r;
}

static int call_read_word(const CallKey *key, sd_bus_message *m, const char *const *words, size_t n_words, sd_bus_error *error)
{
    char known[128] = "";
    const char *word;
    int r = sd_bus_message_read_basic(m, 's', &word);

    if (r < 0)
        return error_trace(r);
    for (size_t i = 0; i < n_words; i++) {
        if (strcmp(word, words[i]) == 0)
            return (int)i;
        (void)snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", i ? ", " : "", words[i]);
    }
    return bus_error_invalid(error, "option %s: \"%.64s\" is none of: %s", key->name, word, known);
}

static const char *const priority_names[ENGINE_PRIORITY_X_MAX] = {
    [ENGINE_PRIORITY_INTERACTIVE] = "interactive",
    [ENGINE_PRIORITY_NORMAL] = "normal",
    [ENGINE_PRIORITY_BACKGROUND] = "background",
};

const char *engine_priority_to_name(EnginePriority priority)
{
    assert(priority >= 0 && priority < ENGINE_PRIORITY_X_MAX);
    return priority_names[priority];
}

static int call_read_priority(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    int r = call_read_word(key, m, priority_names, N_ELEMENTS(priority_names), error);

    if (r < 0)
        return r;
    options->priority = (EnginePriority)r;
    return 0;
}

static int call_read_early_stopping(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    static const char *const names[BEAM_EARLY_X_MAX] = {
        [BEAM_EARLY_FALSE] = "false", [BEAM_EARLY_TRUE] = "true", [BEAM_EARLY_NEVER] = "never"};
    int r = call_read_word(key, m, names, N_ELEMENTS(names), error);

    if (r < 0)
        return r;
    options->sampling.early_stopping = (BeamEarly)r;
    return 0;
}

static int call_read_length_penalty(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    double value;
    int r = sd_bus_message_read_basic(m, 'd', &value);

    if (r < 0)
        return error_trace(r);
    if (!(value >= key->least && value <= key->most))
        return bus_error_invalid(error, "option %s: %g is not from %g to %g", key->name, value, key->least, key->most);
    options->sampling.length_penalty = value;
    return 0;
}

static int call_read_ids_format(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    static const char *const names[CALL_IDS_X_MAX] = {[CALL_IDS_AUTO] = "auto", [CALL_IDS_TEXT] = "text", [CALL_IDS_INT32] = "int32"};
    int r = call_read_word(key, m, names, N_ELEMENTS(names), error);

    if (r < 0)
        return r;
    options->ids_format = (CallIdsFormat)r;
    return 0;
}

static int call_read_ids(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    const void *ids;
    size_t n_bytes;
    int r = sd_bus_message_read_array(m, 'i', &ids, &n_bytes);

    if (r < 0)
        return error_trace(r);
    if (n_bytes == 0)
        return bus_error_invalid(error, "option %s: at least one id", key->name);
    if (n_bytes / sizeof(int32_t) > CALL_MAX_IDS)
        return bus_error_invalid(error, "option %s: %zu ids are more than %d", key->name, n_bytes / sizeof(int32_t), CALL_MAX_IDS);
    if (!(options->ids = malloc(n_bytes)))
        return error_origin(-ENOMEM);
    memcpy(options->ids, ids, n_bytes);
    options->n_ids = n_bytes / sizeof(int32_t);
    for (size_t i = 0; i < options->n_ids; i++)
        if (options->ids[i] < 0)
            return bus_error_invalid(error, "option %s: element %zu is %" PRId32, key->name, i, options->ids[i]);
    return 0;
}

static int call_read_fd(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    int fd, r = sd_bus_message_read_basic(m, 'h', &fd);

    (void)key;
    (void)error;
    if (r < 0)
        return error_trace(r);
    /* The message owns its descriptors and goes away before we have read. */
    options->prompt_fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    return options->prompt_fd < 0 ? error_origin(-errno) : 0;
}

/* One value of the cache's a{sv} as config_cache_set() reads it; a basic variant of any type. */
static int call_read_cache_value(const CallKey *key, const char *name, sd_bus_message *m, char *buffer, size_t size, sd_bus_error *error)
{
    union {
        const char *s;
        uint32_t u;
        int32_t i;
        uint64_t t;
        int64_t x;
        double d;
        int b;
    } value;
    const char *contents;
    char type;
    int r = sd_bus_message_peek_type(m, NULL, &contents);

    if (r < 0)
        return error_trace(r);
    type = contents[0];
    if (contents[1] || !strchr("suitxdb", type))
        return bus_error_invalid(error, "option %s: cache key '%.64s' has type %.32s, not a text, number or boolean", key->name, name, contents);
    if ((r = sd_bus_message_enter_container(m, 'v', contents)) < 0 || (r = sd_bus_message_read_basic(m, type, &value)) < 0)
        return error_trace(r);
    if (type == 's' && strlen(value.s) >= size)
        return bus_error_invalid(error, "option %s: key %.64s has a text of %zu bytes, at most %zu", key->name, name, strlen(value.s), size - 1);
    if (type == 's')
        (void)snprintf(buffer, size, "%s", value.s);
    else if (type == 'u')
        (void)snprintf(buffer, size, "%" PRIu32, value.u);
    else if (type == 'i')
        (void)snprintf(buffer, size, "%" PRId32, value.i);
    else if (type == 't')
        (void)snprintf(buffer, size, "%" PRIu64, value.t);
    else if (type == 'x')
        (void)snprintf(buffer, size, "%" PRId64, value.x);
    else if (type == 'd')
        (void)snprintf(buffer, size, "%g", value.d);
    else
        (void)snprintf(buffer, size, "%s", value.b ? "true" : "false");
    return sd_bus_message_exit_container(m);
}

#define CALL_MAX_CACHE_KEYS 64

static int call_read_cache(const CallKey *key, sd_bus_message *m, CallOptions *options, sd_bus_error *error)
{
    const char *names[CALL_MAX_CACHE_KEYS]; /* of the message */
    size_t n_names = 0;
    int r = sd_bus_message_enter_container(m, 'a', "{sv}");

    if (r < 0)
        return error_trace(r);
    while ((r = sd_bus_message_enter_container(m, 'e', "sv")) > 0) {
        ErrorDetail detail = ERROR_DETAIL_NULL;
        char value[KV_LAYER_BITS_TEXT];
        const char *name;

        if ((r = sd_bus_message_read_basic(m, 's', &name)) < 0)
            return error_trace(r);
        if ((r = call_read_cache_value(key, name, m, value, sizeof(value), error)) < 0)
            return r;
        if ((r = config_cache_set(&options->cache, name, value, &detail)) != 0)
            return bus_error_invalid(error, "option %s: %s", key->name, detail.text[0] ? detail.text : "invalid");
        for (size_t i = 0; i < n_names; i++)
            if (config_cache_same_key(names[i], name))
                return bus_error_invalid(error, "option %s: cache key '%s' is given twice", key->name, name);
        names[n_names++] = name; /* all are known and none comes twice: they cannot be too many */
        if ((r = sd_bus_message_exit_container(m)) < 0)
            return error_trace(r);
    }
    return r < 0 ? error_trace(r) : sd_bus_message_exit_container(m);
}

#define MEMBER(member) offsetof(CallOptions, member)

/* The ranges are those of the YAML keys of the same names. */
static const CallKey call_keys[CALL_OPTION_X_MAX] = {
    [CALL_OPTION_MAX_TOKENS] = {"max-tokens", "u", call_read_u32, MEMBER(sampling.max_tokens), 0, UINT32_MAX},
    [CALL_OPTION_TEMPERATURE] = {"temperature", "d", call_read_float, MEMBER(sampling.temperature), 0, 100},
    [CALL_OPTION_TOP_K] = {"top-k", "u", call_read_u32, MEMBER(sampling.top_k), 0, UINT32_MAX},
    [CALL_OPTION_TOP_P] = {"top-p", "d", call_read_float, MEMBER(sampling.top_p), 0, 1},
    [CALL_OPTION_MIN_P] = {"min-p", "d", call_read_float, MEMBER(sampling.min_p), 0, 1},
    [CALL_OPTION_REPEAT_PENALTY] = {"repeat-penalty", "d", call_read_float, MEMBER(sampling.repeat_penalty), 0.01, 100},
    [CALL_OPTION_SEED] = {"seed", "t", call_read_u64, MEMBER(sampling.seed), 0, 0},
    [CALL_OPTION_STOP] = {"stop", "as", call_read_stop, 0, 0, 0},
    [CALL_OPTION_IGNORE_EOS] = {"ignore-eos", "b", call_read_bool, MEMBER(sampling.ignore_eos), 0, 0},
    [CALL_OPTION_MIN_TOKENS] = {"min-tokens", "u", call_read_u32, MEMBER(sampling.min_tokens), 0, UINT32_MAX},
    [CALL_OPTION_NO_REPEAT_NGRAM] = {"no-repeat-ngram", "u", call_read_u32, MEMBER(sampling.no_repeat_ngram), 0, UINT32_MAX},
    [CALL_OPTION_BAD_WORDS] = {"bad-words", "as", call_read_bad_words, 0, 0, 0},
    [CALL_OPTION_DO_SAMPLE] = {"do-sample", "b", call_read_bool, MEMBER(do_sample), 0, 0},
    [CALL_OPTION_NUM_BEAMS] = {"num-beams", "u", call_read_u32, MEMBER(sampling.num_beams), 1, ENGINE_MAX_BEAMS},
    [CALL_OPTION_NUM_RETURN_SEQUENCES] = {"num-return-sequences", "u", call_read_u32, MEMBER(sampling.num_return_sequences), 1,
                                          ENGINE_MAX_RETURN},
    [CALL_OPTION_EARLY_STOPPING] = {"early-stopping", "s", call_read_early_stopping, 0, 0, 0},
    [CALL_OPTION_LENGTH_PENALTY] = {"length-penalty", "d", call_read_length_penalty, 0, -100, 100},
    [CALL_OPTION_PROMPTS] = {"prompts", "as", call_read_prompts, 0, 0, 0},
    [CALL_OPTION_PRIORITY] = {"priority", "s", call_read_priority, 0, 0, 0},
    [CALL_OPTION_DEADLINE_USEC] = {"deadline-usec", "t", call_read_u64, MEMBER(deadline_usec), 0, 0},
    [CALL_OPTION_CACHE] = {"cache", "a{sv}", call_read_cache, 0, 0, 0},
    [CALL_OPTION_RAW] = {"raw", "b", call_read_bool, MEMBER(raw), 0, 0},
    [CALL_OPTION_IDS] = {"ids", "ai", call_read_ids, 0, 0, 0},
    [CALL_OPTION_WANT_IDS] = {"want-ids", "b", call_read_bool, MEMBER(want_ids), 0, 0},
    [CALL_OPTION_PROMPT_FD] = {"prompt-fd", "h", call_read_fd, 0, 0, 0},
    [CALL_OPTION_PARSE_SPECIAL] = {"parse-special", "b", call_read_bool, MEMBER(parse_special), 0, 0},
    [CALL_OPTION_IDS_FORMAT] = {"ids-format", "s", call_read_ids_format, 0, 0, 0},
    [CALL_OPTION_DEPTH] = {"depth", "u", call_read_u32, MEMBER(depth), 0, UINT32_MAX},
};

static void call_free_strings(const char **strings, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free((void *)(uintptr_t)strings[i]);
    free(strings);
}

void call_options_clear(CallOptions *options)
{
    call_free_strings(options->sampling.stop, options->sampling.n_stop);
    call_free_strings(options->sampling.bad_words, options->sampling.n_bad_words);
    call_free_strings(options->prompts, options->n_prompts);
    free(options->ids);
    if (options->prompt_fd >= 0)
        (void)close(options->prompt_fd);
    *options = CALL_OPTIONS_NULL;
}

static int call_unknown_key(const char *name, uint64_t allowed, sd_bus_error *error)
{
    const char *known[CALL_OPTION_X_MAX], *nearest;
    char list[512] = "";
    size_t n = 0, used = 0;

    for (size_t i = 0; i < N_ELEMENTS(call_keys); i++)
        if (allowed & CALL_OPTION_BIT(i)) {
            known[n++] = call_keys[i].name;
            if (used < sizeof(list))
                used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", n > 1 ? ", " : "", call_keys[i].name);
        }
    nearest = config_nearest(name, known, n);
    if (nearest)
        return bus_error_invalid(error, "unknown option \"%.64s\"; did you mean %s?", name, nearest);
    if (n == 0)
        return bus_error_invalid(error, "unknown option \"%.64s\"; this method takes none", name);
    return bus_error_invalid(error, "unknown option \"%.64s\"; known are %s", name, list);
}

/* One entry {sv}, entered. */
static int call_read_entry(sd_bus_message *m, uint64_t allowed, CallOptions *options, sd_bus_error *error)
{
    const char *name, *contents;
    int r = sd_bus_message_read_basic(m, 's', &name);

    if (r < 0 || (r = sd_bus_message_peek_type(m, NULL, &contents)) < 0)
        return error_trace(r);
    for (size_t i = 0; i < N_ELEMENTS(call_keys); i++) {
        const CallKey *key = &call_keys[i];

        if (strcmp(name, key->name) != 0 || !(allowed & CALL_OPTION_BIT(i)))
            continue;
        if (strcmp(contents, key->type) != 0)
            return bus_error_invalid(error, "option %s has type %.32s, expected %s", key->name, contents, key->type);
        if (options->given & CALL_OPTION_BIT(i))
            return bus_error_invalid(error, "option %s is given twice", key->name);
        options->given |= CALL_OPTION_BIT(i);
        if ((r = sd_bus_message_enter_container(m, 'v', contents)) < 0 || (r = key->read(key, m, options, error)) < 0)
            return error_trace(r);
        return sd_bus_message_exit_container(m);
    }
    return call_unknown_key(name, allowed, error);
}

int call_options_read(sd_bus_message *m, uint64_t allowed, CallOptions *ret, sd_bus_error *error)
{
    CallOptions options = CALL_OPTIONS_NULL;
    int r = sd_bus_message_enter_container(m, 'a', "{sv}");

    while (r >= 0 && (r = sd_bus_message_enter_container(m, 'e', "sv")) > 0) {
        r = call_read_entry(m, allowed, &options, error);
        if (r >= 0)
            r = sd_bus_message_exit_container(m);
    }
    if (r >= 0)
        r = sd_bus_message_exit_container(m);
    if (r < 0) {
        call_options_clear(&options);
        return error_trace(r);
    }
    *ret = options;
    return 0;
}

int call_options_read_none(sd_bus_message *m, sd_bus_error *error)
{
    CallOptions options;

    return call_options_read(m, CALL_OPTIONS_NONE, &options, error); /* nothing to clear: no key was taken */
}

void call_options_sampling(const CallOptions *options, EngineSampling *sampling)
{
    const EngineSampling *given = &options->sampling;

    if (call_options_have(options, CALL_OPTION_MAX_TOKENS))
        sampling->max_tokens = given->max_tokens;
    if (call_options_have(options, CALL_OPTION_TEMPERATURE))
        sampling->temperature = given->temperature;
    if (call_options_have(options, CALL_OPTION_TOP_K))
        sampling->top_k = given->top_k;
    if (call_options_have(options, CALL_OPTION_TOP_P))
        sampling->top_p = given->top_p;
    if (call_options_have(options, CALL_OPTION_MIN_P))
        sampling->min_p = given->min_p;
    if (call_options_have(options, CALL_OPTION_REPEAT_PENALTY))
        sampling->repeat_penalty = given->repeat_penalty;
    if (call_options_have(options, CALL_OPTION_SEED))
        sampling->seed = given->seed;
    if (call_options_have(options, CALL_OPTION_IGNORE_EOS))
        sampling->ignore_eos = given->ignore_eos;
    if (call_options_have(options, CALL_OPTION_STOP)) {
        sampling->stop = given->stop;
        sampling->n_stop = given->n_stop;
    }
    if (call_options_have(options, CALL_OPTION_MIN_TOKENS))
        sampling->min_tokens = given->min_tokens;
    if (call_options_have(options, CALL_OPTION_NO_REPEAT_NGRAM))
        sampling->no_repeat_ngram = given->no_repeat_ngram;
    if (call_options_have(options, CALL_OPTION_BAD_WORDS)) {
        sampling->bad_words = given->bad_words;
        sampling->n_bad_words = given->n_bad_words;
    }
    if (call_options_have(options, CALL_OPTION_DO_SAMPLE))
        sampling->draw = options->do_sample ? ENGINE_DRAW_YES : ENGINE_DRAW_NO;
    sampling->num_beams = given->num_beams;
    sampling->num_return_sequences = given->num_return_sequences;
    sampling->early_stopping = given->early_stopping;
    sampling->length_penalty = call_options_have(options, CALL_OPTION_LENGTH_PENALTY) ? given->length_penalty : 1;
}
