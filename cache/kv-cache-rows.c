/* SPDX-License-Identifier: Apache-2.0 */
/* Sets of caches, one a row of a batch: reorder, repeat, select, crop; all rows or none. */

#include "cache/kv-store-internal.h"

/* What a rearrangement needs, so that applying it cannot fail. */
typedef struct Plan {
    KvPast **pasts;   /* (n_rows): what row r is to hold, or NULL: past of its source, moved */
    KvCache **extra;  /* caches for rows beyond the set */
    uint32_t n_extra;
} Plan;

/* Each sequence is quantised by itself here. */
static int refuse_rows(const KvStore *store, ErrorDetail *reterr)
{
    char keys[96];

    kv_host_describe(store->host, keys, sizeof(keys));
    return error_detail_set(reterr, -ENOTSUP, "cache: compatibility mode of %s has no rows: Transformers codes those of a batch together", keys);
}

static int check_rows(KvCache *const *caches, uint32_t n, const uint32_t *rows, uint32_t n_rows, ErrorDetail *reterr)
{
    for (uint32_t i = 0; i < n; i++) {
        if (caches[i]->in_pass)
            return error_detail_set(reterr, -EBUSY, "cache: row %u is in the middle of a pass", i);
        if (caches[i]->store != caches[0]->store)
            return error_detail_set(reterr, -EINVAL, "cache: rows 0 and %u belong to different stores", i);
        for (uint32_t j = 0; j < i; j++)
            if (caches[j] == caches[i])
                return error_detail_set(reterr, -EINVAL, "cache: rows %u and %u are the same sequence", j, i);
    }
    for (uint32_t r = 0; r < n_rows; r++)
        if (rows[r] >= n)
            return error_detail_set(reterr, -EINVAL, "cache: row %u is to be what row %u was, of %u", r, rows[r], n);
    if (n_rows > 1 && n > 0 && caches[0]->store->host && !kv_quant_rows_are_apart(&caches[0]->store->sizes.policy.compatible))
        return refuse_rows(caches[0]->store, reterr);
    return 0;
}

static void plan_deinit(Plan *plan, uint32_t n_rows)
{
    for (uint32_t r = 0; plan->pasts && r < n_rows; r++)
        (void)kv_past_free(plan->pasts[r]);
    for (uint32_t i = 0; i < plan->n_extra; i++)
        (void)kv_cache_free(plan->extra[i]);
    free(plan->pasts);
    free(plan->extra);
}

/* A source's first use moves its past, later ones copy it: a permutation costs nothing. */
static bool is_first_use(const uint32_t *rows, uint32_t r)
{
    for (uint32_t i = 0; i < r; i++)
        if (rows[i] == rows[r])
            return false;
    return true;
}

static int plan_rows(KvCache *const *caches, uint32_t n, const uint32_t *rows, uint32_t n_rows, Plan *plan, ErrorDetail *reterr)
{
    int r;

    plan->pasts = calloc(MAX(n_rows, 1u), sizeof(KvPast *));
    plan->extra = calloc(MAX(n_rows, 1u), sizeof(KvCache *));
    if (!plan->pasts || !plan->extra)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t i = 0; i < n_rows; i++)
        if (!is_first_use(rows, i)) {
            plan->pasts[i] = kv_past_copy(caches[rows[i]]->past);
            if (!plan->pasts[i])
                return error_origin(KV_E_HOST_MEMORY);
        }
    for (; n + plan->n_extra < n_rows; plan->n_extra++) {
        r = kv_cache_new(caches[0]->store, &plan->extra[plan->n_extra], reterr);
        if (r)
            return error_trace(r);
    }
    return 0;
}

/* Nothing here can fail. */
static void apply_rows(KvCache **caches, uint32_t n, const uint32_t *rows, uint32_t n_rows, Plan *plan)
{
    for (uint32_t r = 0; r < n_rows; r++)
        if (!plan->pasts[r]) {
            plan->pasts[r] = caches[rows[r]]->past;
            caches[rows[r]]->past = NULL;
        }
    for (uint32_t r = n; r < n_rows; r++) {
        caches[r] = plan->extra[r - n];
        plan->extra[r - n] = NULL;
    }
    for (uint32_t r = n_rows; r < n; r++)
        caches[r] = kv_cache_free(caches[r]);
    for (uint32_t r = 0; r < n_rows; r++) {
        (void)kv_past_free(caches[r]->past);
        caches[r]->past = TAKE_PTR(plan->pasts[r]);
    }
}

