/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward pass of arch "llama":
 *     x = E[ids];  per layer: x += Wo attention(rope(Wq n, Wk n), Wv n), n = norm(x);  x += Wdown (silu(Wgate m) * Wup m), m = norm(x);
 *     logits = Wout norm(x)
 * Everything is queued without waiting; one wait with a deadline ends the pass.
 */

#include "daemon/model/model-private.h"

#include <string.h>

/* ---- one pass as a host sees it ------------------------------------------------------------------------------------------------ */

typedef struct Batch {
    uint32_t n_rows, n_logits;
} Batch;

/* Where a row of the pass finds its embedding: by its id, or, when only rows are brought, in the tile that lies at its place. */
static int32_t window_id(const Model *model, uint32_t row, int32_t id)
{
    uint32_t window = model->weights.placement.window_rows;

    return window ? (int32_t)(row % window * WEIGHT_TILE_ROWS) + id % WEIGHT_TILE_ROWS : id;
}

/* Checks the items and writes token ids and wanted rows into the model's host buffer. */
static int prepare_batch(Model *model, const ModelItem *items, uint32_t n_items, bool want_logits, Batch *ret, ErrorDetail *reterr)
{
    uint32_t n_vocab = model->file->hparams.model.n_vocab, max_rows = model->options.max_rows;
    int32_t *ids = model->host_input, *rows = ids + max_rows, *vocabulary = rows + max_rows;
    Batch batch = {0, 0};

    if (model->weights.broken)
        return error_detail_set(reterr, MODEL_E_DEVICE, "buffers of '%.60s' are gone from the device: it has to be loaded again",
                                model->file->hparams.model.name);
    for (uint32_t i = 0; i < n_items; i++) {
        const ModelItem *item = &items[i];

        if (item->n_tokens == 0 || item->n_tokens > max_rows - batch.n_rows)
            return error_detail_set(reterr, -EINVAL, "a pass takes 1 to %u tokens", max_rows);
        if (kv_cache_length(item->cache) + (uint64_t)item->n_tokens > model->options.context)
            return error_detail_set(reterr, MODEL_E_CONTEXT, "%u tokens after %u are more than the context of %u", item->n_tokens,
                                    kv_cache_length(item->cache), model->options.context);
        for (uint32_t t = 0; t < item->n_tokens; t++) {
            if (item->tokens[t] < 0 || (uint32_t)item->tokens[t] >= n_vocab)
                return error_detail_set(reterr, -EINVAL, "token id %d is not in the vocabulary of %u", item->tokens[t], n_vocab);
            if (want_logits && (item->all_logits || t == item->n_tokens - 1))
                rows[batch.n_logits++] = (int32_t)batch.n_rows;
            vocabulary[batch.n_rows] = item->tokens[t];
            ids[batch.n_rows] = window_id(model, batch.n_rows, item->tokens[t]);
            batch.n_rows++;
        }
    }
    if (batch.n_rows == 0)
        return error_detail_set(reterr, -EINVAL, "a pass takes 1 to %u tokens", max_rows);
    *ret = batch;
    return 0;
}

static int upload_batch(Model *model, const Batch *batch)
{
    /* In one: every copy on its own waits behind what is on its way into the rings. */
    uint64_t n = batch->n_logits ? (uint64_t)model->options.max_rows + batch->n_logits : batch->n_rows;

    return gpu_upload(model->gpu, GPU_QUEUE_COMPUTE, model->input, 0, model->host_input, n * sizeof(int32_t), GPU_WAIT_NONE, "token ids",
                      NULL);
}

/* ---- embedding ------------------------------------------------------------------------------------------------------------------ */

/* Tiles of the tokens' rows, from @first on. */
static int bring_rows(Model *model, uint32_t first, uint32_t n)
{
    const WeightsMatrix *embedding = &model->file->weights.embedding;
    const uint8_t *tiles = weights_matrix(&model->file->weights, embedding);
    const int32_t *ids = model->host_input + 2 * (size_t)model->options.max_rows + first;
    int r = 0;

    for (uint32_t i = 0; i < n && !r; i++)
        r = gpu_upload(model->gpu, GPU_QUEUE_COMPUTE, model->weights.window, i * embedding->tile_bytes,
                       tiles + (uint32_t)ids[i] / WEIGHT_TILE_ROWS * embedding->tile_bytes, embedding->tile_bytes, GPU_WAIT_NONE,
                       "embedding rows", NULL);
    return r;
}

