/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are there whole or not at all. */

#include "quant/base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <cmocka.h>

static char folder[64], path[96];

static int setup(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/leat-test-file-XXXXXX");
    assert_non_null(mkdtemp(folder));
    (void)snprintf(path, sizeof(path), "%s/file", folder);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    (void)unlink(path);
    return rmdir(folder); /* nothing else was left in it */
}

static int write_text(void *userdata, int fd)
{
    return file_write(fd, userdata, strlen(userdata));
}

static int write_some_and_fail(void *userdata, int fd)
{
    (void)write_text(userdata, fd);
    return -ENOSPC;
}

static void assert_holds(const char *text)
{
    _cleanup_(close_fdp) int fd = open(path, O_RDONLY | O_CLOEXEC);
    char bytes[64] = "", more;

    assert_true(fd >= 0);
    assert_int_equal(file_read(fd, bytes, strlen(text)), 0);
    assert_string_equal(bytes, text);
    assert_int_equal(file_read(fd, &more, 1), -EBADMSG);
}

static size_t n_entries(void)
{
    DIR *dir = opendir(folder);
    size_t n = 0;

    assert_non_null(dir);
    while (readdir(dir))
        n++;
    (void)closedir(dir);
    return n - 2;
}

static void a_file_is_replaced_and_nobody_else_may_read_it(void **state)
{
    struct stat status;

    (void)state;
    assert_int_equal(file_replace(path, write_text, (char[]){"first"}), 0);
    assert_holds("first");
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    assert_int_equal(file_replace(path, write_text, (char[]){"the second"}), 0);
    assert_holds("the second");
    assert_int_equal(n_entries(), 1);
}

static void what_fails_leaves_the_old_one_and_nothing_beside_it(void **state)
{
    char beyond[160];

    (void)state;
    assert_int_equal(file_replace(path, write_text, (char[]){"kept"}), 0);
    assert_int_equal(file_replace(path, write_some_and_fail, (char[]){"half"}), -ENOSPC);
    assert_holds("kept");
    assert_int_equal(n_entries(), 1);
    (void)snprintf(beyond, sizeof(beyond), "%s/none/file", folder);
    assert_int_equal(file_replace(beyond, write_text, (char[]){"x"}), -ENOENT);
    assert_int_equal(file_replace(folder, write_text, (char[]){"x"}), -EISDIR); /* its temporary lies beside the folder */
    assert_int_equal(n_entries(), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_is_replaced_and_nobody_else_may_read_it),
        cmocka_unit_test(what_fails_leaves_the_old_one_and_nothing_beside_it),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
