/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compatibility mode in a store: saved, restored, moved, forked, cropped and cleared at every place of a schedule of flushes, a sequence goes
 * on with the same bits as one that was left alone; what cannot be exact is refused by name and changes nothing.
 */

#include "cache/kv-migrate.h"
#include "tests/lib/kv-rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

#define SEED 31u

static const KvQuantRequest requests[] = {
    {.backend = "quanto", .has_residual_length = true, .residual_length = 4},
    {.backend = "quanto", .has_nbits = true, .nbits = 2, .has_axis_key = true, .axis_key = -1, .has_axis_value = true, .axis_value = -1,
     .has_q_group_size = true, .q_group_size = 2, .has_residual_length = true, .residual_length = 6},
    /* a tensor of one token is a single group */
    {.backend = "quanto", .has_q_group_size = true, .q_group_size = 128, .has_residual_length = true, .residual_length = 5},
    {.backend = "hqq", .has_axis_key = true, .axis_key = 1, .has_axis_value = true, .axis_value = 1, .has_residual_length = true,
     .residual_length = 4},
    {.backend = "hqq", .has_nbits = true, .nbits = 3, .has_residual_length = true, .residual_length = 7},
    {.backend = "hqq", .has_nbits = true, .nbits = 8, .has_axis_value = true, .axis_value = 1},
    {.backend = "hqq", .has_nbits = true, .nbits = 1, .has_residual_length = true, .residual_length = 1},
    {.backend = "fp8"},
};

/* What happens to a sequence: tokens that come (those of a prompt that goes on: negative, `more`), or go. */
typedef struct Event {
    uint32_t n_tokens;
    bool more;
    uint32_t n_crop;
} Event;

static const Event events[] = {{20, true, 0}, {17, false, 0}, {1, false, 0}, {1, false, 0}, {0, false, 1}, {5, false, 0}, {1, false, 0},
                               {0, false, 9}, {1, false, 0},  {3, true, 0},  {0, false, 1}, {2, false, 0}, {1, false, 0}, {2, false, 0}};
#define N_EVENTS (uint32_t)N_ELEMENTS(events)

static KvPolicy policy_of(size_t i)
{
    KvPolicy policy = kv_bench_policy(KV_STRATEGY_QUANTIZED, KV_FORM_F16);
    ErrorDetail detail = ERROR_DETAIL_NULL;

    policy.is_compatible = true;
    if (kv_quant_options(&requests[i], &policy.compatible, &detail))
        fail_msg("%s", detail.text);
    return policy;
}

static void happen(KvRig *rig, KvStore *store, KvCache *cache, KvStream *stream, uint32_t from, uint32_t end)
{
    for (uint32_t i = from; i < end; i++) {
        const Event *e = &events[i];
        uint32_t length = kv_cache_length(cache), left = 0;

        if (e->n_crop > 0) {
            assert_int_equal(kv_cache_crop(cache, length - e->n_crop, &left, NULL), 0);
            assert_int_equal(left, length - e->n_crop);
            continue;
        }
        kv_cache_set_more(cache, e->more);
        kv_bench_run(&rig->bench, store, cache, stream, length + e->n_tokens, e->n_tokens);
    }
}

static void assert_same_out(const KvRig *rig, const KvStream *a, const KvStream *b, const char *what, size_t i, uint32_t cut)
{
    if (memcmp(a->out, b->out, kv_rig_out_bytes(rig, KV_BENCH_MAX_TOKENS)) != 0)
        fail_msg("%s: %s differs, cut before event %u", requests[i].backend, what, cut);
}

static KvStream *straight(KvRig *rig, size_t i, KvBytes *ret_bytes)
{
    KvPolicy policy = policy_of(i);
    _cleanup_(kv_store_freep) KvStore *store = kv_rig_store(rig, &policy);
    _cleanup_(kv_cache_freep) KvCache *cache = kv_rig_cache(store);
    KvStream *stream = kv_stream_new(&rig->bench, SEED, 100);

    happen(rig, store, cache, stream, 0, N_EVENTS);
    kv_cache_bytes(cache, ret_bytes);
    return stream;
}

