/* SPDX-License-Identifier: Apache-2.0 */
/* Objects by id. */

#include "daemon/bus/id-table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The place of @id, or where it would go. */
static size_t id_table_place(const IdTable *table, uint64_t id)
{
    size_t low = 0, high = table->n;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (table->entries[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int id_table_add(IdTable *table, uint64_t id, void *object)
{
    size_t place = id_table_place(table, id);

    if (place < table->n && table->entries[place].id == id)
        return -EEXIST;
    if (table->n == table->capacity) {
        size_t capacity = table->capacity ? table->capacity * 2 : 16;
        IdEntry *entries = reallocarray(table->entries, capacity, sizeof(*entries));

        if (!entries)
            return -ENOMEM;
        table->entries = entries;
        table->capacity = capacity;
    }
    memmove(&table->entries[place + 1], &table->entries[place], (table->n - place) * sizeof(IdEntry));
    table->entries[place] = (IdEntry){id, object};
    table->n++;
    return 0;
}

void *id_table_find(const IdTable *table, uint64_t id)
{
    size_t place = id_table_place(table, id);

    return place < table->n && table->entries[place].id == id ? table->entries[place].object : NULL;
}

void *id_table_remove(IdTable *table, uint64_t id)
{
    size_t place = id_table_place(table, id);
    void *object;

    if (place >= table->n || table->entries[place].id != id)
        return NULL;
    object = table->entries[place].object;
    table->n--;
    memmove(&table->entries[place], &table->entries[place + 1], (table->n - place) * sizeof(IdEntry));
    return object;
}

void id_table_clear(IdTable *table)
{
    free(table->entries);
    *table = ID_TABLE_NULL;
}
