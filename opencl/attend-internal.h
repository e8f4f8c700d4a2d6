#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Inside opencl/attend*.c: the object, and the sizes that attend_new() and attend_device_bytes() share. */

#include "opencl/attend.h"

#define ATTEND_LANES           32 /* work-items of a group in the LANES kernels */
#define ATTEND_NODES           32 /* a block's nodes for the slow pairs, ATTEND_NODE_TOKENS apart; attend-tile-x86.cl */
#define ATTEND_NODE_TOKENS     16
#define ATTEND_TILE_GROUPS_MAX 16 /* work-groups of a tile on CPU devices: each has its own scratch */

/* Device buffers, in bytes; 0: not needed. */
typedef struct AttendSizes {
    uint64_t operands, state, kept, partials, page_angles, places, scratch;
} AttendSizes;

typedef struct Attend {
    Gpu *gpu;
    AttendOptions options; /* inv_freq is NULL: it was borrowed */
    AttendKernels kernels; /* chosen, never AUTO */
    KvLayout layout;
    uint32_t columns;           /* query heads that share a read of the keys */
    uint32_t n_fast;            /* rotary pairs that turn too fast for interpolation between nodes */
    uint32_t blocks_per_launch; /* of one group; INT32_MAX unless the driver limits loops */
    AttendSizes sizes;
    GpuBuffer *operands, *state, *kept, *partials, *page_angles, *places, *scratch;
    GpuKernel *prepare, *pack, *tile, *fold, *finish, *whole, *commit, *refill;

    /* Partial results of a split tile that nobody has merged yet; borrowed from its AttendTile. */
    struct {
        const GpuBuffer *spans; /* NULL: nothing */
        uint64_t spans_offset;
        uint32_t ref_rows;
    } pending;
} Attend;

/* Checks the options against the device; 0 or -EINVAL with the culprit. */
int attend_choose(const GpuInfo *info, const AttendOptions *options, AttendKernels *ret, KvLayout *ret_layout, ErrorDetail *reterr);
int attend_sizes(const AttendOptions *options, AttendKernels kernels, AttendSizes *ret, ErrorDetail *reterr);
uint32_t attend_operand_floats(const AttendOptions *options, const KvLayout *layout);
/* Rotary pairs of the mean that turns with the keys, rounded up to whole vectors: 0 when there is none. */
uint32_t attend_rotary_pad(const AttendOptions *options);

/* Pairs from here on turn by at most a quarter radian in ATTEND_NODE_TOKENS tokens. */
uint32_t attend_n_fast(const AttendOptions *options);

/* Fills the tables of attend-pack.cl and attend-tile-x86.cl, in double precision. */
void attend_fill_page_angles(const AttendOptions *options, float *ret);
void attend_fill_places(const AttendOptions *options, float *ret);
