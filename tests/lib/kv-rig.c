/* SPDX-License-Identifier: Apache-2.0 */
/* The device with a model without weights on it, and what tests of stores do with both. */

#include "tests/lib/kv-rig.h"
#include "tests/lib/patience.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

static const uint8_t digest[KV_IMAGE_DIGEST] = {1, 2, 3, 4};

KvRig *kv_rig_new(uint32_t max_sequences)
{
    GpuOptions options = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = PATIENCE_USEC};
    KvRig *rig = calloc(1, sizeof(*rig));
    ErrorDetail detail = ERROR_DETAIL_NULL;

    assert_non_null(rig);
    if (gpu_open(&options, &rig->gpu, &detail))
        fail_msg("%s", detail.text);
    kv_bench_init(&rig->bench, rig->gpu, max_sequences);
    return rig;
}

KvRig *kv_rig_free(KvRig *rig)
{
    for (size_t kind = 0; kind < N_ELEMENTS(rig->cold); kind++)
        (void)kv_stream_free(rig->cold[kind]);
    kv_bench_deinit(&rig->bench);
    (void)gpu_free(rig->gpu);
    free(rig);
    return NULL;
}

KvStore *kv_rig_store(KvRig *rig, const KvPolicy *policy)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvStore *store = NULL;

    if (kv_store_new(rig->gpu, &rig->bench.model, policy, &store, &detail))
        fail_msg("%s", detail.text);
    return store;
}

KvCache *kv_rig_cache(KvStore *store)
{
    KvCache *cache = NULL;

    assert_int_equal(kv_cache_new(store, &cache, NULL), 0);
    return cache;
}

void kv_rig_run_cold(KvRig *rig, KvFormKind kind, const KvPolicy *policy, uint32_t seed, uint32_t n_tokens,
                     uint32_t chunk)
{
    KvStore *store = kv_rig_store(rig, policy);
    KvCache *cache = kv_rig_cache(store);

    rig->cold[kind] = kv_stream_new(&rig->bench, seed, n_tokens);
    kv_bench_run(&rig->bench, store, cache, rig->cold[kind], n_tokens, chunk);
    (void)kv_cache_free(cache);
    (void)kv_store_free(store);
}

size_t kv_rig_out_bytes(const KvRig *rig, uint32_t n_tokens)
{
    return (size_t)n_tokens * KV_BENCH_LAYERS * rig->bench.out_width * sizeof(float);
}

/* ---- saved sequences ------------------------------------------------------------------------------- */

KvSave *kv_rig_save_begin(KvCache *cache, const char *extra)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvSave *save = NULL;

    if (kv_save_begin(cache, digest, extra, strlen(extra), &save, &detail))
        fail_msg("%s", detail.text);
    return save;
}

int kv_rig_save_end(KvSave *save)
{
    int fd = memfd_create("saved", MFD_CLOEXEC);

    assert_int_equal(kv_save_write(save, fd), 0);
    assert_int_equal(lseek(fd, 0, SEEK_END), kv_save_bytes(save));
    (void)kv_save_end(save);
    return fd;
}

int kv_rig_save(KvCache *cache, const char *extra)
{
    return kv_rig_save_end(kv_rig_save_begin(cache, extra));
}

int kv_rig_open(const KvStore *store, int fd, bool map, KvImage **ret, ErrorDetail *reterr)
{
    KvImageFacts facts = {.layout = kv_store_layout(store)};

    memcpy(facts.model, digest, sizeof(digest));
    return kv_image_open(fd, "saved", &facts, map, ret, reterr);
}

KvImage *kv_rig_image(const KvStore *store, int fd, bool map)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvImage *image = NULL;

    if (kv_rig_open(store, fd, map, &image, &detail))
        fail_msg("%s", detail.text);
    return image;
}

int kv_rig_forge(const KvImage *image, const KvImageChunk *chunk, size_t at, uint32_t value, bool cut)
{
    _cleanup_(kv_image_freep) KvImage *forged = kv_image_new(&image->facts);
    _cleanup_(freep) uint8_t *changed = malloc(chunk->bytes);
    int fd = memfd_create("forged", MFD_CLOEXEC);

    assert_true(forged && changed && chunk->bytes >= at + sizeof(value));
    memcpy(changed, chunk->data, chunk->bytes);
    if (!cut)
        memcpy(changed + at, &value, sizeof(value));
    for (uint32_t i = 0; i < image->n_chunks; i++) {
        const KvImageChunk *each = &image->chunks[i];
        bool here = each == chunk;

        assert_int_equal(kv_image_chunk(forged, each->kind, each->a, each->b), 0);
        assert_int_equal(
            kv_image_piece(forged, here ? changed : each->data, each->bytes - (uint64_t)(here && cut)), 0);
    }
    assert_int_equal(kv_image_write(forged, fd), 0);
    return fd;
}
