/* SPDX-License-Identifier: Apache-2.0 */
/* Forms of KV pages: defaults, checks, byte layout, true bits, the constants of a layer. */

#include "quant/kv-codec-internal.h"

#include "quant/base/checked.h"

#include <math.h>
#include <string.h>

#define E4M3_LARGEST 448.0f
/* At 2 bits recent tokens in full precision are worth more than anything else that bits were spent on: on SmolLM2 a tail of 32 has 1.6
 * times the divergence of this one, which costs 0.22 bits a value at 8,192 tokens. */
#define LOW_TAIL_TOKENS 160

static const char *const kind_names[KV_FORM_X_MAX] = {
    [KV_FORM_F32] = "f32",       [KV_FORM_F16] = "f16", [KV_FORM_LEAT] = "leat",
    [KV_FORM_QUANTO] = "quanto", [KV_FORM_HQQ] = "hqq", [KV_FORM_FP8] = "fp8",
};

const char *kv_form_kind_to_string(KvFormKind kind)
{
    return kind >= 0 && kind < KV_FORM_X_MAX ? kind_names[kind] : NULL;
}

KvForm kv_form_default(KvFormKind kind)
{
    KvForm form = {.kind = kind, .sink_tokens = 4, .tail_tokens = KV_PAGE_TOKENS};

    switch (kind) {
    case KV_FORM_LEAT:
        form.k_bits = 5;
        form.v_bits = 4;
        form.centre = KV_CENTRE_BEFORE_ROPE;
        form.rotation = KV_ROTATION_HADAMARD;
        form.group_dims = 64;
        break;
    case KV_FORM_QUANTO:
    case KV_FORM_HQQ:
        form.k_bits = form.v_bits = 4;
        form.group_dims = 64;
        form.sink_tokens = 0;
        form.tail_tokens = 128;
        break;
    case KV_FORM_FP8:
        form.k_bits = form.v_bits = 8;
        form.sink_tokens = form.tail_tokens = 0;
        break;
    case KV_FORM_F32:
    case KV_FORM_F16:
    case KV_FORM_X_MAX:
    case KV_FORM_X_INVALID:
        break;
    }
    return form;
}

KvForm kv_form_leat(uint8_t k_bits, uint8_t v_bits)
{
    KvForm form = kv_form_default(KV_FORM_LEAT);

    form.k_bits = k_bits;
    form.v_bits = v_bits;
    if (k_bits == 2 && v_bits == 2)
        form.tail_tokens = LOW_TAIL_TOKENS;
    return form;
}

bool kv_form_equal(const KvForm *a, const KvForm *b)
{
    return a->kind == b->kind && a->k_bits == b->k_bits && a->v_bits == b->v_bits && a->centre == b->centre &&
           a->rotation == b->rotation && a->levels == b->levels && a->pair_scale == b->pair_scale &&
           a->group_dims == b->group_dims && a->sink_tokens == b->sink_tokens && a->tail_tokens == b->tail_tokens;
}

bool kv_form_is_calibrated(const KvForm *form)
{
    return form->centre != KV_CENTRE_NONE || form->pair_scale || form->kind == KV_FORM_FP8;
}

/* ---- checks -------------------------------------------------------------------------------------------------------------- */

static const struct {
    uint16_t mask;
    const char *names;
} allowed_bits[KV_FORM_X_MAX] = {
    [KV_FORM_LEAT] = {1 << 8 | 1 << 6 | 1 << 5 | 1 << 4 | 1 << 3 | 1 << 2, "8, 6, 5, 4, 3 and 2"},
    [KV_FORM_QUANTO] = {1 << 4 | 1 << 2, "4 and 2"},
    [KV_FORM_HQQ] = {1 << 8 | 1 << 4 | 1 << 2, "8, 4 and 2"},
    [KV_FORM_FP8] = {1 << 8, "8"},
};

uint32_t kv_form_bits(KvFormKind kind)
{
    return kv_form_kind_to_string(kind) ? allowed_bits[kind].mask : 0;
}

static int check_bits(KvForm form, uint8_t bits, const char *side, ErrorDetail *reterr)
{
    if (bits == KV_BITS_AUTO)
        return error_detail_set(reterr, -EINVAL, "bits for %s are not chosen yet: %s keeps pages of %s bits", side, kind_names[form.kind],
                                allowed_bits[form.kind].names);
    if (bits > KV_MAX_BITS || !(kv_form_bits(form.kind) >> bits & 1))
        return error_detail_set(reterr, -EINVAL, "%u bits for %s: %s keeps pages of %s bits", bits, side, kind_names[form.kind],
                                allowed_bits[form.kind].names);
    return 0;
}

