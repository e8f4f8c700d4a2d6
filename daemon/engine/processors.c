/* SPDX-License-Identifier: Apache-2.0 */
/* Score processors.  See the header for their order. */

#include "daemon/engine/processors.h"

#include <math.h>
#include <string.h>

static bool in_vocab(int32_t id, uint32_t n_vocab)
{
    return id >= 0 && (uint32_t)id < n_vocab;
}

void processors_penalise(float *scores, uint32_t n_vocab, const int32_t *history, size_t n, float penalty, float *scratch)
{
    if (penalty == 1.0f)
        return;
    /* From the scores as they were, so that a token that occurs often is penalised once. */
    for (size_t i = 0; i < n; i++)
        if (in_vocab(history[i], n_vocab))
            scratch[history[i]] = scores[history[i]];
    for (size_t i = 0; i < n; i++)
        if (in_vocab(history[i], n_vocab)) {
            float score = scratch[history[i]];

            scores[history[i]] = score < 0 ? score * penalty : score / penalty;
        }
}

void processors_no_repeat_ngram(float *scores, uint32_t n_vocab, const int32_t *history, size_t n, uint32_t size)
{
    const int32_t *end;

    if (size == 0 || n + 1 < size)
        return;
    end = history + n - (size - 1); /* what the new token would complete */
    for (size_t i = 0; i + size <= n; i++)
        if (memcmp(history + i, end, (size - 1) * sizeof(*history)) == 0 && in_vocab(history[i + size - 1], n_vocab))
            scores[history[i + size - 1]] = -INFINITY;
}

static bool is_one_of(int32_t id, const int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

void processors_bad_words(float *scores, uint32_t n_vocab, const int32_t *history, size_t n, const int32_t *words, size_t n_word_ids,
                          const int32_t *eos, uint32_t n_eos)
{
    for (size_t i = 0, length; i < n_word_ids; i += length + 1) {
        for (length = 0; i + length < n_word_ids && words[i + length] >= 0; length++)
            continue;
        if (length == 0 || length - 1 > n || !in_vocab(words[i + length - 1], n_vocab) ||
            (length == 1 && is_one_of(words[i], eos, n_eos)))
            continue;
        if (memcmp(history + n - (length - 1), words + i, (length - 1) * sizeof(*words)) == 0)
            scores[words[i + length - 1]] = -INFINITY;
    }
}

void processors_forbid(float *scores, uint32_t n_vocab, const int32_t *ids, uint32_t n_ids)
{
    for (uint32_t i = 0; i < n_ids; i++)
        if (in_vocab(ids[i], n_vocab))
            scores[ids[i]] = -INFINITY;
}

/* ---- warping ------------------------------------------------------------------------------------------------------------------ */

/* The k-th largest of c[0..n), which is reordered (quickselect with the median of three). */
static float kth_largest(float *c, size_t n, size_t k)
{
    size_t low = 0, high = n;

    while (high - low > 1) {
        float a = c[low], b = c[low + (high - low) / 2], z = c[high - 1];
        float pivot = fmaxf(fminf(a, b), fminf(fmaxf(a, b), z));
        size_t above = low, i = low, equal_end = high;

        /* [low, above) > pivot, [above, i) == pivot, [equal_end, high) < pivot */
        while (i < equal_end) {
            float x = c[i];

            if (x > pivot) {
                c[i++] = c[above];
                c[above++] = x;
            } else if (x < pivot) {
                c[i] = c[--equal_end];
                c[equal_end] = x;
            } else {
                i++;
            }
        }
        if (k <= above)
            high = above;
        else if (k <= equal_end)
            return pivot;
        else
            low = equal_end;
    }
    return c[low];
}

static void keep_at_least(float *scores, uint32_t n_vocab, float least)
{
    for (uint32_t i = 0; i < n_vocab; i++)
        if (scores[i] < least)
            scores[i] = -INFINITY;
}

static void warp_top_k(float *scores, uint32_t n_vocab, uint32_t k, float *scratch)
{
    if (k >= n_vocab)
        return;
    memcpy(scratch, scores, n_vocab * sizeof(*scores));
    keep_at_least(scores, n_vocab, kth_largest(scratch, n_vocab, k));
}

static int compare_descending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;

    return x > y ? -1 : x < y;
}

