#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the stand-in know of each other. */

#include "cache/kv-store.h"
#include "daemon/model/model.h"
#include "tests/fakes/fake.h"

struct Gpu {
    GpuInfo info;
    bool lost, hung;
    uint64_t used;
    bool overlap;
};

struct ModelFile {
    ModelParams params;
    uint64_t bytes; /* on the device */
    bool no_template, used, other, has_bits;
};

struct Model {
    Gpu *gpu;
    ModelFile *file;
    ModelOptions options;
};

struct KvStore {
    Model *model;
    KvPolicy policy;
    uint32_t n_caches;
};

struct KvCache {
    KvStore *store;
    int32_t ids[FAKE_CONTEXT];
    uint32_t n, checkpoints[64], n_checkpoints;
    bool recording;
};

/* Every cache that there is, for the sum of their tokens; under the lock. */
extern KvCache *fake_caches[256];
