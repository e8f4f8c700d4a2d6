/* SPDX-License-Identifier: Apache-2.0 */
/* Hyper-parameters of arch "llama" (Llama 1 to 3, Mistral, SmolLM and others that are written as llama). */

#include "daemon/model/hparams.h"
#include "quant/base/log.h"

#include <math.h>
#include <string.h>

/* Bounds far beyond any model, small enough that products of two fit 32 bits. */
#define MAX_LAYERS    1024
#define MAX_DIMENSION 65536
#define MAX_VOCAB     (1u << 22)
#define MAX_CONTEXT   (1u << 24)

/* Copies a text of the file as valid UTF-8: what is not becomes '?', and it is cut at a whole character. */
static void copy_text(GgufString text, char *ret, size_t size)
{
    size_t n = 0;

    for (size_t i = 0; i < text.length;) {
        unsigned char c = (unsigned char)text.data[i];
        size_t length = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
        bool valid = length > 0 && length <= text.length - i;

        for (size_t k = 1; valid && k < length; k++)
            valid = ((unsigned char)text.data[i + k] & 0xc0) == 0x80;
        /* Overlong forms, surrogates and beyond U+10FFFF. */
        if (valid && length > 2) {
            unsigned char next = (unsigned char)text.data[i + 1];

            valid = !((c == 0xe0 && next < 0xa0) || (c == 0xed && next > 0x9f) || (c == 0xf0 && next < 0x90) ||
                      (c == 0xf4 && next > 0x8f));
        }
        if (!valid || c < 0x20 || c == 0x7f)
            length = 1;
        if (n + length >= size)
            break;
        if (!valid || c < 0x20 || c == 0x7f)
            ret[n] = '?';
        else
            memcpy(ret + n, text.data + i, length);
        n += length;
        i += length;
    }
    ret[n] = 0;
}

static void read_text(const Gguf *gguf, const char *key, char *ret, size_t size)
{
    GgufString text;

    ret[0] = 0;
    if (gguf_get_string(gguf, key, &text))
        copy_text(text, ret, size);
}

static int bad_key(const char *key, const char *why, ErrorDetail *reterr)
{
    return error_detail_set(reterr, MODEL_E_CORRUPT, "key '%s' %s", key, why);
}

/* An integer from 1 to @max; @fallback (0: none) when the key is absent. */
static int read_count(const Gguf *gguf, const char *key, uint32_t fallback, uint32_t max, uint32_t *ret, ErrorDetail *reterr)
{
    uint64_t value;

    if (!gguf_has(gguf, key)) {
        if (!fallback)
            return bad_key(key, "is missing", reterr);
        *ret = fallback;
        return 0;
    }
    if (!gguf_get_u64(gguf, key, &value))
        return bad_key(key, "is not a whole number", reterr);
    if (value < 1 || value > max)
        return error_detail_set(reterr, MODEL_E_CORRUPT, "key '%s' is %llu, not from 1 to %u", key, (unsigned long long)value, max);
    *ret = (uint32_t)value;
    return 0;
}

static int read_positive(const Gguf *gguf, const char *key, double fallback, double *ret, ErrorDetail *reterr)
{
    if (!gguf_has(gguf, key)) {
        *ret = fallback;
        return fallback > 0 ? 0 : bad_key(key, "is missing", reterr);
    }
    if (!gguf_get_double(gguf, key, ret) || !isfinite(*ret) || *ret <= 0)
        return bad_key(key, "is not a positive number", reterr);
    return 0;
}

/* ---- sizes ---------------------------------------------------------------------------------------------------------------- */

static int check_architecture(const Gguf *gguf, ModelParams *model, ErrorDetail *reterr)
{
    uint64_t experts = 0;
    GgufString name;

    if (!gguf_get_string(gguf, "general.architecture", &name))
        return bad_key("general.architecture", "is missing", reterr);
    copy_text(name, model->architecture, sizeof(model->architecture));
    if (strcmp(model->architecture, "llama"))
        return error_detail_set(reterr, MODEL_E_UNSUPPORTED, "architecture '%s' is not supported (llama is)", model->architecture);
    if (gguf_get_u64(gguf, "llama.expert_count", &experts) && experts > 0)
        return error_detail_set(reterr, MODEL_E_UNSUPPORTED, "a mixture of %llu experts (llama.expert_count) is not supported",
                                (unsigned long long)experts);
    return 0;
}

