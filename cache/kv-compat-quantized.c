/* SPDX-License-Identifier: Apache-2.0 */
/* The quantised layer of a compatibility cache. */

#include "cache/kv-compat-quantized.h"

#include "quant/kv-hqq.h"
#include "quant/kv-quanto.h"

#include <string.h>

/* Keys or values. */
typedef struct Side {
    KvQuantized *stored; /* NULL before the first update */
    KvHeld residual;
    float *returned; /* of the last update */
} Side;

typedef struct Quantized {
    KvQuantOptions options;
    KvDtype dtype;
    KvFp8Rule fp8_rule;
    Side k, v;
    uint32_t n_stored;       /* tokens of what is stored that still count */
    uint32_t *rows, n_rows;  /* row r of the layer is row rows[r] of what is stored; NULL: the same */
    uint64_t n_saturated;
} Quantized;

static void side_clear(Side *side)
{
    side->stored = kv_quantized_unref(side->stored);
    kv_held_deinit(&side->residual);
    side->residual = KV_HELD_NULL;
    free(side->returned);
    side->returned = NULL;
}

static void quantized_clear(Quantized *layer)
{
    side_clear(&layer->k);
    side_clear(&layer->v);
    free(layer->rows);
    layer->rows = NULL;
    layer->n_rows = 0;
    layer->n_stored = 0;
    layer->n_saturated = 0;
}

static void *quantized_free(void *self)
{
    if (!self)
        return NULL;
    quantized_clear(self);
    free(self);
    return NULL;
}

static inline void quantized_freep(Quantized **layer)
{
    (void)quantized_free(*layer);
}

int kv_compat_quantized_new(const KvQuantOptions *options, KvDtype dtype, KvFp8Rule fp8_rule, void **ret, ErrorDetail *reterr)
{
    Quantized *layer = calloc(1, sizeof(*layer));

    if (!layer)
        return error_detail_set(reterr, -ENOMEM, "no memory for a quantised layer");
    layer->options = *options;
    layer->dtype = dtype;
    layer->fp8_rule = fp8_rule;
    *ret = layer;
    return 0;
}

void kv_compat_quantized_release(void *self)
{
    Quantized *layer = self;

    free(layer->k.returned);
    free(layer->v.returned);
    layer->k.returned = layer->v.returned = NULL;
}

uint32_t kv_compat_quantized_residual(const void *self)
{
    return ((const Quantized *)self)->k.residual.n_tokens;
}

uint64_t kv_compat_quantized_saturated(const void *self)
{
    return ((const Quantized *)self)->n_saturated;
}

void kv_compat_quantized_parts(const void *self, KvCompatQuantizedParts *ret)
{
    const Quantized *layer = self;

    *ret = (KvCompatQuantizedParts){layer->k.stored,   layer->v.stored, layer->k.residual, layer->v.residual,
                                    layer->n_stored, layer->n_saturated};
}

void kv_compat_quantized_take(void *self, KvCompatQuantizedParts *parts)
{
    Quantized *layer = self;

    layer->k.stored = TAKE_PTR(parts->k);
    layer->v.stored = TAKE_PTR(parts->v);
    layer->k.residual = parts->k_residual;
    layer->v.residual = parts->v_residual;
    parts->k_residual = parts->v_residual = KV_HELD_NULL;
    layer->n_stored = parts->n_stored;
    layer->n_saturated = parts->n_saturated;
}

static uint64_t quantized_length(const void *self)
{
    const Quantized *layer = self;

    return (uint64_t)layer->n_stored + layer->k.residual.n_tokens;
}

/* Nothing is reserved: shapes are those of the first update. */
static int quantized_early(void *self, uint32_t n_rows, uint32_t n_heads, uint32_t k_width, uint32_t v_width, ErrorDetail *reterr)
{
    (void)self;
    (void)n_rows;
    (void)n_heads;
    (void)k_width;
    (void)v_width;
    (void)reterr;
    return 0;
}

/* ---- update --------------------------------------------------------------------------------------------------------------------- */

/* What an update is about to make of one side. */
typedef struct SideUpdate {
    KvQuantized *stored; /* NULL: as before, and the new tokens join the residual, which has room */
    float *returned;
} SideUpdate;

static void side_update_clear(SideUpdate *update)
{
    (void)kv_quantized_unref(update->stored);
    free(update->returned);
}

