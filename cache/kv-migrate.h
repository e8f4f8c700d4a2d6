#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sequences move to another store while they live: other growth, home, ring, budget, and when asked another form.
 *
 * The target is built in full beside the source; then handles change over, which cannot fail.  What sequences share in the source
 * (blocks, tails, states, saved tails) they share in the target.  Pages of equal forms are copied as they are, so a sequence goes on
 * with the same bits.  Costs one copy of everything, on the host's clock; both copies exist for a moment.
 */

#include "cache/kv-store.h"

/* Whether a sequence of @from goes on in @to with the same bits: the same layers with the same forms, or the same compatibility mode. */
bool kv_store_is_same(const KvStore *from, const KvStore *to);

/* @caches (no duplicates, none in a pass, all of one store) become caches of @to, all or none; handles stay.  With @lossy pages of other
 * forms are coded anew from what they stand for, and checkpoints are dropped; without it other forms are -EINVAL, as are models of
 * different layers; into or out of compatibility mode, or between two of them with other keys, is -ENOTSUP.  KvError or negative errno. */
int kv_caches_migrate(KvCache *const *caches, uint32_t n, KvStore *to, bool lossy, ErrorDetail *reterr);
/* All caches of @from. */
int kv_store_migrate(KvStore *from, KvStore *to, bool lossy, ErrorDetail *reterr);
