#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* One migration in progress, for cache/kv-migrate*.c. */

#include "cache/kv-migrate.h"
#include "cache/kv-store-internal.h"

/* Objects of the source, and what they became in the target. */
typedef struct KvMoved {
    const void *from;
    void *to;
} KvMoved;

typedef struct KvMovedList {
    KvMoved *entries;
    uint32_t n, n_room;
} KvMovedList;

void *kv_moved_find(const KvMovedList *list, const void *from);
/* KvError. */
int kv_moved_add(KvMovedList *list, const void *from, void *to);

typedef struct KvMigration {
    KvStore *from, *to;
    uint32_t *leads;     /* per section of the target: the section of the source that its first layer is in */
    KvMovedList *blocks; /* per section of the target, by blocks of its lead */
    KvMovedList tails, saved;
} KvMigration;

/* Block @b of section @s of the target, with a reference for the caller: at least the pages that a past, or else a checkpoint, with
 * @n_pages has of it.  KvError or negative errno. */
int kv_migrate_block(KvMigration *m, uint32_t s, const KvPast *past, const KvCheckpoint *checkpoint, uint32_t b, uint32_t n_pages,
                     KvBlock **ret, ErrorDetail *reterr);
/* The tail slot @from of @past as one of the target.  KvError or negative errno. */
int kv_migrate_tail(const KvMigration *m, const KvPast *past, uint8_t *from, uint8_t *to);
/* Whether a layer's pages and tail can be copied as they are. */
bool kv_migrate_is_same(const KvMigration *m, uint32_t l);

/* In another form (kv-migrate-form.c); GpuError or negative errno.  Pages [@first, @end) of block @b of a layer; */
int kv_migrate_plane(const KvMigration *m, uint32_t l, const KvBlock *from, KvBlock *to, uint32_t b, uint32_t first, uint32_t end);
/* and a layer's part of a tail slot, from where the target needs it in full precision. */
int kv_migrate_recent(const KvMigration *m, uint32_t l, const KvPast *past, uint8_t *from, uint8_t *to);
