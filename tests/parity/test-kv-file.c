/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saved sequences: restored in a store of any growth, home and transfer they go on with the same bits; what does not fit or is not whole is
 * refused and changes nothing.
 */

#include "tests/lib/kv-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

#define SEED     23u
#define N_SAVED  603u /* two whole blocks, two pages of the third, and a rest */
#define N_TOKENS 700u

static const struct {
    KvStrategy strategy;
    KvTransfer transfer;
} policies[] = {
    {KV_STRATEGY_DYNAMIC, KV_TRANSFER_AUTO},         {KV_STRATEGY_STATIC, KV_TRANSFER_AUTO},
    {KV_STRATEGY_OFFLOADED, KV_TRANSFER_COPY},       {KV_STRATEGY_OFFLOADED, KV_TRANSFER_ZERO_COPY},
    {KV_STRATEGY_OFFLOADED_STATIC, KV_TRANSFER_COPY}, {KV_STRATEGY_OFFLOADED_STATIC, KV_TRANSFER_ZERO_COPY},
};

static KvPolicy policy_of(size_t i, KvFormKind kind)
{
    KvPolicy policy = kv_bench_policy(policies[i].strategy, kind);

    /* Every growth and home with every form. */
    policy.form = kv_bench_policy(kind == KV_FORM_LEAT ? KV_STRATEGY_QUANTIZED : KV_STRATEGY_DYNAMIC, kind).form;
    policy.transfer = policies[i].transfer;
    return policy;
}

/* A file with the first N_SAVED tokens. */
static int save_file(KvRig *rig, const KvPolicy *policy, KvFormKind kind)
{
    _cleanup_(kv_store_freep) KvStore *store = kv_rig_store(rig, policy);
    _cleanup_(kv_cache_freep) KvCache *cache = kv_rig_cache(store);
    KvSave *save;

    kv_bench_run(&rig->bench, store, cache, rig->cold[kind], N_SAVED, 97);
    save = kv_rig_save_begin(cache, "ids of the session");
    /* The sequence goes on before the file is written. */
    kv_bench_run(&rig->bench, store, cache, rig->cold[kind], N_TOKENS, 40);
    return kv_rig_save_end(save);
}

/* Restores and runs the rest of the tokens; the outputs are those of the cold run. */
static void restore_and_compare(KvRig *rig, const KvPolicy *policy, KvFormKind kind, int fd)
{
    _cleanup_(kv_store_freep) KvStore *store = kv_rig_store(rig, policy);
    _cleanup_(kv_cache_freep) KvCache *cache = NULL;
    _cleanup_(kv_image_freep) KvImage *image = kv_rig_image(store, fd, true);
    KvStream *again = kv_stream_new(&rig->bench, SEED, N_TOKENS);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    size_t n_extra, n_saved = kv_rig_out_bytes(rig, N_SAVED);

    if (kv_restore(store, image, &cache, &detail))
        fail_msg("%s", detail.text);
    assert_int_equal(kv_cache_length(cache), N_SAVED);
    assert_memory_equal(kv_image_extra(image, &n_extra), "ids of the session", 18);
    assert_int_equal(n_extra, 18);
    image = kv_image_free(image);
    kv_bench_run(&rig->bench, store, cache, again, N_TOKENS, 31);
    assert_memory_equal((const char *)again->out + n_saved, (const char *)rig->cold[kind]->out + n_saved,
                        kv_rig_out_bytes(rig, N_TOKENS) - n_saved);
    kv_stream_free(again);
}

static void a_restored_sequence_goes_on_with_the_same_bits_in_any_store(void **state)
{
    KvRig *rig = *state;

    for (size_t kind = 0; kind <= KV_FORM_LEAT; kind++)
        for (size_t from = 0; from < N_ELEMENTS(policies); from += 2) {
            KvPolicy policy = policy_of(from, (KvFormKind)kind);
            int fd = save_file(rig, &policy, (KvFormKind)kind);

            for (size_t to = 0; to < N_ELEMENTS(policies); to++) {
                policy = policy_of(to, (KvFormKind)kind);
                restore_and_compare(rig, &policy, (KvFormKind)kind, fd);
            }
            (void)close(fd);
        }
}

