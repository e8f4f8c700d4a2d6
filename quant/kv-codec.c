/* SPDX-License-Identifier: Apache-2.0 */
/*
 * KV codecs: byte layout and C reference.  opencl/kernels/attend-pack.cl must equal kv_pack_page() bit for bit, so every float
 * operation here has one order, products that feed a sum are explicit fmaf(), and division is our own (reciprocal).
 */

#include "quant/kv-codec.h"

#include "quant/base/checked.h"
#include "quant/base/half.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define MAX_HEAD_DIM  256
#define N_REFINEMENTS 2
#define OFFSET_BITS   15u /* of a scale's f16, kv-codec.h */
#define SQRT_HALF     0.70710678118654752440f

/* reciprocal(): a first guess within 13 % from the exponent, then Newton steps to full precision. */
#define RECIPROCAL_SEED  0x7ef311c7u
#define RECIPROCAL_STEPS 4

/* ---- layout ------------------------------------------------------------------------------------------------------------- */

static bool bits_are_known(uint8_t bits)
{
    return bits == 8 || bits == 5 || bits == 4;
}

static int check_shape(const KvShape *shape, ErrorDetail *reterr)
{
    if (shape->head_dim == 0 || shape->head_dim % 16 || shape->head_dim > MAX_HEAD_DIM)
        return error_detail_set(reterr, -EINVAL, "head_dim %u is not a multiple of 16 up to %d", shape->head_dim, MAX_HEAD_DIM);
    if (shape->n_kv_heads == 0 || shape->n_heads == 0 || shape->n_heads % shape->n_kv_heads)
        return error_detail_set(reterr, -EINVAL, "%u heads do not share %u key/value heads evenly", shape->n_heads,
                                shape->n_kv_heads);
    if (shape->rotary_dim % 2 || shape->rotary_dim > shape->head_dim)
        return error_detail_set(reterr, -EINVAL, "rotary_dim %u is odd or larger than head_dim %u", shape->rotary_dim,
                                shape->head_dim);
    return 0;
}

static void layout_plain(uint32_t head_dim, uint32_t value_bytes, KvLayout *ret)
{
    uint32_t side = KV_PAGE_TOKENS * head_dim * value_bytes;

    *ret = (KvLayout){.record_bytes = 2 * side, .k_high_offset = side, .v_offset = side, .v_high_offset = 2 * side,
                      .k_scale_offset = 2 * side, .v_scale_offset = 2 * side};
}

static void layout_leat(KvForm form, uint32_t head_dim, KvLayout *ret)
{
    uint32_t nibbles = KV_PAGE_TOKENS / 2 * head_dim, offset = 0;
    uint32_t scales = KV_PAGE_TOKENS * (uint32_t)sizeof(uint16_t);

    *ret = (KvLayout){.n_groups = (head_dim + KV_GROUP_DIMS - 1) / KV_GROUP_DIMS};
    ret->k_offset = offset;
    offset += form.k_bits == 8 ? 2 * nibbles : nibbles;
    ret->k_high_offset = offset;
    if (form.k_bits == 5)
        offset += (head_dim + 31) / 32 * 128; /* a plane holds the fifth bits of 32 dims: eight planes of four */
    ret->v_offset = offset;
    offset += form.v_bits == 8 ? 2 * nibbles : nibbles;
    ret->v_high_offset = offset;
    if (form.v_bits == 5)
        offset += head_dim / 16 * 64;
    ret->k_scale_offset = offset;
    ret->v_scale_offset = offset + ret->n_groups * scales;
    ret->record_bytes = offset + 2 * ret->n_groups * scales;
}

