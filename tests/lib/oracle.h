#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What Transformers said (tests/parity/make-oracle.py), and the comparison of a model of ours with it.
 *
 * The oracle's own ids are always what is fed on, so a place where two logits tie (closer than 1e-3 of the largest; the fixture lists
 * them) is one step that may differ, not the end of the comparison.
 */

#include "daemon/model/model.h"

#define ORACLE_TOP     16
#define ORACLE_COLUMNS 64
#define ORACLE_TOLERANCE 1e-3 /* of the largest logit of the row */

typedef struct OracleRecord {
    uint32_t position;
    int32_t top_ids[ORACLE_TOP];
    double top_values[ORACLE_TOP], columns[ORACLE_COLUMNS], max_abs, logsumexp;
} OracleRecord;

typedef struct OraclePrompt {
    char name[32];
    int32_t *ids; /* prompt, then greedy ids; owned */
    uint32_t n_prompt, n_greedy;
    int32_t *tie; /* (n_greedy): the other id of a tie, or -1; owned */
    OracleRecord *records; /* by position; owned */
    size_t n_records;
} OraclePrompt;

typedef struct Oracle {
    uint32_t columns[ORACLE_COLUMNS];
    OraclePrompt *prompts;
    size_t n_prompts;
} Oracle;

/* Folder of the fixtures: LEAT_TEST_DATA, or tests/data. */
const char *test_data_folder(void);
/* Any defect of the fixture ends the program. */
Oracle *oracle_load(const char *name);
Oracle *oracle_free(Oracle *oracle);
DEFINE_CLEANUP(Oracle, oracle_free)

typedef struct OracleResult {
    uint32_t n_compared, n_ids_wrong, n_ties_taken, n_logits_wrong;
    double worst; /* largest difference of a logit, as a share of the row's largest */
} OracleResult;
/* Runs a prompt and @n_greedy further tokens under @policy; the first few differences are printed.  0, or the error of the model. */
int oracle_compare(const Oracle *oracle, const OraclePrompt *prompt, uint32_t n_greedy, Model *model, KvStore *store, OracleResult *ret);
