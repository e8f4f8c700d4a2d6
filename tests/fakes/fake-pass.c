/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in for a pass of the model: notes who was in it, plays the fault that was asked for, and speaks. */

#include "tests/fakes/fake-internal.h"

int32_t fake_next(const int32_t *ids, uint32_t n, uint32_t eog_at)
{
    uint32_t hash = 2166136261u;

    if (eog_at && n >= eog_at)
        return FAKE_EOG;
    for (uint32_t i = 0; i < n; i++)
        hash = (hash ^ (uint32_t)ids[i]) * 16777619u;
    return 'a' + (int32_t)((hash >> 8) % 26);
}

void fake_logits(const int32_t *ids, uint32_t n, float *row)
{
    for (int i = 0; i < FAKE_VOCAB; i++)
        row[i] = (float)i / FAKE_VOCAB;
    row[fake_next(ids, n, FAKE_GET(eog_at))] = 10;
    if (FAKE_GET(nan_for) && ids[0] == FAKE_GET(nan_for))
        row[3] = __builtin_nanf("");
}

/* Waits while passes are held, notes the pass; MODEL_E_… when a fault was asked for. */
static int fake_begin_pass(Model *model, const ModelItem *items, uint32_t n_items, ErrorDetail *reterr)
{
    uint64_t tokens = 0, on_device = 0;
    FakePass *pass;

    pthread_mutex_lock(&fake.lock);
    while (fake.hold)
        pthread_cond_wait(&fake.changed, &fake.lock);
    for (size_t i = 0; i < N_ELEMENTS(fake_caches); i++) {
        tokens += fake_caches[i] ? fake_caches[i]->n : 0;
        on_device +=
            fake_caches[i] && fake_caches[i]->store->policy.home == KV_HOME_DEVICE ? fake_caches[i]->n : 0;
    }
    assert_true(fake.n_passes < FAKE_PASSES);
    pass = &fake.passes[fake.n_passes++];
    *pass = (FakePass){.n_items = n_items};
    for (uint32_t i = 0; i < n_items; i++) {
        tokens += items[i].n_tokens;
        on_device += items[i].cache->store->policy.home == KV_HOME_DEVICE ? items[i].n_tokens : 0;
        pass->n_rows += items[i].n_tokens;
        if (i < N_ELEMENTS(pass->first_ids))
            pass->first_ids[i] = items[i].cache->n > 0 ? items[i].cache->ids[0] : items[i].tokens[0];
    }
    assert_true(pass->n_rows <= model->options.max_rows);
    assert_true(n_items <= model->options.max_sequences);
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
    talk_sleep(FAKE_GET(pass_usec));
    if (FAKE_GET(lose) || FAKE_GET(hang)) {
        model->gpu->hung = FAKE_GET(hang);
        model->gpu->lost = true;
        FAKE_SET(lose, false);
        FAKE_SET(hang, false);
        return error_detail_set(reterr, MODEL_E_DEVICE, "'Fake' is gone");
    }
    if (FAKE_GET(room_tokens) && tokens > FAKE_GET(room_tokens))
        return error_detail_set(reterr, MODEL_E_HOST_MEMORY, "%llu tokens do not fit",
                                (unsigned long long)tokens);
    if (FAKE_GET(device_tokens) && on_device > FAKE_GET(device_tokens))
        return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY, "%llu tokens do not fit on the device",
                                (unsigned long long)on_device);
    return 0;
}

int model_forward(Model *model, KvStore *store, const ModelItem *items, uint32_t n_items, float *logits,
                  ErrorDetail *reterr)
{
    int r = fake_begin_pass(model, items, n_items, reterr);

    if (r)
        return r;
    for (uint32_t i = 0; i < n_items; i++) {
        KvCache *cache = items[i].cache;

        assert_ptr_equal(cache->store, store);
        assert_true(cache->n + items[i].n_tokens <= FAKE_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        memcpy(cache->ids + cache->n, items[i].tokens, items[i].n_tokens * sizeof(int32_t));
        cache->n += items[i].n_tokens;
        fake.n_rows += items[i].n_tokens;
        pthread_mutex_unlock(&fake.lock);
        for (uint32_t t = items[i].all_logits ? 0 : items[i].n_tokens - 1; logits && t < items[i].n_tokens;
             t++) {
            fake_logits(cache->ids, cache->n - items[i].n_tokens + t + 1, logits);
            logits += FAKE_VOCAB;
        }
    }
    return 0;
}