int kv_layout(KvForm form, const KvShape *shape, KvLayout *ret, ErrorDetail *reterr)
{
    KvLayout layout = {0};
    uint64_t page_bytes;
    int r;

    r = check_shape(shape, reterr);
    if (r)
        return error_trace(r);
    switch (form.kind) {
    case KV_FORM_F32:
        layout_plain(shape->head_dim, 4, &layout);
        break;
    case KV_FORM_F16:
        layout_plain(shape->head_dim, 2, &layout);
        break;
    case KV_FORM_LEAT:
        if (!bits_are_known(form.k_bits) || !bits_are_known(form.v_bits))
            return error_detail_set(reterr, -EINVAL, "%u bits for keys and %u for values: only 8, 5 and 4 are known", form.k_bits,
                                    form.v_bits);
        layout_leat(form, shape->head_dim, &layout);
        break;
    case KV_FORM_X_MAX:
    case KV_FORM_X_INVALID:
        return error_detail_set(reterr, -EINVAL, "form %d of the cache is unknown", (int)form.kind);
    }
    if (!checked_mul(layout.record_bytes, shape->n_kv_heads, &page_bytes) || page_bytes > INT32_MAX)
        return error_detail_set(reterr, -EINVAL, "a page of %u heads would exceed 2 GiB", shape->n_kv_heads);
    layout.page_bytes = (uint32_t)page_bytes;
    *ret = layout;
    return 0;
}

double kv_true_bits(KvForm form, const KvShape *shape, uint32_t n_tokens, uint32_t tail_bits)
{
    KvLayout layout;
    double values = 2.0 * shape->n_kv_heads * shape->head_dim, n_pages, n_full;

    if (n_tokens == 0 || kv_layout(form, shape, &layout, NULL) < 0)
        return 0;
    n_pages = n_tokens > 2 * KV_PAGE_TOKENS ? (n_tokens - 1) / KV_PAGE_TOKENS - 1 : 0; /* as the last token sees it */
    n_full = n_tokens - n_pages * KV_PAGE_TOKENS + (n_pages > 0 ? KV_SINK_TOKENS : 0);
    return (n_pages * layout.page_bytes * 8 + n_full * values * tail_bits) / (n_tokens * values);
}

/* ---- rotation ----------------------------------------------------------------------------------------------------------- */

/* 1 / sqrt(n) of the powers of two up to MAX_HEAD_DIM. */
static float hadamard_scale(uint32_t n)
{
    static const float scale[] = {1.0f, SQRT_HALF, 0.5f, SQRT_HALF * 0.5f, 0.25f, SQRT_HALF * 0.25f, 0.125f,
                                  SQRT_HALF * 0.125f, 0.0625f};

    return scale[__builtin_ctz(n)];
}

static void hadamard_block(float *x, uint32_t n)
{
    for (uint32_t step = 1; step < n; step *= 2)
        for (uint32_t base = 0; base < n; base += 2 * step)
            for (uint32_t i = base; i < base + step; i++) {
                float a = x[i], b = x[i + step];

                x[i] = a + b;
                x[i + step] = a - b;
            }
    for (uint32_t i = 0; i < n; i++)
        x[i] *= hadamard_scale(n);
}

void kv_hadamard(float *x, uint32_t n)
{
    while (n > 0) {
        uint32_t block = 1u << (31 - __builtin_clz(n)); /* largest first: 80 = 64 + 16 */

        hadamard_block(x, block);
        x += block;
        n -= block;
    }
}

/* ---- levels and the search for a scale -------------------------------------------------------------------------------------- */

/* 1 / x for normal x > 0 by a fixed number of exactly rounded steps: the same bits on every device, unlike OpenCL's division. */
static float reciprocal(float x)
{
    float y = float_from_bits(RECIPROCAL_SEED - float_to_bits(x));

    for (int i = 0; i < RECIPROCAL_STEPS; i++)
        y = fmaf(y, fmaf(-x, y, 1.0f), y);
    return y;
}

/* A group's scale and offset in quarter steps; both exact in what is stored. */
typedef struct Scale {
    float step, offset;
} Scale;

/* The f16 with four bits to spare that is nearest to @step; never NaN, negative or infinite. */
static uint16_t step_bits(float step)
{
    step = step > 0.0f ? step : 0.0f;
    step = step < 65024.0f ? step : 65024.0f;
    return (uint16_t)((half_from_float(step) + 8u) & ~OFFSET_BITS);
}

static float step_round(float step)
{
    return float_from_half(step_bits(step));
}

static float offset_clamp(float quarters)
{
    quarters = quarters > -8.0f ? quarters : -8.0f; /* NaN too */
    return quarters < 7.0f ? quarters : 7.0f;
}

static float step_inverse(float step)
{
    return reciprocal(step > 0.0f ? step : 1.0f);
}

