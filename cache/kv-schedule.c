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
    schedule->item_firsts = carve(memory, &offset, schedule->max_items, sizeof(uint32_t));
    schedule->item_ends = carve(memory, &offset, schedule->max_items, sizeof(uint32_t));
    schedule->item_fresh = carve(memory, &offset, schedule->max_items, sizeof(uint32_t));
    schedule->order = carve(memory, &offset, schedule->max_items, sizeof(uint32_t));
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
        .visibility = sizes->attend.visibility,
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

/* Leading pages [first, end) that the group whose first row is at @position sees packed. */
typedef struct Pages {
    uint32_t first, end;
} Pages;

static Pages visible_pages(const KvSchedule *schedule, const KvScheduleItem *item, uint32_t position)
{
    Pages pages = {.end = kv_packed_pages(schedule->form, position)};

    if (schedule->visibility.mask == ATTEND_MASK_CROSS)
        return (Pages){.end = item->length / KV_PAGE_TOKENS};
    pages.first = attend_first_visible(schedule->visibility, item->chunk_shift, position) / KV_PAGE_TOKENS;
    return pages.first < pages.end ? pages : (Pages){0};
}

/* Rows of the group that begins @done rows into the item: to the end of their page, or all at once where positions do not matter. */
static uint32_t group_rows(const KvScheduleItem *item, uint32_t done, bool cross)
{
    uint32_t left = KV_PAGE_TOKENS - (cross ? 0 : (item->length + done) % KV_PAGE_TOKENS);

    return MIN(left, item->n_tokens - done);
}

/* The load of one of the first @n items in order for the same block, or KV_NO_LOAD. */
static uint32_t find_load(const KvSchedule *schedule, uint32_t n, uint32_t index, const KvBlock *block)
{
    for (uint32_t k = 0; k < n; k++) {
        uint32_t i = schedule->order[k], load;

        if (index < schedule->item_firsts[i] || index >= schedule->item_ends[i])
            continue;
        load = schedule->item_loads[i * schedule->max_blocks + index];
        if (load != KV_NO_LOAD && schedule->loads[load].block == block)
            return load;
    }
    return KV_NO_LOAD;
}

/* The load for block @index of item order[k], behind load @last. */
static uint32_t block_load(KvSchedule *schedule, const KvScheduleItem *item, uint32_t k, uint32_t index, uint32_t last)
{
    bool cross = schedule->visibility.mask == ATTEND_MASK_CROSS;
    uint32_t visible = cross ? item->length / KV_PAGE_TOKENS : kv_packed_pages(schedule->form, item->length + item->n_tokens - 1);
    uint32_t home = MIN(item->length / KV_PAGE_TOKENS, visible), first = index * KV_BLOCK_PAGES;
    uint32_t n_pages = home > first ? MIN(home - first, (uint32_t)KV_BLOCK_PAGES) : 0;
    KvBlock *block = item->blocks[index];
    uint32_t load = find_load(schedule, k, index, block);

    if (load == KV_NO_LOAD || (last != KV_NO_LOAD && load <= last)) {
        load = schedule->n_loads++;
        schedule->loads[load] = (KvLoad){.block = block, .serial = block->serial};
        if (schedule->next && block->write_serial > 0)
            schedule->loads[load].serial = block->write_serial;
    }
    schedule->loads[load].n_pages = MAX(schedule->loads[load].n_pages, n_pages);
    return load;
}

/* Blocks that some group sees; what groups see moves forward only. */
static void item_loads(KvSchedule *schedule, const KvScheduleItem *item, uint32_t k)
{
    bool cross = schedule->visibility.mask == ATTEND_MASK_CROSS;
    uint32_t i = schedule->order[k], *loads = schedule->item_loads + i * schedule->max_blocks, last = KV_NO_LOAD;
    uint32_t *begin = &schedule->item_firsts[i], *end = &schedule->item_ends[i];

    *begin = *end = 0;
    for (uint32_t done = 0; done < item->n_tokens; done += group_rows(item, done, cross)) {
        Pages pages = visible_pages(schedule, item, item->length + done);
        uint32_t first = pages.first / KV_BLOCK_PAGES, stop = (pages.end + KV_BLOCK_PAGES - 1) / KV_BLOCK_PAGES;

        if (*end == 0)
            *begin = *end = first;
        for (; *end < stop; (*end)++) {
            loads[*end] = KV_NO_LOAD;
            if (*end >= first)
                last = loads[*end] = block_load(schedule, item, k, *end, last);
        }
    }
}

