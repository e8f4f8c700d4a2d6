/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Migration to another form: what pages stand for is decoded on the host and coded anew; recent tokens, which are in full precision, change
 * their width at most.  What the target needs in full precision and the source has only in pages is what these decode to.
 */

#include "cache/kv-migrate-internal.h"

#include "quant/base/half.h"

#include <math.h>
#include <string.h>

/* One layer on its way. */
typedef struct Layer {
    Gpu *gpu;
    const KvSection *from, *to;
    const float *from_constants, *to_constants; /* kv_constants_fill() */
    uint32_t from_plane, to_plane;
    const KvShape *shape;
    uint32_t k_values, v_values; /* of a token */
} Layer;

static const float *layer_constants(const KvSection *section, uint32_t plane)
{
    return (const float *)(const void *)(section->constants + plane * section->sizes->calibration_layer_bytes);
}

static Layer layer_of(const KvMigration *m, uint32_t l)
{
    const KvLayerPlace *a = &m->from->sizes.layers[l], *b = &m->to->sizes.layers[l];
    const KvShape *shape = &m->to->sizes.sections[b->section].attend.shape;

    return (Layer){
        .gpu = m->to->gpu,
        .from = &m->from->sections[a->section],
        .to = &m->to->sections[b->section],
        .from_constants = layer_constants(&m->from->sections[a->section], a->plane),
        .to_constants = layer_constants(&m->to->sections[b->section], b->plane),
        .from_plane = a->plane,
        .to_plane = b->plane,
        .shape = shape,
        .k_values = shape->n_kv_heads * shape->k_head_dim,
        .v_values = shape->n_kv_heads * shape->v_head_dim,
    };
}

/* Cosines and sines of a page's positions, (KV_PAGE_TOKENS, rotary_dim / 2, 2). */
static void page_angles(const Layer *layer, uint32_t page, float *rope)
{
    for (uint32_t token = 0; token < KV_PAGE_TOKENS; token++)
        for (uint32_t f = 0; f < layer->shape->rotary_dim / 2; f++) {
            float angle = (float)(page * KV_PAGE_TOKENS + token) * layer->to->inv_freq[f];

            *rope++ = (float)cos((double)angle);
            *rope++ = (float)sin((double)angle);
        }
}

/* ---- decoding ------------------------------------------------------------------------------------------------------------- */

/* A key as it was before centring, scaling and rotation; @mean before RoPE is turned by @rope. */
static void restore_key(const Layer *layer, const KvForm *form, uint32_t head, const float *rope, float *key)
{
    uint32_t dim = layer->shape->k_head_dim, half = layer->shape->rotary_dim / 2, side = layer->k_values;
    const float *mean = layer->from_constants + head * dim, *w = layer->from_constants + 2 * side + head * dim;

    for (uint32_t d = 0; d < dim; d++) {
        float m = mean[d];

        if (form->centre == KV_CENTRE_BEFORE_ROPE && d < half)
            m = mean[d] * rope[2 * d] - mean[d + half] * rope[2 * d + 1];
        else if (form->centre == KV_CENTRE_BEFORE_ROPE && d < 2 * half)
            m = mean[d] * rope[2 * (d - half)] + mean[d - half] * rope[2 * (d - half) + 1];
        key[d] = key[d] * w[d] + m;
    }
}

/* What a page stands for: @k (KV_PAGE_TOKENS, n_kv_heads, k_head_dim), @v likewise. */
static void decode_page(const Layer *layer, const uint8_t *page, const float *rope, float *k, float *v)
{
    const KvForm *form = &layer->from->sizes->attend.form;
    const float *v_mean = layer->from_constants + 3 * layer->k_values, *scales = v_mean + layer->v_values;
    uint32_t k_dim = layer->shape->k_head_dim, v_dim = layer->shape->v_head_dim;
    bool coded = kv_form_is_coded(*form), fp8 = form->kind == KV_FORM_FP8;
    float keys[KV_PAGE_TOKENS * KV_MAX_HEAD_DIM], values[KV_PAGE_TOKENS * KV_MAX_HEAD_DIM];

    for (uint32_t head = 0; head < layer->shape->n_kv_heads; head++) {
        kv_unpack_page(*form, layer->shape, page, head, keys, values);
        for (uint32_t token = 0; token < KV_PAGE_TOKENS; token++) {
            float *key = k + (size_t)token * layer->k_values + head * k_dim, *value = v + (size_t)token * layer->v_values + head * v_dim;

            memcpy(key, keys + (size_t)token * k_dim, k_dim * sizeof(float));
            memcpy(value, values + (size_t)token * v_dim, v_dim * sizeof(float));
            for (uint32_t d = 0; fp8 && d < k_dim; d++)
                key[d] *= scales[0];
            for (uint32_t d = 0; fp8 && d < v_dim; d++)
                value[d] *= scales[1];
            if (coded && form->rotation == KV_ROTATION_HADAMARD) {
                kv_hadamard(key, k_dim);
                kv_hadamard(value, v_dim);
            }
            if (coded)
                restore_key(layer, form, head, rope + (size_t)token * layer->shape->rotary_dim, key);
            for (uint32_t d = 0; coded && d < v_dim; d++)
                value[d] += v_mean[head * v_dim + d];
        }
    }
}