static int level_code(float x, float inverse, float offset, int bits)
{
    float top = (float)((1 << bits) - 1), t = fmaf(x, inverse, (float)(1 << (bits - 1)) - 0.25f * offset);

    t = t > 0.0f ? t : 0.0f; /* NaN too */
    t = t < top ? t : top;
    return (int)t;
}

static float squared_error(const float *x, uint32_t n, int bits, Scale scale)
{
    float inverse = step_inverse(scale.step), middle = 0.5f * (float)((1 << bits) - 1) - 0.25f * scale.offset, error = 0.0f;

    for (uint32_t i = 0; i < n; i++) {
        float level = (float)level_code(x[i], inverse, scale.offset, bits) - middle, difference = fmaf(-level, scale.step, x[i]);

        error = fmaf(difference, difference, error);
    }
    return error;
}

/* Measured on groups of 64 Gaussian values against a full search (16 offsets, 100 scales): squared error 2 % (4 bits) and 4 % (5) above. */
const float *kv_search(uint8_t bits)
{
    static const float four[KV_SEARCH_FLOATS] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.74f, 0.02f};
    static const float five[KV_SEARCH_FLOATS] = {1.0f, 0.97f, 0.94f, 0.91f, 0.88f, 0.84f, 0.015f};
    static const float eight[KV_SEARCH_FLOATS] = {1.0f, 0.998f, 0.994f, 0.99f, 1.003f, 1.01f, 0.003f};

    return bits == 4 ? four : bits == 5 ? five : eight;
}

typedef struct Search {
    const float *x;
    uint32_t n;
    int bits;
    Scale best;
    float error; /* of the best */
} Search;

static void search_try(Search *search, Scale scale)
{
    float error = squared_error(search->x, search->n, search->bits, scale);

    if (error < search->error) {
        search->error = error;
        search->best = scale;
    }
}

/* Neighbours of the best: two offsets and two steps either way, twice. */
static void search_refine(Search *search, float relative_step)
{
    static const float moves[] = {-2.0f, -1.0f, 1.0f, 2.0f};

    for (int round = 0; round < N_REFINEMENTS; round++) {
        Scale from = search->best;

        for (int i = 0; i < 4; i++)
            search_try(search, (Scale){from.step, offset_clamp(from.offset + moves[i])});
        from = search->best;
        for (int i = 0; i < 4; i++)
            search_try(search, (Scale){step_round(from.step * fmaf(moves[i], relative_step, 1.0f)), from.offset});
    }
}

static Scale search_scale(const float *x, uint32_t n, int bits)
{
    Search search = {.x = x, .n = n, .bits = bits, .error = INFINITY};
    float low = FLT_MAX, high = -FLT_MAX, largest = 0.0f, cover, covered, top = (float)((1 << bits) - 1);
    const float *factors = kv_search((uint8_t)bits);

    for (uint32_t i = 0; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    }
    /* The range must fit, and its far end within reach of the offset: 7 / 4 steps. */
    cover = (high - low) * (1.0f / top);
    covered = largest * (1.0f / (0.5f * top + 1.75f));
    cover = cover > covered ? cover : covered;
    search.best = (Scale){step_round(cover), 0.0f};
    for (int i = 0; i < KV_N_FACTORS; i++) {
        float step = step_round(cover * factors[i]);
        float quarters = offset_clamp((high + low) * step_inverse(step) * 2.0f);

        search_try(&search, (Scale){step, (quarters + 12582912.0f) - 12582912.0f}); /* 1.5 * 2^23: to the nearest integer */
    }
    search_refine(&search, factors[KV_SEARCH_STEP]);
    return search.best;
}

/* ---- places of codes in a record ------------------------------------------------------------------------------------------ */

/* Where one code lies: a nibble or byte, and its fifth bit's byte and position. */
typedef struct Place {
    uint32_t byte, shift, high_byte, high_bit;
} Place;

