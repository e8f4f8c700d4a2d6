#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is kept of the past.
 *
 * Nouns and lifetimes:
 *   KvStore   pages, ring and kernels for one model under one policy.  Outlives its caches.
 *   section   (inside a store) the layers that agree in kind, shape, form, home, window, scale and rotary frequencies: they have
 *             arenas, a schedule and kernels together.  A uniform model has one.
 *   KvCache   the past of one sequence: in each section a list of reference-counted blocks of pages (a page slot spans all layers of
 *             the section), a tail slot on the device, checkpoints of the tail.  Forks share pages and the tail until they are
 *             written; a complete block of pages is never written again, so it is shared for ever.
 *   KvPass    one forward pass: which rows belong to which caches, the tiles that it will read, in the order of reading.
 *
 * A policy has three independent axes: growth (dynamic, static), home (device, host), form (f32, f16, leat).  The named strategies
 * of the configuration are presets of these (kv_policy_preset).
 *
 * Rules (tested bit for bit):
 *   - which keys a query sees packed depends on positions only (opencl/attend.h);
 *   - a block of pages is the unit of summation: tile size, ring, home and budget do not change a bit of the output.
 *
 * Every operation validates first and applies after: on error nothing has changed.  No function here knows a token's text.
 */

#include "cache/kv-budget.h"
#include "opencl/attend.h"
#include "opencl/gpu.h"
#include "quant/kv-codec.h"
#include "quant/kv-quant-options.h"

typedef enum KvGrowth { KV_GROWTH_DYNAMIC, KV_GROWTH_STATIC } KvGrowth;
typedef enum KvHome { KV_HOME_DEVICE, KV_HOME_HOST } KvHome;
typedef enum KvTransfer { KV_TRANSFER_AUTO, KV_TRANSFER_COPY, KV_TRANSFER_ZERO_COPY } KvTransfer;

typedef enum KvStrategy {
    KV_STRATEGY_DYNAMIC,
    KV_STRATEGY_STATIC,
    KV_STRATEGY_OFFLOADED,
    KV_STRATEGY_OFFLOADED_STATIC,
    KV_STRATEGY_QUANTIZED,
    KV_STRATEGY_OFFLOADED_QUANTIZED, /* the default */
    KV_STRATEGY_NONE, /* no cache: as dynamic, and whoever runs passes clears the cache and runs all tokens again each time */
    KV_STRATEGY_X_MAX,
    KV_STRATEGY_X_INVALID = -EINVAL,
} KvStrategy;

const char *kv_strategy_to_string(KvStrategy strategy);
KvStrategy kv_strategy_from_string(const char *name); /* KV_STRATEGY_X_INVALID when unknown */

/* What was measured, to decide which share of a cache at home on the host is worth keeping on the device; 0: unknown. */
typedef struct KvRates {
    uint64_t device_bytes_per_second, link_bytes_per_second; /* kernels that read the cache; copies to the device */
    uint64_t weight_bytes_per_layer;                         /* read between the attention of two layers */
} KvRates;

/* Bits of layers [first, last] that are not those of the form. */
typedef struct KvLayerBits {
    uint16_t first, last;
    uint8_t k_bits, v_bits;
} KvLayerBits;
#define KV_MAX_LAYER_BITS  32
#define KV_LAYER_BITS_TEXT 512 /* room for the text of so many */

typedef struct KvPolicy {
    KvStrategy strategy; /* the preset it came from, for display */
    KvGrowth growth;
    KvHome home;
    KvForm form;
    uint32_t n_layer_bits;
    KvLayerBits layer_bits[KV_MAX_LAYER_BITS]; /* ascending, apart; of no matter to layers whose form is not coded */
    bool is_compatible;            /* layers as Transformers' quantised caches have them, on the host (cache/kv-host.h): growth, home, form and
                                    * ring are of no matter */
    KvQuantOptions compatible;
    bool offload_only_non_sliding; /* home host: sliding and chunked layers stay on the device, unquantised */
    KvTransfer transfer;
    uint32_t n_slots;              /* staging buffers of the ring, 1-8 */
    uint32_t max_cache_tokens;     /* static: reserved; dynamic: refused beyond */
    uint64_t host_budget_bytes;    /* for pages and checkpoints; 0: only what the stores of a daemon share (KvModel) */
    uint64_t device_budget_bytes;  /* for staging + tails (+ pages when home is the device); 0: what the device's budget allows.  Home host,
                                    * copied: what is left holds a resident share of the pages, of every layer the same */
    KvRates rates;                 /* limit the resident share to what the link cannot feed in time */
    uint32_t tile_blocks;          /* blocks of pages a tile holds at most; 0: chosen from the device budget */
    double kld_budget;             /* for who chooses bits of KV_BITS_AUTO, which no store takes: the mean divergence they may add */
} KvPolicy;
#define KV_KLD_BUDGET 0.002

