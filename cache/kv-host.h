#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compatibility mode: layers as Transformers' quantised caches have them, value for value, on the host.
 *
 * The store then has no pages: a layer's past is a quantised layer of cache/kv-compat-quantized.h, whole and decoded at every pass, and
 * attention over it is a plain sum in C.  That is slow on purpose: it is what the numbers of others are compared with.  Keys and values are
 * rounded to float16 before (float32 with `compute: exact`), as a model in that type would hand them over.
 *
 * What one update of Transformers is depends on the calls, not on positions: a prompt is one update however many passes it takes
 * (kv_cache_set_more()), a decode step is one.  Until a prompt's last pass its keys and values are *pending*, in full.
 *
 * Only for models all of whose layers are full attention, as there.
 */

#include "cache/kv-image.h"
#include "cache/kv-store.h"

typedef struct KvHost KvHost;         /* of a store */
typedef struct KvHostPast KvHostPast; /* of a sequence */

/* KvError, -EINVAL or -ENOTSUP naming the layer. */
int kv_host_new(Gpu *gpu, const KvModel *model, const KvPolicy *policy, KvHost **ret, ErrorDetail *reterr);
/* What a sequence will need of the host: for each token, and beside that for its residual.  An upper bound, but for rounding of rows. */
void kv_host_plan(const KvModel *model, const KvPolicy *policy, uint64_t *ret_bytes_per_token, uint64_t *ret_residual_bytes);
KvHost *kv_host_free(KvHost *host);
DEFINE_CLEANUP(KvHost, kv_host_free)

/* Whether pasts of @a go on in @b with the same numbers: the same keys, type and layers. */
bool kv_host_is_same(const KvHost *a, const KvHost *b);
/* Its keys in words. */
void kv_host_describe(const KvHost *host, char *ret, size_t size);

KvHostPast *kv_host_past_new(const KvHost *host); /* NULL when memory is short */
/* Of @host, which is the same as the past's own, or is it. */
KvHostPast *kv_host_past_copy(const KvHost *host, const KvHostPast *past);
KvHostPast *kv_host_past_free(KvHostPast *past);
void kv_host_past_clear(KvHostPast *past);
/* Takes the last @n tokens away: exact, also of what is quantised.  KV_E_HOST_MEMORY; then nothing has changed. */
int kv_host_past_crop(KvHostPast *past, uint32_t n, ErrorDetail *reterr);
/* Tokens of a prompt whose last pass is to come. */
uint32_t kv_host_past_pending(const KvHostPast *past);
uint64_t kv_host_past_bytes(const KvHostPast *past);
DEFINE_CLEANUP(KvHostPast, kv_host_past_free)

/* In files (kv-file-host.c).  What bytes mean here, mixed into @seed. */
uint64_t kv_host_layout(const KvHost *host, uint64_t seed);
/* Adds the past's chunks; their memory is that of the past, and *ret_memory, for the caller to free.  Negative errno. */
int kv_host_past_save(const KvHostPast *past, KvImage *image, void **ret_memory);
/* A past of @length tokens.  KvError, -EBADMSG when it does not add up. */
int kv_host_past_restore(const KvHost *host, const KvImage *image, uint32_t length, KvHostPast **ret, ErrorDetail *reterr);

/* One pass: what it adds to a sequence of @length tokens.  KV_E_HOST_MEMORY. */
int kv_host_past_begin(KvHostPast *past, uint32_t length, uint32_t n_tokens);
void kv_host_past_commit(KvHostPast *past, bool more);
void kv_host_past_abort(KvHostPast *past);
/* All sequences of the pass in the order of its rows.  qkv and out as in opencl/attend.h.  KvError. */
int kv_host_layer(KvHost *host, uint32_t layer, KvHostPast *const *pasts, uint32_t n_pasts, const GpuBuffer *qkv, GpuBuffer *out,
                  ErrorDetail *reterr);
