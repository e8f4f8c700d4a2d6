/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of pages in host arenas; no device. */

#include "cache/kv-arena.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define SEED 20240611u
#define PAGE_BYTES 128
#define BLOCK_BYTES (3 * KV_BLOCK_PAGES * PAGE_BYTES)

typedef struct Fixture {
    KvBudget budget;
    KvArenas arenas;
} Fixture;

static void fixture_init(Fixture *fixture, bool fixed, uint32_t first, uint32_t max, uint64_t limit_bytes)
{
    *fixture = (Fixture){.budget = {.limit_bytes = limit_bytes}};
    kv_arenas_init(&fixture->arenas, &(KvArenaOptions){.home = KV_HOME_HOST,
                                                       .fixed = fixed,
                                                       .n_layers = 3,
                                                       .page_bytes = PAGE_BYTES,
                                                       .first_pages = first * KV_BLOCK_PAGES,
                                                       .max_pages = max * KV_BLOCK_PAGES,
                                                       .host_budget = &fixture->budget});
}

static KvBlock *take(Fixture *fixture, const KvBlock *after)
{
    KvBlock *block = NULL;

    assert_int_equal(kv_arenas_take(&fixture->arenas, after, 0, KV_BLOCK_PAGES, &block, NULL), 0);
    assert_non_null(block);
    assert_int_equal(block->n_refs, 1);
    return block;
}

static void arena_gives_a_growing_sequence_consecutive_blocks(void **state)
{
    Fixture fixture;
    KvBlock *a = NULL, *b = NULL;

    (void)state;
    fixture_init(&fixture, false, 64, 64, 0);
    for (uint32_t i = 0; i < 16; i++) { /* two sequences that grow in turn */
        KvBlock *next_a = take(&fixture, a), *next_b = take(&fixture, b);

        if (i > 0) {
            assert_ptr_equal(next_a->arena, a->arena);
            assert_int_equal(next_a->pages[0], a->pages[KV_BLOCK_PAGES - 1] + 1);
            assert_int_equal(next_b->pages[0], b->pages[KV_BLOCK_PAGES - 1] + 1);
        }
        a = next_a;
        b = next_b;
    }
    assert_int_equal(fixture.arenas.n_arenas, 1);
    assert_int_equal(fixture.arenas.n_used, 32 * KV_BLOCK_PAGES);
    assert_int_equal(fixture.budget.used_bytes, 32 * BLOCK_BYTES);
    kv_arenas_deinit(&fixture.arenas);
}

static void arena_places_never_overlap_and_lie_in_planes(void **state)
{
    Fixture fixture;
    KvBlock *blocks[5];

    (void)state;
    fixture_init(&fixture, false, 5, 5, 0);
    for (uint32_t i = 0; i < 5; i++)
        blocks[i] = take(&fixture, i > 0 ? blocks[i - 1] : NULL);
    for (uint32_t i = 0; i < 5; i++)
        for (uint32_t l = 0; l < 3; l++)
            for (uint32_t p = 0; p < KV_BLOCK_PAGES; p++)
                memset(blocks[i]->arena->memory + kv_block_offset(blocks[i], l, p),
                       (int)(1 + i * 24 + l * 8 + p), PAGE_BYTES);
    for (uint32_t i = 0; i < 5; i++)
        for (uint32_t l = 0; l < 3; l++)
            for (uint32_t p = 0; p < KV_BLOCK_PAGES; p++)
                for (uint32_t j = 0; j < PAGE_BYTES; j++)
                    assert_int_equal(blocks[i]->arena->memory[kv_block_offset(blocks[i], l, p) + j],
                                     1 + i * 24 + l * 8 + p);
    assert_true(kv_block_offset(blocks[4], 2, KV_BLOCK_PAGES - 1) + PAGE_BYTES ==
                (uint64_t)5 * BLOCK_BYTES);
    kv_arenas_deinit(&fixture.arenas);
}

