#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a random program on the real cache, on a device, beside the reference that keeps everything.  After each pass every output of
 * every layer is compared with the reference within a tolerance, and with every earlier run of the same tokens under the same form and
 * layers bit for bit: whatever the policy, the chunks and the history were.
 */

#include "tests/lib/random-reference.h"

#define RANDOM_CONV_BYTES      100 /* of a state; no multiple of anything */
#define RANDOM_RECURRENT_BYTES 192
#define RANDOM_MAX_STEPS       40 /* states that a pass may keep between its tokens */

/* A store of these layers under this policy; -ENOTSUP when the cache refuses such layers. */
int random_store_new(Gpu *gpu, const RandomConfig *config, const Reference *reference, KvStore **ret, ErrorDetail *reterr);

typedef struct RandomWorld RandomWorld;

typedef struct RandomFailure {
    uint32_t op;   /* the operation, n_ops for the end */
    const char *kind; /* the text before numbers came into it: the same for failures of one kind */
    char text[400];
} RandomFailure;

typedef struct RandomCounts {
    uint64_t programs, unsupported, operations, passes, rows, refused, reruns, undone, not_undone, migrations, restored, states, bits_compared;
    double worst_exact, worst_fast; /* distance from the reference, of the head's largest output */
} RandomCounts;

#define RANDOM_TOLERANCE_EXACT 2e-5
#define RANDOM_TOLERANCE_FAST  1e-2

RandomWorld *random_world_new(Gpu *gpu);
RandomWorld *random_world_free(RandomWorld *world);
DEFINE_CLEANUP(RandomWorld, random_world_free)

/* From now on one token of the next pass of a sequence that was cropped after it was forked has another key: a defect for a test of the
 * test, which must find it from the outputs. */
void random_world_seed_defect(RandomWorld *world, bool on);
/* False when something was not as it must be. */
bool random_world_run(RandomWorld *world, const RandomProgram *program, RandomFailure *ret);
const RandomCounts *random_world_counts(const RandomWorld *world);
/* Outputs of earlier runs are forgotten. */
void random_world_forget(RandomWorld *world);
