/* SPDX-License-Identifier: Apache-2.0 */
/* Finding, checking and repacking the tensors of arch "llama". */

#include "daemon/model/weights.h"
#include "quant/base/checked.h"

#include <string.h>
#include <sys/mman.h>

void weights_release_block(Weights *weights, uint32_t block)
{
    WeightsBlock *b = &weights->blocks[block];

    if (!weights->image || b->absent || b->bytes == 0)
        return;
    (void)madvise(weights->image + b->offset, b->bytes, MADV_DONTNEED);
    b->absent = !weights->mapped;
}

const uint8_t *weights_block(const Weights *weights, uint32_t block)
{
    return weights->image && !weights->blocks[block].absent ? weights->image + weights->blocks[block].offset : NULL;
}

const void *weights_matrix(const Weights *weights, const WeightsMatrix *matrix)
{
    const uint8_t *block = weights_block(weights, matrix->block);

    return block ? block + matrix->offset : NULL;
}

void weights_clear(Weights *weights)
{
    if (weights->mapping)
        (void)munmap(weights->mapping, weights->mapping_bytes);
    free(weights->layers);
    free(weights->blocks);
    *weights = WEIGHTS_NULL;
}

uint64_t weights_total_bytes(const Weights *weights)
{
    uint64_t total = 0;

    for (uint32_t i = 0; i < weights->n_blocks; i++)
        total += weights->blocks[i].bytes;
    return total;
}

/* ---- plan ------------------------------------------------------------------------------------------------------------------- */

/* Finds one tensor of (n_rows, n_cols), a vector when n_rows is 0, and gives it a place at the end of its block. */
static int place(const Gguf *gguf, Weights *weights, const char *name, uint32_t block, uint32_t n_rows, uint32_t n_cols,
                 WeightsMatrix *ret, ErrorDetail *reterr)
{
    const GgufTensor *tensor = gguf_tensor(gguf, name);
    uint32_t rows = n_rows ? n_rows : 1;
    WeightsBlock *to = &weights->blocks[block];
    uint64_t bytes, tile_bytes = 0;

    if (!tensor)
        return error_detail_set(reterr, MODEL_E_CORRUPT, "tensor '%s' is missing", name);
    if (tensor->dims[0] != n_cols || tensor->dims[1] != rows || tensor->dims[2] != 1 || tensor->dims[3] != 1)
        return error_detail_set(reterr, MODEL_E_CORRUPT, "tensor '%s' is %llu x %llu, not %u x %u as the keys say", name,
                                (unsigned long long)tensor->dims[0], (unsigned long long)tensor->dims[1], n_cols, rows);
    if (n_rows == 0)
        bytes = (uint64_t)n_cols * sizeof(float);
    else if (weight_device_bytes(tensor->type, rows, n_cols, &bytes))
        return error_detail_set(reterr, MODEL_E_UNSUPPORTED, "tensor '%s': a %s matrix of %u x %u has no device layout", name,
                                tensor->type->name, n_cols, rows);
    if (n_rows > 0)
        tile_bytes = bytes / ((n_rows + WEIGHT_TILE_ROWS - 1) / WEIGHT_TILE_ROWS);
    *ret = (WeightsMatrix){.tensor = tensor,
                           .block = block,
                           .n_rows = rows,
                           .n_cols = n_cols,
                           .offset = to->bytes,
                           .tile_bytes = tile_bytes,
                           .norm = n_rows == 0};
    if (!checked_add(to->bytes, bytes, &bytes) || !checked_align(bytes, WEIGHTS_ALIGNMENT, &to->bytes))
        return error_detail_set(reterr, MODEL_E_CORRUPT, "tensor '%s' is impossibly large", name);
    return 0;
}

