#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over packed pages and a full-precision tail: the kernels and their launch.  No layer, no session: only rows,
 * groups, pages and buffers.
 *
 * A *row* is one new token of one sequence.  A *group* is 1 to KV_PAGE_TOKENS rows with consecutive positions inside one
 * aligned page of one sequence; all its queries see the same border: pages [0, n_packed) packed, everything after in
 * full precision, n_packed = kv_packed_pages(form, pos).  The form's first sink_tokens tokens are masked out of page 0 and
 * read in full precision, when n_packed > 0.
 *
 * The unit of summation is a *block* of KV_BLOCK_PAGES pages.  Its partial result (m, l, acc) starts fresh and depends on the
 * row and on the block's visible pages only; partials fold into the row's state in block order, the tail (with sinks) last:
 *     M' = max(M, m); L' = L exp2(M - M') + l exp2(m - M'); A' likewise
 * (scores are in units of log2 e).  So tiles of whole blocks of any size give the same bits, and so does any number of rows in
 * the pass.  Both launch shapes below obey it.
 *
 * Keys out of a row's sight inside a block that its group sees add zeros: the bits are those of a block without them.
 *
 * Cross attention reads n keys that do not change, of an encoder's output, say; they have no RoPE.  They are written in passes of their own,
 * in order: attend_keep(), attend_pack() of the pages that are complete, attend_commit().  Then passes of queries alone: attend_prepare(),
 * attend_tile()s, attend_finish().  Their groups are up to KV_PAGE_TOKENS rows of one sequence with pos0 n - 1, n_packed
 * n / KV_PAGE_TOKENS, new_start n: all pages that are complete are seen packed, the rest in the ring.
 *
 * Buffers, in elements of the stated type:
 *   qkv    f32 (n_rows, kv_row_values()): q heads, then k heads of k_head_dim, then v heads of v_head_dim, before RoPE
 *   new    one layer's new keys and values after RoPE, f16 or f32 (tail_bits): K (n_rows, n_kv_heads, k_head_dim), then V
 *   tail   per layer of one tail slot: ring of kv_ring_tokens(form) tokens (slot = position % ring), then the form's sinks:
 *          K (ring + sinks, n_kv_heads, k_head_dim), then V the same
 *   state  f32 (n_rows, n_heads, v_head_dim + 2)
 *   out    f32 (n_rows, n_heads * v_head_dim)
 */

#include "opencl/gpu.h"
#include "quant/kv-codec.h"

/* int32 records that the host writes into step-input buffers; layer independent. */
typedef struct AttendGroup {
    int32_t row0, n_rows;  /* rows of the pass */
    int32_t pos0;          /* position of row0 */
    int32_t n_packed;      /* leading pages seen packed */
    int32_t tail_slot;
    int32_t new_start;     /* positions >= this are read from `new` at row new_row0 + pos - new_start, older from the tail ring */
    int32_t new_row0;
    int32_t chunk_shift;   /* chunked: 0 .. window - 1, where the chunks' borders lie (a sequence's left padding) */
} AttendGroup;

/* One block of one group inside one tile; refs of a group are consecutive and in block order. */
typedef struct AttendRef {
    int32_t group;
    int32_t block;                    /* pages [8 block, 8 block + n_pages) of the sequence */
    int32_t n_pages;                  /* visible to the group, 1..KV_BLOCK_PAGES */
    int32_t first_page;               /* of the block: those before are out of every row's sight; their entries in pages are not read */
    uint32_t pages[KV_BLOCK_PAGES];   /* page index in the tile's buffer, or in `fresh` when ATTEND_REF_FRESH is set */
} AttendRef;
#define ATTEND_REF_FRESH 0x80000000u

/* Which refs of a tile belong to a group. */
typedef struct AttendSpan {
    int32_t first_ref, n_refs;
} AttendSpan;

/* One page to pack: its tokens come from `new` (positions >= new_start) or from the tail ring. */
typedef struct AttendPack {
    int32_t tail_slot, page /* of the sequence */, new_start, new_row0;
    uint32_t to;        /* page index in `fresh` */
    int32_t sinks_only; /* attend_refill() of page 0: leave the ring alone */
    int32_t reserved[2];
} AttendPack;

