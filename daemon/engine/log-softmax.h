#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Logits to log-probabilities. */

#include <stdint.h>

/* @logits: (n), finite, changed in place: minus the largest, minus the logarithm of the sum of exponentials, each rounded to float32. */
void log_softmax(float *logits, uint32_t n);