static int plan_layer(const Gguf *gguf, const ModelParams *params, Weights *weights, uint32_t index, ErrorDetail *reterr)
{
    const KvShape *shape = &params->attention;
    uint32_t n_embd = params->n_embd, n_q = shape->n_heads * shape->k_head_dim, n_o = shape->n_heads * shape->v_head_dim;
    uint32_t n_k = shape->n_kv_heads * shape->k_head_dim, n_v = shape->n_kv_heads * shape->v_head_dim;
    WeightsLayer *layer = &weights->layers[index];
    const struct {
        const char *name;
        uint32_t n_rows, n_cols;
    } parts[WEIGHTS_TENSOR_X_MAX] = {
        [WEIGHTS_ATTN_NORM] = {"attn_norm", 0, n_embd},  [WEIGHTS_Q] = {"attn_q", n_q, n_embd},
        [WEIGHTS_K] = {"attn_k", n_k, n_embd},           [WEIGHTS_V] = {"attn_v", n_v, n_embd},
        [WEIGHTS_O] = {"attn_output", n_embd, n_o},      [WEIGHTS_FFN_NORM] = {"ffn_norm", 0, n_embd},
        [WEIGHTS_GATE] = {"ffn_gate", params->n_ff, n_embd}, [WEIGHTS_UP] = {"ffn_up", params->n_ff, n_embd},
        [WEIGHTS_DOWN] = {"ffn_down", n_embd, params->n_ff},
    };

    for (WeightsTensor i = 0; i < WEIGHTS_TENSOR_X_MAX; i++) {
        /* q, k and v belong to the span before the layer's attention, the others to the one after it; in this order in both. */
        uint32_t span = i == WEIGHTS_Q || i == WEIGHTS_K || i == WEIGHTS_V ? index : index + 1;
        uint32_t block = parts[i].n_rows == 0 ? WEIGHTS_BLOCK_NORMS : WEIGHTS_BLOCK_SPANS + span;
        char name[64];
        int r;

        (void)snprintf(name, sizeof(name), "blk.%u.%s.weight", index, parts[i].name);
        r = place(gguf, weights, name, block, parts[i].n_rows, parts[i].n_cols, &layer->tensors[i], reterr);
        if (r)
            return r;
    }
    layer->tensors[WEIGHTS_Q].rotary = layer->tensors[WEIGHTS_K].rotary = true;
    return 0;
}

/* Tensors that old converters wrote and nothing needs: tables of rotary frequencies. */
static bool may_be_ignored(GgufString name)
{
    static const char *const words[] = {"rope_freqs.weight", "rot_embd", "inv_freq"};

    for (size_t i = 0; i < N_ELEMENTS(words); i++)
        if (memmem(name.data, name.length, words[i], strlen(words[i])))
            return true;
    return false;
}

/* A tensor that we do not use (a bias, an expert) would make the answers wrong without a word: refuse it. */
static int check_all_used(const Gguf *gguf, const Weights *weights, ErrorDetail *reterr)
{
    _cleanup_(freep) bool *used = calloc(gguf_n_tensors(gguf), sizeof(*used));
    const GgufTensor *first = gguf_tensor_at(gguf, 0);

    if (!used)
        return error_origin(-ENOMEM);
    used[weights->embedding.tensor - first] = used[weights->output_norm.tensor - first] = used[weights->output.tensor - first] = true;
    for (uint32_t l = 0; l < weights->n_layers; l++)
        for (WeightsTensor i = 0; i < WEIGHTS_TENSOR_X_MAX; i++)
            used[weights->layers[l].tensors[i].tensor - first] = true;
    for (size_t i = 0; i < gguf_n_tensors(gguf); i++)
        if (!used[i] && !may_be_ignored(first[i].name))
            return error_detail_set(reterr, MODEL_E_UNSUPPORTED, "tensor '%s' is not part of a llama model that is supported",
                                    gguf_printable(first[i].name).text);
    return 0;
}

/* Where the blocks lie in the image. */
static int place_blocks(Weights *weights, ErrorDetail *reterr)
{
    uint64_t end = 0;

    for (uint32_t i = 0; i < weights->n_blocks; i++) {
        weights->blocks[i].offset = end;
        if (!checked_add(end, weights->blocks[i].bytes, &end) || !checked_align(end, WEIGHTS_BLOCK_ALIGNMENT, &end))
            return error_detail_set(reterr, MODEL_E_CORRUPT, "the weights are impossibly large");
    }
    weights->image_bytes = end;
    return 0;
}

