#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forms in which keys and values of the past are kept, with the C reference of each.
 *
 * A *page* is KV_PAGE_TOKENS consecutive tokens of one layer, starting at a multiple of it.  A page's bytes are n_kv_heads
 * *records*, one per key/value head; a record is K codes, V codes, then scales, and is a multiple of 64 bytes.
 *
 * Form `leat` (K and V bits apart, 8, 5 or 4), the recipe measured in the project's README:
 *   k' = H (k - R_j m),  v' = H (v - u)    m: calibrated mean key before RoPE; u: mean value; R_j: rotation of position j;
 *                                          H: orthonormal Hadamard, in blocks for head sizes that are no power of two
 *   per token, head and group of up to 64 dims: code c in 0..2^b-1 stands for s * (c - (2^b - 1) / 2 + z / 4), with scale s and offset
 *   z searched together for the least squared error.  They share 16 bits: s is an f16 whose low four bits are zero, and there lies
 *   z + 8, -8 <= z <= 7.  At 4 bits this has 8 % less squared error on Gaussian groups of 64 than 16 Lloyd-Max levels with an f16 scale.
 * Forms `f16` and `f32` keep the values as they are (in the kernels' layout).
 *
 * What attention computes from it (exactly, for the decoded values):
 *   q . k_j = (H q) . dec(k'_j) + sum_f [ C_f cos(j t_f) + S_f sin(j t_f) ],   C_f = q_f m_f + q_g m_g,  S_f = q_g m_f - q_f m_g
 *             with (f, g = f + rotary_dim / 2) a rotary pair, t_f its frequency; channels without RoPE add a constant that
 *             drops out of the softmax but is kept
 *   sum p v = H^T sum p dec(v') + u sum p
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KV_PAGE_TOKENS  32 /* also the flush granularity: the full-precision tail holds 32 to 63 tokens before the query's */
#define KV_BLOCK_PAGES  8  /* the unit of summation: partial results of 8 pages merge in order */
#define KV_GROUP_DIMS   64
#define KV_SINK_TOKENS  4  /* the first tokens stay in full precision for ever */

typedef enum KvFormKind {
    KV_FORM_F32,
    KV_FORM_F16,
    KV_FORM_LEAT,
    KV_FORM_X_MAX,
    KV_FORM_X_INVALID = -EINVAL,
} KvFormKind;

typedef struct KvForm {
    KvFormKind kind;
    uint8_t k_bits, v_bits; /* leat: 8, 5 or 4 each; else 0 */
} KvForm;

/* The shape of one layer's cache. */
typedef struct KvShape {
    uint32_t n_heads, n_kv_heads; /* n_heads is a multiple of n_kv_heads */
    uint32_t head_dim;            /* of K and of V; a multiple of 16, at most 256 */
    uint32_t rotary_dim;          /* even, <= head_dim; pairs are (f, f + rotary_dim / 2) */
} KvShape;

/* Byte layout of a record; all offsets from the record's start. */
typedef struct KvLayout {
    uint32_t record_bytes, page_bytes;
    uint32_t k_offset, k_high_offset, v_offset, v_high_offset, k_scale_offset, v_scale_offset;
    uint32_t n_groups; /* scales per token and side */
} KvLayout;

/* What calibration measured for one layer; both zero when not calibrated. */
typedef struct KvCalibration {
    float *k_mean; /* (n_kv_heads, head_dim): mean key before RoPE */
    float *v_mean; /* (n_kv_heads, head_dim) */
} KvCalibration;

/* 0 or -EINVAL with the culprit (bits, head_dim) in the detail. */
int kv_layout(KvForm form, const KvShape *shape, KvLayout *ret, ErrorDetail *reterr);

/* Bits per cached value at @n_tokens, everything counted (codes, scales, sinks, tail in tail_bits). */
double kv_true_bits(KvForm form, const KvShape *shape, uint32_t n_tokens, uint32_t tail_bits);

/* In place, orthonormal Hadamard of each power-of-two block (64 + 16 for 80); its own inverse. */
void kv_hadamard(float *x, uint32_t n);

/* What the search for scale and offset tries, per bits; the packing kernel gets it as an argument.  [0, KV_N_FACTORS): fractions of the
 * scale that just covers the group; [KV_SEARCH_STEP]: relative step of the refinement. */
#define KV_N_FACTORS     6
#define KV_SEARCH_STEP   6
#define KV_SEARCH_FLOATS 8
const float *kv_search(uint8_t bits);

/* C reference of packing: k, v: (KV_PAGE_TOKENS, n_kv_heads, head_dim), k already rotated by RoPE with @rope: (KV_PAGE_TOKENS,
 * rotary_dim / 2, 2) cos and sin of the page's positions.  @calibration may be NULL (means zero). */
void kv_pack_page(KvForm form, const KvShape *shape, const KvCalibration *calibration, const float *rope, const float *k,
                  const float *v, void *ret_page);
/* C reference of decoding: dec(k'), dec(v') of one head of a page, (KV_PAGE_TOKENS, head_dim) each. */
void kv_unpack_page(KvForm form, const KvShape *shape, const void *page, uint32_t kv_head, float *ret_k, float *ret_v);
