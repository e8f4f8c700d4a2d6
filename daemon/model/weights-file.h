#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The image of a model's weights as a file, mapped: STATE_DIR/packed/DIGEST.
 *
 * Kernels read a layout of their own (quant/weight.h), so weights cannot stream from the model's file as it is.  Repacking on the way
 * would cost each step what loading costs once (a core repacks 1 to 2 GB a second; a step reads all of it).  A copy in anonymous memory
 * is what the system cannot take back without swap, and is made again at each start.  The mapped file is made once; a later start only
 * checks its sums, blocks that are on the device leave the host's memory, and of those that stream the kernel drops what it needs room
 * for and reads it again.  It costs the model's size on the disk: when less than a twentieth of the file system would be left, the files
 * that were used longest ago go first, and without success the image stays in anonymous memory.  Files unused for 30 days go too.
 *
 * Keyed by the digest of the model's file; a fingerprint of the layout, taken from packed samples, tells files of another version.
 * Written under a temporary name, synced, renamed.  Each block has a sum, which is compared when the file is opened: whatever does not
 * check out counts as absent and is made anew.
 */

#include "daemon/model/digest.h"
#include "daemon/model/weights.h"

/* Maps the image of a planned model.  0, or -ENOENT when there is none that is whole and of this model and layout. */
int weights_file_open(const char *state_dir, const uint8_t digest[static DIGEST_BYTES], const ModelParams *params, Weights *weights);
/* Makes the file, and maps it.  0, or negative errno: then nothing has changed. */
int weights_file_make(const char *state_dir, const uint8_t digest[static DIGEST_BYTES], const ModelParams *params, Weights *weights);