static KvCache *restore(KvStore *store, int fd)
{
    _cleanup_(kv_image_freep) KvImage *image = kv_rig_image(store, fd, false);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvCache *cache = NULL;

    if (kv_restore(store, image, &cache, &detail))
        fail_msg("%s", detail.text);
    return cache;
}

static void compat_is_saved_and_restored_at_every_place_of_its_schedule(void **state)
{
    KvRig *rig = *state;

    for (size_t i = 0; i < N_ELEMENTS(requests); i++) {
        KvPolicy policy = policy_of(i);
        KvBytes expected, got;
        _cleanup_(kv_stream_freep) KvStream *alone = straight(rig, i, &expected);

        for (uint32_t cut = 1; cut < N_EVENTS; cut++) {
            _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, 100);
            KvStore *store = kv_rig_store(rig, &policy);
            KvCache *cache = kv_rig_cache(store);
            uint32_t length;
            int fd;

            happen(rig, store, cache, stream, 0, cut);
            length = kv_cache_length(cache);
            fd = kv_rig_save(cache, "the ids");
            kv_cache_free(cache);
            kv_store_free(store);
            policy.max_cache_tokens = 64 + cut;
            store = kv_rig_store(rig, &policy);
            cache = restore(store, fd);
            assert_int_equal(kv_cache_length(cache), length);
            happen(rig, store, cache, stream, cut, N_EVENTS);
            assert_same_out(rig, alone, stream, "restored", i, cut);
            kv_cache_bytes(cache, &got);
            assert_int_equal(got.length, expected.length);
            kv_cache_free(cache);
            kv_store_free(store);
            (void)close(fd);
        }
    }
}

static void compat_moves_to_a_store_of_the_same_keys_with_the_same_bits(void **state)
{
    KvRig *rig = *state;

    for (size_t i = 0; i < N_ELEMENTS(requests); i++) {
        KvPolicy policy = policy_of(i), other = policy;
        KvBytes bytes;
        _cleanup_(kv_stream_freep) KvStream *alone = straight(rig, i, &bytes);

        /* None of the axes is of matter here. */
        other.growth = KV_GROWTH_STATIC;
        other.home = KV_HOME_HOST;
        other.transfer = KV_TRANSFER_COPY;
        other.n_slots = 1;
        other.max_cache_tokens = 128;
        for (uint32_t cut = 1; cut < N_EVENTS; cut += 2) {
            _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, 100);
            KvStore *store = kv_rig_store(rig, &policy), *target = kv_rig_store(rig, &other);
            KvCache *cache = kv_rig_cache(store);

            happen(rig, store, cache, stream, 0, cut);
            assert_true(kv_store_is_same(store, target));
            assert_int_equal(kv_store_migrate(store, target, false, NULL), 0);
            kv_store_free(store);
            happen(rig, target, cache, stream, cut, N_EVENTS);
            assert_same_out(rig, alone, stream, "moved", i, cut);
            kv_cache_free(cache);
            kv_store_free(target);
        }
    }
}

/* From @store to another of @policy; afterwards the sequence goes on where it was. */
static void refuse_move(KvRig *rig, const KvPolicy *from, const KvPolicy *to, const char *named)
{
    _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, 100), *alone = kv_stream_new(&rig->bench, SEED, 100);
    KvStore *store = kv_rig_store(rig, from), *target = kv_rig_store(rig, to);
    KvCache *cache = kv_rig_cache(store), *other = kv_rig_cache(store);

    happen(rig, store, other, alone, 0, 6);
    happen(rig, store, cache, stream, 0, 4);
    for (int lossy = 0; lossy < 2; lossy++) {
        ErrorDetail detail = ERROR_DETAIL_NULL;

        assert_int_equal(kv_caches_migrate(&cache, 1, target, lossy, &detail), -ENOTSUP);
        if (!strstr(detail.text, named))
            fail_msg("'%s' does not say '%s'", detail.text, named);
    }
    assert_false(kv_store_is_same(store, target));
    happen(rig, store, cache, stream, 4, 6);
    assert_same_out(rig, alone, stream, "after a refusal", 0, 4);
    kv_cache_free(cache);
    kv_cache_free(other);
    kv_store_free(store);
    kv_store_free(target);
}

