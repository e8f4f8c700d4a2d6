/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Linked into every test program: it runs only the cases that CMOCKA_TEST_FILTER names ("make test T=… F='*odd*'").  CMocka itself asks for a
 * call, and a program that forgets it would run everything.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>

__attribute__((constructor)) static void set_filter(void)
{
    cmocka_set_test_filter(getenv("CMOCKA_TEST_FILTER"));
}
