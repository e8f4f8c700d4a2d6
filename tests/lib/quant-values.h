#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The values and digests of tests/data/make-quant-golden.py, made again: bit for bit the same. */

#include "quant/kv-quantized.h"

uint32_t quant_hash(uint32_t seed, uint32_t i);
/* Nearly Gaussian, at most 3.5 in size. */
float quant_normal(uint32_t seed, uint32_t i);
/* ret: (shape), rounded to the type.  @kind: as in the script; false when it is unknown. */
bool quant_values(const char *kind, uint32_t seed, const KvTensorShape *shape, KvDtype dtype, float *ret);
/* FNV-1a over the floats' bits; zeros without sign, one NaN. */
uint64_t quant_digest(const float *x, uint64_t n);
/* "f32", "f16", "bf16", or KV_DTYPE_X_INVALID. */
KvDtype quant_dtype(const char *name);
/* Bytes written in hexadecimal; how many, or -1. */
int64_t quant_unhex(const char *text, uint8_t *ret, size_t max);
