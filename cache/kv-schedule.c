/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule of a pass: groups, packs, loads, tiles, refs. */

#include "cache/kv-schedule.h"

#include <string.h>

/* Carves an array from the schedule's one allocation; the first round (memory NULL) only counts. */
static void *carve(void *memory, size_t *offset, size_t n, size_t size)
{
    void *array = memory ? (uint8_t *)memory + *offset : NULL;

    *offset += (n * size + 63) & ~(size_t)63;
    return array;
}

static size_t schedule_layout(KvSchedule *schedule, const KvSectionSizes *sizes)
{
    bool rows = !schedule->next;
    size_t offset = 0, groups = rows ? sizes->max_groups : 0, packs = rows ? sizes->max_packs : 0;
    void *memory = schedule->memory;

    schedule->loads = carve(memory, &offset, sizes->max_loads, sizeof(KvLoad));
    schedule->item_loads = carve(memory, &offset, sizes->max_loads, sizeof(uint32_t));
    schedule->item_blocks = carve(memory, &offset, schedule->max_items, sizeof(uint32_t));
    schedule->tiles = carve(memory, &offset, sizes->max_tiles, sizeof(KvTile));
    schedule->staged = carve(memory, &offset, sizes->max_tiles, sizeof(uint32_t));
    schedule->groups = carve(memory, &offset, groups, sizeof(AttendGroup));
    schedule->group_items = carve(memory, &offset, groups, sizeof(uint32_t));
    schedule->group_cursors = carve(memory, &offset, groups, sizeof(uint32_t));
    schedule->packs = carve(memory, &offset, packs, sizeof(AttendPack));
    schedule->homewards = carve(memory, &offset, packs, sizeof(KvHomeward));
    schedule->refs = carve(memory, &offset, rows ? sizes->max_refs : 0, sizeof(AttendRef));
    schedule->spans = carve(memory, &offset, sizes->max_tiles * groups, sizeof(AttendSpan));
    return offset;
}

int kv_schedule_init(KvSchedule *schedule, const KvSectionSizes *sizes, bool next)
{
    *schedule = (KvSchedule){
        .max_items = sizes->max_loads / sizes->max_blocks,
        .max_blocks = sizes->max_blocks,
        .tile_blocks = sizes->tile_blocks,
        .form = sizes->attend.form,
        .direct = sizes->direct,
        .next = next,
    };
    schedule->memory = calloc(1, schedule_layout(schedule, sizes));
    if (!schedule->memory)
        return error_origin(-ENOMEM);
    (void)schedule_layout(schedule, sizes);
    return 0;
}

void kv_schedule_deinit(KvSchedule *schedule)
{
    free(schedule->memory);
    *schedule = KV_SCHEDULE_NULL;
}

/* The load of an earlier item for the same block, or UINT32_MAX. */
static uint32_t find_load(const KvSchedule *schedule, uint32_t item, uint32_t index, const KvBlock *block)
{
    for (uint32_t i = 0; i < item; i++)
        if (index < schedule->item_blocks[i]) {
            uint32_t load = schedule->item_loads[i * schedule->max_blocks + index];

            if (schedule->loads[load].block == block)
                return load;
        }
    return UINT32_MAX;
}

static void item_loads(KvSchedule *schedule, const KvScheduleItem *item, uint32_t i)
{
    uint32_t visible = kv_packed_pages(schedule->form, item->length + item->n_tokens - 1);
    uint32_t home = MIN(item->length / KV_PAGE_TOKENS, visible);
    uint32_t n_blocks = (visible + KV_BLOCK_PAGES - 1) / KV_BLOCK_PAGES;

    schedule->item_blocks[i] = n_blocks;
    for (uint32_t b = 0; b < n_blocks; b++) {
        KvBlock *block = item->blocks[b];
        uint32_t first = b * KV_BLOCK_PAGES, load = find_load(schedule, i, b, block);
        uint32_t n_pages = home > first ? MIN(home - first, (uint32_t)KV_BLOCK_PAGES) : 0;

        if (load == UINT32_MAX) {
            load = schedule->n_loads++;
            schedule->loads[load] = (KvLoad){.block = block, .serial = block->serial};
            if (schedule->next && block->write_serial > 0)
                schedule->loads[load].serial = block->write_serial;
        }
        schedule->loads[load].n_pages = MAX(schedule->loads[load].n_pages, n_pages);
        schedule->item_loads[i * schedule->max_blocks + b] = load;
    }
}

/* Whether kernels read the block where it lives: all of the section, or one that is resident. */
static bool is_in_place(const KvSchedule *schedule, const KvLoad *load)
{
    return load->n_pages > 0 && (schedule->direct || load->block->arena->buffer);
}

void kv_schedule_tiles(KvSchedule *schedule, const KvScheduleItem *items, uint32_t n_items)
{
    KvTile *tile = NULL;

    schedule->n_loads = schedule->n_tiles = schedule->n_staged = 0;
    for (uint32_t i = 0; i < n_items; i++)
        item_loads(schedule, &items[i], i);

    for (uint32_t i = 0; i < schedule->n_loads; i++) {
        const KvLoad *load = &schedule->loads[i];
        const KvArena *home = load->n_pages > 0 ? load->block->arena : NULL, *arena = is_in_place(schedule, load) ? home : NULL;
        bool staged = home && !arena;

        if (!tile || tile->n_loads == schedule->tile_blocks || (staged && tile->arena) ||
            (arena && (tile->staged || (tile->arena && arena != tile->arena)))) {
            tile = &schedule->tiles[schedule->n_tiles++];
            *tile = (KvTile){.first_load = i};
        }
        tile->n_loads++;
        if (load->n_pages == 0)
            continue;
        tile->serial = MAX(tile->serial, load->serial);
        if (staged)
            tile->staged = true;
        else
            tile->arena = arena;
    }
    for (uint32_t t = 0; t < schedule->n_tiles; t++)
        if (schedule->tiles[t].staged)
            schedule->staged[schedule->n_staged++] = t;
}

