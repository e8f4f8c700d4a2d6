#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What generate(num_beams=...) of Transformers found (make-tiny-beams.py, make-oracle.py --beams), and the comparison of an engine with it. */

#include "tests/lib/engine-talk.h"

/* Runs every case of @fixture (a file of the data folder), those without a model of their own on @model; ids and stop reasons must be equal.
 * Returns the largest difference of a score; *ret_n: cases. */
double beam_oracle_compare(Talk *talk, const char *fixture, const char *model, size_t *ret_n);
/* Ids, no template, @beams beams that all want to be known by their ids. */
EngineRequest beam_ids_request(const char *model, const int32_t *ids, size_t n, uint32_t max_tokens, uint32_t beams, uint32_t n_return);
/* The job's end, which must be a good one; nothing was told before it. */
Seen *beam_run(Talk *talk, const EngineRequest *request);
