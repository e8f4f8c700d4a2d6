/* SPDX-License-Identifier: Apache-2.0 */
/* The real daemon with a real model on a private bus.  LEAT_TEST_MODEL names the GGUF file. */

#include "tests/bus/cases.h"
#include "tests/bus/harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {SHARED_CASES};

    if (case_client(argc, argv) >= 0)
        return 0;
    cmocka_set_test_filter(getenv("CMOCKA_TEST_FILTER"));
    return cmocka_run_group_tests_name("bus-daemon", tests, harness_setup_real, harness_teardown);
}
