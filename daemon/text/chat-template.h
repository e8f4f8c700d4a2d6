#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chat templates: a sandboxed interpreter for the part of Jinja that models' templates use, bounded in steps, depth and memory.  What
 * cannot be run is an error, never a guess.
 *
 * The result is a list of pieces, each from the template's own text (special tokens are parsed in it) or from a value that came with
 * the messages (never parsed for special tokens), so that a role marker typed by a user stays ordinary text.
 *
 * As in Transformers: trim_blocks, lstrip_blocks, tools and documents are none, break and continue, raise_exception, strftime_now.
 * Not there: include, extends, block, import, recursive loops, unpacked arguments, methods that change a value.  upper and lower map
 * characters one to one.
 */

#include "daemon/text/tokenizer.h"

typedef struct ChatMessage {
    const char *role, *content; /* valid UTF-8, borrowed */
} ChatMessage;

typedef struct ChatTemplate ChatTemplate;

typedef enum ChatTemplateError {
    CHAT_TEMPLATE_E_OK,
    CHAT_TEMPLATE_E_SYNTAX,  /* line and construct in the detail */
    CHAT_TEMPLATE_E_REFUSED, /* raise_exception: its message in the detail */
    CHAT_TEMPLATE_E_FAILED,  /* a type error, an undefined name used, a limit */
} ChatTemplateError;

/* @source: copied.  A template can be rendered by several threads at once. */
int chat_template_new(const char *source, ChatTemplate **ret, ErrorDetail *reterr);
ChatTemplate *chat_template_free(ChatTemplate *template_);
DEFINE_CLEANUP(ChatTemplate, chat_template_free)

typedef struct ChatPiece {
    char *text; /* owned, NUL-terminated */
    size_t length;
    bool trusted; /* from the template */
} ChatPiece;

typedef struct ChatPieces {
    ChatPiece *pieces;
    size_t n, capacity;
} ChatPieces;
#define CHAT_PIECES_NULL ((ChatPieces){NULL, 0, 0})
void chat_pieces_clear(ChatPieces *pieces);
static inline void chat_pieces_clearp(ChatPieces *pieces) { chat_pieces_clear(pieces); }

/* @bos_token, @eos_token: may be NULL (undefined in the template); trusted.  *ret is empty before; on error it stays so. */
int chat_template_render(const ChatTemplate *template_, const ChatMessage *messages, size_t n_messages, bool add_generation_prompt,
                         const char *bos_token, const char *eos_token, ChatPieces *ret, ErrorDetail *reterr);
/* Encodes pieces: special tokens parsed in trusted text only.  Adjacent untrusted and trusted pieces never merge across a special token;
 * ordinary text runs across piece borders are encoded as one text, as the reference would. Adds BOS when the tokenizer says so and the
 * text does not begin with it.  On error the list is as before. */
int chat_pieces_encode(const ChatPieces *pieces, const Tokenizer *tokenizer, TokenList *list);
