/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much 8-bit activations and packed caches move SmolLM2's answers, against its own exact run (which equals the float32 oracle,
 * test-model-oracle.c): mean KL divergence at positions 256 to 767 of a text.  The limits catch a defect, they are not the bars: those are
 * measured against Transformers over 2,048 tokens of two texts by tests/bench/quality.py.  LEAT_TEST_MODEL names the GGUF file.
 */

#include "tests/lib/model-rig.h"
#include "tests/lib/place.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

enum { N_IDS = 768, FIRST = 256, CHUNK = 64 };

typedef struct State {
    Gpu *gpu;
    Model *exact, *fast;
    int32_t ids[N_IDS];
} State;

typedef struct Divergence {
    double sum;
    uint32_t n_rows, n_same;
} Divergence;

static int read_ids(State *s)
{
    _cleanup_(token_list_clearp) TokenList list = TOKEN_LIST_NULL;
    _cleanup_(close_filep) FILE *file = NULL;
    static char text[16384];
    char path[4096];
    size_t n;

    rig_path("text-notes.txt", path, sizeof(path));
    file = fopen(path, "re");
    if (!file)
        return -1;
    n = fread(text, 1, sizeof(text), file);
    if (tokenizer_encode(model_file_tokenizer(model_file(s->exact)), text, n, false, &list) || list.n < N_IDS)
        return -1;
    memcpy(s->ids, list.ids, sizeof(s->ids));
    return 0;
}

static int setup(void **state)
{
    const char *path = test_model_path();
    State *s = calloc(1, sizeof(*s));

    if (!path || !s)
        return -1;
    *state = s;
    s->gpu = rig_open_gpu();
    s->exact = rig_open_model(s->gpu, path, NULL, (ModelOptions){.exact = true, .max_rows = CHUNK});
    s->fast = rig_open_model(s->gpu, path, NULL, (ModelOptions){.max_rows = CHUNK});
    return read_ids(s);
}

static int teardown(void **state)
{
    State *s = *state;

    if (s) {
        model_free(s->fast);
        model_free(s->exact);
        gpu_free(s->gpu);
        free(s);
    }
    return 0;
}

/* Natural logarithm of the sum of exponentials, and the largest logit's place. */
static double log_sum(const float *logits, uint32_t n, uint32_t *ret_largest)
{
    uint32_t largest = 0;
    double sum = 0;

    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[largest])
            largest = i;
    for (uint32_t i = 0; i < n; i++)
        sum += exp((double)logits[i] - (double)logits[largest]);
    *ret_largest = largest;
    return (double)logits[largest] + log(sum);
}

/* Adds the divergence of row @q from row @p. */
static void add_row(Divergence *divergence, const float *p, const float *q, uint32_t n)
{
    uint32_t p_largest, q_largest;
    double p_sum = log_sum(p, n, &p_largest), q_sum = log_sum(q, n, &q_largest), kld = 0;

    for (uint32_t i = 0; i < n; i++) {
        double p_log = (double)p[i] - p_sum;

        kld += exp(p_log) * (p_log - ((double)q[i] - q_sum));
    }
    divergence->sum += kld;
    divergence->n_rows++;
    divergence->n_same += p_largest == q_largest;
}

static void run_chunk(Model *model, KvStore *store, KvCache *cache, const int32_t *ids, float *logits)
{
    ModelItem item = {.cache = cache, .tokens = ids, .n_tokens = CHUNK, .all_logits = true};
    ErrorDetail detail = ERROR_DETAIL_NULL;

    if (model_forward(model, store, &item, 1, logits, &detail))
        fail_msg("%s", detail.text);
}

/* Both runs side by side over the text. */
static Divergence measure(State *s, Model *model, const KvPolicy *policy)
{
    KvPolicy reference_policy = kv_policy_preset(KV_STRATEGY_DYNAMIC, true), judged_policy = *policy;
    uint32_t n_vocab = model_file_params(model_file(s->exact))->n_vocab;
    _cleanup_(freep) float *p = calloc((size_t)CHUNK * n_vocab, sizeof(*p)), *q = calloc((size_t)CHUNK * n_vocab, sizeof(*q));
    _cleanup_(kv_store_freep) KvStore *reference_store = NULL, *judged_store = NULL;
    _cleanup_(kv_cache_freep) KvCache *reference = NULL, *judged = NULL;
    Divergence divergence = {0};

    reference_policy.max_cache_tokens = judged_policy.max_cache_tokens = N_IDS;
    reference_store = rig_new_store(s->exact, &reference_policy);
    judged_store = rig_new_store(model, &judged_policy);
    assert_true(p && q);
    assert_int_equal(kv_cache_new(reference_store, &reference, NULL), 0);
    assert_int_equal(kv_cache_new(judged_store, &judged, NULL), 0);
    for (uint32_t done = 0; done < N_IDS; done += CHUNK) {
        run_chunk(s->exact, reference_store, reference, s->ids + done, p);
        run_chunk(model, judged_store, judged, s->ids + done, q);
        for (uint32_t row = 0; row < CHUNK && done >= FIRST; row++)
            add_row(&divergence, p + (size_t)row * n_vocab, q + (size_t)row * n_vocab, n_vocab);
    }
    return divergence;
}

static void expect_below(State *s, Model *model, uint8_t k_bits, uint8_t v_bits, double limit)
{
    bool exact = model == s->exact;
    KvPolicy policy = kv_policy_preset(k_bits ? KV_STRATEGY_QUANTIZED : KV_STRATEGY_DYNAMIC, exact);
    Divergence divergence;
    double mean;

    policy.form.k_bits = k_bits;
    policy.form.v_bits = v_bits;
    divergence = measure(s, model, &policy);
    mean = divergence.sum / divergence.n_rows;
    print_message("compute %s, cache K %u V %u bits: mean KLD %.5f (limit %.4f), same top %.1f %%\n", exact ? "exact" : "fast",
                  k_bits ? k_bits : exact ? 32 : 16, v_bits ? v_bits : exact ? 32 : 16, mean, limit,
                  100.0 * divergence.n_same / divergence.n_rows);
    assert_int_equal(divergence.n_rows, N_IDS - FIRST);
    assert_true(mean < limit);
}

static void fast_compute_stays_close_to_exact(void **state)
{
    State *s = *state;

    expect_below(s, s->fast, 0, 0, 0.006);
}

static void a_cache_of_8_bits_is_next_to_exact(void **state)
{
    State *s = *state;

    expect_below(s, s->exact, 8, 8, 0.0001);
}

static void a_cache_of_5_and_4_bits_stays_close(void **state)
{
    State *s = *state;

    expect_below(s, s->exact, 5, 4, 0.004);
}

static void a_cache_of_4_bits_stays_within_its_limit(void **state)
{
    State *s = *state;

    expect_below(s, s->exact, 4, 4, 0.008);
}

static void the_default_stays_close_to_exact(void **state)
{
    State *s = *state;

    expect_below(s, s->fast, 5, 4, 0.009);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(fast_compute_stays_close_to_exact),      cmocka_unit_test(a_cache_of_8_bits_is_next_to_exact),
        cmocka_unit_test(a_cache_of_5_and_4_bits_stays_close),    cmocka_unit_test(a_cache_of_4_bits_stays_within_its_limit),
        cmocka_unit_test(the_default_stays_close_to_exact),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
