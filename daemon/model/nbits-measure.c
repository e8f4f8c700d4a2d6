/* SPDX-License-Identifier: Apache-2.0 */
/* Automatic bits: the runs over the built-in text, and the divergence of one from another. */

#include "daemon/model/nbits-private.h"
#include "quant/base/log.h"

#include <math.h>
#include <string.h>

/* Rows of a pass: what others wait for, and what bounds the host memory of its logits. */
#define MEASURE_ROWS         64
#define MEASURE_MIN_ROWS     8
#define MEASURE_LOGITS_BYTES (32u << 20)
/* Of a distribution of the reference: what may count as one, and how many tokens may stand on their own.  Lumping takes from the divergence at
 * most that share of the part's own divergence: a thousandth of the whole at the most that we saw. */
#define LUMPED_MASS          1e-4
#define MAX_LIKELY           8192
#define N_EXPONENTS          64

typedef struct Likely {
    int32_t id;
    float log_p;
} Likely;

/* Distributions of the reference run, one for each position that counts. */
typedef struct Reference {
    Likely *likely;
    size_t n_likely, capacity;
    size_t *ends;  /* (n_rows): of each row in likely */
    double *rests; /* (n_rows): probability of all others */
    uint32_t n_rows;
    bool complete;
} Reference;

typedef enum Run { RUN_REFERENCE, RUN_ROUNDING, RUN_CANDIDATE } Run;

struct Nbits {
    Model *model; /* borrowed */
    KvPolicy policy;
    NbitsKept kept;
    NbitsTable table;
    TokenList list;
    uint32_t n_ids, first; /* tokens of the text; positions from first on count */
    uint32_t rows;         /* of a pass */
    float *logits;         /* (rows, n_vocab) */
    double *p;             /* (n_vocab) */
    Reference reference;

    /* The run in work; store NULL: none. */
    Run run;
    KvStore *store;
    KvCache *cache;
    uint32_t candidate, done;
    double sum;
};

/* ---- distributions ------------------------------------------------------------------------------------------------------------ */

/* @ret: (n) probabilities; returns the logarithm of what the logits' exponentials sum to. */
static double softmax(const float *logits, uint32_t n, double *ret)
{
    float largest = logits[0];
    double sum = 0;

    for (uint32_t i = 1; i < n; i++)
        largest = MAX(largest, logits[i]);
    for (uint32_t i = 0; i < n; i++) {
        ret[i] = exp((double)logits[i] - (double)largest);
        sum += ret[i];
    }
    for (uint32_t i = 0; i < n; i++)
        ret[i] /= sum;
    return (double)largest + log(sum);
}

/* 0: from a half to one; 1: from a quarter; … */
static int exponent_of(double p)
{
    int exponent;

    (void)frexp(p, &exponent);
    exponent = p > 0 ? MAX(-exponent, 0) : N_EXPONENTS;
    return MIN(exponent, N_EXPONENTS - 1);
}

/* Exponents from here on are lumped. */
static int lumped_exponent(const double *p, uint32_t n)
{
    double mass[N_EXPONENTS] = {0}, lumped = 0;
    uint32_t count[N_EXPONENTS] = {0}, kept = 0;
    int by_mass = N_EXPONENTS, by_count = 0;

    for (uint32_t i = 0; i < n; i++) {
        int e = exponent_of(p[i]);

        mass[e] += p[i];
        count[e]++;
    }
    while (by_mass > 1 && lumped + mass[by_mass - 1] <= LUMPED_MASS)
        lumped += mass[--by_mass];
    while (by_count < N_EXPONENTS && kept + count[by_count] <= MAX_LIKELY)
        kept += count[by_count++];
    return MIN(by_mass, by_count);
}

static int reserve_likely(Reference *reference, uint32_t n)
{
    size_t capacity = MAX(reference->capacity * 2, reference->n_likely + n);
    Likely *likely;

    if (reference->n_likely + n <= reference->capacity)
        return 0;
    likely = realloc(reference->likely, capacity * sizeof(*likely));
    if (!likely)
        return error_origin(-ENOMEM);
    reference->likely = likely;
    reference->capacity = capacity;
    return 0;
}

