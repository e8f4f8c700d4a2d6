#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Where a test finds the real model, and a folder of its own. */

#define TEST_FOLDER_SIZE 64

/* LEAT_TEST_MODEL: the GGUF file of SmolLM2-135M-Instruct (Q4_1).  NULL when it is not set; how to set it is printed. */
const char *test_model_path(void);
/* A new folder below /tmp; 0 or -1 with errno. */
int test_folder_new(char ret[TEST_FOLDER_SIZE]);
/* The folder and all in it; 0 or -1 with errno. */
int test_folder_remove(const char *folder);
