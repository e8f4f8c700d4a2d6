/* SPDX-License-Identifier: Apache-2.0 */
/* Where a test finds the real model, and a folder of its own. */

#include "tests/lib/place.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *test_model_path(void)
{
    const char *path = getenv("LEAT_TEST_MODEL");

    if (path && path[0])
        return path;
    (void)fprintf(stderr, "LEAT_TEST_MODEL is not set: it must name the GGUF file of SmolLM2-135M-Instruct (Q4_1); "
                          "packaging/scripts/fetch-model gets it and prints its path\n");
    return NULL;
}

int test_folder_new(char ret[TEST_FOLDER_SIZE])
{
    strcpy(ret, "/tmp/leat-test-XXXXXX");
    return mkdtemp(ret) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st, (void)kind, (void)where;
    return remove(path);
}

int test_folder_remove(const char *folder)
{
    return nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}