/* Adds one row; @p: scratch of (n). */
static int reference_add(Reference *reference, const float *logits, uint32_t n, double *p)
{
    double log_sum = softmax(logits, n, p), rest = 0;
    int lumped = lumped_exponent(p, n), r = reserve_likely(reference, MIN(n, (uint32_t)MAX_LIKELY));

    if (r)
        return r;
    for (uint32_t i = 0; i < n; i++)
        if (exponent_of(p[i]) < lumped)
            reference->likely[reference->n_likely++] = (Likely){(int32_t)i, (float)((double)logits[i] - log_sum)};
        else
            rest += p[i];
    reference->ends[reference->n_rows] = reference->n_likely;
    reference->rests[reference->n_rows++] = rest;
    return 0;
}

/* Divergence of @logits from row @row of the reference. */
static double divergence(const Reference *reference, uint32_t row, const float *logits, uint32_t n, double *p)
{
    double log_sum = softmax(logits, n, p), sum = 0, rest = 1, q = reference->rests[row];

    for (size_t i = row ? reference->ends[row - 1] : 0; i < reference->ends[row]; i++) {
        const Likely *likely = &reference->likely[i];
        double log_p = (double)likely->log_p;

        sum += exp(log_p) * (log_p - ((double)logits[likely->id] - log_sum));
        rest -= p[likely->id];
    }
    /* What a difference of sums near one cannot tell from nothing is left out. */
    if (q > 1e-12 && rest > 1e-12)
        sum += q * log(q / rest);
    return sum;
}

/* ---- a run ------------------------------------------------------------------------------------------------------------------- */

/* A ring as small as can be, at home in the host: it fits where the real store does. */
static KvPolicy measure_policy(const KvPolicy *asked, KvForm form)
{
    KvPolicy policy = kv_policy_preset(KV_STRATEGY_OFFLOADED_QUANTIZED, false);

    policy.n_layer_bits = asked->n_layer_bits; /* of a candidate only: the others are not coded */
    memcpy(policy.layer_bits, asked->layer_bits, sizeof(policy.layer_bits));
    policy.form = form;
    policy.max_cache_tokens = NBITS_TOKENS;
    policy.n_slots = policy.tile_blocks = 1;
    return policy;
}

static ModelOptions measure_options(const ModelFile *file, const ModelOptions *options)
{
    uint32_t rows = MEASURE_LOGITS_BYTES / (uint32_t)sizeof(float) / file->hparams.model.n_vocab;
    ModelOptions small = *options;

    rows = MAX(rows, (uint32_t)MEASURE_MIN_ROWS);
    rows = MIN(rows, (uint32_t)MEASURE_ROWS);
    small.max_rows = MIN(rows, options->max_rows);
    small.max_sequences = 1;
    return small;
}

int model_nbits_plan(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, const KvPolicy *asked, uint64_t *ret_bytes,
                     ErrorDetail *reterr)
{
    ModelOptions small = measure_options(file, options);
    KvForm forms[2] = {kv_form_default(KV_FORM_F16), asked->form};
    KvModel kv_model = model_kv(file, &small, NULL);
    uint64_t most = 0;

    forms[1].k_bits = forms[1].v_bits = KV_MAX_BITS;
    for (size_t i = 0; i < N_ELEMENTS(forms); i++) {
        KvPolicy policy = measure_policy(asked, forms[i]);
        KvPlan plan;
        int r = model_fold_kv(kv_store_plan(info, &kv_model, &policy, &plan, reterr));

        if (r && i == 0)
            return r;
        if (r)
            continue; /* a candidate that the form refuses is left out by name when its turn comes */
        most = MAX(most, plan.staging_bytes + plan.tail_bytes + plan.operand_bytes + plan.device_page_bytes);
    }
    *ret_bytes = most;
    return 0;
}

static void end_run(Nbits *nbits)
{
    nbits->cache = kv_cache_free(nbits->cache);
    nbits->store = kv_store_free(nbits->store);
}

static int begin_run_in(Nbits *nbits, KvForm form, ErrorDetail *reterr)
{
    Model *model = nbits->model;
    KvPolicy policy = measure_policy(&nbits->policy, form);
    ModelOptions options = measure_options(model->file, &model->options);
    KvModel kv_model = model_kv(model->file, &options, model->calibration);
    int r;

    nbits->done = 0;
    nbits->sum = 0;
    r = model_fold_kv(kv_store_new(model->gpu, &kv_model, &policy, &nbits->store, reterr));
    if (!r)
        r = model_fold_kv(kv_cache_new(nbits->store, &nbits->cache, reterr));
    if (r)
        end_run(nbits);
    return r;
}

