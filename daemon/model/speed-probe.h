#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The measurement behind speed.h, and how it is kept. */

#include "daemon/model/speed.h"
#include "daemon/model/state-file.h"

#define SPEED_PROBE_ROWS      256 /* of the chunk that is timed, at most */
#define SPEED_PROBE_MIN_BYTES (UINT64_C(1) << 16)
#define SPEED_KEY_BYTES       600

/* One in STATE_DIR/speeds, named by a hash of its key. */
typedef struct SpeedFile {
    char key[SPEED_KEY_BYTES];
    ModelSpeed speed;
    int64_t checked;    /* seconds since the epoch: when it was measured, or found to hold */
    uint64_t run_bytes; /* what it was measured with */
    double token_sec;
} SpeedFile;
extern const StateKind SPEED_KIND;

static inline uint32_t speed_probe_rows(const ModelFit *fit)
{
    return MIN(fit->options.max_rows, (uint32_t)SPEED_PROBE_ROWS);
}

/* Pages where kernels read them: in host memory, or on the device, where copies of them would be (what copies cost is measured apart). */
static inline KvHome speed_probe_home(const ModelFit *fit)
{
    return fit->policy.home == KV_HOME_HOST && fit->plan.kv.n_slots == 0 ? KV_HOME_HOST : KV_HOME_DEVICE;
}

/* Whether tiles of the cache are copied. */
static inline bool speed_probe_tiles(const ModelFit *fit)
{
    return fit->policy.home == KV_HOME_HOST && fit->plan.kv.n_slots > 0;
}

/* Facts of a model as @fit plans it, with bits that are chosen; @bytes: of weights on the device at once.  @ret_token_sec: what
 * speed_probe_again() finds as long as the machine is as fast.  MODEL_E_DEVICE_MEMORY when the bytes are too few to say anything. */
int speed_probe(Gpu *gpu, const ModelFile *file, const ModelFit *fit, uint64_t bytes, ModelSpeed *ret, double *ret_token_sec,
                ErrorDetail *reterr);
/* A token of what was run then, with the same @bytes. */
int speed_probe_again(Gpu *gpu, const ModelFile *file, const ModelFit *fit, uint64_t bytes, double *ret_token_sec, ErrorDetail *reterr);