/* Which kernels; AUTO is right except for tests and known-answer fallbacks. */
typedef enum AttendKernels {
    ATTEND_KERNELS_AUTO,    /* the last one that the device, the form and `exact` allow */
    ATTEND_KERNELS_LANES,   /* float32, work-groups of 32: GPUs; runs everywhere */
    ATTEND_KERNELS_VECTORS, /* float32, 16-wide vectors in single work-items: CPUs */
    ATTEND_KERNELS_AVX2,    /* integer products, AVX2 */
    ATTEND_KERNELS_BW,      /* integer products, AVX-512BW */
    ATTEND_KERNELS_VNNI,    /* integer products, AVX-512 VNNI */
} AttendKernels;

/* How a tile is spread; AUTO splits when there are few groups.  The results are the same bits. */
typedef enum AttendSpread {
    ATTEND_SPREAD_AUTO,
    ATTEND_SPREAD_SPLIT,
    ATTEND_SPREAD_SEQUENTIAL,
} AttendSpread;

/* Which keys a query at position a sees: positions decide, nothing else. */
typedef enum AttendMask {
    ATTEND_MASK_CAUSAL,  /* k <= a */
    ATTEND_MASK_SLIDING, /* a - window < k <= a */
    ATTEND_MASK_CHUNKED, /* k <= a in the same chunk: (k - shift) / window == (a - shift) / window, rounded down */
    ATTEND_MASK_CROSS,   /* all keys, written before by attend_keep(): below */
} AttendMask;

typedef struct AttendVisibility {
    AttendMask mask;
    uint32_t window; /* sliding, chunked: 1 .. ATTEND_WINDOW_MAX tokens; else 0 */
} AttendVisibility;
#define ATTEND_WINDOW_MAX (1u << 30)

/* The lowest position that a query at @position sees; @shift as in AttendGroup. */
static inline uint32_t attend_first_visible(AttendVisibility visibility, uint32_t shift, uint32_t position)
{
    switch (visibility.mask) {
    case ATTEND_MASK_SLIDING:
        return position >= visibility.window ? position - visibility.window + 1 : 0;
    case ATTEND_MASK_CHUNKED: {
        uint32_t into = (position + visibility.window - shift) % visibility.window;

        return position >= into ? position - into : 0;
    }
    case ATTEND_MASK_CAUSAL:
    case ATTEND_MASK_CROSS:
        break;
    }
    return 0;
}

typedef struct AttendOptions {
    KvForm form;
    KvShape shape;
    bool exact;           /* float32 queries and sums (portable kernels); else integer kernels where the device has them */
    uint32_t tail_bits;   /* 32 for form f32, else 16 */
    float scale;          /* of the scores, 1 / sqrt(k_head_dim) unless the model says otherwise */
    AttendVisibility visibility;
    float softcap;        /* scores become softcap * tanh(score / softcap); 0: they stay */
    bool sink_logits;     /* AttendLayer names a logit per head that takes part in the softmax without a value */
    uint32_t max_rows, max_refs; /* largest pass, largest tile (blocks) */
    const float *inv_freq; /* (rotary_dim / 2), borrowed during the call */
    uint32_t max_pages;    /* longest sequence in pages, for the table of page angles */
    AttendKernels kernels; /* a choice that the device cannot run is -EINVAL */
    AttendSpread spread;
} AttendOptions;

typedef struct Attend Attend;

/* Compiles (or fetches) the kernels and allocates operand and partial buffers.  GpuError or negative errno. */
int attend_new(Gpu *gpu, const AttendOptions *options, Attend **ret, ErrorDetail *reterr);
Attend *attend_free(Attend *attend);
DEFINE_CLEANUP(Attend, attend_free)
/* Device bytes that attend_new() would take, for the planner. */
int attend_device_bytes(const GpuInfo *info, const AttendOptions *options, uint64_t *ret);