/* Items by the first block that they see, else as they are. */
static void order_items(KvSchedule *schedule, const KvScheduleItem *items, uint32_t n_items)
{
    for (uint32_t i = 0; i < n_items; i++) {
        uint32_t first = kv_first_block(schedule->visibility, items[i].chunk_shift, items[i].length), k = i;

        for (; k > 0; k--) {
            const KvScheduleItem *other = &items[schedule->order[k - 1]];

            if (kv_first_block(schedule->visibility, other->chunk_shift, other->length) <= first)
                break;
            schedule->order[k] = schedule->order[k - 1];
        }
        schedule->order[k] = i;
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
    order_items(schedule, items, n_items);
    for (uint32_t k = 0; k < n_items; k++)
        item_loads(schedule, &items[schedule->order[k]], k);

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

/* Rows of one item, split at page borders; @asking: cross attention's queries, which all see the same. */
static void item_groups(KvSchedule *schedule, const KvScheduleItem *item, uint32_t i, uint32_t row0, bool asking)
{
    uint32_t n;

    for (uint32_t done = 0; done < item->n_tokens; done += n) {
        uint32_t position = asking ? item->length - 1 : item->length + done;

        n = group_rows(item, done, asking);
        schedule->group_items[schedule->n_groups] = i;
        schedule->groups[schedule->n_groups++] = (AttendGroup){
            .row0 = (int32_t)(row0 + done),
            .n_rows = (int32_t)n,
            .pos0 = (int32_t)position,
            .n_packed = (int32_t)(asking ? item->length / KV_PAGE_TOKENS : kv_packed_pages(schedule->form, position)),
            .tail_slot = (int32_t)item->tail_slot,
            .new_start = (int32_t)item->length,
            .new_row0 = (int32_t)row0,
            .chunk_shift = (int32_t)item->chunk_shift,
        };
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
static void make_ref(AttendRef *ref, const KvScheduleItem *item, Pages pages, uint32_t g, uint32_t block, const uint32_t *places,
                     uint32_t tile_place, uint32_t first_fresh)
{
    uint32_t home = item->length / KV_PAGE_TOKENS, first = block * KV_BLOCK_PAGES;
    uint32_t n = MIN(pages.end - first, (uint32_t)KV_BLOCK_PAGES), seen = pages.first > first ? pages.first - first : 0;

    *ref = (AttendRef){.group = (int32_t)g, .block = (int32_t)block, .n_pages = (int32_t)n, .first_page = (int32_t)seen};
    for (uint32_t k = seen; k < n; k++)
        if (first + k < home)
            ref->pages[k] = places ? places[k] : tile_place * KV_BLOCK_PAGES + k;
        else
            ref->pages[k] = ATTEND_REF_FRESH | (first_fresh + first + k - home);
}

/* Refs of one tile, by group and then by block. */
static void tile_refs(KvSchedule *schedule, const KvScheduleItem *items, uint32_t t)
{
    KvTile *tile = &schedule->tiles[t];
    AttendSpan *spans = &schedule->spans[t * schedule->n_groups];
    uint32_t end = tile->first_load + tile->n_loads;

    tile->first_ref = schedule->n_refs;
    for (uint32_t g = 0; g < schedule->n_groups; g++) {
        uint32_t i = schedule->group_items[g], *block = &schedule->group_cursors[g];
        Pages pages = visible_pages(schedule, &items[i], (uint32_t)schedule->groups[g].pos0);

        spans[g].first_ref = (int32_t)(schedule->n_refs - tile->first_ref);
        for (*block = MAX(*block, pages.first / KV_BLOCK_PAGES); *block * KV_BLOCK_PAGES < pages.end; (*block)++) {
            uint32_t load = schedule->item_loads[i * schedule->max_blocks + *block];

            if (load >= end)
                break;
            make_ref(&schedule->refs[schedule->n_refs++], &items[i], pages, g, *block,
                     is_in_place(schedule, &schedule->loads[load]) ? schedule->loads[load].block->pages : NULL,
                     load - tile->first_load, schedule->item_fresh[i]);
        }
        spans[g].n_refs = (int32_t)(schedule->n_refs - tile->first_ref) - spans[g].first_ref;
    }
    tile->n_refs = schedule->n_refs - tile->first_ref;
}

/* Groups and packs; an asking pass completes no page. */
static void build_rows(KvSchedule *schedule, const KvScheduleItem *items, uint32_t n_items, bool asking)
{
    uint32_t row0 = 0;

    schedule->n_groups = schedule->n_packs = schedule->n_refs = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        item_groups(schedule, &items[i], i, row0, asking);
        schedule->item_fresh[i] = asking ? 0 : item_packs(schedule, &items[i], row0);
        row0 += items[i].n_tokens;
    }
    schedule->n_rows = row0;
}

void kv_schedule_build(KvSchedule *schedule, const KvScheduleItem *items, uint32_t n_items)
{
    kv_schedule_tiles(schedule, items, n_items);
    build_rows(schedule, items, n_items, schedule->visibility.mask == ATTEND_MASK_CROSS);
    memset(schedule->group_cursors, 0, schedule->n_groups * sizeof(uint32_t));
    for (uint32_t t = 0; t < schedule->n_tiles; t++)
        tile_refs(schedule, items, t);
}

void kv_schedule_keep(KvSchedule *schedule, const KvScheduleItem *items, uint32_t n_items)
{
    schedule->n_loads = schedule->n_tiles = schedule->n_staged = 0;
    build_rows(schedule, items, n_items, false);
}
