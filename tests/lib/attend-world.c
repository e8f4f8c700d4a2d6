/* SPDX-License-Identifier: Apache-2.0 */
/* A small cache around opencl/attend.h, and the answer in double precision (attend-world.h). */

#include "tests/lib/attend-world.h"

#include "opencl/attend-internal.h"
#include "quant/base/half.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define PAGES_OFFSET  4096 /* offsets that a kernel must not forget */
#define INPUT_OFFSET  256
#define TAIL_OFFSET   128
#define INPUT_BYTES   (8u << 20)

typedef struct Sequence {
    uint32_t length, n_packed, n_asked;
    float *k, *v;     /* (max_tokens, n_kv_heads, k_ or v_head_dim), k after RoPE, rounded to the tail's width */
    uint32_t *arena;  /* (pages): page index */
} Sequence;

struct World {
    Gpu *gpu;
    WorldOptions options;
    Attend *attend;
    KvLayout layout;
    uint32_t max_pages, n_arena;
    float *inv_freq, *calibration; /* what `measured` points into */
    KvCalibration measured;
    float *constants;              /* kv_constants_fill() */
    float *logits;                 /* (n_heads) */
    uint8_t *packed;               /* (arena): pages as C packs them */
    Sequence sequences[WORLD_MAX_SEQUENCES];
    GpuBuffer *pages, *fresh, *tail, *input, *qkv, *out, *means, *sink_logits;
    uint8_t *staging;              /* INPUT_BYTES */
    uint64_t tail_bytes;           /* one slot */
};

/* ---- made-up numbers -------------------------------------------------------------------------------------------------------- */

float world_uniform(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e)
{
    uint32_t in[] = {a, b, c, d, e}, x = 2166136261u;

    for (size_t i = 0; i < N_ELEMENTS(in); i++) {
        x = (x ^ in[i]) * 0x9e3779b1u;
        x ^= x >> 15;
        x *= 0x85ebca77u;
        x ^= x >> 13;
    }
    return (float)(x >> 8) * 0x1p-24f;
}

float world_gaussian(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e)
{
    float u = world_uniform(a, b, c, d, e) + 0x1p-25f, v = world_uniform(a, b, c, d, e ^ 0x5bd1e995u);

    return sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v);
}

static void *zeroed(size_t n, size_t size)
{
    void *memory = calloc(n, size);

    assert_non_null(memory);
    return memory;
}

static GpuBuffer *buffer(World *w, uint64_t bytes)
{
    GpuBuffer *b = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;

    if (gpu_buffer_new(w->gpu, GPU_PURPOSE_OTHER, bytes, &b, &detail))
        fail_msg("%s", detail.text);
    assert_int_equal(gpu_fill_zero(w->gpu, GPU_QUEUE_COMPUTE, b, 0, bytes), 0);
    return b;
}

static void finish(World *w)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    if (gpu_drain(w->gpu, &detail))
        fail_msg("%s", detail.text);
}

static void upload(World *w, GpuBuffer *to, uint64_t offset, const void *from, uint64_t bytes)
{
    assert_int_equal(gpu_upload(w->gpu, GPU_QUEUE_COMPUTE, to, offset, from, bytes, GPU_WAIT_NONE, "test", NULL), 0);
    finish(w);
}

/* ---- who sees what --------------------------------------------------------------------------------------------------------- */

static bool is_cross(const World *w)
{
    return w->options.attend.visibility.mask == ATTEND_MASK_CROSS;
}

static uint32_t chunk_shift(const World *w, uint32_t sequence)
{
    AttendVisibility visibility = w->options.attend.visibility;

    return visibility.mask == ATTEND_MASK_CHUNKED ? (5 + 13 * sequence) % visibility.window : 0;
}

static uint32_t first_visible(const World *w, uint32_t sequence, uint32_t position)
{
    return attend_first_visible(w->options.attend.visibility, chunk_shift(w, sequence), position);
}

/* The last position that a row sees, and how many pages it sees packed. */
static uint32_t last_visible(const World *w, uint32_t sequence, uint32_t position)
{
    return is_cross(w) ? w->sequences[sequence].length - 1 : position;
}

static uint32_t packed_pages(const World *w, uint32_t sequence, uint32_t position)
{
    return is_cross(w) ? w->sequences[sequence].length / KV_PAGE_TOKENS : kv_packed_pages(w->options.attend.form, position);
}

/* ---- life --------------------------------------------------------------------------------------------------------------------- */

