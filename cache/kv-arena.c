/* SPDX-License-Identifier: Apache-2.0 */
/* Homes of packed pages: arenas, and blocks taken from them. */

#include "cache/kv-arena.h"
#include "quant/base/checked.h"

#include <string.h>
#include <sys/mman.h>

static uint64_t page_bytes(const KvArenas *arenas)
{
    return (uint64_t)arenas->options.n_layers * arenas->options.page_bytes;
}

/* ---- arenas ------------------------------------------------------------------------------------------------------------- */

static KvArena *arena_free(KvArena *arena)
{
    if (!arena)
        return NULL;
    arena->buffer = gpu_buffer_free(arena->buffer);
    if (arena->memory)
        gpu_unmap_host(arena->owner->options.gpu, arena->memory, arena->mapped_bytes);
    free(arena->owners);
    free(arena->used);
    free(arena);
    return NULL;
}
DEFINE_CLEANUP(KvArena, arena_free)

static int arena_map(KvArenas *arenas, KvArena *arena, uint64_t bytes, ErrorDetail *reterr)
{
    void *memory;

    if (!checked_align(bytes, (uint64_t)sysconf(_SC_PAGESIZE), &arena->mapped_bytes))
        return error_origin(-EOVERFLOW);
    memory = mmap(NULL, arena->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return error_detail_set(reterr, KV_E_HOST_MEMORY, "cache: the system refuses %llu bytes for pages",
                                (unsigned long long)bytes);
    arena->memory = memory;
    if (!arenas->options.wrap)
        return 0;
    return error_trace(gpu_buffer_wrap(arenas->options.gpu, memory, arena->mapped_bytes, &arena->buffer, reterr));
}

static int arena_tables(KvArena *arena, uint32_t n_pages)
{
    arena->n_pages = n_pages;
    arena->n_frames = (n_pages + KV_BLOCK_PAGES - 1) / KV_BLOCK_PAGES;
    arena->owners = calloc(arena->n_frames, sizeof(KvBlock *));
    arena->used = calloc(arena->n_frames, 1);
    if (!arena->owners || !arena->used)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t i = n_pages; i-- > 0;) {
        arena->blocks[i] = (KvBlock){.arena = arena, .next_free = arena->free_blocks};
        arena->free_blocks = &arena->blocks[i];
    }
    return 0;
}

static int arena_new(KvArenas *arenas, uint32_t n_pages, KvArena **ret, ErrorDetail *reterr)
{
    _cleanup_(arena_freep) KvArena *arena = NULL;
    uint64_t bytes = n_pages * page_bytes(arenas);
    int r;

    arena = calloc(1, sizeof(*arena) + n_pages * sizeof(KvBlock));
    if (!arena)
        return error_origin(KV_E_HOST_MEMORY);
    arena->owner = arenas;
    arena->plane_bytes = (uint64_t)n_pages * arenas->options.page_bytes;
    r = arena_tables(arena, n_pages);
    if (r)
        return error_trace(r);
    if (arenas->options.home == KV_HOME_HOST)
        r = arena_map(arenas, arena, bytes, reterr);
    else
        r = gpu_buffer_new(arenas->options.gpu, GPU_PURPOSE_PAGES, bytes, &arena->buffer, reterr);
    if (r == GPU_E_OVER_BUDGET)
        return KV_E_DEVICE_MEMORY;
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(arena);
    return 0;
}

/* One more arena of @n_pages or, on the device, of as many as it still grants: whole frames, or what is left at the end. */
static int arenas_add(KvArenas *arenas, uint32_t n_pages, ErrorDetail *reterr)
{
    _cleanup_(arena_freep) KvArena *arena = NULL;
    KvBudget *budget = arenas->options.home == KV_HOME_DEVICE ? arenas->options.device_budget : NULL;
    KvArena **grown;
    uint64_t granted = n_pages;
    int r;

    if (arenas->options.limit_pages > 0) {
        granted = MIN(granted, (uint64_t)(arenas->options.limit_pages - arenas->n_pages));
        if (granted == 0)
            return error_detail_set(reterr, KV_E_DEVICE_MEMORY, "cache: %u pages are all that may be here", arenas->n_pages);
    }
    grown = realloc(arenas->arenas, (arenas->n_arenas + 1) * sizeof(KvArena *));
    if (!grown)
        return error_origin(KV_E_HOST_MEMORY);
    arenas->arenas = grown;
    if (budget) {
        granted = MIN(granted, kv_budget_left(budget) / page_bytes(arenas));
        if (granted == 0)
            return error_detail_set(reterr, KV_E_DEVICE_MEMORY,
                                    "cache: pages have %llu bytes on the device, %llu more are needed, their limit is %llu",
                                    (unsigned long long)budget->used_bytes, (unsigned long long)page_bytes(arenas),
                                    (unsigned long long)budget->limit_bytes);
    }
    do {
        r = arena_new(arenas, (uint32_t)granted, &arena, reterr);
        granted /= 2;
    } while (r == KV_E_DEVICE_MEMORY && granted > 0);
    if (r)
        return error_trace(r);
    if (budget)
        (void)kv_budget_take(budget, arena->n_pages * page_bytes(arenas));
    arenas->n_pages += arena->n_pages;
    arenas->arenas[arenas->n_arenas++] = TAKE_PTR(arena);
    return 0;
}

