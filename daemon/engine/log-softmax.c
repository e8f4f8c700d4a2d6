/* SPDX-License-Identifier: Apache-2.0 */
/* Logits to log-probabilities. */

#include "daemon/engine/log-softmax.h"
#include "quant/base/cleanup.h"

#include <math.h>
#include <string.h>

/* Four at a time: a step of beams takes the exponential of every logit of every beam, which one by one would cost a tenth of the step. */
typedef float Floats __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
#define SOFTMAX_LANES 4
/* Sums of float32 lanes are moved to double before they lose digits. */
#define SOFTMAX_BLOCK 256

/* exp(x) for x <= 0, within 2e-7 of itself and 1e-7 more for each unit of x; 0 where it is below 2^-126.  2^(x log2 e) by the nearest integer, found by adding 1.5 * 2^23 (the
 * sum's last bits are then that integer), and a polynomial of the rest: the series of 2^f, which is 2e-9 off at |f| = 0.5 after f^7. */
static Floats exp_of(Floats x)
{
    const float magic = 12582912.0f;
    Floats t = x * 1.44269504f, shifted, f, p;
    Bits normal = (Bits)(t >= -126.0f);

    shifted = t + magic;
    f = t - (shifted - magic);
    p = 0.000154035304f + f * 0.0000152527338f;
    p = 1.0f + f * (0.693147181f + f * (0.240226507f + f * (0.0555041087f + f * (0.00961812911f + f * (0.00133335581f + f * p)))));
    return (Floats)(((Bits)p + ((Bits)shifted << 23)) & normal);
}

static double exp_sum(const float *x, uint32_t n, float max)
{
    double sum = 0;
    uint32_t i = 0;

    while (i + SOFTMAX_LANES <= n) {
        uint32_t end = MIN(n - SOFTMAX_LANES, i + SOFTMAX_BLOCK - SOFTMAX_LANES);
        Floats lanes = {0};

        for (; i <= end; i += SOFTMAX_LANES) {
            Floats four;

            memcpy(&four, x + i, sizeof(four));
            lanes += exp_of(four - max);
        }
        for (int k = 0; k < SOFTMAX_LANES; k++)
            sum += (double)lanes[k];
    }
    for (; i < n; i++)
        sum += (double)expf(x[i] - max);
    return sum;
}

/* The largest; false when one is no number or infinite: the exponent is then all ones. */
static bool max_of(const float *x, uint32_t n, float *ret)
{
    Floats most = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    Bits bad = {0};
    float max = -INFINITY;
    bool finite = true;
    uint32_t i = 0;

    for (; i + SOFTMAX_LANES <= n; i += SOFTMAX_LANES) {
        Floats four;
        Bits more;

        memcpy(&four, x + i, sizeof(four));
        bad |= (Bits)(((Bits)four & 0x7f800000u) == 0x7f800000u);
        more = (Bits)(four > most);
        most = (Floats)(((Bits)four & more) | ((Bits)most & ~more));
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

bool log_softmax(float *logits, uint32_t n)
{
    float max, log_sum;

    if (!max_of(logits, n, &max))
        return false;
    log_sum = (float)log(exp_sum(logits, n, max));
    for (uint32_t i = 0; i < n; i++)
        logits[i] = logits[i] - max - log_sum; /* in upstream's order: a large maximum costs no digits */
    return true;
}
