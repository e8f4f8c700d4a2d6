#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Values from text, for YAML, for D-Bus options and for the command line alike.  Each returns 0, or -EINVAL with a sentence in the
 * detail that says what was expected.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* "true" or "false"; the YAML 1.1 words yes, no, on, off are refused by name. */
int config_value_bool(const char *text, bool *ret, ErrorDetail *reterr);
/* Decimal digits only: no sign, no leading zero, no octal. */
int config_value_u64(const char *text, uint64_t min, uint64_t max, uint64_t *ret, ErrorDetail *reterr);
int config_value_double(const char *text, double min, double max, double *ret, ErrorDetail *reterr);
/* "1048576", "512MiB", "2GiB", "64KiB" (also KB, MB, GB, powers of 1000). */
int config_value_bytes(const char *text, uint64_t *ret, ErrorDetail *reterr);
/* "90", "90s", "5min", "2h", "never" (UINT64_MAX); microseconds. */
int config_value_duration(const char *text, uint64_t *ret_usec, ErrorDetail *reterr);
/* The index of @text among @words; the detail lists them. */
int config_value_word(const char *text, const char *const *words, size_t n_words, size_t *ret, ErrorDetail *reterr);
