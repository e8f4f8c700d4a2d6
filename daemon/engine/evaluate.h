#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Teacher-forced logits: every row of a given sequence, written as an .npy file (version 1.0, little-endian float32 [n, vocab]) chunk by
 * chunk, so that memory does not grow with the sequence.
 */

#include "daemon/engine/engine.h"

/* Rows of logits in memory at once. */
#define EVALUATE_ROWS 64

typedef struct Evaluation Evaluation;

/* Writes the header.  @fd must be a regular file (a pipe could block the engine); borrowed. */
int evaluation_new(int fd, uint64_t n_rows, uint32_t n_vocab, Evaluation **ret, ErrorDetail *reterr);
Evaluation *evaluation_free(Evaluation *evaluation);
DEFINE_CLEANUP(Evaluation, evaluation_free)
/* (EVALUATE_ROWS, n_vocab), for the rows of one pass. */
float *evaluation_logits(Evaluation *evaluation);
/* They are rows @first to @first + @n_rows: writes those that are not in the file yet.  A job that lost its cache runs its first rows again. */
int evaluation_write(Evaluation *evaluation, uint64_t first, uint32_t n_rows, ErrorDetail *reterr);
