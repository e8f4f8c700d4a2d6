/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised tensors and layers when memory runs out: each allocation of each operation fails in turn; the operation says so, nothing
 * has changed, and the next try gives what it would have given.
 */

#include "cache/kv-compat-quantized.h"
#include "cache/kv-compat.h"
#include "tests/lib/quant-values.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define REPLACED 0 /* the sanitizer has taken the allocator's place */
#else
#define REPLACED 1

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *old, size_t size);

void *malloc(size_t size);
void *calloc(size_t n, size_t size);
void *realloc(void *old, size_t size);

static int64_t n_until_failure = -1; /* < 0: never */

static bool fails(void)
{
    return n_until_failure >= 0 && n_until_failure-- == 0;
}

void *malloc(size_t size)
{
    return fails() ? NULL : __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    return fails() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *old, size_t size)
{
    return fails() ? NULL : __libc_realloc(old, size);
}

enum { N_ROWS = 4, N_HEADS = 2, WIDTH = 16, MAX_TOKENS = 32 };

typedef enum Step { PREFILL, GROW, FLUSH, REORDER, REPEAT, CROP, LAST_UPDATE, N_STEPS } Step;

static const uint32_t n_new[N_STEPS] = {[PREFILL] = 4, [GROW] = 1, [FLUSH] = 3, [LAST_UPDATE] = 1};

typedef struct Run {
    KvCompat *cache;
    uint32_t n_rows;
    KvTensor k, v;
} Run;

static int update(Run *run, Step step)
{
    static float x[2 * N_ROWS * N_HEADS * MAX_TOKENS * WIDTH];
    KvTensorShape shape = {run->n_rows, N_HEADS, n_new[step], WIDTH};
    KvTensor new = {x, run->n_rows, N_HEADS, n_new[step], WIDTH, n_new[step]};

    assert_true(quant_values("normal", (uint32_t)step, &shape, KV_DTYPE_F16, x));
    return kv_compat_update(run->cache, 0, &new, &new, &run->k, &run->v, NULL);
}

static int do_step(Run *run, Step step)
{
    static const uint32_t order[N_ROWS] = {1, 1, 0, 3};
    int r;

    switch (step) {
    case REORDER:
        return kv_compat_reorder(run->cache, order, N_ROWS, NULL);
    case REPEAT:
        r = kv_compat_repeat(run->cache, 2, NULL);
        run->n_rows = r ? run->n_rows : 2 * N_ROWS;
        return r;
    case CROP:
        return kv_compat_crop(run->cache, -2, NULL);
    case PREFILL:
    case GROW:
    case FLUSH:
    case LAST_UPDATE:
    case N_STEPS:
        break;
    }
    return update(run, step);
}

static Run new_run(const char *backend, int64_t axis)
{
    KvQuantRequest request = {.backend = backend};
    KvCompatLayerSpec spec = {.kind = KV_COMPAT_OTHER, .class = &kv_compat_quantized_class};
    KvQuantOptions options;
    Run run = {.n_rows = N_ROWS};

    if (strcmp(backend, "fp8") != 0)
        request = (KvQuantRequest){.backend = backend, .has_axis_key = true, .axis_key = axis, .has_q_group_size = true,
                                   .q_group_size = 8, .has_residual_length = true, .residual_length = 4};
    assert_int_equal(kv_quant_options(&request, &options, NULL), 0);
    assert_int_equal(kv_compat_quantized_new(&options, KV_DTYPE_F16, KV_FP8_RULE_CAREFUL, &spec.state, NULL), 0);
    assert_int_equal(kv_compat_new(&spec, 1, &run.cache, NULL), 0);
    return run;
}

static uint64_t length_of(const Run *run)
{
    uint64_t length;

    assert_int_equal(kv_compat_length(run->cache, 0, &length, NULL), 0);
    return length;
}

/* Each allocation of a step fails before the step succeeds; returns how many did. */
static uint32_t do_step_after_failures(Run *run, Step step)
{
    uint64_t length = length_of(run), bytes = kv_compat_bytes(run->cache);

    for (uint32_t n = 0;; n++) {
        int r;

        n_until_failure = n;
        r = do_step(run, step);
        if (n_until_failure >= 0 || step == CROP) { /* it got through; a crop does without memory */
            n_until_failure = -1;
            assert_int_equal(r, 0);
            return n;
        }
        assert_int_equal(r, -ENOMEM);
        assert_int_equal(length_of(run), length);
        if (step != GROW && step != LAST_UPDATE) /* they may have made room in the residual */
            assert_int_equal(kv_compat_bytes(run->cache), bytes);
    }
}

static void quantized_layer_survives_every_failing_allocation(void **state)
{
    static const struct {
        const char *backend;
        int64_t axis;
    } cases[] = {{"quanto", 0}, {"quanto", -1}, {"hqq", 1}, {"hqq", 0}, {"fp8", 0}};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        Run run = new_run(cases[i].backend, cases[i].axis), calm = new_run(cases[i].backend, cases[i].axis);
        uint32_t n_failures = 0;

        for (Step step = PREFILL; step < N_STEPS; step++) {
            n_failures += do_step_after_failures(&run, step);
            assert_int_equal(do_step(&calm, step), 0);
            assert_int_equal(length_of(&run), length_of(&calm));
        }
        assert_int_equal(run.k.n_tokens, calm.k.n_tokens);
        assert_memory_equal(run.k.values, calm.k.values, (size_t)run.n_rows * N_HEADS * run.k.n_tokens * WIDTH * sizeof(float));
        assert_memory_equal(run.v.values, calm.v.values, (size_t)run.n_rows * N_HEADS * run.k.n_tokens * WIDTH * sizeof(float));
        print_message("%s axis %d: %u allocations failed\n", cases[i].backend, (int)cases[i].axis, n_failures);
        assert_true(n_failures > 40);
        kv_compat_free(run.cache);
        kv_compat_free(calm.cache);
    }
}
#endif

static void allocations_can_be_made_to_fail(void **state)
{
    (void)state;
    if (!REPLACED) {
        print_message("not with a sanitizer: it has an allocator of its own\n");
        skip();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(allocations_can_be_made_to_fail),
#if REPLACED
        cmocka_unit_test(quantized_layer_survives_every_failing_allocation),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