static int check_transform(KvForm form, ErrorDetail *reterr)
{
    if (form.centre >= KV_CENTRE_X_MAX || form.rotation >= KV_ROTATION_X_MAX || form.levels >= KV_LEVELS_X_MAX)
        return error_detail_set(reterr, -EINVAL, "centring %d, rotation %d or levels %d of the cache are unknown", (int)form.centre,
                                (int)form.rotation, (int)form.levels);
    if (form.kind != KV_FORM_LEAT && form.levels != KV_LEVELS_SEARCHED)
        return error_detail_set(reterr, -EINVAL, "levels are a part of leat, %s has its own", kind_names[form.kind]);
    if (form.kind == KV_FORM_FP8 && form.group_dims != 0)
        return error_detail_set(reterr, -EINVAL, "groups of %u dims: fp8 has one scale a layer, no groups", form.group_dims);
    if (form.kind != KV_FORM_FP8 && (form.group_dims < 16 || form.group_dims > KV_MAX_GROUP_DIMS || form.group_dims % 16))
        return error_detail_set(reterr, -EINVAL, "groups of %u dims: must be a multiple of 16 from 16 to %d", form.group_dims,
                                KV_MAX_GROUP_DIMS);
    return 0;
}

static int check_plain(KvForm form, ErrorDetail *reterr)
{
    if (form.k_bits || form.v_bits || form.group_dims || form.centre || form.rotation || form.levels || form.pair_scale)
        return error_detail_set(reterr, -EINVAL, "bits, groups and transforms have no meaning for a cache in %s",
                                kind_names[form.kind]);
    return 0;
}

int kv_form_check(KvForm form, ErrorDetail *reterr)
{
    int r;

    if (!kv_form_kind_to_string(form.kind))
        return error_detail_set(reterr, -EINVAL, "form %d of the cache is unknown", (int)form.kind);
    if (form.sink_tokens > KV_PAGE_TOKENS)
        return error_detail_set(reterr, -EINVAL, "%u sinks: must be 0 to %d tokens", form.sink_tokens, KV_PAGE_TOKENS);
    if (form.tail_tokens % KV_PAGE_TOKENS || form.tail_tokens > KV_MAX_TAIL_TOKENS)
        return error_detail_set(reterr, -EINVAL, "a tail of %u tokens: must be a multiple of %d up to %d", form.tail_tokens,
                                KV_PAGE_TOKENS, KV_MAX_TAIL_TOKENS);
    if (!kv_form_is_coded(form))
        return check_plain(form, reterr);
    r = check_bits(form, form.k_bits, "keys", reterr);
    if (!r)
        r = check_bits(form, form.v_bits, "values", reterr);
    return r ? r : check_transform(form, reterr);
}

static bool head_dim_is_known(uint32_t dim)
{
    return dim > 0 && dim % 16 == 0 && dim <= KV_MAX_HEAD_DIM;
}

static int check_shape(const KvShape *shape, ErrorDetail *reterr)
{
    if (!head_dim_is_known(shape->k_head_dim))
        return error_detail_set(reterr, -EINVAL, "k_head_dim %u is not a multiple of 16 up to %d", shape->k_head_dim,
                                KV_MAX_HEAD_DIM);
    if (!head_dim_is_known(shape->v_head_dim))
        return error_detail_set(reterr, -EINVAL, "v_head_dim %u is not a multiple of 16 up to %d", shape->v_head_dim,
                                KV_MAX_HEAD_DIM);
    if (shape->n_kv_heads == 0 || shape->n_heads == 0 || shape->n_heads % shape->n_kv_heads)
        return error_detail_set(reterr, -EINVAL, "%u heads do not share %u key/value heads evenly", shape->n_heads,
                                shape->n_kv_heads);
    if (shape->rotary_dim % 2 || shape->rotary_dim > shape->k_head_dim)
        return error_detail_set(reterr, -EINVAL, "rotary_dim %u is odd or larger than k_head_dim %u", shape->rotary_dim,
                                shape->k_head_dim);
    return 0;
}

/* ---- layout -------------------------------------------------------------------------------------------------------------- */

static void layout_plain(const KvShape *shape, uint32_t value_bytes, KvLayout *ret)
{
    uint32_t k = KV_PAGE_TOKENS * kv_side_dim(shape, true) * value_bytes;
    uint32_t all = k + KV_PAGE_TOKENS * kv_side_dim(shape, false) * value_bytes;

    *ret = (KvLayout){.record_bytes = all, .k_high_offset = k, .v_offset = k, .v_high_offset = all, .k_scale_offset = all,
                      .v_scale_offset = all};
}

/* Bytes of a plane of fields of @width bits: K in vectors of 8 / width times four dims, V of 8 / width times four tokens. */
static uint32_t plane_bytes(uint32_t dim, uint32_t width, bool is_key)
{
    return is_key ? (dim / 4 * width + 7) / 8 * 128 : dim / 16 * width * 64;
}

