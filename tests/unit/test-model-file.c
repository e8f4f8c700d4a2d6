/* SPDX-License-Identifier: Apache-2.0 */
/* What the worker side of loading accepts, computes and refuses, without a device. */

#include "daemon/model/model-private.h"
#include "tests/lib/gguf-writer.h"
#include "tests/lib/oracle.h"
#include "tests/lib/place.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* ---- a model of one layer, with one thing changed --------------------------------------------------------------------------------- */

enum { EMBD = 32, HEADS = 2, HEAD_DIM = 16, FF = 32, VOCAB = 259 };

typedef struct Variant {
    const char *architecture;         /* NULL: llama */
    const char *key_u32;              /* one more key */
    uint32_t value_u32;
    const char *key_text, *text;      /* one more key */
    const char *key_f32;
    float value_f32;
    const char *without_key, *without_tensor, *more_tensor;
    const char *wrong_tensor;         /* gets one row more */
    bool no_tensors, numbers_as_tokens;
} Variant;

typedef struct Shape {
    const char *name;
    uint32_t n_dims;
    uint64_t dims[2];
} Shape;

static const Shape shapes[] = {
    {"token_embd.weight", 2, {EMBD, VOCAB}},      {"output_norm.weight", 1, {EMBD, 1}},
    {"blk.0.attn_norm.weight", 1, {EMBD, 1}},     {"blk.0.attn_q.weight", 2, {EMBD, EMBD}},
    {"blk.0.attn_k.weight", 2, {EMBD, EMBD}},     {"blk.0.attn_v.weight", 2, {EMBD, EMBD}},
    {"blk.0.attn_output.weight", 2, {EMBD, EMBD}}, {"blk.0.ffn_norm.weight", 1, {EMBD, 1}},
    {"blk.0.ffn_gate.weight", 2, {EMBD, FF}},     {"blk.0.ffn_up.weight", 2, {EMBD, FF}},
    {"blk.0.ffn_down.weight", 2, {FF, EMBD}},
};

static const struct {
    const char *key;
    uint32_t value;
} sizes[] = {
    {"llama.block_count", 1},         {"llama.context_length", 128},      {"llama.embedding_length", EMBD},
    {"llama.feed_forward_length", FF}, {"llama.attention.head_count", HEADS},
};

static bool same(const char *a, const char *b)
{
    return a && b && strcmp(a, b) == 0;
}

/* Byte tokens and three control tokens; no merges. */
static void write_tokenizer(GgufWriter *writer, const Variant *variant)
{
    gguf_writer_key_string(writer, "tokenizer.ggml.model", "gpt2");
    gguf_writer_key_string(writer, "tokenizer.ggml.pre", "smollm");
    gguf_writer_key_array(writer, "tokenizer.ggml.tokens", variant->numbers_as_tokens ? GGUF_TYPE_I32 : GGUF_TYPE_STRING, VOCAB);
    for (int i = 0, extra = 0; i < VOCAB; i++) {
        bool visible = (i >= 33 && i < 127) || (i >= 161 && i < 173) || (i >= 174 && i < 256);
        int code = visible ? i : 256 + extra;
        char text[16];

        if (i >= 256)
            (void)snprintf(text, sizeof(text), "<|%d|>", i);
        else if (code < 128)
            (void)snprintf(text, sizeof(text), "%c", code);
        else
            (void)snprintf(text, sizeof(text), "%c%c", 0xc0 | code >> 6, 0x80 | (code & 0x3f));
        extra += !visible;
        if (variant->numbers_as_tokens)
            gguf_writer_u32(writer, (uint32_t)i);
        else
            gguf_writer_string(writer, text);
    }
    gguf_writer_key_array(writer, "tokenizer.ggml.token_type", GGUF_TYPE_I32, VOCAB);
    for (int i = 0; i < VOCAB; i++)
        gguf_writer_u32(writer, i >= 256 ? 3 : 1);
    gguf_writer_key_array(writer, "tokenizer.ggml.merges", GGUF_TYPE_STRING, 0);
    gguf_writer_key_u32(writer, "tokenizer.ggml.eos_token_id", 258);
}