/* Gives one back to the system. */
static void arenas_remove(KvArenas *arenas, uint32_t index)
{
    KvArena *arena = arenas->arenas[index];

    if (arenas->options.home == KV_HOME_DEVICE && arenas->options.device_budget)
        kv_budget_return(arenas->options.device_budget, arena->n_pages * page_bytes(arenas));
    arenas->n_pages -= arena->n_pages;
    arenas->arenas[index] = arenas->arenas[--arenas->n_arenas];
    (void)arena_free(arena);
}

void kv_arenas_init(KvArenas *arenas, const KvArenaOptions *options)
{
    *arenas = (KvArenas){.options = *options};
}

void kv_arenas_deinit(KvArenas *arenas)
{
    while (arenas->n_arenas > 0)
        arenas_remove(arenas, arenas->n_arenas - 1);
    free(arenas->arenas);
    *arenas = KV_ARENAS_NULL;
}

int kv_arenas_prepare(KvArenas *arenas, uint32_t n_pages, ErrorDetail *reterr)
{
    int r = 0;

    while (r == 0 && arenas->n_pages < n_pages)
        r = arenas_add(arenas, MIN(n_pages - arenas->n_pages, arenas->options.max_pages), reterr);
    return error_trace(r);
}

/* ---- what the host budget is charged for ------------------------------------------------------------------------------------ */

static uint32_t charged_pages(const KvArenas *arenas)
{
    return arenas->options.fixed ? MAX(arenas->n_reserved, arenas->n_used) : arenas->n_used;
}

/* After a change: what was charged before was for @before pages.  False when more is not to be had. */
static bool recharge(KvArenas *arenas, uint32_t before)
{
    uint32_t now = charged_pages(arenas);

    if (arenas->options.home != KV_HOME_HOST)
        return true;
    if (now > before)
        return kv_budget_take(arenas->options.host_budget, (now - before) * page_bytes(arenas));
    kv_budget_return(arenas->options.host_budget, (before - now) * page_bytes(arenas));
    return true;
}

static int refuse(const KvArenas *arenas, uint32_t n_pages, ErrorDetail *reterr)
{
    const KvBudget *budget = kv_budget_tightest(arenas->options.host_budget);

    return error_detail_set(reterr, KV_E_HOST_MEMORY, "cache: %llu bytes more for pages, %llu of %llu (host-memory) are in use",
                            (unsigned long long)(n_pages * page_bytes(arenas)), (unsigned long long)budget->used_bytes,
                            (unsigned long long)budget->limit_bytes);
}

int kv_arenas_reserve(KvArenas *arenas, uint32_t n_pages, ErrorDetail *reterr)
{
    uint32_t n_before = arenas->n_arenas, charged = charged_pages(arenas);
    int r;

    arenas->n_reserved += n_pages;
    if (!recharge(arenas, charged)) {
        arenas->n_reserved -= n_pages;
        return refuse(arenas, n_pages, reterr);
    }
    r = kv_arenas_prepare(arenas, arenas->n_reserved, reterr);
    if (r == 0)
        return 0;
    kv_arenas_unreserve(arenas, n_pages);
    while (arenas->n_arenas > n_before) /* empty: nothing has ever been copied to or from them */
        arenas_remove(arenas, arenas->n_arenas - 1);
    return error_trace(r);
}

void kv_arenas_unreserve(KvArenas *arenas, uint32_t n_pages)
{
    uint32_t charged = charged_pages(arenas);

    arenas->n_reserved -= n_pages;
    (void)recharge(arenas, charged);
}

/* ---- places ----------------------------------------------------------------------------------------------------------------- */

static uint32_t frame_places(const KvArena *arena, uint32_t frame)
{
    return MIN(arena->n_pages - frame * KV_BLOCK_PAGES, (uint32_t)KV_BLOCK_PAGES);
}

