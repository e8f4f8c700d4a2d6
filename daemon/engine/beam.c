/* SPDX-License-Identifier: Apache-2.0 */
/* Beam search.  See the header for the rules. */

#include "daemon/engine/beam.h"
#include "daemon/engine/log-softmax.h"
#include "daemon/engine/sampler.h"
#include "quant/base/checked.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

/* What upstream calls minus infinity, and subtracts from scores that must not win. */
#define BEAM_MINUS 1e9f
/* The largest Gumbel noise that a 53-bit uniform number gives is -log(2^-53) = 36.7. */
#define BEAM_MAX_NOISE 37.0
#define BEAM_NO_NODE UINT32_MAX

/* One generated token; a sequence is the way back to the root. */
typedef struct BeamNode {
    uint32_t parent;
    int32_t token;
    uint32_t beam; /* that it was appended to */
} BeamNode;

typedef struct BeamCandidate {
    double key;    /* rank of selection: the score, or the score with noise */
    float score;
    uint32_t beam;
    int32_t token;
    BeamStop stop;
} BeamCandidate;

typedef struct BeamSlot {
    float score; /* normalised */
    bool finished;
    uint32_t node, n_tokens;
    BeamStop stop;
} BeamSlot;

struct BeamSearch {
    BeamOptions options;
    int32_t *eos;
    uint32_t n_candidates; /* K */

    uint32_t length; /* tokens that each running beam has */
    uint32_t n_rows; /* fed in this step */
    bool *fed;       /* (n_beams) */
    float *scores;   /* (n_beams) of the running beams */
    uint32_t *running; /* (n_beams) their nodes */
    uint32_t *sources, *picked; /* (n_beams) */

    BeamCandidate *candidates; /* (K): a heap with the worst at the top while rows come in */
    uint32_t n;
    BeamSlot *slots, *merged; /* (n_beams), (n_beams + K) */
    bool improvable;

    BeamNode *nodes;
    size_t n_nodes, node_capacity;
};

static int beam_check(const BeamOptions *o, ErrorDetail *reterr)
{
    if (o->n_beams == 0 || o->n_vocab == 0 || o->n_vocab > INT32_MAX || o->max_new_tokens == 0)
        return error_detail_set(reterr, -EINVAL, "beam search needs beams, a vocabulary and room for a token, got %u, %u and %u", o->n_beams,
                                o->n_vocab, o->max_new_tokens);
    if (!(o->length_penalty >= -100 && o->length_penalty <= 100))
        return error_detail_set(reterr, -EINVAL, "length-penalty is %g, it must be from -100 to 100", o->length_penalty);
    if ((unsigned)o->early_stopping >= BEAM_EARLY_X_MAX)
        return error_detail_set(reterr, -EINVAL, "early-stopping is %d, it must be false, true or never", (int)o->early_stopping);
    return 0;
}

static int beam_allocate(BeamSearch *search)
{
    uint32_t n_beams = search->options.n_beams;
    uint64_t k = (uint64_t)n_beams * MAX(2u, 1 + search->options.n_eos);

    /* More candidates than there are continuations do not exist. */
    k = MIN(k, (uint64_t)n_beams * search->options.n_vocab);
    if (search->options.n_eos >= search->options.n_vocab || k > UINT32_MAX / 2)
        return error_origin(-EINVAL);
    search->n_candidates = (uint32_t)k;
    search->eos = calloc(search->options.n_eos + 1, sizeof(*search->eos));
    search->fed = calloc(n_beams, sizeof(*search->fed));
    search->scores = calloc(n_beams, sizeof(*search->scores));
    search->running = calloc(n_beams, sizeof(*search->running));
    search->sources = calloc(n_beams, sizeof(*search->sources));
    search->picked = calloc(n_beams, sizeof(*search->picked));
    search->candidates = calloc(search->n_candidates, sizeof(*search->candidates));
    search->slots = calloc(n_beams, sizeof(*search->slots));
    search->merged = calloc((size_t)n_beams + search->n_candidates, sizeof(*search->merged));
    if (!search->eos || !search->fed || !search->scores || !search->running || !search->sources || !search->picked ||
        !search->candidates || !search->slots || !search->merged)
        return error_origin(-ENOMEM);
    return 0;
}