static void write_tensors(GgufWriter *writer, const Variant *variant, uint64_t *ret_bytes)
{
    uint64_t offset = 0;

    for (size_t i = 0; i < N_ELEMENTS(shapes) && !variant->no_tensors; i++) {
        uint64_t dims[2] = {shapes[i].dims[0], shapes[i].dims[1] + same(variant->wrong_tensor, shapes[i].name)};

        if (same(variant->without_tensor, shapes[i].name))
            continue;
        gguf_writer_tensor(writer, shapes[i].name, shapes[i].n_dims, dims, WEIGHT_TYPE_F32, offset);
        offset += (dims[0] * dims[1] * sizeof(float) + 31) / 32 * 32;
    }
    if (variant->more_tensor) {
        gguf_writer_tensor(writer, variant->more_tensor, 1, shapes[1].dims, WEIGHT_TYPE_F32, offset);
        offset += EMBD * sizeof(float);
    }
    *ret_bytes = offset;
}

static void write_model(GgufWriter *writer, const Variant *variant)
{
    size_t n_tensors = variant->no_tensors ? 0 : N_ELEMENTS(shapes) - (variant->without_tensor != NULL) + (variant->more_tensor != NULL);
    size_t n_keys = 2 + N_ELEMENTS(sizes) - (variant->without_key != NULL) + (variant->key_u32 != NULL) + (variant->key_text != NULL) +
                    (variant->key_f32 != NULL) + 6;
    uint64_t bytes;

    gguf_writer_header(writer, 3, n_tensors, n_keys);
    gguf_writer_key_string(writer, "general.architecture", variant->architecture ? variant->architecture : "llama");
    gguf_writer_key_f32(writer, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    for (size_t i = 0; i < N_ELEMENTS(sizes); i++)
        if (!same(variant->without_key, sizes[i].key))
            gguf_writer_key_u32(writer, sizes[i].key, sizes[i].value);
    if (variant->key_u32)
        gguf_writer_key_u32(writer, variant->key_u32, variant->value_u32);
    if (variant->key_text)
        gguf_writer_key_string(writer, variant->key_text, variant->text);
    if (variant->key_f32)
        gguf_writer_key_f32(writer, variant->key_f32, variant->value_f32);
    write_tokenizer(writer, variant);
    write_tensors(writer, variant, &bytes);
    gguf_writer_align(writer, 32);
    gguf_writer_zeros(writer, bytes);
}

/* ---- a folder for files ------------------------------------------------------------------------------------------------------------- */

static int setup(void **state)
{
    *state = malloc(TEST_FOLDER_SIZE);
    return *state ? test_folder_new(*state) : -1;
}

static int teardown(void **state)
{
    int r = test_folder_remove(*state);

    free(*state);
    return r;
}

static int open_variant(const char *folder, const char *name, const Variant *variant, ModelFile **ret, ErrorDetail *reterr)
{
    _cleanup_(gguf_writer_clearp) GgufWriter writer = GGUF_WRITER_NULL;
    char path[256];

    (void)snprintf(path, sizeof(path), "%s/%s", folder, name);
    write_model(&writer, variant);
    gguf_writer_save(&writer, path, writer.size);
    return model_file_open(path, NULL, ret, reterr);
}

static void expect(const char *folder, const Variant *variant, int result, const char *words)
{
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r;

    r = open_variant(folder, "model.gguf", variant, &file, &detail);
    if (r != result || !strstr(detail.text, words))
        print_error("got %d '%s', expected %d '%s'\n", r, detail.text, result, words);
    assert_int_equal(r, result);
    assert_non_null(strstr(detail.text, words));
}

/* ---- cases ----------------------------------------------------------------------------------------------------------------------------- */

static void a_small_model_loads_with_defaults(void **state)
{
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    const ModelParams *params;

    if (open_variant(*state, "model.gguf", &(Variant){0}, &file, &detail))
        fail_msg("%s", detail.text);
    params = model_file_params(file);
    assert_int_equal(params->attention.n_kv_heads, HEADS);
    assert_int_equal(params->attention.k_head_dim, HEAD_DIM);
    assert_int_equal(params->attention.v_head_dim, HEAD_DIM);
    assert_int_equal(params->attention.rotary_dim, HEAD_DIM);
    assert_true(params->tied_embeddings);
    assert_true(params->rope_freq_base == 10000.0f);
    assert_int_equal(params->n_vocab, VOCAB);
    assert_int_equal(params->n_parameters, VOCAB * EMBD + 3 * EMBD + 4 * EMBD * EMBD + 3 * EMBD * FF);
    assert_string_equal(params->quantization, "F32");
    assert_null(model_file_chat_template(file));
}

static void missing_and_misshapen_parts_are_named(void **state)
{
    expect(*state, &(Variant){.without_tensor = "blk.0.ffn_up.weight"}, MODEL_E_CORRUPT, "'blk.0.ffn_up.weight' is missing");
    expect(*state, &(Variant){.without_tensor = "token_embd.weight"}, MODEL_E_CORRUPT, "'token_embd.weight' is missing");
    expect(*state, &(Variant){.wrong_tensor = "blk.0.attn_k.weight"}, MODEL_E_CORRUPT, "'blk.0.attn_k.weight' is 32 x 33, not 32 x 32");
    expect(*state, &(Variant){.without_key = "llama.block_count"}, MODEL_E_CORRUPT, "'llama.block_count' is missing");
    expect(*state, &(Variant){.without_key = "llama.block_count", .key_u32 = "llama.block_count", .value_u32 = 2000000000}, MODEL_E_CORRUPT,
           "'llama.block_count' is 2000000000");
    expect(*state, &(Variant){.without_key = "llama.block_count", .key_text = "llama.block_count", .text = "1"}, MODEL_E_CORRUPT,
           "'llama.block_count' is not a whole number");
    expect(*state, &(Variant){.key_u32 = "llama.attention.head_count_kv", .value_u32 = 3}, MODEL_E_CORRUPT, "2 heads are no multiple of 3");
    expect(*state, &(Variant){.key_u32 = "llama.rope.dimension_count", .value_u32 = 18}, MODEL_E_CORRUPT, "llama.rope.dimension_count");
    expect(*state, &(Variant){.key_f32 = "llama.rope.freq_base", .value_f32 = -1}, MODEL_E_CORRUPT, "llama.rope.freq_base");
    expect(*state, &(Variant){.key_f32 = "llama.rope.freq_base", .value_f32 = NAN}, MODEL_E_CORRUPT, "llama.rope.freq_base");
    expect(*state, &(Variant){.no_tensors = true}, MODEL_E_CORRUPT, "no weights in this file (vocabulary only)");
    expect(*state, &(Variant){.numbers_as_tokens = true}, MODEL_E_CORRUPT, "tokenizer.ggml.tokens");
}

static void what_is_not_supported_is_named(void **state)
{
    expect(*state, &(Variant){.architecture = "mamba"}, MODEL_E_UNSUPPORTED, "architecture 'mamba'");
    expect(*state, &(Variant){.architecture = "\xff\xfe" "evil\n"}, MODEL_E_UNSUPPORTED, "architecture '??evil?'");
    expect(*state, &(Variant){.key_u32 = "llama.expert_count", .value_u32 = 8}, MODEL_E_UNSUPPORTED, "8 experts");
    expect(*state, &(Variant){.key_text = "llama.rope.scaling.type", .text = "yarn"}, MODEL_E_UNSUPPORTED, "RoPE scaling 'yarn'");
    expect(*state, &(Variant){.more_tensor = "blk.0.attn_q.bias"}, MODEL_E_UNSUPPORTED, "'blk.0.attn_q.bias'");
    expect(*state, &(Variant){.key_u32 = "llama.attention.value_length", .value_u32 = 24}, MODEL_E_UNSUPPORTED, "values of 24");
    expect(*state, &(Variant){.key_u32 = "llama.attention.key_length", .value_u32 = 24}, MODEL_E_UNSUPPORTED, "head size of 24");
}

static void split_models_say_what_is_missing(void **state)
{
    static const Variant split = {.key_u32 = "split.count", .value_u32 = 3};
    _cleanup_(gguf_writer_clearp) GgufWriter writer = GGUF_WRITER_NULL;
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    char path[256];

    assert_int_equal(open_variant(*state, "big-00001-of-00003.gguf", &split, &file, &detail), MODEL_E_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "big-00002-of-00003.gguf, big-00003-of-00003.gguf"));
    assert_null(strstr(detail.text, "big-00001-of-00003.gguf"));
    write_model(&writer, &(Variant){0});
    (void)snprintf(path, sizeof(path), "%s/model.gguf-part1of2", (char *)*state);
    gguf_writer_save(&writer, path, writer.size / 2);
    assert_int_equal(model_file_open(path, NULL, &file, &detail), MODEL_E_CORRUPT);
    assert_non_null(strstr(detail.text, "part 1 of 2"));
    assert_null(file);
}

