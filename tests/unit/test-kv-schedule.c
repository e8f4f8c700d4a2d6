/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule of a pass against the rules, page by page, on random sequences and forks; no device. */

#include "cache/kv-schedule.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define SEED       7u
#define MAX_ITEMS  5
#define MAX_TOKENS 3000

typedef struct Fixture {
    uint32_t random;
    KvSizes sizes;
    KvBudget budget;
    KvArenas arenas;
    KvSchedule schedule;
    KvBlock *blocks[MAX_ITEMS][64];
    KvScheduleItem items[MAX_ITEMS];
    uint32_t n_items;
} Fixture;

static uint32_t random_below(Fixture *fixture, uint32_t n)
{
    fixture->random = fixture->random * 1664525u + 1013904223u;
    return (fixture->random >> 8) % n;
}

static void fixture_init(Fixture *fixture, uint32_t seed, bool direct, uint32_t tile_blocks, AttendVisibility visibility)
{
    static const float frequencies[32] = {1.0f};
    const GpuInfo info = {.unified_memory = true, .max_allocation_bytes = 1u << 30};
    const KvModel model = {.n_layers = 2,
                           .shape = {.n_heads = 4, .n_kv_heads = 2, .k_head_dim = 64, .v_head_dim = 64, .rotary_dim = 64},
                           .scale = 0.125f,
                           .inv_freq = frequencies,
                           .max_rows = 600,
                           .max_sequences = MAX_ITEMS};
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);

    policy.max_cache_tokens = MAX_TOKENS;
    policy.tile_blocks = tile_blocks;
    policy.transfer = direct ? KV_TRANSFER_ZERO_COPY : KV_TRANSFER_COPY;
    *fixture = (Fixture){.random = seed};
    assert_int_equal(kv_sizes_compute(&info, &model, &policy, &fixture->sizes, NULL), 0);
    fixture->sizes.sections[0].attend.visibility = visibility;
    kv_arenas_init(&fixture->arenas, &(KvArenaOptions){.home = KV_HOME_HOST,
                                                       .n_layers = 2,
                                                       .page_bytes = fixture->sizes.sections[0].layout.page_bytes,
                                                       .first_pages = 7 * KV_BLOCK_PAGES, /* several arenas */
                                                       .max_pages = 7 * KV_BLOCK_PAGES,
                                                       .host_budget = &fixture->budget});
    assert_int_equal(kv_schedule_init(&fixture->schedule, &fixture->sizes.sections[0], false), 0);
}

static void fixture_deinit(Fixture *fixture)
{
    kv_schedule_deinit(&fixture->schedule);
    kv_sizes_deinit(&fixture->sizes);
    kv_arenas_deinit(&fixture->arenas);
}

/* Sequences of random lengths, some sharing whole blocks with an earlier one; blocks for what the pass adds. */
static void random_items(Fixture *fixture)
{
    AttendVisibility visibility = fixture->sizes.sections[0].attend.visibility;
    uint32_t rows = 600;

    fixture->n_items = 1 + random_below(fixture, MAX_ITEMS);
    for (uint32_t i = 0; i < fixture->n_items; i++) {
        uint32_t length = random_below(fixture, 4) == 0 ? 0 : random_below(fixture, MAX_TOKENS - 150), shared = 0, n_blocks;
        uint32_t n = 1 + random_below(fixture, random_below(fixture, 2) ? 3 : 145);

        if (n > rows - (fixture->n_items - i))
            n = rows - (fixture->n_items - i);
        rows -= n;
        n_blocks = ((length + n) / KV_PAGE_TOKENS + KV_BLOCK_PAGES - 1) / KV_BLOCK_PAGES;
        if (i > 0 && random_below(fixture, 2)) {
            uint32_t j = random_below(fixture, i), most = MIN(length, fixture->items[j].length) / KV_BLOCK_TOKENS;

            shared = most > 0 ? random_below(fixture, most + 1) : 0;
            memcpy(fixture->blocks[i], fixture->blocks[j], shared * sizeof(KvBlock *));
        }
        for (uint32_t b = shared; b < n_blocks; b++)
            assert_int_equal(
                kv_arenas_take(&fixture->arenas, b > 0 ? fixture->blocks[i][b - 1] : NULL, 0, KV_BLOCK_PAGES,
                               &fixture->blocks[i][b], NULL),
                0);
        fixture->items[i] =
            (KvScheduleItem){.blocks = fixture->blocks[i], .length = length, .n_tokens = n, .tail_slot = 10 + i,
                             .chunk_shift = visibility.mask == ATTEND_MASK_CHUNKED ? random_below(fixture, visibility.window) : 0};
    }
    for (uint32_t i = 0; i < fixture->n_items; i++) /* what is out of sight is gone */
        for (uint32_t b = 0; b < kv_first_block(visibility, fixture->items[i].chunk_shift, fixture->items[i].length); b++)
            fixture->blocks[i][b] = NULL;
}

