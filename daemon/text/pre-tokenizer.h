#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pre-tokenizers: how text is cut into words before merges, by the name in tokenizer.ggml.pre.  Each is one pattern or several; a
 * later one sees each piece of the earlier ones as a whole text (so that "end of text" is the piece's end).  No normalisation is
 * done: where the reference has one (NFC for qwen2), text that is not in that form gets other ids.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct PreTokenizer PreTokenizer;

typedef enum PreTokenizerError {
    PRE_TOKENIZER_E_OK,
    PRE_TOKENIZER_E_UNKNOWN, /* the detail lists the known names */
} PreTokenizerError;

int pre_tokenizer_new(const char *name, size_t length, PreTokenizer **ret, ErrorDetail *reterr);
PreTokenizer *pre_tokenizer_free(PreTokenizer *pre);
DEFINE_CLEANUP(PreTokenizer, pre_tokenizer_free)

/* Receives the words in order; not 0 stops the walk and is passed up. */
typedef int (*PreTokenizerWord)(void *userdata, const char *word, size_t length);
/* @text: valid UTF-8.  Every byte is in exactly one word.  Safe from several threads at once. */
int pre_tokenizer_split(const PreTokenizer *pre, const char *text, size_t length, PreTokenizerWord word, void *userdata);
/* A word that is in the vocabulary is one token, whatever the merges say. */
bool pre_tokenizer_prefers_whole_words(const PreTokenizer *pre);
/* What holds when the file has no tokenizer.ggml.add_bos_token. */
bool pre_tokenizer_adds_bos(const PreTokenizer *pre);
