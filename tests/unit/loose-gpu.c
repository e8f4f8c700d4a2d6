/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device without OpenCL that takes every liberty which queues and events leave it: for tests of cache/, included by one file of a
 * program instead of linking opencl/.
 *
 * Commands do nothing when they are queued.  They run when the host waits, in random order but for two rules: a queue is in
 * order, and a command follows the events that it waits for.  A wait that is missing therefore gives wrong results soon, with a seed
 * that repeats it; memory given back too early is touched when it is gone.
 *
 * Attention becomes bookkeeping.  A key is the number in the first column of its qkv row; a page and a tail hold the numbers of their
 * tokens; an output row is a hash over (position, number, packed or not) of all keys that the row saw, in the order in which it saw
 * them: what it must be follows from the positions alone (loose_expected()).
 */

#include "cache/kv-store.h"
#include "quant/base/cleanup.h"

#include <assert.h>
#include <string.h>
#include <sys/mman.h>

struct GpuBuffer {
    Gpu *gpu;
    uint8_t *data;
    uint64_t bytes;
    GpuPurpose purpose;
    bool wrapped;
};

struct GpuEvent {
    unsigned n_refs;
    bool done;
};

typedef struct LooseCommand LooseCommand;
struct LooseCommand {
    LooseCommand *next;
    GpuEvent *event, *waits[4];
    size_t n_waits;
    void (*run)(LooseCommand *command);
    void *to;
    const void *from;
    uint64_t bytes, offset;
    uint32_t n;
    Attend *attend;
    AttendPass pass;
    AttendLayer layer;
    AttendTile tile;
};

struct Gpu {
    GpuInfo info;
    uint32_t random;
    unsigned favourite; /* a queue that runs ahead, or GPU_QUEUE_X_MAX */
    LooseCommand *first[GPU_QUEUE_X_MAX], *last[GPU_QUEUE_X_MAX];
    uint64_t used[GPU_PURPOSE_X_MAX], n_uploads, n_commands, tile_bytes /* to the ring */, home_bytes /* of pages on their way home */,
        unshare_bytes /* of blocks copied because others share them */;
    int64_t fail_at; /* this many calls from now one fails; negative: none */
    bool lost;
};

struct Attend {
    Gpu *gpu;
    AttendOptions options;
    KvLayout layout;
    uint32_t *ids;   /* `new`: (max_rows) */
    uint64_t *state; /* (max_rows) */
};

static uint32_t loose_random(Gpu *gpu)
{
    gpu->random = gpu->random * 1664525u + 1013904223u;
    return gpu->random >> 8;
}

static bool loose_fails(Gpu *gpu)
{
    return gpu->fail_at >= 0 && gpu->fail_at-- == 0;
}

/* ---- events and queues ------------------------------------------------------------------------------------------------ */

GpuEvent *gpu_event_ref(GpuEvent *event)
{
    if (event)
        event->n_refs++;
    return event;
}

GpuEvent *gpu_event_unref(GpuEvent *event)
{
    if (event && --event->n_refs == 0)
        free(event);
    return NULL;
}

int gpu_event_status(const GpuEvent *event)
{
    return event->done;
}

static int loose_queue(Gpu *gpu, GpuQueue queue, const LooseCommand *what, GpuWait wait, GpuEvent **ret_event)
{
    LooseCommand *command;

    if (gpu->lost || loose_fails(gpu)) {
        gpu->lost = true;
        return -ENODEV;
    }
    gpu->n_commands++;
    command = malloc(sizeof(*command));
    assert(command && wait.n_events <= N_ELEMENTS(command->waits));
    *command = *what;
    command->next = NULL;
    command->event = calloc(1, sizeof(GpuEvent));
    assert(command->event);
    command->event->n_refs = 1;
    command->n_waits = wait.n_events;
    for (size_t i = 0; i < wait.n_events; i++)
        command->waits[i] = gpu_event_ref(wait.events[i]);
    if (gpu->last[queue])
        gpu->last[queue]->next = command;
    else
        gpu->first[queue] = command;
    gpu->last[queue] = command;
    if (ret_event)
        *ret_event = gpu_event_ref(command->event);
    return 0;
}

static bool loose_ready(const LooseCommand *command)
{
    for (size_t i = 0; command && i < command->n_waits; i++)
        if (command->waits[i] && !command->waits[i]->done)
            return false;
    return command != NULL;
}