static void check_groups(const Fixture *fixture)
{
    const KvSchedule *schedule = &fixture->schedule;
    uint32_t g = 0, row = 0;

    for (uint32_t i = 0; i < fixture->n_items; i++) {
        const KvScheduleItem *item = &fixture->items[i];
        uint32_t row0 = row;

        for (uint32_t position = item->length; position < item->length + item->n_tokens; g++) {
            const AttendGroup *group = &schedule->groups[g];

            assert_true(g < schedule->n_groups);
            assert_int_equal(group->row0, row);
            assert_int_equal(group->pos0, position);
            assert_true(group->n_rows >= 1);
            assert_int_equal(position / KV_PAGE_TOKENS, (position + (uint32_t)group->n_rows - 1) / KV_PAGE_TOKENS);
            assert_int_equal(group->n_packed, MAX((int)(position / KV_PAGE_TOKENS) - 1, 0));
            assert_int_equal(group->tail_slot, 10 + i);
            assert_int_equal(group->new_start, item->length);
            assert_int_equal(group->new_row0, row0);
            assert_int_equal(group->chunk_shift, item->chunk_shift);
            row += (uint32_t)group->n_rows;
            position += (uint32_t)group->n_rows;
        }
    }
    assert_int_equal(g, schedule->n_groups);
    assert_int_equal(row, schedule->n_rows);
}

static void check_packs(const Fixture *fixture)
{
    const KvSchedule *schedule = &fixture->schedule;
    uint32_t k = 0;

    for (uint32_t i = 0; i < fixture->n_items; i++) {
        const KvScheduleItem *item = &fixture->items[i];

        for (uint32_t p = item->length / KV_PAGE_TOKENS; p < (item->length + item->n_tokens) / KV_PAGE_TOKENS; p++, k++) {
            assert_true(k < schedule->n_packs);
            assert_int_equal(schedule->packs[k].page, p);
            assert_int_equal(schedule->packs[k].to, k);
            assert_int_equal(schedule->packs[k].new_start, item->length);
            assert_ptr_equal(schedule->homewards[k].block, item->blocks[p / KV_BLOCK_PAGES]);
            assert_int_equal(schedule->homewards[k].page, p % KV_BLOCK_PAGES);
        }
    }
    assert_int_equal(k, schedule->n_packs);
}

/* The page that a ref names is the page that the sequence has there. */
static void check_page(const Fixture *fixture, const KvTile *tile, const AttendRef *ref, uint32_t item_index, uint32_t k)
{
    const KvSchedule *schedule = &fixture->schedule;
    const KvScheduleItem *item = &fixture->items[item_index];
    uint32_t page = (uint32_t)ref->block * KV_BLOCK_PAGES + k, at = ref->pages[k];
    KvBlock *block = item->blocks[ref->block];

    if (at & ATTEND_REF_FRESH) {
        at &= ~ATTEND_REF_FRESH;
        assert_true(page >= item->length / KV_PAGE_TOKENS);
        assert_int_equal(schedule->packs[at].page, page);
        assert_ptr_equal(schedule->homewards[at].block, block);
    } else if (schedule->direct) {
        assert_ptr_equal(tile->arena, block->arena);
        assert_int_equal(at, block->pages[k]);
        assert_true(page < item->length / KV_PAGE_TOKENS);
    } else {
        const KvLoad *load = &schedule->loads[tile->first_load + at / KV_BLOCK_PAGES];

        assert_true(at / KV_BLOCK_PAGES < tile->n_loads);
        assert_ptr_equal(load->block, block);
        assert_true(k < load->n_pages && at % KV_BLOCK_PAGES == k);
        assert_true(page < item->length / KV_PAGE_TOKENS);
    }
}

