/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over quantised layers on the host. */

#include "cache/kv-host-internal.h"
#include "cache/kv-error.h"
#include "cache/kv-sizes.h"
#include "quant/kv-pack.h"

#include <math.h>
#include <string.h>

/* ---- life ------------------------------------------------------------------------------------------------------------------- */

static int compat_new(const KvHost *host, KvCompat **ret)
{
    KvCompatLayerSpec *specs = calloc(host->n_layers, sizeof(*specs));
    int r = specs ? 0 : -ENOMEM;

    for (uint32_t l = 0; l < host->n_layers && !r; l++) {
        specs[l] = (KvCompatLayerSpec){.kind = KV_COMPAT_OTHER, .class = &kv_compat_quantized_class};
        r = kv_compat_quantized_new(&host->options, host->dtype, KV_FP8_RULE_CAREFUL, &specs[l].state, NULL);
    }
    if (!r)
        r = kv_compat_new(specs, host->n_layers, ret, NULL);
    for (uint32_t l = 0; specs && l < host->n_layers && r; l++)
        (void)kv_compat_quantized_class.free(specs[l].state);
    free(specs);
    return r ? error_origin(KV_E_HOST_MEMORY) : 0;
}

static int check_layers(const KvModel *model, ErrorDetail *reterr)
{
    for (uint32_t l = 0; l < model->n_layers; l++) {
        const KvLayer layer = kv_model_layer(model, l);

        if (layer.kind != KV_LAYER_FULL || layer.conv_bytes > 0 || layer.recurrent_bytes > 0 || layer.sink_logits)
            return error_detail_set(reterr, -ENOTSUP, "cache: compatibility mode is for models of full attention only; layer %u is none", l);
    }
    return 0;
}

static size_t qkv_width(const KvShape *shape)
{
    return (size_t)(shape->n_heads + shape->n_kv_heads) * shape->k_head_dim + (size_t)shape->n_kv_heads * shape->v_head_dim;
}

static int host_memory(KvHost *host, const KvModel *model)
{
    size_t width = 0, pairs = 1, heads = 0;

    for (uint32_t l = 0; l < host->n_layers; l++) {
        const KvShape *shape = &host->layers[l].shape;

        width = MAX(width, qkv_width(shape));
        width = MAX(width, (size_t)shape->n_heads * shape->v_head_dim);
        heads = MAX(heads, (size_t)shape->n_kv_heads * shape->k_head_dim);
        heads = MAX(heads, (size_t)shape->n_kv_heads * shape->v_head_dim);
        pairs = MAX(pairs, (size_t)shape->rotary_dim / 2);
    }
    host->inv_freq = calloc(host->n_layers * pairs, sizeof(float));
    host->qkv = malloc(host->max_rows * width * sizeof(float));
    host->out = malloc(host->max_rows * width * sizeof(float));
    host->k = malloc(host->max_rows * heads * sizeof(float));
    host->v = malloc(host->max_rows * heads * sizeof(float));
    host->scores = malloc((size_t)host->max_tokens * sizeof(double));
    if (!host->inv_freq || !host->qkv || !host->out || !host->k || !host->v || !host->scores)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t l = 0; l < host->n_layers; l++) {
        size_t n = host->layers[l].shape.rotary_dim / 2;

        if (n > 0)
            memcpy(host->inv_freq + l * pairs, kv_model_layer(model, l).inv_freq, n * sizeof(float));
        host->layers[l].inv_freq = host->inv_freq + l * pairs;
    }
    return 0;
}

int kv_host_new(Gpu *gpu, const KvModel *model, const KvPolicy *policy, KvHost **ret, ErrorDetail *reterr)
{
    _cleanup_(kv_host_freep) KvHost *host = calloc(1, sizeof(*host));
    int r;

    if (!host)
        return error_origin(KV_E_HOST_MEMORY);
    r = check_layers(model, reterr);
    if (r)
        return r;
    host->gpu = gpu;
    host->options = policy->compatible;
    host->dtype = model->exact ? KV_DTYPE_F32 : KV_DTYPE_F16;
    host->n_layers = model->n_layers;
    host->max_rows = model->max_rows;
    host->max_tokens = policy->max_cache_tokens;
    host->layers = calloc(model->n_layers, sizeof(KvLayer));
    if (!host->layers)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t l = 0; l < model->n_layers; l++)
        host->layers[l] = kv_model_layer(model, l);
    r = host_memory(host, model);
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(host);
    return 0;
}

