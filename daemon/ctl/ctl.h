#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * leat, the command: verbs over the daemon's bus interface.  Text goes to stdout, progress and errors to stderr.
 *
 * Everything that comes from the bus is turned into JSON values once (ctl_message_read), and tables are printed from those, so that
 * --json shows exactly what the tables were made of.
 */

#include "quant/base/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <systemd/sd-bus.h>

#define CTL_BUS_NAME   "org.leat.Inference1"
#define CTL_ROOT       "/org/leat/Inference1"
#define CTL_MANAGER    "org.leat.Inference1.Manager"
#define CTL_MODEL      "org.leat.Inference1.Model"
#define CTL_SESSION    "org.leat.Inference1.Session"
#define CTL_JOB        "org.leat.Inference1.Job"
#define CTL_DEVICE     "org.leat.Inference1.Device"
#define CTL_SERVICE    "org.leat.Inference1.Service"
#define CTL_PROPERTIES "org.freedesktop.DBus.Properties"

/* Exit codes of the command (its man page). */
typedef enum CtlExit {
    CTL_EXIT_DONE = 0,
    CTL_EXIT_FAILED = 1,
    CTL_EXIT_USAGE = 2,
    CTL_EXIT_UNAVAILABLE = 3,
    CTL_EXIT_REFUSED = 4,
    CTL_EXIT_CONFIG = 5,
    CTL_EXIT_INTERRUPTED = 130,
} CtlExit;

typedef struct CtlPair {
    const char *key, *value; /* borrowed, live until exit */
} CtlPair;

/* One invocation: what was on the command line. */
typedef struct Ctl {
    sd_bus *bus;
    bool user, system_bus, json, quiet, no_legend;
    uint64_t timeout_usec;
    char **arguments; /* what follows the verb and the options */
    int n_arguments;

    const char *model, *system, *keep, *file, *priority, *npy, *output, *spool, *ids_file;
    bool raw, ids, ignore_eos, stats, special, has_depth;
    uint32_t depth; /* estimate */
    double duration;
    CtlPair *cache, *sampling, *inputs;
    size_t n_cache, n_sampling, n_inputs;
    const char **stops;
    size_t n_stops;
    const char *beams, *n_return, *early_stopping, *length_penalty, *prompts_file; /* as given, or NULL */
    bool sample;
    const char **bad_words;
    size_t n_bad_words;

    json_t *finished; /* job path -> {"result", "usage"}: Finished signals seen (ctl_watch_jobs) */
} Ctl;

typedef int (*CtlVerb)(Ctl *ctl); /* returns a CtlExit */

/* ---- ctl-bus.c: every function returns a CtlExit and has said on stderr what is wrong ----------------------------------------- */

int ctl_fail(int exit_code, const char *format, ...) _printf_(2, 3); /* prints "leat: …", returns exit_code */
int ctl_connect(Ctl *ctl);
int ctl_exit_of_error_name(const char *name);
int ctl_new_call(Ctl *ctl, const char *path, const char *interface, const char *method, sd_bus_message **ret);
/* Sends the call; @appended is the result of the last append (negative errno: the call could not be built). */
int ctl_call(Ctl *ctl, sd_bus_message *call, int appended, sd_bus_message **ret_reply);
/* The cache block as one entry of an open a{sv}; nothing when there is none.  Negative errno on failure. */
int ctl_append_cache(Ctl *ctl, sd_bus_message *call);
/* A whole a{sv} that holds the cache block only. */
int ctl_append_cache_options(Ctl *ctl, sd_bus_message *call);
int ctl_get_all(Ctl *ctl, const char *path, const char *interface, json_t **ret);
/* Objects under an ObjectManager: list of {"Path", properties…} of @interface. */
int ctl_get_objects(Ctl *ctl, const char *manager_path, const char *interface, json_t **ret);
/* The object path of --model (the first configured one when none was given). */
int ctl_model_path(Ctl *ctl, char **ret_path);
/* Finished signals from here on are kept; ctl_wait_job() returns when that job's is there. */
int ctl_watch_jobs(Ctl *ctl);
int ctl_wait_job(Ctl *ctl, const char *job_path, json_t **ret_usage);

