/* SPDX-License-Identifier: Apache-2.0 */
/* What a worker prepares of a model without the device. */

#include "daemon/model/model-private.h"
#include "daemon/model/weights-file.h"
#include "quant/base/log.h"

#include <string.h>

/* ---- split files ------------------------------------------------------------------------------------------------------------ */

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

/* "…part1of2…", cut by bytes: only the whole can be read. */
static bool is_byte_part(const char *path, unsigned *ret_part, unsigned *ret_n)
{
    for (const char *at = base_name(path); (at = strcasestr(at, "part")); at += 4)
        if (sscanf(at + 4, "%3u%*1[-_ ]of%*1[-_ ]%3u", ret_part, ret_n) == 2 || sscanf(at + 4, "%3uof%3u", ret_part, ret_n) == 2)
            return *ret_n > 1;
    return false;
}

static int explain_byte_part(const char *path, int code, ErrorDetail *reterr)
{
    unsigned part, n;

    if (code != GGUF_E_CORRUPT || !is_byte_part(path, &part, &n))
        return code;
    return error_detail_set(reterr, code,
                            "'%.100s' is part %u of %u of a file that was cut by bytes: join all parts in order (cat PART1 PART2 … > "
                            "MODEL.gguf) and use the result",
                            base_name(path), part, n);
}

/* Shards of the GGUF tools are files of their own: say which are not there. */
static int check_split(const Gguf *gguf, const char *path, ErrorDetail *reterr)
{
    uint64_t count = 0, number = 0;
    const char *tail = strstr(base_name(path), "-of-");
    char missing[256] = "";
    unsigned n_missing = 0;

    if (!gguf_get_u64(gguf, "split.count", &count) || count < 2)
        return 0;
    (void)gguf_get_u64(gguf, "split.no", &number);
    /* NAME-00001-of-00003.gguf */
    for (unsigned i = 1; tail && tail - base_name(path) >= 6 && i <= MIN(count, (uint64_t)999); i++) {
        int stem = (int)(tail - 6 - path);
        char other[4096];

        if (stem < 0 || snprintf(other, sizeof(other), "%.*s-%05u%s", stem, path, i, tail) >= (int)sizeof(other))
            break;
        if (access(other, F_OK) == 0)
            continue;
        if (n_missing++ < 4)
            (void)snprintf(missing + strlen(missing), sizeof(missing) - strlen(missing), "%s%.50s", n_missing > 1 ? ", " : "",
                           base_name(other));
    }
    return error_detail_set(reterr, MODEL_E_UNSUPPORTED,
                            "this is part %llu of a model split into %llu files%s%s%s; split models are not supported, merge the parts",
                            (unsigned long long)number + 1, (unsigned long long)count, n_missing ? ", of which " : "", missing,
                            n_missing > 4 ? " and others are missing" : n_missing ? " is missing" : "");
}

/* ---- opening ---------------------------------------------------------------------------------------------------------------- */

static int fold_gguf(int r)
{
    switch (r) {
    case GGUF_E_NOT_FOUND:
        return MODEL_E_NOT_FOUND;
    case GGUF_E_CORRUPT:
        return MODEL_E_CORRUPT;
    case GGUF_E_UNSUPPORTED:
        return MODEL_E_UNSUPPORTED;
    default:
        return error_fold(r);
    }
}

static int open_gguf(const char *path, Gguf **ret, ErrorDetail *reterr)
{
    int r;

    r = gguf_open(path, ret, reterr);
    if (r)
        return fold_gguf(explain_byte_part(path, r, reterr));
    r = check_split(*ret, path, reterr);
    if (r)
        return r;
    if (gguf_n_tensors(*ret) == 0)
        return error_detail_set(reterr, MODEL_E_CORRUPT, "no weights in this file (vocabulary only)");
    return 0;
}