static void rotary_frequencies_follow_base_and_scaling(void **state)
{
    static const Variant variants[] = {
        {.key_f32 = "llama.rope.freq_base", .value_f32 = 500000},
        {.key_text = "llama.rope.scaling.type", .text = "linear", .key_f32 = "llama.rope.scaling.factor", .value_f32 = 4},
        {.key_f32 = "llama.rope.scale_linear", .value_f32 = 2},
    };
    static const double bases[] = {500000, 10000, 10000}, divisors[] = {1, 4, 2};

    for (size_t v = 0; v < N_ELEMENTS(variants); v++) {
        _cleanup_(model_file_freep) ModelFile *file = NULL;

        assert_int_equal(open_variant(*state, "model.gguf", &variants[v], &file, NULL), 0);
        for (int i = 0; i < HEAD_DIM / 2; i++) {
            double expected = pow(bases[v], -i / (HEAD_DIM / 2.0)) / divisors[v];

            assert_true(fabs((double)file->hparams.inv_freq[i] / expected - 1) < 1e-7);
        }
    }
}

static void a_stated_window_limits_the_context(void **state)
{
    _cleanup_(model_file_freep) ModelFile *file = NULL;

    assert_int_equal(open_variant(*state, "model.gguf", &(Variant){.key_u32 = "llama.attention.sliding_window", .value_u32 = 64}, &file, NULL),
                     0);
    assert_int_equal(model_file_params(file)->context_length, 64);
}