static void layout_coded(KvForm form, const KvShape *shape, KvLayout *ret)
{
    uint32_t k_dim = kv_side_dim(shape, true), v_dim = kv_side_dim(shape, false), offset = 0;
    uint32_t k_base = kv_base_bits(form.k_bits), v_base = kv_base_bits(form.v_bits);
    uint32_t scales = KV_PAGE_TOKENS * (uint32_t)sizeof(uint16_t) * (form.kind == KV_FORM_LEAT ? 1 : 2);

    *ret = (KvLayout){0};
    if (form.group_dims > 0) {
        ret->k_groups = (k_dim + form.group_dims - 1) / form.group_dims;
        ret->v_groups = (v_dim + form.group_dims - 1) / form.group_dims;
    }
    ret->k_offset = offset;
    ret->k_high_offset = offset += plane_bytes(k_dim, k_base, true);
    ret->v_offset = offset += plane_bytes(k_dim, form.k_bits - k_base, true);
    ret->v_high_offset = offset += plane_bytes(v_dim, v_base, false);
    ret->k_scale_offset = offset += plane_bytes(v_dim, form.v_bits - v_base, false);
    ret->v_scale_offset = offset += ret->k_groups * scales;
    ret->record_bytes = offset + ret->v_groups * scales;
}

int kv_layout(KvForm form, const KvShape *shape, KvLayout *ret, ErrorDetail *reterr)
{
    KvLayout layout = {0};
    uint64_t page_bytes;
    int r;

    r = kv_form_check(form, reterr);
    if (!r)
        r = check_shape(shape, reterr);
    if (r)
        return error_trace(r);
    if (kv_form_is_coded(form))
        layout_coded(form, shape, &layout);
    else
        layout_plain(shape, form.kind == KV_FORM_F32 ? 4 : 2, &layout);
    if (!checked_mul(layout.record_bytes, shape->n_kv_heads, &page_bytes) || page_bytes > INT32_MAX)
        return error_detail_set(reterr, -EINVAL, "a page of %u heads would exceed 2 GiB", shape->n_kv_heads);
    layout.page_bytes = (uint32_t)page_bytes;
    *ret = layout;
    return 0;
}

double kv_true_bits(KvForm form, const KvShape *shape, uint32_t n_tokens, uint32_t tail_bits)
{
    KvLayout layout;
    double values = (double)shape->n_kv_heads * (kv_side_dim(shape, true) + kv_side_dim(shape, false)), n_pages, n_full;

    if (n_tokens == 0 || kv_layout(form, shape, &layout, NULL) < 0)
        return 0;
    n_pages = kv_packed_pages(form, n_tokens - 1); /* as the last token sees it */
    n_full = n_tokens - n_pages * KV_PAGE_TOKENS + (n_pages > 0 ? form.sink_tokens : 0);
    return (n_pages * layout.page_bytes * 8 + n_full * values * tail_bits) / (n_tokens * values);
}

/* ---- constants of a layer ------------------------------------------------------------------------------------------------------ */

uint32_t kv_constants_floats(const KvShape *shape)
{
    return shape->n_kv_heads * (3 * kv_side_dim(shape, true) + kv_side_dim(shape, false)) + KV_SCALE_FLOATS;
}

float kv_form_fp8_scale(const KvCalibration *calibration, bool is_key)
{
    float largest = !calibration ? 0.0f : is_key ? calibration->k_largest : calibration->v_largest;

    return largest > 1e-30f && largest < 1e30f ? largest * (KV_FP8_HEADROOM / E4M3_LARGEST) : 1.0f;
}

void kv_constants_fill(KvForm form, const KvShape *shape, const KvCalibration *calibration, float *ret)
{
    uint32_t k_side = shape->n_kv_heads * kv_side_dim(shape, true), v_side = shape->n_kv_heads * kv_side_dim(shape, false);
    const float *k_mean = kv_form_k_mean(form, calibration), *v_mean = kv_form_v_mean(form, calibration);
    const float *w = kv_form_pair_scale(form, calibration);

    memset(ret, 0, kv_constants_floats(shape) * sizeof(float));
    for (uint32_t i = 0; i < k_side; i++) {
        ret[i] = k_mean ? k_mean[i] : 0.0f;
        ret[k_side + i] = w ? 1.0f / w[i] : 1.0f;
        ret[2 * k_side + i] = w ? w[i] : 1.0f;
    }
    if (v_mean)
        memcpy(ret + 3 * k_side, v_mean, v_side * sizeof(float));
    ret += 3 * k_side + v_side;
    ret[0] = kv_form_fp8_scale(calibration, true);
    ret[1] = kv_form_fp8_scale(calibration, false);
}

const float *kv_form_k_mean(KvForm form, const KvCalibration *calibration)
{
    switch (calibration ? form.centre : KV_CENTRE_NONE) {
    case KV_CENTRE_BEFORE_ROPE:
        return calibration->k_mean;
    case KV_CENTRE_AFTER_ROPE:
        return calibration->k_turned_mean;
    case KV_CENTRE_NONE:
    case KV_CENTRE_X_MAX:
        break;
    }
    return NULL;
}

const float *kv_form_v_mean(KvForm form, const KvCalibration *calibration)
{
    return calibration && form.centre != KV_CENTRE_NONE ? calibration->v_mean : NULL;
}

const float *kv_form_pair_scale(KvForm form, const KvCalibration *calibration)
{
    return calibration && form.pair_scale ? calibration->k_pair_scale : NULL;
}
