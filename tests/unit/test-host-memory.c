/* SPDX-License-Identifier: Apache-2.0 */
/* What of the machine's memory can be had, read from files like those of a kernel. */

#include "daemon/engine/host-memory.h"
#include "tests/lib/place.h"

#include <errno.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#define MIB (UINT64_C(1) << 20)

static char root[TEST_FOLDER_SIZE];

static int setup(void **state)
{
    (void)state;
    return test_folder_new(root);
}

static int teardown(void **state)
{
    (void)state;
    return test_folder_remove(root);
}

/* A file and the folders above it. */
static void put(const char *name, const char *text)
{
    char path[PATH_MAX];
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/%s", root, name);
    for (char *at = path + strlen(root) + 1; (at = strchr(at, '/')); *at++ = '/') {
        *at = 0;
        if (mkdir(path, 0700) && errno != EEXIST)
            fail_msg("%s: %s", path, strerror(errno));
    }
    file = fopen(path, "w");
    assert_non_null(file);
    (void)fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void without_a_kernels_files_nothing_is_known(void **state)
{
    (void)state;
    assert_true(host_memory_available(root) == UINT64_MAX);
    put("proc/meminfo", "MemTotal: 4096 kB\nMemAvailable: none\n");
    assert_true(host_memory_available(root) == UINT64_MAX);
}

static void what_is_available_is_what_the_kernel_says(void **state)
{
    (void)state;
    put("proc/meminfo", "MemTotal:       16000000 kB\nMemFree:         100 kB\nMemAvailable:    2048000 kB\n");
    assert_int_equal(host_memory_available(root), 2000 * MIB);
    put("proc/self/cgroup", "12:memory:/old\n"); /* version 1 has no such files */
    assert_int_equal(host_memory_available(root), 2000 * MIB);
}

static void a_control_group_allows_less(void **state)
{
    (void)state;
    put("proc/meminfo", "MemAvailable:    2048000 kB\n");
    put("proc/self/cgroup", "0::/system.slice/leatd.service\n");
    put("sys/fs/cgroup/system.slice/leatd.service/memory.max", "max\n");
    put("sys/fs/cgroup/system.slice/leatd.service/memory.high", "max\n");
    put("sys/fs/cgroup/system.slice/leatd.service/memory.current", "104857600\n");
    assert_int_equal(host_memory_available(root), 2000 * MIB);
    put("sys/fs/cgroup/system.slice/leatd.service/memory.max", "1073741824\n");
    assert_int_equal(host_memory_available(root), 924 * MIB);
    put("sys/fs/cgroup/system.slice/leatd.service/memory.high", "536870912\n");
    assert_int_equal(host_memory_available(root), 412 * MIB);
    put("sys/fs/cgroup/system.slice/memory.max", "209715200\n"); /* the one above it */
    put("sys/fs/cgroup/system.slice/memory.current", "157286400\n");
    assert_int_equal(host_memory_available(root), 50 * MIB);
    put("sys/fs/cgroup/system.slice/memory.current", "209715201\n");
    assert_int_equal(host_memory_available(root), 0);
}

static void a_container_sees_its_limit_at_the_root(void **state)
{
    (void)state;
    put("proc/meminfo", "MemAvailable:    2048000 kB\n");
    put("proc/self/cgroup", "0::/\n");
    put("sys/fs/cgroup/memory.max", "536870912\n");
    put("sys/fs/cgroup/memory.current", "12582912\n");
    assert_int_equal(host_memory_available(root), 500 * MIB);
}

static void this_machine_has_some(void **state)
{
    (void)state;
    print_message("%llu MiB\n", (unsigned long long)(host_memory_available("") / MIB));
    assert_true(host_memory_available("") > MIB && host_memory_available("") != UINT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(without_a_kernels_files_nothing_is_known, setup, teardown),
        cmocka_unit_test_setup_teardown(what_is_available_is_what_the_kernel_says, setup, teardown),
        cmocka_unit_test_setup_teardown(a_control_group_allows_less, setup, teardown),
        cmocka_unit_test_setup_teardown(a_container_sees_its_limit_at_the_root, setup, teardown),
        cmocka_unit_test(this_machine_has_some),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
