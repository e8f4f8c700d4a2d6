/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for cache/: a sequence is the list of its ids; packed ones go back to checkpoints only.  A saved
 * one lies in a container that is the real one (cache/kv-image.h).
 */

#include "cache/kv-file.h"
#include "cache/kv-migrate.h"
#include "tests/fakes/fake-internal.h"

KvCache *fake_caches[256];

bool fake_cache_is_recording(size_t i)
{
    assert_non_null(fake_caches[i]);
    return fake_caches[i]->recording;
}

KvStore *kv_store_free(KvStore *store)
{
    if (!store)
        return NULL;
    assert_int_equal(store->n_caches, 0);
    FAKE_SET(n_stores, fake.n_stores - 1);
    free(store);
    return NULL;
}

const KvPolicy *kv_store_policy(const KvStore *store)
{
    return &store->policy;
}

bool kv_store_others_can_help(const KvStore *store)
{
    (void)store;
    return true;
}

int kv_store_migrate(KvStore *from, KvStore *to, bool lossy, ErrorDetail *reterr)
{
    (void)reterr;
    assert_false(lossy);
    pthread_mutex_lock(&fake.lock);
    for (size_t i = 0; i < N_ELEMENTS(fake_caches); i++)
        if (fake_caches[i] && fake_caches[i]->store == from) {
            fake_caches[i]->store = to;
            from->n_caches--;
            to->n_caches++;
        }
    fake.n_moves++;
    pthread_mutex_unlock(&fake.lock);
    return 0;
}

int kv_cache_new(KvStore *store, KvCache **ret, ErrorDetail *reterr)
{
    KvCache *cache = calloc(1, sizeof(*cache));
    size_t i = 0;

    (void)reterr;
    assert_non_null(cache);
    cache->store = store;
    store->n_caches++;
    pthread_mutex_lock(&fake.lock);
    fake.n_caches++;
    while (i < N_ELEMENTS(fake_caches) && fake_caches[i])
        i++;
    assert_true(i < N_ELEMENTS(fake_caches));
    fake_caches[i] = cache;
    pthread_mutex_unlock(&fake.lock);
    *ret = cache;
    return 0;
}

KvCache *kv_cache_free(KvCache *cache)
{
    if (!cache)
        return NULL;
    cache->store->n_caches--;
    pthread_mutex_lock(&fake.lock);
    fake.n_caches--;
    for (size_t i = 0; i < N_ELEMENTS(fake_caches); i++)
        if (fake_caches[i] == cache)
            fake_caches[i] = NULL;
    pthread_mutex_unlock(&fake.lock);
    free(cache);
    return NULL;
}

int kv_cache_fork(KvCache *cache, KvCache **ret, ErrorDetail *reterr)
{
    int r = kv_cache_new(cache->store, ret, reterr);

    if (r)
        return r;
    memcpy((*ret)->ids, cache->ids, sizeof(cache->ids));
    memcpy((*ret)->checkpoints, cache->checkpoints, sizeof(cache->checkpoints));
    (*ret)->n = cache->n;
    (*ret)->n_checkpoints = cache->n_checkpoints;
    FAKE_SET(n_forked, fake.n_forked + 1);
    return 0;
}

uint32_t kv_cache_length(const KvCache *cache)
{
    return cache->n;
}

bool kv_cache_is_as_cold(const KvCache *cache)
{
    return cache != NULL;
}

int kv_cache_crop(KvCache *cache, uint32_t n_keep, uint32_t *ret_length, ErrorDetail *reterr)
{
    uint32_t best = 0;

    (void)reterr;
    assert_true(n_keep <= cache->n);
    if (FAKE_GET(packed) && n_keep + 32 < cache->n) {
        for (uint32_t i = 0; i < cache->n_checkpoints; i++)
            if (cache->checkpoints[i] <= n_keep && cache->checkpoints[i] > best)
                best = cache->checkpoints[i];
        n_keep = best;
    }
    while (cache->n_checkpoints > 0 && cache->checkpoints[cache->n_checkpoints - 1] > n_keep)
        cache->n_checkpoints--;
    cache->n = *ret_length = n_keep;
    return 0;
}

int kv_cache_record(KvCache *cache, bool on)
{
    cache->recording = on;
    return 0;
}

int kv_cache_clear(KvCache *cache)
{
    cache->n = cache->n_checkpoints = 0;
    return 0;
}

void kv_cache_set_more(KvCache *cache, bool more)
{
    (void)cache, (void)more;
}

int kv_cache_checkpoint(KvCache *cache)
{
    if (cache->n_checkpoints < N_ELEMENTS(cache->checkpoints))
        cache->checkpoints[cache->n_checkpoints++] = cache->n;
    return 0;
}

void kv_cache_bytes(const KvCache *cache, KvBytes *ret)
{
    *ret = (KvBytes){.host = cache->n, .device = 1, .length = cache->n};
}

/* ---- saved sequences --------------------------------------------------------------------------- */

struct KvSave {
    KvImage *image;
    int32_t ids[FAKE_CONTEXT];
    uint8_t extra[4 * FAKE_CONTEXT];
};

uint64_t kv_store_layout(const KvStore *store)
{
    return 1000 + store->policy.form.k_bits;
}

int kv_save_begin(KvCache *cache, const uint8_t model[static KV_IMAGE_DIGEST], const void *extra,
                  size_t n_extra, KvSave **ret, ErrorDetail *reterr)
{
    KvImageFacts facts = {.layout = cache ? kv_store_layout(cache->store) : 0,
                          .n_tokens = cache ? cache->n : 0};
    KvSave *save = calloc(1, sizeof(*save));

    (void)reterr;
    assert_non_null(save);
    assert_true(n_extra <= sizeof(save->extra));
    memcpy(facts.model, model, sizeof(facts.model));
    if (n_extra > 0)
        memcpy(save->extra, extra, n_extra);
    save->image = kv_image_new(&facts);
    assert_int_equal(kv_image_chunk(save->image, 1, 0, 0), 0);
    if (cache) {
        memcpy(save->ids, cache->ids, sizeof(save->ids));
        assert_int_equal(kv_image_piece(save->image, save->ids, cache->n * sizeof(int32_t)), 0);
    }
    assert_int_equal(kv_image_chunk(save->image, 2, 0, 0), 0);
    assert_int_equal(kv_image_piece(save->image, save->extra, n_extra), 0);
    *ret = save;
    return 0;
}

uint64_t kv_save_bytes(const KvSave *save)
{
    return kv_image_bytes(save->image);
}

int kv_save_write(const KvSave *save, int fd)
{
    return kv_image_write(save->image, fd);
}

KvSave *kv_save_end(KvSave *save)
{
    if (save)
        kv_image_free(save->image);
    free(save);
    return NULL;
}

int kv_restore(KvStore *store, const KvImage *image, KvCache **ret, ErrorDetail *reterr)
{
    const KvImageChunk *chunk = kv_image_find(image, 1, 0, 0);
    int r = kv_cache_new(store, ret, reterr);

    if (r)
        return r;
    memcpy((*ret)->ids, chunk->data, chunk->bytes);
    (*ret)->n = image->facts.n_tokens;
    return 0;
}

const void *kv_image_extra(const KvImage *image, size_t *ret_n)
{
    const KvImageChunk *chunk = kv_image_find(image, 2, 0, 0);

    *ret_n = chunk->bytes;
    return chunk->data;
}