int weights_plan(const Gguf *gguf, const ModelParams *params, Weights *ret, ErrorDetail *reterr)
{
    Weights weights = {.n_layers = params->n_layers,
                       .n_blocks = WEIGHTS_BLOCK_SPANS + params->n_layers + 1 + (params->tied_embeddings ? 0 : 1)};
    int r;

    weights.layers = calloc(weights.n_layers, sizeof(*weights.layers));
    weights.blocks = calloc(weights.n_blocks, sizeof(*weights.blocks));
    r = weights.layers && weights.blocks ? 0 : error_origin(-ENOMEM);
    if (!r)
        r = place(gguf, &weights, "token_embd.weight", WEIGHTS_BLOCK_EMBEDDING, params->n_vocab, params->n_embd, &weights.embedding, reterr);
    if (!r)
        r = place(gguf, &weights, "output_norm.weight", WEIGHTS_BLOCK_NORMS, 0, params->n_embd, &weights.output_norm, reterr);
    for (uint32_t i = 0; i < weights.n_layers && !r; i++)
        r = plan_layer(gguf, params, &weights, i, reterr);
    weights.output = weights.embedding;
    if (!r && !params->tied_embeddings)
        r = place(gguf, &weights, "output.weight", weights.n_blocks - 1, params->n_vocab, params->n_embd, &weights.output, reterr);
    if (!r)
        r = check_all_used(gguf, &weights, reterr);
    if (!r)
        r = place_blocks(&weights, reterr);
    if (r) {
        weights_clear(&weights);
        return error_trace(r);
    }
    *ret = weights;
    return 0;
}

/* ---- packing ---------------------------------------------------------------------------------------------------------------- */

/* Device row to file row: inside the rotary part of a head, rows f and f + half of the device are the file's 2f and 2f + 1. */
static uint32_t *new_rotary_map(uint32_t n_rows, const KvShape *shape)
{
    uint32_t *map = malloc((size_t)n_rows * sizeof(*map)), half = shape->rotary_dim / 2;

    if (!map)
        return NULL;
    for (uint32_t row = 0; row < n_rows; row++) {
        uint32_t d = row % shape->k_head_dim, head = row - d;

        map[row] = head + (d < half ? 2 * d : d < shape->rotary_dim ? 2 * (d - half) + 1 : d);
    }
    return map;
}

static int pack_matrix(const Weights *weights, const ModelParams *params, const WeightsMatrix *matrix)
{
    void *to = weights->image + weights->blocks[matrix->block].offset + matrix->offset;
    _cleanup_(freep) uint32_t *map = NULL;

    if (matrix->norm) {
        weight_decode(matrix->tensor->type, matrix->tensor->data, to, matrix->n_cols);
        return 0;
    }
    if (matrix->rotary) {
        map = new_rotary_map(matrix->n_rows, &params->attention);
        if (!map)
            return error_origin(-ENOMEM);
    }
    weight_pack(matrix->tensor->type, matrix->tensor->data, matrix->n_rows, matrix->n_cols, map, to);
    return 0;
}

int weights_new_image(Weights *weights, ErrorDetail *reterr)
{
    void *memory = mmap(NULL, weights->image_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED)
        return error_detail_set(reterr, MODEL_E_HOST_MEMORY, "no memory for %llu bytes of repacked weights",
                                (unsigned long long)weights->image_bytes);
    /* Where the device reads it in place its kernels are a few percent faster (gpu-memory.c). */
    (void)madvise(memory, weights->image_bytes, MADV_HUGEPAGE);
    weights->image = weights->mapping = memory;
    weights->mapping_bytes = weights->image_bytes;
    return 0;
}

int weights_pack(const Weights *weights, const ModelParams *params)
{
    int r;

    r = pack_matrix(weights, params, &weights->embedding);
    if (!r)
        r = pack_matrix(weights, params, &weights->output_norm);
    if (!r && !weights_tied(weights))
        r = pack_matrix(weights, params, &weights->output);
    for (uint32_t l = 0; l < weights->n_layers; l++)
        for (WeightsTensor i = 0; i < WEIGHTS_TENSOR_X_MAX && !r; i++)
            r = pack_matrix(weights, params, &weights->layers[l].tensors[i]);
    return error_trace(r);
}
