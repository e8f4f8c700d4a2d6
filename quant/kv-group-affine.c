/* SPDX-License-Identifier: Apache-2.0 */
/* Groups of the forms quanto and hqq, and numbers of fp8, as pages keep them: the references', in f16.  Rules of kv-codec-internal.h. */

#include "quant/kv-codec-internal.h"
#include "quant/kv-fp8.h"
#include "quant/kv-hqq.h"
#include "quant/kv-quanto.h"

#include <float.h>
#include <math.h>

#define INPUT_MOST 32752.0f /* so that a range fits f16 */
#define ZERO_MOST  64992.0f /* with half a code to spare below f16's largest number */

/* What the references are given: finite f16. */
static void round_inputs(const float *x, uint32_t n, float *ret)
{
    for (uint32_t i = 0; i < n; i++) {
        float y = x[i] > -INPUT_MOST ? x[i] : x[i] <= -INPUT_MOST ? -INPUT_MOST : 0.0f; /* NaN: 0 */

        ret[i] = kv_dtype_round(KV_DTYPE_F16, y < INPUT_MOST ? y : INPUT_MOST);
    }
}

KvGroupScale kv_group_quanto(const float *x, uint32_t n, int bits, uint8_t *ret_codes)
{
    float y[KV_MAX_GROUP_DIMS], scale, shift;

    round_inputs(x, n, y);
    kv_quanto_group(KV_DTYPE_F16, (uint8_t)bits, y, n, ret_codes, &scale, &shift);
    return (KvGroupScale){half_from_float(scale), half_from_float(shift + 0.0f)}; /* no -0 */
}

/* Where the zero does not fit f16 (a narrow range far from 0), the reference's values are infinite: a coarser scale that fits. */
static KvGroupScale hqq_far(const float *y, uint32_t n, int bits, uint8_t *ret_codes)
{
    float low = y[0], most = 0.0f, top = (float)((1 << bits) - 1), scale, zero;

    for (uint32_t i = 0; i < n; i++) {
        low = y[i] < low ? y[i] : low;
        most = fabsf(y[i]) > most ? fabsf(y[i]) : most;
    }
    scale = ZERO_MOST / most;
    zero = 0.0f - low * scale;
    for (uint32_t i = 0; i < n; i++) {
        float code = rintf(y[i] * scale + zero);

        code = code > 0.0f ? code : 0.0f;
        ret_codes[i] = (uint8_t)(code < top ? code : top);
    }
    return (KvGroupScale){half_from_float(1.0f / scale), half_from_float(zero)};
}

KvGroupScale kv_group_hqq(const float *x, uint32_t n, int bits, uint8_t *ret_codes)
{
    float y[KV_MAX_GROUP_DIMS], scale, zero;

    round_inputs(x, n, y);
    kv_hqq_group((uint8_t)bits, y, n, ret_codes, &scale, &zero);
    if (fabsf(zero) > ZERO_MOST)
        return hqq_far(y, n, bits, ret_codes);
    return (KvGroupScale){half_from_float(scale), half_from_float(zero + 0.0f)};
}

uint8_t kv_group_fp8(float x, float scale)
{
    return isnan(x) ? 0 : kv_fp8_encode(x / scale);
}
