#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of bench programs, KEY=VALUE; what is wrong with one ends the program. */

#include "quant/base/error.h"

#include <stdint.h>

/* One key: a number or a text. */
typedef struct BenchKey {
    const char *key;
    uint32_t *number;
    const char **text;
} BenchKey;

/* Ends the program when @r is not 0, with @what and @detail (or NULL). */
void bench_must(int r, const char *what, const ErrorDetail *detail);
/* Cuts "KEY=VALUE" in two; the value. */
char *bench_cut(char *argument);
/* Gives the key of "KEY=VALUE" its value; one of @keys it must be. */
void bench_set(const BenchKey *keys, size_t n_keys, char *argument);