/* An embedding that is not on the device: as many rows at once as the window holds; all but the only ones by way of another buffer. */
static int embed_rows(Model *model, const Batch *batch)
{
    const ModelParams *params = &model->file->hparams.model;
    const WeightsMatrix *embedding = &model->file->weights.embedding;
    uint32_t at_once = model->weights.placement.window_rows;
    GpuBuffer *scratch = gpu_buffer_bytes(model->hidden) > gpu_buffer_bytes(model->qkv) ? model->hidden : model->qkv;
    uint64_t row_bytes = (uint64_t)params->n_embd * sizeof(float);
    OpsWeight table = {
        .type = embedding->tensor->type,
        .buffer = model->weights.window,
        .n_rows = at_once * WEIGHT_TILE_ROWS,
        .n_cols = embedding->n_cols,
    };
    int r = 0;

    if (at_once < batch->n_rows && at_once * row_bytes > gpu_buffer_bytes(scratch))
        return error_origin(-EOVERFLOW); /* q, k and v are wider than the residual stream in every model of this kind */
    for (uint32_t done = 0, n; done < batch->n_rows && !r; done += n) {
        bool only = batch->n_rows <= at_once;

        n = MIN(at_once, batch->n_rows - done);
        r = bring_rows(model, done, n);
        if (!r)
            r = ops_embed(model->ops, &table, 1.0f, model->input, done * sizeof(int32_t), n, only ? model->x : scratch);
        if (!r && !only)
            r = gpu_copy(model->gpu, GPU_QUEUE_COMPUTE, model->x, done * row_bytes, scratch, 0, n * row_bytes, GPU_WAIT_NONE,
                         "embedding", NULL);
    }
    return r;
}

static int run_embedding(Model *model, const Batch *batch)
{
    const WeightsMatrix *embedding = &model->file->weights.embedding;
    OpsWeight table = {
        .type = embedding->tensor->type,
        .buffer = model->weights.buffers[WEIGHTS_BLOCK_EMBEDDING],
        .offset = embedding->offset,
        .n_rows = embedding->n_rows,
        .n_cols = embedding->n_cols,
    };

    if (model->weights.placement.window_rows > 0)
        return embed_rows(model, batch);
    return ops_embed(model->ops, &table, 1.0f, model->input, 0, batch->n_rows, model->x);
}

/* ---- products ------------------------------------------------------------------------------------------------------------------- */

static void set_norm(const Model *model, const WeightsMatrix *norm, OpsLinear *linear)
{
    linear->norm_weight = model->weights.buffers[norm->block];
    linear->norm_offset = norm->offset;
    linear->norm_eps = model->file->hparams.model.norm_eps;
}

/* A product of the graph without its weights. */
static OpsLinear make_product(const Model *model, PlacementUse use, uint32_t layer)
{
    const WeightsMatrix *tensors = model->file->weights.layers[layer].tensors;
    const ModelParams *params = &model->file->hparams.model;
    OpsLinear linear = {.x = model->x, .y = model->x, .epilogue = OPS_EPILOGUE_STORE, .fine = true};

    switch (use) {
    case PLACEMENT_O:
        linear.x = model->attended;
        linear.epilogue = OPS_EPILOGUE_ADD;
        linear.y_cols = params->n_embd;
        break;
    case PLACEMENT_GATED:
        set_norm(model, &tensors[WEIGHTS_FFN_NORM], &linear);
        linear.y = model->hidden;
        linear.epilogue = OPS_EPILOGUE_SWIGLU;
        linear.y_cols = params->n_ff;
        /* Half of all products are gate and up: with their input in 8 bits and that of the others in 16, prefill is a fifth slower than
         * with 8 bits everywhere, and the divergence from the oracle is a third (mean KLD 0.0007 against 0.0022, f16 cache). */
        linear.fine = false;
        break;
    case PLACEMENT_DOWN:
        linear.x = model->hidden;
        linear.epilogue = OPS_EPILOGUE_ADD;
        linear.y_cols = params->n_embd;
        break;
    case PLACEMENT_QKV:
        set_norm(model, &tensors[WEIGHTS_ATTN_NORM], &linear);
        linear.y = model->qkv;
        linear.y_cols = (uint32_t)kv_row_values(&params->attention);
        break;
    case PLACEMENT_HEAD:
        set_norm(model, &model->file->weights.output_norm, &linear);
        linear.x_rows = model->input;
        linear.y = model->logits;
        linear.y_cols = params->n_vocab;
        break;
    }
    return linear;
}