static int open_tokenizer(ModelFile *file, ErrorDetail *reterr)
{
    int r;

    r = tokenizer_new(file->gguf, &file->tokenizer, reterr);
    if (r == TOKENIZER_E_UNSUPPORTED)
        return MODEL_E_UNSUPPORTED;
    if (r == TOKENIZER_E_CORRUPT)
        return MODEL_E_CORRUPT;
    if (r)
        return error_fold(r);
    if (tokenizer_n_vocab(file->tokenizer) > file->hparams.model.n_vocab)
        return error_detail_set(reterr, MODEL_E_CORRUPT, "the tokenizer has %u tokens, the embedding only %u rows",
                                tokenizer_n_vocab(file->tokenizer), file->hparams.model.n_vocab);
    return 0;
}

static int copy_template(ModelFile *file, ErrorDetail *reterr)
{
    GgufString source;

    if (!gguf_get_string(file->gguf, "tokenizer.chat_template", &source))
        return 0;
    if (memchr(source.data, 0, source.length))
        return error_detail_set(reterr, MODEL_E_CORRUPT, "key 'tokenizer.chat_template' holds a NUL byte");
    file->chat_template = strndup(source.data, source.length);
    return file->chat_template ? 0 : error_origin(-ENOMEM);
}

/* The packed image: from its file, or made; without a file in anonymous memory. */
static int open_image(ModelFile *file, ErrorDetail *reterr)
{
    const ModelParams *params = &file->hparams.model;
    int r = -ENOENT;

    if (file->state_dir)
        r = weights_file_open(file->state_dir, file->digest, params, &file->weights);
    if (r && file->state_dir) {
        r = weights_file_make(file->state_dir, file->digest, params, &file->weights);
        if (r)
            log_debug("The packed weights stay in anonymous memory: %s", strerror(-r));
    }
    if (r == 0)
        return 0;
    r = weights_new_image(&file->weights, reterr);
    return r ? r : weights_pack(&file->weights, params);
}

static int load(ModelFile *file, const char *path, const char *state_dir, ErrorDetail *reterr)
{
    int r;

    r = open_gguf(path, &file->gguf, reterr);
    if (!r)
        r = hparams_read(file->gguf, &file->hparams, reterr);
    if (!r)
        r = weights_plan(file->gguf, &file->hparams.model, &file->weights, reterr);
    if (!r)
        r = open_tokenizer(file, reterr);
    if (!r)
        r = copy_template(file, reterr);
    if (!r)
        r = digest_of_file(file->gguf, state_dir, file->digest);
    if (!r)
        r = open_image(file, reterr);
    if (r)
        return error_trace(r);
    digest_to_hex(file->digest, file->digest_hex);
    gguf_release_data(file->gguf);
    return 0;
}

int model_file_open(const char *path, const char *state_dir, ModelFile **ret, ErrorDetail *reterr)
{
    _cleanup_(model_file_freep) ModelFile *file = calloc(1, sizeof(*file));
    int r;

    if (!file)
        return error_origin(-ENOMEM);
    if (state_dir) {
        file->state_dir = strdup(state_dir);
        if (!file->state_dir)
            return error_origin(-ENOMEM);
    }
    r = load(file, path, state_dir, reterr);
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(file);
    return 0;
}

ModelFile *model_file_free(ModelFile *file)
{
    if (!file)
        return NULL;
    weights_clear(&file->weights);
    tokenizer_free(file->tokenizer);
    gguf_free(file->gguf);
    free(file->chat_template);
    free(file->state_dir);
    free(file->nbits);
    free(file);
    return NULL;
}

const ModelParams *model_file_params(const ModelFile *file)
{
    return &file->hparams.model;
}

const Tokenizer *model_file_tokenizer(const ModelFile *file)
{
    return file->tokenizer;
}

const char *model_file_chat_template(const ModelFile *file)
{
    return file->chat_template;
}

const char *model_file_digest(const ModelFile *file)
{
    return file->digest_hex;
}

uint64_t model_file_bytes(const ModelFile *file)
{
    return gguf_file_bytes(file->gguf);
}