/* ---- coding ----------------------------------------------------------------------------------------------------------------- */

static void code_page(const Layer *layer, const float *rope, const float *k, const float *v, void *page)
{
    const float *constants = layer->to_constants, *v_mean = constants + 3 * layer->k_values, *scales = v_mean + layer->v_values;
    const float largest = 448.0f / KV_FP8_HEADROOM; /* of a scale of one */
    const KvCalibration calibration = {
        .k_mean = constants,
        .v_mean = v_mean,
        .k_turned_mean = constants,
        .k_pair_scale = constants + 2 * layer->k_values,
        .k_largest = scales[0] * largest,
        .v_largest = scales[1] * largest,
    };

    kv_pack_page(layer->to->sizes->attend.form, layer->shape, &calibration, rope, k, v, page);
}

/* ---- pages --------------------------------------------------------------------------------------------------------------------- */

typedef struct Scratch {
    const Gpu *gpu; /* which may still write to a page when it does not come to rest */
    float *rope, *k, *v;
    uint8_t *from, *to; /* a page in either form */
} Scratch;

static void scratch_free(Scratch *scratch)
{
    free(scratch->rope);
    free(scratch->k);
    free(scratch->v);
    gpu_free_host(scratch->gpu, scratch->from);
    gpu_free_host(scratch->gpu, scratch->to);
}

static int scratch_new(const Layer *layer, Scratch *scratch)
{
    scratch->gpu = layer->gpu;
    scratch->rope = calloc((size_t)KV_PAGE_TOKENS * MAX(layer->shape->rotary_dim, 1u), sizeof(float));
    scratch->k = calloc((size_t)KV_PAGE_TOKENS * layer->k_values, sizeof(float));
    scratch->v = calloc((size_t)KV_PAGE_TOKENS * layer->v_values, sizeof(float));
    scratch->from = malloc(layer->from->sizes->layout.page_bytes);
    scratch->to = malloc(layer->to->sizes->layout.page_bytes);
    if (!scratch->rope || !scratch->k || !scratch->v || !scratch->from || !scratch->to)
        return error_origin(-ENOMEM);
    return 0;
}

/* One page of the sequence as numbers, in the scratch. */
static int read_page(const Layer *layer, const KvBlock *block, uint32_t page, Scratch *scratch)
{
    uint64_t offset = kv_block_offset(block, layer->from_plane, page % KV_BLOCK_PAGES);
    _cleanup_(gpu_event_unrefp) GpuEvent *event = NULL;
    const uint8_t *bytes = scratch->from;
    int r;

    if (block->arena->memory) {
        bytes = block->arena->memory + offset;
    } else {
        r = gpu_download(layer->gpu, GPU_QUEUE_COMPUTE, block->arena->buffer, offset, scratch->from,
                         layer->from->sizes->layout.page_bytes, GPU_WAIT_NONE, "kv move", &event);
        if (!r)
            r = gpu_event_wait(layer->gpu, event, NULL);
        if (r)
            return error_trace(r);
    }
    page_angles(layer, page, scratch->rope);
    decode_page(layer, bytes, scratch->rope, scratch->k, scratch->v);
    return 0;
}

static int write_page(const Layer *layer, const KvBlock *block, uint32_t page, Scratch *scratch)
{
    uint64_t offset = kv_block_offset(block, layer->to_plane, page % KV_BLOCK_PAGES), bytes = layer->to->sizes->layout.page_bytes;
    _cleanup_(gpu_event_unrefp) GpuEvent *event = NULL;
    int r;

    code_page(layer, scratch->rope, scratch->k, scratch->v, scratch->to);
    if (block->arena->memory) {
        memcpy(block->arena->memory + offset, scratch->to, bytes);
        return 0;
    }
    r = gpu_upload(layer->gpu, GPU_QUEUE_COMPUTE, block->arena->buffer, offset, scratch->to, bytes, GPU_WAIT_NONE, "kv move", &event);
    if (!r)
        r = gpu_event_wait(layer->gpu, event, NULL);
    return error_trace(r);
}

int kv_migrate_plane(const KvMigration *m, uint32_t l, const KvBlock *from, KvBlock *to, uint32_t b, uint32_t first, uint32_t end)
{
    const Layer layer = layer_of(m, l);
    _cleanup_(scratch_free) Scratch scratch = {0};
    int r = scratch_new(&layer, &scratch);

    for (uint32_t page = b * KV_BLOCK_PAGES + first; page < b * KV_BLOCK_PAGES + end && !r; page++) {
        r = read_page(&layer, from, page, &scratch);
        if (!r)
            r = write_page(&layer, to, page, &scratch);
    }
    return error_trace(r);
}

/* ---- recent tokens ---------------------------------------------------------------------------------------------------------------- */

/* Where a layer's part of a tail slot has a token: a ring, then sinks, of keys; then the same of values. */
typedef struct TailPart {
    uint8_t *memory;
    uint32_t bits, ring, sinks;
} TailPart;

