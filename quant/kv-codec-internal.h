#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside quant/kv-*.c: how one group of values becomes codes.  opencl/kernels/attend-pack.cl and attend-group.cl must equal these bit
 * for bit, so every float operation has one order, products that feed a sum are explicit fmaf(), and division is our own.
 */

#include "quant/kv-codec.h"

#define KV_MAX_GROUP_DIMS 128

/* What is stored beside the codes of a group. */
typedef struct KvGroupScale {
    uint16_t scale, zero; /* zero: quanto, hqq */
} KvGroupScale;

/* Dims of one side of a head, and groups in it. */
static inline uint32_t kv_side_dim(const KvShape *shape, bool is_key)
{
    return is_key ? shape->k_head_dim : shape->v_head_dim;
}

static inline uint32_t kv_base_bits(uint32_t bits)
{
    return bits == 8 ? 8 : bits >= 4 ? 4 : 2;
}

/* Codes of @n values of one group. */
KvGroupScale kv_group_leat(const float *x, uint32_t n, int bits, KvLevels levels, uint8_t *ret_codes);
KvGroupScale kv_group_quanto(const float *x, uint32_t n, int bits, uint8_t *ret_codes);
KvGroupScale kv_group_hqq(const float *x, uint32_t n, int bits, uint8_t *ret_codes);

/* One number of fp8, @scale > 0; zero stands for NaN. */
uint8_t kv_group_fp8(float x, float scale);

/* What @form uses of a calibration; NULL: nothing. */
const float *kv_form_k_mean(KvForm form, const KvCalibration *calibration);
const float *kv_form_v_mean(KvForm form, const KvCalibration *calibration);
const float *kv_form_pair_scale(KvForm form, const KvCalibration *calibration);
float kv_form_fp8_scale(const KvCalibration *calibration, bool is_key);
