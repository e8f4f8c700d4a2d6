/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a group of values becomes codes: must equal quant/kv-group-leat.c and quant/kv-group-affine.c (with the references behind it,
 * quant/kv-quanto.c, kv-hqq.c and kv-fp8.c) bit for bit, so every step there has its counterpart here in the same order.  A lane is a
 * token: x[d] holds dim d of W tokens.
 *
 * Each form defines  coder_make(): what the codes of a group are made with, and the bits of scale and zero that are stored;
 *                    coder_code(): the code of one value.
 */

#define TO_INTEGER 12582912.0f /* 1.5 * 2^23: adding it rounds to the nearest integer */

/* What codes are made with.  leat: 1 / step, offset in quarter steps; quanto: scale, low; hqq: inverse scale, zero; fp8: scale. */
typedef struct { vfloat a, b; } Coder;

static inline vfloat integer_round(vfloat x)
{
    return (x + TO_INTEGER) - TO_INTEGER;
}

static inline vfloat reciprocal(vfloat x)
{
    vfloat y = AS_VFLOAT((vuint)(0x7ef311c7u) - AS_VUINT(x));

    for (int i = 0; i < 4; i++)
        y = fma(y, fma(-x, y, (vfloat)(1.0f)), y);
    return y;
}

/* a / x, rounded correctly: the remainder is exact. */
static inline vfloat quotient(vfloat a, vfloat x)
{
    vfloat y = reciprocal(x), q = a * y;

    return fma(fma(-q, x, a), y, q);
}

/* Bits of the half nearest to a finite x >= 0 below 65520. */
static inline vuint half_bits(vfloat x)
{
    vuint bits = AS_VUINT(x), rounded = bits + 0xfffu + ((bits >> 13) & 1u);

    return bits < 0x38800000u ? AS_VUINT(x + 0.5f) - 0x3f000000u : (rounded - 0x38000000u) >> 13;
}

static inline vfloat half_value(vuint bits)
{
    return bits < 0x400u ? TO_VFLOAT(AS_VINT(bits)) * 0x1p-24f : AS_VFLOAT((bits << 13) + 0x38000000u);
}

static inline vfloat clamp_code(vfloat t, float top)
{
    t = t > 0.0f ? t : (vfloat)(0.0f);
    return t < top ? t : (vfloat)(top);
}

#if FORM == 2

static inline vfloat step_inverse(vfloat step)
{
    return reciprocal(step > 0.0f ? step : (vfloat)(1.0f));
}

static inline vuint step_bits(vfloat step)
{
    step = step > 0.0f ? step : (vfloat)(0.0f);
    step = step < 65024.0f ? step : (vfloat)(65024.0f);
    return (half_bits(step) + 8u) & ~15u;
}

static inline vfloat step_round(vfloat step)
{
    return half_value(step_bits(step));
}

static inline vfloat offset_clamp(vfloat quarters)
{
    quarters = quarters > -8.0f ? quarters : (vfloat)(-8.0f);
    return quarters < 7.0f ? quarters : (vfloat)(7.0f);
}

static inline vint level_codes(vfloat x, vfloat inverse, vfloat quarters, int bits)
{
    return TO_VINT(clamp_code(fma(x, inverse, (float)(1 << (bits - 1)) - 0.25f * quarters), (float)((1 << bits) - 1)));
}

typedef struct {
    const vfloat *x;
    int n, bits;
    vfloat step, quarters, error; /* the best */
} Search;

static inline void search_try(Search *search, vfloat step, vfloat quarters)
{
    const float half_top = 0.5f * (float)((1 << search->bits) - 1);
    vfloat inverse = step_inverse(step), middle = half_top - 0.25f * quarters, error = 0.0f;

    for (int i = 0; i < search->n; i++) {
        vfloat level = TO_VFLOAT(level_codes(search->x[i], inverse, quarters, search->bits)) - middle;
        vfloat difference = fma(-level, step, search->x[i]);

        error = fma(difference, difference, error);
    }
    search->step = error < search->error ? step : search->step;
    search->quarters = error < search->error ? quarters : search->quarters;
    search->error = error < search->error ? error : search->error;
}

static inline void search_refine(Search *search, float relative_step)
{
    const float moves[4] = {-2.0f, -1.0f, 1.0f, 2.0f};

    for (int round = 0; round < 2; round++) {
        vfloat step = search->step, quarters = search->quarters;

        for (int i = 0; i < 4; i++)
            search_try(search, step, offset_clamp(quarters + moves[i]));
        step = search->step;
        quarters = search->quarters;
        for (int i = 0; i < 4; i++)
            search_try(search, step_round(step * fma(moves[i], relative_step, 1.0f)), quarters);
    }
}