/* A dense copy of new tokens, rounded to the layer's type. */
static int copy_new(const Quantized *layer, const KvTensor *x, float **ret, ErrorDetail *reterr)
{
    KvTensorShape shape = {x->n_rows, x->n_heads, x->n_tokens, x->width};
    _cleanup_(freep) float *copy = NULL;
    uint64_t n;
    int r;

    r = kv_tensor_size(&shape, &n, reterr);
    if (r)
        return error_trace(r);
    copy = malloc(n * sizeof(*copy));
    if (!copy)
        return error_detail_set(reterr, -ENOMEM, "no memory for %llu values of a quantised layer", (unsigned long long)n);
    kv_tensor_copy(x, copy);
    for (uint64_t i = 0; i < n; i++)
        copy[i] = kv_dtype_round(layer->dtype, copy[i]);
    *ret = TAKE_PTR(copy);
    return 0;
}

static int encode(const Quantized *layer, int8_t axis, const KvTensorShape *shape, const float *x, KvQuantized **ret,
                  uint64_t *n_saturated, ErrorDetail *reterr)
{
    const KvQuantOptions *o = &layer->options;
    KvQuantizeOptions options = {o->nbits, axis, o->q_group_size, layer->dtype};
    uint64_t n;
    int r;

    switch (o->backend) {
    case KV_BACKEND_QUANTO:
        return kv_quanto_encode(&options, shape, x, ret, reterr);
    case KV_BACKEND_HQQ:
        return kv_hqq_encode(&options, shape, x, ret, reterr);
    case KV_BACKEND_FP8:
        r = kv_tensor_size(shape, &n, reterr);
        if (r)
            return error_trace(r);
        return kv_fp8_encode_tensor(layer->dtype, shape, kv_fp8_scale(layer->fp8_rule, x, n), x, ret, n_saturated, reterr);
    case KV_BACKEND_X_MAX:
    case KV_BACKEND_X_INVALID:
        break;
    }
    return error_origin(-EINVAL);
}

static int first_update(const Quantized *layer, int8_t axis, const KvTensor *x, SideUpdate *update, uint64_t *n_saturated,
                        ErrorDetail *reterr)
{
    KvTensorShape shape = {x->n_rows, x->n_heads, x->n_tokens, x->width};
    int r;

    r = copy_new(layer, x, &update->returned, reterr);
    if (r)
        return error_trace(r);
    return encode(layer, axis, &shape, update->returned, &update->stored, n_saturated, reterr);
}

/* Stored tokens that count, residual and new ones, in one dense tensor. */
static void join(const Quantized *layer, const Side *side, const float *decoded, const KvTensor *x, float *ret)
{
    const KvHeld *residual = &side->residual;
    uint32_t n_all = side->stored->shape.n_tokens, width = x->width;
    size_t new_values = (size_t)x->n_tokens * width, stored_values = (size_t)layer->n_stored * width;
    KvTensor kept = residual->n_tokens ? kv_held_view(residual, 0, residual->n_tokens) : (KvTensor){0};

    for (uint32_t row = 0; row < x->n_rows; row++)
        for (uint32_t head = 0; head < x->n_heads; head++) {
            uint32_t from = layer->rows ? layer->rows[row] : row;
            const float *new = kv_tensor_at(x, row, head, 0);

            memcpy(ret, decoded + ((size_t)from * x->n_heads + head) * n_all * width, stored_values * sizeof(*ret));
            ret += stored_values;
            if (residual->n_tokens) {
                memcpy(ret, kv_tensor_at(&kept, row, head, 0), (size_t)residual->n_tokens * width * sizeof(*ret));
                ret += (size_t)residual->n_tokens * width;
            }
            for (size_t i = 0; i < new_values; i++)
                *ret++ = kv_dtype_round(layer->dtype, new[i]);
        }
}

/* Room for the new tokens in the residual, which stays as it is. */
static int reserve_residual(Side *side, const KvTensor *x)
{
    if (side->residual.values)
        return kv_held_reserve(&side->residual, x->n_tokens);
    return kv_held_init(&side->residual, x, x->n_tokens);
}

static int later_update(const Quantized *layer, Side *side, int8_t axis, bool flush, const KvTensor *x, SideUpdate *update,
                        ErrorDetail *reterr)
{
    KvTensorShape shape = {x->n_rows, x->n_heads, layer->n_stored + side->residual.n_tokens + x->n_tokens, x->width};
    _cleanup_(freep) float *decoded = NULL;
    uint64_t n;
    int r;

    r = kv_tensor_size(&shape, &n, reterr);
    if (r)
        return error_trace(r);
    decoded = malloc(side->stored->n_values * sizeof(*decoded));
    update->returned = malloc(n * sizeof(float));
    if (!decoded || !update->returned)
        return error_detail_set(reterr, -ENOMEM, "no memory for the %llu values of a quantised layer", (unsigned long long)n);
    r = kv_quantized_decode(side->stored, decoded, reterr);
    if (r)
        return error_trace(r);
    join(layer, side, decoded, x, update->returned);
    if (flush)
        return encode(layer, axis, &shape, update->returned, &update->stored, NULL, reterr);
    r = reserve_residual(side, x);
    return r ? error_detail_set(reterr, r, "no memory for %u tokens of a residual", x->n_tokens) : 0;
}