/* ---- the fixtures: what is in device layout -------------------------------------------------------------------------------------------- */

static void fixture_path(const char *name, char *ret, size_t size)
{
    (void)snprintf(ret, size, "%s/%s", test_data_folder(), name);
}

/* Every row of a packed matrix equals the row of the file that the rotary order asks for. */
static void check_matrix(const ModelFile *file, const WeightsMatrix *matrix)
{
    const KvShape *shape = &file->hparams.model.attention;
    const uint8_t *packed = weights_matrix(&file->weights, matrix);
    const WeightTypeInfo *type = matrix->tensor->type;
    float ours[512], theirs[512];
    uint64_t row_bytes;

    assert_true(matrix->n_cols <= N_ELEMENTS(ours));
    assert_int_equal(matrix->offset % WEIGHTS_ALIGNMENT, 0);
    assert_int_equal(weight_row_bytes(type, matrix->n_cols, &row_bytes), 0);
    for (uint32_t row = 0; row < matrix->n_rows; row++) {
        uint32_t d = row % shape->k_head_dim, half = shape->rotary_dim / 2, from = row;

        if (matrix->rotary)
            from = row - d + (d < half ? 2 * d : 2 * (d - half) + 1);
        weight_device_decode_row(type, packed, matrix->n_rows, matrix->n_cols, row, ours);
        weight_decode(type, (const uint8_t *)matrix->tensor->data + from * row_bytes, theirs, matrix->n_cols);
        assert_memory_equal(ours, theirs, matrix->n_cols * sizeof(*ours));
    }
}

static void weights_are_repacked_without_loss_and_rotary_rows_reordered(void **state)
{
    static const char *const names[] = {"tiny-llama-tied.gguf", "tiny-llama-mixed.gguf"};

    (void)state;
    for (size_t n = 0; n < N_ELEMENTS(names); n++) {
        _cleanup_(model_file_freep) ModelFile *file = NULL;
        const Weights *weights;
        char path[4096];

        fixture_path(names[n], path, sizeof(path));
        assert_int_equal(model_file_open(path, NULL, &file, NULL), 0);
        weights = &file->weights;
        assert_int_equal(weights->n_blocks, weights->n_layers + 3 + (n == 1));
        check_matrix(file, &weights->embedding);
        check_matrix(file, &weights->output);
        for (uint32_t l = 0; l < weights->n_layers; l++)
            for (WeightsTensor i = 0; i < WEIGHTS_TENSOR_X_MAX; i++) {
                const WeightsMatrix *matrix = &weights->layers[l].tensors[i];
                const uint8_t *packed = weights_matrix(weights, matrix);

                if (matrix->norm)
                    assert_memory_equal(packed, matrix->tensor->data, matrix->n_cols * sizeof(float));
                else
                    check_matrix(file, matrix);
            }
        /* Llama 3 scaling: the lowest frequency is divided by 8, the highest is not. */
        assert_true(file->hparams.inv_freq[0] == 1.0f);
        assert_true(fabs((double)file->hparams.inv_freq[15] * 8 / pow(10000, -15 / 16.0) - 1) < 1e-6);
    }
}