static inline Search search_scale(const vfloat *x, int n, int bits, float8 factors)
{
    const float top = (float)((1 << bits) - 1);
    vfloat low = FLT_MAX, high = -FLT_MAX, largest = 0.0f, cover, covered;
    Search search = {x, n, bits};
    float factor[8];

    vstore8(factors, 0, factor);
    for (int i = 0; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        largest = fabs(x[i]) > largest ? fabs(x[i]) : largest;
    }
    cover = (high - low) * (1.0f / top);
    covered = largest * (1.0f / (0.5f * top + 1.75f));
    cover = cover > covered ? cover : covered;
    search.step = step_round(cover);
    search.quarters = 0.0f;
    search.error = INFINITY;
    for (int i = 0; i < (PLAIN_LEVELS ? 1 : 6); i++) {
        vfloat step = step_round(PLAIN_LEVELS ? cover : cover * factor[i]);
        vfloat quarters = offset_clamp((high + low) * step_inverse(step) * 2.0f);

        search_try(&search, step, integer_round(quarters));
    }
    if (!PLAIN_LEVELS)
        search_refine(&search, factor[6]);
    return search;
}

static inline Coder coder_make(const vfloat *x, int n, int bits, float8 factors, vuint *ret_scale, vuint *ret_zero)
{
    Search best = search_scale(x, n, bits, factors);

    *ret_scale = step_bits(best.step) | AS_VUINT(TO_VINT(best.quarters + 8.0f));
    *ret_zero = 0;
    return (Coder){step_inverse(best.step), best.quarters};
}

static inline vint coder_code(vfloat x, Coder coder, int bits)
{
    return level_codes(x, coder.a, coder.b, bits);
}

#elif FORM == 3 || FORM == 4

static inline vfloat half_round(vfloat x)
{
    vfloat magnitude = half_value(half_bits(fabs(x)));

    return x < 0.0f ? -magnitude : magnitude;
}

static inline vfloat input_round(vfloat x)
{
    x = x > -32752.0f ? x : x <= -32752.0f ? (vfloat)(-32752.0f) : (vfloat)(0.0f);
    return half_round(x < 32752.0f ? x : (vfloat)(32752.0f));
}

static inline vuint signed_half_bits(vfloat x)
{
    return half_bits(fabs(x)) | (x < 0.0f ? (vuint)(0x8000u) : (vuint)(0u));
}

static inline void group_range(const vfloat *x, int n, vfloat *ret_low, vfloat *ret_high)
{
    *ret_low = FLT_MAX;
    *ret_high = -FLT_MAX;
    for (int i = 0; i < n; i++) {
        vfloat y = input_round(x[i]);

        *ret_low = y < *ret_low ? y : *ret_low;
        *ret_high = y > *ret_high ? y : *ret_high;
    }
}
#endif

#if FORM == 3

static inline Coder coder_make(const vfloat *x, int n, int bits, float8 factors, vuint *ret_scale, vuint *ret_zero)
{
    vfloat low, high, scale;

    group_range(x, n, &low, &high);
    scale = half_round(quotient(half_round(high - low), (vfloat)((float)((1 << bits) - 1))));
    *ret_scale = half_bits(scale);
    *ret_zero = signed_half_bits(0.0f - low);
    return (Coder){scale, low};
}

static inline vint coder_code(vfloat x, Coder coder, int bits)
{
    const float top = (float)((1 << bits) - 1);
    vfloat distance = half_round(input_round(x) - coder.b);
    vfloat t = half_round(quotient(distance, coder.a > 0.0f ? coder.a : (vfloat)(1.0f)));

    t = coder.a > 0.0f ? t : distance > 0.0f ? (vfloat)(top) : (vfloat)(0.0f);
    return TO_VINT(integer_round(clamp_code(t, top)));
}

#elif FORM == 4

#define HQQ_LANES 64
#define ZERO_MOST 64992.0f

static inline vfloat hqq_power(vfloat u)
{
    vfloat y = AS_VFLOAT((vuint)(0x5285a1cau) - AS_VUINT(u) / 10u * 3u);

    for (int i = 0; i < 4; i++) {
        vfloat w = u * y * y * y;

        y = fma(y * 0.1f, 1.0f - w * w * w * y, y);
    }
    return y;
}

