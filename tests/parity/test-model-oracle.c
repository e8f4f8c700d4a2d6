/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SmolLM2-135M-Instruct against Transformers in float32 on the dequantised file: eight prompts, 256 greedy tokens each, logits within
 * 1e-3 of the largest.  LEAT_TEST_MODEL names the GGUF file (`make check` sets it).
 */

#include "tests/lib/model-rig.h"
#include "tests/lib/place.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#define MODEL_DIGEST "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

typedef struct State {
    Gpu *gpu;
    Model *model;
    Oracle *oracle;
} State;

static int setup(void **state)
{
    const char *path = test_model_path();
    State *s = calloc(1, sizeof(*s));

    if (!path || !s)
        return -1;
    s->gpu = rig_open_gpu();
    s->model = rig_open_model(s->gpu, path, NULL, (ModelOptions){.exact = true, .max_rows = 256});
    s->oracle = oracle_load("smollm2-oracle.json");
    *state = s;
    return 0;
}

static int teardown(void **state)
{
    State *s = *state;

    if (s) {
        oracle_free(s->oracle);
        model_free(s->model);
        gpu_free(s->gpu);
        free(s);
    }
    return 0;
}

static void the_file_is_the_one_that_the_oracle_read(void **state)
{
    const State *s = *state;
    const ModelParams *params = model_file_params(model_file(s->model));

    assert_string_equal(model_file_digest(model_file(s->model)), MODEL_DIGEST);
    assert_int_equal(params->n_layers, 30);
    assert_int_equal(params->attention.n_heads, 9);
    assert_int_equal(params->attention.n_kv_heads, 3);
    assert_true(params->tied_embeddings);
    assert_string_equal(params->quantization, "Q4_1");
    assert_string_equal(params->license, "apache-2.0");
}

static void exact_compute_gives_the_oracles_ids_and_logits(void **state)
{
    const State *s = *state;
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_DYNAMIC, true);
    _cleanup_(kv_store_freep) KvStore *store = rig_new_store(s->model, &policy);
    uint32_t n_wrong = 0;

    assert_int_equal(s->oracle->n_prompts, 8);
    for (size_t i = 0; i < s->oracle->n_prompts; i++) {
        const OraclePrompt *prompt = &s->oracle->prompts[i];
        OracleResult result;

        assert_int_equal(oracle_compare(s->oracle, prompt, UINT32_MAX, s->model, store, &result), 0);
        print_message("%s: %u numbers, worst %.1e of the largest, %u ties\n", prompt->name, result.n_compared, result.worst,
                      result.n_ties_taken);
        n_wrong += result.n_ids_wrong + result.n_logits_wrong;
    }
    assert_int_equal(n_wrong, 0);
}

/* Bit for bit what dynamic gives, on the prompt of 700 tokens: three blocks of pages. */
static void every_exact_strategy_gives_the_bits_of_dynamic(void **state)
{
    static const RigPolicy policies[] = {
        {"dynamic", KV_STRATEGY_DYNAMIC, KV_TRANSFER_AUTO, 0, 0},
        {"static", KV_STRATEGY_STATIC, KV_TRANSFER_AUTO, 0, 0},
        {"offloaded, in place", KV_STRATEGY_OFFLOADED, KV_TRANSFER_ZERO_COPY, 0, 0},
        {"offloaded, copied", KV_STRATEGY_OFFLOADED, KV_TRANSFER_COPY, 0, 0},
        {"offloaded, two tiles", KV_STRATEGY_OFFLOADED, KV_TRANSFER_COPY, 2, 1},
        {"offloaded, one tile", KV_STRATEGY_OFFLOADED, KV_TRANSFER_COPY, 1, 1},
        {"offloaded_static, copied", KV_STRATEGY_OFFLOADED_STATIC, KV_TRANSFER_COPY, 0, 0},
    };
    enum { N_WANTED = 12 };
    const State *s = *state;
    const OraclePrompt *prompt = &s->oracle->prompts[6];
    uint32_t n_vocab = model_file_params(model_file(s->model))->n_vocab;
    size_t bytes = N_WANTED * n_vocab * sizeof(float);
    _cleanup_(freep) float *expected = malloc(bytes), *logits = malloc(bytes);

    assert_true(expected && logits && prompt->n_prompt == 700);
    for (size_t i = 0; i < N_ELEMENTS(policies); i++) {
        KvPolicy policy = rig_policy(&policies[i], true);
        _cleanup_(kv_store_freep) KvStore *store = NULL;

        if (policy.transfer == KV_TRANSFER_ZERO_COPY && !gpu_info(s->gpu)->unified_memory)
            continue;
        policy.max_cache_tokens = 1024;
        store = rig_new_store(s->model, &policy);
        rig_run(s->model, store, prompt->ids, 700, 128, N_WANTED, i ? logits : expected);
        if (i && memcmp(expected, logits, bytes))
            fail_msg("%s differs from dynamic", policies[i].name);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_file_is_the_one_that_the_oracle_read),
        cmocka_unit_test(exact_compute_gives_the_oracles_ids_and_logits),
        cmocka_unit_test(every_exact_strategy_gives_the_bits_of_dynamic),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
