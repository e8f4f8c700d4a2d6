/* SPDX-License-Identifier: Apache-2.0 */
/* Attention in double over every token that there was. */

#include "tests/lib/random-reference.h"

#include "quant/base/half.h"

#include <math.h>
#include <string.h>

typedef struct LayerFacts {
    uint32_t source;
    KvShape shape;
    KvForm form;
    KvLayout layout;
    bool keeps, cross; /* keys of its own; of encoder output, or reads such */
    float scale;
    float *inv_freq;
    float *measured;  /* what calibration points into */
    float *constants; /* as kv_constants_fill() makes them */
    size_t k_values, v_values; /* of a token */
} LayerFacts;

struct Reference {
    RandomConfig config;
    LayerFacts layers[RANDOM_MAX_LAYERS];
    KvCalibration calibration[RANDOM_MAX_LAYERS];
};

/* Of one layer and sequence. */
typedef struct RefLayer {
    float *k, *v;                /* (tokens, n_kv_heads, dim): after RoPE, as the tail holds them */
    double *packed_k, *packed_v; /* the same from pages: what their codes stand for */
    uint32_t n_packed;           /* pages decoded so far */
} RefLayer;

static void *zeroed(size_t n, size_t size)
{
    void *memory = calloc(n > 0 ? n : 1, size);

    if (!memory)
        abort();
    return memory;
}

/* A number in [-1, 1) from a hash. */
static float noise(uint64_t key)
{
    key = (key ^ (key >> 31)) * 0x9e3779b97f4a7c15u;
    key = (key ^ (key >> 29)) * 0xbf58476d1ce4e5b9u;
    return (float)(int32_t)(key >> 32) * 0x1p-31f;
}

/* Means and factors of one rotary pair agree where they must. */
static void calibrate(Reference *r, uint32_t l)
{
    LayerFacts *f = &r->layers[l];
    size_t n_k = f->k_values, half = f->shape.rotary_dim / 2, dim = f->shape.k_head_dim;
    float *m = f->measured = zeroed(3 * n_k + f->v_values, sizeof(float));

    for (size_t i = 0; i < 3 * n_k + f->v_values && r->config.calibrated; i++)
        m[i] = noise(l * 10000 + i + 7);
    for (size_t i = 0; i < n_k; i++) {
        size_t d = i % dim, pair = d >= half && d < 2 * half ? i - half : i;

        m[2 * n_k + i] = 1.0f + 0.5f * (r->config.calibrated ? noise(l * 10000 + pair + 31) : 0.0f);
    }
    r->calibration[l] = (KvCalibration){.k_mean = m, .k_turned_mean = m + n_k, .k_pair_scale = m + 2 * n_k, .v_mean = m + 3 * n_k,
                                        .k_largest = 4.0f, .v_largest = 3.0f};
    f->constants = zeroed(kv_constants_floats(&f->shape), sizeof(float));
    kv_constants_fill(f->form, &f->shape, r->config.calibrated ? &r->calibration[l] : NULL, f->constants);
}

static void init_layer(Reference *r, uint32_t l)
{
    const RandomConfig *config = &r->config;
    LayerFacts *f = &r->layers[l];

    *f = (LayerFacts){.source = random_source(config, l), .shape = random_shape(config, l), .form = random_form(random_form_of(config, l))};
    f->cross = config->layers[f->source].kind == RANDOM_CROSS;
    f->keeps = f->source == l && config->layers[l].kind != RANDOM_NONE;
    f->scale = 1.0f / sqrtf((float)f->shape.k_head_dim);
    f->k_values = (size_t)f->shape.n_kv_heads * f->shape.k_head_dim;
    f->v_values = (size_t)f->shape.n_kv_heads * f->shape.v_head_dim;
    f->inv_freq = zeroed(f->shape.rotary_dim / 2, sizeof(float));
    for (uint32_t i = 0; i < f->shape.rotary_dim / 2; i++)
        f->inv_freq[i] = (float)pow(10000.0, -2.0 * i / f->shape.rotary_dim);
    if (kv_layout(f->form, &f->shape, &f->layout, NULL))
        abort();
    calibrate(r, l);
}

Reference *reference_new(const RandomConfig *config)
{
    Reference *r = zeroed(1, sizeof(*r));

    r->config = *config;
    for (uint32_t l = 0; l < config->n_layers; l++)
        init_layer(r, l);
    return r;
}

Reference *reference_free(Reference *reference)
{
    if (!reference)
        return NULL;
    for (uint32_t l = 0; l < reference->config.n_layers; l++) {
        free(reference->layers[l].inv_freq);
        free(reference->layers[l].measured);
        free(reference->layers[l].constants);
    }
    free(reference);
    return NULL;
}