/* The preset with its defaults; @exact makes unquantised forms f32, else f16; leat is K 5, V 4 bits. */
KvPolicy kv_policy_preset(KvStrategy strategy, bool exact);

/* The form with the bits that a layer has. */
KvForm kv_policy_layer_form(const KvPolicy *policy, uint32_t layer);
bool kv_layer_bits_equal(const KvPolicy *a, const KvPolicy *b);
/* "0-1:8/8 29:6/5". */
void kv_layer_bits_to_text(const KvLayerBits *bits, uint32_t n, char *ret, size_t size);

/* What a layer keeps of the past, and which keys a query at position i sees of it. */
typedef enum KvLayerKind {
    KV_LAYER_FULL,    /* all: [0, i] */
    KV_LAYER_SLIDING, /* the last `window`: (i - window, i] */
    KV_LAYER_CHUNKED, /* those of the same chunk: [i / window * window, i] */
    KV_LAYER_CROSS,   /* all keys of an encoder's output, written once (kv_cross_begin) */
    KV_LAYER_SHARED,  /* what an earlier layer keeps, by that layer's rules */
    KV_LAYER_NONE,    /* no keys: nothing, or a state only; kv_pass_layer() is not called for it */
} KvLayerKind;

/* One layer; where a field is zero the model's own value holds.  A layer with state bytes is recurrent (kind none) or hybrid. */
typedef struct KvLayer {
    KvLayerKind kind;
    uint32_t window;       /* sliding, chunked */
    uint32_t source;       /* shared: the layer whose keys and values it reads, not a shared one itself; its shape and form hold */
    KvShape shape;
    float scale;
    const float *inv_freq;
    float softcap;         /* scores become softcap * tanh(score / softcap); 0: they stay */
    const float *sink_logits; /* (n_heads): take part in the softmax without a value; NULL: none; borrowed during kv_store_new() */
    const KvForm *form;    /* instead of the policy's, for this layer; borrowed during kv_store_new() */
    uint64_t conv_bytes, recurrent_bytes; /* of one sequence's state: kv_pass_state() */
} KvLayer;

/* What the store must know of the model. */
typedef struct KvModel {
    uint32_t n_layers;
    const KvLayer *layers;           /* (n_layers), borrowed during kv_store_new(); NULL: all are full and alike */
    KvShape shape;
    float scale;                     /* of attention scores */
    const float *inv_freq;           /* (rotary_dim / 2), borrowed during kv_store_new() */
    const KvCalibration *calibration; /* (n_layers), or NULL; borrowed during kv_store_new() */
    bool exact;
    uint32_t max_rows;               /* rows of the largest pass */
    uint32_t max_sequences;          /* tail slots */
    uint32_t max_cross_tokens;       /* longest encoder output; 0: there are no cross layers */
    uint32_t max_state_steps;        /* states that a pass may keep beside those at its end: kv_cache_record() */
    KvBudget *host_memory;           /* of the caches of several stores together; borrowed as long as the store lives; NULL: none */
} KvModel;

typedef struct KvStore KvStore;
typedef struct KvCache KvCache;
typedef struct KvPass KvPass;

typedef enum KvError {
    KV_E_OK,
    KV_E_DEVICE_MEMORY, /* numbers in the detail; nothing changed */
    KV_E_HOST_MEMORY,   /* the host budget or the system refuses */
    KV_E_CONTEXT,       /* beyond max_cache_tokens */
    KV_E_DEVICE,        /* GPU_E_HUNG or GPU_E_LOST below; see the detail */
    KV_E_ROLLBACK,      /* what going back there would need has not been recorded */
} KvError;

int kv_store_new(Gpu *gpu, const KvModel *model, const KvPolicy *policy, KvStore **ret, ErrorDetail *reterr);
KvStore *kv_store_free(KvStore *store);
DEFINE_CLEANUP(KvStore, kv_store_free)
const KvPolicy *kv_store_policy(const KvStore *store); /* with every automatic value filled in */
/* After KV_E_HOST_MEMORY: whether caches of other stores can make room, too, for what they share leaves no more than the store's own budget. */
bool kv_store_others_can_help(const KvStore *store);

