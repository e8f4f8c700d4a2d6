#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A byte-level tokenizer small enough to think about, made through a GGUF file without tensors: ids 0 to 255 are the bytes, then a few merges and
 * special tokens.
 */

#include "daemon/model/gguf.h"
#include "daemon/text/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

enum {
    TINY_HE = 256,
    TINY_LL,
    TINY_HELL,
    TINY_HELLO,
    TINY_AA,
    TINY_AAAA,
    TINY_SPACE_A,
    TINY_BOS,      /* <s> */
    TINY_IM_START, /* <|im_start|> */
    TINY_IM_END,   /* <|im_end|> */
    TINY_IM,       /* <|im_ : a special that others begin with */
    TINY_BARS,     /* <｜end▁of▁sentence｜> */
    TINY_USER,     /* <tool>, user-defined */
    TINY_EOT,      /* <|eot_id|> */
    TINY_N,
};

typedef struct TinyTokenizer {
    const char *pre, *model; /* NULL: left out; model: "gpt2" */
    bool add_bos;
    const char *extra_merge; /* one more */
    uint32_t n_types;        /* length of token_type; 0: as the tokens */
    uint32_t eos;            /* 0: TINY_IM_END */
    uint32_t missing_byte;   /* that byte's token is another text; 0: none */
} TinyTokenizer;

static inline void tiny_u32(FILE *file, uint32_t value)
{
    assert_int_equal(fwrite(&value, sizeof(value), 1, file), 1);
}

static inline void tiny_u64(FILE *file, uint64_t value)
{
    assert_int_equal(fwrite(&value, sizeof(value), 1, file), 1);
}

static inline void tiny_string(FILE *file, const char *text)
{
    tiny_u64(file, strlen(text));
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
}

static inline void tiny_key(FILE *file, const char *key, GgufType type)
{
    tiny_string(file, key);
    tiny_u32(file, type);
}

static inline void tiny_array(FILE *file, const char *key, GgufType type, uint64_t n)
{
    tiny_key(file, key, GGUF_TYPE_ARRAY);
    tiny_u32(file, type);
    tiny_u64(file, n);
}

/* GPT-2's byte map, written down independently of the tokenizer's: byte → UTF-8. */
static inline void tiny_byte_text(unsigned byte, char *ret)
{
    unsigned c = byte, n = 0;
    bool plain = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;

    for (unsigned other = 0; other < byte && !plain; other++)
        n += !((other >= 0x21 && other <= 0x7e) || (other >= 0xa1 && other <= 0xac) || other >= 0xae);
    if (!plain)
        c = 0x100 + n;
    if (c < 0x80)
        (void)snprintf(ret, 4, "%c", c);
    else
        (void)snprintf(ret, 4, "%c%c", 0xc0 | c >> 6, 0x80 | (c & 0x3f));
}

static inline void tiny_write(FILE *file, const TinyTokenizer *tiny)
{
    static const char *const rest[] = {"he", "ll", "hell", "hello", "aa", "aaaa", "Ġa", "<s>", "<|im_start|>", "<|im_end|>", "<|im_",
                                       "<｜end▁of▁sentence｜>", "<tool>", "<|eot_id|>"};
    static const char *const merges[] = {"h e", "l l", "he ll", "hell o", "a a", "aa aa", "Ġ a"};
    uint32_t n_types = tiny->n_types ? tiny->n_types : TINY_N;

    assert_int_equal(fwrite("GGUF", 1, 4, file), 4);
    tiny_u32(file, 3);
    tiny_u64(file, 0);
    tiny_u64(file, 6U + (tiny->pre != NULL) + (tiny->model != NULL));
    if (tiny->model) {
        tiny_key(file, "tokenizer.ggml.model", GGUF_TYPE_STRING);
        tiny_string(file, tiny->model);
    }
    if (tiny->pre) {
        tiny_key(file, "tokenizer.ggml.pre", GGUF_TYPE_STRING);
        tiny_string(file, tiny->pre);
    }
    tiny_array(file, "tokenizer.ggml.tokens", GGUF_TYPE_STRING, TINY_N);
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[8];

        tiny_byte_text(byte, text);
        tiny_string(file, tiny->missing_byte && byte == tiny->missing_byte ? "[gone]" : text);
    }
    for (size_t i = 0; i < N_ELEMENTS(rest); i++)
        tiny_string(file, rest[i]);
    tiny_array(file, "tokenizer.ggml.token_type", GGUF_TYPE_I32, n_types);
    for (uint32_t id = 0; id < n_types; id++)
        tiny_u32(file, id < TINY_BOS ? 1 : id == TINY_USER ? 4 : 3);
    tiny_array(file, "tokenizer.ggml.merges", GGUF_TYPE_STRING, N_ELEMENTS(merges) + (tiny->extra_merge != NULL));
    for (size_t i = 0; i < N_ELEMENTS(merges); i++)
        tiny_string(file, merges[i]);
    if (tiny->extra_merge)
        tiny_string(file, tiny->extra_merge);
    tiny_key(file, "tokenizer.ggml.bos_token_id", GGUF_TYPE_U32);
    tiny_u32(file, TINY_BOS);
    tiny_key(file, "tokenizer.ggml.eos_token_id", GGUF_TYPE_U32);
    tiny_u32(file, tiny->eos ? tiny->eos : TINY_IM_END);
    tiny_key(file, "tokenizer.ggml.add_bos_token", GGUF_TYPE_BOOL);
    assert_int_not_equal(fputc(tiny->add_bos, file), EOF);
}

/* The code of tokenizer_new(). */
static inline int tiny_tokenizer_try(const TinyTokenizer *tiny, Tokenizer **ret, ErrorDetail *detail)
{
    _cleanup_(gguf_freep) Gguf *gguf = NULL;
    char path[] = "/tmp/leat-tiny-XXXXXX";
    int fd = mkstemp(path);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "wb");

    assert_non_null(file);
    tiny_write(file, tiny);
    assert_int_equal(fclose(file), 0);
    if (gguf_open(path, &gguf, detail)) {
        (void)unlink(path);
        fail_msg("the test's GGUF: %s", detail->text);
    }
    (void)unlink(path);
    return tokenizer_new(gguf, ret, detail);
}

static inline Tokenizer *tiny_tokenizer_new(const TinyTokenizer *tiny)
{
    TinyTokenizer with_model = *tiny;
    Tokenizer *tokenizer = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;

    with_model.model = "gpt2";
    if (tiny_tokenizer_try(&with_model, &tokenizer, &detail))
        fail_msg("the test's tokenizer: %s", detail.text);
    return tokenizer;
}
