/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The properties of the cache semantics, section 13.3, and of 13.1 what it says of strategies, on the real store: a case for each row, named
 * after it.  Cases are small programs (tests/lib/random-world.h): every output is compared with the reference, and runs of the same tokens
 * with each other, bit for bit.  A pass's tokens follow from its seed, the sequence and the position, so the same tokens can come again in
 * other pieces.
 */

#include "tests/lib/model-rig.h"
#include "tests/lib/random-world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

typedef struct Fixture {
    Gpu *gpu;
    RandomWorld *world;
    uint32_t n_played;
} Fixture;

/* Layers as programs describe them. */
#define FULL    "layer 0 window 0 source 0 shape 0 form 0 state 0\n"
#define HYBRID  "layer 0 window 0 source 0 shape 0 form 0 state 1\n"
#define SLIDING "layer 1 window 33 source 0 shape 0 form 0 state 0\n"
#define CHUNKED "layer 2 window 33 source 0 shape 0 form 0 state 0\n"
#define CROSS   "layer 3 window 0 source 0 shape 0 form 0 state 0\n"
#define SHARED  "layer 4 window 0 source 0 shape 0 form 0 state 0\n"
#define LINEAR  "layer 5 window 0 source 0 shape 0 form 0 state 1\n"

static const char *const all_kinds[] = {FULL, HYBRID FULL, FULL SHARED LINEAR, SLIDING FULL, CHUNKED SLIDING, LINEAR HYBRID SLIDING};
/* Encoder output is another one for each pass that opens a sequence, so these are not for rows that open one again. */
static const char *const with_cross[] = {CROSS FULL, FULL CROSS SLIDING};

/* The numbers of random_form(). */
enum { LEAT, F16, F32, N_FORMS };

typedef struct Policy {
    unsigned growth, home, stay, transfer, slots, tile;
} Policy;

static const Policy policies[] = {
    {KV_GROWTH_DYNAMIC, KV_HOME_DEVICE, 0, KV_TRANSFER_AUTO, 2, 0}, {KV_GROWTH_STATIC, KV_HOME_DEVICE, 0, KV_TRANSFER_AUTO, 2, 0},
    {KV_GROWTH_DYNAMIC, KV_HOME_HOST, 0, KV_TRANSFER_COPY, 2, 1},   {KV_GROWTH_STATIC, KV_HOME_HOST, 0, KV_TRANSFER_COPY, 1, 2},
    {KV_GROWTH_DYNAMIC, KV_HOME_HOST, 0, KV_TRANSFER_AUTO, 3, 1},
};
#define OFFLOADED 2

/* Runs the operations; returns how many outputs met those of an earlier run. */
static uint64_t play(Fixture *fixture, const Policy *policy, unsigned form, const char *layers, const char *operations)
{
    RandomCounts before = *random_world_counts(fixture->world);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    RandomProgram program;
    RandomFailure failure;
    char text[2048];
    FILE *file;

    snprintf(text, sizeof(text),
             "config form %u exact 1 calibrated 1 growth %u home %u stay %u transfer %u slots %u tile %u tokens 1024 sequences 4 host-kib 0 device-kib 0\n"
             "%s%s",
             form, policy->growth, policy->home, policy->stay, policy->transfer, policy->slots, policy->tile, layers, operations);
    file = fmemopen(text, strlen(text), "r");
    assert_non_null(file);
    if (random_program_read(&program, file, &detail))
        fail_msg("%s", detail.text);
    fclose(file);
    if (!random_world_run(fixture->world, &program, &failure))
        fail_msg("operation %u: %s, of\n%s", failure.op, failure.text, text);
    assert_int_equal(random_world_counts(fixture->world)->unsupported, before.unsupported);
    fixture->n_played++;
    return random_world_counts(fixture->world)->bits_compared - before.bits_compared;
}

static void same_bits_of(Fixture *fixture, const char *layers, const char *first, const char *second, uint64_t n_same)
{
    for (unsigned form = 0; form < N_FORMS; form++) {
        random_world_forget(fixture->world);
        assert_int_equal(play(fixture, &policies[OFFLOADED], form, layers, first), 0);
        assert_int_equal(play(fixture, &policies[OFFLOADED], form, layers, second), n_same);
    }
}