/* fp8: codes of the rows and tokens that count, then the new ones. */
static int append_update(const Quantized *layer, const Side *side, const KvTensor *x, SideUpdate *update, uint64_t *n_saturated,
                         ErrorDetail *reterr)
{
    _cleanup_(kv_quantized_unrefp) KvQuantized *chosen = NULL;
    _cleanup_(freep) float *new = NULL;
    uint32_t n_rows = layer->rows ? layer->n_rows : side->stored->shape.n_rows;
    int r;

    r = kv_quantized_gather(side->stored, layer->rows, n_rows, layer->n_stored, &chosen, reterr);
    if (!r)
        r = copy_new(layer, x, &new, reterr);
    if (!r)
        r = kv_fp8_append(chosen, x->n_tokens, new, &update->stored, n_saturated, reterr);
    if (r)
        return error_trace(r);
    update->returned = malloc(update->stored->n_values * sizeof(float));
    if (!update->returned)
        return error_detail_set(reterr, -ENOMEM, "no memory for %llu values of a quantised layer",
                                (unsigned long long)update->stored->n_values);
    return kv_quantized_decode(update->stored, update->returned, reterr);
}

/* Everything that can fail in an update of one side. */
static int prepare(Quantized *layer, Side *side, int8_t axis, bool flush, const KvTensor *x, SideUpdate *update,
                   uint64_t *n_saturated, ErrorDetail *reterr)
{
    int r;

    if (!side->stored)
        r = first_update(layer, axis, x, update, n_saturated, reterr);
    else if (layer->options.backend == KV_BACKEND_FP8)
        r = append_update(layer, side, x, update, n_saturated, reterr);
    else
        r = later_update(layer, side, axis, flush, x, update, reterr);
    /* a tensor that its groups do not divide is the caller's mistake, not a failure */
    return r == -EINVAL ? KV_COMPAT_E_VALUE : r ? error_trace(r) : 0;
}

static void apply(Side *side, const KvTensor *x, SideUpdate *update)
{
    free(side->returned);
    side->returned = TAKE_PTR(update->returned);
    if (update->stored) {
        (void)kv_quantized_unref(side->stored);
        side->stored = TAKE_PTR(update->stored);
        kv_held_deinit(&side->residual);
        side->residual = KV_HELD_NULL;
    } else {
        kv_held_append(&side->residual, x);
    }
}

static KvTensor returned_tensor(const Side *side, const KvTensor *x, uint64_t n_tokens)
{
    return (KvTensor){side->returned, x->n_rows, x->n_heads, (uint32_t)n_tokens, x->width, (uint32_t)n_tokens};
}

static int quantized_update(void *self, const KvTensor *k, const KvTensor *v, KvTensor *ret_k, KvTensor *ret_v, ErrorDetail *reterr)
{
    Quantized *layer = self;
    _cleanup_(side_update_clear) SideUpdate k_update = {0}, v_update = {0};
    uint64_t length = quantized_length(layer) + k->n_tokens, n_saturated = layer->n_saturated;
    bool flush = (uint64_t)layer->k.residual.n_tokens + k->n_tokens >= layer->options.residual_length;
    int r;

    if (length > UINT32_MAX)
        return error_detail_set(reterr, -EOVERFLOW, "%llu tokens are more than a layer holds", (unsigned long long)length);
    r = prepare(layer, &layer->k, layer->options.axis_key, flush, k, &k_update, &n_saturated, reterr);
    if (!r)
        r = prepare(layer, &layer->v, layer->options.axis_value, flush, v, &v_update, &n_saturated, reterr);
    if (r)
        return r;
    if (k_update.stored) {
        free(layer->rows);
        layer->rows = NULL;
        layer->n_rows = k->n_rows;
        layer->n_stored = (uint32_t)length;
    }
    layer->n_saturated = n_saturated;
    apply(&layer->k, k, &k_update);
    apply(&layer->v, v, &v_update);
    *ret_k = returned_tensor(&layer->k, k, length);
    *ret_v = returned_tensor(&layer->v, v, length);
    return 0;
}

/* ---- what does not look at values ----------------------------------------------------------------------------------------------- */

static void quantized_mask_sizes(const void *self, uint32_t n_tokens, uint64_t *ret_length, uint64_t *ret_offset)
{
    *ret_length = quantized_length(self) + n_tokens;
    *ret_offset = 0;
}

static int64_t quantized_max_length(const void *self)
{
    (void)self;
    return -1;
}

static bool quantized_is_croppable(const void *self)
{
    (void)self;
    return true;
}

static int quantized_check_crop(const void *self, uint64_t n_remove, ErrorDetail *reterr)
{
    (void)self;
    (void)n_remove;
    (void)reterr;
    return 0;
}

