/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library's schedule on the host (cache/kv-compat.h), all kinds of layers in one cache, and a pair: each operation with each of its
 * allocations refused in turn.  What is refused says so and changes nothing that can be seen; then the operation succeeds, and after each the
 * cache looks as one that ran beside it without faults.  In the end nothing is left behind.
 */

#include "cache/kv-compat-quantized.h"
#include "cache/kv-compat.h"
#include "tests/lib/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { WIDTH = 16, HEADS = 2, ROWS = 8, TOKENS = 24, KERNEL = 3 };

typedef enum Verb { NEW, EARLY, FEED, COPY, RECORD, CROP, REORDER, REPEAT, SELECT, RESET } Verb;

typedef struct Op {
    Verb verb;
    int32_t n; /* feed: tokens; crop: as there; repeat: times; select, early: rows */
} Op;

/* One of the two: with faults, without. */
typedef struct Side {
    KvCompat *cache;
    KvCompatPair *pair; /* or this, which has the cache, too */
    uint32_t n_rows, fed;
} Side;

static const KvCompatLayerSpec specs[] = {
    {.kind = KV_COMPAT_DYNAMIC},
    {.kind = KV_COMPAT_STATIC, .max_tokens = 40},
    {.kind = KV_COMPAT_SLIDING, .window = 5},
    {.kind = KV_COMPAT_STATIC_SLIDING, .window = 5, .max_tokens = 40},
    {.kind = KV_COMPAT_DUMMY},
    {.kind = KV_COMPAT_DUMMY, .linear = true, .n_states = 2},
    {.kind = KV_COMPAT_DYNAMIC, .linear = true},
    {.kind = KV_COMPAT_OTHER, .class = &kv_compat_quantized_class},
    {.kind = KV_COMPAT_OTHER, .class = &kv_compat_quantized_class},
};
enum { N_LAYERS = N_ELEMENTS(specs), N_BEFORE_CODED = N_LAYERS - 2 };

static const KvQuantOptions coded[] = {
    {.backend = KV_BACKEND_QUANTO, .nbits = 4, .q_group_size = 16, .residual_length = 4},
    {.backend = KV_BACKEND_FP8, .nbits = 8},
};

/* ---- what a cache is given ----------------------------------------------------------------------------------------- */

static float numbers[2][ROWS * HEADS * TOKENS * WIDTH];

static KvTensor tensor(uint32_t which, uint32_t n_rows, uint32_t n_heads, uint32_t n_tokens, uint32_t width, uint32_t first)
{
    size_t n = (size_t)n_rows * n_heads * n_tokens * width;

    assert_true(n <= N_ELEMENTS(numbers[0]));
    for (size_t i = 0; i < n; i++)
        numbers[which][i] = (float)((i + 31 * first + 7 * which) * 2654435761u % 1009) / 256.0f - 2.0f;
    return (KvTensor){numbers[which], n_rows, n_heads, n_tokens, width, n_tokens};
}

/* ---- what can be seen of it, without allocating --------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 31;
}

static uint64_t see_tensor(uint64_t hash, const KvTensor *t)
{
    hash = mix(mix(mix(mix(hash, t->n_rows), t->n_heads), t->n_tokens), t->width);
    for (uint32_t r = 0; r < t->n_rows; r++)
        for (uint32_t h = 0; h < t->n_heads; h++)
            for (uint32_t i = 0; i < t->n_tokens * t->width; i++) {
                uint32_t bits;

                memcpy(&bits, kv_tensor_at(t, r, h, 0) + i, sizeof(bits));
                hash = mix(hash, bits);
            }
    return hash;
}

static uint64_t see_layer(uint64_t hash, const KvCompat *cache, uint32_t l)
{
    uint64_t length = 0, masked = 0, offset = 0;
    KvTensor a, b;

    hash = mix(hash, (uint64_t)kv_compat_length(cache, l, &length, NULL));
    hash = mix(hash, (uint64_t)kv_compat_mask_sizes(cache, l, 3, &masked, &offset, NULL));
    hash = mix(mix(mix(hash, length), masked), offset);
    if (specs[l].kind != KV_COMPAT_OTHER && kv_compat_stored(cache, l, &a, &b, NULL) == 0)
        hash = see_tensor(see_tensor(hash, &a), &b);
    for (uint32_t s = 0; s < 2; s++) {
        if (kv_compat_conv(cache, l, s, &a, NULL) == 0)
            hash = see_tensor(hash, &a);
        if (kv_compat_recurrent(cache, l, s, &a, NULL) == 0)
            hash = see_tensor(hash, &a);
    }
    return hash;
}

static uint64_t see(const Side *side)
{
    uint64_t hash = mix(1, (uint64_t)kv_compat_is_initialised(side->cache) << 1 | kv_compat_is_croppable(side->cache));
    int64_t n_rows = -2;

    hash = mix(hash, (uint64_t)kv_compat_n_rows(side->cache, &n_rows, NULL));
    hash = mix(mix(hash, (uint64_t)n_rows), kv_compat_has_previous_state(side->cache));
    for (uint32_t l = 0; l < kv_compat_n_layers(side->cache); l++)
        hash = see_layer(hash, side->cache, l);
    for (uint32_t l = 0; side->pair && l < 3; l++)
        hash = mix(hash, kv_compat_pair_is_updated(side->pair, l));
    return hash;
}

/* ---- operations: a part of one is what either happens or does not ------------------------------------------------------ */

