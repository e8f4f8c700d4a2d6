#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Between the files of a batch. */

#include "daemon/engine/batch.h"

/* Ends what only a live prompt has (batch.c). */
void batch_clear_prompt(const Batch *batch, BatchPrompt *prompt);
/* For BeamOptions.stops, with the batch as userdata: whether a stop string ends within the text of @token after running beam @beam of the
 * prompt that is judged.  The prompt's own text takes no part. */
bool batch_stops(void *userdata, uint32_t beam, int32_t token);
/* Makes the results of a prompt whose sequences have all ended, or whose search is over, and clears it. */
int batch_close_prompt(Batch *batch, BatchPrompt *prompt);