/* For all layers and forms: how many outputs of @second must be those that the same tokens of @first gave. */
static void same_bits(Fixture *fixture, const char *first, const char *second, uint64_t n_same)
{
    for (size_t l = 0; l < N_ELEMENTS(all_kinds); l++)
        same_bits_of(fixture, all_kinds[l], first, second, n_same);
}

static int setup(void **state)
{
    Fixture *fixture = calloc(1, sizeof(*fixture));

    assert_non_null(fixture);
    fixture->gpu = rig_open_gpu();
    fixture->world = random_world_new(fixture->gpu);
    *state = fixture;
    return 0;
}

static int teardown(void **state)
{
    Fixture *fixture = *state;

    printf("%u programs\n", fixture->n_played);
    (void)random_world_free(fixture->world);
    (void)gpu_free(fixture->gpu);
    free(fixture);
    return 0;
}

static void row_13_3_1_any_chunking_gives_the_bits_of_one_prefill(void **state)
{
    same_bits(*state, "pass 0 7 0:150\n", "pass 0 7 0:1\npass 0 7 0:31\npass 0 7 0:1\npass 0 7 0:33\npass 0 7 0:84\n", 150);
    for (size_t l = 0; l < N_ELEMENTS(with_cross); l++)
        same_bits_of(*state, with_cross[l], "pass 0 7 0:150\n", "pass 0 7 0:31\npass 0 7 0:1\npass 0 7 0:118\n", 150);
}

static void row_13_3_2_dynamic_static_offloaded_and_offloaded_static_give_the_same_bits(void **state)
{
    static const char *const operations = "pass 0 7 0:150 1:40\npass 0 7 0:150\npass 0 8 0:1 1:1\npass 0 9 0:1\npass 0 10 0:34 1:90\n";
    Fixture *fixture = *state;

    for (size_t l = 0; l < N_ELEMENTS(all_kinds); l++)
        for (unsigned form = 0; form < N_FORMS; form++) {
            random_world_forget(fixture->world);
            for (size_t p = 0; p < N_ELEMENTS(policies); p++)
                assert_int_equal(play(fixture, &policies[p], form, all_kinds[l], operations), p == 0 ? 0 : 336 + 131);
        }
}

static void row_13_1_offloaded_gives_dynamics_bits_with_fewer_device_bytes(void **state)
{
    Fixture *fixture = *state;
    const GpuInfo *info = gpu_info(fixture->gpu);
    KvPlan plans[2];

    random_world_forget(fixture->world);
    assert_int_equal(play(fixture, &policies[0], F32, FULL FULL, "pass 0 7 0:250\npass 0 7 0:250\n"), 0);
    assert_int_equal(play(fixture, &policies[OFFLOADED], F32, FULL FULL, "pass 0 7 0:250\npass 0 7 0:250\n"), 500);
    for (int host = 0; host < 2; host++) { /* of a model whose cache is worth moving */
        static const float frequencies[32] = {1.0f};
        KvModel model = {.n_layers = 30, .shape = {9, 3, 64, 64, 64}, .scale = 0.125f, .inv_freq = frequencies, .max_rows = 64,
                         .max_sequences = 1};
        KvPolicy policy = kv_policy_preset(host ? KV_STRATEGY_OFFLOADED_STATIC : KV_STRATEGY_STATIC, false);

        policy.max_cache_tokens = 8192;
        policy.transfer = KV_TRANSFER_COPY;
        assert_int_equal(kv_store_plan(info, &model, &policy, &plans[host], NULL), 0);
    }
    assert_true(plans[1].staging_bytes + plans[1].device_page_bytes < (plans[0].staging_bytes + plans[0].device_page_bytes) / 4);
}

static void row_13_3_3_tokens_taken_back_and_given_again_leave_no_trace(void **state)
{
    same_bits(*state, "pass 0 7 0:70\npass 0 7 0:5\npass 0 8 0:40\n",
              "pass 0 7 0:70\nrecord 0 0 0:0\npass 0 7 0:5\nundo 5 0 0:0\npass 0 9 0:9\nundo 9 0 0:0\npass 0 7 0:5\npass 0 8 0:40\n",
              70 + 5 + 5 + 40);
}

/* The library's own use of it (6.4): a draft whose first tokens are right, a second one that is wrong, and only what is right stays, in the
 * middle of a pass and across the border of a page; recurrent states included. */