/* Runs one command of some queue; false when none can run. */
static bool loose_run_one(Gpu *gpu)
{
    unsigned start = loose_random(gpu) % GPU_QUEUE_X_MAX;

    if (gpu->favourite < GPU_QUEUE_X_MAX && loose_random(gpu) % 16 != 0)
        start = gpu->favourite;
    for (unsigned i = 0; i < GPU_QUEUE_X_MAX; i++) {
        unsigned queue = (start + i) % GPU_QUEUE_X_MAX;
        LooseCommand *command = gpu->first[queue];

        if (!loose_ready(command))
            continue;
        gpu->first[queue] = command->next;
        if (!command->next)
            gpu->last[queue] = NULL;
        if (!gpu->lost)
            command->run(command);
        command->event->done = true;
        (void)gpu_event_unref(command->event);
        for (size_t j = 0; j < command->n_waits; j++)
            (void)gpu_event_unref(command->waits[j]);
        free(command);
        return true;
    }
    return false;
}

int gpu_event_wait(Gpu *gpu, GpuEvent *event, ErrorDetail *reterr)
{
    (void)reterr;
    while (!event->done)
        assert(loose_run_one(gpu)); /* else it waits for ever */
    return gpu->lost ? GPU_E_LOST : 0;
}

int gpu_step_finish(Gpu *gpu, ErrorDetail *reterr)
{
    (void)reterr;
    while (gpu->first[GPU_QUEUE_COMPUTE])
        assert(loose_run_one(gpu));
    return gpu->lost ? GPU_E_LOST : 0;
}