/* ---- ctl-value.c -------------------------------------------------------------------------------------------------------------- */

/* The next complete value of a message as JSON (a{sv} and the like become objects); NULL at the end or on error. */
json_t *ctl_message_read(sd_bus_message *message);
void ctl_print_json(const json_t *value);
/* One row per key for people: sizes with units, times in seconds. */
void ctl_print_facts(FILE *file, const json_t *object, const char *indent);
void ctl_format_bytes(uint64_t bytes, char ret[static 32]); /* "12.3 MiB" */

/* ---- ctl-stream.c --------------------------------------------------------------------------------------------------------------- */

typedef struct CtlAnswer {
    char *text;
    size_t length;
    json_t *ids;   /* array, or NULL */
    json_t *usage; /* object, or NULL */
    json_t *sequences; /* array, or NULL: all answers when there are several */
    char *error_name, *error_text;
    bool interrupted;
} CtlAnswer;
#define CTL_ANSWER_NULL ((CtlAnswer){.text = NULL})
void ctl_answer_clear(CtlAnswer *answer);
/* Reads a stream to its end; text is written to @live as it comes (NULL: not).  The first Ctrl-C cancels the job, the second leaves. */
int ctl_stream_read(Ctl *ctl, int fd, const char *job_path, FILE *live, CtlAnswer *ret);
/* Prints what the options ask for; returns the exit code of the answer. */
int ctl_answer_print(Ctl *ctl, const CtlAnswer *answer, bool streamed);

/* ---- ctl-several.c: several prompts or several answers ------------------------------------------------------------------------- */

/* Whether the options ask for that. */
bool ctl_wants_several(const Ctl *ctl);
int ctl_ask_several(Ctl *ctl);
void ctl_print_sequences(const Ctl *ctl, const json_t *sequences);

/* ---- ctl-prompt.c ----------------------------------------------------------------------------------------------------------------- */

/* One entry KEY: as of an open a{sv}. */
int ctl_append_strings(sd_bus_message *call, const char *key, const char *const *strings, size_t n);
/* The generation options of the command line as entries of an open a{sv}; negative errno on failure. */
int ctl_append_generation_options(Ctl *ctl, sd_bus_message *call);
/* Reads a whole file ("-": stdin), NUL-terminated. */
int ctl_read_file(const char *path, char **ret_text, size_t *ret_length);
/* The prompt: arguments joined by blanks, then --file, or stdin when there is neither; a descriptor that can be read from its start. */
int ctl_read_prompt(Ctl *ctl, char **ret_text, size_t *ret_length);
/* A memfd with the text, at its start. */
int ctl_text_fd(const char *text, size_t length, int *ret_fd);

/* ---- verb-ask.c --------------------------------------------------------------------------------------------------------------------- */

/* Puts --instructions in front of a conversation. */
int ctl_add_instructions(const Ctl *ctl, json_t *messages);
int ctl_open_session(Ctl *ctl, char **ret_path);
/* Starts a generation; @prompt_fd is passed on when it is not -1.  *ret_fd is the caller's. */
int ctl_generate(Ctl *ctl, const char *session, const json_t *messages, int prompt_fd, char **ret_job, int *ret_fd);

/* ---- verbs -------------------------------------------------------------------------------------------------------------------------- */

int ctl_verb_ask(Ctl *ctl);
int ctl_verb_chat(Ctl *ctl);
int ctl_verb_run(Ctl *ctl);
int ctl_verb_status(Ctl *ctl);
int ctl_verb_ps(Ctl *ctl);
int ctl_verb_services(Ctl *ctl);
int ctl_verb_models(Ctl *ctl);
int ctl_verb_load(Ctl *ctl);
int ctl_verb_unload(Ctl *ctl);
int ctl_verb_tokenize(Ctl *ctl);
int ctl_verb_estimate(Ctl *ctl);
int ctl_verb_eval(Ctl *ctl);
int ctl_verb_trace(Ctl *ctl);
int ctl_verb_config(Ctl *ctl);
int ctl_verb_reload(Ctl *ctl);