static int read_sizes(const Gguf *gguf, ModelParams *model, ErrorDetail *reterr)
{
    double eps = 0;
    int r;

    r = read_count(gguf, "llama.block_count", 0, MAX_LAYERS, &model->n_layers, reterr);
    if (!r)
        r = read_count(gguf, "llama.embedding_length", 0, MAX_DIMENSION, &model->n_embd, reterr);
    if (!r)
        r = read_count(gguf, "llama.feed_forward_length", 0, 8 * MAX_DIMENSION, &model->n_ff, reterr);
    if (!r)
        r = read_count(gguf, "llama.context_length", 0, MAX_CONTEXT, &model->context_length, reterr);
    if (!r)
        r = read_positive(gguf, "llama.attention.layer_norm_rms_epsilon", 0, &eps, reterr);
    model->norm_eps = (float)eps;
    return r;
}

static int read_heads(const Gguf *gguf, ModelParams *model, ErrorDetail *reterr)
{
    KvShape *shape = &model->attention;
    int r;

    r = read_count(gguf, "llama.attention.head_count", 0, MAX_DIMENSION, &shape->n_heads, reterr);
    if (!r)
        r = read_count(gguf, "llama.attention.head_count_kv", shape->n_heads, MAX_DIMENSION, &shape->n_kv_heads, reterr);
    if (!r)
        r = read_count(gguf, "llama.attention.key_length", model->n_embd / shape->n_heads, MAX_DIMENSION, &shape->k_head_dim, reterr);
    if (!r)
        r = read_count(gguf, "llama.attention.value_length", shape->k_head_dim, MAX_DIMENSION, &shape->v_head_dim, reterr);
    if (!r)
        r = read_count(gguf, "llama.rope.dimension_count", shape->k_head_dim, MAX_DIMENSION, &shape->rotary_dim, reterr);
    if (r)
        return r;
    if (shape->n_heads % shape->n_kv_heads)
        return error_detail_set(reterr, MODEL_E_CORRUPT, "%u heads are no multiple of %u key/value heads", shape->n_heads,
                                shape->n_kv_heads);
    if (shape->k_head_dim % 16 || shape->k_head_dim > KV_MAX_HEAD_DIM)
        return error_detail_set(reterr, MODEL_E_UNSUPPORTED, "a head size of %u is not supported (multiples of 16 up to %u are)",
                                shape->k_head_dim, KV_MAX_HEAD_DIM);
    if (shape->v_head_dim % 16 || shape->v_head_dim > KV_MAX_HEAD_DIM)
        return error_detail_set(reterr, MODEL_E_UNSUPPORTED, "values of %u dimensions are not supported (multiples of 16 up to %u are)",
                                shape->v_head_dim, KV_MAX_HEAD_DIM);
    if (shape->rotary_dim % 2 || shape->rotary_dim > MIN(shape->k_head_dim, 2u * HPARAMS_MAX_ROTARY_PAIRS))
        return error_detail_set(reterr, MODEL_E_CORRUPT, "key 'llama.rope.dimension_count' is %u, odd or more than the head size of %u",
                                shape->rotary_dim, shape->k_head_dim);
    return 0;
}

/* A window that the file does state: inside it attention is the full one, so the context ends there. */
static void apply_window(const Gguf *gguf, ModelParams *model)
{
    uint64_t window;

    if (!gguf_get_u64(gguf, "llama.attention.sliding_window", &window) || window == 0 || window >= model->context_length)
        return;
    log_notice("the model's attention window is %llu tokens: its context is limited to that", (unsigned long long)window);
    model->context_length = (uint32_t)window;
}

/* ---- rotary frequencies ---------------------------------------------------------------------------------------------------- */

/* The divisor of linear scaling (1: none), from the current or the old key. */
static int read_linear_scaling(const Gguf *gguf, double *ret, ErrorDetail *reterr)
{
    char type[32] = "";
    double old = 1;

    *ret = 1;
    read_text(gguf, "llama.rope.scaling.type", type, sizeof(type));
    if (!strcmp(type, "linear"))
        return read_positive(gguf, "llama.rope.scaling.factor", 0, ret, reterr);
    if (type[0] && strcmp(type, "none"))
        return error_detail_set(reterr, MODEL_E_UNSUPPORTED, "RoPE scaling '%s' (llama.rope.scaling.type) is not supported", type);
    if (!type[0] && gguf_has(gguf, "llama.rope.scale_linear")) {
        int r = read_positive(gguf, "llama.rope.scale_linear", 1, &old, reterr);

        *ret = old;
        return r;
    }
    return 0;
}

/* Llama 3 files carry their scaling as a divisor of each frequency. */
static int read_factors(const Gguf *gguf, uint32_t n_pairs, float *ret, ErrorDetail *reterr)
{
    const GgufTensor *tensor = gguf_tensor(gguf, "rope_freqs.weight");

    for (uint32_t i = 0; i < n_pairs; i++)
        ret[i] = 1.0f;
    if (!tensor)
        return 0;
    if (tensor->n_dims != 1 || tensor->dims[0] != n_pairs || tensor->type->type != WEIGHT_TYPE_F32)
        return error_detail_set(reterr, MODEL_E_CORRUPT, "tensor 'rope_freqs.weight' is not %u numbers of type F32", n_pairs);
    memcpy(ret, tensor->data, n_pairs * sizeof(*ret));
    for (uint32_t i = 0; i < n_pairs; i++)
        if (!isfinite(ret[i]) || ret[i] <= 0)
            return error_detail_set(reterr, MODEL_E_CORRUPT, "tensor 'rope_freqs.weight' holds a number that is not positive");
    return 0;
}