typedef struct Part {
    const Op *op;
    uint32_t layer, what; /* feed: 0 keys and values, 1 convolution, 2 recurrent state */
    uint64_t got;         /* of what was returned */
} Part;

static int new_cache(Side *side, ErrorDetail *reterr)
{
    KvCompatLayerSpec with_states[N_LAYERS];
    int r = 0;

    memcpy(with_states, specs, sizeof(specs));
    for (uint32_t i = 0; i < N_ELEMENTS(coded) && r == 0; i++)
        r = kv_compat_quantized_new(&coded[i], KV_DTYPE_F32, KV_FP8_RULE_CAREFUL, &with_states[N_BEFORE_CODED + i].state, reterr);
    if (r == 0)
        r = kv_compat_new(with_states, N_LAYERS, &side->cache, reterr);
    for (uint32_t i = 0; i < N_ELEMENTS(coded) && r != 0; i++)
        (void)kv_compat_quantized_class.free(with_states[N_BEFORE_CODED + i].state);
    return r;
}

static int early(Side *side, const Op *op, ErrorDetail *reterr)
{
    static const uint32_t heads[] = {HEADS}, widths[] = {WIDTH};
    const KvCompatShapes shapes = {.n_rows = (uint32_t)op->n, .n_heads = heads, .k_widths = widths, .v_widths = widths, .n_n_heads = 1,
                                   .n_k_widths = 1, .n_v_widths = 1};

    return kv_compat_early(side->cache, &shapes, reterr);
}

static int feed(Side *side, Part *part, ErrorDetail *reterr)
{
    uint32_t l = part->layer, n = (uint32_t)part->op->n, rows = side->n_rows;
    KvTensor k, v, got_k, got_v;
    int r;

    if (part->what == 0) {
        k = tensor(0, rows, HEADS, n, WIDTH, side->fed + l);
        v = tensor(1, rows, HEADS, n, WIDTH, side->fed + l);
        r = kv_compat_update(side->cache, l, &k, &v, &got_k, &got_v, reterr);
        part->got = r ? 0 : see_tensor(see_tensor(part->got, &got_k), &got_v);
        return r;
    }
    if (part->what == 1) {
        k = tensor(0, rows, HEADS, n, 1, side->fed + l);
        r = kv_compat_update_conv(side->cache, l, 0, KERNEL, &k, &got_k, reterr);
        part->got = r ? 0 : see_tensor(part->got, &got_k);
        return r;
    }
    k = tensor(0, rows, 1, n, WIDTH, side->fed + l);
    return kv_compat_update_recurrent(side->cache, l, 0, n, &k, reterr);
}

static int copy(Side *side, ErrorDetail *reterr)
{
    KvCompatPair *pair;
    KvCompat *cache;
    int r = side->pair ? kv_compat_pair_copy(side->pair, &pair, reterr) : kv_compat_copy(side->cache, &cache, reterr);

    if (r != 0)
        return r;
    if (side->pair) {
        (void)kv_compat_pair_free(side->pair);
        side->pair = pair;
        side->cache = kv_compat_pair_self(pair);
        return 0;
    }
    (void)kv_compat_free(side->cache);
    side->cache = cache;
    return 0;
}

static int rows(Side *side, const Op *op, ErrorDetail *reterr)
{
    uint32_t from[ROWS], n = op->verb == SELECT ? (uint32_t)op->n : side->n_rows;

    for (uint32_t i = 0; i < n; i++)
        from[i] = op->verb == SELECT ? i / 2 : n - 1 - i;
    if (op->verb == REPEAT)
        return side->pair ? kv_compat_pair_repeat(side->pair, (uint32_t)op->n, reterr) : kv_compat_repeat(side->cache, (uint32_t)op->n, reterr);
    if (op->verb == REORDER)
        return side->pair ? kv_compat_pair_reorder(side->pair, from, n, reterr) : kv_compat_reorder(side->cache, from, n, reterr);
    return side->pair ? kv_compat_pair_select(side->pair, from, n, reterr) : kv_compat_select(side->cache, from, n, reterr);
}

