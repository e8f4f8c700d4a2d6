/* SPDX-License-Identifier: Apache-2.0 */
/* What caches refuse, and that nothing has changed then. */

#include "tests/lib/fault-script.h"

#include <string.h>

typedef struct Sight {
    uint32_t length, cross_length;
    KvBytes bytes;
} Sight;

static void see(KvCache *const *caches, uint32_t n, Sight *ret)
{
    memset(ret, 0, SCRIPT_CACHES * sizeof(*ret));
    for (uint32_t i = 0; i < n; i++) {
        ret[i].length = kv_cache_length(caches[i]);
        ret[i].cross_length = kv_cache_cross_length(caches[i]);
        kv_cache_bytes(caches[i], &ret[i].bytes);
    }
}

/* With one of these codes, and a reason. */
static void must_be(int r, int code, int other, const ErrorDetail *detail, const char *what)
{
    if ((r != code && r != other) || !detail->text[0])
        script_fail(__FILE__, __LINE__, "%s: %d, not %d: '%s'", what, r, code, detail->text);
}
#define REFUSED(code, other, call)                                                                                                      \
    do {                                                                                                                                \
        ErrorDetail detail = ERROR_DETAIL_NULL;                                                                                         \
        int r_ = (call);                                                                                                                \
        must_be(r_, (code), (other), &detail, #call);                                                                                   \
    } while (0)

/* Going back further than there are tokens, or than a row can go. */
static void refuse_crops(KvCache *const *caches, uint32_t n)
{
    REFUSED(-EINVAL, -EINVAL, kv_caches_crop(caches, n, 1, &detail));
    REFUSED(-EINVAL, -EINVAL, kv_caches_crop(caches, n, -(int64_t)SCRIPT_TOKENS - 1, &detail));
    REFUSED(-EINVAL, -EINVAL, kv_caches_crop(caches, n, INT64_MIN, &detail));
    for (uint32_t i = 0; i < n; i++) {
        uint32_t length = kv_cache_length(caches[i]);

        for (uint32_t remove = 1; remove < length; remove += 1 + remove / 2)
            if (kv_cache_crop_length(caches[i], length - remove) < length - remove) {
                REFUSED(KV_E_ROLLBACK, -EINVAL, kv_caches_crop(caches, n, -(int64_t)remove, &detail)); /* others have fewer tokens */
                break;
            }
    }
}

/* Rows that are not there, and caches that are there twice. */
static void refuse_rows(KvCache **caches, uint32_t n)
{
    const uint32_t bad[] = {0, n, n, n}, huge[] = {UINT32_MAX, 0, 0, 0}, good[] = {0, 0, 0, 0};
    KvCache *twice[] = {caches[0], caches[0], NULL, NULL};

    REFUSED(-EINVAL, -ENOTSUP, kv_caches_select(caches, n, bad, MAX(n, 2u), &detail));
    REFUSED(-EINVAL, -EINVAL, kv_caches_reorder(caches, n, huge, &detail));
    REFUSED(-EINVAL, -ENOTSUP, kv_caches_select(twice, 2, good, 2, &detail));
}

/* More than fits, nothing, one twice, more sequences or rows than a pass has. */
static void refuse_passes(KvStore *store, KvCache *const *caches, uint32_t n)
{
    uint32_t most = kv_store_policy(store)->max_cache_tokens;
    KvPassItem items[2] = {{caches[0], 1}, {caches[0], 1}}, none = {caches[0], 0}, many = {caches[0], UINT32_MAX};
    KvPassItem last = {caches[n - 1], most - kv_cache_length(caches[n - 1]) + 1};
    KvPass *pass;

    REFUSED(-EINVAL, -EINVAL, kv_pass_begin(store, items, 2, &pass, &detail));
    REFUSED(-EINVAL, -EINVAL, kv_pass_begin(store, items, 0, &pass, &detail));
    REFUSED(-EINVAL, -EINVAL, kv_pass_begin(store, items, 1000, &pass, &detail));
    REFUSED(-EINVAL, -EINVAL, kv_pass_begin(store, &none, 1, &pass, &detail));
    REFUSED(-EINVAL, KV_E_CONTEXT, kv_pass_begin(store, &many, 1, &pass, &detail));
    REFUSED(KV_E_CONTEXT, -EINVAL, kv_pass_begin(store, &last, 1, &pass, &detail)); /* or more rows than a pass has */
    REFUSED(-EINVAL, KV_E_CONTEXT, kv_cross_begin(store, &(KvPassItem){caches[0], RANDOM_MAX_CROSS + 1}, 1, &pass, &detail));
}

/* A pass is begun and given up; in between its cache is left alone. */
static void refuse_in_a_pass(KvStore *store, KvCache **caches)
{
    static const uint8_t model[KV_IMAGE_DIGEST];
    KvPassItem item = {caches[0], 1};
    ErrorDetail reason = ERROR_DETAIL_NULL;
    KvPass *pass, *second;
    KvCache *fork;
    KvSave *save;
    uint32_t length;
    int r;

    if (kv_cache_length(caches[0]) == 0 || kv_cache_length(caches[0]) >= kv_store_policy(store)->max_cache_tokens)
        return;
    r = kv_pass_begin(store, &item, 1, &pass, &reason);
    if (r)
        script_fail(__FILE__, __LINE__, "a pass begins with %d: %s", r, reason.text);
    REFUSED(-EBUSY, -EBUSY, kv_pass_begin(store, &item, 1, &second, &detail));
    REFUSED(-EBUSY, -EBUSY, kv_cache_fork(caches[0], &fork, &detail));
    REFUSED(-EBUSY, -EBUSY, kv_cache_crop(caches[0], 1, &length, &detail));
    REFUSED(-EBUSY, -EBUSY, kv_caches_crop(caches, 1, -1, &detail));
    REFUSED(-EBUSY, -EBUSY, kv_caches_reorder(caches, 1, &(uint32_t){0}, &detail));
    REFUSED(-EBUSY, -EBUSY, kv_save_begin(caches[0], model, NULL, 0, &save, &detail));
    MUST(kv_cache_checkpoint(caches[0]) == -EBUSY && kv_cache_clear(caches[0]) == -EBUSY && kv_cache_record(caches[0], true) == -EBUSY);
    (void)kv_pass_abort(pass);
}

void script_refuse(Gpu *gpu, KvStore *store, KvCache *const *caches)
{
    KvCache *live[SCRIPT_CACHES] = {NULL};
    Sight before[SCRIPT_CACHES], after[SCRIPT_CACHES];
    uint32_t n = 0;

    for (uint32_t a = 0; a < SCRIPT_CACHES; a++)
        if (caches[a])
            live[n++] = caches[a];
    see(live, n, before);
    refuse_crops(live, n);
    refuse_rows(live, n);
    MUST(gpu_step_begin(gpu) == 0);
    refuse_passes(store, live, n);
    see(live, n, after);
    for (uint32_t i = 0; i < n; i++)
        if (memcmp(&before[i], &after[i], sizeof(before[i])) != 0)
            script_fail(__FILE__, __LINE__, "what was refused has changed cache %u of %u: %u to %u tokens, %llu to %llu bytes on the host", i, n,
                        before[i].length, after[i].length, (unsigned long long)before[i].bytes.host, (unsigned long long)after[i].bytes.host);
    refuse_in_a_pass(store, live);
    see(live, n, after);
    for (uint32_t i = 0; i < n; i++) /* the pass has brought tails to the device */
        MUST(before[i].length == after[i].length && before[i].cross_length == after[i].cross_length &&
             before[i].bytes.n_pages == after[i].bytes.n_pages);
}