static void arena_refuses_a_block_over_the_host_budget(void **state)
{
    Fixture fixture;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvBlock *a, *b, *c = NULL;

    (void)state;
    fixture_init(&fixture, false, 8, 8, 2 * BLOCK_BYTES + 5);
    a = take(&fixture, NULL);
    b = take(&fixture, a);
    assert_int_equal(kv_arenas_take(&fixture.arenas, b, 0, KV_BLOCK_PAGES, &c, &detail), KV_E_HOST_MEMORY);
    assert_null(c);
    assert_non_null(strstr(detail.text, "6144"));
    assert_int_equal(fixture.arenas.n_used, 2 * KV_BLOCK_PAGES);
    assert_null(kv_block_unref(a));
    c = take(&fixture, b);
    assert_int_equal(fixture.budget.used_bytes, 2 * BLOCK_BYTES);
    kv_arenas_deinit(&fixture.arenas);
}

static bool give_up_one(void *userdata)
{
    Fixture *fixture = userdata;

    if (fixture->budget.used_bytes < 1000)
        return false;
    kv_budget_return(&fixture->budget, 1000);
    return true;
}

static void budget_reclaims_before_it_refuses(void **state)
{
    Fixture fixture;

    (void)state;
    fixture_init(&fixture, false, 8, 8, BLOCK_BYTES);
    fixture.budget.reclaim = give_up_one;
    fixture.budget.userdata = &fixture;
    fixture.budget.used_bytes = 2000;
    (void)take(&fixture, NULL);
    assert_true(fixture.budget.used_bytes <= BLOCK_BYTES);
    assert_false(kv_budget_take(&fixture.budget, BLOCK_BYTES + 1));
    kv_arenas_deinit(&fixture.arenas);
}

static void budgets_that_share_one_are_kept_together(void **state)
{
    KvBudget shared = {.limit_bytes = 1000};
    KvBudget each[3] = {{.limit_bytes = 600, .shared = &shared}, {.limit_bytes = 300, .shared = &shared}, {.shared = &shared}};
    uint32_t seed = SEED, n_own = 0, n_shared = 0;

    (void)state;
    for (uint32_t i = 0; i < 20000; i++) {
        KvBudget *budget = &each[(seed = seed * 1664525 + 1013904223) >> 8 & 1 ? i % 3 : 2];
        uint64_t bytes = (seed >> 12) % 200, used = each[0].used_bytes + each[1].used_bytes + each[2].used_bytes;
        bool own = budget->limit_bytes == 0 || budget->used_bytes + bytes <= budget->limit_bytes, all = used + bytes <= 1000;

        if (seed >> 30 == 0) {
            kv_budget_return(budget, MIN(bytes, budget->used_bytes));
        } else {
            assert_true(kv_budget_left(budget) >= bytes || !own || !all);
            assert_true(kv_budget_take(budget, bytes) == (own && all));
            if (own != all) /* one of the two has refused it */
                assert_true(kv_budget_others_can_help(budget) == !all);
            n_own += !own;
            n_shared += !all;
        }
        assert_int_equal(shared.used_bytes, each[0].used_bytes + each[1].used_bytes + each[2].used_bytes);
    }
    assert_true(n_own > 100 && n_shared > 100);
}

static void arena_reserves_all_of_a_static_cache_or_nothing(void **state)
{
    Fixture fixture;
    KvBlock *last = NULL;

    (void)state;
    fixture_init(&fixture, true, 10, 10, 25 * BLOCK_BYTES);
    assert_int_equal(kv_arenas_reserve(&fixture.arenas, 10 * KV_BLOCK_PAGES, NULL), 0);
    assert_int_equal(kv_arenas_reserve(&fixture.arenas, 10 * KV_BLOCK_PAGES, NULL), 0);
    assert_int_equal(kv_arenas_reserve(&fixture.arenas, 10 * KV_BLOCK_PAGES, NULL), KV_E_HOST_MEMORY);
    assert_int_equal(fixture.arenas.n_pages, 20 * KV_BLOCK_PAGES);
    assert_int_equal(fixture.budget.used_bytes, 20 * BLOCK_BYTES);
    for (uint32_t i = 0; i < 20; i++)
        last = take(&fixture, last);
    assert_int_equal(fixture.arenas.n_arenas, 2);
    assert_int_equal(fixture.budget.used_bytes, 20 * BLOCK_BYTES);
    kv_arenas_deinit(&fixture.arenas);
}

