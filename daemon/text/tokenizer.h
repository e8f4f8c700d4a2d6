#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tokenizers from GGUF tables: byte-level BPE ("gpt2").  Input is bytes.  Text that a user typed is never parsed for special tokens;
 * template text is.
 *
 * Valid UTF-8 gets the ids of the reference tokenizer.  Every byte that belongs to no well-formed character ends the text before it, and
 * becomes the token of that byte, alone (or the tokens of U+FFFD, where the vocabulary has none for it); the text after it starts anew.
 * A valid character of which the vocabulary lacks a byte loses that byte, as in the reference.  A tokenizer is safe to use from
 * several threads.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Gguf Gguf;
typedef struct Tokenizer Tokenizer;

typedef enum TokenizerError {
    TOKENIZER_E_OK,
    TOKENIZER_E_UNSUPPORTED, /* model or pre-tokenizer unknown: the detail lists the known names */
    TOKENIZER_E_CORRUPT,     /* tables inconsistent */
} TokenizerError;

/* Reads tokenizer.ggml.* ; keeps nothing of @gguf. */
int tokenizer_new(const Gguf *gguf, Tokenizer **ret, ErrorDetail *reterr);
Tokenizer *tokenizer_free(Tokenizer *tokenizer);
DEFINE_CLEANUP(Tokenizer, tokenizer_free)

typedef struct TokenList {
    int32_t *ids;
    size_t n, capacity;
} TokenList;
#define TOKEN_LIST_NULL ((TokenList){NULL, 0, 0})
int token_list_append(TokenList *list, const int32_t *ids, size_t n);
void token_list_clear(TokenList *list); /* frees */
static inline void token_list_clearp(TokenList *list) { token_list_clear(list); }

/* Appends the ids of @text.  @parse_special: special tokens of the table (control, user-defined) are matched, the longest at the leftmost
 * place, before anything else; false: their text is ordinary text.  No BOS is added.  On error the list is as before. */
int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, bool parse_special, TokenList *list);
/* The first special token in @text: its id, place and length; -1 when there is none. */
int32_t tokenizer_find_special(const Tokenizer *tokenizer, const char *text, size_t length, size_t *ret_begin, size_t *ret_length);
/* The raw bytes of one id ("" for control tokens unless @special, and for ids outside the table); borrowed, *ret_length bytes, not
 * NUL-terminated. */
const char *tokenizer_token_bytes(const Tokenizer *tokenizer, int32_t id, bool special, size_t *ret_length);

uint32_t tokenizer_n_vocab(const Tokenizer *tokenizer);
int32_t tokenizer_bos(const Tokenizer *tokenizer); /* -1: none */
bool tokenizer_add_bos(const Tokenizer *tokenizer);
/* Whether the id ends a turn: EOS, EOT, EOM, and the known end-of-turn names among control tokens. */
bool tokenizer_is_eog(const Tokenizer *tokenizer, int32_t id);
/* Text of BOS/EOS for templates; "" when there is none. */
const char *tokenizer_bos_text(const Tokenizer *tokenizer);
const char *tokenizer_eos_text(const Tokenizer *tokenizer);
