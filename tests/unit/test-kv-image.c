/* SPDX-License-Identifier: Apache-2.0 */
/* Images of saved caches: what is written is read, whatever is damaged is refused by name. */

#include "cache/kv-image.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
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

/* Every byte in turn, except the padding between chunks, which means nothing. */
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
        if ((at < 80 + 3 * 40) || (at >= 4096 && at < 4096 + N_PAGES)) {
            assert_true(r == KV_IMAGE_E_DAMAGED || r == KV_IMAGE_E_DIFFERENT);
            assert_true(detail.text[0]);
            n_found++;
        }
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

/* Numbers near 2^64 in the header and the table; the hash is of no help when somebody means it. */
static void hostile_numbers_are_refused(void **state)
{
    static const uint64_t numbers[] = {UINT64_MAX, UINT64_MAX - 4095, (uint64_t)1 << 63, UINT32_MAX, 0};
    static const off_t places[] = {12, 16, 80 + 16, 80 + 24, 80 + 40 + 16, 80 + 40 + 24, 80 + 80 + 24};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(numbers); i++)
        for (size_t k = 0; k < N_ELEMENTS(places); k++) {
            int fd = make_file();
            KvImage *image = NULL;

            assert_int_equal(pwrite(fd, &numbers[i], places[k] == 12 ? 4 : 8, places[k]), places[k] == 12 ? 4 : 8);
            if (places[k] != 80 + 40 + 24 || numbers[i] != 0) /* that chunk is empty */
                assert_int_equal(open_image(fd, false, &image, NULL), KV_IMAGE_E_DAMAGED);
            kv_image_free(image);
            (void)close(fd);
        }
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
        cmocka_unit_test(hostile_numbers_are_refused),
        cmocka_unit_test(what_is_no_file_is_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
