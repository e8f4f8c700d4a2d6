/* SPDX-License-Identifier: Apache-2.0 */
/* Values for tests of quantised tensors, by integer hashes. */

#include "tests/lib/quant-values.h"

#include <math.h>

uint32_t quant_hash(uint32_t seed, uint32_t i)
{
    uint32_t x = seed * 0x9e3779b1u + i * 0x85ebca77u;

    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

float quant_normal(uint32_t seed, uint32_t i)
{
    int32_t sum = -131070;

    for (uint32_t j = 0; j < 4; j++)
        sum += (int32_t)(quant_hash(seed, 4 * i + j) >> 16);
    return (float)sum / 37837.0f;
}

static const char *const kinds[] = {"normal", "small", "large", "wide", "tiny", "outliers",
                                    "offset", "constant", "sparse", "ties", "zero", "hostile"};

static float value_of(size_t kind, uint32_t seed, uint32_t i, uint32_t n, uint32_t width)
{
    float v = quant_normal(seed, i);

    switch (kind) {
    case 1:
        return v * 0.015625f;
    case 2:
        return v * 1024.0f;
    case 3:
        return v * 16384.0f;
    case 4:
        return v * 0x1p-20f;
    case 5:
        return i % width % 16 == 3 ? v * 16.0f : v;
    case 6:
        return v * 0.125f + 50.0f;
    case 7:
        return quant_normal(seed, i / width);
    case 8:
        return quant_hash(seed, i) % 8 == 0 ? 1.0f : 0.0f;
    case 9:
        return rintf(v * 4.0f) / 8.0f;
    case 10:
        return v * 0.0f;
    case 11:
        return i == 5 ? NAN : i == n - 3 ? INFINITY : v;
    default:
        return v;
    }
}

bool quant_values(const char *kind, uint32_t seed, const KvTensorShape *shape, KvDtype dtype, float *ret)
{
    uint32_t n = shape->n_rows * shape->n_heads * shape->n_tokens * shape->width;
    size_t k = 0;

    while (k < N_ELEMENTS(kinds) && strcmp(kind, kinds[k]) != 0)
        k++;
    if (k == N_ELEMENTS(kinds))
        return false;
    for (uint32_t i = 0; i < n; i++)
        ret[i] = kv_dtype_round(dtype, value_of(k, seed, i, n, shape->width));
    return true;
}

uint64_t quant_digest(const float *x, uint64_t n)
{
    uint64_t digest = 0xcbf29ce484222325u;

    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits = isnan(x[i]) ? 0x7fc00000 : x[i] == 0.0f ? 0 : float_to_bits(x[i]);

        for (int b = 0; b < 4; b++)
            digest = (digest ^ (bits >> 8 * b & 0xff)) * 0x100000001b3u;
    }
    return digest;
}

KvDtype quant_dtype(const char *name)
{
    static const char *const names[] = {"f32", "f16", "bf16"};

    for (int i = 0; i < KV_DTYPE_X_MAX; i++)
        if (strcmp(name, names[i]) == 0)
            return (KvDtype)i;
    return KV_DTYPE_X_INVALID;
}

int64_t quant_unhex(const char *text, uint8_t *ret, size_t max)
{
    size_t n = strlen(text) / 2;

    if (strlen(text) % 2 || n > max)
        return -1;
    for (size_t i = 0; i < n; i++) {
        char byte[3] = {text[2 * i], text[2 * i + 1], 0}, *end;

        ret[i] = (uint8_t)strtoul(byte, &end, 16);
        if (*end)
            return -1;
    }
    return (int64_t)n;
}