World *world_free(World *w)
{
    GpuBuffer *buffers[] = {w->pages, w->fresh, w->tail, w->input, w->qkv, w->out, w->means, w->sink_logits};

    (void)attend_free(w->attend);
    for (size_t i = 0; i < N_ELEMENTS(buffers); i++)
        (void)gpu_buffer_free(buffers[i]);
    for (size_t i = 0; i < WORLD_MAX_SEQUENCES; i++) {
        free(w->sequences[i].k);
        free(w->sequences[i].v);
        free(w->sequences[i].arena);
    }
    free(w->inv_freq);
    free(w->calibration);
    free(w->constants);
    free(w->logits);
    free(w->packed);
    free(w->staging);
    free(w);
    return NULL;
}

static void make_buffers(World *w)
{
    const KvShape *s = &w->options.attend.shape;
    uint64_t rows = w->options.attend.max_rows;

    w->tail_bytes = (kv_ring_tokens(w->options.attend.form) + w->options.attend.form.sink_tokens) * kv_token_values(s) *
                    (w->options.attend.tail_bits / 8);
    w->pages = buffer(w, PAGES_OFFSET + (uint64_t)w->layout.page_bytes * w->max_pages * WORLD_MAX_SEQUENCES);
    w->fresh = buffer(w, (uint64_t)w->layout.page_bytes * (rows / KV_PAGE_TOKENS + 2 + WORLD_MAX_SEQUENCES));
    w->tail = buffer(w, TAIL_OFFSET + 2 * w->tail_bytes * WORLD_MAX_SEQUENCES);
    w->input = buffer(w, INPUT_BYTES);
    w->qkv = buffer(w, rows * kv_row_values(s) * sizeof(float));
    w->out = buffer(w, rows * s->n_heads * s->v_head_dim * sizeof(float));
    w->means = buffer(w, INPUT_OFFSET + kv_constants_floats(s) * sizeof(float));
    upload(w, w->means, INPUT_OFFSET, w->constants, kv_constants_floats(s) * sizeof(float));
    w->sink_logits = buffer(w, INPUT_OFFSET + s->n_heads * sizeof(float));
    upload(w, w->sink_logits, INPUT_OFFSET, w->logits, s->n_heads * sizeof(float));
}

/* Means, and a factor for each rotary pair and each channel without RoPE. */
static void make_calibration(World *w)
{
    const KvShape *s = &w->options.attend.shape;
    size_t k_side = (size_t)s->n_kv_heads * s->k_head_dim, n = 3 * k_side + (size_t)s->n_kv_heads * s->v_head_dim;
    float *scale;

    w->calibration = zeroed(n, sizeof(float));
    w->constants = zeroed(kv_constants_floats(s), sizeof(float));
    scale = w->calibration + 2 * k_side;
    for (size_t i = 0; w->options.calibrated && i < n; i++)
        w->calibration[i] = 0.8f * world_gaussian(77, 0, 0, 0, (uint32_t)i);
    for (size_t i = 0; i < k_side; i++)
        scale[i] = w->options.calibrated ? 0.5f + fabsf(scale[i]) : 1.0f;
    for (uint32_t h = 0; h < s->n_kv_heads; h++)
        memcpy(scale + h * s->k_head_dim + s->rotary_dim / 2, scale + h * s->k_head_dim, s->rotary_dim / 2 * sizeof(float));
    w->measured = (KvCalibration){.k_mean = w->calibration, .v_mean = w->calibration + 3 * k_side,
                                  .k_turned_mean = w->calibration + k_side, .k_pair_scale = scale,
                                  .k_largest = w->options.calibrated ? 6.0f : 0.0f, .v_largest = w->options.calibrated ? 4.0f : 0.0f};
    kv_constants_fill(w->options.attend.form, s, &w->measured, w->constants);
}

