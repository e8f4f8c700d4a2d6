/* SPDX-License-Identifier: Apache-2.0 */
/* A model of zeros, for the probe. */

#include "daemon/model/speed-zeros.h"

#include <string.h>
#include <sys/mman.h>

/* The same tensors in fewer layers, the head with fewer rows; nothing of @file is copied but places. */
static int cut_weights(const ModelFile *file, uint32_t n_layers, uint64_t head_bytes, Weights *ret)
{
    const Weights *from = &file->weights;
    bool tied = weights_tied(from);
    uint32_t n_blocks = WEIGHTS_BLOCK_SPANS + n_layers + 1 + (tied ? 0 : 1), n_tiles;
    Weights w = {.n_layers = n_layers, .n_blocks = n_blocks, .embedding = from->embedding, .output_norm = from->output_norm};

    w.layers = calloc(n_layers, sizeof(*w.layers));
    w.blocks = calloc(n_blocks, sizeof(*w.blocks));
    if (!w.layers || !w.blocks) {
        weights_clear(&w);
        return error_origin(-ENOMEM);
    }
    memcpy(w.layers, from->layers, n_layers * sizeof(*w.layers));
    for (uint32_t i = 0; i < WEIGHTS_BLOCK_SPANS + n_layers + 1; i++)
        w.blocks[i].bytes = from->blocks[i].bytes;
    head_bytes = MIN(head_bytes, from->blocks[from->output.block].bytes);
    n_tiles = (uint32_t)MAX(head_bytes / from->output.tile_bytes, UINT64_C(1));
    w.embedding.n_rows = MIN(from->embedding.n_rows, n_tiles * WEIGHT_TILE_ROWS);
    w.blocks[WEIGHTS_BLOCK_EMBEDDING].bytes = (uint64_t)n_tiles * w.embedding.tile_bytes;
    w.output = w.embedding;
    if (!tied) {
        w.output = from->output;
        w.output.block = n_blocks - 1;
        w.output.n_rows = w.embedding.n_rows;
        w.blocks[n_blocks - 1].bytes = (uint64_t)n_tiles * w.output.tile_bytes;
    }
    for (uint32_t i = 0; i < n_blocks; i++) {
        w.blocks[i].bytes = (w.blocks[i].bytes + WEIGHTS_ALIGNMENT - 1) & ~(uint64_t)(WEIGHTS_ALIGNMENT - 1);
        w.blocks[i].offset = w.image_bytes;
        w.image_bytes += (w.blocks[i].bytes + WEIGHTS_BLOCK_ALIGNMENT - 1) & ~(uint64_t)(WEIGHTS_BLOCK_ALIGNMENT - 1);
    }
    *ret = w;
    return 0;
}

void speed_zeros_end(SpeedZeros *zeros)
{
    kv_cache_free(zeros->cache);
    kv_store_free(zeros->store);
    model_free(zeros->model);
    free(zeros->logits);
    free(zeros->ids);
    *zeros = (SpeedZeros){.gpu = zeros->gpu};
}

static int new_model(SpeedZeros *probe, const ModelFile *file, const ModelOptions *options, uint32_t n_layers, uint64_t head_bytes,
                     ErrorDetail *reterr)
{
    _cleanup_(model_file_freep) ModelFile *zeros = calloc(1, sizeof(*zeros));
    int r;

    if (!zeros)
        return error_origin(-ENOMEM);
    zeros->hparams = file->hparams;
    r = cut_weights(file, n_layers, head_bytes, &zeros->weights);
    if (r)
        return r;
    zeros->hparams.model.n_layers = n_layers;
    zeros->hparams.model.n_vocab = zeros->weights.output.n_rows;
    r = weights_new_image(&zeros->weights, reterr);
    if (r)
        return r;
    /* Where the device reads them in place, or copies come from: a file's pages are small ones. */
    if (file->weights.mapped)
        (void)madvise(zeros->weights.mapping, zeros->weights.mapping_bytes, MADV_NOHUGEPAGE);
    /* Pages of their own: the system's one page of zeros would be copied from the nearest cache. */
    memset(zeros->weights.image, 0, zeros->weights.image_bytes);
    r = model_new(probe->gpu, zeros, options, &probe->model, reterr);
    if (r)
        return r;
    zeros = NULL;
    /* No means: zeros have none, and there is no tokenizer to read the text with. */
    probe->model->calibration = calloc(n_layers, sizeof(*probe->model->calibration));
    return probe->model->calibration ? 0 : error_origin(-ENOMEM);
}

int speed_zeros_begin(SpeedZeros *zeros, const ModelFile *file, const ModelFit *fit, uint32_t n_layers, uint64_t head_bytes,
                      ModelWeights weights, ErrorDetail *reterr)
{
    ModelOptions options = {
        .exact = fit->options.exact,
        .context = fit->options.context,
        .max_rows = speed_probe_rows(fit),
        .max_sequences = 1,
        .weights = weights,
    };
    int r = new_model(zeros, file, &options, n_layers, head_bytes, reterr);

    if (r)
        return r;
    zeros->logits = calloc(zeros->model->file->hparams.model.n_vocab, sizeof(*zeros->logits));
    zeros->ids = calloc(SPEED_PROBE_ROWS, sizeof(*zeros->ids));
    return zeros->logits && zeros->ids ? 0 : error_origin(-ENOMEM);
}

int speed_zeros_store(SpeedZeros *zeros, const ModelFit *fit, bool tiles, uint32_t max_tokens, ErrorDetail *reterr)
{
    KvPolicy policy = fit->policy;
    int r;

    zeros->cache = kv_cache_free(zeros->cache);
    zeros->store = kv_store_free(zeros->store);
    policy.home = tiles ? KV_HOME_HOST : speed_probe_home(fit);
    policy.n_layer_bits = 0; /* few layers stand for all */
    policy.growth = KV_GROWTH_DYNAMIC;
    if (tiles) {
        policy.transfer = KV_TRANSFER_COPY;
        policy.n_slots = fit->plan.kv.n_slots;
        policy.tile_blocks = fit->plan.kv.tile_blocks;
    } else if (policy.home == KV_HOME_DEVICE)
        policy.transfer = KV_TRANSFER_AUTO;
    policy.max_cache_tokens = max_tokens;
    policy.device_budget_bytes = 0;
    r = model_store_new(zeros->model, &policy, &zeros->store, reterr);
    return r ? r : model_fold_kv(kv_cache_new(zeros->store, &zeros->cache, reterr));
}