static float max_of(const float *scores, uint32_t n)
{
    float max = -INFINITY;

    for (uint32_t i = 0; i < n; i++)
        max = MAX(max, scores[i]);
    return max;
}

/* Drops the least likely whose probabilities together are at most 1 - p.  Of equal scores at the border those with lower ids stay. */
static void warp_top_p(float *scores, uint32_t n_vocab, double p, uint32_t min_keep, float *scratch)
{
    float max = max_of(scores, n_vocab), least;
    double total = 0, sum = 0;
    uint32_t n = 0, n_equal = 0;

    for (uint32_t i = 0; i < n_vocab; i++)
        if (scores[i] > -INFINITY) {
            total += exp((double)scores[i] - (double)max);
            scratch[n++] = scores[i];
        }
    qsort(scratch, n, sizeof(*scratch), compare_descending);
    for (uint32_t i = 0; i < n; i++) {
        if (i >= min_keep && total - sum <= (1 - p) * total) {
            n = i;
            break;
        }
        sum += exp((double)scratch[i] - (double)max);
    }
    if (n == 0)
        return;
    least = scratch[n - 1];
    for (uint32_t i = 0; i < n; i++)
        n_equal += scratch[i] == least;
    for (uint32_t i = 0; i < n_vocab; i++)
        if (scores[i] < least || (scores[i] == least && n_equal == 0))
            scores[i] = -INFINITY;
        else if (scores[i] == least)
            n_equal--;
}

static void warp_min_p(float *scores, uint32_t n_vocab, double min_p, uint32_t min_keep, float *scratch)
{
    double least = (double)max_of(scores, n_vocab) + log(min_p);

    if (min_keep < n_vocab) {
        memcpy(scratch, scores, n_vocab * sizeof(*scores));
        least = MIN(least, (double)kth_largest(scratch, n_vocab, min_keep));
    }
    for (uint32_t i = 0; i < n_vocab; i++)
        if ((double)scores[i] < least)
            scores[i] = -INFINITY;
}

void processors_warp(float *scores, uint32_t n_vocab, const EngineSampling *s, uint32_t min_keep, float *scratch)
{
    if (s->temperature > 0 && s->temperature != 1)
        for (uint32_t i = 0; i < n_vocab; i++)
            scores[i] /= s->temperature;
    if (s->top_k > 0)
        warp_top_k(scores, n_vocab, MAX(s->top_k, min_keep), scratch);
    if (s->top_p < 1)
        warp_top_p(scores, n_vocab, (double)s->top_p, min_keep, scratch);
    if (s->min_p > 0)
        warp_min_p(scores, n_vocab, (double)s->min_p, min_keep, scratch);
}

void processors_forbid_all(float *scores, uint32_t n_vocab, const int32_t *history, size_t n, const ProcessorsState *state)
{
    const EngineSampling *s = state->sampling;

    if (s->no_repeat_ngram > 0)
        processors_no_repeat_ngram(scores, n_vocab, history, n, s->no_repeat_ngram);
    if (state->n_bad_words > 0)
        processors_bad_words(scores, n_vocab, history, n, state->bad_words, state->n_bad_words, state->eos, state->n_eos);
    if (n - state->n_prompt < s->min_tokens)
        processors_forbid(scores, n_vocab, state->eos, state->n_eos);
}

void processors_run(float *scores, uint32_t n_vocab, const int32_t *history, size_t n, const ProcessorsState *state, float *scratch)
{
    processors_penalise(scores, n_vocab, history, n, state->sampling->repeat_penalty, scratch);
    processors_forbid_all(scores, n_vocab, history, n, state);
    if (state->draws)
        processors_warp(scores, n_vocab, state->sampling, MAX(2u, 1 + state->n_eos), scratch);
}
