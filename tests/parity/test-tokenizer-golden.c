/* SPDX-License-Identifier: Apache-2.0 */
/* A real model's tokenizer against the reference's ids (make-tokenizer-golden.py); exact, no tolerance. */

#include "daemon/model/gguf.h"
#include "daemon/text/tokenizer.h"
#include "tests/lib/place.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define TEXT_FILE   "tests/data/tokenizer-text.txt"
#define GOLDEN_FILE "tests/data/tokenizer-golden.txt"

typedef struct Fixture {
    Gguf *gguf;
    Tokenizer *tokenizer;
    char *text;
    size_t length;
    FILE *golden;
} Fixture;

static char *read_file(const char *path, size_t *ret_length)
{
    _cleanup_(close_filep) FILE *file = fopen(path, "rb");
    char *text;
    long size;

    if (!file || fseek(file, 0, SEEK_END) || (size = ftell(file)) < 0 || fseek(file, 0, SEEK_SET))
        return NULL;
    text = malloc((size_t)size + 1);
    if (text && fread(text, 1, (size_t)size, file) != (size_t)size) {
        free(text);
        return NULL;
    }
    *ret_length = (size_t)size;
    return text;
}

static int setup(void **state)
{
    const char *path = test_model_path();
    Fixture *fixture = calloc(1, sizeof(*fixture));
    ErrorDetail detail = ERROR_DETAIL_NULL;

    assert_non_null(fixture);
    *state = fixture;
    if (!path)
        return -1;
    if (gguf_open(path, &fixture->gguf, &detail) || tokenizer_new(fixture->gguf, &fixture->tokenizer, &detail)) {
        print_error("LEAT_TEST_MODEL=%s: %s\n", path, detail.text);
        return -1;
    }
    fixture->text = read_file(TEXT_FILE, &fixture->length);
    fixture->golden = fopen(GOLDEN_FILE, "r");
    if (!fixture->text || !fixture->golden) {
        print_error("cannot read " TEXT_FILE " and " GOLDEN_FILE " (run from the top of the source tree)\n");
        return -1;
    }
    return 0;
}

static int teardown(void **state)
{
    Fixture *fixture = *state;

    if (fixture->golden)
        (void)fclose(fixture->golden);
    free(fixture->text);
    (void)tokenizer_free(fixture->tokenizer);
    (void)gguf_free(fixture->gguf);
    free(fixture);
    return 0;
}

/* FNV-1a, 64 bit, over the ids as little-endian int32. */
static uint64_t hash_ids(const int32_t *ids, size_t n)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < n; i++)
        for (int shift = 0; shift < 32; shift += 8)
            hash = (hash ^ ((uint32_t)ids[i] >> shift & 0xff)) * UINT64_C(0x100000001b3);
    return hash;
}

static bool ids_agree(const char *what, size_t line, const TokenList *list, const char *count, const char *hash)
{
    char ours[17];

    (void)snprintf(ours, sizeof(ours), "%016" PRIx64, hash_ids(list->ids, list->n));
    if (count && hash && strtoull(count, NULL, 10) == list->n && strcmp(hash, ours) == 0)
        return true;
    print_error("line %zu, %s: %zu ids %s, golden %s %s:", line, what, list->n, ours, count ? count : "-", hash ? hash : "-");
    for (size_t i = 0; i < list->n && i < 40; i++)
        print_error(" %d", list->ids[i]);
    print_error("\n");
    return false;
}

/* Whether one text gives what one golden line says. */
static bool line_agrees(const Tokenizer *tokenizer, const char *text, size_t length, char *golden, size_t number)
{
    _cleanup_(token_list_clearp) TokenList ordinary = TOKEN_LIST_NULL, special = TOKEN_LIST_NULL;
    char *rest = NULL, *count = strtok_r(golden, " \n", &rest), *hash = strtok_r(NULL, " \n", &rest);
    char *special_count = strtok_r(NULL, " \n", &rest), *special_hash = hash, *id;
    bool good;

    assert_int_equal(tokenizer_encode(tokenizer, text, length, false, &ordinary), 0);
    assert_int_equal(tokenizer_encode(tokenizer, text, length, true, &special), 0);
    if (special_count && strcmp(special_count, "=") == 0)
        special_count = count;
    else
        special_hash = strtok_r(NULL, " \n", &rest);
    good = ids_agree("ordinary text", number, &ordinary, count, hash);
    good &= ids_agree("special tokens parsed", number, &special, special_count, special_hash);
    if (!strtok_r(NULL, " \n", &rest)) /* ":" before the ids, where the line has them */
        return good;
    for (size_t i = 0; i < ordinary.n; i++) {
        id = strtok_r(NULL, " \n", &rest);
        good &= id && strtol(id, NULL, 10) == ordinary.ids[i];
    }
    return good;
}

static void tokenizer_equals_reference_on_every_line_and_on_the_whole(void **state)
{
    const Fixture *fixture = *state;
    _cleanup_(freep) char *golden = NULL;
    size_t size = 0, n_lines = 0, n_wrong = 0, begin = 0;

    while (begin < fixture->length) {
        const char *line = fixture->text + begin;
        const char *end = memchr(line, '\n', fixture->length - begin);

        assert_non_null(end);
        assert_true(getline(&golden, &size, fixture->golden) > 0);
        n_wrong += !line_agrees(fixture->tokenizer, line, (size_t)(end - line), golden, ++n_lines);
        begin += (size_t)(end - line) + 1;
    }
    assert_true(getline(&golden, &size, fixture->golden) > 0);
    n_wrong += !line_agrees(fixture->tokenizer, fixture->text, fixture->length, golden, 0);
    print_message("%zu lines, %zu differ\n", n_lines, n_wrong);
    assert_true(n_lines >= 2000);
    assert_int_equal(n_wrong, 0);
}

/* Every byte comes back, but for bytes of valid characters and of U+FFFD stand-ins where the vocabulary has no token of the byte. */
static void tokenizer_gives_the_text_back(void **state)
{
    const Fixture *fixture = *state;
    _cleanup_(token_list_clearp) TokenList list = TOKEN_LIST_NULL;
    _cleanup_(freep) char *back = malloc(4 * fixture->length);
    size_t n = 0, n_vocab = tokenizer_n_vocab(fixture->tokenizer), kept = 0;
    bool has_byte[256] = {false};

    assert_non_null(back);
    for (size_t id = 0; id < n_vocab; id++) {
        size_t length;
        const char *bytes = tokenizer_token_bytes(fixture->tokenizer, (int32_t)id, false, &length);

        if (length == 1)
            has_byte[(uint8_t)bytes[0]] = true;
    }
    /* Only what has tokens: then the round trip is exact, invalid bytes included. */
    for (size_t i = 0; i < fixture->length; i++)
        if (has_byte[(uint8_t)fixture->text[i]])
            fixture->text[kept++] = fixture->text[i];
    assert_int_equal(tokenizer_encode(fixture->tokenizer, fixture->text, kept, false, &list), 0);
    for (size_t i = 0; i < list.n; i++) {
        size_t length;
        const char *bytes = tokenizer_token_bytes(fixture->tokenizer, list.ids[i], false, &length);

        assert_true(n + length <= kept);
        memcpy(back + n, bytes, length);
        n += length;
    }
    assert_int_equal(n, kept);
    assert_memory_equal(back, fixture->text, kept);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(tokenizer_equals_reference_on_every_line_and_on_the_whole, setup, teardown),
        cmocka_unit_test_setup_teardown(tokenizer_gives_the_text_back, setup, teardown),
    };

    return cmocka_run_group_tests_name("tokenizer-golden", tests, NULL, NULL);
}
