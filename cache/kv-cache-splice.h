#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Recent tokens put together from two places, to go back into the middle of a pass.
 *
 * A recorded sequence has a checkpoint from before each pass that overwrote recent tokens.  To go on from a length behind it, what the
 * checkpoint had (up to its end) and what the pass added (in the ring now, or in a later checkpoint) are both needed, and together they
 * are all of it.
 */

#include "cache/kv-store-internal.h"

typedef struct KvSplice {
    const KvCheckpoint *older, *newer; /* newer NULL: the past itself */
} KvSplice;

/* Two places between which @length lies; false when there are none.  They need not reach it in each section: kv_splice_reaches(). */
bool kv_splice_find(const KvPast *past, uint32_t length, KvSplice *ret);
bool kv_splice_reaches(const KvPast *past, const KvSplice *splice, uint32_t s, uint32_t length);
/* What a past that goes back to @length holds then, in host memory; sections[].tail_from say where it is complete from.  Only on success:
 * KvError. */
int kv_splice_tail(KvPast *past, const KvSplice *splice, uint32_t length, KvTail **ret, ErrorDetail *reterr);

/* Whether a windowed section has the pages that are in sight at @length. */
static inline bool kv_section_sees(const KvPast *past, uint32_t s, uint32_t length)
{
    const KvSection *section = &past->store->sections[s];

    return !kv_section_is_windowed(section) || kv_section_first_page(&past->sections[s]) <= kv_kept_page(section, length);
}