/* Bytes of a coded value, its share of scale and offset included. */
static double value_bytes(const KvQuantOptions *o, int8_t axis, KvDtype dtype)
{
    uint32_t blocks = kv_pack_blocks(o->nbits), g = o->q_group_size;
    double unit = o->nbits == 3 ? 4 : 1, code = unit / blocks;

    if (o->backend == KV_BACKEND_FP8)
        return 1;
    if (axis != (o->backend == KV_BACKEND_HQQ ? 1 : 0)) /* the matrix has a row for each member of a group */
        code = unit * ((g + blocks - 1) / blocks) / g;
    return code + 2.0 * (double)kv_dtype_bytes(dtype) / g;
}

void kv_host_plan(const KvModel *model, const KvPolicy *policy, uint64_t *ret_bytes_per_token, uint64_t *ret_residual_bytes)
{
    const KvQuantOptions *o = &policy->compatible;
    KvDtype dtype = model->exact ? KV_DTYPE_F32 : KV_DTYPE_F16;
    uint64_t k = 0, v = 0;

    for (uint32_t l = 0; l < model->n_layers; l++) {
        const KvLayer layer = kv_model_layer(model, l);

        k += (uint64_t)layer.shape.n_kv_heads * layer.shape.k_head_dim;
        v += (uint64_t)layer.shape.n_kv_heads * layer.shape.v_head_dim;
    }
    *ret_bytes_per_token = (uint64_t)ceil((double)k * value_bytes(o, o->axis_key, dtype) + (double)v * value_bytes(o, o->axis_value, dtype));
    *ret_residual_bytes = (k + v) * o->residual_length * sizeof(float) * 3 / 2; /* room grows by halves */
}

KvHost *kv_host_free(KvHost *host)
{
    if (!host)
        return NULL;
    free(host->layers);
    free(host->inv_freq);
    gpu_free_host(host->gpu, host->qkv);
    gpu_free_host(host->gpu, host->out);
    free(host->k);
    free(host->v);
    free(host->scores);
    free(host);
    return NULL;
}

/* ---- pasts ------------------------------------------------------------------------------------------------------------------ */

static void drop_pending(KvHostPast *past)
{
    for (uint32_t i = 0; i < 2 * past->host->n_layers; i++)
        kv_held_deinit(&past->pending[i]);
    past->n_pending = 0;
}

static bool same_layer(const KvLayer *a, const KvLayer *b)
{
    size_t n = a->shape.rotary_dim / 2;

    return memcmp(&a->shape, &b->shape, sizeof(a->shape)) == 0 && memcmp(&a->scale, &b->scale, sizeof(a->scale)) == 0 &&
           memcmp(&a->softcap, &b->softcap, sizeof(a->softcap)) == 0 && (n == 0 || memcmp(a->inv_freq, b->inv_freq, n * sizeof(float)) == 0);
}

bool kv_host_is_same(const KvHost *a, const KvHost *b)
{
    if (a->n_layers != b->n_layers || a->dtype != b->dtype || !kv_quant_options_equal(&a->options, &b->options))
        return false;
    for (uint32_t l = 0; l < a->n_layers; l++)
        if (!same_layer(&a->layers[l], &b->layers[l]))
            return false;
    return true;
}

void kv_host_describe(const KvHost *host, char *ret, size_t size)
{
    const KvQuantOptions *o = &host->options;

    if (o->backend == KV_BACKEND_FP8)
        (void)snprintf(ret, size, "fp8");
    else
        (void)snprintf(ret, size, "%s of %u bits, axes %d and %d, groups of %u, residual of %u", kv_backend_to_string(o->backend), o->nbits,
                       o->axis_key, o->axis_value, o->q_group_size, o->residual_length);
}

KvHostPast *kv_host_past_free(KvHostPast *past)
{
    if (!past)
        return NULL;
    if (past->pending)
        drop_pending(past);
    free(past->pending);
    kv_compat_free(past->now);
    kv_compat_free(past->next);
    free(past);
    return NULL;
}
static KvHostPast *past_new(const KvHost *host)
{
    _cleanup_(kv_host_past_freep) KvHostPast *past = calloc(1, sizeof(*past));

    if (!past)
        return NULL;
    past->host = host;
    past->pending = calloc(2 * (size_t)host->n_layers, sizeof(KvHeld));
    return past->pending ? TAKE_PTR(past) : NULL;
}

KvHostPast *kv_host_past_new(const KvHost *host)
{
    _cleanup_(kv_host_past_freep) KvHostPast *past = past_new(host);

    return past && compat_new(host, &past->now) == 0 ? TAKE_PTR(past) : NULL;
}

KvHostPast *kv_host_past_copy(const KvHost *host, const KvHostPast *from)
{
    _cleanup_(kv_host_past_freep) KvHostPast *past = past_new(host);
    const uint32_t row = 0;

    if (!past || kv_compat_copy(from->now, &past->now, NULL))
        return NULL;
    for (uint32_t i = 0; i < 2 * from->host->n_layers; i++)
        if (from->pending[i].values && kv_held_copy_rows(&from->pending[i], &row, 1, &past->pending[i]))
            return NULL;
    past->n_pending = from->n_pending;
    return TAKE_PTR(past);
}

