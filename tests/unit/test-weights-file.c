/* SPDX-License-Identifier: Apache-2.0 */
/* The file of packed weights: made once, believed only when whole, made again when not. */

#include "daemon/model/model-private.h"
#include "tests/lib/oracle.h"
#include "tests/lib/place.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <utime.h>

#include <cmocka.h>

typedef struct Fixture {
    char state[TEST_FOLDER_SIZE], path[4096], packed[256];
} Fixture;

static ModelFile *open_model(const Fixture *fixture)
{
    ModelFile *file = NULL;

    assert_int_equal(model_file_open(fixture->path, fixture->state, &file, NULL), 0);
    return file;
}

static int setup(void **state)
{
    Fixture *fixture = calloc(1, sizeof(*fixture));
    _cleanup_(model_file_freep) ModelFile *file = NULL;

    if (!fixture)
        return -1;
    if (test_folder_new(fixture->state))
        return -1;
    (void)snprintf(fixture->path, sizeof(fixture->path), "%s/tiny-llama-mixed.gguf", test_data_folder());
    file = open_model(fixture);
    (void)snprintf(fixture->packed, sizeof(fixture->packed), "%s/packed/%s", fixture->state, model_file_digest(file));
    *state = fixture;
    return 0;
}

static int teardown(void **state)
{
    Fixture *fixture = *state;

    if (fixture)
        (void)test_folder_remove(fixture->state);
    free(fixture);
    return 0;
}

static struct stat stat_of(const char *path)
{
    struct stat st;

    assert_int_equal(stat(path, &st), 0);
    return st;
}

/* The image is what packing into memory gives. */
static void check_image(const Fixture *fixture, const ModelFile *file)
{
    _cleanup_(model_file_freep) ModelFile *plain = NULL;

    assert_int_equal(model_file_open(fixture->path, NULL, &plain, NULL), 0);
    assert_false(plain->weights.mapped);
    assert_int_equal(file->weights.image_bytes, plain->weights.image_bytes);
    assert_memory_equal(file->weights.image, plain->weights.image, plain->weights.image_bytes);
}

static void the_first_load_makes_it_and_later_ones_map_it(void **state)
{
    const Fixture *fixture = *state;
    struct stat made = stat_of(fixture->packed), later;

    assert_int_equal(made.st_mode & 0777, 0600);
    for (int run = 0; run < 2; run++) {
        _cleanup_(model_file_freep) ModelFile *file = open_model(fixture);

        assert_true(file->weights.mapped);
        check_image(fixture, file);
        /* Blocks that are given back come back from the file. */
        for (uint32_t i = 0; i < file->weights.n_blocks; i++)
            weights_release_block(&file->weights, i);
        check_image(fixture, file);
        later = stat_of(fixture->packed);
        assert_int_equal(later.st_ino, made.st_ino);
    }
}

static void damage(const char *path, off_t at, const void *bytes, size_t n)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, bytes, n, at), (ssize_t)n);
    (void)close(fd);
}

static void a_file_that_is_not_whole_is_made_again(void **state)
{
    const Fixture *fixture = *state;
    struct stat st = stat_of(fixture->packed);
    /* magic, version, blocks, size, fingerprint, digest, sum of sums, a sum, first and last byte of the image, one in the middle */
    const off_t places[] = {0, 8, 12, 16, 24, 40, 64, 72, 65536, st.st_size - 65536, 65536 + (st.st_size - 65536) / 2};

    for (size_t i = 0; i < N_ELEMENTS(places) + 2; i++) {
        ino_t before = stat_of(fixture->packed).st_ino;
        _cleanup_(model_file_freep) ModelFile *file = NULL;
        uint8_t byte = 0;
        int fd;

        if (i < N_ELEMENTS(places)) {
            fd = open(fixture->packed, O_RDONLY | O_CLOEXEC);
            assert_int_equal(pread(fd, &byte, 1, places[i]), 1);
            (void)close(fd);
            byte ^= 0x10;
            damage(fixture->packed, places[i], &byte, 1);
        } else if (i == N_ELEMENTS(places)) {
            assert_int_equal(truncate(fixture->packed, st.st_size - 1), 0);
        } else {
            assert_int_equal(truncate(fixture->packed, 0), 0);
        }
        file = open_model(fixture);
        assert_true(file->weights.mapped);
        check_image(fixture, file);
        assert_int_not_equal(stat_of(fixture->packed).st_ino, before);
    }
}

static void without_a_place_to_write_the_image_stays_in_memory(void **state)
{
    Fixture *fixture = *state;
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    char folder[128];

    assert_int_equal(unlink(fixture->packed), 0);
    (void)snprintf(folder, sizeof(folder), "%s/packed", fixture->state);
    assert_int_equal(rmdir(folder), 0);
    assert_true(close(open(folder, O_WRONLY | O_CREAT | O_CLOEXEC, 0600)) == 0); /* a file where the folder should be */
    file = open_model(fixture);
    assert_false(file->weights.mapped);
    check_image(fixture, file);
}

static void what_nobody_used_for_long_is_removed_when_another_is_made(void **state)
{
    const Fixture *fixture = *state;
    const struct utimbuf old = {.actime = time(NULL) - 40 * 24 * 3600, .modtime = time(NULL) - 40 * 24 * 3600};
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    char stale[256], fresh[256];

    (void)snprintf(stale, sizeof(stale), "%s/packed/stale", fixture->state);
    (void)snprintf(fresh, sizeof(fresh), "%s/packed/fresh", fixture->state);
    assert_true(close(open(stale, O_WRONLY | O_CREAT | O_CLOEXEC, 0600)) == 0);
    assert_true(close(open(fresh, O_WRONLY | O_CREAT | O_CLOEXEC, 0600)) == 0);
    assert_int_equal(utime(stale, &old), 0);
    assert_int_equal(unlink(fixture->packed), 0);
    file = open_model(fixture);
    assert_true(file->weights.mapped);
    assert_int_equal(access(stale, F_OK), -1);
    assert_int_equal(access(fresh, F_OK), 0);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_first_load_makes_it_and_later_ones_map_it, setup, teardown),
        cmocka_unit_test_setup_teardown(a_file_that_is_not_whole_is_made_again, setup, teardown),
        cmocka_unit_test_setup_teardown(without_a_place_to_write_the_image_stays_in_memory, setup, teardown),
        cmocka_unit_test_setup_teardown(what_nobody_used_for_long_is_removed_when_another_is_made, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
