#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The observable behaviour of Transformers' caches as an object in host memory, with its defects corrected: what update returns
 * to attend over and what is kept, mask sizes, lengths, crop, rows.  The compatibility mode of quantised caches runs on it, and
 * it is what the paged store (cache/kv-store.h) is compared with.
 *
 * Nouns and lifetimes:
 *   KvCompat       a list of layers.  A layer has an attention part (cache/kv-compat-layer.h), a linear part (convolution and
 *                  recurrent state), both (hybrid), or neither (dummy: a layer that shares another's).
 *   KvCompatPair   an encoder-decoder pair: self, cross, and which layers' cross keys have been computed.
 *
 * Layers are initialised by their first update, or early.  Every operation validates all layers first and applies after: on error
 * nothing has changed.  What differs from Transformers on purpose:
 *   - a full static layer refuses tokens before its cursor moves, and so does a static sliding layer with less room than its window;
 *   - removing more tokens than there are is refused, except from a layer that is not initialised, which has nothing to lose;
 *   - sliding layers refuse a crop that cannot restore the whole window; a window of 1 keeps nothing;
 *   - recurrent states go back exactly while recording is on, from snapshots; columns missing on the left of a convolution are zero;
 *   - rows can be reordered, repeated and selected in every kind; a static layer keeps its buffer when the row count stays, and
 *     takes another row count when it is empty;
 *   - recording that is activated before layers exist holds for those made later.
 * Codes are KvCompatError or negative errno.
 */

#include "cache/kv-compat-layer.h"

typedef struct KvCompat KvCompat;
typedef struct KvCompatPair KvCompatPair;

typedef enum KvCompatKind {
    KV_COMPAT_DUMMY,
    KV_COMPAT_DYNAMIC,
    KV_COMPAT_STATIC,
    KV_COMPAT_SLIDING,        /* and chunked: the same layer, only the mask differs */
    KV_COMPAT_STATIC_SLIDING, /* and chunked */
    KV_COMPAT_OTHER,          /* @class and @state */
    KV_COMPAT_KIND_X_MAX,
} KvCompatKind;

typedef struct KvCompatLayerSpec {
    KvCompatKind kind;    /* of the attention part */
    bool linear;          /* has convolution and recurrent state: alone with DUMMY, else hybrid */
    uint32_t window;      /* sliding: tokens, >= 1 */
    uint32_t max_tokens;  /* static: >= 1 */
    uint32_t n_states;    /* linear: pairs of states; 0 means 1 */
    const KvCompatClass *class; /* OTHER: borrowed, must outlive the cache */
    void *state;          /* OTHER: taken on success */
} KvCompatLayerSpec;

/* KV_COMPAT_E_VALUE names the layer. */
int kv_compat_new(const KvCompatLayerSpec *layers, uint32_t n_layers, KvCompat **ret, ErrorDetail *reterr);
/* A cache that starts without layers and makes those it is asked to update, all as @replicate (not OTHER). */
int kv_compat_new_replicating(const KvCompatLayerSpec *replicate, KvCompat **ret, ErrorDetail *reterr);
KvCompat *kv_compat_free(KvCompat *cache);
DEFINE_CLEANUP(KvCompat, kv_compat_free)
/* A deep copy. */
int kv_compat_copy(const KvCompat *cache, KvCompat **ret, ErrorDetail *reterr);

/* Lists of one entry hold for all layers, else n must be the number of layers (KV_COMPAT_E_VALUE).  Linear and dummy layers are
 * skipped, and layers that have been initialised. */
typedef struct KvCompatShapes {
    uint32_t n_rows;
    const uint32_t *n_heads, *k_widths, *v_widths;
    uint32_t n_n_heads, n_k_widths, n_v_widths;
} KvCompatShapes;
int kv_compat_early(KvCompat *cache, const KvCompatShapes *shapes, ErrorDetail *reterr);

/* K, V: (B, H, q, D) of this forward; @ret_k and @ret_v, what to attend over, are borrowed until the next operation on the layer. */
int kv_compat_update(KvCompat *cache, uint32_t layer, const KvTensor *k, const KvTensor *v, KvTensor *ret_k, KvTensor *ret_v,
                     ErrorDetail *reterr);
/* What is kept of it; KV_COMPAT_E_NO_STATE when nothing is, or the layer does not keep values. */
int kv_compat_stored(const KvCompat *cache, uint32_t layer, KvTensor *ret_k, KvTensor *ret_v, ErrorDetail *reterr);

/* Linear parts.  @x: columns before the convolution, (rows, channels, columns, 1); the first call fixes the kernel size (0: as many as
 * come).  @ret, borrowed until the next operation on that state: its columns in front of the new ones.  KV_COMPAT_E_NO_STATE on
 * a layer without a linear part. */
int kv_compat_update_conv(KvCompat *cache, uint32_t layer, uint32_t state, uint32_t kernel_size, const KvTensor *x, KvTensor *ret,
                          ErrorDetail *reterr);
/* @states: (rows, 1, steps, width), after tokens of this forward, oldest first; steps is @n_tokens, or 1: only the state after the last
 * token, and then no crop can end between them. */
int kv_compat_update_recurrent(KvCompat *cache, uint32_t layer, uint32_t state, uint32_t n_tokens, const KvTensor *states,
                               ErrorDetail *reterr);
/* What is stored, borrowed until that state changes: columns, and the newest recurrent state; KV_COMPAT_E_NO_STATE when there is none. */
int kv_compat_conv(const KvCompat *cache, uint32_t layer, uint32_t state, KvTensor *ret, ErrorDetail *reterr);
int kv_compat_recurrent(const KvCompat *cache, uint32_t layer, uint32_t state, KvTensor *ret, ErrorDetail *reterr);

/* Accessors.  Layer 0 of a length or mask means the first layer with an attention part, any other without one is
 * KV_COMPAT_E_NO_SEQUENCE; beyond the list: 0, (q, 0), -1. */
uint32_t kv_compat_n_layers(const KvCompat *cache);
int kv_compat_length(const KvCompat *cache, uint32_t layer, uint64_t *ret, ErrorDetail *reterr);
int kv_compat_mask_sizes(const KvCompat *cache, uint32_t layer, uint32_t n_tokens, uint64_t *ret_length, uint64_t *ret_offset,
                         ErrorDetail *reterr);
int64_t kv_compat_max_length(const KvCompat *cache, uint32_t layer);
/* The largest of all layers, so a window although others are unbounded; KV_COMPAT_E_VALUE without layers. */
int kv_compat_max_length_all(const KvCompat *cache, int64_t *ret, ErrorDetail *reterr);
int kv_compat_n_rows(const KvCompat *cache, int64_t *ret, ErrorDetail *reterr); /* -1: no layer is initialised */
bool kv_compat_is_croppable(const KvCompat *cache);
bool kv_compat_is_fixed(const KvCompat *cache);        /* all layers of fixed shape; false without layers */
bool kv_compat_is_sliding(const KvCompat *cache, uint32_t layer);
bool kv_compat_is_initialised(const KvCompat *cache);  /* all layers that can be */
bool kv_compat_has_previous_state(const KvCompat *cache); /* of the last layer with a linear part */
uint64_t kv_compat_bytes(const KvCompat *cache);

/* From now on what is appended can be removed again, in every kind.  Costs memory until the next crop. */
void kv_compat_record(KvCompat *cache);
/* Removes the last -n tokens (n <= 0) from every layer; 0 trims what was recorded.  All layers or none. */
int kv_compat_crop(KvCompat *cache, int64_t n, ErrorDetail *reterr);
/* New row r = old row rows[r]; rows may repeat.  Layers that are not initialised are skipped. */
int kv_compat_reorder(KvCompat *cache, const uint32_t *rows, uint32_t n_rows, ErrorDetail *reterr); /* n_rows as it is now */
int kv_compat_repeat(KvCompat *cache, uint32_t n_times, ErrorDetail *reterr);
int kv_compat_select(KvCompat *cache, const uint32_t *rows, uint32_t n_rows, ErrorDetail *reterr);
/* As new, recording included; static layers keep their buffers, zeroed. */
void kv_compat_reset(KvCompat *cache);

/* Offloading: the layer that is fetched while @layer works, the next that moves, wrapping; -1 when none does. */
int32_t kv_compat_next_offloadable(const KvCompat *cache, uint32_t layer, bool only_non_sliding);

/* Both are taken on success.  Layers of cross that hold tokens count as computed. */
int kv_compat_pair_new(KvCompat *self, KvCompat *cross, KvCompatPair **ret);
KvCompatPair *kv_compat_pair_free(KvCompatPair *pair);
DEFINE_CLEANUP(KvCompatPair, kv_compat_pair_free)
int kv_compat_pair_copy(const KvCompatPair *pair, KvCompatPair **ret, ErrorDetail *reterr);
/* Borrowed.  Lengths, masks and flags of a pair are those of self. */
KvCompat *kv_compat_pair_self(KvCompatPair *pair);
KvCompat *kv_compat_pair_cross(KvCompatPair *pair);
/* Whether the cross keys of a layer have been computed; they are then reused at every step. */
bool kv_compat_pair_is_updated(const KvCompatPair *pair, uint32_t layer);
/* Takes them in; KV_COMPAT_E_VALUE when they are there. */
int kv_compat_pair_update_cross(KvCompatPair *pair, uint32_t layer, const KvTensor *k, const KvTensor *v, KvTensor *ret_k,
                                KvTensor *ret_v, ErrorDetail *reterr);
int kv_compat_pair_crop(KvCompatPair *pair, int64_t n, ErrorDetail *reterr); /* self only */
/* Of both, or of none. */
int kv_compat_pair_reorder(KvCompatPair *pair, const uint32_t *rows, uint32_t n_rows, ErrorDetail *reterr);
int kv_compat_pair_repeat(KvCompatPair *pair, uint32_t n_times, ErrorDetail *reterr);
int kv_compat_pair_select(KvCompatPair *pair, const uint32_t *rows, uint32_t n_rows, ErrorDetail *reterr);
void kv_compat_pair_reset(KvCompatPair *pair);
