/* SPDX-License-Identifier: Apache-2.0 */
/* Groups of the form leat: scale and offset searched for the least squared error.  Rules of kv-codec-internal.h. */

#include "quant/kv-codec-internal.h"

#include "quant/base/half.h"

#include <float.h>
#include <math.h>

#define N_REFINEMENTS 2
#define OFFSET_BITS   15u /* of a scale's f16, kv-codec.h */

/* reciprocal(): a first guess within 13 % from the exponent, then Newton steps to full precision. */
#define RECIPROCAL_SEED  0x7ef311c7u
#define RECIPROCAL_STEPS 4

/* 1 / x for normal x > 0 by a fixed number of exactly rounded steps: the same bits on every device, unlike OpenCL's division. */
static float reciprocal(float x)
{
    float y = float_from_bits(RECIPROCAL_SEED - float_to_bits(x));

    for (int i = 0; i < RECIPROCAL_STEPS; i++)
        y = fmaf(y, fmaf(-x, y, 1.0f), y);
    return y;
}

/* A group's scale and offset in quarter steps; both exact in what is stored. */
typedef struct Scale {
    float step, offset;
} Scale;

/* The f16 with four bits to spare that is nearest to @step; never NaN, negative or infinite. */
static uint16_t step_bits(float step)
{
    step = step > 0.0f ? step : 0.0f;
    step = step < 65024.0f ? step : 65024.0f;
    return (uint16_t)((half_from_float(step) + 8u) & ~OFFSET_BITS);
}

static float step_round(float step)
{
    return float_from_half(step_bits(step));
}

static float offset_clamp(float quarters)
{
    quarters = quarters > -8.0f ? quarters : -8.0f; /* NaN too */
    return quarters < 7.0f ? quarters : 7.0f;
}

static float step_inverse(float step)
{
    return reciprocal(step > 0.0f ? step : 1.0f);
}

static int level_code(float x, float inverse, float offset, int bits)
{
    float top = (float)((1 << bits) - 1), t = fmaf(x, inverse, (float)(1 << (bits - 1)) - 0.25f * offset);

    t = t > 0.0f ? t : 0.0f; /* NaN too */
    t = t < top ? t : top;
    return (int)t;
}

static float squared_error(const float *x, uint32_t n, int bits, Scale scale)
{
    float inverse = step_inverse(scale.step), middle = 0.5f * (float)((1 << bits) - 1) - 0.25f * scale.offset, error = 0.0f;

    for (uint32_t i = 0; i < n; i++) {
        float level = (float)level_code(x[i], inverse, scale.offset, bits) - middle, difference = fmaf(-level, scale.step, x[i]);

        error = fmaf(difference, difference, error);
    }
    return error;
}

/* Measured on groups of 64 Gaussian values against a full search (16 offsets, 100 scales): squared error 1 % above at 2 bits, 2 % at 3,
 * 3 % at 4, 4 % at 5, 8 % at 6. */
const float *kv_search(uint8_t bits)
{
    static const float two[KV_SEARCH_FLOATS] = {0.85f, 0.77f, 0.7f, 0.64f, 0.58f, 0.52f, 0.03f};
    static const float three[KV_SEARCH_FLOATS] = {1.0f, 0.93f, 0.87f, 0.81f, 0.75f, 0.69f, 0.025f};
    static const float four[KV_SEARCH_FLOATS] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.74f, 0.02f};
    static const float five[KV_SEARCH_FLOATS] = {1.0f, 0.97f, 0.94f, 0.91f, 0.88f, 0.84f, 0.015f};
    static const float six[KV_SEARCH_FLOATS] = {1.0f, 0.985f, 0.97f, 0.95f, 0.93f, 0.9f, 0.008f};
    static const float eight[KV_SEARCH_FLOATS] = {1.0f, 0.998f, 0.994f, 0.99f, 1.003f, 1.01f, 0.003f};

    return bits == 2 ? two : bits == 3 ? three : bits == 4 ? four : bits == 5 ? five : bits == 6 ? six : eight;
}

typedef struct Search {
    const float *x;
    uint32_t n;
    int bits;
    Scale best;
    float error; /* of the best */
} Search;

static void search_try(Search *search, Scale scale)
{
    float error = squared_error(search->x, search->n, search->bits, scale);

    if (error < search->error) {
        search->error = error;
        search->best = scale;
    }
}

/* Neighbours of the best: two offsets and two steps either way, twice. */
static void search_refine(Search *search, float relative_step)
{
    static const float moves[] = {-2.0f, -1.0f, 1.0f, 2.0f};

    for (int round = 0; round < N_REFINEMENTS; round++) {
        Scale from = search->best;

        for (int i = 0; i < 4; i++)
            search_try(search, (Scale){from.step, offset_clamp(from.offset + moves[i])});
        from = search->best;
        for (int i = 0; i < 4; i++)
            search_try(search, (Scale){step_round(from.step * fmaf(moves[i], relative_step, 1.0f)), from.offset});
    }
}

static Scale search_scale(const float *x, uint32_t n, int bits, KvLevels levels)
{
    Search search = {.x = x, .n = n, .bits = bits, .error = INFINITY};
    float low = FLT_MAX, high = -FLT_MAX, largest = 0.0f, cover, covered, top = (float)((1 << bits) - 1);
    const float *factors = kv_search((uint8_t)bits);

    for (uint32_t i = 0; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    }
    /* The range must fit, and its far end within reach of the offset: 7 / 4 steps. */
    cover = (high - low) * (1.0f / top);
    covered = largest * (1.0f / (0.5f * top + 1.75f));
    cover = cover > covered ? cover : covered;
    search.best = (Scale){step_round(cover), 0.0f};
    for (int i = 0; i < (levels == KV_LEVELS_PLAIN ? 1 : KV_N_FACTORS); i++) {
        float step = step_round(levels == KV_LEVELS_PLAIN ? cover : cover * factors[i]);
        float quarters = offset_clamp((high + low) * step_inverse(step) * 2.0f);

        search_try(&search, (Scale){step, (quarters + 12582912.0f) - 12582912.0f}); /* 1.5 * 2^23: to the nearest integer */
    }
    if (levels == KV_LEVELS_SEARCHED)
        search_refine(&search, factors[KV_SEARCH_STEP]);
    return search.best;
}

KvGroupScale kv_group_leat(const float *x, uint32_t n, int bits, KvLevels levels, uint8_t *ret_codes)
{
    Scale scale = search_scale(x, n, bits, levels);
    float inverse = step_inverse(scale.step);

    for (uint32_t i = 0; i < n; i++)
        ret_codes[i] = (uint8_t)level_code(x[i], inverse, scale.offset, bits);
    return (KvGroupScale){.scale = (uint16_t)(step_bits(scale.step) | (uint16_t)(int)(scale.offset + 8.0f))};
}