static TailPart tail_part(const KvSection *section, uint32_t plane, uint8_t *slot)
{
    const KvSectionSizes *sizes = section->sizes;

    return (TailPart){slot + sizes->tail_offset + plane * sizes->tail_layer_bytes, sizes->attend.tail_bits,
                      kv_ring_tokens(sizes->attend.form), sizes->attend.form.sink_tokens};
}

static void tail_store(const TailPart *part, const Layer *layer, uint32_t place, const float *k, const float *v)
{
    size_t width = part->bits / 8, n = part->ring + part->sinks;
    uint8_t *keys = part->memory + place * layer->k_values * width;
    uint8_t *values = part->memory + (n * layer->k_values + place * layer->v_values) * width;

    for (uint32_t i = 0; i < layer->k_values; i++)
        part->bits == 32 ? (void)(((float *)(void *)keys)[i] = k[i]) : (void)(((uint16_t *)(void *)keys)[i] = half_from_float(k[i]));
    for (uint32_t i = 0; i < layer->v_values; i++)
        part->bits == 32 ? (void)(((float *)(void *)values)[i] = v[i]) : (void)(((uint16_t *)(void *)values)[i] = half_from_float(v[i]));
}

static void tail_load(const TailPart *part, const Layer *layer, uint32_t place, float *k, float *v)
{
    size_t width = part->bits / 8, n = part->ring + part->sinks;
    const uint8_t *keys = part->memory + place * layer->k_values * width;
    const uint8_t *values = part->memory + (n * layer->k_values + place * layer->v_values) * width;

    for (uint32_t i = 0; i < layer->k_values; i++)
        k[i] = part->bits == 32 ? ((const float *)(const void *)keys)[i] : float_from_half(((const uint16_t *)(const void *)keys)[i]);
    for (uint32_t i = 0; i < layer->v_values; i++)
        v[i] = part->bits == 32 ? ((const float *)(const void *)values)[i] : float_from_half(((const uint16_t *)(const void *)values)[i]);
}

/* One token in full precision, from the ring, the sinks, or else what its page decodes to (the scratch holds page *@loaded). */
static int recent_token(const Layer *layer, const TailPart *part, const KvSectionPast *past, uint32_t position, Scratch *scratch,
                        uint32_t *loaded, float *k, float *v)
{
    uint32_t page = position / KV_PAGE_TOKENS, token = position % KV_PAGE_TOKENS;
    int r;

    if (position >= past->tail_from) {
        tail_load(part, layer, position % part->ring, k, v);
        return 0;
    }
    if (position < part->sinks) {
        tail_load(part, layer, part->ring + position, k, v);
        return 0;
    }
    if (*loaded != page) {
        r = read_page(layer, past->blocks[page / KV_BLOCK_PAGES], page, scratch);
        if (r)
            return error_trace(r);
        *loaded = page;
    }
    memcpy(k, scratch->k + (size_t)token * layer->k_values, layer->k_values * sizeof(float));
    memcpy(v, scratch->v + (size_t)token * layer->v_values, layer->v_values * sizeof(float));
    return 0;
}

/* Whether the position can be found at all: pages out of sight are gone. */
static bool is_there(const KvSectionPast *past, uint32_t sinks, uint32_t position)
{
    return position >= past->tail_from || position < sinks || position / KV_PAGE_TOKENS >= kv_section_first_page(past);
}

static int move_recent(const Layer *layer, const KvSectionPast *past, uint32_t length, uint8_t *from, uint8_t *to)
{
    const TailPart source = tail_part(layer->from, layer->from_plane, from), target = tail_part(layer->to, layer->to_plane, to);
    _cleanup_(freep) float *token = calloc((size_t)layer->k_values + layer->v_values, sizeof(float));
    _cleanup_(scratch_free) Scratch scratch = {0};
    uint32_t loaded = UINT32_MAX, first = kv_needed_from(layer->to, length);
    int r = token ? scratch_new(layer, &scratch) : error_origin(-ENOMEM);

    for (uint32_t position = 0; position < MIN(target.sinks, length) && !r; position++)
        if (is_there(past, source.sinks, position)) {
            r = recent_token(layer, &source, past, position, &scratch, &loaded, token, token + layer->k_values);
            if (!r)
                tail_store(&target, layer, target.ring + position, token, token + layer->k_values);
        }
    for (uint32_t position = first; position < length && !r; position++)
        if (is_there(past, source.sinks, position)) {
            r = recent_token(layer, &source, past, position, &scratch, &loaded, token, token + layer->k_values);
            if (!r)
                tail_store(&target, layer, position % target.ring, token, token + layer->k_values);
        }
    return error_trace(r);
}

int kv_migrate_recent(const KvMigration *m, uint32_t l, const KvPast *past, uint8_t *from, uint8_t *to)
{
    const Layer layer = layer_of(m, l);
    uint32_t s = m->from->sizes.layers[l].section;

    return error_trace(move_recent(&layer, &past->sections[s], kv_past_tokens(past, s), from, to));
}