int beam_search_new(const BeamOptions *options, BeamSearch **ret, ErrorDetail *reterr)
{
    _cleanup_(beam_search_freep) BeamSearch *search = NULL;
    int r;

    r = beam_check(options, reterr);
    if (r < 0)
        return error_trace(r);
    search = calloc(1, sizeof(*search));
    if (!search)
        return error_origin(-ENOMEM);
    search->options = *options;
    r = beam_allocate(search);
    if (r < 0)
        return error_trace(r);
    if (options->n_eos > 0)
        memcpy(search->eos, options->eos, options->n_eos * sizeof(*options->eos));
    search->options.eos = search->eos;
    search->improvable = true;
    for (uint32_t i = 0; i < options->n_beams; i++) {
        search->scores[i] = i == 0 ? 0 : -BEAM_MINUS;
        search->running[i] = BEAM_NO_NODE;
        search->slots[i] = (BeamSlot){.score = -BEAM_MINUS, .node = BEAM_NO_NODE};
    }
    *ret = TAKE_PTR(search);
    return 0;
}

BeamSearch *beam_search_free(BeamSearch *search)
{
    if (!search)
        return NULL;
    free(search->eos);
    free(search->fed);
    free(search->scores);
    free(search->running);
    free(search->sources);
    free(search->picked);
    free(search->candidates);
    free(search->slots);
    free(search->merged);
    free(search->nodes);
    free(search);
    return NULL;
}

/* ---- candidates ------------------------------------------------------------------------------------------------------------- */

/* Whether a ranks before b: a total order, so that what is kept does not depend on the order of rows. */
static bool candidate_before(const BeamCandidate *a, const BeamCandidate *b)
{
    if (a->key > b->key || a->key < b->key)
        return a->key > b->key;
    return a->beam != b->beam ? a->beam < b->beam : a->token < b->token;
}

static int compare_by_score(const void *x, const void *y)
{
    const BeamCandidate *a = x, *b = y;

    if (a->score > b->score || a->score < b->score)
        return a->score > b->score ? -1 : 1;
    if (a->beam != b->beam)
        return a->beam < b->beam ? -1 : 1;
    return a->token < b->token ? -1 : a->token > b->token;
}

static void swap_candidates(BeamCandidate *a, BeamCandidate *b)
{
    BeamCandidate t = *a;

    *a = *b;
    *b = t;
}

static void sift_down(BeamCandidate *heap, uint32_t n)
{
    for (uint32_t i = 0, worst;; i = worst) {
        uint32_t left = 2 * i + 1, right = left + 1;

        worst = i;
        if (left < n && candidate_before(&heap[worst], &heap[left]))
            worst = left;
        if (right < n && candidate_before(&heap[worst], &heap[right]))
            worst = right;
        if (worst == i)
            return;
        swap_candidates(&heap[i], &heap[worst]);
    }
}

static void sift_up(BeamCandidate *heap, uint32_t i)
{
    while (i > 0 && candidate_before(&heap[(i - 1) / 2], &heap[i])) {
        swap_candidates(&heap[(i - 1) / 2], &heap[i]);
        i = (i - 1) / 2;
    }
}

static void offer(BeamSearch *search, const BeamCandidate *candidate)
{
    if (search->n < search->n_candidates) {
        search->candidates[search->n] = *candidate;
        sift_up(search->candidates, search->n++);
    } else if (candidate_before(candidate, &search->candidates[0])) {
        search->candidates[0] = *candidate;
        sift_down(search->candidates, search->n);
    }
}

/* The key below which nothing has a chance any more. */
static double threshold(const BeamSearch *search)
{
    return search->n < search->n_candidates ? -INFINITY : search->candidates[0].key;
}

/* Keys are scores here, so that the threshold is a float32 too. */
static void feed_scores(BeamSearch *search, uint32_t beam, const float *log_probs)
{
    float running = search->scores[beam];
    uint32_t n = search->options.n_vocab;

    for (uint32_t i = 0; (i = log_softmax_next(log_probs, i, n, running, (float)threshold(search))) < n; i++) {
        float score = log_probs[i] + running;

        offer(search, &(BeamCandidate){.key = (double)score, .score = score, .beam = beam, .token = (int32_t)i});
    }
}

static double gumbel(double u)
{
    return -log(-log(MAX(u, 0x1p-60))); /* 0 may come: far below any other, yet finite */
}

/* Whether score + gumbel(u) is below @least for certain: -log(u) is at least 1 - u, so the two logarithms are mostly not needed.  The
 * margin is more than the rounding of expf(). */
static bool is_hopeless(float score, double u, double least)
{
    return least > -INFINITY && 1 - u > (double)(expf((float)((double)score - least)) * 1.001f);
}