void kv_host_past_clear(KvHostPast *past)
{
    drop_pending(past);
    kv_compat_reset(past->now);
}

int kv_host_past_crop(KvHostPast *past, uint32_t n, ErrorDetail *reterr)
{
    uint32_t pending = MIN(n, past->n_pending);

    if (n > pending && kv_compat_crop(past->now, -(int64_t)(n - pending), reterr))
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t i = 0; i < 2 * past->host->n_layers && pending > 0; i++)
        kv_held_drop_back(&past->pending[i], pending);
    past->n_pending -= pending;
    return 0;
}

uint32_t kv_host_past_pending(const KvHostPast *past)
{
    return past->n_pending;
}

uint64_t kv_host_past_bytes(const KvHostPast *past)
{
    uint64_t bytes = kv_compat_bytes(past->now);

    for (uint32_t i = 0; i < 2 * past->host->n_layers; i++)
        bytes += kv_held_bytes(&past->pending[i]);
    return bytes;
}

/* ---- a pass ------------------------------------------------------------------------------------------------------------------- */

int kv_host_past_begin(KvHostPast *past, uint32_t length, uint32_t n_tokens)
{
    if (kv_compat_copy(past->now, &past->next, NULL))
        return error_origin(KV_E_HOST_MEMORY);
    past->length = length;
    past->n_tokens = n_tokens;
    return 0;
}

void kv_host_past_commit(KvHostPast *past, bool more)
{
    if (more) {
        past->next = kv_compat_free(past->next);
        past->n_pending += past->n_tokens;
        return;
    }
    kv_compat_free(past->now);
    past->now = TAKE_PTR(past->next);
    drop_pending(past);
}

void kv_host_past_abort(KvHostPast *past)
{
    past->next = kv_compat_free(past->next);
    for (uint32_t i = 0; i < 2 * past->host->n_layers; i++)
        if (past->pending[i].values && past->pending[i].n_tokens > past->n_pending)
            kv_held_drop_back(&past->pending[i], past->pending[i].n_tokens - past->n_pending);
}

/* In place, head by head: pairs are (f, f + rotary_dim / 2), angles rounded to float32 as elsewhere. */
static void rotate(const KvLayer *layer, uint32_t position, float *heads, uint32_t n_heads)
{
    uint32_t half = layer->shape.rotary_dim / 2;

    for (uint32_t f = 0; f < half; f++) {
        double angle = (double)((float)position * layer->inv_freq[f]);
        float c = (float)cos(angle), s = (float)sin(angle);

        for (uint32_t h = 0; h < n_heads; h++) {
            float *head = heads + (size_t)h * layer->shape.k_head_dim, a = head[f], b = head[f + half];

            head[f] = a * c - b * s;
            head[f + half] = b * c + a * s;
        }
    }
}

/* Rotates the rows' queries in place, and gathers the new keys and values by head. */
static void split_rows(const KvHost *host, const KvLayer *layer, const KvHostPast *past, float *rows)
{
    const KvShape *shape = &layer->shape;
    uint32_t n = past->n_tokens;

    for (uint32_t t = 0; t < n; t++) {
        float *q = rows + t * qkv_width(shape), *k = q + (size_t)shape->n_heads * shape->k_head_dim;
        const float *v = k + (size_t)shape->n_kv_heads * shape->k_head_dim;

        rotate(layer, past->length + t, q, shape->n_heads);
        rotate(layer, past->length + t, k, shape->n_kv_heads);
        for (uint32_t h = 0; h < shape->n_kv_heads; h++) {
            for (uint32_t d = 0; d < shape->k_head_dim; d++)
                host->k[((size_t)h * n + t) * shape->k_head_dim + d] = kv_dtype_round(host->dtype, k[h * shape->k_head_dim + d]);
            for (uint32_t d = 0; d < shape->v_head_dim; d++)
                host->v[((size_t)h * n + t) * shape->v_head_dim + d] = kv_dtype_round(host->dtype, v[h * shape->v_head_dim + d]);
        }
    }
}

/* The new tokens behind the pending ones. */
static int append_pending(KvHeld *held, const float *values, const KvShape *shape, uint32_t n_tokens, uint32_t width)
{
    const KvTensor tensor = {.values = values, .n_rows = 1, .n_heads = shape->n_kv_heads, .n_tokens = n_tokens, .width = width,
                             .head_tokens = n_tokens};
    int r;

    r = held->values ? 0 : kv_held_init(held, &tensor, n_tokens);
    if (!r)
        r = kv_held_reserve(held, n_tokens);
    if (r)
        return error_origin(KV_E_HOST_MEMORY);
    kv_held_append(held, &tensor);
    return 0;
}

