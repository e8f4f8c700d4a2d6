/* SPDX-License-Identifier: Apache-2.0 */
/* Reading oracle fixtures and running a model beside them. */

#include "tests/lib/oracle.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#define PRINTED_AT_MOST 8

const char *test_data_folder(void)
{
    const char *folder = getenv("LEAT_TEST_DATA");

    return folder ? folder : "tests/data";
}

/* ---- reading ------------------------------------------------------------------------------------------------------------------- */

static void require(bool condition, const char *what)
{
    if (condition)
        return;
    print_error("oracle fixture: %s\n", what);
    abort();
}

static size_t read_numbers(const json_t *array, double *ret, size_t max)
{
    size_t n = json_array_size(array);

    require(json_is_array(array) && n <= max, "an array has the wrong length");
    for (size_t i = 0; i < n; i++)
        ret[i] = json_number_value(json_array_get(array, i));
    return n;
}

static void read_record(const json_t *json, OracleRecord *ret)
{
    double ids[ORACLE_TOP];

    ret->position = (uint32_t)json_integer_value(json_object_get(json, "position"));
    require(read_numbers(json_object_get(json, "top_ids"), ids, ORACLE_TOP) == ORACLE_TOP, "top_ids");
    require(read_numbers(json_object_get(json, "top_values"), ret->top_values, ORACLE_TOP) == ORACLE_TOP, "top_values");
    require(read_numbers(json_object_get(json, "columns"), ret->columns, ORACLE_COLUMNS) == ORACLE_COLUMNS, "columns");
    for (size_t i = 0; i < ORACLE_TOP; i++)
        ret->top_ids[i] = (int32_t)ids[i];
    ret->max_abs = json_number_value(json_object_get(json, "max_abs"));
    ret->logsumexp = json_number_value(json_object_get(json, "logsumexp"));
}

static int compare_positions(const void *a, const void *b)
{
    return (int)((const OracleRecord *)a)->position - (int)((const OracleRecord *)b)->position;
}

static void read_prompt(const json_t *json, OraclePrompt *ret)
{
    const json_t *prompt = json_object_get(json, "prompt"), *greedy = json_object_get(json, "greedy"),
                 *ties = json_object_get(json, "ties"), *records = json_object_get(json, "records");
    size_t i;
    json_t *entry;

    (void)snprintf(ret->name, sizeof(ret->name), "%s", json_string_value(json_object_get(json, "name")));
    ret->n_prompt = (uint32_t)json_array_size(prompt);
    ret->n_greedy = (uint32_t)json_array_size(greedy);
    ret->n_records = json_array_size(records);
    require(ret->n_prompt > 0 && ret->n_greedy > 0 && ret->n_records > 0, "a prompt is empty");
    ret->ids = calloc(ret->n_prompt + ret->n_greedy, sizeof(*ret->ids));
    ret->tie = calloc(ret->n_greedy, sizeof(*ret->tie));
    ret->records = calloc(ret->n_records, sizeof(*ret->records));
    require(ret->ids && ret->tie && ret->records, "no memory");
    json_array_foreach((json_t *)(uintptr_t)prompt, i, entry) ret->ids[i] = (int32_t)json_integer_value(entry);
    json_array_foreach((json_t *)(uintptr_t)greedy, i, entry) ret->ids[ret->n_prompt + i] = (int32_t)json_integer_value(entry);
    for (i = 0; i < ret->n_greedy; i++)
        ret->tie[i] = -1;
    json_array_foreach((json_t *)(uintptr_t)ties, i, entry)
    {
        json_int_t step = json_integer_value(json_object_get(entry, "step"));

        require(step >= 0 && step < ret->n_greedy, "a tie lies outside");
        ret->tie[step] = (int32_t)json_integer_value(json_object_get(entry, "other"));
    }
    json_array_foreach((json_t *)(uintptr_t)records, i, entry) read_record(entry, &ret->records[i]);
    qsort(ret->records, ret->n_records, sizeof(*ret->records), compare_positions);
}

Oracle *oracle_load(const char *name)
{
    Oracle *oracle = calloc(1, sizeof(*oracle));
    const json_t *prompts;
    json_error_t error;
    double columns[ORACLE_COLUMNS];
    char path[4096];
    json_t *json;

    (void)snprintf(path, sizeof(path), "%s/%s", test_data_folder(), name);
    json = json_load_file(path, 0, &error);
    if (!json)
        print_error("%s: %s\n", path, error.text);
    require(json && oracle, "cannot be read");
    require(read_numbers(json_object_get(json, "columns"), columns, ORACLE_COLUMNS) == ORACLE_COLUMNS, "columns");
    for (size_t i = 0; i < ORACLE_COLUMNS; i++)
        oracle->columns[i] = (uint32_t)columns[i];
    prompts = json_object_get(json, "prompts");
    oracle->n_prompts = json_array_size(prompts);
    oracle->prompts = calloc(oracle->n_prompts, sizeof(*oracle->prompts));
    require(oracle->prompts && oracle->n_prompts > 0, "no prompts");
    for (size_t i = 0; i < oracle->n_prompts; i++)
        read_prompt(json_array_get(prompts, i), &oracle->prompts[i]);
    json_decref(json);
    return oracle;
}