static void another_form_or_calibration_has_another_fingerprint(void **state)
{
    KvRig *rig = *state;
    KvPolicy policies_[] = {policy_of(0, KV_FORM_F32), policy_of(0, KV_FORM_F16), policy_of(0, KV_FORM_LEAT), policy_of(0, KV_FORM_LEAT)};
    const float *means = rig->bench.calibration[1].v_mean;
    uint64_t layouts[5];

    policies_[3].form.k_bits = 8;
    for (size_t i = 0; i < 4; i++) {
        KvStore *store = kv_rig_store(rig, &policies_[i]);

        layouts[i] = kv_store_layout(store);
        kv_store_free(store);
    }
    rig->bench.calibration[1].v_mean = rig->bench.calibration[0].v_mean;
    {
        KvStore *store = kv_rig_store(rig, &policies_[2]);

        layouts[4] = kv_store_layout(store);
        kv_store_free(store);
    }
    rig->bench.calibration[1].v_mean = means;
    for (size_t i = 0; i < 5; i++)
        for (size_t k = 0; k < i; k++)
            if (layouts[i] == layouts[k])
                fail_msg("stores %zu and %zu have the same fingerprint", i, k);
}

/* Everything that the caches of a store hold is unchanged by a restore that fails. */
static void refuse(KvRig *rig, const KvPolicy *policy, int fd, int expected)
{
    _cleanup_(kv_store_freep) KvStore *store = kv_rig_store(rig, policy);
    _cleanup_(kv_image_freep) KvImage *image = kv_rig_image(store, fd, true);
    uint64_t before[GPU_PURPOSE_X_MAX], after[GPU_PURPOSE_X_MAX], total;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvCache *cache = NULL;

    gpu_memory_used(rig->gpu, before, &total);
    assert_int_equal(kv_restore(store, image, &cache, &detail), expected);
    assert_true(detail.text[0]);
    assert_null(cache);
    gpu_memory_used(rig->gpu, after, &total);
    assert_memory_equal(before, after, sizeof(before));
}

static void what_does_not_fit_is_refused_and_changes_nothing(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = policy_of(2, KV_FORM_F16);
    int fd = save_file(rig, &policy, KV_FORM_F16);

    policy.max_cache_tokens = N_SAVED - 1;
    refuse(rig, &policy, fd, KV_E_CONTEXT);
    policy = policy_of(2, KV_FORM_F16);
    policy.host_budget_bytes = 100000;
    refuse(rig, &policy, fd, KV_E_HOST_MEMORY);
    (void)close(fd);
}

/* Cut before, at and after each section's border; a byte of each section and of what lies between changed.  A cache that lives in the store
 * goes on as if nothing had been. */