/* Rows of one item, split at page borders. */
static void item_groups(KvSchedule *schedule, const KvScheduleItem *item, uint32_t i, uint32_t row0)
{
    uint32_t done = 0;

    while (done < item->n_tokens) {
        uint32_t position = item->length + done;
        uint32_t n = MIN(KV_PAGE_TOKENS - position % KV_PAGE_TOKENS, item->n_tokens - done);

        schedule->group_items[schedule->n_groups] = i;
        schedule->groups[schedule->n_groups++] = (AttendGroup){
            .row0 = (int32_t)(row0 + done),
            .n_rows = (int32_t)n,
            .pos0 = (int32_t)position,
            .n_packed = (int32_t)kv_packed_pages(schedule->form, position),
            .tail_slot = (int32_t)item->tail_slot,
            .new_start = (int32_t)item->length,
            .new_row0 = (int32_t)row0,
        };
        done += n;
    }
}

/* Pages that the item completes.  Returns the index of the first in the scratch buffer. */
static uint32_t item_packs(KvSchedule *schedule, const KvScheduleItem *item, uint32_t row0)
{
    uint32_t first = schedule->n_packs, end = (item->length + item->n_tokens) / KV_PAGE_TOKENS;

    for (uint32_t page = item->length / KV_PAGE_TOKENS; page < end; page++) {
        schedule->homewards[schedule->n_packs] =
            (KvHomeward){.block = item->blocks[page / KV_BLOCK_PAGES], .page = page % KV_BLOCK_PAGES};
        schedule->packs[schedule->n_packs] = (AttendPack){
            .tail_slot = (int32_t)item->tail_slot,
            .page = (int32_t)page,
            .new_start = (int32_t)item->length,
            .new_row0 = (int32_t)row0,
            .to = schedule->n_packs,
        };
        schedule->n_packs++;
    }
    return first;
}

/* One block as a group sees it: pages at home by their place in the tile's buffer, which is the arena (@places) or a slot of the ring, later
 * ones in the scratch buffer. */
static void make_ref(AttendRef *ref, const KvScheduleItem *item, const AttendGroup *group, uint32_t g, uint32_t block,
                     const uint32_t *places, uint32_t tile_place, uint32_t first_fresh)
{
    uint32_t home = item->length / KV_PAGE_TOKENS, first = block * KV_BLOCK_PAGES;
    uint32_t n = MIN((uint32_t)group->n_packed - first, (uint32_t)KV_BLOCK_PAGES);

    *ref = (AttendRef){.group = (int32_t)g, .block = (int32_t)block, .n_pages = (int32_t)n};
    for (uint32_t k = 0; k < n; k++)
        if (first + k < home)
            ref->pages[k] = places ? places[k] : tile_place * KV_BLOCK_PAGES + k;
        else
            ref->pages[k] = ATTEND_REF_FRESH | (first_fresh + first + k - home);
}

/* Refs of one tile, by group and then by block. */
static void tile_refs(KvSchedule *schedule, const KvScheduleItem *items, const uint32_t *first_fresh, uint32_t t)
{
    KvTile *tile = &schedule->tiles[t];
    AttendSpan *spans = &schedule->spans[t * schedule->n_groups];
    uint32_t end = tile->first_load + tile->n_loads;

    tile->first_ref = schedule->n_refs;
    for (uint32_t g = 0; g < schedule->n_groups; g++) {
        const AttendGroup *group = &schedule->groups[g];
        uint32_t i = schedule->group_items[g], *block = &schedule->group_cursors[g];

        spans[g].first_ref = (int32_t)(schedule->n_refs - tile->first_ref);
        for (; *block * KV_BLOCK_PAGES < (uint32_t)group->n_packed; (*block)++) {
            uint32_t load = schedule->item_loads[i * schedule->max_blocks + *block];

            if (load >= end)
                break;
            make_ref(&schedule->refs[schedule->n_refs++], &items[i], group, g, *block,
                     is_in_place(schedule, &schedule->loads[load]) ? schedule->loads[load].block->pages : NULL,
                     load - tile->first_load, first_fresh[i]);
        }
        spans[g].n_refs = (int32_t)(schedule->n_refs - tile->first_ref) - spans[g].first_ref;
    }
    tile->n_refs = schedule->n_refs - tile->first_ref;
}

void kv_schedule_build(KvSchedule *schedule, const KvScheduleItem *items, uint32_t n_items)
{
    /* item_blocks has served once the loads are made: it then holds each item's first fresh page. */
    uint32_t *first_fresh = schedule->item_blocks, row0 = 0;

    kv_schedule_tiles(schedule, items, n_items);
    schedule->n_groups = schedule->n_packs = schedule->n_refs = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        item_groups(schedule, &items[i], i, row0);
        first_fresh[i] = item_packs(schedule, &items[i], row0);
        row0 += items[i].n_tokens;
    }
    schedule->n_rows = row0;
    memset(schedule->group_cursors, 0, schedule->n_groups * sizeof(uint32_t));
    for (uint32_t t = 0; t < schedule->n_tiles; t++)
        tile_refs(schedule, items, first_fresh, t);
}
