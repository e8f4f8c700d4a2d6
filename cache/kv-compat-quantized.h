#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The quantised layer of a compatibility cache: Transformers' schedule, value for value.
 *
 *   first update    K and V are quantised whole; what is returned are the originals
 *   later updates   return what is stored, decoded, then the residual, then the new tokens.  quanto and hqq: once residual and new
 *                   tokens are residual_length or more, the whole returned sequence is quantised anew and the residual is empty, else
 *                   the new tokens join the residual.  fp8: the new tokens are encoded under the first update's scale, and what is
 *                   returned is decoded, the new ones too.
 *   rows            reorder, repeat and select choose rows of the residual at once, and of what is stored when it is decoded next; so
 *                   it is exact on every axis, and the next quantising bakes it in (fp8: at the next update)
 *
 * Beyond Transformers, which crops the residual only and then reports a wrong length: crop takes any number of tokens.  Tokens of the
 * residual go first; stored ones go in codes where no group mixes them with others (kv_quantized_can_gather()), else they are left out
 * of what is decoded until the next quantising.  The tokens that stay keep their values; the schedule goes on from the residual that
 * is left.  A layer cropped to nothing is as new.  Repeat and select work on everything.
 *
 * Transient memory: what update returns is held until the next operation on the layer, or kv_compat_quantized_release().
 */

#include "cache/kv-compat-layer.h"
#include "quant/kv-fp8.h"
#include "quant/kv-quant-options.h"

extern const KvCompatClass kv_compat_quantized_class;

/* The state of one layer of that class.  @dtype: of the model's K and V, whose values updates bring as floats; @fp8_rule: how fp8 finds
 * its scale.  -ENOMEM. */
int kv_compat_quantized_new(const KvQuantOptions *options, KvDtype dtype, KvFp8Rule fp8_rule, void **ret, ErrorDetail *reterr);

/* What a layer of a single row holds, for saving and restoring it.  Borrowed from the layer; taken by it. */
typedef struct KvCompatQuantizedParts {
    KvQuantized *k, *v;   /* NULL: nothing has come yet, and all else is zero */
    KvHeld k_residual, v_residual;
    uint32_t n_stored;    /* tokens of k and v that count; those behind were cropped */
    uint64_t n_saturated;
} KvCompatQuantizedParts;
void kv_compat_quantized_parts(const void *self, KvCompatQuantizedParts *ret);
/* Into a layer as new. */
void kv_compat_quantized_take(void *self, KvCompatQuantizedParts *parts);

/* Lets go of what the last update returned. */
void kv_compat_quantized_release(void *self);

/* Tokens in the residual; values that fp8 cut off since the last reset. */
uint32_t kv_compat_quantized_residual(const void *self);
uint64_t kv_compat_quantized_saturated(const void *self);
