/* SPDX-License-Identifier: Apache-2.0 */
/* Images of saved caches: what is written is read, whatever is damaged is refused by name. */

#include "cache/kv-image.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>
#include <cmocka.h>

#define N_PAGES 30000

static uint8_t pages[N_PAGES], extra[77];

static const KvImageFacts facts = {.model = {1, 2, 3}, .layout = 0x1234567890abcdef, .n_tokens = 321};

/* Three chunks, one in scattered pieces, one empty. */
static int make_file(void)
{
    _cleanup_(kv_image_freep) KvImage *image = kv_image_new(&facts);
    int fd = memfd_create("image", MFD_CLOEXEC);

    assert_non_null(image);
    for (size_t i = 0; i < N_PAGES; i++)
        pages[i] = (uint8_t)(i * 31 >> 3);
    memset(extra, 7, sizeof(extra));
    assert_int_equal(kv_image_chunk(image, 1, 0, 4), 0);
    for (size_t i = 0; i < N_PAGES; i += 1000)
        assert_int_equal(kv_image_piece(image, pages + (N_PAGES - 1000 - i), 1000), 0);
    assert_int_equal(kv_image_chunk(image, 2, 0, 0), 0);
    assert_int_equal(kv_image_chunk(image, 3, 9, 9), 0);
    assert_int_equal(kv_image_piece(image, extra, 40), 0);
    assert_int_equal(kv_image_piece(image, extra + 40, 37), 0);
    assert_int_equal(image->chunks[2].n_pieces, 1); /* neighbours join */
    assert_int_equal(kv_image_write(image, fd), 0);
    assert_int_equal(lseek(fd, 0, SEEK_CUR), kv_image_bytes(image));
    return fd;
}

static int open_image(int fd, bool map, KvImage **ret, ErrorDetail *detail)
{
    return kv_image_open(fd, "file", &facts, map, ret, detail);
}

static void what_is_written_is_read_in_memory_and_mapped(void **state)
{
    int fd = make_file();

    (void)state;
    for (int map = 0; map < 2; map++) {
        _cleanup_(kv_image_freep) KvImage *image = NULL;
        ErrorDetail detail = ERROR_DETAIL_NULL;
        const KvImageChunk *chunk;

        assert_int_equal(open_image(fd, map, &image, &detail), 0);
        assert_int_equal(image->facts.n_tokens, 321);
        chunk = kv_image_find(image, 1, 0, 4);
        assert_int_equal(chunk->bytes, N_PAGES);
        for (size_t i = 0; i < N_PAGES; i += 1000)
            assert_memory_equal((const uint8_t *)chunk->data + i, pages + (N_PAGES - 1000 - i), 1000);
        assert_int_equal(kv_image_find(image, 2, 0, 0)->bytes, 0);
        assert_memory_equal(kv_image_find(image, 3, 9, 9)->data, extra, sizeof(extra));
        assert_null(kv_image_find(image, 3, 9, 8));
    }
    (void)close(fd);
}

/* Padding between the chunks, too. */
static void a_changed_byte_anywhere_is_found(void **state)
{
    int fd = make_file();
    off_t bytes = lseek(fd, 0, SEEK_END);
    uint32_t n_found = 0;

    (void)state;
    for (off_t at = 0; at < bytes; at += at < 256 ? 1 : 97) {
        _cleanup_(kv_image_freep) KvImage *image = NULL;
        ErrorDetail detail = ERROR_DETAIL_NULL;
        uint8_t byte, changed;
        int r;

        assert_int_equal(pread(fd, &byte, 1, at), 1);
        changed = byte ^ 0x40;
        assert_int_equal(pwrite(fd, &changed, 1, at), 1);
        r = open_image(fd, false, &image, &detail);
        assert_true(r == KV_IMAGE_E_DAMAGED || r == KV_IMAGE_E_DIFFERENT);
        assert_true(detail.text[0]);
        n_found++;
        assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    }
    print_message("%u damaged places found\n", n_found);
    (void)close(fd);
}

