/* SPDX-License-Identifier: Apache-2.0 */
/* Penalties, top-k, top-p, min-p, temperature, draw.  See the header for the order. */

#include "daemon/engine/sampler.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Where the search for the top-p set begins: most distributions have their mass in far fewer tokens. */
#define SAMPLER_FIRST_SELECTION 256

typedef struct Candidate {
    float logit;
    int32_t id;
} Candidate;

struct Sampler {
    EngineSampling sampling;
    uint64_t seed, n_draws;
    uint32_t n_vocab;
    Candidate *candidates; /* (n_vocab), NULL when greedy */
    bool constrained;
    ProcessorsState constraints;
};

/* Beams, and how many sequences come back. */
static int check_several(const EngineSampling *s, ErrorDetail *reterr)
{
    uint32_t n_beams = MAX(s->num_beams, 1u);

    if (n_beams > ENGINE_MAX_BEAMS)
        return error_detail_set(reterr, -EINVAL, "num-beams is %u, it must be from 1 to %d", n_beams, ENGINE_MAX_BEAMS);
    if (s->num_return_sequences > ENGINE_MAX_RETURN)
        return error_detail_set(reterr, -EINVAL, "num-return-sequences is %u, it must be from 1 to %d", s->num_return_sequences,
                                ENGINE_MAX_RETURN);
    if (n_beams > 1 && s->num_return_sequences > n_beams)
        return error_detail_set(reterr, -EINVAL, "num-return-sequences is %u, with num-beams %u it must be from 1 to %u",
                                s->num_return_sequences, n_beams, n_beams);
    if ((unsigned)s->draw >= ENGINE_DRAW_X_MAX || (unsigned)s->early_stopping >= BEAM_EARLY_X_MAX)
        return error_detail_set(reterr, -EINVAL, "do-sample or early-stopping is none of their values");
    if (s->draw == ENGINE_DRAW_YES && s->temperature <= 0)
        return error_detail_set(reterr, -EINVAL, "temperature is 0, with do-sample it must be above 0");
    if (n_beams == 1 && s->num_return_sequences > 1 && !engine_sampling_draws(s))
        return error_detail_set(reterr, -EINVAL,
                                "num-return-sequences is %u, it must be 1 when nothing is drawn (do-sample, temperature above 0) and "
                                "there are no beams (num-beams)",
                                s->num_return_sequences);
    if (n_beams > 1 && !(s->length_penalty >= -100 && s->length_penalty <= 100))
        return error_detail_set(reterr, -EINVAL, "length-penalty is %g, it must be from -100 to 100", s->length_penalty);
    return 0;
}

