/* SPDX-License-Identifier: Apache-2.0 */
/* Finding, checking and repacking the tensors of arch "llama". */

#include "daemon/model/weights.h"
#include "quant/base/checked.h"

#include <string.h>
#include <sys/mman.h>

void weights_release_block(Weights *weights, uint32_t block)
{
    if (!weights->blocks || !weights->blocks[block])
        return;
    (void)munmap(weights->blocks[block], weights->block_bytes[block]);
    weights->blocks[block] = NULL;
}

void weights_clear(Weights *weights)
{
    for (uint32_t i = 0; i < weights->n_blocks; i++)
        weights_release_block(weights, i);
    free(weights->layers);
    free(weights->block_bytes);
    free(weights->blocks);
    *weights = WEIGHTS_NULL;
}

uint64_t weights_total_bytes(const Weights *weights)
{
    uint64_t total = 0;

    for (uint32_t i = 0; i < weights->n_blocks; i++)
        total += weights->block_bytes[i];
    return total;
}

/* ---- plan ------------------------------------------------------------------------------------------------------------------- */

/* Finds one tensor of (n_rows, n_cols), a vector when n_rows is 0, and gives it a place at the end of its block. */
static int place(const Gguf *gguf, Weights *weights, const char *name, uint32_t block, uint32_t n_rows, uint32_t n_cols,
                 WeightsMatrix *ret, ErrorDetail *reterr)
{
    const GgufTensor *tensor = gguf_tensor(gguf, name);
    uint32_t rows = n_rows ? n_rows : 1;
    uint64_t bytes;

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
    *ret = (WeightsMatrix){
        .tensor = tensor, .block = block, .n_rows = rows, .n_cols = n_cols, .offset = weights->block_bytes[block], .norm = n_rows == 0};
    if (!checked_add(weights->block_bytes[block], bytes, &bytes) ||
        !checked_align(bytes, WEIGHTS_ALIGNMENT, &weights->block_bytes[block]))
        return error_detail_set(reterr, MODEL_E_CORRUPT, "tensor '%s' is impossibly large", name);
    return 0;
}

static int plan_layer(const Gguf *gguf, const ModelParams *params, Weights *weights, uint32_t index, ErrorDetail *reterr)
{
    const KvShape *shape = &params->attention;
    uint32_t n_embd = params->n_embd, n_q = shape->n_heads * shape->head_dim, n_kv = shape->n_kv_heads * shape->head_dim;
    WeightsLayer *layer = &weights->layers[index];
    const struct {
        const char *name;
        uint32_t n_rows, n_cols;
    } parts[WEIGHTS_PART_X_MAX] = {
        [WEIGHTS_ATTN_NORM] = {"attn_norm", 0, n_embd},  [WEIGHTS_Q] = {"attn_q", n_q, n_embd},
        [WEIGHTS_K] = {"attn_k", n_kv, n_embd},          [WEIGHTS_V] = {"attn_v", n_kv, n_embd},
        [WEIGHTS_O] = {"attn_output", n_embd, n_q},      [WEIGHTS_FFN_NORM] = {"ffn_norm", 0, n_embd},
        [WEIGHTS_GATE] = {"ffn_gate", params->n_ff, n_embd}, [WEIGHTS_UP] = {"ffn_up", params->n_ff, n_embd},
        [WEIGHTS_DOWN] = {"ffn_down", n_embd, params->n_ff},
    };

    for (WeightsPart i = 0; i < WEIGHTS_PART_X_MAX; i++) {
        char name[64];
        int r;

        (void)snprintf(name, sizeof(name), "blk.%u.%s.weight", index, parts[i].name);
        r = place(gguf, weights, name, 1 + index, parts[i].n_rows, parts[i].n_cols, &layer->parts[i], reterr);
        if (r)
            return r;
    }
    layer->parts[WEIGHTS_Q].rotary = layer->parts[WEIGHTS_K].rotary = true;
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
        for (WeightsPart i = 0; i < WEIGHTS_PART_X_MAX; i++)
            used[weights->layers[l].parts[i].tensor - first] = true;
    for (size_t i = 0; i < gguf_n_tensors(gguf); i++)
        if (!used[i] && !may_be_ignored(first[i].name))
            return error_detail_set(reterr, MODEL_E_UNSUPPORTED, "tensor '%s' is not part of a llama model that is supported",
                                    gguf_printable(first[i].name).text);
    return 0;
}

int weights_plan(const Gguf *gguf, const ModelParams *params, Weights *ret, ErrorDetail *reterr)
{
    Weights weights = {.n_layers = params->n_layers, .n_blocks = params->n_layers + (params->tied_embeddings ? 1 : 2)};
    int r;

    weights.layers = calloc(weights.n_layers, sizeof(*weights.layers));
    weights.block_bytes = calloc(weights.n_blocks, sizeof(*weights.block_bytes));
    weights.blocks = calloc(weights.n_blocks, sizeof(*weights.blocks));
    r = weights.layers && weights.block_bytes && weights.blocks ? 0 : error_origin(-ENOMEM);
    if (!r)
        r = place(gguf, &weights, "token_embd.weight", 0, params->n_vocab, params->n_embd, &weights.embedding, reterr);
    if (!r)
        r = place(gguf, &weights, "output_norm.weight", 0, 0, params->n_embd, &weights.output_norm, reterr);
    for (uint32_t i = 0; i < weights.n_layers && !r; i++)
        r = plan_layer(gguf, params, &weights, i, reterr);
    weights.output = weights.embedding;
    if (!r && !params->tied_embeddings)
        r = place(gguf, &weights, "output.weight", weights.n_blocks - 1, params->n_vocab, params->n_embd, &weights.output, reterr);
    if (!r)
        r = check_all_used(gguf, &weights, reterr);
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
        uint32_t d = row % shape->head_dim, head = row - d;

        map[row] = head + (d < half ? 2 * d : d < shape->rotary_dim ? 2 * (d - half) + 1 : d);
    }
    return map;
}

static int pack_matrix(Weights *weights, const ModelParams *params, const WeightsMatrix *matrix)
{
    void *to = (uint8_t *)weights->blocks[matrix->block] + matrix->offset;
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

int weights_pack(Weights *weights, const ModelParams *params, ErrorDetail *reterr)
{
    int r;

    for (uint32_t i = 0; i < weights->n_blocks; i++) {
        void *memory = mmap(NULL, weights->block_bytes[i], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (memory == MAP_FAILED)
            return error_detail_set(reterr, MODEL_E_HOST_MEMORY, "no memory for %llu bytes of repacked weights",
                                    (unsigned long long)weights_total_bytes(weights));
        weights->blocks[i] = memory;
    }
    r = pack_matrix(weights, params, &weights->embedding);
    if (!r)
        r = pack_matrix(weights, params, &weights->output_norm);
    if (!r && weights->output.block != weights->embedding.block)
        r = pack_matrix(weights, params, &weights->output);
    for (uint32_t l = 0; l < weights->n_layers; l++)
        for (WeightsPart i = 0; i < WEIGHTS_PART_X_MAX && !r; i++)
            r = pack_matrix(weights, params, &weights->layers[l].parts[i]);
    return error_trace(r);
}