static Place k_place(const KvLayout *layout, uint32_t head_dim, int bits, uint32_t token, uint32_t dim)
{
    uint32_t half = token / 16, lane = token % 16, nibble = dim / (head_dim / 2), g, plane;
    Place place = {0};

    if (bits == 8) {
        place.byte = layout->k_offset + (dim / 4 * 2 + half) * 64 + 4 * lane + dim % 4;
        return place;
    }
    g = dim % (head_dim / 2) / 4;
    place.byte = layout->k_offset + (g * 2 + half) * 64 + 4 * lane + dim % 4;
    place.shift = 4 * nibble;
    plane = nibble * (head_dim / 8) + g;
    place.high_byte = layout->k_high_offset + (plane / 8 * 2 + half) * 64 + 4 * lane + dim % 4;
    place.high_bit = plane % 8;
    return place;
}

static Place v_place(const KvLayout *layout, int bits, uint32_t token, uint32_t dim)
{
    uint32_t lane = dim % 16, nibble = token / 16, t = token % 16 / 4;
    Place place = {0};

    if (bits == 8) {
        place.byte = layout->v_offset + (dim / 16 * 8 + token / 4) * 64 + 4 * lane + token % 4;
        return place;
    }
    place.byte = layout->v_offset + (dim / 16 * 4 + t) * 64 + 4 * lane + token % 4;
    place.shift = 4 * nibble;
    place.high_byte = layout->v_high_offset + dim / 16 * 64 + 4 * lane + token % 4;
    place.high_bit = nibble * 4 + t;
    return place;
}

static void code_put(uint8_t *record, Place place, int bits, int code)
{
    if (bits == 8) {
        record[place.byte] = (uint8_t)code;
        return;
    }
    record[place.byte] |= (uint8_t)((code & 15) << place.shift);
    if (bits == 5)
        record[place.high_byte] |= (uint8_t)((code >> 4) << place.high_bit);
}

static int code_get(const uint8_t *record, Place place, int bits)
{
    int code;

    if (bits == 8)
        return record[place.byte];
    code = record[place.byte] >> place.shift & 15;
    if (bits == 5)
        code |= (record[place.high_byte] >> place.high_bit & 1) << 4;
    return code;
}

/* ---- packing -------------------------------------------------------------------------------------------------------------- */

/* x -= R_j m: the mean key turned to the token's position. */
static void subtract_turned_mean(float *x, const float *mean, const float *rope, const KvShape *shape)
{
    uint32_t half = shape->rotary_dim / 2;

    for (uint32_t f = 0; f < half; f++) {
        float c = rope[2 * f], s = rope[2 * f + 1], a = mean[f], b = mean[f + half];

        x[f] -= fmaf(a, c, -(b * s));
        x[f + half] -= fmaf(b, c, a * s);
    }
    for (uint32_t d = shape->rotary_dim; d < shape->head_dim; d++)
        x[d] -= mean[d];
}

static void pack_side(uint8_t *record, const KvLayout *layout, const KvShape *shape, bool is_key, int bits, uint32_t token, float *x)
{
    uint32_t scale_offset = is_key ? layout->k_scale_offset : layout->v_scale_offset;

    kv_hadamard(x, shape->head_dim);
    for (uint32_t group = 0; group < layout->n_groups; group++) {
        uint32_t first = group * KV_GROUP_DIMS, n = MIN(shape->head_dim - first, (uint32_t)KV_GROUP_DIMS);
        Scale scale = search_scale(x + first, n, bits);
        float inverse = step_inverse(scale.step);
        uint16_t half = (uint16_t)(step_bits(scale.step) | (uint16_t)(int)(scale.offset + 8.0f));

        for (uint32_t dim = first; dim < first + n; dim++) {
            Place place = is_key ? k_place(layout, shape->head_dim, bits, token, dim) : v_place(layout, bits, token, dim);

            code_put(record, place, bits, level_code(x[dim], inverse, scale.offset, bits));
        }
        memcpy(record + scale_offset + (group * KV_PAGE_TOKENS + token) * sizeof(half), &half, sizeof(half));
    }
}

static void pack_token(uint8_t *record, const KvLayout *layout, KvForm form, const KvShape *shape, const float *k_mean,
                       const float *v_mean, const float *rope, uint32_t token, const float *k, const float *v)
{
    float x[MAX_HEAD_DIM];

    memcpy(x, k, shape->head_dim * sizeof(float));
    if (k_mean)
        subtract_turned_mean(x, k_mean, rope, shape);
    pack_side(record, layout, shape, true, form.k_bits, token, x);
    memcpy(x, v, shape->head_dim * sizeof(float));
    if (v_mean)
        for (uint32_t d = 0; d < shape->head_dim; d++)
            x[d] -= v_mean[d];
    pack_side(record, layout, shape, false, form.v_bits, token, x);
}

