#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Objects by a number that is never reused: a sorted array, because ids grow and tables are small (hundreds). */

#include <stddef.h>
#include <stdint.h>

typedef struct IdEntry {
    uint64_t id;
    void *object; /* borrowed */
} IdEntry;

typedef struct IdTable {
    IdEntry *entries;
    size_t n, capacity;
} IdTable;
#define ID_TABLE_NULL ((IdTable){NULL, 0, 0})

/* 0, -EEXIST, -ENOMEM. */
int id_table_add(IdTable *table, uint64_t id, void *object);
/* The object, or NULL. */
void *id_table_find(const IdTable *table, uint64_t id);
/* Removes it and returns it, or NULL. */
void *id_table_remove(IdTable *table, uint64_t id);
/* Forgets everything; the objects are the caller's. */
void id_table_clear(IdTable *table);
