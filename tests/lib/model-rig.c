/* SPDX-License-Identifier: Apache-2.0 */
/* A device and a model for tests. */

#include "tests/lib/model-rig.h"
#include "quant/base/log.h"
#include "tests/lib/patience.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void end_on(int r, const char *what, const ErrorDetail *detail)
{
    if (r == 0)
        return;
    print_error("%s: error %d: %s\n", what, r, detail->text);
    abort();
}

Gpu *rig_open_gpu(void)
{
    GpuOptions options = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Gpu *gpu = NULL;

    if (getenv("LEAT_TEST_DEBUG"))
        log_set_level(LOG_LEVEL_DEBUG);
    end_on(gpu_open(&options, &gpu, &detail), "gpu_open", &detail);
    print_message("device: %s (%s)\n", gpu_info(gpu)->name, gpu_info(gpu)->reason);
    return gpu;
}

void rig_path(const char *name, char *ret, size_t size)
{
    (void)snprintf(ret, size, "%s/%s", test_data_folder(), name);
}

Model *rig_open_model(Gpu *gpu, const char *path, const char *state_dir, ModelOptions options)
{
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Model *model = NULL;

    end_on(model_file_open(path, state_dir, &file, &detail), path, &detail);
    end_on(model_new(gpu, file, &options, &model, &detail), "model_new", &detail);
    file = NULL; /* the model's now */
    return model;
}

KvStore *rig_new_store(Model *model, const KvPolicy *policy)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvStore *store = NULL;

    end_on(model_store_new(model, policy, &store, &detail), "model_store_new", &detail);
    return store;
}

KvPolicy rig_policy(const RigPolicy *policy, bool exact)
{
    KvPolicy full = kv_policy_preset(policy->strategy, exact);

    full.transfer = policy->transfer;
    if (policy->n_slots)
        full.n_slots = policy->n_slots;
    full.tile_blocks = policy->tile_blocks;
    return full;
}

void rig_run(Model *model, KvStore *store, const int32_t *ids, uint32_t n_ids, uint32_t chunk, uint32_t n_wanted, float *ret_logits)
{
    uint32_t n_vocab = model_file_params(model_file(model))->n_vocab, n_kept = 0;
    _cleanup_(freep) float *logits = calloc(chunk, n_vocab * sizeof(*logits));
    _cleanup_(kv_cache_freep) KvCache *cache = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;

    end_on(logits ? 0 : -ENOMEM, "rig_run", &detail);
    end_on(kv_cache_new(store, &cache, &detail), "kv_cache_new", &detail);
    for (uint32_t done = 0; done < n_ids;) {
        uint32_t n = MIN(chunk, n_ids - done);
        bool wanted = done + n > n_ids - n_wanted;
        ModelItem item = {.cache = cache, .tokens = ids + done, .n_tokens = n, .all_logits = true};

        end_on(model_forward(model, store, &item, 1, wanted ? logits : NULL, &detail), "model_forward", &detail);
        for (uint32_t row = 0; row < n; row++)
            if (done + row >= n_ids - n_wanted)
                memcpy(ret_logits + (size_t)n_kept++ * n_vocab, logits + (size_t)row * n_vocab, n_vocab * sizeof(*logits));
        done += n;
    }
}

void rig_random_ids(uint32_t seed, uint32_t n_vocab, int32_t *ret, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        seed = seed * 1664525 + 1013904223;
        ret[i] = (int32_t)((seed >> 8) % n_vocab);
    }
}