static void check_refs(Fixture *fixture)
{
    const KvSchedule *schedule = &fixture->schedule;

    for (uint32_t g = 0; g < schedule->n_groups; g++) {
        const KvScheduleItem *item = &fixture->items[schedule->group_items[g]];
        uint32_t end = (uint32_t)schedule->groups[g].n_packed, page, block;

        page = attend_first_visible(schedule->visibility, item->chunk_shift, (uint32_t)schedule->groups[g].pos0) / KV_PAGE_TOKENS;
        page = MIN(page, end);
        block = page / KV_BLOCK_PAGES;

        for (uint32_t t = 0; t < schedule->n_tiles; t++) {
            const KvTile *tile = &schedule->tiles[t];
            const AttendSpan *span = &schedule->spans[t * schedule->n_groups + g];

            assert_true((uint32_t)(span->first_ref + span->n_refs) <= tile->n_refs);
            assert_true((uint32_t)span->n_refs <= tile->n_loads);
            for (int32_t j = 0; j < span->n_refs; j++) {
                const AttendRef *ref = &schedule->refs[tile->first_ref + (uint32_t)(span->first_ref + j)];

                assert_int_equal(ref->group, g);
                assert_int_equal(ref->block, block++);
                assert_int_equal((uint32_t)(ref->block * KV_BLOCK_PAGES + ref->first_page), page);
                for (int32_t k = ref->first_page; k < ref->n_pages; k++, page++)
                    check_page(fixture, tile, ref, schedule->group_items[g], (uint32_t)k);
            }
        }
        assert_int_equal(page, end);
    }
}

static void check_tiles(const Fixture *fixture)
{
    const KvSchedule *schedule = &fixture->schedule;
    uint32_t load = 0, ref = 0, staged = 0;

    for (uint32_t t = 0; t < schedule->n_tiles; t++) {
        const KvTile *tile = &schedule->tiles[t];

        assert_int_equal(tile->first_load, load);
        assert_int_equal(tile->first_ref, ref);
        assert_true(tile->n_loads >= 1 && tile->n_loads <= schedule->tile_blocks);
        assert_true(tile->n_refs >= 1);
        if (tile->staged)
            assert_int_equal(schedule->staged[staged++], t);
        assert_false(tile->staged && tile->arena);
        load += tile->n_loads;
        ref += tile->n_refs;
    }
    assert_int_equal(load, schedule->n_loads);
    assert_int_equal(ref, schedule->n_refs);
    assert_int_equal(staged, schedule->n_staged);
    assert_true(schedule->n_loads <= fixture->sizes.sections[0].max_loads);
    assert_true(schedule->n_tiles <= fixture->sizes.sections[0].max_tiles);
    assert_true(schedule->n_refs <= fixture->sizes.sections[0].max_refs);
    assert_true(schedule->n_groups <= fixture->sizes.sections[0].max_groups);
    assert_true(schedule->n_packs <= fixture->sizes.sections[0].max_packs);
}

static void check_random_passes(uint32_t n_rounds, AttendMask mask)
{
    static const uint32_t windows[] = {1, 20, 33, 34, 70, 256, 300, 1000, 1u << 20};

    for (uint32_t round = 0; round < n_rounds; round++) {
        AttendVisibility visibility = {mask, mask == ATTEND_MASK_CAUSAL ? 0 : windows[round / 14 % N_ELEMENTS(windows)]};
        Fixture fixture;

        fixture_init(&fixture, SEED + round, round % 2, round % 7, visibility);
        random_items(&fixture);
        kv_schedule_build(&fixture.schedule, fixture.items, fixture.n_items);
        check_groups(&fixture);
        check_packs(&fixture);
        check_tiles(&fixture);
        check_refs(&fixture);
        fixture_deinit(&fixture);
    }
}

static void schedule_shows_every_row_its_packed_pages_in_order(void **state)
{
    (void)state;
    check_random_passes(600, ATTEND_MASK_CAUSAL);
}

static void schedule_of_a_window_touches_only_what_some_row_sees(void **state)
{
    (void)state;
    check_random_passes(600, ATTEND_MASK_SLIDING);
}

static void schedule_of_chunks_touches_only_what_some_row_sees(void **state)
{
    (void)state;
    check_random_passes(600, ATTEND_MASK_CHUNKED);
}

/* The fork that is behind sees an older block first, although it comes last. */
static void schedule_of_a_window_loads_a_block_that_forks_share_once(void **state)
{
    Fixture fixture;

    (void)state;
    fixture_init(&fixture, SEED, false, 3, (AttendVisibility){ATTEND_MASK_SLIDING, 700});
    for (uint32_t b = 0; b < 8; b++)
        assert_int_equal(kv_arenas_take(&fixture.arenas, NULL, 0, KV_BLOCK_PAGES, &fixture.blocks[0][b], NULL), 0);
    for (uint32_t i = 0; i < 3; i++)
        fixture.items[i] = (KvScheduleItem){.blocks = fixture.blocks[0], .length = 2000 - 300 * i, .n_tokens = 1};
    fixture.n_items = 3;
    kv_schedule_build(&fixture.schedule, fixture.items, 3);
    assert_int_equal(fixture.schedule.n_loads, 6); /* 2 to 7: the last query sees 701 on, the first up to page 60 */
    check_refs(&fixture);
    fixture_deinit(&fixture);
}