static void a_file_cut_or_damaged_in_any_section_is_refused(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = policy_of(2, KV_FORM_LEAT);
    int fd = save_file(rig, &policy, KV_FORM_LEAT);
    _cleanup_(kv_store_freep) KvStore *store = kv_rig_store(rig, &policy);
    _cleanup_(kv_cache_freep) KvCache *cache = kv_rig_cache(store);
    _cleanup_(kv_image_freep) KvImage *image = kv_rig_image(store, fd, true);
    KvStream *stream = kv_stream_new(&rig->bench, SEED, N_TOKENS);
    KvImageFacts facts = image->facts;
    uint64_t bytes = image->memory_bytes;
    uint8_t *file = malloc(bytes);
    uint32_t n_refused = 0;

    assert_non_null(file);
    assert_int_equal(pread(fd, file, bytes, 0), bytes);
    kv_bench_run(&rig->bench, store, cache, stream, N_SAVED, 97);
    for (uint32_t i = 0; i < image->n_chunks; i++) {
        uint64_t offset = (uint64_t)((const char *)image->chunks[i].data - (const char *)image->memory), end = offset + image->chunks[i].bytes;
        const uint64_t cuts[] = {offset - 1, offset, offset + 1, (offset + end) / 2, end - 1, end};
        const uint64_t flips[] = {offset - 1, offset, (offset + end) / 2, end - 1};

        for (size_t k = 0; k < N_ELEMENTS(cuts) + N_ELEMENTS(flips); k++) {
            bool cut = k < N_ELEMENTS(cuts);
            uint64_t at = cut ? cuts[k] : flips[k - N_ELEMENTS(cuts)];
            int damaged = memfd_create("damaged", MFD_CLOEXEC);
            ErrorDetail detail = ERROR_DETAIL_NULL;
            KvImage *opened = NULL;

            if (cut && at == bytes) { /* the whole file */
                (void)close(damaged);
                continue;
            }
            file[at] ^= cut ? 0 : 1;
            assert_int_equal(write(damaged, file, cut ? at : bytes), cut ? at : bytes);
            file[at] ^= cut ? 0 : 1;
            assert_int_equal(kv_image_open(damaged, "damaged", &facts, k % 2, &opened, &detail), KV_IMAGE_E_DAMAGED);
            assert_true(detail.text[0]);
            assert_null(opened);
            (void)close(damaged);
            n_refused++;
        }
    }
    print_message("%u sections, %u files refused\n", image->n_chunks, n_refused);
    assert_int_equal(kv_cache_length(cache), N_SAVED);
    kv_bench_run(&rig->bench, store, cache, stream, N_TOKENS, 31);
    assert_memory_equal((const char *)stream->out, (const char *)rig->cold[KV_FORM_LEAT]->out, kv_rig_out_bytes(rig, N_TOKENS));
    kv_stream_free(stream);
    free(file);
    (void)close(fd);
}

static void a_record_that_does_not_add_up_is_refused(void **state)
{
    static const uint32_t values[] = {0, 1, N_SAVED - 1, N_SAVED + 1, 0x7fffffff, UINT32_MAX};
    KvRig *rig = *state;
    KvPolicy policy = policy_of(2, KV_FORM_LEAT);
    int fd = save_file(rig, &policy, KV_FORM_LEAT);
    _cleanup_(kv_store_freep) KvStore *store = kv_rig_store(rig, &policy);
    _cleanup_(kv_image_freep) KvImage *image = kv_rig_image(store, fd, true);
    const KvImageChunk *record = kv_image_find(image, 1, 0, 0);
    uint32_t n_refused = 0;

    assert_int_equal(record->bytes, 16 + 16 * KV_BENCH_LAYERS);
    /* length, n_layers, and of the second layer: tail_from, first_page, n_pages; not cross_length, which nothing reads. */
    for (size_t i = 0; i < N_ELEMENTS(values); i++)
        for (size_t at = 0; at < 16 + 32; at += 4) {
            int forged;

            if (at == 4 || at == 12 || at == 28 || at == 44 || ((at == 16 || at == 32 || at == 20 || at == 36) && values[i] <= 1))
                continue; /* reserved, or a value that may be */
            forged = kv_rig_forge(image, record, at, values[i], false);
            refuse(rig, &policy, forged, -EBADMSG);
            n_refused++;
            (void)close(forged);
        }
    print_message("%u forged records refused\n", n_refused);
    (void)close(fd);
}

static int setup(void **state)
{
    KvRig *rig = kv_rig_new(2);

    for (size_t kind = 0; kind <= KV_FORM_LEAT; kind++) {
        KvPolicy policy = policy_of(0, (KvFormKind)kind);

        kv_rig_run_cold(rig, (KvFormKind)kind, &policy, SEED, N_TOKENS, 128);
    }
    *state = rig;
    return 0;
}

static int teardown(void **state)
{
    *state = kv_rig_free(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_restored_sequence_goes_on_with_the_same_bits_in_any_store),
        cmocka_unit_test(another_form_or_calibration_has_another_fingerprint),
        cmocka_unit_test(what_does_not_fit_is_refused_and_changes_nothing),
        cmocka_unit_test(a_file_cut_or_damaged_in_any_section_is_refused),
        cmocka_unit_test(a_record_that_does_not_add_up_is_refused),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