int sampler_check(const EngineSampling *sampling, ErrorDetail *reterr)
{
    const EngineSampling *s = sampling;

    if (s->max_tokens > 0 && s->min_tokens > s->max_tokens)
        return error_detail_set(reterr, -EINVAL, "min-tokens is %u, with max-tokens %u it must be at most that", s->min_tokens, s->max_tokens);
    if (!(s->temperature >= 0 && s->temperature <= 100))
        return error_detail_set(reterr, -EINVAL, "temperature is %g, it must be from 0 to 100", (double)s->temperature);
    if (!(s->top_p >= 0 && s->top_p <= 1))
        return error_detail_set(reterr, -EINVAL, "top-p is %g, it must be from 0 to 1", (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return error_detail_set(reterr, -EINVAL, "min-p is %g, it must be from 0 to 1", (double)s->min_p);
    if (!(s->repeat_penalty > 0 && s->repeat_penalty <= 100))
        return error_detail_set(reterr, -EINVAL, "repeat-penalty is %g, it must be above 0 and at most 100", (double)s->repeat_penalty);
    for (size_t i = 0; i < s->n_stop; i++)
        if (!s->stop[i] || !s->stop[i][0])
            return error_detail_set(reterr, -EINVAL, "stop string %zu is empty", i + 1);
    for (size_t i = 0; i < s->n_bad_words; i++)
        if (!s->bad_words[i] || !s->bad_words[i][0])
            return error_detail_set(reterr, -EINVAL, "bad-words: text %zu is empty", i + 1);
    return check_several(s, reterr);
}

int sampler_new(const EngineSampling *sampling, uint64_t seed, uint32_t n_vocab, Sampler **ret, ErrorDetail *reterr)
{
    _cleanup_(sampler_freep) Sampler *sampler = NULL;
    int r;

    r = sampler_check(sampling, reterr);
    if (r < 0)
        return error_trace(r);
    if (n_vocab == 0 || n_vocab > INT32_MAX)
        return error_origin(-EINVAL);
    sampler = calloc(1, sizeof(*sampler));
    if (!sampler)
        return error_origin(-ENOMEM);
    sampler->sampling = *sampling;
    sampler->sampling.stop = sampler->sampling.bad_words = NULL;
    sampler->sampling.n_stop = sampler->sampling.n_bad_words = 0;
    sampler->seed = seed;
    sampler->n_vocab = n_vocab;
    if (engine_sampling_draws(sampling)) {
        sampler->candidates = calloc(n_vocab, sizeof(*sampler->candidates));
        if (!sampler->candidates)
            return error_origin(-ENOMEM);
    }
    *ret = TAKE_PTR(sampler);
    return 0;
}

Sampler *sampler_free(Sampler *sampler)
{
    if (!sampler)
        return NULL;
    free(sampler->candidates);
    free(sampler);
    return NULL;
}

/* ---- numbers -------------------------------------------------------------------------------------------------------------- */

/* A bijection of 64 bits in which every input bit moves every output bit: two rounds of xor-shift and odd multiplication. */
static uint64_t mix(uint64_t x)
{
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    x ^= x >> 32;
    return x;
}

double sampler_uniform(uint64_t seed, uint64_t index)
{
    /* Weyl steps by 2^64 / golden ratio spread consecutive indices; mixing the seed first keeps the streams of seeds 1 and 2 apart. */
    uint64_t bits = mix(mix(seed) + (index + 1) * UINT64_C(0x9e3779b97f4a7c15));

    return (double)(bits >> 11) * 0x1p-53;
}

void sampler_constrain(Sampler *sampler, const ProcessorsState *state)
{
    sampler->constraints = *state;
    sampler->constraints.sampling = &sampler->sampling;
    sampler->constrained = true;
}

int sampler_check_finite(const float *logits, uint32_t n, ErrorDetail *reterr)
{
    uint32_t bad = 0;

    /* One pass without a branch per element: the exponent of NaN and of infinity is all ones. */
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits;

        memcpy(&bits, &logits[i], sizeof(bits));
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    if (!bad)
        return 0;
    for (uint32_t i = 0; i < n; i++)
        if (!isfinite(logits[i]))
            return error_detail_set(reterr, SAMPLER_E_NUMERIC, "the logit of token %u is %s", i,
                                    isnan(logits[i]) ? "not a number" : "infinite");
    return 0;
}

static void penalise(const Sampler *sampler, float *logits, const int32_t *history, size_t n)
{
    float penalty = sampler->sampling.repeat_penalty;
    size_t first = n > SAMPLER_PENALTY_TOKENS ? n - SAMPLER_PENALTY_TOKENS : 0;

    if (penalty == 1.0f)
        return;
    for (size_t i = first; i < n; i++) {
        bool seen = history[i] < 0 || (uint32_t)history[i] >= sampler->n_vocab;

        for (size_t j = first; j < i && !seen; j++)
            seen = history[j] == history[i]; /* once a token, however often it occurs */
        if (!seen) {
            float *logit = &logits[history[i]];

            *logit = *logit > 0 ? *logit / penalty : *logit * penalty;
            *logit = fmaxf(-FLT_MAX, fminf(FLT_MAX, *logit)); /* finite stays finite */
        }
    }
}

static int32_t greedy(const float *logits, uint32_t n)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return (int32_t)best;
}

/* ---- selection ------------------------------------------------------------------------------------------------------------ */

/* Whether a comes before b: larger logit, then lower id.  A total order, so the kept set never depends on the algorithm. */
static bool before(const Candidate *a, const Candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

static int compare(const void *a, const void *b)
{
    const Candidate *x = a, *y = b;

    return before(x, y) ? -1 : before(y, x) ? 1 : 0;
}

static void swap(Candidate *a, Candidate *b)
{
    Candidate t = *a;

    *a = *b;
    *b = t;
}

/* Moves the k best of c[0..n) to the front, in any order (quickselect with the median of three). */
static void select_best(Candidate *c, size_t n, size_t k)
{
    size_t low = 0, high = n;

    while (high - low > 1 && k > low && k < high) {
        size_t middle = low + (high - low) / 2, i = low, j = high - 1;
        Candidate pivot;

        if (before(&c[middle], &c[low]))
            swap(&c[middle], &c[low]);
        if (before(&c[high - 1], &c[low]))
            swap(&c[high - 1], &c[low]);
        if (before(&c[high - 1], &c[middle]))
            swap(&c[high - 1], &c[middle]);
        pivot = c[middle];
        for (;;) {
            while (before(&c[i], &pivot))
                i++;
            while (before(&pivot, &c[j]))
                j--;
            if (i >= j)
                break;
            swap(&c[i++], &c[j--]);
        }
        /* c[low..i) <= pivot <= c[i..high) in order of rank; both sides are smaller than before. */
        if (i == low)
            i = low + 1;
        if (k <= i)
            high = i;
        else
            low = i;
    }
}

static double sum_of(const Candidate *c, size_t n, float max)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += exp((double)c[i].logit - (double)max);
    return sum;
}

/* The fewest best whose probabilities reach p; the front is sorted afterwards.  Returns how many. */
static size_t keep_top_p(Candidate *c, size_t n, float max, double p)
{
    double total = sum_of(c, n, max), sum = 0;
    size_t done = 0, take = MIN(n, (size_t)SAMPLER_FIRST_SELECTION);

    for (;;) {
        select_best(c + done, n - done, take - done);
        qsort(c + done, take - done, sizeof(*c), compare);
        for (; done < take; done++) {
            sum += exp((double)c[done].logit - (double)max);
            if (sum >= p * total)
                return done + 1;
        }
        if (take == n)
            return n; /* rounding: the sum in another order fell short by a last bit */
        take = take > n / 4 ? n : take * 4;
    }
}

static int32_t draw(Sampler *sampler, const Candidate *c, size_t n, float max)
{
    double temperature = (double)sampler->sampling.temperature, total = 0, at;

    for (size_t i = 0; i < n; i++)
        total += exp(((double)c[i].logit - (double)max) / temperature);
    at = sampler_uniform(sampler->seed, sampler->n_draws++) * total;
    for (size_t i = 0; i < n; i++) {
        at -= exp(((double)c[i].logit - (double)max) / temperature);
        if (at < 0)
            return c[i].id;
    }
    /* Rounding ate the last sliver: the best is always possible. */
    for (size_t i = 0; i < n; i++)
        if (c[i].logit == max)
            return c[i].id;
    return c[0].id;
}

int sampler_pick(Sampler *sampler, float *logits, const int32_t *history, size_t n_history, int32_t *ret_token, ErrorDetail *reterr)
{
    const EngineSampling *s = &sampler->sampling;
    Candidate *c = sampler->candidates;
    size_t n = sampler->n_vocab;
    float max;
    int r;

    r = sampler_check_finite(logits, sampler->n_vocab, reterr);
    if (r)
        return r;
    penalise(sampler, logits, history, n_history);
    if (sampler->constrained)
        processors_forbid_all(logits, sampler->n_vocab, history, n_history, &sampler->constraints);
    *ret_token = greedy(logits, sampler->n_vocab);
    if (!c)
        return 0;

    max = logits[*ret_token];
    for (uint32_t i = 0; i < sampler->n_vocab; i++)
        c[i] = (Candidate){logits[i], (int32_t)i};
    if (s->top_k > 0 && s->top_k < n) {
        select_best(c, n, s->top_k);
        n = s->top_k;
        /* Selection leaves an order that depends on the pivots: sort the few, so that the draw does not. */
        qsort(c, n, sizeof(*c), compare);
    }
    if (s->top_p < 1)
        n = keep_top_p(c, n, max, (double)s->top_p);
    if (s->min_p > 0) {
        double floor = (double)max + log((double)s->min_p);
        size_t kept = 0;

        for (size_t i = 0; i < n; i++)
            if ((double)c[i].logit >= floor)
                c[kept++] = c[i];
        n = kept;
    }
    *ret_token = draw(sampler, c, n, max);
    return 0;
}
