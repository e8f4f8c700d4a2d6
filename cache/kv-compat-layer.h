#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One attention layer of a compatibility cache (cache/kv-compat.h) as a class with a state: dynamic, static, sliding; quantised
 * forms are classes of their own.  Float32 on the host, the whole layer at hand: for exactness, not for speed.
 *
 *   KvTensor  a view of (n_rows, n_heads, n_tokens, width); it owns nothing.
 *   KvHeld    a tensor that a layer owns, with room to grow.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stdint.h>

/* Conditions that the operations document; negative errnos besides. */
typedef enum KvCompatError {
    KV_COMPAT_E_OK,
    KV_COMPAT_E_VALUE,         /* an argument out of range: a positive crop, bad lists of early initialisation */
    KV_COMPAT_E_SHAPE,         /* rows, heads or widths differ from what the layer was initialised with */
    KV_COMPAT_E_FULL,          /* static: more tokens than fit */
    KV_COMPAT_E_INDEX,         /* no such layer, row or state */
    KV_COMPAT_E_NO_SEQUENCE,   /* a layer without tokens was asked for its length or masks */
    KV_COMPAT_E_NO_STATE,      /* the layer stores nothing of that kind */
    KV_COMPAT_E_NOT_RECORDING, /* crop of what was not recorded: activate recording before the forward */
    KV_COMPAT_E_GONE,          /* crop deeper than what is still held */
} KvCompatError;

/* Value of (b, h, t, d): values[((b * n_heads + h) * head_tokens + t) * width + d]; head_tokens >= n_tokens. */
typedef struct KvTensor {
    const float *values;
    uint32_t n_rows, n_heads, n_tokens, width;
    uint32_t head_tokens;
} KvTensor;

static inline const float *kv_tensor_at(const KvTensor *tensor, uint32_t row, uint32_t head, uint32_t token)
{
    return tensor->values + ((size_t)(row * tensor->n_heads + head) * tensor->head_tokens + token) * tensor->width;
}
/* Dense copy: (n_rows, n_heads, n_tokens, width) floats at @ret. */
void kv_tensor_copy(const KvTensor *tensor, float *ret);

typedef struct KvHeld {
    float *values; /* as a KvTensor with head_tokens = capacity; room that was never written is zero */
    uint32_t n_rows, n_heads, width;
    uint32_t n_first, n_tokens; /* held are slots n_first .. n_first + n_tokens - 1 */
    uint32_t capacity;
} KvHeld;

#define KV_HELD_NULL ((KvHeld){0})

void kv_held_deinit(KvHeld *held);
/* Empty, with room for @capacity tokens of the shape of @like.  -ENOMEM. */
int kv_held_init(KvHeld *held, const KvTensor *like, uint32_t capacity);
/* Whether it has rows, heads and width of @like. */
bool kv_held_is_like(const KvHeld *held, const KvTensor *like);
/* Room for @n_more behind what is held, which may move.  -ENOMEM. */
int kv_held_reserve(KvHeld *held, uint32_t n_more);
/* Behind what is held; the room is there. */
void kv_held_append(KvHeld *held, const KvTensor *more);
/* Into the slots from @slot on, whatever is held. */
void kv_held_write(KvHeld *held, uint32_t slot, const KvTensor *tokens);
/* Lets the oldest, the newest go. */
void kv_held_drop_front(KvHeld *held, uint32_t n_tokens);
void kv_held_drop_back(KvHeld *held, uint32_t n_tokens);
/* Gives back room that is far more than needed, when memory for the smaller copy is there. */
void kv_held_trim(KvHeld *held);
/* @n_tokens of what is held, from the @from-th. */
KvTensor kv_held_view(const KvHeld *held, uint32_t from, uint32_t n_tokens);
/* New row r = old row rows[r], with the same room.  -ENOMEM. */
int kv_held_copy_rows(const KvHeld *held, const uint32_t *rows, uint32_t n_rows, KvHeld *ret);
/* Contents of @other, which is emptied: into the same memory when the sizes agree. */
void kv_held_adopt(KvHeld *held, KvHeld *other);
uint64_t kv_held_bytes(const KvHeld *held);

/*
 * What a class must do.  @self is the state of one layer.  Codes: KvCompatError or negative errno, with the detail set; on error
 * nothing has changed.  Functions without a result cannot fail.  Tensors that are returned are borrowed until the next operation on
 * the layer.  The cache checks before: n_tokens >= 1; k and v agree; heads and widths are those of before, and so are rows unless the
 * length is 0 (then update() may give others, as at the first time and after a reset); row indices are in range.
 */
typedef struct KvCompatClass {
    const char *name;
    bool is_sliding;
    bool is_fixed; /* buffers of fixed shape, which stay at a reset */

    void *(*free)(void *self); /* takes NULL, returns NULL */
    /* Shapes before the first update(). */
    int (*early)(void *self, uint32_t n_rows, uint32_t n_heads, uint32_t k_width, uint32_t v_width, ErrorDetail *reterr);
    /* Takes the new tokens in; returns what this forward attends over. */
    int (*update)(void *self, const KvTensor *k, const KvTensor *v, KvTensor *ret_k, KvTensor *ret_v, ErrorDetail *reterr);
    /* What is kept, as values; may be NULL. */
    void (*stored)(const void *self, KvTensor *ret_k, KvTensor *ret_v);
    /* Of the next update with @n_tokens: how many keys it will return, and the absolute position of the first. */
    void (*mask_sizes)(const void *self, uint32_t n_tokens, uint64_t *ret_length, uint64_t *ret_offset);
    uint64_t (*length)(const void *self);
    int64_t (*max_length)(const void *self); /* -1: unbounded */
    bool (*is_croppable)(const void *self);
    void (*record)(void *self); /* may be NULL */
    /* Whether the last @n_remove tokens (0: only trim what was recorded) can go; then crop() does it. */
    int (*check_crop)(const void *self, uint64_t n_remove, ErrorDetail *reterr);
    void (*crop)(void *self, uint64_t n_remove);
    /* A state of its own with new row r = old row rows[r]; n_rows 0 before anything is initialised. */
    int (*copy_rows)(const void *self, const uint32_t *rows, uint32_t n_rows, void **ret, ErrorDetail *reterr);
    /* Takes over what @other, made by copy_rows() of this one, holds, and frees it; NULL: the states are exchanged. */
    void (*adopt)(void *self, void *other);
    void (*reset)(void *self);
    uint64_t (*bytes)(const void *self);
} KvCompatClass;

/* The classes of this folder; -ENOMEM.  Windows and capacities are at least 1. */
int kv_compat_dynamic_new(void **ret);
int kv_compat_sliding_new(uint32_t window, void **ret);
int kv_compat_static_new(uint32_t max_tokens, void **ret);
int kv_compat_static_sliding_new(uint32_t window, uint32_t max_tokens, void **ret);
extern const KvCompatClass kv_compat_dynamic_class, kv_compat_sliding_class;
extern const KvCompatClass kv_compat_static_class, kv_compat_static_sliding_class;