Oracle *oracle_free(Oracle *oracle)
{
    if (!oracle)
        return NULL;
    for (size_t i = 0; i < oracle->n_prompts; i++) {
        free(oracle->prompts[i].ids);
        free(oracle->prompts[i].tie);
        free(oracle->prompts[i].records);
    }
    free(oracle->prompts);
    free(oracle);
    return NULL;
}

/* ---- comparing ------------------------------------------------------------------------------------------------------------------ */

static int32_t largest(const float *logits, uint32_t n)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return (int32_t)best;
}

static double log_sum_exp(const float *logits, uint32_t n)
{
    double max = (double)logits[largest(logits, n)], sum = 0;

    for (uint32_t i = 0; i < n; i++)
        sum += exp((double)logits[i] - max);
    return max + log(sum);
}

static void compare_value(const OraclePrompt *prompt, const OracleRecord *record, const char *what, double ours, double theirs,
                          OracleResult *result)
{
    double share = fabs(ours - theirs) / record->max_abs;

    result->n_compared++;
    if (share > result->worst)
        result->worst = share;
    /* Also true of NaN. */
    if (!(share <= ORACLE_TOLERANCE) && result->n_logits_wrong++ < PRINTED_AT_MOST)
        print_error("%s, position %u: %s is %.6f, the oracle says %.6f (%.2e of the largest)\n", prompt->name, record->position, what, ours,
                    theirs, share);
}

static void compare_record(const Oracle *oracle, const OraclePrompt *prompt, const OracleRecord *record, const float *logits, uint32_t n_vocab,
                           OracleResult *result)
{
    for (size_t i = 0; i < ORACLE_TOP; i++)
        compare_value(prompt, record, "a top logit", (double)logits[record->top_ids[i]], record->top_values[i], result);
    for (size_t i = 0; i < ORACLE_COLUMNS; i++)
        compare_value(prompt, record, "a logit", (double)logits[oracle->columns[i]], record->columns[i], result);
    compare_value(prompt, record, "logsumexp", log_sum_exp(logits, n_vocab), record->logsumexp, result);
}

static void compare_id(const OraclePrompt *prompt, uint32_t step, int32_t ours, OracleResult *result)
{
    int32_t theirs = prompt->ids[prompt->n_prompt + step];

    if (ours == theirs)
        return;
    if (ours == prompt->tie[step])
        result->n_ties_taken++;
    else if (result->n_ids_wrong++ < PRINTED_AT_MOST)
        print_error("%s, greedy token %u: id %d, the oracle says %d\n", prompt->name, step, ours, theirs);
}

/* The next pass ends at the next place whose logits are wanted, so that the head runs for one row of it. */
static uint32_t next_pass(const OraclePrompt *prompt, size_t record, uint32_t done, uint32_t max_rows)
{
    uint32_t until = done < prompt->n_prompt ? prompt->n_prompt : done + 1;

    if (record < prompt->n_records && prompt->records[record].position < until)
        until = prompt->records[record].position + 1;
    return MIN(until - done, max_rows);
}

static int compare_with_cache(const Oracle *oracle, const OraclePrompt *prompt, uint32_t n_greedy, Model *model, KvStore *store, KvCache *cache,
                              OracleResult *result)
{
    uint32_t n_vocab = model_file_params(model_file(model))->n_vocab, max_rows = model_options(model)->max_rows, done = 0;
    _cleanup_(freep) float *logits = calloc(n_vocab, sizeof(*logits));
    ErrorDetail detail = ERROR_DETAIL_NULL;
    size_t record = 0;

    require(logits, "no memory");
    while (done < prompt->n_prompt + n_greedy - 1) {
        uint32_t n = next_pass(prompt, record, done, max_rows);
        ModelItem item = {.cache = cache, .tokens = prompt->ids + done, .n_tokens = n};
        int r = model_forward(model, store, &item, 1, logits, &detail);

        if (r) {
            print_error("%s, position %u: error %d: %s\n", prompt->name, done, r, detail.text);
            return r;
        }
        done += n;
        for (; record < prompt->n_records && prompt->records[record].position < done; record++)
            if (prompt->records[record].position == done - 1)
                compare_record(oracle, prompt, &prompt->records[record], logits, n_vocab, result);
        if (done >= prompt->n_prompt)
            compare_id(prompt, done - prompt->n_prompt, largest(logits, n_vocab), result);
    }
    return 0;
}

int oracle_compare(const Oracle *oracle, const OraclePrompt *prompt, uint32_t n_greedy, Model *model, KvStore *store, OracleResult *ret)
{
    _cleanup_(kv_cache_freep) KvCache *cache = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r;

    *ret = (OracleResult){0};
    r = kv_cache_new(store, &cache, &detail);
    if (r) {
        print_error("%s: no cache: %d: %s\n", prompt->name, r, detail.text);
        return r;
    }
    return compare_with_cache(oracle, prompt, MIN(n_greedy, prompt->n_greedy), model, store, cache, ret);
}