static void schedule_of_cross_attention_shows_all_keys_to_all_rows(void **state)
{
    Fixture fixture;

    (void)state;
    fixture_init(&fixture, SEED, false, 2, (AttendVisibility){ATTEND_MASK_CROSS, 0});
    for (uint32_t b = 0; b < 4; b++)
        assert_int_equal(kv_arenas_take(&fixture.arenas, NULL, 0, KV_BLOCK_PAGES, &fixture.blocks[0][b], NULL), 0);
    fixture.n_items = 1;
    /* The keys behind the first 70. */
    fixture.items[0] = (KvScheduleItem){.blocks = fixture.blocks[0], .length = 70, .n_tokens = 530, .tail_slot = 10};
    kv_schedule_keep(&fixture.schedule, fixture.items, 1);
    assert_int_equal(fixture.schedule.n_tiles, 0);
    check_groups(&fixture);
    check_packs(&fixture);
    fixture.items[0] = (KvScheduleItem){.blocks = fixture.blocks[0], .length = 600, .n_tokens = 40, .tail_slot = 3};
    kv_schedule_build(&fixture.schedule, fixture.items, 1);
    assert_int_equal(fixture.schedule.n_groups, 2);
    assert_int_equal(fixture.schedule.n_packs, 0);
    assert_int_equal(fixture.schedule.n_loads, 3);
    assert_int_equal(fixture.schedule.n_tiles, 2);
    for (uint32_t g = 0; g < 2; g++) {
        assert_int_equal(fixture.schedule.groups[g].pos0, 599);
        assert_int_equal(fixture.schedule.groups[g].new_start, 600);
        assert_int_equal(fixture.schedule.groups[g].n_packed, 18);
    }
    assert_int_equal(fixture.schedule.groups[1].n_rows, 8);
    check_refs(&fixture);
    fixture_deinit(&fixture);
}

static void schedule_loads_a_block_that_forks_share_once(void **state)
{
    Fixture fixture;

    (void)state;
    fixture_init(&fixture, SEED, false, 3, (AttendVisibility){ATTEND_MASK_CAUSAL, 0});
    for (uint32_t b = 0; b < 4; b++)
        assert_int_equal(kv_arenas_take(&fixture.arenas, NULL, 0, KV_BLOCK_PAGES, &fixture.blocks[0][b], NULL), 0);
    for (uint32_t i = 0; i < 3; i++)
        fixture.items[i] = (KvScheduleItem){.blocks = fixture.blocks[0], .length = 900 - 40 * i, .n_tokens = 1};
    fixture.n_items = 3;
    kv_schedule_build(&fixture.schedule, fixture.items, 3);
    assert_int_equal(fixture.schedule.n_loads, 4);
    assert_int_equal(fixture.schedule.n_tiles, 2);
    assert_int_equal(fixture.schedule.loads[3].n_pages, 27 - 24);
    check_refs(&fixture);
    fixture_deinit(&fixture);
}

static void schedule_of_a_short_sequence_reads_no_page(void **state)
{
    Fixture fixture;

    (void)state;
    fixture_init(&fixture, SEED, false, 1, (AttendVisibility){ATTEND_MASK_CAUSAL, 0});
    assert_int_equal(kv_arenas_take(&fixture.arenas, NULL, 0, KV_BLOCK_PAGES, &fixture.blocks[0][0], NULL), 0);
    fixture.items[0] = (KvScheduleItem){.blocks = fixture.blocks[0], .length = 63, .n_tokens = 1};
    kv_schedule_build(&fixture.schedule, fixture.items, 1);
    assert_int_equal(fixture.schedule.n_tiles, 0);
    assert_int_equal(fixture.schedule.n_packs, 1);
    fixture.items[0].length = 64;
    kv_schedule_build(&fixture.schedule, fixture.items, 1);
    assert_int_equal(fixture.schedule.n_tiles, 1);
    assert_int_equal(fixture.schedule.refs[0].n_pages, 1);
    fixture_deinit(&fixture);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(schedule_shows_every_row_its_packed_pages_in_order),
        cmocka_unit_test(schedule_of_a_window_touches_only_what_some_row_sees),
        cmocka_unit_test(schedule_of_chunks_touches_only_what_some_row_sees),
        cmocka_unit_test(schedule_loads_a_block_that_forks_share_once),
        cmocka_unit_test(schedule_of_a_window_loads_a_block_that_forks_share_once),
        cmocka_unit_test(schedule_of_cross_attention_shows_all_keys_to_all_rows),
        cmocka_unit_test(schedule_of_a_short_sequence_reads_no_page),
    };

    printf("seed %u\n", SEED);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