static void arena_gives_empty_memory_back_but_keeps_what_is_promised(void **state)
{
    Fixture fixture;
    KvBlock *blocks[6];

    (void)state;
    fixture_init(&fixture, false, 2, 2, 0);
    for (uint32_t i = 0; i < 6; i++)
        blocks[i] = take(&fixture, NULL);
    assert_int_equal(fixture.arenas.n_arenas, 3);
    assert_false(kv_arenas_can_trim(&fixture.arenas));
    for (uint32_t i = 0; i < 6; i++)
        if (blocks[i]->arena != blocks[5]->arena)
            (void)kv_block_unref(blocks[i]);
    assert_true(kv_arenas_can_trim(&fixture.arenas));
    kv_arenas_trim(&fixture.arenas);
    assert_int_equal(fixture.arenas.n_arenas, 1);
    assert_int_equal(fixture.arenas.n_used, 2 * KV_BLOCK_PAGES);
    assert_ptr_equal(fixture.arenas.arenas[0], blocks[5]->arena);
    kv_arenas_deinit(&fixture.arenas);
}

/* A thousand random takes, shares and returns against a plain count. */
static void arena_counts_stay_exact_under_random_use(void **state)
{
    Fixture fixture;
    KvBlock *held[64];
    uint32_t n = 0, x = SEED;

    (void)state;
    fixture_init(&fixture, false, 4, 16, 0);
    for (uint32_t step = 0; step < 4000; step++) {
        x = x * 1664525u + 1013904223u;
        if (n < 64 && (x >> 16) % 3 != 0) {
            if (n > 0 && (x >> 20) % 4 == 0)
                held[n] = kv_block_ref(held[(x >> 8) % n]);
            else
                held[n] = take(&fixture, n > 0 ? held[n - 1] : NULL);
            n++;
        } else if (n > 0) {
            uint32_t i = (x >> 8) % n;

            (void)kv_block_unref(held[i]);
            held[i] = held[--n];
        }
        if (step % 512 == 0)
            kv_arenas_trim(&fixture.arenas);
        if (step % 64 == 0) {
            uint32_t used = 0, refs = 0;

            for (uint32_t a = 0; a < fixture.arenas.n_arenas; a++)
                for (uint32_t b = 0; b < fixture.arenas.arenas[a]->n_pages; b++) {
                    used += fixture.arenas.arenas[a]->blocks[b].n_refs > 0 ? KV_BLOCK_PAGES : 0;
                    refs += fixture.arenas.arenas[a]->blocks[b].n_refs;
                }
            assert_int_equal(used, fixture.arenas.n_used);
            assert_int_equal(refs, n);
            assert_int_equal(fixture.budget.used_bytes, (uint64_t)used * (BLOCK_BYTES / KV_BLOCK_PAGES));
        }
    }
    while (n > 0)
        (void)kv_block_unref(held[--n]);
    kv_arenas_trim(&fixture.arenas);
    assert_int_equal(fixture.arenas.n_arenas, 0);
    assert_int_equal(fixture.budget.used_bytes, 0);
    kv_arenas_deinit(&fixture.arenas);
}