/* Bytes before anything is allocated, for the planner; equal what the allocator shows after kv_store_new() (host home: arenas
 * that are read in place are not device memory). */
typedef struct KvPlan {
    uint64_t staging_bytes;     /* the ring, and scratch for the pages that a pass completes */
    uint64_t tail_bytes;        /* max_sequences tail slots, twice as many slots of states, max_state_steps more */
    uint64_t operand_bytes;     /* the kernels' operands, step inputs, calibration */
    uint64_t device_page_bytes; /* home device: pages of one static cache, or the first step of growth; home host: the resident share */
    uint64_t host_bytes_per_token; /* of layers that keep everything */
    uint64_t host_window_bytes;    /* of one sequence: windows and encoder output at their longest; compatibility mode: the residual */
    uint32_t tile_blocks, n_slots; /* n_slots 0: tiles are read in place */
} KvPlan;
int kv_store_plan(const GpuInfo *info, const KvModel *model, const KvPolicy *policy, KvPlan *ret, ErrorDetail *reterr);

int kv_cache_new(KvStore *store, KvCache **ret, ErrorDetail *reterr);
KvCache *kv_cache_free(KvCache *cache);
DEFINE_CLEANUP(KvCache, kv_cache_free)
/* Copy-on-write: shares pages and tail; costs pointers. */
int kv_cache_fork(KvCache *cache, KvCache **ret, ErrorDetail *reterr);
uint32_t kv_cache_length(const KvCache *cache);

/* Keeps at most the first n_keep tokens.  A packed form can go on exactly only from a place whose recent tokens are still there in
 * full precision (the live tail or a checkpoint), a windowed layer only where its window is, a state only where it was kept (the end of
 * a recorded pass, a checkpoint); so @ret_length <= n_keep is what is left: the caller runs tokens [ret_length, n_keep) again.
 * Unquantised full layers always keep n_keep. */
int kv_cache_crop(KvCache *cache, uint32_t n_keep, uint32_t *ret_length, ErrorDetail *reterr);
/* What it would leave. */
uint32_t kv_cache_crop_length(const KvCache *cache, uint32_t n_keep);
/* From now on tokens can be taken back: windows are kept, states, and recent tokens before they are overwritten.  Any token of a pass of up
 * to KV_PAGE_TOKENS, and the beginning and end of longer ones; with states those of passes for which there were slots (max_state_steps, in
 * the order of the items), and the ends of others.  The last 64 states are kept, and recent tokens for the last 7 pages of a packed form.
 * That costs memory until the next kv_caches_crop(), which begins anew; @on false, kv_cache_clear() and a crop to nothing end it.  -EBUSY. */
int kv_cache_record(KvCache *cache, bool on);
/* Saves the live tail in host memory as a place to crop back to.  Kept are the newest few and older ones evenly spaced; their bytes
 * count in the host budget, and when that is short the oldest of the store give way before anything is refused.  KvError. */
int kv_cache_checkpoint(KvCache *cache);
/* Whether it, or a fork, cropped to any length, goes on as a sequence does that runs the same tokens from the beginning.  In compatibility
 * mode only before the first prompt is complete: what is quantised then depends on where prompts ended. */
bool kv_cache_is_as_cold(const KvCache *cache);
/* Empty and reusable. */
int kv_cache_clear(KvCache *cache);
/* So many tokens more, whose keys and values are zeros, and those in no page yet with them, without a pass: for who measures what a past
 * costs.  Not within a step of the device.  -ENOTSUP where that is not all that a layer keeps (windows, states, compatibility mode); KvError. */
int kv_cache_add_blank(KvCache *cache, uint32_t n_tokens, ErrorDetail *reterr);

typedef struct KvBytes {
    uint64_t host, device; /* blocks of pages (those shared with forks included), and the tail where it is */
    uint64_t staging;      /* of the whole store */
    uint64_t checkpoints;  /* those shared with forks included */
    uint32_t n_pages, n_pages_shared, length;
} KvBytes;
void kv_cache_bytes(const KvCache *cache, KvBytes *ret);

/* ---- sets of caches of one store, one a row of a batch: all rows or none, and none of them in a pass --------------------------- */

/* In compatibility mode rows are refused (-ENOTSUP) where Transformers codes those of a batch together (kv_quant_rows_are_apart()).
 *
 * Row r becomes what row rows[r] was: pages are shared.  The first min(n, n_rows) caches stay, others are freed or, in @caches, which has
 * room for the larger number, made.  A static cache that is made reserves its own capacity. */
