/* SPDX-License-Identifier: Apache-2.0 */
/* The table of bits in Model.Estimate: what each costs, what it was measured to add, which is in use and why. */

#include "daemon/engine/engine-internal.h"

#include <jansson.h>

/* Why a candidate has no number; NULL: it has. */
static const char *missing_number(const NbitsEntry *entry, bool settled)
{
    switch (entry->state) {
    case NBITS_OPEN:
        return settled ? "not needed" : "not measured";
    case NBITS_MEASURED:
        return NULL;
    case NBITS_REFUSED:
        return entry->reason;
    }
    return NULL;
}

static json_t *candidate_json(const NbitsEntry *entry, const KvForm *used, bool settled)
{
    json_t *json = json_pack("{s:i, s:i, s:f, s:b}", "k", entry->k_bits, "v", entry->v_bits, "true-bits", entry->true_bits, "used",
                             entry->k_bits == used->k_bits && entry->v_bits == used->v_bits);
    const char *missing = missing_number(entry, settled);

    if (json && missing)
        (void)json_object_set_new(json, "state", json_string(missing));
    else if (json)
        (void)json_object_set_new(json, "kld", json_real(entry->kld));
    return json;
}

json_t *estimate_bits_json(const ModelFile *file, bool exact, const KvPolicy *asked, const KvForm *used)
{
    KvPolicy all = *asked;
    bool settled = true;
    NbitsTable table;
    json_t *json, *candidates;

    if (!kv_form_is_coded(asked->form) || asked->is_compatible)
        return NULL;
    if (kv_form_is_auto(asked->form))
        (void)model_nbits_resolve(file, exact, asked, &settled);
    else
        settled = false; /* others were not measured because nobody asked */
    all.form.k_bits = all.form.v_bits = KV_BITS_AUTO;
    candidates = json_array();
    json = json_pack("{s:s, s:i, s:i, s:f, s:o}", "choice",
                     !kv_form_is_auto(asked->form) ? "configured" : settled ? "measured" : "usual", "k", used->k_bits, "v", used->v_bits,
                     "kld-budget", asked->kld_budget, "candidates", candidates);
    if (!json || model_nbits_table(file, exact, &all, &table, NULL)) {
        json_decref(json);
        return NULL;
    }
    if (table.rounding > 0)
        (void)json_object_set_new(json, "kld-of-rounding", json_real(table.rounding));
    for (uint32_t i = 0; i < table.n; i++)
        (void)json_array_append_new(candidates, candidate_json(&table.entries[i], used, settled));
    return json;
}
