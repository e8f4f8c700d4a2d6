/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What compatibility mode keeps of a sequence, to and from an image: a chunk for the keys and one for the values of each layer.
 *
 *   record, codes, scales, offsets      of the tokens that are stored
 *   residual, pending                   floats, (n_kv_heads, tokens, head_dim) each
 */

#include "cache/kv-file-internal.h"
#include "cache/kv-host-internal.h"
#include "quant/kv-pack.h"

#include <string.h>
#include <xxhash.h>

/* The first three make the length. */
typedef struct HostRecord {
    uint32_t n_counted, n_residual, n_pending;
    uint32_t n_stored; /* tokens in the codes: those behind n_counted were cropped */
    uint64_t n_saturated;
    float scale;
    uint32_t is_alone;
} HostRecord;

static_assert(sizeof(HostRecord) == 32, "no padding in the file");

static uint32_t width_of(const KvShape *shape, uint32_t side)
{
    return side == 0 ? shape->k_head_dim : shape->v_head_dim;
}

uint64_t kv_host_layout(const KvHost *host, uint64_t seed)
{
    const KvQuantOptions *o = &host->options;
    const uint64_t facts[] = {o->backend,       o->nbits, (uint64_t)(o->axis_key + 1), (uint64_t)(o->axis_value + 1),
                              o->q_group_size, o->residual_length, host->dtype, host->n_layers};
    uint64_t hash = XXH3_64bits_withSeed(facts, sizeof(facts), seed);

    for (uint32_t l = 0; l < host->n_layers; l++) {
        const KvShape *shape = &host->layers[l].shape;
        const uint64_t dims[] = {l, shape->n_kv_heads, shape->k_head_dim, shape->v_head_dim, shape->rotary_dim};

        hash = XXH3_64bits_withSeed(dims, sizeof(dims), hash);
    }
    return hash;
}

/* ---- saving ------------------------------------------------------------------------------------------------------------------- */

static int add_held(const KvHeld *held, KvImage *image)
{
    KvTensor view;
    int r = 0;

    if (!held->values || held->n_tokens == 0)
        return 0;
    view = kv_held_view(held, 0, held->n_tokens);
    for (uint32_t h = 0; h < held->n_heads && !r; h++)
        r = kv_image_piece(image, kv_tensor_at(&view, 0, h, 0), (size_t)held->n_tokens * held->width * sizeof(float));
    return r;
}

static int add_tensor(const KvQuantized *tensor, KvImage *image)
{
    size_t scales = tensor->n_groups * kv_dtype_bytes(tensor->options.dtype);
    int r = kv_image_piece(image, tensor->packed, tensor->packed_bytes);

    if (!r && scales > 0)
        r = kv_image_piece(image, tensor->scales, scales);
    if (!r && scales > 0)
        r = kv_image_piece(image, tensor->offsets, scales);
    return r;
}

static int add_side(const KvHostPast *past, uint32_t layer, uint32_t side, HostRecord *record, KvImage *image)
{
    const KvHeld *pending = &past->pending[2 * layer + side], *residual;
    KvCompatQuantizedParts parts;
    const KvQuantized *tensor;
    int r;

    kv_compat_quantized_parts(kv_host_past_layer(past, layer), &parts);
    tensor = side == 0 ? parts.k : parts.v;
    residual = side == 0 ? &parts.k_residual : &parts.v_residual;
    *record = (HostRecord){.n_counted = parts.n_stored, .n_residual = residual->n_tokens, .n_pending = past->n_pending,
                           .n_stored = tensor ? tensor->shape.n_tokens : 0, .n_saturated = parts.n_saturated,
                           .scale = tensor ? tensor->scale : 0, .is_alone = tensor && kv_quantized_is_alone(tensor)};
    r = kv_image_chunk(image, KV_CHUNK_HOST, layer, side);
    if (!r)
        r = kv_image_piece(image, record, sizeof(*record));
    if (!r && tensor)
        r = add_tensor(tensor, image);
    if (!r)
        r = add_held(residual, image);
    return r ? error_trace(r) : add_held(pending, image);
}

