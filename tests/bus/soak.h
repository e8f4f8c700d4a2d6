#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many clients on one daemon (test-bus-soak): what they share.  The test is one process that reloads, unloads, kills and counts; its clients
 * are itself, started again, each with a connection, a seed and this table, which lies in a memory file.
 */

#include "tests/bus/harness.h"

#define SOAK_MODELS  2
#define SOAK_FORMS   2  /* f16 and coded: answers are one for each form, wherever the cache is and however it grows */
#define SOAK_TALKS   12
#define SOAK_PROMPT  200
#define SOAK_ANSWER  40
#define SOAK_OTHERS  4  /* of each kind */

/* Kinds of question whose answer is many ids: kept as a hash. */
typedef enum SoakOther { SOAK_DRAWN, SOAK_BEAMS, SOAK_DRAWN_BEAMS, SOAK_SEVERAL, SOAK_LOGITS, SOAK_OTHER_X_MAX } SoakOther;

/* The first answers, which all later ones must equal. */
typedef struct SoakTable {
    uint64_t end_usec;      /* of CLOCK_MONOTONIC: clients begin nothing new after it */
    uint32_t n_prompt[SOAK_TALKS];
    int32_t prompts[SOAK_TALKS][SOAK_PROMPT];
    int32_t answers[SOAK_MODELS][SOAK_FORMS][SOAK_TALKS][SOAK_ANSWER];
    uint64_t others[SOAK_OTHER_X_MAX][SOAK_MODELS][SOAK_FORMS][SOAK_OTHERS];
    uint64_t n_done[32], n_refused; /* how often each action was done; added to by all */
} SoakTable;

/* A way to keep the cache. */
typedef struct SoakPolicy {
    const char *strategy;
    unsigned form;
} SoakPolicy;
extern const SoakPolicy soak_policies[];
extern const size_t soak_n_policies;
extern const char *const soak_models[SOAK_MODELS];

uint64_t soak_now_usec(void);
uint64_t soak_random(uint64_t *seed, uint64_t n);
/* Option ids. */
void soak_append_ids(sd_bus_message *m, const int32_t *ids, size_t n_ids);
/* Gives @m the cache options of a policy; @m is inside an a{sv}. */
void soak_append_policy(sd_bus_message *m, const SoakPolicy *policy);

/* ---- questions (soak-ask.c): the reply, or NULL with *ret_error (a bus error's name, the caller frees) ---------------------------- */

sd_bus_message *soak_ask(sd_bus *bus, unsigned model, const SoakPolicy *policy, const int32_t *ids, size_t n_ids, uint32_t n_answer,
                         uint64_t deadline_usec, char **ret_error);
/* Ids of an Ask's answer into @ret, at most @n; how many there were. */
size_t soak_read_ids(sd_bus_message *reply, int32_t *ret, size_t n);
/* Asks question @i of a kind and hashes what was answered; false with *ret_error. */
bool soak_other(sd_bus *bus, const SoakTable *table, SoakOther kind, unsigned i, unsigned model, const SoakPolicy *policy, uint64_t *ret_hash,
                char **ret_error);

/* ---- a client (soak-client.c) ------------------------------------------------------------------------------------------------------ */

/* To be called first by main(): "soak-client ADDRESS SEED", the table's file is descriptor 3.  -1: this is no such run. */
int soak_client(int argc, char **argv);
/* What n_done[i] counts; NULL after the last. */
const char *soak_action(size_t i);