uint32_t reference_row_values(const Reference *reference, uint32_t layer)
{
    const LayerFacts *f = &reference->layers[layer];

    return f->cross ? f->shape.n_heads * f->shape.k_head_dim : (uint32_t)kv_row_values(&f->shape);
}

uint32_t reference_out_values(const Reference *reference, uint32_t layer)
{
    return reference->layers[layer].shape.n_heads * reference->layers[layer].shape.v_head_dim;
}

const float *reference_inv_freq(const Reference *reference, uint32_t layer)
{
    return reference->layers[layer].inv_freq;
}

const KvCalibration *reference_calibration(const Reference *reference)
{
    return reference->config.calibrated ? reference->calibration : NULL;
}

static uint64_t noise_key(uint32_t id, uint32_t position, uint32_t layer)
{
    return ((uint64_t)id << 40) + ((uint64_t)position << 20) + (layer << 13);
}

/* Keys and values of a layer that keeps them. */
static void keys_and_values(const Reference *r, uint32_t layer, uint64_t key, float *ret)
{
    const LayerFacts *f = &r->layers[layer];

    for (size_t i = 0; i < f->k_values + f->v_values; i++)
        ret[i] = 2.0f * noise(key + i) + f->measured[i < f->k_values ? i : 2 * f->k_values + i];
}

void reference_row(const Reference *reference, uint32_t layer, uint32_t id, uint32_t position, float *ret)
{
    const LayerFacts *f = &reference->layers[layer];
    uint32_t n_q = f->shape.n_heads * f->shape.k_head_dim;

    for (uint32_t i = 0; i < n_q; i++)
        ret[i] = 2.0f * noise(noise_key(id, position, layer) + 4096 + i);
    if (!f->cross)
        keys_and_values(reference, f->source, noise_key(id, position, f->source), ret + n_q);
}

uint32_t reference_cross_values(const Reference *reference, uint32_t layer)
{
    const LayerFacts *f = &reference->layers[layer];

    return f->keeps && f->cross ? (uint32_t)kv_token_values(&f->shape) : 0;
}

void reference_cross_row(const Reference *reference, uint32_t layer, uint32_t id, uint32_t position, float *ret)
{
    keys_and_values(reference, layer, noise_key(id, position, layer), ret);
}

void reference_state(uint32_t layer, uint32_t which, uint64_t hash, uint8_t *ret, uint32_t n_bytes)
{
    for (uint32_t i = 0; i < n_bytes; i++)
        ret[i] = hash == 0 ? 0 : (uint8_t)(((hash ^ (layer * 2 + which + 1)) * (2 * i + 0x9e3779b97f4a7c15u)) >> 40);
}

/* ---- sequences --------------------------------------------------------------------------------------------------------------------- */

RefSequence *ref_sequence_new(const Reference *reference)
{
    RefSequence *sequence = zeroed(1, sizeof(*sequence));

    sequence->reference = reference;
    sequence->layers = zeroed(reference->config.n_layers, sizeof(RefLayer));
    for (uint32_t l = 0; l < reference->config.n_layers; l++) {
        const LayerFacts *f = &reference->layers[l];
        size_t n = f->cross ? RANDOM_MAX_CROSS : RANDOM_MAX_TOKENS;

        if (f->keeps)
            sequence->layers[l] = (RefLayer){.k = zeroed(n * f->k_values, sizeof(float)),
                                             .v = zeroed(n * f->v_values, sizeof(float)),
                                             .packed_k = zeroed(n * f->k_values, sizeof(double)),
                                             .packed_v = zeroed(n * f->v_values, sizeof(double))};
    }
    return sequence;
}

RefSequence *ref_sequence_free(RefSequence *sequence)
{
    if (!sequence)
        return NULL;
    for (uint32_t l = 0; l < sequence->reference->config.n_layers; l++) {
        free(sequence->layers[l].k);
        free(sequence->layers[l].v);
        free(sequence->layers[l].packed_k);
        free(sequence->layers[l].packed_v);
    }
    free(sequence->layers);
    free(sequence);
    return NULL;
}

