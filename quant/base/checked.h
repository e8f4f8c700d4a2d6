#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic on untrusted sizes: false on overflow, and the result is then untouched. */

#include <stdbool.h>
#include <stdint.h>

static inline bool checked_add(uint64_t a, uint64_t b, uint64_t *ret)
{
    uint64_t sum;

    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *ret = sum;
    return true;
}

static inline bool checked_mul(uint64_t a, uint64_t b, uint64_t *ret)
{
    uint64_t product;

    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *ret = product;
    return true;
}

/* Rounds up to a multiple of @alignment, a power of two. */
static inline bool checked_align(uint64_t value, uint64_t alignment, uint64_t *ret)
{
    uint64_t sum;

    if (!checked_add(value, alignment - 1, &sum))
        return false;
    *ret = sum & ~(alignment - 1);
    return true;
}
