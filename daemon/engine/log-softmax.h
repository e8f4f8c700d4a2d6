#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Logits to log-probabilities. */

#include <stdbool.h>
#include <stdint.h>

/* @logits: (n), changed in place: minus the largest, minus the logarithm of the sum of exponentials, each rounded to float32.  False, and
 * nothing is changed, when one is no number or infinite. */
bool log_softmax(float *logits, uint32_t n);