static bool frame_is_free(const KvArena *arena, uint32_t frame)
{
    return !arena->owners[frame] && arena->used[frame] == 0;
}

/* Any free place, if need be in a frame where another block grows: there the last, which it comes to last. */
static uint32_t find_place(const KvArena *arena)
{
    for (int stolen = 0; stolen < 2; stolen++)
        for (uint32_t f = 0; f < arena->n_frames; f++) {
            if (!stolen && arena->owners[f])
                continue;
            for (uint32_t k = frame_places(arena, f); k-- > 0;)
                if (!(arena->used[f] >> k & 1))
                    return f * KV_BLOCK_PAGES + k;
        }
    return UINT32_MAX;
}

static void place_page(KvBlock *block, uint32_t page)
{
    KvArena *arena = block->arena;
    uint32_t place = block->frame == KV_NO_FRAME ? UINT32_MAX : block->frame * KV_BLOCK_PAGES + page;

    if (place >= arena->n_pages || arena->used[place / KV_BLOCK_PAGES] >> place % KV_BLOCK_PAGES & 1)
        place = find_place(arena);
    arena->used[place / KV_BLOCK_PAGES] |= (uint8_t)(1u << place % KV_BLOCK_PAGES);
    arena->n_used++;
    arena->owner->n_used++;
    block->pages[page] = place;
}

static void leave_page(KvBlock *block, uint32_t page)
{
    KvArena *arena = block->arena;
    uint32_t place = block->pages[page];

    arena->used[place / KV_BLOCK_PAGES] &= (uint8_t)~(1u << place % KV_BLOCK_PAGES);
    arena->n_used--;
    arena->owner->n_used--;
}

bool kv_block_can_grow(const KvBlock *block, uint32_t n_filled)
{
    return n_filled <= block->n_filled || n_filled - block->n_filled <= block->arena->n_pages - block->arena->n_used;
}

int kv_block_grow(KvBlock *block, uint32_t n_filled, ErrorDetail *reterr)
{
    KvArenas *arenas = block->arena->owner;
    uint32_t before = block->n_filled, charged = charged_pages(arenas);

    if (!kv_block_can_grow(block, n_filled))
        return error_origin(-EINVAL);
    for (; block->n_filled < n_filled; block->n_filled++)
        place_page(block, block->n_filled);
    if (recharge(arenas, charged))
        return 0;
    while (block->n_filled > before)
        leave_page(block, --block->n_filled);
    return refuse(arenas, n_filled - before, reterr);
}

void kv_block_shrink(KvBlock *block, uint32_t first_page, uint32_t n_filled)
{
    KvArenas *arenas = block->arena->owner;
    uint32_t charged = charged_pages(arenas);

    while (block->n_filled > MAX(n_filled, block->first_page))
        leave_page(block, --block->n_filled);
    while (block->first_page < MIN(first_page, block->n_filled))
        leave_page(block, block->first_page++);
    (void)recharge(arenas, charged);
}

/* ---- blocks ------------------------------------------------------------------------------------------------------------------- */

/* Where a sequence best starts, or goes on when its successor is taken: the longest run of free frames, from its start when
 * nothing lies before it, else from its middle, so that the sequence before it can go on growing in place. */
static KvArena *find_frame(const KvArenas *arenas, uint32_t *ret_frame)
{
    KvArena *best = NULL;
    uint32_t best_length = 0;

    for (uint32_t a = 0; a < arenas->n_arenas; a++) {
        KvArena *arena = arenas->arenas[a];
        uint32_t length = 0;

        if (arena->n_used == arena->n_pages)
            continue;
        for (uint32_t f = 0; f < arena->n_frames; f++) {
            length = frame_is_free(arena, f) ? length + 1 : 0;
            if (length > best_length) {
                uint32_t start = f + 1 - length;

                best_length = length;
                best = arena;
                *ret_frame = start > 0 ? start + length / 2 : 0;
            }
        }
    }
    return best;
}

/* The arena with the most free places. */
static KvArena *find_arena(const KvArenas *arenas, uint32_t n_pages)
{
    KvArena *best = NULL;

    for (uint32_t a = 0; a < arenas->n_arenas; a++) {
        KvArena *arena = arenas->arenas[a];

        if (arena->n_pages - arena->n_used >= n_pages &&
            (!best || arena->n_pages - arena->n_used > best->n_pages - best->n_used))
            best = arena;
    }
    return best;
}

