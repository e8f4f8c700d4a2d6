/* SPDX-License-Identifier: Apache-2.0 */
/* Questions of the soak whose answers must always be the same. */

#include "tests/bus/soak.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>
#include <cmocka.h>

/* Bits are named: the first load then has nothing to measure. */
const SoakPolicy soak_policies[] = {{"dynamic", 0}, {"static", 0}, {"offloaded", 0}, {"offloaded_static", 0}, {"quantized", 1}, {"offloaded_quantized", 1}};
const size_t soak_n_policies = N_ELEMENTS(soak_policies);
const char *const soak_models[SOAK_MODELS] = {"tied", "mixed"};

uint64_t soak_now_usec(void)
{
    struct timespec time = {0};

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

/* xorshift; below @n. */
uint64_t soak_random(uint64_t *seed, uint64_t n)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return (*seed >> 11) % n;
}

void soak_append_policy(sd_bus_message *m, const SoakPolicy *policy)
{
    if (policy->form == 0)
        assert_return_code(sd_bus_message_append(m, "{sv}", "cache", "a{sv}", 1, "strategy", "s", policy->strategy), 0);
    else
        assert_return_code(sd_bus_message_append(m, "{sv}", "cache", "a{sv}", 3, "strategy", "s", policy->strategy, "quant.nbits_key", "u", 5,
                                                 "quant.nbits_value", "u", 4),
                           0);
}

/* ---- calls ----------------------------------------------------------------------------------------------------------------------- */

static sd_bus_message *begin(sd_bus *bus, unsigned model, const char *prompt)
{
    sd_bus_message *m = NULL;

    assert_return_code(sd_bus_message_new_method_call(bus, &m, BUS_NAME, BUS_ROOT, MANAGER, "Ask"), 0);
    assert_return_code(sd_bus_message_append(m, "ss", soak_models[model], prompt), 0);
    assert_return_code(sd_bus_message_open_container(m, 'a', "{sv}"), 0);
    assert_return_code(sd_bus_message_append(m, "{sv}{sv}", "want-ids", "b", true, "ignore-eos", "b", true), 0);
    return m;
}

void soak_append_ids(sd_bus_message *m, const int32_t *ids, size_t n_ids)
{
    assert_return_code(sd_bus_message_open_container(m, 'e', "sv"), 0);
    assert_return_code(sd_bus_message_append(m, "s", "ids"), 0);
    assert_return_code(sd_bus_message_open_container(m, 'v', "ai"), 0);
    assert_return_code(sd_bus_message_append_array(m, 'i', ids, n_ids * sizeof(*ids)), 0);
    assert_return_code(sd_bus_message_close_container(m), 0);
    assert_return_code(sd_bus_message_close_container(m), 0);
}

/* Sends what @m (taken) asks. */
static sd_bus_message *ask(sd_bus *bus, sd_bus_message *m, char **ret_error)
{
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    sd_bus_message *reply = NULL;

    assert_return_code(sd_bus_message_close_container(m), 0);
    if (sd_bus_call(bus, m, 0, &error, &reply) < 0) {
        *ret_error = strdup(error.name ? error.name : "no name");
        if (strstr(*ret_error, "InvalidArgs") || strstr(*ret_error, "Failed"))
            fail_msg("a good question: %s: %s", error.name, error.message);
    }
    sd_bus_message_unref(m);
    return reply;
}

sd_bus_message *soak_ask(sd_bus *bus, unsigned model, const SoakPolicy *policy, const int32_t *ids, size_t n_ids, uint32_t n_answer,
                         uint64_t deadline_usec, char **ret_error)
{
    sd_bus_message *m = begin(bus, model, "");

    soak_append_ids(m, ids, n_ids);
    soak_append_policy(m, policy);
    assert_return_code(sd_bus_message_append(m, "{sv}{sv}{sv}", "max-tokens", "u", n_answer, "temperature", "d", 0.0, "deadline-usec", "t",
                                             deadline_usec),
                       0);
    return ask(bus, m, ret_error);
}

size_t soak_read_ids(sd_bus_message *reply, int32_t *ret, size_t n)
{
    const char *text, *key;
    const void *ids = NULL;
    size_t n_bytes = 0;

    assert_return_code(sd_bus_message_read(reply, "s", &text), 0);
    assert_true(sd_bus_message_enter_container(reply, 'a', "{sv}") > 0);
    while (!ids && sd_bus_message_enter_container(reply, 'e', "sv") > 0) {
        assert_return_code(sd_bus_message_read(reply, "s", &key), 0);
        if (strcmp(key, "ids") == 0) {
            assert_return_code(sd_bus_message_enter_container(reply, 'v', "ai"), 0);
            assert_return_code(sd_bus_message_read_array(reply, 'i', &ids, &n_bytes), 0);
            memcpy(ret, ids, MIN(n_bytes, n * sizeof(*ret)));
            return n_bytes / sizeof(*ret);
        }
        assert_return_code(sd_bus_message_skip(reply, "v"), 0);
        assert_return_code(sd_bus_message_exit_container(reply), 0);
    }
    fail_msg("an answer without ids");
    return 0;
}

