#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forms in which keys and values of the past are kept, with the C reference of each.
 *
 * A *page* is KV_PAGE_TOKENS consecutive tokens of one layer, starting at a multiple of it.  A page's bytes are n_kv_heads
 * *records*, one per key/value head; a record is K codes, V codes, then scales, and is a multiple of 64 bytes.
 *
 * Forms `f32` and `f16` keep the values as they are (in the kernels' layout).  All others are *coded*: values are transformed, then
 * each group of form.group_dims dims of a token's head (the last may be shorter; none crosses a head) is coded on its own, so rows can
 * be gathered, cropped and shared exactly.  The transform, each part a parameter:
 *   K: k' = H ((k - R_j m) / w)   m: mean key before RoPE, turned by R_j, the rotation of position j; or a mean after RoPE, not turned
 *   V: v' = H (v - u)             w: one factor per rotary pair, so that it commutes with R_j
 *                                 H: orthonormal Hadamard, in blocks for head sizes that are no power of two
 * and what attention computes from it (exactly, for the decoded values):
 *   q . k_j = (H w q) . dec(k'_j) + sum_f [ C_f cos(j t_f) + S_f sin(j t_f) ],   C_f = q_f m_f + q_g m_g,  S_f = q_g m_f - q_f m_g
 *             with (f, g = f + rotary_dim / 2) a rotary pair, t_f its frequency; channels without RoPE, and means after RoPE, add a
 *             constant (tokens in full precision do not get it)
 *   sum p v = H^T sum p dec(v') + u sum p
 *
 * Codes of a group, c in 0..2^b-1, stand for
 *   leat    s (c - (2^b - 1) / 2 + z / 4): scale s and offset z share 16 bits: s is an f16 whose low four bits are zero, and there lies
 *           z + 8, -8 <= z <= 7.  `searched`: s and z together for the least squared error (at 4 bits 8 % less on Gaussian groups of 64
 *           than 16 Lloyd-Max levels with an f16 scale); `plain`: the range just fits.
 *   quanto  s c - z, s = (max - min) / (2^b - 1), z = -min, both f16: axis 0 of a tensor in f16, each operation rounded to f16
 *   hqq     (c - Z) s, S = 1 / s from the range, Z by hqq's half-quadratic iterations; s and Z are kept as f16.  The stop rule looks at
 *           the group alone, so that a token's codes do not depend on its company.
 *   fp8     s e4m3fn(c), one scale for a layer's K and one for its V.  It must not depend on which sequence of a store came first, so it
 *           is calibrated with the means (KV_FP8_HEADROOM times the largest magnitude there), 1 without calibration; what is larger
 *           saturates.
 *
 * The first sink_tokens tokens stay in full precision for ever; so do the latest: the query at position i sees page p coded when
 * p < i / KV_PAGE_TOKENS - tail_tokens / KV_PAGE_TOKENS, whatever else happens.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KV_PAGE_TOKENS     32 /* also the flush granularity */
#define KV_BLOCK_PAGES     8  /* the unit of summation: partial results of 8 pages merge in order */
#define KV_MAX_HEAD_DIM    576
#define KV_MAX_BITS        8
#define KV_BITS_AUTO       0 /* bits that somebody has yet to choose; no page has them */
#define KV_FORM_VERSION    1 /* counts changes of what codes stand for: what was measured with another does not hold */
#define KV_MAX_TAIL_TOKENS 512
#define KV_FP8_HEADROOM    8.0f /* e4m3 has the range to spare: 2^18 from the smallest step to the largest number */

typedef enum KvFormKind {
    KV_FORM_F32,
    KV_FORM_F16,
    KV_FORM_LEAT,
    KV_FORM_QUANTO,
    KV_FORM_HQQ,
    KV_FORM_FP8,
    KV_FORM_X_MAX,
    KV_FORM_X_INVALID = -EINVAL,
} KvFormKind;

typedef enum KvCentre { KV_CENTRE_NONE, KV_CENTRE_BEFORE_ROPE, KV_CENTRE_AFTER_ROPE, KV_CENTRE_X_MAX } KvCentre;
typedef enum KvRotation { KV_ROTATION_NONE, KV_ROTATION_HADAMARD, KV_ROTATION_X_MAX } KvRotation;
typedef enum KvLevels { KV_LEVELS_SEARCHED, KV_LEVELS_PLAIN, KV_LEVELS_X_MAX } KvLevels; /* of leat */

/* Start from kv_form_default(); a zeroed one is refused. */
typedef struct KvForm {
    KvFormKind kind;
    uint8_t k_bits, v_bits; /* leat: 8 6 5 4 3 2; quanto: 4 2; hqq: 8 4 2; fp8: 8; else 0 */
    KvCentre centre;        /* NONE: of neither K nor V */
    KvRotation rotation;
    KvLevels levels;
    bool pair_scale;
    uint16_t group_dims;    /* a multiple of 16, 16 to 128; fp8: 0, it has no groups */
    uint16_t sink_tokens;   /* 0 to KV_PAGE_TOKENS */
    uint16_t tail_tokens;   /* a multiple of KV_PAGE_TOKENS, up to KV_MAX_TAIL_TOKENS */
} KvForm;

/* leat: K 5, V 4 bits, all of the recipe but the pair scale, 4 sinks, tail of 32.  quanto, hqq: 4 bits, groups of 64, a tail of 128, no
 * transform and no sinks, as their references; fp8 too, but without a tail beyond the page being filled. */
KvForm kv_form_default(KvFormKind kind);
/* The default of leat with other bits; 2 and 2 have a tail of 160. */
KvForm kv_form_leat(uint8_t k_bits, uint8_t v_bits);
const char *kv_form_kind_to_string(KvFormKind kind); /* NULL when out of range */
static inline bool kv_form_is_coded(KvForm form)
{
    return form.kind >= KV_FORM_LEAT;
}
/* The bits that pages of this kind may have, 1 << bits each; 0 for those without codes. */
uint32_t kv_form_bits(KvFormKind kind);
/* Whether bits of a side are KV_BITS_AUTO. */
static inline bool kv_form_is_auto(KvForm form)
{
    return kv_form_is_coded(form) && (form.k_bits == KV_BITS_AUTO || form.v_bits == KV_BITS_AUTO);
}
bool kv_form_equal(const KvForm *a, const KvForm *b);
/* Whether its pages differ with the model's calibration. */
bool kv_form_is_calibrated(const KvForm *form);
/* 0 or -EINVAL with the culprit and what is allowed in the detail. */
int kv_form_check(KvForm form, ErrorDetail *reterr);

/* Leading pages that the query at @position sees coded, and tokens that a tail ring must hold for it. */
static inline uint32_t kv_packed_pages(KvForm form, uint32_t position)
{
    uint32_t page = position / KV_PAGE_TOKENS, tail_pages = form.tail_tokens / KV_PAGE_TOKENS;

    return page > tail_pages ? page - tail_pages : 0;
}

static inline uint32_t kv_ring_tokens(KvForm form)
{
    return form.tail_tokens + KV_PAGE_TOKENS;
}

/* The shape of one layer's cache. */
typedef struct KvShape {
    uint32_t n_heads, n_kv_heads; /* n_heads is a multiple of n_kv_heads */
    uint32_t k_head_dim, v_head_dim; /* of keys (and queries) and of values; multiples of 16, at most KV_MAX_HEAD_DIM */
    uint32_t rotary_dim;          /* even, <= k_head_dim; pairs are (f, f + rotary_dim / 2) */
} KvShape;

/* Elements of one token's keys and values; of them with the queries before them. */
static inline uint64_t kv_token_values(const KvShape *shape)
{
    return (uint64_t)shape->n_kv_heads * (shape->k_head_dim + shape->v_head_dim);
}

static inline uint64_t kv_row_values(const KvShape *shape)
{
    return (uint64_t)shape->n_heads * shape->k_head_dim + kv_token_values(shape);
}

/* Byte layout of a record; all offsets from the record's start.  A code of b bits is a base field of 8, 4 or 2 bits in the base planes,
 * and what is left, 2 bits or 1, in the high planes. */
typedef struct KvLayout {
    uint32_t record_bytes, page_bytes;
    uint32_t k_offset, k_high_offset, v_offset, v_high_offset;
    uint32_t k_scale_offset, v_scale_offset; /* u16 [k_groups][KV_PAGE_TOKENS]; quanto, hqq: then the same of zeros */
    uint32_t k_groups, v_groups;             /* per token and side; 0 for unpacked forms and fp8 */
} KvLayout;

/* What calibration measured for one layer; pointers may be NULL: means zero, factors one. */
typedef struct KvCalibration {
    const float *k_mean;         /* (n_kv_heads, k_head_dim): mean key before RoPE */
    const float *v_mean;         /* (n_kv_heads, v_head_dim) */
    const float *k_turned_mean;  /* (n_kv_heads, k_head_dim): mean key after RoPE, for KV_CENTRE_AFTER_ROPE */
    const float *k_pair_scale;   /* (n_kv_heads, k_head_dim): w, positive; equal for both of a rotary pair */
    float k_largest, v_largest;  /* magnitudes, for fp8; 0: unknown */
} KvCalibration;

/* 0 or -EINVAL with the culprit (form, k_head_dim, …) in the detail. */
int kv_layout(KvForm form, const KvShape *shape, KvLayout *ret, ErrorDetail *reterr);

/* Bits per cached value at @n_tokens, everything counted (codes, scales, sinks, tail in tail_bits). */
double kv_true_bits(KvForm form, const KvShape *shape, uint32_t n_tokens, uint32_t tail_bits);

/* A layer's calibration as packing and the kernels want it: what the form does not use is neutral.  In floats: K mean, K factor (1 / w),
 * w, (n_kv_heads, k_head_dim) each; V mean; then KV_SCALE_FLOATS: fp8's scale of K, of V. */
#define KV_SCALE_FLOATS 16
uint32_t kv_constants_floats(const KvShape *shape);
void kv_constants_fill(KvForm form, const KvShape *shape, const KvCalibration *calibration, float *ret);

/* In place, orthonormal Hadamard of each power-of-two block (64 + 16 for 80); its own inverse. */
void kv_hadamard(float *x, uint32_t n);

/* What leat's search for scale and offset tries, per bits; the packing kernel gets it as an argument.  [0, KV_N_FACTORS): fractions of the
 * scale that just covers the group; [KV_SEARCH_STEP]: relative step of the refinement. */
#define KV_N_FACTORS     6
#define KV_SEARCH_STEP   6
#define KV_SEARCH_FLOATS 8
const float *kv_search(uint8_t bits);

/* C reference of packing: k, v: (KV_PAGE_TOKENS, n_kv_heads, k_ or v_head_dim), k already rotated by RoPE with @rope: (KV_PAGE_TOKENS,
 * rotary_dim / 2, 2) cos and sin of the page's positions.  @calibration may be NULL. */
void kv_pack_page(KvForm form, const KvShape *shape, const KvCalibration *calibration, const float *rope, const float *k,
                  const float *v, void *ret_page);
/* C reference of decoding: dec(k'), dec(v') of one head of a page, (KV_PAGE_TOKENS, k_ or v_head_dim); fp8 without its scale s. */
void kv_unpack_page(KvForm form, const KvShape *shape, const void *page, uint32_t kv_head, float *ret_k, float *ret_v);