RefSequence *ref_sequence_copy(const RefSequence *from)
{
    RefSequence *copy = ref_sequence_new(from->reference);
    struct RefLayer *layers = copy->layers;

    *copy = *from;
    copy->layers = layers;
    for (uint32_t l = 0; l < from->reference->config.n_layers; l++) {
        const LayerFacts *f = &from->reference->layers[l];
        const RefLayer *source = &from->layers[l];
        size_t n = f->cross ? from->n_cross : from->n_tokens, n_packed = (size_t)source->n_packed * KV_PAGE_TOKENS;

        if (!f->keeps)
            continue;
        memcpy(layers[l].k, source->k, n * f->k_values * sizeof(float));
        memcpy(layers[l].v, source->v, n * f->v_values * sizeof(float));
        memcpy(layers[l].packed_k, source->packed_k, n_packed * f->k_values * sizeof(double));
        memcpy(layers[l].packed_v, source->packed_v, n_packed * f->v_values * sizeof(double));
        layers[l].n_packed = source->n_packed;
    }
    return copy;
}

static float tail_round(const LayerFacts *f, float x)
{
    return f->form.kind == KV_FORM_F32 ? x : float_from_half(half_from_float(x));
}

/* RoPE of one head at a position: the angle as the oracle rounds it. */
static void turn(const LayerFacts *layer, uint32_t position, const float *x, float *ret)
{
    uint32_t half = layer->shape.rotary_dim / 2;

    memcpy(ret, x, layer->shape.k_head_dim * sizeof(float));
    for (uint32_t f = 0; f < half; f++) {
        float angle = (float)position * layer->inv_freq[f], c = (float)cos((double)angle), s = (float)sin((double)angle);

        ret[f] = fmaf(x[f], c, -(x[f + half] * s));
        ret[f + half] = fmaf(x[f + half], c, x[f] * s);
    }
}

#define FIRST_HASH 0x1234567u

static uint64_t hash_on(uint64_t hash, uint32_t id)
{
    hash = (hash ^ id) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 29);
}

static void keep_token(RefSequence *sequence, uint32_t l, uint32_t id, uint32_t position)
{
    const LayerFacts *f = &sequence->reference->layers[l];
    RefLayer *layer = &sequence->layers[l];
    uint32_t dim = f->shape.k_head_dim;
    float *row = zeroed(f->k_values + f->v_values, sizeof(float)), turned[KV_MAX_HEAD_DIM];

    keys_and_values(sequence->reference, l, noise_key(id, position, l), row);
    for (uint32_t h = 0; h < f->shape.n_kv_heads; h++) {
        turn(f, position, row + (size_t)h * dim, turned);
        for (uint32_t d = 0; d < dim; d++)
            layer->k[position * f->k_values + (size_t)h * dim + d] = tail_round(f, turned[d]);
    }
    for (size_t i = 0; i < f->v_values; i++)
        layer->v[position * f->v_values + i] = tail_round(f, row[f->k_values + i]);
    free(row);
}

void ref_sequence_append(RefSequence *sequence, uint32_t id)
{
    uint32_t position = sequence->n_tokens++;

    sequence->ids[position] = id;
    sequence->hashes[position] = hash_on(position > 0 ? sequence->hashes[position - 1] : sequence->cross_hash + FIRST_HASH, id);
    for (uint32_t l = 0; l < sequence->reference->config.n_layers; l++)
        if (sequence->reference->layers[l].keeps && !sequence->reference->layers[l].cross)
            keep_token(sequence, l, id, position);
}

void ref_sequence_append_cross(RefSequence *sequence, uint32_t id)
{
    uint32_t position = sequence->n_cross++;

    sequence->cross_hash = hash_on(sequence->cross_hash, id);
    for (uint32_t l = 0; l < sequence->reference->config.n_layers; l++)
        if (sequence->reference->layers[l].keeps && sequence->reference->layers[l].cross)
            keep_token(sequence, l, id, position);
}

uint64_t ref_sequence_hash(const RefSequence *sequence, const uint32_t *ids, uint32_t n)
{
    uint64_t hash = sequence->n_tokens > 0 ? sequence->hashes[sequence->n_tokens - 1] : sequence->cross_hash + FIRST_HASH;

    for (uint32_t i = 0; i < n; i++)
        hash = hash_on(hash, ids[i]);
    return sequence->n_tokens + n > 0 ? hash : 0;
}

void ref_sequence_cut(RefSequence *sequence, uint32_t n_tokens)
{
    sequence->n_tokens = n_tokens;
    for (uint32_t l = 0; l < sequence->reference->config.n_layers; l++)
        if (!sequence->reference->layers[l].cross)
            sequence->layers[l].n_packed = MIN(sequence->layers[l].n_packed, n_tokens / KV_PAGE_TOKENS);
}

/* ---- pages ---------------------------------------------------------------------------------------------------------------------------- */

