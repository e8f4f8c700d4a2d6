#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The linear part of a compatibility layer: pairs of a convolution state (the last columns) and a recurrent state.
 *
 * Both know at which position they are.  While recording, all columns and all states that come are kept until the next crop: a crop
 * to position p takes the columns before p (zeros before position 0) and the state that was there after p tokens.
 */

#include "cache/kv-compat-layer.h"

typedef struct KvLinear KvLinear;

int kv_linear_new(uint32_t n_states, KvLinear **ret);
KvLinear *kv_linear_free(KvLinear *linear);
DEFINE_CLEANUP(KvLinear, kv_linear_free)

/* As kv_compat_update_conv() and the like (cache/kv-compat.h). */
int kv_linear_update_conv(KvLinear *linear, uint32_t state, uint32_t kernel_size, const KvTensor *x, KvTensor *ret, ErrorDetail *reterr);
int kv_linear_update_recurrent(KvLinear *linear, uint32_t state, uint32_t n_tokens, const KvTensor *states, ErrorDetail *reterr);
int kv_linear_conv(const KvLinear *linear, uint32_t state, KvTensor *ret, ErrorDetail *reterr);
int kv_linear_recurrent(const KvLinear *linear, uint32_t state, KvTensor *ret, ErrorDetail *reterr);

bool kv_linear_has_previous(const KvLinear *linear);
bool kv_linear_is_croppable(const KvLinear *linear);
bool kv_linear_is_recording(const KvLinear *linear);
uint32_t kv_linear_n_rows(const KvLinear *linear); /* 0: nothing is held */
uint64_t kv_linear_bytes(const KvLinear *linear);

void kv_linear_record(KvLinear *linear);
int kv_linear_check_crop(const KvLinear *linear, uint64_t n_remove, ErrorDetail *reterr);
void kv_linear_crop(KvLinear *linear, uint64_t n_remove); /* after check; cannot fail */
int kv_linear_copy_rows(const KvLinear *linear, const uint32_t *rows, uint32_t n_rows, KvLinear **ret, ErrorDetail *reterr);
void kv_linear_reset(KvLinear *linear);