static void compat_does_not_move_where_it_would_have_other_numbers(void **state)
{
    KvRig *rig = *state;
    KvPolicy pages = kv_bench_policy(KV_STRATEGY_DYNAMIC, KV_FORM_F32), compatible = policy_of(3);

    refuse_move(rig, &compatible, &pages, "to pages");
    refuse_move(rig, &pages, &compatible, "from pages to hqq of 4 bits, axes 1 and 1, groups of 64, residual of 4");
    for (size_t i = 0; i < N_ELEMENTS(requests); i++) {
        KvPolicy other = policy_of(i);

        if (i != 3)
            refuse_move(rig, &compatible, &other, requests[i].backend);
    }
    compatible = policy_of(0);
    pages = compatible;
    pages.compatible.residual_length = 5;
    refuse_move(rig, &compatible, &pages, "residual of 5");
}

static void compat_saved_with_other_keys_is_refused(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = policy_of(3);
    _cleanup_(kv_store_freep) KvStore *store = kv_rig_store(rig, &policy);
    _cleanup_(kv_cache_freep) KvCache *cache = kv_rig_cache(store);
    _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, 100);
    KvPolicy others[7];
    int fd;

    happen(rig, store, cache, stream, 0, 4);
    fd = kv_rig_save(cache, "the ids");
    for (size_t i = 0; i < N_ELEMENTS(others); i++)
        others[i] = policy;
    others[0].compatible.nbits = 8;
    others[1].compatible.axis_key = 0;
    others[2].compatible.axis_value = 0;
    others[3].compatible.q_group_size = 32;
    others[4].compatible.residual_length = 5;
    others[5].compatible.backend = KV_BACKEND_QUANTO;
    others[6] = kv_bench_policy(KV_STRATEGY_DYNAMIC, KV_FORM_F32);
    for (size_t i = 0; i < N_ELEMENTS(others); i++) {
        KvStore *other = kv_rig_store(rig, &others[i]);
        ErrorDetail detail = ERROR_DETAIL_NULL;
        KvImage *image = NULL;

        assert_int_equal(kv_rig_open(other, fd, false, &image, &detail), KV_IMAGE_E_DIFFERENT);
        assert_non_null(strstr(detail.text, "another form of the cache"));
        kv_store_free(other);
    }
    (void)close(fd);
}

/* The image with one number of a record changed, or without its last byte. */
static KvImage *forge(const KvStore *store, const KvImage *image, uint32_t chunk, size_t at, uint32_t value, bool cut)
{
    int fd = kv_rig_forge(image, &image->chunks[chunk], at, value, cut);
    KvImage *forged = kv_rig_image(store, fd, false);

    (void)close(fd);
    return forged;
}

static void compat_file_that_does_not_add_up_is_refused(void **state)
{
    static const uint32_t values[] = {0, 1, 3, 39, 0x7fffffff, UINT32_MAX};
    KvRig *rig = *state;
    uint32_t n_refused = 0;

    for (size_t i = 0; i < N_ELEMENTS(requests); i += 3) {
        KvPolicy policy = policy_of(i);
        _cleanup_(kv_store_freep) KvStore *store = kv_rig_store(rig, &policy);
        _cleanup_(kv_cache_freep) KvCache *cache = kv_rig_cache(store);
        _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, 100);
        _cleanup_(kv_image_freep) KvImage *image = NULL;
        int fd;

        happen(rig, store, cache, stream, 0, 10); /* codes, a residual of fewer than three tokens, three pending ones */
        fd = kv_rig_save(cache, "the ids");
        image = kv_rig_image(store, fd, false);
        for (uint32_t c = 0; c < image->n_chunks; c++) {
            /* n_counted, n_residual, n_pending, n_stored, whether each value is its own group; and an end that is missing */
            static const size_t places[] = {0, 4, 8, 12, 28, SIZE_MAX};

            if (image->chunks[c].kind != 6)
                continue;
            for (size_t p = 0; p < N_ELEMENTS(places); p++)
                for (size_t v = 0; v < N_ELEMENTS(values); v++) {
                    bool cut = places[p] == SIZE_MAX;
                    _cleanup_(kv_image_freep) KvImage *forged = NULL;
                    ErrorDetail detail = ERROR_DETAIL_NULL;
                    KvCache *got = NULL;
                    uint32_t now;

                    memcpy(&now, (const uint8_t *)image->chunks[c].data + (cut ? 0 : places[p]), sizeof(now));
                    if (!cut && now == values[v])
                        continue;
                    forged = forge(store, image, c, cut ? 0 : places[p], values[v], cut);
                    if (kv_restore(store, forged, &got, &detail) != -EBADMSG || got)
                        fail_msg("%s: chunk %u with %u at %zu is taken: %s", requests[i].backend, c, values[v], places[p], detail.text);
                    n_refused++;
                }
        }
        happen(rig, store, cache, stream, 10, N_EVENTS);
        (void)close(fd);
    }
    print_message("%u forged files refused\n", n_refused);
    assert_true(n_refused > 300);
}