/* Cosines of a page's positions, put together from those of its centre and of the place in it, as kernels do. */
static void page_rope(const LayerFacts *r, uint32_t page, float *ret)
{
    uint32_t half = r->shape.rotary_dim / 2;

    for (uint32_t t = 0; t < KV_PAGE_TOKENS; t++)
        for (uint32_t f = 0; f < half; f++) {
            double centre = page * 32.0 + 15.5, place = t - 15.5, frequency = r->inv_freq[f];
            float pc = (float)cos(centre * frequency), ps = (float)sin(centre * frequency);
            float c = (float)cos(place * frequency), s = (float)sin(place * frequency);

            ret[(t * half + f) * 2] = fmaf(c, pc, -(s * ps));
            ret[(t * half + f) * 2 + 1] = fmaf(c, ps, s * pc);
        }
}

/* Dimension @d of what the codes of a head stand for before the mean is added. */
static double unrotate(const LayerFacts *f, const float *x, uint32_t n, uint32_t d)
{
    uint32_t first = 0, block = 1u << (31 - __builtin_clz(n));
    double sum = 0;

    if (f->form.rotation == KV_ROTATION_NONE)
        return x[d];
    while (d >= first + block) {
        first += block;
        block = 1u << (31 - __builtin_clz(n - first));
    }
    for (uint32_t i = 0; i < block; i++)
        sum += (__builtin_parity(i & (d - first)) ? -1.0 : 1.0) * x[first + i];
    return sum / sqrt(block);
}

/* The mean of dimension @d at a position. */
static double mean_at(const LayerFacts *f, const float *mean, uint32_t position, uint32_t d)
{
    uint32_t half = f->shape.rotary_dim / 2;

    if (f->form.centre != KV_CENTRE_BEFORE_ROPE || d >= 2 * half)
        return mean[d];
    if (d < half)
        return mean[d] * cos(position * (double)f->inv_freq[d]) - mean[d + half] * sin(position * (double)f->inv_freq[d]);
    return mean[d] * cos(position * (double)f->inv_freq[d - half]) + mean[d - half] * sin(position * (double)f->inv_freq[d - half]);
}

/* What a decoded head of a token stands for. */
static void undo_recipe(const LayerFacts *f, uint32_t head, uint32_t position, const float *k, const float *v, double *ret_k,
                        double *ret_v)
{
    uint32_t kd = f->shape.k_head_dim, vd = f->shape.v_head_dim;
    const float *mean = f->constants + (size_t)head * kd, *factor = mean + 2 * f->k_values;
    const float *v_mean = f->constants + 3 * f->k_values + (size_t)head * vd, *scales = f->constants + 3 * f->k_values + f->v_values;
    double k_scale = f->form.kind == KV_FORM_FP8 ? scales[0] : 1, v_scale = f->form.kind == KV_FORM_FP8 ? scales[1] : 1;

    if (!kv_form_is_coded(f->form)) {
        for (uint32_t d = 0; d < kd; d++)
            ret_k[d] = k[d];
        for (uint32_t d = 0; d < vd; d++)
            ret_v[d] = v[d];
        return;
    }
    for (uint32_t d = 0; d < kd; d++)
        ret_k[d] = k_scale * unrotate(f, k, kd, d) * factor[d] + mean_at(f, mean, position, d);
    for (uint32_t d = 0; d < vd; d++)
        ret_v[d] = v_scale * unrotate(f, v, vd, d) + v_mean[d];
}

static void decode_page(RefSequence *sequence, uint32_t layer, uint32_t page)
{
    const LayerFacts *r = &sequence->reference->layers[layer];
    const KvCalibration *calibration = sequence->reference->config.calibrated ? &sequence->reference->calibration[layer] : NULL;
    RefLayer *l = &sequence->layers[layer];
    uint32_t kd = r->shape.k_head_dim, vd = r->shape.v_head_dim, first = page * KV_PAGE_TOKENS;
    float *rope = zeroed((size_t)KV_PAGE_TOKENS * r->shape.rotary_dim, sizeof(float));
    float *k = zeroed((size_t)KV_PAGE_TOKENS * kd, sizeof(float)), *v = zeroed((size_t)KV_PAGE_TOKENS * vd, sizeof(float));
    uint8_t *bytes = zeroed(r->layout.page_bytes, 1);

    page_rope(r, page, rope);
    kv_pack_page(r->form, &r->shape, calibration, rope, l->k + first * r->k_values, l->v + first * r->v_values, bytes);
    for (uint32_t h = 0; h < r->shape.n_kv_heads; h++) {
        kv_unpack_page(r->form, &r->shape, bytes, h, k, v);
        for (uint32_t t = 0; t < KV_PAGE_TOKENS; t++)
            undo_recipe(r, h, first + t, k + (size_t)t * kd, v + (size_t)t * vd,
                        l->packed_k + (first + t) * r->k_values + (size_t)h * kd,
                        l->packed_v + (first + t) * r->v_values + (size_t)h * vd);
    }
    free(rope);
    free(k);
    free(v);
    free(bytes);
}

