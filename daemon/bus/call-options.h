#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The a{sv} that ends every method: one table of keys, each with its type and range. */

#include "daemon/config/config.h"

#include <systemd/sd-bus.h>

typedef enum CallOption {
    CALL_OPTION_MAX_TOKENS,
    CALL_OPTION_TEMPERATURE,
    CALL_OPTION_TOP_K,
    CALL_OPTION_TOP_P,
    CALL_OPTION_MIN_P,
    CALL_OPTION_REPEAT_PENALTY,
    CALL_OPTION_SEED,
    CALL_OPTION_STOP,
    CALL_OPTION_IGNORE_EOS,
    CALL_OPTION_MIN_TOKENS,
    CALL_OPTION_NO_REPEAT_NGRAM,
    CALL_OPTION_BAD_WORDS,
    CALL_OPTION_DO_SAMPLE,
    CALL_OPTION_NUM_BEAMS,
    CALL_OPTION_NUM_RETURN_SEQUENCES,
    CALL_OPTION_EARLY_STOPPING,
    CALL_OPTION_LENGTH_PENALTY,
    CALL_OPTION_PROMPTS,
    CALL_OPTION_PRIORITY,
    CALL_OPTION_DEADLINE_USEC,
    CALL_OPTION_CACHE,
    CALL_OPTION_RAW,
    CALL_OPTION_IDS,
    CALL_OPTION_WANT_IDS,
    CALL_OPTION_PROMPT_FD,
    CALL_OPTION_PARSE_SPECIAL,
    CALL_OPTION_IDS_FORMAT,
    CALL_OPTION_DEPTH,
    CALL_OPTION_X_MAX,
} CallOption;

/* Sets of keys that methods take. */
#define CALL_OPTION_BIT(option) (UINT64_C(1) << (option))
#define CALL_OPTIONS_NONE       UINT64_C(0)
#define CALL_OPTIONS_SAMPLING                                                                                                              \
    (CALL_OPTION_BIT(CALL_OPTION_MAX_TOKENS) | CALL_OPTION_BIT(CALL_OPTION_TEMPERATURE) | CALL_OPTION_BIT(CALL_OPTION_TOP_K) |            \
     CALL_OPTION_BIT(CALL_OPTION_TOP_P) | CALL_OPTION_BIT(CALL_OPTION_MIN_P) | CALL_OPTION_BIT(CALL_OPTION_REPEAT_PENALTY) |              \
     CALL_OPTION_BIT(CALL_OPTION_SEED) | CALL_OPTION_BIT(CALL_OPTION_STOP) | CALL_OPTION_BIT(CALL_OPTION_IGNORE_EOS) |                    \
     CALL_OPTION_BIT(CALL_OPTION_MIN_TOKENS) | CALL_OPTION_BIT(CALL_OPTION_NO_REPEAT_NGRAM) | CALL_OPTION_BIT(CALL_OPTION_BAD_WORDS) |    \
     CALL_OPTION_BIT(CALL_OPTION_DO_SAMPLE))
/* What gives several sequences; known to streams, too, which say why they refuse them. */
#define CALL_OPTIONS_SEVERAL                                                                                                               \
    (CALL_OPTION_BIT(CALL_OPTION_NUM_BEAMS) | CALL_OPTION_BIT(CALL_OPTION_NUM_RETURN_SEQUENCES) |                                         \
     CALL_OPTION_BIT(CALL_OPTION_EARLY_STOPPING) | CALL_OPTION_BIT(CALL_OPTION_LENGTH_PENALTY) | CALL_OPTION_BIT(CALL_OPTION_PROMPTS))
#define CALL_OPTIONS_RUN                                                                                                                   \
    (CALL_OPTIONS_SAMPLING | CALL_OPTIONS_SEVERAL | CALL_OPTION_BIT(CALL_OPTION_PRIORITY) | CALL_OPTION_BIT(CALL_OPTION_DEADLINE_USEC) |                         \
     CALL_OPTION_BIT(CALL_OPTION_WANT_IDS))
#define CALL_OPTIONS_PROMPT                                                                                                                \
    (CALL_OPTION_BIT(CALL_OPTION_RAW) | CALL_OPTION_BIT(CALL_OPTION_IDS) | CALL_OPTION_BIT(CALL_OPTION_PROMPT_FD))

typedef enum CallIdsFormat { CALL_IDS_AUTO, CALL_IDS_TEXT, CALL_IDS_INT32, CALL_IDS_X_MAX } CallIdsFormat;

typedef struct CallOptions {
    uint64_t given; /* CALL_OPTION_BIT of each key that was there */
    EngineSampling sampling; /* the given ones of CALL_OPTIONS_SAMPLING and _SEVERAL; stop and bad_words are owned */
    bool do_sample;
    const char **prompts; /* n_prompts, owned */
    size_t n_prompts;
    EnginePriority priority;
    uint64_t deadline_usec; /* from now; 0: none */
    ConfigCache cache;
    bool raw, want_ids, parse_special;
    int32_t *ids; /* owned */
    size_t n_ids;
    int prompt_fd; /* owned, or -1 */
    CallIdsFormat ids_format;
    uint32_t depth;
} CallOptions;
#define CALL_OPTIONS_NULL ((CallOptions){.priority = ENGINE_PRIORITY_NORMAL, .prompt_fd = -1})
void call_options_clear(CallOptions *options);

/* Reads the a{sv} at @m's place.  @allowed: the keys that this method knows.  Negative with InvalidArgs in @error (the text names the key,
 * the expected type or range) and nothing to clear. */
int call_options_read(sd_bus_message *m, uint64_t allowed, CallOptions *ret, sd_bus_error *error);
/* For methods that know none. */
int call_options_read_none(sd_bus_message *m, sd_bus_error *error);
static inline bool call_options_have(const CallOptions *options, CallOption option)
{
    return (options->given & CALL_OPTION_BIT(option)) != 0;
}
/* Puts the given sampling keys over @sampling, which borrows stop and bad_words from @options. */
void call_options_sampling(const CallOptions *options, EngineSampling *sampling);

const char *engine_priority_to_name(EnginePriority priority);