static void compat_file_beyond_the_context_is_refused(void **state)
{
    KvRig *rig = *state;
    KvPolicy policy = policy_of(0);
    KvStore *store = kv_rig_store(rig, &policy);
    KvCache *cache = kv_rig_cache(store), *got = NULL;
    _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, 100);
    _cleanup_(kv_image_freep) KvImage *image = NULL;
    int fd;

    happen(rig, store, cache, stream, 0, 4);
    fd = kv_rig_save(cache, "the ids");
    kv_cache_free(cache);
    kv_store_free(store);
    policy.max_cache_tokens = 38;
    store = kv_rig_store(rig, &policy);
    image = kv_rig_image(store, fd, false);
    assert_int_equal(kv_restore(store, image, &got, NULL), KV_E_CONTEXT);
    kv_store_free(store);
    (void)close(fd);
}

static void compat_fork_and_clear_leave_the_others_alone(void **state)
{
    KvRig *rig = *state;

    for (size_t i = 0; i < N_ELEMENTS(requests); i++) {
        KvPolicy policy = policy_of(i);
        KvBytes bytes;
        _cleanup_(kv_stream_freep) KvStream *alone = straight(rig, i, &bytes), *other = kv_stream_new(&rig->bench, SEED + 1, 100);
        _cleanup_(kv_store_freep) KvStore *store = kv_rig_store(rig, &policy);

        for (uint32_t cut = 1; cut < N_EVENTS; cut += 3) {
            _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, 100);
            KvCache *cache = kv_rig_cache(store), *fork = NULL;

            happen(rig, store, cache, stream, 0, cut);
            assert_int_equal(kv_cache_fork(cache, &fork, NULL), 0);
            happen(rig, store, cache, other, cut, N_EVENTS);
            assert_int_equal(kv_cache_clear(cache), 0);
            assert_int_equal(kv_cache_length(cache), 0);
            happen(rig, store, fork, stream, cut, N_EVENTS);
            assert_same_out(rig, alone, stream, "a fork", i, cut);
            memset(stream->out, 0, kv_rig_out_bytes(rig, KV_BENCH_MAX_TOKENS));
            happen(rig, store, cache, stream, 0, N_EVENTS);
            assert_same_out(rig, alone, stream, "one that was cleared", i, cut);
            kv_cache_free(cache);
            kv_cache_free(fork);
        }
    }
}