static void a_file_cut_anywhere_or_longer_is_refused(void **state)
{
    int fd = make_file();
    off_t bytes = lseek(fd, 0, SEEK_END);

    (void)state;
    for (off_t length = bytes - 1; length >= 0; length -= MAX(1, length / 23)) {
        KvImage *image = NULL;
        ErrorDetail detail = ERROR_DETAIL_NULL;

        assert_int_equal(ftruncate(fd, length), 0);
        assert_int_equal(open_image(fd, false, &image, &detail), KV_IMAGE_E_DAMAGED);
        assert_true(detail.text[0]);
        assert_null(image);
    }
    (void)close(fd);
    fd = make_file();
    assert_int_equal(ftruncate(fd, bytes + 1), 0);
    {
        KvImage *image = NULL;

        assert_int_equal(open_image(fd, false, &image, NULL), KV_IMAGE_E_DAMAGED);
    }
    (void)close(fd);
}

static void another_model_layout_or_version_is_refused_with_the_reason(void **state)
{
    int fd = make_file();
    KvImageFacts other = facts;
    KvImage *image = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    uint32_t version = 2;

    (void)state;
    other.model[31] = 1;
    assert_int_equal(kv_image_open(fd, "f", &other, false, &image, &detail), KV_IMAGE_E_DIFFERENT);
    assert_non_null(strstr(detail.text, "another model"));
    other = facts;
    other.layout++;
    assert_int_equal(kv_image_open(fd, "f", &other, false, &image, &detail), KV_IMAGE_E_DIFFERENT);
    assert_non_null(strstr(detail.text, "another form"));
    assert_int_equal(pwrite(fd, &version, 4, 8), 4);
    assert_int_equal(kv_image_open(fd, "f", &facts, false, &image, &detail), KV_IMAGE_E_DIFFERENT);
    assert_non_null(strstr(detail.text, "version 2"));
    (void)close(fd);
}

/* The file's header and table under a hash that agrees, as somebody would write it who means it (kv-image.c). */
static void hash_again(int fd)
{
    uint8_t header[80], table[3 * 40];
    uint64_t file_bytes, hash = 0;

    assert_int_equal(pread(fd, header, sizeof(header), 0), sizeof(header));
    assert_int_equal(pread(fd, table, sizeof(table), 80), sizeof(table));
    memcpy(&file_bytes, header + 16, 8);
    memcpy(header + 24, &hash, 8);
    hash = XXH3_64bits(header, sizeof(header)) ^ XXH3_64bits_withSeed(table, sizeof(table), file_bytes);
    assert_int_equal(pwrite(fd, &hash, 8, 24), 8);
}

static void an_agreeing_hash_is_that_of_the_writer(void **state)
{
    int fd = make_file();
    KvImage *image = NULL;

    (void)state;
    hash_again(fd);
    assert_int_equal(open_image(fd, false, &image, NULL), 0);
    kv_image_free(image);
    (void)close(fd);
}

/* Numbers near 2^64 and others that are none in the header and the table, with a hash that agrees: offset and length of each chunk, the
 * file's length, the number of chunks, alone and two at a time so that their sum wraps around. */