static void plain_put(uint8_t *side, KvFormKind kind, uint32_t index, float value)
{
    uint16_t half = half_from_float(value);

    if (kind == KV_FORM_F16)
        memcpy(side + 2 * (size_t)index, &half, sizeof(half));
    else
        memcpy(side + 4 * (size_t)index, &value, sizeof(value));
}

static float plain_get(const uint8_t *side, KvFormKind kind, uint32_t index)
{
    uint16_t half;
    float value;

    if (kind == KV_FORM_F16) {
        memcpy(&half, side + 2 * (size_t)index, sizeof(half));
        return float_from_half(half);
    }
    memcpy(&value, side + 4 * (size_t)index, sizeof(value));
    return value;
}

void kv_pack_page(KvForm form, const KvShape *shape, const KvCalibration *calibration, const float *rope, const float *k,
                  const float *v, void *ret_page)
{
    uint32_t dim = shape->head_dim;
    KvLayout layout;

    if (kv_layout(form, shape, &layout, NULL) < 0)
        return;
    memset(ret_page, 0, layout.page_bytes);
    for (uint32_t head = 0; head < shape->n_kv_heads; head++) {
        uint8_t *record = (uint8_t *)ret_page + (size_t)head * layout.record_bytes;

        for (uint32_t token = 0; token < KV_PAGE_TOKENS; token++) {
            size_t row = ((size_t)token * shape->n_kv_heads + head) * dim;

            if (form.kind == KV_FORM_LEAT) {
                pack_token(record, &layout, form, shape, calibration ? calibration->k_mean + (size_t)head * dim : NULL,
                           calibration ? calibration->v_mean + (size_t)head * dim : NULL, rope + (size_t)token * shape->rotary_dim,
                           token, k + row, v + row);
                continue;
            }
            for (uint32_t d = 0; d < dim; d++) {
                plain_put(record, form.kind, d * KV_PAGE_TOKENS + token, k[row + d]);
                plain_put(record + layout.v_offset, form.kind, token * dim + d, v[row + d]);
            }
        }
    }
}

/* ---- decoding ------------------------------------------------------------------------------------------------------------- */

static float decode(const uint8_t *record, uint32_t scale_offset, Place place, int bits, uint32_t token, uint32_t dim)
{
    uint16_t scale;
    float level;

    memcpy(&scale, record + scale_offset + (dim / KV_GROUP_DIMS * KV_PAGE_TOKENS + token) * sizeof(scale), sizeof(scale));
    level = (float)code_get(record, place, bits) - 0.5f * (float)((1 << bits) - 1);
    level += 0.25f * (float)((int)(scale & OFFSET_BITS) - 8);
    return level * float_from_half((uint16_t)(scale & ~OFFSET_BITS));
}

void kv_unpack_page(KvForm form, const KvShape *shape, const void *page, uint32_t kv_head, float *ret_k, float *ret_v)
{
    uint32_t dim = shape->head_dim;
    const uint8_t *record;
    KvLayout layout;

    if (kv_layout(form, shape, &layout, NULL) < 0)
        return;
    record = (const uint8_t *)page + (size_t)kv_head * layout.record_bytes;
    for (uint32_t token = 0; token < KV_PAGE_TOKENS; token++)
        for (uint32_t d = 0; d < dim; d++) {
            float *k = ret_k + (size_t)token * dim + d, *v = ret_v + (size_t)token * dim + d;

            if (form.kind == KV_FORM_LEAT) {
                *k = decode(record, layout.k_scale_offset, k_place(&layout, dim, form.k_bits, token, d), form.k_bits, token, d);
                *v = decode(record, layout.v_scale_offset, v_place(&layout, form.v_bits, token, d), form.v_bits, token, d);
            } else {
                *k = plain_get(record, form.kind, d * KV_PAGE_TOKENS + token);
                *v = plain_get(record + layout.v_offset, form.kind, token * dim + d);
            }
        }
}