/* The arena for a block of @n_pages, and its frame: a successor, a free one, one of a new arena, or none. */
static int find_home(KvArenas *arenas, const KvBlock *after, uint32_t n_pages, KvArena **ret, uint32_t *ret_frame, ErrorDetail *reterr)
{
    KvArena *arena;
    int r;

    if (after && after->frame != KV_NO_FRAME && after->frame + 1 < after->arena->n_frames &&
        frame_is_free(after->arena, after->frame + 1) && after->arena->n_pages - after->arena->n_used >= n_pages) {
        *ret = after->arena;
        *ret_frame = after->frame + 1;
        return 0;
    }
    arena = find_frame(arenas, ret_frame);
    if (arena && arena->n_pages - arena->n_used >= n_pages) {
        *ret = arena;
        return 0;
    }
    *ret_frame = KV_NO_FRAME;
    arena = arenas->options.fixed ? find_arena(arenas, n_pages) : NULL; /* promised memory comes before new memory */
    if (arena) {
        *ret = arena;
        return 0;
    }
    r = arenas_add(arenas, MIN(MAX(arenas->n_pages, arenas->options.first_pages), arenas->options.max_pages), reterr);
    arena = find_arena(arenas, n_pages);
    if (!arena && r)
        return error_trace(r);
    if (!arena)
        return error_detail_set(reterr, KV_E_DEVICE_MEMORY, "cache: a block needs %u pages in one piece, and the device grants fewer", n_pages);
    if (frame_is_free(arena, 0))
        *ret_frame = 0;
    *ret = arena;
    return 0;
}

int kv_arenas_take(KvArenas *arenas, const KvBlock *after, uint32_t first_page, uint32_t n_filled, KvBlock **ret, ErrorDetail *reterr)
{
    uint32_t frame = KV_NO_FRAME;
    KvArena *arena = NULL;
    KvBlock *block;
    int r;

    r = find_home(arenas, after, n_filled - first_page, &arena, &frame, reterr);
    if (r)
        return error_trace(r);
    block = arena ? arena->free_blocks : NULL;
    if (!block)
        return error_origin(-ENOMEM); /* cannot be but for blocks that have no pages left */
    arena->free_blocks = block->next_free;
    arena->n_blocks++;
    *block = (KvBlock){.arena = arena, .frame = frame, .n_refs = 1, .first_page = first_page, .n_filled = first_page};
    if (frame != KV_NO_FRAME)
        arena->owners[frame] = block;
    r = kv_block_grow(block, n_filled, reterr);
    if (r) {
        (void)kv_block_unref(block);
        return error_trace(r);
    }
    *ret = block;
    return 0;
}

KvBlock *kv_block_unref(KvBlock *block)
{
    if (!block || --block->n_refs > 0)
        return NULL;
    kv_block_shrink(block, 0, 0);
    if (block->frame != KV_NO_FRAME)
        block->arena->owners[block->frame] = NULL;
    block->arena->n_blocks--;
    block->next_free = block->arena->free_blocks;
    block->arena->free_blocks = block;
    return NULL;
}

static bool arena_is_spare(const KvArenas *arenas, const KvArena *arena)
{
    return arena->n_used == 0 && arena->n_blocks == 0 && arenas->n_pages - arena->n_pages >= MAX(arenas->n_reserved, arenas->options.keep_pages);
}

bool kv_arenas_can_trim(const KvArenas *arenas)
{
    for (uint32_t i = 0; i < arenas->n_arenas; i++)
        if (arena_is_spare(arenas, arenas->arenas[i]))
            return true;
    return false;
}

void kv_arenas_trim(KvArenas *arenas)
{
    for (uint32_t i = arenas->n_arenas; i-- > 0;)
        if (arena_is_spare(arenas, arenas->arenas[i]))
            arenas_remove(arenas, i);
}

int kv_arena_copy(Gpu *gpu, GpuQueue queue, const KvArena *from, uint64_t source, const KvArena *to, uint64_t target, uint64_t bytes,
                  const char *label, GpuEvent **ret_event)
{
    if (from->buffer && to->buffer)
        return gpu_copy(gpu, queue, to->buffer, target, from->buffer, source, bytes, GPU_WAIT_NONE, label, ret_event);
    if (from->memory && to->buffer)
        return gpu_upload(gpu, queue, to->buffer, target, from->memory + source, bytes, GPU_WAIT_NONE, label, ret_event);
    if (from->buffer)
        return gpu_download(gpu, queue, from->buffer, source, to->memory + target, bytes, GPU_WAIT_NONE, label, ret_event);
    memcpy(to->memory + target, from->memory + source, bytes);
    return 0;
}