int kv_host_past_save(const KvHostPast *past, KvImage *image, void **ret_memory)
{
    _cleanup_(freep) HostRecord *records = calloc(2 * (size_t)past->host->n_layers, sizeof(*records));
    int r = records ? 0 : error_origin(-ENOMEM);

    for (uint32_t i = 0; i < 2 * past->host->n_layers && !r; i++)
        r = add_side(past, i / 2, i % 2, &records[i], image);
    if (r)
        return error_trace(r);
    *ret_memory = TAKE_PTR(records);
    return 0;
}

/* ---- restoring ---------------------------------------------------------------------------------------------------------------- */

static int bad(ErrorDetail *reterr, uint32_t layer, uint32_t side)
{
    return error_detail_set(reterr, -EBADMSG, "saved cache: the %s of layer %u do not add up", side == 0 ? "keys" : "values", layer);
}

static bool may_be_alone(const KvQuantOptions *options, int8_t axis)
{
    return options->backend == KV_BACKEND_FP8 || (options->backend == KV_BACKEND_QUANTO && axis == 0);
}

/* Where codes and scales of the record lie; false: of no such tensor. */
static bool plan_tensor(const KvHost *host, uint32_t layer, uint32_t side, const HostRecord *record, KvQuantized *ret)
{
    const KvShape *shape = &host->layers[layer].shape;
    const KvQuantOptions *o = &host->options;
    const KvTensorShape tensor = {1, shape->n_kv_heads, record->n_stored, width_of(shape, side)};
    const KvQuantizeOptions options = {o->nbits, side == 0 ? o->axis_key : o->axis_value, o->q_group_size, host->dtype};
    bool alone = record->is_alone == 1;
    uint64_t n_values;

    if (kv_tensor_size(&tensor, &n_values, NULL) || record->is_alone > 1 || (alone && !may_be_alone(o, options.axis)) ||
        (o->backend == KV_BACKEND_FP8 && !alone) || (!alone && n_values % options.group_size != 0))
        return false;
    *ret = kv_quantized_arrange(o->backend, &options, &tensor, n_values, alone);
    ret->scale = record->scale;
    return true;
}

/* One side of a layer, on its way from a chunk. */
typedef struct HostSide {
    HostRecord record;
    KvQuantized *tensor;
    KvHeld residual, pending;
} HostSide;

static void host_side_clear(HostSide *side)
{
    (void)kv_quantized_unref(side->tensor);
    kv_held_deinit(&side->residual);
    kv_held_deinit(&side->pending);
}

/* The next @bytes of the chunk to @ret; false: there are fewer. */
static bool take_bytes(const KvImageChunk *chunk, uint64_t *at, void *ret, uint64_t bytes)
{
    if (chunk->bytes - *at < bytes)
        return false;
    if (bytes > 0)
        memcpy(ret, (const uint8_t *)chunk->data + *at, bytes);
    *at += bytes;
    return true;
}

static int take_tensor(const KvImageChunk *chunk, uint64_t *at, const KvQuantized *plan, KvQuantized **ret)
{
    uint64_t scales = plan->n_groups * kv_dtype_bytes(plan->options.dtype), left = chunk->bytes - *at, packed;
    int r;

    /* Nothing is allocated for what the file cannot hold. */
    if (!kv_packed_bytes(plan->options.nbits, plan->n_rows, plan->n_columns, &packed) || packed > left || scales > (left - packed) / 2)
        return -EBADMSG;
    r = kv_quantized_new(plan, ret, NULL);
    if (r)
        return error_trace(r);
    if (!take_bytes(chunk, at, (*ret)->packed, (*ret)->packed_bytes) || !take_bytes(chunk, at, (*ret)->scales, scales) ||
        !take_bytes(chunk, at, (*ret)->offsets, scales))
        return -EBADMSG;
    return 0;
}

static int take_held(const KvImageChunk *chunk, uint64_t *at, uint32_t n_tokens, const KvTensor *like, KvHeld *ret)
{
    uint64_t bytes = (uint64_t)n_tokens * like->n_heads * like->width * sizeof(float);
    int r;

    if (n_tokens == 0)
        return 0;
    if (chunk->bytes - *at < bytes)
        return -EBADMSG;
    r = kv_held_init(ret, like, n_tokens);
    if (r)
        return error_trace(r);
    ret->n_tokens = n_tokens;
    return take_bytes(chunk, at, ret->values, bytes) ? 0 : -EBADMSG;
}