/* Drops the codes of tokens that no longer count, where groups and memory allow it; they are left out of what is decoded anyway. */
static void shrink_stored(Quantized *layer)
{
    _cleanup_(kv_quantized_unrefp) KvQuantized *k = NULL, *v = NULL;
    uint32_t n_rows = layer->k.stored->shape.n_rows;

    if (!kv_quantized_can_gather(layer->k.stored, layer->n_stored) || !kv_quantized_can_gather(layer->v.stored, layer->n_stored))
        return;
    if (kv_quantized_gather(layer->k.stored, NULL, n_rows, layer->n_stored, &k, NULL) ||
        kv_quantized_gather(layer->v.stored, NULL, n_rows, layer->n_stored, &v, NULL))
        return;
    (void)kv_quantized_unref(layer->k.stored);
    (void)kv_quantized_unref(layer->v.stored);
    layer->k.stored = TAKE_PTR(k);
    layer->v.stored = TAKE_PTR(v);
}

static void quantized_crop(void *self, uint64_t n_remove)
{
    Quantized *layer = self;
    uint64_t length = quantized_length(layer);
    uint32_t of_residual = (uint32_t)MIN(n_remove, (uint64_t)layer->k.residual.n_tokens);
    uint64_t of_stored = n_remove - of_residual;

    if (length == 0 || n_remove == 0)
        return;
    if (n_remove >= length) {
        uint64_t n_saturated = layer->n_saturated;

        quantized_clear(layer);
        layer->n_saturated = n_saturated;
        return;
    }
    kv_held_drop_back(&layer->k.residual, of_residual);
    kv_held_drop_back(&layer->v.residual, of_residual);
    if (of_stored) {
        layer->n_stored -= (uint32_t)of_stored;
        shrink_stored(layer);
    }
}

static int copy_side(const Side *side, const uint32_t *rows, uint32_t n_rows, Side *ret)
{
    ret->stored = kv_quantized_ref(side->stored);
    return side->residual.n_tokens ? kv_held_copy_rows(&side->residual, rows, n_rows, &ret->residual) : 0;
}

static int quantized_copy_rows(const void *self, const uint32_t *rows, uint32_t n_rows, void **ret, ErrorDetail *reterr)
{
    const Quantized *layer = self;
    _cleanup_(quantized_freep) Quantized *copy = calloc(1, sizeof(*copy));
    int r;

    if (!copy)
        return error_detail_set(reterr, -ENOMEM, "no memory for a quantised layer");
    copy->options = layer->options;
    copy->dtype = layer->dtype;
    copy->fp8_rule = layer->fp8_rule;
    copy->n_saturated = layer->n_saturated;
    copy->n_stored = layer->n_stored;
    if (layer->k.stored) {
        copy->rows = calloc(n_rows, sizeof(*copy->rows));
        if (!copy->rows)
            return error_detail_set(reterr, -ENOMEM, "no memory for %u rows of a quantised layer", n_rows);
        for (uint32_t i = 0; i < n_rows; i++)
            copy->rows[i] = layer->rows ? layer->rows[rows[i]] : rows[i];
        copy->n_rows = n_rows;
        r = copy_side(&layer->k, rows, n_rows, &copy->k);
        if (!r)
            r = copy_side(&layer->v, rows, n_rows, &copy->v);
        if (r)
            return error_detail_set(reterr, r, "no memory for %u rows of a residual", n_rows);
    }
    *ret = TAKE_PTR(copy);
    return 0;
}

static void quantized_adopt(void *self, void *other)
{
    quantized_clear(self);
    *(Quantized *)self = *(Quantized *)other;
    free(other);
}

static void quantized_reset(void *self)
{
    quantized_clear(self);
}

static uint64_t quantized_bytes(const void *self)
{
    const Quantized *layer = self;
    uint64_t bytes = layer->rows ? layer->n_rows * sizeof(*layer->rows) : 0;

    if (layer->k.stored)
        bytes += kv_quantized_bytes(layer->k.stored) + kv_quantized_bytes(layer->v.stored);
    return bytes + kv_held_bytes(&layer->k.residual) + kv_held_bytes(&layer->v.residual);
}

const KvCompatClass kv_compat_quantized_class = {
    .name = "quantized",
    .free = quantized_free,
    .early = quantized_early,
    .update = quantized_update,
    .mask_sizes = quantized_mask_sizes,
    .length = quantized_length,
    .max_length = quantized_max_length,
    .is_croppable = quantized_is_croppable,
    .check_crop = quantized_check_crop,
    .crop = quantized_crop,
    .copy_rows = quantized_copy_rows,
    .adopt = quantized_adopt,
    .reset = quantized_reset,
    .bytes = quantized_bytes,
};
