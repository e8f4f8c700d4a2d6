/* SPDX-License-Identifier: Apache-2.0 */
/* C reference of packing and decoding whole pages: transform, groups, places of codes.  Rules of kv-codec-internal.h. */

#include "quant/kv-codec-internal.h"

#include "quant/base/half.h"
#include "quant/kv-fp8.h"

#include <math.h>
#include <string.h>

#define OFFSET_BITS 15u /* of a scale of leat, kv-codec.h */
#define SQRT_HALF   0.70710678118654752440f

/* ---- rotation ----------------------------------------------------------------------------------------------------------- */

/* 1 / sqrt(n) of the powers of two up to KV_MAX_HEAD_DIM. */
static float hadamard_scale(uint32_t n)
{
    static const float scale[] = {1.0f, SQRT_HALF, 0.5f, SQRT_HALF * 0.5f, 0.25f, SQRT_HALF * 0.25f, 0.125f,
                                  SQRT_HALF * 0.125f, 0.0625f, SQRT_HALF * 0.0625f};

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

/* ---- places of codes in a record ------------------------------------------------------------------------------------------ */

/* Where one code lies: its base field, and what the high planes have of it. */
typedef struct Place {
    uint32_t byte, shift, high_byte, high_shift;
} Place;

/* One side of a record. */
typedef struct Side {
    bool is_key;
    uint32_t bits, base, high; /* high = bits - base */
    uint32_t dim, n_groups, offset, high_offset, scale_offset;
} Side;

static Side side_of(KvForm form, const KvShape *shape, const KvLayout *layout, bool is_key)
{
    Side side = {.is_key = is_key, .bits = is_key ? form.k_bits : form.v_bits, .dim = kv_side_dim(shape, is_key)};

    side.base = kv_base_bits(side.bits);
    side.high = side.bits - side.base;
    side.n_groups = is_key ? layout->k_groups : layout->v_groups;
    side.offset = is_key ? layout->k_offset : layout->v_offset;
    side.high_offset = is_key ? layout->k_high_offset : layout->v_high_offset;
    side.scale_offset = is_key ? layout->k_scale_offset : layout->v_scale_offset;
    return side;
}

/* Byte of fields of @width bits: K in vectors of four dims (bytes) of 16 tokens (lanes), 8 / width of them in one; V with the parts of
 * dims and tokens exchanged.  @ret_shift: within the byte. */
static uint32_t field_byte(const Side *side, uint32_t width, uint32_t token, uint32_t dim, uint32_t *ret_shift)
{
    uint32_t four = side->is_key ? dim / 4 : token / 4, lane = (side->is_key ? token : dim) % 16, byte = (side->is_key ? dim : token) % 4;
    uint32_t per = 8 / width;

    *ret_shift = four % per * width;
    if (side->is_key)
        return (four / per * 2 + token / 16) * 64 + 4 * lane + byte;
    return (dim / 16 * width + four / per) * 64 + 4 * lane + byte;
}

static Place place_of(const Side *side, uint32_t token, uint32_t dim)
{
    Place place = {0};

    place.byte = side->offset + field_byte(side, side->base, token, dim, &place.shift);
    if (side->high > 0)
        place.high_byte = side->high_offset + field_byte(side, side->high, token, dim, &place.high_shift);
    return place;
}

/* fp8: 16-bit words of two dims (K) or tokens (V), so that they widen to f16 in place; a vector has lanes of the first two, then of the
 * other two. */
static uint32_t fp8_byte(const Side *side, uint32_t token, uint32_t dim)
{
    uint32_t four = side->is_key ? dim / 4 : token / 4, lane = (side->is_key ? token : dim) % 16, byte = (side->is_key ? dim : token) % 4;
    uint32_t vector = side->is_key ? four * 2 + token / 16 : dim / 16 * 8 + four;

    return side->offset + vector * 64 + byte / 2 * 32 + 2 * lane + byte % 2;
}

static void code_put(uint8_t *record, const Side *side, uint32_t token, uint32_t dim, uint32_t code)
{
    Place place = place_of(side, token, dim);

    record[place.byte] |= (uint8_t)((code & ((1u << side->base) - 1)) << place.shift);
    if (side->high > 0)
        record[place.high_byte] |= (uint8_t)((code >> side->base) << place.high_shift);
}

static uint32_t code_get(const uint8_t *record, const Side *side, uint32_t token, uint32_t dim)
{
    Place place = place_of(side, token, dim);
    uint32_t code = record[place.byte] >> place.shift & ((1u << side->base) - 1);

    if (side->high > 0)
        code |= (record[place.high_byte] >> place.high_shift & ((1u << side->high) - 1)) << side->base;
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
    for (uint32_t d = shape->rotary_dim; d < kv_side_dim(shape, true); d++)
        x[d] -= mean[d];
}

/* What one side of a head is transformed and coded with. */
typedef struct Coder {
    KvForm form;
    const KvShape *shape;
    Side side;
    const float *mean, *pair_scale; /* of the head; may be NULL */
    float fp8_scale;
} Coder;

static void transform(const Coder *coder, const float *rope, float *x)
{
    uint32_t dim = coder->side.dim;

    if (coder->mean && coder->side.is_key && coder->form.centre == KV_CENTRE_BEFORE_ROPE)
        subtract_turned_mean(x, coder->mean, rope, coder->shape);
    else if (coder->mean)
        for (uint32_t d = 0; d < dim; d++)
            x[d] -= coder->mean[d];
    if (coder->pair_scale)
        for (uint32_t d = 0; d < dim; d++)
            x[d] *= 1.0f / coder->pair_scale[d];
    if (coder->form.rotation == KV_ROTATION_HADAMARD)
        kv_hadamard(x, dim);
}

static KvGroupScale encode_group(const Coder *coder, const float *x, uint32_t n, uint8_t *ret_codes)
{
    int bits = (int)coder->side.bits;

    switch (coder->form.kind) {
    case KV_FORM_QUANTO:
        return kv_group_quanto(x, n, bits, ret_codes);
    case KV_FORM_HQQ:
        return kv_group_hqq(x, n, bits, ret_codes);
    case KV_FORM_LEAT:
    case KV_FORM_F32:
    case KV_FORM_F16:
    case KV_FORM_FP8:
    case KV_FORM_X_MAX:
    case KV_FORM_X_INVALID:
        break;
    }
    return kv_group_leat(x, n, bits, coder->form.levels, ret_codes);
}

static void pack_groups(const Coder *coder, uint32_t token, const float *x, uint8_t *record)
{
    const Side *side = &coder->side;

    for (uint32_t group = 0; group < side->n_groups; group++) {
        uint32_t first = group * coder->form.group_dims, n = MIN(side->dim - first, (uint32_t)coder->form.group_dims);
        uint8_t codes[KV_MAX_GROUP_DIMS], *scales = record + side->scale_offset;
        KvGroupScale scale = encode_group(coder, x + first, n, codes);

        for (uint32_t i = 0; i < n; i++)
            code_put(record, side, token, first + i, codes[i]);
        memcpy(scales + (group * KV_PAGE_TOKENS + token) * 2, &scale.scale, 2);
        if (coder->form.kind != KV_FORM_LEAT)
            memcpy(scales + ((side->n_groups + group) * KV_PAGE_TOKENS + token) * 2, &scale.zero, 2);
    }
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

/* Unpacked forms: K (dim, token), V (token, dim). */
static uint32_t plain_index(const Side *side, uint32_t token, uint32_t dim)
{
    return side->is_key ? dim * KV_PAGE_TOKENS + token : token * side->dim + dim;
}

static void pack_token(const Coder *coder, uint32_t token, const float *rope, const float *from, uint8_t *record)
{
    const Side *side = &coder->side;
    float x[KV_MAX_HEAD_DIM];

    memcpy(x, from, side->dim * sizeof(float));
    if (kv_form_is_coded(coder->form))
        transform(coder, rope, x);
    if (side->n_groups > 0) {
        pack_groups(coder, token, x, record);
        return;
    }
    for (uint32_t d = 0; d < side->dim; d++)
        if (coder->form.kind == KV_FORM_FP8)
            record[fp8_byte(side, token, d)] = kv_group_fp8(x[d], coder->fp8_scale);
        else
            plain_put(record + side->offset, coder->form.kind, plain_index(side, token, d), x[d]);
}

void kv_pack_page(KvForm form, const KvShape *shape, const KvCalibration *calibration, const float *rope, const float *k,
                  const float *v, void *ret_page)
{
    const float *k_mean = kv_form_k_mean(form, calibration), *v_mean = kv_form_v_mean(form, calibration);
    const float *w = kv_form_pair_scale(form, calibration);
    KvLayout layout;

    if (kv_layout(form, shape, &layout, NULL) < 0)
        return;
    memset(ret_page, 0, layout.page_bytes);
    for (uint32_t unit = 0; unit < 2 * shape->n_kv_heads; unit++) {
        uint32_t head = unit / 2;
        bool is_key = unit % 2 == 0;
        Coder coder = {form, shape, side_of(form, shape, &layout, is_key), NULL, NULL, kv_form_fp8_scale(calibration, is_key)};
        const float *mean = is_key ? k_mean : v_mean;
        uint8_t *record = (uint8_t *)ret_page + (size_t)head * layout.record_bytes;

        coder.mean = mean ? mean + (size_t)head * coder.side.dim : NULL;
        coder.pair_scale = is_key && w ? w + (size_t)head * coder.side.dim : NULL;
        for (uint32_t token = 0; token < KV_PAGE_TOKENS; token++)
            pack_token(&coder, token, rope ? rope + (size_t)token * shape->rotary_dim : NULL,
                       (is_key ? k : v) + ((size_t)token * shape->n_kv_heads + head) * coder.side.dim, record);
    }
}

/* ---- decoding ------------------------------------------------------------------------------------------------------------- */

static float decode_group(const Side *side, KvForm form, const uint8_t *record, uint32_t token, uint32_t dim)
{
    const uint8_t *scales = record + side->scale_offset;
    float code = (float)code_get(record, side, token, dim), middle = 0.5f * (float)((1 << side->bits) - 1);
    uint32_t group = dim / form.group_dims;
    uint16_t scale, zero = 0;

    memcpy(&scale, scales + (group * KV_PAGE_TOKENS + token) * 2, 2);
    if (form.kind == KV_FORM_LEAT)
        return (code - middle + 0.25f * (float)((int)(scale & OFFSET_BITS) - 8)) * float_from_half((uint16_t)(scale & ~OFFSET_BITS));
    memcpy(&zero, scales + ((side->n_groups + group) * KV_PAGE_TOKENS + token) * 2, 2);
    if (form.kind == KV_FORM_QUANTO)
        return fmaf(code, float_from_half(scale), -float_from_half(zero));
    return (code - float_from_half(zero)) * float_from_half(scale);
}

static float decode(const Side *side, KvForm form, const uint8_t *record, uint32_t token, uint32_t dim)
{
    if (side->n_groups > 0)
        return decode_group(side, form, record, token, dim);
    if (form.kind == KV_FORM_FP8)
        return kv_fp8_decode(record[fp8_byte(side, token, dim)]);
    return plain_get(record + side->offset, form.kind, plain_index(side, token, dim));
}

void kv_unpack_page(KvForm form, const KvShape *shape, const void *page, uint32_t kv_head, float *ret_k, float *ret_v)
{
    const uint8_t *record;
    KvLayout layout;

    if (kv_layout(form, shape, &layout, NULL) < 0)
        return;
    record = (const uint8_t *)page + (size_t)kv_head * layout.record_bytes;
    for (int is_value = 0; is_value < 2; is_value++) {
        Side side = side_of(form, shape, &layout, !is_value);
        float *ret = is_value ? ret_v : ret_k;

        for (uint32_t token = 0; token < KV_PAGE_TOKENS; token++)
            for (uint32_t d = 0; d < side.dim; d++)
                ret[(size_t)token * side.dim + d] = decode(&side, form, record, token, d);
    }
}