static void feed_draws(BeamSearch *search, uint32_t beam, const float *log_probs)
{
    float running = search->scores[beam];
    uint64_t place = ((uint64_t)search->length * search->options.n_beams + beam) * search->options.n_vocab;
    double least = threshold(search);

    for (uint32_t i = 0; i < search->options.n_vocab; i++) {
        BeamCandidate candidate = {.score = log_probs[i] + running, .beam = beam, .token = (int32_t)i};
        double u;

        if ((double)candidate.score + BEAM_MAX_NOISE < least)
            continue;
        u = sampler_uniform(search->options.seed, place + i);
        if (is_hopeless(candidate.score, u, least))
            continue;
        candidate.key = (double)candidate.score + gumbel(u);
        offer(search, &candidate);
        least = threshold(search);
    }
}

void beam_search_row(BeamSearch *search, uint32_t beam, const float *log_probs)
{
    assert(beam < search->options.n_beams && !search->fed[beam]);
    search->fed[beam] = true;
    search->n_rows++;
    if (search->options.sample)
        feed_draws(search, beam, log_probs);
    else
        feed_scores(search, beam, log_probs);
}

/* ---- a step ------------------------------------------------------------------------------------------------------------------ */

static bool is_eos(const BeamSearch *search, int32_t token)
{
    for (uint32_t i = 0; i < search->options.n_eos; i++)
        if (search->eos[i] == token)
            return true;
    return false;
}

static BeamStop judge(const BeamSearch *search, const BeamCandidate *candidate)
{
    const BeamOptions *o = &search->options;

    if (is_eos(search, candidate->token))
        return BEAM_STOP_EOS;
    if (o->stops && o->stops(o->userdata, candidate->beam, candidate->token))
        return BEAM_STOP_CRITERION;
    return search->length + 1 >= o->max_new_tokens ? BEAM_STOP_LENGTH : BEAM_STOP_NONE;
}

/* length^penalty, kept where a division by it neither overflows nor is one by zero. */
static float length_divisor(uint32_t length, double penalty)
{
    float divisor = (float)pow((double)length, penalty);

    return fmaxf(FLT_MIN, fminf(FLT_MAX, divisor));
}

/* The index of the best of @scores that was not taken yet; ties go to the first. */
static uint32_t best_left(const float *scores, bool *taken, uint32_t n)
{
    uint32_t best = UINT32_MAX;

    for (uint32_t i = 0; i < n; i++)
        if (!taken[i] && (best == UINT32_MAX || scores[i] > scores[best]))
            best = i;
    taken[best] = true;
    return best;
}

/* Room for one more node for each beam and each candidate that may enter a slot. */
static int reserve_nodes(BeamSearch *search)
{
    size_t needed = search->n_nodes + 2 * (size_t)search->options.n_beams;
    BeamNode *nodes;

    if (needed <= search->node_capacity)
        return 0;
    needed += needed / 2;
    if (needed >= BEAM_NO_NODE)
        return error_origin(-EOVERFLOW);
    nodes = reallocarray(search->nodes, needed, sizeof(*nodes));
    if (!nodes)
        return error_origin(-ENOMEM);
    search->nodes = nodes;
    search->node_capacity = needed;
    return 0;
}

static uint32_t add_node(BeamSearch *search, const uint32_t *running, const BeamCandidate *candidate)
{
    search->nodes[search->n_nodes] =
        (BeamNode){.parent = running[candidate->beam], .token = candidate->token, .beam = candidate->beam};
    return (uint32_t)search->n_nodes++;
}

/* Merges the stopped candidates among the best n_beams into the slots. */
static void update_slots(BeamSearch *search)
{
    uint32_t n_beams = search->options.n_beams, n = n_beams;
    float divisor = length_divisor(search->length + 1, search->options.length_penalty);
    bool full = search->options.early_stopping == BEAM_EARLY_TRUE;

    for (uint32_t i = 0; i < n_beams; i++) {
        full = full && search->slots[i].finished;
        search->merged[i] = search->slots[i];
    }
    if (full || !search->improvable)
        return; /* upstream lowers the new scores by 1e9 instead, so that none gets in */
    for (uint32_t i = 0; i < MIN(n_beams, search->n); i++) {
        const BeamCandidate *c = &search->candidates[i];

        if (c->stop != BEAM_STOP_NONE)
            search->merged[n++] = (BeamSlot){.score = c->score / divisor,
                                             .finished = true,
                                             .node = add_node(search, search->running, c),
                                             .n_tokens = search->length + 1,
                                             .stop = c->stop};
    }
    /* A stable insertion sort of a few: of equal scores the earlier found stays before. */
    for (uint32_t i = 1; i < n; i++) {
        BeamSlot slot = search->merged[i];
        uint32_t j = i;

        for (; j > 0 && slot.score > search->merged[j - 1].score; j--)
            search->merged[j] = search->merged[j - 1];
        search->merged[j] = slot;
    }
    memcpy(search->slots, search->merged, n_beams * sizeof(*search->slots));
}