/* ---- hashes ---------------------------------------------------------------------------------------------------------------------- */

/* Of one of an answer's sequences: its ids, its score to the last bit. */
static void hash_sequence(sd_bus_message *reply, XXH64_state_t *hash)
{
    const char *key;
    const void *ids;
    size_t n_bytes;
    double score;

    while (sd_bus_message_enter_container(reply, 'e', "sv") > 0) {
        assert_return_code(sd_bus_message_read(reply, "s", &key), 0);
        if (strcmp(key, "ids") == 0) {
            assert_return_code(sd_bus_message_enter_container(reply, 'v', "ai"), 0);
            assert_return_code(sd_bus_message_read_array(reply, 'i', &ids, &n_bytes), 0);
            assert_return_code(sd_bus_message_exit_container(reply), 0);
            (void)XXH64_update(hash, ids, n_bytes);
        } else if (strcmp(key, "score") == 0) {
            assert_return_code(sd_bus_message_read(reply, "v", "d", &score), 0);
            (void)XXH64_update(hash, &score, sizeof(score));
        } else {
            assert_return_code(sd_bus_message_skip(reply, "v"), 0);
        }
        assert_return_code(sd_bus_message_exit_container(reply), 0);
    }
}

static uint64_t hash_answer(sd_bus_message *reply)
{
    XXH64_state_t *hash = XXH64_createState();
    const char *text, *key;
    uint64_t sum;

    assert_non_null(hash);
    (void)XXH64_reset(hash, 0);
    assert_return_code(sd_bus_message_read(reply, "s", &text), 0);
    (void)XXH64_update(hash, text, strlen(text));
    assert_true(sd_bus_message_enter_container(reply, 'a', "{sv}") > 0);
    while (sd_bus_message_enter_container(reply, 'e', "sv") > 0) {
        assert_return_code(sd_bus_message_read(reply, "s", &key), 0);
        if (strcmp(key, "sequences") == 0) {
            assert_return_code(sd_bus_message_enter_container(reply, 'v', "aa{sv}"), 0);
            assert_return_code(sd_bus_message_enter_container(reply, 'a', "a{sv}"), 0);
            while (sd_bus_message_enter_container(reply, 'a', "{sv}") > 0) {
                hash_sequence(reply, hash);
                assert_return_code(sd_bus_message_exit_container(reply), 0);
            }
            assert_return_code(sd_bus_message_exit_container(reply), 0);
            assert_return_code(sd_bus_message_exit_container(reply), 0);
        } else {
            assert_return_code(sd_bus_message_skip(reply, "v"), 0);
        }
        assert_return_code(sd_bus_message_exit_container(reply), 0);
    }
    sum = XXH64_digest(hash);
    (void)XXH64_freeState(hash);
    return sum;
}

/* ---- other questions ------------------------------------------------------------------------------------------------------------- */

static void append_other(sd_bus_message *m, const SoakTable *table, SoakOther kind, unsigned i)
{
    switch (kind) {
    case SOAK_DRAWN:
        soak_append_ids(m, table->prompts[i], table->n_prompt[i]);
        assert_return_code(sd_bus_message_append(m, "{sv}{sv}{sv}{sv}", "max-tokens", "u", 16, "temperature", "d", 0.9, "seed", "t", (uint64_t)i + 7,
                                                 "num-return-sequences", "u", i + 1),
                           0);
        return;
    case SOAK_BEAMS:
        soak_append_ids(m, table->prompts[i], table->n_prompt[i]);
        assert_return_code(sd_bus_message_append(m, "{sv}{sv}{sv}", "max-tokens", "u", 12, "num-beams", "u", 2 + 3 * i, "num-return-sequences", "u", 2),
                           0);
        return;
    case SOAK_DRAWN_BEAMS:
        soak_append_ids(m, table->prompts[i], table->n_prompt[i]);
        assert_return_code(sd_bus_message_append(m, "{sv}{sv}{sv}{sv}{sv}", "max-tokens", "u", 10, "num-beams", "u", 3, "do-sample", "b", true, "seed",
                                                 "t", (uint64_t)i + 11, "temperature", "d", 1.0),
                           0);
        return;
    case SOAK_SEVERAL:
        assert_return_code(sd_bus_message_append(m, "{sv}{sv}{sv}{sv}", "raw", "b", true, "max-tokens", "u", 8, "temperature", "d", 0.0, "prompts", "as",
                                                 3, "a leat carries water", "from the reservoir", i % 2 ? "to the mill" : "a leat carries water"),
                           0);
        return;
    case SOAK_LOGITS:
    case SOAK_OTHER_X_MAX:
        break;
    }
    fail();
}

