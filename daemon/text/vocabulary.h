#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The token table: bytes and kind of each id, and the way back from bytes to the id.
 *
 * Byte-level vocabularies write a token's bytes as characters (GPT-2's byte map); they are stored decoded.  Control and user-defined
 * tokens are written as they are.  The way back knows ordinary tokens before special ones and never leads to a control token.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The values of tokenizer.ggml.token_type. */
typedef enum TokenKind {
    TOKEN_KIND_NORMAL = 1,
    TOKEN_KIND_UNKNOWN = 2,
    TOKEN_KIND_CONTROL = 3,
    TOKEN_KIND_USER_DEFINED = 4,
    TOKEN_KIND_UNUSED = 5,
    TOKEN_KIND_BYTE = 6,
} TokenKind;

typedef struct Vocabulary {
    uint32_t n, capacity;
    char *bytes;
    size_t n_bytes, bytes_capacity;
    size_t *offsets;  /* n + 1 */
    uint8_t *kinds;   /* TokenKind */
    int32_t *slots;   /* hash of bytes → id; -1: free */
    uint32_t mask;
    int32_t byte_ids[256]; /* -1: the vocabulary has no token of that byte */
} Vocabulary;

/* Room for @n tokens, n <= INT32_MAX / 4. */
int vocabulary_init(Vocabulary *vocabulary, uint32_t n);
void vocabulary_deinit(Vocabulary *vocabulary);
/* The next id; the text is as in the file. */
int vocabulary_add(Vocabulary *vocabulary, const char *text, size_t length, TokenKind kind);
/* After the last one. */
void vocabulary_index(Vocabulary *vocabulary);

const char *vocabulary_bytes(const Vocabulary *vocabulary, int32_t id, size_t *ret_length);
/* -1: none. */
int32_t vocabulary_find(const Vocabulary *vocabulary, const char *bytes, size_t length);
/* Decodes GPT-2's byte map; false when a character is not in it.  @ret: @length bytes of room. */
bool vocabulary_decode_text(const char *text, size_t length, char *ret, size_t *ret_length);