/* Blocks that grow and shrink page by page: no place twice, nothing charged that is not held. */
static void arena_places_pages_one_by_one(void **state)
{
    Fixture fixture;
    KvBlock *held[20];
    uint32_t n = 0, x = SEED;

    (void)state;
    fixture_init(&fixture, false, 8, 8, 0);
    for (uint32_t step = 0; step < 6000; step++) {
        uint8_t seen[8 * KV_BLOCK_PAGES] = {0};
        uint32_t pages = 0;
        KvBlock *block;

        x = x * 1664525u + 1013904223u;
        block = n > 0 ? held[(x >> 8) % n] : NULL;
        if (n < 20 && (x >> 16) % 4 == 0) {
            uint32_t first = (x >> 20) % 3;

            if (64 - fixture.arenas.n_used < 8 || kv_arenas_take(&fixture.arenas, block, first, first + 1 + (x >> 24) % 5, &held[n], NULL))
                continue;
            n++;
        } else if (block && (x >> 16) % 4 == 1) {
            (void)kv_block_unref(block);
            held[(x >> 8) % n] = held[n - 1];
            n--;
        } else if (block && (x >> 16) % 4 == 2) {
            uint32_t wanted = MIN(block->n_filled + 1 + (x >> 24) % 3, (uint32_t)KV_BLOCK_PAGES);

            if (kv_block_can_grow(block, wanted))
                assert_int_equal(kv_block_grow(block, wanted, NULL), 0);
            else
                assert_true(wanted - block->n_filled > block->arena->n_pages - block->arena->n_used);
        } else if (block && block->n_filled - block->first_page > 1) {
            kv_block_shrink(block, block->first_page + (x >> 24) % 2, block->n_filled - (x >> 26) % 2);
        }
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t k = held[i]->first_page; k < held[i]->n_filled; k++, pages++)
                if (held[i]->arena == held[0]->arena)
                    assert_int_equal(seen[held[i]->pages[k]]++, 0);
        assert_int_equal(pages, fixture.arenas.n_used);
        assert_int_equal(fixture.budget.used_bytes, (uint64_t)pages * (BLOCK_BYTES / KV_BLOCK_PAGES));
    }
    while (n > 0)
        (void)kv_block_unref(held[--n]);
    assert_int_equal(fixture.budget.used_bytes, 0);
    kv_arenas_deinit(&fixture.arenas);
}

/* A window may pass over all pages of a block that the sequence still names. */
static void an_arena_stays_as_long_as_a_block_of_it_is_named(void **state)
{
    KvArenas arenas = KV_ARENAS_NULL;
    KvBudget budget = {0};
    KvBlock *block = NULL;

    (void)state;
    kv_arenas_init(&arenas, &(KvArenaOptions){.home = KV_HOME_HOST, .n_layers = 1, .page_bytes = 64, .first_pages = 8, .max_pages = 8,
                                              .host_budget = &budget});
    assert_int_equal(kv_arenas_take(&arenas, NULL, 0, 2, &block, NULL), 0);
    kv_block_shrink(block, 2, 2);
    assert_false(kv_arenas_can_trim(&arenas));
    kv_arenas_trim(&arenas);
    assert_int_equal(block->first_page, 2);
    assert_null(kv_block_unref(block));
    assert_true(kv_arenas_can_trim(&arenas));
    kv_arenas_trim(&arenas);
    kv_arenas_deinit(&arenas);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(arena_gives_a_growing_sequence_consecutive_blocks),
        cmocka_unit_test(arena_places_never_overlap_and_lie_in_planes),
        cmocka_unit_test(arena_refuses_a_block_over_the_host_budget),
        cmocka_unit_test(budget_reclaims_before_it_refuses),
        cmocka_unit_test(budgets_that_share_one_are_kept_together),
        cmocka_unit_test(arena_reserves_all_of_a_static_cache_or_nothing),
        cmocka_unit_test(arena_gives_empty_memory_back_but_keeps_what_is_promised),
        cmocka_unit_test(arena_counts_stay_exact_under_random_use),
        cmocka_unit_test(an_arena_stays_as_long_as_a_block_of_it_is_named),
        cmocka_unit_test(arena_places_pages_one_by_one),
    };

    printf("seed %u\n", SEED);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