/* ---- attention -------------------------------------------------------------------------------------------------------------------------- */

static bool sees(const RandomLayer *layer, uint32_t query, uint32_t key)
{
    switch (layer->kind) {
    case RANDOM_SLIDING:
        return key <= query && query - key < layer->window;
    case RANDOM_CHUNKED:
        return key <= query && key / layer->window == query / layer->window;
    case RANDOM_CROSS:
        return true;
    case RANDOM_FULL:
    case RANDOM_SHARED:
    case RANDOM_NONE:
    case RANDOM_KIND_X_MAX:
        break;
    }
    return key <= query;
}

/* Score of a query with the key of a token, and where its value is. */
typedef struct Key {
    double score;
    const float *plain; /* one of the two */
    const double *packed;
} Key;

static Key look_at(const RefSequence *sequence, uint32_t layer, uint32_t position, uint32_t n_packed, uint32_t head, const float *q)
{
    const LayerFacts *r = &sequence->reference->layers[layer];
    const RefLayer *l = &sequence->layers[layer];
    uint32_t dim = r->shape.k_head_dim;
    size_t k_at = position * r->k_values + (size_t)head * dim, v_at = position * r->v_values + (size_t)head * r->shape.v_head_dim;
    bool packed = position >= r->form.sink_tokens && position / KV_PAGE_TOKENS < n_packed;
    Key key = {0, packed ? NULL : l->v + v_at, packed ? l->packed_v + v_at : NULL};

    for (uint32_t d = 0; d < dim; d++)
        key.score += (double)q[d] * (packed ? l->packed_k[k_at + d] : (double)l->k[k_at + d]);
    key.score *= r->scale;
    return key;
}

/* @n_keys keys of the layer, of which a query at @position sees some. */
static void attend_head(const RefSequence *sequence, uint32_t layer, uint32_t position, uint32_t n_keys, uint32_t n_packed, uint32_t head,
                        const float *q, double *ret)
{
    const RandomLayer *mask = &sequence->reference->config.layers[layer];
    uint32_t dim = sequence->reference->layers[layer].shape.v_head_dim;
    Key *keys = zeroed(n_keys, sizeof(*keys));
    double largest = -INFINITY, sum = 0;

    for (uint32_t p = 0; p < n_keys; p++) {
        if (!sees(mask, position, p))
            continue;
        keys[p] = look_at(sequence, layer, p, n_packed, head, q);
        largest = fmax(largest, keys[p].score);
    }
    memset(ret, 0, dim * sizeof(*ret));
    for (uint32_t p = 0; p < n_keys; p++) {
        double weight = keys[p].plain || keys[p].packed ? exp(keys[p].score - largest) : 0;

        sum += weight;
        for (uint32_t d = 0; d < dim && weight > 0; d++)
            ret[d] += weight * (keys[p].packed ? keys[p].packed[d] : (double)keys[p].plain[d]);
    }
    for (uint32_t d = 0; d < dim; d++)
        ret[d] /= sum;
    free(keys);
}

void ref_sequence_attend(RefSequence *sequence, uint32_t layer, uint32_t position, double *ret)
{
    const LayerFacts *f = &sequence->reference->layers[layer];
    uint32_t n_packed = kv_packed_pages(f->form, position), n_keys = position + 1;
    uint32_t group = f->shape.n_heads / f->shape.n_kv_heads, dim = f->shape.k_head_dim;
    RefLayer *source = &sequence->layers[f->source];
    float *row = zeroed(reference_row_values(sequence->reference, layer), sizeof(float)), q[KV_MAX_HEAD_DIM];

    if (f->cross) {
        n_keys = sequence->n_cross;
        n_packed = n_keys / KV_PAGE_TOKENS;
    }
    for (; source->n_packed < n_packed; source->n_packed++)
        decode_page(sequence, f->source, source->n_packed);
    reference_row(sequence->reference, layer, sequence->ids[position], position, row);
    for (uint32_t h = 0; h < f->shape.n_heads; h++) {
        turn(f, position, row + (size_t)h * dim, q);
        attend_head(sequence, f->source, position, n_keys, n_packed, h / group, q, ret + (size_t)h * f->shape.v_head_dim);
    }
    free(row);
}