typedef struct Evaluation {
    char job[96], result[96];
    bool finished;
} Evaluation;

static int on_finished(sd_bus_message *m, void *userdata, sd_bus_error *error _unused_)
{
    Evaluation *evaluation = userdata;
    const char *result;

    assert_return_code(sd_bus_message_read(m, "s", &result), 0);
    if (strcmp(sd_bus_message_get_path(m), evaluation->job) == 0) {
        (void)snprintf(evaluation->result, sizeof(evaluation->result), "%s", result);
        evaluation->finished = true;
    }
    return 0;
}

/* Runs an evaluation to its end; false with *ret_error. */
static bool evaluate(sd_bus *bus, sd_bus_message *m, char **ret_error)
{
    _cleanup_(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
    _cleanup_(sd_bus_slot_unrefp) sd_bus_slot *slot = NULL;
    uint64_t until = soak_now_usec() + 240 * UINT64_C(1000000);
    Evaluation evaluation = {.finished = false};
    const char *job;

    assert_return_code(sd_bus_match_signal(bus, &slot, BUS_NAME, NULL, JOB, "Finished", on_finished, &evaluation), 0);
    if (sd_bus_call(bus, m, 0, &error, &reply) < 0) {
        *ret_error = strdup(error.name ? error.name : "no name");
        return false;
    }
    assert_return_code(sd_bus_message_read(reply, "o", &job), 0);
    (void)snprintf(evaluation.job, sizeof(evaluation.job), "%s", job);
    while (!evaluation.finished) {
        int r = sd_bus_process(bus, NULL);

        assert_return_code(r, -r);
        if (r == 0)
            (void)sd_bus_wait(bus, 100000);
        if (soak_now_usec() > until)
            fail_msg("an evaluation does not end");
    }
    if (strcmp(evaluation.result, "done") == 0)
        return true;
    *ret_error = strdup(evaluation.result);
    return false;
}

/* All logits of a prompt. */
static bool hash_logits(sd_bus *bus, const SoakTable *table, unsigned i, unsigned model, const SoakPolicy *policy, uint64_t *ret_hash, char **ret_error)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *m = NULL;
    _cleanup_(close_fdp) int ids = memfd_create("ids", MFD_CLOEXEC), npy = memfd_create("logits", MFD_CLOEXEC);
    ssize_t n = (ssize_t)(table->n_prompt[i] * sizeof(int32_t));
    char path[96];
    void *bytes;
    off_t size;

    (void)snprintf(path, sizeof(path), "%s/%s", BUS_ROOT "/model", soak_models[model]);
    assert_int_equal(write(ids, table->prompts[i], (size_t)n), n);
    assert_int_equal(lseek(ids, 0, SEEK_SET), 0);
    assert_return_code(sd_bus_message_new_method_call(bus, &m, BUS_NAME, path, MODEL, "Evaluate"), 0);
    assert_return_code(sd_bus_message_append(m, "hh", ids, npy), 0);
    assert_return_code(sd_bus_message_open_container(m, 'a', "{sv}"), 0);
    soak_append_policy(m, policy);
    assert_return_code(sd_bus_message_append(m, "{sv}", "ids-format", "s", "int32"), 0);
    assert_return_code(sd_bus_message_close_container(m), 0);
    if (!evaluate(bus, m, ret_error))
        return false;
    size = lseek(npy, 0, SEEK_END);
    assert_true(size > 1000);
    bytes = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, npy, 0);
    assert_true(bytes != MAP_FAILED);
    *ret_hash = XXH64(bytes, (size_t)size, 0);
    (void)munmap(bytes, (size_t)size);
    return true;
}

bool soak_other(sd_bus *bus, const SoakTable *table, SoakOther kind, unsigned i, unsigned model, const SoakPolicy *policy, uint64_t *ret_hash,
                char **ret_error)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
    sd_bus_message *m;

    if (kind == SOAK_LOGITS)
        return hash_logits(bus, table, i, model, policy, ret_hash, ret_error);
    m = begin(bus, model, "");
    soak_append_policy(m, policy);
    append_other(m, table, kind, i);
    if (!(reply = ask(bus, m, ret_error)))
        return false;
    *ret_hash = hash_answer(reply);
    return true;
}