World *world_new(Gpu *gpu, const WorldOptions *options)
{
    const KvShape *s = &options->attend.shape;
    World *w = zeroed(1, sizeof(*w));
    ErrorDetail detail = ERROR_DETAIL_NULL;

    w->gpu = gpu;
    w->options = *options;
    w->max_pages = (options->max_tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS + 1;
    w->options.attend.max_pages = w->max_pages;
    w->inv_freq = zeroed(s->rotary_dim / 2 + 1, sizeof(float));
    for (uint32_t f = 0; f < s->rotary_dim / 2; f++)
        w->inv_freq[f] = (float)pow(1e5, -2.0 * f / s->rotary_dim);
    w->options.attend.inv_freq = w->inv_freq;
    make_calibration(w);
    w->logits = zeroed(s->n_heads, sizeof(float));
    for (uint32_t head = 0; head < s->n_heads; head++)
        w->logits[head] = 3.0f * world_gaussian(78, 0, 0, 0, head);
    assert_int_equal(kv_layout(options->attend.form, s, &w->layout, NULL), 0);
    w->packed = zeroed((size_t)w->max_pages * WORLD_MAX_SEQUENCES, w->layout.page_bytes);
    w->staging = zeroed(1, INPUT_BYTES);
    for (uint32_t i = 0; i < WORLD_MAX_SEQUENCES; i++) {
        w->sequences[i].k = zeroed((size_t)options->max_tokens * s->n_kv_heads * s->k_head_dim, sizeof(float));
        w->sequences[i].v = zeroed((size_t)options->max_tokens * s->n_kv_heads * s->v_head_dim, sizeof(float));
        w->sequences[i].arena = zeroed(w->max_pages, sizeof(uint32_t));
    }
    if (attend_new(gpu, &w->options.attend, &w->attend, &detail))
        fail_msg("%s", detail.text);
    make_buffers(w);
    return w;
}

uint32_t world_length(const World *w, uint32_t sequence)
{
    return is_cross(w) ? w->sequences[sequence].n_asked : w->sequences[sequence].length;
}

void world_set_tile_blocks(World *w, uint32_t tile_blocks)
{
    w->options.tile_blocks = tile_blocks;
}

AttendKernels world_kernels(const World *w)
{
    return w->attend->kernels;
}

/* ---- what C thinks of the new tokens ------------------------------------------------------------------------------------------------ */

static float tail_round(const World *w, float x)
{
    return w->options.attend.tail_bits == 32 ? x : float_from_half(half_from_float(x));
}

/* The host's cos and sin of a row. */
static void row_rope(const World *w, uint32_t position, float *ret)
{
    for (uint32_t f = 0; f < w->options.attend.shape.rotary_dim / 2; f++) {
        ret[2 * f] = (float)cos((double)position * w->inv_freq[f]);
        ret[2 * f + 1] = (float)sin((double)position * w->inv_freq[f]);
    }
}

static void turn(const World *w, const float *rope, const float *x, float *ret)
{
    uint32_t half = w->options.attend.shape.rotary_dim / 2;

    memcpy(ret, x, w->options.attend.shape.k_head_dim * sizeof(float));
    for (uint32_t f = 0; f < half; f++) {
        float a = x[f], b = x[f + half], c = rope[2 * f], s = rope[2 * f + 1];

        ret[f] = fmaf(a, c, -(b * s));
        ret[f + half] = fmaf(b, c, a * s);
    }
}

static void make_queries(const World *w, uint32_t sequence, uint32_t position, float *q)
{
    const KvShape *s = &w->options.attend.shape;

    for (uint32_t head = 0; head < s->n_heads; head++, q += s->k_head_dim)
        for (uint32_t d = 0; d < s->k_head_dim; d++)
            q[d] = w->options.value(0, sequence, position, head, d);
}

/* Fills keys and values of one row, and keeps them as the tail will hold them. */
static void make_keys_and_values(World *w, uint32_t sequence, uint32_t position, float *qkv)
{
    const KvShape *s = &w->options.attend.shape;
    float rope[KV_MAX_HEAD_DIM], turned[KV_MAX_HEAD_DIM];
    Sequence *q = &w->sequences[sequence];

    row_rope(w, position, rope);
    for (uint32_t head = 0; head < s->n_kv_heads; head++, qkv += s->k_head_dim) {
        float *k = q->k + ((size_t)position * s->n_kv_heads + head) * s->k_head_dim;

        for (uint32_t d = 0; d < s->k_head_dim; d++)
            qkv[d] = w->options.value(1, sequence, position, head, d);
        turn(w, rope, qkv, turned);
        for (uint32_t d = 0; d < s->k_head_dim; d++)
            k[d] = tail_round(w, turned[d]);
    }
    for (uint32_t head = 0; head < s->n_kv_heads; head++, qkv += s->v_head_dim) {
        float *v = q->v + ((size_t)position * s->n_kv_heads + head) * s->v_head_dim;

        for (uint32_t d = 0; d < s->v_head_dim; d++) {
            qkv[d] = w->options.value(2, sequence, position, head, d);
            v[d] = tail_round(w, qkv[d]);
        }
    }
}

/* The page as C packs it, with cosines put together from the two tables as the kernel does it. */
static void pack_in_c(World *w, uint32_t sequence, uint32_t page, uint8_t *ret)
{
    const KvShape *s = &w->options.attend.shape;
    size_t first = (size_t)page * KV_PAGE_TOKENS * s->n_kv_heads;
    uint32_t half = s->rotary_dim / 2;
    _cleanup_(freep) float *rope = zeroed((size_t)KV_PAGE_TOKENS * s->rotary_dim + 1, sizeof(float));

    for (uint32_t t = 0; t < KV_PAGE_TOKENS; t++)
        for (uint32_t f = 0; f < half; f++) {
            double turn_f = w->inv_freq[f], centre = page * 32.0 + 15.5, place = t - 15.5;
            float pc = (float)cos(centre * turn_f), ps = (float)sin(centre * turn_f);
            float c = (float)cos(place * turn_f), sn = (float)sin(place * turn_f);

            rope[(t * half + f) * 2] = fmaf(c, pc, -(sn * ps));
            rope[(t * half + f) * 2 + 1] = fmaf(c, ps, sn * pc);
        }
    kv_pack_page(w->options.attend.form, s, &w->measured, rope, w->sequences[sequence].k + first * s->k_head_dim,
                 w->sequences[sequence].v + first * s->v_head_dim, ret);
}

/* ---- passes ----------------------------------------------------------------------------------------------------------------------- */

/* Everything the host writes for one pass, laid out in the staging area. */
typedef struct Plan {
    uint32_t n_rows, n_groups, n_packs, n_tiles, used;
    AttendGroup *groups;
    AttendPack *packs;
    uint64_t rope_at, groups_at, packs_at;
    uint64_t refs_at[64], spans_at[64];
    uint32_t n_refs[64];
    uint32_t pack_sequence[256];
} Plan;

static void *plan_room(World *w, Plan *p, size_t bytes, uint64_t *ret_at)
{
    *ret_at = p->used;
    p->used = (uint32_t)((p->used + bytes + 63) / 64 * 64);
    assert_true(p->used <= INPUT_BYTES);
    return w->staging + *ret_at;
}

/* @asking: cross attention's queries. */
static void plan_groups(World *w, const WorldItem *items, uint32_t n_items, bool asking, Plan *p)
{
    uint32_t row = 0;

    for (uint32_t i = 0; i < n_items; i++)
        p->n_rows += items[i].n_tokens;
    p->groups = plan_room(w, p, p->n_rows * sizeof(AttendGroup), &p->groups_at);
    for (uint32_t i = 0; i < n_items; i++) {
        uint32_t sequence = items[i].sequence, start = w->sequences[sequence].length, row0 = row, n;

        for (uint32_t done = 0; done < items[i].n_tokens; done += n, row += n) {
            uint32_t pos = asking ? start - 1 : start + done, in_page = asking ? 0 : pos % KV_PAGE_TOKENS;

            n = MIN(KV_PAGE_TOKENS - in_page, items[i].n_tokens - done);
            p->groups[p->n_groups++] = (AttendGroup){.row0 = (int32_t)row, .n_rows = (int32_t)n, .pos0 = (int32_t)pos,
                                                     .n_packed = (int32_t)packed_pages(w, sequence, pos),
                                                     .tail_slot = (int32_t)sequence, .new_start = (int32_t)start,
                                                     .new_row0 = (int32_t)row0, .chunk_shift = (int32_t)chunk_shift(w, sequence)};
        }
    }
}

static void plan_packs(World *w, const WorldItem *items, uint32_t n_items, Plan *p)
{
    p->packs = plan_room(w, p, 256 * sizeof(AttendPack), &p->packs_at);
    for (uint32_t i = 0, row0 = 0; i < n_items; row0 += items[i++].n_tokens) {
        Sequence *q = &w->sequences[items[i].sequence];
        uint32_t end = is_cross(w) ? (q->length + items[i].n_tokens) / KV_PAGE_TOKENS
                                   : packed_pages(w, items[i].sequence, q->length + items[i].n_tokens - 1);

        for (uint32_t page = q->n_packed; page < end; page++) {
            assert_true(p->n_packs < 256);
            p->pack_sequence[p->n_packs] = items[i].sequence;
            q->arena[page] = p->n_packs | ATTEND_REF_FRESH;
            p->packs[p->n_packs] = (AttendPack){.tail_slot = (int32_t)items[i].sequence, .page = (int32_t)page,
                                                .new_start = (int32_t)q->length, .new_row0 = (int32_t)row0, .to = p->n_packs};
            p->n_packs++;
        }
    }
}

static AttendRef make_ref(const World *w, const AttendGroup *group, uint32_t g, uint32_t block, uint32_t low)
{
    uint32_t first = block * KV_BLOCK_PAGES, end = MIN(first + KV_BLOCK_PAGES, (uint32_t)group->n_packed);
    AttendRef ref = {.group = (int32_t)g, .block = (int32_t)block, .n_pages = (int32_t)(end - first)};

    if (low > first)
        ref.first_page = (int32_t)(low - first);
    for (uint32_t page = MAX(first, low); page < end; page++)
        ref.pages[page - first] = w->sequences[group->tail_slot].arena[page];
    return ref;
}

static void plan_tiles(World *w, Plan *p)
{
    uint32_t per_tile = w->options.tile_blocks ? w->options.tile_blocks : UINT32_MAX, most = 0;

    for (uint32_t g = 0; g < p->n_groups; g++)
        most = MAX(most, ((uint32_t)p->groups[g].n_packed + KV_BLOCK_PAGES - 1) / KV_BLOCK_PAGES);
    for (uint32_t first = 0; first < most; first += MIN(per_tile, most)) {
        uint32_t t = p->n_tiles++, end = MIN(most - first, per_tile) + first;
        AttendSpan *spans = plan_room(w, p, p->n_groups * sizeof(*spans), &p->spans_at[t]);
        AttendRef *refs = plan_room(w, p, 0, &p->refs_at[t]);

        assert_true(t < 64);
        for (uint32_t g = 0; g < p->n_groups; g++) {
            const AttendGroup *group = &p->groups[g];
            uint32_t low = first_visible(w, (uint32_t)group->tail_slot, (uint32_t)group->pos0) / KV_PAGE_TOKENS;

            low = w->options.untrimmed ? 0 : MIN(low, (uint32_t)group->n_packed);
            spans[g].first_ref = (int32_t)p->n_refs[t];
            for (uint32_t b = MAX(first, low / KV_BLOCK_PAGES); b < end && b * KV_BLOCK_PAGES < (uint32_t)group->n_packed; b++)
                if (low < (uint32_t)group->n_packed)
                    refs[p->n_refs[t]++] = make_ref(w, group, g, b, low);
            spans[g].n_refs = (int32_t)p->n_refs[t] - spans[g].first_ref;
        }
        (void)plan_room(w, p, p->n_refs[t] * sizeof(AttendRef), &p->refs_at[63]);
    }
}

/* With @queries, with @keys and values. */
static void plan_rows(World *w, Plan *p, bool queries, bool keys)
{
    const KvShape *s = &w->options.attend.shape;
    size_t n_q = queries ? (size_t)s->n_heads * s->k_head_dim : 0, stride = n_q + (keys ? kv_token_values(s) : 0);
    _cleanup_(freep) float *qkv = zeroed(p->n_rows * stride, sizeof(float));
    float *rope = plan_room(w, p, (size_t)p->n_rows * s->rotary_dim * sizeof(float), &p->rope_at);

    for (uint32_t g = 0; g < p->n_groups; g++)
        for (uint32_t i = 0; i < (uint32_t)p->groups[g].n_rows; i++) {
            uint32_t row = (uint32_t)p->groups[g].row0 + i, sequence = (uint32_t)p->groups[g].tail_slot;
            uint32_t position = (uint32_t)p->groups[g].pos0 + i;

            if (!keys) /* cross: the row's number among the queries */
                position = w->sequences[sequence].n_asked + row - (uint32_t)p->groups[g].new_row0;
            if (queries)
                make_queries(w, sequence, position, qkv + row * stride);
            if (keys)
                make_keys_and_values(w, sequence, position, qkv + row * stride + n_q);
            row_rope(w, position, rope + (size_t)row * s->rotary_dim);
        }
    upload(w, w->qkv, 0, qkv, p->n_rows * stride * sizeof(float));
    upload(w, w->input, INPUT_OFFSET, w->staging, p->used);
}

static AttendLayer world_layer(const World *w)
{
    return (AttendLayer){.calibration = w->means,
                         .calibration_offset = INPUT_OFFSET,
                         .tail = w->tail,
                         .tail_offset = TAIL_OFFSET,
                         .tail_slot_stride = 2 * w->tail_bytes,
                         .sink_logits = w->sink_logits,
                         .sink_logits_offset = INPUT_OFFSET};
}

static AttendPass plan_pass(const World *w, const Plan *p, uint32_t n_items)
{
    return (AttendPass){p->n_rows, p->n_groups, w->input, INPUT_OFFSET + p->rope_at, w->input, INPUT_OFFSET + p->groups_at, n_items};
}

static AttendTile plan_tile(const World *w, const Plan *p, uint32_t t)
{
    return (AttendTile){w->pages, PAGES_OFFSET, w->fresh, w->input, INPUT_OFFSET + p->refs_at[t], w->input, INPUT_OFFSET + p->spans_at[t],
                        p->n_refs[t]};
}

/* In one launch where it may be; whether it was. */
static bool run_whole(World *w, const Plan *p, const AttendPass *pass, const AttendLayer *layer)
{
    bool has_tile = p->n_tiles > 0 && p->n_refs[0] > 0;
    AttendTile tile;

    if (p->n_packs > 0 || p->n_tiles > 1 || !attend_is_whole(w->attend, pass, has_tile ? p->n_refs[0] : 0))
        return false;
    tile = plan_tile(w, p, 0);
    assert_int_equal(attend_whole(w->attend, pass, layer, w->qkv, has_tile ? &tile : NULL, GPU_WAIT_NONE, w->out), 0);
    return true;
}

static void run_apart(World *w, const Plan *p, const AttendPass *pass, const AttendLayer *layer)
{
    assert_int_equal(attend_prepare(w->attend, pass, layer, w->qkv), 0);
    if (p->n_packs > 0)
        assert_int_equal(attend_pack(w->attend, pass, layer, w->input, INPUT_OFFSET + p->packs_at, p->n_packs, w->fresh, NULL), 0);
    for (uint32_t t = 0; t < p->n_tiles; t++) {
        AttendTile tile = plan_tile(w, p, t);

        if (p->n_refs[t] > 0)
            assert_int_equal(attend_tile(w->attend, pass, layer, &tile, GPU_WAIT_NONE, NULL), 0);
    }
    assert_int_equal(attend_finish(w->attend, pass, layer, w->out), 0);
    if (!is_cross(w))
        assert_int_equal(attend_commit(w->attend, pass, layer), 0);
}

static void run(World *w, const Plan *p, uint32_t n_items)
{
    AttendPass pass = plan_pass(w, p, n_items);
    AttendLayer layer = world_layer(w);

    if (!run_whole(w, p, &pass, &layer))
        run_apart(w, p, &pass, &layer);
    finish(w);
}

/* Pages go from `fresh` to the arena, after a look at every byte. */
static void keep_packs(World *w, const Plan *p)
{
    _cleanup_(freep) uint8_t *bytes = malloc(w->layout.page_bytes);

    assert_non_null(bytes);
    for (uint32_t i = 0; i < p->n_packs; i++) {
        Sequence *q = &w->sequences[p->pack_sequence[i]];
        uint32_t page = (uint32_t)p->packs[i].page, to = w->n_arena++;
        uint8_t *mine = w->packed + (size_t)to * w->layout.page_bytes;

        assert_true(to < w->max_pages * WORLD_MAX_SEQUENCES);
        pack_in_c(w, p->pack_sequence[i], page, mine);
        assert_int_equal(gpu_download(w->gpu, GPU_QUEUE_COMPUTE, w->fresh, (uint64_t)i * w->layout.page_bytes, bytes,
                                      w->layout.page_bytes, GPU_WAIT_NONE, "test", NULL),
                         0);
        finish(w);
        for (uint32_t b = 0; b < w->layout.page_bytes; b++)
            if (bytes[b] != mine[b])
                fail_msg("page %u of sequence %u: byte %u of record %u is %02x, in C %02x", page, p->pack_sequence[i],
                         b % w->layout.record_bytes, b / w->layout.record_bytes, bytes[b], mine[b]);
        assert_int_equal(gpu_copy(w->gpu, GPU_QUEUE_COMPUTE, w->pages, PAGES_OFFSET + (uint64_t)to * w->layout.page_bytes, w->fresh,
                                  (uint64_t)i * w->layout.page_bytes, w->layout.page_bytes, GPU_WAIT_NONE, "test", NULL),
                         0);
        q->arena[page] = to;
        q->n_packed = page + 1;
    }
    finish(w);
}

void world_pass(World *w, const WorldItem *items, uint32_t n_items, float *ret_out)
{
    const KvShape *s = &w->options.attend.shape;
    Plan p = {0};

    plan_groups(w, items, n_items, is_cross(w), &p);
    if (!is_cross(w))
        plan_packs(w, items, n_items, &p);
    plan_tiles(w, &p);
    plan_rows(w, &p, true, !is_cross(w));
    run(w, &p, n_items);
    assert_int_equal(gpu_download(w->gpu, GPU_QUEUE_COMPUTE, w->out, 0, ret_out,
                                  (uint64_t)p.n_rows * s->n_heads * s->v_head_dim * sizeof(float), GPU_WAIT_NONE, "test", NULL),
                     0);
    finish(w);
    keep_packs(w, &p);
    for (uint32_t i = 0; i < n_items; i++)
        *(is_cross(w) ? &w->sequences[items[i].sequence].n_asked : &w->sequences[items[i].sequence].length) += items[i].n_tokens;
}

void world_keep(World *w, uint32_t sequence, uint32_t n_tokens)
{
    AttendLayer layer = world_layer(w);
    WorldItem item = {sequence, n_tokens};
    AttendPass pass;
    Plan p = {0};

    plan_groups(w, &item, 1, false, &p);
    plan_packs(w, &item, 1, &p);
    plan_rows(w, &p, false, true);
    pass = plan_pass(w, &p, 1);
    assert_int_equal(attend_keep(w->attend, &pass, &layer, w->qkv), 0);
    if (p.n_packs > 0)
        assert_int_equal(
            attend_pack(w->attend, &pass, &layer, w->input, INPUT_OFFSET + p.packs_at, p.n_packs, w->fresh, NULL), 0);
    assert_int_equal(attend_commit(w->attend, &pass, &layer), 0);
    finish(w);
    keep_packs(w, &p);
    w->sequences[sequence].length += n_tokens;
}

void world_crop(World *w, uint32_t sequence, uint32_t length)
{
    Sequence *q = &w->sequences[sequence];
    AttendLayer layer = world_layer(w);
    uint32_t seen = kv_packed_pages(w->options.attend.form, length); /* as the next token sees it */
    AttendPack packs[KV_MAX_TAIL_TOKENS / KV_PAGE_TOKENS + 2];
    uint32_t n = 0;

    assert_true(!kv_form_is_coded(w->options.attend.form) && length <= q->length);
    for (uint32_t page = seen; page < q->n_packed && page * KV_PAGE_TOKENS < length; page++)
        packs[n++] = (AttendPack){.tail_slot = (int32_t)sequence, .page = (int32_t)page, .to = q->arena[page]};
    if (seen > 0)
        packs[n++] = (AttendPack){.tail_slot = (int32_t)sequence, .page = 0, .to = q->arena[0], .sinks_only = 1};
    q->length = length;
    q->n_packed = MIN(q->n_packed, seen);
    if (n == 0)
        return;
    upload(w, w->input, INPUT_OFFSET, packs, n * sizeof(*packs));
    assert_int_equal(attend_refill(w->attend, &layer, w->input, INPUT_OFFSET, n, w->pages, PAGES_OFFSET), 0);
    finish(w);
}

/* ---- the answer -------------------------------------------------------------------------------------------------------------------- */

/* Value of dim @d of H^T x. */
static double turned_back(uint32_t dim, const float *x, uint32_t d)
{
    uint32_t first = 0, block = 512;
    double sum = 0;

    while (!(dim & block) || d >= first + block) {
        first += dim & block;
        block /= 2;
    }
    for (uint32_t i = 0; i < block; i++)
        sum += __builtin_parity(i & (d - first)) ? -x[first + i] : x[first + i];
    return sum / sqrt(block);
}

/* Dim @d of the mean that was taken from the keys at @position. */
static double key_mean(const World *w, uint32_t position, const float *mean, uint32_t d)
{
    const KvShape *s = &w->options.attend.shape;
    uint32_t half = s->rotary_dim / 2;
    double angle;

    if (w->options.attend.form.centre == KV_CENTRE_NONE)
        return 0;
    if (d >= 2 * half || w->options.attend.form.centre == KV_CENTRE_AFTER_ROPE)
        return mean[d];
    angle = position * (double)w->inv_freq[d % half];
    return d < half ? mean[d] * cos(angle) - mean[d + half] * sin(angle) : mean[d] * cos(angle) + mean[d - half] * sin(angle);
}

/* fp8's scale of K, then of V. */
static const float *fp8_scales(const World *w)
{
    return w->constants + kv_constants_floats(&w->options.attend.shape) - KV_SCALE_FLOATS;
}

/* A coded key in the domain before the transform, so that plain q . k is the definition's score. */
static void decoded_key(const World *w, uint32_t position, uint32_t kv_head, const float *k, double *ret)
{
    const KvForm *form = &w->options.attend.form;
    uint32_t dim = w->options.attend.shape.k_head_dim;
    const float *mean = (form->centre == KV_CENTRE_AFTER_ROPE ? w->measured.k_turned_mean : w->measured.k_mean) + (size_t)kv_head * dim;

    for (uint32_t d = 0; d < dim; d++) {
        ret[d] = form->rotation == KV_ROTATION_HADAMARD ? turned_back(dim, k, d) : (double)k[d];
        if (form->kind == KV_FORM_FP8)
            ret[d] *= fp8_scales(w)[0];
        if (form->pair_scale)
            ret[d] *= w->measured.k_pair_scale[(size_t)kv_head * dim + d];
        ret[d] += key_mean(w, position, mean, d);
    }
}

static void decoded_value(const World *w, uint32_t kv_head, const float *v, double *ret)
{
    const KvForm *form = &w->options.attend.form;
    uint32_t dim = w->options.attend.shape.v_head_dim;

    for (uint32_t d = 0; d < dim; d++) {
        ret[d] = form->rotation == KV_ROTATION_HADAMARD ? turned_back(dim, v, d) : (double)v[d];
        if (form->kind == KV_FORM_FP8)
            ret[d] *= fp8_scales(w)[1];
        ret[d] += form->centre == KV_CENTRE_NONE ? 0.0 : (double)w->measured.v_mean[(size_t)kv_head * dim + d];
    }
}

/* Keys and values [low, last] as the query at @position sees them, (last + 1, k_ or v_head_dim). */
static void visible(World *w, uint32_t sequence, uint32_t position, uint32_t low, uint32_t kv_head, double *k, double *v)
{
    const KvShape *s = &w->options.attend.shape;
    const Sequence *q = &w->sequences[sequence];
    uint32_t n_packed = packed_pages(w, sequence, position), k_dim = s->k_head_dim, v_dim = s->v_head_dim;
    _cleanup_(freep) float *page_k = zeroed((size_t)KV_PAGE_TOKENS * k_dim, sizeof(float));
    _cleanup_(freep) float *page_v = zeroed((size_t)KV_PAGE_TOKENS * v_dim, sizeof(float));

    for (uint32_t j = low; j <= last_visible(w, sequence, position); j++) {
        uint32_t page = j / KV_PAGE_TOKENS, token = j % KV_PAGE_TOKENS;

        if (page < n_packed && (token == 0 || j == low))
            kv_unpack_page(w->options.attend.form, s, w->packed + (size_t)q->arena[page] * w->layout.page_bytes, kv_head, page_k,
                           page_v);
        if (page < n_packed && j >= w->options.attend.form.sink_tokens) {
            decoded_key(w, j, kv_head, page_k + token * k_dim, k + (size_t)j * k_dim);
            decoded_value(w, kv_head, page_v + token * v_dim, v + (size_t)j * v_dim);
            continue;
        }
        for (uint32_t d = 0; d < k_dim; d++)
            k[(size_t)j * k_dim + d] = q->k[((size_t)j * s->n_kv_heads + kv_head) * k_dim + d];
        for (uint32_t d = 0; d < v_dim; d++)
            v[(size_t)j * v_dim + d] = q->v[((size_t)j * s->n_kv_heads + kv_head) * v_dim + d];
    }
}

/* Keys [low, n). */
static void attend_in_double(const World *w, uint32_t head, const float *query, uint32_t low, uint32_t n, const double *k, const double *v,
                             double *scores, double *ret)
{
    double cap = w->options.attend.softcap;
    uint32_t k_dim = w->options.attend.shape.k_head_dim, v_dim = w->options.attend.shape.v_head_dim;
    double largest = -INFINITY, sum = 0;

    for (uint32_t j = low; j < n; j++) {
        scores[j] = 0;
        for (uint32_t d = 0; d < k_dim; d++)
            scores[j] += (double)query[d] * k[(size_t)j * k_dim + d];
        scores[j] *= w->options.attend.scale;
        if (cap > 0)
            scores[j] = cap * tanh(scores[j] / cap);
        largest = fmax(largest, scores[j]);
    }
    memset(ret, 0, v_dim * sizeof(*ret));
    if (w->options.attend.sink_logits) {
        largest = fmax(largest, w->logits[head]);
        sum = exp(w->logits[head] - largest);
    }
    for (uint32_t j = low; j < n; j++) {
        double p = exp(scores[j] - largest);

        sum += p;
        for (uint32_t d = 0; d < v_dim; d++)
            ret[d] += p * v[(size_t)j * v_dim + d];
    }
    for (uint32_t d = 0; d < v_dim; d++)
        ret[d] /= sum;
}

void world_reference(World *w, uint32_t sequence, uint32_t position, double *ret_out)
{
    const KvShape *s = &w->options.attend.shape;
    uint32_t low = first_visible(w, sequence, position);
    size_t n = last_visible(w, sequence, position) + 1;
    _cleanup_(freep) double *k = zeroed(n * s->k_head_dim, sizeof(double)), *v = zeroed(n * s->v_head_dim, sizeof(double));
    _cleanup_(freep) double *scores = zeroed(n, sizeof(double));
    float rope[KV_MAX_HEAD_DIM], x[KV_MAX_HEAD_DIM], y[KV_MAX_HEAD_DIM];

    row_rope(w, position, rope);
    for (uint32_t head = 0; head < s->n_heads; head++) {
        uint32_t n_rep = s->n_heads / s->n_kv_heads;

        if (head % n_rep == 0)
            visible(w, sequence, position, low, head / n_rep, k, v);
        for (uint32_t d = 0; d < s->k_head_dim; d++)
            x[d] = w->options.value(0, sequence, position, head, d);
        turn(w, rope, x, y);
        attend_in_double(w, head, y, low, (uint32_t)n, k, v, scores, ret_out + (size_t)head * s->v_head_dim);
    }
}
