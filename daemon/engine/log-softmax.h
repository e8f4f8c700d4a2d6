#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Logits to log-probabilities. */

#include <stdbool.h>
#include <stdint.h>

/* @logits: (n), changed in place: minus the largest, minus the logarithm of the sum of exponentials, each rounded to float32.  False, and
 * nothing is changed, when one is no number or infinite. */
bool log_softmax(float *logits, uint32_t n);

/* The first of [@first, @n) whose log-probability plus @offset, in float32, is at least @least, or @n. */
uint32_t log_softmax_next(const float *log_probs, uint32_t first, uint32_t n, float offset, float least);
