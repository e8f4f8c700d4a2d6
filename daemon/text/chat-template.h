#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chat templates: a sandboxed interpreter for the part of Jinja that models' templates use, bounded in steps, depth and output.  What
 * cannot be run is an error, never a guess.
 *
 * The result is a list of pieces, each from the template's own text (special tokens are parsed in it) or from a value that came with
 * the messages (never parsed for special tokens), so that a role marker typed by a user stays ordinary text.
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

int chat_template_new(const char *source, ChatTemplate **ret, ErrorDetail *reterr);
ChatTemplate *chat_template_free(ChatTemplate *template_);
DEFINE_CLEANUP(ChatTemplate, chat_template_free)

typedef struct ChatPiece {
    char *text; /* owned */
    size_t length;
    bool trusted; /* from the template */
} ChatPiece;

typedef struct ChatPieces {
    ChatPiece *pieces;
    size_t n, capacity;
} ChatPieces;
#define CHAT_PIECES_NULL ((ChatPieces){NULL, 0, 0})
void chat_pieces_clear(ChatPieces *pieces);

int chat_template_render(const ChatTemplate *template_, const ChatMessage *messages, size_t n_messages, bool add_generation_prompt,
                         const char *bos_token, const char *eos_token, ChatPieces *ret, ErrorDetail *reterr);
/* Encodes pieces: special tokens parsed in trusted text only.  Adjacent untrusted and trusted pieces never merge across a special token;
 * ordinary text runs across piece borders are encoded as one text, as the reference would. Adds BOS when the tokenizer says so and the
 * text does not begin with it. */
int chat_pieces_encode(const ChatPieces *pieces, const Tokenizer *tokenizer, TokenList *list);