static OpsLinear make_linear(const Model *model, const PlacementPiece *piece, const GpuBuffer *buffer)
{
    OpsLinear linear = make_product(model, piece->use, piece->layer);

    linear.y_first = piece->y_first;
    linear.n_weights = piece->n_slices;
    for (uint32_t i = 0; i < piece->n_slices; i++) {
        const PlacementSlice *slice = &piece->slices[i];

        linear.weights[i] = (OpsWeight){
            .type = slice->matrix->tensor->type,
            .buffer = buffer,
            .offset = slice->to,
            .n_rows = slice->n_rows,
            .n_cols = slice->matrix->n_cols,
        };
    }
    return linear;
}

/* One part of the weights: its products as one chain, after its copy when it streams. */
static int run_part(Model *model, uint32_t index, uint32_t n_rows, uint64_t x_rows_offset)
{
    const Placement *placement = &model->weights.placement;
    const PlacementPart *part = &placement->parts[index];
    const GpuBuffer *buffer = NULL;
    OpsLinear chain[4];
    GpuEvent *wait = NULL, *done = NULL;
    int r;

    if (part->n_pieces > N_ELEMENTS(chain))
        return error_origin(-EINVAL);
    r = weights_device_acquire(&model->weights, index, &buffer, &wait);
    if (r)
        return r;
    for (uint32_t i = 0; i < part->n_pieces; i++) {
        chain[i] = make_linear(model, &placement->pieces[part->first_piece + i], buffer);
        chain[i].x_rows_offset = x_rows_offset;
    }
    if (!part->streamed)
        return ops_chain(model->ops, chain, part->n_pieces, n_rows);
    r = ops_chain_after(model->ops, chain, part->n_pieces, n_rows, (GpuWait){&wait, 1}, &done);
    return r ? r : weights_device_release(&model->weights, index, done);
}

/* What stands between two attentions: what is on the device as one chain. */
static int run_span(Model *model, uint32_t span, const Batch *batch)
{
    const uint32_t *first = &model->weights.placement.span_parts[span];
    int r = 0;

    for (uint32_t i = first[0]; i < first[1] && !r; i++)
        r = run_part(model, i, batch->n_rows, 0);
    return model_fold_gpu(r);
}

/* ---- layers --------------------------------------------------------------------------------------------------------------------- */

static int run_attention(Model *model, KvPass *pass, uint32_t index, const Batch *batch, const ModelTap *tap, ErrorDetail *reterr)
{
    const KvShape *shape = &model->file->hparams.model.attention;
    int r = 0;

    if (tap) {
        size_t n = (size_t)batch->n_rows * kv_row_values(shape);

        r = model_fold_gpu(gpu_download(model->gpu, GPU_QUEUE_COMPUTE, model->qkv, 0, tap->qkv + index * n, n * sizeof(float),
                                        GPU_WAIT_NONE, "calibration", NULL));
    }
    return r ? r : model_fold_kv(kv_pass_layer(pass, index, model->qkv, model->attended, reterr));
}

static uint32_t head_rounds(const Model *model, const Batch *batch)
{
    uint32_t at_once = model_sizes(model->file, &model->options).n_logit_rows;

    return (batch->n_logits + at_once - 1) / at_once;
}