static bool record_adds_up(const HostRecord *record, uint32_t length)
{
    return (uint64_t)record->n_counted + record->n_residual + record->n_pending == length && record->n_counted <= record->n_stored &&
           (record->n_counted > 0) == (record->n_stored > 0) && (record->n_stored > 0 || record->n_residual == 0);
}

static int read_side(const KvHost *host, const KvImage *image, uint32_t layer, uint32_t side, uint32_t length, HostSide *ret)
{
    const KvImageChunk *chunk = kv_image_find(image, KV_CHUNK_HOST, layer, side);
    const KvShape *shape = &host->layers[layer].shape;
    const KvTensor like = {.n_rows = 1, .n_heads = shape->n_kv_heads, .width = width_of(shape, side)};
    KvQuantized plan;
    uint64_t at = 0;
    int r = 0;

    if (!chunk || !take_bytes(chunk, &at, &ret->record, sizeof(ret->record)) || !record_adds_up(&ret->record, length))
        return -EBADMSG;
    if (ret->record.n_stored > 0)
        r = plan_tensor(host, layer, side, &ret->record, &plan) ? take_tensor(chunk, &at, &plan, &ret->tensor) : -EBADMSG;
    if (!r)
        r = take_held(chunk, &at, ret->record.n_residual, &like, &ret->residual);
    if (!r)
        r = take_held(chunk, &at, ret->record.n_pending, &like, &ret->pending);
    return r ? r : at == chunk->bytes ? 0 : -EBADMSG;
}

static bool sides_agree(const HostRecord *a, const HostRecord *b)
{
    return a->n_counted == b->n_counted && a->n_residual == b->n_residual && a->n_pending == b->n_pending &&
           a->n_saturated == b->n_saturated;
}

static void set_layer(KvHostPast *past, uint32_t l, HostSide *k, HostSide *v)
{
    const KvShape *shape = &past->host->layers[l].shape;
    KvCompatQuantizedParts parts = {k->tensor, v->tensor, k->residual, v->residual, k->record.n_counted, k->record.n_saturated};
    KvCompatLayer *layer = &past->now->layers[l];

    kv_compat_quantized_take(layer->self, &parts);
    if (k->tensor) {
        layer->initialised = true;
        layer->n_rows = 1;
        layer->n_heads = shape->n_kv_heads;
        layer->k_width = shape->k_head_dim;
        layer->v_width = shape->v_head_dim;
    }
    past->pending[2 * l] = k->pending;
    past->pending[2 * l + 1] = v->pending;
    past->n_pending = k->record.n_pending;
    k->tensor = v->tensor = NULL;
    k->residual = v->residual = k->pending = v->pending = KV_HELD_NULL;
}

static int restore_layer(KvHostPast *past, const KvImage *image, uint32_t l, uint32_t length, ErrorDetail *reterr)
{
    _cleanup_(host_side_clear) HostSide k = {0}, v = {0};
    int r;

    r = read_side(past->host, image, l, 0, length, &k);
    if (r == -EBADMSG)
        return bad(reterr, l, 0);
    if (!r)
        r = read_side(past->host, image, l, 1, length, &v);
    if (r == -EBADMSG || (!r && (!sides_agree(&k.record, &v.record) || (l > 0 && k.record.n_pending != past->n_pending))))
        return bad(reterr, l, 1);
    if (r)
        return error_origin(KV_E_HOST_MEMORY);
    set_layer(past, l, &k, &v);
    return 0;
}

int kv_host_past_restore(const KvHost *host, const KvImage *image, uint32_t length, KvHostPast **ret, ErrorDetail *reterr)
{
    _cleanup_(kv_host_past_freep) KvHostPast *past = kv_host_past_new(host);
    int r = 0;

    if (!past)
        return error_origin(KV_E_HOST_MEMORY);
    if (length > host->max_tokens)
        return error_detail_set(reterr, KV_E_CONTEXT, "saved cache: %u tokens, there is room for %u", length, host->max_tokens);
    for (uint32_t l = 0; l < host->n_layers && length > 0 && !r; l++)
        r = restore_layer(past, image, l, length, reterr);
    if (r)
        return r;
    *ret = TAKE_PTR(past);
    return 0;
}