/* softmax(q k / scale) v over the keys up to the row's own. */
static void attend_row(const KvHost *host, const KvLayer *layer, const KvTensor *k, const KvTensor *v, uint32_t n_keys, const float *q,
                       float *out)
{
    const KvShape *shape = &layer->shape;
    uint32_t group = shape->n_heads / shape->n_kv_heads;

    for (uint32_t h = 0; h < shape->n_heads; h++) {
        double most = -INFINITY, sum = 0;

        for (uint32_t j = 0; j < n_keys; j++) {
            const float *key = kv_tensor_at(k, 0, h / group, j), *query = q + (size_t)h * shape->k_head_dim;
            double score = 0;

            for (uint32_t d = 0; d < shape->k_head_dim; d++)
                score += (double)query[d] * (double)key[d];
            score *= (double)layer->scale;
            host->scores[j] = layer->softcap > 0 ? (double)layer->softcap * tanh(score / (double)layer->softcap) : score;
            most = MAX(most, host->scores[j]);
        }
        for (uint32_t j = 0; j < n_keys; j++) {
            host->scores[j] = exp(host->scores[j] - most);
            sum += host->scores[j];
        }
        for (uint32_t d = 0; d < shape->v_head_dim; d++) {
            double value = 0;

            for (uint32_t j = 0; j < n_keys; j++)
                value += host->scores[j] * (double)kv_tensor_at(v, 0, h / group, j)[d];
            out[(size_t)h * shape->v_head_dim + d] = (float)(value / sum);
        }
    }
}

static int run_sequence(const KvHost *host, uint32_t l, KvHostPast *past, float *rows, float *out, ErrorDetail *reterr)
{
    const KvLayer *layer = &host->layers[l];
    KvHeld *held_k = &past->pending[2 * l], *held_v = &past->pending[2 * l + 1];
    KvTensor new_k, new_v, k, v;
    int r;

    split_rows(host, layer, past, rows);
    r = append_pending(held_k, host->k, &layer->shape, past->n_tokens, layer->shape.k_head_dim);
    if (!r)
        r = append_pending(held_v, host->v, &layer->shape, past->n_tokens, layer->shape.v_head_dim);
    if (r)
        return error_trace(r);
    new_k = kv_held_view(held_k, 0, held_k->n_tokens);
    new_v = kv_held_view(held_v, 0, held_v->n_tokens);
    r = kv_compat_update(past->next, l, &new_k, &new_v, &k, &v, reterr);
    if (r == -ENOMEM)
        return error_origin(KV_E_HOST_MEMORY);
    if (r) {
        error_detail_prefix(reterr, "cache: layer %u", l); /* which key and why is there */
        return error_origin(-EINVAL);
    }
    for (uint32_t t = 0; t < past->n_tokens; t++)
        attend_row(host, layer, &k, &v, past->length + t + 1, rows + t * qkv_width(&layer->shape),
                   out + (size_t)t * layer->shape.n_heads * layer->shape.v_head_dim);
    kv_compat_quantized_release(past->next->layers[l].self); /* else all layers would be there decoded */
    return 0;
}

int kv_host_layer(KvHost *host, uint32_t layer, KvHostPast *const *pasts, uint32_t n_pasts, const GpuBuffer *qkv, GpuBuffer *out,
                  ErrorDetail *reterr)
{
    const KvShape *shape = &host->layers[layer].shape;
    size_t width = qkv_width(shape), out_width = (size_t)shape->n_heads * shape->v_head_dim, n_rows = 0, row = 0;
    _cleanup_(gpu_event_unrefp) GpuEvent *event = NULL;
    int r;

    for (uint32_t i = 0; i < n_pasts; i++)
        n_rows += pasts[i]->n_tokens;
    r = gpu_download(host->gpu, GPU_QUEUE_COMPUTE, qkv, 0, host->qkv, n_rows * width * sizeof(float), GPU_WAIT_NONE, "kv host", &event);
    if (!r)
        r = gpu_event_wait(host->gpu, event, reterr);
    if (r)
        return error_trace(kv_error(r));
    for (uint32_t i = 0; i < n_pasts; i++) {
        r = run_sequence(host, layer, pasts[i], host->qkv + row * width, host->out + row * out_width, reterr);
        if (r)
            return error_trace(r);
        row += pasts[i]->n_tokens;
    }
    event = gpu_event_unref(event);
    /* The memory is written again in the next layer. */
    r = gpu_upload(host->gpu, GPU_QUEUE_COMPUTE, out, 0, host->out, n_rows * out_width * sizeof(float), GPU_WAIT_NONE, "kv host", &event);
    if (!r)
        r = gpu_event_wait(host->gpu, event, reterr);
    return error_trace(kv_error(r));
}