static void the_digest_is_remembered_and_a_damaged_memory_is_not_believed(void **state)
{
    char first[65], path[4096], copy[256], command[4700], remembered[512];
    const char *folder = *state;

    fixture_path("tiny-llama-mixed.gguf", path, sizeof(path));
    (void)snprintf(copy, sizeof(copy), "%s/copy.gguf", folder);
    (void)snprintf(command, sizeof(command), "cp '%s' '%s'", path, copy);
    assert_int_equal(system(command), 0);
    for (int run = 0; run < 4; run++) {
        _cleanup_(model_file_freep) ModelFile *file = NULL;

        assert_int_equal(model_file_open(copy, folder, &file, NULL), 0);
        if (run == 0)
            memcpy(first, model_file_digest(file), sizeof(first));
        assert_string_equal(model_file_digest(file), first);
        (void)snprintf(command, sizeof(command), "test \"$(sha256sum < '%s')\" = '%s  -'", copy, first);
        assert_int_equal(system(command), 0);
        (void)snprintf(remembered, sizeof(remembered), "ls '%s'/digests/* > /dev/null", folder);
        assert_int_equal(system(remembered), 0);
        /* The second run reads what the first stored; before the third it is damaged, before the fourth it is a folder. */
        (void)snprintf(command, sizeof(command),
                       run == 1 ? "for f in '%s'/digests/*; do printf X | dd of=$f bs=1 seek=60 conv=notrunc status=none; done"
                                : "for f in '%s'/digests/*; do rm $f; mkdir $f; done",
                       folder);
        if (run == 1 || run == 2)
            assert_int_equal(system(command), 0);
    }
}

static void a_changed_file_gets_a_new_digest(void **state)
{
    char first[65], copy[256], path[4096], command[4700];

    fixture_path("tiny-llama-mixed.gguf", path, sizeof(path));
    (void)snprintf(copy, sizeof(copy), "%s/copy.gguf", (char *)*state);
    (void)snprintf(command, sizeof(command), "cp '%s' '%s'", path, copy);
    assert_int_equal(system(command), 0);
    for (int run = 0; run < 2; run++) {
        _cleanup_(model_file_freep) ModelFile *file = NULL;

        assert_int_equal(model_file_open(copy, *state, &file, NULL), 0);
        if (run == 0)
            memcpy(first, model_file_digest(file), sizeof(first));
        else
            assert_string_not_equal(model_file_digest(file), first);
        (void)snprintf(command, sizeof(command), "printf Y | dd of='%s' bs=1 seek=$(($(stat -c %%s '%s') - 5)) conv=notrunc status=none", copy,
                       copy);
        assert_int_equal(system(command), 0);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_small_model_loads_with_defaults, setup, teardown),
        cmocka_unit_test_setup_teardown(missing_and_misshapen_parts_are_named, setup, teardown),
        cmocka_unit_test_setup_teardown(what_is_not_supported_is_named, setup, teardown),
        cmocka_unit_test_setup_teardown(split_models_say_what_is_missing, setup, teardown),
        cmocka_unit_test_setup_teardown(rotary_frequencies_follow_base_and_scaling, setup, teardown),
        cmocka_unit_test_setup_teardown(a_stated_window_limits_the_context, setup, teardown),
        cmocka_unit_test(weights_are_repacked_without_loss_and_rotary_rows_reordered),
        cmocka_unit_test_setup_teardown(the_digest_is_remembered_and_a_damaged_memory_is_not_believed, setup, teardown),
        cmocka_unit_test_setup_teardown(a_changed_file_gets_a_new_digest, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