static inline vfloat shrink(vfloat u)
{
    vfloat size = fabs(u), rest = size - 0.1f * hqq_power(size < 0.16f ? (vfloat)(0.16f) : size);

    rest = size >= 0.16f && rest > 0.0f ? rest : (vfloat)(0.0f);
    return u < 0.0f ? -rest : rest;
}

static inline vfloat hqq_code(vfloat x, vfloat scale, vfloat zero, float top)
{
    return integer_round(clamp_code(x * scale + zero, top));
}

/* A sum beside its rounding errors. */
typedef struct { vfloat high, low; } Sum;

static inline void sum_add(Sum *sum, vfloat x)
{
    vfloat high = sum->high + x, added = high - sum->high;

    sum->low += (sum->high - (high - added)) + (x - added);
    sum->high = high;
}

static inline vfloat next_zero(const vfloat *x, int n, vfloat scale, vfloat zero, float top, vfloat *ret_error)
{
    vfloat zeros[HQQ_LANES];
    Sum errors[HQQ_LANES];

    for (int i = 0; i < HQQ_LANES; i++)
        zeros[i] = errors[i].high = errors[i].low = 0.0f;
    for (int i = 0; i < n; i++) {
        vfloat y = input_round(x[i]), code = hqq_code(y, scale, zero, top), error = y - quotient(code - zero, scale);

        zeros[i % HQQ_LANES] += code - (y - shrink(error)) * scale;
        sum_add(&errors[i % HQQ_LANES], fabs(error));
    }
    for (int width = HQQ_LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) {
            zeros[i] += zeros[i + width];
            sum_add(&errors[i], errors[i + width].high);
            errors[i].low += errors[i + width].low;
        }
    *ret_error = quotient(errors[0].high + errors[0].low, (vfloat)((float)n));
    return quotient(zeros[0], (vfloat)((float)n));
}

/* Lanes that have stopped keep their zero. */
static inline Coder coder_make(const vfloat *x, int n, int bits, float8 factors, vuint *ret_scale, vuint *ret_zero)
{
    const float top = (float)((1 << bits) - 1);
    vfloat low, high, range, scale, zero, most, far, best = INFINITY, going = 1.0f;

    group_range(x, n, &low, &high);
    range = high - low;
    scale = range <= 1e-4f ? (vfloat)(1.0f) : quotient((vfloat)(1.0f), range <= 1e-4f ? (vfloat)(1.0f) : range) * top;
    scale = scale > 2e4f ? (vfloat)(2e4f) : scale;
    zero = -low * scale;
    for (int i = 0; i < 20; i++) {
        vfloat error, next = next_zero(x, n, scale, zero, top, &error);

        zero = going > 0.0f ? next : zero;
        going = error < best ? going : (vfloat)(0.0f);
        best = error < best ? error : best;
        if (vector_max(going) == 0.0f)
            break;
    }
    most = fabs(low) > fabs(high) ? fabs(low) : fabs(high);
    far = quotient((vfloat)(ZERO_MOST), most > 1.0f ? most : (vfloat)(1.0f));
    scale = fabs(zero) > ZERO_MOST ? far : scale;
    zero = fabs(zero) > ZERO_MOST ? 0.0f - low * far : zero;
    *ret_scale = half_bits(quotient((vfloat)(1.0f), scale));
    *ret_zero = signed_half_bits(zero);
    return (Coder){scale, zero};
}

static inline vint coder_code(vfloat x, Coder coder, int bits)
{
    return TO_VINT(hqq_code(input_round(x), coder.a, coder.b, (float)((1 << bits) - 1)));
}

#elif FP8

static inline vint coder_code(vfloat x, Coder coder, int bits)
{
    vfloat magnitude = fabs(x);
    vuint number;

    magnitude = magnitude < 448.0f * coder.a ? quotient(magnitude, coder.a) : (vfloat)(448.0f);
    number = AS_VUINT(magnitude);
    number = (number + 0x7ffffu + ((number >> 20) & 1u) - 0x3c000000u) >> 20;
    number = magnitude < 0x1p-6f ? AS_VUINT(TO_VINT(integer_round(magnitude * 512.0f))) : number;
    number |= (AS_VUINT(x) >> 24) & 0x80u;
    return AS_VINT(x == x ? number : (vuint)(0u));
}
#endif