static bool all_finite(const float *logits, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(logits[i]))
            return false;
    return true;
}

static void refuse(Nbits *nbits, const char *reason)
{
    NbitsEntry *entry = &nbits->table.entries[nbits->candidate];

    log_debug("K %u, V %u bits are left out: %s", entry->k_bits, entry->v_bits, reason);
    entry->state = NBITS_REFUSED;
    (void)snprintf(entry->reason, sizeof(entry->reason), "%.*s", (int)sizeof(entry->reason) - 1, reason);
    end_run(nbits);
    nbits_keep(nbits->model->file, &nbits->kept, &nbits->table);
}

static int count_rows(Nbits *nbits, uint32_t n_rows, ErrorDetail *reterr)
{
    uint32_t n_vocab = nbits->model->file->hparams.model.n_vocab;
    int r = 0;

    if (!all_finite(nbits->logits, (size_t)n_rows * n_vocab)) {
        if (nbits->run != RUN_CANDIDATE)
            return error_detail_set(reterr, MODEL_E_CORRUPT, "the model computes no finite logits: its weights are damaged");
        refuse(nbits, "its logits are not finite");
        return 0;
    }
    for (uint32_t row = 0; row < n_rows && !r; row++) {
        const float *logits = nbits->logits + (size_t)row * n_vocab;

        if (nbits->run == RUN_REFERENCE)
            r = reference_add(&nbits->reference, logits, n_vocab, nbits->p);
        else
            nbits->sum += divergence(&nbits->reference, nbits->done + row - nbits->first, logits, n_vocab, nbits->p);
    }
    return r;
}

static void conclude(Nbits *nbits)
{
    NbitsEntry *entry = &nbits->table.entries[nbits->candidate];
    double mean = nbits->sum / nbits->reference.n_rows;

    end_run(nbits);
    switch (nbits->run) {
    case RUN_REFERENCE:
        nbits->reference.complete = true;
        return;
    case RUN_ROUNDING:
        nbits->table.rounding = (double)(float)MAX(mean, 0.0);
        log_debug("another rounding: mean KLD %.6f", mean);
        break;
    case RUN_CANDIDATE:
        entry->state = NBITS_MEASURED;
        entry->kld = (double)(float)MAX(mean - nbits->table.rounding, 0.0); /* as it is kept */
        log_debug("K %u, V %u bits: mean KLD %.6f over %u positions", entry->k_bits, entry->v_bits, mean, nbits->reference.n_rows);
        break;
    }
    nbits_keep(nbits->model->file, &nbits->kept, &nbits->table);
}

static int run_rows(Nbits *nbits, ErrorDetail *reterr)
{
    uint32_t n = MIN(nbits->rows, nbits->n_ids - nbits->done);
    bool counts;
    ModelItem item;
    int r;

    if (nbits->done < nbits->first)
        n = MIN(n, nbits->first - nbits->done); /* a pass counts as a whole or not at all */
    counts = nbits->done >= nbits->first;
    item = (ModelItem){.cache = nbits->cache, .tokens = nbits->list.ids + nbits->done, .n_tokens = n, .all_logits = true};
    r = model_forward(nbits->model, nbits->store, &item, 1, counts ? nbits->logits : NULL, reterr);
    if (!r && counts)
        r = count_rows(nbits, n, reterr);
    if (r || !nbits->store)
        return r;
    nbits->done += n;
    if (nbits->done == nbits->n_ids)
        conclude(nbits);
    return 0;
}

/* ---- a measurement ------------------------------------------------------------------------------------------------------------ */

/* Positions from which most keys are coded: those beyond four times what stays in full precision, or beyond the middle of a short text. */
static uint32_t first_position(KvForm form, uint32_t n_ids)
{
    uint32_t kept = kv_ring_tokens(form), first = MIN(4 * kept, n_ids / 2);

    return MAX(kept, first);
}

