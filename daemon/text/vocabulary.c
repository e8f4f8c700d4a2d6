/* SPDX-License-Identifier: Apache-2.0 */
/* The token table and its hash. */

#include "daemon/text/vocabulary.h"
#include "daemon/text/utf8.h"

#include <string.h>

int vocabulary_init(Vocabulary *vocabulary, uint32_t n)
{
    uint32_t n_slots = 16;

    *vocabulary = (Vocabulary){.capacity = n};
    while (n_slots < 2 * n)
        n_slots *= 2;
    vocabulary->mask = n_slots - 1;
    vocabulary->bytes_capacity = 16 * (size_t)n + 64;
    vocabulary->bytes = malloc(vocabulary->bytes_capacity);
    vocabulary->offsets = calloc((size_t)n + 1, sizeof(*vocabulary->offsets));
    vocabulary->kinds = calloc((size_t)n + 1, sizeof(*vocabulary->kinds));
    vocabulary->slots = malloc((size_t)n_slots * sizeof(*vocabulary->slots));
    if (!vocabulary->bytes || !vocabulary->offsets || !vocabulary->kinds || !vocabulary->slots) {
        vocabulary_deinit(vocabulary);
        return error_origin(-ENOMEM);
    }
    memset(vocabulary->slots, 0xff, (size_t)n_slots * sizeof(*vocabulary->slots));
    memset(vocabulary->byte_ids, 0xff, sizeof(vocabulary->byte_ids));
    return 0;
}

void vocabulary_deinit(Vocabulary *vocabulary)
{
    free(vocabulary->bytes);
    free(vocabulary->offsets);
    free(vocabulary->kinds);
    free(vocabulary->slots);
    *vocabulary = (Vocabulary){0};
}

/* GPT-2's map writes printable Latin-1 as itself and the other 68 bytes, in order, as U+0100 and up. */
static int byte_of_code_point(uint32_t c)
{
    if ((c >= 0x21 && c <= 0x7e) || (c >= 0xa1 && c <= 0xac) || (c >= 0xae && c <= 0xff))
        return (int)c;
    if (c < 0x100 || c >= 0x100 + 68)
        return -1;
    c -= 0x100;
    if (c < 0x21)
        return (int)c; /* 00 to 20 */
    c -= 0x21;
    if (c < 0x22)
        return (int)(0x7f + c); /* 7f to a0 */
    return 0xad;
}

bool vocabulary_decode_text(const char *text, size_t length, char *ret, size_t *ret_length)
{
    size_t n = 0;

    for (size_t i = 0; i < length;) {
        uint32_t code_point;
        int size = utf8_decode(text + i, length - i, &code_point);
        int byte = size > 0 ? byte_of_code_point(code_point) : -1;

        if (byte < 0)
            return false;
        ret[n++] = (char)byte;
        i += (size_t)size;
    }
    *ret_length = n;
    return true;
}

static bool kind_is_literal(TokenKind kind)
{
    return kind == TOKEN_KIND_CONTROL || kind == TOKEN_KIND_USER_DEFINED || kind == TOKEN_KIND_UNKNOWN;
}

int vocabulary_add(Vocabulary *vocabulary, const char *text, size_t length, TokenKind kind)
{
    size_t used = vocabulary->n_bytes;

    if (vocabulary->n == vocabulary->capacity || length > SIZE_MAX / 4 - used)
        return error_origin(-EOVERFLOW);
    if (used + length > vocabulary->bytes_capacity) {
        size_t capacity = 2 * (used + length);
        char *bytes = realloc(vocabulary->bytes, capacity);

        if (!bytes)
            return error_origin(-ENOMEM);
        vocabulary->bytes = bytes;
        vocabulary->bytes_capacity = capacity;
    }
    if (kind_is_literal(kind) || !vocabulary_decode_text(text, length, vocabulary->bytes + used, &length)) {
        if (length)
            memcpy(vocabulary->bytes + used, text, length);
        /* Outside the map no merge can lead to it: it is kept for decoding only. */
        kind = kind_is_literal(kind) ? kind : TOKEN_KIND_UNUSED;
    }
    vocabulary->n_bytes += length;
    vocabulary->kinds[vocabulary->n] = (uint8_t)kind;
    vocabulary->offsets[++vocabulary->n] = vocabulary->n_bytes;
    return 0;
}

static uint32_t hash_bytes(const char *bytes, size_t length)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a, 64 bits, folded */

    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (uint8_t)bytes[i]) * UINT64_C(0x100000001b3);
    return (uint32_t)(hash ^ hash >> 32);
}

/* The slot of these bytes, or the free one where they would go. */
static int32_t *vocabulary_slot(const Vocabulary *vocabulary, const char *bytes, size_t length)
{
    for (uint32_t i = hash_bytes(bytes, length);; i++) {
        int32_t *slot = &vocabulary->slots[i & vocabulary->mask];
        const char *other;
        size_t n;

        if (*slot < 0)
            return slot;
        other = vocabulary_bytes(vocabulary, *slot, &n);
        if (n == length && (n == 0 || memcmp(other, bytes, n) == 0))
            return slot;
    }
}

static void vocabulary_index_kinds(Vocabulary *vocabulary, bool literal)
{
    for (uint32_t id = 0; id < vocabulary->n; id++) {
        TokenKind kind = vocabulary->kinds[id];
        size_t length;
        const char *bytes = vocabulary_bytes(vocabulary, (int32_t)id, &length);
        int32_t *slot;

        if (kind == TOKEN_KIND_CONTROL || kind == TOKEN_KIND_UNKNOWN || kind == TOKEN_KIND_UNUSED || kind_is_literal(kind) != literal)
            continue;
        slot = vocabulary_slot(vocabulary, bytes, length);
        if (*slot < 0)
            *slot = (int32_t)id;
    }
}

void vocabulary_index(Vocabulary *vocabulary)
{
    vocabulary_index_kinds(vocabulary, false);
    vocabulary_index_kinds(vocabulary, true);
    for (unsigned byte = 0; byte < 256; byte++) {
        char c = (char)byte;

        vocabulary->byte_ids[byte] = vocabulary_find(vocabulary, &c, 1);
    }
}

const char *vocabulary_bytes(const Vocabulary *vocabulary, int32_t id, size_t *ret_length)
{
    *ret_length = vocabulary->offsets[id + 1] - vocabulary->offsets[id];
    return vocabulary->bytes + vocabulary->offsets[id];
}

int32_t vocabulary_find(const Vocabulary *vocabulary, const char *bytes, size_t length)
{
    return *vocabulary_slot(vocabulary, bytes, length);
}