static void row_13_3_3_a_draft_that_is_right_in_part_leaves_no_trace_of_the_rest(void **state)
{
    same_bits(*state, "pass 0 7 0:120\npass 0 8 0:40\n",
              "pass 0 7 0:90\nrecord 0 0 0:0\npass 0 7 0:12\npass 0 9 0:5\nundo 10 0 0:0\npass 0 7 0:13\nundo 9 0 0:0\npass 0 7 0:19\n"
              "undo 0 0 0:0\npass 0 8 0:40\n",
              90 + 12 + 13 + 19 + 40);
}

static void row_13_3_4_taking_nothing_back_never_changes_the_next_output(void **state)
{
    same_bits(*state, "pass 0 7 0:40\npass 0 8 0:30\npass 0 9 0:30\n",
              "record 0 0 0:0\npass 0 7 0:40\nundo 0 0 0:0\npass 0 8 0:30\nundo 0 0 0:0\nundo 0 0 0:0\npass 0 9 0:30\n", 100);
}

static void row_13_3_5_a_permutation_and_its_inverse_are_the_identity(void **state)
{
    static const char *const start = "pass 0 7 0:40 1:70 2:33\n", *const end = "pass 0 8 0:40 1:9 2:1\n";
    char text[512];

    for (int by_caches = 0; by_caches < 2; by_caches++) {
        char plain[256];

        snprintf(plain, sizeof(plain), "%s%s", start, end);
        snprintf(text, sizeof(text), "%sreorder %d 0 0:1 1:2 2:0\nreorder %d 0 0:2 1:0 2:1\n%s", start, by_caches, by_caches, end);
        same_bits(*state, plain, text, 143 + 50);
    }
}

/* Rows 0 and 1 become copies of row 0 and go different ways; row 1 of the second run gets other tokens, row 0 the same. */
static void row_13_3_5_reorder_with_repeats_equals_separate_runs(void **state)
{
    same_bits(*state, "pass 0 7 0:70\npass 0 8 0:40\n", "pass 0 7 0:70 1:3\nreorder 1 0 0:0 1:0\npass 0 9 1:20\npass 0 8 0:40 1:40\n", 110);
    same_bits(*state, "pass 0 7 0:70\npass 0 8 0:40\n", "pass 0 7 0:70\nselect 3 0 0:0\npass 0 9 1:20 2:30\npass 0 8 0:40\n", 110);
}

static void row_13_3_6_clear_then_reuse_is_a_fresh_cache(void **state)
{
    same_bits(*state, "pass 0 7 0:100\n", "pass 0 9 0:77\ncheckpoint 0 0 0:0\nclear 0 0 0:0\npass 0 7 0:100\n", 100);
}

static void row_13_3_7_copies_do_not_influence_each_other_or_the_original(void **state)
{
    same_bits(*state, "pass 0 7 0:75\npass 0 8 0:60\n",
              "pass 0 7 0:75\nfork 0 0 0:1\nfork 0 0 1:2\npass 0 9 1:50\npass 0 8 0:20 2:30\npass 0 8 0:40\nfree 0 0 0:0\npass 0 5 2:60\n", 135);
}

static void row_13_3_8_what_fails_leaves_lengths_and_outputs_unchanged(void **state)
{
    /* Passes given up before and in the middle of layers, one too long, more taken back than there is. */
    same_bits(*state, "pass 0 7 0:70\npass 0 8 0:40\n",
              "pass 0 7 0:70\nabort 0 9 0:90\nabort 1 9 0:1\nundo 99 0 0:0\npass 0 9 0:1000\npass 0 8 0:40\n", 110);
}

static void row_13_3_10_offload_with_0_1_and_2_layers_that_move_and_with_hybrids(void **state)
{
    static const char *const layers[] = {SLIDING, SLIDING FULL, SLIDING FULL FULL, SLIDING HYBRID, LINEAR FULL};
    Policy stay = policies[OFFLOADED];
    Fixture *fixture = *state;

    stay.stay = 1; /* windowed layers remain on the device, in full precision */
    for (size_t l = 0; l < N_ELEMENTS(layers); l++)
        for (unsigned form = 0; form < N_FORMS; form++)
            for (stay.slots = 1; stay.slots <= 2; stay.slots++)
                (void)play(fixture, &stay, form, layers[l], "pass 0 7 0:130\npass 0 8 0:1\npass 0 9 0:1 1:70\npass 0 10 0:40 1:1\n");
}

