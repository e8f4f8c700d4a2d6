/* SPDX-License-Identifier: Apache-2.0 */
/* Automatic bits: the candidates, which to measure next, which is chosen. */

#include "daemon/model/nbits.h"

#include <string.h>

/* ---- candidates ------------------------------------------------------------------------------------------------------------- */

static bool is_candidate(KvForm form, uint32_t k_bits, uint32_t v_bits)
{
    uint32_t allowed = kv_form_bits(form.kind);

    return allowed >> k_bits & 1 && allowed >> v_bits & 1 && (form.k_bits == KV_BITS_AUTO || form.k_bits == k_bits) &&
           (form.v_bits == KV_BITS_AUTO || form.v_bits == v_bits);
}

/* The cheaper first; of equals that with more bits for K, the more sensitive side of most models. */
static int compare_entries(const void *a, const void *b)
{
    const NbitsEntry *x = a, *y = b;

    if (x->true_bits < y->true_bits || x->true_bits > y->true_bits)
        return x->true_bits < y->true_bits ? -1 : 1;
    return (int)y->k_bits - (int)x->k_bits;
}

static void add_entry(NbitsTable *table, KvForm form, const KvShape *shape)
{
    NbitsEntry *entry = &table->entries[table->n++];
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvLayout layout;

    *entry = (NbitsEntry){.k_bits = form.k_bits, .v_bits = form.v_bits, .true_bits = kv_true_bits(form, shape, NBITS_AT_TOKENS, 16)};
    if (kv_layout(form, shape, &layout, &detail) == 0)
        return;
    entry->state = NBITS_REFUSED;
    (void)snprintf(entry->reason, sizeof(entry->reason), "%.*s", (int)sizeof(entry->reason) - 1, detail.text);
}

int nbits_table_init(NbitsTable *table, KvForm form, const KvShape *shape, ErrorDetail *reterr)
{
    KvForm candidate = form;

    *table = (NbitsTable){.n = 0};
    for (uint32_t k = 1; k <= KV_MAX_BITS; k++)
        for (uint32_t v = 1; v <= KV_MAX_BITS; v++)
            if (is_candidate(form, k, v) && table->n < NBITS_MAX) {
                candidate.k_bits = (uint8_t)k;
                candidate.v_bits = (uint8_t)v;
                add_entry(table, candidate, shape);
            }
    if (table->n == 0)
        return error_detail_set(reterr, -EINVAL, "form %s has no bits to choose from", kv_form_kind_to_string(form.kind));
    qsort(table->entries, table->n, sizeof(table->entries[0]), compare_entries);
    return 0;
}

/* ---- the search -------------------------------------------------------------------------------------------------------------- */

static bool no_more_bits(const NbitsEntry *a, const NbitsEntry *b)
{
    return a->k_bits <= b->k_bits && a->v_bits <= b->v_bits;
}

static bool is_within(const NbitsEntry *entry, double budget)
{
    return entry->state == NBITS_MEASURED && entry->kld <= budget;
}

/* The cheapest that was measured within the budget, NULL: none. */
static const NbitsEntry *find_best(const NbitsTable *table, double budget)
{
    const NbitsEntry *best = NULL;

    for (uint32_t i = 0; i < table->n; i++) {
        const NbitsEntry *entry = &table->entries[i];

        if (best && entry->true_bits > best->true_bits)
            break;
        if (is_within(entry, budget) && (!best || entry->kld < best->kld))
            best = entry;
    }
    return best;
}

/* Whether the answer may still depend on it. */
static bool is_unsettled(const NbitsTable *table, const NbitsEntry *entry, const NbitsEntry *best, double budget)
{
    if (entry->state != NBITS_OPEN || (best && entry->true_bits >= best->true_bits))
        return false;
    for (uint32_t i = 0; i < table->n; i++) {
        const NbitsEntry *other = &table->entries[i];

        if (other->state == NBITS_MEASURED && other->kld > budget && no_more_bits(entry, other))
            return false;
    }
    return true;
}

/* How many others would be settled, whichever way it ends: when within, those that are no cheaper; when beyond, those with no more bits. */
static uint32_t worth(const NbitsTable *table, const bool *unsettled, uint32_t index)
{
    uint32_t within = 0, beyond = 0;

    for (uint32_t i = 0; i < table->n; i++) {
        within += unsettled[i] && table->entries[i].true_bits >= table->entries[index].true_bits;
        beyond += unsettled[i] && no_more_bits(&table->entries[i], &table->entries[index]);
    }
    return MIN(within, beyond) * NBITS_MAX * 2 + within + beyond;
}

bool nbits_next(const NbitsTable *table, double budget, uint32_t *ret)
{
    const NbitsEntry *best = find_best(table, budget);
    bool unsettled[NBITS_MAX], found = false;
    uint32_t most = 0;

    if (table->n == 1)
        return false; /* no choice, whatever it costs */
    for (uint32_t i = 0; i < table->n; i++)
        unsettled[i] = is_unsettled(table, &table->entries[i], best, budget);
    for (uint32_t i = 0; i < table->n; i++) {
        uint32_t w = unsettled[i] ? worth(table, unsettled, i) : 0;

        if (w > most) {
            most = w;
            *ret = i;
            found = true;
        }
    }
    return found;
}

uint32_t nbits_choice(const NbitsTable *table, double budget)
{
    const NbitsEntry *best = find_best(table, budget);
    uint32_t next;

    if (nbits_next(table, budget, &next))
        return NBITS_NO_CHOICE;
    if (best)
        return (uint32_t)(best - table->entries);
    for (uint32_t i = table->n; i-- > 0;)
        if (table->entries[i].state != NBITS_REFUSED)
            return i;
    return NBITS_NO_CHOICE;
}
