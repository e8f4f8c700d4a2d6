#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast a model will be, from what was measured on this device.
 *
 * The probe runs the real forward pass over a model of the same shape and weight types with weights of zero: as many layers as fit into some
 * bytes (when these are not all, a few and many, so that what a layer costs and what does not grow with the layers come apart), one row and a
 * chunk of rows, after nothing and after pasts of different lengths.  Pasts lie where kernels read them, weights that the plan has read in
 * place are so read.  What the plan streams, tiles of the cache, parts of the weights or both, streams in the same way meanwhile.  What the
 * past costs the kernels is then their own time, as the device says; what the passes took beyond says what copies and kernels lose beside each
 * other.  What streams is predicted by the schedule that the rings make (speed-schedule.h), with these losses.
 * Four to seven seconds on devices that we know.
 *
 * Facts are kept in STATE_DIR/speeds by device, driver, shape, types, compute, form of the cache, where kernels read it, which weights are
 * read in place, what streams and how, and rows of a pass; another driver measures anew.  They are of the machine as it was: when they are
 * older than a minute a token is timed again, a third of a second, and when that has moved by more than 15 % everything is.
 */

#include "daemon/model/model.h"

#define MODEL_SPEED_PASTS 5

/* What a token costs after a past, beyond the first one. */
typedef struct ModelPast {
    double tokens;
    double layer_sec;
} ModelPast;

/* What copies and kernels make of each other (on a CPU device one takes the other's time, and memory is one) after a past. */
typedef struct ModelLink {
    double tokens;
    double share;  /* of their rates that copies have beside kernels which they outlast */
    double beside; /* how fast kernels run while a copy is under way, 1: as alone */
} ModelLink;
#define MODEL_SPEED_CHUNK_LINKS 2

typedef struct ModelSpeed {
    double head_sec;              /* of a token: what does not grow with the layers */
    double layer_sec;             /* of a token and layer after pasts[0].tokens or fewer */
    uint64_t n_pasts;             /* measured; at least one */
    ModelPast pasts[MODEL_SPEED_PASTS]; /* ascending, the first costs nothing; between two in proportion, beyond the last as before it */
    double chunk_rows;            /* rows of the chunk that was timed */
    double chunk_sec;             /* without logits: what does not grow with the layers */
    double chunk_layer_sec, chunk_layer_past_sec;
    double upload_rate, tile_rate; /* bytes a second from host memory: parts of the weights alone; the cache's tiles as they come */
    uint64_t n_links, n_chunk_links;
    ModelLink links[MODEL_SPEED_PASTS], chunk_links[MODEL_SPEED_CHUNK_LINKS]; /* ascending; after a past that has copies; of tokens, of chunks */
} ModelSpeed;

/* Facts for a model as @fit plans it.  @may_measure: takes the device for a few seconds and half of what is free of it for that time; when
 * not, what is stored is taken as it is.
 * 0; -ENOENT when nothing is stored and it may not measure; MODEL_E_DEVICE_MEMORY when too little is free; other codes of a model. */
int model_speed(Gpu *gpu, const ModelFile *file, const ModelFit *fit, bool may_measure, ModelSpeed *ret, ErrorDetail *reterr);

/* Bytes of host memory that one token after @depth has copied: weights that stream, and the packed past, when its home is the host and it is
 * not read in place, but for the share that stays on the device. */
static inline uint64_t model_streamed_bytes(const ModelFit *fit, uint32_t depth)
{
    const ModelPlan *plan = &fit->plan;
    uint64_t past = plan->kv.host_bytes_per_token * depth;

    if (fit->policy.home != KV_HOME_HOST || plan->kv.n_slots == 0 || past < plan->kv.device_page_bytes)
        return plan->weight_streamed_bytes;
    return plan->weight_streamed_bytes + past - plan->kv.device_page_bytes;
}

typedef struct ModelPrediction {
    double token_sec;    /* of one token after @depth */
    double prefill_rate; /* tokens a second of a prompt that goes on after @depth, in passes of as many rows as it fits with */
    double hidden_share; /* of what copies and kernels of a token could at most hide of each other */
    bool bus_limited;    /* copies take longer than kernels */
} ModelPrediction;
/* The same facts as a policy wants them, for a store that decides what of its pages to keep on the device. */
KvRates model_speed_rates(const ModelSpeed *speed, const ModelFit *fit);
void model_predict(const ModelSpeed *speed, const ModelFit *fit, uint32_t depth, ModelPrediction *ret);