/* Section 12, "static batch ops, smaller batch in a static cache: missing". */
static void row_12_static_caches_take_batch_operations_and_smaller_batches(void **state)
{
    Fixture *fixture = *state;

    for (size_t p = 1; p <= 3; p += 2) /* static on the device, and offloaded */
        for (size_t l = 0; l < N_ELEMENTS(all_kinds); l++)
            for (unsigned form = 0; form < N_FORMS; form++) {
                random_world_forget(fixture->world);
                assert_int_equal(play(fixture, &policies[p], form, all_kinds[l], "pass 0 7 0:60 1:40\npass 0 8 0:30\npass 0 9 1:50\n"), 0);
                assert_int_equal(play(fixture, &policies[p], form, all_kinds[l],
                                      "pass 0 7 0:60 1:40\nselect 4 0 0:0 1:1\npass 0 8 0:30 2:30\npass 0 9 1:50 3:50\nselect 1 0 0:1 1:0\n"
                                      "pass 0 5 0:9\n"),
                                 100 + 30 + 50); /* the copies, 2 and 3, get tokens of their own: compared with the reference alone */
            }
}

/* Section 12, "quantised + sliding/chunked/linear layers: ValueError": windows quantised too, or kept in full precision on the device. */
static void row_12_quantised_layers_beside_sliding_chunked_and_recurrent_ones(void **state)
{
    static const char *const layers[] = {SLIDING FULL, CHUNKED FULL, LINEAR FULL, HYBRID SLIDING};
    static const char *const operations = "pass 0 7 0:150 1:40\npass 0 8 0:1 1:1\npass 0 9 0:33 1:20\n";
    Fixture *fixture = *state;

    for (size_t l = 0; l < N_ELEMENTS(layers); l++)
        for (unsigned stay = 0; stay < 2; stay++)
            for (size_t p = OFFLOADED; p < N_ELEMENTS(policies); p++) {
                Policy policy = policies[p];

                policy.stay = stay;
                if (p == OFFLOADED)
                    random_world_forget(fixture->world);
                assert_int_equal(play(fixture, &policy, LEAT, layers[l], operations), p == OFFLOADED ? 0 : 245);
            }
}

/* Section 12, "OOM fallback keeping progress: no, restart": a live cache is moved between homes and growths and goes on. */
static void row_12_a_live_cache_migrates_and_goes_on_with_the_same_bits(void **state)
{
    same_bits(*state, "pass 0 7 0:70\npass 0 8 0:40\npass 0 9 0:50\n",
              "pass 0 7 0:70\nmigrate 0 1 0:0\npass 0 8 0:40\nmigrate 0 2 0:0\nmigrate 0 3 0:0\npass 0 9 0:50\n", 160);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(row_13_3_1_any_chunking_gives_the_bits_of_one_prefill),
        cmocka_unit_test(row_13_3_2_dynamic_static_offloaded_and_offloaded_static_give_the_same_bits),
        cmocka_unit_test(row_13_1_offloaded_gives_dynamics_bits_with_fewer_device_bytes),
        cmocka_unit_test(row_13_3_3_tokens_taken_back_and_given_again_leave_no_trace),
        cmocka_unit_test(row_13_3_3_a_draft_that_is_right_in_part_leaves_no_trace_of_the_rest),
        cmocka_unit_test(row_13_3_4_taking_nothing_back_never_changes_the_next_output),
        cmocka_unit_test(row_13_3_5_a_permutation_and_its_inverse_are_the_identity),
        cmocka_unit_test(row_13_3_5_reorder_with_repeats_equals_separate_runs),
        cmocka_unit_test(row_13_3_6_clear_then_reuse_is_a_fresh_cache),
        cmocka_unit_test(row_13_3_7_copies_do_not_influence_each_other_or_the_original),
        cmocka_unit_test(row_13_3_8_what_fails_leaves_lengths_and_outputs_unchanged),
        cmocka_unit_test(row_13_3_10_offload_with_0_1_and_2_layers_that_move_and_with_hybrids),
        cmocka_unit_test(row_12_quantised_layers_beside_sliding_chunked_and_recurrent_ones),
        cmocka_unit_test(row_12_static_caches_take_batch_operations_and_smaller_batches),
        cmocka_unit_test(row_12_a_live_cache_migrates_and_goes_on_with_the_same_bits),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