/* The n_beams best candidates that go on; a stopped one only when there is nothing else. */
static int update_running(BeamSearch *search)
{
    uint32_t n_beams = search->options.n_beams;
    _cleanup_(freep) float *scores = calloc(search->n, sizeof(*scores));
    _cleanup_(freep) bool *taken = calloc(search->n, sizeof(*taken));
    _cleanup_(freep) uint32_t *nodes = calloc(n_beams, sizeof(*nodes));

    if (!scores || !taken || !nodes)
        return error_origin(-ENOMEM);
    for (uint32_t i = 0; i < search->n; i++)
        scores[i] = search->candidates[i].score + (search->candidates[i].stop != BEAM_STOP_NONE ? -BEAM_MINUS : 0.0f);
    for (uint32_t b = 0; b < n_beams; b++) {
        search->picked[b] = best_left(scores, taken, search->n);
        nodes[b] = add_node(search, search->running, &search->candidates[search->picked[b]]);
    }
    for (uint32_t b = 0; b < n_beams; b++) {
        search->scores[b] = scores[search->picked[b]];
        search->sources[b] = search->candidates[search->picked[b]].beam;
        search->running[b] = nodes[b];
    }
    return 0;
}

/* Whether the best running beam may still beat the worst slot. */
static bool may_improve(const BeamSearch *search)
{
    const BeamOptions *o = &search->options;
    uint32_t length = o->early_stopping == BEAM_EARLY_NEVER && o->length_penalty > 0 ? o->max_new_tokens : search->length;
    float best = search->scores[0] / length_divisor(length, o->length_penalty), worst = INFINITY;

    for (uint32_t i = 0; i < o->n_beams; i++)
        worst = MIN(worst, search->slots[i].score);
    for (uint32_t i = 0; i < o->n_beams; i++)
        if (best > (search->slots[i].finished ? worst : -BEAM_MINUS))
            return true;
    return false;
}

static bool is_over(const BeamSearch *search)
{
    bool full = search->options.early_stopping == BEAM_EARLY_TRUE, stopped = true;

    for (uint32_t i = 0; i < search->options.n_beams && full; i++)
        full = search->slots[i].finished;
    for (uint32_t i = 0; i < search->n && stopped; i++)
        stopped = search->candidates[i].stop != BEAM_STOP_NONE;
    return !search->improvable || full || stopped;
}

int beam_search_step(BeamSearch *search)
{
    bool over;
    int r;

    if (search->n_rows != search->options.n_beams)
        return error_origin(-EINVAL);
    r = reserve_nodes(search);
    if (r < 0)
        return error_trace(r);
    qsort(search->candidates, search->n, sizeof(*search->candidates), compare_by_score);
    for (uint32_t i = 0; i < search->n; i++)
        search->candidates[i].stop = judge(search, &search->candidates[i]);
    update_slots(search); /* before the running beams move on: slots continue the old ones */
    r = update_running(search);
    if (r < 0)
        return error_trace(r);
    search->length++;
    search->improvable = search->improvable && may_improve(search);
    over = is_over(search);
    search->n_rows = 0;
    memset(search->fed, 0, search->options.n_beams * sizeof(*search->fed));
    search->n = 0;
    return over;
}

/* ---- what came of it ---------------------------------------------------------------------------------------------------------- */

uint32_t beam_search_source(const BeamSearch *search, uint32_t beam)
{
    return search->sources[beam];
}

int32_t beam_search_token(const BeamSearch *search, uint32_t beam)
{
    return search->nodes[search->running[beam]].token;
}

float beam_search_score(const BeamSearch *search, uint32_t beam)
{
    return search->scores[beam];
}

uint32_t beam_search_length(const BeamSearch *search)
{
    return search->length;
}

uint32_t beam_search_n_results(const BeamSearch *search)
{
    uint32_t n = 0;

    while (n < search->options.n_beams && search->slots[n].finished)
        n++;
    return n;
}

void beam_search_result(const BeamSearch *search, uint32_t index, BeamResult *ret)
{
    const BeamSlot *slot = &search->slots[index];

    *ret = (BeamResult){.score = slot->score, .n_tokens = slot->n_tokens, .stop = slot->stop};
}

void beam_search_tokens(const BeamSearch *search, uint32_t index, int32_t *ret_tokens, uint32_t *ret_beams)
{
    uint32_t i = search->slots[index].n_tokens;

    for (uint32_t node = search->slots[index].node; node != BEAM_NO_NODE; node = search->nodes[node].parent) {
        i--;
        ret_tokens[i] = search->nodes[node].token;
        if (ret_beams)
            ret_beams[i] = search->nodes[node].beam;
    }
    assert(i == 0);
}