static void hostile_numbers_are_refused(void **state)
{
    static const uint64_t numbers[] = {UINT64_MAX, UINT64_MAX - 4095, UINT64_MAX - 4096, (uint64_t)1 << 63, ((uint64_t)1 << 63) + 4096, UINT32_MAX,
                                       (uint64_t)UINT32_MAX + 1, 4096, 1, 0};
    static const off_t places[] = {16, 80 + 16, 80 + 24, 80 + 40 + 16, 80 + 40 + 24, 80 + 80 + 16, 80 + 80 + 24};
    int fd = make_file();
    uint32_t n = 0;

    (void)state;
    for (size_t k = 0; k < N_ELEMENTS(places); k++)
        for (size_t k2 = k; k2 < N_ELEMENTS(places); k2++)
            for (size_t i = 0; i < N_ELEMENTS(numbers); i++)
                for (size_t i2 = 0; i2 < (k2 == k ? 1 : N_ELEMENTS(numbers)); i2++) {
                    uint64_t kept[2];
                    KvImage *image = NULL;
                    ErrorDetail detail = ERROR_DETAIL_NULL;

                    assert_int_equal(pread(fd, &kept[0], 8, places[k]), 8);
                    assert_int_equal(pread(fd, &kept[1], 8, places[k2]), 8);
                    assert_int_equal(pwrite(fd, &numbers[i], 8, places[k]), 8);
                    if (k2 != k)
                        assert_int_equal(pwrite(fd, &numbers[i2], 8, places[k2]), 8);
                    hash_again(fd);
                    if (numbers[i] != kept[0] || (k2 != k && numbers[i2] != kept[1])) {
                        assert_int_equal(open_image(fd, n % 2, &image, &detail), KV_IMAGE_E_DAMAGED);
                        assert_null(image);
                        assert_true(detail.text[0]);
                        n++;
                    }
                    assert_int_equal(pwrite(fd, &kept[1], 8, places[k2]), 8);
                    assert_int_equal(pwrite(fd, &kept[0], 8, places[k]), 8);
                }
    print_message("%u files refused\n", n);
    for (uint32_t chunks = 0; chunks < 40; chunks++) {
        uint32_t many = chunks < 3 ? chunks : UINT32_MAX >> (chunks - 3) / 2;
        KvImage *image = NULL;

        if (many == 3)
            continue;
        assert_int_equal(pwrite(fd, &many, 4, 12), 4);
        hash_again(fd);
        assert_int_equal(open_image(fd, false, &image, NULL), KV_IMAGE_E_DAMAGED);
    }
    (void)close(fd);
}

/* Nothing is read of it, so no memory is taken: 2^42 bytes of zeros after a header that is right. */
static void a_file_larger_than_may_be_is_not_read(void **state)
{
    int fd = make_file();
    uint64_t bytes = (uint64_t)1 << 42;
    KvImageFacts limited = facts;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvImage *image = NULL;
    _cleanup_(close_fdp) int sparse = -1;
    uint8_t head[4096];
    char path[] = "/tmp/leat-test-sparse-XXXXXX";

    (void)state;
    sparse = mkstemp(path);
    assert_true(sparse >= 0);
    (void)unlink(path);
    assert_int_equal(pread(fd, head, sizeof(head), 0), sizeof(head));
    memcpy(head + 16, &bytes, 8);
    assert_int_equal(write(sparse, head, sizeof(head)), sizeof(head));
    if (ftruncate(sparse, (off_t)bytes) == 0) { /* where files can be so large */
        hash_again(sparse);
        limited.max_bytes = (uint64_t)1 << 30;
        assert_int_equal(kv_image_open(sparse, "f", &limited, false, &image, &detail), KV_IMAGE_E_DAMAGED);
        assert_non_null(strstr(detail.text, "more than the 1073741824 that may be read"));
    }
    limited.max_bytes = 4096;
    assert_int_equal(kv_image_open(fd, "f", &limited, true, &image, &detail), KV_IMAGE_E_DAMAGED);
    (void)close(fd);
}

static void what_is_no_file_is_refused(void **state)
{
    int ends[2];
    KvImage *image = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;

    (void)state;
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(open_image(ends[0], false, &image, &detail), KV_IMAGE_E_DAMAGED);
    assert_non_null(strstr(detail.text, "not an ordinary file"));
    (void)close(ends[0]);
    (void)close(ends[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_is_read_in_memory_and_mapped),
        cmocka_unit_test(a_changed_byte_anywhere_is_found),
        cmocka_unit_test(a_file_cut_anywhere_or_longer_is_refused),
        cmocka_unit_test(another_model_layout_or_version_is_refused_with_the_reason),
        cmocka_unit_test(an_agreeing_hash_is_that_of_the_writer),
        cmocka_unit_test(hostile_numbers_are_refused),
        cmocka_unit_test(a_file_larger_than_may_be_is_not_read),
        cmocka_unit_test(what_is_no_file_is_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
