/* SPDX-License-Identifier: Apache-2.0 */
/* Logits to log-probabilities. */

#include "daemon/engine/log-softmax.h"
#include "quant/base/cleanup.h"

#include <math.h>
#include <string.h>

/*
 * Sixteen at a time, whatever the machine has for it: a step of beams takes the exponential of every logit of every beam, which one by one
 * would cost a tenth of the step.  Vectors wider than the machine's become several, so that all machines sum in the same order.  They go by
 * pointer: by value they would be passed in a way that depends on the machine.
 */
#define SOFTMAX_LANES 16
typedef float Floats __attribute__((vector_size(4 * SOFTMAX_LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * SOFTMAX_LANES)));
/* Sums of float32 lanes are moved to double before they lose digits. */
#define SOFTMAX_BLOCK 1024

#if defined(__x86_64__)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif

/* exp(x) for x <= 0, within 2e-7 of itself and 1e-7 more for each unit of x; 0 where it is below 2^-126.  2^(x log2 e) by the nearest
 * integer, found by adding 1.5 * 2^23 (the sum's last bits are then that integer), and a polynomial of the rest: the series of 2^f, which
 * is 2e-9 off at |f| = 0.5 after f^7. */
static inline __attribute__((always_inline)) void exp_of(Floats *x)
{
    const float magic = 12582912.0f;
    Floats t = *x * 1.44269504f, shifted, f, p;
    Bits normal = (Bits)(t >= -126.0f);

    shifted = t + magic;
    f = t - (shifted - magic);
    p = 0.000154035304f + f * 0.0000152527338f;
    p = 1.0f + f * (0.693147181f + f * (0.240226507f + f * (0.0555041087f + f * (0.00961812911f + f * (0.00133335581f + f * p)))));
    *x = (Floats)(((Bits)p + ((Bits)shifted << 23)) & normal);
}

FOR_EACH_MACHINE static double exp_sum(const float *x, uint32_t n, float max)
{
    double sum = 0;
    uint32_t i = 0;

    while (i + SOFTMAX_LANES <= n) {
        uint32_t end = MIN(n - SOFTMAX_LANES, i + SOFTMAX_BLOCK - SOFTMAX_LANES);
        Floats lanes = {0};

        for (; i <= end; i += SOFTMAX_LANES) {
            Floats some;

            memcpy(&some, x + i, sizeof(some));
            some -= max;
            exp_of(&some);
            lanes += some;
        }
        for (int k = 0; k < SOFTMAX_LANES; k++)
            sum += (double)lanes[k];
    }
    for (; i < n; i++)
        sum += (double)expf(x[i] - max);
    return sum;
}

/* The largest; false when one is no number or infinite: the exponent is then all ones. */
FOR_EACH_MACHINE static bool max_of(const float *x, uint32_t n, float *ret)
{
    Floats most = (Floats){0} - INFINITY;
    Bits bad = {0};
    float max = -INFINITY;
    bool finite = true;
    uint32_t i = 0;

    for (; i + SOFTMAX_LANES <= n; i += SOFTMAX_LANES) {
        Floats some;
        Bits more;

        memcpy(&some, x + i, sizeof(some));
        bad |= (Bits)(((Bits)some & 0x7f800000u) == 0x7f800000u);
        more = (Bits)(some > most);
        most = (Floats)(((Bits)some & more) | ((Bits)most & ~more));
    }
    for (int k = 0; k < SOFTMAX_LANES; k++) {
        max = fmaxf(max, most[k]);
        finite = finite && !bad[k];
    }
    for (; i < n; i++) {
        max = fmaxf(max, x[i]);
        finite = finite && isfinite(x[i]);
    }
    *ret = max;
    return finite;
}

/* In upstream's order: a large maximum costs no digits. */
FOR_EACH_MACHINE static void take_off(float *x, uint32_t n, float max, float log_sum)
{
    uint32_t i = 0;

    for (; i + SOFTMAX_LANES <= n; i += SOFTMAX_LANES) {
        Floats some;

        memcpy(&some, x + i, sizeof(some));
        some = some - max - log_sum;
        memcpy(x + i, &some, sizeof(some));
    }
    for (; i < n; i++)
        x[i] = x[i] - max - log_sum;
}

bool log_softmax(float *logits, uint32_t n)
{
    float max;

    if (!max_of(logits, n, &max))
        return false;
    take_off(logits, n, max, (float)log(exp_sum(logits, n, max)));
    return true;
}

FOR_EACH_MACHINE static uint32_t skip_blocks(const float *x, uint32_t i, uint32_t n, float offset, float least)
{
    for (; i + 4 * SOFTMAX_LANES <= n; i += 4 * SOFTMAX_LANES) {
        Bits any = {0};
        uint32_t one = 0;

        for (uint32_t k = 0; k < 4; k++) {
            Floats some;

            memcpy(&some, x + i + k * SOFTMAX_LANES, sizeof(some));
            any |= (Bits)(some + offset >= least);
        }
        for (int k = 0; k < SOFTMAX_LANES; k++)
            one |= any[k];
        if (one)
            break;
    }
    return i;
}

uint32_t log_softmax_next(const float *log_probs, uint32_t first, uint32_t n, float offset, float least)
{
    uint32_t i = skip_blocks(log_probs, first, n, offset, least);

    while (i < n && !(log_probs[i] + offset >= least))
        i++;
    return i;
}
