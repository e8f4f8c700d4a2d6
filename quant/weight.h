#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weight blocks of GGUF files: sizes, C reference decode, and the device layout that kernels read.
 *
 * A matrix is rows of n_cols elements; in the file each row is n_cols / block elements of blocks.  The device layout
 * groups 16 rows into a *tile* ("lane = row") and stores, per tile, one record per 32 columns (F32, F16, BF16, Q4_x,
 * Q5_x, Q8_0) or per 256 columns (K-quants), records in column order, tiles in row order, the last tile padded with zero
 * rows.  The layout loses nothing: decode(device layout) equals decode(file) bit for bit.  The record formats are
 * written down in weight-layout.c and in opencl/kernels/weight.cl, which must agree.
 */

#include "quant/base/error.h"

#include <stddef.h>
#include <stdint.h>

/* Values are ggml's type numbers in GGUF files (the GGUF specification). */
typedef enum WeightType {
    WEIGHT_TYPE_F32 = 0,
    WEIGHT_TYPE_F16 = 1,
    WEIGHT_TYPE_Q4_0 = 2,
    WEIGHT_TYPE_Q4_1 = 3,
    WEIGHT_TYPE_Q5_0 = 6,
    WEIGHT_TYPE_Q5_1 = 7,
    WEIGHT_TYPE_Q8_0 = 8,
    WEIGHT_TYPE_Q4_K = 12,
    WEIGHT_TYPE_Q5_K = 13,
    WEIGHT_TYPE_Q6_K = 14,
    WEIGHT_TYPE_BF16 = 30,
    WEIGHT_TYPE_X_INVALID = -EINVAL,
} WeightType;

#define WEIGHT_TILE_ROWS 16

typedef struct WeightTypeInfo {
    WeightType type;
    const char *name;
    uint32_t block_elements, block_bytes;         /* in the file */
    uint32_t record_columns, record_bytes;        /* on the device: one record covers WEIGHT_TILE_ROWS x record_columns */
} WeightTypeInfo;

/* NULL for a type that we do not support. */
const WeightTypeInfo *weight_type_info(uint32_t ggml_type);
/* The ggml name of any known type number ("IQ4_XS"), or NULL: for refusals by name. */
const char *weight_type_name(uint32_t ggml_type);

/* Bytes of a row in the file; -EINVAL when n_cols is not whole blocks, -EOVERFLOW. */
int weight_row_bytes(const WeightTypeInfo *info, uint64_t n_cols, uint64_t *ret);
/* Bytes of the device layout of n_rows x n_cols; -EINVAL when n_cols is not whole blocks, -EOVERFLOW. */
int weight_device_bytes(const WeightTypeInfo *info, uint64_t n_rows, uint64_t n_cols, uint64_t *ret);

/* C reference: @n elements (whole blocks) of a file row to float. */
void weight_decode(const WeightTypeInfo *info, const void *blocks, float *ret, size_t n);

/* Repacks file rows into the device layout.  @row_map: NULL, or n_rows entries: device row r is file row row_map[r]
 * (used to bring the q and k rows of arch "llama" from adjacent to half-split rotary pairs). */
void weight_pack(const WeightTypeInfo *info, const void *file_rows, uint64_t n_rows, uint64_t n_cols,
                 const uint32_t *row_map, void *ret_device);
/* The inverse of one row of the device layout to float, for tests and for references of kernels. */
void weight_device_decode_row(const WeightTypeInfo *info, const void *device, uint64_t n_rows, uint64_t n_cols, uint64_t row,
                              float *ret);

/* Activations of compute `fast`: blocks of 32, scale = max|x| / n, code = x * (n / max|x|) rounded half even, as every kernel must
 * do it; n is @max_code, WEIGHT_ACTIVATION_CODE or WEIGHT_ACTIVATION_FINE.  Kernels multiply a fine code as two of 8 bits,
 * 256 * high + low, high = (code + 128) >> 8, low in -128..127.  A block whose largest magnitude is below WEIGHT_ACTIVATION_MIN counts as zeros (scale 0); one with an
 * infinity or a NaN keeps it as its scale, with codes 0, so that the product is not a number either.
 * @n need not be whole blocks: codes and sums are written for whole blocks, missing values are zeros.
 * @ret_sum16: sums of the codes of each 16. */
#define WEIGHT_ACTIVATION_MIN  0x1p-100f
#define WEIGHT_ACTIVATION_CODE 127
#define WEIGHT_ACTIVATION_FINE 32512 /* 127 * 256 */
void weight_quantize_activations(const float *x, size_t n, int max_code, int16_t *ret_codes, float *ret_scales, int32_t *ret_sum16);