static int perform(Side *side, Part *part, ErrorDetail *reterr)
{
    switch (part->op->verb) {
    case NEW:
        return new_cache(side, reterr);
    case EARLY:
        return early(side, part->op, reterr);
    case FEED:
        return feed(side, part, reterr);
    case COPY:
        return copy(side, reterr);
    case RECORD:
        kv_compat_record(side->cache);
        return 0;
    case CROP:
        return side->pair ? kv_compat_pair_crop(side->pair, part->op->n, reterr) : kv_compat_crop(side->cache, part->op->n, reterr);
    case REORDER:
    case REPEAT:
    case SELECT:
        return rows(side, part->op, reterr);
    case RESET:
        if (side->pair)
            kv_compat_pair_reset(side->pair);
        else
            kv_compat_reset(side->cache);
        return 0;
    }
    return -EINVAL;
}

/* ---- running ------------------------------------------------------------------------------------------------------- */

static uint32_t n_refused;

/* With each of its allocations refused, and then none; the other side without. */
static void run_part(Side *sides, Part part)
{
    Part other = part;
    int r = -ENOMEM;

    for (uint32_t n = 1; r != 0; n++) {
        uint64_t before = sides[0].cache ? see(&sides[0]) : 0;
        ErrorDetail detail = ERROR_DETAIL_NULL;
        const char *function;
        bool hit;

        fault_allocation(n);
        r = perform(&sides[0], &part, &detail);
        hit = fault_disarm(&function);
        n_refused += hit;
        if (r != 0 && (r != -ENOMEM || !hit || !detail.text[0]))
            fail_msg("operation %d, layer %u, part %u, allocation %u (%s): %d, %s", (int)part.op->verb, part.layer, part.what, n,
                     function, r, detail.text);
        if (r != 0 && sides[0].cache && see(&sides[0]) != before)
            fail_msg("operation %d, layer %u, part %u, allocation %u (%s): refused, and something has changed", (int)part.op->verb,
                     part.layer, part.what, n, function);
    }
    assert_int_equal(perform(&sides[1], &other, NULL), 0);
    assert_true(part.got == other.got);
    if (see(&sides[0]) != see(&sides[1]))
        fail_msg("operation %d, layer %u, part %u: not as without faults", (int)part.op->verb, part.layer, part.what);
}

static void feed_layers(Side *sides, const Op *op)
{
    for (uint32_t l = 0; l < kv_compat_n_layers(sides[0].cache); l++) {
        if (specs[l].kind != KV_COMPAT_DUMMY)
            run_part(sides, (Part){.op = op, .layer = l});
        for (uint32_t what = 1; what < 3 && specs[l].linear; what++)
            run_part(sides, (Part){.op = op, .layer = l, .what = what});
    }
}

static void run_op(Side *sides, const Op *op)
{
    if (op->verb == FEED)
        feed_layers(sides, op);
    else
        run_part(sides, (Part){.op = op});
    for (uint32_t i = 0; i < 2; i++) {
        if (op->verb == FEED)
            sides[i].fed += (uint32_t)op->n;
        if (op->verb == REPEAT)
            sides[i].n_rows *= (uint32_t)op->n;
        if (op->verb == SELECT || op->verb == EARLY)
            sides[i].n_rows = (uint32_t)op->n;
    }
}

static void run_program(Side *sides, const Op *ops, size_t n_ops)
{
    for (size_t i = 0; i < n_ops; i++)
        run_op(sides, &ops[i]);
}

static void check_nothing_is_left(const FaultLive *none, uint64_t n_known)
{
    FaultLive live;

    fault_live(&live);
    if (live.blocks != none->blocks)
        fault_print_blocks(n_known);
    assert_int_equal(live.blocks, none->blocks);
    assert_int_equal(live.mapped_bytes, none->mapped_bytes);
}

static const Op whole[] = {
    {NEW, 0},     {FEED, 9},  {FEED, 1},    {COPY, 0},    {RECORD, 0}, {FEED, 3},   {CROP, -1}, {FEED, 1},  {REORDER, 0},
    {FEED, 1},    {REPEAT, 2}, {FEED, 2},   {SELECT, 3},  {FEED, 1},   {COPY, 0},   {RECORD, 0}, {FEED, 4}, {CROP, 0},
    {FEED, 2},    {RESET, 0},
};

static void each_operation_over_all_kinds_of_layers(void **state)
{
    Side sides[2] = {{.n_rows = 2}, {.n_rows = 2}};
    uint64_t n_known = fault_n_blocks_ever();
    FaultLive none;

    (void)state;
    n_refused = 0;
    fault_live(&none);
    run_program(sides, whole, N_ELEMENTS(whole));
    for (uint32_t i = 0; i < 2; i++)
        (void)kv_compat_free(sides[i].cache);
    check_nothing_is_left(&none, n_known);
    (void)printf("%u allocations refused\n", n_refused);
    assert_true(n_refused > 100);
}

