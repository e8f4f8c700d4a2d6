/* SPDX-License-Identifier: Apache-2.0 */
/* Homes of packed pages: arenas, and blocks taken from them. */

#include "cache/kv-arena.h"
#include "quant/base/checked.h"

#include <string.h>
#include <sys/mman.h>

static uint64_t block_bytes(const KvArenas *arenas)
{
    return (uint64_t)arenas->options.n_layers * KV_BLOCK_PAGES * arenas->options.page_bytes;
}

static KvArena *arena_free(KvArena *arena)
{
    if (!arena)
        return NULL;
    arena->buffer = gpu_buffer_free(arena->buffer);
    if (arena->memory)
        (void)munmap(arena->memory, arena->mapped_bytes);
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

static int arena_new(KvArenas *arenas, uint32_t n_blocks, KvArena **ret, ErrorDetail *reterr)
{
    _cleanup_(arena_freep) KvArena *arena = NULL;
    uint64_t bytes = n_blocks * block_bytes(arenas);
    int r;

    arena = calloc(1, sizeof(*arena) + n_blocks * sizeof(KvBlock));
    if (!arena)
        return error_origin(KV_E_HOST_MEMORY);
    arena->n_blocks = n_blocks;
    arena->plane_bytes = bytes / arenas->options.n_layers;
    for (uint32_t i = 0; i < n_blocks; i++)
        arena->blocks[i] = (KvBlock){.arena = arena, .index = i};
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

/* One more arena of @n_blocks or, on the device, of as many as it still grants. */
static int arenas_add(KvArenas *arenas, uint32_t n_blocks, ErrorDetail *reterr)
{
    _cleanup_(arena_freep) KvArena *arena = NULL;
    KvBudget *budget = arenas->options.home == KV_HOME_DEVICE ? arenas->options.device_budget : NULL;
    KvArena **grown;
    uint64_t granted = n_blocks;
    int r;

    grown = realloc(arenas->arenas, (arenas->n_arenas + 1) * sizeof(KvArena *));
    if (!grown)
        return error_origin(KV_E_HOST_MEMORY);
    arenas->arenas = grown;
    if (budget) {
        granted = MIN(granted, kv_budget_left(budget) / block_bytes(arenas));
        if (granted == 0)
            return error_detail_set(reterr, KV_E_DEVICE_MEMORY,
                                    "cache: pages have %llu bytes on the device, %llu more are needed, their limit is %llu",
                                    (unsigned long long)budget->used_bytes, (unsigned long long)block_bytes(arenas),
                                    (unsigned long long)budget->limit_bytes);
    }
    do {
        r = arena_new(arenas, (uint32_t)granted, &arena, reterr);
        granted /= 2;
    } while (r == KV_E_DEVICE_MEMORY && granted > 0);
    if (r)
        return error_trace(r);
    if (budget)
        (void)kv_budget_take(budget, arena->n_blocks * block_bytes(arenas));
    arenas->n_blocks += arena->n_blocks;
    arenas->arenas[arenas->n_arenas++] = TAKE_PTR(arena);
    return 0;
}

/* Gives one back to the system. */
static void arenas_remove(KvArenas *arenas, uint32_t index)
{
    KvArena *arena = arenas->arenas[index];

    if (arenas->options.home == KV_HOME_DEVICE && arenas->options.device_budget)
        kv_budget_return(arenas->options.device_budget, arena->n_blocks * block_bytes(arenas));
    arenas->n_blocks -= arena->n_blocks;
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

int kv_arenas_prepare(KvArenas *arenas, uint32_t n_blocks, ErrorDetail *reterr)
{
    int r = 0;

    while (r == 0 && arenas->n_blocks < n_blocks)
        r = arenas_add(arenas, MIN(n_blocks - arenas->n_blocks, arenas->options.max_blocks), reterr);
    return error_trace(r);
}

int kv_arenas_reserve(KvArenas *arenas, uint32_t n_blocks, ErrorDetail *reterr)
{
    uint64_t bytes = n_blocks * block_bytes(arenas);
    bool host = arenas->options.home == KV_HOME_HOST;
    uint32_t n_before = arenas->n_arenas;
    int r;

    if (host && !kv_budget_take(arenas->options.host_budget, bytes))
        return error_detail_set(reterr, KV_E_HOST_MEMORY, "cache: %llu bytes to reserve, %llu of %llu are in use",
                                (unsigned long long)bytes, (unsigned long long)arenas->options.host_budget->used_bytes,
                                (unsigned long long)arenas->options.host_budget->limit_bytes);
    arenas->n_reserved += n_blocks;
    r = kv_arenas_prepare(arenas, arenas->n_reserved, reterr);
    if (r == 0)
        return 0;
    kv_arenas_unreserve(arenas, n_blocks);
    while (arenas->n_arenas > n_before) /* empty: nothing has ever been copied to or from them */
        arenas_remove(arenas, arenas->n_arenas - 1);
    return error_trace(r);
}

void kv_arenas_unreserve(KvArenas *arenas, uint32_t n_blocks)
{
    arenas->n_reserved -= n_blocks;
    if (arenas->options.home == KV_HOME_HOST)
        kv_budget_return(arenas->options.host_budget, n_blocks * block_bytes(arenas));
}

/* Where a sequence best starts, or goes on when its successor is taken: the longest run of free blocks, from its start when
 * nothing lies before it, else from its middle, so that the sequence before it can go on growing in place. */
static KvBlock *arenas_find(KvArenas *arenas)
{
    KvBlock *best = NULL;
    uint32_t best_length = 0;

    for (uint32_t a = 0; a < arenas->n_arenas; a++) {
        KvArena *arena = arenas->arenas[a];
        uint32_t length = 0;

        if (arena->n_used == arena->n_blocks)
            continue;
        for (uint32_t i = 0; i < arena->n_blocks; i++) {
            length = arena->blocks[i].n_refs == 0 ? length + 1 : 0;
            if (length > best_length) {
                uint32_t start = i + 1 - length;

                best_length = length;
                best = &arena->blocks[start > 0 ? start + length / 2 : 0];
            }
        }
    }
    return best;
}

int kv_arenas_take(KvArenas *arenas, const KvBlock *after, KvBlock **ret, ErrorDetail *reterr)
{
    bool charged = arenas->options.home == KV_HOME_HOST && !arenas->options.fixed;
    KvBlock *block = NULL;
    int r;

    if (charged && !kv_budget_take(arenas->options.host_budget, block_bytes(arenas)))
        return error_detail_set(reterr, KV_E_HOST_MEMORY, "cache: %llu bytes more for pages, %llu of %llu are in use",
                                (unsigned long long)block_bytes(arenas),
                                (unsigned long long)arenas->options.host_budget->used_bytes,
                                (unsigned long long)arenas->options.host_budget->limit_bytes);
    if (after && after->index + 1 < after->arena->n_blocks && after->arena->blocks[after->index + 1].n_refs == 0)
        block = &after->arena->blocks[after->index + 1];
    if (!block)
        block = arenas_find(arenas);
    if (!block) {
        r = arenas_add(arenas, MIN(MAX(arenas->n_blocks, arenas->options.first_blocks), arenas->options.max_blocks), reterr);
        if (r) {
            if (charged)
                kv_budget_return(arenas->options.host_budget, block_bytes(arenas));
            return error_trace(r);
        }
        block = &arenas->arenas[arenas->n_arenas - 1]->blocks[0];
    }
    block->n_refs = 1;
    block->n_filled = 0;
    block->serial = 0;
    block->write_serial = 0;
    block->arena->n_used++;
    arenas->n_used++;
    *ret = block;
    return 0;
}

KvBlock *kv_arenas_unref(KvArenas *arenas, KvBlock *block)
{
    if (!block || --block->n_refs > 0)
        return NULL;
    block->arena->n_used--;
    arenas->n_used--;
    if (arenas->options.home == KV_HOME_HOST && !arenas->options.fixed)
        kv_budget_return(arenas->options.host_budget, block_bytes(arenas));
    return NULL;
}

static bool arena_is_spare(const KvArenas *arenas, const KvArena *arena)
{
    return arena->n_used == 0 && arenas->n_blocks - arena->n_blocks >= MAX(arenas->n_reserved, arenas->options.keep_blocks);
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