/* Rows are sequences of their own here: exact where Transformers codes each row of a batch by itself. */
static void compat_rows_move_where_they_are_coded_apart(void **state)
{
    static const uint32_t order[] = {1, 1, 0};
    KvRig *rig = *state;

    for (size_t i = 0; i < N_ELEMENTS(requests); i++) {
        KvPolicy policy = policy_of(i);
        _cleanup_(kv_store_freep) KvStore *store = kv_rig_store(rig, &policy);
        KvCache *caches[3] = {kv_rig_cache(store), kv_rig_cache(store)};
        KvStream *streams[3];
        bool apart = kv_quant_rows_are_apart(&policy.compatible);
        ErrorDetail detail = ERROR_DETAIL_NULL;
        int r;

        for (uint32_t s = 0; s < 3; s++)
            streams[s] = kv_stream_new(&rig->bench, s == 2 ? SEED : SEED + 1 - s, 100);
        happen(rig, store, caches[0], streams[2], 0, 5); /* SEED, SEED */
        happen(rig, store, caches[1], streams[0], 0, 5); /* SEED + 1 */
        r = kv_caches_select(caches, 2, order, 3, &detail);
        assert_int_equal(r, apart ? 0 : -ENOTSUP);
        if (apart) {
            KvBytes bytes;
            KvStream *alone = straight(rig, i, &bytes);

            happen(rig, store, caches[2], streams[2], 5, N_EVENTS);
            assert_same_out(rig, alone, streams[2], "a row", i, 5);
            kv_stream_free(alone);
        } else {
            assert_non_null(strstr(detail.text, requests[i].backend));
            assert_int_equal(kv_caches_select(caches, 2, order + 2, 1, NULL), 0); /* one row is no batch */
            caches[1] = NULL;
        }
        for (uint32_t s = 0; s < 3; s++) {
            kv_stream_free(streams[s]);
            (void)kv_cache_free(caches[s]);
        }
    }
}

static void compat_keeps_no_more_than_it_plans_and_its_budget_allows(void **state)
{
    KvRig *rig = *state;

    for (size_t i = 0; i < N_ELEMENTS(requests); i++) {
        KvPolicy policy = policy_of(i);
        KvStore *store = kv_rig_store(rig, &policy);
        KvCache *cache = kv_rig_cache(store);
        _cleanup_(kv_stream_freep) KvStream *stream = kv_stream_new(&rig->bench, SEED, 512);
        ErrorDetail detail = ERROR_DETAIL_NULL;
        KvBytes bytes;
        KvPlan plan;

        assert_int_equal(kv_store_plan(gpu_info(rig->gpu), &rig->bench.model, &policy, &plan, NULL), 0);
        assert_true(plan.host_bytes_per_token > 0);
        kv_bench_run(&rig->bench, store, cache, stream, 300, 300);
        kv_bench_run(&rig->bench, store, cache, stream, 330, 3);
        kv_cache_bytes(cache, &bytes);
        assert_int_equal(bytes.n_pages, 0);
        assert_in_range(bytes.host, 300 * plan.host_bytes_per_token, 331 * plan.host_bytes_per_token + plan.host_window_bytes);
        kv_cache_free(cache);
        kv_store_free(store);
        policy.host_budget_bytes = 100 * plan.host_bytes_per_token;
        store = kv_rig_store(rig, &policy);
        cache = kv_rig_cache(store);
        assert_int_equal(kv_bench_pass(&rig->bench, store, &(KvBenchItem){cache, stream, 101}, 1, &detail), KV_E_HOST_MEMORY);
        assert_non_null(strstr(detail.text, "host-memory"));
        assert_int_equal(kv_cache_length(cache), 0);
        kv_bench_run(&rig->bench, store, cache, stream, 60, 60);
        kv_cache_free(cache);
        kv_store_free(store);
    }
}

static int setup(void **state)
{
    *state = kv_rig_new(3);
    return 0;
}

static int teardown(void **state)
{
    *state = kv_rig_free(*state);
    return 0;
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(compat_is_saved_and_restored_at_every_place_of_its_schedule),
        cmocka_unit_test(compat_moves_to_a_store_of_the_same_keys_with_the_same_bits),
        cmocka_unit_test(compat_does_not_move_where_it_would_have_other_numbers),
        cmocka_unit_test(compat_saved_with_other_keys_is_refused),
        cmocka_unit_test(compat_file_that_does_not_add_up_is_refused),
        cmocka_unit_test(compat_file_beyond_the_context_is_refused),
        cmocka_unit_test(compat_fork_and_clear_leave_the_others_alone),
        cmocka_unit_test(compat_rows_move_where_they_are_coded_apart),
        cmocka_unit_test(compat_keeps_no_more_than_it_plans_and_its_budget_allows),
    };

    printf("seed %u\n", SEED);
    return cmocka_run_group_tests(tests, setup, teardown);
}