/* Logits of the wanted rows, as many at once as the buffer holds. */
static int run_head(Model *model, const Batch *batch, float *logits)
{
    const Placement *placement = &model->weights.placement;
    uint32_t at_once = model_sizes(model->file, &model->options).n_logit_rows, n_vocab = model->file->hparams.model.n_vocab;
    uint32_t first = placement->span_parts[weights_n_spans(&model->file->weights)];
    int r = 0;

    for (uint32_t done = 0; done < batch->n_logits && !r; done += at_once) {
        uint32_t n = MIN(at_once, batch->n_logits - done);
        uint64_t x_rows_offset = ((uint64_t)model->options.max_rows + done) * sizeof(int32_t);

        for (uint32_t i = first; i < placement->n_parts && !r; i++)
            r = run_part(model, i, n, x_rows_offset);
        if (!r)
            r = gpu_download(model->gpu, GPU_QUEUE_COMPUTE, model->logits, 0, logits + (size_t)done * n_vocab,
                             (uint64_t)n * n_vocab * sizeof(float), GPU_WAIT_NONE, "logits", NULL);
    }
    return model_fold_gpu(r);
}

/* Queues the whole pass. */
static int queue_pass(Model *model, KvPass *pass, const Batch *batch, float *logits, const ModelTap *tap, ErrorDetail *reterr)
{
    uint32_t n_layers = model->file->weights.n_layers;
    int r;

    r = upload_batch(model, batch);
    if (!r)
        r = weights_device_begin(&model->weights, head_rounds(model, batch));
    if (!r)
        r = run_embedding(model, batch);
    r = model_fold_gpu(r);
    if (!r)
        r = run_span(model, 0, batch);
    for (uint32_t l = 0; l < n_layers && !r; l++) {
        r = run_attention(model, pass, l, batch, tap, reterr);
        /* Nothing reads what the last layer would add when no logits are wanted: its keys and values are all that stays. */
        if (!r && (batch->n_logits || l + 1 < n_layers))
            r = run_span(model, l + 1, batch);
    }
    if (!r)
        r = model_fold_kv(kv_pass_prefetch(pass));
    if (!r)
        r = run_head(model, batch, logits);
    return r;
}

static int begin_pass(Model *model, KvStore *store, const ModelItem *items, uint32_t n_items, KvPass **ret, ErrorDetail *reterr)
{
    KvPassItem few[16];
    _cleanup_(freep) KvPassItem *many = n_items > N_ELEMENTS(few) ? calloc(n_items, sizeof(*many)) : NULL;
    KvPassItem *kv_items = n_items > N_ELEMENTS(few) ? many : few;
    int r;

    if (!kv_items)
        return error_origin(-ENOMEM);
    for (uint32_t i = 0; i < n_items; i++) {
        kv_items[i] = (KvPassItem){items[i].cache, items[i].n_tokens};
        kv_cache_set_more(items[i].cache, items[i].more);
    }
    r = gpu_step_begin(model->gpu);
    if (r)
        return model_fold_gpu(r);
    return model_fold_kv(kv_pass_begin(store, kv_items, n_items, ret, reterr));
}

int model_run(Model *model, KvStore *store, const ModelItem *items, uint32_t n_items, float *logits, const ModelTap *tap,
              ErrorDetail *reterr)
{
    KvPass *pass = NULL;
    Batch batch = {0, 0};
    int r;

    r = prepare_batch(model, items, n_items, logits != NULL, &batch, reterr);
    if (!r)
        r = begin_pass(model, store, items, n_items, &pass, reterr);
    if (r) {
        gpu_explain(model->gpu, reterr);
        return error_trace(r);
    }
    r = queue_pass(model, pass, &batch, logits, tap, reterr);
    if (!r)
        r = model_fold_gpu(gpu_step_finish(model->gpu, reterr));
    if (r) {
        gpu_explain(model->gpu, reterr);
        /* What is already queued still writes to the caller's memory. */
        if (!gpu_is_lost(model->gpu))
            (void)gpu_drain(model->gpu, NULL);
        weights_device_abort(&model->weights);
        (void)kv_pass_abort(pass);
        return error_trace(r);
    }
    return model_fold_kv(kv_pass_commit(pass));
}

int model_forward(Model *model, KvStore *store, const ModelItem *items, uint32_t n_items, float *logits, ErrorDetail *reterr)
{
    return model_run(model, store, items, n_items, logits, NULL, reterr);
}