int gpu_drain(Gpu *gpu, ErrorDetail *reterr)
{
    (void)reterr;
    while (loose_run_one(gpu))
        ;
    for (unsigned queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
        assert(!gpu->first[queue]);
    return gpu->lost ? GPU_E_LOST : 0;
}

int gpu_flush(Gpu *gpu, GpuQueue queue)
{
    (void)queue;
    return gpu->lost ? -ENODEV : 0;
}

/* ---- memory ----------------------------------------------------------------------------------------------------------- */

void gpu_free_host(const Gpu *gpu, void *memory)
{
    (void)gpu;
    free(memory);
}

void gpu_unmap_host(const Gpu *gpu, void *memory, size_t bytes)
{
    (void)gpu;
    (void)munmap(memory, bytes);
}

bool gpu_is_lost(const Gpu *gpu)
{
    return gpu->lost;
}

const GpuInfo *gpu_info(const Gpu *gpu)
{
    return &gpu->info;
}

int gpu_buffer_new(Gpu *gpu, GpuPurpose purpose, uint64_t bytes, GpuBuffer **ret, ErrorDetail *reterr)
{
    GpuBuffer *buffer;

    if (loose_fails(gpu))
        return error_detail_set(reterr, GPU_E_OVER_BUDGET, "over budget");
    buffer = calloc(1, sizeof(*buffer));
    assert(buffer);
    *buffer = (GpuBuffer){.gpu = gpu, .data = malloc(bytes), .bytes = bytes, .purpose = purpose};
    assert(buffer->data);
    memset(buffer->data, 0xa5, bytes);
    gpu->used[purpose] += bytes;
    *ret = buffer;
    return 0;
}

int gpu_buffer_wrap(Gpu *gpu, void *memory, uint64_t bytes, GpuBuffer **ret, ErrorDetail *reterr)
{
    if (loose_fails(gpu))
        return error_detail_set(reterr, GPU_E_OVER_BUDGET, "over budget");
    *ret = calloc(1, sizeof(**ret));
    assert(*ret);
    **ret = (GpuBuffer){.gpu = gpu, .data = memory, .bytes = bytes, .wrapped = true};
    return 0;
}

GpuBuffer *gpu_buffer_free(GpuBuffer *buffer)
{
    if (!buffer)
        return NULL;
    if (!buffer->wrapped) {
        (void)gpu_drain(buffer->gpu, NULL); /* OpenCL keeps memory until its commands are over */
        buffer->gpu->used[buffer->purpose] -= buffer->bytes;
        free(buffer->data);
    }
    free(buffer);
    return NULL;
}

uint64_t gpu_buffer_bytes(const GpuBuffer *buffer)
{
    return buffer->bytes;
}

static void loose_count(Gpu *gpu, const char *label, uint64_t bytes)
{
    gpu->tile_bytes += strcmp(label, "kv tile") == 0 ? bytes : 0;
    gpu->home_bytes += strcmp(label, "kv home") == 0 ? bytes : 0;
    gpu->unshare_bytes += strcmp(label, "kv unshare") == 0 ? bytes : 0;
}

static void loose_copy(LooseCommand *command)
{
    memmove(command->to, command->from, command->bytes);
}

static const uint8_t *loose_at(const GpuBuffer *buffer, uint64_t offset, uint64_t bytes)
{
    assert(offset + bytes <= buffer->bytes);
    return buffer->data + offset;
}

int gpu_upload(Gpu *gpu, GpuQueue queue, GpuBuffer *to, uint64_t offset, const void *from, uint64_t bytes, GpuWait wait,
               const char *label, GpuEvent **ret_event)
{
    (void)loose_at(to, offset, bytes);
    gpu->n_uploads++;
    loose_count(gpu, label, bytes);
    return loose_queue(gpu, queue, &(LooseCommand){.run = loose_copy, .to = to->data + offset, .from = from, .bytes = bytes}, wait,
                       ret_event);
}

int gpu_download(Gpu *gpu, GpuQueue queue, const GpuBuffer *from, uint64_t offset, void *to, uint64_t bytes, GpuWait wait,
                 const char *label, GpuEvent **ret_event)
{
    loose_count(gpu, label, bytes);
    return loose_queue(gpu, queue,
                       &(LooseCommand){.run = loose_copy, .to = to, .from = loose_at(from, offset, bytes), .bytes = bytes}, wait,
                       ret_event);
}

int gpu_copy(Gpu *gpu, GpuQueue queue, GpuBuffer *to, uint64_t to_offset, const GpuBuffer *from, uint64_t from_offset,
             uint64_t bytes, GpuWait wait, const char *label, GpuEvent **ret_event)
{
    loose_count(gpu, label, bytes);
    (void)loose_at(to, to_offset, bytes);
    return loose_queue(gpu, queue,
                       &(LooseCommand){.run = loose_copy,
                                       .to = to->data + to_offset,
                                       .from = loose_at(from, from_offset, bytes),
                                       .bytes = bytes},
                       wait, ret_event);
}

static void loose_fill(LooseCommand *command)
{
    memset(command->to, 0, command->bytes);
}

int gpu_fill_zero(Gpu *gpu, GpuQueue queue, GpuBuffer *buffer, uint64_t offset, uint64_t bytes)
{
    (void)loose_at(buffer, offset, bytes);
    return loose_queue(gpu, queue, &(LooseCommand){.run = loose_fill, .to = buffer->data + offset, .bytes = bytes}, GPU_WAIT_NONE,
                       NULL);
}

/* ---- attention as bookkeeping ------------------------------------------------------------------------------------------- */

static uint64_t loose_mix(uint64_t state, uint32_t position, uint32_t id, bool packed)
{
    state ^= ((uint64_t)position << 33) ^ ((uint64_t)id << 1) ^ packed;
    state *= 0x9e3779b97f4a7c15u;
    return state ^ state >> 29;
}

/* What the row at @position must give when the keys' numbers are ids[0..position] and it sees those from @low on. */
static uint64_t loose_expected_from(KvForm form, const uint32_t *ids, uint32_t low, uint32_t position)
{
    uint32_t n_packed = kv_packed_pages(form, position);
    uint64_t state = 1;

    for (uint32_t j = MAX(low, (uint32_t)form.sink_tokens); j < n_packed * KV_PAGE_TOKENS; j++)
        state = loose_mix(state, j, ids[j], true);
    for (uint32_t j = low; n_packed > 0 && j < form.sink_tokens; j++)
        state = loose_mix(state, j, ids[j], false);
    for (uint32_t j = MAX(n_packed * KV_PAGE_TOKENS, low); j <= position; j++)
        state = loose_mix(state, j, ids[j], false);
    return state;
}

_unused_ static uint64_t loose_expected(KvForm form, const uint32_t *ids, uint32_t position)
{
    return loose_expected_from(form, ids, 0, position);
}

/* What every row that asks @n keys of an encoder must give. */
_unused_ static uint64_t loose_expected_cross(KvForm form, const uint32_t *ids, uint32_t n)
{
    uint32_t n_packed = n / KV_PAGE_TOKENS;
    uint64_t state = 1;

    for (uint32_t j = form.sink_tokens; j < n_packed * KV_PAGE_TOKENS; j++)
        state = loose_mix(state, j, ids[j], true);
    for (uint32_t j = 0; n_packed > 0 && j < form.sink_tokens; j++)
        state = loose_mix(state, j, ids[j], false);
    for (uint32_t j = n_packed * KV_PAGE_TOKENS; j < n; j++)
        state = loose_mix(state, j, ids[j], false);
    return state;
}

static uint32_t loose_ring(const LooseCommand *command)
{
    return kv_ring_tokens(command->attend->options.form);
}

/* A place of the ring, or of the sinks behind it: where its key begins. */
static uint32_t *loose_tail(const LooseCommand *command, int32_t slot, uint32_t place)
{
    const AttendLayer *layer = &command->layer;
    const AttendOptions *options = &command->attend->options;
    uint64_t key_bytes = (uint64_t)options->shape.n_kv_heads * options->shape.k_head_dim * (options->tail_bits / 8);

    assert(slot >= 0);
    return (uint32_t *)(layer->tail->data + layer->tail_offset + (uint64_t)slot * layer->tail_slot_stride + place * key_bytes);
}

static uint32_t *loose_recent(const LooseCommand *command, int32_t slot, int32_t position)
{
    return loose_tail(command, slot, (uint32_t)position % loose_ring(command));
}

static uint32_t loose_sinks(const LooseCommand *command)
{
    return command->attend->options.form.sink_tokens;
}

static const AttendGroup *loose_groups(const LooseCommand *command)
{
    return (const AttendGroup *)(command->pass.groups->data + command->pass.groups_offset);
}

static void loose_prepare(LooseCommand *command)
{
    const KvShape *shape = &command->attend->options.shape;
    size_t width = kv_row_values(shape);
    const float *qkv = command->from;

    bool cross = command->attend->options.visibility.mask == ATTEND_MASK_CROSS;

    for (uint32_t row = 0; row < command->pass.n_rows; row++) {
        command->attend->ids[row] = cross ? UINT32_MAX : (uint32_t)qkv[row * width];
        command->attend->state[row] = 1;
    }
}

static void loose_keep(LooseCommand *command)
{
    const float *kv = command->from;

    for (uint32_t row = 0; row < command->pass.n_rows; row++)
        command->attend->ids[row] = (uint32_t)kv[row * kv_token_values(&command->attend->options.shape)];
}

static void loose_pack(LooseCommand *command)
{
    const AttendPack *packs = command->from;

    for (uint32_t i = 0; i < command->n; i++) {
        uint32_t *page = (uint32_t *)((uint8_t *)command->to + packs[i].to * command->attend->layout.page_bytes);

        for (int32_t t = 0; t < KV_PAGE_TOKENS; t++) {
            int32_t position = packs[i].page * KV_PAGE_TOKENS + t;

            page[t] = position >= packs[i].new_start ? command->attend->ids[packs[i].new_row0 + position - packs[i].new_start]
                                                     : *loose_recent(command, packs[i].tail_slot, position);
        }
    }
}

/* The lowest position that a row of @group sees. */
static uint32_t loose_low(const LooseCommand *command, const AttendGroup *group, int32_t row)
{
    return attend_first_visible(command->attend->options.visibility, (uint32_t)group->chunk_shift,
                                (uint32_t)(group->pos0 + row - group->row0));
}

static void loose_ref(const LooseCommand *command, const AttendRef *ref, const AttendGroup *group)
{
    const AttendTile *tile = &command->tile;
    uint32_t page_bytes = command->attend->layout.page_bytes;

    for (int32_t k = ref->first_page; k < ref->n_pages; k++) {
        uint32_t index = ref->pages[k] & ~ATTEND_REF_FRESH;
        const uint32_t *page = ref->pages[k] & ATTEND_REF_FRESH
                                   ? (const uint32_t *)loose_at(tile->fresh, (uint64_t)index * page_bytes, page_bytes)
                                   : (const uint32_t *)loose_at(tile->pages, tile->pages_offset + (uint64_t)index * page_bytes,
                                                                page_bytes);

        for (uint32_t t = 0; t < KV_PAGE_TOKENS; t++) {
            uint32_t position = (uint32_t)(ref->block * KV_BLOCK_PAGES + k) * KV_PAGE_TOKENS + t;

            for (int32_t row = group->row0; position >= loose_sinks(command) && row < group->row0 + group->n_rows; row++)
                if (position >= loose_low(command, group, row))
                    command->attend->state[row] = loose_mix(command->attend->state[row], position, page[t], true);
        }
    }
}

static void loose_tile(LooseCommand *command)
{
    const AttendTile *tile = &command->tile;
    const AttendSpan *spans = (const AttendSpan *)(tile->spans->data + tile->spans_offset);
    const AttendRef *refs = (const AttendRef *)(tile->refs->data + tile->refs_offset);

    for (uint32_t g = 0; g < command->pass.n_groups; g++)
        for (int32_t i = 0; i < spans[g].n_refs; i++)
            loose_ref(command, &refs[spans[g].first_ref + i], &loose_groups(command)[g]);
}

static uint32_t loose_key(const LooseCommand *command, const AttendGroup *group, int32_t position, bool sink)
{
    if (position >= group->new_start)
        return command->attend->ids[group->new_row0 + position - group->new_start];
    return sink ? *loose_tail(command, group->tail_slot, loose_ring(command) + (uint32_t)position)
                : *loose_recent(command, group->tail_slot, position);
}

static void loose_finish(LooseCommand *command)
{
    size_t width = (size_t)command->attend->options.shape.n_heads * command->attend->options.shape.v_head_dim;

    for (uint32_t g = 0; g < command->pass.n_groups; g++) {
        const AttendGroup *group = &loose_groups(command)[g];

        for (int32_t i = 0; i < group->n_rows; i++) {
            uint64_t state = command->attend->state[group->row0 + i];
            bool cross = command->attend->options.visibility.mask == ATTEND_MASK_CROSS;
            int32_t low = (int32_t)loose_low(command, group, group->row0 + i), last = group->pos0 + (cross ? 0 : i);

            for (int32_t j = low; group->n_packed > 0 && j < (int32_t)loose_sinks(command); j++)
                state = loose_mix(state, (uint32_t)j, loose_key(command, group, j, true), false);
            for (int32_t j = MAX(group->n_packed * KV_PAGE_TOKENS, low); j <= last; j++)
                state = loose_mix(state, (uint32_t)j, loose_key(command, group, j, false), false);
            memcpy((float *)command->to + (size_t)(group->row0 + i) * width, &state, sizeof(state));
        }
    }
}

static void loose_commit(LooseCommand *command)
{
    const AttendGroup *groups = loose_groups(command);

    for (uint32_t g = 0; g < command->pass.n_groups; g++)
        for (int32_t i = 0; i < groups[g].n_rows; i++) { /* groups of a sequence come in order: the last of a place stays */
            int32_t position = groups[g].pos0 + i;

            *loose_recent(command, groups[g].tail_slot, position) = command->attend->ids[groups[g].row0 + i];
            if (position < (int32_t)loose_sinks(command))
                *loose_tail(command, groups[g].tail_slot, loose_ring(command) + (uint32_t)position) = command->attend->ids[groups[g].row0 + i];
        }
}

static void loose_refill(LooseCommand *command)
{
    const AttendPack *packs = command->from;

    for (uint32_t i = 0; i < command->n; i++) {
        const uint32_t *page = (const uint32_t *)((const uint8_t *)command->to + packs[i].to * command->attend->layout.page_bytes);

        for (int32_t t = 0; t < KV_PAGE_TOKENS; t++)
            *loose_recent(command, packs[i].tail_slot, packs[i].page * KV_PAGE_TOKENS + t) = page[t];
    }
}

int attend_device_bytes(const GpuInfo *info, const AttendOptions *options, uint64_t *ret)
{
    (void)info;
    *ret = options->max_rows;
    return 0;
}

int attend_new(Gpu *gpu, const AttendOptions *options, Attend **ret, ErrorDetail *reterr)
{
    Attend *attend;

    if (loose_fails(gpu))
        return error_detail_set(reterr, GPU_E_OVER_BUDGET, "over budget");
    attend = calloc(1, sizeof(*attend));
    assert(attend);
    *attend = (Attend){.gpu = gpu, .options = *options};
    attend->ids = calloc(options->max_rows, sizeof(uint32_t));
    attend->state = calloc(options->max_rows, sizeof(uint64_t));
    assert(attend->ids && attend->state && kv_layout(options->form, &options->shape, &attend->layout, reterr) == 0);
    *ret = attend;
    return 0;
}

Attend *attend_free(Attend *attend)
{
    if (attend) {
        (void)gpu_drain(attend->gpu, NULL);
        free(attend->ids);
        free(attend->state);
    }
    free(attend);
    return NULL;
}

int attend_prepare(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *qkv)
{
    return loose_queue(attend->gpu, GPU_QUEUE_COMPUTE,
                       &(LooseCommand){.run = loose_prepare, .attend = attend, .pass = *pass, .layer = *layer, .from = qkv->data},
                       GPU_WAIT_NONE, NULL);
}

int attend_keep(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *kv)
{
    assert(attend->options.visibility.mask == ATTEND_MASK_CROSS);
    return loose_queue(attend->gpu, GPU_QUEUE_COMPUTE,
                       &(LooseCommand){.run = loose_keep, .attend = attend, .pass = *pass, .layer = *layer, .from = kv->data},
                       GPU_WAIT_NONE, NULL);
}

int attend_pack(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *packs, uint64_t packs_offset,
                uint32_t n_packs, GpuBuffer *fresh, GpuEvent **ret_event)
{
    (void)loose_at(fresh, 0, (uint64_t)n_packs * attend->layout.page_bytes);
    return loose_queue(attend->gpu, GPU_QUEUE_COMPUTE,
                       &(LooseCommand){.run = loose_pack,
                                       .attend = attend,
                                       .pass = *pass,
                                       .layer = *layer,
                                       .from = packs->data + packs_offset,
                                       .to = fresh->data,
                                       .n = n_packs},
                       GPU_WAIT_NONE, ret_event);
}

int attend_tile(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const AttendTile *tile, GpuWait wait,
                GpuEvent **ret_event)
{
    assert(tile->n_refs > 0 && tile->n_refs <= attend->options.max_refs && tile->pages_offset % 64 == 0);
    return loose_queue(attend->gpu, GPU_QUEUE_COMPUTE,
                       &(LooseCommand){.run = loose_tile, .attend = attend, .pass = *pass, .layer = *layer, .tile = *tile}, wait,
                       ret_event);
}

int attend_finish(Attend *attend, const AttendPass *pass, const AttendLayer *layer, GpuBuffer *out)
{
    return loose_queue(attend->gpu, GPU_QUEUE_COMPUTE,
                       &(LooseCommand){.run = loose_finish, .attend = attend, .pass = *pass, .layer = *layer, .to = out->data},
                       GPU_WAIT_NONE, NULL);
}

int attend_commit(Attend *attend, const AttendPass *pass, const AttendLayer *layer)
{
    return loose_queue(attend->gpu, GPU_QUEUE_COMPUTE,
                       &(LooseCommand){.run = loose_commit, .attend = attend, .pass = *pass, .layer = *layer}, GPU_WAIT_NONE, NULL);
}

/* Rows of different sequences, as on CPU devices. */
bool attend_is_whole(const Attend *attend, const AttendPass *pass, uint32_t n_refs)
{
    return attend->options.visibility.mask != ATTEND_MASK_CROSS && pass->n_rows == pass->n_groups && pass->n_rows == pass->n_sequences &&
           n_refs <= attend->options.max_refs;
}

int attend_whole(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *qkv, const AttendTile *tile, GpuWait wait,
                 GpuBuffer *out)
{
    int r = attend_prepare(attend, pass, layer, qkv);

    if (r == 0 && tile)
        r = attend_tile(attend, pass, layer, tile, wait, NULL);
    if (r == 0)
        r = attend_finish(attend, pass, layer, out);
    return r ? r : attend_commit(attend, pass, layer);
}

int attend_refill(Attend *attend, const AttendLayer *layer, const GpuBuffer *packs, uint64_t packs_offset, uint32_t n_packs,
                  const GpuBuffer *pages, uint64_t pages_offset)
{
    return loose_queue(attend->gpu, GPU_QUEUE_COMPUTE,
                       &(LooseCommand){.run = loose_refill,
                                       .attend = attend,
                                       .layer = *layer,
                                       .from = packs->data + packs_offset,
                                       .to = pages->data + pages_offset,
                                       .n = n_packs},
                       GPU_WAIT_NONE, NULL);
}