int kv_caches_select(KvCache **caches, uint32_t n, const uint32_t *rows, uint32_t n_rows, ErrorDetail *reterr)
{
    Plan plan = {0};
    int r;

    r = check_rows(caches, n, rows, n_rows, reterr);
    if (!r && n > 0)
        r = plan_rows(caches, n, rows, n_rows, &plan, reterr);
    if (!r && n > 0)
        apply_rows(caches, n, rows, n_rows, &plan);
    plan_deinit(&plan, n_rows);
    return error_trace(r);
}

int kv_caches_reorder(KvCache **caches, uint32_t n, const uint32_t *rows, ErrorDetail *reterr)
{
    return error_trace(kv_caches_select(caches, n, rows, n, reterr));
}

int kv_caches_repeat(KvCache **caches, uint32_t n, uint32_t n_times, ErrorDetail *reterr)
{
    _cleanup_(freep) uint32_t *rows = NULL;

    if (n_times == 0 || (uint64_t)n * n_times > UINT32_MAX)
        return error_detail_set(reterr, -EINVAL, "cache: %u rows, %u times", n, n_times);
    rows = calloc(MAX(n * n_times, 1u), sizeof(uint32_t));
    if (!rows)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t i = 0; i < n * n_times; i++)
        rows[i] = i / n_times;
    return error_trace(kv_caches_select(caches, n, rows, n * n_times, reterr));
}

/* ---- taking tokens back --------------------------------------------------------------------------------------------------------- */

static int check_crop(KvCache *const *caches, uint32_t n, uint32_t n_back, ErrorDetail *reterr)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t length = caches[i]->past->length, left;

        if (n_back > length)
            return error_detail_set(reterr, -EINVAL, "cache: %u tokens to take back from row %u, which has %u", n_back, i, length);
        left = kv_cache_crop_length(caches[i], length - n_back);
        if (left != length - n_back)
            return error_detail_set(reterr, KV_E_ROLLBACK,
                                    "cache: row %u cannot take back %u of %u tokens: what it needs to go on from %u was not recorded, from %u it was",
                                    i, n_back, length, length - n_back, left);
    }
    return 0;
}

/* The shorter past of each row, beside the present one; of those that were made @pasts has one on failure too. */
static int crop_copies(KvCache *const *caches, uint32_t n, uint32_t n_back, KvPast **pasts, ErrorDetail *reterr)
{
    int r = 0;

    for (uint32_t i = 0; i < n && !r; i++) {
        pasts[i] = kv_past_copy(caches[i]->past);
        if (!pasts[i])
            return error_origin(KV_E_HOST_MEMORY);
        r = kv_past_crop(pasts[i], pasts[i]->length - n_back, reterr);
    }
    return error_trace(r);
}

static int take_back(KvCache *const *caches, uint32_t n, uint32_t n_back, ErrorDetail *reterr)
{
    _cleanup_(freep) KvPast **pasts = calloc(MAX(n, 1u), sizeof(KvPast *));
    int r;

    if (!pasts)
        return error_origin(KV_E_HOST_MEMORY);
    r = n_back > 0 ? crop_copies(caches, n, n_back, pasts, reterr) : 0;
    for (uint32_t i = 0; i < n; i++) {
        KvPast *dropped = pasts[i];

        if (!r && pasts[i]) {
            dropped = caches[i]->past;
            pasts[i]->recording = dropped->recording;
            caches[i]->past = pasts[i];
        }
        (void)kv_past_free(dropped);
    }
    return error_trace(r);
}

int kv_caches_crop(KvCache *const *caches, uint32_t n, int64_t n_tokens, ErrorDetail *reterr)
{
    int r;

    if (n_tokens > 0 || n_tokens < -(int64_t)UINT32_MAX)
        return error_detail_set(reterr, -EINVAL, "cache: crop by %lld, must be 0 or negative", (long long)n_tokens);
    r = check_rows(caches, n, NULL, 0, reterr);
    if (!r)
        r = check_crop(caches, n, (uint32_t)-n_tokens, reterr);
    if (!r)
        r = take_back(caches, n, (uint32_t)-n_tokens, reterr);
    for (uint32_t i = 0; i < n && !r; i++) {
        KvPast *past = caches[i]->past;

        kv_past_drop_beyond(past, past->length); /* now that nobody else has the pages behind */
        past->record_from = past->length;
        kv_past_drop_recorded(past);
    }
    if (!r && n > 0)
        kv_store_trim(caches[0]->store);
    return error_trace(r);
}