/* Layers are there before the first tokens are; what was refused does not fix their shapes. */
static void layers_that_are_made_early(void **state)
{
    static const Op first[] = {{NEW, 0}, {RECORD, 0}, {EARLY, 2}, {FEED, 6}, {CROP, -1}, {FEED, 2}};
    Side sides[2] = {{.n_rows = 2}, {.n_rows = 2}};
    uint64_t n_known = fault_n_blocks_ever();
    FaultLive none;

    (void)state;
    fault_live(&none);
    for (uint32_t refused = 1; refused < 12; refused++) {
        static const Op three = {EARLY, 3};
        Side side = {.n_rows = 2};
        int r;

        assert_int_equal(new_cache(&side, NULL), 0);
        fault_allocation(refused);
        r = early(&side, &three, NULL);
        (void)fault_disarm(NULL);
        if (r != 0) { /* other shapes than those that were refused */
            Part part = {.op = &first[3]};

            assert_int_equal(r, -ENOMEM);
            for (part.layer = 0; part.layer < 4; part.layer++)
                assert_int_equal(feed(&side, &part, NULL), 0);
        }
        (void)kv_compat_free(side.cache);
    }
    run_program(sides, first, N_ELEMENTS(first));
    for (uint32_t i = 0; i < 2; i++)
        (void)kv_compat_free(sides[i].cache);
    check_nothing_is_left(&none, n_known);
}

static KvCompatPair *new_pair(void)
{
    static const KvCompatLayerSpec like = {.kind = KV_COMPAT_DYNAMIC};
    KvCompat *self = NULL, *cross = NULL;
    KvCompatPair *pair = NULL;
    KvTensor k, v, got_k, got_v;

    for (uint32_t n = 1; !pair; n++) {
        int r;

        fault_allocation(n);
        r = kv_compat_new_replicating(&like, &self, NULL);
        if (r == 0)
            r = kv_compat_new_replicating(&like, &cross, NULL);
        if (r == 0)
            r = kv_compat_pair_new(self, cross, &pair);
        assert_true(fault_disarm(NULL) || r == 0);
        if (r != 0) {
            self = kv_compat_free(self);
            cross = kv_compat_free(cross);
        }
    }
    for (uint32_t l = 0; l < 3; l++) {
        uint64_t before = mix(kv_compat_pair_is_updated(pair, l), kv_compat_n_layers(cross));
        int r = -ENOMEM;

        k = tensor(0, 2, HEADS, 7, WIDTH, l);
        v = tensor(1, 2, HEADS, 7, WIDTH, l);
        for (uint32_t n = 1; r != 0; n++) {
            fault_allocation(n);
            r = kv_compat_pair_update_cross(pair, l, &k, &v, &got_k, &got_v, NULL);
            assert_true(fault_disarm(NULL) || r == 0);
            assert_true(r == 0 || before == mix(kv_compat_pair_is_updated(pair, l), kv_compat_n_layers(cross)));
        }
        assert_true(kv_compat_pair_is_updated(pair, l));
    }
    return pair;
}

/* Rows of self and cross change together, or neither's do. */
static void each_operation_on_an_encoder_decoder_pair(void **state)
{
    static const Op ops[] = {{COPY, 0}, {FEED, 5}, {REORDER, 0}, {REPEAT, 2}, {FEED, 1}, {SELECT, 3}, {CROP, -2}, {FEED, 1}, {COPY, 0}, {RESET, 0}};
    uint64_t n_known = fault_n_blocks_ever();
    Side sides[2];
    FaultLive none;

    (void)state;
    fault_live(&none);
    for (uint32_t i = 0; i < 2; i++) {
        sides[i] = (Side){.n_rows = 2, .pair = new_pair()};
        sides[i].cache = kv_compat_pair_self(sides[i].pair);
    }
    for (uint32_t i = 0; i < 2; i++) {
        Part part = {.op = &(Op){FEED, 2}};

        assert_int_equal(feed(&sides[i], &part, NULL), 0); /* it makes the layer that is fed below */
    }
    run_program(sides, ops, N_ELEMENTS(ops));
    for (uint32_t i = 0; i < 2; i++)
        (void)kv_compat_pair_free(sides[i].pair);
    check_nothing_is_left(&none, n_known);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_operation_over_all_kinds_of_layers),
        cmocka_unit_test(layers_that_are_made_early),
        cmocka_unit_test(each_operation_on_an_encoder_decoder_pair),
    };

    fault_init();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