int kv_caches_select(KvCache **caches, uint32_t n, const uint32_t *rows, uint32_t n_rows, ErrorDetail *reterr);
int kv_caches_reorder(KvCache **caches, uint32_t n, const uint32_t *rows, ErrorDetail *reterr);
/* Each row @n_times in a row. */
int kv_caches_repeat(KvCache **caches, uint32_t n, uint32_t n_times, ErrorDetail *reterr);
/* Takes exactly the last -n_tokens (<= 0) tokens from each row and lets go of what was recorded.  -EINVAL for n_tokens > 0 or more than there
 * are; KV_E_ROLLBACK where a row cannot go there, naming the row and what it could keep: kv_cache_crop() goes back further and runs again. */
int kv_caches_crop(KvCache *const *caches, uint32_t n, int64_t n_tokens, ErrorDetail *reterr);

/* ---- passes ---------------------------------------------------------------------------------------------------------------------- */

/* New rows of one cache in a pass: positions length .. length + n_tokens - 1. */
typedef struct KvPassItem {
    KvCache *cache;
    uint32_t n_tokens;
} KvPassItem;
/* Whether the prompt goes on in another pass after the next one: of matter in compatibility mode only (cache/kv-host.h). */
void kv_cache_set_more(KvCache *cache, bool more);

/* After gpu_step_begin().  Reserves pages for all items or for none, plans groups, tiles and packs, writes the step input, starts
 * the first copies.  Rows of the pass are the items' tokens in order.  One pass at a time, of at most max_sequences items; no cache
 * twice.  Caches in the pass are not forked, cropped or freed before its end.  KvError, -EINVAL or -EBUSY. */
int kv_pass_begin(KvStore *store, const KvPassItem *items, uint32_t n_items, KvPass **ret, ErrorDetail *reterr);
/* For each layer with attention, in order: append and attend.  qkv as in opencl/attend.h, before RoPE; of cross layers q alone.  A shared
 * layer's holds its own
 * queries beside the keys and values that its source had in this pass. */
int kv_pass_layer(KvPass *pass, uint32_t layer, const GpuBuffer *qkv, GpuBuffer *out, ErrorDetail *reterr);
/* Where the states of a layer with state bytes are, for item @item of the pass: the layer's kernels read what was before its tokens (of an
 * empty past zeros) and write what is after them, all of it, on the compute queue; not in place.  Offsets are multiples of 64. */
typedef struct KvState {
    GpuBuffer *buffer;
    uint64_t conv_from, recurrent_from, conv_to, recurrent_to;
    uint32_t n_steps; /* a recorded sequence: the states after its first 1 .. n_steps tokens are to be written as well; else 0 */
} KvState;
int kv_pass_state(KvPass *pass, uint32_t layer, uint32_t item, KvState *ret, ErrorDetail *reterr);
/* Where the state after the first @n_tokens (1 .. n_steps) goes, in the same buffer. */
int kv_pass_state_step(KvPass *pass, uint32_t layer, uint32_t item, uint32_t n_tokens, uint64_t *ret_conv, uint64_t *ret_recurrent,
                       ErrorDetail *reterr);
/* All layers are queued: starts the prefetch of the next pass's first tiles (same caches), which runs while the head does. */
int kv_pass_prefetch(KvPass *pass);
/* A pass that writes encoder output instead: the items' tokens follow what their caches have of it, up to max_cross_tokens.  The caller
 * goes through the cross layers alone, in order, with kv_cross_layer(), then commits; what was there is lost when it aborts.  @kv as
 * in attend_keep(): keys, then values. */
int kv_cross_begin(KvStore *store, const KvPassItem *items, uint32_t n_items, KvPass **ret, ErrorDetail *reterr);
int kv_cross_layer(KvPass *pass, uint32_t layer, const GpuBuffer *kv, ErrorDetail *reterr);
uint32_t kv_cache_cross_length(const KvCache *cache);
/* After gpu_step_finish() returned 0: the caches' lengths grow.  Frees the pass. */
int kv_pass_commit(KvPass *pass);
/* Instead, at any point after begin: pages reserved for the pass return.  Lengths stay, unless layers had begun to overwrite
 * recent tokens that are needed to go on (a long prefill, never a single token): such a cache falls back as kv_cache_crop() does,
 * so ask kv_cache_length(); a checkpoint before a long prefill keeps what was there.  Frees the pass.  Returns NULL. */
KvPass *kv_pass_abort(KvPass *pass);