static int read_text(Nbits *nbits, ErrorDetail *reterr)
{
    const ModelFile *file = nbits->model->file;
    int32_t bos = tokenizer_bos(file->tokenizer);
    uint32_t limit = MIN((uint32_t)NBITS_TOKENS, nbits->model->options.context);
    int r = 0;

    if (tokenizer_add_bos(file->tokenizer) && bos >= 0)
        r = token_list_append(&nbits->list, &bos, 1);
    if (!r)
        r = tokenizer_encode(file->tokenizer, model_nbits_text, strlen(model_nbits_text), false, &nbits->list);
    if (r)
        return error_detail_set(reterr, r, "the text for automatic bits cannot be encoded");
    nbits->n_ids = (uint32_t)MIN(nbits->list.n, (size_t)limit);
    nbits->first = MIN(first_position(nbits->policy.form, nbits->n_ids), nbits->n_ids);
    return 0;
}

static int make_rooms(Nbits *nbits)
{
    uint32_t n_vocab = nbits->model->file->hparams.model.n_vocab, n_rows = nbits->n_ids - nbits->first;

    nbits->rows = measure_options(nbits->model->file, &nbits->model->options).max_rows;
    nbits->logits = calloc((size_t)nbits->rows * n_vocab, sizeof(*nbits->logits));
    nbits->p = calloc(n_vocab, sizeof(*nbits->p));
    nbits->reference.ends = calloc(n_rows, sizeof(*nbits->reference.ends));
    nbits->reference.rests = calloc(n_rows, sizeof(*nbits->reference.rests));
    return nbits->logits && nbits->p && nbits->reference.ends && nbits->reference.rests ? 0 : error_origin(-ENOMEM);
}

int nbits_new(Model *model, const KvPolicy *policy, Nbits **ret, ErrorDetail *reterr)
{
    _cleanup_(nbits_freep) Nbits *nbits = calloc(1, sizeof(*nbits));
    int r;

    if (!nbits)
        return error_origin(-ENOMEM);
    nbits->model = model;
    nbits->policy = *policy;
    nbits->list = TOKEN_LIST_NULL;
    r = nbits_load(model->file, model->options.exact, policy, &nbits->kept, &nbits->table, reterr);
    if (!r && nbits_next(&nbits->table, policy->kld_budget, &nbits->candidate))
        r = read_text(nbits, reterr);
    if (!r && nbits->n_ids > nbits->first)
        r = make_rooms(nbits);
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(nbits);
    return 0;
}

Nbits *nbits_free(Nbits *nbits)
{
    if (!nbits)
        return NULL;
    end_run(nbits);
    token_list_clear(&nbits->list);
    free(nbits->logits);
    free(nbits->p);
    free(nbits->reference.likely);
    free(nbits->reference.ends);
    free(nbits->reference.rests);
    free(nbits);
    return NULL;
}

/* The next run. */
static KvForm choose_run(Nbits *nbits)
{
    const NbitsEntry *entry = &nbits->table.entries[nbits->candidate];
    KvForm form = nbits->policy.form;

    if (!nbits->reference.complete) {
        nbits->run = RUN_REFERENCE;
        return kv_form_default(KV_FORM_F16);
    }
    if (nbits->table.rounding < 0) {
        nbits->run = RUN_ROUNDING;
        return kv_form_default(KV_FORM_F32);
    }
    nbits->run = RUN_CANDIDATE;
    form.k_bits = entry->k_bits;
    form.v_bits = entry->v_bits;
    return form;
}

static int begin_run(Nbits *nbits, ErrorDetail *reterr)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r = begin_run_in(nbits, choose_run(nbits), &detail);

    if (nbits->run == RUN_CANDIDATE && (r == -EINVAL || r == -ENOTSUP)) {
        refuse(nbits, detail.text);
        return 0;
    }
    if (r)
        return error_detail_set(reterr, r, "automatic bits: %.400s", detail.text);
    return 0;
}

int nbits_step(Nbits *nbits, bool *ret_done, ErrorDetail *reterr)
{
    int r = 0;

    *ret_done = false;
    if (!nbits->store) {
        /* A context too short to see anything coded measures nothing. */
        if (nbits->n_ids <= nbits->first || !nbits_next(&nbits->table, nbits->policy.kld_budget, &nbits->candidate)) {
            *ret_done = true;
            return 0;
        }
        r = begin_run(nbits, reterr);
    }
    if (!r && nbits->store)
        r = run_rows(nbits, reterr);
    return error_trace(r);
}