/* The inputs of one pass; buffers are borrowed until the step has finished. */
typedef struct AttendPass {
    uint32_t n_rows, n_groups;
    const GpuBuffer *rope;    /* f32 (n_rows, rotary_dim / 2, 2): cos and sin of each row's position */
    uint64_t rope_offset;     /* bytes; the same for the next ones */
    const GpuBuffer *groups;  /* AttendGroup [n_groups] */
    uint64_t groups_offset;
    uint32_t n_sequences;     /* of the groups; when every sequence has one group, attend_commit() has nothing left to do.  0: unknown */
} AttendPass;

/* One layer's buffers. */
typedef struct AttendLayer {
    const GpuBuffer *calibration;  /* f32: kv_constants_fill() of quant/kv-codec.h */
    uint64_t calibration_offset;   /* bytes */
    GpuBuffer *tail;
    uint64_t tail_offset;          /* bytes of this layer inside a tail slot */
    uint64_t tail_slot_stride;     /* bytes between tail slots */
    const GpuBuffer *sink_logits;  /* f32 (n_heads); only read when the options say so */
    uint64_t sink_logits_offset;   /* bytes */
} AttendLayer;

/* RoPE on q and k, query operands, `new` keys and values; resets the state of the rows.  Cross: @qkv has the queries alone. */
int attend_prepare(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *qkv);
/* Cross: `new` keys and values, from f32 (n_rows, kv_token_values()): k heads, then v heads. */
int attend_keep(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *kv);
/* Packs n_packs pages into @fresh (n_packs pages), after prepare. */
int attend_pack(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *packs,
                uint64_t packs_offset, uint32_t n_packs, GpuBuffer *fresh, GpuEvent **ret_event);

typedef struct AttendTile {
    const GpuBuffer *pages;      /* ring slot or arena */
    uint64_t pages_offset;       /* bytes from the buffer's start to page index 0 of this layer; a multiple of 64 */
    const GpuBuffer *fresh;      /* may be NULL when no ref has ATTEND_REF_FRESH */
    const GpuBuffer *refs;       /* AttendRef [n_refs] */
    uint64_t refs_offset;
    const GpuBuffer *spans;      /* AttendSpan [n_groups] */
    uint64_t spans_offset;
    uint32_t n_refs;
} AttendTile;

/* Folds one tile into the rows' state.  Tiles of a layer are given in order.  The event (of the last kernel that reads the
 * tile) is what an overwriting copy must wait for. */
int attend_tile(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const AttendTile *tile, GpuWait wait,
                GpuEvent **ret_event);
/* Tail and sinks, normalisation, inverse rotation: writes @out. */
int attend_finish(Attend *attend, const AttendPass *pass, const AttendLayer *layer, GpuBuffer *out);
/* Whether a pass that packs no pages, and reads @n_refs blocks in one tile or none, is better run by attend_whole(): CPU devices, one row a
 * sequence.  The results are the same bits. */
bool attend_is_whole(const Attend *attend, const AttendPass *pass, uint32_t n_refs);
/* All of a layer's attention in one launch: attend_prepare(), attend_tile() of @tile (may be NULL), attend_finish(), attend_commit().
 * No ref has ATTEND_REF_FRESH. */
int attend_whole(Attend *attend, const AttendPass *pass, const AttendLayer *layer, const GpuBuffer *qkv, const AttendTile *tile,
                 GpuWait wait, GpuBuffer *out);
/* Copies the pass's new keys and values into the tail ring (the last kv_ring_tokens() positions of each sequence) and the sinks;
 * after attend_finish() of this layer, which has already done it for sequences of one group: it may launch nothing.  Cross: after
 * attend_keep() and attend_pack(). */
int attend_commit(Attend *attend, const AttendPass *pass, const AttendLayer *layer);
/* Fills tail ring positions from an unpacked form's pages (f16, f32): after a crop, or into another slot.  One AttendPack a page to
 * read, with `to` = page index in @pages; page 0 fills the sinks too.  Two pages of one call must not share ring places. */
int attend_refill(Attend *attend, const AttendLayer *layer, const GpuBuffer *packs, uint64_t packs_offset, uint32_t n_packs,
                  const GpuBuffer *pages, uint64_t pages_offset);