static int read_rope(const Gguf *gguf, HParams *hparams, ErrorDetail *reterr)
{
    uint32_t rotary_dim = hparams->model.attention.rotary_dim, n_pairs = rotary_dim / 2;
    float factors[HPARAMS_MAX_ROTARY_PAIRS];
    double base, linear;
    int r;

    r = read_positive(gguf, "llama.rope.freq_base", 10000, &base, reterr);
    if (!r)
        r = read_linear_scaling(gguf, &linear, reterr);
    if (!r)
        r = read_factors(gguf, n_pairs, factors, reterr);
    if (r)
        return r;
    hparams->model.rope_freq_base = (float)base;
    for (uint32_t i = 0; i < n_pairs; i++)
        hparams->inv_freq[i] = (float)(pow(base, -2.0 * i / rotary_dim) / linear / (double)factors[i]);
    return 0;
}

/* ---- names ------------------------------------------------------------------------------------------------------------------ */

/* The file's own word for its mixture of types, else the type of most of its bytes. */
static void read_quantization(const Gguf *gguf, ModelParams *model)
{
    static const struct {
        uint32_t file_type;
        const char *name;
    } names[] = {
        {0, "F32"}, {1, "F16"}, {2, "Q4_0"}, {3, "Q4_1"}, {7, "Q8_0"}, {8, "Q5_0"}, {9, "Q5_1"}, {14, "Q4_K_S"}, {15, "Q4_K_M"},
        {16, "Q5_K_S"}, {17, "Q5_K_M"}, {18, "Q6_K"}, {32, "BF16"},
    };
    uint64_t file_type, bytes[32] = {0};
    size_t most = 0;

    if (gguf_get_u64(gguf, "general.file_type", &file_type))
        for (size_t i = 0; i < N_ELEMENTS(names); i++)
            if (names[i].file_type == file_type) {
                (void)snprintf(model->quantization, sizeof(model->quantization), "%s", names[i].name);
                return;
            }
    for (size_t i = 0; i < gguf_n_tensors(gguf); i++) {
        size_t type = (size_t)gguf_tensor_at(gguf, i)->type->type;

        if (type < N_ELEMENTS(bytes))
            bytes[type] += gguf_tensor_at(gguf, i)->bytes;
    }
    for (size_t type = 1; type < N_ELEMENTS(bytes); type++)
        if (bytes[type] > bytes[most])
            most = type;
    (void)snprintf(model->quantization, sizeof(model->quantization), "%s", weight_type_name((uint32_t)most));
}

static int read_vocabulary(const Gguf *gguf, ModelParams *model, ErrorDetail *reterr)
{
    const GgufTensor *embedding = gguf_tensor(gguf, "token_embd.weight");

    if (!embedding)
        return error_detail_set(reterr, MODEL_E_CORRUPT, "tensor 'token_embd.weight' is missing");
    if (embedding->n_dims != 2 || embedding->dims[1] > MAX_VOCAB)
        return error_detail_set(reterr, MODEL_E_CORRUPT, "tensor 'token_embd.weight' has no shape of an embedding");
    model->n_vocab = (uint32_t)embedding->dims[1];
    model->tied_embeddings = !gguf_tensor(gguf, "output.weight");
    for (size_t i = 0; i < gguf_n_tensors(gguf); i++) {
        const GgufTensor *tensor = gguf_tensor_at(gguf, i);

        model->n_parameters += tensor->dims[0] * tensor->dims[1] * tensor->dims[2] * tensor->dims[3];
    }
    return 0;
}

int hparams_read(const Gguf *gguf, HParams *ret, ErrorDetail *reterr)
{
    HParams hparams = {0};
    int r;

    r = check_architecture(gguf, &hparams.model, reterr);
    if (!r)
        r = read_sizes(gguf, &hparams.model, reterr);
    if (!r)
        r = read_heads(gguf, &hparams.model, reterr);
    if (!r)
        r = read_rope(gguf, &hparams, reterr);
    if (!r)
        r = read_vocabulary(gguf, &hparams.model, reterr);
    if (r)
        return error_trace(r);
    apply_window(gguf, &hparams.model);
    read_text(gguf, "general.name", hparams.model.name, sizeof(hparams.model.name));
    read_text(gguf, "general.license", hparams.model.license, sizeof(hparams.model.license));
    read_quantization(gguf, &hparams.model);
    *ret = hparams;
    return 0;
}
